"""What the steps of the Hopper backward are made of: products, weights between them, dq's hand-over. backward_split_keys puts them in order."""

from ..device.dialect import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_wait,
    zero_of_turn,
)
from ..device.per_thread_mbarrier import say
from ..device.pipeline import Position
from ..device.softmax import tanh
from ..device.tma import as_rows, stage_of

ROWS = gl.constexpr(64)  # of one product, and of one consumer's tiles: 16 a warp
THREADS = gl.constexpr(128)  # of one consumer


@gluon.jit
def of_do(q_at, do_at, form: gl.constexpr):
    """Where do's ring stands: of 128 keys where q's does, with which it is freed; registers are few."""
    if form.halves:
        return q_at
    else:
        return do_at


@gluon.jit
def of_ds(q_at, ds_at, form: gl.constexpr):
    """Where ds's ring of two stands: where q's does, if that has two."""
    if form.tuning.stages == 2:
        return q_at
    else:
        return ds_at


@gluon.jit
def dq_position(handed_at, lap, form: gl.constexpr):
    """Where dq's channel stands at the tile of dq that belongs to a step, by what is handed over once a step. Besides, it holds two gradients a
    tile of keys: a whole lap of two places, two of one."""
    if form.stores == 2:
        return Position(handed_at.stage, handed_at.parity ^ lap, 2)
    elif form.halves:
        return Position(handed_at.stage * 0, handed_at.stage, 1)
    elif form.tuning.parts == 2:
        return Position(handed_at.stage, handed_at.stage, 1)  # of one stage, so both 0
    else:
        return handed_at


@gluon.jit
def hide(x, hidden, seen, limits, form: gl.constexpr):
    """x [keys, queries] with `hidden` where the query does not see the key.

    seen: the consumer's key that the tile's first query has on the diagonal, how many keys there are from the consumer's first on, and how many of
    these all queries see. A bound is compared as a key's own number against the tile's columns, which are constants of a register.
    """
    diagonal, keys_left, prefix = seen[0], seen[1], seen[2]
    BLOCK_M: gl.constexpr = x.shape[1]
    left, right = limits
    partial = False if form.even else keys_left < ROWS
    if form.mask.prefix:
        partial = partial | ((diagonal < ROWS - 1) & (prefix < ROWS))
    if form.mask.right:
        partial = partial | (diagonal + right < ROWS - 1)
    if form.mask.left:
        partial = partial | (diagonal - left > 1 - BLOCK_M)
    if partial:
        keys = gl.arange(0, ROWS, gl.SliceLayout(1, x.type.layout))
        # a column's bits 1 and 2 are its thread's, the others its register's: apart, no register holds a column
        column = gl.arange(0, BLOCK_M, gl.SliceLayout(0, x.type.layout))
        by_thread, by_register = (column & 6)[None, :], (column & -7)[None, :]
        if form.mask.right or form.mask.prefix:
            first = keys * 0
            if form.mask.prefix:
                first = gl.where(keys < prefix, 0, keys - diagonal)
            if form.mask.right:
                first = gl.maximum(first, keys - (diagonal + right)) if form.mask.prefix else keys - (diagonal + right)
            if not form.even:
                first = gl.where(keys < keys_left, first, BLOCK_M)
            x = gl.where(first[:, None] - by_thread <= by_register, x, hidden)
        elif not form.even:
            x = gl.where((keys < keys_left)[:, None], x, hidden)
        if form.mask.left:
            x = gl.where((keys - (diagonal - left))[:, None] - by_thread >= by_register, x, hidden)
    return x


@gluon.jit
def weights(s, lse, block, row: gl.constexpr, seen, work, form: gl.constexpr):
    """(p, ds / dp) of the raw scores of a head's `block`-th tile of queries that this program walks, from its `row` on: ds / dp is p, or p times
    the softcap's slope 1 - tanh^2. lse lies in shared memory, in log2 units, unless scores have begun with it."""
    diagonal, keys_left = seen[0], seen[1]
    tiles, sizes, limits, numbers, counter = work
    scale_log2, softcap, scale = numbers
    if not form.begun:
        lse_log2 = lse.load(gl.SliceLayout(0, s.type.layout))  # not sooner: 16 registers more would spill
    if form.softcap:
        s = tanh(s * softcap)
    prefix = seen[4] if form.mask.prefix else 0
    seen = (diagonal + block * form.tuning.block_m + row, keys_left, prefix)
    if form.begun:
        x = s * scale_log2
    else:
        x = s * scale_log2 - lse_log2[None, :]
    # ptxas moves nothing over the branch in `hide`. Before the exponentials it left all of them behind the wait for dp; behind them they run under
    # dp's product: d64 causal 1.03, d192 1.02 of the speed, d128 0.98 (H200)
    if form.masks and not form.hides_weights:
        x = hide(x, float("-inf"), seen, limits, form)
    p = gl.exp2(x)
    if form.masks and form.hides_weights:
        p = hide(p, 0.0, seen, limits, form)
    slope = p
    if form.softcap:
        slope = p * (1.0 - s * s)
    return p, slope


