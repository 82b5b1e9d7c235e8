"""The public functions of a cache: what each means, said once in their docstrings; then one line each to the ops."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from .errors import wrong_type
from .interface import Window, _band, _options, _out
from .ops import decode as ops_decode
from .problem.append import AppendCall
from .problem.cache import DenseCache, Held, PagedCache, Rotary
from .problem.decode import DecodeCall
from .problem.foreign_arguments import unknown
from .problem.merge import Partial
from .selection.select import Choice


def attention_decode(
    q: Tensor, cache: PagedCache | DenseCache, *, causal: bool = True, window: Window | None = None, scale: float | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, batch_invariant: bool = False, kernel: str | None = None, out: Tensor | None = None,
    **others: NoReturn,
) -> Tensor:  # fmt: skip
    """Attention of each sequence's newest tokens over its cache, which holds them already.

    >>> import torch
    >>> k, v = torch.randn(2, 128, 2, 64), torch.randn(2, 128, 2, 64)
    >>> cache = DenseCache(k, v, seqlens=torch.tensor([128, 5], dtype=torch.int32))
    >>> attention_decode(torch.randn(2, 1, 8, 64), cache).shape
    torch.Size([2, 1, 8, 64])

    Args:
        q: [B, T, H_q, D], T tokens a sequence (tuned for 1 to 16); H_q a multiple of the cache's heads.
        cache: strobe.PagedCache or strobe.DenseCache of B sequences, in q's dtype or in float8_e4m3fn.
        causal: with n = seqlens[b], row i stands at position n - T + i and sees the keys up to there.
        window: (left, right) around that position, both ends included; None or negative is unbounded.
        scale, softcap, sinks, kernel: as `attention`.
        batch_invariant: a row's bits do not depend on batch size, position, padding or the layout of pages, and are those of its prefill.
        out: where to write, [B, T, H_q, D_v] in q's dtype; it may be q itself, and share no other memory with what is read.

    Returns [B, T, H_q, D_v] in q's dtype. A row that sees no key (n is 0, or n < T and the row lies before the first key) is 0.
    Waits for no device, so it can be captured in a graph and replayed over other lengths and pages. Lengths, starts and page
    ids that are out of range are clamped or hidden, and told by `last_errors`. Has no gradients: UnsupportedProblem.
    """
    if others:
        raise unknown(attention_decode, others)
    call = _call(q, cache, _settings(causal, window, scale, softcap, sinks, batch_invariant, kernel))
    return ops_decode.run(call, out if out is None else _out(out), True)[0]


def partial_attention_decode(
    q: Tensor, cache: PagedCache | DenseCache, *, causal: bool = True, window: Window | None = None, scale: float | None = None,
    softcap: float | None = None, batch_invariant: bool = False, kernel: str | None = None, **others: NoReturn,
) -> Partial:  # fmt: skip
    """`attention_decode` for `merge` with attention over other keys: out in float32, and the log-sum-exp of its scores.

    >>> import torch
    >>> k = torch.randn(2, 128, 2, 64)
    >>> part = partial_attention_decode(torch.randn(2, 3, 8, 64), DenseCache(k, k, torch.tensor([128, 0], dtype=torch.int32)))
    >>> part.out.shape, part.lse.shape, part.lse[1].max().item()
    (torch.Size([2, 3, 8, 64]), torch.Size([2, 8, 3]), -inf)

    Arguments as `attention_decode`; sinks are applied once, after all merging, by `with_sinks`.
    """
    if others:
        raise unknown(partial_attention_decode, others)
    call = _call(q, cache, _settings(causal, window, scale, softcap, None, batch_invariant, kernel))
    return Partial(*ops_decode.run(call._replace(partial=True)))


def explain_decode(
    q: Tensor, cache: PagedCache | DenseCache, *, causal: bool = True, window: Window | None = None, scale: float | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, batch_invariant: bool = False, kernel: str | None = None, **others: NoReturn,
) -> Choice:  # fmt: skip
    """What `attention_decode` would run for these arguments, and why not the others. Runs nothing.

    >>> import torch
    >>> k = torch.randn(2, 128, 2, 64)
    >>> cache = DenseCache(k, k, torch.tensor([128, 5], dtype=torch.int32))
    >>> explain_decode(torch.randn(2, 1, 8, 64), cache).forward.kernel.name
    'cpu.decode'
    """
    if others:
        raise unknown(explain_decode, others)
    return ops_decode.decide(ops_decode.prepare(_call(q, cache, _settings(causal, window, scale, softcap, sinks, batch_invariant, kernel))))


def append(cache: PagedCache | DenseCache, k_new: Tensor, v_new: Tensor, *, rotary: Rotary | None = None) -> None:
    """Write new keys and values to a cache, token t of sequence b at position seqlens[b] + t.

    >>> import torch
    >>> k, v = torch.zeros(1, 8, 2, 4), torch.zeros(1, 8, 2, 4)
    >>> cache = DenseCache(k, v, seqlens=torch.tensor([3], dtype=torch.int32))
    >>> append(cache, torch.ones(1, 2, 2, 4), torch.ones(1, 2, 2, 4))
    >>> cache.seqlens.add_(2).item(), k[0, :, 0, 0].tolist()  # the lengths are moved on by their owner
    (5, [0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0])

    Args:
        k_new, v_new: [B, T, H_kv, D] and [B, T, H_kv, D_v]; for a cache in float8_e4m3fn in any dtype, divided by its scales
            and rounded, the largest magnitude being 448. They share no memory with the cache.
        rotary: keys are turned by the angles of their position first (queries are the caller's own to turn).

    A token that has no room, or whose page is not in the pool, is not written; one beyond the rotary angles becomes NaN in its
    rotary dimensions; `last_errors` tells. Sequences must not share the pages that are written to. Waits for no device.
    """
    for name, tensor in (("k_new", k_new), ("v_new", v_new)):
        if not isinstance(tensor, Tensor):
            raise wrong_type(name, tensor, "a tensor [B, T, H_kv, D]", "pass a torch.Tensor")
    ops_decode.append(AppendCall.of(cache, k_new, v_new, rotary))


Settings = tuple  # sinks, left, right, scale, softcap, batch_invariant, kernel


def _settings(
    causal: bool, window: Window | None, scale: float | None, softcap: float | None, sinks: Tensor | None, batch_invariant: bool, kernel: str | None
) -> Settings:
    left, right = _band(causal, window)
    scale, cap, _, batch_invariant, name = _options(scale, softcap, False, batch_invariant, kernel)
    return sinks, left, right, scale, cap, batch_invariant, name


def _call(q: Tensor, cache: PagedCache | DenseCache, settings: Settings) -> DecodeCall:
    held = Held.of(cache)
    if not isinstance(q, Tensor):
        raise wrong_type("q", q, "a tensor [B, T, H_q, D]", "pass a torch.Tensor")
    if settings[0] is not None and not isinstance(settings[0], Tensor):
        raise wrong_type("sinks", settings[0], "a tensor [H_q] or None", "wrap it in torch.tensor(...)")
    return DecodeCall(q, *held, *settings)
