"""Attention on CPUs in torch ops: tiled, with every feature of the contract, never O(S_q * S_k) memory."""
