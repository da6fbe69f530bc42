"""Runs whose workers or driver are killed, stopped or broken are the runs that were left in peace, bit for bit."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from troubles import mean_square

import stageflow as sf
from stageflow.checkpoint import Series, load_weights
from stageflow.train.callbacks import FitReport, Restart, Run

STEPS, EVERY = 24, 5
TIMEOUT = 3.0


class Trouble(nn.Module):
    """Does harm, once, when the file that it looks for is there."""

    def __init__(self, flag: str, harm: Callable[[], Any]) -> None:
        super().__init__()
        self.flag, self.harm = flag, harm

    def forward(self, x: Tensor) -> Tensor:
        if self.training and os.path.exists(self.flag):
            os.unlink(self.flag)
            self.harm()
        return x


def out_of_luck() -> None:
    raise ValueError("out of luck")


def out_of_memory() -> None:
    torch.empty(1 << 60)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def exits() -> None:
    os._exit(3)


def build(flag: str = "/nonexistent", harm: Callable[[], Any] = killed) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*blocks, Trouble(flag, harm), nn.Linear(8, 2))


def pipeline(*trouble: Any, **options: Any) -> sf.Pipeline:
    options = {"stages": 2, "microbatches": 4, "launch": "processes", "timeout": TIMEOUT} | options
    return sf.Pipeline(
        build(*trouble),
        loss=mean_square,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        balance="parameters",
        **options,
    )


def batch(number: int) -> tuple[Tensor, Tensor]:
    return torch.randn(16, 8), torch.randn(16, 2)


@pytest.fixture(autouse=True, scope="module")
def _imported(_warm):
    """What workers import is imported before anybody counts the seconds."""
    with pipeline(timeout=100.0) as pipe:
        pipe.fit(batch, 1)


@cache
def undisturbed() -> dict[str, Tensor]:
    with pipeline(launch="threads") as pipe:
        pipe.fit(batch, STEPS)
        return pipe.state_dict()


def assert_undisturbed(weights: dict[str, Tensor]) -> None:
    expected = undisturbed()
    assert weights.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []


def fit(pipe: sf.Pipeline, root: Path, *callbacks: Callable[[Run], Any], **options: Any) -> FitReport:
    return pipe.fit(
        batch, STEPS, **({"checkpoint": root / "run", "checkpoint_every": EVERY, "callbacks": callbacks} | options)
    )


@pytest.mark.parametrize(
    ("harm", "error", "text"),
    [
        (killed, "WorkerDied", r"worker 1 \(stage 1\) died of signal 9"),
        (exits, "WorkerDied", r"worker 1 \(stage 1\) exited with code 3"),
        (stopped, "WorkerHung", "no worker made progress for 3 s: worker 1 was stopped by a signal"),
        (out_of_luck, "StageFailed", r"worker 1 \(stage 1\) raised ValueError: out of luck during 1F"),
        (out_of_memory, "StageFailed", r"worker 1 \(stage 1\) raised RuntimeError"),
    ],
    ids=["killed", "exited", "stopped", "exception", "memory"],
)
def test_a_worker_that_fails_is_named_and_replaced(tmp_path, harm, error, text):
    flag = tmp_path / "now"
    moments: dict[str, float] = {}

    def at_step(run: Run) -> None:
        if run.step == 13 and not moments:
            moments["harm"] = time.monotonic()
            flag.touch()

    with pipeline(str(flag), harm) as pipe:
        report = fit(pipe, tmp_path, at_step)
        assert_undisturbed(pipe.state_dict())
    (restart,) = report.restarts
    assert restart.error == error
    assert (restart.worker, restart.stage) == (1, 1)
    assert re.match(text, restart.text)
    assert restart.step == 13
    assert restart.resumed_from == 10
    assert report.steps == STEPS


def test_a_death_is_found_and_the_run_goes_on_within_seconds(tmp_path):
    flag = tmp_path / "now"
    steps: dict[int, float] = {}

    def at_step(run: Run) -> None:
        steps[run.step] = time.monotonic()
        if run.step == 11 and not run.report.restarts:
            flag.touch()

    with pipeline(str(flag), killed) as pipe:
        (restart,) = fit(pipe, tmp_path, at_step).restarts
    found = steps[12] - steps[11] - restart.seconds
    assert found < 2.0
    assert restart.seconds < 10.0


def test_a_worker_that_dies_between_two_steps(tmp_path):
    def at_step(run: Run) -> None:
        if run.step == 7 and not run.report.restarts:
            os.kill(pids_of(run.pipe)[0], signal.SIGKILL)
            time.sleep(0.2)

    with pipeline() as pipe:
        report = fit(pipe, tmp_path, at_step)
        assert_undisturbed(pipe.state_dict())
    assert [restart.error for restart in report.restarts] == ["WorkerDied"]
    assert "worker 0 died of signal 9 (SIGKILL) during idle" in report.restarts[0].text


def pids_of(pipe: sf.Pipeline) -> list[int]:
    crew: Any = pipe._life._crew
    return [status.pid for status in crew._group.status()]


class Chaos(threading.Thread):
    """Does harm to a worker at random moments, as long as there is some left to do."""

    def __init__(self, pipe: sf.Pipeline, flag: Path, seed: int, harms: list[str]) -> None:
        super().__init__(name="chaos", daemon=True)
        self._pipe, self._flag, self._random = pipe, flag, random.Random(seed)
        self._harms = harms
        self.done: list[str] = []
        self._enough = threading.Event()

    def run(self) -> None:
        while self._harms and not self._enough.wait(self._random.uniform(0.05, 0.7)):
            self._do(self._harms[0])

    def _do(self, harm: str) -> None:
        if harm == "exception":
            self._flag.touch()
        else:
            try:
                pids = pids_of(self._pipe)
                os.kill(self._random.choice(pids), signal.SIGKILL if harm == "kill" else signal.SIGSTOP)
            except (ProcessLookupError, AttributeError):
                return  # between two groups of workers: another moment
        self.done.append(self._harms.pop(0))

    def stop(self) -> None:
        self._enough.set()
        self.join()


@pytest.mark.parametrize("seed", [1, 2])
def test_chaos(tmp_path, seed):
    """Kills, stops and exceptions at random moments, also while workers are replaced or checkpoints are written."""
    flag = tmp_path / "now"
    harms = ["kill", "exception", "kill", "stop", "kill"]
    with pipeline(str(flag), out_of_luck) as pipe:
        chaos = Chaos(pipe, flag, seed, list(harms))

        def at_step(run: Run) -> None:
            if run.step == 1 and not chaos.ident:
                chaos.start()
            time.sleep(0.02)
            if run.step == STEPS - 2:  # wait here for what is still to come
                x, y = batch(0)
                while chaos.is_alive():
                    run.pipe.evaluate(x, target=y)

        try:
            report = fit(pipe, tmp_path, at_step, max_restarts=20)
        finally:
            chaos.stop()
        assert_undisturbed(pipe.state_dict())
    assert chaos.done == harms
    assert 1 <= len(report.restarts) <= len(harms)
    found = [restart.error for restart in report.restarts]
    assert {"WorkerDied", "WorkerHung", "StageFailed"} >= set(found)


DRIVER = """
import sys
sys.path.insert(0, sys.argv[2])
from test_fit import *

