"""DTensor over two gloo processes: each placement gives what one process computes, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from processes import WORLD, together

import strobe

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


def _inputs(heads_kv: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((2, 5, 4, 8), (2, 7, heads_kv, 8), (2, 7, heads_kv, 6))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _check(mesh, placements: dict, tensors: dict, options: dict, packed: bool = False, lengths: tuple | None = None) -> None:
    """The call on sharded leaves and on whole ones: out, its placement, and every gradient."""
    from torch.distributed.tensor import distribute_tensor

    attend = strobe.attention_varlen if packed else strobe.attention
    whole = {name: t.clone().requires_grad_(t.is_floating_point()) for name, t in tensors.items()}
    sharded = {name: distribute_tensor(t, mesh, [placements[name]]).requires_grad_(t.is_floating_point()) for name, t in tensors.items()}
    split = lambda named: ([named[name] for name in "qkv"], {name: t for name, t in named.items() if name not in "qkv"})
    (qkv, more), (qkv_sharded, more_sharded) = split(whole), split(sharded)
    options_sharded = options if lengths is None else {"mask": strobe.key_lengths(distribute_tensor(lengths[0], mesh, [lengths[1]]))}
    expected, got = attend(*qkv, **more, **options), attend(*qkv_sharded, **more_sharded, **options_sharded)
    assert tuple(got.placements) == (placements["q"],), (got.placements, placements)
    torch.testing.assert_close(got.full_tensor(), expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(5), dtype=expected.dtype)
    expected.backward(upstream)
    got.backward(distribute_tensor(upstream, mesh, [placements["q"]]))
    for name, t in whole.items():
        if t.requires_grad:
            torch.testing.assert_close(sharded[name].grad.full_tensor(), t.grad, rtol=1e-12, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


def _work(rank: int) -> None:
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (WORLD,))
    q, k, v = _inputs()
    sinks = torch.linspace(-1, 1, 4, dtype=torch.float64)
    qkv = {"q": q, "k": k, "v": v}
    alike = lambda placement: dict.fromkeys(("q", "k", "v"), placement)
    for placement in (Replicate(), Shard(0), Shard(2)):  # everywhere whole, the batch apart, heads apart with grouped queries
        _check(mesh, alike(placement), qkv, {"causal": True})
        _check(mesh, alike(placement), qkv, {"window": (2, 1), "softcap": 2.0, "scale": 0.3})
    _check(mesh, alike(Shard(2)) | {"sinks": Shard(0)}, qkv | {"sinks": sinks}, {"causal": True})
    _check(mesh, alike(Replicate()) | {"sinks": Replicate()}, qkv | {"sinks": sinks}, {"causal": True})
    _check(mesh, alike(Shard(0)), qkv, {"mask": strobe.prefix_causal(2)})
    lengths = torch.tensor([4, 0], dtype=torch.int32)
    for placement, beside in ((Shard(0), Shard(0)), (Shard(2), Replicate())):  # lengths go with the batch
        _check(mesh, alike(placement), qkv, {"mask": strobe.key_lengths(lengths)}, lengths=(lengths, beside))
    flat = {name: t.flatten(0, 1) for name, t in qkv.items()}
    offsets = {"cu_seqlens_q": torch.tensor([0, 3, 10], dtype=torch.int32), "cu_seqlens_k": torch.tensor([0, 6, 14], dtype=torch.int32)}
    whole = dict.fromkeys(offsets, Replicate())
    _check(mesh, alike(Shard(1)) | whole, flat | offsets, {"causal": True}, packed=True)
    from torch.distributed.tensor import distribute_tensor

    for heads_q in (12, 6):  # three key heads do not divide by two: none may be read for another
        whole = [torch.randn(2, 7, heads, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(heads)) for heads in (heads_q, 3, 3)]
        apart = strobe.attention(*(distribute_tensor(t, mesh, [Shard(2)]) for t in whole), causal=True)
        torch.testing.assert_close(apart.full_tensor(), strobe.attention(*whole, causal=True))
    whole = [torch.randn(2, 7, heads, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(heads)) for heads in (12, 3, 3)]
    sinks, upstream = torch.linspace(-1, 1, 12, dtype=torch.float64), torch.randn(2, 7, 12, 8, dtype=torch.float64, generator=torch.Generator())
    for more, beside, above in (({"sinks": sinks}, {"sinks": Shard(0)}, Replicate()), ({}, {}, Shard(2))):  # nor where others bring heads apart
        alone = [t.clone().requires_grad_() for t in whole]
        apart = [distribute_tensor(t, mesh, [Replicate()]).requires_grad_() for t in whole]
        expected = strobe.attention(*alone, **more)
        got = strobe.attention(*apart, **{name: distribute_tensor(t, mesh, [beside[name]]) for name, t in more.items()})
        torch.testing.assert_close(got.full_tensor(), expected)
        found = torch.autograd.grad(got, apart, distribute_tensor(upstream, mesh, [above]))
        for one, other in zip(found, torch.autograd.grad(expected, alone, upstream)):
            torch.testing.assert_close(one.full_tensor(), other)
    with torch.no_grad():  # partial results keep their lse beside their heads
        part = strobe.partial_attention(*(distribute_tensor(t, mesh, [Shard(2)]) for t in (q, k, v)))
        assert tuple(part.lse.placements) == (Shard(1),)
        torch.testing.assert_close(part.lse.full_tensor(), strobe.partial_attention(q, k, v).lse)


def test_sharded_by_batch_and_by_heads_it_means_the_same(tmp_path):
    together(_work, tmp_path)
