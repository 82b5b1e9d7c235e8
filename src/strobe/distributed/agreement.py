"""Whether all ranks of a plan make the same call. One that does not would wait for others until a timeout.

Each rank sends a digest of its call, and ranks that agree have exchanged a few hundred bytes. Where digests differ, all
ranks learn which rank differs in what, and all raise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from hashlib import sha256

import torch
import torch.distributed as dist

from ..errors import InvalidProblem
from .group import Ranks

Description = dict[str, str]  # of a call: argument -> its metadata; the same arguments on every rank


def digest(text: str) -> int:
    """63 bits of a text.

    >>> digest("a") == digest("a") != digest("b")
    True
    """
    return int.from_bytes(sha256(text.encode()).digest()[:8], "little") >> 1


def check_agreement(mine: Description, ranks: Ranks, device: torch.device) -> None:
    """Raise InvalidProblem on every rank if the call of one differs. Waits for the device."""
    words = torch.tensor([digest(text) for text in mine.values()], dtype=torch.int64, device=device)
    found = [words]
    for group in ranks.levels:  # each rank of a heads group brings its group's words to its keys group
        here = torch.cat(found)
        parts = [torch.empty_like(here) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, here, group=group)
        found = parts
    if bool((torch.cat(found).view(-1, len(mine)) == words).all()):
        return
    described: list[Description] = [mine]
    for group in ranks.levels:
        lists: list = [None] * dist.get_world_size(group)
        dist.all_gather_object(lists, described, group=group)
        described = [one for several in lists for one in several]
    raise disagreement(described)


def disagreement(described: list[Description]) -> InvalidProblem:
    """The error for calls that differ. The call of most ranks is taken for the right one, of two ranks that of rank 0.

    >>> disagreement([{"q": "[1, 4]"}, {"q": "[1, 5]"}, {"q": "[1, 4]"}])
    InvalidProblem('q on rank 1: got [1, 5], expected [1, 4] as on rank 0; make the same call on every rank')
    """
    for argument in described[0]:
        texts = [one.get(argument, "") for one in described]
        usual = Counter(texts).most_common(1)[0][0]
        if argument == ERROR and any(texts):
            rank = next(rank for rank, text in enumerate(texts) if text)
            return InvalidProblem(f"the call on rank {rank}", texts[rank], "a valid call", "see the error of that rank")
        for rank, text in enumerate(texts):
            if text != usual:
                expected = f"{usual} as on rank {texts.index(usual)}"
                return InvalidProblem(f"{argument} on rank {rank}", text, expected, "make the same call on every rank")
    return InvalidProblem("the call", "digests that differ", "the same call on every rank", "call again")


ERROR = "error"  # the argument of a description that holds the message of an error on that rank, or ""


def described_error(check: Callable[[], None]) -> tuple[str, InvalidProblem | TypeError | None]:
    """The message of the error that `check` raises on this rank, and the error; "" and None if it raises none."""
    try:
        check()
    except (InvalidProblem, TypeError) as error:
        return str(error), error
    return "", None
