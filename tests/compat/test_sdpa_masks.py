"""torch's attention with masks and dropout on strobe: results, gradients, and which calls go to torch's kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import strobe
from strobe.compat import sdpa, sdpa_masks
from strobe.compat.sdpa_masks import attend
from strobe.kernels.runtime.launch_cache import CACHE
from tests.compat.sdpa_calls import CASES, _near, _qkv, counted

pytestmark = pytest.mark.usefixtures("nothing_stays_enabled")
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
SHAPES = [
    (2, 6, 45, 45),
    (2, 1, 45, 45),
    (1, 6, 45, 45),
    (1, 1, 1, 45),
    (2, 1, 1, 45),
    (6, 45, 45),
    (45, 45),
    (45, 1),
]


def _mask(shape: tuple[int, ...], kind: str, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    if kind == "bool":
        return (torch.rand(shape, generator=generator) < 0.7).to(device)
    numbers = torch.randn(shape, generator=generator)
    if kind == "hides":  # as a mask of bools that was converted
        numbers = numbers.masked_fill(numbers > 1, -torch.inf)
    return numbers.to(device, DTYPES[device]).requires_grad_(kind == "learned")


def _run(qkv, mask, **options):
    """The result and the gradients of q, k, v and of a learned mask."""
    out = F.scaled_dot_product_attention(*qkv, attn_mask=mask, enable_gqa=True, **options)
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(out)
    leaves = [*qkv, *([mask] if mask.requires_grad else [])]
    return [out, *torch.autograd.grad(out, leaves, up)]


@pytest.mark.parametrize("kind", ["bool", "added", "hides", "learned"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_masks_are_served(shape, kind, device):
    """The reference is torch's math in float64: strobe is as close to it as torch is in the inputs' precision."""
    qkv, mask = _qkv(CASES["grouped"], DTYPES[device], device), _mask(shape, kind, device)
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in qkv]
    wide_mask = mask if kind == "bool" else mask.detach().double().requires_grad_(mask.requires_grad)
    with sdpa_kernel(SDPBackend.MATH):
        exact, theirs = _run(wide, wide_mask, scale=0.4), _run(qkv, mask, scale=0.4)
    with sdpa.enable(masks=True) as found:
        ours = _run(qkv, mask, scale=0.4)
    assert not found.passed and len(found.served) == 1 and sum(found.served.values()) == 1
    sizes = [true.abs().max() for true in exact[:4]]
    if mask.requires_grad:  # a sum of gradients of scores, which may cancel
        scores = wide_mask.detach().expand(2, 6, 45, 45).clone().requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):
            sizes.append(_run(wide, scores, scale=0.4)[4].abs().sum_to_size(shape).max())
    for one, other, true, size in zip(ours, theirs, exact, sizes):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        rounding = torch.finfo(one.dtype).eps * size
        assert (one - true).abs().max() <= 2 * (other - true).abs().max() + 4 * rounding


@pytest.mark.parametrize("masks", [None, True, False])
@pytest.mark.parametrize("kind", ["bool", "learned"])
def test_which_library_runs_a_masked_call(masks, kind):
    """On a CPU torch's kernel is faster with masks that it takes; a learned mask would make it hold all scores."""
    qkv, mask = _qkv(CASES["grouped"]), _mask((45, 45), kind, "cpu")
    native = _run(qkv, mask)
    with sdpa.enable(masks=masks) as found:
        ours = _run(qkv, mask)
    _near(ours, native)
    assert bool(found.served) == (masks is True or (masks is None and kind == "learned"))


def test_switches_ask_together():
    qkv, mask = _qkv(CASES["grouped"], grad=False), _mask((45, 45), "bool", "cpu")

    def served() -> bool:
        with counted() as found:
            F.scaled_dot_product_attention(*qkv, attn_mask=mask, enable_gqa=True)
        return bool(found.served)

    with sdpa.enable():
        assert not served()
        tag = torch.compiler.config.cache_key_tag
        with sdpa.enable(masks=True):
            assert served() and torch.compiler.config.cache_key_tag != tag
        assert not served() and torch.compiler.config.cache_key_tag == tag
    assert not served() and torch.compiler.config.cache_key_tag == ""


