"""append at slots, and append with a scale for each key and head: what is written where, in which bits."""

from __future__ import annotations

import pytest
import torch

import strobe
from strobe.env import ENV
from strobe.ops import decode as ops_decode
from strobe.problem.append import AppendCall
from strobe.problem.cache import FP8, FP8_MAX

INT = lambda *values, device="cpu": torch.tensor(values, dtype=torch.int32, device=device)
PAGES, SIZE, HEADS = 5, 4, 2
SLOTS = (9, 2, -1, 0, 19, -(2**31), 11)


@pytest.fixture(autouse=True)
def the_kernel(device, kernel):
    if ENV.interpret:
        pytest.skip("the interpreter's own test names its kernel")


def pools(dtype: torch.dtype, device: str, heads_first: bool = False, together: bool = False) -> list[torch.Tensor]:
    """Two pools of 7 [5, 4, 2, 8]: NHD, HND, or keys beside values in one tensor, as in vLLM."""
    if together:
        both = torch.full((PAGES, HEADS, SIZE, 16), 7.0, device=device).to(dtype)
        return list(both.transpose(1, 2).split(8, -1))
    shape = (PAGES, HEADS, SIZE, 8) if heads_first else (PAGES, SIZE, HEADS, 8)
    made = [torch.full(shape, 7.0, device=device).to(dtype) for _ in range(2)]
    return [pool.transpose(1, 2) if heads_first else pool for pool in made]


