"""What the Hopper forward can run of packed queries over a cache, and with which tiles. Imports no kernel language."""

from __future__ import annotations

from dataclasses import replace

from ...problem.cache import FP8
from ...problem.call import DTYPES, Packed
from ...problem.mask import NO_BOUND, MaskStructure
from ...problem.paged import PagedProblem
from ...problem.problem import ALIGNMENT, Problem
from ...problem.target import Target
from ..protocol import keys_a_row
from ..runtime.mod_function import ModFunctions, mod_functions
from ..runtime.tile_constants import CacheConstants
from ..runtime.tma_requirements import MOST_ROWS, entries_apart
from .forward_config import EARLY, EARLY_KEYS, forward_traits
from .traits import ForwardTraits, Tuning

MOST_TOKENS = 16  # of a sequence that the decode runs: it is then as fast as memory
FARTHEST_STRIDE = 4 * 2**32  # bytes, in a cache of 8-bit keys: the kernel multiplies words of 4 bytes in 32 bits
LEAST_PAGE = 8  # rows after which the swizzle of shared memory repeats
# Over long sequences, fewer tiles (for each SM) leave SMs without work that could share the keys.
LEAST_TILES, LONG_CAPACITY = 0.25, 4096

# (padded head dimensions) -> tiles that leave the producer 56 registers without spills. Its copies are many, so tiles
# of 64 keys with more queries come first: they need fewer copies for the same products.
TUNINGS = {
    (64, 64): Tuning(block_n=64, stages=6, consumers=3, q_in_registers=1, softmax_overlaps_pv=False, ping_pong=True),
    (96, 96): Tuning(block_n=64, stages=4, consumers=3, softmax_overlaps_pv=False, ping_pong=True),
    (128, 128): Tuning(block_n=64, stages=4, consumers=3, half_staged=True, softmax_overlaps_pv=False, ping_pong=True),
    (192, 128): Tuning(block_n=64, stages=4, consumers=2, q_in_registers=1, half_staged=True, ping_pong=True),
    (192, 192): Tuning(block_n=64, stages=3, consumers=2, q_in_registers=1, half_staged=True, ping_pong=True),
    (256, 128): Tuning(block_n=64, stages=2, consumers=2, ping_pong=True),
    (256, 256): Tuning(block_n=64, stages=2, consumers=2, half_staged=True, ping_pong=True),
}
# 8-bit keys, whose staging buffers take the shared memory of a stage
STAGED_TUNINGS = {(128, 128): replace(TUNINGS[128, 128], stages=3), (192, 128): replace(TUNINGS[192, 128], stages=3)}
# with a softcap, because tanh takes registers. Tiles of 128 queries are slower (docs/lab/2026-11-28-paged-prefill.md).
# In the other widths, tiles are the same with and without a softcap.
SOFTCAP_TUNINGS = {(128, 128): Tuning(block_n=64, stages=4, consumers=2, q_in_registers=1)}
# with a score_mod, which takes registers, too: two consumers have more of them, with which none spills at 64 and 128
# (24 bytes with a mask_mod). A mask_mod alone keeps TUNINGS, where it spills up to 900 bytes and is still faster.
# TFLOP/s with three consumers, and with two (H200, a chunk of 2k tokens over 32k keys):
#   alibi                     d64 298, 316; d96 334, 403; d128 458, 527; d128 of 8-bit keys 389, 376
#   documents as a mask_mod                 d96 344, 288; d128 439, 388; d128 of 8-bit keys 380, 299
#   both                      d64 194, 199; d96 201, 268; d128 313, 329; d128 of 8-bit keys 276, 321
SCORE_TUNINGS = {
    (64, 64): Tuning(block_n=64, stages=6, consumers=2, q_in_registers=1, softmax_overlaps_pv=False, ping_pong=True),
    (96, 96): Tuning(block_n=64, stages=4, consumers=2, softmax_overlaps_pv=False, ping_pong=True),
    (128, 128): Tuning(block_n=64, stages=4, consumers=2, q_in_registers=1, softmax_overlaps_pv=False, ping_pong=True),
}


def as_packed(problem: PagedProblem) -> Problem:
    """A packed problem with the same queries, and as many keys as all sequences may have."""
    layout = problem.layout
    return Problem(
        layout=Packed(layout.batch, problem.total_q, layout.batch * problem.capacity, None, None),
        heads_q=problem.heads_q,
        heads_kv=problem.heads_kv,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        dtype=problem.dtype,
        out_dtype=problem.out_dtype,
        scale=problem.scale,
        softcap=problem.softcap,
        mask=MaskStructure(problem.left != NO_BOUND, problem.right != NO_BOUND),
        left=problem.left,
        right=problem.right,
        sinks=problem.sinks,
        strides=problem.strides,
        alignment=problem.alignment,
        alignment_kv=problem.alignment,
        needs_grad=False,
        deterministic=False,
        batch_invariant=False,
        kernel=problem.kernel,
    )


