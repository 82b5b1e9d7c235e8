"""Types of tuples that spell out their names only when asked, as in Triton from 3.7 on.

Triton 3.6 makes the text of a tuple's type, with that of each type in it, whenever it makes a tuple: some twenty
thousand in a launch of a second, and nobody reads it but errors. That was a sixteenth of the simulator's time
(`results/tuning.jsonl`).
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
    """Within it tuples are typed so; with a Triton whose types of tuples do not keep just types, fields and a name, as
    they are.
    """
    if set(vars(tl.tuple_type([]))) != {"types", "fields", "name"}:
        return nullcontext()
    return mock.patch.multiple(tl.tuple_type, create=True, __init__=_init, name=property(_name))
