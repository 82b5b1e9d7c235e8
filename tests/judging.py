"""One judge of a call, for the fixture `judge` and for the seeded faults."""

from __future__ import annotations

import torch

from strobe.ops import attention as ops
from strobe.problem.call import Call
from strobe.reference import Gradients
from strobe.testing import Poison, assert_as_good_as, assert_gradients_as_good_as, assert_kernel, inputs
from strobe.testing.cases import laid_out

LAYOUTS_OF_DOUT = ("contiguous", "heads_first", "gaps")


def judged_call(call: Call, family: str, seed: int) -> dict[str, float]:
    """Forward into a given out, forward and backward under autograd; the same bits out of both forwards, no band
    touched.
    """
    layout = LAYOUTS_OF_DOUT[seed % 3]
    with Poison() as poison:
        held = poison.enclose_call(call)
        bare = held._replace(
            **{name: t.detach() for name in ("q", "k", "v", "sinks") if (t := getattr(held, name)) is not None},
            needs_grad=False,
        )
        given = poison.empty(laid_out(_like_out(call), layout, 0))
        first = ops.run(bare, given)
        out, lse = ops.run(held)
        if not call.needs_grad:
            gradients = dout = dlse = None
        else:
            assert_kernel(ops.decide(held), call.kernel)
            dout = poison.enclose("dout", laid_out(inputs.upstream(family, out, seed), layout, 0))
            dlse = poison.enclose("dlse", inputs.upstream(family, lse, seed + 1)) if call.partial else None
            gradients = _gradients(held, (out, lse), (dout, dlse))
    if ".backward" not in call.kernel:
        assert_kernel(ops.decide(bare), call.kernel)
    assert torch.equal(first[0], out) and torch.equal(first[1], lse), "two forwards of one call differ"
    ratios = assert_as_good_as((out, lse), call)
    if dout is not None and gradients is not None:
        ratios |= assert_gradients_as_good_as(gradients, call, dout, dlse)
    return ratios


def _like_out(call: Call) -> torch.Tensor:
    dtype = call.q.dtype if not call.partial else torch.promote_types(call.q.dtype, torch.float32)
    return torch.zeros((*call.q.shape[:-1], call.v.shape[-1]), dtype=dtype, device=call.q.device)


def _gradients(call: Call, results: tuple, upstream: tuple) -> Gradients:
    leaves = [t for t in (call.q, call.k, call.v, call.sinks) if t is not None]
    pairs = [(result, up) for result, up in zip(results, upstream) if up is not None]
    found = torch.autograd.grad([result for result, _ in pairs], leaves, [up for _, up in pairs])
    return Gradients(*found, *[None] * (4 - len(found)))
