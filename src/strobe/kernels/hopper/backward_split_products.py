"""The mainloop of the Hopper backward where two consumers split the products: one makes P, dS and dV, the other
multiplies dQ and dK.

    producer --Q, LSE--> q -----+--> consumer 0: S, dP, P, dS, dV --dS--> ds --> consumer 1: dQ, dK
    producer --dO, delta--> do -+                                                  '--units of dQ--> dq --> store warp

64 keys, of wide heads, whose accumulators leave registers for no more:

    consumer 0     S | dP | P, dS to the other | dV
    consumer 1     dQ, dK | dQ to memory, unit by unit

128 keys, as two tiles of 64, so that dQ is added to memory half as often: 192/128 1.15 of the speed of 64 keys (H200).
The second tile's products are issued with the first's dV. A unit of dQ is so narrow that it fits beside two tiles of
dK.

    consumer 0     S, dP | P, dS to the other | dV, S', dP' | P', dS' to the other | dV'
    consumer 1     a unit of dQ, dK | that unit to memory | a unit, dK' | to memory | ...

dS then has as many stages as Q, where it is free when Q is. dK and dV leave in the place of K and V.
"""

from ..device.dialect import Value, gl, gluon, mbarrier, record, warpgroup_mma, warpgroup_mma_wait, zero_of_turn
from ..device.pipeline import PipelineState
from ..device.tma import ColumnParts
from .backward_mainloop import (
    ROWS,
    AttentionMask,
    KeyTile,
    Pipelines,
    add_product,
    add_to_columns,
    do_state_of,
    dov_product,
    minus_delta_of,
    qk_product,
    rows_at,
    rows_of,
    score_gradient,
    softmax_p,
    tile_now,
    wait_for,
    zero_foreign_dq,
    zero_parts,
    zeros,
)


@record
class KeyHalves:
    """Accumulators of two tiles of 64 keys."""

    first: ColumnParts
    second: ColumnParts


@record
class DvState:
    """What a step of consumer 0 hands the next."""

    dv: ColumnParts | KeyHalves
    q: PipelineState
    do: PipelineState


@record
class DkState:
    """What a step of consumer 1 hands the next."""

    dk: ColumnParts | KeyHalves
    q: PipelineState
    ds: PipelineState


