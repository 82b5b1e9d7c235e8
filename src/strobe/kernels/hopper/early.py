"""Early weights: a row's weights are taken against the maximum of its first keys, and a row that outgrows it is divided before weights are rounded.

A step of online softmax looks at all scores of a row before it may take one exponential. But a maximum only keeps weights in range, and that of a
few keys does so for others whose scores are not far above them. So only careful steps look for maxima: the first, and those until each row has met
a key. In all others exponentials begin with the first score, and sums, which are made anyway, tell afterwards whether a row has outgrown its
maximum, by more than one that lags would let it (`device.lagging`). `kept_in_range` divides such a row by the largest of its sums, and all that was
summed before: then the key that outweighs all others has the weight 1 as it would have had. Keys of that step and later ones are weighed against
maxima that differ by a rounding, an ulp of the maximum. It looks at registers of four lanes; a warp of which no row has outgrown compares, votes
and branches.

A row that outgrows its maximum by 2^32 in a step cannot be mended, since scores are gone by then: its maximum becomes infinite. One whose first
keys' scores are all -inf has none when others come. Both are seen at the end. Consumers write what they have, leave a verdict on each row in shared
memory beside the board's slot, and free the slot. The loader looks there before it fills the slot again, and after its last tile, and tells a tile
anew of which any row was unsound. Then every step is careful, nothing is written before what was written first has arrived, and the result stands,
whatever it is.
"""

from ..device.dialect import gl, gluon, mbarrier, partition_barrier
from ..device.lanes import by_four, from_four
from ..device.schedule import read_tile, read_words, word
from ..device.spans import next_tile

WORDS: gl.constexpr = gl.constexpr(16)  # of a tile on the board: the eight of every forward, then
AGAIN: gl.constexpr = gl.constexpr(8)  # 1 if it is done again
K_START: gl.constexpr = gl.constexpr(9)  # where its keys begin
KEYS: gl.constexpr = gl.constexpr(10)  # how many there are, where S_k does not say so
DOCUMENT: gl.constexpr = gl.constexpr(11)  # spans.PURE, or whose keys they are
PREFIX: gl.constexpr = gl.constexpr(12)  # how many of its first keys all rows see
VAST: gl.constexpr = gl.constexpr(32)  # log2: a weight's exponent that is larger is rounded, with its score, to more than lse may err by
COLUMNS: gl.constexpr = gl.constexpr(4)  # of verdicts a slot, of which as many are used as there are consumers


@gluon.jit
def kept_in_range(p, sums, row_max, row_sum, rescale, lift: gl.constexpr, most: gl.constexpr):
    """(p, row_max, row_sum, rescale), the last three [M, 4] in lanes: in rows of which any lane's sum is above 2^(lift + most), each is divided by
    the largest / 2^lift, whose log2 is added to row_max."""
    COUNT: gl.constexpr = p.shape[1] // 2  # a thread's elements
    text: gl.constexpr = _text(COUNT, lift, most, VAST)
    constraints: gl.constexpr = _constraints(COUNT)
    numbers = by_four((sums, row_max, row_sum, rescale), p)
    p, numbers = gl.inline_asm_elementwise(text, constraints, [p, numbers], dtype=(gl.float32, gl.float32), is_pure=True, pack=COUNT)
    sums, row_max, row_sum, rescale = from_four(numbers)
    return p, row_max, row_sum, rescale


