"""DTensor sharding rules of the ops: by batch or by heads. Imported at the first call with a DTensor."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from ..errors import InvalidProblem, UnsupportedProblem, wrong_type
from ..problem.append import AppendCall
from ..problem.call import OPTIONAL_TENSORS, Call
from ..problem.decode import DecodeCall
from ..problem.paged import PagedCall

_taught = False


@torch.compiler.assume_constant_result  # torch.compile runs this function and does not trace it
def teach() -> None:
    """Register the sharding rules of forward, backward, decode and paged, once."""
    global _taught
    if not _taught:
        register_sharding(torch.ops.strobe.forward.default)(_forward)
        register_sharding(torch.ops.strobe.backward.default)(_backward)
        register_sharding(torch.ops.strobe.decode.default)(_decode)
        register_sharding(torch.ops.strobe.paged.default)(_paged)
    _taught = True


def _forward(*flat):
    call = Call(*flat)
    return _placements(call, len(flat), call[:3])


def _backward(dout, out, lse, dlse, *flat):
    call = Call(*flat)
    rules = []
    for (whole, per_row), inputs in _placements(call, len(flat), (*call[:3], dout, out), (lse, dlse)):
        if call.sinks is not None and whole == Shard(0) and not call.packed:
            continue  # dsinks would be a partial sum per shard, and a custom rule cannot return Partial placements
        dsinks = Replicate() if call.sinks is None else inputs[OPTIONAL_TENSORS.start]
        rules.append(([*inputs[:3], dsinks], [whole, whole, per_row, None if dlse is None else per_row, *inputs]))
    return rules


def _heads_divide(key_heads: int, placed: Iterable[tuple[Any, Shard]]) -> bool:
    """Whether key heads divide evenly over the mesh dimensions that shard heads, so that each process has whole GQA
    groups.

    placed: pairs of a tensor, or None, and the Shard of its head dimension.
    """
    apart = {
        n: size
        for t, heads in placed
        if t is not None
        for n, size in enumerate(t.mesh.shape)
        if t.placements[n] == heads
    }
    return key_heads % prod(apart.values()) == 0


def _placements(call: Call, count: int, by_heads: tuple, by_rows: tuple = ()) -> list[tuple[list, list]]:
    """The rules, each (placements of outputs, placements of the op's `count` arguments): all replicated, sharded by
    heads and, for dense layouts, sharded by batch. by_heads: tensors with q's order of dimensions. by_rows: tensors
    with lse's order.
    """
    heads, lse_heads = (Shard(1), Shard(0)) if call.packed else (Shard(2), Shard(1))
    no_tensor = Call._make((None,) * len(call))

    def tensors(qkv, sinks, others):
        present = {name: others for name in Call._fields[OPTIONAL_TENSORS] if getattr(call, name) is not None}
        placed = no_tensor._replace(q=qkv, k=qkv, v=qkv, **present)
        return list(placed if call.sinks is None else placed._replace(sinks=sinks))[:count]

    rules = [([Replicate(), Replicate()], tensors(Replicate(), Replicate(), Replicate()))]
    placed = (*((t, heads) for t in by_heads), *((t, lse_heads) for t in by_rows), (call.sinks, Shard(0)))
    if _heads_divide(call.k.shape[heads.dim], placed):
        rules.append(([heads, lse_heads], tensors(heads, Shard(0), Replicate())))
    if not call.packed:
        rules.append(([Shard(0), Shard(0)], tensors(Shard(0), Replicate(), Shard(0))))
    return rules


# ---------------------------------------------------------------- caches


def _decode(*flat):
    call = DecodeCall(*flat)
    by_heads = _beside(call, Shard(2), Replicate(), Shard(0))
    by_batch = _beside(call, _pools_by_batch(call), Shard(0), Replicate())._replace(q=Shard(0))
    return [*_whole_or_by_heads(call, [Shard(2), Shard(1)], by_heads), ([Shard(0), Shard(0)], list(by_batch))]


def _paged(*flat):
    call = PagedCall(*flat)
    by_heads = _beside(call, Shard(2), Replicate(), Shard(0))._replace(q=Shard(1))
    return _whole_or_by_heads(call, [Shard(1), Shard(0)], by_heads)


def _whole_or_by_heads(call: DecodeCall | PagedCall, results: list, by_heads: Any) -> list[tuple[list, list]]:
    """The rules of a call with all tensors replicated and, if the heads divide, sharded by heads.

    results: placements of out and lse by heads. by_heads: the call with placements instead of tensors.
    """
    rules = [([Replicate(), Replicate()], list(_beside(call, Replicate(), Replicate(), Replicate())))]
    placed = [(t, placement) for t, placement in zip(call, by_heads) if isinstance(placement, Shard)]
    if _heads_divide(call.k.shape[2], placed):
        rules.append((results, list(by_heads)))
    return rules


def _pools_by_batch(call: DecodeCall | AppendCall) -> Shard | Replicate:
    """The placement of the pools if the batch is sharded. Pages belong to no batch entry, so paged pools are
    replicated.
    """
    return Shard(0) if call.page_table is None else Replicate()


def _beside(call: Any, qkv: Placement, sequences: Placement, heads: Placement) -> Any:
    """A call on a cache with placements instead of tensors.

    qkv: placement of q, k_new, v_new, the pools and scales of each key and head. sequences: placement of tensors with
    one row per sequence, and of offsets. heads: placement of tensors with one number per head.
    """
    k_scale, v_scale = (
        qkv if scale is not None and scale.ndim > 1 else heads for scale in (call.k_scale, call.v_scale)
    )
    of = {
        "seqlens": sequences,
        "cu_seqlens_q": sequences,
        "page_table": sequences,
        "k_start": sequences,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "sinks": heads,
    }
    of |= dict.fromkeys(("q", "k_new", "v_new", "k", "v"), qkv) | dict.fromkeys(("cos", "sin"), Replicate())
    fields = {name: of[name] for name, field in zip(call._fields, call) if name in of and field is not None}
    return call._make((None,) * len(call))._replace(**fields)


def own_append(call: AppendCall) -> AppendCall:
    """The call on this process's shard of the cache. Inputs may be redistributed; pools may not, because append would
    write to a copy.
    """
    if call.packed:
        tokens = "tokens at slots" if call.at_slots else "packed tokens"
        raise UnsupportedProblem(
            f"append of {tokens} to a cache of DTensors: append [B, T, H_kv, D] without slots, "
            "or call append with to_local() of each tensor"
        )
    if len(call.written) > 2:
        raise UnsupportedProblem(
            "append to a cache of DTensors with scales of each key and head: use one scale for each head, "
            "or call append with to_local() of each tensor"
        )
    for name, tensor in zip(call._fields, call.about):
        if tensor is not None and not isinstance(tensor, DTensor):
            remedy = "give it to distribute_tensor, with Replicate() where each process has all of it"
            raise wrong_type(_word(call, name), tensor, "a DTensor beside a cache of DTensors", remedy)
    pool: Any = call.k
    mesh = pool.device_mesh
    known = {Replicate(): (Replicate(), Replicate()), Shard(2): (Replicate(), Shard(0))}
    if call.page_table is None:
        known[Shard(0)] = (Shard(0), Replicate())
    for name in ("k", "v"):
        held: Any = getattr(call, name)
        if (
            held.device_mesh != mesh
            or held.placements != pool.placements
            or any(placement not in known for placement in held.placements)
        ):
            wanted = f"{' or '.join(map(repr, known))}, the same for keys and values"
            raise InvalidProblem(
                _word(call, name),
                f"placements {held.placements}",
                wanted,
                "shard a cache by heads, or a DenseCache by batch",
            )
    ways = [_beside(call, placement, *known[placement]) for placement in pool.placements]

    def own(name: str, tensor: Any) -> Any:
        return tensor.redistribute(mesh, [getattr(way, name) for way in ways]).to_local()

    return call._replace(
        **{name: own(name, tensor) for name, tensor in zip(call._fields, call.about) if tensor is not None}
    )


def _word(call: AppendCall, name: str) -> str:
    return name if name in ("k_new", "v_new") else f"rotary.{name}" if name in ("cos", "sin") else call.held.word(name)
