"""Decoding: attention of each sequence's newest tokens over its KV cache. `DecodeCall` holds the tensors,
`DecodeProblem` the metadata.

With n = seqlens[b], row i of T has position n - T + i: the T tokens are the last of the sequence, and the cache already
contains them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidProblem, UnsupportedProblem
from .cache import FP8, Held, OfCache, check_cache, check_tensor
from .call import DTYPES, FARTHEST, Dense, Paged, accumulator, check_captured, check_scores, check_sinks
from .mask import NO_BOUND
from .mods import Mods, ModTexts
from .problem import ALIGNMENT, base_offset, rows_apart
from .torch_state import tangents, wants_beneath


class DecodeCall(NamedTuple):
    """The arguments of one call, flat, in the order of the op's schema. k and v hold pages if page_table is given, else
    rows.
    """

    q: Tensor  # [B, T, H_q, D]
    k: Tensor
    v: Tensor
    seqlens: Tensor  # int32 [B]
    page_table: Tensor | None = None  # int32 [B, max_pages]
    k_start: Tensor | None = None  # int32 [B], rows only
    k_scale: Tensor | None = None  # float32 [H_kv]
    v_scale: Tensor | None = None
    sinks: Tensor | None = None  # [H_q]
    left: int = NO_BOUND
    right: int = NO_BOUND
    scale: float | None = None
    softcap: float = 0.0
    batch_invariant: bool = False
    kernel: str = ""
    partial: bool = False
    mods: Mods | None = None  # not in the schema: the op of `ops.mods` takes its parts

    @property
    def held(self) -> Held:
        """The cache."""
        return Held(*self[1:8])

    @property
    def about(self) -> tuple[Tensor | None, ...]:
        """The tensor fields; absent ones are None."""
        return self[:9]

    @property
    def tensors_and_rest(self) -> tuple[list[Tensor], tuple]:
        """The tensors, and a hashable tuple of the other fields. The tuple also records which optional tensors are
        absent.
        """
        about = self[:9]
        absent = [field is None for field in about[4:]]
        tensors, rest = [field for field in about if field is not None], ("decode", *absent, *self[9:-1])
        return (tensors, rest) if self.mods is None else ([*tensors, *self.mods.read], (*rest, self.mods.texts))

    @property
    def whole(self) -> bool:
        """Whether all tensors but q, k and v are contiguous. Kernels do not read their strides."""
        return all([field is None or field.is_contiguous() for field in self[3:9]])

    @property
    def tensors(self) -> list[Tensor]:
        """The tensor fields that are present."""
        return [field for field in self.about if field is not None]


def check(call: DecodeCall, by_token: bool = False) -> Dense | Paged:
    """Validate the arguments and return their layout. Reads only metadata. Raises InvalidProblem or TypeError naming
    the argument. by_token: scales may be given for each key and head.
    """
    q, held = call.q, call.held
    check_tensor("q", q, "[B, T, H_q, D]", 4)
    if q.dtype not in DTYPES:
        raise InvalidProblem(
            "q", q.dtype, "float16, bfloat16, float32 or float64", "convert it with .to(torch.bfloat16)"
        )
    layout = check_cache(held, q.shape[0], q.dtype, "q", by_token)
    if q.device != held.k.device:
        raise InvalidProblem("q", f"device {q.device}", f"the cache's {held.k.device}", "move it to the cache")
    heads_q, heads_kv = q.shape[2], held.k.shape[2]
    if heads_q != 0 and (heads_kv == 0 or heads_q % heads_kv):
        raise InvalidProblem(
            held.word("k"),
            f"{heads_kv} heads",
            f"a divisor of q's {heads_q}",
            "query head h reads key head h // (H_q // H_kv)",
        )
    if held.k.shape[-1] != q.shape[-1]:
        raise InvalidProblem(
            held.word("k"),
            f"head dimension {held.k.shape[-1]}",
            f"q's {q.shape[-1]}",
            "only v may have a width of its own",
        )
    if call.sinks is not None:
        check_sinks(call.sinks, heads_q)
        if call.sinks.device != q.device:
            raise InvalidProblem(
                "sinks",
                f"device {call.sinks.device}",
                f"q's device {q.device}",
                "move all of a call's tensors to one device",
            )
    check_scores(call.scale, call.softcap, q)
    check_captured(call)
    for name in ("left", "right"):
        if not NO_BOUND <= getattr(call, name) <= FARTHEST:
            raise InvalidProblem(
                name,
                getattr(call, name),
                f"a number from 0 to {FARTHEST}, or -1 for none",
                "call strobe.attention_decode",
            )
    return layout._replace(seqlen_q=q.shape[1])


@dataclass(frozen=True)
class DecodeProblem(OfCache):
    """The metadata of a call: everything except tensor contents. Lengths and page ids are device data, so plans depend
    on shapes only.

    >>> k = torch.empty(2, 128, 2, 64)
    >>> q, lengths = torch.empty(2, 1, 8, 64), torch.zeros(2, dtype=torch.int32)
    >>> str(DecodeProblem.from_call(DecodeCall(q, k, k, lengths, right=0)))
    'decode B=2 T=1 S_max=128 H_q=8 H_kv=2 D=64 float32, causal, scale 0.125'
    """

    layout: Dense | Paged
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    out_dtype: torch.dtype
    scale: float
    softcap: float
    left: int
    right: int
    sinks: bool
    k_start: bool
    scales: tuple[bool, bool]  # whether k and v have one
    strides: tuple[tuple[int, ...], ...]  # of q, k, v in elements
    alignment: int  # bytes: the largest power of two up to 16 that divides every base address and stride of k and v
    batch_invariant: bool
    kernel: str
    mods: ModTexts | None = field(default=None, kw_only=True)  # a custom score and mask

    directions = ("decode",)

    @staticmethod
    def from_call(call: DecodeCall) -> DecodeProblem:
        """Validate a call and describe it."""
        return DecodeProblem.of_checked(call, check(call))

    @staticmethod
    def of_checked(call: DecodeCall, layout: Dense | Paged) -> DecodeProblem:
        """Describe a call that `check` found valid."""
        q, k, v = call[:3]
        return DecodeProblem(
            layout=layout,
            heads_q=q.shape[2],
            heads_kv=k.shape[2],
            head_dim=q.shape[3],
            head_dim_v=v.shape[3],
            dtype=q.dtype,
            cache_dtype=k.dtype,
            out_dtype=accumulator(q.dtype) if call.partial else q.dtype,
            scale=q.shape[3] ** -0.5 if call.scale is None else call.scale,
            softcap=call.softcap,
            left=call.left,
            right=call.right,
            sinks=call.sinks is not None,
            k_start=call.k_start is not None,
            scales=(call.k_scale is not None, call.v_scale is not None),
            strides=(q.stride(), k.stride(), v.stride()),
            alignment=min(_alignment(k), _alignment(v)),
            batch_invariant=call.batch_invariant,
            kernel=call.kernel,
            mods=None if call.mods is None else call.mods.texts,
        )

    @property
    def group(self) -> int:
        """The number of query heads per key head."""
        return self.heads_q // self.heads_kv if self.heads_q and self.heads_kv else 1

    @property
    def vacuous(self) -> bool:
        """Whether the output has no row."""
        return 0 in (self.layout.batch, self.layout.seqlen_q, self.heads_q)

    @cached_property
    def out_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of out and lse."""
        batch, rows = self.layout.batch, self.layout.seqlen_q
        return (batch, rows, self.heads_q, self.head_dim_v), (batch, self.heads_q, rows)

    @property
    def lse_dtype(self) -> torch.dtype:
        return accumulator(self.dtype)

    @cached_property
    def outputs(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]:
        """Shape, strides and dtype of out and lse, which are contiguous."""
        out, lse = self.out_shapes
        return (out, rows_apart(out), self.out_dtype), (lse, rows_apart(lse), self.lse_dtype)

    @cached_property
    def lse_bytes(self) -> int:
        return math.prod(self.out_shapes[1]) * self.lse_dtype.itemsize

    def example(self, device: torch.device) -> DecodeCall:
        """A call of this problem on zeros, with empty sequences."""
        if self.mods is not None:
            raise UnsupportedProblem(
                f"{self}: a problem with functions has no example without them; pass them to warmup"
            )
        batch, rows = self.layout.batch, self.layout.seqlen_q
        pages = (
            (self.layout.n_pages, self.layout.page_size)
            if isinstance(self.layout, Paged)
            else (batch, self.layout.seqlen_k)
        )
        shapes = (
            (batch, rows, self.heads_q, self.head_dim),
            (*pages, self.heads_kv, self.head_dim),
            (*pages, self.heads_kv, self.head_dim_v),
        )
        q, k, v = (
            _zeros(shape, strides, dtype, device, self.alignment if n else ALIGNMENT)
            for n, (shape, strides, dtype) in enumerate(
                zip(shapes, self.strides, (self.dtype, self.cache_dtype, self.cache_dtype))
            )
        )
        zeros = lambda *shape: torch.zeros(shape, dtype=torch.int32, device=device)
        k_scale, v_scale = (
            torch.ones(self.heads_kv, dtype=torch.float32, device=device) if present else None
            for present in self.scales
        )
        return DecodeCall(
            q, k, v, zeros(batch), zeros(batch, self.layout.max_pages) if isinstance(self.layout, Paged) else None,
            zeros(batch) if self.k_start else None, k_scale, v_scale,
            torch.zeros(self.heads_q, device=device) if self.sinks else None,
            self.left, self.right, self.scale, self.softcap, self.batch_invariant, self.kernel,
            self.out_dtype != self.dtype,
        )  # fmt: skip

    def __str__(self) -> str:
        layout = (
            str(self.layout) if self.paged else f"B={self.layout.batch} T={self.layout.seqlen_q} S_max={self.capacity}"
        )
        width = f"D={self.head_dim}" + (f" D_v={self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        words = [f"decode {layout} H_q={self.heads_q} H_kv={self.heads_kv} {width} {DTYPES[self.dtype]}"]
        words += ["cache in float8_e4m3fn"] * (self.cache_dtype == FP8) + [
            self._mask_words(),
            f"scale {self.scale:.3g}",
        ]
        words += (
            [f"softcap {self.softcap:g}"] * bool(self.softcap) + ["sinks"] * self.sinks + ["left padded"] * self.k_start
        )
        words += [] if self.mods is None else [str(self.mods)]
        return ", ".join(words + ["batch invariant"] * self.batch_invariant)

    def _mask_words(self) -> str:
        left, right = (None if bound == NO_BOUND else bound for bound in (self.left, self.right))
        if left is None:
            return "full" if right is None else "causal" if right == 0 else f"window (None, {right})"
        return f"window ({left}, {right})"


def refuse_gradients(tensors: list[Tensor], what: str) -> None:
    """Raise UnsupportedProblem if a tensor needs a gradient or has a tangent: cache ops have no derivatives."""
    if tangents(tensors) or (
        torch.is_grad_enabled() and (any(t.requires_grad for t in tensors) or wants_beneath(tensors))
    ):
        raise UnsupportedProblem(
            f"gradients through {what}: call it under torch.no_grad(), or use strobe.attention for training"
        )


def _zeros(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device, alignment: int
) -> Tensor:
    """Zeros with these strides. Their base address is not aligned to more than `alignment` bytes."""
    offset = alignment // dtype.itemsize if alignment < ALIGNMENT else 0
    extent = 1 + offset + sum((size - 1) * stride for size, stride in zip(shape, strides)) if 0 not in shape else offset
    return torch.zeros(extent, device=device).to(dtype).as_strided(shape, strides, offset)


def _alignment(tensor: Tensor) -> int:
    steps = [stride * tensor.element_size() for stride in tensor.stride()[:-1]]
    common = math.gcd(ALIGNMENT, *steps, base_offset(tensor))
    return common & -common
