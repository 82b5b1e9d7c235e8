"""Keys of compiled kernels in Triton's cache on disk.

Triton keys a compiled kernel by the text of its functions and of its constants. Two things are missing from that key:

- While Triton compiles a kernel it reads properties of traits (the kernel's constants). Their code is in no key, so
  after an upgrade of the package it would run what the earlier version compiled. Traits therefore hold a hash of
  the package's host code (`Constants`).
- The constants of a callee enter the key only if another kernel was hashed before it. A process that first decodes
  would then not find what a process that first attends had compiled. `hash_callees_first` makes the key independent of
  the order.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any

PACKAGE = Path(__file__).parents[2]
LAUNCHING = {"first_call_overlap.py", "launch_cache.py", "launcher.py"}  # traits read nothing from these
_HASHING = Lock()  # one thread at a time: a function that another thread is about to hash has no constants yet


@lru_cache
def host_code() -> str:
    """A hash of the code that traits read: of GPU kernels, masks and problems. It takes 5 ms."""
    files = sorted((PACKAGE / "kernels").rglob("*.py"))
    kernels = [file for file in files if file.name not in LAUNCHING and file.parent.name != "cpu"]
    files = [*kernels, PACKAGE / "problem" / "mask.py", PACKAGE / "problem" / "problem.py"]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]


@dataclass(frozen=True)
class Constants:
    """The base of traits. They have no __str__ of their own, because Triton distinguishes kernels by it."""

    host: str = field(default_factory=host_code, kw_only=True)


@lru_cache
def jit_callable() -> Any:
    """Triton's class of functions with a hash; its name differs between versions."""
    jit = import_module("triton.runtime.jit")
    return getattr(jit, "JITCallable", jit.JITFunction)


def hash_callees_first(function: Any) -> None:
    """Hash a kernel after all functions that it calls. A function that has a hash keeps it."""
    if isinstance(function, jit_callable()) and function.hash is None:  # else it is hashed, or interpreted
        with _HASHING:
            _hash(function, set())


def _hash(function: Any, seen: set[int]) -> None:
    seen.add(id(function))  # a set of functions would compute their hashes
    for name in function.fn.__code__.co_names:
        for callee in _callees(function.fn.__globals__.get(name)):
            if callee.hash is None and id(callee) not in seen:
                _hash(callee, seen)
    _ = function.cache_key


def _callees(value: Any) -> list[Any]:
    """The functions with a hash that a global name stands for: itself, or the methods of an aggregate."""
    functions = value.hash_attrs if getattr(value, "__triton_aggregate__", False) else (value,)
    return [function for function in functions if isinstance(function, jit_callable())]
