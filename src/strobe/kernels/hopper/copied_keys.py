"""A copy of 8-bit keys and values in q's dtype, for sequences with many new tokens. In Triton.

A forward that converts keys itself does so in each work tile, beside the products. Long prefills then reach 0.65 to
0.79 of the speed over 16-bit keys. Their work tiles read the same keys, so one conversion to memory costs less.

A copied tile has KEYS keys of one sequence. With a left bound, a sequence's first copied tile is the one with the first
key that a query sees. The copy is a pool of pages, in which the copied tiles of a sequence follow each other. Sequences
are copied in order, until one does not fit; one that is larger than the copy is passed over. Each program finds that
out from the lengths. Keys that no query of the sequence sees are not read, and are zero in the copy. A page outside the
pool stays outside: its id in the copy's page table is -1.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..runtime.error_flags import K_START as _K_START
from ..runtime.error_flags import SEQLENS as _SEQLENS
from .copy_config import COPIED_TILE as _COPIED_TILE

K_START = tl.constexpr(_K_START)
SEQLENS = tl.constexpr(_SEQLENS)
KEYS = tl.constexpr(_COPIED_TILE)
LANES = tl.constexpr(128)


class CopyTensors(NamedTuple):
    """What is read, and what is written: pools [pages, rows, H_kv, columns], int32 tensors."""

    k: Any  # float8_e4m3fn
    v: Any
    page_table: Any  # [B, max_pages], or None
    seqlens: Any  # [B]
    k_start: Any  # [B], or None
    cu_seqlens_q: Any  # [B + 1]
    k_scale: Any  # [H_kv] float32, or None
    k_copy: Any  # contiguous
    v_copy: Any
    copy_table: Any  # [B, pages of a sequence]
    is_copied: Any  # [B]: 1 for sequences in the copy, else 0
    key_counts: Any  # [B]: number of keys of a sequence


class CopySizes(NamedTuple):
    """Sizes, int32."""

    batch: Any
    total_q: Any
    heads_kv: Any
    capacity: Any  # keys of a sequence
    max_pages: Any  # of a sequence; 0 in a dense cache
    num_pages: Any  # of the pool
    table_width: Any  # of copy_table
    least_tokens: Any  # new tokens of a sequence that is copied
    most_tiles: Any  # copied tiles for which there is room
    left: Any  # bound of the window
    k_strides: Any  # PoolStrides in bytes
    v_strides: Any


class Lengths(NamedTuple):
    """Of sequences, a vector each."""

    tokens: Any
    start: Any  # row of key 0 in a dense cache
    keys: Any
    errors: Any  # bits to report


class CopiedTile(NamedTuple):
    """Where a tile of the copy comes from."""

    sequence: Any
    number: Any  # among the tiles of the sequence
    exists: Any


@triton.jit
def lengths_of(tensors, sizes, sequence, traits: tl.constexpr):
    """Lengths of sequences, clamped; 0 beyond the batch."""
    inside = sequence < sizes.batch
    begin = tl.load(tensors.cu_seqlens_q + sequence, mask=inside, other=0)
    end = tl.load(tensors.cu_seqlens_q + sequence + 1, mask=inside, other=0)
    begin = tl.minimum(tl.maximum(begin, 0), sizes.total_q)
    tokens = tl.maximum(tl.minimum(tl.maximum(end, 0), sizes.total_q) - begin, 0)
    length = tl.load(tensors.seqlens + sequence, mask=inside, other=0)
    stop = tl.minimum(tl.maximum(length, 0), sizes.capacity)
    errors = tl.where(stop != length, SEQLENS, 0)
    start = stop * 0
    if traits.k_start:
        given = tl.load(tensors.k_start + sequence, mask=inside, other=0)
        start = tl.minimum(tl.maximum(given, 0), stop)
        errors = errors | tl.where(start != given, K_START, 0)
    return Lengths(tokens, start, stop - start, errors)


@triton.jit
def first_key(lengths, sizes, traits: tl.constexpr):
    """The first key that a query of the sequence sees."""
    first = lengths.keys * 0
    if traits.left:
        first = tl.maximum(lengths.keys - lengths.tokens - sizes.left, 0)
    return first


@triton.jit
def copied_tiles(tensors, sizes, begin, traits: tl.constexpr):
    """(tiles that each of LANES sequences wants, their Lengths)."""
    lengths = lengths_of(tensors, sizes, begin + tl.arange(0, LANES), traits)
    tiles = (lengths.keys + KEYS - 1) // KEYS - first_key(lengths, sizes, traits) // KEYS
    is_wanted = (lengths.tokens >= sizes.least_tokens) & (tiles <= sizes.most_tiles)
    return tl.where(is_wanted, tiles, 0), lengths


@triton.jit
def find_copied_tile(tensors, sizes, tile, traits: tl.constexpr):
    """The CopiedTile with this number."""
    sequence = tile * 0
    first = tile * 0
    end = tile * 0
    stop = tile * 0
    for begin in range(0, sizes.batch, LANES):
        wanted, _ = copied_tiles(tensors, sizes, begin, traits)
        ends = end + tl.cumsum(wanted, 0)
        is_before = ends <= tile
        sequence += tl.sum(is_before.to(tl.int32), 0)
        first = tl.maximum(first, tl.max(tl.where(is_before, ends, 0), 0))
        stop = tl.maximum(stop, tl.max(tl.where(ends <= sizes.most_tiles, ends, 0), 0))
        end = tl.max(ends, 0)
    return CopiedTile(tl.minimum(sequence, sizes.batch - 1), tile - first, tile < stop)


@triton.jit
def write_which_are_copied(tensors, sizes, errors, traits: tl.constexpr):
    """Write is_copied and key_counts, and report lengths that were clamped. One program does it for all."""
    end = 0
    for begin in range(0, sizes.batch, LANES):
        sequence = begin + tl.arange(0, LANES)
        wanted, lengths = copied_tiles(tensors, sizes, begin, traits)
        ends = end + tl.cumsum(wanted, 0)
        fits = (wanted > 0) & (ends <= sizes.most_tiles)
        tl.store(tensors.is_copied + sequence, fits.to(tl.int32), mask=sequence < sizes.batch)
        tl.store(tensors.key_counts + sequence, lengths.keys, mask=sequence < sizes.batch)
        tl.atomic_or(errors, SEQLENS, mask=tl.max(lengths.errors & SEQLENS, 0) != 0, sem="relaxed")
        tl.atomic_or(errors, K_START, mask=tl.max(lengths.errors & K_START, 0) != 0, sem="relaxed")
        end = tl.max(ends, 0)


@triton.jit
def copy_tile(tensors, sizes, source, tile, head, is_v, traits: tl.constexpr):
    """Copy K or V of one head. tile: its number in the copy; source: CopiedTile."""
    sequence, number, _ = source
    lengths = lengths_of(tensors, sizes, sequence, traits)
    first = first_key(lengths, sizes, traits)
    n_start = (first // KEYS + number) * KEYS
    n = n_start + tl.arange(0, KEYS)
    is_seen = (n >= first) & (n < lengths.keys)
    in_pool = n >= 0
    if traits.page_size:
        pages = tensors.page_table + sequence.to(tl.int64) * sizes.max_pages
        is_read = (n // traits.page_size * traits.page_size + traits.page_size > first) & (n < lengths.keys)
        page = tl.load(pages + n // traits.page_size, mask=is_read, other=0)
        in_pool = (page >= 0) & (page < sizes.num_pages)
        page, row = tl.where(in_pool, page, 0), n % traits.page_size
    else:
        page, row = n * 0 + sequence, lengths.start + n
    if (head == 0) & (is_v == 0):
        write_copied_pages(tensors, sizes, sequence, n_start, tile, in_pool, traits)
    row_copy = (tile.to(tl.int64) * KEYS + tl.arange(0, KEYS)) * sizes.heads_kv + head
    page, row, head = page.to(tl.int64), row.to(tl.int64), head.to(tl.int64)
    if is_v == 0:
        rows = row_offsets(page, row, head, sizes.k_strides)
        sign = 1.0
        if traits.k_scale:
            sign = tl.where(tl.load(tensors.k_scale + head) < 0, -1.0, 1.0)
        copy_rows(tensors.k, rows, is_seen & in_pool, tensors.k_copy, row_copy, sign, traits.head_dim)
    else:
        rows = row_offsets(page, row, head, sizes.v_strides)
        copy_rows(tensors.v, rows, is_seen & in_pool, tensors.v_copy, row_copy, 1.0, traits.head_dim_v)


@triton.jit
def row_offsets(page, row, head, strides):
    """Where rows of a head begin in the pool, in elements, as multiples of 16. page, row, head: int64."""
    return tl.multiple_of(page * strides.page + row * strides.row + head * strides.head, 16)


@triton.jit
def write_copied_pages(tensors, sizes, sequence, n_start, tile, in_pool, traits: tl.constexpr):
    """The copied tile's entries of the page table: the rows that begin a page write them."""
    rows = tl.arange(0, KEYS)
    table = tensors.copy_table + sequence.to(tl.int64) * sizes.table_width + (n_start + rows) // traits.page_copy
    number = (tile * KEYS + rows) // traits.page_copy
    tl.store(table, tl.where(in_pool, number, -1), mask=rows % traits.page_copy == 0)


