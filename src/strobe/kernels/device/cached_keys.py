"""Keys and values in a cache, as the producer of a forward loads them: pages of a pool, or rows of a dense cache.

A tile of block_n keys consists of boxes: one for each page in it, or one if a page holds the whole tile. TMA copies a
box of `box_rows` rows and zeroes those after the sequence's last key. With a left bound it zeroes those before the
first key that a query of the sequence sees instead, if there are any: a box has at most the rows of a window, so no box
has both. Rows that no query sees therefore reach no product.

The keys of a page whose id is not in the pool are hidden. Their box, a lost box, is zero, and the producer reports it.
The producer writes the lost boxes of each stage of K to a word, as bits, which the consumers read.

Descriptors wrap as those of packed sequences (`device.tma`). Their rows are those of the whole pool.

8-bit keys are not copied by TMA, but converted (`device.converted_keys`). Boxes then only say which keys are hidden.
"""

from ..runtime.error_flags import PAGES as _PAGES
from .dialect import Value, gl, gluon, mbarrier, partition_barrier, record, reinterpret, tma_load
from .split_kv import sequence_keys
from .tile_scheduler import read_words, warp_lanes, word
from .tma import FAR, ColumnParts, as_block

PAGES: gl.constexpr = gl.constexpr(_PAGES)


