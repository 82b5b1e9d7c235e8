"""`Target`, the properties of the device that a call runs on. Only this module queries the driver."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import lru_cache

import torch

KIB = 1024


@dataclass(frozen=True)
class Target:
    """The properties of a device that kernels depend on. `Target.of` queries the driver once per device; `FAKES` holds
    known devices.

    >>> FAKES["H200"].capability, FAKES["H200"].shared_bytes // KIB
    (90, 227)

    Attributes:
        name: the device's name, as its driver gives it.
        kind: "cuda", "cpu", "rocm" (torch calls it "cuda") or another torch device type.
        capability: compute capability, 90 for sm_90; 0 except for CUDA.
        sm_count: multiprocessors; cores on a CPU.
        shared_bytes: shared memory per CTA, at most.
        peak_tflops: dense bfloat16 matrix products, by the datasheet; 0 if unknown.
        peak_gbps: device memory bandwidth, by the datasheet; 0 if unknown.
    """

    name: str
    kind: str
    capability: int
    sm_count: int
    shared_bytes: int
    peak_tflops: float
    peak_gbps: float

    @staticmethod
    def of(device: torch.device) -> Target:
        return _ask_driver(device.type, device.index if device.index is not None else _current(device))

    @property
    def words(self) -> str:
        """The name of this target in error messages.

        >>> FAKES["H200"].words, FAKES["CPU"].words, Target("mps", "mps", 0, 0, 0, 0.0, 0.0).words
        ('sm_90', 'a CPU', 'mps; strobe runs on CPUs and on NVIDIA GPUs of sm_80 or later')
        """
        if self.kind in ("cuda", "cpu"):
            return f"sm_{self.capability}" if self.kind == "cuda" else "a CPU"
        here = f"an AMD GPU ({self.name})" if self.kind == "rocm" else self.name
        return f"{here}; strobe runs on CPUs and on NVIDIA GPUs of sm_80 or later"

    def __str__(self) -> str:
        if self.kind != "cuda":
            return f"{self.name}: CPU, {self.sm_count} cores" if self.kind == "cpu" else f"{self.name}: {self.kind}"
        peak = f", {self.peak_tflops:g} TFLOP/s bfloat16, {self.peak_gbps / 1000:g} TB/s" if self.peak_tflops else ""
        return f"{self.name}: sm_{self.capability}, {self.sm_count} SMs, {self.shared_bytes // KIB} KiB shared{peak}"


def _gpu(name: str, capability: int, sm_count: int, shared_kib: int, peak_tflops: float, peak_gbps: float) -> Target:
    return Target(name, "cuda", capability, sm_count, shared_kib * KIB, peak_tflops, peak_gbps)


# Peak rates: vendor datasheets, dense bfloat16. Shared memory per CTA: CUDA programming guide, table of compute
# capabilities.
FAKES = {
    target.name: target
    for target in (
        _gpu("A100", 80, 108, 163, 312, 2039),
        _gpu("A10", 86, 72, 99, 125, 600),
        _gpu("RTX 4090", 89, 128, 99, 165, 1008),
        _gpu("H100", 90, 132, 227, 989, 3350),
        _gpu("H200", 90, 132, 227, 989, 4800),
        _gpu("B200", 100, 148, 227, 2250, 8000),
        _gpu("B300", 103, 148, 227, 2500, 8000),
        _gpu("RTX 5090", 120, 170, 99, 210, 1792),
        Target("CPU", "cpu", 0, 2, 0, 0.0, 0.0),
    )
}


def _current(device: torch.device) -> int:
    return torch.cuda.current_device() if device.type == "cuda" else 0


@lru_cache
def _ask_driver(kind: str, index: int) -> Target:
    if kind != "cuda":
        name = (platform.processor() or platform.machine()) if kind == "cpu" else kind
        return Target(name, kind, 0, _cores(), 0, 0.0, 0.0)
    facts = torch.cuda.get_device_properties(index)
    known = max((name for name in FAKES if name in facts.name), key=len, default=None)
    peak = (FAKES[known].peak_tflops, FAKES[known].peak_gbps) if known else (0.0, 0.0)
    if torch.version.hip:  # torch calls AMD GPUs cuda, and gfx90a reports capability (9, 0), as Hopper does
        return Target(facts.name, "rocm", 0, facts.multi_processor_count, 0, 0.0, 0.0)
    shared = getattr(facts, "shared_memory_per_block_optin", 99 * KIB)
    return Target(facts.name, "cuda", 10 * facts.major + facts.minor, facts.multi_processor_count, shared, *peak)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
