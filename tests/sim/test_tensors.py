"""Operations on whole tensors: shapes, reductions, scans, products, against torch and NumPy; on a GPU too where there
is one.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
from triton import language as tl
from triton.compiler.errors import CompilationError

from strobe.sim import simulate
from tests.sim.places import PLACES, any_bits, launch, name, same_bits

pytestmark = pytest.mark.parametrize("place", PLACES)

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)


# ---------------------------------------------------------------- shapes


@triton.jit
def load_2d(x, m: tl.constexpr, n: tl.constexpr):
    return tl.load(x + tl.arange(0, m)[:, None] * n + tl.arange(0, n)[None, :])


@triton.jit
def shaped(x, out, fn: tl.constexpr, m: tl.constexpr, n: tl.constexpr):
    """fn of an m x n tensor, stored flat in row-major order."""
    result = fn(load_2d(x, m, n))
    flat = tl.reshape(result, (result.numel,))
    tl.store(out + tl.arange(0, result.numel), flat)


@triton.jit
def transposed(x):
    return x.T


@triton.jit
def permuted(x):
    return tl.permute(tl.reshape(x, (2, x.shape[0] // 2, x.shape[1])), (1, 2, 0))


@triton.jit
def folded(x):
    return tl.reshape(x, (x.shape[1], x.shape[0]))


@triton.jit
def joined(x):
    return tl.join(x, -x)


@triton.jit
def halves(x):
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return even - 2 * odd


@triton.jit
def interleaved(x):
    return tl.interleave(x, x + 1)


@triton.jit
def widened(x):
    return tl.broadcast_to(tl.expand_dims(x, 1), (x.shape[0], 4, x.shape[1]))


@triton.jit
def flipped(x):
    return tl.flip(x, 1)


@triton.jit
def sorted_(x):
    return tl.sort(x, 1)


@triton.jit
def descending(x):
    return tl.sort(x, 1, descending=True)


@triton.jit
def raveled(x):
    return tl.ravel(x)


@triton.jit
def gathered_rows(x):
    index = (tl.arange(0, 4)[:, None] * 3 + tl.arange(0, x.shape[1])[None, :]) % x.shape[0]
    return tl.gather(x, index, 0)


@triton.jit
def gathered_columns(x):
    index = (tl.arange(0, x.shape[0])[:, None] * 5 + tl.arange(0, 4)[None, :]) % x.shape[1]
    return tl.gather(x, index, 1)


def _gathered(x, axis):
    m, n = x.shape
    rows, columns = torch.meshgrid(
        torch.arange(4 if axis == 0 else m), torch.arange(n if axis == 0 else 4), indexing="ij"
    )
    return torch.gather(x, axis, (rows * 3 + columns) % m if axis == 0 else (rows * 5 + columns) % n)


SHAPES = {
    transposed: lambda x: x.T, permuted: lambda x: x.reshape(2, x.shape[0] // 2, x.shape[1]).permute(1, 2, 0),
    folded: lambda x: x,
    joined: lambda x: torch.stack([x, -x], -1), halves: lambda x: x[:, ::2] - 2 * x[:, 1::2],
    interleaved: lambda x: torch.stack([x, x + 1], -1), widened: lambda x: x[:, None].expand(-1, 4, -1),
    flipped: lambda x: x.flip(1),
    sorted_: lambda x: x.sort(1).values, descending: lambda x: x.sort(1, descending=True).values, raveled: lambda x: x,
    gathered_rows: lambda x: _gathered(x, 0), gathered_columns: lambda x: _gathered(x, 1),
}  # fmt: skip


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.int32), ids=name)
@pytest.mark.parametrize("fn", SHAPES, ids=name)
def test_shapes(fn, dtype, place):
    x = (
        torch.arange(8 * 16)
        .sub(40)
        .reshape(8, 16)[:, torch.randperm(16, generator=torch.Generator().manual_seed(7))]
        .contiguous()
        .to(dtype)
    )
    want = SHAPES[fn](x).reshape(-1)
    out = torch.zeros(want.shape, dtype=dtype)
    launch(place, shaped, x, out, fn, 8, 16)
    same_bits(out, want.contiguous(), sign_of_zero=False)  # the language's -x is 0 - x


@triton.jit
def catted(x, y, out, n: tl.constexpr):
    i = tl.arange(0, n)
    both = tl.cat(tl.load(x + i), tl.load(y + i), can_reorder=True)
    tl.store(out + tl.arange(0, 2 * n), both)


def test_cat_has_the_elements_of_both(place):
    x, y, out = torch.arange(256.0), torch.arange(256.0) + 1000, torch.zeros(512)
    launch(place, catted, x, y, out, 256)
    same_bits(out.sort().values, torch.cat([x, y]))  # in an order of its own: can_reorder


@triton.jit
def counted(x, out, n: tl.constexpr, bins: tl.constexpr, masked: tl.constexpr):
    i = tl.arange(0, n)
    if masked:
        tl.store(out + tl.arange(0, bins), tl.histogram(tl.load(x + i), bins, mask=i % 3 != 0))
    else:
        tl.store(out + tl.arange(0, bins), tl.histogram(tl.load(x + i), bins))


@pytest.mark.parametrize("masked", (False, True))
def test_histogram(masked, place):
    x = torch.randint(0, 16, (256,), dtype=torch.int32, generator=torch.Generator().manual_seed(8))
    out = torch.zeros(16, dtype=torch.int32)
    launch(place, counted, x, out, 256, 16, masked)
    same_bits(out, torch.bincount(x[torch.arange(256) % 3 != 0] if masked else x, minlength=16).int())


@pytest.mark.parametrize("dtype", (torch.int8, torch.uint8, torch.int16, torch.int64, torch.uint32), ids=name)
def test_a_histogram_of_other_widths_than_32_bits(dtype, place):
    if place == "cuda":
        pytest.skip("does not compile there")
    x = torch.full((64,), 200 if dtype != torch.int8 else 7).to(dtype)
    out = torch.zeros(256, dtype=torch.int32)
    with simulate("sm_90", check=False) as run:
        counted[(1,)](x, out, 64, 256, False)
    text = f"compiler: a histogram of {8 * dtype.itemsize}-bit integers, which Triton does not compile"
    assert [str(report)[: len(text)] for report in run.reports] == ([] if dtype == torch.uint32 else [text])
    assert out[int(x[0])] == 64 and out.sum() == 64


@triton.jit
def looked_up(x, index, out, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(out + i, tl.gather(tl.load(x + i), tl.load(index + i), 0))


@pytest.mark.parametrize("wrong, nearest", [(16, 15), (-1, 0)])
def test_a_gather_outside_of_its_tensor(wrong, nearest, place):
    if place == "cuda":
        pytest.skip("undefined there")
    x, out = torch.arange(16.0), torch.zeros(16)
    index = torch.arange(16, dtype=torch.int32)
    index[5] = wrong
    with simulate("sm_90", check=False) as run:
        looked_up[(1,)](x, index, out, 16)
    (report,) = run.reports
    assert report.kind == "bounds" and f"gather: index {wrong} into 16 elements (1 indices outside)" in report.text
    assert out[5] == nearest and torch.equal(out[6:], x[6:])


@triton.jit
def swizzled(out, rows: tl.constexpr, columns: tl.constexpr):
    i, j = tl.swizzle2d(tl.arange(0, rows)[:, None], tl.arange(0, columns)[None, :], rows, columns, 2)
    tl.store(out + tl.arange(0, rows)[:, None] * columns + tl.arange(0, columns)[None, :], i * columns + j)


def test_swizzle2d(place):
    out = torch.zeros(16, dtype=torch.int32)
    launch(place, swizzled, out, 4, 4)
    assert out.tolist() == [
        0,
        4,
        1,
        5,
        2,
        6,
        3,
        7,
        8,
        12,
        9,
        13,
        10,
        14,
        11,
        15,
    ]  # down each group of two rows, column by column


# ---------------------------------------------------------------- reductions and scans


@triton.jit
def reduced(x, out, fn: tl.constexpr, axis: tl.constexpr, keep: tl.constexpr, m: tl.constexpr, n: tl.constexpr):
    if axis is None:
        result = fn(load_2d(x, m, n), None, keep)
        if keep:
            tl.store(out + tl.zeros_like(tl.broadcast_to(result, (1, 1))).to(tl.int32), result)
        else:
            tl.store(out, result)
    else:
        result = fn(load_2d(x, m, n), axis, keep)
        flat = tl.reshape(result, (result.numel,))
        tl.store(out + tl.arange(0, result.numel), flat)


@triton.jit
def sums(x, axis: tl.constexpr, keep: tl.constexpr):
    return tl.sum(x, axis, keep_dims=keep)


@triton.jit
def largest(x, axis: tl.constexpr, keep: tl.constexpr):
    return tl.max(x, axis, keep_dims=keep)


@triton.jit
def smallest(x, axis: tl.constexpr, keep: tl.constexpr):
    return tl.min(x, axis, keep_dims=keep)


@triton.jit
def parity(x, axis: tl.constexpr, keep: tl.constexpr):
    return tl.xor_sum(x, axis, keep_dims=keep)


@triton.jit
def where_largest(x, axis: tl.constexpr, keep: tl.constexpr):
    return tl.argmax(x, axis, keep_dims=keep)


@triton.jit
def where_smallest(x, axis: tl.constexpr, keep: tl.constexpr):
    return tl.argmin(x, axis, keep_dims=keep)


def _numpy(reduce):
    def of(x, axis):
        return np.asarray(reduce(x.numpy(), axis=axis))

    return of


REDUCTIONS = {
    sums: _numpy(np.sum),
    largest: _numpy(np.max),
    smallest: _numpy(np.min),
    parity: _numpy(np.bitwise_xor.reduce),
    where_largest: _numpy(np.argmax),
    where_smallest: _numpy(np.argmin),
}


@pytest.mark.parametrize(
    "dtype", (torch.float32, torch.float16, torch.int32, torch.uint32, torch.int8, torch.uint8), ids=name
)
@pytest.mark.parametrize("axis, keep", [(0, False), (1, False), (1, True), (None, False)])
@pytest.mark.parametrize("fn", REDUCTIONS, ids=name)
def test_reductions(fn, axis, keep, dtype, place):
    indices = fn in (where_largest, where_smallest)
    if dtype.is_floating_point and fn is parity:
        pytest.skip("xor of integers only")
    if axis is None and indices:
        pytest.skip("argmax wants an axis")
    if dtype.is_floating_point or dtype == torch.int8:
        x = torch.randint(-100, 100, (16, 32), generator=torch.Generator().manual_seed(9)).to(
            dtype
        )  # sums are exact, ties occur
    else:
        x = any_bits(dtype, 512, 9).reshape(16, 32)
    whole = x if axis is not None or not indices else x.reshape(-1)
    kind = torch.int32 if indices else dtype
    if fn is sums and dtype.itemsize < 4 and not dtype.is_floating_point:
        kind = torch.int32 if dtype in SIGNED else torch.uint32  # Triton sums small integers in 32 bits
        whole = x.to(kind)
    want = torch.from_numpy(np.atleast_1d(REDUCTIONS[fn](whole, axis))).reshape(-1).to(kind)
    out = torch.zeros(want.shape, dtype=kind)
    launch(place, reduced, x, out, fn, axis, keep, 16, 32)
    same_bits(out, want)


@pytest.mark.parametrize("fn, want", [(largest, 3.0), (smallest, -2.0)], ids=["max", "min"])
def test_reductions_pass_over_nan(fn, want, place):
    x = torch.full((16, 32), torch.nan)
    x[3, 4], x[5, 6], out = 3.0, -2.0, torch.zeros(1)
    launch(place, reduced, x, out, fn, None, False, 16, 32)
    assert out.item() == want


@triton.jit
def mean_and_spread(mean_a, spread_a, count_a, mean_b, spread_b, count_b):
    """Welford's combination of two parts."""
    count = count_a + count_b
    delta = mean_b - mean_a
    share = tl.where(count == 0, 0.0, count_b / count)
    return mean_a + delta * share, spread_a + spread_b + delta * delta * count_a * share, count


