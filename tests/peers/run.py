"""FlashAttention's own tests, and transformers' flash-attention code, on strobe's stand-ins: how many pass, are refused
by name, or fail.

    python tests/peers/run.py CHECKOUT                                    every suite, on the GPU if there is one
    python tests/peers/run.py CHECKOUT --suite fa3 --sample 100 --seed 2  another draw of their parametrisations
    python tests/peers/run.py CHECKOUT --record results/peers.jsonl --source Dao-AILab/flash-attention@COMMIT
    python tests/peers/run.py --suite transformers                        needs no checkout
    python tests/peers/run.py --table docs/reliability.md                 only the page's tables, from recorded results

CHECKOUT is a checkout of Dao-AILab/flash-attention, of which nothing is part of this project. Its tests need einops.
Every failure must be covered by KNOWN, which says its cause; any other makes the exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch
from known import KNOWN, Known
from outcome import normalised
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[1]))  # tools, of the repository

from tools.proof.pages import fill  # noqa: E402
from tools.proof.provenance import circumstances  # noqa: E402

OUTCOMES = ("passed", "refused", "failed", "skipped", "over a limit")
WIDE = 200  # columns of a table where no terminal says how many it has


class Suite(NamedTuple):
    """Test files, the environment that switches parts of them off, and the compute capability that they see on a
    CPU."""

    files: tuple[str, ...]
    capability: tuple[int, int] = (9, 0)
    environment: tuple[tuple[str, str], ...] = ()
    theirs: bool = True  # the files are the checkout's


_FA3 = ("test_flash_attn", "test_attn_kvcache", "test_flash_attn_bwd_determinism", "test_torch_compile_and_export")
_FA4 = (
    "test_flash_attn",
    "test_flash_attn_varlen",
    "test_flash_attn_combine",
    "test_flash_attn_fast",
    "test_flash_attn_race_condition",
)
# Their FA3 tests try float8 and chunks before all else, which strobe refuses: the switches let the rest of them run.
_NO_FP8 = ("FLASH_ATTENTION_DISABLE_FP8", "TRUE")
_NO_LOCAL = ("FLASH_ATTENTION_DISABLE_LOCAL", "TRUE")
SUITES = {
    "fa2": Suite(("tests/test_flash_attn.py",)),
    "fa3": Suite(tuple(f"hopper/{name}.py" for name in _FA3), environment=(_NO_FP8,)),
    "fa3 without windows and chunks": Suite(("hopper/test_flash_attn.py",), environment=(_NO_FP8, _NO_LOCAL)),
    "fa4": Suite(tuple(f"tests/cute/{name}.py" for name in _FA4), capability=(10, 0)),
    "transformers": Suite((str(HERE / "transformers_paths.py"),), theirs=False),
}
# Thousands of repetitions that wait for a race between a GPU's warps.
ON_A_GPU_ALONE = ("*race_condition*",)
CHOICES = ("all", "fa2", "fa3", "fa4", "transformers")


class Problem(Exception):
    """What makes a run impossible, in words for the command line."""


# ---------------------------------------------------------------- a suite


def plan_of(suite: Suite, a: argparse.Namespace) -> dict:
    """The arguments of the suite's process, except the file descriptor of its events."""
    files = [str(a.checkout / file) if suite.theirs else file for file in suite.files]
    there = [file for file in files if Path(file).is_file()]
    if not there:
        raise Problem(
            f"CHECKOUT: got {a.checkout}, expected one that holds {suite.files[0]}; give the root of "
            "FlashAttention's repository"
        )
    on_cpu = suite.capability if not torch.cuda.is_available() else None
    numbers = {"seed": a.seed, "sample": a.sample, "cap": a.cap, "limit": a.limit, "memory": int(a.memory * 2**30)}
    omitted = ON_A_GPU_ALONE if on_cpu else ()
    return {
        "omitted": omitted,
        "root": str(a.checkout if suite.theirs else HERE),
        "files": there,
        "capability": on_cpu,
        **numbers,
    }


def events_of(
    plan: dict, environment: Sequence[tuple[str, str]], log: Path, tell: Callable[[dict], None]
) -> list[dict]:
    """Run a plan in a process of its own; what it reports, as it comes and all of it."""
    read, write = os.pipe()
    events = []
    with log.open("w") as output:
        command = [sys.executable, str(HERE / "session.py"), json.dumps({**plan, "events": write})]
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, **dict(environment)}, pass_fds=(write,)
        )
        os.close(write)
        try:
            with os.fdopen(read) as lines:
                for line in lines:
                    events.append(json.loads(line))
                    tell(events[-1])
            process.wait()
        finally:
            if process.poll() is None:
                process.kill()
    if process.returncode:
        running = next((event["id"] for event in reversed(events) if event["event"] == "started"), "nothing yet")
        raise Problem(f"the process ended with {process.returncode} while it ran {running}; its output is in {log}")
    return events


