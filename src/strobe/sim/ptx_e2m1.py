"""Conversions of `cvt` between pairs of 4-bit numbers (e2m1x2) and wider types."""

import numpy as np

from .formats import e2m1_bits, e2m1_pair
from .ptx_arithmetic import KINDS, fit, join


def build(block, code):
    """(function, targets, sources) of a conversion between a byte and two f32 or an f16x2. The last operand is the low
    half of the byte.
    """
    if code.parts[-1] == "e2m1x2":
        code.mods("rn", "f16x2", "e2m1x2", "relu")
        target, source = code.need(2)
        halves = lambda bits: [join([half.astype(np.float16).view(np.uint16) for half in e2m1_pair(bits)])]
        return halves, (block.target(target, KINDS["f16x2"]),), (block.source(source, KINDS["b8"], wider=True),)
    code.mods("rn", "satfinite", "e2m1x2", "f32", "relu")
    target, high, low = code.need(3)
    read = tuple(block.source(name, KINDS["f32"]) for name in (high, low))
    write = block.target(target, KINDS["b8"], wider=True)
    width, relu = block.widths[write], "relu" in code.parts

    def function(high, low):
        values = [bits.view(np.float32) for bits in (high, low)]
        codes = [e2m1_bits(np.where(value < 0, 0, value) if relu else value) for value in values]
        return [fit(codes[0] << 4 | codes[1], width)]

    return function, (write,), read
