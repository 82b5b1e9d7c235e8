"""The reduce warps of the Blackwell backward with a pair of CTAs: each CTA adds dQ of its half of a tile's queries, a
sum over the pair's 256 keys. So a tile of dQ gets half as many adds as with one CTA.

A thread holds half of the columns of a row. It reads them at once and releases dQ before it adds, because S of the step
after the next waits for that. The sum is ordered as in `backward_reduce`.
"""

from ..device.dialect import gl, gluon, tmem_reg_layout
from ..device.pipeline import PipelineState
from .backward_memory import ROWS, dq_layout
from .backward_work import WorkTile, of_role


@gluon.jit
def reduce(dq_sum, inputs, pipes, launch, traits: gl.constexpr):
    launch = of_role(launch)
    work = WorkTile.of_program(None, inputs, launch, traits)
    state = PipelineState.start(1)
    layout: gl.constexpr = reduce_layout(traits.block_d)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, traits.block_d, gl.SliceLayout(0, layout))[None, :]
    for step in range(work.num_steps(traits)):
        queries = work.query_tile(step, launch.shape, traits)
        sums = dq_sum + queries.index.to(gl.int64) * (ROWS * traits.block_d)
        pipes.dq.consumer_wait(state)
        dq = pipes.tensor.dq(traits).main.load(layout)
        pipes.dq.consumer_release(state)
        gl.atomic_add(sums + (column // 4 * (4 * ROWS) + row * 4 + column % 4), dq, sem="relaxed")
        state = state.advance()


@gluon.constexpr_function
def reduce_layout(columns):
    """Registers of four warps for a pair's dQ [ROWS, columns]."""
    return tmem_reg_layout(gl.float32, (ROWS, columns), dq_layout(columns), 4)
