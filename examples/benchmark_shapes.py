"""Time strobe's attention beside PyTorch's at the shapes of your model, forward and backward.

    python examples/benchmark_shapes.py                             three shapes
    python examples/benchmark_shapes.py 2x4096x32x8x128 ...         yours: batch x seqlen x heads x kv heads x head dim

Calls alternate in one process, so that clocks and other work on the machine affect both alike. A time is the median of
several rounds. PyTorch picks its own backend; on a CPU strobe passes plain calls like these to the same kernel.
`strobe bench` compares with more libraries and checks the results.
"""

import sys
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

import strobe
from strobe.bench.timer import interleave

GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
DEFAULTS = ("8x2048x16x16x64", "4x4096x32x8x128") if GPU else ("2x128x4x4x64", "1x512x8x2x64", "1x1024x4x4x64")
UNIT, PER_MS = ("TFLOP/s", 1e9) if GPU else ("GFLOP/s", 1e6)
ROUNDS, SAMPLE_MS = (10, 20.0) if GPU else (3, 5.0)


def with_sdpa(q, k, v):
    """PyTorch's attention of [batch, heads, seqlen, head_dim], from and to [batch, seqlen, heads, head_dim]."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def with_strobe(q, k, v):
    return strobe.attention(q, k, v, causal=True)


torch.manual_seed(0)
print(f"causal, {DTYPE} on {torch.cuda.get_device_name() if GPU else 'the CPU'}, median ms ({UNIT})")
print(f"{'shape':20} {'direction':10} {'strobe':>18} {'PyTorch':>18}  ratio")
for shape in sys.argv[1:] or DEFAULTS:
    batch, seqlen, heads, heads_kv, head_dim = map(int, shape.split("x"))
    sizes = [(batch, seqlen, n, head_dim) for n in (heads, heads_kv, heads_kv)]
    q, k, v = (torch.randn(size, device=DEVICE, dtype=DTYPE, requires_grad=True) for size in sizes)
    flops = 2 * batch * heads * seqlen**2 * head_dim  # two products over half of the scores
    forwards = {name: partial(attend, q, k, v) for name, attend in (("strobe", with_strobe), ("PyTorch", with_sdpa))}
    outs = {name: forward() for name, forward in forwards.items()}
    rest = {"grad_outputs": torch.randn_like(outs["strobe"]), "retain_graph": True}
    backwards = {name: partial(torch.autograd.grad, out, (q, k, v), **rest) for name, out in outs.items()}
    for direction, functions, work in (("forward", forwards, flops), ("backward", backwards, 2.5 * flops)):
        found = interleave(functions, DEVICE, rounds=ROUNDS, sample_ms=SAMPLE_MS)
        ms = [found[name].median_ms for name in ("strobe", "PyTorch")]
        cells = " ".join(f"{t:9.3f} ({work / t / PER_MS:6.1f})" for t in ms)
        print(f"{shape:20} {direction:10} {cells}  {ms[1] / ms[0]:.2f}")
