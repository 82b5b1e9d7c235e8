"""`Call`, the arguments of a call in the flat form that the ops take, and `check`, which validates them.

`check` reads only metadata. So it never synchronizes with the device, and it runs on fake tensors and symbolic sizes.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidProblem, wrong_type
from .mask import MOST_KEYS, NO_BOUND, Documents, Mask, MaskStructure, check_strided
from .mods import Mods

DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64"}
MOST_SCALE = 1e38  # kernels multiply it by log2(e); the product must be a finite float32
LEAST_SLOPE = 1e-30  # a smaller scale under a cap makes scores of 0, whatever it is
# larger window bounds are clamped to this, so that a kernel's sum with an int32 position does not overflow
FARTHEST = 2**30


class Call(NamedTuple):
    """The arguments of one call, flat, in the order of the ops' schema. The schema is generated from these annotations.

    Dense layout: q [B, S_q, H_q, D], k [B, S_k, H_kv, D], v [B, S_k, H_kv, D_v]. Packed layout: [T, H, D], where
    cu_seqlens_q and cu_seqlens_k hold the offsets of the sequences.

    Runs: packed queries over keys that they share. cu_seqlens_k is then int32 [2, n + 1]. Its first row is the running
    sum of the numbers of keys (k_len) of the n runs of queries, and max_seqlen_k is its total. The second row holds the
    first key of each run (k_start) and a number that is not read. Keys of run i are rows k_start[i] .. of k and v, and
    rows cu_seqlens_k[0, i] .. of dk and dv, which have max_seqlen_k rows, since keys of runs may overlap. Kernels trust
    k_start: plans of context parallelism make it, and the public functions refuse it.

    The dispatcher takes 0.1 us per argument passed. So rarely used arguments come last, and `arguments` omits them.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    left: int = NO_BOUND
    right: int = NO_BOUND
    scale: float | None = None
    softcap: float = 0.0  # 0: none
    deterministic: bool = False
    batch_invariant: bool = False
    kernel: str = ""  # "": any
    partial: bool = False  # out in float32 (float64 for float64)
    needs_grad: bool = False
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
    mods: Mods | None = None  # not in the schema: the ops of `ops.mods` take its parts

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def runs(self) -> bool:
        """Whether packed sequences are runs of queries over shared keys."""
        return self.cu_seqlens_k is not None and self.cu_seqlens_k.dim() == 2

    @property
    def gathered(self) -> Call:
        """Runs as packed sequences over a copy of the keys of each; other calls unchanged. Waits for the device."""
        if not self.runs or self.cu_seqlens_k is None:
            return self
        offsets, starts = self.cu_seqlens_k.tolist()
        rows = [torch.arange(0)]
        for offset, stop, start in zip(offsets, offsets[1:], starts):
            rows.append(torch.arange(start, start + max(0, stop - offset)))
        index = torch.cat(rows).to(self.k.device)
        return self._replace(k=self.k[index], v=self.v[index], cu_seqlens_k=self.cu_seqlens_k[0])

    @property
    def gradient_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Shapes of dq, dk and dv."""
        keys = (self.max_seqlen_k,) if self.runs else self.k.shape[:-2]
        return tuple(self.q.shape), (*keys, *self.k.shape[-2:]), (*keys, *self.v.shape[-2:])

    @property
    def plain(self) -> bool:
        """Whether q, k and v are the only tensors."""
        return (
            self.sinks is None
            and self.cu_seqlens_q is None
            and self.prefix is None
            and self.key_lengths is None
            and self.ids_q is None
            and self.mods is None
        )

    @property
    def optionals(self) -> tuple[Tensor | None, ...]:
        """The fields of OPTIONAL_TENSORS."""
        offsets, lengths = (self.cu_seqlens_q, self.cu_seqlens_k), (self.prefix, self.key_lengths)
        return self.sinks, *offsets, *lengths, self.ids_q, self.ids_k, self.spans_q, self.spans_k

    @property
    def tensors_and_rest(self) -> tuple[tuple[Tensor, ...], tuple]:
        """The tensors, and a hashable tuple of the other fields. The tuple also records which optional tensors are
        absent.
        """
        if self.plain:
            return self[:3], self[SCALARS]
        optionals = self.optionals
        given = [field for field in optionals if field is not None]
        absent = [field is None for field in optionals]
        tensors, rest = (*self[:3], *given), (*self[SCALARS], *absent, *self[OPTIONAL_TENSORS.stop : -1])
        return (tensors, rest) if self.mods is None else ((*tensors, *self.mods.read), (*rest, self.mods.texts))

    @property
    def with_grad(self) -> Call:
        """This call with needs_grad=True, in half the time of `_replace`."""
        return Call._make((*self[:_NEEDS_GRAD], True, *self[_NEEDS_GRAD + 1 :]))

    @property
    def whole(self) -> bool:
        """Whether the optional tensors are contiguous. Kernels do not read their strides."""
        return self.plain or all([field is None or field.is_contiguous() for field in self.optionals])

    @property
    def arguments(self) -> tuple:
        """The arguments to pass to an op. Trailing arguments with default values are omitted where possible."""
        if not self.plain:
            return self[:-1]
        # no comparison with a global float: torch.compile(dynamic=True) would make it a graph input and trace the call
        # twice
        quiet = self.scale is None and not any(self[6 : OPTIONAL_TENSORS.start])
        return self[:5] if quiet else self[: OPTIONAL_TENSORS.start]

    @property
    def structure(self) -> MaskStructure:
        return MaskStructure(
            self.left != NO_BOUND,
            self.right != NO_BOUND,
            self.prefix is not None,
            self.key_lengths is not None,
            self.ids_q is not None,
        )

    @property
    def mask(self) -> Mask:
        """The Mask of the flat fields, for the CPU kernel, the oracle and tests."""
        documents = None
        if self.ids_q is not None and self.ids_k is not None and self.spans_q is not None and self.spans_k is not None:
            documents = Documents(self.ids_q, self.ids_k, self.spans_q, self.spans_k)
        left, right = (None if bound == NO_BOUND else bound for bound in (self.left, self.right))
        return Mask(left, right, self.prefix, self.key_lengths, documents)

    def with_mask(self, mask: Mask) -> Call:
        """This call with the fields of `mask`. An int prefix becomes an int32 tensor [B] on q's device."""
        mask = mask.simplified()
        prefix = mask.prefix
        if prefix is not None and not isinstance(prefix, Tensor):
            prefix = self.q.new_full(self.q.shape[:1], min(prefix, MOST_KEYS), dtype=torch.int32)
        flat = self._replace(
            prefix=prefix,
            key_lengths=mask.key_lengths,
            left=NO_BOUND if mask.left is None else min(mask.left, FARTHEST),
            right=NO_BOUND if mask.right is None else min(mask.right, FARTHEST),
        )
        if mask.documents is None:
            return flat
        d = mask.documents
        return flat._replace(ids_q=d.ids_q, ids_k=d.ids_k, spans_q=d.spans_q, spans_k=d.spans_k)


