"""Arguments of the stand-ins for FlashAttention: signatures to the letter, and what is refused."""

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
from strobe.flash_attn import flash_attn_interface as fa2_private


def _random(*shape, dtype=torch.float32, device="cpu", grad=False):
    seed = sum(size * 31**place for place, size in enumerate(shape))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype).requires_grad_(grad)


def _offsets(*values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


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
    "cute.interface._flash_attn_fwd_combine": "out_partial, lse_partial, out, lse=None, cu_seqlens=None, seqused=None, "
    "num_splits_dynamic_ptr=None, varlen_batch_idx=None, semaphore_to_reset=None, output_scale=None",
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


def _function(name: str):
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(f"strobe.{module}"), function)


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
for public in ("func", "kvpacked_func", "qkvpacked_func"):  # served, tested in test_flash_attn.py
    for kind in (f"flash_attn_{public}", f"flash_attn_varlen_{public}"):
        ALLOWED[kind] = ALLOWED.get(kind, set()) | {"dropout_p", "alibi_slopes"}
ALLOWED["flash_attn_varlen_func"] |= {"seqused_q", "seqused_k"}  # served, tested in test_seqused.py
ALLOWED["_flash_attn_varlen_forward"] |= {"seqused_k"}
ALLOWED["flash_attn_with_kvcache"] |= {"rotary_seqlens", "max_seqlen_q", "cu_seqlens_q"}
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
    and not (name.startswith("flash_attn_interface") and argument.endswith("_descale"))  # test_kvcache_together.py
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


def test_slopes_of_other_heads_are_named():
    q = torch.randn(1, 4, 2, 16)
    with pytest.raises(strobe.InvalidProblem, match=r"^alibi_slopes: got a tensor of shape"):
        fa2.flash_attn_func(q, q, q, alibi_slopes=torch.ones(1))


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
