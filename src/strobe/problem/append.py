"""Writing new keys and values to a KV cache: `AppendCall` holds the tensors of one write, `AppendProblem` its metadata.

Token t of T goes to position seqlens[b] + t of sequence b. An append does not change seqlens; the caller advances them.
With cu_seqlens_q the tokens are packed: rows cu_seqlens_q[b] .. cu_seqlens_q[b + 1] - 1 are those of sequence b.
With at_slots the tokens are packed, too, and seqlens holds the slot of each token: page * page_size + row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidProblem, wrong_type
from .cache import (
    FP8,
    DenseCache,
    Held,
    OfCache,
    PagedCache,
    Rotary,
    check_cache,
    check_offsets,
    check_slots,
    check_tensor,
)
from .call import DTYPES, Dense, Paged
from .memory_overlap import overlaps_itself


class AppendCall(NamedTuple):
    """The arguments of one write, flat, in the order of the op's schema. k and v hold pages if page_table is given,
    else rows.
    """

    k_new: Tensor  # [B, T, H_kv, D], or packed [T, H_kv, D]
    v_new: Tensor  # with D_v
    k: Tensor  # written
    v: Tensor  # written
    seqlens: Tensor  # [B]; with at_slots the slot of each token, [T]
    page_table: Tensor | None = None
    k_scale: Tensor | None = None  # [H_kv], or one for each key and head, which is written
    v_scale: Tensor | None = None
    cos: Tensor | None = None  # [S_max, rotary_dim / 2]
    sin: Tensor | None = None
    cu_seqlens_q: Tensor | None = None  # int32 [B + 1] of packed tokens
    interleaved: bool = False
    kernel: str = ""
    at_slots: bool = False

    @property
    def held(self) -> Held:
        """The cache."""
        return Held(self.k, self.v, self.seqlens, self.page_table, None, self.k_scale, self.v_scale)

    @property
    def about(self) -> tuple[Tensor | None, ...]:
        """The tensor fields; absent ones are None."""
        return self[:11]

    @property
    def tensors_and_rest(self) -> tuple[list[Tensor], tuple]:
        """The tensors, pools early because their alignment matters, and a hashable tuple of the other fields. The tuple
        also records which optional tensors are absent.
        """
        about = self[:11]
        absent = [field is None for field in about[4:]]
        given = [field for field in about[4:] if field is not None]
        return [self.k_new, self.k, self.v, self.v_new, *given], ("append", *absent, *self[11:])

    @property
    def tensors(self) -> list[Tensor]:
        """The tensor fields that are present."""
        return [field for field in self.about if field is not None]

    @property
    def whole(self) -> bool:
        """Whether all tensors but the new keys and the pools are contiguous. Kernels do not read their strides."""
        return all([field is None or field.is_contiguous() for field in self[4:11]])

    @property
    def packed(self) -> bool:
        return self.at_slots or self.cu_seqlens_q is not None

    @property
    def written(self) -> list[Tensor]:
        """The tensors that the call changes: the pools, and scales of each key and head."""
        scales = [scale for scale in (self.k_scale, self.v_scale) if scale is not None and scale.dim() > 1]
        return [self.k, self.v, *scales]

    @staticmethod
    def of(
        cache: DenseCache | PagedCache,
        k_new: Tensor,
        v_new: Tensor,
        rotary: Rotary | None,
        cu_seqlens_q: Tensor | None = None,
    ) -> AppendCall:
        """Build a call from the arguments of `append`. Raises TypeError for a wrong type of cache or rotary."""
        held = Held.of(cache)
        if rotary is not None and not isinstance(rotary, Rotary):
            raise wrong_type("rotary", rotary, "a strobe.Rotary or None", "give strobe.Rotary(cos, sin)")
        cos, sin, interleaved = rotary or (None, None, False)
        if not isinstance(interleaved, bool):
            raise wrong_type("rotary.interleaved", interleaved, "a bool", "pass True or False")
        return AppendCall(k_new, v_new, *held[:4], *held[5:], cos, sin, cu_seqlens_q, interleaved)

    @staticmethod
    def of_slots(
        cache: DenseCache | PagedCache, k_new: Tensor, v_new: Tensor, slots: Tensor, positions: object = None
    ) -> AppendCall:
        """Build a call that writes at slots. positions: the caller's rotary or cu_seqlens_q, which must be None."""
        if not isinstance(cache, PagedCache):
            raise wrong_type("cache", cache, "a strobe.PagedCache beside slots", "give the pools as pages")
        if not isinstance(slots, Tensor):
            raise wrong_type("slots", slots, "a tensor int64 [T] or None", "pass a torch.Tensor")
        if positions is not None:
            got, remedy = "rotary or cu_seqlens_q beside slots", "rotate before the call; slots name every place"
            raise InvalidProblem("slots", got, "slots alone", remedy)
        held = Held.of(cache._replace(page_table=slots, seqlens=slots))
        return AppendCall(k_new, v_new, held.k, held.v, slots, None, held.k_scale, held.v_scale, at_slots=True)


