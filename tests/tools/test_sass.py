"""Reading machine code: an instruction counts by its name, and a role's inner loop holds what a turn of it may run, no
more.
"""

import pytest

pytest.importorskip("triton")

from tools.proof.sass import KINDS, ROLES, count, loops

DISPATCH = """
        USETMAXREG.DEALLOC.CTAPOOL 0x50
.L_again:
        LDS.U8 R4, [R4+UR5]
        @P0 BRA `(.L_again)
        BRX R4 -0x1a0
"""
END = """
        EXIT
"""


def sass(text: str) -> str:
    """As the disassembler writes it: an address before each instruction, a semicolon behind it."""
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(
        line if line.endswith(":") else f"        /*{16 * n:04x}*/                   {line.strip()} ;"
        for n, line in enumerate(lines)
    )


def found(text: str) -> list[tuple[str, int, int, dict[str, int]]]:
    return [
        (loop.role, loop.total, loop.least, {k: n for k, n in loop.kinds.items() if n}) for loop in loops(sass(text))
    ]


def test_instructions_are_counted_by_name_not_by_part_of_a_name():
    names = (
        "HGMMA.64x64x16.F32",
        "@P0 HMMA.16816",
        "UTCHMMA gdesc",
        "UTCQMMA.2CTA",
        "@!UP0 UTMALDG.2D",
        "MUFU.EX2",
        "MUFU.EX2.F16",
        "MUFU.RCP",
    )
    counted = {"HGMMA": 1, "UTCMMA": 2, "HMMA": 1, "DMMA": 0, "MUFU.EX2": 2, "UTMALDG": 1, "LDGSTS": 0}
    assert count(sass("\n".join(f"{name} R1, R2" for name in names))) == counted
    assert count("") == {}


def test_kinds_of_arithmetic_are_told_apart():
    body = """
.L_a:
        FFMA R1, R1, R2, R3
        FADD.FTZ R1, R1, R2
        FMUL R1, R1, R2
        FFMA.SAT R1, R1, R2, R3
        FFMA2 R4, R4, R6, R8
        FADD2.FTZ R4, R4, R6
        FMNMX R1, R1, R2
        MUFU.EX2 R1, R1
        MUFU.RCP R1, R1
        LDL R1, [R2]
        STL.64 [R2], R4
        LDTM.x32 R4, tmem[UR4]
        STTM.x16 tmem[UR4], R4
        SYNCS.ARRIVE.TRANS64 RZ, [UR4], RZ
        @P0 BRA `(.L_a)
"""
    kinds = {"EX2": 1, "float": 4, "float x2": 2, "LDTM": 1, "STTM": 1, "LDL": 1, "STL": 1}
    assert found(DISPATCH + body + END) == [("softmax", 15, 15, kinds)]


def test_an_exponential_alone_makes_no_softmax():
    """The sum of a row's weights takes a sink's in after the last tile, in the role that corrects."""
    body = ".L_a:\n MUFU.EX2 R1, R1\n LDTM.x32 R4, tmem[UR4]\n {}\n @P0 BRA `(.L_a)"
    for third, roles in (
        ("NOP", []),
        ("STTM.x32 tmem[UR4], R4", ["softmax"]),
        ("HGMMA.64x64x16.F32 R24, R4, gdesc[UR8], R24", ["softmax"]),
    ):
        assert [role for role, *_ in found(DISPATCH + body.format(third) + END)] == roles


def test_the_inner_loop_counts_and_the_loop_over_tiles_does_not():
    text = """
.L_tiles:
        UTMALDG.4D [UR8], [UR6]
.L_keys:
        UTMALDG.4D [UR8], [UR6]
        BRA.U UP1, `(.L_keys)
        BRA `(.L_tiles)
"""
    assert found(DISPATCH + text + END) == [("load", 2, 2, {})]


