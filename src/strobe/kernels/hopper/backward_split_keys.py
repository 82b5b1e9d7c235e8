"""What the two consumers of the Hopper backward do with each tile of queries.

128 keys: each takes half of them, all five products, and half of dq: of its columns, or of 128 queries.

    tensor cores   s | dp        |      dv, dq | dk
    the rest           p    ds             dq to memory

With form.lags dq is that of the step before: neither then waits for ds that the other makes in the same step, and they come to be apart, so that
one's weights run under the other's products.

128 queries come in two halves, of which one is multiplied under the other's weights:

    tensor cores   s, dp | s', dp'        |    dv, dk            | dv', dq | dk'
    the rest               p        ds         p'        ds'               dq to memory

Two consumers that wait for each other only where they hand something over fill each other's gaps: at 128 keys 1.1 to 1.25 times the speed of
eight warps in step, which made the next weights under this step's products (docs/performance.md).
"""

from ..device.dialect import fence_async_shared, gl, gluon, mbarrier, warpgroup_mma, warpgroup_mma_wait
from ..device.per_thread_mbarrier import await_said, say
from ..device.pipeline import release
from .backward_key_ranges import has_others, without_others
from .backward_mainloop import (
    ROWS,
    begin_both,
    delta_at,
    dp_start,
    dq_position,
    hand_over,
    hand_rows,
    in_registers,
    of_ds,
    over_columns,
    parts_at,
    products_of,
    rows_of,
    scores_of,
    tile_layout,
    tile_now,
    wait_for,
    weights,
    zeros_of,
)
from .backward_scheduler import tile_of_step


@gluon.jit
def walk_half(w: gl.constexpr, dk, dv, keys, channels, at, seen, walk, work, form: gl.constexpr):
    """All tiles of queries for half of 128 keys: (dk, dv, where q's ring and ds's stand then)."""
    q_at, ds_at, lap = at
    k_place, v_place = keys
    keys = (k_place, v_place, in_registers(rows_of(tile_now(k_place, form), ROWS * w), form.tuning.k_in_registers))
    for member in range(form.members):
        for step in range(walk[0]):
            block = tile_of_step(step, walk, form)
            place = (q_at, of_ds(q_at, ds_at, form), lap)
            first = step == 0
            if form.members > 1:
                first = first & (member == 0)
            if form.by_rows:
                dk, dv = step_twice(w, dk, dv, keys, channels, place, seen, block, first, work, form)
            elif form.passes(w):
                if is_unseen(block, seen, work[2], form):
                    step_unseen(w, keys, channels, place, seen, block, first, form)
                else:
                    dk, dv = step_half(w, dk, dv, keys, channels, place, seen, block, first, work, form)
            else:
                dk, dv = step_half(w, dk, dv, keys, channels, place, seen, block, first, work, form)
            q_at = q_at.next()
            ds_at = ds_at.next()
    ds_at = of_ds(q_at, ds_at, form)
    if form.lags:
        if walk[0] > 0:
            last_share(w, tile_now(k_place, form), channels, ds_at.before(), lap, form)
    return dk, dv, q_at, ds_at


@gluon.jit
def step_half(w: gl.constexpr, dk, dv, keys, channels, at, seen, block, first, work, form: gl.constexpr):
    """One tile of queries. The other half's ds, which dq needs, comes by shared memory, in two tiles by turns: who has got the other's ds of a
    step has got past dq of the step before, so that the tile of the step before that is free.

    With form.lags dq is that of the step before, whose ds the other made long ago, and a barrier says when it has multiplied it: the two may be half
    a step apart, and one's weights come under the other's products. The first step of a tile of keys multiplies what it finds, and hands nothing
    over; behind the last comes `last_share`.
    """
    D: gl.constexpr = form.products_d
    k_all, k_tile, v_tile = keys_now(w, keys, form)
    dtype: gl.constexpr = k_all[0].dtype
    q, do, dq, handed = channels
    q_at, ds_at, lap = at
    ds_smem, ds_ready, ds_free = handed
    own = 2 * ds_at.stage + w
    do_tile, q_tile = parts_at(do[0], q_at.stage), parts_at(q[0], q_at.stage)
    s, dp = begin_both(k_tile, v_tile, q_tile, do_tile, q, do, q_at, form)
    p, ds = weigh(s, dp, 0, q[1].index(q_at.stage), block, 0, seen, work, dtype, form)
    await_ds(handed, own, ds_at, form)
    ds_smem.index(own).store(ds)
    say_ds(ds_ready, own, form)
    dv = products_of(p.to(dtype), do_tile, dv)
    dq_sums = begin_share(w, handed, of_share(ds_at, form), k_all, form)
    dk = products_of(ds, q_tile, dk)
    dv = wait_for(dv, 2 + D)
    dq_sums = warpgroup_mma_wait(D, deps=[dq_sums])
    hand_share(w, dq_sums, channels, at, seen, block, first, form)
    dk = wait_for(dk, 0)
    release(q[3].index(q_at.stage), form.tuning.each)
    return dk, dv


