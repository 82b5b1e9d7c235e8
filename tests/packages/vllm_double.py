"""A test double of vLLM: the abstract classes of an attention backend and its registry, by their signatures in vLLM
0.33.0. `install` puts it in sys.modules where vLLM is not importable.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar, Generic, TypeVar

import torch

T = TypeVar("T")


class AttentionType(str, Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


@dataclass(frozen=True)
class MultipleOf:
    base: int


class AttentionBackend(ABC):
    supported_dtypes: ClassVar[list] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update: bool = True
    supports_kv_cache_update_bypass: bool = False

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(1)]

    @staticmethod
    @abstractmethod
    def get_name(): ...

    @staticmethod
    @abstractmethod
    def get_impl_cls(): ...

    @staticmethod
    @abstractmethod
    def get_builder_cls(): ...

    @classmethod
    def supports_dtype(cls, dtype):
        return dtype in cls.supported_dtypes

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype):
        return kv_cache_dtype is None or kv_cache_dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def supports_block_size(cls, block_size):
        sizes = [getattr(size, "base", size) for size in cls.get_supported_kernel_block_sizes()]
        return block_size is None or any(block_size % size == 0 for size in sizes)

    @classmethod
    def supports_head_size(cls, head_size):
        return True

    @classmethod
    def supports_compute_capability(cls, capability):
        return True

    @classmethod
    def supports_attn_type(cls, attn_type):
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_sink(cls):
        return False

    @classmethod
    def supports_sliding_window(cls):
        return False

    @classmethod
    def supports_non_causal(cls):
        return False

    @classmethod
    def supports_batch_invariance(cls):
        return False

    @classmethod
    def supports_per_head_quant_scales(cls):
        return False


class AttentionMetadata:
    pass


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor = True


class AttentionCGSupport(Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class AttentionMetadataBuilder(ABC, Generic[T]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    supports_update_block_table: bool = False
    supports_draft_decode_metadata_update: bool = False

    @abstractmethod
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device

    @classmethod
    def get_cudagraph_support(cls, vllm_config, kv_cache_spec):
        return cls._cudagraph_support

    @abstractmethod
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...

    def update_block_table(self, metadata, blk_table, slot_mapping):
        raise NotImplementedError

    def build_for_cudagraph_capture(self, common_attn_metadata):
        return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata)

    def build_for_drafting(self, common_attn_metadata, draft_index):
        return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata, fast_build=True)

    def update_draft_decode_metadata(self, metadata):
        raise NotImplementedError


class AttentionImplBase(ABC, Generic[T]):
    supports_quant_query_input: bool = False

    def process_weights_after_loading(self, act_dtype):
        pass


class AttentionImpl(AttentionImplBase[T], Generic[T]):
    @abstractmethod
    def __init__(
        self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None, sliding_window=None,
        kv_cache_dtype="auto", logits_soft_cap=None, attn_type=AttentionType.DECODER,
        kv_sharing_target_layer_name=None,
    ): ...  # fmt: skip

    @abstractmethod
    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ): ...  # fmt: skip


class AttentionBackendEnum(Enum):
    FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
    CUSTOM = None

    def get_path(self, include_classname=True):
        return _OVERRIDES.get(self, self.value)

    def get_class(self):
        module, _, name = self.get_path().rpartition(".")
        return getattr(__import__(module, fromlist=[name]), name)


_OVERRIDES: dict[AttentionBackendEnum, str] = {}


def register_backend(backend, class_path=None, is_mamba=False):
    _OVERRIDES[backend] = class_path
    return lambda cls: cls


_MODULES: dict[str, dict[str, Any]] = {
    "vllm": {},
    "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
    "vllm.v1": {},
    "vllm.v1.attention": {},
    "vllm.v1.attention.backend": {
        kind.__name__: kind
        for kind in (
            AttentionBackend, AttentionCGSupport, AttentionImpl, AttentionImplBase, AttentionMetadata,
            AttentionMetadataBuilder, AttentionType, CommonAttentionMetadata, MultipleOf,
        )
    },
    "vllm.v1.attention.backends": {},
    "vllm.v1.attention.backends.registry": {
        "AttentionBackendEnum": AttentionBackendEnum,
        "register_backend": register_backend,
    },
}  # fmt: skip


def is_real() -> bool:
    """Whether vLLM itself is importable."""
    found = sys.modules.get("vllm")
    return getattr(found, "__file__", None) is not None or (found is None and find_spec("vllm") is not None)


def install() -> None:
    """Make `import vllm` find the double, unless vLLM is importable."""
    if is_real() or "vllm" in sys.modules:
        return
    for name, names in _MODULES.items():
        module = ModuleType(name)
        vars(module).update(names)
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
