"""torch's CPU flash kernel, for pieces it can express. On plain and causal ones it is faster than tiles."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor

from ...problem.call import Call
from ...problem.problem import Problem
from ...problem.torch_private import KERNELS_CALLABLE, torch_kernel
from ..protocol import Backward, Forward, away_from_0
from .pieces import Piece, part

# With fewer keys than a vector, torch's maximum drops NaN, and a row of NaN looks like a row without keys. A vector
# holds 16 float32 with AVX-512, 8 with AVX2, and at most 64 on any CPU.
VECTOR = 16 if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") else 64
LISTED = 64  # up to this many elements, a list is faster to inspect than an op and its result
BAND_ROWS = 256


# torch's kernels themselves. strobe.integrations.sdpa overrides the ops, which would call strobe.
TORCH = torch_kernel("_scaled_dot_product_flash_attention_for_cpu", "CPU")
TORCH_BACKWARD = torch_kernel("_scaled_dot_product_flash_attention_for_cpu_backward", "CPU")


def why_not(problem: Problem) -> str | None:
    """Why torch's kernel cannot run any piece of the problem, or None."""
    if not KERNELS_CALLABLE:
        return "this torch's kernel cannot be called beneath its op"
    if problem.mods is not None:
        return "a custom score or mask"
    if problem.head_dim != problem.head_dim_v:
        return "D_v differs from D"
    if problem.softcap:
        return "softcap"
    if problem.batch_invariant:
        return "it splits rows by their number"
    causal = problem.mask.right or problem.mask.prefix  # a short prefix leaves causal pieces
    if problem.scale == 0 or (problem.scale < 0 and causal):
        return "scale 0, or below 0 with a causal mask: the scale multiplies the -inf of masked keys"
    return None


class Shape(Enum):
    """The form in which torch's kernel runs a piece."""

    WHOLE = 1
    CAUSAL = 2  # with as many rows as keys
    BAND = 3


def shape_of(piece: Piece, dtype: torch.dtype) -> Shape | None:
    """The shape in which torch's kernel runs a piece, or None for tiles.

    16-bit bands run as blocks of rows under a mask. torch multiplies 16-bit matrices into 32-bit sums there. No public
    op of torch does, so tiles would need 32-bit products.
    """
    if _sees_all(piece):
        return Shape.WHOLE
    if _is_square_causal(piece):
        return Shape.CAUSAL
    return Shape.BAND if dtype.itemsize == 2 and piece.n_keys >= VECTOR else None


def parts(piece: Piece) -> list[Piece]:
    """A band as blocks of rows, each with the keys that its rows see, at least a vector of them."""
    found = []
    for start in range(0, piece.n_rows, BAND_ROWS):
        rows = slice(start, min(start + BAND_ROWS, piece.n_rows))
        first, stop = piece.first[rows], piece.stop[rows]
        high = max(int(stop[-1]), VECTOR)
        low = min(int(first[0]), high - VECTOR)
        found.append(
            Piece(piece.entries, part(piece.rows, rows), part(piece.keys, slice(low, high)), first - low, stop - low)
        )
    return found


def forward(
    piece: Piece, shape: Shape, heads: slice, call: Call, tensors: Forward, problem: Problem, tile: Callable[[], None]
) -> None:
    """out and lse of a piece's key heads. `tile` recomputes rows in which torch's kernel may have lost or produced NaN.

    torch masks a band's keys by adding -inf to their scores. A masked score that has overflowed to inf then becomes
    NaN.
    """
    heads_q = slice(heads.start * problem.group, heads.stop * problem.group)
    rows, keys = (piece.entries, piece.rows, heads_q), (piece.entries, piece.keys, heads)
    q, k, v = (_turned(t[at]) for t, at in zip(call[:3], (rows, keys, keys)))
    scale = away_from_0(problem.scale, problem.dtype)
    if shape is Shape.BAND:
        out, lse = TORCH(q, k, v, 0.0, False, attn_mask=_hidden(piece), scale=scale)
    else:
        out, lse = TORCH(q, k, v, 0.0, shape is Shape.CAUSAL, scale=scale)
    doubtful = None
    if shape is Shape.BAND and lse.isnan().any():
        doubtful = lse.isnan()
    if lost_nan(lse):
        lost = (lse == 0) & (out == 0).all(-1)
        doubtful = lost if doubtful is None else doubtful | lost
    out = out.transpose(1, 2).to(tensors.out.dtype)
    if doubtful is not None and doubtful.any():
        tile()
        out = torch.where(doubtful.transpose(1, 2)[..., None], tensors.out[rows], out)
        lse = torch.where(doubtful, tensors.lse[piece.entries, heads_q, piece.rows], lse)
    tensors.out[rows] = out
    tensors.lse[piece.entries, heads_q, piece.rows] = lse


