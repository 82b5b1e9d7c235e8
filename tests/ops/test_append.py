"""append and quantize_kv on every kernel that runs here: what is written where, in which bits, and what is left
alone."""

from __future__ import annotations

import pytest
import torch

import strobe
from strobe.ops import decode as ops_decode
from strobe.problem.append import AppendCall, AppendProblem
from strobe.problem.cache import FP8, FP8_MAX
from strobe.problem.target import FAKES
from strobe.selection.select import select
from strobe.testing.poison import fill_with_poison

INT = lambda *values, device="cpu": torch.tensor(values, dtype=torch.int32, device=device)
LENGTHS = (0, 5, 9, 30, -1)  # the last but two leaves room for one key, the last two for none
SIZE, ROOM = 4, 12
TABLE = ([0, 1, 2], [3, 4, 5], [6, 7, 2**30], [8, 8, 8], [8, 8, -1])  # the third sequence's next page is lost
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def new_tokens(dtype, device, tokens=3, width=16, width_v=21):
    g = torch.Generator().manual_seed(3)
    k, v = (torch.randn(len(LENGTHS), tokens, 2, w, generator=g, dtype=torch.float64) for w in (width, width_v))
    k[0, 0, 0, 0], v[1, 0, 0, 0], v[1, 0, 0, 1] = torch.nan, torch.inf, 1e-4
    return k.to(device, dtype), v.to(device, dtype)


def pools(paged: bool, dtype: torch.dtype, device: str, heads_first: bool = False):
    """Two pools of NaN."""
    found = []
    for width in (16, 21):
        shape = (9, SIZE, 2, width) if paged else (len(LENGTHS), ROOM, 2, width)
        pool = fill_with_poison(torch.empty(shape, dtype=torch.float32)).to(device, dtype)
        found.append(pool.transpose(1, 2).contiguous().transpose(1, 2) if heads_first else pool)
    return found


def turned(k, position, cos, sin, interleaved):
    """One key [H, D] in float64, pair by pair."""
    k, half = k.double().clone(), cos.shape[1]
    old = k.clone()
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        c, s = (
            (cos[position, i].double(), sin[position, i].double())
            if position < cos.shape[0]
            else (torch.nan, torch.nan)
        )
        k[:, a], k[:, b] = old[:, a] * c - old[:, b] * s, old[:, b] * c + old[:, a] * s
    return k


