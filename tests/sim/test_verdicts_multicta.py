"""Verdicts on words of several CTAs beside products of pairs: multicast loads, arrivals at other CTAs, the cluster's
barrier, tensors that change their CTA, TMA adds. `off` names the synchronisation that is left out.
"""

import inspect

import pytest
import torch
from triton.experimental.gluon.language.nvidia import blackwell

from strobe.kernels.device.dialect import TensorDescriptor, gl, gluon, mbarrier
from strobe.sim import simulate
from strobe.sim.machine import MODES

has_pairs = hasattr(blackwell, "async_store")
pairs = pytest.mark.skipif(not has_pairs, reason="barriers of two CTAs, stores to another CTA: Triton 3.8")
if has_pairs:
    from triton.experimental.gluon.language.nvidia.blackwell import async_store, fence_async_shared, tma
    from triton.experimental.gluon.language.nvidia.hopper import cluster

SEEDS = 3


def descriptor(tensor, block, cga):
    elem = {torch.float16: gl.float16, torch.float32: gl.float32}[tensor.dtype]
    layout = gl.NVMMASharedLayout.get_default_for(block, elem, cga_layout=cga)
    return TensorDescriptor.from_tensor(tensor, block, layout)


def blocked(cga):
    return gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0], cga_layout=[cga])


def noticed(start, off, *words, target="sm_90", seeds=SEEDS):
    """Without `off`'s synchronisation every schedule has reports, and one of them holds all of the words."""
    found = set()
    for mode in MODES:
        for seed in range(seeds):
            with simulate(target, mode, seed, check=False) as run:
                start(off)
            assert run.reports, f"mode {mode}, seed {seed}: no report without {off}"
            found |= {f"{report.kind}: {report.text}" for report in run.reports}
    assert any(all(word in text for word in words) for text in found), "\n".join(sorted(found))


# ---- tensors that change their CTA: the compiler puts the barriers


@gluon.jit
def softmax_kernel(x, out, N: gl.constexpr, layout: gl.constexpr):
    at = gl.program_id(0) * N + gl.arange(0, N, layout)
    numbers = gl.load(x + at)
    powers = gl.exp(numbers - gl.max(numbers, 0))
    gl.store(out + at, powers / gl.sum(powers, 0))


@gluon.jit
def turn_kernel(x, out, rows: gl.constexpr, columns: gl.constexpr):
    read = gl.arange(0, 32, gl.SliceLayout(1, rows))[:, None] * 64 + gl.arange(0, 64, gl.SliceLayout(0, rows))[None, :]
    turned = gl.convert_layout(gl.load(x + read), columns)
    row, column = gl.arange(0, 32, gl.SliceLayout(1, columns)), gl.arange(0, 64, gl.SliceLayout(0, columns))
    gl.store(out + row[:, None] * 64 + column[None, :], turned * 2)
    gl.store(out + 32 * 64 + column, gl.sum(turned, 0))
    gl.store(out + 33 * 64, gl.program_id(0) + gl.num_programs(0))


@pytest.mark.parametrize("ctas", [1, 2, 4])
def test_a_sum_goes_over_all_ctas(verdict, ctas):
    def run():
        x, out = torch.randn(3, 512), torch.full((3, 512), torch.nan)
        layout = gl.BlockedLayout([1], [32], [4], [0], cga_layout=[[1], [2]][: ctas.bit_length() - 1])
        softmax_kernel[(3,)](x, out, 512, layout, num_warps=4, num_ctas=ctas)
        assert torch.allclose(out, torch.softmax(x, 1), atol=1e-6)

    verdict(run, seeds=SEEDS)


def test_a_layout_moves_elements_to_another_cta(verdict):
    def run():
        x, out = torch.randn(32, 64), torch.full((34, 64), torch.nan)
        turn_kernel[(1,)](x, out, blocked([1, 0]), blocked([0, 1]), num_warps=4, num_ctas=2)
        assert torch.equal(out[:32], 2 * x) and torch.allclose(out[32], x.sum(0), atol=1e-5) and out[33, 0] == 1

    verdict(run, seeds=SEEDS)


@gluon.jit
def count_kernel(counter, seen, out, both: gl.constexpr, split: gl.constexpr):
    ticket = gl.atomic_add(counter, 1)
    gl.atomic_add(out + gl.arange(0, 64, both), gl.full([64], 1.0, gl.float32, both))
    gl.store(seen + gl.program_id(0) * 64 + gl.arange(0, 64, split), gl.full([64], 0, gl.int32, split) + ticket)


