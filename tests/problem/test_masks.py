"""A mask's host answers (tile_kind, spans, algebra, flat form) against the mask written out, exhaustively on small
sizes.
"""

from __future__ import annotations

from itertools import combinations, pairwise, product

import pytest
import torch

import strobe
from strobe.problem.call import Call
from strobe.problem.mask import Mask, Tile, TileKind

SIZES = [(3, 3), (2, 5), (5, 2), (1, 4), (4, 1), (6, 6), (3, 7)]
BATCH = 2


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def bands():
    """Every structure of band, prefix and key lengths with bounds about the sizes."""
    for left, right in product((None, 0, 1, 9), (None, 0, 2, 9)):
        for prefix in (None, 0, 2, int32([3, 9])):
            for lengths in (None, int32([0, 2]), int32([1, 9])):
                yield Mask(left, right, prefix, lengths)


def ids(kind: str, rows: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    def one(length: int, salt: int) -> torch.Tensor:
        position = torch.arange(length).expand(BATCH, length)
        if kind == "runs":
            return ((position + torch.arange(BATCH)[:, None]) // 2).to(torch.int32)
        return torch.randint(-1, 3, (BATCH, length), generator=torch.Generator().manual_seed(17 * length + salt)).to(
            torch.int32
        )

    return one(rows, 0), one(keys, 0 if rows == keys else 1)


def kinds_by_looking(mask: Mask, rows: int, keys: int) -> dict[Tile, TileKind]:
    """Every tile's kind from counting the admitted pairs in it."""
    dense = mask.dense(rows, keys).expand(BATCH, rows, keys)
    kinds = {}
    for b, (m, m_stop), (n, n_stop) in product(
        range(BATCH), combinations(range(rows + 1), 2), combinations(range(keys + 1), 2)
    ):
        seen = int(dense[b, m:m_stop, n:n_stop].sum())
        kind = (
            TileKind.EMPTY if seen == 0 else TileKind.FULL if seen == (m_stop - m) * (n_stop - n) else TileKind.PARTIAL
        )
        kinds[Tile(m, m_stop, n, n_stop, b)] = kind
    return kinds


@pytest.mark.nightly_cases("6-6")
@pytest.mark.parametrize("rows, keys", SIZES)
def test_tile_kind_is_what_dense_shows(rows, keys):
    """Exactly: a FULL tile called PARTIAL costs time, a PARTIAL one called FULL or EMPTY costs correctness."""
    for mask in bands():
        for tile, kind in kinds_by_looking(mask, rows, keys).items():
            assert mask.tile_kind(tile, rows, keys) is kind, (
                mask.left,
                mask.right,
                mask.prefix,
                mask.key_lengths,
                tile,
            )


@pytest.mark.parametrize("kind", ["runs", "shuffled"])
@pytest.mark.parametrize("rows, keys", SIZES)
def test_tile_kind_with_documents(rows, keys, kind):
    documents = strobe.documents(*ids(kind, rows, keys))
    for band in (Mask(), Mask(right=0), Mask(left=1, right=0), Mask(prefix=2), Mask(key_lengths=int32([1, 3]))):
        mask = documents & band
        for tile, wanted in kinds_by_looking(mask, rows, keys).items():
            assert mask.tile_kind(tile, rows, keys) is wanted, (band, tile)


def test_tile_beyond_the_ends_is_judged_by_its_inside():
    """A tile that overhangs the last row or key is FULL when all of it that exists is admitted, EMPTY when nothing of
    it exists.
    """
    assert Mask().tile_kind(Tile(0, 64, 0, 64), 5, 7) is TileKind.FULL
    assert strobe.causal().tile_kind(Tile(4, 68, 0, 64), 5, 5) is TileKind.FULL
    assert Mask().tile_kind(Tile(64, 128, 0, 64), 5, 7) is TileKind.EMPTY


@pytest.mark.parametrize("rows, keys", SIZES)
def test_interval_is_the_band(rows, keys):
    """Its keys are those that dense admits, and both its ends never fall from a row to the next."""
    for mask in bands():
        dense = mask.dense(rows, keys).expand(BATCH, rows, keys)
        for b in range(BATCH):
            intervals = [mask.interval(i, rows, keys, b) for i in range(rows)]
            for i, (first, stop) in enumerate(intervals):
                assert dense[b, i].nonzero().flatten().tolist() == list(range(first, stop)), (mask, b, i)
            assert all(a <= b for one, other in pairwise(intervals) for a, b in zip(one, other))


@pytest.mark.parametrize("kind", ["runs", "shuffled"])
@pytest.mark.parametrize("rows, keys", SIZES)
def test_spans(rows, keys, kind):
    """(where the run of this id ends, the first and the last + 1 position of it on the other side; 0, 0 where there is
    none).
    """
    ids_q, ids_k = ids(kind, rows, keys)
    documents = strobe.documents(ids_q, ids_k).documents
    for own, other, spans in ((ids_q, ids_k, documents.spans_q), (ids_k, ids_q, documents.spans_k)):
        assert spans.shape == (*own.shape, 3) and spans.dtype == torch.int32
        for b, i in product(range(BATCH), range(own.shape[1])):
            run_end = next((j for j in range(i, own.shape[1]) if own[b, j] != own[b, i]), own.shape[1])
            where = (other[b] == own[b, i]).nonzero().flatten().tolist() if own[b, i] >= 0 else []
            assert spans[b, i].tolist() == [run_end, where[0] if where else 0, where[-1] + 1 if where else 0]


def test_spans_of_nothing():
    nothing = torch.zeros(2, 0, dtype=torch.int32)
    documents = strobe.documents(torch.zeros(2, 3, dtype=torch.int32), nothing).documents
    assert documents.spans_q.shape == (2, 3, 3) and documents.spans_k.shape == (2, 0, 3)
    assert documents.spans_q[..., 1:].eq(0).all()


@pytest.mark.parametrize("sides", [1, 2])
def test_documents_are_those_of_when_the_mask_was_made(sides):
    given = [torch.tensor([[0, 0, 1, 1]], dtype=torch.int32) for _ in range(sides)]
    mask = strobe.documents(*given)
    before = mask.dense(4, 4)
    for one in given:
        one[0, 1:] = 1
    assert torch.equal(mask.dense(4, 4), before)


def test_documents_are_written_out_at_their_own_sizes_alone():
    mask = strobe.documents(int32([[0, 0, 1]]), int32([[0, 1]]))
    for sizes, name in (((9, 2), "seqlen_q: got 9, expected the 3"), ((3, 1), "seqlen_k: got 1, expected the 2")):
        with pytest.raises(strobe.InvalidProblem, match=name):
            mask.dense(*sizes)


def test_a_prefix_for_each_joined_with_a_longer_one_for_all():
    each = strobe.prefix_causal(int32([3, 0]))
    assert torch.equal((each & strobe.prefix_causal(2**40)).dense(4, 4), each.dense(4, 4))


PARTS = {
    "full": Mask(),
    "causal": strobe.causal(),
    "window": strobe.window(2, 1),
    "left": strobe.window(1, None),
    "prefix": strobe.prefix_causal(2),
    "prefix each": strobe.prefix_causal(int32([3, 0])),
    "lengths": strobe.key_lengths(int32([4, 1])),
    "documents": strobe.documents(*ids("shuffled", 5, 4)),
}


def same(a: Mask, b: Mask) -> bool:
    return torch.equal(a.dense(5, 4).expand(BATCH, 5, 4), b.dense(5, 4).expand(BATCH, 5, 4))


@pytest.mark.parametrize("a, b", list(product(PARTS, PARTS)))
def test_and_is_and(a, b):
    """x & y admits what both admit; it commutes and, with a third, associates."""
    if a == b == "documents":
        with pytest.raises(strobe.InvalidProblem, match="documents"):
            PARTS[a] & PARTS[b]
        return
    joined = PARTS[a] & PARTS[b]
    assert torch.equal(
        joined.dense(5, 4).expand(BATCH, 5, 4), (PARTS[a].dense(5, 4) & PARTS[b].dense(5, 4)).expand(BATCH, 5, 4)
    )
    assert same(joined, PARTS[b] & PARTS[a]) and joined.structure == (PARTS[b] & PARTS[a]).structure
    for c in PARTS:
        if [a, b, c].count("documents") <= 1:
            assert same(joined & PARTS[c], PARTS[a] & (PARTS[b] & PARTS[c]))


@pytest.mark.parametrize("a, b", list(product(PARTS, PARTS)))
def test_simplified_and_flat_forms_mean_the_same(a, b):
    if a == b == "documents":
        return
    mask = PARTS[a] & PARTS[b]
    assert same(mask, mask.simplified())
    q, k = torch.zeros(BATCH, 5, 1, 1), torch.zeros(BATCH, 4, 1, 1)
    call = Call(q, k, k).with_mask(mask)
    assert same(mask, call.mask) and call.structure == call.mask.structure


def test_window_none_to_0_is_causal():
    for rows, keys in SIZES:
        assert torch.equal(strobe.window(None, 0).dense(rows, keys), strobe.causal().dense(rows, keys))
    assert strobe.window(None, 0).structure == strobe.causal().structure


def test_parts_for_different_batches_do_not_join():
    two, three = (
        strobe.prefix_causal(torch.tensor([1, 2], dtype=torch.int32)),
        strobe.key_lengths(torch.tensor([1, 2, 3], dtype=torch.int32)),
    )
    with pytest.raises(strobe.InvalidProblem, match=r"^mask: got parts for batches of 2 and 3"):
        two & three
    ids = strobe.documents(torch.zeros(2, 4, dtype=torch.int32))
    assert (two & ids & strobe.causal()).dense(4, 4).shape == (2, 4, 4)
    with pytest.raises(strobe.InvalidProblem, match=r"^mask: got parts for batches of 2 and 3"):
        three & ids


def test_int64_metadata_means_the_same():
    """Tensors of ids, lengths, offsets and page ids are int64 unless one asks for less; kernels read int32."""
    int32, int64 = (
        lambda *numbers, dtype=dtype: torch.tensor(numbers, dtype=dtype) for dtype in (torch.int32, torch.int64)
    )
    q, k = torch.randn(2, 6, 2, 16), torch.randn(2, 8, 2, 16)
    made = [
        [
            strobe.attention(q, k, k, mask=strobe.key_lengths(of(3, 8))),
            strobe.attention(q, k, k, mask=strobe.prefix_causal(of(3, 8))),
            strobe.attention(q, q, q, mask=strobe.documents(of(0, 0, 1, 1, -1, -1).expand(2, -1))),
            strobe.attention_varlen(q[0], q[0], q[0], cu_seqlens_q=of(0, 2, 6), causal=True),
            strobe.attention_varlen(q[0], k[0], k[0], cu_seqlens_q=of(0, 2, 6), cu_seqlens_k=of(0, 5, 8)),
            strobe.attention_decode(q[:, :1], strobe.DenseCache(k, k, of(3, 8), of(1, 0))),
            strobe.attention_decode(q[:, :1], strobe.PagedCache(k, k, of(1, 0)[:, None], of(3, 8))),
        ]
        for of in (int32, int64)
    ]
    assert all(map(torch.equal, *made))
    far = strobe.attention_decode(q[:, :1], strobe.DenseCache(k, k, int64(3, 2**40)))
    assert torch.equal(far, strobe.attention_decode(q[:, :1], strobe.DenseCache(k, k, int64(3, 8))))
    assert any("seqlens" in word for word in strobe.last_errors())


@pytest.mark.parametrize("sides", [1, 2])
def test_int64_ids_beyond_int32_stay_apart(sides):
    ids = torch.tensor([[2**31 - 1, 2**31 - 1, 2**33, 2**33, -1, 2**63 - 1, -(2**40), 0]])
    others = (ids,) if sides == 1 else (ids, ids[:, [5, 0, 2, 2, 7, 4]])
    expected = (ids[:, :, None] == others[-1][:, None, :]) & (ids >= 0)[:, :, None]
    assert torch.equal(strobe.documents(*others).dense(ids.shape[1], others[-1].shape[1]), expected)
    if sides == 2:  # of two dtypes
        mask = strobe.documents(ids[:, 6:], int32([[0, -1, 5]]))
        assert mask.dense(2, 3).tolist() == [[[False] * 3, [True, False, False]]]
