"""select(problem, target) -> Choice: the kernels that run, their configs, and the reason why each other kernel does
not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from ..errors import InvalidProblem, UnsupportedProblem
from ..kernels import FAMILIES, kernels
from ..kernels.protocol import NUMBERS, Kernel, Plan
from ..kernels.runtime.workspace import room
from ..mods.program import Program
from ..mods.triton_functions import why_not_expanded
from ..problem.append import AppendProblem
from ..problem.decode import DecodeProblem
from ..problem.problem import Problem
from ..problem.target import Target

AnyProblem = TypeVar("AnyProblem", bound=Problem | DecodeProblem | AppendProblem)


@dataclass(frozen=True)
class Choice(Generic[AnyProblem]):
    """The kernels selected for a Problem: the forward plan, the backward plan if gradients are needed, and the rejected
    kernels with reasons. `str` makes a table of it.

    Attributes:
        problem: the call without its data.
        target: the device.
        forward: kernel, config and workspace; for decode and append the only plan.
        backward: the same for gradients, or None.
        rejections: a kernel's name and the reason why it cannot run, for each kernel that was asked before.
    """

    problem: AnyProblem
    target: Target
    forward: Plan
    backward: Plan | None
    rejections: tuple[tuple[str, str], ...]

    def __reduce__(self) -> tuple:
        return select, (self.problem, self.target)  # they determine the Choice; a plan's number belongs to this process

    def __str__(self) -> str:
        rows = [("problem", str(self.problem)), ("target", str(self.target))]
        rows += [("chosen", f"{plan.kernel.name:<18} {plan.config}") for plan in (self.forward, self.backward) if plan]
        rows += [("rejected", f"{name:<18} {reason}") for name, reason in self.rejections]
        for plan in (self.forward, self.backward):
            if plan:
                cost = plan.kernel.cost(self.problem)
                ms, bound = self.ceiling_ms(plan)
                time = f" at {self.target.peak_tflops:g} TFLOP/s = {ms:.3g} ms" if ms else ""
                rows.append(("ceiling", f"{cost.flops:.3g} FLOP{time}; {bound}"))
        return "\n".join(f"{label:<9} {text}" for label, text in rows)

    def ceiling_ms(self, plan: Plan) -> tuple[float, str]:
        """The least time of a plan and its bound, as `Cost.ceiling_ms`; (0, reason) if unknown: the target's peaks are
        those of 16-bit products.
        """
        if self.problem.dtype.itemsize > 2 and self.target.peak_tflops:
            return 0.0, f"this target's peak rate in {str(self.problem.dtype).removeprefix('torch.')} is not known"
        return plan.kernel.cost(self.problem).ceiling_ms(self.target)


def select(problem: AnyProblem, target: Target) -> Choice[AnyProblem]:
    """Select the first kernel of each direction that can run the problem.

    Raises UnsupportedProblem with every kernel's reason if none can, and InvalidProblem for an unknown kernel name.

    >>> import torch
    >>> from strobe.problem.problem import Call
    >>> from strobe.problem.target import FAKES
    >>> q = torch.empty(1, 8, 2, 16)
    >>> select(Problem.from_call(Call(q, q, q)), FAKES["CPU"]).forward.kernel.name
    'cpu.forward'
    """
    forwards, *backwards = problem.directions
    _check_name(problem.kernel, ("forward", "backward") if isinstance(problem, Problem) else problem.directions)
    forward, passed = _first(problem, target, forwards)
    backward, passed_backward = _first(problem, target, backwards[0]) if backwards else (None, ())
    return Choice(problem, target, forward, backward, passed + passed_backward)


def _first(
    problem: Problem | DecodeProblem | AppendProblem, target: Target, direction: str
) -> tuple[Plan, tuple[tuple[str, str], ...]]:
    """The plan of the first kernel that can run the problem, and (name, reason) of every other kernel of this
    direction.
    """
    plan: Plan | None = None
    passed: list[tuple[str, str]] = []
    for kernel in kernels(direction):
        reason = _not_asked_for(problem.kernel, kernel) or kernel.why_not(problem, target)
        if reason is None and kernel.name.startswith("cpu."):
            reason = _against_triton_functions(problem)
        if reason is None and plan is not None:
            reason = f"could run this too; {plan.kernel.name} comes first"
        if reason is not None:
            passed.append((kernel.name, reason))
            continue
        config = kernel.config(problem, target)
        buffers = kernel.workspace(problem, config)
        filled = tuple([buffer for buffer in buffers if buffer.fill is not None])
        plan = Plan(kernel, problem, target, config, buffers, room(buffers), filled, number=next(NUMBERS))
    if plan is not None:
        return plan, tuple(passed)
    family = problem.kernel.partition(".")[0]
    if family in FAMILIES and family not in [kernel.name.partition(".")[0] for kernel in kernels(direction)]:
        passed.insert(0, (f"{family}.{direction}", f"there is none{_other(family, direction)}"))
    reasons = "\n".join(f"  {name:<18} {reason}" for name, reason in passed)
    raise UnsupportedProblem(
        f"no {direction} kernel can run this here\n  problem {problem}\n  target  {target}\n{reasons}"
    )


def _not_asked_for(wanted: str, kernel: Kernel) -> str | None:
    """Why kernel= excludes this kernel; None if it does not.

    `wanted` is a family ("portable") or a kernel ("portable.forward"). A kernel's name does not restrict the other
    direction. "backward_pair" is a backward.
    """
    direction, own_direction = (name.partition(".")[2].partition("_")[0] for name in (wanted, kernel.name))
    if wanted in ("", kernel.name, kernel.name.partition(".")[0]) or (direction and direction != own_direction):
        return None
    return f'kernel="{wanted}" was asked for'


def _against_triton_functions(problem: Problem | DecodeProblem | AppendProblem) -> str | None:
    """Why torch operations cannot run a problem's functions, or None."""
    mods = None if isinstance(problem, AppendProblem) else problem.mods
    reasons = [why_not_expanded(Program.parse(text)) for text in (() if mods is None else mods.programs)]
    return next(filter(None, reasons), None)


def _other(family: str, direction: str) -> str:
    other = {"forward": "backward", "backward": "forward"}.get(direction)
    return f'; kernel="{family}.{other}" leaves the {direction} open' if other else ""


def _check_name(wanted: str, directions: tuple[str, ...]) -> None:
    names = [*FAMILIES, *(kernel.name for direction in directions for kernel in kernels(direction))]
    if wanted and wanted not in names:
        raise InvalidProblem("kernel", repr(wanted), f"one of {', '.join(names)}", "leave it out to let strobe choose")
