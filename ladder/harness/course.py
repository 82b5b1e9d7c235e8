"""The ladder as a course: what is new on each rung, the lines that matter, the measured gain, and an exercise.

LESSONS names lines by function and by how they begin. `excerpt` takes them from the rung's file, so that a page never
shows a copy.
"""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Iterable
from typing import Any, NamedTuple

from . import FILES, Row

MEASURED = 8192  # queries and keys of the measured gain


class Lines(NamedTuple):
    """Consecutive lines of a function: from the first that begins with `first` to the next that begins with `last`.

    after: how a line begins behind which the search starts. "" is the function's first or last line.
    """

    function: str
    first: str = ""
    last: str = ""
    after: str = ""


class Lesson(NamedTuple):
    new: str  # what is new beside the rung below
    lines: tuple[Lines, ...]
    exercise: str  # one sentence


LESSONS = {
    "k1": Lesson(
        "Nothing yet: three kernels compute softmax(scale q k^T) v as the formula says it. The scores [S_q, S_k] of each head "
        "are written to global memory and read back, and CUDA cores do all products.",
        (
            Lines("scores_kernel", "for d in", "tile = tile * scale"),
            Lines("softmax_kernel", "largest =", "row_sum ="),
            Lines("output_kernel", "for n in", "tile +="),
        ),
        "Compute the length at which the float32 scores of 16 heads fill a GPU of 80 GB.",
    ),
    "k2": Lesson(
        "The online softmax: a program keeps 64 queries and reads the keys tile by tile. It carries each row's maximum, sum and "
        "output, and rescales the sum and the output when the maximum grows. So scores stay on the SM.",
        (
            Lines("softmax_step", "new_max =", "return"),
            Lines("attend_kernel", "for n_start in", "o = outer_products(p_smem"),
        ),
        "Delete the line that multiplies `o` by `rescale`, run `python -m ladder k2`, and explain why `out` is wrong and `lse` "
        "is still right.",
    ),
    "t": Lesson(
        "The same algorithm in Triton: `tl.dot` uses tensor cores, and the compiler chooses layouts, shared memory and copies. "
        "A causal program stops at its diagonal, and autotuning picks the tile sizes.",
        (Lines("minimal_kernel", "for n_start in", "row_max = new_max"),),
        "Compute how many tiles of 64 keys the 64 query tiles of 8,192 causal queries visit with and without the stop at the "
        "diagonal, and compare the ratio with the measured causal and dense times.",
    ),
    "a": Lesson(
        "Tensor cores and asynchronous copies by hand, as on an A100: mma.sync multiplies fragments in registers, ldmatrix "
        "loads them from swizzled shared memory, and cp.async copies the next tile under this one's products.",
        (
            Lines("attend_kernel", "for i in range(blocks)", "stage = stage ^ 1"),
            Lines("copy_tile", "cp_async_load", "cp_async_commit"),
            Lines("add_product", "p_reg =", "return"),
        ),
        "Let the first `cp_async_wait` of the loop wait for one group less, `cp_async_wait(3)`, and read the race that "
        "`python -m ladder a` reports.",
    ),
    "k3_1": Lesson(
        "TMA: one thread asks for a whole tile, and the copy engine computes addresses and swizzles. An mbarrier counts the "
        "bytes that arrive; its phase says whether the tile is there.",
        (
            Lines("copy_tile", "entry, head", "tma_load"),
            Lines("all_have_read", "fence_async", "partition_barrier"),
            Lines("attend_kernel", "for i in range(blocks)", "parity ^= 1"),
        ),
        "Delete `fence_async_shared()` from `all_have_read` and read what `python -m ladder k3_1` reports: which two accesses are "
        "unordered, and why does the barrier not order them?",
    ),
    "k3_2": Lesson(
        "Two stages each for K and V. While the products read one stage, TMA fills the other. A position is a stage and a "
        "parity, and the parity changes after each round of the stages.",
        (
            Lines("attend_kernel", "copy_tile(q_desc", "mbarrier.wait(q_ready"),
            Lines("attend_kernel", "for i in range(blocks)", "parity = gl.where"),
        ),
        "Delete the line that changes `parity` at the end of the loop, and read from the race that `python -m ladder k3_2` "
        "reports which tile is taken for which.",
    ),
    "k3_3": Lesson(
        "As many bytes in flight as the latency asks for: K and V get stages of their own number. V's stage is requested again "
        "behind the next tile's barrier, so a tile has one barrier instead of two.",
        (
            Lines("next_of", "last =", "return"),
            Lines("attend_kernel", "for i in range(blocks)", "v_at, v_parity = next_of"),
        ),
        "Compute the shared memory of `--set stages_k=5 stages_v=5` at D = 128, and say how many programs then fit on an SM with "
        "227 KiB.",
    ),
    "k4_1": Lesson(
        "wgmma for the scores: four warps multiply q and K straight from shared memory, without loading fragments. The weights "
        "still pass through shared memory to mma.sync.",
        (
            Lines("score_product", "layout:", "return"),
            Lines("value_product", "p_smem.store", "return"),
            Lines("attend_kernel", "mbarrier.wait(k_ready", "o = value_product"),
        ),
        "Count the bytes of shared memory that a tile of 128 x 64 weights costs in `value_product`, and compare them with the "
        "bytes of K and V that the tile reads.",
    ),
    "k4_2": Lesson(
        "wgmma for both products: its accumulator, rounded to 16 bits, already lies in registers as the next product's left "
        "operand. So weights never leave registers, and V is read in its own major order.",
        (
            Lines("score_product", "layout:", "return"),
            Lines("value_product", "p_reg =", "return"),
            Lines("attend_kernel", "mbarrier.wait(k_ready", "partition_barrier()"),
            Lines("attend_kernel", "s = hide", "o = value_product"),
        ),
        "Compute from the cost model the registers a thread needs with `--set block_n=128` at D = 64 and at D = 128, predict "
        "which of the two becomes slower, and measure it on a GPU.",
    ),
    "k5": Lesson(
        "Warp specialisation: one warp only loads, and two or three warpgroups only compute. A ready and a free barrier of "
        "each stage connect them, and nothing else does. So the loader runs ahead, and a program takes tile after tile.",
        (
            Lines("load_partition", "for i in range(blocks)", "stage, parity = next_of"),
            Lines("mma_partition", "for i in range(own)", "stage, parity = next_of"),
        ),
        "Let `k_free` count one arrival instead of `CONSUMERS`, and explain the fault that `python -m ladder k5` reports.",
    ),
    "k6": Lesson(
        "Overlap: the scores of the next tile are issued before this tile's product with V, so the softmax runs under that "
        "product. Warpgroups may also take turns at the tensor cores (ping-pong), and `o` is rescaled only if a maximum grows by "
        "more than 8 in units of log2.",
        (
            Lines("attend", "mbarrier.wait(k_ready", "p_reg =", after="for i in range(1"),
            Lines("add_values", "o = scale_rows", "return"),
        ),
        "Draw `python -m ladder k6 --head-dim 128 --timeline k6.html` with and without `--set overlap=0`, and find the softmax "
        "that runs under no product.",
    ),
    "k6_2": Lesson(
        "Optimistic softmax: exponentials use the maximum of the first keys and wait for no other. The row sums show afterwards "
        "whether a row outgrew it: such a row is divided by the largest part of its sum. Beyond 2^32 the program computes its "
        "tiles again, with maxima.",
        (
            Lines("softmax_step", "if careful:", "new_max = gl.maximum("),
            Lines("softmax_step", "low, high", "return"),
            Lines("attend", "careful =", "p, rescale, row_max, row_sum = rescale_outgrown"),
            Lines("next_turn", "turn += 1", "first ="),
        ),
        "Remove the call of `rescale_outgrown`, see that `python -m ladder k6_2` still passes on normal inputs, and find keys for "
        "which it does not.",
    ),
    "decode": Lesson(
        "Few queries over many keys: all query heads that share a key head are rows of one tile, so K and V are read once. The "
        "keys are split over programs, and a second kernel merges the parts by their log-sum-exp.",
        (
            Lines("share_of", "blocks =", "return"),
            Lines("load_queries", "place =", "place ="),
            Lines("combine_kernel", "top =", "o = o *"),
        ),
        "Compute how many programs four sequences with four key heads give the 132 SMs of an H200 with `--set splits=1`, and "
        "choose the number of splits that gives each SM one.",
    ),
    "k7": Lesson(
        "8-bit operands (e4m3) at twice the tensor cores' rate. V is transposed once before, its keys permuted so that the "
        "weights stay in the registers where they are. Weights are scaled up to use the range of e4m3.",
        (
            Lines("transpose_kernel", "for i in", "word |="),
            Lines("softmax_step", "new_max =", "rescale ="),
            Lines("weights_operand", "parts =", "return"),
            Lines("add_values", "if form.two_level", "return warpgroup_mma_wait(0"),
        ),
        "Explain why an accumulator that keeps 14 bits loses more the longer the rows are, and what `--set two_level=1` pays to "
        "avoid it.",
    ),
    "k8": Lesson(
        "Incoherent processing: random signs and a Hadamard transform spread outliers over all columns before q and k are "
        "rounded to 8 bits. Each block of rows has a scale of its own.",
        (
            Lines("rotate_kernel", "turned =", "rounded ="),
            Lines("rotation", "hadamard = torch.ones", "return (signs"),
            Lines("attend", "p, rescale, row_max, row_sum = softmax_step", "worth =", after="for i in range(1"),
        ),
        "Run `python -m ladder --outliers`, then find a vector that the Hadamard transform without random signs turns into a "
        "single large entry.",
    ),
}


