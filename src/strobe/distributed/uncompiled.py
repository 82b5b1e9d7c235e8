"""Context-parallel attention inside a compiled function: it runs uncompiled, between two graphs."""

import torch

from .attention import attend_plan

attend_uncompiled = torch.compiler.disable(attend_plan)
