// Search without a server: browsers start no worker from a file: URL, so its script runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.queue = []  // messages that come before the script is loaded
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      const { contentWindow: inside, contentDocument: page } = frame
      inside.postMessage = data => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        if (this.onmessage) this.onmessage(event)
      }
      const load = source => new Promise((resolve, reject) => {
        const script = page.createElement("script")
        script.src = source
        script.onload = resolve
        script.onerror = reject
        page.body.appendChild(script)
      })
      inside.importScripts = (...sources) => sources.reduce((done, one) => done.then(() => load(one)), Promise.resolve())
      load(url).then(() => {
        this.inside = inside
        this.queue.forEach(data => this.postMessage(data))
      })
    }

    postMessage(data) {
      if (this.inside) this.inside.dispatchEvent(new MessageEvent("message", { data }))
      else this.queue.push(data)
    }
  }
}
