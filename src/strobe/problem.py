"""One call, said once. `Call` is its data in the flat form the ops take; `Problem` is everything about it except the data.

`Problem.from_call` is the only validator. It reads metadata alone, so it costs no sync and works on fake tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import InvalidProblem, UnsupportedProblem, wrong_type
from .mask import NO_BOUND, Documents, Mask, MaskStructure

DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64"}
ALIGNMENT = 16  # bytes: what a TMA descriptor asks of bases and strides


class Call(NamedTuple):
    """The arguments of one call, flat, in the order of the ops' schema. The schema is generated from these annotations.

    Dense layout: q [B, S_q, H_q, D], k [B, S_k, H_kv, D], v [B, S_k, H_kv, D_v]. Packed: the first two dimensions are
    one, [T, H, D], and cu_seqlens_q and cu_seqlens_k say where sequences begin and end.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None = None  # [H_q]
    cu_seqlens_q: Tensor | None = None  # int32 [n + 1]
    cu_seqlens_k: Tensor | None = None
    prefix: Tensor | None = None  # int32 [B]
    key_lengths: Tensor | None = None  # int32 [B]
    ids_q: Tensor | None = None  # int32 [B, S_q]
    ids_k: Tensor | None = None
    spans_q: Tensor | None = None  # int32 [B, S_q, 3]: mask.Documents
    spans_k: Tensor | None = None
    max_seqlen_q: int = NO_BOUND
    max_seqlen_k: int = NO_BOUND
    left: int = NO_BOUND
    right: int = NO_BOUND
    scale: float | None = None
    softcap: float = 0.0  # 0 is none
    partial: bool = False  # out in float32 (float64 for float64)
    needs_grad: bool = False
    deterministic: bool = False
    batch_invariant: bool = False
    kernel: str = ""  # "" is any

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def structure(self) -> MaskStructure:
        return MaskStructure(
            self.left != NO_BOUND, self.right != NO_BOUND, self.prefix is not None, self.key_lengths is not None, self.ids_q is not None
        )

    @property
    def mask(self) -> Mask:
        """The mask as a value again, for hosts: the CPU kernel, the oracle and tests."""
        documents = None
        if self.ids_q is not None:
            assert self.ids_k is not None and self.spans_q is not None and self.spans_k is not None  # one constructor fills all four
            documents = Documents(self.ids_q, self.ids_k, self.spans_q, self.spans_k)
        left, right = (None if bound == NO_BOUND else bound for bound in (self.left, self.right))
        return Mask(left, right, self.prefix, self.key_lengths, documents)

    def with_mask(self, mask: Mask) -> Call:
        """This call with `mask` in its flat form; an int prefix becomes int32 [B] on q's device."""
        mask = mask.simplified()
        prefix = mask.prefix
        if prefix is not None and not isinstance(prefix, Tensor):
            prefix = torch.full((self.q.shape[0],), min(prefix, 2**31 - 1), dtype=torch.int32, device=self.q.device)
        flat = self._replace(
            prefix=prefix,
            key_lengths=mask.key_lengths,
            left=NO_BOUND if mask.left is None else min(mask.left, 2**30),
            right=NO_BOUND if mask.right is None else min(mask.right, 2**30),
        )
        if mask.documents is None:
            return flat
        d = mask.documents
        return flat._replace(ids_q=d.ids_q, ids_k=d.ids_k, spans_q=d.spans_q, spans_k=d.spans_k)


# NamedTuple keeps annotations as forward references: their text is what the schema is made of
FIELD_KINDS = {name: getattr(kind, "__forward_arg__", kind) for name, kind in Call.__annotations__.items()}
OPTIONAL_TENSORS = tuple(name for name, kind in FIELD_KINDS.items() if kind == "Tensor | None")


class Dense(NamedTuple):
    batch: int
    seqlen_q: int
    seqlen_k: int

    def __str__(self) -> str:
        return f"B={self.batch} S_q={self.seqlen_q} S_k={self.seqlen_k}"


class Packed(NamedTuple):
    """n sequences in one row of tokens; None: the caller promised no bound on their length."""

    batch: int
    total_q: int
    total_k: int
    max_seqlen_q: int | None
    max_seqlen_k: int | None

    def __str__(self) -> str:
        longest = "" if self.max_seqlen_q is None else f" max_seqlen_q={self.max_seqlen_q}"
        return f"sequences={self.batch} T_q={self.total_q} T_k={self.total_k}{longest}"


class Paged(NamedTuple):
    """Queries [B, T, H, D] over a pool of pages: seqlens and page_table live on the device."""

    batch: int
    seqlen_q: int
    page_size: int
    n_pages: int
    max_pages: int

    def __str__(self) -> str:
        return f"B={self.batch} T={self.seqlen_q} pages {self.n_pages} x {self.page_size}, at most {self.max_pages} a sequence"


