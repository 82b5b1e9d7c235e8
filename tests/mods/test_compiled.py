"""Functions inside torch.compile and torch.export: one graph, guards on what they capture, and gradients."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

import strobe
from strobe.mods.cache import TRACES

TABLE = torch.randn(2, 33, generator=torch.Generator().manual_seed(0)).requires_grad_()


def _relative(s, b, h, q_idx, kv_idx):
    return s + TABLE[h, (q_idx - kv_idx).clamp(-16, 16) + 16]


def _scaled(slopes: torch.Tensor, factor: float):
    return lambda s, b, h, q_idx, kv_idx: s * factor - slopes[h] * (q_idx - kv_idx)


def _tensors(grad: bool = True):
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(1, 16, 2, 16, generator=generator).requires_grad_(grad) for _ in range(3))


class Counted:
    """A backend that counts graphs."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph, examples):
        self.graphs += 1
        return graph


def test_a_bare_function_is_compiled_into_one_graph_with_gradients():
    tensors = _tensors()
    torch.compiler.reset()
    run = lambda q, k, v: strobe.attention(q, k, v, causal=True, score_mod=_relative)
    found, exact = torch.compile(run, backend="aot_eager", fullgraph=True)(*tensors), run(*tensors)
    assert torch.equal(found, exact)
    leaves = [*tensors, TABLE]
    for one, other in zip(*(torch.autograd.grad(out.square().sum(), leaves) for out in (found, exact))):
        assert torch.equal(one, other)


class Settings:
    weight, is_raised = 1.0, True


def _set(score, b, h, q_idx, kv_idx):
    return score + Settings.weight * kv_idx if Settings.is_raised else score - kv_idx


def test_a_graph_sees_attributes_of_a_class_as_they_are_now(monkeypatch):
    tensors = _tensors(False)
    torch.compiler.reset()
    run = lambda q, k, v: strobe.attention(q, k, v, score_mod=_set)
    compiled = torch.compile(run, backend="eager", fullgraph=True)
    for name, value in (("weight", 1.0), ("weight", 2.0), ("is_raised", False), ("weight", 3.0), ("is_raised", True)):
        monkeypatch.setattr(Settings, name, value)
        weight = Settings.weight if Settings.is_raised else -1.0
        exact = strobe.attention(*tensors, score_mod=lambda s, b, h, q, k, weight=weight: s + weight * k)
        torch.testing.assert_close(compiled(*tensors), exact)


def test_a_graph_sees_captured_tensors_and_numbers_as_they_are_now():
    tensors, backend = _tensors(False), Counted()
    torch.compiler.reset()
    run = lambda function, q, k, v: strobe.attention(q, k, v, score_mod=function)
    compiled = torch.compile(run, backend=backend, fullgraph=True)
    slopes = torch.rand(2)
    function = _scaled(slopes, 0.5)
    same = lambda: torch.equal(compiled(function, *tensors), run(function, *tensors))
    assert same() and backend.graphs == 1
    slopes.mul_(3)
    assert same() and backend.graphs == 1
    function = _scaled(torch.rand(2), 0.5)  # another tensor
    assert same() and backend.graphs == 1
    function.__closure__[1].cell_contents = torch.rand(2)  # the closure now holds another tensor
    assert same() and backend.graphs == 1
    function = _scaled(slopes, 0.75)  # another number: one more graph
    assert same() and backend.graphs == 2


def _switched(switch):
    return lambda s, b, h, q_idx, kv_idx: s * 3 if switch else s


def _by_name(name):
    return lambda s, b, h, q_idx, kv_idx: s * 3 if name == "triple" else s


def _through(inner):
    return lambda s, b, h, q_idx, kv_idx: inner(s)


def _of_object(settings):
    return lambda s, b, h, q_idx, kv_idx: s * 3 if settings.on else s


def _of_dict(settings):
    return lambda s, b, h, q_idx, kv_idx: s * settings["factor"] if settings["on"] else s


def _in_dtype(dtype):
    return lambda s, b, h, q_idx, kv_idx: (s * 3).to(dtype).float()


