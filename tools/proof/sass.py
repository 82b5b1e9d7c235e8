"""Analyse a kernel's disassembly: instruction counts, and the inner loop of each warp role.

Machine code has no names of roles, so a role is recognised by the instructions of its inner loop (`ROLES`). Loops are
cycles in the graph of branches. The branch that dispatches warps to their roles is not followed, so that no loop spans
two roles.
"""

from __future__ import annotations

import hashlib
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import networkx as nx  # a dependency of torch
from triton import knobs

COUNTED = {  # name -> pattern of the instructions to count
    "HGMMA": r"HGMMA", "UTCMMA": r"UTC\w*MMA", "HMMA": r"HMMA", "DMMA": r"DMMA", "MUFU.EX2": r"MUFU\.EX2",
    "UTMALDG": r"UTMALDG", "LDGSTS": r"LDGSTS",
}  # fmt: skip
KINDS = {  # name -> pattern, for loops
    "MMA": r"(HG|H|UTC\w*)MMA", "EX2": r"MUFU\.EX2", "float": r"F(FMA|MUL|ADD)(?!2)", "float x2": r"F(FMA|MUL|ADD)2",
    "LDTM": r"LDTM", "STTM": r"STTM", "waits": r"SYNCS\.PHASECHK", "LDL": r"LDL", "STL": r"STL",
}  # fmt: skip
ROLES = {  # role -> patterns that its inner loop must contain; the first match counts
    "softmax": (
        "MUFU.EX2",
        "STTM|HGMMA",
    ),  # on Hopper these warps start products; loops of a sink's exponential have neither
    "correct": ("LDTM", "STTM"),
    "mma": ("UTC.MMA",),
    "store": ("UTMASTG",),  # before load, because a store role may also load
    "load": ("UTMALDG",),
}
SPECIALISED = "USETMAXREG"  # moves registers between roles, so it marks kernels with warp roles

_LINE = re.compile(r"^([.$\w]+):|/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)([^;]*)")
_LABEL = re.compile(r"`\(([.$\w]+)\)")
_ENDS = ("BRA", "BRX", "EXIT", "RET", "JMP")


class Instruction(NamedTuple):
    name: str
    operands: str
    guarded: bool  # has a predicate

    @property
    def leads_to(self) -> str:
        """The label of the branch target; "" if it is no branch."""
        label = _LABEL.search(self.operands) if self.name.startswith("BRA") else None
        return label[1] if label else ""

    @property
    def falls_through(self) -> bool:
        sure = not self.guarded and (
            not self.leads_to or self.operands.strip().startswith("`")
        )  # some branches have a predicate before the label
        return not (sure and self.name.startswith(_ENDS))


class Loop(NamedTuple):
    """The inner loop of a warp role: `total` instructions, `least` on the shortest iteration, and counts of each
    kind."""

    role: str
    total: int
    least: int
    kinds: dict[str, int]

    def row(self) -> dict[str, int | str]:
        return {"role": self.role, "total": self.total, "least": self.least, **self.kinds}


Parts = tuple[dict[str, int], list[Loop]]  # the results of `count` and `loops`


def fingerprint(cubin: bytes) -> str:
    """A hash of only the kernel's instructions. A cubin (a 64-bit ELF file) also holds line numbers, paths and PTX,
    which are left out.
    """
    begin, size, count, names = struct.unpack_from("<Q10xHHH", cubin, 40)
    sections = [struct.unpack_from("<I20xQQ", cubin, begin + n * size) for n in range(count)]  # (name, offset, size)
    strings = sections[names][1]
    code = [
        cubin[offset : offset + length]
        for name, offset, length in sections
        if cubin.startswith(b".text.", strings + name)
    ]
    return hashlib.sha256(b"".join(code)).hexdigest()[:16]


