"""What one start of several processes computes for the tests of context parallelism: results by name."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import strobe
from strobe.distributed import Plan, context_parallel, keys, problems, warmup
from strobe.ops import attention as ops
from strobe.problem.problem import Problem
from tests.distributed import divided
from tests.distributed.divided import HEADS, SEQLEN

Found = dict[str, Any]
STEPS, WIDTH, LENGTH = 30, 24, 21
EACH = {2: 3, 3: 7, 4: 7, 8: 7}  # of the cases, what a commit runs for so many processes


def session(rank: int, folder: str, world: int, is_whole: bool) -> None:
    """Calls beside those of one process, in each process; rank 0 leaves the results in `folder`. Unless is_whole, a
    part of them.
    """
    found: Found = {}
    each = 1 if is_whole else EACH[world]
    divided.run_cases(divided.ways(), found, each)
    _few_rows(found)
    _unseen(found)
    _given(found)
    _runs(found)
    _wrong(found)
    _delayed(found)
    if is_whole or world == 2:
        for part in (_packed, _other_mask, _bits, _bfloat16, _layouts):
            part(found)
    if world == 3:
        _subgroup(found)
    if world % 2 == 0 and world > 2:
        _nested(found, world, each)
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")


def steps(rank: int, folder: str, trains_alone: bool = False) -> None:
    """Steps of training and what runs around them, in each process. trains_alone: the training alone."""
    found: Found = {}
    for part in (_trained,) if trains_alone else (_trained, _recomputed, _warmed, _counted):
        part(found)
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")


def _few_rows(found: Found) -> None:
    """Sequences shorter than the number of ranks: some ranks hold no row."""
    for way in divided.WAYS:
        for seqlen in (0, 1, 3):
            plan = context_parallel(**divided.WAYS[way]).plan(strobe.causal(), seqlen=seqlen, heads_q=HEADS, heads_kv=4)
            tensors = divided.inputs(seqlen, 4, seqlen)
            ours = divided.attend_shards(tensors, plan, True)
            found[f"few: {way}, {seqlen} rows"] = divided.difference(ours, divided.attend(tensors, True, causal=True))


def _unseen(found: Found) -> None:
    """A row that sees no key lies between rows with keys of two ranks. New memory holds NaN."""
    halves = torch.arange(16, dtype=torch.int32).expand(2, -1) // 8
    ids = halves.clone()
    ids[:, 9] = ids[:, 12:] = 0
    ids[:, 11] = -1
    mask, tensors = strobe.documents(ids, halves), divided.inputs(16, 3, 2)
    whole = divided.attend(tensors, False, mask=mask)
    torch.use_deterministic_algorithms(True)  # torch then fills new memory
    try:
        for way, settings in divided.WAYS.items():
            plan = context_parallel(**settings).plan(mask, seqlen=16, heads_q=HEADS, heads_kv=3)
            found[f"unseen: {way}"] = divided.difference(divided.attend_shards(tensors, plan, False), whole)
    finally:
        torch.use_deterministic_algorithms(False)


def _runs(found: Found) -> None:
    """One call for several pieces, as on Hopper; one batch entry, since packed tensors have none."""
    tensors = [t if t.dim() == 1 else t[:1] for t in divided.inputs(SEQLEN, 3, 4)]
    for balance in ("head-tail", "tiles"):
        for name in ("full", "causal", "window left", "window both"):
            mask, calls = divided.MASKS[name](), []
            plan = context_parallel(scheme="keys", balance=balance).plan(mask, seqlen=SEQLEN, heads_q=HEADS, heads_kv=3)
            note = lambda call, calls=calls, decide=ops.decide: calls.append(call.runs) or decide(call)
            with patch.object(keys, "runs_pay", lambda q: True), patch.object(ops, "decide", note):
                ours = divided.attend_shards(tensors, plan, True)
            found[f"runs: {balance}, {name}"] = divided.difference(ours, divided.attend(tensors, True, mask=mask))
            joined = torch.tensor([sum(calls)])
            dist.all_reduce(joined)
            found[f"joined: {balance}, {name}"] = int(joined)


def _packed(found: Found) -> None:
    """attention_varlen, one batch entry, two rows outside every sequence."""
    offsets = torch.tensor([1, 9, 9, 30, SEQLEN - 1], dtype=torch.int32)
    q, k, v, sinks, _ = (t[0] if t.dim() == 4 else t for t in divided.inputs(SEQLEN, 3, 5))
    for way in divided.WAYS:
        for causal in (False, True):
            sizes = {"seqlen": SEQLEN, "heads_q": HEADS, "heads_kv": 3}
            plan = context_parallel(**divided.WAYS[way]).plan_varlen(offsets, causal=causal, **sizes)
            local = [plan.shard(t, 0) for t in (q, k, v)]
            options = {"cu_seqlens_q": offsets, "sinks": sinks, "causal": causal}
            out = strobe.attention_varlen(*local, context_parallel=plan, **options)
            whole = strobe.attention_varlen(q, k, v, **options)
            found[f"packed: {way}, causal {causal}"] = float((plan.unshard(out, 0) - whole).abs().max())
            options.pop("causal")  # the plan's mask applies, causal or not
            out = strobe.attention_varlen(*local, context_parallel=plan, **options)
            found[f"packed: {way}, causal {causal} by the plan"] = float((plan.unshard(out, 0) - whole).abs().max())
            found[f"read once: {way}, causal {causal}"] = plan.for_mask(plan.mask) is plan


def _other_mask(found: Found) -> None:
    """Layers of one model with different masks share the division of rows."""
    tensors = divided.inputs(SEQLEN, 3, 6)
    for way in divided.WAYS:
        plan = context_parallel(**divided.WAYS[way]).plan(strobe.causal(), seqlen=SEQLEN, heads_q=HEADS, heads_kv=3)
        for name, options in {"window": {"causal": True, "window": (4, None)}, "full": {"mask": strobe.full()}}.items():
            ours = divided.attend_shards(tensors, plan, False, **options)
            found[f"other mask: {way}, {name}"] = divided.difference(ours, divided.attend(tensors, False, **options))


def _bits(found: Found) -> None:
    tensors = [t.float() for t in divided.inputs(SEQLEN, 3, 8)]
    for way in divided.WAYS:
        plan = context_parallel(**divided.WAYS[way]).plan(strobe.causal(), seqlen=SEQLEN, heads_q=HEADS, heads_kv=3)
        first, again = (divided.attend_shards(tensors, plan, True, deterministic=True) for _ in range(2))
        found[f"bits: {way}"] = divided.difference(first, again)


def _bfloat16(found: Found) -> None:
    """The largest errors against float64, over twice the error of eager PyTorch and a rounding."""
    exact = divided.inputs(SEQLEN, 3, 9, torch.bfloat16)
    oracle = divided.attend([t.double() for t in exact], False, causal=True)
    eager = _eager(exact)
    for way in divided.WAYS:
        plan = context_parallel(**divided.WAYS[way]).plan(strobe.causal(), seqlen=SEQLEN, heads_q=HEADS, heads_kv=3)
        ours = divided.attend_shards(exact, plan, False)
        names = ("out", "dq", "dk", "dv")
        for name, a, b, c in zip(names, *((r.out, *r.gradients) for r in (ours, oracle, eager))):
            allowed = 2 * (c.double() - b).abs().max() + 2**-8 * b.abs().max()
            found[f"bfloat16: {way}, {name}"] = float((a.double() - b).abs().max() / allowed)


def _eager(tensors: list[Tensor]) -> divided.Result:
    q, k, v, _, dout = (t.detach().clone().requires_grad_() for t in tensors)
    keys, values = (t.repeat_interleave(HEADS // t.shape[2], 2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) * q.shape[-1] ** -0.5
    hidden = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool).triu(1)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)
    return divided.Result(out.detach(), torch.autograd.grad(out, (q, k, v), dout.detach()))


def _layouts(found: Found) -> None:
    x = torch.arange(2 * SEQLEN * 3).view(2, SEQLEN, 3)
    for way in divided.WAYS:
        plan = context_parallel(**divided.WAYS[way]).plan(strobe.causal(), seqlen=SEQLEN, heads_q=HEADS, heads_kv=3)
        found[f"layout: {way}, unshard"] = torch.equal(plan.unshard(plan.shard(x)), x)
        found[f"layout: {way}, last dimension"] = torch.equal(plan.unshard(plan.shard(x.mT, 2), 2), x.mT)
        found[f"layout: {way}, positions"] = torch.equal(x[:, plan.positions()], plan.shard(x))


def _wrong(found: Found) -> None:
    """Calls that one rank makes differently: the error that each rank raises."""
    last = dist.get_world_size() - 1
    odd = dist.get_rank() == last
    tensors = divided.inputs(SEQLEN, 3, 3)
    for scheme in ("keys", "heads"):
        parallel = context_parallel(scheme=scheme)
        plan = parallel.plan(strobe.causal(), seqlen=SEQLEN, heads_q=HEADS, heads_kv=3)
        q, k, v = map(plan.shard, tensors[:3])
        calls = {
            "dtype": lambda q=q, k=k, v=v, plan=plan: strobe.attention(
                *((t.float() if odd else t) for t in (q, k, v)), context_parallel=plan
            ),
            "batch": lambda q=q, k=k, v=v, plan=plan: strobe.attention(
                *((t[:1] if odd else t) for t in (q, k, v)), context_parallel=plan
            ),
            "rows": lambda q=q, k=k, v=v, plan=plan: strobe.attention(
                q[:, :-1] if odd else q, k, v, context_parallel=plan
            ),
            "mask": lambda q=q, k=k, v=v, plan=plan: strobe.attention(
                q, k, v, window=(5 if odd else 6, 0), context_parallel=plan
            ),
            "scale": lambda q=q, k=k, v=v, plan=plan: strobe.attention(
                q, k, v, scale=0.5 if odd else None, context_parallel=plan
            ),
        }
        for name, call in calls.items():
            messages: list = [None] * (last + 1)
            message = ""
            try:
                call()
            except strobe.InvalidProblem as error:
                message = str(error)
            dist.all_gather_object(messages, message)
            found[f"wrong {name}: {scheme}"] = messages


def _given(found: Found) -> None:
    """Rows that the caller deals: uneven, several intervals a rank, and none for the last rank."""
    world = dist.get_world_size()
    edges = [0, 3, 4, 11, 12, 30, 33, SEQLEN]
    held: list[list[tuple[int, int]]] = [[] for _ in range(world)]
    for number, run in enumerate(pairwise(edges)):
        held[number % max(1, world - 1)].append(run)
    for index, (scheme, name) in enumerate((s, m) for s in ("keys", "heads") for m in ("causal", "all", "window both")):
        mask, tensors = divided.MASKS[name](), divided.inputs(SEQLEN, 3, index)
        plan = context_parallel(scheme=scheme).plan(
            mask, seqlen=SEQLEN, heads_q=HEADS, heads_kv=3, rows=[tuple(runs) for runs in held]
        )
        found[f"given: {scheme}, {name}, positions"] = float(
            plan.local_rows - sum(b - a for a, b in held[dist.get_rank()])
        )
        ours = divided.attend_shards(tensors, plan, True)
        found[f"given: {scheme}, {name}"] = divided.difference(ours, divided.attend(tensors, True, mask=mask))


def _delayed(found: Found) -> None:
    """Each rank waits for a random time before every exchange: results have the bits of calls without waiting."""
    tensors, chance = divided.inputs(SEQLEN, 3, 2), Random(dist.get_rank())
    exchanges = {name: getattr(dist, name) for name in ("batch_isend_irecv", "all_to_all_single")}

    def late(exchange):
        def run(*args, **options):
            time.sleep(chance.choice((0.0, 0.002, 0.03)))
            return exchange(*args, **options)

        return run

    for way in ("keys, head-tail", "keys, own first", "heads"):
        for name in ("causal", "window left"):
            parallel = context_parallel(**divided.WAYS[way])
            plan = parallel.plan(divided.MASKS[name](), seqlen=SEQLEN, heads_q=HEADS, heads_kv=3)
            prompt = divided.attend_shards(tensors, plan, True)
            with ExitStack() as stack:
                for exchange, run in exchanges.items():
                    stack.enter_context(patch.object(dist, exchange, late(run)))
                results = [divided.attend_shards(tensors, plan, True) for _ in range(2)]
            found[f"delayed: {way}, {name}"] = max(divided.difference(prompt, one) for one in results)


def _warmed(found: Found) -> None:
    """What `problems` lists are the problems that a step runs, and `warmup` of them ends on all ranks."""
    tensors = [t.float() for t in divided.inputs(SEQLEN, 3, 7)]
    for way in divided.WAYS:
        for name in ("causal", "all"):
            mask, ran = divided.MASKS[name](), set()
            plan = context_parallel(**divided.WAYS[way]).plan(mask, seqlen=SEQLEN, heads_q=HEADS, heads_kv=3)
            local = [plan.shard(t) for t in tensors[:3]]
            listed = problems(plan, *local, sinks=tensors[3])
            note = lambda call, ran=ran, decide=ops.decide: ran.add(Problem.from_call(call)) or decide(call)
            with patch.object(ops, "decide", note):
                divided.attend_shards(tensors, plan, True)
            found[f"warmed: {way}, {name}"] = set() < _kinds(ran) <= _kinds(listed)
            warmup(listed)


def _counted(found: Found) -> None:
    """A mode that looks for ops, such as torch's counter of FLOPs, sees the forward and the backward of each piece."""
    tensors = [t.float() for t in divided.inputs(SEQLEN, 3, 7)]
    plan = context_parallel(scheme="keys").plan(strobe.window(5, 0), seqlen=SEQLEN, heads_q=HEADS, heads_kv=3)
    expected = divided.attend_shards(tensors, plan, True)
    with FlopCounterMode(display=False) as counter:
        results = divided.attend_shards(tensors, plan, True)
    counts = counter.get_flop_counts()["Global"]
    names = {str(op) for op, count in counts.items() if count > 0}
    found["counted: bits"] = divided.difference(results, expected) == 0.0
    found["counted: ops"] = any("backward" in name for name in names) and any("forward" in name for name in names)


