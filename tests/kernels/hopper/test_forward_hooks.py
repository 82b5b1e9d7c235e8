"""The hooks of the Hopper forward, on the simulator and on a GPU, against an oracle in float64: functions of scores and
masks (`device.forward_hooks`), and lists of key blocks.
"""

from __future__ import annotations

import linecache
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.kernels.hopper.hopper_cases import CAUSAL, H200, band, key_lengths, prefix, runs
from tests.kernels.score_mod_oracle import Blocks, Mods, judge

pytest.importorskip("triton")

from strobe.errors import KernelFault
from strobe.kernels.device import persistent_launch
from strobe.kernels.device.dialect import gl, gluon
from strobe.kernels.device.forward_arguments import BlockLists, ForwardHooks
from strobe.kernels.hopper import kernel as hopper
from strobe.kernels.hopper import launch_forward
from strobe.kernels.protocol import Forward, Plan
from strobe.problem.call import Call
from strobe.problem.problem import Problem
from strobe.problem.target import Target
from strobe.sim import Run
from strobe.testing import Case, Poison
from tools.proof.simulate import on

# ---------------------------------------------------------------- functions, and the same in PyTorch


@gluon.jit
def add_constant(score, b, h, q_idx, kv_idx, aux):
    return score + aux[0]


@gluon.jit
def alibi(score, b, h, q_idx, kv_idx, aux):
    return score + gl.load(aux[0] + h) * (kv_idx - q_idx)


@gluon.jit
def each_index(score, b, h, q_idx, kv_idx, aux):
    """Every index shows in the score."""
    return score + 0.7 * b - 0.3 * h + 0.01 * (q_idx % 50) * ((kv_idx % 7) - 3)


@gluon.jit
def dense_bias(score, b, h, q_idx, kv_idx, aux):
    rows, keys = gl.minimum(q_idx, aux[5] - 1), gl.minimum(kv_idx, aux[6] - 1)
    return score + gl.load(aux[0] + b * aux[1] + h * aux[2] + rows * aux[3] + keys * aux[4])


@gluon.jit
def by_row_alone(score, b, h, q_idx, kv_idx, aux):
    """A score that depends on nothing else: of the shape [rows, 1]."""
    return q_idx * 0.5


@gluon.jit
def leap(score, b, h, q_idx, kv_idx, aux):
    """Blocks in the middle, which optimistic softmax does not look at, far above the others."""
    return score + gl.where((kv_idx >= 130) & (kv_idx < 250), 300.0, 0.0)


@gluon.jit
def late_and_low(score, b, h, q_idx, kv_idx, aux):
    """The first and the last keys hidden, and the others so low that their weights relative to 1 are 0."""
    return gl.where((kv_idx < 128) | (kv_idx >= 256), float("-inf"), score - 300.0)


@gluon.jit
def hide_odd_rows(score, b, h, q_idx, kv_idx, aux):
    return gl.where(q_idx % 2 == 1, float("-inf"), score)


@gluon.jit
def every_third(b, h, q_idx, kv_idx, aux):
    return (kv_idx + q_idx + h) % 3 == 0


@gluon.jit
def same_segment(b, h, q_idx, kv_idx, aux):
    rows, keys = gl.minimum(q_idx, aux[1] - 1), gl.minimum(kv_idx, aux[2] - 1)
    return gl.load(aux[0] + rows) == gl.load(aux[0] + keys)


def torch_alibi(slopes: Tensor, score, b, h, q, k):
    return score + slopes.double()[h] * (k - q)


def torch_each_index(score, b, h, q, k):
    return score + 0.7 * b - 0.3 * h + 0.01 * (q % 50) * ((k % 7) - 3)


def torch_leap(score, b, h, q, k):
    return score + torch.where((k >= 130) & (k < 250), 300.0, 0.0)


def torch_late_and_low(score, b, h, q, k):
    return torch.where((k < 128) | (k >= 256), -torch.inf, score - 300.0)


