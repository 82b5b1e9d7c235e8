"""PyTorch's ring attention runs on strobe's kernels after `sdpa.enable()`.

Its `context_parallel` dispatches ops of CUDA alone. The ring below it takes any op with their results, so the op for
CPUs serves here, over gloo. `tests.distributed.on_gpus` runs `context_parallel` itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import strobe
from strobe.integrations import sdpa
from tests.processes import WORLD, together

ring = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._attention")
pytestmark = [
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
]
BATCH, HEADS, SEQLEN, HEAD_DIM = 2, 3, 64, 16


def _inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(BATCH, HEADS, SEQLEN, HEAD_DIM, generator=generator) for _ in range(4)]


def _process(rank: int, folder: str) -> None:
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    ring._cp_options.enable_load_balance = False
    q, k, v, dout = (t.chunk(WORLD, 2)[rank].contiguous() for t in _inputs())
    group, found = dist.group.WORLD, {}
    for is_causal in (False, True):
        with sdpa.enable():
            before = sum(sdpa.served.values())
            out, lse = ring._templated_ring_attention(group, 2, forward, q, k, v, is_causal=is_causal)[:2]
            lse = lse.to(torch.float32)
            gradients = ring._templated_ring_attention_backward(
                group, 2, backward, dout, "grad_out", q, k, v, out, lse, is_causal, dropout_p=0.0
            )[:3]
            found[is_causal] = [out, *gradients], sum(sdpa.served.values()) - before
    torch.save(found, Path(folder) / f"{rank}.pt")


def test_a_ring_of_two_gives_what_one_process_gives(tmp_path):
    together(_process, tmp_path, str(tmp_path))
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(WORLD)]
    for is_causal in (False, True):
        *qkv, dout = (t.transpose(1, 2) for t in _inputs())
        leaves = [t.requires_grad_() for t in qkv]
        whole = strobe.attention(*leaves, causal=is_causal)
        expected = [whole.detach(), *torch.autograd.grad(whole, leaves, dout)]
        for rank in range(WORLD):
            results, served = parts[rank][is_causal]
            assert served == (2 * WORLD if not is_causal else 2 * (rank + 1))  # a causal ring skips later keys
            for ours, want in zip(results, expected):
                local = want.transpose(1, 2).chunk(WORLD, 2)[rank]
                torch.testing.assert_close(ours.to(local.dtype), local, atol=2e-5, rtol=1e-4)
