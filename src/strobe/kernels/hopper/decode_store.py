"""What the Hopper decode writes: finished rows, or a split's partial result, and the partial results combined.

A partial result is the normalized O of a split and its log-sum-exp. The partial results of a tile follow each other,
in the order of the splits.
"""

from ..device.dialect import gl, gluon
from ..device.split_kv import add_sink, combine_step, combined_factor
from .decode_layouts import combine_layout, row_layout

# ---------------------------------------------------------------- finished rows


@gluon.jit
def as_rows(o, lse_log2, traits: gl.constexpr):
    """(O [M, D_v], lse_log2 [M]) of O^T [D_v, M], in the layout of stores."""
    layout: gl.constexpr = row_layout(traits.block_dv, traits.warps)
    return gl.convert_layout(gl.permute(o, (1, 0)), layout), gl.convert_layout(lse_log2, gl.SliceLayout(1, layout))


@gluon.jit
def rows_of_tile(tile, count: gl.constexpr, o, traits: gl.constexpr):
    """The first `count` rows of a tile, counted from the key head's first, as the rows of `o` lie."""
    return tile.block * traits.block_m + gl.arange(0, count, gl.SliceLayout(1, o.type.layout))


@gluon.jit
def token_exists(token, tile, traits: gl.constexpr):
    """Which tokens of TileRows exist."""
    exists = token < tile.tokens
    if traits.ragged:
        exists = exists & (token >= tile.first_token)
    return exists


@gluon.jit
def write_rows(outputs, o, lse_log2, tile, row, strides, traits: gl.constexpr):
    """Rows of TileRows that have seen all their keys, with their sinks, to out and lse."""
    columns = gl.arange(0, traits.block_dv, gl.SliceLayout(0, o.type.layout))
    token, head_q = row // traits.group, tile.head * traits.group + row % traits.group
    exists = token_exists(token, tile, traits)
    sink = lse_log2
    if traits.sinks:
        sink = gl.load(outputs.sinks + head_q, mask=exists, other=0.0)
    o, row_lse = add_sink(o, lse_log2, sink, traits)
    entry = tile.batch.to(gl.int64) * strides.batch
    offsets = entry + token.to(gl.int64) * strides.row + head_q.to(gl.int64) * strides.head
    mask = exists[:, None] & (columns < traits.head_dim_v)[None, :]
    gl.store(outputs.out + offsets[:, None] + columns[None, :], o.to(outputs.out.dtype.element_ty), mask=mask)
    gl.store(outputs.lse + lse_offsets(tile, head_q, traits) + token, row_lse, mask=exists)


@gluon.jit
def lse_offsets(tile, head_q, traits: gl.constexpr):
    """Where the rows of query heads begin in lse."""
    return (tile.batch.to(gl.int64) * tile.heads_kv * traits.group + head_q) * tile.lse_rows


# ---------------------------------------------------------------- partial results


@gluon.jit
def partial_lse(partials, traits: gl.constexpr):
    """The log-sum-exps: they lie after O of all programs."""
    return partials.o + gl.num_programs(0).to(gl.int64) * (traits.partial_rows * traits.block_dv)


@gluon.jit
def store_partial(partials, o, lse_log2, index, traits: gl.constexpr):
    """The rows of a split that can be queries, as partial result number `index`."""
    layout: gl.constexpr = o.type.layout
    row = gl.arange(0, traits.block_m, gl.SliceLayout(1, layout))
    columns = gl.arange(0, traits.block_dv, gl.SliceLayout(0, layout))
    first_row = index.to(gl.int64) * traits.partial_rows
    is_stored = row < traits.partial_rows
    mask = is_stored[:, None] & (columns >= 0)[None, :]
    pointers = partials.o + first_row * traits.block_dv + (row * traits.block_dv)[:, None] + columns[None, :]
    gl.store(pointers, o, mask=mask)
    gl.store(partial_lse(partials, traits) + first_row + row, lse_log2, mask=is_stored)


@gluon.jit
def write_combined(outputs, partials, tile, indices, strides, traits: gl.constexpr):
    """Combine the partial results of a tile, whose numbers are those of the KeyRange `indices`, and write its rows."""
    if traits.in_order:
        o, lse_log2 = combine_in_order(partials, indices, traits)
    else:
        o, lse_log2 = combine_splits(partials, indices, traits)
    row = rows_of_tile(tile, traits.partial_rows, o, traits)
    write_rows(outputs, o, lse_log2, tile, row, strides, traits)


