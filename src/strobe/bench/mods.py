"""The mods suite: custom scores and masks beside strobe's built-in option of the same meaning and PyTorch's
FlexAttention.

Every contender gets the same Python functions: strobe through `score_mod=` and `mask_mod`, FlexAttention under
torch.compile. Masks, block masks and lists of blocks are made before the timing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..interface import attention as interface
from ..mods.mask import mask_mod
from ..mods.score import alibi
from ..problem import mask as masks
from ..problem.torch_private import without_donated_buffers
from . import roofline
from .attempt import Attempt
from .cases import Inputs, chosen
from .rivals import named
from .run import Contender, Options, _backward, _drop_wrong, _short, circumstances
from .timer import Timing, interleave

BLOCK = 64  # positions of a block of the relative bias
BACKWARD_FLOPS = 2.5  # five products to the forward's two


class Functions(NamedTuple):
    """What a case computes. captured: the tensors that get gradients in the backward.

    scored: strobe's own object in place of the function `score`. built_in: strobe's options of the same meaning.
    """

    mask: Callable[..., Tensor]
    score: Callable | None = None
    scored: Any = None
    built_in: dict | None = None
    captured: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class ModsCase:
    """A case with a custom score or mask, its scores causal. what: a name out of `MAKERS`."""

    name: str
    what: str
    backward: bool = False
    seqlen: int = 16384
    heads: int = 16
    head_dim: int = 128
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16

    def inputs(self, device: torch.device) -> Inputs:
        draw = torch.Generator(device).manual_seed(0)
        shape = (self.batch, self.seqlen, self.heads, self.head_dim)
        q, k, v, dout = (torch.randn(shape, device=device, generator=draw).to(self.dtype) for _ in range(4))
        for leaf in (q, k, v):
            leaf.requires_grad_(self.backward)
        return Inputs(q, k, v, dout, None, None)

    def functions(self, device: torch.device) -> Functions:
        return MAKERS[self.what](self, device)


# ---------------------------------------------------------------- what is measured


def _slopes(case: ModsCase, device: torch.device) -> Tensor:
    return 2.0 ** (-8 / case.heads * torch.arange(1, case.heads + 1, device=device))


def _alibi(case: ModsCase, device: torch.device) -> Functions:
    slopes = _slopes(case, device)
    return Functions(_causal, lambda s, b, h, q, k: s + slopes[h] * (k - q))


def _ready_alibi(case: ModsCase, device: torch.device) -> Functions:
    slopes = _slopes(case, device)
    return Functions(_causal, lambda s, b, h, q, k: s - slopes[h] * (q - k).abs(), alibi(slopes))


def _softcap(case: ModsCase, device: torch.device) -> Functions:
    built_in = {"causal": True, "softcap": 30.0}
    return Functions(_causal, lambda s, b, h, q, k: 30.0 * torch.tanh(s / 30.0), built_in=built_in)


def _relative_bias(case: ModsCase, device: torch.device, learned: bool = False) -> Functions:
    blocks = -(-case.seqlen // BLOCK)
    table = torch.randn(case.heads, blocks, blocks, device=device, generator=_seeded(device)).requires_grad_(learned)
    score = lambda s, b, h, q, k: s + table[h, q // BLOCK, k // BLOCK]
    return Functions(_causal, score, captured=(table,) if learned else ())


def _documents(case: ModsCase, device: torch.device) -> Functions:
    """Causal documents of 1/16 to 3/16 of the tokens."""
    lengths = torch.tensor([1, 3, 2, 2, 3, 1, 2, 2]) * case.seqlen // 16
    ids = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(lengths).to(device)
    mask = masks.causal() & masks.documents(ids.expand(case.batch, -1))
    return Functions(lambda b, h, q, k: (q >= k) & (ids[q] == ids[k]), built_in={"mask": mask})


def _prefix(case: ModsCase, device: torch.device) -> Functions:
    n = case.seqlen // 4
    return Functions(lambda b, h, q, k: (k < n) | (q >= k), built_in={"mask": masks.prefix_causal(n)})


def _window(case: ModsCase, device: torch.device) -> Functions:
    n = case.seqlen // 16
    built_in = {"window": (n - 1, 0)}
    return Functions(lambda b, h, q, k: (q >= k) & (q - k < n), built_in=built_in)


def _dilated(case: ModsCase, device: torch.device) -> Functions:
    """Every eighth block of 128 keys, counted from the query's, before and behind it."""
    return Functions(lambda b, h, q, k: (q // 128 - k // 128) % 8 == 0)


def _padding(case: ModsCase, device: torch.device) -> Functions:
    lengths = torch.full((case.batch,), case.seqlen * 3 // 4, dtype=torch.int32, device=device)
    built_in = {"mask": masks.key_lengths(lengths)}
    return Functions(lambda b, h, q, k: k < lengths[b], built_in=built_in)


def _global_window(case: ModsCase, device: torch.device) -> Functions:
    first, near = case.seqlen // 256, case.seqlen // 32
    return Functions(lambda b, h, q, k: (k < first) | ((q - k).abs() <= near))


def _dilated_window(case: ModsCase, device: torch.device) -> Functions:
    near = case.seqlen // 8
    return Functions(lambda b, h, q, k: ((q - k).abs() <= near) & ((q - k) % 4 == 0))


def _image(case: ModsCase, device: torch.device) -> Functions:
    """Neighbours in an image: 17 x 17 pixels around each."""
    width = 1 << (case.seqlen.bit_length() - 1) // 2
    near = lambda a, b: (a - b).abs() <= 8
    return Functions(lambda b, h, q, k: near(q % width, k % width) & near(q // width, k // width))


def _t5_bias(case: ModsCase, device: torch.device) -> Functions:
    table = torch.randn(case.heads, 257, device=device, generator=_seeded(device))
    return Functions(_causal, lambda s, b, h, q, k: s + table[h, (k - q).clamp(-128, 128) + 128])


def _temperature(case: ModsCase, device: torch.device) -> Functions:
    temperature = torch.linspace(0.5, 1.5, case.heads, device=device)
    return Functions(_causal, lambda s, b, h, q, k: s * temperature[h])


def _gate(case: ModsCase, device: torch.device) -> Functions:
    gate = torch.rand(case.heads, case.seqlen, device=device, generator=_seeded(device)) + 0.5
    return Functions(_causal, lambda s, b, h, q, k: s + gate[h, k].log())


def _sigmoid(case: ModsCase, device: torch.device) -> Functions:
    return Functions(_causal, lambda s, b, h, q, k: -torch.nn.functional.softplus(-s))


def _seeded(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(1)


def _causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


MAKERS: dict[str, Callable[[ModsCase, torch.device], Functions]] = {
    "alibi": _alibi,
    "ready_alibi": _ready_alibi,
    "softcap": _softcap,
    "relative_bias": _relative_bias,
    "learned_bias": partial(_relative_bias, learned=True),
    "documents": _documents,
    "prefix": _prefix,
    "window": _window,
    "dilated": _dilated,
    "padding": _padding,
    "global_window": _global_window,
    "dilated_window": _dilated_window,
    "image": _image,
    "t5_bias": _t5_bias,
    "temperature": _temperature,
    "gate": _gate,
    "sigmoid": _sigmoid,
}
SUITE = [
    ModsCase(f"{what}_{'backward' if backward else 'forward'}", what, backward)
    for what in MAKERS
    for backward in (False, True)
    if (what, backward) != ("learned_bias", False)  # the forward of relative_bias
]


def suite(patterns: Iterable[str]) -> list[ModsCase]:
    """The cases whose names match a pattern (fnmatch). Without patterns: all cases.

    >>> [case.name for case in suite(["documents*"])]
    ['documents_forward', 'documents_backward']
    """
    return chosen(SUITE, list(patterns))


# ---------------------------------------------------------------- contenders


Prepare = Callable[[ModsCase, Functions, Inputs], Callable[[], Tensor]]


def _ours(case: ModsCase, functions: Functions, x: Inputs, kernel: str | None = None) -> Callable[[], Tensor]:
    options = _options(functions)
    return lambda: interface.attention(x.q, x.k, x.v, kernel=kernel, **options)


def _options(functions: Functions) -> dict:
    """The functions as options of `attention`. Causal masks of a score are the built-in one."""
    options: dict = {"score_mod": functions.scored or functions.score}
    if functions.mask is _causal:
        return options | {"causal": True}
    return options | {"mask": mask_mod(functions.mask)}


def _built_in(case: ModsCase, functions: Functions, x: Inputs) -> Callable[[], Tensor]:
    options = functions.built_in
    if options is None:
        raise NotImplementedError("no option of attention means the same")
    return lambda: interface.attention(x.q, x.k, x.v, **options)


def _flex(case: ModsCase, functions: Functions, x: Inputs, backend: str = "") -> Callable[[], Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()  # the recompile limit counts over all cases
    compiled = torch.compile(flex_attention, dynamic=False)
    q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))
    block_mask = create_block_mask(functions.mask, None, None, case.seqlen, case.seqlen, device=q.device)
    options: dict = {"kernel_options": {"BACKEND": backend}} if backend else {}
    call = lambda: compiled(q, k, v, score_mod=functions.score, block_mask=block_mask, **options).transpose(1, 2)
    with without_donated_buffers():  # donated buffers allow only one backward; the timer runs many
        call()
    return call


def _flex_flash(case: ModsCase, functions: Functions, x: Inputs) -> Callable[[], Tensor]:
    if find_spec("flash_attn") is None or find_spec("flash_attn.cute") is None:
        raise ImportError("FlashAttention-4 is not installed")
    return _flex(case, functions, x, "FLASH")


RIVALS: dict[str, Prepare] = {"built_in": _built_in, "flex": _flex, "flex_flash": _flex_flash}
HOME = {"cuda": tuple(RIVALS), "cpu": ("built_in",)}  # on a CPU FlexAttention compiles C++ for minutes


def pick(names: list[str], device: torch.device) -> dict[str, Prepare]:
    """The named contenders beside strobe's functions, or all for this device.

    >>> list(pick([], torch.device("cpu")))
    ['built_in']
    """
    return named(names or HOME[device.type], RIVALS)


# ---------------------------------------------------------------- one case -> one row


def measure(case: ModsCase, rivals: dict[str, Prepare], options: Options) -> dict:
    """Measure a case with strobe's functions and every rival. A backward is timed alone, with the gradients of captured
    tensors. "refused" in the row names rivals that cannot run it, with reasons.
    """
    x, functions = case.inputs(options.device), case.functions(options.device)
    flops = _visible_pairs(case, functions, options.device) * case.heads * 4 * case.head_dim
    flops *= BACKWARD_FLOPS if case.backward else 1
    ready: dict[str, Contender] = {}
    refused: dict[str, str] = {}
    for name, prepare in (*rivals.items(), ("strobe", partial(_ours, kernel=options.kernel))):
        with Attempt() as attempt:
            forward = prepare(case, functions, x)
            function = _with_captured(forward, x, functions) if case.backward else forward
            found = function()
            ready[name] = Contender(function, (found,) if isinstance(found, Tensor) else found[:3])
        if attempt.reason:
            refused[name] = attempt.reason
    error = _drop_wrong(ready, refused, case.dtype, "strobe")
    contenders = {name: ready[name].function for name in sorted(ready, key=lambda name: name != "strobe")}
    times = interleave(contenders, options.device, options.rounds, options.sample_ms)
    return _row(case, functions, x, times, options, flops) | {"refused": refused, "relative_error": error}


def _with_captured(forward: Callable[[], Tensor], x: Inputs, functions: Functions) -> Callable[[], tuple[Tensor, ...]]:
    if not functions.captured:
        return _backward(forward, x)
    out, leaves = forward(), (x.q, x.k, x.v, *functions.captured)
    return lambda: torch.autograd.grad(out, leaves, x.dout, retain_graph=True)


def _visible_pairs(case: ModsCase, functions: Functions, device: torch.device) -> int:
    """Visible pairs of query and key over the batch, counted."""
    rows = mask_mod(functions.mask)._rows((case.seqlen, case.seqlen), (case.batch, None), device)
    return case.batch * sum(int(part[0].sum()) for part in rows)


def _row(
    case: ModsCase, functions: Functions, x: Inputs, times: dict[str, Timing], options: Options, flops: float
) -> dict:
    """The row, with the fields of `run.measure`. flops: of visible pairs."""
    target = roofline.ceiling(options.device, case.dtype)
    rivals = {name: _short(timing.median_ms) for name, timing in times.items() if name != "strobe"}
    row: dict = {"case": case.name, "direction": "backward" if case.backward else "forward"}
    row |= {"dtype": str(case.dtype).removeprefix("torch.")}
    row |= dict.fromkeys(("kernel", "config", "ms", "tflops", "percent_of_ceiling", "ratio"))
    mine = times.get("strobe")
    if mine is not None:
        choice = interface.explain(x.q, x.k, x.v, kernel=options.kernel, **_options(functions))
        plan = choice.backward if case.backward and choice.backward else choice.forward
        others = [ms for name, ms in rivals.items() if name != "built_in"]
        rate = flops / mine.median_ms / 1e9
        row |= {"kernel": plan.kernel.name, "config": str(plan.config), "ms": _short(mine.median_ms)}
        row |= {"tflops": _short(rate), "ratio": _short(min(others) / mine.median_ms) if others else None}
        row |= {"percent_of_ceiling": _short(100 * rate / target.peak_tflops) if target.peak_tflops else None}
        row |= {"of_built_in": _short(rivals["built_in"] / mine.median_ms) if "built_in" in rivals else None}
    row |= {"rivals": rivals, "flops": flops, "timing": "eager", "l2": "warm", "rounds": options.rounds}
    row |= {"spread": {name: [_short(t.low_ms), _short(t.high_ms)] for name, t in times.items()}}
    return row | circumstances(options.device)
