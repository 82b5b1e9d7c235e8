"""Whether a call must go through torch's dispatcher, or may run the op's body directly.

The dispatcher costs a call of three tensors 2.8 us on an H200's host: 16.8 us with it, 14.0 us without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _dispatch_tls_local_include_set,
    _is_any_autocast_enabled,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch._C import _functorch as _C_functorch  # type: ignore[attr-defined]
from torch._C._autograd import _profiler_enabled
from torch.autograd import forward_ad

_INFERENCE = DispatchKeySet(DispatchKey.BackendSelect)
_USUAL = _INFERENCE.add(DispatchKey.ADInplaceOrView)
_QUIET = (_USUAL.raw_repr(), _INFERENCE.raw_repr())  # what a thread adds to its tensors' keys, out of and in inference mode


def torch_mode_active() -> bool:
    """Whether a torch mode, transform or profiler is active."""
    if torch.compiler.is_compiling():  # first: the rest is not for tracing
        return True
    # what a thread adds tells of modes of __torch_dispatch__, torch.func, functionalization, torch.jit.trace and pre-dispatch export
    if _dispatch_tls_local_include_set().raw_repr() not in _QUIET:
        return True
    return bool(_len_torch_function_stack()) or _is_any_autocast_enabled() or _profiler_enabled() or forward_ad._current_level >= 0


def unseen_mode_active(traced: bool = True) -> bool:
    """Whether a mode or profiler is active that torch's guards of tensors do not detect.

    A guard compares the dispatch keys that a thread adds to its tensors. Those keys show every other mode that `torch_mode_active` detects, which
    takes three times as long. traced: whether torch.compile may be tracing the caller.

    >>> with torch.autograd.profiler.profile():
    ...     unseen_mode_active()
    True
    """
    if traced and torch.compiler.is_dynamo_compiling():  # first: the rest is not for tracing
        return True
    # a mode of fake tensors or of make_fx adds nothing to real ones
    return bool(_len_torch_dispatch_stack() or _len_torch_function_stack()) or _profiler_enabled() or forward_ad._current_level >= 0


def _layers(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor, and what torch.func has wrapped in it."""
    yield tensor
    while _C_functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _C_functorch.get_unwrapped(tensor)
        yield tensor


def wants_beneath(tensors: Sequence[Tensor | None]) -> bool:
    """Whether a gradient is wanted of one of them that vmap's wrappers do not speak of.

    >>> x = torch.ones(3, requires_grad=True)
    >>> torch.vmap(lambda one: torch.tensor([one.requires_grad, wants_beneath([one])]))(x)[0]
    tensor([False,  True])
    """
    if not torch._C._are_functorch_transforms_active() or torch.compiler.is_compiling():
        return False
    return any(layer.requires_grad for tensor in tensors if tensor is not None for layer in _layers(tensor))


def batched(tensors: Sequence[Tensor]) -> bool:
    """Whether one of them is many, to vmap.

    >>> torch.vmap(lambda one: torch.tensor(batched([one])))(torch.ones(1)), batched([torch.ones(1)])
    (tensor([True]), False)
    """
    return not torch.compiler.is_compiling() and any(_C_functorch.is_batchedtensor(layer) for tensor in tensors for layer in _layers(tensor))


def is_distributed(tensor: Tensor) -> bool:
    """Whether it is a DTensor, told without importing what that is: the import costs 300 ms.

    >>> is_distributed(torch.ones(1))
    False
    """
    kind = type(tensor)
    return kind is not Tensor and kind.__module__.startswith("torch.distributed.tensor")


def functionalized() -> bool:
    """Whether torch.func.functionalize is among the transforms that are active.

    >>> functionalized(), torch.func.functionalize(lambda x: torch.tensor(functionalized()))(torch.ones(1))
    (False, tensor(True))
    """
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return False
    return any(transform.key() == _C_functorch.TransformType.Functionalize for transform in _C_functorch.get_interpreter_stack())


def written_by_copy(tensor: Tensor) -> bool:
    """Whether a kernel computes elsewhere what torch then copies to a tensor: of a DTensor, of a negative view, whose memory holds other numbers,
    and under torch.func.functionalize.

    >>> x = torch.ones(1)
    >>> written_by_copy(x), written_by_copy(torch._neg_view(x)), torch.func.functionalize(lambda x: torch.tensor(written_by_copy(x)))(x)
    (False, True, tensor(True))
    """
    return is_distributed(tensor) or (not torch.compiler.is_compiling() and tensor.is_neg()) or functionalized()


def tangents(tensors: Sequence[Tensor]) -> bool:
    """Whether one of them carries a tangent of forward-mode differentiation, which an op without a rule for it would lose.

    >>> with forward_ad.dual_level():
    ...     tangents([torch.ones(1)]), tangents([forward_ad.make_dual(torch.ones(1), torch.ones(1))])
    (False, True)
    """
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return False
    layers = (layer for tensor in tensors for layer in _layers(tensor) if not _C_functorch.is_batchedtensor(layer))
    return any(forward_ad.unpack_dual(layer).tangent is not None for layer in layers)


def needs_dispatcher(tensors: Sequence[Tensor], graded: bool = False) -> bool:
    """Whether an op on these tensors must go through torch's dispatcher.

    It need not where the dispatcher would run the op's body and nothing else: no tensor needs a gradient, and no mode is active. graded: the caller
    handles gradients itself.

    >>> x = torch.ones(1)
    >>> needs_dispatcher([x]), needs_dispatcher([x.requires_grad_()])
    (False, True)
    >>> torch.vmap(lambda one: torch.tensor(needs_dispatcher([one])))(torch.ones(1))
    tensor([True])
    """
    if torch_mode_active():
        return True
    grad = not graded and torch.is_grad_enabled()
    try:
        for tensor in tensors:
            if type(tensor) is not Tensor or (grad and tensor.requires_grad) or tensor.is_neg():
                return True
            if not tensor.data_ptr():  # on meta, empty, or zeros that are not stored
                return True
    except RuntimeError:  # a layout that has no address
        return True
    return False


def distinct(arguments: tuple) -> list:
    """The arguments with a view for each tensor's second appearance: torch.compile traces no autograd.Function given one tensor twice."""
    views: list = []
    for argument in arguments:
        again = isinstance(argument, Tensor) and any(argument is other for other in views)
        views.append(argument.view(argument.shape) if again else argument)
    return views


def in_autocasts_dtype(call: Any) -> Any:
    """A call as autocast has it: its three tensors in another dtype."""
    kind = call.q.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return call
    dtype = torch.get_autocast_dtype(kind)
    q, k, v = (t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in call[:3])
    return call._replace(q=q, k=k, v=v)
