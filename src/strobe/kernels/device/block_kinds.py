"""Which blocks of a mask are empty, partial or full, found on the device without the mask in memory."""

from typing import Any, NamedTuple

from .dialect import gl, gluon
from .seqlen import span_of


class KindsShape(NamedTuple):
    """Sizes of a dense call, or of the longest packed sequence, and of the kinds [batch, heads, M, N]; 1 where all
    entries or heads have the same mask.
    """

    seqlen_q: Any
    seqlen_k: Any
    heads: Any
    num_m_blocks: Any
    num_n_blocks: Any


class KindsOffsets(NamedTuple):
    """Where packed sequences begin and end, how many there are, and the rows of q and k."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    sequences: Any
    total_q: Any
    total_k: Any


class KindsWindow(NamedTuple):
    """Bounds of the built-in mask relative to the diagonal."""

    left: Any
    right: Any


@gluon.jit
def kinds_kernel(
    kinds, aux, shape, window, offsets, mask_mod: gl.constexpr, function: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """One block of BLOCK queries and keys a program: 0 empty, 1 partial, 2 full. Rows and keys that do not exist do not
    count. offsets: KindsOffsets, or None for a dense call. function: a key of mask_mod's text, by which Triton tells
    functions apart. Four warps.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    pid = gl.program_id(0)
    n_block = pid % shape.num_n_blocks
    m_block = pid // shape.num_n_blocks % shape.num_m_blocks
    index = pid // shape.num_n_blocks // shape.num_m_blocks
    m_start, n_start = m_block * BLOCK, n_block * BLOCK
    seqlen_q, seqlen_k = shape.seqlen_q, shape.seqlen_k
    if offsets is not None:
        sequence = index // shape.heads + 1  # number 0 is the rows before the first
        _, rows = span_of(offsets.cu_seqlens_q, sequence, offsets.sequences, offsets.total_q)
        _, keys = span_of(offsets.cu_seqlens_k, sequence, offsets.sequences, offsets.total_k)
        seqlen_q, seqlen_k = gl.minimum(rows, seqlen_q), gl.minimum(keys, seqlen_k)
    diagonal = seqlen_k - seqlen_q
    kind = pid * 0
    some = pid >= 0
    if HAS_RIGHT:
        some = some & (n_start <= gl.minimum(m_start + BLOCK, seqlen_q) - 1 + diagonal + window.right)
    if HAS_LEFT:
        some = some & (gl.minimum(n_start + BLOCK, seqlen_k) - 1 >= m_start + diagonal - window.left)
    if some:
        q_idx = (m_start + gl.arange(0, BLOCK, gl.SliceLayout(1, layout)))[:, None]
        kv_idx = (n_start + gl.arange(0, BLOCK, gl.SliceLayout(0, layout)))[None, :]
        exists = (q_idx < seqlen_q) & (kv_idx < seqlen_k)
        seen = exists & mask_mod(index // shape.heads, index % shape.heads, q_idx, kv_idx, aux)
        if HAS_RIGHT:
            seen = seen & (kv_idx <= q_idx + diagonal + window.right)
        if HAS_LEFT:
            seen = seen & (kv_idx >= q_idx + diagonal - window.left)
        every = gl.min(gl.min((seen | (exists == 0)).to(gl.int32), 1), 0)
        kind = gl.max(gl.max(seen.to(gl.int32), 1), 0)
        kind += kind * every
    gl.store(kinds + pid, kind.to(gl.int8))
