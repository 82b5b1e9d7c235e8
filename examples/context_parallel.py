"""Train a model with a full and a windowed layer on sequences that several processes share.

    torchrun --nproc-per-node 2 examples/context_parallel.py      seconds on CPUs; on GPUs each process takes one

A plan says which rows a process holds. Only attention exchanges keys or heads; other layers see local rows. A weight's
gradient is the sum over processes.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import strobe

GPU = torch.cuda.is_available()
SEQLEN, HEADS, HEAD_DIM, WIDTH, STEPS = 256, 4, 16, 64, 20


class Layer(nn.Module):
    def __init__(self, window):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.sinks, self.window = nn.Parameter(torch.zeros(HEADS)), window

    def forward(self, x, plan):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(-3)
        out = strobe.attention(q, k, v, causal=True, window=self.window, sinks=self.sinks, context_parallel=plan)
        return x + self.out(out.flatten(-2))


dist.init_process_group("nccl" if GPU else "gloo")
device = f"cuda:{os.environ['LOCAL_RANK']}" if GPU else "cpu"
torch.set_default_device(device)
torch.manual_seed(0)  # the same weights and data in every process

plan = strobe.distributed.context_parallel().plan(strobe.causal(), seqlen=SEQLEN, heads_q=HEADS, head_dim=HEAD_DIM)
if dist.get_rank() == 0:
    print(plan.explain())
token, position, head = nn.Embedding(32, WIDTH), nn.Embedding(SEQLEN, WIDTH), nn.Linear(WIDTH, 32)
layers = nn.ModuleList([Layer(None), Layer((32, None))])
weights = [w for module in (token, position, head, layers) for w in module.parameters()]
optimizer = torch.optim.AdamW(weights, lr=3e-3)
for step in range(STEPS):
    text = (torch.arange(SEQLEN + 1) * torch.randint(1, 8, (4, 1)) + torch.randint(32, (4, 1))) % 32
    x = token(plan.shard(text[:, :-1])) + position(plan.positions(device))
    for layer in layers:
        x = layer(x, plan)
    loss = cross_entropy(head(x).flatten(0, 1), plan.shard(text[:, 1:]).flatten(), reduction="sum") / (4 * SEQLEN)
    optimizer.zero_grad()
    loss.backward()
    for tensor in (total := loss.detach(), *(weight.grad for weight in weights)):
        dist.all_reduce(tensor)
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {total.item():.4f}")
dist.destroy_process_group()
