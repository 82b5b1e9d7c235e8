"""PTX that touches memory or synchronises, in program order, and text that is refused."""

import numpy as np
import pytest

from strobe.sim.ptx import BFLOAT16, run

# ---------------------------------------------------------------- effects


class Recorder:
    """A machine that writes down what it is asked"""

    def __init__(self):
        self.calls = []

    def barrier(self, number, threads, wait):
        self.calls.append(("barrier", number, threads, wait))

    def fence(self, name):
        self.calls.append(("fence", name))

    def bulk_commit(self):
        self.calls.append(("commit",))

    def bulk_wait(self, pending, read):
        self.calls.append(("wait", pending, read))

    def load(self, address, dtype, mask, order):
        self.calls.append(("load", list(address), dtype, None if mask is None else list(mask), order))
        return address.astype(dtype)

    def store(self, address, value, mask, order):
        self.calls.append(
            ("store", list(address), value.dtype, list(value), None if mask is None else list(mask), order)
        )

    def atomic(self, operation, address, operands, mask, order, returns):
        values = [(operand.dtype, operand.tolist()) for operand in operands]
        self.calls.append(
            ("atomic", operation, list(address), values, None if mask is None else list(mask), order, returns)
        )
        return (address + 1).astype(operands[0].dtype) if returns else None


ADDRESSES = np.array([128, 256], np.int64)


def effects(text, constraints, arguments, dtypes=(np.int32,)):
    machine = Recorder()
    return run(text, constraints, arguments, dtypes, 1, machine), machine.calls


def test_synchronisation_in_program_order():
    text = """bar.sync 3, 128; barrier.sync.aligned 2; bar.arrive 4, 256; barrier.arrive 5, $1;
        fence.proxy.async; fence.proxy.async.shared::cta; fence.acq_rel.gpu; fence.sc.sys; membar.gl;
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 1; cp.async.bulk.wait_group.read 0;
        nanosleep.u32 20; griddepcontrol.wait; griddepcontrol.launch_dependents; mov.u32 $0, 0;"""
    _, calls = effects(text, "=r,r", [np.full(2, 64, np.int32)])
    fences = ["fence.proxy.async", "fence.proxy.async.shared::cta", "fence.acq_rel.gpu", "fence.sc.sys", "membar.gl"]
    barriers = [(3, 128, True), (2, None, True), (4, 256, False), (5, 64, False)]
    assert calls == [
        *(("barrier", *b) for b in barriers),
        *(("fence", f) for f in fences),
        ("commit",),
        ("wait", 1, False),
        ("wait", 0, True),
    ]


def test_synchronisation_under_a_predicate():
    text = "{ .reg .pred p; setp.gt.s32 p, $1, 0; mov.u32 $0, 0; @p bar.sync 1, 32; }"
    assert effects(text, "=r,r", [np.array([1, 2], np.int32)])[1] == [("barrier", 1, 32, True)]
    assert effects(text, "=r,r", [np.array([0, -2], np.int32)])[1] == []
    with pytest.raises(ValueError, match=r"line 1: 'bar.sync' synchronises, and its predicate holds for some"):
        effects(text, "=r,r", [np.array([1, 0], np.int32)])


@pytest.mark.parametrize(
    "opcode, order, dtype",
    [
        ("ld.global.b32", "weak", np.uint32),
        ("ld.global.volatile.u32", "volatile", np.uint32),
        ("ld.acquire.gpu.global.s32", "acquire", np.int32),
        ("ld.global.relaxed.sys.f32", "relaxed", np.float32),
    ],
)
def test_loads(opcode, order, dtype):
    (found,), calls = effects(f"{opcode} $0, [$1+16];", "=r,l", [ADDRESSES], [dtype])
    assert calls == [("load", [144, 272], np.dtype(dtype), None, order)]
    assert np.array_equal(found, np.array([144, 272], dtype)) and found.dtype == dtype


def test_vector_loads_and_narrow_ones():
    found, calls = effects("ld.global.v2.f32 {$0, $1}, [$2];", "=f,=f,l", [ADDRESSES], [np.float32, np.float32])
    assert [call[1] for call in calls] == [[128, 256], [132, 260]] and [list(x) for x in found] == [
        [128, 256],
        [132, 260],
    ]
    (found,), _ = effects("ld.global.s8 $0, [$1 + -1];", "=r,l", [ADDRESSES])
    assert list(found) == [127, -1]  # 255 of 8 bits, sign and all
    (found,), _ = effects("ld.global.u8 $0, [$1+-1];", "=r,l", [ADDRESSES])
    assert list(found) == [127, 255]


def test_masked_loads_keep_what_was_there():
    text = "{ .reg .pred p; setp.gt.s32 p, $2, 0; mov.u32 $0, 7; @!p ld.global.u32 $0, [$1]; }"
    (found,), calls = effects(text, "=r,l,r", [ADDRESSES, np.array([1, 0], np.int32)])
    assert list(found) == [7, 256] and calls[0][3] == [False, True]


