"""Derive and test the polynomials of `kernels.device.softmax.exp2_by_fma`, which compute 2^x with multiply-adds.

    python -m tools.proof.exponential      coefficients, and errors against float64 over every float32 fraction

2^x = 2^n 2^f, where n is the integer nearest to x and f is in [-1/2, 1/2]. The polynomial for 2^f is 1 at f = 0. So
integers are exact, including the maximum of a row, and a weight of 0 is 0. Of all such polynomials of its degree it has
the least relative error. Lawson's iteration finds it: a weighted least-squares fit whose weights grow where the error
is large (C. L. Lawson, 1961).
"""

from __future__ import annotations

import sys

import numpy as np

DEGREES = (3, 4, 5, 6)
_POINTS, _STEPS = 1001, 1500


def minimax(degree: int) -> tuple[float, ...]:
    """The coefficients (1, c1, ..., c_degree) of the polynomial for 2^f on [-1/2, 1/2] with the least relative error.

    >>> [round(c, 4) for c in minimax(3)]
    [1.0, 0.6933, 0.2422, 0.055]
    """
    f = np.cos(np.linspace(0, np.pi, _POINTS)) / 2  # Chebyshev points: dense at the ends, where the error peaks
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
    """The polynomial at f (float32), by fused multiply-adds: each step is rounded once to float32."""
    c = np.asarray(coefficients, np.float32)
    p = np.full_like(f, c[-1])
    for term in c[-2::-1]:
        p = (p.astype(np.float64) * f + term).astype(np.float32)  # exact product in float64
    return p


def worst(coefficients: tuple[float, ...], step: int = 1) -> float:
    """The largest relative error over every `step`-th float32 from 2^-24 to 1/2, and over their negatives."""
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
