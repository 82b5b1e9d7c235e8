"""The library that compiles offline: what it reads off the compiler is what is there, and it sees what is wrong."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton import knobs
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler.code_generator import CodeGenerator
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from strobe.errors import InvalidProblem, KernelFault
from strobe.kernels.runtime import compile_cache
from tools.proof import budget, sass
from tools.proof import compile as proof
from tools.proof.budget import TARGETS, UNITS, Unit
from tools.proof.calls import CASES
from tools.proof.compile import Job, compile_job, launches, recording, report
from tools.proof.record import RESULTS, key, merged, packed, read, recalled

HOPPER = TARGETS["sm_90"]
RECORDED = {key(row): row for row in read(Path(__file__).parents[2] / RESULTS)}


@gluon.jit
def products(out, n, in_flight: gl.constexpr):
    """A chain of wgmma whose accumulator is scaled while `in_flight` of them may still run."""
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    a = gl.allocate_shared_memory(gl.bfloat16, [64, 64], shared)
    b = gl.allocate_shared_memory(gl.bfloat16, [64, 64], shared)
    acc = gl.zeros([64, 64], gl.float32, layout)
    for _ in range(n):
        acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(in_flight, deps=[acc]) * 0.5
    rows, columns = gl.arange(0, 64, gl.SliceLayout(1, layout)), gl.arange(0, 64, gl.SliceLayout(0, layout))
    gl.store(out + rows[:, None] * 64 + columns[None, :], acc)


@triton.jit
def copy(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, at < n), at < n)


@triton.jit
def outer_sum(x, y, SIZE: tl.constexpr):
    """Holds SIZE * SIZE / 32 values a thread of one warp, all in use to the end."""
    at = tl.arange(0, SIZE)
    tile = tl.load(x + at[:, None] * SIZE + at[None, :])
    scale = tl.sum(tl.sum(tile, 1), 0)
    tl.store(y + at[:, None] * SIZE + at[None, :], tile * scale)


@triton.jit
def nonsense(x):
    tl.store(x, tl.not_a_word(1))


@pytest.mark.parametrize("in_flight, serialized", [(0, False), (1, True)])
def test_serialised_wgmma_is_seen(in_flight, serialized):
    one = report("products", products, 90, (torch.empty(64, 64), 4, in_flight), {"num_warps": 4})
    assert one.serialized is serialized
    assert one.instructions["HGMMA"] == 4 and one.shared_bytes == 2 * 64 * 64 * 2 and one.warps == 4


def test_spills_are_seen_and_are_as_many_as_must_be():
    x = torch.empty(128 * 128)
    small, large = (
        compile_job(Job("outer_sum", outer_sum, (x, x, size), (1,), {"num_warps": 1}, HOPPER)) for size in (32, 128)
    )
    assert small.spill_bytes == small.stack_bytes == 0 and 32 < small.registers < 100
    assert large.spill_store_bytes >= (128 * 128 // 32 - 255) * 4  # bytes of the values that can have no register
    assert large.spill_load_bytes >= large.spill_store_bytes and large.stack_bytes > 0


def test_launches_are_noted_and_nothing_runs():
    x, y = torch.zeros(100), torch.ones(100)
    with recording(HOPPER) as jobs:
        copy[(4,)](x, y, 100, BLOCK=32, num_warps=1)
    (job,) = jobs
    assert (job.name, job.grid, job.options, job.target) == ("copy", (4,), {"BLOCK": 32, "num_warps": 1}, HOPPER)
    assert torch.equal(y, torch.ones(100)), "the copy ran"
    one = compile_job(job)
    assert one.capability == 90 and 0 < one.registers < 64 and one.warps == 1
    assert triton.runtime.jit.JITFunction.run.__name__ == "run", "launches are real again"


def test_a_second_compile_is_as_cold_as_the_first_and_says_the_same():
    x = torch.zeros(100)
    job = Job("copy", copy, (x, x, 100, 32), (4,), {}, HOPPER)
    first, second = compile_job(job), compile_job(job)
    assert first._replace(seconds=0) == second._replace(seconds=0)
    assert second.seconds > 0.01, "it came out of a cache"


def test_another_compiled_kernel_where_an_argument_is_another():
    x = torch.zeros(129)
    aligned, crooked = (
        compile_job(Job("copy", copy, (t, t, 128, 128), (1,), {"num_warps": 1}, HOPPER)) for t in (x[:128], x[1:])
    )
    assert aligned.registers != crooked.registers, "specialised for alignment, as a launch would be"


def test_what_does_not_compile_is_a_row_with_its_cause(monkeypatch):
    unit = Unit("portable", "d64 causal", "sm_90")
    (plan, job) = launches(CASES[unit.case]()._replace(kernel="portable"), HOPPER)[0]
    monkeypatch.setattr(
        proof,
        "launches",
        lambda call, target: [(plan, job._replace(kernel=nonsense, arguments=(torch.zeros(1),), options={}))],
    )
    (row,) = proof.rows(unit)
    assert "not_a_word" in row["error"] and "registers" not in row and key(row) == (*unit, "forward_kernel")


def test_a_disassembler_without_the_target_counts_nothing_and_a_wrong_one_is_refused(monkeypatch, tmp_path):
    dumb = tmp_path / "nvdisasm"
    dumb.write_text("#!/bin/sh\nif [ \"$1\" = --version ]; then echo 'release 1.0, V1.0'; else exit 1; fi\n")
    dumb.chmod(0o755)
    with triton.knobs.nvidia.scope():
        proof._use(str(dumb))
        one = report("copy", copy, 90, (torch.zeros(1), torch.zeros(1), 1, 32), {})
        assert (one.instructions, one.roles) == ({}, [])
    with (
        triton.knobs.nvidia.scope(),
        pytest.raises(InvalidProblem, match="--nvdisasm: got /nowhere, expected a program"),
    ):
        proof._use("/nowhere")


@triton.jit
def moved(x, y, n, BLOCK: tl.constexpr):
    """`copy`, on another line."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, at < n), at < n)


