"""Backward attention on Blackwell with a pair of CTAs: each product uses the tensor cores of both. It needs Triton 3.9,
and has not run on a Blackwell GPU.

A program is a cluster of two CTAs and owns a work tile: 256 keys of one key head, 128 of each CTA. It visits the tiles
of 128 queries that see these keys, as `backward` does. A product has M = 256, and each CTA has half of operand B in its
shared memory. A tile of dQ is a sum over 256 keys, so it is added to global memory half as often as with one CTA.

    S^T = K Q^T       A: K of own keys          B: half of Q's rows          [keys, queries]
    dP^T = V dO^T     A: V of own keys          B: half of dO's rows         [keys, queries]
    dV += P^T dO      A: P^T, tensor memory     B: half of dO's columns      [keys, D_v]
    dK += dS^T Q      A: dS^T, tensor memory    B: half of Q's columns       [keys, D]
    dQ = dS K         A: dS of half of the      B: half of K's columns,      [half of the queries, D]
                         queries, all 256 keys     all 256 keys

preprocess_kernel, postprocess_kernel, the compute role, the schedule of programs, the masks, the key ranges and the
order of deterministic adds are those of `backward`.

Roles, in each CTA
    reduce     4 warps   adds dQ of half of the queries to its float32 sum (backward_reduce, pair_backward_reduce)
    compute    8 warps   P^T from S^T, dS^T from dP^T, and sends dS to both CTAs; at the end writes dV and dK
    mma        1 warp    that of the first CTA issues the five products for both (pair_backward_mma)
    load       1 warp    loads its CTA's parts by TMA (pair_backward_load)
    relay      1 warp    tells the MMA warp that dS of both CTAs has landed in its CTA (pair_backward_load)

Exchange of dS. A thread of compute holds one key and 64 queries. dQ needs all keys of 64 queries. So each thread stores
its values by st.async in the CTA that multiplies them: half of dS stays, half goes to the peer.

Tensor memory of each CTA, 512 columns
    S^T 0 to 127, P^T over its first half, dQ over its second half | dV | dP^T, dS^T over its first half | dK
    dQ has 64 columns: lanes 0 to 63 hold the first half of D for 64 queries, lanes 64 to 127 the second half

Schedule of the MMA warp; step t is tile of queries t of a work tile
    prologue     S(0)  dP(0)  dV(0)
    mainloop     S(t)  dK(t-1)  dP(t)  dQ(t-1)  dV(t)
    epilogue     dK  dQ of the last step

With heads of 256, dK and dV of 128 keys a CTA would fill tensor memory. So a CTA has 64 keys (`half_tiles`), a product
has M = 128, and a tile takes half as many columns. P^T and dS^T are operands from shared memory. The products run in
series. Rows and columns of dO share memory, too, as those of Q do:
    dV | dK | S^T, 64 columns | dP^T, 64 columns | dQ, 128 columns
    S(t)  dP(t)  dV(t)  dK(t)  dQ(t)     dP does not wait for P, and S does not wait until dQ(t-1) has been read

192/128 would need 576 columns. The products of a step run in series (`serial`), and Q's rows and columns share memory:
    dV | dK | S^T, P^T over its first half | dP^T over S^T's second half and 64 columns more, dS^T over its first half
              dQ over the last 96 columns, in two parts
    S(t)  dP(t)  dV(t)  dK(t)  dQ(t)

Barriers             in      arrivals                          complete when
    kv_full          first   1 of each CTA and bytes, load     K, V and K's columns have landed in both CTAs
    q_rows_full      first   1 of each CTA and bytes, load     Q's rows have landed in both
    q_rows_empty     each    1, commit of mma                  S has read them
    q_columns_full   first   1 of each CTA and bytes, load     Q's columns have landed in both
    q_columns_empty  each    1, commit of mma                  dK has read them
    do_rows_full     first   1 of each CTA and bytes, load     dO's rows have landed in both
    do_rows_empty    each    1, commit of mma                  dP has read them
    do_columns_full  first   1 of each CTA and bytes, load     dO's columns have landed in both
    do_columns_empty each    1, commit of mma                  dV has read them
    q_full[i]        each    1 and bytes, load                 LSE of stage i has landed
    do_full[i]       each    1 and bytes, load                 -delta of stage i has landed
    s_full           each    1, commit of mma                  S^T is there
    p_full           first   1 of each CTA, compute            P^T is there, and all of S^T has been read, in both
    dp_full          each    1, commit of mma                  dP^T is there
    ds_full          first   1 of each CTA, compute            dS^T is in tensor memory, and dP^T has been read, in both
    landed           each    1 and bytes, relay                dS of all 256 keys has landed in this CTA
    exchange_full    first   1 of each CTA, relay              dS has landed in both
    exchange_empty   each    1, commit of mma                  dQ has read dS in both
    dq_full          each    1, commit of mma                  dQ is there
    dq_empty         first   1 of each CTA, reduce             dQ has been read in both
    dkv_full         each    1, commit of mma                  dV and dK are complete
With key ranges
    kv_empty         each    1, compute                        TMA has stored dV and dK, or zeros, from K and V's memory
    dkv_full         each    1, load                           no query sees the work tile, so K and V are not loaded
With documents
    rows_landed      each    1 and bytes, load                 a part of a tile with rows of other documents has landed

A barrier in the first CTA gets the arrivals of both, and only the first CTA waits for it. A barrier in each CTA gets
arrivals of its own roles; a commit completes it in both CTAs.

Products of one warp run in order. So S(t) may be written over P(t-1) once dV(t-1) has been issued, and dP(t) over
dS(t-1) once dK(t-1) has been issued. S(t) is also written over dQ(t-2), which reduce has read by then (dq_empty). dQ(t)
is written over half of S(t+1), which compute has read by then (p_full). With one CTA, dP waits until dQ has been read.
Here it does not. In series, S(t) is written over dQ(t-1), so it waits for dq_empty; dP(t) is written over half of S(t),
so it waits for p_full. Q's columns are loaded when S has read the rows (q_rows_empty), the next step's rows when dK has
read the columns (q_columns_empty).

Compute and relay both wait for exchange_empty of the step before, although the peer's bytes could not land earlier.
Thereby each arrival is ordered after the previous phase by barriers, and not only by data under way.

Sources: FlashAttention-4 (Dao-AILab/flash-attention, flash_attn/cute/flash_bwd_sm100.py): operands, tensor memory and
order of products of a pair. It copies dS through a staging buffer; here threads store it where it is needed.
"""

