"""Seeded faults: each is put into the library's own code, one at a time, and a named check must object, which without
it is content.

The score is the share that is noticed; it must be all, with no false alarm. Rows are those of docs/reliability.md that
a fault re-creates. The portable kernels are run by Triton's interpreter, in a process of its own: `TRITON_INTERPRET=1
python -m tests.reliability.test_mutants`.
"""

from __future__ import annotations
import __future__

import contextlib
import functools
import inspect
import json
import linecache
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from types import FunctionType
from typing import Any, NamedTuple

import pytest
import torch

from strobe.kernels.runtime.launch_cache import CACHE
from strobe.testing import CASES, FAMILIES, Case
from strobe.testing.poison import fill_with_poison, patched_empty
from tests import test_contract, test_metamorphic
from tests.judging import judged_call
from tests.kernels.cpu import test_cpu
from tests.kernels.runtime import test_launch_cache
from tests.ops import test_ops
from tests.problem import test_bad_input, test_masks
from tests.reliability import test_reliability

NOTICED = (
    AssertionError,
    pytest.fail.Exception,
    RuntimeError,
    ValueError,
)  # the last two: torch meets shapes that disagree, or the door refuses
Check = Callable[[], object]


class Mutant(NamedTuple):
    name: str
    where: str  # module:function below strobe
    old: str  # in the function's source, exactly once
    new: str
    check: Check
    rows: tuple[int, ...] = ()


# ---------------------------------------------------------------- seeding


def _found(where: str) -> Any:
    """The function (of a method or a property too), or the kernel's object in Triton's interpreter."""
    module, _, path = where.partition(":")
    found: Any = import_module(f"strobe.{module}")
    for name in path.split("."):
        found = inspect.getattr_static(found, name)
    return getattr(found, "__func__", getattr(found, "fget", found))


def _rewritten(function: FunctionType, mutant: Mutant) -> Any:
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(mutant.old) == 1, f"{mutant.name}: {mutant.old!r} is not once in {mutant.where}"
    source, name = source.replace(mutant.old, mutant.new), f"<mutant: {mutant.name}>"
    linecache.cache[name] = (
        len(source),
        None,
        source.splitlines(keepends=True),
        name,
    )  # Triton's interpreter reads the source again
    made: dict[str, Any] = {}
    exec(compile(source, name, "exec", __future__.annotations.compiler_flag, True), function.__globals__, made)
    found = made[function.__name__]
    return getattr(found, "__func__", getattr(found, "fget", found))


@contextlib.contextmanager
def seeded(mutant: Mutant):
    """The fault in place: whoever imported the function runs it too, for the object stays and its inside changes."""
    target = _found(mutant.where)
    plain = isinstance(target, FunctionType)
    own = target.__code__ if plain else dict(target.__dict__)
    other = _rewritten(target if plain else target.fn, mutant)
    CACHE.clear()
    try:
        if plain:
            target.__code__ = other.__code__
        else:
            target.__dict__.update(other.__dict__)
        yield
    finally:
        if plain:
            target.__code__ = own
        else:
            target.__dict__.update(own)
        CACHE.clear()


def noticed(check: Check) -> str:
    """What the check objects to; empty where it is content."""
    try:
        with patched_empty(fill_with_poison):
            check()
    except NOTICED as objection:
        return (str(objection) or type(objection).__name__).splitlines()[0]
    return ""


@functools.cache
def false_alarm(check: Check) -> str:
    return noticed(check)


# ---------------------------------------------------------------- checks

KERNEL = "portable" if os.environ.get("TRITON_INTERPRET") else "cpu"


@functools.cache
def judged(*names: str, families: tuple[str, ...] = ("normal",), dtype=torch.float32, **changes) -> Check:
    """Named cases, forward and backward, between guard bands and against the oracle by both rules."""

    def check():
        for name in names:
            case = (
                replace(CASES.get(name, CASES["causal"]), **changes)
                if name in CASES or not changes
                else Case(name, **changes)
            )
            for family in families:
                judged_call(case.build("cpu", dtype, family, 3, requires_grad=True, kernel=KERNEL), family, 3)

    return check


def runs(test: Callable, *arguments, **keywords) -> Check:
    """A test of another file, called with these arguments."""
    return functools.partial(test, *arguments, **keywords)


