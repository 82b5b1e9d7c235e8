"""docs/switching.md and docs/from_pytorch.md: every row of their tables, held to what strobe does."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import strobe
import strobe.cute as fa4
import strobe.flash_attn as fa2
import strobe.flash_attn_interface as fa3
from strobe.compat import signatures
from strobe.cute import interface as fa4_private
from strobe.flash_attn import bert_padding
from strobe.flash_attn import flash_attn_interface as private
from strobe.flash_attn.layers import rotary
from tests.compat.torch_checks import PYTORCH, _tensors

DOCS = Path(__file__).parents[2] / "docs"


class Library(NamedTuple):
    module: object
    dense: Callable[..., tuple[Tensor, Tensor]]
    packed: Callable[..., tuple[Tensor, Tensor]]


def _pair(function, **always):
    return lambda *tensors, **options: function(*tensors, **options, **always)[:2]


LIBRARIES = {
    "FlashAttention-2": Library(
        fa2,
        _pair(fa2.flash_attn_func, return_attn_probs=True),
        _pair(fa2.flash_attn_varlen_func, return_attn_probs=True),
    ),
    "FlashAttention-3": Library(
        fa3,
        _pair(fa3.flash_attn_func, return_attn_probs=True),
        _pair(fa3.flash_attn_varlen_func, return_attn_probs=True),
    ),
    "FlashAttention-4": Library(
        fa4,
        _pair(fa4.flash_attn_func),
        lambda q, k, v, a, b, m, n, **o: fa4.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=a, cu_seqlens_k=b, max_seqlen_q=m, max_seqlen_k=n, **o
        ),
    ),
}


def _seen(library: Library, seqlen_q: int, seqlen_k: int, **options) -> list[list[int]]:
    """Which keys each row sees: value j is one-hot in place j."""
    q, k, _ = _tensors(seqlen_q, seqlen_k)
    v = torch.eye(8)[:seqlen_k].expand(2, -1, -1).transpose(0, 1)[None]
    return [row.nonzero().flatten().tolist() for row in library.dense(q, k, v.contiguous(), **options)[0][0, :, 0]]


def _causal(library: Library):
    assert _seen(library, 2, 5, causal=True) == [[0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert _seen(library, 5, 2, causal=True) == [[], [], [], [0], [0, 1]]


def _window(library: Library):
    assert _seen(library, 4, 4, window_size=(1, 0)) == [[0], [0, 1], [1, 2], [2, 3]]
    assert _seen(library, 2, 4, window_size=(1, 1)) == [[1, 2, 3], [2, 3]]
    assert _seen(library, 3, 3, window_size=(-1, -1)) == [[0, 1, 2]] * 3
    assert _seen(library, 3, 3, causal=True, window_size=(1, 5)) == [[0], [0, 1], [1, 2]]
    assert _seen(library, 3, 3, causal=True, window_size=(1, -1)) == [[0], [0, 1], [1, 2]]
    if library.module is not fa4:
        assert _seen(library, 3, 3, window_size=(-1, 0)) == [[0], [0, 1], [0, 1, 2]]
        return
    assert _seen(library, 3, 3, window_size=(None, 0)) == [[0], [0, 1], [0, 1, 2]]
    assert _seen(library, 3, 3, window_size=(None, -1)) == [[], [0], [0, 1]]
    assert _seen(library, 3, 3, window_size=(-1, None)) == [[1, 2], [2], []]
    assert _seen(library, 4, 4, window_size=(-1, 2)) == [[1, 2], [2, 3], [3], []]
    assert _seen(library, 3, 3, window_size=(-1, 0), causal=True) == [[], [], []]


def _same(library: Library, one: dict, other: dict):
    tensors = _tensors()
    assert torch.equal(library.dense(*tensors, **one)[0], library.dense(*tensors, **other)[0])


def _scale(library: Library):
    _same(library, {"softmax_scale": None}, {"softmax_scale": 8**-0.5})
    q, k, v = _tensors()
    assert torch.allclose(library.dense(q, k, v, softmax_scale=0.0)[0], v.mean(1, keepdim=True).expand_as(v))


def _softcap(library: Library):
    _same(library, {"softcap": 0.0}, {})
    q, k, v = _tensors()
    s = 0.5 * torch.tanh(torch.einsum("bihd,bjhd->bhij", q, k) * 8**-0.5 / 0.5)
    assert torch.allclose(library.dense(q, k, v, softcap=0.5)[1], s.logsumexp(-1), atol=1e-5)


def _deterministic(library: Library):
    calls, run = [], signatures.ops.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signatures.ops, "run", lambda call: (calls.append(call), run(call))[1])
        for asked, everywhere in ((False, False), (True, False), (False, True)):
            torch.use_deterministic_algorithms(everywhere)
            try:
                library.dense(*_tensors(), deterministic=asked)
            finally:
                torch.use_deterministic_algorithms(False)
    assert [call.deterministic for call in calls] == [False, True, True]


def _lse(library: Library):
    q, k, v = _tensors(4, 6, torch.bfloat16)
    offsets = torch.tensor([0, 4], dtype=torch.int32), torch.tensor([0, 6], dtype=torch.int32)
    wanted = (torch.einsum("bihd,bjhd->bhij", q.float(), k.float()) * 8**-0.5).logsumexp(-1)
    for lse, shape in (
        (library.dense(q, k, v)[1], (1, 2, 4)),
        (library.packed(q[0], k[0], v[0], *offsets, 4, 6)[1], (2, 4)),
    ):
        assert lse.dtype == torch.float32 and lse.shape == shape
        assert torch.allclose(lse.reshape(wanted.shape), wanted, atol=1e-4)


def _lse_gradient(library: Library):
    q, k, v = _tensors()
    gradients = []
    for lse in (library.dense, lambda q, k, v: (None, (torch.einsum("bihd,bjhd->bhij", q, k) * 8**-0.5).logsumexp(-1))):
        q.requires_grad_().grad = None
        lse(q, k, v)[1].sum().backward()
        gradients.append(q.grad)
    assert torch.allclose(*gradients, atol=1e-5)


def _empty_rows(library: Library):
    out, lse = library.dense(*_tensors(5, 2), causal=True)
    assert not out[:, :3].any() and (lse[..., :3] == -torch.inf).all() and lse[..., 3:].isfinite().all()


def _returns(library: Library):
    q, k, v = _tensors()
    if library.module is fa4:
        assert [t.shape for t in fa4.flash_attn_func(q, k, v)] == [q.shape, (1, 2, 4)]
        assert isinstance(fa4.flash_attn_func(q, k, v, return_lse=True), tuple)
        return
    assert isinstance(library.module.flash_attn_func(q, k, v), Tensor)
    found = library.module.flash_attn_func(q, k, v, return_attn_probs=True)
    assert [tuple(t.shape) for t in found] == [(1, 4, 2, 8), (1, 2, 4), (0,)][: 3 if library.module is fa2 else 2]


def _types(library: Library):
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert library.dense(*_tensors(dtype=dtype))[0].dtype == dtype
    eight = [t.to(torch.float8_e4m3fn) for t in _tensors()]
    if library.module is fa3:
        assert torch.equal(library.dense(*eight)[0], library.dense(*(t.bfloat16() for t in eight))[0])
        return
    with pytest.raises(ValueError, match=r"^q: "):
        library.dense(*eight)


def _descales(library: Library):
    q, k, v = (t.to(torch.float8_e4m3fn) for t in _tensors())
    scale = torch.tensor([[0.5, 2.0]])
    wide = [(t.float() * scale.repeat_interleave(t.shape[2] // 2, 1)[:, None, :, None]).bfloat16() for t in (q, k, v)]
    out = library.module.flash_attn_func(q, k, v, q_descale=scale, k_descale=scale, v_descale=scale)
    assert torch.equal(out, library.dense(*wide)[0])


def _devices(library: Library):
    """Tensors of a CPU here; tests/compat/test_flash_attn.py runs on a GPU too where there is one."""
    assert library.dense(*_tensors())[0].device.type == "cpu"


def _head_dimensions(library: Library):
    q, k, v = _tensors()
    assert library.dense(q[..., :7].contiguous(), k[..., :7].contiguous(), v[..., :3].contiguous())[0].shape == (
        1,
        4,
        2,
        3,
    )
    assert library.dense(*(t.repeat(1, 1, 1, 40) for t in (q, k, v)))[0].shape == (1, 4, 2, 320)


def _strided(library: Library):
    strided = [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in _tensors()]
    assert strided[0].stride(-1) != 1
    assert torch.equal(library.dense(*strided)[0], library.dense(*_tensors())[0])


def _wrong_arguments(library: Library):
    q, k, v = _tensors()
    with pytest.raises(ValueError, match=r"^v: got .*, expected .*; "):
        library.dense(q, k, v[:, :3])
    with pytest.raises(ValueError, match=r"^softmax_scale: got nan, expected .*; "):
        library.dense(q, k, v, softmax_scale=float("nan"))
    with pytest.raises(TypeError, match=r"^window_size: got int, expected .*; "):
        library.dense(q, k, v, window_size=4)


def _compiles(library: Library):
    leaves = [t.requires_grad_() for t in _tensors()]
    compiled = torch.compile(
        lambda q, k, v: library.dense(q, k, v, causal=True, softcap=2.0)[0], fullgraph=True, backend="aot_eager"
    )
    out = compiled(*leaves)
    found = torch.autograd.grad(out.sum(), leaves)
    whole = library.dense(*leaves, causal=True, softcap=2.0)[0]
    assert torch.allclose(out, whole) and all(map(torch.allclose, found, torch.autograd.grad(whole.sum(), leaves)))


def _bias_and_dropout(library: Library):
    """Served without a cache (test_flash_attn.py compares the values), refused over one."""
    q, k, v = _tensors()
    plain = library.module.flash_attn_func(q, k, v)
    for given in ({"dropout_p": 0.5}, {"alibi_slopes": torch.ones(2)}):
        assert not torch.equal(library.module.flash_attn_func(q, k, v, **given), plain)
    with pytest.raises(NotImplementedError, match=r"^alibi_slopes: "):
        library.module.flash_attn_with_kvcache(q, k, v, alibi_slopes=torch.ones(2))


def _refused(function: str, **arguments):
    """Each of these alone is refused by its name."""

    def check(library: Library):
        q, k, v = _tensors()
        tensors, offsets = (q, k, v), torch.tensor([0, 4], dtype=torch.int32)
        if "varlen" in function:
            tensors = q[0], k[0], v[0]
        required = (
            {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 4, "max_seqlen_k": 4}
            if "varlen" in function
            else {}
        )
        for name, value in arguments.items():
            with pytest.raises(NotImplementedError, match=f"^{name}: "):
                getattr(library.module, function)(*tensors, **required | {name: value})

    return check


def _schedule(library: Library):
    for hint in ({"num_splits": 1}, {"num_splits": 7}, {"pack_gqa": True}):
        _same(library, {"num_splits": 0}, hint)
    if library.module is fa3:
        _same(library, {}, {"sm_margin": 4})
    else:
        _refused("flash_attn_varlen_func", seqlen_k_per_split=128, disable_scheduler_metadata=True)(library)


def _lengths(library: Library):
    (q, k, v), ends, two = (
        _tensors(4, 6),
        [torch.tensor([0, n], dtype=torch.int32) for n in (4, 6)],
        torch.tensor([2], dtype=torch.int32),
    )
    given = dict(cu_seqlens_q=ends[0], cu_seqlens_k=ends[1], max_seqlen_q=4, max_seqlen_k=6, causal=True)
    part = lambda **used: library.module.flash_attn_varlen_func(q[0], k[0], v[0], **given, **used)
    out = part(seqused_q=two, seqused_k=two + 1)
    out = out[0] if isinstance(out, tuple) else out
    whole = library.dense(q[:, :2], k[:, :3], v[:, :3], causal=True)[0][0]
    assert torch.allclose(out[:2], whole, atol=1e-6) and not out[2:].any()
    if library.module is fa4:
        _refused("flash_attn_varlen_func", cu_seqlens_q=None, cu_seqlens_k=None)(library)
        assert torch.equal(fa4.flash_attn_varlen_func(*_tensors())[0], fa4.flash_attn_func(*_tensors())[0])


def _caches(library: Library):
    (q, k, v), decode = _tensors(1, 6), library.module.flash_attn_with_kvcache
    whole = decode(q, k, v, causal=True)
    assert torch.allclose(whole, library.dense(q, k, v)[0], atol=1e-6)
    some = library.dense(q, k[:, :3], v[:, :3])[0]
    new = [t[:, 3:4].clone() for t in (k, v)]
    for lengths in (3, torch.tensor([3], dtype=torch.int32)):
        assert torch.allclose(decode(q, k, v, cache_seqlens=lengths, causal=True), some, atol=1e-6)
        k_cache, v_cache = (torch.cat([t[:, :3], torch.full_like(t[:, 3:], torch.nan)], 1) for t in (k, v))
        out = decode(q.requires_grad_(), k_cache, v_cache, *new, cache_seqlens=lengths, window_size=(2, 0))
        assert torch.allclose(out, library.dense(q, k[:, 1:4], v[:, 1:4])[0], atol=1e-6) and not out.requires_grad
        assert (
            torch.equal(k_cache[:, :4], k[:, :4])
            and torch.equal(v_cache[:, :4], v[:, :4])
            and k_cache[:, 4:].isnan().all()
        )


_THREE = torch.tensor([3], dtype=torch.int32)


def _pages(library: Library):
    (q, k, v), word = _tensors(2, 6), "block_table" if library.module is fa2 else "page_table"
    table = torch.tensor([[1, 2, 0]], dtype=torch.int32)
    pages = [t[0].unflatten(0, (3, 2))[[2, 0, 1]] for t in (k, v)]  # of 2 keys
    out, lse = library.module.flash_attn_with_kvcache(q, *pages, causal=True, return_softmax_lse=True, **{word: table})
    whole, whole_lse = library.dense(q, k, v, causal=True)
    assert torch.allclose(out, whole, atol=1e-6) and torch.allclose(lse, whole_lse, atol=1e-6)


def _indexed(library: Library):
    (q, k, v), decode = _tensors(2, 6), library.module.flash_attn_with_kvcache
    index, start, table = (torch.tensor(some, dtype=torch.int32) for some in ([1], [2], [[0]]))
    rows = [torch.cat([torch.full_like(t, torch.nan), t]) for t in (k, v)]
    assert torch.allclose(
        decode(q, *rows, cache_batch_idx=index, causal=True), library.dense(q, k, v, causal=True)[0], atol=1e-6
    )
    late = [torch.cat([torch.full_like(t[:, :2], torch.nan), t[:, 2:]], 1) for t in (k, v)]
    assert torch.allclose(
        decode(q, *late, cache_leftpad=start, causal=True),
        library.dense(q, k[:, 2:], v[:, 2:], causal=True)[0],
        atol=1e-6,
    )
    word = "block_table" if library.module is fa2 else "page_table"
    both = {"cache_batch_idx": index - 1, "cache_leftpad": start}
    for given in (both, {**both, word: table}):
        wanted = decode(q, k, v, cache_leftpad=start, causal=True)
        assert torch.allclose(decode(q, k, v, causal=True, **given), wanted, atol=1e-6)
    first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v)]
    assert torch.allclose(decode(q, *first, cache_leftpad=start, causal=True, **{word: table}), wanted, atol=1e-6)


def _rotary(library: Library):
    """Angles of a half turn at position 4 and none elsewhere: that key is written with its sign changed, that query
    reads with it.
    """
    (q, k, v), decode = _tensors(2, 6), library.module.flash_attn_with_kvcache
    cos, sin = torch.where(torch.arange(8)[:, None] == 4, -1.0, 1.0).expand(8, 4).contiguous(), torch.zeros(8, 4)
    flip = torch.tensor([1.0, -1.0])[None, :, None, None]
    turned = torch.cat([k[:, :3], flip * k[:, 3:5]], 1)
    for options, at, asked in (({"causal": True}, 3, flip * q), ({}, 3, q), ({}, 4, -q)):
        k_cache, v_cache = k.clone(), v.clone()
        out = decode(
            q,
            k_cache,
            v_cache,
            k[:, at : at + 1],
            v[:, at : at + 1],
            rotary_cos=cos,
            rotary_sin=sin,
            cache_seqlens=at,
            **options,
        )
        keys = turned[:, : at + 1] if at == 3 else torch.cat([k[:, :4], -k[:, 4:5]], 1)
        assert torch.equal(k_cache[:, : at + 1], keys)
        assert torch.allclose(out, library.dense(asked, keys, v[:, : at + 1], **options)[0], atol=1e-6)
    if library.module is fa2:
        new = k[:, :1]
        assert (
            decode(q, k.clone(), v.clone(), new, new, rotary_cos=cos[:3], rotary_sin=sin[:3], cache_seqlens=_THREE)
            .isnan()
            .all()
        )
    else:
        new, given = (k[:, 3:4], v[:, 3:4]), {"rotary_cos": cos, "rotary_sin": sin, "cache_seqlens": 3}
        caches = [(k.clone(), v.clone()) for _ in range(2)]
        (
            decode(q, *caches[0], *new, **given, rotary_seqlens=_THREE),
            decode(q, *caches[1], *new, **given, rotary_seqlens=_THREE + 1),
        )
        assert torch.equal(caches[0][0][:, 3:4], k[:, 3:4]) and torch.equal(caches[1][0][:, 3:4], -k[:, 3:4])


def _beyond(library: Library):
    (q, k, v), decode = _tensors(1, 6), library.module.flash_attn_with_kvcache
    strobe.last_errors()
    assert torch.allclose(decode(q, k, v, cache_seqlens=_THREE + 96), library.dense(q, k, v)[0], atol=1e-6)
    assert any("seqlens" in said for said in strobe.last_errors())
    assert not decode(q, k, v, block_table=_THREE[:, None]).any() and any(
        "page id" in said for said in strobe.last_errors()
    )
    with pytest.raises(ValueError, match=r"^cache_seqlens: "):
        decode(q, k, v, k[:, :1], v[:, :1], cache_seqlens=_THREE + 3)


def _splits(library: Library):
    q, k, v = _tensors(1, 6)
    decode = library.module.flash_attn_with_kvcache
    for splits in (1, 4):
        assert torch.equal(decode(q, k, v, num_splits=splits), decode(q, k, v, num_splits=0))


def _packed_over_pages(library: Library):
    q, k, v = _tensors(3, 6)
    ends, table = [torch.tensor([0, n], dtype=torch.int32) for n in (3, 6)], torch.tensor([[0, 1]], dtype=torch.int32)
    pages = [t[0].unflatten(0, (2, 3)) for t in (k, v)]
    out, lse = library.packed(q[0], *pages, *ends, 3, 6, causal=True, block_table=table)
    whole, whole_lse = library.dense(q, k, v, causal=True)
    assert torch.allclose(out, whole[0], atol=1e-6) and torch.allclose(lse, whole_lse[0], atol=1e-6)
    out = library.packed(q[0].requires_grad_(), *pages, *ends, 3, 6, block_table=table)[0]
    with pytest.raises(NotImplementedError, match=r"^gradients through block_table"):
        out.sum().backward()


def _packed_over_a_cache(library: Library):
    """A chunk of 2 tokens and a decode, whose keys the call writes, as two calls of one sequence each."""
    decode, given = library.module.flash_attn_with_kvcache, {"causal": True}
    draw = torch.Generator().manual_seed(5)
    k, v = (torch.randn(2, 6, 2, 16, generator=draw) for _ in range(2))
    new_q, new_k, new_v = (torch.randn(3, heads, 16, generator=draw) for heads in (4, 2, 2))
    caches = [[t.clone() for t in (k, v)] for _ in range(2)]
    offsets, lengths = torch.tensor([0, 2, 3], dtype=torch.int32), torch.tensor([3, 1], dtype=torch.int32)
    packing = {"cu_seqlens_q": offsets, "cu_seqlens_k_new": offsets, "max_seqlen_q": 2}
    out, lse, *_ = decode(
        new_q, *caches[0], new_k, new_v, cache_seqlens=lengths, **packing, **given, return_softmax_lse=True
    )
    for b, (start, stop) in enumerate(((0, 2), (2, 3))):
        rows, keys = slice(start, stop), slice(b, b + 1)
        new = [t[None, rows] for t in (new_q, new_k, new_v)]
        pools = [t[keys] for t in caches[1]]
        one, one_lse, *_ = decode(
            new[0], *pools, *new[1:], cache_seqlens=lengths[keys], **given, return_softmax_lse=True
        )
        assert torch.allclose(out[rows], one[0], atol=1e-6) and torch.allclose(lse[:, rows], one_lse[0], atol=1e-6)
    assert all(map(torch.equal, *caches))
    angle = torch.rand(6, 4, generator=draw)
    angles = {"rotary_cos": angle.cos(), "rotary_sin": angle.sin()}
    turned = decode(new_q, *caches[0], new_k, new_v, cache_seqlens=lengths, **packing, **given, **angles)
    pools = [t[:1].clone() for t in caches[1]]
    one = decode(
        *(t[None, :2] for t in (new_q,)), *pools, new_k[None, :2], new_v[None, :2], cache_seqlens=lengths[:1],
        **given, **angles,
    )  # fmt: skip
    assert torch.allclose(turned[:2], one[0], atol=1e-6)
    with pytest.raises(NotImplementedError, match=r"^cu_seqlens_k_new: "):
        decode(new_q[:2, None], *caches[0], cache_seqlens=lengths, cu_seqlens_k_new=offsets)
    with pytest.raises(ValueError, match=r"^cu_seqlens_q: got shape"):
        decode(new_q, *caches[0], cache_seqlens=lengths, cu_seqlens_q=offsets[:2])


def _classes(library: Library):
    module = {fa2: private, fa3: fa3, fa4: fa4_private}[library.module]
    (q, k, v), before = _tensors(), {fa2: (0.0,), fa3: (), fa4: (None, None)}[library.module]
    found = module.FlashAttnFunc.apply(q, k, v, *before, 0.25, True)
    found = found[0] if isinstance(found, tuple) else found
    assert torch.equal(found, library.dense(q, k, v, softmax_scale=0.25, causal=True)[0])
    assert not hasattr(module.FlashAttnFunc, "backward") and hasattr(module, "FlashAttnVarlenFunc")


def _rotary_layers(library: Library):
    x, angles = _tensors()[0], torch.rand(4, 2)
    wanted = rotary.apply_rotary_emb_torch(x, angles.cos(), angles.sin())
    assert torch.allclose(rotary.apply_rotary_emb(x, angles.cos(), angles.sin()), wanted) and not torch.equal(x, wanted)
    assert torch.equal(rotary.rotate_half(rotary.rotate_half(x)), -x)


def _metadata(library: Library):
    (q, k, v), lengths = _tensors(1, 6), torch.tensor([5], dtype=torch.int32)
    if library.module is fa4:
        assert not any(fa4_private.get_scheduler_metadata(1, 6, 2, 2, 8, 1, seqused_k=lengths))
        return
    made = fa3.get_scheduler_metadata(1, 1, 6, 2, 2, 8, lengths)
    decode = lambda **more: fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, **more)
    assert made.tolist() == [0] and torch.equal(decode(scheduler_metadata=made), decode())


def _private(library: Library):
    q, k, v = _tensors()
    if library.module is not fa2:
        forward = fa3._flash_attn_forward if library.module is fa3 else fa4_private._flash_attn_fwd
        (out, lse, *rest), whole = forward(q, k, v, causal=True), library.dense(q, k, v, causal=True)
        assert (
            torch.equal(out, whole[0])
            and torch.equal(lse, whole[1])
            and not any(part is not None and part.numel() for part in rest)
        )
        found, leaves = [torch.empty_like(t) for t in (q, k, v)], [t.requires_grad_() for t in (q, k, v)]
        wanted = torch.autograd.grad(library.dense(*leaves, causal=True)[0].sum(), leaves)
        given = dict(zip(("dq", "dk", "dv"), found))
        if library.module is fa3:
            fa3._flash_attn_backward(torch.ones_like(out), q, k, v, out, lse, **given, is_causal=True)
        else:
            fa4_private._flash_attn_bwd(q, k, v, out, torch.ones_like(out), lse, **given, causal=True, n_block_size=64)
        assert all(map(torch.allclose, found, wanted))
        return
    rest = (0.0, 8**-0.5, True, -1, -1, 0.0, None)
    out, lse, weights, rng_state = private._flash_attn_forward(q, k, v, *rest, False)
    assert (
        torch.equal(out, fa2.flash_attn_func(q, k, v, causal=True))
        and weights.shape == (0,)
        and rng_state.tolist() == [0, 0]
    )
    found = [torch.empty_like(t) for t in (q, k, v)]
    private._flash_attn_backward(torch.ones_like(out), q, k, v, out, lse, *found, *rest, False, rng_state)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    wanted = torch.autograd.grad(fa2.flash_attn_func(*leaves, causal=True).sum(), leaves)
    assert all(map(torch.allclose, found, wanted))


def _padding(library: Library):
    padded, mask = torch.arange(6.0).view(2, 3, 1), torch.tensor([[1, 1, 0], [1, 0, 0]])
    rows, indices, *_ = bert_padding.unpad_input(padded, mask)
    assert torch.equal(bert_padding.pad_input(rows, indices, 2, 3), padded * mask[..., None])


def _combine(library: Library):
    q, k, v = _tensors(4, 6)
    combine = fa3.flash_attn_combine if library.module is fa3 else fa4_private.flash_attn_combine
    parts = [library.dense(q, k[:, keys], v[:, keys]) for keys in (slice(0, 2), slice(2, 6))]
    out, lse = combine(torch.stack([out for out, _ in parts]), torch.stack([lse.transpose(1, 2) for _, lse in parts]))
    whole, whole_lse = library.dense(q, k, v)
    assert torch.allclose(out, whole, atol=1e-6) and torch.allclose(lse, whole_lse.transpose(1, 2), atol=1e-6)


def _sinks(library: Library):
    q, k, v = _tensors()
    sinks = torch.zeros(2, requires_grad=True)
    out, lse = fa4.flash_attn_func(q, k, v, learnable_sink=sinks)
    plain, plain_lse = fa4.flash_attn_func(q, k, v)
    assert torch.allclose(lse, torch.logaddexp(plain_lse, torch.zeros(()))) and (out.abs() < plain.abs()).all()
    assert torch.autograd.grad(out.sum(), sinks)[0].abs().min() > 0


CHECKS = {
    "causal": _causal,
    "window": _window,
    "scale": _scale,
    "softcap": _softcap,
    "deterministic": _deterministic,
    "lse": _lse,
    "gradient of lse": _lse_gradient,
    "rows that see no key": _empty_rows,
    "returns": _returns,
    "types": _types,
    "descales": _descales,
    "devices": _devices,
    "head dimensions": _head_dimensions,
    "strided tensors": _strided,
    "wrong arguments": _wrong_arguments,
    "torch.compile": _compiles,
    "dropout, ALiBi": _bias_and_dropout,
    "caches": _caches,
    "pages": _pages,
    "indexed rows, left padding": _indexed,
    "rotary embedding": _rotary,
    "lengths, ids beyond the cache": _beyond,
    "splits": _splits,
    "packed queries over pages": _packed_over_pages,
    "packed queries or new keys over a cache": _packed_over_a_cache,
    "private functions": _private,
    "autograd classes": _classes,
    "rotary layers": _rotary_layers,
    "scheduler metadata": _metadata,
    "padding": _padding,
    "schedule": _schedule,
    "lengths beside offsets": _lengths,
    "chunks, qv": _refused("flash_attn_func", attention_chunk=4, qv=torch.ones(1)),
    "combine": _combine,
    "sinks": _sinks,
    "code of yours": _refused(
        "flash_attn_func",
        score_mod=max,
        mask_mod=max,
        block_sparse_tensors=(),
        block_sparse_tensors_bwd=(),
        aux_tensors=[],
    ),
    "pages, qv, gather": _refused(
        "flash_attn_varlen_func", page_table=torch.ones(1), qv=torch.ones(1), gather_kv_indices=torch.ones(1)
    ),
}
PAGE = (DOCS / "switching.md").read_text()
SECTIONS = {"PyTorch": (DOCS / "from_pytorch.md").read_text()} | {
    title: text for title, text in re.findall(r"^## From (\S+)$(.*?)(?=^## )", PAGE, re.DOTALL | re.MULTILINE)
}
ROWS = [
    (library, row)
    for library, text in SECTIONS.items()
    for row in re.findall(r"^\| ([a-z][^|]*) \|", text, re.MULTILINE)
]


@pytest.mark.parametrize("library, row", ROWS, ids=[": ".join(row) for row in ROWS])
def test_a_row_of_the_page_holds(library, row):
    if library == "PyTorch":
        PYTORCH[row]()
    else:
        CHECKS[row](LIBRARIES[library])


def test_each_check_has_its_row():
    checked = [{row for library, row in ROWS if (library == "PyTorch") is ours} for ours in (True, False)]
    assert checked == [set(PYTORCH), set(CHECKS)]
    assert [*SECTIONS] == ["PyTorch", *LIBRARIES] and len(ROWS) >= 75
