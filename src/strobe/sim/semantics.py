"""Triton's real semantic layers, with reduce, scan, map and warp_specialize evaluated instead of built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from triton import language as tl
from triton.experimental.gluon.language import _core as gluon_core
from triton.experimental.gluon.language._semantic import GluonCallerContext, GluonSemantic
from triton.language.core import _unwrap_if_constexpr as unwrapped
from triton.language.semantic import TritonSemantic

from . import hints
from .values import BYTES, Diverged, Type, Value, is_pointer
from .values import tensor as make_tensor

if TYPE_CHECKING:
    from .builder import Builder

    class Tensor(tl.tensor):
        """A tensor as these layers create it."""

        handle: Value
        type: Any  # a dtype, or a block_type; Gluon's also holds a layout


# combining functions of the standard library, as NumPy reductions
_STANDARD: dict[str, Callable] = {
    "_sum_combine": np.add.reduce,
    "_elementwise_max": np.fmax.reduce,
    "_elementwise_min": np.fmin.reduce,
}

# the same as NumPy's accumulating functions
_ACCUMULATED: dict[str, np.ufunc] = {
    "_sum_combine": np.add,
    "_prod_combine": np.multiply,
    "_elementwise_max": np.fmax,
    "_elementwise_min": np.fmin,
}
_SHORT = 64  # elements of a scan that are combined one after another


def quiet(body: Callable[[], object]) -> Callable[[], object]:
    """Run a partition's body without NumPy warnings, which are a per-greenlet setting."""
    return np.errstate(all="ignore")(body)