HERE = {"device": "cpu", "kernel": KERNEL}
PROBE = runs(test_contract.test_indicator_probe_dense, torch.float32, **HERE)
GOLDEN = {name: runs(test_contract.test_golden_mask, name, **HERE) for name in test_contract.GOLDEN}
MANY_KEYS = judged(
    "many keys",
    seqlen_q=40,
    seqlen_k=300,
    heads=(4, 2),
    head_dim=16,
    head_dim_v=24,
    mask=CASES["causal"].mask,
    families=FAMILIES,
)
SMALL_TILES = runs(test_cpu.test_tiles_of_any_size_give_the_same, "window", True)
PARTIAL_BFLOAT16 = judged("partial", dtype=torch.bfloat16)
EMPTY_ROWS = runs(test_contract.test_rows_without_keys, "causal_more_rows", False, torch.float32, **HERE)
MERGE_EMPTY = runs(test_contract.test_merge_with_nothing_is_the_other_to_the_bit)
CAUSAL_HALVES = runs(test_metamorphic.test_merging_causal_halves, **HERE)
HALVES = runs(
    test_metamorphic.test_halves_merge_into_the_whole, 9, torch.bfloat16, **HERE
)  # whose partial results torch's kernel rounds too early


def keyed(name: str) -> Check:
    return runs(test_ops.test_a_call_is_not_mistaken_for_another_that_differs_in_one_argument, name)


def refused(argument: str) -> Check:
    """All bad calls that name this argument are told so."""
    return runs(_refused, argument)


def _refused(argument: str) -> None:
    table = [bad for bad in test_bad_input.TABLE if bad.argument == argument]
    complaints = [found for bad in table if (found := test_bad_input.complaint(bad))]
    assert table and not complaints, complaints


def _judge(call, family: str = "normal", seed: int = 0) -> None:
    judged_call(call, family, seed)


def _guarded() -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_reliability.test_a_launch_is_guarded_by_its_tensors_device(0, [1], patch)


def _far_rows() -> None:
    """Rows 2^30 elements apart, in memory that is there on both sides: an int32 product reads zeros."""
    q, k, v = test_reliability.draw(*[(1, 3, 1, 16)] * 3, dtype=torch.float16)
    room = test_reliability.sparse(2**32 + 2048)
    far = [
        room.as_strided((1, 3, 1, 16), (16, 2**30 + 64, 16, 1), 2**31 + 512 * n).copy_(t)
        for n, t in enumerate((q, k, v))
    ]
    assert torch.equal(
        test_reliability.strobe.attention(*far, kernel=KERNEL),
        test_reliability.strobe.attention(q, k, v, kernel=KERNEL),
    )


# ---------------------------------------------------------------- the CPU's path, the core and the door

FORWARD, BACKWARD, PIECES, TILES = (f"kernels.cpu.{name}" for name in ("forward", "backward", "pieces", "tiles"))

