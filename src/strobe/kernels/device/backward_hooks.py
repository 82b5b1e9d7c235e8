"""Functions of a call that the Hopper backward runs on scores, as constants of the kernel.

    score_mod(score, b, h, q_idx, kv_idx, aux) -> score
    mask_mod(b, h, q_idx, kv_idx, aux) -> bool
    score_mod_bwd(dscore, score, b, h, q_idx, kv_idx, aux) -> gradient of the score before score_mod

`device.forward_hooks` says what they mean. Scores are transposed here, [keys, queries], so q_idx is [1, queries] and
kv_idx [keys, 1]. h and b are scalars. score is the score before score_mod, in natural units, and dscore the gradient of
the score after it: 0 where the query does not see the key.

The backward computes each score once, so score_mod_bwd meets each element of a visited tile once. It may add to
gradients of what it reads, by atomics. With documents, a tile of queries is visited once for each document in it; rows
of other documents then arrive with dscore 0.
"""

from .dialect import Value, gl, gluon, record


@record
class ScoreMods:
    """Where a tile of scores lies, and what the call's functions read."""

    entry: gl.tensor  # batch entry, or packed sequence
    head: gl.tensor  # query head
    q_start: gl.tensor  # position of the tile's first query
    k_start: gl.tensor  # position of its first key
    is_full: Value  # whether a list of blocks says that every query sees every key; None without lists of full blocks
    hooks: gl.tuple  # HookParams

    @gluon.jit
    def of_tile(self, head, m_block, traits: gl.constexpr):
        """The same keys, and the queries of an m_block of the work tile's head number `head`."""
        q_start = self.q_start + m_block * traits.block_m
        return ScoreMods(self.entry, self.head + head, q_start, self.k_start, self.is_full, self.hooks)

    @gluon.jit
    def of_listed_block(self, is_full):
        return ScoreMods(self.entry, self.head, self.q_start, self.k_start, is_full, self.hooks)

    @gluon.jit
    def shifted(self, row: gl.constexpr, key: gl.constexpr):
        """The tile that begins so many queries and keys further on."""
        return ScoreMods(self.entry, self.head, self.q_start + row, self.k_start + key, self.is_full, self.hooks)

    @gluon.jit
    def modify(self, score, traits: gl.constexpr):
        """score_mod of scores in natural units."""
        q_idx, kv_idx = self.q_idx(score), self.kv_idx(score, traits)
        modified = traits.score_mod(score, self.entry, self.head, q_idx, kv_idx, self.hooks.score_aux)
        return gl.broadcast(modified.to(gl.float32), score)[0]

    @gluon.jit
    def mask(self, x, traits: gl.constexpr):
        """x with -inf where mask_mod is False, which does not run on a full block of a list."""
        if self.is_full is None:
            x = self.apply_mask_mod(x, traits)
        else:
            if not self.is_full:
                x = self.apply_mask_mod(x, traits)
        return x

    @gluon.jit
    def apply_mask_mod(self, x, traits: gl.constexpr):
        seen = traits.mask_mod(self.entry, self.head, self.q_idx(x), self.kv_idx(x, traits), self.hooks.mask_aux)
        return gl.where(seen, x, float("-inf"))

    @gluon.jit
    def gradient(self, ds, score, traits: gl.constexpr):
        """score_mod_bwd. A gradient of 0 stays 0, whatever the function makes of the score of a hidden key."""
        q_idx, kv_idx = self.q_idx(ds), self.kv_idx(ds, traits)
        if self.hooks.gradient_aux is None:
            before = traits.score_mod_bwd(ds, score, self.entry, self.head, q_idx, kv_idx, self.hooks.score_aux)
        else:
            before = traits.score_mod_bwd(ds, score, self.entry, self.head, q_idx, kv_idx, self.hooks.gradient_aux)
        return gl.where(ds == 0, 0.0, gl.broadcast(before.to(gl.float32), ds)[0])

    @gluon.jit
    def q_idx(self, s):
        return (multiple(self.q_start, s.shape[1]) + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout)))[
            None, :
        ]

    @gluon.jit
    def kv_idx(self, s, traits: gl.constexpr):
        k_start = self.k_start
        if not traits.mask.documents:  # whose tiles begin with a document
            k_start = multiple(k_start, s.shape[0])
        return (k_start + gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout)))[:, None]


@gluon.jit
def multiple(position, count: gl.constexpr):
    """A position that is a multiple of count, as LLVM does not know by itself: positions of a tile that begins there
    differ in their last bits alone, so `q_idx // 64` is computed once.
    """
    return position & -count
