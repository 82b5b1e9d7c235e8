"""Facts about this machine and checks of what it can run, for `strobe env`, `strobe check` and benchmark rows."""

from __future__ import annotations

import platform
import re
import shutil
from collections.abc import Iterator
from importlib import metadata
from typing import NamedTuple

import torch

from .. import __version__
from ..compat import sdpa
from ..env import ENV
from ..errors import UnsupportedProblem
from ..kernels import FAMILIES, kernels
from ..ops import attention as ops
from ..problem.call import Call
from ..problem.problem import Problem
from ..problem.target import Target
from .attempt import Attempt

LEAST_TORCH, LEAST_TRITON, LEAST_CAPABILITY = (2, 10), (3, 6), 80


class Check(NamedTuple):
    name: str
    state: str  # "PASS", "FAIL", or "SKIP" if there is nothing to check on this machine
    words: str


def version(package: str) -> str | None:
    """
    >>> version("no-such-package") is None
    True
    """
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def facts() -> dict[str, str]:
    """Facts for a bug report: name -> text.

    >>> list(facts())[:3]
    ['strobe', 'python', 'system']
    """
    lines = {"strobe": __version__, "python": platform.python_version(), "system": platform.platform()}
    lines |= {
        name: version(name) or "not installed" for name in ("torch", "triton", "rich", "matplotlib", "transformers")
    }
    lines["torch"] = torch.__version__  # with the build: +cpu, +cu130
    lines["cuda"] = torch.version.cuda or "not in this torch"
    lines["compiler"] = compiler() or "none found"
    lines |= {f"gpu {index}": str(Target.of(torch.device("cuda", index))) for index in range(torch.cuda.device_count())}
    lines["cpu"] = (
        f"{Target.of(torch.device('cpu'))}, {torch.backends.cpu.get_cpu_capability()}, torch uses "
        f"{torch.get_num_threads()} threads"
    )
    lines["environment"] = ", ".join(f"{name}={value!r}" for name, value in ENV._asdict().items())
    return lines


def compiler() -> str | None:
    """The C compiler for Triton's launcher, or None: gcc, then clang, unless CC names another."""
    return shutil.which("gcc") or shutil.which("clang")


def checks() -> Iterator[Check]:
    """Check torch, Triton, the C compiler and GPUs, then every kernel family: a tiny forward and backward, compared
    with the oracle.
    """
    yield _torch()
    gpus = [Target.of(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    yield _triton(bool(gpus))
    path = compiler()
    words = path or "none found: Triton builds its launcher with gcc or clang (apt install gcc)"
    yield Check("compiler", "PASS" if path else "FAIL" if gpus else "SKIP", words)
    if not gpus:
        yield Check("gpu", "SKIP", "torch sees no CUDA device")
    for gpu in gpus:
        old = gpu.capability < LEAST_CAPABILITY
        yield Check(
            "gpu", "FAIL" if old else "PASS", f"{gpu}; kernels need sm_{LEAST_CAPABILITY} or newer" if old else str(gpu)
        )
    for family in FAMILIES:
        yield _family(family)
    yield _sdpa()


def _torch() -> Check:
    enough = _numbers(torch.__version__) >= LEAST_TORCH
    return Check(
        "torch",
        "PASS" if enough else "FAIL",
        torch.__version__ + ("" if enough else f"; needs {'.'.join(map(str, LEAST_TORCH))} or newer"),
    )


def _triton(wanted: bool) -> Check:
    """Compare the installed Triton with the version that torch pins. Others may fail in torch.compile and in strobe."""
    found = version("triton")
    if found is None:
        return Check("triton", "FAIL" if wanted else "SKIP", "not installed; GPU kernels need it: pip install triton")
    if _numbers(found) < LEAST_TRITON:
        return Check("triton", "FAIL", f"{found}; needs {'.'.join(map(str, LEAST_TRITON))} or newer")
    pin = pinned(metadata.requires("torch") or [])
    if pin is None:
        return Check("triton", "PASS", f"{found} (this torch asks for none)")
    if pin == found.split("+")[0]:
        return Check("triton", "PASS", f"{found}, as torch asks")
    return Check("triton", "FAIL", f"{found}, but torch asks for {pin}: pip install triton=={pin}")


def pinned(requirements: list[str]) -> str | None:
    """
    >>> pinned(["filelock", 'triton==3.6.0; platform_system == "Linux"'])
    '3.6.0'
    """
    found = (re.match(r"triton\s*==\s*([\w.]+)", requirement) for requirement in requirements)
    return next((match.group(1) for match in found if match), None)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def _family(family: str) -> Check:
    """Compare a family with the oracle on a bfloat16 problem: B=2, grouped heads, lengths 37 and 53."""
    from ..testing.compare import assert_as_good_as, assert_gradients_as_good_as

    own = [
        kernel
        for direction in ("forward", "backward")
        for kernel in kernels(direction)
        if kernel.name.startswith(f"{family}.")
    ]
    # a kernel's name, so that another family may run the other direction
    asked = family if len(own) == 2 else own[0].name
    place = torch.device("cuda" if torch.cuda.is_available() and family != "cpu" else "cpu")
    draw = torch.Generator().manual_seed(0)
    shapes = ((2, 37, 4, 64), (2, 53, 2, 64), (2, 53, 2, 64), (2, 37, 4, 64))
    q, k, v, dout = (torch.randn(shape, generator=draw).to(place, torch.bfloat16) for shape in shapes)
    call = Call(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), right=0, needs_grad=True, kernel=asked)
    problem, target = Problem.from_call(call), Target.of(place)
    for kernel in own:
        if reason := kernel.why_not(problem, target):
            return Check(family, "SKIP", f"{kernel.name}: {reason}")
    with Attempt() as attempt:
        out, lse = ops.run(call)
        gradients = torch.autograd.grad(out, (q, k, v), dout)
        assert_as_good_as((out, lse), call)
        assert_gradients_as_good_as((*gradients, None), call, dout)
    return Check(
        family,
        "FAIL" if attempt.reason else "PASS",
        attempt.reason or f"forward and backward agree with float64 on {target.name}",
    )


def _sdpa() -> Check:
    """The backend of torch's scaled_dot_product_attention for a causal call, and the kernel used after enable()."""
    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    q = torch.randn(1, 8, 128, 64, device=place, dtype=torch.bfloat16)
    before = sdpa.backend(place)
    try:
        switch = sdpa.enable()
    except UnsupportedProblem as error:
        return Check("sdpa", "SKIP", f"plain: {before}; {error}")
    with switch, Attempt() as attempt:
        after = sdpa.backend(place)
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        kernel = "".join(switch.served)
        words = f"plain: {before}; after strobe.integrations.sdpa.enable(): {after}, run by {kernel or 'torch'}"
        return Check("sdpa", "PASS" if kernel else "FAIL", words)
    return Check("sdpa", "FAIL", attempt.reason or "")
