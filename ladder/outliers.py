"""What 8 bits cost where a few entries are large, and what a rotation gives back: the published experiment, on k6, k7
and k8.

q, k and v are N(0, 1) plus, for one entry in a thousand, N(0, 100); the figure is the root of the mean square of out
minus attention in float64. Source: FlashAttention-3 (arXiv 2407.08608), section 4.3. There V has scales by block too;
here it has one a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from strobe import reference
from strobe.problem.call import Call

from . import k6_pingpong, k7_fp8, k8_fp8_hadamard

METHODS = ("float16", "8 bits, a scale a tensor", "8 bits, scales by block", "8 bits, rotated, scales by block")


def drawn(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Normal numbers with outliers, in float64."""
    usual, rare = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return usual + 10 * rare * (torch.rand(shape, generator=generator) < 0.001)


def _per_tensor(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scales = [float(t.abs().amax()) / 448 for t in (q, k, v)]
    q8, k8_, v8 = ((t / scale).float().to(torch.float8_e4m3fn) for t, scale in zip((q, k, v), scales))
    return k7_fp8.run(q8, k8_, v8, False, descale=(scales[0], scales[1], scales[2]))


def _in(
    dtype: torch.dtype, run: Callable[..., tuple[Tensor, Tensor]], **options: int
) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda q, k, v: run(*(t.to(dtype) for t in (q, k, v)), False, **options)


def errors(
    device: torch.device, queries: int = 0, keys: int = 4096, heads: int = 0, head_dim: int = 128, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """A row a method: its root mean square error; short rows hide it, for few of their keys are outliers.

    0 queries or heads: as many as keys, of 8 heads; on a CPU 256 of one, for there the simulator runs the kernels
    (whose sums are then whole).
    """
    from strobe.sim import simulate

    on_gpu = device.type == "cuda"
    queries, heads = queries or (keys if on_gpu else 256), heads or (8 if on_gpu else 1)
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (drawn((1, length, heads, head_dim), generator).to(device) for length in (queries, keys, keys))
    exact = reference.forward(Call(q, k, v)).out
    runs = (
        _in(torch.float16, k6_pingpong.run),
        _per_tensor,
        _in(torch.bfloat16, k8_fp8_hadamard.run, rotate=0),
        _in(torch.bfloat16, k8_fp8_hadamard.run),
    )
    for method, run in zip(METHODS, runs):
        with nullcontext() if on_gpu else simulate("sm_90", "eager"):
            out, _ = run(q, k, v)
        size = {
            "seqlen_q": queries,
            "seqlen_k": keys,
            "heads": heads,
            "head_dim": head_dim,
            "where": "gpu" if on_gpu else "simulator",
        }
        yield {"method": method, "rmse": float(f"{float((out.double() - exact).square().mean().sqrt()):.4g}"), **size}
