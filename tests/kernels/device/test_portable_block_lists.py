"""Lists of the blocks that a mask function shows, in the portable kernels, on the simulator and on a GPU.

A block that a function hides adds 0 to every sum and changes no maximum. So results have the bits of a kernel that runs
the function on every block.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import strobe
from strobe.kernels.device import mask_blocks
from strobe.kernels.runtime.launch_cache import CACHE
from strobe.problem.target import FAKES
from tools.proof.simulate import on, posing

A100 = FAKES["A100"]
IDS = (torch.arange(300) // 70).int()
PACKED = {
    "cu_seqlens_q": (3, 70, 70, 210), "cu_seqlens_k": (5, 140, 160, 250), "max_seqlen_q": 140, "max_seqlen_k": 135,
}  # fmt: skip


@pytest.fixture(autouse=True)
def for_small_masks(monkeypatch):
    monkeypatch.setattr(mask_blocks, "FEWEST_ELEMENTS", 1)
    mask_blocks.KEPT.entries.clear()


def _scattered(ids: Tensor):
    return strobe.mask_mod(lambda b, h, q, k: (ids[q] % 3 == ids[k] % 3) & (k % 150 != 100 + b))


# name -> mask by ids, other options; packed ones have cu_seqlens
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "scattered": (_scattered, {}),
    "a list for each head, causal": (
        lambda ids: strobe.causal() & strobe.mask_mod(lambda b, h, q, k: (ids[q] == ids[k]) | (h * k > 170)), {},
    ),
    "packed": (_scattered, PACKED),
    "packed, a list for each head, window": (
        lambda ids: strobe.window(90, 9) & strobe.mask_mod(lambda b, h, q, k: (q // 64 + k // 64 + h + b) % 2 == 0),
        PACKED | {"deterministic": True},
    ),
    "dropout": (_scattered, {"dropout_p": 0.3, "dropout_seed": 5}),
}  # fmt: skip


def _tensors(device: str, packed: bool) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    batch, sizes = (1 if packed else 2), ((220, 2), (270, 1), (270, 1))
    found = [torch.randn(batch, n, heads, 64, generator=draw).half().to(device) for n, heads in sizes]
    return [(t[0] if packed else t).requires_grad_() for t in found]


def _results(name: str, device: str) -> tuple[list[Tensor], str]:
    """out, the gradients of q, k, v and of slopes that the score captures, and the Choice."""
    mask, options = CASES[name]
    slopes = torch.linspace(0.1, 0.4, 2, device=device, requires_grad=True)
    options = options | {"mask": mask(IDS.to(device)), "kernel": "portable"}
    options["score_mod"] = lambda s, b, h, q, k: s * (1 + 0.1 * b) - slopes[h] * (k % 9)
    packed = "cu_seqlens_q" in options
    for one in ("cu_seqlens_q", "cu_seqlens_k") if packed else ():
        options[one] = torch.tensor(options[one], dtype=torch.int32, device=device)
    leaves = _tensors(device, packed)
    out = (strobe.attention_varlen if packed else strobe.attention)(*leaves, **options)
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out)
    found = torch.autograd.grad(out, [*leaves, slopes], up)
    options.pop("dropout_seed", None)
    return [out.detach(), *found], str((strobe.explain_varlen if packed else strobe.explain)(*leaves, **options))


def _without_lists(name: str, device: str, monkeypatch) -> list[Tensor]:
    monkeypatch.setattr(mask_blocks, "FEWEST_ELEMENTS", 1 << 60)
    with CACHE.emptied():
        found, choice = _results(name, device)
    assert "block lists" not in choice
    return found


def _assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    """All but the gradient of slopes, which atomics add in any order: n roundings of float32 count as sqrt(n)."""
    assert all(torch.equal(one, other) for one, other in zip(found[:4], wanted))
    error, roundings = (found[4] - wanted[4]).norm(), (2 * 220 * 270) ** 0.5
    assert error <= roundings * 2.0**-24 * wanted[4].norm()


EACH_COMMIT = ("packed",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EACH_COMMIT else pytest.mark.nightly) for name in CASES]
)
def test_tiles_visit_listed_blocks(name, monkeypatch):
    with on(A100) as run:
        found, choice = _results(name, "cpu")
    lists = 2 if name == "dropout" else 3  # with dropout, tiles of keys have 32 of them
    assert run.reports == [] and choice.count("block lists") == lists and run.launches.count("kinds_kernel") == 1
    with on(A100):
        wanted = _without_lists(name, "cpu", monkeypatch)
    _assert_same(found, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_tiles_visit_listed_blocks_on_a_gpu(name, monkeypatch):
    """Two kernels, which ptxas may give other multiply-adds: a rounding to float16 apart."""
    with CACHE.emptied():
        found, choice = _results(name, "cuda")
    assert choice.count("block lists") == 3
    for got, wanted in zip(found[:4], _without_lists(name, "cuda", monkeypatch)):
        assert float((got - wanted).float().norm()) <= 2.0**-10 * float(wanted.float().norm())


def test_blocks_in_no_list_are_not_visited():
    """NaN in keys that no query sees, and in queries that see no key, does not spread."""
    mask = strobe.mask_mod(lambda b, h, q, k: (q // 64 != 1) & (k // 64 != 1))
    q, k = (torch.randn(1, 200, 1, 16, generator=torch.Generator().manual_seed(n)).half() for n in (1, 2))

    def gradients(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in (q, k, k)]
        with on(A100):
            out = strobe.attention(*leaves, mask=mask, kernel="portable")
            return torch.autograd.grad(out, leaves, torch.ones_like(out))

    exact = gradients(q, k)
    for tensor in (q, k):
        tensor[:, 64:128] = torch.nan
    for got, wanted in zip(gradients(q, k), exact):
        assert torch.equal(got, wanted)


def test_a_mask_that_shows_nothing():
    q = torch.randn(1, 130, 1, 16, generator=torch.Generator().manual_seed(1)).half().requires_grad_()
    with on(A100) as run:
        out = strobe.attention(q, q, q, mask=strobe.mask_mod(lambda b, h, q, k: (k < 0) | (q < 0)), kernel="portable")
        (found,) = torch.autograd.grad(out.sum(), q)
    assert run.reports == [] and out.abs().max() == found.abs().max() == 0


def test_a_sequence_longer_than_promised_reads_nothing_behind_its_lists():
    q = torch.randn(200, 1, 16, generator=torch.Generator().manual_seed(1)).half().requires_grad_()
    offsets = torch.tensor([0, 10, 200], dtype=torch.int32)
    with on(A100) as run:
        out = strobe.attention_varlen(
            q, q, q, cu_seqlens_q=offsets, max_seqlen_q=64, max_seqlen_k=64, kernel="portable",
            mask=strobe.mask_mod(lambda b, h, q, k: (q + k) % 3 != b),
        )  # fmt: skip
        out.sum().backward()
    assert run.reports == [] and out[10:].isnan().all() and not out[:10].isnan().any()


def test_where_there_are_no_lists():
    """Tiles that are not whole blocks of 64, and Triton's interpreter, run the function on every block."""
    mask = strobe.mask_mod(lambda b, h, q, k: (q + k) % 3 != b)
    for dtype, lists in ((torch.float16, 3), (torch.float32, 0)):
        q = torch.zeros(1, 128, 1, 64, dtype=dtype, requires_grad=True)
        with posing(A100):
            assert str(strobe.explain(q, q, q, mask=mask, kernel="portable")).count("block lists") == lists
