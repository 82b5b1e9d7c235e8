"""Lists of blocks that a mask_mod shows, made on the device: on the simulator, and on a GPU."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import strobe
from strobe.kernels.device import mask_blocks
from strobe.kernels.device.block_kinds import kinds_kernel
from strobe.kernels.runtime import first_call_overlap
from strobe.mods.mask import MaskMod
from strobe.ops.mods import bind
from strobe.problem.call import Call
from strobe.problem.mask import Mask
from strobe.problem.problem import Problem
from tests.kernels.hopper.hopper_cases import H200
from tools.proof.simulate import on

IDS = (torch.arange(300) // 70).int()


def _ids(device: str) -> Tensor:
    return IDS.to(device)


def masks(device: str) -> dict[str, tuple[MaskMod | Mask, int, int]]:
    """name -> mask, queries, keys"""
    ids = _ids(device)
    mod = strobe.mask_mod
    return {
        "documents": (mod(lambda b, h, q, k: ids[q] == ids[k]), 300, 300),
        "documents_causal": (strobe.causal() & mod(lambda b, h, q, k: ids[q] == ids[k]), 300, 300),
        "scattered_causal": (strobe.causal() & mod(lambda b, h, q, k: ids[q] % 2 == ids[k] % 2), 300, 300),
        "dilated": (mod(lambda b, h, q, k: (q // 64 - k // 64) % 2 == 0), 200, 330),
        "by_head": (mod(lambda b, h, q, k: k <= q + 100 * h), 130, 260),
        "by_entry": (mod(lambda b, h, q, k: k < 70 * b + 10), 130, 200),
        "window": (strobe.window(70, 10) & mod(lambda b, h, q, k: k % 128 < 100), 260, 200),
        "nothing": (mod(lambda b, h, q, k: k < 0), 100, 100),
        "everything": (mod(lambda b, h, q, k: k >= 0), 129, 129),
    }


def call_of(mask: Mask, seqlen_q: int, seqlen_k: int, device: str) -> Call:
    q, k = (torch.zeros(2, n, 2, 64, dtype=torch.bfloat16, device=device) for n in (seqlen_q, seqlen_k))
    return bind(Call(q, k, k).with_mask(mask), None, mask)


def sets(lists: tuple[Tensor, ...]) -> list:
    """Each row's partial blocks and full blocks, as sets."""
    found = []
    for count, numbers in (lists[:2], lists[2:]):
        rows = zip(count.flatten().tolist(), numbers.flatten(0, -2).tolist())
        found.append([set(row[:n]) for n, row in rows])
    return found


def assert_lists(name: str, device: str) -> None:
    mask, rows, keys = masks(device)[name]
    assert isinstance(mask, MaskMod)
    call = call_of(mask, rows, keys, device)
    problem = Problem.from_call(call)
    found = sizes = mask_blocks.sizes_of(problem)
    assert sizes is not None and (sizes.batch, sizes.heads) == (1 + (name == "by_entry"), 1 + (name == "by_head"))
    for size in ((64, 64), (128, 128), (64, 128)):
        wanted = mask.block_lists(rows, keys, device, sizes, size)
        found = mask_blocks.forward_lists(problem, call, size)
        assert sets(found) == sets(wanted[:4])
        kinds = kinds_of(wanted[:4])
        found = mask_blocks.backward_lists(problem, call, size)
        assert sets(found) == sets(mask_blocks.listed(kinds.mT))


def kinds_of(lists: tuple[Tensor, ...]) -> Tensor:
    kinds = torch.zeros_like(lists[1], dtype=torch.int8)
    for kind, (count, numbers) in ((1, lists[:2]), (2, lists[2:])):
        listed = (torch.arange(numbers.shape[-1], device=count.device) < count[..., None]).to(torch.int8)
        kinds.scatter_add_(-1, numbers.long(), kind * listed)
    return kinds


@pytest.fixture(autouse=True)
def for_small_masks(monkeypatch):
    monkeypatch.setattr(mask_blocks, "FEWEST_ELEMENTS", 0)
    mask_blocks.KEPT.entries.clear()


@pytest.mark.parametrize("name", masks("cpu"))
def test_lists(name):
    with on(H200) as run:
        assert_lists(name, "cpu")
    assert run.launches == ["kinds_kernel"]  # whose result all lists share


