"""DTensor over two gloo processes: each placement gives what one process computes, forward and backward."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import strobe
from tests.processes import WORLD, together

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


def _inputs(heads_kv: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((2, 5, 4, 8), (2, 7, heads_kv, 8), (2, 7, heads_kv, 6))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _check(
    mesh, placements: dict, tensors: dict, options: dict, packed: bool = False, lengths: tuple | None = None
) -> None:
    """The call on sharded leaves and on whole ones: out, its placement, and every gradient."""
    from torch.distributed.tensor import distribute_tensor

    attend = strobe.attention_varlen if packed else strobe.attention
    whole = {name: t.clone().requires_grad_(t.is_floating_point()) for name, t in tensors.items()}
    sharded = {
        name: distribute_tensor(t, mesh, [placements[name]]).requires_grad_(t.is_floating_point())
        for name, t in tensors.items()
    }
    split = lambda named: ([named[name] for name in "qkv"], {name: t for name, t in named.items() if name not in "qkv"})
    (qkv, more), (qkv_sharded, more_sharded) = split(whole), split(sharded)
    options_sharded = (
        options if lengths is None else {"mask": strobe.key_lengths(distribute_tensor(lengths[0], mesh, [lengths[1]]))}
    )
    expected, got = attend(*qkv, **more, **options), attend(*qkv_sharded, **more_sharded, **options_sharded)
    assert tuple(got.placements) == (placements["q"],), (got.placements, placements)
    torch.testing.assert_close(got.full_tensor(), expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(5), dtype=expected.dtype)
    expected.backward(upstream)
    got.backward(distribute_tensor(upstream, mesh, [placements["q"]]))
    for name, t in whole.items():
        if t.requires_grad:
            torch.testing.assert_close(
                sharded[name].grad.full_tensor(),
                t.grad,
                rtol=1e-12,
                atol=1e-12,
                msg=lambda m, name=name: f"{name}: {m}",
            )


def _work(rank: int) -> None:
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (WORLD,))
    q, k, v = _inputs()
    sinks = torch.linspace(-1, 1, 4, dtype=torch.float64)
    qkv = {"q": q, "k": k, "v": v}
    alike = lambda placement: dict.fromkeys(("q", "k", "v"), placement)
    for placement in (
        Replicate(),
        Shard(0),
        Shard(2),
    ):  # everywhere whole, the batch apart, heads apart with grouped queries
        _check(mesh, alike(placement), qkv, {"causal": True})
        _check(mesh, alike(placement), qkv, {"window": (2, 1), "softcap": 2.0, "scale": 0.3})
    _check(mesh, alike(Shard(2)) | {"sinks": Shard(0)}, qkv | {"sinks": sinks}, {"causal": True})
    _check(mesh, alike(Replicate()) | {"sinks": Replicate()}, qkv | {"sinks": sinks}, {"causal": True})
    _check(mesh, alike(Shard(0)), qkv, {"mask": strobe.prefix_causal(2)})
    lengths = torch.tensor([4, 0], dtype=torch.int32)
    for placement, beside in ((Shard(0), Shard(0)), (Shard(2), Replicate())):  # lengths go with the batch
        _check(mesh, alike(placement), qkv, {"mask": strobe.key_lengths(lengths)}, lengths=(lengths, beside))
    flat = {name: t.flatten(0, 1) for name, t in qkv.items()}
    offsets = {
        "cu_seqlens_q": torch.tensor([0, 3, 10], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 6, 14], dtype=torch.int32),
    }
    whole = dict.fromkeys(offsets, Replicate())
    _check(mesh, alike(Shard(1)) | whole, flat | offsets, {"causal": True}, packed=True)
    from torch.distributed.tensor import distribute_tensor

    for heads_q in (12, 6):  # three key heads do not divide by two: none may be read for another
        whole = [
            torch.randn(2, 7, heads, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(heads))
            for heads in (heads_q, 3, 3)
        ]
        apart = strobe.attention(*(distribute_tensor(t, mesh, [Shard(2)]) for t in whole), causal=True)
        torch.testing.assert_close(apart.full_tensor(), strobe.attention(*whole, causal=True))
    whole = [
        torch.randn(2, 7, heads, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(heads))
        for heads in (12, 3, 3)
    ]
    sinks, upstream = (
        torch.linspace(-1, 1, 12, dtype=torch.float64),
        torch.randn(2, 7, 12, 8, dtype=torch.float64, generator=torch.Generator()),
    )
    for more, beside, above in (
        ({"sinks": sinks}, {"sinks": Shard(0)}, Replicate()),
        ({}, {}, Shard(2)),
    ):  # nor where others bring heads apart
        alone = [t.clone().requires_grad_() for t in whole]
        apart = [distribute_tensor(t, mesh, [Replicate()]).requires_grad_() for t in whole]
        expected = strobe.attention(*alone, **more)
        got = strobe.attention(*apart, **{name: distribute_tensor(t, mesh, [beside[name]]) for name, t in more.items()})
        torch.testing.assert_close(got.full_tensor(), expected)
        found = torch.autograd.grad(got, apart, distribute_tensor(upstream, mesh, [above]))
        for one, other in zip(found, torch.autograd.grad(expected, alone, upstream)):
            torch.testing.assert_close(one.full_tensor(), other)
    with torch.no_grad():  # partial results keep their lse beside their heads
        part = strobe.partial_attention(*(distribute_tensor(t, mesh, [Shard(2)]) for t in (q, k, v)))
        assert tuple(part.lse.placements) == (Shard(1),)
        torch.testing.assert_close(part.lse.full_tensor(), strobe.partial_attention(q, k, v).lse)


def test_sharded_by_batch_and_by_heads_it_means_the_same(tmp_path):
    together(_work, tmp_path)


# ---------------------------------------------------------------- masks, out= and caches


def _apart(mesh, t: torch.Tensor, *placements):
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(
        t.clone(), mesh, placements, src_data_rank=None
    )  # each process has all of it; gloo moves no 8-bit floats


def _documents(rank: int) -> None:
    """Ids that are DTensors: sharded with the batch, or whole beside heads that are apart; forward and backward."""
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (WORLD,))
    q, k, v = _inputs()
    ids = (
        torch.tensor([[0, 0, 1, 1, -1], [0, 2, 0, 2, 2]], dtype=torch.int32),
        torch.tensor([[0, 1, 1, 1, 1, 0, 0], [2, 2, 2, 0, 0, 0, -1]]).int(),
    )
    for sides in (ids, ids[:1]):
        keys = [t[:, : sides[-1].shape[1]].contiguous() for t in (k, v)]
        alone = [t.clone().requires_grad_() for t in (q, *keys)]
        expected = strobe.attention(*alone, mask=strobe.documents(*sides) & strobe.causal())
        upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(5), dtype=expected.dtype)
        gradients = torch.autograd.grad(expected, alone, upstream)
        for placement, beside in (
            (Shard(0), Shard(0)),
            (Shard(2), Replicate()),
            (Replicate(), Replicate()),
            (Shard(0), Replicate()),
        ):
            apart = [_apart(mesh, t, placement).requires_grad_() for t in (q, *keys)]
            mask = strobe.documents(*(_apart(mesh, one, beside) for one in sides))
            whole = strobe.documents(*sides).documents
            for name in ("spans_q", "spans_k"):
                assert torch.equal(getattr(mask.documents, name).full_tensor(), getattr(whole, name)), name
            got = strobe.attention(*apart, mask=mask & strobe.causal())
            assert got.placements == (placement,)
            torch.testing.assert_close(got.full_tensor(), expected, rtol=1e-12, atol=1e-12)
            for one, other in zip(torch.autograd.grad(got, apart, _apart(mesh, upstream, placement)), gradients):
                torch.testing.assert_close(one.full_tensor(), other, rtol=1e-12, atol=1e-12)
    mixed = strobe.documents(
        _apart(mesh, ids[0], Shard(0)), _apart(mesh, ids[1], Replicate())
    )  # each side placed in its own way
    assert torch.equal(mixed.documents.spans_k.full_tensor(), strobe.documents(*ids).documents.spans_k)
    with pytest.raises(
        strobe.InvalidProblem,
        match=r"documents ids_q: got placements \(Shard\(dim=1\),\), expected Replicate\(\) or Shard\(0\); ",
    ):
        strobe.documents(_apart(mesh, ids[0], Shard(1)))
    with pytest.raises(TypeError, match=r"documents ids_k: got Tensor, expected a DTensor"):
        strobe.documents(_apart(mesh, ids[0], Shard(0)), ids[1])


def _caches(mesh, paged: bool, eight_bits: bool):
    """(cache, how its fields are placed by batch, how by heads), each field by name; sequences share no page."""
    from torch.distributed.tensor import Replicate, Shard

    generator = torch.Generator().manual_seed(1)
    shape = (6, 4, 2) if paged else (2, 12, 2)
    k, v = (
        torch.randn(*shape, width, generator=generator, dtype=torch.float64).to(
            torch.float32 if eight_bits else torch.float64
        )
        for width in (8, 6)
    )
    scales = {}
    if eight_bits:
        k, v, *both = strobe.quantize_kv(k, v)
        scales = dict(zip(("k_scale", "v_scale"), both))
    lengths = torch.tensor([9, 4], dtype=torch.int32)
    by_heads, by_batch = dict.fromkeys(scales, Shard(0)), dict.fromkeys(scales, Replicate())
    if paged:
        cache = strobe.PagedCache(k, v, torch.tensor([[4, 0, 2], [1, 5, 3]], dtype=torch.int32), lengths, **scales)
        by_heads |= {"k_pages": Shard(2), "v_pages": Shard(2), "page_table": Replicate(), "seqlens": Replicate()}
        by_batch |= {"k_pages": Replicate(), "v_pages": Replicate(), "page_table": Shard(0), "seqlens": Shard(0)}
    else:
        cache = strobe.DenseCache(k, v, lengths, torch.tensor([2, 0], dtype=torch.int32), **scales)
        by_heads |= {"k": Shard(2), "v": Shard(2), "k_start": Replicate(), "seqlens": Replicate()}
        by_batch |= {"k": Shard(0), "v": Shard(0), "k_start": Shard(0), "seqlens": Shard(0)}
    return cache, by_batch, by_heads


def _placed(mesh, cache, placements: dict):
    return cache._replace(
        **{
            name: _apart(mesh, field, placements[name])
            for name, field in zip(cache._fields, cache)
            if field is not None
        }
    )


class Moves(TorchDispatchMode):
    """Records the exchanges between processes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.extend([str(func)] * ("c10d" in str(func)))
        return func(*args, **(kwargs or {}))


