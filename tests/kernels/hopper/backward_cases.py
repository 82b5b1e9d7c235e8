"""Cases of the Hopper backward and the compile-time constants that each one compiles with."""

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
from strobe.problem.target import Target
from strobe.testing import Case

BACKWARD = ["rows_kernel", "backward_kernel", "convert_dq_kernel"]
BACKWARD_OF_SPLIT_GROUPS = [*BACKWARD, "convert_kernel", "convert_kernel"]


def _case(name: str, seqlen_q: int = 200, seqlen_k: int | None = 260, width: int = 128, **options) -> Case:
    return Case(name, seqlen_q, seqlen_k, **{"head_dim": width, "batch": 1, "heads": (1, 1)} | options)


def _narrow(name: str, seqlen_q: int = 300, seqlen_k: int | None = 260, **options) -> Case:
    return _case(name, seqlen_q, seqlen_k, 64, **options)


def _wide(name: str, seqlen_q: int = 150, seqlen_k: int | None = 130, **options) -> Case:
    return _case(name, seqlen_q, seqlen_k, 256, **options)


LARGE = (
    _case("dense", heads=(2, 2)),
    _case("whole_tiles", 256, 256),
    _case("causal", 300, None, mask=CAUSAL),
    _case("causal_more_keys", 210, 330, mask=CAUSAL),
    _case("causal_more_rows", 390, 200, mask=CAUSAL),  # rows of the first tiles see no key
    _case("causal_more_rows_sinks", 390, 200, mask=CAUSAL, sinks=True),
    _case("window_left", 260, 300, mask=band(70, None)),
    _case("window_right", 260, 300, mask=band(None, 70)),
    _case("window_both", 300, None, mask=band(100, 20)),
    _case("window_zero", 300, None, mask=band(0, 0)),
    _case("window_wider_than_all", mask=band(5000, 5000)),
    _case("window_before_the_keys", 390, 260, mask=band(10, 10)),  # rows at the top see no key
    _case(
        "window_beyond_the_keys", 130, 700, mask=band(60, 0)
    ),  # no row sees the first tiles of keys, which follow each other
    _case("softcap", mask=CAUSAL, softcap=3.0),
    _case("sinks", sinks=True),
    _case("sinks_without_bound", 200, 130, heads=(4, 2), mask=CAUSAL, sinks=WITHOUT_BOUND),
    _case("softcap_sinks_window", 300, None, mask=band(100, 0), softcap=5.0, sinks=True),
    _case("grouped", 150, 260, heads=(4, 2), mask=CAUSAL),
    _case("one_key_head", 150, 200, heads=(3, 1)),
    _case("batch_of_three", 150, 200, batch=3, heads=(2, 1)),
    _case("scale", scale=0.3),
    _case("stored_heads_first", heads=(2, 1), storage="heads_first", mask=CAUSAL),
    _case("stored_gaps", heads=(2, 1), storage="gaps"),
    _case("stored_mixed", heads=(2, 1), storage="mixed", mask=CAUSAL),
    _case("head_dim_96", width=96, mask=CAUSAL),
    _case("head_dims_72_120", width=72, head_dim_v=120),
    _narrow("d64_dense"),
    _narrow("d64_causal", 390, None, mask=CAUSAL),
    _narrow("d64_causal_more_rows_sinks", 500, 193, mask=CAUSAL, sinks=True),
    _narrow("d64_window", 390, None, mask=band(130, 60)),
    _narrow("d64_window_left_softcap", 390, 330, mask=band(40, None), softcap=7.0),
    _narrow("d64_grouped_gaps", heads=(4, 1), storage="gaps", mask=CAUSAL),
    _case("head_dim_8", 300, 260, 8, mask=CAUSAL),
    _case("head_dim_40", 300, 260, 40),
    _wide("d256_dense"),
    _wide("d256_causal", 200, None, mask=CAUSAL),
    _wide("d256_causal_more_rows_sinks", 260, 100, mask=CAUSAL, sinks=True),
    _wide("d256_window_softcap", 200, None, mask=band(60, 10), softcap=4.0, heads=(2, 1)),
    _case("head_dim_192", 230, 130, 192, mask=CAUSAL),
    _case("head_dims_192_128", 200, 130, 192, head_dim_v=128),
    _case(
        "head_dims_64_128", 200, 130, 64, head_dim_v=128, heads=(2, 2)
    ),  # q is as wide as a unit of dq, of which it has more
    _case("head_dims_64_192", 200, 130, 64, head_dim_v=192, heads=(2, 2)),
    _case("head_dims_32_96", 200, 130, 32, head_dim_v=96, heads=(2, 2)),
    _case("head_dim_32_softcap", 200, 260, 32, heads=(2, 2), softcap=3.0),
    _case("head_dims_200_128", 230, 130, 200, head_dim_v=128, mask=CAUSAL),
    _case("head_dims_192_128_causal", 200, None, 192, head_dim_v=128, mask=CAUSAL, sinks=True),
    _case("head_dims_192_128_window", 200, None, 192, head_dim_v=128, mask=band(70, 5), heads=(2, 1)),
    _case("head_dims_160_96_causal", 330, 520, 160, head_dim_v=96, mask=CAUSAL),  # five tiles of keys of two programs
    _case("head_dims_136_72_left_softcap", 260, 190, 136, head_dim_v=72, mask=band(90, None), softcap=4.0),
)
LENGTHS = (130, 0, 1, 260, 65, 64)


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
        (100, 3, 150, 230, 0),
        mask=CAUSAL,
        outside=(5, 70),
        sinks=True,
    ),
    _packed("packed_window_softcap", mask=band(70, 20), softcap=5.0, heads=(2, 1), promised=True),
    _packed("packed_gaps", mask=CAUSAL, storage="gaps", heads=(2, 2)),
    _packed("packed_heads_first", mask=CAUSAL, storage="heads_first", heads=(4, 1)),
    _packed("packed_d64_causal", (300, 30, 0, 193), width=64, mask=CAUSAL, outside=(3, 3)),
    _packed("packed_d64_window", (300, 30, 192, 193), width=64, mask=band(100, 0)),
    _packed("packed_d96", width=96, mask=CAUSAL),
    _packed("packed_d192_128", width=192, head_dim_v=128, mask=CAUSAL),
    _packed("packed_d256", width=256, mask=CAUSAL, outside=(1, 0)),
    _packed("packed_promised_outside", (20, 5), outside=(30, 140), promised=True, mask=CAUSAL),
    _packed("packed_nothing_but_empty", (0, 0, 0), (20, 0, 7), outside=(4, 5)),
)
SMALL = (  # no ring wraps: lengths around 0 and a tile
    _case("one", 1, 1),
    _case("one_row", 1, 300),
    _case("one_row_causal", 1, 300, heads=(4, 1), mask=CAUSAL),
    _case("one_key", 130, 1),
    _case("one_key_causal", 130, 1, mask=CAUSAL),
    _case("three", 3, 3, mask=CAUSAL),
    _case("below_a_tile", 63, 127),
    _case("above_a_tile", 65, 129, mask=CAUSAL),
    _narrow("d64_one_row", 1, 300, batch=3),
    _wide("d256_one_row", 1, 200, mask=band(100, None)),
)
FOUR = (130, 1, 64, 105)
SPANS = (  # rows of a batch entry see different spans of keys
    _case("documents", 300, None, batch=2, mask=runs(FOUR)),
    _case("documents_causal", 300, None, batch=2, mask=runs(FOUR, also=CAUSAL)),
    _case("documents_causal_gaps", 300, None, batch=2, storage="gaps", mask=runs(FOUR, also=CAUSAL)),
    _case(
        "documents_window_softcap_sinks",
        300,
        None,
        heads=(2, 1),
        mask=runs((200, 100), also=band(70, 20)),
        softcap=5.0,
        sinks=True,
    ),
    _case("documents_scattered", 230, None, batch=2, mask=runs((100, 40, 50, 10, 30), (0, 1, 0, 2, 1))),
    _case(
        "documents_scattered_causal",
        230,
        None,
        batch=2,
        mask=runs((100, 40, 50, 10, 30), (0, 1, 0, 2, 1), also=CAUSAL),
        sinks=True,
    ),
    _case("documents_padded_causal", 220, None, batch=2, mask=runs((90, 20, 90, 20), (3, -1, 0, -1), also=CAUSAL)),
    _case(
        "documents_other_keys_causal", 200, 300, mask=runs((60, 140), (0, 1), (150, 50, 100), (0, 5, 1), also=CAUSAL)
    ),
    _case(
        "documents_other_keys_window",
        200,
        300,
        mask=runs((80, 70, 50), (0, 1, 7), (150, 50, 100), (0, 5, 1), also=band(160, 40)),
    ),
    _case(
        "documents_lengths",
        230,
        None,
        batch=2,
        heads=(2, 1),
        mask=runs((140, 90), also=key_lengths(200, 70, also=CAUSAL)),
    ),
    _case(
        "documents_heads_first",
        150,
        None,
        batch=3,
        storage="heads_first",
        heads=(2, 1),
        mask=runs((90, 60), also=CAUSAL),
    ),
    _case("documents_one_row", 1, 200, mask=runs((1,), (4,), (120, 80), (0, 4))),
    _case("documents_of_one_row", 40, None, heads=(1, 1), mask=runs((1,) * 40)),
    _case("documents_d96", 200, None, 96, mask=runs((70, 130), also=CAUSAL)),
    _case("documents_d192", 150, None, 192, mask=runs((50, 100), also=CAUSAL), heads=(2, 1)),
    _case("documents_d192_128", 150, None, 192, head_dim_v=128, mask=runs((100, 50))),
    _narrow("documents_d64", 300, None, batch=2, mask=runs((193, 7, 100), also=CAUSAL)),
    _narrow("documents_d64_window_scattered", 300, None, mask=runs((150, 50, 100), (0, 1, 0), also=band(100, 0))),
    _wide("documents_d256", 150, None, mask=runs((70, 80), also=CAUSAL)),
    _wide("documents_d256_scattered", 130, None, mask=runs((50, 30, 50), (0, 1, 0))),
    _case("key_lengths", 150, 260, batch=3, mask=key_lengths(260, 0, 130)),
    _case("key_lengths_causal", 200, 260, batch=3, heads=(2, 1), mask=key_lengths(65, 260, 257, also=CAUSAL)),
    _case("key_lengths_window_sinks", 200, None, batch=2, mask=key_lengths(129, 200, also=band(70, 10)), sinks=True),
    _narrow("key_lengths_d64_softcap", 200, None, batch=2, mask=key_lengths(1, 200, also=CAUSAL), softcap=4.0),
    _wide("key_lengths_d256", 100, batch=2, mask=key_lengths(130, 63)),
    _case("prefix", 200, 260, batch=3, heads=(2, 1), mask=prefix(130, 0, 260)),
    _case("prefix_right_bound", 300, None, mask=prefix(150, also=band(None, 70))),
    _case(
        "prefix_left_bound_lengths_sinks",
        260,
        None,
        batch=2,
        mask=prefix(150, 70, also=key_lengths(200, 140, also=band(130, None))),
        sinks=True,
    ),
    _case("prefix_more_rows", 300, 200, mask=prefix(65)),
    _case("prefix_documents", 300, None, batch=2, mask=runs(FOUR, also=prefix(180, 20))),
    _narrow("prefix_d64_softcap", 260, None, batch=2, mask=prefix(100, 200), softcap=4.0),
    _wide("prefix_d256", 130, None, mask=prefix(50)),
)
CASES = {case.name: case for case in (*LARGE, *PACKED, *SMALL, *SPANS)}


def _traits(case: Case, target: Target = H200) -> hopper.BackwardTraits:
    return hopper.BACKWARD.config(Problem.from_call(case.build("cpu", torch.bfloat16)), target).traits
