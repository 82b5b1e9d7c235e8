"""Mutants that change data: a mask is dropped, or an index, a pointer or a ring's size is off by one."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator

from .mutate import Change, Mutant, mutants

_ACCESSES = ("load", "store", "atomic_add", "atomic_max", "atomic_min", "atomic_xchg")
_MODULES = ("tl", "gl", "ttgl", "language")  # `buffer.store(x)` takes no pointer
_MASKED = ("mask", "other")


def data_mutants(source: str, count: int, seed: int) -> list[Mutant]:
    """At most `count` mutants of the jit functions in a file's source, drawn by the seed, in line order.

    >>> for mutant in data_mutants('''
    ... @triton.jit
    ... def copied(x, out, n):
    ...     tl.store(out + tl.arange(0, 8), x, mask=tl.arange(0, 8) < n)
    ... ''', 9, seed=0):
    ...     print(mutant)
    drop mask, line 4 of copied: tl.store(out + tl.arange(0, 8), x, mask=tl.arange(0, 8) < n)
    shift pointer, line 4 of copied: tl.store(out + tl.arange(0, 8), x, mask=tl.arange(0, 8) < n)
    """
    found = mutants(source, _changes)
    chosen = random.Random(seed).sample(range(len(found)), min(count, len(found)))
    return [found[number] for number in sorted(chosen)]


def _changes(function: ast.FunctionDef) -> Iterator[Change]:
    for node in ast.walk(ast.Module(function.body, [])):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and not isinstance(node.left, ast.Constant):
            yield "ring + 1", node.right, f"({ast.unparse(node.right)} + 1)"
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr == "index" and len(node.args) == 1 and not node.keywords:
            yield "shift index", node.args[0], f"({ast.unparse(node.args[0])}) + 1"
        if node.func.attr in _ACCESSES and node.args and ast.unparse(node.func.value) in _MODULES:
            yield "shift pointer", node.args[0], f"({ast.unparse(node.args[0])}) + 1"
            rest = [keyword for keyword in node.keywords if keyword.arg not in _MASKED]
            if len(rest) < len(node.keywords):
                yield "drop mask", node, ast.unparse(ast.Call(node.func, node.args, rest))