@gluon.jit
def over_columns(a, b, acc, use_acc: gl.constexpr):
    """Issue acc + a b^T over the columns of both, part by part."""
    acc = warpgroup_mma(a[0], b[0].permute((1, 0)), acc, use_acc=use_acc, is_async=True)
    if len(a) == 2:
        acc = warpgroup_mma(a[1], b[1].permute((1, 0)), acc, is_async=True)
    return acc


@gluon.jit
def by_columns(a, b, sums):
    """Issue sums + a b, for each part of b's columns."""
    begun = warpgroup_mma(a, b[0], sums[0], is_async=True)
    if len(b) == 2:
        return (begun, warpgroup_mma(a, b[1], sums[1], is_async=True))
    else:
        return (begun,)


@gluon.jit
def parts_of(tile):
    """A tile's parts as rows and columns."""
    if len(tile) == 2:
        return (as_rows(tile[0]), as_rows(tile[1]))
    else:
        return (as_rows(tile[0]),)


@gluon.jit
def parts_at(ring, stage):
    return parts_of(stage_of(ring, stage))


@gluon.jit
def tile_now(place, form: gl.constexpr):
    """The tile that stands at a place, (ring, stage). Its addresses are reckoned in this step where form.reckons: those of all products' operands,
    which LLVM would keep in registers from step to step, spill, or leave no room for a sum (docs/performance.md)."""
    ring, stage = place
    if form.reckons:
        stage = stage + zero_of_turn()
    return parts_at(ring, stage)


@gluon.jit
def rows_of(parts, row: gl.constexpr):
    """ROWS rows of a tile in parts."""
    if len(parts) == 2:
        return (parts[0].slice(row, ROWS, dim=0), parts[1].slice(row, ROWS, dim=0))
    else:
        return (parts[0].slice(row, ROWS, dim=0),)


@gluon.jit
def zeros_of(rows: gl.constexpr, first: gl.constexpr, rest: gl.constexpr):
    """Sums of [rows, first] and [rows, rest]."""
    zeros = gl.full([rows, first], 0.0, gl.float32, tile_layout(first))
    if rest:
        return (zeros, gl.full([rows, rest], 0.0, gl.float32, tile_layout(rest)))
    else:
        return (zeros,)


@gluon.jit
def wait_for(sums, pending: gl.constexpr):
    """The sums, once at most `pending` products issued after theirs are under way."""
    landed = warpgroup_mma_wait(pending, deps=[one for one in sums])
    if len(sums) == 1:
        return (landed,)
    else:
        return landed


@gluon.constexpr_function
def tile_layout(width):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])


@gluon.constexpr_function
def left_layout(width):
    """Of a left operand that enters from registers, for sums of `width` columns."""
    return gl.DotOperandLayout(0, tile_layout(width), 2)


@gluon.jit
def begin_scores(k_tile, q, at, form: gl.constexpr):
    """Issue s = k q^T, once q's tile is there."""
    q_smem, lse_smem, q_ready, q_free = q
    mbarrier.wait(q_ready.index(at.stage), at.parity)
    return scores_of(k_tile, parts_at(q_smem, at.stage))


@gluon.jit
def scores_of(k_tile, q_tile):
    """Issue s = k q^T, transposed scores [keys, queries]."""
    QUERIES: gl.constexpr = q_tile[0].shape[0]
    return over_columns(k_tile, q_tile, gl.full([ROWS, QUERIES], 0.0, gl.float32, tile_layout(QUERIES)), False)


@gluon.jit
def delta_at(do, at, form: gl.constexpr):
    """-delta of each query, in shared memory, once do's tile is there."""
    mbarrier.wait(do[2].index(at.stage), at.parity)
    return delta_of(do, at.stage, form)


@gluon.jit
def delta_of(do, stage, form: gl.constexpr):
    """Where a stage of do has it: by itself, or where shared memory is short behind lse of all stages of q."""
    if form.slim:
        stage = stage + form.tuning.stages
    return do[1].index(stage)


