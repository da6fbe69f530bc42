"""A run that was saved, ended and resumed is the run that never ended, bit for bit; workers are threads here."""

from __future__ import annotations

import contextlib
import logging
import threading
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stageflow as sf
from stageflow.checkpoint import Series, write_behind
from stageflow.errors import CheckpointError, InputError, StageFailed
from stageflow.train import crew


def build() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(8, 1))


def pipeline(stages: int = 2, **options: Any) -> sf.Pipeline:
    options = {
        "microbatches": 4,
        "loss": F.mse_loss,
        "optimizer": partial(torch.optim.AdamW, lr=1e-2),
        "lr_scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.7),
        "example": torch.zeros(16, 8),
        "launch": "threads",
    } | options
    return sf.Pipeline(build(), stages, **options)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 8, generator=generator), torch.randn(16, 1, generator=generator)


def train(pipe: sf.Pipeline, until: int) -> list[float]:
    losses = []
    while pipe.steps < until:
        x, y = batch(pipe.steps)
        losses.append(pipe.train_step(x, target=y).item())
    return losses


@cache
def straight() -> tuple[list[float], dict[str, torch.Tensor]]:
    with pipeline() as pipe:
        return train(pipe, 20), pipe.state_dict()


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize("background", [False, True], ids=["waiting", "background"])
@pytest.mark.parametrize("then", [2, 3, 1], ids="resumed in {} stages".format)
def test_ten_steps_and_ten_more_are_twenty(tmp_path, then, background):
    losses, weights = straight()
    with pipeline(2) as pipe:
        first = train(pipe, 10)
        pipe.save(tmp_path / "run", background=background)
        train(pipe, 13)  # what comes after a save is not in it
    with pipeline(then) as pipe:
        pipe.load(tmp_path / "run")
        assert first + train(pipe, 20) == losses
        assert_same(pipe.state_dict(), weights)


def test_another_schedule_too(tmp_path):
    losses, weights = straight()
    with pipeline(2) as pipe:
        train(pipe, 10)
        pipe.save(tmp_path / "run")
    with pipeline(2, schedule="zb_h1") as pipe:
        pipe.load(tmp_path / "run")
        assert train(pipe, 20) == losses[10:]
        assert_same(pipe.state_dict(), weights)


def test_a_folder_of_checkpoints(tmp_path):
    with pipeline() as pipe:
        for step in (2, 4, 6):
            train(pipe, step)
            place = pipe.save(tmp_path / "run", keep=2, extra={"seen": step})
            assert place == tmp_path / "run" / f"step-{step:08}"
    assert [member.step for member in Series(tmp_path / "run").members()] == [6, 4]
    with pipeline() as pipe:
        assert pipe.load(tmp_path / "run") == {"seen": 6}
        assert pipe.steps == 6
        assert pipe.load(tmp_path / "run" / "step-00000004") == {"seen": 4}
        assert pipe.steps == 4


def test_saves_in_the_background_follow_one_another(tmp_path):
    with pipeline() as pipe:
        for step in range(1, 6):
            train(pipe, step)
            pipe.save(tmp_path / "run", keep=2, background=True)
        pipe.finish_saving()
        assert [member.step for member in Series(tmp_path / "run").members()] == [5, 4]


def test_the_run_goes_on_while_a_save_is_written(tmp_path, monkeypatch):
    """The writers are held up until three more steps have been made."""
    go_on = threading.Event()

    def late(*arguments: Any) -> None:
        def work() -> None:
            go_on.wait(20)
            write_behind(*arguments)

        threading.Thread(target=work).start()

    monkeypatch.setattr(crew, "write_behind", late)
    with pipeline() as pipe:
        train(pipe, 2)
        pipe.save(tmp_path / "run", background=True)
        train(pipe, 5)
        assert not (tmp_path / "run").exists()
        go_on.set()
        pipe.finish_saving()
        pipe.load(tmp_path / "run")
        assert pipe.steps == 2


def fail_to_write(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_save_in_the_background_that_failed_is_told_by_what_comes_next(tmp_path, monkeypatch):
    with pipeline() as pipe:
        train(pipe, 1)
        pipe.save(tmp_path / "run")
        train(pipe, 2)
        with monkeypatch.context() as patch:
            patch.setattr("stageflow.checkpoint.shard.write_tensors", fail_to_write)
            pipe.save(tmp_path / "run", background=True)
            with pytest.raises(CheckpointError, match="could not be written.*No space left"):
                pipe.finish_saving()
            pipe.save(tmp_path / "run", background=True)
            with pytest.raises(CheckpointError, match="No space left"):
                pipe.save(tmp_path / "run")
        pipe.load(tmp_path / "run")
        assert pipe.steps == 1


def test_closing_tells_of_it_too(tmp_path, monkeypatch):
    monkeypatch.setattr("stageflow.checkpoint.shard.write_tensors", fail_to_write)
    pipe = pipeline()
    pipe.save(tmp_path / "run", background=True)
    with pytest.raises(CheckpointError, match="No space left"):
        pipe.close()
    pipe.close()


class PendingSave:
    """A save under way that says how it was ended."""

    done = False

    def __init__(self) -> None:
        self.ended = ""

    def result(self) -> None:
        self.ended = "waited for"

    def abandon(self) -> None:
        self.ended = "given up"


@pytest.mark.parametrize(
    ("launch", "error", "ended"),
    [
        ("torchrun", KeyError("of this rank alone"), "given up"),
        ("torchrun", StageFailed("told to all ranks"), "waited for"),
        ("torchrun", None, "waited for"),
        ("threads", KeyError("in the driver"), "waited for"),
    ],
)
def test_a_rank_that_leaves_by_an_exception_does_not_wait_for_the_others(launch, error, ended):
    """What waits for a save under torchrun is a call that all ranks have to make."""
    pending = PendingSave()
    pipe = pipeline()
    pipe.launch = launch
    pipe._storage._pending = pending
    with contextlib.suppress(KeyError, StageFailed), pipe:
        if error is not None:
            raise error
    assert pending.ended == ended


@pytest.mark.parametrize("keep", [0, -1, True, "3", 1.5])
def test_keep_that_is_no_count_is_refused_before_any_work(tmp_path, keep):
    with pipeline() as pipe:
        with pytest.raises(InputError, match="keep must be how many"):
            pipe.save(tmp_path / "run", keep=keep)
        assert not pipe.is_built


def test_another_seed_is_said(tmp_path, caplog):
    with pipeline() as pipe:
        pipe.save(tmp_path / "run")
    with caplog.at_level(logging.WARNING, "stageflow"), pipeline(seed=5) as pipe:
        pipe.load(tmp_path / "run")
    assert "saved with seed=0, this pipeline has seed=5" in caplog.text
