"""strobe-sglang: a tiny random model generates through the backend as SGLang calls it, and writes the tokens of dense
attention.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch

from tests.packages import sglang_double

sglang_double.install()
from sglang.srt.arg_groups import choices  # noqa: E402
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS  # noqa: E402
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from strobe_sglang import register  # noqa: E402

import strobe  # noqa: E402
from tests.packages.tiny_model import (  # noqa: E402
    BLOCK,
    BLOCKS,
    HEAD_DIM,
    HEADS,
    HEADS_KV,
    LAYERS,
    MOST_BLOCKS,
    Options,
    Scheduler,
    Step,
    TinyModel,
    compare_8_bits,
    entry_point,
    prompts,
)

NEW = 5
MODELS = {
    "plain": Options(),
    "window softcap sinks": Options(window=20, softcap=3.0, sinks=True),
}


class WindowPool:
    """SGLang's pool for models with windows, reduced to the methods that a backend calls. The pool of window layers
    holds keys in other slots.
    """

    def __init__(self, pool):
        self.pool, self.order = pool, torch.arange(BLOCKS * BLOCK).view(BLOCKS, BLOCK).flip(0).flatten()

    def translate_loc_from_full_to_swa(self, places):
        return self.order[places.long()]

    def get_kv_buffer(self, layer_id):
        return self.pool.get_kv_buffer(layer_id)

    def set_kv_buffer(self, layer, where, k, v, *scales):
        assert torch.equal(where.swa_loc, self.order[where.loc])
        self.pool.set_kv_buffer(layer, type(where)(where.swa_loc), k, v, *scales)


class Engine:
    """Calls the backend as SGLang's runner does."""

    def __init__(self, model: TinyModel, page_size: int = BLOCK, dtype: torch.dtype = torch.float32, apart=False):
        register()
        self.model = model
        self.requests = ReqToTokenPool(8, MOST_BLOCKS * BLOCK, "cpu", False)
        pool = MHATokenToKVPool((BLOCKS - 1) * BLOCK, BLOCK, dtype, HEADS_KV, HEAD_DIM, LAYERS, "cpu", False)
        for n in range(LAYERS):
            for tensor in pool.get_kv_buffer(n):
                tensor.view(torch.uint8).fill_(0x7F if dtype == torch.float8_e4m3fn else 0xFF)  # NaN
        self.pool = WindowPool(pool) if apart else pool
        runner = SimpleNamespace(
            page_size=page_size, token_to_kv_pool=self.pool, req_to_token_pool=self.requests, use_mla_backend=False,
            server_args=SimpleNamespace(enable_deterministic_inference=False),
        )  # fmt: skip
        self.backend = ATTENTION_BACKENDS["strobe"](runner)
        options = model.options
        window = -1 if options.window is None else options.window - 1
        self.layers = [
            RadixAttention(HEADS, HEAD_DIM, HEAD_DIM**-0.5, HEADS_KV, n, options.softcap or 0.0, -1, window)
            for n in range(LAYERS)
        ]

    def batch(self, step: Step) -> SimpleNamespace:
        """Row n + 1 of the request pool is that of a step's n-th request, since row 0 is padding."""
        news, lengths = (torch.tensor(values) for values in (step.news, step.lengths))
        rows = torch.arange(len(news)) + 1
        places = (step.table.long()[:, :, None] * BLOCK + torch.arange(BLOCK)).flatten(1)
        self.requests.req_to_token[rows] = places.int()
        mode = ForwardMode.DECODE if max(step.news) == 1 else ForwardMode.MIXED
        return SimpleNamespace(
            forward_mode=mode, batch_size=len(news), seq_lens=lengths, req_pool_indices=rows, out_cache_loc=step.slots,
            extend_seq_lens=news, extend_seq_lens_cpu=step.news, spec_info=None,
        )  # fmt: skip

    def run(self, step: Step, batch: SimpleNamespace | None = None) -> torch.Tensor:
        """Logits of a step. batch: given if its metadata is ready."""
        if batch is None:
            batch = self.batch(step)
            self.backend.init_forward_metadata(batch)

        def attend(layer, q, k, v):
            more = {"sinks": self.model.sinks[layer]} if self.model.options.sinks else {}
            return self.backend.forward(q.flatten(1), k, v, self.layers[layer], batch, **more)

        return self.model(step.tokens, step.positions, attend)


@pytest.mark.parametrize("page_size", [1, BLOCK])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_dense_attention(name, page_size):
    model = TinyModel(MODELS[name])
    scheduler = Scheduler(prompts(), NEW)
    scheduler.serve(model, Engine(model, page_size).run)
    scheduler.compare_tokens(model)


