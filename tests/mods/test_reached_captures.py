"""What a function reads by way of containers, other functions and methods is captured, or the call is refused."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from types import MappingProxyType, ModuleType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import strobe
from strobe.errors import UnsupportedProblem
from strobe.testing.mods import Functions, dense


def _tensors(length: int = 8) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(1, length, 2, 16, generator=generator) for _ in range(3))


def _differs(score: Callable, leaves: list[Tensor]) -> float:
    """The largest error of the output and of the leaves' gradients."""
    q, k, v = _tensors()
    exact = dense(q.double(), k.double(), v.double(), Functions(score))[0]
    out = strobe.attention(q, k, v, score_mod=score)
    errors = [(out - exact).abs().max()]
    if leaves:
        found, expected = (torch.autograd.grad(one.square().sum(), leaves) for one in (out, exact))
        errors += [(one - other).abs().max() for one, other in zip(found, expected, strict=True)]
    return max(one.item() for one in errors)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5))
        self.factor = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(Scale(), Scale())

    def forward(self, score, b, h, i, j):
        return self.net(score)


def _members() -> dict[str, tuple[Callable, list[Tensor]]]:
    scale = lambda: nn.Parameter(torch.tensor(0.5))
    one, other, third = Scale(), Scale(), Scale()
    sequence, modules, named = nn.Sequential(one), nn.ModuleList([other]), nn.ModuleDict({"x": third})
    listed, by_name, rows = nn.ParameterList([scale()]), nn.ParameterDict({"a": scale()}), nn.ParameterList()
    rows.append(nn.Parameter(torch.tensor([0.5, 1.5])))
    holder = Holder()
    return {
        "Sequential": (lambda s, b, h, i, j: sequence(s), [one.weight]),
        "ModuleList": (lambda s, b, h, i, j: modules[0](s), [other.weight]),
        "ModuleDict": (lambda s, b, h, i, j: named["x"](s), [third.weight]),
        "ParameterList": (lambda s, b, h, i, j: s * listed[0], [listed[0]]),
        "ParameterDict": (lambda s, b, h, i, j: s * by_name["a"], [by_name["a"]]),
        "rows": (lambda s, b, h, i, j: s * sum(row[h] for row in rows), [*rows]),
        "layer": (holder, [*holder.parameters()]),
    }


@pytest.mark.parametrize("kind", _members())
def test_members_of_torchs_containers_get_gradients_and_are_read_anew(kind):
    score, leaves = _members()[kind]
    for _ in range(3):
        assert _differs(score, leaves) < 1e-4
        with torch.no_grad():
            for leaf in leaves:
                leaf.add_(0.3)


def test_a_container_that_grows_is_traced_anew():
    net = nn.Sequential(Scale())
    score = lambda s, b, h, i, j: net(s)
    assert max(_differs(score, []) for _ in range(2)) < 1e-5
    net.append(nn.Tanh())
    assert _differs(score, []) < 1e-5


class Config:
    factor = 0.5


class Named(dict):
    factor: float


class Reader:
    factor = 0.5

    def get(self, config):
        return config.factor


class Case(NamedTuple):
    score: Callable
    change: Callable[[float], object]


def _of_config(make: Callable[[Callable], Callable]) -> Case:
    """make: a score from a function that reads a config."""
    return Case(make(lambda config: config.factor), lambda value: setattr(Config, "factor", value))