def at_step(run):
    (root / "step").write_text(str(run.step))
    time.sleep(0.02)
    if sys.argv[3] == "starter" and run.step == 7 and not run.report.restarts:
        parent = Path(f"/proc/{pids_of(run.pipe)[0]}/stat").read_text().rpartition(")")[2].split()[1]
        os.kill(int(parent), signal.SIGKILL)

if __name__ == "__main__":
    root = Path(sys.argv[1])
    with pipeline(timeout=100.0) as pipe:
        report = fit(pipe, root, at_step)
    print(report)
"""


def start_driver(tmp_path: Path, harm: str = "none") -> subprocess.Popen[str]:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    command = [sys.executable, str(script), str(tmp_path), str(Path(__file__).parent), harm]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.timeout(300)
def test_a_driver_that_is_killed(tmp_path):
    """The same script, started again, goes on; nothing of the dead one is left to disturb it."""
    process = start_driver(tmp_path)
    deadline = time.monotonic() + 120
    while not (tmp_path / "step").exists() or int((tmp_path / "step").read_text() or 0) < 13:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.communicate()
    process = start_driver(tmp_path)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert re.search(r"24 steps, resumed from step 1[05]", out)
    assert_undisturbed(load_weights(tmp_path / "run"))
    assert [path.name for path in (tmp_path / "run").glob(".*")] == []
    assert Series(tmp_path / "run").members()[0].step == STEPS


@pytest.mark.timeout(300)
def test_the_process_that_starts_workers_is_killed(tmp_path):
    """In a driver of its own, because here many tests share that process."""
    process = start_driver(tmp_path, "starter")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert re.search(r"restart 1 after step [78]: WorkerDied: worker", out)
    assert "restart 2" not in out
    assert_undisturbed(load_weights(tmp_path / "run"))


def test_restart_says_what_happened():
    restart = Restart(12, "WorkerDied", "worker 1 died", 1, 1, None, "1F0", 10, 2, 0.5)
    assert str(restart) == "after step 12: WorkerDied: worker 1 died; 2 workers went on from step 10 after 0.5 s"
