"""The calls whose kernels are compiled offline. For each kernel family they cover every tiling, every kind of mask and
every option.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from strobe.mods.mask import mask_mod
from strobe.mods.score import alibi
from strobe.ops.cached_functions import bind_functions
from strobe.problem import mask as masks
from strobe.problem.append import AppendCall
from strobe.problem.cache import FP8
from strobe.problem.call import Call
from strobe.problem.decode import DecodeCall
from strobe.problem.mask import NO_BOUND, Mask
from strobe.problem.paged import PagedCall

_WIDTHS = {  # of queries and keys, and of values
    "d64": (64, 64),
    "d96": (96, 96),
    "d128": (128, 128),
    "d192/128": (192, 128),
    "d192": (192, 192),
    "d256": (256, 256),
}


def _dense(
    width: int, width_v: int = 0, mask: Mask | None = None, dtype: torch.dtype = torch.bfloat16,
    heads: tuple[int, int] = (4, 4),
    rows: int = 256, keys: int = 256, batch: int = 1, **options,
) -> Call:  # fmt: skip
    shapes = ((rows, heads[0], width), (keys, heads[1], width), (keys, heads[1], width_v or width))
    q, k, v = (torch.empty(batch, *shape, dtype=dtype) for shape in shapes)
    return Call(q, k, v, needs_grad=True)._replace(**options).with_mask(masks.full() if mask is None else mask)


def _packed(width: int, mask: Mask, heads: tuple[int, int], tokens: int = 256, **options) -> Call:
    q, k, v = (torch.empty(tokens, n, width, dtype=torch.bfloat16) for n in (heads[0], heads[1], heads[1]))
    offsets = torch.tensor([0, 100, tokens], dtype=torch.int32)
    return (
        Call(q, k, v, needs_grad=True, cu_seqlens_q=offsets, cu_seqlens_k=offsets)._replace(**options).with_mask(mask)
    )


def _runs(width: int, heads: tuple[int, int], tokens: int = 256) -> Call:
    """Two runs of rows over overlapping keys, as a rank of context parallelism has them."""
    call = _packed(width, masks.causal(), heads, tokens)
    rows = torch.tensor([[0, tokens // 2, 3 * tokens // 2], [0, 0, 0]], dtype=torch.int32)
    return call._replace(cu_seqlens_k=rows, max_seqlen_k=3 * tokens // 2)


def _documents(keys: int = 256) -> Mask:
    return masks.documents(torch.zeros(1, keys, dtype=torch.int32))


def _lengths(keys: int = 256) -> Mask:
    return masks.key_lengths(torch.tensor([keys - 56], dtype=torch.int32))


_ALIKE: dict[str, Any] = {"batch_invariant": True, "needs_grad": False}

# Portable kernels: together these cover every tiling in the tables, every kind of load, every part of a mask and every
# option. The dtype is bfloat16 unless the name has another.
CASES: dict[str, Callable[[], Call]] = {
    "d64 dense": lambda: _dense(64),
    "d64 causal": lambda: _dense(64, mask=masks.causal()),
    "d128 dense": lambda: _dense(128),
    "d128 causal": lambda: _dense(128, mask=masks.causal()),
    "d256 dense": lambda: _dense(256),
    "d256 causal": lambda: _dense(256, mask=masks.causal()),
    "d64 causal float16": lambda: _dense(64, mask=masks.causal(), dtype=torch.float16),
    "d256 causal float16": lambda: _dense(256, mask=masks.causal(), dtype=torch.float16),
    "d192/128 causal": lambda: _dense(192, 128, masks.causal()),
    "d96 causal": lambda: _dense(96, mask=masks.causal()),
    "d21 documents prefix": lambda: _dense(21, mask=_documents() & masks.prefix_causal(3)),
    "d128 documents causal": lambda: _dense(128, mask=_documents() & masks.causal()),
    "d128 key lengths": lambda: _dense(128, mask=_lengths()),
    "d64 group 8 window": lambda: _dense(64, mask=masks.window(1024, 0), heads=(8, 1)),
    "d64 packed group 4 causal": lambda: _packed(64, masks.causal(), (8, 2)),
    "d128 packed window sinks softcap": lambda: _packed(
        128, masks.window(64, 0), (8, 2), sinks=torch.zeros(8), softcap=20.0
    ),
    "d128 runs group 8 causal": lambda: _runs(128, (8, 1)),
    "d128 partial, scale < 0": lambda: _dense(128, partial=True, scale=-0.1),
    "d64 float32": lambda: _dense(64, dtype=torch.float32),
    "d256 causal float32": lambda: _dense(256, mask=masks.causal(), dtype=torch.float32),
    "d64 causal float64": lambda: _dense(64, mask=masks.causal(), dtype=torch.float64),
    "d256 float64": lambda: _dense(256, dtype=torch.float64),
    "d128 causal batch invariant": lambda: _dense(128, mask=masks.causal(), **_ALIKE),
    "d64 packed group 4 window batch invariant": lambda: _packed(64, masks.window(64, 0), (8, 2), **_ALIKE),
}


def _hopper_cases() -> dict[str, Callable[[], Call]]:
    """Hopper: each tiling with each kind of band, keys that end within a tile ("ragged"), options, and sizes of 1."""
    bands = {
        "dense": masks.full(),
        "causal": masks.causal(),
        "window": masks.window(100, 20),
        "window left": masks.window(100, None),
    }
    cases: dict[str, Callable[[], Call]] = {}
    for name, widths in {"d64": (64, 64), "d128": (128, 128), "d192/128": (192, 128), "d256": (256, 256)}.items():
        cases |= {f"{name} {band}": partial(_dense, *widths, mask=mask) for band, mask in bands.items()}
        cases[f"{name} ragged"] = partial(_dense, *widths, keys=253)
        cases[f"{name} window sinks softcap"] = partial(
            _dense, *widths, mask=bands["window"], sinks=torch.zeros(4), softcap=20.0
        )
        cases[f"{name} one row"] = partial(_dense, *widths, rows=1, heads=(1, 1))
    for name, widths in {"d96": (96, 96), "d192": (192, 192), "d256/128": (256, 128)}.items():
        cases |= {f"{name} {band}": partial(_dense, *widths, mask=mask) for band, mask in bands.items()}
    for width in (64, 128):
        cases[f"d{width} causal float16"] = partial(_dense, width, mask=bands["causal"], dtype=torch.float16)
    for name, widths in {"d64": (64, 64), "d128": (128, 128), "d192/128": (192, 128), "d256": (256, 256)}.items():
        cases[f"{name} causal deterministic"] = partial(_dense, *widths, mask=bands["causal"], deterministic=True)
    cases["d128 packed causal"] = partial(_packed, 128, bands["causal"], (4, 4))
    for width, heads in ((128, (4, 4)), (192, (8, 1))):
        cases[f"d{width} packed causal deterministic"] = partial(
            _packed, width, bands["causal"], heads, deterministic=True
        )
    for name, width in {"d64": 64, "d128": 128, "d256": 256}.items():  # the heads of a group are divided among programs
        cases[f"{name} group 8 causal"] = partial(_dense, width, mask=bands["causal"], heads=(8, 1))
    cases["d128 packed group 4 window"] = partial(_packed, 128, bands["window"], (8, 2))
    cases["d128 runs group 8 causal, many keys"] = partial(_runs, 128, (8, 1), 2 * 8192)
    shared = {
        "d96 group 8 dense, 5 rows": (96, 96),
        "d128 group 8 causal, 5 rows": (128, 128),
        "d192/128 group 3 causal, 5 rows": (192, 128),
        "d256 group 4 window, 5 rows": (256, 256),
    }
    for name, widths in shared.items():  # the heads of a group share a tile
        group, band = name.removesuffix(", 5 rows").split()[2:]
        cases[name] = partial(_dense, *widths, mask=bands[band], heads=(2 * int(group), 2), rows=5)
    for name, widths in _WIDTHS.items():
        cases[f"{name} documents causal"] = partial(_dense, *widths, mask=_documents() & bands["causal"])
        cases[f"{name} documents causal, many keys"] = partial(
            _dense, *widths, mask=_documents(2048) & bands["causal"], rows=2048, keys=2048, needs_grad=False
        )
    cases["d192 prefix"] = partial(_dense, 192, mask=masks.prefix_causal(100))
    for name, width in {"d64": 64, "d128": 128, "d256": 256}.items():
        cases[f"{name} key lengths"] = partial(_dense, width, mask=_lengths())
        cases[f"{name} prefix"] = partial(_dense, width, mask=masks.prefix_causal(100))
        cases[f"{name} key lengths, many keys"] = partial(
            _dense, width, mask=_lengths(2048), rows=2048, keys=2048, needs_grad=False
        )
    few = (
        masks.documents(torch.zeros(1, 5, dtype=torch.int32), torch.zeros(1, 256, dtype=torch.int32))
        & bands["window"]
        & _lengths()
    )
    cases["d128 group 4 documents window key lengths, 5 rows"] = partial(
        _dense, 128, mask=few, heads=(8, 2), rows=5, sinks=torch.zeros(8), softcap=20.0
    )
    cases |= _many_keys()
    options = {"sinks": torch.zeros(32), "softcap": 20.0}
    cases["d64 group 16 window sinks softcap, 5 rows"] = partial(
        _dense, 64, mask=bands["window"], heads=(32, 2), rows=5, **options
    )
    for name, widths in {"d64": (64, 64), "d128": (128, 128), "d192/128": (192, 128), "d256": (256, 256)}.items():
        cases[f"{name} causal batch invariant"] = partial(_dense, *widths, mask=bands["causal"], **_ALIKE)
    cases["d128 packed group 4 window sinks batch invariant"] = partial(
        _packed, 128, bands["window"], (8, 2), sinks=torch.zeros(8), **_ALIKE
    )
    return cases | {
        "d64 packed group 4 causal sinks": partial(_packed, 64, bands["causal"], (8, 2), sinks=torch.zeros(8))
    }


def _many_keys() -> dict[str, Callable[[], Call]]:
    """Kernels for many keys. Forwards use optimistic softmax, except for float16. Backwards clear dq's sum although a
    mask bounds the keys.
    """
    bands = {"dense": masks.full(), "causal": masks.causal(), "window": masks.window(3000, 20)}
    many = partial(_dense, rows=8192, keys=8192, needs_grad=False)
    cases: dict[str, Callable[[], Call]] = {}
    for name, widths in _WIDTHS.items():
        if name == "d256":  # its forward uses ordinary softmax
            continue
        cases |= {f"{name} {band}, many keys": partial(many, *widths, mask=mask) for band, mask in bands.items()}
        for band in ("causal", "window") if max(widths) <= 128 else ():
            cases[f"{name} {band}, many keys"] = partial(many, *widths, mask=bands[band], needs_grad=True)
    for band in ("dense", "causal"):  # d64 has other tiles for this many keys
        cases[f"d64 {band} of 32768, many keys"] = partial(many, 64, mask=bands[band], rows=32768, keys=32768)
    for width in (64, 128):
        cases[f"d{width} causal float16, many keys"] = partial(many, width, mask=bands["causal"], dtype=torch.float16)
    cases["d128 ragged, many keys"] = partial(many, 128, keys=8189)
    cases["d128 window left, many keys"] = partial(many, 128, mask=masks.window(1000, None))
    cases["d64 group 8 window, many keys"] = partial(many, 64, mask=bands["window"], heads=(8, 1))
    cases["d64 window sinks softcap, many keys"] = partial(
        many, 64, mask=bands["window"], sinks=torch.zeros(4), softcap=20.0
    )
    cases["d128 causal deterministic, many keys"] = partial(
        many, 128, mask=bands["causal"], needs_grad=True, deterministic=True
    )
    cases["d128 group 8 causal, many keys"] = partial(many, 128, mask=bands["causal"], heads=(8, 1), needs_grad=True)
    return cases | {"d128 packed causal, many keys": partial(_packed, 128, bands["causal"], (4, 4), tokens=2 * 8192)}


def _decode(
    width: int, page_size: int = 0, tokens: int = 1, dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None, keys: int = 4096,
    heads: tuple[int, int] = (32, 8), **options,
) -> DecodeCall:  # fmt: skip
    pages = (keys // page_size, page_size) if page_size else (1, keys)
    k, v = (torch.empty(*pages, heads[1], width, dtype=cache_dtype or dtype) for _ in range(2))
    table = torch.zeros(1, keys // page_size, dtype=torch.int32) if page_size else None
    scales = [torch.ones(heads[1]) if cache_dtype else None] * 2
    q, length = torch.empty(1, tokens, heads[0], width, dtype=dtype), torch.zeros(1, dtype=torch.int32)
    return DecodeCall(q, k, v, length, table, k_scale=scales[0], v_scale=scales[1], **{"right": 0, **options})


def _append(page_size: int, cache_dtype: torch.dtype, interleaved: bool | None = None) -> AppendCall:
    to, new = _decode(128, page_size, cache_dtype=cache_dtype), torch.empty(1, 2, 8, 128, dtype=torch.bfloat16)
    cos = sin = None if interleaved is None else torch.empty(4096, 32)
    scales = (None, None) if cache_dtype == torch.bfloat16 else (to.k_scale, to.v_scale)
    return AppendCall(new, new, to.k, to.v, to.seqlens, to.page_table, *scales, cos, sin, None, bool(interleaved))


def _paged(width: int, page_size: int = 16, tokens: int = 512, promised: int = NO_BOUND, **options) -> PagedCall:
    """Four sequences. options: as in `_decode`."""
    token_scales = options.pop("token_scales", False)
    one = _decode(width, page_size, **options)
    k, v = (t.expand(*t.shape) for t in one[1:3]) if page_size else (t.repeat(4, 1, 1, 1) for t in one[1:3])
    scales = [torch.ones(k.shape[:3])] * 2 if token_scales else one[6:8]
    four: Any = [None if t is None else t.repeat(4, *[1] * (t.dim() - 1)) for t in one[3:6]]
    q, offsets = one.q[0, :1].repeat(tokens, 1, 1), torch.tensor([0, tokens, tokens, tokens, tokens], dtype=torch.int32)
    rest: Any = *four[1:], *scales, one.sinks, promised, *one[9:-1]
    return PagedCall(q, k, v, four[0], offsets, *rest)


def _append_packed(page_size: int) -> AppendCall:
    one = _append(page_size, torch.bfloat16)
    return one._replace(k_new=one.k_new[0], v_new=one.v_new[0], cu_seqlens_q=torch.tensor([0, 2], dtype=torch.int32))


def _append_to_slots(cache_dtype: torch.dtype) -> AppendCall:
    """Of an 8-bit cache with a scale for each key and head."""
    one, slots = _append(16, cache_dtype), torch.zeros(2, dtype=torch.int64)
    k_scale, v_scale = (torch.ones(one.k.shape[:3]) if cache_dtype == FP8 else None for _ in range(2))
    packed = one._replace(k_new=one.k_new[0], v_new=one.v_new[0], seqlens=slots, page_table=None, at_slots=True)
    return packed._replace(k_scale=k_scale, v_scale=v_scale)


# Portable decode and append: every way to address a key, to store one, and to split. Then packed queries over a cache:
# each kind of tile, of scales and of splits.
DECODES: dict[str, Callable[[], DecodeCall | PagedCall | AppendCall]] = {
    "d128 causal": lambda: _decode(128, 16),
    "d128 pages of 1": lambda: _decode(128, 1),
    "d128 pages of 128": lambda: _decode(128, 128),
    "d128 rows, 16 tokens": lambda: _decode(128, tokens=16),
    "d64 rows, left padded": lambda: _decode(64, k_start=torch.zeros(1, dtype=torch.int32)),
    "d128 one split, window sinks": lambda: _decode(128, 16, keys=64, left=64, sinks=torch.zeros(32)),
    "d128 float8, 4 tokens, softcap": lambda: _decode(128, 16, 4, cache_dtype=FP8, softcap=20.0),
    "d256 pages of 16": lambda: _decode(256, 16),
    "d256 16 tokens": lambda: _decode(256, 16, 16),
    "d128 batch invariant": lambda: _decode(128, 16, batch_invariant=True),
    "d21 float16": lambda: _decode(21, 16, dtype=torch.float16),
    "d64 float32": lambda: _decode(64, 16, dtype=torch.float32),
    "d256 float64, 4 tokens": lambda: _decode(256, 16, 4, dtype=torch.float64),
    "append to pages": lambda: _append(16, torch.bfloat16),
    "append rotary float8 to rows": lambda: _append(0, FP8, True),
    "append packed to pages": lambda: _append_packed(16),
    "append to slots": lambda: _append_to_slots(torch.bfloat16),
    "append float8 token scales to slots": lambda: _append_to_slots(FP8),
    "paged d128 prefill": lambda: _paged(128),
    "paged d128 prefill, pages of 64": lambda: _paged(128, 64),
    "paged d64 rows, window sinks softcap": lambda: _paged(64, 0, left=64, sinks=torch.zeros(32), softcap=20.0),
    "paged d128 4 tokens": lambda: _paged(128, tokens=16, promised=4),
    "paged d128 one token": lambda: _paged(128, tokens=4, promised=1),
    "paged d256 prefill": lambda: _paged(256),
    "paged d128 float8 prefill": lambda: _paged(128, cache_dtype=FP8),
    "paged d128 float8 token scales": lambda: _paged(128, cache_dtype=FP8, token_scales=True),
    "paged d128 batch invariant": lambda: _paged(128, batch_invariant=True),
    "paged d64 few keys": lambda: _paged(64, keys=64),
    "paged d64 float32": lambda: _paged(64, dtype=torch.float32),
}


def _alibi(call: Any) -> Any:
    """The call with a score_mod: a bias that grows with the distance, by a slope for each head."""
    return bind_functions(call, alibi(torch.ones(call.q.shape[-2])), None)


def _tree(call: Any, tokens: int, score: object = None) -> Any:
    """The call with a mask_mod: trees of drafted tokens, whose ancestors are in a table for each sequence."""
    batch = call.seqlens.shape[0]
    tree, past = torch.zeros(batch, tokens, tokens, dtype=torch.bool), torch.zeros(batch, dtype=torch.int64)

    def seen(b, h, q_idx, kv_idx):
        row, key = q_idx - past[b], kv_idx - past[b]
        return (key < 0) | tree[b, row.clamp(0, tokens - 1), key.clamp(0, tokens - 1)]

    return bind_functions(call, score, mask_mod(seen))


# Hopper decode: every way to address a key, each number of query rows, each width, with and without splits, functions.
# Then prefills.
HOPPER_DECODES: dict[str, Callable[[], DecodeCall | PagedCall | AppendCall]] = {
    name: case for name, case in DECODES.items() if name.startswith(("d128", "d256 pages", "d64 rows"))
} | {
    "d64 pages of 16, float16": lambda: _decode(64, 16, dtype=torch.float16),
    "d128 pages of 13, partial": lambda: _decode(128, 13, keys=13 * 300, partial=True),
    "d192/128 pages of 16": lambda: _decode(192, 16)._replace(v=torch.empty(256, 16, 8, 128, dtype=torch.bfloat16)),
    "d256 8 tokens, one key head": lambda: _decode(256, 0, 8, heads=(4, 1)),
    "d128 float8 rows": lambda: _decode(128, cache_dtype=FP8),
    "d128 rows, 16 tokens, batch invariant": lambda: _decode(128, tokens=16, batch_invariant=True),
    "d256 float8, pages of 16": lambda: _decode(256, 16, cache_dtype=FP8),
    "d128 pages of 16, a cluster": lambda: _decode(128, 16, keys=1024),
    "d64 rows, 2 tokens, a cluster": lambda: _decode(64, tokens=2, keys=1024),
    "d192/128 a cluster, sinks": lambda: _decode(192, 16, keys=512, sinks=torch.zeros(32))._replace(
        v=torch.empty(32, 16, 8, 128, dtype=torch.bfloat16)
    ),
    "d256 a cluster, softcap": lambda: _decode(256, 16, keys=1024, softcap=20.0),
    "d128 long rows, 4 tokens": lambda: _decode(128, tokens=4, keys=8192, heads=(1024, 256)),
    "d128 float8, a cluster": lambda: _decode(128, cache_dtype=FP8, keys=1024),
    "d128 pages of 16, score_mod": lambda: _alibi(_decode(128, 16)),
    "d128 float8, 4 tokens, softcap, score_mod": lambda: _alibi(_decode(128, 16, 4, cache_dtype=FP8, softcap=20.0)),
    "d64 rows, 2 tokens, a cluster, mask_mod": lambda: _tree(_decode(64, tokens=2, keys=1024), 2),
    "d256 pages of 16, score_mod": lambda: _alibi(_decode(256, 16)),
    "paged d128 one token, score_mod": lambda: _alibi(_paged(128, tokens=4, promised=1)),
    "paged d128 4 tokens, mask_mod": lambda: _tree(_paged(128, tokens=16, promised=4), 4),
    "paged d128 16 tokens, mask_mod": lambda: _tree(_paged(128, tokens=20, promised=16), 16),
    "paged d128 16 tokens, score_mod": lambda: _alibi(_paged(128, tokens=20, promised=16)),
    "paged d128 float8, 16 tokens, score_mod": lambda: _alibi(_paged(128, tokens=20, promised=16, cache_dtype=FP8)),
    "paged d128 16 tokens, sinks softcap, score_mod and mask_mod": lambda: _tree(
        _paged(128, tokens=20, promised=16, sinks=torch.zeros(32), softcap=20.0), 16, alibi(torch.ones(32))
    ),
    "paged d256 float8, 8 tokens, score_mod and mask_mod": lambda: _tree(
        _paged(256, tokens=9, promised=8, cache_dtype=FP8), 8, alibi(torch.ones(32))
    ),
    "paged d128 one token": lambda: _paged(128, tokens=4, promised=1, left=100),
    "paged d128 16 tokens, sinks": lambda: _paged(128, tokens=20, promised=16, sinks=torch.zeros(32)),
    "paged d64 float8, 4 tokens": lambda: _paged(64, tokens=9, promised=4, cache_dtype=FP8),
    "paged d256 rows, 16 tokens": lambda: _paged(256, 0, tokens=20, promised=16),
    "paged d128 prefill": lambda: _paged(128, tokens=2048, keys=4096),
    "paged d128 prefill, pages of 128, window sinks softcap": lambda: _paged(
        128, 128, tokens=2048, keys=4096, left=900, sinks=torch.zeros(32), softcap=20.0
    ),
    "paged d64 prefill, pages of 8": lambda: _paged(64, 8, tokens=2048, keys=4096),
    "paged d96 prefill": lambda: _paged(96, tokens=2048, keys=4096),
    "paged d192/128 prefill": lambda: _paged(192, tokens=2048, keys=4096)._replace(
        v=torch.empty(256, 16, 8, 128, dtype=torch.bfloat16)
    ),
    "paged d256/128 prefill": lambda: _paged(256, tokens=2048, keys=4096)._replace(
        v=torch.empty(256, 16, 8, 128, dtype=torch.bfloat16)
    ),
    "paged d256 prefill": lambda: _paged(256, tokens=2048, keys=4096),
    "paged d192 prefill, window": lambda: _paged(192, tokens=2048, keys=4096, left=900),
    "paged d128 prefill, score_mod": lambda: _alibi(_paged(128, tokens=2048, keys=4096)),
    "paged d96 prefill, score_mod": lambda: _alibi(_paged(96, tokens=2048, keys=4096)),
    "paged d128 prefill, mask_mod": lambda: _tree(_paged(128, 64, tokens=2048, keys=4096), 64),
    "paged d64 prefill, softcap, score_mod and mask_mod": lambda: _tree(
        _paged(64, tokens=2048, keys=4096, softcap=20.0), 64, alibi(torch.ones(32))
    ),
    "paged d128 float8 prefill, score_mod and mask_mod": lambda: _tree(
        _paged(128, tokens=500, keys=4096, cache_dtype=FP8), 64, alibi(torch.ones(32))
    ),
    "paged d256 prefill, left padded rows": lambda: _paged(
        256, 0, tokens=2048, keys=4096, k_start=torch.zeros(1, dtype=torch.int32)
    ),
    "paged d128 float8 prefill": lambda: _paged(128, tokens=500, keys=4096, cache_dtype=FP8),
    "paged d128 float8 prefill, float16, window softcap": lambda: _paged(
        128, 64, tokens=500, keys=4096, cache_dtype=FP8, dtype=torch.float16, left=900, softcap=20.0
    ),
    "paged d64 float8 prefill, pages of 1": lambda: _paged(64, 1, tokens=500, keys=4096, cache_dtype=FP8),
    "paged d96 float8 prefill, rows": lambda: _paged(96, 0, tokens=500, keys=4096, cache_dtype=FP8),
    "paged d192/128 float8 prefill": lambda: _paged(192, tokens=500, keys=4096, cache_dtype=FP8)._replace(
        v=torch.empty(256, 16, 8, 128, dtype=FP8)
    ),
    "paged d256 float8 prefill": lambda: _paged(256, tokens=500, keys=4096, cache_dtype=FP8),
    # keys are copied in q's dtype
    "paged d128 float8 prefill, copied": lambda: _paged(128, tokens=2048, keys=4096, cache_dtype=FP8),
    "paged d64 float8 prefill, float16, copied, rows, window softcap": lambda: _paged(
        64, 0, tokens=2048, keys=4096, cache_dtype=FP8, dtype=torch.float16, left=900, softcap=20.0
    ),
    "paged d256 float8 prefill, copied": lambda: _paged(256, 64, tokens=2048, keys=4096, cache_dtype=FP8),
}


# Blackwell decode: as the Hopper decode, without packed queries, batch_invariant and functions.
BLACKWELL_DECODES = {
    name: case for name, case in HOPPER_DECODES.items() if not name.startswith("paged") and "invariant" not in name
} | {
    "d128 rows, 16 tokens, window sinks softcap": lambda: _decode(
        128, tokens=16, left=900, sinks=torch.zeros(32), softcap=20.0
    ),
    "d128 float8 rows, 8 tokens": lambda: _decode(128, tokens=8, cache_dtype=FP8),
    "d128 float8 pages of 16, 16 tokens": lambda: _decode(128, 16, 16, cache_dtype=FP8),
    "d128 pages of 16, 8 tokens, window": lambda: _decode(128, 16, 8, left=900),
    "d256 float8, 8 tokens, softcap": lambda: _decode(256, 16, 8, cache_dtype=FP8, softcap=20.0),
}


def _blackwell_cases() -> dict[str, Callable[[], Call]]:
    """Blackwell: each tiling with each kind of band, options, shared heads, keys that end within a tile, and sizes of
    1.

    Triton compiles a size of 1 as a constant, so such a kernel differs from the others. There are many heads, so that
    kernels with unequal tiles take them from the tile counter.
    """
    bands = {"dense": masks.full(), "causal": masks.causal(), "window": masks.window(100, 20)}
    many = (160, 160)
    cases: dict[str, Callable[[], Call]] = {}
    for name, widths in {"d64": (64, 64), "d96": (96, 96), "d128": (128, 128), "d192/128": (192, 128)}.items():
        cases |= {
            f"{name} {band}": partial(_dense, *widths, mask=mask, heads=many, batch=2) for band, mask in bands.items()
        }
        cases[f"{name} window sinks softcap"] = partial(
            _dense, *widths, mask=bands["window"], heads=many, sinks=torch.zeros(160), softcap=20.0
        )
        cases[f"{name} group 8 causal, 5 rows"] = partial(_dense, *widths, mask=bands["causal"], heads=(8, 1), rows=5)
    cases["d128 dense float16"] = partial(_dense, 128, dtype=torch.float16)
    cases["d128 causal float16"] = partial(_dense, 128, mask=bands["causal"], dtype=torch.float16)
    cases["d128 ragged"] = partial(_dense, 128, keys=253)
    cases["d128 one row"] = partial(_dense, 128, rows=1, heads=(1, 1))
    cases["d128 window left"] = partial(_dense, 128, mask=masks.window(100, None))
    cases["d64 packed"] = partial(_packed, 64, bands["dense"], many)
    cases["d128 packed causal"] = partial(_packed, 128, bands["causal"], (4, 4))
    cases |= {
        f"{name} deterministic": partial(_dense, *widths, mask=bands["causal"], heads=(8, 2), deterministic=True)
        for name, widths in {"d64": (64, 64), "d96": (96, 96), "d128": (128, 128), "d192/128": (192, 128)}.items()
    }
    cases["d128 window softcap deterministic"] = partial(
        _dense, 128, mask=bands["window"], softcap=20.0, deterministic=True
    )
    cases["d128 packed causal deterministic"] = partial(_packed, 128, bands["causal"], (4, 4), deterministic=True)
    cases["d128 packed group 3 causal sinks"] = partial(
        _packed, 128, bands["causal"], (600, 200), sinks=torch.zeros(600)
    )
    return cases | {"d96 packed group 4 window": partial(_packed, 96, bands["window"], (8, 2))}


def _blackwell_backward_cases() -> dict[str, Callable[[], Call]]:
    """Calls whose backward alone is a Blackwell kernel: rows of a batch entry see different ranges of keys."""
    causal, window = masks.causal(), masks.window(100, 20)
    return {
        "d64 documents window": partial(_dense, 64, mask=_documents() & window, heads=(8, 2)),
        "d96 documents window softcap": partial(_dense, 96, mask=_documents() & window, softcap=20.0),
        "d128 documents causal": partial(_dense, 128, mask=_documents() & causal),
        "d128 documents key lengths": partial(_dense, 128, mask=_documents() & _lengths()),
        "d128 key lengths": partial(_dense, 128, mask=_lengths(), heads=(8, 2)),
        "d128 prefix": partial(_dense, 128, mask=masks.prefix_causal(torch.tensor([30], dtype=torch.int32))),
        "d192/128 documents causal": partial(_dense, 192, 128, mask=_documents() & causal, heads=(8, 2)),
    }


# kernel family -> name -> call
CASES_OF = {
    "portable": CASES, "portable.decode": DECODES, "hopper": _hopper_cases(), "hopper.decode": HOPPER_DECODES,
    "blackwell": _blackwell_cases(), "blackwell.backward": _blackwell_backward_cases(),
    "blackwell.decode": BLACKWELL_DECODES,
}  # fmt: skip
