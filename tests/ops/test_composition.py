"""The ops inside torch's own tools: compile, export, autocast, checkpointing, torch.func, FLOP counting."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch._inductor.config
from torch.utils import flop_counter
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import strobe
from strobe import flash_attn, flash_attn_interface
from strobe.kernels import kernels
from strobe.ops import attention as ops
from tests.calls import CALLS, leaves, with_grad

close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def runs(monkeypatch):
    """Names of the CPU kernels in the order they ran."""
    seen: list[str] = []
    for direction in ("forward", "backward"):
        kernel = kernels(direction)[-1]
        real = kernel.run
        monkeypatch.setattr(
            kernel, "run", lambda *a, real=real, direction=direction: seen.append(direction) or real(*a), raising=False
        )
    return seen


# ---------------------------------------------------------------- torch.compile


def _both_ways(function, *tensors):
    """A function's value and its gradients for these leaves."""
    fresh = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
    out = function(*fresh)
    return out, *torch.autograd.grad(out.square().sum(), [t for t in fresh if t.requires_grad])


def _outside(mask):
    return lambda q, k, v: strobe.attention(q * 2, k, v, mask=mask, causal=True) + 1


def _self_varlen(x, offsets):
    return strobe.attention_varlen(x, x, x, cu_seqlens_q=offsets, causal=True)


def _compiled_cases():
    """What test_fullgraph.py's table of public functions leaves out: masks made before, and one tensor given twice."""
    dense, packed = CALLS["dense"](torch.float64), CALLS["varlen"](torch.float64)
    lengths = torch.tensor([4, 0], dtype=torch.int32)
    ids_q, ids_k = (torch.tensor([[0] * 2 + [1] * (n - 2)] * 2, dtype=torch.int32) for n in (5, 7))
    return {
        "mask outside": (_outside(strobe.key_lengths(lengths)), dense[:3]),
        "documents outside": (_outside(strobe.documents(ids_q, ids_k)), dense[:3]),
        "keys are values": (lambda q, kv: strobe.attention(q, kv, kv, causal=True), dense[:2]),
        "queries are keys are values": (lambda x: strobe.attention(x, x, x), dense[:1]),
        "one set of offsets": (_self_varlen, (packed.q, packed.cu_seqlens_q)),
        "one set of ids": (lambda x, ids: strobe.attention(x, x, x, mask=strobe.documents(ids)), (dense.q, ids_q)),
    }


@pytest.mark.parts(3, seed=2372875927)
@pytest.mark.parametrize("name", _compiled_cases())
def test_compiled_whole_it_means_the_same(name):
    function, tensors = _compiled_cases()[name]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for got, expected in zip(_both_ways(compiled, *tensors), _both_ways(function, *tensors)):
        close(got, expected)
    with torch.no_grad():
        close(compiled(*tensors), function(*tensors))


@pytest.mark.parametrize("compiled", (False, True))
def test_an_lse_that_nobody_uses_has_no_gradient(compiled, monkeypatch):
    """torch.compile hands zeros to an output without a use: a kernel more, and on DTensors a plain tensor among
    them."""
    seen, kernel = [], kernels("backward")[-1]
    look = lambda plan, call, tensors, space, real=kernel.run: (
        seen.append(tensors.dlse) or real(plan, call, tensors, space)
    )
    monkeypatch.setattr(kernel, "run", look, raising=False)
    dense, packed = with_grad(CALLS["dense"](torch.float64)), with_grad(CALLS["varlen"](torch.float64))
    varlen = partial(strobe.attention_varlen, cu_seqlens_q=packed.cu_seqlens_q, cu_seqlens_k=packed.cu_seqlens_k)
    stand_ins = [(library.flash_attn_func, dense) for library in (flash_attn, flash_attn_interface)]
    for attend, call in ((strobe.attention, dense), (varlen, packed), *stand_ins):
        attend = (
            torch.compile(lambda *t, attend=attend: attend(*t), fullgraph=True, backend="aot_eager")
            if compiled
            else attend
        )
        attend(*call[:3]).sum().backward()
    assert seen == [None] * 4


def test_inductor_runs_it_forward_and_backward():
    function = lambda q, k, v: strobe.attention(q.sin(), k, v, causal=True) * 2
    tensors = CALLS["dense"](torch.float64)[:3]
    with torch._inductor.config.patch(compile_threads=1):  # a pool of compilers costs more to start than this is long
        got = _both_ways(torch.compile(function, fullgraph=True), *tensors)
    for one, expected in zip(got, _both_ways(function, *tensors)):
        close(one, expected)


