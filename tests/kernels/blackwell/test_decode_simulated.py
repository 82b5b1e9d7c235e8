"""The Blackwell decode's own source in the simulator, several CTAs in flight: the table of cases, hostile inputs, and
the schedules. It has not run on a Blackwell GPU.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.kernels.hopper.hopper_cases import NIGHTLY, SCHEDULES

pytest.importorskip("triton")
import strobe
from strobe.kernels.blackwell import decode
from strobe.kernels.hopper import decode_config as config
from strobe.kernels.runtime import error_flags
from strobe.problem.cache import FP8
from strobe.problem.decode import DecodeCall, DecodeProblem
from strobe.problem.target import FAKES
from strobe.selection.select import select
from strobe.sim import simulate
from strobe.sim.mutate import Mutant, mutants
from strobe.sim.scene import FAILURES, Scene, replaced
from strobe.testing import FAMILIES
from strobe.testing.decode import DECODES, assert_decode_as_good_as
from tests.decoding import draw_table, expected, fill_unowned
from tests.decoding import on as run_on
from tests.kernels.blackwell import blackwell_scenes
from tests.kernels.hopper.test_decode_simulated import EACH_COMMIT, IN_MEMORY, ON_HOPPER, WIDTHS, wide_call
from tools.proof.simulate import READ_FENCES, posing

B200 = FAKES["B200"]
OF_TWO_KINDS = ("sm_100", "sm_103")


@pytest.fixture(autouse=True)
def counters(monkeypatch):
    """The counters of finished splits, which each test leaves at 0."""
    held = torch.zeros(4096, dtype=torch.int32)
    monkeypatch.setattr("strobe.kernels.hopper.launch_decode.zeros_on", lambda device, count: held[:count])
    yield
    assert not held.any()


def run(call: DecodeCall, schedule: tuple[str, int], target: str = "sm_100") -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of a run to which the simulator does not object."""
    with simulate(target, *schedule, sms=3, check=False, checks=READ_FENCES) as found:
        results = run_on(replace(B200, capability=int(target[3:])), call)
    assert found.launches == ["decode_kernel"] and found.reports == []
    return results


def held_to_the_oracle(call: DecodeCall, schedule: tuple[str, int], target: str = "sm_100") -> None:
    assert_decode_as_good_as(run(call, schedule, target), call)


def built(name: str, n: int) -> DecodeCall:
    return DECODES[name].build("cpu", (torch.bfloat16, torch.float16)[n % 2], FAMILIES[n % 5], n, "blackwell")


def with_splits_in_memory(monkeypatch) -> None:
    monkeypatch.setattr(config, "cluster_size", lambda *_: 0)


@pytest.mark.nightly_cases(
    "dense_left_padded", "dense_softcap_sinks", "dense_tokens_5", "pages_of_13", "pages_of_64_heads_first"
)
@pytest.mark.parametrize("n, name", list(enumerate(EACH_COMMIT)), ids=EACH_COMMIT)
def test_the_table(n, name):
    held_to_the_oracle(built(name, n), SCHEDULES[n % 3], OF_TWO_KINDS[n % 2])
    assert [word.split(": ")[1] for word in error_flags.read_and_clear()] == ["cache.page_table"] * bool(
        DECODES[name].lost
    )


@pytest.mark.nightly
@pytest.mark.parametrize("n, name", list(enumerate(ON_HOPPER)), ids=ON_HOPPER)
def test_the_table_under_every_schedule(n, name):
    for turn, schedule in enumerate(NIGHTLY):
        held_to_the_oracle(built(name, n + turn), schedule)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["dense_gaps", "pages_fp8", "pages_window_softcap_sinks"])
@pytest.mark.parametrize("memory", [False, True], ids=["in a cluster", "in global memory"])
def test_100_schedules(name, memory, monkeypatch):
    if memory:
        with_splits_in_memory(monkeypatch)
    for seed in range(100):
        held_to_the_oracle(built(name, seed), ("pct", seed))


@pytest.mark.parametrize("n, name", list(enumerate(IN_MEMORY)), ids=IN_MEMORY)
def test_splits_in_global_memory(n, name, monkeypatch):
    """Splits that are too many or too long to run together have their partial results there."""
    call = built(name, n)
    with_splits_in_memory(monkeypatch)
    chosen = select(DecodeProblem.from_call(call), B200).forward.config
    assert not chosen.traits.cluster and chosen.n_splits > 1
    held_to_the_oracle(call, SCHEDULES[n % 3])


@pytest.mark.parametrize("mode", ["timed", "random"])
@pytest.mark.parametrize("name", ["dense_tokens_5", "pages_of_13", "pages_fp8"])
def test_other_modes(mode, name, monkeypatch):
    with_splits_in_memory(monkeypatch)
    held_to_the_oracle(built(name, 2), (mode, 3))


