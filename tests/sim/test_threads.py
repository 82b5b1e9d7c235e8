"""Races among the threads of one program, and races in which both write the same."""

import re

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from strobe.sim import Checks, simulate
from tests.sim.places import PLACES, launch


def reports_of(kernel, *arguments, grid=1, checks=None, **options):
    with simulate("sm_90", check=False, checks=checks or Checks()) as run:
        kernel[(grid,)](*arguments, **options)
    return run.reports


# ---------------------------------------------------------------- the same values


@triton.jit
def marked_kernel(out, SAME: tl.constexpr):
    at = tl.arange(0, 16)
    tl.store(out + at, at + (0 if SAME else tl.program_id(0)))


def test_a_race_of_equal_values_is_labelled():
    (same,) = reports_of(marked_kernel, torch.zeros(16, dtype=torch.int32), True, grid=2)
    (other,) = reports_of(marked_kernel, torch.zeros(16, dtype=torch.int32), False, grid=2)
    assert same.kind == other.kind == "race"
    assert "both write the same values" in same.text and "the same values" not in other.text


@triton.jit
def halves_kernel(out):
    """Programs share 8 elements, in which they agree; the rest of each is its own."""
    at = tl.arange(0, 16)
    mine = tl.program_id(0) * 8 + at
    tl.store(out + mine, mine)


def test_only_the_shared_elements_count():
    (report,) = reports_of(halves_kernel, torch.full([24], -1, dtype=torch.int32), grid=2)
    assert "both write the same values" in report.text


@triton.jit
def widths_kernel(narrow, wide):
    """Program 0 stores the upper half of the number that program 1 stores."""
    if tl.program_id(0) == 0:
        tl.store(narrow + 1, 5)
    else:
        tl.store(wide, 7)


@pytest.mark.parametrize("sms", [1, 2])
def test_elements_of_other_widths_are_compared(sms):
    narrow = torch.zeros(2, dtype=torch.int16)
    with simulate("sm_90", check=False, sms=sms) as run:
        widths_kernel[(2,)](narrow, narrow.view(torch.int32))
    (report,) = run.reports
    assert report.kind == "race" and "the same values" not in report.text


# ---------------------------------------------------------------- elements of one store


@triton.jit
def folded_kernel(x, out, MODULUS: tl.constexpr):
    at = tl.arange(0, 16)
    tl.store(out + at % MODULUS, tl.load(x + at))


def test_elements_of_one_store_that_meet():
    (report,) = reports_of(folded_kernel, torch.arange(16.0), torch.zeros(16), 8)
    assert report.kind == "race" and "puts different values of one tensor into one place, byte 0" in report.text
    assert "test_threads.py:" in report.text and "folded_kernel" in report.text
    assert not reports_of(folded_kernel, torch.ones(16), torch.zeros(16), 8)  # equal values: no matter who wins
    assert not reports_of(folded_kernel, torch.arange(16.0), torch.zeros(16), 16)


# ---------------------------------------------------------------- read back


@triton.jit
def reversed_kernel(x, out, HOW: tl.constexpr):
    """The second load reads what other threads of the program have stored."""
    at = tl.arange(0, 128)
    tl.store(x + at, at)
    if HOW == "barrier":
        tl.debug_barrier()
    elif HOW == "reduction":
        tl.store(out, tl.sum(at, 0))
    back = at if HOW == "own" else 127 - at
    tl.store(out + at, tl.load(x + back))


THREADS = Checks(threads=True)


@pytest.mark.parametrize("how", ["none", "barrier", "reduction", "own"])
def test_a_load_of_what_another_thread_has_stored(how):
    x, out = (torch.zeros(128, dtype=torch.int32) for _ in range(2))
    reports = reports_of(reversed_kernel, x, out, how, checks=THREADS)
    assert [report.kind for report in reports] == ["race"] * (how == "none")
    assert all("reads what another thread of it stores" in report.text for report in reports)
    assert not reports_of(reversed_kernel, x, out, how)  # not looked at by default


@triton.jit
def scalar_kernel(x, out, WAITS: tl.constexpr):
    """One thread stores the number, and all load it."""
    tl.store(x, 7)
    if WAITS:
        tl.debug_barrier()
    tl.store(out, tl.load(x))


@pytest.mark.parametrize("waits", [False, True])
def test_a_scalar_is_stored_by_one_thread_and_read_by_all(waits):
    x, out = (torch.zeros(1, dtype=torch.int32) for _ in range(2))
    assert len(reports_of(scalar_kernel, x, out, waits, checks=THREADS)) == (not waits)


