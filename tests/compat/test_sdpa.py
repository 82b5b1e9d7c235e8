"""strobe under torch's own attention: what it computes there, what goes back to torch, and that undoing leaves no
trace.

What a GPU's dispatcher would call is called here on CPU tensors too: `enable` puts the same functions before the same
ops.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from threading import Thread
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import attention as registry
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import AuxRequest, varlen_attn

import strobe
from strobe import reference
from strobe.compat import aten, sdpa
from strobe.errors import UnsupportedProblem
from strobe.kernels.runtime.launch_cache import CACHE
from strobe.ops import attention as ops
from strobe.problem import torch_private
from strobe.problem.call import Call
from strobe.selection import replay
from strobe.testing.compare import assert_as_good_as, assert_gradients_as_good_as

OPS = torch.ops.aten
DTYPES = {"cpu": [torch.float32, torch.bfloat16, torch.float16, torch.float64], "cuda": [torch.bfloat16, torch.float16]}
gpu = pytest.mark.gpu


@pytest.fixture(autouse=True)
def nothing_stays_enabled():
    if torch.cuda.is_available():
        sdpa.backend("cuda")  # torch sets the priority at a process's first choice
    before = _state()
    yield
    assert _state() == before and not sdpa._switches


def _state() -> tuple:
    """All that enable() changes: the kernels of every op as the dispatcher lists them, the provider, the priority."""
    tables = [
        torch._C._dispatch_dump(f"aten::{name}") for names in sdpa.OPS.values() for name in names if hasattr(OPS, name)
    ]
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
LEANING = {  # causal, not square: rows and keys both ways
    "causal, more keys": Case(2, 4, 2, 70, 129, 16, True),
    "causal, more rows": Case(1, 2, 2, 129, 70, 16, True, lies="rows"),
    "causal, few keys": Case(1, 2, 2, 9, 5, 16, True),
    "causal, one query": Case(1, 2, 2, 1, 70, 16, True),
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


def _with_gradients(run, case, qkv, dout):
    out = run(case, *qkv)
    return [out.detach(), *torch.autograd.grad(out, qkv, dout)]


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


# ---------------------------------------------------------------- scaled_dot_product_attention


@pytest.mark.parametrize("name", CASES)
def test_sdpa_forward_and_backward(name, device):
    case = CASES[name]
    for dtype in DTYPES[device]:
        qkv = _qkv(case, dtype, device)
        dout = _like(_random(case.batch, case.heads_q, case.seqlen_q, case.width), dtype, device)
        with sdpa.enable() as found:
            results = _with_gradients(_sdpa, case, qkv, dout)
        _own(found)
        _judge(case, results, qkv, dout)


@pytest.mark.parametrize("name", LEANING)
def test_causal_stays_aligned_at_the_top_left(name, device):
    """Of GPUs, torch's flash attention takes none of these: they go where they went."""
    case = LEANING[name]
    for dtype in DTYPES[device][:2]:
        qkv = _qkv(case, dtype, device)
        dout = torch.ones(case.batch, case.heads_q, case.seqlen_q, case.width, dtype=dtype, device=device).expand(
            -1, -1, -1, -1
        )
        with sdpa.enable() as found:
            results = _with_gradients(_sdpa, case, qkv, dout)
        if device == "cpu":
            _own(found)
            _judge(case, results, qkv, dout)
        else:
            assert not found.served
            with sdpa_kernel(SDPBackend.MATH):
                _near(results, _with_gradients(_sdpa, case, qkv, dout))


@pytest.mark.parametrize("name", [*CASES, *LEANING])
def test_torchs_own_math_passes_the_judge(name):
    """The same meaning, whoever computes: of causal rows that are no square too."""
    case = CASES.get(name) or LEANING[name]
    qkv, dout = _qkv(case, torch.float64), _random(case.batch, case.heads_q, case.seqlen_q, case.width)
    with sdpa_kernel(SDPBackend.MATH):
        _judge(case, _with_gradients(_sdpa, case, qkv, dout), qkv, dout)


@pytest.mark.parametrize("name", [*CASES, *LEANING])
def test_results_lie_in_memory_as_torchs_do(name):
    case, op = CASES.get(name) or LEANING[name], OPS._scaled_dot_product_flash_attention_for_cpu
    back = OPS._scaled_dot_product_flash_attention_for_cpu_backward
    q, k, v = _qkv(case, grad=False)
    results = []
    for switch in (counted, sdpa.enable):
        with switch():
            out, lse = op(q, k, v, 0.0, case.causal, scale=case.scale)
            results.append(
                [out, lse, *back(torch.ones_like(out), q, k, v, out, lse, 0.0, case.causal, scale=case.scale)]
            )
    for native, ours in zip(*results):
        assert (ours.shape, ours.stride(), ours.dtype) == (native.shape, native.stride(), native.dtype)
        torch.testing.assert_close(ours, native, rtol=1e-4, atol=1e-5)


