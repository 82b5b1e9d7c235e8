"""Every private name of torch that strobe uses, with a public fallback for a torch that lacks it.

Other modules import these names from here. A name found in torch is torch's own object, so a call of it costs nothing
extra. Results do not depend on the fallbacks. With all of them, host times of small calls rise:

    call                                        with the names    with fallbacks
    forward, CPU, 16 tokens                     50 us             201 us, mostly in the CPU kernel
    forward, H100, 2 x 256 tokens, bfloat16     23 us             161 us
    decode of one token, H100                   30 us             84 us
    forward and backward, H100                  279 to 439 us     857 to 902 us

    name                                  used for                                fallback: its cost
    _len_torch_dispatch_stack             detects dispatch modes                  assumes a mode: each call takes the
                                                                                  dispatcher
    _len_torch_function_stack             detects function modes                  has_torch_function: 0.1 us
    _dispatch_tls_local_include_set,      detect functionalization, tracing       assumes one: each call takes the
        DispatchKey, DispatchKeySet                                               dispatcher
    _profiler_enabled                     detects profilers                       assumes one: as above
    _is_any_autocast_enabled              detects autocast                        asks for CPU and CUDA: 0.2 us
    forward_ad._current_level             detects forward-mode derivatives        unpacks a tensor: 0.3 us
    _are_functorch_transforms_active      selects an autograd.Function that       assumes one: 17 us a call
                                          torch.func can transform
    is_functorch_wrapped_tensor           finds torch.func's wrappers             asks for a storage: 0.3 us
    get_unwrapped                         finds requires_grad inside wrappers     prints the wrapper: 70 us
    is_batchedtensor                      refuses out= under vmap                 prints the wrapper: 50 us
    get_interpreter_stack, TransformType  detect torch.func.functionalize         allocates a tensor: 1.5 us
    _get_current_dispatch_mode_stack      finds active FLOP counters              searches gc's objects: 85 ms once
    FakeTensor                            gives fake tensors an alignment         compares class names: 0.3 us
    TensorGuards                          matches tensors with a cached call's    compares in Python: 2 us a tensor
    _cuda_getDevice,                      launch on the current device            public functions: 0.2 us each
        _cuda_getCurrentRawStream,        and stream
        _cuda_isCurrentStreamCapturing
    _empty_strided_cuda                   allocates results                       torch.empty_strided: twice as slow
    _FunctionBase.apply, _backward_cls    skip Python around autograd.Function    autograd.Function.apply: 4 us
    DispatchKeySet for call_boxed         calls torch's CPU flash kernel while    strobe's own CPU kernel only; the SDPA
                                          strobe overrides its op                 switch raises UnsupportedProblem
    _dispatch_has_kernel_for_dispatch_key finds torch's flash kernels             get_kernel: nothing
    _get_sdp_priority_order,              put flash attention first in SDPA       torch's order: where torch prefers
        _set_sdp_priority_order                                                   cuDNN (Hopper), SDPA keeps it
    _inductor.lowering, virtualized       give Inductor a missing lowering        one compilation for each offset
    _functorch.config.donated_buffer      times many backwards of FlexAttention   torch refuses the second backward
    _dynamo_marked_constant               takes a function's result as a          none: torch.compiler's own decorator
                                          constant of a graph                     imports Dynamo, which takes a second
    _python_dispatch.TorchDispatchMode    records functions of scores             none: every torch since 1.13 has it
    TorchDispatchMode._should_skip_dynamo records without importing Dynamo        torch does not ask: Dynamo is imported
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pkgutil import resolve_name
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")
_PLAIN = torch.empty(0)  # made outside every mode and transform


def _private(path: str, fallback: T) -> T:
    """The object "module:name", or the fallback if this torch lacks it."""
    try:
        return resolve_name(path)
    except (ImportError, AttributeError):
        return fallback


def constant_while_compiling(function: T) -> T:
    """As torch.compiler.assume_constant_result, which imports Dynamo and Triton where it decorates."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# ---------------------------------------------------------------- modes


