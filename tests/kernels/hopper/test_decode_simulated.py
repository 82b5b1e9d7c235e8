"""The decodes' own sources in the simulator, several CTAs in flight: who joins the shares of a tile has seen them
all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.hopper.hopper_cases import NIGHTLY, SCHEDULES

pytest.importorskip("triton")
from strobe.kernels.hopper import decode_config as config
from strobe.kernels.runtime import error_flags, workspace
from strobe.problem.cache import FP8
from strobe.problem.decode import DecodeCall, DecodeProblem
from strobe.problem.target import FAKES
from strobe.selection.select import select
from strobe.sim import simulate
from strobe.testing import FAMILIES
from strobe.testing.decode import DECODES, assert_decode_as_good_as
from tests.decoding import on as run_on
from tools.proof.simulate import READ_FENCES

H200 = FAKES["H200"]
NAMES = (
    "dense",
    "dense_tokens_5",
    "dense_softcap_sinks",
    "dense_left_padded",
    "pages_of_16",
    "pages_of_13",
    "pages_lost",
    "pages_fp8",
)


def simulated(call: DecodeCall, schedule: tuple[str, int], monkeypatch, meant: DecodeCall | None = None) -> list:
    """What the simulator objects to; out and lse are held to the oracle's of the call, or of what it means, and
    counters are 0 again.
    """
    held = torch.zeros(4096, dtype=torch.int32)
    monkeypatch.setattr(f"strobe.kernels.{call.kernel}.launch_decode.zeros_on", lambda device, count: held[:count])
    with simulate("sm_90", *schedule, sms=3, check=False, checks=READ_FENCES) as run:
        results = run_on(H200, call)
    assert_decode_as_good_as(results, meant or call)
    assert run.launches == ["decode_kernel"] and not held.any()
    return run.reports


def built(name: str, n: int, kernel: str = "portable", invariant: bool = False) -> DecodeCall:
    return DECODES[name].build("cpu", (torch.bfloat16, torch.float16)[n % 2], FAMILIES[n % 5], n, kernel, invariant)


@pytest.mark.parametrize("n, name", list(enumerate(NAMES)), ids=NAMES)
def test_the_last_to_finish_has_seen_all_shares(n, name, monkeypatch):
    call = built(name, n)
    assert select(DecodeProblem.from_call(call), H200).forward.config.n_splits > 1
    assert simulated(call, SCHEDULES[n % 3], monkeypatch) == []


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_under_every_schedule(name, monkeypatch):
    for n, schedule in enumerate(NIGHTLY):
        assert simulated(built(name, n), schedule, monkeypatch) == []


ON_HOPPER = [
    name for name in DECODES if name not in ("dense_odd_widths", "dense_odd_offset")
]  # whose rows are no whole 16 bytes
EACH_COMMIT = (
    "dense", "dense_tokens_5", "dense_tokens_40_group_3", "dense_tokens_16_width_128", "dense_window",
    "dense_window_right", "dense_softcap_sinks", "dense_left_padded",
    "dense_scale_negative", "dense_partial", "dense_nothing", "dense_no_room", "dense_fp8", "pages_of_1", "pages_of_13",
    "pages_of_64_heads_first", "dense_fp8_window", "pages_window", "pages_window_tokens_5",
    "pages_window_softcap_sinks", "pages_lost", "pages_fp8", "pages_fp8_window_sinks",
    "pages_fp8_tokens_8_width_256", "pages_one_head",
)  # fmt: skip


@pytest.mark.parts(4)
@pytest.mark.nightly_cases(
    "dense_left_padded", "dense_softcap_sinks", "dense_tokens_5", "pages_of_13", "pages_of_64_heads_first"
)
@pytest.mark.parametrize("n, name", list(enumerate(EACH_COMMIT)), ids=EACH_COMMIT)
def test_the_hopper_decode(n, name, monkeypatch):
    assert simulated(built(name, n, "hopper", invariant=n % 4 == 3), SCHEDULES[n % 3], monkeypatch) == []


@pytest.mark.parametrize("kernel", ["hopper", "portable"])
@pytest.mark.parametrize("where", ["before", "one beyond", "far beyond"])
def test_a_start_out_of_range(where, kernel, monkeypatch):
    """Before the first key it is that; beyond the last key of its sequence no row sees any; and it is told."""
    for name in ("dense_left_padded", "dense_left_padded_window"):
        call = built(name, 1, kernel)
        if where == "before":  # left padding is then seen
            call = call._replace(
                **{pool: torch.cat([t[:-1], t[-1:].nan_to_num(1.0)]) for pool, t in (("k", call.k), ("v", call.v))}
            )
        length = int(call.seqlens[-1])
        out_of_range, meant = {
            "before": (-3, 0),
            "one beyond": (length + 1, length),
            "far beyond": (2**31 - 1, length),
        }[where]
        starts = [
            torch.cat([call.k_start[:-1], torch.tensor([start], dtype=torch.int32)]) for start in (out_of_range, meant)
        ]
        assert (
            simulated(call._replace(k_start=starts[0]), SCHEDULES[0], monkeypatch, call._replace(k_start=starts[1]))
            == []
        )
        assert [word.split(": ")[1] for word in error_flags.read_and_clear()] == ["cache.k_start"], name


IN_MEMORY = (
    "dense_gaps",
    "dense_softcap_sinks",
    "dense_window",
    "pages_of_13",
    "pages_window_softcap_sinks",
    "pages_lost",
    "pages_fp8",
)


@pytest.mark.parametrize("n, name", list(enumerate(IN_MEMORY)), ids=IN_MEMORY)
def test_the_hopper_decode_with_shares_in_global_memory(n, name, monkeypatch):
    """As splits that are too many or too long to run together have them."""
    call = built(name, n, "hopper")
    assert select(DecodeProblem.from_call(call), H200).forward.config.traits.cluster > 1
    monkeypatch.setattr(config, "cluster_size", lambda *_: 0)
    assert not select(DecodeProblem.from_call(call), H200).forward.config.traits.cluster
    assert simulated(call, SCHEDULES[n % 3], monkeypatch) == []


@pytest.mark.nightly_cases("16-dense_nothing", "16-pages_lost")
@pytest.mark.parametrize("size, name", [(2, ""), (8, "pages_one_head"), (16, "dense_nothing"), (16, "pages_lost")])
def test_the_hopper_decode_in_clusters_of_any_size(size, name, monkeypatch):
    """More programs than tiles of keys, and fewer; a row a program, and no sequence at all."""
    monkeypatch.setattr(config, "cluster_size", lambda *_: size)
    call = built(name, size, "hopper") if name else wide_call(64, 64, torch.bfloat16, 16)
    assert simulated(call, SCHEDULES[size % 3], monkeypatch) == []


def test_splits_run_together_where_that_is_fast():
    """One program an SM, up to four tiles of keys each: what is read then counts for more than how shares are
    joined."""

    def chosen(
        batch: int, keys: int, heads: int = 8, width: int = 128, tokens: int = 1, target=H200, **options
    ) -> tuple[int, int]:
        k = torch.empty(batch, keys, heads, width, dtype=torch.bfloat16, device="meta")
        q = torch.empty(batch, tokens, 4 * heads, width, dtype=torch.bfloat16, device="meta")
        call = DecodeCall(q, k, k, torch.empty(batch, dtype=torch.int32, device="meta"))
        found = select(
            DecodeProblem.from_call(call._replace(right=0, kernel="hopper", **options)), target
        ).forward.config
        return found.traits.cluster, found.split_size

    assert [chosen(1, keys)[0] for keys in (64, 128, 512, 1024, 4096, 4097, 8192)] == [0, 2, 8, 16, 16, 0, 0]
    assert [chosen(batch, 1024)[0] for batch in (2, 4, 8, 16)] == [8, 4, 0, 0] and chosen(4, 512) == (4, 128)
    assert chosen(1, 1024, width=256) == (8, 128)  # a program an SM: 16 would need 16 SMs that are wired together
    assert chosen(1, 1024, batch_invariant=True)[0] == 0
    assert chosen(1, 1024, target=replace(H200, sm_count=78))[0] == 8
    # of more than 8 rows, global memory exchanges partial results faster
    assert [chosen(1, 1024, tokens=tokens)[0] for tokens in (2, 3, 16)] == [16, 0, 0]


@pytest.mark.parametrize(
    "n, name", list(enumerate(("dense_tokens_5", "dense_softcap_sinks", "dense_window", "dense_left_padded")))
)
def test_the_hopper_decode_of_long_rows(n, name, monkeypatch):
    monkeypatch.setattr(config, "cluster_size", lambda *_: 0)
    monkeypatch.setattr(config, "streamed", lambda *_: True)
    call = built(name, n, "hopper")
    assert select(DecodeProblem.from_call(call), H200).forward.config.traits.block_n == config.STREAMED.block_n
    assert simulated(call, SCHEDULES[n % 3], monkeypatch) == []


def test_long_rows_are_streamed():
    """Where SMs have enough of them, and where it was measured: 16-bit rows of 128."""

    def tile(
        batch: int, keys: int, width: int = 128, paged: bool = False, dtype: torch.dtype = torch.bfloat16, **options
    ) -> int:
        k = torch.empty(batch, keys, 8, width, dtype=dtype, device="meta")
        table = torch.empty(batch, 1, dtype=torch.int32, device="meta") if paged else None
        scale = torch.empty(8, device="meta") if dtype == FP8 else None
        q = torch.empty(batch, 1, 32, width, dtype=torch.bfloat16, device="meta")
        call = DecodeCall(
            q,
            k,
            k,
            torch.empty(batch, dtype=torch.int32, device="meta"),
            table,
            k_scale=scale,
            v_scale=scale,
            right=0,
            kernel="hopper",
        )
        found = select(DecodeProblem.from_call(call._replace(**options)), H200).forward.config
        assert found.traits.block_n == 64 or found.traits.single
        return found.traits.block_n

    assert [
        tile(batch, keys) for batch, keys in ((64, 8192), (128, 4096), (32, 8192), (32, 4096), (8, 32768), (64, 2048))
    ] == [128] * 3 + [64] * 3
    assert [
        tile(64, 8192, width=64),
        tile(64, 8192, paged=True),
        tile(64, 8192, dtype=FP8),
        tile(64, 8192, batch_invariant=True),
    ] == [64] * 4


@pytest.mark.nightly
@pytest.mark.parametrize("n, name", list(enumerate(ON_HOPPER)), ids=ON_HOPPER)
def test_the_hopper_decode_under_every_schedule(n, name, monkeypatch):
    for turn, schedule in enumerate(NIGHTLY):
        assert simulated(built(name, n + turn, "hopper"), schedule, monkeypatch) == []


def wide_call(head_dim: int, head_dim_v: int, dtype: torch.dtype, page_size: int) -> DecodeCall:
    """Rings that wrap and splits in number, at a width that has a layout of its own."""
    draw = torch.Generator().manual_seed(head_dim + page_size)
    keys = 640 // max(1, page_size) * max(1, page_size)
    k, v = (torch.randn(2, keys, 1, width, generator=draw).to(dtype) for width in (head_dim, head_dim_v))
    table = None
    if page_size:
        table = torch.randperm(2 * keys // page_size, generator=draw).int()
        k, v = (
            torch.empty_like(t := x.view(-1, page_size, 1, x.shape[-1])).index_copy_(0, table.long(), t) for x in (k, v)
        )
        table = table.view(2, -1)
    q = torch.randn(2, 2, 4, head_dim, generator=draw).bfloat16()
    return DecodeCall(q, k, v, torch.tensor([keys, 70], dtype=torch.int32), table, right=0, kernel="hopper")


WIDTHS = [(64, 64, 16), (96, 96, 0), (128, 128, 128), (192, 128, 48), (256, 256, 1), (32, 8, 16)]


@pytest.mark.parts(4, seed=2848971227)
@pytest.mark.parametrize("head_dim, head_dim_v, page_size", WIDTHS)
def test_the_hopper_decode_at_every_width(head_dim, head_dim_v, page_size, monkeypatch):
    assert (
        simulated(wide_call(head_dim, head_dim_v, torch.bfloat16, page_size), SCHEDULES[page_size % 3], monkeypatch)
        == []
    )


def test_queries_over_8_bits_are_scaled_into_float16(monkeypatch):
    """Rows of q far beyond float16, rows of almost nothing, and rows of 0: powers of two change no bit of them."""
    call = wide_call(64, 64, torch.bfloat16, 16)
    call = call._replace(k=call.k.to(FP8), v=call.v.to(FP8), k_scale=torch.ones(1), v_scale=torch.ones(1))
    q = call.q.clone()
    q[0, 0, 0] *= 2.0**60
    q[0, 1, 1] *= 2.0**-70
    q[1, 1] = 0.0
    assert simulated(call._replace(q=q, scale=2.0**-62), SCHEDULES[0], monkeypatch) == []


@pytest.mark.nightly
def test_offsets_beyond_32_bits_are_of_64(monkeypatch):
    call = wide_call(64, 64, torch.bfloat16, 16)
    assert config.furthest(DecodeProblem.from_call(call)) < 2**20
    monkeypatch.setattr(config, "furthest", lambda problem: 2**31)
    assert not select(DecodeProblem.from_call(call), H200).forward.config.traits.int32_offsets
    assert simulated(call, SCHEDULES[1], monkeypatch) == []


def test_counters_are_kept_and_of_one_size_or_another():
    assert workspace.zeros_on(torch.device("cpu"), 5).shape == (8,)
    assert workspace.zeros_on(torch.device("cpu"), 1).shape == (1,)


def test_captures_are_given_zeros_of_their_own(monkeypatch):
    """Of a reserve that is set aside outside of a capture; where that is used up, zeros that the graph clears."""
    device, real = torch.device("cuda", 7), torch.zeros
    monkeypatch.setattr(workspace, "persistent_zeros", lambda device, size: real(size, dtype=torch.int32))
    monkeypatch.setattr(workspace, "_counters", {})
    monkeypatch.setattr(workspace, "_reserves", {7: (real(workspace.RESERVE, dtype=torch.int32), 0)})
    one, other = (workspace._new(device, (7, 1, capture, 2)) for capture in (11, 12))
    assert one.shape == other.shape == (2,) and abs(one.data_ptr() - other.data_ptr()) >= 32
    assert workspace._new(device, (7, 1, 11, 2)) is one and workspace._new(device, (7, 2, 11, 2)) is not one
    reserve = workspace._reserves[7][0]
    last = workspace._new(device, (7, 1, 13, workspace.RESERVE))
    assert len(last) == workspace.RESERVE and last.data_ptr() != reserve.data_ptr()
