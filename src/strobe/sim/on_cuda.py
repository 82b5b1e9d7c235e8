"""Tensors on "cuda" that lie on the CPU, so that files written for a GPU run unedited."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import triton.testing
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from triton._C import libtriton

from .host import answers, capability_of, timed_once


@contextlib.contextmanager
def cuda_on_cpu(target: str = "sm_90", *, sms: int = 4) -> Iterator[None]:
    """Serve tensors asked for on "cuda" from the CPU, and answer torch.cuda's and Triton's queries for a target.

    >>> with cuda_on_cpu("sm_90"):
    ...     x = torch.zeros(4, device="cuda")
    ...     x.is_cuda, x.device.type, torch.cuda.get_device_capability()
    (True, 'cuda', (9, 0))

    Files written for a GPU run unedited: import them inside, and launch kernels inside `simulate` too. Every tensor
    says that it is on "cuda:0". Moves between devices are copies. Functions under torch.compile run eagerly.
    Benchmarks (triton.testing) run what they would time once, and reports of performance are skipped.
    """
    with contextlib.ExitStack() as patches:
        patches.enter_context(answers(capability_of(target), sms, device="cuda:0"))
        patches.enter_context(mock.patch.object(torch.cuda, "is_available", lambda: True))
        patches.enter_context(mock.patch.object(triton.testing, "do_bench", timed_once))
        patches.enter_context(mock.patch.object(triton.testing, "do_bench_cudagraph", timed_once))
        patches.enter_context(mock.patch.object(triton.testing.Mark, "run", lambda *_, **__: None))
        if hasattr(libtriton, "nvidia"):
            patches.enter_context(mock.patch.object(libtriton.nvidia.cublas, "CublasLt", _CublasLt))
        patches.enter_context(torch.compiler.set_stance("force_eager"))
        patches.enter_context(_OnCpu())
        patches.enter_context(_tensors_say_cuda())
        yield


_CUDA = torch.device("cuda", 0)


class _CublasLt:
    """Triton's binding of cuBLAS, which tutorials compare their kernels with: torch computes its products."""

    def __init__(self, workspace: torch.Tensor):
        self.workspace = workspace

    def matmul(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        """`out` = `a` @ `b`.T"""
        out.copy_(a.float() @ b.float().T)

    def gemm(
        self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, out: torch.Tensor, alpha: float, beta: float
    ) -> None:
        """`out` = `alpha` `a` @ `b`.T + `beta` `c`"""
        out.copy_(alpha * (a.float() @ b.float().T) + beta * c.float())


def _moved(value: Any) -> Any:
    """The CPU for "cuda"."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return "cpu"
    return value


_FACTORIES = (
    "arange", "asarray", "as_tensor", "empty", "empty_like", "empty_permuted", "empty_strided", "eye", "full",
    "full_like", "linspace", "logspace", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like",
    "randn", "randn_like", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
    "zeros_like",
)  # fmt: skip
_METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")


def _served(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with "cuda" replaced in its arguments."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*map(_moved, args), **{name: _moved(value) for name, value in kwargs.items()})

    return call


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    moved = tuple(map(_moved, args)), {name: _moved(value) for name, value in kwargs.items()}
    named = [value for value in (*args, *kwargs.values()) if isinstance(value, (str, torch.device))]
    return _TO(tensor, *moved[0], **moved[1] | ({"copy": True} if named else {}))


_TO = torch.Tensor.to


@contextlib.contextmanager
def _tensors_say_cuda() -> Iterator[None]:
    """Factories and methods that take a device, and what tensors say of theirs.

    A mode alone would not do: torch switches it off inside of an autograd.Function.
    """
    with contextlib.ExitStack() as patches:
        for owner, names in ((torch, _FACTORIES), (torch.Tensor, _METHODS)):
            for name in names:
                patches.enter_context(mock.patch.object(owner, name, _served(getattr(owner, name))))
        copies = lambda tensor, *_, **__: tensor.clone()
        methods: dict[str, Any] = dict(to=_to, cuda=copies, cpu=copies, get_device=lambda _: 0)
        for name, value in methods.items():
            patches.enter_context(mock.patch.object(torch.Tensor, name, value))
        for name, value in dict(is_cuda=True, device=_CUDA).items():
            constant = property(lambda _, value=value: value)
            patches.enter_context(mock.patch.object(torch.Tensor, name, constant, create=True))
        yield


_16_BITS = (torch.float16, torch.bfloat16)


def _layer_norm(input: torch.Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5):
    """torch's, with 16 bits in float32 as CUDA computes. On a CPU, gradients of the weight are added up in 16 bits."""
    if input.dtype not in _16_BITS:
        return functional.layer_norm(input, normalized_shape, weight, bias, eps)
    weight, bias = (None if one is None else one.float() for one in (weight, bias))
    return functional.layer_norm(input.float(), normalized_shape, weight, bias, eps).to(input.dtype)


_PRODUCTS = frozenset(
    (
        torch.mm, torch.matmul, torch.bmm, torch.addmm, torch.baddbmm, torch.einsum, functional.linear,
        torch.Tensor.mm, torch.Tensor.matmul, torch.Tensor.bmm, torch.Tensor.addmm, torch.Tensor.baddbmm,
        torch.Tensor.__matmul__, torch.Tensor.__rmatmul__,
    )
)  # fmt: skip


def _product(func: Callable[..., Any], *args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
    """A product of 16 bits in float64, rounded once; others are torch's.

    A GPU adds the terms in float32, in an order that torch's CPU does not have either. The exact product is within the
    error of both, and nearer to each than they are to each other.
    """
    given = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
    if not given or any(one.dtype not in _16_BITS for one in given):
        return func(*args, **kwargs) if out is None else func(*args, out=out, **kwargs)
    wide = lambda one: one.double() if isinstance(one, torch.Tensor) else one
    found = func(*map(wide, args), **{name: wide(value) for name, value in kwargs.items()}).to(given[0].dtype)
    return found if out is None else out.copy_(found)


class _OnCpu(TorchFunctionMode):
    """Replaces the device of calls to torch that do not go by the patched names, such as those of a default device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.layer_norm:
            return _layer_norm(*args, **(kwargs or {}))
        if func in _PRODUCTS:
            return _product(func, *args, **(kwargs or {}))
        called = func if func is torch.device else _served(func)  # a device keeps its name until it is used
        return called(*args, **(kwargs or {}))
