"""Beside an example that is not ours: what its file launches is compiled for a GPU that is not here, and stands in one
table with ours.
"""

import ast
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from strobe.errors import InvalidProblem
from tools.proof import upstream
from tools.proof.record import read
from tools.proof.upstream import CASES, HEADER, OURS, Case, example, line, page, theirs

ROOT = Path(__file__).parents[2]
RECORDED = read(ROOT / upstream.RESULTS)

EXAMPLE = """
import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

HERE = triton.runtime.driver.active.get_current_target().arch, torch.cuda.get_device_capability()


@gluon.jit
def toy_kernel(x, out, n, CAUSAL: gl.constexpr, PROGRAMS: gl.constexpr, WIDTH: gl.constexpr):
    at = gl.program_id(0) * 128 + gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    value = gl.load(x + at)
    if CAUSAL:
        value = gl.exp2(value.to(gl.float32)).to(value.dtype)
    gl.store(out + at + PROGRAMS * WIDTH, value)


def attention_forward(q, k, v, causal, sm_scale):
    out = torch.empty_like(q)
    programs = torch.cuda.get_device_properties("cuda").multi_processor_count
    toy_kernel[(programs,)](q, out, q.shape[2], causal, programs, q.shape[3], num_warps=4)
    return out


def twice(q, k, v, causal, sm_scale):
    attention_forward(q, k, v, causal, sm_scale), attention_forward(q, k, v, causal, sm_scale)


def never(q, k, v, causal, sm_scale):
    pass
"""


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "01-toy-forward.py"
    path.write_text(EXAMPLE)
    return path


def test_the_example_is_imported_and_launched_as_on_the_target(file):
    host = example(file, "attention_forward")
    assert host.__globals__["HERE"] == (100, (10, 0))
    job = theirs(host, Case(64, True, torch.float16))
    assert (job.name, job.grid, job.arguments[2:]) == ("toy_kernel", (148,), (4096, True, 148, 64))
    assert job.arguments[0].shape == (2, 8, 4096, 64) and job.arguments[0].dtype == torch.float16


def test_a_row_names_its_source(file):
    """A Report has a `source`, too: a hash."""
    case = Case(64, True, torch.float16)
    row = upstream.row("a toy", case, theirs(example(file, "attention_forward"), case))
    assert (row["source"], row["case"], row["kernel"]) == ("a toy", "d64 causal float16", "toy_kernel")
    assert row["registers"] > 0 and not {"code", "seconds", "capability"} & row.keys()


