"""The CPU's jobs on threads: what they give, whose number of threads they change, and how they end."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import strobe
from strobe.kernels.cpu import parallel
from strobe.kernels.cpu.parallel import Job
from strobe.ops import decode as ops_decode
from strobe.problem.call import Call
from strobe.testing import CASES
from strobe.testing.decode import DECODES, assert_decode_as_good_as
from tests.kernels.cpu.test_cpu import Draw, qkv

TWO = pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core: there are no workers")
CAUSES = ("window", "causal", "prefix", "documents", "packed", "sinks", "softcap", "key_lengths")


@pytest.fixture
def workers(monkeypatch):
    """Two workers for any call, however short, and the number of jobs that they were given."""
    given: list[int] = []
    hand_over = parallel._pool

    def counted(count):
        given.append(count)
        return hand_over(count)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(parallel, "LEAST_WORK", 0)
    monkeypatch.setattr(parallel, "UNEVEN", 1e9)
    monkeypatch.setattr(parallel, "_pool", counted)
    yield given
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("seed", range(8))
def test_drawn_calls(seed, dtype, workers, judge):
    judge(Draw(seed).call(dtype))


@pytest.mark.parts(3, seed=826417291)
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(CAUSES)])
def test_cases(name, workers, judge):
    judge(CASES[name].build(requires_grad=True)._replace(kernel="cpu"))


@pytest.mark.parts(3, seed=826417291)
@pytest.mark.parametrize("name", DECODES)
def test_decodes(name, workers):
    call = DECODES[name].build("cpu", torch.float32, "normal", 1, "cpu")
    assert_decode_as_good_as(ops_decode.run(call), call)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_calls_of_many_tiles_take_workers(dtype, workers, judge):
    """A window, a prefix, documents and packed sequences: forward and backward are both handed over. A plain call is
    one op, which torch spreads.
    """
    q, k, v = qkv(1, 700, 700, (4, 2), 32, dtype, grad=True)
    ids = (torch.arange(700, dtype=torch.int32) // 180)[None]
    hard = strobe.window(90, 20), strobe.prefix_causal(65), strobe.documents(ids)
    for mask in (*hard, strobe.full()):
        call = Call(q, k, v, needs_grad=True, kernel="cpu").with_mask(mask)
        workers.clear()
        strobe.attention(q, k, v, mask=mask, kernel="cpu").sum().backward()
        assert workers == ([2, 2] if mask in hard else [])
        judge(call)


@pytest.mark.parametrize("mode", (torch.inference_mode, torch.no_grad, torch.enable_grad))
def test_what_the_callers_thread_has_switched_on(mode, workers):
    """Workers have none of a caller's modes: outputs made in inference mode can be written, and nothing is recorded."""
    q, k, v = qkv(1, 700, grad=True)
    with mode():
        out = strobe.attention(q, k, v, window=(90, 20))
    assert (
        workers
        and out.requires_grad == (mode is torch.enable_grad)
        and out.is_inference() == (mode is torch.inference_mode)
    )
    torch.testing.assert_close(
        out.detach(), strobe.attention(*(t.detach() for t in (q, k, v)), window=(90, 20)), rtol=0, atol=0
    )


# ---------------------------------------------------------------- threads


def _jobs(*functions) -> list[Job]:
    return [Job(1, lambda scratch, one=one: one()) for one in functions]


def test_ops_of_workers_run_alone_and_others_as_before(workers):
    """torch.set_num_threads also sets what later threads start with."""
    inside, later = [], []
    parallel._made.clear()
    parallel.run(_jobs(*[lambda: inside.append(torch.get_num_threads())] * 4), torch.empty(2, 1))
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert inside == [1] * 4 and later == [2] and torch.get_num_threads() == 2


def test_one_thread_stays_one_thread(workers):
    torch.set_num_threads(1)
    strobe.attention(*qkv(1, 700), window=(90, 20))
    assert workers == []


def test_jobs_whose_worth_is_one_job_are_not_handed_over(workers, monkeypatch):
    monkeypatch.setattr(parallel, "UNEVEN", 1.5)
    ran = []
    parallel.run(
        [Job(work, lambda scratch: ran.append(threading.current_thread())) for work in (90, 5, 5)], torch.empty(2, 1)
    )
    assert workers == [] and ran == [threading.current_thread()] * 3


def test_an_error_ends_the_call_and_leaves_workers_usable(workers):
    done = []

    def fails():
        raise RuntimeError("of a job")

    with pytest.raises(RuntimeError, match="of a job"):
        parallel.run(
            [Job(2, lambda scratch: fails()), *_jobs(*[lambda: (time.sleep(0.01), done.append(1))] * 40)],
            torch.empty(2, 1),
        )
    assert len(done) < 40
    parallel.run(_jobs(*[lambda: done.append(2)] * 3), torch.empty(2, 1))
    assert done.count(2) == 3


def test_calls_of_several_threads(workers):
    inputs = [qkv(1, 700, seed=seed) for seed in range(6)]
    alone = [strobe.attention(*one, window=(90, 20)) for one in inputs]
    found: dict[int, torch.Tensor] = {}

    def call(n: int) -> None:
        torch.set_num_threads(2)
        found[n] = strobe.attention(*inputs[n], window=(90, 20))

    threads = [threading.Thread(target=partial(call, n)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[n], alone[n]) for n in range(6))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_has_workers_of_its_own():
    program = """
import os, torch, strobe
torch.set_num_threads(2)
from strobe.kernels.cpu import parallel
parallel.LEAST_WORK = 0
q, k, v = torch.randn(3, 1, 700, 4, 16).unbind()
parent = strobe.attention(q, k, v, window=(90, 20))
child = os.fork()
if child == 0:
    parallel.run([parallel.Job(1, lambda scratch: None)] * 4, torch.empty(2, 1))
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# ---------------------------------------------------------------- beside other processes


@pytest.mark.nightly
@TWO
@pytest.mark.parametrize("busy", (2, 6))
@pytest.mark.parametrize("what", ("window", "documents", "prefix", "packed"))
def test_beside_busy_processes(what, busy):
    """As torch's attention with the mask written out is slowed by them, no more: a window and documents take half of
    its time at most.
    """
    q, k, v = qkv(1, 4096, 4096, (8, 8), 64)
    ids = (torch.arange(4096, dtype=torch.int32) // 512)[None]
    offsets = torch.arange(0, 4097, 512, dtype=torch.int32)
    masks = {"window": strobe.window(256, 0), "prefix": strobe.prefix_causal(100)}
    mask = masks.get(what, strobe.documents(ids) & strobe.causal())
    dense = mask.dense(4096, 4096)[:, None]
    packed = partial(
        strobe.attention_varlen, *(t[0] for t in (q, k, v)), cu_seqlens_q=offsets, cu_seqlens_k=offsets, causal=True
    )
    ours = packed if what == "packed" else partial(strobe.attention, q, k, v, mask=mask)
    theirs = partial(scaled_dot_product_attention, *(t.transpose(1, 2) for t in (q, k, v)), attn_mask=dense)
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        times = {call: [] for call in (ours, theirs)}
        for _ in range(5):
            for call, seconds in times.items():
                start = time.perf_counter()
                call()
                seconds.append(time.perf_counter() - start)
    finally:
        for process in others:
            process.kill()
            process.wait()
    ratio = statistics.median(times[ours]) / statistics.median(times[theirs])
    assert ratio <= (0.5 if what in ("window", "documents") else 1.0)
