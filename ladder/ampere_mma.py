"""a, Ampere: mma.sync m16n8k16 fed by ldmatrix, cp.async in two stages, swizzled shared memory. FlashAttention-2 as it
runs on an A100.

The idea: products by tensor cores, and copies that nobody waits for while they are under way.

mma.sync m16n8k16: a warp multiplies A [16, 16] by B [16, 8] and adds to C [16, 8]; each lane holds a few elements of
each, its fragment. Lane l = 4 g + t (g 0..7, t 0..3) holds

    A   rows g and g + 8, columns 2t, 2t + 1, 2t + 8, 2t + 9: eight 16-bit numbers in four registers
    B   rows 2t, 2t + 1, 2t + 8, 2t + 9 of column g: four in two registers
    C   rows g and g + 8, columns 2t and 2t + 1: four float32

A row of C lies in one quad of lanes (t 0..3): a row's maximum and sum need two shuffles and no shared memory. And C of
one product is laid out as A of the next: two neighbouring C [16, 8], rounded to 16 bits, are one A [16, 16]. So scores
become weights become the left operand of P V in the registers where they are: `convert_layout` below moves nothing.
Warps own 16 or 32 rows each and never exchange anything.

ldmatrix fills fragments: each lane names a 16-byte row of an 8 x 8 block, and every lane of the warp receives its two
elements of it, four blocks an instruction. q k^T wants k with d running along the fragment, as it lies in memory. P V
wants v with keys running along it, while v's rows run along d: ldmatrix.trans hands out the transposed block. Here
`permute` and the operand's layout say so, and the compiler picks the instruction.

Swizzle: rows of 128 bytes begin in the same bank, so the eight rows of a block would collide eightfold.
SwizzledSharedLayout(8, 1, 8) stores the 16-byte piece c of row r at piece c xor (r mod 8): eight rows of one column lie
in eight different quarters of the banks.

cp.async copies 16 bytes from global to shared memory past the registers. A thread's copies are committed as groups, and
`wait_group n` waits until at most n of its newest groups are under way. K and V of a stage are a group each. All
threads meet behind each wait, so that everybody's copies have landed; and who has come so far has read what was there
before. So V(j + 1) starts behind the wait for K(j), since V(j - 1) has been read, and K(j + 2) behind the wait for
V(j), over K(j): two meetings a tile. Copies that start where their place falls free ask for a meeting of their own,
four a tile. Where nothing is left to copy an empty group is committed, so that the count stays right.

Addresses: a thread copies the same 16 bytes of every eighth row (D = 128; sixteenth at D = 64). Its own address is held
once, and what the others are away is the same for all threads, hence in uniform registers (`copy_tile`).

The output is converted to rows in registers before it is stored: 16 bytes a lane instead of the fragment's 4.

V's fragments for 64 keys and D = 128 would be 128 registers beside o's 128. So both products come in slices: scores
over 16 columns of d at a time, o over 16 keys at a time; slices of p are a renaming of registers (`halves`). Of 32
columns, fragments left no room to ask for the next ones early.

Cost model, a tile of 128 queries and 64 keys, D columns, in 16 bits:

    FLOPs       4 * 128 * 64 D, on mma.sync (on an H200 about two thirds of what wgmma does)
    bytes       256 D of K and V a tile, once for 128 queries
    shared      2 D (128 + 4 * 64): q and two stages of K and V; each warp reads all of K and V: the more rows a warp
                owns, the fewer bytes a FLOP
    registers   4 warps of 32 rows: o D + scores 64, of which weights are 32; at D = 128 without a mask 88 bytes do not
                fit

What limits it: latency of mma.sync with two warps a scheduler (32 % of warps' time waits for one that was issued, 16 %
for the unit), then short waits for ldmatrix (10 %). Tensor cores are busy 59 % of the time.

Measured:

      D  mask       S_k        ms   TFLOP/s  % of ceiling
     64  dense     1024    0.4602     298.7          30.2
     64  dense     8192     3.562     308.7          31.2
     64  dense    16384     6.871       320          32.4
     64  causal    1024    0.2873     239.4          24.2
     64  causal    8192     1.934     284.3          28.7
     64  causal   16384      3.75     293.2          29.6
    128  dense     1024    0.4231     324.8          32.8
    128  dense     8192     3.168       347          35.1
    128  dense    16384     6.324     347.7          35.2
    128  causal    1024     0.278     247.4            25
    128  causal    8192     1.844     298.1          30.1
    128  causal   16384     3.566     308.3          31.2

on NVIDIA H200, torch 2.11.0+cu130, Triton 3.6.0, 2026-11-24 to 2026-11-25
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from strobe.kernels.device.dialect import cp_async_commit, cp_async_load, cp_async_wait, gl, gluon, mma_v2

from .harness.harness import Rung, Size, check_inputs, outputs

LOG2_E = 1.4426950408889634
LN_2: gl.constexpr = gl.constexpr(0.6931471805599453)
STAGES: gl.constexpr = gl.constexpr(2)


@dataclass(frozen=True)
class Form:
    head_dim: int
    causal: bool
    block_m: int = 128
    block_n: int = 64
    warps: int = 4

    def shared_bytes(self) -> int:
        return 2 * self.head_dim * (self.block_m + 2 * STAGES * self.block_n)

    @property
    def rows_at_once(self) -> int:
        """That all threads copy by an instruction each."""
        return 256 * self.warps // self.head_dim


@gluon.constexpr_function
def copy_layout(width, warps):
    """Warps over rows of `width` elements, 16 bytes a lane."""
    lanes = width // 8
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def pieces_layout(width, warps, pieces):
    """The same rows as [pieces, rows at once, width]: pieces are a thread's own."""
    lanes = width // 8
    return gl.BlockedLayout([pieces, 1, 8], [1, 32 // lanes, lanes], [1, warps, 1], [2, 1, 0])


@gluon.jit
def first_piece(rows, stride, form: gl.constexpr):
    """Each thread's address in the first rows of a head, [1, rows at once, D]."""
    layout: gl.constexpr = pieces_layout(form.head_dim, form.warps, 1)
    row = gl.arange(0, form.rows_at_once, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    column = gl.arange(0, form.head_dim, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    return rows + (row[None, :, None] * stride + column[None, None, :])


@gluon.jit
def copy_tile(smem, piece, start, stop, stride, form: gl.constexpr):
    """Start copying rows `start`.. of one head; rows from `stop` on, and tiles before the first row, become zeros."""
    AT_ONCE: gl.constexpr = form.rows_at_once
    PIECES: gl.constexpr = smem.shape[0] // AT_ONCE
    layout: gl.constexpr = pieces_layout(form.head_dim, form.warps, PIECES)
    by_rows: gl.constexpr = copy_layout(form.head_dim, form.warps)
    behind = (
        gl.arange(0, PIECES, gl.SliceLayout(1, gl.SliceLayout(2, layout))) * AT_ONCE
    )  # numbers, once a thread's pieces are unrolled
    row = gl.arange(0, AT_ONCE, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    column = gl.arange(0, form.head_dim, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    left = gl.where(start >= 0, stop - start, 0)
    own = gl.convert_layout(piece, layout, assert_trivial=True) + start.to(gl.int64) * stride
    places = own + (behind * stride).to(gl.int64)[:, None, None]
    inside = (row[None, :, None] < (left - behind)[:, None, None]) & (column < form.head_dim)[None, None, :]
    places = gl.convert_layout(gl.reshape(places, smem.shape), by_rows, assert_trivial=True)
    inside = gl.convert_layout(gl.reshape(inside, smem.shape), by_rows, assert_trivial=True)
    cp_async_load(smem, gl.multiple_of(gl.max_contiguous(places, [1, 8]), [1, 16]), gl.max_constancy(inside, [1, 8]))
    cp_async_commit()


@gluon.jit
def score_product(q_smem, k_smem, form: gl.constexpr):
    """q k^T by mma.sync, 16 columns of d at a time."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [form.warps, 1], [16, 8])
    HEAD_DIM: gl.constexpr = form.head_dim
    s = gl.full([form.block_m, form.block_n], 0.0, gl.float32, layout)
    for d in gl.static_range(0, HEAD_DIM, 16):
        q = q_smem.slice(d, 16, 1).load(gl.DotOperandLayout(0, layout, 2))
        k = k_smem.slice(d, 16, 1).permute((1, 0)).load(gl.DotOperandLayout(1, layout, 2))
        s = mma_v2(q, k, s)
    return s


@gluon.jit
def halves(p):
    """The left and the right columns: a renaming of registers."""
    return gl.split(gl.permute(gl.reshape(p, [p.shape[0], 2, p.shape[1] // 2]), [0, 2, 1]))


@gluon.jit
def add_product(p, v_smem, o):
    """o + p v by mma.sync: p as it lies in registers, v transposed on its way there."""
    layout: gl.constexpr = o.type.layout
    p_reg = gl.convert_layout(p.to(v_smem.dtype), gl.DotOperandLayout(0, layout, 2))
    return mma_v2(p_reg, v_smem.load(gl.DotOperandLayout(1, layout, 2)), o)


@gluon.jit
def value_product(p, v_smem, o):
    """o + p v, 16 keys at a time: v's fragments of so many are few registers."""
    KEYS: gl.constexpr = p.shape[1] // 2
    left, right = halves(p)
    if KEYS > 16:
        o = value_product(left, v_smem.slice(0, KEYS, 0), o)
        return value_product(right, v_smem.slice(KEYS, KEYS, 0), o)
    else:
        o = add_product(left, v_smem.slice(0, KEYS, 0), o)
        return add_product(right, v_smem.slice(KEYS, KEYS, 0), o)


@gluon.jit
def softmax_step(s, row_max, row_sum, scale_log2):
    """(p, rescale, row_max, row_sum) after one more tile of raw scores; row_max in units of log2."""
    new_max = gl.maximum(row_max, gl.max(s, 1) * scale_log2)
    base = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = gl.exp2(s * scale_log2 - base[:, None])
    rescale = gl.exp2(row_max - base)
    return p, rescale, new_max, row_sum * rescale + gl.sum(p, 1)


@gluon.jit
def hide(s, m_start, n_start, lengths, form: gl.constexpr):
    """Scores with -inf where there is no key, or causal attention does not look."""
    seqlen_q, seqlen_k = lengths
    shift = seqlen_k - seqlen_q
    partial = n_start + form.block_n > seqlen_k
    if form.causal:
        partial = partial | (n_start + form.block_n > m_start + shift + 1)
    if partial:
        rows = gl.arange(0, form.block_m, gl.SliceLayout(1, s.type.layout))
        columns = gl.arange(0, form.block_n, gl.SliceLayout(0, s.type.layout))
        stop = rows * 0 + (seqlen_k - n_start)
        if form.causal:
            stop = gl.minimum(stop, rows + (m_start + shift + 1 - n_start))
        s = gl.where(stop[:, None] > columns[None, :], s, float("-inf"))
    return s


@gluon.jit
def store_rows(out, o, m_start, seqlen_q, stride, form: gl.constexpr):
    """o by rows, 16 bytes a lane."""
    layout: gl.constexpr = copy_layout(form.head_dim, form.warps)
    rows = gl.arange(0, form.block_m, gl.SliceLayout(1, layout))
    columns = gl.arange(0, form.head_dim, gl.SliceLayout(0, layout))
    places = out + m_start * stride + (rows[:, None] * stride + columns[None, :])
    gl.store(places, gl.convert_layout(o.to(out.dtype.element_ty), layout), mask=(rows < seqlen_q - m_start)[:, None])


@gluon.jit
def attend_kernel(q, k, v, out, lse, sizes, strides, scale_log2, form: gl.constexpr):
    heads, group, seqlen_q, seqlen_k = sizes
    BLOCK_M: gl.constexpr = form.block_m
    BLOCK_N: gl.constexpr = form.block_n
    HEAD_DIM: gl.constexpr = form.head_dim
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [form.warps, 1], [16, 8])
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    dtype: gl.constexpr = q.dtype.element_ty
    m_start = (gl.num_programs(0) - 1 - gl.program_id(0)) * BLOCK_M  # the longest first
    head, entry = gl.program_id(1), gl.program_id(2).to(gl.int64)
    stride, stride_k = strides
    q += entry * seqlen_q * stride + head * HEAD_DIM
    k += entry * seqlen_k * stride_k + head // group * HEAD_DIM
    v += entry * seqlen_k * stride_k + head // group * HEAD_DIM
    q_smem = gl.allocate_shared_memory(dtype, [BLOCK_M, HEAD_DIM], swizzled)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], swizzled)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], swizzled)
    n_stop = seqlen_k
    if form.causal:
        n_stop = gl.minimum(n_stop, gl.maximum(m_start + BLOCK_M + seqlen_k - seqlen_q, 0))
    blocks = gl.cdiv(n_stop, BLOCK_N)
    last = (blocks - 1) * BLOCK_N
    k_piece, v_piece = first_piece(k, stride_k, form), first_piece(v, stride_k, form)
    copy_tile(q_smem, first_piece(q, stride, form), m_start, seqlen_q, stride, form)
    copy_tile(k_smem.index(0), k_piece, last, seqlen_k, stride_k, form)
    copy_tile(v_smem.index(0), v_piece, last, seqlen_k, stride_k, form)
    copy_tile(k_smem.index(1), k_piece, last - BLOCK_N, seqlen_k, stride_k, form)
    row_max = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
    row_sum = gl.full([BLOCK_M], 0.0, gl.float32, gl.SliceLayout(1, layout))
    o = gl.full([BLOCK_M, HEAD_DIM], 0.0, gl.float32, layout)
    stage = 0
    for i in range(blocks):  # the last keys first: there a causal tile is masked
        n_start = last - i * BLOCK_N
        cp_async_wait(2)  # K has landed; its V and the next K are under way. The V before has been read
        copy_tile(v_smem.index(stage ^ 1), v_piece, n_start - BLOCK_N, seqlen_k, stride_k, form)
        s = score_product(q_smem, k_smem.index(stage), form)
        cp_async_wait(2)  # V has landed. K has been read
        copy_tile(k_smem.index(stage), k_piece, n_start - 2 * BLOCK_N, seqlen_k, stride_k, form)
        s = hide(s, m_start, n_start, (seqlen_q, seqlen_k), form)
        p, rescale, row_max, row_sum = softmax_step(s, row_max, row_sum, scale_log2)
        o = o * rescale[:, None]
        o = value_product(p, v_smem.index(stage), o)
        stage = stage ^ 1
    cp_async_wait(0)
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    row_lse = gl.where(row_sum == 0.0, float("-inf"), row_max * LN_2 + gl.log(row_sum))
    gl.store(lse + (entry * heads + head) * seqlen_q + m_start + rows, row_lse, mask=rows < seqlen_q - m_start)
    o = o * gl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)[:, None]
    store_rows(out + entry * seqlen_q * stride + head * HEAD_DIM, o, m_start, seqlen_q, stride, form)


def run(q: Tensor, k: Tensor, v: Tensor, causal: bool, **options: int) -> tuple[Tensor, Tensor]:
    check_inputs(q, k, v)
    batch, seqlen_q, heads, head_dim = q.shape
    form = Form(head_dim, causal, **options)
    out, lse = outputs(q)
    sizes = (heads, heads // k.shape[2], seqlen_q, k.shape[1])
    grid = (-(-seqlen_q // form.block_m), heads, batch)
    attend_kernel[grid](
        q, k, v, out, lse, sizes, (q.stride(1), k.stride(1)), head_dim**-0.5 * LOG2_E, form, num_warps=form.warps
    )
    return out, lse


def moved(size: Size, form: Form) -> int:
    """q and out once, K and V once for each tile of queries that sees them."""
    return 2 * size.head_dim * (2 * size.rows + 2 * size.streamed(form.block_m, form.block_n)) + 4 * size.rows


RUNG = Rung(
    "a", "Ampere: mma.sync, ldmatrix, cp.async in two stages", "k2", run, Form, moved,
    ("copy_tile", "score_product", "value_product", "attend_kernel"), capability=80,
)  # fmt: skip
