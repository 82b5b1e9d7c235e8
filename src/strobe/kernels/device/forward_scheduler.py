"""Persistent tile scheduler of the forwards, and the pipeline by which their producer hands work tiles to the
consumers.

    producer    publish(state, work)       waits tile_empty, writes the tile's words, signals tile_full
    consumers   wait_published, receive    wait tile_full, read them; consumer_release signals tile_empty

A tile that a consumer flags is published once more (`tile_redo`).
"""

from .dialect import Value, gl, gluon, mbarrier, partition_barrier, record
from .forward_mask import BlockInfo, BlockList, SeqlenInfo
from .key_ranges import prefix_of, tile_at
from .pack_gqa import heads_of
from .pipeline import ring
from .seqlen import (
    LONG_K,
    LONG_Q,
    OFFSETS_K,
    OFFSETS_Q,
    OUTSIDE,
    find_sequence,
    first_key,
    guard_offsets,
    key_limit,
    keys_of,
    span_of,
)
from .split_kv import sequence_keys
from .tile_redo import RedoFlags, RedoRequest
from .tile_scheduler import END, NUM_BLOCKS, WORDS, FourWordRows, read_words, warp_lanes, word
from .tma import HeadRows

# Words of a published tile, in the order of `publish`, that are read by name. A dense or packed tile without redo has 8
# words: a packed tile, whose batch is 0, has its sequence in word 0.
REDO: gl.constexpr = gl.constexpr(8)
OFFSET_K: gl.constexpr = gl.constexpr(9)
NUM_KEYS: gl.constexpr = gl.constexpr(10)
DOCUMENT: gl.constexpr = gl.constexpr(11)
PREFIX: gl.constexpr = gl.constexpr(12)
SEQUENCE: gl.constexpr = gl.constexpr(13)


