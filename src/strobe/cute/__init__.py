"""FlashAttention-4's functions on strobe: `import strobe.cute` for `import flash_attn.cute` is the whole change.

`strobe.cute.interface` has what `flash_attn.cute.interface` has beside them. docs/switching.md lists what is the same and what is not.
"""

from .interface import flash_attn_func, flash_attn_varlen_func

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
