"""Writing new keys and values to a cache in Triton: a program for each token and head rotates, rounds and stores."""

import triton
import triton.language as tl

from ..device.seqlen import OFFSETS_Q, guard_offsets, sequence_of_row
from ..runtime.error_flags import NO_ANGLE as _NO_ANGLE
from ..runtime.error_flags import NO_ROOM as _NO_ROOM
from ..runtime.error_flags import PAGES as _PAGES

NO_ANGLE = tl.constexpr(_NO_ANGLE)
NO_ROOM = tl.constexpr(_NO_ROOM)
PAGES = tl.constexpr(_PAGES)
LEAST_SCALE = tl.constexpr(2.0**-126)  # a smaller one could round to 0


@triton.jit
def e4m3_bits(x):
    """float32 rounded to the bits of e4m3, to nearest even; beyond 448 the largest; NaN stays NaN.

    Normal numbers: multiplied by 2^-120, a float32 has e4m3's exponent, and 20 bits of its fraction are rounded away.
    Numbers below 2^-6 are multiples of 2^-9, and adding 2^23 rounds their count to an integer. Multiplied by 2^-120
    they would be rounded twice.
    """
    size = tl.minimum(tl.abs(x), 448.0)
    bits = (size * 7.52316384526264e-37).to(tl.uint32, bitcast=True)
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    count = (size * 512.0 + 8388608.0).to(tl.uint32, bitcast=True) & 0xF
    rounded = tl.where(size < 0.015625, count, normal)
    rounded = tl.where(x == x, rounded, 0x7F)
    return (rounded | ((x.to(tl.uint32, bitcast=True) >> 31) << 7)).to(tl.uint8)


@triton.jit
def rotate(x, new, tables, position, d, row_ok, strides, errors, traits: tl.constexpr):
    """x, dimensions `d` of a key, with the first rotary_dim of them rotated; NaN where the position has no angle."""
    half: tl.constexpr = traits.rotary_dim // 2
    if traits.interleaved:
        partner = d ^ 1
        angle = d // 2
        sign = tl.where(d % 2 == 0, -1.0, 1.0)
    else:
        partner = tl.where(d < half, d + half, d - half)
        angle = tl.where(d < half, d, d - half)
        sign = tl.where(d < half, -1.0, 1.0)
    rotates = (d < traits.rotary_dim) & row_ok
    known = position < strides.positions
    tl.atomic_or(errors, NO_ANGLE, mask=row_ok & (known == 0), sem="relaxed")
    other = tl.load(new + partner, mask=rotates, other=0.0).to(traits.accumulator)
    cos = tl.load(tables.cos + position * strides.cos + angle, mask=rotates & known, other=float("nan"))
    cos = cos.to(traits.accumulator)
    sin = tl.load(tables.sin + position * strides.sin + angle, mask=rotates & known, other=float("nan"))
    sin = sin.to(traits.accumulator)
    return tl.where(rotates, x * cos + sign * other * sin, x)


@triton.jit
def store_cached(pool, x, scale, place, d, row_ok, width: tl.constexpr, by_token: tl.constexpr, traits: tl.constexpr):
    """A key or value to its row of the cache, divided by the scale and in 8 bits where the cache has them. place: index
    of the scale. by_token: each row has its own scale, which is computed from x and written.
    """
    if traits.eight_bits:
        if by_token:
            x = x.to(tl.float32)
            most = tl.max(tl.where(tl.abs(x) < float("inf"), tl.abs(x), 0.0), 0)  # 0 for NaN
            own = tl.where(most > 0, tl.maximum(most / 448.0, LEAST_SCALE), 1.0)
            tl.store(scale + place, own, mask=row_ok)
            x = x / own
        elif scale is not None:
            x = x / tl.load(scale + place)
        tl.store(pool + d, e4m3_bits(x.to(tl.float32)), mask=row_ok & (d < width))
    else:
        tl.store(pool + d, x.to(pool.dtype.element_ty), mask=row_ok & (d < width))


