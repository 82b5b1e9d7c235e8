"""The ladder's Gluon rungs at sizes that go round every ring: scenes whose synchronisations are taken away, one at a
time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ladder.harness import harness


def _scene(
    name: str, seqlen_q: int = 200, seqlen_k: int = 800, causal: bool = False, **options: int
) -> tuple[Tensor, ...]:
    rung = harness.load(name)
    size = (
        harness.Size(1, 1, 2000, 2, 1, 64, False)
        if rung.queries
        else harness.Size(1, seqlen_q, seqlen_k, 2, 1, 64, causal)
    )
    options |= {"splits": 1} if rung.queries else {}  # one program for all keys
    found = rung.run(*harness.draw(rung, size, torch.device("cpu")), size.causal, **options)
    return tuple(tensor.float() for tensor in found)


def a() -> tuple[Tensor, ...]:
    return _scene("a")


def k3_1() -> tuple[Tensor, ...]:
    return _scene("k3_1")


def k3_2() -> tuple[Tensor, ...]:
    return _scene("k3_2")


def k3_3() -> tuple[Tensor, ...]:
    return _scene("k3_3")


def k4_1() -> tuple[Tensor, ...]:
    return _scene("k4_1")


def k4_2() -> tuple[Tensor, ...]:
    return _scene("k4_2")


def k5() -> tuple[Tensor, ...]:
    """With one tile of keys only the wait for q's place holds q back. Of causal tiles some consumers pass over one."""
    return _scene("k5") + _scene("k5", 900, 100) + _scene("k5", 384, 672, causal=True)


def k6() -> tuple[Tensor, ...]:
    """Turns keep consumers in step, whatever barriers do. With fewer tiles of keys than stages only the waits for q's
    two places hold q back. Of causal tiles some consumers pass over one.
    """
    few = _scene("k6", 900, 100, ping_pong=0, consumers=3)
    return _scene("k6") + _scene("k6", ping_pong=0) + few + _scene("k6", 384, 672, causal=True, ping_pong=0)


def k6_2() -> tuple[Tensor, ...]:
    """As k6, and with tiles that are taken once more: a key far above the maximum of a row's first keys."""
    return (
        _scene("k6_2")
        + _scene("k6_2", ping_pong=0)
        + _scene("k6_2", 900, 100, ping_pong=0, early=1)
        + _scene("k6_2", 384, 672, causal=True, ping_pong=0, early=1)
        + _twice()
    )


def _twice() -> tuple[Tensor, ...]:
    rung = harness.load("k6_2")
    q, k, v = harness.draw(rung, harness.Size(1, 400, 800, 2, 1, 64, False), torch.device("cpu"))
    k[0, 300, 0] = 8.0 * q[0, 120, 0]
    return tuple(tensor.float() for tensor in rung.run(q, k, v, False, ping_pong=0))


def decode() -> tuple[Tensor, ...]:
    return _scene("decode")


def k7() -> tuple[Tensor, ...]:
    return (
        _scene("k7")
        + _scene("k7", turns=0)
        + _scene("k7", 1500, 100, turns=0)
        + _scene("k7", 384, 740, causal=True, turns=0)
    )


def k8() -> tuple[Tensor, ...]:
    return _scene("k8")
