"""The mask function of "strobe": translates transformers' mask description to a `LayerMask`, once per forward.

transformers describes a mask by a function of indices, an optional padding mask, and the positions of rows and keys in
the sequence.
* Padding hides keys from all rows. A row that sees no key gives 0.
* Packed sequences and chunks become documents. A call of the mask function tells whether each position sees the key
  before it.
* A single row may have any pattern, because one dense row can be written as documents.
* Any other pattern becomes transformers' own bool tensor [B, 1, S_q, S_k], which `dense_masks` reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, prepare_padding_mask, sdpa_mask
from transformers.utils.import_utils import is_tracing

from ...errors import UnsupportedProblem, describe
from ...problem.mask import Mask, documents
from .context import active_plan, planned_mask
from .layer_mask import SDPA, Band, LayerMask


def mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0,
    mask_function: Callable = causal_mask_function, attention_mask: Tensor | None = None, **rest: Any,
) -> Tensor | None:  # fmt: skip
    """transformers calls this once per forward for each kind of layer. Returns an encoded
    LayerMask, whose sizes carry the band and the layer's kind: see `LayerMask.to_tensor`. A pattern that no LayerMask
    has is returned as bool [B, 1, S_q, S_k].

    Returns None if the layer's is_causal describes the mask completely and the config has no sliding window."""
    pattern = _Pattern.of(mask_function, rest)
    asked = _Asked(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, rest.get("device", "cpu")
    )
    if active_plan() is not None:
        sizes = q_length, kv_length
        return planned_mask(pattern.band, pattern.chunked, attention_mask, sizes).to_tensor(
            batch_size, q_length, asked.device
        )
    if pattern.band is None and q_length > 1:
        return _written(asked, rest)  # a tensor for `dense_masks`
    layer_mask = _row(asked, rest) if q_length == 1 and not asked.aligned(pattern) else _rows(asked, pattern)
    plain = (
        layer_mask.hidden is None
        and not layer_mask.final
        and layer_mask.band in (Band.FULL, Band.CAUSAL)
        and layer_mask.seqlen_k == kv_length
    )
    windows = getattr(rest.get("config"), "sliding_window", None) is not None
    return None if plain and not windows else layer_mask.to_tensor(batch_size, q_length, asked.device)


_KNOWN = (
    "causal_mask_function",
    "bidirectional_mask_function",
    "and_mask",
)  # windows, chunks, packed sequences: and_mask


class _Pattern(NamedTuple):
    """The mask pattern, from transformers' arguments. band None: unknown. runs: there may be documents within the
    band."""

    band: Band | None
    runs: bool = False
    chunked: bool = False

    @staticmethod
    def of(mask_function: Callable, rest: dict[str, Any]) -> _Pattern:
        """Read the arguments of a mask function. use_vmap means that the mask includes a function of the user. A name
        other than _KNOWN, such as or_masks' (blocks that see all of themselves), gives band None. Only bidirectional
        masks pass allow_is_bidirectional_skip. allow_is_causal_skip is False for packed sequences. local_size is the
        size of the window or the chunks.
        """
        size, config = rest.get("local_size"), rest.get("config")
        windowed, chunked = (
            size is not None and size == getattr(config, name, None)
            for name in ("sliding_window", "attention_chunk_size")
        )
        if (
            rest.get("use_vmap")
            or getattr(mask_function, "__name__", "") not in _KNOWN
            or (size is not None and not (windowed or chunked))
        ):
            return _Pattern(None)
        if "allow_is_bidirectional_skip" in rest:
            return _Pattern(Band.AROUND if windowed else Band.FULL)
        return _Pattern(
            Band.WINDOW if windowed else Band.CAUSAL, chunked or not rest.get("allow_is_causal_skip", True), chunked
        )


class _Asked(NamedTuple):
    """The arguments of the mask function. Rows start at position q_offset and keys at kv_offset of the whole
    sequence."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    q_offset: int | Tensor
    kv_offset: int
    function: Callable
    attention_mask: Tensor | None
    device: torch.device | str

    def aligned(self, pattern: _Pattern) -> bool:
        """Whether strobe's diagonal over all keys equals transformers': true without a cache or with a dynamic one."""
        if pattern.band is None or isinstance(self.q_offset, Tensor):
            return False
        return pattern.band == Band.FULL or self.reach == self.seqlen_k

    @property
    def reach(self) -> int:
        """The number of keys up to and including the last row's own."""
        return int(self.q_offset) + self.seqlen_q - self.kv_offset

    def seen(self) -> Tensor | None:
        """bool [B, S_k]: keys that the padding mask keeps; None without a mask."""
        padding = prepare_padding_mask(self.attention_mask, self.seqlen_k, self.kv_offset)
        return None if padding is None else padding[:, self.kv_offset : self.kv_offset + self.seqlen_k].bool()


