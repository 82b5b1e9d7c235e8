"""Backward attention on Hopper: warp-specialized, persistent over tiles of keys; five products a step, dQ in float32.

Kernels
    rows_kernel        delta = rowsum(dO O) - dLSE; LSE and -delta in whole tiles; zeroes counters, semaphores, dQ's sum
    backward_kernel    this file
    convert_dq_kernel  dQ = scale * its float32 sum, unless the main kernel has written dQ
    convert_kernel     dK and dV from float32 sums, where programs share a group (group_splits)

Roles
    producer      1 warp        finds tiles of keys, publishes them, loads K, V, and per step Q, LSE, dO, delta
    consumer w    4 warps each  products, with softmax in registers; the two split the keys, or the products
    store warp    1 or 2        writes dQ of each step, then dV and dK, by TMA

                      .--- work tiles ---+------------------+---------------.
    tile counter -> producer             v                  v               v
                      '-- q, do, kv -> consumer 0 <-ds-> consumer 1 --dq--> store warps --> dQ or its sum, dV, dK

Schedule of a program, tile of keys by tile of keys
    prologue      K, V land; dK = dV = 0
    mainloop      for each head of the group, for each tile of queries that sees the keys:
                  S = Q K^T    dP = dO V^T    P = exp2(scale S - LSE)    dS = P (dP - delta)
                  dV += P^T dO    dK += dS^T Q    dQ += dS K
    epilogue      dV, then scale dK, leave while the next K, V, Q, dO arrive

Barriers         arrivals                 complete when
    tile_full    1                        the producer has published a work tile
    tile_empty   consumers + store warps  all of them have read it
    kv_full[i]   1 and the tiles' bytes   K and V of stage i have landed
    kv_done[i]   2                        no product reads them any more; also kv_empty, unless dkv_in_kv
    kv_empty     1                        dkv_in_kv: all that leaves in the place of K and V has been read
    dkv_full     2                        dkv_in_kv: dK, dV, or both stand in the place of K and V
    dkv_empty    1                        dkv_in_kv: dK has been read, dV may follow
    q_full[s]    1 and the tile's bytes   Q and LSE of stage s have landed
    q_empty[s]   2 (or 256 threads)       both have used Q; split by keys: and dO
    do_full[s]   1 and the tile's bytes   dO and delta of stage s have landed
    do_empty[s]  1                        split by products: consumer 0 has used dO
    ds_full[n]   1 (or 128 threads)       dS stands in memory, until its step's Q is free or its next arrival but one
    ds_empty[n]  1 (or 128 threads)       dq_deferred: the other consumer has multiplied it
    dq_full[i]   1 (or 128 threads)       a part or unit of dQ, or rows of dV or dK, stand in the slot
    dq_empty[i]  1                        they have been read; dq_last_writer_converts: the slot is given
    landed[s]    2                        documents: a tile of queries with rows of other documents has landed

A program's next keys and queries are loaded while its gradients leave: a tile of keys costs 2.5 us (d64) and 2.9 us
(d128) besides its steps, instead of 4.4 and 5.9 with a program per tile (H200).

A consumer holds everything transposed, keys in rows. P and dS may then be left operands in registers, and what a query
has (LSE, delta) is one value a column. A query that sees no key, or is none, has LSE +inf: its P is 0. TMA reads zeros
after the last row and column and writes nothing there. dK and dV of grouped heads are summed in registers.

To add a feature: scores -> device.backward_hooks.ScoreMods; their gradient -> backward_mainloop.score_gradient; which
keys a query sees -> backward_mainloop.AttentionMask; which tiles of queries a tile of keys visits ->
backward_scheduler.BlockInfo, QueryBlockList; how dQ leaves -> backward_store; a constant of the kernel ->
traits.BackwardTraits; a scalar -> launch_backward.LaunchParams.

Sources: FlashAttention-2 (arXiv 2307.08691), algorithm 2; FlashAttention-3 (arXiv 2407.08608), section 3 and its
backward's dQ writer.
"""

