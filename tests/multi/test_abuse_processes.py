"""Pipelines over processes, used as nobody should, or as nobody expects."""

from __future__ import annotations

import os
import threading
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

import stageflow as sf
from stageflow.errors import PipelineClosed
from stageflow.launch import server

X, Y = torch.ones(4, 4), torch.zeros(4, 4)


def make(**options: Any) -> sf.Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return sf.Pipeline(model, 2, 2, loss=F.mse_loss, optimizer=partial(torch.optim.SGD, lr=0.1), **options)


def losses(steps: int) -> list[float]:
    with make(launch="threads") as pipe:
        return [pipe.train_step(X, target=Y).item() for _ in range(steps)]


def test_threads_that_start_pipelines_at_a_time():
    """They wait for the same process that forks workers, which says only once that it is ready."""
    seen: list[list[float]] = []

    def train(pipe: sf.Pipeline) -> None:
        with pipe:
            seen.append([pipe.train_step(X, target=Y).item() for _ in range(2)])

    threads = [threading.Thread(target=train, args=(make(timeout=60.0),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [losses(2)] * 3


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_of_the_driver_does_not_reach_the_workers():
    with server.keep_warm(), make() as pipe:
        first = pipe.train_step(X, target=Y).item()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                pipe.train_step(X + 100.0, target=Y)
            except PipelineClosed:
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert [first, pipe.train_step(X, target=Y).item()] == losses(2)


def test_paths_are_those_of_the_driver_even_after_it_changed_folder(tmp_path, monkeypatch):
    with make() as pipe:
        pipe.train_step(X, target=Y)
        monkeypatch.chdir(tmp_path)
        pipe.save("run")
        saved = pipe.state_dict()
        pipe.train_step(X, target=Y)
        pipe.load("run")
        assert all(torch.equal(value, saved[name]) for name, value in pipe.state_dict().items())


def test_a_timeout_may_be_infinite():
    with make(timeout=float("inf")) as pipe:
        assert pipe.train_step(X, target=Y).item() == losses(1)[0]


def test_each_process_loads_its_own_part_of_stored_weights(tmp_path, monkeypatch):
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    stored = build()
    save_file(stored.state_dict(), tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    with sf.Pipeline(build, 2, 2, loss=F.mse_loss, weights="model.safetensors") as pipe:
        torch.testing.assert_close(pipe.predict(X), stored(X))
        assert [held["parameters"] for held in pipe.memory()] == [80, 80]
