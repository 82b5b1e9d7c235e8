"""Bad calls of attention, one a row: tensors, options, masks, outputs, packed sequences, numbers beyond float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

import strobe
from strobe import InvalidProblem, UnsupportedProblem

Q, K, V = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 6)
P = torch.randn(12, 4, 8)  # packed
OUT = torch.empty(2, 5, 4, 6)
INT = lambda *values: torch.tensor(values, dtype=torch.int32)
OFFSETS = INT(0, 5, 12)
LONG = lambda *shape: torch.zeros(shape, dtype=torch.int64)
BEHIND = torch.randn(2, 6, 4, 6)
SHARED, WIDE = torch.randn(1, 8, 4, 8), torch.randn(2, 5, 4, 12)
IDS_Q, IDS_K = torch.zeros(2, 5, dtype=torch.int32), torch.zeros(2, 7, dtype=torch.int32)


class Bad(NamedTuple):
    name: str
    call: Callable[[], object]
    error: type[Exception]
    argument: str
    got: str = ""  # a word of what the message says it got


def _dense(
    name: str, error: type[Exception], argument: str, got: str = "", q=Q, k=K, v=V, function=strobe.attention, **options
) -> Bad:
    return Bad(name, lambda: function(q, k, v, **options), error, argument, got)


def _packed(
    name: str,
    error: type[Exception],
    argument: str,
    got: str = "",
    q=P,
    k=P,
    v=P,
    function=strobe.attention_varlen,
    **options,
) -> Bad:
    return Bad(name, lambda: function(q, k, v, **({"cu_seqlens_q": OFFSETS} | options)), error, argument, got)


def _spread(t: torch.Tensor) -> torch.Tensor:
    """The same values with stride 2 in the last dimension."""
    return torch.stack([t, t], -1)[..., 0]


TENSORS = [
    row
    for function in (strobe.attention, strobe.partial_attention, strobe.explain, strobe.supports)
    for row in (
        _dense(f"{function.__name__}: q is a list", TypeError, "q", "list", q=[1.0], function=function),
        _dense(f"{function.__name__}: k is None", TypeError, "k", "NoneType", k=None, function=function),
        _dense(f"{function.__name__}: v is an array", TypeError, "v", "ndarray", v=V.numpy(), function=function),
        _dense(f"{function.__name__}: q of rank 3", InvalidProblem, "q", "[5, 4, 8]", q=Q[0], function=function),
        _dense(
            f"{function.__name__}: v of rank 5", InvalidProblem, "v", "[1, 2, 7, 2, 6]", v=V[None], function=function
        ),
        _dense(
            f"{function.__name__}: k of another dtype",
            InvalidProblem,
            "k",
            "torch.float64",
            k=K.double(),
            function=function,
        ),
        _dense(
            f"{function.__name__}: heads not divisible",
            InvalidProblem,
            "k",
            "3 heads",
            k=torch.randn(2, 7, 3, 8),
            v=torch.randn(2, 7, 3, 6),
            function=function,
        ),
        _dense(
            f"{function.__name__}: k on another device", InvalidProblem, "k", "meta", k=K.to("meta"), function=function
        ),
    )
] + [
    _dense("q is a number", TypeError, "q", "float", q=1.0),
    _dense("q is a scalar tensor", InvalidProblem, "q", "[]", q=torch.tensor(1.0)),
    _dense("q, k and v packed", InvalidProblem, "q", "[12, 4, 8]", q=P, k=P, v=P),
    _dense("q of ints", InvalidProblem, "q", "torch.int64", q=LONG(2, 5, 4, 8)),
    _dense("q of bools", InvalidProblem, "q", "torch.bool", q=Q > 0),
    _dense("q complex", InvalidProblem, "q", "torch.complex64", q=Q.to(torch.complex64)),
    _dense("q in float8", InvalidProblem, "q", "float8", q=Q.to(torch.float8_e4m3fn)),
    _dense("v of another dtype", InvalidProblem, "v", "torch.bfloat16", v=V.bfloat16()),
    _dense("q sparse", InvalidProblem, "q", "sparse_coo", q=Q.to_sparse()),
    _dense("v sparse", InvalidProblem, "v", "sparse_coo", v=V.to_sparse()),
    _dense("k nested", InvalidProblem, "k", "nested", k=torch.nested.nested_tensor([K[0], K[1]])),
    _dense(
        "k nested, of which gradients are wanted",
        InvalidProblem,
        "k",
        "nested",
        k=torch.nested.nested_tensor([K[0], K[1]], requires_grad=True),
    ),
    _dense("q jagged", InvalidProblem, "q", "nested", q=torch.nested.nested_tensor([Q[0], Q[1]], layout=torch.jagged)),
    _dense("q on meta, k and v not", InvalidProblem, "k", "cpu", q=Q.to("meta")),
    _dense("v on another device", InvalidProblem, "v", "meta", v=V.to("meta")),
    _dense("v of other heads", InvalidProblem, "v", "1 heads", v=V[:, :, :1]),
    _dense("no key heads", InvalidProblem, "k", "0 heads", k=K[:, :, :0], v=V[:, :, :0]),
    _dense(
        "more key heads than query heads",
        InvalidProblem,
        "k",
        "8 heads",
        k=torch.randn(2, 7, 8, 8),
        v=torch.randn(2, 7, 8, 6),
    ),
    _dense("k of another width", InvalidProblem, "k", "7", k=K[..., :7]),
    _dense("q of width 0", InvalidProblem, "q", "0", q=Q[..., :0], k=K[..., :0]),
    _dense("v of width 0", InvalidProblem, "v", "0", v=V[..., :0]),
    _dense("k of another batch", InvalidProblem, "k", "batch 1", k=K[:1]),
    _dense("v of another batch", InvalidProblem, "v", "batch 1", v=V[:1]),
    _dense("v of another length", InvalidProblem, "v", "6 keys", v=V[:, :6]),
    _dense("q strided", InvalidProblem, "q", "stride 2", q=_spread(Q)),
    _dense("k strided", InvalidProblem, "k", "stride 2", k=_spread(K)),
    _dense("v strided", InvalidProblem, "v", "stride 2", v=_spread(V)),
    _dense("v expanded in its last dimension", InvalidProblem, "v", "stride 0", v=V[..., :1].expand(-1, -1, -1, 6)),
]

OPTIONS = [
    _dense("causal is an int", TypeError, "causal", "int", causal=1),
    _dense("causal is None", TypeError, "causal", "NoneType", causal=None),
    _dense("causal is a tensor", TypeError, "causal", "Tensor", causal=torch.tensor(True)),
    _dense("window is an int", TypeError, "window", "int", window=3),
    _dense("window of one", TypeError, "window", "tuple", window=(3,)),
    _dense("window of three", TypeError, "window", "tuple", window=(3, 3, 3)),
    _dense("window is a string", TypeError, "window", "str", window="33"),
    _dense("window of floats", TypeError, "window left", "float", window=(1.0, 0)),
    _dense("window of bools", TypeError, "window right", "bool", window=(1, True)),
    _dense("window of tensors", TypeError, "window left", "Tensor", window=(torch.tensor(1), 0)),
    _dense("scale is a string", TypeError, "scale", "str", scale="0.1"),
    _dense("scale is a bool", TypeError, "scale", "bool", scale=True),
    _dense("scale is a tensor", TypeError, "scale", "Tensor", scale=torch.tensor(0.1)),
    _dense("scale is complex", TypeError, "scale", "complex", scale=1j),
    _dense("scale is nan", InvalidProblem, "scale", "nan", scale=float("nan")),
    _dense("scale is inf", InvalidProblem, "scale", "inf", scale=float("inf")),
    _dense("scale is -inf", InvalidProblem, "scale", "-inf", scale=-float("inf")),
    _dense("scale beyond a float", InvalidProblem, "scale", "beyond every float", scale=10**400),
    _dense("softcap is 0", InvalidProblem, "softcap", "0", softcap=0),
    _dense("softcap negative", InvalidProblem, "softcap", "-1.0", softcap=-1.0),
    _dense("softcap is nan", InvalidProblem, "softcap", "nan", softcap=float("nan")),
    _dense("softcap is inf", InvalidProblem, "softcap", "inf", softcap=float("inf")),
    _dense("softcap is a string", TypeError, "softcap", "str", softcap="30"),
    _dense("softcap is a bool", TypeError, "softcap", "bool", softcap=True),
    _dense("softcap is a tensor", TypeError, "softcap", "Tensor", softcap=torch.tensor(3.0)),
    _dense("sinks is a list", TypeError, "sinks", "list", sinks=[0.0] * 4),
    _dense("sinks is a number", TypeError, "sinks", "float", sinks=0.0),
    _dense("sinks for the key heads", InvalidProblem, "sinks", "[2]", sinks=torch.zeros(2)),
    _dense("sinks for each batch entry", InvalidProblem, "sinks", "[2, 4]", sinks=torch.zeros(2, 4)),
    _dense("sinks scalar", InvalidProblem, "sinks", "[]", sinks=torch.tensor(0.0)),
    _dense("sinks of ints", InvalidProblem, "sinks", "torch.int64", sinks=LONG(4)),
    _dense("sinks on another device", InvalidProblem, "sinks", "meta", sinks=torch.zeros(4, device="meta")),
    _dense("deterministic is an int", TypeError, "deterministic", "int", deterministic=1),
    _dense("deterministic is a string", TypeError, "deterministic", "str", deterministic="yes"),
    _dense("batch_invariant is None", TypeError, "batch_invariant", "NoneType", batch_invariant=None),
    _dense("batch_invariant is an int", TypeError, "batch_invariant", "int", batch_invariant=0),
    _dense("kernel is a class", TypeError, "kernel", "type", kernel=str),
    _dense("kernel unknown", InvalidProblem, "kernel", "fastest", kernel="fastest"),
    _dense("kernel of an unknown direction", InvalidProblem, "kernel", "cpu.sideways", kernel="cpu.sideways"),
    _dense("kernel of an unknown family", InvalidProblem, "kernel", "tpu.forward", kernel="tpu.forward"),
    _dense("kernel in capitals", InvalidProblem, "kernel", "CPU", kernel="CPU"),
    _dense("explain: kernel unknown", InvalidProblem, "kernel", "fastest", kernel="fastest", function=strobe.explain),
    _dense("supports: kernel unknown", InvalidProblem, "kernel", "fastest", kernel="fastest", function=strobe.supports),
    _dense("supports: scale is nan", InvalidProblem, "scale", "nan", scale=float("nan"), function=strobe.supports),
    _dense("partial: softcap negative", InvalidProblem, "softcap", "-1", softcap=-1, function=strobe.partial_attention),
]

MASKS = [
    _dense("mask is a bool tensor", TypeError, "mask", "Tensor", mask=torch.ones(5, 7, dtype=torch.bool)),
    _dense("mask is a string", TypeError, "mask", "str", mask="causal"),
    _dense("mask is the constructor", TypeError, "mask", "function", mask=strobe.causal),
    _dense(
        "key_lengths for another batch",
        InvalidProblem,
        "mask key_lengths",
        "[3]",
        mask=strobe.key_lengths(INT(1, 2, 3)),
    ),
    _dense("prefix for another batch", InvalidProblem, "mask prefix", "[3]", mask=strobe.prefix_causal(INT(1, 2, 3))),
    _dense("documents of another length", InvalidProblem, "mask ids_q", "[2, 7]", mask=strobe.documents(IDS_K, IDS_K)),
    _dense("documents of other keys", InvalidProblem, "mask ids_k", "[2, 5]", mask=strobe.documents(IDS_Q)),
    _dense(
        "documents of another batch",
        InvalidProblem,
        "mask ids_q",
        "[1, 5]",
        mask=strobe.documents(IDS_Q[:1], IDS_K[:1]),
    ),
    _dense(
        "key_lengths on another device",
        InvalidProblem,
        "key_lengths",
        "meta",
        mask=strobe.key_lengths(INT(1, 2).to("meta")),
    ),
    _dense(
        "mask tensors under explain",
        InvalidProblem,
        "mask key_lengths",
        "[1]",
        mask=strobe.key_lengths(INT(1)),
        function=strobe.explain,
    ),
    Bad("key_lengths is a list", lambda: strobe.key_lengths([1, 2]), TypeError, "key_lengths", "list"),
    Bad("key_lengths is an int", lambda: strobe.key_lengths(3), TypeError, "key_lengths", "int"),
    Bad(
        "key_lengths of int16",
        lambda: strobe.key_lengths(LONG(2).short()),
        InvalidProblem,
        "key_lengths",
        "torch.int16",
    ),
    Bad("key_lengths of rank 2", lambda: strobe.key_lengths(IDS_Q), InvalidProblem, "key_lengths", "[2, 5]"),
    Bad("prefix is a float", lambda: strobe.prefix_causal(1.0), TypeError, "prefix_causal n", "float"),
    Bad("prefix is a bool", lambda: strobe.prefix_causal(True), TypeError, "prefix_causal n", "bool"),
    Bad("prefix is None", lambda: strobe.prefix_causal(None), TypeError, "prefix_causal n", "NoneType"),
    Bad("prefix negative", lambda: strobe.prefix_causal(-1), InvalidProblem, "prefix_causal n", "-1"),
    Bad(
        "prefix of floats",
        lambda: strobe.prefix_causal(torch.zeros(2)),
        InvalidProblem,
        "prefix_causal n",
        "torch.float32",
    ),
    Bad(
        "prefix of rank 0", lambda: strobe.prefix_causal(torch.tensor(1).int()), InvalidProblem, "prefix_causal n", "[]"
    ),
    Bad("documents of a list", lambda: strobe.documents([[0, 1]]), TypeError, "documents ids_q", "list"),
    Bad(
        "documents of int16",
        lambda: strobe.documents(LONG(2, 5).short()),
        InvalidProblem,
        "documents ids_q",
        "torch.int16",
    ),
    Bad("documents of rank 1", lambda: strobe.documents(INT(0, 1)), InvalidProblem, "documents ids_q", "[2]"),
    Bad("documents: ids_k is an int", lambda: strobe.documents(IDS_Q, 3), TypeError, "documents ids_k", "int"),
    Bad(
        "documents: ids_k of another batch",
        lambda: strobe.documents(IDS_Q, IDS_K[:1]),
        InvalidProblem,
        "documents ids_k",
        "batch 1",
    ),
    Bad(
        "documents: ids_k on another device",
        lambda: strobe.documents(IDS_Q, IDS_K.to("meta")),
        InvalidProblem,
        "documents ids_k",
        "meta",
    ),
    Bad(
        "documents twice",
        lambda: strobe.documents(IDS_Q) & strobe.documents(IDS_Q),
        InvalidProblem,
        "mask",
        "documents",
    ),
    Bad("mask joined with a bool", lambda: strobe.causal() & True, TypeError, "mask", "bool"),
    Bad("mask joined with a tensor", lambda: strobe.causal() & torch.ones(5, 7), TypeError, "mask", "Tensor"),
    Bad(
        "mask asked whether it is true",
        lambda: strobe.causal() and strobe.full(),
        TypeError,
        "mask",
        "whether it is true",
    ),
    Bad("window() of a float", lambda: strobe.window(0.5, None), TypeError, "window left", "float"),
    Bad("window() of a bool", lambda: strobe.window(None, False), TypeError, "window right", "bool"),
    Bad("window() of a string", lambda: strobe.window(None, "1"), TypeError, "window right", "str"),
]

OUTPUTS = [
    _dense("out is a list", TypeError, "out", "list", out=[]),
    _dense("out is True", TypeError, "out", "bool", out=True),
    _dense("out like q", InvalidProblem, "out", "[2, 5, 4, 8]", out=torch.empty_like(Q)),
    _dense("out of another rank", InvalidProblem, "out", "[5, 4, 6]", out=OUT[0]),
    _dense("out of another dtype", InvalidProblem, "out", "torch.float64", out=OUT.double()),
    _dense("out on another device", InvalidProblem, "out", "meta", out=OUT.to("meta")),
    _dense("out strided in its last dimension", InvalidProblem, "out", "stride 2", out=_spread(OUT)),
    _dense("out expanded", InvalidProblem, "out", "strides", out=torch.empty(2, 5, 1, 6).expand(-1, -1, 4, -1)),
    Bad(
        "out under vmap",
        lambda: torch.vmap(lambda q, out: strobe.attention(q, K, V, out=out))(Q[None], OUT[None]),
        UnsupportedProblem,
        "out=",
    ),
    _dense("out is v", InvalidProblem, "out", "memory that v lies in", v=OUT[:, :, :2], k=K[:, :5], out=OUT),
    _dense(
        "out overlaps q",
        InvalidProblem,
        "out",
        "memory that q lies in",
        q=SHARED[:, :5],
        k=K[:1],
        v=K[:1],
        out=SHARED[:, 3:8],
    ),
    _dense(
        "out is a slice that is q",
        InvalidProblem,
        "out",
        "memory that q lies in",
        q=WIDE[..., :8],
        v=K,
        out=WIDE[..., :8],
    ),
    _dense(
        "out overlaps itself",
        InvalidProblem,
        "out",
        "strides",
        out=torch.empty(999).as_strided((2, 5, 4, 6), (120, 24, 5, 1)),
    ),
    _dense(
        "out is rows behind k",
        InvalidProblem,
        "out",
        "memory that k lies in",
        q=Q[:, :, :, :6],
        k=BEHIND[:, 1:],
        v=BEHIND[:, 1:],
        out=BEHIND[:, :-1],
    ),
    _dense("out sparse", InvalidProblem, "out", "sparse_coo", out=OUT.to_sparse()),
    _dense("out wants gradients", UnsupportedProblem, "out=", out=OUT.clone().requires_grad_()),
    _dense("out where q wants gradients", UnsupportedProblem, "out=", q=Q.clone().requires_grad_(), out=OUT),
    _packed("varlen: out of another length", InvalidProblem, "out", "[11, 4, 8]", out=torch.empty(11, 4, 8)),
]

VARLEN = [
    row
    for function in (strobe.attention_varlen, strobe.partial_attention_varlen, strobe.explain_varlen)
    for row in (
        _packed(f"{function.__name__}: q is None", TypeError, "q", "NoneType", q=None, function=function),
        _packed(f"{function.__name__}: q of rank 4", InvalidProblem, "q", "[2, 5, 4, 8]", q=Q, function=function),
        _packed(
            f"{function.__name__}: offsets are a list",
            TypeError,
            "cu_seqlens_q",
            "list",
            cu_seqlens_q=[0, 5, 12],
            function=function,
        ),
        _packed(
            f"{function.__name__}: offsets of int16",
            InvalidProblem,
            "cu_seqlens_q",
            "torch.int16",
            cu_seqlens_q=OFFSETS.short(),
            function=function,
        ),
        _packed(
            f"{function.__name__}: offsets of rank 2",
            InvalidProblem,
            "cu_seqlens_q",
            "[1, 3]",
            cu_seqlens_q=OFFSETS[None],
            function=function,
        ),
        _packed(
            f"{function.__name__}: max_seqlen_q is a tensor",
            TypeError,
            "max_seqlen_q",
            "Tensor",
            max_seqlen_q=torch.tensor(7),
            function=function,
        ),
    )
] + [
    _packed("offsets are None", TypeError, "cu_seqlens_q", "NoneType", cu_seqlens_q=None),
    _packed("k's offsets are a tuple", TypeError, "cu_seqlens_k", "tuple", cu_seqlens_k=(0, 5, 12)),
    _packed("k's offsets of int16", InvalidProblem, "cu_seqlens_k", "torch.int16", cu_seqlens_k=OFFSETS.short()),
    _packed("offsets scalar", InvalidProblem, "cu_seqlens_q", "[]", cu_seqlens_q=torch.tensor(0).int()),
    _packed("offsets empty", InvalidProblem, "cu_seqlens_q", "[0]", cu_seqlens_q=OFFSETS[:0]),
    _packed("k's offsets empty", InvalidProblem, "cu_seqlens_k", "[0]", cu_seqlens_k=OFFSETS[:0]),
    _packed("offsets of different counts", InvalidProblem, "cu_seqlens_k", "2 offsets", cu_seqlens_k=INT(0, 12)),
    _packed("offsets on another device", InvalidProblem, "cu_seqlens_q", "meta", cu_seqlens_q=OFFSETS.to("meta")),
    _packed("k's offsets on another device", InvalidProblem, "cu_seqlens_k", "meta", cu_seqlens_k=OFFSETS.to("meta")),
    _packed("offsets decrease", InvalidProblem, "cu_seqlens_q", cu_seqlens_q=INT(0, 7, 5), cu_seqlens_k=INT(0, 5, 12)),
    _packed("k's offsets decrease", InvalidProblem, "cu_seqlens_k", cu_seqlens_k=INT(0, 7, 5)),
    _packed("offsets negative", InvalidProblem, "cu_seqlens_q", cu_seqlens_q=INT(-1, 5, 12), cu_seqlens_k=OFFSETS),
    _packed("offsets beyond T_q", InvalidProblem, "cu_seqlens_q", cu_seqlens_q=INT(0, 5, 13), cu_seqlens_k=OFFSETS),
    _packed("k's offsets beyond T_k", InvalidProblem, "cu_seqlens_k", cu_seqlens_k=INT(0, 5, 2**31 - 1)),
    _packed("max_seqlen_q is a float", TypeError, "max_seqlen_q", "float", max_seqlen_q=7.0),
    _packed("max_seqlen_q is a bool", TypeError, "max_seqlen_q", "bool", max_seqlen_q=True),
    _packed("max_seqlen_k is a string", TypeError, "max_seqlen_k", "str", max_seqlen_k="7"),
    _packed("max_seqlen_q negative", InvalidProblem, "max_seqlen_q", "-1", max_seqlen_q=-1),
    _packed("max_seqlen_k negative", InvalidProblem, "max_seqlen_k", "-7", max_seqlen_k=-7),
    _packed("varlen: v of another length", InvalidProblem, "v", "11 keys", v=P[:11]),
    _packed("varlen: v of other heads", InvalidProblem, "v", "2 heads", v=P[:, :2]),
    _packed("varlen: q of ints", InvalidProblem, "q", "torch.int32", q=P.int()),
    _packed("varlen: q strided", InvalidProblem, "q", "stride 2", q=_spread(P)),
    _packed("varlen: sinks of another count", InvalidProblem, "sinks", "[3]", sinks=torch.zeros(3)),
    _packed("varlen: window of one", TypeError, "window", "list", window=[1]),
    _packed("varlen: causal is a string", TypeError, "causal", "str", causal="yes"),
    _packed("varlen: scale is nan", InvalidProblem, "scale", "nan", scale=float("nan")),
    Bad(
        "varlen: mask of documents",
        lambda: strobe.attention_varlen(P, P, P, cu_seqlens_q=OFFSETS, mask=strobe.prefix_causal(2)),
        InvalidProblem,
        "mask",
    ),
]

FLOAT32 = [  # what scores in float32 cannot be made with
    row
    for function in (strobe.attention, strobe.partial_attention, strobe.explain)
    for row in (
        _dense(f"{function.__name__}: a vast scale", InvalidProblem, "scale", "1e+39", function=function, scale=1e39),
        _dense(
            f"{function.__name__}: a vast scale in a window",
            InvalidProblem,
            "scale",
            "-1e+39",
            function=function,
            scale=-1e39,
            window=(2, 0),
        ),
        _dense(
            f"{function.__name__}: a vast softcap", InvalidProblem, "softcap", "1e+39", function=function, softcap=1e39
        ),
        _dense(
            f"{function.__name__}: a tiny softcap", InvalidProblem, "softcap", "1e-46", function=function, softcap=1e-46
        ),
        _dense(
            f"{function.__name__}: a tiny softcap for its scale",
            InvalidProblem,
            "softcap",
            "1e-10",
            function=function,
            softcap=1e-10,
            scale=1e30,
        ),
        _dense(
            f"{function.__name__}: a vast softcap for its scale",
            InvalidProblem,
            "softcap",
            "1e+38",
            function=function,
            softcap=1e38,
            scale=1e-12,
        ),
    )
]
