"""Random problems through the GPU kernels' own source, on the simulator and against the oracle: what nobody thought of
putting into a table.

`make nightly` draws new ones each time and prints how to see a failure again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.hopper.hopper_cases import DTYPES, band

pytest.importorskip("triton")

from strobe.kernels.hopper import kernel as hopper
from strobe.problem import mask as masks
from strobe.problem.target import FAKES
from strobe.testing import FAMILIES, Case
from tools.proof.simulate import on

EDGES = (0, 1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 257)
WIDTHS = (8, 16, 32, 40, 64, 72, 96, 104, 120, 128, 136, 160, 184, 192, 200, 248, 256)
HEADS = ((1, 1), (2, 2), (2, 1), (3, 1), (4, 1), (4, 2), (6, 2), (8, 1))
STORAGES = (
    "contiguous",
    "heads_first",
    "gaps",
    "mixed",
)  # that TMA can walk: the tables have the others, which run elsewhere
TARGETS = {"hopper": ("H200",), "portable": ("A100", "H200"), "blackwell": ("B200",)}
lengths = st.sampled_from(EDGES) | st.integers(0, 300)
bounds = st.sampled_from([None, 0, 1, 16, 63, 64, 100]) | st.integers(0, 400)


@dataclass(frozen=True)
class Drawn:
    case: Case
    dtype: torch.dtype
    family: str
    seed: int
    schedule: tuple[str, int]
    sms: int
    many_keys: bool  # the Hopper kernels as they run where rows see many
    deterministic: bool
    batch_invariant: bool


@st.composite
def problems(draw, widest: int):
    widths = st.sampled_from([width for width in WIDTHS if width <= widest])
    width, heads = draw(widths), draw(st.sampled_from(HEADS))
    options = {
        "head_dim": width,
        "head_dim_v": draw(st.none() | widths),
        "heads": heads,
        "batch": 1,
        "mask": draw(st.none() | st.builds(band, bounds, bounds | st.just(0))),
        "scale": draw(st.sampled_from([None, None, 0.3, 1.0])),
        "softcap": draw(st.sampled_from([0.0, 0.0, 0.0, 2.0, 30.0])),
        "sinks": draw(st.booleans()),
        "storage": draw(st.sampled_from(STORAGES)),
    }
    if draw(st.booleans()):
        options |= {"batch": draw(st.integers(1, 3)), "seqlen_q": draw(lengths), "seqlen_k": draw(st.none() | lengths)}
    else:
        pairs = draw(st.lists(st.tuples(lengths, lengths), max_size=4))
        options |= {
            "lengths_q": tuple(q for q, _ in pairs),
            "lengths_k": draw(st.sampled_from([None, tuple(k for _, k in pairs)])),
        }
        options |= {"outside": draw(st.sampled_from([(0, 0), (3, 0), (5, 70)])), "promised": draw(st.booleans())}
    schedule = draw(st.sampled_from(["eager", "lazy", "random", "pct"])), draw(st.integers(0, 1000))
    flags = draw(st.booleans()), draw(st.booleans()), draw(st.sampled_from([False] * 7 + [True]))
    sms = draw(st.sampled_from([1, 2, 3, 5, 8]))
    return Drawn(
        Case("drawn", **options),
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from(FAMILIES)),
        draw(st.integers(0, 2**16)),
        schedule,
        sms,
        *flags,
    )


@dataclass(frozen=True)
class Spans:
    """A mask of documents in runs of drawn lengths, of so many ids and of none, 0: no documents; of key lengths and of
    prefixes, from 0 to all; and of a band.
    """

    seed: int
    documents: int
    lengths: bool
    prefixes: bool
    two_sides: bool
    also: Callable | None

    def __call__(self, case: Case, device: torch.device) -> masks.Mask:
        draw = torch.Generator().manual_seed(self.seed)
        mask = masks.full() if self.also is None else self.also(case, device)

        def ids(length: int) -> torch.Tensor:
            longest = int(torch.randint(1, 200, (1,), generator=draw))
            runs = torch.randint(1, longest + 1, (max(1, length),), generator=draw)
            whose = (
                torch.randint(-1, self.documents, (len(runs),), generator=draw)
                if self.seed % 2
                else torch.arange(len(runs))
            )
            return whose.repeat_interleave(runs)[:length].int()

        if self.documents:
            sides = [torch.stack([ids(n) for _ in range(case.batch)]).to(device) for n in (case.seqlen_q, case.keys)]
            mask = mask & (
                masks.documents(*sides) if self.two_sides or case.seqlen_q != case.keys else masks.documents(sides[0])
            )
        for wanted, of in ((self.lengths, masks.key_lengths), (self.prefixes, masks.prefix_causal)):
            if wanted:
                mask = mask & of(torch.randint(0, case.keys + 1, (case.batch,), generator=draw).int().to(device))
        return mask


@st.composite
def problems_with_spans(draw):
    """What rows of one batch entry see differs: drawn problems of the Hopper kernels."""
    drawn = draw(problems(256))
    case = replace(drawn.case, lengths_q=None, lengths_k=None, outside=(0, 0), promised=False)
    if drawn.case.lengths_q is not None:
        case = replace(case, seqlen_q=draw(lengths), seqlen_k=draw(st.none() | lengths))
    documents = draw(st.sampled_from([0, 1, 2, 5]))
    prefixes = draw(st.booleans())
    mask = Spans(
        draw(st.integers(0, 2**16)),
        documents,
        documents + prefixes == 0 or draw(st.booleans()),
        prefixes,
        draw(st.booleans()),
        case.mask,
    )
    return replace(drawn, case=replace(case, mask=mask), batch_invariant=False)


@pytest.mark.nightly
def test_drawn_spans(judge):
    @settings(max_examples=100, derandomize=False)
    @given(drawn=problems_with_spans())
    def check(drawn):
        run_and_judge(judge, drawn, "hopper", forward_alone=drawn.deterministic)

    check()


def run_and_judge(judge, drawn: Drawn, family: str, forward_alone: bool = False) -> None:
    forward_alone = forward_alone or family == "blackwell"
    kernel = f"{family}.forward" if forward_alone else family
    call = drawn.case.build(
        "cpu", drawn.dtype, drawn.family, drawn.seed, requires_grad=not forward_alone, kernel=kernel
    )
    call = call._replace(deterministic=drawn.deterministic, batch_invariant=drawn.batch_invariant and not forward_alone)
    name = TARGETS[family][drawn.seed % len(TARGETS[family])]
    tuned = (
        {
            "EARLY_KEYS": 0,
            "FEW_KEYS_TUNINGS": {},
            "STORED_KEYS": {},
            "DEFERRED_DQ_STEPS": dict.fromkeys(hopper.DEFERRED_DQ_STEPS, 0),
        }
        if drawn.many_keys
        else {"EARLY_KEYS": hopper.EARLY_KEYS}
    )
    with mock.patch.multiple(hopper, **tuned), on(replace(FAKES[name], sm_count=drawn.sms), *drawn.schedule) as run:
        judge(call, drawn.family, drawn.seed)
    assert run.reports == []


@pytest.mark.nightly
@pytest.mark.parametrize("family, examples", [("hopper", 150), ("portable", 100), ("blackwell", 40)])
def test_drawn_problems(family, examples, judge):
    @settings(max_examples=examples, derandomize=False)
    @given(drawn=problems(128 if family == "blackwell" else 256))
    def check(drawn):
        run_and_judge(judge, drawn, family)

    check()
