"""The stand-ins for FlashAttention-2, 3 and 4: their signatures to the letter, their results, their returns, and what
is refused.
"""

from __future__ import annotations

import importlib
import inspect
import re

import pytest
import torch

import strobe
import strobe.cute as fa4
import strobe.flash_attn as fa2
import strobe.flash_attn_interface as fa3
from strobe.compat.signatures import HINTS, UNSERVED
from strobe.flash_attn import bert_padding
from strobe.flash_attn import flash_attn_interface as fa2_private

# As the originals are written: flash_attn 2.8, FlashAttention-3's flash_attn_interface, flash_attn.cute 4.0.0b36.
_FA2 = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False"
)
_OFFSETS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
_FP8 = "q_descale=None, k_descale=None, v_descale=None"
_FA3 = (
    "window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, "
    "sm_margin=0"
)
_FA4 = "window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False"
_MODS = "score_mod=None, score_mod_bwd=None, mask_mod=None"
_GATHER = "gather_bwd_recompute_p=False, gather_bwd_token_chunk=None"
_WINDOWS = "window_size_left, window_size_right, softcap, alibi_slopes"
SIGNATURES = {
    "flash_attn.flash_attn_func": f"q, k, v, {_FA2}, return_attn_probs=False",
    "flash_attn.flash_attn_kvpacked_func": f"q, kv, {_FA2}, return_attn_probs=False",
    "flash_attn.flash_attn_qkvpacked_func": f"qkv, {_FA2}, return_attn_probs=False",
    "flash_attn.flash_attn_varlen_func": f"q, k, v, {_OFFSETS}, {_FA2}, return_attn_probs=False, block_table=None",
    "flash_attn.flash_attn_varlen_kvpacked_func": f"q, kv, {_OFFSETS}, {_FA2}, return_attn_probs=False",
    "flash_attn.flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {_FA2}, return_attn_probs=False",
    "flash_attn.flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, "
    "cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), softcap=0.0, "
    "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False",
    "flash_attn.flash_attn_interface._flash_attn_forward": (
        f"q, k, v, dropout_p, softmax_scale, causal, {_WINDOWS}, return_softmax"
    ),
    "flash_attn.flash_attn_interface._flash_attn_varlen_forward": f"q, k, v, {_OFFSETS}, dropout_p, softmax_scale, "
    "causal, window_size_left=-1, "
    "window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, "
    "seqused_k=None, "
    "zero_tensors=False, num_splits=0",
    "flash_attn.flash_attn_interface._flash_attn_backward": "dout, q, k, v, out, softmax_lse, dq, dk, dv, "
    "dropout_p, softmax_scale, causal, "
    f"{_WINDOWS}, deterministic, rng_state=None",
    "flash_attn.flash_attn_interface._flash_attn_varlen_backward": "dout, q, k, v, out, softmax_lse, dq, dk, dv, "
    f"{_OFFSETS}, dropout_p, "
    f"softmax_scale, causal, {_WINDOWS}, deterministic, rng_state=None, zero_tensors=False",
    "flash_attn.bert_padding.index_first_axis": "input, indices",
    "flash_attn.bert_padding.index_first_axis_residual": "input, indices",
    "flash_attn.bert_padding.index_put_first_axis": "values, indices, first_axis_dim",
    "flash_attn.bert_padding.pad_input": "hidden_states, indices, batch, seqlen",
    "flash_attn.bert_padding.unpad_input": "hidden_states, attention_mask, unused_mask=None",
    "flash_attn.bert_padding.unpad_input_for_concatenated_sequences": "hidden_states, attention_mask_in_length",
    "flash_attn_interface.flash_attn_func": (
        f"q, k, v, softmax_scale=None, causal=False, qv=None, {_FP8}, {_FA3}, return_attn_probs=False"
    ),
    "flash_attn_interface.flash_attn_varlen_func": f"q, k, v, {_OFFSETS}, seqused_q=None, seqused_k=None, "
    "softmax_scale=None, causal=False, "
    f"qv=None, {_FP8}, {_FA3}, return_attn_probs=False",
    "flash_attn_interface.flash_attn_qkvpacked_func": f"qkv, softmax_scale=None, causal=False, {_FP8}, "
    "window_size=(-1, -1), attention_chunk=0, "
    "softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False",
    "flash_attn_interface.flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, qv=None, "
    "rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, "
    "cu_seqlens_k_new=None, "
    f"max_seqlen_q=None, rotary_seqlens=None, {_FP8}, softmax_scale=None, causal=False, window_size=(-1, -1), "
    "attention_chunk=0, softcap=0.0, "
    "rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, "
    "return_softmax_lse=False",
    "flash_attn_interface.flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
    "flash_attn.layers.rotary.apply_rotary_emb": (
        "x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None"
    ),
    "flash_attn.layers.rotary.apply_rotary_emb_func": "x, cos, sin, interleaved=False, inplace=False, "
    "seqlen_offsets=0, cu_seqlens=None, "
    "max_seqlen=None",
    "flash_attn.layers.rotary.apply_rotary_emb_torch": "x, cos, sin, interleaved=False",
    "flash_attn.layers.rotary.rotate_half": "x, interleaved=False",
    "flash_attn_interface._flash_attn_forward": "q, k, v, k_new=None, v_new=None, qv=None, out_=None, "
    "cu_seqlens_q=None, cu_seqlens_k=None, "
    "cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, "
    "kv_batch_idx=None, "
    f"leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, {_FP8}, softmax_scale=None, "
    "causal=False, window_size_left=-1, "
    "window_size_right=-1, attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, "
    "num_splits=1, pack_gqa=None, "
    "sm_margin=0",
    "flash_attn_interface._flash_attn_backward": "dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, "
    "cu_seqlens_k=None, sequed_q=None, "
    "sequed_k=None, max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, "
    "is_causal=False, window_size_left=-1, "
    "window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0",
    "flash_attn_interface.get_scheduler_metadata": "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, "
    "num_heads_kv, headdim, cache_seqlens, "
    "qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, "
    "page_size=None, max_seqlen_k_new=0, "
    "causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, "
    "sm_margin=0",
    "cute.flash_attn_func": f"q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, {_FA4}, "
    f"{_MODS}, aux_tensors=None, "
    f"aux_scalars=None, block_sparse_tensors=None, block_sparse_tensors_bwd=None, return_lse=False, {_GATHER}",
    "cute.flash_attn_varlen_func": "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, "
    "max_seqlen_k=None, "
    "min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, "
    "softmax_scale=None, causal=False, "
    f"{_FA4}, {_MODS}, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False, "
    "scheduler_metadata=None, "
    f"seqlen_k_per_split=None, disable_scheduler_metadata=False, {_GATHER}",
    "cute.interface.flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None, cu_seqlens=None, "
    "seqused=None, "
    "virtual_batch_idx=None, return_lse=True",
    "cute.interface.get_scheduler_metadata": "max_seqlen_q, max_seqlen_k, nheads, nheads_kv, headdim, num_splits, "
    "headdim_v=None, pack_gqa=None, "
    "causal=False, window_size_left=None, window_size_right=None, seqlen_k_new=0, cu_seqlens_q=None, "
    "cu_seqlens_k=None, cu_seqlens_k_new=None, "
    "seqused_q=None, seqused_k=None, leftpad_k=None, seqlen_k_per_split=None, _arch=None",
    "cute.interface._flash_attn_fwd": "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, "
    "seqused_k=None, max_seqlen_q=None, "
    "max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None, "
    "window_size_left=None, "
    "window_size_right=None, learnable_sink=None, tile_mn=None, mma_pv_is_rs=None, intra_wg_overlap=None, "
    "num_threads=384, num_splits=1, "
    "pack_gqa=None, _arch=None, score_mod=None, mask_mod=None, block_sparse_tensors=None, return_lse=False, "
    "out=None, lse=None, "
    f"aux_tensors=None, aux_scalars=None, {_FP8}, gather_kv_indices=None, scheduler_metadata=None, "
    "seqlen_k_per_split=None, "
    "disable_scheduler_metadata=False, gather_bwd_recompute_p=False",
    "cute.interface._flash_attn_bwd": "q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, "
    "window_size_left=None, "
    "window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False, num_stages_Q=2, "
    "num_stages_dO=2, "
    "SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2, AtomLayoutNdKV=2, AtomLayoutMdQ=2, "
    "V_in_regs=False, "
    "cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, "
    "deterministic=False, dq=None, "
    f"dk=None, dv=None, {_MODS}, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, dlse=None, "
    "learnable_sink=None",
}
SIGNATURES["cute.interface.flash_attn_func"] = SIGNATURES["cute.flash_attn_func"]
SIGNATURES["cute.interface.flash_attn_varlen_func"] = SIGNATURES["cute.flash_attn_varlen_func"]
DTYPES = [torch.float32, torch.bfloat16]


