"""What eager gives is what every transform and mode of torch gives: attention with and without out=, decode and append,
under each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import strobe

REMOVE = ("mutations", "mutations_and_views")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    """For each test and all examples of it."""
    torch.compiler.reset()
    _compiled.cache_clear()
    yield
    torch.compiler.reset()


# ---------------------------------------------------------------- drawn inputs


class Drawn(NamedTuple):
    """q, k and v of one problem, lengths of its sequences, tokens to append, and whether rows are causal."""

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: Tensor
    new: Tensor
    causal: bool

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self[:5]


@st.composite
def drawn(draw) -> Drawn:
    """Sizes of 2 and more, no two alike in one tensor's place: torch.compile takes 0 and 1, and sizes that agree, for
    constants.
    """
    batch, rows, keys = draw(st.integers(3, 4)), draw(st.integers(5, 9)), draw(st.integers(11, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    random = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)
    lengths = torch.tensor(draw(st.lists(st.integers(0, keys), min_size=batch, max_size=batch)), dtype=torch.int32)
    q, k, v = random(batch, rows, 4, 8), random(batch, keys, 2, 8), random(batch, keys, 2, 6)
    return Drawn(q, k, v, lengths, random(batch, 2, 2, 14), draw(st.booleans()))


# ---------------------------------------------------------------- what is called


def _empty(q: Tensor, v: Tensor) -> Tensor:
    return q.new_zeros(*q.shape[:-1], v.shape[-1])


def dense(q, k, v, lengths, new, causal):
    return (strobe.attention(q, k, v, causal=causal),)


def dense_out(q, k, v, lengths, new, causal):
    """Into a part of a wider tensor, beside which nothing may change."""
    wide = q.new_zeros(*q.shape[:-1], v.shape[-1] + 3)
    returned = strobe.attention(q, k, v, causal=causal, out=wide[..., 1:-2])
    return returned * 1, wide


def varlen_out(q, k, v, lengths, new, causal):
    out, (q, k, v) = _empty(q, v), (t.flatten(0, 1) for t in (q, k, v))
    offsets = torch.arange(lengths.shape[0] + 1, dtype=torch.int32)
    returned = strobe.attention_varlen(
        q, k, v, cu_seqlens_q=3 * offsets, cu_seqlens_k=5 * offsets, causal=causal, out=out.flatten(0, 1)
    )
    return returned * 1, out


def decode(q, k, v, lengths, new, causal):
    return (strobe.attention_decode(q, strobe.DenseCache(k, v, lengths), causal=causal),)


def decode_out(q, k, v, lengths, new, causal):
    out = _empty(q, v)
    returned = strobe.attention_decode(q, strobe.DenseCache(k, v, lengths), causal=causal, out=out)
    return returned * 1, out


def append(q, k, v, lengths, new, causal):
    """To one layer's part of two pools of several layers, which is then read."""
    pools = k.new_zeros(2, *k.shape), v.new_zeros(2, *v.shape)
    cache = strobe.DenseCache(pools[0][1], pools[1][1], lengths)
    strobe.append(cache, new[..., : k.shape[-1]], new[..., k.shape[-1] :])
    return *pools, strobe.attention_decode(q, cache, causal=causal)


CALLED: dict[str, Callable] = {
    call.__name__: call for call in (dense, dense_out, varlen_out, decode, decode_out, append)
}


def _same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
        torch.testing.assert_close(
            one, other, rtol=0, atol=1e-13
        )  # a product of several batch entries may sum in another order


# ---------------------------------------------------------------- each transform


@pytest.mark.parametrize("remove, name", list(product(REMOVE, CALLED)))
@settings(max_examples=10)
@given(one=drawn())
def test_functionalize(name, remove, one):
    call = CALLED[name]
    expected = call(*one)
    _same(torch.func.functionalize(lambda *tensors: call(*tensors, one.causal), remove=remove)(*one.tensors), expected)


