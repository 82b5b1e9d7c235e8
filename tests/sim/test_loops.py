"""Loops of a kernel: one without end is reported, the buffers of its body are counted once, and names that a branch
assigns are carried.
"""

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from strobe.kernels.device.dialect import TensorDescriptor, fence_async_shared, tma_store, tma_store_wait
from strobe.sim import Checks, simulate
from strobe.sim.machine import MODES


@triton.jit
def endless_kernel(x, steps):
    limit, i = tl.load(x), 0
    while limit < 5:
        i += 1
    for _ in range(steps):
        i += 1
    tl.store(x, i)


@pytest.mark.parametrize("mode", MODES)
def test_a_loop_without_end_is_reported(mode):
    with simulate("sm_90", mode, check=False, checks=Checks(max_iterations=3000)) as run:
        endless_kernel[(2,)](torch.zeros(1, dtype=torch.int32), 3)
    (report,) = run.reports
    assert report.kind == "deadlock" and "test_loops.py:22 endless_kernel" in report.where
    assert "iteration 3,000 of the loop" in report.text
    assert "changing: i = 3000; not changing: steps = 3, limit = 0" in report.text


def test_a_long_loop_is_reported_with_its_length():
    with simulate("sm_90", check=False, checks=Checks(max_iterations=50)) as run:
        endless_kernel[(1,)](torch.full([1], 7, dtype=torch.int32), 60)
    assert "iteration 50 of 60 of the loop" in run.reports[0].text
    x = torch.full([1], 7, dtype=torch.int32)
    with simulate("sm_90", checks=Checks(max_iterations=61)):
        endless_kernel[(1,)](x, 60)
    assert x.item() == 60


@triton.jit
def two_flags_kernel(flags, out):
    """The second program spins on two flags by turns, which the first program sets."""
    if tl.program_id(0) == 0:
        tl.atomic_xchg(flags, 1)
        tl.atomic_xchg(flags + 1, 1)
    else:
        seen = 0
        while seen < 2:
            seen = tl.load(flags, volatile=True) + tl.load(flags + 1, volatile=True)
        tl.store(out, seen)


@pytest.mark.parametrize("mode", MODES)
def test_a_spin_on_two_values_lets_the_other_program_run(mode):
    flags, out = torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with simulate("sm_90", mode):
        two_flags_kernel[(2,)](flags, out)
    assert out.item() == 2


# ---------------------------------------------------------------- allocations


