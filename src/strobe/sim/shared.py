"""Shared memory: allocations and views, mbarriers, TMA copies, cp.async, proxy fences, named barriers."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from triton import language as tl

from . import shares
from .agents import Barrier, Cta, Operation
from .ctas import Ctas
from .im2col import Im2Col, Source, elements
from .layouts import Layouts
from .machine import Machine
from .memory import Actor
from .pointers import Found, Operator, Part, reduce_into, sums
from .report import place_text
from .values import BYTES, STORED, Descriptor, Pieces, Reordered, Type, Value, Window, from_bits, to_bits

TMA_LATENCY_NS = 300.0  # issue to arrival, for an L2 hit
TMA_BYTES_PER_NS = 64.0  # one SM's share of L2 bandwidth
SYNC_NS = 10.0
_OF_TRITON = "/triton/experimental/"


class OutOfRange:
    """A pipeline slot that does not exist. It is a fault only when used: arrive(..., pred=False) on it is common."""

    def __init__(self, text: str, machine: Machine, instead: Window):
        self.text, self.machine, self.instead = text, machine, instead

    def use(self) -> Window:
        self.machine.report("bounds", self.text)
        return self.instead

    def set_loc(self, *_: object) -> None: ...
    def get_loc(self) -> None: ...


Where = Window | OutOfRange


def _of_window(view: Callable[..., Where]) -> Callable[..., Where]:
    """A view of a buffer. The view of a slot that does not exist is a fault only when used, too."""

    @functools.wraps(view)
    def make(self: SharedMemory, *arguments: Any) -> Where:
        lost = next((one for one in arguments if isinstance(one, OutOfRange)), None)
        if lost is None:
            return view(self, *arguments)
        made = view(self, *(lost.instead if one is lost else one for one in arguments))
        return OutOfRange(lost.text, lost.machine, made.instead if isinstance(made, OutOfRange) else made)

    return make


class SharedMemory(Ctas):
    machine: Machine
    layouts: Layouts
    _find: Callable[..., list[Found]]
    _fetch: Callable[..., np.ndarray]
    _record: Callable[..., None]
    _count: Callable[..., None]
    check_corner: Callable[..., None]

    # ---- allocations and views

    def _allocate(self, space: str, ty: Type, value: Value | None, charge: int) -> Window:
        memory = self.machine.allocate(space, int(np.prod(ty.shape)) * BYTES[ty.elem], charge)
        window = Window(memory, _arranged(memory.raw.view(STORED[ty.elem]), ty.shape, space), ty.elem, ty)
        if value is not None:
            self._write(window, value, "initial store")
        return window

    def create_local_alloc(self, ty: Type, value: Value | None = None) -> Window:
        size = int(np.prod(ty.shape)) * BYTES[ty.elem]
        parts = 1 if self.ctas == 1 else shares.of_memory(self.layouts, ty.shape, ty.layout[0]).size
        return self._allocate("shared", ty, value, size // parts)

    def create_local_dealloc(self, window: Window) -> None:
        p = self.machine.current
        p.cta.budget.free([window.memory])
        p.allocations.free(window.memory)

    def _write(self, window: Where, value: Value, what: str = "") -> None:
        window = self.window(window)
        self.machine.threads_meet()
        bits = to_bits(value.data, window.elem)
        if self.machine.checks.costs:
            self._count_shared("store", window, value.layout)
        own = window
        if self.ctas > 1:
            bits, own = self._own_bits(value, bits, window)
        self.machine.touch(own.memory, own.mask, True, what or f"store to {window.label}")
        own.view[...] = bits
        self.machine.preempt()

    def _read(self, ty: Type, window: Where) -> Value:
        window = self.window(window)
        self.machine.threads_meet()
        if self.machine.checks.costs:
            self._count_shared("load", window, ty.layout)
        if self.ctas > 1:
            return self._read_parts(ty, window)
        self.machine.touch(window.memory, window.mask, False, f"load of {window.label}")
        data = from_bits(window.bits(), window.elem)
        self.machine.preempt()
        return Value(data, window.elem, ty.layout)

    def _count_shared(self, verb: str, window: Window, layout: object) -> None:
        """Count the bytes and bank conflicts of an access (`Checks(costs=True)`)."""
        machine, conflicts = self.machine, 0
        if window.memory.space == "shared" and layout is not None:
            conflicts = self.layouts.bank_conflicts(window.type, layout, 8 * window.view.dtype.itemsize)
        kind = {"shared": "shared", "tensor": "tensor memory"}[window.memory.space]
        machine.costs.add(f"{kind} {verb}", machine.place(), window.view.nbytes, conflicts=conflicts)

    create_local_store = _write
    create_local_load = _read

    @staticmethod
    def window(window: Where) -> Window:
        return window.use() if isinstance(window, OutOfRange) else window

    @_of_window
    def create_memdesc_index(self, ty: Type, window: Window, index: Value) -> Where:
        slot, slots = index.scalar, window.view.shape[0]
        if not 0 <= slot < slots:
            text = f"slot {slot} of {window.memory.name}, which has {slots}, at {place_text(self.machine.place())}"
            return OutOfRange(text, self.machine, Window(window.memory, window.view[slot % slots], window.elem, ty))
        return Window(window.memory, window.view[slot], window.elem, ty)

    @_of_window
    def create_memdesc_subslice(self, ty: Type, window: Window, offsets: list[int]) -> Window:
        """A part of a buffer. One that reaches past the buffer is reported, and moved back into it."""
        sizes, view = window.view.shape, window.view
        if any(not 0 <= start <= size - length for start, length, size in zip(offsets, ty.shape, sizes, strict=True)):
            self.machine.report(
                "bounds",
                f"a slice of shape {list(ty.shape)} from {list(offsets)} on of {window.label}, which has the shape "
                f"{list(sizes)}, at {place_text(self.machine.place())}",
            )
            offsets = [
                max(0, min(start, size - length)) for start, length, size in zip(offsets, ty.shape, sizes, strict=True)
            ]
            view = _repeated(view, ty.shape)
        part = tuple(slice(start, start + length) for start, length in zip(offsets, ty.shape, strict=True))
        return Window(window.memory, view[part], window.elem, ty)

    @_of_window
    def create_memdesc_trans(self, window: Window, order: list[int]) -> Window:
        shape = [window.view.shape[i] for i in order]
        return Window(
            window.memory, window.view.transpose(order), window.elem, self._viewed("trans", window, shape, order)
        )

    @_of_window
    def create_memdesc_reshape(self, window: Window, shape: list[int]) -> Window:
        tile = window.view
        view = tile if isinstance(tile, Reordered) else tile.reshape(shape)
        if isinstance(tile, Reordered):
            view = Reordered(tile.tile, shape)
        elif not np.shares_memory(view, tile):
            view = Reordered(tile, shape)
        return Window(window.memory, view, window.elem, self._viewed("reshape", window, shape, shape))

    def _viewed(self, operation: str, window: Window, shape: list[int], argument: list[int]) -> Type:
        layout, alloc_shape = window.type.layout
        python, attribute = self.layouts.of_window(
            operation, window.elem, window.view.shape, layout, alloc_shape, argument
        )
        ty = Type(window.elem, shape, (attribute, list(shape)))
        self._python_layouts[id(ty)] = ty, python
        return ty

    def get_gluon_layout_from_memdesc(self, window: Where) -> object:
        window = window.instead if isinstance(window, OutOfRange) else window
        return self._python_layouts.pop(id(window.type))[1]

    _python_layouts: dict[int, tuple[Type, object]]

    @_of_window
    def create_memdesc_reinterpret(self, ty: Type, window: Window) -> Window:
        memory = window.memory
        source = window.view.shape, window.type.layout[0]
        if ty.elem == window.elem:
            by_rows, by_columns = (self._cut_by_ctas(ty, window, dim) for dim in (-2, -1))
            if by_rows or by_columns or self.layouts.pieces(ty.elem, *source, tuple(ty.shape), ty.layout[0]):
                tile = window.view.reshape(-1, window.view.shape[-1])
                return Window(memory, Pieces(tile, tuple(ty.shape), by_columns), ty.elem, ty)
        if memory.space == "tensor" or window.view.flags.c_contiguous:
            start, size = window.address - memory.base, int(np.prod(ty.shape)) * BYTES[ty.elem]
            # a view longer than its buffer is legal (it covers the next buffers); exceeding the allocation is a fault
            past = start + size - memory.raw.size
            if past > 0:
                self.machine.report(
                    "bounds",
                    f"{window.label} taken as {ty.shape} of {ty.elem} reaches {past} bytes past its allocation, "
                    f"at {place_text(self.machine.place())}",
                )
                start = max(0, start - past)
            raw = memory.raw if size <= memory.raw.size else np.zeros(size, np.uint8)
            view = _arranged(raw[start : start + size].view(STORED[ty.elem]), ty.shape, memory.space)
        else:
            raise NotImplementedError(f"reinterpret of {window.label}: a view that is not contiguous")
        return Window(memory, view, ty.elem, ty)

    def _cut_by_ctas(self, ty: Type, window: Window, divided: int) -> bool:
        """Whether CTAs that divide the rows (-2) or the columns (-1) of a tile [..., rows, columns] cut it into
        [n, CTAs, fewer rows, block].
        """
        shape = tuple(ty.shape)
        if self.ctas == 1 or len(shape) != 4 or shape[1] != self.ctas or np.prod(shape) != window.view.size:
            return False
        pieces = shares.of_memory(self.layouts, shape, ty.layout[0])
        return all(
            share.size == self.ctas and {n for basis in share.bases for n, step in enumerate(basis) if step} == {dim}
            for share, dim in ((self.share(window), len(window.view.shape) + divided), (pieces, 1))
        )

    def name_memory(self, name: str | None, value: object) -> None:
        """Name an allocation by the variable (or aggregate field) that holds it."""
        if not name or isinstance(value, tl.tuple):
            return
        handle = getattr(value, "handle", None)
        if isinstance(handle, Window) and not handle.memory.named:
            if _OF_TRITON in self.machine.place()[0][0].co_filename:  # a helper's name tells the reader nothing
                return
            handle.memory.name, handle.memory.named = self._unique(name), True
        elif getattr(type(value), "__triton_aggregate__", False):
            for field, inner in value.__dict__.items():
                handle = None if isinstance(inner, tl.tuple) else getattr(inner, "handle", None)
                if isinstance(handle, Window) and "." not in handle.memory.name:
                    handle.memory.name, handle.memory.named = self._unique(f"{name}.{field}"), True

    def _unique(self, name: str) -> str:
        """`name`, or name#2 and so on if a function allocates it repeatedly. These names identify agents.

        Barriers keep the name that their memory had when they were initialised, also if an aggregate renames it.
        """
        cta = self.machine.current.cta
        others = {memory.name for memory in cta.memories}
        others |= {re.split(r"\[| of CTA ", barrier.name)[0] for barrier in cta.barriers.values()}
        return next(one for n in itertools.count(1) if (one := name if n == 1 else f"{name}#{n}") not in others)

    # ---- mbarriers

    def _barrier(self, window: Where) -> Barrier:
        window = self.window(window)
        if self.ctas > 1:
            self.after_inits()
        return self.machine.barrier(window.address, self.barrier_name(window, self.rank))

    def create_mbarrier_init(self, window: Where, count: int, *_: object) -> None:
        window = self.window(window)
        if self.leader(window) == self.rank:
            members = 1 if self.ctas == 1 else self.ctas // self.share(window).size
            self.machine.init_barrier(window.address, self.barrier_name(window, self.rank), count * members)
        self.machine.current.cta.has_new_barriers = True

    def create_mbarrier_inval(self, window: Where) -> None:
        if self.leader(self.window(window)) == self.rank:
            self._barrier(window).valid = False

    @staticmethod
    def _predicated(arguments: tuple[object, ...]) -> bool:
        """False if one of the trailing arguments is a false predicate. Its position differs between Triton releases."""
        return all(bool(argument.data) for argument in arguments if isinstance(argument, Value))

    def create_mbarrier_expect(self, window: Where, size: int, *rest: object) -> None:
        if self._predicated(rest):
            self.arrive_from(self.window(window), 1, size, _cta_mask(rest))

    def create_mbarrier_arrive(self, window: Where, count: int, *rest: object) -> None:
        if self._predicated(rest):
            self.machine.preempt()
            self.arrive_from(self.window(window), count, 0, _cta_mask(rest))

    def create_mbarrier_wait(self, window: Where, parity: Value, pred: Value, *_: object) -> None:
        if not bool(pred.data):
            return
        window = self.window(window)
        if self.leader(window) == self.rank:
            self.machine.threads_meet()
            self.machine.spend(SYNC_NS)
            self.machine.wait(self._barrier(window), int(parity.data) & 1)

    # ---- fences and barriers of threads

    def create_fence_async_shared(self, cluster: bool) -> None:
        self.machine.fence(("shared",), cluster)

    def create_barrier(self, *_: object) -> None:
        """A barrier of one partition's threads. A partition is a single agent here."""
        self.machine.threads_meet()

    def fence(self, name: str) -> None:
        """A fence in inline PTX."""
        if name.startswith("fence.proxy.async"):
            spaces = {"shared": ("shared",), "global": ("global",)}
            self.machine.fence(next((s for key, s in spaces.items() if key in name), ("shared", "global")))
        elif name.startswith(("fence.acq_rel", "fence.sc", "membar")):
            self.machine.thread_fence(name.rpartition(".")[2])

    def barrier(self, number: int, threads: int | None, wait: bool) -> None:
        p = self.machine.current
        self.machine.threads_meet()
        self.machine.named_barrier(number, threads or 32 * p.warps, wait)

    # ---- TMA

    def create_async_tma_copy_global_to_local(
        self, desc: Descriptor, coord: list[Value], bar: Where, target: Where, pred: Value, *rest: object
    ) -> None:
        if not bool(pred.data):
            return
        target, bar, at = self.window(target), self.window(bar), [c.scalar for c in coord]
        self.check_corner(desc, at, write=False)
        if isinstance(desc, Im2Col):  # Triton 3.8 and later
            offsets = next(argument for argument in rest if isinstance(argument, (list, tuple)) and argument)
            self._load_pixels(desc, at, [offset.scalar for offset in offsets], bar, target, rest)
            return
        corner = self._corner(desc, at, target)
        block = _box(desc, self.own(target))
        part = desc.view[desc.inside(corner, block)[0]]
        source = Source(desc.memory.mask_of(part), part.nbytes)
        self._start_loads(desc, bar, target, lambda: desc.fetch(corner, block), source, rest)

    def _load_pixels(
        self, desc: Im2Col, at: list[int], offsets: list[int], bar: Window, target: Window, rest: tuple[object, ...]
    ) -> None:
        """A load of the pixels of a window, as many as the block has rows."""
        place = place_text(self.machine.place())
        if why := desc.strange_offset(offsets):
            self.machine.report("bounds", f"an im2col load of {desc.memory.name}: {why}, at {place}")
        height, width = target.view.shape[-2:]
        rows, columns = (
            (slice(0, height), slice(0, width)) if self.ctas == 1 else self.share(target).part(self.rank)[-2:]
        )
        channels = range(at[-1] + columns.start, at[-1] + columns.stop)
        pixels = desc.pixels(at[:-1], offsets, height)[rows]
        fetch = lambda: desc.fetch_pixels(pixels, channels)
        self._start_loads(desc, bar, target, fetch, desc.source(pixels, channels), rest)

    def create_async_tma_gather(
        self, desc: Descriptor, rows: Value, column: Value, bar: Where, target: Where, pred: Value, *rest: object
    ) -> None:
        if not isinstance(desc.view, np.ndarray):
            raise NotImplementedError(f"TMA gather from {desc.memory.name} by a descriptor that wraps")
        if bool(pred.data):
            target, bar = self.window(target), self.window(bar)
            own, (top, left) = self.own(target), self._corner(desc, [0, column.scalar], target)
            height, width = own.view.shape[-2:]
            indices = [int(r) for r in np.asarray(rows.data)][top : top + height]
            fetch = lambda: np.concatenate([desc.fetch([r, left], [1, width]) for r in indices])
            inside = np.array([[r] for r in indices if 0 <= r < desc.view.shape[0]], np.int64)
            read = elements(desc.memory, desc.view, inside, range(left, left + width))
            self._start_loads(desc, bar, target, fetch, read, rest)

    def _corner(self, desc: Descriptor, corner: list[int], window: Window) -> list[int]:
        """Where the running CTA's part of a block begins."""
        if self.ctas == 1:
            return corner
        part = self.share(window).part(self.rank)[-len(corner) :]
        return [at + step.start for at, step in zip(corner, part, strict=True)]

    def _start_loads(
        self,
        desc: Descriptor,
        bar: Window,
        target: Window,
        fetch: Callable[[], np.ndarray],
        source: Source,
        rest: tuple[object, ...],
    ) -> None:
        """A load into the running CTA's part. Multicast: the first of the CTAs that have the same part loads it for all
        of them, and each gets the bytes on its own barrier.
        """
        ranks = [self.rank]
        if self.ctas > 1 and True in rest:
            ranks = self.share(target).group(self.rank) if self.share(target).leads(self.rank) else []
        for rank in ranks:
            there = self.own_of_cta(target, rank, "TMA multicast") if self.ctas > 1 else target
            home = rank if self.ctas == 1 else rank & ~self.share(bar).free
            barrier = self.barrier_of(bar, home, "TMA load")
            if there is not None and barrier is not None:
                self._start_load(desc, barrier, there, fetch, source, self.machine.current.cta.cluster.ctas[home])

    def _start_load(
        self,
        desc: Descriptor,
        barrier: Barrier,
        target: Window,
        fetch: Callable[[], np.ndarray],
        source: Source,
        home: Cta,
    ) -> None:
        machine, p = self.machine, self.machine.current
        agent = f"TMA load {barrier.copies} on {home.index}/{barrier.name}"
        barrier.copies += 1
        number = machine.sequence(agent)
        vector_clock, phase = dict(p.vector_clock), barrier.phase
        what, place = f"TMA load into {target.label}", machine.place()
        machine.access(
            target.memory,
            target.memory.mask_of(target.view),
            True,
            Actor(agent, number, vector_clock, "async", what, place),
        )
        if source.nbytes:
            read = Actor(agent, number, vector_clock, "async", f"TMA load into {target.label}", place)
            machine.access(desc.memory, source.mask, False, read)
        vector_clock[agent] = number
        p.tick()
        if machine.checks.costs:
            machine.costs.add("TMA load", place, source.nbytes)
        _poison(target)
        _, ready = machine.occupy("TMA", p.time_ns, target.view.nbytes / TMA_BYTES_PER_NS)
        operation = Operation(agent, what, place, lambda: None, ready + TMA_LATENCY_NS)

        def land() -> None:
            target.view[...] = fetch().reshape(target.view.shape)
            machine.complete_bytes(barrier, target.view.nbytes, vector_clock, phase, operation)

        operation.land = land
        machine.event("TMA", "load", what, p.time_ns, operation.ready_ns)
        machine.launch(None, operation, p.cta if home.ended else home)

    def create_async_tma_copy_local_to_global(
        self, desc: Descriptor, coord: list[Value], source: Where, *_: object
    ) -> None:
        self.check_corner(desc, [c.scalar for c in coord], write=True)
        self._start_store(desc, coord, source, "TMA store", lambda where, bits: desc.view.__setitem__(where, bits))

    def create_async_tma_reduce(
        self, kind: Operator, desc: Descriptor, coord: list[Value], source: Where, *_: object
    ) -> None:
        self.check_corner(desc, [c.scalar for c in coord], write=True)
        add = lambda where, bits: reduce_into(desc, where, from_bits(bits, desc.elem), kind)
        self._start_store(desc, coord, source, f"TMA reduce-{kind.name.lower()}", add, kind)

    def create_async_tma_scatter(self, desc: Descriptor, rows: Value, column: Value, source: Where, *_: object) -> None:
        source = self.window(source)
        for i, row in enumerate(np.asarray(rows.data).tolist()):
            if self.ctas > 1:
                raise NotImplementedError(f"TMA scatter from {source.label} by several CTAs")
            part = Window(source.memory, source.view[i : i + 1], source.elem, source.type)
            corner = [Value(np.int32(row), "i32"), column]
            self._start_store(desc, corner, part, "TMA scatter", lambda where, bits: desc.view.__setitem__(where, bits))

    def _start_store(
        self,
        desc: Descriptor,
        coord: list[Value],
        source: Where,
        verb: str,
        put: Callable[[Part, np.ndarray], None],
        reduces: Operator | None = None,
    ) -> None:
        """A bulk store: it reads shared memory, then writes global memory later. Stores may write in any order."""
        machine, p, whole = self.machine, self.machine.current, self.window(source)
        source, alone = self.own(whole), self.ctas == 1 or self.share(whole).leads(self.rank)
        reads, writes = p.stores, p.store_writes
        reads.issued, writes.issued = reads.issued + 1, writes.issued + 1
        what, place = f"{verb} from {source.label}", machine.place()
        machine.access(
            source.memory,
            source.memory.mask_of(source.view),
            False,
            Actor(reads.agent, reads.issued, p.vector_clock, "async", what, place),
        )
        corner = self._corner(desc, [c.scalar for c in coord], whole)
        block = _box(desc, source)
        where, part = desc.inside(corner, block)
        if desc.view[where].size and (alone or reduces):  # CTAs with the same part store it several times
            proxy, adds = "async atomic" if reduces else "async", bool(reduces) and sums(reduces.name, desc.elem)
            actor = Actor(writes.agent, writes.issued, p.vector_clock, proxy, what, place, adds)
            machine.access(desc.memory, desc.memory.mask_of(desc.view[where]), True, actor)
            if machine.checks.costs:
                machine.costs.add("TMA store", place, desc.view[where].nbytes)
        p.tick()
        _, ready = machine.occupy("TMA", p.time_ns, source.view.nbytes / TMA_BYTES_PER_NS)
        machine.event("TMA", "store", what, p.time_ns, ready + TMA_LATENCY_NS)

        def read() -> None:
            bits = np.array(source.view.reshape(block)[part])
            write = Operation(writes.agent, what, place, lambda: put(where, bits), ready + TMA_LATENCY_NS)
            writes.queue.append(write)
            if machine.mode == "eager":
                writes.pop().land()

        machine.launch(reads, Operation(reads.agent, what, place, read, ready))

    def create_async_tma_store_wait(self, pending: int, read_only: object = True, *_: object) -> None:
        """cp.async.bulk.wait_group.read: the sources may be overwritten, while the writes may still be in flight.

        Triton 3.9 can wait for the writes, too (read_only=False).
        """
        p = self.machine.current
        self.machine.threads_meet()
        self.machine.drain(p.stores, pending, "store_wait")
        if read_only is False:
            self.machine.drain(p.store_writes, pending, "store_wait")

    def bulk_commit(self) -> None:
        """cp.async.bulk.commit_group in inline PTX. Gluon's stores commit themselves, so this group is empty."""
        p = self.machine.current
        for stream in (p.stores, p.store_writes):
            stream.issued += 1
            stream.queue.append(Operation(stream.agent, "an empty group", self.machine.place(), lambda: None))

    def bulk_wait(self, pending: int, read: bool) -> None:
        p = self.machine.current
        self.machine.drain(p.stores, pending, "bulk wait_group")
        if not read:
            self.machine.drain(p.store_writes, pending, "bulk wait_group")

    # ---- cp.async

    def create_async_copy_global_to_local(
        self, target: Where, pointer: Value, mask: Value | None, other: Value | None, *_: object
    ) -> None:
        machine, p, target = self.machine, self.machine.current, self.window(target)
        if self.ctas > 1:
            raise NotImplementedError(f"cp.async into {target.label} by several CTAs")
        mask = mask if isinstance(mask, Value) else None
        stream, what, place = p.copies, f"cp.async into {target.label}", machine.place()
        stream.where, number = place, stream.issued + 1
        vector_clock = {**p.vector_clock, stream.agent: number}
        actor = Actor(stream.agent, number, vector_clock, "generic", what, place)
        machine.access(target.memory, target.memory.mask_of(target.view), True, actor)
        dtype, addresses = target.view.dtype, np.asarray(pointer.data, np.int64)
        found = self._find(addresses, None if mask is None else mask.data, dtype.itemsize, "cp.async")
        for source in found:  # the copy reads it at any time until it is complete
            machine.access(source.memory, source.memory.mask_at(source.active, source.size), False, actor)
        if machine.checks.costs:
            self._count("global load", found, addresses, pointer.layout)
        _poison(target)

        def copy() -> None:
            target.view[...] = self._fetch(found, addresses.shape, dtype, 0)

        p.open_copies.append(copy)

    def create_async_commit_group(self) -> None:
        p = self.machine.current
        work, p.open_copies = p.open_copies, []
        p.copies.issued += 1
        ready = p.time_ns + TMA_LATENCY_NS
        self.machine.launch(
            p.copies, Operation(p.copies.agent, "cp.async group", self.machine.place(), lambda: _all(work), ready)
        )

    def create_async_wait_group(self, pending: int) -> None:
        self.machine.threads_meet()
        self.machine.drain(self.machine.current.copies, pending, "cp.async wait_group")

    def create_async_copy_mbarrier_arrive(self, bar: Where, increment: bool) -> None:
        """cp.async.mbarrier.arrive: arrives once all copies so far have landed, immediately if there are none."""
        machine, p, barrier = self.machine, self.machine.current, self._barrier(bar)
        stream = p.copies
        # every thread arrives; by default each first increments the pending count
        arrivals, place = 32 * p.warps, machine.place()
        if increment:
            barrier.missing += arrivals
        if not p.open_copies and not stream.queue:
            self.create_mbarrier_arrive(bar, arrivals)
            return
        work, p.open_copies = p.open_copies, []
        stream.issued += 1
        vector_clock = {**p.vector_clock, stream.agent: stream.issued}
        p.tick()

        def land() -> None:
            _all(work)
            machine.arrive(barrier, arrivals, vector_clock, f"cp.async of {p.name}", place, time_ns=p.time_ns)

        machine.launch(stream, Operation(stream.agent, "cp.async group", place, land, p.time_ns + TMA_LATENCY_NS))