def wanted(call: AppendCall):
    """{(page or sequence, row): (k, v)} in float64, token by token."""
    found = {}
    for b, length in enumerate(call.seqlens.tolist()):
        for t in range(call.k_new.shape[1]):
            position = length + t
            if not 0 <= position < ROOM:
                continue
            page, row = (
                (b, position)
                if call.page_table is None
                else (int(call.page_table[b, position // SIZE]), position % SIZE)
            )
            if 0 <= page < call.k.shape[0]:
                k, v = call.k_new[b, t].double(), call.v_new[b, t].double()
                found[page, row] = (
                    (k if call.cos is None else turned(k, position, call.cos, call.sin, call.interleaved)),
                    v,
                )
    return found


@pytest.mark.parametrize("rotary", [None, (16, False), (16, True), (10, True), (6, False)], ids=str)
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("n, dtype", list(enumerate(DTYPES)), ids=[str(dtype)[6:] for dtype in DTYPES])
def test_each_token_goes_to_its_place(n, dtype, paged, rotary, device, kernel):
    """Everything else keeps its bits, and what had no room, page or angle is told."""
    k_new, v_new = new_tokens(dtype, device)
    k, v = pools(paged, dtype, device, heads_first=n % 2 == 1)
    angles = (
        torch.linspace(0, 6, 9 * 8, device=device).view(9, 8)[:, : rotary[0] // 2] if rotary else None
    )  # positions 9, 10 and 11 have none
    cos, sin = (None, None) if angles is None else (angles.cos(), angles.sin())
    table = torch.tensor(TABLE, dtype=torch.int32, device=device) if paged else None
    call = AppendCall(
        k_new,
        v_new,
        k,
        v,
        INT(*LENGTHS, device=device),
        table,
        None,
        None,
        cos,
        sin,
        None,
        bool(rotary and rotary[1]),
        kernel,
    )
    places = wanted(call)
    strobe.last_errors()
    ops_decode.append(call)
    assert ops_decode.decide_append(call).forward.kernel.name == f"{kernel}.append"
    told = [word.split(": ")[1] for word in strobe.last_errors()]
    beyond = (
        rotary is not None and not paged
    )  # in pages the one sequence that reaches beyond the angles has lost its page
    assert sorted(told) == ["append"] * (1 + beyond) + ["cache.page_table"] * paged
    written = torch.zeros(k.shape[:2], dtype=torch.bool, device=device)
    for (page, row), (k_wanted, v_wanted) in places.items():
        written[page, row] = True
        torch.testing.assert_close(
            k[page, row].double(),
            k_wanted,
            rtol=2 * torch.finfo(dtype).eps,
            atol=4 * torch.finfo(dtype).eps,
            equal_nan=True,
        )
        assert torch.equal(v[page, row].double(), v_wanted)
    assert len(places) == int(written.sum()) > 5
    assert k[~written].isnan().all() and v[~written].isnan().all()


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=lambda dtype: str(dtype)[6:])
def test_8_bits_are_torchs_own(dtype, paged, device, kernel):
    """Over the scale, rounded to nearest even, 448 for what is larger, NaN for NaN."""
    k_new, v_new = new_tokens(dtype, device)
    k, v = pools(paged, FP8, device)
    scales = torch.tensor([0.3, 0.01], device=device), torch.tensor([2.0**-8, 50.0], device=device)
    table = torch.tensor(TABLE, dtype=torch.int32, device=device) if paged else None
    call = AppendCall(k_new, v_new, k, v, INT(*LENGTHS, device=device), table, *scales, kernel=kernel)
    ops_decode.append(call)
    places = wanted(call)
    for (page, row), held in places.items():
        for pool, new, scale in zip((k, v), held, scales):
            exact = (new.float() / scale[:, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
            assert torch.equal(pool[page, row].view(torch.uint8), exact.view(torch.uint8)), (page, row)
    assert len(places) > 5


def test_every_8_bit_number_is_reached(device, kernel):
    """Each finite e4m3 number, its neighbours' midpoints, and a little to either side of these, rounds as torch
    rounds."""
    codes = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    numbers = codes[codes.isfinite()].sort().values
    middle = (numbers[1:] + numbers[:-1]) / 2
    values = torch.cat(
        [
            codes,
            middle,
            middle.nextafter(torch.tensor(500.0)),
            middle.nextafter(torch.tensor(-500.0)),
            torch.tensor([1e9, -1e9, 1e-30]),
        ]
    )
    values = torch.nn.functional.pad(values, (0, -len(values) % 64)).view(1, -1, 1, 64).to(device)
    pool = torch.zeros(values.shape, device=device).to(FP8)
    strobe.append(strobe.DenseCache(pool, pool.clone(), INT(0, device=device)), values, values)
    call = AppendCall(values, values, pool, pool.clone(), INT(0, device=device), kernel=kernel)
    ops_decode.append(call)
    exact = values.clamp(-FP8_MAX, FP8_MAX).to(FP8)
    assert torch.equal(pool.view(torch.uint8), exact.view(torch.uint8))
    read = strobe.attention_decode(
        torch.zeros(values.shape[1], 1, 1, 64, device=device), _one_key_each(exact), kernel=kernel
    )
    assert torch.equal(read[:, 0].nan_to_num(7.0), exact[0].float().nan_to_num(7.0))


def _one_key_each(rows: torch.Tensor) -> strobe.PagedCache:
    """Row n of [1, N, 1, D] as the only value of sequence n; its key is 0."""
    pages = rows.view(-1, 1, 1, rows.shape[-1])
    table = torch.arange(len(pages), dtype=torch.int32, device=rows.device)[:, None]
    return strobe.PagedCache(torch.zeros_like(pages.float()).to(FP8), pages, table, torch.ones_like(table[:, 0]))


def test_a_sequence_grown_by_append_is_the_whole(device, kernel):
    """Token by token into pages, with rotary; each step against attention over what was written so far."""
    g = torch.Generator().manual_seed(0)
    k, v, q = (torch.randn(2, 9, heads, 16, generator=g, dtype=torch.float64).to(device) for heads in (2, 2, 4))
    angle = torch.arange(9.0, dtype=torch.float64, device=device)[:, None] * 10.0 ** -torch.arange(
        4.0, dtype=torch.float64, device=device
    )
    lengths = INT(0, 0, device=device)
    pool_k, pool_v = (torch.full((6, 3, 2, 16), torch.nan, dtype=torch.float64, device=device) for _ in range(2))
    cache = strobe.PagedCache(pool_k, pool_v, INT([4, 0, 2], [1, 5, 3], device=device), lengths)
    dense = torch.stack(
        [torch.stack([turned(k[b, t], t, angle.cos(), angle.sin(), False) for t in range(9)]) for b in range(2)]
    )
    for step in range(9):
        strobe.append(
            cache, k[:, step : step + 1], v[:, step : step + 1], rotary=strobe.Rotary(angle.cos(), angle.sin())
        )
        lengths.add_(1)
        out = strobe.attention_decode(q[:, step : step + 1], cache, kernel=kernel)
        whole = strobe.attention(q[:, step : step + 1], dense[:, : step + 1], v[:, : step + 1], kernel=kernel)
        torch.testing.assert_close(out, whole, rtol=0, atol=200 * 2.0**-53)


def test_quantize_kv_of_numbers_that_are_hardly_any():
    x = torch.zeros(1, 4, 1, 8)
    x[0, 0, 0, 0] = 1e-43
    k8, v8, k_scale, v_scale = strobe.quantize_kv(x, x)
    assert not k8.float().isnan().any() and not v8.float().isnan().any() and (k_scale > 0).all() and (v_scale > 0).all()


def test_quantize_kv_keeps_within_half_a_step(device):
    g = torch.Generator().manual_seed(0)
    k, v = (
        torch.randn(3, 50, 4, width, generator=g).to(device)
        * torch.tensor([1e-3, 1.0, 30.0, 0.0], device=device)[:, None]
        for width in (16, 24)
    )
    k[0, 0, 1, 0], v[1, 1, 2, 3] = torch.nan, -torch.inf
    k8, v8, k_scale, v_scale = strobe.quantize_kv(k, v)
    for x, x8, scale in ((k, k8, k_scale), (v, v8, v_scale)):
        finite = x.isfinite()
        back = x8.float() * scale[:, None]
        # half an ulp of e4m3 is 2^-4 of the number, and 2^-10 of the scale among the smallest; float32's own rounding
        # beside it
        assert ((back - x).abs()[finite] <= (x.abs() * 2.0**-4 * 1.0001 + scale[:, None] * 2.0**-10)[finite]).all()
        assert torch.equal(
            x8.float().abs().nan_to_num(0).amax((0, 1, 3)), torch.tensor([448.0, 448, 448, 0], device=device)
        )
        assert scale[3] == 1
    assert k8[0, 0, 1, 0].float().isnan() and v8[1, 1, 2, 3].float() == -448


def test_every_gpu_runs_the_portable_append():
    k = torch.empty(2, 8, 2, 64)
    problem = AppendProblem.from_call(AppendCall(k, k, k, k, INT(0, 0)))
    assert all(
        select(problem, target).forward.kernel.name == f"{'cpu' if name == 'CPU' else 'portable'}.append"
        for name, target in FAKES.items()
    )


@pytest.mark.parametrize("name", ["k_new", "v_new", "k", "v", "seqlens", "cos"])
def test_other_strides_are_another_plan(name):
    """A plan's launches are repeated with nothing but addresses changed."""
    new, pool, angles = torch.zeros(3, 2, 2, 16), torch.zeros(3, 8, 2, 16), torch.zeros(8, 4)
    call = AppendCall(new, new.clone(), pool, pool.clone(), INT(0, 0, 0), None, None, None, angles, angles.clone())
    tensor = getattr(call, name)
    apart = [tensor.new_zeros(*tensor.shape[:-1], n * tensor.shape[-1]) for n in (1, 2, 3)]
    views = [t[..., ::n] if t.dim() == 1 else t[..., : tensor.shape[-1]] for n, t in enumerate(apart, 1)]
    choices = [ops_decode.decide_append(call._replace(**{name: view})) for view in views]
    assert ops_decode.decide_append(call) is choices[0] and len(set(map(id, choices))) == 3


@pytest.mark.parametrize("which", ["k", "v", "both"])
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_a_pool_that_is_a_negative_view_reads_as_it_was_written(paged, which):
    """A negative view's memory holds the numbers negated: whoever reads it through the view sees the new keys, and all
    else as before.
    """
    k_new, v_new = new_tokens(torch.float64, "cpu")
    stored = [torch.randn(pool.shape, dtype=torch.float64) for pool in pools(paged, torch.float64, "cpu")]
    viewed = [torch._neg_view(one) if which in (name, "both") else one for name, one in zip("kv", stored)]
    table = torch.tensor(TABLE, dtype=torch.int32) if paged else None
    call = AppendCall(k_new, v_new, *[one.clone() for one in viewed], INT(*LENGTHS), table)
    ops_decode.append(call)
    ops_decode.append(call._replace(k=viewed[0], v=viewed[1]))
    assert viewed[0].is_neg() == (which != "v") and len(wanted(call)) > 5
    for one, other in zip(viewed, (call.k, call.v)):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(stored[0], -call.k if which != "v" else call.k, rtol=0, atol=0, equal_nan=True)