CPU = (
    # the mask
    Mutant(
        "last key dropped",
        f"{PIECES}:_piece",
        "full_like(column, n_keys)",
        "full_like(column, n_keys - 1)",
        PROBE,
        (40,),
    ),
    Mutant(
        "key counted twice",
        f"{TILES}:tiles",
        "highest, config.block_n)",
        "highest, max(1, config.block_n - 1))",
        PROBE,
        (18,),
    ),
    Mutant(
        "causal one key early",
        f"{PIECES}:_piece",
        "column + call.right + 1",
        "column + call.right",
        GOLDEN["causal 2 x 5"],
        (53,),
    ),
    Mutant(
        "causal one key late",
        f"{PIECES}:_piece",
        "column + call.right + 1",
        "column + call.right + 2",
        GOLDEN["causal 2 x 5"],
        (53,),
    ),
    Mutant(
        "causal aligned at the top left",
        f"{PIECES}:_entries",
        "seqlen_k - seqlen_q",
        "0",
        GOLDEN["causal 5 x 2"],
        (53,),
    ),
    Mutant(
        "window one key short",
        f"{PIECES}:_piece",
        "column - call.left",
        "column - call.left + 1",
        GOLDEN["window (1, 0) causal 4 x 4"],
        (53,),
    ),
    Mutant(
        "window one key long",
        f"{PIECES}:_piece",
        "column - call.left",
        "column - call.left - 1",
        GOLDEN["window (0, 0) 3 x 3"],
        (53,),
    ),
    Mutant(
        "tile skipped at the window's edge",
        f"{TILES}:tiles",
        "int(block.first[0])",
        "int(block.first[-1])",
        judged("window_both"),
        (55,),
    ),
    Mutant(
        "partial tile taken for a full one",
        f"{TILES}:tiles",
        "key < last_first or stop > first_end",
        "key < last_first",
        MANY_KEYS,
        (4, 18),
    ),
    Mutant(
        "tile kind off by one key",
        "problem.mask:Mask._band_kind",
        "first_stop >= n_stop",
        "first_stop >= n_stop - 1",
        runs(test_masks.test_tile_kind_is_what_dense_shows, *test_masks.SIZES[0]),
        (55,),
    ),
    Mutant(
        "no bound taken for 0",
        "interface:_band",
        "NO_BOUND if bound is None",
        "0 if bound is None",
        runs(test_contract.test_every_spelling_of_unbounded, **HERE),
        (20,),
    ),
    Mutant(
        "length not clamped",
        f"{PIECES}:_lengths",
        "call.key_lengths.clamp(0, seqlen_k)",
        "call.key_lengths",
        runs(test_contract.test_key_lengths_out_of_range, **HERE),
        (),
    ),
    Mutant(
        "scattered document taken for a run",
        f"{PIECES}:_together",
        "stop - start == positions.shape[0]",
        "stop > start",
        judged("documents_shuffled"),
        (55,),
    ),
    Mutant(
        "positions in 16 bits",
        f"{TILES}:tiles",
        "torch.arange(key, stop)",
        "torch.arange(key, stop).to(torch.int16)",
        judged(
            "more keys than 2^15",
            seqlen_q=3,
            seqlen_k=32_800,
            batch=1,
            heads=(1, 1),
            head_dim=8,
            mask=CASES["causal"].mask,
        ),
        (31,),
    ),
    # scores and softmax
    Mutant(
        "scale 1 % off",
        f"{TILES}:Scores.of",
        "problem.scale * LOG2_E",
        "1.01 * problem.scale * LOG2_E",
        judged("decode_260", families=FAMILIES, head_dim_v=40),
    ),
    Mutant(
        "softcap after the mask",
        f"{FORWARD}:_block",
        "hide(s, tile, -torch.inf)",
        "hide(s, tile, -scores.cap or -torch.inf)",
        judged("softcap"),
    ),
    Mutant("softcap's slope forgotten", f"{BACKWARD}:_block", "if scores.cap:", "if False:", judged("softcap")),
    Mutant(
        "maximum before a negative scale",
        f"{FORWARD}:_block",
        "s.amax(-1, keepdim=True)",
        "(s.amin if scores.factor < 0 else s.amax)(-1, keepdim=True)",
        runs(test_reliability.test_a_large_negative_scale, judge=_judge, **HERE),
    ),
    Mutant(
        "maximum not safe",
        f"{FORWARD}:_block",
        "new_max.masked_fill(new_max == -torch.inf, 0.0)",
        "new_max.clone()",
        SMALL_TILES,
        (1, 2, 10),
    ),
    Mutant("old sum not rescaled", f"{FORWARD}:_block", "row_sum.mul_(rescale)", "row_sum", MANY_KEYS),
    Mutant(
        "weights rounded before their sum",
        f"{FORWARD}:_block",
        "s.sub_(finite_max).exp2_()",
        "s.copy_(s.sub_(finite_max).exp2_().bfloat16())",
        PARTIAL_BFLOAT16,
        (94,),
    ),
    Mutant(
        "one row of V wrong",
        f"{FORWARD}:_block",
        "baddbmm_(s, v)",
        "baddbmm_(s, torch.cat([v[:, -1:], v[:, 1:]], 1))",
        MANY_KEYS,
        (),
    ),
    Mutant(
        "sink in the numerator",
        f"{FORWARD}:_block",
        "q.new_zeros(n, rows, keys.tensors[1].shape[-1])",
        "q.new_full((n, rows, keys.tensors[1].shape[-1]), float(sinks is not None))",
        judged("sinks"),
    ),
    Mutant(
        "sink of another head",
        f"{FORWARD}:_sinks",
        "call.sinks[chunk.heads_q]",
        "call.sinks.flip(0)[chunk.heads_q]",
        judged("sinks"),
        (64,),
    ),
    Mutant(
        "NaN swallowed by a maximum",
        "kernels.cpu.flash:forward",
        "piece.n_keys < VECTOR",
        "False",
        runs(test_cpu.test_a_row_of_nan_is_nan_and_alone, 3, {}, torch.float32),
    ),
    # empty rows and lse
    Mutant(
        "lse of an empty row +inf",
        f"{FORWARD}:run",
        "lse.fill_(-torch.inf)",
        "lse.fill_(torch.inf)",
        CAUSAL_HALVES,
        (3, 5),
    ),
    Mutant(
        "empty row not written",
        f"{FORWARD}:run",
        "if not found.cover_rows(*call.q.shape[:2]):",
        "if False:",
        EMPTY_ROWS,
        (7, 36),
    ),
    Mutant("no keys at all not written", "ops.attention:write", "out.zero_()", "out", judged("no_keys"), (15,)),
    Mutant(
        "gradients of an empty row not written",
        f"{BACKWARD}:_fill",
        "tensors.dq.zero_()",
        "tensors.dq",
        EMPTY_ROWS,
        (11, 16),
    ),
    Mutant(
        "gradients of unseen keys not written",
        f"{BACKWARD}:_fill",
        "tensors.dk.zero_()",
        "tensors.dk",
        judged("packed_no_rows_middle"),
        (12, 37),
    ),
    Mutant(
        "lse in log2",
        f"{FORWARD}:_attend",
        "row_max.mul_(LN_2).add_(row_sum.log())",
        "row_max.add_(row_sum.log2())",
        HALVES,
        (21, 23),
    ),
    Mutant(
        "merge without its guard",
        "problem.merge:_sigmoid_of_difference",
        "torch.where(empty, torch.zeros_like(x), torch.where(alone, torch.ones_like(x), torch.sigmoid(both)))",
        "torch.sigmoid(x - y)",
        MERGE_EMPTY,
        (10,),
    ),
    Mutant(
        "merge by plain exponentials",
        "problem.merge:_sigmoid_of_difference",
        "torch.sigmoid(both)",
        "torch.exp(x) / (torch.exp(x) + torch.exp(y))",
        runs(test_reliability.test_merge_at_any_level, 1000.0, 0.0),
        (22,),
    ),
    Mutant(
        "merge counts an empty side",
        "problem.merge:_log_sum",
        "torch.where(x == -torch.inf, y, torch.where(y == -torch.inf, x, inside))",
        "inside",
        MERGE_EMPTY,
        (5,),
    ),
    # gradients
    Mutant(
        "gradient of lse ignored", f"{BACKWARD}:_read", "if tensors.dlse is not None:", "if False:", judged("partial")
    ),
    Mutant("sign of delta", f"{BACKWARD}:_block", ".sub_(rows.delta)", ".add_(rows.delta)", judged("softcap")),
    Mutant(
        "dq not scaled",
        f"{BACKWARD}:_attend",
        "scratch.view(2, -1)).mul_(problem.scale)",
        "scratch.view(2, -1))",
        judged("softcap"),
    ),
    Mutant(
        "hidden weights in the gradients",
        f"{BACKWARD}:_block",
        "hide(p, tile, 0.0)",
        "pass",
        judged("window_both"),
        (17,),
    ),
    Mutant(
        "gradient of the sinks with the wrong sign",
        "ops.attention:_sinks_gradient",
        "-(weight * delta)",
        "(weight * delta)",
        judged("sinks"),
    ),
    Mutant(
        "gradient of one head of the group missing",
        f"{BACKWARD}:_block",
        "ds.transpose(1, 2), rows.q)",
        "ds[:, : -(-count // 2)].transpose(1, 2), rows.q[:, : -(-count // 2)])",
        judged("grouped", softcap=9.0),
    ),
    # layouts, keys, the door
    Mutant(
        "offset of another sequence",
        f"{PIECES}:_sequences",
        "slice(key, key_stop)",
        "slice(row, row + key_stop - key)",
        judged("packed_no_rows_middle"),
        (6,),
    ),
    Mutant(
        "strides ignored",
        f"{TILES}:Chunk.read_keys",
        "tensor[self",
        "tensor.as_strided(tensor.shape, tensor.new_empty(tensor.shape).stride())[self",
        judged("stored_heads_first", softcap=9.0),
        (39, 41, 46),
    ),
    Mutant(
        "promise not checked",
        f"{PIECES}:_sequences",
        "row_stop - row > call.max_seqlen_q",
        "False",
        runs(test_contract.test_a_longer_sequence_than_promised_is_reported, **HERE),
        (66,),
    ),
    Mutant(
        "falling offsets accepted",
        f"{PIECES}:_offsets",
        "after < value",
        "False",
        runs(test_contract.test_offsets_that_fall_or_overrun, [0, 5, 3, 9], **HERE),
        (13,),
    ),
    Mutant(
        "empty sequence refused",
        f"{PIECES}:_offsets",
        "after < value",
        "after <= value",
        judged("packed_promised_one"),
        (7, 14),
    ),
    Mutant(
        "scale not in the key",
        "problem.call:Call.parted",
        "self[:3], self[SCALARS]",
        "self[:3], (*self[3:5], *self[6 : SCALARS.stop])",
        keyed("scale"),
        (87,),
    ),
    Mutant(
        "strides not in the key",
        "kernels.runtime.launch_cache:LaunchCache.lookup",
        "guard(*tensors)",
        "guard",
        keyed("strides of v"),
        (43,),
    ),
    Mutant(
        "alignment not in the key",
        "kernels.runtime.launch_cache:LaunchCache.lookup",
        "== alignment",
        "is not None",
        runs(test_launch_cache.test_what_differs_is_decided_for_itself, "address of q", torch.no_grad),
        (43, 47),
    ),
    Mutant(
        "window not in the key",
        "problem.call:Call.parted",
        "self[:3], self[SCALARS]",
        "self[:3], self[5 : SCALARS.stop]",
        keyed("left"),
        (87, 88),
    ),
    Mutant(
        "deterministic dropped",
        "problem.problem:Problem.from_call",
        "deterministic=call.deterministic",
        "deterministic=False",
        runs(test_reliability.test_deterministic_reaches_the_plan),
        (72,),
    ),
    Mutant(
        "no device guard",
        "ops.attention:_launch",
        "q.get_device() != torch_private.cuda_current_device()",
        "False",
        runs(_guarded),
        (80,),
    ),
    Mutant("heads not checked", "problem.call:_check_heads", "heads_q % heads_kv", "False", refused("k")),
    Mutant(
        "offsets of any dtype",
        "problem.call:_count",
        "offsets.dtype != torch.int32",
        "False",
        refused("cu_seqlens_q"),
        (),
    ),
    Mutant("scale not checked", "problem.call:check_scores", "not math.isfinite(number)", "False", refused("scale")),
)

