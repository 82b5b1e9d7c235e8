"""The hooks of the Blackwell forward through the public functions, on the simulator against an oracle in float64:
functions of scores and masks (`device.forward_hooks`), and lists of key blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import strobe
from strobe.kernels.device import mask_blocks
from strobe.kernels.protocol import Forward
from strobe.ops import mods as ops_mods
from strobe.problem.call import Call
from strobe.problem.mask import Mask
from strobe.problem.target import FAKES
from strobe.testing import Case
from strobe.testing.mods import Functions, dense
from tests.kernels.blackwell.blackwell_scenes import B200
from tests.kernels.hopper.hopper_cases import CAUSAL
from tests.kernels.score_mod_oracle import Mods, exact, judge_against
from tools.proof.compile import Report, compile_job, recording
from tools.proof.simulate import on, posing

POLYNOMIAL = 1.0e-4  # relative error of bfloat16's exponentials by multiply-adds (device.softmax.exp2_by_fma)
SLOPES, BIAS = torch.rand(4, generator=torch.Generator().manual_seed(1)), torch.randn(300, 390)


def _call(rows=300, keys=390, heads=(2, 2), width=64, batch=1, **options) -> Call:
    draw = torch.Generator().manual_seed(2)
    q, k, v = (
        torch.randn(batch, length, count, width, generator=draw).bfloat16()
        for length, count in ((rows, heads[0]), (keys, heads[1]), (keys, heads[1]))
    )
    return Call(q, k, v, kernel="blackwell", **options)


def _simulated(call: Call, functions: Functions, mask: Mask | None = None) -> tuple[Forward, Call]:
    seen = None if functions.mask is None else strobe.mask_mod(functions.mask)
    seen = mask if seen is None else seen if mask is None else seen & mask
    if seen is not None:
        call = call.with_mask(seen)
    with torch.no_grad(), on(B200) as run:
        bound = ops_mods.simplified(ops_mods.bind(call, functions.score, seen))
        assert bound.mods is not None
        out, lse, _ = ops_mods.run(bound)
    assert run.reports == [] and run.launches[-1] == "forward_kernel"
    return Forward(out, lse), call


def _check(call: Call, functions: Functions, mask: Mask | None = None) -> None:
    found, call = _simulated(call, functions, mask)
    with torch.no_grad():
        out, lse = dense(call.q, call.k, call.v, functions, builtin=mask)
        size, _ = dense(call.q, call.k, call.v.abs(), functions, builtin=mask)
        judge_against(found, call, out, lse, size, POLYNOMIAL)


def _alibi(s, b, h, i, j):
    return s - SLOPES[h] * (i - j).abs()


def _each_index(s, b, h, i, j):
    """Every index shows in the score."""
    return s * 0.5 + 0.7 * b - 0.3 * h + 0.01 * (i % 50) * ((j % 7) - 3)


def _every_third(b, h, i, j):
    return (i + j + h) % 3 == 0


def _few(b, h, i, j):
    """Whole blocks are hidden, others seen in full, and rows 128 to 191 see no key."""
    return ((i // 64 + j // 128 + h + b) % 3 != 0) & (i // 64 != 2) & ((j < 128) | (j % 5 > 0))


CASES = {
    "alibi causal": (_call(300, 300), Functions(_alibi), strobe.causal()),
    "dense bias, d128": (_call(width=128), Functions(lambda s, b, h, i, j: s + BIAS[i, j]), None),
    "each index, batch": (_call(200, 300, batch=2), Functions(_each_index), None),
    "each index, packed heads": (_call(40, 260, (6, 2), batch=2), Functions(_each_index), None),
    "each index, 192 columns": (_call(130, 200, width=192)._replace(v=_call(130, 200, width=128).v),
                                Functions(_each_index), strobe.window(70, 20)),
    "every third": (_call(), Functions(mask=_every_third), None),
    "both, window": (_call(390, 390), Functions(_each_index, _every_third), strobe.window(100, 9)),
    "hidden rows": (_call(), Functions(lambda s, b, h, i, j: torch.where(i % 2 == 1, -torch.inf, s)), None),
    "leap": (_call(130, 500), Functions(lambda s, b, h, i, j: s + torch.where(j < 130, 60.0 * (1 + i % 2), 0.0)), None),
}  # fmt: skip


@pytest.mark.parts(4, seed=14)
@pytest.mark.parametrize("name", CASES)
def test_functions_agree_with_the_oracle(name):
    _check(*CASES[name])


@pytest.mark.parametrize(("heads", "causal"), (((2, 2), True), ((4, 1), False)))
def test_lists_of_blocks(heads, causal, monkeypatch):
    """One list for each head, whose tiles do not pack heads."""
    monkeypatch.setattr(mask_blocks, "FEWEST_ELEMENTS", 1)
    call, mask = _call(300, 390, heads, batch=2), strobe.causal() if causal else None
    with posing(B200):
        seen = strobe.mask_mod(_few) if mask is None else strobe.mask_mod(_few) & mask
        choice = ops_mods.choice(call.with_mask(seen), _each_index, seen)
    traits = choice.forward.config.traits
    assert traits.has_block_lists and traits.tuning.pack_gqa == 1 and "block lists" in str(choice)
    _check(call, Functions(_each_index, _few), mask)


def test_one_list_for_the_heads_of_a_packed_tile(monkeypatch):
    monkeypatch.setattr(mask_blocks, "FEWEST_ELEMENTS", 1)
    call = _call(70, 390, (6, 1))
    with posing(B200):
        seen = strobe.mask_mod(lambda b, h, i, j: (i // 64 + j // 128) % 3 != 0)
        traits = ops_mods.choice(call, None, seen).forward.config.traits
    assert traits.has_block_lists and traits.tuning.pack_gqa == 6 and traits.block_lists.block_q == 64
    _check(call, Functions(mask=lambda b, h, i, j: (i // 64 + j // 128) % 3 != 0))


def test_blocks_in_no_list_are_not_visited(monkeypatch):
    """NaN in keys and values that no row sees leaves the output as it is."""
    monkeypatch.setattr(mask_blocks, "FEWEST_ELEMENTS", 1)
    call, functions = _call(256, 384), Functions(mask=lambda b, h, i, j: j // 128 != 1)
    exact, _ = _simulated(call, functions)
    for tensor in (call.k, call.v):
        tensor[:, 128:256] = torch.nan
    found, _ = _simulated(call, functions)
    assert torch.equal(found.out, exact.out) and torch.equal(found.lse, exact.lse)


# name -> lengths of queries and of keys, heads, options, functions
PACKED = {
    "causal": ((130, 0, 1, 65), (200, 3, 150, 65), (2, 2), {"mask": CAUSAL, "outside": (3, 5)},
               Functions(_each_index, _every_third)),
    "packed heads": ((3, 1, 33), (140, 3, 130), (6, 2), {}, Functions(_each_index)),
}  # fmt: skip


def _packed(lengths_q, lengths_k, heads, **options) -> Call:
    case = Case("packed", lengths_q=lengths_q, lengths_k=lengths_k, heads=heads, head_dim=64, **options)
    return case.build("cpu", torch.bfloat16, kernel="blackwell")._replace(needs_grad=False)


def _check_packed(call: Call, functions: Functions) -> list[str]:
    """Raises AssertionError if out or LSE differ from the oracle. The kernels that ran."""
    seen = None if functions.mask is None else strobe.mask_mod(functions.mask)
    with torch.no_grad(), on(B200) as run:
        out, lse, _ = ops_mods.run(ops_mods.bind(call, functions.score, seen))
    assert run.reports == []
    with torch.no_grad():
        wanted = exact(call, Mods(score=functions.score, mask=functions.mask))
        judge_against(Forward(out, lse), call, *wanted, POLYNOMIAL)
    return run.launches


@pytest.mark.parametrize("name", ("causal", pytest.param("packed heads", marks=pytest.mark.nightly)))
def test_functions_of_packed_sequences(name):
    lengths_q, lengths_k, heads, options, functions = PACKED[name]
    assert _check_packed(_packed(lengths_q, lengths_k, heads, **options), functions) == ["forward_kernel"]


@pytest.mark.parametrize(("heads", "mask"), (pytest.param((2, 2), CAUSAL, marks=pytest.mark.nightly), ((4, 1), None)))
def test_lists_of_packed_sequences(heads, mask, monkeypatch):
    """Lists of each sequence and head, or of each sequence and all heads, whose tiles pack heads."""
    monkeypatch.setattr(mask_blocks, "FEWEST_ELEMENTS", 1)
    options = {"outside": (3, 5)} if mask is None else {"outside": (3, 5), "mask": mask}
    call = _packed((130, 0, 1, 265), (300, 3, 150, 390), heads, **options)
    call = call._replace(max_seqlen_q=265, max_seqlen_k=390)
    few = _few if mask is not None else lambda b, h, i, j: _few(b, 0, i, j)
    with posing(B200):
        choice = ops_mods.choice(call, _each_index, strobe.mask_mod(few))
    traits = choice.forward.config.traits
    assert traits.has_block_lists and traits.tuning.pack_gqa == (1 if mask is not None else 4)
    launches = _check_packed(call, Functions(_each_index, few))
    assert launches == ["kinds_kernel", "forward_kernel"]


@pytest.mark.parametrize("sinks", (False, True))
def test_rows_that_a_function_hides(sinks):
    call = _call(130, 200)._replace(sinks=torch.tensor([0.5, -3.0]) if sinks else None)
    found, _ = _simulated(call, Functions(mask=lambda b, h, i, j: (i % 4 == 0) & (j >= 0)))
    assert found.out[0, 1::4].abs().max() == 0 and found.out[0, ::4].abs().min(0).values.max() > 0
    lse = found.lse[0, :, 1::4]
    assert torch.equal(lse, call.sinks[:, None].expand_as(lse)) if sinks else (lse == -torch.inf).all()


# ---------------------------------------------------------------- selection


def test_selection():
    q, k, v = _call(64, 64)[:3]
    score = strobe.alibi(torch.rand(2))
    why = lambda choice: dict(choice.rejections)
    with posing(B200):
        choice = strobe.explain(*(t.requires_grad_() for t in (q, k, v)), score_mod=score)
        assert choice.forward.kernel.name == "blackwell.forward" and "score_mod" in str(choice.forward.config)
        assert choice.backward.kernel.name == "portable.backward"
        assert why(choice)["blackwell.backward"] == "runs no score_mod or mask_mod"
        assert strobe.explain(q, k, v, mask=strobe.mask_mod(_every_third)).forward.kernel.name == "blackwell.forward"
        dropped = strobe.explain(q, k, v, score_mod=score, dropout_p=0.1)
        assert why(dropped)["blackwell.forward"] == "drops no weights (dropout_p)"
        offsets = torch.tensor([0, 20, 64], dtype=torch.int32)
        packed = strobe.explain_varlen(q[0], k[0], v[0], cu_seqlens_q=offsets, score_mod=score)
        assert packed.forward.kernel.name == "blackwell.forward"


def test_gradients_on_the_portable_backward():
    """With functions, the backward is the portable one, after the Blackwell forward."""
    slopes = torch.rand(2, generator=torch.Generator().manual_seed(4)).requires_grad_()
    tensors = [t[:, :100].contiguous() for t in _call(width=16)[:3]]
    up, found = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(5)), []
    for kernel, dtype in ((None, torch.float32), ("blackwell.forward", torch.bfloat16)):
        leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
        run = lambda leaves=leaves, kernel=kernel: strobe.attention(
            *leaves, causal=True, score_mod=strobe.alibi(slopes), kernel=kernel
        )
        if kernel is None:
            out = run()
            found.append([out, *torch.autograd.grad(out, [*leaves, slopes], up)])
        else:
            with on(B200):
                out = run()
                found.append([out, *torch.autograd.grad(out, [*leaves, slopes], up.to(dtype))])
    for wanted, got in zip(*found):
        assert ((got.float() - wanted).norm() / wanted.norm()).item() < 1e-2


COMPILED = {
    "alibi causal d64": (64, _alibi, None, strobe.causal()),
    "alibi causal d128": (128, _alibi, None, strobe.causal()),
    "mask d128": (128, None, _every_third, None),
}


def _compiled(attend: Callable[[], object]) -> Report:
    with torch.no_grad(), posing(FAKES["B200"]), recording(FAKES["B200"]) as jobs:
        attend()
    (job,) = [job for job in jobs if job.name == "forward_kernel"]
    return compile_job(job)


@pytest.mark.nightly_cases("alibi causal d64", "mask d128")
@pytest.mark.parametrize("name", COMPILED)
def test_it_compiles_for_gpus(name):
    """Machine code for sm_100; its softmax may keep functions in registers."""
    width, score, seen, mask = COMPILED[name]
    seen = mask if seen is None else strobe.mask_mod(seen)
    call = _call(2048, 2048, (4, 4), width)
    found = _compiled(lambda: strobe.attention(*call[:3], score_mod=score, mask=seen, kernel="blackwell"))
    assert found.spill_bytes <= 64 and found.capability == 100


@pytest.mark.nightly
@pytest.mark.parametrize("name", COMPILED)
def test_packed_sequences_compile_for_gpus(name):
    """With lists of blocks if there is a mask function. They spill no more than functions of dense tensors."""
    width, score, seen, mask = COMPILED[name]
    seen = mask if seen is None else strobe.mask_mod(seen)
    tensors = [t[0] for t in _call(4096, 4096, (4, 4), width)[:3]]
    options = {"cu_seqlens_q": torch.tensor([0, 2048, 4096], dtype=torch.int32), "kernel": "blackwell"}
    options |= {"max_seqlen_q": 2048, "max_seqlen_k": 2048, "score_mod": score, "mask": seen}
    with posing(B200):
        assert ("block lists" in str(strobe.explain_varlen(*tensors, **options))) == (COMPILED[name][2] is not None)
    found = _compiled(lambda: strobe.attention_varlen(*tensors, **options))
    assert found.spill_bytes <= 64 and found.capability == 100


def test_traits_without_functions_have_no_hooks():
    with posing(B200):
        traits = strobe.explain(*_call(64, 64)[:3]).forward.config.traits
    assert not (traits.has_mods or traits.has_block_lists or traits.hides_beyond_mask) and traits == replace(traits)
