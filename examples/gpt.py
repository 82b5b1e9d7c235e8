"""The small GPT of train_gpt.py, packed_training.py, generate.py and serve.py. Its attention is an argument.

Text is read and written byte by byte. The book is Alice's Adventures in Wonderland, which lies in examples/demo/text.
"""

from pathlib import Path

import torch
from torch import nn

GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
LAYERS, HEADS, HEAD_DIM, SEQLEN = (6, 6, 64, 512) if GPU else (2, 4, 32, 128)  # 11 million weights, or half a million
WIDTH = HEADS * HEAD_DIM
BOOK = (Path(__file__).parent / "demo" / "text" / "alice.txt").read_bytes()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x, attend, layer):
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(-3)
        x = x + self.project(attend(q, k, v, layer).flatten(-2))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    """attend(q, k, v, layer) gets q, k and v [..., heads, head_dim] of a layer and returns a tensor shaped like q."""

    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(256, WIDTH), nn.Embedding(SEQLEN, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, tokens, positions, attend):
        """Logits [..., 256] of the byte after each of tokens [...] at positions [...]."""
        with torch.autocast(DEVICE, DTYPE, enabled=GPU):
            x = self.token(tokens) + self.position(positions)
            for layer, block in enumerate(self.blocks):
                x = block(x, attend, layer)
            return self.head(self.norm(x))
