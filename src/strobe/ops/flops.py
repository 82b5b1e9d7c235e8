"""FLOP formulas of the ops, for torch.utils.flop_counter.

They are told to a counter when a call first meets one: importing torch.utils.flop_counter imports Triton (300 ms, and
`import strobe` needs no Triton), and a counter copies the registry when it is made, so both it and the registry are told.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..problem.call import Call

_COUNTER = "torch.utils.flop_counter"


def meet_counters() -> None:
    """`tell_counters` where there may be one."""
    if not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack():
        tell_counters()


def tell_counters() -> None:
    """Register the formulas with torch and with each FLOP counter that is counting now."""
    if _COUNTER not in sys.modules:
        return
    known = sys.modules[_COUNTER]
    formulas = {torch.ops.strobe.forward: forward_flops, torch.ops.strobe.backward: backward_flops}
    for op, formula in formulas.items():
        if op not in known.flop_registry:
            known.register_flop_formula(op)(formula)
    for mode in _get_current_dispatch_mode_stack():
        counter: Any = getattr(mode, "counter", None)
        if isinstance(counter, known.FlopCounterMode):
            for op in formulas:
                counter.flop_registry.setdefault(op, known.flop_registry[op])  # the user's own formula stands


def forward_flops(q_shape, k_shape, v_shape, *flat, out_shape=None, **_) -> int:
    """Two products over all query-key pairs.

    >>> forward_flops((1, 8, 2, 4), (1, 8, 2, 4), (1, 8, 2, 4)) == 2 * (2 * 8 * 8) * (4 + 4)
    True
    """
    return 2 * _pairs(q_shape, k_shape, flat) * (q_shape[-1] + v_shape[-1])


def backward_flops(dout_shape, o_shape, lse_shape, dlse_shape, q_shape, k_shape, v_shape, *flat, **_) -> int:
    """Five products over all query-key pairs."""
    return 2 * _pairs(q_shape, k_shape, flat) * (3 * q_shape[-1] + 2 * v_shape[-1])


def _pairs(q_shape, k_shape, flat: tuple) -> int:
    """Query-key pairs with no mask, as torch counts its own attention; packed: as if all sequences were of one length."""
    if len(q_shape) == 4:
        return q_shape[0] * q_shape[2] * q_shape[1] * k_shape[1]
    n = max(1, flat[Call._fields.index("cu_seqlens_q") - 3][0] - 1)
    return q_shape[1] * q_shape[0] * k_shape[0] // n
