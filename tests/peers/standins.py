"""FlashAttention's modules as its tests import them: the stand-ins under the originals' names, and the helpers of the
tests' own checkout.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


class MissingExport(AttributeError):
    """A test called a name that the stand-in does not have."""


class Alias(ModuleType):
    """A module under another's name. A name that it lacks can be imported, as other tests of the file do without it,
    and fails when called.
    """

    def __init__(self, name: str, target: ModuleType | None = None, extra: Mapping[str, Any] | None = None):
        super().__init__(name)
        self.__path__: list[str] = []  # a package, of which nothing is looked for in the file system
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__dict__.update(extra or {})
        self._target = target

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        target = self._target
        if target is None:
            raise AttributeError(f"{self.__name__} has no {name}")
        try:
            return getattr(target, name)
        except AttributeError:
            return _missing(target.__name__, name)


def _missing(module: str, name: str):
    def absent(*_args, **_kwargs):
        raise MissingExport(f"{module} has no {name}")

    for attribute in (
        "fwd",
        "bwd",
        "varlen_fwd",
        "varlen_bwd",
        "compile_cache",
    ):  # of flash_attn_gpu, and of FA4's private functions
        setattr(absent, attribute, absent)
    return absent


class Cache:
    """What their tests clear, replace and count, of a cache of compiled kernels; strobe's kernels are not kept in
    it."""

    def __init__(self):
        self.cache: dict = {}

    def clear(self) -> None:
        self.cache.clear()


def install(checkout: Path) -> None:
    """Put the stand-ins into sys.modules. Helpers that need no kernel come from the checkout, where it has them."""
    fa2 = _strobe("flash_attn")
    _alias("flash_attn", fa2)
    _alias("flash_attn.bert_padding", _strobe("flash_attn.bert_padding"))
    _alias("flash_attn.flash_attn_interface", _strobe("flash_attn.flash_attn_interface"), USE_TRITON_ROCM=False)
    _alias("flash_attn_interface", _strobe("flash_attn_interface"))
    cute = _strobe("cute")
    _alias("flash_attn.cute", cute)
    _alias("flash_attn.cute.interface", _strobe("cute.interface") or cute)
    _alias("flash_attn.cute.cache_utils", JITCache=Cache)
    _alias("flash_attn.layers")
    _own("flash_attn.cute.testing", checkout / "flash_attn/cute/testing.py")
    _own_rotary(checkout / "flash_attn")


def _strobe(name: str) -> ModuleType | None:
    """A module of strobe, or None where this version has none of that name."""
    try:
        return importlib.import_module(f"strobe.{name}")
    except ModuleNotFoundError as missing:
        if missing.name != f"strobe.{name}" and not (missing.name or "").startswith("strobe."):
            raise
        return None


def _alias(name: str, target: ModuleType | None = None, **extra: Any) -> None:
    _bind(name, Alias(name, target, extra))


def _bind(name: str, module: ModuleType) -> None:
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)


def _own(name: str, path: Path) -> ModuleType | None:
    """A file of the checkout under the name its tests import it by."""
    if not path.is_file():
        return None
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    _bind(name, module)
    spec.loader.exec_module(module)
    return module


def _own_rotary(package: Path) -> None:
    """Their rotary embedding, which their tests judge a cache by: its Triton kernel on a GPU, its plain PyTorch
    elsewhere.
    """
    _alias("flash_attn.ops")
    _alias("flash_attn.ops.triton")
    if torch.cuda.is_available():
        _own("flash_attn.ops.triton.rotary", package / "ops/triton/rotary.py")
    else:
        _alias("flash_attn.ops.triton.rotary", apply_rotary=None)
    rotary = _own("flash_attn.layers.rotary", package / "layers/rotary.py")
    if rotary is not None and not torch.cuda.is_available():
        rotary.apply_rotary_emb = _rotary_by(rotary.apply_rotary_emb_torch)  # type: ignore[attr-defined]


def _rotary_by(turned):
    def apply_rotary_emb(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0):
        """x [B, S, H, D], turned by the angles of the positions from seqlen_offsets on; in float32 and rounded once, as
        by their kernel.
        """
        if inplace:
            raise ValueError("inplace: got True, expected False; the plain PyTorch of theirs writes a copy")
        offsets = torch.as_tensor(seqlen_offsets, device=x.device).reshape(-1, 1)
        positions = offsets + torch.arange(x.shape[1], device=x.device)
        positions = positions.clamp(max=cos.shape[0] - 1)  # rows beyond the table are padding
        return turned(x.float(), cos[positions].float(), sin[positions].float(), interleaved).to(x.dtype)

    return apply_rotary_emb
