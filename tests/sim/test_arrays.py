"""Kernels on NumPy arrays, and number formats without torch. torch is the reference here and nowhere in the code."""

import subprocess
import sys

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from strobe.sim import Array, Checks, formats, simulate
from strobe.sim.arrays import as_numbers, copied, given

FLOAT8 = [("fp8e4nv", torch.float8_e4m3fn), ("fp8e5", torch.float8_e5m2)]


def numbers() -> np.ndarray:
    drawn = np.random.default_rng(0).standard_normal(20_000).astype(np.float32)
    corners = np.float32([0, -0.0, np.inf, -np.inf, np.nan, 448, 464, 465, 480, 57344, 61439, 61440, 2**-149])
    every = np.concatenate([formats.VALUES[name] for name, _ in FLOAT8])
    between = [np.nextafter(every, np.float32(9)), (every[1:] + every[:-1]) / 2]
    return np.concatenate([*(drawn * np.float32(10.0**power) for power in range(-8, 10)), corners, every, *between])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name, dtype", FLOAT8)
def test_fp8_is_rounded_as_by_torch(name, dtype):
    x = numbers()
    assert np.array_equal(formats.float8_bits(x, name), torch.from_numpy(x).to(dtype).view(torch.uint8).numpy())
    values = torch.arange(256).to(torch.uint8).view(dtype).float().numpy()
    assert np.array_equal(formats.VALUES[name], values, equal_nan=True)
    assert formats.LARGEST[name] == torch.finfo(dtype).max


def test_bfloat16_is_rounded_as_by_torch():
    x = numbers()
    want = torch.from_numpy(x).bfloat16().float().numpy()
    assert np.array_equal(formats.from_bfloat16(formats.bfloat16_bits(x)), want, equal_nan=True)
    finite = x[~np.isnan(x)]
    assert np.array_equal(formats.bfloat16_rounded(finite), want[~np.isnan(x)])


@triton.jit
def scaled_kernel(x, out, n, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, (tl.load(x + at, mask=at < n) * 2).to(out.dtype.element_ty), mask=at < n)


def test_a_kernel_runs_on_arrays():
    x, out = np.arange(100, dtype=np.float32), np.full(100, np.nan, np.float32)
    with simulate("sm_90"):
        scaled_kernel[(2,)](x, out, 100, 64)
    assert np.array_equal(out, 2 * x)
    out[:] = np.nan
    with simulate("sm_90"):
        scaled_kernel[(1,)](Array(x[10:]), Array(out[50:]), 40, 64)  # views of both
    assert np.isnan(out[:50]).all() and np.array_equal(out[50:90], 2 * x[10:50]) and np.isnan(out[90:]).all()


@pytest.mark.parametrize("dtype", [tl.bfloat16, tl.float16, tl.float8e4nv, tl.int32], ids=str)
def test_types_that_numpy_lacks(dtype):
    x, out = Array.of([1.0, 2.0, -3.0, 100.0], dtype), Array.of(np.zeros(4), dtype)
    with simulate("sm_90", checks=Checks(coverage=True)):
        if str(dtype) == "fp8e4nv":
            copied_kernel[(1,)](x, out, 4)
        else:
            scaled_kernel[(1,)](x, out, 4, 4)
    assert out.numpy().tolist() == [(1 if str(dtype) == "fp8e4nv" else 2) * value for value in x.numpy().tolist()]


@triton.jit
def copied_kernel(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at))


@triton.jit
def blocks_kernel(x, out):
    out.store([0, 0], x.load([2, 0]))


def test_descriptors_of_arrays():
    x, out = np.arange(64, dtype=np.float32).reshape(8, 8), np.zeros((2, 8), np.float32)
    with simulate("sm_90"):
        blocks_kernel[(1,)](
            TensorDescriptor.from_tensor(Array(x), [2, 8]), TensorDescriptor.from_tensor(Array(out), [2, 8])
        )
    assert np.array_equal(out, x[2:4])


@triton.jit
def addressed_kernel(where, out):
    tl.store(out, tl.load(tl.load(where).to(tl.pointer_type(tl.float32))))


def test_an_array_is_found_by_its_address():
    part, out = Array(np.float32([7.0])), np.zeros(1, np.float32)
    with simulate("sm_90"):
        addressed_kernel[(1,)](np.array([part.data_ptr()]), out)
    assert out[0] == 7.0


def test_faults_of_arrays_are_reported():
    x, out = np.zeros(60, np.float32), np.zeros(64, np.float32)
    with simulate("sm_90", check=False) as run:
        scaled_kernel[(1,)](x, out, 64, 64)
    (report,) = run.reports
    assert report.kind == "bounds" and "4 past its end" in report.text


def test_a_read_only_array_is_read_and_never_written():
    fixed, out = np.frombuffer(np.arange(4, dtype=np.float32).tobytes(), np.float32), np.zeros(4, np.float32)
    with simulate("sm_90"):
        copied_kernel[(1,)](fixed, out, 4)
    assert out.tolist() == fixed.tolist()
    with pytest.raises(ValueError, match="read-only"), simulate("sm_90"):
        copied_kernel[(1,)](np.ones(4, np.float32), fixed, 4)
    assert fixed.tolist() == [0, 1, 2, 3]


def test_an_array_of_the_wrong_size_is_refused():
    with pytest.raises(ValueError, match="expected an array whose elements have 16 bits"):
        Array(np.zeros(3, np.float32), tl.bfloat16)
    with pytest.raises(TypeError, match="Triton has no type"):
        Array(np.zeros(3, np.complex64))


def test_places_in_memory():
    x = np.zeros((4, 6), np.float32)
    whole, part = given("x", x), given("part", x[1:, ::2])
    assert len(whole.raw) == len(part.raw) == 96 and part.offset == 24 and part.strides == (24, 8) and part.size == 9
    flipped = given("flipped", x[::-1])
    assert flipped.offset == 72 and np.shares_memory(flipped.raw, x)
    assert as_numbers(Array(x)).dtype == np.float64 and not np.shares_memory(copied(Array(x)).base, x)


CODE = """
import sys
sys.modules["torch"] = None  # an import of torch raises ImportError
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else find(name, *rest)
del sys.modules["torch"]
class Refused:
    def find_spec(self, name, *rest):
        assert name.partition(".")[0] != "torch", "torch is imported"
sys.meta_path.insert(0, Refused())
from strobe.sim.command import run
status = run([sys.argv[1] + "::scaled_kernel", "f32[100]", "nan:f32[100]", "100", "64", "--grid", "2", "--mode", "pct"])
assert "torch" not in sys.modules
sys.exit(status)
"""
KERNEL = """
import triton, triton.language as tl
@triton.jit
def scaled_kernel(x, out, n, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, tl.exp(tl.load(x + at, mask=at < n).to(tl.bfloat16).to(tl.float32)), mask=at < n)
"""


def test_nothing_imports_torch(tmp_path):
    """`import strobe` does, so the package is put under another name, as strobe-sim has it."""
    (tmp_path / "kernels.py").write_text(KERNEL)
    source = __import__("strobe.sim", fromlist=["sim"]).__path__[0]
    (tmp_path / "alone").symlink_to(source)
    code = CODE.replace("strobe.sim", "alone")
    done = subprocess.run(
        [sys.executable, "-c", code, "kernels.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "1 run, 0 findings" in done.stdout
