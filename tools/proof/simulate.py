"""Production kernels in the simulator: the plan that `select` makes for a GPU, run on CPU tensors by the family's own launch code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from strobe.kernels.protocol import Forward
from strobe.ops import attention as ops
from strobe.ops import decode as ops_decode
from strobe.problem.call import Call
from strobe.problem.problem import Problem
from strobe.problem.target import Target
from strobe.selection.choices import Choices
from strobe.sim import Checks, Run, simulate
from strobe.testing import Poison

# On an H200 TMA overtook loads into registers that queued behind stores, though a barrier of the partition and an mbarrier stood between
# (ptxas lets neither wait for a load's result): rows of a next tile in 12 of 12 runs of one variant, none with a proxy fence before the arrival.
READ_FENCES = Checks(read_fences=True)


@contextmanager
def posing(target: Target) -> Iterator[None]:
    """CPU tensors pass for tensors on `target`: calls are decided, and launch, as they would there. Inside `simulate`, they run.

    >>> from strobe.problem.target import FAKES
    >>> with posing(FAKES["H200"]):
    ...     Target.of(torch.device("cpu")).name
    'H200'
    """
    decided = mock.patch.object(ops, "_choices", Choices()), mock.patch.object(ops_decode, "_choices", Choices())
    with mock.patch.object(Target, "of", staticmethod(lambda device: target)), decided[0], decided[1]:
        yield


@contextmanager
def on(target: Target, mode: str = "eager", seed: int = 0, **options: Any) -> Iterator[Run]:
    """`posing` and `simulate` in one: as many CTAs in flight as the target has SMs, but at most four unless `options` says so."""
    options = {"sms": min(target.sm_count, 4), "checks": READ_FENCES} | options
    with posing(target), simulate(f"sm_{target.capability}", mode, seed, **options) as run:
        yield run


def simulated(call: Call, target: Target, mode: str = "eager", seed: int = 0, kernel: str = "") -> tuple[Forward, Run]:
    """out and lse of a call as `target` would run it, and the simulated run, whose reports are left to the caller.

    Inputs and outputs stand between guard bands, outputs are NaN before they are written; AssertionError where a band or an input changes.
    """
    bare = call._replace(needs_grad=False, kernel=kernel or call.kernel)
    bare = bare._replace(**{name: t.detach() for name in ("q", "k", "v", "sinks") if (t := getattr(bare, name)) is not None})
    problem = Problem.from_call(bare)
    with on(target, mode, seed, check=False) as run, Poison() as poison:
        out = poison.empty(torch.empty(problem.out_shapes[0], dtype=problem.out_dtype))
        found: tuple[Tensor, Tensor] = ops.run(poison.enclose_call(bare), out)
    return Forward(*found), run
