"""Small kernels for the tests of scenes, mutants and the command line: y = 2 x by TMA, and y = x + 1 in Triton."""

import triton
import triton.language as tl

from strobe.kernels.device.dialect import (
    TensorDescriptor,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store,
    tma_store_wait,
)


@gluon.jit
def hurry(ready):
    """Nobody calls this."""
    mbarrier.arrive(ready)


@gluon.jit
def double_kernel(x_desc, y_desc, careful: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_type.shape, x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.expect(ready, x_desc.block_type.nbytes)
    tma_load(x_desc, [0, 0], ready, tile)
    mbarrier.wait(ready, 0)
    tile.store(tile.load(layout) * 2)
    fence_async_shared()
    if careful:
        fence_async_shared()
    tma_store(y_desc, [0, 0], tile)
    tma_store_wait(0)


def _launch(x, y, careful):
    block = list(x.shape)
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float32)
    double_kernel[(1,)](*(TensorDescriptor.from_tensor(tensor, block, layout) for tensor in (x, y)), careful)


def double(x, y):
    _launch(x, y, False)


def double_carefully(x, y):
    _launch(x, y, True)


@triton.jit
def add_one_kernel(x, y, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, at < size) + 1, at < size)
