"""strobe under torch's own attention: `enable()`, and F.scaled_dot_product_attention and varlen_attn run strobe's kernels.

A provider of torch.nn.attention's registry, named "STROBE": it stands before torch's flash kernels in the dispatcher, on CPUs
and GPUs, and hands them what strobe does not serve, counted in `passed`. Importing this registers it and activates nothing.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from threading import Lock, local
from typing import NamedTuple

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.compiler import config as compiler
from torch.library import Library
from torch.nn import attention as registry
from torch.nn.attention import SDPBackend

from ..errors import InvalidProblem, UnsupportedProblem
from . import aten
from .aten import served

NAME = "STROBE"
SDPA = "_scaled_dot_product_flash_attention"
GENERAL = {
    SDPA: aten.sdpa_forward,
    f"{SDPA}_backward": aten.sdpa_backward,
    "_flash_attention_forward": aten.flash_forward,
    "_flash_attention_forward_no_dropout_inplace": aten.flash_forward_into,
    "_flash_attention_backward": aten.flash_backward,
}
OPS: dict[str, dict[str, Callable]] = {
    "CUDA": GENERAL,
    "CPU": GENERAL | {f"{SDPA}_for_cpu": aten.cpu_forward, f"{SDPA}_for_cpu_backward": aten.cpu_backward},
}
LOG = logging.getLogger(__name__)

passed: Counter[str] = Counter()  # calls handed to torch's own kernel, by the argument that strobe does not serve


class _Passing(local):
    """Whether this thread is inside torch's own kernel: SDPA's on GPUs calls the `_flash` op, which comes by here again and is not counted twice."""

    on = False


_passing = _Passing()


# ---------------------------------------------------------------- the provider


class Handle:
    """What torch's registry holds while strobe is active: letting go of the libraries puts torch's kernels back."""

    def __init__(self, libraries: list[Library]):
        self.libraries = libraries

    def remove(self) -> None:
        self.libraries = []


def register() -> Handle:
    """Stand before torch's flash kernels, for `torch.nn.attention.activate_flash_attention_impl("STROBE")`."""
    from ..kernels.cpu import flash  # noqa: F401  it holds on to torch's own kernels as it is imported: before they are overridden

    libraries = []
    for key, functions in OPS.items():
        library = Library("aten", "IMPL", key)
        for name, function in functions.items():
            exists = hasattr(torch.ops.aten, name)  # one of them is younger than torch 2.11
            own = exists and torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)
            if not exists or not (own or key == "CPU"):  # a torch without CUDA
                continue
            kernel = _kernel(name, function, _torchs(name, key) if own else None)
            kernel = aten.torch_first(kernel) if function is aten.cpu_forward else kernel
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", r"(?s).*Overriding a previously registered kernel", UserWarning)
                library.impl(name, kernel, key)
        libraries.append(library)
    return Handle(libraries)


def _torchs(name: str, key: str) -> Callable:
    """torch's own kernel, with the one key it was registered for: asking the dispatcher for those of each call costs half a microsecond."""
    return partial(torch.library.get_kernel(f"aten::{name}", key).call_boxed, DispatchKeySet(getattr(DispatchKey, key)))


def _kernel(name: str, function: Callable, original: Callable | None) -> Callable:
    """`function`, and torch's kernel where it refuses; `original` is None where torch has none."""

    def kernel(*arguments, **options):
        try:
            return function(*arguments, **options)
        except (InvalidProblem, UnsupportedProblem) as refusal:
            if original is None:
                raise
            if not _passing.on:
                reason = getattr(refusal, "argument", "no kernel")
                if not passed[reason]:
                    LOG.info("aten::%s goes to torch's own kernel: %s", name, refusal)
                passed[reason] += 1
        before, _passing.on = _passing.on, True
        try:
            return original(*arguments, **options)
        finally:
            _passing.on = before

    return kernel


registry.register_flash_attention_impl(NAME, register_fn=register)


# ---------------------------------------------------------------- the switch


class _Before(NamedTuple):
    """What there was before the first switch: the provider, the priority of SDPA's backends, and the tag in the keys of torch.compile's caches."""

    impl: str | None
    priority: list[int]
    ours: list[int]  # the priority set instead
    tag: str

    @property
    def our_tag(self) -> str:
        """A compiled graph holds the op of the backend that was traced, so graphs traced with strobe and without need keys of their own on disk."""
        return f"{self.tag}+strobe.sdpa" if self.tag else "strobe.sdpa"


