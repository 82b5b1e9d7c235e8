"""Cases of the Blackwell backward with a pair of CTAs, and the scenes whose synchronisations are taken away."""

from __future__ import annotations

from torch import Tensor

from strobe.testing import Case
from tests.kernels.blackwell.blackwell_scenes import run_backward
from tests.kernels.hopper.hopper_cases import CAUSAL, band, key_lengths, prefix, runs

PAIR = "blackwell.backward_pair"


def case(name: str, seqlen_q: int = 64, seqlen_k: int | None = None, width: int = 128, **options) -> Case:
    return Case(name, seqlen_q, seqlen_k, **{"head_dim": width, "batch": 1, "heads": (1, 1)} | options)


ON_EACH_COMMIT = (
    case("causal", 300, 330, mask=CAUSAL),
    case("window_of_a_group", 300, 200, mask=band(100, 20), heads=(2, 1)),
    case("keys_that_no_query_sees", 130, 600, mask=band(60, 0)),
    case("softcap_window", 200, 300, mask=band(70, 20), softcap=3.0),
    case("head_dims_104_120", 150, 290, 104, head_dim_v=120),
    case("packed_causal", lengths_q=(150, 20, 0, 200), lengths_k=(300, 20, 10, 270), mask=CAUSAL),
)
NIGHTLY = (
    case("dense", 300, 260, heads=(2, 2)),
    case("whole_tiles", 256, 512),
    case("more_rows_sinks", 300, 150, mask=CAUSAL, sinks=True),  # rows of the first tile see no key
    case("group_of_four", 300, 300, mask=CAUSAL, heads=(8, 2)),
    case("window_left", 300, 260, mask=band(70, None), storage="mixed"),
    case("window_right", 300, 260, mask=band(None, 70)),
    case("window_before_the_keys", 390, 200, mask=band(10, 10)),
    case("batch_of_three", 150, 130, batch=3, heads=(2, 1), storage="gaps"),
    case("scale", 150, 130, scale=0.3),
    case("one_row", 1, 300),
    case("one_key_of_the_second", 300, 129, mask=CAUSAL),  # CTA; with 128 keys the kernel of one CTA runs
    case("softcap_sinks", 300, 260, softcap=5.0, sinks=True, heads=(2, 1)),
    case("packed_group", lengths_q=(130, 257), lengths_k=(140, 260), heads=(4, 2), outside=(3, 2)),
)

# of 240 queries: rows of three documents in each of two tiles; keys of the third lie in two runs
DOCUMENTS = runs((60, 100, 80), (0, 1, 2), (40, 90, 60, 110), (2, 0, 1, 2))
RANGES_ON_EACH_COMMIT = (
    case("documents", 240, 300, mask=DOCUMENTS),
    case("prefix_and_lengths", 200, 300, mask=prefix(150, also=key_lengths(260))),
    case("documents_d192_128", 240, 300, 192, head_dim_v=128, mask=DOCUMENTS),
)
RANGES_NIGHTLY = (
    case("documents_causal_group", 300, mask=runs((130, 40, 130), also=CAUSAL), heads=(2, 1)),
    case("documents_scattered", 240, 560, mask=runs((90, 60, 90), (0, 1, 0), (250, 60, 250), (0, 1, 0), also=CAUSAL)),
    case("documents_none_sees", 128, 700, mask=runs((128,), (1,), (300, 90, 310), (0, 1, 2))),
    case("key_lengths", 150, 600, batch=3, mask=key_lengths(600, 0, 257), heads=(2, 1)),
    case("prefix_window_softcap", 260, 300, mask=prefix(100, also=band(60, 0)), softcap=3.0),
)
SERIAL_ON_EACH_COMMIT = (case("causal_d192_128", 300, 330, 192, head_dim_v=128, mask=CAUSAL),)
SERIAL_NIGHTLY = (
    case("group_d192_128", 300, 260, 192, head_dim_v=128, heads=(2, 1)),
    case("window_d136_104", 200, 600, 136, head_dim_v=104, mask=band(60, 0), softcap=4.0),
    case("packed_d192_128", width=192, head_dim_v=128, lengths_q=(130, 0, 257), lengths_k=(140, 5, 300), mask=CAUSAL),
)
# 64 keys of each CTA
HALF_TILES_ON_EACH_COMMIT = (
    case("causal_group_d256", 200, 210, 256, mask=CAUSAL, heads=(2, 1)),
    case("documents_d256", 140, 200, 256, mask=runs((60, 50, 30), (0, 1, 2), (40, 60, 20, 80), (2, 0, 1, 2))),
)
HALF_TILES_NIGHTLY = (
    case("one_key_d256", 130, 1, 256, mask=CAUSAL),
    case("whole_tiles_d256", 256, 256, 256),
    case("keys_that_no_query_sees_d256", 130, 600, 256, mask=band(60, 0)),
    case("softcap_window_d136_d200", 200, 300, 136, head_dim_v=200, mask=band(70, 20), softcap=3.0),
    case("sinks_d192_d192", 300, 150, 192, mask=CAUSAL, sinks=True, heads=(2, 2)),
    case("packed_d256", width=256, lengths_q=(130, 0, 257), lengths_k=(140, 5, 300), mask=CAUSAL, heads=(2, 1)),
    case("prefix_and_lengths_d256", 200, 300, 256, mask=prefix(150, also=key_lengths(260))),
    case("documents_none_sees_d256", 128, 420, 256, mask=runs((128,), (1,), (150, 90, 180), (0, 1, 2))),
)
ON_EACH_COMMIT = (*ON_EACH_COMMIT, *RANGES_ON_EACH_COMMIT, *SERIAL_ON_EACH_COMMIT, *HALF_TILES_ON_EACH_COMMIT)
NIGHTLY = (*NIGHTLY, *RANGES_NIGHTLY, *SERIAL_NIGHTLY, *HALF_TILES_NIGHTLY)
CASES = {one.name: one for one in (*ON_EACH_COMMIT, *NIGHTLY)}

