"""Hold two conversations with a small GPT over one paged KV cache: a turn appends its own tokens and recomputes no key.

    python examples/generate.py         first trains the model of train_gpt.py: a minute on a GPU, seconds on a CPU

A pool of pages holds the keys and values of both conversations; a page table says which pages belong to which. At the
end the logits are compared with those of the dense path, which recomputes each conversation without a cache.
"""

import time

import torch
from gpt import DEVICE, DTYPE, GPU, HEAD_DIM, HEADS, LAYERS, SEQLEN
from train_gpt import attend as dense_attend
from train_gpt import train

import strobe

# two prompts a conversation; the model has read one book, so expect its words and no answers
PROMPTS = (b"`Who are you?' said the Caterpillar.\n", b"\nAlice said, "), (b"The Queen ", b"\n`Off with her head!'\n")
NEW, PAGE_SIZE = (150, 64) if GPU else (24, 16)  # tokens written in a turn; keys in a page
n_pages = SEQLEN // PAGE_SIZE  # of each conversation
torch.manual_seed(0)
pools = torch.empty(LAYERS, 2, 2 * n_pages, PAGE_SIZE, HEADS, HEAD_DIM, device=DEVICE, dtype=DTYPE)
page_table = torch.randperm(2 * n_pages, device=DEVICE).int().view(2, n_pages)  # any order
seqlens = torch.zeros(2, device=DEVICE, dtype=torch.int32)


def forward(tokens, rows):
    """Append tokens [B, T] to the conversations `rows` and return the logits [B, 256] after the last one."""
    before, new = seqlens[rows].clone(), tokens.shape[1]

    def attend(q, k, v, layer):  # q, k and v [B, T, heads, head_dim] of the new tokens
        cache = strobe.PagedCache(*pools[layer], page_table[rows], before)
        strobe.append(cache, k, v)
        return strobe.attention_decode(q, cache._replace(seqlens=before + new))

    seqlens[rows] += new
    return model(tokens, before[:, None] + torch.arange(new, device=DEVICE), attend)[:, -1].float()


model, texts = train(), [b"", b""]
with torch.no_grad():
    for turn in range(2):
        prompts = [torch.tensor([list(prompt[turn])], device=DEVICE) for prompt in PROMPTS]
        logits = torch.cat([forward(prompt, slice(row, row + 1)) for row, prompt in enumerate(prompts)])
        texts = [text + prompt[turn] for text, prompt in zip(texts, PROMPTS)]
        start = time.perf_counter()
        for _ in range(NEW):  # both conversations in one call, each at its own length
            tokens = torch.multinomial((logits / 0.7).softmax(-1), 1)
            texts = [text + bytes(token) for text, token in zip(texts, tokens.tolist())]
            logits = forward(tokens, slice(None))
        rate = 2 * NEW / (time.perf_counter() - start)
        print(f"turn {turn}: {rate:,.0f} tokens a second, lengths {seqlens.tolist()}")
    for row, text in enumerate(texts):
        ids = torch.tensor([list(text)], device=DEVICE)
        dense = model(ids, torch.arange(len(text), device=DEVICE), dense_attend)[0, -1].float()
        error = (dense - logits[row]).abs().max().item()
        print(
            f"--- conversation {row}, logits within {error:.1e} of the dense path's\n{text.decode('ascii', 'replace')}"
        )
