"""What processes of a context-parallel call compute, beside the same call in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import strobe
from strobe.distributed import ContextParallel, Plan, context_parallel

BATCH, HEADS, HEAD_DIM, HEAD_DIM_V = 2, 24, 4, 3
SEQLEN = 37  # divides over no number of ranks


def _ids(*lengths: tuple[int, ...]) -> Tensor:
    """Documents of these lengths for each batch entry; what is left is padding."""
    rows = [[doc for doc, length in enumerate(one) for _ in range(length)] for one in lengths]
    return torch.tensor([row + [-1] * (SEQLEN - len(row)) for row in rows], dtype=torch.int32)


def _int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


PACKED = ((3, 17, 1, 16), (30, 4))
MASKS: dict[str, Callable[[], strobe.Mask]] = {
    "full": strobe.full,
    "causal": strobe.causal,
    "window left": lambda: strobe.window(5, 0),
    "window both": lambda: strobe.window(3, 11),
    "window right": lambda: strobe.window(None, 2),
    "prefix": lambda: strobe.prefix_causal(9),
    "prefix per entry": lambda: strobe.prefix_causal(_int32(25, 0)),
    "prefix in a window": lambda: strobe.prefix_causal(_int32(25, 4)) & strobe.window(8, None),
    "documents": lambda: strobe.documents(_ids(*PACKED)),
    "causal documents": lambda: strobe.causal() & strobe.documents(_ids(*PACKED)),
    "scattered documents": lambda: strobe.documents(torch.arange(2 * SEQLEN).view(2, -1).int() % 3),
    "key lengths": lambda: strobe.key_lengths(_int32(SEQLEN, 5)),
    "causal key lengths": lambda: strobe.causal() & strobe.key_lengths(_int32(30, 0)),
    "nothing": lambda: strobe.key_lengths(_int32(0, 0)),
    "padding": lambda: strobe.causal() & strobe.documents(_ids((4,), (2, 2))),
    "all": lambda: (
        strobe.prefix_causal(_int32(20, 11))
        & strobe.documents(_ids(*PACKED))
        & strobe.key_lengths(_int32(33, 31))
        & strobe.window(14, 3)
    ),
}
WAYS: dict[str, dict[str, Any]] = {
    "keys, contiguous": dict(scheme="keys", balance="contiguous"),
    "keys, head-tail": dict(scheme="keys", balance="head-tail"),
    "keys, tiles": dict(scheme="keys", balance="tiles"),
    "keys, own first": dict(scheme="keys", balance="contiguous", overlap=True),
    "keys, head-tail, own first": dict(scheme="keys", balance="head-tail", overlap=True),
    "heads": dict(scheme="heads"),
    "auto": dict(),
}
OPTIONS = ({}, {"softcap": 2.0}, {"scale": 0.7, "deterministic": True})


class Result(NamedTuple):
    out: Tensor
    gradients: tuple[Tensor, ...]  # of q, k, v and sinks


def inputs(seqlen: int, heads_kv: int, seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v, sinks and the gradient of the output, for the whole sequence."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    q, k = draw(BATCH, seqlen, HEADS, HEAD_DIM), draw(BATCH, seqlen, heads_kv, HEAD_DIM)
    v, dout = draw(BATCH, seqlen, heads_kv, HEAD_DIM_V), draw(BATCH, seqlen, HEADS, HEAD_DIM_V)
    return [q, k, v, draw(HEADS), dout]


def attend(tensors: list[Tensor], has_sinks: bool, **options: Any) -> Result:
    *leaves, sinks, dout = (t.detach() for t in tensors)
    leaves = [t.requires_grad_() for t in (*leaves, *([sinks] if has_sinks else []))]
    out = strobe.attention(*leaves[:3], sinks=leaves[3] if has_sinks else None, **options)
    return Result(out.detach(), torch.autograd.grad(out, leaves, dout))


def attend_shards(tensors: list[Tensor], plan: Plan, has_sinks: bool, **options: Any) -> Result:
    """The call on this rank's rows, put together again: sinks' gradients are sums over ranks."""
    q, k, v, sinks, dout = tensors
    local = [plan.shard(q), plan.shard(k), plan.shard(v), sinks, plan.shard(dout)]
    out, gradients = attend(local, has_sinks, context_parallel=plan, **options)
    whole = [plan.unshard(gradient) for gradient in gradients[:3]]
    if has_sinks:
        for group in plan.ranks.levels:
            dist.all_reduce(gradients[3], group=group)
        whole.append(gradients[3])
    return Result(plan.unshard(out), tuple(whole))


def difference(a: Result, b: Result) -> float:
    pairs = zip((a.out, *a.gradients), (b.out, *b.gradients))
    return float(torch.stack([(x - y).abs().max().double() for x, y in pairs if x.numel()] or [torch.zeros(())]).max())


def cases(each: int) -> Iterator[tuple[str, str, int, bool, dict]]:
    """Way, mask, key heads, sinks and options: each way with each mask, the rest in turns; of these a part 1 / each, in
    which every mask and every way occurs.
    """
    pairs = [(way, mask) for i, way in enumerate(WAYS) for j, mask in enumerate(MASKS) if (i + j) % each == 0]
    for index, (way, mask) in enumerate(pairs):
        yield way, mask, (24, 3, 1, 4)[index % 4], index % 3 == 0, OPTIONS[index % len(OPTIONS)]


def run_cases(parallel: Callable[[str], ContextParallel], found: dict[str, Any], each: int) -> None:
    for index, (way, name, heads_kv, has_sinks, options) in enumerate(cases(each)):
        mask = MASKS[name]()
        tensors = inputs(SEQLEN, heads_kv, index)
        plan = parallel(way).plan(mask, seqlen=SEQLEN, heads_q=HEADS, heads_kv=heads_kv)
        ours = attend_shards(tensors, plan, has_sinks, **options)
        found[f"{way}: {name}"] = difference(ours, attend(tensors, has_sinks, mask=mask, **options))


def ways(processes: Any = None) -> Callable[[str], ContextParallel]:
    made = {way: context_parallel(processes, **settings) for way, settings in WAYS.items()}
    return made.__getitem__
