"""What is asked of a kernel, as values: tensors and options (call), their shape (problem), masks, caches, the machine (target).

Imports errors and env alone."""

from .problem import ALIGNMENT, Problem, refuse

__all__ = ["ALIGNMENT", "Problem", "refuse"]
