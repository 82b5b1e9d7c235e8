"""What DTensor has to know to shard the ops by batch or by heads. Imported when the first DTensor comes by."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from .call import OPTIONAL_TENSORS, Call

_taught = False


@torch.compiler.assume_constant_result  # so that torch.compile, where it meets the first DTensor, runs this and does not trace it
def teach() -> None:
    """Register the rules, once."""
    global _taught
    if not _taught:
        register_sharding(torch.ops.strobe.forward.default)(_forward)
        register_sharding(torch.ops.strobe.backward.default)(_backward)
    _taught = True


def _forward(*flat):
    call = Call(*flat)
    return _placements(call, len(flat), call[:3])


def _backward(dout, out, lse, dlse, *flat):
    call = Call(*flat)
    rules = []
    for (whole, per_row), inputs in _placements(call, len(flat), (*call[:3], dout, out), (lse, dlse)):
        if call.sinks is not None and whole == Shard(0) and not call.packed:
            continue  # each shard would hold a part of dsinks: a sum that no placement of a custom rule may leave pending
        dsinks = Replicate() if call.sinks is None else inputs[OPTIONAL_TENSORS.start]
        rules.append(([*inputs[:3], dsinks], [whole, whole, per_row, None if dlse is None else per_row, *inputs]))
    return rules


def _heads_divide(key_heads: int, placed: Iterable[tuple[Any, Shard]]) -> bool:
    """Whether each process that heads are spread over, of any tensor that is placed, has whole groups: the same number of key heads."""
    apart = {n: size for t, heads in placed if t is not None for n, size in enumerate(t.mesh.shape) if t.placements[n] == heads}
    return key_heads % prod(apart.values()) == 0


def _placements(call: Call, count: int, by_heads: tuple, by_rows: tuple = ()) -> list[tuple[list, list]]:
    """(outputs, the op's `count` arguments) a rule: all replicated, heads apart, and for dense layouts the batch apart. by_heads: tensors of q's
    order of dimensions, by_rows: of lse's."""
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
