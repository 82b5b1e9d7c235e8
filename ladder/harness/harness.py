"""What all rungs share: problem sizes, inputs, the check against the oracle, and a row of figures.

A rung is one file that defines `RUNG`. Without a suitable GPU it runs at small size on the simulator, with the same
check. Results are checked before they are timed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from strobe import reference
from strobe.problem.call import Call
from strobe.problem.target import Target
from strobe.testing.compare import assert_as_good_as

from . import FILES, RUNGS, Row

Options = dict[str, int]  # fields of a rung's form that the caller sets: name -> value

if TYPE_CHECKING:
    from strobe.sim import Run


TOKENS = 16_384  # tokens of a measured batch: batch times seqlen is constant
WIDTH = 2_048  # heads times head_dim
SHORT = 2048  # number of keys up to which a rung may use other tiles
SMALL = 200  # queries and keys of a simulated check: several tiles per rung, the last one partial
_FP8 = torch.float8_e4m3fn
_U_FP8 = 2.0**-5  # half the unit roundoff of e4m3, as in testing.compare
_FLUSH_FP8 = 2.0**-18  # half of e4m3's smallest number, 2^-9, for weights scaled by 2^8
_CUT_FP8 = 2.0**-13  # relative to the accumulator: the tensor core keeps 14 bits when it adds 32 8-bit products


class Size(NamedTuple):
    """A problem: q [B, S_q, H, D], k and v [B, S_k, H_kv, D].

    >>> Size(1, 4, 4, 2, 1, 64, causal=True).pairs
    20
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    heads_kv: int
    head_dim: int
    causal: bool

    @property
    def pairs(self) -> int:
        """Unmasked (query, key) pairs, over all heads."""
        shift = self.seqlen_k - self.seqlen_q
        seen = (
            sum(min(max(row + shift + 1, 0), self.seqlen_k) for row in range(self.seqlen_q))
            if self.causal
            else self.seqlen_q * self.seqlen_k
        )
        return self.batch * self.heads * seen

    @property
    def flops(self) -> int:
        return 4 * self.pairs * self.head_dim

    @property
    def rows(self) -> int:
        """Queries, over all heads."""
        return self.batch * self.heads * self.seqlen_q

    def streamed(self, block_m: int, block_n: int, stop: int = 0, before: int = 0) -> int:
        """Keys that tiles of `block_m` queries load in tiles of `block_n`, over all query tiles and heads.

        stop: the first key that is not loaded (S_k if 0). before: how many queries before query 0 the first tile
        starts.

        >>> Size(1, 256, 300, 1, 1, 64, causal=True).streamed(128, 64)
        492
        """
        stop, keys = stop or self.seqlen_k, 0
        for start in range(-before, self.seqlen_q, block_m):
            seen = self.seqlen_k
            if self.causal:
                seen = min(max(start + block_m + self.seqlen_k - self.seqlen_q, 0), seen)
            keys += min(-(-seen // block_n) * block_n, stop)
        return self.batch * self.heads * keys

    def __str__(self) -> str:
        mask = "causal" if self.causal else "dense"
        return (
            f"B={self.batch} S_q={self.seqlen_q} S_k={self.seqlen_k} H={self.heads}/{self.heads_kv} "
            f"D={self.head_dim} {mask}"
        )


class Rung(NamedTuple):
    """One rung of the ladder.

    run(q, k, v, causal, **options) returns out, shaped like q (bfloat16 for 8-bit inputs), and lse float32 [B, H, S_q].
    """

    name: str
    idea: str
    below: str  # the rung that differs from this one only by its idea; "" for none
    run: Callable[..., tuple[Tensor, Tensor]]
    # form(head_dim, causal, **options): the frozen config that `run` compiles for; its fields are the options
    form: type[Any]
    moved: Callable[[Size, Any], int]  # bytes that the kernels request from global memory, by the model
    shows: tuple[str, ...]  # functions whose difference from the rung below shows the idea
    capability: int = 90  # minimum compute capability
    inputs: torch.dtype = torch.bfloat16
    weights: torch.dtype = torch.bfloat16  # dtype that p is rounded to
    queries: int = 0  # queries per sequence; 0: as many as keys
    small_seqlen: int = SMALL  # length of a simulated check
    # the part of (q, k, v) that products see, if not all of it
    seen: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None

    def form_of(self, size: Size, options: Options) -> Any:
        """The config that `run` compiles for at this size."""
        named = {field.name for field in fields(self.form)}
        return self.form(
            size.head_dim, size.causal, **({"short": size.seqlen_k <= SHORT} if "short" in named else {}), **options
        )

    def size(self, seqlen: int, head_dim: int, causal: bool) -> Size:
        """The size that is measured at this length."""
        if self.queries:
            return Size(max(1, 16 * TOKENS // seqlen), self.queries, seqlen, 32, 4, head_dim, causal)
        return Size(max(1, TOKENS // seqlen), seqlen, seqlen, WIDTH // head_dim, WIDTH // head_dim, head_dim, causal)

    def small(self, head_dim: int, causal: bool, seqlen: int = 0) -> Size:
        """The size that is simulated: two heads that share keys; by default more keys than queries, no whole tile."""
        keys = seqlen or self.small_seqlen + 57
        return Size(1, self.queries or seqlen or self.small_seqlen, keys, 2, 1, head_dim, causal)


def load(name: str) -> Rung:
    """The rung with that name.

    >>> load("k1").below
    ''
    """
    if name not in RUNGS:
        raise ValueError(f"rung: got {name!r}, expected one of {', '.join(RUNGS)}")
    return importlib.import_module(f"ladder.{FILES[name]}").RUNG


# ---------------------------------------------------------------- inputs and the check of results


def draw(rung: Rung, size: Size, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Standard normal q, k and v in the rung's dtype."""
    generator = torch.Generator(device).manual_seed(seed)
    keys = (size.batch, size.seqlen_k, size.heads_kv, size.head_dim)
    shapes = ((size.batch, size.seqlen_q, size.heads, size.head_dim), keys, keys)
    q, k, v = (torch.randn(shape, generator=generator, device=device).to(rung.inputs) for shape in shapes)
    return q, k, v


def check_inputs(
    q: Tensor, k: Tensor, v: Tensor, dtypes: Sequence[torch.dtype] = (torch.float16, torch.bfloat16)
) -> None:
    """Raise unless q, k and v are valid for every rung: contiguous [B, S, H, D] with D 64 or 128, and at least one
    query and key.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype not in dtypes or tensor.dtype != q.dtype:
            raise ValueError(
                f"{name}.dtype: got {tensor.dtype}, expected {' or '.join(map(str, dtypes))}, alike for q, k and "
                "v; convert it"
            )
        if tensor.ndim != 4 or tensor.shape[-1] not in (64, 128) or not tensor.numel():
            raise ValueError(
                f"{name}.shape: got {list(tensor.shape)}, expected [B, S, H, D] with D 64 or 128 and nothing "
                "empty; pad it"
            )
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name}.stride(): got {tensor.stride()}, expected a contiguous tensor; pass {name}.contiguous()"
            )
        if tensor.stride(0) >= 2**31:
            raise ValueError(
                f"{name}.shape: got {list(tensor.shape)}, expected entries of fewer than 2^31 elements: rungs "
                "count them in 32 bits"
            )
    if k.shape != v.shape or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]) or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"k.shape, v.shape: got {list(k.shape)}, {list(v.shape)}, expected q's B and D and a divisor of its H; "
            "reshape them"
        )


def programs(q: Tensor, tiles: int) -> int:
    """Number of persistent programs for `tiles`: one per SM. On the simulator two, so that each gets several tiles."""
    return min(tiles, Target.of(q.device).sm_count if q.is_cuda else 2)


def outputs(q: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Uninitialised (out like q, lse float32 [B, H, S_q])."""
    batch, seqlen, heads, _ = q.shape
    return torch.empty_like(q, dtype=dtype or q.dtype), torch.empty(
        batch, heads, seqlen, dtype=torch.float32, device=q.device
    )


def check_result(
    rung: Rung, found: tuple[Tensor, Tensor], inputs: tuple[Tensor, Tensor, Tensor], causal: bool, **options: int
) -> float:
    """The largest error of the first and last head, relative to the allowed error. Raises AssertionError above 1.

    16-bit rungs follow testing.compare, 8-bit rungs `_check_8_bits` on the values that their products see.
    """
    q, k, v = rung.seen(*inputs, **options) if rung.seen else inputs
    group, worst = q.shape[2] // k.shape[2], 0.0
    for entry, head in {(0, 0), (q.shape[0] - 1, q.shape[2] - 1)}:
        q1, k1, v1 = (
            t[entry : entry + 1, :, h : h + 1] for t, h in ((q, head), (k, head // group), (v, head // group))
        )
        call = Call(q1, k1, v1, right=0) if causal else Call(q1, k1, v1)
        out, lse = found[0][entry : entry + 1, :, head : head + 1], found[1][entry : entry + 1, head : head + 1]
        ratios = _check_8_bits(out, lse, call) if rung.weights == _FP8 else assert_as_good_as((out, lse), call)
        worst = max(worst, *ratios.values())
    return worst


def _check_8_bits(out: Tensor, lse: Tensor, call: Call) -> dict[str, float]:
    """The element-wise bound of testing.compare for weights rounded to e4m3 and sums of 14 bits.

    |o - o64| <= 2^-8 |o64| + 6 u sqrt(sum P^2 V^2) + flush + cut, u = 2^-5. Weights below e4m3's smallest number become
    0: 2^-18 of the row's largest weight each. Scores lose up to 2^-13 of the accumulator at each of D / 32 additions,
    and o at each of S_k / 32. A CPU sums exactly, so the bound is looser than necessary there.
    """
    q, k, v = (t.double() for t in (call.q, call.k, call.v))
    exact = reference.forward(call._replace(q=q, k=k, v=v))
    rows = reference._rows(call._replace(q=q, k=k, v=v), torch.float64)
    s, _ = reference._scores(rows)
    p, _ = reference._softmax(s, rows)
    size = rows.scale * (rows.q.abs() @ rows.k.abs().mT)
    blur = _CUT_FP8 * (rows.q.shape[-1] / 32) * torch.where(rows.seen, size, 0.0).amax(-1, keepdim=True)
    spread = 6 * _U_FP8 * (p.square() @ rows.v.square()).sqrt()
    flush = _FLUSH_FP8 * p.amax(-1, keepdim=True) * (rows.seen.double() @ rows.v.abs())
    cut = (2 * blur + _CUT_FP8 * rows.k.shape[-2] / 32) * (p @ rows.v.abs())
    allowed = 2.0**-8 * exact.out.abs() + (spread + flush + cut).transpose(1, 2) + 2.0**-20
    allowed_lse = 2e-6 + 2.0**-21 * exact.lse.abs().nan_to_num(0, 0, 0) + blur[..., 0]
    ratios = {}
    for name, got, right, limit in (("out", out, exact.out, allowed), ("lse", lse, exact.lse, allowed_lse)):
        ratios[name] = float(torch.where(got.double() == right, 0.0, (got.double() - right).abs() / limit).max())
    if not all(ratio <= 1 for ratio in ratios.values()):
        raise AssertionError(f"beyond the limit of 1: {ratios}")
    return ratios


# ---------------------------------------------------------------- figures


class _Allocations(TorchDispatchMode):
    """Counts the bytes allocated while it is active: outputs and workspace of a run on a CPU."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__.startswith(("empty", "zeros", "new_empty", "full")):
            self.total += found.numel() * found.element_size()
        return found


def simulated(rung: Rung, size: Size, options: Options, mode: str = "pct", seed: int = 0) -> tuple[Row, Run]:
    """(row, simulated run) of a small problem. Raises SimulationFault for a race, AssertionError for a wrong result.

    The row's moved_bytes are the bytes that the kernels requested from global memory, counted per access.
    """
    from strobe.sim import Checks, simulate

    q, k, v = draw(rung, size, torch.device("cpu"), seed)
    moved = 0
    with (
        simulate(f"sm_{rung.capability}", mode, seed, checks=Checks(read_fences=True)) as run,
        _Allocations() as allocations,
    ):
        access = run.machine.access

        def counted(memory: Any, mask: dict[int, int], write: bool, actor: Any) -> None:
            nonlocal moved
            if memory.space == "global":
                moved += sum(bits.bit_count() for bits in mask.values()) * memory.granule
            access(memory, mask, write, actor)

        run.machine.access = counted
        found = rung.run(q, k, v, size.causal, **options)
    worst = check_result(rung, found, (q, k, v), size.causal, **options)
    figures = {"worst": _short(worst), "peak_bytes": allocations.total, "moved_bytes": moved}
    return _row(rung, size, options, "simulator") | figures, run


def checked(
    rung: Rung, size: Size, options: Options, device: torch.device
) -> tuple[Row, Callable[[], tuple[Tensor, Tensor]]]:
    """(row without times, function to time) of a run on a GPU. Raises AssertionError for a wrong result."""
    q, k, v = draw(rung, size, device)
    run = lambda: rung.run(q, k, v, size.causal, **options)
    run()  # compiles, and autotunes the rungs that do so
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    found = run()
    torch.cuda.synchronize(device)
    figures = {
        "peak_bytes": torch.cuda.max_memory_allocated(device) - before,
        "worst": _short(check_result(rung, found, (q, k, v), size.causal, **options)),
    }
    return _row(rung, size, options, "gpu") | figures, run


def heading(name: str, size: Size, options: Options) -> Row:
    """The first fields of every row, including rows of failed runs."""
    return {"rung": name, **size._asdict(), "options": options} | dict.fromkeys(
        ("ms", "tflops", "gbps", "percent_of_ceiling", "moved_bytes")
    )


def _row(rung: Rung, size: Size, options: Options, where: str) -> Row:
    form = rung.form_of(size, options)
    about = heading(rung.name, size, options) | {"where": where}
    return about | {"flops": size.flops, "model_bytes": rung.moved(size, form)}


def _short(number: float) -> float:
    return float(f"{number:.5g}")
