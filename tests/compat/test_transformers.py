"""transformers models on strobe: tiny random ones, against their own eager attention, and that it was strobe that
ran."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import strobe
from strobe.ops import attention as ops

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers")

from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    BloomConfig,
    BloomForCausalLM,
    CLIPVisionConfig,
    DataCollatorWithFlattening,
    DynamicCache,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    MistralConfig,
    MistralForCausalLM,
    ModernBertConfig,
    ModernBertModel,
    MptConfig,
    MptForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    RoFormerConfig,
    RoFormerModel,
    StaticCache,
    WavLMConfig,
    WavLMModel,
    XGLMConfig,
    XGLMForCausalLM,
    masking_utils,
)
from transformers.generation import ContinuousBatchingConfig

from strobe.compat import transformers as integration
from strobe.compat.transformers import attention as attention_module
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
PLACES = [("cpu", torch.float32), pytest.param(("cuda", torch.bfloat16), marks=pytest.mark.gpu)]


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


@pytest.fixture
def ran(monkeypatch) -> list:
    """The calls that strobe has run."""
    calls, run = [], ops.run
    monkeypatch.setattr(ops, "run", lambda call, *rest: (calls.append(call), run(call, *rest))[1])
    monkeypatch.setattr(ops, "run_keywords", lambda *_: None)  # of calls that were met
    return calls


def on(device: torch.device | str, inputs: dict) -> dict:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}


def outputs(made: nn.Module, implementation: str, **inputs) -> Tensor:
    """Logits or last hidden states [B, S, C]."""
    made.set_attn_implementation(implementation)
    with torch.no_grad():
        return made(**on(made.device, inputs))[0]


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def alone(made: nn.Module, ids: Tensor, real: Tensor | None = None) -> list[Tensor]:
    """What is true: each row without its padding, at the places it had, in float64 (float32 for a model in bfloat16),
    through eager attention.
    """
    dtype = made.dtype
    made.to(torch.float64 if dtype == torch.float32 else torch.float32)
    try:
        found = []
        for row in range(len(ids)):
            places = torch.arange(ids.shape[1]) if real is None else real[row].nonzero().flatten()
            found.append(outputs(made, "eager", input_ids=ids[row : row + 1, places], position_ids=places[None])[0])
        return found
    finally:
        made.to(dtype)


def agrees(ours: list[Tensor], eager: list[Tensor], true: list[Tensor], dtype: torch.dtype) -> None:
    """strobe's error against the truth is at most twice eager's, and one rounding of the largest number."""
    errors = [max((a.double() - b.double()).abs().max().item() for a, b in zip(found, true)) for found in (ours, eager)]
    largest = max(part.abs().max().item() for part in true)
    bound = 2 * errors[1] + torch.finfo(dtype).eps * largest
    assert errors[0] <= bound, f"error {errors[0]:.2e}, eager's {errors[1]:.2e}, largest {largest:.2f}"
    assert bound < (0.01 if dtype == torch.float32 else 0.3) * largest, "a bound that would allow anything"


def padding(kind: str) -> Tensor | None:
    real = torch.ones(3, 13, dtype=torch.long)
    real[0, :5], real[2, :9] = 0, 0
    return {"none": None, "ones": torch.ones_like(real), "left": real, "right": real.flip(1)}[kind]


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("kind", ["none", "ones", "left", "right"])
@pytest.mark.parametrize("name", MAKERS)
def test_logits_are_those_of_eager(name, kind, place, ran):
    made, real, ids = model(name, *place), padding(kind), tokens(3, 13)
    ours = outputs(made, "strobe", input_ids=ids, attention_mask=real)
    assert len(ran) == LAYERS and ours.isfinite().all()
    eager = outputs(made, "eager", input_ids=ids, attention_mask=real)
    assert len(ran) == LAYERS
    pick = lambda found: [
        found[row, slice(None) if real is None else real[row].bool().to(found.device)] for row in range(3)
    ]
    agrees(pick(ours), pick(eager), alone(made, ids, real), made.dtype)
    documents = [call.ids_k is not None for call in ran]
    if name in CAUSAL and name != "llama4":  # no row sees the padding behind it
        assert documents == [kind == "left"] * LAYERS


# ---------------------------------------------------------------- sequences packed end to end

LENGTHS = (5, 1, 7)


def packed(ids: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids, "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None].expand(len(ids), -1)}


def offsets() -> dict:
    ends = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 7, "max_length_k": 7}


def parts(found: Tensor) -> list[Tensor]:
    return [part for row in found for part in row.split(LENGTHS)]


def apart(made: nn.Module, ids: Tensor) -> list[Tensor]:
    return [part for row in ids for sequence in row.split(LENGTHS) for part in alone(made, sequence[None])]


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("way", ["positions", "offsets", "two rows"])
@pytest.mark.parametrize("name", CAUSAL)
def test_packed_sequences_are_apart(name, way, place, ran):
    """gpt-oss too, whose eager attention lets them see each other: its error here is that of each sequence alone."""
    made, ids = model(name, *place), tokens(2 if way == "two rows" else 1, 13)
    if name == "llama4" and way == "offsets":
        with pytest.raises(strobe.InvalidProblem, match=r"^cu_seq_lens_q: .*chunks"):
            outputs(made, "strobe", use_cache=False, **packed(ids), **offsets())
        return
    ours = outputs(made, "strobe", use_cache=False, **packed(ids), **(offsets() if way == "offsets" else {}))
    assert [call.packed for call in ran] == [
        way != "two rows" and name != "llama4"
    ] * LAYERS  # whose layers are not shown position_ids
    eager = [
        found
        for row in ids
        for sequence in row.split(LENGTHS)
        for found in outputs(made, "eager", input_ids=sequence[None])
    ]
    agrees(parts(ours), eager, apart(made, ids), made.dtype)
    together = outputs(made, "eager", use_cache=False, **packed(ids))
    gap = max((a - b).abs().max().item() for a, b in zip(parts(together), eager))
    assert (gap > 0.1) == (name == "gpt-oss"), "the premise of this test"


def test_positions_are_read_once_a_forward_and_again_when_they_change(monkeypatch):
    made, inputs, read, reads = model("gpt-oss"), packed(tokens(1, 13)), attention_module._read, []
    monkeypatch.setattr(
        attention_module, "_read", lambda positions, batch: (reads.append(positions), read(positions, batch))[1]
    )
    inputs["position_ids"] = inputs["position_ids"].clone()
    first = outputs(made, "strobe", use_cache=False, **inputs)
    assert len(reads) == 1
    inputs["position_ids"].copy_(torch.arange(13))
    second = outputs(made, "strobe", use_cache=False, **inputs)
    assert len(reads) == 2 and not torch.allclose(first, second)
    assert torch.equal(second, outputs(made, "strobe", input_ids=inputs["input_ids"], use_cache=False))
    with torch.inference_mode():
        positions = packed(tokens(1, 13))["position_ids"].clone()
        first = outputs(made, "strobe", input_ids=inputs["input_ids"], position_ids=positions, use_cache=False)
        positions.copy_(torch.arange(13))
        assert torch.equal(
            second, outputs(made, "strobe", input_ids=inputs["input_ids"], position_ids=positions, use_cache=False)
        )


def test_positions_that_jump_elsewhere_are_one_sequence():
    """Positions of images in a text repeat and jump; only a new start is a new sequence."""
    starts = lambda *positions: attention_module._starts(torch.tensor([positions]))[0].int().tolist()
    assert starts(0, 1, 2, 0, 0, 1) == [1, 0, 0, 1, 1, 0]
    assert starts(4, 5, 4, 5, 6) == [1, 0, 1, 0, 0]
    assert starts(0, 1, 2, 2, 2, 5) == [1, 0, 0, 0, 0, 0]
    assert starts(0, 1, 2, 0, 1, 7) == [1, 0, 0, 0, 0, 0]


class _Reads(TorchDispatchMode):
    """Counts what makes the host wait for a device."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("how", ["left", "packed", "plain"])
