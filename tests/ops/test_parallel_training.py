"""A transformer is trained over two gloo processes, sharded in every way that torch has, and comes out as one process
trains it.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import strobe
from strobe.kernels import kernels
from strobe.testing.poison import fill_with_poison, patched_empty
from tests.processes import WORLD, together

pytestmark = [
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
    pytest.mark.parts(2, "training"),  # one start of two processes serves all of them
]

STEPS, LAYERS = 3, 2
BATCH, LENGTH, WIDTH, HEADS, HEADS_KV, HEAD_DIM = 4, 7, 24, 4, 2, 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        linear = partial(nn.Linear, bias=False)
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (linear(WIDTH, heads * HEAD_DIM) for heads in (HEADS, HEADS_KV, HEADS_KV))
        self.out, self.up, self.down = (
            linear(HEADS * HEAD_DIM, WIDTH),
            linear(WIDTH, 2 * WIDTH),
            linear(2 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.before_attention(x)
        q, k, v = (project(y).unflatten(-1, (-1, HEAD_DIM)) for project in (self.q, self.k, self.v))
        x = x + self.out(strobe.attention(q, k, v, causal=True, window=(4, None)).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.before_mlp(x))))


def _model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(*(Block() for _ in range(LAYERS))).double()


def _data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(11)
    return [tuple(torch.randn(2, BATCH, LENGTH, WIDTH, generator=generator, dtype=torch.float64)) for _ in range(STEPS)]


def _train(model: nn.Module, mine: slice) -> list[Tensor]:
    """The losses of three steps on these entries of each batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for x, target in _data():
        loss = nn.functional.mse_loss(model(x[mine]), target[mine])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


# ---------------------------------------------------------------- the ways; each changes the model in place


def _keep_attention(_, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op == torch.ops.strobe.forward.default else CheckpointPolicy.PREFER_RECOMPUTE


def _checkpointed(model: nn.Sequential, **options) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

    for index, block in enumerate(model):
        model[index] = checkpoint_wrapper(block, CheckpointImpl.NO_REENTRANT, **options)


def _shard(model: nn.Sequential, mesh) -> None:
    from torch.distributed.fsdp import fully_shard

    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _compile(model: nn.Sequential) -> None:
    for block in model:
        block.compile(fullgraph=True, backend="aot_eager")


def _split_heads(model: nn.Sequential, mesh, local: bool) -> None:
    """Projections by columns, so that a process has half of the heads, as plain tensors or as DTensors; their sum by
    rows.
    """
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    heads = ColwiseParallel(use_local_output=local)
    summed = RowwiseParallel(input_layouts=Shard(-1))
    plan = {"q": heads, "k": heads, "v": heads, "out": summed, "up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model:
        parallelize_module(block, mesh, plan)


def _apply(way: str, model: nn.Sequential, mesh) -> None:
    if "tensor parallel" in way:
        _split_heads(model, mesh, local="DTensor" not in way)
    if "all again" in way:
        _checkpointed(model)
    if "attention kept" in way:
        _checkpointed(model, context_fn=partial(create_selective_checkpoint_contexts, _keep_attention))
    if "compiled" in way:
        _compile(model)
    if "fully_shard" in way:
        _shard(model, mesh)


# the way: how often each process runs the attention of a layer in a step, forward and backward
WAYS = {
    "tensor parallel of DTensors, compiled": (
        1,
        1,
    ),  # first: torch.compile, and nobody before it, meets the first DTensor
    "fully_shard": (1, 1),
    "fully_shard, all again": (2, 1),
    "fully_shard, attention kept": (1, 1),
    "fully_shard, compiled": (1, 1),
    "fully_shard, compiled, attention kept": (1, 1),
    "tensor parallel": (1, 1),
    "tensor parallel of DTensors": (1, 1),
    "tensor parallel, attention kept": (1, 1),
    "tensor parallel, compiled": (1, 1),
}


# ---------------------------------------------------------------- one process, and two


def _count(runs: list[str]) -> None:
    """Every run of a CPU kernel adds its direction and the heads it was given to `runs`."""
    for direction in ("forward", "backward"):
        kernel = kernels(direction)[-1]
        real = kernel.run
        kernel.run = lambda plan, call, *rest, real=real, direction=direction: (
            runs.append(f"{direction} {tuple(call.q.shape)}") or real(plan, call, *rest)
        )


def _work(rank: int, folder: str) -> None:
    from torch.distributed.tensor import DTensor, init_device_mesh

    mesh, runs = init_device_mesh("cpu", (WORLD,)), []
    _count(runs)
    half = BATCH // WORLD
    for way in WAYS:
        torch.compiler.reset()
        model = _model()
        _apply(way, model, mesh)
        runs.clear()
        with patched_empty(fill_with_poison):
            losses = _train(model, slice(rank * half, (rank + 1) * half) if "fully_shard" in way else slice(None))
        loss = torch.stack(losses)
        dist.all_reduce(loss)
        weights = {
            name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", ""): p
            for name, p in model.named_parameters()
        }
        sharded = sorted(name for name, p in weights.items() if isinstance(p, DTensor) and p.placements[0].is_shard())
        whole = {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for name, p in weights.items()}
        if rank == 0:
            torch.save(
                {"losses": loss / WORLD, "weights": whole, "sharded": sharded, "runs": runs}, Path(folder) / f"{way}.pt"
            )


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Where two processes left what they trained, each way: one start of both serves all tests."""
    folder = tmp_path_factory.mktemp("trained")
    together(_work, folder, str(folder))
    return folder


@pytest.fixture(scope="module")
def alone() -> tuple[Tensor, dict[str, Tensor]]:
    model = _model()
    losses = torch.stack(_train(model, slice(None)))
    return losses, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_train_what_one_does(way, trained, alone):
    """Sums over processes are in another order: roundings of float64, which three steps of AdamW do not make larger
    than 1e-10.
    """
    found = torch.load(trained / f"{way}.pt")
    losses, weights = alone
    torch.testing.assert_close(found["losses"], losses, rtol=1e-12, atol=1e-12)
    assert losses[-1] < losses[0] and found["weights"].keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(
            found["weights"][name], weight, rtol=0, atol=1e-10, msg=lambda words, name=name: f"{name}: {words}"
        )


@pytest.mark.parametrize("way", WAYS)
def test_each_process_had_its_share(way, trained):
    """Which path ran: what was sharded, what of the attention each process computed, and how often."""
    found = torch.load(trained / f"{way}.pt")
    whole = "fully_shard" in way
    matrices = ("q", "k", "v", "out", "up", "down")
    expected = [name for name in _model().state_dict() if whole or name.split(".")[1] in matrices]
    assert found["sharded"] == sorted(expected)
    shape = (BATCH // WORLD, LENGTH, HEADS, HEAD_DIM) if whole else (BATCH, LENGTH, HEADS // WORLD, HEAD_DIM)
    forward, backward = WAYS[way]
    times = LAYERS * STEPS
    assert sorted(found["runs"]) == sorted(
        [f"forward {shape}"] * forward * times + [f"backward {shape}"] * backward * times
    )