def rows_of(name: str, events: Sequence[dict]) -> list[dict]:
    """A row for each test function: sizes of the draw, a count for each outcome, and messages by how often they
    came."""
    sizes = next((event["draws"] for event in events if event["event"] == "planned"), {})
    rows = []
    for test, size in sizes.items():
        ended = [event for event in events if event["event"] == "ended" and event["test"] == test]
        counts = {one: sum(event["outcome"] == one for event in ended) for one in OUTCOMES}
        messages = {
            one: dict(Counter(normalised(event["message"]) for event in ended if event["outcome"] == one))
            for one in OUTCOMES[1:]
        }
        rows.append({"suite": name, "test": test, **size, **counts, "messages": messages})
    return rows


# ---------------------------------------------------------------- what is shown


def explanation(suite: str, test: str, message: str) -> Known | None:
    """Why a failure is none of strobe's, or is left so."""
    return next((known for known in KNOWN if known.covers(suite, test, message)), None)


def failures(rows: Sequence[dict]) -> list[tuple[str, str, str, int]]:
    """Suite, test, message and count of what failed."""
    return [
        (row["suite"], row["test"], message, count)
        for row in rows
        for message, count in row["messages"]["failed"].items()
    ]


def show(rows: Sequence[dict], console: Console) -> None:
    counts = Table("suite", "test", "all", "under the cap", "run", *OUTCOMES, title="outcomes")
    for row in rows:
        counts.add_row(
            row["suite"], row["test"], *(str(row[key]) for key in ("total", "under_cap", "drawn", *OUTCOMES))
        )
    sums = {key: str(sum(row[key] for row in rows)) for key in ("total", "under_cap", "drawn", *OUTCOMES)}
    counts.add_section()
    counts.add_row("", "together", *sums.values())
    console.print(counts)
    for kind in OUTCOMES[1:]:
        seen: Counter[str] = Counter()
        for row in rows:
            seen.update(row["messages"][kind])
        if seen:
            messages = Table("times", f"{kind}: message")
            for message, count in seen.most_common():
                messages.add_row(str(count), escape(message) or "without a reason")
            console.print(messages)
    unexplained = [found for found in failures(rows) if explanation(*found[:3]) is None]
    if unexplained:
        console.print(
            "not explained in tests/peers/known.py:",
            *(f"  {suite} {test}: {message} ({n})" for suite, test, message, n in unexplained),
            sep="\n",
        )


def page(rows: Sequence[dict]) -> str:
    """The page's tables: counts by suite, and causes of failures with their counts."""
    lines = [
        "| suite | device | run | " + " | ".join(OUTCOMES) + " |",
        "| --- | --- |" + " ---: |" * (1 + len(OUTCOMES)),
    ]
    for suite, device in dict.fromkeys((row["suite"], row["device"]) for row in rows):
        own = [row for row in rows if (row["suite"], row["device"]) == (suite, device)]
        counts = [str(sum(row[key] for row in own)) for key in ("drawn", *OUTCOMES)]
        lines.append(f"| {suite} | {device} | " + " | ".join(counts) + " |")
    causes: Counter[str] = Counter()
    for suite, test, message, count in failures(rows):
        known = explanation(suite, test, message)
        causes[known.why if known else f"not explained: {test}: {message}"] += count
    lines += [
        "",
        "| cause of a failure | failed |",
        "| --- | ---: |",
        *(f"| {why} | {count} |" for why, count in causes.most_common()),
    ]
    return "\n".join(lines)


# ---------------------------------------------------------------- the command

