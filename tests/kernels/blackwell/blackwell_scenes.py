"""The Blackwell kernels at sizes that wrap every ring and give a program several tiles: scenes whose synchronisations
are taken away.

Inside `simulate` a scene returns out and lse, or gradients, made by the family's own launch code for a B200 of two SMs.
"""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor

from strobe import reference
from strobe.kernels.hopper import decode_config, launch_decode
from strobe.ops import attention as ops
from strobe.ops import decode as ops_decode
from strobe.problem.cache import FP8
from strobe.problem.decode import DecodeCall
from strobe.problem.target import FAKES
from strobe.testing import Case
from tests.kernels.hopper.hopper_cases import CAUSAL, runs
from tests.kernels.hopper.hopper_scenes import Scene
from tools.proof.simulate import posing

PROGRAMS = 2
B200 = replace(FAKES["B200"], sm_count=PROGRAMS)


def _forward(seqlen_q: int, seqlen_k: int, head_dim: int, **options) -> tuple[Tensor, ...]:
    """On one SM, whose program walks all tiles."""
    case = Case("scene", seqlen_q, seqlen_k, head_dim=head_dim, **{"batch": 1, "heads": (1, 1)} | options)
    call = case.build("cpu", torch.bfloat16, kernel="blackwell")
    with posing(replace(B200, sm_count=1)):
        return ops.run(call)


def blackwell_d128() -> tuple[Tensor, ...]:
    """Two tiles, eight stages of keys and values for a ring of three, a buffer of out for each query stage, three
    messages for two slots.
    """
    return _forward(512, 256, 128)


def blackwell_d192_128() -> tuple[Tensor, ...]:
    """Queries and keys in two parts, a ring of two stages, one buffer of out that the query stages share; a tile that
    sees no key.
    """
    return _forward(768, 512, 192, head_dim_v=128, mask=CAUSAL)


def backward_d64() -> tuple[Tensor, ...]:
    """Two heads of a group with two tiles of queries each: four steps for two stages of Q and one of dO. The keys end
    within the tile. `test_backward_barriers` mutates it.
    """
    return run_backward(Case("scene", 200, 100, head_dim=64, batch=1, heads=(2, 1)))


def backward_documents() -> tuple[Tensor, ...]:
    """Three documents of queries. The keys of the first and the last lie in one tile, with keys between that no query
    sees. Two tiles of queries have rows of the first document alone, a third those of all.
    """
    mask = runs((300, 20, 20), (0, 1, 7), (60, 30, 60), (0, 5, 1))
    return run_backward(Case("scene", 340, 150, head_dim=64, batch=1, heads=(1, 1), mask=mask))


def backward_d192_128() -> tuple[Tensor, ...]:
    """Products one after the other, one stage of Q, four steps."""
    return run_backward(Case("scene", 200, 100, head_dim=192, head_dim_v=128, batch=1, heads=(2, 1)))


def backward_ordered() -> tuple[Tensor, ...]:
    """Two tiles of keys that add to dq in order."""
    return run_backward(Case("scene", 100, 200, head_dim=64, batch=1, heads=(1, 1)), deterministic=True)


def run_backward(case: Case, kernel: str = "blackwell.backward", **options) -> tuple[Tensor, ...]:
    """Gradients of a case on one SM, or one pair of them, from the oracle's out and lse."""
    call = case.build("cpu", torch.bfloat16, kernel=kernel)._replace(needs_grad=True, **options)
    out, lse = reference.forward(call)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    with posing(replace(B200, sm_count=1)):
        return ops.BACKWARD(dout, out.to(torch.bfloat16), lse.float(), None, *call.arguments)


def _decode(tokens: int = 1, fp8: bool = False, cluster: int = 0) -> tuple[Tensor, ...]:
    """410 keys in pages of 16, and 4 heads that share a key head."""
    draw = torch.Generator().manual_seed(4)
    columns = 26
    q, k, v = (
        torch.randn(shape, generator=draw).to(torch.bfloat16)
        for shape in ((1, tokens, 4, 64), (columns, 16, 1, 64), (columns, 16, 1, 64))
    )
    if fp8:
        k, v = (pool.to(FP8) for pool in (k, v))
    table = torch.randperm(columns, generator=draw).int()[None]
    call = DecodeCall(q, k, v, torch.tensor([410], dtype=torch.int32), table, right=0, kernel="blackwell")
    sizes = patch.multiple(decode_config, cluster_size=lambda *_: cluster, splits=lambda *_: (2, 256))
    counters = torch.zeros(4096, dtype=torch.int32)
    zeros = patch.object(launch_decode, "zeros_on", lambda device, count: counters[:count])
    with posing(FAKES["B200"]), sizes, zeros:
        return ops_decode.run(call)


def blackwell_decode_pages() -> tuple[Tensor, ...]:
    """Two splits of four key tiles, the last one partial, for pipelines of three stages. The last split to finish
    merges. Q lies in registers.
    """
    return _decode()


def blackwell_decode_64_rows() -> tuple[Tensor, ...]:
    """Q is read from shared memory in each step, and two stages."""
    return _decode(tokens=16)


def blackwell_decode_float8() -> tuple[Tensor, ...]:
    """Keys and values become float16 in registers."""
    return _decode(fp8=True)


def blackwell_decode_cluster() -> tuple[Tensor, ...]:
    """Four splits of two key tiles, the last one partial. They run in one cluster and send each other their shares."""
    return _decode(cluster=4)


# forward*.py of blackwell and device, and pipeline.py
FORWARD = "../../../src/strobe/kernels/[bd]*/[fp][oi][rp]*.py"
BACKWARD = "../../../src/strobe/kernels/blackwell/backward*.py"
DECODE = "../../../src/strobe/kernels/blackwell/decode*.py"
SCENES = (
    *(Scene(run.__name__, "sm_100", run, FORWARD) for run in (blackwell_d128, blackwell_d192_128)),
    *(Scene(run.__name__, "sm_100", run, BACKWARD) for run in (backward_d64, backward_documents, backward_d192_128)),
    *(
        Scene(run.__name__, "sm_100", run, DECODE)
        for run in (
            blackwell_decode_pages,
            blackwell_decode_64_rows,
            blackwell_decode_float8,
            blackwell_decode_cluster,
        )
    ),
)