def _function(name: str):
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(f"strobe.{module}"), function)


def _random(*shape, dtype=torch.float32, device="cpu", grad=False):
    seed = sum(size * 31**place for place, size in enumerate(shape))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype).requires_grad_(grad)


def _offsets(*values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def _eager(q, k, v, *, causal=False, window=(None, None), softcap=0.0, scale=None, sink=None):
    """out [B, S, H, D] and lse [B, H, S] in float64, written down with no thought of memory."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], 2) for t in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    beyond = (
        torch.arange(k.shape[1], device=q.device)
        - torch.arange(q.shape[1], device=q.device)[:, None]
        - (k.shape[1] - q.shape[1])
    )
    left, right = (bound if bound is not None and bound >= 0 else 10**6 for bound in window)
    hidden = (beyond < -left) | (beyond > (0 if causal else right))
    s = s.masked_fill(hidden, -torch.inf)
    whole = s if sink is None else torch.cat([s, sink.double()[None, :, None, None].expand(*s.shape[:3], 1)], -1)
    lse = whole.logsumexp(-1)
    return torch.einsum("bhij,bjhd->bihd", (s - lse[..., None]).exp().masked_fill(hidden, 0.0), v), lse


def _close(found, wanted, dtype):
    tolerance = 2e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found.double(), wanted.double(), atol=tolerance, rtol=tolerance)


# ---------------------------------------------------------------- signatures


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_signature_is_the_originals(name):
    parameters = inspect.signature(_function(name)).parameters.values()
    assert ", ".join(str(one.replace(annotation=one.empty)) for one in parameters) == SIGNATURES[name]
    assert {one.kind for one in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


MODULES = [
    "flash_attn",
    "flash_attn.flash_attn_interface",
    "flash_attn.bert_padding",
    "flash_attn.layers.rotary",
    "flash_attn_interface",
    "cute",
]


@pytest.mark.parametrize("module", [*MODULES, "cute.interface"])
def test_no_public_function_is_missing_from_the_table(module):
    namespace = importlib.import_module(f"strobe.{module}")
    public = [name for name in namespace.__all__ if inspect.isfunction(getattr(namespace, name))]
    listed = [name.rpartition(".")[2] for name in SIGNATURES if name.rpartition(".")[0] == module]
    assert sorted(public) == sorted(listed) or (module.endswith("flash_attn_interface") and set(listed) <= set(public))


# ---------------------------------------------------------------- results

CALLS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1)},
    "left": {"causal": True, "window_size": (3, 0)},
    "right": {"window_size": (-1, 2)},
    "softcap": {"softcap": 1.5},
    "scale": {"softmax_scale": 0.3},
}
PLAIN = {"fa2": lambda q, k, v, **o: fa2.flash_attn_func(q, k, v, **o, return_attn_probs=True)[:2]}
PLAIN["fa3"] = lambda q, k, v, **o: fa3.flash_attn_func(q, k, v, **o, return_attn_probs=True)
PLAIN["fa4"] = lambda q, k, v, **o: fa4.flash_attn_func(q, k, v, **o)


def _wanted(options):
    return {
        {"window_size": "window", "softmax_scale": "scale"}.get(name, name): value for name, value in options.items()
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("library", PLAIN)
def test_dense(library, options, dtype, device):
    if library == "fa4" and options.get("window_size") == (-1, 2):
        options = {"window_size": (None, 2)}
    q, k, v = (
        _random(2, *sizes, dtype=dtype, device=device, grad=True) for sizes in ((5, 4, 16), (7, 2, 16), (7, 2, 16))
    )
    out, lse = PLAIN[library](q, k, v, **options)
    wanted, wanted_lse = _eager(q, k, v, **_wanted(options))
    assert out.dtype == dtype and lse.dtype == torch.float32 and lse.shape == (2, 4, 5)
    _close(out, wanted, dtype)
    _close(lse, wanted_lse, dtype)
    dout = _random(*out.shape, dtype=dtype, device=device)
    for found, gradient in zip(
        torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(wanted, (q, k, v), dout.double())
    ):
        _close(found, gradient, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_packed_sequences_give_what_each_gives_alone(options, dtype, device):
    q, k, v = (_random(12, heads, 16, dtype=dtype, device=device) for heads in (4, 2, 2))
    q_offsets, k_offsets = _offsets(0, 5, 12, device=device), _offsets(0, 7, 12, device=device)
    found = {
        "fa2": fa2.flash_attn_varlen_func(q, k, v, q_offsets, k_offsets, 7, 7, **options, return_attn_probs=True)[:2]
    }
    found["fa3"] = fa3.flash_attn_varlen_func(q, k, v, q_offsets, k_offsets, 7, 7, **options, return_attn_probs=True)
    if -1 not in options.get("window_size", ()):
        found["fa4"] = fa4.flash_attn_varlen_func(q, k, v, cu_seqlens_q=q_offsets, cu_seqlens_k=k_offsets, **options)
    for out, lse in found.values():
        assert lse.shape == (4, 12)
        for rows, keys in ((slice(0, 5), slice(0, 7)), (slice(5, 12), slice(7, 12))):
            wanted, wanted_lse = _eager(q[None, rows], k[None, keys], v[None, keys], **_wanted(options))
            _close(out[rows], wanted[0], dtype)
            _close(lse[:, rows], wanted_lse[0], dtype)


def test_the_packed_forms_are_the_plain_ones(device):
    qkv, q, kv = (
        _random(2, 6, 3, 4, 16, device=device),
        _random(2, 5, 4, 16, device=device),
        _random(2, 6, 2, 2, 16, device=device),
    )
    options = {"causal": True, "softcap": 2.0, "softmax_scale": 0.3, "window_size": (3, 0), "deterministic": True}
    same = torch.equal
    assert same(fa2.flash_attn_qkvpacked_func(qkv, **options), fa2.flash_attn_func(*qkv.unbind(2), **options))
    assert same(fa3.flash_attn_qkvpacked_func(qkv, **options), fa2.flash_attn_func(*qkv.unbind(2), **options))
    heads_apart = qkv.transpose(2, 3).flatten(2, 3)[
        :, :, [*range(0, 12, 3), 1, 4, 2, 5]
    ]  # four of q, two of k, two of v
    grouped = fa2.flash_attn_func(qkv[:, :, 0], qkv[:, :, 1, :2], qkv[:, :, 2, :2], **options)
    assert same(fa3.flash_attn_qkvpacked_func(heads_apart, **options, num_heads_q=4), grouped)
    assert same(fa2.flash_attn_kvpacked_func(q, kv, **options), fa2.flash_attn_func(q, *kv.unbind(2), **options))
    a, b = _offsets(0, 5, 10, device=device), _offsets(0, 6, 12, device=device)
    whole = fa2.flash_attn_varlen_kvpacked_func(q.flatten(0, 1), kv.flatten(0, 1), a, b, 5, 6, **options)
    assert same(whole, fa2.flash_attn_varlen_func(q.flatten(0, 1), *kv.flatten(0, 1).unbind(1), a, b, 5, 6, **options))
    whole = fa2.flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), b, 6, **options)
    assert same(whole, fa2.flash_attn_varlen_func(*qkv.flatten(0, 1).unbind(1), b, b, 6, 6, **options))
    whole = fa4.flash_attn_varlen_func(q, *kv.unbind(2), causal=True)[0]  # no offsets: padded tensors
    assert same(whole, fa4.flash_attn_func(q, *kv.unbind(2), causal=True)[0])


def test_a_sink_joins_the_denominator(device):
    q, sink = _random(1, 5, 4, 16, device=device), _random(4, device=device, grad=True)
    out, lse = fa4.flash_attn_func(q, q, q, causal=True, learnable_sink=sink)
    wanted, wanted_lse = _eager(q, q, q, causal=True, sink=sink)
    _close(out, wanted, torch.float32)
    _close(lse, wanted_lse, torch.float32)
    _close(*(torch.autograd.grad(one.sum(), sink)[0] for one in (out, wanted)), torch.float32)


# ---------------------------------------------------------------- what comes back


def test_returns_are_the_originals():
    q, offsets = _random(1, 5, 4, 16), _offsets(0, 5)
    out, lse, weights = fa2.flash_attn_func(q, q, q, return_attn_probs=True)
    assert (out.shape, lse.shape, weights.shape) == (q.shape, (1, 4, 5), (0,))
    out, lse, weights = fa2.flash_attn_varlen_func(q[0], q[0], q[0], offsets, offsets, 5, 5, return_attn_probs=True)
    assert (out.shape, lse.shape, weights.shape) == (q[0].shape, (4, 5), (0,))
    assert isinstance(fa2.flash_attn_func(q, q, q), torch.Tensor) and isinstance(
        fa3.flash_attn_func(q, q, q), torch.Tensor
    )
    assert len(fa3.flash_attn_func(q, q, q, return_attn_probs=True)) == 2 and len(fa4.flash_attn_func(q, q, q)) == 2
    assert len(fa2.flash_attn_with_kvcache(q, q, q, return_softmax_lse=True)) == 2
    found = fa2_private._flash_attn_forward(q.requires_grad_(), q, q, 0.0, 0.25, False, -1, -1, 0.0, None, False)
    assert [list(t.shape) for t in found] == [[1, 5, 4, 16], [1, 4, 5], [0], [2]] and not found[0].requires_grad


def test_parts_combine_into_the_whole(device):
    q, k = _random(2, 5, 4, 16, device=device), _random(2, 12, 4, 16, device=device)
    parts = [fa3.flash_attn_func(q, part, part, return_attn_probs=True) for part in k.chunk(3, 1)]
    out, lse = fa3.flash_attn_combine(
        torch.stack([out for out, _ in parts]), torch.stack([lse.transpose(1, 2) for _, lse in parts])
    )
    wanted, wanted_lse = _eager(q, k, k)
    _close(out, wanted, torch.float32)
    _close(lse.transpose(1, 2), wanted_lse, torch.float32)
    assert fa3.flash_attn_combine(out[None], lse[None], out_dtype=torch.bfloat16)[0].dtype == torch.bfloat16
    room = torch.empty_like(out)
    assert fa3.flash_attn_combine(out[None], lse[None], out=room)[0] is room and torch.equal(room, out)


# ---------------------------------------------------------------- the private functions


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_backward_uses_the_out_and_lse_it_is_given(dtype, device):
    """A ring's block: merged out and lse of all the keys, gradients of some of them, written where the caller says."""
    q, k, v, dout = (
        _random(2, *sizes, dtype=dtype, device=device) for sizes in ((6, 4, 16), (9, 2, 16), (9, 2, 16), (6, 4, 16))
    )
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    wanted, lse = _eager(*leaves)
    gradients = torch.autograd.grad(wanted, leaves, dout.double())
    out, lse = (
        wanted.detach().to(dtype),
        lse.detach().float().transpose(1, 2).contiguous().transpose(1, 2),
    )  # strided, as a ring's is
    total = torch.zeros_like(q, dtype=torch.float32)
    for keys in (slice(0, 4), slice(4, 9)):
        dq, (dk, dv) = torch.empty_like(q), (torch.empty_like(t[:, keys]) for t in (k, v))
        options = (0.0, 0.25, False, -1, -1, 0.0, None, True)
        delta = fa2_private._flash_attn_backward(dout, q, k[:, keys], v[:, keys], out, lse, dq, dk, dv, *options)
        total += dq
        _close(dk, gradients[1][:, keys], dtype)
        _close(dv, gradients[2][:, keys], dtype)
    _close(total, gradients[0], dtype)
    assert delta.shape == (2, 4, 128) and not delta[..., 6:].any()
    _close(delta[..., :6], (dout.double() * out).sum(-1).transpose(1, 2), dtype)
    assert fa2_private._flash_attn_backward(
        dout, q, k, v, out, lse, None, None, dv.new_empty(v.shape), *options
    ).shape == (2, 4, 128)


def test_the_packed_backward_is_the_dense_one_of_each(device):
    q, k, dout, sizes = (
        *(_random(12, 2, 16, device=device) for _ in range(2)),
        _random(12, 2, 16, device=device) * 2,
        ((0, 5), (5, 12)),
    )
    offsets, options = _offsets(0, 5, 12, device=device), (0.0, 0.25, True, -1, -1, 0.0, None)
    out, lse, *_ = fa2_private._flash_attn_varlen_forward(q, k, k, offsets, offsets, 7, 7, *options, False)
    found = [torch.empty_like(q) for _ in range(3)]
    delta = fa2_private._flash_attn_varlen_backward(
        dout, q, k, k, out, lse, *found, offsets, offsets, 7, 7, *options, False
    )
    assert delta.shape == (2, 12 + 2 * 128)
    for number, (start, end) in enumerate(sizes):
        one = [t[None, start:end] for t in (dout, q, k, k, out)]
        alone = [torch.empty_like(one[1]) for _ in range(3)]
        rows = fa2_private._flash_attn_backward(*one, lse[None, :, start:end], *alone, *options, False)
        room = start + 128 * number
        _close(delta[:, room : room + end - start], rows[0, :, : end - start], torch.float32)
        for packed, dense in zip(found, alone):
            _close(packed[start:end], dense[0], torch.float32)


def test_a_backward_of_tensors_that_do_not_fit_says_so():
    q = _random(1, 5, 2, 16)
    out, lse, *_ = fa2_private._flash_attn_forward(q, q, q, 0.0, 0.25, False, -1, -1, 0.0, None, False)
    fitting = {"dout": q, "out": out, "softmax_lse": lse, "dq": None, "dk": None, "dv": None}
    wrong = [
        ("dout", q[:, :4]),
        ("out", out[:, :4]),
        ("softmax_lse", lse.transpose(1, 2)),
        ("dout", q.double()),
        ("out", out.bfloat16()),
    ]
    wrong += [("dq", q.new_empty(2, 5, 2, 16)), ("dv", q.new_empty(1, 1, 2, 16))]
    for name, tensor in wrong:
        dout, *others = (fitting | {name: tensor}).values()
        with pytest.raises(ValueError, match=f"^{name}: "):
            fa2_private._flash_attn_backward(dout, q, q, q, *others, 0.0, 0.25, False, -1, -1, 0.0, None, False)


# ---------------------------------------------------------------- caches


@pytest.mark.parametrize("decode", [fa2.flash_attn_with_kvcache, fa3.flash_attn_with_kvcache])
def test_new_keys_are_written_and_seen(decode, device):
    k_cache, v_cache = _random(2, 9, 2, 16, device=device), _random(2, 9, 2, 16, device=device) * 2
    q, new = _random(2, 1, 4, 16, device=device), _random(2, 1, 2, 16, device=device)
    for seqlens in (4, _offsets(4, 4, device=device)):
        k, v = k_cache.clone(), v_cache.clone()
        out, lse = decode(q, k, v, new, 2 * new, cache_seqlens=seqlens, causal=True, return_softmax_lse=True)
        assert torch.equal(k[:, 4:5], new) and torch.equal(v[:, 4:5], 2 * new) and torch.equal(k[:, 5:], k_cache[:, 5:])
        wanted, wanted_lse = _eager(q, k[:, :5], v[:, :5])
        _close(out, wanted, torch.float32)
        _close(lse, wanted_lse, torch.float32)


def test_a_cache_is_read_to_each_length(device):
    q, cache, several = (
        _random(2, 1, 4, 16, device=device),
        _random(2, 9, 2, 16, device=device),
        _random(2, 3, 4, 16, device=device),
    )
    lengths = _offsets(3, 8, device=device)
    out = fa2.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, causal=True)
    for entry, length in enumerate((3, 8)):
        _close(out[entry], _eager(q[entry, None], *[cache[entry, None, :length]] * 2)[0][0], torch.float32)
    out = fa2.flash_attn_with_kvcache(several, cache, cache, cache_seqlens=8, causal=True)
    _close(out, _eager(several, cache[:, :8], cache[:, :8], causal=True)[0], torch.float32)
    for options in ({"causal": True}, {"window_size": (2, 0)}):
        out = fa2.flash_attn_with_kvcache(several, cache, cache, cache_seqlens=lengths, **options)
        for entry, length in enumerate((3, 8)):
            _close(
                out[entry],
                _eager(several[entry, None], *[cache[entry, None, :length]] * 2, **_wanted(options))[0][0],
                torch.float32,
            )