@gpu
@pytest.mark.parametrize("name", [name for name in CASES if name != "odd width"])  # SDPA pads those before
def test_results_lie_in_memory_as_torchs_do_on_a_gpu(name):
    case = CASES[name]
    q, k, v = _qkv(case, torch.bfloat16, "cuda", grad=False)
    results = []
    for switch in (counted, sdpa.enable):
        with switch():
            out, lse, *rest = OPS._scaled_dot_product_flash_attention(
                q, k, v, 0.0, case.causal, False, scale=case.scale
            )
            gradients = OPS._scaled_dot_product_flash_attention_backward(
                torch.ones_like(out), q, k, v, out, lse, *rest[:4], 0.0, case.causal, *rest[4:6], scale=case.scale
            )
            results.append([out, lse, *rest, *gradients])
    for native, ours in zip(*results):
        if isinstance(native, torch.Tensor):
            assert (ours.shape, ours.dtype, ours.device) == (native.shape, native.dtype, native.device)
            same = [
                a == b for a, b, size in zip(ours.stride(), native.stride(), ours.shape) if size > 1
            ]  # the stride of one element says nothing
            assert all(same) or case.lies == "expanded"  # a dimension of stride 0 has no place of its own
        else:
            assert ours == native
    if (case.scale or 0) < 0:  # torch's kernel takes a row's maximum before it scales, and overflows
        return
    torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-4, atol=1e-4)
    _near([results[1][0], *results[1][-3:]], [results[0][0], *results[0][-3:]])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "rows, keys, heads_kv", [(64, 64, 2), (3, 64, 2), (5, 5, 2), (64, 63, 2), (70, 70, 1), (0, 64, 2), (300, 300, 2)]
)
def test_what_goes_to_torchs_kernel_as_it_lies_is_what_strobe_would_hand_to_it(rows, keys, heads_kv, is_causal):
    """The short cut on CPUs takes no call of another meaning: `cpu.forward` has torch's kernel for it too, and gives
    the same bits.
    """
    q, k, v = (torch.randn(2, heads, length, 16) for heads, length in ((2, rows), (heads_kv, keys), (heads_kv, keys)))
    other = []
    found = aten.torch_first(lambda *call, **options: other.append(call))(q, k, v, 0.0, is_causal)
    if other:
        assert heads_kv < 2 or rows == 0 or (is_causal and rows != keys)
        return
    ours = [t.transpose(1, 2) for t in (q, k, v)]
    assert strobe.explain(*ours, causal=is_causal).forward.config.path == "torch_flash"
    partial = strobe.partial_attention(*ours, causal=is_causal)
    for out, lse in (found, aten.cpu_forward(q, k, v, 0.0, is_causal)):
        assert torch.equal(out.transpose(1, 2), partial.out) and torch.equal(lse, partial.lse)


def test_a_row_of_nan_is_nan_and_alone(device):
    q, k, v = _qkv(CASES["causal"], DTYPES[device][0], device, grad=False)
    q[0, 1, 5] = torch.nan
    with sdpa.enable():
        out = F.scaled_dot_product_attention(q, k, v)
    assert out[0, 1, 5].isnan().all() and out.isnan().sum() == out.shape[-1]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("batch", [1, 9])  # lse looked through as a list, and by an op
