"""A platform of vLLM on which its CUDA wheel runs on a CPU, with strobe's attention. The wheel has no CPU operators, so
the few that the engine calls beside attention stand here in torch.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from vllm.platforms.cpu import CpuPlatform

_LIBRARY = torch.library.Library("_C", "FRAGMENT")


def _slots(offsets, positions, table, slots, size):
    slots.fill_(-1)
    for row, (begin, end) in enumerate(pairwise(offsets.tolist())):
        place = positions[begin:end].long()
        slots[begin:end] = table[row][place // size].long() * size + place % size


for _name, _schema, _body in (
    ("init_cpu_memory_env", "(int[] nodes) -> ()", lambda nodes: None),
    ("init_cpu_threads_env", "(str ids) -> str", lambda ids: ""),
    ("compute_slot_mapping_kernel_impl", "(Tensor a, Tensor b, Tensor c, Tensor(a!) d, int e) -> ()", _slots),
    ("greedy_argmax", "(Tensor x) -> Tensor", lambda x: x.argmax(-1)),
):
    _LIBRARY.define(_name + _schema)
    _LIBRARY.impl(_name, _body, "CompositeExplicitAutograd")


def name() -> str:
    """The entry point of the group vllm.platform_plugins."""
    return "tests.packages.vllm_platform.HostPlatform"


class HostPlatform(CpuPlatform):
    @classmethod
    def get_attn_backend_cls(cls, *given, **more) -> str:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        return AttentionBackendEnum.CUSTOM.get_path()

    @classmethod
    def import_kernels(cls) -> None:
        """The wheel's kernels need a GPU."""