def test_layers_wait_for_nothing(how):
    """As many layers as you like: the device is read as often as for one."""
    counts = []
    for layers in (1, 3):
        made = LlamaForCausalLM._from_config(
            LlamaConfig(**_SMALL | {"num_hidden_layers": layers}), attn_implementation="strobe"
        ).eval()
        inputs = {"left": {"attention_mask": padding("left")}, "packed": packed(tokens(3, 13)), "plain": {}}[how]
        inputs = {"input_ids": tokens(3, 13), **inputs}
        with torch.no_grad(), _Reads() as reads:
            made(use_cache=False, **inputs)
        counts.append(reads.count)
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("use_cache", [None, True, False])
def test_packed_positions_beside_a_cache_are_warned_of(use_cache):
    """The model's own default is a cache, whose later steps see the keys of all sequences."""
    made, inputs = model("llama"), packed(tokens(1, 13))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        outputs(made, "strobe", **inputs, **({} if use_cache is None else {"use_cache": use_cache}))
        outputs(made, "strobe", input_ids=inputs["input_ids"], use_cache=True)
    told = [
        str(one.message)
        for one in said
        if issubclass(one.category, UserWarning) and "position_ids: got packed" in str(one.message)
    ]
    assert len(told) == (0 if use_cache is False else LAYERS) and all("use_cache=False" in one for one in told)


