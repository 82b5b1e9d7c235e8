"""KV caches: the paged and the dense layout, rotary embedding of new keys, float8 quantization, and the argument check.

seqlens[b] is the number of keys in sequence b. Positions count from the sequence's first key in both layouts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidProblem, wrong_type
from .call import DTYPES, Dense, Paged
from .mask import as_int32, check_strided

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


class PagedCache(NamedTuple):
    """A KV cache in pages of a common pool: key j of sequence b is row j % page_size of page page_table[b, j //
    page_size].

    >>> pages = torch.zeros(8, 16, 2, 64)  # 8 pages of 16 keys, 2 heads
    >>> table, lengths = torch.tensor([[3, 5]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    >>> cache = PagedCache(pages, pages.clone(), table, lengths)
    >>> cache.k_pages.shape[1] * cache.page_table.shape[1]  # capacity of a sequence, in keys
    32

    Attributes:
        k_pages: [n_pages, page_size, H_kv, D]. The last dimension is contiguous; other strides are free, so a
            heads-first pool is passed as a transposed view.
        v_pages: [n_pages, page_size, H_kv, D_v], with strides as k_pages.
        page_table: int32 [B, max_pages], read on the device. Entries after a sequence's last page are never read.
        seqlens: int32 [B], the number of keys in each sequence, read on the device.
        k_scale, v_scale: float32 [H_kv], only for pages in float8_e4m3fn. A key is k_scale[h] times the stored value.
            `attention_paged` also takes float32 [n_pages, page_size, H_kv], a scale for each key and head, which
            `append` computes and writes.
    """

    k_pages: Tensor
    v_pages: Tensor
    page_table: Tensor
    seqlens: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


class DenseCache(NamedTuple):
    """A KV cache with one row per sequence: k [B, S_max, H_kv, D], v [B, S_max, H_kv, D_v].

    >>> k = torch.zeros(4, 128, 2, 64)
    >>> DenseCache(k, k.clone(), seqlens=torch.zeros(4, dtype=torch.int32)).k_start is None
    True

    Attributes:
        seqlens: int32 [B], one past the last key of each sequence, counted from the start of its row.
        k_start: int32 [B], the first key of each sequence (left padding). Keys before it are masked, even if they hold
            NaN.
        k_scale, v_scale: as in PagedCache.
    """

    k: Tensor
    v: Tensor
    seqlens: Tensor
    k_start: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


class Rotary(NamedTuple):
    """Rotary position embedding: cos and sin [S_max, rotary_dim / 2]. Row p belongs to position p.

    >>> angle = torch.arange(128.0)[:, None] * 10000.0 ** -(torch.arange(32) / 32)
    >>> Rotary(angle.cos(), angle.sin()).cos.shape
    torch.Size([128, 32])

    Dimension i rotates with i + rotary_dim / 2. If interleaved, dimension 2 i rotates with 2 i + 1. Dimensions from
    rotary_dim on do not change.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False


class Held(NamedTuple):
    """A PagedCache or DenseCache in the flat form that ops take. `word` names its fields in error messages."""

    k: Tensor
    v: Tensor
    seqlens: Tensor
    page_table: Tensor | None = None
    k_start: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @staticmethod
    def of(cache: PagedCache | DenseCache) -> Held:
        """Flatten a cache and convert int64 lengths, starts and page ids to int32. Raises TypeError for a field that is
        not a tensor.
        """
        if isinstance(cache, PagedCache):
            k, v, page_table, seqlens, k_scale, v_scale = cache
            held, needed = Held(k, v, seqlens, page_table, None, k_scale, v_scale), (k, v, seqlens, page_table)
        elif isinstance(cache, DenseCache):
            k, v, seqlens, k_start, k_scale, v_scale = cache
            held, needed = Held(k, v, seqlens, None, k_start, k_scale, v_scale), (k, v, seqlens)
        else:
            raise wrong_type(
                "cache", cache, "a strobe.PagedCache or strobe.DenseCache", "put your tensors in one of them"
            )
        for field in needed:
            if not isinstance(field, Tensor):
                raise _no_tensor(cache)
        for field in held[4:]:
            if field is not None and not isinstance(field, Tensor):
                raise _no_tensor(cache)
        counts = {name: getattr(held, name) for name in ("seqlens", "page_table", "k_start")}
        wide = {name: as_int32(one) for name, one in counts.items() if one is not None and one.dtype == torch.int64}
        return held._replace(**wide) if wide else held

    def word(self, field: str) -> str:
        """The name of a field in the caller's cache."""
        return f"cache.{field}_pages" if self.page_table is not None and field in ("k", "v") else f"cache.{field}"


def _no_tensor(cache: PagedCache | DenseCache) -> Exception:
    """The error for the first field of a cache that must be a tensor and is not."""
    optional = ("k_start", "k_scale", "v_scale")
    others = [(name, field) for name, field in zip(cache._fields, cache) if not isinstance(field, Tensor)]
    name, field = next((name, field) for name, field in others if field is not None or name not in optional)
    return wrong_type(
        f"cache.{name}", field, "a tensor", f"see strobe.{type(cache).__name__}, and wrap it in torch.tensor(...)"
    )


def quantize_kv(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize keys and values to float8_e4m3fn with one scale per head: (k8, v8, k_scale, v_scale).

    >>> k8, v8, k_scale, v_scale = quantize_kv(torch.randn(2, 10, 4, 64), torch.randn(2, 10, 4, 64))
    >>> k8.dtype, k8.shape, k_scale.shape
    (torch.float8_e4m3fn, torch.Size([2, 10, 4, 64]), torch.Size([4]))

    k and v: [..., H_kv, D] in float16, bfloat16, float32 or float64. The scales are float32 [H_kv]: k is about
    k8 * k_scale[:, None]. The largest finite magnitude of a head becomes 448. NaN stays NaN, and infinities become
    magnitude 448. Does not synchronize with the device. Raises InvalidProblem and TypeError.
    """
    for name, tensor in (("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise wrong_type(name, tensor, "a tensor [..., H_kv, D]", "pass a torch.Tensor")
        check_strided(name, tensor)
        if tensor.dtype not in DTYPES:
            raise InvalidProblem(
                name, tensor.dtype, "float16, bfloat16, float32 or float64", "quantize before anything else does"
            )
        if tensor.dim() < 2:
            raise InvalidProblem(
                name, f"shape {list(tensor.shape)}", "[..., H_kv, D]", "keep the heads as a dimension of their own"
            )
    if k.shape[-2] != v.shape[-2]:
        raise InvalidProblem("v", f"{v.shape[-2]} heads", f"k's {k.shape[-2]} heads", "give k and v the same heads")
    (k8, k_scale), (v8, v_scale) = _quantized(k), _quantized(v)
    return k8, v8, k_scale, v_scale


def _quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.float().clamp(-torch.finfo(torch.float32).max, torch.finfo(torch.float32).max)
    size = torch.where(x.isfinite(), wide.abs(), 0.0).transpose(-1, -2).flatten(0, -2)
    most = size.amax(0) if size.shape[0] else size.new_zeros(size.shape[1:])
    scale = _scale_of(most)
    return to_fp8(wide, scale), scale


def to_fp8(x: Tensor, scale: Tensor | None) -> Tensor:
    """x [..., H, D] divided by scale [H], clamped to magnitude 448 and rounded to float8_e4m3fn."""
    return (x if scale is None else x / scale[:, None].to(x.dtype)).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., H, D] in float8_e4m3fn and a float32 scale for each row [..., H], by the rules of `quantize_kv`.

    >>> x8, scale = quantize_rows(torch.tensor([[1.0, -2.0], [0.0, 0.0]]))
    >>> x8.float().tolist(), (448 * scale).tolist()
    ([[224.0, -448.0], [0.0, 0.0]], [2.0, 448.0])
    """
    wide = x.float().clamp(-torch.finfo(torch.float32).max, torch.finfo(torch.float32).max)
    scale = _scale_of(torch.where(x.isfinite(), wide.abs(), 0.0).amax(-1))
    return (wide / scale[..., None]).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def _scale_of(largest: Tensor) -> Tensor:
    """The scale that maps the largest magnitude to 448, or 1 if this magnitude is 0."""
    least = torch.finfo(torch.float32).smallest_normal  # a smaller scale could round to 0
    return torch.where(largest > 0, (largest / FP8_MAX).clamp(min=least), 1.0)


class OfCache:
    """Properties of a DecodeProblem or AppendProblem that follow from its layout."""

    layout: Dense | Paged

    @property
    def paged(self) -> bool:
        return isinstance(self.layout, Paged)

    @property
    def page_size(self) -> int:
        """Keys per page. A dense cache's row is one page."""
        return self.layout.page_size if isinstance(self.layout, Paged) else self.layout.seqlen_k

    @property
    def capacity(self) -> int:
        """The most keys that a sequence can have."""
        return self.layout.max_pages * self.layout.page_size if isinstance(self.layout, Paged) else self.layout.seqlen_k


# ---------------------------------------------------------------- argument check of a cache


def check_cache(held: Held, batch: int, dtype: torch.dtype, like: str, by_token: bool = False) -> Dense | Paged:
    """Validate a cache for `batch` sequences in `dtype`, the batch and dtype of the argument named `like`. by_token:
    scales may be given for each key and head.

    Returns its layout with seqlen_q = 0. Raises InvalidProblem or TypeError.
    """
    _check_pools(held, dtype, like)
    layout = _rows(held, batch, like) if held.page_table is None else _paged(held, held.page_table, batch, like)
    _check_ints(held.seqlens, "cache.seqlens", batch, like)
    for name, scale in (("k_scale", held.k_scale), ("v_scale", held.v_scale)):
        if scale is not None:
            _check_scale(held, name, scale, by_token)
    return layout


def _check_pools(held: Held, dtype: torch.dtype, like: str) -> None:
    for field in ("k", "v"):
        tensor, word = getattr(held, field), held.word(field)
        shape = "[n_pages, page_size, H_kv, D]" if held.page_table is not None else "[B, S_max, H_kv, D]"
        check_tensor(word, tensor, shape, 4)
        if tensor.dtype not in (dtype, FP8):
            raise InvalidProblem(
                word,
                tensor.dtype,
                f"{like}'s dtype {dtype}, or float8_e4m3fn",
                f"convert {like} or the cache; see strobe.quantize_kv",
            )
        if tensor.dtype != held.k.dtype:
            raise InvalidProblem(word, tensor.dtype, f"{held.word('k')}'s {held.k.dtype}", "give both in one dtype")
    k, v = held.k, held.v
    if v.shape[:3] != k.shape[:3]:
        raise InvalidProblem(
            held.word("v"),
            f"shape {list(v.shape)}",
            f"{held.word('k')}'s {list(k.shape[:3])} and D_v",
            "keep keys and values alike",
        )
    for field in held._fields[1:]:
        tensor = getattr(held, field)
        if not isinstance(tensor, Tensor):
            continue
        check_strided(held.word(field), tensor)
        if tensor.device != k.device:
            raise InvalidProblem(
                held.word(field),
                f"device {tensor.device}",
                f"{held.word('k')}'s {k.device}",
                "keep a cache on one device",
            )


def _paged(held: Held, table: Tensor, batch: int, like: str) -> Paged:
    if table.dtype != torch.int32:
        raise InvalidProblem("cache.page_table", table.dtype, "torch.int32", "convert it with .to(torch.int32)")
    if table.dim() != 2 or table.shape[0] != batch:
        raise InvalidProblem(
            "cache.page_table",
            f"shape {list(table.shape)}",
            f"[{batch}, max_pages], {like}'s batch",
            "give a row of page ids a sequence",
        )
    return Paged(batch, 0, _page_size(held), held.k.shape[0], table.shape[1])


def _page_size(held: Held) -> int:
    size = held.k.shape[1]
    if size == 0:
        raise InvalidProblem("cache.k_pages", "pages of 0 keys", "a page_size of at least 1", "check the pool's shape")
    return size


def _rows(held: Held, batch: int, like: str) -> Dense:
    if held.k.shape[0] != batch:
        raise InvalidProblem(
            "cache.k", f"batch {held.k.shape[0]}", f"{like}'s batch {batch}", "give a cache row a sequence"
        )
    if held.k_start is not None:
        _check_ints(held.k_start, "cache.k_start", batch, like)
    return Dense(batch, 0, held.k.shape[1])


def _check_ints(tensor: Tensor, word: str, batch: int, like: str) -> None:
    if tensor.dtype != torch.int32:
        raise InvalidProblem(word, tensor.dtype, "torch.int32", "convert it with .to(torch.int32)")
    if tuple(tensor.shape) != (batch,):
        raise InvalidProblem(
            word, f"shape {list(tensor.shape)}", f"[{batch}], {like}'s batch", "give one number a sequence"
        )


def _check_scale(held: Held, name: str, scale: Tensor, by_token: bool) -> None:
    word, heads = f"cache.{name}", held.k.shape[2]
    if held.k.dtype != FP8:
        raise InvalidProblem(
            word,
            "a scale",
            f"None, for a cache in {held.k.dtype}",
            "leave it out: only float8_e4m3fn caches have scales",
        )
    if by_token and scale.dtype == torch.float32 and scale.shape == held.k.shape[:3]:
        return
    if scale.dtype != torch.float32 or tuple(scale.shape) != (heads,):
        many = f", or {list(held.k.shape[:3])}, one a key and head" * by_token
        raise InvalidProblem(
            word,
            f"{scale.dtype} {list(scale.shape)}",
            f"torch.float32 [{heads}], one a key head{many}",
            "expand it or convert it with .float()",
        )


def check_slots(held: Held, slots: Tensor, tokens: int, dtype: torch.dtype) -> Paged:
    """Validate pools that tokens are written to at slots, and return their layout: one sequence of all keys."""
    if slots.device != held.k.device:
        remedy = "move slots to the device of the pools"
        raise InvalidProblem("slots", f"device {slots.device}", f"cache.k_pages's {held.k.device}", remedy)
    _check_pools(held._replace(page_table=held.seqlens), dtype, "k_new")  # names the fields as pages
    if slots.dtype not in (torch.int32, torch.int64):
        raise InvalidProblem("slots", slots.dtype, "torch.int64 or torch.int32", "give a slot of the pool a token")
    if tuple(slots.shape) != (tokens,):
        got = f"shape {list(slots.shape)}"
        raise InvalidProblem("slots", got, f"[{tokens}], one a row of k_new", "give -1 where a row is padding")
    for name, scale in (("k_scale", held.k_scale), ("v_scale", held.v_scale)):
        if scale is not None:
            _check_scale(held, name, scale, True)
    n_pages = held.k.shape[0]
    return Paged(1, 0, _page_size(held), n_pages, n_pages)


def check_offsets(offsets: Tensor, seqlens: Tensor, like: str, device: torch.device) -> int:
    """Validate cu_seqlens_q of packed tokens `like` on `device`, and return the number of sequences."""
    if offsets.dtype != torch.int32:
        raise InvalidProblem("cu_seqlens_q", offsets.dtype, "torch.int32", "convert it with .to(torch.int32)")
    if offsets.dim() != 1 or (seqlens.dim() == 1 and offsets.shape[0] != seqlens.shape[0] + 1):
        known = f"[{seqlens.shape[0] + 1}], one more than the cache has sequences" if seqlens.dim() == 1 else "[B + 1]"
        remedy = "give the running sum of the sequences' new tokens, from 0"
        raise InvalidProblem("cu_seqlens_q", f"shape {list(offsets.shape)}", known, remedy)
    check_strided("cu_seqlens_q", offsets)
    if offsets.device != device:
        remedy = "move all of a call's tensors to one device"
        raise InvalidProblem("cu_seqlens_q", f"device {offsets.device}", f"{like}'s device {device}", remedy)
    return offsets.shape[0] - 1


def check_tensor(word: str, tensor: object, shape: str, rank: int) -> None:
    """Raise unless `tensor` is a strided tensor of `rank` dimensions with a contiguous, non-empty last dimension."""
    if not isinstance(tensor, Tensor):
        raise wrong_type(word, tensor, f"a tensor {shape}", "pass a torch.Tensor")
    if tensor.is_nested or tensor.layout != torch.strided:
        raise InvalidProblem(
            word,
            "a nested tensor" if tensor.is_nested else tensor.layout,
            "a strided (dense) tensor",
            "convert it with .to_dense()",
        )
    if tensor.dim() != rank:
        raise InvalidProblem(word, f"shape {list(tensor.shape)}", shape, "reshape it")
    if tensor.shape[-1] == 0:
        raise InvalidProblem(
            word, "a last dimension of 0", "a head dimension of at least 1", "check the projection that made it"
        )
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1 and tensor.numel() > 0:
        raise InvalidProblem(
            word,
            f"stride {tensor.stride(-1)} in the last dimension",
            "stride 1",
            "lay it out with its last dimension contiguous",
        )
