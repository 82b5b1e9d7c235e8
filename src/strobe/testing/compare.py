"""Compare results with the float64 oracle. Both rules below are derived from error analysis, not tuned until tests
passed.

Rule 1, for a whole tensor. The largest error is at most twice that of eager PyTorch at the input precision, plus one
rounding of the result (eager is exact on some inputs), plus the float32 floor below. dQ and dK also get half of rule
2's allowance for a delta computed from the rounded O, an error that eager does not have. The maximum over few elements
depends on chance, so the rule applies from _MANY elements on. Counts and errors are those of the whole call: all
sequences of a packed call together.

Rule 2, for each element (under rule 1 alone, one bad row excuses all others). Let u be half the unit roundoff of the
weights' dtype: 2^-9 for bfloat16, 2^-12 for float16. A rounding errs by at most 2u, and by about u in the root mean
square. Errors of n independently rounded terms grow like sqrt(n). Chance never exceeds six times the root of the sum of
squares.

  out    |o - o64| <= r(o) + 6u sqrt(sum_j P^2 V^2) + max(2^-20, F_o)
         r(x) is the rounding of the result: 1.5u |x|, or half an ulp if that is larger (an ulp at x is between 2u|x|
         and 4u|x|).
  lse    |lse - lse64| <= 2e-6 + 2.7e-6 + 4 float32 ulp; for float64, 2^-52 / 2^-23 of that. 2.7e-6 is one rounding of a
         float32 number below 128, in nats (2^-18 ln 2). A score is rounded so if a kernel subtracts a maximum that the
         row later exceeds. For 16-bit inputs and a result that is not partial, only the backward uses lse, and 2^-13
         (half of float16's u) suffices. This applies on a CPU, where the exp of torch's kernel errs by 2^-14. It also
         applies to bfloat16 on Blackwell, where a polynomial of degree 3 errs by 2^-13.2.
  delta  = sum_d dO O is computed from the rounded O, whose two errors give
         D_i = 6u (sqrt(sum_d dO^2 O^2) + sqrt(sum_j P^2 dP^2));   the first is 0 if O stays float32 (a partial result)
  dV_j   r(dV) + 2u|dV| + 6u sqrt(sum_i P^2 dO^2) + F_v
  dQ_i   r(dQ) + 2u|dQ| + scale (6u sqrt(sum_j dS^2 K^2) + D_i |sum_j P t K|) + F_q
  dK_j   r(dK) + 2u|dK| + scale (6u sqrt(sum_i dS^2 Q^2) + sqrt(sum_i (P t D_i)^2 Q^2)) + F_k
  dsink  r(dsink) + sqrt(sum_i (w_i D_i)^2) + F_s,   w = exp(sink - lse)
         t is the derivative of the softcap, 1 without. Equal weights round to equal values, so their errors do not
         average out. They change the result by at most 2u of itself: the terms 2u|x|. (out has no such term: the
         contract fixes its rule, and its weights are rounded before the division, where equal ones are exactly 1.) P,
         dS and delta's O below the smallest normal number count as that number, because their roundings err as much
         (2^-25 in float16). A dO wider than the inputs (of a partial result) is rounded for the products: one more 6u
         sqrt(sum dO^2 ...) each.

F is the floor of the accumulators. Scores, exponentials and sums in float32 err too; for float32 inputs these are the
only errors. With w = 2^-25 (2^-54 for float64), one operation errs by at most 2w. 6w allows for a few operations in a
row. A chain of n additions of one sign errs by w sqrt(n) / 2 in the root mean square; six times that is c_n = 3w
sqrt(n). For tensor cores see `_product_chain`. A score has three roundings beyond those of its sum: the scale, the
scaled score, and its difference to the maximum. With A_ij = scale t sum_d |q||k|, a weight errs by e_ij = 6w (1 +
|lse_i| + softcap) + c_{D + 3} A_ij, and

  F_o = sum_j P e (|V| + |O|) + c_{S_k} sum_j P |V|            F_lse = sum_j P e: it replaces the rule above if larger
  F_v = sum_i P e |dO| + c_{S_q} sum_i P |dO|
  E_delta = (6w + c_{D_v}) (sum_d |dO||O| + |dlse|) + sum_j P e |dP - sum_d dO O| (the last: O's error, seen through dO)
  E_ij = P (|dP - delta| e (1 + 2 / softcap) + (6w + c_{D_v}) sum_d |dO||V| + E_delta)
  F_q = scale sum_j (E + c_{S_k} |dS|) |K|                     F_k = scale sum_i (E + c_{S_q} |dS|) |Q|
  F_s = sum_i w_i (|delta| e_lse + E_delta), as in e and E
  An accumulator below its smallest normal number may be flushed to 0: that number is added to P e and to the allowed
  error of a result.

Source of the form: LAPACK's residual ratios; Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., chapter
3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from .. import reference
from ..kernels.blackwell.kernel import CAPABILITIES
from ..problem.call import Call
from ..problem.merge import Partial
from ..problem.problem import Problem
from ..problem.target import Target
from ..reference import Gradients, _rows, _scores, _sequences, _softmax

if TYPE_CHECKING:
    from ..selection.select import Choice

U = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 2.0**-25, torch.float64: 2.0**-54}
_DIGITS = {
    torch.bfloat16: 8,
    torch.float16: 11,
    torch.float32: 24,
    torch.float64: 53,
}  # bits of the significand, including the hidden one
_MANY = 256

Ratios = dict[str, float]  # the largest error divided by the allowed error, for each tensor and rule; 1 is the limit


def assert_as_good_as(actual: Partial | tuple[Tensor, Tensor], call: Call) -> Ratios:
    """Compare out and lse of `call` with the oracle, by both rules.

    >>> from strobe.testing import CASES
    >>> call = CASES["causal"].build()
    >>> sorted(assert_as_good_as(reference.forward(call, torch.float32), call))
    ['lse', 'out', 'out to eager']

    Raises AssertionError if a ratio exceeds 1 or is NaN.
    """
    out, lse = (t.detach() for t in actual)
    call = _detached(call)
    outs, logs = _Tally("out"), _Tally("lse")
    for one, rows, _ in _parts(call):
        exact = reference.forward(one)
        rest, floor, floor_lse = _forward_bounds(one)
        outs.add(_part(out, rows), exact.out, rest, floor, _eager(one)[0] if out.numel() >= _MANY else exact.out)
        logs.add_allowed(_part(lse, rows, -1), exact.lse, torch.maximum(_lse_allowed(exact.lse, call), floor_lse))
    if call.packed:
        outs.add_exactly(out[_outside(call)[0]], 0.0)
        logs.add_exactly(lse[:, _outside(call)[0]], -torch.inf if call.sinks is None else call.sinks[:, None])
    return _judged({**outs.ratios(), **logs.ratios()}, call)


def assert_gradients_as_good_as(
    actual: Gradients | tuple, call: Call, dout: Tensor, dlse: Tensor | None = None
) -> Ratios:
    """Compare dq, dk, dv and dsinks of `call` with the oracle, by both rules.

    dout is shaped like out, dlse like lse (None: 0). Raises AssertionError if a ratio exceeds 1 or is NaN.
    """
    call = _detached(call)
    tallies = [_Tally(name) for name in Gradients._fields]
    # dsinks: exact, square of the spread, floor, eager
    sums = [torch.zeros(call.q.shape[-2], dtype=torch.float64, device=call.q.device)] * 4
    many = max(t.numel() for t in (call.q, call.k, call.v)) >= _MANY  # all sequences together, as in _Tally
    for one, rows, keys in _parts(call):
        upstream = _part(dout, rows), None if dlse is None else _part(dlse, rows, -1)
        exact, bounds = reference.backward(one, *upstream), _gradient_bounds(one, *upstream)
        crude = _eager_gradients(one, *upstream) if many else exact
        for tally, got, index, right, (rest, slack), rough in zip(
            tallies, actual, (rows, keys, keys), exact, bounds, crude
        ):
            tally.add(_part(got, index), right, rest, slack, rough)
        if exact.dsinks is not None and crude.dsinks is not None:
            sums = [total + more for total, more in zip(sums, (exact.dsinks, *bounds[3], crude.dsinks.double()))]
    if call.packed:
        for tally, got, outside in zip(tallies, actual[:3], (_outside(call)[i] for i in (0, 1, 1))):
            tally.add_exactly(got[outside], 0.0)
    if call.sinks is not None:
        if call.packed and dlse is not None:  # the lse of a row outside every sequence is the sink
            lone = dlse[:, _outside(call)[0]].double()
            sums = [sums[0] + lone.sum(1), sums[1], sums[2] + 6 * _w(call) * lone.abs().sum(1), sums[3] + lone.sum(1)]
        dsinks = actual[3]
        if dsinks is None:
            raise AssertionError("no gradient of the sinks")
        tallies[3].add(dsinks, sums[0], sums[1] ** 0.5 + sums[2], sums[2], sums[3])
    return _judged({name: ratio for tally in tallies for name, ratio in tally.ratios().items()}, call)


def assert_kernel(choice: Choice, name: str) -> None:
    """Raise AssertionError unless `choice` runs `name`: a family ("cpu") or one kernel ("cpu.forward")."""
    ran = [plan.kernel.name for plan in (choice.forward, choice.backward) if plan]
    right = name in ran if "." in name else all(kernel.split(".")[0] == name for kernel in ran)
    if not right:
        raise AssertionError(f"{', '.join(ran)} ran, not {name}")


# ---------------------------------------------------------------- the two rules


class _Tally:
    """Errors and limits of one tensor, combined over the sequences of a packed call."""

    def __init__(self, name: str):
        self.name = name
        self.by_element = 0.0
        self.error, self.eager_error, self.slack, self.count = 0.0, 0.0, 0.0, 0

    def add(self, got: Tensor, exact: Tensor, rest: Tensor, slack: Tensor, crude: Tensor) -> None:
        """rest: rule 2's allowance without the rounding of the result. slack: rule 1's allowance in addition to the
        error of eager's `crude`.
        """
        if got.numel() == 0:
            return
        if got.shape != exact.shape:
            raise AssertionError(f"{self.name} has shape {list(got.shape)}, not {list(exact.shape)}")
        self.add_allowed(got, exact, rest + _rounding(exact.abs() + rest, exact, got.dtype) + _least_normal(got.dtype))
        self.error = _larger(self.error, (got.double() - exact).abs().max())
        self.eager_error = max(self.eager_error, (crude.double() - exact).abs().nan_to_num(0.0).max().item())
        self.slack = max(self.slack, _half_ulp(exact, got.dtype).max().item() + float(slack.max()))
        self.count += got.numel()

    def add_allowed(self, got: Tensor, exact: Tensor, allowed: Tensor) -> None:
        same = got.double() == exact  # also for infinities, whose difference is NaN
        if got.numel():
            self.by_element = _larger(
                self.by_element, torch.where(same, 0.0, (got.double() - exact).abs() / allowed).max()
            )

    def add_exactly(self, got: Tensor, value: float | Tensor) -> None:
        if not bool((got == value).all()):
            self.by_element = float("inf")

    def ratios(self) -> Ratios:
        found = {self.name: self.by_element}
        if self.count >= _MANY:
            found[f"{self.name} to eager"] = self.error and self.error / (2 * self.eager_error + self.slack)
        return found


def _larger(a: float, b: Tensor) -> float:
    """The larger of both; NaN if either is NaN."""
    return float(torch.maximum(torch.tensor(a, dtype=torch.float64), b.double().cpu()))


def _rounding(reached: Tensor, exact: Tensor, dtype: torch.dtype) -> Tensor:
    """r(x). The ulp is that of the largest allowed value `reached`, because an error may move the result past the next
    power of two.
    """
    return torch.maximum(1.5 * U[dtype] * exact.abs(), _half_ulp(reached, dtype))


def _half_ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    least = torch.finfo(dtype).smallest_normal
    exponent = torch.frexp(x.double().abs().clamp(min=least)).exponent  # |x| = m 2^exponent, 1/2 <= m < 1
    return torch.ldexp(torch.ones_like(x, dtype=torch.float64), exponent - _DIGITS[dtype] - 1)


def _least_normal(dtype: torch.dtype) -> float:
    """The smallest normal number of the accumulators' dtype: float32, or float64 for float64."""
    return torch.finfo(torch.promote_types(dtype, torch.float32)).smallest_normal


