"""Emits a Program as the text of a function that Triton and Gluon compile.

    score_mod(score, b, h, q_idx, kv_idx, aux)                   score          of `forward_text`
    score_mod_bwd(dscore, score, b, h, q_idx, kv_idx, aux)       dscore         of `backward_text`
    mask_mod(b, h, q_idx, kv_idx, aux)                           bool           of `mask_text`

aux is one flat tuple: for each captured tensor its pointer, then the stride and the size of each dimension; then the
numbers; then S_k - S_q, if the program reads it (of packed sequences the pointers of cu_seqlens_q and cu_seqlens_k,
from which it is computed); then, in a backward, the pointer and the strides of each gradient that is added to (of exact
sums also the distance of their slots). `aux_of` builds it. Positions come unbroadcast, so what depends on a row alone
is computed once a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from .dependence import MOST_SUMMED, constant_over, differs, has_positions, reads_grad, sources, vanishes
from .intervals import UNKNOWN, Interval, node_bounds
from .program import BOOL, FLOAT, INT, LONG, Node, Program

_ARGUMENTS = {"score": "score", "grad": "dscore", "b": "b", "h": "h", "q": "q_idx", "k": "kv_idx"}
_POSITION = Interval(0, 2**31 - 1)
_TYPES = {FLOAT: "tl.float32", INT: "tl.int32", LONG: "tl.int64", BOOL: "tl.int1"}

_UNARY = {
    "neg": "-({0})",
    "abs": "tl.abs({0})",
    "exp": "tl.exp({0})",
    "exp2": "tl.exp2({0})",
    "log": "tl.log({0})",
    "log2": "tl.log2({0})",
    "log1p": "tl.log(1.0 + {0})",
    "expm1": "(tl.exp({0}) - 1.0)",
    "sqrt": "tl.sqrt({0})",
    "rsqrt": "(1.0 / tl.sqrt({0}))",
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    # 1 - 2 / (exp(2 x) + 1) is 1 and -1 at the ends, and has no overflow that is not a number
    "tanh": "(1.0 - 2.0 / (tl.exp2(2.8853900817779268 * {0}) + 1.0))",
    "sigmoid": "(1.0 / (1.0 + tl.exp2(-1.4426950408889634 * {0})))",
    "erf": "tl.erf({0})",
    "floor": "tl.floor({0})",
    "ceil": "tl.ceil({0})",
    "trunc": "tl.where({0} < 0, tl.ceil({0}), tl.floor({0}))",
    # half to even: the fraction is exact, and 0 for numbers from 2^23 on
    "round": "(tl.floor({0}) + tl.where(({0} - tl.floor({0}) > 0.5) | (({0} - tl.floor({0}) == 0.5) & "
    "(tl.floor(tl.floor({0}) * 0.5) * 2.0 != tl.floor({0}))), 1.0, 0.0))",
}
_BINARY = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "xor": "{0} ^ {1}",
    "shl": "{0} << {1}",
    "shr": "{0} >> {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
}


class Refusal(ValueError):
    """A program and the arguments of a call do not belong together."""


@lru_cache(maxsize=256)
def forward_text(text: str, packed: bool = False) -> str:
    """The source of score_mod for a score's program. packed: of packed sequences.

    >>> from .program import build
    >>> text = build(lambda p: [p.add(p.input("score"), p.cast(p.input("q"), FLOAT))]).text
    >>> print(forward_text(text))
    @triton.jit
    def score_mod(score, b, h, q_idx, kv_idx, aux):
        v2 = (q_idx).to(tl.float32)
        v3 = score + v2
        return v3
    """
    return _function("score_mod", "score, b, h, q_idx, kv_idx, aux", Program.parse(text), packed)


@lru_cache(maxsize=256)
def mask_text(text: str, packed: bool = False) -> str:
    """The source of mask_mod for a mask's program."""
    return _function("mask_mod", "b, h, q_idx, kv_idx, aux", Program.parse(text), packed)


@lru_cache(maxsize=256)
def backward_text(
    text: str, adds: bool = True, keys_aligned: bool = True, packed: bool = False, exact: bool = False
) -> str:
    """The source of score_mod_bwd for a gradient's program. It adds to captured tensors' gradients by atomics; with
    adds=False it does not. exact: it adds to the integers of `exact_sums`, which gives the same bits in any order.
    Where it adds, its scores are transposed, [keys, queries], and begin at a multiple of 16 queries, and with
    keys_aligned of 16 keys.
    """
    arguments = "dscore, score, b, h, q_idx, kv_idx, aux"
    return _function("score_mod_bwd", arguments, Program.parse(text), packed, adds, keys_aligned, exact)


