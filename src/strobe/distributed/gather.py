"""Rows of all ranks, gathered with a gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..problem.call import accumulator
from .group import Exchange


def gather_rows(local: Tensor, group: Any) -> Tensor:
    """The rows [T, ...] of all ranks, one after another; each rank has as many. The gradient of a row is the sum over
    ranks, in their order, in float32 at least.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> gather_rows(torch.ones(3, 2), None).shape
    torch.Size([3, 2])
    >>> dist.destroy_process_group()
    """
    return _Gather.apply(local, group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, local: Tensor, group: Any):
        ctx.group = group
        ranks = dist.get_world_size(group)
        whole = local.new_empty((ranks * local.shape[0], *local.shape[1:]))
        dist.all_gather(list(whole.chunk(ranks)) if len(local) else [whole] * ranks, local.contiguous(), group=group)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        ranks = dist.get_world_size(ctx.group)
        counts = [gradient.shape[0] // ranks] * ranks
        parts = Exchange(gradient.contiguous(), (counts, counts), ctx.group).wait().chunk(ranks)
        total = parts[0].to(accumulator(gradient.dtype))
        for part in parts[1:]:
            total = total + part
        return total.to(gradient.dtype), None
