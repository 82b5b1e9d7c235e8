"""Shared by the FlashAttention interfaces: forward and backward calls, and errors for unsupported arguments.

`strobe.flash_attn`, `strobe.flash_attn_interface` and `strobe.cute` translate their arguments to a `Setting` and call
the functions here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidProblem, UnsupportedProblem, describe, wrong_type
from ..interface.attention import Packing, call_of
from ..mods.score import alibi
from ..ops import attention as ops
from ..ops import mods as ops_mods
from ..problem.call import Call, accumulator
from ..problem.keywords import Window, dropout_of
from ..problem.merge import Partial, merge


class Setting(NamedTuple):
    """The arguments of a call other than q, k and v, with FlashAttention's meanings.

    softcap 0.0 means none. deterministic False means torch.are_deterministic_algorithms_enabled(). scale None means 1 /
    sqrt(D).
    """

    scale: float | None = None
    causal: bool = False
    window: Window = (None, None)
    softcap: float | None = 0.0
    deterministic: bool = False
    sinks: Tensor | None = None
    packing: Packing | None = None
    alibi_slopes: Tensor | None = None  # [H_q] or [B, H_q]
    dropout_p: float = 0.0

    def plain(self) -> Setting:
        """The setting with Python numbers. Callers of the originals also pass one-element tensors, and causal=1.

        Reading a tensor on a GPU synchronises with the device.

        >>> Setting(torch.tensor(0.5), 1, torch.tensor([3, 0])).plain()[:3]
        (0.5, True, (3, 0))
        """
        causal = number("causal", self.causal)
        packing = self.packing
        if packing is not None:
            packing = (*packing[:2], number("max_seqlen_q", packing[2]), number("max_seqlen_k", packing[3]))
        return self._replace(
            scale=number("softmax_scale", self.scale),
            causal=bool(causal) if isinstance(causal, int) else causal,
            window=window_of(self.window),
            softcap=number("softcap", self.softcap),
            packing=packing,
        )


def number(name: str, value: object) -> Any:
    """A one-element tensor as a Python number; other values unchanged. Raises for other sizes and for tensors that
    require grad.
    """
    if not isinstance(value, Tensor):
        return value
    if value.numel() != 1:
        raise InvalidProblem(
            name, f"a tensor of shape {list(value.shape)}", "a number", "give one number, or a tensor of one element"
        )
    if value.requires_grad:
        raise UnsupportedProblem(
            describe(name, "a tensor that requires grad", "a number", "strobe has no gradient of it; pass value.item()")
        )
    return value.item()


def window_of(window: Any) -> Any:
    """A tensor (left, right) as a pair of Python numbers; other values unchanged. Raises InvalidProblem for a tensor of
    another size.
    """
    if not isinstance(window, Tensor):
        return window
    if window.numel() != 2:
        raise InvalidProblem(
            "window_size", f"a tensor of shape {list(window.shape)}", "a pair (left, right)", "give both sides"
        )
    return tuple(window.flatten().tolist())


# ---------------------------------------------------------------- forward and backward


def forward(q: Tensor, k: Tensor, v: Tensor, setting: Setting) -> tuple[Tensor, Tensor]:
    """out [B, S_q, H_q, D_v] in q's dtype and lse [B, H_q, S_q] (natural logarithm, float32 or wider), or packed [T, H,
    D_v] and [H, T].

    Both are differentiable. Error messages use FlashAttention's argument names.

    >>> q = torch.randn(1, 5, 2, 16)
    >>> [list(t.shape) for t in forward(q, q, q, Setting(causal=True))]
    [[1, 5, 2, 16], [1, 2, 5]]
    """
    try:
        out, lse = _run(_call(q, k, v, setting), setting)
        return out, lse
    except (InvalidProblem, TypeError) as error:
        raise in_their_words(error) from None


def attend(q: Tensor, k: Tensor, v: Tensor, setting: Setting) -> Tensor:
    """Only out of `forward`. The backward then computes no gradient of lse.

    >>> q = torch.randn(1, 5, 2, 16)
    >>> torch.equal(attend(q, q, q, Setting()), forward(q, q, q, Setting())[0])
    True
    """
    try:
        return _run(_call(q, k, v, setting), setting, out_alone=True)[0]
    except (InvalidProblem, TypeError) as error:
        raise in_their_words(error) from None


def backward(
    gradient: Tensor,
    forward_of: tuple[Tensor, Tensor],
    qkv: tuple[Tensor, Tensor, Tensor],
    setting: Setting,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and dsinks. out and lse (`forward_of`) may cover more keys than k and v hold: ring attention passes
    the merged ones.

    gradient is dout. dlse is the gradient of lse; None means 0. dsinks is empty if the setting has no sinks.

    >>> q, k = torch.randn(1, 4, 2, 16), torch.randn(1, 6, 2, 16)
    >>> whole = forward(q, k, k, Setting())
    >>> part = lambda keys: backward(torch.ones_like(q), whole, (q, keys, keys), Setting())[0]
    >>> torch.allclose(part(k[:, :4]) + part(k[:, 4:]), part(k), atol=1e-5)
    True
    """
    q, k, v = (rows_contiguous(t.detach()) for t in qkv)
    call = _call(q, k, v, setting)._replace(needs_grad=True)
    out, lse = (t.detach().contiguous() for t in forward_of)
    shape = (*q.shape[:-1], v.shape[-1])
    lse_shape = (*shape[:-3], shape[-2], shape[-3])
    tensors = (
        ("out", out, shape),
        ("dout", gradient, shape),
        ("softmax_lse", lse, lse_shape),
        ("dlse", dlse, lse_shape),
    )
    for name, given, wanted in tensors:
        if given is None:
            continue
        if tuple(given.shape) != wanted:
            raise InvalidProblem(
                name, f"shape {list(given.shape)}", str(list(wanted)), "pass what belongs to the forward of this q"
            )
        if name in ("out", "dout") and given.dtype != q.dtype:
            raise InvalidProblem(
                name, given.dtype, f"q's {q.dtype}", "convert it; a merged out is rounded once, at the end"
            )
    lse, dlse = (None if t is None else t.to(accumulator(q.dtype)) for t in (lse, dlse))
    with torch.no_grad():
        return ops.BACKWARD(gradient, out, lse, dlse, *call.arguments)


