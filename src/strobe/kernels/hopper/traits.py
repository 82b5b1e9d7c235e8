"""What compiled Hopper kernels hold as constants: tilings, and all that follows from one and a problem's kind."""

from __future__ import annotations

from dataclasses import dataclass

from ...problem.mask import MaskStructure
from ..runtime.constants import Constants
from ..runtime.tma_requirements import fold_of, has_spans, rest
from .decode_config import MOST_SHARED

ROWS, THREADS = 64, 128  # of one consumer
BOARD_BYTES = 64  # of the backward: a tile's numbers
BELLS = 1024  # bytes of barriers that lie besides what a kernel allocates (device.per_thread_mbarrier)
ROUNDING = 512  # more than alignment adds to what a backward's program asks for


@dataclass(frozen=True)
class Tuning:
    """Tile and roles of the forward."""

    block_n: int
    stages: int
    consumers: int
    q_in_registers: int = 0  # of q's parts
    half_staged: bool = False  # o leaves through a buffer of half its first part, where tiles leave no room for more
    # all weights are made under the product of those before; else ptxas waits for it sooner: d192 dense 8k 690 TFLOP/s
    # for 636, d256 causal 16k 687 for 615 (H200); where exponentials are the limit it loses: d64 causal 4k 400 for 408
    under: bool = True
    ping_pong: bool = False  # consumers take turns at issuing products
    # each thread lets go of k and v by itself, for all at once behind a barrier of a consumer's warps: d96 1.02 to
    # 1.03, others 0.96 to 1.01 (H200)
    each: bool = False
    # query heads that a tile holds, of a query each in rows that follow each other: one, or all that share a key head
    joined: int = 1

    @property
    def fold(self) -> int:
        """Rows of a tile that a query takes."""
        return fold_of(self.joined)

    @property
    def arrivals(self) -> int:
        """Of a consumer that lets go."""
        return THREADS if self.each else 1

    @property
    def block_m(self) -> int:
        """Queries of a tile."""
        return ROWS * self.consumers // self.fold


class Walk:
    """What forward and backward have in common: which rows see which keys, and columns of tiles in two parts, since
    products take powers of two."""

    block_d: int
    block_dv: int
    mask: MaskStructure
    packed: bool

    @property
    def spans(self) -> bool:
        """Whether rows of a batch entry see different spans of keys: device.key_ranges, backward_key_ranges."""
        return has_spans(self.mask)

    @property
    def wraps(self) -> bool:
        """Whether TMA's views wrap: device.tma."""
        return self.packed or self.spans

    @property
    def rest_d(self) -> int:
        """Columns of q and k beyond their first part."""
        return rest(self.block_d)

    @property
    def first_d(self) -> int:
        return self.block_d - self.rest_d

    @property
    def rest_dv(self) -> int:
        return rest(self.block_dv)

    @property
    def first_dv(self) -> int:
        return self.block_dv - self.rest_dv


