"""Functions that Triton compiles, from the text of `mods.emit`. Equal texts give the same function object."""

from __future__ import annotations

import linecache
import zlib
from functools import lru_cache
from importlib.abc import InspectLoader
from importlib.util import module_from_spec, spec_from_loader
from types import CodeType
from typing import Any

_HEAD = "import triton\nimport triton.language as tl\n\n\n"


class _Text(InspectLoader):
    """Loads a module from its text. inspect finds the source through linecache, as Triton needs."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.filename = f"<strobe mod {zlib.crc32(source.encode()):08x}>"

    def get_source(self, fullname: str) -> str:
        return self.source

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.source.encode(), self.filename)


@lru_cache(maxsize=1024)
def mod_function(text: str) -> Any:
    """The `@triton.jit` function of a text, for a kernel's constant `score_mod`, `score_mod_bwd` or `mask_mod`."""
    loader = _Text(f"{_HEAD}{text}\n")
    lines = loader.source.splitlines(keepends=True)
    linecache.cache[loader.filename] = (len(loader.source), None, lines, loader.filename)
    spec = spec_from_loader(f"strobe_mod_{zlib.crc32(loader.source.encode()):08x}", loader)
    if spec is None:
        raise ImportError(f"no module from text: {text.splitlines()[1]}")
    module = module_from_spec(spec)
    module.__file__ = loader.filename
    loader.exec_module(module)
    name = text.split("def ", 1)[1].split("(", 1)[0]
    return getattr(module, name)
