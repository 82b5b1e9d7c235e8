"""Compile kernels to machine code without a GPU, and report registers, spills, shared memory and instructions.

A replacement for Triton's driver names the target. Launches are recorded instead of run. Each recorded launch is
compiled with the types, alignments and options of the host code that launches it.

    python -m tools.proof.compile --target sm_90 --case 'd128*'  print some; --roles: the inner loop of each warp role
    python -m tools.proof.compile                                 all: writes results/compiled.jsonl
"""

from __future__ import annotations

import argparse
import hashlib
import io
import itertools
import multiprocessing
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, redirect_stdout
from fnmatch import fnmatchcase
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.errors import TritonError
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from strobe.errors import InvalidProblem, KernelFault, UnsupportedProblem
from strobe.kernels.protocol import Backward, Forward, Plan
from strobe.kernels.runtime import compile_cache
from strobe.problem.append import AppendCall, AppendProblem
from strobe.problem.call import Call
from strobe.problem.decode import DecodeCall, DecodeProblem
from strobe.problem.paged import PagedCall, PagedProblem
from strobe.problem.problem import Problem
from strobe.problem.target import Target
from strobe.selection.select import select

from . import budget
from .budget import FAMILIES, TARGETS, UNITS, Unit
from .operands import clashes
from .record import OF_ROLES, RESULTS, add_results, in_short, key, lines_of_roles, merged, packed, read, recalled, table
from .sass import Loop, Parts, count, disassemble, fingerprint, loops

_SERIALIZED = re.compile(
    r"\(C75(?!19)\d\d\)|instructions are serialized"
)  # except C7519: ptxas added one warpgroup.arrive
_devices = itertools.count(1000)  # a new device number for each compile bypasses Triton's in-memory caches


class Job(NamedTuple):
    """One launch to compile instead of run."""

    name: str
    kernel: Any  # a Triton or Gluon JITFunction
    arguments: tuple
    grid: Any
    options: dict[str, Any]  # keywords of the launch: num_warps, constants
    target: Target


class Report(NamedTuple):
    """The resources and machine code of one kernel on one target."""

    name: str
    capability: int
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    shared_bytes: int  # static and dynamic
    tensor_columns: int  # columns of tensor memory
    warps: int  # of all warp roles together
    serialized: bool  # ptxas had to serialise wgmma
    instructions: dict[str, int]  # counts of COUNTED; empty if the disassembler does not know the target
    roles: list[Loop]  # the inner loop of each warp role
    code: str  # fingerprint of the machine code
    source: str  # `source_of` the job it was compiled for
    seconds: float  # of the compile, with cold caches

    @property
    def spill_bytes(self) -> int:
        return self.spill_store_bytes + self.spill_load_bytes


class _OfflineDriver:
    """The part of a Triton driver that JITFunction.warmup uses."""

    def __init__(self, capability: int):
        self.capability = capability
        self.device = next(_devices)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def offline(capability: int) -> Iterator[_OfflineDriver]:
    """Within the block, Triton compiles for a GPU of this capability."""
    before, here = driver._active, _OfflineDriver(capability)  # reset_active() fails without a GPU's driver
    driver.set_active(cast(DriverBase, here))
    try:
        yield here
    finally:
        driver._active = before


