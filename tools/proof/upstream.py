"""Compare the compiled code of our Blackwell forward with that of the Triton repository's attention example, at the
same shapes.

The example is python/examples/gluon/01-attention-forward.py of triton-lang/triton, at a commit that fits the installed
Triton. It is not part of this project; its path is an argument. Its host function is called on CPU tensors, and its
launch is recorded and compiled, as is ours.

    python -m tools.proof.upstream PATH --source triton-lang/triton@COMMIT --table docs/blackwell_triton.md
    python -m tools.proof.upstream --table docs/blackwell_triton.md         only ours; keeps the example's recorded rows
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton

from strobe.errors import InvalidProblem
from strobe.problem import mask as masks
from strobe.problem.call import Call
from strobe.sim.scene import SceneError, load

from .budget import TARGETS, spill_bytes
from .compile import Job, compile_job, launches, offline, read, recording, table
from .pages import fill
from .provenance import circumstances

TARGET = TARGETS["sm_100"]
RESULTS = Path("results/upstream.jsonl")
BATCH, TOKENS, HEADS, SCALE = 2, 4096, 8, 0.125
SHAPE = f"B={BATCH} S={TOKENS} H={HEADS}"
OURS = "strobe"
# Not recorded of a Report: hashes change with each commit, and a row's source is its name.
UNRECORDED = ("name", "capability", "seconds", "source", "code")
WIDE = 200  # columns of the printed table if the output is no terminal


class Case(NamedTuple):
    """A problem for which both are compiled."""

    width: int
    causal: bool
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"d{self.width} {'causal' if self.causal else 'dense'} {str(self.dtype).removeprefix('torch.')}"


CASES = [
    Case(width, causal, dtype)
    for dtype in (torch.bfloat16, torch.float16)
    for width in (64, 128)
    for causal in (False, True)
]


@contextmanager
def pretending() -> Iterator[None]:
    """Within the block, Triton and torch report TARGET as the current GPU."""
    capability = divmod(TARGET.capability, 10)
    facts = SimpleNamespace(
        name=TARGET.name, major=capability[0], minor=capability[1], multi_processor_count=TARGET.sm_count
    )
    answers = {"get_device_capability": lambda *_: capability, "get_device_properties": lambda *_: facts}
    with offline(TARGET.capability), mock.patch.multiple(torch.cuda, **answers):
        yield


def example(path: Path, function: str) -> Callable[..., Any]:
    """The host function of the file at `path`. Raises InvalidProblem if the file does not load or lacks the
    function."""
    if not path.is_file():
        raise InvalidProblem("PATH", path, "the example's file", "fetch it from the Triton repository")
    try:
        with pretending():
            module = load(path.resolve())
    except (SceneError, AttributeError) as error:
        raise InvalidProblem(
            "PATH", f"{path}: {error}", f"a file for Triton {triton.__version__}", "take the example at another commit"
        ) from error
    if not callable(getattr(module, function, None)):
        raise InvalidProblem("--function", function, f"a function of {path}", "name the one that launches the forward")
    return getattr(module, function)


def theirs(host: Callable[..., Any], case: Case) -> Job:
    """The example's launch. `host` takes q, k, v [B, H, S, D], whether the mask is causal, and the scale."""
    q, k, v = (torch.empty(BATCH, HEADS, TOKENS, case.width, dtype=case.dtype) for _ in range(3))
    with pretending(), recording(TARGET) as jobs:
        host(q, k, v, case.causal, SCALE)
    if len(jobs) != 1:
        launched = ", ".join(job.name for job in jobs) or "none"
        raise InvalidProblem(
            "--function", f"one that launches {launched}", "a launch of one kernel", "name the forward's"
        )
    return jobs[0]


def ours(case: Case) -> Job:
    q, k, v = (torch.empty(BATCH, TOKENS, HEADS, case.width, dtype=case.dtype) for _ in range(3))
    call = Call(q, k, v, scale=SCALE, kernel="blackwell").with_mask(masks.causal() if case.causal else masks.full())
    ((_, job),) = launches(call, TARGET)
    return job


