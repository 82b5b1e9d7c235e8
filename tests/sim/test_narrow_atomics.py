"""Reductions of pairs of 16-bit floats in inline PTX, to memory: each half is added by itself, in its own precision."""

import pytest
import torch

from strobe.kernels.device.dialect import gl, gluon
from strobe.sim import simulate


@gluon.jit
def pairs_kernel(x, out, old, kind: gl.constexpr):
    at = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    where, value = (out + at).to(gl.int64), gl.load(x + at)
    if kind == "f16x2" or kind == "bf16x2":
        reduction: gl.constexpr = "red.global.add.noftz." + kind + " [$1], $2; mov.u32 $0, 0;"
        gl.inline_asm_elementwise(reduction, "=r,l,r", [where, value], dtype=gl.int32, is_pure=False, pack=1)
    else:
        swap: gl.constexpr = "atom.global.add.noftz." + kind.split(" ")[0] + " $0, [$1], $2;"
        gl.store(
            old + at, gl.inline_asm_elementwise(swap, "=r,l,r", [where, value], dtype=gl.int32, is_pure=False, pack=1)
        )


@pytest.mark.parametrize("kind, dtype", [("f16x2", torch.float16), ("bf16x2", torch.bfloat16)])
@pytest.mark.parametrize("returns", [False, True])
def test_pairs_are_added_half_by_half(kind, dtype, returns):
    x, before = (torch.randn(256, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (1, 2))
    out, old = before.clone(), torch.zeros(256, dtype=dtype)
    with simulate("sm_90", "eager"):
        pairs_kernel[(1,)](
            x.view(torch.int32),
            out.view(torch.int32),
            old.view(torch.int32),
            kind + " atom" if returns else kind,
            num_warps=4,
        )
    assert torch.equal(out, before + x)
    assert not returns or torch.equal(old, before)
