"""Fill uninitialised memory with NaN during tests, and put guard bands around every tensor.

A kernel that reads out of bounds, in a stride gap, or from uninitialised memory gets NaN, and its result shows it. A
kernel that writes out of bounds changes a band, and `check` raises. `check` also raises if an input's bits change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..problem.call import OPTIONAL_TENSORS, Call

BAND = 512  # elements on each side: more than a tile exceeds a row, and a multiple of every alignment


class _Kept(NamedTuple):
    name: str
    storage: Tensor  # one-dimensional, bands included
    before: Tensor | None  # the bits of a read-only tensor's storage; None for outputs
    inside: Tensor  # bool: elements of the storage that belong to the tensor


class Poison:
    """Within `with Poison() as poison:`, torch.empty and related functions return NaN between bands. The end of the
    block checks every band.

    >>> with Poison() as poison:
    ...     x = poison.enclose("x", torch.ones(2, 3))
    ...     bool(torch.empty(4).isnan().all()), x.storage_offset()
    (True, 512)
    """

    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> Poison:
        self._patches.enter_context(patched_empty(self.empty))
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        self._patches.close()
        if kind is None:
            self.check()

    def empty(self, like: Tensor) -> Tensor:
        """A tensor with the shape, strides, dtype and device of `like`, filled with NaN, between bands."""
        tensor, storage = _housed(like)
        self._kept.append(_Kept("a tensor made by torch.empty", storage, None, _inside(tensor, storage)))
        return tensor

    def enclose(self, name: str, tensor: Tensor) -> Tensor:
        """A copy with the same values, strides and alignment, between bands and with NaN in its stride gaps. `check`
        treats it as read-only.
        """
        house, storage = _housed(tensor)
        with torch.no_grad():
            storage[_inside(house, storage)] = _flat(tensor)
        self._kept.append(_Kept(name, storage, _bits(storage).clone(), _inside(house, storage)))
        return house.requires_grad_(tensor.requires_grad)

    def enclose_call(self, call: Call) -> Call:
        """The call with each of its tensors enclosed. A tensor used for several arguments is enclosed once."""
        tensors = {
            name: tensor
            for name in ("q", "k", "v", *Call._fields[OPTIONAL_TENSORS])
            if (tensor := getattr(call, name)) is not None
        }
        names = {id(tensor): name for name, tensor in tensors.items()}
        enclosed = {one: self.enclose(name, tensors[name]) for one, name in names.items()}
        return call._replace(**{name: enclosed[id(tensor)] for name, tensor in tensors.items()})

    def check(self) -> None:
        """Raise AssertionError if a band, a stride gap or an input was written to."""
        for name, storage, before, inside in self._kept:
            bits = _bits(storage)
            if before is not None:
                changed = bits != before
                if changed.any():
                    raise AssertionError(
                        f"{name}: {int(changed.sum())} elements of an input or its guard bands were overwritten"
                    )
            else:
                overrun = (bits != _bits(_poison(storage))) & ~inside
                where = overrun.nonzero().flatten()
                if overrun.any():
                    raise AssertionError(
                        f"{name}: {len(where)} elements outside it were written, at {(where[:4] - BAND).tolist()} "
                        "from its start"
                    )


@contextlib.contextmanager
def patched_empty(fill: Callable[[Tensor], Tensor]):
    """Pass results of torch.empty, empty_like, empty_strided, new_empty and new_empty_strided through `fill`.

    A dispatch mode does not work: torch disables it inside the custom op, where kernels allocate.
    """
    owners = [
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ]
    originals = [getattr(owner, name) for owner, name in owners]

    def through(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate(*arguments: object, **options: object) -> Tensor:
            tensor = original(*arguments, **options)
            plain = type(tensor) is Tensor and tensor.device.type != "meta" and options.get("out") is None
            return fill(tensor) if plain else tensor

        return allocate

    for (owner, name), original in zip(owners, originals):
        setattr(owner, name, through(original))
    try:
        yield
    finally:
        for (owner, name), original in zip(owners, originals):
            setattr(owner, name, original)


def fill_with_poison(tensor: Tensor) -> Tensor:
    """Fill with NaN, or the largest integer (True for bool). Use it with `patched_empty` if bands cost too much."""
    with torch.no_grad():
        return tensor.fill_(_value(tensor.dtype))


def _value(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def _poison(storage: Tensor) -> Tensor:
    return torch.full_like(storage, _value(storage.dtype))


def _housed(like: Tensor) -> tuple[Tensor, Tensor]:
    """A poisoned tensor with the strides and the alignment of `like`, and its one-dimensional storage with bands."""
    extent = 0 if like.numel() == 0 else 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride()))
    step = max(1, 16 // like.element_size())
    start = BAND + like.storage_offset() % step  # keep the alignment: kernels depend on it
    storage = torch.full((start + extent + BAND,), _value(like.dtype), dtype=like.dtype, device=like.device)
    # set_ instead of as_strided, because an op must not return a view
    house = torch.full((0,), 0, dtype=like.dtype, device=like.device).set_(
        storage.untyped_storage(), start, like.shape, like.stride()
    )
    return house, storage.requires_grad_(False)


def _inside(house: Tensor, storage: Tensor) -> Tensor:
    inside = torch.zeros(storage.shape, dtype=torch.bool, device=storage.device)
    inside.as_strided(house.shape, house.stride(), house.storage_offset()).fill_(True)
    return inside


def _flat(tensor: Tensor) -> Tensor:
    """The tensor's distinct elements, in the order of their addresses."""
    extent = (
        0
        if tensor.numel() == 0
        else 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    )
    memory = tensor.detach().as_strided((extent,), (1,), tensor.storage_offset())
    inside = torch.zeros(extent, dtype=torch.bool, device=tensor.device)
    inside.as_strided(tensor.shape, tensor.stride(), 0).fill_(True)
    return memory[inside]


def _bits(storage: Tensor) -> Tensor:
    """The storage as integers of the same width, so that NaN equals NaN."""
    return storage.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[storage.element_size()])
