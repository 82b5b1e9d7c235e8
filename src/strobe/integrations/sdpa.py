"""strobe behind torch.nn.functional.scaled_dot_product_attention; see strobe.compat.sdpa.

>>> import strobe.integrations.sdpa
>>> with strobe.integrations.sdpa.enable():
...     pass
"""

from ..compat.sdpa import NAME, Switch, backend, enable, register

__all__ = ["NAME", "Switch", "backend", "enable", "register"]
