"""Barriers at which each thread arrives by itself. `mbarrier.arrive` arrives once for all warps of a partition, which
meet before; here no thread waits for the others. The barriers lie in shared memory besides what a kernel allocates, and
are known by their address.

    barriers = per_thread_mbarriers(count, arrivals)     before the partitions begin
    barrier_arrive(barriers, i, per_thread=True)         each thread: what it wrote before is visible to who waits
    barrier_wait(barriers, i, phase, per_thread=True)    until the phase is complete

With per_thread=False both work on barriers of the usual kind (`pipeline.ring`).

Source: PTX ISA, mbarrier.arrive (release.cta is its default) and mbarrier.try_wait (acquire.cta).
"""

from .cluster import inbox
from .dialect import gl, gluon, mbarrier


@gluon.jit
def per_thread_mbarriers(count: gl.constexpr, arrivals: gl.constexpr):
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
def barrier_arrive(barriers, i, per_thread: gl.constexpr):
    if per_thread:
        arrive_per_thread(barriers + 8 * i)
    else:
        mbarrier.arrive(barriers.index(i))


@gluon.jit
def barrier_wait(barriers, i, phase, per_thread: gl.constexpr):
    if per_thread:
        wait_per_thread(barriers + 8 * i, phase)
    else:
        mbarrier.wait(barriers.index(i), phase)


@gluon.jit
def arrive_per_thread(place):
    text: gl.constexpr = "mbarrier.arrive.release.cta.shared::cta.b64 _, [$1]; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(text, "=r,r", [_threads() * 0 + place], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_per_thread(place, phase):
    """Wait until the phase of this parity is over."""
    text: gl.constexpr = _await_text()
    gl.inline_asm_elementwise(text, "=r,r,r", [place, phase], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _await_text():
    wait = "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 there, [$1], $2;"
    return f"{{ .reg .pred there; AGAIN: {wait} @!there bra AGAIN; }} mov.u32 $0, 0;"
