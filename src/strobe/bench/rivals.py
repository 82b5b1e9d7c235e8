"""Rival implementations: each has a name, a reason why it cannot run a case, and a method that prepares a call.

Each rival gets its best inputs. SDPA gets strided views, as from the transposes in a model. Packed kernels get
documents as packed sequences. Masks and offsets are made before the timing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import InvalidProblem
from ..interface import attention as interface
from ..problem.torch_private import without_donated_buffers
from ..selection.select import Choice
from .cases import Case, Inputs
from .earlier import MARK, Earlier
from .layouts import as_sequences, batched, dense_mask, heads_first, like_ours, mask_mod, too_many_scores

Forward = Callable[[], Tensor]
Item = TypeVar("Item")
NO_SOFTCAP = "has no softcap"
SELF = "self"  # strobe as a second contender, to show the noise between two measurements of one kernel


class Rival(Protocol):
    """`prepare` returns a function without arguments; its result is [B, S, H, D], or [T, H, D] if packed.

    `why_not` returns the reason why the rival cannot run the case on the device, or None."""

    name: str

    def why_not(self, case: Case, device: torch.device) -> str | None: ...

    def prepare(self, case: Case, x: Inputs) -> Forward: ...


class Strobe:
    """strobe as a contender."""

    def __init__(self, kernel: str | None = None, name: str = "strobe"):
        self.kernel, self.name = kernel, name

    def why_not(self, case: Case, device: torch.device) -> str | None:
        return None

    def prepare(self, case: Case, x: Inputs) -> Forward:
        function, options = (interface.attention_varlen if case.packed else interface.attention), self._options(case, x)
        return lambda: function(x.q, x.k, x.v, **options)

    def choice(self, case: Case, x: Inputs) -> Choice:
        return (interface.explain_varlen if case.packed else interface.explain)(x.q, x.k, x.v, **self._options(case, x))

    def _options(self, case: Case, x: Inputs) -> dict:
        if not case.packed:
            return dict(mask=case.mask(x.ids), softcap=case.softcap or None, kernel=self.kernel)
        longest = max(case.lengths)
        return dict(
            cu_seqlens_q=x.cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            window=case.bounds,
            kernel=self.kernel,
        )


class Sdpa:
    """torch's scaled_dot_product_attention with one fixed backend. Windows and documents are dense masks."""

    def __init__(self, name: str, backend: SDPBackend):
        self.name, self.backend = name, backend

    def why_not(self, case: Case, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "measured on cuda"
        if case.packed:
            return "sequences of different lengths would have to be padded"
        if case.softcap:
            return NO_SOFTCAP
        return too_many_scores(case, device) if self.backend is SDPBackend.MATH else None

    def prepare(self, case: Case, x: Inputs) -> Forward:
        q, k, v = heads_first(case, x)
        rest: dict = dict(attn_mask=dense_mask(case, x)) if case.lengths or case.window else dict(is_causal=case.causal)
        rest["enable_gqa"] = case.grouped

        def call() -> Tensor:
            with sdpa_kernel(self.backend):
                return like_ours(case, F.scaled_dot_product_attention(q, k, v, **rest))

        return call


class SdpaCpu:
    """torch's scaled_dot_product_attention on a CPU: one call per document, and no windows."""

    name = "sdpa"

    def why_not(self, case: Case, device: torch.device) -> str | None:
        if device.type != "cpu":
            return "measured on cpu"
        if case.softcap:
            return NO_SOFTCAP
        return "a window needs a dense mask: see sdpa_mask" if case.window else None

    def prepare(self, case: Case, x: Inputs) -> Forward:
        parts = zip(*(t.transpose(1, 2).split(case.lengths or (case.seqlen,), 2) for t in batched(case, x)))
        documents = list(parts)
        rest: dict = dict(is_causal=case.causal, enable_gqa=case.grouped)
        each = lambda: [F.scaled_dot_product_attention(*document, **rest) for document in documents]
        if len(documents) == 1:
            return lambda: like_ours(case, each()[0])
        return lambda: like_ours(case, torch.cat(each(), 2))


class SdpaMask:
    """torch's scaled_dot_product_attention on a CPU, with any mask as a dense mask."""

    name = "sdpa_mask"

    def why_not(self, case: Case, device: torch.device) -> str | None:
        if device.type != "cpu":
            return "measured on cpu"
        if case.softcap:
            return NO_SOFTCAP
        return None if case.masked else "nothing to mask: the same as sdpa"

    def prepare(self, case: Case, x: Inputs) -> Forward:
        (q, k, v), seen = heads_first(case, x), dense_mask(case, x)
        return lambda: like_ours(case, F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=case.grouped))


class Naive:
    """softmax(scale * q k^T + mask) v as separate torch operations, on a CPU."""

    name = "naive"

    def why_not(self, case: Case, device: torch.device) -> str | None:
        return "measured on cpu" if device.type != "cpu" else too_many_scores(case, device)

    def prepare(self, case: Case, x: Inputs) -> Forward:
        q, k, v = heads_first(case, x)
        hidden = ~dense_mask(case, x) if case.masked else None
        group = case.heads_q // case.groups

        def call() -> Tensor:
            keys, values = (t.repeat_interleave(group, 1) if group > 1 else t for t in (k, v))
            s = (q @ keys.transpose(-1, -2)) * case.head_dim**-0.5
            s = case.softcap * torch.tanh(s / case.softcap) if case.softcap else s
            s = s if hidden is None else s.masked_fill(hidden, -torch.inf)
            return like_ours(case, s.softmax(-1) @ values)

        return call


