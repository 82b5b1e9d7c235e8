"""What broke in other libraries and must not break here: tests for rows of docs/reliability.md that no other file has.

Each test names its rows. What needs a GPU stands in test_reliability_gpu.py and test_execution_gpu.py; faults that
re-create the rows in test_mutants.py.
"""

from __future__ import annotations

import ast
import math
import mmap
import re
from dataclasses import fields, replace
from itertools import combinations, pairwise, permutations
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import strobe
from strobe.errors import KernelFault
from strobe.kernels.runtime.hook_constants import ListedBlocks
from strobe.ops import attention as ops
from strobe.problem import torch_private
from strobe.problem.call import Call
from strobe.problem.target import FAKES
from strobe.selection.select import select
from strobe.testing import CASES, FAMILIES, Case, Poison, assert_as_good_as, assert_gradients_as_good_as, inputs
from strobe.testing.cases import _both, _causal, _documents, _lengths, _prefixes, _window

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / f"{name}.md" for name in ("reliability", "reliability_values", "reliability_execution")]
TEXT = "\n".join(page.read_text() for page in PAGES)
HALF_AND_FLOAT = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def int32(values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def draw(*shapes, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


# ---------------------------------------------------------------- empty rows, lse


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    "empty", [(0, 70), (64, 130), (128, 192), (0, 192)], ids=["first tile", "middle tile", "last tile", "all"]
)
def test_tiles_of_empty_rows_stand_anywhere(empty, sinks, device, kernel, judge):
    """Row 2: rows that see nothing may fill the first, a middle or the last tile, with and without a sink."""
    ids = torch.zeros(2, 192, dtype=torch.int32)
    ids[:, slice(*empty)] = -1
    case = Case(
        "empty",
        192,
        sinks=sinks,
        head_dim=32,
        mask=lambda case, device: strobe.documents(ids.to(device)) & strobe.causal(),
    )
    judge(case.build(device, torch.float32, requires_grad=True, kernel=kernel))


def test_merge_of_infinities_and_of_what_is_far_apart():
    """As attention over the keys of both: infinity stays, and numbers whose difference is none are weighed."""
    sides = lambda *values: [strobe.Partial(torch.full((1, 1, 1, 1), value), torch.zeros(1, 1, 1)) for value in values]
    inf = torch.inf
    for values, expected in (
        ((inf, inf), inf),
        ((inf, 1.0), inf),
        ((-2.0, -inf), -inf),
        ((3e38, -3e38), 0.0),
        ((3e38, -1e38), 1e38),
    ):
        for order in (values, values[::-1]):
            torch.testing.assert_close(strobe.merge(*sides(*order)).out.item(), expected)
    parts = sides(3e38, -3e38)
    for part in parts:
        part.out.requires_grad_()
    strobe.merge(*parts).out.sum().backward()
    assert [part.out.grad.item() for part in parts] == [0.5, 0.5]
    assert strobe.merge(*sides(inf, -inf)).out.isnan().all()


def test_merge_of_a_large_value_that_hardly_counts():
    """From either side: the way round the large one would leave its rounding behind, some 4e-3."""
    far = strobe.Partial(torch.full((1, 1, 1, 4), 1e5), torch.full((1, 1, 1), -15.0))
    near = strobe.Partial(torch.rand(1, 1, 1, 4), torch.full((1, 1, 1), 2.0))
    share = torch.sigmoid((far.lse - near.lse).double())
    exact = far.out.double() * share + near.out.double() * (1 - share)
    for found in (strobe.merge(far, near), strobe.merge(near, far)):
        assert (found.out.double() - exact).abs().max() <= 4 * 2.0**-24


@pytest.mark.parametrize("level", [-1000.0, -80.0, 0.0, 80.0, 1000.0])
@pytest.mark.parametrize("gap", [0.0, 1.0, 2000.0])
def test_merge_at_any_level(level, gap):
    """Row 22: the exponential of an lse overflows, so merging never takes one; gradients stay finite."""
    outs = [torch.full((1, 1, 1, 4), value, dtype=torch.float64, requires_grad=True) for value in (1.0, 3.0)]
    lses = [torch.full((1, 1, 1), value, dtype=torch.float64, requires_grad=True) for value in (level, level - gap)]
    merged = strobe.merge(*(strobe.Partial(out, lse) for out, lse in zip(outs, lses)))
    share = 1 / (1 + math.exp(-gap))
    assert merged.out.flatten().tolist() == pytest.approx([share * 1 + (1 - share) * 3] * 4, rel=4 * 2.0**-52)
    assert merged.lse.item() == pytest.approx(level + math.log1p(math.exp(-gap)), rel=4 * 2.0**-52)
    assert all(
        grad.isfinite().all() for grad in torch.autograd.grad(merged.out.sum() + merged.lse.sum(), [*outs, *lses])
    )


@pytest.mark.parametrize("parts", [2, 5, 64])
def test_more_parts_than_keys(parts, device, kernel):
    """Row 10: of 64 parts over 5 keys most are empty, and merging all of them gives the whole."""
    q, k, v = draw((1, 9, 2, 16), (1, 5, 2, 16), (1, 5, 2, 16), dtype=torch.float64, device=device)
    whole = strobe.partial_attention(q, k, v, kernel=kernel)
    cuts = [5 * n // parts for n in range(parts + 1)]
    merged = strobe.Partial(torch.zeros_like(whole.out), torch.full_like(whole.lse, -torch.inf))
    for start, stop in pairwise(cuts):
        merged = strobe.merge(merged, strobe.partial_attention(q, k[:, start:stop], v[:, start:stop], kernel=kernel))
    torch.testing.assert_close(merged.out, whole.out, rtol=0, atol=100 * 2.0**-53)
    torch.testing.assert_close(merged.lse, whole.lse, rtol=0, atol=100 * 2.0**-53)


@pytest.mark.parametrize(
    "name", ["packed_no_keys_middle", "packed_no_rows_middle", "packed_empty_middle", "packed_outside_sinks"]
)
def test_each_lse_lies_in_its_own_slot(name, device, kernel):
    """Row 6: written over NaN, every row's lse is what its sequence alone gives."""
    call = CASES[name].build(device, torch.float32, kernel=kernel)
    with Poison() as poison:
        out, lse = ops.run(poison.enclose_call(call))
    for n, (start, stop) in enumerate(zip(call.cu_seqlens_q.tolist(), call.cu_seqlens_q[1:].tolist())):
        keys = slice(*call.cu_seqlens_k[n : n + 2].tolist())
        one = call._replace(
            q=call.q[None, start:stop], k=call.k[None, keys], v=call.v[None, keys], cu_seqlens_q=None, cu_seqlens_k=None
        )
        alone, lse_alone = ops.run(one)
        torch.testing.assert_close(
            lse[:, start:stop], lse_alone[0], rtol=2.0**-20, atol=4e-6
        )  # twice what the contract allows one of them
        torch.testing.assert_close(out[start:stop], alone[0], rtol=0, atol=100 * 2.0**-24)  # as test_metamorphic.py
    assert not lse.isnan().any() and not out.isnan().any()


@pytest.mark.parametrize("family", ["normal", "negative"])
@pytest.mark.parametrize("length", [1, 2, 3, 127, 129, 130])
def test_gradients_of_odd_lengths_times_3(length, family, device, kernel, judge):
    """Row 17: keys beyond the end must not overflow the exponential of the backward."""
    call = Case("odd", lengths_q=(length, 3, 2, 1), heads=(2, 2), head_dim=32, mask=_causal).build(
        device, torch.bfloat16, family, 3, requires_grad=True, kernel=kernel
    )
    judge(call._replace(q=(3 * call.q).detach().requires_grad_(), k=(3 * call.k).detach().requires_grad_()), family, 3)


def test_a_large_negative_scale(device, kernel, judge):
    """A maximum taken before the scale's sign would leave exponents of +1000. Of scale -1 the forward alone: it has
    weights under 2^-126, which count as 0, and no bound of a gradient allows for that.
    """
    q, k, v = (4 * t for t in draw((1, 20, 2, 64), (1, 90, 2, 64), (1, 90, 2, 64), device=device))
    judge(Call(*(t.clone().requires_grad_() for t in (q, k, v)), scale=-0.125, right=0, needs_grad=True, kernel=kernel))
    call = Call(q, k, v, scale=-1.0, right=0, kernel=kernel)
    assert_as_good_as(ops.run(call), call)


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"batch_invariant": True}], ids=str)
def test_a_row_of_nan_gives_no_weight_to_keys_it_cannot_see(options, device, kernel):
    """Row 19: 0 * NaN is NaN, so a hidden weight is put to 0 after the exponential and not before."""
    q, k, v = draw(*[(1, 200, 2, 16)] * 3, device=device)
    q[0, 50] = torch.nan
    v.requires_grad_()
    out = strobe.attention(q, k, v, causal=True, kernel=kernel, **options)
    (dv,) = torch.autograd.grad(out, v, torch.ones_like(out))
    assert dv[0, :51].isnan().all() and dv[0, 51:].isfinite().all()