def check(call: AppendCall) -> Dense | Paged:
    """Validate the arguments and return their layout. Reads only metadata. Raises InvalidProblem or TypeError naming
    the argument.
    """
    held, new = call.held, {"k": call.k_new, "v": call.v_new}
    packed = call.packed
    leading = 1 if packed else 2  # dimensions before the heads
    for field, tensor in new.items():
        check_tensor(f"{field}_new", tensor, "[T, H_kv, D]" if packed else "[B, T, H_kv, D]", leading + 2)
        if tensor.dtype not in DTYPES:
            raise InvalidProblem(
                f"{field}_new",
                tensor.dtype,
                "float16, bfloat16, float32 or float64",
                "append quantizes for 8-bit caches itself",
            )
        if tensor.shape[:leading] != call.k_new.shape[:leading]:
            raise InvalidProblem(
                f"{field}_new",
                f"shape {list(tensor.shape)}",
                f"k_new's {'tokens' if packed else 'batch and tokens'} {list(call.k_new.shape[:leading])}",
                "append both",
            )
    batch = call.k_new.shape[0]
    if call.cu_seqlens_q is not None:
        batch = check_offsets(call.cu_seqlens_q, call.seqlens, "k_new", call.k_new.device)
    if call.at_slots:
        layout = check_slots(held, call.seqlens, batch, call.k_new.dtype)
    else:
        layout = check_cache(held, batch, call.k_new.dtype, "cu_seqlens_q" if packed else "k_new", by_token=True)
    for field, tensor in new.items():
        pool: Tensor = getattr(held, field)
        if tensor.shape[leading:] != pool.shape[2:]:
            got, wanted = (
                f"heads and width {list(tensor.shape[leading:])}",
                f"{held.word(field)}'s {list(pool.shape[2:])}",
            )
            raise InvalidProblem(f"{field}_new", got, wanted, "append what the cache was made for")
        if tensor.dtype != call.k_new.dtype:
            raise InvalidProblem(f"{field}_new", tensor.dtype, f"k_new's {call.k_new.dtype}", "give both in one dtype")
        if tensor.device != pool.device:
            raise InvalidProblem(
                f"{field}_new", f"device {tensor.device}", f"the cache's {pool.device}", "move it to the cache"
            )
        if any(size > 1 and stride == 0 for size, stride in zip(pool.shape, pool.stride())):
            raise _shared(call, field)
    _check_scales(call)
    _check_rotary(call)
    return layout._replace(seqlen_q=call.k_new.shape[leading - 1])


def _check_scales(call: AppendCall) -> None:
    """Check that scales of each key and head, which kernels write without strides, are contiguous."""
    for name in ("k_scale", "v_scale"):
        scale = getattr(call, name)
        if scale is None or scale.dim() == 1:
            continue
        if not scale.is_contiguous():
            got = f"strides {scale.stride()}"
            raise InvalidProblem(f"cache.{name}", got, "a contiguous tensor", "append writes the scales of new keys")


