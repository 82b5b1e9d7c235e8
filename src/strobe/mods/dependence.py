"""What the nodes of a Program depend on: which elements of a tile have the same value, which differ, which are 0."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from .program import INT, LONG, Program

MOST_SUMMED = 16  # keys, and queries, whose gradients for one place are summed before an atomic adds them


def sources(program: Program, nodes: Sequence[int]) -> set[int]:
    """Nodes and what they depend on."""
    found, stack = set(), [*nodes]
    while stack:
        n = stack.pop()
        if n not in found:
            found.add(n)
            stack += program.nodes[n].args
    return found


@lru_cache(maxsize=64)
def constant_over(program: Program, name: str) -> list[int]:
    """For each node: over how many positions `name` that begin at a multiple of that number it is constant, a power of
    two up to MOST_SUMMED; more than that where it does not depend on the position.
    """
    found: list[int] = []
    for node in program.nodes:
        of_args = min([MOST_SUMMED + 1, *(found[arg] for arg in node.args)])
        if node.op == "input":
            of_args = 1 if node.value in (name, "score", "grad") else MOST_SUMMED + 1
        elif node.op in ("floordiv", "shr") and program.nodes[node.args[1]].op == "const":
            source, by = program.nodes[node.args[0]], program.nodes[node.args[1]].value
            if (source.op, source.value) == ("input", name) and type(by) is int and by > 0:
                size = 1 << by if node.op == "shr" else by
                of_args = min(size & -size, MOST_SUMMED)
        found.append(of_args)
    return found


def has_positions(program: Program, at: int) -> bool:
    """Whether a node is a tensor in the emitted text. `emit` gives captured integers the shape of q_idx."""
    shaped = ("score", "grad", "q", "k", "diagonal")
    return any(
        program.nodes[n].op == "number" or (program.nodes[n].op == "input" and program.nodes[n].value in shaped)
        for n in sources(program, [at])
    )


def differs(program: Program, at: int, name: str) -> bool:
    """Whether a node differs between any two positions `name`: the position plus or minus what is constant over it."""
    node = program.nodes[at]
    if node.op == "input":
        return node.value == name
    if node.op in ("neg", "cast") and node.kind in (INT, LONG):
        return differs(program, node.args[0], name)
    if node.op not in ("add", "sub"):
        return False
    constant = constant_over(program, name)
    return any(differs(program, a, name) and constant[b] > MOST_SUMMED for a, b in (node.args, node.args[::-1]))


def reads_grad(program: Program, at: int) -> bool:
    """Whether a node has the shape of dscore."""
    return any(program.nodes[n].value == "grad" for n in sources(program, [at]))


def vanishes(program: Program, at: int) -> bool:
    """Whether a node is 0 where dscore is: dscore times factors that are finite, since they read no tensor or score."""
    node = program.nodes[at]
    if node.op == "input":
        return node.value == "grad"
    if node.op == "mul":
        return any(vanishes(program, a) and _is_finite(program, b) for a, b in (node.args, node.args[::-1]))
    return node.op == "neg" and vanishes(program, node.args[0])


def _is_finite(program: Program, at: int) -> bool:
    """Whether a node is a constant or an integer, as a distance is."""
    node = program.nodes[at]
    if node.op == "const":
        return math.isfinite(float(node.value or 0))
    if node.op in ("neg", "abs"):
        return _is_finite(program, node.args[0])
    return node.op == "cast" and program.nodes[node.args[0]].kind in (INT, LONG)