def disassemble(cubin: bytes) -> str:
    """The SASS text of a cubin; empty if the disassembler does not know the target."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [knobs.nvidia.nvdisasm.path, "-c", "-ndf", file.name], capture_output=True, text=True
        ).stdout


def count(sass: str) -> dict[str, int]:
    """The number of instructions for each name of COUNTED; empty for an empty disassembly."""
    names = [one.name for _, one in _lines(sass) if one]
    return {key: _number(pattern, names) for key, pattern in COUNTED.items()} if names else {}


def loops(sass: str) -> list[Loop]:
    """The innermost loops that match a role, in the order of the machine code; empty if the kernel has no warp roles.

    Spin loops of waits are placed after the kernel's end and are left out. So counts are those of barriers that are
    ready.

    >>> code = "USETMAXREG 0x28", ".L_1:", "UTMALDG.2D [UR8], [UR4]", "@P0 BRA `(.L_1)", "EXIT"
    >>> loops("\\n".join(line if line[0] == "." else f"/*0000*/ {line} ;" for line in code))[0].total
    2
    """
    if SPECIALISED not in sass:
        return []
    graph = _graph(sass)
    found = [loop for part in _cycles(graph) for loop in _innermost(graph, part)]
    return [loop for _, loop in sorted(found, key=lambda place: place[0])]


def _number(pattern: str, names: list[str]) -> int:
    return sum(bool(re.match(pattern, name)) for name in names)


def _lines(sass: str) -> Iterator[tuple[str, Instruction | None]]:
    """(label, None) for each label and ("", instruction) for each instruction."""
    for line in sass.splitlines():
        found = _LINE.search(line)
        if found and found[1]:
            yield found[1], None
        elif found:
            yield "", Instruction(found[3], found[4], bool(found[2]))


def _graph(sass: str) -> nx.DiGraph:
    """The control-flow graph up to the kernel's end. Blocks are numbered in order; edges are branches and
    fall-throughs.
    """
    blocks: list[list[Instruction]] = [[]]
    at: dict[str, int] = {}
    for label, one in _lines(sass):
        if (label or (blocks[-1] and blocks[-1][-1].name.startswith(_ENDS))) and blocks[-1]:
            blocks.append([])
        if one:
            blocks[-1].append(one)
        else:
            at[label] = len(blocks) - 1
    end = max(
        (n for n, block in enumerate(blocks) if block and block[-1].name == "EXIT" and not block[-1].guarded),
        default=len(blocks) - 1,
    )
    graph = nx.DiGraph()
    graph.add_nodes_from((n, {"names": [one.name for one in block]}) for n, block in enumerate(blocks[: end + 1]))
    graph.add_edges_from(
        (n, after) for n, after in pairwise(range(end + 1)) if not blocks[n] or blocks[n][-1].falls_through
    )
    branches = [
        (n, at[block[-1].leads_to]) for n, block in enumerate(blocks[: end + 1]) if block and block[-1].leads_to
    ]
    graph.add_edges_from((n, to) for n, to in branches if to <= end)
    return graph


def _cycles(graph: nx.DiGraph) -> Iterator[set[int]]:
    """The outermost loops, each as the set of its blocks."""
    return (
        part
        for part in nx.strongly_connected_components(graph)
        if len(part) > 1 or any(graph.has_edge(n, n) for n in part)
    )


def _innermost(graph: nx.DiGraph, part: set[int]) -> list[tuple[int, Loop]]:
    """(first block, loop) for the loops with a role inside this one, or for this one if it has a role and they have
    none.
    """
    head = next((n for n in sorted(part) if set(graph.predecessors(n)) - part), min(part))
    body = nx.DiGraph(graph.subgraph(part))
    latches = list(body.predecessors(head))
    body.remove_edges_from([(n, head) for n in latches])
    inner = [loop for cycle in _cycles(body) for loop in _innermost(body, cycle)]
    names = [name for n in part for name in graph.nodes[n]["names"]]
    role = next((role for role, marks in ROLES.items() if all(_number(mark, names) for mark in marks)), None)
    if inner or role is None:
        return inner
    lengths = {n: len(graph.nodes[n]["names"]) for n in part}
    turns = nx.single_source_dijkstra_path_length(body, head, weight=lambda _, after, __: lengths[after])
    least = lengths[head] + int(min(turns[n] for n in latches))
    return [(head, Loop(role, len(names), least, {kind: _number(pattern, names) for kind, pattern in KINDS.items()}))]
