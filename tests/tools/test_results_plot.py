"""The pictures of published results show the rows of results/, and nothing else."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from strobe.bench.data import NORMAL
from strobe.bench.table import normal_and_worst
from tools import results_plot

IMAGES = Path(__file__).parents[2] / "docs" / "images"


@pytest.mark.parametrize("card", results_plot.CARDS)
def test_the_committed_picture_is_what_the_rows_give(card):
    committed = (IMAGES / f"results_{card.lower()}.svg").read_text()
    assert committed == results_plot.picture(card), "python -m tools.results_plot docs/images"
    ElementTree.fromstring(committed)
    assert len(committed) < 20_000


@pytest.mark.parametrize("card", results_plot.CARDS)
def test_every_bar_is_a_row(card):
    drawn = re.findall(r"rotate\(-90\)\">(\d+)<", results_plot.picture(card))
    expected = []
    for direction in results_plot.DIRECTIONS:
        rows = results_plot.published(card, direction)
        for case in results_plot.CASES:
            bars = results_plot.bars(rows, case)
            assert [bar.who for bar in bars] == ["strobe"] * 2 + ["fa4"] * 2 + ["cudnn"] * 2
            assert [bar.data == NORMAL for bar in bars] == [True, False] * 3
            ratios = {
                row["data"]: row["ratio"] for row in rows if row["case"] == case and row.get("data", NORMAL) != NORMAL
            }
            assert bars[1].data == min(ratios, key=ratios.get)
            expected += [f"{bar.tflops:.0f}" for bar in bars]
    assert drawn == expected


def test_the_table_of_normal_and_worst_inputs_quotes_rows():
    """A line of docs/results.md: a case, then for each card and direction "normal, worst family"."""
    text = (IMAGES.parent / "results.md").read_text()
    quoted = re.findall(r"^\| (\w+_\w+) \| (.*\d, .*) \|$", text, re.MULTILINE)
    assert len(quoted) == 9
    columns = [(card, direction) for card in results_plot.CARDS for direction in results_plot.DIRECTIONS]
    published = {column: results_plot.published(*column) for column in columns}
    for case, cells in quoted:
        for cell, column in zip(cells.split(" | "), columns, strict=True):
            rows = normal_and_worst([row for row in published[column] if row["case"] == case])
            found = ", ".join(f"{row['ratio']:.2f} {row.get('data', NORMAL)}" for row in rows).replace(" normal", "")
            assert cell == (found if len(rows) == 2 else "-"), (case, column)
