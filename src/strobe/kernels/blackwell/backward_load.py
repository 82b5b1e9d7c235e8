"""The Blackwell backward's load warp: K and V of the program's keys, then Q with LSE and dO with -delta of each step.

K, Q(0), V, dO(0), then Q(t), dO(t)
"""

from ..device.dialect import gl, gluon, mbarrier
from ..device.pipeline import PipelineState
from ..device.tma import HeadRows, load_part
from .backward_work import WorkTile, of_role


@gluon.jit
def load(maps, pipes, launch, traits: gl.constexpr):
    launch = of_role(launch)
    shape = launch.shape
    work = WorkTile.of_program(launch, traits)
    steps = work.num_steps(traits)
    first_delta = shape.batch * shape.heads * shape.num_m_blocks
    q, do = PipelineState.start(traits.q_stages), PipelineState.start(traits.do_stages)
    if steps > 0:
        keys = HeadRows(work.batch, 0, shape.seqlen_k, work.head_kv, shape.heads // traits.group)
        mbarrier.expect(pipes.kv.full.index(0), maps.k.block_type.nbytes + maps.v.block_type.nbytes)
        load_part(maps.k, keys, work.n_start, 0, pipes.kv.full.index(0), pipes.kv.k, False, traits)
        load_part(maps.v, keys, work.n_start, 0, pipes.kv.full.index(0), pipes.kv.v, False, traits)
    for step in range(steps):
        queries = work.query_tile(step, shape, traits)
        rows = HeadRows(work.batch, 0, shape.seqlen_q, queries.head, shape.heads)
        stat = queries.index * traits.block_m
        pipes.q.producer_load(q, maps.q, maps.stats, rows, queries.m_start, stat, traits)
        stat += first_delta * traits.block_m
        pipes.do.producer_load(do, maps.do, maps.stats, rows, queries.m_start, stat, traits)
        q, do = q.advance(), do.advance()
