"""Implementations of torch's flash attention ops. Each function takes the arguments of one aten op, in its order, and
returns its results.

The functions run below autograd: torch has already decided whether gradients are needed and which op computes them.
Outputs have the strides of torch's meta kernels, because torch.compile checks them. An argument that strobe does not
serve raises `Unserved`, with the argument's name, before anything runs. The conventions of the ops:

    layout    SDPA's ops use [B, H, S, D]; strobe and the `_flash` ops use [B, S, H, D] or packed [T, H, D]
    causal    the op for CPUs aligns the diagonal at the top left; the others at the bottom right, as strobe does (SDPA
              calls those
              with causal only for S_q == S_k)
    window    -1 and None mean unbounded
    lse       natural logarithm, [B, H, S] or [H, T]; the op for CPUs stores it as [B, S, H] in memory
    dropout   refused, so the returned random state holds no information
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import UnsupportedProblem, describe
from ..kernels.cpu.flash import TORCH, VECTOR, lost_nan
from ..kernels.protocol import Backward
from ..kernels.runtime.launch_cache import CACHE
from ..ops import attention as ops
from ..problem.call import FARTHEST, Call, accumulator
from ..problem.mask import NO_BOUND
from ..selection.replay import launches_here, replay
from ..selection.select import Choice

served: defaultdict[str, int] = defaultdict(int)  # kernel name -> number of aten calls that it ran
# path in the LaunchCache: a Choice by [B, H, S, D] tensors, whose launch is replayed without transposing them
TRANSPOSED = "transposed"


class Unserved(UnsupportedProblem):
    """An argument of an aten op that strobe does not support."""

    argument: str


def _unserved(argument: str, got: object, expected: str) -> Unserved:
    said = describe(
        argument,
        "a tensor" if isinstance(got, Tensor) else got,
        expected,
        "torch's own kernel serves it, where there is one",
    )
    error = Unserved(said)
    error.argument = argument
    return error


# ---------------------------------------------------------------- scaled_dot_product_attention on CPUs


def cpu_forward(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None, **later):
    """aten::_scaled_dot_product_flash_attention_for_cpu: out [B, H, S_q, D] and lse [B, H, S_q]

    >>> q, k = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 7, 16)
    >>> [(list(t.shape), t.stride()) for t in cpu_forward(q, k, k, is_causal=True)]
    [([1, 2, 5, 16], (160, 80, 16, 1)), ([1, 2, 5], (10, 1, 2))]
    """
    _refuse(dropout_p=dropout_p, attn_mask=attn_mask, **later)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    q, k, v, right = top_left(q, k, v) if is_causal else (q, k, v, NO_BOUND)
    call = _call(q, k, v, right, scale, _wants_gradients(query, key, value))
    batch, rows, heads, _ = q.shape
    out = torch.empty_like(query)
    lse = query.new_empty_strided((batch, heads, rows), (rows * heads, 1, heads), dtype=accumulator(query.dtype))
    _forward(call, out.transpose(1, 2), lse)
    return out, lse


def torch_first(served_here: Callable) -> Callable:
    """Wrap `served_here` (a `cpu_forward`): calls that cpu.forward would pass unchanged to torch's kernel go to that
    kernel directly.

    It is one function, without repeated checks or default arguments in the calls, because a call with few keys takes
    only 3 us.
    """

    def kernel(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None, **later):
        if (scale is None or scale > 0) and not (dropout_p or attn_mask is not None or later):
            rows, keys = query.shape, key.shape
            alike = (rows == keys or (rows[:2] == keys[:2] and not is_causal)) and keys == value.shape
            if alike and 0 not in rows and (n_keys := keys[2]):  # torch's kernel divides by zero if there are no rows
                if scale is not None:
                    found = TORCH(query, key, value, 0.0, is_causal, scale=scale)
                else:
                    found = TORCH(query, key, value, 0.0, True) if is_causal else TORCH(query, key, value)
                if n_keys >= VECTOR or not lost_nan(found[1]):
                    served["cpu.forward"] += 1
                    return found
        return served_here(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale, **later)

    return kernel


def cpu_backward(
    grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None, **later
):
    """aten::_scaled_dot_product_flash_attention_for_cpu_backward: gradients [B, H, S, D], stored as [B, S, H, D] in
    memory.
    """
    _refuse(dropout_p=dropout_p, attn_mask=attn_mask, **later)
    q, k, v = _by_rows(query, key, value)
    seen = top_left(q, k, v) if is_causal else (q, k, v, NO_BOUND)
    call = _call(*seen, scale, True)
    gradients = tuple(t.new_empty(t.shape) for t in (q, k, v))
    _gradients(call, _by_rows(grad_out, out), logsumexp, gradients)
    return _by_rows(*gradients)


def top_left(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return q, k, v [B, S, H, D] and strobe's right bound such that row i sees key j iff j <= i. Keys at or beyond S_q
    are dropped.

    >>> q, k = torch.zeros(1, 2, 1, 8), torch.zeros(1, 5, 1, 8)
    >>> top_left(q, k, k)[1].shape[1], top_left(q, k, k)[3], top_left(k, q, q)[3]
    (2, 0, 3)
    """
    rows, keys = q.shape[1], k.shape[1]
    if rows < keys:
        k, v = k[:, :rows], v[:, :rows]
    return q, k, v, max(0, rows - keys)


