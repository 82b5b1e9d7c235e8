"""Launches of the Blackwell decode, and of forwards with batch_invariant: those of Hopper with other kernels."""

from __future__ import annotations

from torch import Tensor

from ...problem.call import Call
from ...problem.decode import DecodeCall
from ..device.persistent_launch import Launch
from ..hopper import launch_decode as hopper
from ..hopper.decode_arguments import DecodeTensors, Partials
from ..protocol import Forward, Plan
from ..runtime import error_flags, launcher
from ..runtime.split_kv import insert_launch
from . import decode, decode_batch_invariant


def run_decode(plan: Plan, call: DecodeCall, t: Forward, workspace: dict[str, Tensor]) -> None:
    partials = hopper.partials_of(plan, workspace, call.q.device)
    word = error_flags.word(call.q.device)
    tensors = DecodeTensors(
        call.q, call.k, call.v, call.page_table, call.seqlens, call.k_start, t.out, t.lse, call.sinks, None
    )
    moving = (*tensors, call.k_scale, call.v_scale, *partials, word)
    launch = launcher.start(plan, t.out.stride(), moving, lambda: decode_launch(plan, call, tensors, partials, word))
    insert_launch(plan, call, t, workspace, launch)


def decode_launch(plan: Plan, call: DecodeCall, tensors: DecodeTensors, partials: Partials, word: Tensor) -> Launch:
    return hopper.decode_launch(plan, call, tensors, partials, word)._replace(kernel=decode.decode_kernel)


def run_invariant(plan: Plan, call: Call, t: Forward) -> None:
    """Launch a forward that gives each row the bits of its decode."""
    hopper.run_invariant(plan, call, t, decode_batch_invariant.invariant_kernel)
