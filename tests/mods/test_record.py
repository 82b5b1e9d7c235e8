"""Recorded operations have results of the dtype and shape that torch gives on meta tensors, and import little."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from strobe.mods.record import CALL, record

_FIRST_CALLS = """
import sys, torch, strobe
q = torch.randn(1, 16, 2, 16, requires_grad=True)
table = torch.ones(2, 16, 4, requires_grad=True)
ancestors = torch.arange(32, dtype=torch.int32).reshape(16, 2)
def score(score, b, h, i, j):
    return 30 * torch.tanh((score + table[h, i, (i - j).clamp(0, 3)]) / 30)
def seen(b, h, i, j):
    return (i // 4 % 2 == j // 4 % 2) | (ancestors[i] == j[..., None]).any(-1)
strobe.attention(q, q, q, score_mod=score, mask=strobe.causal() & strobe.mask_mod(seen)).sum().backward()
print(sorted({"torch._dynamo", "torch._inductor", "sympy"} & set(sys.modules)))
"""


def test_a_first_call_with_functions_imports_no_compiler():
    done = subprocess.run([sys.executable, "-c", _FIRST_CALLS], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr[-2000:]


_UNARY = [
    torch.abs, torch.exp, torch.neg, torch.sqrt, torch.tanh, torch.floor, torch.sign, torch.logical_not, torch.relu,
]  # fmt: skip
_BINARY = [
    torch.add, torch.sub, torch.mul, torch.div, torch.floor_divide, torch.remainder, torch.fmod, torch.minimum,
    torch.pow, torch.eq, torch.lt, torch.bitwise_and, torch.logical_or, torch.bitwise_left_shift, torch.rsub,
]  # fmt: skip
_DTYPES = [torch.bool, torch.int32, torch.int64, torch.float32, torch.float64]


def outcome(function, *arguments):
    """(dtype, shape, strides) of the result, or the class of the error."""
    try:
        found = function(*arguments)
    except Exception as error:
        return type(error)
    return found.dtype, found.shape, found.stride(), found.device.type


def recorded(function, *arguments):
    """The same of what is recorded."""
    given = [one for one in arguments if isinstance(one, torch.Tensor)]
    try:
        graph = record(lambda *_: function(*arguments), given)
    except Exception as error:
        return type(error)
    value = graph.outputs[0].value
    assert any(node.kind == CALL for node in graph.nodes)
    return value.dtype, value.shape, value.stride(), value.device.type


def _meta(dtype, *shape):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("operation", _UNARY, ids=lambda one: one.__name__)
def test_results_of_one_tensor(operation):
    for dtype in _DTYPES:
        for shape in ((), (3,), (2, 0)):
            x = _meta(dtype, *shape)
            assert recorded(operation, x) == outcome(operation, x), (dtype, shape)


@pytest.mark.parametrize("operation", _BINARY, ids=lambda one: one.__name__)
def test_results_of_two_operands(operation):
    for dtype in _DTYPES:
        x = _meta(dtype)
        for other in (*(_meta(one) for one in _DTYPES), _meta(torch.float32, 4, 1), 2, 2.0, 0, -1, True):
            if operation is torch.pow and dtype is torch.bool and other is True:
                continue  # torch gives torch.bool, and torch.int64 on meta tensors
            assert recorded(operation, x, other) == outcome(operation, x, other), (dtype, other)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: torch.where(i > 0, x, 1),
        lambda x, i: (x + i[..., None]).any(-1),
        lambda x, i: torch.stack([x, x]).amax(0),
        lambda x, i: x.new_zeros(3),
        lambda x, i: torch.zeros_like(x, dtype=torch.int64),
        lambda x, i: x.to(torch.float16),
        lambda x, i: torch.nn.functional.softplus(x),
        lambda x, i: torch.clamp(i, min=0, max=7),
        lambda x, i: torch.ops.aten.index(x.expand(5, 6), [i, i]),
        lambda x, i: torch.ops.aten.index(x.expand(5, 6, 7), [i[None], i]),
        lambda x, i: torch.ops.aten.index(x.expand(5, 6, 7), [None, i]),
        lambda x, i: torch.nonzero(x),
        lambda x, i: x.item(),
        lambda x, i: torch.matmul(x, i),
        lambda x, i: x & 1,
    ],
)  # fmt: skip
def test_results_of_other_operations(function):
    arguments = _meta(torch.float32), _meta(torch.int32)
    assert recorded(lambda x, i: function(x, i), *arguments) == outcome(function, *arguments)


def test_no_memory_for_what_a_large_table_gives():
    """A row of a table of 1 TiB, twice."""
    table = _meta(torch.float32, 64, 2**16, 2**16)
    graph = record(lambda h: torch.ops.aten.index(table, [h]) + torch.ops.aten.index(table, [h]), [_meta(torch.int32)])
    assert graph.outputs[0].value.shape == (2**16, 2**16)


def test_random_numbers_of_the_cpu_stay():
    before = torch.get_rng_state()
    record(lambda x: torch.rand_like(x) + x, [_meta(torch.float32)])
    assert torch.equal(torch.get_rng_state(), before)
