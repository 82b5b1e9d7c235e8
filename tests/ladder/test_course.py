"""The lessons of the ladder: their lines are in the files, their gains in the rows, and their faults are found."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from ladder.harness import FILES, RUNGS, course, harness, pages

ROOT = Path(__file__).parents[2]
ROWS = pages.read(ROOT / pages.RESULTS)


@pytest.mark.parametrize("name", RUNGS)
def test_a_lesson_shows_about_twenty_lines_of_its_file(name):
    lines = [line for line in course.lines_that_matter(name).split("\n")[1:-2] if line.strip()]
    code = [line.strip() for line in lines if not line.startswith("#")]
    assert 8 <= len(code) <= 26
    assert set(code) <= {line.strip() for line in (ROOT / "ladder" / f"{FILES[name]}.py").read_text().splitlines()}


@pytest.mark.parametrize("name", RUNGS)
def test_a_lesson_says_what_is_new_in_few_words_and_has_one_exercise(name):
    lesson = course.LESSONS[name]
    assert len(lesson.new.split()) <= 60 and lesson.new.endswith(".")
    assert re.search(r"[.?]$", lesson.exercise) and not re.search(r"[.?] [A-Z]", lesson.exercise), "one sentence"


def test_every_rung_has_a_lesson_in_the_order_of_the_course():
    assert tuple(course.LESSONS) == RUNGS


def test_an_excerpt_ends_where_its_last_call_ends_and_begins_behind_a_line():
    line = course.Lines("attend", "s = warpgroup_mma_wait", "s = warpgroup_mma_wait", after="for i in range(1")
    assert course.excerpt("k7", line).split("\n")[-1] == ")" and "deps=[" in course.excerpt("k7", line)
    with pytest.raises(ValueError, match="beginning of a line"):
        course.excerpt("k7", course.Lines("attend", "no such line"))


def _row(rung: str, tflops: float, day: int, **rest) -> dict:
    facts = {"device": "NVIDIA H200: sm_90", "date": f"2026-11-{day}T00:00:00+00:00", "options": {}, "ms": 1.0}
    return facts | {"rung": rung, "head_dim": 64, "causal": False, "seqlen_k": 8192, "tflops": tflops} | rest


def test_a_gain_compares_rows_of_one_process_where_there_is_one():
    rows = [_row("k5", 400.0, 11), _row("k6", 500.0, 11), _row("k6", 900.0, 12), _row("k5", 1.0, 11, options={"a": 1})]
    (gain,) = course.gains(rows, "k6", "k5")
    assert (gain.below, gain.own, gain.together) == (400.0, 500.0, True) and gain.ratio == 1.25
    assert "| 64 | dense | 400 | 500 | 1.25 |" in course.gain_table([gain], "k6", "k5")
    (gain,) = course.gains([_row("k5", 400.0, 11), _row("k6", 900.0, 12), _row("k6", 800.0, 10)], "k6", "k5")
    assert (gain.own, gain.together) == (900.0, False)
    assert "| 2.25 * |" in course.gain_table([gain], "k6", "k5")
    assert course.gains([_row("k6", 900.0, 12)], "k6", "k5") == [] and course.gain_table([], "k6", "k5") == ""


@pytest.mark.parametrize("name", RUNGS)
def test_a_page_teaches_first_and_documents_then(name):
    rung = harness.load(name)
    page = pages.section(rung, ROWS, f"{name}.svg")
    heads = re.findall(r"^## (.*)$", page, re.MULTILINE)
    assert heads == [
        "What is new", "The lines that matter", "Timeline", "Measured gain", "What limits it", "Exercise",
        "The idea and its costs", f"The difference from {rung.below}" if rung.below else "The kernels", "All figures",
    ]  # fmt: skip
    assert f"]({name}.svg)" in page and "## Timeline" not in pages.section(rung, ROWS)
    assert ("| gain |" in page) is bool(rung.below and not rung.queries)
    assert "Nothing measured yet" in pages.section(rung, [])


ATTEND = "        o = o * gl.convert_layout(rescale, gl.SliceLayout(1, o_layout))[:, None]\n        o = outer"
EXERCISES = {  # rung: what its exercise deletes or replaces, by what, and what is reported
    "k2": (ATTEND, "        o = outer", "'out': "),
    "a": ("cp_async_wait(2)  # K has landed; its V", "cp_async_wait(3)  #", "race: on k_smem"),
    "k3_1": ("    fence_async_shared()\n    partition_barrier()", "    partition_barrier()", "fence: on k_smem"),
    "k3_2": ("        parity = gl.where(last, parity ^ 1, parity)\n", "", "race: on k_smem"),
    "k5": ("k = (k_smem, barriers(STAGES, 1), barriers(STAGES, CONSUMERS))",
           "k = (k_smem, barriers(STAGES, 1), barriers(STAGES, 1))", "barrier: "),
    "k6_2": ("            p, rescale, row_max, row_sum = rescale_outgrown(p, part, rescale, row_max, row_sum)\n",
             "            pass\n", "right"),
}  # fmt: skip


@pytest.mark.nightly_cases("k2", "k3_1", "k3_2", "k5", "k6_2")
@pytest.mark.parametrize("name", EXERCISES)
def test_the_change_of_an_exercise_has_the_outcome_it_promises(name, tmp_path):
    old, new, told = EXERCISES[name]
    shutil.copytree(ROOT / "ladder", tmp_path / "ladder")
    file = tmp_path / "ladder" / f"{FILES[name]}.py"
    assert file.read_text().count(old) == 1
    file.write_text(file.read_text().replace(old, new))
    places = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT / "src")))}
    command = [sys.executable, "-m", "ladder", name, "--head-dim", "64", "--no-causal", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, env=places, cwd=tmp_path)
    assert done.returncode == (0 if told == "right" else 1)
    assert told in done.stdout + done.stderr
