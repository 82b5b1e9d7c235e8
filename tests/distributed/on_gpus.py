"""Check context parallelism over NCCL on all GPUs of this machine: results beside one GPU's, bits, no wait of the host
in a step. Each row is printed as soon as it is measured.

    python -m tests.distributed.on_gpus              results
    python -m tests.distributed.on_gpus runs         results of one call for several runs of rows alone

`tests.distributed.killed` is about a rank that dies. Without GPUs four processes compute on the CPU over gloo.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel as torch_context_parallel
from torch.multiprocessing.spawn import spawn
from torch.nn.attention import SDPBackend, sdpa_kernel

import strobe
from strobe.distributed import Plan, context_parallel, problems, warmup
from strobe.distributed.keys import Keys, Rows
from strobe.integrations import sdpa
from strobe.mods.dropout import kept

BATCH, HEADS, HEADS_KV, HEAD_DIM = 2, 8, 4, 64
EVEN, ODD = 1024, 1031  # bounds of EVEN are multiples of 16, so that fewer kernels are compiled
WAYS = {
    "keys": {"scheme": "keys"},
    "keys, own first": {"scheme": "keys", "balance": "contiguous", "overlap": True},
    "heads": {"scheme": "heads"},
    "heads+keys": {"scheme": "heads+keys"},
}
KINDS = torch.float64, torch.bfloat16  # of what results are compared with
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Row(NamedTuple):
    """A plan, the name of its mask, and the length and scheme that it was made for."""

    seqlen: int
    mask: str
    way: str
    plan: Plan


def _masks(seqlen: int) -> dict[str, strobe.Mask]:
    ids = (torch.arange(seqlen, device=DEVICE, dtype=torch.int32) // 320).expand(BATCH, -1)
    found = {
        "causal": strobe.causal(),
        "causal documents": strobe.causal() & strobe.documents(ids),
        "window": strobe.window(96, 0),
    }
    return found if seqlen == EVEN else {name: found[name] for name in ("causal", "causal documents")}


def _step(tensors, sinks, **options):
    leaves = [t.detach().requires_grad_() for t in (*tensors[:3], sinks)]
    out = strobe.attention(*leaves[:3], sinks=leaves[3], deterministic=True, **options)
    return (out.detach(), *torch.autograd.grad(out, leaves, tensors[3]))


def _meet(rank: int, world: int, folder: str) -> None:
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    place = f"file://{folder}/store"
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", init_method=place, rank=rank, world_size=world)


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def _check(rank: int, world: int, folder: str) -> None:
    _meet(rank, world, folder)
    began, masks = time.monotonic(), {seqlen: _masks(seqlen) for seqlen in (EVEN, ODD)}
    tensors = {seqlen: _inputs(seqlen) for seqlen in masks}
    rows = _rows(masks, world)
    called = []
    for row in rows:
        whole, sinks = tensors[row.seqlen]
        called += problems(row.plan, *map(row.plan.shard, whole[:3]), sinks=sinks, deterministic=True)
    warmup(called)
    _say(f"{time.monotonic() - began:3.0f} s kernels of {len(rows)} plans compiled")
    failed, before = [], {}
    for row in rows:
        key = row.seqlen, row.mask
        if key not in before:
            before = {key: _expected(*tensors[row.seqlen], masks[row.seqlen][row.mask])}
        ratios, same = _compared(row.plan, *tensors[row.seqlen], before[key])
        told = f"error / allowed of out, dq, dk, dv, dsinks {ratios}, same bits {same}"
        _say(f"{time.monotonic() - began:3.0f} s {row.seqlen} {row.mask:16} {row.way:16} {told}")
        if not same or not max(ratios) <= 1:
            failed.append(row[:3])
    failed += _torch_ring(world) if DEVICE == "cuda" else []
    failed += _functions(began)
    failed += _runs(began)
    _end(failed)


def _check_runs(rank: int, world: int, folder: str) -> None:
    _meet(rank, world, folder)
    _end(_runs(time.monotonic()))


def _end(failed: list[tuple]) -> None:
    dist.barrier()
    _say(f"{'failed' if failed else 'all hold'} {failed} {strobe.last_errors()}")
    os._exit(1 if failed else 0)


def _runs(began: float) -> list[tuple]:
    """Several runs of rows a rank, which one call computes (`distributed.run_calls`); one batch entry."""
    failed: list[tuple] = []
    whole, sinks = [t[:1] for t in _inputs(EVEN)[0]], _inputs(EVEN)[1]
    for name in ("causal", "window"):
        mask = _masks(EVEN)[name]
        plan = context_parallel(scheme="keys", balance="tiles").plan(
            mask, seqlen=EVEN, heads_q=HEADS, heads_kv=HEADS_KV
        )
        hidden = ~mask.dense(EVEN, EVEN, DEVICE)[:, None]
        exact, eager = (_eager([t.to(kind) for t in whole], sinks.to(kind), hidden) for kind in KINDS)
        ratios, same = _compared(plan, whole, sinks, (exact, eager))
        launches = len(Rows(plan, (), whole[0], Keys.of(*whole[1:3], plan), None).together(plan.pieces.rest))
        failed += _say_ratios(began, (f"{name}, {len(plan.pieces.rest)} runs", f"{launches} calls"), ratios)
        failed += [] if same else [(name, "bits")]
    return failed


def _functions(began: float) -> list[tuple]:
    """Dropout, and ALiBi over packed sequences, beside PyTorch in float64 and eager."""
    failed, (whole, sinks) = [], _inputs(EVEN)
    position, p, slopes = torch.arange(EVEN, device=DEVICE), 0.25, torch.linspace(0.01, 0.3, HEADS, device=DEVICE)
    hidden = ~strobe.causal().dense(EVEN, EVEN, DEVICE)[:, None]
    index = (torch.arange(BATCH, device=DEVICE)[:, None, None, None], torch.arange(HEADS, device=DEVICE)[:, None, None])
    keep = kept(torch.tensor(7, device=DEVICE), p, *index, position[:, None], position) / (1 - p)
    for way in ("keys", "heads"):
        plan = context_parallel(**WAYS[way]).plan(strobe.causal(), seqlen=EVEN, heads_q=HEADS, heads_kv=HEADS_KV)
        local = [plan.shard(t) for t in whole]
        options: dict[str, Any] = {"dropout_p": p, "dropout_seed": 7, "context_parallel": plan}
        found = _whole(plan, _step(local, sinks, **options))
        exact = [_eager([t.to(kind) for t in whole], sinks.to(kind), hidden, keep) for kind in KINDS]
        failed += _say_ratios(began, ("dropout", way), _ratios(found, *exact))
    offsets = torch.tensor([0, 300, 301, 900, EVEN], dtype=torch.int32, device=DEVICE)
    documents = torch.searchsorted(offsets[1:], position, right=True)
    packed = [t[:1] for t in whole]
    hidden = hidden | (documents[:, None] != documents)
    bias = -slopes[:, None, None] * (position[:, None] - position).abs()
    plan = context_parallel(scheme="keys").plan_varlen(
        offsets, causal=True, seqlen=EVEN, heads_q=HEADS, heads_kv=HEADS_KV
    )
    local = [plan.shard(t) for t in packed]
    leaves = [t.detach().requires_grad_() for t in (*local[:3], sinks)]
    options: dict[str, Any] = {"cu_seqlens_q": offsets, "score_mod": strobe.alibi(slopes), "context_parallel": plan}
    out = strobe.attention_varlen(*(t[0] for t in leaves[:3]), sinks=leaves[3], **options)[None]
    found = _whole(plan, (out.detach(), *torch.autograd.grad(out, leaves, local[3])))
    exact = [_eager([t.to(kind) for t in packed], sinks.to(kind), hidden, 1.0, bias) for kind in KINDS]
    return failed + _say_ratios(began, ("packed, ALiBi", "keys"), _ratios(found, *exact))


def _whole(plan: Plan, results) -> list[torch.Tensor]:
    *parts, dsinks = results
    dist.all_reduce(dsinks)
    return [*map(plan.unshard, parts), dsinks]


def _ratios(found, exact, eager) -> list[float]:
    """Errors as shares of what is allowed: twice the error of eager PyTorch and a rounding."""
    ratios = []
    for ours, oracle, other in zip(found, exact, eager):
        allowed = 2 * (other.double() - oracle).abs().max() + 2**-8 * oracle.abs().max()
        ratios.append(round(float((ours.double() - oracle).abs().max() / allowed), 3))
    return ratios


def _say_ratios(began: float, name: tuple, ratios: list[float]) -> list[tuple]:
    told = f"error / allowed of out, dq, dk, dv, dsinks {ratios}"
    _say(f"{time.monotonic() - began:3.0f} s {EVEN} {name[0]:16} {name[1]:16} {told}")
    return [] if max(ratios) <= 1 else [name]


def _rows(masks: dict[int, dict[str, strobe.Mask]], world: int) -> list[Row]:
    """Plans of all masks, keys and heads first."""
    mesh = init_device_mesh(DEVICE, (world // 2, 2), mesh_dim_names=("keys", "heads")) if world == 4 else None
    found = []
    for way, settings in WAYS.items():
        nested = way == "heads+keys"
        if nested and mesh is None:
            continue
        parallel = context_parallel(mesh if nested else None, **settings)
        for seqlen, several in masks.items():
            for name, mask in several.items():
                if seqlen == EVEN or way in ("keys", "heads"):
                    plan = parallel.plan(mask, seqlen=seqlen, heads_q=HEADS, heads_kv=HEADS_KV)
                    found.append(Row(seqlen, name, way, plan))
    return sorted(found, key=lambda row: (row.seqlen, row.mask))


def _inputs(seqlen: int):
    """q, k, v and the gradient of the output of the whole sequence, and sinks; the same on each rank."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    shapes = [(BATCH, seqlen, heads, HEAD_DIM) for heads in (HEADS, HEADS_KV, HEADS_KV, HEADS)]
    whole = [torch.randn(s, generator=generator, device=DEVICE).bfloat16() for s in shapes]
    return whole, torch.randn(HEADS, generator=generator, device=DEVICE)


