"""Element-wise operations, casts and shape changes of the IR builder, in NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from triton._C.libtriton import ir

from . import libdevice, ptx, shares
from .contraction import Contraction
from .layouts import Layouts
from .machine import Machine
from .report import place_text
from .scaled import unpacked
from .storages import adopt
from .values import (
    BYTES,
    COMPUTED,
    STORED,
    UNSIGNED,
    Type,
    Value,
    computed_type,
    from_bits,
    is_pointer,
    rounded,
    saturated,
    to_bits,
    unsigned,
)

_NARROW = ("bf16", "fp8e4nv", "fp8e5")
_FP8 = ("fp8e4nv", "fp8e5")
SM_GHZ = 1.755  # boost clock of an H200
_LANES = 32  # float32 lanes of one quarter of an SM
_EXP_LANES = 4  # ex2, lg2, rcp and similar


def _scalar(array: Any) -> Any:
    """A 0-d array as a NumPy scalar, which computes much faster."""
    return array[()] if isinstance(array, np.ndarray) and array.ndim == 0 else array


class Arithmetic(Contraction):
    machine: Machine
    layouts: Layouts
    ctas: int
    converted: Callable[[Value, object], Any]
    held: Callable[..., np.ndarray | None]

    def spend_math(self, like: Value, lanes: int = _LANES) -> None:
        """Add the modelled time of one instruction on every element that the running CTA holds."""
        if self.machine.mode == "timed":
            quarters, shape = min(self.machine.current.warps, 4), np.shape(like._data)
            parts = 1 if self.ctas == 1 else shares.of_registers(self.layouts, shape, like.layout).size
            self.machine.spend(math.prod(shape) / parts / (lanes * quarters) / SM_GHZ)

    def report_fp8(self, elem: str) -> None:
        """Triton has no arithmetic on FP8 numbers: LLVM's operations get them as bytes, and the compiler fails."""
        where = place_text(self.machine.place())
        self.machine.report(
            "compiler",
            f"arithmetic or a comparison on {elem}, which Triton does not compile (PassManager::run failed): convert "
            f"to float16 or float32 first, at {where}",
        )

    # ---- casts

    def _cast(self, a: Value, ty: Type) -> Value:
        data = np.asarray(a.data)
        self.spend_math(a)
        data = rounded(data, ty.elem) if ty.elem in _NARROW else data.astype(COMPUTED[ty.elem])
        return Value(_scalar(data), ty.elem, a.layout)

    create_si_to_fp = create_fp_ext = create_fp_trunc = _cast

    def create_fp_to_si(self, a: Value, ty: Type) -> Value:
        return self._to_integer(a, ty, np.dtype(COMPUTED[ty.elem]))

    def create_fp_to_ui(self, a: Value, ty: Type) -> Value:
        return self._to_integer(a, ty, UNSIGNED[np.dtype(COMPUTED[ty.elem])])

    def _to_integer(self, a: Value, ty: Type, wanted: np.dtype) -> Value:
        """Round towards zero and saturate. PTX has no conversion to 8 bits: the compiler takes the lower byte of 16."""
        self.spend_math(a)
        kind = wanted if wanted.itemsize > 1 else np.dtype(f"{wanted.kind}2")
        whole = np.trunc(np.asarray(a.data, np.float64))
        done = saturated(whole, kind, a.elem == "fp64" or kind.itemsize == 8).astype(wanted)
        return Value(_scalar(done.view(COMPUTED[ty.elem])), ty.elem, a.layout)

    def create_ui_to_fp(self, a: Value, ty: Type) -> Value:
        return self._cast(Value(unsigned(np.asarray(a.data)), a.elem, a.layout), ty)

    def create_fp_to_fp(self, a: Value, ty: Type, rounding: object) -> Value:
        if rounding not in (None, ir.ROUNDING_MODE.RTNE):
            raise NotImplementedError(f"conversion with rounding {rounding}: the simulator rounds to nearest even only")
        return self._cast(a, ty)

    def create_int_cast(self, a: Value, ty: Type, signed: bool) -> Value:
        data = np.asarray(a.data)
        if not signed:
            data = unsigned(data)
        data = (
            (data & 1).astype(np.bool_)
            if ty.elem == "i1" and data.dtype != np.bool_
            else data.astype(COMPUTED[ty.elem])
        )
        return Value(_scalar(data), ty.elem, a.layout)

    def create_bitcast(self, a: Value, ty: Type) -> Value:
        if is_pointer(ty.elem) and not is_pointer(a.elem):
            return self.create_int_to_ptr(a, ty)
        if is_pointer(ty.elem) or is_pointer(a.elem):
            return Value(a.data, ty.elem, a.layout)
        bits = np.ascontiguousarray(to_bits(a.data, a.elem)).view(STORED[ty.elem]).reshape(np.shape(a.data))
        return Value(_scalar(from_bits(bits, ty.elem)), ty.elem, a.layout)

    def create_int_to_ptr(self, a: Value, ty: Type) -> Value:
        adopt(self.machine, np.asarray(a.data, np.int64))
        return Value(_scalar(np.asarray(a.data).astype(np.int64)), ty.elem, a.layout)

    def create_ptr_to_int(self, a: Value, ty: Type) -> Value:
        return Value(a.data, "i64", a.layout)

    # ---- shapes

    def _inferred(self, operation: str, a: Value, *arguments: object) -> Any:
        return self.layouts.result(operation, a.elem, np.shape(a._data), a.layout, *arguments)[1]

    @staticmethod
    def _keeps_product(a: Value, made: Value, change: Callable[[Any], Any]) -> Value:
        if a.product is not None:
            made.product = a.product.reshaped(change)
        return made

    def create_splat(self, ty: Type, a: Value) -> Value:
        made = Value(np.full(ty.shape, a.data), a.elem, ty.layout)
        return self._keeps_product(a, made, lambda data: np.full(ty.shape, data))

    def create_unsplat(self, a: Value) -> Value:
        return Value(np.asarray(a.data).reshape(-1)[0], a.elem)

    def create_broadcast(self, a: Value, ty: Type) -> Value:
        shape, layout = (ty.shape, ty.layout) if isinstance(ty, Type) else (ty, None)
        made = Value(np.broadcast_to(a.data, shape), a.elem, layout)
        return self._keeps_product(a, made, lambda data: np.broadcast_to(data, shape))

    def create_expand_dims(self, a: Value, axis: int) -> Value:
        place = (slice(None),) * axis + (None,)
        made = Value(a.data[place], a.elem, self._inferred("expand_dims", a, axis))
        return self._keeps_product(a, made, lambda data: data[place])

    def create_reshape(self, a: Value, shape: Sequence[int], reorder: bool = False) -> Value:
        return Value(np.reshape(a.data, shape), a.elem, self._inferred("reshape", a, list(shape), reorder))

    def create_trans(self, a: Value, order: Sequence[int]) -> Value:
        return Value(np.transpose(a.data, order), a.elem, self._inferred("trans", a, list(order)))

    def create_join(self, a: Value, b: Value) -> Value:
        return Value(np.stack([a.data, b.data], -1), a.elem, self._inferred("join", a))

    def create_split(self, a: Value) -> tuple[Value, Value]:
        layout = self._inferred("split", a)
        return Value(a.data[..., 0], a.elem, layout), Value(a.data[..., 1], a.elem, layout)

    def create_cat(self, a: Value, b: Value, ty: Type | None = None) -> Value:
        return Value(np.concatenate([a.data, b.data]), a.elem, ty.layout if ty else None)

    def create_make_range(self, ty: Type, low: int, high: int) -> Value:
        return Value(np.arange(low, high, dtype=np.int32), "i32", ty.layout)

    def create_convert_layout(self, ty: Type, a: Value) -> Value:
        self.machine.threads_meet()
        return Value(a.data if self.ctas == 1 else self.converted(a, ty.layout), a.elem, ty.layout)

    def create_set_auto_layout(self, layout: object, a: Value) -> Value:
        return Value(a.data, a.elem, layout)

    def is_convert_layout_trivial(self, ty: Type, a: Value) -> bool:
        return self.layouts.trivial(a.elem, ty.shape, a.layout, ty.layout)

    def get_gluon_layout_from_tensor(self, a: Value) -> object:
        return self.layouts.of_tensor(np.shape(a._data), a.layout)

    def create_fp4_to_fp(self, a: Value, ty: Type, axis: int) -> Value:
        data = unpacked(unsigned(np.asarray(a.data)), axis).astype(COMPUTED[ty.elem])
        return Value(data, ty.elem, self._inferred("fp4_to_fp", a, self.layouts.elem(ty.elem), axis))

    def create_gather(self, a: Value, index: Value, axis: int) -> Value:
        self.machine.threads_meet()
        wanted, size = np.asarray(index.data, np.int64), np.shape(a.data)[axis]
        outside = (wanted < 0) | (wanted >= size)
        if (held := self.held(wanted.shape, index.layout)) is not None:
            outside = outside & held
        if outside.any():
            at = f"index {wanted[outside][0]} into {size} elements ({outside.sum()} indices outside)"
            self.machine.report("bounds", f"gather: {at}, at {place_text(self.machine.place())}")
        wanted = np.clip(wanted, 0, size - 1)
        return Value(np.take_along_axis(a.data, wanted, axis), a.elem, index.layout)

    def create_histogram(self, a: Value, bins: int, mask: Value | None, layout: object = None) -> Value:
        self.machine.threads_meet()
        if a.elem != "i32":
            bits, where = 8 * BYTES[a.elem], place_text(self.machine.place())
            text = f"a histogram of {bits}-bit integers, which Triton does not compile: convert to int32 first"
            self.machine.report("compiler", f"{text}, at {where}")
        data = a.data if mask is None else a.data[np.broadcast_to(mask.data, a.data.shape)]
        data = unsigned(np.asarray(data))  # the signs of the type are not known here; no bin is negative
        inside = data[data < bins].astype(np.int64)
        return Value(np.bincount(inside, minlength=bins).astype(np.int32), "i32", layout)

    # ---- several operands

    def create_select(self, condition: Value, a: Value, b: Value) -> Value:
        self.spend_math(condition)
        if is_pointer(a.elem):
            self.machine.loaded_pointers = True
        return Value(_scalar(np.where(condition.data, a.data, b.data)), a.elem, a.layout or condition.layout)

    def create_fma(self, a: Value, b: Value, c: Value) -> Value:
        self.spend_math(a)
        if c.elem == "fp64":
            done = _fused(a.data, b.data, c.data)
        else:
            product = np.asarray(a.data, np.float64) * b.data  # exact: the product of two float32 fits float64
            done = rounded(_sum_to_odd(product, np.asarray(c.data, np.float64)), c.elem).astype(COMPUTED[c.elem])
        return Value(_scalar(done), c.elem, a.layout)

    def create_clampf(self, x: Value, low: Value, high: Value, nan: object) -> Value:
        pick_max, pick_min = (np.maximum, np.minimum) if nan == ir.PROPAGATE_NAN.ALL else (np.fmax, np.fmin)
        return Value(pick_min(pick_max(x.data, low.data), high.data), x.elem, x.layout)

    def create_umulhi(self, a: Value, b: Value) -> Value:
        bits = np.asarray(a.data).dtype.itemsize * 8
        wide = unsigned(np.asarray(a.data)).astype(object) * unsigned(np.asarray(b.data)).astype(object)
        high = np.asarray(wide >> bits).astype(f"u{bits // 8}").view(COMPUTED[a.elem])
        return Value(_scalar(high), a.elem, a.layout)

    def create_inline_asm(
        self, text: str, constraints: str, arguments: list[Value], types: list[Type], pure: bool, pack: int
    ) -> object:
        bits = [np.asarray(a.data) if is_pointer(a.elem) else to_bits(a.data, a.elem) for a in arguments]
        layout, shape = (arguments[0].layout, np.shape(bits[0])) if arguments else (None, ())
        order = self.layouts.registers(shape, layout, pack) if pack > 1 else None
        held = None if pure or not shape else self.held(shape, layout)  # what the running CTA's threads execute
        if held is not None:
            order = np.arange(held.size)[:, None] if order is None else order
            order = order[held.reshape(-1)[order].all(axis=-1)]
            order = order.reshape(-1) if pack == 1 else order
        if order is not None:
            bits = [np.broadcast_to(a, shape).reshape(-1)[order] for a in bits]
        outputs = [
            np.asarray(out) for out in ptx.run(text, constraints, bits, [STORED[ty.elem] for ty in types], pack, self)
        ]
        if order is not None:
            outputs = [_put(out, order, shape) for out in outputs]
        for a in arguments[:1]:
            self.spend_math(a)
        return Results(
            [Value(_scalar(from_bits(out, ty.elem)), ty.elem, layout) for out, ty in zip(outputs, types, strict=True)]
        )

    def create_extern_elementwise(
        self, library: str, path: str, symbol: str, arguments: list[Value], ty: Type, pure: bool
    ) -> Value:
        self.spend_math(arguments[0], _EXP_LANES)
        data = libdevice.call(symbol, [np.asarray(a.data) for a in arguments], np.dtype(COMPUTED[ty.elem]))
        return Value(_scalar(data), ty.elem, arguments[0].layout)