@triton.jit
def row_at(tensor, strides, batch, row, head):
    return tensor + batch * strides.batch + row * strides.row + head * strides.head


@triton.jit
def append_kernel(tensors, caches, scales, rotary, errors, strides, shape, traits: tl.constexpr):
    """tensors: AppendTensors; caches: Caches; scales: PerKeyHead; rotary: RotaryTables; strides: AppendStrides; shape:
    AppendShape (`arguments`).
    """
    # where the new token goes
    pid = tl.program_id(0)
    head = (pid % shape.heads_kv).to(tl.int64)
    token = (pid // shape.heads_kv % shape.seqlen).to(tl.int64)
    batch = (pid // shape.heads_kv // shape.seqlen).to(tl.int64)
    rank = token  # within its sequence
    if traits.packed:
        if not traits.at_slots:
            if pid == 0:
                lanes = tl.arange(0, 32)
                guard_offsets(tensors.cu_seqlens_q, shape.batch, shape.seqlen, -1, lanes, errors, OFFSETS_Q, 0)
            sequence, start, _ = sequence_of_row(tensors.cu_seqlens_q, token.to(tl.int32), shape.batch, shape.seqlen)
            is_inside = (sequence > 0) & (sequence <= shape.batch)
            rank = token - start
            batch = tl.where(is_inside, sequence - 1, 0).to(tl.int64)
    if traits.at_slots:
        position = tl.load(tensors.seqlens + token).to(tl.int64)
        room = position >= 0
    else:
        position = tl.load(tensors.seqlens + batch).to(tl.int64) + rank
        room = (position >= 0) & (position < shape.capacity)
        missing = room == 0
        if traits.packed:
            missing = missing & is_inside
            room = room & is_inside
        tl.atomic_or(errors, NO_ROOM, mask=missing, sem="relaxed")
    page = batch
    row = position
    row_ok = room
    if traits.at_slots:
        page = position // shape.page_size
        row = position % shape.page_size
        row_ok = room & (page < shape.num_pages)
        page = tl.where(row_ok, page, 0)
        tl.atomic_or(errors, PAGES, mask=room & (row_ok == 0), sem="relaxed")
    elif traits.paged:
        entry = tensors.page_table + batch * shape.max_pages + position // shape.page_size
        page = tl.load(entry, mask=room, other=0).to(tl.int64)
        inside = (page >= 0) & (page < shape.num_pages)
        tl.atomic_or(errors, PAGES, mask=room & (inside == 0), sem="relaxed")
        row = position % shape.page_size
        row_ok = room & inside
    # its key and value
    d = tl.arange(0, traits.block_d)
    dv = tl.arange(0, traits.block_dv)
    k_new = row_at(tensors.k_new, strides.k_new, batch, token, head)  # the batch's stride is 0 where rows are packed
    v_new = row_at(tensors.v_new, strides.v_new, batch, token, head)
    k = tl.load(k_new + d, mask=row_ok & (d < traits.head_dim), other=0.0).to(traits.accumulator)
    v = tl.load(v_new + dv, mask=row_ok & (dv < traits.head_dim_v), other=0.0).to(traits.accumulator)
    if traits.rotary_dim > 0:
        k = rotate(k, k_new, rotary, position, d, row_ok, strides.rotary, errors, traits)
    k_row = row_at(caches.k, strides.k, page, row, head)
    v_row = row_at(caches.v, strides.v, page, row, head)
    place = (page * shape.page_size + row) * shape.heads_kv + head  # of a scale for each key and head
    k_place = place if traits.k_token_scale else head
    v_place = place if traits.v_token_scale else head
    store_cached(k_row, k, scales.k, k_place, d, row_ok, traits.head_dim, traits.k_token_scale, traits)
    store_cached(v_row, v, scales.v, v_place, dv, row_ok, traits.head_dim_v, traits.v_token_scale, traits)
