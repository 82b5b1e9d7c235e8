"""Checks of GPU kernels without a GPU: compiled code and its budgets, mutation scores, drift under other versions of
Triton.
"""
