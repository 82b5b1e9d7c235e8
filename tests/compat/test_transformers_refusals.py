"""What transformers models on strobe refuse, and which of transformers' releases are named as too old."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

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
from strobe.compat.transformers.masks import mask
from tests.compat.transformers_models import _SMALL, MAKERS, _written, model, offsets, outputs, padding, tokens

integration.register()


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
