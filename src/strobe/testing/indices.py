"""Which captured tensors a function of scores or a mask indexes outside of their sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import wrong_type
from ..mods.evaluate import evaluate
from ..mods.mask import MaskMod
from ..mods.program import Program
from ..mods.score import ScoreMod, as_score_mod
from ..problem.mask import Mask


class OutOfRange(NamedTuple):
    """One dimension of one captured tensor, and the first place at which its index is outside."""

    shape: tuple[int, ...]  # of the tensor
    dim: int
    index: int
    at: tuple[int, int, int, int]  # b, h, q_idx, kv_idx

    def __str__(self) -> str:
        places = ", ".join(f"{name}={value}" for name, value in zip(("b", "h", "q_idx", "kv_idx"), self.at))
        return f"index {self.index} of dimension {self.dim} of a captured tensor {list(self.shape)}, at {places}"


def out_of_range(
    function: ScoreMod | MaskMod | Callable, sizes: tuple[int, int, int, int], mask: Mask | None = None
) -> list[OutOfRange]:
    """The captured tensors that a function indexes outside of their sizes. Kernels clamp such an index and say nothing.

    >>> table = torch.zeros(4)
    >>> found = out_of_range(lambda score, b, h, q_idx, kv_idx: score + table[q_idx], (1, 1, 6, 6))
    >>> print(found[0])
    index 4 of dimension 0 of a captured tensor [4], at b=0, h=0, q_idx=4, kv_idx=0

    function: a score_mod or a `strobe.mask_mod`. sizes: (B, H_q, S_q, S_k). mask: elements that it hides do not count;
    of a mask function, elements that its built-in part hides. An index from -size to size - 1 is inside, as in
    Python. Memory is O(H_q * S_q * S_k) for each entry of the batch, so check with small sizes.
    """
    if isinstance(function, MaskMod):
        program, tensors, numbers = function.bind()
        mask = Mask(function.left, function.right, function.prefix, function.key_lengths, function.documents)
    elif isinstance(function, Mask):
        raise wrong_type("function", function, "a score_mod or strobe.mask_mod", "built-in masks index nothing")
    else:
        bound = as_score_mod(function).bind(False)
        program, tensors, numbers = Program.parse(bound.text), bound.tensors, bound.numbers
    tensors = tuple(tensor.detach().cpu() for tensor in tensors)
    batch, heads, rows, keys = sizes
    seen = None if mask is None else _seen(mask, sizes)
    found = []
    for b in range(batch):
        inputs = _inputs(b, heads, rows, keys)
        for node in program.nodes:
            if node.op == "load":
                indices = evaluate(program._replace(outputs=node.args), inputs, (tensors, numbers), torch.float64)
                visible = None if seen is None else seen[b % seen.shape[0]]
                found += _outside(tensors[int(node.value or 0)], indices, visible, (b, heads, rows, keys))
    unique = {(one.shape, one.dim): one for one in reversed(found)}
    return list(unique.values())[::-1]


def _inputs(b: int, heads: int, rows: int, keys: int) -> dict[str, Tensor]:
    positions = lambda count: torch.arange(count, dtype=torch.int32)
    scalar = lambda value: torch.tensor(value, dtype=torch.int32)
    return {
        "score": torch.zeros((), dtype=torch.float64),
        "b": scalar(b), "diagonal": scalar(keys - rows),
        "h": positions(heads)[:, None, None], "q": positions(rows)[:, None], "k": positions(keys),
    }  # fmt: skip


def _seen(mask: Mask, sizes: tuple[int, int, int, int]) -> Tensor:
    """bool [B or 1, H or 1, S_q, S_k]"""
    batch, heads, rows, keys = sizes
    if isinstance(mask, MaskMod):
        return mask.dense(rows, keys, batch=batch, heads=heads).cpu()
    return mask.dense(rows, keys)[:, None].cpu()


def _outside(tensor: Tensor, indices: list[Tensor], visible: Tensor | None, sizes: tuple[int, ...]) -> list[OutOfRange]:
    b, *rest = sizes
    found = []
    for dim, (index, size) in enumerate(zip(indices, tensor.shape)):
        whole = index.expand(rest)
        bad = (whole < -size) | (whole >= size)
        bad = bad if visible is None else bad & visible
        if bad.any():
            h, q, k = bad.nonzero()[0].tolist()
            found.append(OutOfRange(tuple(tensor.shape), dim, int(whole[h, q, k]), (b, h, q, k)))
    return found
