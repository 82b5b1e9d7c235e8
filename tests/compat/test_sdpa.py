"""strobe under torch's own attention: what it computes there, what goes back to torch, and that undoing leaves no
trace.

What a GPU's dispatcher would call is called here on CPU tensors too: `enable` puts the same functions before the same
ops.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

import strobe
from strobe.compat import aten, sdpa
from strobe.errors import UnsupportedProblem
from strobe.kernels.runtime.launch_cache import CACHE
from strobe.ops import attention as ops
from strobe.problem import torch_private
from strobe.selection import replay
from tests.compat.sdpa_calls import (
    CASES,
    UNEVEN,
    Case,
    _judge,
    _like,
    _near,
    _own,
    _packed,
    _qkv,
    _random,
    _sdpa,
    counted,
)

pytestmark = pytest.mark.usefixtures("nothing_stays_enabled")
OPS = torch.ops.aten
DTYPES = {"cpu": [torch.float32, torch.bfloat16, torch.float16, torch.float64], "cuda": [torch.bfloat16, torch.float16]}
gpu = pytest.mark.gpu
LEANING = {  # causal, not square: rows and keys both ways
    "causal, more keys": Case(2, 4, 2, 70, 129, 16, True),
    "causal, more rows": Case(1, 2, 2, 129, 70, 16, True, lies="rows"),
    "causal, few keys": Case(1, 2, 2, 9, 5, 16, True),
    "causal, one query": Case(1, 2, 2, 1, 70, 16, True),
}


def _with_gradients(run, case, qkv, dout):
    out = run(case, *qkv)
    return [out.detach(), *torch.autograd.grad(out, qkv, dout)]


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


def test_dropout_that_nobody_asked_for_goes_back_to_torch(device):
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
