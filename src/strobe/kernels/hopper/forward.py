"""Forward attention on Hopper: warp-specialized, persistent, with FlashAttention-3's schedule.

Roles
    producer      1 warp             finds work tiles, publishes them, loads Q, K and V by TMA; 4 if keys have 8 bits
    consumer w    4 warps each, 2-4  S = Q K^T and O += P V by wgmma, softmax in registers between them; 64 rows each

Schedule of a consumer, in the order of `BlockInfo.n_block`
    prologue      S_0 = Q K_0^T         P_0 = softmax(S_0)
    mainloop      S_i = Q K_i^T    |    O += P_{i-1} V_{i-1}    |    P_i = softmax(S_i) while O is in flight
    epilogue      O += P_n V_n          O /= row_sum, LSE = ln 2 row_max + ln row_sum; TMA stores O

Barriers         arrivals                 complete when
    tile_full    1                        the producer has published a work tile
    tile_empty   consumers                all consumers are done with it, and have set the redo flags
    q_full[w]    1 and the tile's bytes   Q of consumer w has landed
    q_empty[w]   1                        consumer w has read it
    k_full[i]    1 and the tile's bytes   K of stage i has landed                          v_full[i]   the same of V
    k_empty[i]   consumers (or threads)   every consumer's Q K^T of stage i has finished   v_empty[i]  the same of P V
    v_landed[i]  1 and the tile's bytes   documents: V of a redo has landed; the producer zeroes rows, commits v_full[i]
    named 9 + w  256                      ping-pong: consumer w may issue its products

P stays in registers. Column counts that are no power of two come in two parts (`ColumnParts`), 64 and 32 or 128 and 64;
so may Q and K of 256. A tensor's rows end where TMA's descriptor says: it reads zeros beyond them and writes nothing
there, so lengths may be ragged. Descriptors of packed sequences wrap (`tma.tma_coordinates`), so that a neighbour's
rows are neither read nor written.

To add a feature: scores -> device.forward_hooks.modify_scores; which keys a row sees ->
device.forward_mask.AttentionMask; which key blocks a tile visits -> device.forward_mask.BlockInfo, BlockList; where
rows lie -> device.forward_mask.SeqlenInfo; where keys of a cache lie -> device.cached_keys; a constant of the kernel ->
traits.ForwardTraits; a scalar -> device.forward_arguments.LaunchParams.

Triton reads the body of a loop twice, and of a loop in a loop four times. It reads a function once for all calls with
the same types, and consumers' indices are tensors for that reason (d64 causal is read in 0.65 s instead of 1.04, on an
H200's host).

Sources: FlashAttention-3 (arXiv 2407.08608), sections 3.1 and 3.2; conditional rescaling: FlashAttention-4
(Dao-AILab/flash-attention, flash_attn/cute); ragged descriptors: triton.tools.ragged_tma.
"""