from ..device.backward_hooks import ScoreMods
from ..device.dialect import (
    Value,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    record,
    reinterpret,
    warp_specialize,
    zero_of_turn,
)
from ..device.per_thread_mbarrier import per_thread_mbarriers
from ..device.pipeline import PipelineState, ring, rings
from ..device.tile_scheduler import WORDS
from ..device.tma import ColumnParts, allocate_tiles
from .backward_mainloop import (
    AttentionMask,
    DsPipeline,
    KeyTile,
    KvPipeline,
    Pipelines,
    RowsPipeline,
    parts_of,
    rows_at,
    rows_of,
    tile_now,
    zero_parts,
)
from .backward_producer import CuSeqlens, InputMaps, producer
from .backward_scheduler import WorkTilePipeline
from .backward_split_keys import KeyGradients, SplitKeysConsumer
from .backward_split_products import KeyHalves, ProductsConsumer, SoftmaxConsumer
from .backward_store import DqPipeline, OutputMaps, store_parts, store_warp
from .traits import ROWS as _ROWS
from .traits import THREADS as _THREADS

ROWS: gl.constexpr = gl.constexpr(_ROWS)
THREADS: gl.constexpr = gl.constexpr(_THREADS)  # of one consumer


# ---------------------------------------------------------------- a consumer's work tiles


@record
class ConsumerState:
    """Where a consumer stands in each pipeline."""

    q: PipelineState
    do: PipelineState
    ds: PipelineState
    kv: PipelineState

    @gluon.jit
    def start(traits: gl.constexpr):
        q, do = PipelineState.start(traits.q_stages), PipelineState.start(traits.do_stages)
        ds = PipelineState.start(2 if traits.split_by_keys else 1)
        return ConsumerState(q, do, ds, PipelineState.start(traits.kv_stages))

    @gluon.jit
    def work(self, traits: gl.constexpr):
        """The work tile's slot is one, so its state follows from that of K and V."""
        if traits.kv_stages == 2:
            return PipelineState(self.kv.index * 0, self.kv.index, 1)
        else:
            return self.kv


@record
class MainloopResult:
    """dK and dV of a work tile (None where the other consumer has it), and the state after its mainloop."""

    dk: Value
    dv: Value
    q: PipelineState
    do: PipelineState
    ds: PipelineState


