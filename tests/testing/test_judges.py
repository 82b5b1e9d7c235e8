"""The judges judged: a correct kernel of every dtype passes on every input, and each seeded bug is caught.

The kernel is FlashAttention-2 as a GPU would run it (arXiv 2307.08691, algorithms 1 and 2): tiles of keys, float32
scores and accumulators, weights and dS rounded to the inputs' dtype for the products, delta from the rounded out.
"""

from __future__ import annotations

import math

import pytest
import torch

from strobe.ops import attention as ops
from strobe.problem.call import Call
from strobe.reference import Gradients, _sequences
from strobe.testing import FAMILIES, Case, Poison, assert_as_good_as, assert_gradients_as_good_as, inputs
from strobe.testing.cases import CASES
from strobe.testing.compare import _eager_gradients
from strobe.testing.poison import fill_with_poison, patched_empty

BLOCK = 64
HALF = [torch.bfloat16, torch.float16]
SHAPES = {
    "square": Case("square", 256, head_dim=64, heads=(2, 2)),
    "causal": Case("causal", 200, heads=(4, 2), mask=CASES["causal"].mask),
    "many_keys": Case("many_keys", 32, 1024, batch=1, head_dim=128),
    "few_rows": Case("few_rows", 9, 130, head_dim=32, mask=CASES["causal"].mask),
    "window": Case("window", 150, head_dim=40, mask=CASES["window_both"].mask),
}


class Flash:
    """Forward and backward of a dense call; `bug` names what is done wrong."""

    def __init__(self, call: Call, bug: str = ""):
        self.call, self.bug = call, bug
        self.dtype = call.q.dtype
        group = call.q.shape[2] // call.k.shape[2]
        q, k, v = (t.detach().float().transpose(1, 2) for t in call[:3])
        self.q, self.k, self.v = q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        self.scale = call.q.shape[-1] ** -0.5 * (1.01 if bug == "scale" else 1)
        self.seen = self._mask().expand(q.shape[0], -1, -1)[:, None]

    def _mask(self):
        rows, keys = self.q.shape[2], self.k.shape[2]
        seen = self.call.mask.dense(rows, keys).clone()
        if self.bug == "last key":
            seen[:, :, -1] = False
        if self.bug == "causal early":
            seen &= torch.arange(keys) < torch.arange(rows)[:, None] + keys - rows
        if self.bug == "causal late":
            seen |= torch.arange(keys) == torch.arange(rows)[:, None] + keys - rows + 1
        return seen

    def _rounded(self, t):
        return t.to(self.dtype).float()

    def forward(self):
        row_max = torch.full((*self.q.shape[:3], 1), -torch.inf)
        row_sum, o = torch.zeros_like(row_max), torch.zeros(*self.q.shape[:3], self.v.shape[-1])
        for start in range(0, self.k.shape[2], BLOCK):
            tile = slice(start, start + BLOCK)
            s = torch.where(self.seen[..., tile], self.scale * self.q @ self.k[:, :, tile].mT, -torch.inf)
            new_max = torch.maximum(row_max, s.amax(-1, keepdim=True))
            shift = torch.where(new_max == -torch.inf, 0.0, new_max)
            p, rescale = torch.exp(s - shift), torch.exp(row_max - shift)
            row_sum = row_sum * (1 if self.bug == "rescale" else rescale) + p.sum(-1, keepdim=True)
            o = o * rescale + self._rounded(p) @ self._values(tile)
            row_max = new_max
        if self.bug == "zero score":  # a column beyond the end, not masked
            row_sum = row_sum + torch.exp(-torch.where(row_max == -torch.inf, 0.0, row_max))
        alive = row_sum > 0
        out = torch.where(alive, o / torch.where(alive, row_sum, 1.0), 0.0).transpose(1, 2).to(self.dtype)
        self.lse = torch.where(alive, row_max + torch.log(row_sum), -torch.inf)
        return out, self.lse[..., 0]

    def _values(self, tile):
        v = self.v[:, :, tile].clone()
        if self.bug == "v row" and tile.start == 0:
            v[:, :, 1] = v[:, :, 2]
        if self.bug == "v page" and tile.start == 0:
            v[:, :, :16] = v[:, :, :16].flip(2)
        return v

    def backward(self, out, dout):
        do = dout.float().transpose(1, 2)
        delta = (do * out.float().transpose(1, 2)).sum(-1, keepdim=True) * (0.9 if self.bug == "delta" else 1)
        dq, dk, dv = (torch.zeros_like(t) for t in (self.q, self.k, self.v))
        lse = torch.where(self.lse == -torch.inf, 0.0, self.lse)
        for start in range(0, self.k.shape[2], BLOCK):
            tile = slice(start, start + BLOCK)
            p = torch.where(self.seen[..., tile], torch.exp(self.scale * self.q @ self.k[:, :, tile].mT - lse), 0.0)
            ds = self._rounded(p * (do @ self.v[:, :, tile].mT - delta))
            dv[:, :, tile] = self._rounded(p).mT @ do
            dk[:, :, tile] = self.scale * ds.mT @ self.q
            dq += self.scale * ds @ (self.k[:, :, tile] if self.bug != "dq tile" or start else 0 * self.k[:, :, tile])
        group = self.call.q.shape[2] // self.call.k.shape[2]
        total = lambda t: t.unflatten(1, (-1, group))[:, :, : 1 if self.bug == "group" else None].sum(2)
        return Gradients(*(t.transpose(1, 2).to(self.dtype) for t in (dq, total(dk), total(dv))), None)


