"""FlashAttention-3's module on strobe. To switch, use `import strobe.flash_attn_interface as flash_attn_interface`.

Arguments and their order are those of the originals: softmax_scale is the first optional one, and there is no dropout.
softmax_lse is the natural logarithm in float32, [B, H, S] or [H, T]. Unsupported arguments raise UnsupportedProblem.
docs/switching.md lists the differences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .compat.descales import Descales, dequantized
from .compat.kvcache import Cache, forward_cached, forward_packed
from .compat.seqused import Used, backward_used, forward_used
from .compat.signatures import Setting, applied, attend, combine, forward, refuse, softmax_d, unpacked, write
from .errors import InvalidProblem, wrong_type
from .problem.mask import as_int


def flash_attn_func(
    q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
    return_attn_probs=False,
):  # fmt: skip
    """
    >>> q, k = torch.randn(2, 5, 4, 16), torch.randn(2, 7, 2, 16)
    >>> flash_attn_func(q, k, k, causal=True).shape
    torch.Size([2, 5, 4, 16])

    q is [B, S_q, H_q, D], k and v are [B, S_k, H_kv, D]; out is like q. With return_attn_probs: (out, softmax_lse).
    """
    refuse(qv=qv, attention_chunk=attention_chunk, num_splits=num_splits, pack_gqa=pack_gqa, sm_margin=sm_margin)
    q, k, v = dequantized((q, k, v), Descales(q_descale, k_descale, v_descale))
    setting = Setting(softmax_scale, causal, window_size, softcap, deterministic)
    return (forward if return_attn_probs else attend)(q, k, v, setting)


def flash_attn_qkvpacked_func(
    qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    """As `flash_attn_func`, with q, k and v in qkv [B, S, 3, H, D], or [B, S, H_q + 2 H_kv, D] with num_heads_q.

    >>> flash_attn_qkvpacked_func(torch.randn(1, 5, 4 + 2 * 2, 16), num_heads_q=4).shape
    torch.Size([1, 5, 4, 16])
    """
    if not isinstance(qkv, Tensor) or qkv.dim() != 4:
        q, k, v = unpacked("qkv", qkv, 3, packed=False)
    else:
        count = -1 if num_heads_q is None else as_int(num_heads_q)
        if count is None:
            raise wrong_type("num_heads_q", num_heads_q, "an int", "say how many heads are q's")
        rest = qkv.shape[2] - count  # // and %, because torch.compile cannot trace divmod of a symbolic size
        heads_kv = rest // 2
        if count < 0 or rest < 2 or rest % 2:
            raise InvalidProblem(
                "num_heads_q",
                num_heads_q,
                f"H_q of the {qkv.shape[2]} = H_q + 2 H_kv heads of qkv",
                "say how many heads are q's",
            )
        q, k, v = qkv.split([num_heads_q, heads_kv, heads_kv], -2)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap,
        deterministic=deterministic, sm_margin=sm_margin, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, softmax_scale=None,
    causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0,
    softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    """
    >>> q, offsets = torch.randn(12, 4, 16), torch.tensor([0, 5, 12], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, q, q, offsets, offsets, 7, 7, causal=True).shape
    torch.Size([12, 4, 16])

    q is [T_q, H_q, D], k and v are [T_k, H_kv, D], cu_seqlens int32 [n + 1]. seqused_q and seqused_k, int32 [n], limit
    each sequence to its first rows and keys. Other rows get out 0 and lse -inf.
    """
    refuse(qv=qv, attention_chunk=attention_chunk, num_splits=num_splits, pack_gqa=pack_gqa, sm_margin=sm_margin)
    offsets = cu_seqlens_q, cu_seqlens_k
    q, k, v = dequantized((q, k, v), Descales(q_descale, k_descale, v_descale), offsets)
    packing = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    setting, used = (
        Setting(softmax_scale, causal, window_size, softcap, deterministic, packing=packing),
        Used(seqused_q, seqused_k),
    )
    if used.whole:
        return (forward if return_attn_probs else attend)(q, k, v, setting)
    found = forward_used(q, k, v, setting, used)
    return found if return_attn_probs else found[0]


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
    return_softmax_lse=False,
):  # fmt: skip
    """As `strobe.flash_attn.flash_attn_with_kvcache`, with page_table in place of block_table.

    With cu_seqlens_q, int32 [B + 1], q is packed, [T, H_q, D], and k and v are [T_new, H_kv, D] with cu_seqlens_k_new;
    the result is [T, H_q, D]. A sequence with more queries than max_seqlen_q is NaN.

    rotary_seqlens, int32 [B], is the rotary position of the first new key; None means cache_seqlens.

    A cache in float8_e4m3fn is read in 8 bits. q_descale, k_descale and v_descale are float32 [B, H_kv]; q in 8 bits
    is converted to bfloat16, and so is out.

    >>> pages, q = torch.zeros(2, 16, 2, 16), torch.randn(1, 1, 2, 16)
    >>> table, lengths = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    >>> cache = dict(cache_seqlens=lengths, page_table=table)
    >>> flash_attn_with_kvcache(q, pages, pages.clone(), q, q, **cache, causal=True).shape
    torch.Size([1, 1, 2, 16])
    >>> torch.equal(pages[0, 4], q[0, 0])
    True
    """
    refuse(
        qv=qv, attention_chunk=attention_chunk, scheduler_metadata=scheduler_metadata, num_splits=num_splits,
        pack_gqa=pack_gqa, sm_margin=sm_margin,
    )  # fmt: skip
    cache = Cache(
        k_cache, v_cache, cache_seqlens, k, v, rotary_cos, rotary_sin, rotary_interleaved, cache_batch_idx,
        cache_leftpad, page_table, "page_table", rotary_seqlens, Descales(q_descale, k_descale, v_descale),
    )  # fmt: skip
    setting = Setting(softmax_scale, causal, window_size, softcap)
    if cu_seqlens_q is not None:
        out, lse = forward_packed(q, cache, setting, cu_seqlens_q, cu_seqlens_k_new, max_seqlen_q)
    else:
        refuse(cu_seqlens_k_new=cu_seqlens_k_new)
        out, lse = forward_cached(q, cache, setting)
    return (out, lse) if return_softmax_lse else out


def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """Merge partial results over disjoint keys, [splits, B, S, H, D] and [splits, B, S, H], into (out [B, S, H, D], lse
    [B, S, H]).

    >>> out, lse = flash_attn_combine(torch.ones(2, 1, 3, 4, 16), torch.zeros(2, 1, 3, 4))
    >>> out.shape, round(lse[0, 0, 0].item(), 4)
    (torch.Size([1, 3, 4, 16]), 0.6931)

    Packed results, [splits, T, H, D] and [splits, T, H], give [T, H, D] and [T, H]. out_dtype defaults to out's dtype,
    else to out_partial's.
    """
    return combine(out_partial, lse_partial, out, out_dtype)


def get_scheduler_metadata(
    batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, qkv_dtype=torch.bfloat16,
    headdim_v=None,
    cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False,
    window_size=(-1, -1),
    attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    """An int32 tensor [1] with 0, on cache_seqlens' device. strobe plans its launches itself and ignores
    scheduler_metadata.

    >>> get_scheduler_metadata(2, 1, 64, 8, 2, 128, torch.tensor([3, 9], dtype=torch.int32)).tolist()
    [0]
    """
    if not isinstance(cache_seqlens, Tensor):
        raise wrong_type(
            "cache_seqlens", cache_seqlens, "an int32 tensor [B]", "give the lengths of the call that it is for"
        )
    return cache_seqlens.new_zeros(1, dtype=torch.int32)


# ---------------------------------------------------------------- the private functions


def _flash_attn_forward(
    q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None,
    seqused_q=None,
    seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None, leftpad_k=None,
    rotary_cos=None,
    rotary_sin=None, seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
    causal=False,
    window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=1, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    """(out, softmax_lse, out_accum, softmax_lse_accum). The last two are empty: strobe does not return results of
    splits.

    >>> q = torch.randn(1, 5, 2, 16)
    >>> [list(t.shape) for t in _flash_attn_forward(q, q, q, causal=True)]
    [[1, 5, 2, 16], [1, 2, 5], [0], [0]]

    Without cu_seqlens_k, runs as `flash_attn_with_kvcache` if there are new keys, pages, kv_batch_idx, leftpad_k,
    rotary embeddings, or seqused_k without seqused_q.
    """
    refuse(
        qv=qv, attention_chunk=attention_chunk, num_splits=num_splits, scheduler_metadata=scheduler_metadata,
        pack_gqa=pack_gqa, sm_margin=sm_margin,
    )  # fmt: skip
    descales = Descales(q_descale, k_descale, v_descale)
    setting = Setting(softmax_scale, causal, (window_size_left, window_size_right), softcap)
    cached = any(one is not None for one in (k_new, v_new, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin))
    if cu_seqlens_k is None and (cached or (seqused_k is not None and seqused_q is None)):
        refuse(seqused_q=seqused_q)
        cache = Cache(
            k, v, seqused_k, k_new, v_new, rotary_cos, rotary_sin, rotary_interleaved, kv_batch_idx, leftpad_k,
            page_table, "page_table", seqlens_rotary, descales,
        )  # fmt: skip
        if cu_seqlens_q is None:
            refuse(cu_seqlens_k_new=cu_seqlens_k_new)
            found = forward_cached(q, cache, setting)
        else:
            found = forward_packed(q, cache, setting, cu_seqlens_q, cu_seqlens_k_new, max_seqlen_q)
    else:
        refuse(
            page_table=page_table, kv_batch_idx=kv_batch_idx, leftpad_k=leftpad_k, k_new=k_new, v_new=v_new,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin, cu_seqlens_k_new=cu_seqlens_k_new, seqlens_rotary=seqlens_rotary,
        )  # fmt: skip
        q, k, v = dequantized((q, k, v), descales, (cu_seqlens_q, cu_seqlens_k))
        if cu_seqlens_q is not None or cu_seqlens_k is not None:
            setting = setting._replace(packing=(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k))
        found = forward_used(q, k, v, setting, Used(seqused_q, seqused_k))
    if out_ is not None:
        write((out_,), found[:1], ("out_",))
        found = out_, found[1]
    return *found, q.new_zeros(0), q.new_zeros(0)


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False, window_size_left=-1,
    window_size_right=-1,
    softcap=0.0, deterministic=False, sm_margin=0,
):  # fmt: skip
    """Write dq, dk, dv (those that are not None). Return softmax_d, as FlashAttention-2's `_flash_attn_backward` and
    its varlen form do.
    """
    refuse(sm_margin=sm_margin)
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    setting = Setting(softmax_scale, is_causal, (window_size_left, window_size_right), softcap, deterministic)
    if packed:
        setting = setting._replace(packing=(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k))
    else:
        refuse(sequed_q=sequed_q, sequed_k=sequed_k)
    write((dq, dk, dv), backward_used(dout, (out, softmax_lse), (q, k, v), setting, Used(sequed_q, sequed_k))[:3])
    return softmax_d(dout, out, cu_seqlens_q)


# ---------------------------------------------------------------- autograd classes: only `apply`; the functions have
# their own autograd

_SCORES = "q_descale k_descale v_descale window_size attention_chunk softcap"
_SCHEDULE = "num_splits pack_gqa deterministic sm_margin return_attn_probs"


class FlashAttnFunc:
    """`apply` calls `flash_attn_func` with the original's order of positional arguments. There is no forward or
    backward with a ctx.

    >>> q = torch.randn(1, 5, 2, 16)
    >>> FlashAttnFunc.apply(q, q, q, None, True).shape
    torch.Size([1, 5, 2, 16])
    """

    apply = applied(flash_attn_func, f"q k v softmax_scale causal qv {_SCORES} {_SCHEDULE}")


class FlashAttnQKVPackedFunc:
    """`apply` of `flash_attn_qkvpacked_func`; see `FlashAttnFunc`."""

    apply = applied(
        flash_attn_qkvpacked_func,
        f"qkv softmax_scale causal {_SCORES} deterministic num_heads_q sm_margin return_attn_probs",
    )


class FlashAttnVarlenFunc:
    """`apply` of `flash_attn_varlen_func`; see `FlashAttnFunc`. The order of the length arguments differs from the
    function's.
    """

    apply = applied(
        flash_attn_varlen_func,
        (
            "q k v cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q max_seqlen_k softmax_scale causal qv "
            f"{_SCORES} {_SCHEDULE}"
        ),
    )


__all__ = [
    "FlashAttnFunc", "FlashAttnQKVPackedFunc", "FlashAttnVarlenFunc", "_flash_attn_backward", "_flash_attn_forward",
    "flash_attn_combine",
    "flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]  # fmt: skip
