"""Find a bug of ptxas: left operands of wgmma that share registers although the first is still needed.

ptxas 12.8 (Triton 3.6) miscompiles the loop `s = q k^T; o += p v` if both left operands are in registers and have the
same shape. q is loaded before the loop, and p is computed in it. ptxas packs p over q's registers, so from the second
iteration on p is multiplied with the keys. The PTX is right, and there is no warning. The symptom in the machine code:
a product with keys and a product with values read the same registers without a write in between, although no registers
of the PTX are read by both.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

_PTX = re.compile(r"wgmma\.mma_async\S*\s+\{[^}]*\},\s*\{([^}]*)\},\s*%rd\d+,[^;]*?(\d)\s*;")
_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]+)\s*([^;]*);")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_GOAL = re.compile(r"(!?U?P\w+, )?.*`\((\.L_x_\d+)\)")  # target of a branch; some branches have their condition here
_PRODUCT = re.compile(r"R(\d+), R(\d+), gdesc")
_WIDE = {"64": 2, "128": 4}  # width in an instruction's name -> registers that it writes


def clashes(ptx: str, sass: str) -> list[str]:
    """Registers shared by two left operands, as "R24..R27 at ADDRESS"; empty if there are none.

    >>> clashes("", "")
    []
    """
    if "GMMA" not in sass or any(
        len(kinds) > 1 for kinds in _kinds_in_ptx(ptx).values()
    ):  # the program itself multiplies one value with both kinds
        return []
    return list(dict.fromkeys(f"R{first}..R{first + 3} at {at}" for first, at in _shared(sass)))


def _kinds_in_ptx(ptx: str) -> dict[str, set[str]]:
    """Left operand in registers -> how its products read the right operand: "0" plain, "1" transposed."""
    kinds = defaultdict(set)
    for operand, transposed in _PTX.findall(ptx):
        kinds[operand].add(transposed)
    return kinds


def _shared(sass: str) -> Iterator[tuple[int, str]]:
    """(first register, address) of each product whose left operand a product of the other kind read on some path,
    without a write since.
    """
    blocks = _blocks(sass)
    before: dict[str, _Reads] = {label: {} for label in blocks}
    waiting = list(blocks)
    while waiting:  # dataflow analysis: propagate the reads to followers until nothing changes
        label = waiting.pop()
        block = blocks[label]
        after = _through(block, before[label])[0]
        for follower in block.followers:
            known = before.get(follower, after)
            combined = {
                first: known.get(first, frozenset()) | after.get(first, frozenset())
                for first in known.keys() | after.keys()
            }
            if combined != known:
                before[follower] = combined
                waiting.append(follower)
    for label, block in blocks.items():
        yield from _through(block, before[label])[1]


_Reads = dict[
    int, frozenset[bool]
]  # first register of a left operand -> kinds of products (transposed or not) that read it since its last write


class _Block(NamedTuple):
    """A basic block: instructions (address, name, operands), and the labels of its successors."""

    lines: list[tuple[str, str, str]]
    followers: list[str]


def _through(block: _Block, reads: _Reads) -> tuple[_Reads, list[tuple[int, str]]]:
    """The reads after a block, and the clashing products in it."""
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
    """Basic blocks by label, in order. Targets of indirect branches get no predecessor and so no reads: warp roles
    start there.
    """
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
            open_ended = bool(
                predicate or (goal and goal[1]) or name.split(".")[0] not in ("BRA", "BRX", "JMX", "EXIT", "RET")
            )
            if goal:
                current.followers.append(goal[2])
                if open_ended:  # the rest is a new block: the branch target has not seen it
                    current.followers.append(address)
                    current = blocks.setdefault(address, _Block([], []))
    return blocks


def _written(name: str, operands: str) -> range:
    """The registers that an instruction writes, according to its first operand."""
    first = re.match(r"R(\d+)\b", operands)
    if not first or name.split(".")[0] in ("ST", "STG", "STS", "STL", "SYNCS", "BAR", "RED"):
        return range(0)
    width = next(
        (count for size, count in _WIDE.items() if size in name.split(".")), 4 if name.startswith("LDSM") else 1
    )
    return range(int(first[1]), int(first[1]) + width)
