"""Serve requests with continuous batching: each step computes prompt chunks and single tokens in one ragged batch.

    python examples/serve.py            a model of random weights; the requests are cut from a book

All keys lie in one pool of pages. The logits are compared with those of the dense path, which has no cache.
"""

from collections import deque

import torch
from gpt import BOOK, DEVICE, DTYPE, GPT, HEAD_DIM, HEADS, LAYERS, SEQLEN
from train_gpt import attend as dense_attend

import strobe

SLOTS, PAGE_SIZE, CHUNK, NEW = 4, 16, 24, 12  # CHUNK: most tokens of a request in a step; NEW: tokens it writes
model, n_pages = GPT().to(DEVICE), SLOTS * SEQLEN // PAGE_SIZE
pools = torch.empty(LAYERS, 2, n_pages, PAGE_SIZE, HEADS, HEAD_DIM, device=DEVICE, dtype=DTYPE)
page_table, free = torch.zeros(SLOTS, SEQLEN // PAGE_SIZE, dtype=torch.int32), list(range(n_pages))
requests = [list(BOOK[1000 * n : 1000 * n + 5 + 17 * n % 83]) for n in range(10)]  # their tokens
limits, lengths, logits = [len(request) + NEW for request in requests], [0] * len(requests), {}
waiting, slots = deque(range(len(requests))), [None] * SLOTS


def step():
    """Compute the next tokens of all slots, and write one token to each request whose tokens are all in the cache."""
    slots[:] = [waiting.popleft() if n is None and waiting else n for n in slots]
    held = [0 if n is None else lengths[n] for n in slots]  # keys in the cache
    parts = [[] if n is None else requests[n][begin : begin + CHUNK] for n, begin in zip(slots, held)]
    for slot, (begin, part) in enumerate(zip(held, parts)):
        for column in range(-(-begin // PAGE_SIZE), -(-(begin + len(part)) // PAGE_SIZE)):
            page_table[slot, column] = free.pop()
    before, counts = torch.tensor([held, [len(part) for part in parts]], device=DEVICE)
    offsets, table = torch.nn.functional.pad(counts.cumsum(0), (1, 0)), page_table.to(DEVICE)

    def attend(q, k, v, layer):  # q, k and v [T, heads, head_dim] of all new tokens
        strobe.append(strobe.PagedCache(*pools[layer], table, before), k, v, cu_seqlens_q=offsets)
        cache = strobe.PagedCache(*pools[layer], table, before + counts)
        return strobe.attention_paged(q, cache, cu_seqlens_q=offsets, max_seqlen_q=CHUNK)

    new = [(token, begin + i) for begin, part in zip(held, parts) for i, token in enumerate(part)]
    found = model(*torch.tensor(new, device=DEVICE).unbind(1), attend)
    for slot, n in [(slot, n) for slot, n in enumerate(slots) if n is not None]:
        lengths[n] += len(parts[slot])
        if lengths[n] == len(requests[n]):
            logits[n] = found[offsets[slot + 1] - 1]
            requests[n].append(int(logits[n].argmax()))
            if len(requests[n]) == limits[n]:
                free.extend(page_table[slot, : -(-lengths[n] // PAGE_SIZE)].tolist())
                slots[slot] = None


with torch.no_grad():
    while waiting or slots != [None] * SLOTS:
        step()
    print(f"{len(free)} of {n_pages} pages are free, errors: {strobe.last_errors()}")
    for n, request in enumerate(requests):
        ids = torch.tensor([request[:-1]], device=DEVICE)
        dense = model(ids, torch.arange(len(request) - 1, device=DEVICE), dense_attend)[0, -1]
        print(f"request {n}: {len(request)} tokens, logits within {(dense - logits[n]).abs().max():.1e} of dense")
