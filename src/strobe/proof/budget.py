"""What is compiled for which GPUs, and what it may take: cases, families, limits, and a ledger of exceptions, each with its reason.

Data alone: `strobe.proof.compile` compiles it, `tests/test_offline_compile.py` holds it. A new family of kernels is a line of FAMILIES and one
of CASES_OF.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch

from .. import mask as masks
from ..appending import AppendCall
from ..cache import FP8
from ..call import Call
from ..decode import DecodeCall
from ..kernels import kernels
from ..mask import Mask
from ..target import FAKES, Target

MOST_REGISTERS = 255  # a thread's, on every target
TENSOR_COLUMNS = 512  # of tensor memory, an SM's

TARGETS: dict[str, Target] = {f"sm_{FAKES[name].capability}": FAKES[name] for name in ("A100", "A10", "RTX 4090", "H200", "B200", "B300", "RTX 5090")}
# family of kernels: the targets it is made for
FAMILIES: dict[str, tuple[str, ...]] = {
    "portable": ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120"),
    "portable.decode": ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120"),
    "hopper": ("sm_90",),
    "hopper.decode": ("sm_90",),
    "blackwell": ("sm_100", "sm_103"),
}
ON_EVERY_TARGET = "d128 causal"  # what each commit compiles for every target; all other cases it compiles for WITH_ALL_CASES
WITH_ALL_CASES = "sm_90"
# whose roles are written out loop by loop
IN_ROLES = ("d64 dense", "d64 causal", "d128 dense", "d128 causal", "d64 causal, many keys", "d128 causal, many keys")


def _dense(
    width: int, width_v: int = 0, mask: Mask | None = None, dtype: torch.dtype = torch.bfloat16, heads: tuple[int, int] = (4, 4),
    rows: int = 256, keys: int = 256, batch: int = 1, **options,
) -> Call:  # fmt: skip
    shapes = ((rows, heads[0], width), (keys, heads[1], width), (keys, heads[1], width_v or width))
    q, k, v = (torch.empty(batch, *shape, dtype=dtype) for shape in shapes)
    return Call(q, k, v, needs_grad=True)._replace(**options).with_mask(mask or masks.full())


def _packed(width: int, mask: Mask, heads: tuple[int, int], tokens: int = 256, **options) -> Call:
    q, k, v = (torch.empty(tokens, n, width, dtype=torch.bfloat16) for n in (heads[0], heads[1], heads[1]))
    offsets = torch.tensor([0, 100, tokens], dtype=torch.int32)
    return Call(q, k, v, needs_grad=True, cu_seqlens_q=offsets, cu_seqlens_k=offsets)._replace(**options).with_mask(mask)


def _documents() -> Mask:
    return masks.documents(torch.zeros(1, 256, dtype=torch.int32))


_ALIKE: dict[str, Any] = {"batch_invariant": True, "needs_grad": False}

# For the portable kernels: between them every tiling of the tables, every way to load, every part of a mask and every option.
# bfloat16 where nothing is said.
CASES: dict[str, Callable[[], Call]] = {
    "d64 dense": lambda: _dense(64),
    "d64 causal": lambda: _dense(64, mask=masks.causal()),
    "d128 dense": lambda: _dense(128),
    "d128 causal": lambda: _dense(128, mask=masks.causal()),
    "d256 dense": lambda: _dense(256),
    "d256 causal": lambda: _dense(256, mask=masks.causal()),
    "d64 causal float16": lambda: _dense(64, mask=masks.causal(), dtype=torch.float16),
    "d256 causal float16": lambda: _dense(256, mask=masks.causal(), dtype=torch.float16),
    "d192/128 causal": lambda: _dense(192, 128, masks.causal()),
    "d96 causal": lambda: _dense(96, mask=masks.causal()),
    "d21 documents prefix": lambda: _dense(21, mask=_documents() & masks.prefix_causal(3)),
    "d128 documents causal": lambda: _dense(128, mask=_documents() & masks.causal()),
    "d128 key lengths": lambda: _dense(128, mask=masks.key_lengths(torch.tensor([200], dtype=torch.int32))),
    "d64 group 8 window": lambda: _dense(64, mask=masks.window(1024, 0), heads=(8, 1)),
    "d64 packed group 4 causal": lambda: _packed(64, masks.causal(), (8, 2)),
    "d128 packed window sinks softcap": lambda: _packed(128, masks.window(64, 0), (8, 2), sinks=torch.zeros(8), softcap=20.0),
    "d128 partial, scale < 0": lambda: _dense(128, partial=True, scale=-0.1),
    "d64 float32": lambda: _dense(64, dtype=torch.float32),
    "d256 causal float32": lambda: _dense(256, mask=masks.causal(), dtype=torch.float32),
    "d64 causal float64": lambda: _dense(64, mask=masks.causal(), dtype=torch.float64),
    "d256 float64": lambda: _dense(256, dtype=torch.float64),
    "d128 causal batch invariant": lambda: _dense(128, mask=masks.causal(), **_ALIKE),
    "d64 packed group 4 window batch invariant": lambda: _packed(64, masks.window(64, 0), (8, 2), **_ALIKE),
}


def _hopper_cases() -> dict[str, Callable[[], Call]]:
    """A kernel for each tiling with each way that a mask bounds rows, keys that end within a tile, options, and sizes of 1."""
    bands = {"dense": masks.full(), "causal": masks.causal(), "window": masks.window(100, 20), "window left": masks.window(100, None)}
    cases: dict[str, Callable[[], Call]] = {}
    for name, widths in {"d64": (64, 64), "d128": (128, 128), "d192/128": (192, 128), "d256": (256, 256)}.items():
        cases |= {f"{name} {band}": partial(_dense, *widths, mask=mask) for band, mask in bands.items()}
        cases[f"{name} ragged"] = partial(_dense, *widths, keys=253)
        cases[f"{name} window sinks softcap"] = partial(_dense, *widths, mask=bands["window"], sinks=torch.zeros(4), softcap=20.0)
        cases[f"{name} one row"] = partial(_dense, *widths, rows=1, heads=(1, 1))
    for name, widths in {"d96": (96, 96), "d192": (192, 192), "d256/128": (256, 128)}.items():
        cases |= {f"{name} {band}": partial(_dense, *widths, mask=mask) for band, mask in bands.items()}
    for width in (64, 128):
        cases[f"d{width} causal float16"] = partial(_dense, width, mask=bands["causal"], dtype=torch.float16)
    for name, widths in {"d64": (64, 64), "d128": (128, 128), "d192/128": (192, 128), "d256": (256, 256)}.items():
        cases[f"{name} causal deterministic"] = partial(_dense, *widths, mask=bands["causal"], deterministic=True)
    cases["d128 packed causal"] = partial(_packed, 128, bands["causal"], (4, 4))
    cases["d128 packed causal deterministic"] = partial(_packed, 128, bands["causal"], (4, 4), deterministic=True)
    for name, width in {"d64": 64, "d128": 128, "d256": 256}.items():  # groups divided among programs
        cases[f"{name} group 8 causal"] = partial(_dense, width, mask=bands["causal"], heads=(8, 1))
    cases["d128 packed group 4 window"] = partial(_packed, 128, bands["window"], (8, 2))
    shared = {"d96 group 8 dense, 5 rows": (96, 96), "d128 group 8 causal, 5 rows": (128, 128), "d192/128 group 3 causal, 5 rows": (192, 128),
              "d256 group 4 window, 5 rows": (256, 256)}  # fmt: skip
    for name, widths in shared.items():  # heads of a group share a tile
        group, band = name.removesuffix(", 5 rows").split()[2:]
        cases[name] = partial(_dense, *widths, mask=bands[band], heads=(2 * int(group), 2), rows=5)
    cases |= _many_keys()
    options = {"sinks": torch.zeros(32), "softcap": 20.0}
    cases["d64 group 16 window sinks softcap, 5 rows"] = partial(_dense, 64, mask=bands["window"], heads=(32, 2), rows=5, **options)
    for name, widths in {"d64": (64, 64), "d128": (128, 128), "d192/128": (192, 128), "d256": (256, 256)}.items():
        cases[f"{name} causal batch invariant"] = partial(_dense, *widths, mask=bands["causal"], **_ALIKE)
    cases["d128 packed group 4 window sinks batch invariant"] = partial(_packed, 128, bands["window"], (8, 2), sinks=torch.zeros(8), **_ALIKE)
    return cases | {"d64 packed group 4 causal sinks": partial(_packed, 64, bands["causal"], (8, 2), sinks=torch.zeros(8))}


def _many_keys() -> dict[str, Callable[[], Call]]:
    """Forwards as they are of many keys: with early weights but for float16."""
    bands = {"dense": masks.full(), "causal": masks.causal(), "window": masks.window(1000, 20)}
    many = partial(_dense, rows=2048, keys=2048, needs_grad=False)
    cases: dict[str, Callable[[], Call]] = {}
    for name, widths in {"d64": (64, 64), "d96": (96, 96), "d128": (128, 128), "d192/128": (192, 128), "d192": (192, 192)}.items():
        cases |= {f"{name} {band}, many keys": partial(many, *widths, mask=mask) for band, mask in bands.items()}
    for width in (64, 128):
        cases[f"d{width} causal float16, many keys"] = partial(many, width, mask=bands["causal"], dtype=torch.float16)
    cases["d128 ragged, many keys"] = partial(many, 128, keys=2045)
    cases["d128 window left, many keys"] = partial(many, 128, mask=masks.window(1000, None))
    cases["d64 group 8 window, many keys"] = partial(many, 64, mask=bands["window"], heads=(8, 1))
    cases["d64 window sinks softcap, many keys"] = partial(many, 64, mask=bands["window"], sinks=torch.zeros(4), softcap=20.0)
    return cases | {"d128 packed causal, many keys": partial(_packed, 128, bands["causal"], (4, 4), tokens=2 * 2048, needs_grad=False)}


def _decode(
    width: int, page_size: int = 0, tokens: int = 1, dtype: torch.dtype = torch.bfloat16, cache_dtype: torch.dtype | None = None, keys: int = 4096,
    heads: tuple[int, int] = (32, 8), **options,
) -> DecodeCall:  # fmt: skip
    pages = (keys // page_size, page_size) if page_size else (1, keys)
    k, v = (torch.empty(*pages, heads[1], width, dtype=cache_dtype or dtype) for _ in range(2))
    table = torch.zeros(1, keys // page_size, dtype=torch.int32) if page_size else None
    scales = [torch.ones(heads[1]) if cache_dtype else None] * 2
    q, length = torch.empty(1, tokens, heads[0], width, dtype=dtype), torch.zeros(1, dtype=torch.int32)
    return DecodeCall(q, k, v, length, table, k_scale=scales[0], v_scale=scales[1], **{"right": 0, **options})


def _append(page_size: int, cache_dtype: torch.dtype, interleaved: bool | None = None) -> AppendCall:
    to, new = _decode(128, page_size, cache_dtype=cache_dtype), torch.empty(1, 2, 8, 128, dtype=torch.bfloat16)
    cos = sin = None if interleaved is None else torch.empty(4096, 32)
    scales = (None, None) if cache_dtype == torch.bfloat16 else (to.k_scale, to.v_scale)
    return AppendCall(new, new, to.k, to.v, to.seqlens, to.page_table, *scales, cos, sin, bool(interleaved))


# For the portable decode and append: every way to find a key, to store one, and to split.
DECODES: dict[str, Callable[[], DecodeCall | AppendCall]] = {
    "d128 causal": lambda: _decode(128, 16),
    "d128 pages of 1": lambda: _decode(128, 1),
    "d128 pages of 128": lambda: _decode(128, 128),
    "d128 rows, 16 tokens": lambda: _decode(128, tokens=16),
    "d64 rows, left padded": lambda: _decode(64, k_start=torch.zeros(1, dtype=torch.int32)),
    "d128 one split, window sinks": lambda: _decode(128, 16, keys=64, left=64, sinks=torch.zeros(32)),
    "d128 float8, 4 tokens, softcap": lambda: _decode(128, 16, 4, cache_dtype=FP8, softcap=20.0),
    "d256 pages of 16": lambda: _decode(256, 16),
    "d256 16 tokens": lambda: _decode(256, 16, 16),
    "d128 batch invariant": lambda: _decode(128, 16, batch_invariant=True),
    "d21 float16": lambda: _decode(21, 16, dtype=torch.float16),
    "d64 float32": lambda: _decode(64, 16, dtype=torch.float32),
    "d256 float64, 4 tokens": lambda: _decode(256, 16, 4, dtype=torch.float64),
    "append to pages": lambda: _append(16, torch.bfloat16),
    "append rotary float8 to rows": lambda: _append(0, FP8, True),
}

# For the Hopper decode: every way to find a key, each number of query rows, each width, splits and none.
HOPPER_DECODES: dict[str, Callable[[], DecodeCall | AppendCall]] = {
    name: case for name, case in DECODES.items() if name.startswith(("d128", "d256 pages", "d64 rows"))
} | {
    "d64 pages of 16, float16": lambda: _decode(64, 16, dtype=torch.float16),
    "d128 pages of 13, partial": lambda: _decode(128, 13, keys=13 * 300, partial=True),
    "d192/128 pages of 16": lambda: _decode(192, 16)._replace(v=torch.empty(256, 16, 8, 128, dtype=torch.bfloat16)),
    "d256 8 tokens, one key head": lambda: _decode(256, 0, 8, heads=(4, 1)),
    "d128 float8 rows": lambda: _decode(128, cache_dtype=FP8),
    "d128 rows, 16 tokens, batch invariant": lambda: _decode(128, tokens=16, batch_invariant=True),
    "d256 float8, pages of 16": lambda: _decode(256, 16, cache_dtype=FP8),
    "d128 pages of 16, a cluster": lambda: _decode(128, 16, keys=1024),
    "d64 rows, 16 tokens, a cluster": lambda: _decode(64, tokens=16, keys=1024),
    "d192/128 a cluster, sinks": lambda: _decode(192, 16, keys=512, sinks=torch.zeros(32))._replace(
        v=torch.empty(32, 16, 8, 128, dtype=torch.bfloat16)
    ),
    "d256 a cluster, softcap": lambda: _decode(256, 16, keys=1024, softcap=20.0),
    "d128 long rows, 4 tokens": lambda: _decode(128, tokens=4, keys=8192, heads=(1024, 256)),
    "d128 float8, a cluster": lambda: _decode(128, cache_dtype=FP8, keys=1024),
}


def _blackwell_cases() -> dict[str, Callable[[], Call]]:
    """A kernel for each tiling with each way that a mask bounds rows, options, and heads that share a tile; keys that end within a tile, and
    sizes of 1: a size of 1 is a constant, and hides what the others keep. Many heads, so that tiles are counted where they differ."""
    bands = {"dense": masks.full(), "causal": masks.causal(), "window": masks.window(100, 20)}
    many = (160, 160)
    cases: dict[str, Callable[[], Call]] = {}
    for name, widths in {"d64": (64, 64), "d96": (96, 96), "d128": (128, 128), "d192/128": (192, 128)}.items():
        cases |= {f"{name} {band}": partial(_dense, *widths, mask=mask, heads=many, batch=2) for band, mask in bands.items()}
        cases[f"{name} window sinks softcap"] = partial(_dense, *widths, mask=bands["window"], heads=many, sinks=torch.zeros(160), softcap=20.0)
        cases[f"{name} group 8 causal, 5 rows"] = partial(_dense, *widths, mask=bands["causal"], heads=(8, 1), rows=5)
    cases["d128 dense float16"] = partial(_dense, 128, dtype=torch.float16)
    cases["d128 causal float16"] = partial(_dense, 128, mask=bands["causal"], dtype=torch.float16)
    cases["d128 ragged"] = partial(_dense, 128, keys=253)
    cases["d128 one row"] = partial(_dense, 128, rows=1, heads=(1, 1))
    cases["d128 window left"] = partial(_dense, 128, mask=masks.window(100, None))
    cases["d64 packed"] = partial(_packed, 64, bands["dense"], many)
    cases["d128 packed causal"] = partial(_packed, 128, bands["causal"], (4, 4))
    cases["d128 packed group 3 causal sinks"] = partial(_packed, 128, bands["causal"], (600, 200), sinks=torch.zeros(600))
    return cases | {"d96 packed group 4 window": partial(_packed, 96, bands["window"], (8, 2))}


# family: the calls it is compiled for
CASES_OF = {
    "portable": CASES, "portable.decode": DECODES, "hopper": _hopper_cases(), "hopper.decode": HOPPER_DECODES, "blackwell": _blackwell_cases(),
}  # fmt: skip


class Unit(NamedTuple):
    """The kernels of one call of one family on one target; the names of all three."""

    family: str
    case: str
    target: str

    @property
    def call(self) -> Call | DecodeCall | AppendCall:
        """The case, asked of this family; without gradients where it has no backward, or the case is a forward's alone."""
        family, call = self.family.partition(".")[0], CASES_OF[self.family][self.case]()
        if not isinstance(call, Call):
            return call._replace(kernel=family)
        both = any(kernel.name.startswith(f"{family}.") for kernel in kernels("backward"))
        return call._replace(kernel=family, needs_grad=both and call.needs_grad)

    @property
    def each_commit(self) -> bool:
        """Compiled on each commit; the others nightly: every tiling is among these. A bound on the left alone has the tiles of a window and less
        to hide, a window beyond d128 those of its causal case; keys that end within a tile, sizes of 1, heads that share a tile or are divided,
        turns at dq, float16 and clusters are seen at one width."""
        if self.family == "blackwell":
            tilings = ("d64 dense", "d96 causal", "d128 dense", "d192/128 causal")
            return self.case == ON_EVERY_TARGET or (self.target == "sm_100" and self.case in tilings)
        of_one_width = ("ragged", "one row", "5 rows", "deterministic", "float16", "group 8 causal")
        seen_at_d128 = (self.case.endswith(of_one_width) or "a cluster" in self.case) and not self.case.startswith("d128")
        wide = self.case.endswith(" window") and not self.case.startswith(("d64", "d128"))
        variant = seen_at_d128 or wide or self.case.endswith("window left") or self.case == "d64 packed group 4 causal sinks"
        return self.case == ON_EVERY_TARGET or (self.target == WITH_ALL_CASES and not variant)


