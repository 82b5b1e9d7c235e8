"""Every kernel there is, in order of preference. A family's module is imported when a call first asks about it;
it imports no DSL itself, so asking costs nothing and needs no Triton."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module

from .protocol import Kernel

# family: its kernels stand in strobe/kernels/FAMILY/kernel.py as FORWARD, BACKWARD, DECODE and APPEND; it may lack any
# of them. blackwell has a forward alone
FAMILIES = ("blackwell", "hopper", "portable", "cpu")


@lru_cache
def kernels(direction: str) -> tuple[Kernel, ...]:
    """All kernels of a direction ("forward", "backward", "decode" or "append"), best first.

    >>> [kernel.name for kernel in kernels("forward")]
    ['blackwell.forward', 'hopper.forward', 'portable.forward', 'cpu.forward']
    >>> [kernel.name for kernel in kernels("backward")]
    ['hopper.backward', 'portable.backward', 'cpu.backward']
    >>> [kernel.name for kernel in kernels("decode")]
    ['hopper.decode', 'portable.decode', 'cpu.decode']
    """
    found = (getattr(import_module(f"strobe.kernels.{family}.kernel"), direction.upper(), None) for family in FAMILIES)
    return tuple(kernel for kernel in found if kernel is not None)
