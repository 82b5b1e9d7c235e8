"""Tuple types that build their name on first use, as Triton does from 3.7 on.

Triton 3.6 builds the name of a tuple's type, including that of every element type, whenever it creates a tuple. A
one-second launch creates about 20,000 tuples, and only error messages use the names. Building them took a sixteenth of
the simulator's time (`results/tuning.jsonl`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from unittest import mock

from triton import language as tl


def _init(self: tl.tuple_type, types: list, fields: list[str] | None = None) -> None:
    self.types, self.fields = types, fields or [""] * len(types)


def _name(self: tl.tuple_type) -> str:
    return "[" + ",".join(f"{field}:{kind}" for field, kind in zip(self.fields, self.types)) + "]"


def names_when_asked() -> AbstractContextManager[object]:
    """A context in which tuple types have lazy names. It does nothing under a Triton whose tuple types differ."""
    if set(vars(tl.tuple_type([]))) != {"types", "fields", "name"}:
        return nullcontext()
    return mock.patch.multiple(tl.tuple_type, create=True, __init__=_init, name=property(_name))
