"""Built-in masks in mask functions: which are recognized, and that the same keys stay visible."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import strobe
from strobe.interface.attention import _dense
from strobe.mods.evaluate import evaluate
from strobe.mods.mask import BoundMask, MaskMod, _Bound
from strobe.mods.program import Program
from strobe.ops import mods as ops_mods
from strobe.ops.builtin_masks import with_builtin_mask, with_simpler_score
from strobe.problem.call import Call
from strobe.problem.keywords import options_of

IDS = torch.tensor([[-3] * 9 + [7] * 20 + [2**40] * 8 + [0] * 27, [5] * 40 + [-1] * 24])
LENGTHS = torch.tensor([50, 70])
ROWS = torch.arange(64) % 3 == 0

# name -> (function, S_q, S_k, the masks that are found, whether a function is left)
FUNCTIONS = {
    "causal": (lambda b, h, q, k: q >= k, 64, 64, "right", False),
    "causal, turned around": (lambda b, h, q, k: ~(k > q), 64, 64, "right", False),
    "causal, with a constant": (lambda b, h, q, k: 2 * q - 2 * k + 5 > 4, 64, 64, "right", False),
    "causal in floats": (lambda b, h, q, k: q.float() >= k.float(), 64, 64, "right", False),
    "fewer queries": (lambda b, h, q, k: q + 26 >= k, 38, 64, "right", False),
    "more queries": (lambda b, h, q, k: q >= k, 64, 38, "right", False),
    "top left": (lambda b, h, q, k: q >= k, 38, 64, "", True),
    "strictly before": (lambda b, h, q, k: q > k, 64, 64, "", True),
    "window": (lambda b, h, q, k: (q >= k) & (q - k < 10), 64, 64, "left right", False),
    "band": (lambda b, h, q, k: (q - k).abs() <= 7, 64, 64, "left right", False),
    "band, other side": (lambda b, h, q, k: (k - q).abs() < 7, 64, 64, "left right", False),
    "far away": (lambda b, h, q, k: (q - k).abs() > 7, 64, 64, "", True),
    "where": (lambda b, h, q, k: torch.where(q >= k, q - k < 10, False), 64, 64, "", True),
    "either window": (lambda b, h, q, k: (q - k >= 0) | (q - k > -9), 64, 64, "right", False),
    "prefix": (lambda b, h, q, k: (k < 20) | (q >= k), 64, 64, "prefix", False),
    "prefix of an entry": (lambda b, h, q, k: (k < LENGTHS[b] - 31) | (k <= q), 64, 64, "prefix", False),
    "prefix below a window": (lambda b, h, q, k: ((k < 20) | (q >= k)) & (q - k < 30), 64, 64, "left prefix", False),
    "prefix beside a window": (lambda b, h, q, k: (k < 20) | ((q >= k) & (q - k < 30)), 64, 64, "", True),
    "key lengths": (lambda b, h, q, k: k + 2 <= LENGTHS[b], 64, 64, "key_lengths", False),
    "key lengths, twice": (lambda b, h, q, k: (k < LENGTHS[b]) & (k < 60), 64, 64, "key_lengths", False),
    "documents": (lambda b, h, q, k: IDS[b, q] == IDS[b, k], 64, 64, "documents", False),
    "causal documents": (lambda b, h, q, k: (q >= k) & (IDS[0, k] == IDS[0, q]), 64, 64, "right documents", False),
    "documents without padding": (
        lambda b, h, q, k: (IDS[b, q] == IDS[b, k]) & (IDS[b, q] != -1) & (q >= k), 64, 64, "right documents", False,
    ),
    "other documents": (lambda b, h, q, k: IDS[0, q] == IDS[1, k], 64, 64, "documents", False),
    "documents, fewer queries": (lambda b, h, q, k: IDS[0, q + 30] == IDS[0, k], 34, 64, "documents", False),
    "blocks": (lambda b, h, q, k: q // 16 == k // 16, 64, 64, "documents", False),
    "scattered documents": (lambda b, h, q, k: (q % 4 == k % 4) & (q >= k), 64, 64, "right", True),
    "rows in documents": (lambda b, h, q, k: (IDS[0, q] == IDS[0, k]) & ROWS[q], 64, 64, "", True),
    "rows alone": (lambda b, h, q, k: ROWS[q], 64, 64, "", True),
    "by head": (lambda b, h, q, k: (q >= k) & (q - k < 8 * (h + 1)), 64, 64, "right", True),
    "causal and dilated": (lambda b, h, q, k: (q >= k) & ((q - k) % 4 == 0), 64, 64, "right", True),
    "wraps around": (lambda b, h, q, k: q * 2**30 >= k * 2**30, 64, 64, "", True),
    "too many for a float": (lambda b, h, q, k: q.float() * 2**20 >= k.float() * 2**20 - 1.0, 64, 64, "", True),
    "half a position": (lambda b, h, q, k: q - k > -0.5, 64, 64, "", True),
}  # fmt: skip


def call_of(mask: strobe.Mask, seqlen_q: int, seqlen_k: int, deterministic: bool = False, score=None) -> Call:
    q, k = torch.zeros(2, seqlen_q, 2, 16), torch.zeros(2, seqlen_k, 2, 16)
    options = options_of(None, None, deterministic, False, None)
    return ops_mods.bind(_dense(q, k, k, False, None, mask, None, options), score, mask)


def seen_by(call: Call) -> Tensor:
    """bool [B, H, S_q, S_k] of a call's mask and mask function."""
    mods, (rows, keys) = call.mods, (call.q.shape[1], call.k.shape[1])
    seen = call.mask.dense(rows, keys)[:, None].expand(2, 2, rows, keys)
    if mods is not None and mods.texts.mask:
        bound = BoundMask(Program.parse(mods.texts.mask), mods.mask_tensors, mods.mask_numbers)
        seen = seen & MaskMod(part=_Bound(bound)).dense(rows, keys, batch=2, heads=2)
    return seen


