"""The specimens at sizes that wrap every ring and give a persistent program several tiles: what the simulator, the
ledger and a GPU run.

A scene takes a device and returns the kernel's outputs; its inputs are drawn on the CPU from a fixed seed, so that they
are the same anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from . import ampere, backward, blackwell, forward, matmul
from .backward import Saved


def normal(*shape: int, seed: int, device: str, scale: float = 1.0) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return drawn.to(torch.bfloat16).to(device)


def _matrices(device: str, m: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    return normal(m, k, seed=1, device=device, scale=0.2), normal(k, n, seed=2, device=device, scale=0.2)


def _attention(device: str, seqlen: int, heads: int = 1, head_dim: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (normal(1, seqlen, heads, head_dim, seed=seed, device=device) for seed in (1, 2, 3))
    return q, k, v


@cache  # the oracle is slow, and a GPU runs a scene hundreds of times
def _saved(device: str, seqlen: int, causal: bool, heads: int = 1, head_dim: int = 64) -> Saved:
    q, k, v = _attention("cpu", seqlen, heads, head_dim)
    out, lse = forward.reference(q, k, v, forward.Config(head_dim=head_dim, causal=causal))
    dout = normal(1, seqlen, heads, head_dim, seed=4, device="cpu")
    return Saved(*(t.to(device) for t in (q, k, v, out.to(torch.bfloat16), lse.to(torch.float32), dout)))


def hopper_matmul(device: str = "cpu") -> tuple[Tensor, ...]:
    config = matmul.Config(block_m=64, block_n=64, stages=3)
    return (matmul.run(*_matrices(device, 72, 136, 512), config),)


def ampere_matmul(device: str = "cpu") -> tuple[Tensor, ...]:
    config = ampere.Config(block_m=64, block_n=64, block_k=32, stages=3)
    return (ampere.run(*_matrices(device, 72, 136, 264), config),)


def _forward(device: str, programs: int = 0, seqlen: int = 512, **options: bool) -> tuple[Tensor, ...]:
    config = forward.Config(head_dim=64, block_n=64, stages=2, **options)
    return forward.run(*_attention(device, seqlen), config, programs=programs)


def hopper_forward(device: str = "cpu") -> tuple[Tensor, ...]:
    return _forward(device, seqlen=384)


def hopper_forward_causal(device: str = "cpu") -> tuple[Tensor, ...]:
    return _forward(device, causal=True, ping_pong=True)


def hopper_forward_persistent(device: str = "cpu") -> tuple[Tensor, ...]:
    return _forward(device, programs=2, causal=True, persistent=True)


def _backward(device: str, dq: str, causal: bool) -> tuple[Tensor, ...]:
    return backward.run(_saved(device, 384, causal), backward.Config(head_dim=64, causal=causal, dq=dq))


def hopper_backward(device: str = "cpu") -> tuple[Tensor, ...]:
    return _backward(device, "tma", False)


def hopper_backward_red(device: str = "cpu") -> tuple[Tensor, ...]:
    return _backward(device, "red", True)


def hopper_backward_ordered(device: str = "cpu") -> tuple[Tensor, ...]:
    return _backward(device, "ordered", True)


def blackwell_matmul(device: str = "cpu") -> tuple[Tensor, ...]:
    config = blackwell.Matmul(block_n=64, stages=3)
    return (blackwell.run_matmul(*_matrices(device, 264, 136, 320), config, programs=2),)


def blackwell_attention(device: str = "cpu") -> tuple[Tensor, ...]:
    return blackwell.run_attention(*_attention(device, 512), blackwell.Attention(head_dim=64, block_n=64))


class Scene(NamedTuple):
    """A specimen's name, the GPU it is for, what runs it, the file whose statements are mutated; `ordered`: its sums
    have one order, always.
    """

    name: str
    target: str
    run: Callable[..., tuple[Tensor, ...]]
    file: str
    ordered: bool = False
    read_fences: bool = False  # the specimens are as their sources are, which have none


SCENES = tuple(
    Scene(run.__name__, target, run, file, ordered=run is hopper_backward_ordered)
    for target, file, runs in (
        ("sm_80", "ampere.py", (ampere_matmul,)),
        ("sm_90", "matmul.py", (hopper_matmul,)),
        ("sm_90", "forward.py", (hopper_forward, hopper_forward_causal, hopper_forward_persistent)),
        ("sm_90", "backward.py", (hopper_backward, hopper_backward_red, hopper_backward_ordered)),
        ("sm_100", "blackwell.py", (blackwell_matmul, blackwell_attention)),
    )
    for run in runs
)


def references() -> dict[str, tuple[Tensor, ...]]:
    """What each scene should give, in float64."""
    expected = {
        "ampere_matmul": (ampere.reference(*_matrices("cpu", 72, 136, 264)),),
        "hopper_matmul": (matmul.reference(*_matrices("cpu", 72, 136, 512)),),
        "blackwell_matmul": (blackwell.reference_matmul(*_matrices("cpu", 264, 136, 320)),),
        "blackwell_attention": blackwell.reference_attention(*_attention("cpu", 512)),
    }
    for name, seqlen, causal in (
        ("hopper_forward", 384, False),
        ("hopper_forward_causal", 512, True),
        ("hopper_forward_persistent", 512, True),
    ):
        expected[name] = forward.reference(*_attention("cpu", seqlen), forward.Config(head_dim=64, causal=causal))
    for name, causal in (("hopper_backward", False), ("hopper_backward_red", True), ("hopper_backward_ordered", True)):
        expected[name] = backward.reference(_saved("cpu", 384, causal), backward.Config(head_dim=64, causal=causal))
    return expected