def _decoding(rank: int) -> None:
    """A cache by heads, by batch and whole: what is appended, what is read, and where the result lies."""
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (WORLD,))
    generator = torch.Generator().manual_seed(2)
    random = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)
    sinks, angles = torch.linspace(-1, 1, 4, dtype=torch.float64), random(12, 4)
    rotary = strobe.Rotary(angles.cos(), angles.sin(), True)
    for paged in (False, True):
        for eight_bits in (False, True):
            cache, by_batch, by_heads = _caches(mesh, paged, eight_bits)
            dtype = torch.float32 if eight_bits else torch.float64
            q, new, new_v = random(2, 2, 4, 8).to(dtype), random(2, 2, 2, 8).to(dtype), random(2, 2, 2, 6).to(dtype)
            whole_ways = dict.fromkeys(by_batch, Replicate())
            alone = cache._replace(**{name: getattr(cache, name).clone() for name in cache._fields[:2]})
            strobe.append(alone, new, new_v, rotary=rotary)
            expected = strobe.attention_decode(q, alone, sinks=sinks, window=(4, 0), softcap=2.0)
            part = strobe.partial_attention_decode(q, alone)
            for ways, rows, heads in (
                (by_heads, Shard(2), Shard(0)),
                (by_batch, Shard(0), Replicate()),
                (whole_ways, Replicate(), Replicate()),
            ):
                apart = _placed(mesh, cache, ways)
                pools, places = apart[:2], [pool.to_local().data_ptr() for pool in apart[:2]]
                beside = Replicate() if rows == Shard(0) and paged else rows  # new keys come from wherever they are
                turns = strobe.Rotary(*(_apart(mesh, t, Replicate()) for t in rotary[:2]), True)
                strobe.append(apart, _apart(mesh, new, beside), _apart(mesh, new_v, rows), rotary=turns)
                assert [pool.to_local().data_ptr() for pool in pools] == places
                for name, pool, other in zip(cache._fields, pools, alone):
                    mine, own = _apart(mesh, other, ways[name]).to_local(), pool.to_local()
                    assert torch.equal(own.view(torch.uint8), mine.view(torch.uint8)), (name, ways)
                options = {"sinks": _apart(mesh, sinks, heads), "window": (4, 0), "softcap": 2.0}
                rows_apart = _apart(mesh, q, rows)
                with Moves() as moves:
                    got = strobe.attention_decode(rows_apart, apart, **options)
                assert got.placements == (rows,) and moves.seen == []
                torch.testing.assert_close(
                    got.full_tensor(), expected, rtol=1e-6 if eight_bits else 1e-12, atol=1e-6 if eight_bits else 1e-12
                )
                out = _apart(mesh, torch.zeros_like(expected), rows)
                assert strobe.attention_decode(rows_apart, apart, out=out, **options) is out and torch.equal(
                    out.full_tensor(), got.full_tensor()
                )
                some = strobe.partial_attention_decode(rows_apart, apart)
                assert some.lse.placements == (Shard(1) if rows == Shard(2) else rows,)
                torch.testing.assert_close(some.lse.full_tensor(), part.lse, rtol=1e-6, atol=1e-6)

    q, k, v = (
        torch.randn(2, rows, heads, 8, dtype=torch.float64, generator=generator)
        for rows, heads in ((1, 6), (9, 3), (9, 3))
    )
    expected = strobe.attention_decode(q, strobe.DenseCache(k, v, lengths := torch.tensor([9, 5], dtype=torch.int32)))
    apart = strobe.DenseCache(*(_apart(mesh, t, Shard(2)) for t in (k, v)), _apart(mesh, lengths, Replicate()))
    got = strobe.attention_decode(
        _apart(mesh, q, Shard(2)), apart
    )  # three key heads do not divide by two: none may be read for another
    torch.testing.assert_close(got.full_tensor(), expected, rtol=1e-12, atol=1e-12)


