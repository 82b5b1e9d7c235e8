"""`strobe sim` through strobe.cli.main.main, and the pytest fixture `simulate`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from strobe.cli.main import main

DOUBLING = Path(__file__).with_name("doubling.py")
TILE = ["f32[16,32]", "nan:f32[16,32]"]
DOUBLE = [f"{DOUBLING}::double", *TILE]
RACE = ("    mbarrier.wait(ready, 0)\n", "")


@pytest.fixture
def changed(tmp_path):
    """changed(old, new): doubling.py with other text, under a name of its own."""

    def write(old: str, new: str) -> Path:
        file = tmp_path / "changed_doubling.py"
        text = DOUBLING.read_text()
        assert text.count(old) == 1
        file.write_text(text.replace(old, new))
        return file

    yield write
    sys.modules.pop("changed_doubling", None)


@pytest.fixture
def sim(capsys):
    """sim(*arguments): (exit code, standard output, standard error)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main(["sim", *map(str, arguments)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


# ---------------------------------------------------------------- one run


def test_a_clean_scene_smoke(sim):
    assert sim(*DOUBLE) == (0, "4 runs, 0 findings\n", "")
    assert sim(*DOUBLE, "--mode", "pct", "--seeds", 3)[1] == "3 runs, 0 findings\n"


def test_options_may_come_first(sim):
    assert sim("--mode", "eager", "--target", "sm_100", *DOUBLE) == (0, "1 run, 0 findings\n", "")


def test_a_kernel_on_a_grid(sim):
    kernel = f"{DOUBLING}::add_one_kernel"
    arguments = ["f32[1000]", "nan:f32[1000]", 1000, 128]
    assert sim(kernel, *arguments, "--grid", "8", "--target", "sm_80")[:2] == (0, "4 runs, 0 findings\n")
    assert sim(kernel, *arguments[:3], "BLOCK=128", "--grid", "8,1", "--num-warps", "1")[0] == 0
    code, out, _ = sim(kernel, *arguments[:2], 1001, 128, "--grid", "8", "--mode", "eager")
    load, store, end = out.splitlines()
    assert (
        code == 1
        and load.startswith("- bounds: global load leaves x")
        and store.startswith("- bounds: global store leaves y")
    )
    assert "doubling.py:" in load and end == "1 run, 2 findings", "two faults of one line are two findings"


def test_faults_are_told_once_each(sim, changed):
    code, out, err = sim(f"{changed(*RACE)}::double", *TILE)
    assert (code, err) == (1, "")
    assert (
        out.count("- race: on tile: load of tile") == 1
        and "changed_doubling.py:32 double_kernel" in out
        and "4 runs, " in out.splitlines()[-1]
    )


def test_json(sim, changed):
    code, out, _ = sim(*DOUBLE, "--json")
    told = json.loads(out)
    assert (
        code == 0
        and told["runs"] == 4
        and told["reports"] == []
        and told["stats"]["ctas"] == 4
        and told["stats"]["accesses"] > 0
    )
    code, out, _ = sim(f"{changed(*RACE)}::double", *TILE, "--json", "--mode", "pct")
    told = json.loads(out)
    assert code == 1 and told["runs"] == 1 and "race" in {report["kind"] for report in told["reports"]}
    assert all(report.keys() == {"kind", "text", "where", "count"} for report in told["reports"])


@pytest.mark.parametrize("suffix, begin", [("svg", "<svg"), ("html", "<!doctype html>"), ("json", "{")])
def test_a_timeline(sim, tmp_path, suffix, begin):
    picture = tmp_path / f"run.{suffix}"
    code, out, _ = sim(*DOUBLE, "--timeline", picture, "--mode", "eager")
    text = picture.read_text()
    assert code == 0 and out == f"1 run, 0 findings; timeline in {picture}\n"
    assert text.lower().startswith(begin) and "TMA load" in text and "doubling.py::double on sm_90" in text
    if suffix == "json":
        assert json.loads(text)["traceEvents"]


# ---------------------------------------------------------------- mutants


def test_mutate(sim):
    code, out, _ = sim(*DOUBLE, "--mutate")
    assert code == 0 and "mbarrier.wait(ready, 0)" in out and "8 mutants, 8 noticed (happens-before 8)" in out
    assert sim("mutate", *DOUBLE)[0] == code  # the same, as a word
    code, out, _ = sim(*DOUBLE, "--mutate", "--judges", "--json")
    rows = json.loads(out)["mutants"]
    assert code == 0 and len(rows) == 8
    line = DOUBLING.read_text().splitlines().index("    mbarrier.wait(ready, 0)") + 1
    place = {"kind": "drop wait", "line": line, "function": "double_kernel", "text": "mbarrier.wait(ready, 0)"}
    assert place | {"plain run": "", "schedules": "wrong result", "happens-before": "race"} in rows


def test_mutate_with_survivors_and_a_ledger(sim, tmp_path):
    scene = [f"{DOUBLING}::double_carefully", *TILE, "--mutate"]
    ledger = tmp_path / "survivors.json"
    entry = {"kind": "drop fence", "function": "double_kernel", "text": "fence_async_shared()"}
    why = lambda *numbers: {
        "doubling.py::double_carefully": [
            entry | {"number": str(n), "why": "one of the two is enough"} for n in numbers
        ]
    }
    assert sim(*scene)[0] == 1, "survivors, and no ledger"
    for numbers, code, words in (
        ((1, 2), 0, ""),
        (
            (1,),
            1,
            "survives without a reason in the ledger: drop fence in double_kernel: fence_async_shared() (number 2)",
        ),
        (
            (1, 2, 3),
            1,
            "in the ledger, but noticed or gone: drop fence in double_kernel: fence_async_shared() (number 3)",
        ),
    ):
        ledger.write_text(json.dumps(why(*numbers)))
        found = sim(*scene, "--ledger", ledger)
        assert found[0] == code and words in found[1] and found[1].count("(number ") == bool(words)
    told = json.loads(sim(*scene, "--ledger", ledger, "--json")[1])
    assert told["unexplained"] == [] and len(told["stale"]) == 1


def test_mutate_another_file_than_the_scene(sim, tmp_path):
    scene = tmp_path / "scene_apart.py"
    scene.write_text("from tests.sim import doubling\n\ndef run(x, y):\n    doubling.double(x, y)\n")
    code, out, _ = sim(f"{scene}::run", *TILE, "--mutate", "--file", DOUBLING)
    assert code == 0 and "8 mutants, 8 noticed" in out
    del sys.modules["scene_apart"]


# ---------------------------------------------------------------- what cannot be carried out


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["kernels.py::run"], "got 'kernels.py::run', expected FILE::NAME with an existing file"),
        ([f"{DOUBLING}::triple"], "doubling.py has no triple; it has"),
        ([f"{DOUBLING}::double", "f32[16,32]"], "double takes (x, y)"),
        ([f"{DOUBLING}::double", "f33[16,32]", "1"], "got 'f33' in 'f33[16,32]', expected one of bf16"),
        ([DOUBLE[0], "tma:f32[]", "1"], "got 'tma:f32[]', expected at least one dimension"),
        ([DOUBLE[0], "f32[9999999999999]", "1"], "got 'f32[9999999999999]', expected a tensor that fits in memory"),
        ([DOUBLE[0], "nan:f32[99999999999999999999]", "1"], "expected a tensor that fits in memory"),
        (
            [*DOUBLE, "--timeline", "run.png"],
            "--timeline: got run.png, expected a name that ends in .html, .svg, .json",
        ),
        ([*DOUBLE, "--ledger", "x.json"], "--ledger: needs --mutate"),
        ([*DOUBLE, "--mutate", "--ledger", "none.json"], "--ledger: got none.json, expected a JSON file"),
        ([*DOUBLE, "--mutate", "--timeline", "x.svg"], "--timeline: mutants have no timeline"),
        ([*DOUBLE, "--mutate", "--file", "none.py"], "--file: got none.py, expected a Python file that exists"),
    ],
)
def test_what_cannot_run(sim, arguments, words):
    code, out, err = sim(*arguments)
    assert (code, out) == (2, "") and err.startswith("strobe sim: ") and words in err and "Traceback" not in err


