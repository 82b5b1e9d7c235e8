"""What the two consumers of the Hopper backward do with each tile of queries.

128 keys: each takes half of them, all five products, and half of dq: of its columns, or of 128 queries.

    tensor cores   s | dp        |      dv, dq | dk
    the rest           p    ds             dq to memory

64 keys, of wide heads, whose sums leave registers for no more: one makes weights and dv, the other all that follows from dp.

    weights        s | p, to the other | dv, next s
    gradients      ds | dq, dk | dq to memory, next dp

Two consumers that wait for each other only where they hand something over fill each other's gaps: at 128 keys 1.1 to 1.25 times the speed of
eight warps in step, which made the next weights under this step's products (docs/performance.md).
"""

from ..device.dialect import fence_async_shared, gl, gluon, mbarrier, warpgroup_mma, warpgroup_mma_wait
from .backward_steps import (
    ROWS,
    begin_scores,
    by_columns,
    delta_at,
    dp_start,
    dq_position,
    hand_over,
    next_or_same,
    of_do,
    of_ds,
    over_columns,
    parts_at,
    products_of,
    rows_of,
    tile_layout,
    tile_of_step,
    wait_for,
    weights,
    zeros_of,
)


@gluon.jit
def walk_half(w: gl.constexpr, dk, dv, tiles, channels, at, seen, blocks, work, form: gl.constexpr):
    """All tiles of queries for half of 128 keys: (dk, dv, where q's ring and ds's stand then)."""
    q_at, ds_at, lap = at
    for _ in range(form.members):
        for step in range(blocks):
            block = tile_of_step(step, blocks, form)
            dk, dv = step_half(w, dk, dv, tiles, channels, (q_at, of_ds(q_at, ds_at, form), lap), seen, block, work, form)
            q_at = q_at.next()
            ds_at = ds_at.next()
    return dk, dv, q_at, of_ds(q_at, ds_at, form)


@gluon.jit
def step_half(w: gl.constexpr, dk, dv, tiles, channels, at, seen, block, work, form: gl.constexpr):
    """One tile of queries. The other half's ds, which dq needs, comes by shared memory, in two tiles by turns: who has got the other's ds of a
    step has got past dq of the step before, so that the tile of the step before that is free."""
    D: gl.constexpr = form.products_d
    k_all, v_tile = tiles
    k_tile = rows_of(k_all, ROWS * w)
    dtype: gl.constexpr = k_all[0].dtype
    q, do, dq, handed = channels
    q_at, ds_at, lap = at
    ds_smem, ds_ready = handed
    own = 2 * ds_at.stage + w
    do_tile, q_tile = parts_at(do[0], q_at.stage), parts_at(q[0], q_at.stage)
    dp = dp_start(delta_at(do, q_at, form), form)
    s = begin_scores(k_tile, q, q_at, form)
    dp = over_columns(v_tile, do_tile, dp, True)
    s = warpgroup_mma_wait(form.products_dv, deps=[s])
    p, slope = weights(s, q, q_at, seen, block, work, form)
    dp = warpgroup_mma_wait(0, deps=[dp])
    ds = (slope * dp).to(dtype)
    ds_smem.index(own).store(ds)
    fence_async_shared()
    mbarrier.arrive(ds_ready.index(own))
    # not before dp has been waited for: p as an operand beside p as a factor of ds would spill
    dv = products_of(p.to(dtype), do_tile, dv)
    dq_sums = begin_share(w, handed, ds_at, k_all, form)
    dk = products_of(ds, q_tile, dk)
    dv = wait_for(dv, 2 + D)
    dq_sums = wait_for((dq_sums,), D)
    hand_over(dq_sums, dq, w, dq_position(ds_at, lap, form), form)
    dk = wait_for(dk, 0)
    mbarrier.arrive(q[3].index(q_at.stage))
    return dk, dv


@gluon.jit
def begin_share(w: gl.constexpr, handed, at, k_all, form: gl.constexpr):
    """Issue this consumer's share of dq: over its own keys, then over the other's, once their ds is there."""
    ds_smem, ds_ready = handed
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
def walk_weights(dv, tiles, channels, at, seen, blocks, work, form: gl.constexpr):
    """Weights of all tiles of queries, to the other consumer, and dv: (dv, where the rings stand then). Each step begins the next one's scores
    behind dv: sooner, it would wait for q before it makes weights, and the other consumer for both (192/128 262 TFLOP/s for 403, H200)."""
    k_tile, v_tile = tiles
    q, do, dq, handed = channels
    ds_smem, slope_smem, slope_ready, slope_free = handed
    q_at, do_at, slope_at = at
    total = form.members * blocks
    block = blocks * 0
    s = gl.full([ROWS, form.tuning.block_m], 0.0, gl.float32, tile_layout(form.tuning.block_m))
    for _ in range(gl.minimum(total, 1)):
        s = warpgroup_mma_wait(0, deps=[begin_scores(k_tile, q, q_at, form)])
    for i in range(total):
        more = i + 1 < total
        following = next_or_same(q_at, more)
        slot = of_do(q_at, do_at, form)
        p, slope = weights(s, q, q_at, seen, tile_of_step(block, blocks, form), work, form)
        mbarrier.wait(slope_free.index(0), slope_at.parity ^ 1)
        slope_smem.store(slope)
        mbarrier.arrive(slope_ready.index(0))
        mbarrier.wait(do[2].index(slot.stage), slot.parity)
        dv = products_of(p.to(k_tile[0].dtype), parts_at(do[0], slot.stage), dv)
        s = begin_scores(k_tile, q, following, form)
        dv = wait_for(dv, form.products_d)
        if form.tuning.apart:
            mbarrier.arrive(do[3].index(slot.stage))
        mbarrier.arrive(q[3].index(q_at.stage), pred=more)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(q[3].index(q_at.stage), pred=i + 1 == total)  # read once more, in vain
        block = gl.where(block + 1 == blocks, 0, block + 1)
        q_at = q_at.next()
        do_at = do_at.next()
        slope_at = slope_at.next()
    return dv, q_at, do_at, slope_at


