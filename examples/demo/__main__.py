"""`python -m examples.demo`: attention at work, as one HTML report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """0 if everything agreed, 1 if not, 2 if the demo cannot run as asked."""
    parser = argparse.ArgumentParser("python -m examples.demo", description="Attention at work, as one HTML report.")
    parser.add_argument("--quick", action="store_true", help="tiny lengths, to see that it runs")
    parser.add_argument("--out", help="folder of the report")
    parser.add_argument("--json", action="store_true", help="JSON on standard output")
    parser.add_argument("--device", help="cuda, cuda:1 or cpu (the GPU where there is one)")
    a = parser.parse_args(argv)
    from strobe.cli.main import device_named  # after the options: help needs no torch
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
