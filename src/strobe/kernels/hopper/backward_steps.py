"""The Hopper backward's walk over tiles of queries, step by step: products, weights between them, dq's hand-over."""

from ..device.channel import Position, ring_start
from ..device.dialect import fence_async_shared, gl, gluon, mbarrier, partition_barrier, reinterpret, warpgroup_mma, warpgroup_mma_wait
from ..device.softmax import tanh
from ..device.views import tile_2d


@gluon.jit
def of_do(q_at, do_at, form: gl.constexpr):
    """Where do's ring stands: where q's does, if both are of one depth; registers are few."""
    if form.tuning.apart:
        return do_at
    else:
        return q_at


@gluon.jit
def hide(x, seen, limits, form: gl.constexpr):
    """Exponents x [keys, queries] with -inf where the query does not see the key.

    seen: the tile's key that its first query has on the diagonal, and how many keys there are from the tile's first on. A bound is
    compared as a key's own number against the tile's columns, which are constants of a register.
    """
    diagonal, keys_left = seen
    BLOCK_M: gl.constexpr = form.tuning.block_m
    BLOCK_N: gl.constexpr = form.tuning.block_n
    left, right = limits
    partial = False if form.even else keys_left < BLOCK_N
    if form.mask.right:
        partial = partial | (diagonal + right < BLOCK_N - 1)
    if form.mask.left:
        partial = partial | (diagonal - left > 1 - BLOCK_M)
    if partial:
        keys = gl.arange(0, BLOCK_N, gl.SliceLayout(1, x.type.layout))
        # a column's bits 1 and 2 are its thread's, the others its register's: apart, no register holds a column
        column = gl.arange(0, BLOCK_M, gl.SliceLayout(0, x.type.layout))
        by_thread, by_register = (column & 6)[None, :], (column & -7)[None, :]
        first = keys * 0
        if form.mask.right:
            first = keys - (diagonal + right)
        if not form.even:
            first = gl.where(keys < keys_left, first, BLOCK_M)
        x = gl.where(first[:, None] - by_thread <= by_register, x, float("-inf"))
        if form.mask.left:
            x = gl.where((keys - (diagonal - left))[:, None] - by_thread >= by_register, x, float("-inf"))
    return x


@gluon.jit
def weights(s, q, at, seen, block, work, form: gl.constexpr):
    """(p, ds / dp) of the raw scores of a head's `block`-th tile of queries that this program walks: ds / dp is p, or p times the softcap's
    slope 1 - tanh^2."""
    diagonal, keys_left = seen
    sizes, limits, numbers = work
    scale_log2, softcap, scale = numbers
    lse_log2 = q[1].index(at.stage).load(gl.SliceLayout(0, s.type.layout))  # not sooner: 16 registers more would spill
    if form.softcap:
        s = tanh(s * softcap)
    x = s * scale_log2 - lse_log2[None, :]
    if form.masks:
        x = hide(x, (diagonal + block * form.tuning.block_m, keys_left), limits, form)
    p = gl.exp2(x)
    slope = p
    if form.softcap:
        slope = p * (1.0 - s * s)
    return p, slope


@gluon.jit
def over_columns(a, b, acc, first: gl.constexpr, rest: gl.constexpr, use_acc: gl.constexpr):
    """Issue acc + a b^T over the columns of both: the first of them and the rest, if there is one."""
    acc = warpgroup_mma(a.slice(0, first, dim=1), b.slice(0, first, dim=1).permute((1, 0)), acc, use_acc=use_acc, is_async=True)
    if rest:
        acc = warpgroup_mma(a.slice(first, rest, dim=1), b.slice(first, rest, dim=1).permute((1, 0)), acc, is_async=True)
    return acc