TOO_MUCH = [
    ((1, None), 2, "v"),
    ((None, 1), 2, "k"),
    ((1, 1), None, "cache_seqlens"),
    ((1, 1), 9, "cache_seqlens"),
    ((None, None), 10, "cache_seqlens"),
]


@pytest.mark.parametrize("new, seqlens, name", TOO_MUCH)
def test_a_cache_that_cannot_hold_them_says_so(new, seqlens, name):
    q = _random(2, 1, 2, 16)
    k, v = (None if count is None else _random(2, count, 2, 16) for count in new)
    with pytest.raises(ValueError, match=f"^{name}: "):
        fa2.flash_attn_with_kvcache(q, _random(2, 9, 2, 16), _random(2, 9, 2, 16), k, v, cache_seqlens=seqlens)


# ---------------------------------------------------------------- refusals

H8 = torch.randn(1, 5, 8, 16)
MALFORMED = {
    "qkv of rank 4": (lambda: fa2.flash_attn_qkvpacked_func(H8), "qkv", "[1, 5, 8, 16]"),
    "qkv of two parts": (lambda: fa2.flash_attn_qkvpacked_func(torch.randn(1, 5, 2, 4, 16)), "qkv", "[1, 5, 2, 4, 16]"),
    "qkv of None": (lambda: fa2.flash_attn_qkvpacked_func(None), "qkv", "NoneType"),
    "kv of three parts": (
        lambda: fa2.flash_attn_kvpacked_func(H8, torch.randn(1, 5, 3, 8, 16)),
        "kv",
        "[1, 5, 3, 8, 16]",
    ),
    "kv of None": (lambda: fa2.flash_attn_kvpacked_func(H8, None), "kv", "NoneType"),
    "packed qkv": (
        lambda: fa2.flash_attn_varlen_qkvpacked_func(torch.randn(5, 2, 8, 16), _offsets(0, 5), 5),
        "qkv",
        "[5, 2, 8, 16]",
    ),
    "packed kv": (
        lambda: fa2.flash_attn_varlen_kvpacked_func(H8[0], torch.randn(5, 3, 8, 16), *[_offsets(0, 5)] * 2, 5, 5),
        "kv",
        "[5, 3, 8, 16]",
    ),
    "FA3's qkv of None": (lambda: fa3.flash_attn_qkvpacked_func(None), "qkv", "NoneType"),
    "FA3's qkv of rank 3": (lambda: fa3.flash_attn_qkvpacked_func(H8[0]), "qkv", "[5, 8, 16]"),
    "FA3's heads of a float": (lambda: fa3.flash_attn_qkvpacked_func(H8, num_heads_q=4.0), "num_heads_q", "float"),
    "FA3's heads below 0": (lambda: fa3.flash_attn_qkvpacked_func(H8, num_heads_q=-2), "num_heads_q", "-2"),
    "more lse than splits": (
        lambda: fa3.flash_attn_combine(torch.randn(2, 1, 5, 8, 16), torch.randn(3, 1, 5, 8)),
        "lse_partial",
        "[3, 1, 5, 8]",
    ),
    "no splits": (
        lambda: fa3.flash_attn_combine(torch.randn(0, 1, 5, 8, 16), torch.randn(0, 1, 5, 8)),
        "out_partial",
        "[0, 1, 5, 8, 16]",
    ),
    "splits of None": (lambda: fa3.flash_attn_combine(None, None), "out_partial", "NoneType"),
    "a dtype by name": (
        lambda: fa3.flash_attn_combine(H8[None], H8[None, ..., 0], out_dtype="half"),
        "out_dtype",
        "str",
    ),
    "a length below 0": (lambda: fa2.flash_attn_with_kvcache(H8, H8, H8, cache_seqlens=-1), "cache_seqlens", "-1"),
}


