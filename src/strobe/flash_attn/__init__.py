"""FlashAttention-2's package on strobe. To switch, replace `import flash_attn` by `import strobe.flash_attn as
flash_attn`.

Functions, arguments, defaults, layouts and results are those of flash_attn 2.8. Unsupported arguments raise
UnsupportedProblem with their name. docs/switching.md lists the differences.
"""

from .flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

# callers check it: the version of FlashAttention whose interface this is; strobe's is strobe.__version__
__version__ = "2.8.3"

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