_LOCK = Lock()
_switches: set[Switch] = set()
_before: _Before | None = None


class Switch:
    """What `enable` returns: call it, or leave its `with` block, to undo it; again does nothing. strobe stays as long as one is left."""

    def __init__(self):
        self._before = Counter(served), Counter(passed)

    @property
    def served(self) -> dict[str, int]:
        """Calls of torch's flash ops that strobe ran since it was switched on, by the kernel that did."""
        return dict(Counter(served) - self._before[0])

    @property
    def passed(self) -> dict[str, int]:
        """Those it handed to torch's own kernel, by the argument that it does not serve."""
        return dict(passed - self._before[1])

    def __call__(self) -> None:
        with _LOCK:
            if self in _switches:
                _switches.remove(self)
                if not _switches:
                    _restore()

    def __enter__(self) -> Switch:
        return self

    def __exit__(self, *_: object) -> None:
        self()


def enable() -> Switch:
    """Run torch's scaled_dot_product_attention and varlen_attn on strobe, until the switch returned is called or left.

    >>> q = torch.randn(1, 2, 8, 16)
    >>> with enable() as switch:
    ...     out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    >>> switch.served, switch.passed
    ({'cpu.forward': 1}, {})

    Puts flash attention first among SDPA's backends (on Hopper cuDNN stands there, whose kernels strobe does not replace)
    and keeps the others' order. What a call asks of SDPA does not change: masks, dropout and shapes that flash attention
    does not take go where they went, and what strobe does not serve goes to torch's flash kernel, counted in `passed`.
    Switches nest, and may be undone in any order; the last one puts back what was there before the first, except where
    someone else has changed it since. Enable before torch.compile, which keeps the backend that it traced; its caches on disk
    tell graphs traced with strobe from others (`torch.compiler.config.cache_key_tag`). Enable after torch.cuda.set_device: where
    there is a GPU, this asks torch for its choice there, which initialises CUDA.
    """
    global _before
    if not hasattr(registry, "restore_flash_attention_impl"):
        raise UnsupportedProblem(f"strobe.integrations.sdpa needs torch 2.11, which can put its own kernels back; this is torch {torch.__version__}")
    with _LOCK:
        before = _before or _taken()
        if registry.current_flash_attention_impl() != NAME:
            registry.activate_flash_attention_impl(NAME)
        torch._C._set_sdp_priority_order(before.ours)
        compiler.cache_key_tag = before.our_tag
        _before, switch = before, Switch()
        _switches.add(switch)
    return switch


def _taken() -> _Before:
    if torch.cuda.is_available():  # the first choice on a GPU sets the priority, over any that was set before
        _choose(torch.device("cuda"))
    priority = torch._C._get_sdp_priority_order()
    flash = int(SDPBackend.FLASH_ATTENTION)  # type: ignore[call-overload]
    ours = [flash, *(one for one in priority if one != flash)]
    return _Before(registry.current_flash_attention_impl(), priority, ours, compiler.cache_key_tag)


def _restore() -> None:
    global _before
    before, _before = _before, None
    if before is None:
        return
    if registry.current_flash_attention_impl() == NAME:
        registry.restore_flash_attention_impl()
        if before.impl is not None:
            registry.activate_flash_attention_impl(before.impl)
    if torch._C._get_sdp_priority_order() == before.ours:
        torch._C._set_sdp_priority_order(before.priority)
    if compiler.cache_key_tag == before.our_tag:
        compiler.cache_key_tag = before.tag


# ---------------------------------------------------------------- who runs


def _choose(device: torch.device) -> SDPBackend:
    q = torch.empty(1, 1, 128, 64, dtype=torch.bfloat16, device=device)
    return SDPBackend(torch._fused_sdp_choice(q, q, q, is_causal=True))  # type: ignore[call-arg]


def backend(device: torch.device | str) -> str:
    """Which backend SDPA picks on a device for a causal call in bfloat16 with heads of 64, and whose kernel stands there.

    >>> backend("cpu")
    'FLASH_ATTENTION'
    >>> with enable():
    ...     backend("cpu")
    'FLASH_ATTENTION of STROBE'
    """
    picked, impl = _choose(torch.device(device)).name, registry.current_flash_attention_impl()
    return f"{picked} of {impl}" if impl and picked == "FLASH_ATTENTION" else picked


__all__ = ["Switch", "backend", "enable", "passed", "served"]