@triton.jit
def copy_rows(pool, rows, exists, copy, rows_copy, sign, width: tl.constexpr):
    """rows: where they begin in the pool; rows_copy: their numbers in the copy."""
    BLOCK: tl.constexpr = triton.next_power_of_2(width)
    columns = tl.arange(0, BLOCK)
    pointers = pool + rows[:, None] + columns[None, :]
    values = tl.load(pointers, mask=exists[:, None] & (columns < width)[None, :], other=0.0)
    values = (values.to(tl.float32) * sign).to(copy.dtype.element_ty)
    tl.store(copy + rows_copy[:, None] * width + columns[None, :], values, mask=(columns < width)[None, :])


@triton.jit
def copy_keys_kernel(tensors, sizes, errors, traits: tl.constexpr):
    """Programs take copied tiles in turn: K and V of each head have programs of their own."""
    program = tl.program_id(0)
    units = 2 * sizes.heads_kv
    head, is_v = program % units // 2, program % 2
    if program == 0:
        write_which_are_copied(tensors, sizes, errors, traits)
    tile = program // units
    source = find_copied_tile(tensors, sizes, tile, traits)
    while source.exists:
        copy_tile(tensors, sizes, source, tile, head, is_v, traits)
        tile += tl.num_programs(0) // units
        source = find_copied_tile(tensors, sizes, tile, traits)
