"""A call that was met is known again by torch's guards; one that differs in anything a Choice is made of is decided for
itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch

import strobe
from strobe import reference
from strobe.kernels.protocol import Buffer, Plan
from strobe.kernels.runtime import launch_cache
from strobe.kernels.runtime import workspace as memory
from strobe.kernels.runtime.launch_cache import CACHE, KEYWORDS, LaunchCache
from strobe.ops import attention as ops
from strobe.ops import decode as ops_decode
from strobe.problem.call import Call
from strobe.problem.decode import DecodeCall
from strobe.problem.mask import NO_BOUND
from tests.calls import CALLS

INT = lambda *values: torch.tensor(values, dtype=torch.int32)


def _moved(tensor: torch.Tensor, elements: int = 1) -> torch.Tensor:
    """The same contents and strides, so many elements further on."""
    return torch.cat([tensor.new_zeros(elements), tensor.flatten()])[elements:].view(tensor.shape)


def _plain() -> Call:
    return Call(*(torch.randn(2, 8, 4, 16) for _ in range(3)), right=0)


ATTENTION = {
    "strides of q": lambda c: c._replace(q=c.q.transpose(1, 2).contiguous().transpose(1, 2)),
    "strides of v": lambda c: c._replace(v=torch.cat([c.v, c.v], -1)[..., :16]),
    "dtype": lambda c: c._replace(q=c.q.double(), k=c.k.double(), v=c.v.double()),
    "address of q": lambda c: c._replace(q=_moved(c.q)),
    "address of v": lambda c: c._replace(v=_moved(c.v, 2)),
    "keys": lambda c: c._replace(k=c.k[:, :5], v=c.v[:, :5]),
    "width of v": lambda c: c._replace(v=c.v[..., :8].contiguous()),
    "band": lambda c: c._replace(right=1),
    "scale": lambda c: c._replace(scale=0.5),
    "kernel": lambda c: c._replace(kernel="cpu"),
    "sinks": lambda c: c._replace(sinks=torch.zeros(4)),
    "lengths": lambda c: c._replace(key_lengths=INT(3, 8)),
    "prefix": lambda c: c._replace(prefix=INT(3, 8)),
    "gradients wanted": lambda c: c._replace(needs_grad=True),
}


@pytest.mark.parametrize("within", (torch.no_grad, torch.inference_mode, torch.enable_grad))
@pytest.mark.parametrize("name", ATTENTION)
def test_what_differs_is_decided_for_itself(name, within):
    known, decided = LaunchCache(), []

    def decide(call):
        decided.append(ops.decide(call))
        return decided[-1]

    with within():
        call = _plain()  # there, as inference mode marks its own tensors
        other = ATTENTION[name](call)
        first = known.direct_choice(call, decide)
        assert known.direct_choice(call._replace(q=call.q.clone()), decide) is first and len(decided) == 1
        assert known.direct_choice(other, decide) is ops.decide(other) and len(decided) == 2
        assert (
            known.direct_choice(call, decide) is first
            and known.direct_choice(other, decide) is decided[1]
            and len(decided) == 2
        )


def test_optional_tensors_are_told_apart_by_their_place():
    """Of the same kind and number: a prefix is no length."""
    known, call, lengths = LaunchCache(), _plain(), INT(3, 8)
    one, other = (
        known.direct_choice(call._replace(**{name: lengths}), ops.decide) for name in ("prefix", "key_lengths")
    )
    assert one.problem.mask.prefix and other.problem.mask.key_lengths and not other.problem.mask.prefix


def _decode() -> DecodeCall:
    k = torch.randn(2, 32, 2, 16)
    return DecodeCall(torch.randn(2, 1, 4, 16), k, k.clone(), INT(3, 32), right=0)


DECODE = {
    "pages": lambda c: c._replace(
        k=c.k.view(4, 16, 2, 16), v=c.v.view(4, 16, 2, 16), page_table=INT(0, 1, 2, 3).view(2, 2)
    ),
    "start": lambda c: c._replace(k_start=INT(0, 1)),
    "k_scale": lambda c: c._replace(
        k=c.k.to(torch.float8_e4m3fn), v=c.v.to(torch.float8_e4m3fn), k_scale=torch.ones(2)
    ),
    "v_scale": lambda c: c._replace(
        k=c.k.to(torch.float8_e4m3fn), v=c.v.to(torch.float8_e4m3fn), v_scale=torch.ones(2)
    ),
    "sinks": lambda c: c._replace(sinks=torch.zeros(4)),
    "address of k": lambda c: c._replace(k=_moved(c.k)),
    "partial": lambda c: c._replace(partial=True),
    "batch_invariant": lambda c: c._replace(batch_invariant=True),
}


@pytest.mark.parametrize("name", DECODE)
def test_what_differs_in_a_decode_is_decided_for_itself(name):
    known, call = LaunchCache(), _decode()
    other = DECODE[name](call)
    for _ in range(2):
        assert known.direct_choice(call, ops_decode.decide) is ops_decode.decide(call)
        assert known.direct_choice(other, ops_decode.decide) is ops_decode.decide(other)


def test_what_is_not_contiguous_goes_the_long_way():
    """Kernels take small tensors as contiguous: the op copies them first."""
    lengths = INT(3, 0, 8, 0)[::2]
    assert LaunchCache().direct_choice(_plain()._replace(key_lengths=lengths), ops.decide) is None
    assert LaunchCache().direct_choice(_decode()._replace(seqlens=lengths), ops_decode.decide) is None


@pytest.mark.parametrize("name", ("causal", "varlen causal sinks", "documents"))
def test_gradients_need_more_than_was_met_without_them(name):
    """In the same modes, after a call without gradients was met: tensors that need one are not taken for those."""
    known, call = LaunchCache(), Call(*CALLS[name](torch.float32))
    assert known.direct_choice(call, ops.decide) is not None
    for field in ("q", "k", "v"):
        asking = call._replace(**{field: getattr(call, field).clone().requires_grad_()})
        assert known.direct_choice(asking, ops.decide) is None
        with torch.no_grad():
            assert known.direct_choice(asking, ops.decide) is not None
        assert known.direct_choice(asking, ops.decide) is None


@pytest.mark.parametrize("pattern", ("xyy", "xxy", "xyx", "xxx"))
def test_one_tensor_twice_is_known_again(pattern):
    """A guard refuses to see one tensor in two places; calls with the same contents in tensors of their own are others,
    and equal.
    """
    known, decided = LaunchCache(), []
    decide = lambda call: (decided.append(call), ops.decide(call))[1]
    held = {letter: torch.randn(2, 8, 4, 16) for letter in pattern}
    call = Call(*(held[letter] for letter in pattern), right=0)
    for again in (call, call, call._replace(left=3), call):
        assert known.direct_choice(again, decide) is ops.decide(again)
    assert len(decided) == 2
    apart = Call(*(torch.randn(2, 8, 4, 16) for _ in range(3)), right=0)
    for again in (apart, call, apart._replace(v=_moved(apart.v)), call, apart):
        assert known.direct_choice(again, decide) is ops.decide(again)
    assert len(decided) == 4


def test_packed_sequences_of_one_length_and_documents_are_known_again(monkeypatch):
    decided, ids = [], INT([0] * 3 + [1] * 5, [0] * 8)
    CACHE.clear()
    monkeypatch.setattr(ops, "decide", lambda call, decide=ops.decide: decided.append(call) or decide(call))
    q, k, v = (torch.randn(2, 8, 4, 16) for _ in range(3))
    for n in range(3):
        strobe.attention_varlen(q[0], k[0], v[0], cu_seqlens_q=INT(0, n, 8))
        strobe.attention(q, k, v, mask=strobe.documents(ids))
    assert len(decided) == 2


def test_few_are_kept_of_calls_alike(monkeypatch):
    known, call = LaunchCache(), _plain()
    monkeypatch.setattr(launch_cache, "MAX_VARIANTS", 2)
    for elements in (0, 1, 2, 0, 1, 2):
        moved = call._replace(q=_moved(call.q, elements))
        assert known.direct_choice(moved, ops.decide) is ops.decide(moved)
    (variants,) = known.calls.values()
    assert len(variants) == 2
    known.clear()
    assert not known.calls


@pytest.mark.parametrize("error", (TypeError, SystemError))
def test_guards_that_take_other_arguments_are_gone_without(error, monkeypatch):
    """As another version of torch may have: tensors are compared in Python, with the same outcome."""

    def refuse(*_, **__):
        raise error("other arguments")

    monkeypatch.setattr(launch_cache, "TensorGuards", refuse)
    known, call = LaunchCache(), _plain()
    for _ in range(3):
        assert known.direct_choice(call, ops.decide) is ops.decide(call)
    assert len(next(iter(known.calls.values()))) == 1


FORKED = """
import os, torch, strobe
from strobe.kernels.runtime.launch_cache import CACHE
q, k, v = (torch.randn(2, 8, 4, 16) for _ in range(3))
expected = strobe.attention(q, k, v)
torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
held = len(CACHE.calls)
child = os.fork()
if child == 0:
    same = torch.equal(strobe.attention(q, k, v), expected) and len(CACHE.calls) == held
    other = strobe.attention(q, k, v, causal=True)
    os._exit(0 if same and len(CACHE.calls) > held else 1)
