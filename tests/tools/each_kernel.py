"""Every kernel compiles for a target of each kind, in every tiling: what `make drift` asks of other versions of Triton.

No file of the ordinary test run, where tests/tools/test_offline_compile.py compiles more and looks closer.
"""

import pytest

from tools.proof.budget import TARGETS, UNITS
from tools.proof.compile import launches, rows

KINDS = ("sm_80", "sm_90", "sm_100")
KERNELS = [
    pytest.param(unit, job.name, id=f"{unit.family}.{job.name} {unit.case} {unit.target}")
    for unit in UNITS
    if unit.each_commit and unit.target in KINDS
    for _, job in launches(unit.call, TARGETS[unit.target])
]


@pytest.mark.parametrize("unit, kernel", KERNELS)
def test_compiles(unit, kernel):
    (row,) = rows(unit, kernel)
    assert row.get("error", "") == ""