def judged(shape: str, dtype, family: str, seed: int, bug: str = "", backward: bool = True) -> dict[str, float]:
    call = SHAPES[shape].build(dtype=dtype, family=family, seed=seed)
    kernel = Flash(call, bug)
    result = kernel.forward()
    ratios = assert_as_good_as(result, call)
    if backward:
        dout = inputs.upstream(family, result[0], seed)
        ratios |= assert_gradients_as_good_as(kernel.backward(result[0], dout), call, dout)
    return ratios


def caught(bug: str, families=FAMILIES, shapes=("causal", "few_rows")) -> bool:
    for shape in shapes:
        for family in families:
            try:
                judged(shape, torch.bfloat16, family, 3, bug)
            except AssertionError:
                return True
    return False


@pytest.mark.parts(3, seed=2469201191)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_correct_kernel_passes(shape, dtype, family, record_property):
    record_property(
        "ratios",
        {"dtype": f"{str(dtype).removeprefix('torch.')}, FlashAttention-2 emulated", **judged(shape, dtype, family, 3)},
    )


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 120))
@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=["bfloat16", "float16", "float32"])
def test_a_correct_kernel_passes_on_any_numbers(dtype, seed):
    for shape in SHAPES:
        for family in FAMILIES:
            judged(shape, dtype, family, seed)


