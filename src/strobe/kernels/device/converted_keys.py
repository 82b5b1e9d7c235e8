"""8-bit keys and values of a cache, as the producer of a forward loads them: from memory into a staging buffer
(`device.staged_keys`) or, if tiles leave no room for one, into registers; then, in q's dtype, into the tile that
products read.

The producer has four warps, whose threads load vectors of 16 bytes. Each thread computes the addresses of its own rows
from their page ids. So pages may have any number of keys, and memory outside a sequence is not read. Rows that no query
of the sequence sees are zero, and so are rows of pages that are not in the pool.

e4m3 numbers are exact in float16 and in bfloat16. A thread's 16 numbers become 32 bytes, which it stores as two vectors
of 16. Eight lanes that store together have two rows of four vectors each: the swizzle puts them in different banks.

The scale of a key head multiplies the softmax scale, and its sign is folded into the keys.
"""

from .cached_keys import CachedKeys
from .dialect import Value, cp_async_load, gl, gluon, record, reinterpret
from .tma import ColumnParts

WORD: gl.constexpr = gl.constexpr(4)  # bytes
VECTOR: gl.constexpr = gl.constexpr(4)  # words of a load
SIGNS: gl.constexpr = gl.constexpr(-0x7F7F7F80)  # the sign bits of a word's four numbers: 0x80808080
LEAST_SCALE: gl.constexpr = gl.constexpr(2.0**-100)  # in place of a scale of 0, so that hidden scores stay -inf


@gluon.constexpr_function
def words_layout(traits):
    """Rows of words in registers: of each 16 words four lanes have four each."""
    return gl.BlockedLayout([1, 4], [8, 4], [traits.producer_warps, 1], [1, 0])