@triton.jit
def doubled(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, at < n) * 2, at < n)


def test_a_fingerprint_is_of_the_instructions_alone():
    arguments = torch.zeros(100), torch.zeros(100), 100, 32
    same, another, other = (report("copy", kernel, 90, arguments, {}).code for kernel in (copy, moved, doubled))
    assert len(same) == 16 and same == another != other


@pytest.mark.nightly
def test_what_is_recorded_of_the_same_machine_code_is_not_disassembled_again(monkeypatch):
    unit = Unit("hopper", "d64 causal", "sm_90")
    first = {key(row): row for row in proof.rows(unit, "forward*")}
    (place,) = first
    read_now, recorded = (
        {name: row[name] for name in ("instructions", "roles")} for row in (first[place], RECORDED[place])
    )
    assert read_now == recorded and recorded["roles"] and recorded["instructions"]["HGMMA"]
    told: list[bytes] = []
    monkeypatch.setattr(proof, "disassemble", lambda cubin: told.append(cubin) or "")
    fewer = [{name: n for name, n in role.items() if name != "waits"} for role in first[place]["roles"]]
    # other machine code; a record made where nothing could disassemble it; one that was made when less was looked for
    unlike = {"code": "0" * 16}, {"instructions": {}}, {"roles": fewer}
    elsewhere = {"source": "in other lines of a file"}
    (again,) = proof.rows(unit, "forward*", {place: first[place] | elsewhere})
    assert not told and again | {"seconds": 0} == first[place] | {"seconds": 0}
    for count, change in enumerate(unlike, 1):
        (again,) = proof.rows(unit, "forward*", {place: first[place] | elsewhere | change})
        assert len(told) == count and again["instructions"] == {} and "roles" not in again


def test_a_log_without_figures_is_no_report_of_zeros():
    with pytest.raises(KernelFault, match="ptxas printed neither registers nor spills"):
        proof._taken("ptxas info : nothing to say", "copy")


def test_figures_of_several_functions_are_joined():
    log = """ptxas info    : Function properties for helper
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers
ptxas info    : Function properties for kernel
    16 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 1024 bytes smem, 900 bytes cmem[0]"""
    assert proof._taken(log, "k") == {
        "registers": 168,
        "stack": 24,
        "spill_stores": 12,
        "spill_loads": 20,
        "static": 1024,
    }


def _row(unit: Unit, registers: int) -> dict:
    return {"family": unit.family, "case": unit.case, "target": unit.target, "kernel": "k", "registers": registers}


def test_new_rows_take_the_place_of_old_ones_and_what_is_gone_goes():
    first, last, gone = UNITS[0], UNITS[-1], Unit("portable", "d3 no more", "sm_90")
    old = [_row(last, 1), _row(gone, 2), _row(first, 3)]
    assert merged(old, [_row(last, 4)]) == [_row(first, 3), _row(last, 4)]


