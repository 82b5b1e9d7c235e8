"""Runs emitted arithmetic in Triton's interpreter against torch's and its gradients, over numbers at which formulas
differ: `python -m tests.mods.emitted_arithmetic`, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from strobe.kernels.runtime.mod_function import mod_function
from strobe.mods import emit
from strobe.mods.cache import TRACES, TraceCache
from strobe.mods.program import Program
from strobe.mods.trace import SCORE_INPUTS
from tests.mods.emitted import B, H, M, N, backward, forward

INF, NAN = torch.inf, torch.nan
NUMBERS = (
    0.0, 1.0, -1.0, 2.0, -2.0, 0.3, -0.3, 1.75, -1.75, 0.5, -0.5, 1.5, -1.5, 2.5, -2.5, 0.49999997, -0.49999997,
    0.50000006, -0.50000006, 3.0, -3.0, 7.25, -7.25, 8388607.0, -8388607.0, 8388609.0, -8388609.0, 16777215.0,
    INF, -INF, NAN, 12.5,
)  # fmt: skip
TABLE = torch.tensor([-3.0, -1.0, 0.0, 0.5, 1.0, 1.5, 2.0, 5.0])


def powers(exponent: float) -> Callable:
    return lambda s, b, h, q, k: s**exponent


def check(name: str, function: Callable, numbers=NUMBERS, traces: TraceCache = TRACES) -> None:
    """The function of numbers and its derivative. traces: an empty cache, so that captured numbers are constants."""
    scores = torch.tensor(numbers).repeat(M * N // len(numbers) + 1)[: M * N].reshape(M, N).requires_grad_()
    rows, keys = torch.arange(M, dtype=torch.int32)[:, None], torch.arange(N, dtype=torch.int32)[None, :]
    exact = function(scores, torch.tensor(B), torch.tensor(H), rows, keys)
    found = traces.bind(function, SCORE_INPUTS, True)
    out = torch.full((M, N), -99.0)
    run = lambda program, arrays, kernel, text: kernel[(1,)](
        out, *arrays, B, H, 0, emit.aux_of(program, found.tensors, found.numbers) or None, mod_function(text), M, N
    )
    run(found.trace.program, (scores.detach(),), forward, emit.forward_text(found.trace.program.text))
    agree(f"{name}: value", scores, out, exact)
    (wanted,) = torch.autograd.grad(exact, scores, torch.ones_like(exact))
    derivative = found.trace.gradient or Program((), ())
    run(derivative, (torch.ones(M, N), scores.detach()), backward, emit.backward_text(derivative.text))
    agree(f"{name}: derivative", scores, out, wanted)


def agree(name: str, scores: torch.Tensor, found: torch.Tensor, exact: torch.Tensor) -> None:
    """torch gives inf for -inf to a power that is no integer, the kernels NaN."""
    is_close = torch.isclose(found, exact, rtol=2e-5, atol=1e-30, equal_nan=True)
    is_close |= (scores == -INF) & found.isnan()
    if not is_close.all():
        at = tuple(int(i) for i in (~is_close).nonzero()[0])
        raise AssertionError(f"{name} of {scores[at].item()!r} at {at}: {found[at].item()}, torch {exact[at].item()}")


def main() -> None:
    for exponent in (0, 1, 2, 3, 4, 5, 6, 7, 33, -1, -2, -3, -5, 5.0, 2.5, -1.5, 0.5, 100, 101):
        check(f"to the power of {exponent}", powers(exponent), traces=TraceCache())
    for exponent in (2, 3, 5, 0, 1, -1, 2.5, 3.0, 0.0):  # from the second on an argument of the kernel
        check(f"to the power of a number that changes, {exponent}", powers(exponent))
    check("to the power of a tensor's element", lambda s, b, h, q, k: s ** TABLE[k % 8])
    check("2 to the power of a score", lambda s, b, h, q, k: 2.0**s, tuple(n for n in NUMBERS if not abs(n) > 100))
    check("-2 to the power of a position", lambda s, b, h, q, k: s + (-2.0) ** (k % 7), (0.0,) * 32)
    check("a position to the power of 5", lambda s, b, h, q, k: s + (k - 20) ** 5, (0.0,) * 32)
    check("round", lambda s, b, h, q, k: torch.round(s))
    check("round of an integer", lambda s, b, h, q, k: s + torch.round(q), (0.0,) * 32)
    print("arithmetic agrees")


if __name__ == "__main__":
    main()