RESULTS = Path("results/peers.jsonl")


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def record(path: Path, rows: Sequence[dict]) -> None:
    """Rows in the place of those of the same suites on the same device."""
    replaced = {(row["suite"], row["device"]) for row in rows}
    kept = [row for row in read(path) if (row["suite"], row["device"]) not in replaced]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in [*kept, *rows]))


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("run.py", description="Run FlashAttention's own tests on strobe's stand-ins.")
    parser.add_argument("checkout", type=Path, nargs="?", metavar="CHECKOUT", help="of Dao-AILab/flash-attention")
    parser.add_argument("--suite", choices=CHOICES, default="all", help="whose tests (all)")
    parser.add_argument(
        "--sample",
        type=int,
        default=300,
        metavar="N",
        help="tests drawn of each suite, evenly over its functions (300)",
    )
    parser.add_argument(
        "--seed", type=int, default=1, metavar="N", help="the same seed draws the same parametrisations (1)"
    )
    gpu = torch.cuda.is_available()
    parser.add_argument(
        "--cap",
        type=int,
        default=2**40 if gpu else 2**25,
        metavar="N",
        help="most of rows x keys x head dimension (2^25, on a GPU 2^40)",
    )
    parser.add_argument("--limit", type=float, default=60, metavar="S", help="seconds a test may run (60)")
    parser.add_argument("--memory", type=float, default=6, metavar="GIB", help="memory a suite may take on a CPU (6)")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write rows there, such as results/peers.jsonl")
    parser.add_argument(
        "--events", type=Path, metavar="FILE", help="write each test's outcome there, with its parameters and message"
    )
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="a page whose tables are written anew from the recorded rows"
    )
    parser.add_argument(
        "--source", default="", metavar="NAME", help="what the checkout is called in rows, such as REPOSITORY@COMMIT"
    )
    a = parser.parse_args(argv)
    if a.checkout is None and a.suite != "transformers" and a.table is None:
        parser.error(
            "CHECKOUT: got nothing, expected a checkout of Dao-AILab/flash-attention; only --suite transformers "
            "needs none"
        )
    if a.checkout is not None:
        a.checkout = a.checkout.resolve()
    return a


def main(argv: Sequence[str] | None = None) -> int:
    a = arguments(argv)
    if a.checkout is None and a.table:
        fill(a.table, "peers", page(read(a.record or RESULTS)))
        return 0
    console = Console()
    if not console.is_terminal:
        console.width = WIDE
    names = [name for name in SUITES if a.suite == "all" or name.split()[0] == a.suite]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    limits = f"up to {a.sample} tests a suite, at most {a.cap} rows x keys x head dimension and {a.limit:g} s each"
    console.print(f"{', '.join(names)} on {device}: seed {a.seed}, {limits}")
    bounds = {"seed": a.seed, "sample": a.sample, "cap": a.cap, "limit_s": a.limit}
    rows: list[dict] = []
    try:
        for name in names:
            rows += (own := run(name, a, console))
            if a.record:
                record(
                    a.record,
                    [
                        row | {"source": source_of(name, a)} | bounds | {"device": device} | circumstances()
                        for row in own
                    ],
                )
    except Problem as problem:
        console.print(f"error: {problem}", style="red", markup=False)
        return 2
    finally:
        if rows:
            show(rows, console)
    if a.table:
        fill(a.table, "peers", page(read(a.record or RESULTS)))
    return 1 if any(explanation(*found[:3]) is None for found in failures(rows)) else 0


def source_of(name: str, a: argparse.Namespace) -> str:
    return (a.source or str(a.checkout)) if SUITES[name].theirs else f"transformers {version('transformers')}"


def run(name: str, a: argparse.Namespace, console: Console) -> list[dict]:
    """A suite with its progress shown; its rows."""
    suite = SUITES[name]
    columns = (
        TextColumn(f"{name} [progress.description]{{task.description}}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    log = a.events.with_suffix(f".{name.replace(' ', '_')}.log") if a.events else Path(os.devnull)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("collecting", total=None)

        def tell(event: dict) -> None:
            if event["event"] == "planned":
                progress.update(task, total=event["tests"], description="")
            elif event["event"] == "started":
                progress.update(task, description=event["id"].rpartition("/")[2])
            elif event["event"] == "ended":
                progress.advance(task)
            elif event["event"] == "uncollected":
                console.print(f"{event['where']} cannot be imported:\n{event['message']}", markup=False)

        events = events_of(plan_of(suite, a), suite.environment, log, tell)
    if a.events:
        with a.events.open("a") as file:
            file.writelines(
                json.dumps({"suite": name, **event}) + "\n" for event in events if event["event"] == "ended"
            )
    if any(event["event"] == "uncollected" for event in events):
        remedy = (
            "; pip install einops"
            if any("No module named 'einops'" in event.get("message", "") for event in events)
            else ""
        )
        raise Problem(f"a file of {name} cannot be imported, see above{remedy}")
    return rows_of(name, events)


if __name__ == "__main__":
    sys.exit(main())
