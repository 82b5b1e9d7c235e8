"""Overlaps a kernel's first compilation with the other work of a first call.

Triton writes a C launcher for each kernel and compiles it after the kernel, which takes 0.25 s. Its driver module takes
as long once per process, and the hash of Triton itself that keys its cache takes 0.3 s. What a launcher is generated
from is known before the kernel is compiled, so two threads can work:

    C compiler: the driver's module    kernel: MLIR, LLVM, ptxas
    hash of Triton                     C compiler: its launcher

Triton then finds the launcher in its disk cache. First calls of forwards drop from 3.2 to 2.8 s (d128 dense), from 3.8
to 3.3 s (d128 causal) and from 3.9 to 3.5 s (d64 causal; H100's host).

A compilation also skips what no call needs: line numbers in machine code, and a text file per stage. Set
TRITON_DISABLE_LINE_INFO=0 and TRITON_STORE_BINARY_ONLY=0 to get them. On a slow H100 host this takes d128 causal's
first call from 5.5 to 4.4 s and d64 causal's from 5.1 to 4.5 s, with the same machine code. Python's garbage collector
is paused, since it would scan the growing syntax trees repeatedly.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache, partial
from subprocess import SubprocessError
from threading import Lock, Thread
from typing import Any, TypeVar

import triton
from triton import knobs
from triton.runtime.cache import triton_key

from ...errors import BROKEN

T = TypeVar("T")
READ = "3.6"  # these versions of Triton generate a launcher per kernel; later ones share one
LEFT_OUT = ("disable_line_info", "store_binary_only")  # Triton's knobs


def beside(kernel: Any, device: int) -> None:
    """Make Triton overlap its next compilations of this kernel for the current GPU."""
    if not (triton.__version__.startswith(READ) and hasattr(kernel, "device_caches")):  # not under the interpreter
        return
    _hashing()
    # creates the entry and `compile` with it; the first of a process also loads the driver
    kernel.device_caches[device]
    if not isinstance(kernel.compile, partial):
        kernel.compile = partial(_with_launcher, kernel.compile)


@lru_cache
def _hashing() -> Thread:
    """Compute Triton's hash, which Triton caches, in a thread."""
    return _beside(triton_key)


def _beside(ahead: Callable[..., object], *arguments: object) -> Thread:
    """Run `ahead` in a thread. Its exceptions are dropped: Triton makes the same call later, and raises then."""

    def quietly() -> None:
        with suppress(*BROKEN, SubprocessError):
            ahead(*arguments)

    thread = Thread(target=quietly)
    thread.start()
    return thread


def _with_launcher(compile: Callable[..., T], source: Any, *arguments: object, **options: object) -> T:
    _hashing().join()
    launcher = _beside(_launcher, source)
    try:
        with _bare():
            return compile(source, *arguments, **options)
    finally:
        launcher.join()


_lock = Lock()
_under_way: list[ExitStack] = []  # one entry per compilation in progress; all restore the state before the first


@contextmanager
def _bare() -> Iterator[None]:
    """Skip line numbers, stage files and garbage collection while threads compile, unless the environment sets the
    knobs.
    """
    with _lock:
        _under_way.append(_under_way[0] if _under_way else _left_out())
    try:
        yield
    finally:
        with _lock:
            before = _under_way.pop()
            if not _under_way:
                before.close()


def _left_out() -> ExitStack:
    """Change the settings. Returns a stack that restores them."""
    before = ExitStack()
    if gc.isenabled():
        gc.disable()
        before.callback(gc.enable)
    for name in LEFT_OUT:
        key = knobs.compilation.knob_descriptors[name].key
        if knobs.getenv(key) is None and name not in vars(knobs.compilation):
            setattr(knobs.compilation, name, True)
            before.callback(knobs.setenv, key, None)
            before.callback(delattr, knobs.compilation, name)
    return before


def _launcher(source: Any) -> None:
    """Write the launcher for this source to Triton's cache. Its code depends on descriptors only in whether TMA reads
    them, as on Hopper.
    """
    from triton.backends.nvidia import driver as nvidia

    described = [True for kind in source.signature.values() if isinstance(kind, str) and kind.startswith("tensordesc")]
    text = nvidia.make_launcher(source.constants, source.signature, described or None)
    nvidia.compile_module_from_src(
        src=text,
        name="__triton_launcher",
        library_dirs=nvidia.library_dirs(),
        include_dirs=nvidia.include_dirs,
        libraries=nvidia.libraries,
    )
