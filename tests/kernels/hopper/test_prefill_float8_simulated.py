"""Packed queries over 8-bit caches in the Hopper forward, in the simulator: the producer converts keys and values to
q's dtype.
"""

from __future__ import annotations

import ast
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
import strobe
from strobe.kernels.hopper import forward_producer
from strobe.problem.cache import FP8
from strobe.problem.paged import PagedCall
from strobe.sim import simulate
from strobe.sim.mutate import Mutant, mutants
from strobe.sim.scene import FAILURES, Scene, replaced
from strobe.testing import FAMILIES
from tests.kernels.hopper import hopper_scenes
from tests.kernels.hopper.hopper_cases import NIGHTLY, SCHEDULES
from tests.kernels.hopper.prefill_cases import FP8_CASES
from tests.kernels.hopper.test_prefill_simulated import _counters, simulated
from tools.proof.simulate import READ_FENCES

__all__ = ["_counters"]  # a fixture
FAST = ("pages of 1 lost", "rows of no sequence", "d128, heads alone")  # the others run at night
EACH = [
    pytest.param(n, name, marks=[pytest.mark.nightly] * (name not in FAST), id=name) for n, name in enumerate(FP8_CASES)
]


@pytest.mark.parametrize("n, name", EACH)
def test_no_report_and_as_good_as_the_oracle(n, name):
    call = FP8_CASES[name].build("cpu", (torch.bfloat16, torch.float16)[n % 2], FAMILIES[n % 5], n, "hopper")
    simulated(call, SCHEDULES[n % 3])
    assert bool(strobe.last_errors()) == bool(FP8_CASES[name].lost)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["mixed", "pages of 1 lost", "pages of 256, window", "d96", "d256"])
def test_under_every_schedule(name):
    for n, schedule in enumerate(NIGHTLY):
        simulated(FP8_CASES[name].build("cpu", torch.bfloat16, FAMILIES[n % 5], n, "hopper"), schedule)


def call_of(page_size: int, dtype: torch.dtype, width: int = 64, tokens: int = 18) -> tuple[PagedCall, PagedCall]:
    """A call over 8-bit keys with a scale of -2 and of 0 for K and of 0.5 and of -4 for V, and the same call over a
    cache in q's dtype with the products.
    """
    draw = torch.Generator().manual_seed(page_size)
    keys = 66
    q = torch.randn(tokens, 2, width, generator=draw).to(dtype)
    k, v = (torch.randn(1, keys, 2, width, generator=draw).to(FP8) for _ in range(2))
    k_scale, v_scale = torch.tensor([-2.0, 0.0]), torch.tensor([0.5, -4.0])
    lengths, offsets = (torch.tensor(values, dtype=torch.int32) for values in ((keys,), (0, tokens)))
    wide_k, wide_v = ((t.float() * scale[:, None]).to(dtype) for t, scale in ((k, k_scale), (v, v_scale)))
    exact = PagedCall(q, wide_k, wide_v, lengths, offsets, right=0, kernel="hopper")
    narrow = exact._replace(k=k, v=v, k_scale=k_scale, v_scale=v_scale)
    if not page_size:
        return narrow, exact
    pages = -(-keys // page_size)
    order = torch.randperm(pages, generator=draw)
    pools = []
    for t in (k, v):
        pool = torch.full((pages * page_size, 2, width), 0x7F, dtype=torch.uint8)
        pool[:keys] = t[0].view(torch.uint8)
        pools.append(pool.view(pages, page_size, 2, width)[order.argsort()].view(FP8))
    return narrow._replace(k=pools[0], v=pools[1], page_table=order[None].int()), exact


@pytest.mark.parametrize(
    "page_size, dtype",
    [
        (13, torch.bfloat16),
        pytest.param(0, torch.float16, marks=pytest.mark.nightly),
        *(pytest.param(size, torch.bfloat16, marks=pytest.mark.nightly) for size in (1, 2, 16, 48, 64)),
    ],
)
def test_converted_keys_have_the_bits_of_wide_ones(page_size, dtype):
    """e4m3 numbers are exact in q's dtype, and scales are powers of two."""
    narrow, exact = call_of(page_size, dtype)
    assert all(map(torch.equal, simulated(narrow, SCHEDULES[0]), simulated(exact, SCHEDULES[1])))


# ---------------------------------------------------------------- synchronisations

SOURCE = Path(forward_producer.__file__)
SCENES = {  # function -> the scene that runs it
    "convert_staged": "paged_prefill_float8",
    "load_queries": "paged_prefill_float8",
    "store_converted": "paged_prefill_float8_wide",
}
# not partition_barrier: in the simulator the warps of a role run in step
CALLS = ("cp_async_wait", "fence_async_shared", "producer_acquire", "producer_commit")


def dropped(function: ast.FunctionDef) -> Iterator[tuple[str, ast.stmt, str]]:
    """Each synchronisation of the conversion, left out."""
    for node in ast.walk(function) if function.name in SCENES else ():
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            name = ast.unparse(node.value.func).split(".")[-1]
            if name in CALLS:
                yield f"drop {name}", node, "pass"


FAST_MUTANTS = ("drop cp_async_wait", "drop fence_async_shared")  # the others run at night
MUTANTS = mutants(SOURCE.read_text(), dropped)
EACH_MUTANT = [
    pytest.param(
        mutant,
        id=f"{mutant.function}-{mutant.kind}".replace(" ", "_"),
        marks=[pytest.mark.nightly] * (mutant.kind not in FAST_MUTANTS),
    )
    for mutant in MUTANTS
]


def noticed(mutant: Mutant | None, name: str) -> str:
    """What a run of the scene says; empty if nothing."""
    scene = Scene(f"{hopper_scenes.__file__}::{name}", [])
    with ExitStack() as stack:
        module = None
        if mutant is not None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "mutant"
            module = stack.enter_context(replaced(SOURCE, mutant.source, folder, scene.path))
        found = stack.enter_context(simulate("sm_90", "eager", 0, check=False, max_reports=1, checks=READ_FENCES))
        found.machine.max_steps = 50_000
        try:
            scene(module)
        except FAILURES as error:
            return type(error).__name__
    return found.reports[0].kind if found.reports else ""


def test_five_synchronisations_are_left_out():
    assert Counter(mutant.kind for mutant in MUTANTS) == {
        "drop cp_async_wait": 1,
        "drop fence_async_shared": 1,
        "drop producer_acquire": 2,
        "drop producer_commit": 1,
    }


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(set(SCENES.values())))
def test_the_scene_has_no_fault(name):
    assert noticed(None, name) == ""


@pytest.mark.parametrize("mutant", EACH_MUTANT)
def test_each_synchronisation_of_the_conversion_is_needed(mutant):
    assert noticed(mutant, SCENES[mutant.function]), str(mutant)