def _packed_over_caches(rank: int) -> None:
    """Packed queries over a cache by heads and whole: what is read, and where the result lies."""
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (WORLD,))
    generator = torch.Generator().manual_seed(4)
    offsets, sinks = torch.tensor([0, 3, 4], dtype=torch.int32), torch.linspace(-1, 1, 4, dtype=torch.float64)
    given = {"cu_seqlens_q": _apart(mesh, offsets, Replicate()), "max_seqlen_q": 3}
    for paged, bits in itertools.product((False, True), ("wide", "a scale per head", "a scale per key")):
        cache, by_batch, by_heads = _caches(mesh, paged, bits != "wide")
        if bits == "a scale per key":
            scales = [torch.rand(cache[0].shape[:3], generator=generator) + 0.5 for _ in range(2)]
            cache = cache._replace(k_scale=scales[0], v_scale=scales[1])
            by_heads |= {"k_scale": Shard(2), "v_scale": Shard(2)}
        dtype = torch.float64 if bits == "wide" else torch.float32
        close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
        close = close if bits == "wide" else partial(close, rtol=1e-6, atol=1e-6)
        q = torch.randn(5, 4, 8, generator=generator, dtype=torch.float64).to(dtype)  # the last row is padding
        options = {"window": (4, 0), "softcap": 2.0}
        expected = strobe.attention_paged(q, cache, cu_seqlens_q=offsets, sinks=sinks, **options)
        part = strobe.partial_attention_paged(q, cache, cu_seqlens_q=offsets)
        for ways, rows, heads in (
            (by_heads, Shard(1), Shard(0)),
            (dict.fromkeys(by_heads, Replicate()), Replicate(), Replicate()),
        ):
            apart, rows_apart = _placed(mesh, cache, ways), _apart(mesh, q, rows)
            options["sinks"] = _apart(mesh, sinks, heads)
            with Moves() as moves:
                got = strobe.attention_paged(rows_apart, apart, **given, **options)
            assert got.placements == (rows,) and moves.seen == []
            close(got.full_tensor(), expected)
            out = _apart(mesh, torch.zeros_like(expected), rows)
            assert strobe.attention_paged(rows_apart, apart, out=out, **given, **options) is out
            assert torch.equal(out.full_tensor(), got.full_tensor())
            some = strobe.partial_attention_paged(rows_apart, apart, **given)
            assert (some.out.placements, some.lse.placements) == ((rows,), (heads,))
            close(some.out.full_tensor(), part.out)
            close(some.lse.full_tensor(), part.lse)
        if bits == "wide":  # rows and sequences are apart: DTensor moves them, and gloo moves no 8-bit floats
            moved = strobe.attention_paged(_apart(mesh, q, Shard(0)), _placed(mesh, cache, by_batch), **given)
            close(moved.full_tensor(), part.out)

    whole = (
        torch.randn(*shape, 8, dtype=torch.float64, generator=generator) for shape in ((4, 6), (2, 9, 3), (2, 9, 3))
    )
    q, k, v = whole  # three key heads do not divide by two: none may be read for another
    expected = strobe.attention_paged(q, strobe.DenseCache(k, v, lengths := torch.tensor([9, 5])), cu_seqlens_q=offsets)
    apart = strobe.DenseCache(*(_apart(mesh, t, Shard(2)) for t in (k, v)), _apart(mesh, lengths, Replicate()))
    got = strobe.attention_paged(_apart(mesh, q, Shard(1)), apart, **given)
    torch.testing.assert_close(got.full_tensor(), expected, rtol=1e-12, atol=1e-12)


