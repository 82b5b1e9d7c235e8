"""Launches of calls with functions are repeated while everything that they read is the same."""

from __future__ import annotations

import pytest
import torch

import strobe
from strobe.kernels.protocol import Forward
from strobe.kernels.runtime import launcher
from strobe.kernels.runtime.launch_cache import CACHE, decode_addresses
from strobe.ops import mods as ops_mods
from strobe.ops.attention import decide
from strobe.problem.call import Call
from strobe.problem.decode import DecodeCall, DecodeProblem
from strobe.problem.paged import PagedCall, PagedProblem
from strobe.problem.target import FAKES
from strobe.selection import replay
from strobe.selection.select import select
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


@pytest.mark.parametrize("packed", [False, True], ids=["decode", "packed"])
def test_a_decode_with_functions_is_repeated_while_all_it_reads_is_the_same(packed, stage, monkeypatch):
    """The launcher knows every address of the arguments. Another tensor or number is another launch."""

    def start(plan, key, tensors, describe):
        known = {t.data_ptr(): launcher.Address(t.data_ptr()) for t in tensors if t is not None}
        launcher.with_addresses(describe().arguments, known)  # KeyError: an address that changes unnoticed
        keys.append(key)
        return launcher.RecordedLaunch(stage.function, 1, -1, (key,))

    keys: list = []
    monkeypatch.setattr(launcher, "start", start)
    q, k, lengths = torch.randn(2, 1, 4, 64).bfloat16(), torch.randn(2, 256, 2, 64).bfloat16(), torch.tensor([250, 70])
    offsets, slopes, hidden = torch.tensor([0, 1, 2]), torch.rand(4), torch.zeros(256, dtype=torch.int32)
    plain = DecodeCall(q, k, k, lengths.int(), right=0)
    if packed:
        plain = PagedCall(q[:, 0], k, k, lengths.int(), offsets.int(), right=0, max_seqlen_q=1)
    kind = PagedProblem if packed else DecodeProblem

    def bound(factor: float, slopes: torch.Tensor, hidden: torch.Tensor):
        score = lambda s, b, h, i, j: s * factor + slopes[h]
        return ops_mods.bind_functions(plain, score, strobe.mask_mod(lambda b, h, i, j: j % 5 != hidden[j]))

    bound(0.5, slopes, hidden), bound(0.75, slopes, hidden)  # from now on the factor is an argument
    call = bound(2.0, slopes, hidden)
    plan = select(kind.from_call(call), FAKES["H200"]).forward
    assert plan.kernel.name == ("hopper.paged" if packed else "hopper.decode") and plan.config.traits.cluster
    found = Forward(*(torch.empty(shape) for shape in plan.problem.out_shapes))
    plan.kernel.run(plan, call, found, {})
    first, held = keys[-1], CACHE.launches[plan.number]
    addresses = lambda one: decode_addresses(one, *(tensor.data_ptr() for tensor in found))
    assert addresses(bound(2.0, slopes, hidden)) in held
    others = bound(3.0, slopes, hidden), bound(2.0, slopes.clone(), hidden), bound(2.0, slopes, hidden.clone())
    assert not any(addresses(other) in held for other in others)
    plan.kernel.run(plan, others[0], found, {})
    assert keys[-1] != first
    plan.kernel.run(plan, others[1], found, {})
    assert keys[-1] == first
