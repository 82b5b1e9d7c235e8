"""`python -m ladder`: help and mistakes end before torch is imported."""

import sys

from .harness.options import parser

if __name__ == "__main__":
    parser().parse_args()
    from .harness.command import main

    raise SystemExit(main(sys.argv[1:]))
