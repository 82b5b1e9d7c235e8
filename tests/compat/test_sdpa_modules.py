"""torch's modules, transforms and compiler over strobe as torch's own attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from strobe.compat import sdpa
from tests.compat.sdpa_calls import (
    UNEVEN,
    Case,
    _judge,
    _near,
    _own,
    _packed,
    _qkv,
    _random,
    _sdpa,
    _sequences,
    counted,
)

pytestmark = pytest.mark.usefixtures("nothing_stays_enabled")
OPS = torch.ops.aten
DTYPES = {"cpu": [torch.float32, torch.bfloat16, torch.float16, torch.float64], "cuda": [torch.bfloat16, torch.float16]}
gpu = pytest.mark.gpu


class Block(torch.nn.Module):
    """Causal self-attention as language models write it: one projection, heads as views, fewer key heads than query
    heads.
    """

    def __init__(self, width=64, heads=8, heads_kv=2):
        super().__init__()
        self.heads, self.heads_kv, self.size = heads, heads_kv, width // heads
        self.qkv, self.out = torch.nn.Linear(width, (heads + 2 * heads_kv) * self.size), torch.nn.Linear(width, width)

    def forward(self, x):
        parts = self.qkv(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        q, k, v = parts.split([self.heads, self.heads_kv, self.heads_kv], 1)
        return self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
        )


def _multi_head(x, width=64):
    torch.manual_seed(0)
    weights = (
        torch.randn(3 * width, width, device=x.device, dtype=x.dtype) * 0.1,
        torch.randn(width, width, device=x.device, dtype=x.dtype) * 0.1,
    )
    y = x.transpose(0, 1)
    rest = dict(training=True, need_weights=False)
    return F.multi_head_attention_forward(
        y, y, y, width, 4, weights[0], None, None, None, False, 0.0, weights[1], None, **rest
    )[0]


def _module(make):
    def run(x):
        torch.manual_seed(0)
        return make().to(x.device, x.dtype)(x)

    return run


MODULES = {
    "multi_head_attention_forward": _multi_head,
    "TransformerEncoderLayer": _module(lambda: torch.nn.TransformerEncoderLayer(64, 4, 96, 0.0, batch_first=True)),
    "MultiheadAttention, causal": _module(lambda: _Causal()),
    "a language model's block": _module(Block),
}


class _Causal(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x):
        mask = torch.nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device, x.dtype)
        return self.inner(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]


@pytest.mark.parametrize("name", MODULES)
def test_modules(name, device):
    x = _random(2, 75, 64).to(device, DTYPES[device][0]).requires_grad_()
    results = []
    for switch in (counted, sdpa.enable):
        with switch() as found:
            out = MODULES[name](x)
            dout = _random(*out.shape, seed=1).to(
                out
            )  # of a sum of squares a layer norm's gradient is 0, but for rounding
            results.append([out, *torch.autograd.grad(out, x, dout)])
    _own(found)
    _near(*results)


def test_a_transformers_model():
    transformers = pytest.importorskip("transformers")
    sizes = dict(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=101,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, attn_implementation="sdpa"))
    tokens = torch.arange(150).view(2, 75) % 101
    losses = []
    for switch in (counted, sdpa.enable):
        model.zero_grad()
        with switch() as found:
            loss = model(tokens, labels=tokens).loss
            loss.backward()
        losses.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    _own(found, count=2)
    _near(*losses)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("lies", ["heads", "rows", "slices"])
def test_compiled(backend, lies, device):
    case, dtype = Case(2, 4, 2, 70, 70, 16, True, lies=lies), DTYPES[device][0]
    qkv = _qkv(case, dtype, device)
    dout = _random(2, 4, 70, 16).to(device, dtype)
    with sdpa.enable() as found:
        torch._dynamo.reset()
        step = torch.compile(lambda q, k, v: _sdpa(case, q, k, v), fullgraph=True, backend=backend)
        out = step(*qkv)
        results = [out.detach(), *torch.autograd.grad(out, qkv, dout)]
    _own(found)
    _judge(case, results, qkv, dout)


def test_compiled_varlen_attn(device):
    qkv, packing = _packed(UNEVEN, 2, 2, DTYPES[device][0], device)
    with sdpa.enable() as found:
        torch._dynamo.reset()
        step = torch.compile(
            lambda *tensors: varlen_attn(*tensors, *packing, window_size=(-1, 0)), fullgraph=True, backend="aot_eager"
        )
        out = step(*qkv)
        gradients = torch.autograd.grad(out.sum(), qkv)
    _own(found)
    plain = _sequences(UNEVEN, *qkv, -1, 0)
    _near([out, *gradients], [plain, *torch.autograd.grad(plain.sum(), qkv)])


def test_transforms_and_autocast(device):
    q, k, v = _qkv(Case(3, 2, 2, 70, 70, 16), DTYPES[device][0], device, grad=False)
    attend = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    loss = lambda q: attend(q, k, v).square().sum()
    many = torch.stack([q, -q])
    results = []
    for switch in (counted, sdpa.enable):
        with switch() as found:
            with torch.autocast(device, torch.bfloat16):
                cast = attend(q.float(), k.float(), v.float())
            results.append(
                [cast, torch.func.grad(loss)(q), torch.vmap(attend, (0, None, None))(many, k, v), attend(q, k, v)]
            )
    assert results[1][0].dtype == torch.bfloat16 and found.served and not found.passed
    _near(*results)


def test_autocast_does_not_reach_into_the_kernels():
    (q, k, v), packing = _packed(UNEVEN, 2, 2, torch.float32, "cpu")
    arguments = (q.detach(), k.detach(), v.detach(), *packing, 0.0, True, False)
    with sdpa.enable():
        plain = OPS._flash_attention_forward(*arguments)[0]
        with torch.autocast("cpu", torch.bfloat16):
            cast = OPS._flash_attention_forward(*arguments)[0]
    assert cast.dtype == torch.float32 and torch.equal(plain, cast)


def test_nested_tensors(device):
    dtype = DTYPES[device][0]
    pieces = [_random(length, 2, 16).to(device, dtype) for length in (5, 70, 33)]
    results = []
    for switch in (counted, sdpa.enable):
        with switch():
            jagged = torch.nested.nested_tensor(pieces, layout=torch.jagged).transpose(1, 2)
            out = F.scaled_dot_product_attention(jagged, jagged, jagged, is_causal=device == "cuda")
            results.append(out.transpose(1, 2).contiguous().values())
    _near(*([one] for one in results))


@gpu
def test_captured_in_a_graph():
    case = Case(2, 4, 2, 256, 256, 64, True, lies="rows")
    q, k, v = _qkv(case, torch.bfloat16, "cuda", grad=False)
    with sdpa.enable() as found:
        _sdpa(case, q, k, v)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = _sdpa(case, q, k, v)
        q.copy_(q.flip(2))
        graph.replay()
        torch.testing.assert_close(out, _sdpa(case, q, k, v), rtol=0, atol=0)
    assert sum(found.served.values()) == 3


def test_compiled_graphs_on_disk_are_told_apart(tmp_path, monkeypatch):
    """A graph traced without strobe holds the op of torch's backend: with strobe it must not be taken from the cache on
    disk, nor the other way.
    """
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    q = torch.randn(1, 2, 8, 16)

    def hits() -> int:
        torch._dynamo.reset()
        counters.clear()
        torch.compile(lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True))(q)
        return counters["aot_autograd"]["autograd_cache_hit"]

    tag = torch.compiler.config.cache_key_tag
    assert (hits(), hits()) == (0, 1)
    with sdpa.enable():
        assert (hits(), hits()) == (0, 1)
        with sdpa.enable():
            assert hits() == 1
    assert hits() == 1 and torch.compiler.config.cache_key_tag == tag