# NamedTuple keeps annotations as forward references; the schema is generated from their text
FIELD_KINDS = {
    name: getattr(kind, "__forward_arg__", kind) for name, kind in Call.__annotations__.items() if name != "mods"
}
_NEEDS_GRAD = Call._fields.index("needs_grad")
OPTIONAL_TENSORS = slice(Call._fields.index("sinks"), Call._fields.index("spans_k") + 1)
SCALARS = slice(3, OPTIONAL_TENSORS.start)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over keys: of lse and of partial outputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Dense(NamedTuple):
    """The layout [B, S, H, D]."""

    batch: int
    seqlen_q: int
    seqlen_k: int

    @property
    def tokens(self) -> tuple[int, int]:
        """Query rows and keys of the whole batch."""
        return self.batch * self.seqlen_q, self.batch * self.seqlen_k

    def __str__(self) -> str:
        return f"B={self.batch} S_q={self.seqlen_q} S_k={self.seqlen_k}"


class Packed(NamedTuple):
    """The layout [T, H, D] of `batch` packed sequences. A max_seqlen of None means that the caller gave no bound."""

    batch: int
    total_q: int
    total_k: int
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    runs: bool = False  # keys of sequences may overlap (Call): total_k then counts those of each sequence

    @property
    def tokens(self) -> tuple[int, int]:
        return self.total_q, self.total_k

    def __str__(self) -> str:
        longest = "" if self.max_seqlen_q is None else f" max_seqlen_q={self.max_seqlen_q}"
        name = "runs" if self.runs else "sequences"
        return f"{name}={self.batch} T_q={self.total_q} T_k={self.total_k}{longest}"