def _refused(rank: int) -> None:
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (WORLD,))
    new, new_v = torch.ones(2, 1, 2, 8, dtype=torch.float64), torch.ones(2, 1, 2, 6, dtype=torch.float64)
    news = _apart(mesh, new, Replicate()), _apart(mesh, new_v, Replicate())
    for paged in (False, True):
        cache, _, by_heads = _caches(mesh, paged, False)
        names = ("cache.k_pages", "cache.v_pages") if paged else ("cache.k", "cache.v")
        ways = [{"k": Shard(1), "v": Shard(1)}, {"k": Shard(3), "v": Shard(3)}] + [
            {"k": Shard(0), "v": Shard(0)}
        ] * paged
        for way in ways:  # by positions, by width, and pages, whose numbers speak of all of them
            found = by_heads | {name: way[name[0]] for name in cache._fields[:2]}
            with pytest.raises(
                strobe.InvalidProblem,
                match=rf"{names[0]}: got placements \(Shard.*, expected Replicate\(\) or Shard\(dim=2\).*; shard",
            ):
                strobe.append(_placed(mesh, cache, found), *news)
        with pytest.raises(
            strobe.InvalidProblem, match=rf"{names[1]}: got placements \(Replicate\(\),\), expected .*the same for keys"
        ):
            strobe.append(_placed(mesh, cache, by_heads | {cache._fields[1]: Replicate()}), *news)
        placed = _placed(mesh, cache, by_heads)
        for change, word in (({"seqlens": cache.seqlens}, "cache.seqlens"), ({cache._fields[1]: cache[1]}, names[1])):
            with pytest.raises(
                TypeError,
                match=rf"{word}: got .*, expected a DTensor beside a cache of DTensors; give it to distribute_tensor",
            ):
                strobe.append(placed._replace(**change), *news)
        with pytest.raises(TypeError, match=r"k_new: got .*, expected a DTensor"):
            strobe.append(placed, new, news[1])
    paged, _, by_heads = _caches(mesh, True, True)
    alike = _placed(mesh, paged, by_heads)
    tokens, slots = _apart(mesh, new[0], Replicate()), _apart(mesh, torch.zeros(1, dtype=torch.int32), Replicate())
    with pytest.raises(strobe.UnsupportedProblem, match=r"tokens at slots to a cache of DTensors: append \[B, T"):
        strobe.append(alike, tokens, _apart(mesh, new_v[0], Replicate()), slots=slots)
    scales = torch.ones(paged.k_pages.shape[:3])
    ways = by_heads | {"k_scale": Shard(2), "v_scale": Shard(2)}
    scaled = _placed(mesh, paged._replace(k_scale=scales, v_scale=scales.clone()), ways)
    with pytest.raises(strobe.UnsupportedProblem, match="scales of each key and head: use one scale for each head"):
        strobe.append(scaled, *news)
    kept = _placed(mesh, _caches(mesh, False, False)[0], dict.fromkeys(strobe.DenseCache._fields, Replicate()))
    with pytest.raises(strobe.InvalidProblem, match=r"k_new: got heads and width \[2, 5\]"):
        strobe.append(kept, _apart(mesh, new[..., :5], Replicate()), news[1])