def new_tokens(count: int, device: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(count)
    return [torch.randn(count, HEADS, 8, generator=g).to(device, dtype) for _ in range(2)]


def written_to_slots(
    device: str, kernel: str, index: torch.dtype, heads_first: bool, together: bool, fp8: bool
) -> None:
    k, v = pools(FP8 if fp8 else torch.float32, device, heads_first, together)
    k_new, v_new = new_tokens(len(SLOTS), device)
    slots = torch.tensor(SLOTS, dtype=index, device=device)
    scales = (torch.tensor([0.5, 2.0], device=device), None) if fp8 else (None, None)
    ops_decode.append(AppendCall(k_new, v_new, k, v, slots, None, *scales, kernel=kernel, at_slots=True))
    for pool, new, scale in ((k, k_new, scales[0]), (v, v_new, None)):
        expected = torch.full((PAGES * SIZE, HEADS, 8), 7.0, device=device)
        for token, slot in enumerate(SLOTS):
            if slot >= 0:
                expected[slot] = new[token] if scale is None else new[token] / scale[:, None]
        exact = expected.to(pool.dtype).float().view(PAGES, SIZE, HEADS, 8)
        assert torch.equal(pool.float(), exact)
    assert strobe.last_errors() == []


@pytest.mark.parametrize("fp8", [False, True], ids=["float32", "8 bits"])
@pytest.mark.parametrize("layout", ["NHD", "HND", "together"])
@pytest.mark.parametrize("index", [torch.int64, torch.int32], ids=["int64", "int32"])
def test_each_token_goes_to_its_slot(index, layout, fp8, device, kernel):
    written_to_slots(device, kernel, index, layout == "HND", layout == "together", fp8)


def beyond_the_pool(device: str, kernel: str) -> None:
    k, v = pools(torch.float32, device)
    k_new, v_new = new_tokens(3, device)
    slots = torch.tensor([PAGES * SIZE, 2**40, 3], device=device)
    ops_decode.append(AppendCall(k_new, v_new, k, v, slots, kernel=kernel, at_slots=True))
    assert any("page" in error for error in strobe.last_errors())
    assert (k == 7).all(-1).sum() == (PAGES * SIZE - 1) * HEADS and torch.equal(k[0, 3], k_new[2])


def test_a_slot_beyond_the_pool_is_reported(device, kernel):
    beyond_the_pool(device, kernel)


def by_token(device: str, kernel: str, paged: bool, at_slots: bool) -> None:
    """Scales are those of each row's largest finite magnitude, and the values are torch's own 8 bits."""
    k, v = pools(FP8, device)
    k_scale, v_scale = (torch.full((PAGES, SIZE, HEADS), 3.0, device=device) for _ in range(2))
    k_new, v_new = new_tokens(3, device)
    k_new[0, 0], v_new[1, 1, 3], v_new[2, 0, :2] = 0.0, torch.inf, torch.tensor([torch.nan, 1e-42])
    places = (9, 2, 10)
    seqlens = INT(1, 2, device=device)
    table = INT(*[2, 0, 0, 0], device=device).view(2, 2) if paged else None
    if at_slots:
        rest = torch.tensor(places, device=device), None, k_scale, v_scale, None, None, None
    else:
        rest = seqlens, table, k_scale, v_scale, None, None, INT(0, 1, 2, device=device)
        places = (9, 2) if paged else (1, SIZE + 2)
    if not (paged or at_slots):
        k, v, k_scale, v_scale = (t[:2] for t in (k, v, k_scale, v_scale))
        rest = seqlens, None, k_scale, v_scale, None, None, INT(0, 1, 2, device=device)
    ops_decode.append(AppendCall(k_new, v_new, k, v, *rest, kernel=kernel, at_slots=at_slots))
    for pool, scale, new in ((k, k_scale, k_new), (v, v_scale, v_new)):
        flat, flat_scale = pool.reshape(-1, HEADS, 8), scale.view(-1, HEADS)
        for token, place in enumerate(places):
            wide = new[token].float()
            most = torch.where(wide.isfinite(), wide.abs(), 0.0).amax(-1)
            own = torch.where(most > 0, (most / FP8_MAX).clamp(min=2.0**-126), 1.0)
            # a division on a GPU may differ in its last bits
            torch.testing.assert_close(flat_scale[place], own, rtol=4 * torch.finfo(torch.float32).eps, atol=0)
            kept = (wide / flat_scale[place][:, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
            assert torch.equal(flat[place].view(torch.uint8), kept.view(torch.uint8)) or device != "cpu"
            torch.testing.assert_close(flat[place].float(), kept.float(), rtol=2.0**-3, atol=2.0**-9, equal_nan=True)
        untouched = torch.ones(len(flat), dtype=torch.bool, device=device)
        untouched[list(places)] = False
        assert (flat_scale[untouched] == 3).all() and (flat[untouched].float() == 7).all()
    assert strobe.last_errors() == []


@pytest.mark.parametrize("where", ["rows", "pages", "slots"])
def test_a_scale_for_each_key_and_head(where, device, kernel):
    by_token(device, kernel, where == "pages", where == "slots")


def test_attention_reads_what_append_scaled(device):
    """Keys of very different magnitudes keep a relative error of 2^-4 each, which one scale a head cannot give."""
    g = torch.Generator().manual_seed(0)
    magnitude = torch.tensor([1e-3, 1.0, 50.0, 1e-2])[:, None, None]
    k_new = (torch.randn(4, HEADS, 8, generator=g) * magnitude).to(device)
    v_new = (torch.randn(4, HEADS, 8, generator=g) * magnitude).to(device)
    k, v = (torch.zeros(1, 4, HEADS, 8, device=device).to(FP8) for _ in range(2))
    scales = [torch.ones(1, 4, HEADS, device=device) for _ in range(2)]
    slots = torch.arange(4, device=device)
    strobe.append(strobe.PagedCache(k, v, slots, slots, *scales), k_new, v_new, slots=slots)
    for pool, scale, new in ((k, scales[0], k_new), (v, scales[1], v_new)):
        got = pool[0].float() * scale[0][..., None]
        largest = new.abs().amax(-1, keepdim=True)
        assert ((got - new).abs() <= new.abs() * 2.0**-4 + largest / FP8_MAX * 2.0**-10).all()
    cache = strobe.PagedCache(k, v, INT(0, device=device).view(1, 1), INT(4, device=device), *scales)
    q = torch.randn(4, 4, 8, generator=g).to(device)
    out = strobe.attention_paged(q, cache, cu_seqlens_q=INT(0, 4, device=device))
    exact = [(pool.float() * scale[..., None]) for pool, scale in ((k, scales[0]), (v, scales[1]))]
    wide = strobe.attention(q[None], *exact, causal=True)
    torch.testing.assert_close(out, wide[0], rtol=1e-5, atol=1e-4)


def test_a_step_compiles_whole(device):
    def step(k, v, k_scale, v_scale, new, slots):
        strobe.append(strobe.PagedCache(k, v, slots, slots, k_scale, v_scale), new, new, slots=slots)
        return k_scale.sum()

    results = []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        k, v = pools(FP8, device)
        scales = [torch.ones(PAGES, SIZE, HEADS, device=device) for _ in range(2)]
        total = run(k, v, *scales, new_tokens(3, device)[0], torch.tensor([9, 2, -1], device=device))
        results.append((total, k.view(torch.uint8), v.view(torch.uint8), *scales))
    assert all(map(torch.equal, *results))


def test_what_is_refused():
    k, v = pools(FP8, "cpu")
    new = new_tokens(2, "cpu")[0]
    slots, scale = torch.tensor([0, 1]), torch.ones(PAGES, SIZE, HEADS)
    cache = strobe.PagedCache(k, v, slots, slots)
    turned = scale.transpose(0, 1).contiguous().transpose(0, 1)
    offsets, angles = INT(0, 2), torch.ones(4, 4)
    cases = {
        r"slots: got shape \[3\]": (cache, new, {"slots": torch.tensor([0, 1, 2])}),
        "slots: got torch.float32": (cache, new, {"slots": slots.float()}),
        "slots: got list": (cache, new, {"slots": [0, 1]}),
        "slots: got rotary or": (cache, new, {"slots": slots, "cu_seqlens_q": offsets}),
        "slots: got rotary or cu": (cache, new, {"slots": slots, "rotary": strobe.Rotary(angles, angles)}),
        "cache: got DenseCache": (strobe.DenseCache(k, v, slots), new, {"slots": slots}),
        "k_new: got shape": (cache, new[None], {"slots": slots}),
        "cache.k_pages: got shape": (cache._replace(k_pages=k[0]), new, {"slots": slots}),
        "cache.k_scale: got torch.float32": (cache._replace(k_scale=scale[:1]), new, {"slots": slots}),
        "cache.v_scale: got memory that cache.k_scale lies in": (
            cache._replace(k_scale=scale, v_scale=scale.view(scale.shape)),
            new,
            {"slots": slots},
        ),
        "cache.k_pages: got pages of 0 keys": (
            cache._replace(k_pages=k[:, :0], v_pages=v[:, :0]),
            new,
            {"slots": slots},
        ),
        "slots: got device meta": (cache, new, {"slots": slots.to("meta")}),
        "cache.k_scale: got strides": (cache._replace(k_scale=turned), new, {"slots": slots}),
    }
    for words, (given, k_new, options) in cases.items():
        with pytest.raises((strobe.InvalidProblem, TypeError), match=words):
            strobe.append(given, k_new, k_new, **options)
