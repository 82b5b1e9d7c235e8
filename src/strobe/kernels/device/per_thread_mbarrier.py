"""Barriers that each thread comes to by itself, where `mbarrier.arrive` comes for all warps of a partition once they have met: what a thread does
next need not wait for the others. They lie in shared memory besides what a kernel allocates, and are known by their address.

    place = bells(count, arrivals)         before the partitions begin
    say(place, i, each=True)               each thread says so: what it wrote before is there for who waits
    await_said(place, i, parity, True)     until all have

Both do the same with barriers of the usual kind, `channel.ring`, where it is not each thread that comes.

Source: PTX ISA, mbarrier.arrive (release.cta is its default) and mbarrier.try_wait (acquire.cta).
"""

from .cluster import inbox
from .dialect import gl, gluon, mbarrier


@gluon.jit
def bells(count: gl.constexpr, arrivals: gl.constexpr):
    """The address of the first of `count` barriers of `arrivals` arrivals each, 8 bytes apart."""
    text: gl.constexpr = _init_text(count, arrivals)
    place = inbox(8 * count)
    thread = _threads()
    gl.inline_asm_elementwise(text, "=r,r,r", [thread * 0 + place, thread], dtype=gl.int32, is_pure=False, pack=1)
    return place


@gluon.constexpr_function
def _init_text(count, arrivals):
    inits = " ".join(f"@one mbarrier.init.shared::cta.b64 [$1+{8 * i}], {arrivals};" for i in range(count))
    return f"{{ .reg .pred one; setp.eq.s32 one, $2, 0; {inits} }} mov.u32 $0, 0;"


@gluon.jit
def _threads():
    """The number of each thread of the partition."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.arange(0, 32 * gl.num_warps(), layout)


@gluon.jit
def say(ready, i, each: gl.constexpr):
    """That what `ready` says with its i-th barrier is so."""
    if each:
        ring_bell(ready + 8 * i)
    else:
        mbarrier.arrive(ready.index(i))


@gluon.jit
def await_said(ready, i, parity, each: gl.constexpr):
    if each:
        await_bell(ready + 8 * i, parity)
    else:
        mbarrier.wait(ready.index(i), parity)


@gluon.jit
def ring_bell(place):
    text: gl.constexpr = "mbarrier.arrive.release.cta.shared::cta.b64 _, [$1]; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(text, "=r,r", [_threads() * 0 + place], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_bell(place, parity):
    """Wait until the phase of this parity is over."""
    text: gl.constexpr = _await_text()
    gl.inline_asm_elementwise(text, "=r,r,r", [place, parity], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _await_text():
    wait = "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 there, [$1], $2;"
    return f"{{ .reg .pred there; AGAIN: {wait} @!there bra AGAIN; }} mov.u32 $0, 0;"
