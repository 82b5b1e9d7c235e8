"""The laws of the house, read off the source: imports point down, one door to each outside thing, sizes, names, no
silent failure.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import subprocess
import sys
from functools import lru_cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import strobe
from ladder.harness import FILES as RUNG_FILES
from strobe.env import Environment
from strobe.kernels import FAMILIES

ROOT = Path(strobe.__file__).parent
REPOSITORY = ROOT.parent.parent

# From the ground up: a folder may import what stands below it, and itself.
LAYERS = (
    ("errors", "env", "cli.help_request"),
    ("problem",),
    ("mods",),
    ("reference",),
    ("kernels.protocol",),
    ("kernels.runtime",),
    ("kernels.device",),
    ("kernels.cpu", "kernels.portable", "kernels.hopper"),
    ("kernels.blackwell",),
    ("kernels",),
    ("selection",),
    ("ops",),
    ("distributed",),
    ("interface",),
    ("",),  # strobe itself: applications come after it
    ("testing", "sim", "target"),
    ("compat",),
    ("integrations", "flash_attn", "flash_attn_interface", "cute", "distributed.ring_flash_attn"),
    ("bench",),
    ("cli",),
    ("__main__",),
    ("tools", "ladder"),  # of the repository, not of the package
    ("examples",),
)
LIBRARY = [name for layer in LAYERS[:14] for name in layer]
STAND_INS = (
    "flash_attn",
    "flash_attn_interface",
    "cute",
    "distributed.ring_flash_attn",
    "compat.aten",
)  # their functions have other libraries' signatures
KERNELS = ("kernels.portable", "kernels.hopper", "kernels.blackwell", "kernels.device")
OUTSIDE = ("tools", "ladder", "examples.demo")


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT if ROOT in path.parents else REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {
    _name(path): path
    for folder in (ROOT, *(REPOSITORY.joinpath(*name.split(".")) for name in OUTSIDE))
    for path in sorted(folder.rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}


def _within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def _owner(name: str) -> str:
    """The entry of LAYERS a module belongs to: the longest that holds it."""
    owners = [entry for layer in LAYERS for entry in layer if entry and _within(name, entry)]
    return max(owners, key=len, default=name)


def _height(name: str) -> int:
    owner = _owner(name)
    return next((height for height, layer in enumerate(LAYERS) if owner in layer), -1)


@lru_cache
def _imports(name: str) -> tuple[str, ...]:
    """Absolute names of what a module imports, anywhere in it; "strobe.x" for our own."""
    package = name if FILES[name].name == "__init__.py" else name.rpartition(".")[0]
    found: list[str] = []
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = [*(() if _within(name, *OUTSIDE) else ("strobe",)), *filter(None, package.split("."))]
            above = parents[: len(parents) - node.level + 1] if node.level else []
            base = ".".join(above + ([node.module] if node.module else []))
            found += [f"{base}.{alias.name}" for alias in node.names]
    return tuple(found)


def _own_imports(name: str) -> set[str]:
    """Which of our modules a module imports ("" is the package itself)."""
    own = set()
    for imported in _imports(name):
        if _within(imported, "strobe", *OUTSIDE):
            inside = imported.removeprefix("strobe").removeprefix(".")
            while inside and inside not in FILES:
                inside = inside.rpartition(".")[0]  # an attribute of a module
            own.add(inside)
    return own


def _functions(name: str):
    return (node for node in ast.walk(TREES[name]) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def _compiled(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it is device code: decorated with a jit."""
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def _calls(name: str):
    return ((node, ast.unparse(node.func)) for node in ast.walk(TREES[name]) if isinstance(node, ast.Call))


# ---------------------------------------------------------------- imports


@pytest.mark.parametrize("name", FILES)
def test_imports_point_down(name):
    height = _height(name)
    assert height >= 0, f"{name} stands in no layer: give it one in LAYERS"
    upward = [other for other in _own_imports(name) if _height(other) >= height and _owner(other) != _owner(name)]
    assert upward == [], f"{name} imports {upward}, which stand beside or above it"


