"""vLLM's attention backend on `strobe.attention_paged`: what it can run, the metadata of a batch, and the layer.

vLLM passes a layer's cache as [num_blocks, num_kv_heads, block_size, head_size + head_size_v], in any memory layout:
keys lie beside their values. strobe reads both in place, as strided pages [num_blocks, block_size, H_kv, D].
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import envs
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)

import strobe

FP8 = ("fp8", "fp8_e4m3")
_WITHOUT_CACHE = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
MAX_HEAD_SIZE = 256


class StrobeAttentionBackend(AttentionBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *FP8]
    forward_includes_kv_cache_update = False
    supports_kv_cache_update_bypass = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # a member of AttentionBackendEnum, which vLLM reserves for plugins

    @staticmethod
    def get_impl_cls() -> type[StrobeImpl]:
        return StrobeImpl

    @staticmethod
    def get_builder_cls() -> type[StrobeMetadataBuilder]:
        return StrobeMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 0 < head_size <= MAX_HEAD_SIZE

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability is None or capability[0] >= 8  # None: not a GPU

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER, *_WITHOUT_CACHE)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True


@dataclass
class Prefix:
    """A prefix that all requests of a batch share (cascade attention), and the lengths of their other keys."""

    pages: int
    offsets: Tensor  # int32 [2]: all queries are one sequence
    length: Tensor  # int32 [1]
    rest: Tensor  # int32 [num_reqs]: keys after the prefix


@dataclass
class StrobeMetadata(AttentionMetadata):
    """A batch, as `strobe.attention_paged` takes it. Without a prefix nothing is derived from lengths, so a CUDA graph
    may be replayed with other lengths.
    """

    num_actual_tokens: int
    max_query_len: int  # at least the most tokens of a request
    query_start_loc: Tensor  # int32 [num_reqs + 1]
    seq_lens: Tensor  # int32 [num_reqs]
    block_table: Tensor  # int32 [num_reqs, max_blocks]
    slot_mapping: Tensor
    causal: bool
    prefix: Prefix | None = None


class StrobeMetadataBuilder(AttentionMetadataBuilder[StrobeMetadata]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    supports_update_block_table = True
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size = kv_cache_spec.block_size

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> StrobeMetadata:
        """common_prefix_len: keys of a prefix that all requests share, a multiple of the block size; 0 for none."""
        batch = common_attn_metadata
        if isinstance(batch.causal, Tensor):
            raise NotImplementedError("strobe has one causal flag for a batch, not one for each request")
        prefix = None
        if common_prefix_len:
            lengths = [0, batch.num_actual_tokens, common_prefix_len]
            counts = torch.tensor(lengths, dtype=torch.int32, device=batch.seq_lens.device)
            rest = (batch.seq_lens - common_prefix_len).clamp(min=0).to(torch.int32)  # padding has length 0
            prefix = Prefix(common_prefix_len // self.block_size, counts[:2], counts[2:], rest)
        return StrobeMetadata(
            num_actual_tokens=batch.num_actual_tokens,
            max_query_len=batch.max_query_len,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table_tensor,
            slot_mapping=batch.slot_mapping,
            causal=batch.causal,
            prefix=prefix,
        )

    def update_block_table(self, metadata: StrobeMetadata, blk_table: Tensor, slot_mapping: Tensor) -> StrobeMetadata:
        other = copy.copy(metadata)
        other.block_table, other.slot_mapping = blk_table, slot_mapping
        return other

    def update_draft_decode_metadata(self, metadata: StrobeMetadata) -> None:
        """Nothing to do: the metadata holds tensors that vLLM updates in place, and nothing derived from them."""


class StrobeImpl(AttentionImpl[StrobeMetadata]):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.softcap = logits_soft_cap or None
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self.sliding_window = sliding_window
        self.is_fp8 = kv_cache_dtype in FP8
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self._alibi: Any = None
        self._scales: tuple[Tensor | None, Tensor | None] | None = None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: StrobeMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write attention of query [num_tokens, H_q, D] to output [num_tokens, H_q, D_v], and return output. Rows after
        the batch's last token are padding. attn_metadata: None in vLLM's profiling run, whose output is 0.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("strobe does not quantize outputs")
        if attn_metadata is None:
            return output.fill_(0)
        count = attn_metadata.num_actual_tokens
        q, out = query[:count], output[:count]
        if self.attn_type in _WITHOUT_CACHE:
            self._encode(q, key[:count], value[:count], out, attn_metadata)
        elif attn_metadata.prefix is not None and self.sliding_window is None and self.alibi_slopes is None:
            out.copy_(self._cascade(layer, q, kv_cache, attn_metadata, attn_metadata.prefix))
        else:
            cache = self._cache(layer, kv_cache, attn_metadata.block_table, attn_metadata.seq_lens)
            causal = attn_metadata.causal
            strobe.attention_paged(
                q, cache, cu_seqlens_q=attn_metadata.query_start_loc, max_seqlen_q=attn_metadata.max_query_len,
                causal=causal, window=self._window(causal), sinks=self.sinks, out=out, score_mod=self._bias(q),
                **self._options(),
            )  # fmt: skip
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write new keys and values to the slots of the cache. Tokens beyond slot_mapping are padding."""
        if self.attn_type not in _WITHOUT_CACHE:
            count = slot_mapping.shape[0]
            cache = self._cache(layer, kv_cache, slot_mapping, slot_mapping)
            strobe.append(cache, key[:count], value[:count], slots=slot_mapping)

    def _bias(self, q: Tensor) -> Any:
        """The score function of ALiBi, or None. It is built once, because slopes are constants."""
        if self._alibi is None and self.alibi_slopes is not None:
            self._alibi = strobe.alibi(self.alibi_slopes.to(q.device))
        return self._alibi

    def _options(self) -> dict[str, Any]:
        invariant = bool(envs.VLLM_BATCH_INVARIANT)
        return {"scale": self.scale, "softcap": self.softcap, "batch_invariant": invariant}

    def _window(self, causal: bool) -> tuple[int, int] | None:
        """strobe's window of a row. vLLM's sliding_window includes the row's own key. Without a causal mask the window
        has as many keys on the right as on the left.
        """
        if self.sliding_window is None:
            return None
        return self.sliding_window - 1, 0 if causal else self.sliding_window - 1

    def _cache(self, layer: Any, kv_cache: Tensor, block_table: Tensor, seq_lens: Tensor) -> strobe.PagedCache:
        if self.is_fp8 and kv_cache.dtype != torch.float8_e4m3fn:
            kv_cache = kv_cache.view(torch.float8_e4m3fn)
        pages = kv_cache.transpose(1, 2)
        k, v = pages[..., : self.head_size], pages[..., self.head_size :]
        return strobe.PagedCache(k, v, block_table, seq_lens, *self._quant_scales(layer))

    def _quant_scales(self, layer: Any) -> tuple[Tensor | None, Tensor | None]:
        """The layer's scales as [H_kv]. They are constants once the weights are loaded, so they are expanded once."""
        if self._scales is None:
            by_head = lambda scale: scale.float().expand(self.num_kv_heads).contiguous()
            self._scales = (by_head(layer._k_scale), by_head(layer._v_scale)) if self.is_fp8 else (None, None)
        return self._scales

    def _encode(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, batch: StrobeMetadata) -> None:
        """Attention of sequences without a cache, in both directions."""
        offsets, longest = batch.query_start_loc, batch.max_query_len
        strobe.attention_varlen(
            q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=longest, max_seqlen_k=longest,
            causal=False, window=self._window(False), sinks=self.sinks, out=out, score_mod=self._bias(q),
            **self._options(),
        )  # fmt: skip

    def _cascade(self, layer: Any, q: Tensor, kv_cache: Tensor, batch: StrobeMetadata, prefix: Prefix) -> Tensor:
        """Attention of all queries over the shared prefix, merged with attention over each request's other keys."""
        part = strobe.partial_attention_paged
        shared = self._cache(layer, kv_cache, batch.block_table[:1, : prefix.pages], prefix.length)
        own = self._cache(layer, kv_cache, batch.block_table[:, prefix.pages :], prefix.rest)
        over_prefix = part(q, shared, cu_seqlens_q=prefix.offsets, causal=False, **self._options())
        over_rest = part(
            q, own, cu_seqlens_q=batch.query_start_loc, max_seqlen_q=batch.max_query_len, causal=batch.causal,
            **self._options(),
        )  # fmt: skip
        whole = strobe.merge(over_prefix, over_rest)
        return (whole if self.sinks is None else strobe.with_sinks(whole, self.sinks)).out