assert os.waitpid(child, 0)[1] == 0
assert len(CACHE.calls) == held
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_inherits_the_cache_and_adds_to_its_own():
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1000:]


def test_threads_that_evict_each_others_entries_get_their_own_choices(monkeypatch):
    """Without the GIL too: no table is changed in place. Lengths are told apart by the Choice that comes back."""
    monkeypatch.setattr(launch_cache, "MAX_CALLS", 3)
    monkeypatch.setattr(launch_cache, "MAX_VARIANTS", 2)
    cache, wrong = LaunchCache(), []

    def run(seed: int) -> None:
        for n in range(200):
            keys = 1 + (7 * n + seed) % 6
            call = Call(torch.ones(1, 2, 1, 4), torch.ones(1, keys, 1, 4), torch.ones(1, keys, 1, 4))
            choice = cache.direct_choice(call, ops.decide)
            if choice.problem.layout.seqlen_k != keys:
                wrong.append(keys)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(cache.calls) <= 3 + len(threads)


# ---------------------------------------------------------------- scratch in one piece


def test_scratch_is_cut_from_one_piece(monkeypatch):
    monkeypatch.setattr(memory, "empty_here", lambda shape, strides, dtype: torch.full(shape, 7, dtype=dtype))
    monkeypatch.setattr(torch, "full", _full_on_a_cpu(torch.full))
    buffers = (
        Buffer("rows", (3, 5), torch.float32),
        Buffer("sum", (9,), torch.float32, 0.5),
        Buffer("counter", (1,), torch.int32),
    )
    plan = Plan(None, None, None, None, buffers, memory.room(buffers), buffers[1:2])  # type: ignore[arg-type]
    held = memory.pieces(plan)
    workspace = memory.cut(plan, held)
    assert list(workspace) == ["rows", "sum", "counter"] and len(held) == 2
    for buffer in buffers:
        tensor = workspace[buffer.name]
        assert tensor.shape == buffer.shape and tensor.dtype == buffer.dtype and tensor.is_contiguous()
        assert (tensor.data_ptr() - held[0].data_ptr()) % memory.GRANULARITY == 0 or buffer.name == "sum"
        tensor.fill_(0)
    assert workspace["sum"] is held[1] and list(memory.pieces_of(workspace)) == held
    assert int((held[0] == 0).sum()) == 64 and held[0].numel() == 2 * memory.GRANULARITY  # they do not overlap
    separate = {"rows": torch.zeros(3), "sum": torch.ones(2)}
    assert list(memory.pieces_of(separate)) == list(separate.values())