# ---------------------------------------------------------------- scaled_dot_product_attention on GPUs


def sdpa_forward(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None, **later):
    """aten::_scaled_dot_product_flash_attention: out [B, H, S_q, D], lse [B, H, S_q] and seven values for packing and
    dropout

    >>> q = torch.randn(1, 2, 5, 16)
    >>> [None if t is None else t if isinstance(t, int) else list(t.shape) for t in sdpa_forward(q, q, q)]
    [[1, 2, 5, 16], [1, 2, 5], None, None, 5, 5, [2], [], [0]]
    """
    if dropout_p or return_debug_mask or later:
        _refuse(dropout_p=dropout_p, return_debug_mask=return_debug_mask, **later)
    call = _call(query, key, value, 0 if is_causal else NO_BOUND, scale, _wants_gradients(query, key, value))
    batch, heads, rows, _ = query.shape
    out = torch.empty_like(query)
    lse = query.new_empty_strided(
        (batch, heads, rows), (heads * rows, rows, 1), dtype=accumulator(query.dtype)
    )  # new_empty takes twice the time
    _forward_turned(call, out, lse)
    return out, lse, None, None, rows, key.shape[2], *_no_dropout(query)


def sdpa_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed,
    philox_offset, *,
    scale=None, **later,
):  # fmt: skip
    """aten::_scaled_dot_product_flash_attention_backward: dq, dk, dv with the shapes and strides of query, key and
    value.
    """
    _refuse(dropout_p=dropout_p, cum_seq_q=_there(cum_seq_q), cum_seq_k=_there(cum_seq_k), **later)
    call = _turned(_call(query, key, value, 0 if is_causal else NO_BOUND, scale, True))
    gradients = tuple(torch.empty_like(t) for t in (query, key, value))
    _gradients(call, _by_rows(grad_out, out), logsumexp, _by_rows(*gradients))
    return gradients


# ---------------------------------------------------------------- varlen_attn, and the layout [B, S, H, D]


def flash_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
    window_size_left=None, window_size_right=None, **unserved,
):  # fmt: skip
    """aten::_flash_attention_forward: packed [T, H, D] with cum_seq_q and cum_seq_k, dense [B, S, H, D] without

    >>> q, offsets = torch.randn(12, 2, 16), torch.tensor([0, 5, 12], dtype=torch.int32)
    >>> [list(t.shape) for t in flash_forward(q, q, q, offsets, offsets, 7, 7, 0.0, True, False)]
    [[12, 2, 16], [2, 12], [2], [], [0]]

    unserved: seqused_k, alibi_slopes, block_table, num_splits, and arguments that a later torch adds. Each must be
    None, False or 0.
    """
    out = torch.empty_like(query)
    packing, band = (cum_seq_q, cum_seq_k, max_q, max_k), (is_causal, window_size_left, window_size_right)
    _refuse(dropout_p=dropout_p, return_debug_mask=return_debug_mask, **unserved)
    lse = _flash_forward_into(out, (query, key, value), packing, band, scale)
    return out, lse, *_no_dropout(query)


