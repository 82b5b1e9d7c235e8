"""Five families of inputs, because random numbers alone hide bugs: their average over thousands of keys forgives one wrong key.

normal       what everybody tests with
integers     sparse small integers in [-2, 2]: exact in every dtype, nothing averages out, a structural error is gross
needle       each query is aligned with one key, so that one key decides the row
negative     rows whose valid scores are all about -200: a column of score 0 that leaks in takes the whole row
indicator    q = 0 and V marks its keys: a dropped, doubled or foreign key changes 1/n, at any length

The last two follow bugs met elsewhere: a row maximum over columns beyond the length (pytorch#193893), pages and tails read
twice or never. Numbers are drawn on the CPU, so a seed means the same problem on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

FAMILIES = ("normal", "integers", "needle", "negative", "indicator")

_NEEDLE_SCORE = 12.0  # e^12 = 160,000: the needle's weight is near 1 among a few hundred keys, the rest still counts in bfloat16
_NEGATIVE_SCORE = -200.0  # exp(-200) is 0 in float32: only a maximum over the valid keys alone keeps such a row
_KEY_MEAN = 4.0  # of the negative family: all keys point one way, so that one q is far from all of them


def qkv(family: str, shape_q: tuple[int, ...], shape_k: tuple[int, ...], head_dim_v: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in float64 on the CPU: shapes [..., S, H, D], the leading dimension being the batch or missing.

    >>> q, k, v = qkv("indicator", (3, 1, 8), (5, 1, 8), 4, seed=0)
    >>> q.abs().max().item(), v[:, 0].argmax(-1).tolist()
    (0.0, [0, 1, 2, 3, 0])
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
        v = torch.eye(head_dim_v, dtype=v.dtype)[torch.arange(shape_k[-3]) % head_dim_v][:, None].expand(shape_v).clone()
    elif family != "normal":
        raise ValueError(f"family: got {family!r}, expected one of {FAMILIES}")
    return q, k, v


def upstream(family: str, like: Tensor, seed: int) -> Tensor:
    """A gradient to come in from above, shaped as `like`, in its dtype and on its device."""
    generator = torch.Generator().manual_seed(seed + 1)
    drawn = _integers(like.shape, generator) if family == "integers" else torch.randn(like.shape, generator=generator, dtype=torch.float64)
    return drawn.to(like.device, like.dtype)


def _integers(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    values = torch.randint(-2, 3, shape, generator=generator)
    return (values * (torch.rand(shape, generator=generator) < 0.2)).double()


def _needles(q: Tensor, k: Tensor) -> Tensor:
    """Row i scores _NEEDLE_SCORE with the key at the same relative place, at the default scale."""
    rows, keys, head_dim = q.shape[-3], k.shape[-3], q.shape[-1]
    if rows == 0 or keys == 0 or q.shape[-2] == 0:
        return q
    chosen = k[..., torch.arange(rows) * keys // rows, :, :].repeat_interleave(q.shape[-2] // k.shape[-2], -2)
    return _NEEDLE_SCORE * head_dim**0.5 * chosen / chosen.square().sum(-1, keepdim=True)
