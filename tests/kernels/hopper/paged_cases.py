"""Packed queries over a cache that the Hopper decode runs: few tokens in each sequence."""

from __future__ import annotations

from dataclasses import replace

from strobe.testing.paged import PAGED, PagedCase


def _few(name: str, *news: int, **changes) -> PagedCase:
    """A named case with few tokens."""
    return replace(PAGED[name], news=news, tokens=max(1, *news), **changes)


CASES = {
    "one token": PAGED["one_token"],
    "speculated": PAGED["speculated"],
    "up to 16": _few("mixed", 16, 1, 0, 3, heads=(16, 2), padding=3),
    "no tokens": _few("no_tokens", 0, 0),
    "more tokens than keys": _few("more_tokens_than_keys", 7, 3, 9),
    "full": _few("full", 5, 9),
    "window": _few("window", 9, 2, 1),
    "window of both sides": _few("window_both", 9, 2, 5),
    "window softcap sinks": _few("window_softcap_sinks", 4, 7, 1),
    "sinks": _few("sinks_without_bound", 9, 1, 2),
    "pages of 1": _few("pages_of_1", 9, 3, 0),
    "pages of 13": _few("pages_of_13", 2, 6, 1),
    "pages lost": _few("pages_lost", 3, 9, 2),
    "scale negative": _few("scale_negative", 5, 1),
    "partial": _few("partial", 8, 2, 1),
    "64 rows, window": _few("window", 16, 2, 1, heads=(8, 2)),
    "64 rows, window of both sides, softcap, sinks": _few(
        "window_softcap_sinks", 12, 7, 16, heads=(8, 2), right=3, head_dim=128
    ),
    "64 rows, pages lost": _few("pages_lost", 3, 16, 2, heads=(8, 2)),
    "64 rows, left padded": _few("rows_left_padded_window", 16, 3, heads=(4, 1)),
    "rows left padded": _few("rows_left_padded", 9, 2, 3),
    "rows left padded, window": _few("rows_left_padded_window", 7, 3),
    "8 bits": _few("fp8", 5, 1),
    "8 bits, window": _few("fp8", 5, 1, left=20, page_size=4),
}
