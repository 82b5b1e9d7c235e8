"""Cache of tensors that are computed from captured tensors: lists of blocks, spans of documents.

A captured tensor is identified by its storage, its view and its version, so a tensor that changes in place is another.
The version does not see writes through `.data`, as autograd does not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


def identity_of(tensors: Sequence[Tensor], device: torch.device) -> tuple | None:
    """A key of the contents of tensors on a device's current stream. None in a CUDA graph, whose replays may read other
    contents, and for tensors without a version.

    >>> ids = torch.zeros(3)
    >>> before = identity_of([ids], ids.device)
    >>> identity_of([ids], ids.device) == before, identity_of([ids.add_(1)], ids.device) == before
    (True, False)
    """
    if any(tensor.is_inference() for tensor in tensors):
        return None
    stream = 0
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return None
        stream = torch.cuda.current_stream(device).cuda_stream
    views = [
        (t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype, t._version) for t in tensors
    ]
    return *views, device, stream


class DerivedTensors:
    """Tensors by key. An entry is dropped with its source tensors, or if it is the oldest beyond `most_bytes`."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.entries: OrderedDict[tuple, tuple[list[StorageWeakRef], tuple[Tensor, ...]]] = OrderedDict()

    def get(self, key: tuple, sources: Sequence[Tensor], make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """The tensors of a key, made if they are not kept. The key must hold `identity_of(sources, ...)`."""
        found = self.entries.get(key)
        if found is None or any(storage.expired() for storage in found[0]):
            made = make()
            self._evict(sum(tensor.nbytes for tensor in made))
            found = self.entries[key] = [StorageWeakRef(t.untyped_storage()) for t in sources], made
        return found[1]

    def _evict(self, needed: int) -> None:
        kept = list(self.entries.items())
        sizes = {key: sum(tensor.nbytes for tensor in found[1]) for key, found in kept}
        total = needed + sum(sizes.values())
        for key, (storages, _) in kept:
            if total > self.most_bytes or any(storage.expired() for storage in storages):
                self.entries.pop(key, None)
                total -= sizes[key]