@pytest.mark.parametrize("head_dim, head_dim_v, page_size", WIDTHS)
def test_every_width(head_dim, head_dim_v, page_size):
    call = wide_call(head_dim, head_dim_v, torch.bfloat16, page_size)._replace(kernel="blackwell")
    held_to_the_oracle(call, SCHEDULES[page_size % 3])


@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("fp8", [False, True], ids=["16 bits", "8 bits"])
def test_each_number_of_rows(tokens, fp8, monkeypatch):
    """8 to 64 rows a tile: Q lies in registers, or is read from shared memory in each step. Steps wrap the ring."""
    with_splits_in_memory(monkeypatch)
    draw = torch.Generator().manual_seed(tokens)
    k, v = (torch.randn(1, 400, 1, 64, generator=draw).bfloat16() for _ in range(2))
    q = torch.randn(1, tokens, 6, 64, generator=draw).bfloat16()
    call = DecodeCall(q, k, v, torch.tensor([390], dtype=torch.int32), right=0, left=300, kernel="blackwell")
    if fp8:
        k, v, k_scale, v_scale = strobe.quantize_kv(k, v)
        call = call._replace(k=k, v=v, k_scale=k_scale, v_scale=v_scale)
    traits = select(DecodeProblem.from_call(call), B200).forward.config.traits
    assert traits.block_m == min(64, max(8, 1 << (6 * tokens - 1).bit_length()))
    assert decode.holds_queries(traits) == (tokens <= 4)
    held_to_the_oracle(call, SCHEDULES[tokens % 3])


@pytest.mark.parametrize("n, name", list(enumerate(("dense_tokens_5", "dense_softcap_sinks", "dense_left_padded"))))
def test_long_rows(n, name, monkeypatch):
    """Tiles of 128 keys."""
    with_splits_in_memory(monkeypatch)
    monkeypatch.setattr(config, "streamed", lambda *_: True)
    call = built(name, n)
    assert select(DecodeProblem.from_call(call), B200).forward.config.traits.block_n == config.STREAMED.block_n
    held_to_the_oracle(call, SCHEDULES[n % 3])


def test_queries_over_8_bits_are_scaled_into_float16():
    """Rows of q far beyond float16, rows of almost nothing, and rows of 0: powers of two change no bit of them."""
    call = wide_call(64, 64, torch.bfloat16, 16)._replace(kernel="blackwell")
    call = call._replace(k=call.k.to(FP8), v=call.v.to(FP8), k_scale=torch.ones(1), v_scale=torch.ones(1))
    q = call.q.clone()
    q[0, 0, 0] *= 2.0**60
    q[0, 1, 1] *= 2.0**-70
    q[1, 1] = 0.0
    held_to_the_oracle(call._replace(q=q, scale=2.0**-62), SCHEDULES[0])


# ---------------------------------------------------------------- hostile inputs


@pytest.mark.parametrize("seed", range(6))
def test_drawn_page_tables(seed):
    """Empty sequences, shared pages, ids of no page, garbage behind the last page. Rows that nobody owns are NaN, then
    0: the same bits, and those of a formula in float64 to what bfloat16 allows.
    """
    drawn = draw_table(seed, 4, "cpu", torch.bfloat16, "blackwell")
    fill_unowned(drawn, float("nan"))
    out, lse = run(drawn.call, SCHEDULES[seed % 3])
    assert bool(error_flags.read_and_clear()) == drawn.lost
    fill_unowned(drawn, 0.0)
    again, lse_again = run(drawn.call, SCHEDULES[seed % 3])
    error_flags.read_and_clear()
    assert torch.equal(out, again) and torch.equal(lse, lse_again)
    exact, lse_exact = expected(drawn.call, torch.float64)
    largest = drawn.call.v.double().abs().max().item()  # weights are rounded to 2^-9 of themselves, and so is out
    torch.testing.assert_close(out.double(), exact, rtol=2.0**-9, atol=2.0**-8 * largest)
    torch.testing.assert_close(lse.double(), lse_exact, rtol=2.0**-20, atol=2.0**-18)


@pytest.mark.nightly
def test_100_drawn_page_tables():
    for seed in range(6, 106):
        test_drawn_page_tables(seed)


