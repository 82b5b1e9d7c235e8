"""What the two consumers of the Hopper backward do with each tile of queries.

128 keys: each takes half of them, all five products, and half of dq: of its columns, or of 128 queries.

    tensor cores   s | dp        |      dv, dq | dk
    the rest           p    ds             dq to memory

With form.lags dq is that of the step before: neither then waits for ds that the other makes in the same step, and they come to be apart, so that
one's weights run under the other's products.

128 queries come in two halves, of which one is multiplied under the other's weights:

    tensor cores   s, dp | s', dp'        |    dv, dk            | dv', dq | dk'
    the rest               p        ds         p'        ds'               dq to memory

64 keys, of wide heads, whose sums leave registers for no more: one makes weights, ds and dv, the other only multiplies.

    weights        s | dp | p, ds to the other | dv
    gradients      dq, dk | dq to memory, unit by unit

Two consumers that wait for each other only where they hand something over fill each other's gaps: at 128 keys 1.1 to 1.25 times the speed of
eight warps in step, which made the next weights under this step's products (docs/performance.md).
"""

from ..device.dialect import fence_async_shared, gl, gluon, mbarrier, warpgroup_mma, warpgroup_mma_wait
from .backward_spans import has_others, without_others
from .backward_steps import (
    ROWS,
    begin_both,
    begin_scores,
    by_columns,
    delta_at,
    dp_start,
    dq_position,
    hand_over,
    hand_units,
    in_registers,
    of_do,
    of_ds,
    over_columns,
    parts_at,
    products_of,
    rows_of,
    scores_of,
    tile_of_step,
    wait_for,
    weights,
    zeros_of,
)


@gluon.jit
def walk_half(w: gl.constexpr, dk, dv, tiles, channels, at, seen, blocks, work, form: gl.constexpr):
    """All tiles of queries for half of 128 keys: (dk, dv, where q's ring and ds's stand then)."""
    q_at, ds_at, lap = at
    k_all, v_tile = tiles
    k_tile = in_registers(rows_of(k_all, ROWS * w), form.tuning.k_in_registers)
    tiles = (k_all, k_tile, v_tile)
    for member in range(form.members):
        for step in range(blocks):
            block = tile_of_step(step, blocks, form)
            place = (q_at, of_ds(q_at, ds_at, form), lap)
            if form.by_rows:
                dk, dv = step_twice(w, dk, dv, tiles, channels, place, seen, block, work, form)
            else:
                first = step == 0
                if form.members > 1:
                    first = first & (member == 0)
                dk, dv = step_half(w, dk, dv, tiles, channels, place, seen, block, first, work, form)
            q_at = q_at.next()
            ds_at = ds_at.next()
    ds_at = of_ds(q_at, ds_at, form)
    if form.lags:
        if blocks > 0:
            last_share(w, k_all, channels, ds_at.before(), lap, form)
    return dk, dv, q_at, ds_at


@gluon.jit
def step_half(w: gl.constexpr, dk, dv, tiles, channels, at, seen, block, first, work, form: gl.constexpr):
    """One tile of queries. The other half's ds, which dq needs, comes by shared memory, in two tiles by turns: who has got the other's ds of a
    step has got past dq of the step before, so that the tile of the step before that is free.

    With form.lags dq is that of the step before, whose ds the other made long ago, and a barrier says when it has multiplied it: the two may be half
    a step apart, and one's weights come under the other's products. The first step of a tile of keys multiplies what it finds, and hands nothing
    over; behind the last comes `last_share`.
    """
    D: gl.constexpr = form.products_d
    k_all, k_tile, v_tile = tiles
    dtype: gl.constexpr = k_all[0].dtype
    q, do, dq, handed = channels
    q_at, ds_at, lap = at
    ds_smem, ds_ready, ds_free = handed
    own = 2 * ds_at.stage + w
    do_tile, q_tile = parts_at(do[0], q_at.stage), parts_at(q[0], q_at.stage)
    s, dp = begin_both(k_tile, v_tile, q_tile, do_tile, q, do, q_at, form)
    p, ds = weigh(s, dp, 0, q[1].index(q_at.stage), block, 0, seen, work, dtype, form)
    if form.lags:  # the first tile waits for nobody, the second, which the first step multiplies, for that
        mbarrier.wait(ds_free.index(own), ds_at.parity ^ 1 ^ ds_at.stage)
    ds_smem.index(own).store(ds)
    fence_async_shared()
    mbarrier.arrive(ds_ready.index(own))
    dv = products_of(p.to(dtype), do_tile, dv)
    share_at = ds_at.before() if form.lags else ds_at
    dq_sums = begin_share(w, handed, share_at, k_all, form)
    dk = products_of(ds, q_tile, dk)
    dv = wait_for(dv, 2 + D)
    dq_sums = warpgroup_mma_wait(D, deps=[dq_sums])
    if form.lags:
        mbarrier.arrive(ds_free.index(2 * share_at.stage + (1 - w)))
        if not first:
            hand_over(dq_sums, dq, w, dq_position(share_at, lap, form), form)
    else:
        hand_share(w, dq_sums, channels, at, seen, block, form)
    dk = wait_for(dk, 0)
    mbarrier.arrive(q[3].index(q_at.stage))
    return dk, dv