def test_stores():
    x = np.array([1.5, -2], np.float32)
    text = """{ .reg .b16 h; mov.b32 {h, _}, $2; mov.u32 $0, 0;
        st.global.release.gpu.f32 [$1+4], $2; st.global.v2.f32 [$1], {$2, 1.0}; st.global.b16 [$1], h; }"""
    _, calls = effects(text, "=r,l,f", [ADDRESSES, x])
    f32, u16 = np.dtype(np.float32), np.dtype(np.uint16)
    assert calls == [
        ("store", [132, 260], f32, [1.5, -2], None, "release"),
        ("store", [128, 256], f32, [1.5, -2], None, "weak"),
        ("store", [132, 260], f32, [1, 1], None, "weak"),
        ("store", [128, 256], u16, [0, 0], None, "weak"),
    ]


def test_reductions():
    x = np.array([1.5, -2], np.float32)
    text = """{ .reg .pred p; .reg .b32 h; setp.gt.f32 p, $2, 0.0; mov.u32 $0, 0;
        @p red.global.add.f32 [$1], $2;
        red.release.gpu.global.max.u32 [$1+8], 3;
        cvt.rn.f16x2.f32 h, $2, 1.0;
        red.global.add.noftz.f16x2 [$1], h;
        mov.b32 h, 0x3F804000; red.global.add.noftz.bf16x2 [$1], h; }"""
    _, calls = effects(text, "=r,l,f", [ADDRESSES, x])
    f16 = np.dtype(np.float16)
    assert calls == [
        ("atomic", "add", [128, 256], [(np.dtype(np.float32), [1.5, -2])], [True, False], "relaxed", False),
        ("atomic", "max", [136, 264], [(np.dtype(np.uint32), [3, 3])], None, "release", False),
        ("atomic", "add", [128, 256], [(f16, [1, 1])], None, "relaxed", False),
        ("atomic", "add", [130, 258], [(f16, [1.5, -2])], None, "relaxed", False),
        ("atomic", "add", [128, 256], [(BFLOAT16, [(0x4000,)] * 2)], None, "relaxed", False),
        ("atomic", "add", [130, 258], [(BFLOAT16, [(0x3F80,)] * 2)], None, "relaxed", False),
    ]


def test_vector_reductions_of_packed_elements():
    machine, address, x = Recorder(), np.arange(8, dtype=np.int64) * 4, np.arange(8, dtype=np.float32)
    text = "red.global.add.v4.f32 [$4], {$8, $9, $10, $11}; mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0;"
    (zeros,) = run(text, "=r,=r,=r,=r,l,l,l,l,f,f,f,f", [address, x], [np.int32], 4, machine)
    assert zeros.shape == (8,) and not zeros.any()
    assert [(call[2], call[3][0][1]) for call in machine.calls] == [([4 * i, 16 + 4 * i], [i, 4 + i]) for i in range(4)]


def test_vectors_of_pairs_are_one_call_a_half():
    text = "red.global.add.noftz.v2.f16x2 [$1], {$2, $3}; mov.u32 $0, 0;"
    _, calls = effects(
        text, "=r,l,r,r", [ADDRESSES, np.full(2, 0x40003C00, np.int32), np.full(2, 0x44004200, np.int32)]
    )
    assert [(call[2], call[3][0][1]) for call in calls] == [
        ([128 + 2 * i, 256 + 2 * i], [1 + i, 1 + i]) for i in range(4)
    ]


def test_atomics_return_the_old_value():
    (old,), calls = effects(
        "atom.global.acq_rel.gpu.cas.b32 $0, [$1], 5, $2;", "=r,l,r", [ADDRESSES, np.array([8, 9], np.int32)]
    )
    assert list(old) == [129, 257]
    u32 = np.dtype(np.uint32)
    assert calls == [("atomic", "cas", [128, 256], [(u32, [5, 5]), (u32, [8, 9])], None, "acq_rel", True)]
    (old,), calls = effects(
        "atom.global.add.noftz.f16x2 $0, [$1], $2;", "=r,l,r", [ADDRESSES, np.array([0, 0], np.int32)]
    )
    assert len(calls) == 2
    assert np.array_equal(old[:, None].view(np.float16), [[129, 131], [257, 259]])
    effects("atom.global.exch.b32 _, [$1], $2; mov.u32 $0, 0;", "=r,l,r", [ADDRESSES, np.array([0, 0], np.int32)])