@gluon.constexpr_function
def _text(count, lift, most, vast):
    """PTX for a thread's weights and, of each of these, four numbers of its row. All in one block, so that there is one branch, and nothing but
    registers by other names where it is taken: arithmetic on the three numbers outside cost d64 dense 4 % (H200)."""
    limit, vast, unit, one, infinite = (f"0f{127 + power << 23:08X}" for power in (int(lift + most), int(vast), int(-lift), 0, 128))
    lines = [".reg .pred out, vast; .reg .f32 top, other, factor, fraction; .reg .b32 bits, power;"]
    for n, name in enumerate(("sum", "max", "whole", "rescale")):
        first = 3 * count + 4 * n  # after two outputs and the weights, of which two are of a row, two of the other
        lines += [f".reg .f32 {name}0, {name}1; mov.f32 {name}0, ${first}; mov.f32 {name}1, ${first + 2};"]
    lines += [f"max.f32 top, sum0, sum1; setp.gt.f32 out, top, {limit}; vote.sync.any.pred out, out, -1; @!out bra FITS;"]
    for row in (0, 1):
        for lane in (1, 2):
            lines += [f"shfl.sync.bfly.b32 other, sum{row}, {lane}, 31, -1; max.f32 sum{row}, sum{row}, other;"]
        lines += [
            # by what the row is divided, and the factor that does it
            f"setp.gt.f32 out, sum{row}, {limit}; setp.gt.f32 vast, sum{row}, {vast}; mul.f32 sum{row}, sum{row}, {unit};",
            f"@!out mov.f32 sum{row}, {one}; @vast mov.f32 sum{row}, {infinite}; rcp.approx.ftz.f32 factor, sum{row}; @!out mov.f32 factor, {one};",
            # its log2: the whole part is added by itself, and the rest is below 1. As one number it would be rounded to an ulp of what a row grows
            # by, which where maxima were far below 0 is more than lse may err by
            f"mov.b32 bits, sum{row}; shr.u32 power, bits, 23; sub.s32 power, power, 127; cvt.rn.f32.s32 other, power;",
            f"@vast mov.f32 other, {infinite}; add.f32 max{row}, max{row}, other;",
            "and.b32 bits, bits, 0x007FFFFF; or.b32 bits, bits, 0x3F800000; mov.b32 fraction, bits; lg2.approx.ftz.f32 fraction, fraction;",
            f"add.f32 max{row}, max{row}, fraction; mul.f32 whole{row}, whole{row}, factor; mul.f32 rescale{row}, rescale{row}, factor;",
            *(f"mul.f32 ${i}, ${i}, factor;" for i in range(count) if i // 2 % 2 == row),
        ]
    names = [f"{name}{row}" for name in ("sum", "max", "whole", "rescale") for row in (0, 0, 1, 1)]
    lines += ["FITS:", *(f"mov.f32 ${count + i}, {names[i % 16]};" for i in range(count))]
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def _constraints(count):
    """Two outputs; weights in the registers of the first, and the numbers."""
    return ",".join(["=f"] * (2 * count) + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def verdicts_of(slots: gl.constexpr, rows: gl.constexpr):
    """Verdicts in shared memory, of which none is bad."""
    verdicts = gl.allocate_shared_memory(gl.int32, [slots * COLUMNS, rows], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(slots * COLUMNS):
        acquit(verdicts.index(i))
    return verdicts


@gluon.jit
def acquit(verdict):
    layout: gl.constexpr = gl.BlockedLayout([verdict.shape[0] // 32], [32], [gl.num_warps()], [0])
    verdict.store(gl.full([verdict.shape[0]], 0, gl.int32, layout))


@gluon.jit
def judge(w: gl.constexpr, verdicts, slot, row_max, accepted):
    """A verdict on each row: 1 if it is to be done again. Rows that are `accepted` are sound whatever they hold."""
    verdicts.index(slot * COLUMNS + w).store(((row_max * 0.0 != 0.0) & ~accepted).to(gl.int32))  # -inf, inf and NaN times 0 are NaN


@gluon.jit
def is_done_again(words, slot):
    return word(read_words(words, slot), AGAIN)


@gluon.jit
def came_back(board, at, more, consumers: gl.constexpr):
    """(whether a tile is to be done again, 1 or 0, its slot), once all are done with the slot at `at`. If there are no more tiles, it may be the
    tile told last, in the other slot: it is told anew at `at`, whose verdicts are good, and those of its own slot are made so."""
    again, slot = is_bad(board, at, consumers), at.stage
    if (again == 0) & ~more:
        again, slot = is_bad(board, at.next(), consumers), at.next().stage
    return again, slot


@gluon.jit
def is_bad(board, at, consumers: gl.constexpr):
    words, told, told_free, verdicts = board
    layout: gl.constexpr = gl.BlockedLayout([verdicts.shape[1] // 32], [32], [1], [0])
    mbarrier.wait(told_free.index(at.stage), at.parity ^ 1)
    bad = verdicts.index(at.stage * COLUMNS).load(layout)
    for w in gl.static_range(1, consumers):
        bad = bad | verdicts.index(at.stage * COLUMNS + w).load(layout)
    return gl.max(bad, 0)


@gluon.jit
def back_or_next(number, row, again, slot, board, offsets, sizes, limits, faults, form: gl.constexpr):
    """`next_tile`, of the slot's tile where it came back: it does so once."""
    words, told, told_free, verdicts = board
    consumers: gl.constexpr = form.tuning.consumers
    if again > 0:
        entry, head, m_start, n_begin, blocks, q_start, seqlen_q, seqlen_k = read_tile(words, slot)
        row_told = read_words(words, slot)
        if form.spans:
            keys, document = (word(row_told, K_START), word(row_told, KEYS), word(row_told, PREFIX)), word(row_told, DOCUMENT)
        else:
            keys, document = (word(row_told, K_START), seqlen_k), number * 0
        partition_barrier()  # all lanes have read
        for w in gl.static_range(consumers):
            acquit(verdicts.index(slot * COLUMNS + w))
        partition_barrier()  # all lanes have written before one tells
        exists, tile, beyond = slot >= 0, (entry, head, m_start, n_begin, blocks, q_start, seqlen_q, seqlen_k), slot * 0
    else:
        exists, tile, keys, document, beyond = next_tile(number, row, offsets, sizes, limits, faults, form)
    return exists, tile, keys, document, beyond