# ---------------------------------------------------------------- models that never ask

_TINY = {"vocab_size": VOCABULARY, "hidden_size": 32}
NEVER_ASK = {
    "bloom": (BloomForCausalLM, BloomConfig(**_TINY, n_layer=1, n_head=2)),
    "falcon": (FalconForCausalLM, FalconConfig(**_TINY, num_hidden_layers=1, num_attention_heads=2)),
    "gpt_neo": (
        GPTNeoForCausalLM,
        GPTNeoConfig(
            **_TINY, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]], intermediate_size=32
        ),
    ),
    "mpt": (MptForCausalLM, MptConfig(vocab_size=VOCABULARY, d_model=32, n_heads=2, n_layers=1)),
    "xglm": (
        XGLMForCausalLM,
        XGLMConfig(vocab_size=VOCABULARY, d_model=32, ffn_dim=32, num_layers=1, attention_heads=2),
    ),
    "roformer": (
        RoFormerModel,
        RoFormerConfig(**_TINY, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2),
    ),
    "wavlm": (
        WavLMModel,
        WavLMConfig(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            conv_dim=(8,),
            conv_stride=(4,),
            conv_kernel=(4,),
            num_feat_extract_layers=1,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
        ),
    ),
}


@pytest.mark.parametrize("name", NEVER_ASK)
def test_models_that_never_ask_are_named_and_keep_their_own_attention(name, ran):
    kind, config = NEVER_ASK[name]
    inputs = {"input_values": torch.randn(1, 64)} if name == "wavlm" else {"input_ids": tokens(1, 13)}
    found = {}
    for implementation in ("eager", "strobe"):
        torch.manual_seed(0)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            made = kind._from_config(copy.deepcopy(config), attn_implementation=implementation).eval()
        told = [str(one.message) for one in said if "AttentionInterface" in str(one.message)]
        assert bool(told) == (implementation == "strobe") and all(
            re.search(r'^attn_implementation: got "strobe" for \w+, .+; .+', one) for one in told
        )
        assert not told or kind.__name__ in told[-1]
        with torch.no_grad():
            found[implementation] = made(**inputs)[0]
    assert torch.equal(*found.values()) and not ran and made.config._attn_implementation == "eager"


def test_models_that_ask_are_not_named_and_their_own_code_is_taken_at_its_word():
    assert all(name in integration.register.__doc__ for name in NEVER_ASK)
    integration.register()  # again
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        made = LlamaForCausalLM._from_config(LlamaConfig(**_SMALL), attn_implementation="strobe")
    assert made.config._attn_implementation == "strobe"

    class Own(type(made)):
        """Of no module that can be read."""

    Own.__module__ = "nowhere"
    assert integration._asks(Own)


# ---------------------------------------------------------------- generation


def _generated(made: nn.Module, implementation: str, ids: Tensor, **options) -> Tensor:
    made.set_attn_implementation(implementation)
    return made.generate(
        input_ids=ids.to(made.device),
        do_sample=False,
        max_new_tokens=6,
        min_new_tokens=6,
        pad_token_id=0,
        disable_compile=True,
        **options,
    )


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt-oss"])
def test_generates_what_eager_does(name, cache, place, ran):
    made, ids = model(name, *place), tokens(3, 13)
    options = {"attention_mask": padding("left").to(place[0]), "cache_implementation": cache}
    found = _generated(made, "strobe", ids, **options)
    assert len(ran) == 6 * LAYERS
    if place[1] == torch.float32:  # in bfloat16 the two largest logits may be one number
        assert torch.equal(found, _generated(made, "eager", ids, **options))


