"""Packed sequences under a plan, with other offsets in each step."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import strobe
from strobe.distributed import Plan, attention, context_parallel
from strobe.distributed.plan import MOST_MASKS
from tests.processes import WORLD, together

pytestmark = [
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
]
SEQLEN, HEADS, HEAD_DIM = 32, 2, 8
STEPS = MOST_MASKS + 10
FIRST = [0, 4, 9, SEQLEN]


def _offsets(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def _inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SEQLEN, HEADS, HEAD_DIM, generator=generator) for _ in range(3)]


def _planned(cu_seqlens: torch.Tensor, **settings) -> tuple[Plan, list[torch.Tensor]]:
    """A causal plan of packed sequences, and this rank's rows."""
    plan = context_parallel(**settings).plan_varlen(cu_seqlens, causal=True, seqlen=SEQLEN, heads_q=HEADS)
    return plan, [plan.shard(t, 0) for t in _inputs()]


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU, where ranks compare only the first call with given sizes."""

    is_cuda = True


def _compared(rank: int, folder: str) -> None:
    """The calls (step, layer) in which this rank waits for the others to compare; here it does not wait."""
    calls, now, agree = [], (0, 0), attention.agree
    agree_on_gpu = lambda call, *rest: agree(call._replace(q=call.q.as_subclass(OnGpu)), *rest)
    note = lambda *_: calls.append(now)
    first = _offsets(*FIRST)
    plan, local = _planned(first, scheme="keys", balance="head-tail")
    with patch.object(attention, "agree", agree_on_gpu), patch.object(attention, "check_agreement", note):
        for step in range(STEPS):
            cu_seqlens = _offsets(0, 1 + step % (SEQLEN - 1), SEQLEN) if step else first
            for layer in range(2):
                now = step, layer
                strobe.attention_varlen(*local, cu_seqlens_q=cu_seqlens, causal=True, context_parallel=plan)
    torch.save(calls, Path(folder) / f"{rank}.pt")


def test_all_ranks_compare_the_same_calls_whatever_else_a_rank_keeps(tmp_path):
    """A rank that compares alone waits forever. The pieces of ranks differ, and so does what they keep."""
    together(_compared, tmp_path, str(tmp_path))
    assert [torch.load(tmp_path / f"{rank}.pt") for rank in range(WORLD)] == [[(s, 0) for s in range(STEPS)]] * WORLD


def test_the_plans_own_offsets_stay_and_those_of_old_steps_do_not(alone):
    first = _offsets(*FIRST)
    plan, qkv = _planned(first)
    attend = lambda cu_seqlens: strobe.attention_varlen(*qkv, cu_seqlens_q=cu_seqlens, context_parallel=plan)
    causal = attend(first)
    steps = [_offsets(0, 1 + step % (SEQLEN - 1), SEQLEN) for step in range(STEPS)]
    for cu_seqlens in steps:
        attend(cu_seqlens)
    oldest, newest = (weakref.ref(steps[place]) for place in (0, -1))
    del steps, cu_seqlens
    gc.collect()
    assert oldest() is None and newest() is not None
    assert torch.equal(attend(first), causal)


@pytest.mark.parametrize("makes_plan", [True, False])
def test_offsets_written_in_inference_mode_are_read_again(makes_plan, alone):
    """Tensors made in inference mode have no version, which tells other contents of a tensor."""
    with torch.inference_mode():
        cu_seqlens = _offsets(*FIRST)
        plan, qkv = _planned(cu_seqlens if makes_plan else _offsets(0, SEQLEN))
        for numbers in (FIRST, [0, 11, 20, SEQLEN], FIRST):
            cu_seqlens.copy_(_offsets(*numbers))
            options = {"cu_seqlens_q": cu_seqlens, "causal": True}
            found = strobe.attention_varlen(*qkv, context_parallel=plan, **options)
            torch.testing.assert_close(found, strobe.attention_varlen(*qkv, **options), atol=1e-6, rtol=1e-5)


def test_the_plans_offsets_take_its_mask_in_inference_mode(alone):
    with torch.inference_mode():
        cu_seqlens = _offsets(*FIRST)
        plan, qkv = _planned(cu_seqlens)
        found = strobe.attention_varlen(*qkv, cu_seqlens_q=cu_seqlens, context_parallel=plan)
        whole = strobe.attention_varlen(*qkv, cu_seqlens_q=cu_seqlens, causal=True)
    torch.testing.assert_close(found, whole, atol=1e-6, rtol=1e-5)