@pytest.mark.parametrize("name", CALLED)
@settings(max_examples=10)
@given(one=drawn())
def test_a_traced_functional_graph_writes_to_nothing(name, one):
    """torch.fx's trace of it: every op that is left is one that returns what it computes, but for the copies at the
    end.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    call = lambda *tensors: CALLED[name](*tensors, one.causal)
    graph = make_fx(torch.func.functionalize(call))(*one.tensors)
    written = [
        node.target
        for node in graph.graph.nodes
        if node.op == "call_function" and getattr(node.target, "_schema", None) is not None
    ]
    assert not any(target._schema.is_mutable for target in written if "strobe" in str(target)) and any(
        "strobe" in str(target) for target in written
    )
    _same(graph(*one.tensors), call(*one.tensors))


@lru_cache
def _compiled(name: str, causal: bool) -> tuple[Callable, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(
        lambda *tensors: CALLED[name](*tensors, causal), fullgraph=True, dynamic=True, backend=counter
    ), counter


@pytest.mark.parametrize("name", CALLED)
@settings(max_examples=10)
@given(one=drawn())
def test_compiled_whole_for_all_sizes(name, one):
    compiled, counter = _compiled(name, one.causal)
    with torch.no_grad():
        _same(compiled(*one.tensors), CALLED[name](*one))
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", CALLED)
@settings(max_examples=10)
@given(one=drawn())
def test_fake_tensors_have_the_shapes_of_real_ones(name, one):
    expected = CALLED[name](*one)
    with FakeTensorMode() as mode:
        got = CALLED[name](*(mode.from_tensor(t) for t in one.tensors), one.causal)
    for fake, real in zip(got, expected, strict=True):
        assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


# ---------------------------------------------------------------- gradients

LOSSES = {
    "dense": lambda one, q, k, v: strobe.attention(q, k, v, causal=one.causal).square().sum(),
    "key lengths": lambda one, q, k, v: (
        strobe.attention(q, k, v, mask=strobe.key_lengths(one.lengths[: q.shape[0]])).sin().sum()
    ),
    "partial": lambda one, q, k, v: (
        strobe.partial_attention(q, k, v, causal=one.causal).lse.sin().masked_fill(torch.zeros(()) > 0, 0).sum()
    ),
    "beside a decode": lambda one, q, k, v: (strobe.attention(q, k, v) * _decoded(one)[: q.shape[0]]).sum(),
    "beside an out=": lambda one, q, k, v: (strobe.attention(q, k, v) * dense_out(*one)[0][: q.shape[0]]).sum(),
}


def _decoded(one: Drawn) -> Tensor:
    return decode_out(*one)[0]


def _eager_gradients(loss: Callable, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    leaves = [t.clone().requires_grad_() for t in tensors]
    return torch.autograd.grad(loss(*leaves), leaves)


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=10)
@given(one=drawn())
def test_grad(name, one):
    """Calls with out=, and those of caches, that have no part in the gradient run inside one too."""
    loss = lambda *tensors: LOSSES[name](one, *tensors)
    _same(torch.func.grad(loss, argnums=(0, 1, 2))(*one[:3]), _eager_gradients(loss, one[:3]))


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=5)
@given(one=drawn())
def test_vmap_of_grad(name, one):
    """Each batch entry by itself, as vmap has it: a batch of batches of one."""
    loss = lambda *tensors: LOSSES[name](one, *tensors)
    entries = tuple(t[:, None] for t in one[:3])
    got = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*entries)
    expected = [_eager_gradients(loss, tuple(t[b] for t in entries)) for b in range(len(one.q))]
    _same(got, tuple(map(torch.stack, zip(*expected))))


@settings(max_examples=5)
@given(one=drawn())
def test_a_decode_under_vmap_and_grad(one):
    """vmap has it for each cache by itself; a gradient through a cache is refused by name."""
    entries = tuple(t[:, None] for t in (one.q, one.k, one.v, one.lengths))
    got = torch.vmap(lambda q, k, v, lengths: decode(q, k, v, lengths, None, one.causal)[0])(*entries)
    _same((got[:, 0],), decode(*one))
    with pytest.raises(strobe.UnsupportedProblem, match="gradients through decode"):
        torch.func.grad(lambda q: decode(one.q * q.sum(), *one[1:])[0].sum())(one.q)


# ---------------------------------------------------------------- what cannot be written to


GRAD, FUNCTIONAL = torch.func.grad, torch.func.functionalize


@pytest.mark.parametrize(
    "transform",
    (lambda f: GRAD(FUNCTIONAL(f)), lambda f: FUNCTIONAL(GRAD(f)), FUNCTIONAL),
    ids=("inside", "outside", "leaf"),
)
def test_gradients_under_functionalize_are_refused_by_name(transform):
    """torch has no rule for an autograd.Function there, and an op by itself would lose the gradient."""
    loss = lambda q: strobe.attention(q, q, q).sum()
    with pytest.raises(strobe.UnsupportedProblem, match=r"gradients under torch\.func\.functionalize"):
        transform(loss)(torch.randn(1, 4, 2, 8, requires_grad=transform is FUNCTIONAL))


def test_out_from_outside_of_functionalize_is_refused_by_torch():
    q = torch.randn(1, 4, 2, 8)
    out = torch.zeros_like(q)
    with pytest.raises(RuntimeError, match="non-functional tensor"):
        torch.func.functionalize(lambda q: strobe.attention(q, q, q, out=out))(q)
    assert not out.any()


@pytest.mark.parametrize("function", (dense_out, decode_out))
def test_the_door_speaks_under_functionalize(function):
    q, k, v = torch.randn(2, 4, 2, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8)

    def call(q, k, v, lengths):
        out = q.new_zeros(2, 3, 2, 8)
        if function is dense_out:
            return strobe.attention(q, k, v, out=out)
        return strobe.attention_decode(q, strobe.DenseCache(k, v, lengths), out=out)

    with pytest.raises(strobe.InvalidProblem, match=r"out: got shape \[2, 3, 2, 8\], expected \[2, 4, 2, 8\]"):
        torch.func.functionalize(call)(q, k, v, torch.tensor([5, 2], dtype=torch.int32))


@pytest.mark.parametrize("function", (dense, decode))
def test_out_may_be_a_negative_view(function):
    """Its memory holds the numbers negated."""
    q, k, v, lengths = (
        torch.randn(2, 4, 2, 8),
        torch.randn(2, 5, 2, 8),
        torch.randn(2, 5, 2, 6),
        torch.tensor([5, 2], dtype=torch.int32),
    )
    (expected,), stored = function(q, k, v, lengths, None, True), torch.full((2, 4, 2, 6), 7.0)
    cache = strobe.DenseCache(k, v, lengths)
    attend = (
        strobe.attention_decode
        if function is decode
        else lambda q, _, **options: strobe.attention(q, k, v, causal=True, **options)
    )
    out = torch._neg_view(stored)
    assert attend(q, cache, out=out) is out and torch.equal(out, expected) and torch.equal(stored, -expected)


def test_append_refuses_values_that_lie_in_keys_under_functionalize_too():
    pool, new = torch.zeros(1, 8, 2, 8), torch.ones(1, 1, 2, 8)

    def call(pool, new, lengths):
        strobe.append(strobe.DenseCache(pool, pool[:, :, :, :], lengths), new, new)
        return pool

    with pytest.raises(strobe.InvalidProblem, match=r"cache\.v: got memory that keys lie in"):
        torch.func.functionalize(call)(pool, new, torch.tensor([0], dtype=torch.int32))
