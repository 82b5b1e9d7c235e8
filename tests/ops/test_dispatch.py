"""The dispatcher is gone round only where nothing can tell: whatever looks on, transforms or differentiates meets the
op.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import strobe
from strobe.kernels.runtime.launch_cache import guard_for
from strobe.ops import attention as ops
from strobe.problem import torch_private, torch_state
from tests.calls import CALLS

OP = torch.ops.strobe.forward.default


@pytest.fixture
def through(monkeypatch):
    """A list that grows with each call that goes to the op; calls like those of these tests were met before, in all of
    a thread's quiet modes.
    """
    met = []
    for within in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        for grads in (False, True):
            with within():
                _attend(*_tensors(grads))
                _attend(*_tensors(grads), sinks=torch.zeros(4, requires_grad=grads))
    monkeypatch.setattr(ops, "FORWARD", lambda *flat: met.append("op") or OP(*flat))
    return met


def _tensors(grads: bool = False) -> tuple[torch.Tensor, ...]:
    return tuple(t.requires_grad_(grads) for t in CALLS["causal"](torch.float32)[:3])


def _attend(*tensors: torch.Tensor, **options) -> torch.Tensor:
    return strobe.attention(*tensors, causal=True, **options)


# ---------------------------------------------------------------- plain calls


@pytest.mark.parametrize("within", (contextlib.nullcontext, torch.no_grad, torch.inference_mode))
@pytest.mark.parametrize("name", ("causal", "sinks", "varlen causal sinks", "key_lengths", "documents"))
def test_a_plain_call_goes_round_the_dispatcher(name, within, through):
    call = CALLS[name](torch.float32)
    expected = OP(*call[:-1])
    with within():
        got = ops.run(call)
    assert not through
    for one, other in zip(got, expected):
        assert torch.equal(one, other) and one.stride() == other.stride()
        assert not one.requires_grad and one.is_leaf and one.is_inference() == (within is torch.inference_mode)


@pytest.mark.parametrize("within", (torch.no_grad, torch.inference_mode))
def test_leaves_without_grad_mode_are_plain(within, through):
    q, k, v = (t.requires_grad_() for t in _tensors())
    with within():
        out = _attend(q, k, v, sinks=torch.zeros(4, requires_grad=True))
    assert not through and not out.requires_grad


def test_what_a_thread_adds_to_keys_is_what_this_version_of_torch_adds():
    seen = [torch._C._dispatch_tls_local_include_set().raw_repr()]
    with torch.inference_mode():
        seen.append(torch._C._dispatch_tls_local_include_set().raw_repr())
    assert tuple(seen) == torch_private.QUIET_KEYS


def test_refusals_are_the_same(through):
    q, k, v = _tensors()
    for bad in (
        (q, k[:, :, :1].expand(-1, -1, 3, -1), v),
        (q.to_sparse(), k, v),
        (q, k.double(), v),
        (q, k, v.transpose(1, 3)),
    ):
        said = []
        for go in (lambda *t: ops.run(strobe.problem.call.Call(*t)), OP):
            with pytest.raises(strobe.InvalidProblem) as error:
                go(*bad)
            said.append(str(error.value))
        assert said[0] == said[1]


# ---------------------------------------------------------------- all others


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        return function(*arguments, **(keywords or {}))


class _FunctionMode(TorchFunctionMode):
    def __torch_function__(self, function, types, arguments=(), keywords=None):
        return function(*arguments, **(keywords or {}))


class _Subclass(torch.Tensor):
    pass


def _within(context):
    def go(q, k, v):
        with context():
            return _attend(q, k, v)

    return go


def _dual(q, k, v):
    with forward_ad.dual_level():
        return _attend(q, k, v)


def _fake(q, k, v):
    with FakeTensorMode() as mode:
        return _attend(*(mode.from_tensor(t) for t in (q, k, v)))


WATCHED = {
    "dispatch mode": _within(_Mode),
    "function mode": _within(_FunctionMode),
    "device": _within(lambda: torch.device("cpu")),
    "flop counter": _within(lambda: FlopCounterMode(display=False)),
    "autocast": _within(lambda: torch.autocast("cpu", torch.bfloat16)),
    "profiler": _within(lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])),
    "old profiler": _within(torch.autograd.profiler.profile),
    "forward mode": _dual,
    "fake tensors": _fake,
    "vmap": lambda q, k, v: torch.vmap(lambda q: _attend(q, k, v))(q[None]),
    "vmap around": lambda q, k, v: torch.vmap(lambda x: x + _attend(q, k, v).sum())(torch.zeros(2)),
    "func.grad": lambda q, k, v: torch.func.grad(lambda q: _attend(q, k, v).sum())(q),
    "jit.trace": lambda q, k, v: torch.jit.trace(_attend, (q, k, v), check_trace=False),
    "make_fx": lambda q, k, v: make_fx(_attend)(q, k, v),
    "make_fx around": lambda q, k, v: make_fx(lambda x: x + _attend(q, k, v).sum())(torch.zeros(2)),
    "fake mode around": _within(lambda: FakeTensorMode(allow_non_fake_inputs=True)),
    "make_fx before autograd": lambda q, k, v: make_fx(_attend, pre_dispatch=True)(q, k, v),
    "dispatch mode, gradient of q": lambda q, k, v: _within(_Mode)(q.requires_grad_(), k, v),
    "profiler, gradient of v": lambda q, k, v: _within(torch.autograd.profiler.profile)(q, k, v.requires_grad_()),
    "gradient of sinks": lambda q, k, v: _attend(q, k, v, sinks=torch.zeros(4, requires_grad=True)),
    "subclass q": lambda q, k, v: _attend(q.as_subclass(_Subclass), k, v),
    "subclass v": lambda q, k, v: _attend(q, k, v.as_subclass(_Subclass)),
    "subclass sinks": lambda q, k, v: _attend(q, k, v, sinks=torch.zeros(4).as_subclass(_Subclass)),
    "negative bit": lambda q, k, v: _attend(q, k, torch._neg_view(v)),
    "meta": lambda q, k, v: _attend(q.to("meta"), k.to("meta"), v.to("meta")),
    "no rows": lambda q, k, v: _attend(q[:, :0], k, v),
}


@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("name", WATCHED)
def test_whatever_looks_on_meets_the_op(name, grads, through):
    WATCHED[name](*_tensors(grads))
    assert through


BACKWARD_WATCHED = {
    name: WATCHED[name]
    for name in ("dispatch mode", "flop counter", "autocast", "profiler", "old profiler", "forward mode")
}


@pytest.mark.parametrize("name", BACKWARD_WATCHED)
def test_whatever_looks_on_a_backward_alone_meets_the_op(name, through, monkeypatch):
    met, tensors = [], _tensors(True)
    op = torch.ops.strobe.backward.default
    expected = torch.autograd.grad(_attend(*tensors).sum(), tensors)
    monkeypatch.setattr(ops, "BACKWARD", lambda *flat: met.append("op") or op(*flat))
    out = _attend(*tensors)
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), tensors, retain_graph=True), expected)) and not met
    gradients = []
    with pytest.MonkeyPatch.context() as patch:  # what each context would do with a call is done with a backward
        patch.setattr(
            strobe, "attention", lambda *_, **__: gradients.extend(torch.autograd.grad(out.sum(), tensors)) or out
        )
        BACKWARD_WATCHED[name](*tensors)
    assert met and not through and all(map(torch.equal, gradients, expected))


@pytest.mark.parametrize("grads", [False, True])
def test_what_torch_func_has_left_behind_is_unwrapped(grads, through):
    left, (q, k, v) = [], _tensors()
    torch.func.grad(lambda x: left.append(x) or x.sum())(q)
    out = _attend(left[0], k.requires_grad_(grads), v)
    assert torch.equal(out, _attend(q, k, v)) and out.requires_grad == grads and not guard_for((q, k, v))(left[0], k, v)


@pytest.mark.parametrize("which", range(3))
def test_a_gradient_alone_needs_no_op(which, through):
    """Autograd's function calls the body; the gradient is that of the op."""
    tensors = _tensors()
    tensors[which].requires_grad_()
    (found,) = torch.autograd.grad(_attend(*tensors).sum(), tensors[which])
    assert not through
    with _Mode():
        (expected,) = torch.autograd.grad(_attend(*tensors).sum(), tensors[which])
    assert through and torch.equal(found, expected)