def test_dropout_on_request(device):
    """The weights that strobe drops for the seed that torch's generator gives, forward and backward."""
    q, k, v = _qkv(CASES["grouped"], DTYPES[device], device)
    mask = _mask((45, 45), "bool", device)
    rows = [t.transpose(1, 2) for t in (q, k, v)]
    for given, causal in ((None, True), (mask, False)):
        torch.manual_seed(11)
        options = {"causal": True} if given is None else {"mask": strobe.mask_mod(given)}
        wanted = strobe.attention(*rows, dropout_p=0.3, **options).transpose(1, 2)
        wanted = [wanted, *torch.autograd.grad(wanted.sum(), (q, k, v))]
        with sdpa.enable(dropout=True) as found:
            torch.manual_seed(11)
            call = {"attn_mask": given, "is_causal": causal, "enable_gqa": True}
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, **call)
        ours = [out, *torch.autograd.grad(out.sum(), (q, k, v))]  # outside: strobe's backward all the same
        assert all(map(torch.equal, ours, wanted)) and not found.passed
        assert not torch.allclose(out, F.scaled_dot_product_attention(q, k, v, **call), atol=0.1)


@pytest.mark.parametrize("name", ["more keys", "more rows"])
def test_causal_of_dropout_is_aligned_at_the_top_left(name):
    q, k, v = _qkv(CASES[name], grad=False)
    with sdpa.enable(dropout=True):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=1e-9)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert (out - expected).abs().max() < 1e-5


def test_dropout_probabilities_outside_of_0_to_1_go_to_torch():
    q, k, v = torch.randn(3, 1, 2, 5, 16)
    with sdpa.enable(dropout=True) as found:
        assert not F.scaled_dot_product_attention(q, k, v, dropout_p=1.0).any()
        with pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(q, k, v, dropout_p=-0.1)
    assert not found.served and set(found.passed) == {"dropout_p"}


def test_calls_that_strobe_does_not_run_go_to_torch():
    q, k, v = _qkv(CASES["plain"])
    mask = torch.zeros(37, 37)
    wide = torch.randn(2, 1, 3, 37, 37)  # five dimensions: torch's math
    sdpa_of = F.scaled_dot_product_attention
    kernel = {"attn_mask": 1}  # torch's flash attention for CPUs takes masks, as `enable` counts
    calls = (
        (lambda: sdpa_of(q[:, None], k[:, None], v[:, None], attn_mask=wide), {}),
        (lambda: sdpa_of(q[:1], k, v, attn_mask=mask), {}),
        (lambda: sdpa_of(q[0], k[0], v[0], attn_mask=mask), {}),
        (lambda: torch.func.vmap(lambda q: sdpa_of(q, k, v, attn_mask=mask))(q[None]), kernel),
    )
    for call, passed in calls:
        native = call()
        with sdpa.enable(masks=True) as found:
            assert torch.allclose(call(), native, atol=1e-5)
        assert not found.served and found.passed == passed
    with sdpa.enable(masks=True) as found, sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert not found.served and not found.passed
    with sdpa.enable(masks=True) as found:
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=True)
    assert not found.served


