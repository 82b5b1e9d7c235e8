"""Functions of a call that a forward runs on scores, as constants of the kernel: score_mod and mask_mod.

    score_mod(score, b, h, q_idx, kv_idx, aux) -> score      score [rows, keys] float32 in natural units: scale * q k^T
    mask_mod(b, h, q_idx, kv_idx, aux) -> bool               True: the query sees the key

Each is a `triton.jit` or `gluon.jit` function in `ForwardTraits`, or None. Without them the kernel's machine code is
that of a kernel without hooks.

Order: scale, softcap, score_mod, masks (`AttentionMask` and mask_mod), softmax. A score_mod sees the capped score, cap
* tanh(scale / cap * q k^T), and its result is not capped again. A score of -inf hides the key, as masks do. A row that
sees no key has O = 0 and LSE = -inf, or its sink.

b is the batch entry, or the index of a packed sequence: an int32 scalar. h is the query head: a scalar, or [rows, 1]
where a tile packs the query heads of a key head. q_idx [rows, 1] and kv_idx [1, keys] are positions within the
sequence, or within the batch entry where it holds documents. With a cache, q_idx is the position of a token among the
keys of its sequence, whose last token has the last position; 0 for a token before the first key. Both may exceed the
last position in a tile that sticks out, so loads by them are clamped or masked. aux is what the launch passed as
score_aux or mask_aux: a tuple of pointers and numbers, or None.

Optimistic softmax holds for any score_mod. Rows whose later scores outgrow their first by too much, or whose first
scores are all -inf, are found at the end of the tile. The tile is redone with the same functions and with row maxima in
every step (`tile_redo`).
"""

from .cached_keys import hide_lost_boxes
from .dialect import Value, gl, gluon, record
from .pack_gqa import queries_of
from .softmax import tanh


@gluon.jit
def modify_scores(s, block, mods, softmax, traits: gl.constexpr):
    """The hook for scores after Q K^T and before the mask. No mask_mod runs on a full block of a list."""
    if traits.softcap:
        s = tanh(s * softmax.softcap)
    if traits.score_mod is not None:
        s = mods.modify(s * softmax.score_scale, block.n_start, traits)
    if traits.mask_mod is not None:
        if block.is_full is None:
            s = mods.mask(s, block.n_start, traits)
        else:
            if not block.is_full:
                s = mods.mask(s, block.n_start, traits)
    if traits.has_pages:
        s = hide_lost_boxes(s, block.lost, traits)
    return s


@record
class ScoreMods:
    """Where a consumer's rows and keys lie, and what the call's functions read."""

    entry: gl.tensor  # batch entry, or packed sequence
    head: gl.tensor  # of the tile
    q_start: gl.tensor  # position of row 0
    k_start: Value  # position of key 0 of the mask's keys
    hooks: gl.tuple  # HookParams

    @gluon.jit
    def modify(self, scores, n_start, traits: gl.constexpr):
        """score_mod of scores in natural units."""
        h, q_idx, kv_idx = self.head_of_rows(scores, traits), self.q_idx(scores, traits), self.kv_idx(n_start, scores)
        modified = traits.score_mod(scores, self.entry, h, q_idx, kv_idx, self.hooks.score_aux)
        return gl.broadcast(modified.to(gl.float32), scores)[0]

    @gluon.jit
    def mask(self, s, n_start, traits: gl.constexpr):
        """Scores with -inf where mask_mod is False."""
        h, q_idx, kv_idx = self.head_of_rows(s, traits), self.q_idx(s, traits), self.kv_idx(n_start, s)
        return gl.where(traits.mask_mod(self.entry, h, q_idx, kv_idx, self.hooks.mask_aux), s, float("-inf"))

    @gluon.jit
    def q_idx(self, s, traits: gl.constexpr):
        row = gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))
        q_idx = self.q_start + queries_of(row, traits)
        if traits.cached:
            q_idx = gl.maximum(q_idx, 0)
        return q_idx[:, None]

    @gluon.jit
    def kv_idx(self, n_start, s):
        return (self.k_start + n_start + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout)))[None, :]

    @gluon.jit
    def head_of_rows(self, s, traits: gl.constexpr):
        """Query heads. A row of a tile that packs fewer heads than it has rows for a query has the last head."""
        if traits.pack_gqa > 1:
            member = gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout)) % traits.rows_per_query
            return (self.head * traits.pack_gqa + gl.minimum(member, traits.pack_gqa - 1))[:, None]
        else:
            return self.head
