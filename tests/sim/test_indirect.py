"""Pointers that a kernel makes from numbers: tensors of addresses, integer arguments, objects with `data_ptr()`."""

import pytest
import torch
import triton
import triton.language as tl

from strobe.sim import simulate
from tests.sim.places import PLACES, launch


@triton.jit
def grouped_kernel(a_at, b_at, c_at, sizes, groups, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    """c = a @ b for each group of square matrices; tiles of all groups are dealt out to the programs."""
    tile, last = tl.program_id(0), 0
    for group in range(groups):
        size = tl.load(sizes + group)
        across = tl.cdiv(size, BLOCK)
        while tile >= last and tile < last + across * across:
            a = tl.load(a_at + group).to(tl.pointer_type(tl.float16))
            b = tl.load(b_at + group).to(tl.pointer_type(tl.float16))
            c = tl.load(c_at + group).to(tl.pointer_type(tl.float16))
            rows = (tile - last) // across * BLOCK + tl.arange(0, BLOCK)
            columns = (tile - last) % across * BLOCK + tl.arange(0, BLOCK)
            inner = tl.arange(0, BLOCK)
            total = tl.zeros((BLOCK, BLOCK), tl.float32)
            for k in range(0, size, BLOCK):
                left = tl.load(a + rows[:, None] * size + k + inner[None, :])
                right = tl.load(b + (k + inner[:, None]) * size + columns[None, :])
                total += tl.dot(left, right)
            tl.store(c + rows[:, None] * size + columns[None, :], total.to(tl.float16))
            tile += PROGRAMS
        last += across * across


def addresses(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors])


@pytest.mark.parametrize("mode", ["eager", "lazy", "pct"])
def test_a_grouped_product_by_tensors_of_pointers(mode):
    sizes = (64, 32, 96)
    left, right = ([torch.randn(n, n, dtype=torch.float16) for n in sizes] for _ in range(2))
    out = [torch.full_like(one, torch.nan) for one in left]
    with simulate("sm_90", mode):
        grouped_kernel[(4,)](
            addresses(left), addresses(right), addresses(out), torch.tensor(sizes), len(sizes), PROGRAMS=4, BLOCK=32
        )
    for a, b, c in zip(left, right, out):
        torch.testing.assert_close(c.float(), a.float() @ b.float(), rtol=2e-3, atol=2e-2)


@triton.jit
def copied_kernel(where, out, SIZE: tl.constexpr, SHIFT: tl.constexpr):
    """Element i comes from the i-th address."""
    at = tl.arange(0, SIZE)
    source = tl.load(where + at).to(tl.pointer_type(tl.float32))
    tl.store(out + at, tl.load(source + SHIFT))


def test_one_load_reads_several_tensors():
    parts = [torch.full([4], float(i)) for i in range(8)]
    out = torch.full([8], torch.nan)
    with simulate("sm_90"):
        copied_kernel[(1,)](addresses(parts), out, 8, 3)
    assert out.tolist() == list(range(8))


def test_a_tensor_without_memory_is_not_looked_at():
    traced = torch._to_functional_tensor(torch.ones(4))  # such as one of a graph that torch.compile has traced
    parts, out = [torch.full([4], float(i)) for i in range(2)], torch.full([2], torch.nan)
    with simulate("sm_90"):
        copied_kernel[(1,)](addresses(parts), out, 2, 3)
    assert out.tolist() == [0, 1] and traced.shape == (4,)


def test_a_loaded_pointer_that_leaves_its_tensor_is_out_of_bounds():
    parts = [torch.zeros(1024) for _ in range(8)]
    with simulate("sm_90", check=False) as run:
        copied_kernel[(1,)](addresses(parts), torch.zeros(8), 8, -(2**40))
    (report,) = run.reports
    assert report.kind == "bounds" and "of 8)" in report.text and "test_indirect.py:58" in report.text


def test_a_null_pointer_is_out_of_bounds():
    parts = [torch.zeros(1024) for _ in range(7)]
    with simulate("sm_90", check=False) as run:
        copied_kernel[(1,)](torch.cat([addresses(parts), torch.zeros(1, dtype=torch.int64)]), torch.zeros(8), 8, 0)
    (report,) = run.reports
    assert report.kind == "bounds" and "1 elements before its start, 0 past its end, of 8" in report.text


@triton.jit
def added_kernel(where, out, SIZE: tl.constexpr):
    """Atomic adds and stores through loaded pointers are seen as accesses to the tensors that they reach."""
    at = tl.arange(0, SIZE)
    target = tl.load(where + at).to(tl.pointer_type(tl.float32))
    tl.atomic_add(target, 1.0)
    tl.store(target + 1 + tl.program_id(0) * 0, tl.load(out + at))


def test_programs_race_through_loaded_pointers():
    parts = [torch.zeros(2) for _ in range(4)]
    with simulate("sm_90", check=False) as run:
        added_kernel[(2,)](addresses(parts), torch.arange(4.0), 4)
    assert {report.kind for report in run.reports} == {"race"}
    assert all("on float32[2]" in report.text for report in run.reports)
    assert [part.tolist() for part in parts] == [[2.0, float(i)] for i in range(4)]


@triton.jit
def chosen_kernel(a, b, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(tl.where(at % 2 == 0, a + at, b + at)))


@pytest.mark.parametrize("place", PLACES)
def test_pointers_that_are_selected_element_by_element(place):
    a, b, out = torch.arange(16.0), -torch.arange(16.0), torch.full([16], torch.nan)
    launch(place, chosen_kernel, a, b, out, 16)
    assert torch.equal(out, torch.where(torch.arange(16) % 2 == 0, a, b))


class Wrapped:
    """As little as Triton asks of an argument that is a pointer."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor, self.dtype = tensor, tensor.dtype

    def data_ptr(self) -> int:
        return self._tensor.data_ptr()


@triton.jit
def negated_kernel(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, -tl.load(x + at))


def test_an_object_with_an_address_is_a_pointer():
    x, out = torch.arange(8.0), torch.empty(8)
    with simulate("sm_90"):
        negated_kernel[(1,)](Wrapped(x), Wrapped(out), 8)
    assert torch.equal(out, -x)


@triton.jit
def negated_fp8_kernel(x, out, SIZE: tl.constexpr):
    """Triton has no arithmetic on FP8 numbers: it fails to lower the subtraction that `-` is."""
    at = tl.arange(0, SIZE)
    negated = -tl.load(x + at).to(tl.float16)
    tl.store(out + at, negated.to(tl.float8e5))


@pytest.mark.parametrize("place", PLACES)
def test_a_reinterpreted_tensor(place):
    x, out = torch.randn(16).to(torch.float8_e5m2), torch.zeros(16, dtype=torch.uint8)
    if place == "simulator":
        with simulate("sm_90"):
            negated_fp8_kernel[(1,)](x, triton.reinterpret(out, tl.float8e5), 16)
    else:
        x, out = x.cuda(), out.cuda()
        negated_fp8_kernel[(1,)](x, triton.reinterpret(out, tl.float8e5), 16)
    assert torch.equal(out.cpu().view(torch.float8_e5m2).float(), -x.cpu().float())