@pytest.mark.parametrize(
    ("dtype", "shape", "error"),
    [(torch.float64, (37, 37), "dtype"), (torch.bfloat16, (37, 37), "dtype"), (torch.bool, (37,), "Dimension")],
)
def test_masks_that_torch_refuses_are_refused_by_torch(dtype, shape, error):
    qkv, mask = _qkv(CASES["plain"], grad=False), torch.ones(shape, dtype=dtype)
    with sdpa.enable(masks=True) as found, pytest.raises((RuntimeError, IndexError), match=error):
        F.scaled_dot_product_attention(*qkv, attn_mask=mask)
    assert not found.served


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 2, 0, 3), (2, 1, 0, 3)])
@pytest.mark.parametrize("sizes", [(2, 6, 45, 64), (2, 6, 45, 32), (1, 6, 1, 64), (3, 1, 5, 64)])
def test_the_result_lies_as_query_does(sizes, order, gradient):
    """So that calls of `view` on the result work as they do on torch's."""
    batch, heads, length, width = sizes
    generator = torch.Generator().manual_seed(0)
    back = [order.index(n) for n in range(4)]
    whole = (batch, heads, length, 64)
    q = torch.randn([whole[n] for n in order], generator=generator).permute(back).requires_grad_(gradient)
    k, v = (torch.randn(batch, heads, 7, size, generator=generator) for size in (64, width))
    mask = torch.randn(length, 7, generator=generator).requires_grad_(gradient)
    native = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    with sdpa.enable(masks=True) as found:
        ours = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert sum(found.served.values()) == 1 and torch.allclose(ours, native, atol=1e-5)
    wanted = torch.empty_like(q) if width == 64 else native.contiguous()
    assert [n for n, size in zip(ours.stride(), sizes) if size > 1] == [
        n for n, size in zip(wanted.stride(), sizes) if size > 1
    ]
    if gradient:
        leaves, up = (q, mask), torch.randn(ours.shape, generator=generator)
        results = [torch.autograd.grad(one, leaves, up) for one in (ours, native)]
        assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(*results))


def test_a_call_that_strobe_refuses_goes_to_torch_and_is_counted(monkeypatch):
    def none(call):
        raise strobe.UnsupportedProblem("no forward kernel can run this here")

    monkeypatch.setattr(sdpa_masks.ops, "decide", none)
    qkv, mask = _qkv(CASES["grouped"]), _mask((45, 45), "learned", "cpu")
    native = _run(qkv, mask)
    with CACHE.emptied(), sdpa.enable() as found:  # an earlier test may have left a Choice for the same call
        assert all(map(torch.equal, _run(qkv, mask), native))
    assert found.passed == {"no kernel": 1} and not found.served


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_masks_compile_without_graph_breaks(backend):
    qkv, mask = _qkv(CASES["grouped"]), _mask((2, 1, 45, 45), "learned", "cpu")
    with sdpa.enable(masks=True):
        torch.compiler.reset()
        wanted = _run(qkv, mask)
        run = torch.compile(lambda *t: F.scaled_dot_product_attention(*t[:3], attn_mask=t[3], enable_gqa=True),
                            backend=backend, fullgraph=True)  # fmt: skip
        out = run(*qkv, mask)
        up = torch.randn(out.shape, generator=torch.Generator().manual_seed(4))
        for one, other in zip([out, *torch.autograd.grad(out, [*qkv, mask], up)], wanted):
            assert torch.allclose(one, other, atol=1e-6)


def test_without_autograd_and_with_autocast():
    qkv, mask = _qkv(CASES["grouped"], grad=False), _mask((45, 45), "bool", "cpu")
    native = F.scaled_dot_product_attention(*qkv, attn_mask=mask, enable_gqa=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with sdpa.enable(masks=True) as found, mode():
            ours = F.scaled_dot_product_attention(*qkv, attn_mask=mask, enable_gqa=True)
        assert found.served == {"cpu.forward": 1} and torch.allclose(ours, native, atol=1e-5)
    with sdpa.enable(masks=True) as found, torch.autocast("cpu", torch.bfloat16):
        ours = F.scaled_dot_product_attention(*qkv, attn_mask=mask, enable_gqa=True)
    assert found.served == {"cpu.forward": 1} and ours.dtype == torch.bfloat16


def test_rows_that_see_no_key_are_zero():
    q, k, v = _qkv(CASES["plain"])
    mask = torch.ones(37, 37, dtype=torch.bool)
    mask[5] = False
    out = attend((q, k, v), mask, 0.0, False, None)
    assert out[:, :, 5].abs().max() == 0
    assert all(one.isfinite().all() for one in torch.autograd.grad(out.sum(), (q, k, v)))