@pytest.mark.parametrize("heads", [1, 3, 5, 7, 9, 13])
def test_sinks_are_read_where_they_are(heads, device, kernel):
    """Row 64: any number of heads, each sink between guard bands."""
    call = Case("sinks", 5, 9, heads=(heads, 1), head_dim=16, sinks=True).build(device, kernel=kernel)
    with Poison() as poison:
        result = ops.run(poison.enclose_call(call))
    assert_as_good_as(result, call)


# ---------------------------------------------------------------- integer width, launch limits


def sparse(count: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """`count` zeros of which only touched pages exist."""
    memory = mmap.mmap(
        -1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    )
    return torch.frombuffer(memory, dtype=dtype)


@pytest.mark.skipif(not hasattr(mmap, "MAP_NORESERVE"), reason="needs memory that exists when touched")
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "row", "head"])
def test_elements_that_lie_2_to_the_31_apart(axis):
    """Rows 24, 25, 30, 32: offsets are 64-bit products, for q, k, v, out and the gradient of out."""
    shape, apart = [2, 2, 2, 8], 2**31 + 24
    strides = [64, 32, 16, 1]
    strides[axis] = apart
    room = sparse(2**31 + 4096)
    q, k, v, dout = draw(*[shape] * 4, dtype=torch.float16)
    far = []
    for n, tensor in enumerate((q, k, v, dout)):
        far.append(room.as_strided(shape, strides, 512 * n))
        far[-1].copy_(tensor)
    held = room.as_strided(shape, strides, 512 * 5)
    expected = strobe.attention(q, k, v, causal=True, kernel="cpu")
    assert strobe.attention(*far[:3], causal=True, kernel="cpu", out=held) is held
    torch.testing.assert_close(held, expected, rtol=0, atol=2.0**-10)
    leaves = [[t.detach().requires_grad_() for t in tensors] for tensors in ((q, k, v), far[:3])]
    grads = [
        torch.autograd.grad(strobe.attention(*own, causal=True, kernel="cpu"), own, up)
        for own, up in zip(leaves, (dout, far[3]))
    ]
    for got, wanted in zip(*grads):
        torch.testing.assert_close(got, wanted, rtol=0, atol=2.0**-8)