def test_an_atomic_is_executed_once_for_all_ctas(verdict):
    def run():
        counter, seen, out = (
            torch.zeros(1, dtype=torch.int32),
            torch.full((3, 64), -1, dtype=torch.int32),
            torch.zeros(64),
        )
        layouts = [gl.BlockedLayout([1], [32], [4], [0], cga_layout=[[step]]) for step in (0, 1)]
        count_kernel[(3,)](counter, seen, out, *layouts, num_warps=4, num_ctas=2)
        assert counter == 3 and (out == 3).all()
        assert (seen == seen[:, :1]).all() and sorted(seen[:, 0].tolist()) == [0, 1, 2]

    verdict(run, seeds=SEEDS)


@gluon.jit
def summing_role(x, out, layout: gl.constexpr):
    gl.store(out, gl.sum(gl.load(x + gl.arange(0, 256, layout)), 0))


@gluon.jit
def idle_role():
    pass


@gluon.jit
def summing_inside_kernel(x, out, layout: gl.constexpr):
    gl.warp_specialize([(summing_role, (x, out, layout)), (idle_role, ())], [1], [24])


def test_a_sum_over_ctas_inside_warp_specialize(verdict):
    """Triton 3.8 builds a barrier of the cluster there, older versions have none."""
    x, out = torch.ones(256), torch.zeros(1)
    layout = gl.BlockedLayout([1], [32], [4], [0], cga_layout=[[1]])
    start = lambda: summing_inside_kernel[(1,)](x, out, layout, num_warps=4, num_ctas=2)
    reported = ("compiler", "change their CTA", "inside warp_specialize")
    verdict(start, *([] if has_pairs else [reported]), seeds=SEEDS)
    assert not has_pairs or out == 256


# ---- a multicast load: one CTA fills the buffers of both, again and again


@gluon.jit
def multicast_kernel(x_desc, out, tiles, off: gl.constexpr, layout: gl.constexpr, split: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.float32, [16, 32], x_desc.layout)
    full = mbarrier.allocate_mbarrier()
    free = mbarrier.allocate_mbarrier(two_ctas=off != "own_free")
    mbarrier.init(full, count=1)
    mbarrier.init(free, count=1)
    row, column = gl.arange(0, 16, gl.SliceLayout(1, split)), gl.arange(0, 32, gl.SliceLayout(0, split))
    for i in range(tiles):
        if off != "free":
            mbarrier.wait(free, i & 1 ^ 1)
        if off != "expect":
            mbarrier.expect(full, x_desc.nbytes_per_cta)
        tma.async_load(x_desc, [i * 16, 0], full, tile, multicast=True)
        if off != "full":
            mbarrier.wait(full, i & 1)
        held = gl.convert_layout(tile.load(layout), split)
        if off != "arrive":
            mbarrier.arrive(free)
        gl.store(out + (i * 16 + row[:, None]) * 32 + column[None, :], held)


def multicast(off="", tiles=3):
    x, out = torch.randn(16 * tiles, 32), torch.full((16 * tiles, 32), torch.nan)
    view, layouts = descriptor(x, [16, 32], [[0, 0]]), [blocked([0, 0]), blocked([1, 0])]
    multicast_kernel[(1,)](view, out, tiles, off, *layouts, num_warps=4, num_ctas=2)
    return x, out


@pairs
def test_a_multicast_load(verdict):
    verdict(lambda: torch.testing.assert_close(*multicast(), atol=0, rtol=0), seeds=SEEDS)


@pairs
@pytest.mark.parametrize(
    "off, words",
    [
        ("free", ("race: on tile of CTA 1", "TMA load into tile of CTA 1", "overwrites what is read by load of tile")),
        ("own_free", ("race: on tile of CTA 1", "TMA load into tile of CTA 1", "overwrites what is read by load")),
        ("full", ("race: on tile of CTA 1", "load of tile by main of CTA 1", "reads what is written by TMA load")),
        ("expect", ("bytes", "full of CTA 1")),
        ("arrive", ("deadlock", "main of CTA 0 waits for parity 0 of free of CTA 0")),
    ],
)
def test_a_multicast_load_without(off, words):
    noticed(multicast, off, *words)


# ---- an arrival of one CTA at the barriers of both; a tile is sent once the cluster's barrier says that it is free


