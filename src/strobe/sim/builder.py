"""A replacement for Triton's IR builder below the real semantic layer: every `create_*` is evaluated immediately."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import min_dot_size

from .arithmetic import Arithmetic
from .block_pointers import BlockPointers
from .clusters import Clusters
from .launch_control import LaunchControl
from .layouts import Layouts
from .machine import Machine
from .pointers import Pointers
from .report import place_text
from .scaled import ScaledProducts
from .shared import SharedMemory
from .tensor_core import TensorCores
from .values import BYTES, COMPUTED, Type, Value, computed_type, rounded, to_bits, unsigned

# prefixes of operation names, and the capabilities that support them (PTX ISA, target notes of each instruction)
ONLY_ON = {
    "create_async_tma_": (90, 100, 103, 120),
    "create_fence_async_shared": (90, 100, 103, 120),
    "create_warpgroup_mma": (90,),
    "create_tmem_": (100, 103),
    "create_tcgen05_": (100, 103),
    "create_clc_": (100, 103),
}


class Builder(Arithmetic, Pointers, BlockPointers, SharedMemory, Clusters, TensorCores, ScaledProducts, LaunchControl):
    def __init__(self, machine: Machine, options: object, layouts: Layouts, capability: int):
        self.machine, self.options, self.layouts, self.capability = machine, options, layouts, capability
        self.codegen_fns = {"min_dot_size": min_dot_size(GPUTarget("cuda", capability, 32))}
        self.module_map: dict[str, object] = {}
        self.grid: tuple[int, int, int] = (1, 1, 1)
        self.ctas, self.two_ctas, self.inits_by_hand = 1, False, False  # the launch of a Gluon kernel sets them
        self.region_arguments: list[Value] = []
        self.region_result: list[Value] = []
        self._python_layouts = {}
        for name in dir(type(self)):
            able = next(
                (capabilities for begin, capabilities in ONLY_ON.items() if name.startswith(begin)), (capability,)
            )
            if capability not in able:
                setattr(self, name, self._strange(name, able))

    def _strange(self, name: str, able: tuple[int, ...]) -> Callable[..., object]:
        """An operation that the target does not support: report it, then evaluate it anyway."""
        operation, others = getattr(self, name), ", ".join(f"sm_{capability}" for capability in able)

        def reported(*arguments: object) -> object:
            self.report(
                "target", f"{name.removeprefix('create_')} is an operation of {others}; this is sm_{self.capability}"
            )
            return operation(*arguments)

        return reported

    def __getattr__(self, name: str) -> Any:
        if name.startswith("get_") and name.endswith("_layout"):
            return getattr(self.layouts.attributes, name)
        if name.startswith("get_") and name.endswith("_attr"):
            return getattr(self.layouts.builder, name)
        for begin, end, what in (("get_", "_ty", "type"), ("create_", "", "operation")):
            if name.startswith(begin) and name.endswith(end):
                unknown = name.removeprefix(begin).removesuffix(end)
                where = place_text(self.machine.place())
                raise NotImplementedError(f"the simulator does not know the {what} {unknown}, at {where}")
        raise AttributeError(name)

    # ---- source locations: the translated code carries them

    def get_loc(self) -> None: ...
    def set_loc(self, *_: object) -> None: ...
    def create_loc(self, *_: object) -> None: ...
    def create_name_loc(self, *_: object) -> None: ...
    def get_insertion_point(self) -> None: ...
    def get_insertion_block(self) -> None: ...
    def restore_insertion_point(self, *_: object) -> None: ...
    def set_insertion_point_to_start(self, *_: object) -> None: ...
    def set_insertion_point_to_end(self, *_: object) -> None: ...
    def get_cache_policy(self, *_: object) -> None: ...

    # ---- regions of reduce and scan: evaluated on the arguments that the semantic layer stored here

    def create_block_with_parent(self, region: object, types: object) -> _Block:
        return _Block(self.region_arguments)

    def create_reduce_ret(self, *values: Value) -> None:
        self.region_result = list(values)

    create_scan_ret = create_reduce_ret

    # ---- types

    def get_void_ty(self) -> Type:
        return Type("void")

    def get_ptr_ty(self, elem: Type, _: object) -> Type:
        return Type("*" + elem.elem)

    def get_block_ty(self, elem: Type, shape: Sequence[int]) -> Type:
        return Type(elem.elem, shape)

    def get_distributed_ty(self, elem: Type, shape: Sequence[int], layout: object) -> Type:
        return Type(elem.elem, shape, layout)

    def get_shared_mem_desc_ty(
        self, elem: Type, shape: Sequence[int], layout: object, alloc_shape: Sequence[int]
    ) -> Type:
        return Type(elem.elem, shape, (layout, list(alloc_shape)))

    get_tensor_mem_desc_ty = get_shared_mem_desc_ty

    def get_tensor_descriptor_layout_type(self, block: Type, signed: bool, layout: object) -> Type:
        return Type(block.elem, block.shape, (layout, signed))

    get_tensor_descriptor_im2col_layout_type = get_tensor_descriptor_layout_type

    def to_linear_layout(self, layout: object, shape: Sequence[int]) -> Any:
        return self.layouts.builder.to_linear_layout(layout, shape)

    def get_shared_bank_conflicts(self, *arguments: object) -> int:
        return self.layouts.builder.get_shared_bank_conflicts(*arguments)

    # ---- constants

    def integer(self, value: int, elem: str) -> Value:
        """A scalar of an integer type, wrapped to its range."""
        return getattr(self, "get_int" + elem[1:])(value)

    def report(self, kind: str, text: str) -> None:
        """Report a finding at the kernel's current line."""
        self.machine.report(kind, f"{text}, at {place_text(self.machine.place())}")

    def get_null_value(self, ty: Type) -> Value:
        zero = computed_type(ty.elem)(0)
        return Value(np.full(ty.shape, zero) if ty.shape else zero, ty.elem, ty.layout)

    def get_all_ones_value(self, ty: Type) -> Value:
        ones = np.True_ if ty.elem == "i1" else COMPUTED[ty.elem](-1)
        return Value(np.full(ty.shape, ones) if ty.shape else ones, ty.elem, ty.layout)

    create_poison = get_null_value

    # ---- program

    def create_get_program_id(self, axis: int) -> Value:
        position = self.machine.current.cta.position[axis]
        return Value(np.int32(position if axis else position // self.ctas), "i32")

    def create_get_num_programs(self, axis: int) -> Value:
        return Value(np.int32(self.grid[axis] if axis else self.grid[axis] // self.ctas), "i32")

    def create_assume(self, condition: Value) -> None:
        if not np.all(condition.data):
            self.report("assert", "an assumption is false")

    def create_assert(self, condition: Value, message: object) -> None:
        held = self.held(np.shape(condition.data), condition.layout)
        if not np.all(condition.data if held is None else condition.data[held]):
            self.report("assert", f"device_assert failed: {message}")

    def create_print(self, prefix: str, hexadecimal: bool, values: list[Value], signed: Iterable[bool]) -> None:
        p = self.machine.current
        shown = [
            _float_bits(value) if hexadecimal and value.elem[:2] in ("fp", "bf")
            else value.data if is_signed else unsigned(value.data)
            for value, is_signed in zip(values, signed, strict=True)
        ]  # fmt: skip
        with np.printoptions(formatter={"int": hex} if hexadecimal else None):
            print(
                f"[{p.cta.position} {p.name}]",
                prefix,
                *(hex(one) if hexadecimal and np.ndim(one) == 0 else one for one in shown),
            )


class _Block:
    def __init__(self, values: list[Value]):
        self._values = values

    def arg(self, index: int) -> Value:
        return self._values[index]


def _float_bits(value: Value) -> Any:
    """The bits of floating-point numbers, as unsigned integers."""
    bits = np.asarray(to_bits(value.data, value.elem))
    return bits.view(f"u{bits.itemsize}")[()]


def _integer(elem: str) -> Callable[[Builder, int], Value]:
    if elem == "i1":
        return lambda self, value: Value(np.bool_(value), elem)
    bits, made = BYTES[elem] * 8, COMPUTED[elem]
    wrap = lambda value: (value + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)
    return lambda self, value: Value(made(wrap(value)), elem)


for _bits, _elem in ((1, "i1"), (8, "i8"), (16, "i16"), (32, "i32"), (64, "i64")):
    setattr(Builder, f"get_int{_bits}_ty", lambda self, elem=_elem: Type(elem))
    setattr(Builder, f"get_int{_bits}", _integer(_elem))
    setattr(Builder, f"get_uint{_bits}", _integer(_elem))
for _name, _elem in dict(
    half="fp16", bf16="bf16", float="fp32", double="fp64", fp8e4nv="fp8e4nv", fp8e5="fp8e5"
).items():
    setattr(Builder, f"get_{_name}_ty", lambda self, elem=_elem: Type(elem))
    setattr(
        Builder,
        f"get_{_elem}",
        lambda self, value, elem=_elem: Value(
            COMPUTED[elem](rounded(np.float32(value), elem) if elem != "fp64" else value), elem
        ),
    )