def test_expanded_to_more_than_2_to_the_31_elements():
    """Row 30: a tensor of stride 0 counts more elements than an int32 holds."""
    row = draw((1, 1, 1, 16))[0]
    k = row.expand(1, 9, 2**24, 16)
    assert k.numel() > 2**31
    choice = strobe.explain(k[:, :1], k, k)
    assert choice.problem.layout.tokens == (1, 9) and choice.problem.heads_kv == 2**24


@pytest.mark.parametrize("rows, keys", [(1, 32_769), (1, 65_537), (65_537, 2), (32_769, 1)])
def test_lengths_beyond_16_bits(rows, keys, device, kernel, judge):
    """Row 31."""
    judge(
        Case("long", rows, keys, batch=1, heads=(1, 1), head_dim=8).build(
            device, torch.float32, requires_grad=True, kernel=kernel
        )
    )


def test_four_million_keys(device, kernel):
    """Row 26: out is the mean of V, lse the logarithm of 2^22."""
    keys = 2**22
    q, k = torch.zeros(1, 2, 1, 1, device=device), torch.ones(1, 1, 1, 1, device=device).expand(1, keys, 1, 1)
    v = (torch.arange(keys, device=device) % 2).float()[None, :, None, None]
    part = strobe.partial_attention(q, k, v, kernel=kernel)
    assert (part.out - 0.5).abs().max() <= 3 * 2.0**-25 * keys**0.5  # a chain of 2^22 additions: compare.py's c_n
    assert (part.lse - 22 * math.log(2)).abs().max() <= 2e-6 + 4 * 2.0**-19 + 3 * 2.0**-25 * keys**0.5