def _put(values: np.ndarray, places: np.ndarray, shape: tuple) -> np.ndarray:
    """An array of this shape with `values` at the given `places`."""
    out = np.empty(math.prod(shape), values.dtype)
    out[places] = values
    return out.reshape(shape)


def _sum_to_odd(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x + y in float64, rounded to odd where inexact, so that a second rounding to fewer bits is correctly rounded."""
    near = np.asarray(x + y)
    back = near - x
    error = (x - (near - back)) + (y - back)  # exact (Knuth's TwoSum)
    away = np.where(error > 0, np.inf, -np.inf)
    return np.where(~np.isfinite(near) | (error == 0) | (near.view(np.uint64) & 1 == 1), near, np.nextafter(near, away))


def _fused(x: ArrayLike, y: ArrayLike, z: ArrayLike) -> np.ndarray:
    """x * y + z in float64, rounded once."""

    def one(*xyz: float) -> float:
        if not np.all(np.isfinite(xyz)):
            return xyz[0] * xyz[1] + xyz[2]
        exact = Fraction(xyz[0]) * Fraction(xyz[1]) + Fraction(xyz[2])
        return float(exact) if exact and abs(exact) < Fraction(2) ** 1024 else xyz[0] * xyz[1] + xyz[2]

    return np.vectorize(one, otypes=[np.float64])(x, y, z)


class Results:
    """An operation with several results, in the form that the semantic layer expects."""

    def __init__(self, values: list[Value]):
        self.values = values

    def get_result(self, index: int) -> Value:
        return self.values[index]


# ---- tables of the element-wise operations


def _binary(
    compute: Callable, out: str | None = None, as_unsigned: bool = False, divides: bool = False
) -> Callable[..., Value]:
    def operation(self: Arithmetic, a: Value, b: Value) -> Value:
        x, y = a.data, b.data
        if a.elem in _FP8:
            self.report_fp8(a.elem)
        if as_unsigned:
            x, y = unsigned(np.asarray(x)), unsigned(np.asarray(y))
        if divides and a.elem[0] == "i" and not np.all(y):
            self.machine.report("assert", f"integer division by zero at {place_text(self.machine.place())}")
            y = np.where(y == 0, y.dtype.type(1), y)
        result = compute(x, y)
        if self.machine.mode == "timed":
            self.spend_math(a)
        layout = a.layout or b.layout
        if out:
            return Value(result, out, layout)
        if a.elem in _NARROW:
            return Value(rounded(result, a.elem), a.elem, layout)
        wanted = computed_type(a.elem)
        if result.dtype != wanted:
            result = np.asarray(result).view(wanted) if as_unsigned else result.astype(wanted)
        return Value(_scalar(result), a.elem, layout)

    return operation


def _noting_overflow(name: str, plain: Callable[..., Value]) -> Callable[..., Value]:
    """An operation on integers that notes where int32 overflows: a report of an address out of bounds names it."""
    exact = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[name]

    def operation(self: Arithmetic, a: Value, b: Value) -> Value:
        made = plain(self, a, b)
        if a.elem == "i32" and np.any(exact(a.data, b.data, dtype=np.int64) != made.data):
            self.machine.wrapped.setdefault(place_text(self.machine.place()), name)
        return made

    return operation


def _contracted(name: str, plain: Callable[..., Value]) -> Callable[..., Value]:
    """A product that remembers its factors, or a sum that looks for a product among its operands."""

    def operation(self: Arithmetic, a: Value, b: Value) -> Value:
        made = plain(self, a, b)
        if self.contracts:
            if name == "fmul":
                self.remember(a, b, made)
            else:
                return self.fused(a, b, made, subtracts=name == "fsub")
        return made

    return operation


def _unary(compute: Callable, lanes: int = _LANES) -> Callable[..., Value]:
    def operation(self: Arithmetic, a: Value) -> Value:
        result = np.asarray(compute(a.data))
        self.spend_math(a, lanes)
        return Value(
            _scalar(np.asarray(rounded(result, a.elem)).astype(COMPUTED[a.elem], copy=False)), a.elem, a.layout
        )

    return operation


def _truncated(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Integer division that truncates towards zero, as in C."""
    return np.floor_divide(x, y) + ((np.fmod(x, y) != 0) & ((x < 0) != (y < 0))).astype(x.dtype)


def _flushed(x: np.ndarray) -> np.ndarray:
    """Subnormal float32 inputs read as zero: Triton calls libdevice's functions with ftz (confirmed on an H200)."""
    return (
        np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)
        if x.dtype == np.float32
        else x
    )


