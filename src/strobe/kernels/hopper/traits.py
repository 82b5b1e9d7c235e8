"""Compile-time constants of the Hopper kernels: tile configurations, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...problem.mask import MaskStructure
from ..runtime.compile_cache import Constants
from ..runtime.hook_constants import HookConstants, ListedBlocks, function_key
from ..runtime.tma_requirements import has_spans, rest, rows_per_query
from .decode_config import MOST_SHARED

ROWS, THREADS = 64, 128  # rows and threads of one consumer
BOARD_BYTES = 64  # the backward's record of a work tile
BELLS = 1024  # bytes of per-thread mbarriers, which are not in the kernel's own allocation (device.per_thread_mbarrier)
ROUNDING = 512  # at least the padding that alignment adds to the backward's shared memory


@dataclass(frozen=True)
class Tuning:
    """Tile configuration of the forward."""

    block_n: int
    stages: int
    consumers: int
    q_in_registers: int = 0  # how many parts of q are in registers
    half_staged: bool = False  # o is stored through a buffer of half its first part, if tiles leave no room for more
    # All weights are computed under the previous product; otherwise ptxas waits for it earlier. d192 dense 8k: 690
    # TFLOP/s with, 636 without. d256 causal 16k: 687 with, 615 without. It loses where exponentials are the limit: d64
    # causal 4k 400 with, 408 without (all H200).
    under: bool = True
    ping_pong: bool = False  # consumers issue products in alternation
    # Each thread releases k and v by itself, instead of one thread after a barrier of the consumer's warps: d96 1.02x
    # to 1.03x, others 0.96x to 1.01x (H200).
    each: bool = False
    # pack_gqa: query heads per tile, whose rows for one query are adjacent: one, or all that share a key head
    pack_gqa: int = 1

    @property
    def rows_per_query(self) -> int:
        """Rows of a tile per query."""
        return rows_per_query(self.pack_gqa)

    @property
    def arrivals(self) -> int:
        """Arrivals when one consumer releases a stage."""
        return THREADS if self.each else 1

    @property
    def block_m(self) -> int:
        """Queries per tile."""
        return ROWS * self.consumers // self.rows_per_query


class Walk:
    """What forward and backward share: key ranges of rows, and tile columns in two parts, each a power of two."""

    block_d: int
    block_dv: int
    mask: MaskStructure
    packed: bool

    @property
    def spans(self) -> bool:
        """Whether rows of a batch entry may have different key ranges (device.key_ranges, backward_key_ranges)."""
        return has_spans(self.mask)

    @property
    def wraps(self) -> bool:
        """Whether TMA descriptors wrap around (device.tma)."""
        return self.packed or self.spans

    @property
    def rest_d(self) -> int:
        """Columns of q and k after their first part."""
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
class ForwardTraits(Constants, Walk, HookConstants):
    """Compile-time constants of the forward. It has no __str__ of its own, because Triton identifies kernels by it."""

    tuning: Tuning
    block_d: int
    block_dv: int
    group: int  # heads that share a key head and have their own tiles
    mask: MaskStructure
    softcap: bool
    sinks: bool
    even: bool  # S_k is a multiple of block_n
    packed: bool
    counted: bool  # programs take tiles from a counter
    early: bool  # optimistic softmax: weights before row maxima
    # functions of the call (device.forward_hooks). Triton identifies a function by its name alone, so `functions` has
    # the keys of their text.
    score_mod: Any = None
    mask_mod: Any = None
    block_lists: ListedBlocks | None = None
    functions: tuple[str | None, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "functions", tuple(function_key(fn) for fn in (self.score_mod, self.mask_mod)))

    @property
    def rest_d(self) -> int:
        """At 256 with q in registers, half of q's and k's columns, so that half of q fits: 1.001x to 1.006x (H200)."""
        return 128 if self.block_d == 256 and self.tuning.q_in_registers else rest(self.block_d)

    @property
    def consumers(self) -> int:
        return self.tuning.consumers

    @property
    def stages(self) -> int:
        return self.tuning.stages

    @property
    def block_m(self) -> int:
        """Queries per tile, all consumers together."""
        return self.tuning.block_m

    @property
    def block_n(self) -> int:
        return self.tuning.block_n

    @property
    def ping_pong(self) -> bool:
        return self.tuning.ping_pong

    @property
    def pack_gqa(self) -> int:
        """Query heads per tile: 1, or all that share a key head."""
        return self.tuning.pack_gqa

    @property
    def rows_per_query(self) -> int:
        """Rows of a tile per query: pack_gqa, rounded up to a power of two."""
        return self.tuning.rows_per_query

    @property
    def q_parts_in_registers(self) -> int:
        return self.tuning.q_in_registers

    @property
    def softmax_before_pv_wait(self) -> bool:
        """Whether the wait for P V is kept behind the softmax; with optimistic softmax, whose branch does that, it need
        not be.
        """
        return self.tuning.under and not self.early

    @property
    def release_per_thread(self) -> bool:
        return self.tuning.each

    @property
    def release_arrivals(self) -> int:
        """Arrivals when all consumers release a stage."""
        return self.consumers * self.tuning.arrivals

    @property
    def o_staged_by_halves(self) -> bool:
        return self.tuning.half_staged

    @property
    def o_columns(self) -> int:
        """Columns of O's first part."""
        return self.first_dv

    @property
    def tail_dv(self) -> int:
        """Columns of O's second part, or 0."""
        return self.rest_dv

    @property
    def pv_products(self) -> int:
        """Products in flight for one P V."""
        return 2 if self.tail_dv else 1

    @property
    def optimistic(self) -> bool:
        """Whether the softmax looks for row maxima in the first steps alone; a tile that needed more is redone."""
        return self.early

    @property
    def dynamic_scheduler(self) -> bool:
        return self.counted

    @property
    def key_ranges(self) -> bool:
        return self.spans

    @property
    def longest_tiles_first(self) -> bool:
        """Whether later rows see more keys: tiles that see most come first, and heads in sections."""
        return (self.mask.right or self.mask.prefix) and not self.mask.left

    @property
    def ends_with_last_row(self) -> bool:
        """Whether tiles are aligned to a sequence's last row instead of its first."""
        return self.mask.right and not self.mask.left and not self.spans and not self.has_block_lists

    @property
    def can_redo(self) -> bool:
        """Whether a tile may be redone."""
        return self.early or self.mask.documents

    @property
    def masks(self) -> bool:
        """Whether any tile may contain a masked key. If not, the mainloop has no mask code."""
        ends_within = not self.even or self.blocks_per_listed > 1
        return self.mask.left or self.mask.right or self.spans or ends_within

    @property
    def masks_each_step(self) -> bool:
        """Whether each step may have a partial block. If not, those that look for no row maxima have full ones."""
        return self.mask.left or (self.masks and self.has_block_lists)

    @property
    def first_block_first(self) -> bool:
        """Whether a tile visits its first key block before the others: if no left bound masks that block for some rows.

        A consumer then holds the first block's values while it skips the blocks that only later rows see. The pipeline
        has a stage more than those.
        """
        return not (self.mask.left or self.has_block_lists)

    @property
    def q_in_registers(self) -> bool:
        """Whether all of q is in registers before the products begin."""
        return self.tuning.q_in_registers == (2 if self.rest_d else 1)

    @property
    def queries_per_consumer(self) -> int:
        """Queries per consumer."""
        return ROWS // self.tuning.rows_per_query

    @property
    def swap_consumers(self) -> bool:
        """Whether consumers swap places from tile to tile, so that the longest rows of causal tiles alternate.

        Not with ping-pong, and not if a tile may be redone, which the consumer that wrote it must do.
        """
        return self.mask.right and not (self.mask.left or self.spans or self.tuning.ping_pong or self.can_redo)

    @property
    def q_slots(self) -> int:
        """Tiles of q in the shared memory layout: a power of two."""
        return 2 if self.tuning.consumers == 2 else 4

    def shared_bytes(self) -> int:
        """q (and o) of all consumers and k and v of all stages in 2 bytes each, barriers, work tiles' records, redo
        flags.
        """
        t = self.tuning
        o = self.q_slots * ROWS * (self.first_dv // (1 + t.half_staged) + self.rest_dv)
        tiles = 2 * (self.q_slots * ROWS * self.block_d + o + t.stages * t.block_n * (self.block_d + self.block_dv))
        return tiles + 8 * (2 * t.consumers + (4 + self.mask.documents) * t.stages + 4) + 128 + 2048 * self.can_redo


@dataclass(frozen=True)
class BackwardTuning:
    """Tile configuration of the backward. Two consumers process block_m queries per step: over 64 keys each (block_n =
    128), or over the same block_n keys.
    """

    block_m: int
    block_n: int
    stages: int  # stages of q
    stages_do: int
    parts: int = 1  # parts in which a dq tile passes through shared memory if one consumer computes all of it
    k_in_registers: bool = False
    roles: bool = False  # consumers split the products also with 128 keys: weights, ds and dv; dq and dk
    hides_weights: bool = True
    each: bool = False  # as in Tuning: d96 1.02x, d64 0.98x to 0.99x, d128 0.99x to 1.00x (H200)

    @property
    def arrivals(self) -> int:
        return THREADS if self.each else 1


@dataclass(frozen=True)
class BackwardForm(Constants, Walk):
    """Compile-time constants of the backward. It has no __str__ of its own, because Triton identifies kernels by it."""

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
    ordered: bool = False  # deterministic: key tiles add to a dq tile in a fixed order (backward_scheduler.dense_keys)
    splits: int = 1  # programs that share the heads of a group
    # the first key tile that reaches a dq tile stores it, so that nothing zeroes dq's sum; the others wait
    first_stores: bool = False
    lags: bool = False  # a step computes dq of the previous step
    begun: bool = False  # the score accumulator starts at -lse / scale
    last_sections: int = 0  # sections whose ordered programs start from the first keys (backward_scheduler.dense_keys)
    finishes: bool = False  # a key tile writes dq of queries that see no other keys directly
    clears: bool = False  # programs zero dq's sum, each a part that later key tiles add to (backward_store.clear_ahead)

    @property
    def members(self) -> int:
        """Query heads per program."""
        return self.group // self.splits

    @property
    def dk_width(self) -> int:
        """Columns of dk's float32 sum: rows are padded to multiples of 16 bytes."""
        return whole_lines(self.head_dim)

    @property
    def dv_width(self) -> int:
        return whole_lines(self.head_dim_v)

    @property
    def halves(self) -> bool:
        """Whether consumers split the keys. Otherwise they split the products: one computes weights, ds and dv, the
        other dq and dk (backward_split_products).
        """
        return self.tuning.block_n == 2 * ROWS and not self.tuning.roles

    @property
    def two_tiles(self) -> bool:
        """Whether consumers split the products over 128 keys, for which ds is two tiles of 64."""
        return self.tuning.block_n == 2 * ROWS and self.tuning.roles

    def passes(self, consumer: int) -> bool:
        """Whether this consumer's half of the keys may be masked for all queries of a tile, which skips it then."""
        hidden = self.mask.left if consumer == 0 else self.masks
        return hidden and self.halves and not self.by_rows and not self.spans

    @property
    def collects(self) -> bool:
        """Whether the last program that adds to a dq tile (the one with the last key tile its queries see) reads the
        sum and writes dq, so that no further kernel does. The other programs count their adds.

        Speed relative to a separate kernel (H200): 512 x 32 1.04x, 256 x 64 1.16x, 1k x 16 1.03x, d64 512 1.07x.
        """
        return self.finishes and not (self.ordered or self.packed) and self.group == 1

    def has_dk(self, consumer: int) -> bool:
        return self.halves or consumer == 1

    def has_dv(self, consumer: int) -> bool:
        return self.halves or consumer == 0

    @property
    def rest_dq(self) -> int:
        """Columns of dq's second part: q's, or half of dq if it passes through shared memory in two parts."""
        return self.rest_d or (self.block_d // 2 if self.tuning.parts == 2 else 0)

    @property
    def first_dq(self) -> int:
        return self.block_d - self.rest_dq

    @property
    def places(self) -> int:
        """Parts of dq that pass through shared memory: one per consumer if they split the keys, else one per unit."""
        return 2 if self.halves else self.dq_slot

    @property
    def by_rows(self) -> bool:
        """Whether a consumer's part of dq is 64 of the tile's queries instead of a range of columns. A step then
        processes queries in blocks of 64.
        """
        return self.tuning.block_m == 2 * ROWS

    def share_columns(self, consumer: int) -> int:
        if self.by_rows:
            return self.block_d
        return (self.first_dq, self.rest_dq)[consumer] if self.rest_dq else self.first_dq // 2

    def share_column(self, consumer: int) -> int:
        """First column of a consumer's part of dq."""
        return 0 if self.by_rows else consumer * self.share_columns(0)

    def share_row(self, consumer: int) -> int:
        """First row of a consumer's part of dq."""
        return ROWS * consumer if self.by_rows else 0

    def share_unit(self, consumer: int) -> int:
        """First unit of a consumer's part of dq."""
        return consumer if self.by_rows else self.share_column(consumer) // self.dq_unit

    @property
    def dq_unit(self) -> int:
        """Columns of a unit: the 64-row block of dq that TMA adds at once."""
        if not self.halves:
            return ROWS // 2 if self.two_tiles else ROWS
        return self.rest_dq or (self.first_dq if self.by_rows else self.first_dq // 2)

    def dq_units_written(self) -> int:
        """Units per tile, counting rows once, that contain real columns of dq. Padding may fill whole units."""
        return -(-self.head_dim // self.dq_unit)

    def dq_width(self, unit: int) -> int:
        """Real columns of dq in a unit."""
        return min(self.dq_unit, self.head_dim - unit * self.dq_unit)

    def dq_units(self) -> int:
        """Units of a dq tile."""
        return self.block_d // self.dq_unit * (self.tuning.block_m // ROWS)

    @property
    def dq_slot(self) -> int:
        """Units between slots of dq's pipeline. If consumers split the keys, a power of two, since a part of two units
        is aligned to it.
        """
        units = self.dq_units() // self.tuning.parts
        return 1 << (units - 1).bit_length() if self.halves else units

    @property
    def stores(self) -> int:
        """Warps that add dq. Two, alternating between tiles, if the next program waits until an add is in memory, which
        takes longer than a step: deterministic d128 causal 8k 512 TFLOP/s, and 467 with one (H200).
        """
        return 2 if (self.ordered or self.collects) and self.halves else 1

    @property
    def reckons(self) -> bool:
        """Whether steps recompute addresses (rematerialization, backward_mainloop.tile_now).

        Speed relative to addresses kept in registers (H200): d128 dense 1.07x to 1.09x, where it makes room for
        form.lags; d256 1.00x to 1.02x, whose programs then process several tiles; d64 causal 1.01x, window 1.06x, dense
        without lags 0.99x.
        """
        return self.masks or self.lags or self.finishes or not self.by_rows

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread of (consumers, load and store warps). Loading documents spills with 24; with 40 they run
        at 1.01x (d96) and 1.003x (d128) (H200).
        """
        return (232, 40) if self.mask.documents and not (self.softcap or self.by_rows or self.two_tiles) else (240, 24)

    @property
    def hides_weights(self) -> bool:
        """Whether masked weights are zeroed after the exponential. Otherwise masked scores are set to -inf before it,
        which takes fewer registers.
        """
        return self.tuning.hides_weights and not (self.lags and self.by_rows)

    @property
    def dq_lines(self) -> int:
        """Lines of 256 float32 in a unit."""
        return ROWS * self.dq_unit // 256

    @property
    def products_d(self) -> int:
        """Number of products for each of s and dk."""
        return 2 if self.rest_d else 1

    @property
    def products_dv(self) -> int:
        return 2 if self.rest_dv else 1

    @property
    def masks(self) -> bool:
        """Whether any tile may contain a masked key."""
        return self.mask.left or self.mask.right or not self.even

    @property
    def key_places(self) -> int:
        """Key tiles (and value tiles) in shared memory. With two, the next loads during the steps of the current one.

        Speed relative to one (H200): d64 causal 1.007x at 4k and 8k, 1.015x at 16k; d96 1.003x; d64 dense 0.995x.
        """
        walks = self.halves and self.splits == 1 and self.mask.right and not self.spans
        return 2 if walks and self._shared_bytes(2) + ROUNDING <= MOST_SHARED else 1

    @property
    def ds_places(self) -> int:
        """Tiles of ds in shared memory: two per consumer if they split the keys; else one, or one per stage of q for
        two key tiles.
        """
        return 4 if self.halves else self.tuning.stages if self.two_tiles else 1

    @property
    def slim(self) -> bool:
        """Whether other warps receive few tensors in shared memory (`channel.rings`, `views.tiles_for`).

        If consumers split the products, 192 leaves no room for more. With ordered dq: d64 1.013x, d128 1.009x.
        Otherwise d96 causal 8k 0.955x, others 0.997x to 1.005x (H100).
        """
        return not self.halves or self.ordered or self.collects

    @property
    def rings(self) -> tuple[tuple[int, int], ...]:
        """(barriers, arrivals) of told, told_free, kv_used, kv_free, sums_done, sums_free and kv_ready, which are not
        used in each step.
        """
        keys, sums = self.key_places, self.splits > 1 or self.two_tiles
        return ((1, 1), (1, 2 + self.stores), (keys, 2), (+sums, 1), (+sums, 2), (+sums, 1), (keys, 1))

    @property
    def bells(self) -> bool:
        """Whether each thread arrives by itself when its ds is in shared memory (`say_ds`, `hand_ds`).

        It needs shared memory, which d128 with two stages has. If consumers split the products, not for documents,
        whose steps have no register for it.
        """
        room = MOST_SHARED - self._shared_bytes(self.key_places)
        return room > BELLS + ROUNDING and (self.halves or not self.mask.documents)

    @property
    def dq_bells(self) -> bool:
        """Whether each thread arrives by itself when its part of dq is in shared memory.

        Speed relative to one arrival per consumer (H200):
            split groups            GQA 64/8 8k 1.017x (0.985x with per-thread ds alone)
            unsplit groups          1k x 16 1.002x (1.015x with per-thread ds alone), d128 causal 16k 1.011x (1.016x)
            split products          192/128 1.025x, d192 1.018x to 1.02x together with ds, d256 1.00x
        """
        return self.bells and (self.splits > 1 or not self.halves)

    def shared_bytes(self) -> int:
        return self._shared_bytes(self.key_places) + BELLS * self.bells

    def _shared_bytes(self, key_places: int) -> int:
        """k, v, q and do of all stages and ds in 2 bytes, weights in transit, dq, lse and delta in 4, barriers, and a
        work tile's record.
        """
        t = self.tuning
        rings = t.block_m * (t.stages * (2 * self.block_d + 4) + t.stages_do * (2 * self.block_dv + 4))
        keys = 2 * t.block_n * key_places * (self.block_d + self.block_dv)
        handed = t.block_m * ROWS * 2 * (4 if self.halves else 2 * t.stages if self.two_tiles else 1)
        of_keys = 2 + 2 * key_places + 3 * (self.splits > 1 or self.two_tiles) + t.stages * self.mask.documents
        of_ds = 4 * (1 + self.lags) if self.halves else t.stages if self.two_tiles else 1
        barriers = 2 * t.stages + (2 - self.halves) * t.stages_do + of_keys + of_ds + 2 * self.stores * self.places
        return rings + keys + handed + self.stores * 1024 * self.dq_slot * self.dq_lines + 8 * barriers + BOARD_BYTES


def whole_lines(width: int) -> int:
    """A width in float32, padded to a multiple of 16 bytes."""
    return -(-width // 4) * 4
