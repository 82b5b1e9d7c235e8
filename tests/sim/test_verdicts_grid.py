"""Verdicts between CTAs: racing stores, atomics, hand-over by release and acquire, TMA stores and additions that others
read.
"""

import pytest
import torch

from strobe.kernels.device.dialect import (
    TensorDescriptor,
    fence_async_shared,
    gl,
    gluon,
    tma_reduce_add,
    tma_store,
    tma_store_drain,
    tma_store_wait,
)

SIZE = gl.constexpr(128)


@gluon.jit
def index():
    return gl.arange(0, SIZE, gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def ptx(instruction: gl.constexpr):
    gl.inline_asm_elementwise(instruction + "; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


# ---------------------------------------------------------------- without order


@gluon.jit
def meet_kernel(x, off: gl.constexpr):
    if off == "apart":
        gl.store(x + gl.program_id(0) * SIZE + index(), 1.0)
    elif off == "atomics":
        gl.atomic_add(x + index(), gl.full([SIZE], 1.0, gl.float32, index().type.layout))
    elif off == "mixed":
        if gl.program_id(0) == 0:
            gl.store(x + index(), 1.0)  # @plain
        else:
            gl.atomic_add(x + index(), gl.full([SIZE], 1.0, gl.float32, index().type.layout))  # @atomic
    else:
        gl.store(x + index(), 1.0)  # @racing


MEET = {
    "apart": [],
    "atomics": [],
    "stores": [("race", "on x: store by main of CTA", "overwrites store by main of CTA", "@racing")],
    "mixed": [("race", "on x", "store by main of CTA 0", "@plain", "atomic by main of CTA 1", "@atomic")],
}


@pytest.mark.parametrize("sms", (1, 2))
@pytest.mark.parametrize("off", MEET)
def test_ctas_that_meet(verdict, off, sms):
    """On one SM they run one after another, which is luck: the verdict is the same."""

    def start():
        x = torch.zeros(3 * SIZE.value)
        meet_kernel[(2 if off == "mixed" else 3,)](x, off, num_warps=4)
        assert off != "atomics" or torch.equal(x[: SIZE.value], torch.full((SIZE.value,), 3.0))

    verdict(start, *MEET[off], sms=sms, seeds=5)


@gluon.jit
def three_kernel(x, flag, out, off: gl.constexpr):
    if gl.program_id(0) == 0:
        gl.store(out, gl.load(x, volatile=True))  # @glance
    elif gl.program_id(0) == 1:
        gl.atomic_add(x, 1, sem="relaxed")
        gl.atomic_xchg(flag, 1, sem="release")
    else:
        while gl.atomic_add(flag, 0, sem="acquire") == 0:
            pass
        if off == "store":
            gl.store(x, 7)  # @settle
        else:
            gl.atomic_xchg(x, 7, sem="relaxed")


@pytest.mark.parametrize("off", ["", "store"])
def test_an_atomic_does_not_hide_what_was_read_before(verdict, off):
    """A volatile load and an atomic may meet; the store that comes after the atomic still races with the load."""

    def start():
        three_kernel[(3,)](*torch.zeros(3, 1, dtype=torch.int32), off, num_warps=4)

    verdict(
        start,
        *(
            [("race", "on x", "store by main of CTA 2", "@settle", "volatile load by main of CTA 0", "@glance")]
            if off
            else []
        ),
    )


# ---------------------------------------------------------------- hand-over


@gluon.jit
def give(data, flag, off: gl.constexpr):
    gl.store(data + index(), index())  # @give
    if off == "relaxed release":
        gl.atomic_xchg(flag, 1, sem="relaxed")
    elif off == "fences" or off == "no acquire fence" or off == "volatile fence":
        ptx("fence.acq_rel.gpu")
        gl.atomic_xchg(flag, 1, sem="relaxed")
    elif off == "no release fence":
        gl.atomic_xchg(flag, 1, sem="relaxed")
    else:
        gl.atomic_xchg(flag, 1, sem="release")  # @flag
    if off == "after":
        gl.store(data + index(), index() + 1)  # @after


@gluon.jit
def take(data, flag, out, off: gl.constexpr):
    if off == "plain":
        while gl.load(flag) == 0:  # @plain-spin
            pass
    elif off == "volatile" or off == "volatile fence":
        while gl.load(flag, volatile=True) == 0:
            pass
        if off == "volatile fence":
            ptx("fence.acq_rel.gpu")
    elif off == "relaxed acquire" or off == "fences" or off == "no acquire fence" or off == "no release fence":
        while gl.atomic_add(flag, 0, sem="relaxed") == 0:
            pass
        if off == "fences" or off == "no release fence":
            ptx("membar.gl")
    elif off != "no wait":
        while gl.atomic_add(flag, 0, sem="acquire") == 0:  # @spin
            pass
    gl.store(out + index(), gl.load(data + index()))  # @take


@gluon.jit
def hand_kernel(data, flag, out, giver, off: gl.constexpr):
    if gl.program_id(0) == giver:
        if off != "nobody":
            give(data, flag, off)
    else:
        take(data, flag, out, off)


def hand(off="", giver=0):
    data, flag, out = (
        torch.zeros(SIZE.value, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(SIZE.value, dtype=torch.int32),
    )
    hand_kernel[(2,)](data, flag, out, giver, off, num_warps=4)
    if off in ("", "fences", "volatile fence"):
        assert torch.equal(out, torch.arange(SIZE.value, dtype=torch.int32))


UNORDERED = ("race", "on data", "store by main of CTA", "@give", "load by main of CTA", "@take")
HANDED = {
    "": [],
    "fences": [],
    "volatile fence": [],
    "relaxed release": [UNORDERED],
    "relaxed acquire": [UNORDERED],
    "no release fence": [UNORDERED],
    "no acquire fence": [UNORDERED],
    "volatile": [UNORDERED],
    "no wait": [UNORDERED],
    "after": [("race", "on data", "@after", "load by main of CTA", "@take")],
    "nobody": [("deadlock", "waits for a value in global memory that nothing changes (spin loop)", "@spin")],
}


@pytest.mark.parametrize("giver", (0, 1))
@pytest.mark.parametrize("off", HANDED)
def test_a_hand_over(verdict, off, giver):
    verdict(lambda: hand(off, giver), *HANDED[off], sms=2)


@pytest.mark.parametrize("giver", (0, 1))
def test_a_plain_spin(verdict, giver):
    """The flag is raced for in any case. That a plain load may never see it is said where the loop has to spin."""
    races = [UNORDERED, ("race", "on flag", "atomic by main of CTA", "@flag", "load by main of CTA", "@plain-spin")]
    spins = (
        "deadlock",
        "main reads flag repeatedly by a plain load, which need not see other agents' writes",
        "@plain-spin",
    )
    verdict(lambda: hand("plain", giver), *races, sometimes=(spins,), sms=2, seeds=3)


def test_a_cta_that_waits_for_one_not_resident(verdict):
    """One SM runs the CTAs in order: the first one may not wait for the second."""
    verdict(lambda: hand("", 0), sms=1)
    stuck = ("deadlock", "main waits for a value in global memory that nothing changes (spin loop)", "@spin")
    verdict(lambda: hand("", 1), stuck, sms=1)


@gluon.jit
def turns_kernel(total, turn, off: gl.constexpr):
    me = gl.program_id(0)
    if off != "wait":
        while gl.atomic_add(turn, 0, sem="acquire") != me:
            pass
    gl.store(total + index(), gl.load(total + index()) * 2 + me)  # @turn
    gl.atomic_add(turn, 1, sem="relaxed" if off == "release" else "release")


@pytest.mark.parametrize("off", ["", "wait", "release"])
def test_ctas_in_turn(verdict, off):
    """A sum in a fixed order: each CTA waits for the one before."""

    def start():
        total, turn = torch.zeros(SIZE.value, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        turns_kernel[(4,)](total, turn, off, num_warps=4)
        assert off or torch.equal(total, torch.full((SIZE.value,), 11, dtype=torch.int32))

    verdict(start, *([("race", "on total", "@turn")] if off else []), seeds=5)


@gluon.jit
def put(address, value, order: gl.constexpr):
    """A store of an order that Gluon's own has not."""
    instruction: gl.constexpr = "st." + order + ".global.u32 [$1], $2; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(
        instruction, "=r,l,r", [address.to(gl.int64), value], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def get(address, order: gl.constexpr):
    instruction: gl.constexpr = "ld." + order + ".global.u32 $0, [$1];"
    return gl.inline_asm_elementwise(instruction, "=r,l", [address.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def replace_kernel(data, flag, out, off: gl.constexpr):
    if gl.program_id(0) == 0:
        gl.store(data + index(), index())  # @replaced
        put(flag, 1, "release.gpu")
    elif gl.program_id(0) == 1:
        while get(flag, "relaxed.gpu") != 1:
            pass
        if off == "store":
            put(flag, 2, "release.gpu")
        elif off == "relaxed store":
            put(flag, 2, "relaxed.gpu")
        elif off == "volatile store":
            put(flag, 2, "volatile")
        else:
            gl.atomic_xchg(flag, 2, sem="relaxed")
    else:
        while get(flag, "relaxed.gpu") != 2:  # an acquiring read of the 1 would learn of the data
            pass
        get(flag, "acquire.gpu")
        gl.store(out + index(), gl.load(data + index()))  # @late


@pytest.mark.parametrize("off", ["", "store", "relaxed store", "volatile store"])
def test_a_store_ends_what_an_atomic_goes_on_with(verdict, off):
    """A release sequence (PTX ISA, memory consistency model) goes on through atomics; a store begins anew, and its
    writer knew of no data.
    """

    def start():
        data, flag, out = (torch.zeros(n, dtype=torch.int32) for n in (SIZE.value, 1, SIZE.value))
        replace_kernel[(3,)](data, flag, out, off, num_warps=4)

    race = ("race", "on data", "load by main of CTA 2", "@late", "store by main of CTA 0", "@replaced")
    verdict(start, *([race] if off else []), seeds=5)


# ---------------------------------------------------------------- through TMA

ROWS, COLUMNS = gl.constexpr(8), gl.constexpr(32)
BLOCK = [ROWS.value, COLUMNS.value]


@gluon.jit
def places():
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    rows, columns = gl.arange(0, ROWS, gl.SliceLayout(1, layout)), gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    return rows[:, None] * COLUMNS + columns[None, :]


@gluon.jit
def ones_in_shared(out_desc):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(
        gl.float32, [ROWS, COLUMNS], out_desc.layout, gl.full([ROWS, COLUMNS], 1.0, gl.float32, layout)
    )
    fence_async_shared()
    return tile


@gluon.jit
def add_kernel(sum_desc, sums, done, out, count, off: gl.constexpr):
    tile = ones_in_shared(sum_desc)
    tma_reduce_add(sum_desc, [0, 0], tile)  # @add
    if off == "read only":
        tma_store_wait(0)
    else:
        tma_store_drain()
    last = gl.atomic_add(done, 1, sem="relaxed" if off == "relaxed" else "acq_rel") == count - 1
    if last or off == "anyone":
        gl.store(out + gl.program_id(0) * ROWS * COLUMNS + places(), gl.load(sums + places()))  # @sum


ADDED = ("race", "on sum_desc", "load by main of CTA", "@sum", "TMA reduce-add from", "@add")


@pytest.mark.parametrize("off", ["", "read only", "relaxed", "anyone"])
def test_additions_read_by_the_last_cta(verdict, off):
    """The additions race with nobody; the reader must come after all of them, written and not only read from shared
    memory.
    """

    def start():
        sums, done, out = torch.zeros(BLOCK), torch.zeros(1, dtype=torch.int32), torch.full((4, *BLOCK), float("nan"))
        desc = TensorDescriptor.from_tensor(sums, BLOCK, gl.NVMMASharedLayout.get_default_for(BLOCK, gl.float32))
        add_kernel[(4,)](desc, sums, done, out, 4, off, num_warps=4)
        assert torch.equal(sums, torch.full(BLOCK, 4.0))
        assert off or [int(out[i, 0, 0]) for i in range(4) if not out[i].isnan().any()] == [4]

    verdict(start, *([ADDED] if off else []))


@gluon.jit
def publish_kernel(data_desc, data, flag, out, off: gl.constexpr):
    if gl.program_id(0) == 0:
        tile = ones_in_shared(data_desc)
        tma_store(data_desc, [0, 0], tile)  # @publish
        if off == "read only":
            tma_store_wait(0)
        else:
            ptx("cp.async.bulk.wait_group 0")
        gl.atomic_xchg(flag, 1, sem="relaxed" if off == "relaxed" else "release")
    else:
        while gl.atomic_add(flag, 0, sem="acquire") == 0:
            pass
        gl.store(out + places(), gl.load(data + places()))  # @published


@pytest.mark.parametrize("off", ["", "read only", "relaxed"])
def test_a_tma_store_read_by_another_cta(verdict, off):
    """store_wait is over when shared memory has been read; what another CTA reads must also have been written."""

    def start():
        data, flag, out = torch.zeros(BLOCK), torch.zeros(1, dtype=torch.int32), torch.full(BLOCK, float("nan"))
        desc = TensorDescriptor.from_tensor(data, BLOCK, gl.NVMMASharedLayout.get_default_for(BLOCK, gl.float32))
        publish_kernel[(2,)](desc, data, flag, out, off, num_warps=4)
        assert off or torch.equal(out, torch.ones(BLOCK))

    race = ("race", "on data_desc", "load by main of CTA 1", "@published", "TMA store from", "@publish")
    verdict(start, *([race] if off else []), sms=2)