def test_a_prompt_in_pieces_is_the_prompt():
    """A second piece sees the keys of the first, in a cache that is not full and in one that slid."""
    for name in ("llama", "gemma3"):
        made, ids = model(name), tokens(2, 12)
        made.set_attn_implementation("strobe")
        whole = outputs(made, "strobe", input_ids=ids)
        for empty in (None, StaticCache(config=made.config, max_cache_len=20)):
            with torch.no_grad():
                first = made(input_ids=ids[:, :7], past_key_values=empty, use_cache=True)
                second = made(input_ids=ids[:, 7:], past_key_values=first.past_key_values, use_cache=True)
            assert torch.allclose(torch.cat([first.logits, second.logits], 1), whole, atol=1e-4)


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3"])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_continuous_batching(name, place, ran):
    """Paged keys of models with windows, one of them with sinks; each request has the tokens it has alone."""
    made = model(name, *place)
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (9, 2, 5)]
    made.set_attn_implementation("strobe")
    settings = GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=-1)
    graphs = (
        None if name == "qwen3" else False
    )  # eager experts look on the host which of them are wanted: no CUDA graph can hold that
    small = ContinuousBatchingConfig(
        page_size=8, num_blocks=24, max_batch_tokens=24, max_requests_per_batch=4, use_cuda_graph=graphs
    )
    with integration.continuous_batching(made):
        found = made.generate_batch(
            inputs=prompts, generation_config=settings, continuous_batching_config=small, progress_bar=False
        )
    assert made.config._attn_implementation == "strobe"
    assert ran and all(call.packed for call in ran) and {call.left for call in ran} == {-1, WINDOW - 1}
    assert [len(request.generated_tokens) for request in found.values()] == [4, 4, 4]
    if place[1] == torch.float32:
        wanted = [
            _generated(made, "eager", torch.tensor([prompt]))[0, len(prompt) : len(prompt) + 4].tolist()
            for prompt in prompts
        ]
        assert [request.generated_tokens for request in found.values()] == wanted


def test_after_continuous_batching_each_part_has_its_own_attention_again():
    config = LlavaConfig(text_config=LlamaConfig(**_SMALL), vision_config=CLIPVisionConfig())
    own = {"": "eager", "text_config": "strobe", "vision_config": "sdpa"}
    config._attn_implementation = own
    seen = lambda: {
        "": config._attn_implementation,
        **{key: getattr(config, key)._attn_implementation for key in ("text_config", "vision_config")},
    }
    with pytest.raises(KeyError), integration.continuous_batching(SimpleNamespace(config=config)):
        assert "flash" in seen().pop("") and len({*seen().values()}) == 1
        raise KeyError
    assert seen() == own


def test_an_encoder_and_its_decoder(ran):
    """Cross attention: rows that no mask hides, keys that one does."""
    small = {
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
    }
    config = BartConfig(
        **small, vocab_size=VOCABULARY, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64, dropout=0.0
    )
    made = BartForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    for parameter in made.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": tokens(3, 13), "attention_mask": padding("right"), "decoder_input_ids": tokens(3, 4)}
    eager = outputs(made, "eager", **inputs)
    ours = outputs(made, "strobe", **inputs)
    assert (
        len(ran) == 3
        and [call.right for call in ran] == [-1, 0, -1]
        and [call.q.shape[1] for call in ran] == [13, 4, 4]
    )
    assert torch.allclose(ours, eager, atol=1e-5) and not torch.allclose(
        ours, outputs(made, "eager", **inputs | {"attention_mask": None}), atol=1e-2
    )
    ids = [
        _generated(made, implementation, inputs["input_ids"], attention_mask=inputs["attention_mask"])
        for implementation in ("eager", "strobe")
    ]
    assert torch.equal(*ids)


# ---------------------------------------------------------------- training


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).double(), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )


