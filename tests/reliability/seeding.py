"""Seeds one fault at a time into the library's own code, and the checks that must notice it."""

from __future__ import annotations
import __future__

import contextlib
import functools
import inspect
import linecache
import os
import textwrap
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from types import FunctionType
from typing import Any, NamedTuple

import pytest
import torch

from strobe.kernels.runtime.launch_cache import CACHE
from strobe.testing import CASES, FAMILIES, Case
from strobe.testing.poison import fill_with_poison, patched_empty
from tests import test_contract, test_metamorphic
from tests.judging import judged_call
from tests.kernels.cpu import test_cpu
from tests.ops import test_ops
from tests.problem import test_bad_input
from tests.reliability import test_reliability

NOTICED = (
    AssertionError,
    pytest.fail.Exception,
    RuntimeError,
    ValueError,
)  # the last two: torch meets shapes that disagree, or the checks of arguments refuse
Check = Callable[[], object]


class Mutant(NamedTuple):
    name: str
    where: str  # module:function below strobe
    old: str  # in the function's source, exactly once
    new: str
    check: Check
    rows: tuple[int, ...] = ()


# ---------------------------------------------------------------- seeding


def _found(where: str) -> Any:
    """The function (of a method or a property too), or the kernel's object in Triton's interpreter."""
    module, _, path = where.partition(":")
    found: Any = import_module(f"strobe.{module}")
    for name in path.split("."):
        found = inspect.getattr_static(found, name)
    return getattr(found, "__func__", getattr(found, "fget", found))


def _rewritten(function: FunctionType, mutant: Mutant) -> Any:
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(mutant.old) == 1, f"{mutant.name}: {mutant.old!r} is not once in {mutant.where}"
    source, name = source.replace(mutant.old, mutant.new), f"<mutant: {mutant.name}>"
    linecache.cache[name] = (
        len(source),
        None,
        source.splitlines(keepends=True),
        name,
    )  # Triton's interpreter reads the source again
    made: dict[str, Any] = {}
    exec(compile(source, name, "exec", __future__.annotations.compiler_flag, True), function.__globals__, made)
    found = made[function.__name__]
    return getattr(found, "__func__", getattr(found, "fget", found))


@contextlib.contextmanager
def seeded(mutant: Mutant):
    """The fault in place: whoever imported the function runs it too, for the object stays and its inside changes."""
    target = _found(mutant.where)
    plain = isinstance(target, FunctionType)
    own = target.__code__ if plain else dict(target.__dict__)
    other = _rewritten(target if plain else target.fn, mutant)
    CACHE.clear()
    try:
        if plain:
            target.__code__ = other.__code__
        else:
            target.__dict__.update(other.__dict__)
        yield
    finally:
        if plain:
            target.__code__ = own
        else:
            target.__dict__.update(own)
        CACHE.clear()


def noticed(check: Check) -> str:
    """What the check objects to; empty where it is content."""
    try:
        with patched_empty(fill_with_poison):
            check()
    except NOTICED as objection:
        return (str(objection) or type(objection).__name__).splitlines()[0]
    return ""


@functools.cache
def false_alarm(check: Check) -> str:
    return noticed(check)


# ---------------------------------------------------------------- checks

KERNEL = "portable" if os.environ.get("TRITON_INTERPRET") else "cpu"


@functools.cache
def judged(*names: str, families: tuple[str, ...] = ("normal",), dtype=torch.float32, **changes) -> Check:
    """Named cases, forward and backward, between guard bands and against the oracle by both rules."""

    def check():
        for name in names:
            case = (
                replace(CASES.get(name, CASES["causal"]), **changes)
                if name in CASES or not changes
                else Case(name, **changes)
            )
            for family in families:
                judged_call(case.build("cpu", dtype, family, 3, requires_grad=True, kernel=KERNEL), family, 3)

    return check


def runs(test: Callable, *arguments, **keywords) -> Check:
    """A test of another file, called with these arguments."""
    return functools.partial(test, *arguments, **keywords)


HERE = {"device": "cpu", "kernel": KERNEL}
PROBE = runs(test_contract.test_indicator_probe_dense, torch.float32, **HERE)
GOLDEN = {name: runs(test_contract.test_golden_mask, name, **HERE) for name in test_contract.GOLDEN}
MANY_KEYS = judged(
    "many keys",
    seqlen_q=40,
    seqlen_k=300,
    heads=(4, 2),
    head_dim=16,
    head_dim_v=24,
    mask=CASES["causal"].mask,
    families=FAMILIES,
)
SMALL_TILES = runs(test_cpu.test_tiles_of_any_size_give_the_same, "window", True)
PARTIAL_BFLOAT16 = judged("partial", dtype=torch.bfloat16)
EMPTY_ROWS = runs(test_contract.test_rows_without_keys, "causal_more_rows", False, torch.float32, **HERE)
MERGE_EMPTY = runs(test_contract.test_merge_with_nothing_is_the_other_to_the_bit)
CAUSAL_HALVES = runs(test_metamorphic.test_merging_causal_halves, **HERE)
HALVES = runs(
    test_metamorphic.test_halves_merge_into_the_whole, 9, torch.bfloat16, **HERE
)  # whose partial results torch's kernel rounds too early


def keyed(name: str) -> Check:
    return runs(test_ops.test_a_call_is_not_mistaken_for_another_that_differs_in_one_argument, name)


def refused(argument: str) -> Check:
    """All bad calls that name this argument are told so."""
    return runs(_refused, argument)


def _refused(argument: str) -> None:
    table = [bad for bad in test_bad_input.TABLE if bad.argument == argument]
    complaints = [found for bad in table if (found := test_bad_input.complaint(bad))]
    assert table and not complaints, complaints


def _judge(call, family: str = "normal", seed: int = 0) -> None:
    judged_call(call, family, seed)


def _guarded() -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_reliability.test_a_launch_is_guarded_by_its_tensors_device(0, [1], patch)


def _far_rows() -> None:
    """Rows 2^30 elements apart, in memory that is there on both sides: an int32 product reads zeros."""
    q, k, v = test_reliability.draw(*[(1, 3, 1, 16)] * 3, dtype=torch.float16)
    room = test_reliability.sparse(2**32 + 2048)
    far = [
        room.as_strided((1, 3, 1, 16), (16, 2**30 + 64, 16, 1), 2**31 + 512 * n).copy_(t)
        for n, t in enumerate((q, k, v))
    ]
    assert torch.equal(
        test_reliability.strobe.attention(*far, kernel=KERNEL),
        test_reliability.strobe.attention(q, k, v, kernel=KERNEL),
    )
