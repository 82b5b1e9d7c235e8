"""FlashAttention-2's functions (flash_attn 2.8), the private ones that other libraries build on included.

Arguments and their order are the originals'. q, k, v lie as [B, S, H, D], packed as [T, H, D]; softmax_lse is the natural
logarithm in float32, [B, H, S] or [H, T].
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..drop_in import Setting, attend, backward, forward, refuse, unpacked
from ..errors import InvalidProblem
from ..kvcache import Cache, forward_cached, forward_paged

_ROWS = 128  # the originals round softmax_d up to this many rows


# ---------------------------------------------------------------- the public functions


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """
    >>> q, k = torch.randn(2, 5, 4, 16), torch.randn(2, 7, 2, 16)
    >>> flash_attn_func(q, k, k, causal=True).shape
    torch.Size([2, 5, 4, 16])

    With return_attn_probs: (out, softmax_lse, S_dmask), where S_dmask is empty, as in the original without dropout.
    """
    refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    setting = Setting(softmax_scale, causal, window_size, softcap, deterministic)
    return (*forward(q, k, v, setting), q.new_zeros(0)) if return_attn_probs else attend(q, k, v, setting)


def flash_attn_kvpacked_func(
    q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """kv [B, S_k, 2, H_kv, D]; the rest as `flash_attn_func`."""
    k, v = unpacked("kv", kv, 2, packed=False)
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """qkv [B, S, 3, H, D]; the rest as `flash_attn_func`."""
    q, k, v = unpacked("qkv", qkv, 3, packed=False)
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    """
    >>> q, offsets = torch.randn(12, 4, 16), torch.tensor([0, 5, 12], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, q, q, offsets, offsets, 7, 7, causal=True).shape
    torch.Size([12, 4, 16])

    With a block_table, int32 [B, max_pages], k and v are pages [n_pages, page_size, H_kv, D], read in place and without gradients.
    Queries are laid out as [B, max_seqlen_q] for that, which is meant for lengths that are alike.
    """
    refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    packing = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    setting = Setting(softmax_scale, causal, window_size, softcap, deterministic, packing=packing)
    if block_table is not None:
        out, lse = forward_paged(q, k, v, setting, block_table)
        return (out, lse, q.new_zeros(0)) if return_attn_probs else out
    return (*forward(q, k, v, setting), q.new_zeros(0)) if return_attn_probs else attend(q, k, v, setting)


def flash_attn_varlen_kvpacked_func(
    q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """kv [T_k, 2, H_kv, D]; the rest as `flash_attn_varlen_func`."""
    k, v = unpacked("kv", kv, 2, packed=True)
    offsets = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    scores = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
    return flash_attn_varlen_func(q, k, v, *offsets, *scores, deterministic, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """qkv [T, 3, H, D]; the rest as `flash_attn_varlen_func`."""
    q, k, v = unpacked("qkv", qkv, 3, packed=True)
    scores = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *scores, deterministic, return_attn_probs)


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
):  # fmt: skip
    """Over the keys a cache holds, without gradients; k and v are written into it first, at cache_seqlens.

    >>> k_cache, v_cache, q = torch.zeros(1, 8, 2, 16), torch.zeros(1, 8, 2, 16), torch.randn(1, 1, 2, 16)
    >>> flash_attn_with_kvcache(q, k_cache, v_cache, q, q, cache_seqlens=0).allclose(q)
    True

    The cache is [B, S_max, H_kv, D], or pages [n_pages, page_size, H_kv, D] of any size with a block_table. cache_seqlens is what
    it holds before the call: an int, int32 [B], or None for all of it. Causal and windows count from the last key there is then.

    With rotary_cos and rotary_sin, k is turned by the angles of its positions, and q by those of cache_seqlens and on where there is
    causal or a window, else by that of cache_seqlens. cache_batch_idx picks rows of the cache, cache_leftpad hides what is before it.
    """
    refuse(alibi_slopes=alibi_slopes, num_splits=num_splits)
    cache = Cache(
        k_cache, v_cache, cache_seqlens, k, v, rotary_cos, rotary_sin, rotary_interleaved, cache_batch_idx, cache_leftpad, block_table
    )  # fmt: skip
    out, lse = forward_cached(q, cache, Setting(softmax_scale, causal, window_size, softcap))
    return (out, lse) if return_softmax_lse else out


# ---------------------------------------------------------------- the private ones: libraries with autograd of their own call them


def _flash_attn_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, return_softmax,
):  # fmt: skip
    """(out, softmax_lse, S_dmask, rng_state), without gradients.

    >>> q = torch.randn(1, 5, 2, 16)
    >>> [list(t.shape) for t in _flash_attn_forward(q, q, q, 0.0, 0.25, True, -1, -1, 0.0, None, False)]
    [[1, 5, 2, 16], [1, 2, 5], [0], [2]]
    """
    refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes, return_softmax=return_softmax)
    return _quartet(q, k, v, Setting(softmax_scale, causal, (window_size_left, window_size_right), softcap))


def _flash_attn_varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left=-1,
    window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None,
    seqused_k=None, zero_tensors=False,
):  # fmt: skip
    """`_flash_attn_forward` over packed sequences, or over pages with a block_table."""
    refuse(
        dropout_p=dropout_p, alibi_slopes=alibi_slopes, return_softmax=return_softmax, leftpad_k=leftpad_k, seqused_k=seqused_k,
        zero_tensors=zero_tensors,
    )  # fmt: skip
    packing = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    setting = Setting(softmax_scale, causal, (window_size_left, window_size_right), softcap, packing=packing)
    return _quartet(q, k, v, setting, block_table)


def _quartet(q: Tensor, k: Tensor, v: Tensor, setting: Setting, block_table: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with torch.no_grad():
        out, lse = forward(q, k, v, setting) if block_table is None else forward_paged(q, k, v, setting, block_table)
    return out, lse, q.new_zeros(0), torch.zeros(2, dtype=torch.int64, device=q.device)


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
    softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    """Writes dq, dk, dv (those that are not None) and returns softmax_d, the row sums of dout * out, [B, H, S rounded up to 128].

    out and softmax_lse may be those of more keys than k and v hold, as a ring merges them. rng_state is dropout's: without
    dropout it says nothing.
    """
    refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    setting = Setting(softmax_scale, causal, (window_size_left, window_size_right), softcap, deterministic)
    _write((dq, dk, dv), backward(dout, (out, softmax_lse), (q, k, v), setting))
    delta = _row_sums(dout, out).transpose(1, 2)
    return torch.nn.functional.pad(delta, (0, -delta.shape[-1] % _ROWS))


def _flash_attn_varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    zero_tensors=False,
):  # fmt: skip
    """`_flash_attn_backward` over packed sequences; softmax_d is [H, T + 128 n], with 128 rows of room behind each of the n."""
    refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes, zero_tensors=zero_tensors)
    packing = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    setting = Setting(softmax_scale, causal, (window_size_left, window_size_right), softcap, deterministic, packing=packing)
    _write((dq, dk, dv), backward(dout, (out, softmax_lse), (q, k, v), setting))
    rows = torch.arange(len(q), dtype=cu_seqlens_q.dtype, device=q.device)
    sequence = torch.bucketize(rows, cu_seqlens_q[1:-1], right=True)
    delta = _row_sums(dout, out)
    roomy = delta.new_zeros(len(q) + _ROWS * (len(cu_seqlens_q) - 1), delta.shape[1])
    return roomy.index_copy(0, rows + _ROWS * sequence, delta).T


def _write(targets: tuple[Tensor | None, ...], gradients: tuple[Tensor, ...]) -> None:
    for name, target, gradient in zip(("dq", "dk", "dv"), targets, gradients):
        if target is not None and target.shape != gradient.shape:
            raise InvalidProblem(name, f"shape {list(target.shape)}", str(list(gradient.shape)), "allocate it like what it is the gradient of")
    with torch.no_grad():
        for target, gradient in zip(targets, gradients):
            if target is not None:
                target.copy_(gradient)


def _row_sums(dout: Tensor, out: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.linalg.vecdot(dout.float(), out.float())


__all__ = [
    "_flash_attn_backward", "_flash_attn_forward", "_flash_attn_varlen_backward", "_flash_attn_varlen_forward",
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache",
]  # fmt: skip
