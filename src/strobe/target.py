"""An alias of strobe.problem.target, which older code imports."""

import warnings

from .problem.target import *  # noqa: F403
from .problem.target import FAKES, Target

warnings.warn("strobe.target is strobe.problem.target now; strobe.Target stays", DeprecationWarning, stacklevel=2)

__all__ = ["FAKES", "Target"]
