"""Tensor cores: wgmma, mma, tcgen05 with tensor memory, tl.dot. NumPy's matmul accumulates in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .agents import Barrier, Operation, Partition, Stream
from .arithmetic import SM_GHZ
from .layouts import Layouts
from .machine import Machine
from .memory import Actor, merge
from .report import Place, place_text
from .scaled import in_format
from .scaled import operand as scaled_operand
from .shared import Where
from .shares import Part, Share, of_memory, peers
from .values import COMPUTED, Pending, Type, Value, Window, from_bits, matrix, rounded, to_bits

FLOP_PER_CYCLE = 4096.0  # dense 16-bit FLOP of one Hopper SM; Blackwell and 8-bit types each double it
TENSOR_MEMORY_COLUMN_BYTES = 512  # 128 lanes of 32 bits


def product(a: np.ndarray, b: np.ndarray, elem: str, precision: str = "TF32") -> np.ndarray:
    """a @ b for tiles of `elem`, accumulated in float32 (or float64, int64). `precision` is that of float32 operands,
    by Triton's name.
    """
    exact = elem[0] == "i" and elem != "i64"  # float64 holds these sums, and NumPy multiplies floats much faster
    wanted = np.float64 if elem == "fp64" or exact else np.int64 if elem[0] == "i" else np.float32
    a, b = (np.ascontiguousarray(x, wanted) for x in (a, b))
    if elem == "fp32" and precision in SPLITS:
        return _split_product(a, b, precision)
    if elem == "fp32" and precision == "TF32":
        a, b = _as_tf32(a), _as_tf32(b)
    result = np.matmul(a, b)
    return result.astype(np.int64) if exact else result


# a product of float32 as products of parts of fewer bits: how a part is rounded, how many there are, and which parts of
# the operands are multiplied, from the smallest product to the largest (Triton's F32DotTC.cpp)
SPLITS = {
    "TF32x3": ("tf32", 2, ((1, 0), (0, 1), (0, 0))),
    "BF16x3": ("bf16", 2, ((1, 0), (0, 1), (0, 0))),
    "BF16x6": ("bf16", 3, ((1, 1), (2, 0), (0, 2), (1, 0), (0, 1), (0, 0))),
}


def _as_tf32(x: np.ndarray) -> np.ndarray:
    """The tensor core reads the upper 19 bits."""
    return (x.view(np.int32) & -0x2000).view(np.float32)


def _parts(x: np.ndarray, kind: str, count: int) -> list[np.ndarray]:
    """Numbers of few bits that sum to about x, the largest first."""
    if kind == "tf32":  # cvt.rna.tf32 rounds to nearest, ties away from zero; the tensor core truncates the rest
        first = np.where(np.isfinite(x), _as_tf32((x.view(np.int32) + 0x1000).view(np.float32)), x)
        return [first, _as_tf32(x - first)]
    found = []
    for _ in range(count):
        found.append(rounded(x, kind))
        x = x - found[-1]
    return found


def _split_product(a: np.ndarray, b: np.ndarray, precision: str) -> np.ndarray:
    kind, count, pairs = SPLITS[precision]
    left, right = _parts(a, kind, count), _parts(b, kind, count)
    small = sum(np.matmul(left[i], right[j]) for i, j in pairs[:-1])
    return np.matmul(left[0], right[0]) + np.where(np.isnan(small), np.float32(0), small)


class Scales(NamedTuple):
    """The scales of a block-scaled product, in tensor memory, and the formats of its operands."""

    a: Where
    b: Where
    a_form: object
    b_form: object


class TensorCores:
    machine: Machine
    capability: int
    window: Callable[[Where], Window]
    create_memdesc_subslice: Callable[..., Where]
    _allocate: Callable[..., Window]
    _barrier: Callable[[Where], Barrier]
    _read: Callable[..., Value]
    _write: Callable[..., None]
    ctas: int
    two_ctas: bool
    rank: int
    own: Callable[[Window], Window]
    own_of_cta: Callable[[Window, int, str], Window | None]
    barrier_of: Callable[[Window, int, str], Barrier | None]
    share: Callable[[Window], Share]
    foreign: Callable[[str], Any]
    part_of_tensor: Callable[[Value], Part]
    layouts: Layouts

    def _product_ns(self, shape: tuple[int, int, int], elem: str) -> float:
        """Modelled nanoseconds of an m x n x k product."""
        rate = FLOP_PER_CYCLE * (2 if self.capability >= 100 else 1) * (2 if "8" in elem[:4] and elem != "bf16" else 1)
        return 2.0 * shape[0] * shape[1] * shape[2] / rate / SM_GHZ

    def _operand(
        self, operand: Value | Where, agent: str, number: int, vector_clock: dict[str, int], what: str, place: Place
    ) -> Callable[[], Any]:
        """Record the read now. The returned function fetches the operand when the product lands."""
        if isinstance(operand, Value):
            data = operand.data
            return lambda: data
        return self._read_operand(self.own(self.window(operand)), agent, number, vector_clock, what, place)

    def _read_operand(
        self, window: Window, agent: str, number: int, vector_clock: dict[str, int], what: str, place: Place
    ) -> Callable[[], Any]:
        proxy = "async" if window.memory.space == "shared" else "tensor"
        actor = Actor(agent, number, vector_clock, proxy, f"{what} of {window.label}", place)
        self.machine.access(window.memory, window.mask, False, actor)
        return lambda: matrix(window.bits(), window.elem)

    # ---- wgmma (Hopper)

    def create_warpgroup_mma(
        self, a: Any, b: Where, acc: Value, use_acc: Value, precision: object, imprecise: int, is_async: bool
    ) -> Value:
        machine, p = self.machine, self.machine.current
        a = a if isinstance(a, Value) else self.window(a)
        stream = p.wgmma
        stream.issued += 1
        agent, number = stream.agent, stream.issued
        place = machine.place()
        left = self._operand(a, agent, number, p.vector_clock, "wgmma read", place)
        right = self._operand(b, agent, number, p.vector_clock, "wgmma read", place)
        if acc.pending and acc.pending.agent != agent:
            acc.pending.report_use()
        p.tick()
        shape = (*np.shape(acc.raw()), np.shape(a.raw())[-1] if isinstance(a, Value) else a.view.shape[-1])
        out = Value(
            np.full(shape[:2], np.nan, np.float32), acc.elem, acc.layout, Pending(machine, agent, number, place)
        )
        accumulate, elem = bool(use_acc.data), a.elem
        part = self.part_of_tensor(acc) if self.ctas > 1 else None
        rows = part[0] if part is not None and isinstance(a, Value) else slice(None)

        def land() -> None:
            result = product(left()[rows], right(), elem)
            result = result + (acc.raw() if part is None else acc.raw()[part]) if accumulate else result
            self._check_wrap(result, acc.elem, place)
            if part is not None:
                whole = np.full(shape[:2], self.foreign(acc.elem))
                whole[part] = result
                result = whole
            out.set_data(result.astype(COMPUTED[acc.elem], copy=False))

        self._issue(stream, "wgmma", shape, elem, land, place)
        if not is_async:
            return self.create_warpgroup_mma_wait([out], 0)[0]
        return out

    def _issue(
        self, stream: Stream, name: str, shape: tuple[int, int, int], elem: str, land: Callable[[], None], place: Place
    ) -> None:
        machine, p = self.machine, self.machine.current
        if machine.mode == "timed":
            machine.preempt()
        start, ready = machine.occupy("tensor core", p.time_ns, self._product_ns(shape, elem))
        text = f"{name} {shape[0]}x{shape[1]}x{shape[2]}"
        if machine.mode == "timed":
            machine.event("tensor core", "mma", f"{text} of {p.name}", start, ready)
        machine.launch(stream, Operation(stream.agent, text, place, land, ready))

    def create_warpgroup_mma_wait(self, deps: list[Value], pending: int) -> list[Value]:
        p = self.machine.current
        self.machine.drain(p.wgmma, pending, "wgmma wait")
        return [self._released(value, p) for value in deps]

    @staticmethod
    def _released(value: Value, p: Partition) -> Value:
        """A value returned by a wait: usable if the wait covers the product that computes it."""
        if value.pending is None or p.vector_clock.get(value.pending.agent, 0) < value.pending.number:
            return value
        return Value(value.raw(), value.elem, value.layout)

    def _check_wrap(self, result: np.ndarray, elem: str, place: Place) -> None:
        """Report a product of integers that its accumulator does not hold (`overflow`)."""
        if self.machine.checks.overflow and elem == "i32" and np.any(result != result.astype(np.int32)):
            text = f"int32 overflow detected for operation dot, at {place_text(place)}"
            self.machine.report("assert", text, place, ("dot", place))

    # ---- mma.sync and tl.dot

    def create_dot(self, a: Value, b: Value, c: Value, precision: object, imprecise: int) -> Value:
        self.machine.threads_meet()
        result = product(a.data, b.data, a.elem, getattr(precision, "name", "TF32")) + c.data
        self._check_wrap(result, c.elem, self.machine.place())
        self.machine.spend(self._product_ns((*np.shape(c.data)[-2:], np.shape(a.data)[-1]), a.elem))
        return Value(np.asarray(rounded(result, c.elem)).astype(COMPUTED[c.elem], copy=False), c.elem, c.layout)

    # ---- tensor memory and tcgen05 (Blackwell)

    def create_tmem_alloc(self, ty: Type, value: Value | None = None) -> Window:
        shape = list(ty.shape)
        if self.ctas > 1:
            shape = [one.stop - one.start for one in of_memory(self.layouts, shape, ty.layout[0]).part(0)]
            name, arguments = self.layouts.attributes.arguments_of(ty.layout[0])
            self.two_ctas = self.two_ctas or (name == "get_tensor_memory_layout" and bool(arguments[3]))
        size = int(np.prod(shape[:-2], initial=1)) * -(-shape[-2] // 128) * shape[-1] * _column_bits(ty.elem) // 32
        return self._allocate("tensor", ty, value, max(32, 1 << (size - 1).bit_length()))

    def create_tmem_store(self, window: Where, value: Value, pred: Value) -> None:
        if bool(pred.data):
            self._write(window, value)

    def create_tmem_load(self, ty: Type, window: Where, *reduction: object) -> Value:
        if reduction:
            raise NotImplementedError(self._unknown("tmem_load with a reduction"))
        return self._read(ty, window)

    def create_tmem_subslice(self, ty: Type, window: Where, start: int, dim: int = -1) -> Where:
        offsets = [0] * len(ty.shape)
        offsets[dim] = start
        return self.create_memdesc_subslice(ty, window, offsets)

    def create_tcgen05_mma(
        self,
        a: Any,
        b: Where,
        d: Where,
        use_acc: Value,
        pred: Value,
        bars: list[Where],
        bar_preds: list[Value],
        two_ctas: bool = False,
        *multicast: bool,
    ) -> None:
        if self.two_ctas and self.rank & 1:
            return  # the first CTA of a pair issues
        if bool(pred.data):
            self._tcgen05(a, b, self.window(d), bool(use_acc.data))
        descs = [one for one in (a, b) if True in multicast and self.window(one).memory.space == "shared"]
        for bar, wanted in zip(bars, bar_preds, strict=True):
            if bool(wanted.data):
                self.create_tcgen05_commit(bar, None, descs)

    def create_tcgen05_mma_scaled(self, a: Any, b: Where, d: Where, a_scale: Where, b_scale: Where, *rest: Any) -> None:
        if self.two_ctas and self.rank & 1:
            return  # the first CTA of a pair issues
        a_form, b_form, use_acc, pred, bars, bar_preds, *later = rest  # Triton 3.8: two_ctas and multicast
        if bool(pred.data):
            self._tcgen05(a, b, self.window(d), bool(use_acc.data), Scales(a_scale, b_scale, a_form, b_form))
        multicast = later[1:] == [True]
        descs = [one for one in (a, b, a_scale, b_scale) if multicast and self.window(one).memory.space == "shared"]
        for bar, wanted in zip(bars, bar_preds, strict=True):
            if bool(wanted.data):
                self.create_tcgen05_commit(bar, None, descs)

    def _unknown(self, what: str) -> str:
        return f"the simulator does not know {what}, at {place_text(self.machine.place())}"

    def _scaled(
        self, operand: Any, scale: Where, form: object, is_right: bool, reader: tuple[Any, ...]
    ) -> list[Callable[[], Any]]:
        """The operand of a block-scaled product for each CTA that it works for, as float32 and multiplied by its scales
        when the product lands. In a pair each CTA has rows of A with their scales, half of B and all of B's scales.
        """
        fetches, factors = self._of_members(operand, reader), self._of_members(scale, reader)
        elem, scale_elem = self.window(operand).elem, self.window(scale).elem

        def read(member: int) -> Any:
            parts = [np.asarray(fetch()) for fetch in (fetches if is_right else fetches[member : member + 1])]
            value = in_format(np.concatenate(parts, axis=-1), elem, form)
            return scaled_operand(
                value, Value(np.asarray(factors[member]()), scale_elem), -2 if is_right else -1, is_right
            )

        return [partial(read, member) for member in range(len(factors))]

    def _tcgen05(self, a: Any, b: Any, d: Window, accumulate: bool, scales: Scales | None = None) -> None:
        machine, p = self.machine, self.machine.current
        stream = p.tcgen05
        stream.issued += 1
        agent, number = stream.agent, stream.issued
        vector_clock = {**p.vector_clock, agent: number - 1}  # products of one issuer execute in order
        place = machine.place()
        reader = agent, number, vector_clock, "tcgen05 read", place
        if scales is None:
            left, right = self._of_members(a, reader), self._of_members(b, reader)
        else:
            left = self._scaled(a, scales.a, scales.a_form, False, reader)
            right = self._scaled(b, scales.b, scales.b_form, True, reader)
        into = self._members(d, "tcgen05.mma")
        vector_clock = {**vector_clock, agent: number}
        for one in into:
            what, mask = f"tcgen05.mma into {one.label}", one.memory.mask_of(one.view)
            if accumulate:
                machine.access(one.memory, mask, False, Actor(agent, number, vector_clock, "tensor", what, place))
            machine.access(one.memory, mask, True, Actor(agent, number, vector_clock, "tensor", what, place))
        p.tick()
        elem = self.window(a).elem if scales is None else "fp32"

        def land() -> None:
            # in a pair each CTA has rows of A and of the result, and half of B's columns
            columns = [fetch() for fetch in right]
            if scales is None:
                columns = [np.concatenate(columns, axis=-1)] * len(into)
            for fetch, side, one in zip(left, columns, into, strict=True):
                result = product(fetch(), side, elem, "IEEE" if scales is not None else "TF32")
                one.view[...] = to_bits(result + from_bits(one.view, one.elem) if accumulate else result, one.elem)
            merge(stream.vector_clock, vector_clock)

        self._issue(stream, "tcgen05", (*into[0].view.shape[-2:], self.window(a).view.shape[-1]), elem, land, place)

    def _members(self, window: Window, what: str) -> list[Window]:
        """A buffer's parts in the CTAs that a tcgen05 instruction works for: the running one, or its pair."""
        ranks = peers(self.rank, int(self.two_ctas), self.ctas) if self.ctas > 1 else []
        found = [self.own_of_cta(window, rank, what) for rank in ranks] if ranks else [window]
        return [part for part in found if part is not None]

    def _of_members(self, operand: Any, reader: tuple[Any, ...]) -> list[Callable[[], Any]]:
        agent, number, vector_clock, what, place = reader
        return [
            self._read_operand(part, agent, number, vector_clock, what, place)
            for part in self._members(self.window(operand), what)
        ]

    def create_tcgen05_commit(self, bar: Where, pred: object = None, descs: Sequence[Where] = ()) -> None:
        """tcgen05.commit: arrives on the barrier once all earlier tcgen05 work of this partition is complete.

        In a pair the first CTA commits, and the barriers of both get the arrival. `descs` name operands that several
        CTAs hold: all of these get it.
        """
        if (isinstance(pred, Value) and not bool(pred.data)) or (self.two_ctas and self.rank & 1):
            return
        machine, p, bar = self.machine, self.machine.current, self.window(bar)
        ranks = self._commit_ranks([self.window(desc) for desc in descs])
        barriers = [found for rank in ranks if (found := self.barrier_of(bar, rank, "tcgen05.commit"))]
        stream, place = p.tcgen05, machine.place()
        ready = max([p.time_ns, *(operation.ready_ns for operation in stream.queue)])
        stream.issued += 1
        agent, number, vector_clock = stream.agent, stream.issued, dict(p.vector_clock)
        p.tick()

        def land() -> None:
            merge(stream.vector_clock, {**vector_clock, agent: number})
            for barrier in barriers:
                machine.arrive(barrier, 1, stream.vector_clock, f"tcgen05.commit of {p.name}", place, time_ns=ready)

        machine.launch(stream, Operation(agent, f"tcgen05.commit to {bar.label}", place, land, ready))

    def _commit_ranks(self, descs: list[Window]) -> list[int]:
        pair = int(self.two_ctas)
        bits = [self.share(desc).free | pair for desc in descs] if descs and self.ctas > 1 else [pair]
        return sorted({rank for some in bits for rank in peers(self.rank, some, self.ctas)}) or [self.rank]

    def create_tmem_copy(self, source: Where, target: Where) -> None:
        """tcgen05.cp: shared memory to tensor memory, in order with this partition's products."""
        if self.two_ctas and self.rank & 1:
            return
        machine, p = self.machine, self.machine.current
        stream, source, target = p.tcgen05, self.window(source), self.window(target)
        stream.issued += 1
        agent, number = stream.agent, stream.issued
        vector_clock = {**p.vector_clock, agent: number - 1}
        place = machine.place()
        fetches = self._of_members(source, (agent, number, vector_clock, "tcgen05.cp read", place))
        into = self._members(target, "tcgen05.cp")
        for one in into:
            actor = Actor(agent, number, vector_clock, "tensor", f"tcgen05.cp into {one.label}", place)
            machine.access(one.memory, one.memory.mask_of(one.view), True, actor)
        p.tick()

        def land() -> None:
            for fetch, one in zip(fetches, into, strict=True):
                one.view[...] = to_bits(fetch(), one.elem).reshape(one.view.shape)
            merge(stream.vector_clock, {**vector_clock, agent: number})

        machine.launch(stream, Operation(agent, "tcgen05.cp", machine.place(), land, p.time_ns))


def _column_bits(elem: str) -> int:
    return (
        np.dtype(COMPUTED[elem]).itemsize * 8 if elem not in ("bf16", "fp8e4nv", "fp8e5") else {"bf16": 16}.get(elem, 8)
    )