def test_inductor_runs_it_without_gradients():
    """inductor names its own arguments beside the op's."""
    q, k, v = CALLS["dense"](torch.float64)[:3]
    with torch._inductor.config.patch(compile_threads=1), torch.no_grad():
        close(
            torch.compile(lambda q: strobe.attention(q.sin(), k, v, causal=True), fullgraph=True)(q),
            strobe.attention(q.sin(), k, v, causal=True),
        )


def test_dynamic_lengths_are_compiled_once():
    count = []

    def backend(graph, _):
        count.append(1)
        return graph.forward

    function = lambda q, k, v: strobe.attention(q, k, v, causal=True, window=(4, None))
    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=True)
    for length in (5, 9, 17, 33):
        q, k, v = (torch.randn(2, length, 2, 8, dtype=torch.float64) for _ in range(3))
        close(compiled(q, k, v), function(q, k, v))
    assert len(count) == 1


def _promised(x, longest):
    return strobe.attention_varlen(
        x, x, x, cu_seqlens_q=torch.tensor([0, 4, 9], dtype=torch.int32), max_seqlen_q=longest, max_seqlen_k=longest
    )


@pytest.mark.parametrize(
    "function",
    (
        lambda x, n: strobe.attention(x[None], x[None], x[None], window=(n, 0)),
        lambda x, n: strobe.attention(x[None], x[None], x[None], mask=strobe.prefix_causal(n)),
        _promised,
    ),
    ids=("window", "prefix", "max_seqlen"),
)
def test_ints_that_change_become_symbols(function):
    count = []

    def backend(graph, _):
        count.append(1)
        return graph.forward

    compiled, x = torch.compile(function, fullgraph=True, backend=backend), torch.randn(9, 2, 8, dtype=torch.float64)
    for n in (5, 6, 7, 8):
        close(compiled(x, n), function(x, n))
    assert len(count) == 2  # the first int is taken for a constant, the second teaches that it changes


def test_out_is_written_inside_a_compiled_function():
    q, k, v = CALLS["dense"](torch.float64)[:3]

    def function(q, k, v, out):
        strobe.attention(q, k, v, out=out)
        return out * 2

    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    got = torch.compile(function, fullgraph=True, backend="aot_eager")(q, k, v, out)
    close(out, strobe.attention(q, k, v))
    close(got, 2 * out)


def test_the_door_speaks_while_compiling():
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 4, 2, 8)
    with pytest.raises(Exception, match="k: got 2 heads"):
        torch.compile(lambda q, k: strobe.attention(q, k, k), fullgraph=True, backend="eager")(q, k)


# ---------------------------------------------------------------- export


class _Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 2, 8)).unbind(2)
        return strobe.attention(q, k, v, causal=True).flatten(2)


@pytest.mark.parametrize("dynamic", (False, True))
def test_export_keeps_the_op_in_the_graph(dynamic):
    layer, x = _Layer(), torch.randn(2, 6, 16)
    shapes = {"x": {1: torch.export.Dim("S", min=2, max=1024)}} if dynamic else None
    program = torch.export.export(layer, (x,), dynamic_shapes=shapes)
    assert any(node.target is torch.ops.strobe.forward.default for node in program.graph.nodes)
    for length in (6, 11) if dynamic else (6,):
        x = torch.randn(2, length, 16)
        torch.testing.assert_close(program.module()(x), layer(x))


# ---------------------------------------------------------------- autocast