@pytest.mark.parametrize("length", [1, 5, 15])
def test_a_row_of_nan_is_not_lost_in_torchs_kernel_on_few_keys(length, batch, is_causal):
    q, k, v = (torch.randn(batch, 2, length, 8) for _ in range(3))
    forward = aten.torch_first(aten.cpu_forward)
    clean = forward(q, k, v, 0.0, is_causal)
    q[0, 1, length // 2] = torch.nan
    for got, before in zip(forward(q, k, v, 0.0, is_causal), clean):
        assert got[0, 1, length // 2].isnan().all()
        got[0, 1, length // 2] = before[0, 1, length // 2]
        assert torch.equal(got, before)


# ---------------------------------------------------------------- what goes back to torch


def test_a_mask_goes_back_to_torch(device):
    q, k, v = _qkv(CASES["plain"], DTYPES[device][0], device)
    mask = _random(37, 37).to(device, DTYPES[device][0])
    native = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    with sdpa.enable() as found:
        ours = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        gradients = torch.autograd.grad(ours.sum(), (q, k, v))
    _near([ours, *gradients], [native, *torch.autograd.grad(native.sum(), (q, k, v))])
    assert not found.served and found.passed == (
        {"attn_mask": 2} if device == "cpu" else {}
    )  # a GPU's flash attention takes none


def test_dropout_goes_back_to_torch(device):
    q, k, v = _qkv(CASES["plain"], DTYPES[device][0], device)
    results = []
    for switch in (counted, sdpa.enable):
        torch.manual_seed(3)
        with switch() as found, sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
            results.append([out, *torch.autograd.grad(out.sum(), (q, k, v))])
    _near(*results)
    assert not found.served
    if device == "cpu":  # there its choice takes no dropout; asked for by name, the kernel says so itself
        with sdpa.enable() as found, pytest.raises(RuntimeError, match="dropout"):
            OPS._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.5)
        assert found.passed == {"dropout_p": 1}
    else:
        assert found.passed == {"dropout_p": 2}


def test_what_no_kernel_takes_goes_back_to_torch(monkeypatch):
    def none(call):
        raise UnsupportedProblem("no forward kernel can run this here")

    q, k, v = _qkv(CASES["causal"])
    native = _sdpa(CASES["causal"], q, k, v)
    monkeypatch.setattr(ops, "decide", none)
    monkeypatch.setattr(aten, "torch_first", lambda kernel: kernel)  # else torch's kernel runs this for strobe
    with sdpa.enable() as found:
        ours = _sdpa(CASES["causal"], q, k, v)
        gradients = torch.autograd.grad(ours.sum(), (q, k, v))
    assert torch.equal(ours, native) and len(gradients) == 3 and found.passed == {"no kernel": 2} and not found.served


def test_a_fault_does_not_go_back_to_torch(monkeypatch):
    def broken(*_):
        raise strobe.KernelFault("cpu.forward: it broke")

    monkeypatch.setattr(ops, "write", broken)
    monkeypatch.setattr(aten, "torch_first", lambda kernel: kernel)  # else torch's kernel runs this for strobe
    q, k, v = _qkv(CASES["causal"])
    with sdpa.enable() as found, pytest.raises(strobe.KernelFault, match="it broke"):
        _sdpa(CASES["causal"], q, k, v)
    assert not found.passed


@pytest.mark.parametrize(
    "later", [{"s_aux": torch.ones(1)}, {"softcap": 1.0}, {"pages": ()}, {"s_aux": None, "softcap": 0.0}]
)
def test_an_argument_of_a_later_torch_is_refused_unless_it_says_nothing(later):
    q, k, v = _qkv(CASES["plain"], grad=False)
    rows = [t.transpose(1, 2) for t in (q, k, v)]
    for function, arguments in (
        (aten.cpu_forward, (q, k, v)),
        (aten.sdpa_forward, (q, k, v)),
        (aten.flash_forward, (*rows, None, None, 37, 37, 0.0, False, False)),
    ):
        if any(value is not None and value != 0.0 and value != () for value in later.values()):
            with pytest.raises(UnsupportedProblem, match=f"^{next(iter(later))}: got .*, expected .*; "):
                function(*arguments, **later)
        else:
            function(*arguments, **later)


def test_strided_rows_go_back_to_torch(device):
    q, k, v = (
        t.transpose(-1, -2).contiguous().transpose(-1, -2)
        for t in _qkv(CASES["plain"], DTYPES[device][0], device, grad=False)
    )
    assert q.stride(-1) != 1
    native = F.scaled_dot_product_attention(q, k, v)
    with sdpa.enable() as found:
        _near([F.scaled_dot_product_attention(q, k, v)], [native])
    assert not found.served


# ---------------------------------------------------------------- the ops of a GPU, on whatever device


def _general(case: Case, dtype, device, **options):
    """Forward and backward of the op SDPA calls on GPUs; causal is aligned at the bottom right there."""
    q, k, v = _qkv(case, dtype, device)
    found = OPS._scaled_dot_product_flash_attention(q, k, v, 0.0, case.causal, False, scale=case.scale)
    return (q, k, v), found


@pytest.mark.parametrize("name", CASES)
def test_the_op_of_gpus(name, device):
    case, dtype = CASES[name], DTYPES[device][0]
    with sdpa.enable() as found:
        qkv, (out, lse, *rest) = _general(case, dtype, device)
        dout = _random(*out.shape).to(device, dtype)
        gradients = torch.autograd.grad(out, qkv, dout)
    _own(found)
    _judge(case, [out.detach(), *gradients], qkv, dout, lse)
    assert out.stride() == torch.empty_like(qkv[0]).stride() and [g.stride() for g in gradients] == [
        torch.empty_like(t).stride() for t in qkv
    ]
    assert lse.is_contiguous() and lse.dtype == torch.float32
    assert rest[:2] == [None, None] and rest[2:4] == [case.seqlen_q, case.seqlen_k]
    assert [(t.dtype, list(t.shape)) for t in rest[4:]] == [(torch.uint64, [2]), (torch.uint64, []), (dtype, [0])]


@pytest.mark.parametrize("rows, keys", [(3, 7), (7, 3)])
def test_causal_of_the_op_of_gpus_is_aligned_at_the_bottom_right(rows, keys, device):
    """As torch.nn.attention.bias says of it, which calls it for causal_lower_right."""
    dtype = DTYPES[device][0]
    q, k = (_random(1, 2, length, 8).to(device, dtype) for length in (rows, keys))
    v = torch.eye(8, device=device, dtype=dtype)[:keys].expand(1, 2, -1, -1).contiguous()
    with sdpa.enable() as found:
        out, lse = OPS._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False)[:2]
        bias = F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(rows, keys))
    seen = [row.nonzero().flatten().tolist() for row in out[0, 0]]
    assert seen == [list(range(row + 1 + keys - rows)) for row in range(rows)]
    assert (lse == -torch.inf).sum() == 2 * max(0, rows - keys)
    sees = max(0, rows - keys)
    _near([bias[:, :, sees:]], [out[:, :, sees:]])
    assert sum(found.served.values()) == (2 if device == "cuda" else 1)


