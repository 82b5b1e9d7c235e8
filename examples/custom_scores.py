"""Train a small attention layer with a learned bias, a mask function and dropout: `python examples/custom_scores.py`.

The bias belongs to a head and a distance, as T5's does. Its table gets gradients through `score_mod`. The target is a
layer that looks two positions back, so the bias of distance 2 grows.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import strobe


class BiasedAttention(nn.Module):
    """Self-attention whose scores get a learned bias by head and distance."""

    def __init__(self, width: int, heads: int, farthest: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.table = nn.Parameter(torch.zeros(heads, 2 * farthest + 1))
        # a mask of the user's own: every row sees the first key, and otherwise keys up to itself
        self.mask = strobe.causal() | strobe.mask_mod(lambda b, h, q_idx, kv_idx: kv_idx == 0)

    def forward(self, x: Tensor, dropout_p: float = 0.0) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in self.qkv(x).chunk(3, -1))
        score_mod = strobe.relative_bias(self.table)
        return strobe.attention(q, k, v, score_mod=score_mod, mask=self.mask, dropout_p=dropout_p).flatten(2)


def train(steps: int, seed: int = 0) -> tuple[float, float, Tensor]:
    """(first loss, last loss, the learned table)."""
    torch.manual_seed(seed)
    layer = BiasedAttention(32, 2)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
    losses = []
    for _ in range(steps):
        x = torch.randn(8, 48, 32)
        target = torch.cat([x[:, :1], x[:, :1], x[:, :-2]], 1)  # two positions back
        loss = (layer(x, dropout_p=0.05) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1], layer.table.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train attention with a learned bias by distance.")
    parser.add_argument("--steps", type=int, default=60, help="of training (60)")
    first, last, table = train(parser.parse_args().steps)
    best = (table.mean(0).argmax() - table.shape[1] // 2).item()
    print(f"loss {first:.3f} -> {last:.3f}; the largest bias is that of the key {best:+d} positions away")


if __name__ == "__main__":
    main()
