"""The packages of this repository are importable in their tests, with engines or with test doubles of them."""

from __future__ import annotations

import sys
from pathlib import Path

PACKAGES = Path(__file__).parents[2] / "packages"
sys.path[:0] = [str(path / "src") for path in sorted(PACKAGES.iterdir()) if (path / "src").is_dir()]
