"""Every test here must leave nothing behind: no process, thread, descriptor or shared memory."""

import gc

import pytest
import torch._dynamo  # noqa: F401  (torch imports it with the first optimizer)

from stageflow.launch.server import keep_warm
from stageflow.testing.leaks import no_leaks


@pytest.fixture(scope="session", autouse=True)
def _warm():
    """Workers are forked from one process for all tests, instead of importing torch for each.

    What is imported by now stays for good: looking for leaks need not go through it again and again.
    """
    gc.collect()
    gc.freeze()
    with keep_warm():
        yield


@pytest.fixture(autouse=True)
def _leaves_nothing(_warm):
    with no_leaks():
        yield
