"""Masks from a user's lists of blocks, against the dense mask in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import strobe
from strobe.errors import InvalidProblem

B, H, H_KV, M, N, BLOCK = 2, 4, 2, 3, 4, (16, 32)
ROWS, KEYS = 43, 109  # the last blocks stick out


def _lists(batch: int, heads: int, seed: int, taken: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Counts and numbers of random blocks that are not taken, in random order, and the same as a table."""
    draw = torch.Generator().manual_seed(seed)
    table = torch.rand(batch, heads, M, N, generator=draw) < 0.5
    table[..., 0] |= taken is None  # each row sees a key
    table = table if taken is None else table & ~taken
    order = torch.rand(table.shape, generator=draw).masked_fill(~table, 2.0).argsort(-1)
    return table.sum(-1), order, table


def _elements(table: Tensor) -> Tensor:
    seen = table.repeat_interleave(BLOCK[0], -2).repeat_interleave(BLOCK[1], -1)
    return seen[..., :ROWS, :KEYS].expand(B, H, -1, -1)


def _function(b, h, q_idx, kv_idx):
    return (q_idx + kv_idx + h) % 3 != b


_AT = torch.arange(ROWS)[:, None], torch.arange(KEYS)[None]
_INNER = {
    "all": (None, torch.ones(1, 1, ROWS, KEYS, dtype=torch.bool)),
    "a function": (
        _function, _function(torch.arange(B).view(-1, 1, 1, 1), torch.arange(H).view(1, -1, 1, 1), *_AT),
    ),
    "a mask": (strobe.window(90, 0), strobe.window(90, 0).dense(ROWS, KEYS)[:, None]),
}  # fmt: skip


