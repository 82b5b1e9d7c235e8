"""What the cases of the corpus have in common: their table, inputs, and results with gradients."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Pair = tuple[Any, Any]  # (result, reference)
CASES: dict[str, Callable[[], Pair]] = {}


def case(name: str) -> Callable[[Callable[[], Pair]], Callable[[], Pair]]:
    return lambda function: CASES.setdefault(name, function)


def get(path: str) -> Any:
    """The object of a dotted name."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to("cuda")


def with_gradients(ours: Callable[..., Tensor], theirs: Callable[..., Tensor], *inputs: Tensor) -> Pair:
    """Results and gradients of both, each from inputs of its own."""
    found = []
    for function in (ours, theirs):
        own = [one.detach().clone().requires_grad_() for one in inputs]
        out = function(*own)
        (out * torch.linspace(0.5, 1.5, out.numel(), device="cuda").view(out.shape)).sum().backward()
        found.append([out, *(one.grad for one in own)])
    return found[0], found[1]
