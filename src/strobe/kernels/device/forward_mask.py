"""Which keys a row sees: the key blocks that a tile visits, and the mask of a partial block."""

from .dialect import Value, gl, gluon, record
from .key_ranges import PURE
from .mask import row_interval
from .pack_gqa import queries_of


@record
class SeqlenInfo:
    """One sequence, or one range of rows of a batch entry that see the same range of keys.

    Offsets are rows from the start of the tensor in packed layouts, and 0 in dense ones. Key ranges: offsets count as
    if batch entries had no gaps, and seqlen_k only says where the diagonal is; the range has num_keys keys.
    """

    offset_q: gl.tensor
    seqlen_q: gl.tensor
    offset_k: gl.tensor
    seqlen_k: gl.tensor
    num_keys: gl.tensor
    prefix: Value  # number of first keys that all rows see

    @gluon.jit
    def visible_keys(self, row, window, traits: gl.constexpr):
        """Keys [first, stop) of a row or a vector of rows; neither falls from a row to the next."""
        return row_interval(
            row, self.seqlen_q, self.num_keys, (self.seqlen_k, window.left, window.right), self.prefix, traits
        )


@record
class KeyBlock:
    """A key block as a step of a consumer sees it."""

    n_start: gl.tensor  # its first key
    is_full: Value  # whether a list says that every row sees every key; None without lists
    may_be_first: Value  # whether a row may not have met a key before; None without lists
    lost: Value  # pages: bits of the boxes whose keys are hidden (`cached_keys`); else None

    @gluon.jit
    def without_boxes(self, lost, traits: gl.constexpr):
        """The same block with these lost boxes."""
        if traits.has_pages:
            return KeyBlock(self.n_start, self.is_full, self.may_be_first, lost)
        else:
            return self


@record
class BlockInfo:
    """The key blocks that a tile of rows visits, contiguous, in the order of `n_block`. `BlockList` has the same
    methods.
    """

    n_block_min: gl.tensor
    count: gl.tensor

    @gluon.jit
    def of_rows(m_start, rows: gl.constexpr, seqlen, window, traits: gl.constexpr):
        """The blocks that any row of m_start .. m_start + rows - 1 sees."""
        n_first, _ = seqlen.visible_keys(m_start, window, traits)
        _, n_stop = seqlen.visible_keys(gl.minimum(m_start + rows, seqlen.seqlen_q) - 1, window, traits)
        n_block_min = n_first // traits.block_n
        count = gl.maximum(gl.cdiv(n_stop, traits.block_n) - n_block_min, 0)
        return BlockInfo(n_block_min, gl.where(m_start < seqlen.seqlen_q, count, 0))

    @gluon.jit
    def seen_by(self, m_start, rows: gl.constexpr, seqlen, window, traits: gl.constexpr):
        """The blocks of this tile that any of a consumer's rows sees."""
        return BlockInfo.of_rows(m_start, rows, seqlen, window, traits)

    @gluon.jit
    def n_block(self, i, traits: gl.constexpr):
        """The i-th block that is visited: the last first, but the first block before all others where every row sees
        it. Attention sinks lie there, so later scores seldom outgrow a row's first maximum. The diagonal comes next,
        where scores of nearby positions are large.
        """
        n_block = self.n_block_min + self.count - 1 - i
        if traits.first_block_first:
            n_block = gl.where(i == 0, self.n_block_min, n_block + 1)
        return n_block

    @gluon.jit
    def visit(self, i, traits: gl.constexpr):
        return KeyBlock(self.n_block(i, traits) * traits.block_n, None, None, None)

    @gluon.jit
    def blocks_after(self, own):
        """Number of blocks of this tile after the last one of `own`, which only other consumers' rows see."""
        return self.n_block_min + self.count - own.n_block_min - own.count

    @gluon.jit
    def blocks_before(self, own):
        return own.n_block_min - self.n_block_min


@record
class BlockList:
    """The key blocks that a tile of rows visits, from the call's lists. Every consumer with rows visits all of them.

    Partial blocks come first, and full ones last. Optimistic softmax looks for row maxima in partial blocks and in the
    first full one, where every row meets a key.
    """

    num_partial: gl.tensor  # key blocks
    count: gl.tensor
    kv_indices: gl.tensor  # pointers to the tile's rows of the lists
    full_kv_indices: Value

    @gluon.jit
    def counts(entry, head, q_start, sees_keys, lists, traits: gl.constexpr):
        """(num_partial, count) of the tile that begins at row q_start of its sequence. Only tiles of rows that see keys
        have a row in the lists.
        """
        row = list_row(entry, head, q_start, lists, traits)
        partial = gl.load(lists.kv_num_blocks + row, mask=sees_keys, other=0)
        partial = gl.minimum(gl.maximum(partial, 0), lists.most_blocks) * traits.blocks_per_listed
        count = partial
        if traits.has_full_blocks:
            full = gl.load(lists.full_kv_num_blocks + row, mask=sees_keys, other=0)
            count += gl.minimum(gl.maximum(full, 0), lists.most_full_blocks) * traits.blocks_per_listed
        return partial, count

    @gluon.jit
    def of_tile(num_partial, count, entry, head, q_start, lists, traits: gl.constexpr):
        row = list_row(entry, head, q_start, lists, traits).to(gl.int64)
        full_kv_indices = None
        if traits.has_full_blocks:
            full_kv_indices = lists.full_kv_indices + row * lists.most_full_blocks
        return BlockList(num_partial, count, lists.kv_indices + row * lists.most_blocks, full_kv_indices)

    @gluon.jit
    def seen_by(self, m_start, rows: gl.constexpr, seqlen, window, traits: gl.constexpr):
        count = gl.where(m_start < seqlen.seqlen_q, self.count, 0)
        return BlockList(self.num_partial, count, self.kv_indices, self.full_kv_indices)

    @gluon.jit
    def n_block(self, i, traits: gl.constexpr):
        listed = i // traits.blocks_per_listed
        if traits.has_full_blocks:
            after = (i - self.num_partial) // traits.blocks_per_listed
            n_block = gl.load(self.kv_indices + listed, mask=i < self.num_partial, other=0)
            n_block += gl.load(self.full_kv_indices + after, mask=i >= self.num_partial, other=0)
        else:
            n_block = gl.load(self.kv_indices + listed)
        return n_block * traits.blocks_per_listed + i % traits.blocks_per_listed

    @gluon.jit
    def visit(self, i, traits: gl.constexpr):
        return KeyBlock(self.n_block(i, traits) * traits.block_n, i >= self.num_partial, i <= self.num_partial, None)

    @gluon.jit
    def blocks_after(self, own):
        return self.count * 0

    @gluon.jit
    def blocks_before(self, own):
        return self.count - own.count