def test_the_backward_takes_the_out_and_lse_of_more_keys(device):
    """As ring attention calls it: each part of the keys with the merged results."""
    dtype = DTYPES[device][0]
    case = Case(1, 4, 2, 40, 96, 32, lies="rows")
    q, k, v = _qkv(case, dtype, device, grad=False)
    dout = _random(*q.shape).to(device, dtype)
    with sdpa.enable() as found:
        out, lse, *rest = OPS._scaled_dot_product_flash_attention(q, k, v)
        back = lambda keys: OPS._scaled_dot_product_flash_attention_backward(
            dout, q, k[:, :, keys], v[:, :, keys], out, lse, *rest[:4], 0.0, False, *rest[4:6]
        )
        whole, parts = back(slice(0, 96)), [back(slice(0, 33)), back(slice(33, 96))]
    assert sum(found.served.values()) == 4 and not found.passed
    _near([parts[0][0] + parts[1][0], *(torch.cat([part[index] for part in parts], 2) for index in (1, 2))], whole)


def test_results_of_another_shape_or_type_are_refused():
    q, k, v = _qkv(CASES["plain"], grad=False)
    out, lse = aten.cpu_forward(q, k, v)
    for wrong_out, wrong_lse in ((out.double(), lse), (out, lse.double()), (out, lse[..., :-1]), (out[:, :2], lse)):
        with pytest.raises(UnsupportedProblem, match=r"^out, logsumexp: "):
            aten.cpu_backward(wrong_out, q, k, v, wrong_out, wrong_lse, 0.0, False)


def test_kernels_are_given_what_they_take_for_granted(monkeypatch):
    """lse contiguous, out and offsets with rows in one piece: however they come."""
    q, k, v = _qkv(CASES["causal"], grad=False)
    out, lse = aten.cpu_forward(q, k, v)
    wanted, given = aten.cpu_backward(out, q, k, v, out, lse, 0.0, False), []
    write_gradients = ops.write_gradients
    monkeypatch.setattr(
        ops, "write_gradients", lambda choice, call, one: (given.append(one), write_gradients(choice, call, one))
    )
    strided = out.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert strided.stride(-1) != 1 and not lse.is_contiguous()
    found = aten.cpu_backward(strided, q, k, v, strided, lse, 0.0, False)
    assert all(map(torch.equal, found, wanted)) and given[0].lse.is_contiguous() and given[0].out.stride(-1) == 1
    (q, k, v), (offsets, other, *longest) = _packed(UNEVEN, 2, 2, torch.float32, "cpu")
    calls, decide = [], ops.decide
    monkeypatch.setattr(ops, "decide", lambda call: (calls.append(call), decide(call))[1])
    spread = torch.stack([offsets, offsets], 1)[:, 0]
    assert not spread.is_contiguous()
    aten.flash_forward(q.detach(), k.detach(), v.detach(), spread, other, *longest, 0.0, True, False)
    assert calls[0].cu_seqlens_q.is_contiguous()


