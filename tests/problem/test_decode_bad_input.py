"""Bad calls on caches, one a row: what each raises, and that its message names the argument and what it got."""

from __future__ import annotations

from statistics import median
from time import perf_counter

import pytest
import torch

import strobe
from strobe import DenseCache, InvalidProblem, PagedCache, UnsupportedProblem
from strobe.ops import decode as ops_decode
from strobe.problem.decode import DecodeCall

INT = lambda *values: torch.tensor(values, dtype=torch.int32)
Q, K, V = torch.randn(2, 3, 4, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 6)
LENGTHS, TABLE, PAGES, PAGES_V = INT(3, 7), INT([0, 1], [2, 3]), torch.randn(5, 4, 2, 8), torch.randn(5, 4, 2, 6)
DENSE, PAGED = DenseCache(K, V, LENGTHS), PagedCache(PAGES, PAGES_V, TABLE, LENGTHS)
K8, V8 = K.to(torch.float8_e4m3fn), V.to(torch.float8_e4m3fn)
NEW, NEW_V = torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2, 6)
ANGLES = torch.randn(16, 4)
OVERLAPPING, OVERLAPPING_PAGES = (
    torch.zeros(200).as_strided(K.shape, (56, 8, 8, 1)),
    torch.zeros(200).as_strided(PAGES.shape, (32, 16, 8, 1)),
)
SPREAD = torch.stack([K, K], -1)[..., 0]


def decode(q=Q, cache=DENSE, **options):
    return lambda function: function(q, cache, **options)


def append(cache=DENSE, k_new=NEW, v_new=NEW_V, **options):
    return lambda _: strobe.append(cache, k_new, v_new, **options)


def dense(**changes):
    return decode(cache=DENSE._replace(**changes))


def paged(**changes):
    return decode(cache=PAGED._replace(**changes))


