"""The CPU kernels: how a call is cut into pieces and tiles, which path runs, and what must hold to the bit.

test_cases, test_contract and test_properties hold them against the oracle like every family; here is what is theirs
alone.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import strobe
from strobe.errors import InvalidProblem
from strobe.kernels.cpu.pieces import cut
from strobe.kernels.cpu.tiles import Config, blocks, tiles
from strobe.kernels.protocol import Backward, Forward
from strobe.ops import attention as ops
from strobe.problem.call import Call
from strobe.problem.mask import Mask, Tile, TileKind
from strobe.testing import CASES, assert_as_good_as, assert_gradients_as_good_as
from tests.kernels.empty_rows import UPSTREAM, assert_no_gradients_of_empty_rows
from tests.kernels.small_scales import OPTIONS, assert_means_of_values

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (1, 2, 15, 63, 64, 127, 128, 129, 130, 300)


def int32(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def qkv(batch=1, seqlen_q=130, seqlen_k=None, heads=(2, 2), width=16, dtype=torch.float32, seed=0, grad=False):
    generator = torch.Generator().manual_seed(seed)
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    shapes = (
        (batch, seqlen_q, heads[0], width),
        (batch, seqlen_k, heads[1], width),
        (batch, seqlen_k, heads[1], width),
    )
    return tuple(torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad) for shape in shapes)


class Draw:
    """Choices from a seed: all randomness of a test in one generator."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def one_of(self, options):
        return options[int(torch.randint(len(options), (), generator=self.generator))]

    def ids(self, batch: int, length: int, sort: bool) -> torch.Tensor:
        ids = torch.randint(-1, 4, (batch, length), generator=self.generator, dtype=torch.int32)
        return ids.sort(1).values if sort else ids

    def mask(self, batch: int, seqlen_q: int, seqlen_k: int) -> Mask:
        mask, sometimes = strobe.full(), lambda: self.one_of((True, False, False))
        if sometimes():
            mask &= strobe.causal()
        if sometimes():
            mask &= strobe.window(self.one_of((None, 0, 1, 5, 40, 200)), self.one_of((None, 0, 1, 7, 60)))
        if sometimes():
            lengths = torch.randint(0, seqlen_k + 1, (batch,), generator=self.generator, dtype=torch.int32)
            mask &= strobe.prefix_causal(self.one_of((0, 3, 50, lengths)))
        if sometimes():
            mask &= strobe.key_lengths(
                torch.randint(0, seqlen_k + 1, (batch,), generator=self.generator, dtype=torch.int32)
            )
        if sometimes():
            sort = self.one_of((True, False))
            mask &= strobe.documents(self.ids(batch, seqlen_q, sort), self.ids(batch, seqlen_k, sort))
        return mask

    def call(self, dtype: torch.dtype) -> Call:
        batch, seqlen_q = self.one_of((1, 2, 3)), self.one_of(LENGTHS)
        seqlen_k, heads_kv = self.one_of((seqlen_q, *LENGTHS)), self.one_of((1, 2))
        heads_q, width = heads_kv * self.one_of((1, 1, 3)), self.one_of((8, 33))
        q, k, _ = qkv(batch, seqlen_q, seqlen_k, (heads_q, heads_kv), width, dtype, self.one_of(range(100)), grad=True)
        v = qkv(
            batch, seqlen_k, heads=(heads_kv, 1), width=self.one_of((width, width, 5)), dtype=dtype, seed=1, grad=True
        )[0]
        sinks = self.one_of((None, None, torch.randn(heads_q, generator=self.generator).requires_grad_()))
        options = dict(
            softcap=self.one_of((0.0, 0.0, 3.0)), scale=self.one_of((None, None, -0.4, 0.0)),
            partial=self.one_of((True, False)),
            batch_invariant=self.one_of((True, False, False)), needs_grad=True, kernel="cpu",
        )  # fmt: skip
        return Call(q, k, v, sinks=sinks, **options).with_mask(self.mask(batch, seqlen_q, seqlen_k))


# ---------------------------------------------------------------- against the oracle