class Paged(NamedTuple):
    """The layout of queries [B, T, H, D] over a pool of pages. seqlens and page_table are device data."""

    batch: int
    seqlen_q: int
    page_size: int
    n_pages: int
    max_pages: int

    @property
    def tokens(self) -> tuple[int, int]:
        return self.batch * self.seqlen_q, self.page_size * self.n_pages

    def __str__(self) -> str:
        return (
            f"B={self.batch} T={self.seqlen_q} pages {self.n_pages} x {self.page_size}, at most "
            f"{self.max_pages} a sequence"
        )


def check(call: Call) -> Dense | Packed:
    """Validate the arguments and return their layout. Reads only metadata, symbolic sizes included.

    Raises InvalidProblem or TypeError naming the argument.
    """
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
        if tensor.is_nested:
            raise InvalidProblem(
                name, "a nested tensor", "a strided (dense) tensor", "pass its values and offsets to attention_varlen"
            )
        check_strided(name, tensor)
        if tensor.dtype not in DTYPES:
            raise InvalidProblem(
                name, tensor.dtype, "float16, bfloat16, float32 or float64", "convert it with .to(torch.bfloat16)"
            )
        if tensor.dtype != call.q.dtype:
            raise InvalidProblem(name, tensor.dtype, f"q's dtype {call.q.dtype}", "give q, k and v one dtype")
        shape = "[T, H, D]" if call.packed else "[B, S, H, D]"
        if tensor.dim() != (3 if call.packed else 4):
            raise InvalidProblem(
                name,
                f"shape {list(tensor.shape)}",
                shape,
                "use attention_varlen for packed and attention for dense tensors",
            )
        if tensor.shape[-1] == 0:
            raise InvalidProblem(
                name, "a last dimension of 0", "a head dimension of at least 1", "check the projection that made it"
            )
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1 and tensor.numel() > 0:
            raise InvalidProblem(
                name, f"stride {tensor.stride(-1)} in the last dimension", "stride 1", f"call {name}.contiguous()"
            )
    for name in ("k", "v", *Call._fields[OPTIONAL_TENSORS]):
        tensor = getattr(call, name)
        if tensor is not None and tensor.device != call.q.device:
            raise InvalidProblem(
                name,
                f"device {tensor.device}",
                f"q's device {call.q.device}",
                "move all of a call's tensors to one device",
            )
        if tensor is not None:
            check_strided(name, tensor)
    check_captured(call)


def check_captured(call: Any) -> None:
    """Validate the tensors that the custom score or mask of a Call or DecodeCall captures, and the seed of dropout."""
    where = "score_mod or mask"
    for tensor in () if call.mods is None else call.mods.read:
        if tensor.device != call.q.device:
            got, remedy = f"a captured tensor on {tensor.device}", "move all tensors that the function reads there"
            raise InvalidProblem(where, got, f"q's device {call.q.device}", remedy)
        if 0 in tensor.shape and 0 not in (*call.q.shape, *call.k.shape):
            got = f"a captured tensor of shape {list(tensor.shape)}"
            raise InvalidProblem(where, got, "at least one element", "an index too large reads the last element")
        check_strided(where, tensor)