@record
class Consumer:
    """Four warps. It is constant, as is every aggregate but those named State."""

    index: gl.constexpr
    dk_map: ColumnParts
    dv_map: ColumnParts
    pipes: Pipelines
    launch: gl.tuple  # LaunchParams
    traits: gl.constexpr

    @gluon.jit
    def run(self):
        state = ConsumerState.start(self.traits)
        while self.pipes.work.wait_published(state.work(self.traits)):
            state = self.process_tile(state)

    @gluon.jit
    def process_tile(self, state):
        """All tiles of queries of a work tile, and its gradients. Returns the state after it."""
        traits: gl.constexpr = self.traits
        pipes, work_phase = self.pipes, state.work(traits).phase
        row: gl.constexpr = ROWS * self.index if traits.split_by_keys else 0
        # prologue
        work = pipes.work.receive(self.launch, traits)
        mask, mods = self.mask_of(work, row), None
        if traits.has_mods:
            mods = self.mods_of(work, row)
        whole, has_others = None, None
        if traits.dq_written_directly:
            whole, has_others = work.whole_m_blocks(self.launch.window, traits), work.n_start > 0
        pipes.work.consumer_release()
        dk = zero_parts(ROWS, traits.main_d, traits.tail_d)
        dv = zero_parts(ROWS, traits.main_dv, traits.tail_dv)
        if traits.two_key_tiles:
            dk, dv = KeyHalves(dk, dk), KeyHalves(dv, dv)
        mbarrier.wait(pipes.kv.kv_full.index(state.kv.index), state.kv.phase)
        # mainloop
        result = self.mainloop(work, whole, has_others, mask, mods, dk, dv, row, state)
        # epilogue
        if traits.two_key_tiles:
            self.store_in_kv(result)
        else:
            self.store_gradients(result, state.kv, work_phase)
        return ConsumerState(result.q, result.do, result.ds, state.kv.advance())

    @gluon.jit
    def mask_of(self, work, row: gl.constexpr):
        """The mask of this consumer's keys, which begin with the work tile's key `row`."""
        n_start = work.n_start + row
        seqlen, window = work.seqlen, self.launch.window
        diagonal = work.m_start + (seqlen.seqlen_k - seqlen.seqlen_q) - n_start
        num_keys = seqlen.num_keys - n_start
        prefix = 0
        if self.traits.mask.prefix:
            prefix = seqlen.prefix - n_start
        return AttentionMask(diagonal, num_keys, prefix, window)

    @gluon.jit
    def mods_of(self, work, row: gl.constexpr):
        """What the call's functions get in this consumer's keys, for the work tile's first head and first queries."""
        first_head = work.head_part * self.traits.heads_per_program
        return ScoreMods(work.entry(self.traits), first_head, work.m_start, work.n_start + row, None, self.launch.hooks)

    @gluon.jit
    def mainloop(self, work, whole, has_others, mask, mods, dk, dv, row: gl.constexpr, state):
        traits: gl.constexpr = self.traits
        pipes, kv, index = self.pipes, self.pipes.kv, state.kv.index
        if traits.split_by_keys:
            keys = KeyTile.create(kv, index, rows_of(tile_now(kv.k, index, traits), row), traits)
            phase = state.work(traits).phase
            consumer = SplitKeysConsumer(
                self.index, keys, pipes, phase, mask, mods, work.rows, whole, has_others, self.launch, traits
            )
            end = consumer.mainloop(work.blocks, KeyGradients(dk, dv), state.q, state.ds)
            return MainloopResult(end.grads.dk, end.grads.dv, end.q, state.do, end.ds)
        elif self.index == 0:
            keys = KeyTile.create(kv, index, tile_now(kv.k, index, traits), traits)
            consumer = SoftmaxConsumer(keys, pipes, mask, mods, self.launch, traits)
            end = consumer.mainloop(work.blocks, dv, state.q, state.do)
            return MainloopResult(None, end.dv, end.q, end.do, state.ds)
        else:
            keys = KeyTile(kv.k, index, kv.v, index, None)
            end = ProductsConsumer(keys, pipes, traits).mainloop(work.blocks, dk, state.q, state.ds)
            return MainloopResult(end.dk, None, end.q, state.do, end.ds)

    # ------------------------------------------------ dK and dV

    @gluon.jit
    def store_gradients(self, result, kv_state, work_phase):
        """dV and dK to the store warps: through the dq pipeline, or (group_splits) as float32 sums in the place of K
        and V.
        """
        traits: gl.constexpr = self.traits
        kv, dq = self.pipes.kv, self.pipes.dq
        row: gl.constexpr = ROWS * self.index if traits.split_by_keys else 0
        slot = dq.state_of_step(result.ds, work_phase)
        if not traits.split_by_keys:
            if self.index == 1:  # now, since the slot of the second gradient is waited for next
                dq.acquire_slot(slot)
        mbarrier.arrive(kv.kv_done.index(kv_state.index))
        if (
            traits.sums_dkv or not traits.split_by_keys
        ):  # else dQ's slot says as much: the other's part of the last step has left it
            mbarrier.wait(kv.kv_done.index(0), work_phase)
        if traits.sums_dkv:
            self.store_sums(result, row, work_phase)
        else:
            if traits.split_by_keys:
                dq.acquire_slot(slot)
            if traits.has_dv(self.index):
                dq.put_gradient(self.index, result.dv, 1.0, self.dv_map, row, slot)
            if traits.has_dk(self.index):
                dq.acquire_slot(slot.advance())
                dq.put_gradient(self.index, result.dk, self.launch.softmax.scale, self.dk_map, row, slot.advance())

    @gluon.jit
    def store_in_kv(self, result):
        """dV and dK of two tiles of keys to the store warp, in the place of V and K. Only this consumer has read V; the
        other no longer reads K once this one has taken its last dS.
        """
        kv = self.pipes.kv
        if self.index == 0:
            tile, halves, factor = rows_at(kv.v, zero_of_turn()), result.dv, 1.0
        else:
            tile, halves, factor = rows_at(kv.k, zero_of_turn()), result.dk, self.launch.softmax.scale
        store_parts(rows_of(tile, 0), halves.first, factor)
        store_parts(rows_of(tile, ROWS), halves.second, factor)
        fence_async_shared()
        mbarrier.arrive(kv.dkv_full.index(0))

    @gluon.jit
    def store_sums(self, result, row: gl.constexpr, work_phase):
        """dK, then dV, of a group that programs share: the memory of K and V holds the sum of one of them."""
        traits: gl.constexpr = self.traits
        kv = self.pipes.kv
        if traits.has_dk(self.index):
            store_parts(rows_of(parts_of(kv.sums), row), result.dk, 1.0)
        fence_async_shared()
        mbarrier.arrive(kv.dkv_full.index(0))
        mbarrier.wait(kv.dkv_empty.index(0), work_phase)
        if traits.has_dv(self.index):
            store_parts(rows_of(parts_of(kv.sums), row), result.dv, 1.0)
        fence_async_shared()
        mbarrier.arrive(kv.dkv_full.index(0))


