"""What a first call waits for besides its kernel's compilation, done at the same time.

Triton writes a launcher in C for each kernel and calls a C compiler once the kernel is compiled, which takes 0.25 s; its driver's own module takes as
long, once a process, and the hash of itself that it looks kernels up by 0.3 s. But what a launcher is made of is known before. So two threads have

    C compiler: the driver's module    kernel: MLIR, LLVM, ptxas
    hash of Triton                     C compiler: its launcher

Triton then finds the launcher where it keeps what was compiled, on disk. First calls of forwards take 0.86 to 0.88 of the time: d128 dense 2.8 s for
3.2, causal 3.3 for 3.8, d64 causal 3.5 for 3.9 (an H100's host). Python's collector of garbage rests meanwhile, which would
look again and again at what reading a kernel makes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import lru_cache, partial
from threading import Thread
from typing import Any

import triton
from triton.runtime.cache import triton_key

READ = "3.6"  # versions of Triton that write a launcher for each kernel; later ones have one for all


def beside(kernel: Any, device: int) -> None:
    """Have Triton do so from now on where it compiles this kernel for this GPU, the current one."""
    if not (triton.__version__.startswith(READ) and hasattr(kernel, "device_caches")):  # else interpreted
        return
    _hashing()
    kernel.device_caches[device]  # made where it is missing, and `compile` with it, and a process's first brings up the driver
    if not isinstance(kernel.compile, partial):
        kernel.compile = partial(_with_launcher, kernel.compile)


@lru_cache
def _hashing() -> Thread:
    """Triton keeps what comes of it."""
    thread = Thread(target=triton_key)
    thread.start()
    return thread


def _with_launcher(compile: Callable[..., Any], source: Any, *arguments: Any, **options: Any) -> Any:
    _hashing().join()
    launcher = Thread(target=_launcher, args=(source,))
    launcher.start()
    collecting = gc.isenabled()
    gc.disable()
    try:
        return compile(source, *arguments, **options)
    finally:
        if collecting:
            gc.enable()
        launcher.join()


def _launcher(source: Any) -> None:
    """The launcher of what this source compiles to, into Triton's cache: its code asks of descriptors only whether TMA reads them, as on Hopper."""
    from triton.backends.nvidia import driver as nvidia

    described = [True for kind in source.signature.values() if isinstance(kind, str) and kind.startswith("tensordesc")]
    text = nvidia.make_launcher(source.constants, source.signature, described or None)
    nvidia.compile_module_from_src(
        src=text, name="__triton_launcher", library_dirs=nvidia.library_dirs(), include_dirs=nvidia.include_dirs, libraries=nvidia.libraries
    )