@pytest.mark.parts(3, seed=1135265487)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_any_features_together(seed, dtype, judge):
    draw = Draw(seed)
    for n in range(3):
        judge(draw.call(dtype), seed=n)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("mask", (strobe.causal(), strobe.window(90, 20)), ids=("causal", "window"))
def test_lengths_of_many_tiles(mask, dtype, judge):
    q, k, v = qkv(1, 700, 700, (2, 1), 32, dtype, grad=True)
    judge(Call(q, k, v, needs_grad=True, kernel="cpu").with_mask(mask))


@pytest.mark.parametrize("fixed", (False, True), ids=("tight", "fixed"))
@pytest.mark.parametrize(
    "name", ("causal", "window", "prefix", "sinks", "one_kv_head", "packed_causal", "documents", "softcap")
)
def test_tiles_of_any_size_give_the_same(name, fixed):
    """Tiles of 16 x 32 and chunks of one head: every loop goes round more than once."""
    name = next(case for case in CASES if name in case)
    call = CASES[name].build(requires_grad=True)
    choice = ops.decide(call)
    config = Config("tiled", 16, 32, 1, fixed)
    forward, backward = (
        plan._replace(config=config, buffers=plan.kernel.workspace(plan.problem, config))
        for plan in (choice.forward, choice.backward)
    )
    bare = call._replace(
        q=call.q.detach(),
        k=call.k.detach(),
        v=call.v.detach(),
        sinks=None if call.sinks is None else call.sinks.detach(),
    )
    out, lse = (torch.empty(shape) for shape in choice.problem.out_shapes)
    forward.kernel.run(forward, bare, Forward(out, lse), {b.name: torch.empty(b.shape) for b in forward.buffers})
    assert_as_good_as((out, lse), call)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse).masked_fill_(lse == -torch.inf, 0.0)
    grads = [torch.empty_like(t) for t in (*bare[:3], lse)]
    backward.kernel.run(
        backward, bare, Backward(dout, out, lse, dlse, *grads), {b.name: torch.empty(b.shape) for b in backward.buffers}
    )
    dsinks = ops.sinks_gradient(bare, lse, grads[3]) if call.sinks is not None else None
    assert_gradients_as_good_as((*grads[:3], dsinks), call, dout, dlse)
    delta = (dout.double() * out.double()).sum(-1).transpose(-1, -2) - dlse
    torch.testing.assert_close(
        grads[3].double(), delta, rtol=0, atol=2**-22 * float((dout * out).abs().sum(-1).max() + dlse.abs().max())
    )


# ---------------------------------------------------------------- pieces and tiles


def seen_by_pieces(call: Call) -> torch.Tensor:
    """The mask written out again from a call's pieces, [B, S_q, S_k]; every pair at most once."""
    batch, seqlen_q, seqlen_k = (
        (1, call.q.shape[0], call.k.shape[0]) if call.packed else (*call.q.shape[:2], call.k.shape[1])
    )
    count = torch.zeros(batch, seqlen_q, seqlen_k, dtype=torch.int32)
    for piece in cut(call).pieces:
        rows, keys = (torch.arange(n)[index] for n, index in ((seqlen_q, piece.rows), (seqlen_k, piece.keys)))
        key = torch.arange(piece.n_keys)
        seen = (key >= piece.first[:, None]) & (key < piece.stop[:, None])
        assert seen.any(1).all(), "a piece has a row that sees nothing"
        assert (piece.first.diff() >= 0).all() and (piece.stop.diff() >= 0).all()
        count[piece.entries, rows[:, None], keys[None]] += seen.int()
    assert count.max() <= 1
    return count.bool()


@pytest.mark.parametrize("seed", range(60))
def test_pieces_are_the_mask(seed):
    draw = Draw(seed)
    batch, seqlen_q, seqlen_k = draw.one_of((1, 2)), draw.one_of((1, 5, 40)), draw.one_of((1, 7, 40))
    q, k, v = qkv(batch, seqlen_q, seqlen_k)
    mask = draw.mask(batch, seqlen_q, seqlen_k)
    assert torch.equal(
        seen_by_pieces(Call(q, k, v).with_mask(mask)), mask.dense(seqlen_q, seqlen_k).expand(batch, -1, -1)
    )


