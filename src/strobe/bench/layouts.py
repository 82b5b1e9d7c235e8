"""The tensors of a case in the layouts of rivals. They are made before the timing."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .cases import Case, Inputs

_MOST_SCORES = {
    "cuda": 16 * 2**30,
    "cpu": 2 * 2**30,
}  # limit in bytes for one float32 score matrix; a backward holds four


class Sequences(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    offsets: Tensor
    longest: int


def as_sequences(case: Case, x: Inputs) -> Sequences:
    """q, k, v [T, H, D] and offsets int32 [n + 1]. Each batch entry or document is one sequence."""
    lengths = torch.tensor((case.lengths or (case.seqlen,)) * (1 if case.packed else case.batch), dtype=torch.int32)
    offsets = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)).to(x.q.device)
    q, k, v = (t.reshape(-1, *t.shape[-2:]) for t in (x.q, x.k, x.v))
    return Sequences(q, k, v, offsets, int(lengths.max()))


def batched(case: Case, x: Inputs) -> list[Tensor]:
    return [t[None] if case.packed else t for t in (x.q, x.k, x.v)]


def heads_first(case: Case, x: Inputs) -> list[Tensor]:
    return [t.transpose(1, 2) for t in batched(case, x)]


def like_ours(case: Case, out: Tensor) -> Tensor:
    out = out.transpose(1, 2)
    return out[0] if case.packed else out


def document_ids(case: Case) -> Tensor:
    lengths = torch.tensor(case.lengths or (case.seqlen,))
    return torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(lengths)


def dense_mask(case: Case, x: Inputs) -> Tensor:
    ids = document_ids(case)[None].to(x.q.device) if case.packed else x.ids
    return case.mask(ids).dense(case.seqlen, case.seqlen, x.q.device)[:, None]


def too_many_scores(case: Case, device: torch.device) -> str | None:
    scores_bytes = 4 * case.batch * case.heads_q * case.seqlen**2
    most = _MOST_SCORES[device.type]
    return (
        f"one matrix of scores would be {scores_bytes / 2**30:.0f} GiB (limit here {most / 2**30:.0f})"
        if scores_bytes > most
        else None
    )


def mask_mod(case: Case, device: torch.device):
    left, right = (2**30 if bound is None else bound for bound in case.bounds)
    ids = document_ids(case).to(device)

    def admits(b, h, row, key):
        seen = (key >= row - left) & (key <= row + right)
        return seen & (ids[row] == ids[key]) if case.lengths else seen

    return admits
