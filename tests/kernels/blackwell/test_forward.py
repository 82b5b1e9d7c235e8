"""The Blackwell forward's own source, through its own launch code, on the simulator, held against the oracle.

Two SMs give a program several tiles, and sizes wrap every ring; which cases are too small for that is said by name.
"""

from __future__ import annotations

import inspect
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.kernels.blackwell.blackwell_scenes import B200, PROGRAMS
from tests.kernels.hopper.hopper_cases import CAUSAL, DTYPES, SCHEDULES, WITHOUT_BOUND, band

pytest.importorskip("triton")

from strobe.bench.predictions import variants
from strobe.kernels import device
from strobe.kernels.blackwell import forward, forward_memory
from strobe.kernels.blackwell import kernel as blackwell
from strobe.kernels.device import persistent_launch, tma
from strobe.kernels.protocol import Forward
from strobe.ops import attention as ops
from strobe.problem.call import Call
from strobe.problem.problem import Problem
from strobe.problem.target import FAKES
from strobe.selection.select import select
from strobe.sim import Checks, simulate
from strobe.sim.mutate import Mutant, mutants
from strobe.sim.scene import FAILURES, Scene, replaced
from strobe.testing import FAMILIES, Case, assert_as_good_as
from strobe.testing.cases import laid_out
from tools.proof.exponential import evaluated, minimax, worst
from tools.proof.simulate import on, simulated

HERE = Path(__file__).parent
SOURCES = sorted(Path(forward.__file__).parent.glob("forward*.py"))
DEVICE = Path(device.__file__).parent


def _case(name: str, seqlen_q: int = 520, seqlen_k: int | None = 390, width: int = 128, **options) -> Case:
    return Case(name, seqlen_q, seqlen_k, **{"head_dim": width, "batch": 1, "heads": (2, 2)} | options)