def _into_out(rank: int) -> None:
    from torch.distributed.tensor import Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (WORLD,))
    tensors = _inputs()
    expected = strobe.attention(*tensors)
    for placement in (Shard(2), Shard(0)):
        out = _apart(mesh, torch.zeros_like(expected), placement)
        assert strobe.attention(*(_apart(mesh, t, placement) for t in tensors), out=out) is out
        torch.testing.assert_close(out.full_tensor(), expected, rtol=1e-12, atol=1e-12)


def _compiled(rank: int) -> None:
    """One step over a cache by heads, with packed queries, too, and a mask by batch, each as one graph."""
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh

    def step(q, k, v, lengths, new, new_v):
        strobe.append(strobe.DenseCache(k, v, lengths - 1), new, new_v)
        return strobe.attention_decode(q, strobe.DenseCache(k, v, lengths))

    def packed(q, k, v, lengths, offsets):
        return strobe.attention_paged(q, strobe.DenseCache(k, v, lengths), cu_seqlens_q=offsets)

    def masked(q, k, v, ids):
        return strobe.attention(q, k, v, mask=strobe.documents(ids))

    mesh = init_device_mesh("cpu", (WORLD,))
    q, k, v = _inputs()
    ids, lengths = (
        torch.tensor([[0, 0, 1, 1, -1], [0, 2, 0, 2, 2]], dtype=torch.int32),
        torch.tensor([7, 4], dtype=torch.int32),
    )
    heads = (
        (q[:, :1], Shard(2)),
        (k, Shard(2)),
        (v, Shard(2)),
        (lengths, Replicate()),
        (k[:, :1], Shard(2)),
        (v[:, :1], Shard(2)),
    )
    batch = tuple((t[:, :5], Shard(0)) for t in (q, k, v, ids))
    offsets = torch.tensor([0, 3, 5], dtype=torch.int32)
    tokens = (q[0], Shard(1)), *heads[1:4], (offsets, Replicate())
    for function, placed in ((step, heads), (packed, tokens), (masked, batch)):
        expected = function(*(t.clone() for t, _ in placed))
        got = torch.compile(function, fullgraph=True, backend="aot_eager")(
            *(_apart(mesh, t, placement) for t, placement in placed)
        )
        torch.testing.assert_close(got.full_tensor(), expected, rtol=1e-12, atol=1e-12)


