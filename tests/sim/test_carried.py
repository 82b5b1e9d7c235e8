"""Loops that Triton's frontend compiles into something else than their source says, and those that only look like
it."""

import pytest
import torch
import triton
import triton.language as tl

from strobe.sim import simulate


@triton.jit
def lagging_kernel(out, turns):
    """`before` begins as the value of `at` and takes it again: the frontend takes it for unchanged."""
    at = tl.load(out)
    before = at
    for _ in range(turns):
        before = at
        at = at + 1
    tl.store(out, before)


@triton.jit
def part_kernel(out, turns):
    """`before` begins as a part of `at`, and takes that part again."""
    at = (tl.load(out), tl.load(out))
    before = at[0]
    for _ in range(turns):
        before = at[0]
        at = (at[0] + 1, at[1])
    tl.store(out, before)


@triton.jit
def late_kernel(out, turns):
    """`found` changes in its second turn first, where a branch is taken: the frontend sees all branches."""
    found = tl.load(out)
    for i in range(turns):
        if i >= 1:
            found = found + i
    tl.store(out, found)


def kinds_of(kernel) -> tuple[set[str], float]:
    out = torch.zeros(1)
    with simulate("sm_90", check=False) as run:
        kernel[(1,)](out, 5)
    return {report.kind for report in run.reports}, float(out)


@pytest.mark.parametrize("kernel", [lagging_kernel, part_kernel])
def test_a_name_that_begins_as_the_value_of_another_is_told(kernel):
    kinds, _ = kinds_of(kernel)
    assert kinds == {"compiler"}


def test_a_branch_that_is_not_taken_at_first_is_no_fault():
    assert kinds_of(late_kernel) == (set(), 10.0)
