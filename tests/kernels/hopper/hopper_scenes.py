"""The Hopper kernels at sizes that wrap every ring and give a program several tiles: scenes whose synchronisations are
taken away.

Inside `simulate` a scene returns out and lse, or the gradients, made by the family's own launch code for an H200 of two
SMs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from strobe import reference
from strobe.kernels.hopper import decode_config, kernel, traits
from strobe.ops import attention as ops
from strobe.ops import decode as ops_decode
from strobe.problem.decode import DecodeCall
from strobe.testing import Case
from tests.kernels.hopper.hopper_cases import CAUSAL, H200, band, runs
from tools.proof.simulate import posing

MANY_KEYS = {"EARLY_KEYS": 0, "FEW": {}}  # each row sees, as far as the forward's tiles and arithmetic are concerned


def _forward(
    seqlen_q: int, seqlen_k: int, head_dim: int, grown: bool = False, unknown: slice = slice(0),
    tuned: dict = MANY_KEYS, **options
) -> tuple[Tensor, ...]:  # fmt: skip
    case = Case("scene", seqlen_q, seqlen_k, head_dim=head_dim, **{"batch": 1, "heads": (2, 2)} | options)
    call = case.build("cpu", torch.bfloat16, kernel="hopper")
    if grown:
        call.q.abs_()
        call.k.abs_()[:, : 2 * seqlen_k // 3].mul_(30.0)
    call.v[:, unknown] = float("nan")
    with posing(H200), patch.multiple(kernel, **tuned) if tuned else nullcontext():
        return ops.run(call)


def forward_d128() -> tuple[Tensor, ...]:
    """Two consumers, q in registers, a buffer of its own for o; no more key blocks than stages: only the waits for q
    hold the next q back.
    """
    return _forward(384, 256, 128)


def forward_d96() -> tuple[Tensor, ...]:
    """Every thread lets go of keys and values by itself."""
    return _forward(256, 384, 96)


def forward_d64_causal() -> tuple[Tensor, ...]:
    """Three consumers, q in shared memory."""
    return _forward(384, 512, 64, mask=CAUSAL)


def forward_d64_window() -> tuple[Tensor, ...]:
    """Four consumers; a tile of keys that not all of them see."""
    return _forward(384, 512, 64, mask=band(200, 0))


def forward_few_keys() -> tuple[Tensor, ...]:
    """No early weights; consumers change places, so that the second of a program's two causal tiles is the longer for
    the other one.
    """
    return _forward(256, 256, 128, tuned={}, mask=CAUSAL)


def forward_few_rows() -> tuple[Tensor, ...]:
    """Two of three consumers have no rows, and pass over more key blocks than there are stages, tile after tile."""
    return _forward(16, 640, 64, heads=(4, 4))


def forward_d256() -> tuple[Tensor, ...]:
    """o staged by halves."""
    return _forward(256, 192, 256)


def forward_joined() -> tuple[Tensor, ...]:
    """Three heads of a group share a tile, two tiles a head, one of them with a single query."""
    return _forward(33, 256, 128, heads=(6, 2))


def forward_done_again() -> tuple[Tensor, ...]:
    """Two tiles a program, both of which come back: for the scores of the second of three blocks of keys."""
    return _forward(128, 384, 128, grown=True, heads=(4, 4))


def forward_scattered() -> tuple[Tensor, ...]:
    """Two documents lie scattered: eight tiles of keys for rings of four stages, three tiles of queries a head, of
    which two come back, since among their keys lie those of a third document, whose values are no numbers.
    """
    return _forward(
        256, 512, 128, unknown=slice(100, 150), mask=runs((200, 56), (0, 1), (100, 50, 100, 162, 100), (0, 2, 1, 0, 1))
    )


def board() -> tuple[Tensor, ...]:
    """Three tiles a program for the two slots on which consumers are told of them, each of which they read once more
    behind its last product: no more blocks of keys than stages, and no verdicts to wait for, so that the board alone
    holds the third back.
    """
    return _forward(384, 128, 256)


def _backward(
    seqlen_q: int, seqlen_k: int, head_dim: int, deterministic: bool = False, sms: int = 2, tuned: dict | None = None,
    **options
) -> tuple[Tensor, ...]:  # fmt: skip
    case = Case("scene", seqlen_q, seqlen_k, head_dim=head_dim, **{"batch": 1, "heads": (1, 1)} | options)
    call = case.build("cpu", torch.bfloat16, kernel="hopper.backward")._replace(
        needs_grad=True, deterministic=deterministic
    )
    out, lse = reference.forward(call)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    with posing(replace(H200, sm_count=sms)), patch.multiple(kernel, **tuned) if tuned else nullcontext():
        return ops.BACKWARD(dout, out.to(torch.bfloat16), lse.float(), None, *call.arguments)


def backward_d128() -> tuple[Tensor, ...]:
    """Half of 128 keys a consumer, half of dq's columns each: four tiles of queries for rings of three stages, two
    tiles of keys a program.
    """
    return _backward(256, 256, 128, sms=1)


def backward_d64_grouped() -> tuple[Tensor, ...]:
    """Half of dq's 128 rows a consumer: two query heads, two tiles each, for rings of two stages; no query sees the
    first of three tiles of keys. These have one place, as where shared memory is short.
    """
    with patch.object(traits, "MOST_SHARED", 0):
        return _backward(192, 384, 64, sms=1, heads=(2, 1), mask=band(64, 0))


def backward_two_places() -> tuple[Tensor, ...]:
    """Keys in two places: four tiles of them, of which no query sees the first two, of one program."""
    return _backward(192, 512, 64, sms=1, mask=band(64, 0))


def backward_d256() -> tuple[Tensor, ...]:
    """64 keys at once: ds from one consumer to the other, dq in two parts, unit by unit, one place for do; two tiles of
    keys a program.
    """
    return _backward(192, 128, 256, sms=1)


def backward_d192() -> tuple[Tensor, ...]:
    """The same with columns in two parts, dq in one: four tiles of queries for rings of three stages and two."""
    return _backward(256, 128, 192, sms=1)


def backward_d192_128() -> tuple[Tensor, ...]:
    """128 keys by roles: ds of two tiles from one consumer to the other, dk and dv in the places of k and v; four tiles
    of queries for rings of two stages, two tiles of keys a program.
    """
    return _backward(256, 256, 192, head_dim_v=128, sms=1)


def backward_split() -> tuple[Tensor, ...]:
    """A group of two heads is divided in two, a tile of keys each of two programs: dk, then dv, are added where k and v
    were.
    """
    return _backward(256, 256, 128, heads=(2, 1), mask=CAUSAL)


def backward_lagging() -> tuple[Tensor, ...]:
    """dq of the step before: up to four tiles of queries for rings of two stages, three tiles of keys of one program,
    whose first steps multiply what stands there.
    """
    return _backward(256, 384, 128, sms=1, tuned={"DEFERRED_DQ_STEPS": {(128, 128): 0}, "STORED_KEYS": {}}, mask=CAUSAL)


def backward_lagging_rows() -> tuple[Tensor, ...]:
    """The same where half of dq is its rows, of queries 128 at once: up to three tiles of them."""
    return _backward(384, 384, 64, sms=1, tuned={"DEFERRED_DQ_STEPS": {(64, 64): 0}, "STORED_KEYS": {}}, mask=CAUSAL)


def backward_ahead() -> tuple[Tensor, ...]:
    """Each tile of keys clears a share of what the next head's two add to, four tiles of dq, of three heads on two
    programs.
    """
    return _backward(256, 256, 128, heads=(3, 3), tuned={"STORED_KEYS": {}, "CLEARED_KEYS": 0}, mask=CAUSAL)


def backward_first() -> tuple[Tensor, ...]:
    """The first of three tiles of keys stores four tiles of dq, for which the others wait, each in a program of its
    own; the last that a tile of queries sees writes dq, with what the others have added.
    """
    return _backward(256, 384, 128, sms=3, mask=CAUSAL)


def backward_whole() -> tuple[Tensor, ...]:
    """One tile of keys, whose two heads' three tiles of queries have no others: dq is written at once."""
    return _backward(192, 100, 128, sms=1, heads=(2, 2))