def _run(call: Call, setting: Setting, out_alone: bool = False) -> tuple[Tensor, ...]:
    """out and lse of a call, with the bias and the dropout of its setting. The seed comes from torch's generator."""
    dropout = dropout_of(number("dropout_p", setting.dropout_p), None, call.q)
    if setting.alibi_slopes is None and dropout is None:
        return ops.run(call, out_alone=True) if out_alone else ops.run(call)
    score = None if setting.alibi_slopes is None else alibi(setting.alibi_slopes)
    return ops_mods.run(ops_mods.bind(call, score, None, dropout))[:2]


def _call(q: Tensor, k: Tensor, v: Tensor, setting: Setting) -> Call:
    q, k, v = (rows_contiguous(t) for t in (q, k, v))
    setting = setting.plain()
    options = setting.scale, setting.softcap or None, setting.deterministic or None
    return call_of(
        q,
        k,
        v,
        causal=setting.causal,
        window=setting.window,
        sinks=setting.sinks,
        options=options,
        packing=setting.packing,
    )


THEIRS = {
    "scale": "softmax_scale",
    "window": "window_size",
    "window left": "window_size",
    "window right": "window_size",
    "sinks": "learnable_sink",
    "score_mod": "alibi_slopes",
}


def in_their_words(
    error: InvalidProblem | TypeError, also: Mapping[str, str] = MappingProxyType({})
) -> InvalidProblem | TypeError:
    """The error with the original function's name for the argument. `also` adds names to THEIRS.

    >>> in_their_words(TypeError("window: got int, expected a pair (left, right); give both sides"))
    TypeError('window_size: got int, expected a pair (left, right); give both sides')
    """
    words = {**THEIRS, **also}
    if isinstance(error, InvalidProblem):
        return error.named(words.get(error.argument, error.argument))
    name, colon, said = str(error).partition(":")
    return TypeError(words[name] + colon + said) if name in words else error


