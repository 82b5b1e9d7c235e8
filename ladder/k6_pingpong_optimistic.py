"""k6_2, early weights: exponentials wait for no maximum; what that spoils is mended, or done once more.

The idea: online softmax looks at all scores of a row before it may take one exponential, tile by tile. But a maximum
only keeps weights in range, and any number near it does: the maximum of a row's first keys, nearly always. So only
careful steps look for maxima: the first, and under a causal mask those until each row has met a key. In all others
exponentials begin with the first score that is there, and sums, which are made anyway, tell afterwards how far a row
has outgrown its number. A lane's part of the sum may be

    up to 2^8     as a maximum may lag in k6: nothing is done
    up to 2^32    the row's weights, o and sum are divided by the largest part, before weights are rounded
                  (`rescale_outgrown`: a vote, and a branch)
    more          scores have lost bits that lse needs, and are gone: the row's maximum becomes infinite

A spoiled row's maximum is no number at its tile's end (-inf is none, if all its first scores were that). It is written
as it is, and its program notes that: behind its last tile it takes all its tiles once more, all steps careful. Rows
that see fewer than 400 gain nothing, and are as in k6.

Cost model, a tile of 64 C queries (C consumers) and 128 keys, D columns, in 16 bits, on one SM:

    FLOPs       as in k6: 1,024 D C / 128 clocks of tensor cores, and 512 C of exponents
    issue       64 comparisons a step and thread are gone: of 389 instructions 319 are left (D = 64), of 398 326 (128),
                as in the production kernel
    bytes       as in k6; all twice of a program that takes its tiles once more
    shared      as in k6, and 256 bytes a consumer of what was noted
    registers   as in k6

What limits it: tensor cores and their power at D = 128, exponents and issue slots at D = 64. In turn it has 0.91 to
1.07 of production's speed.

Measured:

      D  mask       S_k        ms   TFLOP/s  % of ceiling
     64  dense     1024    0.2781     494.2            50
     64  dense     8192     1.897     579.6          58.6
     64  dense    16384     3.768     583.6            59
     64  causal    1024    0.1839     374.1          37.8
     64  causal    8192      1.02     538.8          54.5
     64  causal   16384     1.939     567.2          57.4
    128  dense     1024    0.2192     626.9          63.4
    128  dense     8192     1.502     731.9            74
    128  dense    16384     2.928     751.1          75.9
    128  causal    1024    0.1496     459.9          46.5
    128  causal    8192    0.8513     645.9          65.3
    128  causal   16384     1.583     694.7          70.2

on NVIDIA H200, torch 2.11.0+cu130, Triton 3.6.0, 2026-11-25
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from strobe.kernels.device.dialect import (
    TensorDescriptor,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    named_barrier,
    scale_rows,
    tma_load,
    tma_store,
    tma_store_drain,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .harness.harness import Rung, Size, check_inputs, outputs, programs

LOG2_E = 1.4426950408889634
LN_2: gl.constexpr = gl.constexpr(0.6931471805599453)
ROWS: gl.constexpr = gl.constexpr(64)  # of one consumer: what one wgmma takes
# what a lane knows of a row, as a tile [64, 4]: four lanes of a warp share a row of a product, and each has two rows,
# eight apart
LANES: gl.constexpr = gl.constexpr(
    gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4])
)
DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


@dataclass(frozen=True)
class Form:
    head_dim: int
    causal: bool
    masks: bool = True  # whether any tile may hold a hidden key; else the loop has no code for them
    ping_pong: bool = True  # consumers take turns at issuing products, where there are four
    early: bool = True  # exponentials wait for no maximum; where rows are short, for an older one, as in k6

    @property
    def consumers(self) -> int:
        return 256 // self.head_dim  # two of 240 registers or four of 112, and as many stages, of 128 or 64 keys

    @property
    def block_n(self) -> int:
        return 256 // self.consumers

    @property
    def block_m(self) -> int:
        return 64 * self.consumers

    def shared_bytes(self) -> int:
        """q in two places and o, and K and V of all stages."""
        return 2 * self.head_dim * (3 * self.block_m + 2 * 256)


@gluon.jit
def as_rows(tile):
    """A tile as rows and columns: TMA sees it as a block [1, 1, rows, columns]."""
    shape: gl.constexpr = [tile.shape[-2], tile.shape[-1]]
    return tile.reshape(shape)


@gluon.jit
def barriers(count: gl.constexpr, arrivals: gl.constexpr):
    barrier = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(barrier.index(i), count=arrivals)
    return barrier


@gluon.jit
def next_of(stage, parity, stages: gl.constexpr):
    """The next position in a ring: (stage, parity)."""
    return gl.where(stage == stages - 1, 0, stage + 1), gl.where(stage == stages - 1, parity ^ 1, parity)


@gluon.jit
def copy_tile(desc, place, row, ready, smem):
    """Have TMA fetch rows `row`.. of one head; `ready` turns when all bytes are there. Rows beyond the last are
    zeros."""
    mbarrier.expect(ready, desc.block_type.nbytes)
    tma_load(desc, [place[0], place[1], row, 0], ready, smem)


@gluon.jit
def tile_number(turn):
    """Which tile this program takes in its turn: to and fro, so that who had the longest of a round has the shortest of
    the next.
    """
    programs, place = gl.num_programs(0), gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 0, place, programs - 1 - place)


@gluon.jit
def tile_of(number, sizes, form: gl.constexpr):
    """(batch entry, head, first query, tiles of keys); causal tiles of a section of heads from the longest, others head
    by head.
    """
    heads, tiles_m, section = sizes[0], sizes[4], sizes[6]
    index, m_block = number // tiles_m, number % tiles_m
    if form.causal:
        first = number // (tiles_m * section) * section
        within, section = number - first * tiles_m, gl.minimum(section, sizes[5] // tiles_m - first)
        index, m_block = first + within % section, tiles_m - 1 - within // section
    return (
        index // heads,
        index % heads,
        m_block * form.block_m,
        blocks_of(m_block * form.block_m, form.block_m, sizes, form),
    )


@gluon.jit
def blocks_of(m_start, rows: gl.constexpr, sizes, form: gl.constexpr):
    """Tiles of keys that some of these rows sees."""
    n_stop = sizes[3]
    if form.causal:
        n_stop = gl.minimum(n_stop, gl.maximum(m_start + rows + sizes[3] - sizes[2], 0))
    return gl.where(m_start < sizes[2], gl.cdiv(n_stop, form.block_n), 0)


@gluon.jit
def next_turn(turn, first, again, noted, sizes, consumers: gl.constexpr):
    """(the next turn, that of the program's first tile, whether it takes its tiles once more): after the last tile, if
    a row of any was noted.
    """
    turn += 1
    if (again == 0) & (tile_number(turn - first) >= sizes[5]):
        tma_store_drain()  # what it may write once more
        mbarrier.arrive(noted[1].index(0))
        mbarrier.wait(noted[1].index(0), 0)
        for w in gl.static_range(consumers):
            again += gl.max(noted[0].index(w).load(gl.BlockedLayout([2], [32], [gl.num_warps()], [0])), 0)
        first = gl.where(again > 0, turn, first)
    return turn, first, again


@gluon.jit
def load_partition(q_desc, k_desc, v_desc, q, k, v, noted, sizes, form: gl.constexpr):
    CONSUMERS: gl.constexpr = form.consumers
    q_smem, q_ready, q_free = q
    k_smem, k_ready, k_free = k
    v_smem, v_ready, v_free = v
    k_at, k_parity, v_at, v_parity = gl.to_tensor(0), gl.to_tensor(1), gl.to_tensor(0), gl.to_tensor(1)
    turn, first, again = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    while tile_number(turn - first) < sizes[5]:
        entry, head, m_start, blocks = tile_of(tile_number(turn - first), sizes, form)
        for w in gl.static_range(CONSUMERS):
            q_at = w + CONSUMERS * (turn & 1)
            mbarrier.wait(q_free.index(q_at), (turn >> 1 & 1) ^ 1)
            copy_tile(q_desc, (entry, head), m_start + w * ROWS, q_ready.index(q_at), q_smem.index(q_at))
        for i in range(
            blocks + 1
        ):  # K of a tile comes before V of the tile above it; the last keys first: there a causal tile is masked
            if i < blocks:
                mbarrier.wait(k_free.index(k_at), k_parity)
                copy_tile(
                    k_desc,
                    (entry, head // sizes[1]),
                    (blocks - 1 - i) * form.block_n,
                    k_ready.index(k_at),
                    k_smem.index(k_at),
                )
                k_at, k_parity = next_of(k_at, k_parity, form.consumers)
            if i > 0:
                mbarrier.wait(v_free.index(v_at), v_parity)
                copy_tile(
                    v_desc,
                    (entry, head // sizes[1]),
                    (blocks - i) * form.block_n,
                    v_ready.index(v_at),
                    v_smem.index(v_at),
                )
                v_at, v_parity = next_of(v_at, v_parity, form.consumers)
        turn, first, again = next_turn(turn, first, again, noted, sizes, form.consumers)


@gluon.jit
def take_turn(w: gl.constexpr, form: gl.constexpr):
    """Wait until the consumer before has passed it on: named barrier 9 + w, its 128 threads and ours."""
    if form.ping_pong and form.consumers == 4:
        named_barrier("bar.sync", 9 + w, 256)


@gluon.jit
def pass_turn(w: gl.constexpr, form: gl.constexpr):
    if form.ping_pong and form.consumers == 4:
        named_barrier("bar.arrive", 9 + (w + 1) % form.consumers, 256)


@gluon.jit
def over_lanes(numbers, tile):
    """A lane's numbers [64, 4] for each of its elements of a tile."""
    parts = gl.reshape(tile, [ROWS, tile.shape[1] // 8, 4, 2])
    spread = gl.convert_layout(numbers, gl.SliceLayout(1, gl.SliceLayout(3, parts.type.layout)), assert_trivial=True)
    spread = gl.broadcast(gl.expand_dims(gl.expand_dims(spread, 1), 3), parts)[0]
    return gl.convert_layout(gl.reshape(spread, tile.shape), tile.type.layout, assert_trivial=True)


@gluon.jit
def softmax_step(s, careful, edge, row_max, row_sum, m_start, n_start, sizes, scale_log2, form: gl.constexpr):
    """(p, part, rescale, row_max, row_sum) after one more tile of raw scores, a part of row_sum from it; all but p [64,
    4] in lanes, of which each sums its own columns. Only careful steps look for a maximum, and at an edge hide keys;
    all rows see any other's, and have met one before.
    """
    rescale = gl.full([ROWS, 4], 1.0, gl.float32, LANES)
    if careful:
        if form.masks and edge:
            s = hide(s, m_start, n_start, sizes, form)
        new_max = gl.maximum(
            row_max,
            gl.convert_layout(gl.max(s, 1) * scale_log2, gl.SliceLayout(1, LANES), assert_trivial=True)[:, None],
        )
        if not form.early:
            new_max = gl.where(new_max - row_max <= 8.0, row_max, new_max)  # -inf - -inf is NaN: new_max
        rescale = gl.exp2(row_max - gl.where(new_max == float("-inf"), 0.0, new_max))
        row_max = new_max
    p = gl.exp2(
        s * scale_log2 - over_lanes(gl.where(row_max == float("-inf"), 0.0, row_max), s)
    )  # -inf - -inf would be NaN
    low, high = gl.split(gl.reshape(p, [ROWS, form.block_n // 8, 4, 2]))  # of each eight columns a lane has two
    part = gl.convert_layout(gl.sum(low + high, 1), LANES, assert_trivial=True)
    return p, part, rescale, row_max, row_sum * rescale + part


@gluon.jit
def rescale_outgrown(p, part, rescale, row_max, row_sum):
    """(p, rescale, row_max, row_sum) where rows of which a lane's part of the sum is above 2^8 are divided by the
    largest.
    """
    text: gl.constexpr = _text()
    numbers = gl.inline_asm_elementwise(text, "=f,=f,=f,=f,=f,=f,=f,=f,0,1,2,3,4,5,f,f", [row_max, row_sum, rescale, part],
                                        dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True,
                                        pack=2)  # fmt: skip
    return scale_rows(p, over_lanes(numbers[3], p)), numbers[2], numbers[0], numbers[1]


@gluon.constexpr_function
def _text():
    """PTX for a thread's two rows. If no row of the warp has outgrown its maximum, that is a comparison, a vote and a
    branch.
    """
    one, limit, vast, infinite = "0f3F800000", "0f43800000", "0f4F800000", "0f7F800000"
    lines = [
        (
            ".reg .pred out, vast; .reg .f32 sum0, sum1, log; mov.f32 sum0, $14; mov.f32 sum1, $15; mov.f32 $6, "
            f"{one}; mov.f32 $7, {one};"
        )
    ]
    lines += [
        f"max.f32 log, sum0, sum1; setp.gt.f32 out, log, {limit}; vote.sync.any.pred out, out, -1; @!out bra FITS;"
    ]
    for row in (0, 1):
        lines += [
            f"shfl.sync.bfly.b32 log, sum{row}, {lane}, 31, -1; max.f32 sum{row}, sum{row}, log;" for lane in (1, 2)
        ]
        lines += [
            (
                f"setp.gt.f32 out, sum{row}, {limit}; setp.gt.f32 vast, sum{row}, {vast}; @vast mov.f32 sum{row}, "
                f"{infinite};"
            )
        ]
        lines += [
            (
                f"@out lg2.approx.ftz.f32 log, sum{row}; @out add.f32 ${row}, ${row}, log; @out rcp.approx.ftz.f32 "
                f"${6 + row}, sum{row};"
            )
        ]
        lines += [f"@out mul.f32 ${number + row}, ${number + row}, ${6 + row};" for number in (2, 4)]
    return "{ " + " ".join([*lines, "FITS:"]) + " }"


@gluon.jit
def hide(s, m_start, n_start, sizes, form: gl.constexpr):
    """Scores with -inf where there is no key, or causal attention does not look."""
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, s.type.layout))
    # a column's bits 1 and 2 are its thread's, the others its register's: apart, no register holds a column
    column = gl.arange(0, form.block_n, gl.SliceLayout(0, s.type.layout))
    by_thread, by_register = (column & 6)[None, :], (column & -7)[None, :]
    stop = rows * 0 + (sizes[3] - n_start)
    if form.causal:
        stop = gl.minimum(stop, rows + (m_start + sizes[3] - sizes[2] + 1 - n_start))
    return gl.where(stop[:, None] - by_thread > by_register, s, float("-inf"))


@gluon.jit
def store_rows(o_desc, o, row_max, row_sum, lse, place, m_start, sizes, o_smem):
    """lse from registers; o / row_sum through shared memory by TMA, which writes no row beyond the last."""
    rows = gl.arange(0, o.shape[0], row_sum.type.layout)
    row_lse = gl.where(row_sum == 0.0, float("-inf"), row_max * LN_2 + gl.log(row_sum))
    gl.store(
        lse + (place[0].to(gl.int64) * sizes[0] + place[1]) * sizes[2] + m_start + rows,
        row_lse,
        mask=rows < sizes[2] - m_start,
    )
    inverse = gl.convert_layout(gl.where(row_sum == 0.0, 0.0, 1.0 / row_sum), gl.SliceLayout(1, o.type.layout))
    tma_store_wait(0)  # the tile before has left the buffer
    as_rows(o_smem).store((o * inverse[:, None]).to(o_desc.dtype))
    fence_async_shared()
    tma_store(o_desc, [place[0], place[1], m_start, 0], o_smem)


@gluon.jit
def skip_tiles(w: gl.constexpr, k, v, at, count, form: gl.constexpr):
    """Pass over tiles that only others' rows see. It waits for both: K may land after V, and a wait that is a round of
    the ring ahead is none.
    """
    stage, parity = at
    for _ in range(count):
        take_turn(w, form)
        pass_turn(w, form)
        mbarrier.wait(k[1].index(stage), parity)
        mbarrier.wait(v[1].index(stage), parity)
        mbarrier.arrive(k[2].index(stage))
        mbarrier.arrive(v[2].index(stage))
        stage, parity = next_of(stage, parity, form.consumers)
    return stage, parity


@gluon.jit
def attend(w: gl.constexpr, q_tile, k, v, at, m_start, blocks, again, sizes, scale_log2, form: gl.constexpr):
    """(o, row_max, row_sum, where the rings stand then) over all tiles of keys, at least one."""
    k_smem, k_ready, k_free = k
    v_smem, v_ready, v_free = v
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.block_n, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.head_dim, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    zero = gl.full([ROWS, form.block_n], 0.0, gl.float32, s_layout)
    row_max = gl.full([ROWS, 4], float("-inf"), gl.float32, LANES)
    row_sum = gl.full([ROWS, 4], 0.0, gl.float32, LANES)
    o = gl.full([ROWS, form.head_dim], 0.0, gl.float32, o_layout)
    stage, parity = at
    n_start = (blocks - 1) * form.block_n
    mbarrier.wait(k_ready.index(stage), parity)
    take_turn(w, form)
    s = warpgroup_mma(q_tile, as_rows(k_smem.index(stage)).permute((1, 0)), zero, use_acc=False, is_async=True)
    pass_turn(w, form)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_free.index(stage))
    p, _, rescale, row_max, row_sum = softmax_step(
        s, True, True, row_max, row_sum, m_start, n_start, sizes, scale_log2, form
    )
    p_reg = gl.convert_layout(p.to(k_smem.dtype), p_layout)
    for _ in range(1, blocks):
        v_at, v_parity = stage, parity
        stage, parity = next_of(stage, parity, form.consumers)
        mbarrier.wait(k_ready.index(stage), parity)
        take_turn(w, form)
        s = warpgroup_mma(q_tile, as_rows(k_smem.index(stage)).permute((1, 0)), zero, use_acc=False, is_async=True)
        o = add_values(p_reg, v_smem, v_ready, v_at, v_parity, o, rescale)
        pass_turn(w, form)
        s = warpgroup_mma_wait(1, deps=[s])  # the scores; the product with V goes on
        mbarrier.arrive(k_free.index(stage))
        n_start -= form.block_n
        edge = (
            (n_start + form.block_n >= m_start + sizes[3] - sizes[2] + 1) if form.causal else False
        )  # until each row has met a key
        careful = (again > 0) | edge if form.early else True
        p, part, rescale, row_max, row_sum = softmax_step(
            s, careful, edge, row_max, row_sum, m_start, n_start, sizes, scale_log2, form
        )
        if form.early:
            p, rescale, row_max, row_sum = rescale_outgrown(p, part, rescale, row_max, row_sum)
        o = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(v_free.index(v_at))
        p_reg = gl.convert_layout(p.to(k_smem.dtype), p_layout)
    o = add_values(p_reg, v_smem, v_ready, stage, parity, o, rescale)
    total = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, s_layout))
    row_max = gl.convert_layout(gl.max(row_max, 1), gl.SliceLayout(1, s_layout))
    o = warpgroup_mma_wait(0, deps=[o])
    mbarrier.arrive(v_free.index(stage))
    return o, row_max, total, next_of(stage, parity, form.consumers)


@gluon.jit
def add_values(p_reg, v_smem, v_ready, stage, parity, o, rescale):
    """o rescaled, where a maximum has grown, plus P V of a stage, under way."""
    o = scale_rows(o, over_lanes(rescale, o))
    mbarrier.wait(v_ready.index(stage), parity)
    return warpgroup_mma(p_reg, as_rows(v_smem.index(stage)), o, is_async=True)


@gluon.jit
def mma_partition(w: gl.constexpr, o_desc, o_smem, lse, q, k, v, noted, sizes, scale_log2, form: gl.constexpr):
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.block_n, 16])
    at = (gl.to_tensor(0), gl.to_tensor(0))
    if w == form.consumers - 1:
        pass_turn(w, form)  # consumer 0 begins
    turn, first, again = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    while tile_number(turn - first) < sizes[5]:
        entry, head, m_start, blocks = tile_of(tile_number(turn - first), sizes, form)
        m_start += w * ROWS
        row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
        row_sum = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, s_layout))
        o = gl.full(
            [ROWS, form.head_dim], 0.0, gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.head_dim, 16])
        )
        q_at = w + form.consumers * (turn & 1)
        mbarrier.wait(q[1].index(q_at), turn >> 1 & 1)
        own = blocks_of(m_start, ROWS, sizes, form)
        at = skip_tiles(w, k, v, at, blocks - own, form)
        if own > 0:
            o, row_max, row_sum, at = attend(
                w, as_rows(q[0].index(q_at)), k, v, at, m_start, own, again, sizes, scale_log2, form
            )
            bad = row_max * 0.0 != 0.0  # -inf, inf and NaN times 0 are NaN
            if form.causal:  # and the row sees a key
                bad = bad & (m_start + gl.arange(0, ROWS, row_max.type.layout) >= sizes[2] - sizes[3])
            if (again == 0) & form.early:  # afterwards others may still be reading
                noted[0].index(w).store(noted[0].index(w).load(row_max.type.layout) | bad.to(gl.int32))
        mbarrier.arrive(q[2].index(q_at))
        store_rows(o_desc, o, row_max, row_sum, lse, (entry, head), m_start, sizes, o_smem.index(w))
        turn, first, again = next_turn(turn, first, again, noted, sizes, form.consumers)
    tma_store_wait(0)