def test_the_record_gives_back_every_row(tmp_path):
    unit, counts = UNITS[0], dict.fromkeys(sass.COUNTED, 0)
    loop = {"role": "mma", "total": 9, "least": 5} | dict.fromkeys(sass.KINDS, 0) | {"waits": 2}
    usual = {"spill_store_bytes": 0, "spill_load_bytes": 0, "stack_bytes": 0, "tensor_columns": 0, "serialized": False}
    older = {name: n for name, n in counts.items() if name != "HMMA"}  # a row made before HMMA was counted
    rows = [
        _row(unit, 1) | usual | {"config": "stages=2", "instructions": counts | {"HGMMA": 3}, "roles": [loop, loop]},
        _row(unit, 2) | usual | {"config": "stages=1", "instructions": older, "stack_bytes": 8, "serialized": True},
        _row(unit, 3) | usual | {"config": "stages=2", "instructions": {}},
        _row(unit, 4) | {"config": "stages=1", "error": "does not compile"},
        _row(unit, 5) | {"error": "does not compile"},
    ]
    file = tmp_path / "compiled.jsonl"
    file.write_text(packed(rows))
    assert read(file) == rows and recalled({"code": "1"} | rows[1], "1") is None
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read(file) == rows
    assert read(tmp_path / "none.jsonl") == []


def test_the_record_holds_compile_times_that_a_table_shows_and_one_triton_version_once(tmp_path):
    file, shown = tmp_path / "compiled.jsonl", Unit("portable", budget.ON_EVERY_TARGET, "sm_90")
    usual = {"spill_store_bytes": 0, "spill_load_bytes": 0, "stack_bytes": 0, "tensor_columns": 0, "serialized": False}
    told = usual | {"instructions": {}, "seconds": 1.5}
    rows = [_row(UNITS[0], 1) | told | {"triton": "3.6.0"}, _row(shown, 2) | told | {"triton": "3.6.0"}]
    kept = [{name: value for name, value in rows[0].items() if name != "seconds"}, rows[1]]
    file.write_text(packed(rows))
    assert UNITS[0].case != shown.case and read(file) == kept and file.read_text().count("3.6.0") == 1
    kept[0] = kept[0] | {"triton": "3.9.0"}
    file.write_text(packed(kept))
    assert read(file) == kept
    earlier = {"columns": {"instructions": [], "roles": []}, "configs": ["stages=2"]}, {"kernel": "k", "config": 0}
    file.write_text("".join(f"{json.dumps(line)}\n" for line in earlier))
    assert read(file) == [usual | {"kernel": "k", "config": "stages=2", "instructions": {}}]


def test_the_command_puts_new_rows_in_the_place_of_old_ones_and_fails_over_budget(tmp_path, monkeypatch, capsys):
    results, unit = tmp_path / "compiled.jsonl", Unit("portable", "d128 causal", "sm_90")
    old = [
        _row(unit, 1) | {"kernel": name, "error": "an old one"}
        for name in ("forward_kernel", "delta_kernel", "keys_kernel")
    ]
    results.write_text("".join(json.dumps(row) + "\n" for row in old))
    monkeypatch.setattr(budget, "LEDGER", ())
    chosen = ["--family", "portable", "--target", "sm_90", "--case", "d128 causal", "--kernel", "[dk]e*", "--jobs", "1"]
    assert proof.main([*chosen, "--results", str(results)]) == 1
    kept, delta, keys = read(results)
    assert kept == old[0]
    assert (
        (delta["kernel"], keys["kernel"]) == ("delta_kernel", "keys_kernel")
        and delta["registers"] > 1
        and keys["spill_load_bytes"] > 0
    )
    told = capsys.readouterr().out
    assert (
        "keys_kernel (d128 causal, sm_90): " in told
        and "bytes of spills, expected at most 0" in told
        and "2 kernels compiled, 1 faults" in told
    )


@pytest.mark.parametrize(
    "arguments, words", [(["--case", "d3"], "--case: got 'd3', expected a pattern of"), (["--nvdisasm", "/no"], "/no")]
)
def test_the_command_refuses_what_selects_nothing(tmp_path, capsys, arguments, words):
    with pytest.raises(SystemExit) as exit:
        proof.main([*arguments, "--results", str(tmp_path / "none.jsonl")])
    assert exit.value.code == 2 and words in capsys.readouterr().err
    assert not (tmp_path / "none.jsonl").exists()