Diagonal = int | tuple[Tensor, Tensor]  # S_k - S_q, or (cu_seqlens_q, cu_seqlens_k)


def aux_of(program: Program, tensors: Sequence[Tensor], numbers: Sequence[float], diagonal: Diagonal = 0) -> tuple:
    """The tuple `aux` of a program, without the pointers of gradients."""
    aux: list[Tensor | int | float] = []
    for tensor in tensors:
        aux.append(tensor)
        for stride, size in zip(tensor.stride(), tensor.shape):
            aux += [stride, size]
    aux += [float(n) if kind == FLOAT else int(n) for n, kind in zip(numbers, program.numbers)]
    if not program.reads("diagonal"):
        return tuple(aux)
    return (*aux, *diagonal) if isinstance(diagonal, tuple) else (*aux, diagonal)


def gradient_aux_of(program: Program, gradients: Sequence[Tensor | None]) -> tuple:
    """What follows in the `aux` of a gradient's program: pointer and strides of each captured tensor's gradient.

    gradients: one tensor for each captured tensor, by its number; those without a gradient are not read. Exact sums
    have one dimension more, of slots.
    """
    aux: list[Tensor | int] = []
    for scatter in program.scatters:
        target = gradients[scatter.tensor]
        if target is None:
            raise Refusal(f"captured tensor {scatter.tensor} has a gradient and no memory for it")
        aux += [target, *target.stride()]
    return tuple(aux)


class _Places:
    """Where things are in aux."""

    def __init__(self, program: Program, packed: bool, exact: bool) -> None:
        self.packed, self.exact = packed, exact
        self.tensors: list[int] = []
        at = 0
        for captured in program.tensors:
            self.tensors.append(at)
            at += 1 + 2 * captured.ndim
        self.numbers = at
        self.diagonal = at + len(program.numbers)
        at = self.diagonal + program.reads("diagonal") * (1 + packed)
        self.gradients: list[int] = []
        for scatter in program.scatters:
            self.gradients.append(at)
            at += 1 + scatter.ndim + exact


def _function(
    name: str, arguments: str, program: Program, packed: bool, adds: bool = True, keys_aligned: bool = True,
    exact: bool = False,
) -> str:  # fmt: skip
    places = _Places(program, packed, exact)
    ranges = node_bounds(program, {one: _POSITION for one in ("b", "h", "q", "k")})
    names: list[str] = []
    statements: dict[int, str] = {}
    for n, node in enumerate(program.nodes):
        words = _cast_apart(node, names, program) or _words(
            node, [names[arg] for arg in node.args], program, places, [ranges[arg] for arg in node.args]
        )
        if node.op in ("input", "const", "number", "pointer") and node.value != "diagonal":
            names.append(words)  # a name or a Python number: no statement of its own
        else:
            names.append(f"v{n}")
            statements[n] = f"v{n} = {words}"
    lines: list[str] = []
    # each value is computed before its first use, so that few are alive at a time; those of the score first
    for nodes, added in _scatters(program, names, places, ranges, keys_aligned) if adds else []:
        lines += [*_needed(program, nodes, statements), *added]
    lines += _needed(program, program.outputs[:1], statements)
    lines.append(f"return {_result(program, names)}")
    called = {str(node.value) for node in program.nodes if node.op == "triton"}
    imports = [f"from strobe.mods.triton_functions import {one}" for one in sorted(called)]
    if exact and adds and program.scatters:
        imports.append("from strobe.kernels.device.exact_sums import add_exactly")
    return "\n".join((*imports, "@triton.jit", f"def {name}({arguments}):", *(f"    {line}" for line in lines)))


def _needed(program: Program, nodes: Sequence[int], statements: dict[int, str]) -> list[str]:
    """The statements of nodes and of what they depend on, taken out of `statements`."""
    wanted = sources(program, nodes)
    return [statements.pop(n) for n in sorted(wanted & statements.keys())]


