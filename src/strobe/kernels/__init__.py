"""All kernel families, in order of preference. A family's kernel module is imported when a call first asks about it.

That module imports no kernel language, so asking it is cheap and works without Triton.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module

from .protocol import Kernel

# Each family has a file kernel.py with FORWARD, BACKWARD, DECODE, PAGED and APPEND. It may lack some of them: blackwell
# has no PAGED and no APPEND. It has BACKWARD_PAIR, a backward with pairs of CTAs for wide heads and calls that name it.
FAMILIES = ("blackwell", "hopper", "portable", "cpu")


@lru_cache
def kernels(direction: str) -> tuple[Kernel, ...]:
    """All kernels of a direction ("forward", "backward", "decode", "paged" or "append"), best first.

    >>> [kernel.name for kernel in kernels("forward")]
    ['blackwell.forward', 'hopper.forward', 'portable.forward', 'cpu.forward']
    >>> [kernel.name for kernel in kernels("backward")]
    ['blackwell.backward', 'blackwell.backward_pair', 'hopper.backward', 'portable.backward', 'cpu.backward']
    >>> [kernel.name for kernel in kernels("decode")]
    ['blackwell.decode', 'hopper.decode', 'portable.decode', 'cpu.decode']
    >>> [kernel.name for kernel in kernels("paged")]
    ['hopper.paged', 'portable.paged', 'cpu.paged']
    """
    modules = [import_module(f"strobe.kernels.{family}.kernel") for family in FAMILIES]
    names = direction.upper(), f"{direction.upper()}_PAIR"
    found = [getattr(module, name, None) for module in modules for name in names]
    return tuple([kernel for kernel in found if kernel is not None])
