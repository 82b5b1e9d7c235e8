"""Asks Triton's own builder about layouts, on values without content. Layout errors are the compiler's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import reduce
from typing import Any

import numpy as np
from triton._C.libtriton import gluon_ir, ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend


def _key(argument: object) -> Hashable:
    if isinstance(argument, (list, tuple)):
        return tuple(_key(item) for item in argument)
    return argument if isinstance(argument, (int, str, bool, float, type(None))) else id(argument)


def _places(bases: list[list[int]], strides: list[int]) -> np.ndarray:
    """Offsets in a flat array of all combinations of a linear layout's bases. The first basis varies fastest."""
    steps = [sum(x * stride for x, stride in zip(base, strides, strict=True)) for base in bases]
    return reduce(lambda places, step: np.concatenate([places, places ^ step]), steps, np.zeros(1, np.int64))


class Interned:
    """The real builder's `get_*_layout`, with one live attribute per distinct layout, whose `id` can be a key."""

    def __init__(self, builder: Any):
        self._builder, self._kept, self._made_by = builder, {}, {}

    def arguments_of(self, attribute: object) -> tuple[str, tuple]:
        """The function that made a layout attribute, and its arguments."""
        return self._made_by[id(attribute)]

    def __getattr__(self, name: str) -> Any:
        make = getattr(self._builder, name)

        def get(*arguments: object) -> Any:
            key = (name, _key(arguments))
            if key not in self._kept:
                # keeps the arguments alive, so that their ids stay unique
                self._kept[key] = made, _ = make(*arguments), arguments
                self._made_by[id(made)] = name, arguments
            return self._kept[key][0]

        setattr(self, name, get)
        return get