@triton.jit
def welford(x, out, m: tl.constexpr, n: tl.constexpr):
    values = load_2d(x, m, n)
    mean, spread, count = tl.reduce(
        (values, tl.zeros_like(values), tl.full((m, n), 1.0, tl.float32)), 1, mean_and_spread
    )
    rows = tl.arange(0, m)
    tl.store(out + rows, mean)
    tl.store(out + m + rows, spread / count)


def test_a_reduction_of_several_tensors(place):
    x, out = torch.randn(16, 32, generator=torch.Generator().manual_seed(10)), torch.zeros(2, 16)
    launch(place, welford, x, out, 16, 32)
    torch.testing.assert_close(out, torch.stack([x.mean(1), x.var(1, correction=0)]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=name)
def test_sums_of_small_floats_round_at_every_step(dtype, place):
    x, out = torch.full((1, 4096), 1.0, dtype=dtype), torch.zeros(1, dtype=dtype)
    x[0, 1:] = 2.0**-11 if dtype == torch.float16 else 2.0**-8  # half of the last place of 1
    launch(place, reduced, x, out, sums, 1, False, 1, 4096)
    exact = x.double().sum().item()
    assert abs(out.item() - exact) <= 0.03 * exact and out.item() != exact


@triton.jit
def scanned(x, out, fn: tl.constexpr, axis: tl.constexpr, reverse: tl.constexpr, m: tl.constexpr, n: tl.constexpr):
    result = fn(load_2d(x, m, n), axis, reverse)
    tl.store(out + tl.arange(0, m)[:, None] * n + tl.arange(0, n)[None, :], result)


@triton.jit
def running_sum(x, axis: tl.constexpr, reverse: tl.constexpr):
    return tl.cumsum(x, axis, reverse=reverse)


@triton.jit
def running_product(x, axis: tl.constexpr, reverse: tl.constexpr):
    return tl.cumprod(x, axis, reverse=reverse)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def running_max(x, axis: tl.constexpr, reverse: tl.constexpr):
    return tl.associative_scan(x, axis, larger, reverse=reverse)


SCANS = {running_sum: np.cumsum, running_product: np.cumprod, running_max: np.maximum.accumulate}


@pytest.mark.parametrize("reverse", (False, True))
@pytest.mark.parametrize("axis", (0, 1))
@pytest.mark.parametrize("fn", SCANS, ids=name)
def test_scans(fn, axis, reverse, place):
    x = torch.randint(-3, 4, (16, 32), generator=torch.Generator().manual_seed(11), dtype=torch.int32)
    turned = np.flip(x.numpy(), axis) if reverse else x.numpy()
    want = SCANS[fn](turned, axis=axis, **({} if fn is running_max else {"dtype": np.int32}))
    want = np.flip(want, axis) if reverse else want
    out = torch.zeros_like(x)
    launch(place, scanned, x, out, fn, axis, reverse, 16, 32)
    same_bits(out, torch.from_numpy(want.copy()))


@triton.jit
def recurrence(decay_a, value_a, decay_b, value_b):
    return decay_a * decay_b, value_a * decay_b + value_b


@triton.jit
def decayed(decay, x, out, n: tl.constexpr):
    i = tl.arange(0, n)
    _, state = tl.associative_scan((tl.load(decay + i), tl.load(x + i)), 0, recurrence)
    tl.store(out + i, state)


def test_a_scan_of_two_tensors_keeps_their_order(place):
    generator = torch.Generator().manual_seed(12)
    decay, x, out = torch.rand(64, generator=generator), torch.randn(64, generator=generator), torch.zeros(64)
    want, state = [], 0.0
    for d, v in zip(decay.tolist(), x.tolist()):
        state = state * d + v
        want.append(state)
    launch(place, decayed, decay, x, out, 64)
    torch.testing.assert_close(out, torch.tensor(want), rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- products


@triton.jit
def multiplied(a, b, c, out, m: tl.constexpr, n: tl.constexpr, k: tl.constexpr, precision: tl.constexpr):
    left, right, start = load_2d(a, m, k), load_2d(b, k, n), load_2d(c, m, n)
    result = tl.dot(left, right, start, input_precision=precision, out_dtype=start.dtype)
    tl.store(out + tl.arange(0, m)[:, None] * n + tl.arange(0, n)[None, :], result)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.int8, torch.float32, *FP8), ids=name)