def by_branches(compute: Callable[[list[np.ndarray]], list[np.ndarray]], arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Apply a scalar function to whole arrays. Where elements diverge at a branch, each side runs separately."""
    shape = np.broadcast_shapes(*(np.shape(array) for array in arrays))
    try:
        return [np.broadcast_to(result, shape) for result in compute(arrays)]
    except Diverged as branch:
        out: list[np.ndarray] = []
        for side in (branch.taken, ~branch.taken):
            results = by_branches(compute, [np.broadcast_to(array, shape)[side] for array in arrays])
            out = out or [np.empty(shape, result.dtype) for result in results]
            for whole, part in zip(out, results, strict=True):
                whole[side] = part
        return out


class Region:
    """The state that builders of a reduce or scan region expect."""

    def get_region(self, _: int) -> Region:
        return self


_Build = Callable[[Region], None]


class _Tensors(type):
    """The class by which a semantic layer recognises (Triton 3.7 and later: isinstance) and creates tensors."""

    __call__: Callable[..., tl.tensor] = staticmethod(make_tensor)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, tl.tensor)


class _Tensor(metaclass=_Tensors):
    """Replaces tl.tensor."""


class _Evaluated(TritonSemantic):
    """Mixin for a semantic layer: evaluates operations with a combining function, passing whole arrays as scalars."""

    builder: Builder
    tensor: Any = _Tensor

    def to_tensor(self, x: object, check_type: bool = True) -> tl.tensor:
        return x if isinstance(x, tl.tensor) else super().to_tensor(unwrapped(x), check_type)

    def cast(self, input: Tensor, dst_ty: tl.dtype, fp_downcast_rounding: str | None = None) -> Tensor:
        if input.type.scalar is dst_ty.scalar:  # true for most operands
            return input
        return super().cast(input, dst_ty, fp_downcast_rounding)

    def multiple_of(self, x: Tensor, values: Sequence[int]) -> Tensor:
        """A hint to the compiler, without effect on results. Looked at if `hints` is set."""
        if self.builder.machine.checks.hints:
            self._check_hint("multiple_of", x, values, hints.misaligned)
        return x

    def max_contiguous(self, x: Tensor, values: Sequence[int]) -> Tensor:
        if self.builder.machine.checks.hints:
            self._check_hint("max_contiguous", x, values, hints.uneven(1))
        return x

    def max_constancy(self, x: Tensor, values: Sequence[int]) -> Tensor:
        if self.builder.machine.checks.hints:
            self._check_hint("max_constancy", x, values, hints.uneven(0))
        return x

    def _check_hint(self, name: str, x: Tensor, values: Sequence[int], find: hints.Find) -> None:
        handle, numbers = x.handle, cast("list[int]", [unwrapped(value) for value in values])
        step = BYTES.get(handle.elem[1:], 8) if is_pointer(handle.elem) else 1
        if wrong := find(np.asarray(handle.data), numbers, step):
            self.builder.report("assert", f"tl.{name}({numbers}) is false: {wrong}")

    def _combine(self, build: _Build, left: list[Value], right: list[Value]) -> list[np.ndarray]:
        def combined(arrays: list[np.ndarray]) -> list[np.ndarray]:
            self.builder.region_arguments = [
                Value(array, value.elem) for array, value in zip(arrays, left + right, strict=True)
            ]
            build(Region())
            return [value.data for value in self.builder.region_result]

        return by_branches(combined, [value.data for value in left + right])

    def reduction(self, inputs: Sequence[Tensor], axis: int | None, region_builder_fn: _Build) -> tuple[Tensor, ...]:
        if axis is None:
            inputs = tuple(
                self.reshape(t, [t.numel.value], can_reorder=not isinstance(self, GluonSemantic)) for t in inputs
            )
            axis = 0
        if isinstance(self, GluonSemantic):
            self._check_same_layout(inputs)
        shape = list(inputs[0].type.shape)
        values = [t.handle for t in inputs]
        self.builder.spend_math(values[0])
        self.builder.machine.threads_meet()
        if not all(self.builder.whole_along(value, axis) for value in values):
            values = [Value(self.builder.gathered(v, tuple(shape)), v.elem, v.layout) for v in values]
        known = _STANDARD.get(_combining_name(region_builder_fn)) if _wide(inputs) else None
        if known:
            data = [np.asarray(known(values[0].data, axis=axis)).astype(values[0].data.dtype, copy=False)]
            if known == np.add.reduce and self.builder.machine.checks.overflow:
                self._check_sum(values[0], data[0], axis)
        else:
            data = [np.take(v, 0, axis) for v in self._tree(region_builder_fn, values, axis)]
        left = [size for i, size in enumerate(shape) if i != axis]
        out = []
        for array, value, tensor in zip(data, values, inputs, strict=True):
            layout = self.builder.layouts.result("reduce", value.elem, shape, value.layout, axis)[1]
            handle = Value(array if array.ndim else array[()], value.elem, layout)
            out.append(self._wrap(handle, tensor.type.scalar, left))
        return tuple(out)

    def _check_sum(self, value: Value, made: np.ndarray, axis: int) -> None:
        """Report a sum of integers whose result wraps. Partial sums do not count: their order is the compiler's."""
        if value.elem[0] == "i" and value.elem != "i64" and np.any(value.data.sum(axis, dtype=np.int64) != made):
            self.builder.report("assert", f"int{value.elem[1:]} overflow detected for operation sum")

    def _tree(self, build: _Build, values: list[Value], axis: int) -> list[np.ndarray]:
        """Reduce by halving the axis until one element is left."""
        data = [value.data for value in values]
        while (size := data[0].shape[axis]) > 1:
            half = size // 2
            sides = ([np.take(d, range(start, start + half), axis) for d in data] for start in (0, half))
            parts = [[Value(part, v.elem) for part, v in zip(side, values, strict=True)] for side in sides]
            merged = self._combine(build, *parts)
            rest = [np.take(d, range(2 * half, size), axis) for d in data]
            data = [
                np.concatenate([np.broadcast_to(m, p.data.shape), r], axis)
                for m, p, r in zip(merged, parts[0], rest, strict=True)
            ]
        return data

    def associative_scan(
        self, inputs: Sequence[Tensor], axis: int, region_builder_fn: _Build, reverse: bool
    ) -> tuple[Tensor, ...]:
        self.builder.machine.threads_meet()
        values = [t.handle for t in inputs]
        rank = len(inputs[0].type.shape)
        data = [np.moveaxis(value.data, axis % rank, 0) for value in values]
        data = [array[::-1] for array in data] if reverse else data
        known = _ACCUMULATED.get(_combining_name(region_builder_fn)) if len(inputs) == 1 else None
        whole = data[0].dtype.kind == "i"
        if whole and self.builder.machine.checks.overflow:  # each sum of integers is checked where Triton computes it
            known = None
        if known is not None and (_wide(inputs) or (known is np.add and whole)):
            scanned = [known.accumulate(data[0], axis=0, dtype=data[0].dtype)]
        else:
            scanned = self._scanned(region_builder_fn, values, data)
        done = [np.moveaxis(array[::-1] if reverse else array, 0, axis % rank) for array in scanned]
        return tuple(
            self.tensor(Value(array, v.elem, v.layout), t.type)
            for array, v, t in zip(done, values, inputs, strict=True)
        )

    def _scanned(self, build: _Build, values: list[Value], data: list[np.ndarray]) -> list[np.ndarray]:
        """An inclusive scan along the first axis: element by element, or in steps of 1, 2, 4, ... for a long axis."""
        wrapped = lambda arrays: [Value(array, value.elem) for array, value in zip(arrays, values, strict=True)]
        size = len(data[0])
        if size <= _SHORT:
            steps = [[array[0]] for array in data]
            for i in range(1, size):
                left, right = wrapped([step[-1] for step in steps]), wrapped([array[i] for array in data])
                for step, one in zip(steps, self._combine(build, left, right), strict=True):
                    step.append(one)
            return [np.stack(step) for step in steps]
        step, scanned = 1, list(data)
        while step < size:
            left, right = ([array[part] for array in scanned] for part in (slice(None, -step), slice(step, None)))
            merged = self._combine(build, wrapped(left), wrapped(right))
            scanned = [np.concatenate([array[:step], one]) for array, one in zip(scanned, merged, strict=True)]
            step *= 2
        return scanned

    def map_function(self, interpreter: Any, scalar_fn: object, *args: Tensor, pack: object = 1) -> Tensor | tl.tuple:
        """tl.map_elementwise: the scalar function receives whole arrays as scalars, one control-flow path at a time."""
        if unwrapped(pack) != 1:
            raise NotImplementedError("map_elementwise with pack > 1")
        tensors = list(self.broadcast_tensors(*args)) if len(args) > 1 else list(args)
        like = tensors[0]
        kinds: list[tuple[str, tl.dtype]] = []
        single = False

        def mapped(arrays: list[np.ndarray]) -> list[np.ndarray]:
            nonlocal single
            scalars = [
                tl.tensor(Value(array, t.handle.elem), t.type.scalar) for array, t in zip(arrays, tensors, strict=True)
            ]
            results = interpreter.call_JitFunction(unwrapped(scalar_fn), scalars, {})
            single = isinstance(results, tl.tensor)
            results = [results] if single else list(results)
            kinds[:] = [(result.handle.elem, result.type.scalar) for result in results]
            return [result.handle.data for result in results]

        arrays = by_branches(mapped, [t.handle.data for t in tensors])
        out = [
            self.tensor(Value(array, elem, like.handle.layout), like.type.with_element_ty(scalar))
            for array, (elem, scalar) in zip(arrays, kinds)
        ]
        return out[0] if single else tl.tuple(out)

    def _wrap(self, handle: Value, scalar: tl.dtype, shape: list[int]) -> Tensor:
        raise NotImplementedError


def _wide(inputs: Sequence[Tensor]) -> bool:
    """Whether NumPy's reduction of this tensor gives what Triton's would: one tensor, not unsigned (those are carried
    as signed), and of a type that is not rounded to fewer bits after every step.
    """
    dtype = inputs[0].type.scalar
    return len(inputs) == 1 and (dtype.is_int_signed() or dtype.is_fp32() or dtype.is_fp64())


def _combining_name(build: _Build) -> str:
    """The name of the combining function in a region builder's closure."""
    for cell in build.__closure__ or ():
        name = getattr(cell.cell_contents, "__name__", "")
        if name in _ACCUMULATED and getattr(cell.cell_contents, "__module__", "").startswith("triton."):
            return name
    return ""


class Triton(_Evaluated, TritonSemantic):
    def _wrap(self, handle: Value, scalar: tl.dtype, shape: list[int]) -> Tensor:
        return self.wrap_tensor(handle, scalar, shape)


class Gluon(_Evaluated, GluonSemantic):
    def _wrap(self, handle: Value, scalar: tl.dtype, shape: list[int]) -> Tensor:
        return self._wrap_handle_infer_layout(handle, scalar, shape)

    def __init__(self, builder: Builder):
        super().__init__(builder)
        # buffer array's type -> (kept alive, a slot's type, its IR type)
        self._slots: dict[int, tuple[object, Any, Type]] = {}
        self._types: dict[tuple[object, ...], tuple[object, Any]] = {}
        self._pairs: dict[tuple[int, int], Any] = {}  # two types' ids -> (kept alive, their types after broadcasting)
        self._ranges: dict[tuple[int, int, object], Any] = {}
        # (type's id, layout, asserted) -> (kept alive, type, IR type)
        self._converted: dict[tuple[int, object, bool], tuple[object, Any, Type]] = {}

    def memdesc_index(
        self, mem_desc: gluon_core.shared_memory_descriptor, index: object
    ) -> gluon_core.shared_memory_descriptor:
        """One slot of a buffer array. The slot's type is created once per array type."""
        ring = mem_desc.type
        if id(ring) not in self._slots:
            slot = super().memdesc_index(mem_desc, index)
            kind: Any = slot.type
            self._slots[id(ring)] = ring, kind, kind.to_ir(self.builder)
            return slot
        _, kind, ir_type = self._slots[id(ring)]
        slot: Any = object.__new__(gluon_core.shared_memory_descriptor)
        slot.handle = self.builder.create_memdesc_index(ir_type, mem_desc.handle, self.to_tensor(index).handle)
        slot.type = kind
        return slot

    # Types are created once and shared, because each distributed_type formats its layout as text when it is created.

    def _type(self, key: tuple[object, ...], make: Callable[[], object]) -> Any:
        """The type for a key whose objects, except layouts, are compared by identity. The cache keeps them alive."""
        number = tuple(
            part if isinstance(part, (tuple, str, gluon_core.DistributedLayout)) else id(part) for part in key
        )
        if number not in self._types:
            self._types[number] = key, make()
        return self._types[number][1]

    def broadcast_impl_value(self, lhs: Tensor, rhs: Tensor) -> tuple[Tensor, Tensor]:
        left, right = lhs.type, rhs.type
        if left is right:
            return lhs, rhs
        if left.is_block() and right.is_block():
            return self._together(lhs, rhs)
        if left.is_block():
            return lhs, self._spread(rhs, left)
        return (self._spread(lhs, right), rhs) if right.is_block() else (lhs, rhs)

    def _together(self, lhs: Tensor, rhs: Tensor) -> tuple[Tensor, Tensor]:
        """Two tensors broadcast to one shape. The resulting types are computed once per pair of types."""
        key = (id(lhs.type), id(rhs.type))
        if key in self._pairs:
            left, right = self._pairs[key][1]
            return self._widened(lhs, left), self._widened(rhs, right)
        both: Any = super().broadcast_impl_value(lhs, rhs)
        if not any(isinstance(one.type.layout, gluon_core.AutoLayout) for one in (lhs, rhs)):
            kinds = [
                None if one.type.shape == wide.type.shape else (wide.type, wide.type.to_ir(self.builder))
                for one, wide in zip((lhs, rhs), both)
            ]
            self._pairs[key] = (lhs.type, rhs.type), kinds
        return both

    def _widened(self, one: Tensor, kind: tuple[tl.dtype, Type] | None) -> Tensor:
        return one if kind is None else self.tensor(self.builder.create_broadcast(one.handle, kind[1]), kind[0])

    def cast(self, input: Tensor, dst_ty: tl.dtype, fp_downcast_rounding: str | None = None) -> Tensor:
        """Triton's cast, with one type object for equal results, so that caches keyed by type identity hit."""
        made = super().cast(input, dst_ty, fp_downcast_rounding)
        if made is not input and made.type.is_block():
            made.type = self._type(("cast", input.type, made.type.scalar), lambda: made.type)
        return made

    def _distributed(self, scalar: tl.dtype, shape: Sequence[int], layout: object) -> tuple[tl.dtype, Type]:
        """(type, IR type) of a tensor with this dtype, shape and layout."""
        kind = self._type(
            ("distributed", scalar, tuple(shape), layout),
            lambda: gluon_core.distributed_type(scalar, list(shape), layout),
        )
        return kind, self._type(("ir", kind), lambda: kind.to_ir(self.builder))

    def splat(self, value: Tensor, shape: Sequence[int], layout: object) -> Tensor:
        if not len(shape):
            return value
        kind, ir_type = self._distributed(value.dtype, shape, layout)
        return self.tensor(self.builder.create_splat(ir_type, value.handle), kind)

    def shared_load(self, mem_desc: gluon_core.shared_memory_descriptor, layout: object) -> Tensor:
        if not isinstance(layout, gluon_core.DistributedLayout):
            return cast("Tensor", super().shared_load(mem_desc, layout))  # raises the proper error
        kind, ir_type = self._distributed(mem_desc.dtype, mem_desc.shape, layout)
        return self.tensor(self.builder.create_local_load(ir_type, mem_desc.handle), kind)

    def arange(self, start: int, end: int, layout: object) -> Tensor:
        """A range, created once per layout. Values of a tensor are never modified."""
        key = (start, end, layout)
        if key not in self._ranges:
            made: Any = super().arange(start, end, layout)
            made.type = self._distributed(made.dtype, made.type.shape, made.type.layout)[0]
            self._ranges[key] = made
        return self._ranges[key]

    def _bool_like(self, v: Tensor) -> tl.dtype:
        return self._type(("bool", v.type), lambda: v.type.with_element_ty(tl.int1)) if v.type.is_block() else tl.int1

    def convert_layout(self, value: Tensor, layout: object, assert_trivial: bool = False) -> Tensor:
        """Converts the layout. The result's type is created once per type and layout."""
        key = id(value.type), layout, assert_trivial
        if key not in self._converted:
            made: Any = super().convert_layout(value, layout, assert_trivial)
            self._converted[key] = value.type, made.type, made.type.to_ir(self.builder)
            return made
        _, kind, ir_type = self._converted[key]
        return self.tensor(self.builder.create_convert_layout(ir_type, value.handle), kind)

    def _spread(self, scalar: Tensor, like: Any) -> Tensor:
        kind = self._type(("element", like, scalar.type), lambda: like.with_element_ty(scalar.type))
        return self.tensor(
            Value(np.full(like.shape, scalar.handle.data), scalar.handle.elem, self._attribute(kind)), kind
        )

    def _attribute(self, kind: tl.dtype) -> object:
        return self._type(("attribute", kind), lambda: kind.to_ir(self.builder).layout)

    def broadcast_impl_shape(self, input: Tensor, shape: tuple[int]) -> Tensor:
        if input.type.is_block() and input.type.get_block_shapes() == shape:
            return input
        made = super().broadcast_impl_shape(input, shape)
        return self.tensor(made.handle, self._type(("shape", input.type, tuple(shape)), lambda: made.type))

    def _wrap_handle_infer_layout(self, handle: Value, scalar_ty: tl.dtype, shape: Sequence[int]) -> Tensor:
        if not len(shape):
            return self.tensor(handle, scalar_ty)
        make = lambda: gluon_core.distributed_type(
            scalar_ty, list(shape), self.builder.get_gluon_layout_from_tensor(handle)
        )
        return self.tensor(handle, self._type(("inferred", scalar_ty, tuple(shape), handle.layout), make))

    def warp_specialize(
        self, functions_and_args: Any, worker_num_warps: Sequence[int], worker_num_regs: Sequence[int], generator: Any
    ) -> Any:
        machine = self.builder.machine
        self.builder.after_inits()
        if not len(functions_and_args) - 1 == len(worker_num_warps) == len(worker_num_regs):
            raise ValueError(
                f"warp_specialize: {len(functions_and_args) - 1} workers, {len(worker_num_warps)} warp counts, "
                f"{len(worker_num_regs)} register counts; all three must agree"
            )
        bodies, names = [], set()
        for i, (function, args) in enumerate(functions_and_args):
            fn: Any = unwrapped(function)
            warps = machine.current.warps if i == 0 else worker_num_warps[i - 1]
            context = generator.caller_context if i == 0 else GluonCallerContext(num_warps=warps)
            name = (
                fn.__name__
                if fn.__name__ not in names
                else f"{fn.__name__}#{sum(n.split('#')[0] == fn.__name__ for n in names) + 1}"
            )
            names.add(name)
            body = lambda fn=fn, args=args, context=context: generator.call_JitFunction(
                fn, list(args), {}, caller_context=context
            )
            bodies.append((name, warps, quiet(body)))
        result = machine.fork(bodies)
        return tuple(result) if isinstance(result, (tuple, tl.tuple)) else result