def _kinds(several: Iterable[Problem]) -> set:
    """Problems without strides: those of empty tensors may differ."""
    return {replace(problem, strides=(), alignment=16, alignment_kv=16) for problem in several}


class Layer(nn.Module):
    def __init__(self, has_window: bool):
        super().__init__()
        linear = partial(nn.Linear, bias=False)
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        self.up, self.down = linear(WIDTH, 2 * WIDTH), linear(2 * WIDTH, WIDTH)
        self.sinks = nn.Parameter(torch.zeros(4))
        self.window = (5, None) if has_window else None

    def forward(self, x: Tensor, plan: Plan | None) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).unbind(2)
        attended = strobe.attention(q, k, v, causal=True, window=self.window, sinks=self.sinks, context_parallel=plan)
        x = x + self.out(attended.flatten(2))
        return x + self.down(nn.functional.gelu(self.up(x)))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(11, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList([Layer(False), Layer(True)])
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, tokens: Tensor, positions: Tensor, plan: Plan | None) -> Tensor:
        x = self.token(tokens) + self.position(positions)
        for layer in self.layers:
            x = layer(x, plan)
        return self.head(x)


def losses(plan: Plan | None) -> list[float]:
    """The losses of 30 steps, over this rank's rows and summed over ranks if there is a plan."""
    torch.manual_seed(3)
    model = GPT().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    shard = (lambda x: x) if plan is None else plan.shard
    positions = torch.arange(LENGTH) if plan is None else plan.positions()
    found = []
    for _ in range(STEPS):
        tokens = torch.randint(11, (2, 1)) + torch.arange(LENGTH + 1) * torch.randint(1, 4, (2, 1))
        tokens = tokens % 11
        logits = model(shard(tokens[:, :-1]), positions, plan)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), shard(tokens[:, 1:]).flatten(), reduction="sum")
        loss = loss / (2 * LENGTH)
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if plan is not None:
            for tensor in (loss, *(weight.grad for weight in model.parameters())):
                dist.all_reduce(tensor)
        optimizer.step()
        found.append(float(loss))
    return found


