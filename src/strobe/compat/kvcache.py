"""KV caches with FlashAttention's arguments: write the new keys, apply rotary embeddings to q, then decode over the
cache.

The functions translate the arguments to a `PagedCache` or `DenseCache` and call strobe's append and decode.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidProblem, UnsupportedProblem, describe, wrong_type
from ..interface.decode import Settings, append, decode_call, settings_of
from ..interface.paged import paged_call
from ..ops import decode as ops_decode
from ..ops import paged as ops_paged
from ..problem.cache import FP8, DenseCache, PagedCache, Rotary
from ..problem.call import accumulator
from ..problem.decode import DecodeCall
from ..problem.paged import PagedCall
from .descales import Descales, Scaled, over_cache, rescaled
from .seqused import is_readable
from .signatures import Setting, forward, in_their_words, rows_contiguous

# decode kernels are tuned for up to this many queries; more queries, with int lengths, run as attention over a slice
_FEW_ROWS = 16


class Cache(NamedTuple):
    """The cache arguments of `flash_attn_with_kvcache`. k and v are [B, S_max, H_kv, D], or pages [n_pages, page_size,
    H_kv, D] with a page table.
    """

    k: Tensor
    v: Tensor
    seqlens: int | Tensor | None = None
    k_new: Tensor | None = None
    v_new: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    interleaved: bool = True
    batch_idx: Tensor | None = None
    leftpad: Tensor | None = None
    page_table: Tensor | None = None
    pages: str = "block_table"  # the original function's name for page_table, for error messages
    rotary_seqlens: Tensor | None = None  # int32 [B]: rotary position of the first new key; None means seqlens
    descales: Descales = Descales()

    @property
    def capacity(self) -> int:
        """The largest number of keys per sequence."""
        return self.k.shape[1] * (1 if self.page_table is None else self.page_table.shape[1])

    @property
    def words(self) -> dict[str, str]:
        """strobe's argument names -> the original function's, for error messages."""
        table = self.pages if self.page_table is not None else "cache_batch_idx"
        words = {f"cache.{field}{pages}": f"{field}_cache" for field in "kv" for pages in ("", "_pages")}
        words |= {"cache.page_table": table, "cache.seqlens": "cache_seqlens", "cache.k_start": "cache_leftpad"}
        return words | {"k_new": "k", "v_new": "v", "rotary.cos": "rotary_cos", "rotary.sin": "rotary_sin"}


def forward_cached(q: Tensor, cache: Cache, setting: Setting) -> tuple[Tensor, Tensor]:
    """out [B, S_q, H_q, D] and lse [B, H_q, S_q] over the keys in the cache, after writing k_new and v_new to it. No
    gradients, as in the originals.

    >>> k_cache, v_cache, q = torch.zeros(1, 8, 2, 16), torch.zeros(1, 8, 2, 16), torch.randn(1, 1, 2, 16)
    >>> out, lse = forward_cached(q, Cache(k_cache, v_cache, 3, q, q), Setting(causal=True))
    >>> torch.equal(k_cache[:, 3:4], q), lse.shape
    (True, torch.Size([1, 2, 1]))
    """
    with torch.no_grad():
        try:
            return _forward(rows_contiguous(q), cache, setting.plain())
        except (InvalidProblem, TypeError) as problem:
            raise in_their_words(problem, cache.words) from None


def _forward(q: Tensor, cache: Cache, setting: Setting) -> tuple[Tensor, Tensor]:
    _check(q, cache)
    cache = _indexed(cache)
    before = _lengths(len(q), cache)
    count = 0 if cache.k_new is None else cache.k_new.shape[1]
    scaled = over_cache(q, cache.k, cache.descales, len(q), None)
    q, scales = scaled.q, scaled[1:3]
    call = _decode_call(q, _held(cache, before + count, scales), setting)
    if cache.k_new is not None and cache.v_new is not None:
        if not torch.compiler.is_compiling():  # checks the arguments before anything is written
            ops_decode.decide(ops_decode.prepare(call))
        _check_room(cache, before, count)
        rotary = None if cache.cos is None or cache.sin is None else Rotary(cache.cos, cache.sin, cache.interleaved)
        k_new, v_new, scales = _new(cache, scaled)
        first = _first_rotary(cache, before)
        apart = first is not before
        if rotary is not None and apart:
            k_new = _turned(k_new, rotary, first, True)
        append(_pools(cache, before, scales), k_new, v_new, rotary=None if apart else rotary)
        if rotary is not None:
            call = call._replace(q=_turned(q, rotary, first, _along(setting)))
    in_place = cache.page_table is None and cache.leftpad is None and cache.k.dtype == q.dtype
    if in_place and not isinstance(cache.seqlens, Tensor) and q.shape[1] > _FEW_ROWS:
        if (
            not torch.compiler.is_compiling()
        ):  # checks the arguments under the cache's names, not those of the slices below
            ops_decode.decide(ops_decode.prepare(call))
        stop = cache.capacity if cache.seqlens is None else cache.seqlens + count
        with torch.autocast(
            q.device.type, enabled=False
        ):  # a decode reads the cache in its own dtype, so autocast must not convert it here
            return forward(call.q, cache.k[:, :stop], cache.v[:, :stop], setting)
    out, lse = ops_decode.run(call)
    return rescaled(out, scaled.out_scale, None), lse


def _first_rotary(cache: Cache, before: Tensor) -> Tensor:
    """The rotary position of each sequence's first new key; `before` itself if they are equal."""
    given = cache.rotary_seqlens
    return before if given is None or given is cache.seqlens else given