def flash_forward_into(
    out, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
    window_size_left=None, window_size_right=None, **unserved,
):  # fmt: skip
    """aten::_flash_attention_forward_no_dropout_inplace: as `flash_forward`, but writes the result to `out` and returns
    only lse.
    """
    packing, band = (cum_seq_q, cum_seq_k, max_q, max_k), (is_causal, window_size_left, window_size_right)
    _refuse(dropout_p=dropout_p, return_debug_mask=return_debug_mask, **unserved)
    if out.shape != query.shape or out.dtype != query.dtype or out.stride(-1) != 1:
        raise _unserved("out", f"{out.dtype} {list(out.shape)} of strides {out.stride()}", "memory like query's")
    return _flash_forward_into(out, (query, key, value), packing, band, scale)


def flash_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state,
    unused, *,
    scale=None, window_size_left=None, window_size_right=None, **later,
):  # fmt: skip
    """aten::_flash_attention_backward: dq, dk, dv with the shapes and strides of query, key and value."""
    _refuse(dropout_p=dropout_p, **later)
    packing, band = (
        (_there(cum_seq_q), _there(cum_seq_k), max_q, max_k),
        (is_causal, window_size_left, window_size_right),
    )
    call = _flash_call((query, key, value), packing, band, scale)
    gradients = tuple(torch.empty_like(t) for t in (query, key, value))
    _gradients(call, (grad_out, out), logsumexp, gradients)
    return gradients


# ---------------------------------------------------------------- shared helpers


def _refuse(**given: object) -> None:
    """Raise `Unserved` for the first argument that is not None, False or 0. This includes arguments that a later torch
    adds.
    """
    for name, value in given.items():
        if value is not None and (isinstance(value, Tensor) or value):
            raise _unserved(name, value, "it unset (None, False or 0)")


def _there(offsets: Tensor | None) -> Tensor | None:
    """Offsets saved for the backward, or None. Some autograd formulas of torch save None as an empty tensor."""
    return offsets if offsets is not None and offsets.numel() else None


def _by_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Views of [B, H, S, D] as [B, S, H, D], or the reverse."""
    return tuple([t.transpose(1, 2) for t in tensors])


def _wants_gradients(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether gradients are needed. Pass the op's own arguments: below autograd, views of them have requires_grad
    False.
    """
    return torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)


def _call(q: Tensor, k: Tensor, v: Tensor, right: int, scale: float | None, needs_grad: bool) -> Call:
    if v.shape[-1] != q.shape[-1]:
        raise _unserved("value", f"head dimension {v.shape[-1]}", f"query's {q.shape[-1]}, which out has")
    return Call(
        q, k, v, NO_BOUND, right, scale, 0.0, torch.are_deterministic_algorithms_enabled(), False, "", False, needs_grad
    )


def _turned(call: Call) -> Call:
    q, k, v = _by_rows(*call[:3])
    return call._replace(q=q, k=k, v=v)


def _flash_call(
    qkv: tuple[Tensor, Tensor, Tensor], packing: tuple, band: tuple[bool, int | None, int | None], scale: float | None
) -> Call:
    causal, left, right = band
    bound = lambda one: NO_BOUND if one is None or one < 0 else min(one, FARTHEST)
    call = _call(*qkv, 0 if causal else bound(right), scale, _wants_gradients(*qkv))._replace(left=bound(left))
    cum_seq_q, cum_seq_k, max_q, max_k = packing
    if cum_seq_q is None and cum_seq_k is None:
        return call
    if cum_seq_q is None or cum_seq_k is None:
        raise _unserved("cum_seq_q, cum_seq_k", "one of them", "both or neither")
    return ops.received(
        call._replace(
            cu_seqlens_q=cum_seq_q, cu_seqlens_k=cum_seq_k, max_seqlen_q=bound(max_q), max_seqlen_k=bound(max_k)
        )
    )


