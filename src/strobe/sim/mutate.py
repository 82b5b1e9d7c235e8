"""Mutants of a kernel: its source with one synchronisation statement dropped or bent (DeMillo, Lipton and Sayward, 1978).

A kernel's barriers are proven needed by taking each away: somebody must notice, or a ledger says why nothing changes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

# statements that only synchronise: dropped whole. The names of mbarrier's functions count with their module alone.
_DROPPED = {
    "mbarrier.wait": "drop wait", "mbarrier.arrive": "drop arrive", "mbarrier.expect": "drop expect", "fence_async_shared": "drop fence",
    "store_wait": "drop store_wait", "tma_store_wait": "drop store_wait", "tcgen05_commit": "drop commit", "commit_group": "drop commit",
    "tma_store_drain": "drop store_drain", "cp_async_commit": "drop commit", "cp_async_wait": "drop wait_group",
    "fence_async_global": "drop fence", "wait_group": "drop wait_group", "mbarrier_arrive": "drop arrive", "inline_asm_elementwise": "drop asm",
}  # fmt: skip
# an argument bent: (position, keyword, kind, what becomes of it)
_BENT = {
    "mbarrier.wait": (1, "phase", "flip parity", "({}) ^ 1"),
    "mbarrier.expect": (1, "bytes", "half expect", "({}) // 2"),
    "mbarrier.init": (1, "count", "init count + 1", "({}) + 1"),
    "init_barriers": (1, "count", "init count + 1", "({}) + 1"),
    "warpgroup_mma_wait": (0, "num_outstanding", "wgmma_wait(n + 1)", "({}) + 1"),
    "store_wait": (0, "pendings", "store_wait(n + 1)", "({}) + 1"),
    "tma_store_wait": (0, "pendings", "store_wait(n + 1)", "({}) + 1"),
    "wait_group": (0, "num_outstanding", "wait_group(n + 1)", "({}) + 1"),
    "cp_async_wait": (0, "num_outstanding", "wait_group(n + 1)", "({}) + 1"),
    "tma_store_drain": (0, "pendings", "store_drain(n + 1)", "({}) + 1"),
}
_WEAKER_TEXT = (  # in the text of inline PTX
    (r"\.(acquire|release|acq_rel)\b", ".relaxed", "weaken order"), (r"wait_group\s+0", "wait_group.read 0", "wait for reads only"),
    (r"fence\.[\w.:]+;", "", "drop fence"), (r"bar\.sync\b", "bar.arrive", "arrive only"),
)  # fmt: skip
MODULE = "(module)"  # where the text of inline PTX stands
_ORDERS = ("acquire", "release", "acq_rel")


@dataclass(frozen=True)
class Mutant:
    """One change: its kind, the line it is on, that line's text, the function it is in, and the whole source with it."""

    kind: str
    line: int
    text: str
    function: str
    source: str

    def __str__(self) -> str:
        return f"{self.kind}, line {self.line} of {self.function}: {self.text}"


def mutants(source: str) -> list[Mutant]:
    """All mutants of the jit functions in a file's source, in the order of the lines.

    >>> [str(m) for m in mutants('''
    ... @gluon.jit
    ... def consumer(k_ready, parity):
    ...     mbarrier.wait(k_ready, parity)
    ... ''')]
    ['drop wait, line 4 of consumer: mbarrier.wait(k_ready, parity)', 'flip parity, line 4 of consumer: mbarrier.wait(k_ready, parity)']
    """
    tree = ast.parse(source)
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    data = source.encode()

    def changed(kind: str, function: str, node: ast.AST, new: str) -> Mutant:
        start, end = (starts[row - 1] + column for row, column in _span(node))
        text = lines[node.lineno - 1].strip()  # type: ignore[attr-defined]
        return Mutant(kind, node.lineno, text, function, (data[:start] + new.encode() + data[end:]).decode())  # type: ignore[attr-defined]

    found = []
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and _jitted(function):
            found += [changed(kind, function.name, node, new) for kind, node, new in _changes(function)]
    found += [changed(kind, MODULE, node, new) for kind, node, new in _text_changes(tree)]
    return sorted(found, key=lambda mutant: (mutant.line, mutant.kind))


def _span(node: ast.AST) -> tuple[tuple[int, int], tuple[int, int]]:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]


def _jitted(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator).split("(")[0].endswith("jit") for decorator in function.decorator_list)


def _called(call: ast.Call) -> str:
    """`mbarrier.wait` for that, the last name for all else."""
    parts = ast.unparse(call.func).split(".")
    return ".".join(parts[-2:]) if len(parts) > 1 and parts[-2] == "mbarrier" else parts[-1]


def _changes(function: ast.FunctionDef) -> Iterator[tuple[str, ast.AST, str]]:
    """(kind, node to replace, new text) for every mutant of a function."""
    for node in ast.walk(function):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and (kind := _DROPPED.get(_called(node.value))):
            yield kind, node, "pass"
        if isinstance(node, ast.Call):
            yield from _bent(node)


def _bent(call: ast.Call) -> Iterator[tuple[str, ast.AST, str]]:
    if (rule := _BENT.get(_called(call))) is not None:
        position, keyword, kind, template = rule
        argument = next((k.value for k in call.keywords if k.arg == keyword), None)
        if argument is None and position < len(call.args):
            argument = call.args[position]
        if argument is not None:
            yield kind, argument, template.format(ast.unparse(argument))
    for keyword in call.keywords:
        value = keyword.value
        if keyword.arg == "mbarriers" and isinstance(value, (ast.List, ast.Tuple)):
            for i, dropped in enumerate(value.elts):
                rest = ", ".join(ast.unparse(other) for j, other in enumerate(value.elts) if j != i)
                yield f"drop mbarriers entry {ast.unparse(dropped)}", value, f"[{rest}]"
        if keyword.arg == "sem" and isinstance(value, ast.Constant) and value.value in _ORDERS:
            yield "weaken order", value, '"relaxed"'


def _text_changes(tree: ast.Module) -> Iterator[tuple[str, ast.AST, str]]:
    """Weaker inline PTX, wherever its text stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and ";" in node.value:
            for pattern, weaker, kind in _WEAKER_TEXT:
                for match in re.finditer(pattern, node.value):
                    yield kind, node, repr(node.value[: match.start()] + weaker + node.value[match.end() :])
