"""Random small problems against the oracle, forward and backward: what nobody thought of putting into the table.

Every push runs the same 1,000 (derandomised, float32); the nightly run draws 20,000 new ones and prints how to see a
failure again.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import strobe
from strobe.testing import FAMILIES, Case
from strobe.testing.cases import STORAGES

DTYPES = [torch.float32, torch.float64]
lengths = st.integers(0, 40) | st.sampled_from([0, 1, 2, 15, 16, 17, 31, 32, 33])
bounds = st.none() | st.integers(0, 45)


@st.composite
def masks(draw, dense: bool, batch: int):
    """A function of (case, device); prefixes, lengths and ids are as long as the case needs."""
    left, right = draw(bounds), draw(bounds | st.just(0))
    prefix = draw(st.none() | st.lists(st.integers(0, 45), min_size=batch, max_size=batch)) if dense else None
    key_lengths = draw(st.none() | st.lists(st.integers(0, 45), min_size=batch, max_size=batch)) if dense else None
    ids_seed, n_ids = draw(st.none() | st.integers(0, 2**16)) if dense else None, draw(st.integers(1, 5))
    in_runs, two_sides = draw(st.booleans()), draw(st.booleans())

    def build(case: Case, device) -> strobe.Mask:
        mask = strobe.window(left, right)
        if prefix is not None:
            mask = mask & strobe.prefix_causal(torch.tensor(prefix, dtype=torch.int32, device=device))
        if key_lengths is not None:  # a length is at most S_k: what lies beyond is reported as an error
            mask = mask & strobe.key_lengths(
                torch.tensor([min(n, case.keys) for n in key_lengths], dtype=torch.int32, device=device)
            )
        if ids_seed is None:
            return mask
        generator = torch.Generator().manual_seed(ids_seed)
        ids = [
            torch.randint(-1, n_ids, (case.batch, n), generator=generator).to(torch.int32)
            for n in (case.seqlen_q, case.keys)
        ]
        ids = [one.sort(1).values.to(device) if in_runs else one.to(device) for one in ids]
        same_side = case.seqlen_q == case.keys and not two_sides
        return mask & (strobe.documents(ids[0]) if same_side else strobe.documents(*ids))

    return build


@st.composite
def problems(draw, dense: bool):
    """A Case of either layout, an input family and a seed."""
    group, heads_kv = draw(st.sampled_from([1, 1, 2, 3])), draw(st.integers(1, 3))
    batch = draw(st.integers(1, 3))
    head_dim = draw(st.integers(1, 24))
    options = {
        "heads": (group * heads_kv, heads_kv),
        "head_dim": head_dim,
        "head_dim_v": draw(st.none() | st.integers(1, 24)),
        "scale": draw(st.none() | st.sampled_from([0.0, -0.25, 0.5, 1.0])),
        "softcap": draw(st.sampled_from([0.0, 0.0, 0.0, 2.0, 30.0])),
        "partial": draw(st.booleans()),
        "mask": draw(masks(dense, batch)),
    }
    options["sinks"] = not options["partial"] and draw(st.booleans())
    if dense:
        options |= {
            "batch": batch,
            "seqlen_q": draw(lengths),
            "seqlen_k": draw(lengths),
            "storage": draw(st.sampled_from(STORAGES)),
        }
    else:
        pairs = draw(st.lists(st.tuples(lengths, lengths), max_size=4))
        options |= {
            "lengths_q": tuple(m for m, _ in pairs),
            "lengths_k": tuple(n for _, n in pairs),
            "outside": draw(st.sampled_from([(0, 0), (0, 0), (3, 0), (0, 5)])),
            "promised": draw(st.booleans()),
            "storage": draw(st.sampled_from([storage for storage in STORAGES if storage != "expanded_batch"])),
        }
    return Case("drawn", **options), draw(st.sampled_from(FAMILIES)), draw(st.integers(0, 2**16))


def check(judge, problem, dtype, device, kernel):
    case, family, seed = problem
    judge(case.build(device, dtype, family, seed, requires_grad=True, kernel=kernel), family, seed)


@pytest.mark.parts(2, seed=789971754)
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
@settings(max_examples=700)
@given(problem=problems(dense=True))
def test_dense(problem, dtype, device, kernel, judge):
    check(judge, problem, dtype, device, kernel)


@pytest.mark.nightly_cases("cpu-float64")
@pytest.mark.parts(2, seed=789971754)
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
@settings(max_examples=300)
@given(problem=problems(dense=False))
def test_packed(problem, dtype, device, kernel, judge):
    check(judge, problem, dtype, device, kernel)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
@settings(max_examples=7000, derandomize=False)
@given(problem=problems(dense=True))
def test_dense_nightly(problem, dtype, device, kernel, judge):
    check(judge, problem, dtype, device, kernel)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
@settings(max_examples=3000, derandomize=False)
@given(problem=problems(dense=False))
def test_packed_nightly(problem, dtype, device, kernel, judge):
    check(judge, problem, dtype, device, kernel)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@settings(max_examples=1000, derandomize=False)
@given(problem=problems(dense=True) | problems(dense=False))
def test_narrow_dtypes_nightly(problem, dtype, device, kernel, judge):
    check(judge, problem, dtype, device, kernel)