def _written(asked: _Asked, rest: dict[str, Any]) -> Tensor:
    """The mask as bool [B, 1, S_q, S_k]. Reads nothing from the device."""
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    # transformers itself passes tensors as q_offset, too
    sizes = asked.batch, asked.seqlen_q, asked.seqlen_k, cast("int", asked.q_offset), asked.kv_offset
    written = sdpa_mask(*sizes, asked.function, asked.attention_mask, **{**rest, **skips})
    if written is None:
        raise UnsupportedProblem(describe("attention_mask", "none", "a mask as a tensor", SDPA))
    return written


def _row(asked: _Asked, rest: dict[str, Any]) -> LayerMask:
    """The LayerMask of one query row with any pattern: the dense row, written as documents. Reads nothing from the
    device.
    """
    ids_k = _written(asked, rest)[:, 0, 0].to(torch.int32) - 1
    return LayerMask(Band.FULL, asked.seqlen_k, documents(torch.zeros_like(ids_k[:, :1]), ids_k), True)


def _rows(asked: _Asked, pattern: _Pattern) -> LayerMask:
    band = cast("Band", pattern.band)
    seqlen_k = asked.seqlen_k if band == Band.FULL else _reach(asked, band)
    rest = asked._replace(seqlen_k=seqlen_k)
    seen = rest.seen()
    if seen is not None and _can_read(seen):
        # a causal band hides padding at the end from all earlier rows, so only padding before a key needs a mask
        hides = (seen[:, 1:] & ~seen[:, :-1]).any() if band in (Band.CAUSAL, Band.WINDOW) else ~seen.all()
        seen = seen if bool(hides) else None
    ids = _runs(rest) if pattern.runs else None
    final = asked.attention_mask is not None or (pattern.chunked and ids is not None)
    return LayerMask(band, seqlen_k, hidden_mask(asked.seqlen_q, ids, seen), final)


def _reach(asked: _Asked, band: Band) -> int:
    """The number of keys up to the last row's own. Later keys are unused places of the cache; no row sees them."""
    if isinstance(asked.q_offset, Tensor) and not _can_read(asked.q_offset):
        remedy = "compile steps of one token alone, as generate does, or use a cache that grows"
        raise UnsupportedProblem(
            describe("q_offset", "a position on the device", f"one row, not {asked.seqlen_q}, while compiling", remedy)
        )
    reach = asked.reach
    if not asked.seqlen_q <= reach <= asked.seqlen_k or (band == Band.AROUND and reach != asked.seqlen_k):
        got = f"rows up to position {reach} of {asked.seqlen_k} keys"
        raise UnsupportedProblem(describe("q_offset", got, "rows that are among the keys", SDPA))
    return reach


def _runs(asked: _Asked) -> Tensor | None:
    """int32 [B, S_k]: document ids. A document ends at a key that the next position does not see. None if there is only
    one document.
    """
    batch = torch.arange(asked.batch, device=asked.device)
    position = torch.arange(1, asked.seqlen_k, device=asked.device) + asked.kv_offset
    combined = asked.function(batch[:, None], torch.zeros_like(batch)[:, None], position[None], position[None] - 1)
    apart = ~combined.expand(asked.batch, asked.seqlen_k - 1)
    if _can_read(apart) and not bool(apart.any()):
        return None
    return torch.nn.functional.pad(apart.cumsum(1), (1, 0)).to(torch.int32)


def hidden_mask(seqlen_q: int, ids: Tensor | None, seen: Tensor | None) -> Mask | None:
    """The documents mask of document ids and a padding mask. Padding hides keys from all rows, padded rows included.

    A row has the document id of the key at its own position."""
    if ids is not None:
        return documents(ids[:, -seqlen_q:], ids if seen is None else ids.masked_fill(~seen, -1))
    if seen is None:
        return None
    ids_k = seen.to(torch.int32) - 1
    return documents(torch.zeros_like(ids_k[:, :1]).expand(-1, seqlen_q), ids_k)


def _can_read(tensor: Tensor) -> bool:
    """Whether host code may branch on the values: not while tracing a graph."""
    return not is_tracing(tensor)