def source(module: Any, name: str) -> str:
    """The source of a rung's function or class."""
    shown = getattr(module, name)
    while not (inspect.isfunction(shown) or inspect.isclass(shown)):  # a jit function, an autotuned or a cached one
        shown = shown.fn if hasattr(shown, "fn") else shown.__wrapped__
    return inspect.getsource(shown).strip("\n")


def excerpt(rung: str, lines: Lines) -> str:
    """The lines of a rung's file, indented as a block of their own. Raises ValueError if there are none that begin so."""
    text = source(importlib.import_module(f"ladder.{FILES[rung]}"), lines.function).split("\n")
    start = _find(text, lines.after, 0) + 1 if lines.after else 0
    start = _find(text, lines.first, start)
    stop = _find(text, lines.last, start) if lines.last else len(text) - 1
    while stop + 1 < len(text) and _depth(text[start : stop + 1]) > 0:  # a call over several lines
        stop += 1
    return textwrap.dedent("\n".join(text[start : stop + 1]))


def _find(text: list[str], begins: str, start: int) -> int:
    for number in range(start, len(text)):
        if text[number].lstrip().startswith(begins):
            return number
    raise ValueError(
        f"lines: got {begins!r}, expected the beginning of a line of the function; correct ladder.harness.course"
    )