@gluon.jit
def in_a_loop_kernel(x, turns, buffers: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    index = gl.arange(0, 16384, layout)
    for _ in range(turns):
        for _ in gl.static_range(buffers):
            buffer = gl.allocate_shared_memory(gl.float32, [16384], shared)
            buffer.store(gl.load(x + index) + 1)
            gl.store(x + index, buffer.load(layout))


@pytest.mark.parametrize("turns, buffers", [(9, 1), (9, 3), (1, 4), (2, 4)])
def test_the_buffers_of_a_loops_body_are_counted_once(turns, buffers):
    """Each buffer has 64 KiB; the target has 227. One is in use at once, and the compiler gives all the same place."""
    x = torch.zeros(16384)
    with simulate("sm_90", check=False) as run:
        in_a_loop_kernel[(1,)](x, turns, buffers)
    assert not run.reports
    assert torch.equal(x, torch.full_like(x, turns * buffers))


@gluon.jit
def together_kernel(x, turns, buffers: gl.constexpr, TOGETHER: gl.constexpr):
    """In each turn a buffer is read after the others are filled, or before them."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    index = gl.arange(0, 16384, layout)
    for _ in range(turns):
        first = gl.allocate_shared_memory(gl.float32, [16384], shared, gl.load(x + index) + 1)
        if not TOGETHER:
            gl.store(x + index, first.load(layout))
        for _ in gl.static_range(buffers):
            buffer = gl.allocate_shared_memory(gl.float32, [16384], shared, gl.load(x + index) + 1)
            gl.store(x + index, buffer.load(layout))
        if TOGETHER:
            gl.store(x + index, first.load(layout))


@pytest.mark.parametrize("buffers, together, kib", [(3, False, 64), (3, True, 128), (1, True, 128)])
def test_buffers_whose_last_use_is_over_make_room(buffers, together, kib):
    """The compiler's shared memory, and the simulator's limit."""
    x = torch.zeros(16384)
    signature = {"x": "*fp32", "turns": "i32", "buffers": "constexpr", "TOGETHER": "constexpr"}
    source = GluonASTSource(together_kernel, signature, {(2,): buffers, (3,): together})
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).metadata.shared == kib * 1024
    for target, limit in (("sm_90", 227), ("sm_86", 99)):
        with simulate(target, check=False) as run:
            together_kernel[(1,)](x, 2, buffers, together)
        assert [report.kind for report in run.reports] == ["budget"] * (kib > limit)
        assert all(f"{kib * 1024} bytes of shared memory are in use" in report.text for report in run.reports)


@gluon.jit
def reading_partition(first, x):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    index = gl.arange(0, 16384, layout)
    gl.store(x + index, first.load(layout))


@gluon.jit
def allocating_partition(first, x):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    index = gl.arange(0, 16384, layout)
    value = gl.load(x + 16384 + index)
    first.load(layout)
    buffer = gl.allocate_shared_memory(gl.float32, [16384], shared, value)
    gl.store(x + 16384 + index, buffer.load(layout) + 1)


@gluon.jit
def captured_kernel(x):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    index = gl.arange(0, 16384, layout)
    first = gl.allocate_shared_memory(gl.float32, [16384], shared, gl.load(x + index) + 1)
    gl.warp_specialize([(reading_partition, (first, x)), (allocating_partition, (first, x))], [4], [64])


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_what_a_partition_is_given_stays_in_use_until_all_end(mode):
    signature = {"x": "*fp32"}
    compiled = triton.compile(GluonASTSource(captured_kernel, signature, {}), target=GPUTarget("cuda", 90, 32))
    assert compiled.metadata.shared >= 128 * 1024
    with simulate("sm_86", mode, check=False) as run:
        captured_kernel[(1,)](torch.zeros(2 * 16384))
    assert [report.kind for report in run.reports] == ["budget"]


@gluon.jit
def read_before_kernel(x, out, turns):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    index = gl.arange(0, 128, layout)
    for i in range(turns):
        buffer = gl.allocate_shared_memory(gl.float32, [128], shared)
        if i == 0:
            buffer.store(gl.load(x + index))
        gl.store(out + index, buffer.load(layout))


def test_a_loops_buffer_holds_nothing_of_the_turn_before():
    out = torch.zeros(128)
    with simulate("sm_90", check=False) as run:
        read_before_kernel[(1,)](torch.ones(128), out, 2)
    assert [report.kind for report in run.reports] == ["uninitialised"]
    assert out.isnan().all()


@gluon.jit
def copied_before_kernel(out_desc, turns):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    for i in range(turns):
        buffer = gl.allocate_shared_memory(gl.float32, [16, 32], out_desc.layout)
        if i == 0:
            buffer.store(gl.full([16, 32], 3.0, gl.float32, layout))
            fence_async_shared()
            tma_store(out_desc, [0, 0], buffer)
    tma_store_wait(0)


@pytest.mark.parametrize("mode", MODES)
def test_a_copy_of_the_turn_before_reads_what_was_there(mode):
    """The allocation takes no instruction, so it changes nothing for a copy that is still in flight."""
    out = torch.full((16, 32), torch.nan)
    layout = gl.NVMMASharedLayout.get_default_for([16, 32], gl.float32)
    with simulate("sm_90", mode):
        copied_before_kernel[(1,)](TensorDescriptor.from_tensor(out, [16, 32], layout), 2)
    assert (out == 3).all()


# ---------------------------------------------------------------- names that a branch assigns


@triton.jit
def search_kernel(x, key, out, n):
    """The first place whose value is not below the key."""
    low, high = 0, n
    while low < high:
        middle = (low + high) // 2
        if tl.load(x + middle) < key:
            low = middle + 1
        else:
            high = middle
    tl.store(out, low)


@triton.jit
def chosen_kernel(out, turns):
    at = tl.load(out)
    before = at
    for i in range(turns):
        before = at if i > 0 else before
        at = at + 1
    tl.store(out, before)


@pytest.mark.parametrize("key", [37, -1, 149, 150, 500])
def test_a_binary_search_is_compiled_as_it_says(key):
    x, out = torch.arange(0, 200, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with simulate("sm_90"):
        search_kernel[(1,)](x, key, out, len(x))
    assert out.item() == torch.searchsorted(x, key).item()


def test_a_name_assigned_by_a_conditional_expression_is_carried():
    out = torch.zeros(1)
    with simulate("sm_90"):
        chosen_kernel[(1,)](out, 4)
    assert out.item() == 3
