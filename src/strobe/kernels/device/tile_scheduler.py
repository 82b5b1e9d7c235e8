"""Which tile a persistent program takes next, and the board on which its producer tells its consumers.

A `form` says: tuning (block_m, block_n), mask, packed, own_queries (of those who walk keys by themselves), and counted: whether tiles are taken from
a counter.
"""

from .dialect import gl, gluon, mbarrier, partition_barrier, reinterpret
from .mask import row_interval
from .seqlen import OUTSIDE, find_sequence, keys_of, span_of

WORDS: gl.constexpr = gl.constexpr(8)  # of a forward tile on the board


@gluon.jit
def tile_number(turn, counter, form: gl.constexpr):
    """The number of a program's tile `turn` in the order of all tiles.

    Whoever is free takes the next from a counter: costs differ, and so do SMs. Without a counter a program's tiles stand apart by the number of
    programs: each has one at most, or all cost the same.
    """
    programs = gl.num_programs(0)
    if form.counted:
        if turn == 0:
            number = gl.program_id(0)
        else:
            number = programs + gl.atomic_add(counter, 1, sem="relaxed")
    else:
        number = turn * programs + gl.program_id(0)
    return number


@gluon.jit
def tile_of(number, offsets, sizes, limits, form: gl.constexpr):
    """(whether there is such a tile, what consumers are told of it, (k start, S_k) of its keys).

    Told: batch entry, query head, first row, first key block, key blocks, q start, S_q, S_k. Starts are 0 in dense layouts. Tiles that
    see most keys come first; causal dense ones in sections of heads whose keys and values stay in L2 together.
    """
    BLOCK_M: gl.constexpr = form.tuning.block_m
    batch, heads, seqlen_q, seqlen_k, tiles_m, section = sizes
    entry, q_start, k_start = number * 0, number * 0, number * 0
    if form.packed:
        cu_seqlens_q, cu_seqlens_k = offsets
        head = number % heads
        linear = tiles_m - 1 - number // heads
        sequence, m_block = find_sequence(cu_seqlens_q, linear, batch, seqlen_q, BLOCK_M)
        q_start, seqlen_q = span_of(cu_seqlens_q, sequence, batch, seqlen_q)
        k_start, seqlen_k = keys_of(cu_seqlens_k, sequence, batch, seqlen_k, OUTSIDE)
        exists = m_block * BLOCK_M < seqlen_q
    else:
        exists, entry, head, m_block = dense_place(number, sizes, form)
    m_start = m_block * BLOCK_M - rows_before(seqlen_q, form)
    n_begin, blocks = blocks_of(m_start, BLOCK_M, (seqlen_q, seqlen_k), limits, form)
    return exists, (entry, head, m_start, n_begin, blocks, q_start, seqlen_q, seqlen_k), (k_start, seqlen_k)


@gluon.jit
def rows_before(seqlen_q, form: gl.constexpr):
    """How many rows the first tile of a sequence has before its first. Where rows see the more keys the later they come, consumers that find no rows
    are those of the first tile, not of the last: 1,300 causal rows in tiles of 256 1.07 times as fast (d64, H200)."""
    before = seqlen_q * 0
    if form.mask.right and not form.mask.left and form.own_queries < form.tuning.block_m:
        before = (gl.cdiv(seqlen_q, form.tuning.block_m) * form.tuning.block_m - seqlen_q) // form.own_queries * form.own_queries
    return before


@gluon.jit
def dense_place(number, sizes, form: gl.constexpr):
    """(whether there is such a tile, batch entry, query head, tile of rows) of a tile's number in dense layouts."""
    batch, heads, tiles_m, section = sizes[0], sizes[1], sizes[4], sizes[5]
    if (form.mask.right or form.mask.prefix) and not form.mask.left:
        within = number % (tiles_m * section)
        m_block = tiles_m - 1 - within // section
        index = number // (tiles_m * section) * section + within % section
    else:
        m_block = number % tiles_m
        index = number // tiles_m
    return index < batch * heads, index // heads, index % heads, m_block


@gluon.jit
def blocks_of(m_start, rows: gl.constexpr, lengths, limits, form: gl.constexpr):
    """(first key block, key blocks) that some row of m_start .. m_start + rows - 1 sees."""
    return blocks_within(m_start, rows, lengths, lengths[1], limits, 0, form)


@gluon.jit
def blocks_within(m_start, rows: gl.constexpr, lengths, key_stop, limits, prefix, form: gl.constexpr):
    """The same where keys end at key_stop, all rows see the first `prefix` of them, and S_k says where the diagonal is."""
    seqlen_q, seqlen_k = lengths
    bounds = (seqlen_k, limits[0], limits[1])
    n_first, full_stop = row_interval(m_start, seqlen_q, key_stop, bounds, prefix, form)
    full_first, n_stop = row_interval(gl.minimum(m_start + rows, seqlen_q) - 1, seqlen_q, key_stop, bounds, prefix, form)
    n_begin = n_first // form.tuning.block_n
    blocks = gl.maximum(gl.cdiv(n_stop, form.tuning.block_n) - n_begin, 0)
    return n_begin, gl.where(m_start < seqlen_q, blocks, 0)


@gluon.jit
def tell(board, at, tile):
    """Write a tile's numbers for the consumers to read, the fifth of which is never negative; a negative one says that there are no more tiles."""
    words, told, told_free = board[0], board[1], board[2]
    fours = in_fours(words)
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    lane = gl.arange(0, 4, layout)
    mbarrier.wait(told_free.index(at.stage), at.parity ^ 1)
    for n in gl.static_range(words.shape[-1] // 4):
        row = lane * 0
        for i in gl.static_range(4):
            if 4 * n + i < len(tile):
                row = gl.where(lane == i, tile[4 * n + i], row)
        fours.index(at.stage * (words.shape[-1] // 4) + n).store(row)  # all: rows are read whole
    partition_barrier()  # all lanes store, one arrives
    mbarrier.arrive(told.index(at.stage))


@gluon.jit
def in_fours(words):
    """The board's memory in rows of four numbers. A row of sixteen is made by as many selects of sixteen, which MLIR takes apart number by number: of
    d64 causal's canonicalization 0.6 of 0.7 s."""
    return reinterpret(words, gl.int32, [words.shape[0] * words.shape[-1] // 4, 4], words.type.layout)


@gluon.jit
def read_words(words, stage):
    """A tile's numbers as a row; `word` has each."""
    layout: gl.constexpr = gl.BlockedLayout([words.shape[-1]], [32], [gl.num_warps()], [0])
    return words.index(stage).load(layout)


@gluon.jit
def word(row, i: gl.constexpr):
    """The i-th number of a row, as a scalar."""
    return gl.sum(gl.where(gl.arange(0, row.shape[0], row.type.layout) == i, row, 0), 0)


@gluon.jit
def read_tile(words, stage):
    """A forward tile's numbers, each as a scalar."""
    row = read_words(words, stage)
    return [word(row, i) for i in (0, 1, 2, 3, 4, 5, 6, 7)]


@gluon.jit
def is_told(words, told, at):
    """Wait for the next tile; whether there is one."""
    mbarrier.wait(told.index(at.stage), at.parity)
    return word(read_words(words, at.stage), 4) >= 0
