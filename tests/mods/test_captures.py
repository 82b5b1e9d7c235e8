"""A traced function is traced again after a value that it reads has changed, for each place that can hold a value."""

from __future__ import annotations

import functools
import gc
import types
from array import array
from collections import deque, namedtuple
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


# ---------------------------------------------------------------- what methods read

WEIGHT = 1.0
BIAS = torch.zeros(5)


class Base:
    shared = 1.0

    def weight(self):
        return WEIGHT

    def overridden(self):
        return WEIGHT


class Helper(Base):
    table: torch.Tensor

    @property
    def seen(self):
        return self.weight()

    @functools.cached_property
    def kept(self):
        return WEIGHT

    @classmethod
    def of_class(cls):
        return cls.shared

    @staticmethod
    def of_none():
        return WEIGHT

    def overridden(self):
        return super().overridden()

    def __getitem__(self, key):
        return WEIGHT * key

    def __call__(self, score, b, h, q_idx, kv_idx):
        return score + self.weight() * kv_idx

    def score(self, score, b, h, q_idx, kv_idx):
        return score + self.seen * kv_idx

    def biased(self, score, b, h, q_idx, kv_idx):
        return score + BIAS[kv_idx]


class Shadowed(Helper):
    def __init__(self):
        self.shared = 0.0


class Slotted:
    __slots__ = ("__own",)

    def __init__(self):
        self.write(1.0)

    def write(self, value):
        self.__own = value

    def score(self, score, b, h, q_idx, kv_idx):
        return score + self.__own * kv_idx


class Layer(torch.nn.Module):
    def __init__(self, inner=None):
        super().__init__()
        self.inner = inner

    def forward(self, score, b, h, q_idx, kv_idx):
        return score + WEIGHT * kv_idx if self.inner is None else self.inner(score, b, h, q_idx, kv_idx)


def _weighted(helper, score, b, h, q_idx, kv_idx):
    return helper.score(score, b, h, q_idx, kv_idx)


def _of_class(helper):
    return helper.of_class()


def _hooked(place):
    layer = Layer()
    if place == "before":
        layer.register_forward_pre_hook(lambda layer, given: (given[0] + WEIGHT * given[4], *given[1:]))
    else:
        layer.register_forward_hook(lambda layer, given, found: found + WEIGHT * given[4])
    return lambda s, b, h, q, k: layer(s, b, h, q, k) - WEIGHT * k


def put_weight(value: float) -> None:
    globals()["WEIGHT"] = value


def patch(value: float) -> None:
    Patched.weight = lambda self: value  # type: ignore[method-assign]


class Patched(Helper):
    pass


HELPER, HELPERS, SHADOWED, SLOTTED = Helper(), {"one": [Helper()]}, Shadowed(), Slotted()
SHARED = [1.0]
METHODS = {
    "a callable object": (Helper(), put_weight),
    "a callable object in a function": (lambda s, b, h, q, k: HELPER(s, b, h, q, k), put_weight),
    "a bound method": (HELPER.score, put_weight),
    "a method": (lambda s, b, h, q, k: s + HELPER.weight() * k, put_weight),
    "a property": (lambda s, b, h, q, k: s + HELPER.seen * k, put_weight),
    "a cached property": (lambda s, b, h, q, k: s + Helper().kept * k, put_weight),
    "an operator": (lambda s, b, h, q, k: s + HELPER[1] * k, put_weight),
    "a class method": (lambda s, b, h, q, k: s + HELPER.of_class() * k, lambda value: setattr(Helper, "shared", value)),
    "a class method of a class": (
        lambda s, b, h, q, k: s + Helper.of_class() * k,
        lambda value: setattr(Base, "shared", value) or setattr(Helper, "shared", value),
    ),
    "an attribute that an object hides": (
        lambda s, b, h, q, k: s + SHADOWED.of_class() * k,
        lambda value: setattr(Helper, "shared", value),
    ),
    "a class method by a function": (
        lambda s, b, h, q, k: s + _of_class(HELPER) * k,
        lambda value: setattr(Helper, "shared", value),
    ),
    "a static method": (lambda s, b, h, q, k: s + HELPER.of_none() * k, put_weight),
    "a method that calls super": (lambda s, b, h, q, k: s + HELPER.overridden() * k, put_weight),
    "an object in containers": (lambda s, b, h, q, k: s + HELPERS["one"][0].weight() * k, put_weight),
    "an argument of a partial": (functools.partial(_weighted, HELPER), put_weight),
    "a method that is replaced": (Patched(), patch),
    "a private slot": (SLOTTED.score, SLOTTED.write),
    "a layer": (Layer(), put_weight),
    "a layer in a layer": (Layer(Layer()), put_weight),
    "a hook of a layer": (_hooked("after"), put_weight),
    "a hook before a layer": (_hooked("before"), put_weight),
    "a list that two functions read": (
        lambda s, b, h, q, k, inner=(lambda k: SHARED[0] * k): s + (inner(k) + SHARED[0] * k) / 2,
        lambda value: SHARED.__setitem__(0, value),
    ),
}


