"""Named cases, adversarial inputs, derived tolerances and poisoned memory, for tests, benchmarks and tools/proof."""

from .cases import CASES, LARGE, Case
from .compare import assert_as_good_as, assert_gradients_as_good_as, assert_kernel
from .indices import OutOfRange, out_of_range
from .inputs import FAMILIES
from .poison import Poison

__all__ = [
    "CASES",
    "FAMILIES",
    "LARGE",
    "Case",
    "OutOfRange",
    "Poison",
    "assert_as_good_as",
    "assert_gradients_as_good_as",
    "assert_kernel",
    "out_of_range",
]