def _hidden(piece: Piece) -> Tensor:
    """The mask that torch's kernel adds, [rows, keys]: -inf where a row does not see a key."""
    key = torch.arange(piece.n_keys)
    hidden = (key < piece.first[:, None]) | (key >= piece.stop[:, None])
    return torch.zeros(hidden.shape, dtype=torch.float32).masked_fill_(hidden, -torch.inf)


def _turned(tensor: Tensor) -> Tensor:
    """[B, S, H, D] transposed for torch's kernels, with D as the dimension of smallest stride.

    torch allocates results in the order of the strides. In overlapping windows (torch.Tensor.unfold), another dimension
    may have a stride as short as D's and would become the innermost.
    """
    tied = any(stride == 1 and size > 1 for size, stride in zip(tensor.shape[:-1], tensor.stride()))
    return (tensor.contiguous() if tied else tensor).transpose(1, 2)


def lost_nan(lse: Tensor) -> bool:
    """Whether a row of NaN may look like a row without keys: with fewer keys than a vector, or if all of its scores are
    -inf. torch returns out 0 and lse 0 for it, and other rows rarely have lse 0.
    """
    if lse.numel() > LISTED:
        return not lse.all()
    for heads in lse.tolist():
        for row in heads:
            if 0.0 in row:
                return True
    return False


def takes_backward(piece: Piece) -> bool:
    """Whether torch's backward runs a piece: full and causal ones. Blocks of a band would need another sum of dk and
    dv.
    """
    return piece.n_keys >= VECTOR and (_sees_all(piece) or _is_square_causal(piece))


def backward(piece: Piece, heads: slice, call: Call, tensors: Backward, problem: Problem) -> None:
    """dq, dk and dv of a piece's key heads. Sinks are included through lse.

    16-bit inputs are converted to float32. torch would accumulate dk and dv over blocks and over query heads in 16
    bits, with errors up to 1.5 times the contract's limit (S = 700, bfloat16).
    """
    heads_q = slice(heads.start * problem.group, heads.stop * problem.group)
    rows, keys = (piece.entries, piece.rows, heads_q), (piece.entries, piece.keys, heads)
    q, k, v = (_turned(t[at]) for t, at in zip(call[:3], (rows, keys, keys)))
    dout, out = (_turned(t[rows]) for t in (tensors.dout, tensors.out))
    lse = tensors.lse[piece.entries, heads_q, piece.rows]
    dout, q, k, v, out = (t.to(lse.dtype) for t in (dout, q, k, v, out))
    scale = away_from_0(problem.scale, problem.dtype)
    grads = TORCH_BACKWARD(dout, q, k, v, out, lse, 0.0, not _sees_all(piece), scale=scale)
    for target, at, grad in zip((tensors.dq, tensors.dk, tensors.dv), (rows, keys, keys), grads):
        target[at] = grad.transpose(1, 2).to(target.dtype)


def _sees_all(piece: Piece) -> bool:
    return int(piece.first[-1]) == 0 and int(piece.stop[0]) == piece.n_keys


def _is_square_causal(piece: Piece) -> bool:
    """Whether row i sees keys 0 to i: torch aligns causal rows at the top left."""
    if int(piece.first[-1]) != 0 or int(piece.stop[0]) != 1:
        return False
    return torch.equal(piece.stop, torch.arange(1, piece.n_keys + 1))  # also checks that rows and keys are equally many
