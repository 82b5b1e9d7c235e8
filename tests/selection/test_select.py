"""Which kernel a problem gets on which GPU, and why not another: one test for each reason, in the words that `explain`
prints.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch

import strobe
from strobe import env
from strobe.errors import InvalidProblem, UnsupportedProblem
from strobe.kernels import FAMILIES, kernels, protocol
from strobe.kernels.blackwell import kernel as blackwell
from strobe.kernels.blackwell.traits import TENSOR_COLUMNS
from strobe.kernels.hopper import kernel as hopper
from strobe.kernels.runtime import tma_requirements
from strobe.kernels.runtime.launch_cache import CACHE
from strobe.problem import target as target_module
from strobe.problem.call import Call
from strobe.problem.problem import Problem
from strobe.problem.target import FAKES
from strobe.selection.select import Choice, select


def _dense(
    width: int = 128, width_v: int = 0, dtype: torch.dtype = torch.bfloat16, heads: tuple[int, int] = (4, 4), **options
) -> Call:
    shapes = ((2, 64, heads[0], width), (2, 80, heads[1], width), (2, 80, heads[1], width_v or width))
    return Call(*(torch.empty(shape, dtype=dtype) for shape in shapes), **options)


def _masked(mask: strobe.Mask) -> Call:
    return (
        _dense()
        ._replace(
            k=torch.empty(2, 64, 4, 128, dtype=torch.bfloat16), v=torch.empty(2, 64, 4, 128, dtype=torch.bfloat16)
        )
        .with_mask(mask)
    )


def _packed() -> Call:
    q = torch.empty(16, 2, 64, dtype=torch.float16)
    offsets = torch.tensor([0, 16], dtype=torch.int32)
    return Call(q, q, q, cu_seqlens_q=offsets, cu_seqlens_k=offsets)


def _expanded() -> Call:
    call = _dense()
    return call._replace(k=call.k[:, :, :1].expand(-1, -1, 4, -1))


def _unaligned() -> Call:
    call = _dense()
    return call._replace(v=torch.empty(2, 80, 4, 132, dtype=torch.bfloat16)[..., :128])


def chosen(call: Call, target: str = "H200") -> Choice:
    return select(strobe.Problem.from_call(call), FAKES[target])


def refusal(call: Call, target: str = "H200", name: str = "hopper.forward") -> str:
    return dict(chosen(call, target).rejections)[name]


# ---------------------------------------------------------------- who is chosen

TAKEN = {
    "dense": _dense(),
    "float16": _dense(dtype=torch.float16),
    "causal": _dense(right=0),
    "window": _dense(left=5, right=3),
    "left only": _dense(left=5),
    "right only": _dense(right=7),
    "softcap and sinks": _dense(softcap=3.0, sinks=torch.zeros(4)),
    "grouped": _dense(heads=(8, 2)),
    "D 8": _dense(8),
    "D 64": _dense(64),
    "D 96": _dense(96),
    "D 192": _dense(192),
    "D 256": _dense(256),
    "D 192/128": _dense(192, 128),
    "heads first": _dense()._replace(q=torch.empty(2, 4, 64, 128, dtype=torch.bfloat16).transpose(1, 2)),
    "slices": _dense()._replace(q=torch.empty(2, 64, 6, 136, dtype=torch.bfloat16)[:, :, 1:5, 8:]),
}


@pytest.mark.parametrize("target", ("H100", "H200"))
@pytest.mark.parametrize("name", TAKEN)
def test_hopper_runs_dense_half_precision_forwards(name, target):
    choice = chosen(TAKEN[name], target)
    assert choice.forward.kernel.name == "hopper.forward" and choice.backward is None
    assert [name for name, _ in choice.rejections] == ["blackwell.forward", "portable.forward", "cpu.forward"]


@pytest.mark.parametrize("target", ("B200", "B300"))
@pytest.mark.parametrize("name", [name for name in TAKEN if name not in ("D 192", "D 256")])
def test_blackwell_runs_dense_half_precision_forwards(name, target):
    choice = chosen(TAKEN[name], target)
    assert choice.forward.kernel.name == "blackwell.forward"
    assert [name for name, _ in choice.rejections] == ["hopper.forward", "portable.forward", "cpu.forward"]


@pytest.mark.parametrize("width", (192, 256))
def test_widths_that_do_not_fit_tensor_memory(width):
    words = (
        "head dimensions up to 128, or 192 with values of at most 128: tensor memory holds two tiles of "
        f"scores and two of o; this is {width}/{width}"
    )
    assert refusal(_dense(width), "B200", "blackwell.forward") == words
    assert chosen(_dense(width), "B200").forward.kernel.name == "portable.forward"


@pytest.mark.parametrize(
    "target", [name for name, fake in FAKES.items() if fake.kind == "cuda" and fake.capability not in (90, 100, 103)]
)
def test_other_gpus_run_the_portable_kernels(target):
    assert chosen(_dense(), target).forward.kernel.name == "portable.forward"
    here = f"this target is sm_{FAKES[target].capability}"
    assert refusal(_dense(), target) == f"made for sm_90; {here}"
    assert refusal(_dense(), target, "blackwell.forward") == f"needs tensor memory (sm_100, sm_103); {here}"


def test_a_cpu_runs_its_own():
    assert chosen(_dense(), "CPU").forward.kernel.name == "cpu.forward"
    assert refusal(_dense(), "CPU") == "made for sm_90; this target is a CPU"
    assert refusal(_dense(), "CPU", "blackwell.forward") == "needs tensor memory (sm_100, sm_103); this target is a CPU"


def test_a_hopper_forward_has_the_hopper_backward_where_that_can_run():
    for options in ({}, {"deterministic": True}, {"batch_invariant": True}):
        choice = chosen(_dense(needs_grad=True, **options))
        assert (choice.forward.kernel.name, choice.backward and choice.backward.kernel.name) == (
            "hopper.forward",
            "hopper.backward",
        )


def test_kernels_asked_for_by_name():
    for wanted, forward, backward in (
        ("hopper", "hopper.forward", "hopper.backward"),
        ("hopper.forward", "hopper.forward", "hopper.backward"),
        ("hopper.backward", "hopper.forward", "hopper.backward"),
        ("portable", "portable.forward", "portable.backward"),
        ("portable.forward", "portable.forward", "hopper.backward"),
        ("portable.backward", "hopper.forward", "portable.backward"),
    ):
        choice = chosen(_dense(needs_grad=True, kernel=wanted))
        assert (choice.forward.kernel.name, choice.backward and choice.backward.kernel.name) == (forward, backward), (
            wanted
        )
    assert refusal(_dense(kernel="portable")) == 'kernel="portable" was asked for'
    assert chosen(_dense(kernel="hopper")).forward.kernel.name == "hopper.forward"


def test_a_family_without_a_backward_says_so_where_gradients_are_wanted(monkeypatch):
    monkeypatch.delattr(hopper, "BACKWARD")
    kernels.cache_clear()
    try:
        with pytest.raises(
            UnsupportedProblem,
            match=r'hopper\.backward    there is none; kernel="hopper\.forward" leaves the backward open',
        ):
            chosen(_dense(needs_grad=True, kernel="hopper"))
        with pytest.raises(
            InvalidProblem,
            match=r"hopper\.backward.*one of blackwell, hopper, portable, cpu, blackwell\.forward, hopper\.forward",
        ):
            chosen(_dense(kernel="hopper.backward"))
    finally:
        kernels.cache_clear()


def test_every_family_has_a_forward_and_the_last_resort_has_both():
    assert [one.name for one in kernels("forward")] == [f"{family}.forward" for family in FAMILIES]
    assert {"portable.backward", "cpu.backward"} <= {one.name for one in kernels("backward")}


# ---------------------------------------------------------------- why not

REFUSED = {
    "dtype": (_dense(dtype=torch.float32), "float16 and bfloat16 only; this is float32"),
    "partial": (_dense(partial=True), "writes out in q's dtype; a partial result of bfloat16 is float32"),
    "scale": (_dense(scale=-0.125), "needs a scale above 0; this is -0.125"),
    "no scale": (_dense(scale=0.0), "needs a scale above 0; this is 0"),
    "alignment": (
        _unaligned(),
        "TMA needs addresses and strides of q, k and v in multiples of 16 bytes; these are multiples of 8: ",
    ),
    "expanded": (_expanded(), "k is expanded: give fewer key heads, or make it contiguous"),
}
REFUSED_MASKS = {
    "documents": (
        _masked(strobe.documents(torch.zeros(2, 64, dtype=torch.int32))),
        "full, causal and window masks only; this has documents",
    ),
    "prefix": (
        _masked(strobe.prefix_causal(3) & strobe.key_lengths(torch.ones(2, dtype=torch.int32))),
        "full, causal and window masks only; this has prefix and key_lengths",
    ),
}


IDS, LENGTHS = torch.zeros(2, 64, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
APART = torch.empty(2 * 40968, dtype=torch.bfloat16).as_strided((2, 64, 4, 128), (40968, 512, 128, 1))
REFUSED_SPANS = {
    "entries apart": (
        _masked(strobe.documents(IDS))._replace(v=APART),
        "a multiple of the row stride; v has batch stride 40968 and row stride 512: copy it",
    ),
}


@pytest.mark.parametrize("name", REFUSED | REFUSED_SPANS)
def test_each_reason_against_the_hopper_forward(name):
    call, words = (REFUSED | REFUSED_SPANS)[name]
    assert words in refusal(call)
    assert chosen(call).forward.kernel.name == "portable.forward"


@pytest.mark.parametrize(
    "mask",
    [
        strobe.documents(IDS),
        strobe.key_lengths(LENGTHS),
        strobe.prefix_causal(3),
        strobe.documents(IDS) & strobe.window(5, 0) & strobe.key_lengths(LENGTHS),
    ],
)
def test_prefixes_documents_and_key_lengths_have_the_hopper_kernels(mask):
    choice = chosen(_masked(mask)._replace(needs_grad=True))
    assert (choice.forward.kernel.name, choice.backward and choice.backward.kernel.name) == (
        "hopper.forward",
        "hopper.backward",
    )


@pytest.mark.parametrize("name", REFUSED | REFUSED_MASKS)
def test_each_reason_against_the_blackwell_forward(name):
    call, words = (REFUSED | REFUSED_MASKS)[name]
    assert words in refusal(call, "B200", "blackwell.forward")
    assert chosen(call, "B200").forward.kernel.name == "portable.forward"


REFUSED_BACKWARD = {
    "dtype": (_dense(dtype=torch.float32), "float16 and bfloat16 only; this is float32"),
    **{name: REFUSED[name] for name in ("scale", "no scale", "alignment", "expanded")},
    **REFUSED_SPANS,
    "turns": (
        _masked(strobe.documents(IDS))._replace(deterministic=True),
        "no deterministic gradients with prefixes, key lengths or documents",
    ),
}


@pytest.mark.parametrize("name", REFUSED_BACKWARD)
def test_each_reason_against_the_hopper_backward(name):
    call, words = REFUSED_BACKWARD[name]
    call = call._replace(needs_grad=True)
    assert words in refusal(call, name="hopper.backward")
    backward = chosen(call).backward
    assert backward is not None and backward.kernel.name == "portable.backward"


def test_a_partial_result_has_the_hopper_backward():
    choice = chosen(_dense(partial=True, needs_grad=True))
    assert (choice.forward.kernel.name, choice.backward and choice.backward.kernel.name) == (
        "portable.forward",
        "hopper.backward",
    )
    assert refusal(_dense(needs_grad=True), "A100", "hopper.backward") == "made for sm_90; this target is sm_80"


def test_dimensions_of_one_have_any_stride():
    """k expanded from one head to one head lies in memory as it is."""
    call = _dense(heads=(4, 1))
    assert chosen(call._replace(k=call.k.expand(2, 80, 1, 128))).forward.kernel.name == "hopper.forward"


def test_reasons_that_lie_in_the_machine(monkeypatch):
    monkeypatch.setattr(tma_requirements, "ENV", tma_requirements.ENV._replace(interpret=True))
    assert refusal(_dense()) == "Triton's interpreter (TRITON_INTERPRET) does not support Gluon"
    monkeypatch.undo()
    monkeypatch.setattr(protocol, "find_spec", lambda name: None)
    protocol.no_triton.cache_clear()
    try:
        with pytest.raises(UnsupportedProblem) as refused:
            chosen(_dense())
    finally:
        protocol.no_triton.cache_clear()
    reasons = [line.split(maxsplit=1)[1] for line in str(refused.value).splitlines()[-3:-1]]
    assert reasons == ["needs Triton, which is not installed: pip install triton"] * 2


# ---------------------------------------------------------------- what explain prints


def test_explain_prints_the_choice_and_every_reason():
    text = str(chosen(_dense(right=0, needs_grad=True)))
    rows = [line.split(maxsplit=2) for line in text.splitlines()]
    assert [row[:2] for row in rows if row[0] in ("chosen", "rejected")] == [
        ["chosen", "hopper.forward"], ["chosen", "hopper.backward"], ["rejected", "blackwell.forward"],
        ["rejected", "portable.forward"], ["rejected", "cpu.forward"],
        ["rejected", "blackwell.backward"], ["rejected", "blackwell.backward_pair"],
        ["rejected", "portable.backward"], ["rejected", "cpu.backward"],
    ]  # fmt: skip
    assert "rejected  portable.forward   could run this too; hopper.forward comes first" in text
    config = chosen(_dense(right=0)).forward.config
    assert f"chosen    hopper.forward     {config}" in text and f"stages={config.traits.tuning.stages}" in str(config)


def test_explain_on_a_named_blackwell_gpu():
    """And it says that the kernel has not run on one."""
    choice = chosen(_dense(right=0, needs_grad=True), "B200")
    text = str(choice)
    assert (
        "chosen    blackwell.forward  block_m=256 block_n=128 stages=3, tiles in turn, shared 226 KiB, 512 columns"
        in text
    )
    assert "correct 88; has not run on a Blackwell GPU" in text
    assert choice.backward is not None and choice.backward.kernel.name == "blackwell.backward"
    assert "reduce 112, compute 176, mma 48, load 48; has not run on a Blackwell GPU" in text
    assert "rejected  hopper.forward     made for sm_90; this target is sm_100" in text


def test_explain_tells_which_heads_share_a_tile():
    call = _dense(heads=(16, 2))
    assert "block_m=32 of 8 heads block_n=128" in str(chosen(call, "B200"))
    assert "block_m=16 of 8 heads block_n=64" in str(chosen(call))
    assert "block_m=256 block_n=128" in str(chosen(_dense(), "B200")) and "block_m=128 block_n" in str(chosen(_dense()))


def test_explain_of_a_problem_passed_on():
    text = str(chosen(_dense(partial=True)))
    assert "rejected  hopper.forward     writes out in q's dtype; a partial result of bfloat16 is float32" in text
    assert "chosen    portable.forward" in text


def test_packed_sequences_run_on_hopper():
    assert "chosen    hopper.forward" in str(chosen(_packed()))


def test_tiles_fit_the_shared_memory_that_the_config_prints(as_of_many_keys):
    for (width, width_v), tuning in hopper.TUNINGS.items():
        config = chosen(_dense(width, width_v)).forward.config
        assert config.traits.tuning == tuning and config.traits.shared_bytes() <= FAKES["H200"].shared_bytes
        assert f"shared {config.traits.shared_bytes() / 1024:.0f} KiB" in str(config)
    for (width, width_v), tuning in blackwell.TILE_CONFIGS.items():
        traits = chosen(_dense(width, width_v), "B200").forward.config.traits
        assert (
            traits.tuning == tuning
            and traits.shared_bytes() <= FAKES["B200"].shared_bytes
            and traits.tensor_columns() <= TENSOR_COLUMNS
        )
    for (width, width_v), tuning in hopper.BACKWARD_TUNINGS.items():
        backward = chosen(_dense(width, width_v, needs_grad=True)).backward
        assert (
            backward
            and backward.config.traits.tuning == tuning
            and backward.config.traits.shared_bytes() <= FAKES["H200"].shared_bytes
        )
        assert f"shared {backward.config.traits.shared_bytes() / 1024:.0f} KiB" in str(backward.config)


@pytest.mark.parametrize("width", (64, 128, 256))
def test_calls_in_pieces_have_tiles_of_their_own(width):
    """Windows, documents and packed sequences; those of few keys, and softcaps, have others again."""
    long = torch.empty(1, 4096, 2, width, dtype=torch.bfloat16)
    ids = torch.zeros(1, 4096, dtype=torch.int32)
    packed = long[0].new_empty(8192, 2, width)
    offsets = torch.tensor([0, 4096, 8192], dtype=torch.int32)
    tunings = [
        hopper.FORWARD.config(Problem.from_call(call), FAKES["H200"]).traits.tuning
        for call in (
            Call(long, long, long, left=2000, right=0),
            Call(long, long, long, right=0).with_mask(strobe.problem.mask.documents(ids)),
            Call(
                packed,
                packed,
                packed,
                right=0,
                cu_seqlens_q=offsets,
                cu_seqlens_k=offsets,
                max_seqlen_q=4096,
                max_seqlen_k=4096,
            ),
        )
    ]
    assert tunings == [hopper.SHORT_RANGE_TUNINGS[width, width]] * 3
    capped = hopper.FORWARD.config(
        Problem.from_call(Call(long, long, long, left=2000, right=0, softcap=5.0)), FAKES["H200"]
    )
    assert capped.traits.tuning == hopper.SOFTCAP_TUNINGS[width, width]


def test_every_constant_of_the_compiled_kernel_is_in_its_key():
    """Triton tells compiled kernels apart by the text of their constants: no two forms may print alike."""
    choice = chosen(_dense(needs_grad=True))
    plans = (choice.forward, choice.backward, chosen(_dense(), "B200").forward)
    forms = [plan.config.traits for plan in plans if plan]
    for place in (*forms, *(traits.tuning for traits in forms)):
        for name in (field.name for field in fields(place) if field.init):  # the others follow from these
            other = replace(place, **{name: "other"})
            assert str(other) != str(place), name


@pytest.mark.parametrize(
    "value", ["", "0", "1", "n", "no", "off", "2", "disabled", "y", "yes", "on", "true", "TRUE", "tRue", "false"]
)
def test_the_interpreters_switch_is_read_as_triton_reads_it(value, monkeypatch):
    """Read otherwise, each call on a CPU is sent to kernels that find no driver."""
    libtriton = pytest.importorskip("triton._C.libtriton")
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert env.read().interpret == libtriton.getenv_bool("TRITON_INTERPRET", False)


def test_an_amd_gpu_is_no_nvidia_gpu(monkeypatch):
    """torch calls it cuda, and a gfx90a has the capability (9, 0), which would be answered hopper.forward."""
    facts = SimpleNamespace(name="AMD Instinct MI250X", major=9, minor=0, multi_processor_count=104)
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts)
    target = target_module._ask_driver.__wrapped__("cuda", 0)
    assert target.kind == "rocm" and str(target) == "AMD Instinct MI250X: rocm"
    with pytest.raises(UnsupportedProblem) as refusal:
        select(Problem.from_call(_dense()), target)
    assert "made for sm_90; this target is an AMD GPU (AMD Instinct MI250X)" in str(refusal.value)
    assert "NVIDIA GPUs of sm_80 or later" in str(refusal.value)


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_other_devices_are_named(kind):
    target = target_module._ask_driver(kind, 0)
    with pytest.raises(UnsupportedProblem) as refusal:
        select(Problem.from_call(_dense()), target)
    assert f"this target is {kind}; strobe runs on CPUs and on NVIDIA GPUs" in str(
        refusal.value
    ) and "is a CPU" not in str(refusal.value)


def test_a_choice_is_a_key_and_travels_after_use():
    """What launches a kernel again belongs to its process: it has no part in the hash and stays behind."""
    choice = select(Problem.from_call(_dense(needs_grad=True)), FAKES["CPU"])
    CACHE.insert_launch(choice.forward, (1,), lambda: True)
    other = pickle.loads(pickle.dumps(choice))
    assert {choice: "known"}[replace(choice)] == "known" and hash(other) == hash(choice)
    assert (other.problem, other.forward.config, other.backward.kernel.name) == (
        choice.problem,
        choice.forward.config,
        "cpu.backward",
    )
    assert other.forward == choice.forward and other.forward.number != choice.forward.number
    assert other.forward.number not in CACHE.launches


def test_paths_that_older_code_imports_stay():
    import strobe.integrations.sdpa as sdpa
    import strobe.integrations.transformers as integration
    from strobe.compat import sdpa as own_sdpa
    from strobe.compat import transformers as own
    from strobe.problem import Problem as problem

    sys.modules.pop("strobe.target", None)  # it warns once
    with pytest.warns(DeprecationWarning, match="strobe.problem.target"):
        older = importlib.import_module("strobe.target")
    assert older.Target is strobe.Target and problem is strobe.Problem
    assert sdpa.enable is own_sdpa.enable and sdpa.served is own_sdpa.served and integration.register is own.register
