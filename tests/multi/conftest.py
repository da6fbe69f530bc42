"""Every test here must leave nothing behind: no process, thread, descriptor or shared memory."""

import pytest

from stageflow.launch.server import keep_warm
from stageflow.testing.leaks import no_leaks


@pytest.fixture(scope="session", autouse=True)
def _warm():
    """Workers are forked from one process for all tests, instead of importing torch for each."""
    with keep_warm():
        yield


@pytest.fixture(autouse=True)
def _leaves_nothing(_warm):
    with no_leaks():
        yield
