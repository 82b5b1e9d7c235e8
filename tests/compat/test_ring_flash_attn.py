"""A public library built on flash_attn's private functions, ring-flash-attn 0.1.8, runs unchanged on strobe.flash_attn.

It comes with the `test` extra; alone: `pip install --no-deps ring-flash-attn==0.1.8`. Two processes on the CPU hold
half of the tokens each, and together give what one gives.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from itertools import pairwise

import pytest
import torch

import strobe.flash_attn as flash_attn
from strobe.integrations.flash_attn import install
from tests.processes import WORLD, together

NO_RING = "needs ring-flash-attn: pip install --no-deps ring-flash-attn==0.1.8"
pytestmark = pytest.mark.skipif(importlib.util.find_spec("ring_flash_attn") is None, reason=NO_RING)

DTYPE = torch.bfloat16  # the library returns dq in bfloat16 whatever it was given
OFFSETS = [0, 32, 48, 96]  # documents of 32, 16 and 48 tokens, which all its ways to share them can halve twice


def _library():
    """ring_flash_attn, on the stand-in."""
    install()
    # its adapter for transformers 4 asks at import for names that transformers 5 no longer has; nothing of it is used
    # here
    adapters = types.ModuleType("ring_flash_attn.adapters")
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None  # type: ignore[attr-defined]
    sys.modules["ring_flash_attn.adapters"] = adapters
    return importlib.import_module("ring_flash_attn")


def _halves(x, dim=0):
    return list(x.chunk(WORLD, dim))


def _zigzag(x, dim=0):
    """First and last quarter, then the two in the middle: as much causal work for each."""
    a, b, c, d = x.chunk(2 * WORLD, dim)
    return [torch.cat([a, d], dim), torch.cat([b, c], dim)]


def _stripes(x, dim=0):
    return [x.index_select(dim, torch.arange(rank, x.shape[dim], WORLD)) for rank in range(WORLD)]


def _each_document(share):
    def shared(x, dim=0):
        return [torch.cat(parts, dim) for parts in zip(*(share(x[start:end]) for start, end in pairwise(OFFSETS)))]

    return shared


def _dense(function, causal):
    return lambda ring, rank, q, k, v: getattr(ring, function)(q, k, v, causal=causal, return_attn_probs=False)


def _varlen(function):
    def run(ring, rank, q, k, v):
        offsets = torch.tensor(OFFSETS, dtype=torch.int32) // WORLD
        return getattr(ring, function)(q, k, v, offsets, int(offsets.diff().max()), causal=True)

    return run


def _gathered(ring, rank, q, k, v):
    offsets = torch.tensor(OFFSETS, dtype=torch.int32)
    *planned, keys = ring.llama3_flash_attn_prepare_cu_seqlens(offsets, True, rank, WORLD)
    return ring.llama3_flash_attn_varlen_func(q, k, v, *planned, heads_k_stride=1, local_k_slice=keys, causal=True)


# name: packed, how tokens are shared out, causal, the call of one process
CASES = {
    "ring": (False, _halves, False, _dense("ring_flash_attn_func", False)),
    "ring causal": (False, _halves, True, _dense("ring_flash_attn_func", True)),
    "zigzag": (False, _zigzag, True, _dense("zigzag_ring_flash_attn_func", True)),
    "stripe": (False, _stripes, True, _dense("stripe_flash_attn_func", True)),
    "ring packed": (True, _each_document(_halves), True, _varlen("ring_flash_attn_varlen_func")),
    "zigzag packed": (True, _each_document(_zigzag), True, _varlen("zigzag_ring_flash_attn_varlen_func")),
    "gathered packed": (True, _halves, True, _gathered),
}


def _inputs(packed):
    generator = torch.Generator().manual_seed(3)
    sizes = [(96, heads, 32) if packed else (2, 64, heads, 32) for heads in (4, 2, 2, 4)]
    return [torch.randn(size, generator=generator).to(DTYPE) for size in sizes]


def _process(rank, results):
    ring, found = _library(), {}
    for name, (packed, share, _, call) in CASES.items():
        q, k, v, dout = (share(t, 0 if packed else 1)[rank].contiguous() for t in _inputs(packed))
        leaves = [t.requires_grad_() for t in (q, k, v)]
        out = call(ring, rank, *leaves)
        out.backward(dout)
        found[name] = [out.detach(), *(leaf.grad for leaf in leaves)]
    torch.save(found, f"{results}/{rank}.pt")


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ring")
    together(_process, folder, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("name", CASES)
def test_a_ring_of_two_gives_what_one_gives(name, parts):
    packed, share, causal, _ = CASES[name]
    *qkv, dout = _inputs(packed)
    leaves = [t.requires_grad_() for t in qkv]
    if packed:
        offsets = torch.tensor(OFFSETS, dtype=torch.int32)
        out = flash_attn.flash_attn_varlen_func(*leaves, offsets, offsets, 48, 48, causal=causal)
    else:
        out = flash_attn.flash_attn_func(*leaves, causal=causal)
    out.backward(dout)
    for what, whole, index in zip(("out", "dq", "dk", "dv"), (out.detach(), *(leaf.grad for leaf in leaves)), range(4)):
        for rank, wanted in enumerate(share(whole, 0 if packed else 1)):
            found = parts[rank][name][index]
            worst = (found.float() - wanted.float()).abs().max() / wanted.float().abs().max()
            assert worst < 0.02, f"{what} of process {rank}: off by {worst:.3f} of its largest value"