@gluon.jit
def last_share(w: gl.constexpr, k_all, channels, ds_at, lap, form: gl.constexpr):
    """dq of a tile of keys' last step. Its ds is not free yet: the next tile's first step multiplies it once more."""
    q, do, dq, handed = channels
    dq_sums = warpgroup_mma_wait(0, deps=[begin_share(w, handed, ds_at, k_all, form)])
    hand_over(dq_sums, dq, w, dq_position(ds_at, lap, form), form)


@gluon.jit
def step_twice(w: gl.constexpr, dk, dv, tiles, channels, at, seen, block, work, form: gl.constexpr):
    """`step_half` of 128 queries, 64 and 64: the second's scores and dp are multiplied under the first's weights, the first's dk and dv under the
    second's. k enters from registers, lest products of half the queries read it from shared memory twice as often: d64 1.05 of the speed of 128
    at once, windows 1.08; with k from shared memory 0.94 to 1.03 (H200)."""
    k_all, k_tile, v_tile = tiles
    dtype: gl.constexpr = k_all[0].dtype
    q, do, dq, handed = channels
    q_at, ds_at, lap = at
    ds_smem, ds_ready, ds_free = handed
    own = 2 * ds_at.stage + w
    do_tile, q_tile = parts_at(do[0], q_at.stage), parts_at(q[0], q_at.stage)
    do_first, do_second = rows_of(do_tile, 0), rows_of(do_tile, ROWS)
    q_first, q_second = rows_of(q_tile, 0), rows_of(q_tile, ROWS)
    delta = delta_at(do, q_at)
    dp, dp_second = dp_start(delta.slice(0, ROWS)), dp_start(delta.slice(ROWS, ROWS))
    mbarrier.wait(q[2].index(q_at.stage), q_at.parity)
    s = scores_of(k_tile, q_first)
    dp = over_columns(v_tile, do_first, dp, True)
    s_second = scores_of(k_tile, q_second)
    dp_second = over_columns(v_tile, do_second, dp_second, True)
    lse = q[1].index(q_at.stage)
    p, ds = weigh(s, dp, 2, lse.slice(0, ROWS), block, 0, seen, work, dtype, form)
    ds_smem.index(own).slice(0, ROWS, dim=1).store(ds)
    dv = products_of(p.to(dtype), do_first, dv)
    dk = products_of(ds, q_first, dk)
    p, ds = weigh(s_second, dp_second, 2, lse.slice(ROWS, ROWS), block, ROWS, seen, work, dtype, form)
    ds_smem.index(own).slice(ROWS, ROWS, dim=1).store(ds)
    fence_async_shared()
    mbarrier.arrive(ds_ready.index(own))
    dv = products_of(p.to(dtype), do_second, dv)
    dq_sums = begin_share(w, handed, ds_at, k_all, form)
    dk = products_of(ds, q_second, dk)
    dv = wait_for(dv, 3)
    dq_sums = warpgroup_mma_wait(1, deps=[dq_sums])
    hand_share(w, dq_sums, channels, at, seen, block, form)
    dk = wait_for(dk, 0)
    mbarrier.arrive(q[3].index(q_at.stage))
    return dk, dv


