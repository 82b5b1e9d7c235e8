"""`strobe.distributed.ring_flash_attn`: two processes with the rows of its layouts give what one process gives."""

from __future__ import annotations

import importlib.util
import inspect

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import strobe
import strobe.distributed.ring_flash_attn as ring
from tests.compat import test_ring_flash_attn as original
from tests.processes import WORLD, together

OFFSETS = torch.tensor(original.OFFSETS, dtype=torch.int32)


def _windowed(function):
    return lambda ring, rank, q, k, v: getattr(ring, function)(q, k, v, causal=True, window_size=(7, 0))


def _kvpacked(function):
    return lambda ring, rank, q, k, v: getattr(ring, function)(q, torch.stack([k, v], 2), causal=True)


def _qkvpacked(function):
    def run(ring, rank, q, k, v):
        k, v = (t.repeat_interleave(2, 2) for t in (k, v))
        return getattr(ring, function)(torch.stack([q, k, v], 2), 0.0, None, True)

    return run


def _gathered_by_two(ring, rank, q, k, v):
    *planned, keys = ring.llama3_flash_attn_prepare_cu_seqlens(OFFSETS, False, rank, WORLD)
    return ring.llama3_flash_attn_varlen_func(q, k, v, *planned, heads_k_stride=2, local_k_slice=keys)


def _gathered_in_a_window(offsets, window, causal):
    def run(ring, rank, q, k, v):
        *planned, keys = ring.llama3_flash_attn_prepare_cu_seqlens(offsets, causal, rank, WORLD)
        return ring.llama3_flash_attn_varlen_func(
            q, k, v, *planned, heads_k_stride=1, local_k_slice=keys, causal=causal, window_size=window
        )

    return run


# name: packed, how tokens are shared out, options of the call of one process, the call of a process
CASES = {
    name: (packed, share, {"causal": causal}, call) for name, (packed, share, causal, call) in original.CASES.items()
}
for _layout, _share in (("ring", original._halves), ("zigzag", original._zigzag), ("stripe", original._stripes)):
    _prefix = "zigzag_ring" if _layout == "zigzag" else _layout
    _function = f"{_prefix}_flash_attn_func"
    _windows = {"causal": True, "window": (7, 0)}
    CASES[f"{_layout} window"] = False, _share, _windows, _windowed(_function)
    CASES[f"{_layout} kv"] = False, _share, {"causal": True}, _kvpacked(f"{_prefix}_flash_attn_kvpacked_func")
    CASES[f"{_layout} qkv"] = False, _share, {"causal": True}, _qkvpacked(f"{_prefix}_flash_attn_qkvpacked_func")
CASES["gathered packed, all keys"] = True, original._halves, {}, _gathered_by_two
for _numbers in ([0, 96], [0, 20, 20, 70, 96], [0, 48, 96]):  # 22 and 48 rows follow a process's last in its document
    for _window, _causal in (((2, 3), False), ((5, -1), False), ((-1, 4), False), ((3, 40), False), ((6, 0), True)):
        _offsets = torch.tensor(_numbers, dtype=torch.int32)
        _options = {"cu_seqlens_q": _offsets, "window": _window, "causal": _causal}
        _call = _gathered_in_a_window(_offsets, _window, _causal)
        CASES[f"gathered packed {_numbers}, window {_window}"] = True, original._halves, _options, _call


def _inputs(packed):
    return [t.double() for t in original._inputs(packed)]


