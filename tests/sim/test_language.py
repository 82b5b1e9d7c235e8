"""The language is Triton's: tiny kernels that the real compiler accepts give the expected values here, what it refuses
is refused here.

Each kernel is also compiled offline, so that the verdict in this table is the compiler's own; on a GPU the values are
checked there too. `LENIENT` lists what the compiler refuses and the simulator, which runs a kernel instead of typing
it, lets pass.
"""

import traceback

import pytest
import torch
import triton
from triton import language as tl
from triton.errors import TritonError
from triton.language.core import _aggregate as aggregate

from strobe.sim import simulate
from tests.sim.language_cases import (
    ACCEPTED,
    LENIENT,
    REFUSED,
    Case,
    Pair,
    constants_fold,
    gives,
    lenient,
    product,
    put,
    refused,
    weighted,
)
from tests.sim.places import PLACES, launch
from tools.proof.compile import offline

ERRORS = (
    TritonError,
    AttributeError,
    NameError,
    TypeError,
    AssertionError,
    NotImplementedError,
)  # a frontend's, and what it lets through


def compiles(case: Case) -> bool:
    with offline(90):
        try:
            case.kernel.warmup(torch.zeros(8), *case.arguments, grid=(1,))
        except ERRORS:
            return False
    return True


def ran(case: Case, place: str = "simulator") -> list[float]:
    out = torch.full((8,), torch.nan)
    launch(place, case.kernel, out, *(a.clone() if isinstance(a, torch.Tensor) else a for a in case.arguments))
    return out[~out.isnan()].tolist()


def _id(case: Case) -> str:
    return case.kernel.fn.__name__


# ---------------------------------------------------------------- loops


@gives(10, 12, 0, 20)
@triton.jit
def ranges(out):
    total = 0
    for i in range(5):
        total += i
    put(out, 0, total)
    total = 0
    for i in range(7, 0, -3):
        total += i
    put(out, 1, total)
    total = 0
    for i in tl.range(4, 2):
        total += i
    put(out, 2, total)
    total = 0
    for i in tl.range(0, 10, 2, num_stages=2):
        total += i
    put(out, 3, total)


@gives(9, 3, to=(1, 6, 2))
@triton.jit
def ranges_at_run_time(out, low, high, step):
    total, turns = 0, 0
    for i in range(low, high, step):
        total += i
        turns += 1
    put(out, 0, total)
    put(out, 1, turns)


@gives(64, to=(2**40,))
@triton.jit
def the_induction_variable_has_the_bounds_type(out, base):
    for i in range(base, base + 1):
        put(out, 0, i.dtype.primitive_bitwidth)


@gives(6, 0, 0)
@triton.jit
def static_ranges_unroll(out):
    total = 0
    for i in tl.static_range(4):
        total += i
        put(out, 1, hasattr(i, "dtype"))
    put(out, 0, total)
    for i in tl.static_range(2, -1, -1):
        if i == 0:
            put(out, 2, i)


@refused(2.5)
@triton.jit
def a_range_of_floats(out, n):
    for _ in range(n):
        put(out, 0, 1)


@refused()
@triton.jit
def a_loop_over_a_tuple(out):
    for i in (1, 2):
        put(out, 0, i)


@gives(16, 4, to=(100,))
@triton.jit
def while_loops(out, limit):
    x, turns = 1, 0
    while x * 2 < limit and turns < 4:
        x *= 2
        turns += 1
    put(out, 0, x)
    put(out, 1, turns)


@refused()
@triton.jit
def while_with_a_constant(out):
    while True:
        put(out, 0, 1)


@refused(3)
@triton.jit
def break_leaves_no_loop(out, n):
    for i in range(n):
        if i == 1:
            break
    put(out, 0, 1)


# ---------------------------------------------------------------- assignment


@gives(1.5, 2, 6, 12, 4, 3)
@triton.jit
def augmented_assignment(out):
    x = 3
    x -= 1
    put(out, 1, x)
    x *= 3
    put(out, 2, x)
    x <<= 1
    put(out, 3, x)
    x //= 3
    put(out, 4, x)
    x |= 3
    x &= 3
    put(out, 5, x)
    y = 3.0
    y /= 2
    put(out, 0, y)


@gives(1, 0)
@triton.jit
def assigned_constants_are_tensors(out):
    x = 3
    y: tl.constexpr = 3
    put(out, 0, hasattr(x, "dtype"))
    put(out, 1, hasattr(y, "dtype"))


@refused()
@triton.jit
def item_assignment(out):
    x = tl.zeros((4,), tl.float32)
    x[0] = 1
    put(out, 0, 1)


@refused(Pair(1, 2))
@triton.jit
def attribute_assignment(out, pair):
    pair.first = 3
    put(out, 0, 1)


@refused()
@triton.jit
def chained_assignment(out):
    x = y = 3
    put(out, 0, x + y)


@refused()
@triton.jit
def a_function_inside(out):
    f = lambda x: x + 1
    put(out, 0, f(1))


# ---------------------------------------------------------------- aggregates and methods


@aggregate
class Counter:
    value: tl.tensor
    step: tl.constexpr

    @triton.constexpr_function
    def __init__(self, value, step):
        self.value = value
        self.step = tl.constexpr(step)

    @triton.jit
    def next(self):
        return Counter(self.value + self.step, self.step)

    @triton.jit
    def plus(self, other):
        return Counter(self.value + other, self.step)


