"""Calls of every kind, with torch's private names and again, in another process, with their public fallbacks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import strobe
from strobe.compat import sdpa
from strobe.compat.seqused import is_readable
from strobe.ops.flops import forward_flops
from strobe.problem import torch_private

HIDDEN = getattr(sys.modules.get("tests.public_torch"), "HIDDEN", None)


@pytest.mark.skipif(HIDDEN is not None, reason="runs this file")
def test_all_of_this_file_holds_with_the_fallbacks():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.public_torch", "-p", "no:cacheprovider", __file__]
    root = Path(strobe.__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


def test_every_name_is_a_torch_function_or_every_name_a_fallback():
    names = [name for name, found in vars(torch_private).items() if callable(found) and name[:1].islower()]
    ours = {name for name in names if getattr(getattr(torch_private, name), "__module__", "") == torch_private.__name__}
    own = {"direct_apply", "set_engine_backward", "torch_kernel", "flop_counters"}
    own |= {"may_trace", "functionalize_active", "lower_sym_storage_offset", "without_donated_buffers"}
    own |= {"constant_while_compiling"}
    replaced = {"len_torch_dispatch_stack", "profiler_enabled", "get_unwrapped", "is_batchedtensor"}
    assert len(names) > 20
    if HIDDEN is None:
        assert not replaced & ours
        assert ours - own <= {"cuda_current_raw_stream"}  # a torch without CUDA lacks it
    else:
        assert len(HIDDEN) > 20 and replaced <= ours


# ---------------------------------------------------------------- calls


def _qkv(grad: bool = False, length: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, length, heads, 16).requires_grad_(grad) for heads in (4, 2, 2))


def _eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(-2, -3) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(-2, -3)


def _ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return strobe.attention(q, k, v, causal=True)


def _gradients(function: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    return torch.autograd.grad(function(*leaves).sin().sum(), leaves)


def test_forward():
    tensors = _qkv()
    for _ in range(3):  # by selection, then from the caches
        torch.testing.assert_close(_ours(*tensors), _eager(*tensors))


def test_a_step_under_autograd():
    tensors = _qkv()
    for _ in range(3):
        torch.testing.assert_close(_gradients(_ours, tensors), _gradients(_eager, tensors))


def test_calls_that_differ_in_strides_dtype_grad_mode_or_alignment_are_told_apart():
    tensors = _qkv()
    expected = _eager(*tensors)
    turned = tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors)
    memory = torch.empty(tensors[0].numel() + 1)
    moved = memory[1:].view(tensors[0].shape).copy_(tensors[0])
    for _ in range(2):
        for these in (tensors, turned, (moved, *tensors[1:])):
            torch.testing.assert_close(_ours(*these), expected)
        assert _ours(*(t.double() for t in tensors)).dtype == torch.float64
        assert _ours(*(t.clone().requires_grad_() for t in tensors)).requires_grad
        with torch.no_grad():
            assert not _ours(*(t.clone().requires_grad_() for t in tensors)).requires_grad
        torch.testing.assert_close(_ours(torch._neg_view(-tensors[0]), *tensors[1:]), expected)


def test_decode_and_append():
    q, k, v = _qkv(length=8)
    cache = strobe.DenseCache(torch.zeros(2, 16, 2, 16), torch.zeros(2, 16, 2, 16), torch.zeros(2, dtype=torch.int32))
    for _ in range(2):
        strobe.append(cache, k, v)
        out = strobe.attention_decode(q, strobe.DenseCache(cache.k, cache.v, torch.full((2,), 8, dtype=torch.int32)))
        torch.testing.assert_close(out, _eager(q, k, v))
    with pytest.raises(strobe.UnsupportedProblem, match="gradients through decode"):
        strobe.attention_decode(q.requires_grad_(), cache)


def test_vmap():
    tensors = tuple(t[:, None] for t in _qkv())
    torch.testing.assert_close(torch.vmap(_ours)(*tensors), _eager(*tensors))
    with pytest.raises(strobe.UnsupportedProblem, match="out= under vmap"):
        torch.vmap(lambda q, k, v: strobe.attention(q, k, v, out=torch.empty_like(q)))(*tensors)


def test_vmap_and_grad():
    tensors = tuple(t[:, None] for t in _qkv())
    expected = _gradients(_eager, tensors)
    gradient = torch.func.grad(lambda q, k, v: _ours(q, k, v).sin().sum(), argnums=(0, 1, 2))
    torch.testing.assert_close(torch.vmap(gradient)(*tensors), expected)
    mapped = torch.func.grad(lambda q, k, v: torch.vmap(_ours)(q, k, v).sin().sum(), argnums=(0, 1, 2))
    torch.testing.assert_close(mapped(*tensors), expected)
    leaves = [t.clone().requires_grad_() for t in tensors]
    torch.testing.assert_close(torch.autograd.grad(torch.vmap(_ours)(*leaves).sin().sum(), leaves), expected)


def test_a_decode_beside_a_gradient():
    q, k, v = _qkv(length=8)
    cache = strobe.DenseCache(k, v, torch.full((2,), 8, dtype=torch.int32))
    loss = lambda x: (strobe.attention_decode(q + 0, cache) * x).sum()
    torch.testing.assert_close(torch.func.grad(loss)(torch.ones_like(q)), strobe.attention_decode(q, cache))
    with pytest.raises(strobe.UnsupportedProblem, match="gradients through decode"):
        torch.func.grad(lambda x: strobe.attention_decode(x, cache).sum())(q)


def test_functionalize():
    tensors = _qkv()
    out = torch.empty_like(tensors[0])
    functional = torch.func.functionalize(
        lambda q, k, v: strobe.attention(q, k, v, causal=True, out=torch.empty_like(q))
    )
    torch.testing.assert_close(functional(*tensors), strobe.attention(*tensors, causal=True, out=out))
    with pytest.raises(strobe.UnsupportedProblem, match=r"gradients under torch\.func\.functionalize"):
        torch.func.functionalize(_ours)(*_qkv(grad=True))


def test_forward_mode_is_refused():
    q, k, v = _qkv()
    with pytest.raises(strobe.UnsupportedProblem, match="forward-mode"):
        torch.func.jvp(lambda q: _ours(q, k, v), (q,), (q,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(strobe.UnsupportedProblem, match="forward-mode"):
        _ours(torch.autograd.forward_ad.make_dual(q, q), k, v)


@pytest.mark.parametrize("graded", (False, True))
def test_compiled(graded):
    tensors = _qkv()
    compiled = torch.compile(_ours, backend="aot_eager", fullgraph=True)
    if graded:
        torch.testing.assert_close(_gradients(compiled, tensors), _gradients(_eager, tensors))
    else:
        torch.testing.assert_close(compiled(*tensors), _eager(*tensors))


def test_inductor_writes_to_each_layer_though_sizes_change():
    def layers(pool, q):
        for layer in range(len(pool)):
            strobe.attention(q, q, q, out=pool[layer])

    with torch._inductor.config.patch(compile_threads=1, force_disable_caches=True):
        compiled = torch.compile(layers, fullgraph=True)
        for batch in (2, 3):
            q, pools = torch.randn(batch, 3, 2, 8), [torch.zeros(2, batch, 3, 2, 8) for _ in range(2)]
            layers(pools[0], q)
            compiled(pools[1], q)
            assert torch.equal(*pools)


def test_fake_tensors():
    tensors = _qkv()
    with FakeTensorMode() as mode:
        fakes = tuple(mode.from_tensor(t) for t in tensors)
        out, grads = _ours(*fakes), _gradients(_ours, fakes)
    assert isinstance(out, torch_private.FakeTensor) and not isinstance(tensors[0], torch_private.FakeTensor)
    assert (out.shape, out.stride(), out.dtype) == (tensors[0].shape, tensors[0].stride(), torch.float32)
    assert [g.shape for g in grads] == [t.shape for t in tensors]


def test_traced_graphs_hold_the_op():
    tensors = _qkv()
    graph = make_fx(_ours)(*tensors)
    assert [node.target for node in graph.graph.nodes if "strobe" in str(node.target)] == [
        torch.ops.strobe.forward.default
    ]
    torch.testing.assert_close(graph(*tensors), _eager(*tensors))


def test_a_profiler_sees_the_op():
    tensors = _qkv()
    _ours(*tensors)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        _ours(*tensors)
    assert any("strobe::forward" in event.key for event in profiled.key_averages())


def test_autocast():
    tensors = _qkv()
    for _ in range(2):
        assert _ours(*tensors).dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert _ours(*tensors).dtype == torch.bfloat16
    assert torch_private.is_any_autocast_enabled() is False


def test_inference_mode():
    tensors = _qkv()
    for _ in range(2):
        with torch.inference_mode():
            assert _ours(*tensors).is_inference()
        assert not _ours(*tensors).is_inference()


def test_a_function_mode_is_seen():
    class Mode(torch.overrides.TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.seen: list[str] = []

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.seen.append(str(function))
            return function(*args, **(kwargs or {}))

    assert not torch_private.len_torch_function_stack()
    _ours(*_qkv())
    with Mode() as mode:
        assert torch_private.len_torch_function_stack()
        _ours(*_qkv())
    assert any("strobe.forward" in name for name in mode.seen)


def test_a_flop_counter_made_before_the_first_call():
    counter, (q, k, v) = FlopCounterMode(display=False), _qkv()
    with counter:
        _ours(q, k, v)
    assert counter.get_total_flops() == forward_flops(q.shape, k.shape, v.shape)


def test_deterministic_algorithms():
    assert not torch_private.get_deterministic_algorithms()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch_private.get_deterministic_algorithms()
        torch.testing.assert_close(_ours(*_qkv()), _eager(*_qkv()))
    finally:
        torch.use_deterministic_algorithms(False)


def test_sdpa_runs_on_strobe():
    q = torch.randn(1, 2, 64, 16)
    expected = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    if HIDDEN is not None:
        with pytest.raises(strobe.UnsupportedProblem, match="cannot call them"):
            sdpa.enable()
        return
    with sdpa.enable() as switch:
        torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q, is_causal=True), expected)
    assert switch.served == {"cpu.forward": 1}


def test_values_are_read_unless_a_tracer_may_record_it():
    lengths = torch.ones(2, dtype=torch.int32)
    assert is_readable(lengths) and not is_readable(lengths.to("meta"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert not is_readable(lengths)
    read: list[bool] = []
    make_fx(lambda x: (read.append(is_readable(lengths)), x + 1)[1])(torch.ones(1))
    torch.vmap(lambda one: (read.append(is_readable(one)), one)[1])(lengths)
    assert read == [False, False]


# ---------------------------------------------------------------- guards

CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "equal": torch.clone,
    "other values": lambda t: t + 1,
    "shape": lambda t: t[:1],
    "strides": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "dtype": lambda t: t.half(),
    "requires_grad": lambda t: t.clone().requires_grad_(),
    "class": torch.nn.Parameter,
    "negative view": torch._neg_view,
    "conjugate": lambda t: torch.view_as_complex(torch.stack([t, t], -1)).conj(),
    "meta": lambda t: t.to("meta"),
    "zero tensor": lambda t: torch._efficientzerotensor(t.shape),
    "sparse": lambda t: t.to_sparse(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_fallback_of_tensor_guards_decides_as_torch_does(change):
    x = torch.randn(2, 3, 4)
    other = CHANGES[change](x)
    kinds = (torch_private.TensorGuards, torch_private.PythonGuards)
    keywords = {"dynamic_dims_sizes": [[2, 3, 4]], "dynamic_dims_strides": [[12, 4, 1]]}
    assert [kind(x, **keywords).check(x) for kind in kinds] == [True, True]
    assert [kind(x, **keywords).check(other) for kind in kinds] == [change in ("equal", "other values")] * 2


@pytest.mark.parametrize("kind", (torch_private.TensorGuards, torch_private.PythonGuards))
def test_guards_see_modes_and_transforms(kind):
    x = torch.randn(2, 3)
    guard = kind(x, dynamic_dims_sizes=[[2, 3]], dynamic_dims_strides=[[3, 1]])
    assert guard.check(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert not guard.check(x)
    with torch.inference_mode():
        assert not guard.check(x)
    assert not torch.vmap(lambda one: torch.tensor(guard.check(one)))(x[None].expand(2, 2, 3)).any()


# ---------------------------------------------------------------- a GPU


@pytest.mark.gpu
def test_the_current_gpu():
    assert torch_private.cuda_current_device() == torch.cuda.current_device()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert torch_private.cuda_current_raw_stream(torch.cuda.current_device()) == stream.cuda_stream
    assert not torch_private.cuda_is_capturing()
    made = torch_private.empty_strided_cuda((2, 3), (1, 2), torch.float16)
    assert (made.shape, made.stride(), made.dtype, made.is_cuda) == ((2, 3), (1, 2), torch.float16, True)


@pytest.mark.gpu
def test_a_step_and_a_decode_on_a_gpu():
    q, k, v = (t.cuda().bfloat16() for t in _qkv(length=256))
    expected = _eager(*(t.float() for t in (q, k, v)))
    for _ in range(4):  # selected, launched by Triton, noted and repeated
        torch.testing.assert_close(_ours(q, k, v).float(), expected, atol=2e-2, rtol=2e-2)
        for got, like in zip(_gradients(_ours, (q, k, v)), _gradients(_eager, tuple(t.float() for t in (q, k, v)))):
            torch.testing.assert_close(got.float(), like, atol=4e-2, rtol=4e-2)
        cache = strobe.DenseCache(k, v, torch.full((2,), 256, dtype=torch.int32, device="cuda"))
        decoded = strobe.attention_decode(q[:, -1:], cache)
        torch.testing.assert_close(decoded.float(), expected[:, -1:], atol=2e-2, rtol=2e-2)
