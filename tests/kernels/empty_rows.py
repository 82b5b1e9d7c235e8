"""Gradients of rows that see no key, for tests of several kernels: 0, and none of their NaN reaches a key."""

from __future__ import annotations

import torch

import strobe

IDS_Q, IDS_K = torch.tensor([[0, -1, 1, 1, 2, 2]]), torch.tensor([[1, 1, 0, 2, -1, -1]])
CALLS = {
    "causal": (6, 4, {"causal": True}),
    "causal_tiles": (140, 70, {"causal": True}),
    "key_lengths": (6, 4, {"mask": strobe.key_lengths(torch.tensor([2])) & strobe.window(1, 1)}),
    "documents": (6, 6, {"causal": True, "mask": strobe.documents(IDS_Q, IDS_K)}),
    "mask_mod": (6, 4, {"mask": strobe.mask_mod(lambda b, h, i, j: i > 1)}),
}
# A row that a function leaves no key is known by its lse, which with sinks is the sink.
UPSTREAM = [(n, which) for n in CALLS for which in ("dout", "dlse", "sinks") if (n, which) != ("mask_mod", "sinks")]


def assert_no_gradients_of_empty_rows(name: str, which: str, kernel: str | None) -> None:
    """which: the NaN upstream gradient, "dout" or "dlse", or "sinks" for dout of a call with sinks."""
    rows, keys, options = CALLS[name]
    draw = lambda *shape: torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()
    q, k, v, sinks = draw(1, rows, 2, 16), draw(1, keys, 1, 16), draw(1, keys, 1, 16), draw(2)
    if which == "sinks":
        outputs: tuple = (strobe.attention(q, k, v, sinks=sinks, kernel=kernel, **options),)
    else:
        outputs = tuple(strobe.partial_attention(q, k, v, kernel=kernel, **options))
    inputs = (q, k, v, sinks) if which == "sinks" else (q, k, v)
    empty = outputs[0][0, :, 0].eq(0).all(1)
    clean = tuple(draw(*t.shape).detach() for t in outputs)
    dirty = tuple(t.clone() for t in clean)
    if which == "dlse":
        dirty[1][:, :, empty] = torch.nan
    else:
        dirty[0][:, empty] = torch.nan
    expected, found = (torch.autograd.grad(outputs, inputs, g, retain_graph=True) for g in (clean, dirty))
    assert empty.any() and not empty.all() and found[0][:, empty].eq(0).all()
    assert all(map(torch.equal, found, expected))