@pytest.mark.parametrize("call, argument, got", MALFORMED.values(), ids=MALFORMED)
def test_what_lies_otherwise_is_named(call, argument, got):
    with pytest.raises(
        (strobe.InvalidProblem, TypeError), match=rf"^{argument}: got .*{re.escape(got)}.*, expected .+; .+"
    ):
        call()


SAYS_SOMETHING = {"dropout_p": 0.1, "attention_chunk": 64}
SAYS_SOMETHING |= dict.fromkeys(
    ("return_softmax", "zero_tensors", "gather_bwd_recompute_p", "disable_scheduler_metadata"), True
)
ALLOWED = {
    "flash_attn_varlen_func": {"block_table"},
    "_flash_attn_varlen_forward": {"block_table"},
}  # served, tested in test_kvcache.py
ALLOWED["flash_attn_with_kvcache"] = {
    "k",
    "v",
    "rotary_cos",
    "rotary_sin",
    "rotary_interleaved",
    "block_table",
    "page_table",
}
ALLOWED["flash_attn_with_kvcache"] |= {"cache_seqlens", "cache_batch_idx", "cache_leftpad"}
ALLOWED["_flash_attn_forward"] = {
    "k_new",
    "v_new",
    "page_table",
    "kv_batch_idx",
    "leftpad_k",
    "rotary_cos",
    "rotary_sin",
    "rotary_interleaved",
}
ALLOWED["_flash_attn_forward"] |= {"out_", "rotary_seqlens"}
ALLOWED["_flash_attn_backward"] = {"dq", "dk", "dv", "is_causal"}
ALLOWED["_flash_attn_fwd"] = {"out", "lse"}
ALLOWED["_flash_attn_bwd"] = {
    "dq",
    "dk",
    "dv",
    "dlse",
    "m_block_size",
    "n_block_size",
    "num_stages_Q",
    "num_stages_dO",
    "SdP_swapAB",
    "dKV_swapAB",
}
ALLOWED["_flash_attn_bwd"] |= {
    "dQ_swapAB",
    "AtomLayoutMSdP",
    "AtomLayoutNdKV",
    "AtomLayoutMdQ",
    "V_in_regs",
    "num_threads",
}
ALLOWED["flash_attn_varlen_func"] |= {"seqused_q", "seqused_k"}  # served, tested in test_seqused.py
ALLOWED["_flash_attn_varlen_forward"] |= {"seqused_k"}
ALLOWED["flash_attn_with_kvcache"] |= {"rotary_seqlens", "max_seqlen_q"}
for private in ("_flash_attn_forward", "_flash_attn_fwd", "_flash_attn_bwd"):
    ALLOWED[private] |= {"seqused_q", "seqused_k"}