def prefill_traits(problem: PagedProblem, target: Target, in_copy: bool | None = None) -> ForwardTraits:
    """in_copy: which sequences run, where the keys of some are copied (`CacheConstants`)."""
    like = as_packed(problem)
    widths = next(w for w in TUNINGS if w[0] >= problem.head_dim and w[1] >= problem.head_dim_v)
    cache = CacheConstants(problem.page_size if problem.paged else 0, problem.k_start, False, *problem.scales)
    if problem.cache_dtype == FP8:
        cache = cache._replace(fp8=True, head_dim=problem.head_dim, head_dim_v=problem.head_dim_v)
    functions = ModFunctions() if problem.mods is None else mod_functions(problem.mods)
    early = widths in EARLY and keys_a_row(like) >= EARLY_KEYS and functions.mask_mod is None
    traits = forward_traits(like, target, _tuning(problem, widths), widths, early)
    if NO_BOUND != problem.left < traits.block_n and not cache.fp8:
        cache = cache._replace(most_box_rows=1 << (problem.left + 1).bit_length() - 1)
    return replace(
        traits, cache=cache._replace(in_copy=in_copy), score_mod=functions.score_mod, mask_mod=functions.mask_mod
    )


def _tuning(problem: PagedProblem, widths: tuple[int, int]) -> Tuning:
    usual = STAGED_TUNINGS.get(widths, TUNINGS[widths]) if problem.cache_dtype == FP8 else TUNINGS[widths]
    special = SOFTCAP_TUNINGS if problem.softcap else {}
    mods = problem.mods
    if mods is not None and mods.score and (mods.mask or problem.cache_dtype != FP8):
        special = SCORE_TUNINGS
    return special.get(widths, usual)


def is_few(problem: PagedProblem) -> bool:
    """Whether no sequence has more than MOST_TOKENS new tokens."""
    return problem.layout.seqlen_q <= MOST_TOKENS


def of_few(problem: PagedProblem) -> PagedProblem:
    """The sequences of a problem that have few tokens."""
    tokens = min(problem.layout.seqlen_q, MOST_TOKENS)
    return replace(problem, layout=problem.layout._replace(seqlen_q=tokens))


def rows_apart(problem: PagedProblem) -> tuple[int, int]:
    """Rows of K and of V from one page, or one sequence of a dense cache, to the next; -1 if not a whole number."""
    entries = entries_of(problem)
    found = [entries_apart(max(entries, 2), strides) for strides in problem.strides[1:]]
    k_step, v_step = (-1 if entries > 1 and step is None else step or 0 for step in found)
    return k_step, v_step


def entries_of(problem: PagedProblem) -> int:
    """Pages, or sequences of a dense cache."""
    return problem.layout.n_pages if problem.paged else problem.layout.batch  # type: ignore[union-attr]


def against_prefill(problem: PagedProblem, target: Target) -> str | None:
    """Why the Hopper forward cannot run the queries, or None. The decode can run those of few tokens."""
    if problem.out_dtype != problem.dtype:
        return f"writes out in q's dtype; a partial result of {DTYPES[problem.dtype]} is float32"
    if problem.scale <= 0:
        return f"needs a scale above 0; this is {problem.scale:g}"
    return _against_memory(problem) or _against_tiles(problem, target)


def _against_memory(problem: PagedProblem) -> str | None:
    """Why TMA cannot address q and the cache, or None."""
    size, heads = problem.dtype.itemsize, (problem.heads_q, problem.heads_kv, problem.heads_kv)
    if problem.layout.batch == 0:
        return "batches of at least one sequence"
    if any(stride * size % ALIGNMENT for stride in problem.strides[0][-3:-1]):
        return f"TMA needs strides of q in multiples of {ALIGNMENT} bytes: copy it, or pad the head dimension"
    entries, rows = entries_of(problem), problem.page_size
    converts_keys = problem.cache_dtype == FP8  # so TMA loads q alone
    sizes = ((problem.total_q,), (entries, rows), (entries, rows))
    for name, lengths, count, strides in zip("q" if converts_keys else "qkv", sizes, heads, problem.strides):
        if any(length > 1 and stride == 0 for length, stride in zip((*lengths, count), strides[-len(lengths) - 2 :])):
            return f"TMA needs nonzero strides; {name} is expanded"
    if converts_keys:
        if max(stride for strides in problem.strides[1:] for stride in strides) >= FARTHEST_STRIDE:
            return f"strides of 8-bit keys below {FARTHEST_STRIDE} bytes"
        few_rows = problem.total_q * problem.heads_kv <= MOST_ROWS
        return None if few_rows else f"at most {MOST_ROWS} rows of q, TMA's limit"
    if 0 in (entries, rows):
        return "caches with keys only"
    apart = rows_apart(problem)
    if -1 in apart:
        return f"TMA needs a page stride that is a multiple of the row stride; the strides are {problem.strides[1:]}"
    if max(problem.total_q * problem.heads_kv, entries * max(apart) + rows) > MOST_ROWS:
        return f"at most {MOST_ROWS} rows of q and of the cache, TMA's limit"
    return None


def _against_tiles(problem: PagedProblem, target: Target) -> str | None:
    traits = prefill_traits(problem, target)
    page = problem.page_size if problem.paged else 0
    by_boxes = page % traits.block_n == 0 or (page >= LEAST_PAGE and traits.block_n % page == 0)
    if not by_boxes and not traits.converts_keys:
        return f"pages of {LEAST_PAGE} keys or more that divide or hold {traits.block_n}; these hold {page}"
    if not traits.converts_keys and problem.left != NO_BOUND and problem.left + 1 < LEAST_PAGE:
        return f"windows with at least {LEAST_PAGE - 1} keys before a query; this one has {problem.left}"
    tiles = problem.heads_kv * traits.group * max(1, problem.total_q // traits.block_m)
    if tiles < LEAST_TILES * target.sm_count and problem.capacity >= LONG_CAPACITY and not problem.kernel:
        return f"{tiles} tiles of {traits.block_m} queries for {target.sm_count} SMs; portable.paged splits keys"
    return None
