"""Drift is seen: every way in which another version can break a test ends in a row with a reason."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("xdist")

from tools.proof import drift

HERE = """
import os
import pytest

def test_works(): pass

def test_lacks_a_word(): os.no_such_word

@pytest.mark.skip(reason="not here")
def test_skipped(): pass

def test_crashes(): os.abort()

def test_has_a_cause():
    try:
        raise KeyError("the cause")
    except KeyError as error:
        raise ValueError("at 24:4:") from error

class CompilationError(Exception): pass

def test_quotes_its_source():
    raise CompilationError("at 2:4:\\n    x = tl.word()\\n        ^\\nno such word")
"""


def _asked(tmp_path: Path, monkeypatch, text: str) -> dict[str, str]:
    file = tmp_path / "each.py"
    file.write_text(text)
    monkeypatch.setattr(
        drift, "SUITES", {"sample": (str(file), "-c", "/dev/null"), "absent": (str(tmp_path / "nothing.py"),)}
    )
    return {row["test"].removeprefix("each::"): row["error"] for row in drift.ask(Path(sys.executable), "9.9.9")}


@pytest.mark.nightly  # as is what it tests; two processes of pytest take 10 s
def test_failures_and_crashes_are_told_apart_test_by_test(tmp_path, monkeypatch):
    found = _asked(tmp_path, monkeypatch, HERE)
    assert found.keys() == {
        "test_works",
        "test_lacks_a_word",
        "test_crashes",
        "test_has_a_cause",
        "test_quotes_its_source",
    }
    assert found["test_works"] == ""
    assert found["test_lacks_a_word"] == "AttributeError: module 'os' has no attribute 'no_such_word'"
    assert "crashed" in found["test_crashes"]
    assert found["test_has_a_cause"] == "KeyError: 'the cause'"
    assert found["test_quotes_its_source"] == "no such word"


@pytest.mark.nightly  # as is what it tests; two processes of pytest take 10 s
def test_a_file_that_cannot_be_read_in_is_seen(tmp_path, monkeypatch):
    (error,) = _asked(tmp_path, monkeypatch, "from os import no_such_word\n").values()
    assert error.startswith("ImportError: cannot import name 'no_such_word' from 'os'")


def test_only_what_is_known_is_forgiven(monkeypatch):
    rows = [
        {"triton": "3.9.0", "suite": "kernels", "test": test, "error": error}
        for test, error in (("a", "KeyError: 1"), ("b", ""))
    ]
    assert drift.unknown(rows) == rows[:1]
    monkeypatch.setattr(drift, "KNOWN", (drift.Known("3.9.*", "a", "KeyError*", "renamed"),))
    assert drift.unknown(rows) == []
    monkeypatch.setattr(drift, "KNOWN", (drift.Known("3.9.*", "a", "TypeError*", "another error"),))
    assert drift.unknown(rows) == rows[:1]


@pytest.mark.parametrize("error, code", [("", 0), ("KeyError: 1", 1)])
def test_the_exit_code_says_whether_something_new_broke(tmp_path, monkeypatch, capsys, error, code):
    monkeypatch.setattr(drift, "environment", lambda version: Path(sys.executable))
    monkeypatch.setattr(
        drift, "ask", lambda python, version: [{"triton": version, "suite": "kernels", "test": "a", "error": error}]
    )
    results = tmp_path / "drift.jsonl"
    assert drift.main(["--triton", "3.7.1", "--triton", "3.9.0", "--results", str(results)]) == code
    told = capsys.readouterr().out
    assert len(results.read_text().splitlines()) == 2
    assert ("3.7.1: ok  3.9.0: ok" if not error else "3.7.1: 1  3.9.0: 1\n1 KeyError: 1") in told


def test_a_suite_without_an_end_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(drift, "LONGEST_S", 0.01)
    assert _asked(tmp_path, monkeypatch, HERE) == {"sample": "no end after 0.01 s"}


def test_pytest_that_cannot_run_is_seen(tmp_path, monkeypatch):
    file = tmp_path / "each.py"
    file.write_text(HERE)
    monkeypatch.setattr(drift, "SUITES", {"sample": (str(file), "--no-such-flag")})
    (row,) = drift.ask(Path(sys.executable), "9.9.9")
    assert row["test"] == "sample" and row["error"]


def test_an_empty_run_is_no_success(tmp_path, monkeypatch):
    monkeypatch.setattr(drift, "environment", lambda version: Path(sys.executable))
    monkeypatch.setattr(drift, "SUITES", {"absent": (str(tmp_path / "nothing.py"),)})
    assert drift.main(["--results", str(tmp_path / "drift.jsonl")]) == 1
