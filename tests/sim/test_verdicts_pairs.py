"""Verdicts on products of two CTAs (Triton 3.8): a pair of CTAs shares the operands of tcgen05_mma, passes tiles to
each other's shared memory, and arrives at its leader's barriers. `off` names the synchronisation that is left out.
"""

from pathlib import Path

import pytest
import torch
from triton.experimental.gluon.language.nvidia import blackwell

from strobe.kernels.device.dialect import TensorDescriptor, gl, gluon, mbarrier
from strobe.sim import simulate
from strobe.sim.machine import MODES

from .conftest import marked

if not hasattr(blackwell, "async_store"):
    pytest.skip("barriers of two CTAs, stores to another CTA's shared memory: Triton 3.8", allow_module_level=True)

from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    async_store,
    fence_async_shared,
    tcgen05_commit,
    tcgen05_mma,
    tma,
)

SEEDS, TARGET = 2, "sm_100"
_lines = marked(Path(__file__))


def descriptor(tensor, block, cga):
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float16, cga_layout=cga)
    return TensorDescriptor.from_tensor(tensor, block, layout)


def near(got, want):
    assert torch.allclose(got.float(), want, atol=0.02, rtol=0.01), (got.float() - want).abs().max()


# ---- a product of pairs with a ring of tiles: D[256, 64] = A[256, K] B[K, 64], twice


@gluon.jit
def load_role(a_desc, b_desc, a, b, ready, empty, tiles, off: gl.constexpr):
    for i in range(tiles):
        slot, phase = i % 2, i // 2 & 1
        if off != "empty":
            mbarrier.wait(empty.index(slot), phase ^ 1)
        if off != "expect":
            mbarrier.expect(ready.index(slot), a_desc.nbytes_per_cta + b_desc.nbytes_per_cta)
        tma.async_load(a_desc, [0, i * 32], ready.index(slot), a.index(slot))  # @load
        tma.async_load(b_desc, [i * 32, 0], ready.index(slot), b.index(slot))  # @load-b


