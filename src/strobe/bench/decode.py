"""The decode suite: one new token per sequence over a cold paged cache. Rivals read the same keys from dense rows.

The time of a decode is the time to read its keys. In a model of many layers, keys come from memory and not from L2. So
each contender has several caches, together larger than any L2. One sample runs over all of them, on a GPU as one CUDA
graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import InvalidProblem
from ..interface import decode as interface
from ..problem.cache import PagedCache, quantize_kv
from ..selection.select import Choice
from . import roofline
from .attempt import Attempt
from .cases import chosen
from .run import Contender, Options, _drop_wrong, _short, circumstances, versions_of
from .timer import Function, Timing, as_graph, interleave

# least bytes of caches in a sample: five times the L2 of an H200 (50 MB), twice that of a B200 (126 MB)
COLD_BYTES = 256 * 2**20
Rows = tuple[Tensor, Tensor, Tensor]  # q [B, 1, H_q, D], k and v [B, S, H_kv, D]
Prepare = Callable[[Rows], Callable[[], Tensor]]


@dataclass(frozen=True)
class DecodeCase:
    """One decode case: `batch` sequences of `keys` keys each."""

    name: str
    batch: int
    keys: int
    page_size: int = 16
    fp8: bool = False
    batch_invariant: bool = False
    heads_q: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def copies(self) -> int:
        """The number of caches that one sample runs over."""
        held = 2 * self.batch * self.keys * self.heads_kv * self.head_dim * (1 if self.fp8 else self.dtype.itemsize)
        return max(1, ceil(COLD_BYTES / held))

    def inputs(self, device: torch.device, count: int = 1) -> list[tuple[Rows, PagedCache]]:
        """`count` layers: dense rows and a cache of shuffled pages each. All share one page table and lengths, as the
        layers of a model do.
        """
        draw = torch.Generator(device).manual_seed(0)
        columns = -(-self.keys // self.page_size)
        table = torch.randperm(self.batch * columns, device=device, generator=draw).to(torch.int32)
        lengths = torch.full((self.batch,), self.keys, dtype=torch.int32, device=device)
        return [self._layer(draw, table.view(self.batch, columns), lengths) for _ in range(count)]

    def _layer(self, draw: torch.Generator, table: Tensor, lengths: Tensor) -> tuple[Rows, PagedCache]:
        shape = (self.batch, self.keys, self.heads_kv, self.head_dim)
        shapes = ((self.batch, 1, self.heads_q, self.head_dim), shape, shape)
        q, k, v = (torch.randn(s, device=draw.device, generator=draw).to(self.dtype) for s in shapes)
        held_k, held_v, k_scale, v_scale = quantize_kv(k, v) if self.fp8 else (k, v, None, None)
        pool_k, pool_v = (self._pooled(t, table.view(-1)) for t in (held_k, held_v))
        return (q, k, v), PagedCache(pool_k, pool_v, table, lengths, k_scale, v_scale)

    def _pooled(self, t: Tensor, table: Tensor) -> Tensor:
        stored = t.view(torch.uint8) if self.fp8 else t
        room = F.pad(stored, (0, 0, 0, 0, 0, -self.keys % self.page_size)).view(
            len(table), self.page_size, *t.shape[2:]
        )
        return torch.empty_like(room).index_copy_(0, table.long(), room).view(t.dtype)


SUITE = [
    DecodeCase("b1_1k", 1, 1024),
    DecodeCase("b1_8k", 1, 8192),
    DecodeCase("b1_128k", 1, 131072),
    DecodeCase("b8_8k", 8, 8192),
    DecodeCase("b32_4k", 32, 4096),
    DecodeCase("b64_8k", 64, 8192),
    DecodeCase("b64_8k_pages_of_1", 64, 8192, page_size=1),
    DecodeCase("b64_8k_float8", 64, 8192, fp8=True),
    DecodeCase("b8_8k_batch_invariant", 8, 8192, batch_invariant=True),
]


def suite(patterns: Iterable[str]) -> list[DecodeCase]:
    """The cases whose names match a pattern (fnmatch). Without patterns: all cases. Raises InvalidProblem for a pattern
    without a match.

    >>> [case.name for case in suite(["b1_*"])]
    ['b1_1k', 'b1_8k', 'b1_128k']
    """
    return chosen(SUITE, list(patterns))


# ---------------------------------------------------------------- rivals, over dense rows: their fastest layout


def _sdpa(*backends: SDPBackend) -> Prepare:
    def prepare(rows: Rows) -> Callable[[], Tensor]:
        q, k, v = (t.transpose(1, 2) for t in rows)

        def call() -> Tensor:
            with sdpa_kernel(list(backends)) if backends else nullcontext():
                return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)

        return call

    return prepare


def _fa4(rows: Rows) -> Callable[[], Tensor]:
    cute = import_module("flash_attn.cute")
    return lambda: cute.flash_attn_func(*rows)[0]


RIVALS: dict[str, dict[str, Prepare]] = {
    "cuda": {"cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION), "flash": _sdpa(SDPBackend.FLASH_ATTENTION), "fa4": _fa4},
    "cpu": {"sdpa": _sdpa()},
}


def pick(names: list[str], device: torch.device) -> dict[str, Prepare]:
    """The named rivals, or all for this device. Raises InvalidProblem for an unknown name.

    >>> list(pick([], torch.device("cpu")))
    ['sdpa']
    """
    known = RIVALS[device.type]
    for name in names:
        if name not in known:
            raise InvalidProblem("rivals", repr(name), f"names among {', '.join(known)}", "separate them by commas")
    return {name: known[name] for name in names or known}


# ---------------------------------------------------------------- one case -> one row


def measure(case: DecodeCase, rivals: dict[str, Prepare], options: Options) -> dict:
    """Measure a case with strobe and every rival. "refused" in the row names rivals that cannot run it, with
    reasons.
    """
    on_gpu = options.device.type == "cuda"
    with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream(options.device)) if on_gpu else nullcontext():
        inputs = case.inputs(options.device, case.copies)
        keywords: dict = dict(batch_invariant=case.batch_invariant, kernel=options.kernel)
        ours = lambda rows, cache: lambda: interface.attention_decode(rows[0], cache, **keywords)
        refused = dict.fromkeys(rivals, "reads no keys of 8 bits") if case.fp8 else {}
        ready: dict[str, Contender] = {}
        for name, prepare in (*((n, p) for n, p in rivals.items() if n not in refused), ("strobe", None)):
            with Attempt() as attempt:
                calls = [ours(rows, cache) if prepare is None else prepare(rows) for rows, cache in inputs]
                ready[name] = Contender(_all(calls, on_gpu), (calls[0](),))
            if attempt.reason:
                refused[name] = attempt.reason
        error = _drop_wrong(ready, refused, case.dtype, "strobe")
        functions = {name: ready[name].function for name in sorted(ready, key=lambda name: name != "strobe")}
        times = interleave(functions, options.device, options.rounds, options.sample_ms)
        rows, cache = inputs[0]
        choice = interface.explain_decode(rows[0], cache, **keywords) if "strobe" in times else None
    return _row(case, choice, times, options) | {"refused": refused, "relative_error": error}


def _all(calls: Sequence[Function], on_gpu: bool) -> Function:
    def function() -> None:
        for call in calls:
            call()

    return as_graph(function) if on_gpu else function


def _row(case: DecodeCase, choice: Choice | None, times: dict[str, Timing], options: Options) -> dict:
    """The row, with the fields of `run.measure`. Times are those of one call: the time of a sample divided by its
    number of caches.
    """
    target = roofline.ceiling(options.device, case.dtype)
    each = {name: Timing(*(ms / case.copies for ms in timing)) for name, timing in times.items()}
    rivals = {name: _short(timing.median_ms) for name, timing in each.items() if name != "strobe"}
    row: dict = {"case": case.name, "direction": "decode", "dtype": str(case.dtype).removeprefix("torch.")}
    row |= dict.fromkeys(("kernel", "config", "ms", "tflops", "percent_of_ceiling", "ratio", "flops", "gbps"))
    if choice is not None:
        plan, mine = choice.forward, each["strobe"].median_ms
        work = plan.kernel.cost(choice.problem)
        row |= {"kernel": plan.kernel.name, "config": str(plan.config), "ms": _short(mine), "flops": work.flops}
        row |= {
            "tflops": _short(roofline.tflops(work, mine)),
            "percent_of_ceiling": _short(roofline.percent(work, target, mine)),
        }
        row |= {
            "gbps": _short(work.moved_bytes / mine / 1e6),
            "ratio": _short(min(rivals.values()) / mine) if rivals else None,
        }
    row |= {
        "rivals": rivals,
        "versions": versions_of(rivals),
        "spread": {name: [_short(t.low_ms), _short(t.high_ms)] for name, t in each.items()},
    }
    row |= {
        "timing": "graph" if options.device.type == "cuda" else "eager",
        "l2": "cold",
        "caches": case.copies,
        "rounds": options.rounds,
    }
    return (
        row
        | {"peak_tflops": _short(target.peak_tflops), "peak_gbps": _short(target.peak_gbps)}
        | circumstances(options.device)
    )
