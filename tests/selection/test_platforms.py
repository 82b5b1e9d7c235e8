"""The table of devices in docs/install.md is what the selection answers, device by device."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import torch

import strobe
from strobe.kernels import protocol
from strobe.problem.append import AppendCall, AppendProblem
from strobe.problem.call import Call
from strobe.problem.decode import DecodeCall, DecodeProblem
from strobe.problem.problem import Problem
from strobe.problem.target import FAKES, KIB, Target
from strobe.selection.select import select

PAGE = Path(__file__).parents[2] / "docs" / "install.md"
COLUMNS = ("forward", "backward", "decode", "append")


@cache
def _rows() -> dict[str, list[str]]:
    """device: the cells behind it."""
    section = PAGE.read_text(encoding="utf-8").split("## Devices")[1].split("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return {
        device: cells
        for names, *cells in lines
        if len(cells) == 5 and names not in ("device", "---")
        for device in names.split(" (")[0].split(", ")  # names of cards follow in parentheses
    }


def _target(device: str) -> Target:
    if device == "CPU":
        return FAKES["CPU"]
    if device.startswith("sm_"):
        capability = int(device[3:])
        return next(
            (fake for fake in FAKES.values() if fake.capability == capability),
            Target("a GPU", "cuda", capability, 80, 99 * KIB, 0.0, 0.0),
        )
    kind = device.lower()
    return Target("AMD Instinct MI250X" if kind == "rocm" else kind, kind, 0, 100, 0, 0.0, 0.0)


def _answers(target: Target) -> list[str]:
    """The kernel of each column, or the refusal."""
    q = torch.empty(1, 1024, 8, 128, dtype=torch.bfloat16)
    lengths = torch.zeros(1, dtype=torch.int32)
    attention = Problem.from_call(Call(q, q, q, right=0, needs_grad=True))
    problems = [
        (attention, "forward"),
        (attention, "backward"),
        (DecodeProblem.from_call(DecodeCall(q[:, :1], q, q.clone(), lengths, right=0)), "forward"),
        (
            AppendProblem.from_call(AppendCall.of(strobe.DenseCache(q, q.clone(), lengths), q[:, :1], q[:, :1], None)),
            "forward",
        ),
    ]
    found = []
    for problem, direction in problems:
        try:
            found.append(getattr(select(problem, target), direction).kernel.name)
        except strobe.UnsupportedProblem as refused:
            found.append(str(refused))
    return found


@pytest.mark.parametrize("device", _rows())
def test_the_table_is_what_is_answered(device):
    *kernels, tried = _rows()[device]
    answers = _answers(_target(device))
    if not tried.startswith("refused: "):
        assert answers == kernels
        return
    assert kernels == ["none"] * len(COLUMNS)
    (words,) = re.findall(r"`(.+)`", tried)
    assert all(words in answer and "kernel can run this here" in answer for answer in answers)


def test_every_device_that_is_known_by_name_has_a_row():
    known = {"CPU" if fake.kind == "cpu" else f"sm_{fake.capability}" for fake in FAKES.values()}
    assert known | {"sm_70", "sm_75", "ROCm", "MPS", "XPU"} <= set(_rows())
    assert {device for device, row in _rows().items() if row[-1] == "not compiled here"} == {
        "sm_87",
        "sm_110",
        "sm_121",
    }


@pytest.mark.parametrize(("device", "kind"), [("mps", "mps"), ("xpu", "xpu"), ("cpu", "cpu")])
def test_a_device_of_torch_is_a_target_of_its_kind(device, kind):
    assert Target.of(torch.device(device)).kind == kind


@pytest.mark.parametrize(
    ("platform", "remedy"), [("linux", "pip install triton"), ("win32", "use WSL"), ("darwin", "published for Linux")]
)
def test_where_there_is_no_triton_the_remedy_is_the_systems(monkeypatch, platform, remedy):
    monkeypatch.setattr(protocol.sys, "platform", platform)
    monkeypatch.setattr(protocol, "find_spec", lambda name: None)
    protocol.no_triton.cache_clear()
    try:
        assert all(remedy in answer for answer in _answers(FAKES["RTX 4090"]))
    finally:
        protocol.no_triton.cache_clear()


def test_cpu_kernels_run_on_other_systems_too():
    """Nothing that runs there imports what Linux alone has."""
    source = Path(strobe.__file__).parent
    files = [*source.glob("*.py"), *(source / "kernels").glob("*.py"), *(source / "kernels" / "cpu").glob("*.py")]
    for file in files:
        assert not re.search(
            r"^\s*(import|from) (fcntl|resource|pwd|grp|termios)\b", file.read_text(encoding="utf-8"), re.MULTILINE
        ), file
