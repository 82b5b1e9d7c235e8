"""torch's own CPU flash kernel, for the pieces that mean the same to it: on plain and causal ones it is hard to
beat."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor

from ...problem.call import Call
from ...problem.problem import Problem
from ...problem.torch_private import KERNELS_CALLABLE, torch_kernel
from ..protocol import Backward, Forward
from .pieces import Piece, part

# Below a vector of keys torch takes a maximum that drops NaN, and a row of NaN comes out as one that sees nothing. A
# vector holds 16 float32 where torch's kernels are AVX-512's, 8 where they are AVX2's, and no more than 64 anywhere.
VECTOR = 16 if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") else 64
LISTED = 64  # elements that are looked at as a list sooner than by an op and its result's way back
BAND_ROWS = 256


# torch's kernels themselves: strobe.integrations.sdpa overrides the ops in the dispatcher, so the ops would call strobe
TORCH = torch_kernel("_scaled_dot_product_flash_attention_for_cpu", "CPU")
TORCH_BACKWARD = torch_kernel("_scaled_dot_product_flash_attention_for_cpu_backward", "CPU")


def why_not(problem: Problem) -> str | None:
    """What in a problem torch's kernel cannot say, whatever its pieces look like."""
    if not KERNELS_CALLABLE:
        return "this torch's kernel cannot be called beneath its op"
    if problem.head_dim != problem.head_dim_v:
        return "D_v is not D"
    if problem.softcap:
        return "softcap"
    if problem.batch_invariant:
        return "its split of the rows follows their number"
    if problem.scale == 0 or (
        problem.scale < 0 and (problem.mask.right or problem.mask.prefix)
    ):  # a short prefix leaves causal pieces
        return "scale 0, or under it where causal: it multiplies the -inf that hides keys"
    return None


class Shape(Enum):
    """How a piece looks to torch's kernel."""

    WHOLE = 1
    CAUSAL = 2  # as many rows as keys
    BAND = 3


def shape_of(piece: Piece, dtype: torch.dtype) -> Shape | None:
    """The shape in which torch's kernel takes a piece, or None for tiles.

    Bands in blocks of rows under a mask, for 16 bits only. There torch multiplies 16-bit matrices into 32-bit sums,
    which none of its public ops does, so tiles would pay for 32-bit products.
    """
    if _sees_all(piece):
        return Shape.WHOLE
    if _is_square_causal(piece):
        return Shape.CAUSAL
    return Shape.BAND if dtype.itemsize == 2 and piece.n_keys >= VECTOR else None


def parts(piece: Piece) -> list[Piece]:
    """A band in blocks of rows, each with the keys that any of its rows sees and with at least a vector of them."""
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
    """out and lse of a piece's key heads; rows where torch's kernel may have lost NaN, or made one, are what `tile`
    writes there.

    torch hides a band's keys by adding -inf to their scores, and a hidden score that has overflowed to inf then is NaN.
    """
    heads_q = slice(heads.start * problem.group, heads.stop * problem.group)
    rows, keys = (piece.entries, piece.rows, heads_q), (piece.entries, piece.keys, heads)
    q, k, v = (_turned(t[at]) for t, at in zip(call[:3], (rows, keys, keys)))
    doubtful = None
    if shape is Shape.BAND:
        out, lse = TORCH(q, k, v, 0.0, False, attn_mask=_hidden(piece), scale=problem.scale)
        if lse.isnan().any():
            doubtful = lse.isnan()
    else:
        out, lse = TORCH(q, k, v, 0.0, shape is Shape.CAUSAL, scale=problem.scale)
    if shape is not Shape.BAND and piece.n_keys < VECTOR and lost_nan(lse):
        doubtful = lse == 0
    out = out.transpose(1, 2).to(tensors.out.dtype)
    if doubtful is not None:
        tile()
        out = torch.where(doubtful.transpose(1, 2)[..., None], tensors.out[rows], out)
        lse = torch.where(doubtful, tensors.lse[piece.entries, heads_q, piece.rows], lse)
    tensors.out[rows] = out
    tensors.lse[piece.entries, heads_q, piece.rows] = lse


def _hidden(piece: Piece) -> Tensor:
    """-inf where a row does not see a key, as torch's kernel adds it: [rows, keys]."""
    key = torch.arange(piece.n_keys)
    hidden = (key < piece.first[:, None]) | (key >= piece.stop[:, None])
    return torch.zeros(hidden.shape, dtype=torch.float32).masked_fill_(hidden, -torch.inf)


def _turned(tensor: Tensor) -> Tensor:
    """[B, S, H, D] as torch's kernels take it. What they allocate is laid out by its strides, of which no other must be
    as short as that of D, as in overlapping windows of one row (torch.Tensor.unfold): it would come to stand innermost
    in its place, where nobody looks for it.
    """
    tied = any(stride == 1 and size > 1 for size, stride in zip(tensor.shape[:-1], tensor.stride()))
    return (tensor.contiguous() if tied else tensor).transpose(1, 2)


def lost_nan(lse: Tensor) -> bool:
    """Whether a row of NaN over less than a vector of keys may have come out as one that sees nothing, whose lse torch
    gives as 0; in others lse is hardly ever 0.
    """
    if lse.numel() > LISTED:
        return not lse.all()
    for heads in lse.tolist():
        for row in heads:
            if 0.0 in row:
                return True
    return False


def takes_backward(piece: Piece) -> bool:
    """Full and causal pieces; a band's blocks share keys, so that their dk and dv would have to be added up outside."""
    return piece.n_keys >= VECTOR and (_sees_all(piece) or _is_square_causal(piece))


def backward(piece: Piece, heads: slice, call: Call, tensors: Backward, problem: Problem) -> None:
    """dq, dk and dv of a piece's key heads; with sinks too, as lse holds them.

    In float32 for 16-bit inputs: of those, torch would add each block's share of dk and dv to a 16-bit sum, and of the
    key heads that query heads share too (errors up to 1.5 times what the contract allows at S = 700, bfloat16).
    """
    heads_q = slice(heads.start * problem.group, heads.stop * problem.group)
    rows, keys = (piece.entries, piece.rows, heads_q), (piece.entries, piece.keys, heads)
    q, k, v = (_turned(t[at]) for t, at in zip(call[:3], (rows, keys, keys)))
    dout, out = (_turned(t[rows]) for t in (tensors.dout, tensors.out))
    lse = tensors.lse[piece.entries, heads_q, piece.rows]
    dout, q, k, v, out = (t.to(lse.dtype) for t in (dout, q, k, v, out))
    grads = TORCH_BACKWARD(dout, q, k, v, out, lse, 0.0, not _sees_all(piece), scale=problem.scale)
    for target, at, grad in zip((tensors.dq, tensors.dk, tensors.dv), (rows, keys, keys), grads):
        target[at] = grad.transpose(1, 2).to(target.dtype)


def _sees_all(piece: Piece) -> bool:
    return int(piece.first[-1]) == 0 and int(piece.stop[0]) == piece.n_keys


def _is_square_causal(piece: Piece) -> bool:
    """Row i sees keys 0 to i: torch aligns causal rows at the top left."""
    if int(piece.first[-1]) != 0 or int(piece.stop[0]) != 1:
        return False
    return torch.equal(piece.stop, torch.arange(1, piece.n_keys + 1))  # as many rows as keys, too
