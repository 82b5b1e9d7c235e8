"""Lists of the blocks that a call's mask_mod shows, made on the device and kept while the mask stays the same.

    mask_mod, built-in bounds -> kinds_kernel -> kinds [B or 1, H or 1, M, N] of blocks of 64 x 64
                                                   |
        forward   blocks of keys for each block of queries        -> BlockLists
        backward  blocks of queries for each block of keys        -> QueryBlockLists

The mask itself is never in memory: 16k x 16k has 64 KB of kinds. Lists are kept by the text of the function and by the
storage, the view and the version of each tensor that it captures. So a tensor that changes in place has new lists.

Packed sequences have lists of their own, of as many blocks as the longest sequence may have.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ...errors import KernelFault
from ...mods.derived import DerivedTensors, identity_of
from ...mods.program import Program
from ...problem import torch_private
from ...problem.call import NO_BOUND, Call
from ...problem.problem import Dense, Packed, Problem
from ..runtime.compile_cache import hash_callees_first
from ..runtime.hook_constants import function_key
from ..runtime.launch_cache import Replay
from ..runtime.mod_function import mod_aux, mod_functions
from ..runtime.tma_requirements import has_spans

BLOCK = 64  # queries and keys of a block whose kind is found
FEWEST_ELEMENTS = 1 << 21  # of a mask, from which lists pay: below, making them takes longer than what they skip
MOST_BLOCKS = 1 << 24  # of all entries and heads: 16 MB of kinds, and 128 MB of lists
MOST_BYTES = 1 << 28  # of lists that are kept


class ListSizes(NamedTuple):
    """How many lists a call has: one for all entries or heads unless mask_mod reads their number."""

    batch: int
    heads: int


def sizes_of(problem: Problem) -> ListSizes | None:
    """The lists of a problem; None where kernels visit every block of the built-in mask."""
    lengths = _lengths(problem)
    if problem.mods is None or not problem.mods.mask or lengths is None or has_spans(problem.mask):
        return None
    batch, seqlen_q, seqlen_k = lengths
    program = Program.parse(problem.mods.mask)
    batch = batch if problem.packed or program.reads("b") else 1
    heads = problem.heads_q if program.reads("h") else 1
    blocks = batch * heads * -(-seqlen_q // BLOCK) * -(-seqlen_k // BLOCK)
    if seqlen_q * seqlen_k < FEWEST_ELEMENTS or blocks > MOST_BLOCKS:
        return None
    return ListSizes(batch, heads)


def _lengths(problem: Problem) -> tuple[int, int, int] | None:
    """Entries or sequences, and the most queries and keys of one; None for packed sequences without a bound."""
    layout = problem.layout
    if isinstance(layout, Dense):
        return layout.batch, layout.seqlen_q, layout.seqlen_k
    if isinstance(layout, Packed) and layout.max_seqlen_q is not None and layout.max_seqlen_k is not None:
        return layout.batch, layout.max_seqlen_q, layout.max_seqlen_k
    return None


def _sources(call: Call) -> tuple[Tensor, ...]:
    """The tensors from whose contents lists are computed."""
    captured = () if call.mods is None else call.mods.mask_tensors
    return (*captured, *(offsets for offsets in (call.cu_seqlens_q, call.cu_seqlens_k) if offsets is not None))


def forward_lists(problem: Problem, call: Call, size: tuple[int, int]) -> tuple[Tensor, ...]:
    """kv_num_blocks, kv_indices and the same of full blocks, for blocks of `size` queries and keys."""
    return _kept(problem, call, ("forward", size), lambda kinds: listed(pooled(kinds, size)))


def backward_lists(problem: Problem, call: Call, size: tuple[int, int]) -> tuple[Tensor, ...]:
    """q_num_blocks, q_indices and the same of full blocks, for blocks of `size` queries and keys."""
    return _kept(problem, call, ("backward", size), lambda kinds: listed(pooled(kinds, size).mT))


def shown_lists(problem: Problem, call: Call, size: tuple[int, int], of_keys: bool = False) -> tuple[Tensor, ...]:
    """kv_num_blocks and kv_indices of the blocks that are not empty, for blocks of `size` queries and keys. of_keys:
    q_num_blocks and q_indices.
    """

    def made(kinds: Tensor) -> tuple[Tensor, ...]:
        shown = (pooled(kinds, size) > 0).to(torch.int8)
        return listed(shown.mT if of_keys else shown)[:2]

    return _kept(problem, call, ("shown to keys" if of_keys else "shown", size), made)


def pooled(kinds: Tensor, size: tuple[int, int]) -> Tensor:
    """Kinds of larger blocks. What sticks out counts for none.

    >>> pooled(torch.tensor([[2, 2, 0], [2, 1, 2]]), (128, 64)).tolist()
    [[2, 1, 1]]
    """
    steps = [side // BLOCK for side in size]
    if steps == [1, 1]:
        return kinds
    pad = (0, -kinds.shape[-1] % steps[1], 0, -kinds.shape[-2] % steps[0])
    some, every = (
        torch.nn.functional.pad(flags, pad, value=outside).unflatten(-1, (-1, steps[1])).unflatten(-3, (-1, steps[0]))
        for flags, outside in ((kinds > 0, False), (kinds == 2, True))
    )
    return some.any(-1).any(-2).to(torch.int8) + every.all(-1).all(-2).to(torch.int8)


def listed(kinds: Tensor) -> tuple[Tensor, ...]:
    """Counts and numbers of each row's partial blocks, then of its full ones, int32. Numbers after a count are of
    other blocks.

    >>> [part.tolist() for part in listed(torch.tensor([[0, 1, 2, 1]]))]
    [[2], [[1, 3, 0, 2]], [1], [[2, 0, 1, 3]]]
    """
    found: list[Tensor] = []
    for kind in (1, 2):
        chosen = kinds == kind
        order = chosen.to(torch.int8).sort(dim=-1, descending=True, stable=True).indices
        found += [chosen.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()]
    return tuple(found)


# ---------------------------------------------------------------- kinds, and what is kept

KEPT = DerivedTensors(MOST_BYTES)


def _kept(
    problem: Problem, call: Call, what: tuple, made: Callable[[Tensor], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    key = _key(problem, call)
    if key is None:
        return made(_kinds(problem, call))
    sources = _sources(call)

    def lists() -> tuple[Tensor, ...]:
        return made(KEPT.get((*key, "kinds"), sources, lambda: (_kinds(problem, call),))[0])

    return KEPT.get((*key, *what), sources, lists)


def _key(problem: Problem, call: Call) -> tuple | None:
    """The key of a call's lists. None if lists cannot be kept and each call computes its own."""
    mods = call.mods
    identity = None if mods is None else identity_of(_sources(call), call.q.device)
    if mods is None or identity is None:
        return None
    return mods.texts.mask, *identity, mods.mask_numbers, problem.layout, problem.heads_q, call.left, call.right


