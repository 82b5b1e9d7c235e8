"""The mainloop of the Hopper backward where two consumers split the keys: each takes 64 of 128, and a part of dQ.

    producer --Q, LSE--> q     } consumer 0, keys 0..63   --dS--> ds --> consumer 1 } each its part of dQ
    producer --dO, delta--> do } consumer 1, keys 64..127 --dS--> ds --> consumer 0 }   --> dq --> store warps

A step is one tile of queries. Each consumer makes S, dP, P and dS of its own keys, adds to its dV and dK, and computes
its part of dQ over all 128 keys: a range of columns, or 64 of 128 queries. For that it needs the other's dS, which
comes by shared memory.

    tensor cores   S | dP        |      dV, dQ | dK
    the rest           P    dS             dQ to memory

dq_deferred: the dQ of a step is that of the step before. Neither consumer then waits for dS that the other makes in the
same step. They drift apart, so that one's softmax runs under the other's products.

128 queries come in two halves, and one half is multiplied under the other's softmax:

    tensor cores   S, dP | S', dP'        |    dV, dK            | dV', dQ | dK'
    the rest               P        dS         P'        dS'               dQ to memory

Two consumers that wait for each other only where they hand something over fill each other's gaps: with 128 keys 1.1 to
1.25 times the speed of eight warps in step, which computed the next P under this step's products (docs/performance.md).
"""

from ..device.dialect import Value, gl, gluon, mbarrier, record, warpgroup_mma, warpgroup_mma_wait
from ..device.pipeline import PipelineState, release
from ..device.tma import ColumnParts
from .backward_mainloop import (
    ROWS,
    AttentionMask,
    KeyTile,
    Pipelines,
    add_product,
    dov_product,
    minus_delta_of,
    qk_dov_products,
    qk_product,
    rows_at,
    rows_of,
    score_gradient,
    softmax_p,
    tile_layout,
    wait_for,
    zero_foreign_dq,
    zeros,
)


@record
class KeyGradients:
    """dK and dV of a consumer's keys, float32 accumulators."""

    dk: ColumnParts
    dv: ColumnParts


@record
class SplitKeysState:
    """What a step hands the next."""

    grads: KeyGradients
    q: PipelineState
    ds: PipelineState


@record
class Step:
    """A tile of queries, and where its Q and dS are."""

    q: PipelineState
    ds: PipelineState
    m_block: gl.tensor
    is_first: gl.tensor  # of the work tile
    mods: Value  # ScoreMods of this consumer's keys, or None


@record
class StepOperands:
    """K of both consumers, and this consumer's K and V."""

    k_both: ColumnParts
    k: ColumnParts
    v: ColumnParts


