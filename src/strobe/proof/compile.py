"""Offline compile: kernels to machine code for GPUs that are not here, and what the compiler made of them.

Triton's driver is replaced by one that names a target, launches are noted instead of run, and each is compiled as a launch would compile it:
for the same types, alignments and options, from the host code that would launch it.

    python -m strobe.proof.compile --target sm_90 --case 'd128*'       compile some, print them; --roles: and the inner loop of each role
    python -m strobe.proof.compile --table docs/compiled.md             compile all, write results/compiled.jsonl and the page's tables
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import multiprocessing
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, redirect_stdout
from fnmatch import fnmatchcase
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.errors import TritonError
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from ..appending import AppendCall, AppendProblem
from ..call import Call
from ..decode import DecodeCall, DecodeProblem
from ..errors import InvalidProblem, KernelFault, UnsupportedProblem
from ..kernels.kernel import Backward, Forward, Plan
from ..problem import Problem
from ..select import select
from ..target import Target
from . import budget
from .budget import FAMILIES, TARGETS, UNITS, Unit
from .operands import clashes
from .sass import COUNTED, KINDS, Loop, count, disassemble, loops

RESULTS = Path("results/compiled.jsonl")
BEGIN, END = "<!-- compiled: begin -->", "<!-- compiled: end -->"  # of the tables in a page
_SERIALIZED = re.compile(r"\(C75(?!19)\d\d\)|instructions are serialized")  # C7519 says that a warpgroup.arrive was added: one instruction
_devices = itertools.count(1000)  # a device of its own for each compile keeps Triton's in-memory caches out of it


class Job(NamedTuple):
    """One launch that is compiled instead of run."""

    name: str
    kernel: Any  # a Triton or Gluon JITFunction
    arguments: tuple
    grid: Any
    options: dict[str, Any]  # keywords of the launch: num_warps, constants
    target: Target


class Report(NamedTuple):
    """What one kernel takes on one target."""

    name: str
    capability: int
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    shared_bytes: int  # static and dynamic
    tensor_columns: int  # of tensor memory
    warps: int  # of all roles
    serialized: bool  # ptxas had to serialise wgmma
    instructions: dict[str, int]  # of COUNTED; empty where the disassembler does not know the target
    roles: list[Loop]  # the inner loops of warps with roles
    seconds: float  # of the compile, with cold caches

    @property
    def spill_bytes(self) -> int:
        return self.spill_store_bytes + self.spill_load_bytes


class _OfflineDriver:
    """As much of a Triton driver as JITFunction.warmup asks for."""

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
def offline(capability: int) -> Iterator[None]:
    """Triton believes in a GPU of this capability."""
    before = driver._active  # reset_active() would look for a GPU's driver and fail where there is none
    driver.set_active(_OfflineDriver(capability))  # type: ignore[arg-type]
    try:
        yield
    finally:
        driver._active = before


@contextmanager
def recording(target: Target) -> Iterator[list[Job]]:
    """Launches of Triton and Gluon kernels are noted in the list, and nothing runs: whatever host code launches can be compiled.

    >>> with recording(TARGETS["sm_90"]) as jobs:
    ...     pass  # any code that launches kernels, on CPU tensors
    >>> jobs
    []
    """
    jobs: list[Job] = []

    def note(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if not warmup:  # of what is launched next
            jobs.append(Job(kernel.fn.__name__, kernel, arguments, grid, options, target))

    run, JITFunction.run = JITFunction.run, note  # type: ignore[method-assign]
    try:
        yield jobs
    finally:
        JITFunction.run = run  # type: ignore[method-assign]


def compile_job(job: Job) -> Report:
    """Compile one launch with cold caches and say what it takes; raises what the compiler raises."""
    return report(job.name, job.kernel, job.target.capability, job.arguments, job.options, job.grid)


def report(name: str, kernel: Any, capability: int, arguments: tuple, options: dict[str, Any], grid: Any = (1,)) -> Report:
    """`compile_job` for a launch that was never recorded."""
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, offline(capability), knobs.cache.scope(), knobs.nvidia.scope(), redirect_stdout(said):
        knobs.cache.dir, knobs.nvidia.dump_ptxas_log = folder, True
        start = time.perf_counter()
        compiled = kernel.warmup(*arguments, grid=grid, **options)
        seconds = time.perf_counter() - start
    taken, sass = _taken(said.getvalue(), name), disassemble(compiled.asm["cubin"])
    if lost := clashes(compiled.asm["ptx"], sass):
        raise KernelFault(
            f"{name}: ptxas packs one left operand over another in {', '.join(lost)}; keep the one that outlives a turn in shared memory"
        )
    meta = compiled.metadata
    return Report(
        name, capability, taken["registers"], taken["spill_stores"], taken["spill_loads"], taken["stack"], taken["static"] + meta.shared,
        getattr(meta, "tmem_size", None) or 0, meta.num_warps, bool(_SERIALIZED.search(said.getvalue())), count(sass), loops(sass), seconds,
    )  # fmt: skip


def _taken(log: str, name: str) -> dict[str, int]:
    """The figures in what `ptxas -v` says: registers of the widest function, bytes of all of them together."""
    figures = {
        "registers": r"Used (\d+) registers", "stack": r"(\d+) bytes stack frame", "spill_stores": r"(\d+) bytes spill stores",
        "spill_loads": r"(\d+) bytes spill loads", "static": r"(\d+) bytes smem",
    }  # fmt: skip
    found = {key: [int(n) for n in re.findall(pattern, log)] for key, pattern in figures.items()}
    if not found["registers"] or not found["spill_stores"]:
        raise KernelFault(f"{name}: ptxas told neither registers nor spills, so nothing can be said of them; it said: {log.strip()[-500:]!r}")
    return {key: max(values) if key == "registers" else sum(values) for key, values in found.items()}


def _planned(call: Call | DecodeCall | AppendCall, target: Target) -> Iterator[tuple[Plan | None, Any]]:
    """The plans of `call`, on CPU tensors, on `target`, each with what it writes."""
    if isinstance(call, AppendCall):
        yield select(AppendProblem.from_call(call), target).forward, None
        return
    choice = select(DecodeProblem.from_call(call) if isinstance(call, DecodeCall) else Problem.from_call(call), target)
    shape, shape_lse = choice.problem.out_shapes
    out, lse = torch.empty(shape, dtype=choice.problem.out_dtype), torch.empty(shape_lse, dtype=choice.problem.lse_dtype)
    yield choice.forward, Forward(out, lse)
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype) for t in call[:3])
    yield choice.backward, Backward(out, out, lse, None, dq, dk, dv, torch.empty_like(lse))


def launches(call: Call | DecodeCall | AppendCall, target: Target) -> list[tuple[Plan, Job]]:
    """The kernels that `call`, on CPU tensors, would run on `target`, each with its plan: forward, and backward where it needs gradients."""
    written = _planned(call, target)
    found: list[tuple[Plan, Job]] = []
    for plan, tensors in written:
        if plan is None:
            continue
        workspace = {buffer.name: torch.empty(buffer.shape, dtype=buffer.dtype) for buffer in plan.buffers}
        with recording(target) as jobs:
            plan.kernel.run(plan, call, tensors, workspace)
        found += [(plan, job) for job in jobs]
    return found


def rows(unit: Unit, kernel: str = "*") -> list[dict]:
    """One row a kernel of the unit whose name matches; none where the family refuses the case."""
    try:
        found = launches(unit.call, TARGETS[unit.target])
    except UnsupportedProblem:
        return []
    once = {job.name: (plan, job) for plan, job in reversed(found)}  # the Hopper backward converts up to three sums by one kernel
    return [_row(unit, *once[name]) for name in reversed(once) if fnmatchcase(name, kernel)]


def _row(unit: Unit, plan: Plan, job: Job) -> dict:
    """What the kernel takes, or under "error" why it does not compile."""
    heading = {"family": unit.family, "kernel": job.name, "case": unit.case, "target": unit.target, "config": str(plan.config)}
    try:
        facts = compile_job(job)._asdict()
    except (TritonError, RuntimeError) as error:  # the language's, ptxas's and the compiler's passes'
        return heading | {"error": _cause(error), "triton": triton.__version__}
    del facts["name"], facts["capability"]
    roles = {"roles": [loop.row() for loop in facts.pop("roles")]}
    return heading | facts | (roles if roles["roles"] else {}) | {"seconds": round(facts["seconds"], 2), "triton": triton.__version__}


def _cause(error: BaseException) -> str:
    """The first line of what began it, without the source that Triton quotes around it."""
    while error.__cause__:
        error = error.__cause__
    said = str(getattr(error, "error_message", None) or error)
    return next(iter(said.strip().splitlines()), type(error).__name__)


def key(row: dict) -> tuple[str, ...]:
    return row["family"], row["case"], row["target"], row["kernel"]


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def merged(old: Iterable[dict], new: Iterable[dict]) -> list[dict]:
    """The old rows with the new in their place, in the order of UNITS; rows of units that are no more are left out."""
    place = {unit: n for n, unit in enumerate(UNITS)}
    found = {key(row): row for row in itertools.chain(old, new) if Unit(*key(row)[:3]) in place}
    return sorted(found.values(), key=lambda row: place[Unit(*key(row)[:3])])


# ---------------------------------------------------------------- the page


def page(rows: Sequence[dict]) -> str:
    """The tables of docs/compiled.md: one case in full, all cases in short, and the ledger.

    >>> page([]).split("\\n")[2]
    '### d128 causal, in full'
    """
    targets = [target for target in TARGETS if any(row["target"] == target for row in rows)]
    full = [row for row in rows if row["case"] == budget.ON_EVERY_TARGET]
    parts = [f"### {budget.ON_EVERY_TARGET}, in full", table(_FULL, [_full(row) for row in full])]
    for name in dict.fromkeys((row["family"], row["kernel"]) for row in rows):
        found = {(row["case"], row["target"]): row for row in rows if (row["family"], row["kernel"]) == name}
        own = [target for target in targets if any(target == known for _, known in found)]
        lines = [[case, *(_short(found.get((case, target))) for target in own)] for case in dict.fromkeys(case for case, _ in found)]
        parts += [f"### {'.'.join(name)}: registers, and bytes of spills", table(["case", *own], lines)]
    parts += [
        "### Roles: instructions in the inner loop",
        table(_ROLE, [line for row in rows if row["case"] in budget.IN_ROLES for line in _roles(row)]),
    ]
    ledger = [[f"`{line.family}.{line.kernel}`", f"`{line.case}`", f"`{line.target}`", line.permits, line.why] for line in budget.LEDGER]
    parts += ["### The ledger: exceptions", table(["kernel", "case", "target", "may", "why"], ledger)]
    return "\n\n" + "\n\n".join(parts) + "\n\n"


_FULL = ["target", "kernel", "registers", "spills", "stack", "shared", "tensor columns", "warps", *COUNTED, "s"]


def _full(row: dict) -> list[object]:
    if "error" in row:
        return [row["target"], f"{row['family']}.{row['kernel']}", "-", row["error"], *"-" * (len(_FULL) - 4)]
    shared = f"{row['shared_bytes'] / 1024:.1f} of {TARGETS[row['target']].shared_bytes // 1024} KiB"
    taken = [row["registers"], budget.spill_bytes(row), row["stack_bytes"], shared, row["tensor_columns"], row["warps"]]
    return [row["target"], f"{row['family']}.{row['kernel']}", *taken, *(row["instructions"].get(name, "-") for name in COUNTED), row["seconds"]]


_ROLE = ["target", "kernel", "case", "role", "total", "least", *KINDS]


def _roles(row: dict) -> list[list[object]]:
    """A line a loop of a role; loops that are alike are one line."""
    alike = Counter(tuple(loop.values()) for loop in row.get("roles", []))
    named = [row["target"], f"{row['family']}.{row['kernel']}", row["case"]]
    return [[*named, role if times == 1 else f"{role} x {times}", *numbers] for (role, *numbers), times in alike.items()]


def _short(row: dict | None) -> str:
    if row is None or "error" in row:
        return "does not compile" if row else "-"
    spills = budget.spill_bytes(row)
    return f"{row['registers']} + {spills} B" if spills else str(row["registers"])


def table(header: list[str], lines: list[list]) -> str:
    rule = ["---" if any(isinstance(line[i], str) for line in lines) else "---:" for i in range(len(header))]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in [header, rule, *lines])


def write_page(path: Path, rows: Sequence[dict]) -> None:
    text = path.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise InvalidProblem("--table", path, f"a page with one line {BEGIN} and one line {END}", "put them where the tables belong")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    path.write_text(before + BEGIN + page(rows) + END + after)


# ---------------------------------------------------------------- the command


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 where a kernel is over its budget."""
    parser = argparse.ArgumentParser(prog="python -m strobe.proof.compile", description="Compile kernels for GPUs that are not here.")
    parser.add_argument("--target", action="append", choices=tuple(TARGETS), help="all unless given; repeatable")
    parser.add_argument("--family", action="append", choices=tuple(FAMILIES), help="all unless given; repeatable")
    parser.add_argument("--case", default="*", metavar="PATTERN", help="names of cases, such as 'd128*'; '' is none")
    parser.add_argument("--kernel", default="*", metavar="PATTERN", help="names of kernels, such as 'forward*'")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help=f"rows go there, in the place of older ones ({RESULTS})")
    parser.add_argument("--table", type=Path, metavar="FILE", help="a page whose tables are written anew from all results")
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
        raise InvalidProblem("--case", repr(a.case), f"a pattern of {names}", "quote it, so that the shell leaves it alone")
    found = list(_compiled(units, a.kernel, a.jobs, a.nvdisasm))
    done = set(units) if a.kernel == "*" else set()
    kept = [row for row in read(a.results) if Unit(*key(row)[:3]) not in done]
    everything = merged(kept, found)
    a.results.write_text("".join(json.dumps(row) + "\n" for row in everything))
    if a.table:
        write_page(a.table, everything)
    for row in found:
        print(f"{row['target']:<7} {row['kernel']:<15} {row['case']:<33} {_short(row):>16}")
    roles = [line for row in found for line in _roles(row)] if a.roles else []
    print(table(_ROLE, roles) if roles else "", end="\n" * bool(roles))
    over = [fault for row in found for fault in budget.faults(row)]
    print("\n".join([*over, f"{len(found)} kernels compiled, {len(over)} faults"]))
    return 1 if over else 0


def _compiled(units: list[Unit], kernel: str, jobs: int, nvdisasm: str | None) -> Iterator[dict]:
    """The rows of all units, worked on by `jobs` fresh processes; a progress bar where there is a terminal and rich."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=_use, initargs=(nvdisasm,)) as pool:
        batches = pool.map(partial(rows, kernel=kernel), units)
        if sys.stderr.isatty() and find_spec("rich"):
            from rich.console import Console
            from rich.progress import track

            batches = track(batches, "compile", len(units), console=Console(stderr=True), transient=True)
        yield from itertools.chain.from_iterable(batches)


def _use(nvdisasm: str | None) -> None:
    """Each process compiles on one thread, and disassembles with the tool given."""
    torch.set_num_threads(1)
    if nvdisasm:
        knobs.nvidia.nvdisasm = nvdisasm  # type: ignore[assignment]
        if knobs.nvidia.nvdisasm.path != nvdisasm:  # Triton takes its own in silence where this one does not run
            raise InvalidProblem("--nvdisasm", nvdisasm, "a program that answers --version", "give the path of nvdisasm")


if __name__ == "__main__":
    from strobe.proof import compile as this  # by its own name, under which workers find its functions

    sys.exit(this.main())
