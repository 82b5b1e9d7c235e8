"""Masks of a model as tensors [B, H, S_q, S_k]: bool, or numbers that are added to scores.

A tensor that equals causal, windowed, bidirectional or packed attention, with or without padding, becomes that built-in
mask. The host reads the tensor once per forward for this. Any other tensor, and each in a traced graph, is read by the
kernels as it is: `strobe.mask_mod` or `strobe.bias`.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from transformers.utils.import_utils import is_tracing

import strobe

from ...errors import InvalidProblem
from .masks import hidden_mask


class DenseMask(NamedTuple):
    """A tensor's mask: `window` and `mask` as `strobe.attention` takes them, and what is added to scores."""

    window: tuple[int | None, int | None] | None = None
    mask: strobe.Mask | None = None
    bias: Tensor | None = None


class Sizes(NamedTuple):
    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int


def is_dense(attention_mask: Tensor) -> bool:
    """Whether the mask is a tensor [B, H, S_q, S_k] of bools or floats. An encoded `LayerMask` is int32."""
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 4:
        return False
    return attention_mask.dtype == torch.bool or attention_mask.is_floating_point()


# tensor -> ((version, sizes), DenseMask); all layers of a forward share the tensor
_seen: MutableMapping[Tensor, tuple[tuple[int, Sizes], DenseMask]] = WeakIdKeyDictionary()


def dense_mask(attention_mask: Tensor, sizes: Sizes) -> DenseMask:
    """The mask of a tensor [B or 1, H or 1, S_q or 1, at least S_k].

    >>> causal = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    >>> dense_mask(causal, Sizes(2, 4, 5, 5)).window
    (None, 0)
    """
    shape = attention_mask.shape
    fits = all(size in (1, whole) for size, whole in zip(shape[:3], sizes)) and shape[3] >= sizes.seqlen_k
    if not fits:
        expected = (
            f"[{sizes.batch}, {sizes.heads}, {sizes.seqlen_q}, {sizes.seqlen_k}], or 1 instead of the first three"
        )
        raise InvalidProblem("attention_mask", f"shape {list(shape)}", expected, "make it for this batch and cache")
    if is_tracing(attention_mask) or attention_mask.requires_grad or attention_mask.is_inference():
        return _read(attention_mask, sizes)
    known, state = _seen.get(attention_mask), (attention_mask._version, sizes)
    if known is None or known[0] != state:
        known = _seen[attention_mask] = state, _read(attention_mask, sizes)
    return known[1]


def _read(tensor: Tensor, sizes: Sizes) -> DenseMask:
    tensor = tensor[..., : sizes.seqlen_k]
    if tensor.requires_grad or (is_tracing(tensor) and tensor.dtype != torch.bool):
        return DenseMask(bias=tensor)
    if is_tracing(tensor):
        return DenseMask(mask=strobe.mask_mod(tensor))
    seen = tensor
    if tensor.dtype != torch.bool:
        hidden = tensor <= torch.finfo(tensor.dtype).min / 2  # transformers hides by the smallest number
        if not bool((hidden | (tensor == 0)).all()):
            return DenseMask(bias=tensor)
        seen = ~hidden
    found = built_in(seen[:, 0], sizes) if seen.shape[1] == 1 else None
    return found or DenseMask(mask=strobe.mask_mod(seen))


def built_in(seen: Tensor, sizes: Sizes) -> DenseMask | None:
    """The built-in mask that equals bool [B or 1, S_q or 1, S_k], or None. The device is read twice.

    Candidates are full attention, causal attention, and the narrowest window around the diagonal that includes all
    visible keys. With as many rows as keys, each is also tried within documents. Each hides the keys that no row sees.
    """
    seen = seen.expand(-1, sizes.seqlen_q, -1)
    _, rows, keys = seen.shape
    places = torch.arange(keys, device=seen.device)
    distance = torch.arange(rows, device=seen.device)[:, None] + (keys - rows) - places
    far = torch.where(seen, distance, -keys).amax(), torch.where(seen, distance, rows).amin()
    left, right = (int(one) for one in torch.stack(far).tolist())
    # a negative bound means no bound to `strobe.attention`, so the third candidate always includes the diagonal
    windows = ((None, None), (None, 0), (max(left, 0), max(-right, 0)))
    kept = seen.any(1)
    bands = [_band(distance, window) & kept[:, None] for window in windows]
    ids = None
    if rows == keys:
        apart = ~(seen[:, 1:] & seen[:, :-1]).any(2)  # rows of one document share keys
        ids = torch.nn.functional.pad(apart.cumsum(1), (1, 0)).to(torch.int32)
        same = ids[:, :, None] == ids[:, None]
        bands += [band & same for band in bands]
    *equal, all_kept = torch.stack([*((band == seen).all() for band in bands), kept.all()]).tolist()
    if not any(equal):
        return None
    at = equal.index(True)
    window = windows[at % len(windows)]
    ids = ids.expand(sizes.batch, -1) if ids is not None and at >= len(windows) else None
    hidden = hidden_mask(rows, ids, None if all_kept else kept.expand(sizes.batch, -1))
    return DenseMask(None if window == (None, None) else window, hidden)


def _band(distance: Tensor, window: tuple[int | None, int | None]) -> Tensor:
    left, right = window
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        seen &= distance <= left
    return seen if right is None else seen & (distance >= -right)
