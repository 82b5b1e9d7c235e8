"""A test double of SGLang: the base class of an attention backend, its registry and the pools that a backend reads, by
their signatures in SGLang 0.5.23. `install` puts it in sys.modules where SGLang is not importable.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch

# packages that SGLang imports, and that neither its attention classes nor its pools on a CPU use
UNUSED = ("torchvision", "decord", "sgl_kernel", "sentencepiece")


class ForwardMode(IntEnum):
    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    IDLE = auto()
    TARGET_VERIFY = auto()

    def is_decode(self):
        return self == ForwardMode.DECODE

    def is_idle(self):
        return self == ForwardMode.IDLE

    def is_mixed(self):
        return self == ForwardMode.MIXED

    def is_decode_or_idle(self):
        return self in (ForwardMode.DECODE, ForwardMode.IDLE)

    def is_target_verify(self):
        return self == ForwardMode.TARGET_VERIFY


class AttentionBackend:
    needs_cpu_seq_lens: bool = True
    forward_metadata: Any = None

    def init_forward_metadata(self, forward_batch):
        self.init_forward_metadata_out_graph(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False): ...

    def init_forward_metadata_in_graph(self, forward_batch): ...

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        raise NotImplementedError

    def get_cuda_graph_seq_len_fill_value(self):
        raise NotImplementedError

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        if forward_batch.forward_mode.is_idle():
            return q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        run = self.forward_decode if forward_batch.forward_mode.is_decode() else self.forward_extend
        return run(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        raise NotImplementedError

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        raise NotImplementedError


class AttentionType(Enum):
    DECODER = "decoder"
    DECODER_BIDIRECTIONAL = "decoder_bidirectional"
    ENCODER_ONLY = "encoder_only"


class RadixAttention(torch.nn.Module):
    def __init__(
        self, num_heads, head_dim, scaling, num_kv_heads, layer_id, logit_cap=0.0, v_head_dim=-1,
        sliding_window_size=-1, is_cross_attention=False,
    ):  # fmt: skip
        super().__init__()
        self.tp_q_head_num, self.tp_k_head_num, self.tp_v_head_num = num_heads, num_kv_heads, num_kv_heads
        self.qk_head_dim, self.v_head_dim = head_dim, head_dim if v_head_dim == -1 else v_head_dim
        self.scaling, self.layer_id, self.logit_cap = scaling, layer_id, logit_cap
        self.sliding_window_size, self.is_cross_attention = sliding_window_size or -1, is_cross_attention
        self.k_scale = self.v_scale = None
        self.attn_type, self.logit_capping_method, self.xai_temperature_len = AttentionType.DECODER, "tanh", -1


@dataclass
class KVWriteLoc:
    loc: torch.Tensor
    swa_loc: torch.Tensor | None = None
    full_loc: torch.Tensor | None = None
    physical: bool = False


class ReqToTokenPool:
    def __init__(self, size, max_context_len, device, enable_memory_saver):
        self.req_to_token = torch.zeros((size + 1, max_context_len), dtype=torch.int32, device=device)


class MHATokenToKVPool:
    def __init__(self, size, page_size, dtype, head_num, head_dim, layer_num, device, enable_memory_saver):
        make = lambda: torch.zeros(size + page_size, head_num, head_dim, device=device).to(dtype)
        self.k_buffer, self.v_buffer = ([make() for _ in range(layer_num)] for _ in range(2))
        self.dtype = dtype

    def get_kv_buffer(self, layer_id):
        return self.k_buffer[layer_id], self.v_buffer[layer_id]

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, k_scale=None, v_scale=None):
        """Copies to another dtype are scaled in place, as SGLang's are."""
        for pool, new, scale in zip(self.get_kv_buffer(layer.layer_id), (cache_k, cache_v), (k_scale, v_scale)):
            if new.dtype != self.dtype and scale is not None:
                new.div_(scale)
            pool.view(torch.uint8)[loc_info.loc] = new.to(self.dtype).view(torch.uint8)


ATTENTION_BACKENDS: dict[str, Any] = {}
CHOICES: list[str] = ["triton", "fa3"]
DETERMINISTIC: list[str] = ["triton", "fa3"]


def register_attention_backend(name):
    return lambda function: ATTENTION_BACKENDS.setdefault(name, function)


_MODULES: dict[str, dict[str, Any]] = {
    "sglang": {},
    "sglang.srt": {},
    "sglang.srt.arg_groups": {},
    "sglang.srt.arg_groups.choices": {
        "ATTENTION_BACKEND_CHOICES": CHOICES,
        "DETERMINISTIC_ATTENTION_BACKEND_CHOICES": DETERMINISTIC,
        "add_attention_backend_choices": CHOICES.extend,
        "add_deterministic_attention_backend_choices": DETERMINISTIC.extend,
    },
    "sglang.srt.layers": {},
    "sglang.srt.layers.attention": {},
    "sglang.srt.layers.attention.attention_registry": {
        "ATTENTION_BACKENDS": ATTENTION_BACKENDS,
        "register_attention_backend": register_attention_backend,
    },
    "sglang.srt.layers.attention.base_attn_backend": {"AttentionBackend": AttentionBackend},
    "sglang.srt.layers.radix_attention": {"AttentionType": AttentionType, "RadixAttention": RadixAttention},
    "sglang.srt.mem_cache": {},
    "sglang.srt.mem_cache.memory_pool": {
        "KVWriteLoc": KVWriteLoc, "MHATokenToKVPool": MHATokenToKVPool, "ReqToTokenPool": ReqToTokenPool,
    },
    "sglang.srt.model_executor": {},
    "sglang.srt.model_executor.forward_batch_info": {"ForwardMode": ForwardMode},
}  # fmt: skip


def is_real() -> bool:
    """Whether SGLang itself is importable."""
    found = sys.modules.get("sglang")
    return getattr(found, "__file__", None) is not None or (found is None and find_spec("sglang") is not None)


class _Unused(MetaPathFinder, Loader):
    """Mocks of packages in UNUSED that are not installed."""

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in UNUSED else None

    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__spec__, module.__path__, module.__name__, module.__file__ = spec, [], spec.name, None
        return module

    def exec_module(self, module): ...


def install() -> None:
    """Make `import sglang` find SGLang, or the double where it is not importable."""
    if is_real():
        import transformers.models.auto.image_processing_auto  # noqa: F401  # before torchvision seems to be there

        if not any(isinstance(finder, _Unused) for finder in sys.meta_path):
            sys.meta_path.append(_Unused())
        return
    if "sglang" in sys.modules:
        return
    for name, names in _MODULES.items():
        module = ModuleType(name)
        vars(module).update(names)
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
