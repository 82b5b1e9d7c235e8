"""Compare the predictions of `bench.cycles` for the forward with measurements, on a Blackwell GPU.

    python -m strobe.bench.predictions        JSON lines, one for each shape and variant

It has not run on a Blackwell GPU yet. Each variant is the same kernel without one remedy. Variants are timed in turn in
one process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace

import torch

from ..kernels.protocol import Forward, Plan
from ..problem import mask as masks
from ..problem.call import Call
from ..problem.problem import Problem
from ..problem.target import Target
from ..selection.select import select
from .cycles import cycles, forward
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
    form = plan.config.form
    others = {"o rescaled at each new maximum": replace(form, tuning=replace(form.tuning, rescale_threshold=0.0))}
    if form.by_fma:
        others = {"all exponentials by the exp unit": replace(form, by_fma=0)} | others
    made = {name: plan.changed(config=replace(plan.config, form=other)) for name, other in others.items()}
    return {"as it is": plan, **made}


def predicted(plan: Plan) -> float:
    """Cycles of the busiest unit for 128 queries and 128 keys. Rescaling o is not counted: it delays products but
    occupies no counted unit.
    """
    form = plan.config.form
    return max(
        cycles(
            forward(128, 128, form.block_d, form.block_dv), plan.target.capability, 1, form.by_fma / 32, form.degree
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
            "head_dims": widths,
            "causal": causal,
            "variant": name,
            "cycles": predicted(plans[name]),
            "ms": ms,
            "tflops": flops / ms / 1e9,
        }


def main() -> int:
    if not torch.cuda.is_available() or Target.of(torch.device("cuda")).capability not in (100, 103):
        print("predictions are tested on a Blackwell GPU (sm_100, sm_103); there is none here", file=sys.stderr)
        return 2
    for widths in WIDTHS:
        for causal in (False, True):
            for row in measured(widths, causal):
                print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