def test_no_comprehension_hides_a_function_that_the_same_function_calls():
    """Python 3.12 inlines comprehensions, and 3.11 does not: what both mean must not depend on that."""
    tree = ast.parse(Path(upstream.__file__).read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for name, function in functions.items():
        found = [node for node in ast.walk(function) if isinstance(node, ast.comprehension)]
        bound = {n.id for node in found for n in ast.walk(node.target) if isinstance(n, ast.Name)}
        called = {n.func.id for n in ast.walk(function) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        assert not bound & called & functions.keys(), name


@pytest.mark.nightly
def test_rows_of_both_stand_side_by_side_and_a_second_run_keeps_the_example(file, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(upstream, "CASES", [Case(64, True, torch.bfloat16)])
    results, text = tmp_path / "rows.jsonl", tmp_path / "page.md"
    text.write_text("before\n<!-- upstream: begin -->\nold\n<!-- upstream: end -->\nafter\n")
    assert upstream.main([str(file), "--source", "a toy", "--json", str(results), "--table", str(text)]) == 0
    own, toy = read(results)
    assert (own["source"], toy["source"], own["case"], toy["case"]) == (
        OURS,
        "a toy",
        "d64 causal bfloat16",
        "d64 causal bfloat16",
    )
    assert (own["kernel"], toy["kernel"], own["tensor_columns"], toy["tensor_columns"]) == (
        "forward_kernel",
        "toy_kernel",
        512,
        0,
    )
    assert (
        toy["instructions"]["MUFU.EX2"] > 0
        and toy["roles"] == []
        and len(toy["sha256"]) == 64
        and own["triton"] == toy["triton"]
    )
    assert (
        {"device", "target", "date", "commit", "torch", "python"} <= set(toy)
        and toy["device"] == "none"
        and toy["target"] == "sm_100"
    )
    assert (
        text.read_text() == f"before\n<!-- upstream: begin -->\n\n{page([own, toy])}\n\n<!-- upstream: end -->\nafter\n"
    )
    said = capsys.readouterr().out
    assert "a toy" in said and "softmax" in said and str(line(own)[4]) in said
    results.write_text(json.dumps(own | {"registers": 1}) + "\n" + json.dumps(toy | {"registers": 2}) + "\n")
    assert upstream.main(["--json", str(results)]) == 0
    assert read(results) == [own, toy | {"registers": 2}], "ours is compiled anew, the example stays"


@pytest.mark.parametrize(
    "text, function, words",
    [
        (None, "attention_forward", "PATH: got .*, expected the example's file"),
        (
            "from triton.experimental.gluon import no_such_word",
            "attention_forward",
            "no_such_word.*, expected a file for Triton",
        ),
        (
            "import triton\ntriton.experimental.no_such_word",
            "attention_forward",
            "no_such_word.*, expected a file for Triton",
        ),
        (EXAMPLE, "backward", "--function: got backward, expected a function of"),
        (EXAMPLE, "twice", "--function: got one that launches toy_kernel, toy_kernel, expected a launch of one kernel"),
        (EXAMPLE, "never", "--function: got one that launches none, expected a launch of one kernel"),
    ],
)
def test_what_is_no_such_example_is_refused_in_words(tmp_path, text, function, words):
    path = tmp_path / "file.py"
    if text:
        path.write_text(text)
    with pytest.raises(InvalidProblem, match=words):
        theirs(example(path, function), CASES[0])


def test_the_command_says_what_is_wrong_and_writes_nothing(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        upstream.main([str(tmp_path / "none.py"), "--json", str(tmp_path / "rows.jsonl")])
    assert (
        exit.value.code == 2
        and "expected the example's file" in capsys.readouterr().err
        and not (tmp_path / "rows.jsonl").exists()
    )


def test_the_columns_are_of_the_first_softmax_and_roles_that_are_missing_are_dashes():
    loop = {
        "role": "softmax",
        "total": 9,
        "least": 7,
        "EX2": 1,
        "float": 2,
        "float x2": 3,
        "LDTM": 4,
        "STTM": 5,
        "waits": 6,
        "LDL": 7,
        "STL": 8,
    }
    other = loop | {"total": 20, "least": 20, "EX2": 100, "LDL": 0}
    row = {
        "case": "c",
        "source": "s",
        "registers": 10,
        "spill_store_bytes": 4,
        "spill_load_bytes": 8,
        "shared_bytes": 2048,
    }
    full = line(row | {"roles": [loop, other, loop, {"role": "mma", "total": 3, "least": 3}]})
    assert dict(zip(HEADER, full, strict=True)) == {
        "case": "c", "kernel": "s", "registers": 10, "spills": 12, "shared": "2 KiB", "softmax": "7 to 9, 20",
        "correct": "-", "mma": "3",
        "load": "-", "store": "-", "EX2": 1, "float": 2, "float x2": 3, "LDTM": 4, "STTM": 5, "waits": 6,
        "LDL + STL": 15,
    }  # fmt: skip
    assert line(row | {"roles": []})[5:] == ["-"] * 5 + [0] * 7


# ---------------------------------------------------------------- the record


def test_the_record_has_both_in_every_case_and_the_page_quotes_it():
    assert [row["case"] for row in RECORDED] == [case.name for case in CASES for _ in range(2)]
    assert [row["source"] == OURS for row in RECORDED] == [True, False] * len(CASES)
    text = (ROOT / "docs/blackwell_triton.md").read_text()
    begin, end = "<!-- upstream: begin -->\n\n", "\n\n<!-- upstream: end -->"
    assert text.partition(begin)[2].partition(end)[0] == page(RECORDED)


def test_the_example_spills_what_is_published_of_it():
    """120 bytes stored where nothing is masked, 164 where it is causal."""
    spilled = {row["case"]: row["spill_store_bytes"] for row in RECORDED if row["source"] != OURS}
    assert spilled == {case.name: 164 if case.causal else 120 for case in CASES}


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_our_rows_are_those_of_the_kernel_as_it_is(case):
    (old,) = (row for row in RECORDED if (row["source"], row["case"]) == (OURS, case.name))
    new = upstream.row(OURS, case, upstream.ours(case))
    changing = ("date", "commit", "torch", "python")
    assert {k: v for k, v in new.items() if k not in changing} == {k: v for k, v in old.items() if k not in changing}, (
        "run `python -m tools.proof.upstream --table docs/blackwell_triton.md` and look at what changed"
    )
