"""The Blackwell backward's reduce warps: they add dQ of each step to its float32 sum in global memory.

A thread holds a row of dQ. In a sum ordered by rows the 32 lanes of a warp would add to 32 lines of memory at a time.
So the sum of a tile is ordered [D / 4, rows, 4]: a lane adds 16 bytes, and a warp 512 adjacent bytes
(red.global.add.v4.f32). `backward_preprocess.postprocess_kernel` reads that order.
"""

from ..device.dialect import gl, gluon
from ..device.pipeline import PipelineState
from .backward_memory import CHUNK, ROWS, reduce_layout
from .backward_work import WorkTile, of_role


@gluon.jit
def add_columns(dq_tile, dq_sum, start: gl.constexpr):
    """dQ_sum += dQ of CHUNK columns; dq_sum points at the tile's sum."""
    layout: gl.constexpr = reduce_layout()
    dq = dq_tile.slice(start, CHUNK).load(layout)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    column = start + gl.arange(0, CHUNK, gl.SliceLayout(0, layout))[None, :]
    gl.atomic_add(dq_sum + (column // 4 * (4 * ROWS) + row * 4 + column % 4), dq, sem="relaxed")


@gluon.jit
def reduce(dq_sum, pipes, launch, traits: gl.constexpr):
    CHUNKS: gl.constexpr = traits.block_d // CHUNK
    launch = of_role(launch)
    work = WorkTile.of_program(launch, traits)
    state = PipelineState.start(1)
    for step in range(work.num_steps(traits)):
        queries = work.query_tile(step, launch.shape, traits)
        dq_tile_sum = dq_sum + queries.index.to(gl.int64) * (ROWS * traits.block_d)
        pipes.dq.consumer_wait(state)
        for c in gl.static_range(CHUNKS):
            add_columns(pipes.tensor.dq(traits), dq_tile_sum, c * CHUNK)
        pipes.dq.consumer_release(state)
        state = state.advance()