def _flash_forward_into(
    out: Tensor, qkv: tuple[Tensor, Tensor, Tensor], packing: tuple, band: tuple, scale: float | None
) -> Tensor:
    call = _flash_call(qkv, packing, band, scale)
    q = call.q
    shape = (q.shape[1], q.shape[0]) if call.packed else (q.shape[0], q.shape[2], q.shape[1])
    lse = q.new_empty(shape, dtype=accumulator(q.dtype))
    _forward(call, out, lse)
    return lse


def _forward(call: Call, out: Tensor, lse: Tensor) -> Choice:
    choice = ops.decide(call)
    if not (out.is_contiguous() and replay(choice.forward, call, out, lse)):
        ops.write(choice, call, out, lse)
    served[choice.forward.kernel.name] += 1
    return choice


def _forward_turned(call: Call, out: Tensor, lse: Tensor) -> None:
    """`_forward` for a call and an out in [B, H, S, D]. A repeated launch needs only addresses, so it skips the
    transposes.
    """
    tensors, rest = call.tensors_and_rest
    choice = CACHE.lookup(TRANSPOSED, tensors, rest)
    if choice is not None and replay(choice.forward, call, out, lse):
        served[choice.forward.kernel.name] += 1
        return
    by_rows = out.transpose(1, 2)
    choice = _forward(_turned(call), by_rows, lse)
    if by_rows.is_contiguous() and launches_here(choice.forward, call.q):  # a replay writes contiguous [B, S, H, D]
        CACHE.insert(TRANSPOSED, tensors, rest, choice)


def _gradients(call: Call, outs: tuple[Tensor, ...], lse: Tensor, gradients: tuple[Tensor, ...]) -> None:
    """Write dq, dk and dv to `gradients`, from dout and out (`outs`) and lse. out and lse may cover more keys than k
    and v hold.
    """
    call = call._replace(needs_grad=True)
    choice = ops.decide(call)
    dout, out = outs
    shape, dtype = choice.problem.out_shapes[1], choice.problem.lse_dtype
    if (
        out.shape != call.q.shape
        or dout.shape != out.shape
        or tuple(lse.shape) != shape
        or (out.dtype, lse.dtype) != (call.q.dtype, dtype)
    ):
        raise _unserved(
            "out, logsumexp",
            f"{out.dtype} {list(out.shape)}, {lse.dtype} {list(lse.shape)}",
            f"query's, and {dtype} {list(shape)}",
        )
    out = out if out.stride(-1) == 1 else out.contiguous()
    dq, dk, dv = gradients
    if dk.shape != call.k.shape:  # top_left dropped keys; their gradients are 0
        keys = call.k.shape[1]
        dk[:, keys:], dv[:, keys:] = 0.0, 0.0
        dk, dv = dk[:, :keys], dv[:, :keys]
    lse = lse.contiguous()
    ops.write_gradients(choice, call, Backward(dout, out, lse, None, dq, dk, dv, torch.empty_like(lse)))
    if choice.backward is not None:  # else it was refused above
        served[choice.backward.kernel.name] += 1


def _no_dropout(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Placeholders for philox_seed, philox_offset and the debug mask. Nothing reads them without dropout."""
    return query.new_empty(2, dtype=torch.uint64), query.new_empty((), dtype=torch.uint64), query.new_empty(0)


__all__ = [
    "cpu_backward",
    "cpu_forward",
    "flash_backward",
    "flash_forward",
    "flash_forward_into",
    "sdpa_backward",
    "sdpa_forward",
]
