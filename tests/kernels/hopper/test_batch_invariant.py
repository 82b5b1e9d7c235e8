"""Forwards with the bits of a decode, from their own source on the simulator: as good as the oracle allows, free of
races, and the same bits.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.hopper.hopper_cases import CAUSAL, DTYPES, H200, NIGHTLY, band, two_of

pytest.importorskip("triton")

from strobe.kernels.runtime import batch_invariant, error_flags, split_kv
from strobe.ops import attention as ops
from strobe.ops import decode as ops_decode
from strobe.problem.call import Call
from strobe.problem.decode import DecodeCall, DecodeProblem
from strobe.problem.problem import Problem
from strobe.problem.target import FAKES
from strobe.selection.select import select
from strobe.sim import simulate
from strobe.testing import CASES, FAMILIES, Case, assert_as_good_as
from tools.proof.simulate import READ_FENCES, posing, simulated

FAMILY = ("hopper", "portable")


def _case(name: str, seqlen_q: int = 90, seqlen_k: int | None = 390, **options) -> Case:
    return Case(name, seqlen_q, seqlen_k, **{"head_dim": 64, "batch": 1, "heads": (2, 1)} | options)


SEVERAL = {
    case.name: case
    for case in (
        _case("dense"),
        _case("causal", 390, None, mask=CAUSAL),
        _case("causal_more_rows_sinks", 390, 290, mask=CAUSAL, sinks=True),
        _case("window", 390, None, mask=band(150, 20)),
        _case("window_left_softcap", 300, 390, mask=band(200, None), softcap=3.0),
        _case("group_of_three", 100, 300, heads=(3, 1), mask=CAUSAL),
        _case("scale_negative", scale=-0.3),
        _case("d128", 90, 300, head_dim=128, mask=CAUSAL),
        _case("d192_128", 70, 300, head_dim=192, head_dim_v=128, mask=CAUSAL),
        _case("d256", 70, 300, head_dim=256),
        _case("expanded", 90, 300, heads=(4, 2), storage="expanded_heads"),
        _case("packed", batch=3, lengths_q=(150, 1, 70), lengths_k=(260, 300, 70), mask=CAUSAL),
        _case(
            "packed_group_of_five",
            batch=2,
            lengths_q=(30, 41),
            lengths_k=(270, 41),
            heads=(5, 1),
            mask=band(130, 0),
            sinks=True,
        ),
    )
}
OF_THE_TABLE = (
    "length_1", "length_257", "one_key", "causal_more_rows", "causal_799_to_3", "window_beyond_the_keys", "scale_zero",
    "partial", "head_dim_40",
    "packed_empty_middle", "packed_no_keys_first_sinks", "packed_outside_sinks", "packed_promised",
    "packed_promised_outside", "packed_heads_first", "packed_softcap_192_128",
)  # fmt: skip


@pytest.fixture(autouse=True)
def splits_of_128(monkeypatch):
    for module in (split_kv, batch_invariant):
        monkeypatch.setattr(module, "INVARIANT_SPLIT", 128)


def proven(case: Case, n: int, family: str, schedules) -> None:
    call = case.build("cpu", DTYPES[n % 2], FAMILIES[n % 5], n, kernel=family)._replace(batch_invariant=True)
    for mode, seed in schedules:
        found, run = simulated(call, H200, mode, seed)
        assert run.launches == ["invariant_kernel"] and run.reports == [], (mode, seed, run.reports)
        assert_as_good_as(found, call)


CALLS = list(enumerate({**SEVERAL, **{name: CASES[name] for name in OF_THE_TABLE}}.values()))


@pytest.mark.parts(4, seed=3712493495)
@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize("n, case", CALLS, ids=[case.name for _, case in CALLS])
def test_a_forward_in_splits(n, case, family):
    proven(case, n, family, two_of(n)[n % 2 :][:1])


@pytest.mark.nightly
@pytest.mark.parametrize("n, case", list(enumerate(SEVERAL.values())), ids=SEVERAL)
def test_a_forward_in_splits_under_every_schedule(n, case):
    proven(case, n, "hopper", NIGHTLY)


def _invariant(case: Case, family: str) -> Call:
    return case.build("cpu", torch.bfloat16, "normal", 3, kernel=family)._replace(batch_invariant=True)


def same_bits(call: Call, decoded: dict[str, torch.Tensor], rows: tuple[slice, int], length: int) -> None:
    """A forward's rows, in its last tokens, beside the decode of `decoded` whose sequences hold so many keys."""
    with posing(FAKES["H200"]), simulate("sm_90", sms=3, checks=READ_FENCES):
        out, lse = ops.run(call)
        options = {name: getattr(call, name) for name in ("left", "right", "scale", "softcap", "sinks", "kernel")}
        held = torch.full((len(decoded["q"]),), length, dtype=torch.int32)
        others = ops_decode.run(DecodeCall(**decoded, seqlens=held, batch_invariant=True, **options))
    if call.packed:
        out, lse = out[None], lse[None]
    place, batch = rows
    assert torch.equal(out[batch, place], others[0][0]) and torch.equal(lse[batch, :, place], others[1][0])


