"""vmap over the ops: values and gradients of a loop over the entries, and no word of torch's about a missing rule."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch

import strobe
from strobe.ops import attention as ops

N, B, S, T, H, G, D = 3, 2, 5, 7, 4, 2, 8

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(autouse=True)
def _all_warnings():
    """torch says it once a process: as if it had not."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch._C._functorch._set_vmap_fallback_warning_enabled(True)
        yield


def _drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


Q, K, V = _drawn(N, B, S, H, D), _drawn(N, B, T, G, D, seed=1), _drawn(N, B, T, G, D, seed=2)
LENGTHS = torch.tensor([[7, 3], [0, 5], [1, 7]], dtype=torch.int32)
IDS = (torch.arange(T) // 3).to(torch.int32).expand(B, T)
OFFSETS = torch.tensor([[0, 2, 5], [0, 5, 5], [0, 1, 5]], dtype=torch.int32)
SINKS = _drawn(N, H)


def _masked(q, k, v, lengths):
    return strobe.attention(q, k, v, mask=strobe.causal() & strobe.key_lengths(lengths))


def _documents(q, k, v):
    return strobe.attention(q, k, v, mask=strobe.documents(IDS[:, :S], IDS))


def _varlen(q, k, v, offsets):
    return strobe.attention_varlen(q, k, v, cu_seqlens_q=offsets, causal=True)


def _partial(q, k, v):
    part = strobe.partial_attention(q, k, v, window=(2, 1), softcap=3.0)
    return part.out.sum(-1) + part.lse.nan_to_num(neginf=0.0).transpose(1, 2)


CASES: dict[str, tuple[Callable, tuple, tuple]] = {
    "all": (lambda q, k, v: strobe.attention(q, k, v, causal=True), (Q, K, V), (0, 0, 0)),
    "q alone": (lambda q, k, v: strobe.attention(q, k, v), (Q, K[0], V[0]), (0, None, None)),
    "v alone": (lambda q, k, v: strobe.attention(q, k, v), (Q[0], K[0], V), (None, None, 0)),
    "heads' dimension": (
        lambda q, k, v: strobe.attention(q, k, v),
        (Q.movedim(0, 2), K[0], V.movedim(0, 3)),
        (2, None, 3),
    ),
    "last dimension": (lambda q, k, v: strobe.attention(q, k, v), (Q.movedim(0, -1), K[0], V[0]), (4, None, None)),
    "key lengths": (_masked, (Q, K, V, LENGTHS), (0, 0, 0, 0)),
    "key lengths alone": (_masked, (Q[0], K[0], V[0], LENGTHS), (None, None, None, 0)),
    "documents": (_documents, (Q, K, V), (0, 0, 0)),
    "partial": (_partial, (Q, K, V), (0, 0, 0)),
    "one set of sinks": (lambda q, k, v: strobe.attention(q, k, v, sinks=SINKS[0]), (Q, K, V), (0, 0, 0)),
    "sinks": (
        lambda q, k, v, sinks: strobe.attention(q, k, v, sinks=sinks),
        (Q, K[0], V[0], SINKS),
        (0, None, None, 0),
    ),
    "packed": (_varlen, (Q[:, 0], K[:, 0, :S], V[:, 0, :S], OFFSETS), (0, 0, 0, 0)),
    "packed, one set of offsets": (_varlen, (Q[:, 0], K[:, 0, :S], V[0, 0, :S], OFFSETS[0]), (0, 0, None, None)),
    "one entry": (lambda q: strobe.attention(q, q, q), (Q[:1],), (0,)),
}


def _looped(attend: Callable, arguments: tuple, dims: tuple) -> torch.Tensor:
    size = next(a.shape[d] for a, d in zip(arguments, dims) if d is not None)
    chosen = lambda n: [a if d is None else a.select(d, n).contiguous() for a, d in zip(arguments, dims)]
    return torch.stack([attend(*chosen(n)) for n in range(size)])


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_a_loop(name):
    attend, arguments, dims = CASES[name]
    torch.testing.assert_close(torch.vmap(attend, dims)(*arguments), _looped(attend, arguments, dims))


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_a_loop(name):
    """Of each entry (grad inside vmap), and of all together (vmap inside autograd)."""
    attend, arguments, dims = CASES[name]
    floats = tuple(n for n, a in enumerate(arguments) if a.is_floating_point())
    weights = _looped(attend, arguments, dims)
    loss = lambda weight, *given: (attend(*given) * weight).sum()
    each = torch.func.grad(loss, argnums=tuple(n + 1 for n in floats))
    size = len(weights)
    chosen = lambda n: [a if d is None else a.select(d, n).contiguous() for a, d in zip(arguments, dims)]
    wanted = [each(weights[n], *chosen(n)) for n in range(size)]
    found = torch.vmap(each, (0, *dims))(weights, *arguments)
    for one, entries in zip(found, zip(*wanted)):
        torch.testing.assert_close(one, torch.stack(entries))

    leaves = [a.clone().requires_grad_(a.is_floating_point()) for a in arguments]
    inputs = [leaves[n] for n in floats]
    ours = torch.autograd.grad((torch.vmap(attend, dims)(*leaves) * weights).sum(), inputs)
    theirs = torch.autograd.grad((_looped(attend, tuple(leaves), dims) * weights).sum(), inputs)
    torch.testing.assert_close(ours, theirs)


def _rows(q, k, v, lengths):
    return strobe.attention_decode(q, strobe.DenseCache(k, v, lengths))


def _pages(q, pool, table, lengths):
    return strobe.attention_decode(q, strobe.PagedCache(pool, pool, table, lengths))


POOL = _drawn(12, 4, G, D)
TABLE = torch.randperm(12, generator=torch.Generator().manual_seed(0)).view(N, B, 2).to(torch.int32)
DECODES: dict[str, tuple[Callable, tuple, tuple]] = {
    "rows": (_rows, (Q, K, V, LENGTHS), (0, 0, 0, 0)),
    "queries over the same rows": (_rows, (Q, K[0], V[0], LENGTHS[0]), (0, None, None, None)),
    "pages of one pool": (_pages, (Q, POOL, TABLE, LENGTHS), (0, None, 0, 0)),
    "pools": (_pages, (Q, torch.stack([POOL, -POOL, 2 * POOL]), TABLE[0], LENGTHS), (0, 0, None, 0)),
}


@pytest.mark.parametrize("name", DECODES)
def test_decodes_are_those_of_a_loop(name):
    attend, arguments, dims = DECODES[name]
    torch.testing.assert_close(torch.vmap(attend, dims)(*arguments), _looped(attend, arguments, dims))


@pytest.mark.parametrize("captured", (False, True))
@pytest.mark.parametrize("paged", (False, True))
def test_functions_over_a_cache_are_refused(captured, paged):
    """As beside attention: the ops of functions have no rule."""
    cache = strobe.DenseCache(K[0], V[0], LENGTHS[0])
    queries, tables = Q[:, :, :1], torch.ones(N, H)
    offsets = torch.arange(B + 1, dtype=torch.int32)

    def attend(q, table):
        score = lambda s, b, h, q, k: s + table[h]
        if paged:
            return strobe.attention_paged(q[:, 0], cache, cu_seqlens_q=offsets, score_mod=score)
        return strobe.attention_decode(q, cache, score_mod=score)

    arguments = (queries[0], tables) if captured else (queries, tables[0])
    with pytest.raises(strobe.UnsupportedProblem, match="score_mod under vmap: make one call"):
        torch.vmap(attend, (None, 0) if captured else (0, None))(*arguments)


@pytest.mark.parametrize(
    ("name", "calls"), [("all", 1), ("documents", 1), ("one set of sinks", 1), ("sinks", N), ("packed", N)]
)
def test_entries_are_one_call_where_that_means_the_same(monkeypatch, name, calls):
    attend, arguments, dims = CASES[name]
    run, count = ops._launch, []
    monkeypatch.setattr(ops, "_launch", lambda *given: (count.append(1), run(*given)))
    torch.vmap(attend, dims)(*arguments)
    assert len(count) == calls


def test_vmap_of_vmap():
    attend = lambda q, k, v: strobe.attention(q, k, v, causal=True)
    twice = [torch.stack([t, 2 * t]) for t in (Q, K, V)]
    found = torch.vmap(torch.vmap(attend), (0, 0, 0))(*twice)
    torch.testing.assert_close(
        found, torch.stack([torch.stack([attend(*one) for one in zip(*pair)]) for pair in zip(*twice)])
    )


def test_no_entries():
    assert torch.vmap(lambda q: strobe.attention(q, q, q))(Q[:0]).shape == Q[:0].shape
    with pytest.raises(strobe.UnsupportedProblem, match="vmap over no entry"):
        torch.vmap(_varlen)(Q[:0, 0], K[:0, 0, :S], V[:0, 0, :S], OFFSETS[:0])


def test_sizes_that_do_not_fit_are_said_of_one_entry():
    with pytest.raises(strobe.InvalidProblem, match=r"k: got batch 1, expected q's batch 2"):
        torch.vmap(lambda q, k, v: strobe.attention(q, k, v))(Q, K[:, :1], V[:, :1])
