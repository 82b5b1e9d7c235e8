"""How verdicts are told: several faults in one run, counts, limits, the same words every time; and a pipeline that is
right stays silent.
"""

import os
import subprocess
import sys

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
    warpgroup_mma,
    warpgroup_mma_wait,
)
from strobe.sim import KINDS, Checks, SimulationFault, simulate
from strobe.sim.machine import MODES
from strobe.sim.report import Report, Reports, Stop

SIZE = gl.constexpr(128)


@gluon.jit
def index():
    return gl.arange(0, SIZE, gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def faulty_partition(note, out, bar):
    note.index(0).store(index())  # @one-write
    mbarrier.arrive(bar, count=2)  # @too-many
    gl.store(out + index(), note.index(1).load(index().type.layout))  # @unwritten


@gluon.jit
def other_partition(note, out, bar):
    note.index(0).store(index())  # @other-write
    gl.store(out + index() + 1, index())  # @outside


@gluon.jit
def faulty_kernel(out):
    note = gl.allocate_shared_memory(gl.int32, [2, SIZE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    gl.device_assert(gl.program_id(0) < 0, "no program is below zero")  # @assert
    gl.warp_specialize([(faulty_partition, (note, out, bar)), (other_partition, (note, out, bar))], [4], [64])


FAULTS = [
    ("assert", "no program is below zero", "@assert"),
    (
        "race",
        "on note",
        "store to note[0] by faulty_partition",
        "@one-write",
        "store to note[0] by other_partition",
        "@other-write",
    ),
    ("race", "on out", "store by faulty_partition", "@unwritten", "store by other_partition", "@outside"),
    ("barrier", "bar gets more arrivals than its count of 1 in one phase, the last by faulty_partition", "@too-many"),
    ("uninitialised", "load of note[1] by faulty_partition", "@unwritten"),
    ("bounds", "global store leaves out (0 elements before its start, 1 past its end, of 128)", "@outside"),
]


def faulty(programs=1):
    faulty_kernel[(programs,)](torch.empty(SIZE.value, dtype=torch.int32), num_warps=4)


def told(mode="pct", seed=0, programs=1, **options):
    with simulate("sm_90", mode, seed, check=False, **options) as run:
        faulty(programs)
    return run.reports


def test_every_fault_of_a_kernel_is_told_in_one_run(verdict):
    verdict(faulty, *FAULTS)


def test_a_fault_is_told_once_and_counted():
    once, thrice = told(), told(programs=3, sms=1)
    within = lambda reports: {report.kind: report.count for report in reports if report.kind not in ("race",)}
    assert within(once) == {kind: 1 for kind in ("assert", "barrier", "uninitialised", "bounds")}
    assert within(thrice) == {kind: 3 for kind in within(once)}
    assert str(Report("race", "x", "here")) == "race: x" and str(Report("race", "x", "here", 3)) == "race: x (3 times)"


def test_a_run_ends_after_max_reports():
    for most in (1, 2, 3):
        assert len(told(max_reports=most)) == most
    assert len(told(max_reports=50)) == len(FAULTS)


def test_nothing_is_collected_beyond_the_limit():
    reports = Reports(2)
    reports.add("race", "a", "here")
    reports.add("race", "a", "here")
    with pytest.raises(Stop):
        reports.add("race", "b", "here")
    assert [(report.text, report.count) for report in reports.list] == [("a", 2), ("b", 1)]


def test_a_launch_after_the_limit_does_not_run():
    with simulate("sm_90", check=False, max_reports=1) as run:
        faulty()
        faulty()
    assert run.launches == ["faulty_kernel"] and len(run.reports) == 1


def test_check_raises_with_every_report():
    with pytest.raises(SimulationFault) as caught, simulate("sm_90") as run:
        faulty()
    assert caught.value.reports == run.reports and len(run.reports) == len(FAULTS)
    assert f"the simulator found {len(FAULTS)} faults" in str(caught.value)
    assert all(str(report) in str(caught.value) for report in run.reports)
    with pytest.raises(SimulationFault, match="found a fault:"), simulate("sm_90", max_reports=1):
        faulty()
    with simulate("sm_90", check=False) as run:
        faulty()
    with pytest.raises(SimulationFault):
        run.check()


def test_a_report_says_where():
    for report in told():
        assert report.kind in KINDS and report.where.startswith("test_verdicts.py:") and report.where in report.text


@pytest.mark.parametrize("mode", MODES)
def test_one_seed_tells_the_same_every_time(mode):
    assert [told(mode, seed) for seed in range(3)] == [told(mode, seed) for seed in range(3)]


@pytest.mark.nightly
def test_the_words_do_not_depend_on_the_hash_seed():
    """Two processes, whose sets are in different order and whose tensors lie elsewhere."""
    program = (
        "import sys; sys.path[:0] = sys.argv[1:]; import test_verdicts as t; print(*(t.told(m, s) for m in "
        "t.MODES for s in (0, 1)), sep='\\n')"
    )
    outputs = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", program, os.path.dirname(__file__)]
        outputs.append(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert outputs[0] == outputs[1] and outputs[0].count("Report(") == len(FAULTS) * len(MODES) * 2


@gluon.jit
def after_read_kernel(x_desc, out):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(gl.float32, [8, 32], x_desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    for i in gl.static_range(2):
        mbarrier.expect(bar, x_desc.block_type.nbytes)
        tma_load(x_desc, [0, 0], bar, tile)  # @load
        mbarrier.wait(bar, i)
        value = tile.load(layout)  # @read
        gl.store(out + gl.arange(0, 8, gl.SliceLayout(1, layout)), gl.max(value, 1))


def test_a_fence_after_a_generic_read_is_asked_for_on_demand():
    def start(**options):
        x = torch.rand(8, 32)
        desc = TensorDescriptor.from_tensor(x, [8, 32], gl.NVMMASharedLayout.get_default_for([8, 32], gl.float32))
        with simulate("sm_90", check=False, **options) as run:
            after_read_kernel[(1,)](desc, torch.empty(8), num_warps=4)
        return [report.kind for report in run.reports]

    assert start() == [] and start(checks=Checks(read_fences=True)) == ["fence"]


def test_without_happens_before_only_what_shows_is_told():
    assert {report.kind for report in told(checks=Checks(happens_before=False))} == {"assert", "barrier", "bounds"}


# ---------------------------------------------------------------- a pipeline that is right


STAGES, BLOCK = gl.constexpr(2), gl.constexpr(64)


@gluon.jit
def load_partition(a_desc, b_desc, tiles, steps):
    a_smem, b_smem, ready, free = tiles
    for i in range(steps):
        mbarrier.wait(free.index(i % STAGES), (i // STAGES & 1) ^ 1)
        mbarrier.expect(ready.index(i % STAGES), a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        tma_load(a_desc, [gl.program_id(0) * BLOCK, i * BLOCK], ready.index(i % STAGES), a_smem.index(i % STAGES))
        tma_load(b_desc, [i * BLOCK, 0], ready.index(i % STAGES), b_smem.index(i % STAGES))


@gluon.jit
def multiply_partition(c_desc, tiles, steps):
    a_smem, b_smem, ready, free = tiles
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    total = gl.zeros([BLOCK, BLOCK], gl.float32, layout)
    for i in range(steps):
        mbarrier.wait(ready.index(i % STAGES), i // STAGES & 1)
        total = warpgroup_mma(a_smem.index(i % STAGES), b_smem.index(i % STAGES), total, is_async=True)
        total = warpgroup_mma_wait(1, deps=[total])
        mbarrier.arrive(free.index((i + STAGES - 1) % STAGES), pred=i > 0)
    total = warpgroup_mma_wait(0, deps=[total])
    c_smem = gl.allocate_shared_memory(gl.float16, [BLOCK, BLOCK], c_desc.layout, total.to(gl.float16))
    fence_async_shared()
    tma_store(c_desc, [gl.program_id(0) * BLOCK, 0], c_smem)
    tma_store_wait(0)


@gluon.jit
def pipeline_kernel(a_desc, b_desc, c_desc, steps):
    a_smem = gl.allocate_shared_memory(gl.float16, [STAGES, BLOCK, BLOCK], a_desc.layout)
    b_smem = gl.allocate_shared_memory(gl.float16, [STAGES, BLOCK, BLOCK], b_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    tiles = (a_smem, b_smem, ready, free)
    gl.warp_specialize(
        [(multiply_partition, (c_desc, tiles, steps)), (load_partition, (a_desc, b_desc, tiles, steps))], [1], [24]
    )


def pipeline(mode, seed, steps=5):
    generator = torch.Generator().manual_seed(seed)
    a, b = (
        torch.rand(128, 64 * steps, generator=generator).half(),
        torch.rand(64 * steps, 64, generator=generator).half(),
    )
    c = torch.full((128, 64), float("nan")).half()
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    with simulate("sm_90", mode, seed) as run:
        pipeline_kernel[(2,)](
            *(TensorDescriptor.from_tensor(x, [64, 64], layout) for x in (a, b, c)), steps, num_warps=4
        )
    assert run.reports == []
    torch.testing.assert_close(c.float(), a.float() @ b.float(), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("mode", MODES)
def test_a_right_pipeline_is_silent(mode):
    for seed in range(100 if mode in ("pct", "random") else 5):
        pipeline(mode, seed)
