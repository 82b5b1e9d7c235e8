"""The tests of `test_context_parallel` with three and four processes."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.sessions import session
from tests.distributed.test_context_parallel import (  # pytest runs them here, too, with the fixture below
    pytestmark,
    test_a_call_that_differs_is_named_on_every_rank,
    test_every_mask_gives_what_one_process_gives,
    test_groups_and_meshes,
    test_other_calls_give_what_one_process_gives,
    test_random_delays_change_no_bit,
)
from tests.processes import together


@pytest.fixture(scope="module", params=[3, 4])
def found(request, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp(f"world{request.param}")
    together(session, folder, str(folder), request.param, False, world=request.param)
    return {**torch.load(folder / "found.pt"), "world": request.param, "is whole": False}


__all__ = [
    "pytestmark",
    "test_a_call_that_differs_is_named_on_every_rank",
    "test_every_mask_gives_what_one_process_gives",
    "test_groups_and_meshes",
    "test_other_calls_give_what_one_process_gives",
    "test_random_delays_change_no_bit",
]
