"""Verdicts on barriers at which each thread arrives by itself: a buffer that is written and read in turn, whose
synchronisation is changed one piece at a time; `off` names the piece.
"""

import pytest
import torch

from strobe.kernels.device.dialect import gl, gluon
from strobe.kernels.device.per_thread_mbarrier import barrier_arrive, barrier_wait, per_thread_mbarriers

ROUNDS, NUMBERS, THREADS = gl.constexpr(3), gl.constexpr(256), gl.constexpr(128)


@gluon.jit
def write_partition(x, place, barriers, off: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    numbers = gl.arange(0, NUMBERS, layout)
    for round_index in gl.static_range(ROUNDS):
        if off != "wait free":
            barrier_wait(barriers, 1, (round_index + 1) % 2, True)  # @wait-free
        place.store(gl.load(x + round_index * NUMBERS + numbers))  # @write
        if off != "ring" or round_index != 1:
            barrier_arrive(barriers, 0, True)  # @ring


@gluon.jit
def read_partition(out, place, barriers, off: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    numbers = gl.arange(0, NUMBERS, layout)
    for round_index in gl.static_range(ROUNDS):
        if off != "wait":
            barrier_wait(barriers, 0, round_index % 2, True)  # @wait
        gl.store(out + round_index * NUMBERS + numbers, place.load(layout))  # @read
        barrier_arrive(barriers, 1, True)


@gluon.jit
def per_thread_kernel(x, out, off: gl.constexpr):
    place = gl.allocate_shared_memory(gl.float32, [NUMBERS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    barriers = per_thread_mbarriers(2, THREADS + (off == "one more"))
    gl.warp_specialize(
        [(read_partition, (out, place, barriers, off)), (write_partition, (x, place, barriers, off))], [4], [64]
    )


def ring(off=""):
    x = torch.arange(ROUNDS.value * NUMBERS.value).float()
    out = torch.full_like(x, float("nan"))
    per_thread_kernel[(1,)](x, out, off, num_warps=4)
    if not off:
        assert torch.equal(out, x)


def test_each_thread_arrives_and_all_are_waited_for(verdict):
    verdict(ring)


BENT = {
    "ring": [("deadlock", "read_partition waits for parity 1", "128 of 128 arrivals", "@wait")],
    "one more": [("deadlock", "read_partition waits for parity 0", "1 of 129 arrivals", "@wait")],
}


@pytest.mark.parametrize("off", BENT)
def test_each_piece(verdict, off):
    verdict(lambda: ring(off), *BENT[off])


def test_who_does_not_wait_races(verdict):
    """A phase is then over before it was waited for, or never."""
    ended, raced = ("barrier", "a phase of mbarrier at", "ends"), (("race", "@read"), ("race", "@write"))
    verdict(lambda: ring("wait"), sometimes=(*raced, ended, ("deadlock", "@wait-free"), ("uninitialised", "@read")))
    verdict(lambda: ring("wait free"), sometimes=(*raced, ended, ("deadlock", "@wait")))
