"""`make nightly`: tests that passed are recorded one by one and left out of the next run, until a file changes."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from tools.nightly import __main__ as nightly
from tools.nightly.plugin import Progress
from tools.nightly.records import RECORDS, Line, append, read, tree_of

pytest_plugins = ["pytester"]


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No plugins but those that are named: processes that tests start would import all of them."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(nightly.__file__).parents[2]))
    monkeypatch.delenv("MENDED", raising=False)


FILE = """
    import os, pytest

    def test_passes():
        sum(range(2_000_000))

    @pytest.mark.parametrize("value", ["a b", "é"])
    def test_cases(value):
        pass

    def test_fails():
        assert os.environ.get("MENDED")

    def test_skipped():
        pytest.skip("not here")

    @pytest.mark.xfail(strict=True)
    def test_known():
        assert False

    @pytest.fixture
    def broken():
        yield
        assert os.environ.get("MENDED")

    def test_teardown(broken):
        pass
"""
PASSED = {"test_passes", "test_cases[a b]", "test_cases[\\xe9]", "test_known"}


@pytest.fixture
def start(pytester, monkeypatch):
    """start(*arguments): pytest with the plugin, in a folder with FILE; returns its result and all records."""
    monkeypatch.chdir(pytester.path)
    pytester.makepyfile(FILE)
    records = pytester.path / "records.jsonl"

    def run(*arguments: str):
        plugin = ["-p", "tools.nightly.plugin", "-p", "no:cacheprovider"]
        result = pytester.runpytest_inprocess(*plugin, f"--nightly-records={records}", *arguments)
        return result, read([records])

    return run


def _by_outcome(lines: list[Line]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for line in lines:
        found.setdefault(line.outcome, set()).add(line.test.partition("::")[2])
    return found


ALL = {"passed": PASSED, "failed": {"test_fails", "test_teardown"}, "skipped": {"test_skipped"}}


@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n", "2")], ids=["alone", "xdist"])
def test_what_passed_is_left_out_of_the_next_run(start, pytester, monkeypatch, workers):
    result, lines = start(*workers)
    assert result.ret == 1 and _by_outcome(lines) == ALL and len(lines) == 7
    tree = tree_of(pytester.path)
    assert {line.tree for line in lines} == {tree.whole} and all("cores" in line.machine for line in lines)
    assert next(line.cpu_s for line in lines if line.test.endswith("test_passes")) > 0.01
    monkeypatch.setenv("MENDED", "1")
    _, again = start(*workers)
    assert _by_outcome(again[7:]) == {"passed": {"test_fails", "test_teardown"}, "skipped": {"test_skipped"}}
    counts = nightly.row(again, tree, [])
    assert (counts["passed"], counts["failed"], counts["skipped"], counts["passed_after_a_failure"]) == (6, 0, 1, 2)


def test_a_changed_tree_runs_all_again_and_another_machines_records_count(start, pytester, tmp_path):
    _, lines = start()
    pytester.makepyprojecttoml("")
    _, changed = start()
    assert _by_outcome(lines) == ALL
    assert _by_outcome(changed[len(lines) :]) == ALL
    pytester.makepyprojecttoml("# changed again")
    elsewhere, tree = tmp_path / "elsewhere.jsonl", tree_of(pytester.path).whole
    for line in changed[len(lines) :]:
        append(elsewhere, line._replace(tree=tree, outcome="passed", machine="32 cores"))
    result, found = start(f"--nightly-read={elsewhere}")
    assert len(found) == len(changed) and result.ret == pytest.ExitCode.NO_TESTS_COLLECTED


def test_a_killed_run_keeps_what_had_ended(pytester, monkeypatch):
    monkeypatch.chdir(pytester.path)
    pytester.makepyfile("import os\ndef test_a(): pass\ndef test_b():\n    os.environ.get('MENDED') or os._exit(9)")
    records = pytester.path / "records.jsonl"
    command = [sys.executable, "-m", "pytest", "-p", "tools.nightly.plugin", f"--nightly-records={records}"]
    assert pytester.run(*command).ret == 9
    assert [line.test for line in read([records])] == ["test_a_killed_run_keeps_what_had_ended.py::test_a"]
    records.write_text(records.read_text() + '{"tree": "t", "test": "half of a li')
    monkeypatch.setenv("MENDED", "1")
    assert pytester.run(*command).ret == 0
    assert [line.test.partition("::")[2] for line in read([records])] == ["test_a", "test_b"]


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The command in a folder with one file of two tests and two small steps."""
    for name in ("src", "tests"):
        (tmp_path / name).mkdir()
    (tmp_path / "tests/test_it.py").write_text(
        "import os, pytest\npytestmark = pytest.mark.nightly\ndef test_a(): sum(range(9_000_000))\n"
        "def test_b(): assert os.environ.get('MENDED')\n"
    )
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['nightly', 'gpu']\n")
    steps = {"tests": nightly.Suite(("tests",)), "drift": (sys.executable, "-c", "open('drift', 'a').write('x')")}
    monkeypatch.setattr(nightly, "STEPS", steps)
    monkeypatch.setattr(nightly, "circumstances", lambda: {"commit": "abc"})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_goes_on_and_writes_one_row(small, monkeypatch, capsys):
    results = small / "results/nightly.jsonl"
    assert nightly.main(["--jobs", "1", "--step", "tests"]) == 1
    without_drift = json.loads(results.read_text())
    assert (without_drift["passed"], without_drift["failed"], without_drift["drift"]) == (1, 1, None)
    monkeypatch.setenv("MENDED", "1")
    assert nightly.main(["--jobs", "1", "--step", "tests", "--", "-k", "test_a"]) == 1  # test_b has not passed
    assert nightly.main(["--jobs", "1"]) == 0
    (row,) = [json.loads(text) for text in results.read_text().splitlines()]
    assert (row["passed"], row["failed"], row["passed_after_a_failure"], row["drift"]) == (2, 0, 1, "passed")
    assert row["commit"] == "abc" and row["cpu_s"] > 0 and (small / "drift").read_text() == "x"
    ran = Counter(line.test.partition("::")[2] for line in read([small / RECORDS]))
    assert ran == {"test_a": 1, "test_b": 2, "": 1}
    (small / "src/new.py").write_text("")
    monkeypatch.delenv("MENDED")
    assert nightly.main(["--jobs", "1"]) == 1
    assert [json.loads(text)["failed"] for text in results.read_text().splitlines()] == [0, 1]


