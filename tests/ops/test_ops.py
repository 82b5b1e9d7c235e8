"""The ops: opcheck, gradients against finite differences, out=, the dictionary of Choices, threads, fake tensors,
refusals.
"""

from __future__ import annotations

import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import strobe
from strobe import reference
from strobe.kernels import kernels
from strobe.kernels.runtime import launch_cache
from strobe.kernels.runtime.launch_cache import CACHE, DIRECT, OP
from strobe.ops import attention as ops
from strobe.ops import decode as ops_decode
from strobe.problem.call import Call
from tests.calls import CALLS, leaves, with_grad

NAMES = list(CALLS)
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def agree(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Float64 against the oracle, which sums in another order: 64 roundings of at most |value| each."""
    torch.testing.assert_close(got, expected.to(got.dtype), rtol=64 * 2.0**-52, atol=64 * 2.0**-52)


# ---------------------------------------------------------------- the ops by themselves


@pytest.mark.parts(3, seed=3260821661)
@pytest.mark.parametrize("name", NAMES)
def test_forward_passes_opcheck(name):
    torch.library.opcheck(ops.FORWARD, tuple(CALLS[name](torch.float64))[:-1], test_utils=CHECKS)


@pytest.mark.parametrize("name", ("dense", "causal", "window softcap", "partial"))
def test_forward_passes_opcheck_with_its_trailing_defaults_left_out(name):
    torch.library.opcheck(ops.FORWARD, tuple(CALLS[name](torch.float64).arguments), test_utils=CHECKS)


@pytest.mark.parts(3, seed=3260821661)
@pytest.mark.parametrize("name", ("causal", "documents", "varlen causal sinks", "no keys"))
def test_forward_out_passes_opcheck(name):
    call = CALLS[name](torch.float32)
    out = torch.empty_like(ops.FORWARD(*call[:-1])[0])
    torch.library.opcheck(ops.FORWARD_OUT, (out, *call[:-1]), test_utils=CHECKS)


@pytest.mark.parts(3, seed=3260821661)
@pytest.mark.parametrize(
    "name, lse_gradient",
    [(name, index % 2 == 0) for index, name in enumerate(NAMES)] + [("causal", True), ("sinks", False)],
)
def test_backward_passes_opcheck(name, lse_gradient):
    call = CALLS[name](torch.float64)._replace(needs_grad=True)
    out, lse = ops.FORWARD(*call[:-1])
    dlse = torch.ones_like(lse) if lse_gradient else None
    torch.library.opcheck(ops.BACKWARD, (torch.ones_like(out), out, lse, dlse, *call[:-1]), test_utils=CHECKS)


@pytest.mark.parametrize("name", NAMES)
def test_out_and_lse_agree_with_the_oracle(name):
    call = CALLS[name](torch.float64)
    for got, expected in zip(ops.run(call), reference.forward(call)):
        agree(got, expected)


@pytest.mark.parts(3, seed=3260821661)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_agree_with_finite_differences(name):
    call = with_grad(CALLS[name](torch.float64))

    def both(*tensors):
        sinks = tensors[3] if call.sinks is not None else None
        out, lse = ops.run(call._replace(q=tensors[0], k=tensors[1], v=tensors[2], sinks=sinks))
        return out, torch.where(lse == -torch.inf, 0.0, lse)

    torch.autograd.gradcheck(both, leaves(call))


@pytest.mark.parametrize("name", ("dense", "sinks", "varlen", "documents"))
def test_gradients_agree_when_only_some_inputs_want_them(name):
    whole, call = with_grad(CALLS[name](torch.float64)), CALLS[name](torch.float64)
    expected = torch.autograd.grad(ops.run(whole)[0].sum(), leaves(whole))
    for index, field in enumerate(["q", "k", "v"] + ["sinks"] * (call.sinks is not None)):
        leaf = getattr(call, field).clone().requires_grad_()
        (got,) = torch.autograd.grad(ops.run(call._replace(**{field: leaf}))[0].sum(), leaf)
        assert torch.equal(got, expected[index]), field


def test_gradients_of_lse_alone_and_of_strided_upstreams():
    call = with_grad(CALLS["causal"](torch.float64))
    out, lse = ops.run(call)
    wide = torch.randn(*out.shape, 2, dtype=out.dtype)[..., 0]  # stride 2 in the last dimension
    got = torch.autograd.grad([out, lse], leaves(call), [wide, torch.ones(1, dtype=lse.dtype).expand_as(lse)])
    expected = reference.backward(call, wide, torch.ones_like(lse))
    for one, other in zip(got, expected[:3]):
        agree(one, other)
    alone = torch.autograd.grad(ops.run(call)[1].sum(), leaves(call))
    for one, other in zip(alone, reference.backward(call, torch.zeros_like(out), torch.ones_like(lse))[:3]):
        agree(one, other)


# ---------------------------------------------------------------- merging


def test_merge_and_with_sinks_have_gradients_where_rows_see_no_key():
    q, k, v = (t.clone().requires_grad_() for t in CALLS["empty rows"](torch.float64)[:3])
    sinks = torch.zeros(4, dtype=torch.float64, requires_grad=True)

    def whole(
        q, k, v, sinks
    ):  # causal with more rows than keys, so the first rows are empty in both parts and some in one
        left = strobe.partial_attention(q, k[:, :2], v[:, :2], mask=strobe.window(None, 1))
        right = strobe.partial_attention(q, k[:, 2:], v[:, 2:], causal=True)
        joined = strobe.with_sinks(strobe.merge(left, right), sinks)
        return joined.out, joined.lse

    torch.autograd.gradcheck(whole, (q, k, v, sinks))


def test_merged_halves_are_the_whole():
    q, k, v = CALLS["dense"](torch.float64)[:3]
    halves = [strobe.partial_attention(q, k[:, part], v[:, part]) for part in (slice(0, 3), slice(3, None))]
    for got, expected in zip(strobe.merge(*halves), strobe.partial_attention(q, k, v)):
        agree(got, expected)


def test_sinks_after_merging_are_sinks_of_the_whole():
    call = CALLS["empty rows sinks"](torch.float64)
    parts = [
        strobe.partial_attention(*call[:3], causal=True),
        strobe.partial_attention(call.q, call.k[:, :0], call.v[:, :0]),
    ]
    whole = strobe.with_sinks(strobe.merge(*parts), call.sinks)
    for got, expected in zip(whole, ops.run(call)):
        agree(got, expected)


# ---------------------------------------------------------------- refusals


def test_double_backward_is_refused():
    call = with_grad(CALLS["dense"](torch.float64))
    (dq,) = torch.autograd.grad(ops.run(call)[0].sum(), call.q, create_graph=True)
    with pytest.raises(strobe.UnsupportedProblem, match="double backward"):
        torch.autograd.grad(dq.sum(), call.q)


def test_out_with_gradients_is_refused():
    q, k, v = CALLS["dense"](torch.float32)[:3]
    with pytest.raises(strobe.UnsupportedProblem, match="out="):
        strobe.attention(q.requires_grad_(), k, v, out=torch.empty(*q.shape[:-1], v.shape[-1]))
    with pytest.raises(strobe.UnsupportedProblem, match="out="):
        strobe.attention(q.detach(), k, v, out=torch.empty(*q.shape[:-1], v.shape[-1], requires_grad=True))
    with torch.no_grad():
        strobe.attention(q, k, v, out=torch.empty(*q.shape[:-1], v.shape[-1]))


def test_a_missing_backward_is_told_before_the_forward_runs(monkeypatch):
    ran = []
    forward, backward = (kernels(direction)[-1] for direction in ("forward", "backward"))
    monkeypatch.setattr(type(forward), "run", lambda *_: ran.append("forward"))
    monkeypatch.setattr(backward, "why_not", lambda problem, target: "is out of order", raising=False)
    CACHE.clear()
    q, k, v = CALLS["dense"](torch.float32)[:3]
    strobe.attention(q, k, v)
    assert ran == ["forward"]
    with pytest.raises(strobe.UnsupportedProblem, match=r"no backward kernel(.*\n)*.*is out of order"):
        strobe.attention(q.requires_grad_(), k, v)
    assert ran == ["forward"]
    CACHE.clear()


def test_the_backward_op_refuses_a_call_that_did_not_ask_for_it():
    call = CALLS["dense"](torch.float32)
    out, lse = ops.FORWARD(*call[:-1])
    with pytest.raises(strobe.InvalidProblem, match="needs_grad"):
        ops.BACKWARD(out, out, lse, None, *call[:-1])


def _forward_of(name="varlen causal sinks"):
    call = CALLS[name](torch.float32)._replace(needs_grad=True)
    out, lse = ops.FORWARD(*call[:-1])
    return call, {"dout": torch.ones_like(out), "out": out, "lse": lse, "dlse": torch.ones_like(lse)}


STRANGE = {
    "of another batch": (lambda t: t[:1], "shape"),
    "of no rows": (lambda t: t[:0], "shape"),
    "of another rank": (lambda t: t[None], "shape"),
    "of another dtype": (lambda t: t.half(), r"torch\.float16"),
    "elsewhere": (lambda t: t.to("meta"), "device meta"),
    "sparse": (lambda t: t.to_sparse(), r"torch\.sparse_coo"),
}


@pytest.mark.parametrize("how", STRANGE)
@pytest.mark.parametrize("argument", ("dout", "out", "lse", "dlse"))
@pytest.mark.parametrize("name", ("causal", "varlen causal sinks", "no keys"))
def test_the_backward_op_refuses_what_is_of_another_forward(name, argument, how):
    call, given = _forward_of(name)
    change, got = STRANGE[how]
    ops.BACKWARD(*given.values(), *call[:-1])
    strange = given | {argument: change(given[argument])}
    with pytest.raises(strobe.InvalidProblem, match=f"^{argument}: got {got}.*, expected .*; "):
        ops.BACKWARD(*strange.values(), *call[:-1])
    if how in ("elsewhere", "sparse"):
        return
    with (
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        pytest.raises(strobe.InvalidProblem, match=f"^{argument}: got {got}"),
    ):
        fake = [
            mode.from_tensor(one) if isinstance(one, torch.Tensor) else one for one in (*strange.values(), *call[:-1])
        ]
        ops.BACKWARD(*fake)


FORGED = {
    "run that ends where it begins": (0, 0),
    "run that ends before": (0, -(2**31)),
    "run that ends behind all": (0, 8),
    "first key before all": (1, -1),
    "last key behind all": (2, 8),
    "last key before the first": (2, -5),
}


@pytest.mark.parametrize("side", ("spans_q", "spans_k"))
@pytest.mark.parametrize("how", FORGED)
def test_spans_that_no_mask_has_are_refused(how, side):
    """On a CPU they can be looked at; GPU kernels cut them."""
    call = CALLS["documents"](torch.float32)._replace(needs_grad=True)
    out, lse = ops.FORWARD(*call[:-1])
    column, number = FORGED[how]
    spans = getattr(call, side).clone()
    spans[1, 3, column] = number
    forged = call._replace(**{side: spans})
    for run in (
        lambda: ops.FORWARD(*forged[:-1]),
        lambda: ops.FORWARD_OUT(torch.empty_like(out), *forged[:-1]),
        lambda: ops.BACKWARD(out, out, lse, None, *forged[:-1]),
    ):
        with pytest.raises(
            strobe.InvalidProblem,
            match=rf"^mask {side}: got \[.*\] at position 3 of batch entry 1, expected .*; build the mask",
        ):
            run()


@pytest.mark.parametrize("side", ("spans_q", "spans_k"))
def test_spans_of_another_shape_or_kind_are_refused(side):
    call = CALLS["documents"](torch.float32)
    spans = getattr(call, side)
    for other, got in (
        (spans[:, :6], "shape"),
        (spans[..., :2], "shape"),
        (spans[0], "shape"),
        (spans.long(), r"torch\.int64"),
        (spans.to("meta"), "dev"),
    ):
        with pytest.raises(strobe.InvalidProblem, match=rf"{side}: got {got}"):
            ops.FORWARD(*call._replace(**{side: other})[:-1])


# ---------------------------------------------------------------- out=


@pytest.mark.parametrize("name", ("dense", "varlen causal sinks", "no keys"))
def test_out_of_any_strides_is_written_and_nothing_beside_it(name):
    call = CALLS[name](torch.float64)
    expected = ops.run(call)[0]
    wide = torch.full((*expected.shape[:-1], expected.shape[-1] + 3), 7.0, dtype=torch.float64)
    transposed = torch.full_like(expected, 7.0).transpose(0, 1).contiguous().transpose(0, 1)
    for out in (wide[..., 1 : 1 + expected.shape[-1]], transposed):
        got, _ = ops.run(call, out)
        assert got is out and torch.equal(out, expected)
    assert bool((wide[..., 0] == 7).all() and (wide[..., -2:] == 7).all())


def test_out_may_lie_between_what_is_read():
    q, k, v, out = torch.randn(1, 9, 4, 2, 8).unbind(2)
    expected = strobe.attention(q, k, v)
    assert torch.equal(strobe.attention(q, k, v, out=out), expected)


def test_q_that_is_hardly_aligned_is_not_mistaken_for_such_keys():
    call = CALLS["causal"](torch.float64)
    ours, theirs = call._replace(q=_odd(call.q)), call._replace(k=_odd(call.k), v=_odd(call.v))
    CACHE.clear()
    for one in (ours, theirs, ours):
        assert ops.decide(one).problem == strobe.Problem.from_call(one)
        ops.run(one)  # known again by torch's guards
        assert CACHE.lookup(DIRECT, *one.tensors_and_rest).problem == strobe.Problem.from_call(one)


@pytest.mark.parametrize("what", ("forward", "decode", "append"))
def test_autograd_knows_what_a_kernel_has_written(what, monkeypatch):
    """Kernels that are no ops of torch's bump no version by themselves."""
    monkeypatch.setattr(ops, "write", lambda choice, call, out, lse: None)
    monkeypatch.setattr(ops_decode, "write", lambda choice, call, tensors: None)
    monkeypatch.setattr(ops_decode, "_launch", lambda plan, call, tensors: None)
    w, q = torch.ones(1, 4, 1, 16, requires_grad=True), torch.ones(1, 4, 1, 16)
    held = torch.ones(1, 4, 1, 16)
    saved = (w * held).sum()
    cache = strobe.DenseCache(
        torch.ones(1, 4, 1, 16) if what != "append" else held,
        torch.ones(1, 4, 1, 16),
        torch.zeros(1, dtype=torch.int32),
    )
    with torch.no_grad():
        if what == "forward":
            strobe.attention(q, q, q, out=held)
        elif what == "decode":
            strobe.attention_decode(q, cache, out=held)
        else:
            strobe.append(cache, q, q)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


def test_warmup_in_inference_mode():
    q = torch.randn(1, 8, 2, 64, requires_grad=True)
    with torch.inference_mode():
        strobe.warmup([strobe.explain(q.detach(), q.detach(), q.detach()).problem])
    problem = strobe.explain(q, q, q).problem
    with torch.inference_mode():
        strobe.warmup([problem])


# ---------------------------------------------------------------- one Choice a Problem


def _odd(t: torch.Tensor) -> torch.Tensor:
    """The same values from an address that is aligned to its own itemsize alone."""
    base = torch.empty(t.numel() + 1, dtype=t.dtype)
    return base[1:].view(t.shape).copy_(t)


VARIANTS = {
    "q shape": lambda c: c._replace(q=c.q[:, 1:]),
    "k and v shape": lambda c: c._replace(k=c.k[:, 1:], v=c.v[:, 1:]),
    "batch": lambda c: c._replace(q=c.q[1:], k=c.k[1:], v=c.v[1:]),
    "heads": lambda c: c._replace(k=c.k[:, :, :1], v=c.v[:, :, :1]),
    "width of v": lambda c: c._replace(v=c.v[..., :2]),
    "strides of q": lambda c: c._replace(q=c.q.transpose(1, 2).contiguous().transpose(1, 2)),
    "strides of k": lambda c: c._replace(k=c.k.transpose(1, 2).contiguous().transpose(1, 2)),
    "strides of v": lambda c: c._replace(v=c.v[:, :, :1].expand(c.v.shape)),
    "alignment of q": lambda c: c._replace(q=_odd(c.q)),
    "alignment of k": lambda c: c._replace(k=_odd(c.k)),
    "alignment of v": lambda c: c._replace(v=_odd(c.v)),
    "dtype": lambda c: c._replace(q=c.q.float(), k=c.k.float(), v=c.v.float()),
    "left": lambda c: c._replace(left=1),
    "right": lambda c: c._replace(right=2),
    "no band": lambda c: c._replace(right=-1),
    "scale": lambda c: c._replace(scale=0.3),
    "negative scale": lambda c: c._replace(scale=-0.3),
    "softcap": lambda c: c._replace(softcap=0.9),
    "partial": lambda c: c._replace(q=c.q.half(), k=c.k.half(), v=c.v.half(), partial=True),
    "needs_grad": lambda c: c._replace(needs_grad=True),
    "deterministic": lambda c: c._replace(deterministic=True),
    "batch_invariant": lambda c: c._replace(batch_invariant=True),
    "kernel": lambda c: c._replace(kernel="cpu"),
    "sinks": lambda c: c._replace(sinks=torch.ones(4, dtype=torch.float64)),
    "sinks dtype": lambda c: c._replace(sinks=torch.ones(4, dtype=torch.float32)),
    "prefix": lambda c: c._replace(prefix=torch.tensor([2, 3], dtype=torch.int32), right=-1),
    "key_lengths": lambda c: c._replace(key_lengths=torch.tensor([2, 7], dtype=torch.int32)),
    "documents": lambda c: c.with_mask(
        strobe.documents(torch.tensor([[0, 0, 0, 1, 1]] * 2).int(), torch.tensor([[0, 0, 0, 0, 1, 1, 1]] * 2).int())
    ),
}


def _fresh(call: Call) -> tuple[torch.Tensor, ...]:
    CACHE.clear()
    return ops.FORWARD(*call[:-1])


@pytest.mark.parametrize("name", VARIANTS)
def test_a_call_is_not_mistaken_for_another_that_differs_in_one_argument(name):
    a = CALLS["causal"](torch.float64)
    b = VARIANTS[name](a)
    fresh_a, fresh_b = _fresh(a), _fresh(b)
    CACHE.clear()
    for call, fresh in ((a, fresh_a), (b, fresh_b), (a, fresh_a)):
        assert ops.decide(call).problem == strobe.Problem.from_call(call)
        for got, expected in zip(ops.FORWARD(*call[:-1]), fresh):
            assert got.dtype == expected.dtype and torch.equal(got, expected)
    assert CACHE.lookup(OP, *a.tensors_and_rest) and CACHE.lookup(OP, *b.tensors_and_rest)


def test_packed_calls_are_told_apart_by_their_promises_and_counts():
    a = CALLS["varlen"](torch.float64)
    offsets = torch.tensor([0, 10], dtype=torch.int32)
    for b in (
        a._replace(max_seqlen_q=9),
        a._replace(max_seqlen_k=9),
        a._replace(cu_seqlens_q=offsets, cu_seqlens_k=offsets),
    ):
        CACHE.clear()
        for call in (a, b, a):
            assert ops.decide(call).problem == strobe.Problem.from_call(call)
            agree(ops.FORWARD(*call[:-1])[0], reference.forward(call).out)
        assert CACHE.lookup(OP, *a.tensors_and_rest) and CACHE.lookup(OP, *b.tensors_and_rest)


def test_optional_tensors_of_any_strides_mean_the_same():
    call = CALLS["varlen causal sinks"](torch.float64)
    spread = lambda t: torch.stack([t, t + 1], -1).flatten()[::2]
    strided = call._replace(
        sinks=spread(call.sinks), cu_seqlens_q=spread(call.cu_seqlens_q), cu_seqlens_k=spread(call.cu_seqlens_k)
    )
    assert strided.sinks.stride() == (2,) and torch.equal(ops.run(strided)[0], ops.run(call)[0])
    masked = CALLS["key_lengths"](torch.float64)
    assert torch.equal(ops.run(masked._replace(key_lengths=spread(masked.key_lengths)))[0], ops.run(masked)[0])


def test_kernels_are_given_contiguous_optional_tensors_and_upstreams(monkeypatch):
    call = with_grad(CALLS["varlen causal sinks"](torch.float64))
    wide = torch.stack([call.sinks, call.sinks], -1)
    seen = []
    for direction in ("forward", "backward"):
        kernel = kernels(direction)[-1]
        real = kernel.run
        monkeypatch.setattr(kernel, "run", lambda *a, real=real: seen.append(a) or real(*a), raising=False)
    out, lse = ops.run(call._replace(sinks=wide[:, 0]))
    torch.autograd.grad(
        [out, lse], call.q, [torch.ones_like(out).mT.contiguous().mT, torch.ones(1, dtype=lse.dtype).expand_as(lse)]
    )
    (_, first, _, _), (_, second, tensors, _) = seen
    assert first.sinks.is_contiguous() and second.sinks.is_contiguous()
    assert tensors.dlse.is_contiguous() and tensors.dout.stride(-1) == 1


def test_the_door_is_not_passed_by_resembling_a_call_that_was_seen():
    call, packed = CALLS["sinks"](torch.float64), CALLS["varlen"](torch.float64)
    ops.FORWARD(*call[:-1])
    ops.FORWARD(*packed[:-1])
    with pytest.raises(strobe.InvalidProblem, match=r"sinks: got torch\.int64"):
        ops.FORWARD(*call._replace(sinks=call.sinks.long())[:-1])
    with pytest.raises(strobe.InvalidProblem, match=r"cu_seqlens_k: got torch\.int64"):
        ops.FORWARD(*packed._replace(cu_seqlens_k=packed.cu_seqlens_k.long())[:-1])


def test_a_seen_problem_is_not_selected_again(monkeypatch):
    q, k, v = CALLS["dense"](torch.float32)[:3]
    count = []
    real = ops.select
    monkeypatch.setattr(ops, "select", lambda *a: count.append(1) or real(*a))
    CACHE.clear()
    for _ in range(5):
        strobe.attention(q, k, v, causal=True)
        strobe.attention(q.clone(), k.clone(), v.clone(), causal=True)
    assert len(count) == 1
    for _ in range(3):
        strobe.attention(q.clone().requires_grad_(), k, v, causal=True).sum().backward()
    assert len(count) == 3  # one for the forward, one for the backward, which autograd runs without grad mode


def test_a_training_step_of_a_plain_call_makes_one_variable():
    """Where nobody looks on, out alone is an output of autograd's node; its gradients are those of the node that has
    lse as well.
    """
    q, k, v = (tensor.requires_grad_() for tensor in CALLS["causal"](torch.float64)[:3])
    out, (other, _) = strobe.attention(q, k, v, causal=True), strobe.partial_attention(q, k, v, causal=True)
    assert out.grad_fn is not None and other.grad_fn is not None
    assert (out.grad_fn.name(), other.grad_fn.name()) == ("_PlainBackward", "_AttentionBackward")
    dout = torch.randn_like(out)
    for one, same in zip(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(other, (q, k, v), dout)):
        assert torch.equal(one, same)
    with FlopCounterMode(display=False):
        assert strobe.attention(q, k, v).grad_fn.name() == "_AttentionBackward"
    out = strobe.attention(q, k, v)
    with torch.no_grad():
        q.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_the_cache_of_calls_stays_bounded(monkeypatch):
    monkeypatch.setattr(launch_cache, "MAX_CALLS", 8)
    CACHE.clear()
    q = torch.randn(1, 1, 1, 4)
    for length in range(1, 30):
        ops.run(Call(q, *(torch.randn(1, length, 1, 4) for _ in range(2))))
    assert len(CACHE.calls) <= 8


@pytest.mark.parametrize("same", (True, False))
def test_threads_may_make_the_first_calls(same):
    calls = [CALLS["causal"](torch.float64)._replace(scale=0.1 if same else 0.1 * (n + 1)) for n in range(8)]
    expected = [reference.forward(call).out for call in calls]
    for _ in range(5):
        CACHE.clear()
        got: list = [None] * 8
        gate = threading.Barrier(8)

        def work(n, got=got, gate=gate):
            gate.wait()
            got[n] = ops.run(calls[n])[0]

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for one, other in zip(got, expected):
            agree(one, other)


# ---------------------------------------------------------------- fake and meta tensors


@pytest.mark.parametrize("name", NAMES)
def test_fake_and_meta_tensors_have_the_shapes_of_real_ones(name):
    call = CALLS[name](torch.float32)
    real = ops.run(call)
    mode = FakeTensorMode()
    for place in (lambda t: mode.from_tensor(t), lambda t: t.to("meta")):
        moved = call._replace(**{n: place(t) for n, t in zip(call._fields, call) if isinstance(t, torch.Tensor)})
        for got, expected in zip(ops.run(moved), real):
            assert (got.shape, got.dtype, got.stride()) == (expected.shape, expected.dtype, expected.stride())


def test_a_fake_call_of_any_size_costs_no_data():
    with FakeTensorMode():
        q = torch.empty(64, 131072, 128, 256, dtype=torch.bfloat16, requires_grad=True)
        out = strobe.attention(q, q, q, causal=True)
        out.sum().backward()
        assert q.grad is not None and q.grad.shape == q.shape
        assert strobe.explain(q, q, q, kernel="cpu").problem.head_dim == 256


def test_fake_tensors_meet_the_same_door():
    with FakeTensorMode():
        q, k = torch.empty(1, 4, 3, 8), torch.empty(1, 4, 2, 8)
        with pytest.raises(strobe.InvalidProblem, match="k: got 2 heads"):
            strobe.attention(q, k, k)


def test_a_device_that_no_kernel_runs_on_is_refused_with_reasons():
    q = torch.empty(1, 4, 2, 8, device="meta")
    assert not strobe.supports(q, q, q)
    with pytest.raises(strobe.UnsupportedProblem, match=r"cpu\.forward"):
        strobe.explain(q, q, q)


# ---------------------------------------------------------------- warmup, explain


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gradients", (False, True))
def test_warmup_runs_every_problem(name, gradients):
    problem = ops.decide(CALLS[name](torch.float32)._replace(needs_grad=gradients)).problem
    with torch.no_grad():
        strobe.warmup([problem], "cpu")
    example = strobe.Problem.from_call(problem.example(torch.device("cpu")))
    assert (example.layout, example.strides, example.mask, example.needs_grad) == (
        problem.layout,
        problem.strides,
        problem.mask,
        gradients,
    )


def test_warmup_of_expanded_and_unaligned_tensors():
    q, k, v = CALLS["dense"](torch.float16)[:3]
    problem = strobe.explain(_odd(q), k[:, :, :1].expand(-1, -1, 2, -1), v).problem
    strobe.warmup([problem], "cpu")
    assert problem.example(torch.device("cpu")).q.data_ptr() % 16 == 2
    assert strobe.Problem.from_call(problem.example(torch.device("cpu"))).alignment == problem.alignment == 2


def test_explain_tells_what_runs_under_autocast_and_with_gradients():
    q = torch.randn(1, 4, 2, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        choice = strobe.explain(q, q, q)
    assert choice.problem.dtype == torch.bfloat16 and choice.backward is not None
    with torch.no_grad():
        assert strobe.explain(q, q, q).backward is None


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"score_mod": lambda s, b, h, i, j: s + j}, id="score_mod"),
        pytest.param({"dropout_p": 0.3, "dropout_seed": 1}, id="dropout"),
    ],
)
def test_rows_of_a_pack_without_sequences_need_no_kernel(options, monkeypatch):
    monkeypatch.setattr(ops, "_launch", None)
    q, k, sinks = (torch.randn(shape, requires_grad=True) for shape in ((5, 2, 16), (7, 1, 16), 2))
    offsets = torch.zeros(1, dtype=torch.int32)
    out = strobe.attention_varlen(q, k, k, cu_seqlens_q=offsets, cu_seqlens_k=offsets, sinks=sinks, **options)
    assert not any(t.any() for t in (out, *torch.autograd.grad(out.sum(), (q, k, sinks))))
    assert ops.run(Call(q, k, k, cu_seqlens_q=offsets, cu_seqlens_k=offsets))[1].eq(-torch.inf).all()
