"""TMA's views of heads that share a tile, by themselves: what is loaded and stored through them, in the simulator and
on any GPU that has TMA.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton")

from strobe.kernels.device.dialect import fence_async_shared, gl, gluon, mbarrier, tma_store_wait
from strobe.kernels.device.pipeline import ring
from strobe.kernels.device.tma import HeadRows, addressable, as_rows, load_part, pack_gqa_descriptor, store_part
from strobe.sim import simulate

ROWS = 32


@dataclass(frozen=True)
class Traits:
    packed: bool

    @property
    def wraps(self) -> bool:
        return self.packed


@gluon.jit
def copy_kernel(source, target, rows, row, traits: gl.constexpr):
    """One tile from one tensor to another, by way of its rows and columns as a product sees them."""
    smem = gl.allocate_shared_memory(source.dtype, source.block_shape, source.layout)
    ready = ring(1, 1)
    mbarrier.expect(ready.index(0), source.block_type.nbytes)
    load_part(source, rows, row, 0, ready.index(0), smem, True, traits)
    mbarrier.wait(ready.index(0), 0)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tile = as_rows(smem)
    tile.store(tile.load(layout) + 1.0)
    fence_async_shared()
    store_part(target, rows, row, 0, smem, True, traits)
    tma_store_wait(0)


def copied(q: torch.Tensor, out: torch.Tensor, heads: int, batch: int, offset: int, length: int) -> None:
    """out = q + 1 where a sequence has rows, a tile after the other."""
    rows_per_query = 1 << (heads - 1).bit_length()
    source, target = (pack_gqa_descriptor(tensor, ROWS, 64, heads, rows_per_query) for tensor in (q, out))
    key_heads = q.shape[-2] // heads
    for head in range(key_heads):
        rows = HeadRows(batch, offset, length, head, key_heads)
        for row in range(0, length, ROWS // rows_per_query):
            copy_kernel[(1,)](source, target, rows, row, Traits(q.dim() == 3), num_warps=4)


@pytest.fixture
def run(device):
    """Simulated on a CPU, where a bad access is reported; on a GPU as it is."""
    if device == "cuda":
        if torch.cuda.get_device_capability()[0] < 9:
            pytest.skip("TMA begins with sm_90")
        return copied

    def simulated(*arguments) -> None:
        with simulate("sm_90") as found:
            copied(*arguments)
        assert found.reports == []

    return simulated


@pytest.mark.parametrize("heads", (2, 3, 16))
def test_dense_heads_that_share_tiles(heads, run, device):
    """Heads may lie as they like: here before the rows. The rows of a tile that are of no head, and those beyond the
    last, are written nowhere.
    """
    q = torch.randn(2, 2 * heads, 19, 64, device=device).to(torch.bfloat16).transpose(1, 2)
    out = torch.full((2, 21, 2 * heads, 64), float("nan"), dtype=torch.bfloat16, device=device)
    run(q, out[:, :19], heads, 1, 0, 19)
    assert torch.equal(out[1, :19], q[1] + 1.0)
    assert out[0].isnan().all() and out[1, 19:].isnan().all()


@pytest.mark.parametrize("heads", (2, 3, 16))
def test_packed_heads_that_share_tiles(heads, run, device):
    """A sequence's neighbours are neither read nor written, whatever a tile has room for."""
    q = torch.full((40, 2 * heads, 64), float("nan"), dtype=torch.bfloat16, device=device)
    q[7:26] = torch.randn(19, 2 * heads, 64, device=device).to(torch.bfloat16)
    out = torch.full_like(q, float("nan"))
    assert addressable(out, pack_gqa=True) is out
    run(q, out, heads, 0, 7, 19)
    assert torch.equal(out[7:26], q[7:26] + 1.0)
    assert out[:7].isnan().all() and out[26:].isnan().all()