class Layouts:
    """The compiler's layout inference for one (capability, warps, CTAs), with a cache of its answers."""

    def __init__(self, capability: int, num_warps: int, num_ctas: int):
        self.num_ctas = num_ctas
        self._context = ir.context()
        ir.load_dialects(self._context)
        CUDABackend(GPUTarget("cuda", capability, 32)).load_dialects(self._context)
        builder = self.builder = gluon_ir.GluonOpBuilder(self._context)
        builder.set_loc("layouts", 0, 0)
        self._module = builder.create_module()
        self._module.set_attr("ttg.target", builder.get_string_attr(f"cuda:{capability}"))
        for name, value in (("num-warps", num_warps), ("num-ctas", num_ctas), ("threads-per-warp", 32)):
            self._module.set_attr("ttg." + name, builder.get_int32_attr(value))
        function = builder.get_or_insert_function(
            self._module, "layouts", builder.get_function_ty([], []), "public", False
        )
        self._module.push_back(function)
        builder.set_insertion_point_to_start(function.add_entry_block())
        self.attributes, self.answers = Interned(builder), {}
        self._elems = dict(
            i1=builder.get_int1_ty,
            i8=builder.get_int8_ty,
            i16=builder.get_int16_ty,
            i32=builder.get_int32_ty,
            i64=builder.get_int64_ty,
            fp16=builder.get_half_ty,
            bf16=builder.get_bf16_ty,
            fp32=builder.get_float_ty,
            fp64=builder.get_double_ty,
            fp8e4nv=builder.get_fp8e4nv_ty,
            fp8e5=builder.get_fp8e5_ty,
        )

    def elem(self, elem: str) -> Any:
        return self._elems.get(elem, self.builder.get_int64_ty)()

    def blank(self, elem: str, shape: Sequence[int], layout: object) -> Any:
        return self.builder.create_poison(self.builder.get_distributed_ty(self.elem(elem), list(shape), layout))

    def answer(self, key: tuple, ask: Callable[[], Any]) -> Any:
        if key not in self.answers:
            self.answers[key] = ask()
        return self.answers[key]

    def result(
        self, operation: str, elem: str, shape: Sequence[int], layout: object, *arguments: object
    ) -> tuple[object, object]:
        """(Python layout, attribute) of the result of `create_<operation>(value, *arguments)`; (None, None) without
        layouts.
        """
        if layout is None:
            return None, None
        key = (operation, elem, tuple(shape), id(layout), _key(arguments))
        return self.answer(key, lambda: self._infer(operation, elem, shape, layout, arguments))

    def _infer(
        self, operation: str, elem: str, shape: Sequence[int], layout: object, arguments: tuple
    ) -> tuple[object, object]:
        builder, value = self.builder, self.blank(elem, shape, layout)
        if operation == "reduce":
            if len(shape) == 1:
                return None, None
            value = builder.create_reduce([value], arguments[0]).get_result(0)
        elif operation == "join":
            value = builder.create_join(value, self.blank(elem, shape, layout))
        elif operation == "split":
            value = builder.create_split(value)[0]
        else:
            value = getattr(builder, "create_" + operation)(value, *arguments)
        python = builder.get_gluon_layout_from_tensor(value)
        return python, python._to_ir(self.attributes)

    def of_tensor(self, shape: Sequence[int], layout: object) -> object:
        """The Python layout for a tensor's layout attribute."""
        key = ("tensor", tuple(shape), id(layout))
        return self.answer(key, lambda: self.builder.get_gluon_layout_from_tensor(self.blank("i32", shape, layout)))

    def registers(self, shape: tuple, layout: object, pack: int) -> np.ndarray | None:
        """Offsets in a flat array of a thread's consecutive registers, shaped [groups, pack].

        Each run of 32 groups is the lanes of a warp. None if that is already the array's order, in plain Triton, or if
        a thread holds an element twice or not at all.
        """
        if layout is None:
            return None

        def ask() -> np.ndarray | None:
            linear = self.builder.to_linear_layout(layout, list(shape))
            strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
            own = _places(linear.reg_bases, strides)
            places = _places([*linear.lane_bases, *linear.warp_bases, *linear.block_bases], strides)[:, None] ^ own
            if len(own) % pack or not np.array_equal(np.sort(places, axis=None), np.arange(math.prod(shape))):
                return None
            places = places.reshape(len(places), -1, pack).swapaxes(0, 1).reshape(-1, pack)
            return None if np.array_equal(places.reshape(-1), np.arange(places.size)) else places

        return self.answer(("registers", shape, id(layout), pack), ask)

    def bank_conflicts(self, ty: Any, layout: object, bits: int) -> int:
        """Extra passes over the banks for each instruction of a load or store, by the compiler's own count. `bits` are
        those of an element. 0 for a part of an allocation, which the compiler does not count.
        """
        shared, alloc_shape = ty.layout
        shape = list(ty.shape)
        if list(alloc_shape)[-len(shape) :] != shape or math.prod(shape) < 32:
            return 0
        ask = lambda: self.builder.get_shared_bank_conflicts(layout, shared, shape, bits)
        return self.answer(("conflicts", bits, tuple(shape), id(shared), id(layout)), ask)

    def owners(self, shape: tuple, layout: object) -> np.ndarray | None:
        """The thread that holds each element of a tensor, flat: the first of them. None if that is not known."""

        def ask() -> np.ndarray:
            linear = self.builder.to_linear_layout(layout, list(shape))
            strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
            registers = _places(linear.reg_bases, strides)
            threads = _places([*linear.lane_bases, *linear.warp_bases], strides)
            held = threads[:, None] ^ registers
            owners = np.zeros(math.prod(shape), np.int64)
            for thread in reversed(range(len(held))):
                owners[held[thread]] = thread
            return owners

        return self.answer(("owners", shape, id(layout)), ask)

    def trivial(self, elem: str, shape: Sequence[int], source: object, target: object) -> bool:
        def ask() -> bool:
            wanted = self.builder.get_distributed_ty(self.elem(elem), list(shape), target)
            return self.builder.is_convert_layout_trivial(wanted, self.blank(elem, shape, source))

        return self.answer(("trivial", elem, tuple(shape), id(source), id(target)), ask)

    def of_window(
        self,
        operation: str,
        elem: str,
        shape: Sequence[int],
        layout: object,
        alloc_shape: Sequence[int],
        argument: Sequence[int],
    ) -> tuple[object, object]:
        """(Python layout, attribute) of a memory descriptor after `create_memdesc_<operation>`."""

        def ask() -> tuple[object, object]:
            source = self.builder.create_poison(
                self.builder.get_shared_mem_desc_ty(self.elem(elem), list(shape), layout, list(alloc_shape))
            )
            result = getattr(self.builder, "create_memdesc_" + operation)(source, list(argument))
            python = self.builder.get_gluon_layout_from_memdesc(result)
            return python, python._to_ir(self.attributes)

        return self.answer(
            ("window", operation, elem, tuple(shape), id(layout), tuple(alloc_shape), tuple(argument)), ask
        )

    def of_memory(self, elem: str, shape: Sequence[int], layout: object) -> object:
        """The Python layout for a memory descriptor's layout attribute."""

        def ask() -> object:
            memory = self.builder.get_shared_mem_desc_ty(self.elem(elem), list(shape), layout, list(shape))
            return self.builder.get_gluon_layout_from_memdesc(self.builder.create_poison(memory))

        return self.answer(("memory", elem, tuple(shape), id(layout)), ask)

    def pieces(self, elem: str, source: tuple, source_layout: object, target: tuple, target_layout: object) -> bool:
        """Whether reshaping [..., rows, columns] to [pieces, fewer rows, block] cuts a tile between blocks of columns.

        A swizzled tile wider than its swizzle lies in memory block by block, each with all rows.
        """
        if len(target) != 3 or source[-1] <= target[-1]:
            return False
        kinds = [self.of_memory(elem, source, source_layout), self.of_memory(elem, target, target_layout)]
        widths = {getattr(kind, "swizzle_byte_width", 0) * 8 // getattr(kind, "element_bitwidth", 1) for kind in kinds}
        return widths == {target[-1]} and source[-2] % target[-2] == 0 and math.prod(source) == math.prod(target)
