"""FlashAttention-4's functions (flash_attn.cute.interface 4.0.0b36), including the private ones that other libraries
use.

Arguments and their order are those of the originals (qv is the fourth). The public attention functions return (out,
lse). lse is the natural logarithm in float32, [B, H, S] or [H, T]. None in a window means unbounded. Unsupported
arguments raise UnsupportedProblem.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..compat.seqused import Used, backward_used, forward_used, shifted
from ..compat.signatures import Setting, applied, combine, number, refuse, window_of, write
from ..errors import UnsupportedProblem, describe


def flash_attn_func(
    q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, window_size=(None, None),
    learnable_sink=None,
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

    q is [B, S_q, H_q, D], k and v are [B, S_k, H_kv, D]; out is like q. lse is always returned, whatever return_lse is,
    and is differentiable.
    """
    refuse(
        qv=qv, gather_kv_indices=gather_kv_indices, num_splits=num_splits, pack_gqa=pack_gqa, score_mod=score_mod,
        score_mod_bwd=score_mod_bwd, mask_mod=mask_mod, aux_tensors=aux_tensors, aux_scalars=aux_scalars,
        block_sparse_tensors=block_sparse_tensors, block_sparse_tensors_bwd=block_sparse_tensors_bwd,
        gather_bwd_recompute_p=gather_bwd_recompute_p, gather_bwd_token_chunk=gather_bwd_token_chunk,
    )  # fmt: skip
    return _forward(
        q, k, v, Setting(softmax_scale, causal, window_size, softcap, deterministic, learnable_sink), Used()
    )


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

    q is [T_q, H_q, D], k and v are [T_k, H_kv, D], cu_seqlens int32 [n + 1]. Without both cu_seqlens, q, k, v are [B,
    S, H, D]; only one of them raises UnsupportedProblem. seqused_q and seqused_k, int32 [n], limit each sequence to its
    first rows and keys. Other rows get out 0, and lse -inf or the head's sink.
    """
    refuse(
        qv=qv, gather_kv_indices=gather_kv_indices, page_table=page_table,
        num_splits=num_splits, pack_gqa=pack_gqa, score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors, aux_tensors=aux_tensors, aux_scalars=aux_scalars,
        scheduler_metadata=scheduler_metadata, seqlen_k_per_split=seqlen_k_per_split,
        disable_scheduler_metadata=disable_scheduler_metadata, gather_bwd_recompute_p=gather_bwd_recompute_p,
        gather_bwd_token_chunk=gather_bwd_token_chunk, min_seqlen_k=min_seqlen_k,
    )  # fmt: skip
    packing = _packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    setting = Setting(softmax_scale, causal, window_size, softcap, deterministic, learnable_sink, packing)
    return _forward(q, k, v, setting, Used(seqused_q, seqused_k))


def flash_attn_combine(
    out_partial, lse_partial, out=None, out_dtype=None, cu_seqlens=None, seqused=None, virtual_batch_idx=None,
    return_lse=True,
):  # fmt: skip
    """(out, lse) of partial results, as FlashAttention-3's `flash_attn_combine`. With return_lse=False, lse is None.

    >>> import torch
    >>> out, lse = flash_attn_combine(torch.ones(2, 7, 4, 16), torch.zeros(2, 7, 4))
    >>> out.shape, lse.shape
    (torch.Size([7, 4, 16]), torch.Size([7, 4]))

    Every row is combined. cu_seqlens, seqused and virtual_batch_idx are ignored: they only select rows and their order
    in the original.
    """
    out, lse = combine(out_partial, lse_partial, out, out_dtype)
    return out, lse if return_lse else None


def _flash_attn_fwd_combine(
    out_partial, lse_partial, out, lse=None, cu_seqlens=None, seqused=None, num_splits_dynamic_ptr=None,
    varlen_batch_idx=None, semaphore_to_reset=None, output_scale=None,
):  # fmt: skip
    """Write the combination of partial results to `out` and `lse`, as FlashAttention-4's private function.

    >>> import torch
    >>> out = torch.empty(1, 7, 4, 16)
    >>> _flash_attn_fwd_combine(torch.ones(2, 1, 7, 4, 16), torch.zeros(2, 1, 7, 4), out)
    >>> bool((out == 1).all())
    True

    num_splits_dynamic_ptr: int32 [B], the number of splits that count for each batch entry. semaphore_to_reset is set
    to 0. Every row is combined: cu_seqlens, seqused and varlen_batch_idx only select rows and their order in the
    original.
    """
    refuse(output_scale=output_scale)
    if num_splits_dynamic_ptr is not None:
        splits = torch.arange(len(out_partial), device=out_partial.device)
        unused = splits[:, None] >= num_splits_dynamic_ptr
        unused = unused[(...,) + (None,) * (lse_partial.dim() - 2)]
        lse_partial = lse_partial.masked_fill(unused, -torch.inf)
        out_partial = out_partial.masked_fill(unused[..., None], 0.0)  # memory that no split wrote may hold NaN
    whole, whole_lse = combine(out_partial, lse_partial, None, out.dtype)
    write((out, lse), (whole, whole_lse), ("out", "lse"))
    if semaphore_to_reset is not None:
        semaphore_to_reset.zero_()


class SchedulerMetadataTensorsTorch(NamedTuple):
    """The tensors that the original's schedulers read. strobe plans its launches itself, so every field is None."""

    num_m_blocks_ptr: Tensor | None = None
    num_splits_dynamic_ptr: Tensor | None = None
    virtual_batch_idx_ptr: Tensor | None = None
    num_nheads_in_l2_ptr: Tensor | None = None
    tile_count_semaphore: Tensor | None = None
    cu_total_m_blocks: Tensor | None = None
    cu_total_splits_m_blocks: Tensor | None = None
    blocks_to_batch_idx: Tensor | None = None


