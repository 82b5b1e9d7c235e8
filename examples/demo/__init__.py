"""The demo: embeddings of real text by a real model, attention at growing lengths, and an HTML report of both."""

from __future__ import annotations

from typing import Any


def main(**options: Any) -> int:
    """Run the demo (`run.main`). Its modules are imported here, so that help needs no torch."""
    from .run import main

    return main(**options)