@record
class ConvertedKeys:
    """The keys, or the values, of one head of one sequence."""

    keys: CachedKeys
    pool: gl.tensor  # pointer to words of the head
    strides: gl.tuple  # PoolStrides
    signs: Value  # what the words are xored with, or None
    main: gl.constexpr  # columns of the tile's parts
    tail: gl.constexpr
    width: gl.constexpr  # columns in memory

    @gluon.jit
    def of_k(keys, tensors, traits: gl.constexpr):
        """tensors: CacheTensors."""
        signs = None
        if traits.has_k_scale:
            signs = gl.where(gl.load(tensors.k_scale + keys.head) < 0, SIGNS, 0)
        strides = keys.params.k_strides
        pool = head_words(tensors.k, keys.head, strides)
        return ConvertedKeys(keys, pool, strides, signs, traits.main_d, traits.tail_d, traits.cache.head_dim)

    @gluon.jit
    def of_v(keys, tensors, traits: gl.constexpr):
        strides = keys.params.v_strides
        pool = head_words(tensors.v, keys.head, strides)
        return ConvertedKeys(keys, pool, strides, None, traits.main_dv, traits.tail_dv, traits.cache.head_dim_v)

    @gluon.jit
    def load(self, pages, n_start, traits: gl.constexpr):
        """ColumnParts of the words [block_n, columns / 4] of the tile that begins at key n_start. pages: `row_pages` of
        it.
        """
        offset, exists = self.row_offsets(pages, n_start, traits)
        main = self.load_part(offset, exists, 0, self.main, traits)
        if self.tail == 0:
            return ColumnParts(main, None)
        else:
            return ColumnParts(main, self.load_part(offset, exists, self.main, self.tail, traits))

    @gluon.jit
    def copy(self, buffer, pages, n_start, traits: gl.constexpr):
        """Start copying what `load` returns into a staging buffer of ColumnParts, by cp.async."""
        offset, exists = self.row_offsets(pages, n_start, traits)
        cp_async_load(buffer.main, *self.places(offset, exists, 0, self.main, traits))
        if buffer.tail is not None:
            cp_async_load(buffer.tail, *self.places(offset, exists, self.main, self.tail, traits))

    @gluon.jit
    def row_offsets(self, pages, n_start, traits: gl.constexpr):
        """(where the rows begin in the pool, in words; which of them are loaded)."""
        keys, strides = self.keys, self.strides
        n = n_start + tile_rows(traits)
        exists = is_seen(keys, n, traits)
        row = n.to(gl.uint32)
        if traits.has_pages:
            in_pool = pages.to(gl.uint32) < keys.params.num_pages.to(gl.uint32)
            exists = exists & in_pool
            pages, row = gl.where(in_pool, pages, 0), row % traits.page_size
        else:
            row += keys.k_start.to(gl.uint32)
        return wide_product(pages, strides.page) + wide_product(row, strides.row), exists

    @gluon.jit
    def load_part(self, offset, exists, column: gl.constexpr, columns: gl.constexpr, traits: gl.constexpr):
        pointers, mask = self.places(offset, exists, column, columns, traits)
        return gl.load(pointers, mask=mask, other=0)

    @gluon.jit
    def places(self, offset, exists, column: gl.constexpr, columns: gl.constexpr, traits: gl.constexpr):
        """(pointers to words of the rows, which of them are loaded)."""
        layout: gl.constexpr = words_layout(traits)
        word = column // WORD + gl.arange(0, columns // WORD, gl.SliceLayout(0, layout))
        mask = exists[:, None] & (word < self.width // WORD)[None, :]
        # addresses and strides are multiples of 16 bytes, which the compiler cannot derive
        pointers = self.pool + offset[:, None] + word[None, :]
        pointers = gl.multiple_of(gl.max_contiguous(pointers, [1, VECTOR]), [1, VECTOR * WORD])
        return pointers, gl.max_constancy(mask, [1, VECTOR])

    @gluon.jit
    def store(self, tile, words):
        """Convert words of a block into a tile of ColumnParts."""
        self.store_part(tile.main, words.main)
        if tile.tail is not None:
            self.store_part(tile.tail, words.tail)

    @gluon.jit
    def store_part(self, tile, words):
        if self.signs is not None:
            words = words ^ self.signs
        shape: gl.constexpr = [words.shape[0], 2 * words.shape[1]]
        layout: gl.constexpr = gl.NVMMASharedLayout(tile.layout.swizzle_byte_width, 32, 2)
        reinterpret(tile, gl.int32, shape, layout).store(gl.reshape(converted(words, tile.dtype), shape))


@gluon.jit
def head_words(pool, head, strides):
    """The pool as words, from a head's first on."""
    return pool.to(gl.pointer_type(gl.int32), bitcast=True) + head.to(gl.int64) * strides.head


@gluon.jit
def tile_rows(traits: gl.constexpr):
    return gl.arange(0, traits.block_n, gl.SliceLayout(1, words_layout(traits)))


@gluon.jit
def is_seen(keys, n, traits: gl.constexpr):
    """Which of the keys n some query of the sequence sees. Negative n are none; rows of no sequence have none."""
    seen = n.to(gl.uint32) < gl.maximum(keys.stop, 0).to(gl.uint32)
    if traits.mask.left:
        seen = seen & (n >= keys.first)
    return seen


@gluon.jit
def wide_product(a, b):
    """a * b in 64 bits, of numbers that are not negative. The compiler makes one instruction of it."""
    return a.to(gl.uint32).to(gl.uint64) * b.to(gl.uint32).to(gl.uint64)


@gluon.jit
def row_pages(keys, n_start, traits: gl.constexpr):
    """Page ids of the rows of the tile that begins at key n_start, a scalar if they have one page; 0 for rows that no
    query sees. n_start may lie outside the sequence. In a dense cache: the sequence.
    """
    if not traits.has_pages:
        return keys.sequence
    elif traits.page_size % traits.block_n == 0:
        is_read = (n_start >= 0) & (n_start < keys.stop) & (n_start + traits.block_n > keys.first)
        return gl.load(keys.page_ids + n_start // traits.page_size, mask=is_read, other=0)
    else:
        n = n_start + tile_rows(traits)
        page = (n.to(gl.uint32) // traits.page_size).to(gl.int32)
        return gl.load(keys.page_ids + page, mask=is_seen(keys, n, traits), other=0)


@gluon.jit
def converted(words, dtype: gl.constexpr):
    """Words of four e4m3 numbers each [rows, words] as words of two numbers of dtype [rows, words, 2]."""
    text: gl.constexpr = _conversion(dtype)
    low, high = gl.inline_asm_elementwise(text, "=&r,=&r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)
    return gl.join(low, high)


@gluon.constexpr_function
def _conversion(dtype):
    """PTX of `converted`. No instruction converts e4m3 to bfloat16, so these numbers pass through float32."""
    if dtype == gl.float16:
        halves = "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high;"
        return "{ .reg .b16 low, high; mov.b32 {low, high}, $2; " + halves + " }"
    half = (
        "cvt.rn.f16x2.e4m3x2 pair, NAME; mov.b32 {a, b}, pair; cvt.f32.f16 x, a; cvt.f32.f16 y, b; "
        "cvt.rn.bf16x2.f32 $OUT, y, x; "
    )
    halves = half.replace("NAME", "low").replace("OUT", "0") + half.replace("NAME", "high").replace("OUT", "1")
    registers = ".reg .b16 low, high; .reg .f16 a, b; .reg .b32 pair; .reg .f32 x, y; "
    return "{ " + registers + "mov.b32 {low, high}, $2; " + halves + "}"
