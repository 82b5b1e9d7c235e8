"""How dQ, dK and dV leave a program of the Hopper backward: the pipeline from the consumers to the store warps, and
what these write by TMA.

    consumer 0 --part or unit of dQ--> dq --> store warp 0 --dQ--> its float32 sum, or dQ itself
    consumer 1 --part or unit of dQ--> dq     (store_warps: 2, in turns)
    consumers --dV, then dK-----------> dq --> at the end of a work tile, in dQ's slots; where dkv_in_kv:
    consumers --dV, dK or their sums--> dkv_full --> store warp --> dV and dK, or their float32 sums (group_splits)

A step's dQ is a tile of the sum that several work tiles (tiles of keys) add to. It leaves in one of these ways
(`StoreWarp`):

    way                     traits                    taken when                           gain
    atomic reduction        none of the others        rows see many keys                   adds never wait
      zeroed ahead          dq_zeroed_ahead           many keys                            1.02: no zeros written first
      first writer stores   dq_first_writer_stores    few keys, key tiles come in order    1.03 to 1.28: no zeros at all
    in semaphore order      deterministic             the caller asks for it               the same bits in each run
    written directly        dq_written_directly       few keys, whole with this key tile   1.03 to 1.47: no sum
      last writer converts  dq_last_writer_converts   the same, dense and ungrouped        1.03 to 1.16: one kernel less

(Gains in times the speed, H100 and H200; `kernel.py` has them by size, with the thresholds.) The semaphore of a tile of
dQ counts the work tiles that have added to it. Deterministic: they add one by one, from the last that a tile of queries
sees to the first. That is the order in which programs on the causal diagonal come to it anyway, each two steps or more
after the one before. In reversed sections it is from the first to the last.
"""

from ..device.dialect import (
    Value,
    fence_async_global,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    partition_barrier,
    record,
    reinterpret,
    tma_load,
    tma_reduce_add,
    tma_store,
    tma_store_drain,
    tma_store_wait,
    zero_of_turn,
)
from ..device.per_thread_mbarrier import barrier_arrive, barrier_wait
from ..device.pipeline import PipelineState
from ..device.tma import ColumnParts, as_rows, of_head, store_part, tma_coordinates
from .backward_mainloop import Pipelines, parts_of, rows_of
from .backward_scheduler import DQ_WRITTEN
from .traits import ROWS as _ROWS

ROWS: gl.constexpr = gl.constexpr(_ROWS)


# ---------------------------------------------------------------- from the consumers to the store warps


