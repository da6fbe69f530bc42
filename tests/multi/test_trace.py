"""What workers do is seen from outside, also when they are in the middle of something or stopped."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_fit import batch, pids_of, pipeline
from torch import nn
from troubles import mean_square

import stageflow as sf
from stageflow.cli import main
from stageflow.errors import InputError, WorkerDied
from stageflow.launch.trace import WorkerTrace, tell, trace_process


class Slow(nn.Module):
    """Waits in its forward as long as a file is there."""

    def __init__(self, flag: str) -> None:
        super().__init__()
        self.flag = flag

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while self.training and os.path.exists(self.flag):
            time.sleep(0.01)
        return x


def slow_pipeline(flag: Path, launch: str) -> sf.Pipeline:
    layers = [nn.Linear(8, 8), nn.Tanh(), Slow(str(flag)), nn.Linear(8, 2)]
    return sf.Pipeline(
        nn.Sequential(*layers), 2, 2, loss=mean_square, example=torch.zeros(16, 8), boundaries=["2"], launch=launch
    )


def wait_for(pid: int, *actions: str) -> list[WorkerTrace]:
    """Until each of these is what some worker does or waits for."""
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(InputError):  # not started yet
            (group,) = trace_process(pid, stacks=False)
            seen = [{one.status.action, one.status.waits_for} for one in group]
            if all(any(action in one for one in seen) for action in actions):
                return group
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def slow_step(flag: Path, launch: str) -> Any:
    """Worker 1 is in 1F0 meanwhile."""
    with slow_pipeline(flag, launch) as pipe:
        x, y = batch(0)
        pipe.train_step(x, target=y)
        flag.touch()
        step = threading.Thread(target=lambda: pipe.train_step(x, target=y))
        step.start()
        try:
            wait_for(os.getpid(), "1F0", "1B0 from worker 1")
            yield pipe
        finally:
            flag.unlink()
            step.join(60)
        assert not step.is_alive()


@pytest.mark.parametrize("launch", ["processes", "threads"])
def test_a_step_is_seen_with_its_stacks_and_not_disturbed(tmp_path, launch):
    with slow_step(tmp_path / "flag", launch) as pipe:
        for _ in range(2):  # nothing of the first look is in the second
            (group,) = trace_process(os.getpid())
            first, second = group
            assert first.status.waits_for == "1B0 from worker 1"
            assert second.status.action == "1F0"
            assert second.status.alive
            assert [one.status.pid for one in group] == pids_of(pipe)
            assert second.stacks.count("os.path.exists") + second.stacks.count("in forward") >= 1
        text = tell([group])
        assert "worker 1: 1F0 for " in text
        assert "worker 0: 0F1, waiting for 1B0" in text or "waiting for 1B0 from worker 1" in text


def test_the_command_line_and_a_workers_own_id(tmp_path, capsys):
    with slow_step(tmp_path / "flag", "processes") as pipe:
        assert main(["trace", str(pids_of(pipe)[0]), "--json"]) == 0
        (group,) = json.loads(capsys.readouterr().out)["groups"]
        assert group[1]["action"] == "1F0"
        assert "in forward" in group[1]["stacks"]
        assert main(["trace", str(os.getpid()), "--no-stacks"]) == 0
        assert "worker 1: 1F0 for " in capsys.readouterr().out


def test_a_stopped_worker_is_said_to_be_stopped(tmp_path):
    with slow_step(tmp_path / "flag", "processes") as pipe:
        pid = pids_of(pipe)[1]
        os.kill(pid, signal.SIGSTOP)
        try:
            deadline = time.monotonic() + 10
            while "stopped by a signal" not in (text := tell(trace_process(os.getpid()))):
                assert time.monotonic() < deadline
        finally:
            os.kill(pid, signal.SIGCONT)
        assert f", stopped by a signal, process {pid}" in text


def test_looks_are_not_taken_for_the_last_words_of_a_worker_that_dies(tmp_path):
    with slow_pipeline(tmp_path / "flag", "processes") as pipe:
        x, y = batch(0)
        pipe.train_step(x, target=y)
        (group,) = trace_process(os.getpid())
        assert group[1].stacks
        os.kill(group[1].status.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied) as caught:
            pipe.train_step(x, target=y)
        assert "File" not in str(caught.value)


def test_a_run_answers_sigusr1(tmp_path, monkeypatch):
    said = io.StringIO()
    monkeypatch.setattr("sys.stderr", said)

    def at_step(run: Any) -> None:
        if run.step == 2:
            os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.getsignal(signal.SIGUSR1)
    with pipeline(timeout=100.0) as pipe:
        pipe.fit(batch, 3, callbacks=[at_step])
    assert signal.getsignal(signal.SIGUSR1) is before
    text = said.getvalue()
    assert "worker 0: idle for" in text
    assert "worker 1: idle for" in text
    assert f"this process, {os.getpid()}:" in text
    assert "at_step" in text


def test_a_program_that_uses_sigusr1_keeps_it(tmp_path):
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        with pipeline(launch="threads") as pipe:
            pipe.fit(batch, 1, callbacks=[lambda run: os.kill(os.getpid(), signal.SIGUSR1)])
        assert heard == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_what_can_not_be_traced(capsys):
    with pytest.raises(InputError, match="there is no process 4194304"):
        trace_process(1 << 22)
    assert main(["trace", str(os.getpid())]) == 2
    assert f"process {os.getpid()} has no workers of a pipeline" in capsys.readouterr().err
