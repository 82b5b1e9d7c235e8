"""Every kernel compiles for every target without a GPU, within its budget, and exactly as recorded.

Each commit looks at one case on every target and at most cases on sm_90. It compiles what was not compiled from the
same source before, and of the first case one target in four; the nightly run compiles all.
"""

from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton

from strobe.kernels.blackwell import kernel as blackwell
from strobe.kernels.blackwell.traits import TENSOR_COLUMNS
from strobe.kernels.hopper import kernel as hopper
from strobe.kernels.hopper import prefill_config
from strobe.kernels.portable import heuristics
from strobe.problem.decode import DecodeProblem
from strobe.problem.paged import PagedProblem
from strobe.problem.problem import Problem
from strobe.selection.select import select
from tests.case_parts import on_each_commit
from tools.proof import budget
from tools.proof.budget import FAMILIES, LEDGER, REFUSED, TARGETS, UNITS, Unit
from tools.proof.calls import CASES
from tools.proof.compile import launches, new_processes, rows
from tools.proof.record import RESULTS, key, packed, read

ROOT = Path(__file__).parents[2]
RECORDED = {key(row): row for row in read(ROOT / RESULTS)}
REFRESH = "run `make compiled` and look at what changed"
FOUR = ["forward_kernel", "delta_kernel", "keys_kernel", "queries_kernel"]
PRODUCT = {"sm_90": "HGMMA", "sm_100": "UTCMMA", "sm_103": "UTCMMA"}  # of 16-bit tiles; HMMA elsewhere


def _is_on_every_target(unit: Unit) -> bool:
    return unit.case == budget.ON_EVERY_TARGET


def _marks(unit: Unit) -> list:
    if not unit.each_commit:
        return [pytest.mark.nightly]
    return [pytest.mark.parts(1)] if _is_on_every_target(unit) else []  # of one part: at each commit, and at night


def _each(units):
    return [pytest.param(unit, marks=_marks(unit), id=" ".join(unit)) for unit in units]


@pytest.fixture(scope="module")
def process_for():
    """process_for(older): a process whose targets all convert float8 alike: those below sm_90, or the others."""
    with ExitStack() as stack:
        yield lru_cache(lambda older: stack.enter_context(new_processes()))


@pytest.mark.parametrize("unit", _each(UNITS))
def test_within_budget_and_as_recorded(unit, process_for):
    anew = not unit.each_commit or (_is_on_every_target(unit) and on_each_commit(str(unit), 4))
    known = None if anew else RECORDED
    if "float8" in unit.case:
        process = process_for(TARGETS[unit.target].capability < 90)
        found = process.submit(rows, unit, recorded=known).result()
    else:
        found = rows(unit, recorded=known)
    assert [fault for row in found for fault in budget.faults(row)] == []
    recorded = [row for row in RECORDED.values() if Unit(*key(row)[:3]) == unit]
    assert [row["kernel"] for row in found] == [row["kernel"] for row in recorded], REFRESH
    for new, old in zip(found, recorded):
        assert old["triton"] == triton.__version__, f"recorded with another Triton: {REFRESH}"
        assert _exact(new, old) == _exact(old, new), REFRESH


def _exact(row: dict, other: dict) -> dict:
    """All but the seconds and the fingerprints, and without instructions and roles where one of the two had no
    disassembler for its target.
    """
    left_out = {"seconds", "code", "source"} | (
        set() if row.get("instructions") and other.get("instructions") else {"instructions", "roles"}
    )
    return {name: value for name, value in row.items() if name not in left_out}


def test_the_record_is_whole_and_every_kernel_in_it_within_budget():
    assert {Unit(*place[:3]) for place in RECORDED} == set(UNITS), REFRESH
    assert [fault for row in RECORDED.values() for fault in budget.faults(row)] == []


def test_no_line_of_the_ledger_is_stale():
    assert budget.stale(RECORDED.values()) == []
    assert all(line.why for line in LEDGER)


def test_the_record_is_in_order_so_that_a_change_is_a_small_difference():
    rows = read(ROOT / RESULTS)
    assert (ROOT / RESULTS).read_text() == packed(sorted(rows, key=lambda row: UNITS.index(Unit(*key(row)[:3]))))


# ---------------------------------------------------------------- what the cases cover, and what the kernels must hold


@pytest.mark.parametrize("target", TARGETS)
def test_portable_kernels_run_every_case_and_use_tensor_cores(target):
    for case in CASES:
        found = [row for place, row in RECORDED.items() if place[:3] == ("portable", case, target)]
        alike = case.endswith("batch invariant")
        assert [row["kernel"] for row in found] == (
            [] if (case, target) in REFUSED else ["invariant_kernel"] if alike else FOUR
        )
        if "float32" in case or "float64" in case:
            continue
        for row in found:
            product = "HMMA" if alike else PRODUCT.get(target, "HMMA")  # tiles of 32 rows are too low for the others
            products = row["instructions"].get(product, 0) if row["instructions"] else None
            assert products is None or (products > 0) == (row["kernel"] != "delta_kernel"), row


