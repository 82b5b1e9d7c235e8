"""Communication between lanes of a warp in inline PTX: votes and butterfly shuffles.

A register has one entry per group of `pack` elements. 32 consecutive entries are the lanes of a warp, in order, if
`pack` divides the elements of a thread: `layouts.registers` reorders them by the compiler's layout.
"""

import re
from functools import partial

import numpy as np

from .ptx_arithmetic import KINDS, PRED

LANES = 32


def build(block, code):
    """(function, targets, sources) of a vote or a butterfly shuffle."""
    words, numbers = (
        code.opcode.split(".")[1:],
        [int(operand, 0) for operand in code.operands if re.fullmatch(r"-?\d\w*", operand)],
    )
    target, source = code.need(3 if code.root == "vote" else 5)[:2]
    if (
        code.root == "vote"
        and words in (["sync", "any", "pred"], ["sync", "all", "pred"])
        and numbers in ([-1], [0xFFFFFFFF])
    ):
        kind, function = PRED, partial(vote, words[1])
    elif (
        code.root == "shfl"
        and words == ["sync", "bfly", "b32"]
        and numbers[1:] in ([31, -1], [31, 0xFFFFFFFF])
        and 0 < numbers[0] < 32
    ):
        kind, function = KINDS["b32"], partial(butterfly, numbers[0])
    else:
        raise NotImplementedError(
            "expected vote.sync.any.pred, .all.pred, or shfl.sync.bfly.b32 by 1 to 31 within 31, of all lanes: -1"
        )
    read = (block.source(source, kind),)
    return (lambda mask, groups, x: [function(x, mask, groups)]), (block.target(target, kind),), read


def vote(mode, predicate, mask, groups):
    """Whether any (`mode` "any") or all predicates of a warp hold."""
    lanes = _of_warps(predicate, mask, groups)
    return np.repeat((lanes.any(1) if mode == "any" else lanes.all(1)), LANES)


def butterfly(distance, bits, mask, groups):
    """The entry of the lane whose number is XORed with `distance`."""
    return _of_warps(bits, mask, groups)[:, np.arange(LANES) ^ distance].reshape(-1)


def _of_warps(bits, mask, groups):
    """The register as [warps, LANES]. All lanes must be active: exchanging with one that branched away is undefined."""
    if groups % LANES:
        raise ValueError(
            f"looks at the other lanes of a warp, and {groups} groups of elements are not a multiple of {LANES}; "
            "choose another pack"
        )
    if mask is not None:
        warps = np.broadcast_to(mask, groups).reshape(-1, LANES)
        if (warps.any(1) != warps.all(1)).any():
            raise ValueError(
                "looks at lanes of which some have branched away; make the predicate the same in a warp, by a vote"
            )
    return np.broadcast_to(bits, groups).reshape(-1, LANES)
