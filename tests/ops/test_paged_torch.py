"""attention_paged and torch: bad calls, opcheck, compile, graphs, autocast, vmap, out, and the cache of selections."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import strobe
from strobe.ops import decode as ops_decode
from strobe.ops import paged as ops_paged
from strobe.problem.paged import PagedCall, PagedProblem
from strobe.testing.paged import PAGED

INT = lambda *values, device="cpu": torch.tensor(values, dtype=torch.int32, device=device)


def draw(*shape, seed=0, dtype=torch.float32, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)


def _cache(device: str = "cpu", dtype: torch.dtype = torch.float32) -> strobe.PagedCache:
    pools = (draw(9, 4, 2, 8, seed=seed, dtype=dtype, device=device) for seed in (1, 2))
    return strobe.PagedCache(*pools, INT([3, 5, 1], [0, 2, 4], device=device), INT(11, 6, device=device))


Q, CACHE, OFFSETS = draw(5, 4, 8), _cache(), INT(0, 3, 4)


def attend(q=Q, cache=CACHE, offsets=OFFSETS, **options):
    return lambda: strobe.attention_paged(q, cache, cu_seqlens_q=offsets, **options)


BAD = {
    "q is a list": (attend([1.0]), "q: got list"),
    "q of rank 4": (attend(Q[None]), "q: got shape"),
    "q of ints": (attend(Q.long()), "q: got torch.int64"),
    "q of another dtype": (attend(Q.bfloat16()), "cache.k_pages: got torch.float32"),
    "q spread out": (attend(torch.stack([Q, Q], -1)[..., 0]), "q: got stride 2"),
    "3 heads over 2": (attend(Q[:, :3]), "cache.k_pages: got 2 heads"),
    "another width": (attend(Q[..., :5]), "cache.k_pages: got head dimension 8"),
    "no cache": (attend(cache=CACHE[:2]), "cache: got tuple"),
    "offsets are a list": (attend(offsets=[0, 3, 4]), "cu_seqlens_q: got list"),
    "offsets of floats": (attend(offsets=OFFSETS.float()), "cu_seqlens_q: got torch.float32"),
    "too few offsets": (attend(offsets=OFFSETS[:2]), r"cu_seqlens_q: got shape \[2\]"),
    "offsets of rank 2": (attend(offsets=OFFSETS[None]), r"cu_seqlens_q: got shape \[1, 3\]"),
    "offsets elsewhere": (attend(offsets=OFFSETS.to("meta")), "cu_seqlens_q: got device meta"),
    "max_seqlen_q is a tensor": (attend(max_seqlen_q=torch.tensor([3.0, 4.0])), "max_seqlen_q: got"),
    "max_seqlen_q below 0": (attend(max_seqlen_q=-1), "max_seqlen_q: got -1"),
    "return_lse is a number": (attend(return_lse=1), "return_lse: got int"),
    "scales of 16-bit keys": (attend(cache=CACHE._replace(k_scale=torch.ones(9, 4, 2))), "cache.k_scale: got a scale"),
    "softmax_scale": (attend(softmax_scale=0.1), "softmax_scale"),
    "out of another shape": (attend(out=torch.empty(4, 4, 8)), "out: got shape"),
    "out in the cache": (attend(out=CACHE.k_pages.view(-1, 4, 8)[:5]), "out: got memory that"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_named(name):
    run, words = BAD[name]
    with pytest.raises((strobe.InvalidProblem, TypeError), match=words):
        run()


def test_scales_of_another_shape():
    pages = torch.zeros(9, 4, 2, 8).to(torch.float8_e4m3fn)
    wrong = CACHE._replace(k_pages=pages, v_pages=pages, k_scale=torch.ones(9, 4, 1))
    with pytest.raises(strobe.InvalidProblem, match=r"or \[9, 4, 2\], one a key and head"):
        strobe.attention_paged(Q, wrong, cu_seqlens_q=OFFSETS)
    with pytest.raises(strobe.InvalidProblem, match=r"torch.float32 \[2\], one a key head;"):
        strobe.attention_decode(Q[None, :2].expand(2, 2, 4, 8), wrong._replace(k_scale=torch.ones(9, 4, 2)))


def test_opcheck():
    paged = PagedCall(Q, *CACHE[:2], CACHE.seqlens, OFFSETS, CACHE.page_table, sinks=torch.zeros(4), right=0)
    k = draw(2, 16, 2, 8)
    dense = PagedCall(Q, k, k, INT(9, 16), OFFSETS, k_start=INT(1, 0), left=3, right=0, softcap=2.0, max_seqlen_q=3)
    for call in (paged, dense):
        torch.library.opcheck(ops_paged.PAGED, tuple(call[:-1]))
        torch.library.opcheck(ops_paged.PAGED_OUT, (torch.empty_like(Q), *call[:-1]))


def test_a_step_compiles_whole(device):
    """For other numbers of tokens and sequences, too."""

    def step(q, cache, offsets):
        out, lse = strobe.attention_paged(
            q, cache, cu_seqlens_q=offsets, max_seqlen_q=4, window=(7, 0), return_lse=True
        )
        return out, lse, strobe.partial_attention_paged(q, cache, cu_seqlens_q=offsets).lse

    cache = _cache(device)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for offsets in (INT(0, 3, 4, device=device), INT(0, 0, 2, device=device)):
        for total in (4, 6):
            q = draw(total, 4, 8, device=device)
            assert all(map(torch.equal, compiled(q, cache, offsets), step(q, cache, offsets)))


def test_inductor_runs_it():
    step = lambda q, cache: strobe.attention_paged(q, cache, cu_seqlens_q=OFFSETS) + 1
    with torch._inductor.config.patch(compile_threads=1):
        assert torch.equal(torch.compile(step, fullgraph=True)(Q, CACHE), step(Q, CACHE))


def test_out_may_be_q(device, kernel):
    q, cache, offsets = Q.to(device), _cache(device), OFFSETS.to(device)
    expected = strobe.attention_paged(q, cache, cu_seqlens_q=offsets, kernel=kernel)
    given = torch.empty(5, 6, 12, device=device)[:, :4, :8]
    assert strobe.attention_paged(q, cache, cu_seqlens_q=offsets, out=given, kernel=kernel) is given
    held = q.clone()
    strobe.attention_paged(held, cache, cu_seqlens_q=offsets, out=held, kernel=kernel)
    assert torch.equal(held, expected) and torch.equal(given, expected)


def test_gradients_are_refused():
    with pytest.raises(strobe.UnsupportedProblem, match="gradients through attention_paged"):
        strobe.attention_paged(Q.clone().requires_grad_(), CACHE, cu_seqlens_q=OFFSETS)
    with torch.no_grad():
        strobe.attention_paged(Q.clone().requires_grad_(), CACHE, cu_seqlens_q=OFFSETS)


def test_autocast_follows_the_cache():
    with torch.autocast("cpu", torch.bfloat16):
        half = strobe.attention_paged(Q, _cache(dtype=torch.bfloat16), cu_seqlens_q=OFFSETS)
        assert half.dtype == torch.bfloat16
        assert strobe.attention_paged(Q, CACHE, cu_seqlens_q=OFFSETS).dtype == torch.float32


def test_vmap_runs_one_entry_after_the_other():
    many = draw(3, 5, 4, 8, seed=4)
    run = lambda q: strobe.attention_paged(q, CACHE, cu_seqlens_q=OFFSETS)
    assert torch.equal(torch.vmap(run)(many), torch.stack([run(q) for q in many]))


def test_int64_is_converted():
    wide = CACHE._replace(page_table=CACHE.page_table.long(), seqlens=CACHE.seqlens.long())
    assert torch.equal(attend(cache=wide, offsets=OFFSETS.long())(), attend()())


def test_small_tensors_need_not_be_contiguous():
    spread = torch.stack([OFFSETS, OFFSETS], -1)[:, 0]
    table = torch.stack([CACHE.page_table] * 2, -1)[..., 0]
    assert torch.equal(attend(cache=CACHE._replace(page_table=table), offsets=spread)(), attend()())


@pytest.mark.parametrize("name", ["mixed_promised", "rows_left_padded", "fp8_token_scales"])
def test_a_problem_has_an_example(name, device):
    call = PAGED[name].build(device, torch.float32)
    problem = PagedProblem.from_call(call)
    assert PagedProblem.from_call(problem.example(torch.device(device))) == replace(problem)
    strobe.warmup([problem], device)


@pytest.mark.gpu
@pytest.mark.parametrize("promised", [None, 8], ids=["any mix", "few"])
def test_one_graph_serves_other_lengths_offsets_and_pages(promised):
    """64 rows of 8 sequences: prefills, decodes and padding in turn, each compared with the call outside the graph."""
    g = torch.Generator().manual_seed(0)
    pools = [torch.randn(200, 16, 2, 64, generator=g).to("cuda", torch.bfloat16) for _ in range(2)]
    q, table = draw(64, 8, 64, dtype=torch.bfloat16, device="cuda"), INT(*[[0] * 20] * 8, device="cuda")
    lengths, offsets = (
        torch.zeros(8, dtype=torch.int32, device="cuda"),
        torch.zeros(9, dtype=torch.int32, device="cuda"),
    )
    cache = strobe.PagedCache(*pools, table, lengths)
    run = lambda: strobe.attention_paged(q, cache, cu_seqlens_q=offsets, max_seqlen_q=promised, return_lse=True)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run()
    for turn in range(6):
        news = torch.randint(0, 9 if promised or turn % 2 else 3, (8,), generator=g)
        if not promised and turn % 3 == 0:
            news[turn] = 64 - news.sum() + news[turn]
        table.copy_(torch.randperm(200, generator=g)[:160].view(8, 20).int())
        lengths.copy_(torch.maximum(torch.randint(0, 321, (8,), generator=g), news).int())
        offsets.copy_(torch.nn.functional.pad(news.cumsum(0), (1, 0)).int())
        graph.replay()
        expected = run()
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
        exact = strobe.attention_paged(
            q.cpu().float(), strobe.PagedCache(*(t.cpu().float() for t in pools), table.cpu(), lengths.cpu()),
            cu_seqlens_q=offsets.cpu(),
        )  # fmt: skip
        torch.testing.assert_close(out.cpu().float(), exact, rtol=2e-2, atol=2e-2)
    assert strobe.last_errors() == []


@pytest.mark.gpu
def test_calls_are_replayed_and_equal():
    """The third call at the same addresses takes the recorded launches; other lengths change the result, not these."""
    call = PAGED["mixed"].build("cuda", torch.bfloat16, seed=3)
    first = ops_paged.run(call)
    for _ in range(4):
        again = ops_paged.run(call)
        assert all(map(torch.equal, first, again))
        del again


def test_out_is_written_without_the_dispatcher_and_checked(device, kernel):
    """A repeated call with out= checks the memory, shape and strides of out like the first call."""
    q = torch.randn(6, 4, 8, device=device)
    k = torch.randn(2, 16, 2, 8, device=device)
    lengths, offsets = INT(9, 16).to(device), INT(0, 4, 6).to(device)
    cache = strobe.DenseCache(k, k.clone(), lengths)
    run = lambda q, out: strobe.attention_paged(q, cache, cu_seqlens_q=offsets, kernel=kernel, out=out)
    wanted = strobe.attention_paged(q, cache, cu_seqlens_q=offsets, kernel=kernel)
    room = torch.full((6, 4, 16), torch.nan, device=device)
    for _ in range(3):
        out = torch.full_like(q, torch.nan)
        version = out._version
        assert run(q, out) is out and torch.equal(out, wanted) and out._version > version
        assert torch.equal(run(q, room[..., :8]), wanted) and room[..., 8:].isnan().all()
        mine = q.clone()
        assert run(mine, mine) is mine and torch.equal(mine, wanted)
        for wrong, name in ((torch.empty(6, 4, 9, device=device), "shape"), (torch.empty_like(q).half(), "float16")):
            with pytest.raises(strobe.InvalidProblem, match=name):
                run(q, wrong)
        with pytest.raises(strobe.InvalidProblem, match="out"):
            run(q, k.view(-1)[: q.numel()].view(q.shape))
    with pytest.raises(strobe.UnsupportedProblem, match="gradients"):
        run(q, torch.empty_like(q).requires_grad_())


def test_a_replay_writes_to_the_given_out(monkeypatch):
    """The cached launch of out's address runs, and the version of out increases. An out with other strides has no
    cached launch.
    """
    seen = []

    class Launches:
        @staticmethod
        def get(key):
            return lambda: seen.append(key) or True

    monkeypatch.setattr(ops_decode, "launches_here", lambda plan, q: Launches)
    monkeypatch.setattr(ops_decode, "empty_here", lambda shape, strides, dtype: torch.empty(shape, dtype=dtype))
    out = torch.full_like(Q, 7.0)
    version = out._version
    assert strobe.attention_paged(Q, CACHE, cu_seqlens_q=OFFSETS, out=out) is out
    assert len(seen) == 1 and out.data_ptr() in seen[0] and out._version > version and (out == 7).all()
    room = torch.full((*Q.shape[:2], 2 * Q.shape[2]), 7.0)[..., : Q.shape[2]]
    strobe.attention_paged(Q, CACHE, cu_seqlens_q=OFFSETS, out=room)
    assert len(seen) == 1 and not (room == 7).any()
