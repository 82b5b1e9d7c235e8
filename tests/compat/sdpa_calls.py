"""Calls of torch's attention, their judge, and what `enable` changes."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn import attention as registry

from strobe import reference
from strobe.compat import sdpa
from strobe.problem.call import Call
from strobe.testing.compare import assert_as_good_as, assert_gradients_as_good_as

OPS = torch.ops.aten


def _state() -> tuple:
    """All that enable() changes: the kernels of every op as the dispatcher lists them, the provider, the priority."""
    tables = [
        torch._C._dispatch_dump(f"aten::{name}") for names in sdpa.OPS.values() for name in names if hasattr(OPS, name)
    ]
    tables.append(torch._C._dispatch_dump(f"aten::{sdpa.WHOLE}"))
    return tables, registry.current_flash_attention_impl(), torch._C._get_sdp_priority_order()


@contextmanager
def counted():
    """What was served and passed within, by kernel and by reason."""
    served, passed = Counter(sdpa.served), Counter(sdpa.passed)
    found = SimpleNamespace(served={}, passed={})
    yield found
    found.served, found.passed = dict(Counter(sdpa.served) - served), dict(sdpa.passed - passed)


class Case(NamedTuple):
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    width: int
    causal: bool = False
    scale: float | None = None
    lies: str = "heads"


CASES = {
    "plain": Case(2, 3, 3, 37, 37, 16),
    "causal": Case(2, 3, 3, 37, 37, 16, True),
    "tiles": Case(1, 2, 2, 300, 300, 64, True, lies="rows"),
    "grouped": Case(2, 6, 2, 45, 45, 32, True, lies="rows"),
    "one key head": Case(1, 4, 1, 70, 129, 64, lies="slices"),
    "one query": Case(2, 4, 2, 1, 77, 64),
    "more keys": Case(1, 2, 2, 33, 90, 40),
    "more rows": Case(1, 2, 1, 90, 33, 24, lies="slices"),
    "shared keys": Case(3, 2, 2, 20, 31, 16, lies="expanded"),
    "scaled": Case(1, 2, 2, 17, 17, 8, True, 0.7),
    "negative scale": Case(1, 2, 2, 17, 19, 8, False, -0.4),
    "wide": Case(1, 1, 1, 65, 65, 256, True),
    "odd width": Case(1, 2, 2, 66, 66, 20, True),
    "single": Case(1, 1, 1, 1, 1, 8, True),
}


def _random(*shape, seed=0):
    seed += sum(size * 31**place for place, size in enumerate(shape))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _laid(seed, batch, heads, length, width, lies):
    """[B, H, S, D] of some strides and storage offset."""
    if lies == "heads":
        return _random(batch, heads, length, width, seed=seed)
    if lies == "rows":
        return _random(batch, length, heads, width, seed=seed).transpose(1, 2)
    if lies == "slices":  # as cut from a wider projection
        return _random(batch, length, heads + 2, width + 8, seed=seed)[:, :, 1:-1, 8:].transpose(1, 2)
    return _random(1, heads, length, width, seed=seed).expand(batch, -1, -1, -1)


def _qkv(case: Case, dtype=torch.float32, device="cpu", grad=True):
    q = _laid(1, case.batch, case.heads_q, case.seqlen_q, case.width, "heads" if case.lies == "expanded" else case.lies)
    k, v = (_laid(seed, case.batch, case.heads_kv, case.seqlen_k, case.width, case.lies) for seed in (2, 3))
    return [_like(t, dtype, device).requires_grad_(grad) for t in (q, k, v)]


def _like(tensor, dtype, device):
    """The same values and strides."""
    base = tensor if tensor._base is None else tensor._base
    return base.to(device, dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _sdpa(case: Case, q, k, v):
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=case.causal, scale=case.scale, enable_gqa=case.heads_q != case.heads_kv
    )


def _judge(case: Case, found, qkv, dout, lse=None):
    """By the house's judge, with causal aligned at the top left: keys beyond the last row are no part of the call."""
    out, dq, *dkv = (t.transpose(1, 2) for t in found)
    q, *kv = (t.detach().transpose(1, 2) for t in qkv)
    assert [t.dtype for t in found] == [q.dtype] * 4 and [t.shape for t in (dq, *dkv)] == [t.shape for t in (q, *kv)]
    rows, keys = q.shape[1], kv[0].shape[1]
    if case.causal:
        assert not any(t[:, rows:].any() for t in dkv)
        dkv, kv, keys = [t[:, :rows] for t in dkv], [t[:, :rows] for t in kv], min(rows, keys)
    call = Call(q, *kv, right=rows - keys if case.causal else -1, scale=case.scale, needs_grad=True)
    assert_as_good_as((out, reference.forward(call).lse if lse is None else lse), call)
    assert_gradients_as_good_as((dq, *dkv, None), call, dout.transpose(1, 2))


def _near(ours, native) -> None:
    """As two kernels of one precision agree: to a part of the largest element."""
    for one, other in zip(ours, native):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        part = (8 if one.dtype.itemsize == 2 else 64) * torch.finfo(one.dtype).eps
        assert (one - other).abs().max() <= part * other.abs().max()


def _own(found, count: int = 1) -> None:
    """One kernel of strobe ran each way, `count` times, and nothing went back to torch."""
    assert sorted(name.partition(".")[2] for name in found.served) == ["backward", "forward"] and not found.passed
    assert set(found.served.values()) == {count}


UNEVEN = [(5, 9), (0, 3), (70, 64), (1, 40), (33, 33)]


def _packed(lengths, heads_q, heads_kv, dtype, device, width=16):
    rows, keys = (sum(column) for column in zip(*lengths))
    shapes = (rows, heads_q, width), (keys, heads_kv, width), (keys, heads_kv + 1, width)
    q, k, v = (_random(*shape).to(device, dtype) for shape in shapes)
    offsets = [torch.tensor([0, *column], device=device).cumsum(0, dtype=torch.int32) for column in zip(*lengths)]
    longest = [max(column) for column in zip(*lengths)]
    return [t.requires_grad_() for t in (q, k, v[:, :heads_kv].detach())], (*offsets, *longest)


def _sequences(lengths, q, k, v, left, right):
    """Sequence by sequence at the inputs' precision, aligned at the bottom right; rows that see no key are 0."""
    outs, row, key = [], 0, 0
    for rows, keys in lengths:
        one_q, one_k, one_v = q[row : row + rows], k[key : key + keys], v[key : key + keys]
        one_k, one_v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (one_k, one_v))
        s = torch.einsum("ihd,jhd->hij", one_q, one_k) * q.shape[-1] ** -0.5
        beyond = torch.arange(keys, device=q.device) - torch.arange(rows, device=q.device)[:, None] - (keys - rows)
        hidden = (beyond > (right if right >= 0 else 10**6)) | (beyond < -(left if left >= 0 else 10**6))
        p = s.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0.0) if keys else s
        outs.append(torch.einsum("hij,jhd->ihd", p, one_v))
        row, key = row + rows, key + keys
    return torch.cat(outs)
