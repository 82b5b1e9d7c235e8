"""Call strobe's attention, its gradients and its masks, and compare the result with PyTorch's.

    python examples/quickstart.py       a second on a CPU; on a GPU the first call compiles kernels

Tensors are [batch, seqlen, heads, head_dim]. Query head h reads key head h // (heads_q // heads_kv).
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

import strobe

device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
torch.manual_seed(0)

# Grouped-query attention: eight query heads share two key heads.
q = torch.randn(2, 1000, 8, 64, device=device, dtype=dtype, requires_grad=True)
k = torch.randn(2, 1000, 2, 64, device=device, dtype=dtype, requires_grad=True)
v = torch.randn(2, 1000, 2, 64, device=device, dtype=dtype, requires_grad=True)

# Forward and backward. strobe.explain names the kernels and the reason why each other kernel was rejected.
out = strobe.attention(q, k, v, causal=True)
out.square().sum().backward()
choice = strobe.explain(q, k, v, causal=True)
print(f"{device}: {choice.forward.kernel.name} and {choice.backward.kernel.name}, out {tuple(out.shape)}")

# PyTorch's attention takes [batch, heads, seqlen, head_dim] and gives the same output and gradients.
leaves = [t.detach().transpose(1, 2).requires_grad_() for t in (q, k, v)]
theirs = scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
theirs.square().sum().backward()
print(f"largest difference from PyTorch, out: {(out - theirs.transpose(1, 2)).abs().max().item():.1e}")
gradients = zip((q, k, v), leaves)
worst = max(((a.grad - b.grad.transpose(1, 2)).norm() / b.grad.norm()).item() for a, b in gradients)
print(f"largest relative difference from PyTorch, gradients: {worst:.1e}")

# Masks are objects and combine with &. Here: three documents in each sequence, causal, at most 128 keys back.
ids = torch.arange(1000, device=device).div(400, rounding_mode="floor").int().expand(2, -1)
mask = strobe.causal() & strobe.window(127, 0) & strobe.documents(ids)
masked = strobe.attention(q, k, v, mask=mask)
sees = mask.dense(1000, 1000, device=device)
print(f"a mask that keeps {sees.float().mean().item():.1%} of the scores, out {tuple(masked.shape)}")
alone = strobe.attention(q[:, 400:800], k[:, 400:800], v[:, 400:800], causal=True, window=(127, 0))
print(f"document 1 alone differs by {(masked[:, 400:800] - alone).abs().max().item():.1e}")