def _trained(found: Found) -> None:
    by_heads = [("heads", {})] if 4 % dist.get_world_size() == 0 else []
    ways: list[tuple[str, dict[str, Any]]] = [("keys", {}), ("keys", {"overlap": True}), *by_heads]
    for way, settings in ways:
        plan = context_parallel(scheme=way, **settings).plan(strobe.causal(), seqlen=LENGTH, heads_q=4)
        found[f"trained: {way} {settings}"] = losses(plan)


def _recomputed(found: Found) -> None:
    """Activation checkpointing, autocast and torch.compile."""
    tensors = [t.float() for t in divided.inputs(SEQLEN, 3, 4)]
    for scheme in ("keys", "heads"):
        plan = context_parallel(scheme=scheme).plan(strobe.causal(), seqlen=SEQLEN, heads_q=HEADS, heads_kv=3)
        local = [*(plan.shard(t).requires_grad_() for t in tensors[:3]), tensors[3].clone().requires_grad_()]
        for name, options in {"plan": {}, "window": {"causal": True, "window": (5, None)}}.items():
            call: Any = lambda q, k, v, sinks, plan=plan, options=options: strobe.attention(
                q * 1.5, k, v, sinks=sinks, context_parallel=plan, **options
            )
            expected = torch.autograd.grad(call(*local).square().sum(), local)
            again = torch.autograd.grad(checkpoint(call, *local, use_reentrant=False).square().sum(), local)
            found[f"checkpointed: {scheme}, {name}"] = all(map(torch.equal, expected, again))
            compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
            found[f"compiled: {scheme}, {name}, out"] = torch.equal(compiled(*local), call(*local))
            again = torch.autograd.grad(compiled(*local).square().sum(), local)
            found[f"compiled: {scheme}, {name}"] = all(map(torch.equal, expected, again))
        with torch.no_grad():
            mask = strobe.key_lengths(torch.tensor([SEQLEN, 5], dtype=torch.int32))
            broken = torch.compile(partial(strobe.attention, mask=mask, context_parallel=plan), backend="eager")
            whole = strobe.attention(*local[:3], mask=mask, context_parallel=plan)
            found[f"compiled: {scheme}, a mask of tensors"] = torch.equal(broken(*local[:3]), whole)
        with torch.autocast("cpu", torch.bfloat16):
            found[f"autocast: {scheme}"] = call(*local).dtype == torch.bfloat16
            found[f"autocast: {scheme}, compiled"] = compiled(*local).dtype == torch.bfloat16


