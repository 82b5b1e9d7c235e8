"""`python -m examples.demo`: attention at work, as one HTML report."""

import argparse

parser = argparse.ArgumentParser("python -m examples.demo", description="Attention at work, as one HTML report.")
parser.add_argument("--quick", action="store_true", help="tiny lengths, to see that it runs")
parser.add_argument("--out", help="folder of the report")
parser.add_argument("--json", action="store_true", help="JSON on standard output")
parser.add_argument("--device", help="cuda, cuda:1 or cpu (the GPU where there is one)")
a = parser.parse_args()
from . import main  # noqa: E402  after the options: help needs no torch

raise SystemExit(main(quick=a.quick, out=a.out, device=a.device, as_json=a.json))