def _gradients(made: nn.Module, implementation: str, batches: list[dict]) -> dict[str, Tensor]:
    made.set_attn_implementation(implementation)
    parameters = dict(made.named_parameters())
    with torch.enable_grad():
        loss = sum(
            _loss(made(**{name: value for name, value in batch.items() if name != "labels"}).logits, batch["labels"])
            for batch in batches
        )
        found = torch.autograd.grad(loss, list(parameters.values()))
    return dict(zip(parameters, found))


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("with_offsets", [True, False], ids=["offsets", "positions"])
@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_a_step_of_training_through_the_flattening_collator(name, with_offsets, place, ran):
    """Gradients of the packed batch are the sums of those of its sequences, each alone, sinks included."""
    device, dtype = place
    made = model(name, *place).requires_grad_()
    try:
        sequences = [{"input_ids": tokens(1, n, seed=n)[0].tolist()} for n in LENGTHS]
        batch = DataCollatorWithFlattening(return_flash_attn_kwargs=with_offsets)(sequences)
        ours = _gradients(made, "strobe", [on(device, batch) | {"use_cache": False}])
        assert len(ran) == LAYERS and all(call.packed for call in ran)
        singles = [{"input_ids": torch.tensor([s["input_ids"]], device=device)} for s in sequences]
        singles = [single | {"labels": single["input_ids"]} for single in singles if single["input_ids"].shape[1] > 1]
        eager = _gradients(made, "eager", singles)
        true = _gradients(made.to(torch.float64 if dtype == torch.float32 else torch.float32), "eager", singles)
    finally:
        made.to(dtype).requires_grad_(False)
    assert ("sinks" in "".join(true)) == (name == "gpt-oss")
    scaled = lambda found: [
        found[key] / true[key].abs().max() for key in true
    ]  # one bound for all: the worst of four numbers alone is chance
    agrees(scaled(ours), scaled(eager), scaled(true), dtype)


# ---------------------------------------------------------------- torch.compile


@pytest.mark.nightly_cases("gemma2-offsets", "gpt-oss-positions")
@pytest.mark.parametrize("name, way", [("llama", "left"), ("gpt-oss", "positions"), ("gemma2", "offsets")])
def test_compiles_without_graph_breaks(name, way):
    made = model(name)
    made.set_attn_implementation("strobe")
    if name == "gpt-oss":
        made.set_experts_implementation("grouped_mm")  # the other loops over experts, and breaks the graph
    inputs = {"input_ids": tokens(3, 13), "attention_mask": padding("left")} if way == "left" else packed(tokens(1, 13))
    inputs |= {"use_cache": False} | (offsets() if way == "offsets" else {})
    torch._dynamo.reset()
    seen: list[str] = []

    def backend(graph, examples):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(graph, examples)

    with torch.no_grad():
        found = torch.compile(made, backend=backend, fullgraph=True)(**inputs).logits
        assert sum("strobe" in target for target in seen) == LAYERS
        wanted = made(**inputs).logits
    real = torch.ones(wanted.shape[:2], dtype=torch.bool) if way != "left" else padding("left").bool()
    assert torch.allclose(found[real], wanted[real], atol=1e-5)


def test_a_decoding_step_compiles_once():
    """What generate does with a static cache: masks are made ahead and are inputs of the compiled model."""
    made = model("gemma3")
    made.set_attn_implementation("strobe")
    torch._dynamo.reset()
    count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    ids, real = tokens(2, 5), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    cache = StaticCache(config=made.config, max_cache_len=16)
    compiled = torch.compile(made, backend=count, fullgraph=True)
    with torch.no_grad():
        for step in range(4):
            taken = {
                "input_ids": ids if step == 0 else ids[:, -1:],
                "attention_mask": real,
                "past_key_values": cache,
                "use_cache": True,
            }
            prepared = made.prepare_inputs_for_generation(is_first_iteration=step == 0, **taken)
            logits = (made if step == 0 else compiled)(**prepared).logits[:, -1]
            wanted = outputs(made, "eager", input_ids=ids, attention_mask=real, use_cache=False)[:, -1]
            made.set_attn_implementation("strobe")
            assert torch.allclose(logits, wanted, atol=1e-4)
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
            real = torch.cat([real, torch.ones(2, 1, dtype=torch.long)], 1)
    assert count.frame_count <= 2


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


@pytest.fixture
def asked(monkeypatch):
    """asked(make, **arguments): what transformers asks of a mask function for these arguments of its own maker."""

    def ask(make: str, config, **arguments):
        questions = []
        monkeypatch.setitem(
            masking_utils.AttentionMaskInterface._global_mapping, "strobe", lambda **given: questions.append(given)
        )
        getattr(masking_utils, make)(config=config, **arguments)
        return questions[0]

    return ask


def _cases():
    position_ids = torch.cat([torch.arange(n) for n in LENGTHS])[None].repeat(2, 1)
    holes = torch.ones(2, 13, dtype=torch.long)
    holes[0, 3:5], holes[1, 7], holes[1, 12] = 0, 0, 0
    return {
        "plain": {},
        "ones": {"attention_mask": torch.ones(2, 13, dtype=torch.long)},
        "left": {"attention_mask": padding("left")[:2]},
        "right": {"attention_mask": padding("right")[:2]},
        "holes": {"attention_mask": holes},
        "packed": {"position_ids": position_ids},
        "nothing real": {"attention_mask": torch.tensor([[0] * 13, [1] * 13])},
    }


