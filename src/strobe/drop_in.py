"""What the stand-ins for other libraries' functions share: the two halves of a call, keys in a cache, and the refusal of the rest.

Guests of the house: `strobe.flash_attn`, `strobe.flash_attn_interface` and `strobe.cute` translate arguments, and everything runs here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import ops
from .api import Packing, Window, call_of
from .call import Call, accumulator
from .errors import InvalidProblem, UnsupportedProblem, describe
from .mask import key_lengths


class Setting(NamedTuple):
    """What a call says beside its tensors, in the originals' terms: softcap 0.0 is none, deterministic False is torch's own switch."""

    scale: float | None = None
    causal: bool = False
    window: Window = (None, None)
    softcap: float | None = 0.0
    deterministic: bool = False
    sinks: Tensor | None = None
    packing: Packing | None = None


class Cache(NamedTuple):
    """Keys and values [B, S_max, H_kv, D], how many of them are there, and new ones to write behind those."""

    k: Tensor
    v: Tensor
    seqlens: int | Tensor | None
    k_new: Tensor | None
    v_new: Tensor | None


# ---------------------------------------------------------------- the two halves


def forward(q: Tensor, k: Tensor, v: Tensor, setting: Setting) -> tuple[Tensor, Tensor]:
    """out in q's dtype and lse (natural logarithm, float32), both differentiable.

    >>> q = torch.randn(1, 5, 2, 16)
    >>> [list(t.shape) for t in forward(q, q, q, Setting(causal=True))]
    [[1, 5, 2, 16], [1, 2, 5]]
    """
    return ops.run(_call(q, k, v, setting))


def attend(q: Tensor, k: Tensor, v: Tensor, setting: Setting) -> Tensor:
    """out of `forward` for callers who do not want lse, which then has no gradient to compute.

    >>> q = torch.randn(1, 5, 2, 16)
    >>> torch.equal(attend(q, q, q, Setting()), forward(q, q, q, Setting())[0])
    True
    """
    return ops.run(_call(q, k, v, setting), out_alone=True)[0]


def backward(gradient: Tensor, forward_of: tuple[Tensor, Tensor], qkv: tuple[Tensor, Tensor, Tensor], setting: Setting) -> tuple[Tensor, ...]:
    """dq, dk, dv for the out and lse given, which may be those of more keys than k and v hold: a ring passes its merged ones.

    >>> q, k = torch.randn(1, 4, 2, 16), torch.randn(1, 6, 2, 16)
    >>> whole = forward(q, k, k, Setting())
    >>> parts = [backward(torch.ones_like(q), whole, (q, k[:, keys], k[:, keys]), Setting())[0] for keys in (slice(0, 4), slice(4, 6))]
    >>> torch.allclose(sum(parts), backward(torch.ones_like(q), whole, (q, k, k), Setting())[0], atol=1e-5)
    True
    """
    q, k, v = (rows_contiguous(t.detach()) for t in qkv)
    call = _call(q, k, v, setting)._replace(needs_grad=True)
    out, lse = (t.detach().contiguous() for t in forward_of)
    shape = (*q.shape[:-1], v.shape[-1])
    lse_shape = (*shape[:-3], shape[-2], shape[-3])
    for name, given, wanted in (("out", out, shape), ("dout", gradient, shape), ("softmax_lse", lse, lse_shape)):
        if tuple(given.shape) != wanted:
            raise InvalidProblem(name, f"shape {list(given.shape)}", str(list(wanted)), "pass what belongs to the forward of this q")
        if name != "softmax_lse" and given.dtype != q.dtype:
            raise InvalidProblem(name, given.dtype, f"q's {q.dtype}", "convert it; a merged out is rounded once, at the end")
    lse = lse.to(accumulator(q.dtype))
    with torch.no_grad():
        return ops.BACKWARD(gradient, out, lse, None, *call.arguments)[:3]


def _call(q: Tensor, k: Tensor, v: Tensor, setting: Setting) -> Call:
    q, k, v = (rows_contiguous(t) for t in (q, k, v))
    options = setting.scale, setting.softcap or None, setting.deterministic or None
    return call_of(q, k, v, causal=setting.causal, window=setting.window, sinks=setting.sinks, options=options, packing=setting.packing)


def rows_contiguous(tensor: Tensor) -> Tensor:
    """The originals copy a tensor whose last dimension is strided; strobe.attention would refuse it."""
    return tensor.contiguous() if isinstance(tensor, Tensor) and tensor.dim() and tensor.stride(-1) != 1 else tensor


# ---------------------------------------------------------------- keys in a cache


def forward_cached(q: Tensor, cache: Cache, setting: Setting) -> tuple[Tensor, Tensor]:
    """out and lse over the keys a cache holds, new ones written into it first; no gradient, as in the originals.

    >>> k_cache = v_cache = torch.zeros(1, 8, 2, 16)
    >>> q = torch.randn(1, 1, 2, 16)
    >>> out, lse = forward_cached(q, Cache(k_cache, v_cache, 3, q, q), Setting(causal=True))
    >>> torch.equal(k_cache[:, 3:4], q)
    True
    """
    with torch.no_grad():
        held = _append(cache) if cache.k_new is not None or cache.v_new is not None else cache.seqlens
        if not isinstance(held, Tensor):
            k, v = cache.k[:, :held], cache.v[:, :held]
            if held is not None and not 0 <= held <= cache.k.shape[1]:
                raise InvalidProblem("cache_seqlens", held, f"0 to the cache's {cache.k.shape[1]} positions", "make the cache longer")
            return ops.run(_call(q, k, v, setting))
        bounded = any(bound is not None and bound >= 0 for bound in setting.window)
        if bounded or (setting.causal and q.shape[1] > 1):
            raise UnsupportedProblem(
                describe(
                    "cache_seqlens",
                    "a tensor, with causal rows or a window",
                    "an int, or one query without a window",
                    "strobe has no kernel for caches yet that aligns each sequence at its own end; pack the keys and use flash_attn_varlen_func",
                )
            )
        call = _call(q, cache.k, cache.v, setting._replace(causal=False))
        return ops.run(call.with_mask(key_lengths(held.to(torch.int32))))


def _append(cache: Cache) -> int | Tensor:
    """Write the new keys and values behind those that are there; how many there are then."""
    k_new, v_new, seqlens = cache.k_new, cache.v_new, cache.seqlens
    if k_new is None or v_new is None:
        raise InvalidProblem("k", "one of k and v", "both or neither", "give the new keys together with their values")
    if seqlens is None:
        raise InvalidProblem("cache_seqlens", None, "where the new keys go", "give the lengths before this call, an int or int32 [B]")
    count, longest = k_new.shape[1], cache.k.shape[1]
    if not isinstance(seqlens, Tensor):
        if not 0 <= seqlens <= longest - count:
            raise InvalidProblem("cache_seqlens", seqlens, f"at most {longest - count} before {count} new keys", "make the cache longer")
        cache.k[:, seqlens : seqlens + count] = k_new
        cache.v[:, seqlens : seqlens + count] = v_new
        return seqlens + count
    entries = torch.arange(k_new.shape[0], device=k_new.device)[:, None]
    positions = seqlens.long()[:, None] + torch.arange(count, device=k_new.device)
    cache.k[entries, positions] = k_new
    cache.v[entries, positions] = v_new
    return seqlens + count


# ---------------------------------------------------------------- what is not served

_DROPOUT = "strobe drops no weights; keep 0.0 in evaluation, and in training use dropout on the output"
_DECODE = "strobe has no kernel for paged or indexed caches yet; gather the keys and use flash_attn_varlen_func"
_FP8 = "strobe has no FP8 kernel yet; give q, k and v in bfloat16"
_MODS = "strobe runs no code of yours inside its kernels; express the mask with strobe.attention(mask=...)"
_SPARSE = "strobe finds the tiles a mask empties by itself; express the mask with strobe.attention(mask=...)"
_TUNING = "strobe plans its launches itself; leave it at the default"
_ROTARY = "strobe rotates no queries or keys yet; apply the rotary embedding before the call"
_SEQUSED = "strobe has no lengths beside the offsets yet; pack without gaps and say lengths by cu_seqlens"

UNSERVED: dict[str, tuple[tuple[object, ...], str]] = {
    "dropout_p": ((0.0,), _DROPOUT),
    "alibi_slopes": ((None,), "strobe adds no bias to scores; use a window or rotary positions, or FlexAttention for a bias"),
    "block_table": ((None,), _DECODE),
    "page_table": ((None,), _DECODE),
    "cache_batch_idx": ((None,), _DECODE),
    "cache_leftpad": ((None,), _DECODE),
    "leftpad_k": ((None,), _DECODE),
    "rotary_cos": ((None,), _ROTARY),
    "rotary_sin": ((None,), _ROTARY),
    "rotary_seqlens": ((None,), _ROTARY),
    "rotary_interleaved": ((True,), _ROTARY),
    "cu_seqlens_q": ((None,), _DECODE),
    "max_seqlen_q": ((None,), _DECODE),
    "cu_seqlens_k_new": ((None,), _DECODE),
    "seqused_q": ((None,), _SEQUSED),
    "seqused_k": ((None,), _SEQUSED),
    "qv": ((None,), "strobe has no second product in its scores; concatenate qv to q and v to k, with the same scale, which scores the same"),
    "q_descale": ((None,), _FP8),
    "k_descale": ((None,), _FP8),
    "v_descale": ((None,), _FP8),
    "attention_chunk": ((0,), "strobe has no chunks; strobe.attention(mask=strobe.documents(position // chunk) & strobe.causal()) means the same"),
    "num_splits": ((0, 1), _TUNING),
    "pack_gqa": ((None,), _TUNING),
    "sm_margin": ((0,), _TUNING),
    "scheduler_metadata": ((None,), _TUNING),
    "seqlen_k_per_split": ((None,), _TUNING),
    "disable_scheduler_metadata": ((False,), _TUNING),
    "gather_kv_indices": ((None,), "strobe reads all keys of a sequence; gather them before the call"),
    "min_seqlen_k": ((None,), "it belongs to gather_kv_indices, which strobe does not serve"),
    "gather_bwd_recompute_p": ((False,), "it belongs to gather_kv_indices, which strobe does not serve"),
    "gather_bwd_token_chunk": ((None,), "it belongs to gather_kv_indices, which strobe does not serve"),
    "score_mod": ((None,), _MODS),
    "score_mod_bwd": ((None,), _MODS),
    "mask_mod": ((None,), _MODS),
    "aux_tensors": ((None,), _MODS),
    "aux_scalars": ((None,), _MODS),
    "block_sparse_tensors": ((None,), _SPARSE),
    "block_sparse_tensors_bwd": ((None,), _SPARSE),
    "return_softmax": ((False,), "strobe never holds the weights; ask for softmax_lse and recompute those you need"),
    "zero_tensors": ((False,), "strobe writes every element of its results; leave it out"),
}


def refuse(**given: object) -> None:
    """Raise for the first argument that says something strobe cannot do; nothing is ignored.

    >>> refuse(dropout_p=0.0, alibi_slopes=None)
    >>> refuse(num_splits=4)
    Traceback (most recent call last):
    ...
    strobe.errors.UnsupportedProblem: num_splits: got 4, expected 0 or 1; strobe plans its launches itself; leave it at the default
    """
    for name, value in given.items():
        served, alternative = UNSERVED[name]
        if not any(value is one or (not isinstance(value, Tensor) and value == one) for one in served):
            got = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise UnsupportedProblem(describe(name, got, " or ".join(map(repr, served)), alternative))