def _expected(whole, sinks, mask):
    """The results in float64, and those of eager PyTorch in bfloat16."""
    seqlen = whole[0].shape[1]
    hidden = ~mask.dense(seqlen, seqlen, DEVICE)[:, None]
    return _eager([t.double() for t in whole], sinks.double(), hidden), _eager(whole, sinks.bfloat16(), hidden)


def _compared(plan: Plan, whole, sinks, expected) -> tuple[list[float], bool]:
    """The errors as shares of what is allowed, and whether a second call gave the same bits. The second call may not
    wait for the device.
    """
    local = [plan.shard(t) for t in whole]
    _step(local, sinks, context_parallel=plan)
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    results = _step(local, sinks, context_parallel=plan)
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    same = all(map(torch.equal, results, _step(local, sinks, context_parallel=plan)))
    return _ratios(_whole(plan, results), *expected), same


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
    _say(f"torch's context_parallel: {served} calls on strobe, largest differences to one GPU {errors}")
    return [] if served and max(errors) < 0.02 else [("causal", "torch's ring")]


def _eager(tensors, sinks, hidden, keep: float | torch.Tensor = 1.0, bias: float | torch.Tensor = 0.0):
    """keep: factors of weights. bias: added to scores."""
    q, k, v = (t.detach().requires_grad_() for t in tensors[:3])
    sinks = sinks.detach().requires_grad_()
    keys, values = (t.repeat_interleave(HEADS // HEADS_KV, 2) for t in (k, v))
    seqlen = q.shape[1]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) * HEAD_DIM**-0.5
    scores = (scores + bias).to(q.dtype).masked_fill(hidden, -torch.inf)
    logits = torch.cat([scores, sinks[None, :, None, None].expand(len(q), -1, seqlen, 1)], -1)
    out = torch.einsum("bhqk,bkhd->bqhd", (logits.softmax(-1)[..., :-1] * keep).to(q.dtype), values)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v, sinks), tensors[3].to(out.dtype)))


if __name__ == "__main__":
    count = torch.cuda.device_count() or 4
    with tempfile.TemporaryDirectory() as folder:
        spawn(_check_runs if sys.argv[1:] == ["runs"] else _check, args=(count, folder), nprocs=count)
