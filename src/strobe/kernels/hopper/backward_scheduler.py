"""Which tile of keys a program of the Hopper backward takes next, and what it tells its other partitions of that.

Whoever is free takes the next number from a counter, as costs differ and so do SMs; rows_kernel has set the counter to 0. A number is asked for
when the last loads of the tile before are under way: sooner, a program would hold a tile that another could begin.
"""

from ..device.dialect import gl, gluon
from ..device.mask import first_row, stop_row
from ..device.seqlen import find_sequence, keys_of, span_of
from ..device.tile_scheduler import read_words, word

WORDS: gl.constexpr = gl.constexpr(16)  # of a tile on the board, of which 10 are told, and of spans (backward_key_ranges)
BACK: gl.constexpr = gl.constexpr(10)  # with form.last_sections: whether it is of them, 1 or 0
KEYS_SEEN: gl.constexpr = gl.constexpr(10)  # where its keys end that are seen
KEYS_WRITTEN: gl.constexpr = gl.constexpr(11)  # and those whose gradients are written: hidden ones have 0
PURE_BEGIN: gl.constexpr = gl.constexpr(12)  # of the tiles of queries the first without rows of other documents
PURE_STOP: gl.constexpr = gl.constexpr(13)  # and one past the last
WHOLE: gl.constexpr = gl.constexpr(-1)  # as the turn of a tile of dq: it is written already, and has no sum
PREFIX: gl.constexpr = gl.constexpr(15)  # how many keys of the entry all rows see


@gluon.jit
def next_number(counter):
    """The first is of the counter too: whoever waits for earlier tiles' turns then waits for programs that have begun."""
    return gl.atomic_add(counter, 1, sem="relaxed")


