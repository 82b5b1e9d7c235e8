"""`Problem`: everything about a call except its data. Selection reads it, and a kernel's plan belongs to it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from ..errors import UnsupportedProblem
from .call import DTYPES, Call, Dense, Packed, Paged, accumulator, check
from .mask import NO_BOUND, Documents, MaskStructure
from .mods import ONE_ADDITION, ModTexts
from .torch_private import FakeTensor

ALIGNMENT = 16  # bytes; TMA descriptors require it of base addresses and strides


@dataclass(frozen=True)
class Problem:
    """Everything about a call except its data. Hashable; equal problems share a Choice.

    >>> q = torch.empty(2, 128, 8, 64); kv = torch.empty(2, 128, 2, 64)
    >>> str(Problem.from_call(Call(q, kv, kv, right=0)))
    'B=2 S_q=128 S_k=128 H_q=8 H_kv=2 D=64 float32, causal, scale 0.125'
    """

    layout: Dense | Packed | Paged
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    scale: float
    softcap: float
    mask: MaskStructure
    left: int  # bounds are kernel arguments; here they serve only estimates and messages
    right: int
    sinks: bool
    strides: tuple[tuple[int, ...], ...]  # of q, k, v in elements
    alignment: int  # bytes: the largest power of two up to 16 that divides every base address and stride of q, k and v
    alignment_kv: int  # the same for k and v only
    needs_grad: bool
    deterministic: bool
    batch_invariant: bool
    kernel: str
    mods: ModTexts | None = None  # a custom score, its gradient, and a custom mask

    @property
    def directions(self) -> tuple[str, ...]:
        """The kernels it needs: "forward", and "backward" with gradients."""
        return ("forward", "backward") if self.needs_grad else ("forward",)

    @property
    def packed(self) -> bool:
        return isinstance(self.layout, Packed)

    @property
    def runs(self) -> bool:
        """Whether it has packed runs of queries over shared keys."""
        return isinstance(self.layout, Packed) and self.layout.runs

    @cached_property
    def out_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of out and lse."""
        if isinstance(self.layout, Packed):
            return (self.layout.total_q, self.heads_q, self.head_dim_v), (self.heads_q, self.layout.total_q)
        batch, seqlen_q = self.layout.batch, self.layout.seqlen_q
        return (batch, seqlen_q, self.heads_q, self.head_dim_v), (batch, self.heads_q, seqlen_q)

    @cached_property
    def lse_dtype(self) -> torch.dtype:
        return accumulator(self.dtype)

    @cached_property
    def outputs(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]:
        """Shape, strides and dtype of out and lse, both contiguous. torch allocates faster with explicit strides."""
        out, lse = self.out_shapes
        return (out, rows_apart(out), self.out_dtype), (lse, rows_apart(lse), self.lse_dtype)

    @cached_property
    def gradients(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]:
        """Shape, strides and dtype of dq, dk and dv."""
        *rows, _, _ = self.out_shapes[0]
        keys = (*rows[:-1], self.layout[2])
        shapes = (
            (*rows, self.heads_q, self.head_dim),
            (*keys, self.heads_kv, self.head_dim),
            (*keys, self.heads_kv, self.head_dim_v),
        )
        return tuple((shape, rows_apart(shape), self.dtype) for shape in shapes)

    @cached_property
    def lse_bytes(self) -> int:
        """Bytes of lse, and of delta."""
        return math.prod(self.out_shapes[1]) * self.lse_dtype.itemsize

    @cached_property
    def vacuous(self) -> bool:
        """Whether it has no query, no key, no head or no sequence. Its result is known without a kernel."""
        return 0 in (self.layout.batch, *self.layout.tokens, self.heads_q)

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads_q // self.heads_kv if self.heads_q and self.heads_kv else 1

    @staticmethod
    def from_call(call: Call) -> Problem:
        """The Problem of a call, validated by `check`."""
        layout = check(call)
        head_dim = call.q.shape[-1]
        alignment_kv = min(_alignment(call.k), _alignment(call.v))
        return Problem(
            layout=layout,
            heads_q=call.q.shape[-2],
            heads_kv=call.k.shape[-2],
            head_dim=head_dim,
            head_dim_v=call.v.shape[-1],
            dtype=call.q.dtype,
            out_dtype=accumulator(call.q.dtype) if call.partial else call.q.dtype,
            scale=head_dim**-0.5 if call.scale is None else call.scale,
            softcap=call.softcap,
            mask=call.structure,
            left=call.left,
            right=call.right,
            sinks=call.sinks is not None,
            strides=(call.q.stride(), call.k.stride(), call.v.stride()),
            alignment=min(_alignment(call.q), alignment_kv),
            alignment_kv=alignment_kv,
            needs_grad=call.needs_grad,
            deterministic=call.deterministic,
            batch_invariant=call.batch_invariant,
            kernel=call.kernel,
            mods=texts_of(call),
        )

    def example(self, device: torch.device) -> Call:
        """A call of this problem on zeros. All sequences of a packed call are empty; masks admit every key."""
        if self.mods is not None:
            raise UnsupportedProblem(
                f"{self}: a problem with functions has no example without them; pass them to warmup"
            )
        layout = self.layout
        zeros = lambda *shape: torch.zeros(shape, dtype=torch.int32, device=device)
        if isinstance(layout, Packed):
            tokens = ((layout.total_q, self.heads_q), (layout.total_k, self.heads_kv), (layout.total_k, self.heads_kv))
        elif isinstance(layout, Dense):
            rows, keys = (layout.batch, layout.seqlen_q), (layout.batch, layout.seqlen_k)
            tokens = ((*rows, self.heads_q), (*keys, self.heads_kv), (*keys, self.heads_kv))
        else:
            raise UnsupportedProblem(f"{self}: paged problems have no example")
        widths = (self.head_dim, self.head_dim, self.head_dim_v)
        q, k, v = (self._zeros((*t, width), strides, device) for t, width, strides in zip(tokens, widths, self.strides))
        call = Call(
            q, k, v,
            sinks=torch.zeros(self.heads_q, device=device) if self.sinks else None,
            left=self.left, right=self.right, scale=self.scale, softcap=self.softcap,
            partial=self.out_dtype != self.dtype,
            needs_grad=self.needs_grad, deterministic=self.deterministic, batch_invariant=self.batch_invariant,
            kernel=self.kernel,
        )  # fmt: skip
        if isinstance(layout, Packed):
            longest = [NO_BOUND if n is None else n for n in (layout.max_seqlen_q, layout.max_seqlen_k)]
            count = layout.batch + 1
            return call._replace(
                cu_seqlens_q=zeros(count),
                cu_seqlens_k=zeros(2, count) if layout.runs else zeros(count),
                max_seqlen_q=longest[0],
                max_seqlen_k=layout.total_k if layout.runs else longest[1],
            )
        keys = zeros(layout.batch) + layout.seqlen_k
        call = call._replace(
            prefix=keys if self.mask.prefix else None, key_lengths=keys if self.mask.key_lengths else None
        )
        if not self.mask.documents:
            return call
        one = Documents.of(zeros(*rows), zeros(layout.batch, layout.seqlen_k))
        return call._replace(ids_q=one.ids_q, ids_k=one.ids_k, spans_q=one.spans_q, spans_k=one.spans_k)

    def _zeros(self, shape: tuple[int, ...], strides: tuple[int, ...], device: torch.device) -> Tensor:
        """Zeros with these strides (which may be 0), at an address that is aligned no better than the problem's."""
        offset = self.alignment // self.dtype.itemsize if self.alignment < ALIGNMENT else 0
        extent = (
            1 + offset + sum((size - 1) * stride for size, stride in zip(shape, strides)) if 0 not in shape else offset
        )
        return (
            torch.zeros(extent, dtype=self.dtype, device=device)
            .as_strided(shape, strides, offset)
            .requires_grad_(self.needs_grad)
        )

    def __str__(self) -> str:
        width = f"D={self.head_dim}" + (f" D_v={self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        words = [
            f"{self.layout} H_q={self.heads_q} H_kv={self.heads_kv} {width} {DTYPES[self.dtype]}",
            self._mask_words(),
        ]
        words.append(f"scale {self.scale:.3g}")
        words += [f"softcap {self.softcap:g}"] * bool(self.softcap) + ["sinks"] * self.sinks
        words += ["with gradients"] * self.needs_grad + ["deterministic"] * (self.deterministic and self.needs_grad)
        words += ["batch invariant"] * self.batch_invariant + ([] if self.mods is None else [str(self.mods)])
        return ", ".join(words)

    def _mask_words(self) -> str:
        m = self.mask
        band = (
            "causal"
            if not m.left and self.right == 0
            else f"window ({self.left if m.left else None}, {self.right if m.right else None})"
        )
        words = (
            [band] * (m.left or m.right)
            + ["prefix_causal"] * m.prefix
            + ["key_lengths"] * m.key_lengths
            + ["documents"] * m.documents
        )
        return " & ".join(words) or "full"


