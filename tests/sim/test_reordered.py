"""Views of shared memory whose elements have no strides: a transposed view that is reshaped."""

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from strobe.sim import simulate


@gluon.jit
def reordered_kernel(x, out, WRITTEN: gl.constexpr):
    """[8, 16] numbers as [2, 4, 4, 4], transposed to [2, 4, 4, 4], and as [8, 16] again."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0])
    rows = gl.arange(0, 8, gl.SliceLayout(1, layout))
    columns = gl.arange(0, 16, gl.SliceLayout(0, layout))
    at = rows[:, None] * 16 + columns[None, :]
    buffer = gl.allocate_shared_memory(gl.int32, [8, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    if WRITTEN:
        buffer.store(gl.load(x + at))
    view = buffer.reshape([2, 4, 4, 4]).permute((0, 3, 2, 1)).reshape([8, 16])
    gl.store(out + at, view.load(layout))


def test_a_transposed_view_that_is_reshaped():
    x = torch.arange(128, dtype=torch.int32).view(8, 16)
    out = torch.zeros_like(x)
    with simulate("sm_90"):
        reordered_kernel[(1,)](x, out, True)
    assert torch.equal(out, x.view(2, 4, 4, 4).permute(0, 3, 2, 1).reshape(8, 16))


@pytest.mark.parametrize("mode", ["eager", "pct"])
def test_its_elements_are_those_of_the_buffer(mode):
    """A buffer that nobody has written is reported through the view."""
    with simulate("sm_90", mode, check=False) as run:
        reordered_kernel[(1,)](torch.zeros(8, 16).int(), torch.zeros(8, 16).int(), False)
    assert [report.kind for report in run.reports] == ["uninitialised"]
