"""`python -m ladder`: help and mistakes end before torch is imported."""

import sys

from .harness.options import parser

parser().parse_args()
from .harness.command import main  # noqa: E402

raise SystemExit(main(sys.argv[1:]))