class RecordingMode(TorchDispatchMode):
    """A dispatch mode without the wrapper against torch.compile, whose first call imports Dynamo and sympy. Functions
    are recorded outside compiled code.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _Keys(Protocol):
    def raw_repr(self) -> int: ...


class _UnknownKeys:
    def raw_repr(self) -> int:
        return -1


def _function_modes() -> int:
    return int(torch.overrides.has_torch_function((_PLAIN,)))


def _autocast() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


class _DualLevels(Protocol):
    @property
    def _current_level(self) -> int: ...  # negative outside forward-mode derivatives


class _ProbedLevels:
    @property
    def _current_level(self) -> int:
        return 0 if forward_ad.unpack_dual(_PLAIN).primal is not _PLAIN else -1


len_torch_dispatch_stack: Callable[[], int] = _private("torch._C:_len_torch_dispatch_stack", lambda: 1)
len_torch_function_stack: Callable[[], int] = _private("torch._C:_len_torch_function_stack", _function_modes)
dispatch_tls_local_include_set: Callable[[], _Keys] = _private("torch._C:_dispatch_tls_local_include_set", _UnknownKeys)
profiler_enabled: Callable[[], bool] = _private("torch._C._autograd:_profiler_enabled", lambda: True)
get_deterministic_algorithms: Callable[[], bool] = _private(
    "torch._C:_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled
)
is_any_autocast_enabled: Callable[[], bool] = _private("torch._C:_is_any_autocast_enabled", _autocast)
dual_levels: _DualLevels = (
    _ProbedLevels() if _private("torch.autograd.forward_ad:_current_level", None) is None else forward_ad
)

_Key: Any = _private("torch._C:DispatchKey", None)
_KeySet: Any = _private("torch._C:DispatchKeySet", None)


def _quiet_keys() -> tuple[int, ...]:
    if _Key is None or _KeySet is None:
        return ()
    inference = _KeySet(_Key.BackendSelect)
    return inference.add(_Key.ADInplaceOrView).raw_repr(), inference.raw_repr()


# a thread's included dispatch keys if no mode is active: outside and inside inference mode
QUIET_KEYS = _quiet_keys()


def _counters_alive(kind: type[T]) -> Iterator[T]:
    return (found for found in gc.get_objects() if issubclass(type(found), kind))


_mode_stack: Callable[[], list[object]] | None = _private(
    "torch.utils._python_dispatch:_get_current_dispatch_mode_stack", None
)


def flop_counters(kind: type[T], known: bool) -> Iterable[T]:
    """The FlopCounterModes that may be active. known: whether every counter made before has strobe's formulas."""
    if _mode_stack is not None:
        counters = (getattr(mode, "counter", None) for mode in _mode_stack())
        return [counter for counter in counters if isinstance(counter, kind)]
    return [] if known else list(_counters_alive(kind))


# ---------------------------------------------------------------- kinds of tensors


def _is_wrapped(tensor: Tensor) -> bool:
    """Whether a transform wraps the tensor: its storage cannot be read, or has no memory (functionalization)."""
    if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
        return False
    try:
        return bool(tensor.untyped_storage().nbytes()) and not tensor.data_ptr()
    except (NotImplementedError, RuntimeError):
        return True


def _printed(tensor: Tensor) -> str:
    """The wrappers of a tensor, outermost first, as torch prints them for a tensor without elements. "" for a tensor
    without wrappers.

    >>> found = torch.vmap(lambda x: torch.tensor(_printed(x).startswith("BatchedTensor(")))(torch.ones(2))
    >>> found.tolist()
    [True, True]
    """
    return repr(tensor.unsqueeze(0)[:0]) if _is_wrapped(tensor) else ""


