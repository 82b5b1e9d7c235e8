"""FlashAttention's `seqused` (only the first rows of each sequence count) and windows with a negative bound.

FlashAttention's kernels take both as arguments. strobe's kernels take offsets, and windows that contain the diagonal.
So the used rows are copied into new packed tensors: one gather each for q, k and v, where that side is shortened.
Shapes do not depend on data, so nothing synchronises with the device, and one captured graph serves all lengths.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidProblem, wrong_type
from ..problem.call import FARTHEST
from ..problem.keywords import Window
from ..problem.torch_private import is_functorch_wrapped_tensor, may_trace
from .signatures import Setting, backward, forward


class Used(NamedTuple):
    """The used part of each sequence.

    seqused_q, seqused_k: the number of leading rows and keys, int32 [n], or None for all. without_q, without_k: how
    many of those to drop at the end.
    """

    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    without_q: int = 0
    without_k: int = 0

    @property
    def whole(self) -> bool:
        return self.seqused_q is None and self.seqused_k is None and not self.without_q and not self.without_k


ALL = Used()


def shifted(window: Window, causal: bool) -> tuple[Window, Used]:
    """Replace a window with one negative bound by a window that contains the diagonal, over fewer rows or keys.

    Dropping the last 3 keys moves the diagonal 3 keys earlier; dropping the last 2 rows moves it 2 keys later. Two
    negative bounds mean unbounded.

    >>> shifted((None, -3), False)
    ((None, 0), Used(seqused_q=None, seqused_k=None, without_q=0, without_k=3))
    >>> shifted((-2, 5), False)
    ((0, 3), Used(seqused_q=None, seqused_k=None, without_q=2, without_k=0))
    """
    if (
        not isinstance(window, (tuple, list))
        or len(window) != 2
        or any(bound is not None and type(bound) is not int for bound in window)
    ):
        return window, ALL  # the argument check of the call raises for it
    left, right = window
    if left is not None and right is not None and left < 0 and right < 0:
        return (None, None), ALL
    right = 0 if causal else right
    if right is not None and right < 0:
        used, left, right = Used(without_k=-right), None if left is None else left + right, 0
    elif left is not None and left < 0:
        used, left, right = Used(without_q=-left), 0, None if right is None else right + left
    else:
        return window, ALL
    if min(0 if bound is None else bound for bound in (left, right)) < 0:  # an empty window: no row sees a key
        return (None, None), Used(without_k=FARTHEST)
    return (left, right), used


def forward_used(q: Tensor, k: Tensor, v: Tensor, setting: Setting, used: Used) -> tuple[Tensor, Tensor]:
    """out and lse of `signatures.forward` over the used part of each sequence. Unused rows get out 0, and lse -inf or
    the head's sink.

    >>> q, offsets = torch.randn(12, 4, 16), torch.tensor([0, 5, 12], dtype=torch.int32)
    >>> setting = Setting(packing=(offsets, offsets, 7, 7))
    >>> out, lse = forward_used(q, q, q, setting, Used(torch.tensor([3, 7], dtype=torch.int32)))
    >>> torch.equal(out[5:], forward(q, q, q, setting)[0][5:]), out[3:5].any().item()
    (True, False)
    """
    if used.whole:
        return forward(q, k, v, setting)
    if setting.packing is None:
        return _dense(q, k, v, setting, used)
    rows, keys, setting = _shortened(q, k, v, setting, used)
    if keys is not None:
        k, v = keys.take(k), keys.take(v)
    if rows is None:
        return forward(q, k, v, setting)
    out, lse = forward(rows.take(q), k, v, setting)
    unseen = (
        lse.new_full((lse.shape[0], 1), -torch.inf) if setting.sinks is None else setting.sinks.to(lse.dtype)[:, None]
    )
    return torch.cat([out, out.new_zeros(1, *out.shape[1:])])[rows.place], torch.cat([lse, unseen], 1)[:, rows.place]


def backward_used(
    gradient: Tensor,
    forward_of: tuple[Tensor, Tensor],
    qkv: tuple[Tensor, Tensor, Tensor],
    setting: Setting,
    used: Used,
    dlse: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """dq, dk, dv and dsinks of `signatures.backward` over the used part of each packed sequence. Gradients of unused
    rows and keys are 0.
    """
    if used.whole:
        return backward(gradient, forward_of, qkv, setting, dlse)
    q, k, v = qkv
    rows, keys, setting = _shortened(q, k, v, setting, used)
    if keys is not None:
        k, v = keys.take(k), keys.take(v)
    if rows is not None:
        out, lse = forward_of
        q, gradient, forward_of = rows.take(q), rows.take(gradient), (rows.take(out), lse[:, rows.source])
        dlse = None if dlse is None else dlse[:, rows.source]
    dq, dk, dv, dsinks = backward(gradient, forward_of, (q, k, v), setting, dlse)
    whole = lambda part, of: part if of is None else torch.cat([part, part.new_zeros(1, *part.shape[1:])])[of.place]
    return whole(dq, rows), whole(dk, keys), whole(dv, keys), dsinks


# ---------------------------------------------------------------- padded tensors


def _dense(q: Tensor, k: Tensor, v: Tensor, setting: Setting, used: Used) -> tuple[Tensor, Tensor]:
    if any(not isinstance(t, Tensor) or t.dim() != 4 for t in (q, k, v)):
        return forward(q, k, v, setting)  # its argument check raises
    batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
    for name, given in (("k", k), ("v", v)):
        if len(given) != batch:
            got, remedy = f"batch {len(given)}", f"expand {name} to q's batch"
            raise InvalidProblem(name, got, f"q's batch {batch}", remedy)
    if v.shape[1] != seqlen_k:
        got, remedy = f"{v.shape[1]} keys", "give k and v the same length"
        raise InvalidProblem("v", got, f"k's {seqlen_k} keys", remedy)
    if used.seqused_q is not None or used.seqused_k is not None:
        offsets = [
            torch.arange(batch + 1, dtype=torch.int32, device=q.device) * length for length in (seqlen_q, seqlen_k)
        ]
        packed = setting._replace(packing=(*offsets, seqlen_q, seqlen_k))
        out, lse = forward_used(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), packed, used)
        return out.unflatten(0, (batch, seqlen_q)), lse.unflatten(1, (batch, seqlen_q)).transpose(0, 1)
    rows, keys = max(seqlen_q - used.without_q, 0), max(seqlen_k - used.without_k, 0)
    out, lse = forward(q[:, :rows], k[:, :keys], v[:, :keys], setting)
    if rows == seqlen_q:
        return out, lse
    shape = *lse.shape[:2], seqlen_q - rows
    unseen = (
        lse.new_full(shape, -torch.inf)
        if setting.sinks is None
        else setting.sinks.to(lse.dtype)[None, :, None].expand(shape)
    )
    return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, seqlen_q - rows)), torch.cat([lse, unseen], 2)


# ---------------------------------------------------------------- packed sequences


class _Kept(NamedTuple):
    """Maps between the rows of the original sequences and the rows kept of them."""

    cu_seqlens: Tensor  # int32 [n + 1]: offsets of the kept rows, from 0 and without gaps
    source: Tensor  # int64 [T]: kept row -> original row; arbitrary valid rows after the last kept one
    place: Tensor  # int64 [T]: original row -> kept row, or T if the row is dropped

    def take(self, tensor: Tensor) -> Tensor:
        return tensor.index_select(0, self.source)


def _kept(cu_seqlens: Tensor, lengths: Tensor, total: int) -> _Kept:
    """Keep the first `lengths` rows of each sequence.

    >>> [t.tolist() for t in _kept(torch.tensor([0, 3, 5]), torch.tensor([2, 1]), 6)]
    [[0, 2, 3], [0, 1, 3, 0, 0, 0], [0, 1, 6, 2, 6, 6]]
    """
    starts, ends, row = cu_seqlens[:-1].long(), cu_seqlens[1:].long(), torch.arange(total, device=cu_seqlens.device)
    lengths = torch.minimum(lengths.long().clamp(min=0), ends - starts)
    new_ends = lengths.cumsum(0)
    new_starts, last = new_ends - lengths, max(len(starts) - 1, 0)
    where = torch.searchsorted(new_ends, row, right=True)
    source = torch.where(
        where > last,
        0,
        (row - new_starts[where.clamp(max=last)] + starts[where.clamp(max=last)]).clamp(0, max(total - 1, 0)),
    )
    held = torch.searchsorted(ends, row, right=True)
    within = row - starts[held.clamp(max=last)]
    is_kept = (held <= last) & (within >= 0) & (within < lengths[held.clamp(max=last)])
    place = torch.where(is_kept, new_starts[held.clamp(max=last)] + within, total)
    return _Kept(torch.nn.functional.pad(new_ends, (1, 0)).to(torch.int32), source, place)


def _shortened(
    q: Tensor, k: Tensor, v: Tensor, setting: Setting, used: Used
) -> tuple[_Kept | None, _Kept | None, Setting]:
    """The rows kept of q and of k (None for all), and the setting with the offsets of the kept rows."""
    cu_seqlens_q, cu_seqlens_k, *longest = setting.packing or (None,) * 4
    for name, given in (("q", q), ("k", k), ("v", v)):
        if not isinstance(given, Tensor):
            raise wrong_type(name, given, "a tensor", "pass a torch.Tensor")
    if not isinstance(cu_seqlens_q, Tensor) or not isinstance(cu_seqlens_k, Tensor):
        name, given = (
            ("cu_seqlens_k", cu_seqlens_k) if isinstance(cu_seqlens_q, Tensor) else ("cu_seqlens_q", cu_seqlens_q)
        )
        raise wrong_type(name, given, "an int32 tensor [n + 1]", "give the running sum of lengths, from 0 to the total")
    rows = _side("q", q, cu_seqlens_q, used.seqused_q, used.without_q)
    keys = _side("k", k, cu_seqlens_k, used.seqused_k, used.without_k)
    if keys is not None and len(v) != len(k):
        raise InvalidProblem("v", f"{len(v)} rows", f"k's {len(k)}", "give a value for each key")
    offsets = cu_seqlens_q if rows is None else rows.cu_seqlens, cu_seqlens_k if keys is None else keys.cu_seqlens
    return rows, keys, setting._replace(packing=(*offsets, *longest))


def _side(side: str, tensor: Tensor, cu_seqlens: Tensor, seqused: Tensor | None, without: int) -> _Kept | None:
    if (seqused is None and not without) or cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        return None
    lengths = cu_seqlens.diff()
    if seqused is not None:
        _check(f"seqused_{side}", seqused, lengths)
        lengths = seqused
    return _kept(cu_seqlens, lengths - without, len(tensor))


def _check(name: str, seqused: object, lengths: Tensor) -> None:
    """Check dtype, shape and device. Check values only on a CPU, to avoid a device synchronisation; on a GPU `_kept`
    clamps them.
    """
    if not isinstance(seqused, Tensor):
        raise wrong_type(
            name, seqused, f"an int32 tensor [{len(lengths)}] or None", "give the rows used of each sequence"
        )
    if (
        seqused.dtype not in (torch.int32, torch.int64)
        or seqused.shape != lengths.shape
        or seqused.device != lengths.device
    ):
        got, expected = (
            f"{seqused.dtype} {list(seqused.shape)} on {seqused.device}",
            f"torch.int32 [{len(lengths)}] on {lengths.device}",
        )
        raise InvalidProblem(name, got, expected, "give one length for each sequence that the offsets hold")
    if is_readable(seqused):
        wrong = ((seqused < 0) | (seqused > lengths)).nonzero().flatten().tolist()
        if wrong:
            got, most = seqused[wrong[0]].item(), lengths[wrong[0]].item()
            raise InvalidProblem(
                name,
                f"{got} for sequence {wrong[0]}",
                f"0 to {most}, which its offsets hold",
                "count the rows that are used",
            )


def is_readable(tensor: Tensor) -> bool:
    """Whether the host can read the values: a plain CPU tensor, not compiling, and no dispatch mode or functorch
    transform active.
    """
    traced = torch.compiler.is_compiling() or may_trace() or is_functorch_wrapped_tensor(tensor)
    return not traced and tensor.device.type == "cpu" and type(tensor) is Tensor
