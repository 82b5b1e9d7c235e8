"""Left operands of wgmma that ptxas packs over one another: found in the machine code of a loop that it gets wrong, and in no loop of strobe's."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import torch
from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from strobe.kernels.device.dialect import warpgroup_mma, warpgroup_mma_wait
from strobe.proof.compile import offline
from strobe.proof.operands import clashes

PTX = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1}, {%r1,%r2,%r3,%r4}, %rd1, %p1, 1, 1, {};"
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


def test_one_value_that_the_program_multiplies_twice_is_none():
    ptx = "\n".join(PTX.format(kind).replace("{{", "{") for kind in (0, 1)) if "{}" in PTX else ""
    assert clashes(ptx, LOOP.format(q=152, p=152)) == []


def test_a_value_written_anew_before_its_product_is_none():
    again = LOOP.replace("LDSM", "").format(q=152, p=152).replace(".L_x_1:\n", ".L_x_1:\n        /*0008*/  LDSM.16.M88.4 R152, [R3] ;\n")
    assert clashes("", again) == []