@pytest.mark.parametrize("page_size", [1, BLOCK])
def test_layers_with_a_window_read_a_pool_of_their_own(page_size):
    model = TinyModel(MODELS["window softcap sinks"])
    Scheduler(prompts(4), NEW).serve(model, Engine(model, page_size, apart=True).run)


@pytest.mark.parametrize("apart", [False, True], ids=["one pool", "window pool"])
def test_a_graphs_metadata_is_static_and_recomputed(apart):
    """The tensors of a captured decode stay where they are, and hold each batch's values after init_..._in_graph."""
    model = TinyModel(MODELS["window softcap sinks"])
    engine = Engine(model, apart=apart)
    backend = engine.backend
    backend.init_cuda_graph_state(4, 4)
    assert backend.get_cuda_graph_seq_len_fill_value() == 1
    scheduler, addresses = Scheduler(prompts(4), 7, chunk=64), []
    for step in scheduler.steps():
        if max(step.news) == 1 and len(step.news) == 4:
            batch = engine.batch(step)
            backend.init_forward_metadata_out_graph(batch, in_capture=not addresses)
            backend.init_forward_metadata_in_graph(batch)
            metadata = backend.forward_metadata
            addresses.append((metadata.seqlens.data_ptr(), metadata.page_table.data_ptr()))
            logits = engine.run(step, batch)
            scheduler.compare(step, logits, model)
        else:
            logits = engine.run(step)
        scheduler.take(step, logits)
    assert len(addresses) > 3 and len(set(addresses)) == 1
    prefill = SimpleNamespace(forward_mode=ForwardMode.EXTEND, batch_size=1, spec_info=None)
    with pytest.raises(ValueError, match="graphs hold decodes"):
        backend.init_forward_metadata_out_graph(prefill)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_drafted_tokens_are_verified_in_one_batch(graph):
    """Three drafted tokens of each request: seq_lens holds the keys before them, as in SGLang's verification."""
    model = TinyModel(Options())
    engine = Engine(model)
    scheduler = Scheduler(prompts(3), 8, chunk=64)
    steps = scheduler.steps()
    step = next(steps)
    scheduler.take(step, engine.run(step))
    drafts = [[*scheduler.sequences[n], 3, 5] for n in range(3)]
    lengths = [len(draft) for draft in drafts]
    tables = next(steps).table  # its blocks hold the new tokens
    places = [[tables[n, p // BLOCK] * BLOCK + p % BLOCK for p in range(lengths[n] - 3, lengths[n])] for n in range(3)]
    assert all(place >= BLOCK for row in places for place in row)
    verify = Step(
        [0, 1, 2], torch.tensor([draft[-3:] for draft in drafts]).flatten(),
        torch.tensor([list(range(n - 3, n)) for n in lengths]).flatten(), [3] * 3, lengths, tables,
        torch.tensor(places).flatten(),
    )  # fmt: skip
    batch = engine.batch(verify)
    batch.forward_mode, batch.seq_lens = ForwardMode.TARGET_VERIFY, batch.seq_lens - 3
    batch.spec_info = SimpleNamespace(draft_token_num=3, topk=1)
    if graph:
        engine.backend.init_cuda_graph_state(3, 9)
        engine.backend.init_forward_metadata_out_graph(batch, in_capture=True)
        engine.backend.init_forward_metadata_in_graph(batch)
    else:
        engine.backend.init_forward_metadata(batch)
    logits = engine.run(verify, batch).unflatten(0, (3, 3))
    for n, draft in enumerate(drafts):
        exact = model(torch.tensor(draft), torch.arange(len(draft)), model.dense)[-3:]
        torch.testing.assert_close(logits[n], exact, rtol=1e-4, atol=1e-4)
    batch.spec_info.topk = 4
    with pytest.raises(ValueError, match="chains of drafted tokens"):
        engine.backend.init_forward_metadata(batch)


def test_an_8_bit_cache_is_within_its_rounding():
    model = TinyModel(Options())
    engine = Engine(model, dtype=torch.float8_e4m3fn)
    for layer in engine.layers:
        layer.k_scale = layer.v_scale = torch.tensor(0.02)
    step = next(Scheduler(prompts(3), 1, chunk=64).steps())
    compare_8_bits(model, step, engine.run(step), 0.02)


@pytest.mark.parametrize("kind", ["DECODER_BIDIRECTIONAL", "ENCODER_ONLY"])
@pytest.mark.parametrize("window", [None, 4])
def test_types_of_attention(kind, window):
    """Prompts of both types see later keys, as in SGLang's FA3 backend. Drafted tokens see what a decode sees."""
    engine = Engine(TinyModel(Options(window=window)))
    step = next(Scheduler(prompts(1), 1, chunk=64).steps())
    batch = engine.batch(step)
    layer = engine.layers[0]
    layer.attn_type = AttentionType[kind]
    q, k, v = (torch.randn(len(step.tokens), heads, HEAD_DIM) for heads in (HEADS, HEADS_KV, HEADS_KV))
    sides = None if window is None else (window - 1, window - 1)
    exact = lambda causal: strobe.attention(q[None], k[None], v[None], causal=causal, window=sides)[0].flatten(1)

    engine.backend.init_forward_metadata(batch)
    got = engine.backend.forward_extend(q.flatten(1), k, v, layer, batch)
    torch.testing.assert_close(got, exact(False))
    batch.forward_mode, batch.seq_lens = ForwardMode.TARGET_VERIFY, batch.seq_lens - len(q)
    batch.spec_info = SimpleNamespace(draft_token_num=len(q), topk=1)
    engine.backend.init_forward_metadata(batch)
    got = engine.backend.forward_extend(q.flatten(1), k, v, layer, batch)
    torch.testing.assert_close(got, exact(kind == "DECODER_BIDIRECTIONAL"))
    last = SimpleNamespace(
        forward_mode=ForwardMode.DECODE, batch_size=1, seq_lens=torch.tensor([len(q) - 1]),
        req_pool_indices=batch.req_pool_indices, out_cache_loc=batch.out_cache_loc[-2:-1], spec_info=None,
    )  # fmt: skip
    engine.backend.init_forward_metadata(last)
    got = engine.backend.forward_decode(q[-2:-1].flatten(1), k[-2:-1], v[-2:-1], layer, last)
    torch.testing.assert_close(got, exact(True)[-2:-1])


def test_the_log_sum_exp_of_a_layer():
    """SGLang asks for lse [T, H], for example to merge the keys of several ranks."""
    model = TinyModel(MODELS["window softcap sinks"])
    engine = Engine(model)
    step = next(Scheduler(prompts(3), 1, chunk=64).steps())
    batch = engine.batch(step)
    engine.backend.init_forward_metadata(batch)
    q, k, v = (torch.randn(len(step.tokens), heads, HEAD_DIM) for heads in (HEADS, HEADS_KV, HEADS_KV))
    call = lambda **more: engine.backend.forward(q.flatten(1), k, v, engine.layers[0], batch, sinks=sinks, **more)
    sinks = model.sinks[0]
    plain = call(return_lse=False)
    out, lse = call(return_lse=True)
    offsets = torch.tensor([0, *step.news]).cumsum(0).int()
    part = strobe.partial_attention_varlen(
        q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, causal=True, window=(19, 0), softcap=3.0
    )
    exact = strobe.with_sinks(part, sinks)
    assert torch.equal(out, plain) and lse.is_contiguous() and lse.shape == (len(q), HEADS)
    torch.testing.assert_close((out, lse), (exact.out.flatten(1), exact.lse.T))


def test_what_is_refused():
    engine = Engine(TinyModel(Options()))
    q, batch = torch.randn(1, HEADS * HEAD_DIM), SimpleNamespace(out_cache_loc=torch.tensor([20]))
    layer = engine.layers[0]
    with pytest.raises(ValueError, match="init_forward_metadata runs before"):
        engine.backend.forward_decode(q, None, None, layer, batch)
    with pytest.raises(ValueError, match="does not know q_rope"):
        engine.backend.forward_decode(q, None, None, layer, batch, q_rope=q)
    layer.xai_temperature_len = 5
    with pytest.raises(ValueError, match="xai_temperature_len"):
        engine.backend.forward_decode(q, None, None, layer, batch)
    with pytest.raises(ValueError, match="no MLA"):
        ATTENTION_BACKENDS["strobe"](SimpleNamespace(use_mla_backend=True))


def test_the_name_is_a_choice_of_the_server():
    register()
    register()
    assert choices.ATTENTION_BACKEND_CHOICES.count("strobe") == 1
    assert choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.count("strobe") == 1


def test_the_entry_point_names_the_function():
    assert entry_point("strobe-sglang", "sglang.srt.plugins") is register


@pytest.mark.skipif(not sglang_double.is_real(), reason="SGLang is not importable: there is nothing to compare with")
def test_the_double_has_sglangs_signatures():
    for module, names in sglang_double._MODULES.items():
        real = __import__(module, fromlist=["*"])
        for name, own in names.items():
            if not isinstance(own, type):
                continue
            for key, function in vars(own).items():
                if not inspect.isfunction(function) or (key.startswith("_") and key != "__init__"):
                    continue
                expected = list(inspect.signature(function).parameters)
                found = list(inspect.signature(getattr(getattr(real, name), key)).parameters)
                assert expected == found[: len(expected)], (name, key)