def test_the_compilation_of_the_first_kernel_overlaps_other_work(monkeypatch):
    """The kernel of lists runs before the forward. So Triton's hash and driver would be awaited here."""
    met = []
    monkeypatch.setattr(first_call_overlap, "beside", lambda kernel, device: met.append((kernel, device)))
    call = call_of(strobe.mask_mod(lambda b, h, q, k: q % 7 != k % 5), 130, 130, "cpu")
    with on(H200):
        mask_blocks.forward_lists(Problem.from_call(call), call, (128, 128))
        assert not met
        mask_blocks.KEPT.entries.clear()
        monkeypatch.setattr(Tensor, "get_device", lambda tensor: 3)
        mask_blocks.forward_lists(Problem.from_call(call), call, (128, 128))
    assert met == [(kinds_kernel, 3)]


def test_lists_are_kept_until_a_tensor_changes():
    ids = IDS.clone()
    call = call_of(strobe.mask_mod(lambda b, h, q, k: ids[q] == ids[k]), 300, 300, "cpu")
    problem = Problem.from_call(call)
    with on(H200) as run:
        first = mask_blocks.forward_lists(problem, call, (128, 128))
        assert mask_blocks.forward_lists(problem, call, (128, 128)) is first
        ids.zero_()
        other = mask_blocks.forward_lists(problem, call, (128, 128))
        assert not torch.equal(other[0], first[0])
        numbers = call.mods and call.mods._replace(mask_tensors=(ids[:].clone(),))
        again = mask_blocks.forward_lists(problem, call._replace(mods=numbers), (128, 128))
        assert again is not other and torch.equal(again[0], other[0])
    assert run.launches == ["kinds_kernel"] * 3


def test_lists_are_forgotten(monkeypatch):
    """Those of tensors that are gone, and the oldest when there are too many."""
    lists = lambda ids: call_of(strobe.mask_mod(lambda b, h, q, k: ids[q] == ids[k]), 300, 300, "cpu")
    kept, gone = lists(IDS.clone()), lists(IDS.clone())
    with on(H200):
        for call in (gone, kept):
            mask_blocks.forward_lists(Problem.from_call(call), call, (128, 128))
        assert len(mask_blocks.KEPT.entries) == 4
        del gone, call
        gc.collect()
        mask_blocks.backward_lists(Problem.from_call(kept), kept, (128, 128))
        assert len(mask_blocks.KEPT.entries) == 3
        monkeypatch.setattr(mask_blocks.KEPT, "most_bytes", 200)
        mask_blocks.backward_lists(Problem.from_call(kept), kept, (64, 128))
        assert [key[-2:] for key in mask_blocks.KEPT.entries] == [("backward", (64, 128))]


def test_few_elements_and_key_ranges_have_no_lists(monkeypatch):
    call = call_of(strobe.mask_mod(lambda b, h, q, k: k < 70), 300, 300, "cpu")
    assert mask_blocks.sizes_of(Problem.from_call(call)) is not None
    lengths = strobe.key_lengths(torch.tensor([100, 200], dtype=torch.int32))
    ranged = call_of(lengths & strobe.mask_mod(lambda b, h, q, k: k < 70), 300, 300, "cpu")
    assert mask_blocks.sizes_of(Problem.from_call(ranged)) is None
    monkeypatch.undo()
    assert mask_blocks.sizes_of(Problem.from_call(call)) is None


@pytest.mark.parametrize("name", ("scattered_causal", "dilated", "by_head"))
def test_attention_visits_listed_blocks_alone(name):
    """Forward and backward on Hopper, against dense attention in float64."""
    mask, rows, keys = masks("cpu")[name]
    draw = torch.Generator().manual_seed(3)
    sizes = ((rows, 2), (keys, 1), (keys, 1))
    tensors = [torch.randn(1, n, heads, 64, generator=draw).bfloat16().requires_grad_() for n, heads in sizes]
    dout = torch.randn(1, rows, 2, 64, generator=draw).bfloat16()
    with on(H200) as run:
        out = strobe.attention(*tensors, mask=mask, kernel="hopper")
        found = torch.autograd.grad(out, tensors, dout)
        choice = strobe.explain(*tensors, mask=mask, kernel="hopper")
    assert run.reports == [] and str(choice).count("block lists") == 2
    assert [one for one in run.launches if "convert" not in one] == [
        "kinds_kernel", "forward_kernel", "rows_kernel", "backward_kernel",
    ]  # fmt: skip
    leaves = [t.detach().double().requires_grad_() for t in tensors]
    q, k, v = (t.transpose(1, 2) for t in leaves)
    seen = mask.dense(rows, keys, heads=2, batch=1) if isinstance(mask, MaskMod) else torch.ones(0)
    s = torch.where(seen, q @ k.mT / 8, -torch.inf)
    exact = (s.softmax(-1).nan_to_num() @ v).transpose(1, 2)
    for grad, right in zip(found, torch.autograd.grad(exact, leaves, dout.double())):
        assert float((grad.double() - right).norm() / right.norm()) <= 1.2e-2