def test_products_of_small_numbers_are_exact(dtype, place):
    generator = torch.Generator().manual_seed(13)
    wide = torch.int32 if dtype == torch.int8 else torch.float32
    a, b = (torch.randint(-8, 9, shape, generator=generator).to(dtype) for shape in ((16, 32), (32, 16)))
    c = torch.randint(-99, 100, (16, 16), generator=generator).to(wide)
    out = torch.zeros_like(c)
    launch(place, multiplied, a, b, c, out, 16, 16, 32, None if dtype == torch.int8 else "tf32")
    same_bits(out, (a.double() @ b.double() + c.double()).to(wide))


@pytest.mark.parametrize(
    "precision, least, most",
    [
        ("ieee", 0.0, 2e-6),
        ("tf32", 1e-4, 4e-3),
        ("tf32x3", 0.0, 2e-6),
        ("bf16x3", 1e-6, 4e-5),
        ("bf16x6", 0.0, 2e-6),
    ],
)
def test_precision_of_float32_products(precision, least, most, place):
    generator = torch.Generator().manual_seed(14)
    a, b = torch.randn(32, 64, generator=generator), torch.randn(64, 32, generator=generator)
    out = torch.zeros(32, 32)
    launch(place, multiplied, a, b, torch.zeros(32, 32), out, 32, 32, 64, precision)
    want = a.double() @ b.double()
    error = ((out - want).norm() / want.norm()).item()
    assert least <= error <= most


