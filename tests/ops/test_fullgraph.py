"""Every public function that computes, inside torch.compile: one graph without a break, its gradients, and one graph
for all lengths.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import strobe
import strobe.cute as fa4
import strobe.flash_attn as fa2
import strobe.flash_attn_interface as fa3
from strobe.kernels.runtime import error_flags, workspace


def close(got: Tensor, expected: Tensor) -> None:
    tolerance = 1e-12 if expected.dtype == torch.float64 else 1e-6
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


LENGTHS = (
    (10, 5, 7),
    (3, 9, 12),
)  # of a batch, its rows and its keys: no two alike in the first, or torch takes them for one; none 0 or 1


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


# ---------------------------------------------------------------- inputs, by the lengths of a call

Inputs = Callable[[int, int, int], tuple[Tensor, ...]]


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def dense(batch: int, rows: int, keys: int) -> tuple[Tensor, ...]:
    return _random(batch, rows, 4, 8), _random(batch, keys, 2, 8), _random(batch, keys, 2, 6)


def square(batch: int, rows: int, keys: int) -> tuple[Tensor, ...]:
    k = _random(batch, rows, 2, 8)
    return _random(batch, rows, 4, 8), k, k.flip(1)


def packed(batch: int, rows: int, keys: int) -> tuple[Tensor, ...]:
    """`batch` sequences, the first without rows."""
    q, k, v = (t.flatten(0, 1) for t in dense(batch, rows, keys))
    offsets_q = torch.cat([torch.zeros(2), torch.linspace(rows, batch * rows, batch)[1:]]).to(torch.int32)
    return q, k, v, offsets_q, torch.arange(0, batch * keys + 1, keys, dtype=torch.int32)


def lengths(batch: int, rows: int, keys: int) -> tuple[Tensor, ...]:
    return *dense(batch, rows, keys), torch.arange(batch, dtype=torch.int32) % keys


def ids(batch: int, rows: int, keys: int) -> tuple[Tensor, ...]:
    of = lambda count: (torch.arange(count, dtype=torch.int32) // 3 - (torch.arange(count) > 7).int()).expand(
        batch, count
    )
    return *dense(batch, rows, keys), of(rows), of(keys)


def lists_of_blocks(batch: int, rows: int, keys: int) -> tuple[Tensor, ...]:
    counts = torch.arange(batch * rows, dtype=torch.int32).view(batch, 1, rows) % (keys + 1)
    return *dense(batch, rows, keys), counts, torch.arange(keys, dtype=torch.int32).expand(batch, 1, rows, keys)


def sinks(batch: int, rows: int, keys: int) -> tuple[Tensor, ...]:
    return *dense(batch, rows, keys), torch.linspace(-1, 1, 4, dtype=torch.float64)


def halves(batch: int, rows: int, keys: int) -> tuple[Tensor, ...]:
    """Two partial results of the same queries, the second of which saw nothing for the first row."""
    out, lse = _random(batch, rows, 4, 6), _random(batch, 4, rows)
    nothing = torch.arange(rows) == 0
    return (
        out,
        lse,
        out.flip(1).masked_fill(nothing[:, None, None], 0),
        lse.flip(2).masked_fill(nothing, -torch.inf),
        torch.linspace(-1, 1, 4).double(),
    )


def three(batch: int, rows: int, keys: int) -> tuple[Tensor, ...]:
    return (_random(batch, rows, 3, 4, 8),)


def parts(batch: int, rows: int, keys: int) -> tuple[Tensor, ...]:
    """Four partial results, as FlashAttention-3's combine takes them."""
    return _random(4, batch, rows, 2, 8).float(), _random(4, batch, rows, 2).float()


# ---------------------------------------------------------------- the table


def _varlen(function, **options):
    return lambda q, k, v, offsets_q, offsets_k: function(
        q, k, v, cu_seqlens_q=offsets_q, cu_seqlens_k=offsets_k, **options
    )