def _lse_allowed(exact: Tensor, call: Call) -> Tensor:
    dtype = call.q.dtype
    by_polynomial = dtype == torch.bfloat16 and Target.of(call.q.device).capability in CAPABILITIES
    loose = by_polynomial if call.q.is_cuda else dtype.itemsize == 2
    if loose and not call.partial:  # only the backward uses it, and there P's own rounding is 2u
        return torch.full_like(exact, 2.0**-13)
    float32 = 2e-6 + 2.7e-6 + 4 * 2.0**-23 * torch.where(exact.isinf(), 0.0, exact.abs())
    return float32 if dtype != torch.float64 else float32 * 2.0**-29


def _judged(ratios: Ratios, call: Call) -> Ratios:
    if not all(ratio <= 1 for ratio in ratios.values()):  # so that NaN raises
        raise AssertionError(f"beyond the limit of 1: {ratios} for {Problem.from_call(call)}")
    return ratios


# ---------------------------------------------------------------- eager PyTorch at the input precision


def _eager(one: Call) -> tuple[Tensor, Tensor]:
    """out and lse as plain model code computes them: each op rounds its result to the inputs' dtype."""
    rows = _rows(one, one.q.dtype)
    s = torch.matmul(rows.q, rows.k.transpose(-1, -2)) * rows.scale
    if rows.softcap:
        s = rows.softcap * torch.tanh(s / rows.softcap)
    s = s.masked_fill(~rows.seen, -torch.inf)
    if rows.sinks is not None:
        s = torch.cat(
            [s, rows.sinks.clamp(max=torch.finfo(s.dtype).max)[None, :, None, None].expand(*s.shape[:3], 1)], -1
        )
    alive = (s > -torch.inf).any(-1, keepdim=True)
    s = torch.where(alive, s, 0.0)
    p = (torch.softmax(s, -1) * alive)[..., : rows.v.shape[-2]]
    lse = torch.logsumexp(s, -1) if s.shape[-1] else s.sum(-1)
    return torch.matmul(p, rows.v).transpose(1, 2), torch.where(alive[..., 0], lse, 0.0)


