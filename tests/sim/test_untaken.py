"""What this run does not reach and Triton compiles all the same: None as a pointer on the other side of a branch."""

from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.errors import CompilationError

from strobe.sim import simulate


@triton.jit
def branch_kernel(out, scale, is_scaled):
    x = tl.load(out)
    if is_scaled > 0:
        x *= tl.load(scale)  # scale may be None
    tl.store(out, x)


@triton.jit
def other_side_kernel(out, scale, is_scaled):
    x = tl.load(out)
    if is_scaled > 0:
        x += 1
    else:
        x *= tl.load(scale + 1)
    tl.store(out, x)


@triton.jit
def chosen_kernel(out, scale, is_scaled):
    tl.store(out, tl.load(scale) if is_scaled > 0 else 2.0)


@triton.jit
def loop_kernel(out, scale, turns):
    x = tl.load(out)
    for i in range(turns):
        x += tl.load(scale + i)
    tl.store(out, x)


@triton.jit
def while_kernel(out, scale, turns):
    x, i = tl.load(out), turns
    while i > 0:
        x += tl.load(scale + i)
        i -= 1
    tl.store(out, x)


@triton.jit
def asked_kernel(out, scale, is_scaled):
    """As it should be written: the question about None is a constant of its own."""
    x = tl.load(out)
    if is_scaled > 0:  # noqa: SIM102
        if scale is not None:
            x *= tl.load(scale)
    tl.store(out, x)


@triton.jit
def constant_kernel(out, scale, IS_SCALED: tl.constexpr):
    x = tl.load(out)
    if IS_SCALED:
        x *= tl.load(scale)
    tl.store(out, x)


WRONG = [branch_kernel, chosen_kernel, loop_kernel, while_kernel]
SIGNATURE = {"out": "*fp32", "scale": "constexpr", "is_scaled": "i32", "turns": "i32"}


def reports_of(kernel, number: int, scale=None) -> list[str]:
    with simulate("sm_90", check=False) as run:
        kernel[(1,)](torch.ones(1), scale, number)
    assert all(report.kind == "compiler" for report in run.reports)
    return [report.text for report in run.reports]


@pytest.mark.parametrize("kernel, number", [*((kernel, 0) for kernel in WRONG), (other_side_kernel, 3)])
def test_none_beyond_a_runtime_condition_is_reported(kernel, number):
    (text,) = reports_of(kernel, number)
    assert "scale is None in `" in text and "test_untaken.py:" in text and kernel.__name__ in text
    assert not reports_of(kernel, number, torch.ones(4))


def test_the_line_is_that_of_the_use():
    (text,) = reports_of(branch_kernel, 0)
    assert "tl.load(scale)" in text and "test_untaken.py:20 branch_kernel" in text


@pytest.mark.parametrize("kernel", [asked_kernel, constant_kernel])
def test_a_question_about_none_is_no_fault(kernel):
    assert not reports_of(kernel, 0)


@pytest.mark.parametrize("kernel", [*WRONG, other_side_kernel, asked_kernel])
def test_triton_refuses_the_same_kernels(kernel):
    signature = {name: SIGNATURE[name] for name in kernel.arg_names}
    source = ASTSource(kernel, signature, {"scale": None})
    compiled = lambda: triton.compile(source, target=GPUTarget("cuda", 90, 32))
    if kernel is asked_kernel:
        compiled()
        return
    with pytest.raises(CompilationError):
        compiled()


class Tensors(NamedTuple):
    k: torch.Tensor
    scale: torch.Tensor | None


@triton.jit
def field_kernel(tensors, out, is_scaled):
    x = tl.load(tensors.k)
    if is_scaled > 0:
        x *= tl.load(tensors.scale)
    tl.store(out, x)


@triton.jit
def _scaled(x, tensors, is_scaled):
    if is_scaled > 0:
        x *= tl.load(tensors.scale)
    return x


@triton.jit
def called_kernel(tensors, out, is_scaled):
    tl.store(out, _scaled(tl.load(tensors.k), tensors, is_scaled))


@pytest.mark.parametrize("kernel", [field_kernel, called_kernel])
def test_a_field_that_is_none_is_reported(kernel):
    with simulate("sm_90", check=False) as run:
        kernel[(1,)](Tensors(torch.ones(1), None), torch.ones(1), 0)
    (report,) = run.reports
    assert report.kind == "compiler" and "tensors.scale is None" in report.text
    with simulate("sm_90"):
        kernel[(1,)](Tensors(torch.ones(1), torch.ones(1)), torch.ones(1), 0)


@triton.jit
def negated_kernel(x, out, COMPARES: tl.constexpr):
    at = tl.arange(0, 16)
    a = tl.load(x + at)
    if COMPARES:
        tl.store(out + at, (a < a).to(tl.float16).to(a.dtype))
    else:
        tl.store(out + at, -a)


@pytest.mark.parametrize("compares", [False, True])
@pytest.mark.parametrize("dtype, ir", [(torch.float8_e5m2, "*fp8e5"), (torch.float8_e4m3fn, "*fp8e4nv")])
def test_arithmetic_on_fp8_does_not_compile(dtype, ir, compares):
    x = torch.ones(16).to(dtype)
    with simulate("sm_90", check=False) as run:
        negated_kernel[(1,)](x, x, compares)
    (report,) = run.reports
    assert report.kind == "compiler" and ir[1:] in report.text
    source = ASTSource(negated_kernel, {"x": ir, "out": ir}, {"COMPARES": compares})
    with pytest.raises(RuntimeError, match="PassManager::run failed"):
        triton.compile(source, target=GPUTarget("cuda", 90, 32))