def _check_heads(call: Call) -> None:
    heads_q, heads_kv = call.q.shape[-2], call.k.shape[-2]
    if call.v.shape[-2] != heads_kv:
        raise InvalidProblem("v", f"{call.v.shape[-2]} heads", f"k's {heads_kv} heads", "give k and v the same heads")
    if heads_q != 0 and (heads_kv == 0 or heads_q % heads_kv):
        raise InvalidProblem(
            "k",
            f"{heads_kv} heads",
            f"a divisor of q's {heads_q} heads",
            f"query head h reads key head h // (H_q // H_kv); tensors are {'[T' if call.packed else '[B, S'}, H, D]",
        )
    if call.k.shape[-1] != call.q.shape[-1]:
        raise InvalidProblem(
            "k", f"head dimension {call.k.shape[-1]}", f"q's {call.q.shape[-1]}", "only v may have a width of its own"
        )
    if call.sinks is not None:
        check_sinks(call.sinks, heads_q)


def check_sinks(sinks: Tensor, heads_q: int) -> None:
    """Raise unless sinks holds one floating-point logit per query head."""
    check_strided("sinks", sinks)
    if sinks.dim() != 1 or sinks.shape[0] != heads_q:
        raise InvalidProblem(
            "sinks", f"shape {list(sinks.shape)}", f"[{heads_q}], one logit a query head", "expand or slice it"
        )
    if sinks.dtype not in DTYPES:
        raise InvalidProblem("sinks", sinks.dtype, "a floating dtype", "convert it with .float()")


def _dense_layout(call: Call) -> Dense:
    (batch, seqlen_q), seqlen_k = call.q.shape[:2], call.k.shape[1]
    for name in ("k", "v"):
        if getattr(call, name).shape[0] != batch:
            raise InvalidProblem(
                name, f"batch {getattr(call, name).shape[0]}", f"q's batch {batch}", f"expand {name} to q's batch"
            )
    if call.v.shape[1] != seqlen_k:
        raise InvalidProblem("v", f"{call.v.shape[1]} keys", f"k's {seqlen_k} keys", "give k and v the same length")
    return Dense(batch, seqlen_q, seqlen_k)


def _packed_layout(call: Call) -> Packed:
    if call.v.shape[0] != call.k.shape[0]:
        raise InvalidProblem(
            "v", f"{call.v.shape[0]} keys", f"k's {call.k.shape[0]} keys", "give k and v the same length"
        )
    count, count_k = _count("cu_seqlens_q", call.cu_seqlens_q), _count("cu_seqlens_k", call.cu_seqlens_k)
    if count_k != count:
        raise InvalidProblem(
            "cu_seqlens_k", f"{count_k + 1} offsets", f"cu_seqlens_q's {count + 1}", "give both for the same sequences"
        )
    if call.structure[2:] != (False, False, False):
        raise InvalidProblem(
            "mask", str(call.structure), "causal and window", "packed sequences are apart already; leave the mask out"
        )
    longest_q, longest_k = (None if bound == NO_BOUND else bound for bound in (call.max_seqlen_q, call.max_seqlen_k))
    if call.runs:
        if longest_k is None or call.mods is not None or call.batch_invariant:
            got, expected = str(call.structure), "max_seqlen_k, no functions and no batch_invariant"
            raise InvalidProblem("runs over shared keys", got, expected, "make one call for each run")
        return Packed(count, call.q.shape[0], longest_k, longest_q, None, True)
    return Packed(count, call.q.shape[0], call.k.shape[0], longest_q, longest_k)


def _count(name: str, offsets: Tensor | None) -> int:
    """The number of sequences that the offsets [n + 1] define. Raises if the offsets are invalid."""
    if offsets is None:
        raise wrong_type(
            name, offsets, "an int32 tensor [n + 1]", "give the running sum of lengths, from 0 to the total"
        )
    if offsets.dtype != torch.int32:
        raise InvalidProblem(name, offsets.dtype, "torch.int32", "convert it with .to(torch.int32)")
    is_runs = name == "cu_seqlens_k" and offsets.dim() == 2 and offsets.shape[0] == 2
    if not (offsets.dim() == 1 or is_runs) or offsets.shape[-1] < 1:
        raise InvalidProblem(
            name, f"shape {list(offsets.shape)}", "[n + 1] for n sequences", "give the running sum of lengths, from 0"
        )
    return offsets.shape[-1] - 1


