"""PyTorch's own tests of FlexAttention through `strobe.flex_attention`: how many pass, are refused by name, or fail.

    python tests/peers/flex.py FILE                              FILE: test/inductor/test_flex_attention.py of PyTorch
    python tests/peers/flex.py FILE -k bias --show               some tests, with the traceback of each that fails
    python tests/peers/flex.py FILE --record results/peers_flex.jsonl --source pytorch@v2.6.0

The tests compare a compiled flex_attention with the eager one. Here `torch.compile` returns the function itself, and
while such a function runs, flex_attention is strobe's. The eager one stays PyTorch's, with its dense reference in the
place of its operator, which has no gradients on CPUs. "cuda" is the CPU (cuda_on_cpu.py), and the module's S of 2,048
positions becomes 256 so that the dense reference takes seconds.
Every failure must be covered by EXPLAINED, which says its cause; any other makes the exit code 1.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import signal
import sys
import time
import traceback
import types
import unittest
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import cuda_on_cpu  # noqa: E402
import torch  # noqa: E402
from outcome import OutOfTime, normalised, outcome  # noqa: E402

import strobe  # noqa: E402
from tools.proof.provenance import circumstances  # noqa: E402

OUTCOMES = ("passed", "refused", "failed", "skipped", "over a limit")

# (test, message): why a failure is none of strobe's, both as patterns of fnmatch
_GOLD = (
    "The test's float64 result adds the gradient of a 16-bit bias in 16 bits. Against a float64 bias strobe's rounding "
    "error is 6 to 360 times smaller than that result's own."
)
_ZERO = "The exact gradient is 0, or the reference has no error at all: the figures are float32's rounding, below 1e-6."
_COMPILER = "The test counts or reads what torch.compile compiled; strobe runs eagerly here."
_LAYOUT = "The output is [B, S, H, D] in memory, as strobe's kernels write it, and not in the order of query's strides."
_ONE_DEVICE = "The test needs two devices; here both are the CPU."
_RUNS = "The test expects an error of PyTorch's lowering; strobe runs the function."
_NEWER = "PyTorch itself, newer than the file, behaves otherwise."
_REFERENCE = "PyTorch's dense reference, which takes the place of its operator, does not check this or fails itself."
_WORDS = "strobe refuses the call in other words than the test's."
_LENGTH = "The test has figures of S = 2,048."
EXPLAINED: dict[tuple[str, str], str] = {
    ("TestLearnableBiases.test_relative_1d_bias*float16*", "*Tensor: *bias*"): _GOLD,
    ("TestLearnableBiases.test_local_window_bias*float16*", "*Tensor: grad_bias*"): _GOLD,
    ("TestLearnableBiases.test_*_bias*", "*e-07 not less than or equal to *e-07*"): _ZERO,
    ("*", "*Grad_Query Compiled error *e-08 is greater than ref error 0.0 by*"): _ZERO,
    ("*dynamic*", "*Scalars are not equal*"): _COMPILER,
    ("*_no_recompile", "*Scalars are not equal*"): _COMPILER,
    ("*test_fw_bw_graph_correctness", "*Scalars are not equal*"): _COMPILER,
    ("*test_symbol_closure_in_score_mod", "*Scalars are not equal*"): _COMPILER,
    ("*test_multiple_mask_calls", "*"): _COMPILER,
    ("*", "IndexError: list index out of range*"): _COMPILER,
    ("*test_flex_attention_stride_ordering*", "*Scalars are not equal*"): _LAYOUT,
    ("*device*", "*"): _ONE_DEVICE,
    ("*test_cant_lower_error_message", "*not raised*"): _RUNS,
    ("*test_invalid_block_size", "*not raised*"): _RUNS,
    ("*test_captured_reduction*", "the test expects a failure"): _RUNS,
    ("*test_symmetric_bias*", "*LoweringException not raised*"): _RUNS,
    ("*test_block_mask_vs_sequence_lengths*", "*block_mask: got one of*"): _WORDS,
    ("TestBlockMask.*", "*"): _NEWER,
    ("*test_subgraph_respect_decompostion*", "*"): _NEWER,
    ("*test_mixed_dtypes_fails", "*not raised*"): _REFERENCE,
    ("*test_comparison_vs_sdpa_with_learnable_bias", "*"): _REFERENCE,
    ("TestPagedAttention.test_update", "*"): _NEWER,
    ("*test_mask_mod_combiners", "*"): _LENGTH,
}


class Compiled:
    """Whether a function that the test has compiled is running: flex_attention is strobe's then."""

    depth = 0

    @classmethod
    def compile(cls, function=None, **_options):
        """torch.compile for the tests."""
        if function is None:
            return cls.compile

        def compiled(*arguments, **keywords):
            cls.depth += 1
            try:
                return function(*arguments, **keywords)
            finally:
                cls.depth -= 1

        return compiled