from ..device.cached_keys import allocate_cached_tiles, allocate_lost_boxes, lost_boxes
from ..device.conditional_rescaling import log2_offset_of
from ..device.converted_keys import LEAST_SCALE
from ..device.dialect import (
    fence_async_shared,
    gl,
    gluon,
    named_barrier,
    record,
    stay_before,
    tma_store_drain,
    tma_store_wait,
    warp_specialize,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ..device.forward_arguments import CuSeqlens, InputMaps, LaunchParams, Outputs, SoftmaxParams, Workspace
from ..device.forward_hooks import ScoreMods
from ..device.forward_mask import AttentionMask
from ..device.forward_scheduler import WorkTilePipeline
from ..device.key_ranges import PURE
from ..device.pack_gqa import load_sinks, queries_of
from ..device.pipeline import Pipeline, PipelineState, ring
from ..device.seqlen import breaks_promise
from ..device.softmax import finish as normalizer_of
from ..device.staged_keys import StagingBuffers
from ..device.tile_redo import redo_witness
from ..device.tma import ColumnParts, allocate_tiles, as_rows, store_part
from .forward_producer import Pipelines, producer
from .forward_softmax import SoftmaxState, needs_row_max, rescale_o
from .traits import ROWS as _ROWS
from .traits import STAGING_STAGES as _STAGING_STAGES

STAGING_STAGES: gl.constexpr = gl.constexpr(_STAGING_STAGES)
ROWS: gl.constexpr = gl.constexpr(_ROWS)  # of one consumer: wgmma's M


@record
class ConsumerState:
    """Where a consumer stands in each pipeline. K and V of a block lie in the same stage of their pipelines."""

    kv: PipelineState
    q: PipelineState
    work: PipelineState

    @gluon.jit
    def start(traits: gl.constexpr):
        return ConsumerState(PipelineState.start(traits.stages), PipelineState.start(1), PipelineState.start(2))


@record
class AttentionState:
    """What a step hands the next: P of the block before, not yet multiplied, and the factor of O that goes with it."""

    k: PipelineState
    o: ColumnParts  # [rows, columns] float32
    v: PipelineState
    rescale: gl.tensor  # [rows, 4] in lanes
    softmax: SoftmaxState
    p: gl.tensor  # [rows, block_n] of K's dtype, wgmma's left operand


@record
class RowResult:
    """O [rows, columns], not yet normalized, and each row's maximum and sum, float32."""

    row_max: gl.tensor
    row_sum: gl.tensor
    o: ColumnParts


@record
class Consumer:
    """Four warps and their 64 rows of each work tile. It is constant, as is every aggregate but those named State."""

    index: gl.tensor
    outputs: gl.tuple  # Outputs
    pipes: Pipelines
    o_smem: ColumnParts
    launch: gl.tuple  # LaunchParams
    traits: gl.constexpr

    @gluon.jit
    def run(self):
        state = ConsumerState.start(self.traits)
        while self.pipes.work.wait_published(state.work):
            state = self.process_tile(state)
        tma_store_wait(0)

    @gluon.jit
    def process_tile(self, state):
        """Write O and LSE of this consumer's rows of a work tile. Returns the state after it."""
        traits: gl.constexpr = self.traits
        pipes, window, kv = self.pipes, self.launch.window, state.kv
        heads_q = self.launch.shape.heads * traits.pack_gqa
        work = pipes.work.receive(state.work, traits)
        m_start = work.consumer_m_start(self.index, state.work.index, traits)
        q_state = state.q.at(self.index)
        pipes.q.consumer_wait(q_state)
        q = q_operand(pipes.q.tiles, self.index, traits)
        if traits.q_parts_in_registers:
            # without it TMA overtook loads that queued behind stores: wrong rows in 12 of 12 runs (H200)
            fence_async_shared()
        if traits.q_in_registers:
            pipes.q.consumer_release(q_state)
        result = no_keys(traits)
        seqlen = pipes.work.receive_range(state.work, work, traits)
        blocks = work.blocks(self.launch, traits).seen_by(m_start, traits.queries_per_consumer, seqlen, window, traits)
        redo = pipes.work.is_redo(state.work) if traits.optimistic else 0
        unseen = work.num_n_blocks
        if blocks.count > 0:
            unseen = work.blocks(self.launch, traits).blocks_after(blocks)
            if not traits.first_block_first:
                kv = self.skip_blocks(unseen, kv)
            mask = AttentionMask.of_rows(m_start, seqlen, window, traits)
            if traits.mask.documents:
                document, offset_k = pipes.work.receive_document(state.work)
                mask = mask.of_document(document, self.outputs.ids_k + offset_k)
            mods = None
            if traits.has_mods:
                mods = self.score_mods(work, m_start, seqlen, state.work)
            scaled = self
            if traits.has_k_scale:
                scaled = self.with_k_scale(work.head // traits.group)
            result, kv = scaled.attend(q, q_state, blocks, unseen, mask, mods, redo, kv)
            unseen = work.blocks(self.launch, traits).blocks_before(blocks)
        if not traits.q_in_registers:
            if blocks.count <= 0:
                pipes.q.consumer_release(q_state)
        kv = self.skip_blocks(unseen, kv)
        work_state = self.epilogue(result, heads_q, state.work)
        return ConsumerState(kv, state.q.advance(), work_state)

    @gluon.jit
    def with_k_scale(self, head):
        """The same consumer for 8-bit keys of a head, whose scale without its sign multiplies the softmax scale."""
        launch, softmax = self.launch, self.launch.softmax
        size = gl.abs(gl.load(self.outputs.k_scale + head))
        size = gl.where(size == 0.0, LEAST_SCALE, size)
        if self.traits.softcap:
            softmax = SoftmaxParams(softmax.scale_log2, softmax.softcap * size, softmax.score_scale)
        elif self.traits.score_mod is not None:
            softmax = SoftmaxParams(softmax.scale_log2, softmax.softcap, softmax.score_scale * size)
        else:
            softmax = SoftmaxParams(softmax.scale_log2 * size, softmax.softcap, None)
        launch = LaunchParams(launch.num_tiles, launch.shape, launch.window, softmax, launch.hooks, launch.cache)
        return Consumer(self.index, self.outputs, self.pipes, self.o_smem, launch, self.traits)

    @gluon.jit
    def score_mods(self, work, m_start, seqlen, work_state):
        """The call's functions, for this consumer's rows."""
        traits: gl.constexpr = self.traits
        shape = self.launch.shape
        q_start, k_start = m_start, 0
        if traits.cached:
            q_start = m_start + (seqlen.seqlen_k - seqlen.seqlen_q)
        if traits.key_ranges:
            _, offset_k = self.pipes.work.receive_document(work_state)
            q_start, k_start = (
                m_start + seqlen.offset_q - work.batch * shape.seqlen_q,
                offset_k - work.batch * shape.seqlen_k,
            )
        return ScoreMods(work.entry(traits), work.head, q_start, k_start, self.launch.hooks)

    @gluon.jit
    def skip_blocks(self, count, kv):
        """Pass over blocks that none of this consumer's rows sees, in step with the other consumers."""
        for _ in range(count):
            self.warp_scheduler_barrier_sync()
            self.warp_scheduler_barrier_arrive()
            self.pipes.k.skip(kv)
            self.pipes.v.skip(kv)
            kv = kv.advance()
        return kv

    @gluon.jit
    def attend(self, q, q_state, blocks, unseen, mask, mods, redo, kv):
        """(RowResult, K's and V's state) of at least one key block. Q is released once the last scores are there, a
        product before the end: 1.006 to 1.01 times the speed of later at d256, 1.02 at d64 512 (H200).
        """
        state = self.prologue(q, blocks, unseen, mask, mods, kv)
        for i in range(1, blocks.count):
            state = self.mainloop_step(i, q, state, blocks, mask, mods, redo)
        if not self.traits.q_in_registers:
            self.pipes.q.consumer_release(q_state)
        return self.last_product(state)

    @gluon.jit
    def prologue(self, q, blocks, unseen, mask, mods, kv):
        """The first block. If it comes before the others, also the `unseen` blocks skipped after it."""
        traits: gl.constexpr = self.traits
        k = kv
        o, block = zero_o(traits), blocks.visit(0, traits)
        # S_0 = Q K_0^T
        self.pipes.k.consumer_wait(k)
        self.warp_scheduler_barrier_sync()
        s = qk_product(q, self.pipes.k.tiles, k, traits)
        self.warp_scheduler_barrier_arrive()
        s = warpgroup_mma_wait(0, deps=[s])
        block = block.without_boxes(self.lost_boxes(k), traits)
        self.pipes.k.consumer_release(k)
        k = k.advance()
        # P_0 = softmax(S_0)
        offset: gl.constexpr = self.log2_offset()
        p, rescale, softmax = SoftmaxState.first_step(s, block, mask, mods, self.launch.softmax, offset, traits)
        p = self.p_operand(p)
        if traits.first_block_first:
            k = self.skip_blocks(unseen, k)  # the diagonal's last blocks, which come next
        return AttentionState(k, o, kv, rescale, softmax, p)

    @gluon.jit
    def mainloop_step(self, i, q, state, blocks, mask, mods, redo):
        """Block i in the order of `n_block`. Both products are in flight before softmax(S_i) runs under P_{i-1}
        V_{i-1}.
        """
        traits: gl.constexpr = self.traits
        k, v = state.k, state.v
        # S_i = Q K_i^T
        self.pipes.k.consumer_wait(k)
        self.warp_scheduler_barrier_sync()
        s = qk_product(q, self.pipes.k.tiles, k, traits)
        # O = rescale O + P_{i-1} V_{i-1}
        o = rescale_o(state.o, state.rescale)
        self.pipes.v.consumer_wait(v)
        o = pv_product(state.p, self.pipes.v.tiles, v, o)
        self.warp_scheduler_barrier_arrive()
        s = warpgroup_mma_wait(traits.pv_products, deps=[s])
        lost = self.lost_boxes(k)
        self.pipes.k.consumer_release(k)
        # P_i = softmax(S_i)
        block = blocks.visit(i, traits).without_boxes(lost, traits)
        look = needs_row_max(block, mask, redo, traits)
        offset: gl.constexpr = self.log2_offset()
        p, rescale, softmax = state.softmax.online_step(s, look, block, mask, mods, self.launch.softmax, offset, traits)
        if traits.softmax_before_pv_wait:
            stay_before(blocks.count)
        o = wait_for_o(o)
        self.pipes.v.consumer_release(v)
        p = self.p_operand(p)
        return AttentionState(k.advance(), o, k, rescale, softmax, p)

    @gluon.jit
    def lost_boxes(self, k):
        """Pages: bits of the boxes of K's stage whose keys are hidden; else 0."""
        lost = 0
        if self.traits.has_pages:
            lost = lost_boxes(self.pipes.lost_boxes, k, self.traits)
        return lost

    @gluon.jit
    def last_product(self, state):
        rows: gl.constexpr = gl.SliceLayout(1, s_layout(self.traits))
        # O = rescale O + P_n V_n
        o = rescale_o(state.o, state.rescale)
        self.pipes.v.consumer_wait(state.v)
        o = pv_product(state.p, self.pipes.v.tiles, state.v, o)
        row_sum = gl.convert_layout(gl.sum(state.softmax.row_sum, 1), rows)
        row_max = gl.convert_layout(gl.max(state.softmax.row_max, 1), rows)
        o = wait_for_o(o)
        self.pipes.v.consumer_release(state.v)
        return RowResult(row_max, row_sum, o), state.k

    @gluon.jit
    def epilogue(self, result, heads_q, work_state):
        """Write O = O / row_sum and LSE = ln 2 row_max + ln row_sum. The work tile is released before O leaves. Returns
        the state after it.
        """
        traits: gl.constexpr = self.traits
        work_pipe, outputs = self.pipes.work, self.outputs
        shape, window = self.launch.shape, self.launch.window
        work = work_pipe.receive(work_state, traits)
        m_start = work.consumer_m_start(self.index, work_state.index, traits)
        row = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout(traits)))
        query = m_start + queries_of(row, traits)
        head, exists = work.heads_of_rows(row, query, traits)
        seqlen = work_pipe.receive_range(work_state, work, traits)
        first, stop = seqlen.visible_keys(query, window, traits)
        is_empty = first >= stop
        document = PURE
        if traits.mask.documents:
            document, _ = work_pipe.receive_document(work_state)
            is_empty = is_empty | (
                (result.row_sum == 0) & (document != PURE)
            )  # among other documents' keys, only the sum knows
        sink = 0.0
        if traits.sinks:
            sink = load_sinks(outputs.sinks, head, exists, traits)
        sees_none = is_empty
        if traits.hides_beyond_mask:
            sees_none = is_empty | (result.row_sum == 0)
        if traits.no_sum_means_no_key:
            is_empty = sees_none
        normalizer, lse = normalizer_of(result.row_max, result.row_sum, sees_none, sink, traits)
        if traits.packed:  # NaN shows rows and keys beyond what the caller promised
            token = query
            if traits.cached:  # all rows of the sequence
                token = query * 0 + (seqlen.seqlen_q - 1)
            broken = breaks_promise(token, seqlen.seqlen_k, window)
            normalizer = gl.where(broken, float("nan"), normalizer)
            lse = gl.where(broken, float("nan"), lse)
        lse_rows = outputs.lse + (work.batch.to(gl.int64) * heads_q + head) * shape.seqlen_q + seqlen.offset_q
        if traits.key_ranges:
            lse_rows -= work.batch * shape.seqlen_q  # offset_q counts from the first batch entry
        gl.store(lse_rows + query, lse, mask=exists)
        if traits.has_v_scale:
            normalizer = normalizer * gl.load(outputs.v_scale + work.head // traits.group)
        o = normalize_o(result.o, normalizer)
        if traits.can_redo:
            redo = work_pipe.is_redo(work_state)
            if redo > 0:
                tma_store_drain()  # the stores of this tile's first computation
            witness, is_empty = redo_witness(result.row_max, is_empty, o, document, traits)
            work_pipe.redo_flags.set(work_state.index, self.index, witness, (redo > 0) | is_empty | ~exists)
        work_pipe.consumer_release(work_state)
        work_state = work_state.advance()
        self.store_o(o, work.o_rows(shape), m_start)
        return work_state

    @gluon.jit
    def store_o(self, o, rows, m_start):
        """O by TMA through its staging buffer, which may hold half of it: that waits until the first half has left."""
        columns: gl.constexpr = self.traits.o_columns
        desc, smem = self.outputs.o, self.o_smem
        if self.traits.o_staged_by_halves:
            left, right = gl.split(gl.permute(gl.reshape(o.main, [ROWS, 2, columns // 2]), [0, 2, 1]))
            self.store_o_part(left, desc.main, smem.main, rows, m_start, 0)
            self.store_o_part(right, desc.main, smem.main, rows, m_start, columns // 2)
        else:
            self.store_o_part(o.main, desc.main, smem.main, rows, m_start, 0)
        if o.tail is not None:
            self.store_o_part(o.tail, desc.tail, smem.tail, rows, m_start, columns)

    @gluon.jit
    def store_o_part(self, part, desc, smem, rows, m_start, column: gl.constexpr):
        if column == 0 or self.traits.o_staged_by_halves:
            tma_store_wait(0)  # what this buffer held has left it
        tile = smem.index(self.index)
        as_rows(tile).store(part.to(smem.dtype))
        fence_async_shared()
        store_part(desc, rows, m_start, column, tile, self.traits.pack_gqa > 1, self.traits)

    @gluon.jit
    def p_operand(self, p):
        return gl.convert_layout(p.to(self.pipes.k.tiles.main.dtype), p_layout(self.traits))

    @gluon.constexpr_function
    def log2_offset(self):
        return log2_offset_of(self.pipes.k.tiles.main.dtype)

    @gluon.jit
    def warp_scheduler_barrier_sync(self):
        """Ping-pong: wait until the consumer before has issued its products. Named barrier 9 + consumer: its 128
        threads and ours.
        """
        if self.traits.ping_pong:
            named_barrier("bar.sync", 9 + self.index, 256)

    @gluon.jit
    def warp_scheduler_barrier_arrive(self):
        """Ping-pong: the next consumer may issue its products."""
        if self.traits.ping_pong:
            named_barrier("bar.arrive", 9 + (self.index + 1) % self.traits.consumers, 256)


@gluon.jit
def consumer(w: gl.constexpr, outputs, pipes, o_smem, launch, traits: gl.constexpr):
    self = Consumer(gl.to_tensor(w), outputs, pipes, o_smem, launch, traits)
    if w == traits.consumers - 1:
        self.warp_scheduler_barrier_arrive()  # consumer 0 begins
    self.run()


# ---------------------------------------------------------------- products


@gluon.constexpr_function
def s_layout(traits):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, traits.block_n, 16])


@gluon.constexpr_function
def o_layout(columns):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def p_layout(traits):
    return gl.DotOperandLayout(0, o_layout(traits.o_columns), 2)


@gluon.jit
def zero_o(traits: gl.constexpr):
    main = gl.full([ROWS, traits.o_columns], 0.0, gl.float32, o_layout(traits.o_columns))
    if traits.tail_dv:
        return ColumnParts(main, gl.full([ROWS, traits.tail_dv], 0.0, gl.float32, o_layout(traits.tail_dv)))
    else:
        return ColumnParts(main, None)


@gluon.jit
def no_keys(traits: gl.constexpr):
    """The result of rows that see no key."""
    rows: gl.constexpr = gl.SliceLayout(1, s_layout(traits))
    row_max = gl.full([ROWS], float("-inf"), gl.float32, rows)
    if traits.has_block_lists:
        row_max = gl.full([ROWS], 0.0, gl.float32, rows)  # an empty list: no redo would find a key
    row_sum = gl.full([ROWS], 0.0, gl.float32, rows)
    return RowResult(row_max, row_sum, zero_o(traits))


@gluon.jit
def q_operand(tiles, consumer, traits: gl.constexpr):
    """Q's parts as left operands of wgmma: in shared memory, or the first of them in registers."""
    layout: gl.constexpr = gl.DotOperandLayout(0, s_layout(traits), 2)
    main = as_rows(tiles.main.index(consumer))
    if traits.q_parts_in_registers > 0:
        main = main.load(layout)
    if tiles.tail is None:
        return ColumnParts(main, None)
    else:
        tail = as_rows(tiles.tail.index(consumer))
        if traits.q_parts_in_registers > 1:
            tail = tail.load(layout)
        return ColumnParts(main, tail)


@gluon.jit
def qk_product(q, k_tiles, state, traits: gl.constexpr):
    """S = Q K^T, in flight: [rows, d] x [d, block_n]."""
    zero = gl.full([ROWS, traits.block_n], 0.0, gl.float32, s_layout(traits))
    s = warpgroup_mma(
        q.main, as_rows(k_tiles.main.index(state.index)).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    if q.tail is not None:
        s = warpgroup_mma(q.tail, as_rows(k_tiles.tail.index(state.index)).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def pv_product(p, v_tiles, state, o):
    """O += P V, in flight: [rows, block_n] x [block_n, dv]."""
    main = warpgroup_mma(p, as_rows(v_tiles.main.index(state.index)), o.main, is_async=True)
    if o.tail is None:
        return ColumnParts(main, None)
    else:
        return ColumnParts(main, warpgroup_mma(p, as_rows(v_tiles.tail.index(state.index)), o.tail, is_async=True))


@gluon.jit
def wait_for_o(o):
    """O once every product in flight has finished."""
    if o.tail is None:
        return ColumnParts(warpgroup_mma_wait(0, deps=[o.main]), None)
    else:
        return ColumnParts(*warpgroup_mma_wait(0, deps=[o.main, o.tail]))


@gluon.jit
def normalize_o(o, normalizer):
    main = o.main * gl.convert_layout(normalizer, gl.SliceLayout(1, o.main.type.layout))[:, None]
    if o.tail is None:
        return ColumnParts(main, None)
    else:
        return ColumnParts(main, o.tail * gl.convert_layout(normalizer, gl.SliceLayout(1, o.tail.type.layout))[:, None])


# ---------------------------------------------------------------- kernel


@gluon.jit
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, q_tail, k_tail, v_tail, o_tail, pointers, launch_params, traits: gl.constexpr
):
    """TMA descriptors of the main and the tail columns (None where there are none): of [B, H, S, D], or for packed
    layouts and key ranges wrapping ones (`tma.tma_coordinates`). pointers: Pointers; launch_params: LaunchParams
    (`device.forward_arguments`).
    """
    maps = InputMaps(ColumnParts(q_desc, q_tail), ColumnParts(k_desc, k_tail), ColumnParts(v_desc, v_tail))
    o_map = ColumnParts(o_desc, o_tail)
    ids_k = None
    if traits.mask.documents:
        ids_k = pointers.ranges.ids_k
    ranges, cache = pointers.ranges, pointers.cache
    k_scale, v_scale = None, None
    if traits.has_k_scale:
        k_scale = cache.k_scale
    if traits.has_v_scale:
        v_scale = cache.v_scale
    outputs = Outputs(o_map, pointers.lse, pointers.sinks, ids_k, k_scale, v_scale)
    cu_seqlens = CuSeqlens(pointers.cu_seqlens_q, pointers.cu_seqlens_k)
    workspace = Workspace(pointers.errors, pointers.tile_counter)
    launch = launch_params  # an assignment makes values of constants, which partitions can capture
    q_smem = allocate_tiles(traits.q_slots, maps.q)
    lost_words = None
    if traits.cached:
        dtype: gl.constexpr = maps.q.main.dtype
        k_smem = allocate_cached_tiles(traits.stages, dtype, traits.block_n, traits.main_d, traits.tail_d)
        v_smem = allocate_cached_tiles(traits.stages, dtype, traits.block_n, traits.main_dv, traits.tail_dv)
        if traits.has_pages:
            lost_words = allocate_lost_boxes(traits.stages)
    else:
        k_smem = allocate_tiles(traits.stages, maps.k)
        v_smem = allocate_tiles(traits.stages, maps.v)
    o_smem = allocate_tiles(traits.q_slots, o_map)
    work_pipe = WorkTilePipeline.create(ROWS, traits)
    q_pipe = Pipeline.create(q_smem, traits.consumers, 1)
    k_pipe = Pipeline.create(k_smem, traits.stages, traits.release_arrivals, traits.release_per_thread)
    v_pipe = Pipeline.create(v_smem, traits.stages, traits.release_arrivals, traits.release_per_thread)
    staging = None
    if traits.stages_keys:
        staging = StagingBuffers.create(STAGING_STAGES, traits)
    v_landed = v_pipe.full
    if traits.mask.documents:
        v_landed = ring(traits.stages, 1)
    pipes = Pipelines(work_pipe, q_pipe, k_pipe, v_pipe, v_landed, lost_words, staging)
    if traits.consumers == 4:
        warp_specialize(
            [
                (consumer, (gl.constexpr(0), outputs, pipes, o_smem, launch, traits)),
                (consumer, (gl.constexpr(1), outputs, pipes, o_smem, launch, traits)),
                (consumer, (gl.constexpr(2), outputs, pipes, o_smem, launch, traits)),
                (consumer, (gl.constexpr(3), outputs, pipes, o_smem, launch, traits)),
                (producer, (maps, cu_seqlens, ranges, cache, pipes, launch, workspace, traits)),
            ],
            [4, 4, 4, traits.producer_warps],
            traits.partition_registers,
        )
    elif traits.consumers == 3:
        warp_specialize(
            [
                (consumer, (gl.constexpr(0), outputs, pipes, o_smem, launch, traits)),
                (consumer, (gl.constexpr(1), outputs, pipes, o_smem, launch, traits)),
                (consumer, (gl.constexpr(2), outputs, pipes, o_smem, launch, traits)),
                (producer, (maps, cu_seqlens, ranges, cache, pipes, launch, workspace, traits)),
            ],
            [4, 4, traits.producer_warps],
            traits.partition_registers,
        )
    else:
        warp_specialize(
            [
                (consumer, (gl.constexpr(0), outputs, pipes, o_smem, launch, traits)),
                (consumer, (gl.constexpr(1), outputs, pipes, o_smem, launch, traits)),
                (producer, (maps, cu_seqlens, ranges, cache, pipes, launch, workspace, traits)),
            ],
            [4, traits.producer_warps],
            traits.partition_registers,
        )
