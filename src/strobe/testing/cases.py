"""Named attention problems. Tests run every kernel on every device with this table.

A case holds shapes, mask, options and the memory layout of its tensors. `build` makes the Call for a device, dtype,
input family and seed. Lengths are those at which kernels tend to fail: 0, 1 to 3, around tile sizes (16, 64, 128), and
S_q != S_k in both directions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ..problem import mask as masks
from ..problem.call import Call
from ..problem.mask import NO_BOUND, Mask
from . import inputs

ALL = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
STORAGES = ("contiguous", "heads_first", "odd_offset", "gaps", "mixed", "expanded_heads", "expanded_batch")


@dataclass(frozen=True)
class Case:
    """A named problem. It is packed if lengths_q is given.

    >>> call = CASES["causal"].build(dtype=torch.bfloat16, family="needle", seed=3)
    >>> call.q.shape, call.right
    (torch.Size([2, 130, 4, 64]), 0)
    """

    name: str
    seqlen_q: int = 64
    seqlen_k: int | None = None  # None: seqlen_q
    batch: int = 2
    heads: tuple[int, int] = (2, 2)  # H_q, H_kv
    head_dim: int = 64
    head_dim_v: int | None = None  # None: head_dim
    mask: Callable[[Case, torch.device], Mask] | None = None
    scale: float | None = None
    softcap: float = 0.0
    sinks: bool | tuple[float, ...] = False  # True: random values
    partial: bool = False
    storage: str = "contiguous"  # one of STORAGES
    lengths_q: tuple[int, ...] | None = None  # packed: rows of each sequence
    lengths_k: tuple[int, ...] | None = None  # packed: keys of each sequence; None: lengths_q
    outside: tuple[int, int] = (0, 0)  # packed: tokens before the first sequence and after the last
    promised: bool = False  # packed: max_seqlen_q and max_seqlen_k are given
    dtypes: tuple[torch.dtype, ...] = ALL

    @property
    def packed(self) -> bool:
        return self.lengths_q is not None

    @property
    def keys(self) -> int:
        return self.seqlen_q if self.seqlen_k is None else self.seqlen_k

    def build(
        self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, family: str = "normal",
        seed: int = 0,
        requires_grad: bool = False, kernel: str = "",
    ) -> Call:  # fmt: skip
        """The Call, with tensors on `device` in `dtype` (sinks in float32) and values of the input `family`."""
        device = torch.device(device)
        shapes = self._shapes()
        drawn = inputs.qkv(family, *shapes, self.head_dim_v or self.head_dim, seed)
        q, k, v = (laid_out(tensor.to(device, dtype), self.storage, n) for n, tensor in enumerate(drawn))
        generator = torch.Generator().manual_seed(seed + 2)
        sinks = drawn_sinks(self.sinks, self.heads[0], generator, device)
        for tensor in (q, k, v, sinks):
            if tensor is not None:
                tensor.requires_grad_(requires_grad)
        call = Call(
            q,
            k,
            v,
            sinks=sinks,
            scale=self.scale,
            softcap=self.softcap,
            partial=self.partial,
            kernel=kernel,
            needs_grad=requires_grad,
        )
        call = self._with_offsets(call, device) if self.packed else call
        return call.with_mask(self.mask(self, device)) if self.mask else call

    def _shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        heads_q, heads_kv = self.heads
        if not self.packed:
            return (self.batch, self.seqlen_q, heads_q, self.head_dim), (self.batch, self.keys, heads_kv, self.head_dim)
        total_q, total_k = (sum(lengths) + sum(self.outside) for lengths in self._lengths())
        return (total_q, heads_q, self.head_dim), (total_k, heads_kv, self.head_dim)

    def _lengths(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        lengths_q = self.lengths_q or ()
        return lengths_q, lengths_q if self.lengths_k is None else self.lengths_k

    def _with_offsets(self, call: Call, device: torch.device) -> Call:
        lengths_q, lengths_k = self._lengths()
        offsets = [
            _int32([self.outside[0] + n for n in accumulate(lengths, initial=0)], device)
            for lengths in (lengths_q, lengths_k)
        ]
        longest = [max(lengths, default=0) if self.promised else NO_BOUND for lengths in (lengths_q, lengths_k)]
        return call._replace(
            cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], max_seqlen_q=longest[0], max_seqlen_k=longest[1]
        )


def _int32(values: list, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def drawn_sinks(
    asked: bool | tuple[float, ...], heads: int, generator: torch.Generator, device: torch.device
) -> Tensor | None:
    """A case's sinks, float32 [H_q]: its own values, or random values for True, or None."""
    drawn = torch.randn(heads, generator=generator)
    return (torch.tensor(asked) if isinstance(asked, tuple) else drawn).to(device) if asked else None


