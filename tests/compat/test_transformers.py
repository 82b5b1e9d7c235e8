"""transformers models on strobe: tiny random ones, against their own eager attention, and that it was strobe that
ran."""

from __future__ import annotations

import copy
import os
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import strobe

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers")

from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BloomConfig,
    BloomForCausalLM,
    CLIPVisionConfig,
    DataCollatorWithFlattening,
    FalconConfig,
    FalconForCausalLM,
    GenerationConfig,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    MptConfig,
    MptForCausalLM,
    RoFormerConfig,
    RoFormerModel,
    StaticCache,
    WavLMConfig,
    WavLMModel,
    XGLMConfig,
    XGLMForCausalLM,
)
from transformers.generation import ContinuousBatchingConfig

from strobe.compat import transformers as integration
from strobe.compat.transformers import attention as attention_module
from tests.compat.transformers_models import (
    _SMALL,
    CAUSAL,
    LAYERS,
    LENGTHS,
    MAKERS,
    VOCABULARY,
    WINDOW,
    model,
    offsets,
    on,
    outputs,
    padding,
    tokens,
)

integration.register()


PLACES = [("cpu", torch.float32), pytest.param(("cuda", torch.bfloat16), marks=pytest.mark.gpu)]


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


def packed(ids: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids, "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None].expand(len(ids), -1)}


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


@pytest.mark.parametrize(
    "positions",
    [[0, 1, 2, 10, 11, 12], [0, 1, 2, 3, 4, 5], [5, 6, 7, 0, 1, 2], [5, 6, 7, 5, 6, 7]],
    ids=str,
)
def test_rows_beside_a_packed_row_keep_their_own_sequences(positions):
    made, rows = model("llama"), torch.tensor([[0, 1, 2, 0, 1, 2], positions])
    given = {"input_ids": tokens(2, 6), "position_ids": rows, "use_cache": False}
    assert torch.allclose(outputs(made, "strobe", **given), outputs(made, "eager", **given), atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_a_sequence_may_begin_at_0_after_one_that_does_not(name):
    made, ids, positions = model(name), tokens(1, 6), torch.tensor([[5, 6, 7, 0, 1, 2]])
    together = outputs(made, "strobe", input_ids=ids, position_ids=positions, use_cache=False)
    for part in (slice(0, 3), slice(3, 6)):
        own = outputs(made, "eager", input_ids=ids[:, part], position_ids=positions[:, part], use_cache=False)
        assert torch.allclose(together[:, part], own, atol=1e-5)


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
    assert starts(4, 5, 6, 0, 1, 4) == [1, 0, 0, 1, 0, 1]
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
        page_size=8,
        num_blocks=24,
        max_batch_tokens=24,
        max_requests_per_batch=4,
        max_blocks_per_request=0,
        use_cuda_graph=graphs,
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
