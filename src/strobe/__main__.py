"""`python -m strobe` is `strobe`."""

from .cli import main

raise SystemExit(main())
