"""Run kernels of other projects in the simulator: which are right, which are reported, which are not supported.

    python -m tests.peers.simulate_corpus --path UNPACKED_WHEELS [--only fla/] [--results results/corpus.jsonl]
    python -m tests.peers.simulate_corpus --tutorials TRITON/python/tutorials

`--path` holds unpacked wheels or checkouts (liger-kernel, fla-core with einops, conch-triton-kernels, flag-gems with
sqlalchemy and GEMS_VENDOR=nvidia). Each case calls one operator for "cuda" and compares it with the library's own
reference, or with PyTorch. A tutorial is a file that runs unedited: its own assertions say whether it is right.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import tests.peers.corpus_sglang
import tests.peers.corpus_wheels  # noqa: F401  its cases
from strobe.sim import cuda_on_cpu, simulate
from tests.peers import tutorials
from tests.peers.corpus import CASES, Pair, case, drawn, get, with_gradients
from tools.proof.provenance import circumstances

LIMIT_S = 120  # of the processor, for a case, or for a call of a tutorial


# ---------------------------------------------------------------- Liger


def liger(name: str, path: str, theirs: Callable[..., Tensor], inputs: int, *options: Any) -> None:
    @case(f"liger/{name}")
    def run() -> Pair:
        function = get(f"liger_kernel.ops.{path}")
        ours = lambda *x: _first(function.apply(*x, *options))
        rows = [
            drawn(6, 96),
            *(drawn(96, seed=i) if name.endswith("norm") else drawn(6, 96, seed=i) for i in range(1, inputs)),
        ]
        return with_gradients(ours, theirs, *rows)


def _first(value: Any) -> Tensor:
    return value[0] if isinstance(value, (tuple, list)) else value


liger("rms_norm", "rms_norm.LigerRMSNormFunction", lambda x, w: functional.rms_norm(x, (96,), w, 1e-6), 2, 1e-6)
liger(
    "layer_norm",
    "layer_norm.LigerLayerNormFunction",
    lambda x, w, b: functional.layer_norm(x, (96,), w, b, 1e-6),
    3,
    1e-6,
)
liger("swiglu", "swiglu.LigerSiLUMulFunction", lambda a, b: functional.silu(a) * b, 2)
liger("geglu", "geglu.LigerGELUMulFunction", lambda a, b: functional.gelu(a, approximate="tanh") * b, 2)
liger("softmax", "softmax.LigerSoftmaxFunction", lambda x: x.softmax(-1), 1)
liger("relu_squared", "relu_squared.LigerReLUSquaredFunction", lambda x: functional.relu(x).square(), 1)


@case("liger/cross_entropy")
def _() -> Pair:
    target = torch.randint(0, 96, (6,), generator=torch.Generator().manual_seed(1)).to("cuda")
    function = get("liger_kernel.ops.cross_entropy.LigerCrossEntropyFunction")
    losses, gradients = [], []
    for loss in (lambda x: function.apply(x, target, None)[0], lambda x: functional.cross_entropy(x, target)):
        leaf = drawn(6, 96).requires_grad_()
        value = loss(leaf * 1.0)
        value.backward()
        losses.append(value), gradients.append(leaf.grad)
    return [losses[0], gradients[0]], [losses[1], gradients[1]]


@case("liger/tvd")
def _() -> Pair:
    p, q = drawn(6, 96).softmax(-1), drawn(6, 96, seed=1).softmax(-1)
    ours = get("liger_kernel.ops.tvd.LigerTVDLossFunction").apply(p, q, None, "batchmean")
    return ours, (p - q).abs().sum() / 2 / 6


@case("liger/group_norm")
def _() -> Pair:
    function = get("liger_kernel.ops.group_norm.LigerGroupNormFunction")
    ours = lambda x, w, b: _first(function.apply(x, w, b, 8, 2, 1e-6))
    theirs = lambda x, w, b: functional.group_norm(x, 2, w, b, 1e-6)
    return with_gradients(ours, theirs, drawn(2, 8, 32), drawn(8, seed=1), drawn(8, seed=2))


# ---------------------------------------------------------------- flash-linear-attention


def heads(count: int = 3, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [drawn(1, 64, 2, 32, seed=seed, dtype=dtype) for seed in range(count)]


def fla(name: str, ours: str, naive: str, inputs: Callable[[], list[Tensor]], **options: Any) -> None:
    """`inputs` are q, k, v, then the gate g and beta if there are any."""

    @case(f"fla/{name}")
    def run() -> Pair:
        *given, last = inputs()
        if len(given) == 4:  # the order of gate and beta differs between them
            options.update(g=given.pop(), beta=last)
        else:
            given.append(last)
        reference = get(f"fla.ops.{naive}")(*given, **options)
        return _first(get(f"fla.ops.{ours}")(*given, **options)), _first(reference)


def _gated(scalar: bool) -> list[Tensor]:
    gate = drawn(1, 64, 2, seed=3) if scalar else drawn(1, 64, 2, 32, seed=3)
    return [*heads(), functional.logsigmoid(gate)]


def _delta() -> list[Tensor]:
    q, k, v = heads(dtype=torch.bfloat16)
    k = functional.normalize(k.float(), dim=-1).bfloat16()
    return [q, k, v, functional.logsigmoid(drawn(1, 64, 2, seed=3)), drawn(1, 64, 2, seed=4).sigmoid().bfloat16()]


fla(
    "chunk_linear_attn",
    "linear_attn.chunk_linear_attn",
    "linear_attn.naive.naive_chunk_linear_attn",
    heads,
    normalize=False,
)
fla(
    "fused_recurrent_linear_attn",
    "linear_attn.fused_recurrent_linear_attn",
    "linear_attn.naive.naive_chunk_linear_attn",
    heads,
    normalize=False,
)
fla("chunk_gla", "gla.chunk_gla", "gla.naive.naive_recurrent_gla", lambda: _gated(False))
fla("fused_recurrent_gla", "gla.fused_recurrent_gla", "gla.naive.naive_recurrent_gla", lambda: _gated(False))
fla(
    "chunk_simple_gla",
    "simple_gla.chunk_simple_gla",
    "simple_gla.naive.naive_recurrent_simple_gla",
    lambda: _gated(True),
)
fla(
    "fused_recurrent_simple_gla",
    "simple_gla.fused_recurrent_simple_gla",
    "simple_gla.naive.naive_recurrent_simple_gla",
    lambda: _gated(True),
)
fla(
    "chunk_gated_delta_rule",
    "gated_delta_rule.chunk_gated_delta_rule",
    "gated_delta_rule.naive_recurrent_gated_delta_rule",
    _delta,
)
fla(
    "fused_recurrent_gated_delta_rule",
    "gated_delta_rule.fused_recurrent_gated_delta_rule",
    "gated_delta_rule.naive_recurrent_gated_delta_rule",
    _delta,
)
fla("parallel_attn", "attn.parallel_attn", "attn.naive.naive_parallel_attn", heads)
fla(
    "parallel_forgetting_attn",
    "forgetting_attn.parallel_forgetting_attn",
    "forgetting_attn.naive.naive_forgetting_attn",
    lambda: _gated(True),
)
fla(
    "chunk_kda",
    "kda.chunk_kda",
    "kda.naive.naive_recurrent_kda",
    lambda: [*_delta()[:3], functional.logsigmoid(drawn(1, 64, 2, 32, seed=3)), _delta()[4]],
)


# ---------------------------------------------------------------- conch


@case("conch/silu_and_mul")
def _() -> Pair:
    x = drawn(6, 128)
    return get("conch.ops.activation.silu_and_mul.silu_and_mul")(x), functional.silu(x[:, :64]) * x[:, 64:]


@case("conch/rms_norm")
def _() -> Pair:
    x, w = drawn(6, 128), drawn(128, seed=1)
    return get("conch.ops.normalization.rms_norm.rms_norm")(x, w, 1e-6), functional.rms_norm(x, (128,), w, 1e-6)


@case("conch/gelu_tanh_and_mul")
def _() -> Pair:
    x = drawn(6, 128)
    ours = get("conch.ops.activation.gelu_tanh_and_mul.gelu_tanh_and_mul")(x)
    return ours, functional.gelu(x[:, :64], approximate="tanh") * x[:, 64:]


@case("conch/paged_attention")
def _() -> Pair:
    q, cache_k, cache_v = drawn(2, 4, 64), drawn(8, 16, 4, 64, seed=1), drawn(8, 16, 4, 64, seed=2)
    table = torch.tensor([[3, 1, 6], [0, 7, 2]], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([40, 33], dtype=torch.int32, device="cuda")
    ours = get("conch.ops.attention.paged_attention.paged_attention")(q, cache_k, cache_v, table, lengths)
    rows = []
    for i, length in enumerate(lengths.tolist()):
        k, v = (cache[table[i].long()].reshape(-1, 4, 64)[:length] for cache in (cache_k, cache_v))
        weights = (torch.einsum("hd,nhd->hn", q[i], k) / 8).softmax(-1)
        rows.append(torch.einsum("hn,nhd->hd", weights, v))
    return ours, torch.stack(rows)


# ---------------------------------------------------------------- FlagGems


def gems(name: str, theirs: Callable[..., Any], *arguments: Callable[[], Any]) -> None:
    @case(f"gems/{name}")
    def run() -> Pair:
        given = [one() for one in arguments]
        ours, reference = get(f"flag_gems.ops.{name}")(*given), theirs(*given)
        return ours if isinstance(reference, tuple) else _first(ours), reference


rows, more = lambda: drawn(6, 100), lambda: drawn(6, 100, seed=1)
gems("add", torch.add, rows, more)
gems("gelu", functional.gelu, rows)
gems("mm", torch.mm, lambda: drawn(48, 32), lambda: drawn(32, 64, seed=1))
gems("bmm", torch.bmm, lambda: drawn(2, 32, 32), lambda: drawn(2, 32, 48, seed=1))
gems("sum", torch.sum, rows)
gems("mean", torch.mean, rows)
gems("max", torch.max, rows)
gems("argmax", torch.argmax, rows)
gems("cumsum", torch.cumsum, rows, lambda: 1)
gems("softmax", torch.softmax, rows, lambda: 1)
gems("log_softmax", torch.log_softmax, rows, lambda: 1)
gems(
    "layer_norm",
    lambda x, shape, w, b: functional.layer_norm(x, shape, w, b),
    rows,
    lambda: [100],
    lambda: drawn(100, seed=2),
    lambda: drawn(100, seed=3),
)
gems("embedding", lambda w, i: w[i], rows, lambda: torch.tensor([0, 3, 3, 5], device="cuda"))
gems("sigmoid", torch.sigmoid, rows)
gems("where_self", torch.where, lambda: drawn(6, 100) > 0, rows, more)
gems("topk", torch.topk, rows, lambda: 5)
gems("sort", torch.sort, rows)
gems("index_select", torch.index_select, rows, lambda: 0, lambda: torch.tensor([1, 4], device="cuda"))


def gems_by_name() -> Iterator[tuple[str, Callable[[], Pair]]]:
    """Every operator of FlagGems whose name is a function of torch that takes one or two matrices: chosen by rule."""
    for name in sorted(vars(importlib.import_module("flag_gems.ops"))):
        theirs, ours = getattr(torch, name, None), get(f"flag_gems.ops.{name}")
        if name.startswith("_") or name.endswith("_") or not callable(theirs) or not callable(ours):
            continue
        if name.startswith(("rand", "bernoulli", "normal", "empty", "dropout", "native")):
            continue  # random, or without numbers of its own
        for given in ([rows()], [rows(), more()], [more().abs() + 0.1], [rows().long(), more().long()]):
            try:
                theirs(*given)
            except (TypeError, RuntimeError, IndexError, ValueError, NotImplementedError):
                continue
            yield f"gems_by_name/{name}", lambda ours=ours, theirs=theirs, given=given: (ours(*given), theirs(*given))
            break


# ---------------------------------------------------------------- triton_kernels


@case("triton_kernels/matmul")
def _() -> Pair:
    a, b = drawn(64, 96, dtype=torch.float16), drawn(96, 128, seed=1, dtype=torch.float16)
    return get("triton_kernels.matmul.matmul")(a, b, None), a @ b


@case("triton_kernels/matmul_with_bias")
def _() -> Pair:
    a, b = drawn(64, 96, dtype=torch.bfloat16), drawn(96, 128, seed=1, dtype=torch.bfloat16)
    bias = drawn(128, seed=2)
    return get("triton_kernels.matmul.matmul")(a, b, bias), a.float() @ b.float() + bias


@case("triton_kernels/reduce")
def _() -> Pair:
    x = drawn(4, 8, 64)
    return _first(get("triton_kernels.reduce.reduce")(x, dim=1)), x.sum(1)


@case("triton_kernels/reduce_masked")
def _() -> Pair:
    x, mask = drawn(4, 8, 64), drawn(4, 8, 64, seed=1) > 0
    return _first(get("triton_kernels.reduce.reduce")(x, dim=1, mask=mask)), (x * mask).sum(1)


@case("triton_kernels/topk")
def _() -> Pair:
    x = drawn(32, 64)
    found = get("triton_kernels.topk.topk")(x, 4, apply_softmax=False)
    vals = found.vals if hasattr(found, "vals") else found[0]
    return vals.sort(-1)[0], x.topk(4).values.sort(-1)[0]


@case("triton_kernels/swiglu")
def _() -> Pair:
    x = drawn(32, 128)
    config = get("triton_kernels.swiglu.PrecisionConfig")(limit=None)
    gate, linear = x[:, ::2], x[:, 1::2]
    return get("triton_kernels.swiglu.swiglu")(x, 1.0, config), gate * gate.sigmoid() * (linear + 1)


# ---------------------------------------------------------------- the runner


def tensors(value: Any) -> Iterator[Tensor]:
    for one in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(one, Tensor):
            yield one.detach().double()
        elif isinstance(one, bool):
            yield torch.tensor(float(one), dtype=torch.float64)


def error(pair: Pair) -> float:
    """The largest difference, relative to the largest number of the reference. NaN and infinity equal themselves. It is
    infinite if shapes differ.
    """
    gaps = []
    for ours, theirs in zip(tensors(pair[0]), tensors(pair[1]), strict=True):
        if ours.shape != theirs.shape:
            return float("inf")
        same = (ours == theirs) | (ours.isnan() & theirs.isnan())
        gap = torch.where(same, 0.0, (ours - theirs).abs().nan_to_num(torch.inf))
        largest = torch.where(theirs.isfinite(), theirs, 0.0).abs().max()
        gaps.append(float(gap.max() / largest.clamp(min=1e-30)))
    return max(gaps)


class TooLong(Exception):
    """A case exceeds its time."""


def _alarm(*_: object) -> None:
    raise TooLong(f"more than {LIMIT_S} s")


def run(name: str, function: Callable[[], Pair | int | None], target: str, tolerance: float) -> dict[str, Any]:
    """One row: what came of a case."""
    row: dict[str, Any] = {"case": name, "target": target, "outcome": "right", "error": None, "reports": []}
    torch.manual_seed(0)  # of inputs that the project draws itself
    begin = time.process_time()
    signal.signal(signal.SIGVTALRM, _alarm)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    try:
        with simulate(target, "pct", check=False) as found:
            pair = function()
        if isinstance(pair, int):
            row["calls"], pair = pair, None
        row["error"] = None if pair is None else error(pair)
        if row["error"] is not None and not row["error"] <= tolerance:
            row["outcome"] = "wrong"
    except NotImplementedError as missing:
        row.update(outcome="unsupported", why=str(missing)[:200])
    except TooLong as slow:
        row.update(outcome="too long", why=str(slow))
    except Exception as failure:  # of somebody else's code: the table says which, and whether it launched a kernel
        outcome = "failed" if found.launches else "refused"
        row.update(outcome=outcome, why=f"{type(failure).__name__}: {failure}"[:200])
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    if row["outcome"] in ("right", "wrong", "failed"):
        row["reports"] = [str(report)[:300] for report in found.reports]
    return row | {"seconds": round(time.process_time() - begin, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.peers.simulate_corpus", description=__doc__.splitlines()[0])
    parser.add_argument("--path", type=Path, help="a folder of unpacked wheels or checkouts")
    parser.add_argument("--tutorials", type=Path, help="a folder of files that are run as they are")
    parser.add_argument("--by-rule", action="store_true", help="also each operator of FlagGems that a rule chooses")
    parser.add_argument("--calls", type=int, help="at most this many calls of a tutorial's test function (all)")
    parser.add_argument("--only", default="", help="names of cases begin with this")
    parser.add_argument("--target", default="sm_90")
    parser.add_argument("--tolerance", type=float, default=2e-2, help="relative: products of float32 are TF32")
    parser.add_argument("--results", type=Path, help="write the rows here")
    parser.add_argument("--append", action="store_true", help="keep the rows of other cases that are there")
    a = parser.parse_args()
    if a.path:
        sys.path.insert(0, str(a.path))
    cases: dict[str, Callable[[], Any]] = dict(CASES) if a.path else {}
    if a.path and a.by_rule:
        with cuda_on_cpu(a.target):
            cases |= dict(gems_by_name())
    rows = []
    with cuda_on_cpu(a.target):
        of_tutorials = tutorials.cases(a.tutorials, LIMIT_S, a.only, a.calls) if a.tutorials else ()
        for name, function in itertools.chain(cases.items(), of_tutorials):
            if name.startswith(a.only):
                rows.append(run(name, function, a.target, a.tolerance))
                print(json.dumps(rows[-1]), flush=True)
    if a.results:
        where, key = circumstances(), lambda row: (row["case"], row["target"])
        done = {key(row) for row in rows}
        before = a.results.read_text().splitlines() if a.append and a.results.is_file() else []
        kept = [line + "\n" for line in before if key(json.loads(line)) not in done]
        a.results.write_text("".join([*kept, *(json.dumps(row | where) + "\n" for row in rows)]))
    print(dict(Counter(row["outcome"] for row in rows)), sum(bool(row["reports"]) for row in rows), "with reports")
    return 0 if all(row["outcome"] == "right" and not row["reports"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