def while_kept(launch: Replay | None, call: Call, lists: Sequence[Tensor | None]) -> Replay | None:
    """A replay of a recorded launch that reads lists. It refuses if the lists are no longer kept, if a storage of the
    mask's tensors is gone, or on another stream. None, so that nothing is replayed, while a graph is captured, and
    for packed calls: a launch's addresses have the versions of the mask's tensors, but not those of cu_seqlens.
    """
    if launch is None or call.mods is None or call.packed or (call.q.is_cuda and torch_private.cuda_is_capturing()):
        return None
    kept = [weakref.ref(one) for one in lists if one is not None]
    storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in call.mods.mask_tensors]
    device = call.q.get_device()
    stream = torch_private.cuda_current_raw_stream(device) if call.q.is_cuda else 0

    def replay() -> bool:
        if any([one() is None for one in kept]) or any([storage.expired() for storage in storages]):
            return False
        if device >= 0:
            if torch_private.cuda_is_capturing() or torch_private.cuda_current_raw_stream(device) != stream:
                return False
        return launch()

    return replay


def _kinds(problem: Problem, call: Call) -> Tensor:
    """int8 [B or 1, H or 1, M, N]: 0 for an empty block, 1 for a partial one, 2 for a full one."""
    from .block_kinds import KindsOffsets, KindsShape, KindsWindow, kinds_kernel

    kernel: Any = kinds_kernel
    sizes, lengths = sizes_of(problem), _lengths(problem)
    if sizes is None or problem.mods is None or lengths is None:
        raise KernelFault(f"block lists of a problem that has none: {problem}")
    blocks = -(-lengths[1] // BLOCK), -(-lengths[2] // BLOCK)
    kinds = torch.empty((*sizes, *blocks), dtype=torch.int8, device=call.q.device)
    mask_mod: Any = mod_functions(problem.mods).mask_mod
    shape, window = KindsShape(*lengths[1:], sizes.heads, *blocks), KindsWindow(call.left, call.right)
    offsets = None
    if call.cu_seqlens_q is not None and call.cu_seqlens_k is not None:
        offsets = KindsOffsets(call.cu_seqlens_q, call.cu_seqlens_k, sizes.batch, call.q.shape[0], call.k.shape[0])
    bounds = call.left != NO_BOUND, call.right != NO_BOUND
    aux = mod_aux(problem, call)[1] or None
    hash_callees_first(kernel)
    if call.q.get_device() >= 0:  # a GPU's, not a simulated one; often the first kernel that a process compiles
        from ..runtime import first_call_overlap  # imports Triton

        first_call_overlap.beside(kernel, call.q.get_device())
    kernel[(kinds.numel(),)](kinds, aux, shape, window, offsets, mask_mod, function_key(mask_mod), *bounds, BLOCK)
    return kinds
