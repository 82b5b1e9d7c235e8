"""Runs emitted functions in Triton's interpreter against `evaluate`: `python -m tests.mods.emitted`, with
TRITON_INTERPRET=1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import strobe
from strobe.kernels.runtime.mod_function import mod_function
from strobe.mods import emit
from strobe.mods.evaluate import evaluate, inside
from strobe.mods.mask import MaskMod
from strobe.mods.program import Program
from strobe.mods.score import ScoreMod, alibi, relative_bias
from strobe.testing.mods import MODS
from tests.mods.triton_examples import near, near_backward, near_reference, striped, striped_reference

M, N, B, H = 32, 64, 1, 3


GROUPED = (  # indices that are the same for several queries or keys
    lambda table, h, q, k: table[h, 0, 1],
    lambda table, h, q, k: table[h, q // 16, k // 8],
    lambda table, h, q, k: table[h, q // 48, k >> 2],
    lambda table, h, q, k: table[0, q // 12, k],
    lambda table, h, q, k: table[h, k // 24, q],
    lambda table, h, q, k: table[h, (q // 64 + k // 64) % 8, 3],
    lambda table, h, q, k: table[h, 0, k],
    lambda table, h, q, k: table[h, 0, q],
)


@triton.jit
def positions(m_start, M: tl.constexpr, N: tl.constexpr):
    return m_start + tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]


@triton.jit
def forward(out, scores, b, h, m_start, aux, MOD: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    q_idx, kv_idx = positions(m_start, M, N)
    at = tl.arange(0, M)[:, None] * N + kv_idx
    tl.store(out + at, MOD(tl.load(scores + at), b, h, q_idx, kv_idx, aux))


@triton.jit
def masked(out, b, h, m_start, aux, MOD: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    q_idx, kv_idx = positions(m_start, M, N)
    at = tl.arange(0, M)[:, None] * N + kv_idx
    tl.store(out + at, tl.where(MOD(b, h, q_idx, kv_idx, aux), at * 0 + 1, 0))


@triton.jit
def backward(out, grads, scores, b, h, m_start, aux, MOD: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Transposed, as the kernels' scores are."""
    q_idx, kv_idx = m_start + tl.arange(0, M)[None, :], tl.arange(0, N)[:, None]
    at = tl.arange(0, M)[None, :] * N + kv_idx
    tl.store(out + at, MOD(tl.load(grads + at), tl.load(scores + at), b, h, q_idx, kv_idx, aux) + at * 0.0)


def _inputs(m_start, diagonal):
    scalar = lambda value: torch.tensor(value, dtype=torch.int32)
    rows = torch.arange(m_start, m_start + M, dtype=torch.int32)[:, None]
    keys = torch.arange(N, dtype=torch.int32)[None, :]
    return {"b": scalar(B), "h": scalar(H), "q": rows, "k": keys, "diagonal": scalar(diagonal)}