CARRIED = {
    "softmax_scale",
    "causal",
    "window_size",
    "softcap",
    "deterministic",
    "return_attn_probs",
    "return_softmax_lse",
    "learnable_sink",
}
CARRIED |= {
    "return_lse",
    "num_heads_q",
    "window_size_left",
    "window_size_right",
    "rng_state",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "max_seqlen_q",
    "max_seqlen_k",
}
OPTIONAL = [
    (name, argument)
    for name in SIGNATURES
    if not any(other in name for other in ("bert_padding", "rotary", "combine", "metadata"))
    for argument, one in inspect.signature(_function(name)).parameters.items()
    if one.default is not one.empty
    and argument not in HINTS
    and argument not in ALLOWED.get(name.rpartition(".")[2], ())
    if argument not in CARRIED or (argument in UNSERVED and name.endswith("kvcache"))
]


@pytest.mark.parametrize("name, argument", OPTIONAL, ids=[".".join(one) for one in OPTIONAL])
def test_no_argument_is_ignored(name, argument):
    """Each optional argument that is not carried to strobe raises, by its name and with an alternative."""
    function, q = _function(name), _random(1, 4, 2, 16)
    needed = {
        other: None
        for other, one in inspect.signature(function).parameters.items()
        if one.default is inspect.Parameter.empty
    }
    offsets = _offsets(0, 4)
    tensors = {"qkv": torch.stack([q] * 3, 2), "kv": torch.stack([q] * 2, 2)} | dict.fromkeys(
        ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"), offsets
    )
    if "varlen" in name:
        tensors = {key: t if key.startswith("cu_") else t.flatten(0, 1) for key, t in tensors.items()}
    scalars = {
        "dropout_p": 0.0,
        "causal": False,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "return_softmax": False,
    }
    given = {other: scalars.get(other, tensors.get(other, q[0] if "varlen" in name else q)) for other in needed}
    given |= {other: None for other in needed if other in ("alibi_slopes", "softmax_scale")}
    value = SAYS_SOMETHING.get(argument, torch.ones(1))
    with pytest.raises(NotImplementedError, match=rf"^{argument}: got .+, expected .+; .+"):
        function(**given | {argument: value})


