"""A traced function is traced again after a value that it reads has changed, for each place that can hold a value."""

from __future__ import annotations

import types
from array import array
from collections import deque
from typing import ClassVar

import numpy as np
import pytest
import torch

import strobe

Q = torch.randn(1, 5, 2, 8, generator=torch.Generator().manual_seed(0))


class Class:
    weight = 1.0
    table: ClassVar[dict[str, float]] = {"weight": 1.0}

    def __call__(self, score, b, h, q_idx, kv_idx):
        return score + self.table["weight"] * kv_idx

    @staticmethod
    def read():
        return Class.weight


class Slots:
    __slots__ = ("weight",)


class Descended(Class):
    pass


MODULE, HELD, SLOTS, CALLED, OWN = types.ModuleType("settings"), Class(), Slots(), Class(), Class()
LAYER = torch.nn.Linear(1, 1)
SET: set[float] = set()
ARRAY, PYTHON_ARRAY, DEQUE = np.ones(1), array("d", [1.0]), deque([1.0])


def attributed(score, b, h, q_idx, kv_idx):
    return score + attributed.weight * kv_idx  # type: ignore[attr-defined]


def put(value: float) -> None:
    SET.clear()
    SET.add(value)


READERS = {
    "a class": (lambda s, b, h, q, k: s + Class.weight * k, lambda value: setattr(Class, "weight", value)),
    "a base class": (lambda s, b, h, q, k: s + Descended.weight * k, lambda value: setattr(Class, "weight", value)),
    "an instance's class": (lambda s, b, h, q, k: s + HELD.weight * k, lambda value: setattr(Class, "weight", value)),
    "a callable object": (lambda s, b, h, q, k: s + OWN.own * k, lambda value: setattr(OWN, "own", value)),
    "a layer": (lambda s, b, h, q, k: s + LAYER.own * k, lambda value: setattr(LAYER, "own", value)),
    "a static method": (lambda s, b, h, q, k: s + Class.read() * k, lambda value: setattr(Class, "weight", value)),
    "a class of the function": (CALLED, lambda value: Class.table.update(weight=value)),
    "a module": (lambda s, b, h, q, k: s + MODULE.weight * k, lambda value: setattr(MODULE, "weight", value)),
    "slots": (lambda s, b, h, q, k: s + SLOTS.weight * k, lambda value: setattr(SLOTS, "weight", value)),
    "a set": (lambda s, b, h, q, k: s + sum(SET) * k, put),
    "a deque": (lambda s, b, h, q, k: s + DEQUE[0] * k, lambda value: DEQUE.__setitem__(0, value)),
    "a numpy array": (lambda s, b, h, q, k: s + float(ARRAY[0]) * k, lambda value: ARRAY.fill(value)),
    "an array": (lambda s, b, h, q, k: s + PYTHON_ARRAY[0] * k, lambda value: PYTHON_ARRAY.__setitem__(0, value)),
    "the function": (attributed, lambda value: setattr(attributed, "weight", value)),
}


def attend(weight: float) -> torch.Tensor:
    score = torch.einsum("bihd,bjhd->bhij", Q, Q) * 8**-0.5 + weight * torch.arange(5.0)
    return torch.einsum("bhij,bjhd->bihd", score.softmax(-1), Q)


@pytest.mark.parametrize("where", READERS)
def test_a_value_that_changes_is_read_anew(where):
    function, write = READERS[where]
    for weight in (1.0, 2.0, 3.5, 2.0):
        write(weight)
        torch.testing.assert_close(strobe.attention(Q, Q, Q, score_mod=function), attend(weight))


def test_an_iterator_is_read_at_each_call():
    weights = iter((1.0, 2.0))
    for weight in (1.0, 2.0):
        torch.testing.assert_close(
            strobe.attention(Q, Q, Q, score_mod=lambda s, b, h, q, k: s + next(weights) * k), attend(weight)
        )


def test_attributes_that_a_function_does_not_name_make_no_other_trace():
    from strobe.mods.captures import captured

    before = captured(READERS["a module"][0]).key
    MODULE.other = "anything"  # type: ignore[attr-defined]
    assert captured(READERS["a module"][0]).key == before
