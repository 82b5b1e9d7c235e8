"""Counts of sectors, bank conflicts, bytes and occupancy, against arithmetic."""

import json

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from strobe.sim import Checks, simulate
from strobe.sim.costs import Occupancy, held_by_default, requests, total
from tests.specimens import matmul

COSTS = Checks(costs=True)


def costs_of(kernel, *arguments, grid=1, **options):
    with simulate("sm_90", checks=COSTS) as run:
        kernel[(grid,)](*arguments, **options)
    return run.costs


@triton.jit
def moved_kernel(x, out, STRIDE: tl.constexpr, SHIFT: tl.constexpr, SIZE: tl.constexpr, LIVE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at * STRIDE + SHIFT, mask=at < LIVE, other=0))


# (dtype, stride, shift, size, live) -> (requests, sectors), for four warps
LOADS = [
    ((torch.float32, 1, 0, 1024, 1024), (8, 128)),  # 16 bytes a thread: 16 sectors for each of 1024 / 128 requests
    ((torch.float32, 1, 1, 1024, 1024), (32, 160)),  # 4 bytes past a boundary: one element a request, 5 sectors
    ((torch.float32, 2, 0, 1024, 1024), (32, 256)),  # every second element: half of each sector is used
    ((torch.float32, 8, 0, 1024, 1024), (32, 1024)),  # a sector an element
    ((torch.float32, 32, 0, 1024, 1024), (32, 1024)),
    ((torch.float16, 1, 0, 1024, 1024), (4, 64)),  # eight elements a thread
    ((torch.float16, 1, 0, 512, 512), (4, 32)),  # four elements a thread: 8 bytes
    ((torch.int8, 1, 0, 1024, 1024), (4, 32)),  # 8 bytes a thread
    ((torch.float32, 1, 0, 1024, 512), (4, 64)),  # the second half is masked: those warps make no request
    ((torch.float64, 1, 0, 512, 512), (8, 128)),
    ((torch.float32, 0, 0, 128, 128), (4, 4)),  # one address for all threads
]


@pytest.mark.parametrize("how, expected", LOADS)
def test_requests_and_sectors_of_loads(how, expected):
    dtype, stride, _, size, live = how
    x = torch.zeros(size * max(stride, 1) + 64, dtype=dtype)
    assert x.data_ptr() % 64 == 0
    costs = costs_of(moved_kernel, x, torch.zeros(size, dtype=dtype), *how[1:])
    loads = total(costs.rows, "global load")
    assert (loads.requests, loads.sectors) == expected
    assert loads.bytes == live * dtype.itemsize == costs.bytes["global load"]
    assert total(costs.rows, "global store").bytes == size * dtype.itemsize


def test_the_part_of_the_sectors_that_is_used():
    row = total(costs_of(moved_kernel, torch.zeros(4096), torch.zeros(1024), 4, 0, 1024, 1024).rows, "global load")
    assert row.used == 0.25 and row.sectors_per_request == 16.0


