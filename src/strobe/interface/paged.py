"""The public functions of packed queries over a KV cache. Each one builds a `PagedCall` and passes it to `ops`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NoReturn, overload

from torch import Tensor

from ..errors import wrong_type
from ..mods.mask import checked_mask
from ..mods.score import ScoreMod
from ..ops import mods_paged
from ..problem.cache import DenseCache, Held, PagedCache
from ..problem.foreign_arguments import unknown
from ..problem.keywords import Window, as_length, output_tensor
from ..problem.mask import Mask, as_int32
from ..problem.merge import Partial
from ..problem.paged import PagedCall
from ..selection.select import Choice
from .decode import Settings, settings_of


@overload
def attention_paged(
    q: Tensor, cache: PagedCache | DenseCache, *, cu_seqlens_q: Tensor, max_seqlen_q: int | None = None,
    causal: bool = True, window: Window | None = None, mask: Mask | None = None,
    score_mod: ScoreMod | Callable | None = None, scale: float | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, batch_invariant: bool = False, kernel: str | None = None, out: Tensor | None = None,
    return_lse: Literal[False] = False, **others: NoReturn,
) -> Tensor: ...  # fmt: skip
@overload
def attention_paged(
    q: Tensor, cache: PagedCache | DenseCache, *, cu_seqlens_q: Tensor, max_seqlen_q: int | None = None,
    causal: bool = True, window: Window | None = None, mask: Mask | None = None,
    score_mod: ScoreMod | Callable | None = None, scale: float | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, batch_invariant: bool = False, kernel: str | None = None, out: Tensor | None = None,
    return_lse: bool = False, **others: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def attention_paged(
    q: Tensor, cache: PagedCache | DenseCache, *, cu_seqlens_q: Tensor, max_seqlen_q: int | None = None,
    causal: bool = True, window: Window | None = None, mask: Mask | None = None,
    score_mod: ScoreMod | Callable | None = None, scale: float | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, batch_invariant: bool = False, kernel: str | None = None, out: Tensor | None = None,
    return_lse: bool = False, **others: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Compute attention of a ragged batch of new tokens over their KV caches: prefill chunks, decodes and speculated
    tokens in one call. The cache must already contain these tokens.

    >>> import torch
    >>> pages, table = torch.randn(6, 16, 2, 64), torch.tensor([[3, 5], [0, 1]], dtype=torch.int32)
    >>> cache = PagedCache(pages, pages, table, seqlens=torch.tensor([20, 9], dtype=torch.int32))
    >>> offsets = torch.tensor([0, 4, 5], dtype=torch.int32)  # 4 new tokens of the first sequence, 1 of the second
    >>> attention_paged(torch.randn(5, 8, 64), cache, cu_seqlens_q=offsets).shape
    torch.Size([5, 8, 64])

    Args:
        q: [T, H_q, D], the new tokens of all sequences, packed; H_q a multiple of the cache's heads.
        cache: strobe.PagedCache or strobe.DenseCache of B sequences, in q's dtype or in float8_e4m3fn. Its scales are
            float32 [H_kv], or have an element for each key and head: the shape of k without its last dimension.
        cu_seqlens_q: int32 [B + 1], read on the device. Rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1 of q are the
            last tokens of sequence b. A sequence may have none. Rows after the last offset are padding.
        max_seqlen_q: the most new tokens of a sequence. It selects the kernel and its tiles, so give it where it is
            known. A sequence with more is NaN, and `last_errors` reports it. None: no bound.
        causal: with n = seqlens[b] and T_b new tokens, token i has position n - T_b + i and attends to the keys up to
            this position.
        window: (left, right), the number of keys on each side of this position, both ends included; None or a negative
            number means no bound. Pages entirely before the window of a sequence's first new token are not read.
        mask, score_mod: as in `attention`. q_idx is a row's position and kv_idx a key's, both counted from the
            sequence's first key (0 for a row before it); b is the sequence. Positions beyond the ids of
            `strobe.documents` have id -1. Functions run in every kernel, prefills and decodes on Hopper, too, but not
            with batch_invariant. `causal` and `window` in a mask are bounds of the call, as the arguments are. A mask
            of drafted tokens that branch is an example (docs/guides/engines.md).
        scale, softcap, sinks, kernel: as in `attention`.
        batch_invariant: make a row's bits independent of everything else in the batch, of padding and of page layout.
        out: the output tensor, [T, H_q, D_v] in q's dtype. It may be q itself, but must not overlap other inputs.
        return_lse: also return the log-sum-exp of each row's scores.

    Returns out [T, H_q, D_v] in q's dtype, and with return_lse also lse [H_q, T] in float32 (float64 for float64
    inputs). A row that sees no key is 0, padding too. Does not synchronize with the device, so a CUDA graph may capture
    it and replay it with other lengths, offsets and pages. Values out of range in seqlens, k_start, cu_seqlens_q and
    page_table are clamped or masked, and reported by `last_errors`; on a CPU, wrong offsets raise InvalidProblem. Also
    raises TypeError, and UnsupportedProblem if no kernel can run the call or a gradient is required.
    """
    if others:
        raise unknown(attention_paged, others)
    if not isinstance(return_lse, bool):
        raise wrong_type("return_lse", return_lse, "a bool", "pass True or False")
    settings = settings_of(causal, window, scale, softcap, sinks, batch_invariant, kernel)
    call = paged_call(q, cache, cu_seqlens_q, max_seqlen_q, settings)
    out = out if out is None else output_tensor(out)
    out, lse = mods_paged.attend(call, score_mod, checked_mask(mask), out, not return_lse)
    return out if lse is None or not return_lse else (out, lse)