def backward_scattered() -> tuple[Tensor, ...]:
    """Rows of other documents lie on either side of one document's queries, and among those of another: three tiles of
    them and one, of which one is without such rows, for rings of two stages.
    """
    return _backward(256, 256, 128, sms=1, mask=runs((70, 140, 46), (0, 1, 0), (128, 128), (1, 0), also=CAUSAL))


def backward_ordered() -> tuple[Tensor, ...]:
    """Four tiles of dq of each of two heads, to each of which up to three tiles of keys add in turn, in two parts: of
    the first head from the last keys, of the second from the first.
    """
    return _backward(256, 192, 256, heads=(2, 2), deterministic=True, mask=CAUSAL)


def backward_turns() -> tuple[Tensor, ...]:
    """Two warps add dq by turns: five tiles of it from each of three tiles of keys, for rings of two stages and two
    programs.
    """
    return _backward(640, 384, 64, deterministic=True)


def _decode(dtype: torch.dtype = torch.bfloat16, together: int = 0) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(4)
    columns = 26
    q, k, v = (
        torch.randn(shape, generator=draw).to(torch.bfloat16)
        for shape in ((1, 1, 4, 64), (columns, 16, 1, 64), (columns, 16, 1, 64))
    )
    table = torch.randperm(columns, generator=draw).int()[None]
    call = DecodeCall(
        q, k.to(dtype), v.to(dtype), torch.tensor([410], dtype=torch.int32), table, right=0, kernel="hopper"
    )
    with posing(H200), patch.multiple(decode_config, together=lambda *_: together, splits=lambda *_: (2, 256)):
        return ops_decode.run(call)