@contextmanager
def recording(target: Target) -> Iterator[list[Job]]:
    """Within the block, launches of Triton and Gluon kernels are appended to the list and do not run.

    >>> with recording(TARGETS["sm_90"]) as jobs:
    ...     pass  # any code that launches kernels, on CPU tensors
    >>> jobs
    []
    """
    jobs: list[Job] = []

    def note(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if not warmup:  # a warm-up compiles a kernel whose launch follows
            jobs.append(Job(kernel.fn.__name__, kernel, arguments, grid, options, target))

    with patch.object(JITFunction, "run", note):
        yield jobs


def _unknown(code: str) -> Parts | None:
    return None


def compile_job(job: Job, known: Callable[[str], Parts | None] = _unknown) -> Report:
    """Compile one launch with cold caches and report its resources. Errors of the compiler propagate.

    known: returns the recorded `Parts` of machine code with a fingerprint, or None. Disassembling takes 0.2 s or more,
    as long as many compiles.
    """
    return report(job.name, job.kernel, job.target.capability, job.arguments, job.options, job.grid, known)


def report(
    name: str, kernel: Any, capability: int, arguments: tuple, options: dict[str, Any], grid: Any = (1,),
    known: Callable[[str], Parts | None] = _unknown,
) -> Report:  # fmt: skip
    """`compile_job` for a launch given by its parts."""
    said = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        offline(capability),
        knobs.cache.scope(),
        knobs.nvidia.scope(),
        redirect_stdout(said),
    ):
        knobs.cache.dir, knobs.nvidia.dump_ptxas_log = folder, True
        start = time.perf_counter()
        compiled = kernel.warmup(*arguments, grid=grid, **options)
        seconds = time.perf_counter() - start
    taken, code, meta = _taken(said.getvalue(), name), fingerprint(compiled.asm["cubin"]), compiled.metadata
    instructions, roles = known(code) or _parts(name, compiled.asm)
    return Report(
        name, capability, taken["registers"], taken["spill_stores"], taken["spill_loads"], taken["stack"],
        taken["static"] + meta.shared,
        getattr(meta, "tmem_size", None) or 0, meta.num_warps, bool(_SERIALIZED.search(said.getvalue())), instructions,
        roles, code,
        source_of(kernel, capability, arguments, options), seconds,
    )  # fmt: skip


def source_of(kernel: Any, capability: int, arguments: tuple, options: dict[str, Any]) -> str:
    """A hash of everything that a kernel is compiled from: text and line numbers of its functions, types, constants,
    options, target, version of Triton. Traits among the constants hold a hash of the package's own code
    (`kernels.runtime.compile_cache`).
    """
    compile_cache.hash_callees_first(kernel)
    parts = [triton.__version__, str(capability)]

    def note(source: Any, target: GPUTarget, options: dict[str, Any]) -> None:
        parts.extend(
            [source.hash(), *(f"{name}={value}" for name, value in options.items() if name != "extern_libs")]
        )  # paths

    with offline(capability) as here:
        kernel.device_caches[here.device]  # creates the cache entry, which sets kernel.compile
        compiling, kernel.compile = kernel.compile, note
        try:
            kernel.warmup(*arguments, grid=(1,), **options)
        finally:
            kernel.compile = compiling
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _parts(name: str, asm: Any) -> Parts:
    """Instruction counts and loops of a kernel's machine code. Raises KernelFault if ptxas overwrites an operand of a
    product.
    """
    sass = disassemble(asm["cubin"])
    if lost := clashes(asm["ptx"], sass):
        raise KernelFault(
            f"{name}: ptxas packs one left operand over another in {', '.join(lost)}; keep the one that outlives a "
            "turn in shared memory"
        )
    return count(sass), loops(sass)


def _taken(log: str, name: str) -> dict[str, int]:
    """The figures in the output of `ptxas -v`: the largest register count of the functions, and the sums of their
    bytes.
    """
    figures = {
        "registers": r"Used (\d+) registers", "stack": r"(\d+) bytes stack frame",
        "spill_stores": r"(\d+) bytes spill stores",
        "spill_loads": r"(\d+) bytes spill loads", "static": r"(\d+) bytes smem",
    }  # fmt: skip
    found = {key: [int(n) for n in re.findall(pattern, log)] for key, pattern in figures.items()}
    if not found["registers"] or not found["spill_stores"]:
        raise KernelFault(
            f"{name}: ptxas printed neither registers nor spills; its output ends in: {log.strip()[-500:]!r}"
        )
    return {key: max(values) if key == "registers" else sum(values) for key, values in found.items()}


