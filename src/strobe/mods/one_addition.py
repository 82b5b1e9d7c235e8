"""Whether each element of a captured tensor's gradient gets one addition at most. Then atomics always give the same
bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .program import Program


def has_one_addition(gradient: str, shapes: Sequence[Sequence[int]], sizes: Mapping[str, int]) -> bool:
    """Whether no two scores of a call add to one element. sizes: how many batch entries b, heads h, queries q and keys
    k a call has.

    Each position that takes several values must be an index by itself, into a dimension that is not smaller: a smaller
    one has its last element for all that are beyond.

    >>> from .score import bias
    >>> import torch
    >>> text = bias(torch.zeros(4, 8, 8, requires_grad=True)).bind(True).gradient
    >>> sizes = {"b": 1, "h": 4, "q": 8, "k": 8}
    >>> [has_one_addition(text, [(4, 8, 8)], sizes | change) for change in ({}, {"b": 2}, {"q": 9})]
    [True, False, False]
    """
    program = Program.parse(gradient)
    places = iter(program.outputs[1:])
    targets = [scatter.tensor for scatter in program.scatters]
    for scatter in program.scatters:
        next(places)  # the value
        indices = [program.nodes[next(places)] for _ in range(scatter.ndim)]
        covered = {
            node.value
            for node, size in zip(indices, shapes[scatter.tensor])
            if node.op == "input" and size >= sizes.get(str(node.value), size + 1)
        }
        if any(size > 1 and name not in covered for name, size in sizes.items()):
            return False
    return len(set(targets)) == len(targets)
