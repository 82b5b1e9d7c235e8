"""The command line: `strobe check`, `explain`, `bench`, `sim` and `env`. Each command is a thin wrapper around the
library.

Exit codes: 0 success; 1 a check or measurement failed; 2 invalid arguments, or the output cannot be written; 130
interrupted.
"""

from __future__ import annotations

import argparse
import errno
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .. import __version__
from ..errors import InvalidProblem, UnsupportedProblem

SUITES = ("forward", "backward", "decode", "paged", "mods", "distributed", "overhead", "cpu", "roofline")
MOST_ELEMENTS = 2**59  # per tensor in `explain`: torch counts bytes in 64 bits


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. argv None means sys.argv[1:].

    >>> shape = ["--seqlen-q", "64", "--head-dim", "32"]
    >>> main(["explain", *shape, "--dtype", "float32", "--target", "CPU"])  # doctest: +ELLIPSIS
    problem   B=1 S_q=64 S_k=64 H_q=8 H_kv=8 D=32 float32, full, scale 0.177
    ...
    0
    """
    if sys.stdout is None:  # the shell closed it: `strobe env >&-`
        print("strobe: standard output is closed", file=sys.stderr)
        return 2
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except (InvalidProblem, UnsupportedProblem) as error:
        print(f"strobe: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("strobe: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        if error.errno == errno.ENOSPC:  # no message for EPIPE: the reader has closed the pipe, as in `| head`
            print(f"strobe: standard output: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes the rest at exit
        return 2


def _run(argv: list[str]) -> int:
    if argv[:1] == ["sim"]:
        return _sim(argv[1:])  # sim's own parser gets the rest: argparse.REMAINDER cannot start with an --option
    parser = _parser()
    if not argv:
        parser.print_help()
        return 0
    arguments = parser.parse_args(argv)
    return arguments.run(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="strobe", description="Exact attention on CPUs and GPUs: explain, check and measure it."
    )
    parser.add_argument("--version", action="version", version=f"strobe {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    _common(
        commands.add_parser("check", help="check this machine, and compare every kernel with the oracle"),
        _check,
        device=False,
    )
    _common(commands.add_parser("env", help="print versions and devices, for a bug report"), _env, device=False)

    explain = commands.add_parser("explain", help="show the kernel for a shape, and why other kernels cannot run it")
    for flag, number in (("--batch", 1), ("--seqlen-q", 4096), ("--heads-q", 8), ("--head-dim", 64)):
        explain.add_argument(flag, type=int, default=number, metavar="N", help=f"default {number}")
    for flag, other in (("--seqlen-k", "--seqlen-q"), ("--heads-kv", "--heads-q"), ("--head-dim-v", "--head-dim")):
        explain.add_argument(flag, type=int, metavar="N", help=f"default: same as {other}")
    explain.add_argument("--dtype", default="bfloat16", choices=("float16", "bfloat16", "float32", "float64"))
    explain.add_argument("--causal", action="store_true")
    explain.add_argument(
        "--window",
        nargs=2,
        type=_bound,
        metavar=("LEFT", "RIGHT"),
        help="keys on each side of the diagonal; none is unbounded",
    )
    explain.add_argument("--backward", action="store_true", help="also select the kernel for gradients")
    explain.add_argument("--kernel", help='a family ("portable") or one kernel ("portable.forward")')
    explain.add_argument(
        "--target", metavar="NAME", help="a device that need not be present, such as H200 (default: this machine's)"
    )
    _common(explain, _explain, device=False)

    bench = commands.add_parser("bench", help="measure strobe and rival libraries")
    bench.add_argument("suite", choices=SUITES, metavar="SUITE", help=f"one of {', '.join(SUITES)}")
    bench.add_argument(
        "--case", action="append", default=[], metavar="NAME", help="a case or a pattern such as 'd128_*'; repeatable"
    )
    bench.add_argument(
        "--data",
        default="normal",
        metavar="NAME",
        help="inputs: a family such as sharp16, all families, or a file of q, k, v",
    )
    rivals = (
        "names separated by commas (default: all for this device); @REVISION or @FOLDER: strobe at a git "
        "revision or in a folder"
    )
    bench.add_argument("--rivals", default="", metavar="A,B", help=rivals)
    bench.add_argument("--kernel", help="restrict strobe to a kernel family or a kernel")
    bench.add_argument(
        "--rounds", type=int, metavar="N", help="interleaved samples of each contender (default 10; 5 on a CPU)"
    )
    bench.add_argument("--graph", action="store_true", help="time replays of CUDA graphs, to exclude host time")
    bench.add_argument("--flush", action="store_true", help="empty the GPU's L2 before each call")
    bench.add_argument("--list", action="store_true", help="print the names of the suite's cases and exit")
    bench.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="write bars as .png, .svg or .pdf, and a roofline plot to FILE_roofline (default: strobe_SUITE.png if "
        "matplotlib is installed; of forward, backward and cpu)",
    )
    bench.add_argument("--no-plot", action="store_true", help="draw nothing")
    bench.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="append JSON lines to FILE, or print them instead of a table",
    )
    bench.add_argument("--device", help="cuda, cuda:1 or cpu")
    bench.add_argument(
        "--target",
        metavar="NAME",
        help="roofline only: the GPU whose cycles to count, such as B200; combines only with --plot, --json and --list",
    )
    bench.set_defaults(run=_bench)

    commands.add_parser(
        "sim", help="run a kernel on the CPU and find races, deadlocks and missing fences"
    )  # only for the help text
    return parser


def _sim(argv: list[str]) -> int:
    from ..sim.options import parse

    parse(argv)  # exits for --help and invalid arguments, before torch is imported
    try:
        from ..sim.command import run
    except ModuleNotFoundError as error:
        raise UnsupportedProblem(f"strobe sim needs {error.name}: pip install 'strobe-attention[sim,cli]'") from error
    return run(argv)


def _common(command: argparse.ArgumentParser, run, device: bool = True) -> None:
    command.add_argument("--json", action="store_true", help="JSON on standard output")
    if device:
        command.add_argument("--device", help="cuda, cuda:1 or cpu (default: the GPU if there is one)")
    command.set_defaults(run=run)


def _bound(text: str) -> int | None:
    try:
        return None if text.lower() == "none" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number of keys or none") from None


def _env(arguments: argparse.Namespace) -> int:
    from ..bench.machine import facts

    lines = facts()
    print(
        json.dumps(lines, indent=1)
        if arguments.json
        else "\n".join(f"{name:<13} {words}" for name, words in lines.items())
    )
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from ..bench import machine, table

    found = list(machine.checks())
    failed = [check.name for check in found if check.state == "FAIL"]
    if arguments.json:
        print(json.dumps({"passed": not failed, "checks": [check._asdict() for check in found]}, indent=1))
    else:
        table.show(["check", "result", ""], found)
        print(f"FAIL: {', '.join(failed)}" if failed else "PASS")
    return 1 if failed else 0


def _explain(arguments: argparse.Namespace) -> int:
    import torch

    from ..problem.call import Call
    from ..problem.mask import causal, full, window
    from ..problem.problem import Problem
    from ..selection.select import select

    a = arguments
    keys = (a.batch, _or(a.seqlen_k, a.seqlen_q), _or(a.heads_kv, a.heads_q))
    sizes = ((a.batch, a.seqlen_q, a.heads_q, a.head_dim), (*keys, a.head_dim), (*keys, _or(a.head_dim_v, a.head_dim)))
    for size in sizes:
        if min(size) < 0 or math.prod(max(n, 1) for n in size) > MOST_ELEMENTS:
            raise InvalidProblem(
                "shape", list(size), f"sizes >= 0 of at most {MOST_ELEMENTS:,} elements", "see strobe explain --help"
            )
    # meta tensors need no memory for large shapes
    q, k, v = (torch.empty(size, dtype=getattr(torch, a.dtype), device="meta") for size in sizes)
    mask = (causal() if a.causal else full()) & (window(*a.window) if a.window else full())
    problem = Problem.from_call(Call(q, k, v, needs_grad=a.backward, kernel=a.kernel or "").with_mask(mask))
    choice = select(problem, _target(a.target))
    print(json.dumps(_as_json(choice), indent=1) if a.json else choice)
    return 0


def _or(given: int | None, other: int) -> int:
    return other if given is None else given


def _target(name: str | None):
    from ..problem.target import FAKES, Target

    if name is None:
        return Target.of(device_named(None))
    known = {fake.lower(): target for fake, target in FAKES.items()}
    if name.lower() not in known:
        raise InvalidProblem("target", repr(name), f"one of {', '.join(FAKES)}", "leave it out for this machine")
    return known[name.lower()]


def _as_json(choice) -> dict:
    plans = {}
    for direction in ("forward", "backward"):
        plan = getattr(choice, direction)
        cost = plan and plan.kernel.cost(choice.problem)
        plans[direction] = plan and {
            "kernel": plan.kernel.name,
            "config": str(plan.config),
            "flops": cost.flops,
            "bytes": cost.moved_bytes,
        }
        if plan and choice.target.peak_tflops:
            plans[direction]["ceiling_ms"], plans[direction]["bound"] = choice.ceiling_ms(plan)
    rejected = [{"kernel": name, "reason": reason} for name, reason in choice.rejections]
    return {"problem": str(choice.problem), "target": str(choice.target), **plans, "rejected": rejected}


def device_named(name: str | None):
    """The named device; for None the GPU if there is one, else the CPU.

    Raises InvalidProblem for an unknown name, UnsupportedProblem for a CUDA device that torch does not see.
    """
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidProblem(
            "device", repr(name), "cuda, cuda:1 or cpu", "leave it out for this machine's own"
        ) from error
    if device.type not in ("cuda", "cpu"):
        raise InvalidProblem("device", repr(name), "cuda, cuda:1 or cpu", "strobe has no kernels for others")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UnsupportedProblem(f"device {name}: torch sees {torch.cuda.device_count()} CUDA devices here")
    return device


def _bench(arguments: argparse.Namespace) -> int:
    from ..bench.command import roofline, run

    if arguments.suite == "roofline":
        return roofline(arguments)
    if arguments.target:
        raise InvalidProblem("--target", arguments.target, "bench roofline", "other suites measure a device: --device")
    name = arguments.device
    if arguments.suite in ("cpu", "overhead"):
        if name not in (None, "cpu"):
            raise InvalidProblem("device", repr(name), "cpu", f"bench {arguments.suite} is measured there")
        name = "cpu"
    device = device_named(name)
    if (
        name is None
        and device.type == "cpu"
        and arguments.suite in ("forward", "backward", "decode", "paged", "mods")
        and not arguments.list
    ):
        raise UnsupportedProblem(
            f"bench {arguments.suite}: torch sees no CUDA device; `strobe bench cpu` is for this machine, --device "
            "cpu insists"
        )
    return run(arguments, device)