# ---------------------------------------------------------------- the portable kernels, interpreted

ATTEND, GRADIENTS, LAUNCH = (f"kernels.portable.{name}" for name in ("forward", "backward", "launch"))
MASKING, SOFTMAX, POINTERS = (f"kernels.device.{name}" for name in ("mask", "softmax", "seqlen"))


def light(name: str, **changes) -> Check:
    return judged(name, head_dim=16, **changes)


PORTABLE = (
    Mutant(
        "hidden one key late (portable)",
        f"{MASKING}:hide",
        "[:, None] > columns",
        "[:, None] >= columns",
        light("length_3"),
        (18, 53),
    ),
    Mutant(
        "aligned at the top left (portable)",
        f"{MASKING}:row_interval",
        "row + (seqlen_k - seqlen_q)",
        "row",
        GOLDEN["causal 2 x 5"],
        (53,),
    ),
    Mutant(
        "window one key short (portable)",
        f"{MASKING}:row_interval",
        "diagonal - left)",
        "diagonal - left + 1)",
        GOLDEN["window (0, 0) 3 x 3"],
        (53,),
    ),
    Mutant(
        "last row that sees a key (portable)",
        f"{MASKING}:stop_row",
        "(seqlen_k - seqlen_q) + 1",
        "(seqlen_k - seqlen_q)",
        light("window_diagonal"),
        (55,),
    ),
    Mutant(
        "tile of another sequence (portable)",
        f"{POINTERS}:find_sequence",
        "middle <= tile",
        "middle < tile",
        light("packed_empty_first"),
        (6, 13),
    ),
    Mutant(
        "key length not clamped (portable)",
        f"{POINTERS}:key_limit",
        "tl.minimum(tl.maximum(length, 0), seqlen_k)",
        "tl.minimum(length, seqlen_k + 1)",
        runs(test_contract.test_key_lengths_out_of_range, **HERE),
        (),
    ),
    Mutant(
        "offsets in 32 bits (portable)",
        f"{POINTERS}:load_rows",
        "rows.to(tl.int64)",
        "rows",
        runs(_far_rows),
        (24, 25, 26, 30, 32),
    ),
    Mutant(
        "maximum not safe (portable)",
        f"{SOFTMAX}:online_step",
        'tl.where(new_max == float("-inf"), 0.0, new_max)',
        "new_max",
        light("window_both", seqlen_q=70),
        (1, 2, 10),
    ),
    Mutant(
        "finite stand-in for -inf (portable)",
        f"{SOFTMAX}:online_step",
        "tl.max(s, 1)",
        "tl.maximum(tl.max(s, 1), -5e4)",
        runs(test_contract.test_scores_of_minus_100000, torch.float32, **HERE),
        (3, 4),
    ),
    Mutant(
        "sink in log2 (portable)",
        f"{ATTEND}:finish",
        "sink * 1.4426950408889634",
        "sink",
        light("no_keys_sinks", seqlen_k=9),
        (21,),
    ),
    Mutant(
        "empty row divided by 0 (portable)",
        f"{ATTEND}:finish",
        "tl.where(empty[:, None], 0.0, o / row_sum[:, None])",
        "o / row_sum[:, None]",
        light("few_keys", mask=CASES["causal"].mask),
        (1, 7, 9),
    ),
    Mutant(
        "tail of a tile not zeroed (portable)",
        f"{ATTEND}:run_of_rows",
        "(n_first, n_stop, tl.minimum(key_stop, k_stop), document)",
        "(n_first, n_stop, seqlen_k, document)",
        runs(test_contract.test_hidden_bytes_do_not_matter, "key_lengths", torch.nan, torch.float32, **HERE),
        (56, 62, 63),
    ),
    Mutant(
        "lse of another sequence (portable)",
        f"{ATTEND}:forward_kernel",
        "* total_q + q_start,",
        "* total_q,",
        light("packed_no_keys_middle"),
        (6,),
    ),
    Mutant(
        "key head h % H_kv (portable)",
        f"{ATTEND}:forward_kernel",
        "head // form.group",
        "head % (heads // form.group)",
        light("one_row_causal", heads=(4, 2)),
    ),
    Mutant(
        "documents compared with another row's (portable)",
        f"{ATTEND}:load_keys",
        "== document",
        ">= document",
        light("documents_shuffled", seqlen_q=24, batch=1, heads=(1, 1)),
        (29, 55),
    ),
    Mutant(
        "rows of padding with lse -inf (portable)",
        f"{GRADIENTS}:load_per_row",
        'tl.where(row_lse == float("-inf"), float("inf"), row_lse)',
        "row_lse",
        light("length_3"),
        (17, 19),
    ),
    Mutant(
        "dk of one head of the group (portable)",
        f"{GRADIENTS}:run_of_keys",
        "own = head + member",
        "own = head",
        light("decode_63"),
        (),
    ),
    Mutant(
        "hidden weights in dq (portable)",
        f"{GRADIENTS}:queries_gradient",
        "columns[None, :] < (stop - n_start)[:, None]",
        "columns[None, :] < (stop - n_start)[:, None] + 1",
        light("one_row_causal", seqlen_q=5, seqlen_k=9),
        (17,),
    ),
    Mutant(
        "strides of dO taken for O's (portable)",
        f"{LAUNCH}:backward_launches",
        '(strides["dout"], strides["out"])',
        '(strides["dout"], strides["dout"])',
        runs(test_reliability.test_gradient_of_out_in_any_layout, "heads first", **HERE),
        (44,),
    ),
    Mutant(
        "strides of q taken for k's (portable)",
        f"{LAUNCH}:forward_launches",
        "(call.q, call.k, call.v, tensors.out)",
        "(call.q, call.q, call.v, tensors.out)",
        light("stored_mixed", seqlen_q=20, seqlen_k=33, batch=1),
        (45,),
    ),
    Mutant(
        "strides ignored (portable)",
        "kernels.protocol:strides_of",
        "tensor.stride()[:3]",
        'torch.empty(tensor.shape, device="meta").stride()[:3]',
        light("stored_expanded_heads", seqlen_q=20),
        (39, 40, 42, 46),
    ),
    Mutant(
        "two kernels' tiles disagree (portable)",
        f"{LAUNCH}:backward_launches",
        "-(-rows // DELTA_ROWS)",
        "max(1, rows // DELTA_ROWS)",
        light("one_key"),
        (52,),
    ),
    Mutant(
        "one tile of a pack too few (portable)",
        f"{LAUNCH}:_sizes",
        "layout.batch + 2",
        "layout.batch",
        light("packed_lengths_1_2_3"),
        (36, 37),
    ),
    Mutant(
        "sign of the scale forgotten (portable)",
        "kernels.portable.kernel:_form",
        "(problem.scale > 0) - (problem.scale < 0)",
        "1",
        light("scale_negative", seqlen_q=20),
    ),
    Mutant(
        "grid's second dimension (portable)",
        f"{LAUNCH}:Launch.start",
        "[(self.programs,)]",
        "[(1, self.programs)]",
        light("length_1"),
        (35,),
    ),
    Mutant(
        "refusal to launch printed (portable)",
        f"{LAUNCH}:Launch.start",
        "raise KernelFault",
        "print",
        runs(test_reliability.test_a_launch_that_fails_raises_in_the_call_that_failed),
        (36, 38),
    ),
)