def get_scheduler_metadata(
    max_seqlen_q, max_seqlen_k, nheads, nheads_kv, headdim, num_splits, headdim_v=None, pack_gqa=None, causal=False,
    window_size_left=None,
    window_size_right=None, seqlen_k_new=0, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None,
    seqused_k=None,
    leftpad_k=None, seqlen_k_per_split=None, _arch=None,
):  # fmt: skip
    """A `SchedulerMetadataTensorsTorch` without tensors, for the argument scheduler_metadata, which strobe ignores.

    >>> get_scheduler_metadata(1, 64, 8, 2, 128, 1).num_splits_dynamic_ptr is None
    True
    """
    return SchedulerMetadataTensorsTorch()


# ---------------------------------------------------------------- the private functions


def _flash_attn_fwd(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None, window_size_left=None,
    window_size_right=None,
    learnable_sink=None, tile_mn=None, mma_pv_is_rs=None, intra_wg_overlap=None, num_threads=384, num_splits=1,
    pack_gqa=None, _arch=None,
    score_mod=None, mask_mod=None, block_sparse_tensors=None, return_lse=False, out=None, lse=None, aux_tensors=None,
    aux_scalars=None,
    q_descale=None, k_descale=None, v_descale=None, gather_kv_indices=None, scheduler_metadata=None,
    seqlen_k_per_split=None,
    disable_scheduler_metadata=False, gather_bwd_recompute_p=False,
):  # fmt: skip
    """(out, lse, None, None, None). Results are written to `out` and `lse` if given. The last three belong to
    gather_kv_indices.

    >>> import torch
    >>> q = torch.randn(1, 5, 2, 16)
    >>> out, lse, *rest = _flash_attn_fwd(q, q, q, causal=True)
    >>> out.shape, lse.shape, rest
    (torch.Size([1, 5, 2, 16]), torch.Size([1, 2, 5]), [None, None, None])
    """
    refuse(
        qv=qv, min_seqlen_k=min_seqlen_k, page_table=page_table, score_mod=score_mod, mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors, aux_tensors=aux_tensors, aux_scalars=aux_scalars,
        q_descale=q_descale, k_descale=k_descale,
        v_descale=v_descale, gather_kv_indices=gather_kv_indices, seqlen_k_per_split=seqlen_k_per_split,
        disable_scheduler_metadata=disable_scheduler_metadata, gather_bwd_recompute_p=gather_bwd_recompute_p,
    )  # fmt: skip
    packing = _packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    window = window_size_left, window_size_right
    found = _forward(
        q,
        k,
        v,
        Setting(softmax_scale, causal, window, softcap, False, learnable_sink, packing),
        Used(seqused_q, seqused_k),
    )
    write((out, lse), found, ("out", "lse"))
    return *(one if given is None else given for one, given in zip(found, (out, lse))), None, None, None