def rows_contiguous(tensor: Tensor) -> Tensor:
    """The tensor, copied if its last dimension is strided. The originals copy such tensors; strobe.attention raises for
    them.
    """
    return tensor.contiguous() if isinstance(tensor, Tensor) and tensor.dim() and tensor.stride(-1) != 1 else tensor


# ---------------------------------------------------------------- shared by the originals' private functions

_ROWS = 128  # the originals round the rows of softmax_d up to a multiple of this


def write(
    targets: tuple[Tensor | None, ...], gradients: tuple[Tensor, ...], names: tuple[str, ...] = ("dq", "dk", "dv")
) -> None:
    """Copy each gradient to its target; a target may be None. All shapes are checked before anything is written."""
    for name, target, gradient in zip(names, targets, gradients):
        if target is not None and target.shape != gradient.shape:
            raise InvalidProblem(
                name,
                f"shape {list(target.shape)}",
                str(list(gradient.shape)),
                "allocate it with the shape of its result",
            )
    with torch.no_grad():
        for target, gradient in zip(targets, gradients):
            if target is not None:
                target.copy_(gradient)


def softmax_d(dout: Tensor, out: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Row sums of dout * out, float32 [B, H, S rounded up to 128]; packed [H, T + 128 n], with 128 spare rows after
    each of the n sequences.

    >>> softmax_d(torch.ones(2, 5, 4, 16), torch.ones(2, 5, 4, 16)).shape
    torch.Size([2, 4, 128])
    """
    with torch.no_grad():
        delta = torch.linalg.vecdot(dout.float(), out.float())
        if cu_seqlens is None:
            delta = delta.transpose(1, 2)
            return torch.nn.functional.pad(delta, (0, -delta.shape[-1] % _ROWS))
        rows = torch.arange(len(out), dtype=cu_seqlens.dtype, device=out.device)
        sequence = torch.bucketize(rows, cu_seqlens[1:-1], right=True)
        roomy = delta.new_zeros(len(out) + _ROWS * (len(cu_seqlens) - 1), delta.shape[1])
        return roomy.index_copy(0, rows + _ROWS * sequence, delta).T


def applied(function: Callable, order: str) -> staticmethod:
    """`apply` of the original's autograd class: it calls `function` with positional arguments in the given order of
    names.

    >>> applied(lambda a, b: (a, b), "b a").__func__(1, 2)
    (2, 1)
    """
    names = order.split()

    def apply(*arguments: object) -> Any:
        if len(arguments) > len(names):
            raise TypeError(
                describe(
                    "apply",
                    f"{len(arguments)} arguments",
                    f"at most {len(names)}: {', '.join(names)}",
                    "pass them by position",
                )
            )
        given = dict(zip(names, arguments))
        wanted = given.pop("is_grad_enabled", True)
        with torch.set_grad_enabled(bool(wanted) and torch.is_grad_enabled()):
            return function(**given)

    return staticmethod(apply)


def combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None, out_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Merge partial results over disjoint keys, [splits, ..., H, D] and [splits, ..., H], into out [..., H, D] and lse
    [..., H].

    >>> whole, lse = combine(torch.ones(2, 1, 3, 4, 16), torch.zeros(2, 1, 3, 4), None, None)
    >>> whole.shape, round(lse[0, 0, 0].item(), 4)
    (torch.Size([1, 3, 4, 16]), 0.6931)
    """
    for name, part in (("out_partial", out_partial), ("lse_partial", lse_partial)):
        if not isinstance(part, Tensor):
            raise wrong_type(name, part, "a tensor [splits, ...]", "stack the partial results")
    shape = list(out_partial.shape)
    if len(shape) < 2 or shape[0] == 0:
        raise InvalidProblem(
            "out_partial", f"shape {shape}", "[splits, ..., H, D] of at least one split", "stack the partial results"
        )
    if list(lse_partial.shape) != shape[:-1]:
        raise InvalidProblem(
            "lse_partial",
            f"shape {list(lse_partial.shape)}",
            f"{shape[:-1]}, as out_partial without D",
            "give both for the same splits",
        )
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise wrong_type("out_dtype", out_dtype, "a torch.dtype or None", "such as torch.bfloat16")
    parts = [Partial(part.float(), lse.float().transpose(-1, -2)) for part, lse in zip(out_partial, lse_partial)]
    whole = parts[0]
    for part in parts[1:]:
        whole = merge(whole, part)
    lse = whole.lse.transpose(-1, -2)
    result = whole.out.masked_fill((lse == -torch.inf)[..., None], 0.0)  # rows without a key in any split are 0
    if out is None:
        return result.to(out_dtype or out_partial.dtype), lse
    if out_dtype not in (None, out.dtype) or out.shape != result.shape:
        got, expected = f"{out.dtype} {list(out.shape)}", f"{out_dtype or out.dtype} {list(result.shape)}"
        raise InvalidProblem("out", got, expected, "allocate it like one of the parts")
    with torch.no_grad():
        out.copy_(result)
    return out, lse


# ---------------------------------------------------------------- unsupported arguments

_DROPOUT = "only flash_attn_func, flash_attn_varlen_func and their packed forms drop weights; keep 0.0 here"
_PAGES = "use strobe.attention_decode(q, strobe.PagedCache(k, v, page_table, seqlens)) under torch.no_grad()"
_PACKED = "these are offsets of new keys beside packed queries; give cu_seqlens_q, too"
_LEFTPAD = "packed keys have no padding; move cu_seqlens_k, or use flash_attn_with_kvcache with cache_leftpad"
_OVER_CACHE = (
    "a cache takes queries [B, T, H, D] with neither offsets nor lengths of their own; leave out "
    "cu_seqlens and seqused_q, or the cache"
)
_PADDED = "padded tensors have no lengths in a backward; pack them, and say lengths by cu_seqlens"
_FP8 = "strobe has no FP8 kernel yet; give q, k and v in bfloat16"
_MODS = (
    "CuTe functions do not run here; give strobe.attention a function of torch or triton.jit, as score_mod=f or as "
    "mask=strobe.mask_mod(f)"
)
_SPARSE = (
    "strobe.attention(mask=...) finds the tiles that a mask hides; your own lists of blocks are "
    "mask=strobe.block_lists(...)"
)
_TUNING = "strobe plans its launches itself; leave it at the default"

UNSERVED: dict[str, tuple[tuple[object, ...], str]] = {
    "dropout_p": ((0.0,), _DROPOUT),
    "alibi_slopes": (
        (None,),
        "only flash_attn_func, flash_attn_varlen_func and their packed forms add a bias; leave it out here",
    ),
    "return_attn_probs": ((False,), "an exchange between processes returns no log-sum-exp; leave it out"),
    "leftpad_k": ((None,), _LEFTPAD),
    "output_scale": ((None,), "strobe does not quantize outputs; scale the combined out"),
    "cu_seqlens_k_new": ((None,), _PACKED),
    "page_table": ((None,), _PAGES),
    "k_new": ((None,), _OVER_CACHE),
    "v_new": ((None,), _OVER_CACHE),
    "kv_batch_idx": ((None,), _OVER_CACHE),
    "rotary_cos": ((None,), _OVER_CACHE),
    "rotary_sin": ((None,), _OVER_CACHE),
    "seqlens_rotary": ((None,), _OVER_CACHE),
    "seqused_q": ((None,), _OVER_CACHE),
    "sequed_q": ((None,), _PADDED),
    "sequed_k": ((None,), _PADDED),
    "qv": (
        (None,),
        (
            "strobe has no second product in its scores; concatenate qv to q and v to k, with the same scale, which "
            "scores the same"
        ),
    ),
    "q_descale": ((None,), _FP8),
    "k_descale": ((None,), _FP8),
    "v_descale": ((None,), _FP8),
    "attention_chunk": (
        (0,),
        (
            "strobe has no chunks; strobe.attention(mask=strobe.documents(position // chunk) & strobe.causal()) means "
            "the same"
        ),
    ),
    "seqlen_k_per_split": ((None,), _TUNING),
    "disable_scheduler_metadata": ((False,), _TUNING),
    "gather_kv_indices": ((None,), "strobe reads all keys of a sequence; gather them before the call"),
    "min_seqlen_k": ((None,), "it belongs to gather_kv_indices, which strobe does not serve"),
    "gather_bwd_recompute_p": ((False,), "it belongs to gather_kv_indices, which strobe does not serve"),
    "gather_bwd_token_chunk": ((None,), "it belongs to gather_kv_indices, which strobe does not serve"),
    "score_mod": ((None,), _MODS),
    "score_mod_bwd": ((None,), _MODS),
    "mask_mod": ((None,), _MODS),
    "aux_tensors": ((None,), _MODS),
    "aux_scalars": ((None,), _MODS),
    "block_sparse_tensors": ((None,), _SPARSE),
    "block_sparse_tensors_bwd": ((None,), _SPARSE),
    "return_softmax": ((False,), "strobe never holds the weights; ask for softmax_lse and recompute those you need"),
    "zero_tensors": ((False,), "strobe writes every element of its results; leave it out"),
}


# Arguments that affect only the originals' speed. strobe plans its launches itself and ignores them.
HINTS = frozenset(
    (
        "num_splits",
        "pack_gqa",
        "sm_margin",
        "scheduler_metadata",
        "tile_mn",
        "mma_pv_is_rs",
        "intra_wg_overlap",
        "num_threads",
        "_arch",
    )
)


def unpacked(name: str, tensor: object, parts: int, packed: bool) -> tuple[Tensor, ...]:
    """Views of q, k and v (parts = 3), or k and v (parts = 2), from one tensor [B, S, parts, H, D], or packed [T,
    parts, H, D].

    >>> [part.shape for part in unpacked("kv", torch.zeros(2, 5, 2, 4, 16), 2, packed=False)]
    [torch.Size([2, 5, 4, 16]), torch.Size([2, 5, 4, 16])]
    """
    rank, shape = (4, f"[T, {parts}, H, D]") if packed else (5, f"[B, S, {parts}, H, D]")
    if not isinstance(tensor, Tensor):
        raise wrong_type(name, tensor, f"a tensor {shape}", "pass a torch.Tensor")
    if tensor.dim() != rank or tensor.shape[-3] != parts:
        raise InvalidProblem(
            name, f"shape {list(tensor.shape)}", shape, "stack its parts in the third dimension from the end"
        )
    return tensor.unbind(-3)


def refuse(**given: object) -> None:
    """Raise UnsupportedProblem for the first argument with a value that strobe does not support. HINTS are ignored.

    >>> refuse(dropout_p=0.0, alibi_slopes=None, num_splits=4)
    >>> refuse(zero_tensors=True)  # doctest: +NORMALIZE_WHITESPACE
    Traceback (most recent call last):
    ...
    strobe.errors.UnsupportedProblem: zero_tensors: got True, expected False; strobe writes every element of its
    results; leave it out
    """
    for name, value in given.items():
        if name in HINTS:
            continue
        served, alternative = UNSERVED[name]
        if not any(value is one or (not isinstance(value, Tensor) and value == one) for one in served):
            got = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise UnsupportedProblem(describe(name, got, " or ".join(map(repr, served)), alternative))
