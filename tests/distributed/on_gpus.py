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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel as torch_context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

import strobe
from strobe.distributed import context_parallel, problems, warmup
from strobe.integrations import sdpa

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
    failed = _failed(EVEN, WAYS) + _failed(ODD, {"keys": WAYS["keys"]}) + _torch_ring(world)
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


def _torch_ring(world: int) -> list[tuple[str, str]]:
    """PyTorch's context_parallel on strobe's kernels, beside strobe on one GPU."""
    try:
        from torch.distributed.tensor.experimental._attention import context_parallel_unshard
    except ImportError:
        from torch.distributed.tensor.experimental._context_parallel._attention import context_parallel_unshard
    generator = torch.Generator("cuda").manual_seed(0)
    shape = BATCH, HEADS, EVEN, HEAD_DIM
    whole = [torch.randn(shape, generator=generator, device="cuda").bfloat16() for _ in range(4)]
    buffers = [t.clone() for t in whole]
    mesh = init_device_mesh("cuda", (world,))
    with sdpa.enable(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        before = sum(sdpa.served.values())
        with torch_context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
            leaves = [t.detach().clone().requires_grad_() for t in buffers[:3]]
            out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
            results = [out.detach(), *torch.autograd.grad(out, leaves, buffers[3].clone())]
            found = context_parallel_unshard(mesh, results, [2] * 4)
        served = sum(sdpa.served.values()) - before
    leaves = [t.transpose(1, 2).detach().requires_grad_() for t in whole[:3]]
    out = strobe.attention(*leaves, causal=True)
    expected = out, *torch.autograd.grad(out, leaves, whole[3].transpose(1, 2))
    pairs = zip(found, (t.transpose(1, 2).float() for t in expected))
    errors = [round(float((ours.float() - other).abs().max() / other.abs().max()), 4) for ours, other in pairs]
    if dist.get_rank() == 0:
        print(
            f"torch's context_parallel: {served} calls on strobe, largest differences to one GPU {errors}", flush=True
        )
    return [] if served and max(errors) < 0.02 else [("causal", "torch's ring")]


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