CAUSAL_MAKERS = ["create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask"]


@pytest.mark.parametrize("case", _cases())
@pytest.mark.parametrize(
    "make", [*CAUSAL_MAKERS, "create_bidirectional_mask", "create_bidirectional_sliding_window_mask"]
)
def test_the_mask_is_the_one_transformers_writes_out(make, case, asked):
    chunked = "chunked" in make
    config = LlamaConfig(
        **_SMALL, attn_implementation="strobe", sliding_window=None if chunked else WINDOW, attention_chunk_size=5
    )
    arguments = {"attention_mask": None, "past_key_values": None, **_cases()[case]}
    if "bidirectional" in make and "position_ids" in arguments:
        pytest.skip("bidirectional masks know no positions")
    question = asked(make, config, inputs_embeds=torch.zeros(2, 13, 1), **arguments)
    ours = _written(question, config)
    theirs = masking_utils.sdpa_mask(
        **question | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    )[:, 0]
    real = (
        torch.ones(2, 13, dtype=torch.bool)
        if arguments["attention_mask"] is None
        else arguments["attention_mask"].bool()
    )
    assert torch.equal(ours[real], theirs[real])
    bidirectional = "bidirectional" in make
    if case != "nothing real" and (bidirectional or case != "right"):
        assert torch.equal(
            ours, theirs
        )  # rows of padding too, but where it is behind all that is real and no row of that sees it


def test_chunks_as_wide_as_the_window_are_still_chunks(asked):
    config = LlamaConfig(**_SMALL, attn_implementation="strobe", sliding_window=WINDOW, attention_chunk_size=WINDOW)
    arguments = {"inputs_embeds": torch.zeros(1, 9, 1), "attention_mask": None, "past_key_values": None}
    for make in ("create_chunked_causal_mask", "create_sliding_window_causal_mask"):
        question = asked(make, config, **arguments)
        theirs = masking_utils.sdpa_mask(**question | {"allow_is_causal_skip": False})[:, 0]
        assert torch.equal(_written(question, config), theirs)


@pytest.mark.parametrize("make", CAUSAL_MAKERS)
@pytest.mark.parametrize("static", [False, True], ids=["grows", "static"])
@pytest.mark.parametrize("pieces", [(5,), (3, 1, 1, 1, 1), (1, 1), (6, 3, 1), (2, 4, 2)], ids=str)
def test_the_mask_over_a_cache(make, static, pieces, asked):
    """Step by step, until the window has slid and the static cache is nearly full."""
    sliding = "sliding" in make
    chunked = "chunked" in make
    kinds = ["sliding_attention" if sliding else "chunked_attention" if chunked else "full_attention"]
    sizes = _SMALL | {
        "num_hidden_layers": 1,
        "sliding_window": WINDOW if sliding else None,
        "attention_chunk_size": 5 if chunked else None,
    }
    config = LlamaConfig(**sizes, attn_implementation="strobe", layer_types=kinds)
    cache = StaticCache(config=config, max_cache_len=12) if static else DynamicCache(config=config)
    total = 0
    for piece in pieces:
        total += piece
        real = torch.ones(2, total, dtype=torch.long)
        real[0, :2] = 0
        for padded in (None, real):
            question = asked(
                make, config, inputs_embeds=torch.zeros(2, piece, 1), attention_mask=padded, past_key_values=cache
            )
            theirs = masking_utils.sdpa_mask(**question | {"allow_is_causal_skip": False})[:, 0]
            rows = torch.ones(2, piece, dtype=torch.bool) if padded is None else padded[:, -piece:].bool()
            assert torch.equal(_written(question, config)[rows], theirs[rows])
        cache.update(torch.zeros(2, 2, piece, 16), torch.zeros(2, 2, piece, 16), 0)


def test_a_mask_of_ones_needs_no_look_at_the_band():
    """The layer reads sizes alone, and they survive what generate does to a mask."""
    for band in Band:
        for final in (False, True):
            tensor = LayerMask(band, 7, None, final).to_tensor(2, 5, "cpu")
            assert tensor.numel() == 0
            assert LayerMask.from_tensor(tensor.contiguous().clone(), 2, 5, 9) == LayerMask(band, 7, None, final)
    hidden = strobe.documents(
        torch.zeros(2, 5, dtype=torch.int32), torch.tensor([[0, 0, 0, -1, 0, 0, -1]] * 2, dtype=torch.int32)
    )
    layer_mask = LayerMask.from_tensor(LayerMask(Band.WINDOW, 7, hidden).to_tensor(2, 5, "cpu").contiguous(), 2, 5, 7)
    assert torch.equal(layer_mask.hidden.dense(5, 7), hidden.dense(5, 7)) and torch.equal(
        layer_mask.hidden.documents.spans_q, hidden.documents.spans_q
    )


