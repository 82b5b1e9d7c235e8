"""SGLang's attention backend on `strobe.attention_paged`: the metadata of a batch, and the layers' calls.

SGLang stores a key in a slot of a pool [slots, H_kv, D]; `req_to_token` maps each request's positions to slots. The
slots of a page are adjacent (--page-size), so strobe reads the pool in place as pages [n, page_size, H_kv, D].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

import strobe

# types of layers whose rows see later keys, always or in prompts
BOTH_WAYS = (AttentionType.ENCODER_ONLY,)
PROMPTS_BOTH_WAYS = (*BOTH_WAYS, AttentionType.DECODER_BIDIRECTIONAL)


@dataclass
class StrobeMetadata:
    """A batch, as `strobe.attention_paged` takes it."""

    cu_seqlens_q: Tensor  # int32 [B + 1]
    max_seqlen_q: int
    seqlens: Tensor  # int32 [B], the new tokens included
    page_table: Tensor  # int32 [B, max_pages]
    window_table: Tensor | None  # page table of the window layers' pool, if they have their own
    window_slots: Tensor | None  # int64 [T]: slots of the new keys in the window layers' pool


class StrobeAttnBackend(AttentionBackend):
    needs_cpu_seq_lens = False

    def __init__(self, model_runner: Any):
        super().__init__()
        if getattr(model_runner, "use_mla_backend", False):
            raise ValueError("strobe's SGLang backend has no MLA; choose another --attention-backend")
        self.page_size = model_runner.page_size
        self.pool = model_runner.token_to_kv_pool
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.max_pages = -(-self.req_to_token.shape[1] // self.page_size)
        self.device = self.req_to_token.device
        arguments = getattr(model_runner, "server_args", None)
        self.batch_invariant = bool(getattr(arguments, "enable_deterministic_inference", False))
        # maps slots to those of the window layers' pool; None if all layers share one pool
        self.to_window = getattr(self.pool, "translate_loc_from_full_to_swa", None)
        self.forward_metadata: StrobeMetadata | None = None
        self.graphs: dict[tuple[int, int], StrobeMetadata] = {}  # (batch, new tokens of a request) -> static tensors
        self.scales: dict[int, tuple[Tensor, Tensor]] = {}

    # ------------------------------------------------------------ metadata of a batch

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Compute the metadata of a batch that runs without a graph."""
        news = self._uniform_news(forward_batch)
        if news is None:
            lengths = forward_batch.extend_seq_lens
            offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
            news, longest = 0, max(map(int, forward_batch.extend_seq_lens_cpu), default=0)
        else:
            offsets, longest = self._uniform_offsets(forward_batch.batch_size, news), news
            news = news if forward_batch.forward_mode.is_target_verify() else 0
        self.forward_metadata = StrobeMetadata(
            offsets,
            longest,
            (forward_batch.seq_lens + news).to(torch.int32),
            *self._tables(forward_batch.req_pool_indices),
            self._window_slots(forward_batch),
        )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        ints = lambda *shape: torch.zeros(shape, dtype=torch.int32, device=self.device)
        self.static = ints(max_bs), ints(max_bs, self.max_pages)
        self.static_window = (ints(max_bs, self.max_pages), ints(max_num_tokens).long()) if self.to_window else None
        self.graphs.clear()

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Choose the static tensors of a graph. Their contents are computed in the graph."""
        news, batch = self._uniform_news(forward_batch), forward_batch.batch_size
        if news is None:
            raise ValueError(f"strobe's graphs hold decodes and verifications, not {forward_batch.forward_mode}")
        if (batch, news) not in self.graphs:
            seqlens, table = (tensor[:batch] for tensor in self.static)
            window_table = window_slots = None
            if self.static_window is not None:
                window_table, window_slots = self.static_window[0][:batch], self.static_window[1][: batch * news]
            offsets = self._uniform_offsets(batch, news)
            self.graphs[batch, news] = StrobeMetadata(offsets, news, seqlens, table, window_table, window_slots)
        self.forward_metadata = self.graphs[batch, news]

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Compute lengths and tables from the runner's tensors, by operations that a graph records."""
        news, metadata = self._uniform_news(forward_batch), self.forward_metadata
        if metadata is None or news is None:
            raise ValueError("init_forward_metadata_out_graph runs before the graph")
        more = news if forward_batch.forward_mode.is_target_verify() else 0
        metadata.seqlens.copy_(forward_batch.seq_lens + more)
        table, window_table = self._tables(forward_batch.req_pool_indices)
        metadata.page_table.copy_(table)
        if metadata.window_table is not None and metadata.window_slots is not None:
            metadata.window_table.copy_(window_table)
            metadata.window_slots.copy_(self._window_slots(forward_batch))

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def _uniform_news(self, forward_batch: Any) -> int | None:
        """The number of new tokens of each request if it is the same for all: 1 in a decode, the number of drafted
        tokens in a verification. None for prefills and mixed batches.
        """
        if forward_batch.forward_mode.is_decode_or_idle():
            return 1
        if forward_batch.forward_mode.is_target_verify():
            if getattr(forward_batch.spec_info, "topk", 1) > 1:
                raise ValueError("strobe verifies chains of drafted tokens, not trees: set --speculative-eagle-topk 1")
            return forward_batch.spec_info.draft_token_num
        return None

    def _uniform_offsets(self, batch: int, news: int) -> Tensor:
        return torch.arange(0, (batch + 1) * news, news, dtype=torch.int32, device=self.device)[: batch + 1]

    def _tables(self, requests: Tensor) -> tuple[Tensor, Tensor | None]:
        """The page tables of requests. Entries beyond a request's last page may hold anything: they are not read."""
        first = self.req_to_token[requests, :: self.page_size]
        table = (first // self.page_size).to(torch.int32)
        if self.to_window is None:
            return table, None
        return table, (self.to_window(first.flatten()).view_as(first) // self.page_size).to(torch.int32)

    def _window_slots(self, forward_batch: Any) -> Tensor | None:
        if self.to_window is None or forward_batch.out_cache_loc is None:
            return None
        return self.to_window(forward_batch.out_cache_loc)

    # ------------------------------------------------------------ layers

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        # drafted tokens see what they would see in a decode
        both_ways = BOTH_WAYS if forward_batch.forward_mode.is_target_verify() else PROMPTS_BOTH_WAYS
        causal = layer.attn_type not in both_ways
        return self._attend((q, k, v), layer, forward_batch, causal, save_kv_cache, kwargs)

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        causal = layer.attn_type not in BOTH_WAYS
        return self._attend((q, k, v), layer, forward_batch, causal, save_kv_cache, kwargs)

    def _attend(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        layer: Any,
        forward_batch: Any,
        causal: bool,
        save: bool,
        options: dict[str, Any],
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Write k and v to the pool, and return attention of q [T, H_q * D] as [T, H_q * D_v]. With the option
        `return_lse` also lse [T, H_q] in float32.
        """
        (q, k, v), metadata = qkv, self.forward_metadata
        _check(layer, options)
        if metadata is None:
            raise ValueError("init_forward_metadata runs before the layers of a batch")
        if save and k is not None:
            location = KVWriteLoc(forward_batch.out_cache_loc, metadata.window_slots)
            self.pool.set_kv_buffer(layer, location, k, v, layer.k_scale, layer.v_scale)
        windowed = layer.sliding_window_size is not None and layer.sliding_window_size > -1
        table = metadata.window_table if windowed and metadata.window_table is not None else metadata.page_table
        keys, values = self.pool.get_kv_buffer(layer.layer_id)
        pages = [
            pool.view(-1, self.page_size, heads, width)
            for pool, heads, width in (
                (keys, layer.tp_k_head_num, layer.qk_head_dim),
                (values, layer.tp_v_head_num, layer.v_head_dim),
            )
        ]
        scales = self._scales(layer) if pages[0].dtype == torch.float8_e4m3fn else (None, None)
        found = strobe.attention_paged(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            strobe.PagedCache(*pages, table, metadata.seqlens, *scales),
            cu_seqlens_q=metadata.cu_seqlens_q,
            max_seqlen_q=metadata.max_seqlen_q,
            causal=causal,
            window=(layer.sliding_window_size, 0 if causal else layer.sliding_window_size) if windowed else None,
            scale=layer.scaling,
            softcap=layer.logit_cap or None,
            sinks=options.get("sinks"),
            batch_invariant=self.batch_invariant,
            return_lse=bool(options.get("return_lse")),
        )
        if isinstance(found, Tensor):
            return found.flatten(1)
        out, lse = found
        return out.flatten(1), lse.T.contiguous()

    def _scales(self, layer: Any) -> tuple[Tensor, Tensor]:
        """The layer's scales as [H_kv], or 1 if it has none. They are constants, so they are expanded once."""
        if layer.layer_id not in self.scales:
            scales = []
            for scale, heads in ((layer.k_scale, layer.tp_k_head_num), (layer.v_scale, layer.tp_v_head_num)):
                given = torch.ones((), device=self.device) if scale is None else torch.as_tensor(scale)
                scales.append(given.to(self.device, torch.float32).reshape(-1).expand(heads).contiguous())
            self.scales[layer.layer_id] = scales[0], scales[1]
        return self.scales[layer.layer_id]


def _check(layer: Any, options: dict[str, Any]) -> None:
    """Raise ValueError for options that change the result and that the backend does not support."""
    if layer.is_cross_attention:
        raise ValueError("strobe's SGLang backend has no cross attention")
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        raise ValueError(f"strobe caps logits by tanh, not by {layer.logit_capping_method}")
    if getattr(layer, "xai_temperature_len", -1) > 0:
        raise ValueError("strobe has no temperature by position (xai_temperature_len)")
    known = ("sinks", "return_lse")
    others = [name for name, value in options.items() if name not in known and value is not None]
    if others:
        raise ValueError(f"strobe's SGLang backend does not know {', '.join(others)}")
