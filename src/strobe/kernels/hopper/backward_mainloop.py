"""What both mainloops of the Hopper backward share: pipelines, the mask, P and the products.

    producer --Q, LSE--> q    }                          { dq --part of dQ--> store warp
    producer --dO, delta--> do }  consumer: mainloop_step {
    producer --K, V--> kv      }                          { ds --dS of its keys--> the other consumer

    products of a step, everything transposed (keys in rows)
    S = Q K^T       `qk_product`      s [keys, queries] = K Q^T
    dP = dO V^T     `dov_product`     dp [keys, queries] = V dO^T, from -delta on
    dV += P^T dO    `add_product`     P^T in registers is the left operand
    dK += dS^T Q    `add_product`     so is dS^T
    dQ += dS K      in each split, by the way in which it shares dQ out

P = exp2(scale S - LSE) and dS = P (dP - delta) come from `softmax_p`, which applies the mask. `backward_split_keys` and
`backward_split_products` put these into an order.
"""

from ..device.dialect import (
    Value,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    record,
    warpgroup_mma,
    warpgroup_mma_wait,
    zero_of_turn,
)
from ..device.per_thread_mbarrier import barrier_arrive, barrier_wait
from ..device.pipeline import release
from ..device.softmax import tanh
from ..device.tma import ColumnParts, as_rows
from .traits import ROWS as _ROWS

ROWS: gl.constexpr = gl.constexpr(_ROWS)  # of one product, and of one consumer's keys: 16 a warp


# ---------------------------------------------------------------- pipelines


@record
class RowsPipeline:
    """Stages of Q with LSE, or of dO with -delta. The bytes of both complete full[i]."""

    tiles: ColumnParts
    stats: gl.shared_memory_descriptor  # float32 of each query: LSE in log2 units (lse_folded: -LSE / scale), or -delta
    full: Value
    empty: Value
    first_stat: gl.constexpr  # the first stage of `stats`: LSE and delta may share a buffer

    @gluon.jit
    def stat(self, index):
        """The buffer of a stage's float32 values."""
        if self.first_stat > 0:
            index = index + self.first_stat
        return self.stats.index(index)

    @gluon.jit
    def tile(self, index):
        return rows_at(self.tiles, index)

    @gluon.jit
    def consumer_wait(self, state):
        mbarrier.wait(self.full.index(state.index), state.phase)

    @gluon.jit
    def consumer_release(self, state, per_thread: gl.constexpr = False):
        """Once for all warps, which meet before, or by each thread: only products have read the tile."""
        release(self.empty.index(state.index), per_thread)


@record
class KvPipeline:
    """K and V of a work tile, and what leaves in their place.

    kv_full    K and V have landed
    kv_done    no product reads them any more
    kv_empty   the producer may load the next; the same barrier as kv_done, unless dK and dV leave in their place
    dkv_full   dK, dV or both stand there
    dkv_empty  dK has been read (group_splits: V's gradient follows in the same place)
    """

    k: ColumnParts
    v: ColumnParts
    sums: ColumnParts  # float32 dK, then dV, over the memory of both
    kv_full: Value
    kv_done: Value
    kv_empty: Value
    dkv_full: Value
    dkv_empty: Value

    @gluon.jit
    def v_index(self, index, traits: gl.constexpr):
        """Where V of a stage is: in a buffer of its own, or after K where float32 sums take the place of both."""
        if traits.sums_dkv:
            return 1
        else:
            return index


@record
class DsPipeline:
    """dS [keys, queries] from one consumer to the other. full[i]: it stands in memory. empty[i] (dq_deferred): the
    other has multiplied it.
    """

    tiles: gl.shared_memory_descriptor
    full: Value
    empty: Value  # None: other barriers imply it
    per_thread: gl.constexpr  # each thread arrives by itself

    @gluon.jit
    def producer_commit(self, i):
        """Each thread by itself: dV is then multiplied before all of them meet. d128 causal 4k, 8k, 16k 1.011, 1.014,
        1.016 of the speed, 1k 1.015, 512 1.007 (H200).
        """
        fence_async_shared()
        barrier_arrive(self.full, i, self.per_thread)

    @gluon.jit
    def consumer_wait(self, i, phase):
        barrier_wait(self.full, i, phase, self.per_thread)


