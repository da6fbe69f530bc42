"""What a pipeline says of itself, and that saying it disturbs nobody."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stageflow as sf
from stageflow.errors import StageFailed
from stageflow.runtime.command import StepReport
from stageflow.schedule import build_schedule
from stageflow.train.report import StepView, expected_bubble

X, Y = torch.ones(8, 4), torch.zeros(8, 4)


def make(**options: Any) -> sf.Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    options = {"loss": F.mse_loss, "optimizer": partial(torch.optim.Adam, lr=0.1), "launch": "threads"} | options
    return sf.Pipeline(model, 2, 4, **options)


@pytest.mark.parametrize(
    ("options", "words"), [({}, "the first batch decides"), ({"example": (X,)}, "the example, once the workers are")]
)
@pytest.mark.parametrize("launch", ["threads", "processes", "torchrun"])
def test_a_pipeline_that_was_not_split_says_what_is_known_and_what_comes_when(launch, options, words):
    with make(launch=launch, **options) as pipe:
        text = str(pipe)
        assert not pipe.is_built
    assert f"not split yet: {words}" in text
    assert "worker 0: stage 0\nworker 1: stage 1\n" in text
    assert "schedule 1f1b: 4 micro-batches, expected bubble 20.0% if all stages take equally long" in text
    assert "at most 2 activations kept" in text


def test_a_split_pipeline_says_who_holds_what():
    with make(example=(X,), dtype=torch.float64, recompute=[False, True]) as pipe:
        assert pipe.split.way == "sequence"
        text = str(pipe)
    assert "worker 0: stage 0; parameters 160 B, gradients 160 B, optimizer: seen after a step" in text
    assert "if all stages take equally long" not in text
    assert text.endswith("recomputed in stage 1")


def test_after_a_step_it_says_what_memory_the_workers_held():
    with make() as pipe:
        pipe.train_step(X, target=Y, update=False)
        assert "optimizer: seen after a step" in str(pipe)
        pipe.train_step(X, target=Y)
        # Adam keeps two numbers and a step per parameter: 2 * 80 B and two scalars of 4 B
        assert "worker 1: stage 1; parameters 80 B, gradients 80 B, optimizer 168 B" in str(pipe)
        assert pipe.memory()[1] == {"parameters": 80, "gradients": 80, "optimizer": 168}


def test_a_pipeline_is_printed_while_a_step_runs():
    inside, go_on = threading.Event(), threading.Event()

    def amount(target: torch.Tensor) -> int:
        inside.set()
        assert go_on.wait(30.0)
        return len(target)

    with make(reduction=amount) as pipe:
        step = threading.Thread(target=lambda: pipe.train_step(X, target=Y))
        step.start()
        assert inside.wait(30.0)
        try:
            assert "1f1b" in str(pipe)
        finally:
            go_on.set()
            step.join()


def test_a_closed_pipeline_still_says_what_it_was():
    with make() as pipe:
        pipe.train_step(X, target=Y)
    assert "closed>" in str(pipe)
    assert "split by sequence" in str(pipe)


@pytest.mark.parametrize("microbatches", [1, 4, 9])
def test_the_expected_bubble_of_equal_stages_is_the_closed_form(microbatches):
    """(p - 1) / (m + p - 1), as of any schedule that fills and drains once (Huang et al. 2019, GPipe, section 2.3)."""
    schedule = build_schedule("gpipe", stages=4, microbatches=microbatches)
    assert expected_bubble(schedule, [2.0] * 4, [False] * 4) == pytest.approx(3 / (microbatches + 3))


def test_recomputation_in_one_stage_makes_it_the_slow_one():
    schedule = build_schedule("1f1b", stages=2, microbatches=8)
    assert expected_bubble(schedule, [1.0, 1.0], [False, True]) > expected_bubble(schedule, [1.0, 1.0], [True, True])


def test_a_steps_view_compares_what_was_with_what_the_schedule_gives():
    schedule = build_schedule("1f1b", stages=2, microbatches=2)
    reports = [StepReport(grad_norm=2.0, learning_rates=[0.1]), StepReport(learning_rates=[0.2])]
    view = StepView(schedule, reports, schedule.simulate().events())
    assert view.measured.bubble == pytest.approx(view.predicted.bubble)
    assert view.measured.span == pytest.approx(9.0)
    assert (view.grad_norm, view.learning_rates) == (2.0, [0.1, 0.2])


@pytest.mark.parametrize("call", ["predict", "evaluate"])
def test_the_last_step_is_still_the_last_training_step_after_a_call_of_another_kind(call):
    with make() as pipe:
        pipe.train_step(X, target=Y)
        pipe.predict(X) if call == "predict" else pipe.evaluate(X, target=Y)
        events = pipe.last_step.events
    assert {event.kind for event in events} >= {"F", "B", "update"}


def test_the_last_step_is_still_the_last_good_one_after_one_that_failed():
    with make() as pipe:
        pipe.train_step(X, target=Y)
        with pytest.raises(StageFailed):
            pipe.train_step(X, target=torch.zeros(8, 3))
        events = pipe.last_step.events
    assert sum(event.kind == "B" for event in events) == 2 * 4


def test_a_steps_learning_rates_are_those_that_it_used():
    halving = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    with make(lr_scheduler=halving) as pipe:
        rates = []
        for _ in range(2):
            pipe.train_step(X, target=Y)
            rates.append(pipe.last_step.learning_rates)
    assert rates == [[0.1, 0.1], [0.05, 0.05]]


@pytest.mark.parametrize(
    "options", [{"max_grad_norm": 0.01}, {"check_finite": True}], ids=lambda given: next(iter(given))
)
def test_a_sparse_gradient_is_checked_and_clipped_as_a_dense_one(options):
    tokens = torch.tensor([1, 1, 2, 3, 1, 0, 0, 2])
    trained, norms = [], []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 4, sparse=sparse), nn.Linear(4, 4))
        optimizer = partial(torch.optim.SGD, lr=0.1)
        with sf.Pipeline(model, 2, 4, loss=F.mse_loss, optimizer=optimizer, launch="threads", **options) as pipe:
            pipe.train_step(tokens, target=Y)
            trained.append(pipe.state_dict())
            norms.append(pipe.last_step.grad_norm)
    assert norms[1] == pytest.approx(norms[0])
    torch.testing.assert_close(trained[1], trained[0])