class Flash:
    """torch's FlashAttention-2: through SDPA for plain and causal cases, else by the op _flash_attention_forward."""

    name = "flash"

    def why_not(self, case: Case, device: torch.device) -> str | None:
        return "measured on cuda" if device.type != "cuda" else NO_SOFTCAP if case.softcap else None

    def prepare(self, case: Case, x: Inputs) -> Forward:
        if not case.lengths and not case.window:
            return Sdpa(self.name, SDPBackend.FLASH_ATTENTION).prepare(case, x)
        q, k, v, offsets, longest = as_sequences(case, x)
        left, right = (-1 if bound is None else bound for bound in case.bounds)
        causal = (left, right) == (-1, 0)
        window = {} if causal else dict(window_size_left=left, window_size_right=right)
        op = torch.ops.aten._flash_attention_forward
        return lambda: op(q, k, v, offsets, offsets, longest, longest, 0.0, causal, False, **window)[0].view(
            x.dout.shape
        )


class Fa4:
    """FlashAttention-4 (flash_attn.cute), if installed."""

    name = "fa4"

    def why_not(self, case: Case, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "measured on cuda"
        try:
            import_module("flash_attn.cute")
        except ImportError as missing:
            return f"not importable ({missing}); pip install flash-attn-4"
        return None

    def prepare(self, case: Case, x: Inputs) -> Forward:
        cute = import_module("flash_attn.cute")
        causal = case.bounds == (None, 0)
        rest: dict = dict(
            softmax_scale=case.head_dim**-0.5, causal=causal, window_size=(None, None) if causal else case.bounds
        )
        if case.deterministic:
            rest["deterministic"] = True
        if case.softcap:
            rest["softcap"] = case.softcap
        if not case.lengths:
            return lambda: cute.flash_attn_func(x.q, x.k, x.v, **rest)[0]
        q, k, v, offsets, longest = as_sequences(case, x)
        rest |= dict(cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=longest, max_seqlen_k=longest)
        return lambda: cute.flash_attn_varlen_func(q, k, v, **rest)[0].view(x.dout.shape)


class Flex:
    """FlexAttention under torch.compile. The block mask, with ids for documents and packed sequences, is made before
    the timing.
    """

    name = "flex"

    def why_not(self, case: Case, device: torch.device) -> str | None:
        return (
            None
            if device.type == "cuda"
            else "measured on cuda (on a CPU it compiles C++ for minutes and has no backward)"
        )

    def prepare(self, case: Case, x: Inputs) -> Forward:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        # the recompile limit counts over all cases; beyond it dynamo silently falls back to eager
        torch.compiler.reset()
        compiled = torch.compile(flex_attention, dynamic=False)
        q, k, v = heads_first(case, x)
        mask = (
            create_block_mask(mask_mod(case, q.device), None, None, case.seqlen, case.seqlen, device=q.device)
            if case.masked
            else None
        )
        cap = case.softcap
        capped = (lambda score, b, h, row, key: cap * torch.tanh(score / cap)) if cap else None
        call = lambda: like_ours(case, compiled(q, k, v, score_mod=capped, block_mask=mask, enable_gqa=case.grouped))
        with without_donated_buffers():  # donated buffers allow only one backward; the timer runs many
            call()
        return call


RIVALS: dict[str, Rival] = {
    rival.name: rival
    for rival in (
        Flash(),
        Sdpa("cudnn", SDPBackend.CUDNN_ATTENTION),
        Sdpa("efficient", SDPBackend.EFFICIENT_ATTENTION),
        Fa4(),
        Flex(),
        Sdpa("math", SDPBackend.MATH),
        SdpaCpu(),
        SdpaMask(),
        Naive(),
        Strobe(name=SELF),
    )
}
HOME = {"cuda": ("flash", "cudnn", "efficient", "fa4", "flex", "math"), "cpu": ("sdpa", "sdpa_mask", "naive")}


def pick(names: list[str] | tuple[str, ...], device: torch.device) -> list[Rival]:
    """The named rivals, or all for this device. @REVISION or @FOLDER is strobe at a git revision or in a folder.

    >>> [rival.name for rival in pick([], torch.device("cpu"))]
    ['sdpa', 'sdpa_mask', 'naive']
    """
    for name in names:
        if name not in RIVALS and not name.startswith(MARK):
            raise InvalidProblem(
                "rivals", repr(name), f"names among {', '.join(RIVALS)}, or @REVISION", "separate them by commas"
            )
    return [RIVALS.get(name) or Earlier(name.removeprefix(MARK)) for name in names or HOME[device.type]]


def named(names: Sequence[str], known: dict[str, Item]) -> dict[str, Item]:
    """The entries with these names, or all. Raises InvalidProblem for an unknown name."""
    for name in names:
        if name not in known:
            raise InvalidProblem("rivals", repr(name), f"names among {', '.join(known)}", "separate them by commas")
    return {name: known[name] for name in names or known}
