"""`python -m ladder page`: an HTML file that steps through the tiles of a small problem and shows the rungs' timelines.

The page contains the problem's q, k, v and masks, and the oracle's results. It computes the online softmax itself, tile
by tile. The timelines come from the simulator, in modelled time.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from strobe import reference
from strobe.problem.call import Call
from strobe.problem.mask import Mask, causal, documents, full, window

from . import Row

TEMPLATE = Path(__file__).with_name("page.html")
SEQLEN, BLOCK, HEAD_DIM = 24, 6, 8
DOCUMENTS = (9, 10, 5)  # document lengths


def write(path: Path) -> int:
    try:
        path.write_text(html(), encoding="utf-8")
    except OSError as error:
        print(f"strobe: --out: got {path}, expected a file that can be written: {error}", file=sys.stderr)
        return 2
    print(f"wrote {path}", file=sys.stderr)
    return 0


def html() -> str:
    data = {"problem": problem(), "timelines": timelines(), "colours": colours()}
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    return TEMPLATE.read_text(encoding="utf-8").replace("/*DATA*/null", text, 1)


def masks() -> dict[str, tuple[str, Mask]]:
    """Masks by name, each with a description."""
    ids = torch.repeat_interleave(torch.arange(len(DOCUMENTS), dtype=torch.int32), torch.tensor(DOCUMENTS))[None]
    return {
        "dense": ("every query sees every key", full()),
        "causal": ("a query sees the keys up to its own position", causal()),
        "window": ("a query sees the eight keys before its own position, and its own", causal() & window(8, 0)),
        "documents": (
            f"queries see their own document up to their position; documents of {', '.join(map(str, DOCUMENTS))}",
            causal() & documents(ids),
        ),
    }


def drawn(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v [1, S, 1, D] in float64, rounded to three decimals, so that page and oracle use the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(1, SEQLEN, 1, HEAD_DIM, generator=generator, dtype=torch.float64).mul(1.5).round(decimals=3)
        for _ in range(3)
    )
    return q, k, v


def problem() -> Row:
    q, k, v = drawn()
    found = {}
    for name, (words, mask) in masks().items():
        part = reference.forward(Call(q, k, v).with_mask(mask))
        seen = mask.dense(SEQLEN, SEQLEN, torch.device("cpu"))[0].int().tolist()
        found[name] = {"words": words, "seen": seen, "out": part.out[0, :, 0].tolist(), "lse": part.lse[0, 0].tolist()}
    tensors = {name: tensor[0, :, 0].tolist() for name, tensor in (("q", q), ("k", k), ("v", v))}
    return {"block": BLOCK, "scale": HEAD_DIM**-0.5, "masks": found, **tensors}


def timelines() -> list[Row]:
    """Timelines with loads first, then products, then engines. Events are [row, kind, name, start ns, end ns, where],
    sorted by start.
    """
    from .pages import timed_runs

    found = []
    for rung, events in timed_runs():
        events = sorted(events, key=lambda event: (event.start_ns, event.end_ns))
        rows = sorted({event.row for event in events}, key=lambda row: ("partition" not in row, row))
        bars = [[rows.index(e.row), e.kind, e.name, round(e.start_ns, 1), round(e.end_ns, 1), e.where] for e in events]
        found.append({"name": rung.name, "idea": rung.idea, "rows": rows, "events": bars})
    return found


def colours() -> dict[str, list[str]]:
    from strobe.sim.timeline import COLOURS

    return {kind: list(pair) for kind, pair in COLOURS.items()}
