"""Launching again: a plan's launches are repeated at addresses that were met, and what is kept is bounded."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs

import strobe
from strobe.kernels.hopper import launch_forward
from strobe.kernels.protocol import Plan
from strobe.kernels.runtime import launch_cache, launcher
from strobe.kernels.runtime import workspace as memory
from strobe.kernels.runtime.launch_cache import CACHE
from strobe.ops import attention as ops
from strobe.ops import decode as ops_decode
from strobe.problem import torch_private
from strobe.problem.call import Call
from strobe.problem.target import FAKES
from strobe.selection import replay
from strobe.testing.decode import DECODES
from tests.kernels.runtime.launches import STREAM, _call, _Owner, plain
from tools.proof.simulate import posing


def _launches(plan: Plan) -> dict:
    return CACHE.launches.get(plan.number, {})


def test_a_plan_launches_again_at_addresses_it_met(stage, monkeypatch):
    """From the op's side: first through Triton, then noted, then again and again without the kernel's own host code."""
    monkeypatch.setattr(
        launch_forward.Launch, "start", lambda self: setattr(stage, "started", stage.started + 1) or stage.compiled
    )
    met = []
    monkeypatch.setattr(
        launch_forward, "run_forward", lambda *a, real=launch_forward.run_forward: met.append(1) or real(*a)
    )
    with posing(FAKES["H200"]):
        for call in (_call(), _call()):
            choice = ops.decide(call)
            places = [(torch.empty_like(call.q), torch.empty(2, 100)) for _ in range(2)]
            for tensors in places * 3:
                if not replay.replay(choice.forward, call, *tensors):
                    ops.write(choice, call, *tensors)
                assert not stage.launches or (tensors[0].data_ptr() in _flat(stage.launches.pop()))
        assert len(_launches(choice.forward)) == 4
        assert stage.started == 1 and len(met) == 5
        assert replay.replay(choice.forward, call, *tensors) and stage.launches.pop()
        monkeypatch.setattr(torch_private, "cuda_current_device", lambda: 1)
        assert not replay.replay(choice.forward, call, *tensors)  # another device is current: its guard comes first


class _Places:
    """An allocator that gives out the same addresses each time its owner has freed them."""

    def __init__(self) -> None:
        self.held: dict = {}
        self.given = 0

    def fresh(self, shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: torch.dtype) -> torch.Tensor:
        assert type(shape) is tuple  # torch's own refuses a torch.Size
        self.given += 1
        made = self.held.setdefault((self.given, *shape, dtype), torch.empty(shape, dtype=dtype))
        assert strides in (None, made.stride())
        return made


@pytest.mark.parametrize("heads, launches", ((2, 2), (4, 5)))
def test_a_backward_is_launched_again_as_one(stage, heads, launches, monkeypatch):
    """Its kernels one behind the other, without their host code; where groups are split, sums are set to 0 first."""
    started, places, filled = [], _Places(), []
    noted = lambda owner, key, tensors, first: (
        started.append(key) or launcher.RecordedLaunch(stage.function, 1, -1, (key, *plain(tensors)))
    )
    monkeypatch.setattr(launcher, "start", noted)
    monkeypatch.setattr(ops, "empty_here", places.fresh)
    monkeypatch.setattr(memory, "empty_here", places.fresh)
    monkeypatch.setattr(
        torch, "full", lambda shape, value, **kind: filled.append(value) or places.fresh(shape, None, kind["dtype"])
    )
    q = torch.randn(1, 100, heads, 64, dtype=torch.bfloat16)
    call = Call(
        q,
        *(torch.randn(1, 100, 2, 64, dtype=torch.bfloat16) for _ in range(2)),
        right=0,
        kernel="hopper",
        needs_grad=True,
    )
    given = torch.empty_like(q), torch.empty_like(q), torch.empty(1, heads, 100)
    made, times = [], []
    lying = given[0].as_strided(q.shape, (6400 * heads, 64, 6400, 1))  # dout otherwise, at the same address
    with posing(FAKES["H200"]):
        for dout in (given[0], given[0], given[0], given[0], lying, lying, given[0]):
            if len(made) == 6:  # a profiler looks on
                monkeypatch.setattr(knobs.runtime.launch_exit_hook, "calls", [print])
            places.given = 0
            made.append(ops.given_gradients(call, ops.decide(call), (dout, *given[1:], None)))
            times.append((len(started), len(stage.launches)))
    # at once torch's memory, then places that come again: noted there, launched there; so where dout lies otherwise
    assert times == [(launches * a, launches * b) for a, b in ((1, 0), (2, 0), (2, 1), (2, 2), (3, 2), (3, 3), (4, 3))]
    first, *rest = map(plain, made)
    assert first != rest[0] == rest[1] == rest[2] and len(filled) == (14 if heads > 2 else 0)
    assert stage.launches[:launches] == stage.launches[launches : 2 * launches]
    assert [one[4] for one in stage.launches[:launches]] == started[launches : 2 * launches]


def test_gradients_are_launched_again_before_anything_else_is_looked_at(stage, monkeypatch):
    """Of a plain call: not where a graph of them is wanted, where dout lies otherwise, where what autograd kept has
    come back as something else, or while a profiler looks on; then as any other call's.
    """
    started, looked, places = [], [], _Places()
    noted = lambda owner, key, tensors, first: (
        started.append(key) or launcher.RecordedLaunch(stage.function, 1, -1, (key, *plain(tensors)))
    )
    monkeypatch.setattr(launcher, "start", noted)
    for user in (ops, memory, replay):
        monkeypatch.setattr(user, "empty_here", places.fresh)

    def looking(*arguments, real=ops.given_gradients):
        looked.append(1)
        places.given = 0  # what did not come again has been let go
        return real(*arguments)

    monkeypatch.setattr(ops, "given_gradients", looking)
    q, k, v = (torch.randn(1, 100, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    dout = torch.empty_like(q)
    lying = dout.as_strided(q.shape, (12800, 64, 6400, 1))  # otherwise, at the same address

    def gradients(out, of=dout):
        """(whether the call was looked at, kernels started anew, launches repeated, what came)"""
        before = len(looked), len(started), len(stage.launches)
        places.given = 0
        made = torch.autograd.grad(out, (q, k, v), of, retain_graph=True)
        return *[now - then for now, then in zip((len(looked), len(started), len(stage.launches)), before)], plain(made)

    with posing(FAKES["H200"]):
        out = strobe.attention(q, k, v, causal=True, kernel="hopper")
        assert [gradients(out)[:3] for _ in range(2)] == [(1, 2, 0)] * 2  # torch's memory, then places that come again
        again = gradients(out)
        assert again[:3] == (0, 0, 2) and again == gradients(out)
        assert [gradients(out, lying)[:3] for _ in range(2)] == [(1, 2, 0), (0, 0, 2)]
        assert gradients(out)[:3] == (0, 0, 2)
        places.given, before = 0, len(looked)
        twice = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True, create_graph=True)
        assert all(t.requires_grad for t in twice) and len(looked) == before + 1
        with pytest.raises(strobe.UnsupportedProblem, match="double backward"):
            torch.autograd.grad(twice[0].sum(), q)
        with monkeypatch.context() as patch:
            patch.setattr(knobs.runtime.launch_exit_hook, "calls", [print])
            assert gradients(out)[:3] == (1, 2, 0)
        out = strobe.attention(q, k, v, causal=True, kernel="hopper")
        out.grad_fn._raw_saved_tensors[4].register_hooks(lambda t: t, lambda t: t.mT.contiguous().mT)
        assert [gradients(out)[0] for _ in range(2)] == [1, 1]
        out = strobe.attention(q, k, v, causal=True, kernel="hopper")
        out.grad_fn._raw_saved_tensors[1].register_hooks(lambda t: t, lambda t: t.as_strided(t.shape, lying.stride()))
        assert gradients(out)[0] == 1


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("name", ["pages_of_16", "dense"])
@pytest.mark.parametrize("keys", ["one split", "splits", "splits in a cluster"])
def test_a_decode_is_launched_again(stage, alone, name, keys, monkeypatch):
    """Where lse stands behind the scratch or by itself: what the kernel is handed lies in memory that is held, and each
    thing apart.
    """
    started, places = [], _Places()
    noted = lambda owner, key, tensors, first: (
        started.append(plain(tensors)) or launcher.RecordedLaunch(stage.function, 1, -1, plain(tensors))
    )
    monkeypatch.setattr(launcher, "start", noted)
    monkeypatch.setattr(ops_decode, "empty_here", places.fresh)
    call = DECODES[name].build("cpu", torch.bfloat16, "normal", 0, "hopper", False)
    if keys != "splits in a cluster":
        monkeypatch.setattr("strobe.kernels.hopper.decode_config.cluster_size", lambda *_: 0)
    if keys == "one split":
        monkeypatch.setattr("strobe.kernels.hopper.decode_config.splits", lambda capacity, *_: (1, capacity))
    with posing(FAKES["H200"]):
        choice = ops_decode.decide(call)
        assert choice.forward.config.traits.single == (keys == "one split") and (choice.forward.room > 0) == (
            keys == "splits"
        )
        assert (choice.forward.config.traits.cluster > 0) == (keys == "splits in a cluster")
        made = []
        for _ in range(4):
            places.given = 0
            made.append(ops_decode.run(call, alone=alone))
        kept = _launches(choice.forward)
    # at once torch's memory, then places that come again: noted there, then launched there
    assert (len(started), len(stage.launches)) == (2, 2) and len(kept) == 2
    assert stage.launches[0][4:] == stage.launches[1][4:] == started[1]
    out, lse = (place.data_ptr() for place in (made[1][0], made[1][1]))
    assert out == made[3][0].data_ptr() == started[1][6] and lse == started[1][7]
    assert made[3][1] is None if alone else made[3][1].data_ptr() == lse
    held = sorted(
        (place.data_ptr(), place.data_ptr() + place.numel() * place.element_size()) for place in places.held.values()
    )
    lse_end = lse + choice.problem.lse_bytes
    assert any(begin <= lse and lse_end <= end for begin, end in held) and len(held) == 2 + (
        not alone and choice.forward.room > 0
    )
    if choice.forward.room:
        shares = started[1][12]
        shares_end = shares + choice.forward.room
        assert any(begin <= shares and shares_end <= end for begin, end in held) and not shares < lse_end <= shares_end


def test_nothing_is_launched_again_in_sequence_where_one_was_not_noted(stage):
    one = launcher.RecordedLaunch(stage.function, 1, -1, ())
    assert launcher.in_sequence([one, None]) is None and launcher.in_sequence([one, one.on_this_stream()]) is None
    assert launcher.in_sequence([one, one])() and len(stage.launches) == 2


@pytest.mark.parametrize("out", ("strided", "odd"))
def test_an_out_laid_out_otherwise_is_not_what_a_plan_keeps(stage, out, monkeypatch):
    monkeypatch.setattr(launch_forward.Launch, "start", lambda self: stage.compiled)
    call = _call()
    wide = torch.empty(100, 2, 104 if out == "strided" else 97, dtype=torch.bfloat16)
    with posing(FAKES["H200"]):
        choice = ops.decide(call)
        for _ in range(4):
            ops.write(choice, call, wide[..., :96], torch.empty(2, 100))
        assert not _launches(choice.forward)


def test_what_all_plans_keep_is_bounded(stage, monkeypatch):
    """Lengths that change with each step bring new plans, and new addresses to each."""
    monkeypatch.setattr(launch_cache, "MAX_LAUNCHES", 6)
    monkeypatch.setattr(launch_forward.Launch, "start", lambda self: stage.compiled)
    plans, most = [], 0
    with posing(FAKES["H200"]):
        for window in range(8):
            call = _call(left=window)
            plans.append(ops.decide(call).forward)
            for lse in [torch.empty(2, 100) for _ in range(4)]:
                ops.write(ops.decide(call), call, torch.empty_like(call.q), lse)
                most = max(most, sum(len(_launches(plan)) for plan in plans))
    assert most == 6


def test_a_kernel_is_recorded_while_another_thread_empties_the_table(stage, monkeypatch):
    recording = launcher.record

    def meanwhile(*arguments):
        CACHE.kernels.clear()  # as a thread does that inserts one kernel too many
        return recording(*arguments)

    monkeypatch.setattr(launcher, "record", meanwhile)
    owner = _Owner()
    for _ in range(2):
        stage.start(*stage.described(_call()), owner)
    assert CACHE.kernel_launches and not CACHE.kernels


def test_what_streams_do_not_share_is_launched_again_on_its_own_alone(stage, monkeypatch):
    owner, (tensors, described) = _Owner(), stage.described(_call())
    for _ in range(2):
        stage.start(tensors, described, owner)
    anywhere, here = stage.again, stage.again.on_this_stream()
    assert here() and stage.launches.pop()[3] == STREAM
    monkeypatch.setattr(torch_private, "cuda_current_raw_stream", lambda device: STREAM + 1)
    assert not here() and not stage.launches
    assert anywhere() and stage.launches.pop()[3] == STREAM + 1
    monkeypatch.setattr(torch_private, "cuda_current_raw_stream", lambda device: STREAM)
    monkeypatch.setattr(torch_private, "cuda_is_capturing", lambda: True)
    assert not here() and anywhere.on_this_stream() is None and not stage.launches
    assert anywhere() and stage.launches.pop()


def _flat(arguments: tuple) -> list:
    return [one for part in arguments for one in (_flat(part) if isinstance(part, tuple) else [part])]


def test_a_hook_set_later_has_triton_launch(stage, monkeypatch):
    owner, (tensors, described) = _Owner(), stage.described(_call())
    for _ in range(2):
        stage.start(tensors, described, owner)
    monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [print])
    assert not stage.again() and not stage.launches


def test_addresses_that_were_met_are_not_described_again(stage):
    """Descriptors are encoded once for two sets of addresses that come by turns, as in a loop."""
    owner = _Owner()
    stage.start(*stage.described(_call()), owner)
    turns = [stage.described(_call()) for _ in range(2)]
    first = [stage.start(*one, owner) for one in turns]
    encoded = len(stage.encoded)
    assert (
        encoded
        and first == [stage.start(*one, owner) for one in turns]
        and len(stage.encoded) == encoded
        and stage.started == 1
    )


def test_tensors_that_were_one_may_be_others_later(stage):
    owner, call = _Owner(), _call()
    tensors, described = stage.described(call._replace(k=call.q, v=call.q))
    stage.start(tensors, described, owner)
    assert stage.start(tensors, described, owner) == stage.by_triton(described)
    tensors, described = stage.described(call)
    assert stage.start(tensors, described, owner) is None  # one more kind of launch, through Triton
    assert stage.start(tensors, described, owner) == stage.by_triton(described)


def test_owners_keys_and_alignments_are_told_apart(stage):
    owner = _Owner()
    stage.start(*stage.described(_call()), owner)
    assert stage.start(*stage.described(_call()), _Owner()) is None
    assert stage.start(*stage.described(_call()), owner, "another key") is None
    assert stage.start(*stage.described(_call(offset=1)), owner) is None  # a pointer that is no multiple of 16
    assert stage.start(*stage.described(_call()), owner) is not None


def test_nothing_kept_holds_memory(stage):
    owner, (tensors, described) = _Owner(), stage.described(_call())
    for _ in range(3):
        stage.start(tensors, described, owner)
    watched = [weakref.ref(tensor) for tensor in tensors]
    del tensors, described
    gc.collect()
    assert [reference() for reference in watched] == [None] * len(watched)


@pytest.mark.parametrize("reason", ("scratch", "profile", "version", "hook"))
def test_triton_launches_where_its_launcher_does_more(stage, reason, monkeypatch):
    if reason == "version":
        monkeypatch.setattr(launcher.triton, "__version__", "4.0.0")
    elif reason == "hook":
        monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [print])
    else:
        monkeypatch.setattr(stage.compiled.run, f"{'global' if reason == 'scratch' else reason}_scratch_size", 8)
    owner, (tensors, described) = _Owner(), stage.described(_call())
    for count in range(1, 4):
        assert stage.start(tensors, described, owner) is None
        assert stage.started == count


def test_what_is_kept_is_bounded(stage, monkeypatch):
    monkeypatch.setattr(launch_cache, "MAX_KERNELS", 4)
    owner, kept = _Owner(), []
    for _ in range(12):
        kept.append(stage.described(_call()))  # kept, so that addresses differ
        stage.start(*kept[-1], owner, str(len(kept)))
        assert len(CACHE.kernels) <= 4
