"""Which tile of keys a program of the Hopper backward takes next, which tiles of queries see it, and how the producer
hands it to the other roles.

    tile counter --tile_index--> producer: TileScheduler.get_current_work
                                   |
                                 publish      waits tile_empty, writes the tile's words, signals tile_full
                                   |
                                   +--> consumers, store warps: wait_published, receive, consumer_release (tile_empty)

A program takes the next tile from a counter, because costs differ and so do SMs; rows_kernel has set the counter to 0.
It asks when the last loads of its tile are in flight. If it asked sooner, it would hold a tile that another program
could begin.

Key ranges (documents, key lengths, prefixes): a tile of keys belongs to one document. The keys of a tile index are
processed run by run, as the forward's queries are (`device.key_ranges`). TMA descriptors wrap, so that no key of
another document is read and no gradient of one is written. Keys beyond an entry's length are not read either; their
gradients are written as 0.
"""

from ..device.dialect import Value, gl, gluon, mbarrier, partition_barrier, record
from ..device.forward_mask import SeqlenInfo
from ..device.key_ranges import PURE, prefix_of, tile_at
from ..device.mask import first_row, stop_row
from ..device.seqlen import find_sequence, keys_of, span_of
from ..device.tile_scheduler import END, NUM_BLOCKS, FourWordRows, read_words, word
from ..device.tma import HeadRows

# Words of a published tile, in the order of `publish`, that are read by name.
DENSE_OFFSET_K: gl.constexpr = gl.constexpr(8)
FROM_LAST: gl.constexpr = gl.constexpr(10)
NUM_KEYS: gl.constexpr = gl.constexpr(10)
NUM_KEYS_WRITTEN: gl.constexpr = gl.constexpr(11)
PURE_BEGIN: gl.constexpr = gl.constexpr(12)
SEQUENCE: gl.constexpr = gl.constexpr(12)
PURE_STOP: gl.constexpr = gl.constexpr(13)
PREFIX: gl.constexpr = gl.constexpr(15)
DQ_WRITTEN: gl.constexpr = gl.constexpr(-1)  # as the semaphore of a tile of dQ: it is written already, and has no sum


# ---------------------------------------------------------------- what a work tile is


@record
class BlockInfo:
    """The tiles of queries that a tile of keys visits, contiguous, head by head. `QueryBlockList` is used like it."""

    num_m_blocks: gl.tensor  # of a head
    from_last: Value  # reversed sections: 1 for the last m_block first, else 0; None elsewhere

    @gluon.jit
    def m_block(self, step, traits: gl.constexpr):
        """The m_block of a head's step, counted from the work tile's first. Deterministic: the first first, as
        `dense_key_tile` says. Else the last first, which all programs of a causal head have in common (d128 8k 555
        TFLOP/s for 542, H200).
        """
        if traits.reversed_sections > 0:
            return step + self.from_last * (self.num_m_blocks - 1 - 2 * step)
        elif traits.deterministic:
            return step
        else:
            return self.num_m_blocks - 1 - step


@record
class QueryBlockList:
    """The tiles of queries that a tile of keys visits, from the call's lists, which the heads of a program share.

    Full blocks come first, then partial ones, each from the last to the first, as `BlockInfo` has them.
    """

    num_m_blocks: gl.tensor  # of a head
    num_partial: gl.tensor
    q_indices: gl.tensor  # pointers to the tile's rows of the lists
    full_q_indices: Value
    from_last: Value  # None, as in BlockInfo

    @gluon.jit
    def of_tile(entry, head, n_start, seqlen_q, lists, traits: gl.constexpr):
        """entry: the batch entry or the packed sequence, which has seqlen_q queries."""
        n_block = n_start // traits.block_n
        if traits.packed:  # a sequence longer than promised, whose results are NaN
            n_block = gl.minimum(n_block, lists.num_n_blocks - 1)
        row = entry * lists.stride_batch + head * lists.stride_head + n_block
        num_partial = listed_blocks(lists.q_num_blocks + row, seqlen_q, lists, traits)
        first = row.to(gl.int64) * lists.most_blocks
        count, full_q_indices = num_partial, None
        if traits.has_full_blocks:
            count += listed_blocks(lists.full_q_num_blocks + row, seqlen_q, lists, traits)
            full_q_indices = lists.full_q_indices + first
        return QueryBlockList(count, num_partial, lists.q_indices + first, full_q_indices, None)

    @gluon.jit
    def m_block(self, step, traits: gl.constexpr):
        i = self.num_m_blocks - 1 - step
        if traits.has_full_blocks:
            partial = gl.load(self.q_indices + i, mask=i < self.num_partial, other=0)
            full = gl.load(self.full_q_indices + (i - self.num_partial), mask=i >= self.num_partial, other=0)
            return partial + full
        else:
            return gl.load(self.q_indices + i)

    @gluon.jit
    def is_full(self, step):
        """Whether the list says that every row sees every key."""
        return self.num_m_blocks - 1 - step >= self.num_partial


