"""A product's tile as its threads hold it: four lanes of a warp share a row, and a thread has elements of two rows,
eight rows apart.

What a lane knows of a row, such as its own sum, is a tile [M, 4] in the layout `lanes_of`: a register for each row.
Nothing here moves data between threads; each conversion asserts that.
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
    low, high = gl.split(_by_lanes(tile))
    return gl.convert_layout(gl.sum(low + high, 1), lanes_of(tile.shape[0]), assert_trivial=True)


@gluon.jit
def over_lanes(numbers, tile):
    """A lane's numbers [M, 4] for each of its elements of a tile [M, N]."""
    layout: gl.constexpr = _by_lanes(tile).type.layout
    spread = gl.convert_layout(numbers, gl.SliceLayout(1, gl.SliceLayout(3, layout)), assert_trivial=True)
    spread = gl.expand_dims(gl.expand_dims(spread, 1), 3)
    return gl.convert_layout(
        gl.reshape(gl.broadcast(spread, _by_lanes(tile))[0], tile.shape), tile.type.layout, assert_trivial=True
    )


@gluon.jit
def by_four(numbers, tile):
    """Four numbers of a row, each [M, 4] in lanes, spread over a tile [M, N]: in each 32 columns, a lane's elements get
    the first number twice, then the second twice, and so on.
    """
    a, b, c, d = numbers
    four = gl.join(gl.join(a, c), gl.join(b, d))
    four = gl.permute(gl.reshape(four, [tile.shape[0], 4, 4]), (0, 2, 1))
    parts = _by_four(tile)
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(4, parts.type.layout))
    spread = gl.expand_dims(gl.expand_dims(gl.convert_layout(four, layout, assert_trivial=True), 1), 4)
    return gl.convert_layout(
        gl.reshape(gl.broadcast(spread, parts)[0], tile.shape), tile.type.layout, assert_trivial=True
    )


@gluon.jit
def from_four(tile):
    """What `by_four` spread, where all that it repeats is still alike."""
    rows: gl.constexpr = tile.shape[0]
    four = gl.permute(gl.reduce(gl.split(_by_four(tile))[0], 1, _either), (0, 2, 1))
    ac, bd = gl.split(gl.reshape(four, [rows, 4, 2, 2]))
    a, c = gl.split(ac)
    b, d = gl.split(bd)
    return [gl.convert_layout(numbers, lanes_of(rows), assert_trivial=True) for numbers in (a, b, c, d)]


@gluon.jit
def _by_four(tile):
    """[M, N / 32, 4, 4, 2]: of each eight columns a lane has two, and each four eights are told apart."""
    return gl.reshape(tile, [tile.shape[0], tile.shape[1] // 32, 4, 4, 2])


@gluon.jit
def _either(a, b):
    return a
