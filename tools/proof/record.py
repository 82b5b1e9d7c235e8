"""The record of compiled kernels, `results/compiled.jsonl` with one row each, and the page of tables made from it.

python -m tools.proof.record docs/generated/compiled.md          write the page (`make pages`)"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from . import budget
from .budget import TARGETS, UNITS, Unit
from .sass import COUNTED, KINDS, Loop, Parts

RESULTS = Path("results/compiled.jsonl")


def key(row: dict) -> tuple[str, ...]:
    return row["family"], row["case"], row["target"], row["kernel"]


# a row leaves out those of these values that it has
_USUAL = {"spill_store_bytes": 0, "spill_load_bytes": 0, "stack_bytes": 0, "tensor_columns": 0, "serialized": False}


def add_results(parser: argparse.ArgumentParser, default: Path) -> None:
    """Add the option --results of a tool that replaces rows in a file."""
    parser.add_argument(
        "--results", type=Path, default=default, metavar="FILE",
        help=f"rows go there, in the place of older ones ({default})",
    )  # fmt: skip


# in a file, a row is a list of these values, and an object with its other values if it has any
_IN_ORDER = (
    "family", "kernel", "case", "target", "config",
    "registers", "shared_bytes", "warps", "instructions", "code", "source",
)  # fmt: skip


def packed(rows: Iterable[dict]) -> str:
    """Rows as the lines of a file, which `read` turns back, without the compile times that no table shows. The first
    line names the columns of a row, of its instructions and of each loop in its roles. It lists the configs, and a row
    holds a place in that list. It holds the Triton version if all rows have the same. Values that a row lacks are null.

    >>> print(packed([{"kernel": "k", "config": "block_m=64", "stack_bytes": 0, "warps": 4}]).splitlines()[1])
    [null,"k",null,null,0,null,null,4,null,null,null]
    """
    rows = list(rows)
    columns = {"row": [*_IN_ORDER], "instructions": [*COUNTED], "roles": ["role", "total", "least", *KINDS]}
    configs = list(dict.fromkeys(row["config"] for row in rows if "config" in row))
    place = {config: n for n, config in enumerate(configs)}
    versions = {row.get("triton") for row in rows}
    common = {"triton": versions.pop()} if len(versions) == 1 and None not in versions else {}
    lines = [json.dumps({"columns": columns, "configs": configs, **common})]
    for row in rows:
        short = {name: value for name, value in row.items() if name not in _USUAL or value != _USUAL[name]}
        short = {name: value for name, value in short.items() if name not in common}
        if row.get("case") != budget.ON_EVERY_TARGET:
            short.pop("seconds", None)
        if "config" in row:
            short["config"] = place[row["config"]]
        if "instructions" in row:
            counts = row["instructions"]
            short["instructions"] = [counts.get(name) for name in COUNTED] if counts else []
        if "roles" in row:
            short["roles"] = [[loop.get(name) for name in columns["roles"]] for loop in row["roles"]]
        values = [short.pop(name, None) for name in _IN_ORDER]
        lines.append(json.dumps([*values, *([short] if short else [])], separators=(",", ":")))
    return "".join(f"{line}\n" for line in lines)


def read(path: Path) -> list[dict]:
    """The rows of a file written by `packed`, of this version or an earlier one, or with one JSON object a row. Empty
    if there is no file.
    """
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if not rows or "columns" not in rows[0]:
        return rows
    first = rows.pop(0)
    return [_unpacked(row, **first) for row in rows]


def _unpacked(
    row: list | dict, columns: dict[str, list[str]], configs: Sequence[str] = (), triton: str | None = None
) -> dict:
    if isinstance(row, list):
        count = len(columns["row"])
        row = {**_named(columns["row"], row[:count]), **(row[count] if len(row) > count else {})}
    if triton is not None:
        row = {**row, "triton": triton}
    if isinstance(row.get("config"), int):
        row = {**row, "config": configs[row["config"]]}
    if "error" in row:
        return row
    full = {
        **row,
        **{name: row.get(name, usual) for name, usual in _USUAL.items()},
        "instructions": _named(columns["instructions"], row.get("instructions", [])),
    }
    if "roles" in row:
        full["roles"] = [_named(columns["roles"], loop) for loop in row["roles"]]
    return full


def _named(names: Sequence[str], values: Sequence) -> dict:
    return {name: value for name, value in zip(names, values, strict=False) if value is not None}


def merged(old: Iterable[dict], new: Iterable[dict]) -> list[dict]:
    """Old and new rows in the order of UNITS. A new row replaces the old one with the same key. Rows of removed units
    are left out.
    """
    place = {unit: n for n, unit in enumerate(UNITS)}
    found = {key(row): row for row in itertools.chain(old, new) if Unit(*key(row)[:3]) in place}
    return sorted(found.values(), key=lambda row: place[Unit(*key(row)[:3])])


def recalled(row: dict, code: str) -> Parts | None:
    """The recorded `Parts` of a row, or None if its machine code is not `code` or it lacks a column of COUNTED or
    KINDS.
    """
    instructions, roles = row.get("instructions", {}), row.get("roles", [])
    if (
        row.get("code") != code
        or instructions.keys() != COUNTED.keys()
        or any(not KINDS.keys() <= role.keys() for role in roles)
    ):
        return None
    return instructions, [
        Loop(role["role"], role["total"], role["least"], {kind: role[kind] for kind in KINDS}) for role in roles
    ]


# ---------------------------------------------------------------- the page


_HEADING = """\
# Tables of compiled kernels