@gluon.jit
def list_row(entry, head, q_start, lists, traits: gl.constexpr):
    """Which row of the lists a tile reads."""
    row = q_start // traits.list_block_q
    if traits.packed:  # a sequence longer than promised, whose results are NaN
        row = gl.minimum(row, lists.num_m_blocks - 1)
    return entry * lists.stride_batch + head * lists.stride_head + row


@record
class AttentionMask:
    """The mask of a consumer's rows, by its row 0: scalars, since consumers have few registers."""

    window_start: gl.tensor  # first key by the left bound
    window_stop: gl.tensor  # one past the last key by the right bound; with a prefix, by the diagonal
    key_stop: gl.tensor  # one past the last key
    prefix: Value
    window_right: Value
    document: Value  # PURE, or the document of all rows, whose keys other documents' keys lie among
    key_ids: Value  # pointer to the document id of key 0

    @gluon.jit
    def of_rows(m_start, seqlen, window, traits: gl.constexpr):
        diagonal = m_start + (seqlen.seqlen_k - seqlen.seqlen_q)
        window_start, window_stop = diagonal - window.left, diagonal + window.right + 1
        if traits.mask.prefix:
            window_stop = m_start + (seqlen.seqlen_k - seqlen.seqlen_q) + 1
        return AttentionMask(window_start, window_stop, seqlen.num_keys, seqlen.prefix, window.right, PURE, None)

    @gluon.jit
    def of_document(self, document, key_ids):
        """The same mask for rows of a document."""
        return AttentionMask(
            self.window_start, self.window_stop, self.key_stop, self.prefix, self.window_right, document, key_ids
        )

    @gluon.jit
    def is_partial(self, block, traits: gl.constexpr):
        """Whether a row of the tile does not see the whole block, documents apart."""
        n_start = block.n_start
        n_stop = n_start + traits.block_n
        partial = n_stop > self.key_stop
        if traits.mask.prefix:
            partial = partial | (n_stop > self.first_row_stop(traits))
        elif traits.mask.right:
            partial = partial | (n_stop > self.window_stop)
        if traits.mask.left:
            partial = partial | (n_start < self.window_start + (traits.queries_per_consumer - 1))
        if block.is_full is not None:
            partial = (n_stop > self.key_stop) | (partial & ~block.is_full)
        return partial

    @gluon.jit
    def apply(self, s, block, traits: gl.constexpr):
        """S [rows, block_n] with -inf where a row does not see the key."""
        layout: gl.constexpr = s.type.layout
        n_start = block.n_start
        if self.is_partial(block, traits):
            # bits 1 and 2 of a column depend on the thread, the others on the register: compared apart, no register
            # holds a column
            column = gl.arange(0, traits.block_n, gl.SliceLayout(0, layout))
            by_thread, by_register = (column & 6)[None, :], (column & -7)[None, :]
            row = queries_of(gl.arange(0, s.shape[0], gl.SliceLayout(1, layout)), traits)
            stop = row * 0 + (self.key_stop - n_start)
            if traits.mask.prefix:
                stop = gl.minimum(stop, gl.maximum(row + (self.window_stop - n_start), self.prefix - n_start))
                if traits.mask.right:
                    stop = gl.minimum(stop, row + (self.window_stop + self.window_right - n_start))
            elif traits.mask.right:
                stop = gl.minimum(stop, row + (self.window_stop - n_start))
            s = gl.where(stop[:, None] - by_thread > by_register, s, float("-inf"))
            if traits.mask.left:
                s = gl.where(
                    (row + (self.window_start - n_start))[:, None] - by_thread <= by_register, s, float("-inf")
                )
        if traits.mask.documents:
            s = self.apply_document(s, n_start)
        return s

    @gluon.jit
    def apply_document(self, s, n_start):
        """S with -inf for keys of other documents."""
        if self.document != PURE:
            n = n_start + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
            ids = gl.load(self.key_ids + n, mask=n < self.key_stop, other=PURE)
            s = gl.where((ids == self.document)[None, :], s, float("-inf"))
        return s

    @gluon.jit
    def first_row_stop(self, traits: gl.constexpr):
        """With a prefix: one past the last key of row 0, by the diagonal and the prefix."""
        stop = gl.maximum(self.window_stop, self.prefix)
        if traits.mask.right:
            stop = gl.minimum(stop, self.window_stop + self.window_right)
        return stop

    @gluon.jit
    def fewest_keys_stop(self, traits: gl.constexpr):
        """One past the last key of row 0, which sees the fewest: every row has met a key once the visited blocks begin
        before it.
        """
        stop = self.key_stop
        if traits.mask.prefix:
            stop = gl.minimum(stop, self.first_row_stop(traits))
        elif traits.mask.right:
            stop = gl.minimum(stop, self.window_stop)
        return stop
