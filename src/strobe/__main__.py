"""`python -m strobe` is `strobe`."""

from .cli.main import main

raise SystemExit(main())
