"""Custom scores and masks, and dropout, under a plan see positions of the whole sequence and heads of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import strobe
from strobe.distributed import context_parallel
from strobe.distributed.mods import moved
from strobe.mods.program import Program
from tests.processes import together

pytestmark = [
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
]
SEQLEN, HEADS, HEADS_KV, HEAD_DIM = 23, 6, 3, 4
WAYS = {
    "keys": {"scheme": "keys"},
    "keys, head-tail": {"scheme": "keys", "balance": "head-tail"},
    "keys, own first": {"scheme": "keys", "balance": "contiguous", "overlap": True},
    "heads": {"scheme": "heads"},
}


def _table() -> torch.Tensor:
    return torch.linspace(-1, 1, HEADS * SEQLEN, dtype=torch.float64).view(HEADS, SEQLEN).requires_grad_()


def _relative(table):
    return {"score_mod": lambda score, b, h, q, k: score + table[h, (q - k).abs()] * (b + 1)}


def _alibi(table):
    return {"score_mod": strobe.alibi(table[:, 3]), "causal": True}


def _every_third(table):
    seen = strobe.mask_mod(lambda b, h, q, k: (q - k + h) % 3 == 0)
    return {"mask": strobe.causal() & seen, "score_mod": lambda score, b, h, q, k: score * table[h, q]}


def _either(table):
    ids = (torch.arange(SEQLEN, dtype=torch.int32) // 5)[None].expand(2, -1)
    return {"mask": strobe.documents(ids) | strobe.window(3, 0)}


def _prefix(table):
    return {"mask": strobe.prefix_causal(7), "score_mod": lambda score, b, h, q, k: score + table[h, k]}


def _dropout(table):
    return {"causal": True, "dropout_p": 0.3, "dropout_seed": 2**40 + 7}


def _dropout_in_a_window(table):
    return _relative(table) | {"mask": strobe.window(6, 2), "dropout_p": 0.2, "dropout_seed": torch.tensor([3])}


CASES = {
    one.__name__: one for one in (_relative, _alibi, _every_third, _either, _prefix, _dropout, _dropout_in_a_window)
}
OFFSETS = torch.tensor([0, 9, 9, 20, SEQLEN - 2], dtype=torch.int32)
PACKED = {
    "scores": lambda table: {"score_mod": lambda score, b, h, q, k: score * (b + 1) + table[h, q] - table[h, k]},
    "causal alibi": lambda table: {"score_mod": strobe.alibi(table[:, 3]), "causal": True},
    "mask": lambda table: {
        "mask": strobe.window(6, 4) & strobe.mask_mod(lambda b, h, q, k: (q + 2 * k + h + b) % 3 > 0),
        "score_mod": lambda score, b, h, q, k: score + table[h, k],
    },
}


def _drawn(plan, local, rank):
    """The largest difference to the call with the seed that rank 0 draws, where each rank draws another."""
    torch.manual_seed(rank + 1)
    ours = strobe.attention(*local[:3], dropout_p=0.4, context_parallel=plan)
    torch.manual_seed(1)
    seed = torch.randint(0, 2**62, (1,))
    return float(
        (ours - strobe.attention(*local[:3], dropout_p=0.4, dropout_seed=seed, context_parallel=plan)).abs().max()
    )


def _inputs(batch=2):
    generator = torch.Generator().manual_seed(4)
    heads = HEADS, HEADS_KV, HEADS_KV, HEADS
    q, k, v, dout = (torch.randn(batch, SEQLEN, h, HEAD_DIM, generator=generator).double() for h in heads)
    return q, k, v, dout, torch.linspace(-1, 1, HEADS, dtype=torch.float64)


def _attended(name, tensors, **options):
    """out, and the gradients of q, k, v, sinks and the table; zeros for a table that the case does not read."""
    *qkv, dout, sinks = tensors
    table = _table()
    leaves = [t.detach().requires_grad_() for t in (*qkv, sinks)] + [table]
    if name in PACKED:
        more: dict[str, Any] = {"sinks": leaves[3], "cu_seqlens_q": OFFSETS, **PACKED[name](table), **options}
        out = strobe.attention_varlen(*(t[0] for t in leaves[:3]), **more)[None]
    else:
        out = strobe.attention(*leaves[:3], sinks=leaves[3], **CASES[name](table), **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout, materialize_grads=True)]


def _process(rank: int, folder: str) -> None:
    found = {}
    for way, settings in WAYS.items():
        for name in CASES:
            plan = context_parallel(**settings).plan(seqlen=SEQLEN, heads_q=HEADS, heads_kv=HEADS_KV)
            *whole, sinks = _inputs()
            results = _attended(name, [*map(plan.shard, whole), sinks], context_parallel=plan)
            for gradient in results[4:]:
                dist.all_reduce(gradient)
            found[way, name] = [*map(plan.unshard, results[:4]), *results[4:]]
        for name in PACKED:
            sizes: dict[str, Any] = {"seqlen": SEQLEN, "heads_q": HEADS, "heads_kv": HEADS_KV}
            plan = context_parallel(**settings).plan_varlen(OFFSETS, **sizes)
            *whole, sinks = _inputs(1)
            results = _attended(name, [*map(plan.shard, whole), sinks], context_parallel=plan)
            for gradient in results[4:]:
                dist.all_reduce(gradient)
            found[way, name] = [*map(plan.unshard, results[:4]), *results[4:]]
        plan = context_parallel(**settings).plan(seqlen=SEQLEN, heads_q=HEADS, heads_kv=HEADS_KV)
        whole = _inputs()[:3]
        found[way, "drawn"] = _drawn(plan, [*map(plan.shard, whole)], rank)
    local = [plan.shard(t).float() for t in whole[:3]]
    try:  # a seed that differs
        strobe.attention(*local, dropout_p=0.5, dropout_seed=rank, context_parallel=plan)
    except strobe.InvalidProblem as error:
        found["seed"] = str(error)
    try:  # a function that differs on one rank
        strobe.attention(*local, score_mod=lambda score, *_: score * (rank + 1.5), context_parallel=plan)
    except strobe.InvalidProblem as error:
        found["other"] = str(error)
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.nightly)])
def found(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mods")
    together(_process, folder, str(folder), world=request.param)
    return torch.load(folder / "found.pt")


@pytest.mark.parametrize("name", [*CASES, *PACKED])
def test_functions_give_what_one_process_gives(name, found):
    expected = _attended(name, _inputs(1 if name in PACKED else 2))
    for way in WAYS:
        for what, ours, whole in zip(("out", "dq", "dk", "dv", "dsinks", "dtable"), found[way, name], expected):
            torch.testing.assert_close(
                ours, whole, atol=1e-11, rtol=0, msg=lambda text, at=(way, what): f"{at}: {text}"
            )


def test_functions_that_differ_between_ranks_are_refused(found):
    assert "functions on rank 1" in found["other"]


def test_seeds_that_differ_between_ranks_are_refused(found):
    assert "functions on rank 1" in found["seed"] and "seed 1" in found["seed"]


def test_a_seed_that_is_drawn_is_that_of_rank_0(found):
    assert {way: found[way, "drawn"] for way in WAYS} == dict.fromkeys(WAYS, 0.0)


def test_a_program_without_positions_keeps_its_nodes():
    text = "numbers f\nf input score\nf number 0\nf mul 0 1\nout 2"
    assert Program.parse(moved(text, 1)).nodes == Program.parse(text).nodes