@record
class SoftmaxConsumer:
    """Consumer 0 in one work tile: P and dS of every tile of queries, and dV."""

    keys: KeyTile
    pipes: Pipelines
    mask: AttentionMask
    mods: Value  # ScoreMods of the work tile's keys and first queries, or None
    launch: gl.tuple  # LaunchParams
    traits: gl.constexpr

    @gluon.jit
    def mainloop(self, blocks, dv, q_state, do_state):
        """All tiles of queries. Returns the state after them."""
        traits: gl.constexpr = self.traits
        HEADS: gl.constexpr = traits.heads_per_program
        state = DvState(dv, q_state, do_state)
        for head in range(HEADS):
            for i in range(blocks.num_m_blocks):
                m_block = blocks.m_block(i, traits)
                mods = None
                if traits.has_mods:
                    mods = self.mods.of_tile(head, m_block, traits)
                    if traits.has_full_blocks:
                        mods = mods.of_listed_block(blocks.is_full(i))
                do = do_state_of(state.q, state.do, traits)
                if traits.two_key_tiles:
                    grad = self.softmax_step_of_two_tiles(m_block, mods, state.dv, state.q, do)
                else:
                    grad = self.softmax_step(m_block, mods, state.dv, state.q, do)
                state = DvState(grad, state.q.advance(), state.do.advance())
        return state

    @gluon.jit
    def softmax_step(self, m_block, mods, dv, q_state, do_state):
        """One tile of queries. Returns dV. Where dO has one stage, it is waited for after the softmax."""
        traits: gl.constexpr = self.traits
        DOV_PRODUCTS: gl.constexpr = traits.dov_products
        pipes, softmax = self.pipes, self.launch.softmax
        k = self.keys.k_left_operand(0, traits)
        v = self.keys.v(traits)
        dtype: gl.constexpr = v.main.dtype
        do = rows_at(pipes.do.tiles, do_state.index)
        # S = Q K^T, dP = dO V^T, P = exp2(scale S - LSE)
        if traits.do_stages == 1:
            pipes.q.consumer_wait(q_state)
            q = rows_at(pipes.q.tiles, q_state.index)
            s = warpgroup_mma_wait(0, deps=[qk_product(k, q)])
            weights = softmax_p(s, pipes.q.stat(q_state.index), self.mask, mods, m_block, 0, softmax, traits)
            pipes.do.consumer_wait(do_state)
            dp = dov_product(v, do, minus_delta_of(pipes.do.stat(do_state.index)))
        else:
            pipes.do.consumer_wait(do_state)
            dp = minus_delta_of(pipes.do.stat(do_state.index))
            pipes.q.consumer_wait(q_state)
            s = qk_product(k, rows_at(pipes.q.tiles, q_state.index))
            dp = dov_product(v, do, dp)
            s = warpgroup_mma_wait(DOV_PRODUCTS, deps=[s])
            weights = softmax_p(s, pipes.q.stat(q_state.index), self.mask, mods, m_block, 0, softmax, traits)
        dp = warpgroup_mma_wait(0, deps=[dp])
        # dS = P (dP - delta)
        self.put_ds(score_gradient(weights, dp, mods, softmax, traits).to(dtype), q_state)
        # dV += P^T dO
        dv = wait_for(add_product(weights.p.to(dtype), do, dv), 0)
        pipes.do.consumer_release(do_state)
        pipes.q.consumer_release(q_state)
        return dv

    @gluon.jit
    def put_ds(self, ds, q_state):
        """dS to the other consumer, which has read the one before when it has released that step's Q."""
        pipes, before = self.pipes, q_state.previous()
        mbarrier.wait(pipes.q.empty.index(before.index), before.phase)
        pipes.ds.tiles.index(0).store(ds)
        pipes.ds.producer_commit(0)

    @gluon.jit
    def softmax_step_of_two_tiles(self, m_block, mods, dv, q_state, do_state):
        """128 keys. dP of the second tile has delta subtracted after its product: to begin at it, it would
        have to be issued while no other is in flight (backward_mainloop.accumulator_from). Addresses are computed in
        front of each product: else they spill.
        """
        traits: gl.constexpr = self.traits
        DOV_PRODUCTS: gl.constexpr = traits.dov_products
        keys, pipes, softmax = self.keys, self.pipes, self.launch.softmax
        dtype: gl.constexpr = pipes.do.tiles.main.dtype
        pipes.do.consumer_wait(do_state)
        dp = minus_delta_of(pipes.do.stat(do_state.index))
        k = rows_of(keys.k(traits), 0)  # before the wait: after it, ptxas schedules the step otherwise
        pipes.q.consumer_wait(q_state)
        # S = Q K^T, dP = dO V^T
        s = qk_product(k, rows_at(pipes.q.tiles, q_state.index))
        dp = dov_product(rows_of(keys.v(traits), 0), rows_at(pipes.do.tiles, do_state.index), dp)
        s = warpgroup_mma_wait(DOV_PRODUCTS, deps=[s])
        # P = exp2(scale S - LSE), dS = P (dP - delta)
        weights = softmax_p(s, pipes.q.stat(q_state.index), self.mask, mods, m_block, 0, softmax, traits)
        dp = warpgroup_mma_wait(0, deps=[dp])
        self.ds_half(0, q_state).store(score_gradient(weights, dp, mods, softmax, traits).to(dtype))
        # dV += P^T dO, and S and dP of the second tile
        dv_0 = add_product(weights.p.to(dtype), tile_now(pipes.do.tiles, do_state.index, traits), dv.first)
        s = qk_product(rows_of(keys.k(traits), ROWS), tile_now(pipes.q.tiles, q_state.index, traits))
        dp = qk_product(rows_of(keys.v(traits), ROWS), tile_now(pipes.do.tiles, do_state.index, traits))
        s = warpgroup_mma_wait(DOV_PRODUCTS, deps=[s])
        lse, mask = pipes.q.stat(q_state.index + zero_of_turn()), self.mask.of_second_keys(ROWS, traits)
        if traits.has_mods:
            mods = mods.shifted(0, ROWS)
        weights = softmax_p(s, lse, mask, mods, m_block, -ROWS, softmax, traits)
        dp = warpgroup_mma_wait(0, deps=[dp])
        minus_delta = pipes.do.stat(do_state.index + zero_of_turn()).load(gl.SliceLayout(0, dp.type.layout))
        ds = score_gradient(weights, dp + minus_delta[None, :], mods, softmax, traits)
        self.ds_half(1, q_state).store(ds.to(dtype))
        pipes.ds.producer_commit(q_state.index)
        dv_1 = add_product(weights.p.to(dtype), tile_now(pipes.do.tiles, do_state.index, traits), dv.second)
        dv_0 = wait_for(dv_0, DOV_PRODUCTS)
        dv_1 = wait_for(dv_1, 0)
        pipes.do.consumer_release(do_state)
        pipes.q.consumer_release(q_state)
        return KeyHalves(dv_0, dv_1)

    @gluon.jit
    def ds_half(self, half: gl.constexpr, q_state):
        """Where dS of 64 of 128 keys goes: who has a step's Q has the stage for its dS, which the other releases with
        Q.
        """
        return self.pipes.ds.tiles.index(q_state.index).slice(ROWS * half, ROWS, dim=0)


