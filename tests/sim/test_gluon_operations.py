"""The same operations as Gluon kernels, where layouts matter: values against torch, layouts and refusals against the
compiler's own.
"""

import pytest
import torch
import triton
from triton.errors import TritonError
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from strobe.sim import simulate
from tests.sim.places import PLACES, launch, same_bits
from tools.proof.compile import offline

ROWS = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
COLUMNS = gl.constexpr(gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1]))
FLAT = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))
M, N = gl.constexpr(16), gl.constexpr(32)


@gluon.jit
def positions(layout: gl.constexpr):
    rows = gl.arange(0, M, gl.SliceLayout(1, layout))
    columns = gl.arange(0, N, gl.SliceLayout(0, layout))
    return gl.expand_dims(rows, 1) * N + gl.expand_dims(columns, 0)


@gluon.jit
def load(x, layout: gl.constexpr = ROWS):
    return gl.load(x + positions(layout))


@gluon.jit
def write(out, value):
    """Row-major, whatever the layout."""
    flat = value.reshape((value.numel,))
    gl.store(out + gl.arange(0, value.numel, flat.type.layout), flat)


@gluon.jit
def converted(x, out):
    value = gl.convert_layout(load(x), COLUMNS)
    gl.static_assert(value.type.layout == COLUMNS)
    gl.store(out + positions(COLUMNS), value)


@gluon.jit
def summed_rows(x, out):
    total = gl.sum(load(x), 1)
    gl.static_assert(total.type.layout == gl.SliceLayout(1, ROWS))
    gl.store(out + gl.arange(0, M, gl.SliceLayout(1, ROWS)), total)


@gluon.jit
def summed_columns(x, out):
    total = gl.sum(load(x, COLUMNS), 0)
    gl.static_assert(total.type.layout == gl.SliceLayout(0, COLUMNS))
    gl.store(out + gl.arange(0, N, gl.SliceLayout(0, COLUMNS)), total)


@gluon.jit
def everything_summed(x, out):
    gl.store(out, gl.sum(load(x), None))


@gluon.jit
def centred(x, out):
    value = load(x)
    gl.store(out + positions(ROWS), value - gl.max(value, 1)[:, None])


@gluon.jit
def spread(x, out):
    row = gl.load(x + gl.arange(0, N, gl.SliceLayout(0, ROWS)))
    write(out, gl.full((M, N), 0.0, gl.float32, ROWS) + row[None, :])


@gluon.jit
def joined(x, out):
    value = load(x)
    write(out, gl.join(value, 2 * value))


