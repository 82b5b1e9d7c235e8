"""The Hopper decode for tiles of 64 query rows over 16-bit keys: `decode` with another mainloop.

Queries are the rows of both products, as in a forward: S = Q K^T [queries, keys] and O += P V [queries, D_v]. A row of
S lies in four threads, so row maxima need no exchange between warps, and P stays in registers. The mainloop waits for
copies as in `decode`.

Only these tiles are masked: at the ends of a split, with keys that some row does not see, with a lost page. The mask
took a third of the mainloop's instructions.

Time with keys as rows, and with queries as rows (H200, 64 sequences of 8192, 32/8 heads, pages of 16):
    9 tokens             0.682 ms, 0.499 ms
    16 tokens            0.717 ms, 0.508 ms
    16 tokens, alibi     0.740 ms, 0.582 ms
    16 tokens, d64       0.519 ms, 0.342 ms
"""

from ..device.dialect import cp_async_wait, gl, gluon, record, warpgroup_mma, warpgroup_mma_wait
from ..device.softmax import SoftmaxState, apply_softcap
from ..device.split_kv import KeyRange
from .decode import PAGES, DecodeState, decode_split, visible_to_queries
from .decode_arguments import DecodeArguments, PrefetchedPages, TallSmem
from .decode_hooks import modify_scores
from .decode_layouts import allocate_operand, allocate_stages, key_layout, query_layout, tall_layout
from .decode_loads import copy_tile, in_pool, in_split, page_ids, page_ids_of_copies, wait_for_copies


@gluon.jit
def allocate_smem(dtype: gl.constexpr, traits: gl.constexpr):
    """TallSmem for K and V of `dtype`."""
    q = allocate_operand(traits.block_m, traits.block_d, dtype)
    k = allocate_stages(traits.stages, traits.block_d, dtype, traits)
    return TallSmem(q, k, allocate_stages(traits.stages, traits.block_dv, dtype, traits))


@gluon.jit
def attend(smem, cache, pages, keys, queries, softmax, mods, errors, traits: gl.constexpr):
    """`decode.attend`: its arguments, and its results, which are transposed."""
    o_layout: gl.constexpr = tall_layout(traits.block_dv)
    visible = visible_to_queries(queries.tile, queries.num_keys, queries.window, traits)
    begin = keys.start // traits.block_n * traits.block_n
    row_max = gl.full([traits.block_m], float("-inf"), gl.float32, query_layout(traits))
    no_keys = SoftmaxState(row_max, gl.full([traits.block_m], 0.0, gl.float32, query_layout(traits)))
    o = gl.full([traits.block_m, traits.block_dv], 0.0, gl.float32, o_layout)
    state = DecodeState(pages, no_keys, o, begin * 0)
    masking = TileMask(cache.table, keys, seen_by_all(keys, visible, traits), visible)
    for n_start in range(begin, keys.stop, traits.step):
        state = mainloop_step(n_start, state, smem, cache, masking, softmax, mods, errors, traits)
    cp_async_wait(0)  # the groups still in flight are empty; a kernel leaves none behind
    o = gl.permute(state.o, (1, 0))
    of_columns: gl.constexpr = gl.SliceLayout(0, o.type.layout)
    row_max = gl.convert_layout(state.softmax.row_max, of_columns)
    return o, SoftmaxState(row_max, gl.convert_layout(state.softmax.row_sum, of_columns))