def _flash_attn_bwd(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
    window_size_right=None, m_block_size=64,
    n_block_size=128, num_threads=256, pack_gqa=False, num_stages_Q=2, num_stages_dO=2, SdP_swapAB=False,
    dKV_swapAB=False,
    dQ_swapAB=False, AtomLayoutMSdP=2, AtomLayoutNdKV=2, AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None,
    dv=None, score_mod=None,
    score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, dlse=None,
    learnable_sink=None,
):  # fmt: skip
    """(dq, dk, dv), and with learnable_sink also its gradient. Gradients are written to dq, dk and dv if given. dlse is
    the gradient of lse.

    Raises UnsupportedProblem for windows with one negative bound (autograd of `flash_attn_func` supports them), and for
    seqused_q and seqused_k with padded tensors.
    """
    refuse(
        score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod, aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
        block_sparse_tensors=block_sparse_tensors,
    )  # fmt: skip
    packing = _packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    window, used = shifted((window_size_left, window_size_right), bool(number("causal", causal)))
    if not used.whole:
        remedy = "call flash_attn_func, whose gradients autograd has"
        got = f"({window_size_left}, {window_size_right})"
        raise UnsupportedProblem(
            describe("window_size", got, "bounds that are None or at least 0, or both negative", remedy)
        )
    used = Used(seqused_q, seqused_k)
    if packing is None:
        refuse(sequed_q=seqused_q, sequed_k=seqused_k)
    setting = Setting(softmax_scale, causal, window, softcap, deterministic, learnable_sink, packing)
    *gradients, dsink = backward_used(dout, (out, lse), (q, k, v), setting, used, dlse)
    write((dq, dk, dv), tuple(gradients))
    found = tuple(one if given is None else given for one, given in zip(gradients, (dq, dk, dv)))
    return found if learnable_sink is None else (*found, dsink)


def _forward(q: Tensor, k: Tensor, v: Tensor, setting: Setting, used: Used) -> tuple[Tensor, Tensor]:
    window, part = shifted(window_of(setting.window), bool(number("causal", setting.causal)))
    setting = setting._replace(window=window)
    return forward_used(q, k, v, setting, part._replace(seqused_q=used.seqused_q, seqused_k=used.seqused_k))


def _packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        missing = "cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_k"
        raise UnsupportedProblem(
            describe(
                missing, None, "offsets for both q and k, or for neither", "give the offsets of the padded one too"
            )
        )
    return None if cu_seqlens_q is None else (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)


# ---------------------------------------------------------------- autograd classes: only `apply`; the functions have
# their own autograd

_SCORES = (
    "softmax_scale causal window_size learnable_sink softcap num_splits pack_gqa deterministic score_mod "
    "score_mod_bwd mask_mod"
)
_GATHER = "gather_bwd_recompute_p gather_bwd_token_chunk"


class FlashAttnFunc:
    """`apply` calls `flash_attn_func` with the original's order of positional arguments. There is no forward or
    backward with a ctx.
    """

    apply = applied(
        flash_attn_func,
        (
            f"q k v qv gather_kv_indices {_SCORES} aux_tensors aux_scalars block_sparse_tensors "
            f"block_sparse_tensors_bwd return_lse {_GATHER}"
        ),
    )


class FlashAttnVarlenFunc:
    """`apply` of `flash_attn_varlen_func`; see `FlashAttnFunc`. The order of the length arguments differs from the
    function's.
    """

    apply = applied(
        flash_attn_varlen_func,
        "q k v qv cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q max_seqlen_k min_seqlen_k "
        "gather_kv_indices page_table "
        f"{_SCORES} block_sparse_tensors aux_tensors aux_scalars return_lse scheduler_metadata seqlen_k_per_split "
        "disable_scheduler_metadata "
        f"{_GATHER}",
    )


__all__ = [
    "FlashAttnFunc", "FlashAttnVarlenFunc", "SchedulerMetadataTensorsTorch", "_flash_attn_bwd", "_flash_attn_fwd",
    "_flash_attn_fwd_combine",
    "flash_attn_combine",
    "flash_attn_func", "flash_attn_varlen_func", "get_scheduler_metadata",
]  # fmt: skip
