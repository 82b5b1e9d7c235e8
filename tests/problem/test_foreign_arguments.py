"""What other libraries' attention takes and strobe's does not: each is refused in words that name what to use
instead."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

import strobe
from strobe.problem.foreign_arguments import _INSTEAD

Q, K, P = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8), torch.randn(12, 4, 8)
PACKING = {"cu_seqlens_q": torch.tensor([0, 5, 12], dtype=torch.int32)}
DENSE = (strobe.attention, strobe.partial_attention, strobe.explain, strobe.supports)
PACKED = (strobe.attention_varlen, strobe.partial_attention_varlen, strobe.explain_varlen)
CACHED = (strobe.attention_decode, strobe.partial_attention_decode, strobe.explain_decode)
CALLS = {
    **{function: lambda f=function, **given: f(Q, K, K, **given) for function in DENSE},
    **{function: lambda f=function, **given: f(P, P, P, **PACKING, **given) for function in PACKED},
    **{
        function: lambda f=function, **given: f(
            Q[:, :1], strobe.DenseCache(K, K, torch.tensor([7, 7], dtype=torch.int32)), **given
        )
        for function in CACHED
    },
}

REMEDIES = {
    "attn_mask": (torch.ones(5, 7), "strobe.causal()"),
    "is_causal": (True, "causal=True; it is aligned at the bottom right"),
    "dropout_p": (0.0, "leave it out"),
    "enable_gqa": (True, "query head h reads key head h // (H_q // H_kv)"),
    "softmax_scale": (0.1, "scale="),
    "window_size": ((4, 0), "window=(left, right)"),
    "return_lse": (True, "strobe.partial_attention"),
    "sinks": (torch.zeros(4), "strobe.with_sinks(partial, sinks)"),
}


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("name", REMEDIES)
def test_a_foreign_keyword_names_what_to_use(function, name):
    value, remedy = REMEDIES[name]
    CALLS[function]()  # else right
    if name in inspect.signature(function).parameters:
        CALLS[function](**{name: value})
        return
    with pytest.raises(TypeError, match=rf"^{name}: got {type(value).__name__}, expected .+; .+") as raised:
        CALLS[function](**{name: value})
    assert remedy in str(raised.value)


@pytest.mark.parametrize("name", _INSTEAD)
def test_what_says_nothing_is_refused_too(name):
    is_own = name in inspect.signature(strobe.attention).parameters
    function = strobe.partial_attention if is_own else strobe.attention
    with pytest.raises(TypeError, match=f"^{name}: got NoneType, expected .+; .+"):
        CALLS[function](**{name: None})


def test_no_remedy_names_an_argument_or_a_function_that_is_not_there():
    said = " ".join(" ".join(words) for words in _INSTEAD.values())
    assert set(re.findall(r"\b(\w+)=", said)) <= set(inspect.signature(strobe.attention).parameters)
    assert set(re.findall(r"\bstrobe\.(\w+)", said)) <= set(strobe.__all__)
    assert not set(_INSTEAD) & set(inspect.signature(strobe.partial_attention).parameters)


def test_any_other_is_what_python_says_and_a_near_miss_is_named():
    with pytest.raises(TypeError, match=r"^attention\(\) got an unexpected keyword argument 'abacus'$"):
        strobe.attention(Q, K, K, abacus=1)
    with pytest.raises(TypeError, match=r"argument 'widow'; did you mean window=\?$"):
        strobe.attention(Q, K, K, widow=(3, 0))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (lambda b, h, i, j: i >= j, "got function, expected a strobe.Mask; wrap it: strobe.mask_mod"),
        (strobe.causal, r"got function, expected a strobe.Mask; call it: strobe.causal\("),
        (torch.ones(5, 7), r"got Tensor, expected a strobe.Mask; give numbers .* score_mod=strobe.bias\(tensor\)"),
        (torch.ones(5, 7) > 0, r"got Tensor, expected a strobe.Mask; give mask=strobe.mask_mod\(tensor\)"),
        ([strobe.causal()], r"got list, expected a strobe.Mask; combine masks by &"),
        ("causal", "got str, expected a strobe.Mask; give causal=True"),
        (True, "got bool, expected a strobe.Mask; give causal=True"),
    ],
    ids=["lambda", "maker", "numbers", "bools", "list", "str", "bool"],
)
def test_a_mask_that_is_none_of_ours(mask, words, causal):
    with pytest.raises(TypeError, match=f"^mask: {words}") as raised:
        strobe.attention(Q, K, K, mask=mask, causal=causal)
    assert any(f"strobe.{name}(" in str(raised.value) for name in ("documents", "causal", "mask_mod"))