@gluon.jit
def layouts_kernel(x, out, per_thread: gl.constexpr, WAITS: gl.constexpr):
    """Stored with one element a thread, loaded with `per_thread` elements a thread: the layouts say who holds which."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    other: gl.constexpr = gl.BlockedLayout([per_thread], [32], [4], [0])
    at, again = gl.arange(0, 512, one), gl.arange(0, 512, other)
    gl.store(x + at, at)
    if WAITS:
        gl.thread_barrier()
    gl.store(out + again, gl.load(x + again))


@pytest.mark.parametrize("per_thread, waits, found", [(4, False, 1), (4, True, 0), (1, False, 0)])
def test_layouts_say_which_thread_holds_an_element(per_thread, waits, found):
    x, out = (torch.zeros(512, dtype=torch.int32) for _ in range(2))
    reports = reports_of(layouts_kernel, x, out, per_thread, waits, checks=THREADS)
    assert len(reports) == found and out.tolist() == list(range(512))


@triton.jit
def between_kernel(x, y, out, HOW: tl.constexpr):
    """Between the store and the load, an operation that Triton compiles with a barrier, or without one."""
    at = tl.arange(0, 128)
    tl.store(x + at, at)
    if HOW == "histogram":
        tl.store(y + at, tl.histogram(tl.load(y + at), 128))
    elif HOW == "gather":
        tl.store(y + at, tl.gather(tl.load(y + at), tl.load(out + at), 0))
    elif HOW == "atomic on a number":
        tl.store(y, tl.atomic_add(y, 1))
    elif HOW == "atomic on a tensor":
        tl.atomic_add(y + at, 1)
    tl.store(out + at, tl.load(x + 127 - at))


@gluon.jit
def worker(y):
    gl.store(y, 1)


@gluon.jit
def other_worker(y):
    gl.store(y + 1, 1)


@gluon.jit
def between_gluon_kernel(x, y, out, HOW: gl.constexpr):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    other: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    at, again = gl.arange(0, 512, one), gl.arange(0, 512, other)
    gl.store(x + at, at)
    if HOW == "cp.async wait":
        async_copy.wait_group(0)
    elif HOW == "TMA store wait":
        tma.store_wait(0)
    elif HOW == "warp_specialize":
        gl.warp_specialize([(worker, (y,)), (other_worker, (y,))], [4], [24])
    elif HOW == "fence":
        fence_async_shared()
    gl.store(out + again, gl.load(x + again))


BETWEEN = {  # what is between the store and the load -> whether Triton's PTX has a barrier there
    "histogram": True,
    "gather": True,
    "atomic on a number": True,
    "atomic on a tensor": False,
    "cp.async wait": True,
    "TMA store wait": True,
    "warp_specialize": True,
    "fence": False,
}


@pytest.mark.parametrize("how", BETWEEN)
def test_operations_with_a_barrier_of_their_own(how):
    x, y, out = (torch.zeros(512, dtype=torch.int32) for _ in range(3))
    kernel = between_kernel if how.startswith(("hist", "gath", "atom")) else between_gluon_kernel
    reports = reports_of(kernel, x, y, out, how, checks=THREADS)
    assert [report.kind for report in reports] == ["race"] * (not BETWEEN[how])


@pytest.mark.parametrize("how", BETWEEN)
def test_what_triton_compiles_between_them(how):
    plain = how.startswith(("hist", "gath", "atom"))
    kernel, source = (between_kernel, ASTSource) if plain else (between_gluon_kernel, GluonASTSource)
    signature = {"x": "*i32", "y": "*i32", "out": "*i32", "HOW": "constexpr"}
    compiled = triton.compile(source(kernel, signature, {(3,): how}), target=GPUTarget("cuda", 90, 32))
    ptx = re.sub(r"//.*|bar\.warp\.sync.*", "", compiled.asm["ptx"])
    between = ptx[ptx.index("st.global") : ptx.rindex("ld.global")]
    assert bool(re.search(r"\bbar(rier)?\.(cta\.)?sync", between)) == BETWEEN[how]


@pytest.mark.parametrize("place", PLACES)
def test_with_the_barrier_the_numbers_are_right(place):
    x, out = (torch.zeros(128, dtype=torch.int32) for _ in range(2))
    launch(place, reversed_kernel, x, out, "barrier")
    assert out.tolist() == list(range(127, -1, -1))
