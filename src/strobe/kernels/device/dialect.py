"""The one door to triton.experimental: Gluon's words as the kernels say them, alike from Triton 3.6.0 to 3.9.0.

What changed on the way, read in the wheels: 3.7 renamed thread_barrier to barrier; 3.8 renamed the loads and stores of
TMA and cp.async (3.9 refuses the old names), made `aggregate` public, gave TMA its reduce-add and a wait for written
results, and made the register layout of tensor memory a method of its type; 3.9 made `reinterpret` public.
"""

from typing import Any

import triton.language.core as core
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language._semantic import GluonCallerContext
from triton.experimental.gluon.language.nvidia import blackwell, hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    tcgen05_commit,
    tcgen05_mma,
)
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = [
    "TensorDescriptor",
    "TensorMemoryLayout",
    "Value",
    "aggregate",
    "await_launch_before",
    "allocate_tensor_memory",
    "cp_async_commit",
    "cp_async_load",
    "cp_async_wait",
    "fence_async_global",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "mma_v2",
    "named_barrier",
    "next_launch_may_start",
    "pair_barriers",
    "pair_tile_layout",
    "partition_barrier",
    "record",
    "reinterpret",
    "scale_rows",
    "stay_before",
    "store_cluster",
    "tcgen05_commit",
    "tcgen05_mma",
    "tma_load",
    "tma_reduce_add",
    "tma_store",
    "tma_store_drain",
    "tma_store_wait",
    "tmem_reg_layout",
    "warp_specialize",
    "warpgroup_mma",
    "warpgroup_mma_wait",
    "zero_of_turn",
]


def _first(place: Any, *names: str) -> Any:
    """What `place` has under the first of `names` that it knows, newest name first."""
    for name in names:
        if hasattr(place, name):
            return getattr(place, name)
    raise ImportError(
        f"{place.__name__} has none of {', '.join(names)}; expected Triton 3.6.0 to 3.9.0: install one of those"
    )


aggregate = _first(core, "_aggregate")  # 3.8 calls it triton.aggregate too
partition_barrier = _first(gl, "barrier", "thread_barrier")  # all warps of the partition that calls it

tma_load = _first(tma, "async_load", "async_copy_global_to_shared")
tma_store = _first(tma, "async_store", "async_copy_shared_to_global")
tma_store_wait = tma.store_wait  # until at most n stores still read their shared memory

cp_async_load = _first(async_copy, "async_load", "async_copy_global_to_shared")
cp_async_commit = async_copy.commit_group
cp_async_wait = async_copy.wait_group
arrive_each = (
    async_copy.mbarrier_arrive
)  # every thread, once what it copied by cp.async is there: at once where it copied nothing


Value = gl.base_value  # the type of a record's field that may hold anything, constants and None included


def record(cls: type) -> Any:
    """An aggregate whose constructor takes the fields in order. Constants stay constants.

    Triton requires a `constexpr_function` as an aggregate's constructor. That unwraps constants, so a NamedTuple among
    the arguments loses the names of its fields, and one that holds None fails. A constructor that is marked as a
    builtin is called with its arguments as they are.
    """
    names = tuple(cls.__annotations__)

    def __init__(self: Any, *values: Any) -> None:
        for name, value in zip(names, values, strict=True):
            setattr(self, name, _held(value))

    __init__.__triton_builtin__ = True  # type: ignore[attr-defined]
    cls.__init__ = __init__  # type: ignore[misc]
    return aggregate(cls)


def _held(value: Any) -> Any:
    """A field's value. Triton rebuilds a field from its type, and the type of a kernel's tuple argument says None where
    an int of 1 became a constant. So tuples get a type from the values they hold.
    """
    if isinstance(value, gl.tuple):
        parts = [_held(part) for part in value.values]
        return gl.tuple(parts, gl.tuple_type([part.type for part in parts], value.type.fields))
    return value if isinstance(value, Value) else gl.constexpr(value)


# of the builtins written here, Triton's disk cache does not see the bodies: after a change to one, empty that cache
@builtin
def reinterpret(memory, dtype, shape, layout, _semantic=None):
    """The bytes of a piece of shared or tensor memory as another type, shape and layout."""
    method = memory.reinterpret if hasattr(memory, "reinterpret") else memory._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


@builtin
def warp_specialize(partitions, warps, registers, _semantic=None, _generator=None):
    """Run [(function, arguments)] side by side, the first on the program's warps. What the first calls is compiled as
    of any of as many warps: it is read once for all of them.
    """
    context = _generator.caller_context
    _generator.caller_context = GluonCallerContext(num_warps=_semantic.builder.options.num_warps)
    try:
        return gl.warp_specialize(partitions, warps, registers, _semantic=_semantic, _generator=_generator)
    finally:
        _generator.caller_context = context


if hasattr(blackwell, "get_tmem_reg_layout"):
    tmem_reg_layout = blackwell.get_tmem_reg_layout
else:

    @gluon.constexpr_function
    def tmem_reg_layout(element_ty, shape, layout, num_warps):
        """How `num_warps` warps hold a tile of tensor memory in registers: a row a thread, where rows suffice."""
        return blackwell.tensor_memory_descriptor_type(element_ty, list(shape), layout, list(shape)).get_reg_layout(
            num_warps
        )