@record
class WorkTile:
    """Rows m_start .. of one head of one sequence, and the key blocks that any of them sees. With block lists,
    n_block_min is the number of partial blocks.

    m_start is a row, not a block number: causal tiles end with a sequence's last row, so the first may begin before row
    0.
    """

    is_valid: gl.tensor
    batch: gl.tensor
    head: gl.tensor
    m_start: gl.tensor
    n_block_min: gl.tensor
    num_n_blocks: gl.tensor
    seqlen: SeqlenInfo
    document: gl.tensor  # PURE, or the document of all rows, whose keys other documents' keys lie among
    next_row: gl.tensor  # key ranges: the row within this tile index with which a further tile begins, or 0
    sequence: Value  # packed: index of the sequence where a hook asks for it, else None

    @gluon.jit
    def blocks(self, launch, traits: gl.constexpr):
        if traits.has_block_lists:
            entry, q_start = self.entry(traits), self.q_start(launch.shape, traits)
            return BlockList.of_tile(
                self.n_block_min, self.num_n_blocks, entry, self.head, q_start, launch.hooks.block_lists, traits
            )
        else:
            return BlockInfo(self.n_block_min, self.num_n_blocks)

    @gluon.jit
    def entry(self, traits: gl.constexpr):
        """The batch entry, or the packed sequence."""
        if traits.numbers_sequences:
            return self.sequence
        else:
            return self.batch

    @gluon.jit
    def q_start(self, shape, traits: gl.constexpr):
        """m_start, counted from the first row of the batch entry also where rows lie in key ranges."""
        m_start = self.m_start
        if traits.key_ranges:
            m_start += self.seqlen.offset_q - self.batch * shape.seqlen_q
        return m_start

    @gluon.jit
    def with_listed_blocks(self, launch, traits: gl.constexpr):
        """The same tile with the blocks of its list, if the call has lists."""
        if traits.has_block_lists:
            entry, q_start = self.entry(traits), self.q_start(launch.shape, traits)
            sees_keys = self.is_valid & (self.m_start < self.seqlen.seqlen_q) & (self.seqlen.num_keys > 0)
            num_partial, count = BlockList.counts(
                entry, self.head, q_start, sees_keys, launch.hooks.block_lists, traits
            )
            is_valid, batch, head, m_start = self.is_valid, self.batch, self.head, self.m_start
            return WorkTile(
                is_valid,
                batch,
                head,
                m_start,
                num_partial,
                count,
                self.seqlen,
                self.document,
                self.next_row,
                self.sequence,
            )
        else:
            return self

    @gluon.jit
    def or_end(self, more):
        """This tile, or unless there are `more` the end, whose number of blocks is negative."""
        num_n_blocks = gl.where(more, self.num_n_blocks, END)
        is_valid, batch, head, m_start = self.is_valid, self.batch, self.head, self.m_start
        return WorkTile(
            is_valid,
            batch,
            head,
            m_start,
            self.n_block_min,
            num_n_blocks,
            self.seqlen,
            self.document,
            self.next_row,
            self.sequence,
        )

    @gluon.jit
    def o_rows(self, shape):
        return HeadRows(self.batch, self.seqlen.offset_q, self.seqlen.seqlen_q, self.head, shape.heads)

    @gluon.jit
    def q_rows(self, shape, traits: gl.constexpr):
        offset = self.seqlen.offset_q
        if traits.key_ranges:
            offset = offset + self.batch * shape.gap_q
        return HeadRows(self.batch, offset, self.seqlen.seqlen_q, self.head, shape.heads)

    @gluon.jit
    def kv_rows(self, gap, shape, traits: gl.constexpr):
        """Rows of K or V, whose batch entries have `gap` rows between them."""
        offset = self.seqlen.offset_k
        if traits.key_ranges:
            offset = offset + self.batch * gap
        return HeadRows(self.batch, offset, self.seqlen.num_keys, self.head // traits.group, shape.heads)

    @gluon.jit
    def consumer_m_start(self, consumer, slot, traits: gl.constexpr):
        """The first row of a consumer; past the end if it would be before row 0, where TMA may not store."""
        place = consumer
        if traits.swap_consumers:  # in every other tile, so that the longest rows are not always the same consumer's
            place = gl.where(slot == 0, consumer, traits.consumers - 1 - consumer)
        m_start = self.m_start + place * traits.queries_per_consumer
        if traits.ends_with_last_row:
            m_start = gl.where(m_start < 0, self.seqlen.seqlen_q, m_start)
        return m_start

    @gluon.jit
    def heads_of_rows(self, row, query, traits: gl.constexpr):
        """(query head of each row of a consumer, whether the row exists)."""
        return heads_of(row, self.head, query < self.seqlen.seqlen_q, traits)


# ---------------------------------------------------------------- which tile


@record
class TileScheduler:
    """The tiles of one program: every num_programs-th, or, where tiles differ in cost, the one that the tile counter
    hands out.
    """

    turn: gl.tensor
    tile_index: gl.tensor
    row: Value  # key ranges: where in the rows of this index the next tile begins; else None

    @gluon.jit
    def start(counter, traits: gl.constexpr):
        turn = gl.to_tensor(0)
        tile_index = tile_index_of(turn, counter, traits)
        return TileScheduler(turn, tile_index, tile_index * 0 if traits.key_ranges else None)

    @gluon.jit
    def advance(self, num_tiles, counter, traits: gl.constexpr):
        tile_index = tile_index_of(self.turn + 1, counter, traits)
        if traits.dynamic_scheduler:
            if tile_index == num_tiles + gl.num_programs(0) - 1:  # the last index that any program asks for
                gl.atomic_xchg(counter, 0, sem="relaxed")
        return TileScheduler(self.turn + 1, tile_index, self.row)

    @gluon.jit
    def advance_after(self, work, num_tiles, counter, traits: gl.constexpr):
        """Key ranges: the next tile of the same index if there is one."""
        scheduler = TileScheduler(self.turn, self.tile_index, work.next_row)
        if work.next_row == 0:
            scheduler = scheduler.advance(num_tiles, counter, traits)
        return scheduler

    @gluon.jit
    def get_current_work(self, cu_seqlens, ranges, launch, errors, traits: gl.constexpr):
        """Tiles that see most keys come first."""
        if traits.key_ranges:
            return range_work_tile(self.tile_index, self.row, ranges, launch, errors, traits)
        elif traits.packed:
            return packed_work_tile(self.tile_index, cu_seqlens, launch, traits)
        else:
            return dense_work_tile(self.tile_index, launch, traits)


@gluon.jit
def tile_index_of(turn, counter, traits: gl.constexpr):
    programs = gl.num_programs(0)
    if traits.dynamic_scheduler:
        if turn == 0:
            tile_index = gl.program_id(0)
        else:
            tile_index = programs + gl.atomic_add(counter, 1, sem="relaxed")
    else:
        tile_index = turn * programs + gl.program_id(0)
    return tile_index


@gluon.jit
def blocks_in_order(tile_index, shape, traits: gl.constexpr):
    """(batch * heads + head, m_block) of a tile in dense layouts. Causal tiles come in sections of heads whose keys and
    values stay in L2.
    """
    if traits.longest_tiles_first:
        section = shape.num_m_blocks * shape.l2_heads
        within = tile_index % section
        m_block = shape.num_m_blocks - 1 - within // shape.l2_heads
        batch_head = tile_index // section * shape.l2_heads + within % shape.l2_heads
    else:
        m_block = tile_index % shape.num_m_blocks
        batch_head = tile_index // shape.num_m_blocks
    return batch_head, m_block


@gluon.jit
def dense_work_tile(tile_index, launch, traits: gl.constexpr):
    shape = launch.shape
    batch_head, m_block = blocks_in_order(tile_index, shape, traits)
    is_valid = batch_head < shape.batch * shape.heads
    zero = tile_index * 0
    seqlen = SeqlenInfo(zero, zero + shape.seqlen_q, zero, zero + shape.seqlen_k, zero + shape.seqlen_k, 0)
    return work_tile(
        is_valid, batch_head // shape.heads, batch_head % shape.heads, m_block, seqlen, None, launch, traits
    )


@gluon.jit
def packed_work_tile(tile_index, cu_seqlens, launch, traits: gl.constexpr):
    shape = launch.shape
    head = tile_index % shape.heads
    tile = shape.num_m_blocks - 1 - tile_index // shape.heads
    sequence, m_block = find_sequence(cu_seqlens.q, tile, shape.batch, shape.seqlen_q, traits.block_m)
    offset_q, seqlen_q = span_of(cu_seqlens.q, sequence, shape.batch, shape.seqlen_q)
    offset_k, seqlen_k = keys_of(cu_seqlens.k, sequence, shape.batch, shape.seqlen_k, OUTSIDE)
    offset_k = first_key(cu_seqlens.k, sequence, shape.batch, offset_k, traits.runs)
    is_valid = m_block * traits.block_m < seqlen_q
    seqlen = SeqlenInfo(offset_q, seqlen_q, offset_k, seqlen_k, seqlen_k, 0)
    index = None
    if traits.numbers_sequences:
        index = gl.minimum(gl.maximum(sequence - 1, 0), shape.batch - 1)  # rows outside every sequence see no key
    return work_tile(is_valid, tile_index * 0, head, m_block, seqlen, index, launch, traits)


@gluon.jit
def cached_work_tile(tile_index, num_tiles, cu_seqlens, cache, launch, errors, traits: gl.constexpr):
    """A tile of packed queries over a cache. cache: CacheTensors. offset_k is the index of the sequence."""
    shape = launch.shape
    head = tile_index % shape.heads
    tile = (num_tiles - 1 - tile_index) // shape.heads
    sequence, m_block = sequence_of_tile(cu_seqlens.q, cache, tile, launch, traits)
    offset_q, seqlen_q = span_of(cu_seqlens.q, sequence, shape.batch, shape.seqlen_q)
    inside, index = (sequence > 0) & (sequence <= shape.batch), gl.minimum(gl.maximum(sequence - 1, 0), shape.batch - 1)
    _, num_keys = sequence_keys(cache.seqlens, cache.k_start, index, shape.seqlen_k, errors, traits)
    num_keys = gl.where(inside, num_keys, OUTSIDE)
    seqlen = SeqlenInfo(offset_q, seqlen_q, index, num_keys, num_keys, 0)
    is_valid = m_block * traits.block_m < seqlen_q
    return work_tile(
        is_valid, tile_index * 0, head, m_block, seqlen, index if traits.numbers_sequences else None, launch, traits
    )


@gluon.jit
def row_tiles(cu_seqlens_q, cache, sequence, launch, traits: gl.constexpr):
    """Number of tiles of a head for each of 32 sequences; 0 for those that another launch runs: of few tokens, or with
    a copy of their keys.
    """
    n, total = launch.shape.batch, launch.shape.seqlen_q
    _, tokens = span_of(cu_seqlens_q, sequence, n, total)
    inside = (sequence > 0) & (sequence <= n)
    runs_elsewhere = inside & (tokens <= launch.cache.few_tokens)
    if traits.copies_keys:
        is_copied = gl.load(cache.is_copied + sequence - 1, mask=inside, other=0) != 0
        runs_elsewhere = ~is_copied if traits.in_copy else runs_elsewhere | is_copied
    return gl.where((sequence < n + 2) & ~runs_elsewhere, gl.cdiv(tokens, traits.block_m), 0)


@gluon.jit
def count_cached_tiles(cu_seqlens_q, cache, launch, traits: gl.constexpr):
    """The number of tiles of all heads: a batch may have many sequences of few tokens, which take none."""
    lane = warp_lanes()
    tiles = lane * 0
    for begin in range(0, launch.shape.batch + 2, 32):
        tiles += row_tiles(cu_seqlens_q, cache, begin + lane, launch, traits)
    return gl.sum(tiles, 0) * launch.shape.heads


@gluon.jit
def sequence_of_tile(cu_seqlens_q, cache, tile, launch, traits: gl.constexpr):
    """(sequence, block within it) of a tile, which exists."""
    lane = warp_lanes()
    begin, tiles = tile * 0, row_tiles(cu_seqlens_q, cache, lane, launch, traits)
    count = gl.sum(tiles, 0)
    while (tile >= count) & (begin <= launch.shape.batch):  # the next 32 sequences
        tile -= count
        begin += 32
        tiles = row_tiles(cu_seqlens_q, cache, begin + lane, launch, traits)
        count = gl.sum(tiles, 0)
    low, high = begin * 0, begin * 0 + 31
    for _ in range(5):
        middle = (low + high) // 2
        is_after = gl.sum(gl.where(lane <= middle, tiles, 0), 0) <= tile
        low, high = gl.where(is_after, middle + 1, low), gl.where(is_after, high, middle)
    return begin + low, tile - gl.sum(gl.where(lane < low, tiles, 0), 0)


@gluon.jit
def work_tile(is_valid, batch, head, m_block, seqlen, sequence, launch, traits: gl.constexpr):
    m_start = m_block * traits.block_m - rows_before_first(seqlen.seqlen_q, traits)
    blocks = BlockInfo.of_rows(m_start, traits.block_m, seqlen, launch.window, traits)
    zero = head * 0
    work = WorkTile(is_valid, batch, head, m_start, blocks.n_block_min, blocks.count, seqlen, zero, zero, sequence)
    return work.with_listed_blocks(launch, traits)


@gluon.jit
def rows_before_first(seqlen_q, traits: gl.constexpr):
    """Causal: the consumers without rows are those of the first tile, which sees fewest keys (1,300 rows: 1.07 times as
    fast, d64, H200).
    """
    before = seqlen_q * 0
    if traits.ends_with_last_row and traits.queries_per_consumer < traits.block_m:
        unused = gl.cdiv(seqlen_q, traits.block_m) * traits.block_m - seqlen_q
        before = unused // traits.queries_per_consumer * traits.queries_per_consumer
    return before


@gluon.jit
def range_work_tile(tile_index, row, ranges, launch, errors, traits: gl.constexpr):
    """The tile with which the rows of an index go on at `row`: rows of one key range (`device.key_ranges`), counted
    from the range's first row.
    """
    shape = launch.shape
    batch_head, m_block = blocks_in_order(tile_index, shape, traits)
    is_valid = batch_head < shape.batch * shape.heads
    batch, head = batch_head // shape.heads, batch_head % shape.heads
    found = tile_at(is_valid, batch, m_block, row, 0, ranges, shape, traits.block_m, traits)
    k_start, k_stop, document = found.others
    if traits.mask.key_lengths:
        k_stop = gl.minimum(k_stop, key_limit(ranges.key_lengths, batch, shape.seqlen_k, errors, True))
    prefix = prefix_of(ranges.prefixes, batch, shape.seqlen_k, traits) - k_start
    rows, num_keys = found.stop - found.start, gl.maximum(k_stop - k_start, 0)
    diagonal_k = rows + found.start - k_start + shape.seqlen_k - shape.seqlen_q
    zero = tile_index * 0
    counted = SeqlenInfo(zero, rows, zero, diagonal_k, num_keys, prefix)
    blocks = BlockInfo.of_rows(zero, traits.block_m, counted, launch.window, traits)
    seqlen = SeqlenInfo(
        batch * shape.seqlen_q + found.start, rows, batch * shape.seqlen_k + k_start, diagonal_k, num_keys, prefix
    )
    work = WorkTile(
        found.exists, batch, head, zero, blocks.n_block_min, blocks.count, seqlen, document, found.next_row, None
    )
    return work.with_listed_blocks(launch, traits)


@gluon.jit
def check_cu_seqlens(cu_seqlens, launch, errors):
    """The producer of one program reports offsets that fall or leave the tensor, and sequences longer than promised."""
    if gl.program_id(0) == 0:
        lanes = warp_lanes()
        shape, window = launch.shape, launch.window
        guard_offsets(cu_seqlens.q, shape.batch, shape.seqlen_q, window.max_seqlen_q, lanes, errors, OFFSETS_Q, LONG_Q)
        if cu_seqlens.k is not None:
            guard_offsets(
                cu_seqlens.k, shape.batch, shape.seqlen_k, window.max_seqlen_k, lanes, errors, OFFSETS_K, LONG_K
            )


# ---------------------------------------------------------------- from the producer to the consumers


@record
class WorkTilePipeline:
    """Two slots in which the producer publishes work tiles, and redo flags beside them."""

    words: gl.shared_memory_descriptor  # [2, WORDS or 8] int32
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    redo_flags: RedoFlags | gl.constexpr  # or None

    @gluon.jit
    def create(rows: gl.constexpr, traits: gl.constexpr):
        words = gl.allocate_shared_memory(gl.int32, [2, WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        full, empty = ring(2, 1), ring(2, traits.consumers)
        if traits.can_redo:
            return WorkTilePipeline(words, full, empty, RedoFlags.create(2, rows))
        else:
            return WorkTilePipeline(words, full, empty, None)

    # ------------------------------------------------ producer

    @gluon.jit
    def publish(self, state, work, redo, traits: gl.constexpr):
        seqlen, slot = work.seqlen, FourWordRows.of_slot(self.words, state.index)
        self.producer_acquire(state)
        slot.store(0, work.batch, work.head, work.m_start, work.n_block_min)
        slot.store(1, work.num_n_blocks, seqlen.offset_q, seqlen.seqlen_q, seqlen.seqlen_k)
        if traits.key_ranges:
            slot.store(2, redo.pending, seqlen.offset_k, seqlen.num_keys, work.document)
            slot.store(3, seqlen.prefix, None, None, None)
        else:
            slot.store(2, redo.pending, seqlen.offset_k, None, None)
            slot.store(3, None, work.sequence, None, None)
        self.producer_commit(state)

    @gluon.jit
    def publish_dense(self, state, work, traits: gl.constexpr):
        """A tile of a kernel without key ranges and redo, or its end, in 8 words."""
        seqlen, slot = work.seqlen, FourWordRows.of_slot(self.words, state.index)
        self.producer_acquire(state)
        slot.store(0, work.entry(traits), work.head, work.m_start, work.n_block_min)
        slot.store(1, work.num_n_blocks, seqlen.offset_q, seqlen.seqlen_q, seqlen.seqlen_k)
        self.producer_commit(state)

    @gluon.jit
    def publish_end(self, state, unread):
        """There are no more tiles. Consumers read one word of the slot; the others hold `unread`."""
        slot = FourWordRows.of_slot(self.words, state.index)
        self.producer_acquire(state)
        slot.store(0, unread, unread, unread, unread)
        slot.store(1, END, unread, unread, unread)
        slot.store(2, None, None, None, None)
        slot.store(3, None, None, None, None)
        self.producer_commit(state)

    @gluon.jit
    def producer_acquire(self, state):
        mbarrier.wait(self.empty.index(state.index), state.phase ^ 1)

    @gluon.jit
    def producer_commit(self, state):
        partition_barrier()  # all lanes have stored before one arrives
        mbarrier.arrive(self.full.index(state.index))

    @gluon.jit
    def poll_redo(self, state, more, traits: gl.constexpr):
        """Once consumers have released the slot at `state`: whether its tile needs a redo. Behind the last tile, the
        other slot's too. The tile is published again at `state`.
        """
        self.producer_acquire(state)
        pending, slot = self.redo_flags.any(state.index, traits.consumers), state.index
        if (pending == 0) & ~more:
            last = state.advance()
            self.producer_acquire(last)
            pending, slot = self.redo_flags.any(last.index, traits.consumers), last.index
        return RedoRequest(pending, slot)

    @gluon.jit
    def take_redo(self, redo, traits: gl.constexpr):
        """The tile of a pending request, whose flags are cleared."""
        work = self._read(redo.slot, traits)
        row = read_words(self.words, redo.slot)
        seqlen, document = work.seqlen, redo.slot * 0
        if traits.key_ranges:
            offset_k, num_keys, prefix = word(row, OFFSET_K), word(row, NUM_KEYS), word(row, PREFIX)
            seqlen = SeqlenInfo(seqlen.offset_q, seqlen.seqlen_q, offset_k, seqlen.seqlen_k, num_keys, prefix)
            document = word(row, DOCUMENT)
        else:
            seqlen = SeqlenInfo(
                seqlen.offset_q, seqlen.seqlen_q, word(row, OFFSET_K), seqlen.seqlen_k, seqlen.seqlen_k, 0
            )
        partition_barrier()  # all lanes have read
        self.redo_flags.clear(redo.slot, traits.consumers)
        partition_barrier()  # all lanes have cleared before one publishes
        valid, next_row = redo.slot >= 0, redo.slot * 0
        return WorkTile(
            valid,
            work.batch,
            work.head,
            work.m_start,
            work.n_block_min,
            work.num_n_blocks,
            seqlen,
            document,
            next_row,
            work.sequence,
        )

    # ------------------------------------------------ consumers

    @gluon.jit
    def wait_published(self, state):
        """Wait for the next tile; whether there is one."""
        mbarrier.wait(self.full.index(state.index), state.phase)
        return word(read_words(self.words, state.index), NUM_BLOCKS) >= 0

    @gluon.jit
    def receive(self, state, traits: gl.constexpr):
        """The tile, without what `receive_range` and `receive_document` read: reading a word again costs less than a
        register that holds it.
        """
        return self._read(state.index, traits)

    @gluon.jit
    def receive_range(self, state, work, traits: gl.constexpr):
        """The tile's SeqlenInfo, without offset_k."""
        seqlen = work.seqlen
        num_keys, prefix = seqlen.seqlen_k, gl.to_tensor(0)
        if traits.key_ranges:
            num_keys = word(read_words(self.words, state.index), NUM_KEYS)
        if traits.mask.prefix:
            prefix = word(read_words(self.words, state.index), PREFIX)
        return SeqlenInfo(seqlen.offset_q, seqlen.seqlen_q, seqlen.offset_k, seqlen.seqlen_k, num_keys, prefix)

    @gluon.jit
    def receive_document(self, state):
        """(document of the rows, offset_k)."""
        row = read_words(self.words, state.index)
        return word(row, DOCUMENT), word(row, OFFSET_K)

    @gluon.jit
    def is_redo(self, state):
        return word(read_words(self.words, state.index), REDO)

    @gluon.jit
    def consumer_release(self, state):
        mbarrier.arrive(self.empty.index(state.index))

    @gluon.jit
    def _read(self, slot, traits: gl.constexpr):
        row = read_words(self.words, slot)
        batch, head, m_start = word(row, 0), word(row, 1), word(row, 2)
        n_block_min, num_n_blocks = word(row, 3), word(row, 4)
        offset_q, seqlen_q, seqlen_k = word(row, 5), word(row, 6), word(row, 7)
        seqlen = SeqlenInfo(offset_q, seqlen_q, gl.to_tensor(0), seqlen_k, seqlen_k, 0)
        sequence = None
        if traits.numbers_sequences:
            if self.words.shape[1] == WORDS:
                sequence = word(row, SEQUENCE)
            else:
                sequence, batch = batch, gl.to_tensor(0)
        return WorkTile(
            gl.to_tensor(True),
            batch,
            head,
            m_start,
            n_block_min,
            num_n_blocks,
            seqlen,
            gl.to_tensor(0),
            gl.to_tensor(0),
            sequence,
        )
