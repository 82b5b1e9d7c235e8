"""Backward attention on Blackwell, one CTA: four roles around tensor memory. It has not run on a Blackwell GPU.

A program owns a work tile: 128 keys of one key head. It visits the tiles of 128 queries that see these keys, of every
query head of the group. Scores are transposed: keys lie on the lanes of tensor memory, queries on its columns. So
P^T and dS^T are left operands in tensor memory as they are, and LSE and delta are one value a column.

Kernels
    preprocess_kernel    delta = rowsum(dO O) - dLSE; LSE and -delta in whole tiles; zeroes dQ's float32 sum;
                         deterministic: zeroes dQ's semaphores and the tile counter, too
    backward_kernel      this file
    postprocess_kernel   dQ = scale * its float32 sum

Roles
    reduce     4 warps   adds dQ of each step to its float32 sum (backward_reduce)
    compute    8 warps   P^T from S^T, dS^T from dP^T; at the end writes dV and dK (backward_compute)
    mma        1 warp    issues the five products (backward_mma)
    load       1 warp    loads K, V, and per step Q, LSE, dO, delta by TMA (backward_load)

               Q, dO, K, V                S^T, dP^T                dV, dK (at the end)
        load --------------->  mma  ------------------> compute --------------------> dV, dK
          |                     ^ |                      |   ^
          |                     | '--- dQ --> reduce     |   |
          |                     |                |       |   |
          |                     |                '--> dQ's sum
          |                     '---- P^T, dS^T ---------'   |
          '--------------------- LSE, delta -----------------'

Tensor memory, 512 columns at d128
    S^T, P^T over its first half | dV | dP^T, dS^T over its first half, dQ over both | dK

Schedule of the MMA warp; step t is tile of queries t of a work tile
    prologue     S(0)  dP(0)  dV(0)
    mainloop     S(t)  dK(t-1)  dQ(t-1)  dP(t)  dV(t)
    epilogue     dK  dQ of the last step

While the compute warps make P(t) from S(t), the tensor cores multiply dK(t-1) and dQ(t-1). While they make dS(t), the
tensor cores multiply dV(t).

192/128 would need 576 columns in this layout. There are 512, so the products of a step run in series (`serial`):
    dV | dK | S^T, P^T over its first half | dP^T over S^T's second half and 64 columns more, dS^T over its first half
              dQ over P^T, S^T and dP^T
    S(t)  dP(t)  dV(t)  dK(t)  dQ(t)

Barriers             arrivals                        complete when
    kv_full          1 and the bytes, load           K and V have landed
    q_full[i]        1 and the bytes, load           Q and LSE of stage i have landed
    q_empty[i]       2, commit of mma and compute    dK has read Q, and compute has read LSE
    do_full[i]       1 and the bytes, load           dO and -delta of stage i have landed
    do_empty[i]      2, commit of mma and compute    dV has read dO, and compute has read delta
    s_full           1, commit of mma                S^T is there
    p_full           1, compute                      P^T is there, and all of S^T has been read
    dp_full          1, commit of mma                dP^T is there, and dQ of the step before has read dS
    ds_full          1, compute                      dS^T is in tensor and shared memory; all of dP^T has been read
    dq_full          1, commit of mma                dQ is there
    dq_empty         1, reduce                       dQ has been read
    dkv_full         1, commit of mma                dV and dK are complete; no product reads K or V any more
With key ranges
    kv_empty         1, compute                      TMA has stored dV and dK from the memory of V and K
With documents
    landed[i]        2 and the bytes, load           a tile with rows of other documents has landed

Products of one warp run in order. So S(t) may be written over P(t-1) once dV(t-1) has been issued, and dQ(t) over dS(t)
once dK(t) has been issued. dP(t) is written over dQ(t-1), which reduce has read by then (dq_empty). In series,
S(t) is written over dQ(t-1), so it waits for dq_empty; dP(t) is written over half of S(t), so it waits for p_full.

The two warpgroups of compute split the columns of a tile. P^T lies over columns of S^T that the other warpgroup reads.
All compute warps therefore meet between reading S^T and writing P^T, and between reading dP^T and writing dS^T.

Packed sequences and key ranges (documents, key lengths, prefixes): `backward_work` says which rows a work tile has.
With key ranges a program takes several work tiles, one after the other.

TMA reads zeros beyond the last row and writes nothing there. A query that sees no key, or does not exist, has LSE +inf,
so that its P is 0. dQ's sum is ordered so that the 32 lanes of a warp, which hold 32 rows, add 512 adjacent bytes:
[D / 4, rows, 4] of each tile (backward_reduce).

To add a feature: scores -> backward_compute.ComputeWarps.probabilities; which pairs are masked ->
backward_compute.AttentionMask; which tiles of queries a tile of keys visits -> backward_work.WorkTile; a constant ->
backward_traits.BackwardTraits; a scalar -> backward_arguments.LaunchParams.

Sources: FlashAttention-4 (Dao-AILab/flash-attention, flash_attn/cute/flash_bwd_sm100.py): roles, tensor memory, order
of products of one CTA, order of dQ's sum; FlashAttention-2 (arXiv 2307.08691), algorithm 2.
"""

from ..device.dialect import gl, gluon
from ..device.tma import ColumnParts
from .backward_compute import compute
from .backward_load import load
from .backward_memory import InputMaps, OutputMaps, Pipelines
from .backward_mma import mma
from .backward_reduce import reduce
from .backward_work import ProgramInputs


@gluon.jit
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, stats_desc, dk_desc, dv_desc,
    q_tail_desc, k_tail_desc, v_tail_desc, do_tail_desc, dk_tail_desc, dv_tail_desc,
    pointers, launch_params, traits: gl.constexpr,
):  # fmt: skip
    """TMA descriptors of the main and the tail columns (None where there are none), as tma.descriptor makes them.
    stats: LSE of all rows, then -delta. pointers: Pointers, whose dq_sum is float32 [B, H_q, tiles, D / 4, 128, 4];
    launch_params: LaunchParams (`backward_arguments`).
    """
    REGISTERS_COMPUTE: gl.constexpr = traits.registers_compute
    REGISTERS_ONE_WARP: gl.constexpr = traits.registers_one_warp
    q_map, k_map = ColumnParts(q_desc, q_tail_desc), ColumnParts(k_desc, k_tail_desc)
    v_map, do_map = ColumnParts(v_desc, v_tail_desc), ColumnParts(do_desc, do_tail_desc)
    maps = InputMaps(q_map, k_map, v_map, do_map, stats_desc)
    out_maps = OutputMaps(ColumnParts(dk_desc, dk_tail_desc), ColumnParts(dv_desc, dv_tail_desc))
    launch = launch_params  # an assignment makes values of constants, which partitions can capture
    program = None
    if traits.deterministic:
        program = gl.atomic_add(pointers.tile_counter, 1, sem="relaxed")
    inputs = ProgramInputs(program, pointers.cu_seqlens_q, pointers.cu_seqlens_k, pointers.ranges)
    pipes = Pipelines.create(maps, traits)
    gl.warp_specialize(
        [
            (reduce, (pointers.dq_sum, pointers.dq_semaphores, inputs, pipes, launch, traits)),
            (compute, (out_maps, inputs, pipes, launch, traits)),
            (mma, (inputs, pipes, launch, traits)),
            (load, (maps, inputs, pipes, launch, traits)),
        ],
        [8, 1, 1],
        [REGISTERS_COMPUTE, REGISTERS_ONE_WARP, REGISTERS_ONE_WARP],
    )