def test_a_trace_that_closes_over_what_needs_a_gradient_is_refused_by_torch():
    """Where nobody else has read its sizes before; torch's refusal swallowed, the process ends at the trace's end."""
    code = (
        "import torch, strobe; k = torch.randn(1, 5, 4, 16, requires_grad=True); q = torch.randn(1, 5, 4, 16); "
        "strobe.attention(q, k, k)\n"
        "torch.jit.trace(lambda q: strobe.attention(q, k, k), (q,), check_trace=False)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "Cannot insert a Tensor that requires grad as a constant" in done.stderr, (
        done.returncode,
        done.stderr,
    )


@pytest.mark.parametrize("which", range(3))
def test_a_negative_bit_is_heeded(which):
    """Also by what knows a call whose like was met: a negated view is as contiguous as its tensor, and has its
    address."""
    tensors = list(_tensors())
    for _ in range(2):
        _attend(*tensors)
    view = torch._neg_view(tensors[which])
    assert view.is_contiguous() and view.data_ptr() == tensors[which].data_ptr()
    viewed = [*tensors[:which], view, *tensors[which + 1 :]]
    assert guard_for(tensors)(*tensors) and not guard_for(tensors)(*viewed)
    assert torch.equal(_attend(*viewed), _attend(*tensors[:which], -tensors[which], *tensors[which + 1 :]))