REFUSED = {("d256 float64", target) for target in ("sm_86", "sm_89", "sm_120")}  # its gradients need tiles that exceed 99 KiB
UNITS = [
    Unit(family, case, target)
    for family, targets in FAMILIES.items()
    for target in targets
    for case in CASES_OF[family]
    if (case, target) not in REFUSED
]


class Allowance(NamedTuple):
    """An exception: patterns of kernel, case and target; bytes of spills (stores and loads together) of the worst it covers; why."""

    kernel: str
    case: str
    target: str
    spill_bytes: int | None  # None: it does not compile
    why: str
    serialized: bool = False  # ptxas may serialise its wgmma, too
    family: str = "portable"

    @property
    def permits(self) -> str:
        if self.spill_bytes is None:
            return "not compile"
        return f"spill {self.spill_bytes} B" + ", serialise wgmma" * self.serialized

    def covers(self, row: dict) -> bool:
        return row["family"] == self.family and all(fnmatchcase(row[key], getattr(self, key)) for key in ("kernel", "case", "target"))


_TIMED = "a tiling that won on an H200 (kernels/portable/tunings.py): with fewer registers fewer CTAs share an SM, and that costs more"
_OFFLINE = "never timed; of the tilings compiled offline one with few spills (kernels/portable/tunings.py)"
_GROUP = "the loop over the heads of a group: d64 causal on sm_80 spills 1024 bytes with it and 52 without; window or packing come on top"
_OPTIONS = "window, sinks, softcap and packing in one kernel, with a tiling chosen without them"
_WIDE = "for correctness, not for speed: products of this dtype run on few units, and its tilings were never timed"
_SERIAL = "ptxas C7514: the accumulators are written by others inside a pipeline stage; 64 x 32 tiles are free of it offline, but not timed"
_BETWEEN = "what a tile of keys needs before and after its steps, put by meanwhile; of ragged keys and of groups a step reads some of it"
_JOINED = "o of the splits before, put by while the steps of the next go on: none of it within them"
_CAPPED = "the softcap's tanh over all scores of a tile beside o and the weights; tilings are chosen without it"