@dataclass(frozen=True)
class Problem:
    """Everything about a call except its data. Hashable; equal problems are run by the same Choice.

    >>> q = torch.empty(2, 128, 8, 64); kv = torch.empty(2, 128, 2, 64)
    >>> str(Problem.from_call(Call(q, kv, kv, right=0)))
    'B=2 S_q=128 S_k=128 H_q=8 H_kv=2 D=64 float32, causal, scale 0.125'
    """

    layout: Dense | Packed | Paged
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    scale: float
    softcap: float
    mask: MaskStructure
    left: int  # bounds are arguments of the kernel; here they only serve estimates and messages
    right: int
    sinks: bool
    strides: tuple[tuple[int, ...], ...]  # of q, k, v in elements
    alignment: int  # bytes: the largest power of two up to 16 that divides every base address and stride of q, k and v
    needs_grad: bool
    deterministic: bool
    batch_invariant: bool
    kernel: str

    @property
    def packed(self) -> bool:
        return isinstance(self.layout, Packed)

    @property
    def out_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of out and lse."""
        if isinstance(self.layout, Packed):
            return (self.layout.total_q, self.heads_q, self.head_dim_v), (self.heads_q, self.layout.total_q)
        batch, seqlen_q = self.layout.batch, self.layout.seqlen_q
        return (batch, seqlen_q, self.heads_q, self.head_dim_v), (batch, self.heads_q, seqlen_q)

    @property
    def lse_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads_q // self.heads_kv if self.heads_kv else 1

    @staticmethod
    def from_call(call: Call) -> Problem:
        """The call as a Problem, checked by `check`."""
        layout = check(call)
        head_dim = call.q.shape[-1]
        wide = torch.float64 if call.q.dtype == torch.float64 else torch.float32
        return Problem(
            layout=layout,
            heads_q=call.q.shape[-2],
            heads_kv=call.k.shape[-2],
            head_dim=head_dim,
            head_dim_v=call.v.shape[-1],
            dtype=call.q.dtype,
            out_dtype=wide if call.partial else call.q.dtype,
            scale=head_dim**-0.5 if call.scale is None else float(call.scale),
            softcap=float(call.softcap),
            mask=call.structure,
            left=call.left,
            right=call.right,
            sinks=call.sinks is not None,
            strides=(call.q.stride(), call.k.stride(), call.v.stride()),
            alignment=min(_alignment(t) for t in (call.q, call.k, call.v)),
            needs_grad=call.needs_grad,
            deterministic=call.deterministic,
            batch_invariant=call.batch_invariant,
            kernel=call.kernel,
        )

    def example(self, device: torch.device) -> Call:
        """A call of this problem on zeros; packed sequences are empty but for the shapes, masks admit every key."""
        layout = self.layout
        zeros = lambda *shape: torch.zeros(shape, dtype=torch.int32, device=device)
        if isinstance(layout, Packed):
            tokens = ((layout.total_q, self.heads_q), (layout.total_k, self.heads_kv), (layout.total_k, self.heads_kv))
        elif isinstance(layout, Dense):
            rows, keys = (layout.batch, layout.seqlen_q), (layout.batch, layout.seqlen_k)
            tokens = ((*rows, self.heads_q), (*keys, self.heads_kv), (*keys, self.heads_kv))
        else:
            raise UnsupportedProblem(f"{self}: paged problems have no example of their own yet")
        widths = (self.head_dim, self.head_dim, self.head_dim_v)
        q, k, v = (torch.empty_strided((*t, w), s, dtype=self.dtype, device=device).zero_() for t, w, s in zip(tokens, widths, self.strides))
        call = Call(
            *(t.requires_grad_(self.needs_grad) for t in (q, k, v)),
            sinks=torch.zeros(self.heads_q, device=device) if self.sinks else None,
            left=self.left, right=self.right, scale=self.scale, softcap=self.softcap, partial=self.out_dtype != self.dtype,
            needs_grad=self.needs_grad, deterministic=self.deterministic, batch_invariant=self.batch_invariant, kernel=self.kernel,
        )  # fmt: skip
        if isinstance(layout, Packed):
            longest = [NO_BOUND if n is None else n for n in (layout.max_seqlen_q, layout.max_seqlen_k)]
            return call._replace(cu_seqlens_q=zeros(layout.batch + 1), cu_seqlens_k=zeros(layout.batch + 1), max_seqlen_q=longest[0], max_seqlen_k=longest[1])
        keys = zeros(layout.batch) + layout.seqlen_k
        call = call._replace(prefix=keys if self.mask.prefix else None, key_lengths=keys if self.mask.key_lengths else None)
        if not self.mask.documents:
            return call
        one = Documents.of(zeros(*rows), zeros(layout.batch, layout.seqlen_k))
        return call._replace(ids_q=one.ids_q, ids_k=one.ids_k, spans_q=one.spans_q, spans_k=one.spans_k)

    def __str__(self) -> str:
        width = f"D={self.head_dim}" + (f" D_v={self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        words = [f"{self.layout} H_q={self.heads_q} H_kv={self.heads_kv} {width} {DTYPES[self.dtype]}", self._mask_words()]
        words.append(f"scale {self.scale:.3g}")
        words += [f"softcap {self.softcap:g}"] * bool(self.softcap) + ["sinks"] * self.sinks
        words += ["with gradients"] * self.needs_grad + ["deterministic"] * (self.deterministic and self.needs_grad)
        words += ["batch invariant"] * self.batch_invariant
        return ", ".join(words)

    def _mask_words(self) -> str:
        m = self.mask
        band = "causal" if not m.left and self.right == 0 else f"window ({self.left if m.left else None}, {self.right if m.right else None})"
        words = [band] * (m.left or m.right) + ["prefix_causal"] * m.prefix + ["key_lengths"] * m.key_lengths + ["documents"] * m.documents
        return " & ".join(words) or "full"


def check(call: Call) -> Dense | Packed:
    """The door. Raises InvalidProblem or TypeError naming the argument; reads metadata alone, symbolic sizes too."""
    _check_tensors(call)
    layout = _packed_layout(call) if call.packed else _dense_layout(call)
    _check_heads(call)
    _check_mask_tensors(call, layout)
    _check_numbers(call)
    return layout


def _check_tensors(call: Call) -> None:
    for name in ("q", "k", "v"):
        tensor = getattr(call, name)
        if not isinstance(tensor, Tensor):
            raise wrong_type(name, tensor, "a tensor", "pass a torch.Tensor")
        if tensor.layout != torch.strided:
            raise InvalidProblem(name, tensor.layout, "a strided (dense) tensor", "convert it with .to_dense()")
        if tensor.dtype not in DTYPES:
            raise InvalidProblem(name, tensor.dtype, "float16, bfloat16, float32 or float64", "convert it with .to(torch.bfloat16)")
        if tensor.dtype != call.q.dtype:
            raise InvalidProblem(name, tensor.dtype, f"q's dtype {call.q.dtype}", "give q, k and v one dtype")
        shape = "[T, H, D]" if call.packed else "[B, S, H, D]"
        if tensor.dim() != (3 if call.packed else 4):
            raise InvalidProblem(name, f"shape {list(tensor.shape)}", shape, "use attention_varlen for packed and attention for dense tensors")
        if tensor.shape[-1] == 0:
            raise InvalidProblem(name, "a last dimension of 0", "a head dimension of at least 1", "check the projection that made it")
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1 and tensor.numel() > 0:
            raise InvalidProblem(name, f"stride {tensor.stride(-1)} in the last dimension", "stride 1", f"call {name}.contiguous()")
    for name in ("k", "v", *OPTIONAL_TENSORS):
        tensor = getattr(call, name)
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise wrong_type(name, tensor, "a tensor or None", "wrap it in torch.tensor(...)")
        if tensor.device != call.q.device:
            raise InvalidProblem(name, f"device {tensor.device}", f"q's device {call.q.device}", "move all of a call's tensors to one device")


def _check_heads(call: Call) -> None:
    heads_q, heads_kv = call.q.shape[-2], call.k.shape[-2]
    if call.v.shape[-2] != heads_kv:
        raise InvalidProblem("v", f"{call.v.shape[-2]} heads", f"k's {heads_kv} heads", "give k and v the same heads")
    if heads_q != 0 and (heads_kv == 0 or heads_q % heads_kv):
        raise InvalidProblem("k", f"{heads_kv} heads", f"a divisor of q's {heads_q} heads", "query head h reads key head h // (H_q // H_kv)")
    if call.k.shape[-1] != call.q.shape[-1]:
        raise InvalidProblem("k", f"head dimension {call.k.shape[-1]}", f"q's {call.q.shape[-1]}", "only v may have a width of its own")
    if call.sinks is not None:
        if list(call.sinks.shape) != [heads_q]:
            raise InvalidProblem("sinks", f"shape {list(call.sinks.shape)}", f"[{heads_q}], one logit a query head", "expand or slice it")
        if call.sinks.dtype not in DTYPES:
            raise InvalidProblem("sinks", call.sinks.dtype, "a floating dtype", "convert it with .float()")


def _dense_layout(call: Call) -> Dense:
    (batch, seqlen_q), seqlen_k = call.q.shape[:2], call.k.shape[1]
    for name in ("k", "v"):
        if getattr(call, name).shape[0] != batch:
            raise InvalidProblem(name, f"batch {getattr(call, name).shape[0]}", f"q's batch {batch}", f"expand {name} to q's batch")
    if call.v.shape[1] != seqlen_k:
        raise InvalidProblem("v", f"{call.v.shape[1]} keys", f"k's {seqlen_k} keys", "give k and v the same length")
    return Dense(batch, seqlen_q, seqlen_k)


def _packed_layout(call: Call) -> Packed:
    if call.v.shape[0] != call.k.shape[0]:
        raise InvalidProblem("v", f"{call.v.shape[0]} keys", f"k's {call.k.shape[0]} keys", "give k and v the same length")
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        offsets = getattr(call, name)
        if not isinstance(offsets, Tensor):
            raise wrong_type(name, offsets, "an int32 tensor [n + 1]", "give the running sum of lengths, from 0 to the total")
        if offsets.dtype != torch.int32:
            raise InvalidProblem(name, offsets.dtype, "torch.int32", "convert it with .to(torch.int32)")
        if offsets.dim() != 1 or offsets.shape[0] < 1:
            raise InvalidProblem(name, f"shape {list(offsets.shape)}", "[n + 1] for n sequences", "give the running sum of lengths, from 0")
        if offsets.shape != call.cu_seqlens_q.shape:  # type: ignore[union-attr]
            raise InvalidProblem(name, f"{offsets.shape[0]} offsets", f"cu_seqlens_q's {call.cu_seqlens_q.shape[0]}", "give both for the same sequences")  # type: ignore[union-attr]
    if call.structure[2:] != (False, False, False):
        raise InvalidProblem("mask", str(call.structure), "causal and window", "packed sequences are apart already; leave the mask out")
    bounds = [None if bound == NO_BOUND else bound for bound in (call.max_seqlen_q, call.max_seqlen_k)]
    return Packed(call.cu_seqlens_q.shape[0] - 1, call.q.shape[0], call.k.shape[0], *bounds)  # type: ignore[union-attr]


def _check_mask_tensors(call: Call, layout: Dense | Packed) -> None:
    if isinstance(layout, Packed):
        return
    wanted = {
        "prefix": [layout.batch],
        "key_lengths": [layout.batch],
        "ids_q": [layout.batch, layout.seqlen_q],
        "ids_k": [layout.batch, layout.seqlen_k],
        "spans_q": [layout.batch, layout.seqlen_q, 3],
        "spans_k": [layout.batch, layout.seqlen_k, 3],
    }
    for name, shape in wanted.items():
        tensor = getattr(call, name)
        if tensor is not None and list(tensor.shape) != shape:
            raise InvalidProblem(f"mask {name}", f"shape {list(tensor.shape)}", f"{shape}, q's and k's sizes", "build the mask for this call's shapes")
        if tensor is not None and tensor.dtype != torch.int32:
            raise InvalidProblem(f"mask {name}", tensor.dtype, "torch.int32", "convert it with .to(torch.int32)")


def _check_numbers(call: Call) -> None:
    for name in ("scale", "softcap"):
        number = getattr(call, name)
        if number is not None and (isinstance(number, bool) or not isinstance(number, (int, float))):
            raise wrong_type(name, number, "a float or None", "give a Python number")
        if number is not None and not math.isfinite(number):
            raise InvalidProblem(name, number, "a finite number", f"leave {name} out for the default")
    if call.softcap < 0:
        raise InvalidProblem("softcap", call.softcap, "a number > 0", "leave it out for none")
    for name in ("max_seqlen_q", "max_seqlen_k", "left", "right"):
        number = getattr(call, name)
        if number < NO_BOUND:
            raise InvalidProblem(name, number, "a number >= 0 or None", "leave it out where there is no bound")


def _alignment(tensor: Tensor) -> int:
    itemsize = tensor.element_size()
    steps = [stride * itemsize for stride in tensor.stride()[:-1]]
    steps.append(base_offset(tensor))
    common = math.gcd(ALIGNMENT, *steps)
    return common & -common


def base_offset(tensor: Tensor) -> int:
    """The base address modulo 16; a fake tensor has none, so its storage offset stands in."""
    if isinstance(tensor, torch._subclasses.FakeTensor):
        return tensor.storage_offset() * tensor.element_size()
    return tensor.data_ptr() % ALIGNMENT


def refuse(call: Call, why: str) -> UnsupportedProblem:
    """An UnsupportedProblem about this call that no choice of kernel would mend."""
    return UnsupportedProblem(f"{Problem.from_call(call)}: {why}")
