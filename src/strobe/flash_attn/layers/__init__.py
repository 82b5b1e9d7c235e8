"""The part of FlashAttention-2's `flash_attn.layers` that strobe provides: `rotary`."""
