"""The storages of torch tensors that a launch may access, found by argument or by an address that the kernel loads.

A kernel may be given addresses as numbers: a tensor of `data_ptr()`s (grouped GEMM), or an integer argument. Where such
a number becomes a pointer, the tensor that it points into is looked for among all that are alive.
"""

from __future__ import annotations

import gc

import numpy as np
import torch

from .machine import Machine
from .memory import Memory


def register(machine: Machine, name: str, tensor: torch.Tensor) -> Memory:
    """The memory of a tensor's storage. All tensors of one storage share it."""
    if tensor.untyped_storage().device.type != "cpu":
        raise TypeError(
            f"{name}: got a tensor on {tensor.device}, expected one on the CPU: the simulator reads its memory directly"
        )
    storage = tensor.untyped_storage()
    raw = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    for memory in machine.storages:
        if memory.base == storage.data_ptr() and len(memory.raw) == len(raw):
            memory.granule = min(memory.granule, tensor.element_size())
            return memory
    memory = Memory(name, "global", raw, tensor.element_size(), initialised=True)
    machine.storages.append(memory)
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
            dtype = str(found.dtype).removeprefix("torch.")
            register(machine, f"{dtype}{list(found.shape)}", found)


def _holder(machine: Machine, address: int) -> Memory | None:
    return next((memory for memory in machine.storages if memory.base <= address < memory.end), None)


def _alive() -> list[tuple[int, int, torch.Tensor]]:
    """(first address, end, tensor) of each CPU storage of a tensor that is alive."""
    found: dict[int, tuple[int, int, torch.Tensor]] = {}
    for one in gc.get_objects():
        if not issubclass(type(one), torch.Tensor) or type(one).__module__.startswith("torch._subclasses"):
            continue
        if one.layout is torch.strided and one.untyped_storage().device.type == "cpu":
            storage = one.untyped_storage()
            try:
                low = storage.data_ptr()
            except RuntimeError:  # a tensor without memory, such as one of a traced graph
                continue
            if low and (low not in found or storage.nbytes() == one.numel() * one.element_size()):
                found[low] = low, low + storage.nbytes(), one
    return list(found.values())