def _process(rank, results):
    found = {}
    for name, (packed, share, _, call) in CASES.items():
        q, k, v, dout = (share(t, 0 if packed else 1)[rank].contiguous() for t in _inputs(packed))
        leaves = [t.requires_grad_() for t in (q, k, v)]
        out = call(ring, rank, *leaves)
        found[name] = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    torch.save(found, f"{results}/{rank}.pt")


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ring")
    together(_process, folder, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("name", CASES)
def test_two_processes_give_what_one_gives(name, parts):
    packed, share, options, _ = CASES[name]
    *qkv, dout = _inputs(packed)
    leaves = [t.requires_grad_() for t in qkv]
    if packed:
        out = strobe.attention_varlen(*leaves, **{"cu_seqlens_q": OFFSETS, **options})
    else:
        out = strobe.attention(*leaves, **options)
    for index, whole in enumerate((out.detach(), *torch.autograd.grad(out, leaves, dout))):
        for rank, wanted in enumerate(share(whole, 0 if packed else 1)):
            torch.testing.assert_close(parts[rank][name][index], wanted, atol=1e-11, rtol=1e-9)


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("odd", [{"dropout_p": 0.1}, {"alibi_slopes": torch.ones(2)}, {"return_attn_probs": True}])
def test_what_is_not_served_is_refused(odd, alone):
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(strobe.UnsupportedProblem, match=next(iter(odd))):
        ring.zigzag_ring_flash_attn_func(q, q, q, **odd)


def test_rows_that_do_not_halve_are_refused_by_zigzag(alone):
    q = torch.randn(1, 5, 2, 8)
    with pytest.raises(strobe.InvalidProblem, match="even number of rows"):
        ring.zigzag_ring_flash_attn_func(q, q, q)
    with pytest.raises(strobe.InvalidProblem, match="even number of rows"):
        ring.zigzag_ring_flash_attn_varlen_func(q[0], q[0], q[0], torch.tensor([0, 5], dtype=torch.int32), 5)


@pytest.mark.parametrize("heads", [(5, 2, 2), (4, 2, 3)])
def test_heads_that_do_not_group_are_refused_by_llama3(heads, alone):
    """Its slices of heads would leave some out."""
    q, k, v = (torch.randn(8, count, 16) for count in heads)
    *lengths, keys = ring.llama3_flash_attn_prepare_cu_seqlens(torch.tensor([0, 8], dtype=torch.int32), True, 0, 1)
    with pytest.raises(strobe.InvalidProblem, match=f"got {heads[0] if heads[0] % 2 else heads[2]} heads"):
        ring.llama3_flash_attn_varlen_func(q, k, v, *lengths, heads_k_stride=1, local_k_slice=keys)


@pytest.mark.parametrize("offsets", [[0], [0, 0, 0]])
def test_llama3_takes_no_rows(offsets, alone):
    q = torch.randn(0, 2, 16)
    *lengths, keys = ring.llama3_flash_attn_prepare_cu_seqlens(torch.tensor(offsets, dtype=torch.int32), True, 0, 1)
    assert [lengths[0].tolist(), lengths[1].tolist(), *lengths[2:], keys] == [[0], [0], 0, 0, slice(0, 0)]
    out = ring.llama3_flash_attn_varlen_func(q, q, q, *lengths, heads_k_stride=1, local_k_slice=keys, causal=True)
    assert out.shape == q.shape


@pytest.mark.parametrize("offsets", [[0, 5, 3, 8], [1, 3, 8], []])
def test_offsets_that_do_not_ascend_from_0_are_refused(offsets, alone):
    q, offsets = torch.randn(8, 2, 16), torch.tensor(offsets, dtype=torch.int32)
    with pytest.raises(strobe.InvalidProblem, match=r"cu_seqlens.*ascend from 0"):
        ring.ring_flash_attn_varlen_func(q, q, q, offsets, 5)
    with pytest.raises(strobe.InvalidProblem, match=r"cu_seqlens.*ascend from 0"):
        ring.llama3_flash_attn_prepare_cu_seqlens(offsets, True, 0, 1)


def test_offsets_written_in_inference_mode_are_read_again(alone):
    with torch.inference_mode():
        q, offsets = torch.randn(8, 2, 16), torch.tensor([0, 3, 8], dtype=torch.int32)
        for middle in (3, 6):
            offsets[1] = middle
            whole = strobe.attention_varlen(q, q, q, cu_seqlens_q=offsets, causal=True)
            found = ring.ring_flash_attn_varlen_func(q, q, q, offsets, 8, causal=True)
            torch.testing.assert_close(found, whole, atol=1e-6, rtol=1e-5)


@pytest.mark.skipif(importlib.util.find_spec("ring_flash_attn") is None, reason=original.NO_RING)
def test_signatures_are_those_of_the_library(tmp_path):
    together(_signatures, tmp_path, tmp_path, world=1)
    theirs = torch.load(tmp_path / "signatures.pt")
    assert set(theirs) == set(ring.__all__)
    own = {name: _parameters(getattr(ring, name)) for name in ring.__all__ if "packed" not in name}
    assert own == {name: theirs[name] for name in own}


def _signatures(rank, folder):
    library = original._library()
    names = [name for name in dir(library) if name.endswith(("_func", "_cu_seqlens"))]
    torch.save({name: _parameters(getattr(library, name)) for name in names}, folder / "signatures.pt")


def _parameters(function):
    return [
        (one.name, None if one.default is one.empty else one.default)
        for one in inspect.signature(function).parameters.values()
    ]