@gluon.jit
def listed_blocks(pointer, seqlen_q, lists, traits: gl.constexpr):
    """A count of a list. Packed keys outside every sequence have no list, and no query."""
    count = gl.minimum(gl.maximum(gl.load(pointer), 0), lists.most_blocks)
    if traits.packed:
        count = gl.where(seqlen_q > 0, count, 0)
    return count


@record
class QueryTile:
    """One tile of queries that a work tile visits."""

    head: gl.tensor
    m_block: gl.tensor  # counted from the work tile's first
    m_start: gl.tensor  # its first row in the sequence
    index: gl.tensor  # among all tiles of queries: where its LSE, delta and dQ's sum are


@record
class DocumentRows:
    """The rows of a work tile's document, and which of its m_blocks have no rows of other documents."""

    q_start: gl.tensor
    q_stop: gl.tensor
    pure_begin: gl.tensor
    pure_stop: gl.tensor
    document: gl.tensor  # PURE, or an id where rows of other documents lie among the document's own

    @gluon.jit
    def has_foreign_rows(self, m_block):
        return (m_block < self.pure_begin) | (m_block >= self.pure_stop)


@record
class WorkTile:
    """Keys n_start .. of one key head of one sequence, for a part of the query heads of its group, and the tiles of
    queries that see them.
    """

    is_valid: gl.tensor
    batch: gl.tensor
    head_part: gl.tensor  # traits.heads_per_program query heads that share a key head
    n_start: gl.tensor
    m_start: gl.tensor  # first row of the first m_block; with block lists 0
    blocks: Value  # BlockInfo or QueryBlockList
    first_m_tile: gl.tensor  # index of the first head's first tile of queries, among all
    seqlen: SeqlenInfo  # num_keys: where the keys end that any row sees
    num_keys_written: gl.tensor  # where the keys end whose gradients are written
    rows: DocumentRows | gl.constexpr  # key ranges; else None
    next_row: Value  # key ranges: the row within this tile index with which a further tile begins, or 0; else None
    sequence: Value  # packed: index of the sequence for functions of scores and runs over shared keys; else None

    @gluon.jit
    def entry(self, traits: gl.constexpr):
        """The batch entry, or the packed sequence."""
        if traits.numbers_sequences:
            return self.sequence
        else:
            return self.batch

    @gluon.jit
    def num_steps(self, traits: gl.constexpr):
        return traits.heads_per_program * self.blocks.num_m_blocks

    @gluon.jit
    def query_tile(self, step, shape, traits: gl.constexpr):
        """The tile of queries of a step of this work tile."""
        if traits.heads_per_program == 1:
            head, m_block = self.head_part, self.blocks.m_block(step, traits)
        else:
            head = self.head_part * traits.heads_per_program + step // self.blocks.num_m_blocks
            m_block = self.blocks.m_block(step % self.blocks.num_m_blocks, traits)
        m_start = self.m_start + m_block * traits.block_m
        return QueryTile(
            head, m_block, m_start, self.first_m_tile + head * shape.num_m_blocks + m_start // traits.block_m
        )

    @gluon.jit
    def head_kv(self, traits: gl.constexpr):
        if traits.group_splits > 1:
            return self.head_part // traits.group_splits
        else:
            return self.head_part

    @gluon.jit
    def q_rows(self, stride, shape, traits: gl.constexpr):
        """Rows of Q, dO or dQ of the first head; with key ranges, batch entries are `stride` rows apart."""
        offset = self.seqlen.offset_q
        if traits.key_ranges:
            offset = self.batch * stride
        return HeadRows(self.batch, offset, self.seqlen.seqlen_q, self.head_part, shape.heads)

    @gluon.jit
    def k_rows(self, stride, num_keys, shape, traits: gl.constexpr):
        """Rows of K, V, dK or dV, of which num_keys are read or written, but for the head (`head_kv`)."""
        offset = self.seqlen.offset_k
        if traits.key_ranges:
            offset = self.batch * stride
        return HeadRows(self.batch, offset, num_keys, self.head_part, shape.heads)

    @gluon.jit
    def whole_m_blocks(self, window, traits: gl.constexpr):
        """Of the m_blocks of a head, how many see no keys after this tile's, from the first on: their dQ is whole with
        its part. The tile must have the first keys, or (dq_last_writer_converts) add what earlier tiles have summed.
        """
        seqlen = self.seqlen
        n_stop = self.n_start + traits.block_n
        whole = gl.where(seqlen.seqlen_k <= n_stop, self.blocks.num_m_blocks, 0)
        if traits.mask.right:
            rows = n_stop - (seqlen.seqlen_k - seqlen.seqlen_q) - window.right - self.m_start
            whole = gl.maximum(whole, rows // traits.block_m)
        if traits.dq_last_writer_converts:
            return whole
        else:
            return gl.where(self.n_start == 0, whole, 0)


# ---------------------------------------------------------------- which tile


@record
class TileScheduler:
    """The tiles of one program, as the tile counter hands them out."""

    tile_index: gl.tensor
    row: Value  # key ranges: where in the keys of this index the next tile begins; else None

    @gluon.jit
    def start(counter, traits: gl.constexpr):
        tile_index = next_tile_index(counter)
        return TileScheduler(tile_index, tile_index * 0 if traits.key_ranges else None)

    @gluon.jit
    def advance_after(self, work, counter, traits: gl.constexpr):
        """The next tile; with key ranges of the same index if there is one."""
        if traits.key_ranges:
            tile_index = self.tile_index
            if work.next_row == 0:
                tile_index = next_tile_index(counter)
            return TileScheduler(tile_index, work.next_row)
        else:
            return TileScheduler(next_tile_index(counter), None)

    @gluon.jit
    def get_current_work(self, cu_seqlens, ranges, launch, traits: gl.constexpr):
        if traits.key_ranges:
            return range_work_tile(self.tile_index, self.row, ranges, launch, traits)
        else:
            return work_tile(self.tile_index, cu_seqlens, launch, traits)


@gluon.jit
def next_tile_index(counter):
    """The first index is of the counter too: who waits for earlier tiles' semaphores waits for programs that run."""
    return gl.atomic_add(counter, 1, sem="relaxed")


@gluon.jit
def work_tile(tile_index, cu_seqlens, launch, traits: gl.constexpr):
    """A tile of dense or packed layouts. Offsets are 0 in dense ones."""
    shape, window = launch.shape, launch.window
    seqlen_q, seqlen_k = shape.seqlen_q, shape.seqlen_k
    zero = tile_index * 0
    batch, offset_q, offset_k, from_last, index = zero, zero, zero, None, None
    head_parts = shape.heads // traits.heads_per_program
    if traits.packed:
        in_order = from_end(tile_index // head_parts, shape.num_n_blocks, traits)
        sequence, n_block = find_sequence(cu_seqlens.k, in_order, shape.batch, seqlen_k, traits.block_n)
        offset_k, seqlen_k = span_of(cu_seqlens.k, sequence, shape.batch, seqlen_k)
        offset_q, seqlen_q = keys_of(cu_seqlens.q, sequence, shape.batch, seqlen_q)
        head_part = tile_index % head_parts
        first_m_tile = offset_q // traits.block_m + sequence  # device.seqlen.find_sequence
        if traits.numbers_sequences or traits.runs:
            index = gl.minimum(gl.maximum(sequence - 1, 0), shape.batch - 1)
    else:
        place = dense_key_tile(tile_index, shape, traits)
        batch, head_part, n_block, from_last = place.batch, place.head_part, place.n_block, place.from_last
        first_m_tile = batch * shape.heads * shape.num_m_blocks
    n_start = n_block * traits.block_n
    bounds = (seqlen_k, window.left, window.right)
    m_begin = first_row(n_start, seqlen_q, bounds, 0, traits) // traits.block_m
    m_stop = stop_row(gl.minimum(n_start + traits.block_n, seqlen_k) - 1, seqlen_q, bounds, traits)
    blocks = BlockInfo(gl.maximum(gl.cdiv(m_stop, traits.block_m) - m_begin, 0), from_last)
    m_start = m_begin * traits.block_m
    if traits.has_block_lists:
        head, m_start = head_part * traits.heads_per_program, zero
        entry = index if traits.packed else batch
        blocks = QueryBlockList.of_tile(entry, head, n_start, seqlen_q, launch.hooks.block_lists, traits)
    seqlen = SeqlenInfo(offset_q, zero + seqlen_q, offset_k, zero + seqlen_k, zero + seqlen_k, 0)
    return WorkTile(
        n_start < seqlen_k,
        batch,
        head_part,
        n_start,
        m_start,
        blocks,
        first_m_tile,
        seqlen,
        zero + seqlen_k,
        None,
        None,
        index,
    )


@record
class KeyTilePlace:
    batch: gl.tensor
    head_part: gl.tensor
    n_block: gl.tensor
    from_last: Value  # see BlockInfo


@gluon.jit
def dense_key_tile(tile_index, shape, traits: gl.constexpr):
    """The place of a tile index in dense layouts. Causal tiles come by falling cost, in sections of heads whose queries
    fit in L2; others come key by key within a head.

    Deterministic: keys come from the last to the first and queries from the first on. Semaphores of a tile of dQ then
    come a step and more apart, and a program waits for earlier programs only. But the longest tiles would come last of
    all, and most SMs would wait for a few of them. In the last sections (`reversed_sections`) keys come from the first
    to the last and queries from the last on, which all their programs have in common: deterministic d64 1.025 to 1.037
    of the speed, d96 1.07, d128 1.06, 1k x 16 1.03, GQA 64/8 1.035 to 1.2 (H200).
    """
    head_parts, tiles, section = shape.heads // traits.heads_per_program, shape.num_n_blocks, shape.l2_head_parts
    from_last = None
    if traits.orders_by_cost:
        begin = tile_index // (tiles * section) * section
        count = gl.minimum(section, shape.batch * head_parts - begin)
        if traits.reversed_sections > 0:
            last = gl.maximum(gl.cdiv(shape.batch * head_parts, section) - traits.reversed_sections, 0) * section
            from_last = (begin >= last).to(gl.int32)
            begin = gl.minimum(begin, last)
            count = gl.where(from_last == 1, shape.batch * head_parts - last, count)
        within = tile_index - begin * tiles
        place = within // count
        n_block = from_end(place, tiles, traits)
        if traits.reversed_sections > 0:
            n_block = gl.where(from_last == 1, place, n_block)
        index = begin + within % count
    else:
        n_block = from_end(tile_index % tiles, tiles, traits)
        index = tile_index // tiles
    return KeyTilePlace(index // head_parts, index % head_parts, n_block, from_last)


@gluon.jit
def from_end(place, places, traits: gl.constexpr):
    if traits.deterministic:
        return places - 1 - place
    else:
        return place


@gluon.jit
def range_work_tile(tile_index, row, ranges, launch, traits: gl.constexpr):
    """The tile with which the keys of an index go on at `row`: keys of one run of a document (`device.key_ranges`)."""
    shape, window = launch.shape, launch.window
    seqlen_q, seqlen_k = shape.seqlen_q, shape.seqlen_k
    place = dense_key_tile(tile_index, shape, traits)
    batch = place.batch
    found = tile_at(tile_index >= 0, batch, place.n_block, row, 1, ranges, shape, traits.block_n, traits)
    q_start, q_stop, document = found.others
    num_keys = found.stop
    if traits.mask.key_lengths:  # the forward has reported lengths that are out of range
        num_keys = gl.minimum(num_keys, gl.maximum(gl.load(ranges.key_lengths + batch), 0))
    bounds, prefix = (seqlen_k, window.left, window.right), prefix_of(ranges.prefixes, batch, seqlen_k, traits)
    m_begin = gl.maximum(first_row(found.start, seqlen_q, bounds, prefix, traits), q_start) // traits.block_m
    m_stop = gl.minimum(stop_row(num_keys - 1, seqlen_q, bounds, traits), q_stop)
    m_blocks = gl.where(num_keys > found.start, gl.maximum(gl.cdiv(m_stop, traits.block_m) - m_begin, 0), 0)
    first_m_tile = batch * shape.heads * shape.num_m_blocks
    whole = gl.where(q_stop == seqlen_q, m_begin + m_blocks, q_stop // traits.block_m)  # there are no rows after S_q
    pure_begin = gl.cdiv(q_start, traits.block_m) - m_begin
    pure_stop = gl.where(document == PURE, whole - m_begin, 0)
    rows = DocumentRows(q_start, q_stop, pure_begin, pure_stop, document)
    m_start, zero = m_begin * traits.block_m, tile_index * 0
    seqlen = SeqlenInfo(zero, zero + seqlen_q, zero, zero + seqlen_k, num_keys, prefix)
    blocks = BlockInfo(m_blocks, None)
    return WorkTile(
        found.exists,
        batch,
        place.head_part,
        found.start,
        m_start,
        blocks,
        first_m_tile,
        seqlen,
        found.stop,
        rows,
        found.next_row,
        None,
    )


# ---------------------------------------------------------------- from the producer to the others


@record
class WorkTilePipeline:
    """One slot in which the producer publishes work tiles."""

    words: gl.shared_memory_descriptor  # [1, WORDS] int32
    full: Value
    empty: Value

    @gluon.jit
    def publish(self, state, work, traits: gl.constexpr):
        seqlen, rows = work.seqlen, work.rows
        slot = self._acquire(state)
        slot.store(0, work.batch, work.head_part, work.n_start, work.m_start)
        if traits.key_ranges:
            slot.store(1, work.blocks.num_m_blocks, work.first_m_tile, rows.q_start, seqlen.seqlen_q)
            slot.store(2, rows.q_stop, seqlen.seqlen_k, seqlen.num_keys, work.num_keys_written)
            slot.store(3, rows.pure_begin, rows.pure_stop, rows.document, seqlen.prefix)
        else:
            slot.store(1, work.blocks.num_m_blocks, work.first_m_tile, seqlen.offset_q, seqlen.seqlen_q)
            slot.store(2, seqlen.offset_k, seqlen.seqlen_k, work.blocks.from_last, None)
            slot.store(3, work.sequence, None, None, None)
        self._commit(state)

    @gluon.jit
    def publish_end(self, state, unread):
        """There are no more tiles. Others read one word of the slot; the words before it hold `unread`."""
        slot = self._acquire(state)
        slot.store(0, unread, unread, unread, unread)
        slot.store(1, unread * 0 + END, None, None, None)
        slot.store(2, None, None, None, None)
        slot.store(3, None, None, None, None)
        self._commit(state)

    @gluon.jit
    def _acquire(self, state):
        slot = FourWordRows.of_slot(self.words, state.index)
        mbarrier.wait(self.empty.index(state.index), state.phase ^ 1)
        return slot

    @gluon.jit
    def _commit(self, state):
        partition_barrier()  # all lanes have stored before one arrives
        mbarrier.arrive(self.full.index(state.index))

    @gluon.jit
    def wait_published(self, state):
        """Wait for the next tile; whether there is one."""
        mbarrier.wait(self.full.index(state.index), state.phase)
        return word(read_words(self.words, state.index), NUM_BLOCKS) >= 0

    @gluon.jit
    def receive(self, launch, traits: gl.constexpr):
        """The tile that has been published. Block lists are read again."""
        row = read_words(self.words, 0)
        offset_q, offset_k, num_keys, num_keys_written, prefix = (
            word(row, 6),
            word(row, 8),
            word(row, 9),
            word(row, 9),
            0,
        )
        from_last, rows = None, None
        if traits.key_ranges:
            rows = DocumentRows(word(row, 6), word(row, 8), word(row, PURE_BEGIN), word(row, PURE_STOP), word(row, 14))
            offset_q, offset_k = offset_q * 0, offset_k * 0
            num_keys, num_keys_written, prefix = word(row, NUM_KEYS), word(row, NUM_KEYS_WRITTEN), word(row, PREFIX)
        elif traits.reversed_sections > 0:
            from_last = word(row, FROM_LAST)
        sequence = None
        if traits.numbers_sequences:
            sequence = word(row, SEQUENCE)
        blocks = BlockInfo(word(row, NUM_BLOCKS), from_last)
        seqlen = SeqlenInfo(offset_q, word(row, 7), offset_k, word(row, 9), num_keys, prefix)
        batch = word(row, 0)
        if traits.has_block_lists:
            head, n_start = word(row, 1) * traits.heads_per_program, word(row, 2)
            entry = sequence if traits.packed else batch
            blocks = QueryBlockList.of_tile(entry, head, n_start, seqlen.seqlen_q, launch.hooks.block_lists, traits)
        return WorkTile(
            batch >= 0,
            batch,
            word(row, 1),
            word(row, 2),
            word(row, 3),
            blocks,
            word(row, 5),
            seqlen,
            num_keys_written,
            rows,
            None,
            sequence,
        )

    @gluon.jit
    def consumer_release(self):
        mbarrier.arrive(self.empty.index(0))