@gluon.jit
def weigh(s, dp, pending: gl.constexpr, lse, block, row: gl.constexpr, seen, work, dtype: gl.constexpr, form: gl.constexpr):
    """(p, ds) of scores and dp under way, behind which `pending` products have been issued. p is not made an operand here: beside p as a factor
    of ds it would spill."""
    s = warpgroup_mma_wait(form.products_dv + pending, deps=[s])
    p, slope = weights(s, lse, block, row, seen, work, form)
    dp = warpgroup_mma_wait(pending, deps=[dp])
    return p, (slope * dp).to(dtype)


@gluon.jit
def hand_share(w: gl.constexpr, dq_sums, channels, at, seen, block, form: gl.constexpr):
    """A share of dq to the store partition, of documents without rows of others."""
    q, do, dq, handed = channels
    q_at, ds_at, lap = at
    if form.mask.documents:
        if has_others(block, (seen[2], seen[3])):
            lse = share_of_rows(w, q[1].index(q_at.stage), form).load(gl.SliceLayout(1, dq_sums.type.layout))
            dq_sums = without_others(dq_sums, lse)
    hand_over(dq_sums, dq, w, dq_position(ds_at, lap, form), form)


@gluon.jit
def begin_share(w: gl.constexpr, handed, at, k_all, form: gl.constexpr):
    """Issue this consumer's share of dq: over its own keys, then over the other's, once their ds is there."""
    ds_smem, ds_ready, ds_free = handed
    k_columns = columns_of(w, k_all, form)
    own, other = 2 * at.stage + w, 2 * at.stage + (1 - w)
    sums = zeros_of(ROWS, form.share_columns(w), 0)[0]
    sums = warpgroup_mma(share_of(w, ds_smem.index(own), form), k_columns.slice(ROWS * w, ROWS, dim=0), sums, use_acc=False, is_async=True)
    mbarrier.wait(ds_ready.index(other), at.parity)
    return warpgroup_mma(share_of(w, ds_smem.index(other), form), k_columns.slice(ROWS * (1 - w), ROWS, dim=0), sums, is_async=True)


@gluon.jit
def columns_of(w: gl.constexpr, k_all, form: gl.constexpr):
    """k's columns of a consumer's share of dq: all, a part, or half of the only part."""
    if form.by_rows:
        return k_all[0]
    elif form.rest_d:
        return k_all[w]
    else:
        return k_all[0].slice(form.share_column(w), form.share_columns(w), dim=1)


@gluon.jit
def share_of(w: gl.constexpr, ds, form: gl.constexpr):
    """ds of 64 keys [keys, queries] as [queries, keys]: all queries, or those of this consumer's share."""
    if form.by_rows:
        return ds.slice(ROWS * w, ROWS, dim=1).permute((1, 0))
    else:
        return ds.permute((1, 0))


@gluon.jit
def share_of_rows(w: gl.constexpr, numbers, form: gl.constexpr):
    """Numbers of a tile's queries, of those of this consumer's share."""
    if form.by_rows:
        return numbers.slice(ROWS * w, ROWS)
    else:
        return numbers


@gluon.jit
def walk_weights(dv, tiles, channels, at, seen, blocks, work, form: gl.constexpr):
    """Weights of all tiles of queries, ds to the other consumer, and dv: (dv, where the rings stand then)."""
    q_at, do_at = at
    tiles = (in_registers(tiles[0], form.tuning.k_in_registers), tiles[1])
    for _ in range(form.members):
        for step in range(blocks):
            dv = step_weights(dv, tiles, channels, (q_at, of_do(q_at, do_at, form)), seen, tile_of_step(step, blocks, form), work, form)
            q_at = q_at.next()
            do_at = do_at.next()
    return dv, q_at, do_at


