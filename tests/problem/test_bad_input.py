"""Bad calls, one a row: what each raises, and that its message names the argument, what it got, what was expected, the
remedy.

Run as a script (`python -O -m tests.problem.test_bad_input`) it checks the same table with assertions compiled away.
"""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from statistics import median
from time import perf_counter

import numpy as np
import pytest
import torch

import strobe
from strobe import InvalidProblem, Partial, UnsupportedProblem
from strobe.problem.call import Call
from strobe.problem.mask import Tile
from strobe.problem.target import FAKES
from strobe.selection.select import select
from tests.problem.bad_calls import (
    FLOAT32,
    IDS_Q,
    INT,
    LONG,
    MASKS,
    OFFSETS,
    OPTIONS,
    OUTPUTS,
    TENSORS,
    VARLEN,
    Bad,
    K,
    Q,
    V,
    _dense,
    _packed,
)

PART = Partial(torch.randn(2, 5, 4, 6), torch.randn(2, 4, 5))
ENTRIES = strobe.key_lengths(INT(3, 4))
SPARSE = [
    _dense("sparse sinks", InvalidProblem, "sinks", "sparse", sinks=torch.ones(4).to_sparse()),
    _packed("sparse offsets", InvalidProblem, "cu_seqlens_q", "sparse", cu_seqlens_q=OFFSETS.to_sparse()),
    Bad(
        "sparse key lengths", lambda: strobe.key_lengths(INT(3, 4).to_sparse()), InvalidProblem, "key_lengths", "sparse"
    ),
    Bad("sparse ids", lambda: strobe.documents(IDS_Q.to_sparse()), InvalidProblem, "documents ids_q", "sparse"),
    Bad("sparse keys to quantize", lambda: strobe.quantize_kv(K.to_sparse(), V), InvalidProblem, "k", "sparse"),
    Bad(
        "sparse sinks of a merge",
        lambda: strobe.with_sinks(PART, torch.ones(4).to_sparse()),
        InvalidProblem,
        "sinks",
        "sparse",
    ),
]
JOINED = [
    Bad(
        "lengths of other entries",
        lambda: strobe.key_lengths(INT(3)) & strobe.key_lengths(INT(2, 4)),
        InvalidProblem,
        "mask key_lengths",
        "[2]",
    ),
    Bad(
        "prefixes of other entries",
        lambda: strobe.prefix_causal(INT(3, 1, 2)) & strobe.prefix_causal(INT(2, 4)),
        InvalidProblem,
        "mask prefix",
        "[2]",
    ),
    Bad(
        "lengths of other devices",
        lambda: strobe.key_lengths(INT(3, 1)) & strobe.key_lengths(INT(2, 4).to("meta")),
        InvalidProblem,
        "mask key_lengths",
        "meta",
    ),
    Bad("a mask of fewer than no rows", lambda: strobe.causal().dense(-1, 2), InvalidProblem, "seqlen_q", "-1"),
    Bad("a mask on no device", lambda: strobe.causal().dense(2, 2, "nowhere"), InvalidProblem, "device", "nowhere"),
    Bad(
        "a tile of no batch entry",
        lambda: ENTRIES.tile_kind(Tile(0, 4, 0, 4, 2), 5, 7),
        InvalidProblem,
        "tile batch entry",
        "2",
    ),
    Bad(
        "a tile of an entry below 0 of no batch",
        lambda: strobe.causal().tile_kind(Tile(0, 4, 0, 4, -1), 5, 7),
        InvalidProblem,
        "tile batch entry",
        "-1",
    ),
    Bad(
        "a tile of an entry below 0",
        lambda: ENTRIES.tile_kind(Tile(0, 4, 0, 4, -1), 5, 7),
        InvalidProblem,
        "tile batch entry",
        "-1",
    ),
    Bad("a mask of so many keys", lambda: strobe.causal().dense(2, "all"), TypeError, "seqlen_k", "str"),
    Bad("a mask's left of a letter", lambda: strobe.Mask(left="a"), TypeError, "mask left", "str"),
    Bad("a mask's left of a half", lambda: strobe.Mask(left=2.5), TypeError, "mask left", "float"),
    Bad("a mask's right below 0", lambda: strobe.Mask(right=-1), InvalidProblem, "mask right", "-1"),
    Bad("a mask's prefix below 0", lambda: strobe.Mask(prefix=-3), InvalidProblem, "mask prefix", "-3"),
    Bad("a mask's lengths of an int", lambda: strobe.Mask(key_lengths=3), TypeError, "mask key_lengths", "int"),
    Bad("a mask's documents of ids", lambda: strobe.Mask(documents=IDS_Q), TypeError, "mask documents", "Tensor"),
    _dense("causal of numpy", TypeError, "causal", "numpy.bool", causal=np.bool_(True)),
]

