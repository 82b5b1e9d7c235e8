"""What a first call waits for besides its kernel's compilation, done at the same time.

Triton writes a launcher in C for each kernel and calls a C compiler once the kernel is compiled, which takes 0.25 s;
its driver's own module takes as long, once a process, and the hash of itself that it looks kernels up by 0.3 s. But
what a launcher is made of is known before. So two threads have

    C compiler: the driver's module    kernel: MLIR, LLVM, ptxas
    hash of Triton                     C compiler: its launcher

Triton then finds the launcher where it keeps what was compiled, on disk. First calls of forwards take 0.86 to 0.88 of
the time: d128 dense 2.8 s for 3.2, causal 3.3 for 3.8, d64 causal 3.5 for 3.9 (an H100's host).

And a compilation leaves out what no call needs: line numbers of machine code and a text of each stage, which are for
who looks into a kernel and asks by TRITON_DISABLE_LINE_INFO=0 and TRITON_STORE_BINARY_ONLY=0. On a slow H100's host
d128 causal's first call takes 4.4 s for 5.5, d64 causal's 4.5 for 5.1, of machine code that is the same. Python's
collector of garbage rests meanwhile, which would look again and again at what reading a kernel makes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache, partial
from subprocess import SubprocessError
from threading import Lock, Thread
from typing import Any

import triton
from triton import knobs
from triton.runtime.cache import triton_key

from ...errors import BROKEN

READ = "3.6"  # versions of Triton that write a launcher for each kernel; later ones have one for all
LEFT_OUT = ("disable_line_info", "store_binary_only")  # Triton's names for saying so


def beside(kernel: Any, device: int) -> None:
    """Have Triton do so from now on where it compiles this kernel for this GPU, the current one."""
    if not (triton.__version__.startswith(READ) and hasattr(kernel, "device_caches")):  # else interpreted
        return
    _hashing()
    kernel.device_caches[
        device
    ]  # made where it is missing, and `compile` with it, and a process's first brings up the driver
    if not isinstance(kernel.compile, partial):
        kernel.compile = partial(_with_launcher, kernel.compile)


@lru_cache
def _hashing() -> Thread:
    """Triton keeps what comes of it."""
    return _beside(triton_key)


def _beside(ahead: Callable[..., Any], *arguments: Any) -> Thread:
    """A thread that does so. What fails there fails again where Triton needs it, and is raised there: a thread would
    only print it.
    """

    def quietly() -> None:
        with suppress(*BROKEN, SubprocessError):
            ahead(*arguments)

    thread = Thread(target=quietly)
    thread.start()
    return thread


def _with_launcher(compile: Callable[..., Any], source: Any, *arguments: Any, **options: Any) -> Any:
    _hashing().join()
    launcher = _beside(_launcher, source)
    try:
        with _bare():
            return compile(source, *arguments, **options)
    finally:
        launcher.join()


_lock = Lock()
_under_way: list[ExitStack] = []  # an entry for each compilation, all the same: how it was before the first


@contextmanager
def _bare() -> Iterator[None]:
    """Without line numbers, texts and a collector of garbage until no thread compiles any more, unless the environment
    says what it wants.
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
    """Leave it out, and say how to take it back."""
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
    """The launcher of what this source compiles to, into Triton's cache: its code asks of descriptors only whether TMA
    reads them, as on Hopper.
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