def _exact(tensors: list[Tensor], seen: Tensor, up: Tensor) -> list[Tensor]:
    q, k, v = (t.detach().double().requires_grad_() for t in tensors)
    heads_first = [t.transpose(1, 2).repeat_interleave(H // t.shape[2], 1) for t in (q, k, v)]
    scores = (heads_first[0] @ heads_first[1].mT) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    out = (weights @ heads_first[2]).transpose(1, 2)
    return [out, *torch.autograd.grad(out, (q, k, v), up.double())]


def _draw(dtype=torch.float32) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    shapes = (B, ROWS, H, 16), (B, KEYS, H_KV, 16), (B, KEYS, H_KV, 16)
    return [torch.randn(shape, generator=draw).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("inner", _INNER)
@pytest.mark.parametrize(("batch", "heads", "has_full"), ((B, H, True), (1, H, False), (B, 1, True), (1, 1, False)))
def test_outputs_and_gradients_are_those_of_the_dense_mask(batch, heads, has_full, inner):
    mask_mod, within = _INNER[inner]
    counts, indices, table = _lists(batch, heads, 1)
    seen, full = _elements(table) & within, ()
    if has_full:
        *full, full_table = _lists(1, heads, 2, taken=table)
        seen = seen | _elements(full_table)
    mask = strobe.block_lists(counts, indices, *full, block_size=BLOCK, mask_mod=mask_mod)
    assert torch.equal(mask.dense(ROWS, KEYS, batch=B, heads=H), seen)
    tensors = _draw()
    up = torch.randn(B, ROWS, H, 16, generator=torch.Generator().manual_seed(5))
    out = strobe.attention(*tensors, mask=mask)
    found = [out, *torch.autograd.grad(out, tensors, up)]
    for got, exact in zip(found, _exact(tensors, seen, up)):
        torch.testing.assert_close(got, exact.float(), rtol=1e-4, atol=1e-5)


def test_a_block_in_both_lists_is_full_and_combinations():
    counts, indices = torch.tensor([1, 1]), torch.tensor([[0], [1]])
    hidden = lambda b, h, q, k: q < 0
    mask = strobe.block_lists(counts, indices, counts[:1].expand(2) * 0 + 1, indices, block_size=2, mask_mod=hidden,
                              num_kv_blocks=2)  # fmt: skip
    exact = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]).bool()
    assert torch.equal(mask.dense(4, 4)[0], exact)
    assert torch.equal((~mask).dense(4, 4)[0], ~exact)
    assert torch.equal((mask & strobe.causal()).dense(4, 4)[0], exact.tril())
    assert torch.equal((strobe.causal() | mask).dense(4, 4)[0], exact | torch.ones(4, 4).tril().bool())


def test_the_lists_of_a_mask_make_the_same_mask():
    made = strobe.mask_mod(lambda b, h, q, k: (q // 16 * 2 + k // 32) % 3 != 1)
    lists = made.block_lists(48, 128, block_size=BLOCK)
    again = strobe.block_lists(*lists[:4], block_size=lists.block_size)
    assert torch.equal(again.dense(48, 128), made.dense(48, 128))


def test_numbers_of_eight_bits_are_compared_with_many_blocks():
    mask = strobe.block_lists(
        torch.tensor([1], dtype=torch.int8), torch.tensor([[5]], dtype=torch.int8), block_size=1, num_kv_blocks=200
    )
    assert mask.dense(1, 200)[0].nonzero()[:, 1].tolist() == [5]


def test_positions_beyond_the_lists_see_nothing_in_packed_sequences_and_caches():
    mask = strobe.block_lists(torch.tensor([1]), torch.tensor([[0]]), block_size=4)
    assert torch.equal(
        mask.dense(8, 8)[0],
        torch.ones(8, 8).tril().bool().new_tensor([[i < 4 and j < 4 for j in range(8)] for i in range(8)]),
    )
    q, k, v = (torch.randn(8, 2, 16) for _ in range(3))
    offsets = torch.tensor([0, 8], dtype=torch.int32)
    out = strobe.attention_varlen(q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, mask=mask)
    torch.testing.assert_close(out[:4], strobe.attention(q[None, :4], k[None, :4], v[None, :4])[0])
    assert not out[4:].any()
    lists = (
        torch.tensor([0, 1]),
        torch.tensor([[0], [0]]),
    )  # queries of block 1 see block 0 of keys
    cache = strobe.DenseCache(k[None], v[None], torch.tensor([6], dtype=torch.int32))
    out = strobe.attention_decode(q[None, :1], cache, mask=strobe.block_lists(*lists, block_size=(3, 2)))
    torch.testing.assert_close(out, strobe.attention(q[None, :1], k[None, :2], v[None, :2]))
    out = strobe.attention_decode(q[None, :1], cache, mask=strobe.block_lists(*lists, block_size=2))
    assert not out.any()  # position 5 is beyond the two blocks of queries


def test_torch_compile_makes_one_graph():
    counts, indices, _ = _lists(B, H, 1)

    def run(q, k, v, counts, indices):
        return strobe.attention(q, k, v, mask=strobe.block_lists(counts, indices, block_size=BLOCK) & strobe.causal())

    tensors = _draw()
    torch.compiler.reset()
    found, exact = (
        f(*tensors, counts, indices) for f in (torch.compile(run, backend="aot_eager", fullgraph=True), run)
    )
    assert torch.equal(found, exact)
    for got, wanted in zip(*(torch.autograd.grad(out.square().sum(), tensors) for out in (found, exact))):
        torch.testing.assert_close(got, wanted)


def test_fake_tensors_have_no_numbers_to_check():
    from torch._subclasses.fake_tensor import FakeTensorMode

    counts, indices, _ = _lists(B, H, 1)
    with FakeTensorMode() as mode:
        q, k, v, counts, indices = (mode.from_tensor(t) for t in (*_draw(), counts, indices))
        out = strobe.attention(q, k, v, mask=strobe.block_lists(counts, indices, block_size=BLOCK))
    assert out.shape == (B, ROWS, H, 16)


_COUNTS, _INDICES = torch.tensor([[1, 2]]), torch.tensor([[[0, 1], [1, 0]]])
_REFUSED = {
    "counts of another shape": ((_COUNTS[0], _INDICES), {}, "kv_indices: got shape"),
    "no row of numbers": ((_COUNTS, _INDICES[0, 0]), {}, "kv_indices: got shape"),
    "floats": ((_COUNTS.float(), _INDICES), {}, "kv_num_blocks: got torch.float32"),
    "a block beyond the last": ((_COUNTS, _INDICES), {"num_kv_blocks": 1}, "kv_indices: got 0 to 1, expected 0 to 0"),
    "a block below the first": ((_COUNTS, _INDICES - 1), {}, "kv_indices: got -1 to 0"),
    "more than are listed": ((_COUNTS + 1, _INDICES), {}, "kv_num_blocks: got 2 to 3, expected 0 to 2"),
    "a size of 0": ((_COUNTS, _INDICES), {"block_size": (64, 0)}, "block_size: got"),
    "three sizes": ((_COUNTS, _INDICES), {"block_size": (64, 64, 1)}, "block_size: got"),
    "no number of blocks": ((_COUNTS, _INDICES), {"num_kv_blocks": 0}, "num_kv_blocks: got 0"),
    "sizes that are no integers": ((_COUNTS, _INDICES), {"block_size": 2.0}, "block_size: got 2.0"),
    "a size beyond int32": ((_COUNTS, _INDICES), {"block_size": 2**40}, "block_size: got"),
    "other heads in the full lists": (
        (_COUNTS.expand(2, -1), _INDICES.expand(2, -1, -1), _COUNTS.expand(3, -1), _INDICES.expand(3, -1, -1)),
        {},
        "full_kv_num_blocks: got batch entries and heads",
    ),
    "full blocks of other rows": ((_COUNTS, _INDICES, _COUNTS[:, :1], _INDICES[:, :1]), {}, "full_kv_num_blocks: got"),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_lists_that_do_not_belong_together_are_refused(case):
    given, options, message = _REFUSED[case]
    with pytest.raises(InvalidProblem, match=message):
        strobe.block_lists(*given, **options)


def test_half_of_a_pair_and_no_tensors_are_refused():
    with pytest.raises(TypeError, match="full_kv_indices"):
        strobe.block_lists(_COUNTS, _INDICES, _COUNTS)
    with pytest.raises(TypeError, match="kv_num_blocks"):
        strobe.block_lists([1, 2], _INDICES)
    with pytest.raises(TypeError, match="mask_mod"):
        strobe.block_lists(_COUNTS, _INDICES, mask_mod=3)


@pytest.mark.parametrize(("rows", "keys", "heads", "message"), (
    (65, 128, 1, "lists of 2 blocks of 32 queries, expected at least 3 blocks"),
    (64, 129, 1, "lists of 2 blocks of 64 keys, expected at least 3 .* num_kv_blocks="),
    (64, 128, 3, "counts query heads"),
))  # fmt: skip
def test_a_call_that_the_lists_do_not_cover_is_refused(rows, keys, heads, message):
    mask = strobe.block_lists(_COUNTS.expand(2, -1), _INDICES.expand(2, -1, -1), block_size=(32, 64))
    q, k = torch.zeros(1, rows, heads * 2 if heads == 1 else heads, 16), torch.zeros(1, keys, 1, 16)
    with pytest.raises(InvalidProblem, match=message):
        strobe.attention(q, k, k, mask=mask)


@pytest.mark.parametrize("target", ("A100", pytest.param("H200", marks=pytest.mark.nightly)))
def test_gpu_kernels_in_the_simulator(target, monkeypatch):
    """The kernels skip blocks by lists of their own, for both passes."""
    pytest.importorskip("triton")
    from strobe.kernels.device import mask_blocks
    from strobe.problem.target import FAKES
    from tools.proof.simulate import on

    monkeypatch.setattr(mask_blocks, "FEWEST_ELEMENTS", 1)
    mask_blocks.KEPT.entries.clear()
    counts, indices = torch.tensor([[1, 2], [2, 1]]), torch.tensor([[[1, 0], [2, 0]], [[0, 2], [1, 0]]])
    mask = strobe.block_lists(counts, indices, block_size=64, num_kv_blocks=3)
    draw = torch.Generator().manual_seed(3)
    tensors = [torch.randn(1, n, heads, 64, generator=draw).half() for n, heads in ((100, 2), (190, 1), (190, 1))]
    up = torch.randn(1, 100, 2, 64, generator=draw).half()

    def results(dtype):
        leaves = [t.to(dtype).requires_grad_() for t in tensors]
        out = strobe.attention(*leaves, mask=mask)
        return [out, *torch.autograd.grad(out, leaves, up.to(dtype))]

    exact = results(torch.float32)
    with on(FAKES[target]):
        found = results(torch.float16)
    for got, wanted in zip(found, exact):
        assert ((got.float() - wanted).norm() / wanted.norm()).item() < 4e-3


def test_lists_under_vmap_are_refused_by_name():
    """As functions of scores and masks are; not by an error of torch about the check of their numbers."""
    q, counts = torch.randn(2, 1, 64, 2, 16), torch.ones(2, 1, 1, 1, dtype=torch.int32)
    numbers = torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    attend = lambda q, n: strobe.attention(q, q, q, mask=strobe.block_lists(n, numbers, block_size=64))
    with pytest.raises(strobe.UnsupportedProblem, match=r"mask function under torch\.func"):
        torch.func.vmap(attend)(q, counts)
