"""Offline compile: kernels to PTX and machine code for GPUs that are not here, and what ptxas made of them.

Triton's driver is replaced by one that names a target; `kernel.warmup` with CPU tensors then specialises as a launch would.
"""

from __future__ import annotations

import collections
import re
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from ..call import Call
from ..kernels.kernel import Backward, Forward
from ..problem import Problem
from ..select import select
from ..target import Target

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
COUNTED = ("HGMMA", "HMMA", "UTCHMMA", "DMMA", "FFMA", "MUFU.EX2", "LDGSTS", "UTMALDG", "LDL", "STL", "BAR.SYNC", "PRMT", "SHFL")


class Report(NamedTuple):
    """One kernel compiled for one target; spills and shared memory in bytes, seconds of the cold compile."""

    name: str
    capability: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    serialized: bool  # ptxas found wgmma it had to serialise
    instructions: dict[str, int]
    seconds: float


def portable_reports(call: Call, target: Target) -> list[Report]:
    """The portable kernels that `call`, on CPU tensors, would run on `target`: forward, and backward where it needs gradients."""
    from ..kernels.portable import launch

    problem = Problem.from_call(call)
    choice = select(problem, target)
    shape, shape_lse = problem.out_shapes
    out, lse = torch.empty(shape, dtype=problem.out_dtype), torch.empty(shape_lse, dtype=problem.lse_dtype)
    launches = launch.forward_launches(choice.forward, call, Forward(out, lse))
    if choice.backward:
        dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype) for t in call[:3])
        launches += launch.backward_launches(choice.backward, call, Backward(out, out, lse, None, dq, dk, dv, torch.empty_like(lse)))
    return [report(one.kernel.fn.__name__, one.kernel, target.capability, one.arguments, one.options) for one in launches]


class _OfflineDriver:
    """As much of a Triton driver as JITFunction.warmup asks for."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 1000 + self.capability  # a device of its own per target keeps Triton's in-memory caches apart

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def offline(capability: int):
    """Triton believes in a GPU of this capability."""
    before = driver._active  # reset_active() would look for a GPU's driver and fail where there is none
    driver.set_active(_OfflineDriver(capability))  # type: ignore[arg-type]
    try:
        yield
    finally:
        driver._active = before


def report(name: str, kernel: Any, capability: int, arguments: tuple, options: dict[str, Any]) -> Report:
    """Compile `kernel` for the arguments and say what it takes."""
    with offline(capability):
        start = time.perf_counter()
        compiled = kernel.warmup(*arguments, grid=(1,), **options)
        seconds = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        ptx.write_text(compiled.asm["ptx"])
        cubin.write_bytes(compiled.asm["cubin"])
        said = _ptxas(ptx, capability, Path(folder, "again.cubin"))
        sass = subprocess.run([TOOLS / "nvdisasm", "-c", cubin], capture_output=True, text=True).stdout
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", said)]
    registers = re.search(r"Used (\d+) registers", said)
    return Report(
        name, capability, int(registers[1]) if registers else 0, sum(spills), compiled.metadata.shared,
        "wgmma.mma_async instructions are serialized" in said, _count(sass), seconds,
    )  # fmt: skip


def _ptxas(ptx: Path, capability: int, out: Path) -> str:
    """ptxas -v once more on the PTX: the cubin itself keeps no spill counts."""
    tool = "ptxas-blackwell" if capability >= 100 else "ptxas"
    name = f"sm_{capability}" + ("a" if capability >= 90 else "")
    return subprocess.run([TOOLS / tool, "-v", f"--gpu-name={name}", ptx, "-o", out], capture_output=True, text=True).stderr


def _count(sass: str) -> dict[str, int]:
    found: collections.Counter[str] = collections.Counter()
    for match in re.finditer(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", sass):
        found.update(name for name in COUNTED if match[1].startswith(name))
    return dict(found)
