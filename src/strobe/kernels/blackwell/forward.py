"""Forward attention on Blackwell: five roles around tensor memory. It has not run on a Blackwell GPU.

A program processes tiles of 256 query rows: two query stages t of 128 rows each. While the softmax of stage 0 runs,
the tensor cores multiply for stage 1, and the other way round.

Roles
    load         1 warp    finds work tiles, publishes them, loads Q[t], K and V by TMA (forward_load)
    mma          1 warp    S[t] = Q[t] K^T and O[t] += P[t] V (forward_mma)
    softmax t    4 warps   P[t] = softmax(S[t]), over S[t] in tensor memory; a thread owns a row (forward_softmax)
    correction   4 warps   rescales O[t]; at the end normalizes it and writes LSE (forward_correction)
    store        1 warp    writes O by TMA (forward_correction)

Schedule of the MMA warp
    prologue     Q0 K | Q1 K
    mainloop     P0 V | Q0 K' | P1 V | Q1 K'           K' is the next block's K
    epilogue     P0 V | P1 V

Barriers             arrivals                   complete when
    work_full        1, load                    a work tile is published
    work_empty       5, all others              every other role has read it
    q_full[t]        1 and the bytes, load      Q[t] has landed
    q_empty          1, commit of mma           the products that read Q of both t have finished
    kv_full[i]       1 and the bytes, load      K or V of stage i has landed
    kv_empty[i]      1, commit of mma           the products of both t that read stage i have finished
    s_full[t]        1, commit of mma           S[t] is there, and every product issued before has finished
    p_full[t]        2, softmax t, correction   three quarters of P[t] are there, and O[t] is rescaled or, for a
                                                tile's first block, O[t] of the tile before has been read
    p_last_full[t]   1, softmax t               the last quarter of P[t] is there; all of S[t] has been read
    o_full[t]        1, commit of mma           the last product of the tile has finished
    stats_full[t]    1, softmax t               the factor of O[t] is there; at the end of a tile row_sum and row_max
    stats_empty[t]   1, correction              they have been read
    out_full[i]      1, correction              normalized O is in buffer i
    out_empty[i]     1, store                   TMA has read it

The correction may rescale O[t] when it has received a factor: the softmax sends it after s_full[t]. The factors
themselves do not wait for stats_empty: s_full[t] of the next block says that O[t] was multiplied into, so that the
factor before was read.

A tensor's rows end where TMA's descriptor says: it reads zeros beyond them and writes nothing there, so lengths may be
ragged. Descriptors of packed sequences wrap (`tma_coordinates`), so that a neighbour's rows are neither read nor
written.
Column counts that are no power of two come in two parts (`ColumnParts`), 64 and 32 or 128 and 64. With pack_gqa, the
rows of a tile are queries, each with all its heads (`device.pack_gqa`).

To add a feature: scores -> forward_softmax.modify_tile and device.forward_hooks; which keys a row sees ->
forward_softmax.apply_mask and device.forward_mask.AttentionMask; which key blocks a tile visits ->
device.forward_mask.BlockInfo and BlockList; where rows lie -> device.forward_mask.SeqlenInfo; a constant ->
traits.ForwardTraits; a scalar -> device.forward_arguments.LaunchParams.

Sources: FlashAttention-4 (Dao-AILab/flash-attention, flash_attn/cute): roles, order of products, P in two pieces,
conditional rescaling; FlashAttention-2 (arXiv 2307.08691), algorithm 1; online softmax (arXiv 1805.02867), algorithm 3.
"""

from ..device.dialect import gl, gluon
from ..device.forward_arguments import CuSeqlens, InputMaps, Outputs, Workspace
from ..device.tma import ColumnParts
from .forward_correction import correction, store
from .forward_load import load
from .forward_memory import Pipelines
from .forward_mma import mma
from .forward_softmax import softmax


@gluon.jit
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, q_tail, k_tail, v_tail, o_tail, pointers, launch_params, traits: gl.constexpr
):
    """TMA descriptors of the main and the tail columns (None where there are none): of [B, H, S, D], or for packed
    layouts wrapping ones (`tma.tma_coordinates`). pointers: Pointers; launch_params: LaunchParams
    (`device.forward_arguments`).
    """
    REGISTERS_SOFTMAX: gl.constexpr = traits.registers_softmax
    REGISTERS_ONE_WARP: gl.constexpr = traits.registers_one_warp
    maps = InputMaps(ColumnParts(q_desc, q_tail), ColumnParts(k_desc, k_tail), ColumnParts(v_desc, v_tail))
    o_map = ColumnParts(o_desc, o_tail)
    outputs = Outputs(o_map, pointers.lse, pointers.sinks, None)
    cu_seqlens = CuSeqlens(pointers.cu_seqlens_q, pointers.cu_seqlens_k)
    workspace = Workspace(pointers.errors, pointers.tile_counter)
    launch = launch_params  # an assignment makes values of constants, which partitions can capture
    pipes = Pipelines.create(maps, o_map, traits)
    gl.warp_specialize(
        [
            (correction, (outputs, pipes, launch, traits)),
            (mma, (pipes, traits)),
            (load, (maps, cu_seqlens, pipes, launch, workspace, traits)),
            (store, (o_map, pipes, launch, traits)),
            (softmax, (gl.constexpr(0), pipes, launch, traits)),
            (softmax, (gl.constexpr(1), pipes, launch, traits)),
        ],
        [1, 1, 1, 4, 4],
        [REGISTERS_ONE_WARP, REGISTERS_ONE_WARP, REGISTERS_ONE_WARP, REGISTERS_SOFTMAX, REGISTERS_SOFTMAX],
    )
