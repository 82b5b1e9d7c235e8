"""A scene: a Python function that launches kernels, or a kernel, loaded from a file, with its arguments as text.

    FILE::NAME bf16[200,320] bf16[320,256] nan:bf16[200,256] block=64

A function is called under the simulator; a kernel is launched on a grid.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from triton import language as tl
from triton.errors import TritonError

from .arrays import Array, is_array, torch_if_installed

# as written -> (Triton's type, torch's name of it)
_DTYPES = {
    "bf16": (tl.bfloat16, "bfloat16"),
    "fp16": (tl.float16, "float16"),
    "f16": (tl.float16, "float16"),
    "fp32": (tl.float32, "float32"),
    "f32": (tl.float32, "float32"),
    "i32": (tl.int32, "int32"),
    "i64": (tl.int64, "int64"),
    "u8": (tl.uint8, "uint8"),
    "i8": (tl.int8, "int8"),
    "fp64": (tl.float64, "float64"),
    "fp8e4": (tl.float8e4nv, "float8_e4m3fn"),
    "fp8e5": (tl.float8e5, "float8_e5m2"),
}
_TENSOR = re.compile(r"(?:(?P<fill>\w+):)?(?P<dtype>\w+)\[(?P<shape>(?:\d+(?:,\d+)*)?)\](?:/(?P<block>\d+(?:x\d+)*))?")
_FILLS = {"nan": float("nan"), "zeros": 0, "ones": 1}
_FORM = "a tensor such as bf16[64,128], nan:f32[64] or tma:bf16[64,128]/64x64"


class SceneError(Exception):
    """A scene that cannot be loaded or called as written."""


# exceptions of a scene's code, of a kernel that breaks the language's rules, and of operations the simulator lacks
FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    TritonError,
)


def generator_of(seed: int) -> Any:
    """A generator of random numbers: torch's, or NumPy's where torch is not installed."""
    torch = torch_if_installed()
    return np.random.default_rng(seed % 2**64) if torch is None else torch.Generator().manual_seed(seed)


def argument(text: str, generator: Any) -> object:
    """Parse one argument: a tensor (`bf16[64,128]`, `nan:`, `zeros:`, `ones:` or `tma:bf16[64,128]/64x64`), number,
    bool, None or text.

    >>> argument("zeros:f32[2]", generator_of(0))
    tensor([0., 0.])
    >>> argument("3", generator_of(0)), argument("True", generator_of(0))
    (3, True)

    A tensor is an Array where torch is not installed. Floating-point tensors without a prefix are standard normal.
    Raises SceneError for a malformed tensor.
    """
    if "[" in text:
        return _tensor(text, generator)
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _tensor(text: str, generator: Any) -> object:
    match = _TENSOR.fullmatch(text)
    if match is None:
        raise SceneError(f"argument: got {text!r}, expected {_FORM}: sizes with commas, no spaces")
    for part, known in (("dtype", _DTYPES), ("fill", ("tma", *_FILLS, None))):
        if match[part] not in known:
            raise SceneError(
                f"argument: got {match[part]!r} in {text!r}, expected one of {', '.join(filter(None, known))}"
            )
    shape, (dtype, name), fill = _sizes(match["shape"], ","), _DTYPES[match["dtype"]], match["fill"]
    block = _sizes(match["block"], "x") if match["block"] else shape
    if match["block"] and (fill != "tma" or len(block) != len(shape)):
        raise SceneError(
            f"argument: got {text!r}, expected a block of {len(shape)} sizes after a tma: tensor; leave it out "
            "otherwise"
        )
    try:
        tensor = _filled(shape, dtype, name, fill, generator)
    except (MemoryError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise SceneError(
            f"argument: got {text!r}, expected a tensor that fits in memory: {str(error).partition(chr(10))[0]}"
        ) from error
    return _descriptor(tensor, dtype, block, text) if fill == "tma" else tensor


def _filled(shape: list[int], dtype: tl.dtype, name: str, fill: str | None, generator: Any) -> Any:
    torch = torch_if_installed()
    if fill in _FILLS:
        value = -1 if fill == "nan" and not dtype.is_floating() else _FILLS[fill]
        if torch is None:
            return Array.of(np.full(shape, value), dtype)
        return torch.full(shape, value, dtype=getattr(torch, name))
    if torch is None:
        drawn = generator.standard_normal(shape) * (1 if dtype.is_floating() else 8)
        return Array.of(np.trunc(drawn) if not dtype.is_floating() else drawn, dtype)
    drawn = torch.randn(shape, generator=generator)
    return (drawn if dtype.is_floating() else drawn * 8).to(getattr(torch, name))


def _sizes(text: str, between: str) -> list[int]:
    return [int(size) for size in text.split(between)] if text else []


def _descriptor(tensor: Any, elem: tl.dtype, block: list[int], text: str) -> object:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    if elem not in (gl.bfloat16, gl.float16, gl.float32):
        raise SceneError(
            f"argument: got {text!r}, expected bf16, fp16 or fp32 in a descriptor; make others in a function"
        )
    if not block:
        raise SceneError(f"argument: got {text!r}, expected at least one dimension, such as tma:bf16[64,128]/64x64")
    try:
        layout: Any = gl.NVMMASharedLayout.get_default_for(block, elem)
        return TensorDescriptor.from_tensor(tensor, block, layout)
    except (AssertionError, ValueError) as error:
        said = str(error) or "see TensorDescriptor.from_tensor"
        raise SceneError(
            f"argument: got {text!r}, expected what TMA can move, such as tma:bf16[64,128]/64x64: {said}"
        ) from error


class Scene:
    """`Scene("matmul.py::run", ["bf16[64,64]", "bf16[64,64]"])`. Each call launches it on fresh, equal arguments."""

    def __init__(
        self,
        name: str,
        arguments: list[str],
        grid: tuple[int, ...] = (1,),
        options: dict[str, object] | None = None,
        seed: int = 0,
    ):
        file, _, function = name.partition("::")
        if not function or not Path(file).is_file():
            raise SceneError(f"scene: got {name!r}, expected FILE::NAME with an existing file, such as kernels.py::run")
        self.path, self.function = Path(file).resolve(), function
        self.texts, self.grid, self.options, self.seed = arguments, grid, options or {}, seed

    def arguments(self) -> tuple[list[object], dict[str, object]]:
        generator = generator_of(self.seed)
        positional, named = [], {}
        for text in self.texts:
            name, equals, value = text.partition("=")
            if equals and name.isidentifier():
                named[name] = argument(value, generator)
            else:
                positional.append(argument(text, generator))
        return positional, named

    def __call__(self, module: ModuleType | None = None) -> list[Any]:
        """Launch. Returns the tensors that were passed and returned, with their values after the launch."""
        module = module or load(self.path)
        target = getattr(module, self.function, None)
        if target is None:
            raise SceneError(
                f"{self.path.name} has no {self.function}; it has "
                f"{', '.join(_launchable(module)) or 'no kernel and no function'}"
            )
        positional, named = self.arguments()
        self._check(target, positional, named)
        is_kernel = hasattr(target, "arg_names")
        result = target[self.grid](*positional, **named, **self.options) if is_kernel else target(*positional, **named)
        return list(tensors([positional, list(named.values()), result]))

    def _check(self, target: Any, positional: list[object], named: dict[str, object]) -> None:
        if not callable(target) and not hasattr(target, "arg_names"):
            raise SceneError(f"{self.path.name}::{self.function} is {target!r}, expected a function or a kernel")
        signature = getattr(target, "signature", None) or inspect.signature(target)
        try:
            signature.bind(*positional, **named)
        except TypeError as error:
            raise SceneError(
                f"{self.path.name}::{self.function} takes {signature}; got "
                f"{' '.join(self.texts) or 'no arguments'}: {error}"
            ) from error


def _launchable(module: ModuleType) -> list[str]:
    """The names of the kernels and functions that a file defines."""
    return sorted(
        name
        for name, value in vars(module).items()
        if name[0] != "_"
        and getattr(value, "__module__", "") == module.__name__
        and (hasattr(value, "arg_names") or inspect.isfunction(value))
    )


def tensors(value: Any) -> Iterator[Any]:
    """All tensors and arrays in nested tuples, lists, dicts and descriptors."""
    if is_array(value):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))
    elif is_array(getattr(value, "base", None)):
        yield value.base


def module_name(path: Path) -> str:
    """The dotted name of a file in its package (`specimens.matmul`). Adds the package's parent to sys.path."""
    parts, folder = [path.stem], path.parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return ".".join(parts)