def test_pieces_of_a_pack():
    q, k, v = (t[0] for t in qkv(1, 12, 15))
    call = Call(q, k, v, cu_seqlens_q=int32(1, 4, 4, 11), cu_seqlens_k=int32(0, 5, 9, 12), right=0)
    wanted = torch.zeros(1, 12, 15, dtype=torch.bool)
    wanted[0, 1:4, 0:5] = strobe.causal().dense(3, 5)[0]
    wanted[0, 4:11, 9:12] = strobe.causal().dense(7, 3)[0]
    assert torch.equal(seen_by_pieces(call), wanted)


@pytest.mark.parametrize(
    "mask",
    (strobe.full(), strobe.causal(), strobe.window(9, 3), strobe.window(None, 2), strobe.prefix_causal(20)),
    ids=lambda m: str(m.structure),
)
@pytest.mark.parametrize("lengths", ((50, 50), (33, 70), (70, 33)))
def test_empty_tiles_are_skipped_and_full_ones_unmasked(mask, lengths):
    q, k, v = qkv(1, *lengths)
    seen = torch.zeros(lengths, dtype=torch.bool)
    for piece in cut(Call(q, k, v).with_mask(mask)).pieces:
        for block in blocks(piece, Config("tiled", 8, 16, 1)):
            rows = block.index(piece)
            for tile in tiles(block, Config("tiled", 8, 16, 1)):
                kind = mask.tile_kind(Tile(rows.start, rows.stop, tile.keys.start, tile.keys.stop), *lengths)
                assert kind is not TileKind.EMPTY
                assert (tile.hidden is None) == (kind is TileKind.FULL)
                seen[rows, tile.keys] = True if tile.hidden is None else ~tile.hidden
    assert torch.equal(seen, mask.dense(*lengths)[0])


def work(call: Call) -> float:
    """The share of S_q x S_k that tiles are computed for."""
    config = ops.decide(call).forward.config
    areas = [
        (b.stop - b.start) * (t.keys.stop - t.keys.start)
        for p in cut(call).pieces
        for b in blocks(p, config)
        for t in tiles(b, config)
    ]
    return sum(areas) / call.q.shape[1] / call.k.shape[1]