@record
class ProductsConsumer:
    """Consumer 1 in one work tile: dK, and dQ of every tile of queries, from the other's dS."""

    keys: KeyTile
    pipes: Pipelines
    traits: gl.constexpr

    @gluon.jit
    def mainloop(self, blocks, dk, q_state, ds_state):
        """All tiles of queries. Returns the state after them."""
        HEADS: gl.constexpr = self.traits.heads_per_program
        state = DkState(dk, q_state, ds_state)
        for _ in range(HEADS * blocks.num_m_blocks):
            if self.traits.two_key_tiles:
                grad = self.products_step_of_two_tiles(state.dk, state.q)
            else:
                grad = self.products_step(state.dk, state.q, state.ds)
            state = DkState(grad, state.q.advance(), state.ds.advance())
        return state

    @gluon.jit
    def products_step(self, dk, q_state, ds_state):
        """One tile of queries. Returns dK. dQ's columns come in two passes where the tile configuration says so."""
        traits: gl.constexpr = self.traits
        QK_PRODUCTS: gl.constexpr = traits.qk_products
        pipes = self.pipes
        k = self.keys.k(traits)
        slot = pipes.dq.state_of_step(ds_state, 0)
        ds = pipes.ds.tiles.index(0)
        pipes.ds.consumer_wait(0, ds_state.phase)
        pipes.q.consumer_wait(q_state)
        # dQ = dS K
        if traits.tuning.dq_passes == 2:
            dq = zero_parts(traits.block_m, traits.dq.main, 0)
            dq = add_to_columns(ds.permute((1, 0)), ColumnParts(k.main.slice(0, traits.dq.main, dim=1), None), dq)
        else:
            dq = zero_parts(traits.block_m, traits.dq.main, traits.dq.tail)
            dq = add_to_columns(ds.permute((1, 0)), k, dq)
        # dK += dS^T Q
        dk = add_to_columns(ds, rows_at(pipes.q.tiles, q_state.index), dk)
        dq = wait_for(dq, QK_PRODUCTS)
        lse = self.load_lse(dq.main, q_state.index)  # now, since Q may be overwritten once it is released
        pipes.dq.put_units(self.own_rows(dq, lse), slot)
        if traits.tuning.dq_passes == 2:
            dq = zero_parts(traits.block_m, traits.dq.tail, 0)
            right = ColumnParts(k.main.slice(traits.dq.main, traits.dq.tail, dim=1), None)
            dq = add_to_columns(ds.permute((1, 0)), right, dq)
            dk = wait_for(dk, 1)
            dq = self.own_rows(wait_for(dq, 0), lse)
            pipes.q.consumer_release(q_state)
            pipes.dq.put_units(dq, slot.advance())
        else:
            dk = wait_for(dk, 0)
            pipes.q.consumer_release(q_state)
        return dk

    @gluon.jit
    def products_step_of_two_tiles(self, dk, q_state):
        """128 keys: dQ unit by unit, the first two stored under the products of dK. Q is there if dS is."""
        traits: gl.constexpr = self.traits
        QK_PRODUCTS: gl.constexpr = traits.qk_products
        UNITS: gl.constexpr = traits.dq.units
        pipes = self.pipes
        ds, q = pipes.ds.tiles.index(q_state.index), rows_at(pipes.q.tiles, q_state.index)
        pipes.ds.consumer_wait(q_state.index, q_state.phase)
        # dQ = dS K, unit by unit, and dK += dS^T Q
        dq = self.dq_unit_product(0, ds)
        dk_0 = add_to_columns(ds.slice(0, ROWS, dim=0), q, dk.first)
        self.put_dq_unit(0, warpgroup_mma_wait(QK_PRODUCTS, deps=[dq]), q_state)
        dq = self.dq_unit_product(1, ds)
        dk_1 = add_to_columns(ds.slice(ROWS, ROWS, dim=0), q, dk.second)
        self.put_dq_unit(1, warpgroup_mma_wait(QK_PRODUCTS, deps=[dq]), q_state)
        for unit in gl.static_range(2, UNITS):
            self.put_dq_unit(unit, warpgroup_mma_wait(0, deps=[self.dq_unit_product(unit, ds)]), q_state)
        dk_0 = wait_for(dk_0, 0)
        dk_1 = wait_for(dk_1, 0)
        pipes.q.consumer_release(q_state)
        return KeyHalves(dk_0, dk_1)

    @gluon.jit
    def dq_unit_product(self, unit: gl.constexpr, ds):
        """dQ = dS K of a unit's columns, over all keys, in flight."""
        UNIT: gl.constexpr = self.traits.dq.unit
        column: gl.constexpr = unit * UNIT
        k = self.keys.k(self.traits)
        if column < self.traits.main_d:
            columns = k.main.slice(column, UNIT, dim=1)
        else:
            columns = k.tail.slice(column - self.traits.main_d, UNIT, dim=1)
        return warpgroup_mma(ds.permute((1, 0)), columns, zeros(ROWS, UNIT), use_acc=False, is_async=True)

    @gluon.jit
    def put_dq_unit(self, unit: gl.constexpr, dq, q_state):
        """A unit of dQ to the store warp. A step takes whole rounds of the slot, an even number of them."""
        PLACES: gl.constexpr = self.traits.dq.slot_barriers
        lse = self.load_lse(dq, q_state.index)
        state = PipelineState(zero_of_turn(), zero_of_turn() + unit // PLACES, 1)
        self.pipes.dq.put_unit(unit % PLACES, self.own_rows(ColumnParts(dq, None), lse).main, state)

    @gluon.jit
    def load_lse(self, dq, index):
        """LSE of the rows of dQ for `own_rows`; without documents nothing is loaded."""
        if self.traits.mask.documents:
            return self.pipes.q.stat(index).load(gl.SliceLayout(1, dq.type.layout))
        else:
            return dq

    @gluon.jit
    def own_rows(self, dq, lse):
        """dQ without rows of other documents."""
        if not self.traits.mask.documents:
            return dq
        elif dq.tail is None:
            return ColumnParts(zero_foreign_dq(dq.main, lse), None)
        else:
            return ColumnParts(zero_foreign_dq(dq.main, lse), zero_foreign_dq(dq.tail, lse))