def _full_on_a_cpu(full):
    return lambda shape, value, **kind: full(shape, value, **{**kind, "device": "cpu"})


def test_a_plan_knows_its_scratch():
    choice = ops.decide(_plain()._replace(needs_grad=True))
    for plan in (choice.forward, replace(choice).backward):
        assert plan.room == memory.room(plan.buffers) > 0


# ---------------------------------------------------------------- a plain call in the same words


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """How plain calls were looked at: "call" where a Call was made of their words."""
    ways: list[str] = []
    CACHE.clear()
    monkeypatch.setattr(ops, "run", lambda *given, run=ops.run: ways.append("call") or run(*given))
    return ways


@pytest.mark.parametrize("graded", [False, True])
def test_the_same_words_are_not_looked_at_again(graded, asked):
    q, k, v = (torch.randn(2, 8, 4, 16, requires_grad=graded) for _ in range(3))
    for words in ({}, {"causal": True}, {"scale": 0.5}, {"scale": 1.0, "causal": True}, {"deterministic": True}):
        first, again, other = (
            strobe.attention(q, k, v, **words),
            strobe.attention(q, k, v, **words),
            strobe.attention(q, k, 2 * v.detach(), **words),
        )
        assert asked == ["call"] * (1 + graded), words  # v.detach() needs no gradient
        asked.clear()
        right = 0 if words.get("causal") else NO_BOUND
        expected = reference.forward(
            Call(q.detach(), k.detach(), v.detach(), right=right, scale=words.get("scale"))
        ).out
        assert torch.equal(first, again) and torch.allclose(first.double(), expected, atol=1e-5)
        assert torch.allclose(other.double(), 2 * expected, atol=1e-5)
        if graded:
            gradients = torch.autograd.grad(again.sum(), (q, k, v)), torch.autograd.grad(first.sum(), (q, k, v))
            assert all(torch.equal(*pair) for pair in zip(*gradients))