@record
class SplitKeysConsumer:
    """One consumer in one work tile."""

    index: gl.constexpr
    keys: KeyTile
    pipes: Pipelines
    kv_phase: Value
    mask: AttentionMask
    mods: Value  # ScoreMods of this consumer's keys and the work tile's first queries, or None
    rows: Value  # DocumentRows, or None
    whole_m_blocks: Value  # dq_written_directly: of how many m_blocks dQ is whole with this tile's keys; else None
    has_others: Value  # dq_written_directly: whether other work tiles come before this one; else None
    launch: gl.tuple  # LaunchParams
    traits: gl.constexpr

    @gluon.jit
    def mainloop(self, blocks, grads, q_state, ds_state):
        """All tiles of queries. Returns the state after them."""
        traits: gl.constexpr = self.traits
        HEADS: gl.constexpr = traits.heads_per_program
        state = SplitKeysState(grads, q_state, ds_state)
        for head in range(HEADS):
            for i in range(blocks.num_m_blocks):
                m_block = blocks.m_block(i, traits)
                is_first = i == 0
                if traits.heads_per_program > 1:
                    is_first = is_first & (head == 0)
                mods = None
                if traits.has_mods:
                    mods = self.mods.of_tile(head, m_block, traits)
                    if traits.has_full_blocks:
                        mods = mods.of_listed_block(blocks.is_full(i))
                step = Step(state.q, self.ds_state_of(state.q, state.ds), m_block, is_first, mods)
                sums = state.grads
                if traits.dq.by_rows:
                    sums = self.step_by_row_halves(step, sums)
                elif traits.can_skip(self.index):
                    if self.mask.is_empty(m_block, traits):
                        self.skip_step(step)
                    else:
                        sums = self.step(step, sums)
                else:
                    sums = self.step(step, sums)
                state = SplitKeysState(sums, state.q.advance(), state.ds.advance())
        last_ds = self.ds_state_of(state.q, state.ds)
        if traits.dq_deferred:
            if blocks.num_m_blocks > 0:
                self.last_dq(last_ds.previous())
        return SplitKeysState(state.grads, state.q, last_ds)

    @gluon.jit
    def ds_state_of(self, q_state, ds_state):
        """dS has two stages: where Q has two as well, one state stands for both."""
        if self.traits.q_stages == 2:
            return q_state
        else:
            return ds_state

    @gluon.jit
    def operands(self):
        traits: gl.constexpr = self.traits
        k = self.keys.k_left_operand(ROWS * self.index, traits)
        k_both = self.keys.k(traits)
        return StepOperands(k_both, k, rows_of(self.keys.v(traits), ROWS * self.index))

    # ------------------------------------------------ a step

    @gluon.jit
    def step(self, step, grads):
        """One tile of queries. Returns dK and dV after it.

        dS has two stages: who has received the other's dS of a step has finished dQ of the step before, so that the
        stage of the step before is free. With dq_deferred a barrier says when the other has multiplied it. The first
        step of a work tile multiplies what it finds, and hands nothing over; `last_dq` comes after the last step.
        """
        traits: gl.constexpr = self.traits
        QK_PRODUCTS: gl.constexpr = traits.qk_products
        tiles = self.operands()
        pipes, own = self.pipes, self.own(step.ds)
        dtype: gl.constexpr = tiles.k_both.main.dtype
        do, q = rows_at(pipes.do.tiles, step.q.index), rows_at(pipes.q.tiles, step.q.index)
        # S = Q K^T, dP = dO V^T
        s, dp = qk_dov_products(tiles.k, tiles.v, q, do, step.q, pipes, traits)
        # P = exp2(scale S - LSE), dS = P (dP - delta)
        p, ds = self.p_and_ds(s, dp, 0, pipes.q.stat(step.q.index), step, 0, dtype)
        self.acquire_ds(own, step.ds)
        pipes.ds.tiles.index(own).store(ds)
        pipes.ds.producer_commit(own)
        # dV += P^T dO
        dv = add_product(p.to(dtype), do, grads.dv)
        # dQ = dS K
        dq = self.dq_product(self.dq_stage(step.ds), tiles.k_both)
        # dK += dS^T Q
        dk = add_product(ds, q, grads.dk)
        dv = wait_for(dv, 2 + QK_PRODUCTS)
        dq = warpgroup_mma_wait(QK_PRODUCTS, deps=[dq])
        self.put_dq(dq, step)
        dk = wait_for(dk, 0)
        pipes.q.consumer_release(step.q, traits.release_per_thread)
        return KeyGradients(dk, dv)

    @gluon.jit
    def skip_step(self, step):
        """`step` of queries that see none of this consumer's keys: its dS is 0, and of five products only its part of
        dQ is left.
        """
        traits: gl.constexpr = self.traits
        pipes, own = self.pipes, self.own(step.ds)
        dtype: gl.constexpr = pipes.ds.tiles.dtype
        pipes.q.consumer_wait(step.q)  # else this stage could be released a round ahead
        if traits.has_block_lists:  # where both consumers may skip a step, so that none waits for dO
            pipes.do.consumer_wait(step.q)
        self.acquire_ds(own, step.ds)
        zero = gl.full([ROWS, traits.block_m], 0.0, dtype, tile_layout(traits.block_m))
        pipes.ds.tiles.index(own).store(zero)
        pipes.ds.producer_commit(own)
        # dQ = dS K
        dq = warpgroup_mma_wait(0, deps=[self.dq_product(self.dq_stage(step.ds), self.keys.k(traits))])
        self.put_dq(dq, step)
        pipes.q.consumer_release(step.q, traits.release_per_thread)

    @gluon.jit
    def step_by_row_halves(self, step, grads):
        """`step` of 128 queries, 64 and 64: S and dP of the second half are multiplied under the softmax of the first,
        dK and dV of the first under the softmax of the second. K is an operand from registers, since products of half
        the queries would read it from shared memory twice as often: d64 1.05 of the speed of 128 at once, windows 1.08;
        with K from shared memory 0.94 to 1.03 (H200).
        """
        traits: gl.constexpr = self.traits
        tiles = self.operands()
        pipes, own = self.pipes, self.own(step.ds)
        dtype: gl.constexpr = tiles.k_both.main.dtype
        do, q = rows_at(pipes.do.tiles, step.q.index), rows_at(pipes.q.tiles, step.q.index)
        do_0, do_1 = rows_of(do, 0), rows_of(do, ROWS)
        q_0, q_1 = rows_of(q, 0), rows_of(q, ROWS)
        pipes.do.consumer_wait(step.q)
        delta = pipes.do.stat(step.q.index)
        dp, dp_1 = minus_delta_of(delta.slice(0, ROWS)), minus_delta_of(delta.slice(ROWS, ROWS))
        pipes.q.consumer_wait(step.q)
        # S = Q K^T, dP = dO V^T
        s = qk_product(tiles.k, q_0)
        dp = dov_product(tiles.v, do_0, dp)
        s_1 = qk_product(tiles.k, q_1)
        dp_1 = dov_product(tiles.v, do_1, dp_1)
        lse = pipes.q.stat(step.q.index)
        # P = exp2(scale S - LSE), dS = P (dP - delta)
        p, ds = self.p_and_ds(s, dp, 2, lse.slice(0, ROWS), step, 0, dtype)
        self.acquire_ds(own, step.ds)
        pipes.ds.tiles.index(own).slice(0, ROWS, dim=1).store(ds)
        # dV += P^T dO, dK += dS^T Q
        dv = add_product(p.to(dtype), do_0, grads.dv)
        dk = add_product(ds, q_0, grads.dk)
        p, ds = self.p_and_ds(s_1, dp_1, 2, lse.slice(ROWS, ROWS), step, ROWS, dtype)
        pipes.ds.tiles.index(own).slice(ROWS, ROWS, dim=1).store(ds)
        pipes.ds.producer_commit(own)
        dv = add_product(p.to(dtype), do_1, dv)
        # dQ = dS K
        dq = self.dq_product(self.dq_stage(step.ds), tiles.k_both)
        dk = add_product(ds, q_1, dk)
        dv = wait_for(dv, 3)
        dq = warpgroup_mma_wait(1, deps=[dq])
        self.put_dq(dq, step)
        dk = wait_for(dk, 0)
        pipes.q.consumer_release(step.q, traits.release_per_thread)
        return KeyGradients(dk, dv)

    @gluon.jit
    def p_and_ds(self, s, dp, pending: gl.constexpr, lse, step, row: gl.constexpr, dtype: gl.constexpr):
        """(P, dS) of S and dP in flight, after which `pending` products have been issued. P stays float32: as an
        operand beside P it would spill.
        """
        DOV_PRODUCTS: gl.constexpr = self.traits.dov_products
        s = warpgroup_mma_wait(DOV_PRODUCTS + pending, deps=[s])
        mods, softmax = step.mods, self.launch.softmax
        if self.traits.has_mods:
            mods = mods.shifted(row, 0)
        weights = softmax_p(s, lse, self.mask, mods, step.m_block, row, softmax, self.traits)
        dp = warpgroup_mma_wait(pending, deps=[dp])
        return weights.p, score_gradient(weights, dp, mods, softmax, self.traits).to(dtype)

    # ------------------------------------------------ dS, and this consumer's part of dQ

    @gluon.jit
    def own(self, ds_state):
        return 2 * ds_state.index + self.index

    @gluon.jit
    def other(self, ds_state):
        return 2 * ds_state.index + (1 - self.index)

    @gluon.jit
    def acquire_ds(self, own, ds_state):
        """dq_deferred: wait until the stage of dS is free. The first tile waits for nobody, the second, which the first
        step multiplies, for that.
        """
        if self.traits.dq_deferred:
            mbarrier.wait(self.pipes.ds.empty.index(own), ds_state.phase ^ 1 ^ ds_state.index)

    @gluon.jit
    def dq_stage(self, ds_state):
        """dS of the step whose dQ is computed: this one, or the one before."""
        if self.traits.dq_deferred:
            return ds_state.previous()
        else:
            return ds_state

    @gluon.jit
    def dq_product(self, ds_state, k_both):
        """dQ = dS K of this consumer's part, in flight: over its own keys, then over the other's, once their dS is
        there.
        """
        OWN: gl.constexpr = ROWS * self.index
        OTHER: gl.constexpr = ROWS * (1 - self.index)
        COLUMNS: gl.constexpr = self.traits.dq.part_columns(self.index)
        ds = self.pipes.ds
        k = self.k_columns(k_both)
        own, other = self.own(ds_state), self.other(ds_state)
        dq = zeros(ROWS, COLUMNS)
        dq = warpgroup_mma(
            self.ds_part(ds.tiles.index(own)), k.slice(OWN, ROWS, dim=0), dq, use_acc=False, is_async=True
        )
        ds.consumer_wait(other, ds_state.phase)
        return warpgroup_mma(self.ds_part(ds.tiles.index(other)), k.slice(OTHER, ROWS, dim=0), dq, is_async=True)

    @gluon.jit
    def k_columns(self, k):
        """K's columns of this consumer's part of dQ: all, the main or the tail columns, or half of the main columns."""
        dq: gl.constexpr = self.traits.dq
        if dq.by_rows:
            return k.main
        elif k.tail is not None:
            return k.tail if self.index == 1 else k.main
        else:
            return k.main.slice(dq.part_column(self.index), dq.part_columns(self.index), dim=1)

    @gluon.jit
    def ds_part(self, ds):
        """dS of 64 keys as [queries, keys]: all queries, or those of this consumer's part."""
        if self.traits.dq.by_rows:
            return ds.slice(ROWS * self.index, ROWS, dim=1).permute((1, 0))
        else:
            return ds.permute((1, 0))

    @gluon.jit
    def put_dq(self, dq, step):
        """This consumer's part of dQ to the store warps, without rows of other documents."""
        traits: gl.constexpr = self.traits
        pipes, stage = self.pipes, self.dq_stage(step.ds)
        if traits.dq_deferred:
            release(pipes.ds.empty.index(self.other(stage)), traits.release_per_thread)
            if not step.is_first:  # which has multiplied what it found
                pipes.dq.put_part(dq, self.index, pipes.dq.state_of_step(stage, self.kv_phase))
        else:
            if traits.mask.documents:
                if self.rows.has_foreign_rows(step.m_block):
                    lse = self.stat_part(pipes.q.stat(step.q.index)).load(gl.SliceLayout(1, dq.type.layout))
                    dq = zero_foreign_dq(dq, lse)
            slot = pipes.dq.state_of_step(stage, self.kv_phase)
            if traits.dq_written_directly:
                if step.m_block < self.whole_m_blocks:
                    pipes.dq.put_whole_part(dq, self.has_others, self.index, slot)
                else:
                    pipes.dq.put_part(dq, self.index, slot)
            else:
                pipes.dq.put_part(dq, self.index, slot)

    @gluon.jit
    def last_dq(self, ds_state):
        """dq_deferred: dQ of a work tile's last step. Its dS is not free yet: the next work tile's first step
        multiplies it once more.
        """
        dq = warpgroup_mma_wait(0, deps=[self.dq_product(ds_state, self.keys.k(self.traits))])
        self.pipes.dq.put_part(dq, self.index, self.pipes.dq.state_of_step(ds_state, self.kv_phase))

    @gluon.jit
    def stat_part(self, stat):
        """LSE of the queries of this consumer's part of dQ."""
        if self.traits.dq.by_rows:
            return stat.slice(ROWS * self.index, ROWS)
        else:
            return stat