@gluon.jit
def is_unseen(block, seen, limits, form: gl.constexpr):
    """Whether no query of a tile sees any of this consumer's keys, as of the first on a causal diagonal half the keys are hidden."""
    left, right = limits
    diagonal = seen[0] + block * form.tuning.block_m
    unseen = seen[1] <= 0
    if form.mask.right:
        unseen = unseen | (diagonal + form.tuning.block_m + right <= 0)
    if form.mask.left:
        unseen = unseen | (diagonal - left >= ROWS)
    return unseen


@gluon.jit
def step_unseen(w: gl.constexpr, keys, channels, at, seen, block, first, form: gl.constexpr):
    """`step_half` of queries that see none of this half's keys: its ds is 0, and of five products only its share of dq is left."""
    q, do, dq, handed = channels
    q_at, ds_at, lap = at
    ds_smem, ds_ready, ds_free = handed
    own = 2 * ds_at.stage + w
    dtype: gl.constexpr = ds_smem.dtype
    mbarrier.wait(q[2].index(q_at.stage), q_at.parity)  # lest its place be let go a round ahead
    await_ds(handed, own, ds_at, form)
    ds_smem.index(own).store(gl.full([ROWS, form.tuning.block_m], 0.0, dtype, tile_layout(form.tuning.block_m)))
    say_ds(ds_ready, own, form)
    dq_sums = warpgroup_mma_wait(0, deps=[begin_share(w, handed, of_share(ds_at, form), tile_now(keys[0], form), form)])
    hand_share(w, dq_sums, channels, at, seen, block, first, form)
    release(q[3].index(q_at.stage), form.tuning.each)


@gluon.jit
def say_ds(ds_ready, own, form: gl.constexpr):
    """Tell the other that this half's ds stands in memory. With form.bells each thread tells by itself, and dv is multiplied before all of them meet:
    d128 causal 4k, 8k, 16k 1.011, 1.014, 1.016 of the speed, 1k 1.015, 512 1.007 (H200)."""
    fence_async_shared()
    say(ds_ready, own, form.bells)


@gluon.jit
def keys_now(w: gl.constexpr, keys, form: gl.constexpr):
    """(k, this consumer's half of it, its half of v) in a step."""
    k_place, v_place, held = keys
    if form.tuning.k_in_registers:
        k_half = held
    else:
        k_half = rows_of(tile_now(k_place, form), ROWS * w)
    return tile_now(k_place, form), k_half, rows_of(tile_now(v_place, form), ROWS * w)


@gluon.jit
def last_share(w: gl.constexpr, k_all, channels, ds_at, lap, form: gl.constexpr):
    """dq of a tile of keys' last step. Its ds is not free yet: the next tile's first step multiplies it once more."""
    q, do, dq, handed = channels
    dq_sums = warpgroup_mma_wait(0, deps=[begin_share(w, handed, ds_at, k_all, form)])
    hand_over(dq_sums, dq, w, dq_position(ds_at, lap, form), form)


