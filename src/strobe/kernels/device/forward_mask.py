"""Which keys a row sees: the key blocks that a tile visits, and the mask of a partial block."""

from .dialect import Value, gl, gluon, record
from .key_ranges import PURE
from .mask import row_interval
from .pack_gqa import queries_of


@record
class SeqlenInfo:
    """One sequence, or one range of rows of a batch entry that see the same range of keys.

    Offsets are rows from the start of the tensor in packed layouts, and 0 in dense ones. Key ranges: offsets count as if batch entries had no gaps,
    and seqlen_k only says where the diagonal is; the range has num_keys keys.
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
        return row_interval(row, self.seqlen_q, self.num_keys, (self.seqlen_k, window.left, window.right), self.prefix, traits)


@record
class BlockInfo:
    """The key blocks that a tile of rows visits, contiguous, in the order of `n_block`. A block-sparse mask would read a list here."""

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
    def n_block(self, i, traits: gl.constexpr):
        """The i-th block that is visited: the last first, but the first block before all others where every row sees it. Attention sinks lie there,
        so later scores seldom outgrow a row's first maximum. The diagonal comes next, where scores of nearby positions are large."""
        n_block = self.n_block_min + self.count - 1 - i
        if traits.first_block_first:
            n_block = gl.where(i == 0, self.n_block_min, n_block + 1)
        return n_block

    @gluon.jit
    def blocks_after(self, own):
        """Number of blocks of this tile behind the last one of `own`, which only other consumers' rows see."""
        return self.n_block_min + self.count - own.n_block_min - own.count

    @gluon.jit
    def blocks_before(self, own):
        return own.n_block_min - self.n_block_min


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
        return AttentionMask(self.window_start, self.window_stop, self.key_stop, self.prefix, self.window_right, document, key_ids)

    @gluon.jit
    def is_partial(self, n_start, traits: gl.constexpr):
        """Whether a row of the tile does not see the whole block at n_start, documents apart."""
        n_stop = n_start + traits.block_n
        partial = n_stop > self.key_stop
        if traits.mask.prefix:
            partial = partial | (n_stop > self.first_row_stop(traits))
        elif traits.mask.right:
            partial = partial | (n_stop > self.window_stop)
        if traits.mask.left:
            partial = partial | (n_start < self.window_start + (traits.queries_per_consumer - 1))
        return partial

    @gluon.jit
    def apply(self, s, n_start, traits: gl.constexpr):
        """S [rows, block_n] with -inf where a row does not see the key."""
        layout: gl.constexpr = s.type.layout
        if self.is_partial(n_start, traits):
            # bits 1 and 2 of a column depend on the thread, the others on the register: compared apart, no register holds a column
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
                s = gl.where((row + (self.window_start - n_start))[:, None] - by_thread <= by_register, s, float("-inf"))
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
        """One past the last key of row 0, which sees the fewest: every row has met a key once the visited blocks begin before it."""
        stop = self.key_stop
        if traits.mask.prefix:
            stop = gl.minimum(stop, self.first_row_stop(traits))
        elif traits.mask.right:
            stop = gl.minimum(stop, self.window_stop)
        return stop