@pytest.mark.parametrize("precision", ("tf32x3", "bf16x3", "bf16x6"))
def test_infinities_pass_through_a_product_in_parts(precision, place):
    a, b = torch.eye(16), torch.ones(16, 16)
    a[3, 3], a[4, 4], a[5, 5] = torch.inf, torch.nan, 3e38
    out = torch.zeros(16, 16)
    launch(place, multiplied, a, b, torch.zeros(16, 16), out, 16, 16, 16, precision)
    assert torch.equal(out[3], torch.full((16,), torch.inf)) and out[4].isnan().all()
    torch.testing.assert_close(out[5], torch.full((16,), 3e38), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype, least", [(torch.float32, 16), (torch.float16, 16), (torch.int8, 32)], ids=str)
def test_a_product_of_too_short_rows_does_not_compile(dtype, least, place):
    a, b = torch.ones(16, least // 2).to(dtype), torch.ones(least // 2, 16).to(dtype)
    c = torch.zeros(16, 16, dtype=torch.int32 if dtype == torch.int8 else torch.float32)
    with pytest.raises((AssertionError, CompilationError), match=f"Input shapes should have .* K >= {least}"):
        launch(place, multiplied, a, b, c, c.clone(), 16, 16, least // 2, "ieee")


@triton.jit
def batched(a, b, out, size: tl.constexpr, count: tl.constexpr):
    i, j, k = tl.arange(0, count)[:, None, None], tl.arange(0, size)[None, :, None], tl.arange(0, size)[None, None, :]
    at = (i * size + j) * size + k
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


def test_a_batch_of_products(place):
    a, b = (torch.randint(-8, 9, (4, 16, 16), generator=torch.Generator().manual_seed(15)).half() for _ in range(2))
    out = torch.zeros(4, 16, 16)
    launch(place, batched, a, b, out, 16, 4)
    same_bits(out, (a.double() @ b.double()).float())