# The first line that covers a kernel counts. Bytes are those of Triton 3.6.0: a number that is more than needed fails, as does one too small.
LEDGER: tuple[Allowance, ...] = (
    Allowance("queries_kernel", "d256 float64", "sm_10?", 27044, _WIDE),
    Allowance("queries_kernel", "d64 causal float64", "*", 608, _WIDE),
    Allowance("queries_kernel", "d256 causal float32", "*", 4604, _WIDE),
    Allowance("keys_kernel", "d256 float64", "*", 620, _WIDE),
    Allowance("delta_kernel", "d256 float64", "*", 1896, _WIDE),
    Allowance("delta_kernel", "d64 float32", "sm_10?", 16, _WIDE),
    # sm_90
    Allowance("keys_kernel", "d256 [dc]*", "sm_90", 284, _SERIAL, serialized=True),
    Allowance("keys_kernel", "d192/128 causal", "sm_90", 48, _SERIAL, serialized=True),
    Allowance("keys_kernel", "d64 * group *", "sm_90", 480, _GROUP),
    Allowance("keys_kernel", "d64 group *", "sm_90", 504, _GROUP),
    Allowance("keys_kernel", "* packed window *", "sm_90", 928, _OPTIONS),
    Allowance("keys_kernel", "d64 dense", "sm_90", 256, _TIMED),
    Allowance("keys_kernel", "d[19][26]*", "sm_90", 356, _TIMED),
    Allowance("queries_kernel", "d192/128 causal", "sm_90", 148, _TIMED),
    Allowance("queries_kernel", "d256 [dc]*", "sm_90", 72, _TIMED),
    # sm_90, the Hopper forward
    Allowance("forward_kernel", "d256 window sinks softcap", "sm_90", 60, _CAPPED, family="hopper"),
    # sm_90, the Hopper backward
    Allowance("invariant_kernel", "d128 *", "sm_120", 32, _JOINED),
    Allowance("invariant_kernel", "d128 *", "sm_90", 1412, _JOINED, family="hopper"),
    Allowance("invariant_kernel", "d256 *", "sm_90", 208, _JOINED, family="hopper"),
    Allowance("backward_kernel", "d128 window sinks softcap", "sm_90", 368, _CAPPED, family="hopper"),
    Allowance("backward_kernel", "d256 window sinks softcap", "sm_90", 276, _CAPPED, family="hopper"),
    Allowance("backward_kernel", "d* ragged", "sm_90", 244, _BETWEEN, family="hopper"),
    Allowance("backward_kernel", "* group *", "sm_90", 232, _BETWEEN, family="hopper"),
    Allowance("backward_kernel", "* deterministic", "sm_90", 116, _BETWEEN, family="hopper"),
    Allowance("backward_kernel", "*", "sm_90", 92, _BETWEEN, family="hopper"),
    # sm_80, 86, 89
    Allowance("keys_kernel", "* group *", "sm_8?", 1788, _GROUP),
    Allowance("keys_kernel", "* packed window *", "sm_8?", 768, _OPTIONS),
    Allowance("keys_kernel", "d21 *", "sm_8?", 68, _OFFLINE),
    Allowance("keys_kernel", "d64 *", "sm_8?", 52, _OFFLINE),
    Allowance("keys_kernel", "d[19][26]*", "sm_8?", 664, _OFFLINE),
    Allowance("queries_kernel", "d[19][26]*", "sm_8?", 56, _OFFLINE),
    Allowance("queries_kernel", "d256 dense", "sm_8?", 8, _OFFLINE),
    Allowance("forward_kernel", "d[19]*", "sm_8?", 36, _OFFLINE),
    # sm_100, 103
    Allowance("keys_kernel", "* group *", "sm_10?", 2752, _GROUP),
    Allowance("keys_kernel", "* packed window *", "sm_10?", 536, _OPTIONS),
    # sm_120
    Allowance("keys_kernel", "* group *", "sm_120", 1364, _GROUP),
    Allowance("keys_kernel", "* packed window *", "sm_120", 800, _OPTIONS),
    Allowance("keys_kernel", "d21 *", "sm_120", 40, _OFFLINE),
    Allowance("keys_kernel", "d64 *", "sm_120", 232, _OFFLINE),
    Allowance("keys_kernel", "d[19][26]*", "sm_120", 592, _OFFLINE),
    Allowance("queries_kernel", "* packed window *", "sm_120", 104, _OPTIONS),
    Allowance("forward_kernel", "* documents *", "sm_120", 8, _OFFLINE),
)