@record
class Pipelines:
    """Every pipeline of the kernel."""

    work: Value  # WorkTilePipeline
    kv: KvPipeline
    q: RowsPipeline
    do: RowsPipeline
    dq: Value  # DqPipeline
    ds: DsPipeline


@gluon.jit
def do_state_of(q_state, do_state, traits: gl.constexpr):
    """Where a consumer stands in dO's pipeline. If consumers split the keys, dO is released with Q: one state less in
    registers.
    """
    if traits.split_by_keys:
        return q_state
    else:
        return do_state


# ---------------------------------------------------------------- what one consumer works with


@record
class KeyTile:
    """K and V of a work tile: their buffers and stages, and rows of K in registers where they are an operand from
    there.
    """

    k_tiles: ColumnParts
    k_index: Value
    v_tiles: ColumnParts
    v_index: Value
    k_operand: Value  # ColumnParts, or None

    @gluon.jit
    def create(kv, index, k, traits: gl.constexpr):
        """k: the rows of K that may be an operand from registers."""
        v_index = kv.v_index(index, traits)
        if traits.k_in_registers:
            operand = load_operand(k)
            fence_async_shared()  # before the next keys land here: a work tile without queries has no other fence
            return KeyTile(kv.k, index, kv.v, v_index, operand)
        else:
            return KeyTile(kv.k, index, kv.v, v_index, None)

    @gluon.jit
    def k(self, traits: gl.constexpr):
        return tile_now(self.k_tiles, self.k_index, traits)

    @gluon.jit
    def v(self, traits: gl.constexpr):
        return tile_now(self.v_tiles, self.v_index, traits)

    @gluon.jit
    def k_left_operand(self, row: gl.constexpr, traits: gl.constexpr):
        """64 rows of K, from registers or from memory."""
        if traits.k_in_registers:
            return self.k_operand
        else:
            return rows_of(self.k(traits), row)


@gluon.jit
def load_operand(tile):
    if tile.tail is None:
        return ColumnParts(tile.main.load(left_layout(ROWS)), None)
    else:
        return ColumnParts(tile.main.load(left_layout(ROWS)), tile.tail.load(left_layout(ROWS)))


