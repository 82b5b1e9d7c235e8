"""attention_paged against the oracle and against itself: named cases, drawn ragged batches, equal bits, and what the
metadata of a broken call does.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import strobe
from strobe import reference
from strobe.ops import paged as ops_paged
from strobe.problem.mask import NO_BOUND
from strobe.problem.paged import PagedCall
from strobe.testing import FAMILIES, assert_kernel
from strobe.testing.paged import PAGED, PagedCase, assert_paged_as_good_as

FP64 = 200 * 2.0**-53  # float64 against float64
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INT = lambda *values, device="cpu": torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("n, name", list(enumerate(PAGED)), ids=list(PAGED))
def test_as_good_as_the_oracle(n, name, device, kernel):
    dtype = DTYPES[n % (4 if device == "cpu" else 3)]  # no float64 over 8 bits on a GPU
    for invariant in (False, True):
        call = PAGED[name].build(device, dtype, FAMILIES[n % 5], n, kernel, invariant)
        assert_paged_as_good_as(ops_paged.run(call), call)
        assert_kernel(ops_paged.decide(call), kernel)
        assert bool(strobe.last_errors()) == bool(PAGED[name].lost)


# ---------------------------------------------------------------- drawn batches


@st.composite
def batches(draw) -> PagedCase:
    """A ragged batch of small sizes: any mix of prefills, chunks, decodes, speculated tokens and empty sequences."""
    size = draw(st.sampled_from((0, 1, 2, 3, 4, 8, 16)))
    count = draw(st.integers(1, 5))
    lengths = tuple(draw(st.lists(st.integers(0, 40), min_size=count, max_size=count)))
    news = tuple(draw(st.sampled_from((0, 1, 1, 2, 4, length // 2, length, length + 2))) for length in lengths)
    fp8 = draw(st.integers(0, 3)) == 0
    heads_kv = draw(st.integers(1, 2))
    left = draw(st.sampled_from((NO_BOUND, NO_BOUND, 0, 3, 20)))
    right = draw(st.sampled_from((0, 0, NO_BOUND, 2))) if left == NO_BOUND else draw(st.sampled_from((0, 0, 2)))
    starts = ()
    if not size and draw(st.booleans()):
        starts = tuple(draw(st.integers(0, length)) for length in lengths)
    return PagedCase(
        "drawn",
        lengths,
        draw(st.sampled_from((0, max(1, *news)))) if count > 1 else 0,
        (heads_kv * draw(st.integers(1, 3)), heads_kv),
        head_dim=draw(st.sampled_from((1, 5, 8))),
        head_dim_v=draw(st.sampled_from((None, 3))),
        page_size=size,
        starts=starts,
        left=left,
        right=right,
        softcap=draw(st.sampled_from((0.0, 0.0, 2.0))),
        sinks=draw(st.booleans()),
        fp8=fp8,
        token_scales=fp8 and draw(st.booleans()),
        heads_first=draw(st.booleans()),
        room=draw(st.integers(0, 2)),
        padding=draw(st.integers(0, 2)),
        news=news,
    )


def _equals_the_oracle(case: PagedCase, seed: int) -> None:
    call = case.build(dtype=torch.float64, seed=seed)
    got, exact = ops_paged.run(call), reference.paged(call)
    for one, other in zip(got, exact):
        torch.testing.assert_close(one, other, rtol=FP64, atol=FP64)
    assert strobe.last_errors() == []


@given(batches(), st.integers(0, 1000))
@settings(max_examples=2000)
def test_drawn_batches(case, seed):
    _equals_the_oracle(case, seed)


@pytest.mark.nightly
@given(batches(), st.integers(0, 2**31))
@settings(max_examples=100_000)
def test_many_drawn_batches(case, seed):
    _equals_the_oracle(case, seed)


# ---------------------------------------------------------------- equal bits


def _rows_of(results: tuple[torch.Tensor, torch.Tensor], rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    return results[0][rows], results[1][:, rows]


def same_bits_in_any_mix(case: PagedCase, device: str, kernel: str, dtype: torch.dtype) -> None:
    """Each sequence alone, with other sequences, in two calls of half of its tokens, and promised: one set of bits."""
    call = case.build(device, dtype, seed=5, kernel=kernel, batch_invariant=True)
    whole = ops_paged.run(call)
    offsets = call.cu_seqlens_q.tolist()
    for b, rows in enumerate(map(slice, offsets, offsets[1:])):
        own = [t if t is None else t[b : b + 1] for t in (call.seqlens, call.page_table)]
        tokens = rows.stop - rows.start
        alone = call._replace(
            q=call.q[rows], seqlens=own[0], page_table=own[1], cu_seqlens_q=INT(0, tokens, device=device)
        )
        expected = _rows_of(whole, rows)
        assert all(map(torch.equal, ops_paged.run(alone), expected))
        if tokens > 1:  # the first half when the second is not yet in the cache
            half = tokens // 2
            early = alone._replace(
                q=alone.q[:half], seqlens=own[0] - (tokens - half), cu_seqlens_q=INT(0, half, device=device)
            )
            assert all(map(torch.equal, ops_paged.run(early), _rows_of(expected, slice(0, half))))
            late = alone._replace(
                q=alone.q[half:], cu_seqlens_q=INT(0, tokens - half, device=device), max_seqlen_q=tokens - half
            )
            assert all(map(torch.equal, ops_paged.run(late), _rows_of(expected, slice(half, None))))


@pytest.mark.parametrize("name", ["mixed", "prefill", "window", "pages_of_13", "sinks_without_bound", "fp8"])
def test_the_same_bits_in_any_mix(name, device, kernel):
    same_bits_in_any_mix(PAGED[name], device, kernel, torch.float32 if device == "cpu" else torch.bfloat16)


def test_pages_have_the_bits_of_rows(device, kernel):
    """Of one shape, so one tile: the same keys in pages of 1, 16 and 64, and in rows."""
    g = torch.Generator().manual_seed(3)
    lengths, news = (192, 64, 130), (40, 64, 1)
    q = torch.randn(sum(news), 8, 32, generator=g).to(device, torch.float16)
    k, v = (torch.randn(3, 192, 2, 32, generator=g).to(device, torch.float16) for _ in range(2))
    offsets = INT(0, 40, 104, 105, device=device)
    found = [ops_paged.run(PagedCall(q, k, v, INT(*lengths, device=device), offsets, right=0, kernel=kernel))]
    for size in (1, 16, 64):
        order = torch.randperm(3 * 192 // size, generator=g).to(device)
        pools = [torch.empty_like(t).view(-1, size, 2, 32) for t in (k, v)]
        for pool, t in zip(pools, (k, v)):
            pool[order] = t.reshape(-1, size, 2, 32)
        table = order.view(3, -1).int()
        call = PagedCall(q, *pools, INT(*lengths, device=device), offsets, table, right=0, kernel=kernel)
        found.append(ops_paged.run(call))
    assert all(torch.equal(a, b) for one in found[1:] for a, b in zip(one, found[0]))


def test_a_decode_is_the_special_case(device, kernel):
    call = PAGED["one_token"].build(device, torch.float32, seed=2, kernel=kernel, batch_invariant=True)
    out, lse = ops_paged.run(call)
    cache = strobe.PagedCache(call.k, call.v, call.page_table, call.seqlens)
    part = strobe.partial_attention_decode(call.q[:, None], cache, batch_invariant=True, kernel=kernel)
    assert torch.equal(out, part.out[:, 0].to(out.dtype)) and torch.equal(lse, part.lse[:, :, 0].T)


# ---------------------------------------------------------------- broken metadata


def test_pages_that_were_freed_do_not_reach_a_result(device, kernel):
    """Sliding windows: pages before the first window have the id -1 in the case; here they are NaN in the pool, too."""
    case = replace(PAGED["window"], lengths=(300, 180, 66), news=(30, 2, 1))
    call = case.build(device, torch.float32, seed=1, kernel=kernel)
    free = int((~torch.isin(torch.arange(len(call.k), device=device), call.page_table)).nonzero()[0])
    call.k[free], call.v[free] = torch.nan, torch.nan
    stale = call._replace(page_table=torch.where(call.page_table == -1, free, call.page_table))
    assert (stale.page_table != call.page_table).any()
    for one, other in zip(ops_paged.run(call), ops_paged.run(stale)):
        assert torch.equal(one, other) and not one.isnan().any()
    assert strobe.last_errors() == []


def test_values_out_of_range_are_reported(device, kernel):
    call = PAGED["rows_left_padded"].build(device, seed=1, kernel=kernel)
    exact = ops_paged.run(call)
    long = call._replace(seqlens=call.seqlens + INT(0, 10**6, -(10**6), device=device))
    ops_paged.run(long)
    assert any("cache.seqlens" in error for error in strobe.last_errors())
    started = call._replace(k_start=call.k_start + INT(0, 10**6, 0, device=device))
    ops_paged.run(started)
    assert any("cache.k_start" in error for error in strobe.last_errors())
    again = ops_paged.run(call)
    assert all(map(torch.equal, exact, again)) and strobe.last_errors() == []


def test_a_broken_promise_is_nan_and_reported(device, kernel):
    call = PAGED["mixed"].build(device, seed=1, kernel=kernel)
    out, lse = ops_paged.run(call._replace(max_seqlen_q=3))
    assert out[:40].isnan().all() and lse[:, :40].isnan().all()
    assert any("max_seqlen_q" in error for error in strobe.last_errors())
    other = ops_paged.run(call)
    torch.testing.assert_close(out[40:], other[0][40:])
    torch.testing.assert_close(lse[:, 40:], other[1][:, 40:])


@pytest.mark.gpu
@pytest.mark.parametrize("offsets", [(0, 50, 40, 44, 44), (-5, 40, 41, 41, 44), (0, 40, 41, 41, 10**6)])
def test_offsets_that_fall_are_reported(offsets):
    call = PAGED["mixed"].build("cuda", seed=1, kernel="portable")
    ops_paged.run(call._replace(cu_seqlens_q=INT(*offsets, device="cuda")))
    assert any("cu_seqlens_q" in error for error in strobe.last_errors())


@pytest.mark.parametrize("offsets", [(0, 50, 40, 44, 44), (-5, 40, 41, 41, 44), (0, 40, 41, 41, 10**6)])
def test_offsets_that_fall_raise_on_a_cpu(offsets):
    call = PAGED["mixed"].build(seed=1)
    with pytest.raises(strobe.InvalidProblem, match="cu_seqlens_q: got offset"):
        ops_paged.run(call._replace(cu_seqlens_q=INT(*offsets)))
