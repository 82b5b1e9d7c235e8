"""A product's tile as its threads hold it: four lanes of a warp share a row, and a thread has elements of two rows, eight rows apart.

What a lane knows of a row, its own sum or what all four agree on, is a tile [M, 4] in the layout `lanes_of`: a register a row. Nothing here moves
between threads; each conversion says so.
"""

from .dialect import gl, gluon


@gluon.constexpr_function
def lanes_of(rows):
    """The layout of [rows, 4], of 16 rows a warp."""
    warps = [[16 << i, 0] for i in range((rows // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], warps, [], [rows, 4])


@gluon.jit
def _by_lanes(tile):
    """[M, N / 8, 4, 2]: of each eight columns a lane has two."""
    return gl.reshape(tile, [tile.shape[0], tile.shape[1] // 8, 4, 2])


@gluon.jit
def in_lanes(numbers):
    """A row's number [M], of a reduction, in each of its lanes: [M, 1]."""
    return gl.convert_layout(numbers, gl.SliceLayout(1, lanes_of(numbers.shape[0])), assert_trivial=True)[:, None]


@gluon.jit
def sum_in_lanes(tile):
    """[M, 4]: each lane's own sum of a row."""
    return gl.convert_layout(gl.sum(gl.sum(_by_lanes(tile), 3), 1), lanes_of(tile.shape[0]), assert_trivial=True)


@gluon.jit
def over_lanes(numbers, tile):
    """A lane's numbers [M, 4] for each of its elements of a tile [M, N]."""
    layout: gl.constexpr = _by_lanes(tile).type.layout
    spread = gl.convert_layout(numbers, gl.SliceLayout(1, gl.SliceLayout(3, layout)), assert_trivial=True)
    spread = gl.expand_dims(gl.expand_dims(spread, 1), 3)
    return gl.convert_layout(gl.reshape(gl.broadcast(spread, _by_lanes(tile))[0], tile.shape), tile.type.layout, assert_trivial=True)


@gluon.jit
def by_threads(tile):
    """[2 M, N / 2]: each thread's elements of a tile [M, N] in the order of its registers: two of a row, two of the other, and so on. 32 rows of it
    are the lanes of a warp, in their order."""
    rows: gl.constexpr = tile.shape[0]
    columns: gl.constexpr = tile.shape[1]
    parts = gl.reshape(tile, [rows // 16, 2, 8, columns // 8, 4, 2])
    return gl.reshape(gl.permute(parts, (0, 2, 4, 3, 1, 5)), [2 * rows, columns // 2])


@gluon.jit
def from_threads(elements, tile):
    """What `by_threads` took apart, in the shape and layout of `tile`."""
    rows: gl.constexpr = tile.shape[0]
    columns: gl.constexpr = tile.shape[1]
    parts = gl.permute(gl.reshape(elements, [rows // 16, 8, 4, columns // 8, 2, 2]), (0, 4, 1, 3, 2, 5))
    return gl.convert_layout(gl.reshape(parts, [rows, columns]), tile.type.layout, assert_trivial=True)


@gluon.jit
def first_of_rows(elements):
    """[M, 4]: of each thread's elements the first of either row."""
    threads: gl.constexpr = elements.shape[0]
    count: gl.constexpr = elements.shape[1] // 4
    first, second = gl.split(gl.reshape(elements, [threads, count, 2, 2]))
    first = gl.permute(first, (0, 2, 1))
    for _ in gl.static_range(_log2(count)):
        first, second = gl.split(gl.reshape(first, [threads, 2, first.shape[2] // 2, 2]))
    both = gl.permute(gl.reshape(first, [threads // 32, 8, 4, 2]), (0, 3, 1, 2))
    return gl.convert_layout(gl.reshape(both, [threads // 2, 4]), lanes_of(threads // 2), assert_trivial=True)


@gluon.constexpr_function
def _log2(number):
    return number.bit_length() - 1
