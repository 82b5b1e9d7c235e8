"""Inline PTX on shared memory: its own variables, other programs of the cluster, mbarriers, and the cluster barrier.

`build` turns an instruction into the fields of `ptx.Step`: (function, targets, sources, effect). An address has 32
bits. Its upper 8 bits, as `mapa` sets them, select a program of the cluster, or the running program if zero. The
machine provides `shared_symbol(name, size)`, `shared_load(address, dtype, mask)`, `send(address, values, mbarrier,
mask)`, `shared_barrier(address, count, expected, mask)`, `shared_wait(address, parity, acquire)`,
`cluster_arrive(release)` and `cluster_wait()`.

Source: PTX ISA, "Parallel Synchronization and Communication Instructions", "Data Movement: st.async, mapa".
"""

import re

import numpy as np

from .ptx_arithmetic import KINDS, PRED, fit

WITHIN = 24  # bits of an address within one program's shared memory
_NUMBER = KINDS["b32"]


def symbol(statement):
    """(name, bytes) of a shared memory variable, or None for another statement."""
    match = re.fullmatch(r"\.shared\s+(?:\.align\s+\d+\s+)?\.b8\s+([%$_A-Za-z][\w$]*)\s*\[(\d+)\]", statement)
    return match and (match[1], int(match[2]))


def of_symbol(name, size):
    return lambda machine, mask: [np.array([machine.shared_symbol(name, size)], np.uint32)]


def supports(opcode):
    """Whether this module builds the instruction."""
    return any(re.fullmatch(pattern, opcode) for pattern, _ in _BUILDERS)


def build(block, code):
    return next(make(block, code) for pattern, make in _BUILDERS if re.fullmatch(pattern, code.opcode))


def _place(block, text):
    """(slot of an address, byte offset)."""
    match = re.fullmatch(r"\[\s*([%$_A-Za-z][\w$]*)\s*(?:\+\s*(\d+)\s*)?\]", text)
    if not match:
        raise ValueError(f"'{text}' is not a shared memory address; expected [register] or [register+bytes]")
    return block.source(match[1], _NUMBER), int(match[2] or 0)


def _names(text):
    return [name.strip() for name in text.strip("{}").split(",")]


def _map(block, code):
    target, address, program = code.need(3)
    read = block.source(address, _NUMBER), block.source(program, _NUMBER)
    mapped = lambda address, program: [
        (address & np.uint32(2**WITHIN - 1)) | ((program + np.uint32(1)) << np.uint32(WITHIN))
    ]
    return mapped, (block.target(target, _NUMBER),), read, ""


def _load(block, code):
    kind = code.kind()
    target, address = code.need(2)
    address, offset = _place(block, address)
    targets = tuple(block.target(name, kind) for name in _names(target))

    def function(machine, mask, address):
        first = address.astype(np.int64) + offset
        lanes = [machine.shared_load(first + i * kind.bits // 8, kind.number, mask) for i in range(len(targets))]
        return [fit(np.asarray(lane).view(f"u{kind.bits // 8}"), kind.bits) for lane in lanes]

    return function, targets, (address,), "memory"


def _send(block, code):
    kind = code.kind()
    address, values, bell = code.need(3)
    (address, offset), (bell, further) = _place(block, address), _place(block, bell)
    sources = address, bell, *(block.source(name, kind) for name in _names(values))

    def function(machine, mask, address, bell, *values):
        numbers = [fit(bits, kind.bits).view(kind.number) for bits in values]
        machine.send(address.astype(np.int64) + offset, numbers, bell.astype(np.int64) + further, mask)
        return ()

    return function, (), sources, "memory"


def _barrier(block, code):
    """mbarrier.init with a count, or an arrival that expects bytes, zero if it names none."""
    begins = "init" in code.parts
    address, number = (
        code.need(2) if begins else code.need(3)[1:] if "expect_tx" in code.parts else (code.need(2)[1], "0")
    )
    address, offset = _place(block, address)

    def function(machine, mask, address, number):
        count, expected = (int(number[0]), None) if begins else (1, int(number[0]))
        machine.shared_barrier(address.astype(np.int64) + offset, count, expected, mask)
        return ()

    return function, (), (address, block.source(number, _NUMBER)), "memory"


def _wait(block, code):
    """mbarrier.try_wait, which here waits until the phase completes, so that a loop around it ends at once."""
    target, address, parity = code.need(3)
    address, offset = _place(block, address)
    acquire = "relaxed" not in code.parts

    def function(machine, mask, address, parity):
        machine.shared_wait(int(address[0]) + offset, int(parity[0]), acquire)
        return [np.ones(1, bool)]

    return function, (block.target(target, PRED),), (address, block.source(parity, _NUMBER)), "memory"


def _arrive(block, code):
    code.need(0)
    release = "relaxed" not in code.parts
    return (lambda machine: machine.cluster_arrive(release)), (), (), "sync"


def _meet(block, code):
    code.need(0)
    return (lambda machine: machine.cluster_wait()), (), (), "sync"


_BUILDERS = (
    (r"mapa\.shared::cluster\.u32", _map),
    (r"ld\.shared(::cta)?(\.v[24])?\.[bsuf]32", _load),
    (r"st\.async(\.weak)?\.shared::cluster\.mbarrier::complete_tx::bytes(\.v[24])?\.[bsuf]32", _send),
    (
        r"mbarrier\.init\.shared(::cta)?\.b64|mbarrier\.arrive(\.expect_tx)?(\.release\.cta)?\.shared(::cta)?\.b64",
        _barrier,
    ),
    (r"mbarrier\.try_wait\.parity(\.(acquire|relaxed)\.(cta|cluster))?\.shared(::cta)?\.b64", _wait),
    (r"barrier\.cluster\.arrive(\.release|\.relaxed)?(\.aligned)?", _arrive),
    (r"barrier\.cluster\.wait(\.acquire)?(\.aligned)?", _meet),
)
