"""accelerate trains a model with windows and sinks under context parallelism, as in one process.

accelerate's own context parallelism refuses such a model. Here accelerate sees data-parallel processes, and a plan
shares the sequence among them. The package is installed beside the environment for this test alone.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import strobe
from strobe.distributed import context_parallel
from strobe.integrations.transformers import context_parallel as by_plan
from tests.distributed.test_transformers_parallel import SEQLEN, STEPS, losses, model
from tests.processes import WORLD, together

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers"),
]
PACKAGES = "accelerate==1.15.0", "psutil>=5"


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("packages"))
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, *PACKAGES]
    installed = subprocess.run(words, capture_output=True, text=True, timeout=120)
    if installed.returncode:
        pytest.skip(f"needs accelerate: {installed.stderr[-200:]}")
    return folder


def _prepared(rank: int, packages: str, **sizes):
    """An Accelerator on this process of a group that exists, and a model and optimizer that it has prepared."""
    sys.path.append(packages)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD, "MASTER_PORT": 1}
    os.environ.update({name: str(value) for name, value in places.items()}, MASTER_ADDR="127.0.0.1")
    from accelerate import Accelerator  # type: ignore[import-not-found]

    accelerator = Accelerator(cpu=True)
    made = model("gpt_oss")
    return accelerator, *accelerator.prepare(made, torch.optim.SGD(made.parameters(), lr=0.3))


def _process(rank: int, folder: str, packages: str) -> None:
    accelerator, made, optimizer = _prepared(rank, packages)
    assert accelerator.num_processes == WORLD
    assert isinstance(made, torch.nn.parallel.DistributedDataParallel)
    found = {}
    for scheme in ("keys", "heads"):
        if found:
            made.module.load_state_dict(model("gpt_oss").state_dict())
        plan = context_parallel(scheme=scheme).plan(strobe.causal(), seqlen=SEQLEN, heads_q=4, heads_kv=2, head_dim=8)
        found[scheme] = []
        for step in range(STEPS):
            ids = (torch.arange(SEQLEN + 1) * (step + 2) % 17)[None]
            with by_plan(plan):
                tokens, shifted = plan.shard(ids[:, :-1]), plan.shard(ids[:, 1:])
                places = {"position_ids": plan.positions()[None], "num_items_in_batch": SEQLEN}
                loss = made(tokens, labels=tokens, shift_labels=shifted, **places, use_cache=False).loss
                accelerator.backward(loss * WORLD)  # accelerate averages gradients over processes
            optimizer.step()
            optimizer.zero_grad()
            found[scheme].append(float(accelerator.reduce(loss.detach(), "sum")))
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")


def test_a_model_with_windows_and_sinks_trains_as_in_one_process(packages, tmp_path):
    together(_process, tmp_path, str(tmp_path), packages)
    alone = losses("gpt_oss", None)
    for scheme, found in torch.load(tmp_path / "found.pt").items():
        torch.testing.assert_close(found, alone, rtol=1e-6, atol=0, msg=lambda text, at=scheme: f"{at}: {text}")


def _refused(rank: int, folder: str, packages: str) -> None:
    _, made, _ = _prepared(rank, packages)
    from accelerate.big_modeling import _attach_context_parallel_hooks  # type: ignore[import-not-found]

    try:
        _attach_context_parallel_hooks(made.module)
    except ValueError as error:
        if rank == 0:
            (Path(folder) / "error").write_text(str(error))


def test_accelerates_own_context_parallelism_refuses_the_model(packages, tmp_path):
    """If it no longer does, the guide must not say so."""
    together(_refused, tmp_path, str(tmp_path), packages)
    assert "sliding_attention" in (tmp_path / "error").read_text()