MAY_HAVE_GRADIENT = torch.empty(0, requires_grad=True)  # in place of a tensor that cannot be unwrapped


def _stand_in(tensor: Tensor) -> Tensor:
    """MAY_HAVE_GRADIENT if a tensor inside the wrapper may have a gradient or a tangent, else a plain tensor."""
    beneath = _printed(tensor).partition("(")[2]
    wanted = any(sign in beneath for sign in ("GradTrackingTensor(", "requires_grad=True", "grad_fn=", "tangent="))
    return MAY_HAVE_GRADIENT if wanted else _PLAIN


def _functionalized() -> bool:
    return "FunctionalTensor(" in _printed(torch.empty(1, device="cpu"))


def _functionalize_listed() -> bool:
    return any(transform.key() == _Transforms.Functionalize for transform in _interpreters() or ())


are_functorch_transforms_active: Callable[[], bool] = _private(
    "torch._C:_are_functorch_transforms_active",
    lambda: not (torch.compiler.is_compiling() or torch.jit.is_tracing()),  # pyright: ignore[reportPrivateImportUsage]
)
is_functorch_wrapped_tensor: Callable[[Tensor], bool] = _private(
    "torch._C._functorch:is_functorch_wrapped_tensor", _is_wrapped
)
get_unwrapped: Callable[[Tensor], Tensor] = _private("torch._C._functorch:get_unwrapped", _stand_in)
is_batchedtensor: Callable[[Tensor], bool] = _private(
    "torch._C._functorch:is_batchedtensor", lambda tensor: _printed(tensor).startswith("BatchedTensor(")
)
_Transforms: Any = _private("torch._C._functorch:TransformType", None)
_interpreters: Any = _private("torch._C._functorch:get_interpreter_stack", None)
functionalize_active = _functionalized if _Transforms is None or _interpreters is None else _functionalize_listed


def _tracing() -> bool:
    return bool(len_torch_dispatch_stack() or are_functorch_transforms_active())


def _probed_tracing() -> bool:
    proxies: Any = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return type(torch.empty(0, device="cpu")) is not Tensor or (
        proxies is not None and proxies.get_proxy_mode() is not None
    )


# whether a mode or transform may trace, so that Python must not read values of tensors
may_trace = _probed_tracing if _private("torch._C:_len_torch_dispatch_stack", None) is None else _tracing


class _NamedFakeTensor(type):
    def __instancecheck__(cls, tensor: object) -> bool:
        return any(base.__name__ == "FakeTensor" for base in type(tensor).__mro__)


class _FakeTensor(metaclass=_NamedFakeTensor):
    """Every class of the name FakeTensor."""


FakeTensor: type[Tensor] = _private("torch._subclasses.fake_tensor:FakeTensor", cast(type[Tensor], _FakeTensor))


class PythonGuards:
    """Compares tensors with the metadata of others, as torch's TensorGuards does. It keeps no tensor."""

    def __init__(
        self,
        *tensors: Tensor,
        dynamic_dims_sizes: Sequence[Sequence[int]],
        dynamic_dims_strides: Sequence[Sequence[int]],
    ):
        self.sizes, self.strides = [*map(tuple, dynamic_dims_sizes)], [*map(tuple, dynamic_dims_strides)]
        self.kinds = [self._kind(tensor) for tensor in tensors]
        self.modes = self._modes()

    @staticmethod
    def _kind(tensor: Tensor) -> tuple:
        return (
            type(tensor), tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad, tensor.is_neg(),
            tensor.is_conj(), tensor.is_inference(), is_functorch_wrapped_tensor(tensor),
        )  # fmt: skip

    @staticmethod
    def _modes() -> tuple:
        return dispatch_tls_local_include_set().raw_repr(), is_any_autocast_enabled(), torch.is_inference_mode_enabled()

    def check(self, *tensors: Tensor) -> bool:
        return self.modes == self._modes() and all(
            self._kind(tensor) == kind
            and tensor.shape == size
            and tensor.stride() == stride
            and tensor.data_ptr() != 0  # a ZeroTensor has none
            for tensor, kind, size, stride in zip(tensors, self.kinds, self.sizes, self.strides)
        )


