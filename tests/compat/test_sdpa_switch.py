"""The switch that puts strobe under torch's own attention: on, off, nested, in threads, and without a trace."""

from __future__ import annotations

import subprocess
import sys
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.nn import attention as registry
from torch.nn.attention import SDPBackend

import strobe
from strobe.compat import sdpa
from strobe.errors import UnsupportedProblem
from tests.compat.sdpa_calls import CASES, _qkv, _state, counted

pytestmark = pytest.mark.usefixtures("nothing_stays_enabled")
gpu = pytest.mark.gpu


def test_importing_activates_nothing():
    steps = (
        "import sys, torch, strobe; assert 'strobe.integrations' not in sys.modules; from strobe.integrations "
        "import sdpa"
    )
    look = (
        "assert torch.nn.attention.current_flash_attention_impl() is None and 'STROBE' in "
        "torch.nn.attention.list_flash_attention_impls()"
    )
    run = (
        "torch.nn.functional.scaled_dot_product_attention(*[torch.ones(1, 1, 2, 8)] * 3); assert not sdpa.served "
        "and not sdpa.passed"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{steps}\n{look}\n{run}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def _runs_on_strobe() -> bool:
    q = torch.ones(1, 1, 2, 8)
    with counted() as found:
        F.scaled_dot_product_attention(q, q, q)
    return bool(found.served)


def test_undoing_puts_everything_back(recwarn):
    before = _state()
    switch = sdpa.enable()
    assert _runs_on_strobe() and registry.current_flash_attention_impl() == "STROBE" and _state()[0] != before[0]
    assert torch._C._get_sdp_priority_order()[0] == int(SDPBackend.FLASH_ATTENTION)
    switch()
    assert _state() == before and not _runs_on_strobe()
    switch()
    assert _state() == before and not recwarn


def test_a_handle_that_is_kept_lets_go_too():
    before = _state()
    handle = sdpa.register()
    assert _runs_on_strobe()
    handle.remove()
    assert _state() == before and not _runs_on_strobe()


def test_switches_nest_and_may_be_undone_in_any_order():
    before = _state()
    first, second = sdpa.enable(), sdpa.enable()
    first()
    assert _runs_on_strobe()
    first()  # a second time: it holds nothing any more
    assert _runs_on_strobe()
    with sdpa.enable() as third:
        second()
        assert _runs_on_strobe()
        third()
        assert _state() == before
    assert _state() == before


def test_an_error_within_undoes():
    before = _state()
    with pytest.raises(KeyError), sdpa.enable():
        raise KeyError
    assert _state() == before


@pytest.fixture
def other():
    """Another provider, which counts how often it was registered and removed."""
    counts = SimpleNamespace(registered=0, removed=0)

    class Handle:
        def remove(self):
            counts.removed += 1

    def register():
        counts.registered += 1
        return Handle()

    registry.register_flash_attention_impl("OTHER", register_fn=register)
    yield counts
    registry.restore_flash_attention_impl(_raise_warn=False)
    del registry._registry._FLASH_ATTENTION_IMPLS["OTHER"]


def test_another_provider_comes_back(other):
    registry.activate_flash_attention_impl("OTHER")
    with sdpa.enable():
        assert _runs_on_strobe() and (other.registered, other.removed) == (1, 1)
    assert registry.current_flash_attention_impl() == "OTHER" and (other.registered, other.removed) == (2, 1)


def test_another_provider_that_came_later_stays(other):
    with sdpa.enable():
        registry.activate_flash_attention_impl("OTHER")
        assert not _runs_on_strobe()
        with sdpa.enable():  # asked for again, strobe is back
            assert _runs_on_strobe()
        registry.activate_flash_attention_impl("OTHER")
    assert registry.current_flash_attention_impl() == "OTHER" and other.removed == 1


def test_torchs_own_way_to_activate_and_restore():
    registry.activate_flash_attention_impl("STROBE")
    assert _runs_on_strobe()
    with sdpa.enable():
        assert _runs_on_strobe()
    assert _runs_on_strobe() and registry.current_flash_attention_impl() == "STROBE"
    registry.restore_flash_attention_impl()
    assert not _runs_on_strobe()


def test_a_priority_that_someone_else_set_stays():
    before = torch._C._get_sdp_priority_order()
    theirs = [2, 1, 0, *before[3:]]
    try:
        with sdpa.enable():
            torch._C._set_sdp_priority_order(theirs)
        assert torch._C._get_sdp_priority_order() == theirs
        with sdpa.enable():
            assert torch._C._get_sdp_priority_order()[:2] == [1, 2]
        assert torch._C._get_sdp_priority_order() == theirs
    finally:
        torch._C._set_sdp_priority_order(before)


def test_an_older_torch_is_told_so_and_nothing_changes(other, monkeypatch):
    registry.activate_flash_attention_impl("OTHER")
    before = _state()
    monkeypatch.delattr(torch.nn.attention, "restore_flash_attention_impl")
    with pytest.raises(UnsupportedProblem, match=r"torch 2\.11"):
        sdpa.enable()
    assert _state() == before and other.removed == 0


def test_threads_may_switch_while_others_compute():
    q = torch.ones(1, 2, 70, 8)
    wanted, wrong = F.scaled_dot_product_attention(q, q, q), []

    def work():
        for _ in range(30):
            with sdpa.enable():
                if not torch.allclose(F.scaled_dot_product_attention(q, q, q), wanted):
                    wrong.append(1)

    threads = [Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_strobes_own_calls_do_not_come_round_again():
    """Its CPU kernel calls torch's: with the op overridden that would be strobe once more."""
    q, k, v = (t.transpose(1, 2) for t in _qkv(CASES["tiles"]))
    plain = strobe.attention(q, k, v, causal=True)
    with sdpa.enable() as found:
        out = strobe.attention(q, k, v, causal=True)
        torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    assert torch.equal(out, plain) and not found.served and not found.passed


def test_strobe_kernels_loaded_while_enabled_still_reach_torchs():
    """And torch's warning that a kernel is overridden, said once a process, is not passed on."""
    steps = "import torch; from strobe.integrations import sdpa; sdpa.enable(); q = torch.ones(1, 2, 70, 8)"
    run = "torch.nn.functional.scaled_dot_product_attention(q, q, q); assert dict(sdpa.served) == {'cpu.forward': 1}"
    done = subprocess.run([sys.executable, "-W", "error", "-c", f"{steps}\n{run}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@gpu
def test_enabling_wins_the_race_of_backends():
    before = sdpa.backend("cuda")
    with sdpa.enable():
        assert sdpa.backend("cuda") == "FLASH_ATTENTION of STROBE"
    assert sdpa.backend("cuda") == before


@gpu
def test_enabling_first_of_all_wins_the_race_of_backends():
    """torch sets the priority at the first choice of a process: over one that was set before it."""
    steps = (
        "import torch; from strobe.integrations import sdpa; s = sdpa.enable(); q = torch.ones(1, 2, 128, 64, "
        "device='cuda').bfloat16()"
    )
    run = (
        "torch.nn.functional.scaled_dot_product_attention(q, q, q); assert sum(sdpa.served.values()) == 1, "
        "sdpa.backend('cuda')"
    )
    done = subprocess.run([sys.executable, "-c", f"{steps}\n{run}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
