"""append of packed tokens: as one append for each sequence, and what it raises and reports."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import strobe
from strobe.env import ENV
from strobe.problem.cache import FP8

INT = lambda *values, device="cpu": torch.tensor(values, dtype=torch.int32, device=device)
LENGTHS, NEWS, PADDING = (3, 0, 9, 5), (2, 0, 1, 6), 2
OFFSETS = (0, 2, 2, 3, 9)
DTYPE = torch.float32


def caches(paged: bool, fp8: bool, device: str) -> list[strobe.PagedCache | strobe.DenseCache]:
    """Two equal caches of 4 sequences, in pages of 4 or in rows of 16 keys."""
    made = []
    for _ in range(2):
        g = torch.Generator().manual_seed(1)
        pools = [torch.randn(*((16, 4) if paged else (4, 16)), 2, 8, generator=g).to(device) for _ in range(2)]
        scales = {}
        if fp8:
            pools = [pool.to(FP8) for pool in pools]
            scales = {"k_scale": torch.tensor([0.3, 2.0], device=device), "v_scale": None}
        lengths = INT(*LENGTHS, device=device)
        table = torch.randperm(16, generator=g).view(4, 4).int().to(device)
        made.append(
            strobe.PagedCache(pools[0], pools[1], table, lengths, **scales)
            if paged
            else strobe.DenseCache(pools[0], pools[1], lengths, **scales)
        )
    return made


def one_sequence(cache, b: int):
    """The cache with sequence b alone."""
    if isinstance(cache, strobe.PagedCache):
        return cache._replace(page_table=cache.page_table[b : b + 1], seqlens=cache.seqlens[b : b + 1])
    return cache._replace(k=cache.k[b : b + 1], v=cache.v[b : b + 1], seqlens=cache.seqlens[b : b + 1])


@pytest.fixture(autouse=True)
def the_kernel(device, kernel):
    if ENV.interpret:
        pytest.skip("the interpreter's own test names its kernel")


@pytest.mark.parametrize("rotary", [False, True], ids=["plain", "rotary"])
@pytest.mark.parametrize("fp8", [False, True], ids=["16 bits", "8 bits"])
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_as_one_append_for_each_sequence(paged, fp8, rotary, device):
    as_each_alone(paged, fp8, rotary, device)


def as_each_alone(paged: bool, fp8: bool, rotary: bool, device: str) -> None:
    packed, alone = caches(paged, fp8, device)
    k, v = (torch.randn(sum(NEWS) + PADDING, 2, 8, device=device, dtype=DTYPE) for _ in range(2))
    angle = torch.arange(32.0, device=device)[:, None] * torch.tensor([1.0, 0.3], device=device)
    turned = strobe.Rotary(angle.cos(), angle.sin()) if rotary else None
    strobe.append(packed, k, v, rotary=turned, cu_seqlens_q=INT(*OFFSETS, device=device))
    for b, (start, stop) in enumerate(pairwise(OFFSETS)):
        strobe.append(one_sequence(alone, b), k[None, start:stop], v[None, start:stop], rotary=turned)
    for one, other in zip(packed[:2], alone[:2]):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    before = caches(paged, fp8, device)[0]
    changed = (packed[0].view(torch.uint8) != before[0].view(torch.uint8)).flatten(2).any(-1)
    assert int(changed.sum()) == sum(NEWS) and strobe.last_errors() == []


def test_tokens_without_room_are_reported(device):
    packed, _ = caches(True, False, device)
    full = packed._replace(seqlens=INT(3, 0, 16, 5, device=device))
    new = torch.randn(9, 2, 8, device=device)
    strobe.append(full, new, new, cu_seqlens_q=INT(*OFFSETS, device=device))
    assert any("append" in error for error in strobe.last_errors())


def test_a_step_of_append_and_attention_compiles_whole(device):
    def step(cache, k, q, offsets):
        strobe.append(cache, k, k, cu_seqlens_q=offsets)
        news = offsets.diff()
        grown = cache._replace(seqlens=cache.seqlens + news)
        return strobe.attention_paged(q, grown, cu_seqlens_q=offsets)

    results = []
    offsets = INT(*OFFSETS, device=device)
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        cache = caches(True, False, device)[0]
        g = torch.Generator().manual_seed(2)
        k, q = (torch.randn(9, heads, 8, generator=g).to(device) for heads in (2, 4))
        results.append((run(cache, k, q, offsets), *cache[:2]))
    assert all(map(torch.equal, *results))


def test_what_is_refused():
    cache, new = caches(True, False, "cpu")[0], torch.randn(9, 2, 8)
    cases = {
        "k_new: got shape": (new[None], INT(*OFFSETS)),
        "cu_seqlens_q: got list": (new, [0, 2, 2, 3, 9]),
        "cu_seqlens_q: got torch.float32": (new, torch.zeros(5)),
        r"cu_seqlens_q: got shape \[4\]": (new, INT(0, 1, 2, 9)),
        "cu_seqlens_q: got offset": (new, INT(0, 4, 3, 5, 9)),
        "cu_seqlens_q: got device meta": (new, INT(*OFFSETS, device="meta")),
    }
    for words, (k, offsets) in cases.items():
        with pytest.raises((strobe.InvalidProblem, TypeError), match=words):
            strobe.append(cache, k, k, cu_seqlens_q=offsets)
