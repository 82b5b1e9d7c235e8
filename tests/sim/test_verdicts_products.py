"""Verdicts on tensor cores: wgmma, mma.sync, tcgen05 with tensor memory; `off` names what is missing or bent."""

import pytest
import torch

from strobe.kernels.device.dialect import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    cp_async_commit,
    cp_async_load,
    cp_async_wait,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    mma_v2,
    tcgen05_commit,
    tcgen05_mma,
    tmem_reg_layout,
    warpgroup_mma,
    warpgroup_mma_wait,
)

SIZE = gl.constexpr(64)


@gluon.constexpr_function
def registers():
    return gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])


@gluon.constexpr_function
def shared(rows):
    return gl.NVMMASharedLayout.get_default_for([rows, 64], gl.float16)


@gluon.jit
def places(rows: gl.constexpr, columns: gl.constexpr, layout: gl.constexpr):
    row, column = gl.arange(0, rows, gl.SliceLayout(1, layout)), gl.arange(0, columns, gl.SliceLayout(0, layout))
    return row[:, None] * columns + column[None, :]


@gluon.jit
def filled(rows: gl.constexpr):
    return gl.full([rows, SIZE], 1.0, gl.float16, registers())


@gluon.jit
def loaded(x, rows: gl.constexpr):
    return gl.load(x + places(rows, SIZE, registers()))


# ---------------------------------------------------------------- wgmma


