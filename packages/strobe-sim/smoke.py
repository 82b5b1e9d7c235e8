"""Runs kernels with an installed strobe-sim, where neither torch nor strobe is installed: right numbers, and a race."""

from __future__ import annotations

import importlib.util
import platform

import numpy as np
import strobe_sim
import triton
import triton.language as tl
from strobe_sim import Array, SimulationFault, simulate


@triton.jit
def sum_kernel(x, out, n, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out, tl.load(out) + tl.sum(tl.load(x + at, mask=at < n, other=0.0).to(tl.float32), 0))


def main() -> None:
    for name in ("torch", "strobe"):
        if importlib.util.find_spec(name) is not None:
            raise SystemExit(f"{name} is installed here: this environment does not show that strobe-sim needs it not")
    x, out = Array.of(np.ones(100), tl.bfloat16), np.zeros(1, np.float32)
    with simulate("sm_90"):
        sum_kernel[(1,)](x, out, 100, 128)
    if out[0] != 100.0:
        raise SystemExit(f"sum_kernel: got {out[0]}, expected 100")
    try:
        with simulate("sm_90"):
            sum_kernel[(2,)](x, out, 100, 64)
    except SimulationFault as fault:
        kinds = {report.kind for report in fault.reports}
    else:
        kinds = set()
    if kinds != {"race"}:
        raise SystemExit(f"sum_kernel on two programs: reported {kinds or 'nothing'}, expected a race")
    versions = f"Python {platform.python_version()}, Triton {triton.__version__}"
    print(f"strobe-sim {strobe_sim.__version__}, {versions}, no torch")


if __name__ == "__main__":
    main()