READERS |= {f"{where}'s method": reader for where, reader in METHODS.items()}


@pytest.mark.parametrize("where", READERS)
def test_a_value_that_changes_is_read_anew(where):
    function, write = READERS[where]
    for weight in (1.0, 2.0, 3.5, 2.0):
        write(weight)
        torch.testing.assert_close(strobe.attention(Q, Q, Q, score_mod=function), attend(weight))


def test_objects_of_one_class_have_no_trace_in_common_after_a_global_changed():
    for weight in (1.0, 2.0, 3.5):
        put_weight(weight)
        for made in (Layer(), Helper()):
            torch.testing.assert_close(strobe.attention(Q, Q, Q, score_mod=made), attend(weight))


def test_a_global_tensor_that_a_method_reads_gets_its_gradient(monkeypatch):
    bias = torch.arange(5.0).requires_grad_()
    monkeypatch.setitem(globals(), "BIAS", bias)
    for function in (HELPER.biased, lambda s, b, h, q, k: HELPERS["one"][0].biased(s, b, h, q, k)):
        found = strobe.attention(Q, Q, Q, score_mod=function)
        torch.testing.assert_close(found, attend(1.0))
        (gradient,) = torch.autograd.grad(found.square().sum(), bias)
        (exact,) = torch.autograd.grad(
            strobe.attention(Q, Q, Q, score_mod=lambda s, *at: s + bias[at[3]]).square().sum(), bias
        )
        torch.testing.assert_close(gradient, exact)


class Derived:
    made: ClassVar[list[type]] = []
    bias = torch.zeros(5)

    def __init_subclass__(cls) -> None:
        Derived.made.append(cls)

    def score(self, score, b, h, q_idx, kv_idx):
        return score + self.bias[kv_idx]


def test_a_copy_of_an_object_has_no_effects():
    with pytest.raises(strobe.UnsupportedProblem, match=r"Derived, a class that acts .* closure"):
        strobe.attention(Q, Q, Q, score_mod=Derived().score)
    assert not Derived.made
    freed = []

    class Freed(Helper):
        def __del__(self):
            freed.append(1)

    one = Freed()
    one.table = torch.zeros(5)
    score = lambda s, b, h, q, k: s + one.table[k] if isinstance(one, Freed) else s * 2
    torch.testing.assert_close(strobe.attention(Q, Q, Q, score_mod=score), attend(0.0))
    gc.collect()
    assert not freed


def test_a_layer_whose_call_does_more_is_refused():
    layer = Layer()
    handle = layer.register_full_backward_hook(lambda *_: None)
    with pytest.raises(strobe.UnsupportedProblem, match="Layer, a layer with hooks of its backward"):
        strobe.attention(Q, Q, Q, score_mod=layer)
    torch.testing.assert_close(strobe.attention(Q, Q, Q, score_mod=lambda s, *_: s * layer.training), attend(0.0))
    handle.remove()
    inner = torch.nn.Linear(1, 1)
    torch.nn.utils.parametrize.register_parametrization(inner, "weight", torch.nn.Identity())
    with pytest.raises(strobe.UnsupportedProblem, match="a layer with parametrizations"):
        strobe.attention(Q, Q, Q, score_mod=Layer(inner))


Sizes = namedtuple("Sizes", ("rows", "keys"))


def _second(sizes):
    return lambda s, b, h, q, k: s + sizes[1] * k


def _count(size):
    return lambda s, b, h, q, k: s + size.numel() * k


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (lambda n: torch.Size([3, n]), _second),
        (lambda n: torch.Size([n, 1]), _count),
        (lambda n: Sizes(3, n), _second),
        (lambda n: {1: n, "1": 9 - n, 0: 3}, _second),
        (lambda n: (3, n), _second),
    ],
    ids=["torch.Size", "numel", "named tuple", "dict", "tuple"],
)
def test_numbers_in_containers_may_change(make, read):
    for n in (2, 3, 5):
        torch.testing.assert_close(strobe.attention(Q, Q, Q, score_mod=read(make(n))), attend(float(n)))