def _cast_apart(node: Node, names: Sequence[str], program: Program) -> str | None:
    """A cast of i + j or i - j to float32, where i depends on the query alone and j on the key alone or the reverse, as
    casts of both. There are then as many conversions as rows and columns, instead of one for each element, at the rate
    of an exponential each. Integers up to 2^24 give the same result.
    """
    if node.op != "cast" or node.kind != FLOAT or program.nodes[node.args[0]].op not in ("add", "sub"):
        return None
    inner = program.nodes[node.args[0]]
    by_key, by_query = ([constant_over(program, name)[i] <= MOST_SUMMED for i in inner.args] for name in ("k", "q"))
    is_apart = sorted(zip(by_key, by_query)) == [(False, True), (True, False)]
    if not is_apart or any(program.nodes[i].kind != INT for i in inner.args):
        return None
    a, b = (f"({names[i]}).to({_TYPES[FLOAT]})" for i in inner.args)
    return f"{a} {'+' if inner.op == 'add' else '-'} {b}"


def _result(program: Program, names: Sequence[str]) -> str:
    """The first result. A constant becomes a tile, for which Gluon has no function without a layout."""
    node = program.nodes[program.outputs[0]]
    if node.op not in ("const", "number"):
        return names[program.outputs[0]]
    word = names[program.outputs[0]]
    if node.kind == BOOL:
        return "(q_idx + kv_idx) >= 0" if node.value else "(q_idx + kv_idx) < 0"
    return f"tl.where((q_idx + kv_idx) >= 0, {word}, {word})"


def _words(node: Node, args: list[str], program: Program, places: _Places, ranges: list[Interval]) -> str:
    if node.op == "input":
        if node.value == "diagonal":
            if places.packed:
                rows, keys = (_length(f"aux[{places.diagonal + n}]") for n in (0, 1))
                return f"({keys} - {rows}) + q_idx * 0"
            return f"aux[{places.diagonal}] + q_idx * 0"  # an int of 1 arrives as a constant, which has no `.to`
        return _ARGUMENTS[str(node.value)]
    if node.op == "const":
        infinite = {"inf": 'float("inf")', "-inf": 'float("-inf")', "nan": 'float("nan")'}
        return infinite.get(repr(node.value), f"({node.value!r})")
    if node.op == "number":
        words = f"aux[{places.numbers + int(node.value or 0)}]"
        return words if node.kind == FLOAT else f"({words} + q_idx * 0)"
    if node.op == "load":
        at = places.tensors[int(node.value or 0)]
        words = f"tl.load({_address(at, args, ranges, 2)})"
        return f"({words} != 0)" if node.kind == BOOL else f"({words}).to({_TYPES[node.kind]})"
    if node.op == "pointer":
        return f"aux[{places.tensors[node.index]}]"
    if node.op == "triton":
        numbers = {n for n, arg in enumerate(node.args) if program.nodes[arg].op == "number"}
        given = [
            f"aux[{places.numbers + program.nodes[node.args[n]].index}]" if n in numbers else word
            for n, word in enumerate(args)
        ]
        called = f"{node.value}({', '.join(given)})"
        return f"{called} != 0" if node.kind == BOOL else called
    if node.op == "cast":
        return f"({args[0]}).to({_TYPES[node.kind]})"
    if node.op == "where":
        return f"tl.where({', '.join(args)})"
    if node.op == "not":
        return f"{args[0]} == 0" if node.kind == BOOL else f"~({args[0]})"
    if node.op in ("min", "max"):  # NaN in either argument is the result
        sign = "<" if node.op == "min" else ">"
        keep = f"({args[0]} {sign} {args[1]}) | ({args[0]} != {args[0]})" if node.kind == FLOAT else None
        return f"tl.where({keep or f'{args[0]} {sign} {args[1]}'}, {args[0]}, {args[1]})"
    if node.op == "pow":
        return _power(args[0], args[1], program.nodes[node.args[1]])
    if node.op in ("floordiv", "mod", "fmod"):
        return _division(node, args, ranges, program.nodes[node.args[1]])
    return (_UNARY.get(node.op) or _BINARY[node.op]).format(*args)


def _power(x: str, y: str, exponent: Node) -> str:
    """torch.pow: 1 where y is 0 or x is 1. Where x is negative it has the sign of an odd y, and is NaN if y is no
    integer.
    """
    log2 = f"tl.log2(tl.abs({x}))"
    if exponent.op == "const" and math.isfinite(exponent.constant) and exponent.constant:
        power = f"tl.exp2({y} * {log2})"
        if exponent.constant % 2 == 0:
            return power
        negative = f"-{power}" if exponent.constant % 2 == 1 else 'float("nan")'
        return f"tl.where({x} < 0, {negative}, {power})"
    power = f"tl.exp2({y} * tl.where(tl.abs({x}) == 1, 0.0, {log2}))"
    signed = f"tl.where(tl.floor({y} * 0.5) * 2.0 != {y}, -{power}, {power})"
    negative = f'tl.where(tl.floor({y}) != {y}, float("nan"), {signed})'
    return f"tl.where({y} == 0, 1.0, tl.where({x} < 0, {negative}, {power}))"


