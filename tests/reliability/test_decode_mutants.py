"""Seeded faults of decode and append: each in the library's own code, one at a time; a named check must object, and
without it be content.

The machinery and its rules are those of test_mutants.py. The Triton kernels' are nightly, in a process of their own
under the interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

import strobe
from strobe.kernels.runtime.launch_cache import CACHE
from strobe.ops import decode as ops_decode
from strobe.problem.target import FAKES
from strobe.testing.decode import DECODES, assert_decode_as_good_as
from tests.decoding import judged, on, wide_sums
from tests.ops import test_append, test_decode, test_decode_bits
from tests.reliability.seeding import HERE, KERNEL, Check, Mutant, runs, seeded
from tests.reliability.test_mutants import score, told


def named(*names: str, family: str = "normal") -> Check:
    """Cases through the op, between guard bands."""
    return runs(_named, names, family)


def _named(names, family) -> None:
    for name in names:
        judged(DECODES[name].build("cpu", torch.float32, family, 3, KERNEL))


def split(*names: str, family: str = "normal") -> Check:
    """Cases in the splits of an H200."""
    return runs(_split, names, family)


def _split(names, family) -> None:
    for name in names:
        call = DECODES[name].build("cpu", torch.float32, family, 3, KERNEL)
        assert_decode_as_good_as(on(FAKES["H200"], call), call)


def within(test, *arguments, **keywords) -> None:
    """With nothing told or chosen before; what torch says of an index beyond its tensor is an objection too."""
    strobe.last_errors()
    CACHE.clear()
    try:
        test(*arguments, **keywords)
    except IndexError as beyond:
        raise AssertionError(str(beyond)) from beyond


def _fuzz() -> None:
    for seed in range(12):
        within(test_decode.fuzz, seed, 3 if KERNEL == "portable" else 20, **HERE)


def _bits() -> None:
    with wide_sums() if KERNEL == "portable" else nullcontext():
        for seed in (0, 9, 18) if KERNEL == "portable" else (0, 1, 3, 4, 6):
            within(test_decode_bits.alone_and_elsewhere, seed, most=60 if KERNEL == "portable" else 300, **HERE)


def _stray() -> None:
    """Ids just before and just after the pool: what is read there by mistake is a guard band, NaN."""
    judged(
        replace(DECODES["pages_lost"], lost=((0, 2, -1), (1, 2, 24))).build("cpu", torch.float32, "normal", 3, KERNEL)
    )


def _signs() -> None:
    """Key heads of a negative scale."""
    call = (
        DECODES["pages_fp8_window_sinks"]
        .build("cpu", torch.float32, "normal", 1, KERNEL)
        ._replace(k_scale=torch.tensor([0.5, -2.0]))
    )
    assert_decode_as_good_as(ops_decode.run(call), call)


def _windows() -> None:
    """Bits of short windows, in a batch whose keys lie between NaN."""
    lengths = (2100, 300, 33, 5) if KERNEL == "portable" else (257, 300, 3)
    with wide_sums() if KERNEL == "portable" else nullcontext():
        for tokens, left, right in ((1, 20, 0), (3, 100, 2)):
            within(test_decode_bits.windowed, left, right, tokens, lengths, tuple(HERE.values()), rows=20)


STRAY, SIGNS = runs(_stray), runs(_signs)
PROBE = runs(test_decode.test_indicator_probe_at_every_residue, 129, 16, **HERE)
FUZZ, BITS, WINDOWS = runs(_fuzz), runs(_bits), runs(_windows)
PLACES = runs(within, test_append.test_each_token_goes_to_its_place, 0, torch.float32, True, (10, True), **HERE)
ROWS = runs(within, test_append.test_each_token_goes_to_its_place, 1, torch.bfloat16, False, (6, False), **HERE)
STARTS = runs(within, test_decode.test_a_start_out_of_range_is_clamped_and_told, -2, 0, {}, **HERE)
LATE = runs(within, test_decode.test_a_start_out_of_range_is_clamped_and_told, 6, 5, {}, **HERE)
DECODE, APPEND, HELD = "kernels.cpu.decode", "kernels.cpu.append", "problem.cache"

CPU = (
    Mutant(
        "row one position late",
        f"{DECODE}:_sequence",
        "+ stop - q.shape[1]",
        "+ 1 + stop - q.shape[1]",
        named("dense_tokens_5"),
    ),
    Mutant(
        "window one key short", f"{DECODE}:_sequence", "row - call.left", "row - call.left + 1", named("dense_window")
    ),
    Mutant("right bound dropped", f"{DECODE}:_sequence", "row + call.right + 1", "row + 1", named("dense_window_both")),
    Mutant("last page dropped", f"{DECODE}:_keys", "-(-stop // size)", "stop // size", FUZZ),
    Mutant(
        "page ids one column late",
        f"{DECODE}:_keys",
        "call.page_table[b, pages]",
        "call.page_table[b, (pages + 1).clamp(max=call.page_table.shape[1] - 1)]",
        FUZZ,
    ),
    Mutant("first id beyond the pool", f"{DECODE}:_keys", "ids < call.k.shape[0]", "ids <= call.k.shape[0]", FUZZ),
    Mutant("negative ids from the end", f"{DECODE}:_keys", "(ids >= 0) & ", "", FUZZ),
    Mutant("tail of the last page", f"{DECODE}:_keys", "(position < stop)", "(position <= stop)", BITS),
    Mutant(
        "lost page not told", f"{DECODE}:_keys", "error_flags.report(call.q.device, error_flags.PAGES)", "pass", FUZZ
    ),
    Mutant(
        "left padding seen",
        f"{DECODE}:spans",
        "call.k_start.clamp(min=0), stop",
        "call.k_start.clamp(max=0), stop",
        named("dense_left_padded"),
    ),
    Mutant(
        "start not clamped",
        f"{DECODE}:spans",
        "torch.minimum(call.k_start.clamp(min=0), stop)",
        "call.k_start",
        STARTS,
    ),
    Mutant(
        "start beyond the length",
        f"{DECODE}:spans",
        "torch.minimum(call.k_start.clamp(min=0), stop)",
        "call.k_start.clamp(min=0)",
        LATE,
    ),
    Mutant(
        "tiles counted from the window", f"{DECODE}:_aligned", "start + (first - start) // block * block", "first", BITS
    ),
    Mutant(
        "a window's tiles are those of other calls",
        "kernels.cpu.kernel:_config",
        "problem.batch_invariant",
        "problem.batch_invariant and not 0 <= problem.left < 256",
        WINDOWS,
    ),
    Mutant("a window's keys before its tile's edge", f"{DECODE}:_sequence", "edge < first[0]", "False", WINDOWS),
    Mutant(
        "scale of the other tensor",
        f"{DECODE}:_both",
        "(call.v, call.v_scale)",
        "(call.v, call.k_scale)",
        named("dense_fp8"),
    ),
    Mutant("no scale", f"{DECODE}:_worth", "rows * scale[..., None]", "rows", named("dense_fp8")),
    Mutant(
        "key dropped at a page's end",
        f"{DECODE}:_keys",
        "torch.arange(size)).flatten()",
        "torch.arange(size).clamp(max=14)).flatten()",
        PROBE,
    ),
    Mutant(
        "append one position late",
        f"{APPEND}:_at_ends",
        "[batch] + rank",
        "[batch] + rank + 1",
        PLACES,
    ),
    Mutant(
        "append beyond the room",
        f"{APPEND}:_at_ends",
        "(position >= 0) & (position < problem.capacity)",
        "position < problem.capacity",
        ROWS,
    ),
    Mutant("append to a lost page", f"{APPEND}:run", "(page >= 0) & (page < call.k.shape[0])", "page >= 0", PLACES),
    Mutant("rotary backwards", f"{APPEND}:_turned", "a * cos - b * sin", "a * cos + b * sin", PLACES),
    Mutant(
        "rotary of the first position",
        f"{APPEND}:_turned",
        "position.clamp(max=known - 1)",
        "position.clamp(max=0)",
        ROWS,
    ),
    Mutant("rotary in halves for pairs", f"{APPEND}:_turned", "(-1, 2)).unbind(-1)", "(2, -1)).unbind(-2)", PLACES),
    Mutant(
        "NaN counts for the scale",
        f"{HELD}:_quantized",
        "torch.where(x.isfinite(), wide.abs(), 0.0)",
        "wide.abs()",
        runs(test_append.test_quantize_kv_keeps_within_half_a_step, "cpu"),
    ),
)

SPLIT, FORM = "kernels.portable.decode", "kernels.portable.decode_config"
KEYS = "kernels.device.split_kv"
WRITE = "kernels.portable.append"
PORTABLE = (
    Mutant(
        "causal one key late",
        f"{KEYS}:visible_keys",
        "position + window.right + 1)",
        "position + window.right + 2)",
        named("dense_tokens_5"),
    ),
    Mutant(
        "window one key short",
        f"{KEYS}:visible_keys",
        "tl.maximum(position - window.left, 0)",
        "tl.maximum(position - window.left + 1, 0)",
        named("dense_window"),
    ),
    Mutant(
        "window's tiles skipped",
        f"{KEYS}:keys_of_tile",
        "// traits.group - window.left,",
        "// traits.group - window.left + 2,",
        named("dense_window"),
    ),
    Mutant(
        "keys before the window read",
        f"{SPLIT}:attend",
        "(n >= keys.start) & (n < keys.stop)",
        "(n >= 0) & (n < keys.stop)",
        named("dense_window"),
    ),
    Mutant(
        "keys before the first one read",
        f"{SPLIT}:decode_kernel",
        "KeyRange(tl.maximum(start, of_tile.start)",
        "KeyRange(tl.maximum(start - 64 * (split == 0), of_tile.start - 64)",
        WINDOWS,
    ),
    Mutant(
        "causal tiles skipped",
        f"{KEYS}:keys_of_tile",
        "num_keys - tokens + last + window.right + 1)",
        "num_keys - tokens + last + window.right)",
        named("dense_tokens_5"),
    ),
    Mutant(
        "a split's last key",
        f"{SPLIT}:decode_kernel",
        "tl.minimum(start + shape.split_size, of_tile.stop)",
        "tl.minimum(start + shape.split_size - 1, of_tile.stop)",
        split("pages_of_16"),
    ),
    Mutant(
        "a split's neighbour",
        f"{SPLIT}:decode_kernel",
        "tl.minimum(start + shape.split_size, of_tile.stop)",
        "tl.minimum(start + shape.split_size + 1, of_tile.stop)",
        split("pages_of_16"),
    ),
    Mutant(
        "heads of another group",
        f"{SPLIT}:rows_of_tile",
        "head * traits.group + row % traits.group",
        "head + row % traits.group * 2",
        named("pages_of_16"),
    ),
    Mutant("id beyond the pool", f"{SPLIT}:locate_keys", "(page >= 0) & (page < cache.num_pages)", "page >= 0", STRAY),
    Mutant(
        "negative id", f"{SPLIT}:locate_keys", "(page >= 0) & (page < cache.num_pages)", "page < cache.num_pages", STRAY
    ),
    Mutant("lost page not hidden", f"{SPLIT}:locate_keys", "key_ok & inside", "key_ok", named("pages_lost")),
    Mutant(
        "tail of a page loaded",
        f"{SPLIT}:load_cached",
        "mask = key_ok[:, None]",
        "mask = (key_ok | True)[:, None]",
        named("pages_of_13"),
    ),
    Mutant("hidden scores count", f"{SPLIT}:attend", 'tl.where(seen, s, float("-inf"))', "s", named("dense_tokens_5")),
    Mutant("old sum not rescaled", f"{SPLIT}:attend", "o * rescale[:, None]", "o", named("dense")),
    Mutant(
        "scale's sign forgotten",
        f"{SPLIT}:fold_scale_signs",
        "tl.where(k_scale < 0, -1.0,",
        "tl.where(k_scale < 0, 1.0,",
        SIGNS,
    ),
    Mutant(
        "sink in every split",
        f"{SPLIT}:normalize_split",
        "tl.log2(row_sum))",
        "tl.log2(row_sum + 1.0))",
        split("dense_softcap_sinks"),
    ),
    Mutant(
        "shares unweighed",
        f"{SPLIT}:combine_splits",
        "tl.exp2(lse - base[None, :])",
        "tl.exp2(lse - lse)",
        split("pages_of_16"),
    ),
    Mutant(
        "empty shares read",
        f"{SPLIT}:combine_splits",
        '(lse != float("-inf"))[:, :, None] & ',
        "",
        split("dense_tokens_5"),
    ),
    Mutant(
        "joined one too early",
        f"{SPLIT}:decode_kernel",
        "== shape.num_splits - 1",
        "== shape.num_splits - 2",
        split("pages_of_16"),
    ),
    Mutant(
        "shares of another row",
        f"{SPLIT}:combine_splits",
        "[:, None] * n_rows + row[None, :]",
        "[:, None] * n_rows + (row // 2 * 2)[None, :]",
        split("pages_of_16"),
    ),
    Mutant(
        "start beyond the length",
        f"{SPLIT}:sequence_keys",
        "tl.minimum(tl.maximum(start, 0), stop)",
        "tl.maximum(start, 0)",
        LATE,
    ),
    Mutant("start not told", f"{SPLIT}:sequence_keys", "mask=first != start", "mask=first > stop", STARTS),
    Mutant(
        "splits of the batch's size",
        f"{FORM}:decode_config",
        "0 if problem.batch_invariant else target.sm_count",
        "target.sm_count",
        BITS,
    ),
    Mutant(
        "rotary backwards", f"{WRITE}:rotate", "x * cos + sign * other * sin", "x * cos - sign * other * sin", PLACES
    ),
    Mutant(
        "8 bits rounded half up",
        f"{WRITE}:e4m3_bits",
        "0x7FFFF + ((bits >> 20) & 1)",
        "0x80000",
        runs(test_append.test_every_8_bit_number_is_reached, **HERE),
    ),
)


@pytest.mark.parametrize("mutant", CPU, ids=lambda mutant: mutant.name)
def test_a_seeded_fault_is_noticed(mutant, record_property):
    told(score((mutant,)), record_property)


def test_every_fault_of_the_portable_kernels_fits_its_source():
    pytest.importorskip("triton")
    for mutant in PORTABLE:
        with seeded(mutant):
            pass


@pytest.mark.nightly
def test_faults_seeded_in_the_portable_kernels_are_noticed(record_property):
    pytest.importorskip("triton")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", __name__], capture_output=True, text=True, env=environment, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told(json.loads(done.stdout.splitlines()[-1]), record_property)


if __name__ == "__main__":
    print(json.dumps(score(PORTABLE)))
