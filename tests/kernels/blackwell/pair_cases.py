"""Cases of the Blackwell backward with a pair of CTAs, and the scenes whose synchronisations are taken away."""

from __future__ import annotations

from torch import Tensor

from strobe.testing import Case
from tests.kernels.blackwell.blackwell_scenes import run_backward
from tests.kernels.hopper.hopper_cases import CAUSAL, band

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
    case("one_key", 300, 1, mask=CAUSAL),
    case("softcap_sinks", 300, 260, softcap=5.0, sinks=True, heads=(2, 1)),
    case("packed_group", lengths_q=(130, 257), lengths_k=(140, 260), heads=(4, 2), outside=(3, 2)),
)
CASES = {one.name: one for one in (*ON_EACH_COMMIT, *NIGHTLY)}


def pair_of_a_group() -> tuple[Tensor, ...]:
    """Two heads of a group with two tiles of queries each: four steps, for two stages of LSE and delta and one of every
    other tile. The keys end within the second CTA's tile.
    """
    return run_backward(case("scene", 200, 200, heads=(2, 1)), kernel=PAIR)


def pair_unseen() -> tuple[Tensor, ...]:
    """The first work tile's keys are seen by no query, the second one's by all."""
    return run_backward(case("scene", 100, 500, mask=band(60, 0)), kernel=PAIR)
