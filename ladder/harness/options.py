"""The options of `python -m ladder`, in a file of their own so that help loads neither torch nor Triton."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import RUNGS

HELP = """\
examples:
  python -m ladder                                               every rung this GPU can run, or all on the simulator
  python -m ladder k4_2 --seqlen 512 --head-dim 64 --causal --check
  python -m ladder k6 --set ping_pong=1 overlap=0                with other values of its Form
  python -m ladder --seqlen 1024 2048 4096 8192 16384 --head-dim 64 128 --json results/ladder.jsonl --plot ladder.svg
  python -m ladder k5 --timeline k5.html                         the simulator's timeline of a small run
  python -m ladder --counters --no-causal                        DRAM and L2 bytes, tensor cores' share, stalls (by ncu)
  python -m ladder --outliers                                    what 8 bits cost where a few entries are large
  python -m ladder page                                          the interactive page, one HTML file
"""


def parser(prog: str = "python -m ladder") -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog, description="Attention from three naive kernels to Hopper's tensor cores: run it, check it, measure it.",
        epilog=HELP, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    made.add_argument("rungs", nargs="*", metavar="RUNG", help=f"{', '.join(RUNGS)}; default all; or `page`")
    made.add_argument(
        "--seqlen",
        type=_positive,
        nargs="+",
        metavar="N",
        help="queries and keys (default 4096; small on the simulator)",
    )
    made.add_argument(
        "--head-dim",
        type=int,
        nargs="+",
        choices=(64, 128),
        metavar="D",
        help="64 or 128 (default 128; 64 on the simulator)",
    )
    made.add_argument(
        "--causal", action=argparse.BooleanOptionalAction, help="only causal or only dense (default both)"
    )
    made.add_argument("--check", action="store_true", help="compare with the oracle, without timing")
    made.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=N", help="values of the rungs' Form, such as block_n=64 stages=3"
    )
    made.add_argument("--rounds", type=_positive, default=15, metavar="N", help="samples per time (default 15)")
    made.add_argument(
        "--rivals",
        default="",
        metavar="A,B",
        help="also time: strobe (the production kernel), flash, cudnn, fa4, flex",
    )
    made.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the simulated schedule")
    made.add_argument("--outliers", action="store_true", help="error of 8-bit methods on inputs with outliers")
    made.add_argument(
        "--counters",
        action="store_true",
        help="hardware counters by Nsight Compute: bytes, utilisation, stalls",
    )
    made.add_argument(
        "--timeline", type=Path, metavar="FILE", help="simulate one rung by modelled time, as .html, .svg or .json"
    )
    made.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="plot rates by rung (.png or .svg), and memory and time as FILE_length",
    )
    made.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="append JSON lines to FILE, or print them instead of a table",
    )
    made.add_argument("--out", type=Path, metavar="FILE", help="file of the page (default ladder.html)")
    made.add_argument("--device", help="cuda, cuda:1 or cpu (default: the GPU if there is one)")
    return made


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number >= 1")
    return int(text)
