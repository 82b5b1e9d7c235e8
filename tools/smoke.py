"""Forward, backward and decode of the installed strobe on a CPU, compared with the float64 oracle. Needs torch alone.

python tools/smoke.py        prints one line; a wrong result raises AssertionError
"""

from __future__ import annotations

import platform

import torch

import strobe
from strobe.problem.call import Call
from strobe.problem.decode import DecodeCall
from strobe.testing.compare import assert_as_good_as, assert_gradients_as_good_as
from strobe.testing.decode import assert_decode_as_good_as


def forward_and_backward(dtype: torch.dtype) -> None:
    """Causal attention of 37 queries over 53 keys, two query heads a key head, with its gradients."""
    draw = torch.Generator().manual_seed(0)
    shapes = ((2, 37, 4, 64), (2, 53, 2, 64), (2, 53, 2, 64), (2, 37, 4, 64))
    q, k, v, dout = (torch.randn(shape, generator=draw).to(dtype) for shape in shapes)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    call = Call(q, k, v, right=0, needs_grad=True)
    out = strobe.attention(q, k, v, causal=True)
    lse = strobe.partial_attention(q, k, v, causal=True).lse
    assert_as_good_as((out, lse), call)
    assert_gradients_as_good_as((*torch.autograd.grad(out, inputs, dout), None), call, dout)


def decode(dtype: torch.dtype) -> None:
    """Two new tokens over sequences of 40 and 17 keys in pages of 16, one key head for four query heads."""
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(s, generator=draw).to(dtype) for s in ((2, 2, 8, 64), (8, 16, 2, 64), (8, 16, 2, 64)))
    pages = torch.tensor([[5, 0, 3], [7, 2, 0]], dtype=torch.int32)
    lengths = torch.tensor([40, 17], dtype=torch.int32)
    cache = strobe.PagedCache(k, v, pages, lengths)
    call = DecodeCall(q, k, v, lengths, page_table=pages, right=0)
    lse = strobe.partial_attention_decode(q, cache).lse
    assert_decode_as_good_as((strobe.attention_decode(q, cache), lse), call)


def main() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        forward_and_backward(dtype)
        decode(dtype)
    print(
        f"strobe {strobe.__version__}, Python {platform.python_version()}, torch {torch.__version__}: "
        "forward, backward and decode agree with float64"
    )


if __name__ == "__main__":
    main()
