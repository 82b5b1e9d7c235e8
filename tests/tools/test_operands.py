"""Left operands of wgmma that ptxas packs over one another: found in the machine code of a loop that it gets wrong, and
in no loop of strobe's.
"""

from __future__ import annotations

import pytest
import torch

from strobe.errors import KernelFault
from strobe.kernels.device.dialect import gl, gluon, warpgroup_mma, warpgroup_mma_wait
from tools.proof.compile import report
from tools.proof.operands import clashes

PTX = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%f1}}, {{%r1,%r2,%r3,%r4}}, %rd1, %p1, 1, 1, {};"
LOOP = """
.L_x_1:
        /*0010*/                   HGMMA.64x128x16.F32.BF16 R24, R{q}, gdesc[UR12], RZ, !UPT ;
        /*0020*/                   F2FP.BF16.F32.PACK_AB R{p}, R25, R26 ;
        /*0030*/                   HGMMA.64x128x16.F32.BF16 R88, R{p}, gdesc[UR12].tnspB, R88 ;
        /*0040*/              @P1 BRA `(.L_x_1) ;
"""


def test_one_set_of_registers_for_two_values_is_found():
    assert clashes("", LOOP.format(q=152, p=152)) == ["R152..R155 at 0010"]
    assert clashes("", LOOP.format(q=156, p=152)) == []


def test_one_value_that_the_program_multiplies_both_ways_is_none():
    assert clashes(PTX.format(0) + PTX.format(1), LOOP.format(q=152, p=152)) == []
    assert clashes(PTX.format(0), LOOP.format(q=152, p=152))


def test_a_value_made_anew_before_its_product_is_none():
    anew = LOOP.format(q=152, p=152).replace(
        ".L_x_1:\n", ".L_x_1:\n        /*0008*/                   LDSM.16.M88.4 R152, [R3] ;\n"
    )
    assert clashes("", anew) == []


def test_a_wait_that_stands_behind_the_kernel_is_no_loop():
    """Triton 3.9's ptxas puts what spins behind the kernel's end: the way back from there is none for values."""
    away = LOOP.format(q=152, p=152).replace("@P1 BRA `(.L_x_1)", "@P1 BRA `(.L_x_0)")
    waits = (
        "        /*0008*/                   LDSM.16.M88.4 R152, [R3] ;\n        /*0009*/              @!P0 BRA "
        "`(.L_x_2) ;\n"
    )
    end = "        /*0050*/  EXIT ;\n.L_x_2:\n        /*0060*/  SYNCS R3 ;\n        /*0070*/  BRA `(.L_x_1) ;\n"
    assert clashes("", "\n.L_x_0:\n" + waits + away + end) == []
    assert clashes("", "\n.L_x_0:\n" + waits.partition("\n")[2] + away + end) == ["R152..R155 at 0010"]


@gluon.jit
def two_products(q, out, turns, IN_REGISTERS: gl.constexpr):
    """s = q k^T and o += p v in a loop, with q as the left operand from registers or from shared memory."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, 128], gl.bfloat16)
    places = (
        gl.arange(0, 64, gl.SliceLayout(1, rows))[:, None] * 128 + gl.arange(0, 128, gl.SliceLayout(0, rows))[None, :]
    )
    k = gl.allocate_shared_memory(gl.bfloat16, [128, 128], shared)
    v = gl.allocate_shared_memory(gl.bfloat16, [128, 128], shared)
    left = gl.load(q + places)
    if IN_REGISTERS:
        left = gl.convert_layout(left, gl.DotOperandLayout(0, s_layout, 2))
    else:
        left = gl.allocate_shared_memory(
            gl.bfloat16, [64, 128], gl.NVMMASharedLayout.get_default_for([64, 128], gl.bfloat16), left
        )
    o = gl.full([64, 128], 0.0, gl.float32, s_layout)
    row_max = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
    row_sum = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, s_layout))
    for i in range(turns):
        s = gl.full([64, 128], 0.0, gl.float32, s_layout)
        s = warpgroup_mma_wait(0, deps=[warpgroup_mma(left, k.permute((1, 0)), s, use_acc=False, is_async=True)])
        if i == turns - 1:
            columns = gl.arange(0, 128, gl.SliceLayout(0, s_layout))
            s = gl.where(
                (gl.arange(0, 64, gl.SliceLayout(1, s_layout)) + turns)[:, None] > columns[None, :], s, float("-inf")
            )
        new_max = gl.maximum(row_max, gl.max(s, 1))
        p = gl.exp2(s - new_max[:, None])
        rescale = gl.exp2(row_max - new_max)
        row_sum, row_max = row_sum * rescale + gl.sum(p, 1), new_max
        o = o * rescale[:, None]
        p = gl.convert_layout(p.to(gl.bfloat16), gl.DotOperandLayout(0, s_layout, 2))
        o = warpgroup_mma_wait(0, deps=[warpgroup_mma(p, v, o, is_async=True)])
    gl.store(out + places, gl.convert_layout(o / row_sum[:, None], rows))


def compiled(in_registers: bool) -> None:
    q, out = torch.empty(64, 128, dtype=torch.bfloat16), torch.empty(64, 128)
    report("two_products", two_products, 90, (q, out, 3, in_registers), {"num_warps": 4})


def test_ptxas_gets_it_wrong_and_the_compile_is_refused():
    """Should a newer ptxas get it right, `decode` of the ladder may have its queries back in registers."""
    with pytest.raises(KernelFault, match=r"two_products: ptxas packs one left operand over another in R\d+"):
        compiled(in_registers=True)
    compiled(in_registers=False)