from ..device.dialect import gl, gluon
from ..device.tma import ColumnParts
from .backward_compute import compute
from .backward_memory import OutputMaps
from .backward_reduce import reduce
from .backward_work import ProgramInputs
from .pair_backward_load import load, relay
from .pair_backward_memory import PairInputMaps, PairPipelines
from .pair_backward_mma import mma


@gluon.jit
def backward_pair_kernel(
    q_desc, q_columns_desc, k_desc, k_columns_desc, v_desc, do_desc, do_columns_desc, stats_desc, dk_desc, dv_desc,
    q_tail_desc, q_columns_tail_desc, k_tail_desc, k_columns_tail_desc, dk_tail_desc,
    pointers, launch_params, traits: gl.constexpr,
):  # fmt: skip
    """TMA descriptors as `launch_backward.pair_descriptors` makes them. stats: LSE of all rows, then -delta. pointers:
    Pointers, whose dq_sum is float32 [B, H_q, tiles, D / 4, 128, 4]; launch_params: LaunchParams.
    """
    REGISTERS_COMPUTE: gl.constexpr = traits.registers_compute
    REGISTERS_ONE_WARP: gl.constexpr = traits.registers_one_warp
    maps = PairInputMaps(
        ColumnParts(k_desc, k_tail_desc),
        ColumnParts(v_desc, None),
        ColumnParts(k_columns_desc, k_columns_tail_desc),
        ColumnParts(q_desc, q_tail_desc),
        ColumnParts(q_columns_desc, q_columns_tail_desc),
        ColumnParts(do_desc, None),
        ColumnParts(do_columns_desc, None),
        stats_desc,
    )
    out_maps = OutputMaps(ColumnParts(dk_desc, dk_tail_desc), ColumnParts(dv_desc, None))
    launch = launch_params  # an assignment makes values of constants, which partitions can capture
    program = None
    if traits.deterministic:
        program = gl.atomic_add(pointers.tile_counter, 1, sem="relaxed")
    inputs = ProgramInputs(program, pointers.cu_seqlens_q, pointers.cu_seqlens_k, pointers.ranges)
    pipes = PairPipelines.create(maps, traits)
    gl.warp_specialize(
        [
            (reduce, (pointers.dq_sum, pointers.dq_semaphores, inputs, pipes, launch, traits)),
            (compute, (out_maps, inputs, pipes, launch, traits)),
            (mma, (inputs, pipes, launch, traits)),
            (load, (maps, inputs, pipes, launch, traits)),
            (relay, (inputs, pipes, launch, traits)),
        ],
        [8, 1, 1, 1],
        [REGISTERS_COMPUTE, REGISTERS_ONE_WARP, REGISTERS_ONE_WARP, REGISTERS_ONE_WARP],
    )
