"""What all rungs share: a problem's size, inputs, the check of results, and a row of figures. It checks against the
oracle before it times.

A rung is one file with a `RUNG`; where no GPU can run it, it runs at small size on the simulator and is judged all the
same.
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

from . import FILES, RUNGS

if TYPE_CHECKING:
    from strobe.sim import Run


TOKENS = 16_384  # of a measured batch: its entries get shorter as they get more
WIDTH = 2_048  # heads times head_dim
SHORT = 2048  # keys of a row, up to which a rung may have other tiles
SMALL = 200  # queries and keys of a simulated check: some tiles of every rung, the last of them ragged
_FP8 = torch.float8_e4m3fn
_U_FP8 = 2.0**-5  # half the unit roundoff of e4m3, as testing.compare counts
_FLUSH_FP8 = 2.0**-18  # half of e4m3's smallest number, 2^-9, under weights that were lifted by 2^8
_CUT_FP8 = 2.0**-13  # of what 8-bit products are added to: the tensor core keeps 14 bits of a sum of 32 terms


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
        """Queries and keys that meet, over all heads."""
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
        """Queries over all heads."""
        return self.batch * self.heads * self.seqlen_q

    def streamed(self, block_m: int, block_n: int, stop: int = 0, before: int = 0) -> int:
        """Keys that tiles of `block_m` queries load in tiles of `block_n`, over all tiles and heads, none from `stop`
        (S_k) on. The first tile begins `before` queries before the first.

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
    """One step of the ladder.

    run(q, k, v, causal, **options) gives out like q (bfloat16 for 8-bit inputs) and lse float32 [B, H, S_q].
    """

    name: str
    idea: str
    below: str  # the rung it differs from by its idea only; "" has none
    run: Callable[..., tuple[Tensor, Tensor]]
    form: Callable[
        ..., Any
    ]  # form(head_dim, causal, **options): the frozen config that `run` compiles for; its fields are the options
    moved: Callable[[Size, Any], int]  # bytes the kernels ask global memory for, by the model
    shows: tuple[str, ...]  # functions whose difference from the rung below is the idea
    capability: int = 90  # the least
    inputs: torch.dtype = torch.bfloat16
    weights: torch.dtype = torch.bfloat16  # what p is rounded to
    queries: int = 0  # of a sequence; 0: as many as keys
    small_seqlen: int = SMALL  # of a simulated check
    seen: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = (
        None  # what products see of (q, k, v), where that is less than all
    )

    def form_of(self, size: Size, options: dict[str, Any]) -> Any:
        """What `run` compiles for at this size."""
        named = {field.name for field in fields(self.form)}  # type: ignore[arg-type]
        return self.form(
            size.head_dim, size.causal, **({"short": size.seqlen_k <= SHORT} if "short" in named else {}), **options
        )

    def size(self, seqlen: int, head_dim: int, causal: bool) -> Size:
        """What is measured at this length."""
        if self.queries:
            return Size(max(1, 16 * TOKENS // seqlen), self.queries, seqlen, 32, 4, head_dim, causal)
        return Size(max(1, TOKENS // seqlen), seqlen, seqlen, WIDTH // head_dim, WIDTH // head_dim, head_dim, causal)

    def small(self, head_dim: int, causal: bool, seqlen: int = 0) -> Size:
        """What the simulator is given: two heads that share their keys; unless a length is asked for, more keys than
        queries, none a whole tile.
        """
        keys = seqlen or self.small_seqlen + 57
        return Size(1, self.queries or seqlen or self.small_seqlen, keys, 2, 1, head_dim, causal)


def load(name: str) -> Rung:
    """The rung of that name.

    >>> load("k1").below
    ''
    """
    if name not in RUNGS:
        raise ValueError(f"rung: got {name!r}, expected one of {', '.join(RUNGS)}")
    return importlib.import_module(f"ladder.{FILES[name]}").RUNG


# ---------------------------------------------------------------- inputs and the check of results


def draw(rung: Rung, size: Size, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Normal numbers in the rung's dtype."""
    generator = torch.Generator(device).manual_seed(seed)
    keys = (size.batch, size.seqlen_k, size.heads_kv, size.head_dim)
    shapes = ((size.batch, size.seqlen_q, size.heads, size.head_dim), keys, keys)
    q, k, v = (torch.randn(shape, generator=generator, device=device).to(rung.inputs) for shape in shapes)
    return q, k, v


def check_inputs(
    q: Tensor, k: Tensor, v: Tensor, dtypes: Sequence[torch.dtype] = (torch.float16, torch.bfloat16)
) -> None:
    """What every rung takes: contiguous [B, S, H, D] of D 64 or 128, at least one query and one key."""
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
    """How many programs walk `tiles`: one an SM; in the simulator two, so that each walks several."""
    return min(tiles, Target.of(q.device).sm_count if q.is_cuda else 2)


def outputs(q: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """(out like q, lse [B, H, S_q]), not yet written."""
    batch, seqlen, heads, _ = q.shape
    return torch.empty_like(q, dtype=dtype or q.dtype), torch.empty(
        batch, heads, seqlen, dtype=torch.float32, device=q.device
    )


def check_result(
    rung: Rung, found: tuple[Tensor, Tensor], inputs: tuple[Tensor, Tensor, Tensor], causal: bool, **options: Any
) -> float:
    """The worst error over what is allowed (1 is the limit) of the first head and the last; AssertionError beyond it.

    16-bit rungs are held to the rules of testing.compare, 8-bit ones to `_judge_8_bits` over the numbers their products
    see.
    """
    q, k, v = rung.seen(*inputs, **options) if rung.seen else inputs
    group, worst = q.shape[2] // k.shape[2], 0.0
    for entry, head in {(0, 0), (q.shape[0] - 1, q.shape[2] - 1)}:
        q1, k1, v1 = (
            t[entry : entry + 1, :, h : h + 1] for t, h in ((q, head), (k, head // group), (v, head // group))
        )
        call = Call(q1, k1, v1, right=0) if causal else Call(q1, k1, v1)
        out, lse = found[0][entry : entry + 1, :, head : head + 1], found[1][entry : entry + 1, head : head + 1]
        ratios = _judge_8_bits(out, lse, call) if rung.weights == _FP8 else assert_as_good_as((out, lse), call)
        worst = max(worst, *ratios.values())
    return worst


def _judge_8_bits(out: Tensor, lse: Tensor, call: Call) -> dict[str, float]:
    """The element-wise rule of testing.compare, for weights rounded to e4m3 and sums of 14 bits.

    |o - o64| <= 2^-8 |o64| + 6 u sqrt(sum P^2 V^2) + flush + cut, u = 2^-5. Weights below e4m3's smallest number become
    0: 2^-18 of the row's largest weight each. Scores lose up to 2^-13 of what they are added to at each of D / 32
    additions, and so does o at each of S_k / 32; on a CPU sums are whole, and the same limit is merely generous there.
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
    """Counts the bytes that are asked for while it is on: outputs and scratch of a run on a CPU."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__.startswith(("empty", "zeros", "new_empty", "full")):
            self.total += found.numel() * found.element_size()
        return found


def simulated(
    rung: Rung, size: Size, options: dict[str, Any], mode: str = "pct", seed: int = 0
) -> tuple[dict[str, Any], Run]:
    """(row, simulated run) of a small problem; SimulationFault for a race, AssertionError where it is wrong.

    The row's moved_bytes are what the kernels asked global memory for, counted access by access.
    """
    from strobe.sim import Checks, simulate

    q, k, v = draw(rung, size, torch.device("cpu"), seed)
    moved = 0
    with (
        simulate(f"sm_{rung.capability}", mode, seed, checks=Checks(read_fences=True)) as run,
        _Allocations() as allocations,
    ):
        access = run.machine.access

        def counted(memory: Any, mask: int, write: bool, actor: Any) -> None:
            nonlocal moved
            moved += mask.bit_count() * memory.granule if memory.space == "global" else 0
            access(memory, mask, write, actor)

        run.machine.access = counted  # type: ignore[method-assign]
        found = rung.run(q, k, v, size.causal, **options)
    worst = check_result(rung, found, (q, k, v), size.causal, **options)
    figures = {"worst": _short(worst), "peak_bytes": allocations.total, "moved_bytes": moved}
    return _row(rung, size, options, "simulator") | figures, run


def judged(
    rung: Rung, size: Size, options: dict[str, Any], device: torch.device
) -> tuple[dict[str, Any], Callable[[], tuple[Tensor, Tensor]]]:
    """(row without times, what to time) of a run on a GPU; AssertionError where it is wrong."""
    q, k, v = draw(rung, size, device)
    run = lambda: rung.run(q, k, v, size.causal, **options)
    run()  # compiles, and finds what suits the device where a rung is autotuned
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


def heading(name: str, size: Size, options: dict[str, Any]) -> dict[str, Any]:
    """What every row begins with, also that of a run that fails."""
    return {"rung": name, **size._asdict(), "options": options} | dict.fromkeys(
        ("ms", "tflops", "gbps", "percent_of_ceiling", "moved_bytes")
    )


def _row(rung: Rung, size: Size, options: dict[str, Any], where: str) -> dict[str, Any]:
    form = rung.form_of(size, options)
    about = heading(rung.name, size, options) | {"where": where}
    return about | {"flops": size.flops, "model_bytes": rung.moved(size, form)}


def _short(number: float) -> float:
    return float(f"{number:.5g}")
