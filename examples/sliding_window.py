"""Run a sliding window over long sequences, forward and backward, and print time and memory as the sequence grows.

    python examples/sliding_window.py       up to 262,144 tokens on a GPU, up to 8,192 on a CPU

Each query sees itself and the WINDOW - 1 keys before it, so time and memory grow in proportion to the sequence. The
last two columns are the time without a window, and the size of the scores that eager attention would store.
"""

import time
from functools import partial

import torch
from demo.measure import peak_bytes

import strobe

GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
HEADS, HEADS_KV, HEAD_DIM, WINDOW = (16, 4, 128, 4096) if GPU else (4, 2, 32, 256)
LENGTHS = (16_384, 65_536, 262_144) if GPU else (2048, 4096, 8192)


def step(q, k, v, window):
    """Causal attention within a window, and the gradients of q, k and v."""
    strobe.attention(q, k, v, causal=True, window=window).sum().backward()
    q.grad = k.grad = v.grad = None


def seconds(function):
    """Time of the second call: the first may compile kernels."""
    for _ in range(2):
        if GPU:
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if GPU:
            torch.cuda.synchronize()
    return time.perf_counter() - start


torch.manual_seed(0)
print(f"forward and backward, {HEADS} heads of {HEAD_DIM}, a window of {WINDOW} keys, {DTYPE} on {DEVICE}")
print("  tokens   window: ms       MB   causal: ms   scores: MB")
for length in LENGTHS:
    shapes = [(1, length, heads, HEAD_DIM) for heads in (HEADS, HEADS_KV, HEADS_KV)]
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=DTYPE, requires_grad=True) for shape in shapes)
    narrow, whole = partial(step, q, k, v, (WINDOW - 1, 0)), partial(step, q, k, v, None)
    times = [1e3 * seconds(narrow), 1e3 * seconds(whole)]
    held = peak_bytes(narrow, torch.device(DEVICE)) / 1e6  # by torch's allocator, inputs not counted
    scores = HEADS * length**2 * q.element_size() / 1e6
    print(f"{length:8,} {times[0]:12,.1f} {held:8,.1f} {times[1]:12,.1f} {scores:12,.0f}")
