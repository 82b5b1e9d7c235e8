"""Context-parallel attention with a mask of tensors inside a compiled function: it runs between two graphs."""

import torch

from .attention import attend_plan

attend_uncompiled = torch.compiler.disable(attend_plan)
