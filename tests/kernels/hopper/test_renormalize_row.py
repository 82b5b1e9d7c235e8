"""`optimistic_softmax.renormalize_row`: rows that outgrow 2^(lift + most) are divided by their largest sum, others are
left as they are. Simulated, and on a GPU, where it rests on how threads hold a product.
"""

import pytest
import torch

pytest.importorskip("triton")

from strobe.kernels.device.dialect import gl, gluon
from strobe.kernels.device.layouts import lanes_of, sum_in_lanes
from strobe.kernels.hopper.optimistic_softmax import renormalize_row
from strobe.sim import simulate


@gluon.jit
def range_kernel(p, states, COLUMNS: gl.constexpr, LIFT: gl.constexpr, MOST: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    places = (
        gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None] * COLUMNS
        + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :]
    )
    lanes: gl.constexpr = lanes_of(64)
    at = (
        states
        + gl.arange(0, 64, gl.SliceLayout(1, lanes))[:, None] * 4
        + gl.arange(0, 4, gl.SliceLayout(0, lanes))[None, :]
    )
    weights = gl.load(p + places)
    state = (gl.load(at), gl.load(at + 256), gl.load(at + 512))
    found = renormalize_row(weights, sum_in_lanes(weights), state[0], state[1], state[2], LIFT, MOST)
    gl.store(p + places, found.p)
    gl.store(at, found.row_max)
    gl.store(at + 256, found.row_sum)
    gl.store(at + 512, found.rescale)


def _numbers(columns: int, case: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights below 1 in most rows; in others, of which no warp has two in the same rows, one lane's sum is far
    larger."""
    generator = torch.Generator().manual_seed(columns)
    p, states = torch.rand(64, columns, generator=generator), torch.rand(3, 64, 4, generator=generator)
    states[0] = 100 - 200 * states[0, :, :1]  # of maxima and what is rescaled by, all lanes have the same
    states[2] = states[2, :, :1]
    if case == "some":
        for row, column, size in ((0, 3, 2.0**16), (9, columns - 1, 2.0**20), (17, 0, 2.0**24), (63, 6, 2.0**31)):
            p[row, column] = size
    elif case == "all":
        p *= 2.0 ** torch.randint(17, 115, (64, 1), generator=generator)
    elif case == "infinite":
        p[5, 5], p[40, 1], p[51, 2] = torch.inf, torch.nan, 1.1 * 2.0**125
    return p, states


def _want(p: torch.Tensor, states: torch.Tensor, lift: int, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    largest = p.double().reshape(64, -1, 4, 2).sum((1, 3)).amax(1) / 2.0**lift
    grown = torch.where(largest > 2.0**most, torch.where(largest > 2.0 ** (125 - lift), torch.inf, largest), 1.0)[
        :, None
    ]
    return torch.where(grown == 1.0, p.double(), p.double() / grown), torch.stack(
        [states[0] + grown.log2(), states[1] / grown, states[2] / grown]
    )


def _check(device: str, columns: int, case: str, lift: int, most: int) -> None:
    p, states = before = _numbers(columns, case)
    want_p, want_states = _want(p, states, lift, most)
    p, states = p.to(device, copy=True), states.to(device, copy=True)
    range_kernel[(1,)](p, states, columns, lift, most, num_warps=4)
    kept = (want_states[0] == before[1][0]).all(1)
    assert {"none": 64, "some": 60, "all": 0, "infinite": 62}[case] == int(kept.sum())
    torch.testing.assert_close(p.cpu()[kept], before[0][kept], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(states.cpu()[:, kept], before[1][:, kept], rtol=0, atol=0)
    # 2^-22: what rcp.approx errs by, and two roundings; lg2.approx errs as much (PTX ISA 8.7, section 9.7.3); and a
    # lane's sum
    near = 2.0**-22 + columns // 4 * 2.0**-24
    torch.testing.assert_close(p.cpu(), want_p.float(), rtol=near, atol=0, equal_nan=True)
    torch.testing.assert_close(states.cpu()[1:], want_states.float()[1:], rtol=near, atol=0)
    torch.testing.assert_close(states.cpu()[0], want_states.float()[0], rtol=2.0**-23, atol=near)


CONFIGS = [
    (columns, case, lift, most)
    for columns in (32, 64, 128)
    for case in ("none", "some", "all")
    for lift, most in ((0, 8), (7, 8))
]
CONFIGS[:0] = [(64, "infinite", 0, 8)]


@pytest.mark.parametrize("columns, case, lift, most", CONFIGS)
def test_rows_are_renormalize_row(columns, case, lift, most):
    with simulate("sm_90", "eager"):
        _check("cpu", columns, case, lift, most)


@pytest.mark.gpu
@pytest.mark.parametrize("columns, case, lift, most", CONFIGS)
def test_rows_are_renormalize_row_on_a_gpu(columns, case, lift, most):
    _check("cuda", columns, case, lift, most)
