"""The storages of tensors and arrays that a launch may access, found by argument or by an address in the kernel.

A kernel may be given addresses as numbers: a tensor of `data_ptr()`s (grouped GEMM), or an integer argument. Where such
a number becomes a pointer, the tensor or Array that it points into is looked for among all that are alive.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import numpy as np

from .arrays import Array, Given, given
from .machine import Machine
from .memory import Memory


def register(machine: Machine, name: str, tensor: Given) -> Memory:
    """The memory of a tensor's storage. All tensors of one storage share it."""
    base = tensor.raw.__array_interface__["data"][0]
    for memory in machine.storages:
        if memory.base == base and len(memory.raw) == len(tensor.raw):
            memory.granule = min(memory.granule, tensor.itemsize)
            return memory
    memory = Memory(name, "global", tensor.raw, tensor.itemsize, initialised=True)
    machine.storages.append(memory)
    return memory


def register_empty(machine: Machine, name: str, address: int) -> None:
    """The memory of a tensor without elements: a report of an access through its pointer names it, with the others that
    have the same address, such as torch's, which is 0.
    """
    same = next((memory for memory in machine.storages if memory.base == memory.end == address), None)
    if same is None:
        machine.storages.append(empty_storage(name, address))
    else:
        same.name += f" or {name}"


def empty_storage(name: str, address: int) -> Memory:
    memory = Memory(name, "global", np.empty(0, np.uint8), 1, initialised=True)
    memory.base = memory.end = address
    return memory


def adopt(machine: Machine, addresses: np.ndarray) -> None:
    """Register the storages that these addresses point into. Numbers that point nowhere are left alone."""
    machine.loaded_pointers = True
    wanted = [address for address in np.unique(addresses).tolist() if address and not _holder(machine, address)]
    if not wanted:
        return
    alive = _alive()
    for address in wanted:
        found = next((tensor for low, high, tensor in alive if low <= address < high), None)
        if found is not None and not _holder(machine, address):
            register(machine, found.about, found)


def _holder(machine: Machine, address: int) -> Memory | None:
    return next((memory for memory in machine.storages if memory.base <= address < memory.end), None)


def _alive() -> list[tuple[int, int, Given]]:
    """(first address, end, tensor) of each CPU storage of a tensor or Array that is alive."""
    found: dict[int, tuple[int, int, Given]] = {}
    for one in gc.get_objects():
        if type(one) is not Array and not _has_memory(one):
            continue
        try:
            tensor = given("", one)
            low = tensor.raw.__array_interface__["data"][0]
        except RuntimeError:  # a tensor without memory, such as one of a traced graph
            continue
        if len(tensor.raw) and (low not in found or len(tensor.raw) == tensor.size * tensor.itemsize):
            found[low] = low, low + len(tensor.raw), tensor
    return list(found.values())


def _has_memory(one: Any) -> bool:
    """Whether an object is a torch tensor with CPU memory. `isinstance` would run code of proxy objects."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not issubclass(type(one), torch.Tensor) or type(one).__module__.startswith("torch._subclasses"):
        return False
    return one.layout is torch.strided and one.untyped_storage().device.type == "cpu"