def test_the_cases_use_every_tiling_of_the_tables():
    """On the target that a table is for; `_fit` may take stages and tiles away, so the tuning it is given counts."""
    asked = set()
    fit = heuristics._fit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heuristics, "_fit", lambda tuning, *rest: asked.add(tuning) or fit(tuning, *rest))
        for target in ("sm_80", "sm_90", "sm_100"):
            for case in CASES.values():
                launches(case()._replace(kernel="portable"), TARGETS[target])
    tables = (heuristics.HOPPER, heuristics.AMPERE, heuristics.BLACKWELL, *heuristics.WIDE.values())
    listed = {
        tuning
        for table in tables
        for row in table
        for tuning in (row.forward, row.forward_masked, row.keys, row.keys_masked, row.queries)
    }
    assert listed - asked == set()


def test_the_hopper_forward_compiles_with_each_tiling_and_each_band():
    """TMA loads, wgmma, and the shared memory that the config says, but for padding and the compiler's own scratch."""
    seen, early = set(), set()
    for unit in UNITS:
        if unit.family != "hopper" or unit.case.endswith("batch invariant"):
            continue
        row = RECORDED[(*unit, "forward_kernel")]
        traits = select(Problem.from_call(unit.call), TARGETS[unit.target]).forward.config.traits
        assert row["instructions"]["HGMMA"] > 0 and row["instructions"]["UTMALDG"] > 0 and not row["serialized"], unit
        assert 0 <= row["shared_bytes"] - traits.shared_bytes() < 1024, unit
        assert row["warps"] == 4 * traits.tuning.consumers + 4, unit
        seen.add((replace(traits.tuning, pack_gqa=1), traits.mask.left, traits.mask.right))
        early |= {(traits.block_d, traits.block_dv)} if traits.early else set()
    bands = ((False, False), (False, True), (True, True), (True, False))
    wanted = {
        (tuning, *band)
        for widths, full in hopper.TUNINGS.items()
        for band in bands
        for tuning in [(band[0] and hopper.SHORT_RANGE_TUNINGS.get(widths)) or full]
    }
    wanted |= {(tuning, True, True) for tuning in hopper.SOFTCAP_TUNINGS.values()}
    wanted |= {(tuning, False, True) for tuning in hopper.SHORT_RANGE_TUNINGS.values()}
    wanted |= {(tuning, *band) for _, tuning in hopper.FEW_KEYS_TUNINGS.values() for band in bands}
    assert seen == wanted and early == hopper.EARLY


def test_the_hopper_forward_over_caches_compiles_with_each_tiling():
    """TMA loads, wgmma, and the shared memory that the config says."""
    seen = set()
    for unit in UNITS:
        if unit.family != "hopper.decode" or " prefill" not in unit.case:
            continue
        row = RECORDED[(*unit, "forward_kernel")]
        config = select(PagedProblem.from_call(unit.call), TARGETS[unit.target]).forward.config
        traits = config.forwards[0]  # the record has a kernel's first launch: over copied keys, if they are copied
        assert row["instructions"]["HGMMA"] > 0 and row["instructions"]["UTMALDG"] > 0 and not row["serialized"], unit
        assert 0 <= row["shared_bytes"] - traits.shared_bytes() < 1024, unit
        assert row["warps"] == 4 * traits.tuning.consumers + 4, unit
        seen.add(replace(traits.tuning, pack_gqa=1))
    tunings = ("TUNINGS", "STAGED_TUNINGS", "SOFTCAP_TUNINGS", "SCORE_TUNINGS")
    assert seen == {tuning for name in tunings for tuning in getattr(prefill_config, name).values()}


def test_forwards_with_the_bits_of_a_decode_multiply_as_it_does():
    units = [unit for unit in UNITS if unit.family == "hopper" and unit.case.endswith("batch invariant")]
    assert len(units) == 5
    for unit in units:
        row = RECORDED[(*unit, "invariant_kernel")]
        traits = select(Problem.from_call(unit.call), TARGETS[unit.target]).forward.config.traits
        assert row["instructions"]["HGMMA"] > 0 and row["instructions"]["LDGSTS"] > 0 and not row["serialized"], unit
        assert 0 <= row["shared_bytes"] - traits.shared_bytes() < 4096 and row["warps"] == 8, unit


