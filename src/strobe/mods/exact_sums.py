"""Sums of float32 numbers that do not depend on the order of the additions, for gradients with `deterministic=True`.

A sum has SLOTS integers of 64 bits. Slot i < 9 counts units of 2^(31 i - 149), so that together they hold every
multiple of the smallest float32 number up to the largest. A number has 24 bits, which lie in one slot or in two
adjacent ones. Each addition changes a slot by less than 2^31, so 2^32 additions do not overflow it. Integer additions
commute: atomics give the same bits in any order. The last two slots count +inf and -inf; NaN counts as both.

The sum itself is exact. `total` rounds it: by at most 2^-24 of the result, and 2^-49 of the sum of absolute values
(the error of adding the slots in float64). `kernels.device.exact_sums` adds to such sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..problem import torch_private

SMALLEST = -149  # the exponent of the smallest float32 number
BITS = 31  # of a slot's unit to the next one's
FINITE = 9  # slots of finite numbers
SLOTS = FINITE + 2
HALVES = (*[2.0 ** (BITS * slot + SMALLEST - 1) for slot in range(FINITE)], 2.0**1023, -(2.0**1023))
MOST_AT_ONCE = 1 << 20  # integers whose products with HALVES are in memory at a time


def zeros(tensor: Tensor) -> Tensor:
    """Sums for the elements of a tensor: int64 [*shape, SLOTS]. Each slot's integers are contiguous, so that elements
    with equal exponents lie side by side.
    """
    return torch.zeros((SLOTS, *tensor.shape), dtype=torch.int64, device=tensor.device).movedim(0, -1)


def total(sums: Tensor) -> Tensor:
    """The sums as float32.

    >>> sums = zeros(torch.empty(2))
    >>> sums[0, 4:6] = torch.tensor([3 * 2**25, -1])  # 3 - 2^6
    >>> sums[1, 9] = 1
    >>> total(sums).tolist()
    [-61.0, inf]
    """
    halves = _halves(sums.device) if sums.numel() <= MOST_AT_ONCE else None
    if halves is not None:  # twice a half is infinite where infinities are counted
        return (sums * halves).mul_(2).sum(-1).float()
    found = torch.zeros(sums.shape[:-1], dtype=torch.float64, device=sums.device)
    for slot, half in enumerate(HALVES):
        found += (sums[..., slot].double() * half).mul_(2)
    return found.float()


def _halves(device: torch.device) -> Tensor | None:
    """HALVES on a device, kept. None while a CUDA graph is captured, if they are not there yet."""
    if device not in _ON:
        if device.type == "cuda" and torch_private.cuda_is_capturing():
            return None
        with torch.inference_mode(False):
            _ON[device] = torch.tensor(HALVES, dtype=torch.float64, device=device)
    return _ON[device]


_ON: dict[torch.device, Tensor] = {}