@pytest.mark.parametrize("batch, heads", [(65_535, 1), (65_536, 1), (80_000, 1), (1, 65_536)])
def test_more_entries_than_a_grid_dimension_holds(batch, heads, device, kernel):
    """Rows 35, 36, 37: written over NaN, forward and backward; each entry has its own V."""
    q, k, v = (
        t.requires_grad_()
        for t in draw((batch, 2, heads, 4), (batch, 2, heads, 4), (batch, 2, heads, 4), device=device)
    )
    out = strobe.attention(q, k, v, causal=True, kernel=kernel)
    torch.testing.assert_close(
        out[:, 0], v[:, 0], rtol=0 if device == "cpu" else 2.0**-22, atol=0
    )  # the first row sees one key
    p = torch.softmax(torch.stack([(q[:, 1] * k[:, n]).sum(-1) * 0.5 for n in (0, 1)]), 0)[..., None]
    torch.testing.assert_close(out[:, 1], p[0] * v[:, 0] + p[1] * v[:, 1], rtol=0, atol=1e-5)
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert not any(grad.isnan().any() for grad in (dq, dk, dv))
    torch.testing.assert_close(
        dv, torch.stack([1 + p[0].expand_as(v[:, 0]), p[1].expand_as(v[:, 0])], 1), rtol=0, atol=1e-5
    )


def plans(call: Call, target: str = "H200"):
    return select(strobe.Problem.from_call(call), FAKES[target])


@pytest.mark.parametrize("batch, heads", [(80_000, 1), (1, 65_536), (65_536, 8)])
def test_grids_have_one_dimension(batch, heads):
    """Row 35: only a grid's first dimension may pass 65,535."""
    pytest.importorskip("triton")
    from strobe.kernels.portable.launch import backward_launches, forward_launches
    from strobe.kernels.protocol import Backward, Forward

    q = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16).expand(batch, 16, heads, 64)
    lse = torch.empty(1).expand(batch, heads, 16)
    call = Call(q, q, q, needs_grad=True, kernel="portable")
    choice = plans(call)
    launches = forward_launches(choice.forward, call, Forward(q, lse))
    launches += (
        backward_launches(choice.backward, call, Backward(q[:1, :1, :1].expand(q.shape), q, lse, None, q, q, q, lse))
        if heads == 1
        else []
    )
    assert all(type(launch.programs) is int and launch.programs >= batch * heads for launch in launches)


def test_a_launch_that_fails_raises_in_the_call_that_failed():
    """Rows 36, 38: an error is neither printed nor left for somebody else's call."""
    pytest.importorskip("triton")
    from strobe.kernels.portable.launch import MOST_PROGRAMS, Launch, start

    class Refused:
        fn = staticmethod(lambda: None)

        def __getitem__(self, grid):
            def launch(*arguments, **options):
                raise RuntimeError(f"invalid configuration {grid}")

            return launch

    with pytest.raises(RuntimeError, match=r"invalid configuration \(7,\)"):
        start([Launch(Refused(), 7, (), {})])
    with pytest.raises(KernelFault, match="more than a launch can hold"):
        start([Launch(Refused(), MOST_PROGRAMS, (), {})])


