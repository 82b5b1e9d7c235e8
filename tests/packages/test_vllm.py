"""strobe-vllm: a tiny random model generates through the backend's classes as vLLM calls them, and writes the tokens of
dense attention.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.packages import vllm_double

vllm_double.install()
from strobe_vllm import backend, register  # noqa: E402
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402

import strobe  # noqa: E402
from tests.packages.tiny_model import (  # noqa: E402
    BLOCK,
    BLOCKS,
    HEAD_DIM,
    HEADS,
    HEADS_KV,
    LAYERS,
    Options,
    Scheduler,
    Step,
    TinyModel,
    compare_8_bits,
    entry_point,
    prompts,
)

NEW = 5
# physical orders of the dimensions (block, head, row in the block, keys beside values) of a layer's cache
LAYOUTS = {"rows first": (0, 2, 1, 3), "heads first": (0, 1, 2, 3), "blocks last": (1, 0, 2, 3)}


def the_class():
    register()
    return AttentionBackendEnum.CUSTOM.get_class()


def made(layout: str, dtype: torch.dtype) -> torch.Tensor:
    """A layer's cache [blocks, heads, rows, 2 D] of NaN."""
    order = LAYOUTS[layout]
    shape = (BLOCKS, HEADS_KV, BLOCK, 2 * HEAD_DIM)
    stored = torch.full([shape[n] for n in order], torch.nan).to(dtype)
    return stored.permute([order.index(n) for n in range(4)])


class Engine:
    """Calls the backend as vLLM's runner does. padded: graphs of a fixed number of tokens and requests."""

    def __init__(
        self, model: TinyModel, layout: str = "rows first", kv_cache_dtype: str = "auto", padded: bool = False
    ):
        found = the_class()
        self.model, self.padded = model, padded
        options = model.options
        make = lambda layer: found.get_impl_cls()(
            HEADS, HEAD_DIM, HEAD_DIM**-0.5, HEADS_KV, options.slopes, options.window, kv_cache_dtype, options.softcap,
            AttentionType.DECODER, None, **({"sinks": model.sinks[layer]} if options.sinks else {}),
        )  # fmt: skip
        self.impls = [make(layer) for layer in range(LAYERS)]
        kind = torch.float8_e4m3fn if kv_cache_dtype == "fp8" else torch.float32
        self.caches = [made(layout, kind) for _ in range(LAYERS)]
        if kv_cache_dtype == "fp8":
            self.caches = [cache.view(torch.uint8) for cache in self.caches]  # as vLLM keeps it
        one = lambda size: torch.tensor(size)
        self.layer = SimpleNamespace(_k_scale=one(0.02), _v_scale=one(0.02), _q_scale=one(1.0))
        spec = SimpleNamespace(block_size=BLOCK, num_kv_heads=HEADS_KV, head_size=HEAD_DIM, dtype=kind)
        self.builder = found.get_builder_cls()(spec, ["layer"], SimpleNamespace(), torch.device("cpu"))

    def common(self, step: Step) -> CommonAttentionMetadata:
        offsets = torch.nn.functional.pad(torch.tensor(step.news).cumsum(0), (1, 0)).int()
        lengths, table, longest = torch.tensor(step.lengths, dtype=torch.int32), step.table, max(step.news)
        slots, total = step.slots, len(step.tokens)
        if self.padded:  # to 8 requests and 80 tokens
            offsets = torch.nn.functional.pad(offsets, (0, 9 - len(offsets)), value=total)
            lengths = torch.nn.functional.pad(lengths, (0, 8 - len(lengths)))
            table = torch.nn.functional.pad(table, (0, 0, 0, 8 - len(table)))
            slots, longest = torch.nn.functional.pad(slots, (0, 80 - total), value=-1), 80
            total = 80
        return CommonAttentionMetadata(
            query_start_loc=offsets, query_start_loc_cpu=offsets, seq_lens=lengths, num_reqs=len(lengths),
            num_actual_tokens=total, max_query_len=longest, max_seq_len=2**10, block_table_tensor=table,
            slot_mapping=slots,
        )  # fmt: skip

    def run(self, step: Step, prefix: int = 0) -> torch.Tensor:
        metadata = self.builder.build(prefix, self.common(step))
        tokens, positions = step.tokens, step.positions
        if self.padded:
            tokens, positions = (torch.nn.functional.pad(t, (0, 80 - len(t))) for t in (tokens, positions))

        def attend(layer, q, k, v):
            self.impls[layer].do_kv_cache_update(self.layer, k, v, self.caches[layer], metadata.slot_mapping)
            output = torch.full_like(q, torch.nan)
            return self.impls[layer].forward(self.layer, q, k, v, self.caches[layer], metadata, output)

        return self.model(tokens, positions, attend)

    def serve(self, scheduler: Scheduler) -> None:
        scheduler.serve(self.model, self.run, self.fill_with_nan)

    def fill_with_nan(self, blocks: list[int]) -> None:
        for cache in self.caches:
            cache[blocks] = 0x7F if cache.dtype == torch.uint8 else torch.nan


