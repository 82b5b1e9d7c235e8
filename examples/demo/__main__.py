"""`python -m examples.demo`: run the demo and write an HTML report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status. 0: all results agree. 1: some do not. 2: the demo cannot run as asked."""
    parser = argparse.ArgumentParser("python -m examples.demo", description="Attention at work, as one HTML report.")
    parser.add_argument("--quick", action="store_true", help="tiny lengths, as a smoke test")
    parser.add_argument("--out", help="folder of the report")
    parser.add_argument("--json", action="store_true", help="JSON on standard output")
    parser.add_argument("--device", help="cuda, cuda:1 or cpu (default: the GPU if there is one)")
    a = parser.parse_args(argv)
    from strobe.cli.main import device_named  # imported after parsing: help needs no torch
    from strobe.errors import InvalidProblem, UnsupportedProblem

    from . import run

    try:
        device_named(a.device)
        return run.main(quick=a.quick, out=a.out, device=a.device, as_json=a.json)
    except (InvalidProblem, UnsupportedProblem) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