@gluon.jit
def by_columns(a, b, sums, first: gl.constexpr, rest: gl.constexpr):
    """Issue sums + a b, for b's first columns and for the rest."""
    begun = warpgroup_mma(a, b.slice(0, first, dim=1), sums[0], is_async=True)
    if rest:
        return (begun, warpgroup_mma(a, b.slice(first, rest, dim=1), sums[1], is_async=True))
    else:
        return (begun,)


@gluon.jit
def zeros_of(rows: gl.constexpr, first: gl.constexpr, rest: gl.constexpr, down: gl.constexpr):
    """Sums of [rows, first] and [rows, rest]: 16 rows a warp, `down` warps one below the other, and the others beside them."""
    zeros = gl.full([rows, first], 0.0, gl.float32, tile_layout(first, down))
    if rest:
        return (zeros, gl.full([rows, rest], 0.0, gl.float32, tile_layout(rest, down)))
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
def tile_layout(width, down):
    return gl.NVMMADistributedLayout([3, 0], [down, 8 // down], [16, width * down // 8, 16])


@gluon.jit
def begin_scores(k_tile, q, at, form: gl.constexpr):
    """Issue s = k q^T, transposed scores [keys, queries], once q's tile is there."""
    q_smem, lse_smem, q_ready, q_free = q
    zero = gl.full([form.tuning.block_n, form.tuning.block_m], 0.0, gl.float32, tile_layout(form.tuning.block_m, form.down))
    mbarrier.wait(q_ready.index(at.stage), at.parity)
    return over_columns(k_tile, tile_2d(q_smem, at.stage), zero, form.first_d, form.rest_d, False)


@gluon.jit
def delta_at(do, at, form: gl.constexpr):
    """-delta of each query, once do's tile is there."""
    do_smem, delta_smem, do_ready, do_free = do
    mbarrier.wait(do_ready.index(at.stage), at.parity)
    return delta_smem.index(at.stage).load(gl.SliceLayout(0, tile_layout(form.tuning.block_m, form.down)))


@gluon.jit
def dp_start(delta, form: gl.constexpr):
    """What dp's sum begins at, -delta of each query: beside ds, delta would take 16 registers and a subtraction.

    To be called before any product is issued, since ptxas serialises wgmma where an accumulator is written while others run (C7514); the
    inline mov, which the compiler may not move, keeps it there.
    """
    layout: gl.constexpr = tile_layout(form.tuning.block_m, form.down)
    zero = gl.full([form.tuning.block_n, form.tuning.block_m], 0.0, gl.float32, layout)
    start, _ = gl.broadcast(delta[None, :], zero)
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [start], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def hand_over(dq_sums, dq, at, form: gl.constexpr):
    """Columns of dq to the store partition, once it has read those before them."""
    mbarrier.wait(dq[4].index(0), at.parity ^ 1)
    put(dq_sums, dq, form)


@gluon.jit
def put(dq_sums, dq, form: gl.constexpr):
    """`hand_over` into memory that is known to be free."""
    p_smem, ds_smem, dq_smem, dq_ready, dq_free = dq
    first = as_held(dq_sums[0])
    reinterpret(dq_smem, gl.float32, first.shape, dq_smem.type.layout).store(first)
    if len(dq_sums) == 2:
        dq_smem.index(dq_sums[0].shape[1] // form.dq_unit).store(as_held(dq_sums[1]))
    fence_async_shared()
    mbarrier.arrive(dq_ready.index(0))


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
def walk_in_memory(dk, dv, tiles, channels, seen, blocks, work, form: gl.constexpr):
    """All tiles of queries for 64 keys: (dk, dv)."""
    PARTS: gl.constexpr = form.tuning.parts
    q_at = ring_start(form.tuning.stages)
    do_at = ring_start(form.tuning.stages_do)
    dq_at = ring_start(1)
    for _ in range(form.members):
        for block in range(blocks):
            at = (q_at, of_do(q_at, do_at, form), dq_at)
            dk, dv = step_in_memory(dk, dv, tiles, channels, at, seen, block, work, form)
            q_at = q_at.next()
            do_at = do_at.next()
            for _part in gl.static_range(PARTS):
                dq_at = dq_at.next()
    return dk, dv


@gluon.jit
def step_in_memory(dk, dv, tiles, channels, at, seen, block, work, form: gl.constexpr):
    """One tile of queries for 64 keys: (dk, dv). Two warps need each of p and ds, which pass through shared memory.

        tensor cores   s | dp     |    dv, dq, dk | rest of dq
        the rest           p  ds       dq to memory

    Steps that begin the next one's scores, as with 128 keys, are slower here: 288 TFLOP/s for 402 at 256 columns (H200).
    """
    D: gl.constexpr = form.products_d
    DV: gl.constexpr = form.products_dv
    k_tile, v_tile = tiles
    q, do, dq = channels
    q_at, do_at, dq_at = at
    p_smem, ds_smem, dq_smem, dq_ready, dq_free = dq
    dtype: gl.constexpr = k_tile.dtype
    do_tile = tile_2d(do[0], do_at.stage)
    dp = dp_start(delta_at(do, do_at, form), form)
    s = begin_scores(k_tile, q, q_at, form)
    dp = over_columns(v_tile, do_tile, dp, form.first_dv, form.rest_dv, True)
    s = warpgroup_mma_wait(DV, deps=[s])
    p, slope = weights(s, q, q_at, seen, block, work, form)
    p_smem.store(p.to(dtype))
    dp = warpgroup_mma_wait(0, deps=[dp])
    ds_smem.store((slope * dp).to(dtype))
    fence_async_shared()
    dv = by_columns(p_smem, do_tile, dv, form.first_dv, form.rest_dv)
    REST: gl.constexpr = 0 if form.tuning.parts == 2 else form.rest_dq
    dq_sums = by_columns(ds_smem.permute((1, 0)), k_tile, zeros_of(form.tuning.block_m, form.first_dq, REST, 4), form.first_dq, REST)
    dk = by_columns(ds_smem, tile_2d(q[0], q_at.stage), dk, form.first_d, form.rest_d)
    dv = wait_for(dv, len(dq_sums) + D)
    if form.tuning.apart:
        mbarrier.arrive(do[3].index(do_at.stage))
    dq_sums = wait_for(dq_sums, D)
    hand_over(dq_sums, dq, dq_at, form)
    if form.tuning.parts == 2:
        rest = zeros_of(form.tuning.block_m, form.rest_dq, 0, 4)[0]
        k_rest = k_tile.slice(form.first_dq, form.rest_dq, dim=1)
        rest = warpgroup_mma(ds_smem.permute((1, 0)), k_rest, rest, use_acc=False, is_async=True)
        dk = wait_for(dk, 1)
        mbarrier.arrive(q[3].index(q_at.stage))
        rest = warpgroup_mma_wait(0, deps=[rest])
        hand_over((rest,), dq, dq_at.next(), form)
    else:
        dk = wait_for(dk, 0)
        mbarrier.arrive(q[3].index(q_at.stage))
    return dk, dv


@gluon.jit
def next_or_same(at, more):
    """The next position; after the last step, which looks ahead as each does, the same again: what it holds is still there."""
    after = at.next()
    return Position(gl.where(more, after.stage, at.stage), gl.where(more, after.parity, at.parity), at.stages)


@gluon.jit
def walk_in_registers(dk, dv, tiles, channels, seen, blocks, work, form: gl.constexpr):
    """All tiles of queries for 128 keys: (dk, dv). p is a first operand in registers, and each step begins the next one's scores s', so
    that weights are made under products: beside dq, or (form.tuning.early) beside dp, and dq then waits in registers for the next step.

        tensor cores   dp, dv |    | s', dq | dk             early   dp, s', dv             |    | dq | dk
        the rest                ds            p'  dq to memory       dq before to memory      ds   p'
    """
    D: gl.constexpr = form.products_d  # of dq as of dk
    DV: gl.constexpr = form.products_dv
    EARLY: gl.constexpr = form.tuning.early
    k_tile, v_tile = tiles
    q, do, dq = channels
    p_smem, ds_smem, dq_smem, dq_ready, dq_free = dq
    dtype: gl.constexpr = k_tile.dtype
    total = form.members * blocks
    at = ring_start(form.tuning.stages)
    before = ring_start(form.tuning.stages)  # not `at`: Triton would take what is the same before the loop for constant in it
    dq_at = ring_start(1)
    block = blocks * 0
    p = gl.full([form.tuning.block_n, form.tuning.block_m], 0.0, gl.float32, tile_layout(form.tuning.block_m, form.down))
    slope = p
    delta = gl.full([form.tuning.block_m], 0.0, gl.float32, gl.SliceLayout(0, p.type.layout))
    dq_sums = zeros_of(form.tuning.block_m, form.first_dq, form.rest_dq, 4)
    for _ in range(gl.minimum(total, 1)):  # not under one condition with the rest: products would then share addresses, too many to hold
        s = begin_scores(k_tile, q, at, form)
        delta = delta_at(do, at, form)
        s = warpgroup_mma_wait(0, deps=[s])
        p, slope = weights(s, q, at, seen, block, work, form)
    partition_barrier()  # no warp needs it; without it the compiler makes other code of the loop than was timed
    for i in range(total):
        following = next_or_same(at, i + 1 < total)
        block = gl.where(block + 1 == blocks, 0, block + 1)
        do_tile = tile_2d(do[0], at.stage)
        dp = over_columns(v_tile, do_tile, dp_start(delta, form), form.first_dv, form.rest_dv, True)
        if EARLY:
            s = begin_scores(k_tile, q, following, form)
        dv = by_columns(gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, dv[0].type.layout, 2)), do_tile, dv, form.first_dv, form.rest_dv)
        if i > 0:
            if EARLY:
                hand_over(dq_sums, dq, dq_at, form)
                dq_at = dq_at.next()
            mbarrier.arrive(q[3].index(before.stage))  # all eight warps meet here: those products that read ds are done
        dp = warpgroup_mma_wait(D * EARLY + DV, deps=[dp])
        ds = (slope * dp).to(dtype)
        ds_smem.store(ds)
        fence_async_shared()  # and they meet again: the compiler puts that barrier before a product that reads others' stores
        if not EARLY:
            s = begin_scores(k_tile, q, following, form)
        dq_sums = zeros_of(form.tuning.block_m, form.first_dq, form.rest_dq, 4)
        dq_sums = by_columns(ds_smem.permute((1, 0)), k_tile, dq_sums, form.first_dq, form.rest_dq)
        q_tile = tile_2d(q[0], at.stage)
        if EARLY:
            dk = by_columns(gl.convert_layout(ds, gl.DotOperandLayout(0, dk[0].type.layout, 2)), q_tile, dk, form.first_d, form.rest_d)
        else:  # the next scores took the registers
            dk = by_columns(ds_smem, q_tile, dk, form.first_d, form.rest_d)
        s = warpgroup_mma_wait(2 * D + DV * EARLY, deps=[s])
        p, slope = weights(s, q, following, seen, block, work, form)
        # a wait for an mbarrier, over which ptxas moves no exponentials: it would put them behind the wait for dq
        if EARLY:
            delta = delta_at(do, following, form)
        else:
            mbarrier.wait(dq_free.index(0), dq_at.parity ^ 1)
        dv = wait_for(dv, 2 * D)
        dq_sums = wait_for(dq_sums, D)
        if not EARLY:
            put(dq_sums, dq, form)
            dq_at = dq_at.next()
            delta = delta_at(do, following, form)
        dk = wait_for(dk, 0)
        before = at
        at = following
    if EARLY:
        if total > 0:
            hand_over(dq_sums, dq, dq_at, form)
    return dk, dv