def names_of(call: Call) -> str:
    return " ".join(name for name, there in zip(call.structure._fields, call.structure) if there)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_found(name):
    function, seqlen_q, seqlen_k, masks, left = FUNCTIONS[name]
    call = call_of(strobe.mask_mod(function), seqlen_q, seqlen_k)
    found = with_builtin_mask(call)
    assert (names_of(found), found.mods is not None) == (masks, left)
    assert torch.equal(seen_by(found), seen_by(call))


def test_the_mask_of_a_call_holds_as_well():
    near = strobe.mask_mod(lambda b, h, q, k: (q >= k) & (q - k < 30))
    for other in (strobe.window(12, None), strobe.documents(IDS.clamp(-1, 9)), strobe.prefix_causal(7)):
        call = call_of(other & near, 64, 64)
        found = with_builtin_mask(call)
        assert found.mods is None and torch.equal(seen_by(found), seen_by(call))
    by_ids = strobe.documents(IDS.clamp(-1, 9)) & strobe.mask_mod(FUNCTIONS["documents"][0])
    assert with_builtin_mask(call_of(by_ids, 64, 64)).mods is not None  # one call has one kind of documents


def test_where_only_windows_are_taken():
    """No kernel for documents is as fast with sums of captured gradients or with deterministic gradients."""
    mask = strobe.mask_mod(FUNCTIONS["causal documents"][0])
    slopes = torch.ones(2, requires_grad=True)
    for call in (
        call_of(mask, 64, 64, score=strobe.alibi(slopes)),
        call_of(mask, 64, 64, deterministic=True)._replace(needs_grad=True),
    ):
        found = with_builtin_mask(call)
        assert names_of(found) == "right" and torch.equal(seen_by(found), seen_by(call))
    assert names_of(with_builtin_mask(call_of(mask, 64, 64, score=strobe.alibi(slopes.detach())))) == "right documents"


def test_documents_are_recomputed_when_ids_change():
    ids = IDS[0].clone()
    call = call_of(strobe.mask_mod(lambda b, h, q, k: ids[q] == ids[k]), 64, 64)
    first = with_builtin_mask(call)
    assert with_builtin_mask(call).spans_q is first.spans_q
    ids[20:] = 11
    other = with_builtin_mask(call)
    assert torch.equal(seen_by(other), seen_by(call)) and not torch.equal(seen_by(other), seen_by(first))
    ids[::2] = 12
    assert with_builtin_mask(call) is call  # a document is now two runs