def slopes_of(heads: int, device: str) -> Tensor:
    return torch.tensor([2.0 ** (-8 * (h + 1) / heads) for h in range(heads)], device=device)


def alibi_mods(case: Case, device: str) -> Mods:
    slopes = slopes_of(case.heads[0], device)
    return Mods(alibi, (slopes,), score=partial(torch_alibi, slopes))


def dense_bias_mods(case: Case, device: str) -> Mods:
    shape = (case.batch, case.heads[0], case.seqlen_q, case.keys)
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(device)
    aux = (bias, *bias.stride(), *shape[2:])
    return Mods(dense_bias, aux, score=lambda s, b, h, q, k: s + bias.double()[b, h, q, k])


def segment_mods(case: Case, device: str) -> Mods:
    n = max(case.seqlen_q, case.keys)
    ids = (torch.arange(n, device=device) // 70 % 3).int()
    return Mods(
        mask_mod=same_segment,
        mask_aux=(ids, case.seqlen_q, case.keys),
        mask=lambda b, h, q, k: ids[q] == ids[k],
    )


SIMPLE = {
    "constant": Mods(add_constant, (1.5,), score=lambda s, b, h, q, k: s + 1.5),
    "each_index": Mods(each_index, score=torch_each_index),
    "by_row_alone": Mods(by_row_alone, score=lambda s, b, h, q, k: s * 0 + q * 0.5),
    "leap": Mods(leap, score=torch_leap),
    "late_and_low": Mods(late_and_low, score=torch_late_and_low),
    "hide_odd_rows": Mods(hide_odd_rows, score=lambda s, b, h, q, k: torch.where(q % 2 == 1, -torch.inf, s)),
    "every_third": Mods(mask_mod=every_third, mask=lambda b, h, q, k: (k + q + h) % 3 == 0),
    "none": Mods(),
}


def mods_of(name: str, case: Case, device: str) -> Mods:
    made = {"alibi": alibi_mods, "dense_bias": dense_bias_mods, "segments": segment_mods}
    if "+" in name:
        first, second = (mods_of(part, case, device) for part in name.split("+"))
        return Mods(first.score_mod, first.score_aux, second.mask_mod, second.mask_aux, first.score, second.mask)
    return made[name](case, device) if name in made else SIMPLE[name]


# ---------------------------------------------------------------- block lists


def blocks_of(kinds: Tensor, size: tuple[int, int], rows: int, keys: int, with_full: bool = True) -> Blocks:
    """kinds [B, H, M, N]: 0 not listed, 1 partial, 2 full. Numbers behind a list's end are far outside."""
    found = []
    for kind in (1, 2) if with_full else (1,):
        chosen = kinds == kind
        order = torch.argsort((~chosen).to(torch.int8), dim=-1, stable=True)
        count = chosen.sum(-1)
        behind = torch.arange(kinds.shape[-1], device=kinds.device) >= count[..., None]
        found += [count.int(), torch.where(behind, 10**6, order).int().contiguous()]
    wide = kinds.repeat_interleave(size[0], 2)[:, :, :rows].repeat_interleave(size[1], 3)[..., :keys]
    return Blocks(BlockLists(*found), size, wide > 0, wide == 2)


def drawn_kinds(batch: int, heads: int, rows: int, keys: int, size: tuple[int, int], device: str, most: int = 2):
    shape = (batch, heads, -(-rows // size[0]), -(-keys // size[1]))
    return torch.randint(0, most + 1, shape, generator=torch.Generator().manual_seed(11)).to(device)


# ---------------------------------------------------------------- running it


def plan_of(case: Case, target: Target, mods: Mods, blocks: Blocks | None, early: bool | None, call: Call) -> Plan:
    problem = Problem.from_call(call)
    traits = hopper.FORWARD.config(problem, target).traits
    size, per_head = (None, False) if blocks is None else (blocks.size, blocks.lists.kv_num_blocks.shape[1] > 1)
    has_full = blocks is not None and blocks.lists.full_kv_num_blocks is not None
    traits = hopper.with_hooks(traits, mods.score_mod, mods.mask_mod, size, has_full, per_head)
    if early is not None:
        traits = hopper.replace(traits, early=early)
    return Plan(hopper.FORWARD, problem, target, hopper.ForwardConfig(traits), ()).changed()


def launched(case: Case, call: Call, target: Target, mods: Mods, blocks: Blocks | None, early: bool | None) -> Forward:
    plan = plan_of(case, target, mods, blocks, early, call)
    shapes = plan.problem.out_shapes
    found = Forward(
        torch.empty(shapes[0], dtype=call.q.dtype, device=call.q.device),
        torch.empty(shapes[1], dtype=torch.float32, device=call.q.device),
    )
    hooks = ForwardHooks(mods.score_aux, mods.mask_aux, None if blocks is None else blocks.lists)
    launch_forward.run_forward(plan, call, found, hooks)
    return found


def simulated(
    case: Case, mods: Mods, blocks: Blocks | None = None, early: bool | None = None, schedule=("eager", 0)
) -> tuple[Forward, Call, Run]:
    call = case.build("cpu", torch.bfloat16, "normal", 5, kernel="hopper")._replace(needs_grad=False)
    with on(H200, *schedule) as run, Poison() as poison:
        found = launched(case, poison.enclose_call(call), H200, mods, blocks, early)
    assert run.reports == [] and run.launches == ["forward_kernel"]
    return found, call, run


def _case(name: str, seqlen_q: int = 300, seqlen_k: int | None = 390, **options) -> Case:
    return Case(name, seqlen_q, seqlen_k, **{"head_dim": 128, "batch": 1, "heads": (2, 2)} | options)


BEYOND = r"times the allowance|rows without keys"

# name -> (case, functions, optimistic softmax or not; None: as the config has it)
MODS = {
    "constant": (_case("constant"), "constant", None),
    "alibi_causal": (_case("alibi_causal", 300, None, mask=CAUSAL), "alibi", True),
    "alibi_waits": (_case("alibi_waits", 300, None, heads=(4, 4)), "alibi", False),
    "alibi_d64_window": (_case("alibi_d64_window", 390, 520, head_dim=64, mask=band(200, 0)), "alibi", True),
    "each_index": (_case("each_index", 200, 300, batch=2), "each_index", None),
    "packed_gqa": (_case("packed_gqa", 33, 260, heads=(6, 2), batch=2), "each_index", None),
    "gqa_not_packed": (_case("gqa_not_packed", 300, 200, heads=(4, 2)), "each_index", None),
    "packed_gqa_bias": (_case("packed_gqa_bias", 33, 201, heads=(4, 1), mask=CAUSAL), "dense_bias", True),
    "dense_bias_odd": (_case("dense_bias_odd", 129, 257, batch=2), "dense_bias", True),
    "by_row_alone": (_case("by_row_alone", 100, 200), "by_row_alone", None),
    "leap": (_case("leap", 130, 500), "leap", True),
    "leap_waits": (_case("leap_waits", 130, 500), "leap", False),
    "late_and_low": (_case("late_and_low", 130, 512), "late_and_low", True),
    "hide_odd_rows": (_case("hide_odd_rows", 130, 200), "hide_odd_rows", True),
    "hide_odd_rows_sinks": (_case("hide_odd_rows_sinks", 130, 200, sinks=True), "hide_odd_rows", True),
    "every_third": (_case("every_third", 200, 330), "every_third", True),
    "segments_causal": (_case("segments_causal", 300, None, mask=CAUSAL), "segments", None),
    "softcap": (_case("softcap", 130, 200, softcap=2.0, mask=CAUSAL), "each_index", None),
    "alibi_and_segments": (_case("alibi_and_segments", 300, None, mask=CAUSAL), "alibi+segments", True),
    "varlen": (
        _case("varlen", lengths_q=(130, 0, 1, 65), lengths_k=(200, 3, 150, 65), mask=CAUSAL, outside=(3, 5)),
        "each_index",
        None,
    ),
    "varlen_gqa": (_case("varlen_gqa", lengths_q=(3, 1, 33), lengths_k=(140, 3, 130), heads=(6, 2)), "alibi", None),
    "documents": (_case("documents", 300, None, batch=2, mask=runs((130, 1, 64, 105), also=CAUSAL)), "alibi", True),
    "scattered": (_case("scattered", 300, None, mask=runs((100, 60, 90, 50), (0, 1, 0, 1))), "each_index", True),
    "key_lengths": (_case("key_lengths", 200, 390, batch=2, mask=key_lengths(257, 65)), "each_index", True),
    "prefix": (_case("prefix", 200, 260, batch=2, mask=prefix(130, 10)), "each_index", True),
    "d256": (_case("d256", 130, 200, head_dim=256, mask=CAUSAL), "alibi", None),
    "d96": (_case("d96", 130, 260, head_dim=96), "alibi", True),
    "d192_128": (_case("d192_128", 130, 260, head_dim=192, head_dim_v=128, mask=CAUSAL), "alibi", True),
}


@pytest.mark.parts(4)
@pytest.mark.parametrize("name", MODS)
def test_functions_of_scores(name):
    case, functions, early = MODS[name]
    mods = mods_of(functions, case, "cpu")
    schedule = (("eager", 0), ("lazy", 0), ("pct", 1))[list(MODS).index(name) % 3]
    found, call, _ = simulated(case, mods, early=early, schedule=schedule)
    judge(found, call, mods)
    with pytest.raises(AssertionError, match=BEYOND):
        judge(found, call, Mods())  # the functions do something


@dataclass
class Listed:
    case: Case
    mods: str = "none"
    size: tuple[int, int] = (128, 128)
    shared: tuple[bool, bool] = (True, True)  # whether entries, and heads, share their lists
    kinds: str = "drawn"
    early: bool | None = None


LISTS = {
    "every_second": Listed(_case("every_second", 300, 700), kinds="every_second"),
    "drawn": Listed(_case("drawn", 390, 650, heads=(2, 2), batch=2), shared=(False, False), early=True),
    "drawn_causal": Listed(_case("drawn_causal", 390, None, mask=CAUSAL), early=True),
    "drawn_causal_waits": Listed(_case("drawn_causal_waits", 390, None, mask=CAUSAL), early=False),
    "drawn_window": Listed(_case("drawn_window", 390, None, mask=band(150, 30)), early=True),
    "drawn_segments": Listed(_case("drawn_segments", 390, 650, mask=CAUSAL), "segments", early=True),
    "drawn_alibi_segments": Listed(_case("drawn_alibi_segments", 390, 650), "alibi+segments", early=True),
    "partial_only": Listed(_case("partial_only", 300, 650), "every_third", kinds="partial"),
    "wide_blocks": Listed(_case("wide_blocks", 500, 600), size=(256, 256)),
    "wide_blocks_end_within": Listed(_case("wide_blocks_end_within", 500, 384), size=(128, 256)),
    "narrow_keys": Listed(_case("narrow_keys", 300, 500, mask=CAUSAL), size=(128, 64), early=True),
    "d64": Listed(_case("d64", 390, 520, head_dim=64), early=True),
    "d256_alibi": Listed(_case("d256_alibi", 260, 400, head_dim=256), "alibi"),
    "gqa_packed": Listed(_case("gqa_packed", 130, 400, heads=(4, 1), mask=CAUSAL), "each_index"),
    "gqa_per_head": Listed(_case("gqa_per_head", 33, 400, heads=(4, 1)), shared=(True, False)),
    "sinks": Listed(_case("sinks", 390, 400, sinks=True), early=True),
    "empty": Listed(_case("empty", 260, 300, sinks=True), kinds="empty", early=True),
    "varlen": Listed(
        _case("varlen", lengths_q=(130, 0, 1, 265), lengths_k=(300, 3, 150, 390), outside=(3, 5), mask=CAUSAL),
        "each_index",
        shared=(False, True),
    ),
    "key_lengths": Listed(_case("key_lengths", 260, 390, batch=2, mask=key_lengths(257, 65)), early=True),
}


def blocks_for(listed: Listed, call: Call, device: str) -> Blocks:
    case = listed.case
    if call.packed:
        ends = [t.diff() for t in (call.cu_seqlens_q, call.cu_seqlens_k)]
        rows, keys, batch = int(ends[0].max()), int(ends[1].max()), len(ends[0])
    else:
        rows, keys, batch = case.seqlen_q, case.keys, case.batch
    batch, heads = (1 if one else n for one, n in zip(listed.shared, (batch, case.heads[0])))
    kinds = drawn_kinds(batch, heads, rows, keys, listed.size, device, 1 if listed.kinds == "partial" else 2)
    if listed.kinds == "every_second":
        kinds = torch.where(torch.arange(kinds.shape[-1], device=device) % 2 == 0, 2, 0).expand(kinds.shape)
    if listed.kinds == "empty":
        kinds = torch.where(torch.arange(kinds.shape[2], device=device)[:, None] == 0, 0, kinds)
    return blocks_of(
        without_broken_promises(kinds, listed.size, call), listed.size, rows, keys, listed.kinds != "partial"
    )


def without_broken_promises(kinds: Tensor, size: tuple[int, int], call: Call) -> Tensor:
    """Full blocks become partial where the built-in mask leaves a key out for any entry. Keys that a mask_mod leaves
    out of a full block are seen.
    """
    if call.packed:  # causal, of lengths that differ: no full block but those that all sequences see
        return kinds.clamp(max=1)
    seen = call.mask.dense(call.q.shape[1], call.k.shape[1], call.q.device).to(kinds.device)
    whole = torch.ones(seen.shape[0], kinds.shape[2] * size[0], kinds.shape[3] * size[1], device=kinds.device).bool()
    whole[:, : seen.shape[1], : seen.shape[2]] = seen
    whole = whole.unflatten(2, (-1, size[1])).unflatten(1, (-1, size[0])).all(-1).all(2).all(0)
    return torch.where(whole, kinds, kinds.clamp(max=1))


@pytest.mark.parts(4)
@pytest.mark.parametrize("name", LISTS)
def test_lists_of_key_blocks(name):
    listed = LISTS[name]
    case, mods = listed.case, mods_of(listed.mods, listed.case, "cpu")
    call = case.build("cpu", torch.bfloat16, "normal", 5, kernel="hopper")
    blocks = blocks_for(listed, call, "cpu")
    schedule = (("eager", 0), ("lazy", 0), ("pct", 1))[list(LISTS).index(name) % 3]
    found, call, _ = simulated(case, mods, blocks, listed.early, schedule)
    judge(found, call, mods, blocks)
    with pytest.raises(AssertionError, match=BEYOND):
        judge(found, call, mods)  # the lists do something


def test_tiles_that_do_not_exist_read_no_list(monkeypatch):
    """The last section of causal heads has tiles of a head behind the last, whose lists would lie behind the tensor."""
    monkeypatch.setattr(persistent_launch, "even_section", lambda parts, most: 2)
    listed = Listed(_case("uneven", 260, None, batch=3, heads=(1, 1), mask=CAUSAL), shared=(False, False))
    call = listed.case.build("cpu", torch.bfloat16, "normal", 5, kernel="hopper")
    blocks = blocks_for(listed, call, "cpu")
    found, call, _ = simulated(listed.case, Mods(), blocks, None, ("eager", 0))
    judge(found, call, Mods(), blocks)


# ---------------------------------------------------------------- what the host says


def _traits(case: Case) -> hopper.ForwardTraits:
    return hopper.FORWARD.config(Problem.from_call(case.build("cpu", torch.bfloat16)), H200).traits


def test_tiles_divide_the_blocks():
    """d64 has tiles of 256 queries by itself, and a call whose blocks are narrower than any tile is refused."""
    traits = _traits(_case("d64", head_dim=64))
    listed = hopper.with_hooks(traits, block_size=(128, 128))
    assert traits.block_m == 256 and (listed.block_m, listed.counted) == (128, True)
    with pytest.raises(ValueError, match="blocks of 128 queries and 32 keys"):
        hopper.with_hooks(traits, block_size=(128, 32))
    documents = _traits(MODS["documents"][0])
    with pytest.raises(ValueError, match="documents"):
        hopper.with_hooks(documents, block_size=(128, 128))


def test_heads_with_lists_of_their_own_are_not_packed():
    traits = _traits(_case("gqa", 33, 400, heads=(4, 1)))
    assert traits.pack_gqa == 4 and hopper.with_hooks(traits, block_size=(128, 128)).pack_gqa == 4
    apart = hopper.with_hooks(traits, block_size=(128, 128), per_head=True)
    assert (apart.pack_gqa, apart.group) == (1, 4)
    lists = LISTS["gqa_per_head"]
    call = lists.case.build("cpu", torch.bfloat16, kernel="hopper")
    blocks = blocks_for(lists, call, "cpu")
    packed = hopper.with_hooks(traits, block_size=(128, 128), has_full=True)
    with pytest.raises(KernelFault, match=r"4 heads in tiles of 4 heads"):
        launch_forward.block_list_params(blocks.lists, packed)


def test_functions_of_one_name_are_told_apart():
    """Triton prints a function as its module and name."""
    traits = _traits(_case("plain"))

    def made(text: str):
        name = f"<{text}>"
        source = f"@gluon.jit\ndef mod(score, b, h, q_idx, kv_idx, aux):\n    return {text}\n"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        scope = {"gluon": gluon, "__name__": "made"}
        exec(compile(source, name, "exec"), scope)
        return scope["mod"]

    one, same, other = (str(hopper.with_hooks(traits, made(text))) for text in ("score + b", "score + b", "score - b"))
    assert one == same != other


def test_numbers_that_functions_read_are_part_of_a_launch(monkeypatch):
    """1 is a constant of the compiled kernel, 1.0 and other numbers are not, and Python says that 1 == 1.0."""
    keys = []
    monkeypatch.setattr(persistent_launch.launcher, "start", lambda plan, key, tensors, describe: keys.append(key))
    case = _case("constant")
    call = case.build("cpu", torch.bfloat16, kernel="hopper")
    for aux in ((1,), (1.0,), (2.0,), (torch.zeros(1),), (torch.zeros(1, dtype=torch.int32),), (1.0,)):
        launched(case, call, H200, Mods(add_constant, aux), None, None)
    assert len(set(keys)) == 5 and keys[1] == keys[-1]


def test_lists_without_traits_are_refused():
    call = LISTS["sinks"].case.build("cpu", torch.bfloat16, kernel="hopper")
    plan = plan_of(LISTS["sinks"].case, H200, Mods(), None, None, call)
    lists = blocks_for(LISTS["sinks"], call, "cpu").lists
    with pytest.raises(KernelFault, match="block lists"):
        launch_forward.run_forward(plan, call, Forward(call.q, call.q), ForwardHooks(block_lists=lists))


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("name", MODS)
def test_functions_of_scores_on_a_gpu(name, dtype):
    case, functions, early = MODS[name]
    mods, call = mods_of(functions, case, "cuda"), case.build("cuda", dtype, "normal", 5)._replace(needs_grad=False)
    found = launched(case, call, Target.of(torch.device("cuda")), mods, None, early)
    judge(found, call, mods)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LISTS)
def test_lists_of_key_blocks_on_a_gpu(name):
    listed = LISTS[name]
    case, mods = listed.case, mods_of(listed.mods, listed.case, "cuda")
    call = case.build("cuda", torch.bfloat16, "normal", 5)._replace(needs_grad=False)
    blocks = blocks_for(listed, call, "cuda")
    found = launched(case, call, Target.of(torch.device("cuda")), mods, blocks, listed.early)
    judge(found, call, mods, blocks)