@pytest.mark.parametrize(
    ("make", "before", "after"),
    [
        (_switched, True, False),
        (_switched, None, True),
        (_by_name, "triple", "same"),
        (_through, lambda s: s * 3, lambda s: s - 1),
        (_of_object, SimpleNamespace(on=True), SimpleNamespace(on=False)),
        (_of_dict, {"on": True, "factor": 3.0}, {"on": False, "factor": 3.0}),
        (_in_dtype, torch.float32, torch.int32),
    ],
    ids=["bool", "None", "string", "function", "attribute", "dict", "dtype"],
)
def test_a_captured_constant_that_changes_compiles_another_graph(make, before, after):
    tensors, backend = _tensors(False), Counted()
    torch.compiler.reset()
    function = make(before)
    run = lambda q, k, v: strobe.attention(q, k, v, score_mod=function)
    compiled = torch.compile(run, backend=backend, fullgraph=True)
    assert torch.equal(compiled(*tensors), run(*tensors))
    function.__closure__[0].cell_contents = after
    assert torch.equal(compiled(*tensors), run(*tensors)) and backend.graphs == 2


def test_a_captured_integer_beyond_float64_is_compiled():
    most, tensors = sys.maxsize, _tensors(False)
    function = lambda s, b, h, q_idx, kv_idx: s * min(most, 2)
    torch.compiler.reset()
    run = lambda q, k, v: strobe.attention(q, k, v, score_mod=function)
    assert torch.equal(torch.compile(run, backend="eager", fullgraph=True)(*tensors), run(*tensors))


def _near(b, h, q_idx, kv_idx):
    return q_idx - kv_idx < 5


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.tensor([0.5, 0.25]))

        self.score = lambda s, b, h, q_idx, kv_idx: s - self.slopes[h] * (q_idx - kv_idx).abs()

    def forward(self, q, k, v):
        return strobe.attention(q, k, v, score_mod=self.score, mask=strobe.causal() & strobe.mask_mod(_near))


def test_parameters_of_a_module_and_a_mask_that_is_made_inside():
    tensors, model = _tensors(), Model()
    torch.compiler.reset()
    found = torch.compile(model, backend="aot_eager", fullgraph=True)(*tensors)
    exact = model(*tensors)
    assert torch.equal(found, exact)
    gradients = [torch.autograd.grad(out.square().sum(), [*tensors, model.slopes]) for out in (found, exact)]
    assert all(map(torch.equal, *gradients))


def test_an_exported_program_holds_the_function():
    q, k, v = _tensors(False)
    with torch.no_grad():
        exported = torch.export.export(Model(), (q, k, v))
        again = exported.module()
        assert torch.equal(again(q * 2, k, v), Model()(q * 2, k, v))
    names = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert "strobe.mod_forward.default" in names


def test_a_function_over_a_tensor_of_the_graph_is_refused():
    q, k, v = _tensors(False)
    torch.compiler.reset()

    def run(q, k, v, bias):
        return strobe.attention(q, k, v, score_mod=lambda s, b, h, q_idx, kv_idx: s + bias[h])

    with pytest.raises(Exception, match="closure"):
        torch.compile(run, backend="eager", fullgraph=True)(q, k, v, torch.ones(2))


@pytest.mark.parametrize("value", (0.5, float("nan"), float("inf"), -float("inf")))
def test_a_captured_number_beside_functions_of_torch(value):
    """torch itself, which the function reads, is no captured value. NaN is equal to itself here."""
    hide = lambda value: lambda s, b, h, q_idx, kv_idx: torch.where(kv_idx > 10 + q_idx, value, torch.tanh(s))
    function, tensors, backend = hide(value), _tensors(False), Counted()
    torch.compiler.reset()
    run = lambda q, k, v: strobe.attention(q, k, v, score_mod=function)
    compiled = torch.compile(run, backend=backend, fullgraph=True)
    exact = run(*tensors)
    for _ in range(2):
        assert torch.equal(compiled(*tensors).nan_to_num(7.0), exact.nan_to_num(7.0)) and backend.graphs == 1
    assert exact.isnan().any() or value == value
    before = TRACES.traced
    assert torch.equal(run(*tensors).nan_to_num(7.0), exact.nan_to_num(7.0)) and TRACES.traced == before
