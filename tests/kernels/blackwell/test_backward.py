"""The Blackwell backward's own source, through its own launch code, on the simulator, held against the oracle.

Its lse comes from the Blackwell forward. The rings of Q (two stages) and of every pipeline of one stage wrap.
"""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from tests.kernels.blackwell.blackwell_scenes import B200, backward_documents
from tests.kernels.blackwell.test_backward_sequences import SEQUENCES
from tests.kernels.hopper.hopper_cases import CAUSAL, DTYPES, SCHEDULES, band

pytest.importorskip("triton")

from strobe import reference
from strobe.kernels.blackwell import backward
from strobe.kernels.blackwell import kernel as blackwell
from strobe.kernels.blackwell.launch_backward import section
from strobe.kernels.blackwell.traits import TENSOR_COLUMNS
from strobe.ops import attention as ops
from strobe.problem.problem import Problem
from strobe.problem.target import FAKES
from strobe.selection.select import select
from strobe.sim.machine import Machine
from strobe.sim.semantics import Gluon
from strobe.testing import FAMILIES, Case
from tools.proof.simulate import on

BACKWARD = ["preprocess_kernel", "backward_kernel", "postprocess_kernel"]


def _case(name: str, seqlen_q: int = 200, seqlen_k: int | None = 150, width: int = 64, **options) -> Case:
    return Case(name, seqlen_q, seqlen_k, **{"head_dim": width, "batch": 1, "heads": (1, 1)} | options)


ON_EACH_COMMIT = (
    _case("causal_d128", 200, 150, 128, mask=CAUSAL),
    _case("window_of_a_group", 260, 150, mask=band(100, 20), heads=(2, 1)),
    _case("keys_that_no_query_sees", 130, 260, mask=band(60, 0)),
    _case("softcap_window", 200, 150, mask=band(70, 20), softcap=3.0),
    _case("d96_group", 150, 130, 96, heads=(2, 1)),
    _case("d192_128_causal", 300, 150, 192, head_dim_v=128, mask=CAUSAL),
)
NIGHTLY = (
    _case("more_rows_sinks", 300, 150, mask=CAUSAL, sinks=True),  # rows of the first tile see no key
    _case("dense_d128", 300, 260, 128, heads=(2, 2)),
    _case("whole_tiles_d128", 256, 256, 128),
    _case("causal_group_of_four_d128", 300, 300, 128, mask=CAUSAL, heads=(8, 2)),
    _case("causal_more_keys", 210, 330, mask=CAUSAL),
    _case("window_left", 300, 260, mask=band(70, None), storage="mixed"),
    _case("window_right", 300, 260, mask=band(None, 70)),
    _case("window_before_the_keys", 390, 200, mask=band(10, 10)),
    _case("batch_of_three", 150, 130, batch=3, heads=(2, 1), storage="gaps"),
    _case("scale", 150, 130, scale=0.3),
    _case("head_dims_72_120", 150, 130, 72, head_dim_v=120),
    _case("head_dims_128_64", 150, 130, 128, head_dim_v=64),
    _case("head_dims_64_32", 150, 130, 64, head_dim_v=32),
    _case("head_dim_8", 150, 130, 8, mask=CAUSAL),
    _case("one_row", 1, 300),
    _case("one_key", 300, 1, mask=CAUSAL),
    _case("softcap_d128_sinks", 300, 260, 128, softcap=5.0, sinks=True, heads=(2, 1)),
    _case("d192_128_group_left_softcap", 260, 190, 136, head_dim_v=72, mask=band(90, None), softcap=4.0, heads=(2, 1)),
    _case("d192_128_whole_tiles", 256, 256, 192, head_dim_v=128),
    _case("head_dims_72_88", 150, 130, 72, head_dim_v=88),
)
CASES = {case.name: case for case in (*ON_EACH_COMMIT, *NIGHTLY)}


def run_and_judge(judge, case: Case, dtype: torch.dtype, family: str, schedule: tuple[str, int]) -> None:
    call = case.build("cpu", dtype, family, seed=5, requires_grad=True, kernel="blackwell.backward")
    with on(B200, *schedule) as run:
        judge(call, family, 5)
    assert run.reports == [] and run.launches == ["forward_kernel"] * 2 + BACKWARD


@pytest.mark.parametrize("name", [case.name for case in ON_EACH_COMMIT])
def test_blackwell_backward(name, judge):
    """Schedules, dtypes and input families take turns."""
    n = list(CASES).index(name)
    run_and_judge(judge, CASES[name], DTYPES[n % 2], FAMILIES[n % len(FAMILIES)], SCHEDULES[n % len(SCHEDULES)])


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CASES)
def test_blackwell_backward_with_every_input(name, family, judge):
    """Two of the schedules and one dtype, in turn: over its families a case meets all."""
    n, at = list(CASES).index(name), FAMILIES.index(family)
    for turn in (2 * at, 2 * at + 1):
        run_and_judge(judge, CASES[name], DTYPES[(n + at) % 2], family, SCHEDULES[(n + turn) % len(SCHEDULES)])


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ("pct", "random"))
def test_a_hundred_seeds(mode, judge):
    for seed in range(50):
        run_and_judge(judge, CASES["causal_d128"], torch.bfloat16, "normal", (mode, seed))


