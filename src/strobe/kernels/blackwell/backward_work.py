"""Which keys a program of the Blackwell backward owns, and which tiles of queries it visits, step by step.

Programs are numbered section by section. Within a section of key heads they are numbered tile of keys by tile of keys:
under causal masks the first keys are seen by most queries, so that the longest programs start first. The queries of a
section stay in L2.
"""

from ..device.dialect import gl, gluon, record
from ..device.mask import first_row, stop_row
from .backward_arguments import LaunchParams, ShapeParams, WindowParams
from .forward_memory import opaque


@gluon.jit
def of_role(launch):
    """The same LaunchParams, of which the compiler knows nothing before this point. What two roles compute alike from
    the launch's arguments would else be computed once, in front of all roles, and spill where a role begins.
    """
    shape, window = launch.shape, launch.window
    shape = ShapeParams(
        opaque(shape.batch),
        opaque(shape.heads),
        opaque(shape.seqlen_q),
        opaque(shape.seqlen_k),
        opaque(shape.num_m_blocks),
        opaque(shape.num_n_blocks),
        opaque(shape.l2_heads),
    )
    window = WindowParams(opaque(window.left), opaque(window.right))
    return LaunchParams(shape, window, launch.softmax)


@record
class QueryTile:
    """A step's tile of queries."""

    head: gl.tensor  # query head
    m_start: gl.tensor
    index: gl.tensor  # of the tile among all of LSE, delta and dQ's sum


@record
class WorkTile:
    """A tile of keys of one key head."""

    batch: gl.tensor
    head_kv: gl.tensor
    n_start: gl.tensor
    m_block_min: gl.tensor
    num_m_blocks: gl.tensor  # of each query head

    @gluon.jit
    def of_program(launch, traits: gl.constexpr):
        shape, window = launch.shape, launch.window
        heads_kv = shape.heads // traits.group
        pid = opaque(gl.program_id(0))  # so that each role computes its own, and holds nothing for the others
        a_section = shape.l2_heads * shape.num_n_blocks
        section = pid // a_section
        head = section * shape.l2_heads + pid % shape.l2_heads
        n_start = pid % a_section // shape.l2_heads * traits.block_n
        limits = (shape.seqlen_k, window.left, window.right)
        last_key = gl.minimum(n_start + traits.block_n, shape.seqlen_k) - 1
        first = first_row(n_start, shape.seqlen_q, limits, 0, traits)
        stop = gl.maximum(stop_row(last_key, shape.seqlen_q, limits, traits), 0)
        m_block_min = first // traits.block_m
        num_m_blocks = gl.maximum(gl.cdiv(stop, traits.block_m) - m_block_min, 0)
        return WorkTile(head // heads_kv, head % heads_kv, n_start, m_block_min, num_m_blocks)

    @gluon.jit
    def num_steps(self, traits: gl.constexpr):
        return self.num_m_blocks * traits.group

    @gluon.jit
    def query_tile(self, step, shape, traits: gl.constexpr):
        head = self.head_kv * traits.group + step // self.num_m_blocks
        m_block = self.m_block_min + step % self.num_m_blocks
        index = (self.batch * shape.heads + head) * shape.num_m_blocks + m_block
        return QueryTile(head, m_block * traits.block_m, index)
