"""What the two consumers of the Hopper backward do where one makes weights, ds and dv, and the other only multiplies: dq and dk.

64 keys, of wide heads, whose sums leave registers for no more:

    weights        s | dp | p, ds to the other | dv
    gradients      dq, dk | dq to memory, unit by unit

128 keys, as two tiles of 64, so that dq is added to memory half as often: 192/128 1.15 of the speed of 64 keys (H200). The second tile's products
are issued with the first's dv; of dq a unit is so narrow that it fits beside two tiles of dk.

    weights        s, dp | p, ds to the other | dv, s', dp' | p', ds' to the other | dv'
    gradients      a unit of dq, dk | that unit to memory | a unit, dk' | to memory | ...

ds then has as many places as q, where it is free when q is; dk and dv leave in the places of k and v.
"""

from ..device.dialect import fence_async_shared, gl, gluon, mbarrier, warpgroup_mma, warpgroup_mma_wait, zero_of_turn
from ..device.per_thread_mbarrier import await_said, say
from ..device.pipeline import Position
from .backward_key_ranges import without_others
from .backward_mainloop import (
    ROWS,
    begin_scores,
    by_columns,
    delta_at,
    delta_of,
    dp_start,
    dq_position,
    hand_unit,
    hand_units,
    in_registers,
    of_do,
    over_columns,
    parts_at,
    products_of,
    rows_of,
    scores_of,
    tile_now,
    wait_for,
    weights,
    zeros_of,
)
from .backward_scheduler import tile_of_step


@gluon.jit
def walk_weights(dv, keys, channels, at, seen, walk, work, form: gl.constexpr):
    """Weights of all tiles of queries, ds to the other consumer, and dv: (dv, where the rings stand then)."""
    q_at, do_at = at
    keys = (keys[0], keys[1], in_registers(tile_now(keys[0], form), form.tuning.k_in_registers))
    for _ in range(form.members):
        for step in range(walk[0]):
            place, block = (q_at, of_do(q_at, do_at, form)), tile_of_step(step, walk, form)
            if form.two_tiles:
                dv = step_weights_of_two(dv, keys, channels, place, seen, block, work, form)
            else:
                dv = step_weights(dv, keys, channels, place, seen, block, work, form)
            q_at = q_at.next()
            do_at = do_at.next()
    return dv, q_at, do_at


@gluon.jit
def step_weights(dv, keys, channels, at, seen, block, work, form: gl.constexpr):
    """One tile of queries. Where do has one place it is waited for behind the weights."""
    k_place, v_place, held = keys
    if form.tuning.k_in_registers:
        k_tile = held
    else:
        k_tile = tile_now(k_place, form)
    v_tile = tile_now(v_place, form)
    q, do, dq, handed = channels
    q_at, do_at = at
    dtype: gl.constexpr = v_tile[0].dtype
    do_tile = parts_at(do[0], do_at.stage)
    if form.tuning.stages_do == 1:
        s = warpgroup_mma_wait(0, deps=[begin_scores(k_tile, q, q_at, form)])
        p, slope = weights(s, q[1].index(q_at.stage), block, 0, seen, work, form)
        dp = over_columns(v_tile, do_tile, dp_start(delta_at(do, do_at, form)), True)
    else:
        dp = dp_start(delta_at(do, do_at, form))
        s = begin_scores(k_tile, q, q_at, form)
        dp = over_columns(v_tile, do_tile, dp, True)
        s = warpgroup_mma_wait(form.products_dv, deps=[s])
        p, slope = weights(s, q[1].index(q_at.stage), block, 0, seen, work, form)
    dp = warpgroup_mma_wait(0, deps=[dp])
    hand_ds((slope * dp).to(dtype), q, handed, q_at, form)
    dv = wait_for(products_of(p.to(dtype), do_tile, dv), 0)
    mbarrier.arrive(do[3].index(do_at.stage))
    mbarrier.arrive(q[3].index(q_at.stage))
    return dv


@gluon.jit
def hand_ds(ds, q, handed, at, form: gl.constexpr):
    """ds to the other consumer, which has read the one before when it has freed that step's q."""
    ds_smem, ds_ready, ds_free = handed
    before = at.before()
    mbarrier.wait(q[3].index(before.stage), before.parity)
    ds_smem.index(0).store(ds)
    fence_async_shared()
    say(ds_ready, 0, form.bells)


