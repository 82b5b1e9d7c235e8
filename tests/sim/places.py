"""Where a tiny kernel of these tests runs: the simulator always, a GPU beside it where there is one, on the same
numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from strobe.sim import simulate

PLACES = ["simulator", pytest.param("cuda", marks=pytest.mark.gpu)]


def launch(
    place: str,
    kernel: Any,
    *arguments: Any,
    grid: tuple = (1,),
    target: str = "sm_90",
    mode: str = "eager",
    **options: Any,
) -> None:
    """Run a kernel on CPU tensors; on a GPU they are copied there and back."""
    if place == "simulator":
        with simulate(target, mode=mode):
            kernel[grid](*arguments, **options)
        return
    triton.set_allocator(
        lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda")
    )  # for descriptors made there
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    kernel[grid](*(_moved(argument, copies) for argument in arguments), **options)
    for here, there in copies.values():
        here.copy_(there)


def _moved(argument: Any, copies: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Any:
    if isinstance(argument, torch.Tensor):
        return copies.setdefault(id(argument), (argument, argument.cuda()))[1]
    if isinstance(argument, tuple):
        moved = [_moved(one, copies) for one in argument]
        return type(argument)(*moved) if hasattr(argument, "_fields") else tuple(moved)
    if isinstance(argument, (TensorDescriptor, GluonDescriptor)):
        return replace(argument, base=_moved(argument.base, copies))
    return argument


def same_bits(got: torch.Tensor, want: torch.Tensor, sign_of_zero: bool = True) -> None:
    """Equal to the bit; any NaN for any NaN; with sign_of_zero=False also -0 for 0."""
    assert got.dtype == want.dtype and got.shape == want.shape, (
        f"{got.dtype} {tuple(got.shape)}, expected {want.dtype} {tuple(want.shape)}"
    )
    agree = bits(got) == bits(want)
    if got.dtype.is_floating_point:
        wide_got, wide_want = got.double(), want.double()
        agree |= wide_got.isnan() & wide_want.isnan()
        if not sign_of_zero:
            agree |= (wide_got == 0) & (wide_want == 0)
    wrong = (~agree).nonzero()
    if len(wrong):
        first = tuple(wrong[0].tolist())
        raise AssertionError(
            f"{len(wrong)} of {got.numel()} differ, the first at {first}: {got[first]}, expected {want[first]}"
        )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    )


def any_bits(dtype: torch.dtype, count: int, seed: int = 0) -> torch.Tensor:
    """Every bit pattern of a small type, random ones of a large: subnormal, infinite and NaN are among them."""
    size = dtype.itemsize
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=torch.Generator().manual_seed(seed)).bool()
    if 256**size <= count:
        return (
            torch.arange(count)
            .to({1: torch.uint8, 2: torch.int32}[size])
            .to({1: torch.uint8, 2: torch.int16}[size])
            .view(dtype)
        )
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(-(2**63), 2**63 - 1, (count * size // 8,), generator=generator)
    drawn = raw.view(dtype).clone()
    corners = _corners(dtype)
    drawn[: len(corners)] = corners
    return drawn


def _corners(dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        numbers = [
            0.0,
            -0.0,
            1.0,
            -1.0,
            0.5,
            2.5,
            -3.5,
            torch.inf,
            -torch.inf,
            torch.nan,
            127.0,
            128.5,
            -129.0,
            32768.0,
            65535.9,
            -1e9,
            3e9,
            1e19,
        ]
        return torch.tensor(numbers, dtype=torch.float64).to(dtype)
    info = torch.iinfo(dtype)
    return torch.tensor([0, 1, info.min, info.max, info.max // 2, 7, 3], dtype=dtype)


def name(value: Any) -> str | None:
    """A parameter in a test's name."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else getattr(value, "__name__", None)
