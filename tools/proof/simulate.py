"""Run production kernels in the simulator: the family's own launch code runs the plan that `select` makes for a GPU, on
CPU tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from strobe.kernels.protocol import Forward
from strobe.kernels.runtime.launch_cache import CACHE
from strobe.ops import attention as ops
from strobe.problem.call import Call
from strobe.problem.problem import Problem
from strobe.problem.target import Target
from strobe.sim import Checks, Run, simulate
from strobe.testing import Poison

# On an H200, TMA writes overtook loads into registers that were queued behind stores, in spite of a barrier of the
# partition and an mbarrier in between: ptxas makes neither wait for a load's result. One variant read rows of the next
# tile in 12 of 12 runs. With a proxy fence before the arrival it never did.
READ_FENCES = Checks(read_fences=True)


@contextmanager
def posing(target: Target) -> Iterator[None]:
    """Within the block, CPU tensors count as tensors on `target`: selection and launches are those of that GPU. Use it
    with `simulate`.

    >>> from strobe.problem.target import FAKES
    >>> with posing(FAKES["H200"]):
    ...     Target.of(torch.device("cpu")).name
    'H200'
    """
    with mock.patch.object(Target, "of", staticmethod(lambda device: target)), CACHE.emptied():
        yield


@contextmanager
def on(target: Target, mode: str = "eager", seed: int = 0, **options: Any) -> Iterator[Run]:
    """`posing` and `simulate` together. min(4, SMs of the target) CTAs are in flight, unless `options` has another
    "sms".
    """
    options = {"sms": min(target.sm_count, 4), "checks": READ_FENCES} | options
    with posing(target), simulate(f"sm_{target.capability}", mode, seed, **options) as run:
        yield run


def simulated(call: Call, target: Target, mode: str = "eager", seed: int = 0, kernel: str = "") -> tuple[Forward, Run]:
    """out and lse of a call with the kernels for `target`, and the simulated run. The caller must check the run's
    reports.

    Inputs and outputs are between guard bands, and outputs start as NaN. Raises AssertionError if a band or an input
    changes.
    """
    bare = call._replace(needs_grad=False, kernel=kernel or call.kernel)
    bare = bare._replace(
        **{name: t.detach() for name in ("q", "k", "v", "sinks") if (t := getattr(bare, name)) is not None}
    )
    problem = Problem.from_call(bare)
    with on(target, mode, seed, check=False) as run, Poison() as poison:
        out = poison.empty(torch.empty(problem.out_shapes[0], dtype=problem.out_dtype))
        found = ops.run(poison.enclose_call(bare), out)
    return Forward(*found), run
