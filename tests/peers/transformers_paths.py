"""The ways by which transformers calls FlashAttention 2, 3 and 4, through the stand-ins: whole batches, padded, packed,
paged, and generate().

`run.py` collects this file. Reference: softmax in float64, for each sequence alone; of a model, its eager attention.
"""

from __future__ import annotations

import copy

import pytest
import torch
import transformers.modeling_flash_attention_utils as flash
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VERSIONS = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
HEADS, HEADS_KV, WIDTH = 4, 2, 32
ROUNDING = {
    torch.float32: 2e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}  # of results that are averages of normal numbers

every_version = pytest.mark.parametrize("version", VERSIONS)
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
every_mask = pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"is_causal": False},
        {"is_causal": True, "sliding_window": 5},
        {"is_causal": True, "softcap": 3.0},
    ],
    ids=str,
)


@pytest.fixture(autouse=True)
def found(monkeypatch):
    """transformers finds each version, and forgets which it loaded last."""
    for version in (2, 3, 4):
        monkeypatch.setattr(flash, f"is_flash_attn_{version}_available", lambda **_: True)
    monkeypatch.setattr(flash, "_loaded_implementation", None)


def drawn(batch: int, rows: int, keys: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (batch, rows, HEADS), (batch, keys, HEADS_KV), (batch, keys, HEADS_KV)
    return tuple(torch.randn(*shape, WIDTH, device=DEVICE).to(dtype).requires_grad_() for shape in shapes)  # type: ignore[return-value]


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux=None,
):
    """Of one sequence: q [S_q, H, D] over k, v [S_k, H_kv, D], aligned at the end."""
    q, k, v = q.double(), *(part.double().repeat_interleave(HEADS // HEADS_KV, 1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * WIDTH**-0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(len(q), device=q.device)[:, None] + len(k) - len(q) - torch.arange(len(k), device=q.device)
    hidden = distance < 0 if is_causal else torch.zeros_like(distance, dtype=torch.bool)
    if sliding_window is not None:
        hidden = hidden | (distance >= sliding_window)
    scores = scores.masked_fill(hidden, -torch.inf)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.double().view(HEADS, 1, 1).expand(HEADS, len(q), 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v)


def close(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert torch.allclose(got.double(), expected.double(), atol=ROUNDING[dtype], rtol=ROUNDING[dtype])


def check(out: Tensor, parts: list[tuple[Tensor, Tensor]], leaves: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    """Each part of out beside its reference, and the gradients of all."""
    for got, expected in parts:
        close(got, expected, dtype)
    up = [torch.randn_like(got) for got, _ in parts]
    ours = torch.autograd.grad([got for got, _ in parts], leaves, up, retain_graph=True)
    theirs = torch.autograd.grad([expected for _, expected in parts], leaves, [each.double() for each in up])
    for got, expected in zip(ours, theirs):
        assert torch.allclose(got.double(), expected.double(), atol=4 * ROUNDING[dtype], rtol=4 * ROUNDING[dtype])


# ---------------------------------------------------------------- _flash_attention_forward


@every_version
@every_dtype
@every_mask
def test_whole(version, dtype, options):
    leaves = drawn(2, 17, 17, dtype)
    out = flash._flash_attention_forward(*leaves, None, 17, attn_implementation=version, **options)
    check(out, [(out[n], reference(*(leaf[n] for leaf in leaves), **options)) for n in range(2)], leaves, dtype)


@every_version
@every_dtype
@every_mask
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded(version, dtype, options, side):
    leaves, lengths = drawn(3, 19, 19, dtype), (19, 4, 11)
    real = torch.arange(19) < torch.tensor(lengths)[:, None]
    mask = (real if side == "right" else real.flip(1)).to(DEVICE)
    out = flash._flash_attention_forward(*leaves, mask.long(), 19, attn_implementation=version, **options)
    check(
        out,
        [(out[n][mask[n]], reference(*(leaf[n][mask[n]] for leaf in leaves), **options)) for n in range(3)],
        leaves,
        dtype,
    )
    assert out[~mask].abs().max() == 0


@every_version
@every_dtype
@pytest.mark.parametrize("rows", [1, 6])
def test_padded_on_the_left_with_keys_before(version, dtype, rows):
    """A step of generate(), and a prompt's later piece."""
    leaves, lengths = drawn(3, rows, 19, dtype), (19, 9, 11)
    mask = (torch.arange(19) >= 19 - torch.tensor(lengths)[:, None]).to(DEVICE)
    out = flash._flash_attention_forward(*leaves, mask.long(), rows, is_causal=True, attn_implementation=version)
    parts = [(out[n], reference(leaves[0][n], *(leaf[n][mask[n]] for leaf in leaves[1:]))) for n in range(3)]
    check(out, parts, leaves, dtype)


@every_version
@every_dtype
@every_mask
@pytest.mark.parametrize("said", ["position_ids", "offsets", "offsets and a tensor"])
def test_packed(version, dtype, options, said):
    """max_length is a tensor of no dimension where transformers reads it off position_ids."""
    lengths = (5, 1, 13)
    leaves = drawn(1, sum(lengths), sum(lengths), dtype)
    offsets = torch.tensor([0, 5, 6, 19], dtype=torch.int32, device=DEVICE)
    if said == "position_ids":
        how = {"position_ids": torch.cat([torch.arange(length) for length in lengths])[None].to(DEVICE)}
    else:
        longest = 13 if said == "offsets" else offsets.diff().max()
        how = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": longest, "max_length_k": longest}
    out = flash._flash_attention_forward(*leaves, None, sum(lengths), attn_implementation=version, **how, **options)
    pieces = [slice(*ends) for ends in ((0, 5), (5, 6), (6, 19))]
    check(
        out,
        [(out[0, piece], reference(*(leaf[0, piece] for leaf in leaves), **options)) for piece in pieces],
        leaves,
        dtype,
    )


@pytest.mark.parametrize("version", VERSIONS[:2])
@every_dtype
def test_paged(version, dtype):
    """Continuous batching's decode: a key a sequence is appended to its pages."""
    lengths = torch.tensor([3, 16, 21])
    q, k, v = (leaf.detach() for leaf in drawn(1, 3, 3, dtype))
    pages = torch.randn(2, 6, 16, HEADS_KV, WIDTH, device=DEVICE).to(dtype)
    table = torch.tensor([[4, 0], [2, 5], [1, 3]], dtype=torch.int32, device=DEVICE)
    offsets = torch.nn.functional.pad((lengths + 1).cumsum(0), (1, 0)).to(DEVICE, torch.int32)
    how = {"cu_seq_lens_k": offsets, "block_table": table, "k_cache": pages[0].clone(), "v_cache": pages[1].clone()}
    out = flash._flash_attention_forward(q, k, v, None, 3, is_causal=True, attn_implementation=version, **how)
    for n, length in enumerate(lengths.tolist()):
        keys, values = (
            torch.cat([part[table[n].long()].flatten(0, 1)[:length], new[0, n : n + 1]])
            for part, new in zip(pages, (k, v))
        )
        close(out[0, n : n + 1], reference(q[0, n : n + 1], keys, values), dtype)


@every_dtype
@pytest.mark.parametrize("padded", [False, True])
def test_sinks(dtype, padded):
    """Of FA4's functions alone, where transformers asks for learnable_sink."""
    leaves, s_aux = drawn(2, 11, 11, dtype), torch.randn(HEADS, device=DEVICE).to(dtype)
    mask = (torch.arange(11) < torch.tensor([[11], [7]])).to(DEVICE) if padded else None
    out = flash._flash_attention_forward(
        *leaves,
        mask if mask is None else mask.long(),
        11,
        is_causal=True,
        s_aux=s_aux,
        attn_implementation="flash_attention_4",
    )
    rows = mask if mask is not None else torch.ones(2, 11, dtype=torch.bool, device=DEVICE)
    check(
        out,
        [(out[n][rows[n]], reference(*(leaf[n][rows[n]] for leaf in leaves), s_aux=s_aux)) for n in range(2)],
        leaves,
        dtype,
    )


@every_version
def test_dropout(version):
    """FA2's functions take dropout and refuse it; FA3 and FA4 have no such argument."""
    leaves = drawn(1, 9, 9, torch.bfloat16)
    out = flash._flash_attention_forward(*leaves, None, 9, is_causal=True, dropout=0.1, attn_implementation=version)
    check(out, [(out[0], reference(*(leaf[0] for leaf in leaves)))], leaves, torch.bfloat16)


# ---------------------------------------------------------------- models

_SMALL = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS_KV, "head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
MODELS = {
    "llama": lambda: (LlamaForCausalLM, LlamaConfig(**_SMALL)),
    "mistral": lambda: (MistralForCausalLM, MistralConfig(**_SMALL, sliding_window=7)),
    "qwen3": lambda: (Qwen3ForCausalLM, Qwen3Config(**_SMALL)),
    "gemma2": lambda: (
        Gemma2ForCausalLM,
        Gemma2Config(**_SMALL, sliding_window=7, attn_logit_softcapping=2.0, query_pre_attn_scalar=16),
    ),
}
every_model = pytest.mark.parametrize("name", MODELS)


def pair(name: str, version: str):
    """The same model, by eager attention and by this version. Its scores are large enough that one key too many changes
    everything.
    """
    kind, config = MODELS[name]()
    eager = kind._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in eager.parameters():
            matrix = parameter.dim() > 1
            parameter.copy_(torch.randn(parameter.shape) * (0.2 if matrix else 0.5) + (0.0 if matrix else 1.0))
    eager = eager.to(DEVICE)
    other = copy.deepcopy(eager)
    other.config._attn_implementation = version
    (function, *_), _ = flash.lazy_import_flash_attention(version)
    assert function.__module__.startswith("strobe."), function
    return eager, other


@every_version
@every_model
@pytest.mark.parametrize("batch", ["whole", "padded"])
def test_generates_what_eager_does(name, version, batch):
    """In float32, where the two largest logits are not one number."""
    eager, other = pair(name, version)
    ids = torch.randint(3, 97, (3, 12), device=DEVICE)
    mask = torch.ones_like(ids)
    if batch == "padded":
        mask[1, :5], mask[2, :11] = 0, 0
    options = {
        "attention_mask": mask,
        "do_sample": False,
        "max_new_tokens": 8,
        "min_new_tokens": 8,
        "disable_compile": True,
    }
    assert torch.equal(other.generate(input_ids=ids, **options), eager.generate(input_ids=ids, **options))


@every_version
@every_model
def test_packed_logits_and_gradients(name, version):
    eager, other = pair(name, version)
    pieces = [torch.randint(3, 97, (1, length), device=DEVICE) for length in (9, 4, 14)]
    positions = torch.cat([torch.arange(piece.shape[1], device=DEVICE) for piece in pieces])[None]
    got = other(input_ids=torch.cat(pieces, 1), position_ids=positions, use_cache=False).logits
    expected = torch.cat([eager(input_ids=piece, use_cache=False).logits for piece in pieces], 1)
    assert torch.allclose(got, expected, atol=1e-4)
    up = torch.randn_like(got)
    got.backward(up)
    expected.backward(up)
    for (label, ours), theirs in zip(other.named_parameters(), eager.parameters()):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-3, rtol=1e-3), label
