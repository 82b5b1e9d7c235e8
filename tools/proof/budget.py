"""The kernels to compile for each GPU, their resource limits, and LEDGER: the list of exceptions, each with its reason.

This file is mostly data. `tools.proof.compile` compiles the kernels, and `tests/tools/test_offline_compile.py`
checks the limits. A new kernel family needs one line in FAMILIES and one in calls.CASES_OF.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import NamedTuple

from strobe.kernels import kernels
from strobe.problem.append import AppendCall
from strobe.problem.call import Call
from strobe.problem.decode import DecodeCall
from strobe.problem.paged import PagedCall
from strobe.problem.problem import Problem
from strobe.problem.target import FAKES, Target

from .calls import CASES_OF

MOST_REGISTERS = 255  # per thread, on every target
TENSOR_COLUMNS = 512  # columns of tensor memory per SM

TARGETS: dict[str, Target] = {
    f"sm_{FAKES[name].capability}": FAKES[name]
    for name in ("A100", "A10", "RTX 4090", "H200", "B200", "B300", "RTX 5090")
}
# kernel family -> its targets
FAMILIES: dict[str, tuple[str, ...]] = {
    "portable": ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120"),
    "portable.decode": ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120"),
    "hopper": ("sm_90",),
    "hopper.decode": ("sm_90",),
    "blackwell": ("sm_100", "sm_103"),
    "blackwell.backward": ("sm_100", "sm_103"),
    "blackwell.decode": ("sm_100", "sm_103"),
}
ON_EVERY_TARGET = "d128 causal"  # compiled on each commit for every target
WITH_ALL_CASES = "sm_90"  # on each commit only this target compiles other cases, too (but see Unit.each_commit)
# cases for which the page of compiled kernels shows the inner loop of each warp role
IN_ROLES = ("d64 dense", "d64 causal", "d128 dense", "d128 causal", "d64 causal, many keys", "d128 causal, many keys")


class Unit(NamedTuple):
    """The kernels of one case for one family on one target. The fields are names."""

    family: str
    case: str
    target: str

    @property
    def call(self) -> Call | DecodeCall | PagedCall | AppendCall:
        """The case's call, with `kernel` set to this family, or to the one kernel that a family of backwards is. It
        needs gradients only if the case does and the family has a backward that can run it.
        """
        family, call = self.family.partition(".")[0], CASES_OF[self.family][self.case]()
        if self.family.endswith(".backward"):
            return call._replace(kernel=self.family)
        if not isinstance(call, Call):
            return call._replace(kernel=family)
        asked = call._replace(kernel=family)
        problem, target = Problem.from_call(asked), TARGETS[self.target]
        own = [kernel for kernel in kernels("backward") if kernel.name.startswith(f"{family}.")]
        runs = any(kernel.why_not(problem, target) is None for kernel in own)
        return asked._replace(needs_grad=call.needs_grad and runs)

    @property
    def each_commit(self) -> bool:
        """Whether the unit is compiled on each commit; all others are compiled nightly. Every tiling is compiled on
        each commit.

        Left out are variants whose tiling another unit has. "window left" has the tiling of "window" and masks less. A
        window or no mask has the tiling of the causal case, except at d64 and d128. Some features are compiled at one
        width only: ragged keys, sizes of 1, shared or divided heads, deterministic dq, float16, clusters, documents,
        key lengths and prefixes.
        """
        if self.family == "blackwell.backward":
            return self.case == "d128 documents causal"
        if self.family == "blackwell":
            tilings = ("d64 dense", "d96 causal", "d128 dense", "d192/128 causal")
            return self.case == ON_EVERY_TARGET or (self.target == "sm_100" and self.case in tilings)
        if self.family == "blackwell.decode":
            tall = ("d128 rows, 16 tokens, window sinks softcap", "d128 float8 pages of 16, 16 tokens")
            return self.case == ON_EVERY_TARGET or (self.target == "sm_100" and self.case in tall)
        of_one_width = ("ragged", "one row", "5 rows", "deterministic", "float16", "group 8 causal")
        case, at_d128 = self.case.removesuffix(", many keys"), self.case.startswith("d128")
        seen_at_d128 = (case.endswith(of_one_width) or "a cluster" in case) and not at_d128
        spans = (
            ("documents causal" in case or "key lengths" in case or "prefix" in case) and not at_d128
        ) or "documents window" in case
        wide = case.endswith((" window", " dense")) and not case.startswith(("d64", "d128", "d256 dense"))
        options = case.endswith("sinks softcap") and case.startswith("d192/128")
        variant = (
            seen_at_d128
            or wide
            or spans
            or options
            or case.endswith("window left")
            or case == "d64 packed group 4 causal sinks"
        )
        return self.case == ON_EVERY_TARGET or (self.target == WITH_ALL_CASES and not variant)


REFUSED = {
    ("d256 float64", target) for target in ("sm_86", "sm_89", "sm_120")
}  # the tiles of its backward exceed 99 KiB of shared memory
UNITS = [
    Unit(family, case, target)
    for family, targets in FAMILIES.items()
    for target in targets
    for case in CASES_OF[family]
    if (case, target) not in REFUSED
]


class Allowance(NamedTuple):
    """An exception to the limits: patterns of kernel, case and target, the spill bytes (stores plus loads) of the worst
    row, the reason.
    """

    kernel: str
    case: str
    target: str
    spill_bytes: int | None  # None: it does not compile
    why: str
    serialized: bool = False  # ptxas may also serialise its wgmma
    family: str = "portable"

    @property
    def permits(self) -> str:
        if self.spill_bytes is None:
            return "not compile"
        return f"spill {self.spill_bytes} B" + ", serialise wgmma" * self.serialized

    def covers(self, row: dict) -> bool:
        return row["family"] == self.family and all(
            fnmatchcase(row[key], getattr(self, key)) for key in ("kernel", "case", "target")
        )


_TIMED = (
    "a tiling that won on an H200 (kernels/portable/heuristics.py): with fewer registers fewer CTAs share an SM, "
    "and that costs more"
)
_OFFLINE = "never timed; of the tilings compiled offline one with few spills (kernels/portable/heuristics.py)"
_GROUP = (
    "the loop over the heads of a group: d64 causal on sm_80 spills 1024 bytes with it and 52 without; window "
    "or packing come on top"
)
_OPTIONS = "window, sinks, softcap and packing in one kernel, with a tiling chosen without them"
_WIDE = "for correctness, not for speed: products of this dtype run on few units, and its tilings were never timed"
_SERIAL = (
    "ptxas C7514: the accumulators are written by others inside a pipeline stage; 64 x 32 tiles are free of "
    "it offline, but not timed"
)
_BETWEEN = "scalars of a step, put by under its products"
_LOADER = "what a loader finds out of a document's tile; at d64 and d96 also what consumers need between tiles of keys"
_JOINED = "o of the splits before, put by while the steps of the next go on: none of it within them"
_SCATTERED = (
    "what a loader finds out of a document's tile; where documents lie scattered, ids of a tile's keys "
    "beside its scores and o"
)
_FOUR = "what three or four consumers of few registers need of a tile between their steps: none of it within them"
_TALL = "functions of the scores of a tall tile; with eight warps it is slower (H200, DecodeTraits.warps)"
_MASKED = "a mask_mod of three consumers, which are faster than two that spill nothing (H200, SCORE_TUNINGS)"
_TALL_OF_8_BITS = "64 rows over 8-bit keys, whose conversion takes registers, too; eight warps were not measured"
_CONVERTED = (
    "what a producer needs of a tile, put by while its registers hold 8-bit keys: none of it within its loop over "
    "blocks of keys"
)
_CAPPED = "the softcap's tanh over all scores of a tile beside o and the weights; tilings are chosen without it"

# The first line that covers a kernel counts. Bytes are those of Triton 3.6.0. The tests fail if a number is too small
# or larger than needed.
LEDGER: tuple[Allowance, ...] = (
    Allowance("queries_kernel", "d256 float64", "sm_10?", 27044, _WIDE),
    Allowance("queries_kernel", "d64 causal float64", "*", 608, _WIDE),
    Allowance("queries_kernel", "d256 causal float32", "*", 4604, _WIDE),
    Allowance("keys_kernel", "d256 float64", "*", 796, _WIDE),
    Allowance("forward_kernel", "d256 causal float32", "sm_10?", 40, _WIDE),
    Allowance("delta_kernel", "d256 float64", "*", 1896, _WIDE),
    Allowance("delta_kernel", "d64 float32", "sm_10?", 16, _WIDE),
    # sm_90
    Allowance("keys_kernel", "d256 [dc]*", "sm_90", 284, _SERIAL, serialized=True),
    Allowance("keys_kernel", "d192/128 causal", "sm_90", 48, _SERIAL, serialized=True),
    Allowance("keys_kernel", "d64 * group *", "sm_90", 480, _GROUP),
    Allowance("keys_kernel", "d64 group *", "sm_90", 504, _GROUP),
    Allowance("keys_kernel", "* packed window *", "sm_90", 920, _OPTIONS),
    Allowance("keys_kernel", "d64 dense", "sm_90", 256, _TIMED),
    Allowance("keys_kernel", "d128 runs *", "sm_90", 432, _TIMED),
    Allowance("keys_kernel", "d[19][26]*", "sm_90", 412, _TIMED),
    Allowance("queries_kernel", "d192/128 causal", "sm_90", 148, _TIMED),
    Allowance("queries_kernel", "d256 [dc]*", "sm_90", 72, _TIMED),
    # sm_90, the Hopper forward
    Allowance("forward_kernel", "d256 window sinks softcap", "sm_90", 40, _CAPPED, family="hopper"),
    Allowance("forward_kernel", "d64 prefix", "sm_90", 16, _FOUR, family="hopper"),
    Allowance("forward_kernel", "d128 documents causal, many keys", "sm_90", 28, _FOUR, family="hopper"),
    Allowance("forward_kernel", "d128 window, many keys", "sm_90", 24, _FOUR, family="hopper"),
    Allowance("forward_kernel", "d256 documents *", "sm_90", 108, _SCATTERED, family="hopper"),
    Allowance("forward_kernel", "d96 documents *", "sm_90", 28, _SCATTERED, family="hopper"),
    Allowance("forward_kernel", "d192 documents *", "sm_90", 48, _SCATTERED, family="hopper"),
    Allowance("forward_kernel", "d192/128 documents *", "sm_90", 48, _SCATTERED, family="hopper"),
    # sm_90, the Hopper decode
    Allowance("decode_kernel", "paged d128 float8, 16 *, score_mod", "sm_90", 236, _TALL, family="hopper.decode"),
    Allowance("decode_kernel", "paged d256 float8, 8 *, score_mod *", "sm_90", 124, _TALL, family="hopper.decode"),
    Allowance("decode_kernel", "paged d* float8 prefill*", "sm_90", 92, _TALL_OF_8_BITS, family="hopper.decode"),
    Allowance("forward_kernel", "paged d128 prefill, mask_mod", "sm_90", 376, _MASKED, family="hopper.decode"),
    Allowance("forward_kernel", "paged d128 float8 prefill", "sm_90", 48, _CONVERTED, family="hopper.decode"),
    Allowance("forward_kernel", "paged d128 float8 prefill, *", "sm_90", 16, _MASKED, family="hopper.decode"),
    Allowance(
        "forward_kernel", "paged d64 float8 prefill, pages of 1", "sm_90", 32, _CONVERTED, family="hopper.decode"
    ),
    Allowance("forward_kernel", "paged d256 float8 prefill", "sm_90", 120, _CONVERTED, family="hopper.decode"),
    # sm_90, the Hopper backward
    Allowance("backward_kernel", "d128 group 4 documents *", "sm_90", 244, _CAPPED, family="hopper"),
    Allowance("backward_kernel", "d192/128 documents *", "sm_90", 272, _LOADER, family="hopper"),
    Allowance("backward_kernel", "* documents *", "sm_90", 120, _LOADER, family="hopper"),
    Allowance("invariant_kernel", "d128 *", "sm_120", 32, _JOINED),
    Allowance("paged_kernel", "paged d128 batch invariant", "sm_80", 40, _JOINED, family="portable.decode"),
    Allowance("paged_kernel", "paged d128 batch invariant", "sm_8[69]", 308, _JOINED, family="portable.decode"),
    Allowance("paged_kernel", "paged d128 batch invariant", "sm_90", 228, _JOINED, family="portable.decode"),
    Allowance("paged_kernel", "paged d128 batch invariant", "sm_10?", 160, _JOINED, family="portable.decode"),
    Allowance("paged_kernel", "paged d128 batch invariant", "sm_120", 132, _JOINED, family="portable.decode"),
    Allowance("paged_kernel", "paged d64 few keys", "sm_8[69]", 72, _OFFLINE, family="portable.decode"),
    Allowance("paged_kernel", "paged d64 few keys", "sm_120", 92, _OFFLINE, family="portable.decode"),
    Allowance("invariant_kernel", "d128 *", "sm_90", 1412, _JOINED, family="hopper"),
    Allowance("invariant_kernel", "d256 *", "sm_90", 208, _JOINED, family="hopper"),
    Allowance("backward_kernel", "d192/128 window sinks softcap", "sm_90", 192, _CAPPED, family="hopper"),
    Allowance("backward_kernel", "d256 window sinks softcap", "sm_90", 44, _CAPPED, family="hopper"),
    Allowance("backward_kernel", "d256 *", "sm_90", 8, _BETWEEN, family="hopper"),
    # sm_80, 86, 89
    Allowance("keys_kernel", "* group *", "sm_8?", 1788, _GROUP),
    Allowance("keys_kernel", "* packed window *", "sm_8?", 768, _OPTIONS),
    Allowance("keys_kernel", "d21 *", "sm_8?", 76, _OFFLINE),
    Allowance("keys_kernel", "d64 *", "sm_8?", 52, _OFFLINE),
    Allowance("keys_kernel", "d[19][26]*", "sm_8?", 664, _OFFLINE),
    Allowance("queries_kernel", "d[19][26]*", "sm_8?", 56, _OFFLINE),
    Allowance("queries_kernel", "d256 dense", "sm_8?", 8, _OFFLINE),
    Allowance("forward_kernel", "d[19]*", "sm_8?", 36, _OFFLINE),
    # sm_100, 103
    Allowance("keys_kernel", "* group *", "sm_10?", 2752, _GROUP),
    Allowance("keys_kernel", "* packed window *", "sm_10?", 528, _OPTIONS),
    # sm_120
    Allowance("keys_kernel", "* group *", "sm_120", 1364, _GROUP),
    Allowance("keys_kernel", "* packed window *", "sm_120", 800, _OPTIONS),
    Allowance("keys_kernel", "d21 *", "sm_120", 68, _OFFLINE),
    Allowance("keys_kernel", "d64 *", "sm_120", 240, _OFFLINE),
    Allowance("keys_kernel", "d[19][26]*", "sm_120", 592, _OFFLINE),
    Allowance("queries_kernel", "* packed window *", "sm_120", 104, _OPTIONS),
    Allowance("forward_kernel", "* documents *", "sm_120", 8, _OFFLINE),
)


def spill_bytes(row: dict) -> int:
    return row["spill_store_bytes"] + row["spill_load_bytes"]


def allowance(row: dict) -> Allowance | None:
    """The first line of LEDGER that covers this kernel, or None."""
    return next((line for line in LEDGER if line.covers(row)), None)


def faults(row: dict) -> list[str]:
    """A message for each limit that this kernel exceeds; empty if it is within its budget."""
    line, limit = allowance(row), TARGETS[row["target"]].shared_bytes
    name = f"{row['kernel']} ({row['case']}, {row['target']})"
    if "error" in row:
        return [] if line and line.spill_bytes is None else [f"{name} does not compile: {row['error']}"]
    allowed = (line.spill_bytes or 0) if line else 0
    found = [
        (
            row["registers"] > MOST_REGISTERS,
            f"{row['registers']} registers a thread, expected at most {MOST_REGISTERS}",
        ),
        (row["shared_bytes"] > limit, f"{row['shared_bytes']} bytes of shared memory, expected at most {limit}"),
        (
            row["tensor_columns"] > TENSOR_COLUMNS,
            f"{row['tensor_columns']} columns of tensor memory, expected at most {TENSOR_COLUMNS}",
        ),
        (
            spill_bytes(row) > allowed,
            f"{spill_bytes(row)} bytes of spills, expected at most {allowed}; smaller tiles, or a line in LEDGER",
        ),
        (
            row["serialized"] and not (line and line.serialized),
            "ptxas serialises its wgmma: an accumulator is touched while products are under way",
        ),
    ]
    return [f"{name}: {words}" for wrong, words in found if wrong]


def stale(rows: Iterable[dict]) -> list[str]:
    """A message for each line of LEDGER that permits more than needed. `rows` must be all rows."""
    covered: dict[Allowance, list[dict]] = {line: [] for line in LEDGER}
    for row in rows:
        line = allowance(row)
        if line:
            covered[line].append(row)
    return [
        f"{line.kernel} ({line.case}, {line.target}): {words}"
        for line, under in covered.items()
        if (words := _unneeded(line, under))
    ]


def _unneeded(line: Allowance, under: list[dict]) -> str:
    """Why a line permits more than the rows that it covers need; "" if it does not."""
    if line.spill_bytes is None:
        return "" if any("error" in row for row in under) else "it compiles now; take the line away"
    if line.serialized and not any(row.get("serialized") for row in under):
        return "ptxas serialises none of its wgmma now; say serialized no more"
    worst = max((spill_bytes(row) for row in under if "error" not in row), default=0)
    if worst >= line.spill_bytes and worst:
        return ""
    return (
        f"allowed {line.spill_bytes} bytes of spills, the worst takes {worst}; "
        f"{'write that' if worst else 'take the line away'}"
    )
