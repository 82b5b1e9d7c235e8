"""PTX run on one value or on many, for the tests of the PTX interpreter."""

import math
from fractions import Fraction

import numpy as np
import torch

from strobe.sim.ptx import run

INF, NAN = np.float32(np.inf), np.float32(np.nan)
LETTERS = {
    np.dtype(t): c
    for t, c in (
        (np.float32, "f"),
        (np.float64, "d"),
        (np.int32, "r"),
        (np.uint32, "r"),
        (np.int64, "l"),
        (np.uint64, "l"),
    )
}
SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 1e-40, -1e-40, 2.0**-126, 3.4e38, -3.4e38, 1.4e-45, 0.5, 2.5, -2.5],
    np.float32,
)


def letter(dtype):
    return LETTERS.get(np.dtype(dtype), "h")


def one(text, *arguments, to=np.float32, machine=None):
    """A block of one output, $0, with register letters from the types"""
    arguments = [np.asarray(argument) for argument in arguments]
    constraints = ",".join(["=" + letter(to), *(letter(argument.dtype) for argument in arguments)])
    return run(text, constraints, arguments, [to], 1, machine)[0]


def bits(x):
    return np.ascontiguousarray(x).view({2: np.uint16, 4: np.uint32, 8: np.uint64}[np.asarray(x).dtype.itemsize])


def floats(seed, count=4096, spread=8):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(count) * 2.0 ** rng.integers(-spread, spread, count)
    return x.astype(np.float32)


def rounded(exact, mode):
    """A fraction as float32, by the mode"""
    if exact == 0:
        return np.float32(0)
    exponent = max(math.floor(math.log2(abs(exact))) - 25, -149 - 2)
    while abs(exact) >= Fraction(2) ** (exponent + 24):
        exponent += 1
    exponent = max(exponent, -149)
    steps = exact / Fraction(2) ** exponent
    whole = {"rn": round, "rz": math.trunc, "rm": math.floor, "rp": math.ceil}[mode](steps)
    return np.float32(math.ldexp(whole, exponent))


# ---------------------------------------------------------------- halves and pairs


def as_half(x, name):
    x = torch.tensor(np.asarray(x, np.float32))
    return x.to(torch.float16 if name == "f16" else torch.bfloat16)


def raw(tensor):
    return tensor.view(torch.int16).numpy().view(np.uint16)


# ---------------------------------------------------------------- integers and bits

WORDS = np.concatenate(
    [
        np.random.default_rng(17).integers(0, 1 << 32, 2000, np.uint32),
        np.array([0, 1, 1 << 31, (1 << 31) - 1, (1 << 32) - 1], np.uint32),
    ]
)
OTHERS = np.roll(WORDS[::-1], 3)
