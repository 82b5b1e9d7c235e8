"""Global memory: loads, stores, atomics, descriptors, assertions, against torch and Python; on a GPU too where there is
one.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st
from triton import language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from strobe.sim import SimulationFault, simulate
from tests.sim.places import PLACES, any_bits, launch, name, same_bits

pytestmark = pytest.mark.parametrize("place", PLACES)


# ---------------------------------------------------------------- loads and stores


@triton.jit
def strided(x, out, stride, n: tl.constexpr, live: tl.constexpr):
    i = tl.arange(0, n)
    value = tl.load(x + i * stride, mask=i < live, other=-7)
    tl.store(out + i * 3, value, mask=i >= 2)


@pytest.mark.parametrize(
    "dtype", (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.bool), ids=name
)
def test_masked_strided_loads_and_stores_touch_nothing_else(dtype, place):
    x = any_bits(dtype, 256, 20)
    out = torch.ones(200, dtype=dtype)
    want = out.clone()
    i = torch.arange(2, 64)
    want[6:192:3] = torch.where(i < 37, x[i.clamp(max=36) * 5], torch.tensor(-7).to(dtype))
    launch(place, strided, x, out, 5, 64, 37)
    same_bits(out, want)


@triton.jit
def neighbours(out, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(out + 2 * i + 1, (i + 1).to(out.dtype.element_ty))


@pytest.mark.parametrize("dtype", (torch.int8, torch.bfloat16, torch.bool), ids=name)
def test_small_elements_do_not_touch_their_neighbours(dtype, place):
    out = torch.zeros(32, dtype=dtype)
    launch(place, neighbours, out, 16)
    want = torch.zeros(32, dtype=dtype)
    want[1::2] = torch.arange(1, 17).to(dtype)
    same_bits(out, want)


@triton.jit
def far(x, out, offset, n: tl.constexpr):
    i = tl.arange(0, n)
    there = x + offset.to(tl.int64) * 1000000000
    tl.store(out + i, tl.load(there - offset.to(tl.int64) * 1000000000 + i.to(tl.int64)))


def test_pointer_arithmetic_has_64_bits(place):
    x, out = torch.arange(16.0), torch.zeros(16)
    launch(place, far, x, out, 5, 16)
    same_bits(out, x)


@triton.jit
def through_integers(addresses, x, out, n: tl.constexpr):
    base = tl.load(addresses).to(tl.pointer_type(tl.float32))
    i = tl.arange(0, n)
    tl.store(out + i, tl.load(base + i) + tl.load(x + i))


def test_a_pointer_from_an_integer(place):
    x, out = torch.arange(16.0), torch.zeros(16)
    x = x.cuda() if place == "cuda" else x
    launch(place, through_integers, torch.tensor([x.data_ptr()]), x, out, 16)
    same_bits(out, 2 * torch.arange(16.0))


@pytest.mark.parametrize("live, faults", [(16, 0), (17, 1)])
def test_an_access_past_the_end_is_reported(live, faults, place):
    if place == "cuda":
        pytest.skip("undefined there")
    x, out = torch.arange(16.0), torch.zeros(96)
    with simulate("sm_90", check=False) as run:
        strided[(1,)](x, out, 1, 32, live)
    assert [report.kind for report in run.reports] == ["bounds"] * faults
    assert all("1 past its end" in report.text for report in run.reports)


# ---------------------------------------------------------------- atomics


@triton.jit
def atomic(x, values, before, fn: tl.constexpr, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(before + i, fn(x + i, tl.load(values + i)))


@triton.jit
def atomic_on_one(x, values, fn: tl.constexpr, n: tl.constexpr):
    """All elements on one place, and every program of the grid."""
    i = tl.arange(0, n)
    fn(x + 0 * i, tl.load(values + tl.program_id(0) * n + i))


ATOMICS = {
    tl.atomic_add: torch.add,
    tl.atomic_max: torch.maximum,
    tl.atomic_min: torch.minimum,
    tl.atomic_and: torch.bitwise_and,
    tl.atomic_or: torch.bitwise_or,
    tl.atomic_xor: torch.bitwise_xor,
    tl.atomic_xchg: lambda old, new: new,
}
LOGICAL = (tl.atomic_and, tl.atomic_or, tl.atomic_xor)
ATOMIC_TYPES = (
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
)


def _pairs():
    """Each operation with each type that the hardware has it for."""
    for fn in ATOMICS:
        for dtype in ATOMIC_TYPES:
            small_float = dtype.is_floating_point and dtype.itemsize == 2
            if not (dtype.is_floating_point and fn in LOGICAL) and not (small_float and fn is not tl.atomic_add):
                yield pytest.param(fn, dtype, id=f"{fn.__name__}-{name(dtype)}")


ATOMIC_PAIRS = list(_pairs())


def _exactly(fn, a, b):
    """torch has few operations on unsigned integers."""
    if a.dtype not in (torch.uint32, torch.uint64):
        return ATOMICS[fn](a, b)
    plain = {tl.atomic_add: np.add, tl.atomic_max: np.maximum, tl.atomic_min: np.minimum, tl.atomic_and: np.bitwise_and,
             tl.atomic_or: np.bitwise_or, tl.atomic_xor: np.bitwise_xor, tl.atomic_xchg: lambda old,
             new: new}[fn]  # fmt: skip
    return torch.from_numpy(plain(a.numpy(), b.numpy()))


@pytest.mark.parametrize("fn, dtype", ATOMIC_PAIRS)
def test_atomics(fn, dtype, place):
    if dtype.is_floating_point:
        generator = torch.Generator().manual_seed(21)
        x, values = (torch.randn(64, generator=generator).to(dtype) for _ in range(2))
    else:
        x, values = any_bits(dtype, 64, 21), any_bits(dtype, 128, 22)[-64:].clone()
    old, want, before = x.clone(), _exactly(fn, x, values), torch.zeros_like(x)
    launch(place, atomic, x, values, before, fn, 64)
    same_bits(before, old)
    same_bits(x, want)


@pytest.mark.parametrize("fn, dtype", ATOMIC_PAIRS)
def test_atomics_of_many_on_one_place(fn, dtype, place):
    if fn is tl.atomic_xchg:
        pytest.skip("who comes last is open")
    values = (torch.arange(128) % 5 - 2).to(dtype) if fn not in LOGICAL else any_bits(dtype, 128, 23)  # sums are exact
    x = torch.ones(1).to(dtype)
    want = x.clone()
    for value in values:
        want = _exactly(fn, want, value.reshape(1))
    launch(place, atomic_on_one, x, values, fn, 32, grid=(4,), mode="pct" if place == "simulator" else "eager")
    same_bits(x, want)


@triton.jit
def masked_atomic(x, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.atomic_add(x + i, 1, mask=i % 2 == 0)


def test_masked_atomics(place):
    x = torch.zeros(16, dtype=torch.int32)
    launch(place, masked_atomic, x, 16)
    assert x.tolist() == [1, 0] * 8


@triton.jit
def swapped(x, expected, values, before, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(before + i, tl.atomic_cas(x + i, tl.load(expected + i), tl.load(values + i)))


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64, torch.uint64), ids=name)
def test_compare_and_swap_of_each_element(dtype, place):
    x, values = any_bits(dtype, 32, 24), any_bits(dtype, 32, 25)
    expected = x.clone()
    expected[::3] = values[::3]
    old, before = x.clone(), torch.zeros_like(x)
    want = torch.from_numpy(np.where(expected.numpy() == x.numpy(), values.numpy(), x.numpy()))
    launch(place, swapped, x, expected, values, before, 32)
    same_bits(before, old)
    same_bits(x, want)


@triton.jit
def guarded(lock, total, turns: tl.constexpr):
    for _ in range(turns):
        while tl.atomic_cas(lock, 0, 1, sem="acquire") == 1:
            pass
        tl.store(total, tl.load(total) + 1)
        tl.atomic_xchg(lock, 0, sem="release")


@pytest.mark.parametrize("mode", ("eager", "lazy", "random", "pct"))
def test_a_lock_orders_what_it_guards(mode, place):
    if place == "cuda" and mode != "eager":
        pytest.skip("the modes are the simulator's")
    lock, total = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    launch(place, guarded, lock, total, 3, grid=(4,), mode=mode)
    assert total.item() == 12


@triton.jit
def unguarded(total):
    tl.store(total, tl.load(total) + 1)


def test_without_the_lock_it_is_a_race(place):
    if place == "cuda":
        pytest.skip("undefined there")
    with simulate("sm_90", check=False) as run:
        unguarded[(4,)](torch.zeros(1, dtype=torch.int32))
    assert {report.kind for report in run.reports} == {"race"}


# ---------------------------------------------------------------- descriptors


@triton.jit
def boxed(x, out, i, j, rows, columns, m: tl.constexpr, n: tl.constexpr, nan: tl.constexpr):
    source = tl.make_tensor_descriptor(
        x, [rows, columns], [columns, 1], [m, n], padding_option="nan" if nan else "zero"
    )
    tl.store(out + tl.arange(0, m)[:, None] * n + tl.arange(0, n)[None, :], source.load([i, j]))


@triton.jit
def boxed_by_host(source, out, i, j, m: tl.constexpr, n: tl.constexpr):
    tl.store(out + tl.arange(0, m)[:, None] * n + tl.arange(0, n)[None, :], source.load([i, j]))


def _window(x, i, j, m, n, fill):
    padded = torch.full((m, n), fill).to(x.dtype)
    for a in range(max(0, -i), min(m, x.shape[0] - i)):
        for b in range(max(0, -j), min(n, x.shape[1] - j)):
            padded[a, b] = x[i + a, j + b]
    return padded


CORNERS = [
    (0, 0),
    (5, 16),
    (-3, -16),
    (19, 32),
    (40, 0),
    (-40, 96),
    (0, -48),
]  # rows are cut anywhere, columns at 16 bytes


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.int16, torch.int8), ids=name)
@pytest.mark.parametrize("corner", CORNERS, ids=str)
def test_descriptor_loads_are_zero_outside(corner, dtype, place):
    x, out = torch.arange(21 * 48).sub(300).remainder(100).reshape(21, 48).to(dtype), torch.ones(8, 32).to(dtype)
    want = _window(x, *corner, 8, 32, 0)
    launch(place, boxed, x, out, *corner, 21, 48, 8, 32, False)
    same_bits(out, want)
    out = torch.ones(8, 32).to(dtype)
    launch(place, boxed_by_host, TensorDescriptor(x, [21, 48], [48, 1], [8, 32]), out, *corner, 8, 32)
    same_bits(out, want)


@given(
    rows=st.integers(1, 20), columns=st.integers(1, 5), i=st.integers(-9, 30), j=st.integers(-5, 7), nan=st.booleans()
)
def test_any_corner_of_any_tensor(place, rows, columns, i, j, nan):
    if place == "cuda":
        pytest.skip("a compile for each would be slow; the corners above are checked there")
    x, out = torch.arange(rows * columns * 4.0).reshape(rows, columns * 4), torch.ones(8, 16)
    launch(place, boxed, x, out, i, 4 * j, rows, columns * 4, 8, 16, nan)
    same_bits(out, _window(x, i, 4 * j, 8, 16, torch.nan if nan else 0.0))


@pytest.mark.parametrize("corner", CORNERS, ids=str)
def test_descriptor_loads_are_nan_outside_if_asked(corner, place):
    x, out = torch.arange(21.0 * 48).reshape(21, 48), torch.ones(8, 32)
    launch(place, boxed, x, out, *corner, 21, 48, 8, 32, True)
    same_bits(out, _window(x, *corner, 8, 32, torch.nan))


@triton.jit
def put(x, out, i, j, rows, columns, fn: tl.constexpr, m: tl.constexpr, n: tl.constexpr):
    target = tl.make_tensor_descriptor(out, [rows, columns], [columns, 1], [m, n])
    value = tl.load(x + tl.arange(0, m)[:, None] * n + tl.arange(0, n)[None, :])
    fn(target, [i, j], value)


@triton.jit
def stored(target, at, value):
    target.store(at, value)


@triton.jit
def added(target, at, value):
    target.atomic_add(at, value)


@triton.jit
def raised(target, at, value):
    target.atomic_max(at, value)


@triton.jit
def lowered(target, at, value):
    target.atomic_min(at, value)


@triton.jit
def masked_off(target, at, value):
    target.atomic_and(at, value)


PUTS = {
    stored: lambda old, new: new,
    added: torch.add,
    raised: torch.maximum,
    lowered: torch.minimum,
    masked_off: torch.bitwise_and,
}


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.uint32), ids=name)
@pytest.mark.parametrize("fn", PUTS, ids=name)
def test_descriptor_stores_and_reductions_stay_inside(fn, dtype, place):
    if (fn is masked_off and dtype.is_floating_point) or (fn in (raised, lowered) and dtype == torch.float32):
        pytest.skip("TMA has no such reduction")
    i = torch.arange(21 * 32).reshape(21, 32)
    whole = (i * 7919 % 97 - 40).to(torch.int64) if dtype != torch.uint32 else i * 2654435761 % 2**32
    x = (
        torch.arange(128).reshape(8, 16) * 31 % 89 - 30
        if dtype != torch.uint32
        else torch.arange(128).reshape(8, 16) * 2246822519 % 2**32
    )
    for corner in ((3, 8), (5, 24), (18, 0)):
        out, want, values = whole.to(dtype), whole.clone(), x
        a0, b0 = corner
        for a in range(max(0, -a0), min(8, 21 - a0)):
            for b in range(max(0, -b0), min(16, 32 - b0)):
                want[a0 + a, b0 + b] = PUTS[fn](want[a0 + a, b0 + b], values[a, b])
        launch(place, put, x.to(dtype), out, *corner, 21, 32, fn, 8, 16)
        same_bits(out, (want % 2**32 if dtype == torch.uint32 else want).to(dtype))


@pytest.mark.parametrize("column, faults", [(4, 0), (3, 1)])
def test_a_block_that_starts_off_16_bytes_is_reported(column, faults, place):
    if place == "cuda":
        pytest.skip("an illegal instruction there, which ends the process")
    with simulate("sm_90", check=False) as run:
        boxed[(1,)](torch.zeros(21, 32), torch.zeros(8, 16), 0, column, 21, 32, 8, 16, False)
    assert [report.kind for report in run.reports] == ["bounds"] * faults


@pytest.mark.parametrize("corner, faults", [((0, 0), 0), ((-1, 0), 1), ((0, -16), 1)])
def test_a_store_that_starts_before_the_tensor_is_reported(corner, faults, place):
    if place == "cuda":
        pytest.skip("an illegal instruction there, which ends the process")
    with simulate("sm_90", check=False) as run:
        put[(1,)](torch.ones(8, 16), torch.zeros(21, 32), *corner, 21, 32, stored, 8, 16)
    assert [report.kind for report in run.reports] == ["bounds"] * faults


def test_a_descriptor_past_the_end_of_its_storage_is_reported(place):
    if place == "cuda":
        pytest.skip("undefined there")
    with simulate("sm_90", check=False) as run:
        boxed[(1,)](torch.zeros(20, 32), torch.zeros(8, 16), 0, 0, 21, 32, 8, 16, False)
    assert [report.kind for report in run.reports] == ["bounds"]


# ---------------------------------------------------------------- what kernels say


@triton.jit
def checked(x, limit, n: tl.constexpr, how: tl.constexpr):
    value = tl.load(x + tl.arange(0, n))
    if how == "device_assert":
        tl.device_assert(value < limit, "too large")
    elif how == "assert":
        assert tl.max(value) < limit, "too large"
    else:
        tl.assume(tl.max(value) < limit)


@pytest.mark.parametrize("how", ("device_assert", "assert", "assume"))
def test_assertions_and_assumptions_are_checked(how, place):
    if place == "cuda":
        pytest.skip("would end the process")
    x = torch.arange(16.0)
    with simulate("sm_90"):
        checked[(1,)](x, 16, 16, how)
    with pytest.raises(SimulationFault, match=r"test_global_memory.py:[0-9]+ checked") as fault, simulate("sm_90"):
        checked[(1,)](x, 15, 16, how)
    assert [report.kind for report in fault.value.reports] == ["assert"]
    assert how == "assume" or "too large" in str(fault.value)


@triton.jit
def speaking(x, n: tl.constexpr):
    tl.static_print("compiled for", n)
    tl.device_print("value", tl.load(x + tl.arange(0, n)))
    print("number", tl.program_id(0) + 7)


def test_prints(place, capsys):
    if place == "cuda":
        pytest.skip("goes past Python's stdout")
    with simulate("sm_90"):
        speaking[(1,)](torch.arange(4, dtype=torch.int32), 4)
    said = capsys.readouterr().out
    assert "compiled for 4" in said and "value:  [0 1 2 3]" in said and "number:  7" in said


@triton.jit
def printed(x, n: tl.constexpr):
    tl.device_print("bits", tl.load(x + tl.arange(0, n)), hex=True)
    tl.device_print("one", tl.load(x), hex=True)


@pytest.mark.parametrize(
    "dtype, bits",
    [
        (torch.float32, ["0x3f800000", "0xc0000000"]),
        (torch.bfloat16, ["0x3f80", "0xc000"]),
        (torch.float64, ["0x3ff0000000000000", "0xc000000000000000"]),
        (torch.float8_e5m2, ["0x3c", "0xc0"]),
        (torch.int32, ["0x1", "-0x2"]),
    ],
    ids=str,
)
def test_prints_of_bits(dtype, bits, place, capsys):
    if place == "cuda":
        pytest.skip("goes past Python's stdout")
    with simulate("sm_90"):
        printed[(1,)](torch.tensor([1.0, -2.0]).to(dtype), 2)
    said = capsys.readouterr().out
    assert f"bits:  [{' '.join(bits)}]" in said and f"one:  {bits[0]}\n" in said


@triton.jit
def of_another_type(x, out):
    byte = tl.load(x)
    tl.store(out, byte.to(tl.float8e4b15, bitcast=True).to(tl.float32))


def test_a_type_that_the_simulator_lacks(place):
    if place == "cuda":
        pytest.skip("of an older GPU")
    message = r"the simulator does not know the type fp8e4b15, at test_global_memory.py:[0-9]+ of_another_type"
    with pytest.raises(NotImplementedError, match=message), simulate("sm_80"):
        of_another_type[(1,)](torch.zeros(1, dtype=torch.uint8), torch.zeros(1))


# ---------------------------------------------------------------- functions mapped over elements


@triton.jit
def collatz(x):
    return x // 2 if x % 2 == 0 else 3 * x + 1


@triton.jit
def both_ways(x, y):
    if x < y:
        small, large = x, y
    else:
        small, large = y, x
    return small, large


@triton.jit
def mapped(xs, out, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(out + i, tl.map_elementwise(collatz, tl.load(xs + i)))


@triton.jit
def mapped_pairs(xs, ys, low, high, n: tl.constexpr):
    i = tl.arange(0, n)
    small, large = tl.map_elementwise(both_ways, tl.load(xs + i), tl.load(ys + i))
    tl.store(low + i, small)
    tl.store(high + i, large)


def test_map_elementwise_takes_each_elements_own_branch(place):
    x, out = torch.arange(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    launch(place, mapped, x, out, 64)
    same_bits(out, torch.where(x % 2 == 0, x // 2, 3 * x + 1))


def test_map_elementwise_with_two_results(place):
    x, y = torch.randn(64), torch.randn(64)
    low, high = torch.zeros(64), torch.zeros(64)
    launch(place, mapped_pairs, x, y, low, high, 64)
    same_bits(low, torch.minimum(x, y))
    same_bits(high, torch.maximum(x, y))


@triton.jit
def in_ptx(xs, ys, out, n: tl.constexpr):
    i = tl.arange(0, n)
    out_value = tl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $1;",
        "=f,f,f",
        [tl.load(xs + i), tl.load(ys + i)],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )
    tl.store(out + i, out_value)


def test_inline_ptx(place):
    x, y, out = torch.arange(64.0), torch.arange(64.0) * 2, torch.zeros(64)
    launch(place, in_ptx, x, y, out, 64)
    same_bits(out, x * y + x)