def rows_apart(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor.

    >>> rows_apart((2, 3, 4)), rows_apart((2, 0, 5))
    ((12, 4, 1), (5, 5, 1))
    """
    return tuple(accumulate(reversed([max(1, size) for size in shape[1:]]), int.__mul__, initial=1))[::-1]


def texts_of(call: Call) -> ModTexts | None:
    """The functions of a call. With deterministic gradients, those of captured tensors with several additions to an
    element are exact sums, or are computed apart if these have no room (`ops.ordered_gradients`). In float64 only the
    CPU kernel has functions, which adds in a fixed order.
    """
    mods = call.mods
    if mods is None or not call.deterministic or call.q.dtype.itemsize > 4 or not mods.texts.scattered:
        return None if mods is None else mods.texts
    if call.q.dim() == call.k.dim() == 4 and ONE_ADDITION:
        (batch, seqlen_q, heads), seqlen_k = call.q.shape[:3], call.k.shape[1]
        sizes = {"b": batch, "h": heads, "q": seqlen_q, "k": seqlen_k}
        if ONE_ADDITION["mods"](mods.texts.gradient, [t.shape for t in mods.score_tensors], sizes):
            return mods.texts
    return mods.texts._replace(exact_sums=True) if mods.has_room_for_exact_sums else mods.texts.without_additions


def _alignment(tensor: Tensor) -> int:
    itemsize = tensor.element_size()
    steps = [stride * itemsize for stride in tensor.stride()[:-1]]
    steps.append(base_offset(tensor))
    common = math.gcd(ALIGNMENT, *steps)
    return common & -common


def base_offset(tensor: Tensor) -> int:
    """The base address modulo 16. A fake tensor has no address; its storage offset is used instead."""
    if isinstance(tensor, FakeTensor):
        return int(tensor.storage_offset()) * tensor.element_size()
    return tensor.data_ptr() % ALIGNMENT


def refuse(call: Call, why: str) -> UnsupportedProblem:
    """An UnsupportedProblem for this call that no kernel could run."""
    return UnsupportedProblem(f"{Problem.from_call(call)}: {why}")
