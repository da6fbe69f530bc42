"""The life of a pipeline: not started, running, closed."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from stageflow.errors import InputError, PipelineClosed
from stageflow.runtime.batch import MicroBatch
from stageflow.runtime.optimize import OptimizerOptions
from stageflow.runtime.stage import StageOptions
from stageflow.train import life
from stageflow.train.blueprint import Blueprint
from stageflow.train.life import Life

FIRST = MicroBatch((torch.ones(2, 4),), {}, None)


class Crew:
    """Stands for the workers."""

    def __init__(self) -> None:
        self.usable = True
        self.closed = 0

    def close(self) -> None:
        self.closed += 1
        self.usable = False


@pytest.fixture
def started(monkeypatch) -> list[Crew]:
    """The crews that were started."""
    crews: list[Crew] = []

    def start_crew(*_: Any, **__: Any) -> Crew:
        crews.append(Crew())
        return crews[-1]

    monkeypatch.setattr(life, "start_crew", start_crew)
    return crews


def a_life(example: Any = None, model: Any = None) -> Life:
    return Life(
        model or nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        "threads",
        Blueprint(2, 2, "1f1b", None),
        example,
        splitting={},
        planning={"batch_dims": {}, "recompute": None},
        starting={},
        setting_up={
            "options": StageOptions(),
            "optimizer": OptimizerOptions(),
            "seed": 0,
            "device": "cpu",
            "dtype": None,
            "timeout": 1.0,
        },
    )


def test_it_starts_once_with_the_first_batch(started):
    made = a_life()
    assert (made.started, made.usable, made.closed) == (False, True, False)
    made.start(FIRST)
    made.start(FIRST)
    assert made.started
    assert made.crew("a step") is started[0]
    assert len(started) == 1
    assert made.split("split").n_stages == 2


def test_with_an_example_it_starts_with_that_and_not_the_batch(started):
    calls = []

    def example() -> MicroBatch:
        calls.append(1)
        return FIRST

    made = a_life(example)
    made.start(MicroBatch((torch.ones(2, 5),), {}, None))  # which the model could not take
    made.split("split")
    assert (len(calls), len(started)) == (1, 1)


def test_without_either_what_needs_the_workers_says_what_to_do():
    with pytest.raises(
        InputError, match=r"save\(\) needs a pipeline that was built: run a step first, or give example="
    ):
        a_life().crew("save()")


def test_the_first_batch_is_not_written_into_by_the_split(started):
    class Doubling(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.mul_(2.0))

    batch = MicroBatch((torch.ones(2, 4),), {}, None)
    a_life(model=Doubling(nn.Linear(4, 4), nn.Linear(4, 4))).start(batch)
    assert batch.args[0].eq(1.0).all()


def test_after_the_end_every_call_tells_the_first_reason(started):
    made = a_life()
    made.start(FIRST)
    made.end("the first reason")
    made.end("another")
    for call in (made.next_number, made.require_open, lambda: made.crew("x"), lambda: made.split("x")):
        with pytest.raises(PipelineClosed, match="can't be used any more: the first reason"):
            call()
    assert made.closed
    assert not made.usable
    assert started[0].closed == 2  # which a crew allows


def test_numbers_of_calls_go_up():
    made = a_life()
    assert [made.next_number() for _ in range(3)] == [1, 2, 3]


def test_who_comes_second_is_refused_and_told_what_runs():
    made = a_life()
    refused: list[str] = []

    def second() -> None:
        try:
            with made.alone("predict()"):
                pass
        except InputError as error:
            refused.append(str(error))

    with made.alone("train_step()"):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        second()
    assert len(refused) == 2
    assert all(text.startswith("predict() while train_step() of the same pipeline runs") for text in refused)
    second()
    assert len(refused) == 2


def test_a_failure_that_leaves_the_workers_usable_ends_nothing(started):
    made = a_life()
    made.start(FIRST)
    with pytest.raises(KeyError), made.alone("train_step()"):
        raise KeyError("user's own")
    assert made.usable
    with made.alone("train_step()"):
        pass


def test_a_failure_that_ended_the_workers_ends_the_pipeline_with_that_reason(started):
    made = a_life()
    made.start(FIRST)
    started[0].close()
    with pytest.raises(KeyboardInterrupt), made.alone("save()"):
        raise KeyboardInterrupt("pressed\nmore")
    with pytest.raises(PipelineClosed, match=r"it ended after a failure in save\(\) \(KeyboardInterrupt: pressed\)$"):
        made.require_open()


def test_a_split_made_in_inference_mode_can_be_trained(started):
    made = a_life()
    with torch.inference_mode():
        made.start(FIRST)
    built = made.split("split").specs[0].build(torch.device("cpu"))
    assert not any(parameter.is_inference() for parameter in built.parameters.values())


def test_what_breaks_because_another_thread_closed_it_says_so(started):
    made = a_life()
    made.start(FIRST)

    def closed_meanwhile() -> None:
        with made.alone("train_step()"):
            made.end("it was closed", for_good=True)
            raise ValueError("I/O operation on closed epoll object")

    with pytest.raises(PipelineClosed, match=r"was closed, by another thread, while train_step\(\) ran") as caught:
        closed_meanwhile()
    assert isinstance(caught.value.__cause__, ValueError)


def test_the_first_batch_is_not_held(started):
    batch = torch.ones(6, 4)
    made = a_life()
    made.start(MicroBatch((batch[:2],), {}, batch[:2]))
    assert made._inputs is not None
    assert made._inputs.args[0].untyped_storage().nbytes() == 2 * 4 * 4
    assert made._inputs.target is None


def test_with_an_example_no_inputs_are_held(started):
    made = a_life(lambda: FIRST)
    made.start(MicroBatch((torch.ones(6, 4),), {}, None))
    assert made._inputs is None
