"""Programs of a cluster run at the same time and write into each other's shared memory (DSMEM). A launch says how many
they are; they have consecutive program numbers.

    box = inbox(bytes)              shared memory at the same address in all of them
    open_inbox(box, ...)            the inbox expects its bytes; this program has arrived at the cluster's barrier
    cluster_wait()                  all programs have arrived, and their inboxes are open
    send(...)                       two numbers into the inbox of one of them
    await_inbox(box, ...)           all bytes have arrived
    received(...)                   the numbers at places of the inbox

A program may end once its inbox is full: nothing else is sent to it, and what it sent lies in the receivers' memory.

Source: PTX ISA, barrier.cluster, mapa, st.async and mbarrier's transactions.
"""

from .dialect import gl, gluon


@gluon.constexpr_function
def _room(size):
    """Bytes of an inbox with its mbarrier, in whole KiB: the kernel's own allocation follows, and is aligned to one."""
    return (size + 8 + 1023) // 1024 * 1024


@gluon.jit
def inbox(size: gl.constexpr):
    """The address of `size` bytes of shared memory, besides the kernel's own allocation."""
    text: gl.constexpr = _inbox_text(_room(size))
    return gl.inline_asm_elementwise(text, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _inbox_text(room):
    return f"{{ .shared .align 1024 .b8 inbox[{room}]; mov.u32 $0, inbox; }}"


@gluon.jit
def open_inbox(box, size: gl.constexpr):
    """Expect `size` bytes, and arrive at the cluster's barrier."""
    text: gl.constexpr = _open_text(size)
    threads: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    thread = gl.arange(0, 32 * gl.num_warps(), threads)
    gl.inline_asm_elementwise(text, "=r,r,r", [thread * 0 + box, thread], dtype=gl.int32, is_pure=False, pack=1)
    gl.inline_asm_elementwise(
        "barrier.cluster.arrive.release.aligned; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def _open_text(size):
    return (
        "{ .reg .pred one; setp.eq.s32 one, $2, 0; "
        f"@one mbarrier.init.shared::cta.b64 [$1+{size}], 1; "
        f"@one mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1+{size}], {size}; }} mov.u32 $0, 0;"
    )


@gluon.jit
def cluster_wait():
    """Wait until all programs of the cluster have arrived."""
    gl.inline_asm_elementwise(
        "barrier.cluster.wait.acquire.aligned; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def send(pairs, place, program, box, mask, size: gl.constexpr):
    """Send numbers [.., 2 n] to `place` in the inbox of `program`, both of the same shape. A thread holds pairs of the
    numbers, and no two threads hold the same.
    """
    text: gl.constexpr = _send_text(size)
    arguments = [pairs, place, program, place * 0 + box, (place * 0 + mask).to(gl.int32)]
    gl.inline_asm_elementwise(text, "=r,=r,f,f,r,r,r,r,r,r,r,r", arguments, dtype=gl.int32, is_pure=False, pack=2)


@gluon.constexpr_function
def _send_text(size):
    return (
        "{ .reg .pred sent; .reg .b32 there, bell; setp.ne.b32 sent, $10, 0; "
        f"mapa.shared::cluster.u32 there, $4, $6; add.u32 bell, $8, {size}; mapa.shared::cluster.u32 bell, bell, $6; "
        "@sent st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [there], {$2, $3}, [bell]; } "
        "mov.u32 $0, 0; mov.u32 $1, 0;"
    )


@gluon.jit
def await_inbox(box, size: gl.constexpr):
    """Wait until all bytes have arrived."""
    text: gl.constexpr = _await_text(size)
    gl.inline_asm_elementwise(text, "=r,r", [box], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _await_text(size):
    wait = f"mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 there, [$1+{size}], 0;"
    return f"{{ .reg .pred there; AGAIN: {wait} @!there bra AGAIN; }} mov.u32 $0, 0;"


@gluon.jit
def received(place):
    """The numbers at these places of the inbox."""
    return gl.inline_asm_elementwise(
        "ld.shared.f32 $0, [$1];", "=f,r", [place], dtype=gl.float32, is_pure=False, pack=1
    )
