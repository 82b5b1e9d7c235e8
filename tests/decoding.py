"""What tests of decode share: a judge between guard bands, page tables of every kind, and an oracle that takes a whole
batch at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from strobe.kernels.protocol import Forward
from strobe.ops import attention as ops
from strobe.ops import decode as ops_decode
from strobe.problem.cache import FP8
from strobe.problem.decode import DecodeCall, DecodeProblem
from strobe.problem.target import Target
from strobe.selection.select import select
from strobe.testing import Poison, assert_kernel
from strobe.testing.decode import assert_decode_as_good_as
from strobe.testing.poison import fill_with_poison

WILD = (-1, 2**31 - 1, -(2**31), 2**20)  # page ids that no pool has


@contextmanager
def wide_sums() -> Iterator[None]:
    """Triton's interpreter sums products in float64: how a host's library adds follows the sizes of arrays, which a
    GPU's products do not.
    """
    from triton.runtime import interpreter

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        total = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)) + d.data
        return interpreter.TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)

    with patch.object(interpreter.InterpreterBuilder, "create_dot", create_dot):
        yield


def judged(call: DecodeCall) -> dict[str, float]:
    """Twice, once into a given out with gaps; the same bits, no band touched, and as good as the oracle allows."""
    problem = DecodeProblem.from_call(call)
    with Poison() as poison:
        held = call._replace(
            **{n: poison.enclose(n, t) for n, t in zip(call._fields, call) if isinstance(t, Tensor) and t.dtype != FP8}
        )
        batch, rows, heads, width = problem.out_shapes[0]
        given = poison.empty(
            call.q.new_zeros((batch, rows, heads + 1, width + 8), dtype=problem.out_dtype)[:, :, :heads, :width]
        )
        out, lse = ops_decode.run(held)
        again, lse_again = ops_decode.run(held, given)
    assert_kernel(ops_decode.decide(held), call.kernel)
    for name, one, other in (("out", out, again), ("lse", lse, lse_again)):
        where = (one != other).nonzero()[:6].tolist()
        told = [(at, one[tuple(at)].item(), other[tuple(at)].item()) for at in where]
        assert torch.equal(one, other), f"two runs of one call differ in {name}: {told}"
    return assert_decode_as_good_as((out, lse), call)


def on(target: Target, call: DecodeCall) -> tuple[Tensor, Tensor]:
    """out and lse by the plan that `target` would have, wherever this runs: for splits that a small machine would not
    make.
    """
    choice = select(DecodeProblem.from_call(call), target)
    problem = choice.problem
    out, lse = (
        torch.empty(shape, dtype=dtype, device=call.q.device)
        for shape, dtype in zip(problem.out_shapes, (problem.out_dtype, problem.lse_dtype))
    )
    ops._launch(choice.forward, call, Forward(out, lse))
    return out, lse


class Table(NamedTuple):
    """A drawn call, which of its pool's rows any sequence owns, and whether a page that some row sees is lost."""

    call: DecodeCall
    owned: Tensor  # bool [n_pages, page_size]
    lost: bool
    pools: tuple[Tensor, Tensor]  # k and v with their guard pages


