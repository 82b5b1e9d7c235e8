"""Layouts of the Hopper decode's tiles: in registers for copies, products and stores, and in shared memory."""

from ..device.dialect import gl, gluon


@gluon.constexpr_function
def copy_layout(width, itemsize, warps):
    """Rows of `width` elements, 16 bytes a thread: what one cp.async copies."""
    lanes = min(32, width * itemsize // 16)
    return gl.BlockedLayout([1, 16 // itemsize], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def row_layout(width, warps):
    """Rows of `width` numbers of 32 bits, four a thread."""
    lanes = min(32, width // 4)
    return gl.BlockedLayout([1, 4], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def combine_layout(splits, width, warps):
    """Partial results [splits, rows, width]: a thread has its columns of all splits."""
    lanes = min(32, width // 4)
    return gl.BlockedLayout([splits, 1, 4], [1, 32 // lanes, lanes], [1, warps, 1], [2, 1, 0])


@gluon.constexpr_function
def product_layout(columns, warps):
    """A product with `columns` columns. Four warps share its rows; with eight warps, two groups share its columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, columns * 4 // warps, 16])


@gluon.constexpr_function
def tall_layout(columns):
    """S or O of `decode_tall`, [64, columns]: a warp has 16 rows."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def query_layout(traits):
    """Queries, as they lie along the scores of a mainloop."""
    if traits.queries_as_rows:
        return gl.SliceLayout(1, tall_layout(traits.block_n))
    return gl.SliceLayout(0, product_layout(traits.block_m, traits.warps))


@gluon.constexpr_function
def key_layout(traits):
    """Keys, as page ids are read for the scores: where they lie along the scores or, with queries as rows, two keys a
    lane and all keys in each warp.
    """
    if traits.queries_as_rows:
        return gl.DistributedLinearLayout([[32]], [[1], [2], [4], [8], [16]], [[0], [0]], [], [64])
    return gl.SliceLayout(1, product_layout(traits.block_m, traits.warps))


@gluon.constexpr_function
def stage_layout(rows, width, dtype, traits):
    """A tile of K or V in shared memory, as wgmma reads it. Threads read 8-bit tiles, 16 bytes at a time; there eight
    rows lie in different banks.
    """
    if traits.fp8:
        return gl.SwizzledSharedLayout(16, 1, min(8, width // 16), [1, 0])
    return gl.NVMMASharedLayout.get_default_for([rows, width], dtype)


@gluon.jit
def allocate_stages(count: gl.constexpr, width: gl.constexpr, dtype: gl.constexpr, traits: gl.constexpr):
    """`count` tiles of K or V in shared memory."""
    layout: gl.constexpr = stage_layout(traits.block_n, width, dtype, traits)
    return gl.allocate_shared_memory(dtype, [count, traits.block_n, width], layout)


@gluon.jit
def allocate_operand(rows: gl.constexpr, width: gl.constexpr, dtype: gl.constexpr):
    """An operand of wgmma in shared memory."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, width], dtype)
    return gl.allocate_shared_memory(dtype, [rows, width], layout)
