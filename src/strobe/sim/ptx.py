"""Evaluates inline PTX, the blocks passed to `inline_asm_elementwise`, over whole arrays at once.

    text, constraints --parse, once--> Program: registers and steps --run, per call--> arrays

A register is a one-dimensional array of bits, with one entry per group of `pack` elements, or a single entry if all are
equal. A step computes new registers (`ptx_arithmetic` defines how), or calls the machine, in program order, if it
accesses memory or synchronises. Control flow is guards `@p` and `@!p` and guarded forward branches: the instructions up
to the label are guarded by the negated predicate. A register first written under a guard is all ones (NaN, or -1) where
the guard does not hold.

The machine is an object with the methods that `ptx_cluster` needs, and `barrier(number, threads, wait)`, `fence(name)`,
`bulk_commit()`, `bulk_wait(pending, read)`, `load(address, dtype, mask, order)`, `store(address, value, mask, order)`
and `atomic(operation, address, operands, mask, order, returns)`. Its arrays have one entry per group. A vector, or a
pair of halves, is one call per lane. bfloat16 has the type `BFLOAT16`.
"""

import re
from dataclasses import dataclass
from functools import cache, reduce

import numpy as np

from . import ptx_cluster, ptx_e2m1, ptx_lanes
from .ptx_arithmetic import BFLOAT16, KINDS, PRED, RULES, SIGNED, UNSIGNED, conversion, fit, join, split

__all__ = ["BFLOAT16", "run"]

WIDTHS = {
    "h": 16,
    "r": 32,
    "f": 32,
    "l": 64,
    "d": 64,
    "n": 32,
}  # of constraint registers, and of numbers in the text
NAME = r"[%$_A-Za-z][\w$]*"


def run(text, constraints, arguments, dtypes, pack, machine):
    """Run a block over arrays of one shape (or 0-d). Returns one array per output.

    >>> x = np.array([1.5, -2.0], np.float32)
    >>> run("fma.rn.f32 $0, $1, $1, 1.0;", "=f,f", [x], [np.float32], 1, None)
    [array([3.25, 5.  ], dtype=float32)]

    arguments: arrays of bits: 16-bit floats as uint16, 8-bit floats as uint8.
    dtypes: of the outputs.
    pack: elements per group. As in Triton, an argument takes `pack` registers, or fewer where elements of less than 32
        bits share one. A group is consecutive elements of the last dimension; the caller orders them as a thread's
        registers (`layouts.registers`).

    Raises NotImplementedError for an unknown instruction, ValueError for a block that ptxas or Triton would reject or
    whose synchronisation diverges.
    """
    program = parse(text, constraints)
    arguments = [np.asarray(argument) for argument in arguments]
    shape = next((argument.shape for argument in arguments if argument.ndim), ())
    odd = [argument.shape for argument in arguments if argument.ndim and argument.shape != shape]
    if odd:
        raise ValueError(f"inline PTX: the arguments have shapes {shape} and {odd[0]}; give them one shape (or 0-d)")
    if pack > 1 and (not shape or shape[-1] % pack):
        raise ValueError(f"inline PTX: pack={pack} does not divide the last dimension of the shape {shape}")
    groups = int(np.prod(shape)) // pack
    inputs = [bits for argument in arguments for bits in _registers(argument, shape, pack)]
    outputs = [(np.dtype(dtype), _packing(np.dtype(dtype), pack)) for dtype in dtypes]
    _check_count("input", len(inputs), len(program.inputs), pack)
    _check_count("output", sum(count for _, (_, count) in outputs), len(program.outputs), pack)
    registers = list(program.template)
    for slot, bits in zip(program.inputs, inputs):
        registers[slot] = _entering(bits, program.widths[slot])
    with np.errstate(all="ignore"):
        _execute(program, registers, groups, machine)
    return _leaving(program, registers, outputs, groups, shape)


# ---------------------------------------------------------------- arrays and registers