@gluon.jit
def wgmma_kernel(x, y, out, off: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    a = gl.allocate_shared_memory(gl.float16, [SIZE, SIZE], shared(64), loaded(x, SIZE))  # @wg-a
    b = gl.allocate_shared_memory(gl.float16, [SIZE, SIZE], shared(64), loaded(y, SIZE))  # @wg-b
    if off != "fence":
        fence_async_shared()
    zero = gl.zeros([SIZE, SIZE], gl.float32, layout)
    one = warpgroup_mma(a, b, zero, is_async=True)  # @wg-one
    two = warpgroup_mma(a, b, zero, is_async=True)  # @wg-two
    if off == "operand":
        a.store(filled(SIZE))  # @wg-overwrite
    if off == "never":
        gl.store(out + places(SIZE, SIZE, layout), zero)
    elif off == "past":
        one = warpgroup_mma_wait(1, deps=[one])
        two = warpgroup_mma_wait(1, deps=[two])
        warpgroup_mma_wait(0, deps=[one])
        gl.store(out + places(SIZE, SIZE, layout), one + two)  # @wg-past
    elif off == "one":
        one, two = warpgroup_mma_wait(1, deps=[one, two])
        gl.store(out + places(SIZE, SIZE, layout), one)
        warpgroup_mma_wait(0, deps=[two])
    elif off == "chain":
        three = warpgroup_mma_wait(0, deps=[warpgroup_mma(a, b, one, is_async=True)])
        gl.store(out + places(SIZE, SIZE, layout), three)
    elif off == "at once":
        warpgroup_mma_wait(0, deps=[one, two])
        gl.store(out + places(SIZE, SIZE, layout), warpgroup_mma(a, b, zero))
    else:
        one, two = warpgroup_mma_wait(1 if off == "wait" else 0, deps=[one, two])
        gl.store(out + places(SIZE, SIZE, layout), one + two)  # @wg-use
        warpgroup_mma_wait(0, deps=[one, two])


TIMES = {"": 2, "one": 1, "chain": 2, "at once": 1}


def wgmma(off=""):
    x, y = torch.rand(2, 64, 64).half()
    out = torch.full((64, 64), float("nan"))
    wgmma_kernel[(1,)](x, y, out, off, num_warps=4)
    if off in TIMES:
        torch.testing.assert_close(out, TIMES[off] * (x.float() @ y.float()))


NOT_FENCED = "fence_async_shared is missing in between"
WGMMA = {
    **{off: [] for off in TIMES},
    "fence": [
        ("fence", f"on {name}: wgmma read of {name}", mma, "initial store by main", store, NOT_FENCED)
        for name, store in (("a", "@wg-a"), ("b", "@wg-b"))
        for mma in ("@wg-one", "@wg-two")
    ],
    "wait": [
        (
            "wgmma",
            "main uses an accumulator that no warpgroup_mma_wait has covered yet",
            "@wg-use",
            "issued at",
            "@wg-two",
        )
    ],
    "past": [
        (
            "wgmma",
            "main uses an accumulator that did not pass through the deps of the wait that covers it",
            "@wg-past",
            "issued at",
            "@wg-two",
        )
    ],
    "operand": [("race", "on a: store to a by main", "@wg-overwrite", "read by wgmma read of a", "@wg-two")],
    "never": [
        ("unfinished", "main ends without having waited for its last 2 wgmma operation(s), the last at", "@wg-two")
    ],
}


@pytest.mark.parametrize("off", WGMMA)
def test_wgmma(verdict, off):
    verdict(lambda: wgmma(off), *WGMMA[off])


@gluon.jit
def fill_partition(a, b, bar, out, off: gl.constexpr):
    a.store(filled(SIZE))  # @fill-a
    b.store(filled(SIZE))  # @fill-b
    if off == "writer":
        fence_async_shared()
    mbarrier.arrive(bar)
    if off == "too late":
        fence_async_shared()


@gluon.jit
def multiply_partition(a, b, bar, out, off: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    if off == "too early":
        fence_async_shared()
    mbarrier.wait(bar, 0)
    if off == "reader":
        fence_async_shared()
    total = warpgroup_mma(a, b, gl.zeros([SIZE, SIZE], gl.float32, layout), is_async=True)  # @multiply
    if off != "left":
        total = warpgroup_mma_wait(0, deps=[total])
        gl.store(out + places(SIZE, SIZE, layout), total)


@gluon.jit
def two_kernel(out, off: gl.constexpr):
    a = gl.allocate_shared_memory(gl.float16, [SIZE, SIZE], shared(64))
    b = gl.allocate_shared_memory(gl.float16, [SIZE, SIZE], shared(64))
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    gl.warp_specialize(
        [(fill_partition, (a, b, bar, out, off)), (multiply_partition, (a, b, bar, out, off))], [4], [64]
    )


@pytest.mark.parametrize("off", ["writer", "reader", "too early", "too late", "left"])
def test_a_fence_on_either_side_of_the_barrier(verdict, off):
    """Right after the write by the writer, or right before the product by the reader; not before the wait, not after
    the arrival.
    """

    def start():
        out = torch.full((64, 64), float("nan"))
        two_kernel[(1,)](out, off, num_warps=4)
        assert off not in ("writer", "reader") or torch.equal(out, torch.full((64, 64), 64.0))

    missing = [
        (
            "fence",
            f"on {name}",
            "wgmma read",
            "by wgmma of 0/multiply_partition",
            "@multiply",
            "by fill_partition",
            mark,
            NOT_FENCED,
        )
        for name, mark in (("a", "@fill-a"), ("b", "@fill-b"))
    ]
    left = (
        [("unfinished", "multiply_partition ends without having waited for its last 1 wgmma operation(s)", "@multiply")]
        if off == "left"
        else []
    )
    verdict(start, *(missing if off not in ("writer", "reader") else []), *left)


@gluon.jit
def copied_kernel(x, out, off: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    a = gl.allocate_shared_memory(gl.float16, [SIZE, SIZE], shared(64))
    cp_async_load(a, x + places(SIZE, SIZE, registers()))  # @copied
    cp_async_commit()
    if off == "fence first":
        fence_async_shared()
    if off != "wait":
        cp_async_wait(0)
    if off == "" or off == "wait":
        fence_async_shared()
    total = warpgroup_mma(a, a, gl.zeros([SIZE, SIZE], gl.float32, layout))  # @copied-mma
    cp_async_wait(0)
    gl.store(out + places(SIZE, SIZE, layout), total)


COPIED = {
    "": [],
    "fence": [("fence", "on a: wgmma read of a", "@copied-mma", "cp.async into a", "@copied", NOT_FENCED)],
    "fence first": [("fence", "on a: wgmma read of a", "@copied-mma", "cp.async into a", "@copied", NOT_FENCED)],
    "wait": [("race", "on a: wgmma read of a", "@copied-mma", "written by cp.async into a", "@copied")],
}


@pytest.mark.parametrize("off", COPIED)
def test_wgmma_of_what_cp_async_copied(verdict, off):
    def start():
        x, out = torch.rand(64, 64).half(), torch.full((64, 64), float("nan"))
        copied_kernel[(1,)](x, out, off, num_warps=4)
        if not off:
            torch.testing.assert_close(out, x.float() @ x.float())

    verdict(start, *COPIED[off])


# ---------------------------------------------------------------- mma.sync


@gluon.jit
def mma_kernel(x, out, off: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, 2], [16, 8])
    a = gl.allocate_shared_memory(gl.float16, [SIZE, SIZE], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    cp_async_load(a, x + places(SIZE, SIZE, registers()))  # @sync-copy
    cp_async_commit()
    if off != "wait":
        cp_async_wait(0)
    left = a.load(gl.DotOperandLayout(0, layout, 2))  # @left
    right = a.load(gl.DotOperandLayout(1, layout, 2))  # @right
    cp_async_wait(0)
    if off == "overwrite":
        a.store(filled(SIZE))  # the operands are in registers
    total = mma_v2(left, right, gl.zeros([SIZE, SIZE], gl.float32, layout))
    gl.store(out + places(SIZE, SIZE, layout), total)


MMA = {
    "": [],
    "overwrite": [],
    "wait": [("race", "on a: load of a", mark, "cp.async into a", "@sync-copy") for mark in ("@left", "@right")],
}


@pytest.mark.parametrize("off", MMA)
def test_mma_from_registers_is_done_at_once(verdict, off):
    def start():
        x, out = torch.rand(64, 64).half(), torch.full((64, 64), float("nan"))
        mma_kernel[(1,)](x, out, off, num_warps=4)
        if off != "wait":
            torch.testing.assert_close(out, x.float() @ x.float())

    verdict(start, *MMA[off], target="sm_80")


# ---------------------------------------------------------------- tcgen05

ROWS = gl.constexpr(128)


@gluon.jit
def tcgen05_kernel(out, off: gl.constexpr):
    acc_layout: gl.constexpr = TensorMemoryLayout([ROWS, ROWS], col_stride=1)
    layout: gl.constexpr = tmem_reg_layout(gl.float32, (ROWS, ROWS), acc_layout, 4)
    a = gl.allocate_shared_memory(gl.float16, [ROWS, SIZE], shared(128), filled(ROWS))  # @tc-a
    acc = allocate_tensor_memory(gl.float32, [ROWS, ROWS], acc_layout)
    bar = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bar.index(0), count=1)
    mbarrier.init(bar.index(1), count=1)
    if off != "fence":
        fence_async_shared()
    if off == "commit first":
        tcgen05_commit(bar.index(0))
    if off == "stored":
        acc.store(gl.full([ROWS, ROWS], 1.0, gl.float32, layout))
    tcgen05_mma(a, a.permute((1, 0)), acc, use_acc=off == "unwritten" or off == "stored")  # @tc-mma
    if off == "twice" or off == "commit between":
        if off == "commit between":
            tcgen05_commit(bar.index(0))
        tcgen05_mma(a, a.permute((1, 0)), acc, use_acc=True)  # @tc-again
    if off == "operand":
        a.store(filled(ROWS))  # @tc-overwrite
    if off == "attached":
        tcgen05_mma(a, a.permute((1, 0)), acc, use_acc=False, mbarriers=[bar.index(0)])
    elif off != "no commit" and off != "no commit, no wait" and off != "commit first" and off != "commit between":
        tcgen05_commit(bar.index(0))
    if off != "wait" and off != "no commit, no wait":
        mbarrier.wait(bar.index(0), 0)  # @tc-wait
    value = acc.load(layout)  # @tc-load
    gl.store(out + places(ROWS, ROWS, layout), value)
    if off == "left":
        tcgen05_mma(a, a.permute((1, 0)), acc, use_acc=False)  # @tc-left


EARLY = ("race", "on acc: load of acc by main", "@tc-load", "written by tcgen05.mma into acc by tcgen05 of 0/main")
LEFT = ("unfinished", "the CTA ends without having waited for tcgen05.mma into acc")
TCGEN05 = {
    "": [],
    "twice": [],
    "stored": [],
    "attached": [],
    "fence": [("fence", "on a: tcgen05 read of a", "@tc-mma", "initial store by main", "@tc-a", NOT_FENCED)],
    "wait": [(*EARLY, "@tc-mma"), (*LEFT, "@tc-mma")],
    "no commit": [("deadlock", "main waits for parity 0 of bar[0] (phase 0: 1 of 1 arrivals", "@tc-wait")],
    "no commit, no wait": [(*EARLY, "@tc-mma"), (*LEFT, "@tc-mma")],
    "commit first": [(*EARLY, "@tc-mma"), (*LEFT, "@tc-mma")],
    "commit between": [(*EARLY, "@tc-again"), (*LEFT, "@tc-again")],
    "unwritten": [("uninitialised", "tcgen05.mma into acc", "reads acc, all of which was never written", "@tc-mma")],
    "operand": [("race", "on a: store to a by main", "@tc-overwrite", "read by tcgen05 read of a", "@tc-mma")],
    "left": [(*LEFT, "@tc-left")],
}


@pytest.mark.parametrize("off", TCGEN05)
def test_tcgen05(verdict, off):
    def start():
        out = torch.full((128, 128), float("nan"))
        tcgen05_kernel[(1,)](out, off, num_warps=4)
        if off in ("", "twice", "stored", "attached"):
            assert torch.equal(out, torch.full((128, 128), {"twice": 128.0, "stored": 65.0}.get(off, 64.0)))

    verdict(start, *TCGEN05[off], target="sm_100", seeds=5)


@gluon.jit
def issue_partition(a, acc, ready, turn):
    tcgen05_mma(a, a.permute((1, 0)), acc, use_acc=False)  # @issue
    tcgen05_commit(turn)
    tcgen05_commit(ready)


@gluon.jit
def second_partition(a, acc, ready, turn, off: gl.constexpr):
    if off != "turn":
        mbarrier.wait(turn, 0)
    tcgen05_mma(a, a.permute((1, 0)), acc, use_acc=True)  # @second
    tcgen05_commit(ready)


@gluon.jit
def drain_partition(acc, ready, out, off: gl.constexpr):
    layout: gl.constexpr = tmem_reg_layout(gl.float32, (ROWS, ROWS), acc.layout, 4)
    if off != "wait":
        mbarrier.wait(ready, 0)
    gl.store(out + places(ROWS, ROWS, layout), acc.load(layout))  # @drain


@gluon.jit
def issuers_kernel(out, off: gl.constexpr):
    a = gl.allocate_shared_memory(gl.float16, [ROWS, SIZE], shared(128), filled(ROWS))
    acc = allocate_tensor_memory(gl.float32, [ROWS, ROWS], TensorMemoryLayout([ROWS, ROWS], col_stride=1))
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1 if off == "count" else 2)
    mbarrier.init(turn, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (drain_partition, (acc, ready, out, off)),
            (issue_partition, (a, acc, ready, turn)),
            (second_partition, (a, acc, ready, turn, off)),
        ],
        [1, 1],
        [24, 24],
    )


