"""Named problems of packed queries over a cache, with which tests run every kernel of them, and the comparison with the
oracle.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import reference
from ..problem.cache import FP8
from ..problem.decode import DecodeCall
from ..problem.mask import NO_BOUND
from ..problem.paged import PagedCall, PagedProblem
from . import compare, inputs
from .compare import Ratios
from .decode import DecodeCase

MOST_SCALE = 3  # powers of two by which scales of keys and heads differ


@dataclass(frozen=True)
class PagedCase(DecodeCase):
    """A named problem. `tokens` is the most new tokens that are promised, 0: nothing is. Everything that no query sees
    is NaN, as in a DecodeCase.
    """

    news: tuple[int, ...] = (3, 1)  # new tokens of each sequence
    padding: int = 0  # rows of q that no sequence has
    token_scales: bool = False  # of an 8-bit cache: a scale for each key and head

    def build(
        self,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        family: str = "normal",
        seed: int = 0,
        kernel: str = "",
        batch_invariant: bool = False,
    ) -> PagedCall:  # type: ignore[override]
        """The PagedCall, with tensors on `device`, q in `dtype`, and values of the input `family`."""
        total, (heads_q, _) = sum(self.news) + self.padding, self.heads
        call: DecodeCall = super().build(device, dtype, family, seed, kernel, batch_invariant)
        shape = (1, max(1, total), heads_q, self.head_dim)
        q = inputs.qkv(family, shape, (1, 1, self.heads[1], self.head_dim), self.head_dim, seed)[0][0, :total]
        offsets = torch.tensor((0, *self.news), dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
        k_scale, v_scale = call.k_scale, call.v_scale
        if self.token_scales:
            generator = torch.Generator().manual_seed(seed + 5)
            k_scale, v_scale = (
                _by_token(scale, pool, generator) for scale, pool in ((k_scale, call.k), (v_scale, call.v))
            )
        return PagedCall(
            q.to(device, dtype), *call[1:4], offsets, *call[4:6], k_scale, v_scale, call.sinks,
            self.tokens or NO_BOUND, *call[9:-1],
        )  # fmt: skip

    def _first(self, b: int) -> int:
        """The first key of sequence b in the window of its first query."""
        return 0 if self.left == NO_BOUND else max(0, self.lengths[b] - self.news[b] - self.left)


def _by_token(scale: Tensor | None, pool: Tensor, generator: torch.Generator) -> Tensor:
    """Scales of each key and head: a power of two times that of the head; NaN where the pool holds no key."""
    powers = torch.randint(-MOST_SCALE, MOST_SCALE + 1, pool.shape[:3], generator=generator).to(pool.device)
    own = torch.ones((), device=pool.device) if scale is None else scale
    empty = pool.view(torch.uint8)[..., 0] & 0x7F == 0x7F if pool.dtype == FP8 else pool[..., 0].isnan()
    return (own * torch.exp2(powers.float())).masked_fill(empty, torch.nan).contiguous()


def _case(name: str, page_size: int, lengths: tuple[int, ...], news: tuple[int, ...], **rest) -> PagedCase:
    return PagedCase(name, lengths, rest.pop("tokens", 0), page_size=page_size, news=news, **rest)


PAGED = {
    case.name: case
    for case in (
        _case("mixed", 16, (300, 1, 64, 129), (40, 1, 0, 3)),
        _case("mixed_promised", 16, (300, 17, 64, 129), (40, 1, 64, 3), tokens=64),
        _case("one_token", 16, (300, 16, 17, 1), (1, 1, 1, 1), tokens=1),
        _case("speculated", 16, (300, 3, 17, 0), (4, 3, 1, 0), tokens=4, heads=(8, 2)),
        _case("prefill", 16, (130, 70), (130, 70), padding=5),
        _case("no_tokens", 16, (130, 70), (0, 0), padding=3, sinks=True),
        _case("more_tokens_than_keys", 16, (2, 0, 40), (7, 3, 50), sinks=True),
        _case("full", 16, (70, 9), (5, 9), right=NO_BOUND),
        _case("window", 16, (300, 20, 66), (30, 2, 1), left=17),
        _case("window_both", 4, (100, 20, 66), (30, 2, 9), left=9, right=2),
        _case("window_softcap_sinks", 16, (200, 7, 40), (20, 7, 1), left=30, softcap=3.0, sinks=True),
        _case("sinks_without_bound", 16, (200, 0, 7), (9, 1, 2), sinks=(3e38, torch.inf, -torch.inf, 0.5)),
        _case("pages_of_1", 1, (70, 3, 0), (9, 3, 0)),
        _case("pages_of_13", 13, (150, 26, 2), (2, 26, 1)),
        _case("pages_of_64_heads_first", 64, (200, 64), (17, 1), heads_first=True),
        _case("pages_of_1024", 1024, (1100, 3), (6, 2), room=1),
        _case("pages_lost", 16, (100, 40, 5), (3, 20, 2), lost=((0, 2, -1), (1, 2, 2**31 - 1), (2, 0, -(2**31)))),
        _case("scale_negative", 16, (90, 4), (5, 1), scale=-0.7),
        _case("scale_zero", 16, (90, 4), (5, 1), scale=0.0),
        _case("odd_widths", 16, (90, 4), (5, 1), head_dim=21, head_dim_v=40, heads=(5, 1)),
        _case("group_3", 16, (100, 41), (40, 7), heads=(6, 2)),
        _case("partial", 16, (90, 4, 0), (20, 2, 1), partial=True),
        _case("rows", 0, (300, 4, 0, 70), (20, 4, 0, 1)),
        _case("rows_left_padded", 0, (200, 90, 64), (9, 2, 3), starts=(3, 70, 64)),
        _case("rows_left_padded_window", 0, (200, 90), (30, 3), starts=(150, 70), left=40),
        _case("rows_gaps", 0, (90, 4), (9, 2), storage="gaps"),
        _case("fp8", 16, (200, 3), (30, 1), heads=(8, 2), head_dim=32, fp8=True),
        _case("fp8_token_scales", 16, (200, 3, 40), (30, 1, 4), fp8=True, token_scales=True, softcap=5.0),
        _case("fp8_token_scales_window", 4, (60, 3, 0), (9, 3, 0), left=20, fp8=True, token_scales=True, sinks=True),
        _case("fp8_token_scales_rows", 0, (90, 33), (9, 33), fp8=True, token_scales=True),
    )
}


def assert_paged_as_good_as(actual: tuple[Tensor, Tensor], call: PagedCall) -> Ratios:
    """Compare out and lse with the oracle, each sequence by the rules of `compare`, and rows of no sequence with 0.

    >>> call = PAGED["mixed"].build()
    >>> sorted(assert_paged_as_good_as(reference.paged(call, torch.float32), call))
    ['lse', 'out', 'out to eager']

    Raises AssertionError if a ratio exceeds 1 or is NaN.
    """
    out, lse = actual
    outs, logs = compare._Tally("out"), compare._Tally("lse")
    for rows, one in reference.paged_sequences(call):
        exact = reference.forward(one)
        rest, floor, floor_lse = compare._forward_bounds(one)
        eager = compare._eager(one)[0] if out.numel() >= compare._MANY else exact.out
        outs.add(out[None, rows], exact.out, rest, floor, eager)
        allowed = compare._lse_allowed(exact.lse, one._replace(partial=True))
        logs.add_allowed(lse[None, :, rows], exact.lse, torch.maximum(allowed, floor_lse))
    ratios = {**outs.ratios(), **logs.ratios()}
    if not all(ratio <= 1 for ratio in ratios.values()):  # so that NaN raises
        raise AssertionError(f"beyond the limit of 1: {ratios} for {PagedProblem.from_call(call)}")
    last = int(call.cu_seqlens_q[-1])
    beyond = -torch.inf if call.sinks is None else call.sinks.to(lse.dtype)[:, None]
    if out[last:].any() or not (lse[:, last:] == beyond).all():
        raise AssertionError(f"rows of no sequence are not 0 for {PagedProblem.from_call(call)}")
    return ratios
