"""Launches of the Blackwell decode, and of forwards with batch_invariant: those of Hopper with other kernels."""

from __future__ import annotations

from torch import Tensor

from ...problem.call import Call
from ...problem.decode import DecodeCall
from ..hopper import launch_decode as hopper
from ..protocol import Forward, Plan
from . import decode, decode_batch_invariant


def run_decode(plan: Plan, call: DecodeCall, t: Forward, workspace: dict[str, Tensor]) -> None:
    hopper.run_decode(plan, call, t, workspace, decode.decode_kernel)


def run_invariant(plan: Plan, call: Call, t: Forward) -> None:
    """Launch a forward that gives each row the bits of its decode."""
    hopper.run_invariant(plan, call, t, decode_batch_invariant.invariant_kernel)
