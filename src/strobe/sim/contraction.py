"""Fused multiply-add: what the compiler makes of a product that a sum follows.

By default Triton lets LLVM and ptxas contract `a * b + c` to one instruction that rounds once (`enable_fp_fusion`).
Where the sum cancels, the result is the product's rounding error instead of zero: `x * LOG2E - maximum` is not zero
where `maximum` is `x * LOG2E` itself. The simulator computes what the source says. Here it computes the contracted
result beside it, to report a difference (`Checks(contraction=True)`) or to go on with it (`simulate(fuse=True)`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .machine import Machine
from .report import Place, place_text
from .values import Value

_FUSED = ("fp16", "fp32", "fp64")
ABSOLUTE, RELATIVE = 1e-3, 1e-3  # differences above both are reported; rounding alone stays far below


class Product:
    """The factors of a value that is a product, for as long as nothing but a change of shape follows."""

    __slots__ = ("place", "x", "y")

    def __init__(self, x: Any, y: Any, place: Place):
        self.x, self.y, self.place = x, y, place

    def reshaped(self, change: Callable[[Any], Any]) -> Product:
        return Product(change(self.x), change(self.y), self.place)


class Contraction:
    """Mixin of the builder: products remember their factors where contraction is looked for."""

    machine: Machine
    create_fma: Callable[[Value, Value, Value], Value]

    @property
    def contracts(self) -> bool:
        return self.machine.fuse or self.machine.checks.contraction

    def remember(self, a: Value, b: Value, product: Value) -> None:
        if product.elem in _FUSED:
            shape = np.shape(product._data)
            x, y = (np.broadcast_to(one.data, shape) for one in (a, b))
            product.product = Product(x, y, self.machine.place())

    def fused(self, a: Value, b: Value, total: Value, subtracts: bool) -> Value:
        """`a + b`, or `a - b`, with a product among them contracted. `total` is the result of two roundings."""
        if a.product is not None:
            product, x, rest = a.product, a.product.x, -b.data if subtracts else b.data
        elif b.product is not None:
            product, x, rest = b.product, -b.product.x if subtracts else b.product.x, a.data
        else:
            return total
        factor, other, added = (Value(one, total.elem) for one in (x, product.y, rest))
        once = self.create_fma(factor, other, added)
        once.layout = total.layout
        if self.machine.checks.contraction:
            self._compare(total.data, once.data, product.place)
        return once if self.machine.fuse else total

    def _compare(self, twice: Any, once: Any, place: Place) -> None:
        one, two = (np.asarray(data, np.float64) for data in (once, twice))
        with np.errstate(all="ignore"):
            gap = np.abs(one - two)
            changed = (gap > ABSOLUTE) & (gap > RELATIVE * np.maximum(np.abs(one), np.abs(two)))
        changed |= np.isfinite(one) != np.isfinite(two)
        if not changed.any():
            return
        worst = np.unravel_index(np.argmax(np.where(np.isfinite(gap), gap, np.inf) * changed), changed.shape)
        here = self.machine.place()
        self.machine.report(
            "contraction",
            f"a product and the sum that follows it give {two[worst]:.6g} with two roundings and {one[worst]:.6g} as "
            f"one fused multiply-add, which the compiler may choose; in {int(changed.sum())} of {changed.size} "
            f"elements, at {place_text(here)}; the product is at {place_text(place)}",
            here,
            (here, place),
        )
