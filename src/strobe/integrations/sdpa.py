"""Run torch.nn.functional.scaled_dot_product_attention on strobe; see strobe.compat.sdpa.

>>> import strobe.integrations.sdpa
>>> with strobe.integrations.sdpa.enable():
...     pass
"""

from ..compat.sdpa import NAME, Handle, Switch, backend, enable, passed, register, served

__all__ = ["NAME", "Handle", "Switch", "backend", "enable", "passed", "register", "served"]
