"""What TMA requires of a problem, and how many tiles a problem has. Imports no kernel language."""

from __future__ import annotations

from typing import Any

import torch

from ...env import ENV
from ...problem.call import DTYPES, Dense, Packed
from ...problem.mask import MaskStructure
from ...problem.problem import ALIGNMENT, Problem
from ..protocol import no_triton

MOST_ROWS = 2**30  # of a packed tensor: device.tma.FAR


def rest(width: int) -> int:
    """What remains of a width after its largest power of two: 32 for 96, 64 for 192."""
    return width - (1 << (width.bit_length() - 1))


def query_tiles(problem: Problem, block_m: int, group: int = 1) -> int:
    """Row tiles per head, where a query has `group` rows. For packed sequences, each of which starts a new tile, an
    upper bound (device.seqlen.find_sequence).
    """
    layout: Any = problem.layout
    return (
        layout.total_q * group // block_m + layout.batch + 2
        if problem.packed
        else -(-layout.seqlen_q * group // block_m)
    )


def heads_merge_with_rows(strides: tuple[int, ...], heads: int) -> bool:
    """Whether TMA can address heads and rows of a packed tensor as one dimension: row stride = heads * head stride."""
    return strides[0] == heads * strides[1]


def rows_per_query(heads: int) -> int:
    """Rows per query in a tile of `heads` heads: a power of two, as all tile shapes."""
    return 1 << (heads - 1).bit_length()


def qheads_per_tile(problem: Problem, rows: int, most: int, fewer: float = 0.1) -> int:
    """pack_gqa: query heads per tile of `rows` rows. All that share a key head (at most `most`) if that reduces the
    number of tiles by the fraction `fewer`, else one.

    A tile takes the same time for one query as for all that fit. A reduction by a tenth gains 1 to 9 %; a smaller one
    between -4 % and 3 % (H200). Packed sequences count as equally long.
    """
    layout: Any = problem.layout
    group = problem.group
    if not 1 < group <= most:
        return 1
    if problem.packed or has_spans(problem.mask):
        tokens = layout.total_q if problem.packed else reach(problem, 0)
        if not (
            heads_merge_with_rows(problem.strides[0][-3:], problem.heads_q) and tokens * problem.heads_kv <= MOST_ROWS
        ):
            return 1  # TMA descriptors have no dimension left: device.tma
    queries = -(-layout.total_q // max(1, layout.batch)) if problem.packed else layout.seqlen_q
    together, apart = -(-queries * rows_per_query(group) // rows), group * -(-queries // rows)
    return group if together <= (1 - fewer) * apart else 1


def against_call(problem: Problem) -> str | None:
    """Why TMA kernels cannot run the call's types, layout or scale, or None."""
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"float16 and bfloat16 only; this is {DTYPES[problem.dtype]}"
    if problem.out_dtype != problem.dtype:
        return f"writes out in q's dtype; a partial result of {DTYPES[problem.dtype]} is float32"
    if not isinstance(problem.layout, (Dense, Packed)):
        return f"dense and packed layouts only; this is {type(problem.layout).__name__.lower()}"
    if problem.scale <= 0:
        return f"needs a scale above 0; this is {problem.scale:g}"
    return None


def against_mask(mask: MaskStructure) -> str | None:
    """Why a kernel without per-row key ranges (device.key_ranges) cannot run this mask, or None."""
    strange = [name for name in ("prefix", "key_lengths", "documents") if getattr(mask, name)]
    return f"full, causal and window masks only; this has {' and '.join(strange)}" if strange else None


def has_spans(mask: MaskStructure) -> bool:
    """Whether rows of one batch entry may have different key ranges (device.key_ranges)."""
    return mask.documents or mask.key_lengths or mask.prefix


def against_spans(problem: Problem) -> str | None:
    """Why TMA cannot address the batch for a mask with key ranges, or None. Its descriptors treat the rows of all
    entries as one sequence.
    """
    layout: Any = problem.layout
    if not isinstance(layout, Dense) or not has_spans(problem.mask):
        return None
    for n, (name, (entry, row, *_)) in enumerate(zip("qkv", problem.strides)):
        if entries_apart(layout.batch, (entry, row)) is None:
            return (
                f"with prefixes, key lengths or documents, the batch stride must be a multiple of the row stride; "
                f"{name} has batch stride {entry} and row stride {row}: copy it"
            )
        if reach(problem, n) > MOST_ROWS:
            return (
                f"with prefixes, key lengths or documents, at most {MOST_ROWS} rows over the batch, TMA's limit; "
                f"{name} has {reach(problem, n)}"
            )
    return None


def reach(problem: Problem, n: int) -> int:
    """Rows from the first to the last of q, k or v (n = 0, 1, 2), if batch strides are whole numbers of rows."""
    layout: Any = problem.layout
    return (layout.seqlen_k if n else layout.seqlen_q) + (layout.batch - 1) * (
        entries_apart(layout.batch, problem.strides[n]) or 0
    )


def entries_apart(entries: int, strides: tuple[int, ...]) -> int | None:
    """Batch stride in rows: 0 for at most one entry, None if it is not a multiple of the row stride."""
    entry, row = strides[:2]
    if entries <= 1:
        return 0
    return entry // row if row and entry % row == 0 else None


def against_memory(problem: Problem) -> str | None:
    """Why TMA cannot address q, k and v in memory, or None."""
    if problem.alignment < ALIGNMENT:
        return (
            f"TMA needs addresses and strides of q, k and v in multiples of {ALIGNMENT} bytes; these are multiples "
            f"of {problem.alignment}: copy them, or pad the head dimension"
        )
    layout: Any = problem.layout
    if problem.packed:
        rows, keys = (layout.total_q, problem.heads_q), (layout.total_k, problem.heads_kv)
        if max(layout.tokens) > MOST_ROWS:
            return f"packed tensors of at most {MOST_ROWS} rows, TMA's limit; this has {max(layout.tokens)}"
    else:
        rows, keys = (layout.batch, layout.seqlen_q, problem.heads_q), (layout.batch, layout.seqlen_k, problem.heads_kv)
    for name, sizes, strides in zip("qkv", (rows, keys, keys), problem.strides):
        if 0 not in sizes and any(size > 1 and stride == 0 for size, stride in zip(sizes, strides)):
            return f"TMA needs nonzero strides; {name} is expanded: give fewer key heads, or make it contiguous"
        if 0 not in sizes and strides[-1] != 1:  # of one column
            return f"TMA needs a last stride of 1; {name}'s is {strides[-1]}: make it contiguous"
    return None


def against_tools() -> str | None:
    if ENV.interpret:
        return "Triton's interpreter (TRITON_INTERPRET) does not support Gluon"
    return no_triton()
