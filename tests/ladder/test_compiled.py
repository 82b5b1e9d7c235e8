"""What the rungs of the ladder compile to: tensor core instructions, registers and spills."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from ladder.harness import RUNGS, harness
from tools.proof.budget import TARGETS
from tools.proof.compile import compile_job, recording

# bytes of spills; 0 where nothing is said. Beside o and scores there is no room for the addresses of copies; none are
# in a loop, but for six instructions of a's causal one on sm_80
SPILLS = {
    ("t", 128, False, "sm_80"): 88,
    ("t", 128, True, "sm_80"): 128,
    ("a", 128, True, "sm_80"): 44,
    ("a", 128, False, "sm_90"): 88,
    ("k4_1", 128, False, "sm_90"): 8,
    ("k4_1", 128, True, "sm_90"): 8,
    ("k4_2", 128, True, "sm_90"): 8,
    ("k6_2", 128, True, "sm_90"): 16,
}
PRODUCTS = {
    "k1": (),
    "k2": (),
    "t": ("HGMMA",),
    "a": ("HMMA",),
    "k3_1": ("HMMA",),
    "k3_2": ("HMMA",),
    "k3_3": ("HMMA",),
    "k4_1": ("HGMMA", "HMMA"),
}


def compiled(name: str, head_dim: int, causal: bool, target: str, seqlen: int = 2048) -> None:
    """Spills as stated, tensor-core instructions as the rung says, shared memory within what its GPU gives."""
    rung = harness.load(name)
    size = rung.size(seqlen, head_dim, causal)
    q, k, v = (
        torch.empty(1, length, heads, head_dim, dtype=rung.inputs)
        for length, heads in (
            (size.seqlen_q, size.heads),
            (size.seqlen_k, size.heads_kv),
            (size.seqlen_k, size.heads_kv),
        )
    )
    with recording(TARGETS[target]) as jobs:
        rung.run(q, k, v, causal)
    reports = {job.name: compile_job(job) for job in jobs}
    assert sum(report.spill_bytes for report in reports.values()) <= SPILLS.get((name, head_dim, causal, target), 0)
    assert not any(report.serialized for report in reports.values())
    attend = reports.get("attend_kernel")
    if attend:
        wanted = {"HMMA"} if target == "sm_80" and name == "t" else set(PRODUCTS.get(name, ("HGMMA",)))
        found = {kind for kind in ("HGMMA", "HMMA") if attend.instructions[kind]}
        assert found == (set() if name in ("k7", "k8") else wanted)  # 8-bit products are QGMMA, which is not counted
        form = rung.form_of(size, {})
        if hasattr(form, "shared_bytes"):
            assert form.shared_bytes() <= attend.shared_bytes <= form.shared_bytes() + 16 * 1024
    assert all(report.shared_bytes <= 227 * 1024 for report in reports.values())


@pytest.mark.parts(3, seed=269367984)
@pytest.mark.parametrize("name", RUNGS)
def test_compiles(name):
    compiled(name, 128, True, "sm_90")


@pytest.mark.nightly_cases("False")
@pytest.mark.parametrize("causal", [False, True])
def test_what_short_rows_compile_to(causal):
    compiled("k6", 64, causal, "sm_90", seqlen=512)


@pytest.mark.nightly
@pytest.mark.parametrize("head_dim, causal", [(64, False), (64, True), (128, False)])
@pytest.mark.parametrize("name", RUNGS)
def test_compiles_all(name, head_dim, causal):
    compiled(name, head_dim, causal, "sm_90")


@pytest.mark.nightly
@pytest.mark.parametrize("head_dim, causal", [(64, False), (64, True), (128, False), (128, True)])
@pytest.mark.parametrize("name", [name for name in RUNGS if harness.load(name).capability == 80])
def test_compiles_for_ampere(name, head_dim, causal):
    compiled(name, head_dim, causal, "sm_80")
