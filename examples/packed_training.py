"""Train on documents of different lengths that are packed end to end, and compare with batches padded to the longest.

    python examples/packed_training.py      half a minute on a GPU, seconds on a CPU

The documents are paragraphs of Alice's Adventures in Wonderland (examples/demo/text), the model is examples/gpt.py.
strobe.attention_varlen keeps documents apart by their cumulative lengths, so no token is spent on padding.
"""

import time

import torch
from gpt import BOOK, DEVICE, GPT, GPU, SEQLEN
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils.rnn import pad_sequence

import strobe

STEPS, BATCH = (200, 64) if GPU else (20, 12)
paragraphs = [torch.tensor(list(text)[: SEQLEN + 1]) for text in BOOK.split(b"\n\n") if len(text) > 10]


def packed_loss(model, documents):
    """Loss over documents packed into one row of tokens, and the number of tokens computed."""
    lengths = torch.tensor([len(document) - 1 for document in documents])
    cu_seqlens = pad(lengths.cumsum(0), (1, 0)).int().to(DEVICE)  # [n + 1], from 0 to the number of tokens
    tokens = torch.cat([document[:-1] for document in documents]).to(DEVICE)
    targets = torch.cat([document[1:] for document in documents]).to(DEVICE)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(DEVICE)  # restart in each document

    def attend(q, k, v, layer):  # q, k and v [tokens, heads, head_dim]
        return strobe.attention_varlen(q, k, v, cu_seqlens_q=cu_seqlens, max_seqlen_q=SEQLEN, causal=True)

    return cross_entropy(model(tokens, positions, attend).float(), targets), len(tokens)


def padded_loss(model, documents):
    """The same loss over a padded batch. The causal mask hides the padding on the right from every real token."""
    tokens = pad_sequence([document[:-1] for document in documents], batch_first=True).to(DEVICE)
    targets = pad_sequence([document[1:] for document in documents], batch_first=True, padding_value=-100).to(DEVICE)
    positions = torch.arange(tokens.shape[1], device=DEVICE)
    logits = model(tokens, positions, lambda q, k, v, layer: strobe.attention(q, k, v, causal=True))
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten()), tokens.numel()


for name, loss_of in (("padded", padded_loss), ("packed", packed_loss)):
    torch.manual_seed(0)  # the same weights and documents for both
    model = GPT().to(DEVICE)
    optimizer, total, losses = torch.optim.AdamW(model.parameters(), lr=1e-3 if GPU else 4e-3), 0, []
    start = time.perf_counter()
    for _ in range(STEPS):
        loss, computed = loss_of(model, [paragraphs[i] for i in torch.randint(len(paragraphs), (BATCH,))])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += computed
        losses.append(loss.item())
    seconds = time.perf_counter() - start
    print(f"{name}: loss {losses[0]:.4f} to {losses[-1]:.4f}, {total:,} tokens computed, {seconds:.1f} s")