_FLOAT = dict(fadd=np.add, fsub=np.subtract, fmul=np.multiply, fdiv=np.divide, precise_divf=np.divide, frem=np.fmod,
              maximumf=np.maximum, minimumf=np.minimum, maxnumf=np.fmax, minnumf=np.fmin)  # fmt: skip
_SIGNED = dict(
    add=np.add,
    sub=np.subtract,
    mul=np.multiply,
    shl=np.left_shift,
    ashr=np.right_shift,
    maxsi=np.maximum,
    minsi=np.minimum,
    xor=np.bitwise_xor,
    **{"and": np.bitwise_and, "or": np.bitwise_or},
)
_UNSIGNED = dict(lshr=np.right_shift, maxui=np.maximum, minui=np.minimum)
_COMPARISONS = dict(EQ=np.equal, NE=np.not_equal, LT=np.less, LE=np.less_equal, GT=np.greater, GE=np.greater_equal)
_SPECIAL = dict(
    exp=np.exp,
    exp2=np.exp2,
    log=np.log,
    log2=np.log2,
    cos=np.cos,
    sin=np.sin,
    sqrt=np.sqrt,
    precise_sqrt=np.sqrt,
    rsqrt=lambda x: np.float32(1) / np.sqrt(x),
    erf=lambda x: libdevice.erf(x).astype(np.asarray(x).dtype),
)