@pytest.mark.parametrize("folder", [entry for layer in LAYERS for entry in layer])
def test_no_folder_has_a_circle(folder):
    """A package's own file may import what stands in it; that counts for who imports the package from elsewhere."""
    inside = [name for name in FILES if _owner(name) == folder and name != folder]
    TopologicalSorter({name: _own_imports(name).intersection(inside) - {name} for name in inside}).prepare()


def test_kernel_families_do_not_know_one_another():
    """But for the Blackwell decode, which is the Hopper decode with other products."""
    decode = [f"kernels.hopper.{name}" for name in ("cluster_reduce", "decode", "decode_arguments", "decode_config")]
    decode += [
        f"kernels.hopper.{name}" for name in ("batch_invariant", "decode_hooks", "decode_layouts", "decode_loads")
    ]
    decode += [f"kernels.hopper.{name}" for name in ("decode_store", "launch_decode")]
    for name in FILES:
        shared = decode if name.startswith("kernels.blackwell.") and "decode" in name else []
        for family in FAMILIES:
            if _within(name, f"kernels.{family}"):
                strangers = [
                    other
                    for other in _own_imports(name)
                    for f in FAMILIES
                    if f != family and _within(other, f"kernels.{f}") and other not in shared
                ]
                assert strangers == [], name


def test_the_simulator_stands_apart():
    for name in FILES:
        if _within(name, "sim"):
            assert {other for other in _own_imports(name) if not _within(other, "sim")} == set(), name


def test_the_ladder_stands_on_the_reference_alone():
    """A rung is read by itself: it knows Gluon's words and the harness, no kernel of ours and no other rung. What
    measures and draws may also use the tables and figures of bench.
    """
    allowed = ("ladder", "kernels.device.dialect", "reference", "problem", "errors", "testing", "bench", "sim")
    for name in FILES:
        if _within(name, "ladder"):
            assert [other for other in _own_imports(name) if not _within(other, *allowed)] == [], name
    for name in RUNG_FILES.values():
        assert _own_imports(f"ladder.{name}") <= {
            "ladder.harness.harness",
            "ladder.harness.entry",
            "kernels.device.dialect",
        }, name


def test_the_library_does_not_import_its_applications():
    for name in FILES:
        if _owner(name) in LIBRARY:
            assert [other for other in _own_imports(name) if _owner(other) not in LIBRARY] == [], name


def test_only_kernels_import_a_dsl():
    for name in FILES:
        dsl = [imported for imported in _imports(name) if _within(imported, "triton")]
        if not _within(name, *KERNELS, "kernels.runtime", "sim", "ladder", "tools", "bench", "cli"):
            assert dsl == [], name


def test_a_form_prints_all_that_it_holds():
    """Triton tells compiled kernels apart by the text of their constants: two forms that print alike would be one
    kernel.
    """
    forms = [
        found
        for name in FILES
        if _within(name, "kernels")
        for found in vars(importlib.import_module(f"strobe.{name}")).values()
        if isinstance(found, type) and found.__name__.endswith(("Form", "Traits"))
    ]
    assert len(forms) >= 5
    for one in forms:
        assert one.__str__ is object.__str__ and "__dataclass_fields__" in vars(one), one


def test_only_the_dialect_opens_the_experimental_door():
    for name in FILES:
        if not _within(name, "kernels.device.dialect", "sim"):
            assert [imported for imported in _imports(name) if _within(imported, "triton.experimental")] == [], name