MODELS = {
    "plain": Options(),
    "window": Options(window=11),
    "window softcap sinks": Options(window=20, softcap=3.0, sinks=True),
    "sinks": Options(sinks=True),
    "alibi": Options(slopes=(0.5, 0.25, 0.125, 0.0625)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_dense_attention(name, layout):
    """Freed blocks hold NaN."""
    model = TinyModel(MODELS[name])
    scheduler = Scheduler(prompts(), NEW, window=model.options.window)
    Engine(model, layout).serve(scheduler)
    scheduler.compare_tokens(model)


@pytest.mark.parametrize("name", ["plain", "window softcap sinks"])
def test_batches_padded_for_a_graph_write_the_same_tokens(name):
    model = TinyModel(MODELS[name])
    found = []
    for padded in (False, True):
        scheduler = Scheduler(prompts(), NEW, window=model.options.window)
        Engine(model, padded=padded).serve(scheduler)
        found.append([scheduler.written(n) for n in range(len(prompts()))])
    assert found[0] == found[1]


def test_an_8_bit_cache_is_within_its_rounding():
    model = TinyModel(Options())
    engine = Engine(model, "heads first", "fp8")
    scheduler = Scheduler(prompts(3), 1, chunk=64)
    step = next(scheduler.steps())
    compare_8_bits(model, step, engine.run(step), 0.02)


def test_a_shared_prefix_is_read_once_and_changes_nothing():
    """Cascade attention: three requests begin with the same block."""
    model = TinyModel(MODELS["sinks"])
    start = prompts(2)[1][:BLOCK]
    requests = [start + more for more in ([1, 2, 3], [4], [5, 6])]
    engine = Engine(model)
    scheduler = Scheduler(requests, 1, chunk=64)
    step = next(scheduler.steps())
    whole = engine.run(step)
    table = step.table.clone()
    table[:, 0] = table[0, 0]
    # a later step: each request has one new token, and the first block is the first request's
    later = step._replace(
        tokens=torch.tensor([7, 8, 9]), positions=torch.tensor([len(r) for r in requests]), news=[1, 1, 1],
        lengths=[len(r) + 1 for r in requests], table=table,
        slots=torch.stack([table[n, len(r) // BLOCK] * BLOCK + len(r) % BLOCK for n, r in enumerate(requests)]).long(),
    )  # fmt: skip
    apart, together = engine.run(later), engine.run(later, prefix=BLOCK)
    assert len(whole) == sum(map(len, requests))
    torch.testing.assert_close(apart, together, rtol=1e-5, atol=1e-5)
    padded = Engine(model, padded=True)
    padded.caches = engine.caches
    torch.testing.assert_close(padded.run(later, prefix=BLOCK)[: len(apart)], apart, rtol=1e-5, atol=1e-5)
    assert strobe.last_errors() == []


def test_metadata_holds_what_vllm_updates_in_place():
    """Nothing is derived from lengths: a graph of any batch replays, and other block tables need no new metadata."""
    engine = Engine(TinyModel(Options()))
    common = engine.common(next(Scheduler(prompts(), NEW).steps()))
    metadata = engine.builder.build(0, common)
    assert metadata.seq_lens is common.seq_lens and metadata.query_start_loc is common.query_start_loc
    other = engine.builder.update_block_table(metadata, common.block_table_tensor.clone(), common.slot_mapping.clone())
    assert other.block_table is not metadata.block_table and other.seq_lens is metadata.seq_lens
    assert engine.builder.get_cudagraph_support(None, None) == AttentionCGSupport.ALWAYS
    engine.builder.update_draft_decode_metadata(metadata)
    with pytest.raises(NotImplementedError, match="causal flag"):
        engine.builder.build(0, replace(common, causal=torch.ones(4, dtype=torch.int32)))


def test_encoders_see_both_sides():
    impl = the_class().get_impl_cls()(
        HEADS, HEAD_DIM, 0.25, HEADS_KV, None, None, "auto", None, AttentionType.ENCODER_ONLY
    )
    engine = Engine(TinyModel(Options()))
    step = next(Scheduler(prompts(3), 1, chunk=64).steps())
    metadata = engine.builder.build(0, engine.common(step))
    q, k, v = (torch.randn(len(step.tokens), heads, HEAD_DIM) for heads in (HEADS, HEADS_KV, HEADS_KV))
    impl.do_kv_cache_update(engine.layer, k, v, torch.empty(0), metadata.slot_mapping)
    got = impl.forward(engine.layer, q, k, v, torch.empty(0), metadata, torch.full_like(q, torch.nan))
    starts = [0, *torch.tensor(step.news).cumsum(0).tolist()]
    for rows in (slice(*pair) for pair in pairwise(starts)):
        one = strobe.attention(q[None, rows], k[None, rows], v[None, rows], scale=0.25)[0]
        torch.testing.assert_close(got[rows], one)


def test_the_profiling_run_and_what_is_refused():
    impl = the_class().get_impl_cls()
    one = impl(HEADS, HEAD_DIM, 0.25, HEADS_KV)
    q = torch.randn(3, HEADS, HEAD_DIM)
    assert not one.forward(None, q, q, q, torch.empty(0), None, torch.full_like(q, torch.nan)).any()
    with pytest.raises(NotImplementedError, match="quantize outputs"):
        one.forward(None, q, q, q, torch.empty(0), None, q, torch.ones(1))


def test_what_the_backend_says_of_itself():
    found = the_class()
    assert found is backend.StrobeAttentionBackend and found.get_name() == "CUSTOM"
    assert found.supports_head_size(64) and not found.supports_head_size(512)
    assert found.supports_block_size(48) and not found.supports_block_size(8)
    assert found.supports_kv_cache_dtype("fp8") and not found.supports_kv_cache_dtype("fp8_e5m2")
    assert found.supports_sink() and found.supports_sliding_window() and found.supports_batch_invariance()
    assert found.supports_compute_capability((8, 0)) and not found.supports_compute_capability((7, 5))


def test_the_entry_point_names_the_function():
    assert entry_point("strobe-vllm", "vllm.general_plugins") is register


@pytest.mark.skipif(not vllm_double.is_real(), reason="vLLM is not importable: there is nothing to compare with")
def test_the_double_has_vllms_signatures():
    from vllm.v1.attention import backend as real

    for name in vllm_double._MODULES["vllm.v1.attention.backend"]:
        own, original = getattr(vllm_double, name), getattr(real, name)
        for key, value in vars(own).items():
            function = getattr(value, "__func__", value)
            if (key.startswith("_") and key != "__init__") or not inspect.isfunction(function):
                continue
            found = inspect.signature(getattr(original, key)).parameters
            expected = inspect.signature(getattr(own, key)).parameters
            more = list(found.values())[len(expected) :]  # that the plugin does not use
            assert list(expected) == list(found)[: len(expected)], (name, key)
            assert all(one.default is not one.empty for one in more), (name, key)
            assert getattr(function, "__isabstractmethod__", False) == getattr(
                inspect.getattr_static(original, key), "__isabstractmethod__", False
            ), (name, key)
    for kind in ("AttentionBackend", "AttentionMetadataBuilder", "AttentionImpl"):
        assert getattr(real, kind).__abstractmethods__ == getattr(vllm_double, kind).__abstractmethods__


@pytest.mark.nightly
@pytest.mark.skipif(not vllm_double.is_real(), reason="vLLM is not importable")
@pytest.mark.parametrize("window", [[], ["24"]], ids=["full", "window"])
def test_vllm_itself_writes_the_tokens_of_transformers(window):
    """The whole engine on a CPU, with chunked prefill and prefix caching."""
    command = [sys.executable, "-m", "tests.packages.vllm_engine", *window]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.strip().splitlines()[-1]) == [True] * 5
