"""Early weights of the Hopper forward on scores that outgrow them: rows are divided, or tiles done again, and results
are the oracle's. Simulated, and on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.kernels.hopper.hopper_cases import CAUSAL, H200, SCHEDULES, band, key_lengths, runs

pytest.importorskip("triton")

from strobe import reference
from strobe.kernels.hopper import kernel
from strobe.ops import attention as ops
from strobe.problem.call import Call
from strobe.problem.problem import Problem
from strobe.problem.target import FAKES
from strobe.selection.select import select
from strobe.testing import Case, assert_as_good_as, compare
from tools.proof.simulate import simulated

pytestmark = [pytest.mark.usefixtures("as_of_many_keys"), pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")]
PACKED = {"lengths_q": (100, 0, 300, 77), "lengths_k": (130, 30, 500, 10)}


def _case(name: str, seqlen_q: int = 0, seqlen_k: int | None = None, **options) -> Case:
    return Case(name, seqlen_q, seqlen_k, **{"batch": 1, "heads": (2, 2)} | options)


CASES = (
    _case("d64", 200, 400, head_dim=64),
    _case("d64_causal", 390, 520, head_dim=64, mask=CAUSAL),
    _case("d64_window", 400, 400, head_dim=64, mask=band(150, 0), heads=(4, 1)),
    _case("d64_capped", 200, 400, head_dim=64, softcap=200.0),
    _case("d96_causal", 300, 300, head_dim=96, mask=CAUSAL),
    _case("d128", 384, 384, head_dim=128),
    _case("d128_sinks", 200, 400, head_dim=128, mask=CAUSAL, sinks=True),
    _case("d192_causal", 200, 333, head_dim=192, mask=CAUSAL),
    _case("d192x128_window", 200, 333, head_dim=192, head_dim_v=128, mask=band(100, 20)),
    _case("packed", head_dim=128, mask=CAUSAL, **PACKED),
    _case("d64_documents_causal", 390, head_dim=64, mask=runs((150, 240), also=CAUSAL)),
    _case("d128_documents_scattered", 384, head_dim=128, mask=runs((150, 100, 134), (0, 1, 0))),
    _case("d128_key_lengths", 200, 400, head_dim=128, mask=key_lengths(350)),
)


def lse_on_a_gpu(exact, call):
    """The contract's third rule."""
    return 4.7e-6 + 4 * 2.0**-23 * exact.abs()


def _keys(call: Call) -> int:
    return call.k.shape[-3]