def install() -> None:
    """Make "cuda" the CPU, torch.compile the identity, and flex_attention strobe's in what the tests compile."""
    from torch._higher_order_ops.flex_attention import math_attention
    from torch.nn.attention import flex_attention as flex
    from torch.nn.attention.experimental._paged_attention import PagedAttention

    own, assign = flex.flex_attention, PagedAttention.assign

    def chosen(*arguments, **keywords):
        if Compiled.depth:
            return strobe.flex_attention(*arguments, **keywords)
        return own(*arguments, **keywords)

    cuda_on_cpu.install((8, 0))
    torch.compile = Compiled.compile
    torch.nn.Module.compile = lambda self, **_options: None
    flex.flex_attention = chosen
    flex.flex_attention_hop = lambda *arguments, **keywords: math_attention(*arguments, **keywords)
    flex._validate_device = lambda *_: None  # that a CPU's tensors need no gradient
    # files of before PyTorch 2.7 give positions [S] for all entries
    PagedAttention.assign = lambda self, batch, at, *rest: assign(
        self, batch, at.expand(len(batch), -1) if at.dim() == 1 else at, *rest
    )


def loaded(file: Path, seqlen: int) -> types.ModuleType:
    """The tests as a module. While it is imported, a GPU seems to be there."""
    import torch.testing._internal.common_cuda as common_cuda
    import torch.testing._internal.common_device_type as common
    import torch.utils._triton as triton_here

    always = lambda test: test
    vars(common).update(flex_attention_supported_platform=always)
    vars(common_cuda).update(PLATFORM_SUPPORTS_BF16=True)
    before = torch.cuda.is_available, triton_here.has_triton
    torch.cuda.is_available, triton_here.has_triton = (lambda: True), (lambda: True)
    module = types.ModuleType("flex_tests")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module
    try:
        text = file.read_text().replace("\nS = 2048\n", f"\nS = {seqlen}\n")
        exec(compile(text, str(file), "exec"), vars(module))
    finally:
        torch.cuda.is_available, triton_here.has_triton = before
    return module


class Result(unittest.TestResult):
    """Outcomes by test function."""

    def __init__(self, show: bool) -> None:
        super().__init__()
        self.show, self.started, self.rows = show, 0.0, {}

    def startTest(self, test) -> None:
        super().startTest(test)
        self.started = time.perf_counter()

    def add(self, test, kind: str, message: str = "") -> None:
        name = f"{type(test).__name__}.{test._testMethodName}"
        seconds = time.perf_counter() - self.started
        self.rows[name] = (kind, message)
        print(f"{kind:<12} {seconds:6.1f} s  {name}  {message.splitlines()[0][:150] if message else ''}", flush=True)

    def addSuccess(self, test) -> None:
        self.add(test, "passed")

    def addExpectedFailure(self, test, err) -> None:
        self.add(test, "passed")

    def addUnexpectedSuccess(self, test) -> None:
        self.add(test, "failed", "the test expects a failure")

    def addSkip(self, test, reason) -> None:
        self.add(test, "skipped", reason)

    def addError(self, test, err) -> None:
        error = err[1]
        frames = traceback.extract_tb(err[2])
        kind, words = outcome(error, Path(frames[-1].filename) if frames else HERE)
        self.add(test, kind, words)
        if self.show and kind != "refused":
            traceback.print_exception(error)

    addFailure = addError