@pytest.mark.parts(4, seed=3712493495)
@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize(
    "name", [name for name, case in SEVERAL.items() if not case.packed and "more_rows" not in name]
)
def test_rows_have_the_bits_of_a_decode(name, family, wide_sums):
    call = _invariant(SEVERAL[name], family)
    rows, keys = call.q.shape[1], call.k.shape[1]
    for last, tokens in ((rows, 3), (rows, 1), (rows - 40, 5)) if call.right == 0 else ((rows, 3), (rows, 1)):
        decoded = {"q": call.q[:1, last - tokens : last], "k": call.k[:1], "v": call.v[:1]}
        same_bits(call, decoded, (slice(last - tokens, last), 0), keys - (rows - last))


@pytest.mark.parts(4)
@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize("name", [name for name, case in SEVERAL.items() if case.packed])
def test_packed_rows_have_the_bits_of_a_decode(name, family, wide_sums):
    call, case = _invariant(SEVERAL[name], family), SEVERAL[name]
    begin = begin_k = 0
    for length, keys in zip(case.lengths_q, case.lengths_k, strict=True):
        tokens = min(2, length)
        end = begin + length
        held = slice(begin_k, begin_k + keys)
        decoded = {"q": call.q[None, end - tokens : end], "k": call.k[None, held], "v": call.v[None, held]}
        same_bits(call, decoded, (slice(end - tokens, end), 0), keys)
        begin, begin_k = end, begin_k + keys


@pytest.mark.parts(4)
@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize("left, right, tokens", [(0, 0, 1), (20, 0, 3), (64, 2, 1), (100, 0, 3)])
def test_rows_of_a_short_window_have_the_bits_of_a_decode(left, right, tokens, family, wide_sums):
    """At lengths about the edges of tiles and of splits. Keys before the window of the decode's first row are NaN
    there; other rows of the forward see them.
    """
    for keys in (128, 129, 190, 40):
        call = _invariant(_case("window", 90, keys, mask=band(left, right)), family)
        hidden = (torch.arange(keys) < keys - tokens - left)[None, :, None, None]
        decoded = {
            "q": call.q[:1, -tokens:],
            "k": call.k[:1].masked_fill(hidden, torch.nan),
            "v": call.v[:1].masked_fill(hidden, torch.nan),
        }
        same_bits(call, decoded, (slice(90 - tokens, 90), 0), keys)


@pytest.mark.parametrize("family", FAMILY)
def test_bad_offsets_and_broken_promises_are_told(family):
    """Offsets that fall are clamped; rows beyond a promised length, and all rows of too many keys, are NaN."""
    call = _invariant(SEVERAL["packed"], family)
    with posing(FAKES["H200"]), simulate("sm_90", sms=3, checks=READ_FENCES):
        out, lse = ops.run(call._replace(max_seqlen_q=100, max_seqlen_k=290))
        whole = ops.run(call)[0]
    bad = torch.zeros(221, dtype=torch.bool)
    bad[100:150] = bad[150] = True  # of 150 queries those beyond 100; the second sequence's 300 keys
    assert out[bad].isnan().all() and lse[:, bad].isnan().all() and torch.equal(out[~bad], whole[~bad])
    assert {word.split(": ")[1] for word in error_flags.read_and_clear()} == {"max_seqlen_q", "max_seqlen_k"}
    with posing(FAKES["H200"]), simulate("sm_90", sms=3, checks=READ_FENCES):
        out, _ = ops.run(call._replace(cu_seqlens_k=torch.tensor([0, 260, 100, 9999], dtype=torch.int32)))
    assert torch.equal(out[:150], whole[:150]) and not out[150].any()
    assert {word.split(": ")[1] for word in error_flags.read_and_clear()} == {"cu_seqlens_k"}


def test_what_a_decode_has_no_word_for_is_left_to_other_kernels():
    call = CASES["documents_causal"].build("cpu", torch.bfloat16)._replace(batch_invariant=True)
    choice = select(Problem.from_call(call), FAKES["H200"])
    assert choice.forward.kernel.name == "portable.forward" and "as a decode" not in str(choice.forward.config)
    assert any(name == "hopper.forward" and "documents" in why for name, why in choice.rejections)
    elsewhere = select(Problem.from_call(call), FAKES["A100"])
    assert any(name == "hopper.forward" and "made for sm_90" in why for name, why in elsewhere.rejections)
    plain = select(
        Problem.from_call(SEVERAL["causal"].build("cpu", torch.bfloat16)._replace(batch_invariant=True)), FAKES["H200"]
    )
    assert plain.forward.kernel.name == "hopper.forward" and "as a decode" in str(plain.forward.config)


def test_queries_at_odd_addresses_go_where_their_decode_goes():
    call = _invariant(SEVERAL["causal"], "")
    odd = torch.empty(call.q.numel() + 1, dtype=call.q.dtype)[1:].view(call.q.shape).copy_(call.q)
    assert odd.data_ptr() % 4 == 2
    decoded = DecodeCall(
        odd[:, -1:], call.k, call.v, torch.tensor([390], dtype=torch.int32), right=0, batch_invariant=True
    )
    choices = (
        select(Problem.from_call(call._replace(q=odd)), FAKES["H200"]),
        select(DecodeProblem.from_call(decoded), FAKES["H200"]),
    )
    assert [choice.forward.kernel.name for choice in choices] == ["hopper.forward", "hopper.decode"]
    found, run = simulated(call._replace(q=odd, kernel="hopper"), H200)
    assert run.reports == []
    assert_as_good_as(found, call)