LARGE = (
    _case("dense"),
    _case("whole_tiles", 512, 384),
    _case("causal", 600, None, mask=CAUSAL),
    _case("causal_more_rows_sinks", 800, 385, mask=CAUSAL, sinks=True),  # the first tile of a head sees no key
    _case("sinks_without_bound", 300, 200, heads=(4, 2), mask=CAUSAL, sinks=WITHOUT_BOUND),
    _case("window_softcap_sinks", 600, None, mask=band(150, 20), softcap=5.0, sinks=True),
    _case("grouped_gaps", 512, heads=(4, 2), mask=CAUSAL, storage="gaps"),
    _case("head_dim_64", 520, 520, 64, mask=CAUSAL),
    _case("head_dim_96", 520, 390, 96),
    _case("head_dims_192_128", 520, 300, 192, head_dim_v=128, mask=CAUSAL),
)
LENGTHS = (130, 0, 1, 290, 65)
SMALL = (
    _case("packed_causal", lengths_q=LENGTHS, mask=CAUSAL, outside=(3, 5)),
    _case("packed_other_keys_96", width=96, lengths_q=(130, 0, 1, 200), lengths_k=(100, 3, 0, 390), sinks=True),
    _case("one_row", 1, 400),
    _case("one_key", 300, 1, mask=CAUSAL),
)
MORE = (
    _case("window_left", 600, 600, mask=band(70, None)),
    _case("window_right", 600, 600, mask=band(None, 70)),
    _case("window_before_the_keys", 900, 390, mask=band(10, 10)),
    _case("one_key_head", 300, 390, heads=(5, 1)),
    _case("batch_of_three", 300, 390, batch=3, heads=(2, 1)),
    _case("scale", scale=0.3),
    _case("stored_mixed", heads=(4, 2), storage="mixed", mask=CAUSAL),
    _case("head_dims_72_120", width=72, head_dim_v=120),
    _case("head_dim_8", width=8, mask=CAUSAL),
    _case("head_dims_160_104", width=160, head_dim_v=104, mask=band(60, 20)),
    _case("packed_window_softcap", lengths_q=LENGTHS, mask=band(70, 20), softcap=5.0, heads=(4, 2), promised=True),
    _case("packed_d64", width=64, lengths_q=LENGTHS, mask=CAUSAL, storage="heads_first"),
    _case("packed_d192_128", width=192, head_dim_v=128, lengths_q=LENGTHS, mask=CAUSAL),
    _case("packed_promised_outside", lengths_q=(20, 5), outside=(30, 140), promised=True, mask=CAUSAL),
    _case("packed_nothing_but_empty", lengths_q=(0, 0, 0), lengths_k=(20, 0, 7), outside=(4, 5)),
    _case("three", 3, 3, mask=CAUSAL),
    _case("around_a_tile", 257, 129, mask=CAUSAL),
)
JOINED = (  # heads of a group share a tile
    _case("joined_one_row", 1, 390, heads=(16, 2)),
    _case("joined_three_rows", 3, 260, heads=(4, 1), mask=CAUSAL, sinks=True),
    _case("joined_pairs", 100, 300, 64, heads=(4, 2), mask=CAUSAL),
    _case("joined_window", 129, 300, heads=(4, 1), mask=band(40, 5), softcap=5.0),
    _case(
        "joined_threes", 90, 200, 96, heads=(6, 2), batch=2, storage="gaps", sinks=True
    ),  # the fourth row of each query is of no head
    _case(
        "joined_packed",
        1,
        1,
        lengths_q=(3, 0, 1, 90),
        lengths_k=(140, 3, 0, 130),
        heads=(6, 2),
        mask=CAUSAL,
        outside=(3, 5),
        sinks=True,
    ),
    _case("joined_two_tiles_a_program", 150, 130, 64, heads=(8, 2)),
    _case("joined_more_rows", 150, 129, heads=(8, 2), mask=CAUSAL, storage="mixed"),
    _case("joined_sixteen", 33, 300, 192, head_dim_v=128, heads=(16, 1), mask=band(70, None)),
    _case("joined_all", 3, 200, 64, heads=(128, 1), mask=CAUSAL),
    _case(
        "joined_packed_window_96",
        1,
        1,
        96,
        lengths_q=(40, 1, 0, 7),
        heads=(8, 2),
        mask=band(20, 20),
        outside=(2, 0),
        promised=True,
    ),
    _case(
        "joined_packed_d192_128",
        1,
        1,
        192,
        head_dim_v=128,
        lengths_q=(3, 100),
        lengths_k=(90, 150),
        heads=(4, 2),
        sinks=True,
    ),
)
CASES = {case.name: case for case in (*LARGE, *SMALL, *MORE, *JOINED)}


def run_and_judge(case: Case, dtype: torch.dtype, family: str, schedule: tuple[str, int], target=B200) -> None:
    call = case.build("cpu", dtype, family, seed=5, kernel="blackwell")
    found, run = simulated(call, target, *schedule)
    assert run.reports == [] and run.launches == ["forward_kernel"]
    assert_as_good_as(found, call)


NOW = (
    "dense",
    "causal_more_rows_sinks",
    "window_softcap_sinks",
    "head_dim_64",
    "head_dim_96",
    "head_dims_192_128",
    "packed_causal",
    "one_row",
    "joined_three_rows",
    "joined_pairs",
    "joined_window",
    "joined_threes",
    "joined_packed",
    "joined_two_tiles_a_program",
)


