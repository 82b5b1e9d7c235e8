"""`strobe bench`: measure the suite named by the flags, and write a table, JSON lines and plots."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from ..errors import InvalidProblem
from ..problem.target import FAKES
from . import decode, mods, paged, plot, table
from .cases import Case, on_data, suite
from .data import NORMAL
from .rivals import pick
from .run import Options, circumstances, opened, rows, written

_PARTS = {
    "keywords": "keywords to a Call",
    "decide": "look up the Choice of a call seen before",
    "op": "the op, through the dispatcher",
    "call": "strobe.attention whole, bypassing the dispatcher",
    "call_causal": "the same with causal=True",
    "first_time": "describe and select a call not seen before",
    "flash_attn": "strobe.flash_attn.flash_attn_func, FlashAttention-2's interface",
    "sdpa": "torch's scaled_dot_product_attention, including its kernel",
    "sdpa_strobe": "the same through strobe, after strobe.integrations.sdpa.enable()",
    "sdpa_64": "torch's scaled_dot_product_attention on 64 keys",
    "sdpa_strobe_64": "the same through strobe, which calls torch's kernel",
}


def run(arguments: argparse.Namespace, device: torch.device) -> int:
    """Run a suite. Returns 1 if strobe has no time for a case, because it failed or its result was wrong; else 0."""
    rounds = (5 if device.type == "cpu" else 10) if arguments.rounds is None else arguments.rounds
    if rounds < 1:
        raise InvalidProblem("rounds", rounds, "a number >= 1", "leave it out")
    if device.type == "cpu" and (arguments.graph or arguments.flush):
        raise InvalidProblem("--graph, --flush", "a CPU", "a GPU", "leave them out")
    if arguments.suite == "overhead":
        return _overhead(arguments)
    if arguments.suite == "distributed":
        return _distributed(arguments, device)
    if arguments.suite == "decode":
        return _decode(arguments, Options(device, arguments.kernel, rounds))
    if arguments.suite == "mods":
        return _mods(arguments, Options(device, arguments.kernel, rounds))
    if arguments.suite == "paged":
        return _paged(arguments, Options(device, arguments.kernel, rounds))
    picture = _picture(arguments)
    if arguments.data != NORMAL and arguments.suite == "cpu":
        raise InvalidProblem(
            "--data", repr(arguments.data), "forward or backward", "the suite for CPUs is measured on normal numbers"
        )
    cases = on_data(suite(arguments.suite, arguments.case), arguments.data, arguments.suite == "backward")
    if arguments.list:
        _list(cases, arguments.json)
        return 0
    rivals = pick([name for name in arguments.rivals.split(",") if name], device)
    options = Options(device, arguments.kernel, rounds, graph=arguments.graph, flush=arguments.flush)
    with ExitStack() as stack:
        file = opened(arguments.json, stack)
        found = list(rows(table.follow(cases, f"bench {arguments.suite}"), rivals, options, file))
    if arguments.json != "-":
        table.bench(found)
    if picture:
        for path in plot.save(found, picture):
            print(f"wrote {path}", file=sys.stderr)
    return 0 if all(row["ms"] for row in found) else 1


def _picture(arguments: argparse.Namespace) -> Path | None:
    """Where to draw: --plot, else strobe_SUITE.png in the current folder if matplotlib is installed and a table is
    printed. Raises UnsupportedProblem if --plot cannot be written.
    """
    if arguments.plot:
        plot.check(arguments.plot)
        return arguments.plot
    drawn = plot.available() and not arguments.no_plot and arguments.json != "-"
    return Path(f"strobe_{arguments.suite}.png") if drawn else None


def roofline(arguments: argparse.Namespace) -> int:
    """Print counted cycles for a GPU that need not be present. Raises InvalidProblem for flags that need a kernel to
    run. Returns 0.
    """
    from . import cycles, cycles_plot

    a = arguments
    ignored = {
        "--case": a.case,
        "--rivals": a.rivals,
        "--kernel": a.kernel,
        "--rounds": a.rounds is not None,
        "--graph": a.graph,
        "--flush": a.flush,
        "--device": a.device,
        "--data": a.data != NORMAL,
    }
    for flag in [flag for flag, given in ignored.items() if given]:
        raise InvalidProblem(
            flag,
            "a value",
            "none beside bench roofline, which runs no kernel",
            "leave it out: cycles are counted, for --target",
        )
    name = next((one for one in FAKES if a.target is not None and one.lower() == a.target.lower()), a.target)
    if name not in FAKES:
        known = ", ".join(one for one, fake in FAKES.items() if fake.capability in cycles.UNITS)
        raise InvalidProblem("--target", name, f"one of {known}", "name the GPU, such as B200")
    if a.plot:
        plot.check(a.plot)
    rows = cycles.table(FAKES[name])
    if a.list:
        print(json.dumps([row.name for row in rows])) if a.json else table.show(["step"], [[row.name] for row in rows])
        return 0
    if a.json:
        with ExitStack() as stack:
            file = opened(a.json, stack)
            for row in rows:
                print(
                    json.dumps(
                        {
                            "target": name,
                            "step": row.name,
                            "ctas": row.ctas,
                            "by_fma": row.by_fma,
                            **row.cycles._asdict(),
                        }
                    ),
                    file=file,
                )
    if a.json != "-":
        cycles.show(FAKES[name], table.show)
    if a.plot:
        print(f"wrote {cycles_plot.save(FAKES[name], a.plot)}", file=sys.stderr)
    return 0


def _decode(arguments: argparse.Namespace, options: Options) -> int:
    if arguments.graph or arguments.flush or arguments.plot or arguments.data != NORMAL:
        raise InvalidProblem(
            "--data, --graph, --flush, --plot",
            "decode",
            "none of them",
            "decode already runs as a graph over cold caches, and has no plot",
        )
    cases = decode.suite(arguments.case)
    if arguments.list:
        lines = [
            [c.name, c.batch, c.keys, c.page_size, c.heads_q, c.heads_kv, c.head_dim, "float8" if c.fp8 else "bfloat16"]
            for c in cases
        ]
        print(json.dumps([case.name for case in cases])) if arguments.json else table.show(
            ["case", "B", "keys", "page", "H_q", "H_kv", "D", "cache"], lines
        )
        return 0
    rivals = decode.pick([name for name in arguments.rivals.split(",") if name], options.device)
    return _measured(cases, partial(decode.measure, rivals=rivals, options=options), arguments)


def _mods(arguments: argparse.Namespace, options: Options) -> int:
    if arguments.graph or arguments.flush or arguments.plot or arguments.data != NORMAL:
        raise InvalidProblem("--data, --graph, --flush, --plot", "mods", "none of them", "leave them out")
    cases = mods.suite(arguments.case)
    if arguments.list:
        lines = [[c.name, c.batch, c.seqlen, c.heads, c.head_dim] for c in cases]
        names = json.dumps([case.name for case in cases])
        print(names) if arguments.json else table.show(["case", "B", "S", "H", "D"], lines)
        return 0
    rivals = mods.pick([name for name in arguments.rivals.split(",") if name], options.device)
    return _measured(cases, partial(mods.measure, rivals=rivals, options=options), arguments)


def _paged(arguments: argparse.Namespace, options: Options) -> int:
    if arguments.graph or arguments.flush or arguments.plot or arguments.data != NORMAL:
        raise InvalidProblem("--data, --graph, --flush, --plot", "paged", "none of them", "it runs as decode does")
    cases = paged.suite(arguments.case)
    if arguments.list:
        lines = [[c.name, len(c.lengths), sum(c.lengths), sum(c.news), c.page_size, c.fp8] for c in cases]
        names = json.dumps([case.name for case in cases])
        heads = ["case", "B", "keys", "tokens", "page", "float8"]
        print(names) if arguments.json else table.show(heads, lines)
        return 0
    rivals = paged.pick([name for name in arguments.rivals.split(",") if name], options.device)
    return _measured(cases, partial(paged.measure, rivals=rivals, options=options), arguments)


def _measured(cases: Sequence, measure: Callable[..., dict], arguments: argparse.Namespace) -> int:
    """Measure each case, write its row and print the table. Returns 1 if strobe has no time for a case, else 0."""
    with ExitStack() as stack:
        followed = table.follow(cases, f"bench {arguments.suite}")
        found = list(written((measure(case) for case in followed), opened(arguments.json, stack)))
    if arguments.json != "-":
        table.bench(found)
    return 0 if all(row["ms"] for row in found) else 1


def _list(cases: list[Case], as_json: str | None) -> None:
    if as_json:
        print(json.dumps([case.name for case in cases]))
        return
    lines = [
        [
            c.name,
            c.data,
            c.batch,
            c.seqlen,
            c.heads_q,
            c.groups,
            c.head_dim,
            c.width_v,
            str(c.dtype).removeprefix("torch."),
        ]
        for c in cases
    ]
    table.show(["case", "data", "B", "S", "H_q", "H_kv", "D", "D_v", "dtype"], lines)


def _overhead(arguments: argparse.Namespace) -> int:
    from .overhead import measure

    a = arguments
    if a.case or a.rivals or a.plot or a.kernel or a.rounds or a.data != NORMAL:
        flags = "--case, --data, --rivals, --plot, --kernel, --rounds"
        raise InvalidProblem(flags, "overhead", "none of them", "it measures the parts of a call, all together")
    if arguments.list:
        print(json.dumps(list(_PARTS))) if arguments.json else table.show(["part", ""], list(_PARTS.items()))
        return 0
    found = measure()
    if arguments.json:
        with ExitStack() as stack:
            print(json.dumps(found | circumstances(torch.device("cpu"))), file=opened(arguments.json, stack))
    if arguments.json != "-":
        lines = [[name, us, _PARTS.get(name, "")] for name, us in found.items()]
        table.show(
            ["part", "us", ""], lines, "host time of a call on tensors of one element, with a kernel that does nothing"
        )
    return 0


def _distributed(arguments: argparse.Namespace, device: torch.device) -> int:
    from . import distributed

    a = arguments
    if a.rivals or a.plot or a.kernel or a.graph or a.flush or a.rounds or a.data != NORMAL:
        flags = "--data, --flush, --graph, --kernel, --plot, --rivals, --rounds"
        raise InvalidProblem(flags, "distributed", "none of them", "it runs its own processes and contenders")
    if device.index is not None:
        raise InvalidProblem("--device", device, "cuda or cpu", "it runs on all GPUs")
    on_gpus = device.type == "cuda" and torch.cuda.device_count() > 1
    cases = distributed.suite(a.case, not on_gpus)
    if a.list:
        print(json.dumps([c.name for c in cases])) if a.json else table.show(["case"], [[c.name] for c in cases])
        return 0
    place = torch.device("cuda" if on_gpus else "cpu")
    rows: list[dict] = []
    with ExitStack() as stack:
        file = opened(a.json, stack) if a.json else None
        for row in distributed.measure(cases, place):
            rows.append(row)
            if file is not None:
                print(json.dumps(row | circumstances(device)), file=file, flush=True)
            if a.json != "-":
                print(distributed.line(row), file=sys.stderr, flush=True)
    if a.json != "-":
        names = ("case", "contender", "forward", "backward", "forward_share", "backward_share", "why")
        lines = [[row.get(name) if name != "why" else row.get(name) or "" for name in names] for row in rows]
        table.show(["case", "", "fwd TFLOP/s", "bwd", "share fwd", "bwd", ""], lines, "TFLOP/s per GPU")
    return 0 if all(row["forward"] for row in rows if row["contender"] == "keys") else 1