# ---------------------------------------------------------------- the score


def score(mutants: tuple[Mutant, ...]) -> dict[str, tuple[str, str]]:
    """Of each mutant: what its check said without it and with it."""
    found = {}
    for mutant in mutants:
        before = false_alarm(mutant.check)  # the check on the library as it is
        with seeded(mutant):
            found[mutant.name] = before, noticed(mutant.check)
    return found


def told(found: dict[str, tuple[str, str]], record_property) -> None:
    """All caught, no false alarm, or a table that says which."""
    caught, alarms = (
        sum(bool(after) for _, after in found.values()),
        [name for name, (before, _) in found.items() if before],
    )
    record_property("mutants", [caught, len(found), len(alarms)])
    words = lambda before, after: (
        f"{'caught' if after else 'MISSED'}{', FALSE ALARM' * bool(before)}: {before or after}"
    )
    table = "\n".join(f"{name} {words(before, after)}" for name, (before, after) in found.items())
    assert caught == len(found) and not alarms, f"{caught} of {len(found)} caught, {len(alarms)} false alarms\n{table}"


@pytest.mark.parametrize("mutant", CPU, ids=lambda mutant: mutant.name)
def test_a_seeded_fault_is_noticed(mutant, record_property):
    told(score((mutant,)), record_property)


@pytest.mark.nightly
@pytest.mark.parametrize("half", [0, 1])
def test_faults_seeded_in_the_portable_kernels_are_noticed(half, record_property):
    pytest.importorskip("triton")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(half)], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told(json.loads(done.stdout.splitlines()[-1]), record_property)


def test_the_ledger_is_wide_and_its_names_are_distinct():
    names = [mutant.name for mutant in (*CPU, *PORTABLE)]
    assert len(names) >= 60 and len(set(names)) == len(names)


def test_a_mutant_that_does_not_fit_the_source_is_refused():
    with pytest.raises(AssertionError, match="is not once in"), seeded(CPU[0]._replace(old="what nobody wrote")):
        pass


if __name__ == "__main__":
    print(json.dumps(score(PORTABLE[int(sys.argv[1]) :: 2])))