def _reached() -> dict[str, Case]:
    reader, utils, held, numbers = Reader(), ModuleType("utils_of_a_user"), {"x": 0.5}, [0.5]
    exec("def factor_of(config): return config.factor", vars(utils))
    get, item, layer, table = held.get, numbers.__getitem__, Scale(), torch.full((2,), 0.5)
    total = table.sum

    values, proxy, reference = held.values(), MappingProxyType(held), weakref.ref(reader)
    named = Named({"x": 1.0})
    named.factor = 0.5

    @functools.lru_cache
    def kept():
        return Config.factor

    def change_kept(value):
        Config.factor = value
        kept.cache_clear()

    def read_through(reference):
        found = reference()
        return 0.0 if found is None else found.factor

    def settings(): ...

    settings.factor = 0.5

    def own(s, b, h, i, j):
        return s * own.math  # there is a global of this name

    own.math = 0.5

    def with_default(read):
        def score(s, b, h, i, j, read=read):
            return s * read(Config)

        return score

    def in_a_dictionary(read):
        functions = {"a": read}
        return lambda s, b, h, i, j: s * functions["a"](Config)

    @functools.wraps(math.exp)
    def wrapped(s, b, h, i, j):
        return s * Config.factor

    def of_layer(read):
        functions = {"a": read}
        return lambda s, b, h, i, j: functions["a"](layer) * s

    return {
        "a method reads it": _of_config(lambda read: lambda s, b, h, i, j: s * reader.get(Config)),
        "a function in a dictionary": _of_config(in_a_dictionary),
        "a default": _of_config(with_default),
        "a module's function": _of_config(lambda read: lambda s, b, h, i, j: s * utils.factor_of(Config)),
        "as if of a library": Case(wrapped, lambda value: setattr(Config, "factor", value)),
        "a layer's attribute": Case(of_layer(lambda one: one.factor), lambda value: setattr(layer, "factor", value)),
        "a function's attribute": Case(
            lambda s, b, h, i, j: s * settings.factor, lambda value: setattr(settings, "factor", value)
        ),
        "its own attribute": Case(own, lambda value: setattr(own, "math", value)),
        "a dictionary's method": Case(lambda s, b, h, i, j: s * get("x"), lambda value: held.update(x=value)),
        "a list's method": Case(lambda s, b, h, i, j: s * item(0), lambda value: numbers.__setitem__(0, value)),
        "a dictionary's values": Case(lambda s, b, h, i, j: s * next(iter(values)), lambda value: held.update(x=value)),
        "a view of a dictionary": Case(lambda s, b, h, i, j: s * proxy["x"], lambda value: held.update(x=value)),
        "a weak reference": Case(
            lambda s, b, h, i, j: s * read_through(reference), lambda value: setattr(reader, "factor", value)
        ),
        "a function that keeps results": Case(lambda s, b, h, i, j: s * kept(), change_kept),
        "an attribute of a dictionary": Case(
            lambda s, b, h, i, j: s * named["x"] * named.factor, lambda value: setattr(named, "factor", value)
        ),
        "a tensor's method": Case(lambda s, b, h, i, j: s * total(), lambda value: table.fill_(value)),
    }


@pytest.mark.parametrize("kind", _reached())
def test_what_is_within_reach_is_read_at_each_call(kind, monkeypatch):
    monkeypatch.setattr(Config, "factor", 0.5)
    score, change = _reached()[kind]
    for value in (0.5, 0.5, 0.9, 1.7):
        change(value)
        assert _differs(score, []) < 1e-5


@pytest.mark.parametrize("kind", ["computed name", "set", "number of a tensor"])
def test_a_tensor_that_is_not_found_is_refused(kind):
    layer = nn.Module()
    layer.register_buffer("alpha", torch.tensor(0.5))
    held, item = {torch.tensor(0.5)}, torch.tensor(0.5).item
    score = {
        "computed name": lambda s, b, h, i, j: s * layer.get_buffer("al" + "pha"),
        "set": lambda s, b, h, i, j: s * next(iter(held)),
        "number of a tensor": lambda s, b, h, i, j: s * layer.get_buffer("al" + "pha").item(),
    }[kind]
    with pytest.raises(UnsupportedProblem, match=r"a tensor where strobe does not find it.*read it from a closure"):
        strobe.attention(*_tensors(), score_mod=score)
    with pytest.raises(UnsupportedProblem, match="reads the value"):
        strobe.attention(*_tensors(), score_mod=lambda s, b, h, i, j: s * item())
    constant = lambda s, b, h, i, j: s * torch.tensor(3.0) + torch.tensor(2.0).item()
    assert _differs(constant, []) < 1e-5


def _documents(ids: Tensor) -> strobe.Mask:
    return strobe.mask_mod(lambda b, h, i, j: ids[i] == ids[j])


def test_ids_with_other_memory_are_read_anew():
    q, k, v = _tensors(40)
    ids, others = (torch.arange(40, dtype=torch.int32) // n for n in (13, 7))
    mask = _documents(ids)
    for _ in range(2):
        strobe.attention(q, k, v, mask=mask)
    ids.data = others.clone()
    expected = strobe.attention(q, k, v, mask=strobe.documents(others[None]))
    assert torch.equal(strobe.attention(q, k, v, mask=mask), expected)


def test_ids_may_be_written_before_the_backward_of_a_repeated_call():
    inputs = [one.requires_grad_() for one in _tensors(40)]
    ids = torch.arange(40, dtype=torch.int32) // 13
    mask = _documents(ids)
    for n in (9, 7, 5, 3):
        before = strobe.documents(ids.clone()[None])
        out = strobe.attention(*inputs, mask=mask)
        if n < 9:  # a repeated call: nothing was written before it
            again = strobe.attention(*inputs, mask=mask)
            assert torch.equal(out, again)
            out = again
        ids.copy_(torch.arange(40, dtype=torch.int32) // n)
        found = torch.autograd.grad(out.square().sum(), inputs)
        expected = torch.autograd.grad(strobe.attention(*inputs, mask=before).square().sum(), inputs)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
