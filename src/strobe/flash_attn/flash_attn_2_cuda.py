"""The five functions of FlashAttention-2's compiled module `flash_attn_2_cuda` (`flash_attn_interface.flash_attn_gpu`).

The order of arguments is that of flash_attn 2.8. Each function returns a list. `generator` belongs to dropout, which
strobe does not support.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..compat.block_table import forward_paged
from ..compat.kvcache import Cache, forward_cached
from ..compat.seqused import ALL, Used, backward_used, forward_used
from ..compat.signatures import Setting, forward, refuse, softmax_d, write


def fwd(
    q, k, v, out, alibi_slopes, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
    return_softmax, generator,
):  # fmt: skip
    """[out, softmax_lse, S_dmask, rng_state], without gradients. If `out` is given, the result is written to it.

    >>> q = torch.randn(1, 5, 2, 16)
    >>> [list(t.shape) for t in fwd(q, q, q, None, None, 0.0, 0.25, True, -1, -1, 0.0, False, None)]
    [[1, 5, 2, 16], [1, 2, 5], [0], [2]]
    """
    refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes, return_softmax=return_softmax)
    with torch.no_grad():
        found = forward(q, k, v, Setting(softmax_scale, causal, (window_size_left, window_size_right), softcap))
    return _four(q, *found, out)


def varlen_fwd(
    q, k, v, out, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, alibi_slopes, max_seqlen_q,
    max_seqlen_k, dropout_p,
    softmax_scale, zero_tensors, causal, window_size_left, window_size_right, softcap, return_softmax, generator,
    num_splits=0,
):  # fmt: skip
    """`fwd` over packed sequences, or over pages with a block_table. seqused_k, int32 [n], limits each sequence to its
    first keys.
    """
    refuse(
        dropout_p=dropout_p, alibi_slopes=alibi_slopes, return_softmax=return_softmax, leftpad_k=leftpad_k,
        zero_tensors=zero_tensors,
        num_splits=num_splits,
    )  # fmt: skip
    if block_table is not None and isinstance(seqused_k, Tensor):  # seqused_k takes precedence over cu_seqlens_k
        cu_seqlens_k = torch.nn.functional.pad(seqused_k.cumsum(0, dtype=torch.int32), (1, 0))
    packing = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    setting = Setting(softmax_scale, causal, (window_size_left, window_size_right), softcap, packing=packing)
    with torch.no_grad():
        paged = block_table is not None
        found = (
            forward_paged(q, k, v, setting, block_table)
            if paged
            else forward_used(q, k, v, setting, Used(seqused_k=seqused_k))
        )
    return _four(q, *found, out)


def bwd(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, alibi_slopes, dropout_p, softmax_scale, causal, window_size_left,
    window_size_right, softcap,
    deterministic, generator, rng_state,
):  # fmt: skip
    """[dq, dk, dv, softmax_d]. Gradients are written to the given dq, dk and dv; None allocates a tensor."""
    refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    setting = Setting(softmax_scale, causal, (window_size_left, window_size_right), softcap, deterministic)
    found = backward_used(dout, (out, softmax_lse), (q, k, v), setting, ALL)[:3]
    return [*_written((dq, dk, dv), found), softmax_d(dout, out)]


def varlen_bwd(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, alibi_slopes, max_seqlen_q, max_seqlen_k,
    dropout_p, softmax_scale,
    zero_tensors, causal, window_size_left, window_size_right, softcap, deterministic, generator, rng_state,
):  # fmt: skip
    """`bwd` over packed sequences. softmax_d is [H, T + 128 n], with 128 spare rows after each of the n sequences."""
    refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes, zero_tensors=zero_tensors)
    packing = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    setting = Setting(
        softmax_scale, causal, (window_size_left, window_size_right), softcap, deterministic, packing=packing
    )
    found = backward_used(dout, (out, softmax_lse), (q, k, v), setting, ALL)[:3]
    return [*_written((dq, dk, dv), found), softmax_d(dout, out, cu_seqlens_q)]


def fwd_kvcache(
    q, k_cache, v_cache, k, v, cache_seqlens, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, block_table,
    alibi_slopes, out,
    softmax_scale, causal, window_size_left, window_size_right, softcap, rotary_interleaved, num_splits,
):  # fmt: skip
    """[out, softmax_lse] of `flash_attn_with_kvcache`.

    >>> k_cache, v_cache, q = torch.zeros(1, 8, 2, 16), torch.zeros(1, 8, 2, 16), torch.randn(1, 1, 2, 16)
    >>> none, lengths = (None,) * 7, torch.zeros(1, dtype=torch.int32)
    >>> out, _ = fwd_kvcache(q, k_cache, v_cache, q, q, lengths, *none, 0.25, True, -1, -1, 0.0, True, 0)
    >>> out.allclose(q)
    True
    """
    refuse(alibi_slopes=alibi_slopes, num_splits=num_splits)
    cache = Cache(
        k_cache, v_cache, cache_seqlens, k, v, rotary_cos, rotary_sin, rotary_interleaved, cache_batch_idx,
        cache_leftpad, block_table
    )  # fmt: skip
    found, lse = forward_cached(
        q, cache, Setting(softmax_scale, causal, (window_size_left, window_size_right), softcap)
    )
    return [_written((out,), (found,), ("out",))[0], lse]


def _four(q: Tensor, found: Tensor, lse: Tensor, out: Tensor | None) -> list[Tensor]:
    """The four results of a forward. Without dropout, S_dmask is empty and rng_state is 0."""
    (found,) = _written((out,), (found,), ("out",))
    return [found, lse, q.new_zeros(0), torch.zeros(2, dtype=torch.int64, device=q.device)]


def _written(
    targets: tuple[Tensor | None, ...], found: tuple[Tensor, ...], names: tuple[str, ...] = ("dq", "dk", "dv")
) -> list[Tensor]:
    """The targets with the results written to them. A target of None is replaced by the result."""
    write(targets, found, names)
    return [one if target is None else target for target, one in zip(targets, found)]


__all__ = ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]