def _along(setting: Setting) -> bool:
    """Whether queries have positions of their own: otherwise all have that of the first new key."""
    return setting.causal or any(bound is not None and bound >= 0 for bound in setting.window)


def _new(cache: Cache, scaled: Scaled) -> tuple[Tensor, Tensor, tuple[Tensor | None, Tensor | None]]:
    """New keys and values as `append` takes them, and the scales by which it divides. 8-bit ones keep their bits."""
    k, v = (rows_contiguous(new) for new in (cache.k_new, cache.v_new) if new is not None)
    if k.dtype == v.dtype == FP8:
        return k.to(torch.bfloat16), v.to(torch.bfloat16), (None, None)
    if cache.k.dtype == FP8 and (cache.descales.k is not None) != (scaled.k_scale is not None):
        got, remedy = f"{k.dtype} beside a k_descale for each sequence", "quantize k and v before the call"
        raise UnsupportedProblem(describe("k", got, "torch.float8_e4m3fn", remedy))
    return k, v, (scaled.k_scale, scaled.v_scale)


def _decode_call(q: Tensor, held: PagedCache | DenseCache, setting: Setting) -> DecodeCall:
    return decode_call(q, held, _settings(setting))


def _settings(setting: Setting) -> Settings:
    return settings_of(setting.causal, setting.window, setting.scale, setting.softcap or None, None, False, None)


Scales = tuple[Tensor | None, Tensor | None]


def _held(cache: Cache, seqlens: Tensor, scales: Scales = (None, None)) -> PagedCache | DenseCache:
    """The cache as strobe's PagedCache or DenseCache, for reading."""
    if cache.page_table is None:
        return DenseCache(cache.k, cache.v, seqlens, cache.leftpad, *scales)
    if cache.leftpad is None:
        return PagedCache(cache.k, cache.v, cache.page_table, seqlens, *scales)
    leftpad = cache.leftpad.clamp(min=0)
    return PagedCache(*_by_key(cache, cache.page_table, leftpad), seqlens - leftpad, *scales)


def _pools(cache: Cache, seqlens: Tensor, scales: Scales) -> PagedCache | DenseCache:
    """The cache for writing: left padding does not move where new keys go."""
    return _held(cache._replace(leftpad=None), seqlens, scales)


def _indexed(cache: Cache) -> Cache:
    """The cache without batch_idx. Without a page table, each row of the cache becomes a page, and batch_idx the page
    table. With one, batch_idx selects rows of the page table; an index out of range selects pages of -1.
    """
    index = cache.batch_idx
    if index is None:
        return cache
    if cache.page_table is not None:
        rows = len(cache.page_table)
        selected = cache.page_table.index_select(0, index.clamp(0, rows - 1))
        out_of_range = ((index < 0) | (index >= rows))[:, None]
        return cache._replace(batch_idx=None, page_table=selected.masked_fill(out_of_range, -1))
    return cache._replace(batch_idx=None, page_table=index[:, None], pages="cache_batch_idx")