def test_the_private_functions_refuse_too():
    q = _random(1, 4, 2, 16)
    for dropout, slopes, weights in ((0.1, None, False), (0.0, torch.ones(2), False), (0.0, None, True)):
        with pytest.raises(NotImplementedError, match=r"^(dropout_p|alibi_slopes|return_softmax): "):
            fa2_private._flash_attn_forward(q, q, q, dropout, 0.25, False, -1, -1, 0.0, slopes, weights)
    for dropout, slopes in ((0.1, None), (0.0, torch.ones(2))):
        with pytest.raises(NotImplementedError, match=r"^(dropout_p|alibi_slopes): "):
            fa2_private._flash_attn_backward(
                q, q, q, q, q, q, None, None, None, dropout, 0.25, False, -1, -1, 0.0, slopes, False
            )


@pytest.mark.parametrize("missing", ["cu_seqlens_q", "cu_seqlens_k"])
def test_fa4_offsets_of_one_side_are_refused(missing):
    q, given = _random(4, 2, 16), {"cu_seqlens_q": _offsets(0, 4), "cu_seqlens_k": _offsets(0, 4)}
    with pytest.raises(NotImplementedError, match=f"^{missing}: "):
        fa4.flash_attn_varlen_func(q, q, q, **given | {missing: None})


