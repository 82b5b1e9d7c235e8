"""Triton's key of a kernel, the same whatever was compiled before.

Triton keeps compiled kernels on disk under a hash of the text of their functions and of the constants of modules that
these name. It takes a callee's constants over before it has looked for them: those of a function that another kernel's
hash has met are in the key, those of others are not. So a process that first decodes, or first runs a portable kernel,
would not find what one that first attends had compiled, and compile it again. Here functions are hashed before whatever
calls them.
"""

from __future__ import annotations

from threading import Lock
from typing import Any

from triton.runtime import jit

CALLABLE: Any = getattr(jit, "JITCallable", jit.JITFunction)
_HASHING = Lock()  # one thread at a time: what another is about to hash has no constants yet


def hash_callees_first(function: Any) -> None:
    """Hash a kernel and all that it calls; what was hashed before keeps its hash."""
    if isinstance(function, CALLABLE) and function.hash is None:  # else hashed, or interpreted
        with _HASHING:
            _hash(function, set())


def _hash(function: Any, met: set[int]) -> None:
    met.add(id(function))  # a set of functions would ask for their hashes
    for name in function.fn.__code__.co_names:
        callee = function.fn.__globals__.get(name)
        if isinstance(callee, CALLABLE) and callee.hash is None and id(callee) not in met:
            _hash(callee, met)
    _ = function.cache_key
