"""FlashAttention-3's module on strobe: `import strobe.flash_attn_interface as flash_attn_interface` is the whole change.

Arguments and their order are the originals' (softmax_scale is the first optional one; there is no dropout). softmax_lse is
the natural logarithm in float32, [B, H, S] or [H, T]. docs/switching.md lists what is the same and what is not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .drop_in import Setting, attend, forward, refuse, unpacked
from .errors import InvalidProblem, wrong_type
from .kvcache import Cache, forward_cached
from .mask import as_int
from .merge import Partial, merge


def flash_attn_func(
    q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    """
    >>> q, k = torch.randn(2, 5, 4, 16), torch.randn(2, 7, 2, 16)
    >>> flash_attn_func(q, k, k, causal=True).shape
    torch.Size([2, 5, 4, 16])

    With return_attn_probs: (out, softmax_lse).
    """
    refuse(
        qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk, num_splits=num_splits,
        pack_gqa=pack_gqa, sm_margin=sm_margin,
    )  # fmt: skip
    setting = Setting(softmax_scale, causal, window_size, softcap, deterministic)
    return (forward if return_attn_probs else attend)(q, k, v, setting)


def flash_attn_qkvpacked_func(
    qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    """qkv [B, S, 3, H, D], or [B, S, H_q + 2 H_kv, D] with num_heads_q; the rest as `flash_attn_func`.

    >>> flash_attn_qkvpacked_func(torch.randn(1, 5, 4 + 2 * 2, 16), num_heads_q=4).shape
    torch.Size([1, 5, 4, 16])
    """
    if not isinstance(qkv, Tensor) or qkv.dim() != 4:
        q, k, v = unpacked("qkv", qkv, 3, packed=False)
    else:
        count = -1 if num_heads_q is None else as_int(num_heads_q)
        if count is None:
            raise wrong_type("num_heads_q", num_heads_q, "an int", "say how many heads are q's")
        rest = qkv.shape[2] - count  # // and %: torch.compile traces no divmod of a symbolic size
        heads_kv = rest // 2
        if count < 0 or rest < 2 or rest % 2:
            raise InvalidProblem("num_heads_q", num_heads_q, f"H_q of the {qkv.shape[2]} = H_q + 2 H_kv heads of qkv", "say how many heads are q's")
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
    """
    refuse(
        seqused_q=seqused_q, seqused_k=seqused_k, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        attention_chunk=attention_chunk, num_splits=num_splits, pack_gqa=pack_gqa, sm_margin=sm_margin,
    )  # fmt: skip
    packing = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    setting = Setting(softmax_scale, causal, window_size, softcap, deterministic, packing=packing)
    return (forward if return_attn_probs else attend)(q, k, v, setting)


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
    q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0,
    softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
    return_softmax_lse=False,
):  # fmt: skip
    """As `strobe.flash_attn.flash_attn_with_kvcache`, with pages said by page_table; packed queries are refused.

    >>> pages, q = torch.zeros(2, 16, 2, 16), torch.randn(1, 1, 2, 16)
    >>> table, lengths = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    >>> flash_attn_with_kvcache(q, pages, pages.clone(), q, q, cache_seqlens=lengths, page_table=table, causal=True).shape
    torch.Size([1, 1, 2, 16])
    >>> torch.equal(pages[0, 4], q[0, 0])
    True
    """
    refuse(
        qv=qv, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new, max_seqlen_q=max_seqlen_q, rotary_seqlens=rotary_seqlens,
        q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk,
        scheduler_metadata=scheduler_metadata, num_splits=num_splits, pack_gqa=pack_gqa, sm_margin=sm_margin,
    )  # fmt: skip
    cache = Cache(
        k_cache, v_cache, cache_seqlens, k, v, rotary_cos, rotary_sin, rotary_interleaved, cache_batch_idx, cache_leftpad, page_table, "page_table"
    )
    out, lse = forward_cached(q, cache, Setting(softmax_scale, causal, window_size, softcap))
    return (out, lse) if return_softmax_lse else out


def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """Partial results [splits, B, S, H, D] and [splits, B, S, H] over disjoint keys in one: (out [B, S, H, D], lse [B, S, H]).

    >>> out, lse = flash_attn_combine(torch.ones(2, 1, 3, 4, 16), torch.zeros(2, 1, 3, 4))
    >>> out.shape, round(lse[0, 0, 0].item(), 4)
    (torch.Size([1, 3, 4, 16]), 0.6931)

    Packed ones, [splits, T, H, D], give [T, H, D] and [T, H]. out_dtype is out's or that of out_partial unless given.
    """
    for name, part in (("out_partial", out_partial), ("lse_partial", lse_partial)):
        if not isinstance(part, Tensor):
            raise wrong_type(name, part, "a tensor [splits, ...]", "stack the partial results")
    shape = list(out_partial.shape)
    if len(shape) < 2 or shape[0] == 0:
        raise InvalidProblem("out_partial", f"shape {shape}", "[splits, ..., H, D] of at least one split", "stack the partial results")
    if list(lse_partial.shape) != shape[:-1]:
        raise InvalidProblem(
            "lse_partial", f"shape {list(lse_partial.shape)}", f"{shape[:-1]}, as out_partial without D", "give both for the same splits"
        )
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise wrong_type("out_dtype", out_dtype, "a torch.dtype or None", "such as torch.bfloat16")
    whole = _partial(out_partial[0], lse_partial[0])
    for part_out, part_lse in zip(out_partial[1:], lse_partial[1:]):
        whole = merge(whole, _partial(part_out, part_lse))
    empty = (whole.lse == -torch.inf).transpose(-1, -2)[..., None]
    whole = whole._replace(out=whole.out.masked_fill(empty, 0.0))  # what a split without a key holds says nothing
    if out is None:
        return whole.out.to(out_dtype or out_partial.dtype), whole.lse.transpose(-1, -2)
    if out_dtype not in (None, out.dtype) or out.shape != whole.out.shape:
        got, expected = f"{out.dtype} {list(out.shape)}", f"{out_dtype or out.dtype} {list(whole.out.shape)}"
        raise InvalidProblem("out", got, expected, "allocate it like one of the parts")
    with torch.no_grad():
        out.copy_(whole.out)
    return out, whole.lse.transpose(-1, -2)


def _partial(out: Tensor, lse: Tensor) -> Partial:
    return Partial(out.float(), lse.float().transpose(-1, -2))


__all__ = [
    "flash_attn_combine", "flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_with_kvcache",
]  # fmt: skip
