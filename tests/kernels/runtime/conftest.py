"""Fixtures of the launcher's tests; they import Triton when a test asks for them."""

import pytest


@pytest.fixture(scope="module")
def compiled():
    """The kernel of one forward, compiled for sm_90 without a GPU."""
    return pytest.importorskip("tests.kernels.runtime.launches").compiled_kernel()


@pytest.fixture
def stage(compiled, monkeypatch):
    """A stand-in for the driver that notes launches of `compiled`."""
    yield from pytest.importorskip("tests.kernels.runtime.launches").installed(compiled, monkeypatch)
