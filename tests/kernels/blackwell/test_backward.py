"""The Blackwell backward's own source, through its own launch code, on the simulator, held against the oracle.

Its lse comes from the Blackwell forward. The rings of Q (two stages) and of every pipeline of one stage wrap.
"""

from __future__ import annotations

import re
from unittest.mock import patch

import pytest
import torch

from tests.kernels.blackwell.blackwell_scenes import B200
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
)
CASES = {case.name: case for case in (*ON_EACH_COMMIT, *NIGHTLY)}


def run_and_judge(judge, case: Case, dtype: torch.dtype, family: str, schedule: tuple[str, int]) -> None:
    call = case.build("cpu", dtype, family, seed=5, requires_grad=True, kernel="blackwell")
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
    for dtype in DTYPES:
        for schedule in SCHEDULES:
            run_and_judge(judge, CASES[name], dtype, family, schedule)


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
    return {
        name: int(count) for name, count in (re.match(r"    (\w+)(?:\[\w\])? +(\d)", line).groups() for line in lines)
    }


def test_the_table_names_each_barrier_and_its_arrivals(judge):
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
                for field in ("full", "empty"):
                    barriers = getattr(fields, field, None)
                    if getattr(barriers, "handle", None) is not None:
                        first = barriers.handle.address
                        slots = [first + 8 * i for i in range(barriers.shape[0])]
                        made.setdefault(f"{pipe}_{field}", set()).update(counts[slot] for slot in slots)
                        seen.update(slots)
            assert seen == set(counts), "a barrier that no pipeline holds"
        counts.clear()
        return specialize(self, functions_and_args, *rest)

    with patch.object(Machine, "init_barrier", noted_init), patch.object(Gluon, "warp_specialize", noted):
        run_and_judge(judge, _case("table", 130, 64), torch.bfloat16, "normal", ("eager", 0))
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


@pytest.mark.parametrize(
    "case, words",
    [
        (_case("softcap", softcap=5.0), "has no softcap"),
        (_case("packed", lengths_q=(100, 30), mask=CAUSAL), "dense layouts only; this is packed"),
        (_case("wide", width=192, head_dim_v=128), "head dimensions up to 128; this is 192/128"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_it_cannot_run_goes_to_the_portable_backward(case, words):
    choice = _choice(case)
    assert choice.forward.kernel.name == "blackwell.forward" and choice.backward.kernel.name == "portable.backward"
    assert dict(choice.rejections)["blackwell.backward"] == words


def test_deterministic_gradients_go_to_the_portable_backward():
    choice = _choice(CASES["causal_d128"], deterministic=True)
    assert choice.backward.kernel.name == "portable.backward"
    assert "adds dq in no fixed order" in dict(choice.rejections)["blackwell.backward"]


def test_tiles_fit_the_memories():
    for width, width_v in blackwell.BACKWARD_TILE_CONFIGS:
        form = _choice(_case("tile", width=width, head_dim_v=width_v)).backward.config.form
        assert (form.block_d, form.block_dv) == (width, width_v)
        assert form.shared_bytes() <= FAKES["B200"].shared_bytes and form.tensor_columns() <= TENSOR_COLUMNS


@pytest.mark.parametrize("heads, most, found", [(24, 10, 8), (24, 100, 24), (7, 3, 1), (8, 0, 1)])
def test_sections_divide_the_heads(heads, most, found):
    assert section(heads, most) == found