@gluon.jit
def step_twice(w: gl.constexpr, dk, dv, keys, channels, at, seen, block, first, work, form: gl.constexpr):
    """`step_half` of 128 queries, 64 and 64: the second's scores and dp are multiplied under the first's weights, the first's dk and dv under the
    second's. k enters from registers, lest products of half the queries read it from shared memory twice as often: d64 1.05 of the speed of 128
    at once, windows 1.08; with k from shared memory 0.94 to 1.03 (H200)."""
    k_all, k_tile, v_tile = keys_now(w, keys, form)
    dtype: gl.constexpr = k_all[0].dtype
    q, do, dq, handed = channels
    q_at, ds_at, lap = at
    ds_smem, ds_ready, ds_free = handed
    own = 2 * ds_at.stage + w
    do_tile, q_tile = parts_at(do[0], q_at.stage), parts_at(q[0], q_at.stage)
    do_first, do_second = rows_of(do_tile, 0), rows_of(do_tile, ROWS)
    q_first, q_second = rows_of(q_tile, 0), rows_of(q_tile, ROWS)
    delta = delta_at(do, q_at, form)
    dp, dp_second = dp_start(delta.slice(0, ROWS)), dp_start(delta.slice(ROWS, ROWS))
    mbarrier.wait(q[2].index(q_at.stage), q_at.parity)
    s = scores_of(k_tile, q_first)
    dp = over_columns(v_tile, do_first, dp, True)
    s_second = scores_of(k_tile, q_second)
    dp_second = over_columns(v_tile, do_second, dp_second, True)
    lse = q[1].index(q_at.stage)
    p, ds = weigh(s, dp, 2, lse.slice(0, ROWS), block, 0, seen, work, dtype, form)
    await_ds(handed, own, ds_at, form)
    ds_smem.index(own).slice(0, ROWS, dim=1).store(ds)
    dv = products_of(p.to(dtype), do_first, dv)
    dk = products_of(ds, q_first, dk)
    p, ds = weigh(s_second, dp_second, 2, lse.slice(ROWS, ROWS), block, ROWS, seen, work, dtype, form)
    ds_smem.index(own).slice(ROWS, ROWS, dim=1).store(ds)
    say_ds(ds_ready, own, form)
    dv = products_of(p.to(dtype), do_second, dv)
    dq_sums = begin_share(w, handed, of_share(ds_at, form), k_all, form)
    dk = products_of(ds, q_second, dk)
    dv = wait_for(dv, 3)
    dq_sums = warpgroup_mma_wait(1, deps=[dq_sums])
    hand_share(w, dq_sums, channels, at, seen, block, first, form)
    dk = wait_for(dk, 0)
    release(q[3].index(q_at.stage), form.tuning.each)
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
def of_share(ds_at, form: gl.constexpr):
    """Where ds stands of the step whose dq is multiplied: this one, or the one before."""
    if form.lags:
        return ds_at.before()
    else:
        return ds_at


@gluon.jit
def await_ds(handed, own, ds_at, form: gl.constexpr):
    """With form.lags, wait until a place of ds is free: the first tile waits for nobody, the second, which the first step multiplies, for that."""
    if form.lags:
        mbarrier.wait(handed[2].index(own), ds_at.parity ^ 1 ^ ds_at.stage)


@gluon.jit
def hand_share(w: gl.constexpr, dq_sums, channels, at, seen, block, first, form: gl.constexpr):
    """A share of dq to the store partition, of documents without rows of others; with form.lags, but what a tile of keys' first step multiplies."""
    q, do, dq, handed = channels
    q_at, ds_at, lap = at
    place = of_share(ds_at, form)
    if form.lags:
        release(handed[2].index(2 * place.stage + (1 - w)), form.tuning.each)
        if not first:
            hand_over(dq_sums, dq, w, dq_position(place, lap, form), form)
    else:
        if form.mask.documents:
            if has_others(block, (seen[2], seen[3])):
                lse = share_of_rows(w, q[1].index(q_at.stage), form).load(gl.SliceLayout(1, dq_sums.type.layout))
                dq_sums = without_others(dq_sums, lse)
        at = dq_position(place, lap, form)
        if form.finishes:
            if block < seen[2]:
                hand_rows(dq_sums, seen[3], dq, w, at, form)
            else:
                hand_over(dq_sums, dq, w, at, form)
        else:
            hand_over(dq_sums, dq, w, at, form)


@gluon.jit
def begin_share(w: gl.constexpr, handed, at, k_all, form: gl.constexpr):
    """Issue this consumer's share of dq: over its own keys, then over the other's, once their ds is there."""
    ds_smem, ds_ready, ds_free = handed
    k_columns = columns_of(w, k_all, form)
    own, other = 2 * at.stage + w, 2 * at.stage + (1 - w)
    sums = zeros_of(ROWS, form.share_columns(w), 0)[0]
    sums = warpgroup_mma(share_of(w, ds_smem.index(own), form), k_columns.slice(ROWS * w, ROWS, dim=0), sums, use_acc=False, is_async=True)
    await_said(ds_ready, other, at.parity, form.bells)
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
