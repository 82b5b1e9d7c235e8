"""An alias of strobe.problem.target, which older code imports."""

import warnings

from .problem.target import FAKES, KIB, Target

warnings.warn("strobe.target is strobe.problem.target now; strobe.Target stays", DeprecationWarning, stacklevel=2)

__all__ = ["FAKES", "KIB", "Target"]
