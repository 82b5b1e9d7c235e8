"""The mutation ledger is exact: every survivor has its reason, every reason its survivor. And the command that says so,
on a small kernel.
"""

import json
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from strobe.errors import InvalidProblem
from strobe.sim import simulate
from tools.proof import mutate, mutation_workers
from tools.proof.mutate import RESULTS, SUITES, Suite, main, merged, read, score, table
from tools.proof.pages import fill

BEGIN, END = "<!-- mutation: begin -->", "<!-- mutation: end -->"

ROOT = Path(__file__).parents[2]
QUICK = ("ampere_matmul", "hopper_matmul")
SUITES_HERE = [Suite(ROOT / scenes, ROOT / ledger) for scenes, ledger in SUITES]
CASES = [
    pytest.param(suite, scene, id=scene.name, marks=() if scene.name in QUICK else pytest.mark.nightly)
    for suite in SUITES_HERE
    for scene in suite.all()
]


@pytest.mark.parametrize("suite, scene", CASES)
def test_survivors_are_those_of_the_ledger(suite, scene):
    """And the recorded score is still that of the sources."""
    row, faults = score(suite, scene, all_detectors=False)
    assert faults == []
    recorded = next(
        known
        for known in read(ROOT / RESULTS)
        if (ROOT / known["scenes"], known["scene"]) == (suite.scenes, scene.name)
    )
    same = ("mutants", "noticed", "explained", "target", "file")
    same += () if scene.name in QUICK else ("sources",)
    assert {name: row[name] for name in same} == {name: recorded.get(name) for name in same}, (
        "python -m tools.proof.mutate --stale measures it again"
    )


def test_the_ledger_is_of_these_scenes_and_gives_reasons():
    for suite in SUITES_HERE:
        assert suite.strays() == []
        for name, entries in json.loads(suite.ledger.read_text()).items():
            for entry in entries:
                assert entry.keys() == {"kind", "function", "text", "number", "why"}, name
                assert len(entry["why"].split()) >= 5, f"{name}: {entry['text']}: a reason is a sentence"


def test_the_results_are_of_all_scenes_and_add_up():
    rows = read(ROOT / RESULTS)
    assert [(ROOT / row["scenes"], row["scene"]) for row in rows] == [
        (suite.scenes, scene.name) for suite in SUITES_HERE for scene in suite.all()
    ]
    for row in rows:
        assert row["noticed"] + row["explained"] == row["mutants"] > 0, row["scene"]
        # a happens-before check sees at least what one run of its schedule shows
        assert row["plain run"] <= row["happens-before"] <= row["noticed"], row["scene"]


@pytest.mark.parts(12, seed=3057126798)
@pytest.mark.parametrize(
    "scene", [pytest.param(scene, id=scene.name) for suite in SUITES_HERE for scene in suite.all()]
)
def test_a_scene_runs(scene):
    """As it is. Most scenes' mutants are counted at night only, and what keeps a scene from running would be met no
    sooner.
    """
    with simulate(scene.target, "lazy", 0):
        assert scene.run()


# ---------------------------------------------------------------- on a small kernel

SCENES = """
import torch
from typing import NamedTuple

from mutated_doubling import double, double_carefully


def _run(function):
    x, y = torch.ones(16, 32), torch.full((16, 32), float("nan"))
    function(x, y)
    return (y,)


def plain():
    return _run(double)


def careful():
    return _run(double_carefully)


class Scene(NamedTuple):
    name: str
    target: str
    run: object
    file: str
    ordered: bool = False
    read_fences: bool = False


SCENES = (
    Scene("plain", "sm_90", plain, "mutated_doubling.py"),
    Scene("careful", "sm_100", careful, "mutated_doubling.py"),
)
"""
FENCE = {
    "kind": "drop fence",
    "function": "double_kernel",
    "text": "fence_async_shared()",
    "why": "one of the two is enough",
}


