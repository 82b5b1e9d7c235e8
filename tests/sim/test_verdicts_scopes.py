"""Verdicts on scopes: an atomic, a strong access or a fence of scope cta or cluster synchronises with nobody beyond."""

import pytest
import torch

from strobe.kernels.device.dialect import gl, gluon

from .test_verdicts_grid import SIZE, index, ptx


@gluon.jit
def store(flag, order: gl.constexpr):
    gl.inline_asm_elementwise(
        "st." + order + ".b32 [$1], $2; mov.u32 $0, 0;", "=r,l,r", [flag, 1], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def load(flag, order: gl.constexpr):
    return gl.inline_asm_elementwise(
        "ld." + order + ".b32 $0, [$1];", "=r,l", [flag], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def give(data, flag, out, how: gl.constexpr, scope: gl.constexpr, other: gl.constexpr):
    gl.store(data + index(), index())  # @give
    if how == "atomics":
        gl.atomic_xchg(flag, 1, sem="release", scope=scope)  # @give-atomic
    elif how == "strong":
        store(flag, "release." + scope)  # @give-strong
    else:
        ptx("fence.acq_rel." + scope)
        gl.atomic_xchg(flag, 1, sem="relaxed")


@gluon.jit
def take(data, flag, out, how: gl.constexpr, scope: gl.constexpr, other: gl.constexpr):
    if how == "atomics":
        while gl.atomic_add(flag, 0, sem="acquire", scope=other) == 0:  # @take-atomic
            pass
    elif how == "strong":
        while load(flag, "acquire." + other) == 0:  # @take-strong
            pass
    else:
        while gl.atomic_add(flag, 0, sem="relaxed") == 0:
            pass
        ptx("fence.acq_rel." + other)
    gl.store(out + index(), gl.load(data + index()))  # @take


@gluon.jit
def two_ctas_kernel(data, flag, out, how: gl.constexpr, scope: gl.constexpr, other: gl.constexpr):
    if gl.program_id(0) == 0:
        give(data, flag, out, how, scope, other)
    else:
        take(data, flag, out, how, scope, other)


@gluon.jit
def one_cta_kernel(data, flag, out, how: gl.constexpr, scope: gl.constexpr, other: gl.constexpr):
    gl.warp_specialize(
        [(give, (data, flag, out, how, scope, other)), (take, (data, flag, out, how, scope, other))], [4], [64]
    )


def hand_over(kernel, ctas, *constants):
    data, flag, out = (torch.zeros(size, dtype=torch.int32) for size in (SIZE.value, 1, SIZE.value))
    kernel[(ctas,)](data, flag, out, *constants, num_warps=4)
    assert torch.equal(out, torch.arange(SIZE.value, dtype=torch.int32))


ON_DATA = ("race", "on data", "load by", "@take", "store by", "@give")
NARROW = {
    "atomics": [("race", "on flag", "of scope cta", "@give-atomic"), ON_DATA],
    "strong": [("race", "on flag", "@give-strong", "@take-strong"), ON_DATA],
    "fences": [ON_DATA],
}
SCOPES = [
    *((how, *pair) for how in NARROW for pair in (("gpu", "gpu"), ("cta", "cta"), ("cta", "gpu"), ("gpu", "cta"))),
    *(("strong", *pair) for pair in (("sys", "gpu"), ("cluster", "cluster"), ("cluster", "gpu"))),
]


@pytest.mark.parametrize("how, scope, other", SCOPES)
def test_between_ctas(verdict, how, scope, other):
    def start():
        data, flag, out = (torch.zeros(size, dtype=torch.int32) for size in (SIZE.value, 1, SIZE.value))
        two_ctas_kernel[(2,)](data, flag, out, how, scope, other, num_warps=4)

    narrow = {scope, other} & {"cta", "cluster"}
    verdict(start, *(NARROW[how] if narrow else []), seeds=3)


@pytest.mark.parametrize("how, scope, other", SCOPES)
def test_within_a_cta(verdict, how, scope, other):
    """Every scope reaches the partitions of one CTA."""
    verdict(lambda: hand_over(one_cta_kernel, 1, how, scope, other), seeds=3)


@gluon.jit
def pass_on(data, flags, out, first: gl.constexpr, second: gl.constexpr):
    while gl.atomic_add(flags, 0, sem="acquire") == 0:
        pass
    gl.atomic_xchg(flags + 1, 1, sem="release", scope=first)


@gluon.jit
def use(data, flags, out, first: gl.constexpr, second: gl.constexpr):
    while gl.atomic_add(flags + 1, 0, sem="acquire", scope=second) == 0:
        pass
    gl.store(out + index(), gl.load(data + index()))


@gluon.jit
def chain_kernel(data, flags, out, first: gl.constexpr, second: gl.constexpr):
    if gl.program_id(0) == 0:
        gl.store(data + index(), index())
        gl.atomic_xchg(flags, 1, sem="release")
    else:
        gl.warp_specialize(
            [(pass_on, (data, flags, out, first, second)), (use, (data, flags, out, first, second))], [4], [64]
        )


@pytest.mark.parametrize("first", ("cta", "gpu"))
@pytest.mark.parametrize("second", ("cta", "gpu"))
def test_what_one_partition_has_acquired_another_gets_from_it(verdict, first, second):
    def start():
        data, flags, out = (torch.zeros(size, dtype=torch.int32) for size in (SIZE.value, 2, SIZE.value))
        chain_kernel[(2,)](data, flags, out, first, second, num_warps=4)
        assert torch.equal(out, torch.arange(SIZE.value, dtype=torch.int32))

    verdict(start, seeds=3)
