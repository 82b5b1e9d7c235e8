"""Triton's tutorials as cases of the corpus: files that run unedited, each of their test functions in several calls.

A file without test functions asserts while it is run, or has a function that validates one size. Parameters are chosen
by rule: the smallest value of each, and in turn each other value beside the smallest ones. Large sizes are halved.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import itertools
import math
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import triton.testing
from triton.runtime.jit import JITFunction

LARGEST = 2**33  # product of the numbers of one parametrisation: M x N x K, say
_SIZES = ("M", "N", "K", "N_CTX", "xnumel", "ynumel")
Call = dict[str, Any]

# tutorials that only print what they validate, and only as a script: how they are called, on smaller sizes
VALIDATED: dict[str, list[tuple[str, tuple[Any, ...]]]] = {
    "09-persistent-matmul.py": [
        ("validate", (32, 32, 32, torch.float16)),
        ("validate", (384, 320, 256, torch.float16)),
    ],
    "10-block-scaled-matmul.py": [
        ("validate_block_scaled", (512, 512, 512, form)) for form in ("nvfp4", "mxfp4", "mxfp8", "mixed")
    ],
    "11-programmatic-dependent-launch.py": [("validate", (5000,))],
}

# test functions whose sizes are in an object: the calls that replace theirs
SMALLER: dict[str, Callable[[ModuleType], list[Call]]] = {
    "05-moe-bmm1-fused-gather.py": lambda module: [
        {"c": module.MLPConfig("small", experts, 2, 1, hidden, wide), "batch_size": batch}
        for experts, hidden, wide, batch in ((8, 256, 512, 32), (8, 256, 512, 64), (4, 384, 768, 128))
    ],
}


def cases(
    folder: Path, seconds: int, only: str = "", most: int | None = None
) -> Iterator[tuple[str, Callable[[], int]]]:
    """Names of cases, and functions that run one and return how often they called the tutorial.

    Files of which no case can begin with `only` are not imported. `most`: the calls of one test function, all by
    default."""
    for file in sorted(folder.rglob("*.py")):
        if file.name.startswith(("conftest", "__")):
            continue
        name = f"tutorials/{file.relative_to(folder)}"
        if not (name.startswith(only) or only.startswith(name)):
            continue
        if "pytest.mark.parametrize" not in file.read_text() and file.name not in VALIDATED:
            yield name, lambda file=file: imported(file) and 1
            continue
        try:
            with without_benchmarks(), mock.patch.object(JITFunction, "run", lambda *_, **__: None):
                module = imported(file)
        except Exception as failure:  # of their file, or of the simulator: the row says which
            yield name, lambda failure=failure: _raised(failure)
            continue
        tests = {key: value for key, value in vars(module).items() if key.startswith("test_") and callable(value)}
        for key, test in tests.items():
            if test.__module__ == module.__name__ and not skipped(test):
                own = SMALLER[file.name](module) if file.name in SMALLER else calls(test)
                given = list(itertools.islice(own, most))
                run = lambda test=test, given=given, file=file: called(test, given, seconds, fixtures(file.parent))
                yield f"{name}::{key}", run
        for key, arguments in VALIDATED.get(file.name, []):
            of, function = ", ".join(map(str, arguments)), vars(module)[key]
            yield f"{name}::{key}({of})", lambda function=function, arguments=arguments: validated(function, arguments)


def without_benchmarks() -> Any:
    """A context in which benchmarks, which some files run when they are imported, time nothing."""
    timing = lambda *_, **__: 1.0
    return mock.patch.multiple(triton.testing, do_bench=timing, do_bench_cudagraph=timing)


def imported(file: Path) -> ModuleType:
    """The file as a module. Tutorials import each other by their files' names."""
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    with contextlib.redirect_stdout(io.StringIO()):
        spec.loader.exec_module(module)
    return module


def skipped(test: Callable[..., Any]) -> bool:
    """Whether a condition of the test excludes this target."""
    return any(mark.name == "skipif" and mark.args[0] for mark in getattr(test, "pytestmark", []))


def calls(test: Callable[..., Any]) -> Iterator[Call]:
    """The smallest value of each parameter; then each other value, one at a time.

    >>> def test(**_): ...
    >>> list(calls(pytest.mark.parametrize("M, N", [(128, 64), (64, 32)])(test)))
    [{'M': 64, 'N': 32}, {'M': 128, 'N': 64}]
    >>> def test(**_): ...
    >>> list(calls(pytest.mark.parametrize("layout", [(), pytest.param((1, 0))])(test)))
    [{'layout': ()}, {'layout': (1, 0)}]
    """
    axes: list[list[Call]] = []
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            names = [n.strip() for n in mark.args[0].split(",")] if isinstance(mark.args[0], str) else mark.args[0]
            alone = len(names) == 1  # a value may then be a tuple itself
            rows = [getattr(value, "values", (value,) if alone else value) for value in mark.args[1]]
            named = [reduced(dict(zip(names, row, strict=True))) for row in rows]
            axes.append([one for i, one in enumerate(named) if one not in named[:i]])
    smallest = [min(axis, key=size) for axis in axes]
    yield merged(smallest)
    for i, axis in enumerate(axes):
        for value in sorted(axis, key=size):
            call = merged([*smallest[:i], value, *smallest[i + 1 :]])
            if value is not smallest[i] and size(value) < LARGEST:
                yield call


def reduced(call: Call) -> Call:
    """The call with smaller M, N, K and lengths: powers of two to 512, others to a fifth, such as 2,000 to 400."""

    def smaller(number: int) -> int:
        if number < 1000:
            return number
        return number // 5 if number % 40 == 0 else smaller(number // 2)

    return {key: smaller(value) if key in _SIZES else value for key, value in call.items()}


def merged(parts: list[Call]) -> Call:
    return dict(itertools.chain.from_iterable(part.items() for part in parts))


def size(call: Call) -> int:
    """The product of the numbers, by their magnitude."""
    return math.prod(max(abs(v), 1) for v in call.values() if isinstance(v, int) and not isinstance(v, bool))


def fixtures(folder: Path) -> dict[str, Callable[..., Any]]:
    """The fixtures of a folder's conftest.py that yield a value, as context managers."""
    conftest = folder / "conftest.py"
    found = vars(imported(conftest)) if conftest.is_file() else {}
    made = {name: inspect.unwrap(one) for name, one in found.items() if hasattr(one, "_fixture_function_marker")}
    return {name: contextlib.contextmanager(one) for name, one in made.items() if inspect.isgeneratorfunction(one)}


def called(test: Callable[..., Any], given: list[Call], seconds: int, known: dict[str, Callable[..., Any]]) -> int:
    """Run the test with each of the calls and the fixtures that it asks for; how many calls it did not skip."""
    done = 0
    asked = [name for name in inspect.signature(test).parameters if name in known]
    for call in given:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        try:
            with contextlib.ExitStack() as stack:
                test(**call, **{name: stack.enter_context(known[name]()) for name in asked})
            done += 1
        except pytest.skip.Exception:
            continue
        except Exception as failure:
            failure.args = (f"{failure} with {call}"[-180:],)
            raise
    return done


def validated(function: Callable[..., Any], arguments: tuple[Any, ...]) -> int:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        function(*arguments)
    assert "❌" not in printed.getvalue(), f"it prints {printed.getvalue()!r}"
    return 1


def _raised(failure: Exception) -> int:
    raise failure