def _calls():
    """Every op that is overridden, with arguments of its own."""
    q, k, v = _qkv(CASES["grouped"], grad=False)
    rows, packed = [t.transpose(1, 2) for t in (q, k, v)], [t.transpose(1, 2).flatten(0, 1) for t in (q, k, v)]
    offsets = torch.tensor([0, 45, 45, 90], dtype=torch.int32)
    state, unused = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    whole, flash = (0.0, True), (None, None, 45, 45, 0.0, True, False)
    lse, packed_lse = torch.zeros(2, 6, 45), torch.zeros(6, 90)
    sequences = (offsets, offsets, 45, 45, 0.0, True, False)
    return {
        "_scaled_dot_product_flash_attention_for_cpu": (q, k, v, *whole),
        "_scaled_dot_product_flash_attention_for_cpu_backward": (q, q, k, v, q, lse, *whole),
        "_scaled_dot_product_flash_attention": (q, k, v, *whole),
        "_scaled_dot_product_flash_attention_backward": (q, q, k, v, q, lse, None, None, 45, 45, *whole, state, unused),
        "_flash_attention_forward": (*rows, *flash),
        "_flash_attention_backward": (rows[0], *rows, rows[0], lse, None, None, 45, 45, *whole, state, unused),
        "_flash_attention_forward packed": (*packed, *sequences),
        "_flash_attention_backward packed": (packed[0], *packed, packed[0], packed_lse, *sequences[:6], state, unused),
        "_flash_attention_forward_no_dropout_inplace": (packed[0].clone(), *packed, *sequences),
    }


@pytest.mark.parametrize("name", _calls())
def test_results_are_what_torchs_meta_kernels_promise(name):
    """Shapes, strides and types, which torch.compile relies on."""
    op = getattr(OPS, name.split()[0], None)
    if op is None:
        pytest.skip("younger than this torch")
    arguments = _calls()[name]
    with sdpa.enable() as found:
        ours = op(*arguments)
        with FakeTensorMode() as mode:
            promised = op(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments))
    assert sum(found.served.values()) == 1 and not found.passed
    listed = lambda results: [results] if isinstance(results, torch.Tensor) else list(results)
    assert len(listed(ours)) == len(listed(promised))
    for one, other in zip(listed(ours), listed(promised)):
        if isinstance(one, torch.Tensor):
            assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        else:
            assert one == other


def test_every_op_has_its_call_and_every_function_its_op():
    assert {name.split()[0] for name in _calls()} == set(sdpa.OPS["CPU"])
    assert {function.__name__ for function in sdpa.OPS["CPU"].values()} == set(aten.__all__)


@pytest.mark.parametrize("asked", [False, True])
def test_deterministic_algorithms_are_asked_of_strobe(asked, monkeypatch):
    calls, decide = [], ops.decide
    monkeypatch.setattr(ops, "decide", lambda call: (calls.append(call), decide(call))[1])
    monkeypatch.setattr(aten, "torch_first", lambda kernel: kernel)  # else torch's kernel runs this for strobe
    q, k, v = _qkv(CASES["causal"])
    torch.use_deterministic_algorithms(asked)
    try:
        with sdpa.enable():
            _sdpa(CASES["causal"], q, k, v).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert [(call.deterministic, call.needs_grad) for call in calls] == [(asked, True)] * 2


@pytest.mark.parametrize("lies, launches", [("rows", [True, True]), ("heads", [])])
def test_a_launch_that_was_kept_is_used_again_where_out_lies_by_rows(lies, launches, monkeypatch):
    """What a plan keeps writes to contiguous rows, and is found by addresses alone, before any tensor is turned."""
    q, k, v = _qkv(Case(1, 2, 2, 70, 70, 16, lies=lies), grad=False)
    out, launched, write = torch.empty_like(q), [], ops.write

    def keeping(choice, call, out, lse):
        write(choice, call, out, lse)
        CACHE.insert_launch(choice.forward, replay.forward_addresses(call, out, lse), lambda: not launched.append(True))

    monkeypatch.setattr(torch_private, "cuda_current_device", lambda: -1)  # the device of a tensor on a CPU
    monkeypatch.setattr(
        replay,
        "forward_addresses",
        lambda call, out, lse: (call.q.data_ptr(), call.k.data_ptr(), call.v.data_ptr(), out.data_ptr()),
    )
    monkeypatch.setattr(ops, "write", keeping)
    CACHE.clear()
    monkeypatch.setattr(torch, "empty_like", lambda *_, **__: out)  # as an allocator does, the same memory each time
    with sdpa.enable() as found:
        for _ in range(3):
            OPS._scaled_dot_product_flash_attention(q, k, v)
    assert launched == launches and found.served == {"cpu.forward": 3}


# ---------------------------------------------------------------- packed sequences: varlen_attn

LENGTHS = [(5, 5), (0, 0), (70, 70), (1, 1), (33, 33)]
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