@pytest.mark.nightly_cases("causal_more_rows_sinks", "head_dim_96", "head_dims_192_128", "window_softcap_sinks")
@pytest.mark.parametrize("name", NOW)
def test_blackwell_forward(name):
    """Schedules, dtypes and input families take turns."""
    n = list(CASES).index(name)
    run_and_judge(CASES[name], DTYPES[n // 3 % 2], FAMILIES[n % len(FAMILIES)], SCHEDULES[n % 3])


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CASES)
def test_blackwell_forward_with_every_input(name, family):
    """Two of the schedules and both dtypes, in turn: over its families a case meets all."""
    n, at = list(CASES).index(name), FAMILIES.index(family)
    for turn in (2 * at, 2 * at + 1):
        run_and_judge(CASES[name], DTYPES[(n + turn) % 2], family, SCHEDULES[(n + turn) % len(SCHEDULES)])


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ("pct", "random"))
@pytest.mark.parametrize("name", ("whole_tiles", "causal_more_rows_sinks"))
def test_a_hundred_seeds(name, mode):
    for seed in range(50):
        run_and_judge(CASES[name], torch.bfloat16, "normal", (mode, seed))


@pytest.mark.parametrize("name", [case.name for case in LARGE])
def test_sizes_wrap_the_rings_and_give_a_program_two_tiles(name):
    case = CASES[name]
    tuning = _traits(case).tuning
    assert case.batch * case.heads[0] * -(-case.seqlen_q // tuning.block_m) >= 2 * PROGRAMS
    assert 2 * -(-case.keys // tuning.block_n) > tuning.stages  # keys and values share a ring


def _traits(case: Case, dtype: torch.dtype = torch.bfloat16, target=B200) -> blackwell.ForwardTraits:
    return select(Problem.from_call(case.build("cpu", dtype, kernel="blackwell")), target).forward.config.traits


def test_tiles_that_cost_the_same_are_taken_without_a_counter(monkeypatch):
    """Where no mask makes them differ, programs of several tiles need no word from each other; the kernel is then given
    no counter.
    """
    assert [
        _traits(CASES[name]).counted for name in ("causal", "window_left", "window_right", "packed_other_keys_96")
    ] == [True] * 4
    assert not _traits(CASES["three"]).counted  # one tile
    monkeypatch.setattr(persistent_launch, "zeros_on", None)
    case = CASES["whole_tiles"]
    assert case.heads[0] * case.seqlen_q // 256 == 2 * PROGRAMS
    run_and_judge(case, torch.bfloat16, "normal", ("pct", 3))


def test_the_table_has_every_tiling():
    assert {blackwell.tiled(case.head_dim, case.head_dim_v or case.head_dim) for case in LARGE} == set(
        blackwell.TILE_CONFIGS
    )


@pytest.mark.nightly
@pytest.mark.parametrize("name", ("packed_causal", "packed_d192_128", "joined_packed_window_96"))
def test_what_neighbours_hold_does_not_matter(name):
    """Rows of another sequence share tiles with a sequence's last rows: NaN there changes no bit."""
    call = CASES[name].build("cpu", torch.bfloat16, "normal", 5, kernel="blackwell")
    plain, _ = simulated(call, B200)
    first, last = call.cu_seqlens_q[3:5].tolist()
    poisoned = [torch.full_like(t, float("nan")) for t in call[:3]]
    for into, tensor in zip(poisoned, call[:3]):
        into[first:last] = tensor[first:last]
    found, run = simulated(call._replace(q=poisoned[0], k=poisoned[1], v=poisoned[2]), B200)
    assert run.reports == [] and last > first
    assert torch.equal(found.out[first:last], plain.out[first:last]) and torch.equal(
        found.lse[:, first:last], plain.lse[:, first:last]
    )


def test_lse_of_rows_without_keys():
    call = _case("more_rows", 520, 385, mask=CAUSAL, heads=(1, 1)).build("cpu", torch.bfloat16, kernel="blackwell")
    found, run = simulated(call, B200)
    assert run.reports == [] and found.lse[..., :135].eq(-torch.inf).all() and found.lse[..., 135:].isfinite().all()
    assert found.out[:, :135].eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_nan_is_nan_and_no_other(dtype):
    """Through the exp unit and through multiply-adds: d128 without a mask uses both."""
    call = _case("nan", 130, 150, heads=(1, 1)).build("cpu", dtype, kernel="blackwell")
    assert _traits(_case("nan", 130, 150, heads=(1, 1)), dtype).by_fma > 0
    q = call.q.clone()
    q[0, 3] = float("nan")
    found, run = simulated(call._replace(q=q), B200)
    assert run.reports == [] and found.out[0, 3].isnan().all() and found.lse[..., 3].isnan().all()
    assert found.out[0, torch.arange(130) != 3].isfinite().all()


# ---------------------------------------------------------------- heads that share a tile


def test_cases_share_tiles_or_do_not_as_their_names_say():
    assert all(_traits(case).tuning.pack_gqa == case.heads[0] // case.heads[1] > 1 for case in JOINED)
    assert all(
        _traits(CASES[name]).tuning.pack_gqa == 1 < _traits(CASES[name]).group
        for name in ("grouped_gaps", "one_key_head")
    )


@pytest.mark.parametrize(
    "rows, heads, pack_gqa",
    [
        (1, (8, 1), 8),
        (1, (8, 8), 1),
        (3, (6, 2), 3),
        (128, (2, 1), 2),
        (129, (2, 1), 1),
        (256, (8, 1), 1),
        (257, (2, 1), 2),
        (4096, (8, 1), 1),
        (1, (128, 1), 128),
        (1, (129, 1), 1),
        (85, (3, 1), 3),
        (192, (3, 1), 1),
    ],
)
def test_heads_share_tiles_where_that_makes_fewer(rows, heads, pack_gqa):
    """As many rows a query as the next power of two: three heads take four. A tile has 256."""
    assert _traits(_case("shared", rows, 130, heads=heads)).tuning.pack_gqa == pack_gqa
    assert (
        _traits(_case("shared", lengths_q=(rows, rows), lengths_k=(130, 130), heads=heads)).tuning.pack_gqa == pack_gqa
    )


def test_packed_queries_whose_heads_lie_apart_do_not_share_tiles():
    """TMA has no dimension left for them; dense ones may lie as they like."""
    for storage, pack_gqa in (("contiguous", 4), ("gaps", 1), ("heads_first", 1)):
        assert _traits(_case("apart", lengths_q=(3, 7), heads=(8, 2), storage=storage)).tuning.pack_gqa == pack_gqa, (
            storage
        )
        assert _traits(_case("apart", 3, 9, heads=(8, 2), storage=storage)).tuning.pack_gqa == 4, storage


@pytest.mark.nightly_cases("joined_three_rows")
@pytest.mark.parametrize(
    "name", ("joined_three_rows", "joined_window", pytest.param("joined_packed", marks=pytest.mark.nightly))
)
def test_sharing_a_tile_changes_no_bit(name, monkeypatch, wide_sums):
    call = CASES[name].build("cpu", torch.bfloat16, "normal", 5, kernel="blackwell")
    together, _ = simulated(call, B200)
    monkeypatch.setattr(blackwell, "qheads_per_tile", lambda *_: 1)
    apart, run = simulated(call, B200)
    assert run.reports == [] and torch.equal(together.out, apart.out) and torch.equal(together.lse, apart.lse)


@pytest.mark.nightly_cases("heads_first")
@pytest.mark.parametrize("storage", ("contiguous", "heads_first"))
def test_out_whose_heads_lie_apart(storage):
    """A given out that TMA cannot write for all heads at once is written elsewhere and copied."""
    case = CASES["joined_packed"]
    call = case.build("cpu", torch.bfloat16, kernel="blackwell")
    out = laid_out(torch.full(call.q.shape, float("nan"), dtype=torch.bfloat16), storage, 0)
    assert (tma.addressable(out, pack_gqa=True) is out) == (storage == "contiguous") and tma.addressable(out) is out
    with on(B200):
        assert_as_good_as(ops.run(call, out), call)


# ---------------------------------------------------------------- conditional rescaling


def _rising(growth: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each block of 128 keys, from the last to the first as they are visited, scores `growth` higher in log2 units."""
    q, k = torch.zeros(1, 256, 1, 64, dtype=torch.bfloat16), torch.zeros(1, 384, 1, 64, dtype=torch.bfloat16)
    q[..., 0] = 1
    k[..., 0] = torch.tensor([2.0, 1.0, 0.0]).repeat_interleave(128)[None, :, None] * growth
    return q, k, torch.randn(1, 384, 1, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


@pytest.mark.parametrize("growth, rescaled", [(4.0, 0), (6.0, 1), (10.0, 2)])
def test_o_is_rescaled_only_where_a_maximum_grows_by_more_than_the_threshold(growth, rescaled):
    """4 and 8 above the first block stay within 8; 6 does and 12 does not; 10 and 20 each need it. The result is right
    each time.
    """
    call = _case("rising", 256, 384, 64, heads=(1, 1), scale=0.6931471805599453).build(
        "cpu", torch.bfloat16, kernel="blackwell"
    )
    q, k, v = _rising(growth)
    call = call._replace(q=q, k=k, v=v)
    found, run = simulated(call, B200)
    entered = {function.fn.__name__ for function in run.machine.entered.values()}
    assert run.reports == [] and "rescale_o" in entered
    assert_as_good_as(found, call)
    assert _kept(growth) == rescaled and ("rescale_columns" in entered) == (rescaled > 0)


def _kept(growth: float) -> int:
    """How often the maximum that weights are taken against is raised after the first block."""
    kept, raised = 0.0, 0
    for block in (1, 2):
        if block * growth - kept > blackwell.TILE_CONFIGS[64, 64].rescale_threshold:
            kept, raised = block * growth, raised + 1
    return raised


def test_p_that_could_exceed_its_type_does_not_compile(monkeypatch):
    monkeypatch.setitem(
        blackwell.TILE_CONFIGS, (64, 64), replace(blackwell.TILE_CONFIGS[64, 64], rescale_threshold=9.0)
    )
    case = _case("threshold", 130, 150, 64, heads=(1, 1))
    run_and_judge(case, torch.bfloat16, "normal", ("eager", 0))
    with pytest.raises(FAILURES, match="p may exceed the largest number of its type"):
        run_and_judge(case, torch.float16, "normal", ("eager", 0))


def test_the_kernel_without_each_remedy_is_right_too():
    """What `bench.predictions` will time."""
    call = _case("remedies", 130, 260, heads=(1, 1)).build("cpu", torch.bfloat16, kernel="blackwell")
    plans = variants(select(Problem.from_call(call), B200).forward)
    assert len(plans) == 3
    for plan in plans.values():
        found = Forward(torch.full_like(call.q, float("nan")), torch.full((1, 1, 130), float("nan")))
        with on(B200) as run:
            plan.kernel.run(plan, call, found, {})
        assert run.reports == []
        assert_as_good_as(found, call)


# ---------------------------------------------------------------- exponentials by multiply-adds


def test_the_polynomials_in_the_kernel_are_the_ones_derived():
    written = re.findall(r"0\.\d{6,}", (DEVICE / "softmax.py").read_text().partition("def exp2_by_fma")[2])
    c3, c5 = minimax(3), minimax(5)
    horner = [c3[2], c3[3], c3[1], c5[4], c5[5], c5[3], c5[2], c5[1]]
    assert [float(number) for number in written] == pytest.approx(horner, rel=1e-6)


@pytest.mark.parametrize("degree, bound", [(3, 1.1e-4), (4, 3e-6), (5, 2e-7)])
def test_errors_of_the_polynomials(degree, bound):
    """Every 64th float32 here; all of them by python -m tools.proof.exponential."""
    found = worst(minimax(degree), 64)
    assert bound / 2 < found < bound
    assert evaluated(minimax(degree), torch.zeros(1).numpy()) == 1


@pytest.mark.parametrize("dtype, allowed", [(torch.bfloat16, 2.0**-13), (torch.float16, 2e-6 + 4 * 2.0**-23 * 5)])
def test_lse_errs_as_the_polynomial_does(dtype, allowed):
    """Two keys that count, in the same column of two tiles: where the later one's score is higher, but by less than the
    threshold, it is taken against the earlier one's, and its weight is nearly the whole sum.
    """
    rows = torch.linspace(-5, 5, 255)
    q, k = torch.zeros(1, 255, 1, 128), torch.zeros(1, 256, 1, 128)
    q[0, :, 0, 0], q[..., 1], k[..., 1] = rows, 1, -60
    k[0, [0, 128], 0, 1], k[0, 128, 0, 0] = 0.0, 1.0
    call = Call(q.to(dtype), k.to(dtype), torch.randn(1, 256, 1, 128).to(dtype), scale=1.0, kernel="blackwell")
    found, run = simulated(call, B200)
    error = (found.lse.double() - torch.log1p(call.q[0, :, 0, 0].double().exp())).abs().max()
    assert run.reports == [] and error < allowed
    assert dtype == torch.float16 or error > 5e-5  # such rows, and a polynomial of degree 3
    assert_as_good_as(found, call)


def test_the_share_goes_by_type_of_gpu():
    assert _traits(CASES["dense"]).by_fma > 0
    assert _traits(CASES["dense"], target=replace(FAKES["B300"], sm_count=2)).by_fma == 0


# ---------------------------------------------------------------- the barrier table

BARRIERS = re.findall(r"^    (\w+_(?:full|empty))(?:\[\w\])? ", forward.__doc__ or "", re.MULTILINE)
SCHEDULER = DEVICE / "forward_scheduler.py"


def _waits(barrier: str) -> list[tuple[Path, Mutant]]:
    """Mutants without a wait for this barrier. Roles call the waits of every pipeline but `work`."""
    pipe, _, end = barrier.rpartition("_")
    if pipe == "work":
        place, text = {"full": ("wait_published", "self.full"), "empty": ("publish_dense", "producer_acquire")}[end]
        found = [(SCHEDULER, mutant) for mutant in mutants(SCHEDULER.read_text())]
        return [
            (file, one) for file, one in found if one.kind == "drop wait" and one.function == place and text in one.text
        ]
    call = f"pipes.{pipe}.{'consumer_wait' if end == 'full' else 'producer_acquire'}("
    return [
        (file, mutant)
        for file in SOURCES
        for mutant in mutants(file.read_text())
        if mutant.kind == "drop wait" and call in mutant.text
    ]


def test_the_table_has_a_row_for_each_barrier_of_the_kernel():
    """`Pipelines.create` makes every barrier. Its pipelines with an empty barrier have two rows, the others one."""
    made = inspect.getsource(forward_memory).partition("def create")[2].partition("@gluon.jit")[0]
    pipes = re.findall(r"(\w+)_pipe = (?:WorkTile)?Pipeline\(", made)
    assert len(BARRIERS) == len(set(BARRIERS)) == made.count("ring(")
    assert {barrier.rpartition("_")[0] for barrier in BARRIERS} == set(pipes)


@pytest.mark.parametrize("barrier", BARRIERS)
def test_every_barrier_is_needed(barrier):
    """Each wait for it taken away: somebody notices, in one run."""
    scene = Scene(f"{HERE / 'blackwell_scenes.py'}::blackwell_d128", [])
    found = _waits(barrier)
    assert found
    for number, (file, mutant) in enumerate(found):
        with (
            tempfile.TemporaryDirectory() as folder,
            replaced(file, mutant.source, Path(folder) / f"mutant_{number}", scene.path) as module,
        ):
            assert _noticed(scene, module), str(mutant)


def _noticed(scene: Scene, module) -> str:
    with simulate("sm_100", "eager", 0, check=False, max_reports=1, checks=Checks(read_fences=True)) as run:
        run.machine.max_steps = 50_000
        try:
            scene(module)
        except FAILURES as error:
            return type(error).__name__
    return run.reports[0].kind if run.reports else ""