def _masked(make):
    return lambda q, k, v, *more: strobe.attention(q, k, v, mask=make(*more) & strobe.causal())


def _merge(out_a, lse_a, out_b, lse_b, _):
    return strobe.merge(strobe.Partial(out_a, lse_a), strobe.Partial(out_b, lse_b))


def _with_sinks(out_a, lse_a, out_b, lse_b, sinks):
    return strobe.with_sinks(strobe.Partial(out_b, lse_b), sinks)


def _in_halves(q, k, v, sinks):
    halves = [strobe.partial_attention(q, k[:, half], v[:, half]) for half in (slice(3), slice(3, None))]
    return strobe.with_sinks(strobe.merge(*halves), sinks).out


def _pages(k, v, lengths):
    """A page a sequence."""
    return strobe.PagedCache(
        k.detach().clone(), v.detach().clone(), torch.arange(len(k), dtype=torch.int32)[:, None], lengths
    )


def _paged(function):
    """Of the packed rows of q, as many for each sequence."""

    def run(q, k, v, lengths):
        offsets = torch.arange(len(q) + 1, dtype=torch.int32) * q.shape[1]
        found = function(q.detach().flatten(0, 1), _pages(k, v, lengths), cu_seqlens_q=offsets)
        return found if isinstance(found, torch.Tensor) else tuple(found)

    return run


def _append(q, k, v, lengths):
    cache = _pages(k, v, lengths)
    strobe.append(cache, q.detach()[:, :1, :2], v.detach()[:, :1])
    return cache.k_pages, cache.v_pages


def _in_8_bits(q, k, v, lengths):
    k8, v8, *scales = strobe.quantize_kv(k.detach(), v.detach())
    return strobe.attention_decode(q.detach(), strobe.DenseCache(k8, v8, lengths, None, *scales))


def _decode(module):
    def step(q, k, v):
        cache_k, cache_v, new = (t.detach().clone() for t in (k, v, q[:, :1, :2]))
        out = module.flash_attn_with_kvcache(q[:, :1], cache_k, cache_v, new, new, cache_seqlens=3, causal=True)
        return out, cache_k, cache_v

    return step


def _gradients_of(module):
    def step(q, k, v):
        q, k, v = (t.detach() for t in (q, k, v))
        out, lse, *_ = module._flash_attn_forward(q, k, v)
        found = [torch.empty_like(t) for t in (q, k, v)]
        return [
            *found,
            module._flash_attn_backward(torch.ones_like(out), q, k, v, out, lse, dq=found[0], dk=found[1], dv=found[2]),
        ]

    return step


def _scored(make: Callable) -> Callable:
    return lambda q, k, v: strobe.attention(q, k, v, score_mod=make(q, k), causal=True)


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [tensor.transpose(1, 2) for tensor in tensors]


