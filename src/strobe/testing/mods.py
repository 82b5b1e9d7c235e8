"""Named custom scores and masks, after those of attention-gym, and dense attention in float64 that runs the functions.

The oracle calls the Python function itself on broadcast positions, so it shares nothing with traces and programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..problem.mask import Mask

Score = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Seen = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Functions(NamedTuple):
    """What a case gives to attention. leaves: captured tensors that get gradients."""

    score: Score | None = None
    mask: Seen | None = None
    leaves: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class ModCase:
    """A named pair of functions. `make` builds them for a dtype, for S_q = S_k = 64, 2 batch entries and 4 heads."""

    name: str
    make: Callable[[torch.dtype], Functions]
    seqlen: int = 64


def dense(
    q: Tensor, k: Tensor, v: Tensor, functions: Functions, scale: float | None = None, builtin: Mask | None = None
) -> tuple[Tensor, Tensor]:
    """out [B, S_q, H_q, D_v] and lse [B, H_q, S_q] in float64, differentiable by autograd. O(S_q * S_k) memory."""
    group = q.shape[2] // k.shape[2]
    wide_q, wide_k, wide_v = (t.double().transpose(1, 2) for t in (q, k, v))
    wide_k, wide_v = (t.repeat_interleave(group, 1) for t in (wide_k, wide_v))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # in which a position times a Python float is
    try:
        return _dense((wide_q, wide_k, wide_v), functions, scale, builtin)
    finally:
        torch.set_default_dtype(before)


def _dense(
    wide: tuple[Tensor, Tensor, Tensor], functions: Functions, scale: float | None, builtin: Mask | None
) -> tuple[Tensor, Tensor]:
    wide_q, wide_k, wide_v = wide
    batch, heads, rows, width = wide_q.shape
    keys = wide_k.shape[2]
    s = (wide_q @ wide_k.mT) * (width**-0.5 if scale is None else scale)
    b, h = torch.arange(batch)[:, None, None, None], torch.arange(heads)[:, None, None]
    i, j = torch.arange(rows)[:, None], torch.arange(keys)
    if functions.score is not None:
        s = functions.score(s, b, h, i, j)
    seen = torch.ones_like(s, dtype=torch.bool)
    if functions.mask is not None:
        seen = seen & functions.mask(b, h, i, j)
    if builtin is not None:
        seen = seen & builtin.dense(rows, keys)[:, None]
    seen = seen & (s != -torch.inf)
    s = torch.where(seen, s, -torch.inf)
    some = seen.any(-1, keepdim=True)
    p = torch.where(some, torch.softmax(torch.where(some, s, 0.0), -1), 0.0)
    lse = torch.where(some[..., 0], torch.logsumexp(torch.where(some, s, 0.0), -1), -torch.inf)
    return (p @ wide_v).transpose(1, 2), lse


def _drawn(*shape: int, dtype: torch.dtype, seed: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


# ---------------------------------------------------------------- masks


def _causal(b, h, q, k):
    return q >= k


def _mask(function: Seen) -> Callable[[torch.dtype], Functions]:
    return lambda dtype: Functions(mask=function)


def _prefix_lm(length: int) -> Seen:
    return lambda b, h, q, k: (k < length) | _causal(b, h, q, k)


def _documents(inner: Seen, offsets: list[int]) -> Seen:
    """A mask function: a row sees keys of its own document alone. `inner` gets positions in the document."""
    starts = torch.tensor(offsets[:-1], dtype=torch.int32)
    ids = torch.repeat_interleave(torch.arange(len(starts)), torch.tensor(offsets).diff())

    def mask(b, h, q, k):
        return (ids[q] == ids[k]) & inner(b, h, q - starts[ids[q]], k - starts[ids[k]])

    return mask


def _dilated(width: int, dilation: int) -> Seen:
    return lambda b, h, q, k: ((q - k).abs() <= width) & ((q - k) % dilation == 0)


def _global_and_window(first: int, width: int) -> Seen:
    return lambda b, h, q, k: (k < first) | (q < first) | ((q - k).abs() <= width)


def _natten(width: int, kernel: int) -> Seen:
    """Neighbourhoods of kernel x kernel in an image of `width` columns; windows stay inside the image."""

    def mask(b, h, q, k):
        q_x, q_y, k_x, k_y = q % width, q // width, k % width, k // width
        c_x, c_y = (one.clamp(kernel // 2, width - 1 - kernel // 2) for one in (q_x, q_y))
        return ((c_x - k_x).abs() <= kernel // 2) & ((c_y - k_y).abs() <= kernel // 2)

    return mask


def _tiled_natten(width: int, kernel: int, tile: int) -> Seen:
    inner, n = _natten(width, kernel), width // tile

    def rowwise(at):
        number, inside = at // (tile * tile), at % (tile * tile)
        x = (number % n) * tile + inside % tile
        y = (number // n) * tile + inside // tile
        return y * width + x

    return lambda b, h, q, k: inner(b, h, rowwise(q), rowwise(k))


def _morton_natten(width: int, kernel: int) -> Seen:
    inner = _natten(width, kernel)

    def rowwise(at):
        x = (at & 1) | ((at >> 1) & 2) | ((at >> 2) & 4)
        y = ((at >> 1) & 1) | ((at >> 2) & 2) | ((at >> 3) & 4)
        return y * width + x

    return lambda b, h, q, k: inner(b, h, rowwise(q), rowwise(k))


def _sliding_tile(sizes: tuple[int, ...], tile: tuple[int, ...], window: tuple[int, ...]) -> Seen:
    """Sliding tile attention: positions are ordered tile by tile, and a window counts whole tiles."""
    per_tile = math.prod(tile)
    tiles = [size // one for size, one in zip(sizes, tile)]

    def coordinates(at):
        number, found = at // per_tile, []
        for count in reversed(tiles):
            found.append(number % count)
            number = number // count
        return found[::-1]

    def mask(b, h, q, k):
        seen = (q - q) == 0
        for a, c, count, reach in zip(coordinates(q), coordinates(k), tiles, window):
            center = a.clamp(reach // 2, count - 1 - reach // 2)
            seen = seen & ((center - c).abs() <= reach // 2)
        return seen

    return mask


def _video(kind: str, frame: int) -> Seen:
    """Sparse-VideoGen: a head attends to nearby frames (spatial) or to the same place of all frames (temporal)."""
    if kind == "spatial":
        return lambda b, h, q, k: ((q // frame) - (k // frame)).abs() <= 1
    return lambda b, h, q, k: ((q % frame) - (k % frame)).abs() <= 1


def _flamingo(image: list[int]) -> Seen:
    """Cross attention of text to the last image before it; 0 is no image."""
    last = torch.tensor(image, dtype=torch.int32)
    return lambda b, h, q, k: (last[q] == k // 8 + 1) & (last[q] > 0)


def _block_diffusion(block: int, half: int) -> Seen:
    """Block diffusion: noised tokens come first, then the clean ones."""

    def mask(b, h, q, k):
        clean_q, clean_k = q >= half, k >= half
        block_q, block_k = (torch.where(clean, at - half, at) // block for clean, at in ((clean_q, q), (clean_k, k)))
        diagonal = (block_q == block_k) & (clean_q == clean_k)
        offset = (block_q > block_k) & clean_k & ~clean_q
        return diagonal | offset | ((block_q >= block_k) & clean_k & clean_q)

    return mask


def _tree(seqlen: int) -> Seen:
    """A speculation tree: a token sees the committed prefix and its own ancestors, up to four of them."""
    parents = [max(-1, (n - 1) // 2) for n in range(seqlen)]
    ancestors = []
    for n in range(seqlen):
        path, at = [n], n
        while len(path) < 5:
            at = parents[at] if at >= 0 else -1
            path.append(at)
        ancestors.append(path)
    table = torch.tensor(ancestors, dtype=torch.int32)
    return lambda b, h, q, k: (k < 8) | (table[q] == k[..., None]).any(-1)


def _shared_prefix(prefix: int, each: int) -> Seen:
    return lambda b, h, q, k: (q >= k) & ((k < prefix) | ((q - prefix) // each == (k - prefix) // each))


def _variable_blocks() -> Seen:
    """Video sparse attention: a table says which cubes of keys a cube of queries attends to."""
    table = (torch.rand(4, 8, 8, generator=torch.Generator().manual_seed(3)) < 0.4) | torch.eye(8, dtype=torch.bool)
    return lambda b, h, q, k: table[h, q // 8, k // 8]


def _batchify(*masks: Seen) -> Seen:
    """Another mask for each batch entry."""

    def mask(b, h, q, k):
        seen = masks[0](b, h, q, k)
        for n, one in enumerate(masks[1:], 1):
            seen = torch.where(b == n, one(b, h, q, k), seen)
        return seen

    return mask


# ---------------------------------------------------------------- scores


def _alibi(dtype: torch.dtype) -> Functions:
    slopes = (2.0 ** -torch.arange(1, 5, dtype=torch.float64)).to(dtype).requires_grad_()
    return Functions(lambda s, b, h, q, k: s + slopes[h] * (k - q), _causal, (slopes,))


def _softcap(dtype: torch.dtype) -> Functions:
    return Functions(lambda s, b, h, q, k: 2.0 * torch.tanh(s / 2.0))


def _activation(dtype: torch.dtype) -> Functions:
    """Instead of a softmax, f(s) + N in the numerator: log(f(s) + N)."""
    return Functions(lambda s, b, h, q, k: torch.log(torch.nn.functional.gelu(s) + 2.0))


def _graphormer(edges: bool) -> Callable[[torch.dtype], Functions]:
    def make(dtype: torch.dtype) -> Functions:
        distance = torch.randint(0, 6, (2, 64, 64), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
        table = _drawn(4, 6, dtype=dtype)
        weights = _drawn(3, 4, dtype=dtype, seed=6)

        def score(s, b, h, q, k):
            s = s + table[h, distance[b, q, k]]
            return s + weights[distance[b, q, k] % 3, h] * 0.5 if edges else s

        return Functions(score, None, (table, weights) if edges else (table,))

    return make


def _sandwich(dtype: torch.dtype) -> Functions:
    def score(s, b, h, q, k):
        total = s
        for n in range(3):
            total = total + torch.cos((q - k) * (10.0 ** (-n / 3))) * (0.3 / (1 + h))
        return total

    return Functions(score)


def _mla_rope(dtype: torch.dtype) -> Functions:
    q_pe, k_pe = _drawn(2, 4, 64, 4, dtype=dtype), _drawn(2, 64, 4, dtype=dtype, seed=6)
    return Functions(lambda s, b, h, q, k: s + (q_pe[b, h, q] * k_pe[b, k]).sum(-1) * 0.5, _causal, (q_pe, k_pe))


def _learned(dtype: torch.dtype) -> Functions:
    """A learned temperature, a bias per row, and a bias per key."""
    scale = torch.tensor(0.7, dtype=dtype, requires_grad=True)
    rows, keys = _drawn(64, dtype=dtype), _drawn(2, 64, dtype=dtype, seed=6)
    return Functions(lambda s, b, h, q, k: s * scale + rows[q] * 0.5 + keys[b, k], None, (scale, rows, keys))


def _dense_bias(dtype: torch.dtype) -> Functions:
    table = _drawn(2, 4, 64, 64, dtype=dtype)
    return Functions(lambda s, b, h, q, k: s + table[b, h, q, k], None, (table,))


def _relative(dtype: torch.dtype) -> Functions:
    table = _drawn(4, 33, dtype=dtype)
    return Functions(lambda s, b, h, q, k: s + table[h, (q - k).clamp(-16, 16) + 16], None, (table,))


def _hidden_by_score(dtype: torch.dtype) -> Functions:
    """Rows 0 to 8 see no key."""
    return Functions(lambda s, b, h, q, k: torch.where(q - k > 8, s, -float("inf")))


MODS = {
    case.name: case
    for case in (
        ModCase("causal", _mask(_causal)),
        ModCase("sliding_window", _mask(lambda b, h, q, k: (q >= k) & (q - k <= 16))),
        ModCase("prefix_lm", _mask(_prefix_lm(20))),
        ModCase("documents", _mask(_documents(_causal, [0, 20, 45, 64]))),
        ModCase("dilated_window", _mask(_dilated(16, 3))),
        ModCase("global_and_window", _mask(_global_and_window(4, 6))),
        ModCase("natten", _mask(_natten(8, 3))),
        ModCase("tiled_natten", _mask(_tiled_natten(8, 3, 2))),
        ModCase("morton_natten", _mask(_morton_natten(8, 3))),
        ModCase("sliding_tile_2d", _mask(_sliding_tile((8, 8), (2, 2), (3, 1)))),
        ModCase("sliding_tile_3d", _mask(_sliding_tile((4, 4, 4), (2, 2, 2), (1, 1, 1)))),
        ModCase("video_spatial", _mask(_video("spatial", 16))),
        ModCase("video_temporal", _mask(_video("temporal", 16))),
        ModCase("video_sparse", _mask(_variable_blocks())),
        ModCase("flamingo", _mask(_flamingo([0] * 5 + [1] * 20 + [3] * 30 + [2] * 9))),
        ModCase("block_diffusion", _mask(_block_diffusion(8, 32))),
        ModCase("speculation_tree", _mask(_tree(64))),
        ModCase("shared_prefix", _mask(_shared_prefix(16, 12))),
        ModCase("batchify", _mask(_batchify(_causal, _dilated(9, 2)))),
        ModCase("by_head", _mask(lambda b, h, q, k: (q >= k) & ((h % 2 == 0) | (q - k < 9)))),
        ModCase("empty_rows", _mask(lambda b, h, q, k: (q > 40) & (q >= k))),
        ModCase("alibi", _alibi),
        ModCase("softcap", _softcap),
        ModCase("activation", _activation),
        ModCase("graphormer_spatial", _graphormer(False)),
        ModCase("graphormer_edges", _graphormer(True)),
        ModCase("sandwich", _sandwich),
        ModCase("mla_rope", _mla_rope),
        ModCase("learned", _learned),
        ModCase("relative", _relative),
        ModCase("dense_bias", _dense_bias),
        ModCase("hidden_by_score", _hidden_by_score),
    )
}