@gluon.jit
def mma_role(a, b, d, ready, empty, d_full, d_empty, tiles, off: gl.constexpr):
    for i in range(tiles):
        slot, phase = i % 2, i // 2 & 1
        if off != "ready":
            mbarrier.wait(ready.index(slot), phase)
        mbarrier.wait(d_empty, 0, pred=(i == tiles // 2) & (off != "d_empty"))
        use_acc = i % (tiles // 2) != 0
        tcgen05_mma(a.index(slot), b.index(slot), d, use_acc=use_acc, mbarriers=[empty.index(slot)])  # @mma
        tcgen05_commit(d_full, pred=(i % (tiles // 2) == tiles // 2 - 1) & (off != "commit"))


@gluon.jit
def epilogue_role(d_desc, d, out, d_full, d_empty, off: gl.constexpr):
    for half in range(2):
        if off != "d_full":
            mbarrier.wait(d_full, half)
        tile = d.load()  # @read
        if off != "arrive":
            mbarrier.arrive(d_empty)
        tma.store_wait(0)
        out.store(tile.to(gl.float16))
        fence_async_shared()
        tma.async_store(d_desc, [half * 256, 0], out)
    tma.store_wait(0)


@gluon.jit
def pair_kernel(a_desc, b_desc, d_desc, tiles, off: gl.constexpr):
    a = gl.allocate_shared_memory(gl.float16, [2, 256, 32], a_desc.layout)
    b = gl.allocate_shared_memory(gl.float16, [2, 32, 64], b_desc.layout)
    out = gl.allocate_shared_memory(gl.float16, [256, 64], d_desc.layout)
    layout: gl.constexpr = TensorMemoryLayout((128, 64), 1, cga_layout=[(1, 0)], two_ctas=True)
    d = allocate_tensor_memory(gl.float32, [256, 64], layout)
    ready = mbarrier.allocate_mbarrier(batch=2, two_ctas=off != "own_ready")
    empty = mbarrier.allocate_mbarrier(batch=2)
    d_full = mbarrier.allocate_mbarrier()
    d_empty = mbarrier.allocate_mbarrier(two_ctas=off != "own_d_empty")
    for slot in gl.static_range(2):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    mbarrier.init(d_full, count=1)
    mbarrier.init(d_empty, count=1)
    gl.warp_specialize(
        [
            (epilogue_role, (d_desc, d, out, d_full, d_empty, off)),
            (load_role, (a_desc, b_desc, a, b, ready, empty, tiles, off)),
            (mma_role, (a, b, d, ready, empty, d_full, d_empty, tiles, off)),
        ],
        [1, 1],
        [24, 24],
    )


def multiply(off="", tiles=6):
    a, b = torch.randn(256, 32 * tiles).half() / 4, torch.randn(32 * tiles, 64).half() / 4
    d = torch.full((512, 64), torch.nan).half()
    views = descriptor(a, [256, 32], [[1, 0]]), descriptor(b, [32, 64], [[0, 1]]), descriptor(d, [256, 64], [[1, 0]])
    pair_kernel[(1,)](*views, tiles, off, num_warps=4, num_ctas=2)
    half = 16 * tiles
    return d, torch.cat([a[:, :half].float() @ b[:half].float(), a[:, half:].float() @ b[half:].float()])


def noticed(start, off, *words):
    """Without `off`'s synchronisation every schedule has reports, and one of them holds all of the words."""
    found = set()
    for mode in MODES:
        for seed in range(SEEDS):
            with simulate(TARGET, mode, seed, check=False) as run:
                start(off)
            assert run.reports, f"mode {mode}, seed {seed}: no report without {off}"
            found |= {f"{report.kind}: {report.text}" for report in run.reports}
    wanted = [_lines.get(word, word) for word in words]
    assert any(all(word in text for word in wanted) for text in found), "\n".join(sorted(found))


def test_a_pair_multiplies(verdict):
    verdict(multiply, seeds=SEEDS, target=TARGET)
    for mode in ("eager", "lazy", "timed"):
        with simulate(TARGET, mode):
            near(*multiply())


@pytest.mark.parametrize(
    "off, words",
    [
        ("empty", ("race: on b", "TMA load into b[0]", "overwrites", "@load-b")),
        ("ready", ("uninitialised", "tcgen05 read of a[0]", "@mma")),
        ("expect", ("deadlock", "mma_role of CTA 0 waits for parity 0 of ready[0] of CTA 0")),
        # each CTA has a barrier of its own, so the leader does not wait for the other's half
        (
            "own_ready",
            ("race: on b of CTA 1", "tcgen05 read of b[0] of CTA 1 by tcgen05 of 0/mma_role", "reads what is written"),
        ),
        (
            "own_d_empty",
            ("race: on d of CTA 1", "tcgen05.mma into d of CTA 1", "overwrites what is read by load of d", "@read"),
        ),
        ("commit", ("deadlock", "epilogue_role of CTA 1 waits for parity 0 of d_full of CTA 1")),
        ("d_full", ("race: on d", "load of d by epilogue_role of CTA 1", "@read")),
        (
            "d_empty",
            ("race: on d", "tcgen05.mma into d", "overwrites what is read by load of d by epilogue_role of CTA 0"),
        ),
        ("arrive", ("deadlock", "mma_role of CTA 0 waits for parity 0 of d_empty of CTA 0")),
    ],
)
def test_a_pair_without(off, words):
    noticed(multiply, off, *words)


# ---- each CTA sends half of its tile to the other, and the leader multiplies what both have: E = X^T B


@gluon.jit
def send_role(x_desc, x, got, loaded, arrived, free, tiles, off: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0], cga_layout=[(1, 0)])
    for i in range(tiles):
        mbarrier.expect(loaded, x_desc.nbytes_per_cta)
        tma.async_load(x_desc, [i * 128, 0], loaded, x)
        mbarrier.wait(loaded, i & 1)
        tile = x.load(layout)
        if off != "free":
            mbarrier.wait(free, i & 1 ^ 1)
        if off != "expect":
            mbarrier.expect(arrived, 128 * 64 * 2)
        async_store(got, tile, arrived)  # @send


@gluon.jit
def relay_role(arrived, both, tiles, off: gl.constexpr):
    for i in range(tiles):
        if off != "arrived":
            mbarrier.wait(arrived, i & 1)
        if off != "fence":
            fence_async_shared()
        if off != "relay":
            mbarrier.arrive(both)  # @relay


@gluon.jit
def product_role(got, b, e, both, free, done, tiles, off: gl.constexpr):
    for i in range(tiles):
        if off != "both":
            mbarrier.wait(both, i & 1)
        tcgen05_mma(got.permute((1, 0)), b, e, use_acc=i != 0, mbarriers=[free])  # @product
    tcgen05_commit(done)


@gluon.jit
def exchange_kernel(x_desc, b_desc, e_desc, tiles, off: gl.constexpr):
    x = gl.allocate_shared_memory(gl.float16, [128, 128], x_desc.layout)
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, 128], gl.float16, cga_layout=[(0, 1)])
    got = gl.allocate_shared_memory(gl.float16, [128, 128], layout)
    b = gl.allocate_shared_memory(gl.float16, [128, 64], b_desc.layout)
    out = gl.allocate_shared_memory(gl.float16, [128, 64], e_desc.layout)
    e_layout: gl.constexpr = TensorMemoryLayout((64, 64), 1, cga_layout=[(1, 0)], two_ctas=True)
    e = allocate_tensor_memory(gl.float32, [128, 64], e_layout)
    loaded = mbarrier.allocate_mbarrier()
    arrived = mbarrier.allocate_mbarrier()
    free = mbarrier.allocate_mbarrier()
    done = mbarrier.allocate_mbarrier()
    both = mbarrier.allocate_mbarrier(two_ctas=off != "own_both")
    b_full = mbarrier.allocate_mbarrier(two_ctas=True)
    mbarrier.init(loaded, count=1)
    mbarrier.init(arrived, count=1)
    mbarrier.init(free, count=1)
    mbarrier.init(done, count=1)
    mbarrier.init(both, count=1)
    mbarrier.init(b_full, count=1)
    mbarrier.expect(b_full, b_desc.nbytes_per_cta)
    tma.async_load(b_desc, [0, 0], b_full, b)
    mbarrier.wait(b_full, 0)
    gl.warp_specialize(
        [
            (send_role, (x_desc, x, got, loaded, arrived, free, tiles, off)),
            (relay_role, (arrived, both, tiles, off)),
            (product_role, (got, b, e, both, free, done, tiles, off)),
        ],
        [1, 1],
        [24, 24],
    )
    mbarrier.wait(done, 0)
    out.store(e.load().to(gl.float16))
    fence_async_shared()
    tma.async_store(e_desc, [0, 0], out)
    tma.store_wait(0)


def exchange(off="", tiles=3):
    x, b = torch.randn(128 * tiles, 128).half() / 4, torch.randn(128, 64).half() / 4
    e = torch.full((128, 64), torch.nan).half()
    views = descriptor(x, [128, 128], [[1, 0]]), descriptor(b, [128, 64], [[0, 1]]), descriptor(e, [128, 64], [[1, 0]])
    exchange_kernel[(1,)](*views, tiles, off, num_warps=4, num_ctas=2)
    return e, x.view(tiles, 128, 128).float().sum(0).T @ b.float()


def test_halves_change_their_cta(verdict):
    verdict(exchange, seeds=SEEDS, target=TARGET)
    for mode in ("eager", "lazy", "timed"):
        with simulate(TARGET, mode):
            near(*exchange())


@pytest.mark.parametrize(
    "off, words",
    [
        # nobody knows that the other CTA's buffer is free
        ("free", ("race: on got", "async_store into got of CTA 1", "overwrites what is read by tcgen05 read", "@send")),
        ("expect", ("deadlock", "parity 0 of arrived")),
        ("arrived", ("race: on got", "tcgen05 read of got", "reads what is written by async_store", "@product")),
        ("fence", ("fence: on got", "follows async_store into got", "@product")),
        ("relay", ("deadlock", "product_role of CTA 0 waits for parity 0 of both of CTA 0")),
        ("both", ("race: on got", "tcgen05 read of got", "reads what is written by async_store", "@product")),
        ("own_both", ("race: on got of CTA 1", "tcgen05 read of got of CTA 1", "reads what is written by async_store")),
    ],
)
def test_halves_change_their_cta_without(off, words):
    noticed(exchange, off, *words)
