"""Random words of dropout, as every kernel draws them: a function of seed, batch entry, head and positions.

    x, y = philox(b, h, low word of the seed);  x, y = philox(x, y, high word);  key = philox(y, x, high word)[0]
    word(q, k) = philox(k + x, q + y, key)[0]            the weight is dropped if word < p * 2^32

philox is Philox2x32-10 (Salmon et al., SC 2011). Words are int64 here, since torch has few operations on uint32.
"""

from __future__ import annotations

import torch
from torch import Tensor

MULTIPLIER = 0xD256D193
INCREMENT = 0x9E3779B9
ROUNDS = 10
_WORD = 0xFFFFFFFF


def philox(x: Tensor, y: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Two words of Philox2x32-10 from the counter (x, y) and a key, all int64 in [0, 2^32).

    >>> zero = torch.zeros((), dtype=torch.int64)
    >>> [hex(word.item()) for word in philox(zero, zero, zero)]  # known answer of Random123
    ['0xff1dae59', '0x6cd10df2']
    """
    for _ in range(ROUNDS):
        product = x * MULTIPLIER  # of 64 bits; int64 wraps around
        x, y, key = ((product >> 32) & _WORD) ^ (key ^ y), product & _WORD, (key + INCREMENT) & _WORD
    return x, y


def least_word(p: float) -> int:
    """Words below it drop their weight. p is rounded to float32, as kernels get it."""
    return int(torch.tensor(p, dtype=torch.float32).item() * 2**32)


def kept(seed: Tensor, p: float, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Whether the weights of these positions are kept: bool, of the indices' broadcast shape. seed: int64, one element.

    >>> index = torch.arange(4)
    >>> kept(torch.tensor(7), 0.5, torch.tensor(0), torch.tensor(0), index[:, None], index).int().tolist()
    [[0, 0, 0, 0], [0, 0, 1, 0], [0, 1, 0, 0], [1, 1, 0, 0]]
    """
    seed = seed.reshape(()).long()
    low, high = seed & _WORD, (seed >> 32) & _WORD
    x, y = philox(b.long() + 0 * h, h.long() + 0 * b, low)
    x, y = philox(x, y, high)
    key, _ = philox(y, x, high)
    word, _ = philox((k.long() + x) & _WORD, (q.long() + y) & _WORD, key)
    return word >= least_word(p)