def decode_pages() -> tuple[Tensor, ...]:
    """Two splits of four tiles of keys, the last in part, for rings of three stages; the last to finish joins them."""
    return _decode()


def decode_float8() -> tuple[Tensor, ...]:
    """Keys and values widened in registers."""
    return _decode(torch.float8_e4m3fn)


def decode_cluster() -> tuple[Tensor, ...]:
    """Four splits of two tiles of keys, the last in part, which run together and send each other their shares."""
    return _decode(together=4)


def invariant() -> tuple[Tensor, ...]:
    """Two splits of keys, the second of one tile alone: stages are filled anew for it, and weights of tiles have two
    places by turns.
    """
    call = Case("scene", 64, 2100, head_dim=64, batch=1, heads=(1, 1), mask=CAUSAL).build(
        "cpu", torch.bfloat16, kernel="hopper"
    )
    with posing(H200):
        return ops.run(call._replace(batch_invariant=True))


class Scene(NamedTuple):
    """A name, the GPU it is for, what runs it, the files whose statements are mutated (a pattern), whether its sums
    must have an order, and whether TMA needs a fence after loads.
    """

    name: str
    target: str
    run: Callable[..., tuple[Tensor, ...]]
    file: str
    ordered: bool = False
    read_fences: bool = True


KERNELS = "../../../src/strobe/kernels/"
FORWARD = KERNELS + "[dh]*/[fp][oi][rp]*.py"  # forward*.py and pipeline.py
REDO = KERNELS + "[dh]*/[fpot][oip][rptl]*.py"  # these, optimistic_softmax.py, tile_redo.py and tile_scheduler.py
BACKWARD = KERNELS + "hopper/backward*.py"
DECODE = KERNELS + "hopper/decode.py"
CLUSTER = KERNELS + "[dh]*/[cd][le][uc]*.py"  # cluster*.py and decode*.py
FORWARD_DOCUMENTS = KERNELS + "[dh]*/[fpotz][oipe][rptl][weio]*.py"  # those of REDO and zero_foreign_rows.py
BACKWARD_MENDED = KERNELS + "[dh]*/[bz][ae][cr]*.py"  # backward*.py and zero_foreign_rows.py
INVARIANT = KERNELS + "hopper/batch_invariant.py"
SCHEDULE = KERNELS + "device/forward_scheduler.py"
SCENES = (
    *(
        Scene(run.__name__, "sm_90", run, FORWARD)
        for run in (
            forward_d128,
            forward_d64_causal,
            forward_d64_window,
            forward_d256,
            forward_few_keys,
            forward_few_rows,
            forward_joined,
        )
    ),
    Scene("forward_d96", "sm_90", forward_d96, FORWARD),
    Scene("forward_done_again", "sm_90", forward_done_again, REDO),
    Scene("forward_scattered", "sm_90", forward_scattered, FORWARD_DOCUMENTS),
    Scene("board", "sm_90", board, SCHEDULE),
    *(
        Scene(run.__name__, "sm_90", run, BACKWARD)
        for run in (backward_d128, backward_d64_grouped, backward_two_places, backward_d256)
    ),
    *(Scene(run.__name__, "sm_90", run, BACKWARD) for run in (backward_d192, backward_d192_128, backward_split)),
    *(Scene(run.__name__, "sm_90", run, BACKWARD) for run in (backward_lagging, backward_lagging_rows, backward_ahead)),
    *(Scene(run.__name__, "sm_90", run, BACKWARD) for run in (backward_first, backward_whole)),
    Scene("backward_scattered", "sm_90", backward_scattered, BACKWARD_MENDED),
    *(Scene(run.__name__, "sm_90", run, BACKWARD, ordered=True) for run in (backward_ordered, backward_turns)),
    *(Scene(run.__name__, "sm_90", run, DECODE) for run in (decode_pages, decode_float8)),
    Scene("decode_cluster", "sm_90", decode_cluster, CLUSTER),
    Scene("invariant", "sm_90", invariant, INVARIANT),
)
