"""A scene: something that launches kernels, loaded from a file, with arguments written as text.

    FILE::NAME bf16[200,320] bf16[320,256] nan:bf16[200,256] block=64

NAME is a Python function, called under the simulator, or a kernel, launched on a grid.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "f16": torch.float16, "fp32": torch.float32, "f32": torch.float32, "i32": torch.int32,
           "i64": torch.int64, "u8": torch.uint8, "i8": torch.int8, "fp64": torch.float64, "fp8e4": torch.float8_e4m3fn,
           "fp8e5": torch.float8_e5m2}  # fmt: skip
_TENSOR = re.compile(r"(?:(?P<fill>nan|zeros|ones|tma):)?(?P<dtype>\w+)\[(?P<shape>[\d,]*)\](?:/(?P<block>\d+(?:x\d+)*))?$")


class SceneError(Exception):
    """A scene that cannot be loaded or called as written."""


def argument(text: str, generator: torch.Generator) -> Any:
    """One argument: a tensor (`bf16[64,128]` normal, `nan:`, `zeros:`, `ones:`, or `tma:bf16[64,128]/64x64`), a number, True, False, None, text.

    >>> argument("zeros:f32[2]", torch.Generator())
    tensor([0., 0.])
    >>> argument("3", torch.Generator()), argument("True", torch.Generator())
    (3, True)
    """
    match = _TENSOR.match(text)
    if match and match["dtype"] in _DTYPES:
        return _tensor(match, generator)
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _tensor(match: re.Match, generator: torch.Generator) -> Any:
    shape = [int(size) for size in match["shape"].split(",") if size]
    dtype, fill = _DTYPES[match["dtype"]], match["fill"]
    if fill in ("nan", "zeros", "ones"):
        value = {"nan": float("nan") if dtype.is_floating_point else -1, "zeros": 0, "ones": 1}[fill]
        return torch.full(shape, value, dtype=dtype)
    drawn = torch.randn(shape, generator=generator)
    tensor = drawn.to(dtype) if dtype.is_floating_point else (drawn * 8).to(dtype)
    if fill != "tma":
        return tensor
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    block = [int(size) for size in (match["block"] or "x".join(map(str, shape))).split("x")]
    elem = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}[dtype]
    return TensorDescriptor.from_tensor(tensor, block, gl.NVMMASharedLayout.get_default_for(block, elem))


class Scene:
    """`Scene("matmul.py::run", ["bf16[64,64]", "bf16[64,64]"])`: call it to launch, each time on the same fresh arguments."""

    def __init__(self, name: str, arguments: list[str], grid: tuple[int, ...] = (1,), options: dict[str, Any] | None = None, seed: int = 0):
        file, _, function = name.partition("::")
        if not function or not Path(file).is_file():
            raise SceneError(f"scene: got {name!r}, expected FILE::NAME with an existing file, such as kernels.py::run")
        self.path, self.function = Path(file).resolve(), function
        self.texts, self.grid, self.options, self.seed = arguments, grid, options or {}, seed

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        generator = torch.Generator().manual_seed(self.seed)
        positional, named = [], {}
        for text in self.texts:
            name, equals, value = text.partition("=")
            if equals and name.isidentifier():
                named[name] = argument(value, generator)
            else:
                positional.append(argument(text, generator))
        return positional, named

    def __call__(self, module: ModuleType | None = None) -> list[torch.Tensor]:
        """Launch; the tensors it was given and returned, as they are afterwards."""
        module = module or load(self.path)
        target = getattr(module, self.function, None)
        if target is None:
            raise SceneError(f"{self.path.name} has no {self.function}; it has {', '.join(sorted(n for n in vars(module) if n[0] != '_'))}")
        positional, named = self.arguments()
        if hasattr(target, "arg_names"):  # a kernel
            result = target[self.grid](*positional, **named, **self.options)
        else:
            inspect.signature(target).bind(*positional, **named)
            result = target(*positional, **named)
        return list(tensors([positional, list(named.values()), result]))


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested tuples, lists, dicts and descriptors."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))
    elif isinstance(getattr(value, "base", None), torch.Tensor):
        yield value.base


def module_name(path: Path) -> str:
    """The dotted name of a file in its package (`specimens.matmul`), or its stem; the package's parent goes on sys.path."""
    parts, folder = [path.stem], path.parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return ".".join(parts)


def load(path: Path) -> ModuleType:
    """The module of a file, as its package would import it; a module of its name from elsewhere is replaced."""
    name = module_name(path)
    known = sys.modules.get(name)
    if known is not None and Path(getattr(known, "__file__", None) or "").resolve() == path:
        return known
    return _execute(name, path)


def _execute(name: str, path: Path) -> ModuleType:
    if "." in name:
        importlib.import_module(name.rpartition(".")[0])
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SceneError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if "." in name:
        package, _, stem = name.rpartition(".")
        setattr(sys.modules[package], stem, module)
    spec.loader.exec_module(module)
    return module


@contextmanager
def replaced(original: Path, source: str, folder: Path, scene: Path, stamp: str) -> Iterator[ModuleType]:
    """The scene's module, imported anew with `original` reading `source` instead."""
    folder = folder / stamp
    folder.mkdir()
    copy = folder / original.name
    copy.write_text(source)
    name = module_name(original)
    package = name.split(".")[0]
    before = {n: m for n, m in sys.modules.items() if n == name or ("." in name and n.startswith(package + ".")) or n == module_name(scene)}
    for loaded in before:
        del sys.modules[loaded]
    try:
        changed = _execute(name, copy)
        yield changed if original == scene else load(scene)
    finally:
        for loaded in [n for n in sys.modules if n in before or n == name or ("." in name and n.startswith(package + "."))]:
            del sys.modules[loaded]
        sys.modules.update(before)
