"""Writing new keys to a cache in Triton: one program a token and head, which turns the key, rounds and stores."""

import triton
import triton.language as tl

from ..runtime.error_flags import NO_ANGLE as _NO_ANGLE
from ..runtime.error_flags import NO_ROOM as _NO_ROOM
from ..runtime.error_flags import PAGES as _PAGES

NO_ANGLE = tl.constexpr(_NO_ANGLE)
NO_ROOM = tl.constexpr(_NO_ROOM)
PAGES = tl.constexpr(_PAGES)


@triton.jit
def e4m3_bits(x):
    """float32 rounded to the bits of e4m3, to nearest even; beyond 448 the largest; NaN stays NaN.

    Normal numbers: times 2^-120 the exponents of both have one meaning, and what is left is to round 20 bits away. Below 2^-6 a number
    is a count of 2^-9, which the addition of 2^23 rounds to a whole one; times 2^-120 it would be rounded twice.
    """
    size = tl.minimum(tl.abs(x), 448.0)
    bits = (size * 7.52316384526264e-37).to(tl.uint32, bitcast=True)
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    count = (size * 512.0 + 8388608.0).to(tl.uint32, bitcast=True) & 0xF
    rounded = tl.where(size < 0.015625, count, normal)
    rounded = tl.where(x == x, rounded, 0x7F)
    return (rounded | ((x.to(tl.uint32, bitcast=True) >> 31) << 7)).to(tl.uint8)


@triton.jit
def turned(x, new, cos, sin, position, d, row_ok, strides, faults, form: tl.constexpr):
    """x, a key's dimensions `d`, with the first rotary_dim of them turned; NaN where the position has no angle."""
    half: tl.constexpr = form.rotary_dim // 2
    if form.interleaved:
        partner = d ^ 1
        angle = d // 2
        sign = tl.where(d % 2 == 0, -1.0, 1.0)
    else:
        partner = tl.where(d < half, d + half, d - half)
        angle = tl.where(d < half, d, d - half)
        sign = tl.where(d < half, -1.0, 1.0)
    turns = (d < form.rotary_dim) & row_ok
    known = position < strides[2]
    tl.atomic_or(faults, NO_ANGLE, mask=row_ok & (known == 0), sem="relaxed")
    other = tl.load(new + partner, mask=turns, other=0.0).to(form.accumulator)
    c = tl.load(cos + position * strides[0] + angle, mask=turns & known, other=float("nan")).to(form.accumulator)
    s = tl.load(sin + position * strides[1] + angle, mask=turns & known, other=float("nan")).to(form.accumulator)
    return tl.where(turns, x * c + sign * other * s, x)


@triton.jit
def write(pool, x, scale, head, d, row_ok, width: tl.constexpr, form: tl.constexpr):
    if form.eight_bits:
        if scale is not None:
            x = x / tl.load(scale + head)
        tl.store(pool + d, e4m3_bits(x.to(tl.float32)), mask=row_ok & (d < width))
    else:
        tl.store(pool + d, x.to(pool.dtype.element_ty), mask=row_ok & (d < width))


@triton.jit
def append_kernel(tensors, pools, scales, angles, faults, strides, sizes, form: tl.constexpr):
    """tensors (k_new, v_new, seqlens, page_table); pools (k, v); scales (k_scale, v_scale); angles (cos, sin);
    strides of k_new, v_new, k, v, each (batch or page, token or row, head), and (of cos, of sin, angles there are);
    sizes (tokens, heads, capacity, page_size, n_pages, max_pages)."""
    k_new, v_new, seqlens, page_table = tensors
    tokens, heads, capacity, page_size, n_pages, max_pages = sizes
    pid = tl.program_id(0)
    head = (pid % heads).to(tl.int64)
    token = (pid // heads % tokens).to(tl.int64)
    batch = (pid // heads // tokens).to(tl.int64)
    position = tl.load(seqlens + batch).to(tl.int64) + token
    room = (position >= 0) & (position < capacity)
    tl.atomic_or(faults, NO_ROOM, mask=room == 0, sem="relaxed")
    page = batch
    row = position
    row_ok = room
    if form.paged:
        page = tl.load(page_table + batch * max_pages + position // page_size, mask=room, other=0).to(tl.int64)
        inside = (page >= 0) & (page < n_pages)
        tl.atomic_or(faults, PAGES, mask=room & (inside == 0), sem="relaxed")
        row = position % page_size
        row_ok = room & inside
    d = tl.arange(0, form.block_d)
    dv = tl.arange(0, form.block_dv)
    k_at = k_new + batch * strides[0][0] + token * strides[0][1] + head * strides[0][2]
    v_at = v_new + batch * strides[1][0] + token * strides[1][1] + head * strides[1][2]
    x = tl.load(k_at + d, mask=row_ok & (d < form.head_dim), other=0.0).to(form.accumulator)
    y = tl.load(v_at + dv, mask=row_ok & (dv < form.head_dim_v), other=0.0).to(form.accumulator)
    if form.rotary_dim > 0:
        x = turned(x, k_at, angles[0], angles[1], position, d, row_ok, strides[4], faults, form)
    write(
        pools[0] + page * strides[2][0] + row * strides[2][1] + head * strides[2][2],
        x,
        scales[0],
        head,
        d,
        row_ok,
        form.head_dim,
        form,
    )
    write(
        pools[1] + page * strides[3][0] + row * strides[3][1] + head * strides[3][2],
        y,
        scales[1],
        head,
        dv,
        row_ok,
        form.head_dim_v,
        form,
    )
