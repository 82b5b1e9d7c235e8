"""Functions of a call on scores, in the portable kernels: score_mod and mask_mod, score_mod's gradient, and dropout.
Lists of the blocks that mask_mod shows.

    score_mod(score, b, h, q_idx, kv_idx, aux) -> score
    mask_mod(b, h, q_idx, kv_idx, aux) -> bool
    score_mod_bwd(dscore, score, b, h, q_idx, kv_idx, aux) -> gradient of the score before score_mod

What they mean is said in `device.forward_hooks`. h is a scalar, or [M, 1] in the decode. q_idx is [M, 1] and kv_idx
[1, N], or in the kernel of dK and dV, whose scores are transposed, [1, M] and [N, 1]. dscore is 0 where the query does
not see the key. Dropout needs nothing but positions, and is the same in every kernel.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device.dropout import drop


class ScoreMods(NamedTuple):
    """What the functions of one sequence and head get."""

    entry: Any  # batch entry, or index of the packed sequence
    head: Any  # query head
    hooks: Any  # arguments.HookParams
    dropout: Any = None  # dropout.DropoutStream


@triton.jit
def drop_weights(p, q_idx, kv_idx, mods, traits: tl.constexpr):
    """The hook for weights after the softmax's denominator, and for their gradient."""
    if traits.dropout:
        p = drop(p, q_idx, kv_idx, mods.dropout)
    return p


@triton.jit
def sequence_index(batch, shape, traits: tl.constexpr):
    """The batch entry; packed: `find_sequence` counts the rows before the first sequence as one, too."""
    if traits.packed:
        batch = tl.minimum(tl.maximum(batch - 1, 0), shape.batch - 1)
    return batch


@triton.jit
def list_of_tile(tile, sees_any, mods, traits: tl.constexpr):
    """(pointer to the numbers of the blocks that a tile visits, how many there are). tile: counted in the sequence.
    sees_any: whether the built-in mask shows the tile anything.
    """
    lists = mods.hooks.block_lists
    if traits.packed:  # a sequence longer than promised, whose results are NaN
        tile = tl.minimum(tile, lists.num_tiles - 1)
    at = mods.entry * lists.stride_batch + mods.head * lists.stride_head + tile
    count = tl.minimum(tl.maximum(tl.load(lists.num_blocks + at), 0), lists.most_blocks)
    return lists.indices + at.to(tl.int64) * lists.most_blocks, tl.where(sees_any, count, 0)


@triton.jit
def modify_scores(s, q_idx, kv_idx, mods, traits: tl.constexpr):
    """The hook for raw scores before the mask: with a score_mod they are natural units from here on."""
    if traits.score_mod is not None:
        hooks = mods.hooks
        modified = traits.score_mod(s * hooks.score_scale, mods.entry, mods.head, q_idx, kv_idx, hooks.score_aux)
        s = tl.broadcast_to(modified.to(s.dtype), s.shape)
    if traits.mask_mod is not None:
        s = tl.where(traits.mask_mod(mods.entry, mods.head, q_idx, kv_idx, mods.hooks.mask_aux), s, float("-inf"))
    return s


@triton.jit
def gradient_of_raw(ds, s, q_idx, kv_idx, mods, traits: tl.constexpr):
    """dS of raw scores s from dS of modified ones, both in natural units. Where dS is 0, it stays 0."""
    if traits.score_mod_bwd is not None:
        hooks = mods.hooks
        score = s * hooks.score_scale
        before = traits.score_mod_bwd(ds, score, mods.entry, mods.head, q_idx, kv_idx, hooks.gradient_aux)
        ds = tl.where(ds == 0, 0.0, tl.broadcast_to(before.to(ds.dtype), ds.shape))
    return ds
