"""The ladder's files, their docstrings, its pages and `python -m ladder`."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from ladder.harness import FILES, RUNGS, harness, measure, pages
from ladder.harness.command import main

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "ladder"
REFRESH = "run `python -m ladder.harness.pages` and look at what changed"


@pytest.mark.parametrize("name", RUNGS)
def test_a_rung_is_one_file_that_teaches(name):
    text = (FOLDER / f"{FILES[name]}.py").read_text()
    doc = importlib.import_module(f"ladder.{FILES[name]}").__doc__
    assert 110 <= len(text.splitlines()) <= 560
    assert doc.startswith(f"{name}, ")
    parts = [
        "The idea:",
        "Cost model",
        "\n    FLOPs ",
        "\n    bytes ",
        "\n    shared ",
        "\n    registers ",
        "What limits it:",
        "\nMeasured:\n",
    ]
    places = [doc.index(part) for part in parts]
    assert places == sorted(places)
    rung = harness.load(name)
    assert rung.name == name and (not rung.below or RUNGS.index(rung.below) < RUNGS.index(name))
    assert all(re.search(rf"^(def|class) {shown}\b", text, re.MULTILINE) for shown in rung.shows)


@pytest.mark.parametrize("name", RUNGS)
def test_docstrings_hold_the_rows_that_were_measured(name):
    text = (FOLDER / f"{FILES[name]}.py").read_text()
    assert text == pages.with_table(text, pages.measured(pages.read(ROOT / pages.RESULTS), name)), REFRESH


def test_measured_rows_fill_a_docstring_and_the_page():
    size = harness.load("k5").size(4096, 128, True)
    row = {
        "rung": "k5",
        **size._asdict(),
        "options": {},
        "ms": 2.5,
        "tflops": 440.5,
        "percent_of_ceiling": 44.5,
        "peak_bytes": 1e8,
        "model_bytes": 2e9,
    }
    row |= {"device": "H200: sm_90", "torch": "2.13", "triton": "3.6.0", "date": "2026-11-21T12:00:00"}
    older, other = row | {"ms": 9.9}, row | {"options": {"stages": 3}, "ms": 1.1}
    rows = pages.measured([older, row, other, row | {"ms": None}], "k5")
    assert rows == [row] and pages.measured([row], "k6") == []
    text = (FOLDER / "k5_warp_specialized.py").read_text()
    filled = pages.with_table(text, rows)
    assert "128  causal    4096       2.5     440.5" in filled and pages.with_table(filled, []) == pages.with_table(
        text, []
    )
    assert "| 128 | causal | 4096 | 2.5 | 440.5 | 44.5 | 2 | 100 |" in pages.table(rows)


def test_a_column_of_the_overview_holds_one_process():
    def timed(rung: str, tflops: float, day: int, keys: int = pages.OVERVIEW, **rest) -> dict:
        facts = {
            "device": "NVIDIA H200: sm_90",
            "torch": "2.11",
            "triton": "3.6",
            "date": f"2026-11-{day}T00:00:00+00:00",
            "options": {},
        }
        return (
            facts
            | {
                "rung": rung,
                "head_dim": 64,
                "causal": False,
                "seqlen_k": keys,
                "ms": 1.0,
                "tflops": tflops,
                "gbps": 7.0,
            }
            | rest
        )

    together = [timed("k5", 500.0, 12), timed("k6", 600.0, 12), timed("strobe", 700.0, 12)]
    before, since = [timed("k5", 400.0, 11), timed("k6", 410.0, 11)], [timed("k6", 999.0, 13)]
    others = [timed("k2", 20.0, 10), timed("k1", 5.0, 10, pages.SHORTER), timed("k6", 888.0, 14, options={"lag": 0})]
    text = pages.overview([*since, *together, *others, *before])
    assert (
        "| [k5](k5.md) | 500 | - | - | - |" in text
        and "| [k6](k6.md) | 600 | - | - | - |" in text
        and "| strobe's forward | 700 |" in text
    )
    assert "| [k2](k2.md) | *20* |" in text and "| [k1](k1.md) | (5) |" in text and "[k7]" not in text
    assert "2026-11-12" in text and "2026-11-10" not in text
    assert "| [decode](decode.md) | 7 |" in pages.overview([timed("decode", 1.0, 12)])
    assert pages.overview([]) == "" and pages.overview([timed("k1", 5.0, 10, pages.SHORTER)]) == ""


def test_the_command_shows_a_table(capsys):
    assert main(["k5", "--seqlen", "96", "--head-dim", "64", "--causal", "--check", "--device", "cpu"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "simulator" in said[0] and said[1].split()[:2] == ["rung", "S_q"]
    assert said[2].split()[:5] == ["k5", "96", "96", "64", "causal"]


def test_the_command_writes_json_lines(capsys):
    assert main(["k3_1", "--seqlen", "70", "--no-causal", "--set", "block_n=32", "--device", "cpu", "--json"]) == 0
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (
        row["rung"] == "k3_1"
        and row["options"] == {"block_n": 32}
        and row["where"] == "simulator"
        and row["error"] is None
    )
    assert row["ms"] is None and row["worst"] <= 1 and {"torch", "date", "commit"} <= row.keys()


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_without_a_gpu_the_command_says_what_it_does_and_how_far_it_is(capsys, monkeypatch):
    run = harness.simulated
    fails = lambda rung, *rest: (
        (_ for _ in ()).throw(AssertionError("far off")) if rung.name == "k2" else run(rung, *rest)
    )
    monkeypatch.setattr(harness, "simulated", fails)
    assert main(["k1", "k2", "--no-causal", "--seqlen", "16"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert (
        said[0].startswith("python -m ladder without a GPU: k1, k2; each rung is simulated on a small problem")
        and "nothing is timed" in said[0]
    )
    assert re.fullmatch(r"\[1/2\] k1 D=64 dense: right, \d\.\d\d of the error allowed; about \d+ s left", said[1])
    assert re.fullmatch(r"\[2/2\] k2 D=64 dense: FAIL, AssertionError: far off; \d+ s in all", said[2])


def test_rungs_and_rivals_of_one_problem_are_timed_in_turn(monkeypatch):
    """On a CPU, with runs that do nothing: which rungs are checked and timed, and what becomes of those that fail."""
    timed = []

    def checked(rung, size, options, device):
        if rung.name == "k2":
            raise AssertionError("beyond the limit")
        return harness.heading(rung.name, size, options) | {
            "flops": size.flops,
            "model_bytes": 1000,
        }, lambda: timed.append(rung.name)

    monkeypatch.setattr(harness, "checked", checked)
    monkeypatch.setattr(measure, "_rival", lambda rival, size, device: lambda: timed.append(rival.name))
    names = ("k6", "k2", "decode")
    points = [
        measure.Point(harness.load(name), harness.load(name).size(512, 64, causal), {})
        for name in names
        for causal in (False, True)
    ]
    rows = list(measure.rows(measure.in_order(points), measure.pick(["strobe"]), 2, torch.device("cpu")))
    assert [(row["rung"], row["causal"]) for row in rows] == [
        *(
            ("k2", False),
            ("k6", False),
            ("strobe", False),
            ("decode", False),
            ("k2", True),
            ("k6", True),
            ("strobe", True),
            ("decode", True),
        )
    ]
    assert [row["error"] for row in rows] == [
        "AssertionError: beyond the limit" if row["rung"] == "k2" else None for row in rows
    ]
    assert all((row["ms"] is None) == (row["rung"] == "k2") for row in rows) and set(timed) == {
        "k6",
        "strobe",
        "decode",
    }
    with pytest.raises(ValueError, match="--rivals: got nobody, expected some of strobe, flash"):
        measure.pick(["flash", "nobody"])


def test_what_fails_is_a_row_and_an_exit_code(capsys, monkeypatch):
    rung = harness.load("k5")
    broken = rung._replace(run=lambda q, k, v, causal, **options: tuple(t.zero_() for t in harness.outputs(q)))
    monkeypatch.setattr(harness, "load", lambda name: broken)
    assert main(["k5", "--seqlen", "40", "--no-causal", "--device", "cpu"]) == 1
    assert "FAIL: k5 D=64 dense: AssertionError: beyond the limit" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, words",
    [
        (["k9"], "rung: got k9"),
        (["k6", "--set", "blocks=3"], "--set: got blocks=3"),
        (["k6", "--set", "masks=0"], "--set: got masks=0"),
        (["k5", "--set", "consumers=7"], "consumers: got 7"),
        (["t", "--causal", "--set", "step=1"], "step: got 1"),
        (["--device", "tpu"], "device: got 'tpu'"),
        (["k5", "k6", "--timeline", "x.svg"], "--timeline"),
        (["k5", "--timeline", "x.png"], "--timeline"),
        (["k5", "--json", "/no/such/place"], "--json"),
        (["k5", "--rivals", "flash"], "--rivals: got flash"),
        (["k5", "--plot", "x.svg"], "--plot: got x.svg"),
        (["k5", "--out", "x.html"], "--out: got x.html"),
        (["k5", "--outliers"], "RUNG: got"),
    ],
)
def test_a_command_that_cannot_be_carried_out_says_why(argv, words, capsys):
    assert main([*argv, *([] if "--device" in argv else ["--device", "cpu"])]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("strobe: ") and words in said.err and "Traceback" not in said.err


def test_a_timeline(tmp_path):
    assert (
        main(["k5", "--seqlen", "300", "--no-causal", "--timeline", str(tmp_path / "k5.svg"), "--device", "cpu"]) == 0
    )
    assert {"load_partition", "mma_partition"} <= set(re.findall(r"\w+_partition", (tmp_path / "k5.svg").read_text()))


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda q, k, v: (q.float(), k, v), "q.dtype: got torch.float32"),
        (lambda q, k, v: (q[..., :40], k, v), r"q.shape: got \[1, 8, 2, 40\]"),
        (lambda q, k, v: (q.transpose(1, 2), k, v), r"q.stride\(\)"),
        (lambda q, k, v: (q, k, v[:, :3].contiguous()), "k.shape, v.shape"),
        (lambda q, k, v: (q, k[:0], v), "k.shape"),
    ],
    ids=["dtype", "width", "stride", "lengths", "empty"],
)
def test_bad_inputs_are_refused(change, words):
    q, k, v = (torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16) for _ in range(3))
    for name in ("k1", "k6"):
        with pytest.raises(ValueError, match=words):
            harness.load(name).run(*change(q, k, v), False)


def test_decode_refuses_more_rows_than_a_tile():
    q, k = torch.zeros(1, 33, 4, 64, dtype=torch.bfloat16), torch.zeros(1, 40, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="at most 64 rows"):
        harness.load("decode").run(q, k, k, True)


def test_the_plots_show_every_rung(tmp_path):
    from ladder.harness import plot

    pytest.importorskip("matplotlib")
    about = {"device": "H200: sm_90", "torch": "2", "commit": None}
    points = [(name, length, causal) for name in RUNGS for length in (512, 1024) for causal in (False, True)]
    rows = [
        {
            "rung": name,
            **harness.load(name).size(length, 128, causal)._asdict(),
            "ms": 1.0,
            "tflops": 300.0 + n,
            "peak_bytes": 10**8,
            "date": f"2026-11-{21 + n % 3}T00:00",
            **about,
        }
        for n, (name, length, causal) in enumerate(points)
    ]
    written = plot.save(rows, tmp_path / "ladder.svg")
    assert [path.name for path in written] == ["ladder.svg", "ladder_length.svg"]
    for text in (path.read_text() for path in written):  # what is written in a picture stands in its comments
        assert [name for name in RUNGS if f"<!-- {name} -->" not in text] == []
        assert "2026-11-21 to 2026-11-23" in text