# ---------------------------------------------------------------- the switch


def test_importing_activates_nothing():
    steps = (
        "import sys, torch, strobe; assert 'strobe.integrations' not in sys.modules; from strobe.integrations "
        "import sdpa"
    )
    look = (
        "assert torch.nn.attention.current_flash_attention_impl() is None and 'STROBE' in "
        "torch.nn.attention.list_flash_attention_impls()"
    )
    run = (
        "torch.nn.functional.scaled_dot_product_attention(*[torch.ones(1, 1, 2, 8)] * 3); assert not sdpa.served "
        "and not sdpa.passed"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{steps}\n{look}\n{run}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def _runs_on_strobe() -> bool:
    q = torch.ones(1, 1, 2, 8)
    with counted() as found:
        F.scaled_dot_product_attention(q, q, q)
    return bool(found.served)


def test_undoing_puts_everything_back(recwarn):
    before = _state()
    switch = sdpa.enable()
    assert _runs_on_strobe() and registry.current_flash_attention_impl() == "STROBE" and _state()[0] != before[0]
    assert torch._C._get_sdp_priority_order()[0] == int(SDPBackend.FLASH_ATTENTION)
    switch()
    assert _state() == before and not _runs_on_strobe()
    switch()
    assert _state() == before and not recwarn


def test_a_handle_that_is_kept_lets_go_too():
    before = _state()
    handle = sdpa.register()
    assert _runs_on_strobe()
    handle.remove()
    assert _state() == before and not _runs_on_strobe()


def test_switches_nest_and_may_be_undone_in_any_order():
    before = _state()
    first, second = sdpa.enable(), sdpa.enable()
    first()
    assert _runs_on_strobe()
    first()  # a second time: it holds nothing any more
    assert _runs_on_strobe()
    with sdpa.enable() as third:
        second()
        assert _runs_on_strobe()
        third()
        assert _state() == before
    assert _state() == before


def test_an_error_within_undoes():
    before = _state()
    with pytest.raises(KeyError), sdpa.enable():
        raise KeyError
    assert _state() == before


@pytest.fixture
def other():
    """Another provider, which counts how often it was registered and removed."""
    counts = SimpleNamespace(registered=0, removed=0)

    class Handle:
        def remove(self):
            counts.removed += 1

    def register():
        counts.registered += 1
        return Handle()

    registry.register_flash_attention_impl("OTHER", register_fn=register)
    yield counts
    registry.restore_flash_attention_impl(_raise_warn=False)
    del registry._registry._FLASH_ATTENTION_IMPLS["OTHER"]


def test_another_provider_comes_back(other):
    registry.activate_flash_attention_impl("OTHER")
    with sdpa.enable():
        assert _runs_on_strobe() and (other.registered, other.removed) == (1, 1)
    assert registry.current_flash_attention_impl() == "OTHER" and (other.registered, other.removed) == (2, 1)


def test_another_provider_that_came_later_stays(other):
    with sdpa.enable():
        registry.activate_flash_attention_impl("OTHER")
        assert not _runs_on_strobe()
        with sdpa.enable():  # asked for again, strobe is back
            assert _runs_on_strobe()
        registry.activate_flash_attention_impl("OTHER")
    assert registry.current_flash_attention_impl() == "OTHER" and other.removed == 1


def test_torchs_own_way_to_activate_and_restore():
    registry.activate_flash_attention_impl("STROBE")
    assert _runs_on_strobe()
    with sdpa.enable():
        assert _runs_on_strobe()
    assert _runs_on_strobe() and registry.current_flash_attention_impl() == "STROBE"
    registry.restore_flash_attention_impl()
    assert not _runs_on_strobe()


def test_a_priority_that_someone_else_set_stays():
    before = torch._C._get_sdp_priority_order()
    theirs = [2, 1, 0, *before[3:]]
    try:
        with sdpa.enable():
            torch._C._set_sdp_priority_order(theirs)
        assert torch._C._get_sdp_priority_order() == theirs
        with sdpa.enable():
            assert torch._C._get_sdp_priority_order()[:2] == [1, 2]
        assert torch._C._get_sdp_priority_order() == theirs
    finally:
        torch._C._set_sdp_priority_order(before)


def test_an_older_torch_is_told_so_and_nothing_changes(other, monkeypatch):
    registry.activate_flash_attention_impl("OTHER")
    before = _state()
    monkeypatch.delattr(torch.nn.attention, "restore_flash_attention_impl")
    with pytest.raises(UnsupportedProblem, match=r"torch 2\.11"):
        sdpa.enable()
    assert _state() == before and other.removed == 0


def test_threads_may_switch_while_others_compute():
    q = torch.ones(1, 2, 70, 8)
    wanted, wrong = F.scaled_dot_product_attention(q, q, q), []

    def work():
        for _ in range(30):
            with sdpa.enable():
                if not torch.allclose(F.scaled_dot_product_attention(q, q, q), wanted):
                    wrong.append(1)

    threads = [Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_strobes_own_calls_do_not_come_round_again():
    """Its CPU kernel calls torch's: with the op overridden that would be strobe once more."""
    q, k, v = (t.transpose(1, 2) for t in _qkv(CASES["tiles"]))
    plain = strobe.attention(q, k, v, causal=True)
    with sdpa.enable() as found:
        out = strobe.attention(q, k, v, causal=True)
        torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    assert torch.equal(out, plain) and not found.served and not found.passed


def test_strobe_kernels_loaded_while_enabled_still_reach_torchs():
    """And torch's warning that a kernel is overridden, said once a process, is not passed on."""
    steps = "import torch; from strobe.integrations import sdpa; sdpa.enable(); q = torch.ones(1, 2, 70, 8)"
    run = "torch.nn.functional.scaled_dot_product_attention(q, q, q); assert dict(sdpa.served) == {'cpu.forward': 1}"
    done = subprocess.run([sys.executable, "-W", "error", "-c", f"{steps}\n{run}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@gpu
def test_enabling_wins_the_race_of_backends():
    before = sdpa.backend("cuda")
    with sdpa.enable():
        assert sdpa.backend("cuda") == "FLASH_ATTENTION of STROBE"
    assert sdpa.backend("cuda") == before


@gpu
def test_enabling_first_of_all_wins_the_race_of_backends():
    """torch sets the priority at the first choice of a process: over one that was set before it."""
    steps = (
        "import torch; from strobe.integrations import sdpa; s = sdpa.enable(); q = torch.ones(1, 2, 128, 64, "
        "device='cuda').bfloat16()"
    )
    run = (
        "torch.nn.functional.scaled_dot_product_attention(q, q, q); assert sum(sdpa.served.values()) == 1, "
        "sdpa.backend('cuda')"
    )
    done = subprocess.run([sys.executable, "-c", f"{steps}\n{run}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- what is built on it


class Block(torch.nn.Module):
    """Causal self-attention as language models write it: one projection, heads as views, fewer key heads than query
    heads.
    """

    def __init__(self, width=64, heads=8, heads_kv=2):
        super().__init__()
        self.heads, self.heads_kv, self.size = heads, heads_kv, width // heads
        self.qkv, self.out = torch.nn.Linear(width, (heads + 2 * heads_kv) * self.size), torch.nn.Linear(width, width)

    def forward(self, x):
        parts = self.qkv(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        q, k, v = parts.split([self.heads, self.heads_kv, self.heads_kv], 1)
        return self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
        )


def _multi_head(x, width=64):
    torch.manual_seed(0)
    weights = (
        torch.randn(3 * width, width, device=x.device, dtype=x.dtype) * 0.1,
        torch.randn(width, width, device=x.device, dtype=x.dtype) * 0.1,
    )
    y = x.transpose(0, 1)
    rest = dict(training=True, need_weights=False)
    return F.multi_head_attention_forward(
        y, y, y, width, 4, weights[0], None, None, None, False, 0.0, weights[1], None, **rest
    )[0]


def _module(make):
    def run(x):
        torch.manual_seed(0)
        return make().to(x.device, x.dtype)(x)

    return run


MODULES = {
    "multi_head_attention_forward": _multi_head,
    "TransformerEncoderLayer": _module(lambda: torch.nn.TransformerEncoderLayer(64, 4, 96, 0.0, batch_first=True)),
    "MultiheadAttention, causal": _module(lambda: _Causal()),
    "a language model's block": _module(Block),
}


class _Causal(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x):
        mask = torch.nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device, x.dtype)
        return self.inner(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]


@pytest.mark.parametrize("name", MODULES)
def test_modules(name, device):
    x = _random(2, 75, 64).to(device, DTYPES[device][0]).requires_grad_()
    results = []
    for switch in (counted, sdpa.enable):
        with switch() as found:
            out = MODULES[name](x)
            dout = _random(*out.shape, seed=1).to(
                out
            )  # of a sum of squares a layer norm's gradient is 0, but for rounding
            results.append([out, *torch.autograd.grad(out, x, dout)])
    _own(found)
    _near(*results)


def test_a_transformers_model():
    transformers = pytest.importorskip("transformers")
    sizes = dict(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=101,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, attn_implementation="sdpa"))
    tokens = torch.arange(150).view(2, 75) % 101
    losses = []
    for switch in (counted, sdpa.enable):
        model.zero_grad()
        with switch() as found:
            loss = model(tokens, labels=tokens).loss
            loss.backward()
        losses.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    _own(found, count=2)
    _near(*losses)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("lies", ["heads", "rows", "slices"])
def test_compiled(backend, lies, device):
    case, dtype = Case(2, 4, 2, 70, 70, 16, True, lies=lies), DTYPES[device][0]
    qkv = _qkv(case, dtype, device)
    dout = _random(2, 4, 70, 16).to(device, dtype)
    with sdpa.enable() as found:
        torch._dynamo.reset()
        step = torch.compile(lambda q, k, v: _sdpa(case, q, k, v), fullgraph=True, backend=backend)
        out = step(*qkv)
        results = [out.detach(), *torch.autograd.grad(out, qkv, dout)]
    _own(found)
    _judge(case, results, qkv, dout)


def test_compiled_varlen_attn(device):
    qkv, packing = _packed(UNEVEN, 2, 2, DTYPES[device][0], device)
    with sdpa.enable() as found:
        torch._dynamo.reset()
        step = torch.compile(
            lambda *tensors: varlen_attn(*tensors, *packing, window_size=(-1, 0)), fullgraph=True, backend="aot_eager"
        )
        out = step(*qkv)
        gradients = torch.autograd.grad(out.sum(), qkv)
    _own(found)
    plain = _sequences(UNEVEN, *qkv, -1, 0)
    _near([out, *gradients], [plain, *torch.autograd.grad(plain.sum(), qkv)])


def test_transforms_and_autocast(device):
    q, k, v = _qkv(Case(3, 2, 2, 70, 70, 16), DTYPES[device][0], device, grad=False)
    attend = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    loss = lambda q: attend(q, k, v).square().sum()
    many = torch.stack([q, -q])
    results = []
    for switch in (counted, sdpa.enable):
        with switch() as found:
            with torch.autocast(device, torch.bfloat16):
                cast = attend(q.float(), k.float(), v.float())
            results.append(
                [cast, torch.func.grad(loss)(q), torch.vmap(attend, (0, None, None))(many, k, v), attend(q, k, v)]
            )
    assert results[1][0].dtype == torch.bfloat16 and found.served and not found.passed
    _near(*results)


def test_autocast_does_not_reach_into_the_kernels():
    (q, k, v), packing = _packed(UNEVEN, 2, 2, torch.float32, "cpu")
    arguments = (q.detach(), k.detach(), v.detach(), *packing, 0.0, True, False)
    with sdpa.enable():
        plain = OPS._flash_attention_forward(*arguments)[0]
        with torch.autocast("cpu", torch.bfloat16):
            cast = OPS._flash_attention_forward(*arguments)[0]
    assert cast.dtype == torch.float32 and torch.equal(plain, cast)


def test_nested_tensors(device):
    dtype = DTYPES[device][0]
    pieces = [_random(length, 2, 16).to(device, dtype) for length in (5, 70, 33)]
    results = []
    for switch in (counted, sdpa.enable):
        with switch():
            jagged = torch.nested.nested_tensor(pieces, layout=torch.jagged).transpose(1, 2)
            out = F.scaled_dot_product_attention(jagged, jagged, jagged, is_causal=device == "cuda")
            results.append(out.transpose(1, 2).contiguous().values())
    _near(*([one] for one in results))


@gpu
def test_captured_in_a_graph():
    case = Case(2, 4, 2, 256, 256, 64, True, lies="rows")
    q, k, v = _qkv(case, torch.bfloat16, "cuda", grad=False)
    with sdpa.enable() as found:
        _sdpa(case, q, k, v)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = _sdpa(case, q, k, v)
        q.copy_(q.flip(2))
        graph.replay()
        torch.testing.assert_close(out, _sdpa(case, q, k, v), rtol=0, atol=0)
    assert sum(found.served.values()) == 3


def test_compiled_graphs_on_disk_are_told_apart(tmp_path, monkeypatch):
    """A graph traced without strobe holds the op of torch's backend: with strobe it must not be taken from the cache on
    disk, nor the other way.
    """
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    q = torch.randn(1, 2, 8, 16)

    def hits() -> int:
        torch._dynamo.reset()
        counters.clear()
        torch.compile(lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True) + 1.0)(q)
        return counters["aot_autograd"]["autograd_cache_hit"]

    tag = torch.compiler.config.cache_key_tag
    assert (hits(), hits()) == (0, 1)
    with sdpa.enable():
        assert (hits(), hits()) == (0, 1)
        with sdpa.enable():
            assert hits() == 1
    assert hits() == 1 and torch.compiler.config.cache_key_tag == tag