# ---------------------------------------------------------------- padding


def test_unpad_and_pad_are_inverse_and_differentiable(device):
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0]], device=device)
    padded = _random(2, 4, 3, 5, device=device, grad=True)
    rows, indices, cu_seqlens, longest, used = bert_padding.unpad_input(padded, mask)
    assert (cu_seqlens.tolist(), cu_seqlens.dtype, longest, used.tolist()) == ([0, 3, 4], torch.int32, 3, [3, 1])
    assert torch.equal(rows, padded[mask.bool()]) and torch.equal(
        bert_padding.unpad_input(padded, mask.bool())[0], rows
    )
    back = bert_padding.pad_input(rows, indices, 2, 4)
    assert torch.equal(back, padded * mask[..., None, None])
    back.sum().backward()
    assert torch.equal(padded.grad, mask[..., None, None].expand_as(padded).float())
    kept = bert_padding.unpad_input(padded, mask, torch.tensor([[0, 0, 1, 0], [0, 0, 0, 1]], device=device))
    assert kept[2].tolist() == [0, 4, 6] and kept[3] == 4 and kept[4].tolist() == [3, 1]


def test_both_gradients_of_the_residual_meet():
    rows = _random(4, 3, grad=True)
    chosen, everything = bert_padding.index_first_axis_residual(rows, torch.tensor([2, 0]))
    (chosen.sum() + 10 * everything.sum()).backward()
    assert rows.grad[:, 0].tolist() == [11, 10, 11, 10]


