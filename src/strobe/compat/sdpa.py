"""Run torch's scaled_dot_product_attention and varlen_attn on strobe's kernels: `enable()`.

This module registers a provider named "STROBE" in torch.nn.attention's registry. While active, the provider overrides
torch's flash attention ops in the dispatcher, on CPUs and GPUs. Calls that strobe does not support go to torch's own
kernels and are counted in `passed`. Importing this module registers the provider but does not activate it. Calls with
masks or dropout are decided above torch's choice of a backend: see `sdpa_masks`.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable
from threading import Lock, local
from typing import NamedTuple

import torch
from torch.compiler import config as compiler
from torch.library import Library
from torch.nn import attention as registry
from torch.nn.attention import SDPBackend

from ..errors import InvalidProblem, UnsupportedProblem
from ..problem.torch_private import (
    KERNELS_CALLABLE,
    get_sdp_priority_order,
    has_kernel,
    set_sdp_priority_order,
    torch_kernel,
)
from . import aten
from .aten import served
from .sdpa_masks import Asked, kernel_of

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
WHOLE = "scaled_dot_product_attention"
WHOLE_KEYS = {"CUDA": ("CUDA", "AutogradCUDA"), "CPU": ("CPU", "AutogradCPU")}  # with and without inference_mode
LOG = logging.getLogger(__name__)

passed: Counter[str] = Counter()  # unsupported argument -> number of calls that went to torch's own kernel


class _Passing(local):
    """Whether this thread is inside torch's own kernel. SDPA's op on GPUs calls the `_flash` op, so one call gets here
    twice; count it once.
    """

    on = False


_passing = _Passing()


# ---------------------------------------------------------------- the provider


class Handle:
    """The handle that torch's registry keeps while strobe is active. Dropping the libraries restores torch's
    kernels."""

    def __init__(self, libraries: list[Library]):
        self.libraries = libraries

    def remove(self) -> None:
        self.libraries = []


def register() -> Handle:
    """Override torch's flash ops. torch calls this for `torch.nn.attention.activate_flash_attention_impl("STROBE")`."""
    from ..kernels.cpu import flash  # noqa: F401  its import gets torch's own kernels, so it must come before the override

    libraries = []
    for key, functions in OPS.items():
        library = Library("aten", "IMPL", key)
        for name, function in functions.items():
            exists = hasattr(torch.ops.aten, name)  # torch 2.11 lacks one of them
            own = exists and has_kernel(f"aten::{name}", key)
            if not exists or not (own or key == "CPU"):  # this torch has no CUDA kernels
                continue
            kernel = _kernel(name, function, torch_kernel(name, key) if own else None)
            kernel = aten.torch_first(kernel) if function is aten.cpu_forward else kernel
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", r"(?s).*Overriding a previously registered kernel", UserWarning)
                library.impl(name, kernel, key)
        libraries.append(library)
    return Handle([*libraries, _register_whole()])


def _register_whole() -> Library:
    """Override scaled_dot_product_attention itself, for calls with masks or dropout."""
    library = Library("aten", "IMPL")
    keys = [key for device in OPS if device == "CPU" or torch.backends.cuda.is_built() for key in WHOLE_KEYS[device]]
    originals = {key: torch_kernel(WHOLE, key) for key in keys}  # before the first override
    for key, original in originals.items():
        library.impl(WHOLE, kernel_of(original, lambda: _asked, _count_passed(WHOLE)), key)
    return library


def _count_passed(name: str) -> Callable[[Exception], None]:
    def count(refusal: Exception) -> None:
        if not _passing.on:
            reason = getattr(refusal, "argument", "no kernel")
            if not passed[reason]:
                LOG.info("aten::%s goes to torch's own kernel: %s", name, refusal)
            passed[reason] += 1

    return count


def _kernel(name: str, function: Callable, original: Callable | None) -> Callable:
    """An op that calls `function` and, if that raises, torch's kernel `original`. Without an original the error is
    raised.
    """
    count_passed = _count_passed(name)

    def kernel(*arguments, **options):
        try:
            return function(*arguments, **options)
        except (InvalidProblem, UnsupportedProblem) as refusal:
            if original is None:
                raise
            count_passed(refusal)
        before, _passing.on = _passing.on, True
        try:
            return original(*arguments, **options)
        finally:
            _passing.on = before

    return kernel


registry.register_flash_attention_impl(NAME, register_fn=register)


# ---------------------------------------------------------------- the switch


class _Before(NamedTuple):
    """State before the first switch: the provider, the priority of SDPA's backends, and the tag in the keys of
    torch.compile's caches.
    """

    impl: str | None
    priority: list[int]
    ours: list[int]  # the priority while strobe is enabled
    tag: str

    @property
    def our_tag(self) -> str:
        """The cache tag while strobe is enabled. A compiled graph contains the backend that was traced, so each state
        needs separate keys on disk.
        """
        words = "strobe.sdpa" if _asked == Asked() else f"strobe.sdpa {_asked.masks} {_asked.dropout}"
        return f"{self.tag}+{words}" if self.tag else words


_LOCK = Lock()
_switches: set[Switch] = set()
_before: _Before | None = None
_asked = Asked()  # of all switches