REST = [
    Bad("merge of tuples", lambda: strobe.merge(tuple(PART), PART), TypeError, "a", "tuple"),
    Bad("merge with None", lambda: strobe.merge(PART, None), TypeError, "b", "NoneType"),
    Bad("merge of a tensor", lambda: strobe.merge(PART.out, PART), TypeError, "a", "Tensor"),
    Bad(
        "merge of a Partial without lse", lambda: strobe.merge(PART, Partial(PART.out, None)), TypeError, "b", "Partial"
    ),
    Bad(
        "merge of other queries",
        lambda: strobe.merge(PART, Partial(PART.out[:, :4], PART.lse[..., :4])),
        InvalidProblem,
        "b",
        "[2, 4, 4, 6]",
    ),
    Bad(
        "merge of other widths",
        lambda: strobe.merge(PART, Partial(PART.out[..., :4], PART.lse)),
        InvalidProblem,
        "b",
        "[2, 5, 4, 4]",
    ),
    Bad(
        "merge of a transposed lse",
        lambda: strobe.merge(PART, Partial(PART.out, PART.lse.mT)),
        InvalidProblem,
        "b",
        "[2, 5, 4]",
    ),
    Bad(
        "merge of other dtypes",
        lambda: strobe.merge(PART, Partial(PART.out.double(), PART.lse.double())),
        InvalidProblem,
        "b",
        "float64",
    ),
    Bad(
        "merge of ints",
        lambda: strobe.merge(Partial(*(t.int() for t in PART)), PART),
        InvalidProblem,
        "a",
        "torch.int32",
    ),
    Bad(
        "merge over devices",
        lambda: strobe.merge(PART, Partial(*(t.to("meta") for t in PART))),
        InvalidProblem,
        "b",
        "meta",
    ),
    Bad(
        "merge of flat tensors",
        lambda: strobe.merge(Partial(PART.lse[0], PART.lse[0]), PART),
        InvalidProblem,
        "a",
        "[4, 5]",
    ),
    Bad("with_sinks of a tensor", lambda: strobe.with_sinks(PART.out, torch.zeros(4)), TypeError, "partial", "Tensor"),
    Bad("with_sinks of a list", lambda: strobe.with_sinks(PART, [0.0] * 4), TypeError, "sinks", "list"),
    Bad("with_sinks None", lambda: strobe.with_sinks(PART, None), TypeError, "sinks", "NoneType"),
    Bad("with_sinks of another count", lambda: strobe.with_sinks(PART, torch.zeros(5)), InvalidProblem, "sinks", "[5]"),
    Bad("with_sinks of ints", lambda: strobe.with_sinks(PART, LONG(4)), InvalidProblem, "sinks", "torch.int64"),
    Bad(
        "with_sinks on another device",
        lambda: strobe.with_sinks(PART, torch.zeros(4, device="meta")),
        InvalidProblem,
        "sinks",
        "meta",
    ),
    Bad("warmup of a tensor", lambda: strobe.warmup([Q]), TypeError, "problems", "Tensor"),
    Bad("flex_attention of a list", lambda: strobe.flex_attention([1.0], K, V), TypeError, "query", "list"),
    Bad("flex_attention of packed keys", lambda: strobe.flex_attention(Q, K[0], V), InvalidProblem, "key", "[7, 2, 8]"),
    Bad(
        "flex_attention with a mask of strobe",
        lambda: strobe.flex_attention(Q, Q, Q, block_mask=strobe.causal()),
        TypeError,
        "block_mask",
        "Mask",
    ),
    Bad(
        "flex_attention with a function as block_mask",
        lambda: strobe.flex_attention(Q, Q, Q, block_mask=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx),
        TypeError,
        "block_mask",
        "function",
    ),
    Bad(
        "flex_attention with return_aux=True",
        lambda: strobe.flex_attention(Q, Q, Q, return_aux=True),
        TypeError,
        "return_aux",
        "bool",
    ),
    Bad(
        "warmup of one problem",
        lambda: strobe.warmup(strobe.explain(Q, K, V).problem),
        TypeError,
        "problems",
        "Problem",
    ),
    Bad("warmup of a number", lambda: strobe.warmup(3), TypeError, "problems", "int"),
    Bad("warmup on no device", lambda: strobe.warmup([], "nowhere"), InvalidProblem, "device", "nowhere"),
    Bad(
        "warmup without memory",
        lambda: strobe.warmup([strobe.explain(Q, K, V).problem], "meta"),
        InvalidProblem,
        "device",
        "meta",
    ),
    Bad("last_errors of no device", lambda: strobe.last_errors("nowhere"), InvalidProblem, "device", "nowhere"),
    Bad("last_errors of a float", lambda: strobe.last_errors(1.5), InvalidProblem, "device", "1.5"),
]

