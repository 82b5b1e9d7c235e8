"""Every synchronisation of the Blackwell backward taken away or changed: the simulator notices each in one run of a
scene.

Two waits are kept that no run needs, with the reason (`KEPT`). The simulator runs the instructions of a role's warps
together. So it does not see that the compute warps must meet between reading S^T and writing P^T over it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from strobe.kernels.blackwell import backward
from strobe.sim import Checks
from strobe.sim.mutate import Mutant, mutants
from strobe.sim.scene import Scene
from tests.kernels.blackwell.each_mutant import noticed, notices

SCENES = (
    "backward_d64",
    "backward_documents",
    "backward_d192_128",
    "backward_ordered",
)  # in this order, until one notices
HERE = Path(__file__).parent
SOURCES = sorted(Path(backward.__file__).parent.glob("backward*.py"))
MUTANTS = [(file, mutant) for file in SOURCES for mutant in mutants(file.read_text())]
# TMA's bytes are visible to a thread that has waited for them itself, as compute does before it reads LSE and delta. In
# the simulator it would suffice that the MMA warp has waited, whose products then complete s_full and dp_full.
KEPT = {"pipes.q.consumer_wait(state.q)", "pipes.do.consumer_wait(state.do)"}


def _cases() -> list:
    return [
        pytest.param(
            file,
            mutant,
            id=f"{mutant.function}-{mutant.kind}-{number}".replace(" ", "_"),
        )
        for number, (file, mutant) in enumerate(MUTANTS)
        if mutant.text not in KEPT
    ]


def _checks(name: str) -> Checks:
    """Of adds to dq, only those of the last scene have an order."""
    return Checks(read_fences=True, atomic_order=name == "backward_ordered")


@pytest.mark.parametrize("name", SCENES)
def test_the_kernel_as_it_is_has_no_fault(name):
    assert noticed(_scene(name), None, _checks(name)) == ""


def test_the_waits_that_are_kept_are_those_of_compute():
    kept = [(file.stem, mutant.function, mutant.kind) for file, mutant in MUTANTS if mutant.text in KEPT]
    assert kept == [("backward_compute", "mainloop_step", "drop wait")] * 2


@pytest.mark.parts(12)
@pytest.mark.parametrize("file, mutant", _cases())
def test_each_synchronisation_is_needed(file: Path, mutant: Mutant):
    assert any(notices(_scene(name), file, mutant, _checks(name)) for name in SCENES), str(mutant)


def _scene(name: str) -> Scene:
    return Scene(f"{HERE / 'blackwell_scenes.py'}::{name}", [])
