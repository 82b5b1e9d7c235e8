"""What a deadlock's report says: who waits, who arrived before and what they do now, each barrier by its name."""

import torch

from strobe.kernels.device.dialect import gl, gluon, mbarrier
from strobe.sim import simulate
from tests.sim.test_verdicts_barriers import ring


def deadlock(run_kernel, **options) -> list[str]:
    """The lines of the only report."""
    with simulate("sm_90", "eager", check=False, **options) as run:
        run_kernel()
    (report,) = run.reports
    assert report.kind == "deadlock"
    return [line.strip() for line in report.text.splitlines()]


def test_the_partition_that_should_have_arrived_is_named():
    lines = deadlock(lambda: ring("arrive"))
    # a consumer did not free the first stage: the producer waits for it, and both consumers for the producer
    assert any(line.startswith("free[0]: sum_partition has arrived in this phase") for line in lines)
    (cause,) = (line for line in lines if line.startswith("ready[0]: load_partition"))
    assert "arrived last in phase 0" in cause and cause.endswith(
        "now it waits for parity 0 of free[0] (phase 0: 1 of 2 arrivals and 0 bytes missing)"
    )


def test_the_state_of_each_barrier_has_its_variables_name():
    state = deadlock(lambda: ring("arrive"))[-1]
    assert state.startswith("barriers of CTA 0: ready[0] in phase 1: 1 of 1 arrivals and 0 bytes missing; free[0] in ")
    assert all(name in state for name in ("ready[1] in phase 1", "free[1] in phase 1", "ready[2] in phase 0"))


def test_a_partition_that_has_ended_is_told():
    lines = deadlock(lambda: ring("expect"))
    assert any(
        line.startswith("ready[0]: load_partition arrived last") and line.endswith("has ended") for line in lines
    )


@gluon.jit
def alone_kernel(x):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.wait(bar, 0)
    gl.store(x, 1.0)


def test_ctas_that_wait_alike_are_one_line():
    lines = deadlock(lambda: alone_kernel[(6,)](torch.zeros(1)), sms=6)
    assert lines[1].startswith("main of CTAs 0, 1, 2, 3, 4, 5 waits for parity 0 of bar (phase 0: 1 of 1 arrivals")
    assert lines[2:] == [
        "bar: nobody has arrived since its initialisation",
        "barriers of CTA 0: bar in phase 0: 1 of 1 arrivals and 0 bytes missing",
    ]
