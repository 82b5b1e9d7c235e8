"""transformers models under context parallelism: windows, sinks and documents, trained as in one process."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import strobe
import strobe.integrations.transformers
from strobe.distributed import Plan
from tests.processes import together

pytestmark = [
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers"),
]
SEQLEN, STEPS = 26, 3
DOCUMENTS = torch.tensor([[0] * 9 + [1] * 11 + [2] * 6], dtype=torch.int32)


def model(kind: str):
    import transformers

    strobe.integrations.transformers.register()
    sizes: dict[str, Any] = {
        "vocab_size": 17,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 7,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    torch.manual_seed(3)
    if kind == "gpt_oss":  # a windowed and a full layer, both with sinks
        config = transformers.GptOssConfig(**sizes, num_local_experts=2, num_experts_per_tok=1)
        made = transformers.GptOssForCausalLM
    else:
        config, made = transformers.MistralConfig(**sizes), transformers.MistralForCausalLM
    ways = {"attn_implementation": "strobe", "experts_implementation": "eager"}  # grouped products take no float64
    return made._from_config(config, **ways).double().train()


def losses(kind: str, plan: Plan | None) -> list[float]:
    made = model(kind)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.3)
    documents = DOCUMENTS if kind == "mistral" else DOCUMENTS * 0
    positions = torch.cat([torch.arange(count) for count in documents.unique(return_counts=True)[1].tolist()])
    shard = (lambda x: x) if plan is None else plan.shard
    found = []
    for step in range(STEPS):
        ids = (torch.arange(SEQLEN + 1) * (step + 2) % 17)[None]
        inputs = {
            "input_ids": shard(ids[:, :-1]),
            "labels": shard(ids[:, :-1]),
            "shift_labels": shard(ids[:, 1:]),
            "position_ids": shard(positions[None]),
            "num_items_in_batch": SEQLEN,
        }
        optimizer.zero_grad()
        if plan is None:
            loss = made(**inputs, use_cache=False).loss
            loss.backward()
        else:
            with strobe.integrations.transformers.context_parallel(plan):
                loss = made(**inputs, use_cache=False).loss
                loss.backward()
        loss = loss.detach()
        if plan is not None:
            for tensor in (loss, *(weight.grad for weight in made.parameters() if weight.grad is not None)):
                dist.all_reduce(tensor)
        optimizer.step()
        found.append(float(loss))
    return found


def _process(rank: int, folder: str) -> None:
    found = {}
    for kind in ("gpt_oss", "mistral"):
        mask = strobe.documents(DOCUMENTS) if kind == "mistral" else strobe.causal()
        for scheme in ("keys", "heads"):
            parallel = strobe.distributed.context_parallel(scheme=scheme)
            plan = parallel.plan(strobe.causal() & mask, seqlen=SEQLEN, heads_q=4, heads_kv=2, head_dim=8)
            found[kind, scheme] = losses(kind, plan)
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    together(_process, folder, str(folder))
    return torch.load(folder / "found.pt")


@pytest.mark.parametrize("kind", ["gpt_oss", "mistral"])
def test_a_model_trains_as_in_one_process(kind, found):
    alone = losses(kind, None)
    assert alone[-1] != pytest.approx(alone[0], rel=1e-3)
    for scheme in ("keys", "heads"):
        torch.testing.assert_close(found[kind, scheme], alone, rtol=1e-6, atol=0)


@pytest.fixture
def plan():
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield strobe.distributed.context_parallel().plan(strobe.causal(), seqlen=4, heads_q=4, heads_kv=2)
    dist.destroy_process_group()


def test_what_local_rows_cannot_tell_is_refused(plan):
    made, ids = model("gpt_oss"), torch.ones(1, 4, dtype=torch.long)
    with strobe.integrations.transformers.context_parallel(plan):
        made(ids, attention_mask=torch.ones(1, 4, dtype=torch.long), use_cache=False)
        with pytest.raises(strobe.UnsupportedProblem, match="attention_mask"):
            made(ids, attention_mask=torch.tensor([[1, 1, 1, 0]]), use_cache=False)
    wrong: Any = "keys"
    with pytest.raises(TypeError, match="plan"), strobe.integrations.transformers.context_parallel(wrong):
        pass