@gluon.jit
def rounded_product(a, b):
    """a * b that is not fused into an addition.

    Of a * b + c * d a compiler may fuse either product. It fused one or the other depending on the strides of out: the
    same partial results then gave another last bit where they cancel, in 3 of 130 tests (H200).
    """
    a, b = gl.broadcast(a, b)
    return gl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def combine_splits(partials, indices, traits: gl.constexpr):
    """(O [rows, D_v], lse in log2 units) of a tile: traits.splits_per_load partial results at a time, read past the
    first-level cache, which does not see other programs' stores.

    The lanes of a warp load different log-sum-exps, and exchange the weights.
    """
    ROWS: gl.constexpr = traits.partial_rows
    SPLITS: gl.constexpr = traits.splits_per_load
    layout: gl.constexpr = combine_layout(SPLITS, traits.block_dv, traits.warps)  # of O [splits, rows, D_v]
    o_rows: gl.constexpr = gl.SliceLayout(0, layout)
    lanes: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, traits.warps], [0, 1])  # of lse [splits, rows]
    split = gl.arange(0, SPLITS, gl.SliceLayout(1, lanes))
    o_split = gl.arange(0, SPLITS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    row = gl.arange(0, ROWS, gl.SliceLayout(0, lanes))
    o_row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    columns = gl.arange(0, traits.block_dv, gl.SliceLayout(0, o_rows))
    offsets = gl.expand_dims(o_split[:, None] * ROWS + o_row[None, :], 2) * traits.block_dv
    offsets = offsets + gl.expand_dims(columns[None, :], 0)
    lse_offsets = split[:, None] * ROWS + row[None, :]
    base = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, lanes))
    total = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(0, lanes))
    o = gl.full([ROWS, traits.block_dv], 0.0, gl.float32, o_rows)
    for index in range(indices.start, indices.stop, SPLITS):
        first_row = index.to(gl.int64) * ROWS
        mask = (split < indices.stop - index)[:, None] & (row >= 0)[None, :]
        pointers = partial_lse(partials, traits) + first_row + lse_offsets
        lse = gl.load(pointers, mask=mask, other=float("-inf"), cache_modifier=".cg")
        mask = (o_split < indices.stop - index)[:, None] & (o_row >= 0)[None, :]
        mask = gl.expand_dims(mask, 2) & gl.expand_dims((columns >= 0)[None, :], 0)
        pointers = partials.o + first_row * traits.block_dv + offsets
        part = gl.load(pointers, mask=mask, other=0.0, cache_modifier=".cg")
        new_base = gl.maximum(base, gl.max(lse, 0))
        level = gl.where(new_base == float("-inf"), 0.0, new_base)
        rescale = gl.exp2(base - level)
        weight = gl.exp2(lse - level[None, :])
        total = total * rescale + gl.sum(weight, 0)
        # O = rescale O + sum of weight_i O_i
        o_weight = gl.convert_layout(weight, gl.SliceLayout(2, layout))
        o = o * gl.convert_layout(rescale, gl.SliceLayout(1, o_rows))[:, None]
        o = o + gl.sum(rounded_product(gl.expand_dims(o_weight, 2), part), 0)
        base = new_base
    factor, lse_log2 = combined_factor(base, total)
    o = o * gl.convert_layout(factor, gl.SliceLayout(1, o_rows))[:, None]
    return o, gl.convert_layout(lse_log2, gl.SliceLayout(1, o_rows))


@gluon.jit
def combine_in_order(partials, indices, traits: gl.constexpr):
    """`combine_splits`, one split after the other. A row then has the bits of `batch_invariant.invariant_kernel`, which
    processes splits one by one.
    """
    SPLITS: gl.constexpr = traits.splits_per_load
    layout: gl.constexpr = row_layout(traits.block_dv, traits.warps)
    row = gl.arange(0, traits.partial_rows, gl.SliceLayout(1, layout))
    columns = gl.arange(0, traits.block_dv, gl.SliceLayout(0, layout))
    base = gl.full([traits.partial_rows], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
    total = gl.full([traits.partial_rows], 0.0, gl.float32, gl.SliceLayout(1, layout))
    o = gl.full([traits.partial_rows, traits.block_dv], 0.0, gl.float32, layout)
    for first in range(indices.start, indices.stop, SPLITS):
        for i in gl.static_range(SPLITS):  # unrolled, so that all loads are in flight
            first_row = (first + i).to(gl.int64) * traits.partial_rows
            exists = row * 0 + first + i < indices.stop
            pointers = partial_lse(partials, traits) + first_row + row
            lse = gl.load(pointers, mask=exists, other=float("-inf"), cache_modifier=".cg")
            offsets = first_row * traits.block_dv + (row * traits.block_dv)[:, None] + columns[None, :]
            mask = exists[:, None] & (columns >= 0)[None, :]
            part = gl.load(partials.o + offsets, mask=mask, other=0.0, cache_modifier=".cg")
            base, total, rescale, weight = combine_step(base, total, lse)
            o = gl.fma(o, rescale[:, None], part * weight[:, None])
    factor, lse_log2 = combined_factor(base, total)
    return o * factor[:, None], lse_log2