READS = {
    "q is a list": (decode([1.0]), TypeError, "q: got list"),
    "q of rank 3": (decode(Q[0]), InvalidProblem, "q: got shape [3, 4, 8]"),
    "q of ints": (decode(Q.long()), InvalidProblem, "q: got torch.int64"),
    "q of another batch": (decode(Q[:1]), InvalidProblem, "cache.k: got batch 2"),
    "q of another dtype": (decode(Q.bfloat16()), InvalidProblem, "cache.k: got torch.float32"),
    "q of no width": (decode(Q[..., :0]), InvalidProblem, "q: got a last dimension of 0"),
    "q spread out": (decode(torch.stack([Q, Q], -1)[..., 0]), InvalidProblem, "q: got stride 2"),
    "q elsewhere": (decode(Q.to("meta")), InvalidProblem, "q: got device meta"),
    "3 heads over 2": (decode(Q[:, :, :3]), InvalidProblem, "cache.k: got 2 heads"),
    "another width": (decode(Q[..., :5]), InvalidProblem, "cache.k: got head dimension 8"),
    "no cache": (decode(cache=(K, V)), TypeError, "cache: got tuple"),
    "k is None": (dense(k=None), TypeError, "cache.k: got NoneType"),
    "k of rank 3": (dense(k=K[0]), InvalidProblem, "cache.k: got shape [7, 2, 8]"),
    "k spread out": (dense(k=SPREAD), InvalidProblem, "cache.k: got stride 2"),
    "k sparse": (dense(k=K.to_sparse()), InvalidProblem, "cache.k: got torch.sparse_coo"),
    "v of another length": (dense(v=V[:, :6]), InvalidProblem, "cache.v: got shape [2, 6, 2, 6]"),
    "v of another dtype": (dense(v=V8), InvalidProblem, "cache.v: got torch.float8_e4m3fn"),
    "k in e5m2": (dense(k=K.to(torch.float8_e5m2)), InvalidProblem, "cache.k: got torch.float8_e5m2"),
    "lengths sparse": (dense(seqlens=LENGTHS.to_sparse()), InvalidProblem, "cache.seqlens: got torch.sparse_coo"),
    "lengths of int16": (dense(seqlens=LENGTHS.short()), InvalidProblem, "cache.seqlens: got torch.int16"),
    "lengths of another batch": (dense(seqlens=INT(1, 2, 3)), InvalidProblem, "cache.seqlens: got shape [3]"),
    "lengths in a list": (dense(seqlens=[3, 7]), TypeError, "cache.seqlens: got list"),
    "lengths elsewhere": (dense(seqlens=LENGTHS.to("meta")), InvalidProblem, "cache.seqlens: got device meta"),
    "starts of int16": (dense(k_start=LENGTHS.short()), InvalidProblem, "cache.k_start: got torch.int16"),
    "starts of another batch": (dense(k_start=INT(1)), InvalidProblem, "cache.k_start: got shape [1]"),
    "a scale without 8 bits": (dense(k_scale=torch.ones(2)), InvalidProblem, "cache.k_scale: got a scale"),
    "scales of each query head": (
        dense(k=K8, v=V8, v_scale=torch.ones(4)),
        InvalidProblem,
        "cache.v_scale: got torch.float32 [4]",
    ),
    "scales of 16 bits": (
        dense(k=K8, v=V8, k_scale=torch.ones(2).half()),
        InvalidProblem,
        "cache.k_scale: got torch.float16 [2]",
    ),
    "a scale that is a number": (dense(k=K8, v=V8, k_scale=1.0), TypeError, "cache.k_scale: got float"),
    "pages of rank 5": (paged(k_pages=PAGES[None]), InvalidProblem, "cache.k_pages: got shape [1, 5, 4, 2, 8]"),
    "pages of 0 keys": (
        paged(k_pages=PAGES[:, :0], v_pages=PAGES_V[:, :0]),
        InvalidProblem,
        "cache.k_pages: got pages of 0 keys",
    ),
    "other pages of v": (paged(v_pages=PAGES_V[:4]), InvalidProblem, "cache.v_pages: got shape [4, 4, 2, 6]"),
    "a table of int16": (paged(page_table=TABLE.short()), InvalidProblem, "cache.page_table: got torch.int16"),
    "a table of rank 1": (paged(page_table=TABLE[0]), InvalidProblem, "cache.page_table: got shape [2]"),
    "a table of another batch": (paged(page_table=TABLE[:1]), InvalidProblem, "cache.page_table: got shape [1, 2]"),
    "a table in a list": (paged(page_table=[[0], [1]]), TypeError, "cache.page_table: got list"),
    "causal is an int": (decode(causal=1), TypeError, "causal: got int"),
    "a window of one": (decode(window=(3,)), TypeError, "window: got tuple"),
    "a vast scale": (decode(scale=1e39), InvalidProblem, "scale: got 1e+39"),
    "a tiny softcap": (decode(softcap=1e-46), InvalidProblem, "softcap: got 1e-46"),
    "an infinite scale": (decode(scale=float("inf")), InvalidProblem, "scale: got inf"),
    "a softcap of 0": (decode(softcap=0.0), InvalidProblem, "softcap: got 0.0"),
    "batch_invariant is None": (decode(batch_invariant=None), TypeError, "batch_invariant: got NoneType"),
    "no such kernel": (decode(kernel="fast"), InvalidProblem, "kernel: got 'fast'"),
}
MORE_READS = {
    "sinks of each key head": (decode(sinks=torch.ones(2)), InvalidProblem, "sinks: got shape [2]"),
    "sinks in a list": (decode(sinks=[1.0]), TypeError, "sinks: got list"),
    "sinks sparse": (decode(sinks=torch.ones(4).to_sparse()), InvalidProblem, "sinks: got torch.sparse_coo"),
    "sinks elsewhere": (decode(sinks=torch.ones(4, device="meta")), InvalidProblem, "sinks: got device meta"),
}
OUTS = {
    "out is a list": (decode(out=[]), TypeError, "out: got list"),
    "out of another shape": (decode(out=torch.empty(2, 3, 4, 8)), InvalidProblem, "out: got shape [2, 3, 4, 8]"),
    "out of another dtype": (decode(out=torch.empty(2, 3, 4, 6).half()), InvalidProblem, "out: got torch.float16"),
}
WRITES = {
    "k_new is None": (append(k_new=None), TypeError, "k_new: got NoneType"),
    "k_new of rank 3": (append(k_new=NEW[0]), InvalidProblem, "k_new: got shape [1, 2, 8]"),
    "v_new of other tokens": (append(v_new=torch.randn(2, 2, 2, 6)), InvalidProblem, "v_new: got shape [2, 2, 2, 6]"),
    "v_new of other heads": (append(v_new=NEW_V[:, :, :1]), InvalidProblem, "v_new: got heads and width [1, 6]"),
    "k_new of another width": (append(k_new=NEW[..., :5]), InvalidProblem, "k_new: got heads and width [2, 5]"),
    "k_new of another dtype": (
        append(k_new=NEW.half(), v_new=NEW_V.half()),
        InvalidProblem,
        "cache.k: got torch.float32",
    ),
    "v_new of another dtype": (append(v_new=NEW_V.half()), InvalidProblem, "v_new: got torch.float16"),
    "k_new in 8 bits": (append(k_new=NEW.to(torch.float8_e4m3fn)), InvalidProblem, "k_new: got torch.float8_e4m3fn"),
    "k_new of another batch": (append(k_new=NEW[:1], v_new=NEW_V[:1]), InvalidProblem, "cache.k: got batch 2"),
    "an expanded cache": (
        append(DENSE._replace(k=K[:1].expand(2, -1, -1, -1))),
        InvalidProblem,
        "cache.k: got strides (0,",
    ),
    "keys that overlap": (append(DENSE._replace(k=OVERLAPPING)), InvalidProblem, "cache.k: got strides (56, 8, 8, 1)"),
    "values that overlap": (
        append(DENSE._replace(v=OVERLAPPING), v_new=NEW),
        InvalidProblem,
        "cache.v: got strides (56, 8, 8, 1)",
    ),
    "pages that overlap": (
        append(PAGED._replace(k_pages=OVERLAPPING_PAGES)),
        InvalidProblem,
        "cache.k_pages: got strides (32, 16, 8, 1)",
    ),
    "a cache whose values lie in its keys": (
        append(DENSE._replace(v=K[..., :6])),
        InvalidProblem,
        "cache.v: got memory that keys lie in",
    ),
    "keys moved within a cache": (append(k_new=K[:, 1:2]), InvalidProblem, "k_new: got memory that the cache lies in"),
    "values of keys": (append(v_new=K[:, :1, :, :6]), InvalidProblem, "v_new: got memory that the cache lies in"),
    "rotary is a pair": (append(rotary=(ANGLES, ANGLES)), TypeError, "rotary: got tuple"),
    "rotary too wide": (
        append(rotary=strobe.Rotary(*[torch.ones(9, 5)] * 2)),
        InvalidProblem,
        "rotary.cos: got rotary_dim 10",
    ),
    "rotary of two shapes": (
        append(rotary=strobe.Rotary(ANGLES, ANGLES[:9])),
        InvalidProblem,
        "rotary.sin: got shape [9, 4]",
    ),
    "rotary without sin": (append(rotary=strobe.Rotary(ANGLES, None)), TypeError, "rotary.sin: got NoneType"),
    "rotary of rank 1": (
        append(rotary=strobe.Rotary(ANGLES[0], ANGLES[0])),
        InvalidProblem,
        "rotary.cos: got shape [4]",
    ),
    "rotary of ints": (
        append(rotary=strobe.Rotary(ANGLES.long(), ANGLES.long())),
        InvalidProblem,
        "rotary.cos: got torch.int64",
    ),
    "rotary of no position": (
        append(rotary=strobe.Rotary(ANGLES[:0], ANGLES[:0])),
        InvalidProblem,
        "rotary.cos: got shape [0, 4]",
    ),
    "interleaved is an int": (
        append(rotary=strobe.Rotary(ANGLES, ANGLES, 1)),
        TypeError,
        "rotary.interleaved: got int",
    ),
    "k is a list": (lambda _: strobe.quantize_kv([1.0], V), TypeError, "k: got list"),
    "k of ints": (lambda _: strobe.quantize_kv(K.long(), V), InvalidProblem, "k: got torch.int64"),
    "v of rank 1": (lambda _: strobe.quantize_kv(K, V[0, 0, 0]), InvalidProblem, "v: got shape [6]"),
    "v of other heads here": (lambda _: strobe.quantize_kv(K, V[:, :, :1]), InvalidProblem, "v: got 1 heads"),
}
READERS = (strobe.attention_decode, strobe.partial_attention_decode, strobe.explain_decode)
ROWS = [(name, *row, function) for function in READERS for name, row in READS.items()]
ROWS += [(name, *row, function) for function in READERS[::2] for name, row in MORE_READS.items()]
ROWS += [(name, *row, strobe.attention_decode) for name, row in (OUTS | WRITES).items()]


