"""Online softmax with conditional rescaling: the call's functions of scores (`forward_hooks`), row maxima, P = exp2(S -
max), row sums.

Row statistics are [rows, 4] in `lanes`: four lanes share a row of a wgmma accumulator, and each sums its own columns.
They are combined once, after the last block. Exponents are relative to a maximum log2_offset below the row's own
(`device.conditional_rescaling`), which is updated only where it grew by more than RESCALE_THRESHOLD. Optimistic softmax
looks for a maximum only where `needs_row_max`; rows that outgrow theirs are renormalized (`optimistic_softmax`).

Sources: online softmax (arXiv 1805.02867), algorithm 3; FlashAttention-4 (Dao-AILab/flash-attention,
flash_attn/cute/softmax.py).
"""

from ..device.conditional_rescaling import RESCALE_THRESHOLD, conditional_max
from ..device.dialect import gl, gluon, record, scale_rows
from ..device.forward_hooks import modify_scores
from ..device.key_ranges import PURE
from ..device.layouts import in_lanes, lanes_of, over_lanes, sum_in_lanes
from ..device.tma import ColumnParts
from .optimistic_softmax import renormalize_row
from .traits import ROWS as _ROWS

ROWS: gl.constexpr = gl.constexpr(_ROWS)
LOOKED_AT: gl.constexpr = gl.constexpr(16)


@gluon.jit
def zero_if_empty(row_max):
    """What exponents are relative to: 0 in rows that have seen no key, where -inf - -inf would be NaN."""
    return gl.where(row_max == float("-inf"), 0.0, row_max)


@gluon.jit
def rescale_o(o, rescale):
    """O *= rescale, which threads skip whose rows all have the factor 1: a seventh (128 columns) to a third (256) of a
    step's instructions.
    """
    main = scale_rows(o.main, over_lanes(rescale, o.main))
    if o.tail is None:
        return ColumnParts(main, None)
    else:
        return ColumnParts(main, scale_rows(o.tail, over_lanes(rescale, o.tail)))


@record
class SoftmaxState:
    """Running row_max, in log2 units, and row_sum: [rows, 4] float32 in lanes."""

    row_max: gl.tensor
    row_sum: gl.tensor

    @gluon.jit
    def first_step(s, block, mask, mods, softmax, log2_offset: gl.constexpr, traits: gl.constexpr):
        """(P, rescale, state) of a tile's first block: there is nothing to rescale."""
        s = modify_scores(s, block, mods, softmax, traits)
        if traits.masks:
            s = mask.apply(s, block, traits)
        rescale = gl.full([ROWS, 4], 1.0, gl.float32, lanes_of(ROWS))
        row_max = gl.broadcast(in_lanes(gl.max(s, 1) * softmax.scale_log2 - log2_offset), rescale)[0]
        p = gl.exp2(s * softmax.scale_log2 - over_lanes(zero_if_empty(row_max), s))
        return p, rescale, SoftmaxState(row_max, sum_in_lanes(p))

    @gluon.jit
    def online_step(
        self, s, needs_row_max, block, mask, mods, softmax, log2_offset: gl.constexpr, traits: gl.constexpr
    ):
        """(P, rescale, state) of a later block. Without a left bound, blocks that need no row maximum need no mask:
        every row sees them whole.
        """
        row_max, row_sum = self.row_max, self.row_sum
        s = modify_scores(s, block, mods, softmax, traits)
        if traits.masks_each_step:
            s = mask.apply(s, block, traits)
        rescale = gl.full([ROWS, 4], 1.0, gl.float32, lanes_of(ROWS))
        if needs_row_max:
            if traits.masks and not traits.masks_each_step:
                s = mask.apply(s, block, traits)
            new_max = gl.maximum(row_max, in_lanes(gl.max(s, 1) * softmax.scale_log2 - log2_offset))
            if not traits.optimistic:
                new_max = conditional_max(row_max, new_max, RESCALE_THRESHOLD)
            rescale = gl.exp2(row_max - zero_if_empty(new_max))
            row_max = new_max
        p = gl.exp2(s * softmax.scale_log2 - over_lanes(zero_if_empty(row_max), s))
        block_sum = sum_in_lanes(p)
        row_sum = row_sum * rescale + block_sum
        if traits.optimistic:
            row = renormalize_row(p, block_sum, row_max, row_sum, rescale, log2_offset, RESCALE_THRESHOLD)
            p, rescale = row.p, row.rescale
            row_max, row_sum = row.row_max, row.row_sum
        return p, rescale, SoftmaxState(row_max, row_sum)


@gluon.jit
def needs_row_max(block, mask, redo, traits: gl.constexpr):
    """Whether a step after the first looks for row maxima. With optimistic softmax: until each row has met a key, and
    in a tile that is redone.

    A window's tile begins at the diagonal, where a row may see one key. One key's score is a poor maximum, which most
    rows then outgrow, so the block after the diagonal looks for maxima too.

    A tile that begins with its first block also looks for maxima in its last keys, one in LOOKED_AT of all. With one
    block of 64, outlier keys outgrew the maximum of a row too far in 0.3 % of the tiles. They were redone, and a redo
    near the end of a launch adds a round of tiles, 5 to 7 % of dense 8k. Looking costs 0.7 % on normal numbers (H200).

    Steps that look come before those that do not: a row without a maximum then has none at the end, either.
    """
    needed: gl.constexpr = True
    if traits.optimistic:
        if traits.has_block_lists:
            needed = (redo > 0) | block.may_be_first
        elif traits.mask_mod is not None:
            needed = redo >= 0  # a row may meet its first key anywhere
        else:
            stop = mask.fewest_keys_stop(traits)
            keys = 2 * traits.block_n
            if traits.first_block_first:
                keys = gl.maximum(traits.block_n, stop // LOOKED_AT)
            needed = (redo > 0) | (block.n_start + keys >= stop)
            if traits.mask.documents:
                needed = needed | (mask.document != PURE)  # so it may here
    return needed
