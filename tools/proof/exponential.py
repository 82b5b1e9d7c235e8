"""2^x on multiply-add units: the polynomials of `kernels.device.softmax.exp2_by_fma`, derived and swept.

    python -m tools.proof.exponential      coefficients, and errors against float64 over every float32 fraction

2^x = 2^n 2^f, n the whole number next to x, f in [-1/2, 1/2]. The polynomial for 2^f has the value 1 at 0, so that whole numbers, the maximum of a
row among them, are exact and a weight of 0 is 0; of all such polynomials of its degree its relative error is the least, found by Lawson's
iteration: a weighted least-squares fit whose weights grow where the error is large (C. L. Lawson, 1961).
"""

from __future__ import annotations

import sys

import numpy as np

DEGREES = (3, 4, 5, 6)
_POINTS, _STEPS = 1001, 1500


def minimax(degree: int) -> tuple[float, ...]:
    """(1, c1, ..., c_degree) of the best polynomial for 2^f on [-1/2, 1/2] in relative error.

    >>> [round(c, 4) for c in minimax(3)]
    [1.0, 0.6933, 0.2422, 0.055]
    """
    f = np.cos(np.linspace(0, np.pi, _POINTS)) / 2  # dense where the error peaks
    powers = np.stack([f**k for k in range(1, degree + 1)], 1) * (2.0**-f)[:, None]
    wanted = 1 - 2.0**-f
    weights, least, best = np.full(_POINTS, 1.0), np.inf, np.zeros(degree)
    for _ in range(_STEPS):
        root = np.sqrt(weights)
        found = np.linalg.lstsq(powers * root[:, None], wanted * root, rcond=None)[0]
        error = np.abs(powers @ found - wanted)
        if error.max() < least:
            least, best = error.max(), found
        weights *= error
        weights /= weights.sum()
    return (1.0, *(float(c) for c in best))


def evaluated(coefficients: tuple[float, ...], f: np.ndarray) -> np.ndarray:
    """The polynomial in float32, as multiply-adds: each step rounded once."""
    c = np.asarray(coefficients, np.float32)
    p = np.full_like(f, c[-1])
    for term in c[-2::-1]:
        p = (p.astype(np.float64) * f + term).astype(np.float32)  # a product of two float32 is exact in float64
    return p


def worst(coefficients: tuple[float, ...], step: int = 1) -> float:
    """The largest relative error over every `step`-th float32 from 2^-24 to 1/2, and their negatives."""
    bits = np.arange(np.float32(2.0**-24).view(np.int32), np.float32(0.5).view(np.int32) + 1, step, dtype=np.int32)
    largest = 0.0
    for part in np.array_split(bits, max(1, len(bits) >> 20)):
        for f in (part.view(np.float32), -part.view(np.float32)):
            exact = 2.0 ** f.astype(np.float64)
            largest = max(largest, float(np.max(np.abs(evaluated(coefficients, f) / exact - 1))))
    return largest


def main() -> int:
    for degree in DEGREES:
        coefficients = minimax(degree)
        print(f"degree {degree}: {coefficients}\n  worst relative error {worst(coefficients):.3g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