# ---------------------------------------------------------------- what callers pass instead of Python numbers


def test_numbers_may_be_tensors():
    """transformers passes max_seqlen as `diff().max()`; others pass window_size and softmax_scale as tensors, and
    causal as 1.
    """
    q, offsets = _random(9, 2, 16), _offsets(0, 4, 9)
    longest = offsets.diff().max()
    want = fa2.flash_attn_varlen_func(
        q, q, q, offsets, offsets, 5, 5, softmax_scale=0.5, causal=True, window_size=(3, 0)
    )
    for library in (fa2, fa3):
        given = dict(softmax_scale=torch.tensor(0.5), causal=1, window_size=torch.tensor([3, 0]))
        assert torch.equal(library.flash_attn_varlen_func(q, q, q, offsets, offsets, longest, longest, **given), want)
    out, _ = fa4.flash_attn_varlen_func(
        q, q, q, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=longest, max_seqlen_k=longest,
        softmax_scale=torch.tensor(0.5),
        causal=1, window_size=torch.tensor([3, 0]),
    )  # fmt: skip
    assert torch.equal(out, want)
    k_cache, v_cache = torch.zeros(1, 8, 2, 16), torch.zeros(1, 8, 2, 16)
    one = _random(1, 1, 2, 16)
    given = dict(cache_seqlens=0, softmax_scale=torch.tensor(0.5), causal=1, window_size=torch.tensor([3, 0]))
    assert fa2.flash_attn_with_kvcache(one, k_cache, v_cache, one, one, **given).allclose(one)


@pytest.mark.parametrize(
    "given, name",
    [
        (dict(softmax_scale=torch.tensor([0.5, 0.5])), "softmax_scale"),
        (dict(softmax_scale=torch.tensor(0.5, requires_grad=True)), "softmax_scale"),
        (dict(window_size=torch.tensor([1, 2, 3])), "window_size"),
        (dict(causal=torch.ones(2)), "causal"),
    ],
)
def test_tensors_that_are_no_number_are_named(given, name):
    q = _random(1, 4, 2, 16)
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=f"^{name}: got"):
        fa2.flash_attn_func(q, q, q, **given)


def test_rows_are_numbered_by_int32_too():
    """transformers' generate hands pad_input int32 numbers."""
    rows, indices = _random(3, 4), torch.tensor([0, 1, 3], dtype=torch.int32)
    assert torch.equal(bert_padding.pad_input(rows, indices, 2, 3), bert_padding.pad_input(rows, indices.long(), 2, 3))
    assert torch.equal(bert_padding.index_first_axis(rows, indices[:2]), rows[:2])
    chosen, _ = bert_padding.index_first_axis_residual(rows.requires_grad_(), indices[:2])
    chosen.sum().backward()
    assert rows.grad.sum(1).tolist() == [4, 4, 0]


def test_splits_without_a_key_combine_into_0():
    out, lse = fa3.flash_attn_combine(torch.full((2, 1, 3, 2, 8), 7.0), torch.full((2, 1, 3, 2), -torch.inf))
    assert not out.any() and (lse == -torch.inf).all()


@pytest.mark.parametrize(
    "hint",
    [dict(num_splits=7), dict(pack_gqa=True), dict(sm_margin=8), dict(scheduler_metadata=torch.zeros(4))],
    ids=str,
)
def test_hints_about_speed_change_nothing(hint):
    q, k = _random(1, 1, 2, 16), _random(1, 8, 2, 16)
    given = dict(cache_seqlens=torch.tensor([5], dtype=torch.int32))
    assert torch.equal(
        fa3.flash_attn_with_kvcache(q, k, k, **given, **hint), fa3.flash_attn_with_kvcache(q, k, k, **given)
    )