def _length(offsets: str) -> str:
    """The length of packed sequence b."""
    return f"(tl.load({offsets} + b + 1) - tl.load({offsets} + b))"


def _division(node: Node, args: list[str], ranges: list[Interval], by: Node) -> str:
    """Division towards minus infinity, as in Python. Triton's / and % on integers go towards zero.

    A division by a power of two is a shift: LLVM can prove that all positions of a tile have the same quotient.
    """
    a, b = args
    size = by.value if by.op == "const" and type(by.value) is int and node.kind != FLOAT else 0
    if size > 0 and size & (size - 1) == 0 and node.op != "fmod":
        return f"{a} >> {size.bit_length() - 1}" if node.op == "floordiv" else f"{a} & {size - 1}"
    if node.kind == FLOAT:
        if node.op == "fmod":
            return f"{a} - {b} * tl.where({a} / {b} < 0, tl.ceil({a} / {b}), tl.floor({a} / {b}))"
        floored = f"tl.floor({a} / {b})"
        return floored if node.op == "floordiv" else f"{a} - {b} * {floored}"
    if node.op == "fmod":
        return f"{a} % {b}"
    if ranges[0].low >= 0 and ranges[1].low > 0:
        return f"{a} // {b}" if node.op == "floordiv" else f"{a} % {b}"
    wrong = f"(({a} % {b}) != 0) & ((({a} % {b}) < 0) != ({b} < 0))"
    if node.op == "floordiv":
        return f"({a} // {b}) - tl.where({wrong}, 1, 0)"
    return f"({a} % {b}) + tl.where({wrong}, {b}, 0)"


def _address(at: int, indices: list[str], ranges: list[Interval], step: int, sizes_at: int | None = None) -> str:
    """The address of an element whose pointer is aux[at]. Indices are wrapped below 0 and clamped, as in `evaluate`."""
    words = f"aux[{at}]"
    sizes_at = at if sizes_at is None else sizes_at
    for n, (index, possible) in enumerate(zip(indices, ranges)):
        size = f"aux[{sizes_at + 2 + 2 * n}]"
        inside = index
        if possible.low < 0 or possible == UNKNOWN:
            inside = f"tl.where({index} < 0, {index} + {size}, {index})"
            inside = f"tl.where({inside} < 0, 0, {inside})"
        inside = f"tl.where({inside} < {size}, {inside}, {size} - 1)"
        words += f" + ({inside}).to(tl.int64) * aux[{at + 1 + step * n}]"
    return words


@dataclass(frozen=True)
class _Target:
    """A captured tensor's gradient, to which an emitted function adds. at, sizes_at: where the gradient and the
    captured tensor are in aux.
    """

    at: int
    sizes_at: int
    ranges: list[Interval]  # of the indices
    exact: bool

    def add(self, indices: list[str], terms: str, is_sparse: bool = False) -> str:
        """The statement that adds terms at indices. is_sparse: most of them are 0."""
        place = f"{_address(self.at, indices, self.ranges, 1, self.sizes_at)} + tl.where({terms} == 0, 0, 0)"
        if self.exact:
            return f"add_exactly({place}, aux[{self.at + 1 + len(indices)}], {terms})"
        return f'tl.atomic_add({place}, {terms}, {f"mask={terms} != 0, " if is_sparse else ""}sem="relaxed")'


