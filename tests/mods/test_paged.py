"""attention_paged with functions of scores and masks, among them trees of drafted tokens: on CPUs against each sequence
alone, in the portable kernel against CPUs.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import strobe
from strobe.problem.target import FAKES

A100, H200 = FAKES["A100"], FAKES["H200"]
LENGTHS, NEWS = (70, 2, 33, 9), (30, 3, 1, 0)
INT = lambda *values, device="cpu": torch.tensor(values, dtype=torch.int32, device=device)


def simulated(target):
    """Within the block, GPU kernels run in the simulator. Imported here: a GPU's machine may lack what it needs."""
    from tools.proof.simulate import on

    return on(target)


def _draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def drawn(
    paged: bool, dtype: torch.dtype = torch.float32, width: int = 16
) -> tuple[torch.Tensor, strobe.PagedCache | strobe.DenseCache, torch.Tensor, list[tuple]]:
    """(q, cache, offsets, (q, k, v) of each sequence)."""
    q = _draw(sum(NEWS), 4, width, seed=0, dtype=dtype)
    k, v = (_draw(4, 96, 2, width, seed=n, dtype=dtype) for n in (1, 2))
    offsets = torch.nn.functional.pad(torch.tensor(NEWS).cumsum(0), (1, 0)).int()
    cache = strobe.DenseCache(k, v, INT(*LENGTHS))
    if paged:
        table = torch.randperm(24, generator=torch.Generator().manual_seed(1)).view(4, 6).int()
        pools = [torch.empty(24, 16, 2, width, dtype=dtype) for _ in range(2)]
        for pool, rows in zip(pools, (k, v)):
            pool[table.flatten().long()] = rows.reshape(24, 16, 2, width)
        cache = strobe.PagedCache(*pools, table, INT(*LENGTHS))
    bounds = offsets.tolist()
    each = [(q[a:b], k[n, : LENGTHS[n]], v[n, : LENGTHS[n]]) for n, (a, b) in enumerate(pairwise(bounds))]
    return q, cache, offsets, each


def options_of(device: str = "cpu") -> dict:
    """A score and a mask that depend on everything that a function may."""
    by_head, slopes = (
        torch.tensor([2, 3, 4, 5], device=device),
        torch.rand(4, generator=torch.Generator().manual_seed(3)),
    )
    mask = strobe.mask_mod(lambda b, h, i, j: ((i - j) % by_head[h] < 2) | (j == b))
    return {"score_mod": strobe.alibi(slopes.to(device)), "mask": mask, "softcap": 5.0}


@pytest.mark.parametrize("through", ["paged", "decode"])
def test_a_row_before_the_first_key_has_position_0(through):
    """As in the kernels on GPUs: functions written in Triton may read at q_idx without a check."""
    q, keys = _draw(1, 5, 4, 16, seed=0), 2
    k, v = (_draw(1, 96, 2, 16, seed=n) for n in (1, 2))
    cache = strobe.DenseCache(k, v, INT(keys))
    moved = {"score_mod": lambda s, b, h, i, j: s + 0.5 * i * (j + 1), "causal": False}
    if through == "paged":
        out = strobe.attention_paged(q[0], cache, cu_seqlens_q=INT(0, 5), **moved)[None]
    else:
        out = strobe.attention_decode(q, cache, **moved)
    position = (torch.arange(5) + keys - 5).clamp(min=0)
    raw = torch.einsum("bihd,bjhd->bhij", q, k[:, :keys].repeat_interleave(2, 2)) / 4
    weights = (raw + 0.5 * position[:, None] * (torch.arange(keys) + 1)).softmax(-1)
    exact = torch.einsum("bhij,bjhd->bihd", weights, v[:, :keys].repeat_interleave(2, 2))
    torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("window", [None, (20, 0)], ids=["causal", "window"])