TABLE = TENSORS + OPTIONS + MASKS + OUTPUTS + VARLEN + FLOAT32 + SPARSE + JOINED + REST


def complaint(bad: Bad) -> str | None:
    """What is wrong with how a bad call was answered; None if nothing is. Raises nothing and asserts nothing: it runs
    under -O.
    """
    try:
        bad.call()
    except bad.error as error:
        message = str(error)
        if bad.error is not UnsupportedProblem and "unexpected keyword" not in message:
            if not re.match(rf"{re.escape(bad.argument)}: got .+, expected .+; .+", message):
                return f"{bad.name}: {message!r} does not say what {bad.argument} got, what was expected and the remedy"
            if bad.got not in message.split(", expected")[0]:
                return f"{bad.name}: {message!r} does not say that it got {bad.got}"
        elif bad.argument not in message:
            return f"{bad.name}: {message!r} does not name {bad.argument}"
        return None
    except Exception as error:
        return f"{bad.name}: raised {type(error).__name__}({error}), not {bad.error.__name__}"
    return f"{bad.name}: raised nothing"


def complaints() -> list[str]:
    """Of the whole table, with a good call after each bad one."""
    expected = strobe.attention(Q, K, V, causal=True)
    found = []
    for bad in TABLE:
        found.append(complaint(bad))
        if not torch.equal(strobe.attention(Q, K, V, causal=True), expected) or strobe.last_errors():
            found.append(f"{bad.name}: left a trace")
    return [one for one in found if one]


@pytest.mark.parametrize("bad", TABLE, ids=lambda bad: bad.name)
def test_a_bad_call_is_told_what_is_wrong(bad):
    assert complaint(bad) is None


def test_what_is_wrong_can_be_told_in_another_process():
    with pytest.raises(InvalidProblem) as caught:
        strobe.attention(Q, K[:, :, :1].expand(-1, -1, 3, -1), V)
    error = pickle.loads(pickle.dumps(caught.value))
    assert (type(error), str(error), error.argument) == (InvalidProblem, str(caught.value), caught.value.argument)


def test_scores_in_float64_have_its_range():
    q, k, v = Q.double(), K.double(), V.double()
    torch.testing.assert_close(
        strobe.attention(q, k, v, softcap=1e39), strobe.attention(q, k, v), rtol=1e-12, atol=1e-12
    )
    assert strobe.attention(q * 1e-39, k, v, scale=1e39).isfinite().all()
    assert (
        strobe.attention(Q * 1e-37, K, V, scale=1e37).isfinite().all()
        and strobe.attention(Q, K, V, softcap=1e37).isfinite().all()
    )


def test_the_table_is_wide_and_its_rows_are_distinct():
    assert len(TABLE) >= 120 and len({bad.name for bad in TABLE}) == len(TABLE)


def test_bad_calls_leave_no_trace():
    assert complaints() == []


@pytest.mark.nightly
def test_the_same_with_assertions_compiled_away():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-O", "-m", __name__], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(TABLE)} bad calls" in done.stdout


def test_a_bad_call_fails_in_under_a_millisecond():
    slowest = {}
    for bad in TABLE:
        times = []
        for _ in range(5):
            begin = perf_counter()
            complaint(bad)
            times.append(perf_counter() - begin)
        slowest[bad.name] = min(times)
    assert median(slowest.values()) < 1e-3
    assert {name: seconds for name, seconds in slowest.items() if seconds > 5e-3} == {}


def test_a_kernel_that_cannot_run_here_says_why_and_lists_the_others():
    with pytest.raises(UnsupportedProblem) as caught:
        strobe.attention(Q, K, V, kernel="portable")
    message = str(caught.value)
    assert "B=2 S_q=5 S_k=7 H_q=4 H_kv=2 D=8" in message and "portable.forward" in message
    assert 'cpu.forward        kernel="portable" was asked for' in message


def test_a_head_too_wide_for_a_gpu_is_refused_with_the_numbers():
    wide = torch.empty(1, 4, 2, 300, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedProblem, match=r"D=300(.*\n)*.*portable\.forward.*300"):
        select(strobe.Problem.from_call(Call(wide, wide, wide)), FAKES["H200"])


if __name__ == "__main__":
    wrong = complaints()
    print("\n".join([*wrong, f"{len(TABLE)} bad calls, {len(wrong)} complaints"]))
    sys.exit(bool(wrong))
