"""Make `import flash_attn` find strobe: `install()` adds strobe's modules to sys.modules, and FlashAttention's version
to importlib.metadata.

After that, transformers runs attn_implementation="flash_attention_2" (or 3, 4) on strobe. Importing strobe installs
nothing.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.metadata import DistributionFinder
from types import TracebackType
from typing import NamedTuple, NoReturn

import torch

from ..errors import InvalidProblem, describe


class _Original(NamedTuple):
    """A distribution of FlashAttention; `modules` maps its module names to strobe's."""

    distribution: str
    version: str
    modules: dict[str, str]


_FA2 = ("", ".flash_attn_interface", ".bert_padding", ".layers", ".layers.rotary")
_ORIGINALS = {
    2: _Original(
        "flash-attn",
        "2.8.3",
        {f"flash_attn{name}": f"strobe.flash_attn{name}" for name in _FA2}
        | {"flash_attn_2_cuda": "strobe.flash_attn.flash_attn_2_cuda"},
    ),
    3: _Original("flash-attn-3", "3.0.0", {"flash_attn_interface": "strobe.flash_attn_interface"}),
    4: _Original(
        "flash-attn-4",
        "4.0.0b36",
        {
            "flash_attn": "strobe.flash_attn",
            "flash_attn.cute": "strobe.cute",
            "flash_attn.cute.interface": "strobe.cute.interface",
        },
    ),
}


def install(*versions: int) -> Installed:
    """Make `import flash_attn` find strobe's modules, for FlashAttention-2 or for the given versions out of 2, 3 and 4.

    >>> with install():
    ...     from flash_attn import flash_attn_func
    >>> flash_attn_func.__module__
    'strobe.flash_attn.flash_attn_interface'

    sys.modules gets strobe's modules under FlashAttention's names. importlib.metadata, which transformers asks, gets a
    distribution of the replaced version (flash-attn 2.8.3). Call this before importing libraries that look for
    FlashAttention at import.

    `uninstall()` of the result, or the end of the `with` block, undoes it. Names that other code has imported remain
    imported.

    Raises InvalidProblem for another version, or if another module of the same name is already imported.
    """
    for version in versions or (2,):
        if version not in _ORIGINALS:
            raise InvalidProblem("versions", version, "2, 3 or 4", "say which FlashAttention strobe stands in for")
    return Installed([_ORIGINALS[version] for version in versions or (2,)])


class Installed(DistributionFinder):
    """The result of `install`; also the finder that reports the distributions to importlib.metadata."""

    def __init__(self, originals: list[_Original]):
        self._originals = originals
        self._modules = modules = {
            name: importlib.import_module(ours) for original in originals for name, ours in original.modules.items()
        }
        for name, module in modules.items():
            if sys.modules.get(name, module) is not module:
                got = getattr(sys.modules[name], "__file__", None) or "another module"
                raise InvalidProblem(
                    name, f"{got}, imported already", "no module of that name", "install before anything imports it"
                )
        self._added = [name for name in modules if name not in sys.modules]
        sys.modules.update(modules)
        if "flash_attn.cute" in modules:  # import would set it only on strobe's parent package
            vars(modules["flash_attn"])["cute"] = modules["flash_attn.cute"]
        sys.meta_path.insert(0, self)
        _forget()

    def uninstall(self) -> None:
        """Undo the installation. Names that another installation has stay until that is undone. A second call does
        nothing.
        """
        if self not in sys.meta_path:
            return
        sys.meta_path.remove(self)
        others = [finder for finder in sys.meta_path if isinstance(finder, Installed)]
        for name in self._added:
            heir = next((other for other in others if name in other._modules), None)
            if heir is not None:
                heir._added.append(name)
                continue
            sys.modules.pop(name, None)
            if name == "flash_attn.cute":
                vars(self._modules["flash_attn"]).pop("cute", None)
        _forget()

    def __enter__(self) -> Installed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.uninstall()

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Always None: the installed modules are already in sys.modules."""

    def find_distributions(
        self,
        context: DistributionFinder.Context = DistributionFinder.Context(),  # noqa: B008
    ) -> Iterator[metadata.Distribution]:
        """The installed distributions with the context's name (all for None). Names are compared with '_' replaced by
        '-'.
        """
        wanted = None if context.name is None else context.name.lower().replace("_", "-")
        return iter(
            [_Distribution(original) for original in self._originals if wanted in (None, original.distribution)]
        )


class _Distribution(metadata.Distribution):
    def __init__(self, original: _Original):
        self._original = original

    def read_text(self, filename: str) -> str | None:
        top = sorted({name.partition(".")[0] for name in self._original.modules})
        headers = {"Metadata-Version": "2.1", "Name": self._original.distribution, "Version": self._original.version}
        headers["Summary"] = "stand-in of strobe-attention"
        texts = {
            "METADATA": "".join(f"{key}: {value}\n" for key, value in headers.items()),
            "top_level.txt": "\n".join(top),
        }
        return texts.get(filename)

    def locate_file(self, path: object) -> NoReturn:
        raise FileNotFoundError(describe("path", path, "nothing: a stand-in has no files", "see strobe.__file__"))


def _forget() -> None:
    """Clear transformers' caches of FlashAttention: whether it is available, and the imported functions."""
    asked = sys.modules.get("transformers.utils.import_utils")
    names = (
        "_package_distribution_mapping",
        "is_flash_attn_2_available",
        "is_flash_attn_3_available",
        "is_flash_attn_4_available",
    )
    for name in (*names, "is_flash_attn_greater_or_equal"):
        clear = getattr(getattr(asked, name, None), "cache_clear", None)
        if clear is not None:
            clear()
    known = getattr(asked, "PACKAGE_DISTRIBUTION_MAPPING", None)  # transformers 5.17 reads it once, at import
    if isinstance(known, dict):
        known.clear()
        known.update(metadata.packages_distributions())
    loaded = sys.modules.get("transformers.modeling_flash_attention_utils")
    if loaded is not None and hasattr(loaded, "_loaded_implementation"):
        vars(loaded)["_loaded_implementation"] = None