@gives(7, 2, 10, to=(5,))
@triton.jit
def aggregates(out, start):
    counter = Counter(start, 2).next()
    put(out, 0, counter.value)
    put(out, 1, counter.step)
    for _ in range(1):
        counter = counter.plus(3)
    put(out, 2, counter.value)


@gives(24, to=(4,))
@triton.jit
def nested_calls(out, n):
    put(out, 0, weighted(product(weighted(n, 0), 2, 2), offset=twice(4)))


@triton.jit
def twice(x):
    return x + x


@triton.jit
def factorial(n: tl.constexpr):
    if n <= 1:
        return 1
    else:
        return n * factorial(n - 1)


@gives(24)
@triton.jit
def functions_call_themselves(out):
    put(out, 0, factorial(4))


@gives(3, 2, 8)
@triton.jit
def attributes_in_a_row(out):
    x = tl.zeros((2, 4), tl.float32)
    put(out, 0, x.T.shape[1] + 1)
    put(out, 1, len(x.shape))
    put(out, 2, x.trans().reshape((8,)).shape[0])


@gives(6)
@triton.jit
def functions_as_constants(out):
    put(out, 0, called(twice, 3))


@triton.jit
def called(fn: tl.constexpr, x):
    return fn(x)


@gives(1, 5)
@triton.jit
def python_builtins(out):
    put(out, 0, min(4, 1))
    put(out, 1, max(5, tl.program_id(0)))


# ---------------------------------------------------------------- what only a compiler refuses


@lenient(3)
@triton.jit
def a_builtin_as_an_argument(out):
    put(out, 0, called(tl.abs, -3))


@lenient(3.5)
@triton.jit
def a_loop_changes_a_type(out):
    x = 0
    for _ in range(7):
        x += 0.5
    put(out, 0, x)


@lenient(1, to=(3,))
@triton.jit
def branches_of_two_types(out, n):
    if n == 3:  # noqa: SIM108
        x = 1
    else:
        x = 2.5
    put(out, 0, x)


@lenient(2, to=(3,))
@triton.jit
def a_name_from_inside_a_loop(out, n):
    for i in range(n):
        last = i
    put(out, 0, last)


@lenient(1, to=(3,))
@triton.jit
def a_name_from_one_branch(out, n):
    if n == 3:
        x = 1
    put(out, 0, x)


@lenient(1, to=(3,))
@triton.jit
def return_from_a_loop(out, n):
    for i in range(n):
        if i == 1:
            put(out, 0, i)
            return


# ---------------------------------------------------------------- the tests


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", ACCEPTED, ids=_id)
def test_accepted(case, place):
    assert ran(case, place) == [float(value) for value in case.expected]


@pytest.mark.parametrize("case", [*ACCEPTED, *REFUSED, *LENIENT], ids=_id)
def test_the_compilers_verdict(case):
    assert compiles(case) == (case in ACCEPTED)


@pytest.mark.parametrize("case", REFUSED, ids=_id)
def test_refused(case):
    with pytest.raises(ERRORS) as error:
        ran(case)
    own = [
        frame
        for frame in traceback.extract_tb(error.value.__traceback__)
        if frame.filename == case.kernel.fn.__code__.co_filename and frame.name == _id(case)
    ]
    assert own, "the traceback does not show the kernel"


@pytest.mark.parametrize("case", LENIENT, ids=_id)
def test_lenient(case):
    assert ran(case) == [float(value) for value in case.expected]


# ---------------------------------------------------------------- errors


@triton.jit
def inner(x):
    return tl.reshape(x, (3, 5))  # wrong


@triton.jit
def outer(out):
    put(out, 0, tl.sum(inner(tl.zeros((16,), tl.float32))))  # calls inner


def test_a_traceback_shows_the_kernels_own_lines():
    with pytest.raises(ValueError) as error, simulate("sm_90"):
        outer[(1,)](torch.zeros(8))
    shown = {
        frame.name: frame.line
        for frame in traceback.extract_tb(error.value.__traceback__)
        if frame.filename == __file__
    }
    assert shown["inner"].endswith("# wrong") and shown["outer"].endswith("# calls inner")


@triton.jit
def unknown_operation(x):
    tl.store(
        x,
        tl.inline_asm_elementwise(
            "vote.sync.ballot.b32 $0, 1, -1;", "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=True, pack=1
        ),
    )


@triton.jit
def other_rounding(x):
    tl.store(x, tl.full((), 1.0, tl.float32).to(tl.float16, fp_downcast_rounding="rtz"))


UNKNOWN = {unknown_operation: "vote", other_rounding: "rounding"}


@pytest.mark.parametrize("kernel, words", UNKNOWN.items(), ids=[kernel.fn.__name__ for kernel in UNKNOWN])
def test_what_the_simulator_does_not_know_it_names(kernel, words):
    with pytest.raises(NotImplementedError, match=words), simulate("sm_90"):
        kernel[(1,)](torch.zeros(8, dtype=torch.int32 if kernel is unknown_operation else torch.float16))


def test_tensors_must_be_on_the_cpu():
    with pytest.raises(TypeError, match="out: got a tensor on meta, expected one on the CPU"), simulate("sm_90"):
        constants_fold[(1,)](torch.zeros(8, device="meta"))
