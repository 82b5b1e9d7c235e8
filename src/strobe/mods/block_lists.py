"""`block_lists`: a mask from a user's lists of blocks, in FlexAttention's form."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import InvalidProblem, wrong_type
from ..problem.mask import Mask
from ..problem.torch_private import FakeTensor, is_functorch_wrapped_tensor
from .mask import MaskMod, part_of_lists
from .mask import mask_mod as mask_of


def block_lists(
    kv_num_blocks: Tensor, kv_indices: Tensor, full_kv_num_blocks: Tensor | None = None,
    full_kv_indices: Tensor | None = None, *, block_size: int | tuple[int, int] = 128,
    mask_mod: Mask | Callable | None = None, num_kv_blocks: int | None = None,
) -> MaskMod:  # fmt: skip
    """A mask of lists: for each block of queries the blocks of keys that it sees.

    >>> import strobe
    >>> counts = torch.tensor([1, 2], dtype=torch.int32)
    >>> blocks = torch.tensor([[0, 0], [0, 2]], dtype=torch.int32)
    >>> mask = strobe.block_lists(counts, blocks, block_size=2, num_kv_blocks=3)
    >>> mask.dense(4, 6)[0].int().tolist()
    [[1, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 0, 0, 1, 1], [1, 1, 0, 0, 1, 1]]
    >>> q, k = torch.randn(1, 4, 2, 16), torch.randn(1, 6, 2, 16)
    >>> strobe.attention(q, k, k, mask=mask & strobe.causal()).shape
    torch.Size([1, 4, 2, 16])

    The mask combines with others by &, | and ~. Kernels that have lists skip the blocks that are in none, in both
    passes (docs/guides/mask_functions.md); blocks of a multiple of 64 queries and keys are skipped best. The lists of
    queries for the backward are derived on the device. The lists are read when the mask is made, and a call reads the
    mask's own table of blocks: make a new mask for new lists.

    Args:
        kv_num_blocks: [B, H_q, M] integers, how many blocks of keys each of M blocks of queries sees. B and H_q may be
            1, for all batch entries or query heads, and may be left out.
        kv_indices: [B, H_q, M, K] integers, the numbers of these blocks. The first kv_num_blocks count, in any order.
        full_kv_num_blocks, full_kv_indices: the same of blocks that are seen in full, without mask_mod.
        block_size: queries and keys of a block, or one number for both. The last blocks may stick out of the call.
        mask_mod: what is seen within the blocks of kv_indices: a mask, or a function (b, h, q_idx, kv_idx) -> bool.
            None: all of it.
        num_kv_blocks: how many blocks the keys have. K by default, as in FlexAttention.

    Raises InvalidProblem for shapes, dtypes or devices that do not belong together, and for CPU tensors whose numbers
    are no blocks. The host does not read tensors of a GPU: there, blocks that do not exist are not seen. A call of
    tensors [B, S, H, D] raises InvalidProblem if the lists do not cover it. In packed sequences and caches, whose
    lengths the host does not know, queries beyond the lists see nothing, and keys beyond them are not seen.
    """
    partial = _checked("kv", kv_num_blocks, kv_indices, num_kv_blocks)
    full = None
    if full_kv_num_blocks is not None or full_kv_indices is not None:
        full = _checked("full_kv", full_kv_num_blocks, full_kv_indices, num_kv_blocks)
        if full[0].shape[2] != partial[0].shape[2] or full[0].device != partial[0].device:
            got = f"{list(full[0].shape)} on {full[0].device}"
            expected = f"{partial[0].shape[2]} blocks of queries on {partial[0].device}, as kv_num_blocks has"
            raise InvalidProblem("full_kv_num_blocks", got, expected, "give both lists one row for each block")
        full, partial = _broadcast(full, partial), _broadcast(partial, full)
        if num_kv_blocks is None:
            num_kv_blocks = max(partial[1].shape[-1], full[1].shape[-1])
    sizes = tuple(block_size) if isinstance(block_size, (tuple, list)) else (block_size, block_size)
    if len(sizes) != 2 or any(type(size) is not int or not 0 < size < 2**31 for size in sizes):
        raise InvalidProblem("block_size", block_size, "queries and keys, integers from 1 on", "pass 128 or (128, 64)")
    inner = None
    if mask_mod is not None:
        inner = (MaskMod.of(mask_mod) if isinstance(mask_mod, Mask) else mask_of(mask_mod)).whole
    return MaskMod(part=part_of_lists(partial, full, sizes, inner, num_kv_blocks))


def _checked(name: str, counts: Tensor | None, indices: Tensor | None, blocks: int | None) -> tuple[Tensor, Tensor]:
    """[B, H, M] and [B, H, M, K]."""
    if not isinstance(counts, Tensor):
        raise wrong_type(f"{name}_num_blocks", counts, "a tensor of integers", "pass counts and numbers of blocks")
    if not isinstance(indices, Tensor):
        raise wrong_type(f"{name}_indices", indices, "a tensor of integers", "pass counts and numbers of blocks")
    for argument, given in ((f"{name}_num_blocks", counts), (f"{name}_indices", indices)):
        if given.dtype not in (torch.int32, torch.int64, torch.int16, torch.int8):
            raise InvalidProblem(argument, given.dtype, "int32 or int64", "convert it: .to(torch.int32)")
    if not 1 <= counts.dim() <= 3 or indices.shape[:-1] != counts.shape:
        got = f"shape {list(indices.shape)} for {name}_num_blocks of shape {list(counts.shape)}"
        raise InvalidProblem(f"{name}_indices", got, "[B, H_q, M, K] for [B, H_q, M]", "list blocks for each count")
    if counts.device != indices.device:
        raise InvalidProblem(f"{name}_indices", indices.device, str(counts.device), "move both to one device")
    if blocks is not None and (type(blocks) is not int or blocks < 1):
        raise InvalidProblem("num_kv_blocks", blocks, "an integer from 1 on", "pass ceil(S_k / block size)")
    has_data = counts.device.type == "cpu" and not torch.compiler.is_compiling() and not isinstance(counts, FakeTensor)
    has_data = has_data and not is_functorch_wrapped_tensor(counts) and not is_functorch_wrapped_tensor(indices)
    counts, indices = counts.long(), indices.long()  # int8 could not be compared with the numbers of blocks
    if has_data:
        _check_numbers(name, counts, indices, indices.shape[-1] if blocks is None else blocks)
    ones = (1,) * (3 - counts.dim())
    return counts.reshape(*ones, *counts.shape), indices.reshape(*ones, *indices.shape)


def _check_numbers(name: str, counts: Tensor, indices: Tensor, blocks: int) -> None:
    if ((counts < 0) | (counts > indices.shape[-1])).any():
        got, expected = f"{int(counts.min())} to {int(counts.max())}", f"0 to {indices.shape[-1]}, the listed numbers"
        raise InvalidProblem(f"{name}_num_blocks", got, expected, "count the blocks of each row")
    listed = indices[torch.arange(indices.shape[-1]) < counts[..., None]]
    if ((listed < 0) | (listed >= blocks)).any():
        got, expected = f"{int(listed.min())} to {int(listed.max())}", f"0 to {blocks - 1}, the blocks of keys"
        raise InvalidProblem(f"{name}_indices", got, expected, "pass num_kv_blocks= if the keys have more blocks")


def _broadcast(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """One list for as many entries and heads as both lists have."""
    sizes = list(zip(one[0].shape[:2], other[0].shape[:2]))
    if any(1 not in pair and pair[0] != pair[1] for pair in sizes):
        got = f"batch entries and heads {list(one[0].shape[:2])} and {list(other[0].shape[:2])}"
        raise InvalidProblem("full_kv_num_blocks", got, "equal numbers, or 1", "give both lists the same heads")
    lead = [max(pair) for pair in sizes]
    return one[0].expand(*lead, -1), one[1].expand(*lead, -1, -1)
