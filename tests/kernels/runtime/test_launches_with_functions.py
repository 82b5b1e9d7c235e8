"""Launches of calls with functions are repeated while everything that they read is the same."""

from __future__ import annotations

import torch

import strobe
from strobe.kernels.runtime import launcher
from strobe.kernels.runtime.launch_cache import CACHE
from strobe.ops import mods as ops_mods
from strobe.ops.attention import decide
from strobe.problem.call import Call
from strobe.problem.target import FAKES
from strobe.selection import replay
from tools.proof.simulate import posing


def test_a_launch_with_functions_is_repeated_while_all_it_reads_is_the_same(stage, monkeypatch):
    """Not with another number, and not with a mask's tensor that has changed in place."""
    noted = lambda plan, key, tensors, describe: launcher.RecordedLaunch(stage.function, 1, -1, (key,))
    monkeypatch.setattr(launcher, "start", noted)
    q, k, v = (torch.randn(1, 100, 2, 64).bfloat16() for _ in range(3))
    slopes, hidden = torch.rand(2), torch.zeros(100, dtype=torch.int32)
    mask = strobe.mask_mod(lambda b, h, i, j: (i * j) % 5 != hidden[j])

    def bound(factor: float) -> Call:
        score = lambda s, b, h, i, j: s * factor + slopes[h]
        return ops_mods.simplified(ops_mods.bind(Call(q, k, v, right=0), score, mask))

    bound(0.5), bound(0.75)  # from now on the factor is an argument
    out, lse = torch.empty_like(q), torch.empty(1, 2, 100)
    with posing(FAKES["H200"]):
        plans = [decide(bound(factor)).forward for factor in (2.0, 3.0)]
        plan = plans[0]
        assert plan is plans[1] and plan.kernel.name == "hopper.forward"
        ops_mods.write(decide(bound(2.0)), bound(2.0), out, lse)
        assert len(CACHE.launches[plan.number]) == 1
        assert replay.replay(plan, bound(2.0), out, lse) and len(stage.launches) == 1
        assert not replay.replay(plan, bound(3.0), out, lse)
        hidden[3] = 1
        assert not replay.replay(plan, bound(2.0), out, lse)
        ops_mods.write(decide(bound(2.0)), bound(2.0), out, lse)
        assert replay.replay(plan, bound(2.0), out, lse) and len(stage.launches) == 2
