"""Compare the predictions of `bench.cycles` with measurements, on a Blackwell GPU.

    python -m strobe.bench.predictions        JSON lines, one for each pass, shape and variant

It has not run on a Blackwell GPU yet. Each variant of the forward is the same kernel without one optimization. The
variants of the backward are the kernel with unordered and with ordered adds to dq, a pair of CTAs, and the portable
kernel, with whose gradients the others are compared. The variants of the decode are its kernel and the portable one.
Variants are timed in turn in one process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import torch

from ..kernels.blackwell.kernel import BACKWARD_PAIR
from ..kernels.protocol import Backward, Forward, Plan
from ..problem import mask as masks
from ..problem.cache import quantize_kv
from ..problem.call import Call
from ..problem.decode import DecodeCall, DecodeProblem
from ..problem.problem import Problem
from ..problem.target import Target
from ..selection.select import select
from .cycles import backward, cycles, forward
from .timer import interleave

WIDTHS = ((64, 64), (128, 128), (192, 128))
BATCH, SEQLEN, HEADS = 2, 8192, 16


def variants(plan: Plan) -> dict[str, Plan]:
    """The plan that `select` returns, and variants of it without one remedy each: name -> Plan.

    >>> from ..target import FAKES
    >>> q = torch.empty(1, 256, 1, 128, dtype=torch.bfloat16)
    >>> list(variants(select(Problem.from_call(Call(q, q, q)), FAKES["B200"]).forward))
    ['as it is', 'all exponentials by the exp unit', 'o rescaled at each new maximum']
    """
    traits = plan.config.traits
    others = {"o rescaled at each new maximum": replace(traits, tuning=replace(traits.tuning, rescale_threshold=0.0))}
    if traits.by_fma:
        others = {"all exponentials by the exp unit": replace(traits, by_fma=0)} | others
    made = {name: plan.changed(config=replace(plan.config, traits=other)) for name, other in others.items()}
    return {"as it is": plan, **made}


def predicted(plan: Plan) -> float:
    """Cycles of the busiest unit for 128 queries and 128 keys. Rescaling o is not counted: it delays products but
    occupies no counted unit.
    """
    traits = plan.config.traits
    return max(
        cycles(
            forward(128, 128, traits.block_d, traits.block_dv),
            plan.target.capability,
            1,
            traits.by_fma / 32,
            traits.degree,
        )[:4]
    )


def measured(widths: tuple[int, int], causal: bool) -> Iterator[dict]:
    shapes = [(BATCH, SEQLEN, HEADS, width) for width in (widths[0], widths[0], widths[1])]
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes)
    call = Call(q, k, v, kernel="blackwell").with_mask(masks.causal() if causal else masks.full())
    plans = variants(select(Problem.from_call(call), Target.of(q.device)).forward)
    results = {name: Forward(torch.empty_like(v), torch.empty(BATCH, HEADS, SEQLEN, device="cuda")) for name in plans}
    run = lambda name: plans[name].kernel.run(plans[name], call, results[name], {})
    times = interleave({name: lambda name=name: run(name) for name in plans}, q.device, flush=True)
    flops = plans["as it is"].kernel.cost(plans["as it is"].problem).flops
    for name, timing in times.items():
        ms = timing.median_ms
        yield {
            "pass": "forward",
            "head_dims": widths,
            "causal": causal,
            "variant": name,
            "cycles": predicted(plans[name]),
            "ms": ms,
            "tflops": flops / ms / 1e9,
        }


BACKWARDS: dict[str, dict] = {
    "as it is": {},
    "deterministic": {"deterministic": True},
    "portable": {"kernel": "portable.backward"},
    "pair": {"kernel": BACKWARD_PAIR.name},  # where it can run
}


def measured_backward(
    widths: tuple[int, int], causal: bool, sizes: tuple[int, int, int] = (BATCH, SEQLEN, HEADS), device: str = "cuda"
) -> Iterator[dict]:
    """A row for each of BACKWARDS. `difference`: from the portable gradients, relative to the largest of them."""
    shapes = [(*sizes, width) for width in (widths[0], widths[0], widths[1])]
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in shapes)
    masked = Call(q, k, v, needs_grad=True).with_mask(masks.causal() if causal else masks.full())
    target = Target.of(q.device)
    calls = {name: masked._replace(**options) for name, options in BACKWARDS.items()}
    if BACKWARD_PAIR.why_not(Problem.from_call(masked), target):
        del calls["pair"]
    choices = {name: select(Problem.from_call(call), target) for name, call in calls.items()}
    out, lse = torch.empty_like(v), torch.empty(sizes[0], sizes[2], sizes[1], device=device)
    choice = choices["as it is"]
    choice.forward.kernel.run(choice.forward, masked, Forward(out, lse), _workspace(choice.forward, device))
    dout, plans = torch.randn_like(out), {name: cast(Plan, choice.backward) for name, choice in choices.items()}
    results = {}
    for name in plans:
        dq, dk, dv, delta = (torch.empty_like(t) for t in (q, k, v, lse))
        results[name] = Backward(dout, out, lse, None, dq, dk, dv, delta)
    spaces = {name: _workspace(plan, device) for name, plan in plans.items()}
    run = lambda name: plans[name].kernel.run(plans[name], calls[name], results[name], spaces[name])
    times = interleave({name: lambda name=name: run(name) for name in plans}, q.device, flush=True)
    flops = plans["as it is"].kernel.cost(plans["as it is"].problem).flops
    step = cycles(backward(128, 128, *widths, dq_through_shared=False), 100)
    for name, timing in times.items():
        yield {
            "pass": "backward",
            "head_dims": widths,
            "causal": causal,
            "variant": name,
            "cycles": max(step[:4]) if plans[name].kernel.name == "blackwell.backward" else None,
            "ms": timing.median_ms,
            "tflops": flops / timing.median_ms / 1e9,
            "difference": _difference(results[name], results["portable"]),
        }


DECODE_KERNELS = {"as it is": "blackwell.decode", "portable": "portable.decode"}
# (sequences, keys, tokens, bits of the cache): those of the prediction, and tiles of 64 rows
DECODES = (
    (64, 8192, 1, 16), (64, 8192, 1, 8), (64, 8192, 8, 16), (64, 8192, 16, 16), (8, 8192, 1, 16), (1, 1024, 1, 16),
)  # fmt: skip
PAGE_SIZE, HEADS_DECODE, WIDTH_DECODE = 16, (32, 8), 128


def measured_decode(
    batch: int, keys: int, tokens: int, bits: int, heads: tuple[int, int] = HEADS_DECODE, device: str = "cuda"
) -> Iterator[dict]:
    """A row for each of DECODE_KERNELS. `ceiling`: the share of the bandwidth that reads all keys and values once.
    `difference`: from the portable out, relative to its largest element.
    """
    pages = batch * keys // PAGE_SIZE
    k, v = (torch.randn(pages, PAGE_SIZE, heads[1], WIDTH_DECODE, dtype=torch.bfloat16, device=device) for _ in "kv")
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if bits == 8:
        k, v, *both = quantize_kv(k, v)
        scales = (both[0], both[1])
    q = torch.randn(batch, tokens, heads[0], WIDTH_DECODE, dtype=torch.bfloat16, device=device)
    table = torch.randperm(pages, device=device).int().view(batch, -1)
    lengths = torch.full((batch,), keys, dtype=torch.int32, device=device)
    call = DecodeCall(q, k, v, lengths, table, None, *scales, right=0)
    target = Target.of(q.device)
    calls = {name: call._replace(kernel=kernel) for name, kernel in DECODE_KERNELS.items()}
    plans = {name: select(DecodeProblem.from_call(one), target).forward for name, one in calls.items()}
    lse = torch.empty(batch, heads[0], tokens, device=device)
    results = {name: Forward(torch.empty_like(q), torch.empty_like(lse)) for name in plans}
    spaces = {name: _workspace(plan, device) for name, plan in plans.items()}
    run = lambda name: plans[name].kernel.run(plans[name], calls[name], results[name], spaces[name])
    times = interleave({name: lambda name=name: run(name) for name in plans}, q.device, flush=True)
    moved = 2 * batch * keys * heads[1] * WIDTH_DECODE * bits // 8
    wanted = results["portable"].out.float()
    for name, timing in times.items():
        gbps = moved / timing.median_ms / 1e6
        yield {
            "pass": "decode",
            "batch": batch,
            "keys": keys,
            "tokens": tokens,
            "bits": bits,
            "variant": name,
            "ms": timing.median_ms,
            "gbps": gbps,
            "ceiling": gbps / target.peak_gbps if target.peak_gbps else None,
            "difference": float((results[name].out.float() - wanted).abs().max() / wanted.abs().max()),
        }


def _workspace(plan: Plan, device: str) -> dict[str, torch.Tensor]:
    return {
        buffer.name: torch.full(buffer.shape, buffer.fill or 0, dtype=buffer.dtype, device=device)
        for buffer in plan.buffers
    }


def _difference(found: Backward, wanted: Backward) -> float:
    pairs = ((found.dq, wanted.dq), (found.dk, wanted.dk), (found.dv, wanted.dv))
    return max(float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in pairs)


def main() -> int:
    if not torch.cuda.is_available() or Target.of(torch.device("cuda")).capability not in (100, 103):
        print("predictions are tested on a Blackwell GPU (sm_100, sm_103); there is none here", file=sys.stderr)
        return 2
    for widths in WIDTHS:
        for causal in (False, True):
            for row in (*measured(widths, causal), *measured_backward(widths, causal)):
                print(json.dumps(row), flush=True)
    for shape in DECODES:
        for row in measured_decode(*shape):
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
