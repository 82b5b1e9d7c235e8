"""Which views share memory: against the sets of places that they are."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strobe.problem.memory_overlap import overlaps_itself, share_memory

ROOM = 400
DIMS = st.lists(
    st.tuples(st.integers(1, 4), st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12, 13, 26])), min_size=1, max_size=4
)
VIEWS = st.tuples(DIMS, st.integers(0, 40))


def _view(of: torch.Tensor, drawn: tuple) -> torch.Tensor:
    dims, offset = drawn
    return of.as_strided([size for size, _ in dims], [stride for _, stride in dims], offset)


def _places(view: torch.Tensor) -> list[int]:
    indices = itertools.product(*map(range, view.shape))
    return [view.storage_offset() + sum(i * stride for i, stride in zip(index, view.stride())) for index in indices]


@settings(max_examples=600, deadline=None)
@given(VIEWS, VIEWS, st.booleans())
def test_views_share_memory_where_their_places_do(one, other, halved):
    buffer = torch.zeros(ROOM)
    a, b = _view(buffer, one), _view(buffer, other)
    if halved:  # elements of another size, two in the place of one
        b = _view(buffer.view(torch.float16), ([(size, 2 * stride) for size, stride in other[0]], 2 * other[1]))
    shared = bool(set(_places(a)) & {place // (1 + halved) for place in _places(b)})
    assert share_memory(a, b) == share_memory(b, a) == shared
    assert overlaps_itself(a) == (len(set(_places(a))) < a.numel())


def test_what_has_no_elements_or_other_memory_shares_none():
    a = torch.zeros(3, 4)
    assert not share_memory(a, torch.zeros(3, 4)) and not share_memory(a[:0], a) and not overlaps_itself(a[:0])
    assert not share_memory(a, a.to("meta"))
