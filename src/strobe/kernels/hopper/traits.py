"""Compile-time constants of the Hopper kernels: tile configurations, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...problem.mask import MaskStructure
from ..runtime.compile_cache import Constants
from ..runtime.hook_constants import HookConstants, ListedBlocks, function_key
from ..runtime.tile_constants import CacheConstants, ForwardTileConstants, TileConstants
from ..runtime.tma_requirements import rest, rows_per_query
from .decode_config import MOST_SHARED

ROWS, THREADS = 64, 128  # rows and threads of one consumer
WORK_TILE_BYTES = 64  # the backward's record of a work tile
LAUNCH_REGISTERS = {2: 168, 3: 128, 4: 96}  # by the number of consumers
# (registers of a consumer, of the producer) by the number of consumers. Producers need more with a cache.
REGISTERS = {2: (240, 24), 3: (160, 32), 4: (112, 32)}
REGISTERS_CACHE = {2: (232, 40), 3: (152, 56)}
REGISTERS_PAGES = {2: (224, 56), 3: (152, 56)}
STAGING_STAGES = 2  # blocks of 8-bit keys in staging buffers (device.staged_keys)
REGISTERS_CONVERTED = {2: (208, 88), 3: (144, 80)}  # of a producer that converts 8-bit keys
PER_THREAD_MBARRIERS = (
    1024  # bytes of per-thread mbarriers, which are not in the kernel's own allocation (device.per_thread_mbarrier)
)
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
    softmax_overlaps_pv: bool = True
    ping_pong: bool = False  # consumers issue products in alternation
    # Each thread releases k and v by itself, instead of one thread after a barrier of the consumer's warps: d96 1.02x
    # to 1.03x, others 0.96x to 1.01x (H200).
    release_per_thread: bool = False
    # pack_gqa: query heads per tile, whose rows for one query are adjacent: one, or all that share a key head
    pack_gqa: int = 1

    @property
    def rows_per_query(self) -> int:
        """Rows of a tile per query."""
        return rows_per_query(self.pack_gqa)

    @property
    def arrivals(self) -> int:
        """Arrivals when one consumer releases a stage."""
        return THREADS if self.release_per_thread else 1

    @property
    def block_m(self) -> int:
        """Queries per tile."""
        return ROWS * self.consumers // self.rows_per_query


@dataclass(frozen=True)
class ForwardTraits(Constants, ForwardTileConstants, HookConstants):
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
    cache: CacheConstants | None = None  # packed queries see the keys of a cache
    runs: bool = False  # packed queries in runs over shared keys

    def __post_init__(self) -> None:
        object.__setattr__(self, "functions", tuple(function_key(fn) for fn in (self.score_mod, self.mask_mod)))

    @property
    def tail_d(self) -> int:
        """At 256 with q in registers, half of q's and k's columns, so that half of q fits: 1.001x to 1.006x (H200)."""
        return 128 if self.block_d == 256 and self.tuning.q_in_registers else rest(self.block_d)

    @property
    def consumers(self) -> int:
        return self.tuning.consumers

    @property
    def ping_pong(self) -> bool:
        return self.tuning.ping_pong

    @property
    def launch_registers(self) -> int:
        """Registers per thread at the launch, before setmaxnreg moves them between roles."""
        return LAUNCH_REGISTERS[self.consumers]

    @property
    def partition_registers(self) -> list[int]:
        """Registers per thread of the consumers but the first, and of the producer."""
        registers = REGISTERS_PAGES if self.has_pages else REGISTERS_CACHE if self.cached else REGISTERS
        if self.converts_keys:
            registers = REGISTERS_CONVERTED
        consumer, producer = registers[self.consumers]
        return [consumer] * (self.consumers - 1) + [producer]

    @property
    def q_parts_in_registers(self) -> int:
        return self.tuning.q_in_registers

    @property
    def softmax_before_pv_wait(self) -> bool:
        """Whether the wait for P V is kept after the softmax; with optimistic softmax, whose branch does that, it need
        not be.
        """
        return self.tuning.softmax_overlaps_pv and not self.early

    @property
    def release_per_thread(self) -> bool:
        return self.tuning.release_per_thread

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
        return self.main_dv

    @property
    def pv_products(self) -> int:
        """Products in flight for one P V."""
        return 2 if self.tail_dv else 1

    @property
    def optimistic(self) -> bool:
        """Whether the softmax looks for row maxima in the first steps alone; a tile that needed more is redone."""
        return self.early

    @property
    def ends_with_last_row(self) -> bool:
        """Whether tiles are aligned to a sequence's last row instead of its first."""
        return self.mask.right and not self.mask.left and not self.key_ranges and not self.has_block_lists

    @property
    def can_redo(self) -> bool:
        """Whether a tile may be redone."""
        return self.early or self.mask.documents

    @property
    def masks(self) -> bool:
        """Whether any tile may contain a masked key. If not, the mainloop has no mask code."""
        ends_within = not self.even or self.blocks_per_listed > 1
        return self.mask.left or self.mask.right or self.key_ranges or ends_within

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
        return self.tuning.q_in_registers == (2 if self.tail_d else 1)

    @property
    def queries_per_consumer(self) -> int:
        """Queries per consumer."""
        return ROWS // self.tuning.rows_per_query

    @property
    def swap_consumers(self) -> bool:
        """Whether consumers swap places from tile to tile, so that the longest rows of causal tiles alternate.

        Not with ping-pong, and not if a tile may be redone, which the consumer that wrote it must do.
        """
        return self.mask.right and not (self.mask.left or self.key_ranges or self.tuning.ping_pong or self.can_redo)

    @property
    def q_slots(self) -> int:
        """Tiles of q in the shared memory layout: a power of two."""
        return 2 if self.tuning.consumers == 2 else 4

    def shared_bytes(self) -> int:
        """q (and o) of all consumers and k and v of all stages in 2 bytes each, barriers, work tiles' records, redo
        flags, words of lost pages, staging buffers.
        """
        t = self.tuning
        o = self.q_slots * ROWS * (self.main_dv // (1 + t.half_staged) + self.tail_dv)
        tiles = 2 * (self.q_slots * ROWS * self.block_d + o + t.stages * t.block_n * (self.block_d + self.block_dv))
        barriers = 8 * (2 * t.consumers + (4 + self.mask.documents) * t.stages + 4)
        staging = STAGING_STAGES * t.block_n * (self.block_d + self.block_dv) * self.stages_keys
        return tiles + barriers + 128 + 2048 * self.can_redo + 16 * t.stages * self.has_pages + staging


@dataclass(frozen=True)
class BackwardTileConfig:
    """Tile configuration of the backward. Two consumers process block_m queries per step: over 64 keys each (block_n =
    128), or over the same block_n keys.
    """

    block_m: int
    block_n: int
    stages: int  # stages of Q
    stages_do: int
    dq_passes: int = 1  # passes in which a dQ tile goes through shared memory if one consumer computes all of it
    k_in_registers: bool = False
    split_products: bool = False  # consumers split the products also with 128 keys: S, dP and dV; dQ and dK
    masks_p: bool = True
    release_per_thread: bool = False  # `each` of Tuning: d96 1.02x, d64 0.98x to 0.99x, d128 0.99x to 1.00x (H200)

    @property
    def release_arrivals(self) -> int:
        """Arrivals when one consumer releases a stage."""
        return THREADS if self.release_per_thread else 1


@dataclass(frozen=True)
class DqLayout:
    """How a dQ tile passes through shared memory on its way to global memory.

    A unit has 64 rows and a range of columns, and one TMA instruction adds it to the sum. A slot holds the units of one
    pass of a tile. If consumers split the keys, each computes a part of a tile: 64 rows, or a range of columns.
    """

    block_m: int
    block_d: int
    head_dim: int
    tail_d: int
    passes: int
    split_by_keys: bool
    two_key_tiles: bool

    @property
    def tail(self) -> int:
        """Columns of the second product that makes a dQ tile: K's tail, or half of all columns with two passes."""
        return self.tail_d or (self.block_d // 2 if self.passes == 2 else 0)

    @property
    def main(self) -> int:
        return self.block_d - self.tail

    @property
    def by_rows(self) -> bool:
        """Whether a consumer's part is 64 of the tile's queries instead of a range of columns. A step then processes
        queries in blocks of 64.
        """
        return self.block_m == 2 * ROWS

    def part_columns(self, consumer: int) -> int:
        if self.by_rows:
            return self.block_d
        return (self.main, self.tail)[consumer] if self.tail else self.main // 2

    def part_column(self, consumer: int) -> int:
        """First column of a consumer's part."""
        return 0 if self.by_rows else consumer * self.part_columns(0)

    def part_row(self, consumer: int) -> int:
        """First row of a consumer's part."""
        return ROWS * consumer if self.by_rows else 0

    def part_unit(self, consumer: int) -> int:
        """First unit of a consumer's part."""
        return consumer if self.by_rows else self.part_column(consumer) // self.unit

    @property
    def unit(self) -> int:
        """Columns of a unit."""
        if not self.split_by_keys:
            return ROWS // 2 if self.two_key_tiles else ROWS
        return self.tail or (self.main if self.by_rows else self.main // 2)

    @property
    def lines(self) -> int:
        """Lines of 256 float32 in a unit."""
        return ROWS * self.unit // 256

    @property
    def units(self) -> int:
        """Units of a tile."""
        return self.block_d // self.unit * (self.block_m // ROWS)

    @property
    def units_written(self) -> int:
        """Units of 64 rows of a tile that contain real columns of dQ. Padding may fill whole units."""
        return -(-self.head_dim // self.unit)

    def width(self, unit: int) -> int:
        """Real columns of dQ in a unit."""
        return min(self.unit, self.head_dim - unit * self.unit)

    @property
    def slot_units(self) -> int:
        """Units of a slot. If consumers split the keys, a power of two, since a part of two units is aligned to it."""
        units = self.units // self.passes
        return 1 << (units - 1).bit_length() if self.split_by_keys else units

    @property
    def slot_barriers(self) -> int:
        """Full (and empty) barriers of a slot: one per consumer if they split the keys, else one per unit."""
        return 2 if self.split_by_keys else self.slot_units


@dataclass(frozen=True)
class BackwardTraits(Constants, TileConstants, HookConstants):
    """Compile-time constants of the backward. It has no __str__ of its own, because Triton identifies kernels by it."""

    tuning: BackwardTileConfig
    block_d: int
    block_dv: int
    head_dim: int
    head_dim_v: int
    group: int
    mask: MaskStructure
    softcap: bool
    even: bool  # S_k is a multiple of block_n
    packed: bool
    deterministic: bool = False  # key tiles add to a dQ tile in a fixed order (backward_scheduler.dense_key_tile)
    group_splits: int = 1  # programs that share the heads of a group
    dq_first_writer_stores: bool = False  # the first key tile stores a dQ tile instead of adding; the others wait
    dq_deferred: bool = False  # a step computes dQ of the previous step
    lse_folded: bool = False  # the accumulator of S starts at -LSE / scale
    reversed_sections: int = 0  # sections of heads whose deterministic programs start from the first keys
    dq_written_directly: bool = False  # a key tile writes dQ of queries that see no other keys directly
    dq_zeroed_ahead: bool = False  # programs zero the part of dQ's sum that later key tiles add to
    # functions of the call (device.backward_hooks), and keys of their text, as in ForwardTraits
    score_mod: Any = None
    mask_mod: Any = None
    score_mod_bwd: Any = None
    block_lists: ListedBlocks | None = None  # of (block_m, block_n)
    runs: bool = False  # packed queries in runs over shared keys
    functions: tuple[str | None, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        functions = (self.score_mod, self.mask_mod, self.score_mod_bwd)
        object.__setattr__(self, "functions", tuple(function_key(fn) for fn in functions))

    # ------------------------------------------------ tiles and stages

    @property
    def block_m(self) -> int:
        """Queries per tile."""
        return self.tuning.block_m

    @property
    def block_n(self) -> int:
        """Keys per tile, both consumers together."""
        return self.tuning.block_n

    @property
    def q_stages(self) -> int:
        return self.tuning.stages

    @property
    def do_stages(self) -> int:
        return self.tuning.stages_do

    @property
    def kv_stages(self) -> int:
        """Key tiles (and value tiles) in shared memory. With two, the next loads during the steps of the current one.

        Speed relative to one (H200): d64 causal 1.007x at 4k and 8k, 1.015x at 16k; d96 1.003x; d64 dense 0.995x.
        """
        suits = self.split_by_keys and self.group_splits == 1 and self.mask.right and not self.key_ranges
        return 2 if suits and self._shared_bytes(2) + ROUNDING <= MOST_SHARED else 1

    @property
    def ds_stages(self) -> int:
        """Stages of dS: two if consumers split the keys; else one, or one per stage of Q for two key tiles."""
        return 2 if self.split_by_keys else self.q_stages if self.two_key_tiles else 1

    @property
    def ds_tiles(self) -> int:
        """Tiles of dS in shared memory: in each stage one of each consumer if they split the keys."""
        return self.ds_stages * (2 if self.split_by_keys else 1)

    @property
    def store_warps(self) -> int:
        """Warps that add dQ. Two, alternating between tiles, if the next program waits until an add is in memory, which
        takes longer than a step: deterministic d128 causal 8k 512 TFLOP/s, and 467 with one (H200).
        """
        return 2 if (self.deterministic or self.dq_last_writer_converts) and self.split_by_keys else 1

    # ------------------------------------------------ who computes what

    @property
    def heads_per_program(self) -> int:
        """Query heads per program."""
        return self.group // self.group_splits

    @property
    def split_by_keys(self) -> bool:
        """Whether consumers split the keys (backward_split_keys). Otherwise they split the products: one computes S, dP
        and dV, the other dQ and dK (backward_split_products).
        """
        return self.block_n == 2 * ROWS and not self.tuning.split_products

    @property
    def two_key_tiles(self) -> bool:
        """Whether consumers split the products over 128 keys, for which dS is two tiles of 64."""
        return self.block_n == 2 * ROWS and self.tuning.split_products

    def has_dk(self, consumer: int) -> bool:
        return self.split_by_keys or consumer == 1

    def has_dv(self, consumer: int) -> bool:
        return self.split_by_keys or consumer == 0

    def can_skip(self, consumer: int) -> bool:
        """Whether this consumer's half of the keys may be masked for all queries of a tile, which it skips then."""
        hidden = self.mask.left if consumer == 0 else self.masks
        return hidden and self.split_by_keys and not self.dq.by_rows and not self.key_ranges

    @property
    def k_in_registers(self) -> bool:
        return self.tuning.k_in_registers

    @property
    def release_per_thread(self) -> bool:
        return self.tuning.release_per_thread

    @property
    def qk_products(self) -> int:
        """Products in flight for one S or dK."""
        return 2 if self.tail_d else 1

    @property
    def dov_products(self) -> int:
        """Products in flight for one dP or dV."""
        return 2 if self.tail_dv else 1

    # ------------------------------------------------ masks

    @property
    def masks(self) -> bool:
        """Whether any tile may contain a masked key."""
        return self.mask.left or self.mask.right or not self.even

    @property
    def masks_p(self) -> bool:
        """Whether masked elements of P are zeroed after the exponential. Otherwise masked scores are set to -inf before
        it, which takes fewer registers.
        """
        return self.tuning.masks_p and not (self.dq_deferred and self.dq.by_rows)

    @property
    def orders_by_cost(self) -> bool:
        """Whether earlier keys are seen by more rows: dense tiles come in sections of heads, by falling cost."""
        return self.mask.right and not self.mask.left

    # ------------------------------------------------ dQ, dK and dV

    @property
    def dq(self) -> DqLayout:
        t = self.tuning
        return DqLayout(
            t.block_m, self.block_d, self.head_dim, self.tail_d, t.dq_passes, self.split_by_keys, self.two_key_tiles
        )

    @property
    def dq_last_writer_converts(self) -> bool:
        """Whether the last program that adds to a dQ tile (the one with the last key tile its queries see) reads the
        sum and writes dQ, so that no further kernel does. The other programs count their adds.

        Speed relative to a separate kernel (H200): 512 x 32 1.04x, 256 x 64 1.16x, 1k x 16 1.03x, d64 512 1.07x.
        """
        return self.dq_written_directly and not (self.deterministic or self.packed) and self.group == 1

    @property
    def sums_dkv(self) -> bool:
        """Whether several programs add to float32 sums of dK and dV, because they share the heads of a group."""
        return self.group_splits > 1

    @property
    def dkv_in_kv(self) -> bool:
        """Whether dK and dV leave through the shared memory of K and V. Otherwise they leave through dQ's pipeline."""
        return self.sums_dkv or self.two_key_tiles

    @property
    def dk_width(self) -> int:
        """Columns of dK's float32 sum: rows are padded to multiples of 16 bytes."""
        return whole_lines(self.head_dim)

    @property
    def dv_width(self) -> int:
        return whole_lines(self.head_dim_v)

    # ------------------------------------------------ registers, barriers and shared memory

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread of (consumers, producer and store warps). The producer of documents spills with 24; with
        40 it runs at 1.01x (d96) and 1.003x (d128) (H200).
        """
        few = self.mask.documents and not (self.softcap or self.dq.by_rows or self.two_key_tiles)
        return (232, 40) if few else (240, 24)

    @property
    def consumer_registers(self) -> int:
        return self.registers[0]

    @property
    def one_warp_registers(self) -> int:
        return self.registers[1]

    @property
    def rematerializes(self) -> bool:
        """Whether steps recompute addresses (rematerialization, backward_mainloop.tile_now).

        Speed relative to addresses kept in registers (H200): d128 dense 1.07x to 1.09x, where it makes room for
        dq_deferred; d256 1.00x to 1.02x, whose programs then process several tiles; d64 causal 1.01x, window 1.06x,
        dense without dq_deferred 0.99x.
        """
        return self.masks or self.dq_deferred or self.dq_written_directly or not self.dq.by_rows

    @property
    def pools_barriers(self) -> bool:
        """Whether barriers share allocations, so that warp roles capture few addresses (`pipeline.rings`).

        If consumers split the products, 192 leaves no room for more. With deterministic dQ: d64 1.013x, d128 1.009x.
        Otherwise d96 causal 8k 0.955x, others 0.997x to 1.005x (H100).
        """
        return not self.split_by_keys or self.deterministic or self.dq_last_writer_converts

    @property
    def barriers_per_work_tile(self) -> tuple[tuple[int, int], ...]:
        """(barriers, arrivals) of those that are not used in each step: tile_full, tile_empty, kv_done, kv_empty,
        dkv_full, dkv_empty and kv_full.
        """
        stages, dkv = self.kv_stages, self.dkv_in_kv
        return ((1, 1), (1, 2 + self.store_warps), (stages, 2), (+dkv, 1), (+dkv, 2), (+dkv, 1), (stages, 1))

    @property
    def ds_per_thread_arrive(self) -> bool:
        """Whether each thread arrives by itself when its dS is in shared memory (`DsPipeline.producer_commit`).

        It needs shared memory, which d128 with two stages has. If consumers split the products, not for documents,
        whose steps have no register for it.
        """
        room = MOST_SHARED - self._shared_bytes(self.kv_stages)
        return room > PER_THREAD_MBARRIERS + ROUNDING and (self.split_by_keys or not self.mask.documents)

    @property
    def dq_per_thread_arrive(self) -> bool:
        """Whether each thread arrives by itself when its part of dQ is in shared memory.

        Speed relative to one arrival per consumer (H200):
            split groups            GQA 64/8 8k 1.017x (0.985x with per-thread dS alone)
            unsplit groups          1k x 16 1.002x (1.015x with per-thread dS alone), d128 causal 16k 1.011x (1.016x)
            split products          192/128 1.025x, d192 1.018x to 1.02x together with dS, d256 1.00x
        """
        return self.ds_per_thread_arrive and (self.sums_dkv or not self.split_by_keys)

    def shared_bytes(self) -> int:
        return self._shared_bytes(self.kv_stages) + PER_THREAD_MBARRIERS * self.ds_per_thread_arrive

    def _shared_bytes(self, kv_stages: int) -> int:
        """K, V, Q and dO of all stages and dS in 2 bytes, dQ in transit, LSE and delta in 4, barriers, and a work
        tile's record.
        """
        t, dq = self.tuning, self.dq
        rows = t.block_m * (t.stages * (2 * self.block_d + 4) + t.stages_do * (2 * self.block_dv + 4))
        keys = 2 * t.block_n * kv_stages * (self.block_d + self.block_dv)
        ds = t.block_m * ROWS * 2 * (4 if self.split_by_keys else 2 * t.stages if self.two_key_tiles else 1)
        key_barriers = 2 + 2 * kv_stages + 3 * self.dkv_in_kv + t.stages * self.mask.documents
        ds_barriers = self.ds_tiles * (1 + (self.split_by_keys and self.dq_deferred))
        dq_barriers = 2 * self.store_warps * dq.slot_barriers
        barriers = 2 * t.stages + (2 - self.split_by_keys) * t.stages_do + key_barriers + ds_barriers + dq_barriers
        return rows + keys + ds + self.store_warps * 1024 * dq.slot_units * dq.lines + 8 * barriers + WORK_TILE_BYTES


def whole_lines(width: int) -> int:
    """A width in float32, padded to a multiple of 16 bytes."""
    return -(-width // 4) * 4