@pytest.mark.parametrize("layout", ("rows", "expanded"))
def test_gradients_of_lse_and_any_strides_of_dout(layout):
    """An expanded dout, whose strides TMA cannot address, is copied."""
    call = _case("dlse", 130, 100, heads=(2, 1)).build("cpu", torch.bfloat16)._replace(needs_grad=True)
    out, lse = reference.forward(call)
    generator = torch.Generator().manual_seed(3)
    dlse = torch.randn(lse.shape, generator=generator)
    dout = torch.randn(out.shape, generator=generator).to(torch.bfloat16)
    if layout == "expanded":
        dout = dout[..., :1].expand(out.shape)
    given = (dout, out.to(torch.bfloat16), lse.float(), dlse)
    expected = ops.BACKWARD(*given, *call._replace(kernel="cpu").arguments)
    with on(B200) as run:
        found = ops.BACKWARD(*given, *call._replace(kernel="blackwell.backward").arguments)
    assert run.reports == [] and run.launches == BACKWARD
    for gradient, wanted in zip(found[:3], expected[:3]):
        torch.testing.assert_close(gradient.float(), wanted.float(), atol=3e-2, rtol=3e-2)


# ---------------------------------------------------------------- barriers


def _table() -> dict[str, int]:
    """{barrier: arrivals} of the table at the top of backward.py."""
    lines = (backward.__doc__ or "").split("Barriers  ")[1].split("\n\n")[0].splitlines()[1:]
    found = [re.match(r"    (\w+)(?:\[\w\])? +(\d)", line) for line in lines]
    return {match[1]: int(match[2]) for match in found if match}


def test_the_table_names_each_barrier_and_its_arrivals():
    counts: dict[int, int] = {}
    made: dict[str, set[int]] = {}
    init, specialize = Machine.init_barrier, Gluon.warp_specialize

    def noted_init(self, address, name, count):
        counts[address] = count
        init(self, address, name, count)

    def noted(self, functions_and_args, *rest):
        if functions_and_args[0][0].fn.__name__ == "reduce":
            arguments = dict(zip(functions_and_args[0][0].arg_names, functions_and_args[0][1]))
            seen = set()
            for pipe, fields in vars(arguments["pipes"]).items():
                for field in ("full", "empty", ""):
                    barriers = getattr(fields, field, None) if field else fields
                    if getattr(barriers, "handle", None) is not None:
                        first = barriers.handle.address
                        slots = [first + 8 * i for i in range(barriers.shape[0])]
                        made.setdefault(f"{pipe}_{field}".rstrip("_"), set()).update(counts[slot] for slot in slots)
                        seen.update(slots)
            assert seen == set(counts), "a barrier that no pipeline holds"
        counts.clear()
        return specialize(self, functions_and_args, *rest)

    with patch.object(Machine, "init_barrier", noted_init), patch.object(Gluon, "warp_specialize", noted), on(B200):
        backward_documents()
    assert made == {name: {count} for name, count in _table().items()}


# ---------------------------------------------------------------- what selection says


def _choice(case: Case, target: str = "B200", **options):
    call = case.build("cpu", torch.bfloat16, requires_grad=True)._replace(**options)
    return select(Problem.from_call(call), FAKES[target])


def test_explain_says_that_the_backward_has_not_run_on_the_hardware():
    choice = _choice(CASES["causal_d128"])
    assert choice.backward.kernel.name == "blackwell.backward"
    assert str(choice.backward.config).endswith("has not run on a Blackwell GPU")
    assert "portable.backward  could run this too; blackwell.backward comes first" in str(choice)
    assert _choice(CASES["causal_d128"], kernel="portable.backward").backward.kernel.name == "portable.backward"


def test_wider_heads_go_to_the_portable_backward():
    choice = _choice(_case("wide", width=192))
    assert choice.backward.kernel.name == "portable.backward"
    words = (
        "head dimensions up to 128, or 192 with values of at most 128: tensor memory holds dk and dv; this is 192/192"
    )
    assert dict(choice.rejections)["blackwell.backward"] == words


@pytest.mark.parametrize("name", ("softcap_window", "d192_128_causal", "packed_causal", "documents_causal", "prefix"))
def test_the_backward_is_chosen_where_the_forward_is_not(name):
    """The forward has no key ranges."""
    case = CASES.get(name) or SEQUENCES[name]
    choice = _choice(case)
    ranges = name in ("documents_causal", "prefix")
    assert choice.forward.kernel.name == ("portable.forward" if ranges else "blackwell.forward")
    assert choice.backward.kernel.name == "blackwell.backward"


def test_functions_of_scores_and_dropout_are_refused_by_name():
    problem = Problem.from_call(CASES["causal_d128"].build("cpu", torch.bfloat16, requires_grad=True))
    mods = SimpleNamespace(dropout=True, max_scores=False)
    why = lambda mods: blackwell.BACKWARD.why_not(replace(problem, mods=mods), FAKES["B200"])
    assert why(mods) == "drops no weights (dropout_p)"
    mods.dropout = False
    assert why(mods) == "runs no score_mod or mask_mod"


def test_tiles_fit_the_memories():
    for width, width_v in blackwell.BACKWARD.widths:
        traits = _choice(_case("tile", width=width, head_dim_v=width_v)).backward.config.traits
        assert (traits.block_d, traits.block_dv) == (width, width_v)
        assert traits.shared_bytes() <= FAKES["B200"].shared_bytes and traits.tensor_columns() <= TENSOR_COLUMNS


@pytest.mark.parametrize("heads, most, found", [(24, 10, 8), (24, 100, 24), (7, 3, 1), (8, 0, 1)])
def test_sections_divide_the_heads(heads, most, found):
    assert section(heads, most) == found
