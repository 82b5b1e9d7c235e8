"""Tests that ask for device="cuda" on a machine without one: their tensors are made on the CPU, and the driver answers
as a named GPU would.

Functions are replaced, no torch mode is entered: under a mode strobe would take another way through its dispatch than
users do.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

import torch

MADE = (
    "arange", "as_tensor", "asarray", "empty", "empty_like", "empty_permuted", "empty_strided", "eye", "full",
    "full_like", "linspace", "normal",
    "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "tensor",
    "tril_indices", "triu_indices",
    "zeros", "zeros_like",
)  # fmt: skip
METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "to")


def install(capability: tuple[int, int]) -> None:
    """From now on "cuda" is the CPU, and torch.cuda describes a GPU of this compute capability."""
    for name in MADE:
        setattr(torch, name, _mapped(getattr(torch, name)))
    for name in METHODS:
        setattr(torch.Tensor, name, _mapped(getattr(torch.Tensor, name)))
    torch.nn.Module.to = _mapped(torch.nn.Module.to)
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_args, **_kwargs: self
    major, minor = capability
    properties = SimpleNamespace(
        name="CPU", gcnArchName="", major=major, minor=minor, total_memory=80 << 30, multi_processor_count=132
    )
    answers = {"get_device_capability": capability, "get_device_properties": properties}
    for name, answer in answers.items():
        setattr(torch.cuda, name, _answer(answer))
    for name in ("synchronize", "empty_cache", "manual_seed", "manual_seed_all", "reset_peak_memory_stats"):
        setattr(torch.cuda, name, _answer(None))


def _answer(answer):
    return lambda *_args, **_kwargs: answer


def _mapped(function):
    @functools.wraps(function)
    def on_cpu(*args, **kwargs):
        return function(
            *map(_device, args),
            **{name: _device(value) if name == "device" else value for name, value in kwargs.items()},
        )

    return on_cpu


def _device(value):
    """The CPU for a CUDA device, anything else as it is."""
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return "cpu"
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value