def _check_mask_tensors(call: Call, layout: Dense | Packed) -> None:
    if isinstance(layout, Packed) or call.plain:
        return
    wanted = {
        "prefix": (layout.batch,),
        "key_lengths": (layout.batch,),
        "ids_q": (layout.batch, layout.seqlen_q),
        "ids_k": (layout.batch, layout.seqlen_k),
        "spans_q": (layout.batch, layout.seqlen_q, 3),
        "spans_k": (layout.batch, layout.seqlen_k, 3),
    }
    for name, shape in wanted.items():
        tensor = getattr(call, name)
        if tensor is None:
            if (call.ids_q is not None) and name not in ("prefix", "key_lengths"):
                raise wrong_type(
                    f"mask {name}", tensor, "a tensor beside ids_q", "build the mask with strobe.documents"
                )
        elif tuple(tensor.shape) != shape:
            remedy = (
                "give strobe.documents ids of both sides"
                if name == "ids_k"
                else "build the mask for this call's shapes"
            )
            raise InvalidProblem(
                f"mask {name}", f"shape {list(tensor.shape)}", f"{list(shape)}, q's and k's sizes", remedy
            )
        elif tensor.dtype != torch.int32:
            raise InvalidProblem(f"mask {name}", tensor.dtype, "torch.int32", "convert it with .to(torch.int32)")


def check_spans(call: Call) -> None:
    """Raise for document spans outside the call, on a CPU only, where reading data needs no synchronization. GPU
    kernels clamp spans.
    """
    for name, spans, own, other in (
        ("spans_q", call.spans_q, call.q, call.k),
        ("spans_k", call.spans_k, call.k, call.q),
    ):
        length, across = own.shape[1], other.shape[1]
        if spans is None or spans.device.type != "cpu" or tuple(spans.shape) != (own.shape[0], length, 3):
            continue  # `check` rejects other shapes
        run_end, first, stop = spans.unbind(2)
        wrong = (run_end <= torch.arange(length)) | (run_end > length) | (first < 0) | (stop < first) | (stop > across)
        if wrong.any():
            b, position = wrong.nonzero()[0].tolist()
            got = f"{spans[b, position].tolist()} at position {position} of batch entry {b}"
            expected = (
                f"(run_end, first, stop) with {position} < run_end <= {length} and 0 <= first <= stop <= {across}"
            )
            raise InvalidProblem(f"mask {name}", got, expected, "build the mask with strobe.documents")


def check_scores(scale: float | None, softcap: float, q: Tensor) -> None:
    """Validate scale and softcap. Unless q is float64, their products with log2(e) must fit float32."""
    for name, number in (("scale", scale), ("softcap", softcap)):
        if number is not None and not math.isfinite(number):
            raise InvalidProblem(name, number, "a finite number", f"leave {name} out for the default")
        if number is not None and abs(number) > MOST_SCALE and q.dtype != torch.float64:
            remedy = "scale q instead" if name == "scale" else "leave it out: so large a cap caps nothing"
            raise InvalidProblem(name, number, f"at most {MOST_SCALE:g}, for scores in float32", remedy)
    if softcap < 0:
        raise InvalidProblem("softcap", softcap, "a number > 0", "leave it out for none")
    factor = abs(q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap and factor and q.dtype != torch.float64:
        least, most = factor / MOST_SCALE, max(factor, LEAST_SLOPE) * 2.0**126  # beyond, factor / softcap is inf or 0
        if not least <= softcap <= most:
            expected = f"from {least:.3g} to {most:.3g}, for scores in float32"
            raise InvalidProblem("softcap", softcap, expected, "give one in this range, or none")


def _check_numbers(call: Call) -> None:
    check_scores(call.scale, call.softcap, call.q)
    for name in ("max_seqlen_q", "max_seqlen_k", "left", "right"):
        number = getattr(call, name)
        if number < NO_BOUND:
            raise InvalidProblem(name, number, "a number >= 0 or None", "leave it out where there is no bound")
