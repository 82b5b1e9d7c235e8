"""Fixtures of the tests of the stand-ins for other libraries."""

import pytest
import torch

from strobe.compat import sdpa
from strobe.ops import attention as ops


@pytest.fixture
def nothing_stays_enabled():
    """The test leaves torch's dispatcher, provider and priorities as they were."""
    from tests.compat.sdpa_calls import _state

    if torch.cuda.is_available():
        sdpa.backend("cuda")  # torch sets the priority at a process's first choice
    before = _state()
    yield
    assert _state() == before and not sdpa._switches


@pytest.fixture
def ran(monkeypatch) -> list:
    """The calls that strobe has run."""
    calls, run = [], ops.run
    monkeypatch.setattr(ops, "run", lambda call, *rest: (calls.append(call), run(call, *rest))[1])
    monkeypatch.setattr(ops, "run_keywords", lambda *_: None)  # of calls that were met
    return calls


@pytest.fixture
def asked(monkeypatch):
    """asked(make, **arguments): what transformers asks of a mask function for these arguments of its own maker."""
    masking_utils = pytest.importorskip("transformers").masking_utils

    def ask(make: str, config, **arguments):
        questions = []
        monkeypatch.setitem(
            masking_utils.AttentionMaskInterface._global_mapping, "strobe", lambda **given: questions.append(given)
        )
        getattr(masking_utils, make)(config=config, **arguments)
        return questions[0]

    return ask
