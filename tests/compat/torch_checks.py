"""Checks of the rows of docs/from_pytorch.md: what holds with strobe under torch's own attention."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from strobe import UnsupportedProblem
from strobe.compat import sdpa
from strobe.ops import attention as ops


def _tensors(seqlen_q=4, seqlen_k=4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, length, 2, 8, generator=generator).to(dtype) for length in (seqlen_q, seqlen_k, seqlen_k)]


def _attend(*tensors, **options):
    return functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in tensors), **options).transpose(1, 2)


def _ran(what: Callable[[], object]) -> tuple[object, int, dict[str, int]]:
    """The result under enable(), how many calls of its ops strobe served, and what it passed on."""
    with sdpa.enable() as switch:
        result = what()
    return result, sum(switch.served.values()), switch.passed


def _on_both(what: Callable[[], Tensor], served: int = 1, **passed: int):
    found, *counts = _ran(what)
    assert counts == [served, passed]
    assert torch.allclose(found, what(), atol=1e-6)


def _torch_sees(seqlen_q: int, seqlen_k: int, attend, **options) -> list[list[int]]:
    q, k, _ = _tensors(seqlen_q, seqlen_k)
    v = torch.eye(8)[:seqlen_k].expand(2, -1, -1).transpose(0, 1)[None].contiguous()
    return [row.nonzero().flatten().tolist() for row in attend(q, k, v, **options)[0, :, 0]]


def _varlen(q, k, v, **options):
    offsets = [torch.tensor([0, t.shape[1]], dtype=torch.int32) for t in (q, k)]
    return varlen_attn(q[0], k[0], v[0], *offsets, q.shape[1], k.shape[1], **options)


def _top_left():
    for rows, keys in ((2, 5), (5, 2), (3, 3)):
        seen = [list(range(min(row + 1, keys))) for row in range(rows)]
        assert _torch_sees(rows, keys, _attend, is_causal=True) == seen
        assert _ran(lambda rows=rows, keys=keys: _torch_sees(rows, keys, _attend, is_causal=True)) == (seen, 1, {})


def _bottom_right():
    packed = lambda *tensors: _varlen(*tensors, window_size=(-1, 0))[None]
    assert _ran(lambda: _torch_sees(2, 5, packed)) == ([[0, 1, 2, 3], [0, 1, 2, 3, 4]], 1, {})
    assert _torch_sees(2, 5, _attend, attn_mask=causal_lower_right(2, 5)) == [[0, 1, 2, 3], [0, 1, 2, 3, 4]]
    op = torch.ops.aten._scaled_dot_product_flash_attention  # what a GPU calls for causal_lower_right
    direct = lambda *tensors: op(*(t.transpose(1, 2) for t in tensors), 0.0, True, False)[0].transpose(1, 2)
    assert _ran(lambda: _torch_sees(2, 5, direct)) == ([[0, 1, 2, 3], [0, 1, 2, 3, 4]], 1, {})


def _torch_scale():
    q, k, v = _tensors()
    _on_both(lambda: _attend(q, k, v))
    _on_both(lambda: _attend(q, k, v, scale=0.3))
    assert torch.allclose(_ran(lambda: _attend(q, k, v))[0], _attend(q, k, v, scale=8**-0.5), atol=1e-6)


def _gqa():
    q, k, v = _tensors()
    wide = torch.cat([q, q + 1], 2)
    _on_both(lambda: _attend(wide, k, v, enable_gqa=True))
    assert torch.allclose(
        _ran(lambda: _attend(wide, k, v, enable_gqa=True))[0][:, :, 1],
        _attend(wide, k, v, enable_gqa=True)[:, :, 1],
        atol=1e-6,
    )


def _layout():
    q, k, v = (t.transpose(1, 2) for t in _tensors(4, 6))
    for one in (q, q.contiguous(), torch.cat([q, q], -1)[..., 8:]):
        plain = functional.scaled_dot_product_attention(one, k, v)
        found = _ran(lambda one=one: functional.scaled_dot_product_attention(one, k, v))[0]
        assert found.stride() == plain.stride() and torch.allclose(found, plain, atol=1e-6)


def _attn_mask():
    """test_sdpa_masks.py compares the values."""
    q, k, v = _tensors()
    for given, served, passed in ((torch.ones(4, 4, dtype=torch.bool).tril(), 0, {"attn_mask": 1}),
                                  (torch.zeros(4, 4, requires_grad=True), 1, {})):  # fmt: skip
        _on_both(lambda given=given: _attend(q, k, v, attn_mask=given), served=served, **passed)


def _dropout():
    def dropped():
        torch.manual_seed(0)
        return _attend(*_tensors(), dropout_p=0.5)

    _on_both(dropped, served=0)  # a CPU's flash attention is not asked
    q = _tensors()[0].transpose(1, 2)
    with pytest.raises(RuntimeError, match="dropout"):
        _ran(lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.5))


def _torch_types():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        found, served, _ = _ran(lambda dtype=dtype: _attend(*_tensors(dtype=dtype)))
        assert found.dtype == dtype and served == 1
    q, k, v = _tensors()
    _on_both(lambda: _attend(q, k, v[..., :3]), served=0)


def _priority():
    before = torch._C._get_sdp_priority_order()
    others = [3, 2, 1, 0, 4]  # cuDNN first, as on Hopper
    torch._C._set_sdp_priority_order(others)
    try:
        assert (
            _ran(torch._C._get_sdp_priority_order)[0] == [1, 3, 2, 0, 4]
            and torch._C._get_sdp_priority_order() == others
        )
    finally:
        torch._C._set_sdp_priority_order(before)


def _torch_deterministic():
    calls, decide = [], ops.decide
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "decide", lambda call: (calls.append(call), decide(call))[1])
        for everywhere in (False, True):
            torch.use_deterministic_algorithms(everywhere)
            try:
                _ran(lambda: _attend(*_tensors(), scale=-0.5))  # which torch's own kernel is not given
            finally:
                torch.use_deterministic_algorithms(False)
    assert [call.deterministic for call in calls] == [False, True]


def _row_of_nan():
    q, k, v = _tensors()
    q[0, 1, 0] = torch.nan
    found = _ran(lambda: _attend(q, k, v))[0]
    assert found[0, 1, 0].isnan().all() and found.isnan().sum() == 8


def _torch_empty_rows():
    out, lse = _ran(lambda: _varlen(*_tensors(5, 2), window_size=(-1, 0), return_aux=AuxRequest(lse=True)))[0]
    assert not out[:3].any() and (lse[:, :3] == -torch.inf).all() and lse[:, 3:].isfinite().all()


def _varlen_on_cpus():
    with pytest.raises(NotImplementedError, match="_flash_attention_forward"):
        _varlen(*_tensors())
    found, served, _ = _ran(lambda: _varlen(*_tensors()))
    assert served == 1 and torch.allclose(found, _attend(*_tensors())[0], atol=1e-6)


def _window_size():
    for rows, keys, window, seen in (
        (4, 4, (1, 0), [[0], [0, 1], [1, 2], [2, 3]]),
        (2, 4, (1, 1), [[1, 2, 3], [2, 3]]),
        (3, 3, (-1, 1), [[0, 1], [0, 1, 2], [0, 1, 2]]),
        (3, 3, (1, -1), [[0, 1, 2], [0, 1, 2], [1, 2]]),
    ):
        sees = lambda rows=rows, keys=keys, window=window: _torch_sees(
            rows, keys, lambda *t: _varlen(*t, window_size=window)[None]
        )
        assert _ran(sees) == (seen, 1, {})


def _more_of_varlen():
    known = str(torch.ops.aten._flash_attention_forward.default._schema)
    q, k, v = (t[0] for t in _tensors())
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    for name, value in {
        "seqused_k": torch.ones(1, dtype=torch.int32),
        "block_table": torch.ones(1, 1, dtype=torch.int32),
        "num_splits": 1,
    }.items():
        if name in known:
            with pytest.raises(NotImplementedError, match=f"^{name}: "):
                _ran(
                    lambda n=name, x=value: torch.ops.aten._flash_attention_forward(
                        q, k, v, offsets, offsets, 4, 4, 0.0, False, False, **{n: x}
                    )
                )


def _ring():
    q, k, v = (t.transpose(1, 2) for t in _tensors(4, 6))
    forward, back = (
        torch.ops.aten._scaled_dot_product_flash_attention,
        torch.ops.aten._scaled_dot_product_flash_attention_backward,
    )

    def parts(*slices):
        out, lse, *rest = forward(q, k, v)
        return sum(
            back(torch.ones_like(out), q, k[:, :, s], v[:, :, s], out, lse, *rest[:4], 0.0, False, *rest[4:6])[0]
            for s in slices
        )

    whole, served, _ = _ran(lambda: parts(slice(0, 6)))
    assert served == 2 and torch.allclose(_ran(lambda: parts(slice(0, 2), slice(2, 6)))[0], whole, atol=1e-5)


def _nested():
    pieces = [t[0] for t in (*_tensors(3, 5), *_tensors(4, 6))]
    jagged = torch.nested.nested_tensor(pieces, layout=torch.jagged).transpose(1, 2)
    attend = lambda: (
        functional.scaled_dot_product_attention(jagged, jagged, jagged).transpose(1, 2).contiguous().values()
    )
    _on_both(attend, served=0)  # a CPU's are torch's own; tests/compat/test_sdpa.py has those of a GPU


def _torch_compiles():
    leaves = [t.requires_grad_() for t in _tensors()]
    plain = _attend(*leaves, is_causal=True)

    def run():
        torch._dynamo.reset()
        out = torch.compile(lambda q, k, v: _attend(q, k, v, is_causal=True), fullgraph=True, backend="aot_eager")(
            *leaves
        )
        return out, torch.autograd.grad(out.sum(), leaves)

    (out, gradients), served, _ = _ran(run)
    assert served == 2 and torch.allclose(out, plain, atol=1e-6)
    assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(gradients, torch.autograd.grad(plain.sum(), leaves)))


def _double_backward():
    leaves = [t.requires_grad_() for t in _tensors()]

    def twice():
        (gradient,) = torch.autograd.grad(_attend(*leaves).square().sum(), leaves[:1], create_graph=True)
        return torch.autograd.grad(gradient.sum(), leaves)

    for run in (twice, lambda: _ran(twice)):
        with pytest.raises(RuntimeError, match="not implemented"):
            run()
    mask = torch.zeros(leaves[0].shape[1], leaves[1].shape[1], requires_grad=True)

    def masked():
        out = _attend(*leaves, attn_mask=mask)
        (gradient,) = torch.autograd.grad(out.square().sum(), leaves[:1], create_graph=True)
        return torch.autograd.grad(gradient.sum(), [*leaves, mask])

    native = masked()
    with sdpa.enable(), pytest.raises(UnsupportedProblem, match=r"double backward.*enable\(masks=False\).*MATH"):
        masked()
    with sdpa.enable(masks=False):
        assert all(map(torch.equal, masked(), native))
    with sdpa.enable(), sdpa_kernel(SDPBackend.MATH):
        assert all(map(torch.equal, masked(), native))


def _undoing():
    first, second = sdpa.enable(), sdpa.enable()
    first()
    assert torch.nn.attention.current_flash_attention_impl() == "STROBE"
    second()
    served = sdpa.served.copy()
    _attend(*_tensors())
    assert torch.nn.attention.current_flash_attention_impl() is None and sdpa.served == served


PYTORCH = {
    "is_causal": _top_left,
    "causal_lower_right, varlen_attn": _bottom_right,
    "scale": _torch_scale,
    "enable_gqa": _gqa,
    "layout": _layout,
    "attn_mask": _attn_mask,
    "dropout_p": _dropout,
    "float32, other widths of value": _torch_types,
    "backends on a GPU": _priority,
    "deterministic": _torch_deterministic,
    "a row of NaN": _row_of_nan,
    "rows that see no key": _torch_empty_rows,
    "varlen_attn": _varlen_on_cpus,
    "window_size": _window_size,
    "seqused_k, block_table, num_splits": _more_of_varlen,
    "ring attention": _ring,
    "nested tensors": _nested,
    "torch.compile": _torch_compiles,
    "double backward": _double_backward,
    "undoing": _undoing,
}
