"""Which keys a program of the Blackwell backward owns, and which tiles of queries it visits, step by step.

Programs are numbered section by section. Within a section of key heads they are numbered tile of keys by tile of keys:
under causal masks the first keys are seen by most queries, so that the longest programs start first. The queries of a
section stay in L2.

Deterministic: tiles of keys add to a tile of dQ one after the other, from the last one that its queries see to the
first. Programs on the causal diagonal reach a tile of dQ in this order anyway, at least one step apart. Programs take
their numbers from a counter, so each waits only for programs that have started before it. In this order the longest
programs start last. In the last sections (`reversed_sections`) the orders are therefore reversed, as in the Hopper
backward: keys from the first to the last, queries from the last to the first.

Packed sequences: a sequence begins a tile of keys of its own (`device.seqlen`). Key ranges (documents, key lengths,
prefixes): a program takes the keys of its tile run by run, each run as a tile of its own (`device.key_ranges`). TMA
descriptors wrap, so that no key of another sequence or document is read and no gradient of one is written.
"""

from ..device.dialect import Value, gl, gluon, record, zero_of_turn
from ..device.forward_mask import SeqlenInfo
from ..device.key_ranges import PURE, prefix_of, tile_at
from ..device.mask import first_row, stop_row
from ..device.seqlen import find_sequence, keys_of, span_of
from ..device.tma import HeadRows
from .backward_arguments import KeyRangeTensors, LaunchParams, ShapeParams, WindowParams
from .forward_memory import opaque


@gluon.jit
def of_role(launch):
    """The same LaunchParams, opaque to the compiler, so that each role computes its own values from it. Otherwise LLVM
    computes values that two roles share once, before all roles, and they spill at the start of a role.
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
        shape.stride_q,
        shape.stride_do,
        shape.stride_k,
        shape.stride_v,
        shape.stride_dk,
        shape.stride_dv,
    )
    window = WindowParams(opaque(window.left), opaque(window.right))
    return LaunchParams(shape, window, launch.softmax)


@record
class ProgramInputs:
    """Inputs that determine a program's work tiles, besides LaunchParams."""

    program: Value  # deterministic: the program's number, from the tile counter; else None (program_id is used)
    cu_seqlens_q: Value  # or None
    cu_seqlens_k: Value
    ranges: Value  # key ranges: KeyRangeTensors; else None


@record
class QueryTile:
    """A step's tile of queries."""

    head: gl.tensor  # query head
    m_block: gl.tensor  # counted from the work tile's first
    m_start: gl.tensor
    index: gl.tensor  # of the tile among all of LSE, delta and dQ's sum


@record
class DocumentRows:
    """The rows of a work tile's document, and which of its m_blocks have no rows of other documents."""

    q_start: gl.tensor
    q_stop: gl.tensor
    pure_begin: gl.tensor
    pure_stop: gl.tensor
    document: gl.tensor  # PURE, or an id where rows of other documents lie among the document's own

    @gluon.jit
    def has_foreign_rows(self, m_block):
        return (m_block < self.pure_begin) | (m_block >= self.pure_stop)

    @gluon.jit
    def own(self, batch, seqlen_q, ranges):
        """The rows that `device.zero_foreign_rows` keeps, as its argument `own`."""
        return (self.q_start, self.q_stop, self.document, ranges.ids_q + batch.to(gl.int64) * seqlen_q)