def test_autocast_casts_float32_and_leaves_float64_alone():
    q, k, v = (torch.randn(1, 4, 2, 8) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        low = strobe.attention(q, k, v)
        wide = strobe.attention(q.double(), k.double(), v.double())
        part = strobe.partial_attention(q, k, v)
        mixed = strobe.attention(q.bfloat16(), k, v)
    assert (low.dtype, wide.dtype, part.out.dtype) == (torch.bfloat16, torch.float64, torch.float32)
    assert torch.equal(low, strobe.attention(q.bfloat16(), k.bfloat16(), v.bfloat16())) and torch.equal(low, mixed)
    assert strobe.attention(q, k, v).dtype == torch.float32


def test_autocast_leaves_a_call_alone_that_is_given_out():
    q = torch.randn(1, 9, 2, 16)
    out = torch.empty_like(q)
    with torch.autocast("cpu", torch.bfloat16):
        strobe.attention(q, q, q, out=out)
    assert torch.equal(out, strobe.attention(q, q, q))


@pytest.mark.parametrize("options", (
    {"score_mod": lambda s, b, h, q, k: s * 0.5}, {"mask": strobe.mask_mod(lambda b, h, q, k: (q + k) % 3 < 2)},
    {"mask": strobe.mask_mod(lambda b, h, q, k: q >= k)}, {"dropout_p": 0.1, "dropout_seed": 3},
), ids=("score", "mask", "window", "dropout"))  # fmt: skip
def test_autocast_leaves_a_call_with_functions_alone_that_is_given_out(options):
    q = torch.randn(1, 9, 2, 16)
    out, packed = torch.empty_like(q), torch.empty_like(q[0])
    offsets = torch.tensor([0, 9], dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16):
        strobe.attention(q, q, q, out=out, **options)
        strobe.attention_varlen(q[0], q[0], q[0], cu_seqlens_q=offsets, out=packed, **options)
        assert strobe.attention(q, q, q, **options).dtype == torch.bfloat16
    expected = strobe.attention(q, q, q, **options)
    assert torch.equal(out, expected) and torch.equal(packed, expected[0])


def test_autocast_hands_gradients_back_in_float32():
    q, k, v = (torch.randn(1, 4, 2, 8, requires_grad=True) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        out = strobe.attention(q, k, v)
    out.float().sum().backward()
    assert q.grad is not None and q.grad.dtype == torch.float32


# ---------------------------------------------------------------- checkpointing


def _project(q, k, v):
    return strobe.attention(q.sin(), k, v, causal=True).cos()


@pytest.mark.parametrize("compiled", (False, True))
def test_checkpointing_runs_the_forward_again(runs, compiled):
    call = with_grad(CALLS["dense"](torch.float64))
    function = lambda q, k, v: checkpoint(_project, q, k, v, use_reentrant=False)
    function = torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function
    got = torch.autograd.grad(function(*call[:3]).sum(), leaves(call))
    assert runs == ["forward", "forward", "backward"]
    for one, other in zip(got, torch.autograd.grad(_project(*call[:3]).sum(), leaves(call))):
        close(one, other)


@pytest.mark.parametrize("compiled", (False, True))
def test_selective_checkpointing_may_keep_the_op(runs, compiled):
    call = with_grad(CALLS["dense"](torch.float64))

    def policy(_, op, *args, **kwargs):
        return (
            CheckpointPolicy.MUST_SAVE if op == torch.ops.strobe.forward.default else CheckpointPolicy.PREFER_RECOMPUTE
        )

    function = lambda q, k, v: checkpoint(
        _project, q, k, v, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy)
    )
    function = torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function
    got = torch.autograd.grad(function(*call[:3]).sum(), leaves(call))
    assert runs == ["forward", "backward"]
    for one, other in zip(got, torch.autograd.grad(_project(*call[:3]).sum(), leaves(call))):
        close(one, other)


# ---------------------------------------------------------------- torch.func


def test_vmap_of_the_forward():
    q, k, v = (torch.randn(3, 2, 5, 2, 8, dtype=torch.float64) for _ in range(3))
    attend = lambda q, k, v: strobe.attention(q, k, v, causal=True)
    close(torch.vmap(attend)(q, k, v), torch.stack([attend(*one) for one in zip(q, k, v)]))
    shared = torch.vmap(attend, in_dims=(0, None, None))(q, k[0], v[0])
    close(shared, torch.stack([attend(one, k[0], v[0]) for one in q]))


def test_func_grad_and_vmap_of_it():
    q, k, v = (torch.randn(3, 2, 5, 2, 8, dtype=torch.float64) for _ in range(3))
    loss = lambda q, k, v: strobe.attention(q, k, v, causal=True).square().sum()
    gradient = torch.func.grad(loss, argnums=(0, 1, 2))

    def expected(*one):
        one = [t.detach().clone().requires_grad_() for t in one]
        return torch.autograd.grad(loss(*one), one)

    for got, other in zip(gradient(q[0], k[0], v[0]), expected(q[0], k[0], v[0])):
        close(got, other)
    for index, one in enumerate(zip(*torch.vmap(gradient)(q, k, v))):
        for got, other in zip(one, expected(q[index], k[index], v[index])):
            close(got, other)


def test_vmap_over_sinks_laid_out_in_columns():
    q, k, v = CALLS["dense"](torch.float64)[:3]
    columns = torch.randn(4, 3, dtype=torch.float64)  # one set of sinks a column: stride 3 in each
    got = torch.vmap(lambda sinks: strobe.attention(q, k, v, sinks=sinks), in_dims=1)(columns)
    close(got, torch.stack([strobe.attention(q, k, v, sinks=columns[:, n].contiguous()) for n in range(3)]))


# ---------------------------------------------------------------- FLOPs


def test_flops_are_counted_as_torch_counts_its_own():
    q, k, v = (torch.randn(2, 64, 4, 16, requires_grad=True) for _ in range(3))
    pairs = 2 * 4 * 64 * 64
    with FlopCounterMode(display=False) as counter:
        out = strobe.attention(q, k, v, causal=True)
    assert counter.get_total_flops() == 2 * pairs * (16 + 16)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * pairs * (3 * 16 + 2 * 16)


@pytest.mark.parametrize("direction", ("forward", "backward"))
def test_a_counter_met_for_the_first_time_counts(direction, monkeypatch):
    monkeypatch.setattr(flop_counter, "flop_registry", {})  # as where torch.utils.flop_counter is imported after strobe
    q = torch.randn(1, 4, 1, 8, requires_grad=True)
    out = strobe.attention(q, q, q)
    with FlopCounterMode(display=False) as counter:
        strobe.attention(q, q, q) if direction == "forward" else torch.autograd.grad(out, q, torch.ones_like(out))
    assert counter.get_total_flops() == 2 * 4 * 4 * 8 * (2 if direction == "forward" else 5)


def test_flops_of_packed_sequences_are_those_of_equal_lengths():
    q = torch.randn(2 * 64, 4, 16)
    with FlopCounterMode(display=False) as counter:
        strobe.attention_varlen(q, q, q, cu_seqlens_q=torch.tensor([0, 64, 128], dtype=torch.int32))
    assert counter.get_total_flops() == 2 * (2 * 4 * 64 * 64) * (16 + 16)


@pytest.mark.parametrize("packed", (False, True))
def test_flops_of_a_call_with_a_function_are_those_of_its_products(packed):
    q = torch.randn(2 * 64, 4, 16, requires_grad=True)
    q, options = (
        (q, {"cu_seqlens_q": torch.tensor([0, 64, 128], dtype=torch.int32)}) if packed else (q.view(2, 64, 4, 16), {})
    )
    attend = strobe.attention_varlen if packed else strobe.attention
    functions = {"score_mod": lambda s, b, h, q, k: s * 2, "mask": strobe.mask_mod(lambda b, h, q, k: (q - k) % 3 < 2)}
    pairs = 2 * 4 * 64 * 64
    for _ in range(2):
        with FlopCounterMode(display=False) as counter:
            out = attend(q, q, q, **options, **functions)
        assert counter.get_total_flops() == 2 * pairs * (16 + 16)
        with FlopCounterMode(display=False) as counter:
            out.sum().backward()
        assert counter.get_total_flops() == 2 * pairs * (3 * 16 + 2 * 16)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        attend(q, q, q, **options, **functions, out=torch.empty_like(q))
    assert counter.get_total_flops() == 2 * pairs * (16 + 16)


def test_the_op_is_seen_by_the_profiler():
    q = torch.randn(1, 4, 2, 8)
    with torch.profiler.profile() as profile:
        strobe.attention(q, q, q)
    assert any(event.key == "strobe::forward" for event in profile.key_averages())


def test_inference_mode_runs_the_op_once():
    q = torch.randn(1, 4, 2, 8, requires_grad=True)
    with torch.inference_mode():
        out = strobe.attention(q, q, q)
    assert not out.requires_grad and ops.prepare(strobe.problem.call.Call(q, q, q)).needs_grad


def test_compiled_autograd_traces_a_call_that_was_met():
    """It asks the function for its backward by name, where the engine calls what repeats a launch."""
    from torch._dynamo import compiled_autograd

    q, k, v = (torch.randn(1, 5, 2, 16, requires_grad=True) for _ in range(3))
    outs = [strobe.attention(q, k, v, causal=True) for _ in range(4)]
    expected = torch.autograd.grad(outs[2].square().sum(), (q, k, v))
    with compiled_autograd._enable(torch.compile(backend="eager")):
        outs[3].square().sum().backward()
    for leaf, gradient in zip((q, k, v), expected):
        torch.testing.assert_close(leaf.grad, gradient)