# deterministic: dq is added in order
ORDERED_ON_EACH_COMMIT = (CASES["causal"],)
ORDERED_NIGHTLY = (
    case("three_tiles_of_keys", 100, 600),  # of a float sum, the order of three matters
    case("group_causal", 300, 530, mask=CAUSAL, heads=(4, 2)),
    case("more_rows_sinks", 410, 300, mask=CAUSAL, heads=(2, 2), sinks=True),
    case("keys_that_no_query_sees", 130, 600, mask=band(60, 0)),
    case("window_left_softcap", 260, 600, mask=band(70, None), softcap=4.0),
    CASES["packed_causal"],
    CASES["group_d192_128"],
    CASES["causal_d192_128"],
    CASES["causal_group_d256"],
)
ORDERED = {one.name: one for one in (*ORDERED_ON_EACH_COMMIT, *ORDERED_NIGHTLY)}


def pair_of_a_group() -> tuple[Tensor, ...]:
    """Two heads of a group with two tiles of queries each: four steps, for two stages of LSE and delta and one of every
    other tile. The keys end within the second CTA's tile.
    """
    return run_backward(case("scene", 200, 200, heads=(2, 1)), kernel=PAIR)


def pair_unseen() -> tuple[Tensor, ...]:
    """The first work tile's keys are seen by no query, the second one's by all."""
    return run_backward(case("scene", 100, 500, mask=band(60, 0)), kernel=PAIR)


def pair_documents() -> tuple[Tensor, ...]:
    """Documents in runs of keys: three work tiles of a program, and both tiles of queries with rows of others."""
    return run_backward(case("scene", 240, 250, mask=runs((60, 100, 80), (0, 1, 2), (60, 100, 90), (0, 5, 2))), PAIR)


def pair_d192_128() -> tuple[Tensor, ...]:
    """Products one after the other, Q's rows and columns in one buffer, four steps."""
    return run_backward(case("scene", 200, 200, 192, head_dim_v=128, heads=(2, 1)), PAIR)


def pair_d256() -> tuple[Tensor, ...]:
    """64 keys of each CTA, rows and columns of Q and of dO in one buffer each, P and dS in shared memory."""
    return run_backward(case("scene", 200, 100, 256, heads=(2, 1)), PAIR)


def pair_ordered() -> tuple[Tensor, ...]:
    """Two tiles of keys that add to dq in order."""
    return run_backward(case("scene", 100, 400), PAIR, deterministic=True)