ISSUERS = ("on acc", "tcgen05.mma into acc", "@issue", "@second")
DRAIN = ("on acc", "load of acc by drain_partition", "@drain", "tcgen05.mma into acc")


def issuers(off=""):
    out = torch.full((128, 128), float("nan"))
    issuers_kernel[(1,)](out, off, num_warps=4)
    assert off or torch.equal(out, torch.full((128, 128), 128.0))


def test_products_of_two_issuers_need_a_barrier_between(verdict):
    """Each issuer's products run in order; those of two do not. Accumulated first, the second product also reads what
    nothing wrote.
    """
    verdict(lambda: issuers(), target="sm_100", seeds=5)
    unwritten = [("uninitialised", "tcgen05.mma into acc", "@second")]
    verdict(lambda: issuers("turn"), ("race", *ISSUERS), sometimes=unwritten, target="sm_100", seeds=5)


def test_tensor_memory_read_by_another_partition(verdict):
    """Read before either product is issued, it is also not written."""
    early = [("uninitialised", "load of acc by drain_partition", "@drain")]
    left = [("unfinished", "the CTA ends without having waited for tcgen05.mma into acc", "@second")]
    verdict(lambda: issuers("wait"), ("race", *DRAIN), *left, sometimes=early, target="sm_100", seeds=5)


