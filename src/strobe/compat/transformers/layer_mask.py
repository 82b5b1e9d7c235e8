"""`LayerMask`: which keys the rows of a layer see, and its encoding as a tensor.

The result of a mask function passes through the model's code to the layers. With a static cache it also passes through
`generate` and is an input of the compiled model. So it must be a tensor with four dimensions. A LayerMask is encoded as
an int32 tensor. The tensor's sizes encode the band and the number of keys, so decoding reads nothing from the device.
Its elements, if any, are the tensors of `strobe.documents`. The size is O(S), not S_q x S_k.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import InvalidProblem, UnsupportedProblem, describe
from ...problem.mask import Documents, Mask

SDPA = 'give this model attn_implementation="sdpa" or "eager", or that part of it alone: {"text_config": "sdpa"}'


class Band(IntEnum):
    FULL = 0
    CAUSAL = 1
    WINDOW = 2  # causal; the last config.sliding_window keys, including the row's own
    AROUND = 3  # config.sliding_window keys on each side


class LayerMask(NamedTuple):
    """The mask of a layer. Its rows are the last positions of the first `seqlen_k` keys; no row sees a later key.

    hidden: a documents mask, or None. final: position_ids must not be used, because the model got a padding mask or
    uses chunks.
    """

    band: Band
    seqlen_k: int
    hidden: Mask | None = None
    final: bool = False

    def to_tensor(self, batch: int, seqlen_q: int, device: torch.device | str) -> Tensor:
        """Encode as int32 [1 + band + 4 * final, 4 with documents or else 0, B, S_q + S_k].

        >>> LayerMask(Band.CAUSAL, 7).to_tensor(2, 5, "cpu").shape
        torch.Size([2, 0, 2, 12])
        """
        sizes = batch, seqlen_q + self.seqlen_k
        if self.hidden is None or self.hidden.documents is None:
            data = torch.empty(1, 0, *sizes, dtype=torch.int32, device=device)
        else:
            d = self.hidden.documents
            data = torch.cat([part.flatten() for part in (d.ids_k, d.spans_k, d.ids_q, d.spans_q)]).view(1, 4, *sizes)
        return data.expand(1 + self.band + 4 * self.final, -1, -1, -1)

    @staticmethod
    def from_tensor(tensor: Tensor, batch: int, seqlen_q: int, seqlen_k: int) -> LayerMask:
        """Decode. Raises UnsupportedProblem for a tensor that `to_tensor` did not make, InvalidProblem for one of other
        sizes.

        >>> LayerMask.from_tensor(LayerMask(Band.CAUSAL, 7).to_tensor(2, 5, "cpu"), 2, 5, 9)
        LayerMask(band=<Band.CAUSAL: 1>, seqlen_k=7, hidden=None, final=False)
        """
        ours = isinstance(tensor, Tensor) and tensor.dtype == torch.int32 and tensor.dim() == 4
        if not ours or not 1 <= tensor.shape[0] <= 8 or tensor.shape[1] not in (0, 4):
            got = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            remedy = "give the model a 2-D padding mask, or a mask [B, H, S_q, S_k] of bools or of floats"
            raise UnsupportedProblem(describe("attention_mask", got, "what strobe's mask function made", remedy))
        keys = tensor.shape[3] - seqlen_q
        if tensor.shape[2] != batch or not 0 <= keys <= seqlen_k:
            got = f"one for B={tensor.shape[2]} and S_q + S_k={tensor.shape[3]}"
            raise InvalidProblem(
                "attention_mask",
                got,
                f"B={batch} and at most {seqlen_q} + {seqlen_k}",
                "make it for this batch and cache",
            )
        kind = tensor.shape[0] - 1
        return LayerMask(
            Band(kind % 4), keys, _documents(tensor[0], batch, seqlen_q, keys) if tensor.shape[1] else None, kind >= 4
        )


def _documents(data: Tensor, batch: int, seqlen_q: int, seqlen_k: int) -> Mask:
    """Views of the four tensors of the documents. The keys' parts come first: their size changes as a cache grows, and
    the rows' parts must keep their alignment.
    """
    rows, keys = batch * seqlen_q, batch * seqlen_k
    ids_k, spans_k, ids_q, spans_q = data.flatten().split([keys, 3 * keys, rows, 3 * rows])
    spans = spans_q.view(batch, seqlen_q, 3), spans_k.view(batch, seqlen_k, 3)
    return Mask(documents=Documents(ids_q.view(batch, seqlen_q), ids_k.view(batch, seqlen_k), *spans))