def _packing(dtype, pack):
    """(type of a register that holds elements of `dtype`, number of registers for `pack` elements)."""
    together = max(1, min(4 // dtype.itemsize, pack))
    return UNSIGNED[8 * dtype.itemsize * together], pack // together


def _registers(argument, shape, pack):
    dtype, count = _packing(argument.dtype, pack)
    if pack > 1:
        argument = np.broadcast_to(argument, shape)
    if argument.dtype.itemsize != dtype.itemsize:
        argument = np.ascontiguousarray(argument)
    bits = argument.reshape(-1).view(dtype)
    return [bits] if count == 1 else [bits[i::count] for i in range(count)]


def _check_count(role, found, expected, pack):
    if found != expected:
        raise ValueError(
            f"inline PTX: the constraints name {expected} {role} registers, but with pack={pack} "
            f"the {role}s take {found}; an element takes one, except that elements of less than 32 bits share one"
        )


def _entering(bits, width):
    if 8 * bits.itemsize > width:
        raise ValueError(
            f"inline PTX: an argument of {8 * bits.itemsize} bits does not fit the {width}-bit register its "
            "constraint names"
        )
    return fit(bits, width)


def _leaving(program, registers, outputs, groups, shape):
    results, slots = [], iter(program.outputs)
    for dtype, (register, count) in outputs:
        result = np.empty((groups, count), register)
        for i, slot in zip(range(count), slots):
            if program.widths[slot] < 8 * register.itemsize:
                raise ValueError(
                    f"inline PTX: an output of {8 * register.itemsize} bits from the {program.widths[slot]}-bit "
                    "register of its constraint"
                )
            result[:, i] = fit(registers[slot], 8 * register.itemsize)
        results.append(result.view(dtype).reshape(shape))
    return results


# ---------------------------------------------------------------- execution


@dataclass(frozen=True)
class Step:
    """One step of a program.

    Without an effect, `function(*bits)` returns the targets' bits. With effect "memory" it is called as
    `function(machine, mask, *bits)`, with "sync" as `function(machine, *bits)`, and if lanes communicate as
    `function(mask, groups, *bits)`.
    """

    function: object
    targets: tuple = ()
    sources: tuple = ()
    effect: str = ""
    guards: tuple = ()  # all must hold: (slot of a predicate, whether it is negated)
    where: str = ""
    lanes: bool = False


@dataclass(frozen=True)
class Program:
    steps: tuple
    template: tuple  # initial registers: constants, or None
    widths: tuple
    inputs: tuple
    outputs: tuple


def _execute(program, registers, groups, machine):
    for step in program.steps:
        bits = [registers[slot] for slot in step.sources]
        mask = None
        for slot, negated in step.guards:
            holds = ~registers[slot] if negated else registers[slot]
            mask = holds if mask is None else mask & holds
        if step.effect:
            results = _affect(step, bits, mask, groups, machine)
        else:
            try:
                results = step.function(mask, groups, *bits) if step.lanes else step.function(*bits)
            except (NotImplementedError, ValueError) as error:
                raise type(error)(f"{step.where}: {error}") from None
        for slot, result in zip(step.targets, results):
            if mask is not None:
                before = registers[slot]
                result = np.where(mask, result, np.invert(np.zeros(1, result.dtype)) if before is None else before)
            registers[slot] = result


def _affect(step, bits, mask, groups, machine):
    if machine is None:
        raise ValueError(f"{step.where} touches memory or synchronises, and machine is None; pass a machine")
    if step.effect == "sync":
        if mask is not None and mask.any() != mask.all():
            raise ValueError(
                f"{step.where} synchronises, and its predicate holds for some elements only; make the predicate "
                "the same for all"
            )
        if mask is None or mask.all():
            step.function(machine, *bits)
        return ()
    whole = [x if len(x) == groups else np.broadcast_to(x, groups) for x in bits]
    return step.function(machine, None if mask is None else np.broadcast_to(mask, groups), *whole)


# ---------------------------------------------------------------- parsing


@dataclass(frozen=True)
class Code:
    """An instruction as written, with its line in the block."""

    opcode: str
    operands: tuple
    line: int

    @property
    def root(self):
        return self.opcode.split(".")[0]

    @property
    def parts(self):
        return self.opcode.split(".")[1:]

    @property
    def where(self):
        return f"inline PTX, line {self.line}: '{self.opcode}'"

    def kind(self, types=tuple(KINDS)):
        """The last type among the modifiers."""
        kinds = [part for part in self.parts if part in KINDS]
        if not kinds or kinds[-1] not in types:
            raise NotImplementedError(f"has no supported type; supported types: {', '.join(types)}")
        return KINDS[kinds[-1]]

    def mods(self, *known):
        """The modifiers that are not types."""
        mods = [part for part in self.parts if part not in KINDS]
        strange = [mod for mod in mods if mod not in known]
        if strange:
            raise NotImplementedError(
                f"modifier '.{strange[0]}' is not supported here; supported: {', '.join(known) or 'none'}"
            )
        return mods

    def need(self, least, most=None):
        if not least <= len(self.operands) <= (most or least):
            raise ValueError(
                f"has {len(self.operands)} operands, not {least if most is None else f'{least} to {most}'}"
            )
        return self.operands


class Block:
    """Parser state: registers by name and scope, what was written to them, and the steps so far."""

    def __init__(self, constraints):
        self.scopes, self.widths, self.families, self.template, self.steps = [{}], [], [], [], []
        self.inputs, self.outputs, self.written = [], [], set()
        self.ahead = {}  # label ahead -> guards of the branches to it
        self.behind = {}  # label -> number of steps before it
        listed = [part.strip() for part in constraints.split(",")]
        for number, part in enumerate(part for part in listed if part and not part.startswith("~")):
            letter = part.lstrip("=&")
            if letter.isdigit() and not part.startswith("=") and int(letter) < len(self.outputs):
                slot = self.scopes[0][f"${number}"] = self.outputs[int(letter)]
            elif letter in WIDTHS:
                slot = self.declare(f"${number}", WIDTHS[letter])
            else:
                raise ValueError(
                    f"inline PTX: constraint '{part}' in '{constraints}'; expected one of {', '.join(WIDTHS)}, '=' "
                    "before an output's"
                )
            (self.outputs if part.startswith("=") else self.inputs).append(slot)
        self.written.update(self.inputs)

    def declare(self, name, width, family="b", bits=None):
        self.scopes[-1][name] = len(self.widths)
        self.widths.append(width)
        self.families.append(family)
        self.template.append(bits)
        return len(self.widths) - 1

    def constant(self, bits):
        return self.declare("", 8 * bits.itemsize if bits.dtype != bool else 1, bits=bits)

    def slot(self, name, kind, wider):
        slot = next((scope[name] for scope in reversed(self.scopes) if name in scope), None)
        if slot is None:
            raise ValueError(f"register '{name}' is not declared; special registers are not supported")
        if self.widths[slot] != kind.width and not (wider and self.widths[slot] > kind.width > 1):
            raise ValueError(f"register '{name}' has {self.widths[slot]} bits, .{kind.name} has {kind.width}")
        if "f" in (self.families[slot], kind.family) and {self.families[slot], kind.family} & {"s", "u"}:
            raise ValueError(
                f"register '{name}' and .{kind.name}: one is of floats, one of integers; declare the register "
                f".b{self.widths[slot]}"
            )
        return slot

    def source(self, text, kind, wider=False):
        if kind is PRED and text.startswith("!"):
            slot = self.constant(np.zeros(1, bool))
            self.steps.append(Step(lambda p: [~p], (slot,), (self.source(text[1:].strip(), PRED),)))
            return slot
        if not re.fullmatch(NAME, text):
            return self.constant(_literal(text, kind))
        slot = self.slot(text, kind, wider)
        if slot not in self.written:
            raise ValueError(f"register '{text}' is read before it is written")
        return slot

    def target(self, text, kind, wider=False):
        if text == "_":
            return self.constant(np.zeros(1, UNSIGNED[kind.width]))
        if not re.fullmatch(NAME, text):
            raise ValueError(f"'{text}' is not a register that can be written")
        slot = self.slot(text, kind, wider)
        if slot in self.inputs and slot not in self.outputs:
            raise ValueError(f"writes to '{text}', an input")
        self.written.add(slot)
        return slot


def _literal(text, kind):
    """A constant operand, as bits of its type."""
    number = UNSIGNED[kind.width]
    if match := re.fullmatch(r"0([fF][0-9a-fA-F]{8}|[dD][0-9a-fA-F]{16})", text):
        if kind.width != (32 if text[1] in "fF" else 64):
            raise ValueError(f"constant '{text}' for .{kind.name}")
        return np.array([int(match[1][1:], 16)], number)
    if match := re.fullmatch(r"(-?)(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?", text):
        value = int(match[1] + match[2], 8 if re.fullmatch(r"0\d+", match[2]) else 0)
        if kind.family == "f" or not -(1 << kind.width - 1) <= value < 1 << kind.width:
            raise ValueError(
                f"constant '{text}' for .{kind.name}{'; write it as 1.0 or 0f3F800000' if kind.family == 'f' else ''}"
            )
        return np.array([value % (1 << kind.width)], number)
    if kind.name in ("f32", "f64") and re.fullmatch(r"-?\d+(\.\d*([eE][-+]?\d+)?|[eE][-+]?\d+)", text):
        return np.array([float(text)], kind.number).view(number)
    raise ValueError(f"operand '{text}' is neither a register nor a constant of .{kind.name}")


def _statements(text):
    """(line, statement) pairs of a block: a brace, a label with its colon, or the text before a semicolon."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", lambda comment: re.sub(r"[^\n]", " ", comment[0]), text, flags=re.DOTALL)
    place = 0
    while match := re.compile(rf"\s*([{{}}]|{NAME}\s*:(?!:)|[^;]*;|\S[^;]*$)").match(text, place):
        line = text.count("\n", 0, match.start(1)) + 1
        if match[1] not in "{}" and not match[1].endswith((";", ":")):
            raise ValueError(f"inline PTX, line {line}: '{match[1].strip()}' does not end with a semicolon")
        yield line, match[1].rstrip(";").strip()
        place = match.end()


@cache
def parse(text, constraints):
    """Parse a block into a Program."""
    block = Block(constraints)
    for line, statement in _statements(text):
        if statement == "{":
            block.scopes.append({})
        elif statement == "}":
            if len(block.scopes) == 1:
                raise ValueError(f"inline PTX, line {line}: '}}' closes nothing")
            block.scopes.pop()
        elif statement.startswith("."):
            _directive(block, statement, line)
        elif statement.endswith(":"):
            _label(block, statement[:-1].strip(), line)
        else:
            _instruction(block, statement, line)
    if len(block.scopes) > 1:
        raise ValueError("inline PTX: a '{' is never closed")
    if block.ahead:
        raise ValueError(f"inline PTX: no label '{next(iter(block.ahead))}' lies ahead of the branch to it")
    for name, (line, _) in block.behind.items():
        raise NotImplementedError(
            f"inline PTX, line {line}: no branch before the label '{name}' goes there; branches go to a label ahead"
        )
    for number, slot in enumerate(block.outputs):
        if slot not in block.written:
            if block.written:
                raise ValueError(f"inline PTX: output ${number} is never written")
            block.template[slot] = np.zeros(1, UNSIGNED[block.widths[slot]])  # a dummy, as gdc_wait has
    return Program(*(tuple(x) for x in (block.steps, block.template, block.widths, block.inputs, block.outputs)))


def _label(block, name, line):
    if block.ahead.pop(name, None) is None:
        block.behind[name] = line, len(block.steps)


def _branch(block, code, guard):
    """Guard everything up to a label by the negation of the branch's guard. The guard is copied, since its register may
    be written before the label.
    """
    code.mods("uni")
    (name,) = code.need(1)
    if guard is None:
        raise NotImplementedError("is an unconditional branch; give it a predicate")
    slot, negated = guard
    if name in block.behind:
        again = block.steps[block.behind.pop(name)[1] :]
        if [step.targets for step in again] == [(slot,)] and negated and "try_wait" in again[0].where:
            return  # a wait here lasts until it succeeds, so its loop never repeats
        raise NotImplementedError(
            "is a backward branch; supported is a loop of one mbarrier.try_wait until it succeeds"
        )
    # only the elements that have not branched yet
    skipping = [passed for guards in block.ahead.values() for passed, _ in guards]
    taken = block.declare("", 1)
    block.steps.append(
        Step(
            lambda p, *gone: [reduce(np.logical_and, (~one for one in gone), p ^ negated)], (taken,), (slot, *skipping)
        )
    )
    block.ahead[name] = (*block.ahead.get(name, ()), (taken, True))


def _directive(block, statement, line):
    if found := ptx_cluster.symbol(statement):
        slot = block.declare(found[0], 32)
        block.written.add(slot)
        return block.steps.append(Step(ptx_cluster.of_symbol(*found), (slot,), (), "memory", where=statement))
    match = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", statement, re.DOTALL)
    if not match or match[1] not in KINDS:
        raise NotImplementedError(
            f"inline PTX, line {line}: '{statement.split()[0]}': only instructions, labels, .reg and .shared are known"
        )
    kind = KINDS[match[1]]
    for name in (name.strip() for name in match[2].split(",")):
        if many := re.fullmatch(rf"({NAME})<(\d+)>", name):
            for i in range(int(many[2])):
                block.declare(f"{many[1]}{i}", kind.width, kind.family)
        elif re.fullmatch(NAME, name):
            block.declare(name, kind.width, kind.family)
        else:
            raise ValueError(f"inline PTX, line {line}: '{name}' is not a register name")


def _instruction(block, statement, line):
    match = re.fullmatch(rf"(?:@(!?)\s*({NAME})\s+)?([\w.:]+)\s*(.*)", statement, re.DOTALL)
    if not match:
        raise ValueError(f"inline PTX, line {line}: '{statement}' is not an instruction")
    operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s{\[][^,]*", match[4])
    code = Code(match[3], tuple(operand.strip() for operand in operands), line)
    build = (
        BUILDERS.get(code.root) if not ptx_cluster.supports(code.opcode) else lambda *of: Step(*ptx_cluster.build(*of))
    )
    if build is None and code.root != "bra":
        raise NotImplementedError(
            f"{code.where} is not supported; supported opcodes: {', '.join(sorted([*BUILDERS, 'bra']))}"
        )
    try:
        guard = (block.source(match[2], PRED), bool(match[1])) if match[2] else None
        if build is None:
            return _branch(block, code, guard)
        step = build(block, code)
    except (NotImplementedError, ValueError) as error:
        raise type(error)(f"{code.where}: {error}") from None
    if step:
        guards = (*([guard] if guard else []), *sum(block.ahead.values(), ()))
        block.steps.append(Step(step.function, step.targets, step.sources, step.effect, guards, code.where, step.lanes))


def _vector(text):
    return tuple(part.strip() for part in text.strip("{}").split(",")) if text.startswith("{") else (text,)


# ---------------------------------------------------------------- instructions that compute


def _compute(block, code):
    rule = RULES[code.root]
    kind, mods = code.kind(rule.types.split()), code.mods(*rule.modifiers.split())
    operands = code.operands
    if code.root == "setp":
        operands = (*(part.strip() for part in operands[0].split("|")), *operands[1:])
    targets, sources = rule.shape(kind, mods, len(operands))
    if len(operands) != len(targets) + len(sources):
        raise ValueError(f"has {len(operands)} operands, not {len(targets) + len(sources)}")
    compute = rule.make(kind, mods)

    def function(*bits):
        results = compute(*[source.read(x) for source, x in zip(sources, bits)])
        results = results if isinstance(results, list) else [results]
        return [target.write(result) for target, result in zip(targets, results)]

    read = tuple(block.source(operand, source) for operand, source in zip(operands[len(targets) :], sources))
    write = tuple(block.target(operand, target) for operand, target in zip(operands, targets))
    return Step((lambda *bits: [compute(*bits)]) if rule.raw else function, write, read)


def _move(block, code):
    kind, (target, source) = code.kind(), code.need(2)
    code.mods()
    parts = max(_vector(target), _vector(source), key=len)
    if kind.width // len(parts) not in UNSIGNED:
        raise ValueError(f"{len(parts)} registers do not make up a .{kind.name}")
    part = KINDS[f"b{kind.width // len(parts)}"] if len(parts) > 1 else kind
    if source.startswith("{"):
        read = tuple(block.source(name, part) for name in parts)
        return Step(lambda *bits: [join(bits)], (block.target(target, kind),), read)
    read = (block.source(source, kind),)
    if target.startswith("{"):
        return Step(lambda bits: split(bits, len(parts)), tuple(block.target(name, part) for name in parts), read)
    return Step(lambda bits: [bits], (block.target(target, kind),), read)


def _convert(block, code):
    if "e2m1x2" in code.parts:
        return Step(*ptx_e2m1.build(block, code))
    kinds = [KINDS[part] for part in code.parts if part in KINDS]
    if len(kinds) != 2 or {"p", "b"} & {kind.family for kind in kinds}:
        raise NotImplementedError("needs two types, of numbers")
    (target, source), names = kinds, code.need(2, 3)
    mods = code.mods("rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi", "ftz", "sat", "satfinite", "relu")
    if target.lanes != source.lanes * (len(names) - 1):
        raise ValueError(f"makes {target.lanes} lanes of {source.lanes * (len(names) - 1)}")
    convert = conversion(target, source, mods)
    read = tuple(block.source(name, source, wider=True) for name in names[1:])
    write = block.target(names[0], target, wider=True)
    width, signed = block.widths[write], target.family == "s"
    return Step(lambda *bits: [fit(convert(*bits), width, signed)], (write,), read)


# ---------------------------------------------------------------- instructions of a warp's lanes


def _lanes(block, code):
    return Step(*ptx_lanes.build(block, code), lanes=True)


# ---------------------------------------------------------------- instructions that call the machine

SCOPES = ("cta", "cluster", "gpu", "sys")
CACHED = (
    "nc",
    "ca",
    "cg",
    "cs",
    "lu",
    "cv",
    "wb",
    "wt",
    "L1::evict_first",
    "L1::evict_last",
    "L1::no_allocate",
    "L2::64B",
    "L2::128B",
    "L2::256B",
)
NUMBERS = (*(f"{family}{bits}" for family in "bus" for bits in SIGNED), "f32", "f64")
OPERATIONS = ("add", "min", "max", "and", "or", "xor", "inc", "dec", "cas", "exch")
ATOMIC = ("b16", "b32", "b64", "u32", "s32", "u64", "s64", "f16", "f16x2", "bf16", "bf16x2", "f32", "f64")


def _memory(code, orders, default, others, types):
    """(type, modifiers, order with a scope below the GPU, number of registers) of a global memory access."""
    mods = code.mods("global", "v2", "v4", "v8", *orders, *SCOPES, *others)
    lengths = [int(mod[1:]) for mod in mods if mod in ("v2", "v4", "v8")]
    scope = next((f".{mod}" for mod in mods if mod in ("cta", "cluster")), "")
    order = next((mod + scope for mod in mods if mod in orders), default + scope * (default != "weak"))
    return code.kind(types), mods, order, lengths[0] if lengths else 1


def _address(block, text):
    match = re.fullmatch(rf"\[\s*({NAME})\s*(?:\+\s*(-?\w+)\s*)?\]", text)
    if not match:
        raise ValueError(f"'{text}' is not an address; expected [register] or [register+bytes]")
    return block.source(match[1], KINDS["b64"]), int(match[2], 0) if match[2] else 0


def _several(text, count):
    names = _vector(text)
    if len(names) != count:
        raise ValueError(f"'{text}' holds {len(names)} registers, not {count}")
    return names


def _load(block, code):
    kind, _, order, count = _memory(code, ("weak", "volatile", "relaxed", "acquire"), "weak", CACHED, NUMBERS)
    target, address = code.need(2)
    address, offset = _address(block, address)
    targets = tuple(block.target(name, kind, wider=True) for name in _several(target, count))
    widths, signed = [block.widths[slot] for slot in targets], kind.family == "s"

    def function(machine, mask, address):
        first = address.view(np.int64) + offset
        lanes = [machine.load(first + i * kind.bits // 8, kind.number, mask, order) for i in range(count)]
        return [fit(np.asarray(lane).view(UNSIGNED[kind.bits]), width, signed) for lane, width in zip(lanes, widths)]

    return Step(function, targets, (address,), "memory")


def _store(block, code):
    kind, _, order, count = _memory(code, ("weak", "volatile", "relaxed", "release"), "weak", CACHED, NUMBERS)
    address, source = code.need(2)
    address, offset = _address(block, address)

    def function(machine, mask, address, *values):
        first = address.view(np.int64) + offset
        for i, bits in enumerate(values):
            machine.store(first + i * kind.bits // 8, fit(bits, kind.bits).view(kind.number), mask, order)
        return ()

    return Step(
        function, (), (address, *(block.source(name, kind, wider=True) for name in _several(source, count))), "memory"
    )


def _atomic(block, code):
    kind, mods, order, count = _memory(
        code, ("relaxed", "acquire", "release", "acq_rel"), "relaxed", (*OPERATIONS, "noftz"), ATOMIC
    )
    operation = next((mod for mod in mods if mod in OPERATIONS), None)
    if operation is None:
        raise ValueError(f"names no operation; supported: {', '.join(OPERATIONS)}")
    returns = code.root == "atom"
    operands = code.need(2 + returns + (operation == "cas"))
    address, offset = _address(block, operands[returns])
    read = [block.source(name, kind) for operand in operands[returns + 1 :] for name in _several(operand, count)]
    targets = tuple(block.target(name, kind) for name in _several(operands[0], count)) if returns else ()

    def function(machine, mask, address, *bits):
        first, results = address.view(np.int64) + offset, []
        for i in range(count):
            lanes = zip(*(split(x, kind.lanes) for x in bits[i::count]))
            old = []
            for j, values in enumerate(lanes):
                place = first + (i * kind.lanes + j) * kind.bits // 8
                old.append(
                    machine.atomic(
                        operation, place, [value.view(kind.number) for value in values], mask, order, returns
                    )
                )
            if returns:
                results.append(join([np.asarray(lane).view(UNSIGNED[kind.bits]) for lane in old]))
        return results

    return Step(function, targets, (address, *read), "memory")


def _number(bits):
    if (bits != bits[0]).any():
        raise ValueError("inline PTX: a barrier's number and count of threads must be the same for all elements")
    return int(bits[0])


def _barrier(block, code):
    mods = code.mods("cta", "sync", "arrive", "aligned")
    wait = "sync" in mods
    if wait == ("arrive" in mods):
        raise NotImplementedError("expected .sync or .arrive")
    read = tuple(block.source(operand, KINDS["u32"]) for operand in code.need(1 if wait else 2, 2))

    def function(machine, number, threads=None):
        machine.barrier(_number(number), None if threads is None else _number(threads), wait)

    return Step(function, (), read, "sync")


def _fence(block, code):
    known = (
        r"fence\.proxy\.async(\.global|\.shared::(cta|cluster))?"
        r"|fence\.(acq_rel|sc)\.(cta|cluster|gpu|sys)"
        r"|membar\.(cta|gl|sys)"
    )
    if not re.fullmatch(known, code.opcode):
        raise NotImplementedError(
            "is not a supported fence; supported: fence.proxy.async, fence.acq_rel, fence.sc and membar with a scope"
        )
    code.need(0)
    return Step(lambda machine: machine.fence(code.opcode), effect="sync")


def _bulk(block, code):
    if code.opcode == "cp.async.bulk.commit_group":
        code.need(0)
        return Step(lambda machine: machine.bulk_commit(), effect="sync")
    if code.opcode not in ("cp.async.bulk.wait_group", "cp.async.bulk.wait_group.read"):
        raise NotImplementedError(
            "is not a supported copy; supported: cp.async.bulk.commit_group, .wait_group, .wait_group.read"
        )
    (pending,) = (int(operand, 0) for operand in code.need(1))
    return Step(lambda machine: machine.bulk_wait(pending, code.opcode.endswith(".read")), effect="sync")


def _idle(block, code):
    """nanosleep and griddepcontrol: they have no effect on results."""
    code.mods("wait", "launch_dependents")


BUILDERS = {
    **dict.fromkeys(RULES, _compute),
    **{"mov": _move, "cvt": _convert, "ld": _load, "st": _store, "red": _atomic, "atom": _atomic, "cp": _bulk},
    **{"bar": _barrier, "barrier": _barrier, "fence": _fence, "membar": _fence, "vote": _lanes, "shfl": _lanes},
    **{"nanosleep": _idle, "griddepcontrol": _idle},
}