def load(path: Path) -> ModuleType:
    """Import a file under its package's name. A module of that name from another file is replaced."""
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
        raise SceneError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    _enter(name, module)
    with ExitStack() as undo:
        undo.callback(_leave, name)
        try:
            spec.loader.exec_module(module)
        except (SyntaxError, ImportError) as error:
            raise SceneError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
        except SystemExit as ended:
            guard = 'put the entry point under `if __name__ == "__main__":`'
            raise SceneError(
                f"{path} cannot be imported: it calls sys.exit({ended.code!r}) while it is; {guard}"
            ) from ended
        undo.pop_all()
    return module


def _enter(name: str, module: ModuleType) -> None:
    """Register a module by name and as an attribute of its package, where `from . import it` looks first."""
    sys.modules[name] = module
    package, _, stem = name.rpartition(".")
    if package in sys.modules:
        setattr(sys.modules[package], stem, module)


def _leave(name: str) -> None:
    sys.modules.pop(name, None)
    package, _, stem = name.rpartition(".")
    if package in sys.modules:
        vars(sys.modules[package]).pop(stem, None)


# ---- a module with other source


@contextmanager
def replaced(original: Path, source: str, folder: Path, scene: Path) -> Iterator[ModuleType]:
    """The scene's module, with `original` replaced by `source`, which is written to `folder`.

    Both modules, and all modules of their packages that import `original` directly or indirectly, are imported again.
    No other module is, so registrations with torch and other state persist. On exit the modules are restored.
    """
    load(scene)
    name = module_name(original)
    roots = {name.partition(".")[0], module_name(scene).partition(".")[0]}
    before = {importer: sys.modules[importer] for importer in _importers(name, roots) if importer in sys.modules}
    folder.mkdir()
    (folder / original.name).write_text(source)
    finder = _FileFinder(name, folder / original.name)
    for importer in before:
        _leave(importer)
    sys.meta_path.insert(0, finder)
    try:
        changed = importlib.import_module(name)
        yield changed if original == scene else load(scene)
    finally:
        sys.meta_path.remove(finder)
        for importer in _importers(name, roots):
            _leave(importer)
        sys.modules.update(before)
        for importer, module in before.items():
            _enter(importer, module)


class _FileFinder:
    """Finds the module of one name in another file."""

    def __init__(self, name: str, file: Path):
        self.name, self.file = name, file

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return importlib.util.spec_from_file_location(name, self.file) if name == self.name else None


def _importers(name: str, roots: set[str]) -> list[str]:
    """The module, and the loaded modules under `roots` whose import depends on it directly or indirectly."""
    imports = {}
    for other, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if other.partition(".")[0] in roots and file.endswith(".py"):
            imports[other] = _imports(file, other if Path(file).name == "__init__.py" else other.rpartition(".")[0])
    found = [name]
    for known in found:  # grows during the loop
        found += [other for other, names in imports.items() if known in names and other not in found]
    return found


@functools.lru_cache(None)
def _imports(file: str, package: str) -> frozenset[str]:
    """All that a file may import at module level: `from .a import b` gives package.a and package.a.b."""
    found: set[str] = set()
    nodes: list[ast.AST] = [*ast.parse(Path(file).read_text()).body]
    for node in nodes:  # grows during the loop
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = (
                importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                if node.level
                else node.module or ""
            )
            found.update([base, *(f"{base}.{alias.name}" for alias in node.names)])
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            nodes += ast.iter_child_nodes(node)
    return frozenset(found)
