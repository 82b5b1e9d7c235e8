"""The decode suite: one new token per sequence over a cold paged cache. Rivals read the same keys from dense rows.

The time of a decode is the time to read its keys. In a model of many layers, keys come from memory and not from L2. So
each contender has several caches, together larger than any L2. One sample runs over all of them, on a GPU as one CUDA
graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..interface import decode as interface
from ..problem.cache import PagedCache, quantize_kv
from . import cold
from .cases import chosen
from .rivals import named
from .run import Options

Rows = tuple[Tensor, Tensor, Tensor]  # q [B, 1, H_q, D], k and v [B, S, H_kv, D]
Prepare = Callable[[Rows], Callable[[], Tensor]]


@dataclass(frozen=True)
class DecodeCase:
    """One decode case: `batch` sequences of `keys` keys each."""

    name: str
    batch: int
    keys: int
    page_size: int = 16
    fp8: bool = False
    batch_invariant: bool = False
    heads_q: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def copies(self) -> int:
        """The number of caches that one sample runs over."""
        held = 2 * self.batch * self.keys * self.heads_kv * self.head_dim * (1 if self.fp8 else self.dtype.itemsize)
        return max(1, ceil(cold.COLD_BYTES / held))

    def inputs(self, device: torch.device, count: int = 1) -> list[tuple[Rows, PagedCache]]:
        """`count` layers: dense rows and a cache of shuffled pages each. All share one page table and lengths, as the
        layers of a model do.
        """
        draw = torch.Generator(device).manual_seed(0)
        columns = -(-self.keys // self.page_size)
        table = torch.randperm(self.batch * columns, device=device, generator=draw).to(torch.int32)
        lengths = torch.full((self.batch,), self.keys, dtype=torch.int32, device=device)
        return [self._layer(draw, table.view(self.batch, columns), lengths) for _ in range(count)]

    def _layer(self, draw: torch.Generator, table: Tensor, lengths: Tensor) -> tuple[Rows, PagedCache]:
        shape = (self.batch, self.keys, self.heads_kv, self.head_dim)
        shapes = ((self.batch, 1, self.heads_q, self.head_dim), shape, shape)
        q, k, v = (torch.randn(s, device=draw.device, generator=draw).to(self.dtype) for s in shapes)
        held_k, held_v, k_scale, v_scale = quantize_kv(k, v) if self.fp8 else (k, v, None, None)
        pool_k, pool_v = (self._pooled(t, table.view(-1)) for t in (held_k, held_v))
        return (q, k, v), PagedCache(pool_k, pool_v, table, lengths, k_scale, v_scale)

    def _pooled(self, t: Tensor, table: Tensor) -> Tensor:
        stored = t.view(torch.uint8) if self.fp8 else t
        room = F.pad(stored, (0, 0, 0, 0, 0, -self.keys % self.page_size)).view(
            len(table), self.page_size, *t.shape[2:]
        )
        return torch.empty_like(room).index_copy_(0, table.long(), room).view(t.dtype)


SUITE = [
    DecodeCase("b1_1k", 1, 1024),
    DecodeCase("b1_8k", 1, 8192),
    DecodeCase("b1_128k", 1, 131072),
    DecodeCase("b8_8k", 8, 8192),
    DecodeCase("b32_4k", 32, 4096),
    DecodeCase("b64_8k", 64, 8192),
    DecodeCase("b64_8k_pages_of_1", 64, 8192, page_size=1),
    DecodeCase("b64_8k_float8", 64, 8192, fp8=True),
    DecodeCase("b8_8k_batch_invariant", 8, 8192, batch_invariant=True),
]


def suite(patterns: Iterable[str]) -> list[DecodeCase]:
    """The cases whose names match a pattern (fnmatch). Without patterns: all cases. Raises InvalidProblem for a pattern
    without a match.

    >>> [case.name for case in suite(["b1_*"])]
    ['b1_1k', 'b1_8k', 'b1_128k']
    """
    return chosen(SUITE, list(patterns))


# ---------------------------------------------------------------- rivals, over dense rows: their fastest layout


def _sdpa(*backends: SDPBackend) -> Prepare:
    def prepare(rows: Rows) -> Callable[[], Tensor]:
        q, k, v = (t.transpose(1, 2) for t in rows)

        def call() -> Tensor:
            with sdpa_kernel(list(backends)) if backends else nullcontext():
                return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)

        return call

    return prepare


def _fa4(rows: Rows) -> Callable[[], Tensor]:
    cute = import_module("flash_attn.cute")
    return lambda: cute.flash_attn_func(*rows)[0]


RIVALS: dict[str, dict[str, Prepare]] = {
    "cuda": {"cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION), "flash": _sdpa(SDPBackend.FLASH_ATTENTION), "fa4": _fa4},
    "cpu": {"sdpa": _sdpa()},
}


def pick(names: list[str], device: torch.device) -> dict[str, Prepare]:
    """The named rivals, or all for this device. Raises InvalidProblem for an unknown name.

    >>> list(pick([], torch.device("cpu")))
    ['sdpa']
    """
    return named(names, RIVALS[device.type])


# ---------------------------------------------------------------- one case -> one row


def measure(case: DecodeCase, rivals: dict[str, Prepare], options: Options) -> dict:
    """Measure a case with strobe and every rival. "refused" in the row names rivals that cannot run it, with
    reasons.
    """
    keywords: dict = dict(batch_invariant=case.batch_invariant, kernel=options.kernel)
    ours = lambda rows, cache: lambda: interface.attention_decode(rows[0], cache, **keywords)
    with torch.no_grad(), cold.side_stream(options.device):
        inputs = case.inputs(options.device, case.copies)
        found = cold.measured(case, inputs, ours, rivals, options)
        rows, cache = inputs[0]
        choice = interface.explain_decode(rows[0], cache, **keywords) if "strobe" in found.times else None
    work = choice.forward.kernel.cost(choice.problem) if choice is not None else None
    return cold.row(case, "decode", choice, work, found, options)