if hasattr(tma, "async_atomic_add"):
    tma_reduce_add = tma.async_atomic_add

    @gluon.jit
    def tma_store_drain():
        """Wait until every TMA store and reduce of this partition has been read and written: a later release publishes
        it.
        """
        tma.store_wait(0, read_only=False)

else:

    @builtin
    def tma_reduce_add(desc, coord, src, _semantic=None):
        """Add the tile in shared memory to global memory, element by element, in no order between callers."""
        indices = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(core.ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, indices, src.handle)

    @gluon.jit
    def tma_store_drain():
        """Wait until every TMA store and reduce of this partition has been read and written: a later release publishes
        it.
        """
        gl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


# ---------------------------------------------------------------- pairs of CTAs, since Triton 3.9
# A kernel with num_ctas=2 is written once for both CTAs: a layout's `cga_layout` says which part of a tensor each has.

store_cluster = getattr(hopper, "async_store", None)  # registers to shared memory of any CTA, completing its barrier


@gluon.constexpr_function
def pair_tile_layout(rows, columns):
    """Tensor memory of a pair of CTAs, of which the first has the first `rows` rows, for products of both."""
    return TensorMemoryLayout([rows, columns], col_stride=1, cga_layout=[[1, 0]], two_ctas=True)


@gluon.jit
def pair_barriers(count: gl.constexpr, arrivals: gl.constexpr, of_both: gl.constexpr):
    """`count` mbarriers of `arrivals` arrivals. of_both: in the first CTA; each CTA arrives there so many times, and
    the first alone waits. Otherwise each CTA has barriers of its own, and a commit completes those of both.
    """
    LAYOUT: gl.constexpr = _pair_barrier_layout(of_both)
    barriers = gl.allocate_shared_memory(gl.int64, [count, 1 if of_both else 2], LAYOUT)
    for i in gl.static_range(count):
        mbarrier.init(barriers.index(i), count=arrivals)
    return barriers


@gluon.constexpr_function
def _pair_barrier_layout(of_both):
    return mbarrier.MBarrierLayout([[0]] if of_both else [[1]])


@gluon.jit
def fence_async_global():
    """Order what TMA did to global memory against the accesses of ordinary instructions, in both directions."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def zero_of_turn():
    """0, of which LLVM does not know that it is the same in each turn of a loop: addresses reckoned from it are not
    kept in registers from turn to turn. ptxas knows.
    """
    return gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def named_barrier(opcode: gl.constexpr, number, threads: gl.constexpr):
    """Come to barrier `number` of the program and wait until as many threads have, `bar.sync`, or go on, `bar.arrive`.
    The number is known once it is compiled, and part of the text ("n"): one in a register makes ptxas reserve all 16.
    """
    text: gl.constexpr = _barrier_text(opcode, threads)
    gl.inline_asm_elementwise(text, "=r,n", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _barrier_text(opcode, threads):
    return f"{opcode} $1, {threads}; mov.u32 $0, 0;"


@gluon.jit
def stay_before(number):
    """What is written before this is computed before it: a branch that is never taken, as `number` is never negative,
    which ptxas does not know. Without it ptxas puts a wait for products ahead of the arithmetic that was to run under
    them.
    """
    text: gl.constexpr = (
        "{ .reg .pred never; setp.lt.s32 never, $1, 0; @!never bra ON; nanosleep.u32 0; ON: } mov.u32 $0, 0;"
    )
    gl.inline_asm_elementwise(text, "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def scale_rows(tile, factor):
    """A product's tile in registers with each row multiplied, by a factor a row or an element; a thread whose rows all
    have the factor 1 branches over that. It holds two rows.
    """
    COUNT: gl.constexpr = min(
        tile.shape[1] // 2, 64
    )  # a thread's elements, at most 64 at once: two of a row, two of the other, and so on
    text: gl.constexpr = _scale_text(COUNT)
    constraints: gl.constexpr = _scale_constraints(COUNT)
    if len(factor.shape) == 1:
        factor = gl.convert_layout(factor, gl.SliceLayout(1, tile.type.layout))[:, None]
    return gl.inline_asm_elementwise(text, constraints, [tile, factor], dtype=gl.float32, is_pure=True, pack=COUNT)


@gluon.constexpr_function
def _scale_text(count):
    """PTX that multiplies `count` registers by as many factors, of which the first and the third say whether any is not
    1.
    """
    first = 2 * count
    products = " ".join(f"mul.f32 ${i}, ${i}, ${first + i};" for i in range(count))
    return (
        f"{{ .reg .pred moved; setp.neu.f32 moved, ${first}, 0f3F800000; "
        f"@!moved setp.neu.f32 moved, ${first + 2}, 0f3F800000; "
        f"@!moved bra KEPT; {products} KEPT: }}"
    )


@gluon.constexpr_function
def _scale_constraints(count):
    """What is written are the registers of the tile."""
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def next_launch_may_start():
    """Let the stream's next kernel begin, if it was launched to overlap this one: it stops at its own
    `await_launch_before`.
    """
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def await_launch_before():
    """Wait until the stream's kernel before is done and all that it wrote can be read; at once where this one was not
    launched to overlap it.
    """
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
