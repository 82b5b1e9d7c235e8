"""Global memory: loads and stores through pointers, atomics, and TMA descriptors of plain Triton."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike

from .costs import held_by_default, held_by_layout, requests
from .layouts import Layouts
from .machine import Machine
from .memory import Actor, Granules, Memory
from .report import place_text
from .scopes import ctas_in_scope
from .storages import adopt, empty_storage
from .threads import check_read_back, clashing, threads_of
from .values import (
    BYTES,
    COMPUTED,
    STORED,
    Descriptor,
    Type,
    Value,
    WrappedView,
    from_bits,
    is_pointer,
    to_bits,
    unsigned,
    wraps,
)

_ATOMIC: dict[str, Callable[..., np.ndarray]] = dict(
    ADD=np.add, FADD=np.add, MAX=np.maximum, MIN=np.minimum, UMAX=np.maximum, UMIN=np.minimum, AND=np.bitwise_and,
    OR=np.bitwise_or,
    XOR=np.bitwise_xor, XCHG=lambda old, new: new, INC=lambda old, bound: np.where(old >= bound, 0, old + 1),
    DEC=lambda old, bound: np.where((old == 0) | (old > bound), bound, old - 1))  # fmt: skip
_UNSIGNED = ("UMAX", "UMIN", "INC", "DEC")
_NO_TENSOR = "every tensor (the launch has none)"
_ORDERS = dict(ACQUIRE="acquire", RELEASE="release", ACQUIRE_RELEASE="acq_rel", RELAXED="relaxed")

Part = tuple[slice, ...]  # slices of a tensor or of a block


class Operator(Protocol):
    """An operation, or a memory order, as Triton names it."""

    @property
    def name(self) -> str: ...


class Found:
    """The addresses of one access that lie in one storage: byte offsets into it, and which of them are active."""

    __slots__ = ("live", "memory", "offsets", "size")

    def __init__(self, memory: Memory, offsets: np.ndarray, live: np.ndarray, size: int):
        self.memory, self.offsets, self.live, self.size = memory, offsets, live, size

    @property
    def active(self) -> np.ndarray:
        return self.offsets[self.live]

    def view(self, dtype: DTypeLike) -> np.ndarray:
        """The storage as elements of the access's size."""
        return self.memory.raw[: len(self.memory.raw) // self.size * self.size].view(dtype)


class Pointers:
    machine: Machine
    layouts: Layouts
    ctas: int
    held: Callable[..., np.ndarray | None]
    foreign: Callable[[str], Any]
    from_first: Callable[[Value], Value]

    def create_addptr(self, p: Value, offset: Value) -> Value:
        step = BYTES.get(p.elem[1:], 8)
        return Value(p.data + np.asarray(offset.data, np.int64) * step, p.elem, p.layout or offset.layout)

    # ---- from an address to its storage

    def _find(self, addresses: np.ndarray, mask: np.ndarray | None, size: int, what: str) -> list[Found]:
        """Locate the active addresses, by storage. Addresses outside every argument are reported and dropped."""
        live = (
            np.ones(addresses.shape, bool) if mask is None else np.broadcast_to(np.asarray(mask, bool), addresses.shape)
        )
        used = addresses[live]
        if used.size == 0:
            return []
        low, high = int(used.min()), int(used.max())
        if int(np.bitwise_or.reduce(used, axis=None)) % size:
            self._misaligned(used, size, what)
        for memory in self.machine.storages:
            if memory.base <= low and high + size <= memory.end:
                return [Found(memory, addresses - memory.base, live, size)]
        if self.machine.loaded_pointers:
            return self._scattered(addresses, live, size, what)
        home = next((m for m in self.machine.storages if m.base <= int(used[0]) < m.end), None) or self._nearest(low)
        outside = live & ((addresses < home.base) | (addresses + size > home.end))
        self._outside(home, addresses[outside], used.size, what)
        return [Found(home, addresses - home.base, live & ~outside, size)]

    def _scattered(self, addresses: np.ndarray, live: np.ndarray, size: int, what: str) -> list[Found]:
        """Pointers that were loaded or selected may point into several storages at once."""
        parts, missing = [], live
        for memory in self.machine.storages:
            inside = missing & (addresses >= memory.base) & (addresses + size <= memory.end)
            if inside.any():
                parts.append(Found(memory, addresses - memory.base, inside, size))
                missing = missing & ~inside
        if missing.any():
            outside = addresses[missing]
            self._outside(self._nearest(int(outside[0])), outside, int(live.sum()), what)
        return parts

    def _misaligned(self, used: np.ndarray, size: int, what: str) -> None:
        """A GPU stops with a misaligned address."""
        place = self.machine.place()
        wrong = used[used % size != 0]
        text = (
            f"global {what} of {size} bytes at an address that is {int(wrong[0] % size)} modulo {size} "
            f"({wrong.size} of {used.size} elements are misaligned), at {place_text(place)}"
        )
        self.machine.report("bounds", text, place, (what, "misaligned", place))

    def _outside(self, home: Memory, outside: np.ndarray, total: int, what: str) -> None:
        place = self.machine.place()
        before, after = int((outside < home.base).sum()), int((outside >= home.base).sum())
        self.machine.report(
            "bounds",
            f"global {what} leaves {home.name} ({before} elements before its start, {after} past its end, "
            f"of {total}), at {place_text(place)}{self._overflows()}",
            place,
            (what, place),
        )

    def _overflows(self) -> str:
        """The operations of this launch in which 32 bits overflowed, as a likely cause."""
        names = {"add": "sum", "sub": "difference", "mul": "product"}
        noted = [f"a {names[name]} of int32 overflows at {where}" for where, name in self.machine.wrapped.items()]
        return f"; {', '.join(noted[:3])}" if noted else ""

    def _nearest(self, address: int) -> Memory:
        distance = lambda memory: min(abs(address - memory.base), abs(address - memory.end))
        return min(self.machine.storages, key=distance, default=None) or empty_storage(_NO_TENSOR, 0)

    def _record(
        self,
        parts: list[Found],
        write: bool,
        what: str,
        proxy: str = "generic",
        adds: bool = False,
        bits: np.ndarray | None = None,
        order: str = "",
    ) -> None:
        """Record an access. `bits` are what a store writes, one for each address. `order` is that of an atomic."""
        machine, p = self.machine, self.machine.current
        scope = ctas_in_scope(p.cta, order) if order else None
        for found in parts:
            offsets, place = found.active, machine.place()
            mask = found.memory.mask_at(offsets, found.size)
            repeats = None if bits is None else partial(_repeats, found, bits)
            actor = Actor(p.agent, p.clock, p.vector_clock, proxy, what, place, adds, repeats, scope)
            machine.access(found.memory, mask, write, actor)
            if adds and machine.checks.atomic_order and len(np.unique(offsets)) < offsets.size:
                machine.report(
                    "order",
                    f"on {found.memory.name}: {what} by {p.name} at {place_text(place)} adds several elements "
                    "to one place; their order is not fixed: the sum of floating-point numbers differs from run to run",
                    place,
                )

    def _count(self, what: str, parts: list[Found], addresses: np.ndarray, layout: object) -> None:
        """Count the requests and sectors of an access (`Checks(costs=True)`)."""
        machine = self.machine
        for found in parts:
            if not addresses.ndim:  # a scalar: one thread stores it, and each warp loads it
                warps = 1 if what == "global store" else machine.current.warps
                machine.costs.add(what, machine.place(), found.size, warps, warps)
                continue
            if layout is None:
                held = held_by_default(addresses, found.size, machine.current.warps)
            else:
                held = held_by_layout(self.layouts, addresses.shape, layout)
            flat = addresses.reshape(-1), found.live.reshape(-1)
            counted = requests(*flat, found.size, held, every_warp=what == "global load")
            machine.costs.add(what, machine.place(), int(found.live.sum()) * found.size, *counted)

    def _synchronise(self, parts: list[Found], order: str, reads: bool, writes: bool) -> None:
        for found in parts:
            self.machine.synchronise(found.memory, found.active, order, reads, writes)

    def _fetch(self, parts: list[Found], shape: tuple[int, ...], dtype: DTypeLike, fill: Any) -> np.ndarray:
        out = np.empty(shape, dtype)
        out[...] = fill
        for found in parts:
            offsets = found.active
            if offsets.size and np.any(offsets % found.size):
                out[found.live] = _unaligned(found.memory.raw, offsets, found.size).view(dtype)
            else:
                out[found.live] = found.view(dtype)[offsets // found.size]
        return out

    def _put(self, parts: list[Found], bits: Any, dtype: DTypeLike) -> None:
        for found in parts:
            self.machine.progress += 1
            offsets = found.active
            values = np.broadcast_to(np.asarray(bits, dtype), found.offsets.shape)[found.live]
            if np.any(offsets % found.size):
                for byte in range(found.size):
                    found.memory.raw[offsets + byte] = (
                        np.ascontiguousarray(values).view(np.uint8).reshape(-1, found.size)[:, byte]
                    )
            else:
                found.view(dtype)[offsets // found.size] = values

    # ---- loads and stores

    def create_load(self, p: Value, cache: object = None, eviction: object = None, volatile: bool = False) -> Value:
        return self.create_masked_load(p, None, None, cache, eviction, volatile)

    def create_masked_load(
        self,
        p: Value,
        mask: Value | None,
        other: Value | None,
        cache: object = None,
        eviction: object = None,
        volatile: bool = False,
    ) -> Value:
        elem = p.elem[1:]
        stored = np.int64 if is_pointer(elem) else STORED[elem]
        addresses = np.asarray(p.data, np.int64)
        found = self._find(addresses, self._held(p, mask), np.dtype(stored).itemsize, "load")
        self._record(found, False, "volatile load" if volatile else "load", "atomic" if volatile else "generic")
        if self.machine.checks.costs:
            self._count("global load", found, addresses, p.layout)
        if self.machine.checks.threads:
            for part in found:
                threads = threads_of(self.layouts, addresses.shape, p.layout) if addresses.ndim else np.array([-1])
                check_read_back(self.machine, part.memory, part.active, threads[part.live.reshape(-1)], "load")
        fill = to_bits(other.data, elem) if isinstance(other, Value) else 0
        if (held := self.held(addresses.shape, p.layout)) is not None:  # NaN where another CTA has the element
            fill = np.where(held, fill, to_bits(self.foreign(elem), elem) if not is_pointer(elem) else 0)
        bits = self._fetch(found, addresses.shape, stored, fill)
        if volatile:
            self.machine.poll(("load", int(addresses.reshape(-1)[0]), bits.tobytes()))
            self._synchronise(found, "relaxed", reads=True, writes=False)
            bits = self._fetch(found, addresses.shape, stored, fill)
        if is_pointer(elem):
            adopt(self.machine, bits)
        data = bits if is_pointer(elem) else from_bits(bits, elem)
        return Value(data if data.ndim else data[()], elem, p.layout)

    def create_store(self, p: Value, value: Value, *_: object) -> None:
        self.create_masked_store(p, value, None)

    def create_masked_store(self, p: Value, value: Value, mask: Value | None, *_: object) -> None:
        elem = p.elem[1:]
        found = self._find(np.asarray(p.data, np.int64), self._held(p, mask, leads=True), BYTES[elem], "store")
        bits = np.broadcast_to(to_bits(value.data, elem), np.shape(p.data))
        self._record(found, True, "store", bits=bits)
        if self.machine.checks.costs:
            self._count("global store", found, np.asarray(p.data, np.int64), p.layout)
        self._among_threads(found, bits, p.layout)
        self._put(found, bits, STORED[elem])

    def _among_threads(self, parts: list[Found], bits: np.ndarray, layout: object) -> None:
        """Elements of one store that meet, and who has stored what."""
        machine = self.machine
        for found in parts if bits.ndim else ():
            offsets = found.active
            if machine.checks.happens_before and (at := clashing(offsets, bits[found.live])) is not None:
                place = machine.place()
                machine.report(
                    "race",
                    f"on {found.memory.name}: store by {machine.current.name} of CTA {machine.current.cta.index} at "
                    f"{place_text(place)} puts different values of one tensor into one place, byte {at}: any may win",
                    place,
                    (found.memory.name, "elements", place),
                )
        for found in parts if machine.checks.threads else ():
            threads = threads_of(self.layouts, bits.shape, layout)[found.live.reshape(-1)]
            machine.current.stored.add(found.memory, found.active, threads, machine.place())

    # ---- atomics

    def create_atomic_rmw(
        self, op: Operator, p: Value, value: Value, mask: Value | None, sem: Operator, scope: Operator
    ) -> Value:
        elem, addresses = p.elem[1:], np.asarray(p.data, np.int64)
        found = self._find(addresses, self._held(p, mask, leads=True), BYTES[elem], "atomic")
        old = self._atomic(found, addresses, elem, op.name, value.data, _order(sem, scope))
        return self._told(Value(old if old.ndim else old[()], elem, p.layout))

    def create_atomic_cas(self, p: Value, expected: Value, value: Value, sem: Operator, scope: Operator) -> Value:
        elem, addresses = p.elem[1:], np.asarray(p.data, np.int64)
        found = self._find(addresses, self._held(p, None, leads=True), BYTES[elem], "atomic")
        old = self._atomic(found, addresses, elem, "CAS", value.data, _order(sem, scope), expected.data)
        return self._told(Value(old if old.ndim else old[()], elem, p.layout))

    def _held(self, p: Value, mask: Value | None, leads: bool = False) -> np.ndarray | None:
        """The mask of an access, without the elements that other CTAs of the program access."""
        given = None if mask is None else np.asarray(mask.data, bool)
        held = self.held(np.shape(p.data), p.layout, leads)
        return given if held is None else held if given is None else held & given

    def _told(self, old: Value) -> Value:
        """The result of an atomic: CTAs with the same elements get it from the first, which alone executes it."""
        return old if self.ctas == 1 else self.from_first(old)

    def _atomic(
        self,
        parts: list[Found],
        addresses: np.ndarray,
        elem: str,
        op: str,
        operand: object,
        order: str,
        expected: Any = 0,
    ) -> np.ndarray:
        """One read-modify-write per element, in element order. Returns the old values. CAS compares with `expected`."""
        stored, operand = STORED[elem], np.broadcast_to(np.asarray(operand), addresses.shape)
        expected = np.broadcast_to(to_bits(expected, elem), addresses.shape)
        scope = order.partition(".")[2]
        what = f"atomic of scope {scope}" if scope else "atomic"
        self._record(parts, True, what, "atomic", sums(op, elem), order=order)
        for found in parts if self.machine.checks.costs else ():
            self.machine.costs.add("global atomic", self.machine.place(), int(found.live.sum()) * found.size)
        if not addresses.ndim:  # the compiler broadcasts the old value to all threads, behind a barrier
            self.machine.threads_meet()
        apply = _ATOMIC["XCHG" if op == "CAS" else op]
        self.machine.preempt()
        old = self._fetch(parts, addresses.shape, stored, 0)
        changed = False
        everywhere = [(part, tuple(index)) for part in parts for index in np.argwhere(part.live).tolist()]
        for found, position in everywhere:
            only = [Found(found.memory, found.offsets[position].reshape(1), np.ones(1, bool), found.size)]
            before = self._fetch(only, (1,), stored, 0)
            old[position] = before[0]
            left, right = from_bits(before, elem), np.asarray(operand[position], COMPUTED[elem])
            if op in _UNSIGNED:
                left, right = unsigned(left), unsigned(right)
            after = to_bits(np.asarray(apply(left, right)).astype(COMPUTED[elem]), elem)
            if np.any(after != before) and (op != "CAS" or before[0] == expected[position]):
                changed = True
                self._put(only, after, stored)
        self._synchronise(parts, order, reads=True, writes=True)
        if not changed and everywhere:
            self.machine.poll(("atomic", int(addresses.reshape(-1)[0]), old.tobytes()))
        return from_bits(old, elem)

    # ---- global memory operations of inline PTX (called by strobe.sim.ptx)

    def load(self, address: np.ndarray, dtype: DTypeLike, mask: np.ndarray | None, order: str) -> np.ndarray:
        address = np.asarray(address).astype(np.int64)
        found = self._find(address, mask, np.dtype(dtype).itemsize, "load")
        self._record(found, False, f"{order} load", "generic" if order == "weak" else "atomic", order=order)
        if order != "weak":
            seen = self._fetch(found, address.shape, dtype, 0)
            self.machine.poll(("load", int(address.reshape(-1)[0]), seen.tobytes()))
            self._synchronise(found, order, reads=True, writes=False)
        return self._fetch(found, address.shape, dtype, 0)

    def store(self, address: np.ndarray, value: np.ndarray, mask: np.ndarray | None, order: str) -> None:
        found = self._find(np.asarray(address).astype(np.int64), mask, value.dtype.itemsize, "store")
        self._record(found, True, f"{order} store", "generic" if order == "weak" else "atomic", order=order)
        if order != "weak":
            self._synchronise(found, order, reads=False, writes=True)
        self._put(found, value, value.dtype)

    def atomic(
        self,
        operation: str,
        address: np.ndarray,
        operands: list[np.ndarray],
        mask: np.ndarray | None,
        order: str,
        returns: bool,
    ) -> np.ndarray | None:
        address = np.asarray(address).astype(np.int64)
        dtype = operands[-1].dtype
        # NumPy has no bfloat16: V holds its bits
        elem = {"f": "fp", "V": "bf", "i": "i", "u": "i"}[dtype.kind] + str(dtype.itemsize * 8)
        found = self._find(address, mask, dtype.itemsize, "atomic")
        name = {"exch": "XCHG"}.get(operation, operation.upper())
        name = "U" + name if dtype.kind == "u" and name in ("MAX", "MIN") else name
        expected, values = (from_bits(data.view(STORED[elem]), elem) for data in (operands[0], operands[-1]))
        if name == "ADD" and not returns and order.startswith("relaxed") and dtype.kind != "V":
            return self._bulk_add(found, values, elem, order)
        old = self._atomic(found, address, elem, name, values, order, expected)
        return to_bits(old, elem).view(dtype) if returns else None

    def _bulk_add(self, parts: list[Found], values: np.ndarray, elem: str, order: str) -> None:
        """red.add on many elements at once."""
        self._record(parts, True, "red.add", "atomic", sums("ADD", elem), order=order)
        self.machine.preempt()
        for found in parts:
            added = np.broadcast_to(values, found.offsets.shape)[found.live]
            np.add.at(found.view(values.dtype), found.active // found.size, added)
            self.machine.progress += 1
        self._synchronise(parts, order, reads=True, writes=True)

    # ---- descriptors (tl.make_tensor_descriptor, and the host's TensorDescriptor in a plain Triton kernel)

    def create_tensor_descriptor_type(self, block: Type, signed: bool) -> Type:
        return block

    def create_make_tensor_descriptor(self, *arguments: Any) -> Descriptor:
        if isinstance(arguments[0], Type):  # Gluon: (type, base, shape, strides, padding)
            ty, base, shape, strides, padding = arguments
            block, signed = ty.shape, ty.layout[1]
        else:
            base, shape, strides, block, signed, padding = arguments
        made = self.descriptor(
            int(base.data),
            [s.scalar for s in shape],
            [s.scalar for s in strides],
            list(block),
            base.elem[1:],
            str(padding).endswith("PAD_NAN"),
        )
        made.signed = signed
        return made

    def descriptor(
        self, address: int, shape: list[int], strides: list[int], block: list[int], elem: str, nan: bool
    ) -> Descriptor:
        """A descriptor of the tensor at an address. One that exceeds its storage is reported and clipped."""
        size = BYTES[elem]
        memory = next((m for m in self.machine.storages if m.base <= address < m.end), None) or self._nearest(address)
        if wraps(strides, size):
            return Descriptor(
                memory, WrappedView(self.machine, memory, address, shape, strides, elem), block, elem, nan
            )
        offset = address - memory.base
        reach = (
            offset + (sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1) * size
            if all(n > 0 for n in shape)
            else offset
        )
        if reach > len(memory.raw) or offset < 0:
            self.machine.report(
                "bounds",
                f"a tensor descriptor of shape {shape}, strides {strides} reaches {reach - len(memory.raw)} bytes "
                f"past the end of {memory.name}, at {place_text(self.machine.place())}",
            )
            shape = [0] * len(shape)
        if address % 16 or any(s * size % 16 for s in strides[:-1]):
            self.machine.report(
                "bounds",
                f"a tensor descriptor at address {address % 16} modulo 16, strides {strides} of {size} bytes: "
                f"TMA needs multiples of 16 bytes, at {place_text(self.machine.place())}",
            )
        whole = memory.raw[offset:][: (len(memory.raw) - offset) // size * size].view(STORED[elem])
        view = np.lib.stride_tricks.as_strided(whole, tuple(shape), tuple(s * size for s in strides))
        return Descriptor(memory, view, block, elem, nan)

    def check_corner(self, desc: Descriptor, corner: list[int], write: bool) -> None:
        """Report a block start that is not a multiple of 16 bytes in its row, or a store that starts before the tensor.
        An H200 stops with an illegal instruction.
        """
        why = None
        if corner[-1] * BYTES[desc.elem] % 16:
            why = f"{corner[-1]} elements of {BYTES[desc.elem]} bytes is not a multiple of 16 bytes"
        elif write and min(corner) < 0:
            why = "a store may not start before the tensor"
        if why:
            self.machine.report(
                "bounds",
                (
                    f"a TMA copy of the block at {corner} of {desc.memory.name}: {why}, at "
                    f"{place_text(self.machine.place())}"
                ),
            )

    def _block_access(
        self, desc: Descriptor, corner: list[Value], write: bool, what: str, reduces: Operator | None = None
    ) -> tuple[list[int], Part, Part]:
        at = [c.scalar for c in corner]
        self.check_corner(desc, at, write)
        source, target = desc.inside(at, desc.block)
        p = self.machine.current
        mask = desc.memory.mask_of(desc.view[source])
        proxy, adds = "atomic" if reduces else "generic", bool(reduces) and sums(reduces.name, desc.elem)
        if self.machine.checks.costs:
            self.machine.costs.add("TMA store" if write else "TMA load", self.machine.place(), desc.view[source].nbytes)
        self.machine.access(
            desc.memory, mask, write, Actor(p.agent, p.clock, p.vector_clock, proxy, what, self.machine.place(), adds)
        )
        return at, source, target

    def create_descriptor_load(self, desc: Descriptor, corner: list[Value], *_: object) -> Value:
        at, _, _ = self._block_access(desc, corner, False, "descriptor load")
        return Value(from_bits(desc.fetch(at, desc.block), desc.elem), desc.elem)

    def create_descriptor_gather(self, desc: Descriptor, rows: Value, column: Value, ty: Type) -> Value:
        """One block of a single row for each of `rows`, all from `column` on."""
        corners = [[Value(np.int32(row), "i32"), column] for row in np.asarray(rows.data).tolist()]
        found = [self.create_descriptor_load(desc, corner) for corner in corners]
        return Value(np.concatenate([one.data for one in found]), desc.elem, ty.layout)

    def create_descriptor_scatter(self, desc: Descriptor, value: Value, rows: Value, column: Value) -> None:
        for row, part in zip(np.asarray(rows.data).tolist(), np.asarray(value.data), strict=True):
            self.create_descriptor_store(desc, Value(part[None], value.elem), [Value(np.int32(row), "i32"), column])

    def create_descriptor_store(self, desc: Descriptor, value: Value, corner: list[Value]) -> None:
        _, source, target = self._block_access(desc, corner, True, "descriptor store")
        desc.view[source] = to_bits(value.data, desc.elem).reshape(desc.block)[target]
        self.machine.progress += 1

    def create_descriptor_reduce(self, kind: Operator, desc: Descriptor, value: Value, corner: list[Value]) -> None:
        _, source, target = self._block_access(desc, corner, True, "descriptor reduce", kind)
        reduce_into(desc, source, np.asarray(value.data).reshape(desc.block)[target], kind)
        self.machine.progress += 1


def _repeats(found: Found, bits: np.ndarray, granules: Granules) -> bool:
    """Whether a store's elements in these granules are in memory already."""
    memory, offsets = found.memory, found.active
    if np.any(offsets % found.size):
        return False
    spans = ((first // memory.granule, (first + found.size - 1) // memory.granule) for first in offsets.tolist())
    shared = lambda n: granules.get(n // memory.page, 0) >> n % memory.page & 1
    chosen = np.array([any(map(shared, range(first, last + 1))) for first, last in spans], bool)
    kind = np.dtype(f"u{found.size}")
    written = np.ascontiguousarray(bits[found.live]).view(kind)
    return bool(np.array_equal(found.view(kind)[offsets[chosen] // found.size], written[chosen]))


def _order(semantics: Operator, scope: Operator) -> str:
    """A memory order, with its scope if that is less than the GPU."""
    return _ORDERS[semantics.name] + (".cta" if scope.name == "CTA" else "")


def sums(operation: str, elem: str) -> bool:
    """Whether an atomic operation adds floating-point numbers: the order of the adds changes the last bits."""
    return operation in ("ADD", "FADD") and elem[0] != "i"


def reduce_into(desc: Descriptor, where: Part, values: np.ndarray, kind: Operator) -> None:
    """tensor op= values in global memory, in the tensor's own precision."""
    before = from_bits(np.ascontiguousarray(desc.view[where]), desc.elem)
    if not desc.signed:
        before, values = unsigned(before), unsigned(values)
    desc.view[where] = to_bits(np.asarray(_ATOMIC[kind.name](before, values)), desc.elem)


def _unaligned(raw: np.ndarray, offsets: np.ndarray, size: int) -> np.ndarray:
    return np.ascontiguousarray(raw[offsets[:, None] + np.arange(size)]).reshape(-1)