def laid_out(tensor: Tensor, storage: str, index: int) -> Tensor:
    """The tensor with the memory layout `storage`. Expanded layouts repeat one head or one batch entry. index: 0, 1, 2
    for q, k, v.
    """
    tokens, heads = tensor.dim() - 3, tensor.dim() - 2
    if storage == "mixed":  # q, k and v have different layouts
        storage = ("heads_first", "contiguous", "gaps")[index]
    if storage == "contiguous":
        return tensor.contiguous()
    if storage == "heads_first":
        return tensor.transpose(tokens, heads).contiguous().transpose(tokens, heads)
    if storage == "expanded_heads":
        return tensor if index == 0 else tensor.narrow(heads, 0, 1).clone().expand_as(tensor)
    if storage == "expanded_batch":
        return tensor[:1].clone().expand_as(tensor)
    grow = {"odd_offset": (0, 0, 0, 3), "gaps": (0, 3, 1, 8)}[storage]  # unused elements added to each dimension
    room = tensor.new_zeros([size + more for size, more in zip(tensor.shape, grow[4 - tensor.dim() :])])
    start = 1 if storage == "odd_offset" else 0
    view = room[tuple(slice(0, size) for size in tensor.shape[:-1])][..., start : start + tensor.shape[-1]]
    return view.copy_(tensor)


def _of(make: Callable[..., Mask], *arguments: object) -> Callable[[Case, torch.device], Mask]:
    return lambda case, device: make(*arguments)


def _both(*builders: Callable[[Case, torch.device], Mask]) -> Callable[[Case, torch.device], Mask]:
    def build(case: Case, device: torch.device) -> Mask:
        combined = masks.full()
        for builder in builders:
            combined = combined & builder(case, device)
        return combined

    return build


def _lengths(*lengths: int) -> Callable[[Case, torch.device], Mask]:
    return lambda case, device: masks.key_lengths(_int32(list(lengths), device))


def _prefixes(*lengths: int) -> Callable[[Case, torch.device], Mask]:
    return lambda case, device: masks.prefix_causal(_int32(list(lengths), device))


