"""The mask function of "strobe": finds out, once a forward, what transformers' description of a mask means in strobe's terms.

transformers describes a mask by a function of indices, an optional padding mask and the places of rows and keys in the sequence. Here
* padding hides keys: from all rows alike, and a row that sees no key is 0;
* packed sequences and chunks are documents, found by asking the mask function which keys the next position sees;
* a single row may have any pattern, since that row written out is a document;
* any other pattern is refused, with what to do instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, prepare_padding_mask, sdpa_mask
from transformers.utils.import_utils import is_tracing

from ...errors import UnsupportedProblem, describe
from ...problem.mask import Mask, documents
from .layer_mask import SDPA, Band, LayerMask


def mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0,
    mask_function: Callable = causal_mask_function, attention_mask: Tensor | None = None, **rest: Any,
) -> Tensor | None:  # fmt: skip
    """What transformers calls for each kind of layer, once a forward. None: the layer's own flag says all, and no window could mislead it."""
    pattern = _Pattern.of(mask_function, rest)
    asked = _Asked(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, rest.get("device", "cpu"))
    layer_mask = _row(asked, rest) if q_length == 1 and not asked.aligned(pattern) else _rows(asked, pattern)
    plain = layer_mask.hidden is None and not layer_mask.final and layer_mask.band in (Band.FULL, Band.CAUSAL) and layer_mask.seqlen_k == kv_length
    windows = getattr(rest.get("config"), "sliding_window", None) is not None
    return None if plain and not windows else layer_mask.to_tensor(batch_size, q_length, asked.device)


_KNOWN = ("causal_mask_function", "bidirectional_mask_function", "and_mask")  # windows, chunks and packed sequences are combined to one of the two


