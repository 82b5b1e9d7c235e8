"""Memory that one function allocates again and again: agents are told apart by names, so no two may be alike."""

import pytest
import torch
from triton.experimental.gluon.language._layouts import NVMMASharedLayout

from strobe.kernels.device.dialect import TensorDescriptor, gl, gluon, mbarrier, record, tma_load
from strobe.sim import simulate

BLOCK = [8, 32]


@gluon.jit
def barrier():
    """A barrier; every caller's is allocated under this one name."""
    made = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(made, count=1)
    return made


@record
class Channel:
    """A barrier in an aggregate, whose memory takes the name of the aggregate's variable and field."""

    ready: gl.shared_memory_descriptor


@gluon.jit
def two_loads_kernel(desc, out, off: gl.constexpr, held: gl.constexpr):
    """Two tiles, each with a barrier of its own; `off` leaves out the wait for the first."""
    if held:
        first = Channel(barrier())
        second = Channel(barrier())
        two_loads(desc, out, first.ready, second.ready, off)
    else:
        first_ready = barrier()
        second_ready = barrier()
        two_loads(desc, out, first_ready, second_ready, off)


@gluon.jit
def two_loads(desc, out, first_ready, second_ready, off: gl.constexpr):
    registers: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    first = gl.allocate_shared_memory(gl.float32, desc.block_shape, desc.layout)
    second = gl.allocate_shared_memory(gl.float32, desc.block_shape, desc.layout)
    mbarrier.expect(first_ready, desc.block_type.nbytes)
    tma_load(desc, [0, 0], first_ready, first)
    mbarrier.expect(second_ready, desc.block_type.nbytes)
    tma_load(desc, [8, 0], second_ready, second)
    if off != "wait":
        mbarrier.wait(first_ready, 0)
    mbarrier.wait(second_ready, 0)
    total = first.load(registers) + second.load(registers)
    rows = gl.arange(0, 8, gl.SliceLayout(1, registers))
    columns = gl.arange(0, 32, gl.SliceLayout(0, registers))
    gl.store(out + rows[:, None] * 32 + columns[None, :], total)


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("off, kinds", [("", set()), ("wait", {"race", "unfinished"})])
def test_the_load_that_nobody_waits_for_is_told_from_the_other(off, kinds, held):
    source, out = torch.ones(16, 32), torch.zeros(8, 32)
    layout = NVMMASharedLayout.get_default_for(BLOCK, gl.float32)
    with simulate("sm_90", check=False) as run:
        two_loads_kernel[(1,)](TensorDescriptor.from_tensor(source, BLOCK, layout), out, off, held)
    assert {report.kind for report in run.reports} == kinds
