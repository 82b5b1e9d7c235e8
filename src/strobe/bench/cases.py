"""Suites of benchmark cases. In names, d128_causal_16k means head dimension 128, causal, and 16k keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ..errors import InvalidProblem
from ..problem import mask as masks
from ..problem.call import Call
from . import data

TOKENS = 16384  # tokens of a dense GPU case: B = max(1, TOKENS / S)
HEADS = {64: 32, 128: 16, 256: 8}  # head dimension -> heads: 2048 channels in all
SIZES = {"512": 512, "1k": 1024, "2k": 2048, "4k": 4096, "8k": 8192, "16k": 16384, "32k": 32768}
DENSE_SIZES = {
    64: ("4k", "8k", "16k"),
    128: ("4k", "8k", "16k", "32k"),
    256: ("4k", "8k", "16k"),
}  # head dimension -> lengths
UNEVEN_4K = (64, 1024, 128, 768, 512, 256, 448, 896)
UNEVEN_8K = (1024, 1536, 256, 1792, 768, 512, 1280, 1024)


class Inputs(NamedTuple):
    """The tensors of one case: q, k, v [B, S, H, D] (packed: [T, H, D]), dout, and the data of the mask."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    cu_seqlens: Tensor | None  # int32 [n + 1], packed only
    ids: Tensor | None  # int32 [B, S], only for documents in a dense tensor


@dataclass(frozen=True)
class Case:
    """One benchmark case: a shape, a mask and a direction.

    >>> Case("small", seqlen=8, causal=True).mask(None).dense(8, 8).sum().item()
    36
    """

    name: str
    batch: int = 1
    seqlen: int = 4096
    heads_q: int = 16
    heads_kv: int = 0  # 0: as many as heads_q
    head_dim: int = 64
    head_dim_v: int = 0  # 0: as head_dim
    dtype: torch.dtype = torch.bfloat16
    causal: bool = False
    window: tuple[int, int] | None = None
    softcap: float = 0.0  # 0: none
    lengths: tuple[int, ...] = ()  # of consecutive documents
    packed: bool = False  # True: lengths are sequences of attention_varlen; False: documents of a mask
    backward: bool = False
    deterministic: bool = False  # ask every contender for bitwise reproducible gradients
    data: str = data.NORMAL  # a family out of data.NAMES, or a file for torch.load with a dict of "q", "k", "v"

    @property
    def width_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def groups(self) -> int:
        """The number of key heads."""
        return self.heads_kv or self.heads_q

    @property
    def bounds(self) -> tuple[int | None, int | None]:
        """(left, right) of the band; None means unbounded."""
        left, right = self.window or (None, None)
        return left, 0 if self.causal else right

    @property
    def masked(self) -> bool:
        return bool(self.lengths) or self.bounds != (None, None)

    @property
    def grouped(self) -> bool:
        return self.groups != self.heads_q

    def mask(self, ids: Tensor | None) -> masks.Mask:
        band = masks.window(*self.bounds)
        return band if ids is None else band & masks.documents(ids)

    def call(self, x: Inputs) -> Call:
        call = Call(
            x.q,
            x.k,
            x.v,
            cu_seqlens_q=x.cu_seqlens,
            cu_seqlens_k=x.cu_seqlens,
            softcap=self.softcap,
            needs_grad=self.backward,
        )
        return call.with_mask(self.mask(x.ids))

    def inputs(self, device: torch.device, seed: int = 0) -> Inputs:
        """Inputs of the case's family on `device`. For a backward case, q, k and v require gradients."""
        draw = torch.Generator(device).manual_seed(seed)
        tokens = (self.seqlen,) if self.packed else (self.batch, self.seqlen)
        shapes = [(*tokens, heads, width) for heads, width in self._heads_and_widths()]
        q, k, v, dout = (torch.randn(shape, device=device, generator=draw) for shape in shapes)
        if self.data in data.NAMES:
            q, k = data.change(self.data, q, k, self._positions().to(device), draw)
        else:
            q, k, v = (tensor.to(device) for tensor in data.load(self.data))
        q, k, v, dout = (tensor.to(self.dtype) for tensor in (q, k, v, dout))
        for leaf in (q, k, v):
            leaf.requires_grad_(self.backward)
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        if self.packed:
            offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
            return Inputs(q, k, v, dout, offsets.to(device), None)
        ids = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(lengths).expand(self.batch, -1)
        return Inputs(q, k, v, dout, None, ids.contiguous().to(device) if self.lengths else None)

    def _positions(self) -> Tensor:
        """int64 [S]: the position of each token in its own sequence or document."""
        return torch.cat([torch.arange(length) for length in self.lengths or (self.seqlen,)])

    def _heads_and_widths(self) -> list[tuple[int, int]]:
        q, v = self.head_dim, self.width_v
        return [(self.heads_q, q), (self.groups, q), (self.groups, v), (self.heads_q, v)]


class _HasName(Protocol):
    @property
    def name(self) -> str: ...


Named = TypeVar("Named", bound=_HasName)


def suite(name: str, patterns: tuple[str, ...] | list[str] = ()) -> list[Case]:
    """The cases of a suite whose names match a pattern (fnmatch). Without patterns: all cases.

    >>> [case.name for case in suite("forward", ["d64_causal_*"])]
    ['d64_causal_4k', 'd64_causal_8k', 'd64_causal_16k']

    Raises InvalidProblem for a pattern that matches nothing.
    """
    if name not in SUITES:
        raise InvalidProblem("suite", repr(name), f"one of {', '.join(SUITES)}", "see strobe bench --help")
    return chosen(SUITES[name], patterns)


