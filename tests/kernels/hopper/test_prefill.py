"""Packed queries over a cache on a Hopper GPU, by the Hopper forward and, in sequences of few tokens, by the decode. On
CPUs their source runs in the simulator (test_prefill_simulated.py).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import strobe
from strobe.kernels.hopper import copy_config
from strobe.kernels.runtime.launch_cache import CACHE
from strobe.ops import paged as ops_paged
from strobe.problem.paged import PagedCall
from strobe.testing import FAMILIES, assert_kernel
from strobe.testing.paged import PagedCase, assert_paged_as_good_as
from tests.kernels.hopper.prefill_cases import CASES, COPY_CASES, FP8_CASES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="made for sm_90"
    ),
]
INT = lambda *values: torch.tensor(values, dtype=torch.int32, device="cuda")


def runs_alike(call: PagedCall) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of four calls at the same addresses, compiled, recorded and replayed. Their bits are equal."""
    CACHE.clear()
    assert_kernel(ops_paged.decide(call), "hopper")
    first = ops_paged.run(call)
    assert_paged_as_good_as(first, call)
    for _ in range(3):
        assert all(torch.equal(one, other) for one, other in zip(ops_paged.run(call), first))
    CACHE.clear()
    return first[0], first[1]


@pytest.mark.parametrize("n, name", list(enumerate(CASES)), ids=list(CASES))
def test_as_good_as_the_oracle(n, name):
    runs_alike(CASES[name].build("cuda", (torch.bfloat16, torch.float16)[n % 2], FAMILIES[n % 5], n, "hopper"))
    assert bool(strobe.last_errors()) == bool(CASES[name].lost)


@pytest.mark.parametrize("n, name", list(enumerate(FP8_CASES)), ids=list(FP8_CASES))
def test_8_bit_keys_as_good_as_the_oracle(n, name):
    runs_alike(FP8_CASES[name].build("cuda", (torch.bfloat16, torch.float16)[n % 2], FAMILIES[n % 5], n, "hopper"))
    assert bool(strobe.last_errors()) == bool(FP8_CASES[name].lost)


@pytest.mark.parametrize("n, name", list(enumerate(COPY_CASES)), ids=list(COPY_CASES))
def test_copied_keys_as_good_as_the_oracle(n, name, monkeypatch):
    monkeypatch.setattr(copy_config, "LEAST_ROWS", 17)
    monkeypatch.setattr(copy_config, "LEAST_CAPACITY", 0)
    call = COPY_CASES[name].build("cuda", (torch.bfloat16, torch.float16)[n % 2], FAMILIES[n % 5], n, "hopper")
    assert ops_paged.decide(call).forward.config.copy is not None
    runs_alike(call)
    assert bool(strobe.last_errors()) == bool(COPY_CASES[name].lost)


LENGTHS, NEWS = (2100, 1, 700, 333, 0, 64), (700, 1, 16, 17, 0, 64)


@pytest.mark.parametrize("left", [-1, 200])
@pytest.mark.parametrize(
    "page_size, fp8",
    [*((size, False) for size in (0, 8, 16, 32, 64, 128, 256)), *((size, True) for size in (0, 1, 16, 48, 64))],
)
def test_1_to_700_tokens(page_size, fp8, left):
    case = PagedCase(
        "long", LENGTHS, 0, (8, 2), 128, page_size=page_size, news=NEWS, left=left, sinks=left > 0, padding=9, fp8=fp8
    )
    runs_alike(case.build("cuda", torch.bfloat16, "normal", page_size, "hopper"))
    assert strobe.last_errors() == []


@pytest.mark.parametrize("fp8", [False, True])
def test_a_graph_replays_with_other_lengths_offsets_and_pages(fp8):
    """Of 8-bit keys, those of other sequences are copied."""
    case = PagedCase("long", LENGTHS, 0, (8, 2), 128, page_size=16, news=NEWS, fp8=fp8)
    first = case.build("cuda", torch.bfloat16, "normal", 1, "hopper")
    other = replace(case, lengths=(90, 2100, 40, 1, 800, 17), news=(90, 520, 3, 1, 179, 5)).build(
        "cuda", torch.bfloat16, "normal", 2, "hopper"
    )
    assert [tensor.shape for tensor in first.tensors] == [tensor.shape for tensor in other.tensors]
    ops_paged.run(first)
    expected = [ops_paged.run(call) for call in (other, first)]
    moved = ("q", "k", "v", "seqlens", "cu_seqlens_q", "page_table", *(("k_scale", "v_scale") if fp8 else ()))
    held = first._replace(**{name: getattr(first, name).clone() for name in moved})
    ops_paged.run(held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = ops_paged.run(held)
    for call, wanted in zip((other, first), expected):
        for name in moved:
            getattr(held, name).copy_(getattr(call, name))
        for _ in range(2):
            graph.replay()
            assert all(torch.equal(one, two) for one, two in zip(results, wanted))
    assert strobe.last_errors() == []


def test_out_and_queries_at_any_address():
    """TMA needs multiples of 16 bytes: queries are copied, and out is copied back."""
    call = CASES["d128"].build("cuda", torch.bfloat16, "normal", 1, "hopper")
    expected = ops_paged.run(call)[0]
    room = torch.empty(call.q.numel() + 1, dtype=call.q.dtype, device="cuda")[1:].view(call.q.shape)
    room.copy_(call.q)
    for _ in range(3):
        assert torch.equal(ops_paged.run(call._replace(q=room))[0], expected)
    out = torch.empty_like(room.flatten().new_empty(room.numel() + 1))[1:].view(room.shape)
    assert torch.equal(ops_paged.run(call, out)[0], expected) and torch.equal(out, expected)
    wide = torch.zeros(*out.shape[:2], 2 * out.shape[2], dtype=out.dtype, device="cuda")
    assert torch.equal(ops_paged.run(call, wide[..., : out.shape[2]])[0], expected)
    assert not wide[..., out.shape[2] :].any()


def test_lengths_and_pages_out_of_range_are_reported():
    call = CASES["mixed"].build("cuda", torch.bfloat16, seed=1, kernel="hopper")
    exact = ops_paged.run(call)
    ops_paged.run(call._replace(seqlens=call.seqlens + INT(10**6, 0, 0, 0)))
    assert any("cache.seqlens" in error for error in strobe.last_errors())
    offsets = call.cu_seqlens_q + INT(0, 10, 0, 0, 0)
    ops_paged.run(call._replace(cu_seqlens_q=offsets))
    assert any("cu_seqlens_q" in error for error in strobe.last_errors())
    assert call.page_table is not None
    table = call.page_table.clone()
    table[0, 1] = 10**9
    ops_paged.run(call._replace(page_table=table))
    assert any("page_table" in error for error in strobe.last_errors())
    out, lse = ops_paged.run(call._replace(max_seqlen_q=39))
    assert out[:40].isnan().all() and lse[:, :40].isnan().all() and not out[40:].isnan().any()
    assert any("max_seqlen_q" in error for error in strobe.last_errors())
    assert all(map(torch.equal, ops_paged.run(call), exact)) and strobe.last_errors() == []
