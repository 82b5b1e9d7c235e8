"""The oracle of the tests: attention and its gradients in float64, with the equations of the papers. O(S_q * S_k)
memory.

Forward: softmax(scale * q k^T + mask) v. Backward: "FlashAttention-2" (arXiv 2307.08691), section 2.3.2, with P not
tiled: dv = P^T do, dp = do v^T, ds = P * (dp - delta), dq = scale * ds k, dk = scale * ds^T q, delta = rowsum(do * out)
- dlse.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .problem.decode import DecodeCall
from .problem.mask import NO_BOUND, documents
from .problem.merge import Partial
from .problem.paged import PagedCall
from .problem.problem import Call


class Gradients(NamedTuple):
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None


class _Rows(NamedTuple):
    """A call over dense tensors [B, H, S, D] in the oracle's dtype, with its mask as a bool tensor. k and v are
    repeated to q's heads.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    seen: Tensor  # bool [B or 1, 1, S_q, S_k]
    sinks: Tensor | None
    scale: float
    softcap: float


def forward(call: Call, dtype: torch.dtype = torch.float64) -> Partial:
    """Compute out and lse in `dtype`, with the layout of the call: dense [B, S, H, D] or packed [T, H, D].

    >>> q = torch.zeros(1, 2, 1, 4); v = torch.arange(8.0).view(1, 2, 1, 4)
    >>> forward(Call(q, q, v)).out[0, 0, 0].tolist()
    [2.0, 3.0, 4.0, 5.0]
    """
    if call.packed:
        return _each_sequence(call, dtype)
    rows = _rows(call, dtype)
    s, _ = _scores(rows)
    p, lse = _softmax(s, rows)
    return Partial(torch.einsum("bhij,bhjd->bihd", p, rows.v), lse)


def backward(call: Call, dout: Tensor, dlse: Tensor | None = None, dtype: torch.dtype = torch.float64) -> Gradients:
    """Compute the gradients of q, k, v and sinks from dout (shaped like out) and dlse (shaped like lse)."""
    if call.packed:
        return _each_sequence_backward(call, dout, dlse, dtype)
    rows = _rows(call, dtype)
    group = rows.q.shape[1] // max(1, call.k.shape[2])
    s, slope = _scores(rows)
    p, lse = _softmax(s, rows)
    do = dout.to(dtype).transpose(1, 2)
    out = torch.einsum("bhij,bhjd->bhid", p, rows.v)
    delta = (do * out).sum(-1)
    delta = delta if dlse is None else delta - dlse.to(dtype)
    dp = torch.einsum("bhid,bhjd->bhij", do, rows.v)
    # a masked key gets no gradient even if it holds NaN: `where`, because 0 * NaN is NaN
    ds = torch.where(rows.seen, p * (dp - delta[..., None]) * slope, 0.0)
    dq = rows.scale * torch.einsum("bhij,bhjd->bihd", ds, rows.k)
    dk = rows.scale * torch.einsum("bhij,bhid->bjhd", ds, rows.q)
    dv = torch.einsum("bhij,bhid->bjhd", p, do)
    dk, dv = (grad.unflatten(2, (-1, group)).sum(3) if group > 1 else grad for grad in (dk, dv))
    return Gradients(dq, dk, dv, _sinks_gradient(rows.sinks, lse, delta))


