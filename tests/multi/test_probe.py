"""The process that helps to measure a link never outlives the measurement."""

from __future__ import annotations

import subprocess
import sys

import pytest

from stageflow.errors import TransportError
from stageflow.transport import probe


def test_a_helper_that_does_not_end_is_ended(monkeypatch):
    monkeypatch.setattr(probe, "_END_WITHIN", 0.2)
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stderr=subprocess.PIPE)
    probe._end(helper)
    assert helper.returncode is not None
    assert helper.stderr is not None
    assert helper.stderr.closed


def test_a_helper_that_says_much_before_it_ends_is_not_waited_for_in_vain(monkeypatch):
    monkeypatch.setattr(probe, "_END_WITHIN", 30.0)
    code = "import sys; sys.stderr.write('x' * (1 << 20))"  # more than a pipe holds
    helper = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    probe._end(helper)
    assert helper.returncode == 0


def test_a_helper_that_fails_is_quoted(monkeypatch):
    monkeypatch.setattr(probe, "TIMEOUT", 6.0)
    monkeypatch.setattr(probe, "__name__", "stageflow.no_such_module")
    with pytest.raises(TransportError, match="The helper process said: .*no_such_module"):
        probe.probe_shared_memory([64], rounds=2)