TensorGuards: Callable[..., Any] = _private("torch._C._dynamo.guards:TensorGuards", PythonGuards)


# ---------------------------------------------------------------- the current GPU


def _raw_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def _empty_strided(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


cuda_current_device: Callable[[], int] = _private("torch._C:_cuda_getDevice", torch.cuda.current_device)
cuda_current_raw_stream: Callable[[int], int] = _private("torch._C:_cuda_getCurrentRawStream", _raw_stream)
cuda_is_capturing: Callable[[], bool] = _private(
    "torch._C:_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)
empty_strided_cuda: Callable[[Sequence[int], Sequence[int], torch.dtype], Tensor] = _private(
    "torch._C._dynamo.guards:_empty_strided_cuda", _empty_strided
)


# ---------------------------------------------------------------- autograd

_FunctionBase: type | None = _private("torch._C:_FunctionBase", None)


def direct_apply(function: type[Function]) -> Callable[..., Any]:
    """`function.apply` without its search for dead wrappers of torch.func."""
    return function.apply if _FunctionBase is None else getattr(super(Function, function), "apply", function.apply)


def set_engine_backward(function: type[Function], backward: Callable[..., object]) -> None:
    """Let autograd's engine call `backward(ctx, *grads)` directly. Without the private name it calls
    `function.backward`.
    """
    node = None if _FunctionBase is None else getattr(function, "_backward_cls", None)
    if node is not None:
        node.apply = backward


# ---------------------------------------------------------------- torch's own kernels


KERNELS_CALLABLE = _Key is not None and _KeySet is not None


def torch_kernel(name: str, key: str) -> Callable[..., Any]:
    """torch's kernel of an aten op, bound to the dispatch key it was registered for; the op unless KERNELS_CALLABLE."""
    if not KERNELS_CALLABLE:
        return getattr(torch.ops.aten, name).default
    return partial(torch.library.get_kernel(f"aten::{name}", key).call_boxed, _KeySet(getattr(_Key, key)))


def _gets_kernel(op: str, key: str) -> bool:
    try:
        torch.library.get_kernel(op, key)
    except RuntimeError:
        return False
    return True


def _leave_priority(order: list[int]) -> None:
    pass


has_kernel: Callable[[str, str], bool] = _private("torch._C:_dispatch_has_kernel_for_dispatch_key", _gets_kernel)
get_sdp_priority_order: Callable[[], list[int]] = _private("torch._C:_get_sdp_priority_order", list)
set_sdp_priority_order: Callable[[list[int]], None] = _private("torch._C:_set_sdp_priority_order", _leave_priority)


# ---------------------------------------------------------------- torch.compile


def lower_sym_storage_offset() -> bool:
    """Register Inductor's missing lowering of sym_storage_offset. False if this torch's Inductor has another
    interface.
    """
    lowerings: Any = _private("torch._inductor.lowering:lowerings", None)
    register: Any = _private("torch._inductor.lowering:register_lowering", None)
    virtualized: Any = _private("torch._inductor.virtualized:V", None)
    if lowerings is None or register is None or virtualized is None:
        return False
    offset = torch.ops.aten.sym_storage_offset.default
    if offset not in lowerings:

        @register(offset)
        def lowered(_: object) -> object:
            found = virtualized.graph.current_node.meta["val"]
            return found.node.expr if isinstance(found, torch.SymInt) else found

    return True


def without_donated_buffers() -> AbstractContextManager[object]:
    """Within it, the backward of a compiled function can run more than once."""
    patch: Any = _private("torch._functorch.config:patch", None)
    return nullcontext() if patch is None else patch(donated_buffer=False)
