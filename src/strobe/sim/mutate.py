"""Mutants of a kernel: its source with one synchronisation dropped or weakened (DeMillo, Lipton, Sayward, 1978).

Removing each barrier in turn proves that it is needed: a detector notices, or a ledger explains why nothing changes.
"""

from __future__ import annotations

import ast
import io
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

# Statements that only synchronise are dropped whole. The mbarrier functions count only with their module's name.
_DROPPED = {
    "mbarrier.wait": "drop wait", "mbarrier.arrive": "drop arrive", "mbarrier.expect": "drop expect",
    "fence_async_shared": "drop fence",
    "store_wait": "drop store_wait", "tma_store_wait": "drop store_wait", "tcgen05_commit": "drop commit",
    "commit_group": "drop commit",
    "tma_store_drain": "drop store_drain", "cp_async_commit": "drop commit", "cp_async_wait": "drop wait_group",
    "fence_async_global": "drop fence", "wait_group": "drop wait_group", "mbarrier_arrive": "drop arrive",
    "arrive_each": "drop arrive", "inline_asm_elementwise": "drop asm",
    "named_barrier": "drop asm", "release": "drop arrive", "open_inbox": "drop arrive", "cluster_wait": "drop wait",
    "await_inbox": "drop wait",
    "barrier_arrive": "drop arrive", "barrier_wait": "drop wait",  # per-thread mbarriers
    "producer_acquire": "drop wait", "producer_commit": "drop arrive",  # the methods of a pipeline
    "consumer_wait": "drop wait", "consumer_release": "drop arrive",
}  # fmt: skip
# Arguments that are changed: (position, keyword, kind, replacement). An argument called num_outstanding is optional.
_BENT = {
    "mbarrier.wait": (1, "phase", "flip parity", "({}) ^ 1"),
    "mbarrier.expect": (1, "bytes", "half expect", "({}) // 2"),
    "mbarrier.init": (1, "count", "init count + 1", "({}) + 1"),
    "init_barriers": (1, "count", "init count + 1", "({}) + 1"),
    "per_thread_mbarriers": (1, "arrivals", "init count + 1", "({}) + 1"),
    "barrier_wait": (2, "phase", "flip parity", "({}) ^ 1"),
    "named_barrier": (1, "number", "next barrier", "({}) + 1"),
    "warpgroup_mma_wait": (0, "num_outstanding", "wgmma_wait(n + 1)", "({}) + 1"),
    "store_wait": (0, "pendings", "store_wait(n + 1)", "({}) + 1"),
    "tma_store_wait": (0, "pendings", "store_wait(n + 1)", "({}) + 1"),
    "wait_group": (0, "num_outstanding", "wait_group(n + 1)", "({}) + 1"),
    "cp_async_wait": (0, "num_outstanding", "wait_group(n + 1)", "({}) + 1"),
    "tma_store_drain": (0, "pendings", "store_drain(n + 1)", "({}) + 1"),
}
_DEFAULTS = {"num_outstanding": "0"}
_WEAKER_TEXT = (  # replacements in the text of inline PTX
    (r"\.(acquire|release|acq_rel)\b", ".relaxed", "weaken order"),
    (r"wait_group\s+0", "wait_group.read 0", "wait for reads only"),
    (r"fence\.[\w.:]+;", "", "drop fence"), (r"bar\.sync\b", "bar.arrive", "arrive only"),
)  # fmt: skip
MODULE = "(module)"  # place of inline PTX outside jit functions
PROBE = "place_of_the_mutant"  # a name that no kernel has
_ORDERS = ("acquire", "release", "acq_rel")
_SIGNALS = ("mbarriers", "mbarrier_preds")
_Node = ast.expr | ast.stmt
Change = tuple[str, _Node, str]  # (kind, node to replace, new text)
Changes = Callable[[ast.FunctionDef], Iterator[Change]]


@dataclass(frozen=True)
class Mutant:
    """One change: its kind, line number, text of the line, function, and the whole mutated source.

    `probe` is the source with an undefined name at the same place, so that executing it raises NameError. `call` is the
    lines of the call that is changed, or None if no call is known.
    """

    kind: str
    line: int
    text: str
    function: str
    source: str
    probe: str
    call: range | None = None

    def __str__(self) -> str:
        return f"{self.kind}, line {self.line} of {self.function}: {self.text}"


def mutants(source: str, changes: Changes | None = None) -> list[Mutant]:
    """All mutants of the jit functions in a file's source, in line order: by these changes, or of synchronisations.

    >>> for mutant in mutants('''
    ... @gluon.jit
    ... def consumer(k_ready, parity):
    ...     mbarrier.wait(k_ready, parity)
    ... '''):
    ...     print(mutant)
    drop wait, line 4 of consumer: mbarrier.wait(k_ready, parity)
    flip parity, line 4 of consumer: mbarrier.wait(k_ready, parity)
    """
    tree = ast.parse(source)
    lines = list(io.StringIO(source, newline=""))  # Python's lines; str.splitlines splits at more characters
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    data = source.encode()

    def mutant(function: str, call: ast.Call | None, kind: str, node: _Node, new: str) -> Mutant:
        start, end = (starts[row - 1] + column for row, column in _span(node))  # columns count bytes
        with_it = lambda text: (data[:start] + text.encode() + data[end:]).decode()
        called = call and range(call.lineno, _span(call)[1][0] + 1)
        text = lines[node.lineno - 1].strip()
        return Mutant(kind, node.lineno, text, function, with_it(new), with_it(PROBE), called)

    outside = _text_changes(list(_outside(tree))) if changes is None else ()
    found = [mutant(MODULE, None, *change) for change in outside]
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and _jitted(function):
            calls = _innermost_calls(function)
            found += [
                mutant(function.name, calls.get(change[1]), *change) for change in (changes or _changes)(function)
            ]
    return sorted(found, key=lambda mutant: (mutant.line, mutant.kind))


