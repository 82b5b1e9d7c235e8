"""Functions of a call that the Hopper decode runs on scores, as constants of the kernel.

    score_mod(score, b, h, q_idx, kv_idx, aux) -> score
    mask_mod(b, h, q_idx, kv_idx, aux) -> bool

`device.forward_hooks` says what they mean. Scores are [keys, rows] here, and [rows, keys] in `decode_tall`. The rows of
a tile are tokens, each with the query heads of a key head. So h and q_idx are [1, rows] or [rows, 1], and kv_idx is
[keys, 1] or [1, keys]. b is the sequence, a scalar. q_idx is the position of a token among the keys of its sequence,
whose last token has the last position; 0 for a token before the first key. Rows that are no query, and keys after the
last one, have positions, too: loads by them are clamped.

mask_mod reads no score, so it runs while the product of Q and K does. score_mod runs after the softcap.
"""

from ..device.backward_hooks import multiple
from ..device.dialect import Value, gl, gluon, record
from ..device.softmax import LN_2
from .decode_layouts import query_layout


@record
class ScoreMods:
    """Where the rows of a tile lie, and what the call's functions read."""

    entry: gl.tensor  # sequence
    first_head: gl.tensor  # query head of the key head's first row
    first_row: gl.tensor  # of the tile, counted from the key head's first
    q_start: gl.tensor  # position of token 0
    score_scale: Value  # the score in natural units that a raw score of 1 stands for
    hooks: gl.tuple  # HookParams

    @gluon.jit
    def of_tile(tile, entry, num_keys, scale_log2, hooks, traits: gl.constexpr):
        """ScoreMods of the TileRows of sequence `entry`."""
        first_row, q_start = tile.block * traits.block_m, num_keys - tile.tokens
        return ScoreMods(entry, tile.head * traits.group, first_row, q_start, scale_log2 * LN_2, hooks)

    @gluon.jit
    def shown(self, n_start, rows, traits: gl.constexpr):
        """mask_mod of keys n_start + rows: bool that broadcasts to the scores."""
        row, kv_idx = self.row(traits), self.kv_idx(n_start, rows, traits)
        h, q_idx = self.head(row, traits), self.q_idx(row, traits)
        return traits.mask_mod(self.entry, h, q_idx, kv_idx, self.hooks.mask_aux)

    @gluon.jit
    def modify(self, s, n_start, rows, traits: gl.constexpr):
        """score_mod of raw scores, in natural units."""
        row, kv_idx = self.row(traits), self.kv_idx(n_start, rows, traits)
        h, q_idx = self.head(row, traits), self.q_idx(row, traits)
        modified = traits.score_mod(s * self.score_scale, self.entry, h, q_idx, kv_idx, self.hooks.score_aux)
        return gl.broadcast(modified.to(gl.float32), s)[0]

    @gluon.jit
    def row(self, traits: gl.constexpr):
        """Rows of the tile, as they broadcast to the scores."""
        row = self.first_row + gl.arange(0, traits.block_m, query_layout(traits))
        return row[:, None] if traits.queries_as_rows else row[None, :]

    @gluon.jit
    def head(self, row, traits: gl.constexpr):
        return self.first_head + row % traits.group

    @gluon.jit
    def q_idx(self, row, traits: gl.constexpr):
        return gl.maximum(self.q_start + row // traits.group, 0)

    @gluon.jit
    def kv_idx(self, n_start, rows, traits: gl.constexpr):
        key = multiple(n_start, traits.block_n) + rows
        return key[None, :] if traits.queries_as_rows else key[:, None]


@gluon.jit
def modify_scores(s, n_start, rows, shown, mods, traits: gl.constexpr):
    """The hook for raw scores before the mask: with a score_mod they are in natural units from here on.

    shown: what ScoreMods.shown returned for these keys; not read without a mask_mod.
    """
    if traits.score_mod is not None:
        s = mods.modify(s, n_start, rows, traits)
    if traits.mask_mod is not None:
        s = gl.where(shown, s, float("-inf"))
    return s