@record
class AttentionMask:
    """Which queries see each of a consumer's 64 keys: the causal mask, windows, prefixes, and the end of the keys.

    Key j of the consumer is on the diagonal of query `diagonal + ...`: query i of the work tile's first block has key
    `diagonal + i`. A query sees keys [diagonal + i - left, diagonal + i + right], the first `prefix` keys, and none
    from `num_keys` on.
    """

    diagonal: gl.tensor
    num_keys: gl.tensor  # from the consumer's first key on
    prefix: Value
    window: gl.tuple  # WindowParams

    @gluon.jit
    def of_queries(self, m_block, row: gl.constexpr, traits: gl.constexpr):
        """The mask of the queries from `row` of an m_block on."""
        return AttentionMask(self.diagonal + m_block * traits.block_m + row, self.num_keys, self.prefix, self.window)

    @gluon.jit
    def of_second_keys(self, row: gl.constexpr, traits: gl.constexpr):
        """The mask of keys from `row` on, whose diagonal `of_queries` moves."""
        if traits.mask.prefix:
            return AttentionMask(self.diagonal, self.num_keys - row, self.prefix - row, self.window)
        else:
            return AttentionMask(self.diagonal, self.num_keys - row, self.prefix, self.window)

    @gluon.jit
    def is_empty(self, m_block, traits: gl.constexpr):
        """Whether no query of an m_block sees any of the consumer's keys: half of the keys on a causal diagonal."""
        diagonal = self.diagonal + m_block * traits.block_m
        empty = self.num_keys <= 0
        if traits.mask.right:
            empty = empty | (diagonal + traits.block_m + self.window.right <= 0)
        if traits.mask.left:
            empty = empty | (diagonal - self.window.left >= ROWS)
        return empty

    @gluon.jit
    def is_partial(self, queries: gl.constexpr, traits: gl.constexpr):
        """Whether a query of the tile does not see all 64 keys."""
        partial = False if traits.even else self.num_keys < ROWS
        if traits.mask.prefix:
            partial = partial | ((self.diagonal < ROWS - 1) & (self.prefix < ROWS))
        if traits.mask.right:
            partial = partial | (self.diagonal + self.window.right < ROWS - 1)
        if traits.mask.left:
            partial = partial | (self.diagonal - self.window.left > 1 - queries)
        return partial

    @gluon.jit
    def apply_mask(self, x, masked, traits: gl.constexpr):
        """x [keys, queries] with the value `masked` where the query does not see the key.

        A bound is compared as a key's own number against the tile's columns, which are constants of a register.
        """
        BLOCK_M: gl.constexpr = x.shape[1]
        right = self.window.right
        if self.is_partial(BLOCK_M, traits):
            key = gl.arange(0, ROWS, gl.SliceLayout(1, x.type.layout))
            # bits 1 and 2 of a column depend on the thread, the others on the register: compared apart, no register
            # holds a column
            column = gl.arange(0, BLOCK_M, gl.SliceLayout(0, x.type.layout))
            by_thread, by_register = (column & 6)[None, :], (column & -7)[None, :]
            if traits.mask.right or traits.mask.prefix:
                first = key * 0
                if traits.mask.prefix:
                    first = gl.where(key < self.prefix, 0, key - self.diagonal)
                if traits.mask.right:
                    beyond_right = key - (self.diagonal + right)
                    first = gl.maximum(first, beyond_right) if traits.mask.prefix else beyond_right
                if not traits.even:
                    first = gl.where(key < self.num_keys, first, BLOCK_M)
                x = gl.where(first[:, None] - by_thread <= by_register, x, masked)
            elif not traits.even:
                x = gl.where((key < self.num_keys)[:, None], x, masked)
            if traits.mask.left:
                x = gl.where((key - (self.diagonal - self.window.left))[:, None] - by_thread >= by_register, x, masked)
        return x


# ---------------------------------------------------------------- P and dS


@record
class Weights:
    """P [keys, queries] float32, and its derivative by the raw score: P, or P (1 - tanh^2) with a softcap. With
    score_mod_bwd, which `score_gradient` calls, the slope is P.
    """

    p: gl.tensor
    slope: gl.tensor
    s: Value  # the raw score, which score_mod_bwd gets in natural units; None without it


@gluon.jit
def softmax_p(s, lse, mask, mods, m_block, row: gl.constexpr, softmax, traits: gl.constexpr):
    """P = exp2(scale S - LSE) of the queries from `row` of an m_block on, with 0 where the mask hides a key. lse: their
    buffer. mods: ScoreMods of the tile, or None.
    """
    if not traits.lse_folded:
        lse_log2 = lse.load(gl.SliceLayout(0, s.type.layout))  # not sooner: 16 registers more would spill
    s = cap_scores(s, softmax, traits)
    mask = mask.of_queries(m_block, row, traits)
    if traits.score_mod is not None:
        x = mods.modify(s * softmax.score_scale, traits) * softmax.scale_log2 - lse_log2[None, :]
        # rows that are none, or see no key, whatever the function makes of them
        x = gl.where((lse_log2 == float("inf"))[None, :], float("-inf"), x)
    elif traits.lse_folded:
        x = s * softmax.scale_log2
    else:
        x = s * softmax.scale_log2 - lse_log2[None, :]
    if traits.mask_mod is not None:
        x = mods.mask(x, traits)
    # ptxas moves nothing over the branch in `apply_mask`. In front of the exponentials it left all of them after the
    # wait for dP. Behind them they run under dP's product: d64 causal 1.03, d192 1.02 of the speed, d128 0.98 (H200)
    if traits.masks and not traits.masks_p:
        x = mask.apply_mask(x, float("-inf"), traits)
    p = gl.exp2(x)
    if traits.masks and traits.masks_p:
        p = mask.apply_mask(p, 0.0, traits)
    if traits.score_mod_bwd is not None:
        return Weights(p, p, s)
    else:
        return Weights(p, softcap_slope(p, s, traits), None)