def _subgroup(found: Found) -> None:
    """A group of some processes: ranks of the plan count within it."""
    group = dist.new_group([1, 2])
    result = torch.zeros(1, dtype=torch.float64)
    if dist.get_rank() > 0:
        mine: Found = {}
        divided.run_cases(divided.ways(group), mine, 7)
        result[0] = max(mine.values())
    dist.broadcast(result, 1)
    found["subgroup"] = float(result)


def _nested(found: Found, world: int, each: int) -> None:
    """A mesh of two dimensions: keys between the rows of the mesh, heads within."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("keys", "heads"))
    settings = {
        "contiguous": {},
        "head-tail, own first": {"balance": "head-tail", "overlap": True},
        "tiles": {"balance": "tiles"},
    }
    for name, one in settings.items():
        mine: Found = {}
        divided.run_cases(lambda way, one=one: context_parallel(mesh, scheme="heads+keys", **one), mine, each)
        found[f"nested: {name}"] = max(mine.values())
    mine = {}
    divided.run_cases(divided.ways(mesh["heads"]), mine, 7)
    found["nested: a mesh of one dimension"] = max(mine.values())


def abandoned(rank: int, folder: str, store: str, world: int) -> None:
    """Rank 1 ends in the middle of training; each other rank writes its error and the seconds until the error."""
    from datetime import timedelta

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=20)
    )
    plan = context_parallel(scheme="keys").plan(strobe.causal(), seqlen=SEQLEN, heads_q=HEADS, heads_kv=3)
    q, k, v = map(plan.shard, divided.inputs(SEQLEN, 3, 1)[:3])
    strobe.attention(q, k, v, context_parallel=plan)
    if rank == 1:
        os._exit(9)
    start = time.monotonic()
    message = "nothing"
    try:
        strobe.attention(q, k, v, context_parallel=plan)
    except RuntimeError as error:
        message = str(error)
    torch.save((message, time.monotonic() - start), Path(folder) / f"error{rank}.pt")
    os._exit(0)