TABLE: dict[str, tuple[Callable, Inputs]] = {
    "attention, plain": (strobe.attention, dense),
    "attention, causal": (partial(strobe.attention, causal=True), dense),
    "attention, window and numbers": (partial(strobe.attention, window=(3, 1), softcap=2.0, scale=-0.3), dense),
    "attention, deterministic": (partial(strobe.attention, causal=True, deterministic=True), dense),
    "attention, batch_invariant": (partial(strobe.attention, batch_invariant=True), dense),
    "attention, of one family": (partial(strobe.attention, kernel="cpu"), dense),
    "attention, sinks": (lambda q, k, v, sinks: strobe.attention(q, k, v, causal=True, sinks=sinks), sinks),
    "alibi": (_scored(lambda q, k: strobe.alibi(q.new_ones(q.shape[2]))), dense),
    "relative_bias": (_scored(lambda q, k: strobe.relative_bias(q.new_ones(5))), dense),
    "bias": (_scored(lambda q, k: strobe.bias(q.new_ones(q.shape[1], k.shape[1]))), dense),
    "flex_attention": (lambda *tensors: strobe.flex_attention(*_heads_first(*tensors), enable_gqa=True), dense),
    "partial_attention": (partial(strobe.partial_attention, causal=True), dense),
    "attention_varlen": (_varlen(strobe.attention_varlen, causal=True), packed),
    "attention_varlen, promised": (
        _varlen(strobe.attention_varlen, window=(2, 0), max_seqlen_q=99, max_seqlen_k=99),
        packed,
    ),
    "partial_attention_varlen": (_varlen(strobe.partial_attention_varlen), packed),
    "merge": (_merge, halves),
    "with_sinks": (_with_sinks, halves),
    "partial_attention, merge and with_sinks": (_in_halves, sinks),
    "full": (_masked(strobe.full), dense),
    "causal": (lambda q, k, v: strobe.attention(q, k, v, mask=strobe.causal()), dense),
    "window": (_masked(lambda: strobe.window(3, None)), dense),
    "prefix_causal": (lambda q, k, v: strobe.attention(q, k, v, mask=strobe.prefix_causal(2)), dense),
    "prefix_causal, of a tensor": (
        lambda q, k, v, n: strobe.attention(q, k, v, mask=strobe.prefix_causal(n) & strobe.key_lengths(n)),
        lengths,
    ),
    "key_lengths": (_masked(strobe.key_lengths), lengths),
    "documents": (_masked(strobe.documents), ids),
    "block_lists": (_masked(lambda counts, blocks: strobe.block_lists(counts, blocks, block_size=1)), lists_of_blocks),
    "attention_decode": (lambda q, k, v, n: strobe.attention_decode(q.detach(), _pages(k, v, n)), lengths),
    "partial_attention_decode": (
        lambda q, k, v, n: strobe.partial_attention_decode(q.detach(), _pages(k, v, n), window=(3, 0)),
        lengths,
    ),
    "attention_paged": (_paged(strobe.attention_paged), lengths),
    "attention_paged, lse": (_paged(partial(strobe.attention_paged, window=(3, 0), return_lse=True)), lengths),
    "partial_attention_paged": (_paged(strobe.partial_attention_paged), lengths),
    "append": (_append, lengths),
    "quantize_kv": (_in_8_bits, lengths),
    "fa2.flash_attn_func": (partial(fa2.flash_attn_func, causal=True, window_size=(3, 0), softcap=2.0), dense),
    "fa2.flash_attn_func, lse": (partial(fa2.flash_attn_func, return_attn_probs=True), dense),
    "fa2.flash_attn_qkvpacked_func": (partial(fa2.flash_attn_qkvpacked_func, causal=True), three),
    "fa2.flash_attn_kvpacked_func": (
        lambda q, k, v: fa2.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), causal=True),
        square,
    ),
    "fa2.flash_attn_varlen_func": (lambda *t: fa2.flash_attn_varlen_func(*t, 99, 99, causal=True), packed),
    "fa2.flash_attn_varlen_kvpacked_func": (
        lambda q, k, v, *offsets: fa2.flash_attn_varlen_kvpacked_func(
            q, torch.stack([k, k], 1), *offsets, 99, 99, causal=True
        ),
        packed,
    ),
    "fa2.flash_attn_varlen_qkvpacked_func": (
        lambda q, k, v, offsets, _: fa2.flash_attn_varlen_qkvpacked_func(
            torch.stack([q, q, q], 1), offsets, 99, causal=True
        ),
        packed,
    ),
    "fa2.flash_attn_with_kvcache": (_decode(fa2), square),
    "fa3.flash_attn_func": (partial(fa3.flash_attn_func, causal=True, return_attn_probs=True), dense),
    "fa3.flash_attn_qkvpacked_func": (lambda q: fa3.flash_attn_qkvpacked_func(q.flatten(2, 3), num_heads_q=8), three),
    "fa3.flash_attn_varlen_func": (
        lambda *t: fa3.flash_attn_varlen_func(*t, 99, 99, causal=True, deterministic=True),
        packed,
    ),
    "fa3.flash_attn_with_kvcache": (_decode(fa3), square),
    "fa3.flash_attn_combine": (fa3.flash_attn_combine, parts),
    "fa3._flash_attn_forward": (lambda q, k, v: fa3._flash_attn_forward(q, k, v, causal=True)[:2], dense),
    "fa3._flash_attn_backward": (_gradients_of(fa3), dense),
    "fa3.get_scheduler_metadata": (lambda q, k, v, n: fa3.get_scheduler_metadata(len(q), 1, 99, 4, 2, 8, n), lengths),
    "fa3.FlashAttnFunc": (lambda q, k, v: fa3.FlashAttnFunc.apply(q, k, v, None, True), dense),
    "fa3.FlashAttnQKVPackedFunc": (lambda q: fa3.FlashAttnQKVPackedFunc.apply(q, None, True), three),
    "fa3.FlashAttnVarlenFunc": (lambda *t: fa3.FlashAttnVarlenFunc.apply(*t, None, None, 99, 99, None, True), packed),
    "fa3.flash_attn_varlen_func, seqused": (
        lambda *t: fa3.flash_attn_varlen_func(*t, 99, 99, *(o.diff() // 2 for o in t[3:])),
        packed,
    ),
    "fa4.flash_attn_func": (
        lambda q, k, v, sink: fa4.flash_attn_func(q, k, v, learnable_sink=sink, window_size=(3, 0)),
        sinks,
    ),
    "fa4.flash_attn_func, a window behind the diagonal": (partial(fa4.flash_attn_func, window_size=(-2, 3)), dense),
    "fa4.flash_attn_varlen_func": (_varlen(fa4.flash_attn_varlen_func, max_seqlen_q=99, max_seqlen_k=99), packed),
}

# What Dynamo traces differs from row to row; what AOTAutograd makes of it is the same few ops, and costs twice the time
THROUGH_AOT = (
    "attention, causal",
    "attention, deterministic",
    "attention, sinks",
    "partial_attention",
    "attention_varlen",
    "partial_attention_varlen",
    "key_lengths",
    "documents",
)

COMPUTE_NOTHING = {
    "explain", "explain_decode", "explain_paged", "explain_varlen", "last_errors", "mask_mod", "score_mod", "supports",
    "warmup",
}  # fmt: skip


# ---------------------------------------------------------------- the tests


def _both_ways(function: Callable, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """All that a function gives, and the gradients of its leaves through each part of that."""
    fresh = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
    found = function(*fresh)
    found = [found] if isinstance(found, Tensor) else list(found)
    upstream = [torch.linspace(0.5, 1, part.numel(), dtype=part.dtype).view(part.shape) for part in found]
    wanted = [
        (part, weight.masked_fill(part == -torch.inf, 0)) for part, weight in zip(found, upstream) if part.requires_grad
    ]
    if not wanted:
        return found
    outputs, upstream = zip(*wanted)
    leaves = [t for t in fresh if t.requires_grad]
    return found + list(torch.autograd.grad(outputs, leaves, upstream, allow_unused=True, materialize_grads=True))


def test_every_public_function_is_in_the_table():
    tried = {name.partition(",")[0] for name in TABLE}
    public = {name for name in strobe.__all__ if inspect.isfunction(getattr(strobe, name))}
    assert public - COMPUTE_NOTHING == {name for name in tried if "." not in name}
    for library, module in (("fa2", fa2), ("fa3", fa3), ("fa4", fa4)):
        assert set(module.__all__) == {name.removeprefix(f"{library}.") for name in tried if name.startswith(library)}


@pytest.mark.nightly_cases("documents")
@pytest.mark.parts(3, seed=130439501)
@pytest.mark.parametrize("name", TABLE)
def test_one_graph_for_all_lengths_with_gradients(name):
    function, inputs = TABLE[name]
    counter = CompileCounterWithBackend("aot_eager" if name in THROUGH_AOT else "eager")
    compiled = torch.compile(lambda *tensors: function(*tensors), fullgraph=True, dynamic=True, backend=counter)
    for sizes in LENGTHS:
        tensors = inputs(*sizes)
        for got, expected in zip(_both_ways(compiled, tensors), _both_ways(function, tensors), strict=True):
            close(got, expected)
    assert counter.frame_count == 1
    assert strobe.last_errors() == []


# ---------------------------------------------------------------- CUDA graphs


def _trained(compiled: Callable, seed: int) -> list[Tensor]:
    """One step of a compiled layer on fresh contents: its result and its gradients, out of the graph's memory."""
    generator = torch.Generator("cuda").manual_seed(seed)
    tensors = [
        torch.randn(2, 300, 4, 64, device="cuda", dtype=torch.bfloat16, generator=generator, requires_grad=True)
        for _ in range(3)
    ]
    torch.compiler.cudagraph_mark_step_begin()
    out = compiled(*tensors)
    return [t.clone() for t in (out, *torch.autograd.grad(out, tensors, torch.ones_like(out)))]


PERSISTENT = ((error_flags, "_words"), (workspace, "_counters"), (workspace, "_reserves"))
_MADE: list[object] = []  # not let go of: launches that are noted know only the address


@pytest.fixture
def nothing_kept(monkeypatch):
    """What lasts as long as the process is made by the test, as if its call were the process's first."""
    for module, name in PERSISTENT:
        monkeypatch.setattr(module, name, {})
    yield
    _MADE.extend(getattr(module, name) for module, name in PERSISTENT)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ("attention", "attention_varlen", "mask inside", "partial_attention and merge"))
def test_reduce_overhead_replays_forward_and_backward(name, nothing_kept):
    """Six steps of other contents: the first ones record CUDA graphs, the rest replay them; none is split by an op that
    may not be captured.
    """
    offsets = torch.tensor([0, 100, 100, 600], device="cuda", dtype=torch.int32)
    halves = slice(0, 111), slice(111, None)
    function = {
        "attention": lambda q, k, v: strobe.attention(q * 1.0, k, v, causal=True),
        "attention_varlen": lambda *qkv: strobe.attention_varlen(
            *(t.flatten(0, 1) * 1.0 for t in qkv), cu_seqlens_q=offsets, causal=True
        ),
        "mask inside": lambda q, k, v: strobe.attention(q * 1.0, k, v, mask=strobe.causal() & strobe.prefix_causal(9)),
        "partial_attention and merge": lambda q, k, v: (
            strobe.merge(*(strobe.partial_attention(q * 1.0, k[:, h], v[:, h]) for h in halves)).out
        ),
    }[name]
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(function, fullgraph=True, mode="reduce-overhead")
    for seed in range(6):
        for got, expected in zip(_trained(compiled, seed), _trained(function, seed), strict=True):
            assert got.isfinite().all()
            torch.testing.assert_close(
                got, expected, rtol=2**-7, atol=2**-7
            )  # sums in no fixed order, rounded to bfloat16: an ulp either way
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.gpu
def test_reduce_overhead_replays_a_decode(nothing_kept):
    """Of more keys than a cluster takes, so that shares are counted in memory that lasts."""
    k, v = (torch.randn(2, 32768, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    lengths = torch.tensor([32768, 77], device="cuda", dtype=torch.int32)
    function = lambda q: strobe.attention_decode(q * 1.0, strobe.DenseCache(k, v, lengths))
    compiled = torch.compile(function, fullgraph=True, mode="reduce-overhead")
    for seed in range(6):
        q = torch.randn(
            2, 1, 8, 128, device="cuda", dtype=torch.bfloat16, generator=torch.Generator("cuda").manual_seed(seed)
        )
        torch.compiler.cudagraph_mark_step_begin()
        torch.testing.assert_close(compiled(q).clone(), function(q), rtol=2**-7, atol=2**-7)
    assert all(getattr(module, name) for module, name in PERSISTENT)
