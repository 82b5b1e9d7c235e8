"""The public functions of a KV cache. Each one builds a `DecodeCall` or an `AppendCall` and passes it to `ops`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, NoReturn

from torch import Tensor

from ..errors import wrong_type
from ..mods.mask import checked_mask
from ..mods.score import ScoreMod
from ..ops import decode as ops_decode
from ..ops import mods as ops_mods
from ..problem.append import AppendCall
from ..problem.cache import DenseCache, Held, PagedCache, Rotary
from ..problem.decode import DecodeCall
from ..problem.foreign_arguments import unknown
from ..problem.keywords import Window, band, options_of, output_tensor
from ..problem.mask import Mask, as_int32
from ..problem.merge import Partial
from ..selection.select import Choice


def attention_decode(
    q: Tensor, cache: PagedCache | DenseCache, *, causal: bool = True, window: Window | None = None,
    mask: Mask | None = None, score_mod: ScoreMod | Callable | None = None,
    scale: float | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, batch_invariant: bool = False, kernel: str | None = None,
    out: Tensor | None = None,
    **others: NoReturn,
) -> Tensor:  # fmt: skip
    """Compute attention of each sequence's newest tokens over its KV cache. The cache must already contain these
    tokens.

    >>> import torch
    >>> k, v = torch.randn(2, 128, 2, 64), torch.randn(2, 128, 2, 64)
    >>> cache = DenseCache(k, v, seqlens=torch.tensor([128, 5], dtype=torch.int32))
    >>> attention_decode(torch.randn(2, 1, 8, 64), cache).shape
    torch.Size([2, 1, 8, 64])

    Args:
        q: [B, T, H_q, D] with T new tokens per sequence (tuned for 1 to 16); H_q a multiple of the cache's heads.
        cache: strobe.PagedCache or strobe.DenseCache of B sequences, in q's dtype or in float8_e4m3fn.
        causal: with n = seqlens[b], row i has position n - T + i and attends to the keys up to this position.
        window: (left, right), the number of keys on each side of this position, both ends included; None or a negative
            number means no bound.
        mask, score_mod: as in `attention`. q_idx is a row's position n - T + i, and kv_idx a key's, both counted from
            the sequence's first key (0 for a row before it). Positions beyond the ids of `strobe.documents` have id
            -1. Functions run on the CPU, portable, Hopper and Blackwell kernels.
        scale, softcap, sinks, kernel: as in `attention`.
        batch_invariant: make a row's bits independent of batch size, position, padding and page layout, and equal to
            those of its prefill.
        out: the output tensor, [B, T, H_q, D_v] in q's dtype. It may be q itself, but must not overlap other inputs.

    Returns [B, T, H_q, D_v] in q's dtype. A row that sees no key is 0: n is 0, or n < T and the row precedes the first
    key. Does not synchronize with the device, so a CUDA graph may capture it and replay it with other lengths and
    pages. Lengths, starts and page ids out of range are clamped or masked, and reported by `last_errors`. Raises
    InvalidProblem, TypeError, and UnsupportedProblem if no kernel can run the call or a gradient is required.
    """
    if others:
        raise unknown(attention_decode, others)
    call = decode_call(q, cache, settings_of(causal, window, scale, softcap, sinks, batch_invariant, kernel))
    out = out if out is None else output_tensor(out)
    return ops_mods.attend_decode(call, score_mod, checked_mask(mask), out)[0]


def partial_attention_decode(
    q: Tensor, cache: PagedCache | DenseCache, *, causal: bool = True, window: Window | None = None,
    mask: Mask | None = None, score_mod: ScoreMod | Callable | None = None,
    scale: float | None = None,
    softcap: float | None = None, batch_invariant: bool = False, kernel: str | None = None, **others: NoReturn,
) -> Partial:  # fmt: skip
    """Compute `attention_decode` as a part to `merge` with attention over other keys: float32 output and log-sum-exp.

    >>> import torch
    >>> k = torch.randn(2, 128, 2, 64)
    >>> cache = DenseCache(k, k, torch.tensor([128, 0], dtype=torch.int32))
    >>> part = partial_attention_decode(torch.randn(2, 3, 8, 64), cache)
    >>> part.out.shape, part.lse.shape, part.lse[1].max().item()
    (torch.Size([2, 3, 8, 64]), torch.Size([2, 8, 3]), -inf)

    Takes the arguments of `attention_decode` except sinks and out. Apply sinks with `with_sinks`, once, after the last
    merge.

    Returns Partial(out [B, T, H_q, D_v], lse [B, H_q, T]), both float32, or float64 for float64 inputs.
    """
    if others:
        raise unknown(partial_attention_decode, others)
    call = decode_call(q, cache, settings_of(causal, window, scale, softcap, None, batch_invariant, kernel))
    out, lse = ops_mods.attend_decode(call._replace(partial=True), score_mod, checked_mask(mask))
    return Partial(out, lse)  # type: ignore[arg-type]  # a partial call has an lse


def explain_decode(
    q: Tensor, cache: PagedCache | DenseCache, *, causal: bool = True, window: Window | None = None,
    mask: Mask | None = None, score_mod: ScoreMod | Callable | None = None,
    scale: float | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, batch_invariant: bool = False, kernel: str | None = None,
    **others: NoReturn,
) -> Choice:  # fmt: skip
    """Return what `attention_decode` would run for these arguments, without running it. See `explain`.

    >>> import torch
    >>> k = torch.randn(2, 128, 2, 64)
    >>> cache = DenseCache(k, k, torch.tensor([128, 5], dtype=torch.int32))
    >>> explain_decode(torch.randn(2, 1, 8, 64), cache).forward.kernel.name
    'cpu.decode'
    """
    if others:
        raise unknown(explain_decode, others)
    call = decode_call(q, cache, settings_of(causal, window, scale, softcap, sinks, batch_invariant, kernel))
    return ops_mods.choice_decode(call, score_mod, checked_mask(mask))


def append(
    cache: PagedCache | DenseCache, k_new: Tensor, v_new: Tensor, *, rotary: Rotary | None = None,
    cu_seqlens_q: Tensor | None = None, slots: Tensor | None = None,
) -> None:  # fmt: skip
    """Write new keys and values to a KV cache: token t of sequence b goes to position seqlens[b] + t.

    >>> import torch
    >>> k, v = torch.zeros(1, 8, 2, 4), torch.zeros(1, 8, 2, 4)
    >>> cache = DenseCache(k, v, seqlens=torch.tensor([3], dtype=torch.int32))
    >>> append(cache, torch.ones(1, 2, 2, 4), torch.ones(1, 2, 2, 4))
    >>> cache.seqlens.add_(2).item(), k[0, :, 0, 0].tolist()  # the caller advances seqlens
    (5, [0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0])

    Args:
        cache: strobe.PagedCache or strobe.DenseCache of B sequences. `append` does not change its seqlens.
        k_new, v_new: [B, T, H_kv, D] and [B, T, H_kv, D_v], in the cache's dtype and without memory in common with it.
            For a cache in float8_e4m3fn the dtype is free: values are divided by the cache's scales, clamped to
            magnitude 448 and rounded. Scales of each key and head are computed, so that the largest magnitude becomes
            448, and written beside the keys.
        rotary: rotate the new keys by the angles of their positions before writing. The caller rotates the queries.
        cu_seqlens_q: int32 [B + 1], as in `attention_paged`. k_new and v_new are then packed, [T, H_kv, D]: rows
            cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1 are the new tokens of sequence b. Rows of no sequence are not
            written.
        slots: int64 or int32 [T], the slots of packed tokens. Token t goes to row slots[t] % page_size of page
            slots[t] // page_size, as in `reshape_and_cache` of vLLM and `set_kv_buffer` of SGLang. A token with a
            negative slot is not written. The cache must be a PagedCache. Its page_table and seqlens are not read.

    A token without room, or with a page id or a slot outside the pool, is not written. A token whose position has no
    rotary angles becomes NaN in its rotary dimensions. `last_errors` reports both. Two sequences must not write to the
    same page, nor two tokens to the same slot. Does not synchronize with the device. Raises InvalidProblem, TypeError,
    and UnsupportedProblem under vmap, for gradients, or if no kernel can run the call.
    """
    for name, tensor in (("k_new", k_new), ("v_new", v_new)):
        if not isinstance(tensor, Tensor):
            raise wrong_type(name, tensor, "a tensor [B, T, H_kv, D]", "pass a torch.Tensor")
    if cu_seqlens_q is not None and not isinstance(cu_seqlens_q, Tensor):
        raise wrong_type("cu_seqlens_q", cu_seqlens_q, "a tensor int32 [B + 1] or None", "pass a torch.Tensor")
    if slots is not None:
        ops_decode.append(AppendCall.of_slots(cache, k_new, v_new, slots, rotary or cu_seqlens_q))
        return
    offsets = None if cu_seqlens_q is None else as_int32(cu_seqlens_q)
    ops_decode.append(AppendCall.of(cache, k_new, v_new, rotary, offsets))


class Settings(NamedTuple):
    """The options of a call over a cache, in the order of the fields of `DecodeCall`."""

    sinks: Tensor | None
    left: int
    right: int
    scale: float | None
    softcap: float
    batch_invariant: bool
    kernel: str


def settings_of(
    causal: bool,
    window: Window | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    batch_invariant: bool,
    kernel: str | None,
) -> Settings:
    """The checked options of these keywords."""
    if sinks is not None and not isinstance(sinks, Tensor):
        raise wrong_type("sinks", sinks, "a tensor [H_q] or None", "wrap it in torch.tensor(...)")
    left, right = band(causal, window)
    scale, cap, _, batch_invariant, name = options_of(scale, softcap, False, batch_invariant, kernel)
    return Settings(sinks, left, right, scale, cap, batch_invariant, name)


def decode_call(q: Tensor, cache: PagedCache | DenseCache, settings: Settings) -> DecodeCall:
    held = Held.of(cache)
    if not isinstance(q, Tensor):
        raise wrong_type("q", q, "a tensor [B, T, H_q, D]", "pass a torch.Tensor")
    return DecodeCall(q, *held, *settings)