@pytest.fixture
def small(tmp_path, monkeypatch):
    """small(ledger, *arguments): exit code, rows of the results, for a scenes file of two scenes."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    shutil.copy(ROOT / "tests" / "sim" / "doubling.py", tmp_path / "mutated_doubling.py")
    scenes, ledger, results = tmp_path / "small_scenes.py", tmp_path / "survivors.json", tmp_path / "mutation.jsonl"
    scenes.write_text(SCENES)

    def run(reasons: dict, *arguments: str) -> tuple[int, list[dict]]:
        ledger.write_text(json.dumps(reasons))
        if not {"--resume", "--from-journal", "--journal"} & {*arguments}:
            arguments = (*arguments, "--journal", str(tmp_path / "journal.jsonl"))
        if "--jobs" not in arguments:
            arguments = (*arguments, "--jobs", "1")
        return main(["--scenes", str(scenes), "--results", str(results), *arguments]), read(results)

    yield run
    for name in ("mutated_doubling", "small_scenes"):
        sys.modules.pop(name, None)


def reasons(*numbers: int, scene: str = "careful") -> dict:
    return {f"small_scenes.py::{scene}": [FENCE | {"number": str(number)} for number in numbers]}


def test_scores_are_printed_and_recorded(small, capsys):
    code, (plain, careful) = small(reasons(1, 2))
    said = capsys.readouterr().out
    assert code == 0 and said.splitlines()[-1] == "2 scenes, 0 faults" and "happens-before" in said
    counts = ("target", "mutants", "plain run", "schedules", "happens-before", "noticed", "explained")
    assert [plain[name] for name in counts] == ["sm_90", 8, 4, 5, 8, 8, 0]
    assert [careful[name] for name in counts] == ["sm_100", 9, 4, 5, 7, 7, 2]
    assert (
        plain["scene"] == "plain"
        and plain["seconds"] > 0
        and plain.keys() >= {"scenes", "file", "triton", "torch", "python", "date", "commit"}
    )


def test_a_survivor_without_a_reason_and_a_reason_without_a_survivor_fail(small, capsys):
    for ledger, words in (
        (
            reasons(1),
            (
                "careful: survives without a reason in the ledger: drop fence in double_kernel: fence_async_shared() "
                "(number 2)"
            ),
        ),
        (
            reasons(1, 2, 3),
            "careful: in the ledger, but noticed or gone: drop fence in double_kernel: fence_async_shared() (number 3)",
        ),
        (reasons(1, 2) | reasons(scene="gone"), "small_scenes.py::gone: in the ledger, but no scene"),
    ):
        code, rows = small(ledger, "--scene", "careful")
        said = capsys.readouterr().out
        assert code == 1 and words in said.splitlines() and said.endswith("1 scenes, 1 faults\n")
        assert [row["scene"] for row in rows] == ["careful"]


def test_a_kernel_with_faults_has_no_score(small, tmp_path, capsys):
    file = tmp_path / "mutated_doubling.py"
    file.write_text(file.read_text().replace("    mbarrier.wait(ready, 0)\n", ""))
    code, rows = small({}, "--scene", "plain")
    assert (code, rows) == (1, []) and "plain has faults before anything is changed" in capsys.readouterr().out


VERDICTS = ("scene", "target", "mutants", "plain run", "schedules", "happens-before", "noticed", "explained", "sources")


def verdicts(rows: list[dict]) -> list[tuple]:
    return [tuple(row[name] for name in VERDICTS) for row in rows]


def journal_lines(path: Path) -> set[str]:
    """The verdicts in a journal, without their times."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {json.dumps({name: value for name, value in line.items() if name != "seconds"}) for line in lines}


def test_rows_are_the_same_for_any_number_of_processes(small, tmp_path):
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    code, alone = small(reasons(1, 2), "--journal", str(one))
    assert code == 0 and {row["sources"] for row in alone} and all(len(row["sources"]) == 16 for row in alone)
    code, together = small(reasons(1, 2), "--journal", str(two), "--jobs", "2")
    assert code == 0 and verdicts(together) == verdicts(alone) and journal_lines(two) == journal_lines(one)


def test_an_interrupted_run_goes_on_where_it_ended(small, tmp_path, monkeypatch, capsys):
    journal = tmp_path / "interrupted.jsonl"
    judged = []
    unbroken = mutation_workers.run_mutant

    def until_the_fourth(*arguments):
        judged.append(arguments)
        if len(judged) == 4:
            raise KeyboardInterrupt
        return unbroken(*arguments)

    monkeypatch.setattr(mutation_workers, "run_mutant", until_the_fourth)
    code, rows = small(reasons(1, 2), "--journal", str(journal))
    assert code == 1 and rows == [] and len(judged) == 4
    assert f"not measured for these sources: plain, careful; --resume {journal} goes on" in capsys.readouterr().out
    journal.write_text(journal.read_text() + '{"scenes": "cut o')

    code, rows = small(reasons(1, 2), "--from-journal", str(journal))
    assert (code, rows) == (1, []) and len(judged) == 4, "rows are of whole scenes"
    code, rows = small(reasons(1, 2), "--resume", str(journal))
    assert code == 0 and [row["mutants"] for row in rows] == [8, 9] and len(judged) == 4 + 17 - 3
    code, again = small(reasons(1, 2), "--from-journal", str(journal))
    assert code == 0 and again == rows and len(judged) == 4 + 17 - 3