def draw_table(
    seed: int, batch: int, device: str = "cpu", dtype: torch.dtype = torch.float64, kernel: str = ""
) -> Table:
    """Page tables that share pages, lose some and end in garbage; everything that nobody owns is NaN, guard pages
    around the pool too.
    """
    g = torch.Generator().manual_seed(seed)
    pick = lambda *choices: choices[int(torch.randint(len(choices), (1,), generator=g))]
    size, tokens, heads_kv, width = pick(1, 2, 3, 4, 8, 16, 64), pick(1, 1, 1, 2, 4), pick(1, 2), pick(8, 16)
    columns = 1 + int(torch.randint(max(2, 64 // size), (1,), generator=g))
    n_pages = 1 + int(torch.randint(batch * columns, (1,), generator=g))
    lengths = torch.randint(0, columns * size + 1, (batch,), generator=g)
    left, right = pick((-1, 0), (-1, 0), (-1, -1), (5, 0), (3, 2))
    table = torch.randint(n_pages, (batch, columns), generator=g)
    used = torch.arange(columns)[None] < -(-lengths // size)[:, None]
    strays = torch.tensor([*WILD, n_pages])[torch.randint(len(WILD) + 1, table.shape, generator=g)]
    gone = used & (torch.rand(table.shape, generator=g) < pick(0.0, 0.0, 0.1))
    table = torch.where(gone | ~used, strays, table)
    owned = torch.zeros(n_pages, size, dtype=torch.bool)
    position = torch.arange(columns * size)[None]
    own = (position < lengths[:, None]) & ~gone.repeat_interleave(size, 1)
    pages = table.repeat_interleave(size, 1)
    owned[pages[own], (position % size).expand_as(own)[own]] = True
    first = torch.zeros_like(lengths) if left < 0 else (lengths - tokens - left).clamp(min=0)
    stop = lengths if right < 0 else torch.minimum(lengths, lengths + right)
    lost = bool(
        (
            gone
            & (torch.arange(columns)[None] < -(-stop // size)[:, None])
            & (torch.arange(columns)[None] >= (first // size)[:, None])
        ).any()
    )
    pools = tuple(
        torch.randn(n_pages + 4, size, heads_kv, width, generator=g, dtype=torch.float64).to(dtype).to(device)
        for _ in range(2)
    )
    k, v = (pool[2:-2] for pool in pools)
    if pick(False, True):  # heads before rows
        pools = tuple(pool.transpose(1, 2).contiguous() for pool in pools)
        k, v = (pool[2:-2].transpose(1, 2) for pool in pools)
    q = torch.randn(batch, tokens, heads_kv * pick(1, 3), width, generator=g, dtype=torch.float64).to(dtype).to(device)
    ints = [t.to(device, torch.int32) for t in (lengths, table)]
    call = DecodeCall(q, k, v, ints[0], ints[1], left=left, right=right, softcap=pick(0.0, 0.0, 2.0), kernel=kernel)
    return Table(call, owned.to(device), lost, (pools[0], pools[1]))


def fill_unowned(drawn: Table, value: float) -> None:
    """Every row of the pool that nobody owns, and the guard pages, hold `value` from here."""
    for pool, view in zip(drawn.pools, (drawn.call.k, drawn.call.v)):
        kept = view[drawn.owned].clone()
        pool.fill_(value)
        view[drawn.owned] = kept


def expected(call: DecodeCall, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """out and lse of a paged call in float64, the whole batch at once, from nothing but the contract; hidden keys are
    never multiplied.
    """
    tokens, heads, width = call.q.shape[1:]
    size, group = call.k.shape[1], heads // call.k.shape[2]
    position = torch.arange(call.page_table.shape[1] * size, device=call.q.device)
    page = call.page_table.long()[:, position // size]
    n = call.seqlens.long()[:, None]
    held = (position < n) & (page >= 0) & (page < call.k.shape[0])
    k, v = (
        pool[page.where(held, 0), position % size].double().where(held[..., None, None], 0.0)
        for pool in (call.k, call.v)
    )
    k, v = (t.repeat_interleave(group, 2) for t in (k, v))
    s = torch.einsum("bthd,bshd->bhts", call.q.double(), k) * width**-0.5
    s = call.softcap * torch.tanh(s / call.softcap) if call.softcap else s
    row = (n - tokens + torch.arange(tokens, device=n.device))[:, :, None]
    seen = (
        held[:, None]
        & ((call.left < 0) | (position >= row - call.left))
        & ((call.right < 0) | (position <= row + call.right))
    )
    s = s.masked_fill(~seen[:, None], -torch.inf)
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return torch.einsum("bhts,bshd->bthd", p, v).to(dtype), lse.to(dtype)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    return fill_with_poison(torch.empty(shape, dtype=dtype, device=device))
