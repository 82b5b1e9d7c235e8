"""Functions that Triton compiles, from the text of `mods.emit`. Equal texts give the same function object."""

from __future__ import annotations

import linecache
import zlib
from functools import lru_cache
from importlib.abc import InspectLoader
from importlib.util import module_from_spec, spec_from_loader
from types import CodeType
from typing import Any, NamedTuple

from ...mods import emit
from ...mods.program import Program
from ...problem.call import Call, Dense
from ...problem.decode import DecodeCall, DecodeProblem
from ...problem.mods import ModTexts
from ...problem.paged import PagedCall
from ...problem.problem import Problem

# `first` reduces equal values to one of them; ptxas drops the shuffles between lanes
_HEAD = "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef first(a, b):\n    return a\n\n\n"


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


class ModFunctions(NamedTuple):
    """A call's functions as constants of kernels. dq_bwd is score_mod_bwd without additions to captured gradients."""

    score_mod: Any = None
    mask_mod: Any = None
    score_mod_bwd: Any = None
    dq_bwd: Any = None


def mod_functions(texts: ModTexts, keys_aligned: bool = True) -> ModFunctions:
    """A call's functions. keys_aligned: tiles begin at multiples of 16 keys, which they do not with documents."""
    score = mod_function(emit.forward_text(texts.score, texts.packed)) if texts.score else None
    mask = mod_function(emit.mask_text(texts.mask, texts.packed)) if texts.mask else None
    if not texts.gradient:
        return ModFunctions(score, mask)
    adds, alone = (
        mod_function(emit.backward_text(texts.gradient, adds, keys_aligned, texts.packed, texts.exact_sums))
        for adds in (True, False)
    )
    return ModFunctions(score, mask, adds, alone)


def loads_by_key(texts: ModTexts) -> int:
    """How many values score_mod and mask_mod load for each key."""
    return sum(emit.loads_by_key(text) for text in (texts.score, texts.mask) if text)


def mod_aux(problem: Problem | DecodeProblem, call: Call | DecodeCall | PagedCall) -> tuple[tuple, tuple, tuple]:
    """What score_mod, mask_mod and score_mod_bwd read in this call."""
    mods = call.mods
    if mods is None:
        return (), (), ()
    diagonal: emit.Diagonal = 0  # of a decode, whose rows are at their positions among the keys
    if isinstance(call, Call):
        if isinstance(problem.layout, Dense):
            diagonal = problem.layout.seqlen_k - problem.layout.seqlen_q
        elif call.cu_seqlens_q is not None and call.cu_seqlens_k is not None:
            diagonal = call.cu_seqlens_q, call.cu_seqlens_k
    found = []
    for text, tensors, numbers in (
        (mods.texts.score, mods.score_tensors, mods.score_numbers),
        (mods.texts.mask, mods.mask_tensors, mods.mask_numbers),
        (mods.texts.gradient, mods.score_tensors, mods.score_numbers),
    ):
        found.append(emit.aux_of(Program.parse(text), tensors, numbers, diagonal) if text else ())
    score, mask, gradient = found
    if mods.texts.gradient and mods.gradients:  # of a backward
        gradient += emit.gradient_aux_of(Program.parse(mods.texts.gradient), mods.gradients)
    return score, mask, gradient


def against_texts(problem: Problem | DecodeProblem, drops: bool = False) -> str | None:
    """Why kernels with hooks cannot run a problem's functions, or None. drops: they know dropout and max_scores."""
    if problem.mods is None:
        return None
    if problem.dtype.itemsize > 4:
        return "functions of scores compute in float32"
    if problem.batch_invariant:
        return "batch_invariant=True has no functions of scores"
    if not drops and problem.mods.dropout:
        return "drops no weights (dropout_p)"
    if not drops and problem.mods.max_scores:
        return "returns no max_scores"
    return None
