"""The options of `strobe sim`, in a file of their own so that help loads neither torch nor Triton."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

MAX_ITERATIONS = 100_000  # of one loop of a kernel; more are reported as a loop without end
MODES = ("eager", "lazy", "random", "pct", "timed")
SHARED_KIB = {
    80: 163,
    86: 99,
    89: 99,
    90: 227,
    100: 227,
    103: 227,
    120: 99,
}  # per CTA (CUDA C++ Programming Guide, compute capabilities)
# resident on a multiprocessor at once (same source)
MOST_WARPS = {80: 64, 86: 48, 89: 48, 90: 64, 100: 64, 103: 64, 120: 48}
MOST_CTAS = {80: 32, 86: 16, 89: 24, 90: 32, 100: 32, 103: 32, 120: 24}
REGISTERS = 65536  # of a multiprocessor
PROGRAM = "strobe sim" if __package__ == "strobe.sim" else "strobe-sim"
EXAMPLE = """\
examples:
  PROGRAM kernels.py::run bf16[200,320] bf16[320,256]                    a function that launches, on normal numbers
  PROGRAM kernels.py::kernel f32[1000] nan:f32[1000] 1000 --grid 8       a kernel itself
  PROGRAM kernels.py::run bf16[64,64] --timeline run.html                a picture (.html, .svg) or a trace (.json)
  PROGRAM kernels.py::run bf16[64,64] --mutate --ledger survivors.json   drop each synchronisation; is it noticed?
arguments: bf16[2,64] fp16 f32 i32 fp8e4 fp8e5 (normal numbers), nan: zeros: ones: before it, tma:bf16[64,64]/64x32 (a
descriptor with its block), numbers, True, False, None, name=value
"""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. `strobe sim mutate ...` means `strobe sim ... --mutate`."""
    return _parser().parse_args([*argv[1:], "--mutate"] if argv[:1] == ["mutate"] else argv)


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        PROGRAM,
        description="Run a kernel on the CPU and find its races, deadlocks and missing fences.",
        epilog=EXAMPLE.replace("PROGRAM", PROGRAM),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("scene", metavar="FILE::NAME", help="a function that launches kernels, or a kernel")
    made.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="see below")
    targets = [f"sm_{capability}" for capability in SHARED_KIB]
    made.add_argument(
        "--target",
        default="sm_90",
        choices=targets,
        help="GPU whose memory limits and operations apply (default sm_90)",
    )
    made.add_argument("--mode", default=None, choices=MODES, help="the schedule (default: each in turn but timed)")
    made.add_argument("--seed", type=_seed, default=0, metavar="N", help="seed of the schedule and of the arguments")
    made.add_argument(
        "--seeds", type=_positive, default=1, metavar="N", help="number of seeds per mode, starting at --seed"
    )
    made.add_argument("--sms", type=_positive, default=4, metavar="N", help="number of CTAs in flight (default 4)")
    made.add_argument(
        "--max-iterations",
        type=_positive,
        default=MAX_ITERATIONS,
        metavar="N",
        help=f"report a loop that runs for more iterations (default {MAX_ITERATIONS:,})",
    )
    made.add_argument("--grid", type=_grid, default=(1,), metavar="X[,Y[,Z]]", help="grid of a kernel")
    made.add_argument("--num-warps", type=_positive, default=4, metavar="N", help="warps of a kernel (default 4)")
    made.add_argument(
        "--ordered",
        action="store_true",
        help="report unordered floating-point adds to one address (bits may differ between runs)",
    )
    made.add_argument(
        "--check",
        action="append",
        choices=("read_fences", "atomic_order", "contraction", "coverage", "overflow", "hints", "threads"),
        help="look for these faults too; repeatable",
    )
    made.add_argument("--cuda", action="store_true", help="serve tensors that the file asks for on cuda from the CPU")
    made.add_argument("--costs", action="store_true", help="print sectors, bank conflicts, bytes and occupancy")
    made.add_argument("--all-configs", action="store_true", help="run each configuration of autotuned kernels")
    made.add_argument("--fuse", action="store_true", help="round a product and the sum behind it once, as GPUs do")
    made.add_argument(
        "--timeline", type=Path, metavar="FILE", help="write a timeline of modelled time (.html, .svg, .json)"
    )
    made.add_argument("--mutate", action="store_true", help="drop or weaken one synchronisation at a time")
    made.add_argument(
        "--file", type=Path, action="append", metavar="FILE", help="mutate this file instead of the scene's; repeatable"
    )
    made.add_argument(
        "--data-mutants",
        type=_positive,
        default=0,
        metavar="N",
        help="with --mutate: also N mutants of masks, indices, pointers and ring sizes, drawn by --seed",
    )
    made.add_argument("--judges", action="store_true", help="run every detector on every mutant")
    made.add_argument("--ledger", type=Path, metavar="FILE", help="JSON file that explains surviving mutants")
    made.add_argument("--json", action="store_true", help="JSON on standard output")
    return made


def _seed(text: str) -> int:
    if not text.removeprefix("-").isdecimal() or not -(2**63) <= int(text) < 2**64:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of 64 bits")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number >= 1")
    return int(text)


def _grid(text: str) -> tuple[int, ...]:
    sizes = text.split(",")
    if len(sizes) > 3 or not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected one to three positive sizes, such as 8 or 4,2")
    return tuple(map(int, sizes))
