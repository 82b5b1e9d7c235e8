"""FlashAttention-2's functions (flash_attn 2.8), including the private ones that other libraries use.

Arguments and their order are those of the originals. q, k, v are [B, S, H, D], or packed [T, H, D]. softmax_lse is the
natural logarithm in float32, [B, H, S] or [H, T]. Unsupported arguments raise UnsupportedProblem.
"""

from __future__ import annotations

from ..compat.block_table import forward_paged
from ..compat.kvcache import Cache, forward_cached
from ..compat.signatures import Setting, applied, attend, forward, refuse, unpacked
from ..errors import UnsupportedProblem, describe
from . import flash_attn_2_cuda as flash_attn_gpu

# ---------------------------------------------------------------- the public functions


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """
    >>> import torch
    >>> q, k = torch.randn(2, 5, 4, 16), torch.randn(2, 7, 2, 16)
    >>> flash_attn_func(q, k, k, causal=True).shape
    torch.Size([2, 5, 4, 16])

    q is [B, S_q, H_q, D], k and v are [B, S_k, H_kv, D]; out is like q. With return_attn_probs: (out, softmax_lse,
    S_dmask). S_dmask, the pattern of dropout, is empty, so dropout_p must be 0 then. alibi_slopes [H_q] or [B, H_q]
    subtract slope * |i + S_k - S_q - j| from the score of row i and key j. Dropout draws other random numbers than the
    original.
    """
    setting = Setting(
        softmax_scale, causal, window_size, softcap, deterministic, alibi_slopes=alibi_slopes, dropout_p=dropout_p
    )
    return _with_lse(q, k, v, setting) if return_attn_probs else attend(q, k, v, setting)


def flash_attn_kvpacked_func(
    q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """As `flash_attn_func`, with k and v in kv [B, S_k, 2, H_kv, D]."""
    k, v = unpacked("kv", kv, 2, packed=False)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_qkvpacked_func(
    qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """As `flash_attn_func`, with q, k and v in qkv [B, S, 3, H, D]."""
    q, k, v = unpacked("qkv", qkv, 3, packed=False)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    """
    >>> import torch
    >>> q, offsets = torch.randn(12, 4, 16), torch.tensor([0, 5, 12], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, q, q, offsets, offsets, 7, 7, causal=True).shape
    torch.Size([12, 4, 16])

    q is [T_q, H_q, D], k and v are [T_k, H_kv, D], cu_seqlens int32 [n + 1].

    With a block_table, int32 [B, max_pages], k and v are pages [n_pages, page_size, H_kv, D], read in place and without
    gradients. Queries are then padded to [B, max_seqlen_q], so this is fast only if sequences have similar numbers of
    queries.
    """
    packing = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    bias = alibi_slopes, dropout_p
    setting = Setting(softmax_scale, causal, window_size, softcap, deterministic, None, packing, *bias)
    if block_table is not None:
        refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
        out, lse = forward_paged(q, k, v, setting, block_table)
        return (out, lse, q.new_zeros(0)) if return_attn_probs else out
    return _with_lse(q, k, v, setting) if return_attn_probs else attend(q, k, v, setting)


def flash_attn_varlen_kvpacked_func(
    q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """As `flash_attn_varlen_func`, with k and v in kv [T_k, 2, H_kv, D]."""
    k, v = unpacked("kv", kv, 2, packed=True)
    offsets = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    scores = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
    return flash_attn_varlen_func(q, k, v, *offsets, *scores, deterministic, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """As `flash_attn_varlen_func`, with q, k and v in qkv [T, 3, H, D]."""
    q, k, v = unpacked("qkv", qkv, 3, packed=True)
    scores = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *scores, deterministic, return_attn_probs
    )


def _with_lse(q, k, v, setting):
    """(out, softmax_lse, S_dmask). The original's S_dmask is empty without dropout."""
    if setting.dropout_p:
        remedy = "strobe keeps no pattern of dropped weights; leave one of the two out"
        got = f"True beside dropout_p={setting.dropout_p}"
        raise UnsupportedProblem(describe("return_attn_probs", got, "False", remedy))
    return *forward(q, k, v, setting), q.new_zeros(0)


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
):  # fmt: skip
    """Attention over the keys in a cache, without gradients. First writes k and v to the cache, at cache_seqlens.

    >>> import torch
    >>> k_cache, v_cache, q = torch.zeros(1, 8, 2, 16), torch.zeros(1, 8, 2, 16), torch.randn(1, 1, 2, 16)
    >>> flash_attn_with_kvcache(q, k_cache, v_cache, q, q, cache_seqlens=0).allclose(q)
    True

    The caches are [B, S_max, H_kv, D], or pages [n_pages, page_size, H_kv, D] of any page size with a block_table.
    cache_seqlens is the number of keys before the call: an int, int32 [B], or None for a full cache. causal and windows
    align the last query with the last key after the write.

    rotary_cos and rotary_sin rotate the new k by their positions. They rotate q by positions cache_seqlens,
    cache_seqlens + 1, ... with causal or a window, and otherwise all of q by position cache_seqlens. cache_batch_idx
    selects rows of the cache. cache_leftpad hides the keys before it.
    """
    refuse(alibi_slopes=alibi_slopes, num_splits=num_splits)
    cache = Cache(
        k_cache, v_cache, cache_seqlens, k, v, rotary_cos, rotary_sin, rotary_interleaved, cache_batch_idx,
        cache_leftpad, block_table
    )  # fmt: skip
    out, lse = forward_cached(q, cache, Setting(softmax_scale, causal, window_size, softcap))
    return (out, lse) if return_softmax_lse else out


# ---------------------------------------------------------------- private functions: libraries with their own autograd
# call them


def _flash_attn_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
    return_softmax,
):  # fmt: skip
    """(out, softmax_lse, S_dmask, rng_state), without gradients.

    >>> import torch
    >>> q = torch.randn(1, 5, 2, 16)
    >>> [list(t.shape) for t in _flash_attn_forward(q, q, q, 0.0, 0.25, True, -1, -1, 0.0, None, False)]
    [[1, 5, 2, 16], [1, 2, 5], [0], [2]]
    """
    scores = softmax_scale, causal, window_size_left, window_size_right, softcap
    return tuple(flash_attn_gpu.fwd(q, k, v, None, alibi_slopes, dropout_p, *scores, return_softmax, None))


def _flash_attn_varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1,
    window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None,
    seqused_k=None, zero_tensors=False, num_splits=0,
):  # fmt: skip
    """`_flash_attn_forward` over packed sequences, or over pages with a block_table. seqused_k limits each sequence to
    its first keys.
    """
    scores = causal, window_size_left, window_size_right, softcap
    return tuple(flash_attn_gpu.varlen_fwd(
        q, k, v, None, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, alibi_slopes, max_seqlen_q,
        max_seqlen_k, dropout_p,
        softmax_scale, zero_tensors, *scores, return_softmax, None, num_splits,
    ))  # fmt: skip


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
    softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    """Write dq, dk, dv (those that are not None). Return softmax_d, the row sums of dout * out, [B, H, S rounded up to
    128].

    out and softmax_lse may cover more keys than k and v hold, as in ring attention. rng_state belongs to dropout and is
    ignored.
    """
    scores = softmax_scale, causal, window_size_left, window_size_right, softcap
    given = dout, q, k, v, out, softmax_lse, dq, dk, dv
    return flash_attn_gpu.bwd(*given, alibi_slopes, dropout_p, *scores, deterministic, None, rng_state)[3]