# ---------------------------------------------------------------- torch.ops.flash_attn

_QKV = "Tensor q, Tensor k, Tensor v"
_OFFSETS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
_SCORES = "float dropout_p, float softmax_scale, bool causal"
_WINDOW = "SymInt window_size_left, SymInt window_size_right, float softcap, Tensor? alibi_slopes"
_LEFT_OUT = "SymInt window_size_left=-1, SymInt window_size_right=-1, float softcap=0., Tensor? alibi_slopes=None"
_GRADIENTS = f"Tensor dout, {_QKV}, Tensor out, Tensor softmax_lse, Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv"
_SCHEMAS = {
    "_flash_attn_forward": f"({_QKV}, {_SCORES}, {_WINDOW}, bool return_softmax) -> (Tensor, Tensor, Tensor, Tensor)",
    "_flash_attn_varlen_forward": f"({_QKV}, {_OFFSETS}, {_SCORES}, {_LEFT_OUT}, bool return_softmax=False, "
    "Tensor? block_table=None, "
    "Tensor? leftpad_k=None, Tensor? seqused_k=None, bool zero_tensors=False, SymInt num_splits=0) -> (Tensor, "
    "Tensor, Tensor, Tensor)",
    "_flash_attn_backward": (
        f"({_GRADIENTS}, {_SCORES}, {_WINDOW}, bool deterministic, Tensor? rng_state=None) -> Tensor"
    ),
    "_flash_attn_varlen_backward": f"({_GRADIENTS}, {_OFFSETS}, {_SCORES}, {_WINDOW}, bool deterministic, Tensor? "
    "rng_state=None, "
    "bool zero_tensors=False) -> Tensor",
}
_REGISTERED: list[
    torch.library.Library
] = []  # keeps the library alive: torch removes an operator together with its library


def register_ops() -> None:
    """Register `torch.ops.flash_attn._flash_attn_forward`, `_flash_attn_backward` and their varlen forms. A second call
    does nothing.

    >>> register_ops()
    >>> q = torch.randn(1, 5, 2, 16)
    >>> torch.ops.flash_attn._flash_attn_forward(q, q, q, 0.0, 0.25, True, -1, -1, 0.0, None, False)[0].shape
    torch.Size([1, 5, 2, 16])

    FlashAttention-2 registers the same names. So a process that calls this must not import an installed flash-attn,
    before or after. Raises InvalidProblem if the names are already registered.
    """
    if _REGISTERED:
        return
    for name in _SCHEMAS:
        if hasattr(torch.ops.flash_attn, name):
            got, remedy = f"{name}, registered already", "uninstall flash-attn, or do not import it in this process"
            raise InvalidProblem("torch.ops.flash_attn", got, "none of its names", remedy)
    functions = importlib.import_module("strobe.flash_attn.flash_attn_interface")
    library = torch.library.Library("flash_attn", "FRAGMENT")
    for name, schema in _SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, getattr(functions, name), "CompositeExplicitAutograd")
        torch.library.register_fake(f"flash_attn::{name}", getattr(functions, name), lib=library)
    _REGISTERED.append(library)


__all__ = ["Installed", "install", "register_ops"]