@pytest.mark.parametrize("where, meant", [(-3, 0), (2**31 - 1, 50)], ids=["before", "beyond"])
def test_lengths_and_starts_out_of_range(where, meant):
    """They are clamped to the cache, and reported."""
    draw = torch.Generator().manual_seed(5)
    k, v = (torch.randn(2, 50, 1, 16, generator=draw).bfloat16() for _ in range(2))
    q = torch.randn(2, 1, 4, 16, generator=draw).bfloat16()
    lengths = torch.tensor([20, 30], dtype=torch.int32)
    call = DecodeCall(q, k, v, lengths, right=0, k_start=torch.tensor([3, 4], dtype=torch.int32), kernel="blackwell")
    numbers = lambda first, last: torch.tensor([first, last], dtype=torch.int32)
    for field, limit in (("seqlens", meant), ("k_start", min(meant, 30))):
        changed = call._replace(**{field: numbers(call._asdict()[field][0], where)})
        clamped = call._replace(**{field: numbers(call._asdict()[field][0], limit)})
        results = run(changed, SCHEDULES[0])
        reported = {word.split(": ")[1] for word in error_flags.read_and_clear()}
        assert f"cache.{field}" in reported, reported
        assert_decode_as_good_as(results, clamped)


# ---------------------------------------------------------------- synchronisations

SOURCE = Path(decode.__file__)
MUTANTS = mutants(SOURCE.read_text())
SCENES = [scene for scene in blackwell_scenes.SCENES if "_decode_" in scene.name]
MUTANT_IDS = [f"{mutant.function}-{mutant.kind}-{number}".replace(" ", "_") for number, mutant in enumerate(MUTANTS)]


def noticed(name: str, mutant: Mutant | None = None) -> str:
    """What a run of a scene says, with or without a mutant; empty if nothing."""
    scene = Scene(f"{blackwell_scenes.__file__}::{name}", [])
    with ExitStack() as stack:
        module = None
        if mutant is not None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "mutant"
            module = stack.enter_context(replaced(SOURCE, mutant.source, folder, scene.path))
        found = stack.enter_context(simulate("sm_100", "eager", 0, check=False, max_reports=1, checks=READ_FENCES))
        found.machine.max_steps = 50_000
        try:
            scene(module)
        except FAILURES as error:
            return type(error).__name__
    return found.reports[0].kind if found.reports else ""


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_a_scene_has_no_fault(scene):
    assert noticed(scene.name) == ""


@pytest.mark.parametrize("mutant", MUTANTS, ids=MUTANT_IDS)
def test_each_synchronisation_is_needed(mutant):
    assert any(noticed(scene.name, mutant) for scene in reversed(SCENES)), str(mutant)


# ---------------------------------------------------------------- selection


def problem(**options) -> DecodeProblem:
    k = torch.empty(2, 4096, 2, 64, dtype=torch.bfloat16, device="meta")
    q = torch.empty(2, 1, 8, 64, dtype=torch.bfloat16, device="meta")
    call = DecodeCall(q, k, k, torch.empty(2, dtype=torch.int32, device="meta"), right=0)
    return replace(DecodeProblem.from_call(call), **options)


@pytest.mark.parametrize("name", ["B200", "B300"])
def test_it_is_chosen_on_its_gpus(name):
    choice = select(problem(), FAKES[name])
    assert choice.forward.kernel.name == "blackwell.decode"
    assert "chosen    blackwell.decode   block_m=8 block_n=64" in str(choice)
    assert str(choice.forward.config).endswith("has not run on a Blackwell GPU")
    assert select(problem(kernel="portable"), FAKES[name]).forward.kernel.name == "portable.decode"


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(dtype=torch.float32, cache_dtype=torch.float32), "float16 and bfloat16 queries only"),
        (dict(head_dim=264, head_dim_v=264), "head dimensions up to 256; this is 264/264"),
        (dict(head_dim=20), "copies 16 bytes at a time"),
    ],
    ids=["dtype", "widths", "rows"],
)
def test_each_reason_against_it(options, words):
    kernel = select(problem(), FAKES["B200"]).forward.kernel
    assert words in kernel.why_not(problem(**options), FAKES["B200"])
    assert kernel.why_not(problem(), FAKES["H200"]) == "made for sm_100 and sm_103; this target is sm_90"


def test_forward_and_decode_of_the_same_bits_are_of_one_family():
    """With batch_invariant the bits of a decode are those of a forward."""
    k = torch.empty(1, 64, 1, 64, dtype=torch.bfloat16)
    cache = strobe.DenseCache(k, k, torch.tensor([64], dtype=torch.int32))
    with posing(B200):
        decode = strobe.explain_decode(k[:, :1], cache, batch_invariant=True)
        forward = strobe.explain(k, k, k, causal=True, batch_invariant=True)
    chosen = decode, forward
    assert [choice.forward.kernel.name for choice in chosen] == ["blackwell.decode", "blackwell.forward"]