def test_zeros_that_are_not_stored_are_not_read():
    assert torch_state.needs_dispatcher([torch._efficientzerotensor(2)])


def test_graphs_hold_the_op():
    tensors, found = _tensors(), []

    def backend(graph, _):
        found.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch.compiler.reset()
    torch.compile(_attend, fullgraph=True, backend=backend)(*tensors)
    torch.compiler.reset()
    for pre_dispatch in (False, True):
        found += [node.target for node in make_fx(_attend, pre_dispatch=pre_dispatch)(*tensors).graph.nodes]
    assert found.count(OP) == 3
    assert "strobe::forward" in str(torch.jit.trace(_attend, tensors).graph)


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("grads", [False, True])
def test_a_tangent_is_not_lost(which, grads):
    """An op without a rule for forward mode would drop it in silence."""
    tensors = [*_tensors(grads), torch.zeros(4)]
    with forward_ad.dual_level():
        tensors[which] = forward_ad.make_dual(tensors[which], torch.ones_like(tensors[which]))
        with pytest.raises(strobe.UnsupportedProblem, match="forward-mode derivatives"):
            _attend(*tensors[:3], sinks=tensors[3])


def test_a_tangent_beneath_a_gradient_is_not_lost():
    q = _tensors()[0]
    with pytest.raises(strobe.UnsupportedProblem, match="forward-mode derivatives"):
        torch.func.hessian(lambda q: strobe.attention(q, q, q).sum())(q)


def test_a_gradient_beneath_vmap_is_not_lost():
    x = torch.randn(3, 1, 4, 1, 8, requires_grad=True)
    one = lambda q: strobe.attention(q, q, q, causal=True)
    (wanted,) = torch.autograd.grad(torch.stack([one(q) for q in x]).sum(), x)
    (found,) = torch.autograd.grad(torch.vmap(one)(x).sum(), x)
    assert torch.allclose(found, wanted)
    assert torch.allclose(torch.func.grad(lambda x: torch.vmap(one)(x).sum())(x.detach()), wanted)
    cache = strobe.DenseCache(torch.randn(1, 8, 1, 8), torch.randn(1, 8, 1, 8), torch.full((1,), 8, dtype=torch.int32))
    decode = lambda q: strobe.attention_decode(q, cache)
    with pytest.raises(strobe.UnsupportedProblem, match="gradients through decode"):
        torch.func.grad(lambda x: torch.vmap(decode)(x).sum())(x.detach()[:, :, :1])
    with pytest.raises(strobe.UnsupportedProblem, match="forward-mode derivatives"):
        torch.func.jvp(torch.vmap(one), (x.detach(),), (x.detach(),))


def test_out_goes_through_the_op(monkeypatch):
    met = []
    monkeypatch.setattr(ops, "FORWARD_OUT", lambda *flat: met.append(1) or torch.ops.strobe.forward_out.default(*flat))
    q, k, v = _tensors()
    _attend(q, k, v, out=torch.empty(*q.shape[:-1], v.shape[-1]))
    assert met


def test_a_mode_that_ends_leaves_no_trace(through):
    with _Mode():
        _attend(*_tensors())
    del through[:]
    _attend(*_tensors())
    assert not through
