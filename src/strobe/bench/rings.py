"""Other libraries' context parallelism for causal attention, as contenders: PyTorch's and ring-flash-attention's rings.

Each runs on strobe's kernels and on cuDNN's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

Ring = tuple[Callable[..., Tensor], list[Tensor]]  # attention of local q, k and v, and these and the output's gradient


@contextmanager
def torch_ring(backend: str, whole: list[Tensor]) -> Iterator[Ring]:
    """PyTorch's `context_parallel`. Its ring takes one number of heads, so keys are repeated."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with ExitStack() as stack:
        if backend == "strobe":
            from ..integrations import sdpa

            stack.enter_context(sdpa.enable())
        mesh = init_device_mesh("cuda", (dist.get_world_size(),))
        q, k, v, dout = (t.transpose(1, 2) for t in whole)
        buffers = [q.clone(), *(t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v)), dout.clone()]
        stack.enter_context(
            sdpa_kernel(SDPBackend.CUDNN_ATTENTION if backend == "cuDNN" else SDPBackend.FLASH_ATTENTION)
        )
        stack.enter_context(context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4))
        yield partial(F.scaled_dot_product_attention, is_causal=True), buffers


@contextmanager
def zigzag_ring(backend: str, whole: list[Tensor]) -> Iterator[Ring]:
    """ring-flash-attention's zigzag ring. On cuDNN, which takes one number of heads, keys are repeated."""
    module = _zigzag_module()
    group = whole[0].shape[2] // whole[1].shape[2]
    own = module._flash_attn_forward, module._flash_attn_backward
    if backend == "cuDNN":
        whole = [whole[0], *(t.repeat_interleave(group, 2) for t in whole[1:3]), whole[3]]
        module._flash_attn_forward, module._flash_attn_backward = _cudnn_forward, _cudnn_backward
    rank, count = dist.get_rank(), dist.get_world_size()
    local = []
    for tensor in whole:
        chunks = tensor.chunk(2 * count, 1)
        local.append(torch.cat([chunks[rank], chunks[2 * count - 1 - rank]], 1))
    try:
        yield partial(module.zigzag_ring_flash_attn_func, causal=True), local
    finally:
        module._flash_attn_forward, module._flash_attn_backward = own


def _zigzag_module() -> Any:
    """The module of the zigzag ring, on strobe's stand-in for FlashAttention-2."""
    from ..integrations.flash_attn import install

    install()
    # the package imports an adapter for transformers 4, whose names transformers 5 does not have; nothing here uses it
    adapters: Any = ModuleType("ring_flash_attn.adapters")
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None
    sys.modules.setdefault("ring_flash_attn.adapters", adapters)
    return import_module("ring_flash_attn.zigzag_ring_flash_attn")


def _cudnn_forward(**given: Any) -> tuple[Tensor, Tensor, None, None]:
    """cuDNN's forward, by the keywords that the zigzag ring gives FlashAttention-2's."""
    q, k, v = (given[name].transpose(1, 2) for name in "qkv")
    op = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    out, lse, *_ = op(q, k, v, None, True, given["dropout_p"], given["causal"], False, scale=given["softmax_scale"])
    return out.transpose(1, 2), lse.view(q.shape[:3]), None, None


def _cudnn_backward(**given: Any) -> None:
    """cuDNN's backward, likewise. It writes dq, dk and dv."""
    dout, q, k, v, out = (given[name].transpose(1, 2) for name in ("dout", "q", "k", "v", "out"))
    lse, random = given["softmax_lse"].contiguous()[..., None], torch.zeros((), dtype=torch.int64, device=q.device)
    op = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
    sizes = None, None, None, q.shape[2], k.shape[2]  # no bias, no offsets of packed sequences
    rest = *sizes, given["dropout_p"], given["causal"]
    found = op(dout, q, k, v, out, lse, random, random, *rest, scale=given["softmax_scale"])
    for name, gradient in zip(("dq", "dk", "dv"), found):
        given[name].copy_(gradient.transpose(1, 2))


RINGS: dict[str, Callable[[list[Tensor]], AbstractContextManager[Ring]]] = {
    f"{name}, {backend}": partial(ring, backend)
    for name, ring in (("torch ring", torch_ring), ("zigzag", zigzag_ring))
    for backend in ("strobe", "cuDNN")
}
ON_CPU = ("zigzag, strobe",)
