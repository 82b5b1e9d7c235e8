"""FLOP formulas of the ops, for torch.utils.flop_counter.

They are registered when a call first runs under a FLOP counter, because importing torch.utils.flop_counter imports
Triton. That import takes 300 ms, and `import strobe` must not need Triton. A counter copies the registry when it is
created, so the formulas go to the registry and to each active counter.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from ..problem.call import Call
from ..problem.torch_private import flop_counters, len_torch_dispatch_stack
from .cached_functions import COUNT

_COUNTER = "torch.utils.flop_counter"


def meet_counters() -> None:
    """Call `tell_counters` if a dispatch mode, and so possibly a FLOP counter, is active."""
    if not torch.compiler.is_compiling() and len_torch_dispatch_stack():
        tell_counters()


def tell_counters() -> None:
    """Register the formulas with torch and with each active FLOP counter."""
    if _COUNTER not in sys.modules:
        return
    known: Any = sys.modules[_COUNTER]
    own = torch.ops.strobe
    formulas = {own.forward: forward_flops, own.forward_out: forward_out_flops, own.backward: backward_flops}
    formulas |= {own.mod_forward: mod_flops, own.mod_forward_out: mod_out_flops, own.mod_backward: mod_backward_flops}
    missing = [op for op in formulas if op not in known.flop_registry]
    for op in missing:
        known.register_flop_formula(op)(formulas[op])
    for counter in flop_counters(known.FlopCounterMode, known=not missing):
        for op in formulas:
            counter.flop_registry.setdefault(op, known.flop_registry[op])  # keeps a formula of the user


def forward_flops(q_shape, k_shape, v_shape, *flat, out_shape=None, **_) -> int:
    """FLOPs of a forward: two products over all query-key pairs.

    >>> forward_flops((1, 8, 2, 4), (1, 8, 2, 4), (1, 8, 2, 4)) == 2 * (2 * 8 * 8) * (4 + 4)
    True
    """
    return 2 * _pairs(q_shape, k_shape, flat) * (q_shape[-1] + v_shape[-1])


def forward_out_flops(out_shape_given, q_shape, k_shape, v_shape, *flat, **_) -> int:
    """FLOPs of a forward into a tensor, as a piece of a context-parallel call has."""
    return forward_flops(q_shape, k_shape, v_shape, *flat)


def backward_flops(dout_shape, o_shape, lse_shape, dlse_shape, q_shape, k_shape, v_shape, *flat, **_) -> int:
    """FLOPs of a backward: five products over all query-key pairs."""
    return 2 * _pairs(q_shape, k_shape, flat) * (3 * q_shape[-1] + 2 * v_shape[-1])


def mod_flops(*flat, **_) -> int:
    """FLOPs of a forward with a function: those of its products."""
    return forward_flops(*flat[COUNT:])


def mod_out_flops(out_shape_given, *flat, **_) -> int:
    return forward_flops(*flat[COUNT:])


def mod_backward_flops(dout_shape, o_shape, lse_shape, dlse_shape, *flat, **_) -> int:
    return backward_flops(dout_shape, o_shape, lse_shape, dlse_shape, *flat[COUNT:])


def _pairs(q_shape, k_shape, flat: tuple) -> int:
    """Query-key pairs without a mask, as torch counts its own attention. Packed sequences count as equally long."""
    if len(q_shape) == 4:
        return q_shape[0] * q_shape[2] * q_shape[1] * k_shape[1]
    n = max(1, flat[Call._fields.index("cu_seqlens_q") - 3][0] - 1)
    return q_shape[1] * q_shape[0] * k_shape[0] // n
