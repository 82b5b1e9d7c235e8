"""Cases of the Hopper forward and the compile-time constants that each one compiles with."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.hopper.hopper_cases import (
    CAUSAL,
    H200,
    WITHOUT_BOUND,
    band,
    key_lengths,
    prefix,
    runs,
)

pytest.importorskip("triton")

from strobe.kernels.hopper import kernel as hopper
from strobe.problem.problem import Problem
from strobe.testing import Case


def _case(name: str, seqlen_q: int = 300, seqlen_k: int | None = 390, width: int = 128, **options) -> Case:
    return Case(name, seqlen_q, seqlen_k, **{"head_dim": width, "batch": 1, "heads": (2, 2)} | options)


def _narrow(name: str, seqlen_q: int = 390, seqlen_k: int | None = 520, **options) -> Case:
    return _case(name, seqlen_q, seqlen_k, 64, **options)


def _wide(name: str, seqlen_q: int = 260, seqlen_k: int | None = 200, **options) -> Case:
    return _case(name, seqlen_q, seqlen_k, 256, **options)


LARGE = (
    _case("dense"),
    _case("whole_tiles", 256, 512),
    _case("causal", 400, None, mask=CAUSAL),
    _case("causal_more_keys", 200, 500, mask=CAUSAL),
    _case("causal_more_rows", 520, 385, mask=CAUSAL),  # the first tile of a head sees no key
    _case("causal_more_rows_sinks", 520, 385, mask=CAUSAL, sinks=True),
    _case("window_left", 300, 420, mask=band(70, None)),
    _case("window_right", 300, 420, mask=band(None, 70)),
    _case("window_both", 400, None, mask=band(150, 20)),
    _case("window_zero", 400, None, mask=band(0, 0)),
    _case("window_wider_than_all", mask=band(5000, 5000)),
    _case("window_before_the_keys", 520, 390, mask=band(10, 10)),  # rows at the top see no key
    _case("softcap", mask=CAUSAL, softcap=3.0),
    _case("sinks", sinks=True),
    _case("sinks_without_bound", 520, 385, heads=(4, 2), mask=CAUSAL, sinks=WITHOUT_BOUND),
    _case("softcap_sinks_window", 400, None, mask=band(100, 0), softcap=5.0, sinks=True),
    _case("grouped", 384, heads=(4, 2), mask=CAUSAL),
    _case("one_key_head", 200, 390, heads=(5, 1)),
    _case("batch_of_three", 200, 390, batch=3, heads=(2, 1)),
    _case("scale", scale=0.3),
    _case("stored_heads_first", 380, heads=(4, 2), storage="heads_first", mask=CAUSAL),
    _case("stored_gaps", 380, heads=(4, 2), storage="gaps"),
    _case("stored_mixed", 380, heads=(4, 2), storage="mixed", mask=CAUSAL),
    _case("head_dim_96", width=96, mask=CAUSAL),
    _case("head_dims_72_120", width=72, head_dim_v=120),
    _narrow("d64_dense"),
    _narrow("d64_causal", 600, None, mask=CAUSAL),
    _narrow("d64_causal_more_rows_sinks", 800, 513, mask=CAUSAL, sinks=True),
    _narrow("d64_window", 600, None, mask=band(130, 60)),
    _narrow("d64_window_left_softcap", 600, 520, mask=band(40, None), softcap=7.0),
    _narrow("d64_grouped_gaps", heads=(4, 1), storage="gaps", mask=CAUSAL),
    _case("head_dim_8", 390, 520, 8, mask=CAUSAL),
    _case("head_dim_40", 390, 520, 40),
    _wide("d256_dense"),
    _wide("d256_causal", 330, None, mask=CAUSAL),
    _wide("d256_causal_more_rows_sinks", 400, 193, mask=CAUSAL, sinks=True),
    _wide("d256_window_softcap", 330, None, mask=band(60, 10), softcap=4.0, heads=(4, 2)),
    _case("head_dim_192", 260, 260, 192, mask=CAUSAL),
    _case("head_dim_160_window", 330, 260, 160, mask=band(60, 20)),
    _case("head_dims_192_128", 260, 390, 192, head_dim_v=128),
    _case("head_dims_192_128_causal", 390, None, 192, head_dim_v=128, mask=CAUSAL, sinks=True),
    _case("head_dims_192_128_window", 500, None, 192, head_dim_v=128, mask=band(70, 5), heads=(4, 2)),
    _case("head_dims_200_88", 260, 200, 200, head_dim_v=88, mask=CAUSAL),
)
LENGTHS = (130, 0, 1, 300, 65, 64)


def _packed(
    name: str,
    lengths_q: tuple[int, ...] = LENGTHS,
    lengths_k: tuple[int, ...] | None = None,
    width: int = 128,
    **options,
) -> Case:
    return _case(name, lengths_q=lengths_q, lengths_k=lengths_k, width=width, **options)


PACKED = (
    _packed("packed"),
    _packed("packed_causal", mask=CAUSAL),
    _packed(
        "packed_causal_other_keys",
        (130, 0, 1, 200, 65),
        (100, 3, 150, 390, 0),
        mask=CAUSAL,
        outside=(5, 70),
        sinks=True,
    ),
    _packed("packed_window_softcap", mask=band(70, 20), softcap=5.0, heads=(4, 2), promised=True),
    _packed("packed_gaps", mask=CAUSAL, storage="gaps"),
    _packed("packed_heads_first", mask=CAUSAL, storage="heads_first", heads=(4, 1)),
    _packed("packed_d64_causal", (400, 30, 0, 193), width=64, mask=CAUSAL, outside=(3, 3)),
    _packed("packed_d64_window", (400, 30, 192, 193), width=64, mask=band(100, 0)),
    _packed("packed_d96", width=96, mask=CAUSAL),
    _packed("packed_d192", width=192, mask=CAUSAL),
    _packed("packed_d192_128", width=192, head_dim_v=128, mask=CAUSAL),
    _packed("packed_d256", width=256, mask=CAUSAL, outside=(1, 0)),
    _packed("packed_promised_outside", (20, 5), outside=(30, 140), promised=True, mask=CAUSAL),
    _packed("packed_nothing_but_empty", (0, 0, 0), (20, 0, 7), outside=(4, 5)),
)
SMALL = (  # no ring wraps, or a program has one tile: lengths around 0 and a tile
    _case("one", 1, 1),
    _case("one_row", 1, 700),
    _case("one_row_causal", 1, 700, heads=(4, 1), mask=CAUSAL),
    _case("one_key", 300, 1),
    _case("one_key_causal", 300, 1, mask=CAUSAL),
    _case("three", 3, 3, mask=CAUSAL),
    _case("below_a_tile", 63, 127),
    _case("above_a_tile", 65, 129, mask=CAUSAL),
    _narrow("d64_one_row", 1, 700, batch=3),
    _narrow("d64_odd", 193, 129, mask=CAUSAL),
    _wide("d256_one_row", 1, 300, mask=band(100, None)),
    _case("one_head", 300, 390, heads=(1, 1), mask=CAUSAL),
)
JOINED = (  # heads of a group share a tile; groups of three leave a row of each query without a head
    _case("joined_one_row", 1, 390, heads=(16, 2)),
    _case("joined_sinks_without_bound", 3, 200, heads=(4, 1), mask=CAUSAL, sinks=WITHOUT_BOUND),
    _case("joined_three_rows", 3, 260, heads=(16, 1), mask=CAUSAL, sinks=True),
    _case("joined_window", 129, 300, heads=(4, 1), mask=band(40, 5), softcap=5.0),
    _case("joined_threes", 63, 200, 96, heads=(6, 2), batch=2, storage="gaps", sinks=True),
    _case("joined_d64", 129, 300, 64, heads=(8, 2), mask=CAUSAL),
    _case("joined_d256", 63, 200, 256, heads=(4, 2), mask=CAUSAL, softcap=4.0, sinks=True),
    _case(
        "joined_packed",
        lengths_q=(3, 0, 1, 63),
        lengths_k=(140, 3, 0, 130),
        heads=(6, 2),
        mask=CAUSAL,
        outside=(3, 5),
        sinks=True,
    ),
    _case("joined_pairs_d64", 63, 300, 64, heads=(4, 2), mask=band(70, None), softcap=5.0),
    _case("joined_threes_d64", 5, 129, 64, heads=(6, 2), sinks=True),
    _case("joined_threes_wide", 61, 260, heads=(3, 1), batch=2, mask=CAUSAL),
    _case("joined_more_rows", 150, 129, heads=(8, 2), mask=CAUSAL, storage="mixed"),  # rows at the top see no key
    _case("joined_sixteen_d192_128", 33, 300, 192, head_dim_v=128, heads=(16, 1), mask=band(70, None)),
    _case("joined_d192", 5, 200, 192, heads=(8, 2), mask=band(20, 20), sinks=True),
    _case("joined_d256_128", 63, 200, 256, head_dim_v=128, heads=(8, 4), mask=CAUSAL),
    _case("joined_eight_d256", 5, 200, 256, heads=(16, 2), mask=CAUSAL),
    _case("joined_all", 3, 200, heads=(64, 1), mask=CAUSAL),
    _case("joined_all_d64", 4, 300, 64, heads=(64, 1), mask=CAUSAL, sinks=True),
    _packed(
        "joined_packed_d64_window",
        (40, 1, 0, 7),
        width=64,
        heads=(8, 2),
        mask=band(20, 20),
        outside=(2, 0),
        promised=True,
    ),
    _packed("joined_packed_d192_128", (3, 63), (90, 150), width=192, head_dim_v=128, heads=(4, 2), sinks=True),
    _packed("joined_packed_d256", (5, 0, 60), (130, 70, 200), width=256, heads=(4, 1), mask=CAUSAL),
)
FOUR = (130, 1, 64, 205)
SPANS = (  # rows of a batch entry see different spans of keys
    _case("documents", 400, None, batch=2, mask=runs(FOUR)),
    _case("documents_causal", 400, None, batch=2, mask=runs(FOUR, also=CAUSAL)),
    _case("documents_causal_gaps", 400, None, storage="gaps", mask=runs(FOUR, also=CAUSAL)),
    _case(
        "documents_window_softcap_sinks",
        400,
        None,
        heads=(4, 2),
        mask=runs((300, 100), also=band(70, 20)),
        softcap=5.0,
        sinks=True,
    ),
    _case("documents_scattered", 300, None, batch=2, mask=runs((100, 60, 90, 20, 30), (0, 1, 0, 2, 1))),
    _case(
        "documents_scattered_causal",
        300,
        None,
        batch=2,
        mask=runs((100, 60, 90, 20, 30), (0, 1, 0, 2, 1), also=CAUSAL),
        sinks=True,
    ),
    _case(
        "documents_padded_causal_sinks",
        300,
        None,
        batch=2,
        mask=runs((90, 20, 170, 20), (3, -1, 0, -1), also=CAUSAL),
        sinks=True,
    ),
    _case(
        "documents_other_keys_causal", 300, 420, mask=runs((100, 200), (0, 1), (150, 70, 200), (0, 5, 1), also=CAUSAL)
    ),
    _case(
        "documents_other_keys_window",
        300,
        420,
        mask=runs((100, 150, 50), (0, 1, 7), (150, 70, 200), (0, 5, 1), also=band(160, 40)),
    ),
    _case(
        "documents_lengths",
        300,
        None,
        batch=2,
        heads=(2, 1),
        mask=runs((200, 100), also=key_lengths(260, 90, also=CAUSAL)),
    ),
    _case(
        "documents_heads_first",
        200,
        None,
        batch=3,
        storage="heads_first",
        heads=(2, 1),
        mask=runs((130, 70), also=CAUSAL),
    ),
    _case("documents_gaps_between_entries", 200, None, batch=2, storage="gaps", mask=runs((130, 70), also=CAUSAL)),
    _case("key_lengths_mixed", 200, 300, batch=3, storage="mixed", mask=key_lengths(300, 0, 130)),
    _case("documents_one_row", 1, 390, mask=runs((1,), (4,), (200, 190), (0, 4))),
    _case("documents_d96", 300, None, 96, mask=runs((100, 200), also=CAUSAL)),
    _case("documents_d96_scattered", 300, None, 96, mask=runs((70, 130, 100), (0, 1, 0))),
    _case("documents_d192", 200, None, 192, mask=runs((70, 130), also=CAUSAL), heads=(2, 1)),
    _case("documents_d192_128", 300, None, 192, head_dim_v=128, mask=runs((200, 100))),
    _narrow("documents_d64", 400, None, batch=2, mask=runs((193, 7, 200), also=CAUSAL)),
    _narrow("documents_d64_window_scattered", 400, None, mask=runs((150, 100, 150), (0, 1, 0), also=band(100, 0))),
    _wide("documents_d256", 260, None, mask=runs((130, 130), also=CAUSAL)),
    _wide("documents_d256_scattered", 200, None, mask=runs((50, 100, 50), (0, 1, 0))),
    _case("key_lengths", 200, 390, batch=3, mask=key_lengths(390, 0, 130)),
    _case("key_lengths_causal", 300, 390, batch=3, heads=(2, 1), mask=key_lengths(65, 390, 257, also=CAUSAL)),
    _case("key_lengths_window_sinks", 300, None, batch=2, mask=key_lengths(129, 300, also=band(70, 10)), sinks=True),
    _narrow("key_lengths_d64_softcap", 300, None, batch=2, mask=key_lengths(1, 300, also=CAUSAL), softcap=4.0),
    _wide("key_lengths_d256", 200, batch=2, mask=key_lengths(200, 63)),
    _case("prefix", 300, 390, batch=3, heads=(2, 1), mask=prefix(130, 0, 390)),
    _case("prefix_right_bound", 400, None, mask=prefix(200, also=band(None, 90))),
    _case(
        "prefix_left_bound_lengths_sinks",
        400,
        None,
        batch=2,
        mask=prefix(150, 70, also=key_lengths(300, 140, also=band(180, None))),
        sinks=True,
    ),
    _case("prefix_more_rows", 520, 385, mask=prefix(65)),
    _case("prefix_documents", 400, None, batch=2, mask=runs(FOUR, also=prefix(180, 20))),
    _case("prefix_documents_scattered", 300, None, 96, mask=runs((100, 60, 90, 50), (0, 1, 0, 1), also=prefix(200))),
    _narrow("prefix_d64_softcap", 400, None, batch=2, mask=prefix(100, 333), softcap=4.0),
    _wide("prefix_d256", 200, batch=2, mask=prefix(50, 130)),
    _case("joined_prefix", 40, 300, batch=2, heads=(8, 2), mask=prefix(280, 10)),
    _case("joined_documents", 63, 300, heads=(8, 2), mask=runs((20, 43), (), (100, 200), also=CAUSAL), sinks=True),
    _case("joined_key_lengths_d64", 5, 300, 64, batch=3, heads=(6, 2), mask=key_lengths(300, 77, 0)),
)
CASES = {case.name: case for case in (*LARGE, *PACKED, *SMALL, *JOINED, *SPANS)}


def _traits(case: Case) -> hopper.ForwardTraits:
    problem = Problem.from_call(case.build("cpu", torch.bfloat16))
    return hopper.FORWARD.config(problem, H200).traits