def _eager_gradients(one: Call, dout: Tensor, dlse: Tensor | None) -> Gradients:
    """Autograd's gradients of `_eager`; zeros for inputs that the result does not depend on."""
    with torch.enable_grad():
        given = {name: tensor for name in ("q", "k", "v", "sinks") if (tensor := getattr(one, name)) is not None}
        leaves = {name: tensor.detach().to(one.q.dtype).requires_grad_() for name, tensor in given.items()}
        out, lse = _eager(one._replace(**leaves))
        loss = (out * dout.to(out.dtype)).sum()
        loss = loss if dlse is None else loss + (lse * dlse.to(lse.dtype)).sum()
        found = torch.autograd.grad(loss, tuple(leaves.values()), allow_unused=True, materialize_grads=True)
    return Gradients(*found, *[None] * (4 - len(found)))


# ---------------------------------------------------------------- bounds


class _Facts(NamedTuple):
    """Intermediate results of one dense call in float64: [B, H, S, D] and [B, H, S_q, S_k]."""

    rows: reference._Rows
    p: Tensor
    slope: Tensor | float  # t, the derivative of the softcap
    lse: Tensor  # 0 where it is infinite
    out: Tensor
    wrong: Tensor  # P_ij e_ij, plus the loss from flushing to 0


def _facts(one: Call) -> _Facts:
    rows = _rows(one, torch.float64)
    s, slope = _scores(rows)
    p, lse = _softmax(s, rows)
    lse = torch.where(lse.isinf(), 0.0, lse)  # -inf: the row sees no key; +inf: its sink has all the weight
    size = abs(rows.scale) * (rows.q.abs() @ rows.k.abs().mT) * slope
    error = 6 * _w(one) * (1 + lse.abs()[..., None] + rows.softcap) + _product_chain(one, rows.q.shape[-1]) * size
    return _Facts(rows, p, slope, lse, p @ rows.v, p * error + (p > 0) * _least_normal(one.q.dtype))


