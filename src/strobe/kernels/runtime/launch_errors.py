"""Runs a kernel and converts failures to compile or launch into KernelFault, with cause and remedy.

Triton compiles at a kernel's first call, where problems of the C compiler, cache folder, driver or Triton itself show
up. Their own errors do not tell a user what to do.
"""

from __future__ import annotations

import errno
import subprocess
import sys
from typing import NoReturn

import torch
from torch import Tensor

from ...errors import BROKEN, KernelFault, describe
from ..protocol import Plan

LONGEST = 600  # characters of a cause; the full text of ptxas or MLIR is in the exception's __cause__
CACHE_REMEDY = "set TRITON_CACHE_DIR to a folder that can be written to"
VERSION = (
    "install the Triton that this PyTorch was released with; if that does not help, report it with the "
    "output of `strobe env`"
)


def run(plan: Plan, call: object, tensors: object, workspace: dict[str, Tensor]) -> None:
    """Call `plan.kernel.run`. Raises KernelFault if a compiled kernel fails to compile or launch."""
    try:
        plan.kernel.run(plan, call, tensors, workspace)
    except _failures(plan) as error:
        _raise(plan, error)


def _failures(plan: Plan) -> tuple[type[BaseException], ...]:
    """Exceptions of Triton, its C compiler and the system; none for CPU kernels. Evaluated only after an exception."""
    if plan.kernel.name.startswith("cpu."):
        return ()
    own = getattr(sys.modules.get("triton.errors"), "TritonError", None)
    return (*BROKEN, subprocess.SubprocessError, *(() if own is None else (own,)))


def _raise(plan: Plan, error: BaseException) -> NoReturn:
    # strobe's own errors already have a remedy; the others are out of memory and earlier faults of the GPU
    if type(error).__module__.startswith("strobe.") or isinstance(
        error, (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", ()))
    ):
        raise error
    cause, (expected, remedy) = _cause(error), _remedy(error, plan)
    raise KernelFault(
        describe(f"{plan.kernel.name} ({plan.config}) on {plan.target.name}", cause, expected, remedy)
    ) from error


def _cause(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, subprocess.CalledProcessError):
        command = error.cmd if isinstance(error.cmd, str) else " ".join(map(str, error.cmd))
        text = f"exit code {error.returncode} of {command}"
    text = text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"
    return f"{type(error).__name__}: {text}"


def _remedy(error: BaseException, plan: Plan) -> tuple[str, str]:
    """(what was expected of this machine, what to do)."""
    text = str(error)
    if isinstance(error, subprocess.CalledProcessError) and "ptxas" not in str(error.cmd):
        return (
            "a C compiler that builds Triton's launcher",
            "install gcc and Python's headers (python3-dev), or name a compiler by CC",
        )
    if isinstance(error, FileNotFoundError) and _is_program(error):
        return f"the program {error.filename}", "install it, or name another C compiler by CC"
    if isinstance(error, OSError) and not isinstance(error, ImportError):
        full = error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
        return "a folder for what Triton compiles", f"{'free some space, or ' if full else ''}{CACHE_REMEDY}"
    for words, expected, remedy in _SAID:
        if words in text:
            return expected, remedy
    if type(error).__name__ == "OutOfResources":
        other = "" if plan.kernel.name.startswith("portable.") else 'ask for kernel="portable", and '
        return "a kernel that fits this GPU", f"{other}report it with the output of `strobe env`"
    return "a kernel that compiles and launches", VERSION


def _is_program(error: OSError) -> bool:
    """Whether the missing file is a program that should have been started."""
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_globals.get("__name__") == "subprocess":
            return True
        traceback = traceback.tb_next
    return False


_SAID = (
    (
        "C compiler",
        "a C compiler for the launcher that Triton builds at a kernel's first call",
        "install gcc or clang, or name one by CC",
    ),
    ("cache dir", "a folder for what Triton compiles", CACHE_REMEDY),
    (
        "failed to map segment",
        "a cache folder from which code may be loaded (it is mounted noexec)",
        "set TRITON_CACHE_DIR to another folder",
    ),
    (
        "active drivers",
        "one GPU driver that Triton can load",
        "install NVIDIA's driver, and see that libcuda.so.1 is found (ldconfig -p)",
    ),
    (
        "libcuda",
        "one GPU driver that Triton can load",
        "install NVIDIA's driver, and see that libcuda.so.1 is found (ldconfig -p)",
    ),
    ("ptxas", "a ptxas that knows this GPU", "unset TRITON_PTXAS_PATH, or install a newer Triton"),
)
