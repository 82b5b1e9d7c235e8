"""The Hopper kernels at sizes that wrap every ring and give a program several tiles: scenes whose synchronisations are
taken away.

Inside `simulate` a scene returns out and lse, or the gradients, made by the family's own launch code for an H200 of two
SMs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from strobe import reference
from strobe.kernels.hopper import decode_config, kernel, launch_decode, launch_paged, traits
from strobe.kernels.protocol import Forward
from strobe.ops import attention as ops
from strobe.ops import decode as ops_decode
from strobe.problem.decode import DecodeCall
from strobe.problem.paged import PagedProblem
from strobe.problem.problem import Problem
from strobe.selection.select import select
from strobe.testing import Case
from strobe.testing.paged import PAGED, PagedCase
from tests.kernels.hopper import test_backward_hooks as backward_hooks
from tests.kernels.hopper import test_forward_hooks as forward_hooks
from tests.kernels.hopper.hopper_cases import CAUSAL, H200, band, runs
from tools.proof.simulate import posing

# each row sees, as far as the forward's tiles and arithmetic are concerned
MANY_KEYS = {"EARLY_KEYS": 0, "FEW_KEYS_TUNINGS": {}}


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
    """The epilogue stages o in two halves."""
    return _forward(256, 192, 256)


def forward_pack_gqa() -> tuple[Tensor, ...]:
    """Three query heads of a group share a tile. Each head has two tiles, the second with a single query."""
    return _forward(33, 256, 128, heads=(6, 2))


def forward_tile_redo() -> tuple[Tensor, ...]:
    """Each program has two tiles. Both are redone because of the scores of the second of three key blocks."""
    return _forward(128, 384, 128, grown=True, heads=(4, 4))


def forward_noncontiguous() -> tuple[Tensor, ...]:
    """Two non-contiguous documents: eight key blocks for pipelines of four stages, three query tiles a head. Two of the
    query tiles are redone, since their key range includes a third document whose values are NaN.
    """
    return _forward(
        256, 512, 128, unknown=slice(100, 150), mask=runs((200, 56), (0, 1), (100, 50, 100, 162, 100), (0, 2, 1, 0, 1))
    )


def _forward_hooks(name: str, blocks: bool) -> tuple[Tensor, ...]:
    if blocks:
        listed = forward_hooks.LISTS[name]
        case, functions, early = listed.case, listed.mods, listed.early
    else:
        case, functions, early = forward_hooks.MODS[name]
    call = case.build("cpu", torch.bfloat16, "normal", 5, kernel="hopper")
    mods = forward_hooks.mods_of(functions, case, "cpu")
    lists = forward_hooks.blocks_for(listed, call, "cpu") if blocks else None
    with posing(H200):
        return forward_hooks.launched(case, call, H200, mods, lists, early)[:2]


def forward_score_mod() -> tuple[Tensor, ...]:
    """A function of scores lifts keys in the middle, so that both tiles of each head are redone."""
    return _forward_hooks("leap", blocks=False)


def forward_mods_causal() -> tuple[Tensor, ...]:
    """Functions of scores and of masks below the diagonal: three tiles of each of two heads."""
    return _forward_hooks("alibi_and_segments", blocks=False)


def forward_block_lists() -> tuple[Tensor, ...]:
    """Drawn lists of full and partial key blocks, of each entry and head its own: four tiles for each of four."""
    return _forward_hooks("drawn", blocks=True)


def forward_block_lists_empty() -> tuple[Tensor, ...]:
    """The first of three tiles of each head has an empty list, and optimistic softmax redoes tiles."""
    return _forward_hooks("empty", blocks=True)


def work_tile_pipeline() -> tuple[Tensor, ...]:
    """Each program has three tiles for a work-tile pipeline of two stages. There are no more key blocks than stages and
    no redo flags, so only the work-tile pipeline delays the third tile.
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
    """Each consumer has half of 128 keys and half of the columns of dq: four query tiles for pipelines of three stages,
    two key tiles a program.
    """
    return _backward(256, 256, 128, sms=1)


def backward_d64_grouped() -> tuple[Tensor, ...]:
    """Each consumer has half of the 128 rows of dq: two query heads of two tiles each, pipelines of two stages. No
    query sees the first of three key tiles. Keys have one buffer, as where shared memory is short.
    """
    with patch.object(traits, "MOST_SHARED", 0):
        return _backward(192, 384, 64, sms=1, heads=(2, 1), mask=band(64, 0))


