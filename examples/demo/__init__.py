"""The demo: real text through a real model, attention at growing length, and a report of both as one HTML file."""

from __future__ import annotations

from typing import Any


def main(**options: Any) -> int:
    """`run.main`, whose modules are loaded with it: help needs no torch."""
    from .run import main

    return main(**options)
