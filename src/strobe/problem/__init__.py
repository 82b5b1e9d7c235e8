"""What is asked of a kernel, as values: tensors and options (call), their shape (problem), masks, caches, the machine (target).

Imports errors and env alone."""

from .problem import ALIGNMENT, Problem, base_offset, refuse, rows_apart

__all__ = ["ALIGNMENT", "Problem", "base_offset", "refuse", "rows_apart"]