class Limited(unittest.TestSuite):
    """Runs each test within a number of seconds."""

    limit = 60.0

    def run(self, result, debug=False):
        for test in self:
            signal.signal(signal.SIGALRM, _ring)
            signal.setitimer(signal.ITIMER_REAL, self.limit)
            Compiled.depth = 0
            try:
                test(result)
            except OutOfTime as late:
                result.addError(test, (OutOfTime, late, None))
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        return result


def _ring(*_):
    raise OutOfTime


def cases(suite) -> Iterator[unittest.TestCase]:
    for one in suite:
        if isinstance(one, unittest.TestSuite):
            yield from cases(one)
        else:
            yield one


def explained(test: str, message: str) -> str | None:
    return next(
        (
            why
            for (name, words), why in EXPLAINED.items()
            if fnmatch.fnmatch(test, name) and fnmatch.fnmatch(message, words)
        ),
        None,
    )


def rows_of(found: dict[str, tuple[str, str]]) -> list[dict]:
    """A row for each class of tests: a count for each outcome, and messages by how often they came."""
    rows = []
    for name in dict.fromkeys(test.partition(".")[0] for test in found):
        own = {test: one for test, one in found.items() if test.partition(".")[0] == name}
        counts = {kind: sum(one[0] == kind for one in own.values()) for kind in OUTCOMES}
        messages = {
            kind: dict(Counter(normalised(words) for one, words in own.values() if one == kind))
            for kind in OUTCOMES[1:]
        }
        causes = Counter(explained(test, words) or f"not explained: {test}" for test, (kind, words) in own.items()
                         if kind == "failed")  # fmt: skip
        rows.append({"suite": "flex_attention", "class": name, "run": len(own), **counts,
                     "messages": messages, "causes": dict(causes)})  # fmt: skip
    return rows


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("flex.py", description="Run PyTorch's FlexAttention tests on strobe.")
    parser.add_argument("file", type=Path, metavar="FILE", help="test/inductor/test_flex_attention.py")
    parser.add_argument("-k", default="", metavar="WORD", help="only tests with this in their name")
    parser.add_argument("--seqlen", type=int, default=256, metavar="S", help="the module's S (256)")
    parser.add_argument("--limit", type=float, default=60, metavar="S", help="seconds a test may run (60)")
    parser.add_argument("--show", action="store_true", help="the traceback of each failure")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write rows there")
    parser.add_argument("--events", type=Path, metavar="FILE", help="write each test's outcome and message there")
    parser.add_argument("--again", type=Path, metavar="FILE", help="only tests that are not among these events")
    parser.add_argument("--source", default="", metavar="NAME", help="what the file is called in rows")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    a = arguments(argv)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = "/tmp/strobe_flex_peers"
    warnings.simplefilter("ignore")
    install()
    module = loaded(a.file.resolve(), a.seqlen)
    suite, result = Limited(), Result(a.show)
    suite.limit = a.limit
    known = json.loads(a.again.read_text()) if a.again else {}
    result.rows |= {test: tuple(one) for test, one in known.items()}
    for test in cases(unittest.defaultTestLoader.loadTestsFromModule(module)):
        name = f"{type(test).__name__}.{test._testMethodName}"
        if a.k in name and name not in result.rows:
            suite.addTest(test)
    suite.run(result)
    if a.events:
        a.events.write_text(json.dumps(result.rows))
    rows = rows_of(result.rows)
    for row in rows:
        print(row["class"], *(f"{kind} {row[kind]}" for kind in OUTCOMES), sep="  ")
    if a.record:
        about = {"source": a.source or str(a.file), "seqlen": a.seqlen, "device": "CPU"} | circumstances()
        a.record.parent.mkdir(parents=True, exist_ok=True)
        a.record.write_text("".join(json.dumps(row | about) + "\n" for row in rows))
    open_causes = [cause for row in rows for cause in row["causes"] if cause.startswith("not explained")]
    print(*open_causes, sep="\n")
    return 1 if open_causes else 0


if __name__ == "__main__":
    sys.exit(main())