def test_a_mutant_that_cannot_be_run_is_a_fault(small, monkeypatch, capsys):
    def broken(*_):
        raise OSError("no space left")

    monkeypatch.setattr(mutation_workers, "run_mutant", broken)
    code, rows = small(reasons(1, 2), "--scene", "plain")
    said = capsys.readouterr().out
    assert (code, rows) == (1, []) and "plain: mutant 7 was not run: OSError: no space left" in said


def test_a_verdict_counts_for_its_sources_only(small, tmp_path, capsys):
    journal, file = tmp_path / "journal.jsonl", tmp_path / "mutated_doubling.py"
    plain = small(reasons(1, 2))[1][0]
    capsys.readouterr()
    assert small(reasons(1, 2), "--stale")[0] == 0 and "\n0 scenes" in "\n" + capsys.readouterr().out

    file.write_text(file.read_text().replace("    mbarrier.wait(ready, 0)\n", "    mbarrier.wait(ready, 0)  # TMA\n"))
    for name in ("mutated_doubling", "small_scenes"):
        sys.modules.pop(name, None)
    small(reasons(1, 2), "--from-journal", str(journal))
    assert "not measured for these sources: plain" in capsys.readouterr().out
    code, (new, _) = small(reasons(1, 2), "--stale")
    assert code == 0 and new["sources"] != plain["sources"] and new["mutants"] == plain["mutants"]


def test_a_run_without_end_counts_as_noticed(small, tmp_path):
    """Some kernels need more time than a run may take, so that nothing but the limit notices."""
    _, rows = small(reasons(), "--scene", "plain", "--max-seconds", "0", "--journal", str(tmp_path / "j.jsonl"))
    lines = [json.loads(line) for line in (tmp_path / "j.jsonl").read_text().splitlines()][1:]
    assert [row["noticed"] for row in rows] == [8]
    assert {finding for line in lines for finding in line["said"].values()} == {"time limit"}


def test_a_page_gets_the_table_of_all_results(small, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    small(reasons(1, 2))
    code, rows = small(reasons(1, 2), "--scene", "", "--table", str(page))
    assert code == 0 and len(rows) == 2
    assert page.read_text() == f"before\n{BEGIN}\n\n{table(rows)}\n\n{END}\nafter\n"
    assert table(rows).splitlines()[-1] == "| **all** |  | 17 | 8 | 10 | 15 | 15 | 2 |"
    fill(page, "mutation", table(rows[:1]))
    assert "careful" not in page.read_text() and page.read_text().endswith(f"{END}\nafter\n")
    page.write_text("# A page\n")
    with pytest.raises(InvalidProblem, match=r"--table: got .*page.md, expected a page with one line"):
        fill(page, "mutation", table(rows))


def test_new_rows_take_the_place_of_old_ones():
    row = lambda scene, mutants, scenes="a.py": {"scenes": scenes, "scene": scene, "mutants": mutants}
    assert merged([row("x", 1), row("y", 2)], [row("x", 3), row("x", 4, "b.py")]) == [
        row("x", 3),
        row("y", 2),
        row("x", 4, "b.py"),
    ]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--scene", "no*"], "a pattern of ampere_matmul"),
        (["--scenes", "none.py"], "a Python file with SCENES"),
        (["--ledger", "x.json"], "give --scenes too"),
        (["--scene", "", "--table", "none.md"], "a page with one line"),
        (["--resume", "none.jsonl"], "--resume: got none.jsonl, expected the journal of a run"),
        (["--from-journal", "none.jsonl"], "--from-journal: got none.jsonl"),
    ],
)
def test_what_cannot_be_carried_out(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(mutate, "SUITES", SUITES_HERE)
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--results", str(tmp_path / "none.jsonl")])
    assert ended.value.code == 2 and words in capsys.readouterr().err