@gluon.jit
def step_weights(dv, tiles, channels, at, seen, block, work, form: gl.constexpr):
    """One tile of queries. Where do has one place it is waited for behind the weights."""
    k_tile, v_tile = tiles
    q, do, dq, handed = channels
    q_at, do_at = at
    dtype: gl.constexpr = v_tile[0].dtype
    do_tile = parts_at(do[0], do_at.stage)
    if form.tuning.stages_do == 1:
        s = warpgroup_mma_wait(0, deps=[begin_scores(k_tile, q, q_at, form)])
        p, slope = weights(s, q[1].index(q_at.stage), block, 0, seen, work, form)
        dp = over_columns(v_tile, do_tile, dp_start(delta_at(do, do_at)), True)
    else:
        dp = dp_start(delta_at(do, do_at))
        s = begin_scores(k_tile, q, q_at, form)
        dp = over_columns(v_tile, do_tile, dp, True)
        s = warpgroup_mma_wait(form.products_dv, deps=[s])
        p, slope = weights(s, q[1].index(q_at.stage), block, 0, seen, work, form)
    dp = warpgroup_mma_wait(0, deps=[dp])
    hand_ds((slope * dp).to(dtype), q, handed, q_at)
    dv = wait_for(products_of(p.to(dtype), do_tile, dv), 0)
    mbarrier.arrive(do[3].index(do_at.stage))
    mbarrier.arrive(q[3].index(q_at.stage))
    return dv


@gluon.jit
def hand_ds(ds, q, handed, at):
    """ds to the other consumer, which has read the one before when it has freed that step's q."""
    ds_smem, ds_ready = handed
    before = at.before()
    mbarrier.wait(q[3].index(before.stage), before.parity)
    ds_smem.store(ds)
    fence_async_shared()
    mbarrier.arrive(ds_ready.index(0))


@gluon.jit
def walk_gradients(dk, tiles, channels, at, blocks, form: gl.constexpr):
    """dk and the tiles of dq, from the other consumer's ds: (dk, where q's ring and dq's channel stand then)."""
    q_at, handed_at = at
    for _ in range(form.members * blocks):
        dk = step_gradients(dk, tiles[0], channels, q_at, handed_at, form)
        q_at = q_at.next()
        handed_at = handed_at.next()
    return dk, q_at, handed_at


@gluon.jit
def step_gradients(dk, k_tile, channels, at, handed_at, form: gl.constexpr):
    """One tile of queries; dq's columns in parts where the tuning says so."""
    D: gl.constexpr = form.products_d
    dq_at = dq_position(handed_at, 0, form)
    q, do, dq, handed = channels
    ds, ds_ready = handed
    mbarrier.wait(ds_ready.index(0), handed_at.parity)
    mbarrier.wait(q[2].index(at.stage), at.parity)
    if form.tuning.parts == 2:
        sums = zeros_of(form.tuning.block_m, form.first_dq, 0)
        sums = by_columns(ds.permute((1, 0)), (k_tile[0].slice(0, form.first_dq, dim=1),), sums)
    else:
        sums = zeros_of(form.tuning.block_m, form.first_dq, form.rest_dq)
        sums = by_columns(ds.permute((1, 0)), k_tile, sums)
    dk = by_columns(ds, parts_at(q[0], at.stage), dk)
    sums = wait_for(sums, D)
    lse = lse_of_rows(sums, q[1].index(at.stage), form)  # now, since it may go once q is free
    hand_units(own_sums(sums, lse, form), dq, dq_at, form)
    if form.tuning.parts == 2:
        rest = zeros_of(form.tuning.block_m, form.rest_dq, 0)
        rest = by_columns(ds.permute((1, 0)), (k_tile[0].slice(form.first_dq, form.rest_dq, dim=1),), rest)
        dk = wait_for(dk, 1)
        rest = own_sums(wait_for(rest, 0), lse, form)
        mbarrier.arrive(q[3].index(at.stage))
        hand_units(rest, dq, dq_at.next(), form)
    else:
        dk = wait_for(dk, 0)
        mbarrier.arrive(q[3].index(at.stage))
    return dk


@gluon.jit
def lse_of_rows(sums, lse, form: gl.constexpr):
    """lse of a tile of dq's rows, of documents; else nothing that counts."""
    if form.mask.documents:
        return lse.load(gl.SliceLayout(1, sums[0].type.layout))
    else:
        return sums


@gluon.jit
def own_sums(sums, lse, form: gl.constexpr):
    """Parts of a tile of dq, of documents without rows of others."""
    if not form.mask.documents:
        return sums
    elif len(sums) == 2:
        return (without_others(sums[0], lse), without_others(sums[1], lse))
    else:
        return (without_others(sums[0], lse),)
