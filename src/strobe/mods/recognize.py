"""Finds built-in masks in the program of a mask function: windows, prefixes, key lengths and documents.

A mask is a conjunction. Each part that is a built-in mask for all positions of a call leaves the program and becomes a
field of the call, so the kernels of built-in masks run. What is left stays a function.

    part of the program                                    built-in mask
    k - q between integers; abs(q - k) <= integer          window: left, right
    k < x or k <= q + S_k - S_q, x an integer of b         prefix
    k < x, x an integer of b                               key_lengths
    x == y, x an integer of b and q, y one of b and k      documents

Linear terms of positions are recognized, with constants and captured numbers, however they are arranged: `q >= k`,
`~(k > q)` and `q - k + 5 >= 5` are one mask.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from .intervals import Interval, node_bounds
from .program import BOOL, FLOAT, Builder, Program

MOST_EXACT = 1 << 24  # integers up to here are exact in float32
_SIGN = {"lt": 1, "le": 1, "gt": -1, "ge": -1}
_NEGATED = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}
_SWAPPED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq", "ne": "ne"}


class Lengths(NamedTuple):
    """How many positions a call has, and S_k - S_q."""

    queries: int
    keys: int
    diagonal: int


class Window(NamedTuple):
    """A row sees keys from q + diagonal - left to q + diagonal + right; None is no bound.

    shifts: whether S_k - S_q differs between the sequences of a packed call.
    """

    left: int | None = None
    right: int | None = None
    shifts: bool = False


class Limit(NamedTuple):
    """k < value + shift. value: the program of an integer of b; None is 0."""

    value: Program | None
    shift: int


class Alike(NamedTuple):
    """Documents: the programs of the ids of queries and keys, and of further conditions on queries and on keys."""

    queries: Program
    keys: Program
    queries_if: Program | None = None
    keys_if: Program | None = None


class Recognized(NamedTuple):
    """A mask's program as a conjunction of parts. rest: the part that is no built-in mask."""

    left: int | None = None  # k >= q + diagonal - left
    right: int | None = None  # k <= q + diagonal + right
    prefix: Limit | None = None
    key_lengths: tuple[Limit, ...] = ()
    documents: Alike | None = None
    rest: Program | None = None


@lru_cache(maxsize=1024)
def recognize(text: str, numbers: tuple[float, ...], lengths: Lengths, ranges: bool = True) -> Recognized:
    """The built-in masks in a program. ranges: whether prefixes, key lengths and documents are recognized, too. They
    are only if no other part is left.

    >>> from .program import build
    >>> window = build(lambda p: [p.compare("ge", p.input("q"), p.input("k"))])
    >>> recognize(window.text, (), Lengths(64, 64, 0)).right
    0
    """
    reader = _Reader(Program.parse(text), numbers, lengths)
    parts = [_Part(at, negated, reader.read(at, negated)) for at, negated in reader.conjuncts()]
    low, high = -math.inf, math.inf
    others: list[_Part] = []
    for part in parts:
        bands = [one for one in part.atoms or () if isinstance(one, _Band)]
        if part.atoms is None or len(bands) < len(part.atoms):
            others.append(part)
            continue
        least, most = max([low, *(b.low for b in bands)]), min([high, *(b.high for b in bands)])
        # built-in windows hold the diagonal
        if (least == -math.inf or least <= lengths.diagonal) and (most == math.inf or most >= lengths.diagonal):
            low, high = least, most
        else:
            others.append(part)
    found = Recognized(
        None if low == -math.inf else int(lengths.diagonal - low),
        None if high == math.inf else int(high - lengths.diagonal),
    )
    whole = reader.ranges(others, found) if ranges else None
    return whole if whole is not None else found._replace(rest=reader.conjunction([part[:2] for part in others]))