@gluon.jit
def cap_scores(s, softmax, traits: gl.constexpr):
    """The raw score: Q K^T, or its tanh with a softcap. score_mod follows."""
    if traits.softcap:
        s = tanh(s * softmax.softcap)
    return s


@gluon.jit
def softcap_slope(grad, s, traits: gl.constexpr):
    """`grad` times the derivative of `cap_scores`, whose result is s."""
    if traits.softcap:
        s = gl.maximum(s, -1.0)  # a number where it is NaN: the gradient of hidden keys stays 0
        grad = grad * (1.0 - s * s)
    return grad


@gluon.jit
def score_gradient(weights, dp, mods, softmax, traits: gl.constexpr):
    """dS = P (dP - delta), through score_mod and the softcap. dp: dP - delta."""
    ds = weights.slope * dp
    if traits.score_mod_bwd is not None:
        ds = softcap_slope(mods.gradient(ds, weights.s * softmax.score_scale, traits), weights.s, traits)
    return ds


@gluon.jit
def zero_foreign_dq(dq, lse):
    """dQ with 0 in rows of other documents, whose LSE is infinite: K may hold what 0 times is not 0."""
    own = gl.convert_layout(gl.abs(lse) != float("inf"), gl.SliceLayout(1, dq.type.layout), assert_trivial=True)
    return gl.where(own[:, None], dq, 0.0)


# ---------------------------------------------------------------- products


@gluon.constexpr_function
def tile_layout(columns):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def left_layout(columns):
    """Of a left operand in registers, for an accumulator of `columns` columns."""
    return gl.DotOperandLayout(0, tile_layout(columns), 2)


@gluon.jit
def zeros(rows: gl.constexpr, columns: gl.constexpr):
    return gl.full([rows, columns], 0.0, gl.float32, tile_layout(columns))


@gluon.jit
def zero_parts(rows: gl.constexpr, main: gl.constexpr, tail: gl.constexpr):
    """Accumulators of [rows, main] and [rows, tail]."""
    first = zeros(rows, main)
    if tail > 0:
        return ColumnParts(first, zeros(rows, tail))
    else:
        return ColumnParts(first, None)


@gluon.jit
def qk_product(k, q):
    """S = Q K^T, in flight, as [keys, queries]."""
    QUERIES: gl.constexpr = q.main.shape[0]
    return add_over_columns(k, q, zeros(ROWS, QUERIES), False)


@gluon.jit
def dov_product(v, do, minus_delta):
    """dP - delta = dO V^T - delta, in flight, as [keys, queries]."""
    return add_over_columns(v, do, minus_delta, True)


