"""Packed queries over a cache that the Hopper forward runs: each way to address keys, each width, each kind of mask."""

from __future__ import annotations

from dataclasses import replace

from strobe.testing.paged import PAGED, PagedCase


def _case(name: str, **changes) -> PagedCase:
    return replace(PAGED[name], **changes)


CASES = {
    "mixed": PAGED["mixed"],
    "promised": PAGED["mixed_promised"],
    "prefill": PAGED["prefill"],
    "more tokens than keys": PAGED["more_tokens_than_keys"],
    "full": _case("full", news=(17, 9), lengths=(70, 9)),
    "window": PAGED["window"],
    "window of both sides": _case("window_both", page_size=8),
    "window softcap sinks": PAGED["window_softcap_sinks"],
    "window, pages of 256": _case("window", page_size=256, lengths=(600, 500), news=(18, 90)),
    "sinks without bound": _case("sinks_without_bound", news=(90, 1, 2)),
    "pages of 32": _case("mixed", page_size=32, heads=(8, 1)),
    "pages of 64, heads first": PAGED["pages_of_64_heads_first"],
    "pages of 128": _case("mixed", page_size=128, head_dim=64, head_dim_v=64),
    "pages of 256": _case("mixed", page_size=256),
    "pages lost": PAGED["pages_lost"],
    "pages lost first": _case("pages_lost", lengths=(200, 70, 20), lost=(*((0, n, -1) for n in range(8)), (1, 0, -1))),
    "all pages lost": _case("pages_lost", lengths=(20, 33), news=(18, 33), lost=((0, 0, -1), (0, 1, 9999))),
    "group of 3": PAGED["group_3"],
    "one sequence": _case("prefill", lengths=(130,), news=(60,)),
    "37 sequences": _case("mixed", lengths=(*(1, 40, 18) * 12, 90), news=(*(1, 3, 17) * 12, 20), room=0, heads=(2, 2)),
    "rows": PAGED["rows"],
    "rows left padded, window": PAGED["rows_left_padded_window"],
    "rows with gaps": _case("rows_gaps", news=(40, 2), storage="gaps"),
    "d96": _case("mixed", head_dim=96),
    "d128": _case("mixed", head_dim=128, lengths=(300, 70), news=(100, 1)),
    "d192/128": _case("prefill", head_dim=192, head_dim_v=128),
    "d256": _case("prefill", head_dim=256, lengths=(70,), news=(40,)),
}

# 8-bit keys, which the producer converts
FP8_CASES = {
    "mixed": _case("mixed", fp8=True),
    "pages of 1": _case("pages_of_1", fp8=True, news=(30, 3, 0)),
    "pages of 13, window": _case("pages_of_13", fp8=True, news=(60, 26, 1), left=40),
    "pages of 24": _case("pages_of_13", fp8=True, page_size=24, news=(60, 26, 1)),
    "pages of 64, heads first": _case("pages_of_64_heads_first", fp8=True, news=(30, 20)),
    "pages of 256, window": _case("window", fp8=True, page_size=256, lengths=(600, 500), news=(18, 90)),
    "rows of no sequence": _case("prefill", fp8=True, lengths=(70,), news=(40,)),
    "softcap sinks": _case("window_softcap_sinks", fp8=True),
    "pages lost": _case("pages_lost", fp8=True),
    "pages of 1 lost": _case(
        "pages_lost",
        fp8=True,
        page_size=1,
        padding=5,
        lost=((0, 2, -1), (0, 66, 2**31 - 1), (1, 33, -(2**31)), (2, 0, -1)),
    ),
    "37 sequences": _case(
        "mixed", fp8=True, lengths=(*(1, 40, 18) * 12, 90), news=(*(1, 3, 17) * 12, 20), room=0, heads=(2, 2)
    ),
    "rows left padded, window": _case("rows_left_padded_window", fp8=True),
    "group of 3": _case("group_3", fp8=True),
    "d32": PAGED["fp8"],
    "d80": _case("mixed", fp8=True, head_dim=80),
    "d96": _case("mixed", fp8=True, head_dim=96),
    "d128": _case("mixed", fp8=True, head_dim=128, lengths=(300, 70), news=(100, 1)),
    # tiles of 192 queries, whose first 64 skip two blocks
    "d128, heads alone": _case("mixed", fp8=True, head_dim=128, heads=(1, 1), lengths=(450, 70), news=(200, 1)),
    "d192/128": _case("prefill", fp8=True, head_dim=192, head_dim_v=128),
    "d256": _case("prefill", fp8=True, head_dim=256, lengths=(70,), news=(40,)),
}

# 8-bit keys, which are copied in q's dtype
COPY_CASES = {
    **{name: case for name, case in FP8_CASES.items() if case.page_size in (0, 8, 16, 32) or case.page_size % 64 == 0},
    "window, pages lost": replace(
        FP8_CASES["pages of 256, window"], page_size=16, left=40, lost=((0, 35, -1), (1, 0, -1), (1, 25, 2**31 - 1))
    ),
    "rows left padded": replace(FP8_CASES["rows left padded, window"], left=-1),
}