def test_cost_follows_what_is_seen():
    q, k, v = qkv(1, 4096, width=1, heads=(1, 1))
    assert work(Call(q, k, v, left=256, right=0)) <= (256 + 128) / 4096
    assert work(Call(q, k, v, right=0)) <= 0.5 + 256 / 4096 / 2
    eight = (torch.arange(4096, dtype=torch.int32) // 512)[None]
    assert work(Call(q, k, v).with_mask(strobe.documents(eight))) == 1 / 8
    assert work(Call(q, k, v).with_mask(strobe.documents(eight % 4))) == 1 / 4  # gathered: each id twice


# ---------------------------------------------------------------- paths


@pytest.mark.parametrize(
    "options, dtype, forward, backward",
    [
        ({}, torch.float32, "torch_flash", "torch_flash"),
        ({"right": 0}, torch.bfloat16, "torch_flash", "torch_flash"),
        ({"softcap": 2.0}, torch.float32, "tiled", "tiled"),
        ({"scale": 0.0}, torch.float32, "tiled", "tiled"),
        ({"partial": True}, torch.float32, "torch_flash", "torch_flash"),
        ({"partial": True}, torch.float16, "tiled", "tiled"),
        ({"sinks": torch.zeros(2)}, torch.float32, "tiled", "torch_flash"),
        ({"batch_invariant": True}, torch.float32, "tiled", "tiled"),
    ],
)
def test_the_config_names_the_path(options, dtype, forward, backward):
    choice = ops.decide(Call(*qkv(dtype=dtype), needs_grad=True, **options))
    assert (choice.forward.config.path, choice.backward.config.path) == (forward, backward)
    assert f"path='{forward}'" in str(choice)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_overlapping_windows_of_a_row_have_two_strides_of_1(dtype):
    windows = (
        torch.randn(200, generator=torch.Generator().manual_seed(3)).to(dtype).unfold(0, 64, 1)[:30][None, :, None]
    )
    dense = torch.randn(1, 30, 1, 64, generator=torch.Generator().manual_seed(4)).to(dtype)
    for q, k in ((windows, dense), (dense, windows)):
        tensors, copies = (
            [t.detach().requires_grad_() for t in pair] for pair in ((q, k), (q.contiguous(), k.contiguous()))
        )
        out, expected = (strobe.attention(one, two, two) for one, two in (tensors, copies))
        assert torch.equal(out, expected)
        found, wanted = (
            torch.autograd.grad(y.square().sum(), leaves) for y, leaves in ((out, tensors), (expected, copies))
        )
        assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_default_dtype_changes_nothing(default):
    q = torch.randn(1, 20, 1, 8).half()
    expected = strobe.attention(q, q, q, window=(2, 0))
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        assert torch.equal(strobe.attention(q, q, q, window=(2, 0)), expected)
    finally:
        torch.set_default_dtype(before)


def test_a_config_refuses_what_it_cannot_mean():
    with pytest.raises(ValueError, match="torch_flash or tiled"):
        Config("fast", 16, 16, 1)
    with pytest.raises(ValueError, match="at least 1"):
        Config("tiled", 0, 16, 1)


# ---------------------------------------------------------------- NaN, neighbours, metadata


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize(
    "options",
    ({}, {"right": 0}, {"left": 30, "right": 0}, {"softcap": 2.0}, {"scale": 0.0}, {"batch_invariant": True}),
    ids=str,
)
@pytest.mark.parametrize("length", (3, 15, 16, 17, 31, 64, 130, 600))
def test_a_row_of_nan_is_nan_and_alone(length, options, dtype):
    q, k, v = qkv(1, length, dtype=dtype)
    clean = ops.run(Call(q, k, v, **options))
    q[0, length // 2, 1, 5] = torch.nan
    out, lse = ops.run(Call(q, k, v, **options))
    assert out[0, length // 2, 1].isnan().all() and lse[0, 1, length // 2].isnan()
    out[0, length // 2, 1], lse[0, 1, length // 2] = clean[0][0, length // 2, 1], clean[1][0, 1, length // 2]
    assert torch.equal(out, clean[0]) and torch.equal(lse, clean[1])


def test_a_row_of_nan_gives_nan_to_no_key_it_does_not_see():
    q, k, v = qkv(1, 40, grad=True)
    with torch.no_grad():
        q[0, 17, 1, 5] = torch.nan
    out = strobe.attention(q, k, v, causal=True, softcap=2.0)
    dq, dk, _ = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert dq[0, :, 1].isnan().all(1).tolist() == [i == 17 for i in range(40)] and not dq[0, :, 0].isnan().any()
    assert dk[0, :, 1].isnan().all(1).tolist() == [j <= 17 for j in range(40)] and not dk[0, :, 0].isnan().any()


def outsiders() -> dict[str, tuple]:
    """Calls with (rows, keys) [B, S] that are of no use to anything else."""
    q, k, v = qkv(2, 140, 140, (4, 2), 16)
    ids = int32([0] * 70 + [-1] * 10 + [1] * 60, [2] * 64 + [3] * 76)
    scattered = ids.clone()
    scattered[:, ::3] = -1
    offsets = int32(3, 70, 70, 135)
    inside = (torch.arange(140) >= 3) & (torch.arange(140) < 135)
    return {
        "key_lengths": (
            Call(q, k, v).with_mask(strobe.key_lengths(int32(70, 101))),
            None,
            torch.arange(140) >= int32(70, 101)[:, None],
        ),
        "documents": (Call(q, k, v, right=0).with_mask(strobe.documents(ids) & strobe.causal()), ids < 0, ids < 0),
        "scattered documents": (Call(q, k, v).with_mask(strobe.documents(scattered)), scattered < 0, scattered < 0),
        "other document": (Call(q, k, v).with_mask(strobe.documents(ids)), ids == 1, ids == 1),
        "packed": (
            Call(q[0], k[0], v[0], cu_seqlens_q=offsets, cu_seqlens_k=offsets, left=80, right=0),
            ~inside,
            ~inside,
        ),
    }


@pytest.mark.parametrize("invariant", (False, True))
@pytest.mark.parametrize("name", outsiders())
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_what_lies_outside_never_changes_a_bit(name, dtype, invariant):
    call, rows, keys = outsiders()[name]
    call = call._replace(batch_invariant=invariant, **{t: getattr(call, t).to(dtype) for t in "qkv"})
    rows = torch.zeros(call.q.shape[:-2], dtype=torch.bool) if rows is None else rows
    results = []
    for bad in (0.0, torch.nan, torch.inf):
        q, k, v = (
            t.masked_fill(where[..., None, None], bad).requires_grad_()
            for t, where in zip(call[:3], (rows, keys, keys))
        )
        held = call._replace(q=q, k=k, v=v)
        out, lse = ops.run(held)
        dout = (
            torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
            .to(dtype)
            .masked_fill(rows[..., None, None], bad)
        )
        grads = torch.autograd.grad(out, (q, k, v), dout)
        inside = [(~where).nonzero(as_tuple=True) for where in (rows, rows, keys, keys)]
        results.append([t[at] for t, at in zip((out, *grads), inside)] + [lse.movedim(-2, -1)[inside[0]]])
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0]))
    assert all(t.isfinite().all() for t in results[0][:4])  # lse may be -inf


@pytest.mark.parametrize(
    "offsets, words",
    [((0, 5, 3, 9), "offset 1 = 5, the next is 3"), ((-1, 4, 9, 9), "offset 0 = -1"), ((0, 4, 9, 11), "offset 3 = 11")],
)
@pytest.mark.parametrize("side", ("cu_seqlens_q", "cu_seqlens_k"))
def test_wrong_offsets_raise(side, offsets, words):
    q, k, v = (t[0] for t in qkv(1, 10))
    both = {"cu_seqlens_q": int32(0, 4, 9, 10), "cu_seqlens_k": int32(0, 4, 9, 10), side: int32(*offsets)}
    with pytest.raises(InvalidProblem, match=words) as caught:
        strobe.attention_varlen(q, k, v, **both)
    assert caught.value.argument == side


def test_sequences_longer_than_promised():
    """Rows beyond the promise are NaN (for keys: all of the sequence) and so is their dq; they add nothing to dk and
    dv.
    """
    strobe.last_errors()
    q, k, v = (t[0].detach().requires_grad_() for t in qkv(1, 10))
    offsets = int32(0, 3, 10)
    options = dict(cu_seqlens_q=offsets, causal=True)
    whole = strobe.attention_varlen(q, k, v, **options)
    out = strobe.attention_varlen(q, k, v, max_seqlen_q=5, **options)
    assert [row.isnan().all().item() for row in out] == [False] * 8 + [True] * 2
    torch.testing.assert_close(out[:8], whole[:8], rtol=0, atol=1e-6)
    assert "max_seqlen_q" in strobe.last_errors("cpu")[0]
    dq, dk, dv = torch.autograd.grad(out[:8].sum(), (q, k, v))
    assert dq[8:].isnan().all() and all(t.isfinite().all() for t in (dq[:8], dk, dv))
    strobe.last_errors()  # the backward reports as well
    out = strobe.attention_varlen(q, k, v, max_seqlen_k=5, **options)
    assert [row.isnan().all().item() for row in out] == [False] * 3 + [True] * 7
    assert "max_seqlen_k" in strobe.last_errors("cpu")[0]
    assert strobe.last_errors("cpu") == []


def test_lengths_beyond_the_keys_are_clamped_and_reported():
    strobe.last_errors()
    q, k, v = qkv(2, 8)
    out = strobe.attention(q, k, v, mask=strobe.key_lengths(int32(-3, 99)))
    assert out[0].eq(0).all() and torch.equal(out[1:], strobe.attention(q[1:], k[1:], v[1:]))
    assert "key_lengths" in strobe.last_errors("cpu")[0]


# ---------------------------------------------------------------- bits


@pytest.fixture
def two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def invariant(q, k, v, **options):
    return strobe.partial_attention(q, k, v, batch_invariant=True, **options)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize(
    "options", ({}, {"causal": True}, {"causal": True, "window": (100, 0)}, {"softcap": 5.0}), ids=str
)
@pytest.mark.parametrize("heads, width", (((2, 2), 64), ((4, 1), 40)))
def test_batch_invariance(heads, width, options, dtype):
    q, k, v = qkv(3, 150, 300, heads, width, dtype)
    whole = invariant(q, k, v, **options)
    alone = invariant(q[1:2], k[1:2], v[1:2], **options)
    assert torch.equal(alone.out, whole.out[1:2]) and torch.equal(alone.lse, whole.lse[1:2])
    for start in (149, 101):  # decode, and the end of a prefill: bottom-right alignment keeps each row's keys
        tail = invariant(q[:, start:], k, v, **options)
        assert torch.equal(tail.out, whole.out[:, start:]) and torch.equal(tail.lse, whole.lse[:, :, start:])
    rows, keys = int32(0, 150, 300, 450), int32(0, 300, 600, 900)
    flat = (t.flatten(0, 1) for t in (q, k, v))
    packed = strobe.partial_attention_varlen(
        *flat, cu_seqlens_q=rows, cu_seqlens_k=keys, batch_invariant=True, **options
    )
    assert torch.equal(packed.out.view_as(whole.out), whole.out)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("widths", ((64, 5), (64, 10), (64, 7), (33, 3), (127, 127), (5, 33), (1, 1)), ids=str)
def test_batch_invariance_of_odd_head_dimensions(widths, dtype):
    """Products of sizes that are no multiple of a vector add their last columns in an order that depends on the row."""
    (q, k, _), v = qkv(1, 100, 300, (3, 1), widths[0], dtype), qkv(1, 1, 300, (1, 1), widths[1], dtype)[2]
    whole = invariant(q, k, v, causal=True)
    cache = strobe.DenseCache(k, v, int32(300))
    for start in (99, 64, 37):
        tail = strobe.partial_attention_decode(q[:, start:], cache, batch_invariant=True)
        assert torch.equal(tail.out, whole.out[:, start:]) and torch.equal(tail.lse, whole.lse[:, :, start:])
        mixed = strobe.partial_attention_paged(
            q[0, start:], cache, cu_seqlens_q=int32(0, 100 - start), batch_invariant=True
        )
        assert torch.equal(mixed.out, whole.out[0, start:])


@pytest.mark.parametrize("bad", (torch.nan, torch.inf))
def test_odd_head_dimensions_keep_what_is_not_finite_in_its_column(bad):
    q, k, v = qkv(1, 9, 30, (2, 2), 7)
    clean = invariant(q, k, v)
    v[0, 4, 1, 6] = bad
    part = invariant(q, k, v)
    assert not part.out[0, :, 1, 6].isfinite().any()
    part.out[0, :, 1, 6] = clean.out[0, :, 1, 6]
    assert torch.equal(part.out, clean.out) and torch.equal(part.lse, clean.lse)


def test_batch_invariance_under_padding():
    q, k, v = qkv(2, 70, 300)
    padded = invariant(q, k, v, mask=strobe.key_lengths(int32(201, 300)))
    assert torch.equal(padded.out[:1], invariant(q[:1], k[:1, :201], v[:1, :201]).out)


def test_batch_invariant_gradients():
    grads = []
    for batch in (slice(0, 3), slice(1, 2)):
        q, k, v = (t[batch].detach().requires_grad_() for t in qkv(3, 150, 300, (4, 2), 40))
        out = strobe.attention(q, k, v, causal=True, batch_invariant=True)
        grads.append(torch.autograd.grad(out.sum(), (q, k, v)))
    assert all(torch.equal(whole[1:2], alone) for whole, alone in zip(*grads))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_batch_invariance_under_threads(dtype, two_threads):
    q, k, v = qkv(2, 300, 300, (2, 1), 64, dtype)
    two = invariant(q, k, v, causal=True)
    torch.set_num_threads(1)
    one = invariant(q, k, v, causal=True)
    assert torch.equal(one.out, two.out) and torch.equal(one.lse, two.lse)


@pytest.mark.parametrize("options", ({}, {"causal": True}, {"causal": True, "window": (64, 0)}), ids=str)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_the_same_call_gives_the_same_bits(dtype, options, two_threads):
    q, k, v = qkv(2, 300, 300, (4, 2), 64, dtype, grad=True)
    results = []
    for _ in range(4):
        out = strobe.attention(q, k, v, deterministic=True, **options)
        results.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
    assert all(torch.equal(a, b) for result in results[1:] for a, b in zip(result, results[0]))


# ---------------------------------------------------------------- memory

PEAK = """
import resource, torch, strobe
torch.set_num_threads(1)
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
def run(seqlen, **options):
    q, k, v = (torch.randn(1, seqlen, 1, 8, requires_grad=True) for _ in range(3))
    strobe.attention(q, k, v, **options).sum().backward()
ways = dict(softcap=9.0), dict(causal=True), dict(batch_invariant=True, window=(900, 0)), dict(mask=None)
for seqlen in (600, 8000):
    before = peak()
    for way in ways: run(seqlen, **way)
print(peak() - before)
"""


def test_memory_is_linear():
    """Peak memory of forward and backward at S = 8,000 against the 256 MB of one S x S matrix of float32."""
    unit = 1 if sys.platform == "darwin" else 1024
    grown = int(subprocess.run([sys.executable, "-c", PEAK], check=True, capture_output=True, text=True).stdout) * unit
    assert grown < 8000**2 * 4 / 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_hidden_score_that_overflows_is_not_seen(dtype):
    """Row i sees keys i - 4 to i. Scores of key 0 are infinite: rows 5 and on do not see it."""
    q, k, v = (torch.randn(1, 40, 2, 16, generator=torch.Generator().manual_seed(n)).to(dtype) for n in range(3))
    k[0, 0] = 3e38
    out = strobe.attention(10 * q, k, v, window=(4, 0))
    alone = strobe.attention(10 * q[:, 5:], k[:, 1:], v[:, 1:], window=(4, 0))
    near = 2.0**-7 if dtype == torch.bfloat16 else 1e-5  # a rounding of the result, either way
    torch.testing.assert_close(out[:, 5:], alone, rtol=near, atol=near)


@pytest.mark.parametrize(
    "options", [dict(scale=1e-60), dict(scale=1e-60, softcap=1.0), dict(scale=0.0), dict(scale=-1e-60)], ids=str
)
def test_a_scale_that_float32_rounds_to_0_keeps_nan(options):
    q, k = torch.randn(1, 6, 2, 16), torch.randn(1, 9, 2, 16)
    q[0, 2, 0, 3] = torch.nan
    part = strobe.partial_attention(q, k, k, **options)
    assert part.lse.isnan().nonzero().tolist() == [[0, 0, 2]] and part.out.isnan().any(-1).nonzero().tolist() == [
        [0, 2, 0]
    ]


@pytest.mark.parametrize("name, which", UPSTREAM)
def test_rows_without_keys_have_no_gradients(name, which):
    assert_no_gradients_of_empty_rows(name, which, "cpu")


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_scale_below_float32_gives_means_of_values(options, dtype):
    assert_means_of_values(options, dtype, "cpu")


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("options", ({}, {"causal": True}, {"window": (30, 0)}), ids=str)
def test_a_row_whose_scores_are_all_minus_infinity_is_nan(options, dtype):
    """Only the mask decides whether a row sees a key. In a row with scores of -inf alone, softmax is 0 / 0."""
    q, k, v = qkv(1, 40, dtype=dtype)
    k = k.abs() + 1
    clean = strobe.partial_attention(q, k, v, **options)
    q[0, 21, 1, 5] = -torch.inf
    part = strobe.partial_attention(q, k, v, **options)
    assert part.out[0, 21, 1].isnan().all()
    part.out[0, 21, 1], part.lse[0, 1, 21] = clean.out[0, 21, 1], clean.lse[0, 1, 21]
    assert torch.equal(part.out, clean.out) and torch.equal(part.lse, clean.lse)