def backward_two_key_buffers() -> tuple[Tensor, ...]:
    """Keys have two buffers: one program has four key tiles, of which no query sees the first two."""
    return _backward(192, 512, 64, sms=1, mask=band(64, 0))


def backward_d256() -> tuple[Tensor, ...]:
    """64 keys a step: each consumer sends ds to the other, dq has two parts, do has one buffer; two key tiles a
    program.
    """
    return _backward(192, 128, 256, sms=1)


def backward_d192() -> tuple[Tensor, ...]:
    """As backward_d256, with two parts of columns and one part of dq: four query tiles, pipelines of three and two
    stages.
    """
    return _backward(256, 128, 192, sms=1)


def backward_d192_128() -> tuple[Tensor, ...]:
    """128 keys, consumers split by products: each sends ds of two tiles to the other, dk and dv reuse the buffers of k
    and v; four query tiles for pipelines of two stages, two key tiles a program.
    """
    return _backward(256, 256, 192, head_dim_v=128, sms=1)


def backward_split() -> tuple[Tensor, ...]:
    """A group of two heads is split over two programs, each with one key tile: dk, then dv, are added where k and v
    were.
    """
    return _backward(256, 256, 128, heads=(2, 1), mask=CAUSAL)


def backward_deferred_dq() -> tuple[Tensor, ...]:
    """The dq product of the step before: up to four query tiles for pipelines of two stages, three key tiles of one
    program. Each first step multiplies what the buffers hold.
    """
    return _backward(256, 384, 128, sms=1, tuned={"DEFERRED_DQ_STEPS": {(128, 128): 0}, "STORED_KEYS": {}}, mask=CAUSAL)


def backward_deferred_dq_rows() -> tuple[Tensor, ...]:
    """As backward_deferred_dq, where each consumer has half of the rows of dq: up to three tiles of 128 queries."""
    return _backward(384, 384, 64, sms=1, tuned={"DEFERRED_DQ_STEPS": {(64, 64): 0}, "STORED_KEYS": {}}, mask=CAUSAL)


def backward_dq_zeroed_ahead() -> tuple[Tensor, ...]:
    """Each key tile zeroes a share of the dq that the two key tiles of the next head add to: four dq tiles, three
    heads, two programs.
    """
    return _backward(256, 256, 128, heads=(3, 3), tuned={"STORED_KEYS": {}, "CLEARED_KEYS": 0}, mask=CAUSAL)


def backward_dq_first_writer() -> tuple[Tensor, ...]:
    """The first of three key tiles stores four dq tiles, and the others wait for it, each in a program of its own. The
    last key tile that a query tile sees writes dq, with the sum of the others.
    """
    return _backward(256, 384, 128, sms=3, mask=CAUSAL)


def backward_dq_written_directly() -> tuple[Tensor, ...]:
    """One key tile, two heads of three query tiles each: no other key tile adds to dq, so it is written directly."""
    return _backward(192, 100, 128, sms=1, heads=(2, 2))


def backward_noncontiguous() -> tuple[Tensor, ...]:
    """Rows of other documents lie before, after and between the queries of one document: tiles of three kinds and one
    tile without such rows, for pipelines of two stages.
    """
    return _backward(256, 256, 128, sms=1, mask=runs((70, 140, 46), (0, 1, 0), (128, 128), (1, 0), also=CAUSAL))


def backward_ordered() -> tuple[Tensor, ...]:
    """Up to three key tiles add in turn, in two parts, to each of four dq tiles of two heads: from the last key tile
    for the first head, from the first for the second.
    """
    return _backward(256, 192, 256, heads=(2, 2), deterministic=True, mask=CAUSAL)


def backward_dq_semaphore() -> tuple[Tensor, ...]:
    """Two warps add dq in turn: five dq tiles from each of three key tiles, for pipelines of two stages and two
    programs.
    """
    return _backward(640, 384, 64, deterministic=True)


def _backward_hooks(case: Case, functions: str, kinds: str = "") -> tuple[Tensor, ...]:
    mods = backward_hooks.mods_of(functions, case, "cpu")
    call = case.build("cpu", torch.bfloat16, "normal", 5, kernel="hopper")._replace(needs_grad=False)
    traits = kernel.BACKWARD.config(Problem.from_call(call), H200).traits
    blocks = backward_hooks.blocks_for(call, (traits.block_m, traits.block_n), kinds, shared=True) if kinds else None
    with posing(H200):
        found = backward_hooks.launched(call, mods, H200, backward_hooks.drawn(call), blocks)
    return (found.dq, found.dk, found.dv, *(() if mods.total is None else (mods.total,)))