def _of_rows(function: Callable) -> Callable:
    """Make `function` independent of strides: NumPy's code for strided arrays differs in the last bit."""
    return lambda x: function(np.asarray(x, order="C"))


_PLAIN = dict(
    floor=lambda x: np.floor(_flushed(x)),
    ceil=lambda x: np.ceil(_flushed(x)),
    fabs=np.abs,
    iabs=np.abs,
    fneg=np.negative,
)

for _name, _compute in {**_FLOAT, **_SIGNED}.items():
    setattr(Arithmetic, "create_" + _name, _binary(_compute))
for _name in ("add", "sub", "mul"):
    setattr(Arithmetic, "create_" + _name, _noting_overflow(_name, getattr(Arithmetic, "create_" + _name)))
for _name in ("fadd", "fsub", "fmul"):
    setattr(Arithmetic, "create_" + _name, _contracted(_name, getattr(Arithmetic, "create_" + _name)))
for _name, _compute in _UNSIGNED.items():
    setattr(Arithmetic, "create_" + _name, _binary(_compute, as_unsigned=True))
for _name, _compute, _is_unsigned in (
    ("sdiv", _truncated, False),
    ("srem", np.fmod, False),
    ("udiv", np.floor_divide, True),
    ("urem", np.mod, True),
):
    setattr(Arithmetic, "create_" + _name, _binary(_compute, as_unsigned=_is_unsigned, divides=True))
for _name, _compute in _COMPARISONS.items():
    # NaN is unequal to everything; every other relation with NaN is false
    _prefix = "fcmpU" if _name == "NE" else "fcmpO"
    setattr(Arithmetic, f"create_{_prefix}{_name}", _binary(_compute, "i1"))
    for _prefix, _is_unsigned in (("icmp", False),) if _name in ("EQ", "NE") else (("icmpS", False), ("icmpU", True)):
        setattr(Arithmetic, f"create_{_prefix}{_name}", _binary(_compute, "i1", as_unsigned=_is_unsigned))
for _name, _compute in _SPECIAL.items():
    setattr(Arithmetic, "create_" + _name, _unary(_of_rows(_compute), _EXP_LANES))
for _name, _compute in _PLAIN.items():
    setattr(Arithmetic, "create_" + _name, _unary(_compute))