def _functions(rank: int) -> None:
    """The ops of functions have no rules, and say so by name for each argument and each way to call them."""
    from torch.distributed.tensor import Replicate, init_device_mesh

    mesh = init_device_mesh("cpu", (WORLD,))
    apart = lambda t: _apart(mesh, t, Replicate())
    q, table, offsets = torch.ones(2, 4, 2, 8), torch.ones(2), torch.tensor([0, 1, 4], dtype=torch.int32)
    shared, tokens = apart(q), apart(q[0])
    cache = strobe.DenseCache(apart(q), apart(q), apart(torch.tensor([3, 4], dtype=torch.int32)))
    plain = strobe.DenseCache(q, q, torch.tensor([3, 4], dtype=torch.int32))
    near = strobe.mask_mod(lambda b, h, q, k: (q - k) % 3 < 2)
    score = lambda table: lambda s, b, h, q, k: s + table[h]
    given, of_table = {"score_mod": score(table)}, {"score_mod": score(apart(table))}
    varlen, paged = {"cu_seqlens_q": offsets}, {"cu_seqlens_q": offsets}
    anywhere = r"local tensors \(DTensor.to_local\), .*, or share a sequence by strobe.distributed.context_parallel"
    for call, word, name, remedy in (
        (lambda: strobe.attention(shared, shared, shared, **given), "score_mod", "q", anywhere),
        (lambda: strobe.attention(shared, shared, shared, mask=near), "mask", "q", anywhere),
        (lambda: strobe.attention(shared, shared, shared, dropout_p=0.5, dropout_seed=1), "dropout_p", "q", anywhere),
        (lambda: strobe.attention(apart(q).requires_grad_(), shared, shared, **given), "score_mod", "q", anywhere),
        (lambda: strobe.attention(q, shared, q, **given), "score_mod", "k", anywhere),
        (lambda: strobe.attention(q, q, q, **given, out=apart(q)), "score_mod", "out", anywhere),
        (lambda: strobe.attention(q, q, q, **of_table), "score_mod", "tensor 0 that .*captures", anywhere),
        (lambda: strobe.attention_varlen(tokens, tokens, tokens, **varlen, **given), "score_mod", "q", anywhere),
        (lambda: strobe.attention_decode(apart(q[:, :1]), cache, **given), "score_mod", "q", "local tensors"),
        (lambda: strobe.attention_decode(q[:, :1], cache, mask=near), "mask", "cache.k", "local tensors"),
        (lambda: strobe.attention_decode(q[:, :1], plain, **of_table), "score_mod", "tensor 0 that", "local tensors"),
        (lambda: strobe.attention_paged(tokens, cache, **paged, **given), "score_mod", "q", "local tensors"),
    ):
        with pytest.raises(strobe.UnsupportedProblem, match=f"{word} with DTensors: {name}.* is one; call .*{remedy}"):
            call()


def _all(rank: int) -> None:
    for work in (_documents, _decoding, _packed_over_caches, _refused, _into_out, _compiled, _functions):
        work(rank)


def test_masks_out_and_caches_of_dtensors(tmp_path):
    together(_all, tmp_path)