@gluon.jit
def keys_of_number(number, offsets, work, form: gl.constexpr):
    """(whether there is such a tile, what the partitions are told of it).

    Told: batch entry, part of heads, first key, first row, tiles of queries, number of the first head's first tile, q start, S_q, k start, S_k.
    A part is form.members query heads that share a key head. Starts are 0 in dense layouts. With form.last_sections, then whether the tile is of
    them.
    """
    BLOCK_M: gl.constexpr = form.tuning.block_m
    BLOCK_N: gl.constexpr = form.tuning.block_n
    tiles, sizes, limits, numbers, counter = work
    batch, heads, seqlen_q, seqlen_k, tiles_m, tiles_n, section = sizes
    left, right = limits
    parts = heads // form.members
    entry, q_start, k_start, back = number * 0, number * 0, number * 0, number * 0
    if form.packed:
        cu_seqlens_q, cu_seqlens_k = offsets
        sequence, n_block = find_sequence(cu_seqlens_k, from_end(number // parts, tiles_n, form), batch, seqlen_k, BLOCK_N)
        k_start, seqlen_k = span_of(cu_seqlens_k, sequence, batch, seqlen_k)
        q_start, seqlen_q = keys_of(cu_seqlens_q, sequence, batch, seqlen_q)
        part = number % parts
        first_tile = q_start // BLOCK_M + sequence  # device.seqlen.find_sequence
    else:
        entry, part, n_block, back = dense_keys(number, sizes, form)
        first_tile = entry * heads * tiles_m
    n_start = n_block * BLOCK_N
    bounds = (seqlen_k, left, right)
    m_begin = first_row(n_start, seqlen_q, bounds, 0, form) // BLOCK_M
    m_stop = stop_row(gl.minimum(n_start + BLOCK_N, seqlen_k) - 1, seqlen_q, bounds, form)
    blocks = gl.maximum(gl.cdiv(m_stop, BLOCK_M) - m_begin, 0)
    m_first = m_begin * BLOCK_M
    if form.last_sections:
        told = (entry, part, n_start, m_first, blocks, first_tile, q_start, seqlen_q, k_start, seqlen_k, back)
    else:
        told = (entry, part, n_start, m_first, blocks, first_tile, q_start, seqlen_q, k_start, seqlen_k)
    return n_start < seqlen_k, told


@gluon.jit
def dense_keys(number, sizes, form: gl.constexpr):
    """(batch entry, part of heads, tile of keys, whether it is of form.last_sections) of a tile's number in dense layouts: causal tiles go by falling
    cost, in sections of heads whose queries fit in L2; others go key by key within a head.

    Where form.ordered, keys go from the last to the first and queries from the first on: turns at a tile of dq then come a step and more apart, and a
    program waits for earlier ones only. But so the longest tiles would come last of all, and most SMs wait for a few of them. In the last
    sections keys go from the first to the last, and queries from the last on, which all their programs have in common: deterministic d64 1.025 to
    1.037 of the speed, d96 1.07, d128 1.06, 1k x 16 1.03, GQA 64/8 1.035 to 1.2 (H200).
    """
    parts, tiles_n, section = sizes[1] // form.members, sizes[5], sizes[6]
    back = number * 0
    if form.mask.right and not form.mask.left:
        begin = number // (tiles_n * section) * section
        count = gl.minimum(section, sizes[0] * parts - begin)
        if form.last_sections:
            last = gl.maximum(gl.cdiv(sizes[0] * parts, section) - form.last_sections, 0) * section
            back = (begin >= last).to(gl.int32)
            begin = gl.minimum(begin, last)
            count = gl.where(back == 1, sizes[0] * parts - last, count)
        within = number - begin * tiles_n
        place = within // count
        n_block = from_end(place, tiles_n, form)
        if form.last_sections:
            n_block = gl.where(back == 1, place, n_block)
        index = begin + within % count
    else:
        n_block = from_end(number % tiles_n, tiles_n, form)
        index = number // tiles_n
    return index // parts, index % parts, n_block, back


@gluon.jit
def from_end(place, places, form: gl.constexpr):
    if form.ordered:
        return places - 1 - place
    else:
        return place


@gluon.jit
def key_head(part, form: gl.constexpr):
    if form.splits > 1:
        return part // form.splits
    else:
        return part


@gluon.jit
def walk_of(blocks, back, form: gl.constexpr):
    """How a tile's queries are walked: (how many tiles of them a head has, whether from the last to the first)."""
    if form.last_sections:
        return (blocks, back)
    else:
        return (blocks, blocks)


@gluon.jit
def tile_of_step(step, walk, form: gl.constexpr):
    """Which of a head's tiles of queries a step takes: from the last, which all programs of a causal head have in common (d128 8k 555 TFLOP/s for
    542, H200), to the first; where programs take turns at dq as `dense_keys` says."""
    blocks, back = walk
    if form.last_sections:
        return step + back * (blocks - 1 - 2 * step)
    elif form.ordered:
        return step
    else:
        return blocks - 1 - step


@gluon.jit
def head_and_tile(part, step, walk, form: gl.constexpr):
    """(the query head, which of its tiles of queries) of a tile's `step`, which walks the tiles of queries head by head."""
    if form.members == 1:
        return part, tile_of_step(step, walk, form)
    else:
        return part * form.members + step // walk[0], tile_of_step(step % walk[0], walk, form)


@gluon.jit
def seen_and_walk(words, row: gl.constexpr, limits, form: gl.constexpr):
    """((the consumer's key that the first row has on the diagonal, keys from the consumer's first on, of spans the first tile of queries without rows
    of others, one past the last, and keys that all rows see, or with form.finishes `finished` and whether other tiles of keys come before this
    one), `walk_of` its queries); the consumer's keys begin with the tile's key `row`."""
    told = read_words(words, 0)
    n_start, seqlen_k = word(told, 2) + row, word(told, 9)
    keys = word(told, KEYS_SEEN) if form.spans else seqlen_k
    diagonal = word(told, 3) + (seqlen_k - word(told, 7)) - n_start
    walk = walk_of(word(told, 4), word(told, BACK), form)
    if form.spans:
        return (diagonal, keys - n_start, word(told, PURE_BEGIN), word(told, PURE_STOP), word(told, PREFIX) - n_start), walk
    elif form.finishes:
        return (diagonal, keys - n_start, finished(told, limits, form), word(told, 2) > 0), walk
    else:
        return (diagonal, keys - n_start), walk


@gluon.jit
def finished(told, limits, form: gl.constexpr):
    """Of a head's tiles of queries that a tile of keys walks, how many see no keys behind its own, from the first on: their dq is whole with its
    share, where its keys are the first, or (form.collects) with what those before have added."""
    m_first, seqlen_q, seqlen_k = word(told, 3), word(told, 7), word(told, 9)
    n_stop = word(told, 2) + form.tuning.block_n
    tiles = gl.where(seqlen_k <= n_stop, word(told, 4), 0)
    if form.mask.right:
        rows = n_stop - (seqlen_k - seqlen_q) - limits[1] - m_first
        tiles = gl.maximum(tiles, rows // form.tuning.block_m)
    if form.collects:
        return tiles
    else:
        return gl.where(word(told, 2) == 0, tiles, 0)


@gluon.jit
def read_place(words, form: gl.constexpr):
    """((part of heads, first row, `walk_of` its queries, number of the first head's first tile), first key, (S_q, S_k), (entry, start, length)), the
    last of the keys whose gradients are written."""
    told = read_words(words, 0)
    steps = (word(told, 1), word(told, 3), walk_of(word(told, 4), word(told, BACK), form), word(told, 5))
    length = word(told, KEYS_WRITTEN) if form.spans else word(told, 9)
    return steps, word(told, 2), (word(told, 7), word(told, 9)), (word(told, 0), word(told, 8), length)


@gluon.jit
def rows_finished(words, limits, form: gl.constexpr):
    """(`finished`, (entry, start, length) of the queries)."""
    told = read_words(words, 0)
    return finished(told, limits, form), (word(told, 0), word(told, 6), word(told, 7))
