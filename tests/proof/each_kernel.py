"""Every kernel compiles for a target of each kind: what `make drift` asks of other versions of Triton.

No file of the ordinary test run, where tests/test_offline_compile.py compiles more and looks closer.
"""

import pytest

from strobe.proof.budget import FAMILIES, ON_EVERY_TARGET, TARGETS, Unit
from strobe.proof.compile import launches, rows

KINDS = ("sm_80", "sm_90", "sm_100")
UNITS = [Unit(family, ON_EVERY_TARGET, target) for family, targets in FAMILIES.items() for target in targets if target in KINDS]
KERNELS = [
    pytest.param(unit, job.name, id=f"{unit.family}.{job.name} {unit.target}")
    for unit in UNITS
    for _, job in launches(unit.call, TARGETS[unit.target])
]


@pytest.mark.parametrize("unit, kernel", KERNELS)
def test_compiles(unit, kernel):
    (row,) = rows(unit, kernel)
    assert row.get("error", "") == ""
