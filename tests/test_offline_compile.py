"""Every portable kernel compiles for every target without a GPU, within its budget of registers, spills and shared memory."""

import pytest
import torch

pytest.importorskip("triton")

import strobe
from strobe.call import Call
from strobe.proof.compile import portable_reports
from strobe.target import FAKES

TARGETS = ("A100", "A10", "RTX 4090", "H200", "B200", "B300", "RTX 5090")  # sm_80, 86, 89, 90, 100, 103, 120
# Bytes of spills a kernel may have. The winners on an H200 spill a little: fewer registers would cost a CTA an SM, which costs more.
SPILLS = 1024
FEW = {"A10", "RTX 4090", "RTX 5090"}  # 99 KiB of shared memory: tiles are halved to fit, and were never timed


def call_of(name: str) -> Call:
    def tensors(rows, keys, heads, heads_kv, width, width_v=None, dtype=torch.bfloat16):
        shapes = ((*rows, heads, width), (*keys, heads_kv, width), (*keys, heads_kv, width_v or width))
        return Call(*(torch.empty(shape, dtype=dtype) for shape in shapes), needs_grad=True, kernel="portable")

    offsets = torch.tensor([0, 100, 256], dtype=torch.int32)
    ids = torch.zeros(1, 256, dtype=torch.int32)
    return {
        "d64 causal": lambda: tensors((1, 256), (1, 256), 4, 4, 64).with_mask(strobe.causal()),
        "d128 dense": lambda: tensors((1, 256), (1, 256), 4, 4, 128),
        "d128 varlen window sinks softcap": lambda: (
            tensors((256,), (256,), 8, 2, 128)
            ._replace(cu_seqlens_q=offsets, cu_seqlens_k=offsets, sinks=torch.zeros(8), softcap=20.0)
            .with_mask(strobe.window(64, 0))
        ),
        "d192/128 causal": lambda: tensors((1, 256), (1, 256), 4, 4, 192, 128).with_mask(strobe.causal()),
        "d256 causal float16": lambda: tensors((1, 256), (1, 256), 4, 4, 256, dtype=torch.float16).with_mask(strobe.causal()),
        "d21 documents prefix": lambda: tensors((1, 256), (1, 256), 4, 4, 21).with_mask(strobe.documents(ids) & strobe.prefix_causal(3)),
        "d64 float32": lambda: tensors((1, 256), (1, 256), 4, 4, 64, dtype=torch.float32),
        "d64 float64": lambda: tensors((1, 256), (1, 256), 4, 4, 64, dtype=torch.float64).with_mask(strobe.causal()),
    }[name]()


EVERYWHERE = ("d64 causal", "d128 dense", "d128 varlen window sinks softcap", "d256 causal float16")
ON_H200 = ("d192/128 causal", "d21 documents prefix", "d64 float32", "d64 float64")
TWINS = ("RTX 4090", "B300")  # as A10 and B200 but for a number in ptxas: the two cases with the largest tiles stand for all
ROWS = [(target, name) for target in TARGETS for name in (EVERYWHERE[2:] if target in TWINS else EVERYWHERE)]
ROWS += [("H200", name) for name in ON_H200]


@pytest.mark.parametrize("target, name", ROWS)
def test_compiles_within_budget(target, name):
    place = FAKES[target]
    reports = portable_reports(call_of(name), place)
    assert [r.name for r in reports] == ["forward_kernel", "delta_kernel", "keys_kernel", "queries_kernel"]
    for r in reports:
        assert 0 < r.registers <= 255
        assert r.shared_bytes <= place.shared_bytes, r
        if "float32" not in name:
            assert r.spill_bytes <= SPILLS * (4 if target in FEW else 1), r
        product = {90: "HGMMA", 100: "UTCHMMA", 103: "UTCHMMA"}.get(place.capability, "HMMA")
        if r.name == "forward_kernel" and name in EVERYWHERE and place.capability != 103:  # the bundled disassembler does not know sm_103
            assert r.instructions.get(product, 0) > 0, r


def test_forward_at_d128_spills_nothing_and_uses_tma_on_hopper():
    forward = portable_reports(call_of("d128 dense"), FAKES["H200"])[0]
    assert forward.spill_bytes == 0 and not forward.serialized
    assert forward.instructions["UTMALDG"] > 0


def test_a_constant_of_the_form_is_part_of_the_compiled_kernel():
    """Triton tells kernels apart by the text of their constants: two forms that differ must never print alike."""
    dense, masked = (portable_reports(call_of(name), FAKES["H200"])[0] for name in ("d128 dense", "d128 varlen window sinks softcap"))
    assert dense.instructions != masked.instructions