def chosen(cases: Sequence[Named], patterns: Sequence[str]) -> list[Named]:
    """The cases whose names match a pattern (fnmatch). Without patterns: all. Raises InvalidProblem for a pattern that
    matches nothing.
    """
    for pattern in patterns:
        if not any(fnmatchcase(case.name, pattern) for case in cases):
            raise InvalidProblem(
                "case",
                repr(pattern),
                f"a pattern for one of {', '.join(c.name for c in cases)}",
                "quote patterns for the shell",
            )
    return [case for case in cases if not patterns or any(fnmatchcase(case.name, pattern) for pattern in patterns)]


def on_data(cases: list[Case], name: str, backward: bool) -> list[Case]:
    """The cases with inputs of a family, or of every family for "all". A file gives one causal case with the shape of
    its tensors.

    >>> [(case.name, case.data) for case in on_data(suite("forward", ["d64_causal_8k"]), "sharp4", backward=False)]
    [('d64_causal_8k', 'sharp4')]

    Raises InvalidProblem for a name that is neither a family nor a file of tensors.
    """
    if name == "all" or name in data.NAMES:
        return [replace(case, data=family) for case in cases for family in (data.NAMES if name == "all" else (name,))]
    q, k, v = data.load(name)
    batch, seqlen, heads, width = q.shape
    shape = (batch, seqlen, heads, k.shape[2], width, v.shape[3])
    return [Case(Path(name).stem, *shape, dtype=q.dtype, causal=True, backward=backward, data=name)]


def _uneven(count: int, least: int, most: int, seed: int = 0) -> tuple[int, ...]:
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(least, most + 1, (count,), generator=draw).tolist())


def _packed(name: str, lengths: tuple[int, ...], **rest) -> Case:
    return Case(name, seqlen=sum(lengths), lengths=lengths, packed=True, **rest)


def _gpu() -> list[Case]:
    kinds = [("dense", False), ("causal", True)]
    cases = [
        Case(f"d{dim}_{kind}_{size}", max(1, TOKENS // SIZES[size]), SIZES[size], heads, head_dim=dim, causal=causal)
        for dim, heads in HEADS.items()
        for kind, causal in kinds
        for size in DENSE_SIZES[dim]
    ]
    cases += [
        Case(f"short_{size}x{n}", n, SIZES[size], 16, head_dim=128, causal=True)
        for size, n in (("512", 32), ("1k", 16))
    ]
    widths = [("d96", 96, 0), ("d192", 192, 0), ("d192x128", 192, 128)]
    cases += [
        Case(f"{name}_causal_8k", 2, SIZES["8k"], 16, head_dim=dim, head_dim_v=dim_v, causal=True)
        for name, dim, dim_v in widths
    ]
    cases += [
        Case(f"gqa_64_8_d128_causal_{size}", 1, SIZES[size], 64, 8, head_dim=128, causal=True) for size in ("2k", "8k")
    ]
    cases += [
        Case(f"b2_gqa_64_8_d128_{kind}_16k", 2, SIZES["16k"], 64, 8, head_dim=128, causal=causal)
        for kind, causal in kinds
    ]  # vendors publish figures of this shape for an H200
    cases.append(Case("d128_softcap30_causal_8k", 2, SIZES["8k"], 16, head_dim=128, causal=True, softcap=30.0))
    cases.append(Case("d192x128_dense_8k", 2, SIZES["8k"], 16, head_dim=192, head_dim_v=128))
    cases.append(Case("d64_gqa_window1024_16k", 1, SIZES["16k"], 64, 8, head_dim=64, window=(1023, 0), causal=True))
    cases.append(
        Case("documents_16_d128_causal_16k", 1, SIZES["16k"], 16, head_dim=128, causal=True, lengths=UNEVEN_8K * 2)
    )
    cases.append(
        _packed("varlen_32docs_gqa_causal", _uneven(32, 64, 4096), heads_q=32, heads_kv=8, head_dim=128, causal=True)
    )
    return cases


def _deterministic() -> list[Case]:
    plain = {case.name: case for case in _gpu()}
    return [
        replace(plain[name], name=f"{name}_deterministic", deterministic=True)
        for name in ("d64_causal_8k", "d128_causal_8k")
    ]


def _cpu() -> list[Case]:
    """Forward and backward cases with S = 4096 and 8 heads of dimension 64."""
    eight = partial(Case, heads_q=8, seqlen=4096)
    plain = [
        eight(f"{kind}_{word}", dtype=dtype, causal=kind == "causal")
        for kind in ("dense", "causal")
        for word, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))
    ]
    cases = [
        *plain,
        eight("window256_float32", dtype=torch.float32, window=(255, 0), causal=True),
        eight("documents8_float32", dtype=torch.float32, causal=True, lengths=UNEVEN_4K),
        _packed("varlen8_float32", UNEVEN_4K, heads_q=8, dtype=torch.float32, causal=True),
    ]
    return cases + [replace(case, name=f"{case.name}_backward", backward=True) for case in cases]


SUITES = {
    "forward": _gpu(),
    "backward": [replace(case, backward=True) for case in (*_gpu(), *_deterministic())],
    "cpu": _cpu(),
}