def _documents(kind: str) -> Callable[[Case, torch.device], Mask]:
    """A builder of documents masks. contiguous: runs of 23 positions. padded: also -1 at the end. shuffled: five random
    ids (-1 to 3).
    """

    def build(case: Case, device: torch.device) -> Mask:
        ids = []
        for length in (case.seqlen_q, case.keys):
            position = torch.arange(length).expand(case.batch, length)
            run = (position + 5 * torch.arange(case.batch)[:, None]) // 23
            if kind == "padded":
                run = torch.where(position >= length - length // 4, -1, run)
            elif kind != "contiguous":
                run = torch.randint(-1, 4, run.shape, generator=torch.Generator().manual_seed(length))
            ids.append(run.to(device, torch.int32))
        return masks.documents(ids[0]) if case.seqlen_k is None else masks.documents(*ids)

    return build


_causal = _of(masks.causal)


def _window(left: int | None, right: int | None) -> Callable[[Case, torch.device], Mask]:
    return _of(masks.window, left, right)


_PLAIN = (
    *(Case(f"length_{n}", n, head_dim=32) for n in (1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257)),
    *(Case(f"decode_{n}", 1, n, heads=(4, 2)) for n in (1, 63, 64, 129, 260)),
    Case("few_keys", 130, 3),
    Case("one_key", 70, 1),
    Case("one_row_causal", 1, 77, mask=_causal),
    Case("no_rows", 0, 5),
    Case("no_keys", 5, 0),
    Case("no_keys_sinks", 5, 0, sinks=True),
    Case("no_batch", 8, batch=0),
    *(Case(f"head_dim_{d}", 70, 81, head_dim=d, batch=1, mask=_causal) for d in (1, 16, 21, 40, 80, 96, 128, 192, 256)),
    Case("head_dims_192_128", 70, 81, head_dim=192, head_dim_v=128, batch=1, mask=_causal),
    Case("head_dims_40_72", 33, 50, head_dim=40, head_dim_v=72),
    Case("head_dims_64_128", 33, 50, head_dim=64, head_dim_v=128),
    Case("head_dims_32_96", 70, 50, head_dim=32, head_dim_v=96),
    Case("head_dims_16_1", 33, 50, head_dim=16, head_dim_v=1),
    Case("grouped", 67, 75, heads=(6, 2), mask=_causal),
    Case("one_kv_head", 67, 75, heads=(5, 1)),
    Case("many_heads", 17, heads=(12, 12), head_dim=16, batch=3),
)
_MASKED = (
    Case("causal", 130, heads=(4, 2), mask=_causal),
    Case("causal_more_keys", 65, 200, mask=_causal),
    Case("causal_more_rows", 200, 65, mask=_causal),
    Case("causal_more_rows_sinks", 200, 65, mask=_causal, sinks=True),
    Case("causal_799_to_3", 260, 3, heads=(2, 1), head_dim=32, mask=_causal),
    Case("window_both", 130, mask=_window(20, 7)),
    Case("window_left", 150, 131, mask=_window(33, None)),
    Case("window_right", 131, 150, mask=_window(None, 9)),
    Case("window_diagonal", 129, mask=_window(0, 0)),
    Case("window_huge", 66, mask=_window(1000, 1000)),
    Case("window_causal", 200, 260, mask=_both(_causal, _window(64, None))),
    Case("window_causal_more_rows", 260, 90, mask=_both(_causal, _window(15, None)), sinks=True),
    Case("window_beyond_the_keys", 200, 40, mask=_window(10, 10)),  # the first rows see no key
    Case("prefix", 100, 120, mask=_of(masks.prefix_causal, 37)),
    # one key more than a tile of 32, 64 or 128. In a backward over keys, early rows see only this key of its tile.
    Case("prefix_33", 70, mask=_of(masks.prefix_causal, 33)),
    Case("prefix_65", 140, mask=_of(masks.prefix_causal, 65)),
    Case("prefix_129", 140, 200, mask=_of(masks.prefix_causal, 129)),
    Case("prefix_each", 100, 70, batch=3, mask=_prefixes(0, 37, 70)),
    Case(
        "prefix_window", 140, mask=_both(_of(masks.prefix_causal, 64), _window(30, None))
    ),  # for some rows the prefix is outside the window
    Case("key_lengths", 66, 140, batch=4, mask=_lengths(140, 1, 0, 65)),
    Case("key_lengths_sinks", 66, 140, batch=4, mask=_lengths(0, 140, 129, 64), sinks=True),
    Case("key_lengths_causal", 90, 140, batch=3, mask=_both(_causal, _lengths(140, 20, 0))),
    Case(
        "key_lengths_window", 140, 140, batch=2, mask=_both(_window(16, 0), _lengths(70, 140))
    ),  # the last row tiles see no key
    Case("documents", 150, mask=_documents("contiguous")),
    Case("documents_causal", 150, mask=_both(_causal, _documents("contiguous"))),
    Case("documents_padded", 130, mask=_documents("padded"), sinks=True),
    Case("documents_shuffled", 130, mask=_documents("shuffled")),
    Case("documents_shuffled_causal", 100, mask=_both(_causal, _documents("shuffled"))),
    Case("documents_two_sides", 90, 133, mask=_documents("contiguous")),
    Case("documents_two_sides_shuffled", 133, 90, mask=_documents("shuffled"), sinks=True),
    Case("documents_lengths_causal", 100, batch=3, mask=_both(_causal, _documents("contiguous"), _lengths(100, 64, 3))),
    Case(
        "everything",
        100,
        90,
        heads=(4, 2),
        sinks=True,
        softcap=9.0,
        mask=_both(_window(40, 30), _prefixes(5, 80), _documents("contiguous"), _lengths(90, 70)),
    ),
)
_NUMBERS = (
    Case("softcap", 80, mask=_causal, softcap=3.0),
    Case("softcap_32", 80, head_dim=32, softcap=3.0),
    Case("softcap_wide", 80, softcap=50.0, scale=1.0),
    Case("softcap_sinks_window", 130, mask=_window(30, 0), softcap=5.0, sinks=True),
    Case("scale_negative", 80, 90, scale=-0.2, mask=_causal),
    Case("scale_zero", 80, 90, scale=0.0),
    Case("scale_large", 80, 90, scale=1.0),
    Case("sinks", 80, 90, heads=(4, 2), sinks=True),
    Case("sinks_without_bound", 90, 70, heads=(4, 2), mask=_causal, sinks=(3e38, torch.inf, -torch.inf, 0.5)),
    Case("partial", 80, 90, heads=(4, 2), mask=_causal, partial=True),
    Case("partial_empty_rows", 90, 60, mask=_causal, partial=True),
)
_STORED = (
    *(Case(f"stored_{storage}", 70, 97, heads=(4, 2), mask=_causal, storage=storage) for storage in STORAGES[1:]),
    Case("stored_odd_width", 33, 65, head_dim=21, storage="odd_offset"),
    Case("stored_expanded_33_keys", 40, 33, heads=(2, 2), storage="expanded_heads"),
)
_PACKED = (
    Case("packed", lengths_q=(5, 64, 1, 130)),
    Case("packed_causal", lengths_q=(65, 3, 128, 17), heads=(4, 2), mask=_causal),
    Case("packed_two_sides", lengths_q=(5, 64, 1, 100), lengths_k=(70, 3, 129, 40), mask=_causal),
    Case("packed_empty_first", lengths_q=(0, 40, 30), lengths_k=(0, 50, 30), mask=_causal),
    Case("packed_empty_middle", lengths_q=(40, 0, 30), lengths_k=(50, 0, 30)),
    Case("packed_empty_last", lengths_q=(40, 30, 0), lengths_k=(50, 30, 0), sinks=True),
    Case("packed_no_keys_middle", lengths_q=(40, 7, 30), lengths_k=(50, 0, 30)),
    Case("packed_no_keys_first_sinks", lengths_q=(7, 40), lengths_k=(0, 50), sinks=True),
    Case("packed_no_rows_middle", lengths_q=(40, 0, 30), lengths_k=(50, 60, 30), mask=_causal),
    Case("packed_outside", lengths_q=(33, 50), outside=(5, 9), mask=_causal),
    Case("packed_outside_sinks", lengths_q=(33, 50), outside=(70, 3), sinks=True),
    Case("packed_promised", lengths_q=(33, 0, 70, 1), promised=True, mask=_causal),
    Case("packed_promised_one", lengths_q=(1, 0, 1, 1), lengths_k=(33, 70, 0, 64), promised=True, mask=_causal),
    Case(
        "packed_promised_outside", lengths_q=(3, 5), outside=(7, 70), promised=True, mask=_causal
    ),  # more rows outside than max_seqlen_q
    Case("packed_all_empty", lengths_q=(0, 0, 0)),
    Case("packed_no_sequence", lengths_q=(), outside=(4, 0)),
    Case("packed_window", lengths_q=(100, 30), lengths_k=(60, 100), mask=_window(20, 5)),
    Case("packed_lengths_1_2_3", lengths_q=(1, 2, 3), lengths_k=(3, 1, 2), head_dim=32, mask=_causal),
    Case("packed_heads_first", lengths_q=(33, 50, 20), heads=(4, 2), storage="heads_first", mask=_causal),
    Case("packed_gaps", lengths_q=(33, 50, 20), heads=(4, 2), storage="gaps"),
    Case("packed_odd_offset", lengths_q=(33, 50), head_dim=40, storage="odd_offset"),
    Case("packed_expanded_heads", lengths_q=(33, 50), heads=(4, 4), storage="expanded_heads"),
    Case("packed_partial", lengths_q=(33, 0, 50), lengths_k=(20, 7, 50), partial=True, mask=_causal),
    Case("packed_softcap_192_128", lengths_q=(40, 66), head_dim=192, head_dim_v=128, softcap=4.0, mask=_causal),
)

CASES = {case.name: case for case in (*_PLAIN, *_MASKED, *_NUMBERS, *_STORED, *_PACKED)}

_HALF = (torch.bfloat16, torch.float16)
LARGE = {  # for GPUs: several waves of tiles, long loops over keys
    case.name: case
    for case in (
        Case("large", 2048, heads=(4, 4), head_dim=128, dtypes=_HALF),
        Case("large_causal", 4096, batch=1, heads=(4, 2), head_dim=128, mask=_causal, dtypes=_HALF),
        Case("large_causal_odd", 1025, 3001, heads=(4, 1), mask=_causal, dtypes=_HALF),
        Case("large_more_rows", 3001, 1025, heads=(2, 2), mask=_causal, sinks=True, dtypes=_HALF),
        Case(
            "large_window",
            4096,
            batch=1,
            heads=(2, 1),
            head_dim=128,
            mask=_both(_causal, _window(512, None)),
            dtypes=_HALF,
        ),
        Case("large_documents", 2048, heads=(2, 2), mask=_both(_causal, _documents("contiguous")), dtypes=_HALF),
        Case("large_key_lengths", 1024, 4096, batch=3, heads=(2, 2), mask=_lengths(4096, 1, 2049), dtypes=_HALF),
        Case("large_head_dim_256", 2048, heads=(2, 2), head_dim=256, mask=_causal, dtypes=_HALF),
        Case("large_head_dims_192_128", 2048, heads=(4, 4), head_dim=192, head_dim_v=128, mask=_causal, dtypes=_HALF),
        Case("large_softcap", 2048, heads=(4, 2), softcap=20.0, mask=_causal, dtypes=_HALF),
        Case("large_float32", 1500, heads=(2, 2), mask=_causal, dtypes=(torch.float32,)),
        Case("large_packed", lengths_q=(2000, 1, 0, 1500, 129), heads=(4, 2), head_dim=128, mask=_causal, dtypes=_HALF),
        Case(
            "large_packed_two_sides",
            lengths_q=(1000, 1, 2048),
            lengths_k=(3000, 1777, 100),
            heads=(4, 4),
            mask=_causal,
            dtypes=_HALF,
        ),
    )
}
