"""The barrier tables at the top of the Hopper kernels against the barriers that the kernels make in the simulator: each
barrier is in the table, with as many arrivals as the table says.
"""

from __future__ import annotations

import re
from types import ModuleType
from unittest.mock import patch

import pytest

pytest.importorskip("triton")

from strobe.kernels.hopper import backward, forward
from strobe.sim import simulate
from strobe.sim.machine import Machine
from strobe.sim.semantics import Gluon
from tests.kernels.hopper import hopper_scenes as scenes

SCENES = {
    forward: (scenes.forward_d128, scenes.forward_d96, scenes.forward_noncontiguous),
    backward: (scenes.backward_d128, scenes.backward_d192, scenes.backward_split, scenes.backward_deferred_dq,
               scenes.backward_noncontiguous),
}  # fmt: skip
THREADS = 128
ARRIVALS = {  # what a table says -> the arrivals of a kernel with these traits
    "1": lambda traits: {1},
    "2": lambda traits: {2},
    "1 and the tile's bytes": lambda traits: {1},
    "1 and the tiles' bytes": lambda traits: {1},
    "consumers": lambda traits: {traits.consumers},
    "consumers (or threads)": lambda traits: {traits.consumers * (THREADS if traits.release_per_thread else 1)},
    "2 (or 256 threads)": lambda traits: {2 * (THREADS if traits.release_per_thread else 1)},
    "consumers + store warps": lambda traits: {2 + traits.store_warps},
    "1 (or 128 threads)": lambda traits: {1, THREADS},
}


def table(module: ModuleType) -> dict[str, str]:
    """{barrier: arrivals}, as the docstring of a kernel's file has it; a line may name a second barrier."""
    lines = (module.__doc__ or "").split("Barriers  ")[1].split("\n\n")[0].splitlines()[1:]
    found = {}
    for line in lines:
        if line.split()[0] == "named":  # hardware barriers, which are not in memory
            continue
        name, arrivals = re.match(r"    (\w+)(?:\[\w\])? +(.+?)  ", line.ljust(80)).groups()
        found[name] = arrivals.strip()
        found |= dict.fromkeys(re.findall(r"  (\w+)\[i\] +the same", line), found[name])
    return found


def barriers_of(functions_and_args: list) -> tuple[dict[str, int], object]:
    """({barrier: address of its first}, traits) of what a kernel hands to its roles. A barrier that stands for another,
    too, has the name that comes first.
    """
    found: dict[str, int] = {}

    def note(name: str, value: object) -> None:
        first = getattr(value, "first", 0)  # of `pipeline.rings`, which share an allocation
        handle = getattr(getattr(value, "barriers", value), "handle", None)
        if handle is None:
            return
        address = handle.address if hasattr(handle, "address") else int(handle.data.flat[0])
        address += 8 * int(getattr(first, "value", first))
        if address not in found.values():
            found[name] = address

    for function, arguments in functions_and_args:
        for name, value in zip(function.arg_names, arguments):
            if type(value).__name__ == "Pipelines":
                for pipe, fields in vars(value).items():
                    prefix = "tile" if pipe == "work" else pipe
                    for field, barrier in getattr(fields, "__dict__", {}).items():
                        if field in ("full", "empty"):
                            note(f"{prefix}_{field}", barrier)
                        elif re.fullmatch(r"d?kv_(full|done|empty)", field):
                            note(field, barrier)
                    if pipe.endswith("landed"):
                        note(pipe, fields)
            elif name == "landed":
                note(name, value)
    traits = dict(zip(functions_and_args[0][0].arg_names, functions_and_args[0][1]))["traits"]
    return found, getattr(traits, "value", traits)


def launched(scene) -> list[tuple[dict[str, int], object, dict[int, int]]]:
    """For each program of a specialized kernel in a scene: its barriers, traits, and {address: arrivals}."""
    counts: dict[int, int] = {}
    found = []
    init, specialize = Machine.init_barrier, Gluon.warp_specialize

    def noted_init(self, address, name, count):
        counts[address] = count
        init(self, address, name, count)

    def noted_specialize(self, functions_and_args, *rest):
        names, traits = barriers_of(functions_and_args)
        found.append((names, traits, dict(counts)))
        counts.clear()
        return specialize(self, functions_and_args, *rest)

    with (
        patch.object(Machine, "init_barrier", noted_init),
        patch.object(Gluon, "warp_specialize", noted_specialize),
        simulate("sm_90"),
    ):
        scene()
    return found


@pytest.mark.parametrize("module", SCENES, ids=lambda module: module.__name__.split(".")[-1])
def test_the_table_names_each_barrier_and_its_arrivals(module):
    said, seen = table(module), set()
    for scene in SCENES[module]:
        programs = launched(scene)
        assert programs
        for names, traits, counts in programs:
            begins = {address: name for name, address in names.items() if address in counts}
            name = None
            for address in sorted(counts):  # the barriers of one name follow each other
                name = begins.get(address, name)
                assert name in said, f"{scene.__name__}: {name or address} is not in the table"
                assert counts[address] in ARRIVALS[said[name]](traits), (
                    f"{scene.__name__}: {name} counts {counts[address]}"
                )
                seen.add(name)
    assert seen == set(said), "the table names barriers that no scene makes"
