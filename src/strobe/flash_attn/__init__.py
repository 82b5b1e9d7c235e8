"""FlashAttention-2's package on strobe: `import strobe.flash_attn as flash_attn` is the whole change.

The same functions, arguments, defaults, layouts and returns as flash_attn 2.8; what strobe cannot do is refused by name.
docs/switching.md lists what is the same and what is not.
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

__version__ = "2.8.3"  # the interface it has, which callers ask for; strobe.__version__ is its own

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