def row(source: str, case: Case, job: Job) -> dict:
    """Compile a launch without a device and return its row."""
    facts = compile_job(job)._asdict()
    facts = {key: value for key, value in facts.items() if key not in UNRECORDED}
    heading = {
        "source": source,
        "case": case.name,
        "shape": SHAPE,
        "kernel": job.name,
        "device": "none",
        "target": f"sm_{TARGET.capability}",
    }
    return heading | facts | {"roles": [loop.row() for loop in facts["roles"]]} | circumstances()


# ---------------------------------------------------------------- the table

HEADER = [
    "case", "kernel", "registers", "spills", "shared", "softmax", "correct", "mma", "load", "store",
    "EX2", "float", "float x2", "LDTM", "STTM", "waits", "LDL + STL",
]  # fmt: skip


def line(row: dict) -> list[object]:
    """A row as a table line with the columns of HEADER. The last seven are counts of the first softmax loop."""
    loops = {role: [loop for loop in row["roles"] if loop["role"] == role] for role in HEADER[5:10]}
    softmax = next(iter(loops["softmax"]), None) or dict.fromkeys([*HEADER[10:16], "LDL", "STL"], 0)
    taken = [row["registers"], spill_bytes(row), f"{row['shared_bytes'] / 1024:.0f} KiB"]
    kinds = [*(softmax[kind] for kind in HEADER[10:16]), softmax["LDL"] + softmax["STL"]]
    return [row["case"], row["source"], *taken, *(_turns(found) for found in loops.values()), *kinds]


def _turns(loops: list[dict]) -> str:
    """Instructions per iteration of each loop: "least to total" if an iteration may skip some.

    >>> _turns([{"least": 3, "total": 3}, {"least": 4, "total": 9}, {"least": 3, "total": 3}])
    '3, 4 to 9'
    """
    said = (
        str(loop["total"]) if loop["least"] == loop["total"] else f"{loop['least']} to {loop['total']}"
        for loop in loops
    )
    return ", ".join(dict.fromkeys(said)) or "-"


def show(rows: Sequence[dict]) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table(
        *HEADER,
        title=(
            f"compiled for sm_{TARGET.capability}: instructions in the inner loop of each role; the last columns "
            "are softmax's"
        ),
    )
    for row in rows:
        shown.add_row(*map(str, line(row)))
    console = Console()
    if not console.is_terminal:
        console.width = WIDE
    console.print(shown)


def page(rows: Sequence[dict]) -> str:
    """The table of a page: only bfloat16."""
    return table(HEADER, [line(row) for row in rows if "bfloat16" in row["case"]])


# ---------------------------------------------------------------- the command


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m tools.proof.upstream", description="Compile Triton's example of attention beside ours."
    )
    parser.add_argument(
        "path",
        type=Path,
        nargs="?",
        metavar="PATH",
        help="the example's file; its recorded rows stay where none is given",
    )
    parser.add_argument(
        "--source",
        default="the example",
        metavar="NAME",
        help="what it is called in rows and tables, such as REPOSITORY@COMMIT",
    )
    parser.add_argument(
        "--function", default="attention_forward", metavar="NAME", help="its host function (attention_forward)"
    )
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE", help=f"rows go there ({RESULTS})")
    parser.add_argument("--table", type=Path, metavar="FILE", help="a page whose table is rewritten")
    a = parser.parse_args(argv)
    try:
        others = (
            _compiled(a.path, a.source, a.function)
            if a.path
            else [known for known in read(a.json) if known["source"] != OURS]
        )
        rows = [row(OURS, case, ours(case)) for case in CASES] + others
        rows.sort(key=lambda known: [case.name for case in CASES].index(known["case"]))
        a.json.write_text("".join(json.dumps(known) + "\n" for known in rows))
        show(rows)
        if a.table:
            fill(a.table, "upstream", page(rows))
    except InvalidProblem as error:
        parser.error(str(error))
    return 0


def _compiled(path: Path, source: str, function: str) -> list[dict]:
    """The example's rows, with the hash of its file."""
    host = example(path, function)
    mark = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    return [row(source, case, theirs(host, case)) | mark for case in CASES]


if __name__ == "__main__":
    sys.exit(main())