@gluon.jit
def qk_dov_products(k, v, q, do, q_state, pipes, traits: gl.constexpr):
    """S = Q K^T and dP - delta = dO V^T - delta, in flight, once Q and dO are there.

    With lse_folded S begins at -LSE / scale: else P would wait for LSE, and need 16 registers where they are fewest
    (d128 causal 1.01 to 1.02 of the speed, H200).
    """
    if traits.lse_folded:
        layout: gl.constexpr = gl.SliceLayout(0, tile_layout(traits.block_m))
        pipes.q.consumer_wait(q_state)
        pipes.do.consumer_wait(q_state)
        minus_lse, minus_delta = pipes.q.stat(q_state.index).load(layout), pipes.do.stat(q_state.index).load(layout)
        s, dp = accumulator_from(minus_lse), accumulator_from(minus_delta)
        s = add_over_columns(k, q, s, True)
    else:
        pipes.do.consumer_wait(q_state)
        dp = minus_delta_of(pipes.do.stat(q_state.index))
        pipes.q.consumer_wait(q_state)
        s = qk_product(k, q)
    return s, dov_product(v, do, dp)


@gluon.jit
def minus_delta_of(stat):
    """What dP's accumulator begins at, -delta of each query: beside dS, delta would take 16 registers and a
    subtraction.
    """
    return accumulator_from(stat.load(gl.SliceLayout(0, tile_layout(stat.shape[0]))))


@gluon.jit
def accumulator_from(row):
    """An accumulator [keys, queries] that begins at one value per query.

    Call it before any product is issued: ptxas serialises wgmma where an accumulator is written while others run
    (C7514). The inline mov, which the compiler may not move, keeps it there.
    """
    layout: gl.constexpr = row.type.layout.parent
    start, _ = gl.broadcast(row[None, :], gl.full([ROWS, row.shape[0]], 0.0, gl.float32, layout))
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [start], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def add_over_columns(a, b, acc, use_acc: gl.constexpr):
    """acc + A B^T, in flight, over the columns of both."""
    acc = warpgroup_mma(a.main, b.main.permute((1, 0)), acc, use_acc=use_acc, is_async=True)
    if a.tail is not None:
        acc = warpgroup_mma(a.tail, b.tail.permute((1, 0)), acc, is_async=True)
    return acc


@gluon.jit
def add_product(a, b, acc):
    """acc + A B, in flight, for A in registers."""
    return add_to_columns(gl.convert_layout(a, left_layout(b.main.shape[1])), b, acc)


@gluon.jit
def add_to_columns(a, b, acc):
    """acc + A B, in flight, for each part of B's columns."""
    main = warpgroup_mma(a, b.main, acc.main, is_async=True)
    if b.tail is None:
        return ColumnParts(main, None)
    else:
        return ColumnParts(main, warpgroup_mma(a, b.tail, acc.tail, is_async=True))


@gluon.jit
def wait_for(acc, pending: gl.constexpr):
    """The accumulators, once at most `pending` products that were issued after theirs are in flight."""
    if acc.tail is None:
        return ColumnParts(warpgroup_mma_wait(pending, deps=[acc.main]), None)
    else:
        return ColumnParts(*warpgroup_mma_wait(pending, deps=[acc.main, acc.tail]))


# ---------------------------------------------------------------- tiles


@gluon.jit
def parts_of(tile):
    """A tile's parts as rows and columns."""
    if tile.tail is None:
        return ColumnParts(as_rows(tile.main), None)
    else:
        return ColumnParts(as_rows(tile.main), as_rows(tile.tail))


@gluon.jit
def rows_at(tiles, index):
    return parts_of(tiles.index(index))


@gluon.jit
def tile_now(tiles, index, traits: gl.constexpr):
    """A stage's tile. With `rematerializes` its address is computed in this step: LLVM would keep the addresses of all
    products' operands in registers from step to step, spill them, or leave no room for an accumulator
    (docs/performance.md).
    """
    if traits.rematerializes:
        index = index + zero_of_turn()
    return rows_at(tiles, index)


@gluon.jit
def rows_of(tile, row: gl.constexpr):
    """64 rows of a tile, from `row` on."""
    if tile.tail is None:
        return ColumnParts(tile.main.slice(row, ROWS, dim=0), None)
    else:
        return ColumnParts(tile.main.slice(row, ROWS, dim=0), tile.tail.slice(row, ROWS, dim=0))