# packed sequences: lengths of queries and keys; one has no query, one is as long as promised
QUERIES, KEYS = (130, 0, 1, 300, 65), (200, 30, 150, 330, 64)


def packed_mask(ids: Tensor) -> Mask:
    """Of the sequence, of a window, and of captured values."""
    return strobe.window(150, 0) & strobe.mask_mod(lambda b, h, q, k: (ids[q] % 2 == ids[k] % 2) | (k < 40 * b))


def packed_tensors(device: str) -> tuple[list[Tensor], dict[str, Any]]:
    draw = torch.Generator().manual_seed(3)
    sizes = ((sum(QUERIES), 4), (sum(KEYS), 2), (sum(KEYS), 2))
    tensors = [torch.randn(n, heads, 64, generator=draw).to(device, torch.bfloat16) for n, heads in sizes]
    ends = (torch.tensor([0, *n]).cumsum(0).int().to(device) for n in (QUERIES, KEYS))
    options: dict[str, Any] = {"max_seqlen_q": 300, "max_seqlen_k": 330}
    options |= zip(("cu_seqlens_q", "cu_seqlens_k"), ends)
    return tensors, options


def over_packed(device: str) -> Tensor:
    """The result of a forward that visits lists. Each sequence has the lists that it has alone."""
    mask, (tensors, options) = packed_mask(_ids(device)), packed_tensors(device)
    q, k, v = tensors
    call = bind(Call(q, k, v)._replace(**options).with_mask(mask), None, mask)
    problem = Problem.from_call(call)
    found = mask_blocks.forward_lists(problem, call, (64, 128))
    out = strobe.attention_varlen(*tensors, mask=mask, kernel="hopper", **options)
    choice = strobe.explain_varlen(*tensors, mask=mask, kernel="hopper", **options)
    assert str(choice).count("block lists") == 1
    assert isinstance(mask, MaskMod)
    shown = kinds_of(found)
    for n, (rows, keys) in enumerate(zip(QUERIES, KEYS)):
        wanted = torch.zeros(5, 6, dtype=torch.int8)  # of blocks of 64
        if rows:
            seen = mask.dense(rows, keys, batch=len(QUERIES))[n]
            pad = 0, -keys % 64, 0, -rows % 64
            some, every = (
                torch.nn.functional.pad(seen, pad, value=outside).unflatten(1, (-1, 64)).unflatten(0, (-1, 64))
                for outside in (False, True)
            )
            kinds = some.any(-1).any(1).to(torch.int8) * (1 + every.all(-1).all(1).to(torch.int8))
            wanted[: kinds.shape[0], : kinds.shape[1]] = kinds
        wanted = mask_blocks.pooled(wanted, (64, 128))
        assert torch.equal(shown[n, 0].cpu(), wanted)
    return out


def assert_of_packed(out: Tensor) -> None:
    """Against the CPU kernel in float32."""
    tensors, options = packed_tensors("cpu")
    exact = strobe.attention_varlen(*(t.float() for t in tensors), mask=packed_mask(IDS), **options)
    assert float((out.cpu().float() - exact).norm() / exact.norm()) <= 4e-3


def test_packed_sequences_have_lists_of_their_own():
    with on(H200) as run:
        out = over_packed("cpu")
    assert_of_packed(out)
    assert run.reports == [] and run.launches == ["kinds_kernel", "forward_kernel"]


def test_lists_of_packed_sequences_follow_the_offsets():
    tensors, options = packed_tensors("cpu")
    mask = packed_mask(IDS)
    q, k, v = tensors
    call = bind(Call(q, k, v)._replace(**options).with_mask(mask), None, mask)
    with on(H200):
        first = mask_blocks.forward_lists(Problem.from_call(call), call, (128, 128))
        options["cu_seqlens_q"][1] = 100
        other = mask_blocks.forward_lists(Problem.from_call(call), call, (128, 128))
    assert not torch.equal(first[0], other[0])
    unbounded = call._replace(max_seqlen_q=-1)
    assert mask_blocks.sizes_of(Problem.from_call(unbounded)) is None


