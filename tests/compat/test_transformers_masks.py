"""The mask function of transformers models on strobe, against the masks that transformers writes out."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

import strobe

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers")

from transformers import (
    DynamicCache,
    LlamaConfig,
    StaticCache,
    masking_utils,
)

from strobe.compat import transformers as integration
from strobe.compat.transformers import attention as attention_module
from strobe.compat.transformers.layer_mask import Band, LayerMask
from strobe.compat.transformers.masks import mask
from tests.compat.transformers_models import _SMALL, LENGTHS, WINDOW, _written, padding

integration.register()


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