UNLIKE = [("causal", 1), ("scale", True), ("deterministic", 1), ("q", None), ("q", [1.0]), ("q", torch.ones(1).numpy())]


@pytest.mark.parametrize("name, unlike", UNLIKE)
def test_words_that_only_equal_what_was_met_are_looked_at(name, unlike, asked):
    q, k, v = (torch.randn(2, 8, 4, 16) for _ in range(3))
    words = {"q": q, "k": k, "v": v, "causal": True, "scale": 1.0, "deterministic": True}
    for _ in range(2):
        strobe.attention(**words)
    with pytest.raises(TypeError, match=name):
        strobe.attention(**words | {name: unlike})


class _Other(float):
    """A number that may be another the next time, and has no hash."""

    __hash__ = None  # type: ignore[assignment]

    def __float__(self):
        return self.value


def test_a_scale_of_another_kind_is_read_each_time(asked):
    q, k, v = (torch.randn(2, 8, 4, 16) for _ in range(3))
    scale = _Other(0.25)
    for scale.value in (0.25, 0.5, 0.25):
        assert torch.equal(strobe.attention(q, k, v, scale=scale), strobe.attention(q, k, v, scale=scale.value))
    assert torch.equal(strobe.attention(q, k, v, scale=1), strobe.attention(q, k, v, scale=1.0))
    assert not [
        key
        for key in CACHE.calls
        if key[0] == KEYWORDS and any(type(part) not in (bool, float, type(None)) for part in key[-1])
    ]


def test_a_flag_that_another_thread_turns_meanwhile_is_not_taken_for_the_calls_own(asked, monkeypatch):
    q, k, v = (torch.randn(2, 8, 4, 16, requires_grad=True) for _ in range(3))
    run = ops.run

    def turned(*given):
        torch.use_deterministic_algorithms(True)
        return run(*given)

    try:
        monkeypatch.setattr(ops, "run", turned)
        strobe.attention(q, k, v)
        assert strobe.attention(q, k, v).grad_fn.entry.choice.problem.deterministic
        torch.use_deterministic_algorithms(False)
        assert not strobe.attention(q, k, v).grad_fn.entry.choice.problem.deterministic
    finally:
        torch.use_deterministic_algorithms(False)


NESTED = """
import torch, strobe
q, k, v = (torch.randn(2, 8, 4, 16) for _ in range(3))
strobe.attention(q, k, v)
try:
    strobe.attention(q, k, torch.nested.nested_tensor([torch.randn(8, 4, 16), torch.randn(5, 4, 16)]))
except Exception as error:
    print(type(error).__name__, error)
"""


def test_nested_values_over_keys_that_were_met_are_refused():
    """A guard asks a nested tensor for its strides, in C++ that may not throw: that would end the process."""
    run = subprocess.run([sys.executable, "-c", NESTED], capture_output=True, text=True)
    assert run.returncode == 0 and "v" in run.stdout and "nested" in run.stdout, (run.stdout, run.stderr[-500:])


@pytest.mark.parametrize("deterministic", [None, True, False])
def test_words_mean_what_the_process_says(asked, deterministic):
    """Whether gradients have an order, and are wanted, may change between two calls in the same words."""
    q, k, v = (torch.randn(2, 8, 4, 16, requires_grad=True) for _ in range(3))
    seen = []
    for ordered in (False, True):
        torch.use_deterministic_algorithms(ordered)
        try:
            for _ in range(3):
                out = strobe.attention(q, k, v, deterministic=deterministic)
            seen.append(out.grad_fn.entry.choice.problem.deterministic)
        finally:
            torch.use_deterministic_algorithms(False)
    with torch.no_grad():
        assert [strobe.attention(q, k, v, deterministic=deterministic).grad_fn for _ in range(2)] == [None, None]
    assert seen == ([False, True] if deterministic is None else [deterministic] * 2) and len(asked) == (
        3 if deterministic is None else 2
    )
    assert type(out.grad_fn).apply is ops._plain_gradients
