"""Five families of inputs. Normal numbers alone hide bugs, because one wrong key among thousands hardly changes an
average.

normal       standard normal numbers
integers     sparse small integers in [-2, 2]: exact in every dtype; a structural error gives a large difference
needle       each query is aligned with one key, so that one key dominates the row
negative     every third row has valid scores of about -200: a masked column that leaks in with score 0 gets the whole
             weight
indicator    q = 0 and v marks its keys: a missing, doubled or foreign key changes the weights 1/n, at any length

The last two families come from bugs in other libraries: a row maximum over columns beyond the length (pytorch#193893),
and pages or tails that were read twice or not at all. Numbers are drawn on the CPU, so a seed gives the same problem on
every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

FAMILIES = ("normal", "integers", "needle", "negative", "indicator")

# e^12 = 160,000: the needle's weight is near 1 among a few hundred keys, but the rest still matters in bfloat16
_NEEDLE_SCORE = 12.0
# exp(-200) is 0 in float32: the row is right only if its maximum is taken over valid keys alone
_NEGATIVE_SCORE = -200.0
_KEY_MEAN = 4.0  # negative family: all keys point in one direction, so that one q gives low scores with all of them


def qkv(
    family: str, shape_q: tuple[int, ...], shape_k: tuple[int, ...], head_dim_v: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v on the CPU, in float64: [B, S, H, D], or [S, H, D] without a batch.

    >>> q, k, v = qkv("indicator", (3, 1, 8), (5, 1, 8), 4, seed=0)
    >>> q.abs().max().item(), v[:, 0].argmax(-1).tolist()
    (0.0, [0, 1, 2, 3, 0])

    Raises ValueError for an unknown family.
    """
    generator = torch.Generator().manual_seed(seed)
    shape_v = (*shape_k[:-1], head_dim_v)
    if family == "integers":
        q, k, v = (_integers(shape, generator) for shape in (shape_q, shape_k, shape_v))
        return q, k, v
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in (shape_q, shape_k, shape_v))
    if family == "needle":
        q = _needles(q, k)
    elif family == "negative":
        k = k + _KEY_MEAN
        q[..., ::3, :, :] = _NEGATIVE_SCORE / (_KEY_MEAN * shape_q[-1] ** 0.5)
    elif family == "indicator":
        q = torch.zeros_like(q)
        v = (
            torch.eye(head_dim_v, dtype=v.dtype)[torch.arange(shape_k[-3]) % head_dim_v][:, None]
            .expand(shape_v)
            .clone()
        )
    elif family != "normal":
        raise ValueError(f"family: got {family!r}, expected one of {FAMILIES}")
    return q, k, v


def upstream(family: str, like: Tensor, seed: int) -> Tensor:
    """An incoming gradient (dout or dlse) with the shape, dtype and device of `like`."""
    generator = torch.Generator().manual_seed(seed + 1)
    drawn = (
        _integers(like.shape, generator)
        if family == "integers"
        else torch.randn(like.shape, generator=generator, dtype=torch.float64)
    )
    return drawn.to(like.device, like.dtype)


def _integers(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    values = torch.randint(-2, 3, shape, generator=generator)
    return (values * (torch.rand(shape, generator=generator) < 0.2)).double()


def _needles(q: Tensor, k: Tensor) -> Tensor:
    """q such that row i has the score _NEEDLE_SCORE with the key at the same relative position (default scale)."""
    rows, keys, head_dim = q.shape[-3], k.shape[-3], q.shape[-1]
    if rows == 0 or keys == 0 or q.shape[-2] == 0:
        return q
    chosen = k[..., torch.arange(rows) * keys // rows, :, :].repeat_interleave(q.shape[-2] // k.shape[-2], -2)
    return _NEEDLE_SCORE * head_dim**0.5 * chosen / chosen.square().sum(-1, keepdim=True)