def _planned(call: Call | DecodeCall | PagedCall | AppendCall, target: Target) -> Iterator[tuple[Plan | None, Any]]:
    """The plans for `call` (on CPU tensors) on `target`, each with its output tensors."""
    if isinstance(call, AppendCall):
        yield select(AppendProblem.from_call(call), target).forward, None
        return
    choice = select(problem_of(call), target)
    shape, shape_lse = choice.problem.out_shapes
    out, lse = (
        torch.empty(shape, dtype=choice.problem.out_dtype),
        torch.empty(shape_lse, dtype=choice.problem.lse_dtype),
    )
    yield choice.forward, Forward(out, lse)
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype) for t in call[:3])
    yield choice.backward, Backward(out, out, lse, None, dq, dk, dv, torch.empty_like(lse))


def problem_of(call: Call | DecodeCall | PagedCall) -> Problem | DecodeProblem | PagedProblem:
    if isinstance(call, PagedCall):
        return PagedProblem.from_call(call)
    return DecodeProblem.from_call(call) if isinstance(call, DecodeCall) else Problem.from_call(call)


def launches(call: Call | DecodeCall | PagedCall | AppendCall, target: Target) -> list[tuple[Plan, Job]]:
    """The launches of `call` (on CPU tensors) on `target`, each with its plan: forward, and backward if gradients are
    needed. The backward alone where `call.kernel` names one.
    """
    written = _planned(call, target)
    found: list[tuple[Plan, Job]] = []
    for plan, tensors in written:
        if plan is None or (call.kernel.endswith(".backward") and plan.kernel.name != call.kernel):
            continue
        workspace = {buffer.name: torch.empty(buffer.shape, dtype=buffer.dtype) for buffer in plan.buffers}
        with recording(target) as jobs:
            plan.kernel.run(plan, call, tensors, workspace)
        found += [(plan, job) for job in jobs]
    return found


def rows(unit: Unit, kernel: str = "*", recorded: Mapping[tuple[str, ...], dict] | None = None) -> list[dict]:
    """One row for each kernel of the unit whose name matches `kernel`; none if the family does not support the case.

    recorded: older rows by `key`. A kernel with the same source hash is not compiled again. Unchanged machine code is
    not disassembled again.
    """
    try:
        found = launches(unit.call, TARGETS[unit.target])
    except UnsupportedProblem:
        return []
    once = {
        job.name: (plan, job) for plan, job in reversed(found)
    }  # the Hopper backward launches one kernel up to three times, to convert sums
    return [
        _row(unit, *once[name], (recorded or {}).get((*unit, name)))
        for name in reversed(once)
        if fnmatchcase(name, kernel)
    ]


def _row(unit: Unit, plan: Plan, job: Job, recorded: dict | None) -> dict:
    """The kernel's row: its resources, or "error" with the reason why it does not compile."""
    source = source_of(job.kernel, job.target.capability, job.arguments, job.options)
    whole = recorded and recalled(
        recorded, recorded.get("code", "")
    )  # whether the recorded row has all of today's columns
    if recorded and whole and recorded.get("source") == source:
        return recorded
    heading = {
        "family": unit.family,
        "kernel": job.name,
        "case": unit.case,
        "target": unit.target,
        "config": str(plan.config),
    }
    try:
        facts = compile_job(job, partial(recalled, recorded or {}))._asdict()
    except (TritonError, RuntimeError) as error:  # from the language, ptxas and the compiler's passes
        return heading | {"error": _cause(error), "triton": triton.__version__}
    del facts["name"], facts["capability"]
    roles = {"roles": [loop.row() for loop in facts.pop("roles")]}
    return (
        heading
        | facts
        | (roles if roles["roles"] else {})
        | {"seconds": round(facts["seconds"], 2), "triton": triton.__version__}
    )


def _cause(error: BaseException) -> str:
    """The first line of the first error in the chain, without the source code that Triton quotes."""
    while error.__cause__:
        error = error.__cause__
    said = str(getattr(error, "error_message", None) or error)
    return next(iter(said.strip().splitlines()), type(error).__name__)