def test_a_sequence_in_a_batch_equals_the_sequence_alone(window, paged):
    q, cache, offsets, each = drawn(paged)
    given = options_of()
    out, lse = strobe.attention_paged(q, cache, cu_seqlens_q=offsets, window=window, return_lse=True, **given)
    by_head = torch.tensor([2, 3, 4, 5])
    for n, (start, (own, k, v)) in enumerate(zip(offsets.tolist(), each)):
        rows, shift = slice(start, start + len(own)), LENGTHS[n] - len(own)
        moved = strobe.mask_mod(lambda b, h, i, j, n=n, shift=shift: ((i + shift - j) % by_head[h] < 2) | (j == n))
        alone = strobe.partial_attention(
            own[None], k[None], v[None], causal=True, window=window, mask=moved, score_mod=given["score_mod"],
            softcap=5.0,
        )  # fmt: skip
        torch.testing.assert_close(out[rows], alone.out[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[:, rows], alone.lse[0], rtol=1e-5, atol=1e-5)
    assert strobe.last_errors() == []


def tree_mask(parents: list[list[int]], lengths: torch.Tensor) -> strobe.Mask:
    """Drafted tokens that branch: a token sees its ancestors among the drafted ones, and all keys before them.

    parents: of each sequence's drafted tokens, the number of each one's parent; -1 for a root.
    """
    most = max(map(len, parents))
    tree = torch.zeros(len(parents), most, most, dtype=torch.bool)
    for b, row in enumerate(parents):
        for token, parent in enumerate(row):
            tree[b, token, token] = True
            if parent >= 0:
                tree[b, token] |= tree[b, parent]
    tree, past = tree.to(lengths.device), lengths - torch.tensor([len(row) for row in parents], device=lengths.device)

    def seen(b, h, q_idx, kv_idx):
        row, key = q_idx - past[b], kv_idx - past[b]
        return (key < 0) | tree[b, row.clamp(0, most - 1), key.clamp(0, most - 1)]

    return strobe.mask_mod(seen)


PARENTS = [[-1, 0, 0, 1, 2, 2], [-1, -1, 1], [-1]]


def tree_calls(device: str = "cpu", dtype: torch.dtype = torch.float32):
    """q, cache, offsets and the paths from the root to each drafted token."""
    lengths = torch.tensor([40, 3, 20])
    q = _draw(10, 4, 16, seed=4, dtype=dtype).to(device)
    k, v = (_draw(3, 48, 2, 16, seed=n, dtype=dtype).to(device) for n in (5, 6))
    cache = strobe.DenseCache(k, v, lengths.int().to(device))
    return q, cache, INT(0, 6, 9, 10, device=device), lengths


def test_a_tree_of_drafted_tokens_equals_each_of_its_paths():
    """A drafted token's result is that of its path alone, verified as a chain."""
    q, cache, offsets, lengths = tree_calls()
    out = strobe.attention_paged(q, cache, cu_seqlens_q=offsets, mask=tree_mask(PARENTS, lengths), max_seqlen_q=6)
    for b, row in enumerate(PARENTS):
        past = int(lengths[b]) - len(row)
        for token in range(len(row)):
            path, at = [], token
            while at >= 0:
                path.insert(0, at)
                at = row[at]
            keys = [*range(past), *(past + one for one in path)]
            own = q[int(offsets[b]) + torch.tensor(path)][None]
            chain = strobe.attention(own, cache.k[b, keys][None], cache.v[b, keys][None], causal=True)
            torch.testing.assert_close(out[int(offsets[b]) + token], chain[0, -1], rtol=1e-5, atol=1e-5)


def _agree(found: torch.Tensor, exact: torch.Tensor) -> None:
    """float16 of both: a rounding of P and one of O, and that of the CPU's own sums."""
    torch.testing.assert_close(found.float(), exact.float(), rtol=4e-3, atol=4e-3)


def documents(length: int) -> torch.Tensor:
    """ids of 4 sequences: runs of 5 positions in two documents and in padding."""
    return (torch.arange(length) // 5 + torch.arange(4)[:, None]) % 3 - 1


@pytest.mark.parametrize("join", [lambda mask: mask, lambda mask: mask | strobe.window(2, 0)], ids=["alone", "joined"])
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_positions_beyond_the_ids_of_documents_are_padding(paged, join):
    """Only the device knows how long sequences are. The longest has 70 keys, the cache has room for 96."""
    q, cache, offsets, _ = drawn(paged)
    for stop in (9, 50, 70, 120):
        short = documents(stop)
        full = torch.nn.functional.pad(short, (0, max(0, 96 - stop)), value=-1)
        masks = [join(strobe.documents(ids)) for ids in (short, full)]
        packed = [strobe.attention_paged(q, cache, cu_seqlens_q=offsets, mask=mask) for mask in masks]
        decoded = [strobe.attention_decode(q.view(-1, 2, 4, 16)[:4], cache, mask=mask) for mask in masks]
        assert torch.equal(*packed) and torch.equal(*decoded)
    compiled = torch.compile(
        lambda ids: strobe.attention_paged(q, cache, cu_seqlens_q=offsets, mask=join(strobe.documents(ids))),
        fullgraph=True, backend="aot_eager", dynamic=True,
    )  # fmt: skip
    assert torch.equal(compiled(documents(120)), packed[0])


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_the_portable_kernel(paged):
    q, cache, offsets, _ = drawn(paged, torch.float16)
    given = {"cu_seqlens_q": offsets, **options_of()}
    exact = strobe.attention_paged(q, cache, **given)
    with simulated(H200):
        found = strobe.attention_paged(q, cache, kernel="portable", **given)
        part = strobe.partial_attention_paged(q, cache, kernel="portable", **given)
        out = torch.empty_like(q)
        strobe.attention_paged(q, cache, kernel="portable", out=out, **given)
    _agree(found, exact)
    _agree(part.out, exact)
    assert torch.equal(out, found)
    assert strobe.explain_paged(q, cache, **given).problem.mods is not None


def test_bounds_of_a_mask_are_those_of_the_call():
    """Windows, alone or joined by &, are no functions, so kernels skip what they hide."""
    q, cache, offsets, _ = drawn(True)
    given, even = {"cu_seqlens_q": offsets}, strobe.mask_mod(lambda b, h, i, j: j % 2 == 0)
    run = lambda **options: strobe.attention_paged(q, cache, **given, **options)
    problem = lambda **options: strobe.explain_paged(q, cache, **given, **options).problem
    assert torch.equal(run(mask=strobe.window(9, 0)), run(window=(9, 0)))
    assert torch.equal(run(mask=strobe.window(9, 3) & even, causal=False), run(window=(9, 3), mask=even, causal=False))
    assert torch.equal(run(mask=strobe.window(30, 0) & even, window=(9, 5)), run(window=(9, 0), mask=even))
    alone, joined = problem(mask=strobe.window(9, 3)), problem(mask=strobe.causal() & even, window=(9, 3), causal=False)
    assert alone.mods is None and (alone.left, alone.right) == (9, 0)
    assert joined.mods == problem(mask=even).mods and (joined.left, joined.right) == (9, 0)
    with pytest.raises(strobe.InvalidProblem, match="key lengths"):
        run(mask=strobe.key_lengths(INT(3, 4)) & strobe.causal())


def test_the_hopper_kernels_on_prefills_and_decodes():
    """Two launches, with windows and a mask that combines a function with a built-in one, and into a given tensor."""
    q, cache, offsets, _ = drawn(True, torch.float16, 64)
    given = {"cu_seqlens_q": offsets, "window": (60, 0), **options_of()}
    given["mask"] = given["mask"] & strobe.window(50, 3)
    exact = strobe.attention_paged(q, cache, **given)
    with simulated(H200) as run:
        assert strobe.explain_paged(q, cache, **given).forward.kernel.name == "hopper.paged"
        out = torch.empty_like(q)
        strobe.attention_paged(q, cache, out=out, **given)
        assert run.launches == ["forward_kernel", "decode_kernel"]
    _agree(out, exact)


def test_the_portable_kernel_on_a_tree():
    q, cache, offsets, lengths = tree_calls(dtype=torch.float16)
    given = {"cu_seqlens_q": offsets, "mask": tree_mask(PARENTS, lengths), "max_seqlen_q": 6}
    exact = strobe.attention_paged(q, cache, **given)
    with simulated(A100):
        found = strobe.attention_paged(q, cache, kernel="portable", **given)
    _agree(found, exact)


@pytest.mark.gpu
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_on_a_gpu(paged):
    q, cache, offsets, _ = drawn(paged, torch.bfloat16, 64)
    exact = strobe.attention_paged(q.float(), cache._replace(**{
        name: getattr(cache, name).float() for name in cache._fields[:2]
    }), cu_seqlens_q=offsets, **options_of())  # fmt: skip
    here = type(cache)(*(t if t is None else t.cuda() for t in cache))
    found = strobe.attention_paged(q.cuda(), here, cu_seqlens_q=offsets.cuda(), **options_of("cuda"))
    torch.testing.assert_close(found.float().cpu(), exact, rtol=2e-2, atol=2e-2)
    q, cache, offsets, lengths = tree_calls("cuda", torch.bfloat16)
    given = {"cu_seqlens_q": offsets, "mask": tree_mask(PARENTS, lengths.cuda()), "max_seqlen_q": 6}
    wide = cache._replace(k=cache.k.float().cpu(), v=cache.v.float().cpu(), seqlens=cache.seqlens.cpu())
    exact = strobe.attention_paged(
        q.float().cpu(), wide, cu_seqlens_q=offsets.cpu(), mask=tree_mask(PARENTS, lengths), max_seqlen_q=6
    )
    torch.testing.assert_close(strobe.attention_paged(q, cache, **given).float().cpu(), exact, rtol=2e-2, atol=2e-2)


def test_a_step_with_functions_compiles_whole():
    q, cache, offsets, _ = drawn(True)
    given = options_of()
    run = lambda q, offsets: strobe.attention_paged(q, cache, cu_seqlens_q=offsets, **given)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, offsets), run(q, offsets))


def test_unsupported_calls_are_refused():
    q, cache, offsets, _ = drawn(True)
    with pytest.raises(TypeError, match="mask"):
        strobe.attention_paged(q, cache, cu_seqlens_q=offsets, mask=torch.ones(3))
    with pytest.raises(strobe.UnsupportedProblem, match="gradients"):
        strobe.attention_paged(q.requires_grad_(), cache, cu_seqlens_q=offsets, score_mod=lambda s, b, h, i, j: s)


def test_lengths_without_a_dimension_are_refused_as_without_a_function():
    pool, score = torch.zeros(1, 16, 2, 16), strobe.alibi(torch.rand(1, 2))
    cache = strobe.DenseCache(pool, pool.clone(), torch.tensor(3, dtype=torch.int32))
    messages = set()
    for options in ({}, {"score_mod": lambda s, b, h, q, k: s}, {"score_mod": score}, {"mask": strobe.causal()}):
        with pytest.raises(strobe.InvalidProblem) as refused:
            strobe.attention_decode(torch.zeros(1, 1, 2, 16), cache, **options)
        messages.add(str(refused.value))
    assert len(messages) == 1