@gluon.jit
def signal_kernel(out, off: gl.constexpr):
    go = mbarrier.allocate_mbarrier()
    mbarrier.init(go, count=1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0], cga_layout=[[1]])
    place = out + gl.arange(0, 256, layout)
    if off != "arrive":
        mbarrier.arrive(go, from_cta=0)
    if off != "wait":
        mbarrier.wait(go, 0)
    gl.store(place, gl.arange(0, 256, layout).to(gl.float32))
    mbarrier.invalidate(go)


def signal(off=""):
    out = torch.full((256,), torch.nan)
    signal_kernel[(1,)](out, off, num_warps=4, num_ctas=2)
    return out, torch.arange(256).float()


@pytest.mark.skipif("from_cta" not in inspect.signature(mbarrier.arrive).parameters, reason="from_cta: Triton 3.9")
def test_one_cta_arrives_at_the_barriers_of_both(verdict):
    verdict(lambda: torch.testing.assert_close(*signal()), seeds=SEEDS)
    noticed(signal, "arrive", "deadlock", "main of CTA 1 waits for parity 0 of go of CTA 1")


@gluon.jit
def swap_kernel(x, out, off: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr, shared: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.float32, [32, 64], shared)
    came = mbarrier.allocate_mbarrier()
    mbarrier.init(came, count=1)
    row, column = gl.arange(0, 32, gl.SliceLayout(1, rows)), gl.arange(0, 64, gl.SliceLayout(0, rows))
    numbers = gl.load(x + row[:, None] * 64 + column[None, :])
    row, column = gl.arange(0, 32, gl.SliceLayout(1, columns)), gl.arange(0, 64, gl.SliceLayout(0, columns))
    place = out + row[:, None] * 64 + column[None, :]
    for i in range(2):
        mbarrier.expect(came, 32 * 32 * 4)
        async_store(tile, numbers, came)
        if off != "wait":
            mbarrier.wait(came, i)
        gl.store(place + i * 32 * 64, tile.load(columns))
        if off != "barrier":
            cluster.barrier(relaxed=off == "relaxed")


def swap(off=""):
    x, out = torch.randn(32, 64), torch.full((2, 32, 64), torch.nan)
    shared = gl.NVMMASharedLayout.get_default_for([32, 64], gl.float32, cga_layout=[[0, 1]])
    swap_kernel[(1,)](x, out, off, blocked([1, 0]), blocked([0, 1]), shared, num_warps=4, num_ctas=2)
    return out, torch.stack([x, x])


@pairs
def test_tiles_are_sent_and_the_cluster_meets(verdict):
    verdict(lambda: torch.testing.assert_close(*swap(), atol=0, rtol=0), seeds=SEEDS)


@pairs
@pytest.mark.parametrize(
    "off, words",
    [
        ("wait", ("race: on tile of CTA 1", "load of tile by main of CTA 1", "reads what is written by async_store")),
        ("barrier", ("race: on tile of CTA 1", "async_store into tile of CTA 1", "overwrites what is read by load")),
        # a relaxed arrival orders nothing
        ("relaxed", ("race: on tile of CTA 1", "async_store into tile of CTA 1", "overwrites what is read by load")),
    ],
)
def test_tiles_are_sent_without(off, words):
    noticed(swap, off, *words)


# ---- sums by TMA: each CTA adds its part


@gluon.jit
def add_kernel(x, out_desc, off: gl.constexpr, rows: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.float32, [32, 32], out_desc.layout)
    row, column = gl.arange(0, 32, gl.SliceLayout(1, rows)), gl.arange(0, 32, gl.SliceLayout(0, rows))
    for _ in range(2):
        tile.store(gl.load(x + row[:, None] * 32 + column[None, :]))
        if off != "fence":
            fence_async_shared()
        tma.async_atomic_add(out_desc, [0, 0], tile)
        if off != "store_wait":
            tma.store_wait(0)
    tma.store_wait(0)


def add(off=""):
    x, out = torch.randn(32, 32), torch.zeros(32, 32)
    add_kernel[(2,)](x, descriptor(out, [32, 32], [[1, 0]]), off, blocked([1, 0]), num_warps=4, num_ctas=2)
    return out, 4 * x


@pairs
def test_each_cta_adds_its_part(verdict):
    verdict(lambda: torch.testing.assert_close(*add()), seeds=SEEDS)
    verdict(lambda: add("fence"), seeds=SEEDS)  # the compiler puts the fence between a partition's own accesses
    noticed(add, "store_wait", "race: on tile of CTA 1", "overwrites what is read by TMA reduce-add from tile")