@gluon.jit
def walk_gradients(dk, tiles, channels, at, blocks, form: gl.constexpr):
    """dk and the tiles of dq, from dp and the other consumer's weights: (dk, where the rings stand then)."""
    do = channels[1]
    q_at, do_at, slope_at = at
    total = form.members * blocks
    dp = gl.full([ROWS, form.tuning.block_m], 0.0, gl.float32, tile_layout(form.tuning.block_m))
    for _ in range(gl.minimum(total, 1)):
        dp = warpgroup_mma_wait(0, deps=[begin_dp(tiles[1], do, of_do(q_at, do_at, form), form)])
    for i in range(total):
        slot = of_do(q_at, do_at, form)
        more = i + 1 < total
        dk, dp = step_gradients(dk, tiles, channels, dp, (q_at, slot, slope_at, dq_position(slope_at, 0, form)), more, form)
        do_free = channels[1][3] if form.tuning.apart else channels[0][3]
        mbarrier.arrive(do_free.index(slot.stage), pred=i + 1 == total)  # read once more, in vain
        q_at = q_at.next()
        do_at = do_at.next()
        slope_at = slope_at.next()
    return dk, q_at, do_at, slope_at


@gluon.jit
def step_gradients(dk, tiles, channels, dp, at, more, form: gl.constexpr):
    """One tile of queries, and the next one's dp, begun behind this one's products. `more` than this one: else do's tile is left to the caller,
    as it is read again."""
    D: gl.constexpr = form.products_d
    k_tile, v_tile = tiles
    q, do, dq, handed = channels
    ds_smem, slope_smem, slope_ready, slope_free = handed
    q_at, do_at, slope_at, dq_at = at
    after = next_or_same(do_at, more)
    layout: gl.constexpr = tile_layout(form.tuning.block_m)
    delta = do[1].index(do_at.stage).load(gl.SliceLayout(0, layout))
    dp = dp + delta[None, :]
    mbarrier.wait(slope_ready.index(0), slope_at.parity)
    ds_smem.store((slope_smem.load(layout) * dp).to(k_tile[0].dtype))
    mbarrier.arrive(slope_free.index(0))
    fence_async_shared()
    if form.tuning.apart:
        mbarrier.arrive(do[3].index(do_at.stage), pred=more)
    dq_sums = zeros_of(form.tuning.block_m, form.first_dq, 0 if form.tuning.parts == 2 else form.rest_dq)
    if form.tuning.parts == 2:
        dq_sums = by_columns(ds_smem.permute((1, 0)), (k_tile[0].slice(0, form.first_dq, dim=1),), dq_sums)
    else:
        dq_sums = by_columns(ds_smem.permute((1, 0)), k_tile, dq_sums)
    mbarrier.wait(q[2].index(q_at.stage), q_at.parity)
    dk = by_columns(ds_smem, parts_at(q[0], q_at.stage), dk)
    dq_sums = wait_for(dq_sums, D)
    hand_over(dq_sums, dq, 0, dq_at, form)
    if form.tuning.parts == 2:
        rest = zeros_of(form.tuning.block_m, form.rest_dq, 0)
        rest = by_columns(ds_smem.permute((1, 0)), (k_tile[0].slice(form.first_dq, form.rest_dq, dim=1),), rest)
        dk = wait_for(dk, 1)
        release(q, q_at, more, form)
        hand_over(wait_for(rest, 0), dq, 0, dq_at.next(), form)
        dp = begin_dp(v_tile, do, after, form)
    else:
        dp = begin_dp(v_tile, do, after, form)
        dk = wait_for(dk, form.products_dv)
        release(q, q_at, more, form)
    dp = warpgroup_mma_wait(0, deps=[dp])
    return dk, dp


@gluon.jit
def release(q, at, more, form: gl.constexpr):
    """Free q's tile, and do's with it where their rings are one."""
    if form.tuning.apart:
        mbarrier.arrive(q[3].index(at.stage))
    else:
        mbarrier.arrive(q[3].index(at.stage), pred=more)


@gluon.jit
def begin_dp(v_tile, do, at, form: gl.constexpr):
    """Issue dp = v do^T, once do's tile is there."""
    zero = gl.full([ROWS, form.tuning.block_m], 0.0, gl.float32, tile_layout(form.tuning.block_m))
    mbarrier.wait(do[2].index(at.stage), at.parity)
    return over_columns(v_tile, parts_at(do[0], at.stage), zero, False)