def test_mutants_of_a_faulty_kernel(sim, changed):
    code, out, err = sim(f"{changed(*RACE)}::double", *TILE, "--mutate")
    assert (code, out) == (2, "") and "the unchanged kernel has faults" in err and "race: on tile" in err


def test_an_error_of_the_kernel_shows_where(sim, changed):
    code, out, err = sim(f"{changed('mbarrier.wait(ready, 0)', 'mbarrier.wait(redy, 0)')}::double", *TILE)
    assert (
        (code, out) == (2, "")
        and "NameError: redy" in err
        and "changed_doubling.py" in err
        and "line 32, in double_kernel" in err
    )


def test_a_target_that_is_none(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["sim", *DOUBLE, "--target", "sm_75"])
    assert ended.value.code == 2 and "--target: invalid choice: 'sm_75'" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["x", "0", "1,2,3,4", "-1", "1,"])
def test_a_grid_that_is_none(given, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["sim", f"{DOUBLING}::add_one_kernel", f"--grid={given}"])
    assert (
        ended.value.code == 2
        and f"--grid: got '{given}', expected one to three positive sizes" in capsys.readouterr().err
    )


@pytest.mark.parametrize("option", ["--seeds", "--sms", "--num-warps"])
@pytest.mark.parametrize("given", ["0", "-2", "x", "1.5"])
def test_a_count_of_none(option, given, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["sim", *DOUBLE, f"{option}={given}"])
    assert ended.value.code == 2 and f"{option}: got '{given}', expected a whole number >= 1" in capsys.readouterr().err