def _arranged(flat: np.ndarray, shape: Sequence[int], space: str) -> np.ndarray:
    """Elements as an array of this shape. Tensor memory lies column by column, so that a window of columns is one run
    of bytes, whatever its element type and number of rows.
    """
    if space == "shared" or len(shape) < 2:
        return flat.reshape(shape)
    return flat.reshape(*shape[:-2], shape[-1], shape[-2]).swapaxes(-1, -2)


def _repeated(view: Any, shape: Sequence[int]) -> Any:
    """A view that is as long as the shape in each dimension: a shorter one repeats its first element there."""
    if not isinstance(view, np.ndarray):
        raise NotImplementedError("a slice longer than a reordered view")
    longer = [max(sizes) for sizes in zip(view.shape, shape, strict=True)]
    strides = [0 if size > own else step for size, own, step in zip(longer, view.shape, view.strides, strict=True)]
    return np.lib.stride_tricks.as_strided(view, longer, strides)


def _cta_mask(rest: tuple[object, ...]) -> int | None:
    """`from_cta`, which follows the predicate (Triton 3.9)."""
    after = next((rest[i + 1 :] for i, argument in enumerate(rest) if isinstance(argument, Value)), ())
    return after[0] if after and type(after[0]) is int else None


def _box(desc: Descriptor, window: Window) -> list[int]:
    """The shape of the block that a copy moves: that of its shared memory side, as in Triton's lowering."""
    shape = list(window.view.shape)
    extra = len(shape) - len(desc.block)
    return shape[extra:] if extra >= 0 and all(size == 1 for size in shape[:extra]) else desc.block


def _poison(window: Window) -> None:
    """Fill the destination of a copy with NaN until the copy lands."""
    window.view[...] = np.nan if window.view.dtype.kind == "f" else np.array(-1).astype(window.view.dtype)


def _all(work: list[Callable[[], None]]) -> None:
    for one in work:
        one()