class _Pattern(NamedTuple):
    """What transformers' arguments tell of its mask function. band None: it may be anything. runs: within the band there may be documents."""

    band: Band | None
    runs: bool = False
    chunked: bool = False

    @staticmethod
    def of(mask_function: Callable, rest: dict[str, Any]) -> _Pattern:
        """use_vmap: a function of the user's is combined; or_masks unites blocks that see all of themselves. allow_is_bidirectional_skip comes
        with bidirectional masks alone, allow_is_causal_skip is False for packed sequences, and local_size is the window's or the chunks'."""
        size, config = rest.get("local_size"), rest.get("config")
        windowed, chunked = (size is not None and size == getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
        if rest.get("use_vmap") or getattr(mask_function, "__name__", "") not in _KNOWN or (size is not None and not (windowed or chunked)):
            return _Pattern(None)
        if "allow_is_bidirectional_skip" in rest:
            return _Pattern(Band.AROUND if windowed else Band.FULL)
        return _Pattern(Band.WINDOW if windowed else Band.CAUSAL, chunked or not rest.get("allow_is_causal_skip", True), chunked)


class _Asked(NamedTuple):
    """transformers' question: rows q_offset ... and keys kv_offset ..., in positions of the whole sequence."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    q_offset: int | Tensor
    kv_offset: int
    function: Callable
    attention_mask: Tensor | None
    device: torch.device | str

    def aligned(self, pattern: _Pattern) -> bool:
        """Whether strobe's diagonal is theirs with all the keys: a cache that grows, or none."""
        if pattern.band is None or isinstance(self.q_offset, Tensor):
            return False
        return pattern.band == Band.FULL or self.reach == self.seqlen_k

    @property
    def reach(self) -> int:
        """How many keys there are up to the last row's own."""
        return int(self.q_offset) + self.seqlen_q - self.kv_offset

    def seen(self) -> Tensor | None:
        """bool [B, S_k]: the keys that the padding mask leaves."""
        padding = prepare_padding_mask(self.attention_mask, self.seqlen_k, self.kv_offset)
        return None if padding is None else padding[:, self.kv_offset : self.kv_offset + self.seqlen_k].bool()


def _row(asked: _Asked, rest: dict[str, Any]) -> LayerMask:
    """One query row: what it sees, written out, is a document, whatever the pattern, with no look at the data."""
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    sizes = asked.batch, 1, asked.seqlen_k, asked.q_offset, asked.kv_offset
    written = sdpa_mask(*sizes, asked.function, asked.attention_mask, **{**rest, **skips})  # type: ignore[arg-type]
    if written is None:
        raise UnsupportedProblem(describe("attention_mask", "none", "a row of the mask", SDPA))
    ids_k = written[:, 0, 0].to(torch.int32) - 1
    return LayerMask(Band.FULL, asked.seqlen_k, documents(torch.zeros_like(ids_k[:, :1]), ids_k), True)


def _rows(asked: _Asked, pattern: _Pattern) -> LayerMask:
    band = pattern.band
    if band is None:
        got = f"{getattr(asked.function, '__name__', 'a function')} of masks over {asked.seqlen_q} rows"
        expected = "causal, bidirectional, sliding or chunked attention, packed or padded"
        raise UnsupportedProblem(describe("mask function", got, expected, "strobe has no such mask; " + SDPA))
    seqlen_k = asked.seqlen_k if band == Band.FULL else _reach(asked, band)
    rest = asked._replace(seqlen_k=seqlen_k)
    seen = rest.seen()
    if seen is not None and _can_read(seen):
        # no row of its own sequence sees what comes after it: padding at the end needs no mask under a causal band
        hides = (seen[:, 1:] & ~seen[:, :-1]).any() if band in (Band.CAUSAL, Band.WINDOW) else ~seen.all()
        seen = seen if bool(hides) else None
    ids = _runs(rest) if pattern.runs else None
    final = asked.attention_mask is not None or (pattern.chunked and ids is not None)
    return LayerMask(band, seqlen_k, _hidden(asked.seqlen_q, ids, seen), final)


def _reach(asked: _Asked, band: Band) -> int:
    """The keys up to the last row's own: the others are of a cache that is not full, and no row sees them."""
    if isinstance(asked.q_offset, Tensor) and not _can_read(asked.q_offset):
        remedy = "compile steps of one token alone, as generate does, or use a cache that grows"
        raise UnsupportedProblem(describe("q_offset", "a position on the device", f"one row, not {asked.seqlen_q}, while compiling", remedy))
    reach = asked.reach
    if not asked.seqlen_q <= reach <= asked.seqlen_k or (band == Band.AROUND and reach != asked.seqlen_k):
        got = f"rows up to position {reach} of {asked.seqlen_k} keys"
        raise UnsupportedProblem(describe("q_offset", got, "rows that are among the keys", SDPA))
    return reach


def _runs(asked: _Asked) -> Tensor | None:
    """int32 [B, S_k]: documents, numbered. A key that the next position does not see is the last of its own. None if there is but one."""
    batch = torch.arange(asked.batch, device=asked.device)
    position = torch.arange(1, asked.seqlen_k, device=asked.device) + asked.kv_offset
    combined = asked.function(batch[:, None], torch.zeros_like(batch)[:, None], position[None], position[None] - 1)
    apart = ~combined.expand(asked.batch, asked.seqlen_k - 1)
    if _can_read(apart) and not bool(apart.any()):
        return None
    return torch.nn.functional.pad(apart.cumsum(1), (1, 0)).to(torch.int32)


def _hidden(seqlen_q: int, ids: Tensor | None, seen: Tensor | None) -> Mask | None:
    """Padding hides keys, from rows of padding too; a row's document is that of the key at its own position."""
    if seen is None and ids is None:
        return None
    if ids is None:
        ids_k = seen.to(torch.int32) - 1  # type: ignore[union-attr]
        return documents(torch.zeros_like(ids_k[:, :1]).expand(-1, seqlen_q), ids_k)
    return documents(ids[:, -seqlen_q:], ids if seen is None else ids.masked_fill(~seen, -1))


def _can_read(tensor: Tensor) -> bool:
    """Whether a program may depend on it: not in a graph."""
    return not is_tracing(tensor)
