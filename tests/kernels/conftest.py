"""Fixtures of simulated kernels."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture
def wide_sums(monkeypatch):
    """Add in float64, so that a sum has the same bits for every array size. NumPy's order of adds depends on the size;
    that of a GPU's products and reductions does not.
    """

    pytest.importorskip("triton")
    from strobe.sim import semantics, tensor_core

    def product(a, b, elem, precise=False):
        if elem == "fp32" and not precise:  # TF32, as the original
            a, b = ((x.astype(np.float32).view(np.int32) & -0x2000).view(np.float32) for x in (a, b))
        return np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(np.float32)

    def total(x, axis=None, **options):
        return np.add.reduce(x, axis=axis, dtype=np.float64 if x.dtype == np.float32 else None, **options).astype(
            x.dtype
        )

    monkeypatch.setattr(tensor_core, "product", product)
    monkeypatch.setitem(semantics._STANDARD, "_sum_combine", total)
