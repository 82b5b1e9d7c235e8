"""What a repeated call with functions skips: the dispatcher, host code of kernels, the search for built-in masks."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import strobe
from strobe.kernels.device.mask_blocks import while_kept
from strobe.kernels.runtime.launch_cache import CACHE
from strobe.ops import attention, builtin_masks, mods_paged, repeated
from strobe.ops import mods as ops_mods
from strobe.problem import torch_private
from strobe.problem.call import Call
from strobe.problem.mods import Mods, ModTexts
from strobe.selection import replay
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


@pytest.mark.parametrize("packed", [False, True], ids=["decode", "packed"])
def test_a_decode_calls_the_dispatcher_where_something_looks_on_alone(packed, monkeypatch):
    q, k, _ = _tensors()
    slopes, calls = torch.rand(2), []
    score = lambda s, b, h, i, j: s - slopes[h] * (i - j)
    cache = strobe.DenseCache(k, k, torch.tensor([30], dtype=torch.int32))
    given, offsets = {"score_mod": score}, torch.tensor([0, 3], dtype=torch.int32)
    if packed:
        run = lambda **more: strobe.attention_paged(q[0, :3], cache, cu_seqlens_q=offsets, **given, **more)
    else:
        run = lambda **more: strobe.attention_decode(q[:, :3], cache, **given, **more)
    at, name = (mods_paged, "PAGED") if packed else (ops_mods, "DECODE")
    op = getattr(at, name)
    monkeypatch.setattr(at, name, lambda *fields: (calls.append(name), op(*fields))[1])
    shift = lambda s, b, h, i, j: score(s, b, h, i + 27, j)
    exact = dense(q[:, :3].double(), k[:, :30].double(), k[:, :30].double(), Functions(shift), builtin=strobe.causal())
    out, into = run(), torch.empty_like(q[0, :3] if packed else q[:, :3])
    assert (out.view(1, 3, 2, 64) - exact[0]).abs().max() < 1e-5
    assert run(out=into) is into and torch.equal(into, out) and not calls
    with _Passing():
        assert torch.equal(run(), out) and calls == [name]


class _Bias(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.rand(2, 9, generator=torch.Generator().manual_seed(2)))
        self.factor = 0.5

    def forward(self, score, b, h, q_idx, kv_idx):
        return score + self.table[h, (q_idx - kv_idx).clamp(-4, 4) + 4] * self.factor

    def added(self, score, b, h, q_idx, kv_idx, shift=0.0):
        return self(score, b, h, q_idx, kv_idx) + shift


@pytest.mark.parametrize("kind", ["closure", "layer", "method", "partial"])
def test_layers_methods_and_partials_are_found_again(kind, monkeypatch):
    """By what they hold now: neither a trace nor the dispatcher runs."""
    q, k, v = _tensors()
    bias, anew = _Bias(), []
    attend = repeated.attend
    monkeypatch.setattr(repeated, "attend", lambda *given: (anew.append(1), attend(*given))[1])

    def function():
        table, factor = bias.table, bias.factor
        return {
            "closure": lambda s, b, h, i, j: s + table[h, (i - j).clamp(-4, 4) + 4] * factor,
            "layer": bias,
            "method": bias.added,
            "partial": partial(bias.added, shift=1.0),
        }[kind]

    def differs():
        exact = dense(q.double(), k.double(), v.double(), Functions(function()), builtin=strobe.causal())[0]
        out = strobe.attention(q, k, v, causal=True, score_mod=function())
        (gradient,) = torch.autograd.grad(out.square().sum(), bias.table)
        (expected,) = torch.autograd.grad(exact.square().sum(), bias.table)
        return max((out - exact).abs().max(), (gradient - expected).abs().max() / expected.abs().max())

    assert max(differs() for _ in range(3)) < 1e-5 and len(anew) == 1
    with torch.no_grad():
        bias.table += 1.0
    assert differs() < 1e-5 and len(anew) == 1
    bias.factor = 2.0
    assert differs() < 1e-5 and len(anew) == 2


def _doubled(self, score, b, h, q_idx, kv_idx):
    return 2.0 * score


def _factor_or_parameter(self, name):
    return 6.0 if name == "factor" else torch.nn.Module.__getattr__(self, name)


CHANGES = {
    "a method of the class": lambda bias, patch: patch.setattr(_Bias, "forward", _doubled),
    "a method of the object": lambda bias, patch: setattr(bias, "forward", lambda s, b, h, i, j: 3.0 * s),
    "the code of a method": lambda bias, patch: patch.setattr(_Bias.forward, "__code__", _doubled.__code__),
    "an attribute that moves to the class": lambda bias, patch: (
        delattr(bias, "factor"),
        patch.setattr(_Bias, "factor", 3.0, raising=False),
    ),
    "an attribute that becomes a property": lambda bias, patch: (
        delattr(bias, "factor"),
        patch.setattr(_Bias, "factor", property(lambda self: 4.0), raising=False),
    ),
    "an attribute that becomes an object": lambda bias, patch: setattr(bias, "factor", torch.tensor(5.0)),
    "an operator of the class": lambda bias, patch: (
        delattr(bias, "factor"),
        patch.setattr(_Bias, "__getattr__", _factor_or_parameter, raising=False),
    ),
}


class _ByName:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, score, b, h, q_idx, kv_idx):
        return score * getattr(self, "fac" + "tor")


class _Number(float):
    def __call__(self, score, b, h, q_idx, kv_idx):
        return score * self


class _Table(dict):
    def __call__(self, score, b, h, q_idx, kv_idx):
        return score * self["factor"]


class _OfClass:
    unused = 1.0

    def __call__(self, score, b, h, q_idx, kv_idx):
        return score * self.factor


@pytest.mark.parametrize("make", [_ByName, _Number, lambda factor: _Table(factor=factor)])
def test_objects_that_hold_other_values_are_told_apart(make):
    q, k, v = _tensors()
    for factor in (0.5, 2.0, 0.5):
        exact = dense(q.double(), k.double(), v.double(), Functions(make(factor)), builtin=strobe.causal())[0]
        assert (strobe.attention(q, k, v, causal=True, score_mod=make(factor)) - exact).abs().max() < 1e-5


def test_a_class_with_as_many_attributes_as_before_is_read_anew(monkeypatch):
    q, k, v = _tensors()
    held = _OfClass()
    held.factor = 0.5
    for factor in (0.5, 2.0, 3.0):
        if factor == 2.0:
            del held.factor
            monkeypatch.delattr(_OfClass, "unused")
        if factor != 0.5:
            monkeypatch.setattr(_OfClass, "factor", factor, raising=False)
        exact = dense(q.double(), k.double(), v.double(), Functions(held), builtin=strobe.causal())[0]
        assert (strobe.attention(q, k, v, causal=True, score_mod=held) - exact).abs().max() < 1e-5


@pytest.mark.parametrize("call", ["layer", "method"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_changed_is_read_anew(change, call, monkeypatch):
    q, k, v = _tensors()
    bias = _Bias()
    with torch.no_grad():
        for turn in range(3):
            if turn == 2:
                CHANGES[change](bias, monkeypatch)
            function = bias if call == "layer" else bias.added
            exact = dense(q.double(), k.double(), v.double(), Functions(function), builtin=strobe.causal())[0]
            assert (strobe.attention(q, k, v, causal=True, score_mod=function) - exact).abs().max() < 1e-5


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


# ---------------------------------------------------------------- calls that were made before (ops.repeated)


def _slopes(gradient: bool) -> torch.Tensor:
    return torch.linspace(0.1, 0.4, 2).requires_grad_(gradient)


def _scored(factor, slopes):
    return lambda s, b, h, i, j: s - factor * slopes[h] * (i - j).abs()


def _documents(ids):
    return strobe.mask_mod(lambda b, h, i, j: ids[i] == ids[j])


def _odd(step):
    return strobe.mask_mod(lambda b, h, i, j: (i - j) % step != 1)


IDS = torch.arange(40, dtype=torch.int32) // 13
OF_SCORES = torch.linspace(0.1, 0.4, 2)
KINDS = {
    "closure": lambda t, n: {"score_mod": _scored(n, t[0])},
    "object": lambda t, n: {"score_mod": strobe.score_mod(_scored(n, t[0]))},
    "ready-made": lambda t, n: {"score_mod": strobe.alibi(t[0]), "scale": 0.1 * n},
    "documents": lambda t, n: {"mask": _documents(t[1]), "scale": 0.1 * n},
    "window": lambda t, n: {"mask": strobe.mask_mod(lambda b, h, i, j: i - j < n), "causal": True},
    "prefix": lambda t, n: {"mask": strobe.mask_mod(lambda b, h, i, j: (j < n) | (i >= j))},
    "general": lambda t, n: {"mask": _odd(n + 1) & strobe.causal()},
    "both": lambda t, n: {"mask": _documents(t[1]), "score_mod": _scored(n, t[0]), "causal": True},
}


def _result(arguments: dict, gradient: bool, inputs) -> tuple[torch.Tensor, ...]:
    out = strobe.attention(*inputs, **arguments)
    leaves = [one for one in inputs if one.requires_grad]
    return (out, *torch.autograd.grad(out.sum(), leaves)) if gradient else (out,)


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_repeated_call_with_a_function_is_found_and_follows_every_change(kind, gradient, monkeypatch):
    bound, real = [], ops_mods.bind
    monkeypatch.setattr(ops_mods, "bind", lambda *given: (bound.append(1), real(*given))[1])
    inputs = [one.requires_grad_(gradient) for one in _tensors()]
    tensors, make = [OF_SCORES.clone(), IDS.clone()], KINDS[kind]

    def same_as_without_a_cache(number, expected: int) -> None:
        arguments = make(tensors, number)
        before = len(bound)
        found = _result(arguments, gradient, inputs)
        assert len(bound) - before == expected
        with CACHE.emptied():
            fresh = _result(arguments, gradient, inputs)
        assert all(torch.equal(one, other) for one, other in zip(found, fresh, strict=True))

    with CACHE.emptied():
        same_as_without_a_cache(3, 1)
        same_as_without_a_cache(3, 0)
        same_as_without_a_cache(4, 1)
        same_as_without_a_cache(4, 0)
        reads_ids, reads_slopes = (
            kind in ("documents", "both"),
            kind not in ("documents", "window", "prefix", "general"),
        )
        tensors[0].mul_(2.0)
        same_as_without_a_cache(4, 0)
        tensors[1].copy_(torch.arange(40) // 7)
        same_as_without_a_cache(4, int(reads_ids))
        tensors[0] = torch.linspace(0.3, 0.9, 4)[::2]
        same_as_without_a_cache(4, int(reads_slopes))
        tensors[1] = torch.arange(40, dtype=torch.int32) // 5
        same_as_without_a_cache(4, int(reads_ids))
        inputs[0] = inputs[0].detach()
        same_as_without_a_cache(4, int(gradient))


@pytest.mark.parametrize("kind", KINDS)
def test_a_repeated_call_looks_for_its_launch_where_a_first_one_leaves_it(kind, monkeypatch):
    """On a miss both keys are looked up: that of the path without a Call, and `forward_addresses`."""
    inputs, tensors, keys, made = _tensors(), [OF_SCORES, IDS], [], {}

    class Launches(dict):
        def get(self, key, default=None):
            keys.append(key)
            return default

    class OfAnyPlan(dict):
        def get(self, number, default=None):
            return Launches({(): None})

    def same_place(shape, strides, dtype):
        return made.setdefault((shape, strides, dtype), torch.empty_strided(shape, strides, dtype=dtype))

    with CACHE.emptied():
        first = strobe.attention(*inputs, **KINDS[kind](tensors, 3))
        monkeypatch.setattr(CACHE, "launches", OfAnyPlan({0: {}}))
        monkeypatch.setattr(torch_private, "cuda_current_device", inputs[0].get_device)
        for module in (replay, ops_mods):
            monkeypatch.setattr(module, "empty_here", same_place)
        assert torch.equal(strobe.attention(*inputs, **KINDS[kind](tensors, 3)), first)
    assert len(keys) == 2 and keys[0] == keys[1] and len(keys[0]) >= 5


def test_a_repeated_call_gives_gradients_of_what_a_score_captures():
    q, k, v = _tensors()
    slopes = _slopes(True)
    for _ in range(3):
        out = strobe.attention(q, k, v, causal=True, score_mod=_scored(2, slopes))
        (found,) = torch.autograd.grad(out.square().sum(), slopes, retain_graph=True)
        exact = dense(*(t.double() for t in (q, k, v)), Functions(_scored(2, slopes.double())), builtin=strobe.causal())
        (expected,) = torch.autograd.grad(exact[0].square().sum(), slopes)
        torch.testing.assert_close(found, expected.to(found.dtype), rtol=1e-4, atol=1e-4)
    with pytest.raises(strobe.UnsupportedProblem, match="double backward"):
        (gradient,) = torch.autograd.grad(out.square().sum(), slopes, create_graph=True)
        gradient.sum().backward()


def test_the_backward_of_a_built_in_mask_calls_the_dispatcher_where_something_looks_on_alone(monkeypatch):
    """Of a function that runs as key lengths: the call then has a tensor beside q, k and v."""
    q, k, v = (one.requires_grad_() for one in _tensors())
    lengths = torch.tensor([31])
    seen = strobe.mask_mod(lambda b, h, i, j: j < lengths[b])
    calls, op = [], attention.BACKWARD
    monkeypatch.setattr(attention, "BACKWARD", lambda *given: (calls.append(given), op(*given))[1])
    assert strobe.explain(q, k, v, mask=seen).problem.mask.key_lengths
    run = lambda **how: torch.autograd.grad(strobe.attention(q, k, v, mask=seen).square().sum(), (q, k, v), **how)
    first = run()
    calls.clear()
    for _ in range(3):
        assert all(map(torch.equal, run(), first))
    assert not calls
    with _Passing():
        assert all(map(torch.equal, run(), first))
    assert len(calls) == 1
    with pytest.raises(strobe.UnsupportedProblem, match="double backward"):
        sum(one.sum() for one in run(create_graph=True)).backward()
    with CACHE.emptied():
        exact = strobe.attention(q, k, v, mask=strobe.key_lengths(lengths.int()))
        assert all(map(torch.equal, torch.autograd.grad(exact.square().sum(), (q, k, v)), first))


def test_a_repeated_call_meets_modes_and_settings():
    q, k, v = (one.requires_grad_() for one in _tensors())
    call = lambda: strobe.attention(q, k, v, causal=True, score_mod=_scored(2, OF_SCORES))
    first = call()
    assert torch.equal(call(), first) and first.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert call().dtype == torch.bfloat16 and call().dtype == torch.bfloat16
    with torch.no_grad():
        assert not call().requires_grad and not call().requires_grad
    with torch.inference_mode():
        assert call().is_inference()
    with _Passing():
        assert torch.equal(call(), first)
    assert call().requires_grad
    with pytest.raises(TypeError, match="causal"):
        strobe.attention(q, k, v, causal=1, score_mod=_scored(2, OF_SCORES))


def test_functions_that_are_not_simple_are_read_in_full():
    q, k, v = _tensors()
    held = {"slope": 0.5}
    score = lambda s, b, h, i, j: s - held["slope"] * (i - j)
    outs = [strobe.attention(q, k, v, score_mod=score) for _ in range(2)]
    held["slope"] = 1.5
    changed = strobe.attention(q, k, v, score_mod=score)
    exact = dense(q.double(), k.double(), v.double(), Functions(score))[0]
    assert torch.equal(*outs) and (changed - exact).abs().max() < 1e-5 and not torch.equal(changed, outs[0])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*KINDS, "learned"])
def test_a_repeated_step_on_a_gpu_gives_what_a_first_one_gives(kind, monkeypatch):
    """Gradients, too, which a replayed launch computes once its addresses repeat."""
    generator = torch.Generator("cuda").manual_seed(1)
    shape = (1, 200, 2, 64)
    inputs = [torch.randn(shape, device="cuda", generator=generator).bfloat16().requires_grad_() for _ in range(3)]
    tensors = [OF_SCORES.cuda(), (torch.arange(200, device="cuda") // 13).int()]
    if kind == "learned":
        tensors[0].requires_grad_()
    arguments = KINDS.get(kind, KINDS["closure"])(tensors, 3)
    leaves = [*inputs, *([tensors[0]] if kind == "learned" else [])]
    computed, real = [], repeated._computed
    monkeypatch.setattr(repeated, "_computed", lambda *given: (computed.append(1), real(*given))[1])

    def step() -> list[torch.Tensor]:
        out = strobe.attention(*inputs, **arguments)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]

    with CACHE.emptied():
        first = step()
        for _ in range(12):  # addresses repeat once the allocator has met every size
            for found, expected in zip(step(), first, strict=True):
                torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
        if kind != "prefix":  # a function that became a built-in mask with tensors: its backward goes through the op
            assert 1 <= len(computed) <= 8
        with torch.no_grad():
            inputs[0].mul_(0.5)
        changed = step()
    with CACHE.emptied():
        for found, expected in zip(changed, step(), strict=True):
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
