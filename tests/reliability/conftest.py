"""Fixtures of the reliability tests."""

import faulthandler

import pytest
import torch


@pytest.fixture
def watchdog():
    """Rows 8, 11, 54, 57: a kernel that hangs holds the interpreter's lock, so the process ends itself, with a
    traceback.
    """
    faulthandler.dump_traceback_later(300, exit=True)
    yield
    torch.cuda.synchronize()  # a fault belongs to the test that caused it
    faulthandler.cancel_dump_traceback_later()
    torch.cuda.empty_cache()