def one_key(call: Call) -> None:
    """One row's score of a key that no careful step meets stands out by 2^1000 or so."""
    call.k.select(-3, _keys(call) // 2).select(-2, 0).copy_(40.0 * torch.sign(call.q.select(-3, -20).select(-2, 0)))


def a_key_of_all(call: Call) -> None:
    """Each row's score of such a key stands out by 20 nats: out is its value, which eager attention gives exactly, and
    rows are divided.
    """
    call.q.mul_(0.3)[..., 0] = 4.0
    call.k.mul_(0.3)[..., 0] = 0.0
    call.k.select(-3, _keys(call) // 2)[..., 0] = 5.0 * call.k.shape[-1] ** 0.5


def from_far_below(call: Call, depth: float = 16.0) -> None:
    """As above, but the others' scores are about -16 nats and that key's 0, where lse may err by little."""
    a_key_of_all(call)
    call.k[..., 0] = -depth / 4 * call.k.shape[-1] ** 0.5
    call.k.select(-3, _keys(call) // 2)[..., 0] = 0.0


def from_farther_below(call: Call) -> None:
    """As above by 115 powers of two, nearly as much as a row may grow by in a step without a redo: 2^125, and with
    float16 2^118. lse errs by most there.
    """
    from_far_below(call, 80.0)


def from_too_far_below(call: Call) -> None:
    """By 130 powers of two: exponentials overflow, and the tile is done again."""
    from_far_below(call, 90.0)


def sink(call: Call) -> None:
    """The first key's score is 100 nats above all others, in each row: no row outgrows its maximum, since that key is
    visited first.
    """
    call.q.mul_(0.3)[..., 0] = 10.0
    call.k.mul_(0.3)[..., 0] = 0.0
    call.k.select(-3, 0)[..., 0] = 10.0 * call.k.shape[-1] ** 0.5


def all_rows(call: Call) -> None:
    """Every tile's scores are above those before."""
    steps = torch.linspace(20.0, 0.1, _keys(call), device=call.k.device)[:, None, None]
    call.q.abs_()
    call.k.abs_().mul_(steps.to(call.k.dtype))


def large_scores(call: Call) -> None:
    call.q.mul_(20.0)
    call.k.mul_(20.0)


def negative_scores(call: Call) -> None:
    call.q.abs_().mul_(40.0)
    call.k.abs_().mul_(-40.0)


def large_values(call: Call) -> None:
    """Weights that would outgrow float32 together with these values."""
    call.v.mul_(1e30)
    call.k.mul_(30.0)


def plain(call: Call) -> None:
    """What need not come back."""


CHANGES = (
    one_key,
    a_key_of_all,
    from_far_below,
    from_farther_below,
    from_too_far_below,
    sink,
    all_rows,
    large_scores,
    negative_scores,
    large_values,
    plain,
)


def _built(case: Case, change, device: str, dtype: torch.dtype = torch.bfloat16) -> Call:
    call = case.build(device, dtype, kernel="hopper")
    change(call)
    choice = select(Problem.from_call(call), FAKES["H200"])
    assert choice.forward.kernel.name == "hopper.forward" and choice.forward.config.traits.early
    return call


def _pairs() -> list:
    """Each case with each change, on every commit a third of them: all cases, all changes."""
    pairs = [(n + m, case, change) for n, case in enumerate(CASES) for m, change in enumerate(CHANGES)]
    marks = lambda n: () if n % 3 == 0 else pytest.mark.nightly
    return [
        pytest.param(n, case, change, marks=marks(n), id=f"{case.name}-{change.__name__}") for n, case, change in pairs
    ]


@pytest.mark.nightly_cases(
    "d128_sinks-from_farther_below",
    "d64-from_farther_below",
    "d64_capped-from_farther_below",
    "d64_window-a_key_of_all",
    "packed-from_farther_below",
)
@pytest.mark.parts(8, seed=2021379121)
@pytest.mark.parametrize("n, case, change", _pairs())
def test_scores_that_grow(n, case, change):
    call = _built(case, change, "cpu")
    mode, seed = SCHEDULES[n // 3 % len(SCHEDULES)]
    found, run = simulated(call, H200, mode, seed)
    assert run.reports == []
    assert_as_good_as(found, call)


@pytest.mark.nightly_cases("d128--200.0", "d128-80.0", "d64_causal--200.0", "d64_causal-0.0", "d64_causal-80.0")
@pytest.mark.parametrize("level", [0.0, 12.0, 80.0, -200.0])
@pytest.mark.parametrize("case", [CASES[1], CASES[5], CASES[6]], ids=lambda case: case.name)
def test_first_keys_whose_scores_are_minus_infinity(case, level):
    """Careful steps have met keys then, but no maximum: of finite numbers whose product is none."""

    def change(call: Call) -> None:
        call.q[..., 0] = 16.0
        call.k[..., 0] = level
        call.k[:, 2 * _keys(call) // 3 :, :, 0] = -3e38

    call = _built(case, change, "cpu")
    found, run = simulated(call, H200)
    assert run.reports == []
    assert_as_good_as(found, call)


@pytest.mark.nightly
def test_lse_of_rows_that_grow_by_2_to_the_26(monkeypatch):
    """By as much as is mended or a little more: of float16, whose weights are lifted, 4,096 rows."""
    monkeypatch.setattr(compare, "_lse_allowed", lse_on_a_gpu)

    def change(call: Call) -> None:
        from_far_below(call, 17.6)
        call.k[:, _keys(call) // 2, :, 1:] *= 0.02  # lse near 0

    call = _built(_case("many", 4096, 384, head_dim=128), change, "cpu", torch.float16)
    assert_as_good_as(simulated(call, H200)[0], call)


@pytest.mark.nightly_cases("inf")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_stays_in_its_row(value):
    """Such a row is NaN, even where its tile comes back, and alone."""
    call = _built(CASES[1], plain, "cpu")
    call.q[0, 5, 0, 3] = value
    found, run = simulated(call, H200)
    want, _ = reference.forward(call)
    assert run.reports == [] and want.isnan().any() and torch.equal(found.out.isnan(), want.isnan())


def test_only_tiles_that_cannot_be_mended_come_back():
    """Told from what landed: a tile done again loads and stores again."""
    in_place, again = (plain, a_key_of_all, from_far_below, from_farther_below, sink), (one_key, from_too_far_below)
    landed = {
        change: simulated(_built(CASES[5], change, "cpu"), H200)[1].stats["landed"] for change in (*in_place, *again)
    }
    assert len({landed[change] for change in in_place}) == 1
    assert landed[plain] < landed[one_key] < landed[from_too_far_below]


def test_of_many_keys_the_last_sixteenth_is_looked_at():
    """A key that stands out by 130 powers of two does not make the tile come back if it is among these."""
    landed = []
    for keys_from_the_end in (None, 200, 300):
        call = _built(_case("long", 64, 4096, head_dim=128), from_too_far_below, "cpu")
        key = call.k.select(-3, _keys(call) // 2)
        if keys_from_the_end is not None:
            call.k.select(-3, _keys(call) - keys_from_the_end).copy_(key)
        key.copy_(call.k.select(-3, 1))
        landed.append(simulated(call, H200)[1].stats["landed"])
    assert landed[0] == landed[1] < landed[2]


@pytest.mark.nightly_cases(
    "a_key_of_all-dtype1", "all_rows-dtype0", "from_farther_below-dtype0", "from_farther_below-dtype1"
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "change",
    [a_key_of_all, from_far_below, from_farther_below, from_too_far_below, all_rows],
    ids=lambda change: change.__name__,
)
def test_lse_is_as_near_as_on_a_gpu(change, dtype, monkeypatch):
    """Held to the contract's third rule, which CPU tensors are excused from."""
    monkeypatch.setattr(compare, "_lse_allowed", lse_on_a_gpu)
    call = _built(CASES[5], change, "cpu", dtype)
    assert_as_good_as(simulated(call, H200)[0], call)


@pytest.mark.gpu
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_scores_that_grow_on_a_gpu(case, change):
    """Of more heads than programs, so that tiles come back between others; bitwise alike in ten runs."""
    call = _built(
        replace(
            case,
            batch=40,
            lengths_q=case.lengths_q and case.lengths_q * 40,
            lengths_k=case.lengths_k and case.lengths_k * 40,
        ),
        change,
        "cuda",
    )
    first = ops.run(call)
    for _ in range(10):
        again = ops.run(call)
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])
    assert_as_good_as(first, call)


def test_which_calls_have_early_weights(monkeypatch):
    def asked(case: Case, dtype: torch.dtype = torch.bfloat16) -> bool:
        return kernel.FORWARD.config(Problem.from_call(case.build("cpu", dtype)), FAKES["H200"]).traits.early

    monkeypatch.undo()
    assert asked(_case("long", 820, 820, head_dim=64, mask=CAUSAL)) and asked(_case("dense", 8, 410, head_dim=128))
    assert asked(_case("long", 820, 820, head_dim=64, mask=CAUSAL), torch.float16)
    assert not asked(_case("short", 780, 780, head_dim=64, mask=CAUSAL)) and not asked(
        _case("window", 1300, 1300, head_dim=64, mask=band(300, 0))
    )
    assert not asked(_case("wide", 8, 700, head_dim=256))


def test_tiles_of_few_keys(monkeypatch):
    def tiles(keys: int, width: int, mask: Callable | None = CAUSAL) -> tuple[int, int]:
        call = _case("", keys, keys, heads=(1, 1), head_dim=width, mask=mask).build("cpu", torch.bfloat16)
        tuning = kernel.FORWARD.config(Problem.from_call(call), FAKES["H200"]).traits.tuning
        return tuning.block_m, tuning.block_n

    monkeypatch.undo()
    assert tiles(512, 128) == (128, 64) and tiles(1024, 128) == (128, 128)
    assert tiles(512, 64) == tiles(7_900, 64) == tiles(3_900, 64, None) == (256, 64)
    assert tiles(8_192, 64) == tiles(4_096, 64, None) == (192, 128)
    assert tiles(25_000, 64, band(20_000, 0)) == tiles(25_000, 64, runs((25_000,), also=CAUSAL)) == (256, 64)