# ---------------------------------------------------------------- strides, alignment


@HALF_AND_FLOAT
@pytest.mark.parametrize("order", list(permutations((0, 1, 2))), ids=str)
def test_any_order_of_dimensions_in_memory(order, dtype, device, kernel, judge):
    """Rows 39, 41, 45, 46: q, k and v each in another permutation of (batch, row, head)."""
    q, k, v = draw((2, 9, 4, 24), (2, 33, 2, 24), (2, 33, 2, 24), dtype=dtype, device=device)
    stored = []
    for n, tensor in enumerate((q, k, v)):
        own = order[n:] + order[:n]
        stored.append(
            tensor.permute(*own, 3).contiguous().permute(*(own.index(i) for i in range(3)), 3).requires_grad_()
        )
    judge(Call(*stored, right=0, needs_grad=True, kernel=kernel))


@pytest.mark.parametrize("offset", range(1, 8))
def test_storage_offsets(offset, device, kernel, judge):
    """Rows 43, 47, 48: q, k and v begin 1 to 7 elements past an aligned address, with odd strides between rows."""
    stored = []
    for n, tensor in enumerate(
        draw((2, 9, 4, 24), (2, 33, 2, 24), (2, 33, 2, 24), dtype=torch.bfloat16, device=device)
    ):
        room = tensor.new_zeros(*tensor.shape[:-1], 24 + offset + n)
        stored.append(room[..., offset:][..., :24].copy_(tensor).requires_grad_())
    judge(Call(*stored, right=0, needs_grad=True, kernel=kernel))


@HALF_AND_FLOAT
@pytest.mark.parametrize("keys", [1, 31, 32, 33, 65, 97, 129])
def test_expanded_keys_of_any_length(keys, dtype, device, kernel, judge):
    """Rows 40, 42, 43: stride 0 over heads and over the batch, at lengths around a tile, then the same values dense."""
    for storage in ("expanded_heads", "expanded_batch", "contiguous"):
        judge(
            Case("expanded", 5, keys, heads=(2, 2), head_dim=32, storage=storage).build(
                device, dtype, requires_grad=True, kernel=kernel
            )
        )


UPSTREAMS = {
    "heads first": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "slice of a wide tensor": lambda t: torch.cat([t, t + 1], -1)[..., : t.shape[-1]],
    "odd offset": lambda t: torch.cat([t[..., :1], t], -1)[..., 1:],
    "every other row": lambda t: torch.stack([t, t + 1], 2).flatten(1, 2)[:, ::2],
    "batch last": lambda t: t.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3),
    "one row for all": lambda t: t[:1, :1].expand(t.shape),
}


@pytest.mark.parametrize("name", UPSTREAMS)
def test_gradient_of_out_in_any_layout(name, device, kernel):
    """Rows 25, 44: dO has strides of its own, which are not O's."""
    call = Case("upstream", 40, 70, heads=(4, 2), head_dim=32, mask=_causal).build(
        device, requires_grad=True, kernel=kernel
    )
    out, _ = ops.run(call)
    dout = UPSTREAMS[name](inputs.upstream("normal", out, 0))
    assert_gradients_as_good_as((*torch.autograd.grad(out, call[:3], dout), None), call, dout)


# ---------------------------------------------------------------- features together, determinism

FEATURES = {
    "causal": {"mask": _causal},
    "window": {"mask": _window(9, 3)},
    "prefix": {"mask": _prefixes(5, 30)},
    "lengths": {"mask": _lengths(33, 7)},
    "documents": {"mask": _documents("contiguous")},
    "shuffled": {"mask": _documents("shuffled")},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 4.0},
    "scale": {"scale": -0.3},
    "grouped": {"heads": (4, 2)},
    "widths": {"head_dim": 24, "head_dim_v": 40},
    "strides": {"storage": "gaps"},
    "partial": {"partial": True},
}
PAIRS = [pair for pair in combinations(FEATURES, 2) if set(pair) != {"documents", "shuffled"}]


