"""What the roles of the Blackwell forward share: pipelines, and how threads read tensor memory.

Tensor memory has 128 rows and 512 columns of 32 bits. S of both query stages takes 2 x 128 columns, and O of both the
rest. P[t] has 16 bits an element and lies over the first half of S[t].
"""

from ..device.dialect import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    gl,
    gluon,
    record,
    reinterpret,
    tmem_reg_layout,
)
from ..device.forward_arguments import WindowParams
from ..device.forward_scheduler import WorkTilePipeline
from ..device.pipeline import Pipeline, ring
from ..device.tma import ColumnParts, allocate_tiles
from .traits import DENSE_WORDS as _DENSE_WORDS
from .traits import ROWS as _ROWS

ROWS: gl.constexpr = gl.constexpr(_ROWS)
CHUNK: gl.constexpr = gl.constexpr(32)  # columns that a thread holds at a time: a quarter of S
DENSE_WORDS: gl.constexpr = gl.constexpr(_DENSE_WORDS)


@record
class Pipelines:
    """Every pipeline of the kernel. Barriers of a query stage t are at state.at(t)."""

    work: WorkTilePipeline
    q: Pipeline  # two stages; one empty barrier for both
    kv: Pipeline  # K and V of a block lie in stages that follow each other
    s: Pipeline  # S[t]
    p: Pipeline  # the first three quarters of P[t], and O[t] rescaled
    p_last: Pipeline  # the last quarter of P[t]
    o: Pipeline  # O[t]
    # [4, ROWS] float32. Row 2 t: the factor of O[t], at the end of a tile row_sum; row 2 t + 1: row_max
    stats: Pipeline
    out: Pipeline  # normalized O, in shared memory

    @gluon.jit
    def create(maps, o_map, traits: gl.constexpr):
        s, o = allocate_scores(traits), allocate_o(traits)
        words = gl.allocate_shared_memory(gl.int32, [2, DENSE_WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        stats = gl.allocate_shared_memory(gl.float32, [4, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        work_pipe = WorkTilePipeline(words, ring(2, 1), ring(2, traits.consumers), None)
        q_pipe = Pipeline(allocate_tiles(2, maps.q), ring(2, 1), ring(1, 1), False)
        kv_pipe = Pipeline(allocate_tiles(traits.stages, maps.k), ring(traits.stages, 1), ring(traits.stages, 1), False)
        s_pipe = Pipeline(s, ring(2, 1), None, False)
        p_pipe = Pipeline(None, ring(2, 2), None, False)
        p_last_pipe = Pipeline(None, ring(2, 1), None, False)
        o_pipe = Pipeline(o, ring(2, 1), None, False)
        stats_pipe = Pipeline(stats, ring(2, 1), ring(2, 1), False)
        out_pipe = Pipeline(
            allocate_tiles(traits.out_stages, o_map), ring(traits.out_stages, 1), ring(traits.out_stages, 1), False
        )
        return Pipelines(work_pipe, q_pipe, kv_pipe, s_pipe, p_pipe, p_last_pipe, o_pipe, stats_pipe, out_pipe)

    @gluon.jit
    def p_tile(self, t, traits: gl.constexpr):
        """Where P[t] lies: [ROWS, block_n] of K's dtype over the first half of S[t]'s columns."""
        WIDTH: gl.constexpr = 2 * traits.block_n
        layout: gl.constexpr = tile_layout(WIDTH)
        whole = reinterpret(self.s.tiles, self.kv.tiles.main.dtype, [2, ROWS, WIDTH], layout)
        return whole.index(t).slice(0, traits.block_n)


# ---------------------------------------------------------------- tensor memory


@gluon.constexpr_function
def tile_layout(columns):
    return TensorMemoryLayout([ROWS, columns], col_stride=1)


@gluon.constexpr_function
def chunk_layout(dtype):
    """Registers of four warps for [ROWS, CHUNK] of tensor memory: a thread holds a row."""
    return tmem_reg_layout(dtype, (ROWS, CHUNK), tile_layout(CHUNK), 4)


@gluon.jit
def allocate_columns(width: gl.constexpr):
    """[2, ROWS, width] float32: a tile for each query stage."""
    return allocate_tensor_memory(gl.float32, [2, ROWS, width], tile_layout(width))


@gluon.jit
def allocate_scores(traits: gl.constexpr):
    return allocate_columns(traits.block_n)


@gluon.jit
def allocate_o(traits: gl.constexpr):
    if traits.tail_dv:
        return ColumnParts(allocate_columns(traits.block_dv - traits.tail_dv), allocate_columns(traits.tail_dv))
    else:
        return ColumnParts(allocate_columns(traits.block_dv), None)


# ---------------------------------------------------------------- registers


@gluon.jit
def opaque(number):
    """The same number, but the compiler does not know it before this point and computes nothing from it earlier.

    What two roles compute alike from the launch's arguments, LLVM computes once, in front of all roles. ptxas keeps
    three registers through the roles. Further values spill where a role begins (8 to 48 bytes: `right + 1` of causal
    masks).
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [gl.to_tensor(number)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def opaque_window(window):
    return WindowParams(opaque(window.left), opaque(window.right), window.max_seqlen_q, window.max_seqlen_k)