def backward_score_mod() -> tuple[Tensor, ...]:
    """A function of scores with a captured gradient and a function of masks: three query tiles, two key tiles of two
    heads.
    """
    case = Case("scene", 192, 256, head_dim=128, batch=1, heads=(2, 2), mask=CAUSAL)
    return _backward_hooks(case, "alibi+every_third")


def backward_score_mod_d64() -> tuple[Tensor, ...]:
    """Consumers split the rows of dq: a function of scores whose gradient needs the score before it."""
    return _backward_hooks(Case("scene", 384, 384, head_dim=64, batch=1, heads=(2, 1)), "squared")


def backward_block_lists() -> tuple[Tensor, ...]:
    """Drawn lists of query blocks for each of four key tiles, two heads of a group. The window hides listed blocks, so
    that both consumers skip steps in a row.
    """
    case = Case("scene", 390, 390, head_dim=128, batch=1, heads=(2, 1), mask=band(64, 0))
    return _backward_hooks(case, "none", "drawn")


def backward_block_lists_empty() -> tuple[Tensor, ...]:
    """The first of three key tiles has an empty list."""
    return _backward_hooks(Case("scene", 200, 260, head_dim=128, batch=1, heads=(1, 1)), "none", "empty")


def backward_block_lists_d192_128() -> tuple[Tensor, ...]:
    """Consumers split by products: drawn lists of full and partial query blocks, and a function of masks."""
    case = Case("scene", 256, 260, head_dim=192, head_dim_v=128, batch=1, heads=(2, 1))
    return _backward_hooks(case, "every_third", "drawn")


def _paged(case: PagedCase, cluster: int | None = None) -> tuple[Tensor, ...]:
    call = case.build("cpu", torch.bfloat16, seed=1, kernel="hopper")
    sizes = {} if cluster is None else {"cluster_size": lambda *_: cluster}
    with ExitStack() as patches:
        patches.enter_context(patch.multiple(decode_config, **sizes) if sizes else nullcontext())
        for launch in (launch_decode, launch_paged):
            counters = torch.zeros(4096, dtype=torch.int32)
            zeros = lambda device, count, counters=counters: counters[:count]
            patches.enter_context(patch.object(launch, "zeros_on", zeros))
        choice = select(PagedProblem.from_call(call), H200)
        assert choice.forward.kernel.name == "hopper.paged"
        problem = choice.problem
        dtypes = problem.out_dtype, problem.lse_dtype
        found = [torch.full(shape, torch.nan, dtype=dtype) for shape, dtype in zip(problem.out_shapes, dtypes)]
        patches.enter_context(posing(H200))
        ops._launch(choice.forward, call, Forward(*found))
    return tuple(found)


FEW = replace(PAGED["mixed"], news=(9, 1, 0, 3), tokens=9, heads=(4, 2), padding=3)  # the decode alone


def paged_splits() -> tuple[Tensor, ...]:
    """Four sequences of 9, 1, 0 and 3 new tokens and rows of no sequence: splits merge in global memory."""
    return _paged(FEW, cluster=0)


def paged_cluster() -> tuple[Tensor, ...]:
    """The same, whose splits run in one cluster."""
    return _paged(FEW, cluster=4)


def paged_tall() -> tuple[Tensor, ...]:
    """The same with tiles of 64 rows, whose queries are the rows of products."""
    return _paged(replace(FEW, heads=(8, 2)), cluster=0)


def paged_prefill() -> tuple[Tensor, ...]:
    """Sequences of many and of few tokens in the forward. Keys in pages of 16, in more blocks than there are stages."""
    return _paged(replace(PAGED["mixed"], head_dim=128, lengths=(300, 1, 200, 129), news=(140, 1, 130, 3)))


def paged_prefill_lost() -> tuple[Tensor, ...]:
    """Pages that are not in the pool: words for each stage tell the consumers which keys are hidden."""
    lost = (*((0, page, -1) for page in range(8)), (0, 17, -1), (1, 0, -1))
    return _paged(replace(PAGED["pages_lost"], head_dim=128, lengths=(300, 290), news=(140, 130), lost=lost))


