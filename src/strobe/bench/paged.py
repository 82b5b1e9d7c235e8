"""The paged suite: new tokens of several sequences over a cold paged cache. Rivals read the same keys packed, without
pages.

As in the decode suite, each contender has several caches, together larger than any L2, and a sample runs over all of
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..interface import attention as interface_attention
from ..interface import paged as interface
from ..kernels.protocol import Cost
from ..problem.cache import PagedCache, quantize_kv
from . import cold
from .cases import chosen
from .rivals import named
from .run import Options


class Rows(NamedTuple):
    """The tokens and keys of all sequences, packed."""

    q: Tensor  # [T, H_q, D]
    k: Tensor  # [keys, H_kv, D]
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    most_q: int
    most_k: int


Prepare = Callable[[Rows], Callable[[], Tensor]]


@dataclass(frozen=True)
class PagedBenchCase:
    """One case: `groups` of sequences as (how many, keys of each, new tokens of each)."""

    name: str
    groups: tuple[tuple[int, int, int], ...]
    page_size: int = 16
    fp8: bool = False
    heads_q: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def lengths(self) -> list[int]:
        return [keys for count, keys, _ in self.groups for _ in range(count)]

    @property
    def news(self) -> list[int]:
        return [tokens for count, _, tokens in self.groups for _ in range(count)]

    @property
    def copies(self) -> int:
        """The number of caches that one sample runs over."""
        held = 2 * sum(self.lengths) * self.heads_kv * self.head_dim * (1 if self.fp8 else self.dtype.itemsize)
        return max(1, ceil(cold.COLD_BYTES / held))

    @property
    def cost(self) -> Cost:
        """Of the visible pairs, and of reading the keys once."""
        pairs = sum(new * (keys - new) + new * (new + 1) // 2 for keys, new in zip(self.lengths, self.news))
        size = self.dtype.itemsize
        read = 2 * sum(self.lengths) * self.heads_kv * self.head_dim * (1 if self.fp8 else size)
        rows = 2 * sum(self.news) * self.heads_q * self.head_dim * size
        return Cost(4.0 * pairs * self.heads_q * self.head_dim, read + rows)

    def inputs(self, device: torch.device, count: int = 1) -> list[tuple[Rows, PagedCache]]:
        """`count` layers: packed rows and a cache of shuffled pages each. All share one page table and lengths."""
        draw = torch.Generator(device).manual_seed(0)
        pages = [ceil(keys / self.page_size) for keys in self.lengths]
        order = torch.randperm(sum(pages), device=device, generator=draw).to(torch.int32)
        table = torch.zeros(len(pages), max(pages), dtype=torch.int32, device=device)
        for row, part in zip(table, order.split(pages)):
            row[: len(part)] = part
        return [self._layer(draw, table, order.split(pages)) for _ in range(count)]

    def _layer(self, draw: torch.Generator, table: Tensor, pages: tuple[Tensor, ...]) -> tuple[Rows, PagedCache]:
        device, sizes = table.device, (sum(self.news), sum(self.lengths), sum(self.lengths))
        heads = (self.heads_q, self.heads_kv, self.heads_kv)
        q, k, v = (
            torch.randn(size, count, self.head_dim, device=device, generator=draw).to(self.dtype)
            for size, count in zip(sizes, heads)
        )
        held_k, held_v, k_scale, v_scale = quantize_kv(k, v) if self.fp8 else (k, v, None, None)
        pool_k, pool_v = (self._pooled(t, pages) for t in (held_k, held_v))
        int32 = lambda counts: torch.tensor(counts, dtype=torch.int32, device=device)
        offsets_q, offsets_k = (int32([0, *accumulate(counts)]) for counts in (self.news, self.lengths))
        rows = Rows(q, k, v, offsets_q, offsets_k, max(self.news), max(self.lengths))
        return rows, PagedCache(pool_k, pool_v, table, int32(self.lengths), k_scale, v_scale)

    def _pooled(self, t: Tensor, pages: tuple[Tensor, ...]) -> Tensor:
        stored = t.view(torch.uint8) if self.fp8 else t
        pool = stored.new_zeros(sum(map(len, pages)), self.page_size, *t.shape[1:])
        for own, part in zip(pages, stored.split(self.lengths)):
            room = part.new_zeros(len(own) * self.page_size, *t.shape[1:])
            room[: len(part)] = part
            pool[own.long()] = room.view(len(own), self.page_size, *t.shape[1:])
        return pool.view(t.dtype)


SUITE = [
    *(PagedBenchCase(f"b64_8k_t{tokens}", ((64, 8192, tokens),)) for tokens in (1, 2, 4, 8, 16)),
    PagedBenchCase("b64_8k_t16_64_heads", ((64, 8192, 16),), heads_q=64),
    PagedBenchCase("b32_8k_t16_d256", ((32, 8192, 16),), head_dim=256),
    PagedBenchCase("b4_1k_t8", ((4, 1024, 8),)),
    PagedBenchCase("chunk_2k_over_32k", ((1, 34816, 2048),)),
    PagedBenchCase("chunk_2k_over_32k_pages_of_64", ((1, 34816, 2048),), page_size=64),
    PagedBenchCase("chunk_2k_over_32k_float8", ((1, 34816, 2048),), fp8=True),
    PagedBenchCase("4_chunks_1k_over_16k", ((4, 17408, 1024),)),
    PagedBenchCase("8_prefills_512", ((8, 512, 512),)),
    PagedBenchCase("56_decodes_8k", ((56, 8192, 1),)),
    PagedBenchCase("mixed", ((8, 512, 512), (56, 8192, 1))),
]


def suite(patterns: Iterable[str]) -> list[PagedBenchCase]:
    """The cases whose names match a pattern (fnmatch). Without patterns: all cases. Raises InvalidProblem for a pattern
    without a match.

    >>> [case.name for case in suite(["b64_8k_t1*"])]
    ['b64_8k_t1', 'b64_8k_t16', 'b64_8k_t16_64_heads']
    """
    return chosen(SUITE, list(patterns))


# ---------------------------------------------------------------- rivals, over packed keys


def _keywords(rows: Rows) -> dict[str, Any]:
    offsets = {"cu_seqlens_q": rows.cu_seqlens_q, "cu_seqlens_k": rows.cu_seqlens_k}
    return {**offsets, "max_seqlen_q": rows.most_q, "max_seqlen_k": rows.most_k, "causal": True}


def _varlen(rows: Rows) -> Callable[[], Tensor]:
    """strobe.attention_varlen: what pages cost."""
    call: Any = interface_attention.attention_varlen
    return lambda: call(rows.q, rows.k, rows.v, **_keywords(rows))


def _fa4(rows: Rows) -> Callable[[], Tensor]:
    cute = import_module("flash_attn.cute")
    return lambda: cute.flash_attn_varlen_func(rows.q, rows.k, rows.v, **_keywords(rows))[0]


RIVALS: dict[str, dict[str, Prepare]] = {"cuda": {"varlen": _varlen, "fa4": _fa4}, "cpu": {"varlen": _varlen}}


def pick(names: list[str], device: torch.device) -> dict[str, Prepare]:
    """The named rivals, or all for this device. Raises InvalidProblem for an unknown name.

    >>> list(pick([], torch.device("cpu")))
    ['varlen']
    """
    return named(names, RIVALS[device.type])


# ---------------------------------------------------------------- one case -> one row


def measure(case: PagedBenchCase, rivals: dict[str, Prepare], options: Options) -> dict:
    """Measure a case with strobe and every rival. "refused" in the row names rivals that cannot run it, with
    reasons.
    """
    keywords: Callable[[Rows], dict[str, Any]] = lambda rows: {
        "cu_seqlens_q": rows.cu_seqlens_q,
        "max_seqlen_q": rows.most_q,
        "kernel": options.kernel,
    }
    call: Any = interface.attention_paged
    ours = lambda rows, cache: lambda: call(rows.q, cache, **keywords(rows))
    with torch.no_grad(), cold.side_stream(options.device):
        inputs = case.inputs(options.device, case.copies)
        found = cold.measured(case, inputs, ours, rivals, options)
        rows, cache = inputs[0]
        choice = interface.explain_paged(rows.q, cache, **keywords(rows)) if "strobe" in found.times else None
    return cold.row(case, "paged", choice, case.cost, found, options)