def test_a_write_that_changes_no_version_is_seen_after_increment_version():
    """The remedy in docs/guides/mask_functions.md, for NumPy, DLPack, `.data` and a user's own kernels."""
    ids = IDS[0].clone()
    call = call_of(strobe.mask_mod(lambda b, h, q, k: ids[q] == ids[k]), 64, 64)
    for write in (lambda: ids.numpy().fill(5), lambda: torch.from_dlpack(ids)[20:].fill_(6), lambda: ids.data.fill_(7)):
        first, version = with_builtin_mask(call), ids._version
        write()
        assert ids._version == version and with_builtin_mask(call).spans_q is first.spans_q
        torch.autograd.graph.increment_version(ids)
        assert torch.equal(seen_by(with_builtin_mask(call)), seen_by(call))
        assert not torch.equal(seen_by(first), seen_by(call))


def test_packed_sequences_have_windows_where_their_lengths_are_equal():
    q, offsets = torch.randn(64, 2, 16), torch.tensor([0, 20, 64], dtype=torch.int32)
    mask = strobe.mask_mod(lambda b, h, q, k: (q >= k) & (q - k < 9))
    found = strobe.attention_varlen(q, q, q, cu_seqlens_q=offsets, mask=mask)
    assert torch.equal(found, strobe.attention_varlen(q, q, q, cu_seqlens_q=offsets, mask=strobe.window(8, 0)))
    choice = strobe.explain_varlen(q, q, q, cu_seqlens_q=offsets, mask=mask)
    assert choice.problem.mods is None and choice.problem.mask.right
    keys = torch.tensor([0, 30, 64], dtype=torch.int32)
    choice = strobe.explain_varlen(q, q, q, cu_seqlens_q=offsets, cu_seqlens_k=keys, mask=mask)
    assert choice.problem.mods is not None and not choice.problem.mask.right


def test_attention_runs_the_built_in_mask():
    """Output and gradients have the same bits as with the built-in mask, inside torch.compile, too."""
    draw = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 64, 2, 16, generator=draw).requires_grad_() for _ in range(3))
    function = strobe.mask_mod(FUNCTIONS["causal documents"][0])
    built_in = strobe.causal() & strobe.documents(torch.where(IDS[:1] == -3, 1, IDS[:1].clamp(max=9) + 2).expand(2, -1))
    assert strobe.explain(q, k, v, mask=function).problem == strobe.explain(q, k, v, mask=built_in).problem
    compiled = torch.compile(strobe.attention, backend="aot_eager", fullgraph=True)
    wanted = strobe.attention(q, k, v, mask=built_in)
    gradients = torch.autograd.grad(wanted.sum(), (q, k, v))
    for attention in (strobe.attention, compiled):
        out = attention(q, k, v, mask=function)
        assert torch.equal(out, wanted)
        for found, right in zip(torch.autograd.grad(out.sum(), (q, k, v)), gradients):
            assert (found - right).abs().max() <= (
                1e-6 if attention is compiled else 0
            )  # its sums have an order of its own


