"""The portable decode and append, run by Triton's interpreter on a CPU: every named cache in as many splits as an H200
would take.
"""

from __future__ import annotations

import pytest
import torch

import strobe
from strobe.env import ENV
from strobe.ops import decode as ops_decode
from strobe.problem.decode import DecodeCall
from strobe.problem.target import FAKES
from strobe.testing import FAMILIES
from strobe.testing.decode import DECODES, assert_decode_as_good_as
from tests.decoding import draw_table, expected, fill_unowned, judged, on, wide_sums
from tests.kernels.small_scales import assert_decode_means_of_values
from tests.ops import test_append as appended
from tests.ops import test_decode, test_decode_bits

pytestmark = pytest.mark.skipif(not ENV.interpret, reason="TRITON_INTERPRET is not set")

DTYPES = (
    torch.float32,
    torch.float16,
    torch.float64,
)  # not bfloat16: the interpreter (Triton 3.6, create_dot) multiplies its bits as integers
HERE = {"device": "cpu", "kernel": "portable"}
SLOW = (
    "dense_tokens_16_group_8",
    "dense_tokens_40_group_3",
    "pages_of_1024",
    "pages_of_16_tokens_4",
)  # many programs: nightly
SHORT = (
    "dense_tokens_5",
    "dense_softcap_sinks",
    "dense_left_padded",
    "dense_no_room",
    "pages_of_13",
    "pages_lost",
    "pages_fp8",
)


@pytest.mark.parts(3, seed=851176979)
@pytest.mark.parametrize(
    "n, name",
    [pytest.param(n, name, marks=[pytest.mark.nightly] * (name in SLOW), id=name) for n, name in enumerate(DECODES)],
)
def test_in_splits(n, name):
    dtype = DTYPES[n % 2 if DECODES[name].fp8 else n % 3]  # no float64 over 8 bits on a GPU
    call = DECODES[name].build("cpu", dtype, FAMILIES[n % 5], n, "portable")
    assert_decode_as_good_as(on(FAKES["H200"], call), call)
    strobe.last_errors()


@pytest.mark.parametrize("n, name", list(enumerate(SHORT)), ids=SHORT)
def test_through_the_op(n, name):
    """One split, between guard bands, into a given out."""
    judged(DECODES[name].build("cpu", DTYPES[n % 3], FAMILIES[-n % 5], n, "portable"))
    assert bool(strobe.last_errors()) == bool(DECODES[name].lost)