def _ask(before: _Before) -> None:
    """Set `_asked` from all switches: masks and dropout run on strobe if one switch asks for them."""
    global _asked
    tagged = compiler.cache_key_tag == before.our_tag
    masks = [one.asked.masks for one in _switches if one.asked.masks is not None]
    _asked = Asked(any(masks) if masks else None, any(one.asked.dropout for one in _switches))
    if tagged:
        compiler.cache_key_tag = before.our_tag


class Switch:
    """The result of `enable`. Call it, or leave its `with` block, to disable strobe; a second call does nothing.

    strobe stays enabled until the last Switch is undone."""

    def __init__(self, asked: Asked = Asked()):  # noqa: B008  a value
        self.asked = asked
        self._before = Counter(served), Counter(passed)

    @property
    def served(self) -> dict[str, int]:
        """Calls of torch's flash ops that strobe ran since this switch was made: kernel name -> count."""
        return dict(Counter(served) - self._before[0])

    @property
    def passed(self) -> dict[str, int]:
        """Calls that went to torch's own kernel since this switch was made: unsupported argument -> count."""
        return dict(passed - self._before[1])

    def __call__(self) -> None:
        with _LOCK:
            if self in _switches:
                _switches.remove(self)
                if _before is not None:
                    _ask(_before)
                if not _switches:
                    _restore()

    def __enter__(self) -> Switch:
        return self

    def __exit__(self, *_: object) -> None:
        self()


def enable(*, masks: bool | None = None, dropout: bool = False) -> Switch:
    """Run torch's scaled_dot_product_attention and varlen_attn on strobe until the returned switch is called or its
    `with` block ends.

    >>> q = torch.randn(1, 2, 8, 16)
    >>> with enable() as switch:
    ...     out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    >>> switch.served, switch.passed
    ({'cpu.forward': 1}, {})

    Flash attention becomes the first of SDPA's backends; the others keep their order. (On Hopper torch prefers cuDNN,
    and strobe does not replace cuDNN's kernels.) Calls that strobe does not support go to torch's own kernels, counted
    in `passed`.

    masks: whether strobe runs calls with attn_mask, of bools or of numbers, with gradients of the numbers. None: on
    GPUs in 16 bits, and on CPUs where the mask requires a gradient or weights are dropped, since torch then holds all
    scores. On CPUs torch's kernel is faster with other masks. dropout: whether strobe runs calls with dropout_p; its
    random numbers are another stream than torch's, seeded by torch's generator.

    Switches nest and may be undone in any order; together they ask for masks and dropout if one of them does. The last
    one restores the state before the first, except for settings that other code has changed since. `served` counts the
    forwards alone of calls with masks or dropout.

    Call this before torch.compile, because a compiled graph keeps the backend that was traced. Graphs traced with
    strobe have separate keys in the caches on disk (`torch.compiler.config.cache_key_tag`). Call this after
    torch.cuda.set_device: it asks torch for SDPA's choice on the GPU, and that initialises CUDA.

    Raises UnsupportedProblem before torch 2.11, and if torch's own kernels cannot be called.
    """
    global _before
    if not hasattr(registry, "restore_flash_attention_impl"):
        raise UnsupportedProblem(
            "strobe.integrations.sdpa needs torch 2.11, which can put its own kernels back; this is torch "
            f"{torch.__version__}"
        )
    if not KERNELS_CALLABLE:
        raise UnsupportedProblem(
            "strobe.integrations.sdpa needs torch's own kernels for calls that strobe does not support, and cannot "
            f"call them in torch {torch.__version__}"
        )
    with _LOCK:
        before = _before or _taken()
        if registry.current_flash_attention_impl() != NAME:
            registry.activate_flash_attention_impl(NAME)
        set_sdp_priority_order(before.ours)
        compiler.cache_key_tag = before.our_tag
        _before, switch = before, Switch(Asked(masks, dropout))
        _switches.add(switch)
        _ask(before)
    return switch


def _taken() -> _Before:
    if torch.cuda.is_available():  # torch's first choice on a GPU overwrites the priority, so make it before reading
        _choose(torch.device("cuda"))
    priority = get_sdp_priority_order()
    flash = SDPBackend.FLASH_ATTENTION.value
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
    if get_sdp_priority_order() == before.ours:
        set_sdp_priority_order(before.priority)
    if compiler.cache_key_tag == before.our_tag:
        compiler.cache_key_tag = before.tag


# ---------------------------------------------------------------- the active backend


def _choose(device: torch.device) -> SDPBackend:
    q = torch.empty(1, 1, 128, 64, dtype=torch.bfloat16, device=device)
    return SDPBackend(torch.ops.aten._fused_sdp_choice(q, q, q, is_causal=True))


def backend(device: torch.device | str) -> str:
    """The backend that SDPA chooses on a device, for a causal bfloat16 call with head dimension 64, and the active
    provider.

    >>> backend("cpu")
    'FLASH_ATTENTION'
    >>> with enable():
    ...     backend("cpu")
    'FLASH_ATTENTION of STROBE'
    """
    picked, impl = _choose(torch.device(device)).name, registry.current_flash_attention_impl()
    return f"{picked} of {impl}" if impl and picked == "FLASH_ATTENTION" else picked


__all__ = ["Switch", "backend", "enable", "passed", "served"]