@gluon.jit
def dp_start(delta):
    """What dp's sum begins at, -delta of each query: beside ds, delta would take 16 registers and a subtraction."""
    return sum_from(delta.load(gl.SliceLayout(0, tile_layout(delta.shape[0]))))


@gluon.jit
def sum_from(row):
    """A product's sum that begins at a number a query.

    To be called before any product is issued, since ptxas serialises wgmma where an accumulator is written while others run (C7514); the
    inline mov, which the compiler may not move, keeps it there.
    """
    layout: gl.constexpr = row.type.layout.parent
    start, _ = gl.broadcast(row[None, :], gl.full([ROWS, row.shape[0]], 0.0, gl.float32, layout))
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [start], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def begin_both(k_tile, v_tile, q_tile, do_tile, q, do, at, form: gl.constexpr):
    """Issue s = k q^T and dp = v do^T - delta, once q's and do's tiles are there. With form.begun s has lse over its scale subtracted: what
    weights would wait for, and 16 registers, at the place where they are fewest (d128 causal 1.01 to 1.02 of the speed, H200)."""
    if form.begun:
        layout: gl.constexpr = gl.SliceLayout(0, tile_layout(form.tuning.block_m))
        mbarrier.wait(q[2].index(at.stage), at.parity)
        mbarrier.wait(do[2].index(at.stage), at.parity)
        minus_lse, minus_delta = q[1].index(at.stage).load(layout), delta_of(do, at.stage, form).load(layout)
        s, dp = sum_from(minus_lse), sum_from(minus_delta)
        s = over_columns(k_tile, q_tile, s, True)
    else:
        dp = dp_start(delta_at(do, at, form))
        s = begin_scores(k_tile, q, at, form)
    return s, over_columns(v_tile, do_tile, dp, True)


@gluon.jit
def products_of(a, b, sums):
    """`by_columns` of a left operand that enters from registers."""
    return by_columns(gl.convert_layout(a, left_layout(b[0].shape[1])), b, sums)


@gluon.jit
def in_registers(tile, wanted: gl.constexpr):
    """The rows of a tile as left operands in registers, where the tuning says so."""
    if wanted:
        held = loaded(tile)
        fence_async_shared()  # of a tile that no query sees, no step's fence follows
        return held
    else:
        return tile


@gluon.jit
def loaded(tile):
    if len(tile) == 2:
        return (tile[0].load(left_layout(ROWS)), tile[1].load(left_layout(ROWS)))
    else:
        return (tile[0].load(left_layout(ROWS)),)


@gluon.jit
def hand_over(sums, dq, share: gl.constexpr, at, form: gl.constexpr):
    """A share's columns of dq to the store partition, once it has read those before them."""
    dq_smem, dq_ready, dq_free, of_rows = dq
    slot = slot_of(at, form)
    await_share(dq_free, slot, share, at, form)
    held = as_held(sums)  # one or two units
    share_held(dq_smem, slot, share, held.shape, form).store(held)
    fence_async_shared()
    say(dq_ready, slot * form.places + share, form.dq_bells)


@gluon.jit
def hand_rows(sums, others, dq, share: gl.constexpr, at, form: gl.constexpr):
    """`hand_over` of a share that is whole, with what `others` have added to it, which has landed in its place: in dq's dtype, scaled, as rows and
    columns."""
    dq_smem, dq_ready, dq_free, of_rows = dq
    slot = slot_of(at, form)
    await_share(dq_free, slot, share, at, form)
    if form.collects:
        if others:
            held = as_held(sums)
            sums = from_held(held + share_held(dq_smem, slot, share, held.shape, form).load(held.type.layout), sums)
    as_rows(share_in_place(dq_smem, slot, share, of_rows[0], form)).store((sums * of_rows[1]).to(of_rows[0].dtype))
    fence_async_shared()
    say(dq_ready, slot * form.places + share, form.dq_bells)


@gluon.jit
def slot_of(at, form: gl.constexpr):
    """Which slot of dq's channel a position is."""
    if form.stores == 1:
        return gl.constexpr(0)
    else:
        return at.stage


@gluon.jit
def await_share(dq_free, slot, share: gl.constexpr, at, form: gl.constexpr):
    """Wait until a share's place in dq's channel is free; with form.collects those of both, lest a consumer whose sums have landed look for the
    other's place a round ahead."""
    PLACES: gl.constexpr = form.places
    for i in gl.static_range(PLACES):
        if i == share or form.collects:
            mbarrier.wait(dq_free.index(slot * PLACES + i), free_parity(at, form))


