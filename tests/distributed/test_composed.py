"""Context parallelism inside FSDP2 and beside tensor parallel: training steps equal those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import strobe
from strobe.distributed import Plan, context_parallel
from tests.processes import together

pytestmark = [
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
]
SEQLEN, HEADS, HEAD_DIM, STEPS = 19, 4, 8, 4
WIDTH = HEADS * HEAD_DIM


class Block(nn.Module):
    """A windowed layer with sinks. Under tensor parallel the projections hold some of the heads."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.sinks = nn.Parameter(torch.linspace(-1, 1, HEADS))

    def forward(self, x, plan: Plan | None, heads: slice = slice(None)):
        h = self.norm(x)
        q, k, v = (project(h).unflatten(-1, (-1, HEAD_DIM)) for project in (self.q, self.k, self.v))
        sinks = self.sinks[heads]
        out = strobe.attention(q, k, v, causal=True, window=(6, None), sinks=sinks, context_parallel=plan)
        return x + self.out(out.flatten(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, tokens, plan: Plan | None, heads: slice = slice(None)):
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x, plan, heads)
        return self.head(x)


def _model() -> Model:
    torch.manual_seed(5)
    return Model().double()


def _losses(model: Model, plan: Plan | None, after_backward=lambda: None, factor: float = 1.0, heads=slice(None)):
    """The loss of each step: of this process's rows, summed over the ranks of the plan."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    shard = (lambda x: x) if plan is None else plan.shard
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        tokens = torch.randint(11, (2, SEQLEN + 1), generator=generator)
        logits = model(shard(tokens[:, :-1]), plan, heads)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), shard(tokens[:, 1:]).flatten(), reduction="sum")
        loss = loss / (2 * SEQLEN)
        optimizer.zero_grad()
        (loss * factor).backward()
        after_backward()
        optimizer.step()
        total = loss.detach().clone()
        for group in () if plan is None else plan.ranks.levels:
            dist.all_reduce(total, group=group)
        found.append(float(total))
    return found


def _sharded(rank: int, folder: str, scheme: str) -> None:
    """FSDP2 shards weights over the processes that share the sequence. It averages gradients, so the loss is scaled."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    model = _model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    plan = context_parallel(mesh["cp"], scheme=scheme).plan(strobe.causal(), seqlen=SEQLEN, heads_q=HEADS)
    found = _losses(model, plan, factor=world)
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")


def _tensor_parallel(rank: int, folder: str, scheme: str) -> None:
    """A mesh of 2 x 2: the sequence over its first dimension, the heads over its second."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    model = _model()
    for block in model.blocks:
        columns = {name: ColwiseParallel() for name in "qkv"}
        parallelize_module(block, mesh["tp"], {**columns, "out": RowwiseParallel()})
    local = HEADS // 2
    heads = slice(mesh["tp"].get_local_rank() * local, (mesh["tp"].get_local_rank() + 1) * local)
    plan = context_parallel(mesh["cp"], scheme=scheme).plan(strobe.causal(), seqlen=SEQLEN, heads_q=local)

    def add_up() -> None:  # over cp; over tp each rank needs the gradients of its own heads alone
        for weight in model.parameters():
            gradient = weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad
            dist.all_reduce(gradient, group=mesh["cp"].get_group())

    found = _losses(model, plan, add_up, heads=heads)
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")


@pytest.mark.parametrize("scheme", ["keys", pytest.param("heads", marks=pytest.mark.nightly)])
def test_inside_fsdp2(scheme, tmp_path):
    together(_sharded, tmp_path, str(tmp_path), scheme)
    alone = _losses(_model(), None)
    assert alone[-1] != alone[0]
    torch.testing.assert_close(torch.load(tmp_path / "found.pt"), alone, rtol=1e-9, atol=0)


@pytest.mark.parametrize("scheme", ["keys", pytest.param("heads", marks=pytest.mark.nightly)])
def test_beside_tensor_parallel(scheme, tmp_path):
    together(_tensor_parallel, tmp_path, str(tmp_path), scheme, world=4)
    alone = _losses(_model(), None)
    torch.testing.assert_close(torch.load(tmp_path / "found.pt"), alone, rtol=1e-9, atol=0)