@gluon.jit
def split(x, out):
    even, odd = load(x).reshape((M, N // 2, 2)).split()
    write(out, even - odd)


@gluon.jit
def permuted(x, out):
    write(out, load(x).reshape((4, 4, N)).permute((2, 0, 1)))


@gluon.jit
def transposed(x, out):
    write(out, load(x).trans())


@gluon.jit
def scanned(x, out):
    gl.store(out + positions(ROWS), gl.associative_scan(load(x), 1, plus))


@gluon.jit
def plus(a, b):
    return a + b


@gluon.jit
def folded(x, out):
    gl.store(out + gl.arange(0, M, gl.SliceLayout(1, ROWS)), gl.reduce(load(x), 1, larger))


@gluon.jit
def larger(a, b):
    return gl.maximum(a, b)


@gluon.jit
def mapped(x, out):
    gl.store(out + positions(ROWS), gl.map_elementwise(kept, load(x)))


@gluon.jit
def kept(x):
    return x * 2 if x > 0 else -x


@gluon.jit
def gathered(x, out):
    index = positions(ROWS) * 5 % M
    gl.store(out + positions(ROWS), gl.gather(load(x), index, 0))


@gluon.jit
def counted(x, out):
    value = gl.load(x + gl.arange(0, 256, FLAT)).to(gl.int32) & 15
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    gl.store(out + gl.arange(0, 16, layout), gl.histogram(value, 16, layout=layout).to(gl.float32))


@gluon.jit
def through_shared_memory(x, out):
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    buffer = gl.allocate_shared_memory(gl.float32, [2, M, N], layout)
    buffer.index(1).store(load(x))
    gl.thread_barrier()
    gl.store(out + positions(COLUMNS), buffer.index(1).load(COLUMNS) + 1)


@gluon.jit
def through_a_view(x, out):
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    buffer = gl.allocate_shared_memory(gl.float32, [M, N], layout, load(x))
    gl.thread_barrier()
    write(out, buffer.permute((1, 0)).load(COLUMNS))


def _index(x):
    return torch.gather(x, 0, (torch.arange(512) * 5 % 16).reshape(16, 32))


VALUES = {
    converted: lambda x: x, summed_rows: lambda x: x.sum(1), summed_columns: lambda x: x.sum(0),
    everything_summed: lambda x: x.sum()[None],
    centred: lambda x: x - x.max(1, keepdim=True).values, spread: lambda x: x[:1].expand(16, -1),
    joined: lambda x: torch.stack([x, 2 * x], -1), split: lambda x: x[:, ::2] - x[:, 1::2],
    permuted: lambda x: x.reshape(4, 4, 32).permute(2, 0, 1), transposed: lambda x: x.T, scanned: lambda x: x.cumsum(1),
    folded: lambda x: x.max(1).values, mapped: lambda x: torch.where(x > 0, 2 * x, -x), gathered: _index,
    counted: lambda x: torch.bincount(x.reshape(-1)[:256].int() & 15, minlength=16).float(),
    through_shared_memory: lambda x: x + 1, through_a_view: lambda x: x.T,
}  # fmt: skip


def numbers():
    return torch.randint(-99, 100, (16, 32), generator=torch.Generator().manual_seed(1)).float()  # sums are exact


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kernel", VALUES, ids=lambda kernel: kernel.fn.__name__)
def test_values(kernel, place):
    want = VALUES[kernel](numbers()).contiguous()
    out = torch.full(want.shape, torch.nan)
    launch(place, kernel, numbers(), out, num_warps=4)
    same_bits(out, want, sign_of_zero=False)


# ---------------------------------------------------------------- refusals


@gluon.jit
def two_layouts(x, out):
    gl.store(out + positions(ROWS), load(x, ROWS) + load(x, COLUMNS))


@gluon.jit
def two_layouts_in_one_store(x, out):
    gl.store(out + positions(ROWS), load(x, COLUMNS))


@gluon.jit
def a_slice_of_another_layout(x, out):
    gl.store(
        out + positions(ROWS), load(x) - gl.convert_layout(gl.max(load(x), 1), gl.SliceLayout(1, COLUMNS))[:, None]
    )


@gluon.jit
def expanded_without_a_slice(x, out):
    gl.store(out + gl.arange(0, 256, FLAT)[None, :], 1.0)


@gluon.jit
def a_failing_static_assertion(x, out):
    gl.static_assert(load(x).type.layout == COLUMNS, "another layout")


REFUSED = (
    two_layouts,
    two_layouts_in_one_store,
    a_slice_of_another_layout,
    expanded_without_a_slice,
    a_failing_static_assertion,
)


@pytest.mark.parametrize("kernel", REFUSED, ids=lambda kernel: kernel.fn.__name__)
def test_refused_by_the_compiler_and_here(kernel):
    with offline(90), pytest.raises(TritonError):
        kernel.warmup(torch.zeros(512), torch.zeros(512), grid=(1,), num_warps=4)
    with pytest.raises((TritonError, ValueError, TypeError, AssertionError)), simulate("sm_90"):
        kernel[(1,)](torch.zeros(512), torch.zeros(512), num_warps=4)


@pytest.mark.parametrize("kernel", VALUES, ids=lambda kernel: kernel.fn.__name__)
def test_accepted_by_the_compiler(kernel):
    with offline(90):
        assert isinstance(
            kernel.warmup(torch.zeros(512), torch.zeros(1024), grid=(1,), num_warps=4), triton.compiler.CompiledKernel
        )