def test_a_run_that_is_stopped_writes_no_row(small):
    (small / "tests/test_it.py").write_text("import pytest, time\n@pytest.mark.nightly\ndef test_a(): time.sleep(60)\n")
    assert nightly.main(["--jobs", "1", "--minutes", "0.01"]) == 1
    assert not (small / "results").exists() and [line.test for line in read([small / RECORDS])] == ["drift"]


def test_records_of_other_files_are_refused(small, capsys):
    other = small / "other.jsonl"
    append(other, Line("another", "tests/test_it.py::test_a", "passed", 1.0, "32 cores"))
    with pytest.raises(SystemExit):
        nightly.main(["--read", str(other)])
    assert f"--read: got {other}, expected outcomes of the files that are here" in capsys.readouterr().err


def test_a_tree_is_its_paths_and_contents(small):
    before = tree_of(small)
    (small / "src/__pycache__").mkdir()
    (small / "src/__pycache__/a.pyc").write_text("built")
    (small / "results").mkdir()
    (small / "results/rows.jsonl").write_text("measured")
    assert tree_of(small) == before
    (small / "src/a.py").write_text("one")
    first = tree_of(small)
    (small / "src/a.py").rename(small / "src/b.py")
    assert len({tree.whole for tree in (before, first, tree_of(small))}) == 3
    assert len({tree.of("tests/test_it.py::test_a") for tree in (before, first, tree_of(small))}) == 3


@pytest.mark.parametrize(
    "changed, runs_again",
    [
        ("tests/test_alone.py", {"alone"}),
        ("tests/test_user.py", {"user"}),
        ("tests/test_used.py", {"used", "user"}),  # test_user imports it
        ("tests/test_of_suites.py", {"alone", "user", "used", "of_suites"}),  # a tool runs it
        ("tests/calls.py", {"alone", "user", "used", "of_suites"}),
    ],
)
def test_a_changed_test_file_concerns_its_tests_and_those_of_files_that_name_it(tmp_path, changed, runs_again):
    for path, text in {
        "tests/calls.py": "",
        "tests/test_alone.py": "",
        "tests/test_used.py": "",
        "tests/test_user.py": "from tests.test_used import something",
        "tests/test_of_suites.py": "",
        "tools/suites.py": "SUITES = ['tests/test_of_suites.py']",
    }.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    before = tree_of(tmp_path)
    with (tmp_path / changed).open("a") as file:
        file.write("\n")
    after = tree_of(tmp_path)
    ids = {name: f"tests/test_{name}.py::test_a" for name in ("alone", "user", "used", "of_suites")}
    assert {name for name, test in ids.items() if before.of(test) != after.of(test)} == runs_again
    assert before.whole != after.whole


def test_a_mended_test_file_runs_alone(small):
    (small / "tests/test_other.py").write_text("import pytest\n@pytest.mark.nightly\ndef test_c(): pass\n")
    assert nightly.main(["--jobs", "1", "--step", "tests"]) == 1
    file = small / "tests/test_it.py"
    file.write_text(file.read_text().replace("os.environ.get('MENDED')", "True"))
    assert nightly.main(["--jobs", "1", "--step", "tests"]) == 0
    ran = Counter(line.test.partition("::")[2] for line in read([small / RECORDS]))
    assert ran == {"test_a": 2, "test_b": 2, "test_c": 1}
    (row,) = [json.loads(text) for text in (small / "results/nightly.jsonl").read_text().splitlines()][1:]
    assert (row["passed"], row["failed"], row["passed_after_a_failure"]) == (3, 0, 0)


def test_time_left_follows_what_tests_took_before(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    progress = Progress({"long": 90.0, "short": 10.0})
    progress.begin(["long", "short", "new"])  # the new one is expected to take 50 s
    clock[0] = 120.0
    progress.advance(Line("t", "short", "failed", 10.0, "2 cores"))
    assert capsys.readouterr().err == "FAILED short\n1 of 3 tests (33 %), 1 failed, 28 min left\n"
    progress.advance(Line("t", "long", "passed", 90.0, "2 cores"))
    assert capsys.readouterr().err == ""  # a minute has not passed since