def test_importing_asking_and_running_on_a_cpu_loads_no_dsl():
    steps = (
        "import torch, strobe",
        "from strobe.kernels import kernels; [kernels(direction) for direction in ('forward', 'backward')]",
        "q = torch.zeros(1, 2, 1, 4, requires_grad=True); strobe.explain(q, q, q)",
        "strobe.attention(q, q, q, causal=True).sum().backward()",
    )
    look = "assert not [name for name in sys.modules if name.split('.')[0] == 'triton']"
    done = subprocess.run(
        [sys.executable, "-c", "import sys\n" + f"\n{look}\n".join((*steps, ""))], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- one door to each outside thing

DRIVER = (
    "get_device_properties",
    "get_device_capability",
    "get_device_name",
    "mem_get_info",
    "get_arch_list",
    "driver.active",
)


def test_only_target_asks_the_driver():
    for name in FILES:
        if name != "problem.target":
            assert [
                called
                for _, called in _calls(name)
                if any(called.endswith(ask) or f"{ask}." in called for ask in DRIVER)
            ] == [], name


def test_only_env_reads_the_environment():
    for name, tree in TREES.items():
        read = [
            ast.unparse(node)
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv")
        ]
        imported = [one for one in _imports(name) if one in ("os.environ", "os.getenv")]
        assert name == "env" or _within(name, "tools") or read + imported == [], name  # tools hand it on to processes


def _private_torch_names(tree: ast.AST) -> list[str]:
    """Imports and attributes of torch with a leading underscore, but for names of ops (torch.ops)."""
    bound, found = {"torch": "torch"}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.asname or "torch", alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [(alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names]
        else:
            continue
        bound |= {name: path for name, path in names if _within(path, "torch") and name != "torch"}
        found += [path for _, path in names if _within(path, "torch")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, _, rest = ast.unparse(node).partition(".")
            dotted = all(map(str.isidentifier, rest.split(".")))
            found += [f"{bound[root]}.{rest}"] if root in bound and dotted else []
    private = lambda part: part.startswith("_") and not part.endswith("__")
    return [path for path in found if not _within(path, "torch.ops") and any(map(private, path.split(".")))]


@pytest.mark.parametrize(
    "code",
    (
        "import torch._C._functorch as functorch",
        "from torch._ops import OpOverload",
        "from torch._C._dynamo.guards import TensorGuards",
        "from torch.utils._python_dispatch import TorchDispatchMode",
        "torch._C._cuda_getDevice()",
        "from torch.autograd import forward_ad\nforward_ad._current_level",
    ),
)
def test_a_private_torch_name_is_found(code):
    assert _private_torch_names(ast.parse(code))


def test_only_torch_private_uses_private_names_of_torch():
    for name, tree in TREES.items():
        if name != "problem.torch_private" and not _within(name, *OUTSIDE):
            assert _private_torch_names(tree) == [], name


# ---------------------------------------------------------------- sizes and names


@pytest.mark.parametrize("name", FILES)
def test_files_and_functions_are_short(name):
    device_code = _within(name, *KERNELS, "sim")
    lines = len(FILES[name].read_text().splitlines())
    rung = name.removeprefix("ladder.") in RUNG_FILES.values()
    assert lines <= (690 if device_code else 560 if rung else 480), f"{name} has {lines} lines"
    for function in _functions(name):
        length, most = function.end_lineno - function.lineno + 1, 140 if _compiled(function) else 85
        assert length <= most, f"{name}.{function.name} has {length} lines, more than {most}"


@pytest.mark.parametrize("name", FILES)
def test_functions_take_few_parameters(name):
    for function in _functions(name):
        if _owner(name).startswith("interface") and function.name in strobe.__all__:
            continue  # public functions of interface/ take each option as a keyword, and make one Call of them
        if _within(name, *STAND_INS) and function.name in importlib.import_module(f"strobe.{name}").__all__:
            continue  # said by another library
        arguments = function.args
        count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
        count -= bool(arguments.args) and arguments.args[0].arg in ("self", "cls")
        if _compiled(function):  # Triton takes the views that a kernel has of memory one by one: they count once
            count -= max(0, sum(argument.arg.endswith(("_desc", "_rest")) for argument in arguments.args) - 1)
        most = 12 if _compiled(function) else 8
        assert count <= most, f"{name}.{function.name} takes {count} parameters, more than {most}"


def test_the_face_is_small():
    assert len(Environment._fields) <= 6
    # 39 names until 0.2.0 took packed queries over pages: attention_paged, partial_attention_paged, explain_paged
    # 43 with block_lists, the constructor of masks from lists of blocks
    assert len(strobe.__all__) <= 43
    assert sorted(strobe.__all__) == strobe.__all__


def test_no_file_is_named_after_nothing():
    for path in (*FILES.values(), *(REPOSITORY / "tests").rglob("*.py")):
        assert path.stem not in ("utils", "common", "helpers", "misc") and not path.stem.endswith("_v2"), path


# Names that only this project used, where the field has a term (docs/house.md). `knobs` is not among them: Triton has a
# module of that name.
PRIVATE_WORDS = frozenset(
    (
        "bells", "await_said", "is_told", "told_free", "told_at", "let_go", "lagging", "lagging_max", "lags", "mending",
        "mend_values",
        "acquit", "judge", "verdicts_of", "came_back", "is_careful", "kept_in_range", "joined", "lasting", "reckons",
        "begun",
        "first_stores", "Sight", "meet_words", "unguarded", "at_once", "has_turn", "appending",
    )
)  # fmt: skip
NOT_YET = ("ladder",)


def _identifiers(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.alias):
            yield node.asname or node.name


@pytest.mark.parametrize("name", [name for name in FILES if not _within(name, *NOT_YET)])
def test_code_uses_the_fields_words(name):
    assert PRIVATE_WORDS.intersection(_identifiers(TREES[name])) == set(), name
    assert FILES[name].stem not in PRIVATE_WORDS


# ---------------------------------------------------------------- no silent failure, nothing dangerous


@pytest.mark.parametrize("name", FILES)
def test_checks_are_raised_not_asserted(name):
    asserts = [node.lineno for node in ast.walk(TREES[name]) if isinstance(node, ast.Assert)]
    assert asserts == [], f"{name} asserts at lines {asserts}: python -O would skip that; raise instead"


@pytest.mark.parametrize("name", FILES)
def test_no_net_is_cast_for_every_exception(name):
    handlers = [node for node in ast.walk(TREES[name]) if isinstance(node, ast.ExceptHandler)]
    broad = [
        node.lineno
        for node in handlers
        if node.type is None
        or any(word in ast.unparse(node.type).split(".") for word in ("Exception", "BaseException"))
    ]
    assert broad == [], f"{name} catches everything at lines {broad}"


@pytest.mark.parametrize("name", FILES)
def test_nothing_dangerous_is_called(name):
    assert [one for one in _imports(name) if _within(one, "pickle", "cPickle", "dill", "marshal", "shelve")] == []
    for node, called in _calls(name):
        assert called not in ("eval", "exec", "os.system", "os.popen", "pickle.load", "pickle.loads"), (
            f"{name}:{node.lineno} calls {called}"
        )
        shell = [
            keyword
            for keyword in node.keywords
            if keyword.arg == "shell" and not (isinstance(keyword.value, ast.Constant) and not keyword.value.value)
        ]
        assert shell == [], f"{name}:{node.lineno} starts a shell"


def test_results_are_small():
    size = sum(
        file.stat().st_size for file in (REPOSITORY / "results").iterdir() if not file.name.endswith("journal.jsonl")
    )
    assert size < 2_000_000, f"results/ holds {size} bytes: pack the rows, or take away those that no page quotes"


# ---------------------------------------------------------------- words


@pytest.mark.parametrize("name", [name for name in strobe.__all__ if inspect.isfunction(getattr(strobe, name))])
def test_public_functions_show_an_example_first_thing(name):
    text = inspect.getdoc(getattr(strobe, name)) or ""
    assert ">>> " in text and text.index(">>> ") < 400, f"{name} has no example near the top of its docstring"


@pytest.mark.parametrize("name", [name for name in FILES if not name.endswith("__main__")])
def test_examples_in_docstrings_hold(name):
    try:
        module = importlib.import_module(name if _within(name, *OUTSIDE) else f"strobe.{name}".rstrip("."))
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("strobe"):
            raise
        pytest.skip(f"needs {missing.name}")
    failed, _ = doctest.testmod(module)
    assert failed == 0


# ---------------------------------------------------------------- device code


def test_shared_device_functions_take_their_index_vectors_as_arguments():
    for name in FILES:
        if _within(name, "kernels.device"):
            bare = [
                node.lineno for node, called in _calls(name) if called.split(".")[-1] == "arange" and len(node.args) < 3
            ]
            assert bare == [], f"{name}: an arange without a layout of its own has none under Gluon"