@torch.no_grad()
def _forward_bounds(one: Call) -> tuple[Tensor, Tensor, Tensor]:
    """(rule 2's allowance without the result's rounding, F_o) for out, both [B, S_q, H, D_v]; F_lse [B, H, S_q]."""
    rows, p, _, _, out, wrong = _facts(one)
    u = _weights_u(one)
    spread = 6 * u * (p.square() @ rows.v.square()).sqrt()
    floor_lse = wrong.sum(-1)
    floor = (wrong + p * _chain(one, p.shape[-1])) @ rows.v.abs() + floor_lse[..., None] * out.abs()
    rest = spread + (floor.clamp(min=2.0**-20) if u else floor)
    return rest.transpose(1, 2), floor.transpose(1, 2), floor_lse


@torch.no_grad()
def _gradient_bounds(one: Call, dout: Tensor, dlse: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """(rule 2's allowance without the rounding of the result, rule 1's allowance in addition to eager's error) for dq,
    dk and dv. For dsinks (square of the spread, floor).
    """
    rows, p, slope, lse, out, wrong = _facts(one)
    q, k, v = rows.q, rows.k, rows.v
    u, scale = _weights_u(one), abs(rows.scale)
    do, dl = dout.double().transpose(1, 2), torch.zeros_like(lse) if dlse is None else dlse.double()
    dp, delta = do @ v.mT, (do * out).sum(-1) - dl
    away, pt = dp - delta[..., None], p * slope
    ds = pt * away
    wide = float(dout.dtype.itemsize > one.q.dtype.itemsize)
    o_rounded = _no_less_than_normal(out, out != 0, one)
    d_out = 3 * u * ((do * o_rounded).square().sum(-1, keepdim=True).sqrt() * (not one.partial))
    d = 2 * d_out + 6 * u * (p * dp).square().sum(-1, keepdim=True).sqrt()
    p_rounded, ds_rounded = (_no_less_than_normal(t, p > 0, one) for t in (p, ds))
    squares = (6 * u) ** 2 * (ds_rounded.square() + wide * pt.square() * (do.square() @ v.square().mT))
    # the floors
    along_k, along_q = _chain(one, p.shape[-1]), _chain(one, p.shape[-2] * p.shape[1] // max(1, one.k.shape[-2]))
    delta_floor = (6 * _w(one) + _chain(one, v.shape[-1])) * ((do * out).abs().sum(-1) + dl.abs())
    delta_floor = delta_floor + (wrong * (dp - (do * out).sum(-1, keepdim=True)).abs()).sum(-1)
    dp_floor = (6 * _w(one) + _chain(one, v.shape[-1])) * (do.abs() @ v.abs().mT)
    ds_floor = wrong * away.abs() * (1 + (2 / rows.softcap if rows.softcap else 0)) + p * (
        dp_floor + delta_floor[..., None]
    )
    by_key = lambda t: t.unflatten(1, (one.k.shape[-2], -1)).sum(2)  # sum over the query heads of each key head
    spread_k = by_key(squares.mT @ q.square()).sqrt() + by_key((pt * d).square().mT @ q.square()).sqrt()
    terms = (  # (gradient, spread, floor)
        (
            ds @ k * scale,
            scale * ((squares @ k.square()).sqrt() + d * (pt @ k).abs()),
            scale * (ds_floor + along_k * ds.abs()) @ k.abs(),
        ),
        (by_key(ds.mT @ q) * scale, scale * spread_k, scale * by_key((ds_floor + along_q * ds.abs()).mT @ q.abs())),
        (
            by_key(p.mT @ do),
            6 * u * by_key((1 + wide) * (p_rounded.square().mT @ do.square())).sqrt(),
            by_key((wrong + p * along_q).mT @ do.abs()),
        ),
    )
    weight = torch.zeros_like(lse) if rows.sinks is None else torch.exp((rows.sinks[None, :, None] - lse).clamp(max=0))
    weight_floor = 6 * _w(one) * (1 + lse.abs()) + _chain(one, p.shape[-2]) + wrong.sum(-1)
    dsinks = (
        (weight * d[..., 0]).square().sum((0, 2)),
        (weight * (weight_floor * delta.abs() + delta_floor)).sum((0, 2)),
    )
    own = scale * d_out * (pt @ k).abs(), scale * by_key((pt * d_out).square().mT @ q.square()).sqrt(), 0.0
    bounds = [(2 * u * exact.abs() + spread + floor, floor + more) for (exact, spread, floor), more in zip(terms, own)]
    return [*((rest.transpose(1, 2), slack.transpose(1, 2)) for rest, slack in bounds), dsinks]


# ---------------------------------------------------------------- packed calls, one sequence at a time


def _parts(call: Call):
    """(dense call, slice of rows, slice of keys) per sequence. A dense call gives itself and None for both slices."""
    return _sequences(call) if call.packed else [(call, None, None)]


def _detached(call: Call) -> Call:
    return call._replace(
        **{name: t.detach() for name in ("q", "k", "v", "sinks") if (t := getattr(call, name)) is not None}
    )


def _part(tensor: Tensor, index: slice | None, dim: int = 0) -> Tensor:
    if index is None:
        return tensor
    return (tensor[index] if dim == 0 else tensor[..., index])[None]


def _outside(call: Call) -> tuple[Tensor, Tensor]:
    """bool [T_q] and [T_k]: tokens outside every sequence."""
    found = []
    for tensor, offsets in ((call.q, cast(Tensor, call.cu_seqlens_q)), (call.k, cast(Tensor, call.cu_seqlens_k))):
        token = torch.arange(tensor.shape[0], device=tensor.device)
        found.append((token < offsets[0]) | (token >= offsets[-1]))
    return found[0], found[1]


def _weights_u(call: Call) -> float:
    """u of the weights' dtype; 0 if weights keep the accumulators' precision."""
    return U[call.q.dtype] if call.q.dtype.itemsize == 2 else 0.0


def _no_less_than_normal(t: Tensor, where: Tensor, call: Call) -> Tensor:
    """|t|, at least the smallest normal number of the weights' dtype: smaller numbers have its rounding error."""
    return torch.where(where, t.abs().clamp(min=torch.finfo(call.q.dtype).smallest_normal), 0.0)


def _w(call: Call) -> float:
    """w; twice that for float64, because the oracle has the same rounding errors."""
    return 2 * U[torch.float64] if call.q.dtype == torch.float64 else U[torch.float32]


def _product_chain(call: Call, n: int) -> float:
    """c_{n + 3} for scores. A GPU's tensor cores add 16 terms at a time and truncate the sum: an error of up to one ulp
    (4w) each time, always in one direction. Without this term, a needle input with n = 256 has an lse ratio of 1.09 on
    an H200.
    """
    return _chain(call, n + 3) + (4 * _w(call) * -(-n // 16) if call.q.is_cuda and call.q.dtype.itemsize == 2 else 0.0)


def _chain(call: Call, n: int) -> float:
    """c_n: the allowed error of a chain of n additions of one sign, relative to its sum."""
    return 3 * _w(call) * n**0.5
