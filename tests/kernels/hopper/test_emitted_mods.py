"""Python functions of every named case, traced and emitted, in the Hopper forward on the simulator against dense
attention in float64 that calls the Python functions. Tiles stick out of 64 rows, and pack the heads of a group.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import strobe
from strobe.kernels.runtime.mod_function import mod_function
from strobe.mods import emit
from strobe.mods.program import Program
from strobe.mods.score import ScoreMod
from strobe.testing import Case
from strobe.testing.mods import MODS, Functions, dense
from tests.kernels.hopper.hopper_cases import H200
from tests.kernels.hopper.test_forward_hooks import simulated
from tests.kernels.score_mod_oracle import Mods, judge_against
from tools.proof.simulate import on


def emitted(functions: Functions) -> Mods:
    mods = Mods()
    if functions.score is not None:
        bound = ScoreMod(functions.score).bind(False)
        mods.score_mod = mod_function(emit.forward_text(bound.text))
        mods.score_aux = emit.aux_of(Program.parse(bound.text), bound.tensors, bound.numbers)
    if functions.mask is not None:
        mask = strobe.mask_mod(functions.mask).whole.bind()
        mods.mask_mod = mod_function(emit.mask_text(mask.program.text))
        mods.mask_aux = emit.aux_of(mask.program, mask.tensors, mask.numbers)
    return mods


@pytest.mark.parts(6)
@pytest.mark.parametrize("name", MODS)
def test_named_case(name):
    functions = MODS[name].make(torch.float32)
    functions = functions._replace(leaves=tuple(t.detach() for t in functions.leaves))
    heads = ((4, 4), (4, 1))[list(MODS).index(name) % 2]
    found, call, _ = simulated(Case(name, 64, 64, head_dim=64, batch=2, heads=heads), emitted(functions))
    with torch.no_grad():
        out, lse = dense(call.q, call.k, call.v, functions)
        size, _ = dense(call.q, call.k, call.v.abs(), functions)
        judge_against(found, call, out, lse, size)


@pytest.mark.parametrize("name", ("alibi", "by_head", "dense_bias"))
def test_attention_runs_it_by_itself(name):
    """Through the public function."""
    functions = MODS[name].make(torch.float32)._replace(leaves=())
    draw = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 64, heads, 64, generator=draw).to(torch.bfloat16) for heads in (4, 2, 2))
    mask = None if functions.mask is None else strobe.mask_mod(functions.mask)
    score = None if functions.score is None else strobe.score_mod(functions.score)
    with torch.no_grad(), on(H200) as run:
        out = strobe.attention(q, k, v, score_mod=score, mask=mask, kernel="hopper")
    assert run.reports == [] and run.launches == ["forward_kernel"]
    exact, size = (dense(q, k, values, functions)[0] for values in (v, v.abs()))
    assert ((out.double() - exact).abs() <= 2**-6 * size + 1e-4).all()


def test_functions_that_load_for_each_key_have_tiles_of_64_keys():
    ids, table, rows = torch.zeros(2048, dtype=torch.int32), torch.zeros(32, 32), torch.zeros(2048)
    documents, double = (
        strobe.mask_mod(lambda b, h, q, k, n=n: sum(ids[q] == ids[(k + i).clamp(max=2047)] for i in range(n)) > 0)
        for n in (1, 2)
    )
    for seqlen, options, keys in (
        (1024, {"mask": documents}, 64),
        (2048, {"mask": documents}, 128),  # with block lists
        (2048, {"mask": double}, 64),
        (1024, {"score_mod": lambda s, b, h, q, k: s + table[q // 64, k // 64] + rows[q]}, 128),
        (1024, {"score_mod": lambda s, b, h, q, k: s + rows[k]}, 64),
    ):
        q = torch.zeros(1, seqlen, 2, 128, dtype=torch.bfloat16)
        with on(H200):
            config = strobe.explain(q, q, q, kernel="hopper", **options).forward.config
        assert (config.traits.block_n, config.traits.has_block_lists) == (keys, seqlen == 2048)