@gluon.jit
def step_weights_of_two(dv, keys, channels, at, seen, block, work, form: gl.constexpr):
    """`step_weights` of 128 keys. The second tile's dp has delta subtracted behind its product: to begin at it, it would have to be issued while no
    other is under way (backward_mainloop.sum_from). Addresses are reckoned before each product: else they spill."""
    k_place, v_place, held = keys
    q, do, dq, handed = channels
    q_at, do_at = at
    dtype: gl.constexpr = do[0][0].dtype
    dp = dp_start(delta_at(do, do_at, form))
    s = begin_scores(rows_of(tile_now(k_place, form), 0), q, q_at, form)
    dp = over_columns(rows_of(tile_now(v_place, form), 0), parts_at(do[0], do_at.stage), dp, True)
    s = warpgroup_mma_wait(form.products_dv, deps=[s])
    p, slope = weights(s, q[1].index(q_at.stage), block, 0, seen, work, form)
    dp = warpgroup_mma_wait(0, deps=[dp])
    place_of_ds(0, handed, q_at).store((slope * dp).to(dtype))
    do_place, q_place = (do[0], do_at.stage), (q[0], q_at.stage)
    first = products_of(p.to(dtype), tile_now(do_place, form), dv[0])
    s = scores_of(rows_of(tile_now(k_place, form), ROWS), tile_now(q_place, form))
    dp = scores_of(rows_of(tile_now(v_place, form), ROWS), tile_now(do_place, form))
    s = warpgroup_mma_wait(form.products_dv, deps=[s])
    p, slope = weights(s, q[1].index(q_at.stage + zero_of_turn()), block, -ROWS, keys_from(ROWS, seen, form), work, form)
    dp = warpgroup_mma_wait(0, deps=[dp])
    minus_delta = delta_of(do, do_at.stage + zero_of_turn(), form).load(gl.SliceLayout(0, dp.type.layout))
    place_of_ds(1, handed, q_at).store((slope * (dp + minus_delta[None, :])).to(dtype))
    fence_async_shared()
    say(handed[1], q_at.stage, form.bells)
    second = products_of(p.to(dtype), tile_now(do_place, form), dv[1])
    first = wait_for(first, form.products_dv)
    second = wait_for(second, 0)
    mbarrier.arrive(do[3].index(do_at.stage))
    mbarrier.arrive(q[3].index(q_at.stage))
    return first, second


@gluon.jit
def keys_from(row: gl.constexpr, seen, form: gl.constexpr):
    """`seen` of a consumer's keys from `row` on, but for the diagonal, which `weights` moves."""
    if form.spans:
        return (seen[0], seen[1] - row, seen[2], seen[3], seen[4] - row)
    else:
        return (seen[0], seen[1] - row)


@gluon.jit
def place_of_ds(part: gl.constexpr, handed, at):
    """Where ds of a tile of 64 among 128 keys goes: who has a step's q has the place for its ds, which the other frees with q."""
    return handed[0].index(at.stage).slice(ROWS * part, ROWS, dim=0)


@gluon.jit
def walk_gradients(dk, k_place, channels, at, blocks, form: gl.constexpr):
    """dk and the tiles of dq, from the other consumer's ds: (dk, where q's ring and dq's channel stand then)."""
    q_at, handed_at = at
    for _ in range(form.members * blocks):
        if form.two_tiles:
            dk = step_gradients_of_two(dk, k_place, channels, q_at, form)
        else:
            dk = step_gradients(dk, tile_now(k_place, form), channels, q_at, handed_at, form)
        q_at = q_at.next()
        handed_at = handed_at.next()
    return dk, q_at, handed_at


@gluon.jit
def step_gradients(dk, k_tile, channels, at, handed_at, form: gl.constexpr):
    """One tile of queries; dq's columns in parts where the tuning says so."""
    D: gl.constexpr = form.products_d
    dq_at = dq_position(handed_at, 0, form)
    q, do, dq, handed = channels
    ds, ds_ready = handed[0].index(0), handed[1]
    await_said(ds_ready, 0, handed_at.parity, form.bells)
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
def step_gradients_of_two(dk, k_place, channels, at, form: gl.constexpr):
    """`step_gradients` of 128 keys: dq unit by unit, the first two stored under the products of dk. q is there if ds is."""
    q, do, dq, handed = channels
    ds, ds_ready = handed[0].index(at.stage), handed[1]
    q_tile = parts_at(q[0], at.stage)
    await_said(ds_ready, at.stage, at.parity, form.bells)
    sums = begin_unit(0, ds, k_place, form)
    first = by_columns(ds.slice(0, ROWS, dim=0), q_tile, dk[0])
    hand_own(0, warpgroup_mma_wait(form.products_d, deps=[sums]), q, dq, at, form)
    sums = begin_unit(1, ds, k_place, form)
    second = by_columns(ds.slice(ROWS, ROWS, dim=0), q_tile, dk[1])
    hand_own(1, warpgroup_mma_wait(form.products_d, deps=[sums]), q, dq, at, form)
    for unit in gl.static_range(2, form.dq_units()):
        hand_own(unit, warpgroup_mma_wait(0, deps=[begin_unit(unit, ds, k_place, form)]), q, dq, at, form)
    first = wait_for(first, 0)
    second = wait_for(second, 0)
    mbarrier.arrive(q[3].index(at.stage))
    return first, second


@gluon.jit
def begin_unit(unit: gl.constexpr, ds, k_place, form: gl.constexpr):
    """Issue a unit of dq, over all keys."""
    UNIT: gl.constexpr = form.dq_unit
    column: gl.constexpr = unit * UNIT
    k_tile = tile_now(k_place, form)
    if column < form.first_d:
        columns = k_tile[0].slice(column, UNIT, dim=1)
    else:
        columns = k_tile[1].slice(column - form.first_d, UNIT, dim=1)
    return warpgroup_mma(ds.permute((1, 0)), columns, zeros_of(ROWS, UNIT, 0)[0], use_acc=False, is_async=True)


@gluon.jit
def hand_own(unit: gl.constexpr, sums, q, dq, at, form: gl.constexpr):
    """A unit of dq to the store partition, of documents without rows of others. A step takes whole laps of the channel, an even number of them."""
    PLACES: gl.constexpr = form.places
    lse = lse_of_rows((sums,), q[1].index(at.stage), form)
    lap = Position(zero_of_turn(), zero_of_turn() + unit // PLACES, 1)
    hand_unit(unit % PLACES, own_sums((sums,), lse, form)[0], dq, lap, form)


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
