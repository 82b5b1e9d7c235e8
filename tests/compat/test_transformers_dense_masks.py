"""Masks of a model's user with four dimensions, position biases and dropout in transformers models on strobe."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor, nn

import strobe

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers")

from transformers import BertConfig, BertModel, LlamaConfig, T5Config, T5ForConditionalGeneration, masking_utils

from strobe.compat import transformers as integration
from strobe.compat.transformers import attention as attention_module
from strobe.compat.transformers import dense_masks
from strobe.compat.transformers.dense_masks import Sizes, dense_mask
from strobe.compat.transformers.masks import mask
from strobe.mods.mask import MaskMod
from tests.compat.transformers_models import _BERT, _SMALL, VOCABULARY, model, outputs, padding, tokens

integration.register()

SIZES = Sizes(3, 4, 13, 13)
LEFT = padding("left")[:, None, None].bool()
LOWER = torch.ones(13, 13, dtype=torch.bool).tril()
PACKED = torch.tensor([0] * 5 + [1] + [2] * 7)
SAME = PACKED[:, None] == PACKED
BUILT_IN = {
    "full": torch.ones(1, 1, 13, 13, dtype=torch.bool),
    "causal": LOWER[None, None],
    "window": (LOWER & ~LOWER.tril(-4))[None, None],
    "both sides": (LOWER.triu(-2) | LOWER.T.tril(2))[None, None],
    "padding": LEFT,
    "padding in each row": LEFT.expand(-1, 1, 13, -1).contiguous(),
    "causal, padding": LOWER & LEFT,
    "window, padding": LOWER.triu(-3) & LEFT,
    "packed": SAME[None, None],
    "packed, causal": (SAME & LOWER)[None, None],
    "packed, causal, padding": SAME & LOWER & padding("right")[:, None, None].bool(),
}
OTHER = {
    "random": torch.rand(3, 1, 13, 13, generator=torch.Generator().manual_seed(0)) < 0.6,
    "by head": torch.rand(1, 4, 13, 13, generator=torch.Generator().manual_seed(1)) < 0.6,
    "causal and the first key's column": (LOWER | (torch.arange(13) == 12))[None, None],
    "a hole": LOWER.index_put((torch.tensor(7), torch.tensor(3)), torch.tensor(False))[None, None],
}


def _added(seen: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """As transformers adds masks to scores."""
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


def _written(found: dense_masks.DenseMask, sizes: Sizes) -> Tensor:
    whole = strobe.full() if found.mask is None else found.mask
    if found.window is not None:
        whole = strobe.window(*found.window) & whole
    options = {"batch": sizes.batch, "heads": sizes.heads} if isinstance(whole, MaskMod) else {}
    dense = whole.dense(sizes.seqlen_q, sizes.seqlen_k, **options)
    return dense if dense.dim() == 4 else dense[:, None]


DISTANCE = torch.arange(13)[:, None] - torch.arange(13)


@pytest.mark.parametrize(
    "seen",
    [DISTANCE >= 1, (DISTANCE >= 2) & (DISTANCE <= 4), (DISTANCE <= -3) & (DISTANCE >= -5)],
    ids=["before the row's key", "two to four keys before", "three to five keys behind"],
)
def test_a_band_that_excludes_the_diagonal_is_no_window(seen):
    q, k, v = torch.randn(3, 1, 4, 13, 16, generator=torch.Generator().manual_seed(2))
    found = attention_module.attention(nn.Identity(), q, k, v, seen[None, None])[0]
    expected = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("added", [False, True], ids=["bool", "added"])
@pytest.mark.parametrize("name", BUILT_IN)
def test_patterns_that_strobe_has_become_built_in_masks(name, added):
    seen = BUILT_IN[name]
    found = dense_mask(_added(seen) if added else seen, SIZES)
    assert found.bias is None and not isinstance(found.mask, MaskMod)
    assert torch.equal(_written(found, SIZES).expand(3, 1, 13, 13), seen.expand(3, 1, 13, 13))


def test_rows_of_a_cache_are_the_last_ones():
    seen = LOWER[None, None, -4:]
    assert dense_mask(seen, SIZES._replace(seqlen_q=4)).window == (None, 0)
    longer = torch.nn.functional.pad(seen, (0, 5))  # places of a static cache
    assert dense_mask(longer, SIZES._replace(seqlen_q=4)).window == (None, 0)


@pytest.mark.parametrize("name", OTHER)
def test_other_patterns_are_read_as_they_are(name):
    found = dense_mask(OTHER[name], SIZES)
    assert isinstance(found.mask, MaskMod) and found.window is None
    assert torch.equal(_written(found, SIZES), OTHER[name].expand(3, 4, 13, 13))


@pytest.mark.parametrize("name", [*BUILT_IN, *OTHER])
def test_logits_are_those_of_eager_with_a_mask_of_ones_own(name):
    seen = {**BUILT_IN, **OTHER}[name]
    seen = seen | torch.eye(13, dtype=torch.bool)  # eager has no rows that see nothing
    ids, made = tokens(3, 13), model("llama")
    eager = outputs(made, "eager", input_ids=ids, attention_mask=_added(seen))
    for given in (seen, _added(seen)):
        ours = outputs(made, "strobe", input_ids=ids, attention_mask=given)
        assert torch.allclose(ours, eager, atol=2e-4, rtol=1e-4)
    whole = outputs(made, "eager", input_ids=ids, attention_mask=torch.zeros(3, 1, 13, 13))
    assert name == "full" or not torch.allclose(eager, whole, atol=1e-2)


def test_numbers_of_a_mask_are_added_to_scores():
    ids, made = tokens(3, 13), model("llama")
    bias = torch.randn(1, 4, 13, 13, generator=torch.Generator().manual_seed(2)) + _added(LOWER)
    ours, eager = (outputs(made, name, input_ids=ids, attention_mask=bias) for name in ("strobe", "eager"))
    assert torch.allclose(ours, eager, atol=2e-4, rtol=1e-4)


def test_a_mask_is_read_once_a_forward_and_again_when_it_changes(monkeypatch):
    read, seen = [], LOWER[None, None].clone()
    original = dense_masks._read
    monkeypatch.setattr(dense_masks, "_read", lambda *given: (read.append(given), original(*given))[1])
    made, ids = model("llama"), tokens(2, 13)
    outputs(made, "strobe", input_ids=ids, attention_mask=seen)
    assert len(read) == 1
    seen[..., 0] = False
    changed = outputs(made, "strobe", input_ids=ids, attention_mask=seen)
    assert len(read) == 2
    assert torch.equal(changed[:, 1:], outputs(made, "strobe", input_ids=ids, attention_mask=seen.clone())[:, 1:])


@pytest.mark.parametrize("shape", [(2, 1, 13, 13), (1, 3, 13, 13), (1, 1, 12, 13), (1, 1, 13, 12)])
def test_masks_of_other_sizes_are_refused(shape):
    with pytest.raises(ValueError, match=r"^attention_mask: got shape \["):
        dense_mask(torch.ones(shape, dtype=torch.bool), SIZES)


def test_a_mask_beside_offsets_is_refused():
    ends, q = torch.tensor([0, 5, 13], dtype=torch.int32), torch.zeros(1, 2, 13, 8)
    with pytest.raises(ValueError, match=r"^cu_seq_lens_q: got offsets beside a mask"):
        attention_module.attention(nn.Identity(), q, q, q, LOWER[None, None], cu_seq_lens_q=ends)


def test_patterns_of_a_mask_function_are_written_as_a_tensor(asked):
    config = LlamaConfig(**_SMALL, attn_implementation="strobe")
    blocks = {"block_sequence_ids": torch.tensor([[-1, 0, 0, 0, -1]])}
    own = (
        {"or_mask_function": lambda batch, head, row, key: key == 0},
        {"and_mask_function": lambda batch, head, row, key: key != 1},
    )
    arguments = {"inputs_embeds": torch.zeros(1, 5, 1), "attention_mask": None, "past_key_values": None}
    for extra in (blocks, *own):
        question = asked("create_causal_mask", config, **arguments, **extra)
        theirs = masking_utils.sdpa_mask(**question)
        ours = mask(**question)
        assert ours.dtype == torch.bool and torch.equal(ours, theirs)
        assert torch.equal(_written(dense_mask(ours, Sizes(1, 4, 5, 5)), Sizes(1, 4, 5, 5))[:, :1], theirs)


# ---------------------------------------------------------------- T5: a learned bias by position


def _t5() -> T5ForConditionalGeneration:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = T5Config(vocab_size=VOCABULARY, **sizes, dropout_rate=0.0, pad_token_id=0, decoder_start_token_id=0)
    made = T5ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, one in made.named_parameters():
            bias = "relative_attention_bias" in name
            one.copy_(torch.randn(one.shape, generator=generator) * (2.0 if bias else 0.4))
    return made


def _t5_inputs() -> dict[str, Tensor]:
    return {"input_ids": tokens(3, 13), "attention_mask": padding("left")}


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_logits_and_gradients_of_t5_are_those_of_eager(mode):
    made, inputs = _t5(), {**_t5_inputs(), "decoder_input_ids": tokens(3, 7, 1), "use_cache": False}
    found = {}
    for implementation in ("eager", "strobe"):
        made.set_attn_implementation(implementation)
        made.zero_grad()
        run = torch.compile(made, backend="aot_eager") if mode == "compiled" and implementation == "strobe" else made
        logits = run(**inputs).logits
        (1000 * logits).square().mean().backward()
        biases = {name: one.grad for name, one in made.named_parameters() if "relative_attention_bias" in name}
        assert len(biases) == 2
        found[implementation] = logits.detach(), *biases.values()
    for ours, eager in zip(found["strobe"], found["eager"]):
        assert eager.abs().max() > 1e-3
        assert (ours - eager).abs().max() <= 1e-4 * eager.abs().max()


@pytest.mark.parametrize("cache", [None, "static"])
def test_t5_generates_what_eager_does(cache):
    made, ids = _t5(), []
    options = {"cache_implementation": cache} if cache else {}
    for implementation in ("eager", "strobe"):
        made.set_attn_implementation(implementation)
        ids.append(made.generate(**_t5_inputs(), max_new_tokens=6, do_sample=False, **options))
    assert torch.equal(*ids) and len(ids[0].unique()) > 3


def test_a_position_bias_beside_offsets_is_refused():
    ends, q = torch.tensor([0, 5, 13], dtype=torch.int32), torch.zeros(1, 2, 13, 8)
    bias = torch.zeros(1, 2, 13, 13)
    with pytest.raises(NotImplementedError, match=r"^position_bias: got one beside cu_seq_lens_q"):
        attention_module.attention(nn.Identity(), q, q, q, None, cu_seq_lens_q=ends, position_bias=bias)


# ---------------------------------------------------------------- torch.compile


def test_a_mask_compiles_without_graph_breaks():
    made, ids = model("llama"), tokens(2, 13)
    made.set_attn_implementation("strobe")
    for given in (OTHER["a hole"], _added(LOWER[None, None])):
        run = lambda mask: made(input_ids=ids, attention_mask=mask)[0]
        compiled = torch.compile(run, backend="eager", fullgraph=True)
        with torch.no_grad():
            assert torch.allclose(compiled(given), run(given), atol=1e-5)


# ---------------------------------------------------------------- dropout


def test_dropout_is_strobes():
    generator = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(2, 4, 13, 8, generator=generator) for _ in range(3))
    rows = [t.transpose(1, 2) for t in (q, k, v)]
    for given in (None, OTHER["a hole"]):
        options = {"causal": True} if given is None else {"mask": strobe.mask_mod(given)}
        torch.manual_seed(7)
        wanted = strobe.attention(*rows, dropout_p=0.25, **options)
        torch.manual_seed(7)
        found = attention_module.attention(nn.Identity(), q, k, v, given, dropout=0.25)[0]
        assert torch.equal(found, wanted)
        assert not torch.allclose(found, strobe.attention(*rows, **options))


def test_a_model_drops_weights_while_it_trains_and_only_then():
    config = BertConfig(**_BERT, attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.0)
    made = BertModel._from_config(config, attn_implementation="strobe")
    ids = tokens(2, 13)
    evaluated = made.eval()(input_ids=ids)[0]
    made.train()
    first, second = (made(input_ids=ids)[0] for _ in range(2))
    assert not torch.allclose(first, second, atol=1e-3) and torch.equal(made.eval()(input_ids=ids)[0], evaluated)
    first.sum().backward()
    gradients = [one.grad for name, one in made.named_parameters() if "query" in name]
    assert gradients and all(one is not None and one.isfinite().all() for one in gradients)