@pytest.mark.parametrize(
    "name, call, error, words, function",
    ROWS,
    ids=lambda value: value if isinstance(value, str) and " " in value else "",
)
def test_bad_calls(name, call, error, words, function):
    with pytest.raises(error) as caught:
        call(function)
    message = str(caught.value)
    assert message.startswith(words), message
    assert ", expected " in message and "; " in message


def test_what_vmap_cannot_be_given():
    with pytest.raises(UnsupportedProblem, match="append under vmap: its batch"):
        torch.vmap(lambda new: strobe.append(DENSE, new, NEW_V))(NEW[None])
    with pytest.raises(UnsupportedProblem, match="out= under vmap: leave"):
        torch.vmap(lambda q, out: strobe.attention_decode(q, DENSE, out=out))(Q[None], torch.empty(1, 2, 3, 4, 6))


def test_the_good_calls_that_the_bad_ones_were_made_from():
    for cache in (DENSE, PAGED):
        for function in READERS:
            function(Q, cache)
        strobe.append(cache._replace(seqlens=INT(0, 0)), NEW, NEW_V, rotary=strobe.Rotary(ANGLES, ANGLES))
    strobe.attention_decode(
        Q, DENSE._replace(k=K8, v=V8, k_scale=torch.ones(2)), sinks=torch.ones(4), out=torch.empty(2, 3, 4, 6)
    )


def test_the_door_works_on_fake_tensors_and_says_the_same():
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (Q, K, V, LENGTHS)]
        assert strobe.attention_decode(fakes[0], DenseCache(*fakes[1:])).shape == (2, 3, 4, 6)
        with pytest.raises(InvalidProblem, match=r"cache\.seqlens: got torch\.int16"):
            strobe.attention_decode(fakes[0], DenseCache(*fakes[1:3], fakes[3].short()))


def test_a_seen_decode_is_decided_fast():
    call = DecodeCall(Q, K, V, LENGTHS, right=0)
    ops_decode.decide(call)
    times = []
    for _ in range(200):
        begin = perf_counter()
        ops_decode.decide(call)
        times.append(perf_counter() - begin)
    assert median(times) < 20e-6