Made from `results/compiled.jsonl` by `make pages`. [Compiled kernels](../compiled.md) explains the columns."""


def page(rows: Sequence[dict]) -> str:
    """The tables that `make pages` writes: one case in full, all cases in short, and the exceptions.

    >>> page([]).split("\\n")[0]
    '# Tables of compiled kernels'
    """
    targets = [target for target in TARGETS if any(row["target"] == target for row in rows)]
    full = [row for row in rows if row["case"] == budget.ON_EVERY_TARGET]
    parts = [_HEADING, f"## {budget.ON_EVERY_TARGET}, in full", table(_FULL, [_full(row) for row in full])]
    for name in dict.fromkeys((row["family"], row["kernel"]) for row in rows):
        found = {(row["case"], row["target"]): row for row in rows if (row["family"], row["kernel"]) == name}
        own = [target for target in targets if any(target == known for _, known in found)]
        lines = [
            [case, *(in_short(found.get((case, target))) for target in own)]
            for case in dict.fromkeys(case for case, _ in found)
        ]
        parts += [f"## {'.'.join(name)}: registers, and bytes of spills", table(["case", *own], lines)]
    parts += [
        "## Roles: instructions in the inner loop",
        table(OF_ROLES, [line for row in rows if row["case"] in budget.IN_ROLES for line in lines_of_roles(row)]),
    ]
    ledger = [
        [f"`{line.family}.{line.kernel}`", f"`{line.case}`", f"`{line.target}`", line.permits, line.why]
        for line in budget.LEDGER
    ]
    parts += ["## The ledger: exceptions", table(["kernel", "case", "target", "may", "why"], ledger)]
    return "\n\n".join(parts) + "\n"


_FULL = ["target", "kernel", "registers", "spills", "stack", "shared", "tensor columns", "warps", *COUNTED, "s"]


def _full(row: dict) -> list[object]:
    if "error" in row:
        return [row["target"], f"{row['family']}.{row['kernel']}", "-", row["error"], *"-" * (len(_FULL) - 4)]
    shared = f"{row['shared_bytes'] / 1024:.1f} of {TARGETS[row['target']].shared_bytes // 1024} KiB"
    taken = [row["registers"], budget.spill_bytes(row), row["stack_bytes"], shared, row["tensor_columns"], row["warps"]]
    return [
        row["target"],
        f"{row['family']}.{row['kernel']}",
        *taken,
        *(row["instructions"].get(name, "-") for name in COUNTED),
        row["seconds"],
    ]


OF_ROLES = ["target", "kernel", "case", "role", "total", "least", *KINDS]


def lines_of_roles(row: dict) -> list[list[object]]:
    """Table lines, one for each loop of a warp role. Equal loops share a line."""
    alike = Counter(tuple(loop.values()) for loop in row.get("roles", []))
    named = [row["target"], f"{row['family']}.{row['kernel']}", row["case"]]
    return [
        [*named, role if times == 1 else f"{role} x {times}", *numbers] for (role, *numbers), times in alike.items()
    ]


def in_short(row: dict | None) -> str:
    if row is None or "error" in row:
        return "does not compile" if row else "-"
    spills = budget.spill_bytes(row)
    return f"{row['registers']} + {spills} B" if spills else str(row["registers"])


def table(header: list[str], lines: list[list]) -> str:
    rule = ["---" if any(isinstance(line[i], str) for line in lines) else "---:" for i in range(len(header))]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in [header, rule, *lines])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m tools.proof.record", description="Write the tables of compiled kernels."
    )
    parser.add_argument("page", type=Path, metavar="FILE", help="where they go, such as docs/generated/compiled.md")
    path = parser.parse_args(argv).page
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(read(RESULTS)))


if __name__ == "__main__":
    main()
