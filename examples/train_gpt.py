"""Train a small GPT on a book, with strobe's attention, and print the loss and a passage that the model writes.

    python examples/train_gpt.py        on a GPU 500 steps of 11 million weights; on a CPU a small model, in seconds

The book is Alice's Adventures in Wonderland (examples/demo/text), the model is examples/gpt.py.
"""

import time

import torch
from gpt import BOOK, DEVICE, GPT, GPU, SEQLEN
from torch.nn.functional import cross_entropy

import strobe

STEPS, BATCH = (500, 32) if GPU else (80, 8)


def attend(q, k, v, layer):
    """The model calls this in each layer, with q, k and v [batch, seqlen, heads, head_dim]."""
    return strobe.attention(q, k, v, causal=True)


def train(steps=STEPS):
    """Train a new model and print its loss. Returns the model."""
    torch.manual_seed(0)
    book, positions = torch.tensor(list(BOOK), device=DEVICE), torch.arange(SEQLEN, device=DEVICE)
    model = GPT().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if GPU else 4e-3)
    start = time.perf_counter()
    for step in range(steps):
        first = torch.randint(len(book) - SEQLEN, (BATCH, 1), device=DEVICE)
        passages = book[first + torch.arange(SEQLEN + 1, device=DEVICE)]  # [BATCH, SEQLEN + 1]
        logits = model(passages[:, :-1], positions, attend)
        loss = cross_entropy(logits.flatten(0, 1).float(), passages[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == steps - 1:
            rate = (step + 1) * BATCH * SEQLEN / (time.perf_counter() - start)
            print(f"step {step:3}: loss {loss.item():.2f} nats a byte, {rate:,.0f} tokens a second")
    return model


@torch.no_grad()
def write(model, prompt, count):
    """The prompt and `count` more bytes, sampled. Each byte recomputes all keys; generate.py keeps them in a cache."""
    tokens = torch.tensor([list(prompt)], device=DEVICE)
    for _ in range(count):
        logits = model(tokens, torch.arange(tokens.shape[1], device=DEVICE), attend)[0, -1].float()
        tokens = torch.cat([tokens, torch.multinomial((logits / 0.7).softmax(-1), 1)[None]], 1)
    return bytes(tokens[0].tolist()).decode("ascii", "replace")


if __name__ == "__main__":
    print(write(train(), b"Alice ", SEQLEN - 6))
