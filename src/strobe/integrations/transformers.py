"""Run transformers models with attn_implementation="strobe"; see strobe.compat.transformers.

>>> import strobe.integrations.transformers
>>> strobe.integrations.transformers.register()
"""

from ..compat.transformers import BATCHING_NAME, NAME, context_parallel, continuous_batching, register

__all__ = ["BATCHING_NAME", "NAME", "context_parallel", "continuous_batching", "register"]
