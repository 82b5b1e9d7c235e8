"""Descriptors whose addresses wrap: a window for any run of rows, which ends at one coordinate wherever it begins.

The layout is that of triton.tools.ragged_tma; the two places are the simulator and, where there is one, a GPU.
"""

import pytest
import torch

from strobe.kernels.device.dialect import (
    TensorDescriptor,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store,
    tma_store_wait,
)
from strobe.sim import simulate
from tests.sim.places import PLACES, launch

FAR = 2**30  # where rows end
ROWS, COLUMNS = 16, 32
BLOCK = [1, 1, ROWS, COLUMNS]


@gluon.jit
def move_kernel(source, target, start, length, row, shift):
    """Rows start .. start + length - 1 from `row` on, of source to the same place of target; shift moves the end."""
    FAR: gl.constexpr = 2**30
    tile = gl.allocate_shared_memory(gl.float32, source.block_shape, source.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.expect(ready, source.block_type.nbytes)
    tma_load(source, [FAR, start + length + shift, FAR - length + row, 0], ready, tile)
    mbarrier.wait(ready, 0)
    fence_async_shared()
    tma_store(target, [FAR, start + length + shift, FAR - length + row, 0], tile)
    tma_store_wait(0)


def descriptor(tensor):
    step = tensor.stride(0)
    layout = gl.NVMMASharedLayout.get_default_for(BLOCK, gl.float32)
    return TensorDescriptor(
        tensor, [0x7FFF0000, 0x7FFF0000, FAR, tensor.shape[1]], [2**34 - step, step, step, 1], BLOCK, layout
    )


@pytest.mark.parametrize(
    "start, length, row", [(0, 40, 0), (5, 20, 0), (5, 20, 8), (5, 20, 16), (33, 7, 0), (39, 1, 0), (12, 0, 0)]
)
@pytest.mark.parametrize("place", PLACES)
def test_rows_of_a_run_alone_are_moved(place, start, length, row):
    """What a tile has beyond the run is neither read (zeros come for it) nor written."""
    source = torch.arange(40 * COLUMNS, dtype=torch.float32).view(40, COLUMNS)
    target = torch.full((40, COLUMNS), -1.0)
    launch(place, move_kernel, descriptor(source), descriptor(target), start, length, row, 0)
    moved = torch.zeros(40, dtype=torch.bool)
    moved[start + row : min(start + row + ROWS, start + length)] = True
    assert torch.equal(target[moved], source[moved]) and target[~moved].eq(-1.0).all()


@pytest.mark.parametrize("shift", [-100, 100])
def test_a_part_outside_the_tensor_is_told(shift):
    source, target = torch.zeros(40, COLUMNS), torch.zeros(40, COLUMNS)
    with simulate("sm_90", check=False) as run:
        move_kernel[(1,)](descriptor(source), descriptor(target), 5, 20, 0, shift)
    assert {report.kind for report in run.reports} == {"bounds"}
    assert all("TMA copy" in report.text for report in run.reports)
