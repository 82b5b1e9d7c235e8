"""Functions of scores and masks in the Hopper decode: named calls, and their results in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import strobe
from strobe import reference
from strobe.kernels.protocol import Forward
from strobe.ops.cached_functions import bind_functions
from strobe.problem.call import Call
from strobe.problem.paged import PagedCall
from strobe.testing.decode import DECODES, DecodeCase
from strobe.testing.mods import Functions
from tests.kernels.hopper.paged_cases import CASES as PAGED
from tests.kernels.score_mod_oracle import Mods, exact, judge_against

AnyCall = Any  # a DecodeCall or a PagedCall

# ---------------------------------------------------------------- functions


def every_index(call: AnyCall) -> Functions:
    """A score and a mask that depend on all that a function may."""
    device, heads = call.q.device, call.q.shape[-2]
    slopes = torch.linspace(0.02, 0.3, heads, device=device)
    steps = torch.arange(heads, device=device) % 4 + 2
    table = torch.randn(5, 16, generator=torch.Generator().manual_seed(1)).to(device)
    score = lambda s, b, h, i, j: s + 0.3 * b - slopes[h] * (i - j) + table[i % 5, j // 64]
    return Functions(score, lambda b, h, i, j: ((i - j) % steps[h] != 1) | (j == b))


def tree(call: AnyCall) -> Functions:
    """Trees of drafted tokens: a token sees its ancestors, and all keys before the drafted ones."""
    packed = isinstance(call, PagedCall)
    news = call.cu_seqlens_q.diff() if packed else torch.full_like(call.seqlens, call.q.shape[1])
    tokens = max(1, int(news.max()))
    past, most = call.seqlens.long() - news, tokens - 1
    draw = torch.Generator().manual_seed(2)
    ancestors = torch.rand(len(past), tokens, tokens, generator=draw) < 0.5
    ancestors = (ancestors | torch.eye(tokens, dtype=torch.bool)).to(call.q.device)

    def seen(b, h, i, j):
        return (j < past[b]) | ancestors[b, (i - past[b]).clamp(0, most), (j - past[b]).clamp(0, most)]

    return Functions(None, seen)


def hides_by_score(call: AnyCall) -> Functions:
    """Rows whose scores are all -inf, and rows with a few that are not."""
    return Functions(lambda s, b, h, i, j: torch.where((i % 2 == 1) | (j % 3 == 0), -torch.inf, s))


def outside(call: AnyCall) -> Functions:
    """Indices beyond a captured tensor, which are clamped: of a score by key, of a mask by row."""
    near, shown = torch.linspace(-1, 1, 5, device=call.q.device), torch.tensor([False, True], device=call.q.device)
    return Functions(lambda s, b, h, i, j: s + near[j], lambda b, h, i, j: shown[i] | (j % 2 == 0))


def of_outside(call: AnyCall) -> Functions:
    """What `outside` means."""
    near, shown = torch.linspace(-1, 1, 5, device=call.q.device), torch.tensor([False, True], device=call.q.device)
    return Functions(
        lambda s, b, h, i, j: s + near[j.clamp(max=4)], lambda b, h, i, j: shown[i.clamp(max=1)] | (j % 2 == 0)
    )


FUNCTIONS: dict[str, Callable[[AnyCall], Functions]] = {
    "every index": every_index,
    "score": lambda call: every_index(call)._replace(mask=None),
    "mask": lambda call: every_index(call)._replace(score=None),
    "tree": tree,
    "tree and score": lambda call: tree(call)._replace(score=every_index(call).score),
    "hidden by score": hides_by_score,
    "outside": outside,
    "row alone": lambda call: Functions(lambda s, b, h, i, j: i * 0.5, lambda b, h, i, j: h != 1),
    "key alone": lambda call: Functions(lambda s, b, h, i, j: j * 0.25, lambda b, h, i, j: b == 0),
    "constants": lambda call: Functions(lambda s, b, h, i, j: s * 0 + 2.0, lambda b, h, i, j: i >= 0),
}
MEANT = FUNCTIONS | {"outside": of_outside}

# ---------------------------------------------------------------- calls


@dataclass(frozen=True)
class HookCase:
    case: DecodeCase
    functions: str

    def build(self, device: str, dtype: torch.dtype, seed: int, kernel: str = "hopper") -> AnyCall:
        call: AnyCall = self.case.build(device, dtype, "normal", seed, kernel)
        given = FUNCTIONS[self.functions](call)
        return bind_functions(call, given.score, given.mask and strobe.mask_mod(given.mask))


CASES = {
    "dense, tokens 5": HookCase(DECODES["dense_tokens_5"], "every index"),
    "dense, tokens 40, group 3": HookCase(DECODES["dense_tokens_40_group_3"], "every index"),
    "dense, tokens 16, group 8": HookCase(DECODES["dense_tokens_16_group_8"], "tree and score"),
    "softcap sinks": HookCase(DECODES["dense_softcap_sinks"], "every index"),
    "window": HookCase(DECODES["dense_window"], "every index"),
    "window of both sides": HookCase(DECODES["dense_window_both"], "mask"),
    "no bound": HookCase(DECODES["dense_full"], "tree"),
    "left padded": HookCase(DECODES["dense_left_padded"], "every index"),
    "left padded, window": HookCase(DECODES["dense_left_padded_window"], "score"),
    "scale negative": HookCase(DECODES["dense_scale_negative"], "score"),
    "scale zero": HookCase(DECODES["dense_scale_zero"], "score"),
    "partial": HookCase(DECODES["dense_partial"], "row alone"),
    "nothing": HookCase(DECODES["dense_nothing"], "every index"),
    "d160, tokens 8": HookCase(DecodeCase("wide", (150, 9), 8, (8, 2), 160, left=90), "every index"),
    "pages of 1": HookCase(DECODES["pages_of_1"], "hidden by score"),
    "pages of 13": HookCase(DECODES["pages_of_13"], "outside"),
    "pages of 16": HookCase(DECODES["pages_of_16"], "key alone"),
    "pages lost": HookCase(DECODES["pages_lost"], "every index"),
    "pages, window softcap sinks": HookCase(DECODES["pages_window_softcap_sinks"], "every index"),
    "8 bits": HookCase(DECODES["pages_fp8"], "every index"),
    "8 bits, window sinks": HookCase(DECODES["pages_fp8_window_sinks"], "tree and score"),
    "packed, one token": HookCase(PAGED["one token"], "score"),
    "packed, speculated": HookCase(PAGED["speculated"], "tree"),
    "packed, up to 16": HookCase(PAGED["up to 16"], "tree and score"),
    "packed, more tokens than keys": HookCase(PAGED["more tokens than keys"], "every index"),
    "packed, window softcap sinks": HookCase(PAGED["window softcap sinks"], "every index"),
    "packed, pages of 1": HookCase(PAGED["pages of 1"], "constants"),
    "packed, pages lost": HookCase(PAGED["pages lost"], "hidden by score"),
    "packed, left padded": HookCase(PAGED["rows left padded, window"], "every index"),
    "packed, 8 bits": HookCase(PAGED["8 bits"], "every index"),
    "packed, 8 bits, up to 16": HookCase(replace(PAGED["up to 16"], fp8=True), "tree and score"),
}

# ---------------------------------------------------------------- the oracle


def sequences(call: AnyCall) -> Iterator[tuple[int, slice, Call]]:
    """(its number, its rows of out as `flat` has them, the call of it alone) of each sequence with rows."""
    if isinstance(call, PagedCall):
        numbers = [b for b, count in enumerate(call.cu_seqlens_q.diff().tolist()) if count > 0]
        yield from ((b, rows, one) for b, (rows, one) in zip(numbers, reference.paged_sequences(call), strict=True))
    else:
        tokens = call.q.shape[1]
        for b in range(len(call.q)):
            yield b, slice(b * tokens, b * tokens + tokens), reference.sequence(call, b)


def at_positions(functions: Functions, call: AnyCall, one: Call, b: int) -> Mods:
    """The functions for the oracle, whose sequence is number 0, and whose rows and keys are counted from 0."""
    start = 0 if call.k_start is None else int(call.k_start[b].clamp(0, call.seqlens[b]))
    length = int(call.seqlens[b]) - start
    first, past = length - one.k.shape[1], length - one.q.shape[1]
    score, mask = functions.score, functions.mask
    place = lambda number, h, i, j: (number + b, h, (i + past).clamp(min=0), j + first)
    return Mods(
        score=None if score is None else lambda s, *at: score(s, *place(*at)),
        mask=None if mask is None else lambda *at: mask(*place(*at)),
    )


@torch.no_grad()
def judge(found: tuple[Tensor, Tensor], call: AnyCall, functions: str) -> float:
    """Largest error relative to what rounding allows (`score_mod_oracle.judge_against`), over all sequences."""
    out, lse = found
    if not isinstance(call, PagedCall):
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    worst, meant = 0.0, MEANT[functions](call)
    for b, rows, one in sequences(call):
        expected, logs, size = exact(one, at_positions(meant, call, one, b))
        part = Forward(out[None, rows], lse[None, :, rows])
        worst = max(worst, judge_against(part, one, expected, logs, size))
    return worst