@lru_cache(maxsize=256)
def without_abs(text: str, numbers: tuple[float, ...], lengths: Lengths, window: Window) -> str:
    """A score's program, or its gradient's, without absolute values of terms that have one sign wherever a row sees the
    key: under a causal mask ALiBi's |q + S_k - S_q - k| is q + S_k - S_q - k. Scores of hidden keys may change.

    >>> from .program import FLOAT, build
    >>> distance = lambda p: p.cast(p.unary("abs", p.binary("sub", p.input("q"), p.input("k"), "i")), FLOAT)
    >>> alibi = build(lambda p: [p.sub(p.input("score"), distance(p))])
    >>> print(without_abs(alibi.text, (), Lengths(64, 64, 0), Window(right=0)))
    f input score
    i input q
    i input k
    i sub 1 2
    f cast 3
    f sub 0 4
    out 5
    """
    program = Program.parse(text)
    if (window.left is None and window.right is None) or not any(node.op == "abs" for node in program.nodes):
        return text
    reader = _Reader(program, numbers, lengths)
    builder = Builder(program.tensors, program.numbers)
    at: list[int] = []
    for node in program.nodes:
        args = tuple(at[arg] for arg in node.args)
        sign = reader.sign(node.args[0], window) if node.op == "abs" else 0
        if sign:
            at.append(args[0] if sign > 0 else builder.unary("neg", args[0]))
        else:
            at.append(builder.node(node.kind, node.op, args, node.value))
    return builder.program([at[output] for output in program.outputs], program.scatters).text


# ---------------------------------------------------------------- atoms


class _Band(NamedTuple):
    """low <= k - q <= high."""

    low: float = -math.inf
    high: float = math.inf


class _Keys(NamedTuple):
    """k < node + shift. node: an integer of b in the program, or None."""

    node: int | None
    shift: int


class _Same(NamedTuple):
    """Two nodes that are equal: of b and q, of b and k."""

    queries: int
    keys: int


class _Prefix(NamedTuple):
    keys: _Keys


class _Side(NamedTuple):
    """A condition on positions of one side: "q" or "k"."""

    side: str


class _Linear(NamedTuple):
    """q * query + k * key + constant + diagonal * (S_k - S_q)."""

    query: int = 0
    key: int = 0
    constant: int = 0
    diagonal: int = 0

    def plus(self, other: _Linear, sign: int = 1) -> _Linear:
        return _Linear(*(one + sign * two for one, two in zip(self, other)))

    def times(self, factor: int) -> _Linear:
        return _Linear(*(one * factor for one in self))


_Atom = _Band | _Keys | _Same | _Prefix | _Side


class _Part(NamedTuple):
    node: int
    negated: bool
    atoms: tuple[_Atom, ...] | None  # all must hold; None: no built-in mask


