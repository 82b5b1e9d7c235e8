"""Names that libraries import from FlashAttention beside its public functions, and `install`, by which they find
strobe's under those names.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import textwrap
import types

import pytest
import torch

import strobe
import strobe.cute as fa4
import strobe.flash_attn as fa2
import strobe.flash_attn_interface as fa3
from strobe.cute import interface as fa4_private
from strobe.flash_attn import flash_attn_interface as fa2_private
from strobe.flash_attn.layers import rotary
from strobe.integrations import flash_attn as integration

SCORES = (
    0.0,
    0.25,
    True,
    (3, 0),
    1.5,
    None,
    False,
)  # dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
OPTIONS = {"softmax_scale": 0.25, "causal": True, "window_size": (3, 0), "softcap": 1.5}


def _random(*shape, dtype=torch.float32, grad=False):
    return (
        torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)
        .to(dtype)
        .requires_grad_(grad)
    )


def _offsets(*values):
    return torch.tensor(values, dtype=torch.int32)


# ---------------------------------------------------------------- FlashAttention-2


def test_the_wrapped_functions_are_the_private_ones():
    for name in ("forward", "backward", "varlen_forward", "varlen_backward"):
        assert getattr(fa2_private, f"_wrapped_flash_attn_{name}") is getattr(fa2_private, f"_flash_attn_{name}")


def test_the_compiled_module_has_its_five_functions():
    gpu, q, k = fa2_private.flash_attn_gpu, _random(2, 5, 4, 16), _random(2, 7, 2, 16)
    scores, room = (0.25, True, 3, 0, 1.5), torch.empty_like(q)
    out, lse, weights, rng_state = gpu.fwd(q, k, k, room, None, 0.0, *scores, False, None)
    wanted, wanted_lse, _ = fa2.flash_attn_func(q, k, k, **OPTIONS, return_attn_probs=True)
    assert (
        out is room
        and torch.equal(out, wanted)
        and torch.equal(lse, wanted_lse)
        and weights.numel() == 0
        and rng_state.tolist() == [0, 0]
    )
    leaves = [t.clone().requires_grad_() for t in (q, k, k)]
    gradients = torch.autograd.grad(fa2.flash_attn_func(*leaves, **OPTIONS).sum(), leaves)
    dq = torch.empty_like(q)
    found = gpu.bwd(torch.ones_like(q), q, k, k, out, lse, dq, None, None, None, 0.0, *scores, True, None, rng_state)
    assert found[0] is dq and found[3].shape == (2, 4, 128) and all(map(torch.allclose, found[:3], gradients))
    a, b = _offsets(0, 5, 10), _offsets(0, 7, 14)
    flat_q, flat_k = q.flatten(0, 1), k.flatten(0, 1)
    packed = gpu.varlen_fwd(
        flat_q, flat_k, flat_k, None, a, b, None, None, None, None, 5, 7, 0.0, 0.25, False, *scores[1:], False, None
    )
    assert torch.allclose(packed[0], out.flatten(0, 1), atol=1e-6)
    none = (None, None, None)
    found = gpu.varlen_bwd(
        torch.ones_like(flat_q),
        flat_q,
        flat_k,
        flat_k,
        *packed[:2],
        *none,
        a,
        b,
        None,
        5,
        7,
        0.0,
        0.25,
        False,
        *scores[1:],
        True,
        None,
        None,
    )
    assert all(torch.allclose(one, other.flatten(0, 1), atol=1e-6) for one, other in zip(found, gradients))
    out, lse = gpu.fwd_kvcache(q, k, k, None, None, _offsets(7, 7), *(None,) * 6, room, *scores, True, 0)
    assert out is room and torch.allclose(out, wanted, atol=1e-6) and torch.allclose(lse, wanted_lse, atol=1e-6)
    with pytest.raises(strobe.InvalidProblem, match=r"^out: "):
        gpu.fwd(q, k, k, room[:1], None, 0.0, *scores, False, None)


def _classes():
    q, kv, qkv = _random(2, 6, 4, 16, grad=True), _random(2, 6, 2, 4, 16, grad=True), _random(2, 6, 3, 4, 16, grad=True)
    k, v = kv.unbind(2)
    flat, ends = lambda t: t.flatten(0, 1), _offsets(0, 6, 12)
    offsets = ends, ends, 6, 6
    descale = (None, None, None)
    fa3_scores = (*descale, (3, 0), 0, 1.5)
    return {
        "fa2 plain": (fa2_private.FlashAttnFunc, (q, k, v, *SCORES), (False, True), fa2.flash_attn_func),
        "fa2 kv": (fa2_private.FlashAttnKVPackedFunc, (q, kv, *SCORES), (False, True), fa2.flash_attn_kvpacked_func),
        "fa2 qkv": (fa2_private.FlashAttnQKVPackedFunc, (qkv, *SCORES), (False, True), fa2.flash_attn_qkvpacked_func),
        "fa2 packed": (
            fa2_private.FlashAttnVarlenFunc,
            (flat(q), flat(k), flat(v), *offsets, *SCORES),
            (False, None, True),
            fa2.flash_attn_varlen_func,
        ),
        "fa2 packed kv": (
            fa2_private.FlashAttnVarlenKVPackedFunc,
            (flat(q), flat(kv), *offsets, *SCORES),
            (False, True),
            fa2.flash_attn_varlen_kvpacked_func,
        ),
        "fa2 packed qkv": (
            fa2_private.FlashAttnVarlenQKVPackedFunc,
            (flat(qkv), ends, 6, *SCORES),
            (False, True),
            fa2.flash_attn_varlen_qkvpacked_func,
        ),
        "fa3 plain": (
            fa3.FlashAttnFunc,
            (q, k, v, 0.25, True, None, *fa3_scores),
            (1, None, False, 0, False),
            fa3.flash_attn_func,
        ),
        "fa3 qkv": (
            fa3.FlashAttnQKVPackedFunc,
            (qkv, 0.25, True, *fa3_scores),
            (False, None, 0, False),
            fa3.flash_attn_qkvpacked_func,
        ),
    }


@pytest.mark.parametrize("name", list(_classes()))
def test_apply_of_an_autograd_class_is_its_function(name):
    kind, arguments, rest, function = _classes()[name]
    out, wanted = kind.apply(*arguments, *rest), function(*arguments)
    leaf = arguments[0]
    assert torch.equal(out, wanted)
    for one, other in zip(torch.autograd.grad(out.sum(), leaf), torch.autograd.grad(wanted.sum(), leaf)):
        assert torch.equal(one, other)
    if name.startswith("fa2"):
        assert isinstance(kind.apply(*arguments, True, *rest[1:]), tuple)
        assert not kind.apply(*arguments, *rest[:-1], False).requires_grad
    with pytest.raises(TypeError, match=r"^apply: got .+ arguments, expected at most .+"):
        kind.apply(*arguments, *rest, 1, 2)


def test_apply_of_classes_whose_lengths_lie_otherwise():
    q, k, ends, used = _random(12, 4, 16), _random(12, 2, 16), _offsets(0, 6, 12), _offsets(3, 6)
    wanted, lse = fa3.flash_attn_varlen_func(q, k, k, ends, ends, 6, 6, used, used, 0.25, True, return_attn_probs=True)
    found = fa3.FlashAttnVarlenFunc.apply(
        q,
        k,
        k,
        ends,
        ends,
        used,
        used,
        6,
        6,
        0.25,
        True,
        None,
        None,
        None,
        None,
        (-1, -1),
        0,
        0.0,
        1,
        None,
        False,
        0,
        True,
    )
    assert torch.equal(found[0], wanted) and torch.equal(found[1], lse)
    found = fa4_private.FlashAttnVarlenFunc.apply(
        q, k, k, None, ends, ends, used, used, 6, 6, None, None, None, 0.25, True
    )
    assert torch.equal(found[0], wanted)
    dense = q.view(2, 6, 4, 16)
    assert torch.equal(
        fa4_private.FlashAttnFunc.apply(dense, dense, dense, None, None, 0.25, True, (2, 0))[0],
        fa4.flash_attn_func(dense, dense, dense, softmax_scale=0.25, causal=True, window_size=(2, 0))[0],
    )


# ---------------------------------------------------------------- flash_attn.layers.rotary


def _turned(x, angles, position, interleaved):
    """One row [H, D] at a position, in complex numbers."""
    width = 2 * angles.shape[1]
    pairs = x[:, :width].unflatten(-1, (-1, 2)) if interleaved else torch.stack(x[:, :width].chunk(2, -1), -1)
    turned = torch.view_as_real(
        torch.view_as_complex(pairs.double().contiguous()) * torch.polar(torch.ones_like(angles[0]), angles[position])
    )
    return torch.cat(
        [turned.flatten(-2) if interleaved else torch.cat(turned.unbind(-1), -1), x[:, width:].double()], -1
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", [0, 2, _offsets(4, 1)], ids=["none", "an int", "a tensor"])
def test_rows_are_turned_by_the_angles_of_their_positions(offsets, interleaved):
    x, angles = _random(2, 3, 4, 10, grad=True), _random(8, 3, dtype=torch.float64)
    cos, sin = angles.cos().float(), angles.sin().float()
    out = rotary.apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offsets)
    firsts = offsets.tolist() if isinstance(offsets, torch.Tensor) else [offsets] * 2
    wanted = torch.stack(
        [
            torch.stack([_turned(x[b, s], angles, first + s, interleaved) for s in range(3)])
            for b, first in enumerate(firsts)
        ]
    )
    torch.testing.assert_close(out.double(), wanted, atol=1e-6, rtol=1e-6)
    dout = torch.randn_like(out)
    torch.testing.assert_close(
        *(torch.autograd.grad(one, x, dout.to(one.dtype))[0] for one in (out, wanted)), atol=1e-5, rtol=1e-5
    )
    copy = x.detach().clone()
    assert rotary.apply_rotary_emb(copy, cos, sin, interleaved, True, offsets) is copy and torch.equal(copy, out)
    assert rotary.apply_rotary_emb_func is rotary.apply_rotary_emb


def test_packed_rows_count_from_their_own_sequence():
    x, angles, ends = _random(9, 4, 10), _random(8, 3), _offsets(0, 2, 7)
    cos, sin = angles.cos(), angles.sin()
    out = rotary.apply_rotary_emb(x, cos, sin, cu_seqlens=ends, max_seqlen=5, seqlen_offsets=_offsets(1, 2))
    assert torch.equal(out[:2], rotary.apply_rotary_emb(x[None, :2], cos, sin, seqlen_offsets=1)[0])
    assert torch.equal(out[2:7], rotary.apply_rotary_emb(x[None, 2:7], cos, sin, seqlen_offsets=2)[0])
    assert torch.equal(out[7:], x[7:])  # of no sequence
    late = rotary.apply_rotary_emb(x[None], cos, sin, seqlen_offsets=6)
    assert torch.equal(late[:, 2:], x[None, 2:]) and not torch.equal(
        late[:, :2], x[None, :2]
    )  # no angles beyond the eighth


def test_it_is_computed_in_float32_and_rounded_once():
    x, angles = _random(1, 4, 2, 8, dtype=torch.bfloat16), _random(4, 4)
    out = rotary.apply_rotary_emb(x, angles.cos(), angles.sin())
    assert out.dtype == torch.bfloat16 and torch.equal(
        out, rotary.apply_rotary_emb(x.float(), angles.cos(), angles.sin()).bfloat16()
    )


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda x, a: rotary.apply_rotary_emb(x[0], a, a), "x"),
        (lambda x, a: rotary.apply_rotary_emb(x, a, a[:2]), "sin"),
        (lambda x, a: rotary.apply_rotary_emb(x, a.repeat(1, 4), a.repeat(1, 4)), "cos"),
        (lambda x, a: rotary.apply_rotary_emb(x, a[:0], a[:0]), "cos"),
        (lambda x, a: rotary.apply_rotary_emb(x, a, None), "sin"),
    ],
)
def test_wrong_angles_are_named(call, name):
    with pytest.raises((ValueError, TypeError), match=rf"^{name}: got .+, expected .+; .+"):
        call(_random(1, 4, 2, 8), _random(4, 4))


# ---------------------------------------------------------------- FlashAttention-3 and 4


def test_fa3s_private_forward_over_everything():
    q, k = _random(2, 3, 4, 16), _random(2, 8, 2, 16)
    room = torch.empty_like(q)
    out, lse, *parts = fa3._flash_attn_forward(q, k, k, out_=room, causal=True, window_size_left=4)
    wanted, wanted_lse = fa3.flash_attn_func(q, k, k, causal=True, window_size=(4, -1), return_attn_probs=True)
    assert (
        out is room
        and torch.equal(out, wanted)
        and torch.equal(lse, wanted_lse)
        and [part.numel() for part in parts] == [0, 0]
    )
    new, lengths = q[:, :, :2].contiguous(), _offsets(2, 5)
    caches = [(k.clone(), k.clone()) for _ in range(2)]
    out = fa3._flash_attn_forward(q, *caches[0], new, new, seqused_k=lengths, causal=True)[0]
    assert torch.equal(out, fa3.flash_attn_with_kvcache(q, *caches[1], new, new, cache_seqlens=lengths, causal=True))
    assert torch.equal(caches[0][0], caches[1][0]) and not torch.equal(caches[0][0], k)
    out = fa3._flash_attn_forward(q, k, k, seqused_k=lengths, causal=True)[0]
    assert torch.equal(out, fa3.flash_attn_with_kvcache(q, k, k, cache_seqlens=lengths, causal=True))
    packed = {"cu_seqlens_q": _offsets(0, 3), "page_table": _offsets(0)[None], "max_seqlen_q": 3}
    out = fa3._flash_attn_forward(q[0], k, k, **packed)[0]
    assert torch.equal(out, fa3.flash_attn_with_kvcache(q[0], k, k, **packed))
    with pytest.raises(NotImplementedError, match=r"^page_table: "):
        fa3._flash_attn_forward(q[0], k, k, cu_seqlens_k=_offsets(0, 8), **packed)


def test_fa3s_private_backward_is_autograds():
    q, k = _random(2, 3, 4, 16, grad=True), _random(2, 8, 2, 16, grad=True)
    out, lse = fa3.flash_attn_func(q, k, k, causal=True, return_attn_probs=True)
    wanted = torch.autograd.grad(out.sum(), (q, k))
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(k)
    delta = fa3._flash_attn_backward(torch.ones_like(out), q, k, k, out, lse, dq=dq, dk=dk, dv=dv, is_causal=True)
    assert (
        torch.allclose(dq, wanted[0], atol=1e-6)
        and torch.allclose(dk + dv, wanted[1], atol=1e-6)
        and delta.shape == (2, 4, 128)
    )


def test_scheduler_metadata_is_made_taken_and_ignored():
    q, k, lengths = _random(2, 1, 4, 16), _random(2, 8, 2, 16), _offsets(5, 8)
    made = fa3.get_scheduler_metadata(2, 1, 8, 4, 2, 16, lengths, causal=True, num_splits=3)
    assert made.dtype == torch.int32 and made.device == lengths.device
    given = {"cache_seqlens": lengths, "causal": True}
    assert torch.equal(
        fa3.flash_attn_with_kvcache(q, k, k, **given, scheduler_metadata=made),
        fa3.flash_attn_with_kvcache(q, k, k, **given),
    )
    with pytest.raises(TypeError, match=r"^cache_seqlens: "):
        fa3.get_scheduler_metadata(2, 1, 8, 4, 2, 16, [5, 8])
    ends = _offsets(0, 1, 2), _offsets(0, 8, 16)
    made = fa4_private.get_scheduler_metadata(1, 8, 4, 2, 16, 3, cu_seqlens_q=ends[0], causal=True)
    assert made == fa4_private.SchedulerMetadataTensorsTorch() and len(made) == 8
    flat = q.flatten(0, 1), k.flatten(0, 1), k.flatten(0, 1)
    given = {"cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1]}
    found = fa4.flash_attn_varlen_func(*flat, **given, scheduler_metadata=made)
    assert torch.equal(found[0], fa4.flash_attn_varlen_func(*flat, **given)[0])


def test_fa4s_private_functions():
    q, k, sink = _random(2, 5, 4, 16, grad=True), _random(2, 8, 2, 16, grad=True), _random(4, grad=True)
    wanted, wanted_lse = fa4.flash_attn_func(q, k, k, causal=True, learnable_sink=sink)
    room, lse_room = torch.empty_like(q), torch.empty_like(wanted_lse)
    hints = {
        "tile_mn": (64, 64),
        "num_threads": 128,
        "mma_pv_is_rs": True,
        "_arch": 90,
        "num_splits": 4,
        "return_lse": True,
    }
    out, lse, *rest = fa4_private._flash_attn_fwd(
        q, k, k, causal=True, learnable_sink=sink, out=room, lse=lse_room, **hints
    )
    assert (
        out is room
        and lse is lse_room
        and torch.equal(out, wanted)
        and torch.equal(lse, wanted_lse)
        and rest == [None] * 3
    )
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    gradients = torch.autograd.grad((wanted, wanted_lse), (q, k, sink), (dout, dlse))
    dq = torch.empty_like(q)
    found = fa4_private._flash_attn_bwd(
        q, k, k, out, dout, lse, causal=True, dlse=dlse, learnable_sink=sink, dq=dq, m_block_size=32, V_in_regs=True
    )
    assert found[0] is dq and torch.allclose(dq, gradients[0], atol=1e-5)
    assert torch.allclose(found[1] + found[2], gradients[1], atol=1e-5) and torch.allclose(
        found[3], gradients[2], atol=1e-5
    )
    out, lse = fa4.flash_attn_func(q, k, k)
    assert len(fa4_private._flash_attn_bwd(q, k, k, out, dout, lse)) == 3
    with pytest.raises(strobe.InvalidProblem, match=r"^dlse: "):
        fa4_private._flash_attn_bwd(q, k, k, out, dout, lse, dlse=dlse[:1])
    with pytest.raises(strobe.InvalidProblem, match=r"^lse: "):
        fa4_private._flash_attn_fwd(q, k, k, lse=lse_room[:1])


def test_fa4s_combine_is_fa3s():
    parts, lse = _random(3, 2, 5, 4, 16), _random(3, 2, 5, 4)
    wanted = fa3.flash_attn_combine(parts, lse)
    found = fa4_private.flash_attn_combine(parts, lse, seqused=_offsets(5, 5), virtual_batch_idx=_offsets(0, 1))
    assert all(map(torch.equal, found, wanted))
    out, nothing = fa4_private.flash_attn_combine(parts, lse, out_dtype=torch.bfloat16, return_lse=False)
    assert nothing is None and torch.equal(out, wanted[0].bfloat16())


# ---------------------------------------------------------------- in another process, whose names stay its own


def _in_a_process(code: str, **environment: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_torch_ops_names_are_registered_on_request():
    """By opcheck: schema, fakes and tracing; and never by importing."""
    _in_a_process("""
        import torch, strobe.flash_attn, strobe.flash_attn.flash_attn_interface as private
        from strobe.integrations import flash_attn
        assert not hasattr(torch.ops.flash_attn, "_flash_attn_forward")
        flash_attn.register_ops()
        flash_attn.register_ops()
        q, scores = torch.randn(2, 5, 4, 16), (0.0, 0.25, True, -1, -1, 0.0, None)
        ops = torch.ops.flash_attn
        out, lse, *_ = ops._flash_attn_forward(q, q, q, *scores, False)
        assert torch.equal(out, private._flash_attn_forward(q, q, q, *scores, False)[0])
        torch.library.opcheck(ops._flash_attn_forward.default, (q, q, q, *scores, False))
        rooms = [torch.zeros_like(q) for _ in range(3)]
        arguments = torch.ones_like(q), q, q, q, out, lse, *rooms, *scores, False
        torch.library.opcheck(ops._flash_attn_backward.default, arguments)
        ops._flash_attn_backward(torch.ones_like(q), q, q, q, out, lse, *rooms, *scores, False)
        assert all(room.any() for room in rooms)
        flat, ends = q.flatten(0, 1), torch.tensor([0, 5, 10], dtype=torch.int32)
        packed = ops._flash_attn_varlen_forward(flat, flat, flat, ends, ends, 5, 5, 0.0, 0.25, True)
        assert torch.allclose(packed[0], out.flatten(0, 1), atol=1e-6)
        arguments = flat, flat, flat, ends, ends, 5, 5, 0.0, 0.25, True
        torch.library.opcheck(ops._flash_attn_varlen_forward.default, arguments)
        rooms = [torch.zeros_like(flat) for _ in range(3)]
        arguments = torch.ones_like(flat), flat, flat, flat, *packed[:2], *rooms, ends, ends, 5, 5, *scores, False
        torch.library.opcheck(ops._flash_attn_varlen_backward.default, arguments)
        plain = lambda q: ops._flash_attn_forward(q, q, q, *scores, False)[0]
        compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(q), out)
    """)


def test_names_that_are_registered_already_are_left_alone():
    said = _in_a_process("""
        import torch, strobe
        library = torch.library.Library("flash_attn", "DEF")
        library.define("_flash_attn_forward(Tensor q) -> Tensor")
        from strobe.integrations.flash_attn import register_ops
        try:
            register_ops()
        except strobe.InvalidProblem as error:
            print(error)
    """)
    assert said.startswith("torch.ops.flash_attn: got _flash_attn_forward, registered already, expected ")


# ---------------------------------------------------------------- install


def test_installed_names_are_found_and_taken_away_again():
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0].startswith("flash_attn")}
    for name in before:
        del sys.modules[name]
    try:
        with integration.install(2, 3, 4) as installed:
            import flash_attn
            import flash_attn.cute.interface
            import flash_attn_interface
            from flash_attn import cute
            from flash_attn.bert_padding import pad_input
            from flash_attn.flash_attn_interface import flash_attn_gpu
            from flash_attn.layers.rotary import apply_rotary_emb

            assert (
                flash_attn is fa2
                and cute is fa4
                and flash_attn_interface is fa3
                and flash_attn.cute.interface is fa4_private
            )
            assert (
                apply_rotary_emb is rotary.apply_rotary_emb
                and flash_attn_gpu is sys.modules["flash_attn_2_cuda"]
                and pad_input
            )
            versions = [
                importlib.metadata.version(name)
                for name in ("flash_attn", "flash-attn", "flash-attn-3", "flash-attn-4")
            ]
            assert versions[:2] == [flash_attn.__version__] * 2 and versions[3] == "4.0.0b36"
            owners = importlib.metadata.packages_distributions()
            assert owners["flash_attn"] == ["flash-attn", "flash-attn-4"] and owners["flash_attn_interface"] == [
                "flash-attn-3"
            ]
            assert importlib.metadata.version("torch") and importlib.util.find_spec("flash_attn") is not None
        installed.uninstall()
        assert not [name for name in sys.modules if name.partition(".")[0].startswith("flash_attn")]
        with pytest.raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version("flash_attn")
        with integration.install():
            assert "flash_attn.cute" not in sys.modules and "flash_attn_interface" not in sys.modules
    finally:
        sys.modules.update(before)


@pytest.fixture
def no_flash_attn(monkeypatch):
    """No module of FlashAttention's names, neither now nor after the test."""
    for name in [name for name in sys.modules if name.partition(".")[0].startswith("flash_attn")]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0].startswith("flash_attn")]:
        del sys.modules[name]