@dataclass(frozen=True)
class Form(Constants, Walk):
    """All that a compiled kernel holds as constants; no __str__ of its own, since Triton tells kernels apart by it."""

    tuning: Tuning
    block_d: int
    block_dv: int
    group: int  # heads that share a key head and have tiles of their own
    mask: MaskStructure
    softcap: bool
    sinks: bool
    even: bool  # S_k is a multiple of block_n
    packed: bool
    counted: bool  # programs take tiles from a counter
    early: bool  # weights before maxima

    @property
    def rest_d(self) -> int:
        """At 256 half of q's columns and of k's, so that half of q can lie in registers: 1.001 to 1.006 of the
        speed (H200)."""
        return 128 if self.block_d == 256 and self.tuning.q_in_registers else rest(self.block_d)

    @property
    def returns(self) -> bool:
        """Whether a tile may be done again."""
        return self.early or self.mask.documents

    @property
    def masks(self) -> bool:
        """Whether any tile may hold a hidden key; where none can, the loop has no code for masks."""
        return self.mask.left or self.mask.right or self.spans or not self.even

    @property
    def first_block_first(self) -> bool:
        """Whether a tile visits its first key block before the others: where no left bound hides it from some rows.

        A consumer then holds the first block's values while it skips the blocks that only later rows see, so a ring has
        a stage more than those.
        """
        return not self.mask.left

    @property
    def q_is_read(self) -> bool:
        """Whether all of q is in registers by the time products begin."""
        return self.tuning.q_in_registers == (2 if self.rest_d else 1)

    @property
    def own_queries(self) -> int:
        """Queries of one consumer."""
        return ROWS // self.tuning.fold

    @property
    def trades(self) -> bool:
        """Whether consumers change places from tile to tile, so that the last rows of a causal tile, which see most
        keys, are not always the same one's: not where they take turns step by step, nor where a tile may be done again,
        by the one who wrote it first.
        """
        return self.mask.right and not (self.mask.left or self.spans or self.tuning.ping_pong or self.returns)

    @property
    def slots(self) -> int:
        """Tiles of q that shared memory is laid out for: a power of two."""
        return 2 if self.tuning.consumers == 2 else 4

    def shared_bytes(self) -> int:
        """q (and o) of all consumers, k and v of all stages, at 2 bytes, the barriers, the board of two tiles'
        numbers, and verdicts on them."""
        t = self.tuning
        o = self.slots * ROWS * (self.first_dv // (1 + t.half_staged) + self.rest_dv)
        tiles = 2 * (self.slots * ROWS * self.block_d + o + t.stages * t.block_n * (self.block_d + self.block_dv))
        return tiles + 8 * (2 * t.consumers + (4 + self.mask.documents) * t.stages + 4) + 128 + 2048 * self.returns


@dataclass(frozen=True)
class BackwardTuning:
    """Tile and rings of the backward: two consumers walk block_m queries a step, over 64 keys each or over the same
    64 or 128."""

    block_m: int
    block_n: int
    stages: int  # of q
    stages_do: int
    parts: int = 1  # in which a tile of dq goes through shared memory where one consumer makes all of it
    k_in_registers: bool = False
    roles: bool = False  # of 128 keys too, one consumer makes weights, ds and dv, the other dq and dk
    hides_weights: bool = True
    each: bool = False  # as of Tuning: d96 1.02, d64 0.98 to 0.99, d128 0.99 to 1.00 (H200)

    @property
    def arrivals(self) -> int:
        return THREADS if self.each else 1


@dataclass(frozen=True)
class BackwardForm(Constants, Walk):
    """All that the backward's kernels hold as constants; no __str__ of its own, since Triton tells kernels apart by
    it."""

    tuning: BackwardTuning
    block_d: int
    block_dv: int
    head_dim: int
    head_dim_v: int
    group: int
    mask: MaskStructure
    softcap: bool
    even: bool  # S_k is a multiple of block_n
    packed: bool
    ordered: bool = False  # tiles of keys take turns to add to a tile of dq (backward_scheduler.dense_keys)
    splits: int = 1  # programs among which the heads of a group are divided
    # the first tile of keys to come to a tile of dq stores, so that nothing clears dq's sum; the others wait for that
    first_stores: bool = False
    lags: bool = False  # a step multiplies dq of the step before
    begun: bool = False  # scores begin at -lse over their scale
    last_sections: int = (
        0  # in which programs that take turns go from the first keys on (backward_scheduler.dense_keys)
    )
    finishes: bool = False  # a tile of keys writes dq of the queries that see no others, which then has no sum
    clears: bool = (
        False  # programs clear dq's sum, each a share of what later tiles of keys add to (backward_store.clear_ahead)
    )

    @property
    def members(self) -> int:
        """Query heads that a program walks."""
        return self.group // self.splits

    @property
    def dk_width(self) -> int:
        """Columns of dk's float32 sum: as many as give rows of whole 16 bytes."""
        return whole_lines(self.head_dim)

    @property
    def dv_width(self) -> int:
        return whole_lines(self.head_dim_v)

    @property
    def halves(self) -> bool:
        """Each consumer takes half of the keys; else one makes weights, ds and dv, the other dq and dk:
        backward_split_products."""
        return self.tuning.block_n == 2 * ROWS and not self.tuning.roles

    @property
    def two_tiles(self) -> bool:
        """128 keys, for which ds is two tiles of 64, where one consumer makes weights."""
        return self.tuning.block_n == 2 * ROWS and self.tuning.roles

    def passes(self, consumer: int) -> bool:
        """Whether a half of the keys may be hidden from all queries of a tile, and is passed over then."""
        hidden = self.mask.left if consumer == 0 else self.masks
        return hidden and self.halves and not self.by_rows and not self.spans

    @property
    def collects(self) -> bool:
        """Whether the last to add to a tile of dq, the program of the last tile of keys that its queries see, reads the
        sum of all others and writes dq, so that no kernel behind does: 512 x 32 1.04 of the speed without, 256 x 64
        1.16, 1k x 16 1.03, d64 512 1.07 (H200). All others count that they have added.
        """
        return self.finishes and not (self.ordered or self.packed) and self.group == 1

    def has_dk(self, consumer: int) -> bool:
        return self.halves or consumer == 1

    def has_dv(self, consumer: int) -> bool:
        return self.halves or consumer == 0

    @property
    def rest_dq(self) -> int:
        """dq's columns: where they pass through shared memory in two parts, the rest is half of them unless q has
        its own."""
        return self.rest_d or (self.block_d // 2 if self.tuning.parts == 2 else 0)

    @property
    def first_dq(self) -> int:
        return self.block_d - self.rest_dq

    @property
    def places(self) -> int:
        """Those of dq that are handed over each by itself: one a consumer, of 64 keys one a unit."""
        return 2 if self.halves else self.dq_slot

    @property
    def by_rows(self) -> bool:
        """A share is 64 of the tile's queries, not some of dq's columns; a step then takes them 64 by 64."""
        return self.tuning.block_m == 2 * ROWS

    def share_columns(self, consumer: int) -> int:
        if self.by_rows:
            return self.block_d
        return (self.first_dq, self.rest_dq)[consumer] if self.rest_dq else self.first_dq // 2

    def share_column(self, consumer: int) -> int:
        """A share's first column."""
        return 0 if self.by_rows else consumer * self.share_columns(0)

    def share_row(self, consumer: int) -> int:
        """Its first row."""
        return ROWS * consumer if self.by_rows else 0

    def share_unit(self, consumer: int) -> int:
        """A share's first unit."""
        return consumer if self.by_rows else self.share_column(consumer) // self.dq_unit

    @property
    def dq_unit(self) -> int:
        """Columns of 64 rows of dq that TMA adds at once."""
        if not self.halves:
            return ROWS // 2 if self.two_tiles else ROWS
        return self.rest_dq or (self.first_dq if self.by_rows else self.first_dq // 2)

    def dq_units_written(self) -> int:
        """Units, of all rows of a tile, that hold columns of dq: head dimensions may be padded by whole ones."""
        return -(-self.head_dim // self.dq_unit)

    def dq_width(self, unit: int) -> int:
        """Columns of a unit that are dq's."""
        return min(self.dq_unit, self.head_dim - unit * self.dq_unit)

    def dq_units(self) -> int:
        """Units of a tile of dq."""
        return self.block_d // self.dq_unit * (self.tuning.block_m // ROWS)

    @property
    def dq_slot(self) -> int:
        """Units from one slot of dq's channel to the next: by halves a power of two, as a share may be two units,
        which begin at a multiple of it."""
        units = self.dq_units() // self.tuning.parts
        return 1 << (units - 1).bit_length() if self.halves else units

    @property
    def stores(self) -> int:
        """Warps that add dq, each every other tile where a turn is passed once the add stands in memory: that is longer
        than a step (deterministic d128 causal 8k 512 TFLOP/s for 467, H200).
        """
        return 2 if (self.ordered or self.collects) and self.halves else 1

    @property
    def reckons(self) -> bool:
        """Whether steps reckon addresses anew (backward_mainloop.tile_now): d128 dense, which then has room for
        form.lags, 1.07 to 1.09 of the speed, d256, whose programs then take tile after tile, 1.00 to 1.02, d64 causal
        1.01, window 1.06, but dense without lags 0.99 (H200).
        """
        return self.masks or self.lags or self.finishes or not self.by_rows

    @property
    def registers(self) -> tuple[int, int]:
        """A consumer's, and those of warps that load and store: who loads documents spills with 24 (with 40 d96
        1.01, d128 1.003, H200)."""
        return (232, 40) if self.mask.documents and not (self.softcap or self.by_rows or self.two_tiles) else (240, 24)

    @property
    def hides_weights(self) -> bool:
        """A hidden key's weight is made 0, behind the exponentials; else its score -inf, before them, which takes
        fewer registers."""
        return self.tuning.hides_weights and not (self.lags and self.by_rows)

    @property
    def dq_lines(self) -> int:
        """Lines of 256 numbers that a unit takes."""
        return ROWS * self.dq_unit // 256

    @property
    def products_d(self) -> int:
        """Products issued one by one, for each of s and dk."""
        return 2 if self.rest_d else 1

    @property
    def products_dv(self) -> int:
        return 2 if self.rest_dv else 1

    @property
    def masks(self) -> bool:
        """Whether any tile may hold a hidden key."""
        return self.mask.left or self.mask.right or not self.even

    @property
    def key_places(self) -> int:
        """Tiles of keys, and of values, that shared memory holds: of two, the next comes under the steps of the one
        before. Where later keys are hidden: d64 causal 4k and 8k 1.007, 16k 1.015 of the speed, d96 1.003, d64 dense
        0.995 (H200).
        """
        walks = self.halves and self.splits == 1 and self.mask.right and not self.spans
        return 2 if walks and self._shared_bytes(2) + ROUNDING <= MOST_SHARED else 1

    @property
    def ds_places(self) -> int:
        """Tiles of ds that shared memory holds: by halves two each, by roles of two tiles of keys one a stage of q."""
        return 4 if self.halves else self.tuning.stages if self.two_tiles else 1

    @property
    def slim(self) -> bool:
        """Whether what warps of other roles are handed takes little shared memory (`channel.rings`, `views.tiles_for`):
        by roles, where there is none to spare at 192, and with turns at dq, d64 1.013, d128 1.009 of the speed; else
        d96 causal 8k 0.955 of it, others 0.997 to 1.005 (H100).
        """
        return not self.halves or self.ordered or self.collects

    @property
    def rings(self) -> tuple[tuple[int, int], ...]:
        """(barriers, arrivals) of told, told_free, kv_used, kv_free, sums_done, sums_free and kv_ready: what no
        step comes to."""
        keys, sums = self.key_places, self.splits > 1 or self.two_tiles
        return ((1, 1), (1, 2 + self.stores), (keys, 2), (+sums, 1), (+sums, 2), (+sums, 1), (keys, 1))

    @property
    def bells(self) -> bool:
        """Whether each thread says by itself that ds stands in memory (backward_split_keys.say_ds,
        backward_split_products.hand_ds): where there is room, by halves as at d128 in two stages; by roles but for
        documents, whose steps have no register for it.
        """
        room = MOST_SHARED - self._shared_bytes(self.key_places)
        return room > BELLS + ROUNDING and (self.halves or not self.mask.documents)

    @property
    def dq_bells(self) -> bool:
        """Whether each thread says by itself that its share of dq does: of split groups (GQA 64/8 8k 1.017 of the
        speed, 0.985 with ds alone; of whole ones 1k x 16 1.002 for 1.015, d128 causal 16k 1.011 for 1.016), and by
        roles, as ds (192/128 1.025, d192, with ds, 1.018 to 1.02, d256 1.00; H200).
        """
        return self.bells and (self.splits > 1 or not self.halves)

    def shared_bytes(self) -> int:
        return self._shared_bytes(self.key_places) + BELLS * self.bells

    def _shared_bytes(self, key_places: int) -> int:
        """k, v, q and do of all stages and ds at 2 bytes, weights on their way, dq, lse and delta at 4, the
        barriers, and a tile's numbers."""
        t = self.tuning
        rings = t.block_m * (t.stages * (2 * self.block_d + 4) + t.stages_do * (2 * self.block_dv + 4))
        keys = 2 * t.block_n * key_places * (self.block_d + self.block_dv)
        handed = t.block_m * ROWS * 2 * (4 if self.halves else 2 * t.stages if self.two_tiles else 1)
        of_keys = 2 + 2 * key_places + 3 * (self.splits > 1 or self.two_tiles) + t.stages * self.mask.documents
        of_ds = 4 * (1 + self.lags) if self.halves else t.stages if self.two_tiles else 1
        barriers = 2 * t.stages + (2 - self.halves) * t.stages_do + of_keys + of_ds + 2 * self.stores * self.places
        return rings + keys + handed + self.stores * 1024 * self.dq_slot * self.dq_lines + 8 * barriers + BOARD_BYTES


def whole_lines(width: int) -> int:
    """A row of this many float32 numbers, made whole units of 16 bytes."""
    return -(-width // 4) * 4
