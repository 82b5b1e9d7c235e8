"""What a call has beside tensors and masks: programs of custom scores and masks with what they capture, and dropout."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

ONE_ADDITION: dict[str, Callable[..., bool]] = {}  # "mods": ops.ordered_gradients puts it here
MOST_EXACT_SUMS = 1 << 24  # elements of captured tensors; exact sums of them take 1.4 GiB (11 slots of 8 bytes)


@lru_cache(maxsize=256)
def scattered(gradient: str) -> tuple[int, ...]:
    """The numbers of the captured tensors that a gradient's program adds to.

    >>> scattered("tensors f1 f2\\nscatters 1:2\\nf input grad")
    (1,)
    """
    lines = [line for line in gradient.split("\n") if line.startswith("scatters ")]
    return tuple([int(one.split(":")[0]) for line in lines for one in line.split(" ")[1:]])


class ModTexts(NamedTuple):
    """The part of a call's custom score and mask that is a constant of its kernels: the programs of the score, of its
    gradient and of the mask as text (`mods.program`; empty: none), whether weights are dropped, whether row maxima are
    returned, and whether sequences are packed. dropout_offsets: dropout_seed also holds the first head, query and key.
    exact_sums: additions to captured tensors' gradients are integers, whose order does not matter (`mods.exact_sums`).
    """

    score: str = ""
    gradient: str = ""
    mask: str = ""
    dropout: bool = False
    max_scores: bool = False
    packed: bool = False
    dropout_offsets: bool = False
    exact_sums: bool = False

    @property
    def programs(self) -> tuple[str, ...]:
        """The texts that are there."""
        return tuple([text for text in self[:3] if text])

    @property
    def scattered(self) -> tuple[int, ...]:
        return scattered(self.gradient)

    @property
    def without_additions(self) -> ModTexts:
        """The same without a gradient's additions to gradients of captured tensors."""
        lines = [line for line in self.gradient.split("\n") if not line.startswith("scatters ")]
        if not self.gradient or len(lines) == self.gradient.count("\n") + 1:
            return self
        return self._replace(gradient="\n".join((*lines[:-1], " ".join(lines[-1].split(" ")[:2]))))

    def __str__(self) -> str:
        names = [("score_mod", self.score), ("mask_mod", self.mask)]
        words = [f"{name} {zlib.crc32(text.encode()):08x}" for name, text in names if text]
        return ", ".join(words + ["dropout"] * self.dropout + ["max_scores"] * self.max_scores)


class Dropout(NamedTuple):
    """The probability p that a weight is dropped, and what seeds the random numbers. None draws a seed."""

    p: float
    seed: int | Tensor | None = None

    def seed_on(self, device: torch.device) -> Tensor:
        """The seed as int64 [1] on the device. One that is drawn comes from torch's generator of the device."""
        if isinstance(self.seed, Tensor):
            return self.seed
        if self.seed is None:
            return torch.randint(0, 2**62, (1,), device=device)
        return torch.full((1,), self.seed, dtype=torch.int64, device=device)


class Mods(NamedTuple):
    """A custom score and mask with the tensors and numbers that they capture in this call, and its dropout."""

    texts: ModTexts
    score_tensors: tuple[Tensor, ...] = ()
    mask_tensors: tuple[Tensor, ...] = ()
    score_numbers: tuple[float, ...] = ()
    mask_numbers: tuple[float, ...] = ()
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None  # int64 [1]; with offsets [4]: the seed, the first head, query and key
    gradients: tuple[Tensor | None, ...] = ()  # of score_tensors, in the accumulators' dtype: a backward adds to them
    max_scores: Tensor | None = None  # as lse: a forward writes each row's greatest score

    @property
    def has_room_for_exact_sums(self) -> bool:
        """Whether the captured tensors that get gradients are small enough for `exact_sums`."""
        return sum(self.score_tensors[n].numel() for n in {*self.texts.scattered}) <= MOST_EXACT_SUMS

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.score_tensors + self.mask_tensors

    @property
    def read(self) -> tuple[Tensor, ...]:
        """All tensors that kernels read."""
        return self.tensors if self.dropout_seed is None else (*self.tensors, self.dropout_seed)