@gluon.jit
def consumer(index: gl.constexpr, dk_map, dv_map, pipes, launch, traits: gl.constexpr):
    Consumer(index, dk_map, dv_map, pipes, launch, traits).run()


# ---------------------------------------------------------------- kernel


@gluon.jit
def sums_over(kv, desc):
    """The memory of K and V (one buffer of two stages) as a tile of float32 sums."""
    main = reinterpret(kv.main, gl.float32, desc.main.block_shape, desc.main.layout)
    if desc.tail is None:
        return ColumnParts(main, None)
    else:
        return ColumnParts(main, reinterpret(kv.tail, gl.float32, desc.tail.block_shape, desc.tail.layout))


@gluon.jit
def allocate_ds(dtype: gl.constexpr, traits: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, traits.block_m], dtype)
    shape: gl.constexpr = [traits.ds_tiles, ROWS if traits.split_by_keys else traits.block_n, traits.block_m]
    return gl.allocate_shared_memory(dtype, shape, layout)


@gluon.jit
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, stats_desc, dk_desc, dv_desc, dq_sum_desc,
    q_tail_desc, k_tail_desc, v_tail_desc, do_tail_desc, dk_tail_desc, dv_tail_desc,
    dq_desc, pointers, launch_params, traits: gl.constexpr,
):  # fmt: skip
    """TMA descriptors of the main and the tail columns (None where there are none), as tma.descriptor makes them.
    stats: LSE of all rows, then -delta. dk and dv: the gradients, or their float32 sums (group_splits). dq_sum: dQ's
    float32 sum. dq: dQ itself with dq_written_directly, else None. pointers: Pointers; launch_params: LaunchParams
    (`launch_backward`).
    """
    Q_STAGES: gl.constexpr = traits.q_stages
    DO_STAGES: gl.constexpr = traits.do_stages
    BLOCK_M: gl.constexpr = traits.block_m
    CONSUMER: gl.constexpr = traits.consumer_registers
    ONE_WARP: gl.constexpr = traits.one_warp_registers
    dtype: gl.constexpr = q_desc.dtype
    launch = launch_params  # an assignment makes values of constants, which partitions can capture
    pools: gl.constexpr = traits.pools_barriers
    q_map, k_map = ColumnParts(q_desc, q_tail_desc), ColumnParts(k_desc, k_tail_desc)
    v_map, do_map = ColumnParts(v_desc, v_tail_desc), ColumnParts(do_desc, do_tail_desc)
    dk_map, dv_map = ColumnParts(dk_desc, dk_tail_desc), ColumnParts(dv_desc, dv_tail_desc)
    # shared memory
    if traits.sums_dkv:
        k_smem = allocate_tiles(2, k_map, pools)
        v_smem, sums = k_smem, sums_over(k_smem, dk_map)
    else:
        k_smem = allocate_tiles(traits.kv_stages, k_map, pools)
        v_smem = allocate_tiles(traits.kv_stages, v_map, pools)
        sums = k_smem
    q_smem = allocate_tiles(Q_STAGES, q_map, pools)
    do_smem = allocate_tiles(DO_STAGES, do_map, pools)
    if pools:  # each allocation begins at a KiB
        lse_smem = gl.allocate_shared_memory(gl.float32, [Q_STAGES + DO_STAGES, BLOCK_M], stats_desc.layout)
        delta_smem = lse_smem
    else:
        lse_smem = gl.allocate_shared_memory(gl.float32, [Q_STAGES, BLOCK_M], stats_desc.layout)
        delta_smem = gl.allocate_shared_memory(gl.float32, [DO_STAGES, BLOCK_M], stats_desc.layout)
    dq_shape: gl.constexpr = [traits.store_warps * traits.dq.slot_units, traits.dq.lines, 256]
    dq_memory = gl.allocate_shared_memory(
        gl.float32, dq_shape, gl.NVMMASharedLayout(128, 32, 2)
    )  # where gradients, which are swizzled, may begin
    dq_smem = reinterpret(dq_memory, gl.float32, dq_shape, dq_sum_desc.layout)
    ds_smem = allocate_ds(dtype, traits)
    # barriers
    if traits.ds_per_thread_arrive:
        dq_in_same: gl.constexpr = traits.store_warps * traits.dq.slot_barriers * traits.dq_per_thread_arrive
        ds_full = per_thread_mbarriers(traits.ds_tiles + dq_in_same, THREADS)
    else:
        ds_full = ring(traits.ds_tiles, 1)
    ds_empty = None
    if traits.dq_deferred:
        ds_empty = ring(4, traits.tuning.release_arrivals)
        for i in gl.static_range(2, 4):  # what the first step finds, and fences before its products
            zero = gl.full([ROWS, BLOCK_M], 0.0, dtype, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
            ds_smem.index(i).store(zero)
    words = gl.allocate_shared_memory(gl.int32, [1, WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    per_tile = WorkTileBarriers(*rings(gl.constexpr(traits.barriers_per_work_tile), pools))
    kv_empty = per_tile.kv_empty
    if not traits.dkv_in_kv:
        kv_empty = per_tile.kv_done
    q_full, q_empty = ring(Q_STAGES, 1), ring(Q_STAGES, 2 * traits.tuning.release_arrivals)
    do_empty = q_empty
    if not traits.split_by_keys:
        do_empty = ring(DO_STAGES, 1)
    # split by products, one role waits for each
    dq_slots: gl.constexpr = traits.store_warps * traits.dq.slot_barriers
    do_full, dq_empty = rings(gl.constexpr(((DO_STAGES, 1), (dq_slots, 1))), not traits.split_by_keys)
    landed = q_full
    if traits.mask.documents:
        landed = ring(Q_STAGES, 2)
    if traits.dq_per_thread_arrive:
        dq_full = ds_full + 8 * traits.ds_tiles
    else:
        dq_full = ring(dq_slots, 1)
    # pipelines
    work_pipe = WorkTilePipeline(words, per_tile.tile_full, per_tile.tile_empty)
    kv_pipe = KvPipeline(
        k_smem, v_smem, sums, per_tile.kv_full, per_tile.kv_done, kv_empty, per_tile.dkv_full, per_tile.dkv_empty
    )
    q_pipe = RowsPipeline(q_smem, lse_smem, q_full, q_empty, 0)
    do_pipe = RowsPipeline(do_smem, delta_smem, do_full, do_empty, Q_STAGES if pools else 0)
    dq_pipe = DqPipeline(dq_smem, dq_full, dq_empty, dq_desc, launch.softmax.scale, traits)
    ds_pipe = DsPipeline(ds_smem, ds_full, ds_empty, traits.ds_per_thread_arrive)
    pipes = Pipelines(work_pipe, kv_pipe, q_pipe, do_pipe, dq_pipe, ds_pipe)
    maps = InputMaps(q_map, k_map, v_map, do_map, stats_desc)
    cu_seqlens, ranges = CuSeqlens(pointers.cu_seqlens_q, pointers.cu_seqlens_k), pointers.ranges
    out = OutputMaps(dq_sum_desc, dk_map, dv_map)
    counter, semaphores, dq_sum = pointers.tile_counter, pointers.dq_semaphores, pointers.dq_sum
    if traits.store_warps == 1:
        warp_specialize(
            [
                (consumer, (gl.constexpr(0), dk_map, dv_map, pipes, launch, traits)),
                (consumer, (gl.constexpr(1), dk_map, dv_map, pipes, launch, traits)),
                (producer, (maps, cu_seqlens, ranges, pipes, landed, launch, counter, traits)),
                (store_warp, (gl.constexpr(0), out, semaphores, dq_sum, pipes, launch, traits)),
            ],
            [4, 1, 1],
            [CONSUMER, ONE_WARP, ONE_WARP],
        )
    else:
        warp_specialize(
            [
                (consumer, (gl.constexpr(0), dk_map, dv_map, pipes, launch, traits)),
                (consumer, (gl.constexpr(1), dk_map, dv_map, pipes, launch, traits)),
                (producer, (maps, cu_seqlens, ranges, pipes, landed, launch, counter, traits)),
                (store_warp, (gl.constexpr(0), out, semaphores, dq_sum, pipes, launch, traits)),
                (store_warp, (gl.constexpr(1), out, semaphores, dq_sum, pipes, launch, traits)),
            ],
            [4, 1, 1, 1],
            [CONSUMER, ONE_WARP, ONE_WARP, ONE_WARP],
        )


@record
class WorkTileBarriers:
    """Barriers that are not used in each step, as `traits.barriers_per_work_tile` orders them."""

    tile_full: Value
    tile_empty: Value
    kv_done: Value
    kv_empty: Value
    dkv_full: Value
    dkv_empty: Value
    kv_full: Value
