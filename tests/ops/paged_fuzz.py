"""Ragged batches for attention_paged, drawn from numbers: on a CPU against the oracle in float64, on a GPU against
dense attention in torch.

    python -m tests.ops.paged_fuzz --count 100000 --state FILE       continues where an earlier run stopped

A failure names its number, and `--seed NUMBER --count 1` runs that batch alone.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import strobe
from strobe import reference
from strobe.ops import paged as ops_paged
from strobe.problem.mask import NO_BOUND
from strobe.problem.paged import PagedCall
from strobe.testing.paged import PagedCase

UNIT = 2.0**-53  # of float64


def drawn(seed: int) -> PagedCase:
    """Any mix of prefills, chunks, decodes, drafted tokens and empty sequences, over pages of any size or rows."""
    g = random.Random(seed)
    size, count, heads_kv = g.choice((0, 0, 1, 2, 3, 4, 8, 16, 64)), g.randint(1, 6), g.randint(1, 2)
    lengths = tuple(g.choice((0, 1, g.randint(0, 40), g.randint(0, 40), g.randint(41, 120))) for _ in range(count))
    news = tuple(g.choice((0, 1, 1, 2, 4, length // 2, length, length + 2)) for length in lengths)
    left = g.choice((NO_BOUND, NO_BOUND, 0, 3, 20))
    fp8 = g.random() < 0.25
    return PagedCase(
        f"drawn {seed}",
        lengths,
        g.choice((0, max(1, *news))) if count > 1 else 0,
        (heads_kv * g.randint(1, 4), heads_kv),
        head_dim=g.choice((1, 5, 8, 16)),
        head_dim_v=g.choice((None, None, 3)),
        page_size=size,
        starts=tuple(g.randint(0, n) for n in lengths) if not size and g.random() < 0.5 else (),
        left=left,
        right=g.choice((0, 0, NO_BOUND, 2)) if left == NO_BOUND else g.choice((0, 0, 2)),
        softcap=g.choice((0.0, 0.0, 2.0)),
        scale=g.choice((None, None, None, -0.5, 0.0)),
        sinks=g.random() < 0.5,
        fp8=fp8,
        token_scales=fp8 and g.random() < 0.5,
        heads_first=g.random() < 0.5,
        room=g.randint(0, 2),
        padding=g.randint(0, 2),
        news=news,
    )


def bounds(call: PagedCall) -> tuple[float, float]:
    """How far two float64 results of a call may be apart: out, and lse.

    A score is a sum of D products, at most S = |scale| |q| |k|: each of the two is off by at most (D + 4) UNIT S. A
    weight is then off by twice that, relatively, and by one rounding for each of n keys in its sum.
    """
    width = call.q.shape[-1]
    scale = width**-0.5 if call.scale is None else abs(call.scale)
    k, v = (_worth(pool, by) for pool, by in ((call.k, call.k_scale), (call.v, call.v_scale)))
    largest = lambda t: float(t.norm(dim=-1).max()) if t.numel() else 0.0
    score = 2 * (width + 4) * UNIT * scale * largest(call.q) * largest(k)
    keys = call.held.k.shape[1] * (call.page_table.shape[1] if call.page_table is not None else 1)
    rest = 2 * (keys + 8) * UNIT
    return (2 * score + rest) * float(v.abs().max() if v.numel() else 0.0), score + rest


def _worth(pool: Tensor, scale: Tensor | None) -> Tensor:
    """Keys or values in float64, with 0 in place of NaN."""
    wide = pool.double().nan_to_num(0.0)
    return wide if scale is None else (wide * scale.double()[..., None]).nan_to_num(0.0)


def check(seed: int) -> None:
    """Compare one batch with the oracle. Keys that no query sees are NaN, freed pages before a window among them."""
    case = drawn(seed)
    call = case.build(dtype=torch.float64, seed=seed)
    for one, other, bound in zip(ops_paged.run(call), reference.paged(call), bounds(call)):
        torch.testing.assert_close(one, other, rtol=8 * UNIT, atol=bound, msg=lambda text: f"{case}: {text}")
    errors = strobe.last_errors()
    assert errors == [], f"{case}: {errors}"


# ---------------------------------------------------------------- on a GPU


class Form(NamedTuple):
    """Constants of compiled kernels. Batches of one form differ only in lengths, new tokens and page tables."""

    page_size: int
    heads: tuple[int, int] = (8, 2)
    head_dim: int = 64
    left: int | None = None
    sinks: bool = False
    most: int = 64  # largest number of new tokens of a sequence; a Hopper GPU runs its decode up to 16


FORMS = (
    Form(16), Form(16, most=1), Form(1, most=16), Form(64, left=40), Form(16, left=20, most=1),
    Form(16, head_dim=128, sinks=True), Form(128, heads=(4, 4), most=8),
)  # fmt: skip
SECONDS_BETWEEN_REPORTS = 5.0
ROOM = 512  # keys of a sequence at most


class Batch(NamedTuple):
    cache: strobe.PagedCache
    offsets: Tensor
    lengths: Tensor  # on the host
    news: Tensor  # on the host


class GpuFuzz:
    """Batches of one form over one pool. Each batch has another random page table."""

    def __init__(self, form: Form, device: str, seed: int = 0):
        self.form, self.device = form, device
        self.generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=self.generator).to(device, torch.bfloat16)
        self.columns = ROOM // form.page_size
        self.n_pages = 8 * self.columns + 3
        self.pools = [draw(self.n_pages, form.page_size, form.heads[1], form.head_dim) for _ in range(2)]
        self.q = draw(8 * form.most + 3, form.heads[0], form.head_dim)
        self.sinks = draw(form.heads[0]).float() if form.sinks else None
        self.options = {"window": None if form.left is None else (form.left, 0), "sinks": self.sinks}

    def batch(self) -> Batch:
        """Eight sequences of 0 to `most` new tokens and up to ROOM keys. Rows after the last offset are padding."""
        g, most = self.generator, self.form.most
        draw = lambda low, high: torch.randint(low, high, (8,), generator=g)
        news = torch.where(draw(0, 4) == 0, draw(0, 2), draw(0, most + 1)).clamp(max=most)
        lengths = torch.maximum(torch.where(draw(0, 3) == 0, draw(0, 40), draw(0, ROOM + 1)), news).clamp(max=ROOM)
        offsets = torch.nn.functional.pad(news.cumsum(0), (1, 0)).int()
        table = torch.randperm(self.n_pages, generator=g)[: 8 * self.columns].view(8, -1).int()
        table, on = table.to(self.device), lambda t: t.int().to(self.device)
        cache = strobe.PagedCache(*self.pools, table, on(lengths))
        return Batch(cache, on(offsets), lengths, news)

    def run(self, batch: Batch, **more) -> tuple[Tensor, Tensor]:
        return strobe.attention_paged(
            self.q, batch.cache, cu_seqlens_q=batch.offsets, max_seqlen_q=self.form.most, return_lse=True,
            **self.options, **more,
        )  # fmt: skip

    def dense(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """out and lse of all rows by dense attention in float32: every row against all keys of its sequence."""
        device, form = self.device, self.form
        row = torch.arange(len(self.q), device=device)
        sequence = torch.searchsorted(batch.offsets[1:].contiguous(), row.int(), right=True).clamp(max=7)
        length = batch.cache.seqlens.long()[sequence]
        stop = batch.offsets.long()[1:][sequence]
        position = length - stop + row
        k, v = (pool[batch.cache.page_table.long()].flatten(1, 2)[:, :ROOM].float() for pool in self.pools)
        group = form.heads[0] // form.heads[1]
        q = self.q.float().unflatten(1, (form.heads[1], group))
        all_scores = torch.einsum("tkgd,bskd->tbkgs", q, k)
        scores = all_scores.gather(1, sequence.view(-1, 1, 1, 1, 1).expand(-1, 1, *all_scores.shape[2:]))[:, 0]
        scores = scores * form.head_dim**-0.5
        key = torch.arange(ROOM, device=device)
        seen = (key < length[:, None]) & (key <= position[:, None])
        if form.left is not None:
            seen &= key >= position[:, None] - form.left
        seen &= (row < batch.offsets[-1])[:, None]
        scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
        whole = scores
        if self.sinks is not None:
            sinks = self.sinks.view(1, form.heads[1], group, 1).expand(len(row), -1, -1, 1)
            whole = torch.cat([scores, sinks], -1)
        lse = whole.logsumexp(-1)
        weights = (scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None]).exp()
        out = torch.zeros(len(row), form.heads[1], group, form.head_dim, device=device)
        for b in range(8):
            own = torch.einsum("tkgs,skd->tkgd", weights, v[b])
            out = torch.where((sequence == b)[:, None, None, None], own, out)
        return out.flatten(1, 2), lse.flatten(1).T

    def bad(self, batch: Batch) -> Tensor:
        """Whether a batch differs from dense attention by more than its roundings; on the device.

        P and out are rounded to bfloat16, 2^-9 each, and weights sum to at most 1. A half more is for sums in float32
        and approximate exponentials. lse is a float32 sum of products of up to 128 terms.
        """
        (out, lse), (exact, exact_lse) = self.run(batch), self.dense(batch)
        most = self.pools[1].abs().max().float()
        wrong = ~((out.float() - exact).abs() <= 2.5 * 2.0**-9 * most).all()
        same = (lse == exact_lse) | ((lse - exact_lse).abs() <= 1e-4 * (1 + exact_lse.abs()))
        return wrong | ~same.all()


# ---------------------------------------------------------------- command line


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare drawn ragged batches with the oracle on a CPU.")
    parser.add_argument("--count", type=int, default=2000, help="batches in all (2000)")
    parser.add_argument("--seed", type=int, default=0, help="number of the first (0)")
    parser.add_argument("--state", type=Path, help="a file that holds the next number; an existing one is continued")
    options = parser.parse_args()
    torch.set_num_threads(1)
    stop = options.seed + options.count
    begin = int(options.state.read_text()) if options.state and options.state.exists() else options.seed
    started = reported = time.monotonic()
    for seed in range(begin, stop):
        check(seed)
        if seed + 1 < stop and time.monotonic() - reported < SECONDS_BETWEEN_REPORTS:
            continue
        reported = time.monotonic()
        if options.state:
            options.state.write_text(str(seed + 1))
        rate = (seed + 1 - begin) / (reported - started)
        print(f"{seed + 1} of {stop} batches, {rate:.0f} a second", flush=True)


if __name__ == "__main__":
    main()