def _scatters(
    program: Program, names: list[str], places: _Places, ranges: list[Interval], keys_aligned: bool
) -> list[tuple[list[int], list[str]]]:
    """(nodes, statements that add to a gradient from them) for each gradient. Elements that a query does not see arrive
    with dscore 0 and add 0.

    Elements that go to one place are summed before: all queries, and 16 keys, where no index depends on them, or as
    many as have the same indices. Sums of 16 keys stay within a warp. The indices of a sum are those of its first
    element. Where the text does not say which elements have the same indices, the kernel compares them (`_add_equal`).
    """
    found: list[tuple[list[int], list[str]]] = []
    results = iter(program.outputs[1:])
    tile = "(q_idx * 0 + kv_idx * 0)"
    for n, (scatter, at) in enumerate(zip(program.scatters, places.gradients)):
        at_value = next(results)
        value = names[at_value]
        indices = [next(results) for _ in range(scatter.ndim)]
        keys, queries = (
            min([MOST_SUMMED + 1, *(constant_over(program, name)[i] for i in indices)]) for name in ("k", "q")
        )
        words, sum_of, lines = [names[i] for i in indices], f"sum{n}", []
        tiles = [d for d, i in enumerate(indices) if has_positions(program, i)]
        if not vanishes(program, at_value):
            value = f"tl.where(dscore == 0, 0.0, {value})"
        lines.append(
            f"{sum_of} = {value}" if reads_grad(program, at_value) else f"{sum_of} = {value} + {tile}.to(tl.float32)"
        )
        group_k = min(keys, MOST_SUMMED) if keys_aligned or keys > MOST_SUMMED else 1
        group_q = str(queries) if queries <= MOST_SUMMED else f"{sum_of}.shape[1]"
        if (group_k, group_q) != (1, "1"):
            shape = f"[{sum_of}.shape[0] // {group_k}, {group_k}, {sum_of}.shape[1] // {group_q}, {group_q}]"
            for d in tiles:
                index, words[d] = f"tl.reshape({words[d]} + {tile}, {shape})", f"at{n}_{d}"
                lines.append(f"{words[d]} = tl.reduce(tl.reduce({index}, 3, first), 1, first)")
            lines.append(f"{sum_of} = tl.sum(tl.sum(tl.reshape({sum_of}, {shape}), 3), 1)")
        target = _Target(at, places.tensors[scatter.tensor], [ranges[i] for i in indices], places.exact)
        if queries == 1 and not any(differs(program, i, name) for i in indices for name in ("k", "q")):
            unsummed = tile if (group_k, group_q) == (1, "1") else ""
            lines += _add_equal(n, target, words, tiles, unsummed, MOST_SUMMED // group_k)
        else:
            lines.append(target.add(words, sum_of))
        found.append(([at_value, *indices], lines))
    reads_score = lambda nodes: any(program.nodes[n].value == "score" for n in sources(program, nodes))
    return sorted(found, key=lambda one: not reads_score(one[0]))


def _add_equal(n: int, target: _Target, words: list[str], tiles: list[int], tile: str, keys: int) -> list[str]:
    """Statements that add sum{n} at indices: as one term for `keys` keys and all queries if these have equal indices,
    else one by one. Most tiles of a clamped or bucketed distance have one index. Added one by one, their terms would go
    to one address, where a GPU performs atomics in turn.
    """
    shape = f"[sum{n}.shape[0] // {keys}, {keys}, sum{n}.shape[1]]"
    of_all = lambda function, x: f"tl.{function}(tl.{function}({x}, 2, keep_dims=True), 1, keep_dims=True)"
    each, common, lines = [*words], [*words], []
    for d in tiles:
        each[d], common[d] = f"each{n}_{d}", f"least{n}_{d}"
        lines.append(f"{each[d]} = tl.reshape({words[d]}{tile and f' + {tile}'}, {shape})")
        lines.append(f"{common[d]} = {of_all('min', each[d])}")
    equal = " & ".join(f"({common[d]} == {of_all('max', each[d])})" for d in tiles)
    lines += [
        f"is_equal{n} = {equal}",
        f"each{n} = tl.reshape(sum{n}, {shape})",
        f"common{n} = tl.where(is_equal{n}, {of_all('sum', f'each{n}')}, 0.0)",
        f"each{n} = tl.where(is_equal{n}, 0.0, each{n})",
    ]
    return [*lines, target.add(common, f"common{n}", is_sparse=True), target.add(each, f"each{n}", is_sparse=True)]


@lru_cache(maxsize=256)
def loads_by_key(text: str) -> int:
    """How many values a function loads for each key, or each few keys.

    >>> import torch
    >>> from .score import ScoreMod
    >>> rows, table = torch.zeros(64), torch.zeros(64, 1)
    >>> loads_by_key(ScoreMod(lambda s, b, h, q, k: s + rows[q] + rows[k] + table[q, k // 64]).bind(False).text)
    1
    """
    program = Program.parse(text)
    over = constant_over(program, "k")
    return sum(node.op == "load" and over[n] < MOST_SUMMED for n, node in enumerate(program.nodes))