def test_a_commit_counted_for_the_other(verdict):
    """With a count of 1 the first commit ends the phase. The reader comes before the second one, or too late to see the
    first phase end.
    """
    on_time = [
        ("race", *DRAIN),
        ("unfinished", "tcgen05.mma into acc", "@second"),
        ("barrier", "a phase of ready ends", "wait of drain_partition"),
    ]
    late = [("deadlock", "drain_partition waits for parity 0 of ready")]
    certain = ("barrier", "tcgen05.commit of", "arrives on ready", "not ordered after the end of the previous phase")
    verdict(lambda: issuers("count"), certain, sometimes=(*on_time, *late), target="sm_100", seeds=5)


@gluon.jit
def columns_kernel(out, columns: gl.constexpr, unwritten: gl.constexpr):
    acc_layout: gl.constexpr = TensorMemoryLayout([ROWS, ROWS], col_stride=1)
    layout: gl.constexpr = tmem_reg_layout(gl.float32, (ROWS, ROWS), acc_layout, 4)
    first = allocate_tensor_memory(gl.float32, [columns // ROWS, ROWS, ROWS], acc_layout)  # @columns
    allocate_tensor_memory(gl.float16, [ROWS, SIZE], TensorMemoryLayout([ROWS, SIZE], col_stride=1))  # @half-columns
    first.index(0).store(gl.full([ROWS, ROWS], 2.0, gl.float32, layout))
    value = first.index(1 if unwritten else 0).load(layout)  # @unwritten
    gl.store(out + places(ROWS, ROWS, layout), value)


def columns(count, unwritten=False, target="sm_100"):
    out = torch.full((128, 128), float("nan"))
    columns_kernel[(1,)](out, count, unwritten, num_warps=4)
    assert unwritten or torch.equal(out, torch.full((128, 128), 2.0))


def test_tensor_memory_has_512_columns(verdict):
    verdict(lambda: columns(256), target="sm_100", seeds=3)
    over = (
        "budget",
        "544 columns of tensor memory are in use with this allocation of 32; the target has 512",
        "@half-columns",
    )
    verdict(lambda: columns(512), over, target="sm_100", seeds=3)


def test_tensor_memory_that_nothing_wrote(verdict):
    unwritten = (
        "uninitialised",
        "load of first[1] by main",
        "reads first, all of which was never written",
        "@unwritten",
    )
    verdict(lambda: columns(256, True), unwritten, target="sm_100", seeds=3)
