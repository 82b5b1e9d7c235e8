"""Named decode problems, with which tests run every decode kernel, and the comparison with the oracle."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import reference
from ..problem.cache import quantize_kv
from ..problem.decode import DecodeCall, DecodeProblem
from ..problem.mask import NO_BOUND
from . import compare, inputs
from .cases import drawn_sinks, laid_out
from .compare import Ratios
from .poison import fill_with_poison

FREE_PAGES = 3  # unused pages in a pool


@dataclass(frozen=True)
class DecodeCase:
    """A named decode problem. Everything that no query sees is NaN: tails of pages, free pages, cache rows before and
    after a sequence, and keys before the window of its first query. Pages entirely before that window have the id -1,
    as if freed.
    """

    name: str
    lengths: tuple[int, ...] = (37, 5)
    tokens: int = 1
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 16
    head_dim_v: int | None = None
    page_size: int = 0  # 0: dense
    starts: tuple[int, ...] = ()  # k_start of each sequence of a dense cache
    left: int = NO_BOUND
    right: int = 0
    scale: float | None = None
    softcap: float = 0.0
    sinks: bool | tuple[float, ...] = False  # True: random values
    fp8: bool = False
    heads_first: bool = False  # pages are stored as [n_pages, H_kv, page_size, D]
    storage: str = "contiguous"  # layout of q and of a dense cache; see testing.cases.laid_out
    lost: tuple[tuple[int, int, int], ...] = ()  # invalid entries of the page table: (sequence, column, id)
    room: int = 11  # capacity beyond the longest sequence, in keys (dense) or pages
    partial: bool = False

    def build(
        self,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        family: str = "normal",
        seed: int = 0,
        kernel: str = "",
        batch_invariant: bool = False,
    ) -> DecodeCall:
        """The DecodeCall, with tensors on `device`, q in `dtype`, and values of the input `family`."""
        device, batch, (heads_q, heads_kv) = torch.device(device), len(self.lengths), self.heads
        longest = max(self.lengths, default=0)
        shapes = (batch, self.tokens, heads_q, self.head_dim), (batch, longest, heads_kv, self.head_dim)
        q, k, v = inputs.qkv(family, *shapes, self.head_dim_v or self.head_dim, seed)
        k, v = (self._hidden(t) for t in (k, v))
        k_scale = v_scale = None
        if self.fp8:
            k, v, k_scale, v_scale = quantize_kv(k, v)
            k_scale, v_scale = k_scale.to(device), v_scale.to(device)
        else:
            k, v = (t.to(dtype) for t in (k, v))
        generator = torch.Generator().manual_seed(seed + 2)
        sinks = drawn_sinks(self.sinks, heads_q, generator, device)
        lengths, starts = (
            torch.tensor(values, dtype=torch.int32, device=device) for values in (self.lengths, self.starts)
        )
        q = laid_out(q.to(device, dtype), self.storage, 0)
        k, v, table = self._pooled(k, v, seed, device) if self.page_size else (*self._rows(k, v, device), None)
        return DecodeCall(
            q, k, v, lengths, table, starts if self.starts else None, k_scale, v_scale, sinks, self.left, self.right,
            self.scale, self.softcap,
            batch_invariant, kernel, self.partial,
        )  # fmt: skip

    def _hidden(self, t: Tensor) -> Tensor:
        """t with NaN outside each sequence's own keys and before the first key that the window of a query shows."""
        position = torch.arange(t.shape[1])[None]
        first = torch.tensor(
            [max(self._first(b), start) for b, start in enumerate(self.starts or (0,) * t.shape[0])]
        ).reshape(-1, 1)
        own = (position >= first) & (position < torch.tensor(self.lengths).reshape(-1, 1))
        return torch.where(own[..., None, None], t, torch.nan)

    def _first(self, b: int) -> int:
        """The first key of sequence b in the window of its first query."""
        return 0 if self.left == NO_BOUND else max(0, self.lengths[b] - self.tokens - self.left)

    def _rows(self, k: Tensor, v: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        found = []
        for n, t in enumerate((k, v)):
            room = fill_with_poison(t.new_empty(t.shape[0], t.shape[1] + self.room, *t.shape[2:]))
            room[:, : t.shape[1]] = t
            found.append(room.to(device) if self.fp8 else laid_out(room.to(device), self.storage, n + 1))
        return found[0], found[1]

    def _pooled(self, k: Tensor, v: Tensor, seed: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """k and v in shuffled pages of a pool filled with NaN, and the page table int32. Table entries beyond a
        sequence's pages are 2^30.
        """
        batch, size = k.shape[0], self.page_size
        used = -(-k.shape[1] // size)
        generator = torch.Generator().manual_seed(seed + 3)
        where = torch.randperm(batch * used + FREE_PAGES, generator=generator)[: batch * used].view(batch, used)
        pools = []
        for t in (k, v):
            bytes_of = t.view(torch.uint8) if self.fp8 else t  # 8-bit floats are moved as bytes
            pages = fill_with_poison(t.new_empty(batch * used + FREE_PAGES, size, *t.shape[2:])).view(bytes_of.dtype)
            padded = fill_with_poison(t.new_empty(batch, used * size, *t.shape[2:])).view(bytes_of.dtype)
            padded[:, : t.shape[1]] = bytes_of
            pages[where.flatten()] = padded.view(batch * used, size, *t.shape[2:])
            pages = pages.transpose(1, 2).contiguous().transpose(1, 2) if self.heads_first else pages
            pools.append(pages.view(t.dtype).to(device))
        table = torch.full((batch, used + self.room), 2**30, dtype=torch.int32)
        for b, length in enumerate(self.lengths):
            own = -(-length // size)
            table[b, :own] = where[b, :own].int()
            table[b, : self._first(b) // size] = -1
        for b, column, ident in self.lost:
            table[b, column] = ident
        return pools[0], pools[1], table.to(device)


def _pages(name: str, page_size: int, **rest) -> DecodeCase:
    return DecodeCase(name, page_size=page_size, **rest)


DECODES = {
    case.name: case
    for case in (
        DecodeCase("dense", (300, 1, 64, 129)),
        DecodeCase("dense_tokens_5", (300, 4, 0, 5, 70), tokens=5),
        DecodeCase("dense_tokens_16_group_8", (100, 16), tokens=16, heads=(16, 2), head_dim=32),
        DecodeCase("dense_tokens_40_group_3", (100, 41), tokens=40, heads=(6, 2)),
        DecodeCase("dense_tokens_16_width_128", (200, 7), tokens=16, heads=(4, 1), head_dim=128),
        DecodeCase("dense_full", (70, 3), tokens=4, right=NO_BOUND),
        DecodeCase("dense_window", (300, 20, 2), tokens=3, left=17),
        DecodeCase("dense_window_both", (300, 20, 2), tokens=6, left=9, right=2),
        DecodeCase("dense_window_right", (40, 3), tokens=6, right=2),
        DecodeCase("dense_sinks_without_bound", (200, 0, 7), tokens=2, sinks=(3e38, torch.inf, -torch.inf, 0.5)),
        DecodeCase("dense_softcap_sinks", (200, 0, 7), tokens=2, softcap=2.0, sinks=True),
        DecodeCase("dense_left_padded", (200, 90, 64), starts=(3, 70, 64), tokens=2),
        DecodeCase("dense_left_padded_window", (200, 90), starts=(150, 70), tokens=3, left=40),
        DecodeCase("dense_scale_negative", (90, 4), scale=-0.7),
        DecodeCase("dense_scale_zero", (90, 4), scale=0.0),
        DecodeCase("dense_odd_widths", (90, 4), head_dim=21, head_dim_v=40, heads=(5, 1)),
        DecodeCase("dense_heads_first", (90, 4), storage="heads_first"),
        DecodeCase("dense_gaps", (90, 4), storage="gaps", tokens=2),
        DecodeCase("dense_odd_offset", (90, 4), storage="odd_offset"),
        DecodeCase("dense_partial", (90, 4, 0), tokens=2, partial=True),
        DecodeCase("dense_nothing", (0, 0), tokens=2, sinks=True),
        DecodeCase("dense_no_room", (0, 0), room=0),
        DecodeCase("dense_fp8", (200, 3), tokens=2, fp8=True),
        _pages("pages_of_1", 1, lengths=(70, 3, 0)),
        _pages("pages_of_16", 16, lengths=(300, 16, 17, 1)),
        _pages("pages_of_16_tokens_4", 16, lengths=(300, 3, 17, 0), tokens=4),
        _pages("pages_of_13", 13, lengths=(150, 26, 2), tokens=2),
        _pages("pages_of_64_heads_first", 64, lengths=(200, 64), heads_first=True),
        _pages("pages_of_1024", 1024, lengths=(1100, 3), room=1),
        _pages("pages_window_softcap_sinks", 16, lengths=(300, 3, 40), tokens=3, left=30, softcap=3.0, sinks=True),
        DecodeCase("dense_fp8_window", (200, 3), tokens=2, left=9, fp8=True),
        _pages("pages_window", 16, lengths=(300, 3, 40), left=9),
        _pages("pages_window_tokens_5", 4, lengths=(300, 9, 40), tokens=5, left=33, heads=(8, 2)),
        _pages(
            "pages_lost", 16, lengths=(100, 40, 5), tokens=3, lost=((0, 2, -1), (1, 2, 2**31 - 1), (2, 0, -(2**31)))
        ),
        _pages("pages_fp8", 16, lengths=(200, 3), heads=(8, 2), head_dim=32, fp8=True),
        _pages("pages_fp8_window_sinks", 4, lengths=(60, 3, 0), tokens=4, left=20, sinks=True, fp8=True),
        _pages("pages_fp8_tokens_8_width_256", 16, lengths=(200, 9), tokens=8, heads=(4, 1), head_dim=256, fp8=True),
        _pages("pages_one_head", 16, lengths=(40, 9), heads=(1, 1), head_dim=64),
    )
}


def assert_decode_as_good_as(actual: tuple[Tensor, Tensor], call: DecodeCall) -> Ratios:
    """Compare out and lse of a decode with the oracle, each sequence by the rules of `compare`.

    >>> call = DECODES["pages_of_16"].build()
    >>> sorted(assert_decode_as_good_as(reference.decode(call, torch.float32), call))
    ['lse', 'out', 'out to eager']

    Raises AssertionError if a ratio exceeds 1 or is NaN.
    """
    out, lse = actual
    outs, logs = compare._Tally("out"), compare._Tally("lse")
    for b in range(call.q.shape[0]):
        one = reference.sequence(call, b)
        exact = reference.forward(one)
        rest, floor, floor_lse = compare._forward_bounds(one)
        outs.add(
            out[b : b + 1],
            exact.out,
            rest,
            floor,
            compare._eager(one)[0] if out.numel() >= compare._MANY else exact.out,
        )
        logs.add_allowed(
            lse[b : b + 1],
            exact.lse,
            torch.maximum(compare._lse_allowed(exact.lse, one._replace(partial=True)), floor_lse),
        )
    ratios = {**outs.ratios(), **logs.ratios()}
    if not all(ratio <= 1 for ratio in ratios.values()):  # so that NaN raises
        raise AssertionError(f"beyond the limit of 1: {ratios} for {DecodeProblem.from_call(call)}")
    return ratios