@pytest.mark.usefixtures("no_flash_attn")
@pytest.mark.parametrize("first", [(2,), (2, 3), (4,)], ids=str)
def test_names_stay_while_another_installation_needs_them(first):
    with integration.install(*first) as one:
        other = integration.install()
        one.uninstall()
        assert importlib.import_module("flash_attn") is fa2 and importlib.import_module("flash_attn.bert_padding")
        assert importlib.metadata.version("flash-attn") == fa2.__version__
        assert "flash_attn_interface" not in sys.modules and "flash_attn.cute" not in sys.modules
        other.uninstall()
        one.uninstall()
    assert not [name for name in sys.modules if name.partition(".")[0].startswith("flash_attn")]


@pytest.mark.usefixtures("no_flash_attn")
def test_cute_is_no_attribute_once_it_is_not_installed():
    with integration.install(4):
        with integration.install(4):
            pass
        from flash_attn import cute

        assert cute is fa4
    assert not hasattr(fa2, "cute")
    with integration.install(2), pytest.raises(ImportError):
        from flash_attn import cute


def test_another_flash_attn_is_not_replaced(monkeypatch):
    stranger = types.ModuleType("flash_attn")
    stranger.__file__ = "/elsewhere/flash_attn/__init__.py"
    monkeypatch.setitem(sys.modules, "flash_attn", stranger)
    finders = list(sys.meta_path)
    with pytest.raises(
        strobe.InvalidProblem,
        match=r"^flash_attn: got /elsewhere/flash_attn/__init__.py, imported already, expected .+; .+",
    ):
        integration.install()
    assert sys.modules["flash_attn"] is stranger and sys.meta_path == finders
    with pytest.raises(strobe.InvalidProblem, match=r"^versions: got 1, expected 2, 3 or 4; .+"):
        integration.install(1)