@record
class DqPipeline:
    """Slots through which dQ leaves, and after a work tile's steps dV and dK (`traits.DqLayout`).

    full[i]: a part or unit of dQ, or rows of dV or dK, stand in the slot. empty[i]: they have been read.
    dq_last_writer_converts: the store warp gives a slot when it knows what comes into it, if need be with the sum of
    all others in it.
    """

    units: gl.shared_memory_descriptor  # [slots * slot_units, lines, 256] float32
    full: Value
    empty: Value
    dq_map: Value  # TMA descriptor of dQ with dq_written_directly, else None
    scale: Value
    traits: gl.constexpr

    @gluon.jit
    def state_of_step(self, ds_state, kv_phase):
        """The slot of a step's dQ, from the state of dS, which advances once a step. Besides steps, dV and dK pass once
        a work tile: a whole round of two slots, two of one.
        """
        if self.traits.store_warps == 2:
            return PipelineState(ds_state.index, ds_state.phase ^ kv_phase, 2)
        elif self.traits.split_by_keys:
            return PipelineState(ds_state.index * 0, ds_state.index, 1)
        elif self.traits.tuning.dq_passes == 2:
            return PipelineState(ds_state.index, ds_state.index, 1)  # of one stage, so both 0
        else:
            return ds_state

    # ------------------------------------------------ consumers: parts, if they split the keys

    @gluon.jit
    def put_part(self, dq, part: gl.constexpr, state):
        """A part of dQ, as float32 in the order of registers."""
        slot = self._slot(state)
        self._acquire_part(slot, part, state)
        held = in_register_order(dq)  # one or two units
        self._part(slot, part, held.shape).store(held)
        self._commit(slot * self.traits.dq.slot_barriers + part)

    @gluon.jit
    def put_whole_part(self, dq, has_others, part: gl.constexpr, state):
        """A part of dQ that is whole with what others have added, which has landed in the slot: scaled, in dQ's dtype,
        as rows and columns.
        """
        slot = self._slot(state)
        self._acquire_part(slot, part, state)
        if self.traits.dq_last_writer_converts:
            if has_others:
                held = in_register_order(dq)
                others = self._part(slot, part, held.shape).load(held.type.layout)
                dq = from_register_order(held + others, dq)
        as_rows(self.written_part(slot, part)).store((dq * self.scale).to(self.dq_map.dtype))
        self._commit(slot * self.traits.dq.slot_barriers + part)

    @gluon.jit
    def _slot(self, state):
        if self.traits.store_warps == 1:
            return gl.constexpr(0)
        else:
            return state.index

    @gluon.jit
    def _acquire_part(self, slot, part: gl.constexpr, state):
        """Wait until a part's place is free. dq_last_writer_converts: until both are, so that no consumer whose sums
        have landed takes a place of the next round for the other's.
        """
        BARRIERS: gl.constexpr = self.traits.dq.slot_barriers
        for i in gl.static_range(BARRIERS):
            if i == part or self.traits.dq_last_writer_converts:
                mbarrier.wait(self.empty.index(slot * BARRIERS + i), self._empty_phase(state))

    @gluon.jit
    def _empty_phase(self, state):
        """Slots are empty from the beginning, or, with dq_last_writer_converts, once the store warp has given them."""
        if self.traits.dq_last_writer_converts:
            return state.phase
        else:
            return state.phase ^ 1

    @gluon.jit
    def _part(self, slot, part: gl.constexpr, shape: gl.constexpr):
        """Where a part of dQ stands in float32, in the order of registers."""
        HELD: gl.constexpr = self.traits.dq.slot_units * self.traits.dq.lines // shape[0]
        FIRST: gl.constexpr = self.traits.dq.part_unit(part) * self.traits.dq.lines // shape[0]
        held = reinterpret(self.units, gl.float32, [self.traits.store_warps * HELD] + shape, self.units.type.layout)  # noqa: RUF005 (Triton has no *)
        return held.index(slot * HELD + FIRST)

    @gluon.jit
    def written_part(self, slot, part: gl.constexpr):
        """Where a part of dQ stands as rows and columns: at the beginning of the memory that it has in float32."""
        BLOCKS: gl.constexpr = self.traits.dq.lines * 1024 // self.dq_map.block_type.nbytes  # of a unit
        unit = slot * self.traits.dq.slot_units + self.traits.dq.part_unit(part)
        return self._blocks(self.dq_map).index(unit * BLOCKS)

    # ------------------------------------------------ consumers: units, if they split the products

    @gluon.jit
    def put_units(self, dq, state):
        """64 rows of dQ, or a pass of their columns. The store warp adds one unit while the next is stored."""
        left, right = gl.split(gl.permute(gl.reshape(dq.main, [ROWS, 2, self.traits.dq.unit]), [0, 2, 1]))
        self.put_unit(0, left, state)
        self.put_unit(1, right, state)
        if dq.tail is not None:
            self.put_unit(2, dq.tail, state)

    @gluon.jit
    def put_unit(self, unit, dq, state):
        mbarrier.wait(self.empty.index(unit), state.phase ^ 1)
        self.units.index(unit).store(in_register_order(dq))
        self._commit(unit)

    # ------------------------------------------------ consumers: dV and dK

    @gluon.jit
    def acquire_slot(self, state):
        """Wait until a whole slot is free."""
        BARRIERS: gl.constexpr = self.traits.dq.slot_barriers
        for i in gl.static_range(BARRIERS):
            mbarrier.wait(self.empty.index(state.index * BARRIERS + i), self._empty_phase(state))

    @gluon.jit
    def put_gradient(self, w: gl.constexpr, grad, factor, desc, row: gl.constexpr, state):
        """Consumer w's rows of dK or dV, times a factor."""
        BARRIERS: gl.constexpr = self.traits.dq.slot_barriers
        tile = self.gradient_tile(state.index + zero_of_turn(), desc)
        store_parts(rows_of(parts_of(tile), row), grad, factor)
        fence_async_shared()
        for i in gl.static_range(BARRIERS):
            if i == w or not self.traits.split_by_keys:
                barrier_arrive(self.full, state.index * BARRIERS + i, self.traits.dq_per_thread_arrive)

    @gluon.jit
    def gradient_tile(self, slot, desc):
        """The memory of a slot as a tile of dK or dV."""
        BYTES: gl.constexpr = self.traits.dq.slot_units * self.traits.dq.lines * 1024
        MAIN: gl.constexpr = desc.main.block_type.nbytes
        main = self._blocks(desc.main).index(slot * (BYTES // MAIN))
        if desc.tail is None:
            return ColumnParts(main, None)
        else:
            TAIL: gl.constexpr = desc.tail.block_type.nbytes
            return ColumnParts(main, self._blocks(desc.tail).index(slot * (BYTES // TAIL) + MAIN // TAIL))

    @gluon.jit
    def _blocks(self, desc):
        """All slots as blocks of a descriptor: Triton 3.8 lays nothing over a part of them, and 3.9 nothing over what
        begins as several.
        """
        BLOCKS: gl.constexpr = self.units.numel * 4 // desc.block_type.nbytes
        return reinterpret(self.units, desc.dtype, [BLOCKS] + desc.block_shape, desc.layout)  # noqa: RUF005 (Triton has no *)

    @gluon.jit
    def _commit(self, i):
        fence_async_shared()
        barrier_arrive(self.full, i, self.traits.dq_per_thread_arrive)

    # ------------------------------------------------ store warps

    @gluon.jit
    def wait_full(self, slot: gl.constexpr, state):
        """Wait until the whole slot is full."""
        BARRIERS: gl.constexpr = self.traits.dq.slot_barriers
        for i in gl.static_range(BARRIERS):
            barrier_wait(self.full, slot * BARRIERS + i, state.phase, self.traits.dq_per_thread_arrive)

    @gluon.jit
    def release(self, slot: gl.constexpr):
        """Free the slot, once TMA has read all that leaves it."""
        tma_store_wait(0)
        if not self.traits.dq_last_writer_converts:  # which gives a slot when it knows what for
            self.give(slot)

    @gluon.jit
    def give(self, slot: gl.constexpr):
        """Let the consumers have the slot."""
        BARRIERS: gl.constexpr = self.traits.dq.slot_barriers
        for i in gl.static_range(BARRIERS):
            mbarrier.arrive(self.empty.index(slot * BARRIERS + i))

    @gluon.jit
    def give_with_sum(self, slot: gl.constexpr, sum_map, m_tile):
        """Let the consumers have the slot, with the sum of a tile of dQ in it."""
        BARRIERS: gl.constexpr = self.traits.dq.slot_barriers
        LINES: gl.constexpr = self.traits.dq.lines
        UNITS: gl.constexpr = self.traits.dq.units
        for i in gl.static_range(BARRIERS):
            empty, unit = self.empty.index(slot * BARRIERS + i), self.traits.dq.part_unit(i)
            mbarrier.expect(empty, LINES * 1024)
            tile = self.units.index(slot * self.traits.dq.slot_units + unit)
            tma_load(sum_map, [(m_tile * UNITS + unit) * LINES, 0], empty, tile)


@gluon.jit
def store_parts(tile, acc, factor):
    """The accumulators times a factor, in the tile's dtype."""
    tile.main.store((acc.main * factor).to(tile.main.dtype))
    if tile.tail is not None:
        tile.tail.store((acc.tail * factor).to(tile.tail.dtype))


@gluon.jit
def in_register_order(acc):
    """An accumulator [rows, columns] in lines of 256: by 8 columns, by 16 rows, by thread of a warp, by its four
    values.

    A thread then stores its four at once, and a warp 512 bytes in a row without bank conflicts.
    backward_preprocess.convert_dq_kernel knows the order.
    """
    ROWS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = acc.shape[1]
    pieces = gl.permute(gl.reshape(acc, [ROWS // 16, 2, 8, COLUMNS // 8, 4, 2]), [3, 0, 2, 4, 1, 5])
    return gl.reshape(pieces, [ROWS * COLUMNS // 256, 256])


@gluon.jit
def from_register_order(held, like):
    """`in_register_order`, the other way: an accumulator in the layout of `like`."""
    ROWS: gl.constexpr = like.shape[0]
    COLUMNS: gl.constexpr = like.shape[1]
    pieces = gl.permute(gl.reshape(held, [COLUMNS // 8, ROWS // 16, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5])
    return gl.convert_layout(gl.reshape(pieces, [ROWS, COLUMNS]), like.type.layout, assert_trivial=True)


# ---------------------------------------------------------------- the store warps


@record
class OutputMaps:
    """TMA descriptors; ColumnParts of them for dK and dV, or for their float32 sums."""

    dq_sum: Value
    dk: Value
    dv: Value


@record
class StoreState:
    """Where a store warp stands."""

    dq: PipelineState  # of its own slot
    work: PipelineState
    passed: gl.tensor  # tiles of the dq pipeline in all work tiles before, modulo store_warps
    uncounted: (
        Value  # dq_last_writer_converts: the tile of dQ that was added to and is not counted yet, or -1; else None
    )

    @gluon.jit
    def start(traits: gl.constexpr):
        dq, work, passed = PipelineState.start(1), PipelineState.start(1), gl.to_tensor(0)
        return StoreState(dq, work, passed, passed - 1 if traits.dq_last_writer_converts else None)


@record
class StoreWarp:
    """One warp that writes all tiles that pass the dq pipeline, or every other one: dQ of each step, then dV and dK."""

    index: gl.constexpr  # of its slot
    maps: OutputMaps
    semaphores: (
        Value  # of each tile of dQ; dq_zeroed_ahead: of each part of heads, how many work tiles have zeroed a share
    )
    dq_sum: Value
    pipes: Pipelines
    launch: gl.tuple  # LaunchParams
    traits: gl.constexpr

    @gluon.jit
    def run(self):
        state = StoreState.start(self.traits)
        while self.pipes.work.wait_published(state.work):
            state = self.process_tile(state)

    @gluon.jit
    def process_tile(self, state):
        """dQ of a work tile's steps, then dV and dK. Returns the state after it."""
        traits: gl.constexpr = self.traits
        work = self.pipes.work.receive(self.launch, traits)
        whole = work.num_keys_written
        if traits.dq_written_directly:
            whole = work.whole_m_blocks(self.launch.window, traits)
        shape, num_keys = self.launch.shape, work.num_keys_written
        dk_rows = work.k_rows(shape.stride_dk, num_keys, shape, traits)
        dv_rows = work.k_rows(shape.stride_dv, num_keys, shape, traits)
        self.pipes.work.consumer_release()  # now: the next tile's loads would wait for this one's last step
        if traits.dq_zeroed_ahead:
            self.zero_ahead(work)
        steps = work.num_steps(traits)
        first = (self.index + state.passed) % traits.store_warps
        for step in range(first, steps, traits.store_warps):
            state = self.store_dq(work, step, whole, state)
        if traits.dq_last_writer_converts:
            self.pipes.dq.give(self.index)
            uncounted = self.count(state.uncounted)
            state = StoreState(state.dq, state.work, state.passed, uncounted)
        dq_state = self.store_gradients(work, dk_rows, dv_rows, first + steps, state)
        passed = (state.passed + steps) % traits.store_warps
        return StoreState(dq_state, state.work.advance(), passed, state.uncounted)

    # ------------------------------------------------ dQ

    @gluon.jit
    def store_dq(self, work, step, whole, state):
        """A step's dQ by one of the ways of this file's table. Returns the state after it.

        dq_last_writer_converts: the slot is given when it is known what comes into it. Where dQ is whole but for what
        others have added, that is loaded into it first. That this warp's own add stands in memory is counted once the
        next slot is given, so that consumers do not wait for it.
        """
        traits: gl.constexpr = self.traits
        dq, uncounted = self.pipes.dq, state.uncounted
        queries = work.query_tile(step, self.launch.shape, traits)
        if traits.dq_last_writer_converts:
            if queries.m_block < whole:
                if (
                    work.n_start > 0
                ):  # count first: a later work tile may wait for it as this one waits for those before
                    uncounted = self.count(uncounted)
                    self.give_with_sum(queries.index, work.n_start // traits.block_n)
                else:
                    dq.give(self.index)
                    uncounted = self.count(uncounted)
                self.write_dq(work, queries, state.dq)
            else:
                dq.give(self.index)
                self.count(uncounted)
                self.add_dq(work, queries, state.dq)
                uncounted = queries.index
            dq_state = state.dq.advance()
        elif traits.dq_written_directly:
            if queries.m_block < whole:
                self.write_dq(work, queries, state.dq)
            else:
                self.add_dq(work, queries, state.dq)
            dq_state = state.dq.advance()
        else:
            dq_state = self.add_dq(work, queries, state.dq)
        return StoreState(dq_state, state.work, state.passed, uncounted)

    @gluon.jit
    def write_dq(self, work, queries, state):
        """A tile of dQ that is whole, as rows and columns. Its semaphore tells the kernel that converts the sum."""
        traits: gl.constexpr = self.traits
        dq, shape = self.pipes.dq, self.launch.shape
        semaphore = self.semaphores + queries.index
        dq.wait_full(self.index, state)
        rows = of_head(work.q_rows(shape.stride_q, shape, traits), queries.head)
        for part in gl.static_range(2):
            row, tile = queries.m_start + traits.dq.part_row(part), dq.written_part(self.index, part)
            store_part(dq.dq_map, rows, row, traits.dq.part_column(part), tile, False, traits)
        dq.release(self.index)
        gl.store(semaphore, DQ_WRITTEN)

    @gluon.jit
    def add_dq(self, work, queries, state):
        """Add a tile of dQ to its sum, or store it there if it is the first. Returns the state after it."""
        traits: gl.constexpr = self.traits
        dq = self.pipes.dq
        is_first = False
        if traits.dq_first_writer_stores:
            semaphore = self.semaphores + queries.index
            is_first = self.dq_semaphore_acquire(semaphore, work, queries.m_start)
        line = queries.index * traits.dq.units * traits.dq.lines
        if traits.split_by_keys:
            UNITS: gl.constexpr = traits.dq.units
            dq.wait_full(self.index, state)
            for unit in gl.static_range(UNITS):
                smem = dq.units.index(self.index * traits.dq.slot_units + unit)
                self.add_unit(is_first, line + unit * traits.dq.lines, smem)
            dq.release(self.index)
            state = state.advance()
        else:
            state = self.add_units(is_first, line, state)
        if traits.deterministic:
            dq_semaphore_release(semaphore)
        elif traits.dq_first_writer_stores and not traits.dq_last_writer_converts:
            if is_first:
                dq_semaphore_release(semaphore)
        return state

    @gluon.jit
    def add_units(self, is_first, line, state):
        """`add_dq` of dQ that comes unit by unit: a unit's place is free once it has been read, while the next is
        added.
        """
        PASSES: gl.constexpr = self.traits.tuning.dq_passes
        PLACES: gl.constexpr = self.traits.dq.slot_barriers
        dq = self.pipes.dq
        for n in gl.static_range(PASSES):
            for i in gl.static_range(PLACES):
                barrier_wait(dq.full, i, state.phase, self.traits.dq_per_thread_arrive)
                self.add_unit(is_first, line + (n * PLACES + i) * self.traits.dq.lines, dq.units.index(i))
                if n + i > 0:
                    tma_store_wait(1)
                    mbarrier.arrive(dq.empty.index((i + PLACES - 1) % PLACES))
            state = state.advance()
        tma_store_wait(0)
        mbarrier.arrive(dq.empty.index(PLACES - 1))
        return state

    @gluon.jit
    def add_unit(self, is_first, line, smem):
        if not self.traits.dq_first_writer_stores:
            tma_reduce_add(self.maps.dq_sum, [line, 0], smem)
        elif is_first:
            tma_store(self.maps.dq_sum, [line, 0], smem)
        else:
            tma_reduce_add(self.maps.dq_sum, [line, 0], smem)

    @gluon.jit
    def dq_semaphore_acquire(self, semaphore, work, m_start):
        """Wait for this work tile's turn at the tile of dQ that begins at m_start. Returns whether it is the first to
        add: then it stores instead.

        Deterministic: its turn comes once all work tiles after it have added, or in reversed sections all before it.
        Otherwise it comes once the first has stored. The first is the last that a row of the tile sees if
        deterministic, but in reversed sections, and otherwise the first: programs have taken that sooner.
        """
        traits: gl.constexpr = self.traits
        seqlen, window = work.seqlen, self.launch.window
        if traits.deterministic:
            first_key, stop_key = seqlen.visible_keys(m_start + traits.block_m - 1, window, traits)
            ahead = stop_key - 1 - work.n_start
            if traits.reversed_sections > 0:
                ahead = gl.where(work.blocks.from_last == 1, work.n_start, ahead)
            before = ahead // traits.block_n
            while gl.atomic_add(semaphore, 0, sem="acquire") != before:
                pass
            is_first = before == 0
        else:
            first_key, stop_key = seqlen.visible_keys(m_start, window, traits)
            is_first = first_key // traits.block_n * traits.block_n == work.n_start
            if not is_first:
                while gl.atomic_add(semaphore, 0, sem="acquire") == 0:
                    pass
        fence_async_global()
        return is_first

    @gluon.jit
    def give_with_sum(self, m_tile, others):
        """Give the consumers the slot with the sum of all others in it, once that stands in memory."""
        while gl.atomic_add(self.semaphores + m_tile, 0, sem="acquire") != others:
            pass
        fence_async_global()
        self.pipes.dq.give_with_sum(self.index, self.maps.dq_sum, m_tile)

    @gluon.jit
    def count(self, uncounted):
        """Count a tile of dQ that has been added, once it stands in memory. Returns -1: none is uncounted then."""
        if uncounted >= 0:
            dq_semaphore_release(self.semaphores + uncounted)
        return uncounted * 0 - 1

    @gluon.jit
    def zero_ahead(self, work):
        """Zero this work tile's share of the sum of dQ that a part of heads a section ahead adds to. Then wait until
        the sum of its own part is zeroed, by earlier work tiles and by rows_kernel. Zeros written there had kept memory
        busy for 30 us of d64 causal 4k's 1,450: 1.03 of the speed, 8k 1.02, d128 causal 8k 1.02, d96 1.03, GQA 2k 1.02
        (H100).
        """
        traits: gl.constexpr = self.traits
        shape = self.launch.shape
        heads = shape.heads
        # else ptxas keeps what follows from the number of parts, and lacks registers for a consumer's addresses
        if traits.masks:
            heads = heads + zero_of_turn()
        parts = heads // traits.heads_per_program
        own = work.batch * parts + work.head_part
        later = own + shape.l2_head_parts
        if later < shape.batch * parts:
            lines = traits.heads_per_program * shape.num_m_blocks * traits.dq.units * traits.dq.lines
            share = gl.cdiv(lines, shape.num_n_blocks)
            begin = work.n_start // traits.block_n * share
            lane = gl.arange(0, 256, gl.BlockedLayout([4], [32], [1], [0]))
            for line in range(begin, gl.minimum(begin + share, lines)):
                gl.store(
                    self.dq_sum + (later.to(gl.int64) * lines + line) * 256 + lane, gl.zeros_like(lane).to(gl.float32)
                )
            partition_barrier()  # one thread publishes what all have written
            gl.atomic_add(self.semaphores + later, 1, sem="release")
        while gl.atomic_add(self.semaphores + own, 0, sem="acquire") != shape.num_n_blocks:
            pass
        fence_async_global()

    # ------------------------------------------------ dV and dK

    @gluon.jit
    def store_gradients(self, work, dk_rows, dv_rows, tiles_before, state):
        """dV and dK of a work tile. Returns the dq pipeline's state after them."""
        traits: gl.constexpr = self.traits
        maps, n_start, dq_state = self.maps, work.n_start, state.dq
        if traits.two_key_tiles:
            self.store_from_kv(dk_rows, dv_rows, n_start, state.work)
        elif traits.sums_dkv:
            head = work.head_kv(traits)
            self.add_from_kv(of_head(dk_rows, head), of_head(dv_rows, head), n_start)
        elif traits.store_warps == 2:
            if tiles_before % 2 == 0:
                dq_state = self.store_from_slot(maps.dv, dv_rows, n_start, dq_state)
            else:
                dq_state = self.store_from_slot(maps.dk, dk_rows, n_start, dq_state)
        else:
            dq_state = self.store_from_slot(maps.dv, dv_rows, n_start, dq_state)
            dq_state = self.store_from_slot(maps.dk, dk_rows, n_start, dq_state)
        return dq_state

    @gluon.jit
    def store_from_slot(self, desc, rows, n_start, state):
        """dV or dK from the next slot of the dq pipeline."""
        dq = self.pipes.dq
        dq.wait_full(self.index, state)
        self.store_tile(desc, rows, n_start, dq.gradient_tile(self.index, desc))
        dq.release(self.index)
        return state.advance()

    @gluon.jit
    def store_from_kv(self, dk_rows, dv_rows, n_start, work_state):
        """dV and dK of two tiles of keys, which stand in the place of V and K."""
        kv = self.pipes.kv
        mbarrier.wait(kv.dkv_full.index(0), work_state.phase)
        self.store_tile(self.maps.dv, dv_rows, n_start, kv.v.index(0))
        self.store_tile(self.maps.dk, dk_rows, n_start, kv.k.index(0))
        tma_store_wait(0)
        mbarrier.arrive(kv.kv_empty.index(0))

    @gluon.jit
    def add_from_kv(self, dk_rows, dv_rows, n_start):
        """dK, then dV, to the float32 sums of a group that several programs share."""
        kv = self.pipes.kv
        mbarrier.wait(kv.dkv_full.index(0), 0)
        self.add_tile(self.maps.dk, dk_rows, n_start, kv.sums)
        tma_store_wait(0)
        mbarrier.arrive(kv.dkv_empty.index(0))
        mbarrier.wait(kv.dkv_full.index(0), 1)
        self.add_tile(self.maps.dv, dv_rows, n_start, kv.sums)
        tma_store_wait(0)
        mbarrier.arrive(kv.kv_empty.index(0))

    @gluon.jit
    def store_tile(self, desc, rows, n_start, tile):
        store_part(desc.main, rows, n_start, 0, tile.main, False, self.traits)
        if desc.tail is not None:
            store_part(desc.tail, rows, n_start, desc.main.block_shape[-1], tile.tail, False, self.traits)

    @gluon.jit
    def add_tile(self, desc, rows, n_start, tile):
        tma_reduce_add(desc.main, tma_coordinates(rows, n_start, 0, False, self.traits), tile.main)
        if desc.tail is not None:
            column: gl.constexpr = desc.main.block_shape[-1]
            tma_reduce_add(desc.tail, tma_coordinates(rows, n_start, column, False, self.traits), tile.tail)


@gluon.jit
def dq_semaphore_release(semaphore):
    """Count the semaphore up, once all that was added stands in memory."""
    tma_store_drain()
    fence_async_global()
    partition_barrier()  # one thread has waited for TMA, another publishes
    gl.atomic_add(semaphore, 1, sem="release")


@gluon.jit
def store_warp(index: gl.constexpr, maps, semaphores, dq_sum, pipes, launch, traits: gl.constexpr):
    StoreWarp(index, maps, semaphores, dq_sum, pipes, launch, traits).run()