def together(names: tuple[str, ...]) -> Case:
    masks = [FEATURES[name]["mask"] for name in names if "mask" in FEATURES[name]]
    options = {"head_dim": 16}
    for name in names:
        options |= FEATURES[name]
    return Case("+".join(names), 41, 33, **(options | ({"mask": _both(*masks)} if masks else {})))


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_every_pair_of_features(pair, device, kernel, judge):
    """Rows 54, 57, 67: what works alone may hang or err together."""
    judge(together(pair).build(device, torch.float32, requires_grad=True, kernel=kernel))


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("first", FEATURES)
def test_every_three_features(first, dtype, device, kernel, judge):
    """And with each family of inputs in turn."""
    for n, (second, third) in enumerate(pair for pair in PAIRS if first not in pair):
        if {first, second, third} >= {"documents", "shuffled"}:
            continue
        family = FAMILIES[n % len(FAMILIES)]
        judge(
            together((first, second, third)).build(device, dtype, family, n, requires_grad=True, kernel=kernel),
            family,
            n,
        )


def repeated(name: str, runs: int, device: str, kernel: str) -> None:
    call = CASES[name].build(device, torch.bfloat16, requires_grad=True, kernel=kernel)._replace(deterministic=True)
    first = None
    for _ in range(runs):
        out, lse = ops.run(call)
        leaves = [t for t in (*call[:3], call.sinks) if t is not None]
        result = (out, lse, *torch.autograd.grad(out, leaves, torch.ones_like(out)))
        first = first or result
        assert all(torch.equal(a, b) for a, b in zip(result, first))


REPEATED = [
    "length_129",
    "causal",
    "grouped",
    "one_kv_head",
    "packed_causal",
    "causal_more_rows_sinks",
    "documents_causal",
    "key_lengths",
]


@pytest.mark.parametrize("name", REPEATED)
def test_the_same_bits_each_time(name, device, kernel):
    """Rows 72, 73, 78: own heads, grouped and single key heads, causal, packed."""
    repeated(name, 5 if device == "cpu" else 50, device, kernel)


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_50_times(name, device, kernel):
    if CASES[name].seqlen_q or CASES[name].packed:
        repeated(name, 50, device, kernel)


def test_deterministic_reaches_the_plan():
    """Row 72: the flag, and torch's own, are in the Problem that the kernel is chosen for."""
    q = torch.randn(1, 4, 2, 8, requires_grad=True)
    assert [strobe.explain(q, q, q, deterministic=flag).problem.deterministic for flag in (True, False, None)] == [
        True,
        False,
        False,
    ]
    torch.use_deterministic_algorithms(True)
    try:
        assert (
            strobe.explain(q, q, q).problem.deterministic
            and not strobe.explain(q, q, q, deterministic=False).problem.deterministic
        )
        offsets = int32([0, 1])
        assert strobe.explain_varlen(q[0], q[0], q[0], cu_seqlens_q=offsets).problem.deterministic
    finally:
        torch.use_deterministic_algorithms(False)


def test_results_do_not_depend_on_what_ran_before(device, kernel):
    """Row 52: two kernels that disagree on padding show it only in sequence, in memory that another call has used."""
    names = ["length_129", "causal", "packed_two_sides", "length_3", "key_lengths_window", "packed_outside_sinks"]
    calls = [CASES[name].build(device, torch.bfloat16, requires_grad=True, kernel=kernel) for name in names]

    def results(call):
        out, lse = ops.run(call)
        return (out, lse, *torch.autograd.grad(out, call[:3], torch.ones_like(out)))

    alone = [results(call) for call in calls]
    for order in (range(6), reversed(range(6)), (3, 0, 5, 1, 4, 2)):
        for n in order:
            assert all(torch.equal(a, b) for a, b in zip(results(calls[n]), alone[n]))


# ---------------------------------------------------------------- devices, keys


