"""One simulated run of a kernel whose source has one changed synchronisation: what the simulator notices."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import ModuleType

from strobe.sim import Checks, simulate
from strobe.sim.mutate import Mutant
from strobe.sim.scene import FAILURES, Scene, replaced


def notices(scene: Scene, file: Path, mutant: Mutant, checks: Checks) -> str:
    """The name of the failure or of the first report; "" if nothing is noticed."""
    with (
        tempfile.TemporaryDirectory() as folder,
        replaced(file, mutant.source, Path(folder) / f"mutant_{abs(hash(str(mutant)))}", scene.path) as module,
    ):
        return noticed(scene, module, checks)


def noticed(scene: Scene, module: ModuleType | None, checks: Checks) -> str:
    """The same for the functions of `module`, or for the kernel as it is (None)."""
    with simulate("sm_100", "eager", 0, check=False, max_reports=1, checks=checks) as run:
        run.machine.max_steps = 50_000
        try:
            scene(module)
        except FAILURES as error:
            return type(error).__name__
    return run.reports[0].kind if run.reports else ""