@record
class KeyPlace:
    """The batch entry, key head and tile of keys of a program."""

    batch: gl.tensor
    head_kv: gl.tensor
    n_block: gl.tensor
    from_last: Value  # with reversed_sections: 1 if the last m_block comes first, else 0; otherwise None

    @gluon.jit
    def of_program(program, shape, traits: gl.constexpr):
        heads_kv = shape.heads // traits.group
        if traits.deterministic:
            pid = opaque(program)
        else:
            pid = opaque(gl.program_id(0))  # each role computes its own, and no register holds it for other roles
        a_section = shape.l2_heads * shape.num_n_blocks
        section = pid // a_section
        head = section * shape.l2_heads + pid % shape.l2_heads
        n_block, from_last = pid % a_section // shape.l2_heads, None
        if traits.deterministic:
            from_end = shape.num_n_blocks - 1 - n_block
            if traits.reversed_sections > 0:
                sections = (shape.batch * heads_kv) // shape.l2_heads
                from_last = (section >= sections - traits.reversed_sections).to(gl.int32)
                from_end = gl.where(from_last == 1, n_block, from_end)
            n_block = from_end
        return KeyPlace(head // heads_kv, head % heads_kv, n_block, from_last)


@record
class WorkTile:
    """The keys from n_start on of one key head of one sequence, and the tiles of queries that see them."""

    is_valid: gl.tensor
    batch: gl.tensor
    head_kv: gl.tensor
    n_start: gl.tensor
    m_start: gl.tensor  # first row of the first m_block
    num_m_blocks: gl.tensor  # of each query head
    first_m_tile: gl.tensor  # index of head 0's first tile of queries, among all
    seqlen: SeqlenInfo  # num_keys: one past the last key that a row sees
    num_keys_written: gl.tensor  # one past the last key whose gradients are written
    rows: DocumentRows | gl.constexpr  # documents; else None
    next_row: Value  # key ranges: the row at which the program's next work tile begins, or -1; else None
    from_last: Value  # see KeyPlace

    @gluon.jit
    def of_program(row, inputs, launch, traits: gl.constexpr):
        """row: with key ranges, the row of the program's keys at which the work tile begins; else None."""
        place = KeyPlace.of_program(inputs.program, launch.shape, traits)
        if traits.key_ranges:
            return range_tile(place, row, inputs.ranges, launch, traits)
        else:
            return sequence_tile(place, inputs, launch, traits)

    @gluon.jit
    def num_steps(self, traits: gl.constexpr):
        return self.num_m_blocks * traits.group

    @gluon.jit
    def query_tile(self, step, shape, traits: gl.constexpr):
        head = self.head_kv * traits.group + step // self.num_m_blocks
        m_block = step % self.num_m_blocks
        if traits.reversed_sections > 0:
            m_block = m_block + self.from_last * (self.num_m_blocks - 1 - 2 * m_block)
        m_start = self.m_start + m_block * traits.block_m
        index = self.first_m_tile + head * shape.num_m_blocks + m_start // traits.block_m
        return QueryTile(head, m_block, m_start, index)

    @gluon.jit
    def q_rows(self, head, stride, shape, traits: gl.constexpr):
        """Rows of Q or dO of a query head; with key ranges, batch entries are `stride` rows apart."""
        offset = self.seqlen.offset_q
        if traits.key_ranges:
            offset = self.batch * stride
        return HeadRows(self.batch, offset, self.seqlen.seqlen_q, head, shape.heads)

    @gluon.jit
    def k_rows(self, stride, num_keys, shape, traits: gl.constexpr):
        """Rows of K, V, dK or dV. The first num_keys are read or written."""
        offset = self.seqlen.offset_k
        if traits.key_ranges:
            offset = self.batch * stride
        return HeadRows(self.batch, offset, num_keys, self.head_kv, shape.heads // traits.group)


@gluon.jit
def sequence_tile(place, inputs, launch, traits: gl.constexpr):
    """A tile of dense or packed layouts. Offsets are 0 in dense ones."""
    shape, window = launch.shape, launch.window
    seqlen_q, seqlen_k, n_block = shape.seqlen_q, shape.seqlen_k, place.n_block
    zero = n_block * 0
    offset_q, offset_k, first_m_tile = zero, zero, place.batch * shape.heads * shape.num_m_blocks
    if traits.packed:
        sequence, n_block = find_sequence(inputs.cu_seqlens_k, n_block, shape.batch, seqlen_k, traits.block_n)
        offset_k, seqlen_k = span_of(inputs.cu_seqlens_k, sequence, shape.batch, seqlen_k)
        offset_q, seqlen_q = keys_of(inputs.cu_seqlens_q, sequence, shape.batch, seqlen_q)
        first_m_tile = offset_q // traits.block_m + sequence  # device.seqlen.find_sequence
    n_start = n_block * traits.block_n
    is_valid = n_start < seqlen_k
    bounds = (seqlen_k, window.left, window.right)
    m_begin = first_row(n_start, seqlen_q, bounds, 0, traits) // traits.block_m
    m_stop = stop_row(gl.minimum(n_start + traits.block_n, seqlen_k) - 1, seqlen_q, bounds, traits)
    num_m_blocks = gl.maximum(gl.cdiv(gl.maximum(m_stop, 0), traits.block_m) - m_begin, 0)
    if traits.packed:
        num_m_blocks = gl.where(is_valid, num_m_blocks, 0)
    seqlen = SeqlenInfo(offset_q, seqlen_q, offset_k, seqlen_k, seqlen_k, 0)
    m_start = m_begin * traits.block_m
    return WorkTile(
        is_valid,
        place.batch,
        place.head_kv,
        n_start,
        m_start,
        num_m_blocks,
        first_m_tile,
        seqlen,
        seqlen_k,
        None,
        None,
        place.from_last,
    )


@gluon.jit
def range_tile(place, row, ranges, launch, traits: gl.constexpr):
    """The work tile that begins at `row` of a program's keys: one run of a document's keys (`device.key_ranges`)."""
    shape, window, batch = launch.shape, launch.window, place.batch
    seqlen_q, seqlen_k = shape.seqlen_q, shape.seqlen_k
    if traits.mask.documents:  # so that each role compares the addresses of both ids itself, as in `of_role`
        ids_k = ranges.ids_k + zero_of_turn()
        ranges = KeyRangeTensors(
            ranges.spans_q, ranges.spans_k, ranges.ids_q, ids_k, ranges.key_lengths, ranges.prefixes
        )
    found = tile_at(batch >= 0, batch, place.n_block, row, 1, ranges, shape, traits.block_n, traits)
    q_start, q_stop, document = found.others
    num_keys = found.stop
    if traits.mask.key_lengths:  # the forward has reported lengths that are out of range
        num_keys = gl.minimum(num_keys, gl.maximum(gl.load(ranges.key_lengths + batch), 0))
    bounds, prefix = (seqlen_k, window.left, window.right), prefix_of(ranges.prefixes, batch, seqlen_k, traits)
    m_begin = gl.maximum(first_row(found.start, seqlen_q, bounds, prefix, traits), q_start) // traits.block_m
    m_stop = gl.minimum(stop_row(num_keys - 1, seqlen_q, bounds, traits), q_stop)
    num_m_blocks = gl.where(num_keys > found.start, gl.maximum(gl.cdiv(m_stop, traits.block_m) - m_begin, 0), 0)
    rows = None
    if traits.mask.documents:
        # there are no rows after S_q
        whole = gl.where(q_stop == seqlen_q, m_begin + num_m_blocks, q_stop // traits.block_m)
        pure_begin = gl.cdiv(q_start, traits.block_m) - m_begin
        pure_stop = gl.where(document == PURE, whole - m_begin, 0)
        rows = DocumentRows(q_start, q_stop, pure_begin, pure_stop, document)
    zero = batch * 0
    return WorkTile(
        found.exists,
        batch,
        place.head_kv,
        found.start,
        m_begin * traits.block_m,
        num_m_blocks,
        batch * shape.heads * shape.num_m_blocks,
        SeqlenInfo(zero, seqlen_q, zero, seqlen_k, num_keys, prefix),
        found.stop,
        rows,
        gl.where(found.next_row > 0, found.next_row, -1),
        None,
    )
