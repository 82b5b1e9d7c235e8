"""FlashAttention-2's `block_table`: packed queries over pages, whose key lengths are differences of offsets."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InvalidProblem, UnsupportedProblem, wrong_type
from ..ops import paged as ops_paged
from ..problem.cache import PagedCache
from ..problem.decode import refuse_gradients
from .kvcache import packed_call
from .signatures import Setting, in_their_words, rows_contiguous


def forward_paged(q: Tensor, k: Tensor, v: Tensor, setting: Setting, page_table: Tensor) -> tuple[Tensor, Tensor]:
    """out [T, H, D] and lse [H, T] of packed queries over pages. The key lengths are the differences of cu_seqlens_k.

    >>> pages, offsets = torch.randn(4, 8, 2, 16), torch.tensor([0, 3, 4], dtype=torch.int32)
    >>> table, lengths = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32), torch.tensor([0, 11, 20], dtype=torch.int32)
    >>> setting = Setting(causal=True, packing=(offsets, lengths, 3, 11))
    >>> [list(t.shape) for t in forward_paged(torch.randn(4, 6, 16), pages, pages, setting, table)]
    [[4, 6, 16], [6, 4]]

    Results are NaN for queries outside every sequence, and for sequences with more queries than max_seqlen_q or more
    keys than max_seqlen_k.
    """
    setting = setting.plain()
    cu_seqlens_q, cu_seqlens_k, longest_q, longest_k = _packing(q, k, setting, page_table)
    wants = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    found = _over_pages(q, (k, v), setting, page_table, (cu_seqlens_q, cu_seqlens_k, longest_q, longest_k))
    return _WithoutBackward.apply(q, k, v, *found) if wants else found  # type: ignore[return-value]


class _WithoutBackward(torch.autograd.Function):
    """Return out and lse with a backward that raises. FlashAttention's backward over pages raises, too."""

    @staticmethod
    def forward(ctx, q, k, v, out, lse):
        return out.view_as(out), lse.view_as(lse)

    @staticmethod
    def backward(ctx, *gradients):
        raise UnsupportedProblem("gradients through block_table: gather the keys, and call without a table")


def _over_pages(
    q: Tensor, pools: tuple[Tensor, Tensor], setting: Setting, page_table: Tensor, packing: tuple
) -> tuple[Tensor, Tensor]:
    (k, v), (cu_seqlens_q, cu_seqlens_k, longest_q, longest_k) = pools, packing
    with torch.no_grad():
        refuse_gradients([q, k, v], "block_table")  # tangents
        q, lengths = rows_contiguous(q), cu_seqlens_k.diff()
        if k.dim() == 4 and k.shape[1]:
            page_table = page_table[:, : -(-longest_k // k.shape[1])]  # splits are planned for the table's width
        cache = PagedCache(k, v, page_table, lengths)
        try:
            out, lse = ops_paged.run(packed_call(q, cache, setting, cu_seqlens_q, longest_q))
        except (InvalidProblem, TypeError) as problem:
            words = {
                "cache.k_pages": "k",
                "cache.v_pages": "v",
                "cache.page_table": "block_table",
                "cache.seqlens": "cu_seqlens_k",
            }
            raise in_their_words(problem, words) from None
        row, ends = torch.arange(len(q), device=q.device), cu_seqlens_q[1:].contiguous()
        too_long = torch.nn.functional.pad(lengths > longest_k, (0, 1), value=True)
        lost = too_long[torch.searchsorted(ends, row, right=True)] | (row < cu_seqlens_q[0])
        return out.masked_fill(lost[:, None, None], torch.nan), lse.masked_fill(lost, torch.nan)


def _packing(q: Tensor, k: Tensor, setting: Setting, page_table: Tensor) -> tuple[Tensor, Tensor, int, int]:
    for name, given, dims in (("q", q, 3), ("k", k, 4), ("block_table", page_table, 2)):
        if not isinstance(given, Tensor):
            raise wrong_type(name, given, "a tensor", "pass a torch.Tensor")
        if given.dim() != dims:
            raise InvalidProblem(
                name, f"shape {list(given.shape)}", f"{dims} dimensions", "beside a block_table, k and v are pages"
            )
    cu_seqlens_q, cu_seqlens_k, longest_q, longest_k = setting.packing or (None, None, None, None)
    batch = page_table.shape[0]
    offsets = _offsets("cu_seqlens_q", cu_seqlens_q, batch), _offsets("cu_seqlens_k", cu_seqlens_k, batch)
    return *offsets, _longest("max_seqlen_q", longest_q), _longest("max_seqlen_k", longest_k)


def _offsets(name: str, offsets: Tensor | None, batch: int) -> Tensor:
    if not isinstance(offsets, Tensor):
        raise wrong_type(
            name, offsets, f"an int32 tensor [{batch + 1}]", "give the running sum of lengths, from 0 to the total"
        )
    if offsets.dtype != torch.int32 or tuple(offsets.shape) != (batch + 1,):
        got = f"{offsets.dtype} {list(offsets.shape)}"
        raise InvalidProblem(name, got, f"torch.int32 [{batch + 1}]", "give one more than block_table has rows")
    return offsets


def _longest(name: str, longest: int | None) -> int:
    if not isinstance(longest, (int, torch.SymInt)) or longest < 0:
        raise InvalidProblem(name, longest, "an int >= 0", "say how long the longest sequence is")
    return longest