def spill_bytes(row: dict) -> int:
    return row["spill_store_bytes"] + row["spill_load_bytes"]


def allowance(row: dict) -> Allowance | None:
    """The line of the ledger that speaks of this kernel."""
    return next((line for line in LEDGER if line.covers(row)), None)


def faults(row: dict) -> list[str]:
    """What this kernel takes beyond its budget, in words; none is good."""
    line, limit = allowance(row), TARGETS[row["target"]].shared_bytes
    name = f"{row['kernel']} ({row['case']}, {row['target']})"
    if "error" in row:
        return [] if line and line.spill_bytes is None else [f"{name} does not compile: {row['error']}"]
    allowed = (line.spill_bytes or 0) if line else 0
    found = [
        (row["registers"] > MOST_REGISTERS, f"{row['registers']} registers a thread, expected at most {MOST_REGISTERS}"),
        (row["shared_bytes"] > limit, f"{row['shared_bytes']} bytes of shared memory, expected at most {limit}"),
        (row["tensor_columns"] > TENSOR_COLUMNS, f"{row['tensor_columns']} columns of tensor memory, expected at most {TENSOR_COLUMNS}"),
        (spill_bytes(row) > allowed, f"{spill_bytes(row)} bytes of spills, expected at most {allowed}; smaller tiles, or a line in LEDGER"),
        (row["serialized"] and not (line and line.serialized), "ptxas serialises its wgmma: an accumulator is touched while products are under way"),
    ]
    return [f"{name}: {words}" for wrong, words in found if wrong]


def stale(rows: Iterable[dict]) -> list[str]:
    """Lines of the ledger that `rows`, all that there are, do not need as they stand."""
    covered: dict[Allowance, list[dict]] = {line: [] for line in LEDGER}
    for row in rows:
        line = allowance(row)
        if line:
            covered[line].append(row)
    return [f"{line.kernel} ({line.case}, {line.target}): {words}" for line, under in covered.items() if (words := _unneeded(line, under))]


def _unneeded(line: Allowance, under: list[dict]) -> str:
    """Why a line should not stand as it does over the rows under it; "" if it should."""
    if line.spill_bytes is None:
        return "" if any("error" in row for row in under) else "it compiles now; take the line away"
    if line.serialized and not any(row.get("serialized") for row in under):
        return "ptxas serialises none of its wgmma now; say serialized no more"
    worst = max((spill_bytes(row) for row in under if "error" not in row), default=0)
    if worst >= line.spill_bytes and worst:
        return ""
    return f"allowed {line.spill_bytes} bytes of spills, the worst takes {worst}; {'write that' if worst else 'take the line away'}"