def test_a_scalar_address_is_asked_once_an_element():
    _, calls = effects(
        "red.global.add.u32 [$1], $2; mov.u32 $0, 0;", "=r,l,r", [np.int64(64), np.arange(3, dtype=np.int32)]
    )
    assert calls[0][2] == [64, 64, 64]


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "mov.u32 $0, 0;\nfrobnicate.b32 $0, 1;",
            r"line 2: 'frobnicate.b32' is not supported; supported opcodes: abs, add, .*xor",
        ),
        ("again: mov.u32 $0, 0;", r"line 1: no branch before the label 'again'"),
        ("mov.u32 $0, 0;\n\nbra.uni on; on:", r"line 3: 'bra.uni': is an unconditional branch; give it a predicate"),
        ("elect.sync _|p, 1;", "'elect.sync' is not supported"),
        ("add.b32 $0, 1, 2;", r"'add.b32': has no supported type; supported types: .*s32"),
        ("add.rz.f16x2 $0, 1, 2;", r"rounding .rz of .f16x2"),
        ("add.wide.s32 $0, 1, 2;", r"modifier '.wide' is not supported"),
        ("mul.s32 $0, 1, 2;", "without .lo, .hi or .wide"),
        ("ld.shared.u16 $0, [$1];", r"modifier '.shared'"),
        ("cp.async.cg $0, 1;", "is not a supported copy"),
        ("fence.proxy.tensormap $0;", "is not a supported fence"),
        ("setp.ltu.s32 $0, 1, 2;", "comparison .ltu of .s32"),
        (".shared .b32 x;", "only instructions, labels, .reg and .shared are known"),
        ("cvt.s32.f32 $0, 1.0;", "needs .rni, .rzi"),
        (
            "{ .reg .pred p; AGAIN: setp.eq.s32 p, 1, 1; @!p bra AGAIN; } mov.u32 $0, 0;",
            "is a backward branch; supported is a loop of one mbarrier.try_wait",
        ),
    ],
)
def test_what_is_not_known_is_said(text, message):
    with pytest.raises(NotImplementedError, match=message):
        run(text, "=r", [], [np.int32], 1, Recorder())


@pytest.mark.parametrize(
    "text, message",
    [
        ("mov.u32 $0, 0", "does not end with a semicolon"),
        ("{ mov.u32 $0, 0;", "never closed"),
        ("mov.u32 $0, 0; }", "closes nothing"),
        ("mov.u32 $0, t;", "register 't' is not declared"),
        ("{ .reg .b32 t; mov.u32 $0, t; }", "'t' is read before it is written"),
        ("{ .reg .b32 t; mov.u32 t, 0; }", r"output \$0 is never written"),
        ("{ .reg .b64 t; mov.b64 t, 0; add.u32 $0, t, 1; }", "'t' has 64 bits, .u32 has 32"),
        ("add.u32 $0, 1;", "has 2 operands, not 3"),
        ("fma.rn.f32 $0, 1, 2, 3;", r"constant '1' for .f32; write it as 1.0"),
        ("mov.u32 $0, 0x1FFFFFFFF;", "constant '0x1FFFFFFFF' for .u32"),
        ("mov.u32 $0, 0d0000000000000000;", "constant '0d0"),
        ("{ .reg .f32 t; mov.f32 t, 1.0; add.s32 $0, t, 1; }", "'t' and .s32: one is of floats, one of integers"),
        ("mov.u32 $0, 0;;", "'' is not an instruction"),
        ("ld.global.u32 $0, $0;", "'\\$0' is not an address"),
        ("mov.u32 5, 6;", "'5' is not a register"),
        ("cvt.rn.f16x2.f32 $0, 1.0;", "makes 2 lanes of 1"),
    ],
)
def test_what_ptxas_would_refuse_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        run(text, "=r", [], [np.int32], 1, Recorder())


def test_calls_that_do_not_fit_are_refused():
    x = np.zeros((2, 3), np.float32)
    move = "mov.f32 $0, $1;"
    for arguments, dtypes, pack, constraints, message in (
        ([x, np.zeros(3, np.float32)], [np.float32], 1, "=f,f,f", "one shape"),
        ([x], [np.float32], 2, "=f,f", "pack=2 does not divide"),
        ([x, x], [np.float32], 1, "=f,f", "name 1 input registers.* take 2"),
        ([x], [np.float32, np.float32], 1, "=f,f", "name 1 output registers.* take 2"),
        ([x.astype(np.float64)], [np.float32], 1, "=f,f", "64 bits does not fit the 32-bit"),
        ([x], [np.float64], 1, "=f,f", "an output of 64 bits from the 32-bit"),
        ([x], [np.float32], 1, "=f,x", "constraint 'x'"),
    ):
        with pytest.raises(ValueError, match=message):
            run(move, constraints, arguments, dtypes, pack, None)
    with pytest.raises(ValueError, match="writes to '\\$1', an input"):
        run("mov.f32 $0, $1; mov.f32 $1, 0.0;", "=f,f", [x], [np.float32], 1, None)


def test_effects_need_a_machine():
    with pytest.raises(ValueError, match=r"line 1: 'bar.sync' touches memory or synchronises, and machine is None"):
        run("bar.sync 0; mov.u32 $0, 0;", "=r", [], [np.int32], 1, None)
    with pytest.raises(ValueError, match="must be the same for all"):
        effects("bar.sync $1; mov.u32 $0, 0;", "=r,r", [np.array([1, 2], np.int32)])
