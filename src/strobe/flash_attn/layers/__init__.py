"""What strobe has of FlashAttention-2's `flash_attn.layers`: `rotary`."""