def paged_prefill_float8() -> tuple[Tensor, ...]:
    """8-bit keys, which four warps of the producer convert: more key blocks than stages, and tiles without keys."""
    return _paged(replace(PAGED["mixed"], head_dim=128, lengths=(300, 20), news=(20, 230), fp8=True, heads=(2, 1)))


def paged_prefill_float8_wide() -> tuple[Tensor, ...]:
    """8-bit keys in tiles too wide for staging buffers: registers hold the words of K or those of V."""
    return _paged(replace(PAGED["mixed"], head_dim=256, lengths=(200, 20), news=(20, 130), fp8=True, heads=(2, 1)))


def _decode(dtype: torch.dtype = torch.bfloat16, cluster: int = 0) -> tuple[Tensor, ...]:
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
    with posing(H200), patch.multiple(decode_config, cluster_size=lambda *_: cluster, splits=lambda *_: (2, 256)):
        return ops_decode.run(call)


def decode_pages() -> tuple[Tensor, ...]:
    """Two splits of four key tiles, the last one partial, for pipelines of three stages. The last split to finish
    merges.
    """
    return _decode()


def decode_float8() -> tuple[Tensor, ...]:
    """Keys and values are converted to bfloat16 in registers."""
    return _decode(torch.float8_e4m3fn)


def decode_cluster() -> tuple[Tensor, ...]:
    """Four splits of two key tiles, the last one partial. They run in one cluster and send each other their shares."""
    return _decode(cluster=4)


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
DECODE = KERNELS + "hopper/decode*.py"
CLUSTER = KERNELS + "[dh]*/[cd][le][uc]*.py"  # cluster*.py and decode*.py
PREFILL = KERNELS + "[dh]*/[cfpot][aoip][crptl]*.py"  # those of REDO and cached_keys.py
PREFILL_FLOAT8 = KERNELS + "[dh]*/[cfps][aiot][acnpr]*.py"  # FORWARD, cached_keys.py, converted_keys.py, staged_keys.py
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
            forward_pack_gqa,
        )
    ),
    Scene("forward_d96", "sm_90", forward_d96, FORWARD),
    Scene("forward_tile_redo", "sm_90", forward_tile_redo, REDO),
    Scene("forward_noncontiguous", "sm_90", forward_noncontiguous, FORWARD_DOCUMENTS),
    *(
        Scene(run.__name__, "sm_90", run, REDO)
        for run in (forward_score_mod, forward_mods_causal, forward_block_lists, forward_block_lists_empty)
    ),
    Scene("work_tile_pipeline", "sm_90", work_tile_pipeline, SCHEDULE),
    *(
        Scene(run.__name__, "sm_90", run, BACKWARD)
        for run in (backward_d128, backward_d64_grouped, backward_two_key_buffers, backward_d256)
    ),
    *(Scene(run.__name__, "sm_90", run, BACKWARD) for run in (backward_d192, backward_d192_128, backward_split)),
    *(
        Scene(run.__name__, "sm_90", run, BACKWARD)
        for run in (backward_deferred_dq, backward_deferred_dq_rows, backward_dq_zeroed_ahead)
    ),
    *(Scene(run.__name__, "sm_90", run, BACKWARD) for run in (backward_dq_first_writer, backward_dq_written_directly)),
    Scene("backward_noncontiguous", "sm_90", backward_noncontiguous, BACKWARD_MENDED),
    *(Scene(run.__name__, "sm_90", run, BACKWARD, ordered=True) for run in (backward_ordered, backward_dq_semaphore)),
    *(
        Scene(run.__name__, "sm_90", run, BACKWARD)
        for run in (backward_score_mod, backward_score_mod_d64, backward_block_lists, backward_block_lists_empty)
    ),
    Scene("backward_block_lists_d192_128", "sm_90", backward_block_lists_d192_128, BACKWARD),
    *(Scene(run.__name__, "sm_90", run, DECODE) for run in (decode_pages, decode_float8)),
    Scene("decode_cluster", "sm_90", decode_cluster, CLUSTER),
    *(Scene(run.__name__, "sm_90", run, DECODE) for run in (paged_splits, paged_tall)),
    Scene("paged_cluster", "sm_90", paged_cluster, CLUSTER),
    *(Scene(run.__name__, "sm_90", run, PREFILL) for run in (paged_prefill, paged_prefill_lost)),
    Scene("paged_prefill_float8", "sm_90", paged_prefill_float8, PREFILL_FLOAT8),
    Scene("invariant", "sm_90", invariant, INVARIANT),
)
