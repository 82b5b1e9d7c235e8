"""torch.nn.attention.varlen_attn on strobe."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from strobe.compat import sdpa
from strobe.errors import UnsupportedProblem
from strobe.problem.call import Call
from strobe.testing.compare import assert_as_good_as, assert_gradients_as_good_as
from tests.compat.sdpa_calls import UNEVEN, _near, _own, _packed, _random, _sequences, counted

pytestmark = pytest.mark.usefixtures("nothing_stays_enabled")
OPS = torch.ops.aten
DTYPES = {"cpu": [torch.float32, torch.bfloat16, torch.float16, torch.float64], "cuda": [torch.bfloat16, torch.float16]}
gpu = pytest.mark.gpu


LENGTHS = [(5, 5), (0, 0), (70, 70), (1, 1), (33, 33)]


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (12, 0), (3, 5), (0, 0)])
@pytest.mark.parametrize("lengths", [LENGTHS, UNEVEN])
def test_varlen_attn(window, lengths, device):
    for dtype in DTYPES[device][:2]:
        qkv, packing = _packed(lengths, 2, 2, dtype, device)
        dout = _random(*qkv[0].shape).to(device, dtype)
        with sdpa.enable() as found:
            out, lse = varlen_attn(*qkv, *packing, window_size=window, return_aux=AuxRequest(lse=True))
            gradients = torch.autograd.grad(out, qkv, dout)
        _own(found)
        assert lse.shape == (2, len(qkv[0])) and lse.dtype == torch.float32
        offsets = dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), packing))
        call = Call(*(t.detach() for t in qkv), *window, needs_grad=True, **offsets)
        assert_as_good_as((out, lse), call)
        assert_gradients_as_good_as((*gradients, None), call, dout)


def test_varlen_attn_with_shared_key_heads(device):
    qkv, packing = _packed(UNEVEN, 6, 2, DTYPES[device][0], device)
    arguments = (*qkv, *packing, 0.0, True, False)
    with sdpa.enable() as found:
        out = OPS._flash_attention_forward(*arguments)[0]
        torch.autograd.grad(out.sum(), qkv)
    _own(found)
    wanted = _sequences(UNEVEN, *(t.detach().double() for t in qkv), -1, 0)
    _near([out], [wanted.to(out.dtype)])


@gpu
def test_varlen_attn_agrees_with_torchs():
    for window in ((-1, -1), (-1, 0), (12, 0), (3, 5)):
        qkv, packing = _packed([lengths for lengths in UNEVEN if all(lengths)], 4, 4, torch.bfloat16, "cuda", width=64)
        dout, results = _random(*qkv[0].shape).to("cuda", torch.bfloat16), []
        for switch in (counted, sdpa.enable):
            with switch():
                out, lse = varlen_attn(*qkv, *packing, window_size=window, return_aux=AuxRequest(lse=True))
                results.append([out.detach(), lse.where(lse.isfinite(), 0.0), *torch.autograd.grad(out, qkv, dout)])
        for native, ours in zip(*results):
            assert native.stride() == ours.stride()
        out, lse, *gradients = zip(*results)
        torch.testing.assert_close(*lse, rtol=1e-4, atol=1e-4)
        for native, ours in (out, *gradients):
            _near([ours], [native])


def test_varlen_attn_into_memory_that_is_given(device):
    attention = pytest.importorskip("torch.nn.attention.varlen")
    if not hasattr(attention, "varlen_attn_out"):
        pytest.skip("younger than this torch")
    (q, k, v), packing = _packed(UNEVEN, 2, 2, DTYPES[device][0], device)
    q, k, v = q.detach(), k.detach(), v.detach()
    out = torch.full((len(q), 3, 16), torch.nan, dtype=q.dtype, device=device)
    with sdpa.enable() as found:
        attention.varlen_attn_out(out[:, 1:], q, k, v, *packing, window_size=(-1, 0))
        assert torch.equal(out[:, 1:], varlen_attn(q, k, v, *packing, window_size=(-1, 0)))
    assert out[:, 0].isnan().all() and sum(found.served.values()) == 2


@pytest.mark.parametrize("argument", ["seqused_k", "block_table", "num_splits", "alibi_slopes"])
def test_what_varlen_attn_asks_beyond_is_refused_where_torch_has_no_kernel(argument):
    (q, k, v), packing = _packed(LENGTHS, 2, 2, torch.float32, "cpu")
    value = 2 if argument == "num_splits" else torch.ones(5, dtype=torch.int32)
    if argument not in str(OPS._flash_attention_forward.default._schema):
        pytest.skip("younger than this torch")
    with sdpa.enable() as found, pytest.raises(UnsupportedProblem, match=f"^{argument}: "):
        OPS._flash_attention_forward(q, k, v, *packing, 0.0, False, False, **{argument: value})
    assert not found.passed and not found.served


def test_offsets_of_one_side_are_refused():
    (q, k, v), (offsets, _, *longest) = _packed(LENGTHS, 2, 2, torch.float32, "cpu")
    with sdpa.enable(), pytest.raises(UnsupportedProblem, match=r"^cum_seq_q, cum_seq_k: "):
        OPS._flash_attention_forward(q, k, v, offsets, None, *longest, 0.0, False, False)
