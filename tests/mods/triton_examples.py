"""Functions of `triton.jit` as scores and masks, with their derivatives and references."""

import torch
import triton
import triton.language as tl


@triton.jit
def _slope(slopes, h):
    return tl.load(slopes + h).to(tl.float32)


@triton.jit
def near(score, b, h, q_idx, kv_idx, slopes, cap, first):
    """A helper, a captured tensor, a float and an int."""
    distance = tl.abs(q_idx - kv_idx).to(tl.float32)
    return tl.where(kv_idx < first, score, score - _slope(slopes, h) * tl.minimum(distance, cap)) * 0.5


@triton.jit
def near_backward(dscore, score, b, h, q_idx, kv_idx, slopes, cap, first):
    return dscore * 0.5


def near_reference(score, b, h, q_idx, kv_idx, slopes, cap, first):
    distance = (q_idx - kv_idx).abs().float().clamp(max=cap)
    return torch.where(kv_idx < first, score, score - slopes[h] * distance) * 0.5


@triton.jit
def squared(score, b, h, q_idx, kv_idx):
    return score * score


@triton.jit
def squared_backward(dscore, score, b, h, q_idx, kv_idx):
    return 2.0 * dscore * score


@triton.jit
def striped(b, h, q_idx, kv_idx, widths, phase):
    return (q_idx + kv_idx + phase) % tl.load(widths + h) < 2


def striped_reference(b, h, q_idx, kv_idx, widths, phase):
    return (q_idx + kv_idx + phase) % widths[h] < 2
