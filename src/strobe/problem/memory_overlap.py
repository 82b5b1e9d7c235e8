"""Exact overlap checks of tensors. Interleaved views of one buffer share an address range but no byte."""

from __future__ import annotations

from torch import Tensor

MOST_STEPS = 10_000  # bounds the search, which takes few steps for nested views; beyond it, memory counts as shared

Span = tuple[int, int, int]  # (stride in bytes, least factor, largest factor)


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether a byte belongs to an element of both tensors.

    >>> import torch
    >>> q, k = torch.zeros(2, 9, 2, 4).unbind(2)  # interleaved
    >>> share_memory(q, k), share_memory(q[:, 1:], q[:, :-1]), share_memory(q[:, ::2], q[:, 1::2])
    (False, True, False)
    """
    if a.device != b.device or not a.numel() or not b.numel():
        return False
    begin, first = a.data_ptr(), b.data_ptr()
    if begin + _extent(a) <= first or first + _extent(b) <= begin:
        return False
    steps: dict[int, list[int]] = {}
    for tensor, sign in ((a, 1), (b, -1)):
        for step, size in (*zip(_bytes(tensor), tensor.shape), (1, tensor.element_size())):
            if step and size > 1:
                span = steps.setdefault(step, [0, 0])
                span[sign > 0] += sign * (size - 1)
    spans = [(step, least, most) for step, (least, most) in sorted(steps.items(), reverse=True)]
    return _reaches(spans, first - begin, [MOST_STEPS])


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements of a tensor share a byte.

    >>> import torch
    >>> overlaps_itself(torch.zeros(3, 4).T), overlaps_itself(torch.zeros(9).as_strided((3, 4), (2, 1)))
    (False, True)
    """
    if not tensor.numel():
        return False
    dims = sorted(((step, size) for step, size in zip(_bytes(tensor), tensor.shape) if size > 1), reverse=True)
    if any(step == 0 for step, _ in dims):
        return True
    budget = [MOST_STEPS]
    for n, (step, size) in enumerate(dims):
        inner = [(s, 1 - count, count - 1) for s, count in (*dims[n + 1 :], (1, tensor.element_size()))]
        most = sum(s * high for s, _, high in inner)
        if any(_reaches(inner, step * times, budget) for times in range(1, min(size - 1, most // step) + 1)):
            return True
    return False


def _extent(tensor: Tensor) -> int:
    return (sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) + 1) * tensor.element_size()


def _bytes(tensor: Tensor) -> list[int]:
    return [stride * tensor.element_size() for stride in tensor.stride()]


def _reaches(spans: list[Span], target: int, budget: list[int]) -> bool:
    """Whether target is a sum of stride * factor with each factor within its span. Spans are sorted by stride, largest
    first.

    Returns True if the budget of search steps runs out.
    """
    if not spans:
        return target == 0
    budget[0] -= 1
    if budget[0] < 0:
        return True
    (step, least, most), rest = spans[0], spans[1:]
    low, high = (sum(s * bound[i] for s, *bound in rest) for i in (0, 1))  # bounds of the sum over `rest`
    first, last = max(least, -((high - target) // step)), min(most, (target - low) // step)
    return any(_reaches(rest, target - step * times, budget) for times in range(first, last + 1))
