"""Check context parallelism over NCCL on all GPUs of this machine: results beside one GPU's, bits, and no wait of the
host in a step.

    python -m tests.distributed.on_gpus
"""

from __future__ import annotations

import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

import strobe
from strobe.distributed import context_parallel, problems, warmup

BATCH, HEADS, HEADS_KV, HEAD_DIM = 2, 8, 4, 64
EVEN, ODD = 1024, 1031  # bounds of EVEN are multiples of 16, so that fewer kernels are compiled
WAYS = {
    "keys": {"scheme": "keys"},
    "keys, own first": {"scheme": "keys", "balance": "contiguous", "overlap": True},
    "heads": {"scheme": "heads"},
}


def _masks(seqlen: int) -> dict[str, strobe.Mask]:
    if seqlen == ODD:
        return {"causal, odd": strobe.causal()}
    ids = (torch.arange(seqlen, device="cuda", dtype=torch.int32) // 320).expand(BATCH, -1)
    return {
        "causal": strobe.causal(),
        "window": strobe.window(96, 0),
        "causal documents": strobe.causal() & strobe.documents(ids),
    }


def _step(tensors, sinks, **options):
    leaves = [t.detach().requires_grad_() for t in (*tensors[:3], sinks)]
    out = strobe.attention(*leaves[:3], sinks=leaves[3], deterministic=True, **options)
    return (out.detach(), *torch.autograd.grad(out, leaves, tensors[3]))


def _check(rank: int, world: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    failed = _failed(EVEN, WAYS) + _failed(ODD, {"keys": WAYS["keys"]})
    dist.barrier()
    if rank == 0:
        print("failed" if failed else "all hold", failed, strobe.last_errors(), flush=True)
    os._exit(1 if failed else 0)


def _failed(seqlen: int, ways: dict) -> list[tuple[str, str]]:
    """The masks and ways whose results are wrong or differ between calls. Rank 0 prints each."""
    began, rank, plans, called = time.monotonic(), dist.get_rank(), {}, []
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(BATCH, seqlen, heads, HEAD_DIM) for heads in (HEADS, HEADS_KV, HEADS_KV, HEADS)]
    whole = [torch.randn(s, generator=generator, device="cuda").bfloat16() for s in shapes]
    sinks = torch.randn(HEADS, generator=generator, device="cuda")
    masks, failed = _masks(seqlen), []
    for name, mask in masks.items():
        for way, settings in ways.items():
            plan = context_parallel(**settings).plan(mask, seqlen=seqlen, heads_q=HEADS, heads_kv=HEADS_KV)
            plans[name, way] = plan
            called += problems(plan, *map(plan.shard, whole[:3]), sinks=sinks, deterministic=True)
    warmup(called)
    if rank == 0:
        print(f"{seqlen} rows: kernels compiled in {time.monotonic() - began:.0f} s", flush=True)
    for (name, way), plan in plans.items():
        hidden = ~masks[name].dense(seqlen, seqlen, "cuda")[:, None]
        expected = _eager([t.double() for t in whole], sinks.double(), hidden)
        eager = _eager(whole, sinks.bfloat16(), hidden)
        local = [plan.shard(t) for t in whole]
        _step(local, sinks, context_parallel=plan)
        torch.cuda.set_sync_debug_mode("error")
        results = _step(local, sinks, context_parallel=plan)
        torch.cuda.set_sync_debug_mode("default")
        same = all(map(torch.equal, results, _step(local, sinks, context_parallel=plan)))
        *parts, dsinks = results
        dist.all_reduce(dsinks)
        found = [*map(plan.unshard, parts), dsinks]
        ratios = []
        for ours, oracle, other in zip(found, expected, eager):
            allowed = 2 * (other.double() - oracle).abs().max() + 2**-8 * oracle.abs().max()
            ratios.append(round(float((ours.double() - oracle).abs().max() / allowed), 3))
        if rank == 0:
            told = f"error / allowed of out, dq, dk, dv, dsinks {ratios}, same bits {same}"
            print(f"{time.monotonic() - began:3.0f} s {name:18} {way:16} {told}", flush=True)
        if not same or not max(ratios) <= 1:
            failed.append((name, way))
    return failed


def _eager(tensors, sinks, hidden):
    q, k, v = (t.detach().requires_grad_() for t in tensors[:3])
    sinks = sinks.detach().requires_grad_()
    keys, values = (t.repeat_interleave(HEADS // HEADS_KV, 2) for t in (k, v))
    seqlen = q.shape[1]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) * HEAD_DIM**-0.5
    scores = scores.masked_fill(hidden, -torch.inf)
    logits = torch.cat([scores, sinks[None, :, None, None].expand(BATCH, -1, seqlen, 1)], -1)
    out = torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1)[..., :-1], values)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v, sinks), tensors[3].to(out.dtype)))


if __name__ == "__main__":
    count = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_check, args=(count, folder), nprocs=count)