@gluon.jit
def attend_kernel(q_desc, k_desc, v_desc, o_desc, lse, sizes, scale_log2, form: gl.constexpr):
    """sizes (H, queries' heads a key head, S_q, S_k, tiles of queries a head, and in all, heads a section)."""
    CONSUMERS: gl.constexpr = form.consumers  # and stages
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2 * CONSUMERS] + q_desc.block_shape, q_desc.layout)  # noqa: RUF005 (Triton has no *)
    o_smem = gl.allocate_shared_memory(o_desc.dtype, [CONSUMERS] + o_desc.block_shape, o_desc.layout)  # noqa: RUF005
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [CONSUMERS] + k_desc.block_shape, k_desc.layout)  # noqa: RUF005
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [CONSUMERS] + v_desc.block_shape, v_desc.layout)  # noqa: RUF005
    q = (q_smem, barriers(2 * CONSUMERS, 1), barriers(2 * CONSUMERS, 1))
    k = (k_smem, barriers(CONSUMERS, 1), barriers(CONSUMERS, CONSUMERS))
    v = (v_smem, barriers(CONSUMERS, 1), barriers(CONSUMERS, CONSUMERS))
    noted = (
        gl.allocate_shared_memory(gl.int32, [CONSUMERS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        barriers(1, CONSUMERS + 1),
    )
    for w in gl.static_range(CONSUMERS):
        noted[0].index(w).store(gl.full([ROWS], 0, gl.int32, gl.BlockedLayout([2], [32], [4], [0])))
    if CONSUMERS == 4:
        gl.warp_specialize(
            [
                (mma_partition, (gl.constexpr(0), o_desc, o_smem, lse, q, k, v, noted, sizes, scale_log2, form)),
                (mma_partition, (gl.constexpr(1), o_desc, o_smem, lse, q, k, v, noted, sizes, scale_log2, form)),
                (mma_partition, (gl.constexpr(2), o_desc, o_smem, lse, q, k, v, noted, sizes, scale_log2, form)),
                (mma_partition, (gl.constexpr(3), o_desc, o_smem, lse, q, k, v, noted, sizes, scale_log2, form)),
                (load_partition, (q_desc, k_desc, v_desc, q, k, v, noted, sizes, form)),
            ],
            [4, 4, 4, 1],
            [112, 112, 112, 32],
        )
    else:
        gl.warp_specialize(
            [
                (mma_partition, (gl.constexpr(0), o_desc, o_smem, lse, q, k, v, noted, sizes, scale_log2, form)),
                (mma_partition, (gl.constexpr(1), o_desc, o_smem, lse, q, k, v, noted, sizes, scale_log2, form)),
                (load_partition, (q_desc, k_desc, v_desc, q, k, v, noted, sizes, form)),
            ],
            [4, 1],
            [240, 24],
        )


def descriptor(tensor: Tensor, rows: int) -> TensorDescriptor:
    """TMA's view of [B, S, H, D] as [B, H, S, D], moved in tiles of one head's rows; the layout swizzles as wgmma reads
    it.
    """
    batch, length, heads, width = tensor.shape
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, width], DTYPES[tensor.dtype])
    return TensorDescriptor(
        tensor, [batch, heads, length, width], [tensor.stride(i) for i in (0, 2, 1, 3)], [1, 1, rows, width], layout
    )