@triton.jit
def transposed_kernel(x, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Loads along the first dimension are contiguous, stores along the second."""
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    tl.store(out + rows * COLUMNS + columns, tl.load(x + columns * ROWS + rows))


def test_the_contiguous_dimension_is_the_fastest():
    costs = costs_of(transposed_kernel, torch.zeros(64 * 32), torch.zeros(64 * 32), 64, 32)
    assert all(row.sectors_per_request == 16.0 and row.used == 1.0 for row in costs.rows)


@gluon.jit
def layout_kernel(x, out, layout: gl.constexpr):
    rows = gl.arange(0, 32, gl.SliceLayout(1, layout))[:, None]
    at = rows * 32 + gl.arange(0, 32, gl.SliceLayout(0, layout))[None, :]
    gl.store(out + at, gl.load(x + at))


@pytest.mark.parametrize(
    "layout, expected",
    [
        (gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]), (8, 128)),
        (gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]), (32, 128)),
        (gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1]), (32, 1024)),  # a warp reads a column
    ],
)
def test_layouts_of_gluon_are_what_they_say(layout, expected):
    costs = costs_of(layout_kernel, torch.zeros(1024), torch.zeros(1024), layout)
    for kind in ("global load", "global store"):
        row = total(costs.rows, kind)
        assert (row.requests, row.sectors) == expected


def test_warps_that_hold_the_same_store_once():
    costs = costs_of(moved_kernel, torch.zeros(64), torch.zeros(32), 1, 0, 32, 32)
    loads, stores = (total(costs.rows, kind) for kind in ("global load", "global store"))
    assert (loads.requests, loads.sectors, stores.requests, stores.sectors) == (4, 16, 1, 4)


@gluon.jit
def column_kernel(out, shared: gl.constexpr):
    """Stores rows and loads columns of a tile in shared memory."""
    row: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    column: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])
    tile = gl.allocate_shared_memory(gl.float32, [32, 32], shared, gl.full([32, 32], 1.0, gl.float32, row))
    value = tile.load(column)
    at = (
        gl.arange(0, 32, gl.SliceLayout(1, column))[:, None] * 32 + gl.arange(0, 32, gl.SliceLayout(0, column))[None, :]
    )
    gl.store(out + at, value)


@pytest.mark.parametrize("phases, conflicts", [(1, 31), (32, 0)])
def test_bank_conflicts(phases, conflicts):
    costs = costs_of(column_kernel, torch.zeros(1024), gl.SwizzledSharedLayout(1, 1, phases, [1, 0]))
    store, load = (total(costs.rows, f"shared {kind}") for kind in ("store", "load"))
    assert (store.conflicts, load.conflicts) == (0, conflicts) and load.bytes == store.bytes == 4096


def test_bytes_that_tma_moves():
    """Each CTA loads the rows and the columns of its tile once, and the result is stored once."""
    a, b = torch.randn(256, 128).half(), torch.randn(128, 256).half()
    config = matmul.Config()
    with simulate("sm_90", checks=COSTS) as run:
        out = matmul.run(a, b)
    assert run.costs.bytes["TMA store"] == out.nbytes
    assert run.costs.bytes["TMA load"] == run.stats["ctas"] * (config.block_m + config.block_n) * 128 * 2
    assert run.costs.occupancy[0].warps % 4 == 0 and "shared memory" in run.costs.occupancy[0].limit


@pytest.mark.parametrize(
    "given, expected",
    [
        ((90, 100 * 1024, 8, 0), (2, "102,400 bytes of shared memory")),
        ((90, 227 * 1024, 12, 0), (1, "232,448 bytes of shared memory")),
        ((90, 1024, 4, 0), (16, "4 warps")),
        ((90, 1024, 4, 255), (2, "255 registers a thread")),
        ((90, 0, 1, 0), (32, "the number of CTAs")),
        ((86, 0, 8, 0), (6, "8 warps")),
        ((86, 0, 1, 0), (16, "the number of CTAs")),
        ((120, 0, 1, 0), (24, "the number of CTAs")),
        ((90, 0, 4, 33), (12, "33 registers a thread")),  # a thread gets 40
    ],
)
def test_occupancy(given, expected):
    found = Occupancy.of("kernel", *given)
    assert (found.ctas, found.limit) == expected and found.warps == found.ctas * given[2]


def test_the_report_names_lines_and_launches():
    text = str(costs_of(moved_kernel, torch.zeros(1024), torch.zeros(1024), 1, 0, 1024, 1024, num_warps=8))
    assert "global load of 4,096 bytes, 8 requests of 16.0 sectors, 100% used, at test_costs.py:" in text
    assert "moved_kernel: 8 CTAs, 64 of 64 warps on a multiprocessor; limited by 8 warps" in text


def test_nothing_is_counted_unasked():
    with simulate("sm_90") as run:
        moved_kernel[(1,)](torch.zeros(64), torch.zeros(64), 1, 0, 64, 64)
    assert not run.costs.rows and not run.costs.occupancy and str(run.costs) == "no access"


def test_the_timeline_holds_the_costs(tmp_path):
    with simulate("sm_90", "timed", checks=COSTS) as run:
        column_kernel[(1,)](torch.zeros(1024), gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    run.save(str(tmp_path / "run.json"))
    run.save(str(tmp_path / "run.html"))
    assert "31 bank conflicts" in json.loads((tmp_path / "run.json").read_text())["otherData"]["costs"]
    assert "31 bank conflicts an instruction" in (tmp_path / "run.html").read_text()


def test_vectors_need_equal_masks_and_alignment():
    at = np.arange(0, 512, 4) + 4096
    held = held_by_default(at, 4, 1)
    assert held.shape == (1, 32, 4) and requests(at, np.ones(128, bool), 4, held, True) == (1, 16)
    odd = np.arange(128) % 4 != 3  # three of four elements: no vector of four, none of two
    assert requests(at, odd, 4, held, True) == (3, 48)
    assert requests(at + 8, np.ones(128, bool), 4, held, True) == (2, 2 * 17 - 1)