def partial_attention_paged(
    q: Tensor, cache: PagedCache | DenseCache, *, cu_seqlens_q: Tensor, max_seqlen_q: int | None = None,
    causal: bool = True, window: Window | None = None, mask: Mask | None = None,
    score_mod: ScoreMod | Callable | None = None, scale: float | None = None, softcap: float | None = None,
    batch_invariant: bool = False, kernel: str | None = None, **others: NoReturn,
) -> Partial:  # fmt: skip
    """Compute `attention_paged` as a part to `merge` with attention over other keys: float32 output and log-sum-exp.

    >>> import torch
    >>> k, offsets = torch.randn(2, 128, 2, 64), torch.tensor([0, 3, 3], dtype=torch.int32)
    >>> cache = DenseCache(k, k, torch.tensor([128, 0], dtype=torch.int32))
    >>> part = partial_attention_paged(torch.randn(4, 8, 64), cache, cu_seqlens_q=offsets)
    >>> part.out.shape, part.lse.shape, part.lse[:, 3].max().item()
    (torch.Size([4, 8, 64]), torch.Size([8, 4]), -inf)

    Takes the arguments of `attention_paged` except sinks, out and return_lse. Apply sinks with `with_sinks`, once,
    after the last merge.

    Returns Partial(out [T, H_q, D_v], lse [H_q, T]), both float32, or float64 for float64 inputs.
    """
    if others:
        raise unknown(partial_attention_paged, others)
    settings = settings_of(causal, window, scale, softcap, None, batch_invariant, kernel)
    call = paged_call(q, cache, cu_seqlens_q, max_seqlen_q, settings)
    out, lse = mods_paged.attend(call._replace(partial=True), score_mod, checked_mask(mask))
    return Partial(out, lse)  # type: ignore[arg-type]  # a partial call has an lse


def explain_paged(
    q: Tensor, cache: PagedCache | DenseCache, *, cu_seqlens_q: Tensor, max_seqlen_q: int | None = None,
    causal: bool = True, window: Window | None = None, mask: Mask | None = None,
    score_mod: ScoreMod | Callable | None = None, scale: float | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, batch_invariant: bool = False, kernel: str | None = None, **others: NoReturn,
) -> Choice:  # fmt: skip
    """Return what `attention_paged` would run for these arguments, without running it. See `explain`.

    >>> import torch
    >>> k, offsets = torch.randn(2, 128, 2, 64), torch.tensor([0, 3, 4], dtype=torch.int32)
    >>> cache = DenseCache(k, k, torch.tensor([128, 5], dtype=torch.int32))
    >>> explain_paged(torch.randn(4, 8, 64), cache, cu_seqlens_q=offsets).forward.kernel.name
    'cpu.paged'
    """
    if others:
        raise unknown(explain_paged, others)
    settings = settings_of(causal, window, scale, softcap, sinks, batch_invariant, kernel)
    return mods_paged.choice(paged_call(q, cache, cu_seqlens_q, max_seqlen_q, settings), score_mod, checked_mask(mask))


def paged_call(
    q: Tensor, cache: PagedCache | DenseCache, cu_seqlens_q: Tensor, max_seqlen_q: int | None, settings: Settings
) -> PagedCall:
    held = Held.of(cache)
    for name, tensor, shape in (("q", q, "[T, H_q, D]"), ("cu_seqlens_q", cu_seqlens_q, "int32 [B + 1]")):
        if not isinstance(tensor, Tensor):
            raise wrong_type(name, tensor, f"a tensor {shape}", "pass a torch.Tensor")
    k, v, seqlens, page_table, k_start, k_scale, v_scale = held
    promised = as_length("max_seqlen_q", max_seqlen_q)
    return PagedCall(
        q, k, v, seqlens, as_int32(cu_seqlens_q), page_table, k_start, k_scale, v_scale, settings.sinks, promised,
        *settings[1:],
    )  # fmt: skip