@pytest.mark.parametrize("given", [str(2**64), str(-(2**63) - 1), "x"])
def test_a_seed_that_no_generator_takes(given, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["sim", *DOUBLE, f"--seed={given}"])
    assert (
        ended.value.code == 2
        and f"--seed: got '{given}', expected a whole number of 64 bits" in capsys.readouterr().err
    )


def test_what_a_run_would_stumble_over_is_said_before(capsys, tmp_path):
    assert main(["sim", *DOUBLE, "--timeline", str(tmp_path / "none" / "a.html")]) == 2
    assert "--timeline" in capsys.readouterr().err
    assert main(["sim", *DOUBLE, "--num-warps", "3"]) == 2
    assert "--num-warps: got 3, expected a power of two" in capsys.readouterr().err


def test_help(capsys):
    for asked in (["sim", "--help"], ["sim", "-h"]):
        with pytest.raises(SystemExit) as ended:
            main(asked)
        said = capsys.readouterr().out
        assert (
            ended.value.code == 0
            and said.startswith("usage: strobe sim")
            and "strobe sim kernels.py::run bf16[64,64] --mutate" in said
        )
        for option in (
            "--target",
            "--mode",
            "--seeds",
            "--sms",
            "--grid",
            "--timeline",
            "--mutate",
            "--judges",
            "--ledger",
            "--json",
        ):
            assert option in said
    with pytest.raises(SystemExit) as ended:
        main(["sim"])
    assert ended.value.code == 2 and "FILE::NAME" in capsys.readouterr().err


# ---------------------------------------------------------------- the fixture

FIXTURE_TESTS = """
import sys

import pytest
import torch

sys.path.insert(0, {folder!r})
from changed_doubling import double as racy
from doubling import double

def run(function):
    x, y = torch.ones(16, 32), torch.full((16, 32), float("nan"))
    function(x, y)
    return y

def test_clean(simulate):
    with simulate("sm_90", mode="pct", seed=1) as run_:
        y = run(double)
    assert run_.reports == [] and (y == 2).all()

def test_racy(simulate):
    with simulate("sm_90", mode="lazy"):
        run(racy)

def test_racy_and_wrong(simulate):
    with simulate("sm_90", mode="lazy"):
        assert (run(racy) == 2).all()

def test_racy_on_purpose(simulate):
    with simulate("sm_90", mode="lazy", check=False) as run_:
        run(racy)
    assert "race" in {{report.kind for report in run_.reports}}

def test_own_error(simulate):
    with pytest.raises(KeyError), simulate("sm_90"):
        raise KeyError
"""


def test_the_fixture_fails_a_test_with_the_reports(changed, tmp_path):
    changed(*RACE)
    file = tmp_path / "test_fixture.py"
    file.write_text(FIXTURE_TESTS.format(folder=str(DOUBLING.parent)))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "strobe.sim.plugin",
        "-p",
        "no:cacheprovider",
        "-v",
        "--no-header",
        str(file),
    ]
    alone = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "OMP_NUM_THREADS": "1"}
    said = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=alone, timeout=120).stdout
    verdicts = {
        line.split("::")[1].split()[0]: line.split()[1] for line in said.splitlines() if "::" in line and "%]" in line
    }
    assert verdicts == {
        "test_clean": "PASSED",
        "test_racy": "FAILED",
        "test_racy_and_wrong": "FAILED",
        "test_racy_on_purpose": "PASSED",
        "test_own_error": "PASSED",
    }, said
    assert (
        said.count("race: on tile: load of tile by main") >= 2
        and "changed_doubling.py:32" in said
        and "the simulator found" in said
    )
    assert "and then AssertionError" in said and "Traceback" not in said and "launch.py" not in said


def test_loading_the_plugin_needs_no_triton():
    code = "import sys, strobe.sim.plugin; print(sorted({'triton', 'greenlet', 'numba'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout == "[]\n"


def test_installing_strobe_gives_pytest_the_plugin():
    project = DOUBLING.parents[2] / "pyproject.toml"
    assert '[project.entry-points.pytest11]\nstrobe-sim = "strobe.sim.plugin"' in project.read_text()


# ---------------------------------------------------------------- files that end the process


@pytest.mark.parametrize("code", ["", "0", "3", "'no GPU'"])
def test_a_file_that_exits_while_it_is_imported(sim, tmp_path, code):
    file = tmp_path / "script.py"
    file.write_text(f"import sys\ndef run(): ...\nsys.exit({code})\n")
    ended, out, err = sim(f"{file}::run")
    assert (ended, out) == (2, "") and err.startswith(
        f"strobe sim: {file} cannot be imported: it calls sys.exit({code or None})"
    )
    assert '`if __name__ == "__main__":`' in err


def test_a_function_that_exits(sim, tmp_path):
    file = tmp_path / "leaves.py"
    file.write_text("import sys\ndef run(): sys.exit(0)\n")
    ended, out, err = sim(f"{file}::run")
    assert (ended, out) == (2, "") and "ended the process with sys.exit(0); have it return" in err