def test_the_hopper_backward_compiles_with_each_tiling_and_each_band():
    """TMA loads, wgmma, and the shared memory that the config says, but for padding and the compiler's own scratch."""
    seen = set()
    for unit in UNITS:
        if unit.family != "hopper" or not unit.call.needs_grad:
            continue
        found = [row for place, row in RECORDED.items() if Unit(*place[:3]) == unit]
        row, plan = found[2], select(Problem.from_call(unit.call), TARGETS[unit.target]).backward
        traits = plan and plan.config.traits
        assert traits, unit
        names = ["forward_kernel", "rows_kernel", "backward_kernel"]
        names += ["convert_dq_kernel"] * (not traits.dq_last_writer_converts) + ["convert_kernel"] * (
            traits.group_splits > 1
        )
        assert [row["kernel"] for row in found] == names, unit
        assert row["instructions"]["HGMMA"] > 0 and row["instructions"]["UTMALDG"] > 0 and not row["serialized"], unit
        assert 0 <= row["shared_bytes"] - traits.shared_bytes() < 1024 and row["warps"] == 12, unit
        seen.add((traits.tuning, traits.mask.left, traits.mask.right))
    bands = ((False, False), (False, True), (True, True), (True, False))
    wanted = {(tuning, *band) for tuning in hopper.BACKWARD_TUNINGS.values() for band in bands}
    assert seen == wanted | {(tuning, True, True) for tuning in hopper.BACKWARD_CAPPED.values()}


def test_the_blackwell_forward_compiles_with_each_tiling_and_each_band():
    """TMA loads, tcgen05, all of tensor memory, and the shared memory that the config says, but for padding and the
    compiler's own scratch.
    """
    seen = set()
    for unit in UNITS:
        if unit.family != "blackwell":
            continue
        row = RECORDED[(*unit, "forward_kernel")]
        traits = select(Problem.from_call(unit.call), TARGETS[unit.target]).forward.config.traits
        assert not row["instructions"] or (row["instructions"]["UTCMMA"] > 0 and row["instructions"]["UTMALDG"] > 0), (
            unit
        )
        assert 0 <= row["shared_bytes"] - traits.shared_bytes() < 1024, unit
        assert row["warps"] == 16 and traits.tensor_columns() <= row["tensor_columns"] == TENSOR_COLUMNS, unit
        assert (
            sum(count * warps for count, warps in zip(traits.tuning.registers_of().values(), (8, 1, 1, 2, 4)))
            == 16 * row["registers"]
        ), unit
        seen.add((traits.tuning, traits.mask.left, traits.mask.right, unit.target))
    bands = ((False, False), (False, True), (True, True))
    wanted = {
        (tuning, *band, target)
        for tuning in blackwell.TILE_CONFIGS.values()
        for band in bands
        for target in ("sm_100", "sm_103")
    }
    assert seen >= wanted


def test_the_blackwell_forward_spills_nothing_at_d128():
    """Nor at d64 without a diagonal; and a share of its exponentials is computed by multiply-adds, on sm_100 alone."""
    for case in (
        "d128 dense",
        "d128 causal",
        "d128 dense float16",
        "d128 causal float16",
        "d128 packed causal",
        "d64 dense",
    ):
        rows = [RECORDED["blackwell", case, target, "forward_kernel"] for target in ("sm_100", "sm_103")]
        assert [budget.spill_bytes(row) for row in rows] == [0, 0]
        counts = [row["instructions"]["MUFU.EX2"] for row in rows if row["instructions"]]
        assert counts[0] < 258 and counts[1:] in ([], [258])


def test_the_blackwell_backward_spills_nothing_and_fits_its_memories():
    """Of all cases that it can run: 16 warps share the registers, and all 512 columns of tensor memory are used."""
    seen = set()
    for unit in UNITS:
        if unit.family in ("blackwell", "blackwell.backward") and unit.call.needs_grad:
            traits = select(Problem.from_call(unit.call), TARGETS[unit.target]).backward.config.traits
            for kernel in ("preprocess_kernel", "backward_kernel", "postprocess_kernel"):
                assert budget.spill_bytes(RECORDED[(*unit, kernel)]) == 0, (unit, kernel)
            row = RECORDED[(*unit, "backward_kernel")]
            assert row["warps"] == 16 and traits.tensor_columns() == row["tensor_columns"] == TENSOR_COLUMNS, unit
            assert 0 <= row["shared_bytes"] - traits.shared_bytes() < 1024, unit
            registers = traits.tuning.registers_of()
            assert sum(registers[role] * warps for role, warps in zip(registers, (4, 8, 2, 2))) == 16 * row["registers"]
            seen.add((traits.block_d, traits.mask.left, traits.mask.right, unit.target))
    bands = ((False, False), (False, True), (True, True))
    assert seen >= {(w, *band, target) for w in (64, 96, 128, 192) for band in bands for target in ("sm_100", "sm_103")}


