"""Triton kernels for any GPU from sm_80 on."""