@pytest.mark.parametrize("dtype", HALF, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("seed", range(5))
def test_eager_is_as_good_as_itself_on_short_sequences(seed, dtype):
    """Rule 1 of eager's own gradients is e / (2e + slack), so under a half, also where no sequence alone has elements
    enough for the rule (these have 192 each) and only all of them together do. The small scale keeps eager's scores,
    rounded too, within rule 2.
    """
    call = Case("short", lengths_q=(3, 3, 3), head_dim=32, scale=0.02).build(dtype=dtype, seed=seed)
    dout = inputs.upstream("normal", call.v, seed)
    parts = [_eager_gradients(one, dout[None, rows], None) for one, rows, _ in _sequences(call)]
    eager = Gradients(*(torch.cat(tensors, 1)[0] for tensors in zip(*(part[:3] for part in parts))), None)
    ratios = assert_gradients_as_good_as(eager, call, dout)
    assert all(0 < ratios[f"{name} to eager"] < 0.5 for name in ("dq", "dk", "dv")), ratios


BUGS = (
    "last key",
    "causal early",
    "causal late",
    "scale",
    "rescale",
    "zero score",
    "v row",
    "v page",
    "delta",
    "dq tile",
    "group",
)


@pytest.mark.parametrize("bug", BUGS)
def test_a_seeded_bug_is_caught(bug):
    assert caught(bug), f"nobody noticed: {bug}"


@pytest.mark.parametrize("bug", ["last key", "v row", "zero score", "scale"])
def test_a_seeded_bug_is_caught_among_many_keys(bug):
    """1,024 keys: what random inputs and a maximum over the tensor forgive (one wrong key of a thousand) the other
    families show.
    """
    assert caught(bug, shapes=("many_keys",)), f"nobody noticed: {bug}"


# ---------------------------------------------------------------- poison


def test_a_result_below_the_smallest_normal_number_rounds_delta_by_as_much():
    """A sink takes all but 2^-20 of the row: O is 1.6 of float16's smallest steps, and delta = sum dO O errs by 0.4 of
    one.
    """
    q, k, v = torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 8), torch.full((1, 1, 1, 8), 0.1)
    q, k, v = (t.half().requires_grad_() for t in (q, k, v))
    sinks = torch.tensor([20 * math.log(2.0)], requires_grad=True)
    call = Call(q, k, v, sinks=sinks, needs_grad=True)
    out, _ = ops.run(call)
    assert 0 < out.max() < torch.finfo(torch.float16).smallest_normal
    dout = torch.ones_like(out)
    gradients = Gradients(*torch.autograd.grad(out, (q, k, v, sinks), dout))
    assert assert_gradients_as_good_as(gradients, call, dout, None)["dsinks"] > 0
    wrong = gradients._replace(dsinks=gradients.dsinks + 8 * 2.0**-24)
    with pytest.raises(AssertionError, match="dsinks"):
        assert_gradients_as_good_as(wrong, call, dout, None)


def test_a_weight_far_below_the_sink_may_err_by_the_roundings_of_its_score():
    case = Case("one_key", 17, 1, batch=3, head_dim=1, scale=0.5, sinks=True)
    call = case.build("cpu", torch.float32, "negative", 1)  # a score of -63, where one rounding is 4e-6
    assert_as_good_as(ops.run(call), call)


def test_poison_sees_a_write_into_a_band_a_gap_and_an_input():
    def refuses(write) -> bool:
        try:
            with Poison() as poison:
                write(poison)
        except AssertionError:
            return True
        return False

    spaced = torch.zeros(4, 8)[:, :5]
    assert not refuses(lambda poison: poison.empty(spaced).zero_())
    assert not refuses(lambda poison: torch.empty(3, 4).fill_(1.0))
    assert refuses(lambda poison: poison.enclose("x", spaced).add_(1.0))
    assert refuses(lambda poison: poison.empty(spaced).as_strided((1,), (1,), 512 + 6).zero_())  # a stride gap
    assert refuses(lambda poison: poison.empty(spaced).as_strided((1,), (1,), 511).zero_())
    assert refuses(lambda poison: (empty := torch.empty(3)).as_strided((1,), (1,), empty.storage_offset() + 3).zero_())


@pytest.mark.parametrize(
    "storage", ["contiguous", "heads_first", "odd_offset", "gaps", "expanded_heads", "expanded_batch"]
)
def test_poison_keeps_values_strides_and_alignment(storage):
    call = Case("case", 5, 7, heads=(4, 2), head_dim=6, storage=storage).build()
    with Poison() as poison:
        for before, after in zip(call[:3], poison.enclose_call(call)[:3]):
            assert torch.equal(before, after) and before.stride() == after.stride()
            assert before.storage_offset() % 4 == after.storage_offset() % 4


def test_unwritten_memory_is_nan():
    for make in (lambda: torch.empty(5), lambda: torch.empty_like(torch.ones(5)), lambda: torch.ones(1).new_empty(5)):
        with patched_empty(fill_with_poison):
            assert make().isnan().all()
    with Poison():
        assert (
            torch.empty_strided((2, 2), (2, 1)).isnan().all() and torch.empty(3, dtype=torch.int32).eq(2**31 - 1).all()
        )
