"""Seeded faults: each is put into the library's own code, one at a time, and a named check must object, which without
it is content.

The score is the share that is noticed; it must be all, with no false alarm. Rows are those of docs/reliability.md that
a fault re-creates. The portable kernels are run by Triton's interpreter, in a process of its own: `TRITON_INTERPRET=1
python -m tests.reliability.test_mutants`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from strobe.testing import CASES, FAMILIES
from tests import test_contract
from tests.kernels.cpu import test_cpu
from tests.kernels.runtime import test_launch_cache
from tests.problem import test_masks
from tests.reliability import test_reliability
from tests.reliability.portable_mutants import PORTABLE
from tests.reliability.seeding import (
    CAUSAL_HALVES,
    EMPTY_ROWS,
    GOLDEN,
    HALVES,
    HERE,
    MANY_KEYS,
    MERGE_EMPTY,
    PARTIAL_BFLOAT16,
    PROBE,
    SMALL_TILES,
    Mutant,
    _guarded,
    _judge,
    false_alarm,
    judged,
    keyed,
    noticed,
    refused,
    runs,
    seeded,
)

# ---------------------------------------------------------------- the CPU's path, the core and the checks of arguments

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
        "problem.keywords:band",
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
        "problem.scale * unit",
        "1.01 * problem.scale * unit",
        judged("decode_260", families=FAMILIES, head_dim_v=40),
    ),
    Mutant(
        "softcap after the mask",
        f"{FORWARD}:_block",
        "hide(s, tile, -torch.inf)",
        "hide(s, tile, -scores.cap or -torch.inf)",
        judged("softcap"),
    ),
    Mutant(
        "softcap's slope forgotten",
        f"{BACKWARD}:_block",
        "if scores.cap and modified is None:",
        "if False:",
        judged("softcap"),
    ),
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
        "q.new_zeros(n, rows, width + -width % config.columns)",
        "q.new_full((n, rows, width + -width % config.columns), float(sinks is not None))",
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
        "if lost_nan(lse)",
        "if False",
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
        "ops.attention:sinks_gradient",
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
    # layouts, keys, checks of arguments
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
        f"{PIECES}:offsets_of",
        "after < value",
        "False",
        runs(test_contract.test_offsets_that_fall_or_overrun, [0, 5, 3, 9], **HERE),
        (13,),
    ),
    Mutant(
        "empty sequence refused",
        f"{PIECES}:offsets_of",
        "after < value",
        "after <= value",
        judged("packed_promised_one"),
        (7, 14),
    ),
    Mutant(
        "scale not in the key",
        "problem.call:Call.tensors_and_rest",
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
        "problem.call:Call.tensors_and_rest",
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


def test_every_fault_of_the_portable_kernels_fits_its_source():
    """A change of the source that a fault no longer fits shows on every commit; the faults themselves run nightly."""
    pytest.importorskip("triton")
    for mutant in PORTABLE:
        with seeded(mutant):
            pass


def test_a_mutant_that_does_not_fit_the_source_is_refused():
    with pytest.raises(AssertionError, match="is not once in"), seeded(CPU[0]._replace(old="what nobody wrote")):
        pass


if __name__ == "__main__":
    print(json.dumps(score(PORTABLE[int(sys.argv[1]) :: 2])))
