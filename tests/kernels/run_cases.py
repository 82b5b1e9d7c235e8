"""Runs of queries over keys that they share, and their judge: packed sequences over copies of the keys."""

from __future__ import annotations

from typing import NamedTuple

import torch

from strobe.ops import attention as ops
from strobe.problem.call import NO_BOUND, Call
from strobe.reference import Gradients
from strobe.testing import assert_as_good_as, assert_gradients_as_good_as


class RunCase(NamedTuple):
    """Rows of each run in order, and the first key and one past the last of each."""

    rows: tuple[int, ...]
    keys: tuple[tuple[int, int], ...]
    left: int = NO_BOUND
    right: int = NO_BOUND
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    sinks: bool = False

    def build(self, device: str, dtype: torch.dtype, kernel: str = "", seed: int = 5) -> Call:
        """Keys and values lie beside each other in one buffer, as context parallelism receives them."""
        generator = torch.Generator().manual_seed(seed)
        random = lambda *shape: torch.randn(shape, generator=generator).to(device, dtype)
        heads_q, heads_kv = self.heads
        buffer = random(max(stop for _, stop in self.keys) + 3, heads_kv, 2 * self.head_dim)
        sums = lambda lengths: torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        lengths = [stop - start for start, stop in self.keys]
        starts = torch.tensor([*(start for start, _ in self.keys), 0], dtype=torch.int32)
        return Call(
            random(sum(self.rows), heads_q, self.head_dim), *buffer.split(self.head_dim, -1),
            self.left, self.right, kernel=kernel, needs_grad=True,
            sinks=random(heads_q).float() if self.sinks else None,
            cu_seqlens_q=sums(self.rows).to(device), cu_seqlens_k=torch.stack([sums(lengths), starts]).to(device),
            max_seqlen_q=max(self.rows), max_seqlen_k=sum(lengths),
        )  # fmt: skip


RUN_CASES = {
    "head_tail": RunCase((70, 70), ((0, 70), (0, 280)), right=0),
    "halo": RunCase((63, 130), ((65, 191), (128, 258)), left=63, right=0, sinks=True),
    "descending": RunCase((33, 0, 65, 1), ((200, 300), (5, 5), (100, 290), (0, 130)), heads=(2, 2)),
    "window": RunCase((129, 40), ((10, 200), (0, 150)), left=50, right=20, heads=(4, 1), sinks=True),
}


def assert_runs(call: Call) -> None:
    """Forward and backward beside the oracle of the same runs over copies of their keys; the same bits twice."""
    bare, copied = call._replace(needs_grad=False), call.gathered
    out, lse = ops.FORWARD(*bare.arguments)
    assert all(map(torch.equal, (out, lse), ops.FORWARD(*bare.arguments)))
    assert_as_good_as((out, lse), copied._replace(needs_grad=False))
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    found = ops.BACKWARD(dout, out, lse, None, *call.arguments)
    assert found[1].shape == copied.k.shape and found[2].shape == copied.v.shape
    assert_gradients_as_good_as(Gradients(*found[:3], found[3] if call.sinks is not None else None), copied, dout, None)