@pytest.mark.parametrize("current, guarded", [(0, [1]), (1, [])])
def test_a_launch_is_guarded_by_its_tensors_device(current, guarded, monkeypatch):
    """Row 80: tensors on cuda:1 while cuda:0 is current."""
    entered: list[int] = []

    class Guard:
        def __init__(self, device):
            self.index = device.index

        def __enter__(self):
            entered.append(self.index)

        def __exit__(self, *_):
            entered.append(-1)

    def run(plan, call, tensors, workspace):
        ran.append(list(entered))

    ran: list[list[int]] = []
    monkeypatch.setattr(torch_private, "cuda_current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    q = SimpleNamespace(is_cuda=True, get_device=lambda: 1, device=torch.device("cuda", 1))
    ops._launch(SimpleNamespace(buffers=(), kernel=SimpleNamespace(run=run)), (q,), None)  # type: ignore[arg-type]
    assert ran == [guarded] and entered == guarded + [-1] * len(guarded)


def test_every_constant_of_a_compiled_kernel_is_in_its_key():
    """Rows 43, 87, 88: Triton tells compiled kernels apart by the text of their constants, and so must every field of
    the traits show.
    """
    q = torch.empty(1, 16, 2, 64, dtype=torch.bfloat16)
    traits = plans(Call(q, q, q, kernel="portable")).forward.config.traits
    changed = {
        "tile": replace(traits.tile, block_m=traits.tile.block_m // 2), "dtype": "float16", "head_dim": 63,
        "head_dim_v": 63, "group": 2,
        "mask": traits.mask._replace(left=True), "softcap": True, "sinks": True, "packed": True, "sign": -1,
        "host": "of another version", "score_mod": "one", "mask_mod": "one", "score_mod_bwd": "one",
        "dropout": True, "max_scores": True, "block_lists": ListedBlocks(64, 64, has_full=False), "runs": True,
    }  # fmt: skip
    assert set(changed) == {field.name for field in fields(traits) if field.init}  # the others follow from these
    texts = {str(replace(traits, **{name: value})) for name, value in changed.items()} | {str(traits)}
    assert len(texts) == len(changed) + 1
    assert all(
        str(replace(traits, tile=replace(traits.tile, **{name: 0}))) != str(traits)
        for name in traits.tile.__dataclass_fields__
    )


# ---------------------------------------------------------------- the page

ROW = re.compile(r"^\| (\d+) \|", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
NOT_YET = re.compile(r"not applicable(?: yet)?: \w")


def rows() -> dict[int, str]:
    return {int(line.split("|")[1]): line for line in TEXT.splitlines() if ROW.match(line)}


def test_catalogue_is_complete():
    """96 rows in the pages on reliability, each with a test that exists or with what it still needs."""
    assert list(rows()) == list(range(1, 97))
    for number, line in rows().items():
        assert TEST.search(line) or NOT_YET.search(line), f"row {number} has neither a test nor a reason"
    tested = [TEST.findall(line) for line in rows().values() if not NOT_YET.search(line)]
    on_gpus = sum(all(path.endswith("_gpu.py") for path, _ in tests) for tests in tested)
    assert (
        f"{len(tested)} rows have a test, {on_gpus} of them on a GPU alone; {96 - len(tested)} are not applicable"
        in TEXT
    )
    named = TEST.findall(TEXT)
    for path in {path for path, _ in named}:
        there = {
            node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.FunctionDef)
        }
        assert {name for other, name in named if other == path} <= there, path


def test_mutants_and_catalogue_name_each_other():
    """A mutant that re-creates a row is named in that row, and nothing else is."""
    from tests.reliability.test_mutants import CPU, PORTABLE

    named = {number: set(re.findall(r"\*([^*|]+)\*", line)) for number, line in rows().items()}
    wanted = {number: {mutant.name for mutant in (*CPU, *PORTABLE) if number in mutant.rows} for number in rows()}
    assert named == wanted
    assert f"puts {len(CPU) + len(PORTABLE)} faults" in TEXT
