"""Values that describe a call: tensors and options (call), metadata (problem), masks, caches, the device (target).

Imports only errors and env from strobe."""

from .problem import ALIGNMENT, Problem, base_offset, refuse, rows_apart

__all__ = ["ALIGNMENT", "Problem", "base_offset", "refuse", "rows_apart"]