# name -> what a mask function of packed sequences reads: all heads share lists, or each has its own
PACKED = {
    "shared": packed_mask,
    "per head": lambda ids: packed_mask(ids) & strobe.mask_mod(lambda b, h, q, k: h != k // 70),
}


def packed_gradients(name: str, device: str, **options: Any) -> tuple[list[Tensor], str]:
    """Gradients of q, k, v and of slopes that a score captures, and the Choice."""
    mask, (tensors, offsets) = PACKED[name](_ids(device)), packed_tensors(device)
    slopes = torch.linspace(0.1, 0.4, 4, device=device, requires_grad=True)
    score = lambda s, b, h, q, k: s * (1 + 0.1 * b) - slopes[h] * (k % 9)
    if not options:
        tensors = [t.float() for t in tensors]
    leaves = [t.requires_grad_() for t in tensors]
    options = offsets | options | {"mask": mask, "score_mod": score}
    out = strobe.attention_varlen(*leaves, **options)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).bfloat16()
    found = torch.autograd.grad(out, [*leaves, slopes], dout.to(device, out.dtype))
    return list(found), str(strobe.explain_varlen(*leaves, **options))


def assert_gradients(found: list[Tensor], name: str) -> None:
    """Against the CPU kernel in float32."""
    wanted, _ = packed_gradients(name, "cpu")
    for grad, right in zip(found, wanted):
        assert float((grad.cpu().float() - right).norm() / right.norm()) <= 1.2e-2


@pytest.mark.parametrize("name", ("shared", pytest.param("per head", marks=pytest.mark.nightly)))
def test_gradients_of_packed_sequences(name):
    with on(H200) as run:
        found, choice = packed_gradients(name, "cpu", kernel="hopper")
    assert run.reports == [] and choice.count("block lists") == 2
    assert run.launches.count("kinds_kernel") == 1 and "backward_kernel" in run.launches
    assert_gradients(found, name)


@pytest.mark.parametrize("longest", (140, 64))
def test_keys_outside_every_sequence_and_a_sequence_longer_than_promised(longest):
    """Nothing behind the lists is read. Keys that no query sees have gradients of 0."""
    draw = torch.Generator().manual_seed(3)
    leaves = [torch.randn(160, 1, 64, generator=draw).bfloat16().requires_grad_() for _ in range(3)]
    offsets = torch.tensor([6, 16, 156], dtype=torch.int32)
    mask = strobe.mask_mod(lambda b, h, q, k: (q + k) % 3 != b)

    def gradients(leaves: list[Tensor], **options: Any) -> tuple[Tensor, ...]:
        out = strobe.attention_varlen(*leaves, cu_seqlens_q=offsets, mask=mask, **options)
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    with on(H200) as run:
        found = gradients(leaves, max_seqlen_q=140, max_seqlen_k=longest, kernel="hopper")
    assert run.reports == [] and "kinds_kernel" in run.launches
    assert all(grad[:6].abs().max() == grad[156:].abs().max() == 0 for grad in found)
    if longest == 140:
        for grad, right in zip(found, gradients([t.detach().float().requires_grad_() for t in leaves])):
            assert float((grad.float() - right).norm() / right.norm()) <= 1.2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("name", PACKED)
def test_gradients_of_packed_sequences_on_a_gpu(name):
    found, choice = packed_gradients(name, "cuda", kernel="hopper")
    assert choice.count("block lists") == 2
    assert_gradients(found, name)


@pytest.mark.gpu
def test_packed_sequences_on_a_gpu():
    assert_of_packed(over_packed("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", masks("cpu"))
def test_lists_on_a_gpu(name):
    assert_lists(name, "cuda")


@pytest.mark.gpu
def test_lists_in_a_graph_follow_what_the_mask_reads():
    """A replay makes its lists from the contents that it finds."""
    ids = _ids("cuda").clone()
    mask = strobe.causal() & strobe.mask_mod(lambda b, h, q, k: ids[q] == ids[k])
    q = torch.randn(1, 300, 2, 64, device="cuda", dtype=torch.bfloat16)
    attend = lambda: strobe.attention(q, q, q, mask=mask)
    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    ids.copy_((torch.arange(300, device="cuda") // 40).int())
    graph.replay()
    assert torch.equal(out, attend())
