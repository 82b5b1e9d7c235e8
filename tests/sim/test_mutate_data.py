"""Mutants that change data, and what is said of them."""

import pytest

from strobe.sim.command import run as command
from strobe.sim.mutate_data import data_mutants

SOURCE = """
import triton
import triton.language as tl

@triton.jit
def copied_kernel(x, out, n, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at % (2 * SIZE), tl.load(x + at, mask=at < n, other=0.0), mask=at < n)

def copied(x, out):
    copied_kernel[(2,)](x, out, len(x), 64)
"""


def test_every_kind_of_change():
    assert sorted((m.kind, m.line) for m in data_mutants(SOURCE, 99, 0)) == [
        ("drop mask", 8), ("drop mask", 8), ("ring + 1", 8), ("shift pointer", 8), ("shift pointer", 8),
    ]  # fmt: skip
    (ring,) = (m for m in data_mutants(SOURCE, 99, 0) if m.kind == "ring + 1")
    assert "at % ((2 * SIZE + 1))" in ring.source


def test_index_of_a_ring():
    source = "@gluon.jit\ndef kernel(ring, i):\n    return ring.index(i % 2)\n"
    assert [(m.kind, m.source.splitlines()[2].strip()) for m in data_mutants(source, 9, 0)] == [
        ("ring + 1", "return ring.index(i % (2 + 1))"),
        ("shift index", "return ring.index((i % 2) + 1)"),
    ]


@pytest.mark.parametrize("count", [0, 2, 5])
def test_a_seed_draws_the_same(count):
    draws = [[str(m) + m.source for m in data_mutants(SOURCE, count, seed)] for seed in (1, 1, 2)]
    assert len(draws[0]) == count and draws[0] == draws[1]


def test_the_command_runs_them_and_prints_the_seed(tmp_path, capsys):
    (tmp_path / "copied.py").write_text(SOURCE)
    scene = [f"{tmp_path}/copied.py::copied", "f32[100]", "zeros:f32[100]"]
    assert command([*scene, "--mutate", "--data-mutants", "9", "--seed", "3"]) == 1  # `% 129` changes nothing
    printed = capsys.readouterr().out
    assert "5 mutants, 4 noticed" in printed and "drawn by seed 3" in printed
    assert printed.count("bounds") >= 4


def test_the_option_needs_mutate(tmp_path, capsys):
    (tmp_path / "copied.py").write_text(SOURCE)
    assert command([f"{tmp_path}/copied.py::copied", "f32[9]", "f32[9]", "--data-mutants", "9"]) == 2
    assert "--data-mutants: needs --mutate" in capsys.readouterr().err
