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

_PTX = re.compile(r"wgmma\.mma_async\S*\s+\{[^}]*\},\s*\{([^}]*)\},\s*%rd\d+,[^;]*?(\d)\s*;")
_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]+)\s*([^;]*);")
_LABEL = re.compile(r"^(\.L_x_\d+):")
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
    """(first register, address) of each product in a loop that reads what a product of the other kind read before, unwritten since."""
    for body in _loops(sass):
        # first register of a left operand -> whether it was read transposed; twice round, so that a loop's end meets its beginning
        last: dict[int, bool] = {}
        for turn in range(2):
            for address, name, operands in body:
                product = _PRODUCT.match(operands) if name.startswith("HGMMA") or name.startswith("QGMMA") else None
                if product:
                    first, transposed = int(product[2]), ".tnspB" in operands
                    if turn and last.get(first, transposed) != transposed:
                        yield first, address
                    last[first] = transposed
                else:
                    for register in _written(name, operands):
                        for first in range(register - 3, register + 1):
                            last.pop(first, None)


def _loops(sass: str) -> Iterator[list[tuple[str, str, str]]]:
    """The bodies of loops: from a label to the last branch back to it."""
    lines: list[tuple[str, str, str]] = []
    labels: dict[str, int] = {}
    ends: dict[str, int] = {}
    for text in sass.splitlines():
        label, line = _LABEL.match(text), _LINE.match(text)
        if label:
            labels[label[1]] = len(lines)
        elif line:
            lines.append((line[1], line[2], line[3]))
            target = re.search(r"`\((\.L_x_\d+)\)", line[3])
            if line[2].startswith("BRA") and target and target[1] in labels:
                ends[target[1]] = len(lines)
    for label, end in ends.items():
        yield lines[labels[label] : end]


def _written(name: str, operands: str) -> range:
    """The registers that an instruction writes, as far as its first operand says."""
    first = re.match(r"R(\d+)\b", operands)
    if not first or name.split(".")[0] in ("ST", "STG", "STS", "STL", "SYNCS", "BAR", "RED"):
        return range(0)
    width = next((count for size, count in _WIDE.items() if size in name.split(".")), 4 if name.startswith("LDSM") else 1)
    return range(int(first[1]), int(first[1]) + width)