def sequence(call: DecodeCall, b: int) -> Call:
    """Sequence b of a decode as a dense call of batch 1 over the sequence's own keys, dequantized to float64.

    A key whose page id is outside the pool becomes zero and is masked by document id -1.
    """
    size = call.k.shape[1]
    room = size if call.page_table is None else size * call.page_table.shape[1]
    stop = min(max(int(call.seqlens[b]), 0), room)
    start = 0 if call.k_start is None else min(max(int(call.k_start[b]), 0), stop)
    if call.left != NO_BOUND:  # keys before the first row's window are unseen; their pages may be reused
        start = max(start, stop - call.q.shape[1] - call.left)
    position = torch.arange(start, stop, device=call.q.device)
    page = torch.full_like(position, b) if call.page_table is None else call.page_table[b].long()[position // size]
    present = (page >= 0) & (page < call.k.shape[0])
    held: list[Tensor] = []
    for pool, scale in ((call.k, call.k_scale), (call.v, call.v_scale)):
        rows = torch.zeros(len(position), *pool.shape[2:], dtype=torch.float64, device=pool.device)
        stored = pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool  # torch cannot index float8 tensors
        rows[present] = stored[page[present], position[present] % size].view(pool.dtype).double()
        if scale is not None and scale.dim() > 1:  # one for each key and head
            own = torch.zeros(len(position), pool.shape[2], dtype=torch.float64, device=pool.device)
            own[present] = scale[page[present], position[present] % size].double()
            scale = own
        held.append((rows if scale is None else rows * scale.double()[..., None])[None])
    one = Call(
        call.q[b : b + 1],
        held[0],
        held[1],
        left=call.left,
        right=call.right,
        scale=call.scale,
        softcap=call.softcap,
        partial=call.partial,
        sinks=call.sinks,
    )
    if present.all():
        return one
    ids = torch.where(present, 0, -1).to(torch.int32)[None]
    return one.with_mask(one.mask & documents(torch.zeros_like(call.q[b : b + 1, :, 0, 0], dtype=torch.int32), ids))


def decode(call: DecodeCall, dtype: torch.dtype = torch.float64) -> Partial:
    """Compute out and lse of a decode in `dtype`: each sequence is attention over its own keys.

    >>> k = torch.arange(8.0).view(1, 4, 1, 2)
    >>> call = DecodeCall(torch.zeros(1, 1, 1, 2), k, k, torch.tensor([3], dtype=torch.int32), right=0)
    >>> decode(call).out.flatten().tolist()
    [2.0, 3.0]
    """
    parts = [forward(sequence(call, b), dtype) for b in range(call.q.shape[0])]
    return Partial(torch.cat([part.out for part in parts]), torch.cat([part.lse for part in parts]))


def paged_sequences(call: PagedCall) -> Iterator[tuple[slice, Call]]:
    """Each sequence that has new tokens: its rows of q, and it as a dense call of batch 1 over its own keys."""
    offsets = call.cu_seqlens_q.tolist()
    for b, rows in enumerate(map(slice, offsets, offsets[1:])):
        if rows.start < rows.stop:
            q = call.q[None, rows]
            yield rows, sequence(call.as_decode(q.expand(len(offsets) - 1, *q.shape[1:])), b)


def paged(call: PagedCall, dtype: torch.dtype = torch.float64) -> Partial:
    """Compute out and lse of packed queries over a cache in `dtype`: each sequence is attention over its own keys.

    >>> k, offsets = torch.arange(8.0).view(1, 4, 1, 2), torch.tensor([0, 2], dtype=torch.int32)
    >>> call = PagedCall(torch.zeros(3, 1, 2), k, k, torch.tensor([3], dtype=torch.int32), offsets, right=0)
    >>> paged(call).out[:, 0].tolist()
    [[1.0, 2.0], [2.0, 3.0], [0.0, 0.0]]
    """
    total, heads = call.q.shape[:2]
    out = torch.zeros(total, heads, call.v.shape[-1], dtype=dtype, device=call.q.device)
    lse = torch.full((heads, total), -torch.inf, dtype=dtype, device=call.q.device)
    if call.sinks is not None:
        lse[:] = call.sinks.to(dtype)[:, None]
    for rows, one in paged_sequences(call):
        part = forward(one, dtype)
        out[rows], lse[:, rows] = part.out[0], part.lse[0]
    return Partial(out, lse)


def _rows(call: Call, dtype: torch.dtype) -> _Rows:
    q, k, v = (t.to(dtype).transpose(1, 2) for t in (call.q, call.k, call.v))
    group = q.shape[1] // max(1, k.shape[1])
    if group > 1:
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    seen = call.mask.dense(q.shape[2], k.shape[2], q.device)[:, None]
    scale = call.q.shape[-1] ** -0.5 if call.scale is None else call.scale
    sinks = None if call.sinks is None else call.sinks.to(dtype)
    return _Rows(q, k, v, seen, sinks, scale, call.softcap)


def _scores(rows: _Rows) -> tuple[Tensor, Tensor | float]:
    """Scores after softcap and mask, and the derivative of the softcap."""
    s = rows.scale * torch.einsum("bhid,bhjd->bhij", rows.q, rows.k)
    slope: Tensor | float = 1.0
    if rows.softcap:
        capped = torch.tanh(s / rows.softcap)
        s, slope = rows.softcap * capped, 1 - capped**2
    return torch.where(rows.seen, s, -torch.inf), slope


def _softmax(s: Tensor, rows: _Rows) -> tuple[Tensor, Tensor]:
    """p and lse. A row that sees no key has p 0 and lse -inf, or the sink. The mask decides which keys are seen, not a
    row maximum of -inf.
    """
    sinks = None if rows.sinks is None else rows.sinks[None, :, None]
    columns = (
        [s] if sinks is None else [s, sinks[..., None].clamp(max=torch.finfo(s.dtype).max).expand(*s.shape[:3], 1)]
    )
    logits = torch.cat(columns, -1)
    if logits.shape[-1] == 0:
        return s, s.new_full(s.shape[:3], -torch.inf)
    lse = torch.logsumexp(logits, -1)
    lse = (
        lse if sinks is None else torch.maximum(lse, sinks)
    )  # restores a sink of +inf, clamped above because inf - inf is NaN
    # not exp(s - lse): at |lse| = 200 the rounding of lse moves sum(p), and so delta, 100 ulp off
    p = torch.where(rows.seen, torch.softmax(logits, -1)[..., : s.shape[-1]], 0.0)
    return p, lse


def _sinks_gradient(sinks: Tensor | None, lse: Tensor, delta: Tensor) -> Tensor | None:
    if sinks is None:
        return None
    most = torch.finfo(lse.dtype).max
    weight = torch.where(lse == -torch.inf, 0.0, torch.exp(sinks[None, :, None].clamp(max=most) - lse.clamp(max=most)))
    return -(weight * delta).sum((0, 2))


def _sequences(call: Call):
    """Yield each sequence as (dense call of batch 1, slice of its query rows, slice of its keys)."""
    offsets_q, offsets_k = (
        offsets.tolist() for offsets in (call.cu_seqlens_q, call.cu_seqlens_k) if offsets is not None
    )
    for n in range(len(offsets_q) - 1):
        rows, keys = slice(offsets_q[n], offsets_q[n + 1]), slice(offsets_k[n], offsets_k[n + 1])
        one = call._replace(
            q=call.q[None, rows], k=call.k[None, keys], v=call.v[None, keys], cu_seqlens_q=None, cu_seqlens_k=None
        )
        yield one, rows, keys


def _each_sequence(call: Call, dtype: torch.dtype) -> Partial:
    total, heads = call.q.shape[:2]
    out = torch.zeros(total, heads, call.v.shape[-1], dtype=dtype, device=call.q.device)
    lse = torch.full((heads, total), -torch.inf, dtype=dtype, device=call.q.device)
    if call.sinks is not None:
        lse[:] = call.sinks.to(dtype)[:, None]
    for one, rows, _ in _sequences(call):
        part = forward(one, dtype)
        out[rows], lse[:, rows] = part.out[0], part.lse[0]
    return Partial(out, lse)


def _each_sequence_backward(call: Call, dout: Tensor, dlse: Tensor | None, dtype: torch.dtype) -> Gradients:
    dq, dk, dv = (torch.zeros(t.shape, dtype=dtype, device=t.device) for t in (call.q, call.k, call.v))
    dsinks = None if call.sinks is None else torch.zeros(call.sinks.shape, dtype=dtype, device=call.q.device)
    if dsinks is not None and dlse is not None:  # a row outside every sequence has lse = sink
        inside = torch.zeros(call.q.shape[0], dtype=torch.bool, device=call.q.device)
        for _, rows, _ in _sequences(call):
            inside[rows] = True
        dsinks += (dlse.to(dtype) * ~inside).sum(-1)
    for one, rows, keys in _sequences(call):
        part = backward(one, dout[None, rows], None if dlse is None else dlse[None, :, rows], dtype)
        dq[rows], dk[keys], dv[keys] = part.dq[0], part.dk[0], part.dv[0]
        if dsinks is not None and part.dsinks is not None:
            dsinks += part.dsinks
    return Gradients(dq, dk, dv, dsinks)
