"""Adapters to other libraries: arguments of FlashAttention, torch's SDPA and aten ops, transformers, KV caches."""
