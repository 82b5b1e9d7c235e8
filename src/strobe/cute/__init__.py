"""FlashAttention-4's functions on strobe. To switch, replace `import flash_attn.cute` by `import strobe.cute`.

`strobe.cute.interface` has further functions of `flash_attn.cute.interface`. docs/switching.md lists the differences.
"""

from .interface import flash_attn_func, flash_attn_varlen_func

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
