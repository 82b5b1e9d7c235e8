"""The budget: every limit is a limit, and a line of the ledger that is not needed is a fault."""

import pytest

from tools.proof import budget
from tools.proof.budget import Allowance, faults, stale

ROW = {
    "family": "portable", "kernel": "keys_kernel", "case": "d128 causal", "target": "sm_86", "registers": 255,
    "spill_store_bytes": 0, "spill_load_bytes": 0, "shared_bytes": 99 * 1024, "tensor_columns": 512,
    "serialized": False,
}  # fmt: skip
BROKEN = {name: ROW[name] for name in ("family", "kernel", "case", "target")} | {"error": "no such word"}


@pytest.fixture
def ledger(monkeypatch):
    def put(*lines: Allowance) -> None:
        monkeypatch.setattr(budget, "LEDGER", lines)

    put()
    return put


def test_at_the_limits_all_is_well(ledger):
    assert faults(ROW) == []


@pytest.mark.parametrize(
    "over, words",
    [
        ({"registers": 256}, "256 registers a thread, expected at most 255"),
        ({"shared_bytes": 99 * 1024 + 1}, "101377 bytes of shared memory, expected at most 101376"),
        ({"tensor_columns": 513}, "513 columns of tensor memory"),
        ({"spill_load_bytes": 4}, "4 bytes of spills, expected at most 0"),
        ({"spill_store_bytes": 4}, "4 bytes of spills, expected at most 0"),
        ({"serialized": True}, "serialises its wgmma"),
    ],
)
def test_each_limit_counts(ledger, over, words):
    (fault,) = faults(ROW | over)
    assert fault.startswith("keys_kernel (d128 causal, sm_86): ") and words in fault


def test_the_ledger_allows_spills_up_to_its_number_and_nothing_else(ledger):
    ledger(Allowance("keys_*", "d128*", "sm_8?", 8, "measured"))
    assert faults(ROW | {"spill_store_bytes": 4, "spill_load_bytes": 4}) == []
    assert len(faults(ROW | {"spill_store_bytes": 8, "spill_load_bytes": 4})) == 1
    assert len(faults(ROW | {"spill_load_bytes": 4, "target": "sm_90"})) == 1
    assert len(faults(ROW | {"serialized": True})) == 1


def test_a_line_speaks_of_one_family(ledger):
    ledger(Allowance("keys_*", "*", "*", 8, "measured", family="hopper"))
    spilling = ROW | {"spill_load_bytes": 8}
    assert faults(spilling | {"family": "hopper"}) == [] and len(faults(spilling)) == 1


def test_what_does_not_compile_must_stand_in_the_ledger_as_such(ledger):
    assert faults(BROKEN) == ["keys_kernel (d128 causal, sm_86) does not compile: no such word"]
    ledger(Allowance("keys_*", "*", "*", 8, "spills are not failures"))
    assert len(faults(BROKEN)) == 1
    ledger(Allowance("keys_*", "*", "*", None, "too wide"))
    assert faults(BROKEN) == []
    assert len(faults(ROW | {"spill_load_bytes": 4})) == 1, "allowed to fail is not allowed to spill"


def test_a_line_that_is_not_needed_as_it_stands_is_stale(ledger):
    spilling = ROW | {"spill_load_bytes": 8}
    ledger(Allowance("keys_*", "*", "*", 8, "needed"))
    assert stale([ROW, spilling]) == []
    assert stale([ROW]) == [
        "keys_kernel (*, *): allowed 8 bytes of spills, the worst takes 0; take the line away".replace(
            "keys_kernel", "keys_*"
        )
    ]
    ledger(Allowance("keys_*", "*", "*", 12, "too much"))
    assert "the worst takes 8; write that" in stale([spilling])[0]
    ledger(Allowance("no_*", "*", "*", 4, "of no kernel"))
    assert "take the line away" in stale([spilling])[0]
    ledger(Allowance("keys_*", "*", "*", None, "mended"))
    assert stale([BROKEN]) == [] and "it compiles now" in stale([ROW])[0]