def check_score(name: str, score: ScoreMod, m_start: int = 48, diagonal: int = 1) -> None:
    """Rows 48 to 79 stick out of the 64 rows of the named cases, so indices are clamped."""
    bound = score.bind(True)
    tensors, generator = [t.detach().float() if t.is_floating_point() else t for t in bound.tensors], torch.Generator()
    scores, grads = (torch.randn(M, N, generator=generator.manual_seed(n)) for n in (1, 2))
    program, inputs = Program.parse(bound.text), _inputs(m_start, diagonal) | {"score": scores, "grad": grads}
    (exact,) = evaluate(program, inputs, (tensors, bound.numbers))
    out = torch.full((M, N), torch.nan)
    aux = emit.aux_of(program, tensors, bound.numbers, diagonal) or None
    forward[(1,)](out, scores, B, H, m_start, aux, mod_function(emit.forward_text(bound.text)), M, N)
    assert torch.allclose(out, exact.expand(M, N), atol=2e-6, rtol=2e-6, equal_nan=True), f"{name}: score_mod"
    gradient = Program.parse(bound.gradient)
    exact, *rest = evaluate(gradient, inputs, (tensors, bound.numbers))
    sums = [torch.zeros(t.shape) for t in tensors]
    aux = emit.aux_of(gradient, tensors, bound.numbers, diagonal) + emit.gradient_aux_of(gradient, sums)
    out.fill_(torch.nan)
    backward[(1,)](
        out, grads, scores, B, H, m_start, aux or None, mod_function(emit.backward_text(bound.gradient)), M, N
    )
    assert torch.allclose(out, exact.expand(M, N), atol=1e-5, rtol=1e-5), f"{name}: score_mod_bwd"
    wanted = [torch.zeros(t.shape) for t in tensors]
    results = iter(rest)
    for scatter in gradient.scatters:
        value, at = next(results).expand(M, N), [next(results) for _ in range(scatter.ndim)]
        where = tuple(inside(one, size).expand(M, N) for one, size in zip(at, tensors[scatter.tensor].shape))
        if where:
            wanted[scatter.tensor].index_put_(where, value, accumulate=True)
        else:
            wanted[scatter.tensor] += value.sum()
    for got, want in zip(sums, wanted):
        assert torch.allclose(got, want, atol=1e-4, rtol=1e-4), f"{name}: gradients of captured tensors"


def check_mask(name: str, mask: MaskMod, m_start: int = 48, diagonal: int = 1) -> None:
    bound = mask.whole.bind()
    (exact,) = evaluate(bound.program, _inputs(m_start, diagonal), bound[1:])
    out = torch.full((M, N), -1, dtype=torch.int32)
    aux = emit.aux_of(bound.program, bound.tensors, bound.numbers, diagonal) or None
    masked[(1,)](out, B, H, m_start, aux, mod_function(emit.mask_text(bound.program.text)), M, N)
    assert torch.equal(out.bool(), exact.expand(M, N)) and out.min() >= 0, f"{name}: mask_mod"


def main() -> None:
    for name, case in MODS.items():
        functions = case.make(torch.float32)
        if functions.score is not None:
            check_score(name, ScoreMod(functions.score))
        if functions.mask is not None:
            check_mask(name, strobe.mask_mod(functions.mask))
    check_score("alibi", alibi(torch.rand(4, requires_grad=True)))
    check_score("relative_bias", relative_bias(torch.rand(4, 9, requires_grad=True)))
    table = torch.rand(4, 8, 64, requires_grad=True)
    for n, at in enumerate(GROUPED):
        check_score(f"grouped {n}", ScoreMod(lambda s, b, h, q, k, at=at: s + at(table, h, q, k)))
    check_mask("built-in", strobe.window(7, 1) | strobe.prefix_causal(3))
    ids = (torch.arange(64)[None] // 9).expand(2, 64).to(torch.int32)
    check_mask("documents", ~strobe.documents(ids) | strobe.key_lengths(torch.tensor([5, 60], dtype=torch.int32)))
    check_mask("constant", strobe.mask_mod(lambda b, h, q_idx, kv_idx: (q_idx == q_idx) | True))
    for divisor in (3, -3):
        signs = lambda b, h, q, k, d=divisor: ((q - 50) // d + (k - 20) % d) % 2 == 0
        check_mask(f"signs {divisor}", strobe.mask_mod(signs))
    slopes, widths = torch.rand(4), torch.tensor([3, 4, 5, 3], dtype=torch.int32)
    options = {"captures": (slopes, 9.5, 3), "reference": near_reference}
    check_score("triton.jit", strobe.score_mod(near, backward=near_backward, **options))
    check_score("triton.jit, reference's derivative", strobe.score_mod(near, **options))
    check_mask("triton.jit", strobe.mask_mod(striped, captures=(widths, 1), reference=striped_reference))
    print("emitted functions agree")


if __name__ == "__main__":
    main()
