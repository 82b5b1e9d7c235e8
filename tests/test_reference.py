"""The oracle itself, against two implementations that share nothing with it: torch's math attention and plain
autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from strobe import reference
from strobe.ops import attention as ops
from strobe.problem.call import Call
from strobe.testing import CASES, Case, inputs

DENSE = [name for name, case in CASES.items() if not case.packed]
PLAIN = [name for name in DENSE if not CASES[name].softcap and not CASES[name].sinks]
PACKED = [name for name, case in CASES.items() if case.packed]


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", PLAIN)
def test_forward_is_torchs_math_attention(name):
    call = CASES[name].build(dtype=torch.float64)
    q, k, v = (t.transpose(1, 2) for t in call[:3])
    seen = call.mask.dense(q.shape[2], k.shape[2])[:, None]
    with sdpa_kernel(SDPBackend.MATH):
        wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=call.scale, enable_gqa=True).transpose(
            1, 2
        )
    alive = seen.any(-1).transpose(1, 2)[..., None]
    out = reference.forward(call).out
    close(out, torch.where(alive, wanted, 0.0))
    assert out.masked_select(~alive).eq(0).all()


@pytest.mark.parametrize("name", [name for name in DENSE if name != "sinks_without_bound"])  # exp of 3e38 is no number
def test_gradients_are_autograds(name):
    """A formula of exp and sums, nothing subtracted, differentiated by torch: slow, plain and independent."""
    call = CASES[name].build(dtype=torch.float64, requires_grad=True)
    out, lse = by_the_formula(call)
    wanted = reference.forward(call)
    close(wanted.out, out)
    close(wanted.lse, lse)
    dout, dlse = inputs.upstream("normal", out, 1), inputs.upstream("normal", lse, 2)
    finite = lse > -torch.inf
    leaves = [t for t in (call.q, call.k, call.v, call.sinks) if t is not None]
    found = torch.autograd.grad(
        [out, lse[finite]], leaves, [dout, dlse[finite]], allow_unused=True, materialize_grads=True
    )
    for mine, theirs in zip(reference.backward(call, dout, dlse), found):
        close(mine, theirs.to(mine.dtype)) if theirs.dtype == mine.dtype else torch.testing.assert_close(
            mine.float(), theirs, rtol=1e-5, atol=1e-5
        )


def by_the_formula(call: Call):
    """exp(s) / (sum exp(s) + exp(sink)), head by head; scores are a few units, so nothing overflows."""
    outs, logs = [], []
    seen = call.mask.dense(call.q.shape[1], call.k.shape[1])
    group = call.q.shape[2] // max(1, call.k.shape[2])
    for h in range(call.q.shape[2]):
        q, k, v = call.q[:, :, h], call.k[:, :, h // group], call.v[:, :, h // group]
        s = q.matmul(k.mT) * (q.shape[-1] ** -0.5 if call.scale is None else call.scale)
        s = call.softcap * torch.tanh(s / call.softcap) if call.softcap else s
        weights = torch.where(seen, torch.exp(torch.where(seen, s, 0.0)), 0.0)
        total = weights.sum(-1) + (torch.exp(call.sinks[h].double()) if call.sinks is not None else 0.0)
        outs.append(weights.matmul(v) / torch.where(total > 0, total, 1.0)[..., None])
        logs.append(torch.where(total > 0, torch.log(torch.where(total > 0, total, 1.0)), -torch.inf))
    return torch.stack(outs, 2), torch.stack(logs, 1)


@pytest.mark.parametrize("name", PACKED)
def test_packed_is_each_sequence_alone(name):
    """Sequence by sequence through torch, tokens of no sequence 0."""
    call = CASES[name].build(dtype=torch.float64)
    if call.sinks is not None or call.softcap:
        call = call._replace(sinks=None, softcap=0.0)
    out = torch.zeros(*call.q.shape[:-1], call.v.shape[-1], dtype=torch.float64)
    for n in range(len(call.cu_seqlens_q) - 1):
        rows, keys = (slice(*offsets[n : n + 2].tolist()) for offsets in (call.cu_seqlens_q, call.cu_seqlens_k))
        q, k, v = (t[part].transpose(0, 1) for t, part in zip(call[:3], (rows, keys, keys)))
        seen = call.mask.dense(q.shape[1], k.shape[1])
        with sdpa_kernel(SDPBackend.MATH):
            one = F.scaled_dot_product_attention(
                q[None], k[None], v[None], attn_mask=seen[None], scale=call.scale, enable_gqa=True
            )[0]
        out[rows] = torch.where(seen[0].any(-1)[:, None, None], one.transpose(0, 1), 0.0)
    close(reference.forward(call).out, out)


GRADCHECKED = {
    "plain": Case("plain", 4, 5, batch=1, heads=(2, 1), head_dim=3),
    "causal_empty_rows": Case("causal_empty_rows", 5, 3, batch=1, heads=(2, 2), head_dim=2, mask=CASES["causal"].mask),
    "softcap_sinks": Case(
        "softcap_sinks", 4, 4, batch=1, heads=(2, 1), head_dim=2, softcap=2.0, sinks=True, mask=CASES["causal"].mask
    ),
    "packed": Case(
        "packed", lengths_q=(3, 0, 2), lengths_k=(2, 2, 3), heads=(2, 1), head_dim=2, mask=CASES["causal"].mask
    ),
    "partial": Case("partial", 3, 4, batch=1, heads=(1, 1), head_dim=2, partial=True),
}


@pytest.mark.parametrize("name", GRADCHECKED)
def test_gradcheck(name, device, kernel):
    """The op's own backward against finite differences in float64, lse's gradient included where every row has one."""
    call = GRADCHECKED[name].build(device, torch.float64, requires_grad=True, kernel=kernel)
    given = [name for name in ("q", "k", "v", "sinks") if getattr(call, name) is not None]
    tensors = [getattr(call, name).double().detach().requires_grad_() for name in given]

    def run(*leaves):
        out, lse = ops.run(call._replace(**dict(zip(given, leaves))))
        return out, lse[lse > -torch.inf]

    assert torch.autograd.gradcheck(run, tensors)
