"""Tiny random models of transformers, and their outputs on strobe and on their own eager attention."""

from __future__ import annotations

import os
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import strobe

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers")

from transformers import (
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    ModernBertConfig,
    ModernBertModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from strobe.compat import transformers as integration
from strobe.compat.transformers.layer_mask import Band, LayerMask
from strobe.compat.transformers.masks import mask

integration.register()


VOCABULARY, WINDOW, LAYERS = 97, 4, 2
_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_BERT = {name: value for name, value in _SMALL.items() if name not in ("num_key_value_heads", "head_dim")}
_MIXED = ["sliding_attention", "full_attention"]
CAUSAL = {
    "llama": lambda: (LlamaForCausalLM, LlamaConfig(**_SMALL)),
    "mistral": lambda: (MistralForCausalLM, MistralConfig(**_SMALL, sliding_window=WINDOW)),
    "qwen3": lambda: (
        Qwen3ForCausalLM,
        Qwen3Config(**_SMALL, sliding_window=WINDOW, use_sliding_window=True, layer_types=_MIXED),
    ),
    "gemma2": lambda: (
        Gemma2ForCausalLM,
        Gemma2Config(
            **_SMALL, sliding_window=WINDOW, layer_types=_MIXED, attn_logit_softcapping=2.0, query_pre_attn_scalar=16
        ),
    ),
    "gemma3": lambda: (
        Gemma3ForCausalLM,
        Gemma3TextConfig(**_SMALL, sliding_window=WINDOW, layer_types=_MIXED, query_pre_attn_scalar=16),
    ),
    "gpt-oss": lambda: (
        GptOssForCausalLM,
        GptOssConfig(
            **_SMALL,
            sliding_window=WINDOW,
            layer_types=_MIXED,
            num_local_experts=2,
            num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
    ),
    "llama4": lambda: (
        Llama4ForCausalLM,
        Llama4TextConfig(
            **_SMALL,
            attention_chunk_size=5,
            layer_types=["chunked_attention", "full_attention"],
            num_local_experts=2,
            intermediate_size_mlp=64,
        ),
    ),
}
ENCODERS = {
    "bert": lambda: (BertModel, BertConfig(**_BERT)),
    "llama both ways": lambda: (LlamaForCausalLM, LlamaConfig(**_SMALL, is_causal=False, use_cache=False)),
    "modernbert": lambda: (
        ModernBertModel,
        ModernBertConfig(**_BERT, cls_token_id=1, sep_token_id=2, local_attention=2 * WINDOW, layer_types=_MIXED),
    ),
}
MAKERS = {**CAUSAL, **ENCODERS}


# ---------------------------------------------------------------- models, and what ran in them


@cache
def model(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> nn.Module:
    """A random model whose scores are large enough that one key too many changes everything."""
    kind, config = MAKERS[name]()
    config._experts_implementation = "eager"  # the only one in float64
    made = kind._from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for parameter in made.parameters():
            matrix = parameter.dim() > 1
            parameter.copy_(
                torch.randn(parameter.shape, generator=generator) * (0.2 if matrix else 0.5) + (0.0 if matrix else 1.0)
            )
    return made.to(device, dtype).requires_grad_(False)


def on(device: torch.device | str, inputs: dict) -> dict:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}


def outputs(made: nn.Module, implementation: str, **inputs) -> Tensor:
    """Logits or last hidden states [B, S, C]."""
    made.set_attn_implementation(implementation)
    with torch.no_grad():
        return made(**on(made.device, inputs))[0]


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def padding(kind: str) -> Tensor | None:
    real = torch.ones(3, 13, dtype=torch.long)
    real[0, :5], real[2, :9] = 0, 0
    return {"none": None, "ones": torch.ones_like(real), "left": real, "right": real.flip(1)}[kind]


# ---------------------------------------------------------------- sequences packed end to end

LENGTHS = (5, 1, 7)


def offsets() -> dict:
    ends = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 7, "max_length_k": 7}


# ---------------------------------------------------------------- the mask function, against transformers' own


def _written(asked: dict, config) -> Tensor:
    """strobe's mask, dense: bool [B, S_q, S_k]."""
    batch, rows, keys = asked["batch_size"], asked["q_length"], asked["kv_length"]
    tensor = mask(**asked)
    seen = torch.zeros(batch, rows, keys, dtype=torch.bool)
    if tensor is None:
        causal = "allow_is_bidirectional_skip" not in asked
        return seen | (strobe.causal() if causal else strobe.full()).dense(rows, keys)
    assert tensor.dtype == torch.int32 and tensor.numel() <= 8 * 4 * batch * (rows + keys)  # never S_q x S_k
    layer_mask = LayerMask.from_tensor(tensor, batch, rows, keys)
    width = getattr(config, "sliding_window", None)
    band = {
        Band.FULL: strobe.full,
        Band.CAUSAL: strobe.causal,
        Band.WINDOW: lambda: strobe.window(width - 1, 0),
        Band.AROUND: lambda: strobe.window(width, width),
    }
    whole = band[layer_mask.band]() & (strobe.full() if layer_mask.hidden is None else layer_mask.hidden)
    seen[:, :, : layer_mask.seqlen_k] = whole.dense(rows, layer_mask.seqlen_k)
    return seen