@gluon.jit
def free_parity(at, form: gl.constexpr):
    """Parity of the barrier that says a place of dq's channel is free: from the beginning, or with form.collects once it has been given, when what
    others have added has landed in it."""
    if form.collects:
        return at.parity
    else:
        return at.parity ^ 1


@gluon.jit
def share_held(dq_smem, slot, share: gl.constexpr, shape: gl.constexpr, form: gl.constexpr):
    """Where a share of dq stands in float32, in the order of registers."""
    HELD: gl.constexpr = form.dq_slot * form.dq_lines // shape[0]
    FIRST: gl.constexpr = form.share_unit(share) * form.dq_lines // shape[0]
    return reinterpret(dq_smem, gl.float32, [form.stores * HELD] + shape, dq_smem.type.layout).index(slot * HELD + FIRST)  # noqa: RUF005


@gluon.jit
def share_in_place(dq_smem, slot, share: gl.constexpr, view, form: gl.constexpr):
    """Where a share of dq stands as rows and columns: at the beginning of the memory that it has in float32."""
    BLOCKS: gl.constexpr = form.dq_lines * 1024 // view.block_type.nbytes  # of a unit
    return as_blocks(dq_smem, view).index((slot * form.dq_slot + form.share_unit(share)) * BLOCKS)


@gluon.jit
def hand_units(sums, dq, at, form: gl.constexpr):
    """64 rows of dq, or a part of their columns, to the store partition, which takes unit by unit: it adds one while the next is stored."""
    left, right = gl.split(gl.permute(gl.reshape(sums[0], [ROWS, 2, form.dq_unit]), [0, 2, 1]))
    hand_unit(0, left, dq, at, form)
    hand_unit(1, right, dq, at, form)
    if len(sums) == 2:
        hand_unit(2, sums[1], dq, at, form)


@gluon.jit
def hand_unit(unit, sums, dq, at, form: gl.constexpr):
    dq_smem, dq_ready, dq_free, of_rows = dq
    mbarrier.wait(dq_free.index(unit), at.parity ^ 1)
    dq_smem.index(unit).store(as_held(sums))
    fence_async_shared()
    say(dq_ready, unit, form.dq_bells)


@gluon.jit
def in_place_of_dq(dq_smem, slot, views, form: gl.constexpr):
    """The memory of a tile of dq as that of a tile of dk or dv, part by part."""
    BYTES: gl.constexpr = form.dq_slot * form.dq_lines * 1024
    FIRST: gl.constexpr = views[0].block_type.nbytes
    first = as_blocks(dq_smem, views[0]).index(slot * (BYTES // FIRST))
    if views[1] is not None:
        REST: gl.constexpr = views[1].block_type.nbytes
        return (first, as_blocks(dq_smem, views[1]).index(slot * (BYTES // REST) + FIRST // REST))
    else:
        return (first,)


@gluon.jit
def as_blocks(dq_smem, view):
    """All of dq's channel as blocks of a view: Triton 3.8 lays nothing over a part of it, and 3.9 nothing over what begins as several."""
    BLOCKS: gl.constexpr = dq_smem.numel * 4 // view.block_type.nbytes
    return reinterpret(dq_smem, view.dtype, [BLOCKS] + view.block_shape, view.layout)  # noqa: RUF005 (Triton has no *)


@gluon.jit
def as_held(sums):
    """Sums [rows, columns] in the order of registers, in lines of 256: by 8 columns, by 16 rows, by thread of a warp, by its four numbers.

    A thread then stores its four at once, and a warp 512 bytes in a row, with no conflict of banks; rows.convert_dq_kernel knows where each went.
    """
    ROWS: gl.constexpr = sums.shape[0]
    COLUMNS: gl.constexpr = sums.shape[1]
    pieces = gl.permute(gl.reshape(sums, [ROWS // 16, 2, 8, COLUMNS // 8, 4, 2]), [3, 0, 2, 4, 1, 5])
    return gl.reshape(pieces, [ROWS * COLUMNS // 256, 256])


@gluon.jit
def from_held(held, like):
    """What `as_held` has put in order, as sums again, like those it came from."""
    ROWS: gl.constexpr = like.shape[0]
    COLUMNS: gl.constexpr = like.shape[1]
    pieces = gl.permute(gl.reshape(held, [COLUMNS // 8, ROWS // 16, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5])
    return gl.convert_layout(gl.reshape(pieces, [ROWS, COLUMNS]), like.type.layout, assert_trivial=True)
