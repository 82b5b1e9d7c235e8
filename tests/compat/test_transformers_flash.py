"""transformers' own flash attention code on strobe: attn_implementation="flash_attention_2", 3 and 4 by
`strobe.integrations.flash_attn.install`.

transformers admits these names only where it sees a CUDA device; then it runs models on a CPU too. So on a machine
without one a process of its own is told that there is one, and runs all of transformers' code and strobe's CPU kernels.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
import torch

from strobe.integrations import flash_attn

pytest.importorskip("transformers")

PROGRAM = """
import json, os, sys
os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
import torch
import transformers.utils.import_utils as asked
asked.is_torch_cuda_available = lambda: True
version = sys.argv[1]
from strobe.integrations import flash_attn
flash_attn.install(int(version))
from strobe.ops import attention as ops
from transformers import Gemma2Config, LlamaConfig, MistralConfig
from transformers import Gemma2ForCausalLM, LlamaForCausalLM, MistralForCausalLM

SMALL = dict(
    vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=None, dtype=torch.float32,
)
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SMALL)),
    "mistral": (MistralForCausalLM, MistralConfig(**SMALL, sliding_window=4)),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config(
        **SMALL, sliding_window=4, layer_types=["sliding_attention", "full_attention"],
        attn_logit_softcapping=2.0, query_pre_attn_scalar=16,
    )),
}
LENGTHS, calls, run = (5, 1, 7), [], ops.run
ops.run = lambda *given, **more: (calls.append(1), run(*given, **more))[1]
ends = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
real = torch.ones(3, 13, dtype=torch.long)
real[0, :5], real[2, :9] = 0, 0
found = {}
for name, (kind, config) in MODELS.items():
    model = kind._from_config(config, attn_implementation=f"flash_attention_{version}").eval()
    for parameter in model.parameters():
        matrix = parameter.dim() > 1
        seeded = torch.Generator().manual_seed(parameter.numel())
        torch.nn.init.normal_(parameter, 0.0 if matrix else 1.0, 0.2 if matrix else 0.5, generator=seeded)
    model.float()
    ids = torch.randint(3, 97, (3, 13), generator=torch.Generator().manual_seed(1))
    row, positions = ids[:1], torch.cat([torch.arange(n) for n in LENGTHS])[None]
    offsets = dict(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=7, max_length_k=7)
    generate = dict(do_sample=False, max_new_tokens=4, min_new_tokens=4, disable_compile=True)

    def outputs():
        logits = lambda **given: model(**given).logits.detach()
        yield "plain", logits(input_ids=ids)
        for side, mask in (("left", real), ("right", real.flip(1))):
            yield side, logits(input_ids=ids, attention_mask=mask)[mask.bool()]
        alone = lambda: torch.cat([logits(input_ids=part) for part in row.split(LENGTHS, 1)], 1)
        flash = "flash" in model.config._attn_implementation
        packed = dict(input_ids=row, position_ids=positions, use_cache=False)
        yield "packed by positions", logits(**packed) if flash else alone()
        yield "packed by offsets", logits(**packed, **offsets) if flash else alone()
        for rows, mask in ((row, None), (ids, real)):
            yield f"generated, {len(rows)}", model.generate(rows, attention_mask=mask, **generate)[:, 13:].float()
        loss = model(input_ids=ids, attention_mask=real).logits[real.bool()].square().sum()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        yield "gradients", torch.cat([g.flatten() / g.abs().max() for g in gradients])

    ours, count = dict(outputs()), len(calls)
    model.set_attn_implementation("eager")
    theirs = dict(outputs())
    assert count and len(calls) == count, "strobe ran under flash attention, and there alone"
    found[name] = {what: ((ours[what] - theirs[what]).abs().max() / theirs[what].abs().max()).item() for what in ours}
print(json.dumps(found))
"""
WHATS = [
    "plain",
    "left",
    "right",
    "packed by positions",
    "packed by offsets",
    "generated, 1",
    "generated, 3",
    "gradients",
]


@pytest.mark.parametrize("version", [2, *(pytest.param(version, marks=pytest.mark.nightly) for version in (3, 4))])
def test_transformers_flash_code_on_strobe_is_its_eager(version):
    """Largest errors, of float32 models, in units of the largest number; generated tokens are the same."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(version)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, errors in json.loads(done.stdout.splitlines()[-1]).items():
        assert list(errors) == WHATS
        for what, error in errors.items():
            assert error <= (0 if "generated" in what else 1e-3 if what == "gradients" else 1e-4), (name, what, error)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a CUDA device is what is asked about")
def test_without_a_cuda_device_transformers_refuses_the_name():
    """So there attn_implementation="strobe" is the way, as the page says."""
    program = """
        import os
        os.environ["TRANSFORMERS_VERBOSITY"] = "error"
        from strobe.integrations import flash_attn
        flash_attn.install()
        from transformers import LlamaConfig, LlamaForCausalLM
        sizes = dict(vocab_size=9, hidden_size=8, intermediate_size=8)
        config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=1)
        try:
            LlamaForCausalLM._from_config(config, attn_implementation="flash_attention_2")
        except (ImportError, ValueError) as error:
            print("refused", type(error).__name__)
    """
    done = subprocess.run(
        [sys.executable, "-c", "import textwrap\n" + f"exec(textwrap.dedent({program!r}))"],
        capture_output=True,
        text=True,
    )
    assert "refused" in done.stdout, done.stdout + done.stderr[-2000:]


def test_installing_after_transformers_has_looked_makes_it_look_again():
    program = """
import transformers.utils.import_utils as asked
asked.is_torch_cuda_available = lambda: True
from strobe.integrations import flash_attn
answers = [asked.is_flash_attn_2_available()]
with flash_attn.install():
    answers.append(asked.is_flash_attn_2_available())
    answers.append(asked.is_flash_attn_greater_or_equal("2.8.0"))
answers.append(asked.is_flash_attn_2_available())
print(answers)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["[False, True, True, False]"], done.stdout + done.stderr[-2000:]


def test_installing_updates_the_distributions_that_older_transformers_read_at_import(monkeypatch):
    """transformers 5.17 keeps them in a dict, and finds FlashAttention-3 and 4 there alone."""
    asked = ModuleType("transformers.utils.import_utils")
    known = vars(asked).setdefault("PACKAGE_DISTRIBUTION_MAPPING", metadata.packages_distributions())
    monkeypatch.setitem(sys.modules, asked.__name__, asked)
    with flash_attn.install(3):
        assert known.get("flash_attn_interface") == ["flash-attn-3"]
    assert "flash_attn_interface" not in known


def test_the_page_says_how():
    page = (Path(__file__).parents[2] / "docs" / "switching.md").read_text()
    assert "from strobe.integrations import flash_attn" in page and 'attn_implementation="flash_attention_2"' in page