@record
class CachedKeys:
    """The keys of one head of one sequence."""

    page_ids: Value  # pointer to those of the sequence; None in a dense cache
    sequence: gl.tensor
    k_start: gl.tensor  # dense caches: the row of key 0
    first: gl.tensor  # the first key that a query of the sequence sees
    stop: gl.tensor  # one past the last key
    head: gl.tensor
    params: gl.tuple  # CacheParams

    @gluon.jit
    def of_tile(work, tensors, launch, errors, traits: gl.constexpr):
        """The keys of a work tile. tensors: CacheTensors."""
        seqlen, window, params = work.seqlen, launch.window, launch.cache
        sequence = seqlen.offset_k
        first = sequence * 0
        if traits.mask.left:
            first = gl.maximum(seqlen.seqlen_k - seqlen.seqlen_q - window.left, 0)
        page_ids, k_start = None, sequence * 0
        if traits.has_pages:
            page_ids = tensors.page_table + sequence.to(gl.int64) * params.max_pages
        else:
            capacity = launch.shape.seqlen_k
            k_start, _ = sequence_keys(tensors.seqlens, tensors.k_start, sequence, capacity, errors, traits)
        return CachedKeys(page_ids, sequence, k_start, first, seqlen.seqlen_k, work.head // traits.group, params)

    @gluon.jit
    def pages(self, n_start, traits: gl.constexpr):
        """Page ids of the boxes of the tile that begins at key n_start, one a lane; 0 for boxes that no query sees.
        n_start may lie outside the sequence.
        """
        lane = box_numbers(traits)
        if traits.has_pages:
            BOXES: gl.constexpr = traits.block_n // traits.box_rows
            n = n_start + lane * traits.box_rows
            is_read = (lane < BOXES) & (n >= 0) & (n < self.stop)
            if traits.mask.left:
                is_read = is_read & (n + traits.box_rows > self.first)
            return gl.load(self.page_ids + n // traits.page_size, mask=is_read, other=0)
        else:
            return lane * 0 + self.sequence

    @gluon.jit
    def lost_boxes(self, pages, traits: gl.constexpr):
        """Bits of the boxes whose page id is not in the pool."""
        if traits.has_pages:
            lane = box_numbers(traits)
            one = 1
            if pages.shape[0] > 32:
                one = gl.to_tensor(1).to(gl.int64)
            return gl.sum(gl.where((pages < 0) | (pages >= self.params.num_pages), one << lane, 0), 0)
        else:
            return gl.to_tensor(0)

    @gluon.jit
    def box_rows(self, pages, n_start, step, traits: gl.constexpr):
        """The first row of each box, one a lane. step: rows from one page, or one sequence, to the next."""
        n = n_start + gl.arange(0, 32, pages.type.layout) * traits.box_rows
        if traits.has_pages:
            in_pool = (pages >= 0) & (pages < self.params.num_pages)
            return gl.where(in_pool, pages, 0) * step + n % traits.page_size
        else:
            return pages * step + self.k_start + n

    @gluon.jit
    def load(self, pipe, state, desc, n_start, rows, lost, traits: gl.constexpr):
        """Copy the tile whose boxes `box_rows` found. desc: ColumnParts of descriptors of one box and few columns."""
        barrier, tile = pipe.full.index(state.index), pipe.tiles.index(state.index)
        BYTES: gl.constexpr = traits.block_n * tile.main.shape[-1] * 2
        if tile.tail is None:
            mbarrier.expect(barrier, BYTES)
        else:
            mbarrier.expect(barrier, BYTES + traits.block_n * tile.tail.shape[-1] * 2)
        self.load_part(desc.main, tile.main, barrier, 0, n_start, rows, lost, traits)
        if tile.tail is not None:
            self.load_part(desc.tail, tile.tail, barrier, tile.main.shape[-1], n_start, rows, lost, traits)

    @gluon.jit
    def load_part(self, desc, tile, barrier, column: gl.constexpr, n_start, rows, lost, traits: gl.constexpr):
        """A tile wider than its swizzle lies in shared memory block by block of columns, and rows of a block one after
        the other.
        """
        COLUMNS: gl.constexpr = desc.block_shape[-1]
        BLOCKS: gl.constexpr = tile.shape[-1] // COLUMNS
        BOXES: gl.constexpr = traits.block_n // traits.box_rows
        ROWS: gl.constexpr = traits.box_rows
        layout: gl.constexpr = gl.NVMMASharedLayout(2 * COLUMNS, 16, 2)
        boxes = reinterpret(tile, tile.dtype, [BLOCKS * BOXES, ROWS, COLUMNS], layout)
        lane = gl.arange(0, 32, rows.type.layout)
        for i in range(BOXES):
            row = gl.sum(gl.where(lane == i, rows, 0), 0)
            n = n_start + i * ROWS
            length = gl.minimum(gl.maximum(self.stop - n, 0), ROWS)
            skipped = self.first - n
            if traits.has_pages:
                length = gl.where((lost >> i) & 1 != 0, 0, length)
                if traits.mask.left:
                    length = gl.where(skipped >= ROWS, 0, length)
            wrap, begin = length * 0 + FAR, FAR - length  # the rows end where the tensor does
            stop = row + length
            if traits.mask.left:
                cuts_begin = (skipped > 0) & (length == ROWS)  # or begin where it does
                wrap, begin = gl.where(cuts_begin, 0, wrap), gl.where(cuts_begin, -skipped, begin)
                stop = gl.where(cuts_begin, row + skipped, stop)
            for block in gl.static_range(BLOCKS):
                place = [wrap, stop, self.head, begin, column + block * COLUMNS]
                tma_load(desc, place, barrier, as_block(boxes.index(block * BOXES + i), desc))


@gluon.jit
def box_numbers(traits: gl.constexpr):
    """0, 1, ...: one for each box, and at least one a lane. All warps of the role have the same."""
    if traits.block_n // traits.box_rows <= 32:
        return warp_lanes()
    else:
        BOXES: gl.constexpr = traits.block_n // traits.box_rows
        return gl.arange(0, BOXES, gl.BlockedLayout([BOXES // 32], [32], [gl.num_warps()], [0]))


@gluon.jit
def allocate_cached_tiles(
    count: gl.constexpr, dtype: gl.constexpr, block_n: gl.constexpr, main: gl.constexpr, tail: gl.constexpr
):
    """Shared memory for `count` tiles of block_n rows. A copy fills one box of a tile. main, tail: columns."""
    if tail == 0:
        return ColumnParts(_tiles(count, dtype, block_n, main), None)
    else:
        return ColumnParts(_tiles(count, dtype, block_n, main), _tiles(count, dtype, block_n, tail))


@gluon.jit
def _tiles(count: gl.constexpr, dtype: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
    return gl.allocate_shared_memory(dtype, [count, rows, columns], layout)


@gluon.jit
def allocate_lost_boxes(stages: gl.constexpr):
    """Words for each stage of K. The producer writes the bits of its lost boxes, and consumers read them."""
    return gl.allocate_shared_memory(gl.int32, [stages, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def tell_lost_boxes(words, state, lost, errors):
    """Write the lost boxes of a stage of K, before its tile is copied, and report them."""
    write_lost_boxes(words, state, lost, errors)
    partition_barrier()  # all lanes have stored before one arrives


@gluon.jit
def write_lost_boxes(words, state, lost, errors):
    """`tell_lost_boxes` for a caller with a barrier of its own."""
    gl.atomic_or(errors, PAGES, mask=lost != 0, sem="relaxed")
    bits = gl.full([4], 0, gl.int32, gl.BlockedLayout([4], [32], [gl.num_warps()], [0]))
    if lost.dtype == gl.int64:
        lane = gl.arange(0, 4, bits.type.layout)
        bits = gl.where(lane == 0, lost.to(gl.int32), (lost >> 32).to(gl.int32))
    else:
        bits = bits + lost
    words.index(state.index).store(bits)


@gluon.jit
def lost_boxes(words, state, traits: gl.constexpr):
    """Which boxes of K's stage are lost, as bits. Read it before the stage is released."""
    row = read_words(words, state.index)
    if traits.block_n // traits.box_rows <= 32:
        return word(row, 0)
    else:
        return (word(row, 1).to(gl.int64) << 32) | (word(row, 0).to(gl.int64) & 0xFFFFFFFF)


@gluon.jit
def hide_lost_boxes(s, lost, traits: gl.constexpr):
    """S [rows, block_n] with -inf for keys of lost boxes."""
    if lost != 0:
        column = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
        if traits.box_rows % 8 == 0:
            column = column & -8  # depends on the register alone
        s = gl.where((((lost >> (column // traits.box_rows)) & 1) == 0)[None, :], s, float("-inf"))
    return s