def test_a_wait_that_spins_behind_the_end_is_not_of_the_turn_and_no_loop():
    """Its way back leads from the end of the code to the middle: taken as it stands, that is a loop over all that lies
    between.
    """
    text = """
.L_keys:
        SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R5
        @!P1 BRA `(.L_spin)
.L_ready:
        UTCHMMA gdesc[UR20], gdesc[UR22], tmem[UR15], tmem[UR40], idesc[UR41], !UPT
        BRA.U UP0, `(.L_keys)
.L_other:
        UTMASTG.4D [UR8], [UR6]
        BRA `(.L_other)
        EXIT
.L_spin:
        SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R5
        @!P1 BRA `(.L_spin)
        BRA `(.L_ready)
.L_trap:
        BRA `(.L_trap)
"""
    assert found(DISPATCH + text) == [("mma", 4, 4, {"MMA": 1, "waits": 1}), ("store", 2, 2, {})]


def test_a_wait_that_spins_within_the_loop_is_of_it_and_none_of_its_own():
    """So is one in front of all else: a loop may be one block that begins with a wait."""
    assert found(
        DISPATCH + ".L_a:\n SYNCS.PHASECHK.TRANS64 P1, [UR4], R5\n UTMASTG.2D [UR8]\n @P0 BRA `(.L_a)" + END
    ) == [("store", 3, 3, {"waits": 1})]
    text = """
.L_keys:
        UTMALDG.2D [UR8], [UR6]
.L_spin:
        SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R5
        @!P1 BRA `(.L_spin)
        @P0 BRA `(.L_keys)
"""
    assert found(DISPATCH + text + END) == [("load", 4, 4, {"waits": 1})]


def test_the_shortest_turn_leaves_out_what_may_be_skipped():
    text = """
.L_keys:
        NOP
        @!P4 BRA `(.L_skip)
        LDTM.x32 R36, tmem[UR11]
        FMUL R36, R36, R4
        STTM.x32 tmem[UR11], R36
.L_skip:
        BRA.U !UP1, `(.L_out)
        BRA `(.L_keys)
.L_out:
"""
    assert found(DISPATCH + text + END) == [("correct", 7, 4, {"float": 1, "LDTM": 1, "STTM": 1})]


def test_a_branch_without_a_predicate_is_not_passed_and_one_with_is():
    """`BRA.U UP0, label` and `@P0 BRA label` may fall through into a loop's copy; `BRA label` may not."""
    text = """
.L_a:
        UTMASTG.2D [UR8], [UR6]
        {branch} `(.L_b)
        NOP
        BRA `(.L_a)
.L_b:
        NOP
"""
    assert found(DISPATCH + text.format(branch="BRA") + END) == []
    for branch in ("@P0 BRA", "BRA.U !UP0,", "BRA.DIV UR4,"):
        assert found(DISPATCH + text.format(branch=branch) + END) == [("store", 4, 4, {})], branch


def test_roles_that_go_back_to_the_dispatch_do_not_make_one_loop():
    text = """
.L_a:
        UTMALDG.2D [UR8], [UR6]
        @P0 BRA `(.L_a)
        BRA `(.L_again)
.L_b:
        UTMASTG.2D [UR8], [UR6]
        @P0 BRA `(.L_b)
        BRA `(.L_again)
"""
    assert found(DISPATCH + text + END) == [("load", 2, 2, {}), ("store", 2, 2, {})]


def test_a_kernel_whose_warps_have_no_roles_has_none():
    text = DISPATCH.replace("USETMAXREG", "NOP") + ".L_a:\n UTMALDG.2D [UR8], [UR6]\n @P0 BRA `(.L_a)\n" + END
    assert found(text) == [] == loops("")


def test_every_role_and_kind_is_known_by_name():
    assert list(ROLES) == ["softmax", "correct", "mma", "store", "load"]  # who stores may load what it adds to
    assert not {"role", "total", "least"} & set(KINDS)
