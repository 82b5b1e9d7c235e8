"""What transformers models on strobe refuse, and which of transformers' releases are named as too old."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers")

from transformers import (
    LlamaConfig,
    masking_utils,
)

from strobe.compat import transformers as integration
from strobe.compat.transformers import attention as attention_module
from strobe.compat.transformers.layer_mask import Band, LayerMask
from tests.compat.transformers_models import _SMALL, _written, model, offsets, outputs, padding, tokens

integration.register()


@pytest.mark.parametrize("name", ["llama", "gpt-oss", "bert"])
def test_weights_are_refused(name):
    with pytest.raises(NotImplementedError, match=r"^output_attentions: .*eager"):
        model(name).set_attn_implementation("strobe")
        model(name)(input_ids=tokens(1, 5), output_attentions=True)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_mask_of_integers_is_refused(dtype):
    own = torch.ones(3, 1, 13, 13).tril().to(dtype)
    with pytest.raises((NotImplementedError, ValueError), match=r"^attention_mask: "):
        outputs(model("llama"), "strobe", input_ids=tokens(3, 13), attention_mask=own)


def test_one_row_of_any_pattern_is_no_tensor_of_rows_and_keys(asked):
    config = LlamaConfig(**_SMALL, attn_implementation="strobe")
    for own in ({"or_mask_function": lambda b, h, row, key: key == 0}, {"block_sequence_ids": torch.tensor([[-1]])}):
        arguments = {"inputs_embeds": torch.zeros(1, 1, 1), "attention_mask": None, "past_key_values": None}
        question = asked("create_causal_mask", config, **arguments, **own)
        assert torch.equal(_written(question, config), masking_utils.sdpa_mask(**question)[:, 0])


@pytest.mark.parametrize("name", ["indices", "block_indices", "sinks", "block_table", "head_mask"])
def test_arguments_that_are_not_served_are_refused(name):
    q = torch.zeros(1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match=f"^{name}: "):
        attention_module.attention(nn.Identity(), q, q, q, None, **{name: torch.ones(1)})


def test_a_position_bias_over_pages_is_refused():
    q, pages = torch.zeros(1, 2, 3, 8), torch.zeros(1, 4, 2, 8)
    over_pages = {"block_table": torch.zeros(3, 1, dtype=torch.int32), "k_cache": pages, "v_cache": pages}
    with pytest.raises(NotImplementedError, match=r"^position_bias: got one beside block_table"):
        attention_module.attention(nn.Identity(), q, q, q, None, position_bias=torch.zeros(1, 2, 3, 4), **over_pages)


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
