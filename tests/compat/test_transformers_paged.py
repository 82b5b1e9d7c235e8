"""Continuous batching that decodes over pages: the tokens of transformers' own attention, with windows and without, and
keys that are never gathered.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import cache as cb_cache
from transformers.generation.continuous_batching.cache_allocators import (
    FullAttentionCacheAllocator,
    SlidingAttentionCacheAllocator,
)

import strobe
from strobe.compat import transformers as integration
from strobe.compat.transformers import paged
from tests.compat.transformers_models import WINDOW, model, tokens

PLACES = [("cpu", torch.float32), pytest.param(("cuda", torch.bfloat16), marks=pytest.mark.gpu)]
LENGTHS, NEW = (9, 2, 5, 17), 14  # rings of WINDOW keys turn over several times
MODELS = ("llama", "qwen3", "gpt-oss", "gemma3")  # no window, windows, windows and sinks, both kinds and softmax scale


def generate(made, name: str | None, **options) -> list[list[int]]:
    """The tokens of generate_batch; by strobe's attention for None."""
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in LENGTHS]
    settings = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=-1)
    small = ContinuousBatchingConfig(
        page_size=8, num_blocks=48, max_batch_tokens=32, max_requests_per_batch=4, use_cuda_graph=False, **options
    )
    run = lambda: made.generate_batch(
        inputs=prompts, generation_config=settings, continuous_batching_config=small, progress_bar=False
    )
    if name is None:
        with integration.continuous_batching(made):
            found = run()
    else:
        made.set_attn_implementation(name)
        found = run()
    return [request.generated_tokens for request in found.values()]


@pytest.fixture
def steps(monkeypatch) -> dict[str, int]:
    """How often layers decoded over pages, and how often keys were gathered."""
    counts = {"paged": 0, "gathered": 0}

    def counted(kind, name, key):
        run = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *given: (counts.update({key: counts[key] + 1}), run(*given))[1])

    counted(paged, "decode", "paged")
    for kind in (FullAttentionCacheAllocator, SlidingAttentionCacheAllocator):
        counted(kind, "update", "gathered")
    return counts


@pytest.mark.nightly_cases("*cpu*-qwen3")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_tokens_are_those_of_transformers_own_attention(name, place, steps):
    """Each decode step runs over pages: keys are gathered in the steps that hold a prompt, and in no other."""
    made = model(name, *place)
    found = generate(made, None)
    layers = made.config.num_hidden_layers
    assert steps["paged"] >= (NEW - 4) * layers > 0
    assert steps["gathered"] <= 4 * layers
    assert [len(one) for one in found] == [NEW] * len(LENGTHS) and strobe.last_errors() == []
    if place[1] == torch.float32:
        assert name == "gpt-oss" or found == generate(made, "sdpa")  # which transformers refuses sinks
        assert found == generate(made, "paged|eager")
    before = dict(steps)
    assert generate(made, None, max_blocks_per_request=0) == found or place[1] != torch.float32
    assert steps["paged"] == before["paged"] and steps["gathered"] > before["gathered"]


def test_the_patches_end_with_the_block():
    sliding = SlidingAttentionCacheAllocator.layer_type
    with integration.continuous_batching(model("llama")):
        assert cb_cache.ATTN_TYPE_TO_ALLOCATOR[sliding] is paged.RingCacheAllocator
    assert cb_cache.ATTN_TYPE_TO_ALLOCATOR[sliding] is SlidingAttentionCacheAllocator


def test_the_slot_of_a_new_key():
    """Of two requests in pages of 4, and of a row of padding."""
    table = torch.tensor([[5, 2, -1], [7, -1, -1]], dtype=torch.int32)
    assert paged._slots(torch.tensor([6, 3, 0]), table, 4).tolist() == [2 * 4 + 2, 7 * 4 + 3, -1]
    assert paged._slots(torch.tensor([9, 3]), table, 4)[0] < 0  # its page is missing
    assert WINDOW < NEW