def test_the_blackwell_decode_spills_nothing_and_multiplies_by_mma_sync():
    """On both targets, with each number of rows. Tensor memory stays free."""
    rows = set()
    for unit in UNITS:
        if unit.family == "blackwell.decode":
            config = select(DecodeProblem.from_call(unit.call), TARGETS[unit.target]).forward.config
            row, traits = RECORDED[(*unit, "decode_kernel")], config.traits
            assert budget.spill_bytes(row) == 0 == row.get("tensor_columns", 0) and row["warps"] == 4, unit
            if row["instructions"]:  # a warp's part of a step: 16 rows of each 64, 8 columns, 16 of each sum
                own = (traits.block_n * traits.block_d + traits.block_dv * traits.block_n) // (64 * 16)
                assert row["instructions"]["HMMA"] == own * traits.block_m // 8, unit
            rows.add((traits.block_m, traits.fp8, unit.target))
    targets = ("sm_100", "sm_103")
    assert rows >= {(rows, bits, target) for rows in (8, 16, 32, 64) for bits in (False, True) for target in targets}


def _backward_roles(row: dict) -> dict[str, int]:
    """What is unlike in other cases than d128 causal: by roles one consumer has no exponentials; two warps add dq where
    halves take turns; split groups only add, but for a first tile of keys.
    """
    unit = Unit(*key(row)[:3])
    traits = select(Problem.from_call(unit.call), TARGETS[unit.target]).backward.config.traits
    stores = traits.store_warps if traits.group_splits == 1 or traits.dq_first_writer_stores else 0
    return {"store": stores} if traits.split_by_keys else {"softmax": 1, "store": stores}


@pytest.mark.parametrize("family, kernel, roles", [
    # mma: first scores, steps, last values
    ("blackwell", "forward_kernel", {"mma": 3, "load": 1, "softmax": 2, "store": 1, "correct": 1}),
    ("hopper", "forward_kernel", {"load": 1, "softmax": 0}),  # as many as consumers
    ("hopper", "backward_kernel", {"load": 1, "softmax": 2, "store": 1}),  # store: its walk over tiles of keys
])  # fmt: skip
def test_the_inner_loop_of_each_role_is_found(family, kernel, roles):
    """And no other: what stands in the roles' loops stands in the kernel, and their exponentials are most of its."""
    found = [
        row for row in RECORDED.values() if (row["family"], row["kernel"]) == (family, kernel) and row["instructions"]
    ]
    assert found and all("roles" in row for row in found)
    for row in found:
        names = Counter(loop["role"] for loop in row["roles"])
        expected = roles if roles["softmax"] else roles | {"softmax": row["warps"] // 4 - 1}
        if kernel == "backward_kernel":
            expected = roles | _backward_roles(row)
        assert names == Counter(expected), row["case"]
        ex2, products = (sum(loop[kind] for loop in row["roles"]) for kind in ("EX2", "MMA"))
        assert 0.4 * row["instructions"]["MUFU.EX2"] <= ex2 <= row["instructions"]["MUFU.EX2"], row["case"]
        assert 0 < products <= row["instructions"]["HGMMA"] + row["instructions"]["UTCMMA"], row["case"]
        assert all(0 < loop["least"] <= loop["total"] and loop["waits"] for loop in row["roles"]), row["case"]


def test_forward_at_d128_spills_nothing_and_uses_tma_on_hopper():
    forward = RECORDED["portable", "d128 dense", "sm_90", "forward_kernel"]
    assert budget.spill_bytes(forward) == 0 and not forward["serialized"]
    assert forward["instructions"]["UTMALDG"] > 0


def test_a_constant_of_the_form_is_part_of_the_compiled_kernel():
    """Triton tells kernels apart by the text of their constants: two forms that differ must never print alike."""
    dense, masked = (
        RECORDED["portable", case, "sm_90", "forward_kernel"]
        for case in ("d128 dense", "d128 packed window sinks softcap")
    )
    assert dense["instructions"] != masked["instructions"]


def test_only_kernels_whose_waits_triton_places_may_have_their_wgmma_serialised():
    """In Gluon the waits are ours, and so is the fault."""
    assert {row["family"] for row in RECORDED.values() if row.get("serialized")} <= {"portable"}


def test_each_commit_sees_every_family_on_each_of_its_targets():
    seen = {(unit.family, unit.target) for unit in UNITS if unit.each_commit}
    assert seen == {(family, target) for family, targets in FAMILIES.items() for target in targets}
