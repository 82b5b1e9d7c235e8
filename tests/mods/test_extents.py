"""Tensors of ready-made scores and masks that are smaller than a call."""

from __future__ import annotations

import pytest
import torch

import strobe

SMALL = {
    "mask": (lambda: {"mask": strobe.mask_mod(torch.ones(5, 5, dtype=torch.bool))}, "at least 8, the queries"),
    "mask beside others": (
        lambda: {"mask": strobe.causal() & ~strobe.mask_mod(torch.zeros(4, 8, 5, dtype=torch.bool))},
        "at least 8, the keys",
    ),
    "bias": (lambda: {"score_mod": strobe.bias(torch.zeros(3, 8, 8))}, "expected 4, the query heads"),
    "alibi": (lambda: {"score_mod": strobe.alibi(torch.zeros(2))}, "expected 4, the query heads"),
    "alibi of more heads": (lambda: {"score_mod": strobe.alibi(torch.zeros(8))}, "expected 4, the query heads"),
    "alibi of more entries": (lambda: {"score_mod": strobe.alibi(torch.zeros(3, 4))}, "expected 2, the batch entries"),
    "mask of more entries": (
        lambda: {"mask": strobe.mask_mod(torch.ones(3, 1, 8, 8, dtype=torch.bool))},
        "expected 2, the batch entries",
    ),
    "relative": (lambda: {"score_mod": strobe.relative_bias(torch.zeros(2, 9))}, "expected 4, the query heads"),
    "ids of documents": (
        lambda: {"mask": ~strobe.documents(torch.zeros(2, 5, dtype=torch.int32))},
        "5 queries and 5 keys, expected 8 and 8",
    ),
    "ids of documents beside others": (
        lambda: {
            "mask": (strobe.documents(torch.zeros(2, 9, dtype=torch.int32)) & strobe.causal())
            | strobe.key_lengths(torch.ones(2, dtype=torch.int32))
        },
        "9 queries and 9 keys, expected 8 and 8",
    ),
    "lengths of another batch": (
        lambda: {"mask": ~strobe.key_lengths(torch.tensor([3]))},
        "expected 2, the batch entries",
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_a_tensor_smaller_than_the_call_is_refused(name):
    options, expected = SMALL[name][0](), SMALL[name][1]
    q = torch.randn(2, 8, 4, 16)
    with pytest.raises(strobe.InvalidProblem, match=f"^{next(iter(options))}: got .*{expected}"):
        strobe.attention(q, q, q, **options)


CACHED = {
    "alibi": (lambda: {"score_mod": strobe.alibi(torch.zeros(1))}, "expected 4, the query heads"),
    "alibi of more heads": (lambda: {"score_mod": strobe.alibi(torch.zeros(8))}, "expected 4, the query heads"),
    "lengths": (lambda: {"mask": strobe.key_lengths(torch.tensor([3]))}, "expected 2, the batch entries"),
    "documents": (
        lambda: {"mask": strobe.documents(torch.zeros(3, 8, dtype=torch.int32))},
        "expected 2, the batch entries",
    ),
}


@pytest.mark.parametrize("name", CACHED)
def test_a_tensor_that_is_not_of_a_cache_is_refused(name):
    q, k = torch.randn(2, 1, 4, 16), torch.randn(2, 8, 4, 16)
    cache = strobe.DenseCache(k, k, torch.tensor([8, 3]))
    options, expected = CACHED[name][0](), CACHED[name][1]
    wrong = pytest.raises(strobe.InvalidProblem, match=f"^{next(iter(options))}: got .*{expected}")
    with wrong:
        strobe.attention_decode(q, cache, **options)
    with wrong:
        strobe.attention_paged(q[:, 0], cache, cu_seqlens_q=torch.tensor([0, 1, 2]), **options)


def test_slopes_of_too_few_heads_are_refused_over_packed_sequences():
    q, offsets = torch.randn(9, 4, 16), torch.tensor([0, 4, 9], dtype=torch.int32)
    with pytest.raises(strobe.InvalidProblem, match=r"^score_mod: got a tensor of shape .*expected 4, the query heads"):
        strobe.attention_varlen(
            q, q, q, cu_seqlens_q=offsets, cu_seqlens_k=offsets, score_mod=strobe.alibi(torch.zeros(2))
        )


def test_dimensions_of_size_1_and_larger_tensors_are_taken():
    q = torch.randn(2, 8, 4, 16)
    for options in (
        {"mask": strobe.mask_mod(torch.ones(2, 1, 1, 8, dtype=torch.bool))},
        {"score_mod": strobe.bias(torch.zeros(1, 4, 9, 9))},
    ):
        assert torch.allclose(strobe.attention(q, q, q, **options), strobe.attention(q, q, q), atol=1e-5)