def test_what_another_version_compiled_is_not_run(tmp_path):
    """Triton's key on disk holds the text of functions and of constants, not that of what a form answers while a kernel
    is read: rows 43, 87, 88.
    """
    job = next(
        job for _, job in launches(Unit("portable", "d64 dense", "sm_90").call, HOPPER) if job.name == "delta_kernel"
    )
    *others, traits, rows = job.arguments
    hits: list[bool] = []
    with knobs.cache.scope(), knobs.compilation.scope():
        knobs.cache.dir = str(tmp_path)
        knobs.compilation.listener = lambda **said: hits.append(said["cache_hit"])
        for each in (traits, traits, replace(traits, host="of another version")):
            with proof.offline(HOPPER.capability):
                job.kernel.warmup(*others, each, rows, grid=job.grid, **job.options)
    assert hits == [False, True, False]


def test_a_version_is_told_by_all_code_that_forms_answer_by(tmp_path, monkeypatch):
    monkeypatch.setattr(compile_cache, "PACKAGE", tmp_path)
    (tmp_path / "kernels/hopper").mkdir(parents=True)
    (tmp_path / "problem").mkdir()
    places = ("kernels/hopper/traits.py", "problem/mask.py", "problem/problem.py")
    told = set()
    for changed in (None, *places):
        for place in places:
            (tmp_path / place).write_text("one" if place != changed else "another")
        told.add(compile_cache.host_code.__wrapped__())
    assert len(told) == 4
    (tmp_path / "kernels/cpu").mkdir()
    (tmp_path / "kernels/cpu/forward.py").write_text("traits read nothing from kernels that run on CPUs")
    assert compile_cache.host_code.__wrapped__() in told


def test_what_was_compiled_from_the_same_source_is_not_compiled_again(monkeypatch):
    unit = Unit("portable", "d64 dense", "sm_90")
    compiled = []
    monkeypatch.setattr(proof, "compile_job", lambda job, known: compiled.append(job.name) or compile_job(job, known))
    first = {key(row): row for row in proof.rows(unit, "delta*")}
    assert proof.rows(unit, "delta*", first) == list(first.values()) and compiled == ["delta_kernel"]
    for changed in ({"source": "another"}, {"instructions": {}}):
        proof.rows(unit, "delta*", {(*unit, "delta_kernel"): next(iter(first.values())) | changed})
    assert compiled == ["delta_kernel"] * 3


def test_a_source_is_all_that_a_kernel_is_compiled_from():
    job = next(
        job for _, job in launches(Unit("portable", "d64 dense", "sm_90").call, HOPPER) if job.name == "delta_kernel"
    )
    *others, traits, rows = job.arguments
    told = [
        proof.source_of(job.kernel, capability, (*others, replace(traits, **changed), most), job.options | options)
        for capability, changed, most, options in (
            (90, {}, rows, {}),
            (100, {}, rows, {}),
            (90, {"group": 2}, rows, {}),
            (90, {"host": "of another version"}, rows, {}),
            (90, {}, rows * 2, {}),
            (90, {}, rows, {"num_warps": 2}),
            (90, {}, rows, {}),
        )
    ]
    assert len(set(told)) == len(told) - 1 and told[0] == told[-1]
    assert compile_job(job).source == told[0]


def test_what_consumers_share_is_read_once(monkeypatch):
    """The first runs as the program's own warps, of which Triton makes functions by themselves:
    `dialect.warp_specialize` has it make them once.
    """
    read: Counter[str] = Counter()
    visit = CodeGenerator.visit_FunctionDef

    def counted(generator, node):
        read[node.name] += 1
        return visit(generator, node)

    class Enough(Exception):
        pass

    def enough(*_):
        raise Enough

    monkeypatch.setattr(CodeGenerator, "visit_FunctionDef", counted)
    monkeypatch.setattr(CUDABackend, "gluon_to_ttgir", enough)
    (job,) = (
        job for _, job in launches(Unit("hopper", "d64 causal", "sm_90").call, HOPPER) if job.name == "forward_kernel"
    )
    with pytest.raises(Enough):
        compile_job(job)
    assert read["consumer"] == 4, "consumers of these rows"
    once = ("process_tile", "attend", "prologue", "mainloop_step", "epilogue", "store_o")
    assert [read[name] for name in once] == [1] * 6