def _span(node: _Node) -> tuple[tuple[int, int], tuple[int, int]]:
    return (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)


def _innermost_calls(function: ast.FunctionDef) -> dict[ast.AST, ast.Call]:
    """The innermost call around each node, and the call of a statement that is one."""
    found: dict[ast.AST, ast.Call] = {}
    for node in ast.walk(function):  # outer calls come first
        if isinstance(node, ast.Call):
            found |= dict.fromkeys(ast.walk(node), node)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            found[node] = node.value
    return found


def _jitted(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator).split("(")[0].split(".")[-1] == "jit" for decorator in function.decorator_list)


def _outside(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes outside jit functions."""
    if not (isinstance(node, ast.FunctionDef) and _jitted(node)):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from _outside(child)


def _called(call: ast.Call) -> str:
    """`mbarrier.wait` for that call, the last name for every other."""
    parts = ast.unparse(call.func).split(".")
    return ".".join(parts[-2:]) if len(parts) > 1 and parts[-2] == "mbarrier" else parts[-1]


def _changes(function: ast.FunctionDef) -> Iterator[Change]:
    """Every change of a jit function."""
    nodes = list(ast.walk(ast.Module(function.body, [])))
    for node in nodes:
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Call)
            and (kind := _DROPPED.get(_called(node.value)))
        ):
            yield kind, node, "pass"
        if isinstance(node, ast.Call):
            yield from _bent(node)
            yield from _fewer_barriers(node)
            yield from _weaker_orders(node)
    yield from _text_changes(nodes)


def _bent(call: ast.Call) -> Iterator[Change]:
    if (rule := _BENT.get(_called(call))) is None or any(isinstance(argument, ast.Starred) for argument in call.args):
        return
    position, keyword, kind, template = rule
    argument = next((k.value for k in call.keywords if k.arg == keyword), None)
    if argument is None and position < len(call.args):
        argument = call.args[position]
    if argument is not None:
        yield kind, argument, template.format(ast.unparse(argument))
    elif keyword in _DEFAULTS:
        given = ast.keyword(keyword, ast.parse(template.format(_DEFAULTS[keyword]), mode="eval").body)
        yield kind, call, ast.unparse(ast.Call(call.func, call.args, [*call.keywords, given]))


def _fewer_barriers(call: ast.Call) -> Iterator[Change]:
    """The call without one of the barriers that it signals, and without that barrier's predicate."""
    lists = {
        k.arg: k.value.elts for k in call.keywords if k.arg in _SIGNALS and isinstance(k.value, (ast.List, ast.Tuple))
    }
    for i, dropped in enumerate(lists.get("mbarriers", ())):
        rest = {name: ast.List([*entries[:i], *entries[i + 1 :]]) for name, entries in lists.items()}
        keywords = [ast.keyword(k.arg, rest.get(k.arg or "", k.value)) for k in call.keywords]
        yield (
            f"drop mbarriers entry {ast.unparse(dropped)}",
            call,
            ast.unparse(ast.Call(call.func, call.args, keywords)),
        )


def _weaker_orders(call: ast.Call) -> Iterator[Change]:
    for keyword in call.keywords:
        if keyword.arg == "sem" and isinstance(keyword.value, ast.Constant) and keyword.value.value in _ORDERS:
            yield "weaken order", keyword.value, '"relaxed"'


def _text_changes(nodes: Iterable[ast.AST]) -> Iterator[Change]:
    """Weaker inline PTX, in strings and in the fixed parts of f-strings."""
    nodes = list(nodes)
    formatted = [node for node in nodes if isinstance(node, ast.JoinedStr)]
    prose = {node.value for node in nodes if isinstance(node, ast.Expr)}  # docstrings
    parts = {part for node in formatted for part in node.values}
    for node in nodes:
        if isinstance(node, ast.expr) and node not in prose and node not in parts:
            yield from ((kind, node, repr(weaker)) for kind, weaker in _weaker(node))
    for node in formatted:
        for i, part in enumerate(node.values):
            for kind, weaker in _weaker(part):
                yield (
                    kind,
                    node,
                    ast.unparse(ast.JoinedStr([*node.values[:i], ast.Constant(weaker), *node.values[i + 1 :]])),
                )


def _weaker(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and ";" in node.value:
        for pattern, weaker, kind in _WEAKER_TEXT:
            for match in re.finditer(pattern, node.value):
                yield kind, node.value[: match.start()] + weaker + node.value[match.end() :]
