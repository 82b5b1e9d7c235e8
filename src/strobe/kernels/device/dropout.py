"""Dropout of weights in Triton kernels: counter-based random numbers, so that any tiling and direction draws the same.

Each weight has a word of 32 random bits, a function of the seed, the batch entry (the packed sequence), the query head
and the two positions. `mods.dropout` defines the words and computes the same ones on CPUs. The generator is
Philox2x32-10 (Salmon et al., SC 2011). Its key and an offset of its counters come from the seed, b and h, once a tile.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...mods.dropout import INCREMENT as _INCREMENT
from ...mods.dropout import MULTIPLIER as _MULTIPLIER
from ...mods.dropout import ROUNDS as _ROUNDS

INCREMENT = tl.constexpr(_INCREMENT)
MULTIPLIER = tl.constexpr(_MULTIPLIER)
ROUNDS = tl.constexpr(_ROUNDS)


class DropoutParams(NamedTuple):
    """What a launch passes."""

    seed: Any  # int64 [1] on the device
    p: Any  # the probability that a weight is dropped
    scale: Any  # 1 / (1 - p)
    offsets: Any = None  # int64 [4]: the seed, then what is added to the head, the query's and the key's position


class DropoutStream(NamedTuple):
    """The random words of one sequence and head."""

    column: Any  # added to the key's position
    row: Any  # added to the query's position
    key: Any
    least: Any  # words below it drop their weight
    scale: Any


@triton.jit
def philox(x, y, key):
    """Two uint32 words of Philox2x32-10 from the counter (x, y) and a key."""
    multiplier = tl.full([], MULTIPLIER, tl.uint32)
    increment = tl.full([], INCREMENT, tl.uint32)
    for _ in tl.static_range(ROUNDS):
        high = tl.umulhi(x, multiplier)
        low = x * multiplier
        x = high ^ key ^ y
        y = low
        key = key + increment
    return x, y


@triton.jit
def dropout_stream(params, b, h):
    """The DropoutStream of batch entry b and query head h, both int32 scalars."""
    seed = tl.load(params.seed)
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    if params.offsets is not None:
        h += tl.load(params.offsets + 1).to(tl.int32)
    x, y = philox(b.to(tl.uint32), h.to(tl.uint32), low)
    x, y = philox(x, y, high)
    key, _ = philox(y, x, high)
    if params.offsets is not None:
        x += tl.load(params.offsets + 3).to(tl.uint32)
        y += tl.load(params.offsets + 2).to(tl.uint32)
    least = (tl.full([], 4294967296.0, tl.float32) * params.p).to(tl.int64).to(tl.uint32)
    return DropoutStream(x, y, key, least, params.scale)


@triton.jit
def drop(tile, q_idx, kv_idx, stream):
    """A tile of weights, or of their gradients: 0 where the weight is dropped, else times 1 / (1 - p)."""
    word, _ = philox(kv_idx.to(tl.uint32) + stream.column, q_idx.to(tl.uint32) + stream.row, stream.key)
    return tl.where(word >= stream.least, tile * stream.scale, 0.0)
