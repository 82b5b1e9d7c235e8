"""Many drawn ragged batches: nightly 100,000 on a CPU and 10,000 on a GPU; and drawn mixes with equal bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import strobe
from strobe import reference
from strobe.ops import paged as ops_paged
from tests.ops import paged_fuzz
from tests.ops.test_paged import same_bits_in_any_mix

CHUNK, MANY = 5000, 100_000
ON_A_GPU = 10_000 // len(paged_fuzz.FORMS) + 1


@pytest.mark.parametrize("seed", range(0, 200, 20))
def test_drawn_batches_are_those_of_the_oracle(seed):
    """The first 200; test_paged.py draws 2,000 others."""
    for number in range(seed, seed + 20):
        paged_fuzz.check(number)


@pytest.mark.nightly
@pytest.mark.parametrize("begin", range(0, MANY, CHUNK))
def test_many_drawn_batches(begin):
    for number in range(begin, begin + CHUNK):
        paged_fuzz.check(number)


def test_a_wrong_result_is_found():
    """A mask that is one key too wide for one of the drawn batches."""
    numbers = [n for n in range(40) if paged_fuzz.drawn(n).left == 3]
    assert numbers
    with pytest.raises(AssertionError):
        for number in numbers:
            case = paged_fuzz.drawn(number)
            call, wide = (one.build(dtype=torch.float64, seed=number) for one in (case, replace(case, left=4)))
            torch.testing.assert_close(ops_paged.run(wide)[0], reference.paged(call)[0])


@pytest.mark.parametrize("number", range(12))
def test_drawn_mixes_have_the_same_bits(number, device, kernel):
    """Each sequence alone, with other sequences, and in two calls of half of its tokens (batch_invariant)."""
    found = [n for n in range(400) if paged_fuzz.drawn(n).page_size and paged_fuzz.drawn(n).right == 0]
    case = replace(paged_fuzz.drawn(found[number]), padding=0, tokens=0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    same_bits_in_any_mix(case, device, kernel, dtype)


@pytest.mark.gpu
@pytest.mark.nightly
@pytest.mark.parametrize("form", paged_fuzz.FORMS, ids=str)
def test_many_drawn_batches_on_a_gpu(form):
    """10,000 in all. The device compares, and the host looks once."""
    fuzz = paged_fuzz.GpuFuzz(form, "cuda")
    wrong = torch.stack([fuzz.bad(fuzz.batch()) for _ in range(ON_A_GPU)])
    assert not wrong.any(), wrong.nonzero().flatten().tolist()
    assert strobe.last_errors() == []


@pytest.mark.parametrize("form", paged_fuzz.FORMS, ids=str)
def test_the_comparison_of_the_gpu_on_a_cpu(form):
    """It accepts what is right, and finds a table whose first page is another's."""
    fuzz = paged_fuzz.GpuFuzz(form, "cpu", seed=3)
    batches = [fuzz.batch() for _ in range(2)]
    assert not any(bool(fuzz.bad(batch)) for batch in batches)
    right = fuzz.dense(batches[0])
    table = batches[0].cache.page_table.clone()
    longest = int(batches[0].news.argmax())
    table[longest] = table[longest].roll(1)
    moved = batches[0]._replace(cache=batches[0].cache._replace(page_table=table))
    assert not torch.equal(fuzz.dense(moved)[0], right[0])
    fuzz.dense = lambda batch: right  # the other table's
    assert bool(fuzz.bad(moved))
