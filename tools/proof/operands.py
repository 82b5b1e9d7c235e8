"""Left operands of wgmma that ptxas lets clash: two values in one set of registers, of which the first is still to be read.

ptxas 12.8 (Triton 3.6) compiles a loop that multiplies q, loaded before it into registers, and p, made in it, so that p is packed over q's
registers, and from the second turn on p is multiplied with the keys: `s = q k^T; o += p v` with both left operands in registers, of one
shape, and p dead when q is read again. The PTX is right and nothing warns. What the machine code shows of it: a set of registers
that a product with keys and a product with values read, with no write between, where no registers of the PTX are read by both.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

_PTX = re.compile(r"wgmma\.mma_async\S*\s+\{[^}]*\},\s*\{([^}]*)\},\s*%rd\d+,[^;]*?(\d)\s*;")
_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]+)\s*([^;]*);")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_GOAL = re.compile(r"(!?U?P\w+, )?.*`\((\.L_x_\d+)\)")  # of a jump; some name their condition here
_PRODUCT = re.compile(r"R(\d+), R(\d+), gdesc")
_WIDE = {"64": 2, "128": 4}  # registers that such an instruction writes


def clashes(ptx: str, sass: str) -> list[str]:
    """Sets of registers that hold one left operand too many, as text; empty where all is well.

    >>> clashes("", "")
    []
    """
    if "GMMA" not in sass or any(len(kinds) > 1 for kinds in _kinds_in_ptx(ptx).values()):  # the program itself multiplies one value both ways
        return []
    return list(dict.fromkeys(f"R{first}..R{first + 3} at {at}" for first, at in _shared(sass)))


def _kinds_in_ptx(ptx: str) -> dict[str, set[str]]:
    """Left operand in registers -> how its products read the right one: 0 as it lies, 1 transposed."""
    kinds = defaultdict(set)
    for operand, transposed in _PTX.findall(ptx):
        kinds[operand].add(transposed)
    return kinds


def _shared(sass: str) -> Iterator[tuple[int, str]]:
    """(first register, address) of each product that reads what, on some way to it, a product of the other kind read, unwritten since."""
    blocks = _blocks(sass)
    before: dict[str, _Reads] = {label: {} for label in blocks}
    waiting = list(blocks)
    while waiting:  # what is known where a block begins grows until nothing more does
        label = waiting.pop()
        block = blocks[label]
        after = _through(block, before[label])[0]
        for follower in block.followers:
            known = before.get(follower, after)
            combined = {first: known.get(first, frozenset()) | after.get(first, frozenset()) for first in known.keys() | after.keys()}
            if combined != known:
                before[follower] = combined
                waiting.append(follower)
    for label, block in blocks.items():
        yield from _through(block, before[label])[1]


_Reads = dict[int, frozenset[bool]]  # first register of a left operand -> how products have read it since it was written: transposed or not


class _Block(NamedTuple):
    """Instructions (address, name, operands) that run one after the other, and the labels of those that may run next."""

    lines: list[tuple[str, str, str]]
    followers: list[str]


def _through(block: _Block, reads: _Reads) -> tuple[_Reads, list[tuple[int, str]]]:
    """What is known behind a block, and its products that clash."""
    reads, found = dict(reads), []
    for address, name, operands in block.lines:
        product = _PRODUCT.match(operands) if name.startswith(("HGMMA", "QGMMA")) else None
        if product:
            first, transposed = int(product[2]), ".tnspB" in operands
            if (not transposed) in reads.get(first, ()):
                found.append((first, address))
            reads[first] = reads.get(first, frozenset()) | {transposed}
        else:
            for register in _written(name, operands):
                for first in range(register - 3, register + 1):
                    reads.pop(first, None)
    return reads, found


def _blocks(sass: str) -> dict[str, _Block]:
    """Blocks by label, in order. What a jump of unknown goal leads to is entered from nowhere, with nothing known: there roles begin."""
    blocks: dict[str, _Block] = {"": _Block([], [])}
    current, open_ended = blocks[""], True
    for text in sass.splitlines():
        label, line = _LABEL.match(text), _LINE.match(text)
        if label:
            if open_ended:
                current.followers.append(label[1])
            current, open_ended = blocks.setdefault(label[1], _Block([], [])), True
        elif line and open_ended:
            address, predicate, name, operands = line.groups()
            current.lines.append((address, name, operands))
            goal = _GOAL.match(operands) if name.startswith("BRA") else None
            open_ended = bool(predicate or (goal and goal[1]) or name.split(".")[0] not in ("BRA", "BRX", "JMX", "EXIT", "RET"))
            if goal:
                current.followers.append(goal[2])
                if open_ended:  # what follows is a block of its own: the jump's goal has seen no more
                    current.followers.append(address)
                    current = blocks.setdefault(address, _Block([], []))
    return blocks


def _written(name: str, operands: str) -> range:
    """The registers that an instruction writes, as far as its first operand says."""
    first = re.match(r"R(\d+)\b", operands)
    if not first or name.split(".")[0] in ("ST", "STG", "STS", "STL", "SYNCS", "BAR", "RED"):
        return range(0)
    width = next((count for size, count in _WIDE.items() if size in name.split(".")), 4 if name.startswith("LDSM") else 1)
    return range(int(first[1]), int(first[1]) + width)
