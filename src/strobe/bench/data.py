"""Families of benchmark inputs: normal numbers, and patterns as in trained models.

Speed depends on data. A kernel that rescales its accumulator only when a row's maximum grows is fast on normal numbers.
It is slow if maxima keep growing: for sharp scores, attention sinks, or single large keys. Each family changes q and k
of standard normal tensors; v stays normal.

    normal                          unchanged: the inputs of most published figures
    sharp2, sharp4, sharp8, sharp16 q times n, so scores have a standard deviation of n nats
    first1x3, first1x6, first1x12   the first key of a sequence times n: some queries attend only to it
    sink6, sink12, sink24, sink100  all queries share a direction, and only the first key points along it: its score
                                    is n nats above the mean of the others, an attention sink (arXiv 2309.17453)
    grow, shrink                    keys times 0.1 to 8, rising or falling with their position
    outliers                        one key in 64 times 20
    rotary                          q and k share a component and are rotated by their position (RoPE, arXiv
                                    2104.09864): scores fall by about 12 nats away from the diagonal
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import InvalidProblem
from .attempt import Attempt

NORMAL = "normal"
_OUTLIERS, _OUTLIER_FACTOR = 64, 20.0  # one key in _OUTLIERS is multiplied by the factor
_LEAST, _MOST = 0.1, 8.0  # factors of grow and shrink
_SHARED_NATS = 12.0  # rotary: the shared component's part of the score of a query and its own key
_ROPE_BASE = 10_000.0


def change(name: str, q: Tensor, k: Tensor, positions: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Change standard normal q and k [..., S, H, D] to inputs of a family.

    >>> draw = torch.Generator().manual_seed(0)
    >>> q, k = torch.randn(1, 4, 2, 8), torch.randn(1, 4, 2, 8)
    >>> changed, _ = change("sharp4", q, k, torch.arange(4), draw)
    >>> torch.equal(changed, 4 * q)
    True

    positions: int64 [S], the position of each token in its own sequence.
    """
    family, amount = _parse(name)
    return _FAMILIES[family](q, k, positions, amount, generator)


def load(file: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [B, S, H, D] from a file that torch.save wrote: a dict with the keys "q", "k" and "v".

    Raises InvalidProblem if the file does not exist or has other contents.
    """
    expected = f"one of {', '.join(NAMES)}, all, or a file of tensors q, k, v [B, S, H, D]"
    remedy = 'write one with torch.save({"q": q, "k": k, "v": v}, FILE)'
    q = k = v = torch.empty(0)
    with Attempt() as attempt:
        held = torch.load(file, map_location="cpu", weights_only=True)
        q, k, v = (held[name] for name in ("q", "k", "v"))
    if attempt.reason:
        raise InvalidProblem("--data", repr(file), expected, f"{remedy} ({attempt.reason})")
    if not (
        q.ndim == k.ndim == v.ndim == 4 and q.dtype == k.dtype == v.dtype and q.shape[1] == k.shape[1] == v.shape[1]
    ):
        raise InvalidProblem(
            "--data",
            f"{file} of {[tuple(t.shape) for t in (q, k, v)]}",
            "q, k, v [B, S, H, D] of one dtype and one S",
            remedy,
        )
    return q, k, v


def _parse(name: str) -> tuple[str, float]:
    """
    >>> _parse("first1x12"), _parse("grow")
    (('first1x', 12.0), ('grow', 1.0))
    """
    if name in _FAMILIES:
        return name, 1.0
    family = name.rstrip("0123456789")
    return family, float(name[len(family) :])


def _normal(
    q: Tensor, k: Tensor, positions: Tensor, amount: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    return q, k


def _sharp(q: Tensor, k: Tensor, positions: Tensor, amount: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return q * amount, k


def _first(q: Tensor, k: Tensor, positions: Tensor, amount: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return q, torch.where((positions == 0)[:, None, None], k * amount, k)


def _sink(q: Tensor, k: Tensor, positions: Tensor, amount: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Set the component along a random direction: sqrt(amount) D^(1/4) for q and the first key, 0 for others."""
    head_dim = q.shape[-1]
    direction = torch.nn.functional.normalize(torch.randn(head_dim, device=q.device, generator=generator), dim=0)
    length = amount**0.5 * head_dim**0.25
    along = lambda x, size: x + (size - (x @ direction))[..., None] * direction
    sizes = torch.where(positions == 0, length, 0.0)[:, None]
    return along(q, length), along(k, sizes)


def _grow(q: Tensor, k: Tensor, positions: Tensor, amount: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return q, k * (_LEAST + (_MOST - _LEAST) * positions / positions.max().clamp(min=1))[:, None, None]


def _shrink(
    q: Tensor, k: Tensor, positions: Tensor, amount: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    return q, k * (_MOST - (_MOST - _LEAST) * positions / positions.max().clamp(min=1))[:, None, None]


def _outliers(
    q: Tensor, k: Tensor, positions: Tensor, amount: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    chosen = torch.rand(k.shape[:-1], device=k.device, generator=generator) < 1 / _OUTLIERS
    return q, torch.where(chosen[..., None], k * _OUTLIER_FACTOR, k)


def _rotary(
    q: Tensor, k: Tensor, positions: Tensor, amount: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    head_dim = q.shape[-1]
    half = head_dim // 2
    # its square sums to 12 sqrt(D)
    shared = torch.full((head_dim,), (_SHARED_NATS / head_dim**0.5) ** 0.5, device=q.device)
    angles = positions[:, None] * _ROPE_BASE ** (-torch.arange(half, device=q.device) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def turned(x: Tensor) -> Tensor:
        a, b, rest = (x + shared).split([half, half, head_dim - 2 * half], -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], -1)

    return turned(q), turned(k)


_FAMILIES: dict[str, Callable] = {
    NORMAL: _normal,
    "sharp": _sharp,
    "first1x": _first,
    "sink": _sink,
    "grow": _grow,
    "shrink": _shrink,
    "outliers": _outliers,
    "rotary": _rotary,
}
NAMES = (
    NORMAL,
    *(f"sharp{n}" for n in (2, 4, 8, 16)),
    *(f"first1x{n}" for n in (3, 6, 12)),
    *(f"sink{n}" for n in (6, 12, 24, 100)),
    "grow",
    "shrink",
    "outliers",
    "rotary",
)