# ---------------------------------------------------------------- the command


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if a kernel exceeds its budget, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.proof.compile", description="Compile kernels for GPUs that are not here."
    )
    parser.add_argument("--target", action="append", choices=tuple(TARGETS), help="all unless given; repeatable")
    parser.add_argument("--family", action="append", choices=tuple(FAMILIES), help="all unless given; repeatable")
    parser.add_argument("--case", default="*", metavar="PATTERN", help="names of cases, such as 'd128*'; '' is none")
    parser.add_argument("--kernel", default="*", metavar="PATTERN", help="names of kernels, such as 'forward*'")
    add_results(parser, RESULTS)
    parser.add_argument("--roles", action="store_true", help="print the inner loops of warps with roles, too")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (2)")
    parser.add_argument("--nvdisasm", metavar="FILE", help="a disassembler that knows more targets than Triton's own")
    a = parser.parse_args(argv)
    try:
        return _run(a)
    except InvalidProblem as error:
        parser.error(str(error))


def _run(a: argparse.Namespace) -> int:
    _use(a.nvdisasm)
    asked = [unit for unit in UNITS if unit.family in (a.family or FAMILIES) and unit.target in (a.target or TARGETS)]
    units = [unit for unit in asked if fnmatchcase(unit.case, a.case)]
    if a.case and not units:
        names = ", ".join(dict.fromkeys(unit.case for unit in asked))
        raise InvalidProblem(
            "--case", repr(a.case), f"a pattern of {names}", "quote it, so that the shell leaves it alone"
        )
    found = list(_compiled(units, a.kernel, a.jobs, a.nvdisasm))
    done = set(units) if a.kernel == "*" else set()
    kept = [row for row in read(a.results) if Unit(*key(row)[:3]) not in done]
    a.results.write_text(packed(merged(kept, found)))
    for row in found:
        print(f"{row['target']:<7} {row['kernel']:<15} {row['case']:<33} {in_short(row):>16}")
    roles = [line for row in found for line in lines_of_roles(row)] if a.roles else []
    print(table(OF_ROLES, roles) if roles else "", end="\n" * bool(roles))
    over = [fault for row in found for fault in budget.faults(row)]
    print("\n".join([*over, f"{len(found)} kernels compiled, {len(over)} faults"]))
    return 1 if over else 0


def _compiled(units: list[Unit], kernel: str, jobs: int, nvdisasm: str | None) -> Iterator[dict]:
    """The rows of all units, compiled in `jobs` new processes. Shows a progress bar if standard error is a terminal and
    rich is installed.
    """
    with ExitStack() as stack:
        batches = itertools.chain.from_iterable(
            stack.enter_context(new_processes(jobs, nvdisasm)).map(partial(rows, kernel=kernel), alike)
            for alike in _with_equal_conversions(units)
        )
        if sys.stderr.isatty() and find_spec("rich"):
            from rich.console import Console
            from rich.progress import track

            batches = track(batches, "compile", len(units), console=Console(stderr=True), transient=True)
        yield from itertools.chain.from_iterable(batches)


def new_processes(jobs: int = 1, nvdisasm: str | None = None) -> ProcessPoolExecutor:
    """New processes that compile. Triton 3.6 writes the conversion of float8 for the first target that a process
    compiles it for, and keeps it for all others: a kernel of sm_90 gets other registers after one of sm_89.
    """
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_use, initargs=(nvdisasm,))


def _with_equal_conversions(units: list[Unit]) -> Iterator[list[Unit]]:
    """The units below sm_90 and the others; the instructions that convert float8 differ between the two."""
    older = [unit for unit in units if TARGETS[unit.target].capability < 90]
    yield from (alike for alike in (older, [unit for unit in units if unit not in older]) if alike)


def _use(nvdisasm: str | None) -> None:
    """Set up a process: one torch thread, and the given disassembler. Raises InvalidProblem if Triton does not accept
    it.
    """
    torch.set_num_threads(1)
    if nvdisasm:
        knobs.nvidia.nvdisasm = nvdisasm
        if knobs.nvidia.nvdisasm.path != nvdisasm:  # Triton silently uses its own if this one does not run
            raise InvalidProblem(
                "--nvdisasm", nvdisasm, "a program that answers --version", "give the path of nvdisasm"
            )


if __name__ == "__main__":
    from . import compile as this  # import by name, so that workers can unpickle its functions

    sys.exit(this.main())
