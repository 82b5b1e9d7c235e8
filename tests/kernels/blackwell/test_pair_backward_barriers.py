"""Every synchronisation of the Blackwell backward's pair of CTAs taken away or changed: the simulator notices each but
one, which the compiler puts itself (`UNNOTICED`).

It needs Triton 3.9. The compute role and its synchronisations are those of one CTA (`test_backward_barriers`). They are
changed here, too, because in the pair they hold between two CTAs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.9")

from strobe.kernels.blackwell import pair_backward
from strobe.sim import Checks
from strobe.sim.mutate import Mutant, mutants
from strobe.sim.scene import Scene
from tests.kernels.blackwell.each_mutant import noticed, notices

HERE = Path(__file__).parent
# in this order, until one notices
SCENES = ("pair_of_a_group", "pair_unseen", "pair_d192_128", "pair_d256", "pair_documents", "pair_ordered")
FOLDER = Path(pair_backward.__file__).parent
SOURCES = [*sorted(FOLDER.glob("pair_backward*.py")), FOLDER / "backward_compute.py", FOLDER / "backward_reduce.py"]
MUTANTS = [(file, mutant) for file in SOURCES for mutant in mutants(file.read_text())]
# Releases of LSE and delta do nothing in the pair.
KEPT = {
    "pipes.q.consumer_release(state.q)",
    "pipes.do.consumer_release(state.do)",
}
OF_ONE_CTA = "backward_reduce", "add_step"  # a pair's steps are those of pair_backward_reduce
# Triton 3.8 and later put this fence themselves; under 3.6 the simulator reports the same omission with one CTA
UNNOTICED = pytest.mark.xfail(strict=True, reason="the compiler puts the fence between stores and TMA stores")


def _cases() -> list:
    return [
        pytest.param(
            file,
            mutant,
            id=f"{mutant.function}-{mutant.kind}-{number}".replace(" ", "_"),
            marks=[UNNOTICED] * ((mutant.function, mutant.kind) == ("store_gradients", "drop fence")),
        )
        for number, (file, mutant) in enumerate(MUTANTS)
        if mutant.text not in KEPT and (file.stem, mutant.function) != OF_ONE_CTA
    ]


def _checks(name: str) -> Checks:
    """Of adds to dq, only those of the last scene have an order."""
    return Checks(read_fences=True, atomic_order=name == "pair_ordered")


@pytest.mark.parametrize("name", SCENES)
def test_the_kernel_as_it_is_has_no_fault(name):
    assert noticed(_scene(name), None, _checks(name)) == ""


@pytest.mark.parametrize("file, mutant", _cases())
def test_each_synchronisation_is_needed(file: Path, mutant: Mutant):
    assert any(notices(_scene(name), file, mutant, _checks(name)) for name in SCENES), str(mutant)


def _scene(name: str) -> Scene:
    return Scene(f"{HERE / 'pair_cases.py'}::{name}", [])
