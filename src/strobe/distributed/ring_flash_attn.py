"""ring-flash-attention's functions (ring_flash_attn 0.1.8) on strobe's context parallelism.

    import strobe.distributed.ring_flash_attn as ring_flash_attn

Arguments, their order and the rows that a process holds are those of the originals:

    ring      equal parts of the sequence, in order
    zigzag    of 2 n equal parts of the sequence, part r and part 2 n - 1 - r
    stripe    every n-th row, from row r on
    varlen    ring or zigzag in each document; cu_seqlens holds the offsets of the local parts
    llama3    equal parts of all documents together; `llama3_flash_attn_prepare_cu_seqlens` makes the arguments

Beyond the originals, window_size applies to the whole sequence. Functions exchange keys or heads, whichever moves fewer
bytes; there is no ring. All processes of the group must make the same call. Unsupported arguments raise
UnsupportedProblem.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..compat.signatures import Setting, refuse, unpacked
from ..errors import InvalidProblem
from ..interface.attention import attention, attention_varlen
from ..problem.keywords import band
from ..problem.mask import NO_BOUND, Mask, documents
from . import ContextParallel, Plan, context_parallel
from .gather import gather_rows
from .packed import version_of
from .runs import Run, Runs, contiguous, head_tail

# ---------------------------------------------------------------- dense


def ring_flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None,
    deterministic=False, return_attn_probs=False, group=None,
):  # fmt: skip
    """
    >>> import torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> q, k = torch.randn(2, 8, 4, 16), torch.randn(2, 8, 2, 16)
    >>> ring_flash_attn_func(q, k, k, causal=True).shape
    torch.Size([2, 8, 4, 16])
    >>> dist.destroy_process_group()

    q [B, local rows, H_q, D], k and v [B, local rows, H_kv, D], the same numbers on each process. Returns out like q.
    """
    refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes, return_attn_probs=return_attn_probs)
    return _dense("ring", (q, k, v), Setting(softmax_scale, causal, window_size, None, deterministic), group)


def zigzag_ring_flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None,
    deterministic=False, return_attn_probs=False, group=None,
):  # fmt: skip
    """As `ring_flash_attn_func`; a process holds two parts of the sequence, so that causal work is even."""
    refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes, return_attn_probs=return_attn_probs)
    return _dense("zigzag", (q, k, v), Setting(softmax_scale, causal, window_size, None, deterministic), group)


def stripe_flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None,
    deterministic=False, return_attn_probs=False, group=None,
):  # fmt: skip
    """As `ring_flash_attn_func`; process r of n holds rows r, r + n, ... It exchanges heads, which must divide over
    processes."""
    refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes, return_attn_probs=return_attn_probs)
    return _dense("stripe", (q, k, v), Setting(softmax_scale, causal, window_size, None, deterministic), group)


# ---------------------------------------------------------------- documents


def ring_flash_attn_varlen_func(
    q, k, v, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
    alibi_slopes=None, deterministic=False, return_attn_probs=False, group=None,
):  # fmt: skip
    """
    >>> import torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> q, offsets = torch.randn(8, 4, 16), torch.tensor([0, 3, 8], dtype=torch.int32)
    >>> ring_flash_attn_varlen_func(q, q, q, offsets, 5, causal=True).shape
    torch.Size([8, 4, 16])
    >>> dist.destroy_process_group()

    q, k, v [local rows, H, D]: of each document an equal part. cu_seqlens: int32, the offsets of the local parts; a new
    tensor is read once. max_seqlen is not read.
    """
    refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes, return_attn_probs=return_attn_probs)
    setting = Setting(softmax_scale, causal, window_size, None, deterministic)
    return _packed("ring", (q, k, v), cu_seqlens, setting, group)


def zigzag_ring_flash_attn_varlen_func(
    q, k, v, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
    alibi_slopes=None, deterministic=False, return_attn_probs=False, group=None,
):  # fmt: skip
    """As `ring_flash_attn_varlen_func`; of each document a process holds two parts, as in
    `zigzag_ring_flash_attn_func`."""
    refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes, return_attn_probs=return_attn_probs)
    setting = Setting(softmax_scale, causal, window_size, None, deterministic)
    return _packed("zigzag", (q, k, v), cu_seqlens, setting, group)


def llama3_flash_attn_prepare_cu_seqlens(cu_seqlens: Tensor, causal: bool, rank: int, world_size: int) -> tuple:
    """
    >>> offsets = torch.tensor([0, 4, 12], dtype=torch.int32)
    >>> llama3_flash_attn_prepare_cu_seqlens(offsets, causal=True, rank=1, world_size=2)
    (tensor([0, 6], dtype=torch.int32), tensor([0, 8], dtype=torch.int32), 6, 8, slice(4, 12, None))

    cu_seqlens: the offsets of all documents; their total divides over processes. Returns (cu_seqlens_q, cu_seqlens_k,
    max_seqlen_q, max_seqlen_k, local_k_slice) of a process, for `llama3_flash_attn_varlen_func`. Waits for the device.
    """
    offsets = _read(cu_seqlens)
    if offsets[-1] % world_size:
        raise InvalidProblem(
            "cu_seqlens", f"{offsets[-1]} rows", f"a multiple of {world_size}", "pad the last document"
        )
    begin, end = (offsets[-1] // world_size * place for place in (rank, rank + 1))
    mine = [(start, stop) for start, stop in pairwise(offsets) if start < end and stop > begin]
    rows = [min(stop, end) - max(start, begin) for start, stop in mine]
    seen = [(start, min(stop, end) if causal else stop) for start, stop in mine]
    keys = [stop - start for start, stop in seen]
    lengths = (torch.tensor([0, *accumulate(part)], dtype=torch.int32) for part in (rows, keys))
    cu_q, cu_k = (one.to(cu_seqlens.device) for one in lengths)
    held = slice(seen[0][0], seen[-1][1]) if seen else slice(0, 0)
    return cu_q, cu_k, max(rows, default=0), max(keys, default=0), held


def llama3_flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, heads_k_stride, local_k_slice, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None, deterministic=False,
    return_attn_probs=False, group=None,
):  # fmt: skip
    """
    >>> import torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> q, offsets = torch.randn(8, 4, 16), torch.tensor([0, 3, 8], dtype=torch.int32)
    >>> *lengths, keys = llama3_flash_attn_prepare_cu_seqlens(offsets, True, 0, 1)
    >>> llama3_flash_attn_varlen_func(q, q, q, *lengths, heads_k_stride=1, local_k_slice=keys, causal=True).shape
    torch.Size([8, 4, 16])
    >>> dist.destroy_process_group()

    q, k, v [local rows, H, D]: equal parts of all documents together. Keys of all processes are gathered,
    heads_k_stride heads at a time. Nothing is read on the host. With a window, a document that goes on after the last
    local row is a call of its own.
    """
    refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes, return_attn_probs=return_attn_probs)
    options = Setting(softmax_scale, causal, window_size, None, deterministic).plain()
    heads_kv, groups = k.shape[1], q.shape[1] // k.shape[1]
    if q.shape[1] % heads_kv:
        raise InvalidProblem("q", f"{q.shape[1]} heads", f"a multiple of k's {heads_kv} heads", "repeat key heads")
    if v.shape[1] != heads_kv:
        raise InvalidProblem("v", f"{v.shape[1]} heads", f"k's {heads_kv} heads", "give k and v the same heads")
    if heads_k_stride < 1 or heads_kv % heads_k_stride:
        raise InvalidProblem("heads_k_stride", heads_k_stride, f"a divisor of {heads_kv} key heads", "pass 1")
    ahead = local_k_slice.stop - (dist.get_rank(group) + 1) * q.shape[0]
    parts = _window_parts(cu_seqlens_q, cu_seqlens_k, band(options.causal, options.window), ahead)
    outs = []
    for head in range(0, heads_kv, heads_k_stride):
        some = slice(head, head + heads_k_stride)
        keys, values = (gather_rows(t[:, some], group)[local_k_slice] for t in (k, v))
        queries = q[:, head * groups : (head + heads_k_stride) * groups]
        found = [
            attention_varlen(
                queries, keys, values,
                cu_seqlens_q=offsets_q, cu_seqlens_k=offsets_k,
                max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
                window=window, scale=options.scale, deterministic=options.deterministic or None,
            )
            for offsets_q, offsets_k, window in parts
        ]  # fmt: skip
        outs.append(found[0] if len(found) == 1 else found[0] + found[1])  # a row outside of a part's documents is 0
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1)


def _window_parts(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, window: tuple[int, int], ahead: int
) -> list[tuple[Tensor, Tensor, tuple[int, int]]]:
    """The calls for a process's documents: offsets of rows, offsets of keys, and window.

    ahead: how many keys of the last document follow the process's last row. The window of a call counts from the last
    key. So the last document's keys end with the last that this row sees, and its window moves by as many.
    """
    if ahead <= 0 or window == (NO_BOUND, NO_BOUND):
        return [(cu_seqlens_q, cu_seqlens_k, window)]
    left, right = window
    seen = ahead if right == NO_BOUND else min(right, ahead)
    moved = left if left == NO_BOUND else left + seen, right if right == NO_BOUND else right - seen
    keys = torch.cat([cu_seqlens_k[-2:-1], cu_seqlens_k[-1:] - (ahead - seen)])
    before = [(cu_seqlens_q[:-1], cu_seqlens_k[:-1], window)] if len(cu_seqlens_q) > 2 else []
    return [*before, (cu_seqlens_q[-2:], keys, moved)]


# ---------------------------------------------------------------- q, k and v in one tensor


def _kvpacked(function, is_packed: bool):
    name = function.__name__.replace("_func", "_kvpacked_func")

    def packed(q, kv, *arguments, **keywords):
        return function(q, *unpacked("kv", kv, 2, packed=is_packed), *arguments, **keywords)

    packed.__name__ = packed.__qualname__ = name
    packed.__doc__ = f"As `{function.__name__}`, with k and v in kv [..., 2, H_kv, D]."
    return packed


def _qkvpacked(function, is_packed: bool):
    name = function.__name__.replace("_func", "_qkvpacked_func")

    def packed(qkv, *arguments, **keywords):
        return function(*unpacked("qkv", qkv, 3, packed=is_packed), *arguments, **keywords)

    packed.__name__ = packed.__qualname__ = name
    packed.__doc__ = f"As `{function.__name__}`, with q, k and v in qkv [..., 3, H, D]."
    return packed


ring_flash_attn_kvpacked_func = _kvpacked(ring_flash_attn_func, False)
ring_flash_attn_qkvpacked_func = _qkvpacked(ring_flash_attn_func, False)
zigzag_ring_flash_attn_kvpacked_func = _kvpacked(zigzag_ring_flash_attn_func, False)
zigzag_ring_flash_attn_qkvpacked_func = _qkvpacked(zigzag_ring_flash_attn_func, False)
stripe_flash_attn_kvpacked_func = _kvpacked(stripe_flash_attn_func, False)
stripe_flash_attn_qkvpacked_func = _qkvpacked(stripe_flash_attn_func, False)
ring_flash_attn_varlen_kvpacked_func = _kvpacked(ring_flash_attn_varlen_func, True)
ring_flash_attn_varlen_qkvpacked_func = _qkvpacked(ring_flash_attn_varlen_func, True)
zigzag_ring_flash_attn_varlen_kvpacked_func = _kvpacked(zigzag_ring_flash_attn_varlen_func, True)
zigzag_ring_flash_attn_varlen_qkvpacked_func = _qkvpacked(zigzag_ring_flash_attn_varlen_func, True)
llama3_flash_attn_varlen_kvpacked_func = _kvpacked(llama3_flash_attn_varlen_func, True)
llama3_flash_attn_varlen_qkvpacked_func = _qkvpacked(llama3_flash_attn_varlen_func, True)


# ---------------------------------------------------------------- plans


@lru_cache(16)
def _parallel(group: Any, scheme: str) -> ContextParallel:
    return context_parallel(group, scheme=scheme)


@lru_cache(16)
def _rows_of(layout: str, seqlen: int, ranks: int) -> tuple[Runs, ...]:
    """Who holds which rows of a sequence."""
    if layout == "stripe":
        return tuple(tuple((row, row + 1) for row in range(rank, seqlen, ranks)) for rank in range(ranks))
    return head_tail(seqlen, ranks) if layout == "zigzag" else contiguous(seqlen, ranks)


def _dense(layout: str, qkv: tuple[Tensor, Tensor, Tensor], setting: Setting, group: Any) -> Tensor:
    q, k, _ = qkv
    group = dist.group.WORLD if group is None else group
    ranks = dist.get_world_size(group)
    if layout == "zigzag" and q.shape[1] % 2:
        raise InvalidProblem("q", f"{q.shape[1]} rows", "an even number of rows for zigzag", "pad the sequence")
    plan = _parallel(group, "heads" if layout == "stripe" else "auto").plan(
        None, seqlen=ranks * q.shape[1], heads_q=q.shape[2], heads_kv=k.shape[2], head_dim=q.shape[3],
        batch=q.shape[0], dtype=q.dtype, rows=_rows_of(layout, ranks * q.shape[1], ranks),
    )  # fmt: skip
    return _attended(qkv, plan, Mask(), setting)


def _packed(
    layout: str, qkv: tuple[Tensor, Tensor, Tensor], cu_seqlens: Tensor, setting: Setting, group: Any
) -> Tensor:
    q, k, v = (t[None] for t in qkv)
    group = dist.group.WORLD if group is None else group
    mask, rows, seqlen = _documents(cu_seqlens, version_of(cu_seqlens), layout, dist.get_world_size(group))
    sizes = {"heads_q": q.shape[2], "heads_kv": k.shape[2], "head_dim": q.shape[3]}
    plan = _parallel(group, "auto").plan(mask, seqlen=seqlen, dtype=q.dtype, rows=rows, **sizes)
    return _attended((q, k, v), plan, mask, setting)[0]


def _read(cu_seqlens: Tensor) -> list[int]:
    """The offsets on the host. Waits for the device."""
    offsets = cu_seqlens.tolist()
    if offsets[:1] != [0] or any(stop < start for start, stop in pairwise(offsets)):
        raise InvalidProblem(
            "cu_seqlens", offsets, "offsets that ascend from 0", "give the running sum of the documents' lengths"
        )
    return offsets


@lru_cache(64)
def _documents(cu_seqlens: Tensor, version: Hashable, layout: str, ranks: int) -> tuple[Mask, tuple[Runs, ...], int]:
    """The documents of local offsets as a mask, the rows of each process, and the rows of all."""
    offsets = [ranks * offset for offset in _read(cu_seqlens)]
    held: list[list[Run]] = [[] for _ in range(ranks)]
    for start, stop in pairwise(offsets):
        if layout == "zigzag" and (stop - start) // ranks % 2:
            got = f"a document with {(stop - start) // ranks} local rows"
            raise InvalidProblem("cu_seqlens", got, "an even number of rows for zigzag", "pad the document")
        for rank, runs in enumerate(_rows_of(layout, stop - start, ranks)):
            held[rank] += [(start + first, start + last) for first, last in runs]
    lengths = torch.tensor([stop - start for start, stop in pairwise(offsets)], device=cu_seqlens.device)
    ids = torch.arange(len(lengths), dtype=torch.int32, device=cu_seqlens.device).repeat_interleave(lengths)
    return documents(ids[None]), tuple(map(tuple, held)), offsets[-1]


def _attended(qkv: tuple[Tensor, Tensor, Tensor], plan: Plan, mask: Mask, setting: Setting) -> Tensor:
    options = setting.plain()
    return attention(
        *qkv, mask=mask, causal=options.causal, window=options.window, scale=options.scale,
        deterministic=options.deterministic or None, context_parallel=plan,
    )  # fmt: skip


__all__ = [
    "llama3_flash_attn_prepare_cu_seqlens",
    "llama3_flash_attn_varlen_func",
    "llama3_flash_attn_varlen_kvpacked_func",
    "llama3_flash_attn_varlen_qkvpacked_func",
    "ring_flash_attn_func",
    "ring_flash_attn_kvpacked_func",
    "ring_flash_attn_qkvpacked_func",
    "ring_flash_attn_varlen_func",
    "ring_flash_attn_varlen_kvpacked_func",
    "ring_flash_attn_varlen_qkvpacked_func",
    "stripe_flash_attn_func",
    "stripe_flash_attn_kvpacked_func",
    "stripe_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_func",
    "zigzag_ring_flash_attn_kvpacked_func",
    "zigzag_ring_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_varlen_func",
    "zigzag_ring_flash_attn_varlen_kvpacked_func",
    "zigzag_ring_flash_attn_varlen_qkvpacked_func",
]
