"""Host code that launches of all GPU kernels share."""