@pytest.mark.nightly_cases("0", "128")
@pytest.mark.parametrize("page_size", [0, 16, 13, 128])
def test_indicator_probe(page_size):
    """Lengths about the edges of tiles and splits, one batch: counts among n."""
    lengths = torch.tensor([1, 31, 32, 33, 127, 128, 129, 255, 256, 257])
    room, batch = 260, len(lengths)
    columns, size = (-(-room // page_size), page_size) if page_size else (1, room)
    values = torch.eye(16)[torch.arange(columns * size) % 16].expand(batch, -1, 16)
    own = (torch.arange(columns * size)[None] < lengths[:, None])[..., None]
    order = torch.randperm(batch * columns, generator=torch.Generator().manual_seed(0))
    rows = torch.where(own, values, torch.nan).reshape(batch * columns, size, 1, 16)
    table = order.view(batch, columns).int() if page_size else None
    rows = rows[order.argsort()] if page_size else rows
    call = DecodeCall(torch.zeros(batch, 1, 1, 16), rows, rows, lengths.int(), table, right=0)
    out, lse = on(FAKES["H200"], call)
    torch.testing.assert_close(
        out[:, 0, 0].double(),
        torch.where(own, values, 0.0).sum(1).double() / lengths[:, None],
        rtol=8 * 2.0**-24,
        atol=0,
    )
    torch.testing.assert_close(lse[:, 0, 0].double(), lengths.double().log(), rtol=0, atol=2e-6 + 4 * 2.0**-21)


@pytest.mark.parametrize("seed", range(12))
def test_page_tables(seed):
    drawn = draw_table(seed, 3)
    results = []
    for value in (torch.nan, torch.inf):
        fill_unowned(drawn, value)
        results.append(on(FAKES["A10"], drawn.call))
        assert any("page_table" in word for word in strobe.last_errors()) == drawn.lost
    assert all(torch.equal(a, b) for a, b in zip(*results))
    for got, wanted in zip(results[0], expected(drawn.call)):
        torch.testing.assert_close(got, wanted, rtol=test_decode.FP64, atol=test_decode.FP64)


@pytest.fixture(name="wide_sums")
def _wide_sums():
    with wide_sums():
        yield


@pytest.mark.parametrize("seed", [0, 9, 11, 18])
def test_the_same_bits_everywhere(seed, wide_sums):
    test_decode_bits.alone_and_elsewhere(seed, most=60, **HERE)


@pytest.mark.parametrize(
    "tokens, left, right", [(1, 0, 0), (3, 20, 0), (2, 31, 2), (1, 63, 0), (3, 100, 0), (1, 255, 1)]
)
def test_a_short_windows_rows_have_the_bits_of_their_prefill(tokens, left, right, wide_sums):
    """Across an edge of tiles and one of fixed splits, and in sequences that are shorter than the window."""
    dtype = DTYPES[left % 2]
    test_decode_bits.windowed(left, right, tokens, (2100, 300, 33, 5), ("cpu", "portable"), rows=20, dtype=dtype)


def test_empty_splits_change_no_bit():
    """Fixed splits in rows of 100 and of 5,000 keys, of which the first split holds all: with and without a combine."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 1, 16, generator=g) for n in (2, 100, 100))
    longer = [torch.nn.functional.pad(t, (0, 0, 0, 0, 0, 4900), value=torch.nan) for t in (k, v)]
    runs = []
    for keys, values in ((k, v), longer):
        call = DecodeCall(
            q,
            keys,
            values,
            torch.tensor([90], dtype=torch.int32),
            right=0,
            batch_invariant=True,
            kernel="portable",
            sinks=torch.ones(1),
        )
        runs.append((ops_decode.run(call), ops_decode.decide(call).forward.config.n_splits))
    assert [n for _, n in runs] == [1, 3]
    assert torch.equal(runs[0][0][0], runs[1][0][0]) and torch.equal(runs[0][0][1], runs[1][0][1])


def test_rows_of_nan():
    test_decode.test_nan_in_a_row_of_q_stays_there(**HERE)


def test_lengths_and_starts_out_of_range():
    for seqlens, error in (((-3, 4), "cache.seqlens"), ((4, 2**31 - 1), "cache.seqlens")):
        test_decode.test_lengths_out_of_range_are_clamped_and_told(seqlens, error, **HERE)
    for start, clamped, options in (
        (-2, 0, {}),
        (6, 5, {}),
        (2**31 - 1, 5, {"window": (70, 3)}),
        (6, 5, {"causal": False}),
    ):
        test_decode.test_a_start_out_of_range_is_clamped_and_told(start, clamped, options, **HERE)
    test_decode.test_an_empty_pool(**HERE)


@pytest.mark.parametrize("scale", [(0.5, -2.0), (0.0, 1.0), (-1.0, 0.0)])
def test_scales_of_any_sign(scale):
    """Keys of a negative or a zero scale: the sign goes into q, and what is hidden stays hidden."""
    call = (
        DECODES["pages_fp8_window_sinks"]
        .build("cpu", torch.float32, "normal", 1, "portable")
        ._replace(k_scale=torch.tensor(scale))
    )
    for softcap in (0.0, 2.0):
        assert_decode_as_good_as(ops_decode.run(call._replace(softcap=softcap)), call._replace(softcap=softcap))


@pytest.mark.parametrize(
    "n, paged, rotary", [(0, True, (16, False)), (2, False, (10, True)), (3, True, None), (0, False, (6, False))]
)
def test_append(n, paged, rotary):
    appended.test_each_token_goes_to_its_place(n, appended.DTYPES[n], paged, rotary, **HERE)


def test_append_in_8_bits():
    appended.test_8_bits_are_torchs_own(torch.float16, True, **HERE)
    appended.test_8_bits_are_torchs_own(torch.float32, False, **HERE)
    appended.test_every_8_bit_number_is_reached(**HERE)


def test_pages_that_lie_2_to_the_31_apart():
    test_decode.test_pages_that_lie_2_to_the_31_apart("portable")


def test_sizes_of_0():
    for sizes in ((0, 1, 2, 3), (2, 0, 2, 3), (2, 1, 0, 3), (2, 3, 2, 0)):
        test_decode.test_sizes_of_0(*sizes, **HERE)


@pytest.mark.parametrize("name", ["dense", "pages_fp8"])
def test_bfloat16_is_refused_by_name(name):
    """The interpreter multiplies its bits as integers: errors of 1e8, and nothing said."""
    with pytest.raises(strobe.UnsupportedProblem, match=r"TRITON_INTERPRET.*bfloat16"):
        ops_decode.run(DECODES[name].build("cpu", torch.bfloat16, kernel="portable"))


@pytest.mark.parametrize("scale", [1e-60, -1e-60])
def test_a_scale_below_float32_gives_means_of_values(scale):
    assert_decode_means_of_values(scale, "portable")