class _Reader:
    """Reads a mask's program for one call's lengths and captured numbers."""

    def __init__(self, program: Program, numbers: Sequence[float], lengths: Lengths) -> None:
        self.program, self.numbers, self.lengths = program, numbers, lengths
        last = lambda count: Interval(0, max(0, count - 1))
        diagonal = Interval(lengths.diagonal, lengths.diagonal)
        inputs = {"q": last(lengths.queries), "k": last(lengths.keys), "diagonal": diagonal}
        self.bounds = node_bounds(program, inputs, numbers)
        self.reads: list[frozenset[str]] = []
        for node in program.nodes:
            own = {str(node.value)} if node.op == "input" else {"tensor"} if node.op == "load" else set()
            self.reads.append(frozenset(own.union(*(self.reads[arg] for arg in node.args))))

    def conjuncts(self) -> Iterator[tuple[int, bool]]:
        """(node, whether it is negated) of the parts that must all hold."""
        stack = [(self.program.outputs[0], False)]
        while stack:
            at, negated = stack.pop()
            node = self.program.nodes[at]
            if node.op == "not":
                stack.append((node.args[0], not negated))
            elif node.op == ("or" if negated else "and") and node.kind == BOOL:
                stack += [(arg, negated) for arg in reversed(node.args)]
            else:
                yield at, negated

    def read(self, at: int, negated: bool) -> tuple[_Atom, ...] | None:
        """The atoms whose conjunction a boolean node is."""
        node = self.program.nodes[at]
        if node.op == "not":
            return self.read(node.args[0], not negated)
        if node.op == "const":
            return () if bool(node.value) is not negated else None
        if node.op in ("and", "or") and node.kind == BOOL:
            parts = [self.read(arg, negated) for arg in node.args]
            if (node.op == "and") is not negated:
                return None if any(part is None for part in parts) else tuple(a for part in parts if part for a in part)
            return _either([part[0] if part is not None and len(part) == 1 else None for part in parts], self.lengths)
        found = self._compared(node.op, node.args[0], node.args[1], negated) if node.op in _NEGATED else None
        return found if found is not None else self._sided(at)

    def _sided(self, at: int) -> tuple[_Atom, ...] | None:
        sides = self.reads[at] - {"b", "tensor"}
        return (_Side(next(iter(sides))),) if sides in ({"q"}, {"k"}) else None

    def _compared(self, op: str, a: int, b: int, negated: bool) -> tuple[_Atom, ...] | None:
        op = _NEGATED[op] if negated else op
        nodes = self.program.nodes
        if op in ("eq", "ne"):
            return self._same(a, b) if op == "eq" else None
        if nodes[b].op == "abs":
            op, a, b = _SWAPPED[op], b, a
        left, right = self._in_numbers(nodes[a].args[0] if nodes[a].op == "abs" else a), self._in_numbers(b)
        if nodes[a].op == "abs":
            if left is None or right is None or op in ("gt", "ge") or not self._exact(a):
                return None
            found = [self._ordered(op, sign, right) for sign in (left, left.times(-1))]
            return None if None in found else tuple(one for one in found if one is not None)
        for side, other, at in ((left, right, b), (right, left, a)):
            way = op if at == b else _SWAPPED[op]
            if side is not None and other is None and side[:2] == (0, 1) and self._of_entry(at) and way in ("lt", "le"):
                return (_Keys(at, (way == "le") - side.constant),)
        one = None if left is None or right is None else self._ordered(op, left, right)
        return None if one is None else (one,)

    def _ordered(self, op: str, a: _Linear, b: _Linear) -> _Atom | None:
        """a op b as the atom `difference <= 0`."""
        query, key, constant, _ = a.plus(b, -1).times(_SIGN[op])
        constant += op in ("lt", "gt")
        if key == -query != 0:
            # key * (k - q) <= -constant
            return _Band(high=-constant // key) if key > 0 else _Band(low=-(-constant // -key))
        return _Keys(None, -constant // key + 1) if query == 0 and key > 0 else None

    def _same(self, a: int, b: int) -> tuple[_Atom, ...] | None:
        if self.program.nodes[a].kind == FLOAT:
            return None
        for queries, keys in ((a, b), (b, a)):
            if "q" in self.reads[queries] <= {"b", "q", "tensor"} and "k" in self.reads[keys] <= {"b", "k", "tensor"}:
                return (_Same(queries, keys),)
        return None

    def _of_entry(self, at: int) -> bool:
        """Whether a node is an integer of the batch entry."""
        return self.reads[at] <= {"b", "tensor"} and self.program.nodes[at].kind not in (FLOAT, BOOL)

    def _exact(self, at: int) -> bool:
        """Whether a node's arithmetic neither wraps around nor rounds."""
        low, high = self.bounds[at]
        return max(abs(low), abs(high)) <= (MOST_EXACT if self.program.nodes[at].kind == FLOAT else 2**31 - 1)

    def _in_numbers(self, at: int) -> _Linear | None:
        """`linear` with the diagonal's number in the constant."""
        found = self.linear(at)
        return found and found._replace(constant=found.constant + found.diagonal * self.lengths.diagonal, diagonal=0)

    def linear(self, at: int) -> _Linear | None:
        """A node as a linear term of q and k; None for others."""
        node = self.program.nodes[at]
        if node.kind == BOOL or not self._exact(at):
            return None
        if node.op in ("const", "number"):
            value = float(node.constant if node.op == "const" else self.numbers[node.index])
            return _Linear(constant=int(value)) if value.is_integer() else None
        if node.op == "input":
            inputs = {"q": _Linear(query=1), "k": _Linear(key=1), "diagonal": _Linear(diagonal=1)}
            return inputs.get(str(node.value))
        args = [self.linear(arg) for arg in node.args]
        terms = [arg for arg in args if arg is not None]
        if len(terms) < len(args):
            return None
        if node.op == "cast":
            return terms[0]
        if node.op == "neg":
            return terms[0].times(-1)
        if node.op in ("add", "sub"):
            return terms[0].plus(terms[1], 1 if node.op == "add" else -1)
        if node.op == "mul" and any(term._replace(constant=0) == _Linear() for term in terms):
            factor, term = terms if terms[0]._replace(constant=0) == _Linear() else terms[::-1]
            return term.times(factor.constant)
        return None

    def sign(self, at: int, window: Window) -> int:
        """1 if a node is at least 0 wherever a row sees the key, -1 if it is at most 0, 0 if neither is known."""
        term = self.linear(at)
        if term is None or term.query != -term.key or term.query == 0:
            return 0
        if term.diagonal != term.query and window.shifts:
            return 0
        # the term is factor * (q + diagonal - k) + rest, and -right <= q + diagonal - k <= left
        factor, rest = term.query, term.constant + (term.diagonal - term.query) * self.lengths.diagonal
        ends = [
            None if window.right is None else -window.right * factor,
            None if window.left is None else window.left * factor,
        ]
        low, high = ends if factor > 0 else ends[::-1]
        return 1 if low is not None and low + rest >= 0 else -1 if high is not None and high + rest <= 0 else 0

    # ------------------------------------------------------------ prefixes, key lengths, documents

    def ranges(self, others: list[_Part], found: Recognized) -> Recognized | None:
        """The parts as a prefix, key lengths and documents; None if one of them is something else."""
        atoms: list[tuple[_Part, _Atom]] = []
        for part in others:
            if part.atoms is None:
                return None
            atoms += [(part, one) for one in part.atoms]
        same = [one for _, one in atoms if isinstance(one, _Same)]
        prefixes = [one.keys for _, one in atoms if isinstance(one, _Prefix)]
        limits = [one for _, one in atoms if isinstance(one, _Keys)]
        sides = [(part, one) for part, one in atoms if isinstance(one, _Side)]
        strange = len(atoms) - len(same) - len(prefixes) - len(limits) - len(sides)  # bands that exclude the diagonal
        if strange or len(same) > 1 or len(prefixes) > 1 or (sides and not same):
            return None
        documents = None
        if same:
            under = {
                name: self.conjunction(
                    [part[:2] for part, one in sides if one.side == name and len(part.atoms or ()) == 1]
                )
                for name in ("q", "k")
            }
            if any(len(part.atoms or ()) > 1 for part, _ in sides):
                return None
            documents = Alike(self.alone(same[0].queries), self.alone(same[0].keys), under["q"], under["k"])
        return found._replace(
            prefix=self._limit(prefixes[0]) if prefixes else None,
            key_lengths=tuple(map(self._limit, limits)),
            documents=documents,
        )

    def _limit(self, keys: _Keys) -> Limit:
        return Limit(None if keys.node is None else self.alone(keys.node), keys.shift)

    def alone(self, at: int) -> Program:
        """The program of one node."""
        builder = Builder(self.program.tensors, self.program.numbers)
        return builder.program(builder.insert(self.program._replace(outputs=(at,))))

    def conjunction(self, parts: Sequence[tuple[int, bool]]) -> Program | None:
        """The program of the conjunction of (node, whether it is negated); None without any."""
        if not parts:
            return None
        builder = Builder(self.program.tensors, self.program.numbers)
        seen = builder.const(True)
        for at, negated in parts:
            (part,) = builder.insert(self.program._replace(outputs=(at,)))
            seen = builder.binary("and", seen, builder.unary("not", part) if negated else part, BOOL)
        return builder.program([seen])


def _either(atoms: Sequence[_Atom | None], lengths: Lengths) -> tuple[_Atom, ...] | None:
    """The atom that a disjunction of two is: a wider window, or a prefix and the keys to the diagonal."""
    a, b = atoms
    if isinstance(a, _Band) and isinstance(b, _Band):
        if a.low == b.low == -math.inf:
            return (_Band(high=max(a.high, b.high)),)
        return (_Band(low=min(a.low, b.low)),) if a.high == b.high == math.inf else None
    keys, band = (a, b) if isinstance(a, _Keys) else (b, a)
    if isinstance(keys, _Keys) and band == _Band(high=lengths.diagonal):
        return (_Prefix(keys),)
    return None
