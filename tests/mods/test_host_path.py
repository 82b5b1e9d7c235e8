"""What a repeated call with functions skips: the dispatcher, host code of kernels, the search for built-in masks."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import strobe
from strobe.kernels.device.mask_blocks import while_kept
from strobe.ops import builtin_masks
from strobe.ops import mods as ops_mods
from strobe.problem.call import Call
from strobe.problem.mods import Mods, ModTexts
from strobe.testing.mods import Functions, dense


class _Passing(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def _tensors(dtype=torch.float32, length: int = 40):
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(1, length, 2, 64, generator=generator).to(dtype) for _ in range(3))


def test_the_dispatcher_is_called_where_something_looks_on_alone(monkeypatch):
    q, k, v = _tensors()
    slopes = torch.rand(2, requires_grad=True)
    score = lambda s, b, h, i, j: s - slopes[h] * (i - j)
    run = lambda: strobe.attention(q, k, v, causal=True, score_mod=score)
    calls = []
    for name in ("FORWARD", "BACKWARD"):
        op = getattr(ops_mods, name)
        monkeypatch.setattr(ops_mods, name, lambda *given, op=op, name=name: (calls.append(name), op(*given))[1])
    exact = dense(q.double(), k.double(), v.double(), Functions(score), builtin=strobe.causal())[0]
    for _ in range(2):
        out = run()
        with torch.no_grad():
            assert torch.equal(run(), out)
        assert (out - exact).abs().max() < 1e-5
        (gradient,) = torch.autograd.grad(out.sum(), slopes)
    assert not calls
    with _Passing():
        seen = run()
        (other,) = torch.autograd.grad(seen.sum(), slopes)
    assert torch.equal(seen, out) and torch.equal(other, gradient) and calls == ["FORWARD", "BACKWARD"]


def test_lists_of_blocks_end_the_launches_that_read_them():
    q, k, v = _tensors()
    launched = []

    def recorded(ids: torch.Tensor, lists: list):
        call = Call(q, k, v)._replace(mods=Mods(ModTexts(), mask_tensors=(ids,)))
        return while_kept(lambda: launched.append(1) or True, call, lists)

    ids, lists = torch.zeros(4), [torch.zeros(3), None]
    first = recorded(ids, lists)
    assert first() and first() and len(launched) == 2
    lists.clear()
    gc.collect()
    assert not first() and len(launched) == 2
    lists = [torch.zeros(3)]
    second = recorded(ids, lists)
    assert second()
    del ids
    gc.collect()
    assert not second() and len(launched) == 3
    assert while_kept(None, Call(q, k, v), lists) is None


@pytest.mark.parametrize("change", ["nothing", "in place", "another tensor", "another number", "another window"])
def test_a_built_in_mask_is_found_again_for_the_same_function_alone(change, monkeypatch):
    looked, real = [], builtin_masks.recognize
    monkeypatch.setattr(builtin_masks, "recognize", lambda *given: (looked.append(1), real(*given))[1])
    monkeypatch.setattr(builtin_masks, "_calls", {})
    q, k, v = _tensors()
    ids = torch.arange(40, dtype=torch.int32) // 13

    def run(ids: torch.Tensor, width: int, window) -> torch.Tensor:
        mask = strobe.mask_mod(lambda b, h, i, j: (ids[i] == ids[j]) & (i - j < width))
        out = strobe.attention(q, k, v, mask=mask, window=window)
        places = torch.arange(40)
        seen = (ids[:, None] == ids) & (places[:, None] - places < width)
        formula = Functions(lambda s, *_: s, lambda b, h, i, j: seen[i, j])
        builtin = strobe.window(*window) if window else None
        exact = dense(q.double(), k.double(), v.double(), formula, builtin=builtin)[0]
        assert (out - exact).abs().max() < 1e-5
        return out

    arguments = [ids, 9, None]
    run(*arguments), run(*arguments)
    assert len(looked) == 1
    if change == "in place":
        ids.copy_(torch.arange(40) // 7)
    elif change == "another tensor":
        arguments[0] = torch.arange(40, dtype=torch.int32) // 5
    elif change == "another number":
        arguments[1] = 5
    elif change == "another window":
        arguments[2] = (None, 4)
    run(*arguments), run(*arguments)
    assert len(looked) == (1 if change == "nothing" else 2)