def run(q: Tensor, k: Tensor, v: Tensor, causal: bool, **options: int) -> tuple[Tensor, Tensor]:
    check_inputs(q, k, v)
    batch, seqlen_q, heads, head_dim = q.shape
    form = Form(
        head_dim,
        causal,
        causal or k.shape[1] % 128 > 0,
        **({"early": k.shape[1] >= (800 if causal else 400)} | options),
    )
    out, lse = outputs(q)
    views = [descriptor(tensor, rows) for tensor, rows in ((q, 64), (k, form.block_n), (v, form.block_n), (out, 64))]
    tiles_m = -(-seqlen_q // form.block_m)
    walkers = programs(q, tiles_m * heads * batch)
    section = (
        heads * batch if seqlen_q > 2048 else -(-4 * walkers // max(8, tiles_m))
    )  # short ones' keys and values stay in L2: 33 MiB
    sizes = (heads, heads // k.shape[2], seqlen_q, k.shape[1], tiles_m, tiles_m * heads * batch, section)
    attend_kernel[(walkers,)](
        *views, lse, sizes, head_dim**-0.5 * LOG2_E, form, num_warps=4, maxnreg=168 if form.consumers == 2 else 96
    )
    return out, lse


def moved(size: Size, form: Form) -> int:
    """q and out once, K and V once for each tile of queries that sees them."""
    return 2 * size.head_dim * (2 * size.rows + 2 * size.streamed(form.block_m, form.block_n)) + 4 * size.rows


RUNG = Rung(
    "k6_2", "early weights: exponentials wait for no maximum", "k6", run, Form, moved,
    ("next_turn", "softmax_step", "rescale_outgrown", "attend", "mma_partition"), small_seqlen=760,
)  # fmt: skip
