"""The ops registered with torch.library, and their rules for autograd, vmap, DTensor and FLOP counters."""