def _by_key(cache: Cache, page_table: Tensor, leftpad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The pools as pages of one key, and a table that begins at each sequence's first key, since pages have no left
    padding. Pages of one key may lie in gaps between the pools' pages; no entry of the table names these.
    """
    (pages, size), pools = cache.k.shape[:2], (cache.k, cache.v)
    keys_apart = _keys_apart(pools)
    if keys_apart is None:
        strides = " and ".join(f"{pool.stride()[:2]} of {name}_cache" for name, pool in zip("kv", pools))
        got = f"a tensor beside {cache.pages}, with strides {strides}"
        expected = "stride(0) = n * stride(1), with one n for k_cache and v_cache"
        raise UnsupportedProblem(describe("cache_leftpad", got, expected, "make both contiguous"))
    place = torch.arange(cache.capacity, device=leftpad.device) + leftpad.long()[:, None]
    place = place.clamp(max=max(cache.capacity - 1, 0))
    page = page_table.long().gather(1, place // max(size, 1))
    entry = torch.where((page < 0) | (page >= pages), -1, page * keys_apart + place % max(size, 1))
    count = (pages - 1) * keys_apart + size if pages and size else 0
    key = 1 if size > 1 else 0  # the dimension of the pools in which keys follow one another
    k, v = (pool.as_strided((count, 1, *pool.shape[2:]), (pool.stride(key), *pool.stride()[1:])) for pool in pools)
    return k, v, entry.clamp(max=2**31 - 1).to(torch.int32)


def _keys_apart(pools: tuple[Tensor, Tensor]) -> int | None:
    """The distance from one page to the next in keys, in both pools; None if it is not one integer."""
    pages, size = pools[0].shape[:2]
    if pages <= 1 or size <= 1:
        return size
    found = []
    for pool in pools:
        page, key = pool.stride()[:2]
        if page != size * key and (key == 0 or page % key):
            return None
        found.append(size if page == size * key else page // key)
    return found[0] if found[0] == found[1] else None


def _lengths(batch: int, cache: Cache) -> Tensor:
    """int32 [B]: the number of keys in each sequence before this call."""
    seqlens, count = cache.seqlens, 0 if cache.k_new is None else cache.k_new.shape[1]
    if isinstance(seqlens, Tensor):
        return seqlens
    if seqlens is None:
        seqlens = cache.capacity
    elif not 0 <= seqlens <= cache.capacity - count:
        expected = f"0 to {cache.capacity - count}" + f", before {count} new keys" * bool(count)
        raise InvalidProblem(
            "cache_seqlens",
            seqlens,
            expected,
            "make the cache longer" if seqlens > 0 else "count the keys that it holds",
        )
    return torch.full((batch,), seqlens, dtype=torch.int32, device=cache.k.device)


def _turned(q: Tensor, rotary: Rotary, first: Tensor, along: bool) -> Tensor:
    """q with the rotary embedding applied. Row i has position first + i if `along`, else first. Positions without
    angles give NaN, as for keys.
    """
    return _turned_at(q, rotary, first.long()[:, None] + torch.arange(q.shape[1], device=q.device) * along)


def _turned_packed(q: Tensor, rotary: Rotary, first: Tensor, offsets: Tensor, along: bool) -> Tensor:
    """`_turned` of packed rows [T, H, D]. Rows of no sequence are arbitrary."""
    if len(first) == 0:
        return q
    row = torch.arange(len(q), device=q.device, dtype=offsets.dtype)
    sequence = torch.searchsorted(offsets[1:].contiguous(), row, right=True).clamp(max=len(first) - 1)
    return _turned_at(q, rotary, first.long()[sequence] + (row - offsets[sequence]) * along)


def _turned_at(q: Tensor, rotary: Rotary, position: Tensor) -> Tensor:
    """Rows of q [..., H, D] rotated by the angles of their positions [...]."""
    known, wide = rotary.cos.shape[0], accumulator(q.dtype)
    beyond = ((position < 0) | (position >= known))[..., None]
    cos, sin = (
        t[position.clamp(0, known - 1)].to(wide).masked_fill(beyond, torch.nan).unsqueeze(-2) for t in rotary[:2]
    )
    width = 2 * cos.shape[-1]
    turning = q[..., :width].to(wide)
    a, b = turning.unflatten(-1, (-1, 2)).unbind(-1) if rotary.interleaved else turning.chunk(2, -1)
    turned = a * cos - b * sin, b * cos + a * sin
    whole = torch.stack(turned, -1).flatten(-2) if rotary.interleaved else torch.cat(turned, -1)
    return torch.cat([whole.to(q.dtype), q[..., width:]], -1)


# ---------------------------------------------------------------- argument checks


def _check(q: Tensor, cache: Cache) -> None:
    """Check types, ranks and combinations of arguments. The checks of decode and append cover the rest."""
    indices = {"cache_batch_idx": cache.batch_idx, "cache_leftpad": cache.leftpad, cache.pages: cache.page_table}
    needed = {"q": q, "k_cache": cache.k, "v_cache": cache.v}
    optional = {"k": cache.k_new, "v": cache.v_new, "rotary_cos": cache.cos, "rotary_sin": cache.sin} | indices
    for name, given in (needed | {name: one for name, one in optional.items() if one is not None}).items():
        if not isinstance(given, Tensor):
            raise wrong_type(name, given, "a tensor" + " or None" * (name in optional), "pass a torch.Tensor")
    for name, rank in {"q": 4, "k_cache": 4, "k": 4, "cache_batch_idx": 1, cache.pages: 2}.items():
        given = (needed | optional)[name]
        if given is not None and given.dim() != rank:
            raise InvalidProblem(name, f"shape {list(given.shape)}", f"{rank} dimensions", "reshape it")
    if cache.seqlens is not None and (
        isinstance(cache.seqlens, bool) or not isinstance(cache.seqlens, (int, torch.SymInt, Tensor))
    ):
        raise wrong_type(
            "cache_seqlens", cache.seqlens, "an int, an int32 tensor [B] or None", "give the lengths before this call"
        )
    if not isinstance(cache.interleaved, bool):
        raise wrong_type("rotary_interleaved", cache.interleaved, "a bool", "pass True or False")
    _check_new(cache, len(q))
    _check_indices(cache)


def _check_indices(cache: Cache) -> None:
    for name, given in (("cache_batch_idx", cache.batch_idx), ("cache_leftpad", cache.leftpad)):
        if given is None:
            continue
        remedy = "give a number for each sequence"
        if not isinstance(given, Tensor):
            raise wrong_type(name, given, "an int32 tensor [B] or None", remedy)
        if given.dtype != torch.int32 or given.dim() != 1:
            raise InvalidProblem(name, f"{given.dtype} {list(given.shape)}", "torch.int32 [B]", remedy)
    table, index = cache.page_table, cache.batch_idx
    if index is not None and len(index) > 0 and isinstance(table, Tensor) and len(table) == 0:
        remedy = "give the table that has the rows which cache_batch_idx names"
        raise InvalidProblem(cache.pages, f"shape {list(table.shape)}", "one row or more", remedy)


def _check_new(cache: Cache, batch: int) -> None:
    if (cache.k_new is None) != (cache.v_new is None):
        raise InvalidProblem(
            "v" if cache.v_new is None else "k",
            None,
            "both of k and v, or neither",
            "give new keys together with their values",
        )
    if (cache.cos is None) != (cache.sin is None):
        name = "rotary_sin" if cache.sin is None else "rotary_cos"
        raise InvalidProblem(
            name, None, "both of rotary_cos and rotary_sin, or neither", "give the angles' cosines and sines"
        )
    if cache.rotary_seqlens is not None and cache.rotary_seqlens is not cache.seqlens:
        given, wanted = cache.rotary_seqlens, f"an int32 tensor [{batch}] or None"
        remedy = "give the position of the first new key of each sequence"
        if not isinstance(given, Tensor):
            raise wrong_type("rotary_seqlens", given, wanted, remedy)
        if cache.k_new is not None and (given.dtype != torch.int32 or given.shape != (batch,)):
            raise InvalidProblem("rotary_seqlens", f"{given.dtype} {list(given.shape)}", wanted, remedy)
    if cache.cos is not None and cache.k_new is None:
        raise InvalidProblem(
            "rotary_cos", "angles without new keys", "k and v to turn and write", "turn q before the call"
        )
    if cache.k_new is not None and cache.seqlens is None:
        raise InvalidProblem(
            "cache_seqlens", None, "where the new keys go", "give the lengths before this call, an int or int32 [B]"
        )


def _check_room(cache: Cache, before: Tensor, count: int) -> None:
    """On a CPU, raise if a new key has no place in the cache. On a GPU such keys are not written, and `last_errors`
    reports them.
    """
    if not count or not is_readable(before):
        return
    positions = before.long()[:, None] + torch.arange(count)
    beyond = ((positions < 0) | (positions >= cache.capacity)).any(1).nonzero().flatten().tolist()
    if beyond:
        got = f"{before[beyond[0]].item()} for sequence {beyond[0]}"
        held = "the cache" if cache.page_table is None else cache.pages
        expected = (
            f"0 to {cache.capacity - count}, before {count} new keys in the {cache.capacity} places that {held} has"
        )
        raise InvalidProblem(
            "cache_seqlens",
            got,
            expected,
            "make the cache longer" if cache.page_table is None else f"give {held} more columns",
        )
    if cache.page_table is None:
        return
    ids = cache.page_table.long().gather(1, positions // max(cache.k.shape[1], 1))
    wrong = ids[(ids < 0) | (ids >= len(cache.k))].tolist()
    if wrong:
        expected = f"ids from 0 to {len(cache.k) - 1} where new keys go"
        raise InvalidProblem(
            cache.pages, f"{wrong[0]} where a new key goes", expected, "reserve the pages of new keys before the call"
        )


# ---------------------------------------------------------------- packed queries


def forward_packed(
    q: Tensor,
    cache: Cache,
    setting: Setting,
    cu_seqlens_q: Tensor,
    cu_seqlens_k_new: Tensor | None,
    longest_q: int | None,
) -> tuple[Tensor, Tensor]:
    """out [T, H_q, D] and lse [H_q, T] of packed queries over the keys in the cache, after writing packed k_new and
    v_new to it. No gradients, as in the originals.

    >>> k_cache, q = torch.zeros(2, 8, 2, 16), torch.randn(4, 2, 16)
    >>> offsets = torch.tensor([0, 3, 4], dtype=torch.int32)
    >>> cache = Cache(k_cache, k_cache.clone(), torch.tensor([2, 5], dtype=torch.int32), q, q)
    >>> out, lse = forward_packed(q, cache, Setting(causal=True), offsets, offsets, 3)
    >>> torch.equal(k_cache[0, 2:5], q[:3]), out.shape, lse.shape
    (True, torch.Size([4, 2, 16]), torch.Size([2, 4]))
    """
    with torch.no_grad():
        try:
            return _forward_packed(
                rows_contiguous(q), cache, setting.plain(), (cu_seqlens_q, cu_seqlens_k_new), longest_q
            )
        except (InvalidProblem, TypeError) as problem:
            raise in_their_words(problem, cache.words) from None


def _forward_packed(
    q: Tensor, cache: Cache, setting: Setting, offsets: tuple[Tensor, Tensor | None], longest_q: int | None
) -> tuple[Tensor, Tensor]:
    cu_seqlens_q, cu_seqlens_k_new = offsets
    needed = ("q", q), ("cu_seqlens_q", cu_seqlens_q), ("k_cache", cache.k), ("v_cache", cache.v)
    for name, given in needed:
        if not isinstance(given, Tensor):
            raise wrong_type(name, given, "a tensor", "pass a torch.Tensor")
    batch = len(cu_seqlens_q) - 1
    _check_new(cache._replace(k_new=None, v_new=None) if cache.cos is None else cache, batch)
    if (cache.k_new is None) != (cu_seqlens_k_new is None) or (cache.k_new is None) != (cache.v_new is None):
        expected = "k, v and cu_seqlens_k_new together, or none of them"
        raise InvalidProblem("cu_seqlens_k_new", cu_seqlens_k_new, expected, "give the offsets of the new keys")
    _check_indices(cache)
    cache = _indexed(cache)
    before = _lengths(batch, cache) if cache.k_new is None or cache.seqlens is not None else cache.seqlens
    if not isinstance(before, Tensor):
        expected = "an int32 tensor [B] beside cu_seqlens_k_new"
        raise wrong_type("cache_seqlens", before, expected, "give the lengths before this call")
    after = before if cu_seqlens_k_new is None else before + cu_seqlens_k_new.diff()
    scaled = over_cache(q, cache.k, cache.descales, batch, cu_seqlens_q)
    q, scales = scaled.q, scaled[1:3]
    call = packed_call(q, _held(cache, after, scales), setting, cu_seqlens_q, longest_q)
    if cache.k_new is not None and cache.v_new is not None and cu_seqlens_k_new is not None:
        if not torch.compiler.is_compiling():  # checks the arguments before anything is written
            ops_paged.decide(ops_paged.prepare(call))
        rotary = None if cache.cos is None or cache.sin is None else Rotary(cache.cos, cache.sin, cache.interleaved)
        k_new, v_new, scales = _new(cache, scaled)
        first = _first_rotary(cache, before)
        apart = first is not before
        if rotary is not None and apart:
            k_new = _turned_packed(k_new, rotary, first, cu_seqlens_k_new, True)
        pools = _pools(cache, before, scales)
        append(pools, k_new, v_new, rotary=None if apart else rotary, cu_seqlens_q=cu_seqlens_k_new)
        if rotary is not None:
            call = call._replace(q=_turned_packed(q, rotary, first, cu_seqlens_q, _along(setting)))
    out, lse = ops_paged.run(call)
    return rescaled(out, scaled.out_scale, cu_seqlens_q), lse


def packed_call(
    q: Tensor, held: PagedCache | DenseCache, setting: Setting, cu_seqlens_q: Tensor, longest_q: int | None
) -> PagedCall:
    return paged_call(q, held, cu_seqlens_q, longest_q, _settings(setting))