@pytest.mark.gpu
def test_documents_on_a_gpu():
    """Few positions, and a CUDA graph, keep the function; the result is that of the built-in mask."""
    ids = torch.arange(2048, device="cuda") // 300
    mask = strobe.mask_mod(lambda b, h, q, k: (q >= k) & (ids[q] == ids[k]))
    q, k, v = (torch.randn(1, 2048, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    problem = strobe.explain(q, k, v, mask=mask).problem
    assert problem.mods is None and problem.mask.documents
    few = strobe.explain(q[:, :1024], k[:, :1024], v[:, :1024], mask=mask).problem
    assert few.mods is not None and few.mask == strobe.causal().structure
    wanted = strobe.attention(q, k, v, mask=strobe.causal() & strobe.documents(ids[None].int()))
    assert torch.equal(strobe.attention(q, k, v, mask=mask), wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = strobe.attention(q, k, v, mask=mask)
    graph.replay()
    assert (out - wanted).float().norm() <= 4e-3 * wanted.float().norm()


# ---------------------------------------------------------------- scores without |.|

DISTANCES = {
    "alibi": (strobe.alibi(torch.ones(2)), strobe.causal(), 64, 64, True),
    "alibi, more keys": (strobe.alibi(torch.ones(2)), strobe.causal(), 40, 64, True),
    "alibi, more queries": (strobe.alibi(torch.ones(2)), strobe.causal(), 64, 40, True),
    "without a mask": (strobe.alibi(torch.ones(2)), strobe.full(), 64, 64, False),
    "a prefix": (strobe.alibi(torch.ones(2)), strobe.prefix_causal(9), 64, 64, False),
    "a key to the right": (strobe.alibi(torch.ones(2)), strobe.window(None, 1), 64, 64, False),
    "keys to the right": (strobe.alibi(torch.ones(2)), strobe.window(0, None), 64, 64, True),
    "a function": (lambda s, b, h, q, k: s - (k - q).abs(), strobe.causal(), 64, 64, True),
    "top left": (lambda s, b, h, q, k: s - (k - q).abs(), strobe.causal(), 40, 64, False),
    "top left, more queries": (lambda s, b, h, q, k: s - (k - q).abs(), strobe.causal(), 64, 40, True),
    "shifted": (lambda s, b, h, q, k: s - (q - k + 3).abs().float() / 2, strobe.window(None, 2), 64, 64, True),
    "of scores": (lambda s, b, h, q, k: s.abs() - (q - 2 * k).abs(), strobe.causal(), 64, 64, False),
}


@pytest.mark.parametrize("name", DISTANCES)
def test_distances_without_absolute_values(name):
    """Where the mask shows a key, the term has one sign, so scores are the same."""
    score, mask, rows, keys, is_shorter = DISTANCES[name]
    call = call_of(mask, rows, keys, score=score)
    found = with_simpler_score(call)
    assert call.mods is not None and found.mods is not None
    assert (" abs " in call.mods.texts.score, " abs " in found.mods.texts.score) == (True, not is_shorter)
    positions = lambda count, *after: torch.arange(count, dtype=torch.int32).view(-1, *[1 for _ in after])
    inputs = {
        "score": torch.randn(2, 2, rows, keys, generator=torch.Generator().manual_seed(3)),
        "b": positions(2, "h", "q", "k"), "h": positions(2, "q", "k"), "q": positions(rows, "k"), "k": positions(keys),
        "diagonal": torch.tensor(keys - rows, dtype=torch.int32),
    }  # fmt: skip
    captured = call.mods.score_tensors, call.mods.score_numbers
    before, after = (evaluate(Program.parse(mods.texts.score), inputs, captured)[0] for mods in (call.mods, found.mods))
    assert torch.equal(before[seen_by(call)], after[seen_by(call)])
    assert is_shorter or torch.equal(before, after)


def test_distances_of_packed_sequences():
    """S_k - S_q of a packed sequence is unknown, so only terms that count from the diagonal have a known sign."""
    q, k = torch.zeros(64, 2, 16), torch.zeros(80, 2, 16)
    offsets = [torch.tensor(n, dtype=torch.int32) for n in ([0, 20, 64], [0, 50, 80])]
    for score, is_shorter in ((strobe.alibi(torch.ones(2)), True), (lambda s, b, h, q, k: s - (q - k).abs(), False)):
        call = ops_mods.bind(Call(q, k, k, right=0, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1]), score, None)
        found = with_simpler_score(call)
        assert found.mods is not None and (" abs " in found.mods.texts.score) is not is_shorter


# ---------------------------------------------------------------- drawn masks

positions = st.sampled_from(("q", "k", "q - k", "k - q", "2 * q - k", "q + k", "(q - k).abs()", "LENGTHS[b]", "h", "b"))
numbers = st.integers(-20, 70).map(str)
comparisons = st.sampled_from(("<", "<=", ">", ">=", "==", "!="))
atoms = st.one_of(
    st.tuples(positions, comparisons, numbers).map(lambda parts: "({} {} {})".format(*parts)),
    st.sampled_from(
        ("(q >= k)", "(k < LENGTHS[b])", "(IDS[b, q] == IDS[b, k])", "(q // 16 == k // 16)", "(q % 3 == k % 3)",
         "ROWS[q]")
    ),
)  # fmt: skip
masks = st.recursive(
    atoms,
    lambda inner: st.one_of(
        inner.map("(~{})".format),
        st.tuples(inner, st.sampled_from("&|&"), inner).map(lambda parts: "({} {} {})".format(*parts)),
    ),
    max_leaves=5,
)
lengths = st.sampled_from(((64, 64), (40, 64), (64, 50)))


@settings(max_examples=300, deadline=None)
@given(masks, lengths)
def test_a_drawn_mask_stays_the_same(text, lengths):
    names = {"IDS": IDS, "LENGTHS": LENGTHS, "ROWS": ROWS}
    call = call_of(strobe.mask_mod(eval(f"lambda b, h, q, k: {text}", names)), *lengths)
    assert torch.equal(seen_by(with_builtin_mask(call)), seen_by(call))