def test_what_a_layer_says_counts_where_there_is_no_mask_and_only_there(asked):
    q, k = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    layer = SimpleNamespace(is_causal=True, config=SimpleNamespace(sliding_window=WINDOW))
    run = lambda told, **says: attention_module.attention(layer, q, k, k, told, **says)[0]
    wanted = lambda **band: strobe.attention(*(t.transpose(1, 2) for t in (q, k, k)), **band)
    assert torch.equal(run(None), wanted(causal=True)) and torch.equal(run(None, is_causal=False), wanted())
    assert torch.equal(run(None, sliding_window=3), wanted(causal=True, window=(2, None)))
    assert torch.equal(run(None, sliding_window=3, is_causal=False), wanted(window=(2, 2)))
    config = LlamaConfig(**_SMALL, attn_implementation="strobe", sliding_window=WINDOW)
    arguments = {"inputs_embeds": torch.zeros(1, 9, 1), "attention_mask": None, "past_key_values": None}
    whole, sliding = (mask(**asked(make, config, **arguments)) for make in CAUSAL_MAKERS[:2])
    assert torch.equal(run(whole, sliding_window=3, is_causal=False), wanted(causal=True))
    assert torch.equal(run(sliding), wanted(causal=True, window=(WINDOW - 1, None)))


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("name, entry", [("llama", "attention_dropout"), ("bert", "attention_probs_dropout_prob")])
def test_dropout_is_refused_by_the_name_it_has_in_the_config(name, entry):
    kind, config = MAKERS[name]()
    setattr(config, entry, 0.125)
    made = kind._from_config(config, attn_implementation="strobe")
    with pytest.raises(NotImplementedError, match=rf"^dropout: got 0\.125, expected 0\.0; .*config\.{entry} = 0\.0"):
        made.train()(input_ids=tokens(1, 5))
    made.eval()(input_ids=tokens(1, 5))


@pytest.mark.parametrize("name", ["llama", "gpt-oss", "bert"])
def test_weights_are_refused(name):
    with pytest.raises(NotImplementedError, match=r"^output_attentions: .*eager"):
        model(name).set_attn_implementation("strobe")
        model(name)(input_ids=tokens(1, 5), output_attentions=True)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int32])
def test_a_dense_mask_is_refused(dtype):
    own = torch.ones(3, 1, 13, 13).tril().to(dtype)
    with pytest.raises((NotImplementedError, ValueError), match=r"^attention_mask: "):
        outputs(model("llama"), "strobe", input_ids=tokens(3, 13), attention_mask=own)


def test_patterns_strobe_does_not_have_are_refused(asked):
    config = LlamaConfig(**_SMALL, attn_implementation="strobe")
    blocks = {"block_sequence_ids": torch.tensor([[-1, 0, 0, 0, -1]])}
    own = (
        {"or_mask_function": lambda batch, head, row, key: key == 0},
        {"and_mask_function": lambda batch, head, row, key: key != 1},
    )
    for extra in (blocks, *own):
        for rows in (5, 1):
            cut = {name: value[:, :rows] if isinstance(value, Tensor) else value for name, value in extra.items()}
            question = asked(
                "create_causal_mask",
                config,
                inputs_embeds=torch.zeros(1, rows, 1),
                attention_mask=None,
                past_key_values=None,
                **cut,
            )
            if rows == 1:  # one row may have any
                theirs = masking_utils.sdpa_mask(**question)[:, 0]
                assert torch.equal(_written(question, config), theirs)
                continue
            with pytest.raises(NotImplementedError, match=r"^mask function: .*sdpa"):
                mask(**question)


@pytest.mark.parametrize("name", ["position_bias", "indices", "block_indices", "sinks", "block_table", "head_mask"])
def test_arguments_that_are_not_served_are_refused(name):
    q = torch.zeros(1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match=f"^{name}: "):
        attention_module.attention(nn.Identity(), q, q, q, None, **{name: torch.ones(1)})