def _depth(text: list[str]) -> int:
    """The number of brackets that are open at the end of the text."""
    whole = "\n".join(line.partition("  # ")[0] for line in text)
    return sum(whole.count(opening) - whole.count(closing) for opening, closing in ("()", "[]", "{}"))


def lines_that_matter(rung: str) -> str:
    """A rung's excerpts as one code block, each under the name of its function."""
    parts: list[str] = []
    before = ""
    for lines in LESSONS[rung].lines:
        parts.append(("# ...\n" if lines.function == before else f"# {lines.function}\n") + excerpt(rung, lines))
        before = lines.function
    return "```py\n" + "\n\n".join(parts) + "\n```\n"


# ---------------------------------------------------------------- the measured gain


class Gain(NamedTuple):
    """Rates of a rung and of the rung below it for one kind of problem."""

    head_dim: int
    causal: bool
    below: float  # TFLOP/s
    own: float
    together: bool  # both timed in one process
    rows: tuple[Row, Row]  # of the rung below, and of this one

    @property
    def ratio(self) -> float:
        return self.own / self.below


def gains(rows: Iterable[Row], rung: str, below: str) -> list[Gain]:
    """A rung beside the rung below at MEASURED keys, for each kind of problem that has rows of both.

    The rows come from the newest process that timed both; if there is none, from the newest process of each.
    """
    found: list[Gain] = []
    timed = [row for row in rows if row.get("ms") and not row["options"] and row["seqlen_k"] == MEASURED]
    for head_dim in (64, 128):
        for causal in (False, True):
            kind = [row for row in timed if (row["head_dim"], row["causal"]) == (head_dim, causal)]
            own, under = ({row["date"]: row for row in kind if row["rung"] == name} for name in (rung, below))
            if own and under:
                both = max(own.keys() & under.keys(), default=None)
                pair = under[both or max(under)], own[both or max(own)]
                found.append(Gain(head_dim, causal, pair[0]["tflops"], pair[1]["tflops"], both is not None, pair))
    return found


def gain_table(found: list[Gain], rung: str, below: str) -> str:
    """The table of a page; empty without rows."""
    if not found:
        return ""
    lines = [f"| D | mask | {below} | {rung} | gain |", "| ---: | --- | ---: | ---: | ---: |"]
    for gain in found:
        mask, ratio = "causal" if gain.causal else "dense", f"{gain.ratio:.2f}" + ("" if gain.together else " *")
        lines.append(f"| {gain.head_dim} | {mask} | {gain.below:.4g} | {gain.own:.4g} | {ratio} |")
    text = f"\nTFLOP/s at {MEASURED:,} queries and keys, on one {found[0].rows[1]['device'].split(':')[0]}."
    text += " Both rungs of a line were timed in turn in one process; clocks, and so rates, differ between processes."
    if not all(gain.together for gain in found):
        text = text.replace("Both rungs of a line", "Except where a star stands, both rungs of a line")
    return "\n".join([*lines, text, ""])
