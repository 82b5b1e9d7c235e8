"""The public attention functions. Each one builds a `Call` from its keywords and passes it to `ops`.

All functions take q [B, S_q, H_q, D], k [B, S_k, H_kv, D] and v [B, S_k, H_kv, D_v]; packed tensors are [T, H, D].
Supported dtypes are float16, bfloat16, float32 and float64. The last dimension must be contiguous; other strides are
free. Query head h reads key head h // (H_q // H_kv).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NoReturn

import torch
from torch import Tensor

from ..distributed.arguments import Functions, attend, attend_packed
from ..distributed.plan import Plan
from ..errors import InvalidProblem, UnsupportedProblem, wrong_type
from ..kernels.runtime import error_flags
from ..mods.mask import MaskMod
from ..mods.score import ScoreMod
from ..ops import attention as ops
from ..ops import mods as ops_mods
from ..ops import repeated
from ..ops.warmup import run_example
from ..problem.call import Call
from ..problem.decode import DecodeProblem
from ..problem.foreign_arguments import no_mask, unknown
from ..problem.keywords import Options, Window, as_length, band, dropout_of, options_of, output_tensor
from ..problem.mask import NO_BOUND, Mask, as_int32, device_here
from ..problem.merge import Partial
from ..problem.paged import PagedProblem
from ..problem.problem import Problem
from ..selection.select import Choice

Packing = tuple[Tensor, "Tensor | None", "int | None", "int | None"]


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: Window | None = None, mask: Mask | None = None,
    score_mod: ScoreMod | Callable | None = None,
    scale: float | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, deterministic: bool | None = None,
    batch_invariant: bool = False,
    kernel: str | None = None, out: Tensor | None = None, context_parallel: Plan | None = None,
    dropout_p: float = 0, dropout_seed: int | Tensor | None = None, **others: NoReturn,
) -> Tensor:  # fmt: skip
    """Compute exact attention, softmax(scale * q k^T) v, for each head under a mask.

    >>> q, k, v = torch.randn(2, 5, 8, 64), torch.randn(2, 7, 2, 64), torch.randn(2, 7, 2, 64)
    >>> attention(q, k, v, causal=True).shape
    torch.Size([2, 5, 8, 64])

    Args:
        q, k, v: [B, S_q, H_q, D], [B, S_k, H_kv, D], [B, S_k, H_kv, D_v]; one dtype; H_q a multiple of H_kv.
        causal: query i attends to key j iff j <= i + S_k - S_q (aligned at the bottom right).
        window: (left, right), the number of keys on each side of the causal diagonal, both ends included; None or a
            negative number means no bound.
        mask: strobe.causal(), window, prefix_causal, documents, key_lengths and mask_mod, combined with &, | and ~.
            `causal` and `window` apply in addition.
        scale: a finite factor of q k^T; D ** -0.5 by default.
        score_mod: a function (score, b, h, q_idx, kv_idx) -> score, or strobe.alibi, relative_bias, bias. It gets the
            score times scale, after softcap.
        softcap: c > 0 replaces each score s by c * tanh(s / c), before masks and sinks.
        sinks: [H_q], one extra logit per head that counts in the denominator only.
        deterministic: make gradients bitwise reproducible; None follows torch.are_deterministic_algorithms_enabled().
        batch_invariant: make a row's bits independent of batch size, position and padding, and equal to those of
            attention_decode. On Hopper such calls run at about 0.3 times the usual speed.
        kernel: the family ("portable") or kernel ("portable.forward") to run. If it cannot run, the error says why.
        out: the output tensor, [B, S_q, H_q, D_v] in q's dtype; not supported with gradients.
        context_parallel: a plan of `strobe.distributed`: q, k and v are this rank's rows, and a mask is that of the
            whole sequence (none: the plan's).
        dropout_p: the probability that a weight is set to 0 after the softmax; the others are divided by 1 - dropout_p.
        dropout_seed: an int, or int64 [1] on q's device. Equal seeds drop the same weights; None draws a seed from
            torch's generator. The stream of random numbers is not PyTorch's.

    Returns [B, S_q, H_q, D_v] in q's dtype. A row that sees no key is 0. A NaN in a row of q reaches only that row.
    Raises InvalidProblem if arguments are invalid or contradict each other, TypeError for an argument of the wrong
    type, and UnsupportedProblem if no kernel can run the call. Source: FlashAttention-2 (arXiv 2307.08691), section 3;
    online softmax (arXiv 1805.02867).
    """
    if others:
        raise unknown(attention, others)
    if context_parallel is not None:
        options = options_of(scale, softcap, deterministic, batch_invariant, kernel)
        call = _dense(q, k, v, False, None, None, sinks, options)
        functions = Functions(score_mod, dropout_of(dropout_p, dropout_seed, q, batch_invariant))
        return attend(call, context_parallel, band(causal, window), mask, out, functions)
    keywords: tuple | None = None
    reading: repeated.Reading | None = None
    if (
        window is None and softcap is None and sinks is None and batch_invariant is False
        and kernel is None and out is None and dropout_p == 0
    ):  # fmt: skip
        has_exact_types = (
            type(causal) is bool
            and (deterministic is None or type(deterministic) is bool)
            and (scale is None or type(scale) is float)
        )
        # `has_exact_types` compares types because 1 == True: causal=1 would hit the cache entry of causal=True, but
        # validation rejects it
        if has_exact_types and isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor):
            result = None
            if score_mod is None and mask is None:
                keywords = causal, scale
                result = ops.run_keywords(q, k, v, keywords, deterministic)
            elif not torch.compiler.is_compiling():
                reading = repeated.read(score_mod, mask, causal, scale, deterministic)
                result = None if reading is None else repeated.run(q, k, v, reading)
            if result is not None:
                return result
    call = _dense(
        q, k, v, causal, window, mask, sinks, options_of(scale, softcap, deterministic, batch_invariant, kernel)
    )
    if reading is not None:
        return repeated.attend(call, score_mod, mask, reading)
    dropout = None if dropout_p == 0 else dropout_of(dropout_p, dropout_seed, q, batch_invariant)
    if score_mod is not None or dropout is not None or isinstance(mask, MaskMod):
        return ops_mods.attend(call, score_mod, mask, out if out is None else output_tensor(out), dropout)[0]
    result = ops.run(call, out if out is None else output_tensor(out), True)[0]
    if keywords is not None:
        ops.insert_keywords(call, keywords)
    return result


def partial_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: Window | None = None, mask: Mask | None = None,
    score_mod: ScoreMod | Callable | None = None,
    scale: float | None = None,
    softcap: float | None = None, deterministic: bool | None = None, batch_invariant: bool = False,
    kernel: str | None = None, **others: NoReturn,
) -> Partial:  # fmt: skip
    """Compute attention over a part of the keys: float32 output and log-sum-exp. `merge` combines the parts.

    >>> from strobe import merge
    >>> q, kv = torch.randn(1, 4, 2, 16), torch.randn(1, 6, 2, 16)
    >>> whole = merge(partial_attention(q, kv[:, :4], kv[:, :4]), partial_attention(q, kv[:, 4:], kv[:, 4:]))
    >>> torch.allclose(whole.out, attention(q, kv, kv), atol=1e-6)
    True

    Takes the arguments of `attention` except sinks and out. Apply sinks with `with_sinks`, once, after the last merge.

    Returns Partial(out [B, S_q, H_q, D_v], lse [B, H_q, S_q]), both float32 (float64 for float64 inputs) and both
    differentiable. lse is a natural logarithm. A row that sees no key has out 0 and lse -inf.
    Raises the errors of `attention`.
    """
    if others:
        raise unknown(partial_attention, others)
    options = options_of(scale, softcap, deterministic, batch_invariant, kernel)
    call = _dense(q, k, v, causal, window, mask, None, options)._replace(partial=True)
    return Partial(*ops_mods.attend(call, score_mod, mask)[:2])


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, causal: bool = False, window: Window | None = None, mask: Mask | None = None,
    score_mod: ScoreMod | Callable | None = None, scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None, deterministic: bool | None = None, batch_invariant: bool = False,
    kernel: str | None = None,
    out: Tensor | None = None, context_parallel: Plan | None = None,
    dropout_p: float = 0, dropout_seed: int | Tensor | None = None, **others: NoReturn,
) -> Tensor:  # fmt: skip
    """Compute attention over sequences of different lengths that are packed without padding.

    >>> q = k = v = torch.randn(12, 2, 64)
    >>> attention_varlen(q, k, v, cu_seqlens_q=torch.tensor([0, 5, 5, 12], dtype=torch.int32), causal=True).shape
    torch.Size([12, 2, 64])

    Args:
        q, k, v: [T_q, H_q, D], [T_k, H_kv, D], [T_k, H_kv, D_v].
        cu_seqlens_q, cu_seqlens_k: int32 [n + 1] on q's device, the cumulative sequence lengths. cu_seqlens_k defaults
            to cu_seqlens_q. A row outside every sequence has output 0.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths, used for planning. `last_errors` reports a longer
            sequence. Its rows beyond max_seqlen_q are NaN; if it exceeds max_seqlen_k, all its rows are NaN.
        context_parallel: a plan of `ContextParallel.plan_varlen`: q, k and v are this rank's rows, and cu_seqlens_q is
            that of the whole packed tensor.
        Other arguments: as in `attention`, applied within each sequence.

    Returns [T_q, H_q, D_v] in q's dtype. The host never reads device data.
    Raises the errors of `attention`.
    """
    if others:
        raise unknown(attention_varlen, others)
    if context_parallel is not None:
        options = options_of(scale, softcap, deterministic, batch_invariant, kernel)
        call = _dense(q, k, v, False, None, None, sinks, options)
        functions = Functions(score_mod, dropout_of(dropout_p, dropout_seed, q, batch_invariant))
        offsets = cu_seqlens_q, cu_seqlens_k
        return attend_packed(call, context_parallel, band(causal, window), mask, offsets, out, functions)
    call = _dense(
        q,
        k,
        v,
        causal,
        window,
        mask,
        sinks,
        options_of(scale, softcap, deterministic, batch_invariant, kernel),
    )
    call = _packed(call, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    dropout = dropout_of(dropout_p, dropout_seed, q, batch_invariant)
    return ops_mods.attend(call, score_mod, mask, out if out is None else output_tensor(out), dropout)[0]


def partial_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, causal: bool = False, window: Window | None = None, mask: Mask | None = None,
    score_mod: ScoreMod | Callable | None = None, scale: float | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None, batch_invariant: bool = False, kernel: str | None = None, **others: NoReturn,
) -> Partial:  # fmt: skip
    """Compute `partial_attention` over packed sequences: Partial(out [T_q, H_q, D_v], lse [H_q, T_q]).

    >>> q = k = v = torch.randn(12, 2, 64)
    >>> partial_attention_varlen(q, k, v, cu_seqlens_q=torch.tensor([0, 5, 12], dtype=torch.int32)).lse.shape
    torch.Size([2, 12])

    Takes the arguments of `attention_varlen` except sinks and out. Both results are float32, or float64 for float64
    inputs.
    """
    if others:
        raise unknown(partial_attention_varlen, others)
    options = options_of(scale, softcap, deterministic, batch_invariant, kernel)
    call = _dense(q, k, v, causal, window, mask, None, options)._replace(partial=True)
    return Partial(
        *ops_mods.attend(_packed(call, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), score_mod, mask)[:2]
    )


def explain(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: Window | None = None, mask: Mask | None = None,
    score_mod: ScoreMod | Callable | None = None,
    scale: float | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, deterministic: bool | None = None,
    batch_invariant: bool = False,
    kernel: str | None = None, dropout_p: float = 0, **others: NoReturn,
) -> Choice:  # fmt: skip
    """Return what `attention` would run for these arguments, without running it.

    The Choice names the kernels and their configs, and the reason why each other kernel was rejected.

    >>> q = torch.randn(1, 8, 2, 64)
    >>> explain(q, q, q, causal=True).forward.kernel.name
    'cpu.forward'
    """
    if others:
        raise unknown(explain, others)
    options = options_of(scale, softcap, deterministic, batch_invariant, kernel)
    call = _dense(q, k, v, causal, window, mask, sinks, options)
    return ops_mods.choice(call, score_mod, mask, dropout_of(dropout_p, 0, q, batch_invariant))


def explain_varlen(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, causal: bool = False, window: Window | None = None, mask: Mask | None = None,
    score_mod: ScoreMod | Callable | None = None, scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None, deterministic: bool | None = None, batch_invariant: bool = False,
    kernel: str | None = None, dropout_p: float = 0, **others: NoReturn,
) -> Choice:  # fmt: skip
    """Return what `attention_varlen` would run for these arguments, without running it. See `explain`.

    >>> q = torch.randn(8, 2, 64)
    >>> explain_varlen(q, q, q, cu_seqlens_q=torch.tensor([0, 3, 8], dtype=torch.int32)).problem.layout.batch
    2
    """
    if others:
        raise unknown(explain_varlen, others)
    call = _dense(
        q,
        k,
        v,
        causal,
        window,
        mask,
        sinks,
        options_of(scale, softcap, deterministic, batch_invariant, kernel),
    )
    call = _packed(call, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return ops_mods.choice(call, score_mod, mask, dropout_of(dropout_p, 0, q, batch_invariant))


def supports(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: Window | None = None, mask: Mask | None = None,
    score_mod: ScoreMod | Callable | None = None,
    scale: float | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, deterministic: bool | None = None,
    batch_invariant: bool = False,
    kernel: str | None = None, dropout_p: float = 0, **others: NoReturn,
) -> bool:  # fmt: skip
    """Return whether a kernel on this machine can run this call of `attention`. Invalid arguments raise the same
    errors.

    >>> q = torch.randn(1, 8, 2, 64)
    >>> supports(q, q, q), supports(q, q, q, kernel="portable")
    (True, False)
    """
    if others:
        raise unknown(supports, others)
    call = _dense(
        q, k, v, causal, window, mask, sinks, options_of(scale, softcap, deterministic, batch_invariant, kernel)
    )
    try:
        ops_mods.choice(call, score_mod, mask, dropout_of(dropout_p, 0, q, batch_invariant))
    except UnsupportedProblem:
        return False
    return True


def warmup(
    problems: Iterable[Problem | DecodeProblem | PagedProblem], device: torch.device | str | None = None, *,
    score_mod: ScoreMod | Callable | None = None, mask: Mask | None = None,
) -> None:  # fmt: skip
    """Compile the kernels of these problems before their first call, for example before a graph capture or to fill a
    shared cache.

    >>> q = torch.randn(1, 8, 2, 64)
    >>> warmup([explain(q, q, q).problem])
    >>> from strobe import alibi
    >>> slopes = alibi(torch.rand(2))
    >>> warmup([explain(q, q, q, score_mod=slopes).problem], score_mod=slopes)

    Runs each problem once on zeros of its shapes. `device` defaults to the current GPU, or to the CPU if there is no
    GPU. Problems of calls with functions need these functions: pass score_mod and mask as in the calls. Raises
    InvalidProblem for the meta device and for functions that are missing or not the problem's, and TypeError for a
    value that is not a problem.
    """
    place = device_here(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if place.type == "meta":
        raise InvalidProblem(
            "device", "meta", "one that has memory, since kernels are run", "name the one that they are for"
        )
    if not isinstance(problems, Iterable):
        raise wrong_type("problems", problems, "strobe.Problem values", "put it in a list")
    for problem in problems:
        run_example(problem, place, score_mod, mask)


def last_errors(device: torch.device | str | None = None) -> list[str]:
    """Return the errors that kernels found in device metadata (offsets, lengths) since the last call, and clear them.

    >>> last_errors()
    []

    Synchronizes with the device. `device=None` reads all devices.
    """
    return error_flags.read_and_clear(None if device is None else device_here(device))


# ---------------------------------------------------------------- from keywords to a Call


def _dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: Window | None,
    mask: Mask | None,
    sinks: Tensor | None,
    options: Options,
) -> Call:
    if not (
        isinstance(q, Tensor)
        and isinstance(k, Tensor)
        and isinstance(v, Tensor)
        and (sinks is None or isinstance(sinks, Tensor))
    ):
        name, got = next(
            (name, got) for name, got in (("q", q), ("k", k), ("v", v), ("sinks", sinks)) if not isinstance(got, Tensor)
        )
        raise wrong_type(name, got, "a tensor", "pass a torch.Tensor")
    left, right = band(causal, window)
    call = Call(q, k, v, left, right, *options, False, False, sinks)  # positional arguments save 0.15 of 0.55 us
    if mask is None:
        return call
    if not isinstance(mask, Mask):
        raise no_mask(mask)
    alone = (
        isinstance(left, int) and isinstance(right, int) and left == right == NO_BOUND
    )  # & with a mask without bounds takes 2 us
    return call.with_mask(mask if alone else call.mask & mask)


def call_of(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: Window | None = None, sinks: Tensor | None = None,
    options: tuple[float | None, float | None, bool | None] = (None, None, None), packing: Packing | None = None,
) -> Call:  # fmt: skip
    """Build the Call of `attention`, or of `attention_varlen` if packing is given. `strobe.compat.signatures` and
    `flex_attention` call this.

    options: (scale, softcap, deterministic). packing: (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k).
    """
    call = _dense(q, k, v, causal, window, None, sinks, options_of(*options, False, None))
    return call if packing is None else _packed(call, *packing)


def _packed(
    call: Call, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, max_seqlen_q: int | None, max_seqlen_k: int | None
) -> Call:
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(offsets, Tensor):
            raise wrong_type(
                name, offsets, "an int32 tensor [n + 1]", "give the running sum of lengths, from 0 to the total"
            )
        if offsets.dim() > 1:
            got, expected = f"shape {list(offsets.shape)}", "[n + 1] for n sequences"
            raise InvalidProblem(name, got, expected, "give the running sum of lengths, from 0")
    longest = [
        as_length(name, bound) for name, bound in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k))
    ]
    same = cu_seqlens_k is cu_seqlens_q
    cu_seqlens_q = as_int32(cu_seqlens_q)
    cu_seqlens_k = cu_seqlens_q if same else as_int32(cu_seqlens_k)
    return call._replace(
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=longest[0], max_seqlen_k=longest[1]
    )


__all__ = [
    "attention", "attention_varlen", "explain", "explain_varlen", "last_errors", "partial_attention",
    "partial_attention_varlen",
    "supports", "warmup",
]  # fmt: skip
