"""FlashAttention-4's functions on strobe: `import strobe.cute` for `import flash_attn.cute` is the whole change.

Arguments and their order are the originals' (4.0.0b36: qv is the fourth). Both return (out, lse), lse the natural logarithm
in float32, [B, H, S] or [H, T]; a window's None is unbounded. docs/switching.md lists what is the same and what is not.
"""

from __future__ import annotations

from .api import Window
from .drop_in import Setting, forward, refuse, window_of
from .errors import UnsupportedProblem, describe


def flash_attn_func(
    q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None,
    softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None,
    aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, block_sparse_tensors_bwd=None, return_lse=False,
    gather_bwd_recompute_p=False, gather_bwd_token_chunk=None,
):  # fmt: skip
    """
    >>> import torch
    >>> q, k = torch.randn(2, 5, 4, 16), torch.randn(2, 7, 2, 16)
    >>> out, lse = flash_attn_func(q, k, k, causal=True)
    >>> out.shape, lse.shape
    (torch.Size([2, 5, 4, 16]), torch.Size([2, 4, 5]))

    lse is there whatever return_lse says, and has a gradient.
    """
    refuse(
        qv=qv, gather_kv_indices=gather_kv_indices, num_splits=num_splits, pack_gqa=pack_gqa, score_mod=score_mod,
        score_mod_bwd=score_mod_bwd, mask_mod=mask_mod, aux_tensors=aux_tensors, aux_scalars=aux_scalars,
        block_sparse_tensors=block_sparse_tensors, block_sparse_tensors_bwd=block_sparse_tensors_bwd,
        gather_bwd_recompute_p=gather_bwd_recompute_p, gather_bwd_token_chunk=gather_bwd_token_chunk,
    )  # fmt: skip
    return forward(q, k, v, Setting(softmax_scale, causal, _window(window_of(window_size), causal), softcap, deterministic, learnable_sink))


def flash_attn_varlen_func(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None,
    seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False,
    window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
    score_mod=None, score_mod_bwd=None, mask_mod=None, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None,
    return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False,
    gather_bwd_recompute_p=False, gather_bwd_token_chunk=None,
):  # fmt: skip
    """
    >>> import torch
    >>> q, offsets = torch.randn(12, 4, 16), torch.tensor([0, 5, 12], dtype=torch.int32)
    >>> out, lse = flash_attn_varlen_func(q, q, q, cu_seqlens_q=offsets, cu_seqlens_k=offsets, causal=True)
    >>> out.shape, lse.shape
    (torch.Size([12, 4, 16]), torch.Size([4, 12]))

    With neither cu_seqlens: q, k, v are [B, S, H, D], as for `flash_attn_func`; one without the other is refused.
    """
    refuse(
        qv=qv, seqused_q=seqused_q, seqused_k=seqused_k, gather_kv_indices=gather_kv_indices, page_table=page_table,
        num_splits=num_splits, pack_gqa=pack_gqa, score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors, aux_tensors=aux_tensors, aux_scalars=aux_scalars,
        scheduler_metadata=scheduler_metadata, seqlen_k_per_split=seqlen_k_per_split,
        disable_scheduler_metadata=disable_scheduler_metadata, gather_bwd_recompute_p=gather_bwd_recompute_p,
        gather_bwd_token_chunk=gather_bwd_token_chunk, min_seqlen_k=min_seqlen_k,
    )  # fmt: skip
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        missing = "cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_k"
        raise UnsupportedProblem(describe(missing, None, "offsets for both q and k, or for neither", "give the offsets of the padded one too"))
    packing = None if cu_seqlens_q is None else (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return forward(q, k, v, Setting(softmax_scale, causal, _window(window_of(window_size), causal), softcap, deterministic, learnable_sink, packing))


def _window(window: Window, causal: bool) -> Window:
    """Two negative bounds are none; a single one, beside which nothing else hides it, moves the original's window past the diagonal."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        return window  # for the door to say what is wrong with it
    left, right = (bound if bound is not None and bound < 0 else None for bound in window)
    if (left is None) == (right is None) or (causal and left is None):
        return window
    remedy = "strobe's windows contain the diagonal; give None for no bound, or the rest as a slice of the keys"
    raise UnsupportedProblem(describe("window_size", window, "bounds that are None or at least 0, or both negative", remedy))


__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