def _shared(call: AppendCall, field: str) -> InvalidProblem:
    got = f"strides {getattr(call, field).stride()}"
    return InvalidProblem(
        call.held.word(field),
        got,
        "memory of its own for each key",
        "do not expand what is written to, nor let rows overlap",
    )


def _check_rotary(call: AppendCall) -> None:
    if call.cos is None and call.sin is None:
        return
    for name, angles in (("rotary.cos", call.cos), ("rotary.sin", call.sin)):
        check_tensor(name, angles, "[S_max, rotary_dim / 2]", 2)
    cos, sin, width = call.cos, call.sin, call.k_new.shape[-1]
    for name, angles in (("rotary.cos", cos), ("rotary.sin", sin)):
        if not isinstance(angles, Tensor) or not isinstance(cos, Tensor):
            continue
        if angles.shape[0] == 0:
            raise InvalidProblem(
                name, f"shape {list(angles.shape)}", "a row for each position", "make angles up to the longest sequence"
            )
        if angles.shape != cos.shape:
            raise InvalidProblem(
                name, f"shape {list(angles.shape)}", f"cos's {list(cos.shape)}", "make both of the same angles"
            )
        if 2 * angles.shape[1] > width:
            raise InvalidProblem(
                name, f"rotary_dim {2 * angles.shape[1]}", f"at most k_new's {width} dimensions", "turn fewer of them"
            )
        if angles.dtype not in DTYPES:
            raise InvalidProblem(name, angles.dtype, "a floating dtype", "convert it with .float()")
        if angles.device != call.k.device:
            raise InvalidProblem(
                name, f"device {angles.device}", f"the cache's {call.k.device}", "move it to the cache"
            )


@dataclass(frozen=True)
class AppendProblem(OfCache):
    """The metadata of a write: everything except tensor contents. Hashable."""

    layout: Dense | Paged
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    scales: tuple[bool, bool]  # whether k and v have one
    rotary_dim: int  # 0: no rotary embedding
    interleaved: bool
    packed: bool
    kernel: str
    token_scales: tuple[bool, bool] = (False, False)  # whether k and v have a scale for each key and head
    slots: torch.dtype | None = None  # of the tokens' slots

    directions = ("append",)

    @staticmethod
    def from_call(call: AppendCall) -> AppendProblem:
        """Validate a call and describe it. Overlapping rows of a pool are detected here, not in `check`, which also
        runs on symbolic sizes.
        """
        layout, (heads_kv, head_dim) = check(call), call.k_new.shape[-2:]
        for field in ("k", "v"):
            if overlaps_itself(getattr(call, field)):
                raise _shared(call, field)
        return AppendProblem(
            layout, heads_kv, head_dim, call.v_new.shape[-1], call.k_new.dtype, call.k.dtype,
            (call.k_scale is not None, call.v_scale is not None),
            0 if call.cos is None else 2 * call.cos.shape[1], call.interleaved, call.packed,
            call.kernel, (_by_token(call.k_scale), _by_token(call.v_scale)),
            call.seqlens.dtype if call.at_slots else None,
        )  # fmt: skip

    @property
    def vacuous(self) -> bool:
        """Whether there is nothing to write: no sequence, no token or no head."""
        return 0 in (self.layout.batch, self.layout.seqlen_q, self.heads_kv)

    @property
    def tokens(self) -> int:
        """New tokens of all sequences."""
        return self.layout.seqlen_q * (1 if self.packed else self.layout.batch)

    def __str__(self) -> str:
        words = [f"append {self.layout} H_kv={self.heads_kv} D={self.head_dim} {DTYPES[self.dtype]}"]
        words += ["tokens at slots" if self.slots else "packed tokens"] * self.packed
        words += ["a scale for each key and head"] * any(self.token_scales)
        words += ["cache in float8_e4m3fn"] * (self.cache_dtype == FP8)
        words += [f"rotary over {self.rotary_dim} dimensions{', interleaved' * self.interleaved}"] * bool(
            self.rotary_dim
        )
        return ", ".join(words)


def _by_token(scale: Tensor | None) -> bool:
    return scale is not None and scale.dim() > 1