def _flash_attn_varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    zero_tensors=False,
):  # fmt: skip
    """`_flash_attn_backward` over packed sequences. softmax_d is [H, T + 128 n], with 128 spare rows after each of the
    n sequences.
    """
    scores = causal, window_size_left, window_size_right, softcap
    return flash_attn_gpu.varlen_bwd(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, alibi_slopes, max_seqlen_q,
        max_seqlen_k, dropout_p,
        softmax_scale, zero_tensors, *scores, deterministic, None, rng_state,
    )[3]  # fmt: skip


# in the original these are torch.ops.flash_attn ops; strobe.integrations.flash_attn.register_ops registers those
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


# ---------------------------------------------------------------- autograd classes: only `apply`; the functions have
# their own autograd

_SCORES = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
_LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"


class FlashAttnFunc:
    """`apply` calls `flash_attn_func` with the original's order of positional arguments. There is no forward or
    backward with a ctx.

    >>> import torch
    >>> q = torch.randn(1, 5, 2, 16)
    >>> FlashAttnFunc.apply(q, q, q, 0.0, None, True, (-1, -1), 0.0, None, False, False, True).shape
    torch.Size([1, 5, 2, 16])
    """

    apply = applied(flash_attn_func, f"q k v {_SCORES} is_grad_enabled")


class FlashAttnKVPackedFunc:
    """`apply` of `flash_attn_kvpacked_func`; see `FlashAttnFunc`."""

    apply = applied(flash_attn_kvpacked_func, f"q kv {_SCORES} is_grad_enabled")


class FlashAttnQKVPackedFunc:
    """`apply` of `flash_attn_qkvpacked_func`; see `FlashAttnFunc`."""

    apply = applied(flash_attn_qkvpacked_func, f"qkv {_SCORES} is_grad_enabled")


class FlashAttnVarlenFunc:
    """`apply` of `flash_attn_varlen_func`; see `FlashAttnFunc`."""

    apply = applied(flash_attn_varlen_func, f"q k v {_LENGTHS} {_SCORES} block_table is_grad_enabled")


class FlashAttnVarlenKVPackedFunc:
    """`apply` of `flash_attn_varlen_kvpacked_func`; see `FlashAttnFunc`."""

    apply = applied(flash_attn_varlen_kvpacked_func, f"q kv {_LENGTHS} {_SCORES} is_grad_enabled")


class FlashAttnVarlenQKVPackedFunc:
    """`apply` of `flash_attn_varlen_qkvpacked_func`; see `FlashAttnFunc`."""

    apply = applied(flash_attn_varlen_qkvpacked_func, f"qkv cu_seqlens max_seqlen {_SCORES} is_grad_enabled")


__all__ = [
    "FlashAttnFunc", "FlashAttnKVPackedFunc", "FlashAttnQKVPackedFunc", "FlashAttnVarlenFunc",
    "FlashAttnVarlenKVPackedFunc",
    "FlashAttnVarlenQKVPackedFunc",
    "_flash_attn_backward", "_flash_attn_forward", "_flash_attn_varlen_backward", "_flash_attn_varlen_forward",
    "_wrapped_flash_attn_backward", "_wrapped_flash_attn_forward", "_wrapped_flash_attn_varlen_backward",
    "_wrapped_flash_attn_varlen_forward",
    "flash_attn_func", "flash_attn_gpu", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache",
]  # fmt: skip