@gluon.jit
def mainloop_step(n_start, state, smem, cache, masking, softmax, mods, errors, traits: gl.constexpr):
    """The tile of keys from n_start on."""
    AHEAD: gl.constexpr = traits.stages - 1
    stage, table, keys = state.stage, cache.table, masking.keys
    columns = gl.arange(0, traits.block_n, gl.SliceLayout(0, tall_layout(traits.block_n)))
    # S = Q K^T, and the copies of a later tile
    wait_for_copies(2 * AHEAD - 1)
    s = gl.full([traits.block_m, traits.block_n], 0.0, gl.float32, tall_layout(traits.block_n))
    s = warpgroup_mma(smem.q, smem.k.index(stage).permute((1, 0)), s, use_acc=False, is_async=True)
    later = n_start + AHEAD * traits.step
    copy_tile(smem, gl.where(stage == 0, AHEAD, stage - 1), cache, state.pages.to_copy, keys, later, traits)
    to_copy_next = page_ids_of_copies(table, later + 2 * traits.step, traits)
    shown = 0
    if traits.mask_mod is not None:
        shown = mods.shown(n_start, columns, traits)
    s = warpgroup_mma_wait(0, deps=[s])
    # P = softmax(S)
    s = apply_softcap(s, softmax.softcap, traits)
    s = modify_scores(s, n_start, columns, shown, mods, traits)
    is_whole = (n_start >= masking.whole.start) & (n_start + traits.block_n <= masking.whole.stop)
    of_scores = 0
    if traits.page_size > 0:
        rows = gl.arange(0, traits.block_n, key_layout(traits))
        is_lost = in_split(n_start, rows, keys) & (in_pool(state.pages.of_scores, table) == 0)
        gl.atomic_or(errors + rows * 0, rows * 0 + PAGES, mask=is_lost, sem="relaxed")
        is_whole = is_whole & (gl.max(is_lost.to(gl.int32), 0) == 0)
        of_scores = page_ids(table, n_start + traits.step, rows, traits)
    if is_whole == 0:
        s = gl.where(masking.seen(n_start, columns, traits), s, float("-inf"))
    p, rescale, softmax_state = online_softmax(s, state.softmax, softmax.scale_log2, traits)
    # O = rescale O + P V
    o_layout: gl.constexpr = tall_layout(traits.block_dv)
    o = state.o * gl.convert_layout(rescale, gl.SliceLayout(1, o_layout))[:, None]
    p = gl.convert_layout(p.to(smem.v.dtype), gl.DotOperandLayout(0, o_layout, 2))
    wait_for_copies(2 * AHEAD)
    o = warpgroup_mma(p, smem.v.index(stage), o, is_async=True)
    o = warpgroup_mma_wait(0, deps=[o])
    pages = PrefetchedPages(state.pages.to_copy_next, to_copy_next, of_scores)
    return DecodeState(pages, softmax_state, o, gl.where(stage == AHEAD, 0, stage + 1))


@gluon.jit
def seen_by_all(keys, visible, traits: gl.constexpr):
    """The KeyRange of a split that every query sees. visible: the KeyRange of each."""
    if traits.masks_queries:
        start = gl.maximum(keys.start, gl.max(visible.start, 0))
        return KeyRange(start, gl.minimum(keys.stop, gl.min(visible.stop, 0)))
    else:
        return keys


@record
class TileMask:
    """What says which keys of a tile are seen. Most tiles are seen whole by all rows, and need no mask."""

    table: gl.tuple  # PageTable
    keys: gl.tuple  # KeyRange of the split
    whole: gl.tuple  # KeyRange that every row sees
    visible: gl.tuple  # KeyRange of each row

    @gluon.jit
    def seen(self, n_start, columns, traits: gl.constexpr):
        """Which keys n_start + columns each row sees: bool that broadcasts to the scores."""
        is_key = in_split(n_start, columns, self.keys)
        if traits.page_size > 0:
            is_key = is_key & in_pool(page_ids(self.table, n_start, columns, traits), self.table)
        is_seen = is_key[None, :]
        if traits.masks_queries:
            n = (n_start + columns)[None, :]
            is_seen = is_seen & (n >= self.visible.start[:, None]) & (n < self.visible.stop[:, None])
        return is_seen


@gluon.jit
def online_softmax(s, state, scale_log2, traits: gl.constexpr):
    """(P, rescale, SoftmaxState) after the raw scores of a tile. row_max is what P was taken against."""
    new_max = gl.maximum(state.row_max, gl.max(s, 1) * scale_log2 - traits.log2_offset)
    base = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = gl.exp2(s * scale_log2 - base[:, None])
    rescale = gl.exp2(state.row_max - base)
    return p, rescale, SoftmaxState(new_max, state.row_sum * rescale + gl.sum(p, 1))


@gluon.jit
def decode_kernel(tensors, scales, partials, errors, strides, shape, window, softmax_params, traits: gl.constexpr):
    """The arguments of `decode.decode_kernel`."""
    call = DecodeArguments(tensors, scales, partials, errors, strides, shape, window, softmax_params)
    decode_split(call, allocate_smem, attend, traits)