def test_offsets_that_contradict_the_rest_are_refused():
    made, ends = model("llama"), offsets()
    with pytest.raises(ValueError, match=r"^cu_seq_lens_q: got a batch of 2"):
        outputs(made, "strobe", input_ids=tokens(2, 13), **ends)
    with pytest.raises(ValueError, match=r"^cu_seq_lens_q: got offsets beside a padding mask"):
        outputs(made, "strobe", input_ids=tokens(1, 13), attention_mask=padding("left")[:1], **ends)


def test_masks_of_other_sizes_are_refused():
    layer_mask = LayerMask(Band.CAUSAL, 7).to_tensor(2, 5, "cpu")
    for batch, rows, keys in ((1, 5, 7), (2, 5, 6), (2, 13, 20)):
        with pytest.raises(ValueError, match=r"^attention_mask: got one for B=2"):
            LayerMask.from_tensor(layer_mask, batch, rows, keys)


def test_a_window_of_no_known_width_is_refused():
    q = torch.zeros(1, 2, 9, 8)
    layer_mask = LayerMask(Band.WINDOW, 9).to_tensor(1, 9, "cpu")
    with pytest.raises(NotImplementedError, match=r"^sliding_window: "):
        attention_module.attention(nn.Identity(), q, q, q, layer_mask)


@pytest.mark.parametrize("found", ["4.57.1", "5.0.0"])
def test_an_old_transformers_is_named(monkeypatch, found):
    monkeypatch.setattr(integration.metadata, "version", lambda name: found)
    with pytest.raises(
        ImportError, match=rf"^transformers: got {re.escape(found)}, expected 5\.\d+ or later; pip install"
    ):
        integration.register()


def test_no_transformers_is_said(monkeypatch):
    def missing(name):
        raise integration.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(integration.metadata, "version", missing)
    with pytest.raises(ImportError, match=r"^transformers: got none, expected .*; pip install"):
        integration.register()


def test_nothing_happens_on_import():
    steps = "import sys, strobe.integrations.transformers; assert 'transformers' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", steps], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_rows_strided_in_the_last_dimension_are_copied():
    q = torch.randn(1, 2, 8, 9).transpose(2, 3)
    layer = SimpleNamespace(is_causal=True)
    found = attention_module.attention(layer, q, q, q, None)[0]
    assert torch.equal(found, attention_module.attention(layer, *(q.contiguous(),) * 3, None)[0])


# ---------------------------------------------------------------- docs/switching.md

ROWS = {
    "padding": [test_logits_are_those_of_eager, test_the_mask_is_the_one_transformers_writes_out],
    "masks in memory": [
        test_the_mask_is_the_one_transformers_writes_out,
        test_a_mask_of_ones_needs_no_look_at_the_band,
    ],
    "windows, chunks": [
        test_what_a_layer_says_counts_where_there_is_no_mask_and_only_there,
        test_chunks_as_wide_as_the_window_are_still_chunks,
    ],
    "softcap, sinks": [test_logits_are_those_of_eager, test_a_step_of_training_through_the_flattening_collator],
    "bidirectional models": [test_logits_are_those_of_eager],
    "encoder and decoder": [test_an_encoder_and_its_decoder],
    "packed by position_ids": [
        test_packed_sequences_are_apart,
        test_positions_are_read_once_a_forward_and_again_when_they_change,
    ],
    "packed by cu_seq_lens": [test_packed_sequences_are_apart, test_offsets_that_contradict_the_rest_are_refused],
    "caches": [test_generates_what_eager_does, test_the_mask_over_a_cache, test_a_prompt_in_pieces_is_the_prompt],
    "continuous batching": [test_continuous_batching],
    "torch.compile": [test_compiles_without_graph_breaks, test_a_decoding_step_compiles_once],
    "training": [test_a_step_of_training_through_the_flattening_collator],
    "dropout": [test_dropout_is_refused_by_the_name_it_has_in_the_config],
    "output_attentions": [test_weights_are_refused],
    "masks of your own": [test_a_dense_mask_is_refused, test_patterns_strobe_does_not_have_are_refused],
    "position bias, chosen keys": [test_arguments_that_are_not_served_are_refused],
    "layers strided in the last dimension": [test_rows_strided_in_the_last_dimension_are_copied],
}


def test_each_row_of_the_page_has_its_tests():
    page = (Path(__file__).parents[2] / "docs" / "switching.md").read_text()
    section = page.partition("## transformers models\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| ([a-z][^|]*) \|", section, re.MULTILINE) == [*ROWS]
