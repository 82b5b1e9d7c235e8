"""Packed new tokens over a KV cache: `PagedCall` holds the tensors of one call, `PagedProblem` its metadata.

Rows cu_seqlens_q[b] .. cu_seqlens_q[b + 1] - 1 of q are the last tokens of sequence b, and the cache already contains
them. With n = seqlens[b] and T_b rows, row i of the sequence has position n - T_b + i.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import UnsupportedProblem
from .cache import Held, check_offsets, check_tensor
from .call import Dense, Paged, check_captured
from .decode import DecodeCall, DecodeProblem
from .decode import check as check_decode
from .mask import NO_BOUND
from .mods import Mods
from .problem import rows_apart


class PagedCall(NamedTuple):
    """The arguments of one call, flat, in the order of the op's schema. k and v hold pages if page_table is given, else
    rows.
    """

    q: Tensor  # [T, H_q, D]
    k: Tensor
    v: Tensor
    seqlens: Tensor  # int32 [B]
    cu_seqlens_q: Tensor  # int32 [B + 1]
    page_table: Tensor | None = None  # int32 [B, max_pages]
    k_start: Tensor | None = None  # int32 [B], rows only
    k_scale: Tensor | None = None  # float32 [H_kv], or one for each key and head: k's shape without D
    v_scale: Tensor | None = None
    sinks: Tensor | None = None  # [H_q]
    max_seqlen_q: int = NO_BOUND
    left: int = NO_BOUND
    right: int = NO_BOUND
    scale: float | None = None
    softcap: float = 0.0
    batch_invariant: bool = False
    kernel: str = ""
    partial: bool = False
    mods: Mods | None = None  # not in the schema: the op of `ops.mods_paged` takes its parts

    @property
    def held(self) -> Held:
        """The cache."""
        return Held(self.k, self.v, self.seqlens, *self[5:9])

    @property
    def about(self) -> tuple[Tensor | None, ...]:
        """The tensor fields; absent ones are None."""
        return self[:10]

    @property
    def tensors_and_rest(self) -> tuple[list[Tensor], tuple]:
        """The tensors, and a hashable tuple of the other fields. The tuple also records which optional tensors are
        absent.
        """
        about = self[:10]
        absent = [field is None for field in about[5:]]
        tensors, rest = [field for field in about if field is not None], ("paged", *absent, *self[10:-1])
        return (tensors, rest) if self.mods is None else ([*tensors, *self.mods.read], (*rest, self.mods.texts))

    @property
    def whole(self) -> bool:
        """Whether all tensors but q, k and v are contiguous. Kernels do not read their strides."""
        return all([field is None or field.is_contiguous() for field in self[3:10]])

    @property
    def tensors(self) -> list[Tensor]:
        """The tensor fields that are present."""
        return [field for field in self.about if field is not None]

    def as_decode(self, q: Tensor) -> DecodeCall:
        """The decode of queries [B, T, H_q, D] over this call's cache."""
        return DecodeCall(q, self.k, self.v, self.seqlens, *self[5:10], *self[11:])


def check(call: PagedCall) -> Dense | Paged:
    """Validate the arguments and return their layout, whose seqlen_q is the most tokens that a sequence may have. Reads
    only metadata. Raises InvalidProblem or TypeError naming the argument.
    """
    q, offsets = call.q, call.cu_seqlens_q
    check_tensor("q", q, "[T, H_q, D]", 3)
    check_captured(call)
    batch = check_offsets(offsets, call.seqlens, "q", q.device)
    most = q.shape[0] if call.max_seqlen_q == NO_BOUND else min(call.max_seqlen_q, q.shape[0])
    # a decode of the same heads and widths, over the cache's own number of sequences
    layout = check_decode(call.as_decode(q[None].expand(batch, *q.shape)), by_token=True)
    return layout._replace(seqlen_q=most)


@dataclass(frozen=True)
class PagedProblem(DecodeProblem):
    """The metadata of a call: everything except tensor contents. Lengths, offsets and page ids are device data, so
    plans depend on shapes only.

    >>> k, lengths = torch.empty(2, 128, 2, 64), torch.zeros(2, dtype=torch.int32)
    >>> offsets = torch.tensor([0, 3, 4], dtype=torch.int32)
    >>> str(PagedProblem.from_call(PagedCall(torch.empty(4, 8, 64), k, k, lengths, offsets, right=0)))
    'paged B=2 T=4 S_max=128 H_q=8 H_kv=2 D=64 float32, causal, scale 0.125'
    """

    total_q: int
    max_seqlen_q: int  # as promised, NO_BOUND: nothing is
    token_scales: tuple[bool, bool]  # whether k and v have a scale for each key and head

    directions = ("paged",)

    @staticmethod
    def from_call(call: PagedCall) -> PagedProblem:
        """Validate a call and describe it."""
        layout = check(call)
        one = DecodeProblem.of_checked(call.as_decode(call.q[None]), layout)
        by_token = tuple(scale is not None and scale.dim() > 1 for scale in (call.k_scale, call.v_scale))
        known: dict[str, Any] = {field.name: getattr(one, field.name) for field in fields(one)}
        known["strides"] = (call.q.stride(), *one.strides[1:])
        known["scales"] = tuple(given and not many for given, many in zip(one.scales, by_token))
        return PagedProblem(
            **known, total_q=call.q.shape[0], max_seqlen_q=call.max_seqlen_q, token_scales=(by_token[0], by_token[1])
        )

    @property
    def vacuous(self) -> bool:
        """Whether the output has no row."""
        return 0 in (self.total_q, self.heads_q)

    @cached_property
    def out_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of out and lse."""
        return (self.total_q, self.heads_q, self.head_dim_v), (self.heads_q, self.total_q)

    def example(self, device: torch.device) -> PagedCall:
        """A call of this problem on zeros, with empty sequences."""
        if self.mods is not None:
            raise UnsupportedProblem(
                f"{self}: a problem with functions has no example without them; pass them to warmup"
            )
        known: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(DecodeProblem)}
        known["strides"] = (rows_apart((1, 1, self.heads_q, self.head_dim)), *self.strides[1:])
        known["layout"] = self.layout._replace(seqlen_q=1)
        one = DecodeProblem(**known).example(device)
        q = torch.empty_strided((self.total_q, self.heads_q, self.head_dim), self.strides[0], dtype=self.dtype)
        scales = [
            torch.ones(one.k.shape[:3], device=device) if by_token else scale
            for by_token, scale in zip(self.token_scales, (one.k_scale, one.v_scale))
        ]
        offsets = torch.zeros(self.layout.batch + 1, dtype=torch.int32, device=device)
        rest: Any = one.page_table, one.k_start, *scales, one.sinks, self.max_seqlen_q, *one[9:-1]
        return PagedCall(q.to(device).zero_(), *one[1:4], offsets, *rest)

    def __str__(self) -> str:
        longest = f", at most {self.max_seqlen_q} a sequence" * (self.max_seqlen_q != NO_BOUND)
        words = super().__str__().replace("decode", "paged", 1)
        return words.replace(f"T={self.layout.seqlen_q} ", f"T={self.total_q}{longest} ", 1)
