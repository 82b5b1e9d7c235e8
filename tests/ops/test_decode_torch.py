"""attention_decode and torch: selection, refusals, opcheck, compile, autocast, inference mode."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import strobe
from strobe.errors import UnsupportedProblem
from strobe.kernels.hopper.decode_config import DECODE as HOPPER
from strobe.kernels.runtime import error_flags
from strobe.kernels.runtime.launch_cache import CACHE
from strobe.ops import decode as ops_decode
from strobe.problem.append import AppendCall
from strobe.problem.cache import FP8
from strobe.problem.call import Dense
from strobe.problem.decode import DecodeCall, DecodeProblem
from strobe.problem.target import FAKES
from strobe.selection.select import select
from strobe.testing.decode import DECODES

INT = lambda *values, device="cpu": torch.tensor(values, dtype=torch.int32, device=device)


def draw(*shape, seed=0, dtype=torch.float32, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)


# ---------------------------------------------------------------- selection, the ops and torch


def test_every_gpu_runs_the_portable_decode_but_hopper_and_blackwell():
    k = torch.empty(2, 4096, 2, 64)
    problem = DecodeProblem.from_call(DecodeCall(torch.empty(2, 1, 8, 64), k, k, INT(1, 2), right=0))
    for name, target in FAKES.items():
        chosen = select(problem, target).forward.kernel.name
        assert chosen == ("cpu.decode" if name == "CPU" else "portable.decode")  # float32
    half = replace(problem, dtype=torch.float16, cache_dtype=torch.float16, out_dtype=torch.float16)
    for name, target in FAKES.items():
        chosen = select(half, target).forward.kernel.name
        own = {90: "hopper.decode", 100: "blackwell.decode", 103: "blackwell.decode"}
        assert chosen == ("cpu.decode" if name == "CPU" else own.get(target.capability, "portable.decode"))
    text = str(select(half, FAKES["H200"]))
    assert "decode B=2 T=1 S_max=4096" in text and "splits" in text and "memory-bound" in text


REFUSED_ON_HOPPER = {
    "dtype": (
        dict(dtype=torch.float32, cache_dtype=torch.float32, out_dtype=torch.float32),
        "float16 and bfloat16 queries only; these are float32",
    ),
    "head_dim": (dict(head_dim=264, head_dim_v=264), "head dimensions up to 256; this is 264/264"),
    "rows": (dict(head_dim=20), "copies 16 bytes at a time"),
    "rows of 8 bits": (dict(cache_dtype=FP8, head_dim=72), "copies 16 bytes at a time"),
    "alignment": (dict(alignment=8), "addresses and strides are multiples of 8"),
    "keys": (dict(layout=Dense(1, 1, 2**30)), "sequences of fewer than 2^30 keys"),
}


@pytest.mark.parametrize("name", REFUSED_ON_HOPPER)
def test_each_reason_against_the_hopper_decode(name):
    k = torch.empty(2, 4096, 2, 64, dtype=torch.bfloat16, device="meta")
    call = DecodeCall(
        torch.empty(2, 1, 8, 64, dtype=torch.bfloat16, device="meta"),
        k,
        k,
        torch.empty(2, dtype=torch.int32, device="meta"),
        right=0,
    )
    problem = DecodeProblem.from_call(call)
    assert (
        HOPPER.why_not(problem, FAKES["H200"]) is None
        and HOPPER.why_not(problem, FAKES["B200"]) == "made for sm_90; this target is sm_100"
    )
    changes, words = REFUSED_ON_HOPPER[name]
    assert words in HOPPER.why_not(replace(problem, **changes), FAKES["H200"])


def test_float64_over_8_bits_is_refused_on_gpus():
    call = DECODES["pages_fp8"].build("cpu", torch.float64)
    assert select(DecodeProblem.from_call(call), FAKES["CPU"]).forward.kernel.name == "cpu.decode"
    with pytest.raises(strobe.UnsupportedProblem, match=r"portable\.decode +float64 over 8-bit keys"):
        select(DecodeProblem.from_call(call), FAKES["H200"])


def test_a_family_that_cannot_decode_here_says_so():
    k = torch.empty(2, 8, 2, 16)
    cache = strobe.DenseCache(k, k, INT(1, 2))
    with pytest.raises(strobe.UnsupportedProblem, match=r"hopper\.decode +made for sm_90; this target is a CPU\n"):
        strobe.attention_decode(torch.empty(2, 1, 2, 16), cache, kernel="hopper")
    with pytest.raises(
        strobe.InvalidProblem,
        match=(
            r"kernel: got 'cpu\.forward', expected one of blackwell, hopper, portable, cpu, blackwell\.decode, "
            r"hopper\.decode, portable\.decode, cpu\.decode"
        ),
    ):
        strobe.attention_decode(torch.empty(2, 1, 2, 16), cache, kernel="cpu.forward")


def test_out_and_warmup(device, kernel):
    k, q = draw(2, 8, 2, 16, device=device), draw(2, 1, 4, 16, seed=1, device=device)
    cache = strobe.DenseCache(k, k, INT(3, 8, device=device))
    strobe.warmup([strobe.explain_decode(q, cache, sinks=torch.zeros(4, device=device)).problem], device)
    out = torch.empty_like(q)
    assert strobe.attention_decode(q, cache, out=out, kernel=kernel) is out
    assert torch.equal(out, strobe.attention_decode(q, cache, kernel=kernel))
    paged = strobe.PagedCache(k, k, INT([0], [1], device=device), cache.seqlens)
    strobe.warmup([strobe.explain_decode(q, paged).problem], device)


VARIATIONS = {
    "tokens": lambda c: c._replace(q=c.q[:, :1]),
    "seqlens": lambda c: c._replace(seqlens=c.seqlens - 1),
    "k_start": lambda c: c._replace(k_start=INT(2, 3)),
    "sinks": lambda c: c._replace(sinks=torch.zeros(4)),
    "left": lambda c: c._replace(left=3),
    "right": lambda c: c._replace(right=-1),
    "scale": lambda c: c._replace(scale=0.1),
    "softcap": lambda c: c._replace(softcap=1.0),
    "batch_invariant": lambda c: c._replace(batch_invariant=True),
    "kernel": lambda c: c._replace(kernel="cpu"),
    "partial": lambda c: c._replace(partial=True, q=c.q.bfloat16(), k=c.k.bfloat16(), v=c.v.bfloat16()),
    "dtype": lambda c: c._replace(q=c.q.bfloat16(), k=c.k.bfloat16(), v=c.v.bfloat16()),
    "pages": lambda c: c._replace(
        k=c.k.view(8, 4, 2, 8), v=c.v.view(8, 4, 2, 8), page_table=INT([3, 2, 1, 0], [4, 5, 6, 7])
    ),
    "narrow v": lambda c: c._replace(v=c.v[..., :5]),
    "fewer heads": lambda c: c._replace(k=c.k[:, :, :1], v=c.v[:, :, :1]),
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_a_call_is_not_mistaken_for_another(name):
    """A, B, A against the same with nothing remembered."""
    k, v = draw(2, 16, 2, 8), draw(2, 16, 2, 8, seed=1)
    plain = DecodeCall(draw(2, 3, 4, 8, seed=2), k, v, INT(9, 16), right=0)
    other = VARIATIONS[name](plain)
    fresh = []
    for call in (plain, other):
        CACHE.clear()
        fresh.append(ops_decode.run(call))
    for call, (out, lse) in zip((plain, other, plain), (*fresh, fresh[0])):
        got = ops_decode.run(call)
        assert got[0].dtype == out.dtype and torch.equal(got[0], out) and torch.equal(got[1], lse)


def test_opcheck():
    k, v = draw(3, 16, 2, 8), draw(3, 16, 2, 8, seed=1)
    dense = DecodeCall(
        draw(3, 3, 4, 8, seed=2), k, v, INT(9, 16, 0), k_start=INT(1, 0, 0), sinks=torch.zeros(4), right=0
    )
    paged = DecodeCall(draw(3, 3, 4, 8, seed=2), k, v, INT(9, 16, 0), INT([0], [1], [2]), left=3, right=0, softcap=2.0)
    for call in (dense, paged):
        torch.library.opcheck(ops_decode.DECODE, tuple(call[:-1]))
    torch.library.opcheck(ops_decode.DECODE_OUT, (torch.empty(3, 3, 4, 8), *dense[:-1]))
    new = draw(3, 2, 2, 8, seed=3)
    for table in (None, INT([0], [1], [2])):
        torch.library.opcheck(
            ops_decode.APPEND, tuple(AppendCall(new, new, k.clone(), v.clone(), INT(9, 12, 0), table))
        )


def test_a_step_compiles_whole():
    """append and attention_decode in one graph without a break, over a cache that changes, for another length too."""

    def step(q, cache, k_new, rotary):
        strobe.append(cache, k_new, k_new, rotary=rotary)
        longer = cache._replace(seqlens=cache.seqlens + k_new.shape[1])
        return strobe.attention_decode(q, longer, window=(7, 0)), strobe.partial_attention_decode(q, longer).lse

    angle = torch.arange(16.0)[:, None] * torch.tensor([1.0, 0.1])
    rotary = strobe.Rotary(angle.cos(), angle.sin())
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for tokens in (1, 2):
        q, new = draw(3, tokens, 4, 8, seed=tokens), draw(3, tokens, 2, 8, seed=9)
        pools = [(draw(6, 8, 2, 8, seed=1), draw(6, 8, 2, 8, seed=2)) for _ in range(2)]
        caches = [strobe.PagedCache(*pool, INT([0, 1], [4, 5], [2, 3]), INT(3, 9, 0)) for pool in pools]
        results = [run(q, cache, new, rotary) for run, cache in zip((step, compiled), caches)]
        assert all(torch.equal(a, b) for a, b in zip(*results)) and all(torch.equal(a, b) for a, b in zip(*pools))


def test_gradients_are_refused():
    k, q = draw(2, 8, 2, 16), draw(2, 1, 2, 16)
    cache = strobe.DenseCache(k, k, INT(3, 8))
    with pytest.raises(strobe.UnsupportedProblem, match="gradients through decode"):
        strobe.attention_decode(q.clone().requires_grad_(), cache)
    with pytest.raises(strobe.UnsupportedProblem, match="gradients through append"):
        strobe.append(cache, q.clone().requires_grad_(), q)
    with torch.no_grad():
        strobe.attention_decode(q.clone().requires_grad_(), cache)


def test_autocast_follows_the_cache():
    k, q = draw(2, 8, 2, 16), draw(2, 1, 2, 16)
    lengths = INT(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert (
            strobe.attention_decode(q, strobe.DenseCache(k.bfloat16(), k.bfloat16(), lengths)).dtype == torch.bfloat16
        )
        assert strobe.attention_decode(q, strobe.DenseCache(k, k, lengths)).dtype == torch.float32


# ---------------------------------------------------------------- inside torch


def _cache(n: int = 16) -> strobe.DenseCache:
    return strobe.DenseCache(draw(2, 16, 2, 8), draw(2, 16, 2, 8), torch.tensor([n, 5], dtype=torch.int32))


def test_a_fault_met_in_inference_mode_is_told_outside(monkeypatch):
    """Also where it is the first of the process: the word that holds it must not be a tensor of inference mode."""
    monkeypatch.setattr(error_flags, "_words", {})
    with torch.inference_mode():
        strobe.attention_decode(torch.ones(2, 1, 4, 8), _cache(99))
    assert len(strobe.last_errors()) == 1
    strobe.attention_decode(torch.ones(2, 1, 4, 8), _cache(99))
    assert len(strobe.last_errors()) == 1


@pytest.mark.parametrize("tokens", [1, 3])
def test_out_may_be_q(tokens):
    q, cache = draw(2, tokens, 4, 8), _cache()
    expected = strobe.attention_decode(q, cache)
    assert strobe.attention_decode(q, cache, out=q) is q and torch.equal(q, expected)


def test_out_may_lie_in_q_as_nothing_but_q():
    """A row's program reads its own row of q before it writes, not others'."""
    rows, cache = draw(3, 1, 4, 8), _cache()
    turned = draw(2, 2, 4, 8)
    for q, out in ((rows[:2], rows[1:]), (turned, turned.transpose(0, 1))):
        with pytest.raises(strobe.InvalidProblem, match="out: got memory that q lies in"):
            strobe.attention_decode(q, cache, out=out)


def test_tangents_are_refused_too():
    cache = _cache()
    with pytest.raises(UnsupportedProblem, match="gradients through decode"):
        torch.func.jvp(
            lambda q: strobe.attention_decode(q, cache), (torch.ones(2, 1, 4, 8),), (torch.ones(2, 1, 4, 8),)
        )
    with torch.autograd.forward_ad.dual_level(), pytest.raises(UnsupportedProblem, match="gradients through decode"):
        strobe.attention_decode(
            torch.autograd.forward_ad.make_dual(torch.ones(2, 1, 4, 8), torch.ones(2, 1, 4, 8)), cache
        )


def test_no_query_head_over_two_of_keys():
    assert strobe.attention_decode(torch.ones(2, 1, 0, 8), _cache()).shape == (2, 1, 0, 8)
    assert strobe.attention(torch.ones(1, 3, 0, 8), torch.ones(1, 3, 2, 8), torch.ones(1, 3, 2, 8)).shape == (
        1,
        3,
        0,
        8,
    )


def test_inductor_writes_to_the_layer_it_is_told_though_sizes_change():
    """Where a cache, or out, is a part of a tensor: Inductor takes an offset that is symbolic for 0
    (pytorch/pytorch#198068).
    """

    def layers(keys, values, seqlens, k_new, v_new, q, outs):
        for layer in range(len(keys)):
            cache = strobe.DenseCache(keys[layer], values[layer], seqlens)
            strobe.append(cache, k_new[layer], v_new[layer])
            strobe.attention_decode(q, cache, out=outs[layer])
            strobe.attention(q, q, q, out=outs[2 + layer])
        return seqlens + 1

    with torch._inductor.config.patch(compile_threads=1, force_disable_caches=True):
        compiled = torch.compile(layers, fullgraph=True)
        for batch in (2, 3):
            new, q = draw(4, batch, 1, 2, 8), draw(batch, 1, 2, 8)
            made = []
            for run in (layers, compiled):
                pool, outs = torch.zeros(4, batch, 16, 2, 8), torch.zeros(4, batch, 1, 2, 8)
                run(pool[:2], pool[2:], INT(*[3] * batch), new[:2], new[2:], q, outs)
                made.append((pool, outs))
            assert all(map(torch.equal, *made))


def test_inductor_runs_it():
    def step(q, cache):
        strobe.append(cache, q[:, :, :2], q[:, :, :2])
        return strobe.attention_decode(q, cache)

    with torch._inductor.config.patch(compile_threads=1):
        found = torch.compile(step, fullgraph=True)(torch.ones(2, 1, 4, 8), _cache(3))
    assert torch.equal(found, step(torch.ones(2, 1, 4, 8), _cache(3)))


def test_no_launch_is_kept_for_copies():
    """Small tensors that are not contiguous are copied, each time to where the allocator likes."""
    k, q = torch.zeros(2, 8, 2, 16), torch.zeros(2, 1, 4, 16)
    whole = DecodeCall(q, k, k, INT(3, 8), right=0)
    scattered = whole._replace(seqlens=INT(3, 0, 8, 0)[::2])
    assert ops_decode.decide(whole).forward.replays and not ops_decode.decide(scattered).forward.replays
    assert torch.equal(ops_decode.run(whole)[0], ops_decode.run(scattered)[0])
