"""One executor follows any schedule: the numbers are those of plain autograd, whatever the order."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from programs import CPU, a_batch, programs, stages, truth

from stageflow.errors import Aborted, StageflowError
from stageflow.graph import StageGraph
from stageflow.observe.recorder import Recorder
from stageflow.runtime.executor import Executor, Order, Step
from stageflow.schedule import Action, Schedule, build_schedule
from stageflow.transport.base import Interrupt
from stageflow.transport.inproc import Hub

SKIPS = StageGraph(4, frozenset({(0, 1), (1, 2), (2, 3), (0, 2), (0, 3)}))


class Board:
    def __init__(self) -> None:
        self.shown: list[tuple[str, str]] = []

    def set(self, action: str, waits_for: str = "") -> None:
        self.shown.append((action, waits_for))


def executor(schedule: Schedule, made: Any, worker: int = 0, **given: Any) -> tuple[Executor, Recorder, Board]:
    here = {index: made[index] for index in schedule.stages_of(worker)}
    ready = stages(schedule.graph, here)
    if any(action.kind == "I" for action in schedule.orders[worker]):
        for stage in ready.values():
            stage.prepare_split_backward()
    recorder, board = Recorder(worker), Board()
    options = {"endpoint": None, "interrupt": Interrupt(), "timeout": 10.0, "device": CPU} | given
    return (
        Executor(ready, schedule.graph, schedule.placement, board=board, recorder=recorder, **options),
        recorder,
        board,
    )


def step(microbatches: int, train: bool = True) -> Step:
    return Step(1, (0, 0), train, a_batch(microbatches), [1.0 / microbatches] * microbatches)


@pytest.mark.parametrize("graph", [StageGraph.chain(1), StageGraph.chain(4), SKIPS], ids=["one", "chain", "skips"])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1"])
def test_alone_on_a_worker(name, graph):
    schedule = build_schedule(name, stages=graph.n_stages, microbatches=3, graph=graph)
    order = tuple(sorted(action for own in schedule.orders for action in own))
    everything = [a for m in range(3) for a in _one_after_the_other(graph, m, splits=any(a.kind == "I" for a in order))]
    alone = Schedule("alone", graph, (0,) * graph.n_stages, 3, (tuple(everything),))
    made = programs(graph)
    run, recorder, _ = executor(alone, made)
    outcome = run.run(Order.of(everything), step(3), None)
    expected = truth(graph, made, a_batch(3), [1 / 3] * 3)
    for program in made.values():
        for key, parameter in program.parameters.items():
            torch.testing.assert_close(parameter.grad, expected[key])
    assert sorted(outcome.losses) == [0, 1, 2]
    assert outcome.peak_in_flight == graph.n_stages
    assert [str(event) for event in recorder.drain()] == [str(action) for action in everything]


def _one_after_the_other(graph: StageGraph, microbatch: int, splits: bool) -> list[Action]:
    forwards = [Action("F", stage, microbatch) for stage in range(graph.n_stages)]
    kinds = "IW" if splits else "B"
    return forwards + [Action(k, stage, microbatch) for stage in reversed(range(graph.n_stages)) for k in kinds]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("graph", [StageGraph.chain(4), SKIPS], ids=["chain", "skips"])
def test_over_workers_that_send_each_other_messages(name, graph):
    schedule = build_schedule(name, stages=4, microbatches=4, workers=None, graph=graph)
    made = programs(graph)
    hub = Hub(schedule.n_workers)
    problems: list[BaseException] = []

    def work(worker: int) -> None:
        try:
            run, _, _ = executor(schedule, made, worker, endpoint=hub.endpoint(worker))
            run.run(Order.of(schedule.orders[worker]), step(4), None)
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(schedule.n_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    expected = truth(graph, made, a_batch(4), [0.25] * 4)
    for program in made.values():
        for key, parameter in program.parameters.items():
            torch.testing.assert_close(parameter.grad, expected[key])


CHAIN = StageGraph.chain(2)


def both(text: str) -> Schedule:
    return Schedule.from_orders([text])


def test_an_order_that_is_wrong_is_told_with_what_is_missing():
    schedule = both("0F0 1F0 1B0 0B0")
    run, _, _ = executor(schedule, programs(CHAIN))
    with pytest.raises(StageflowError, match="1F0 needs 0F0, which has not run yet on this worker"):
        run.run(Order.of([Action("F", 1, 0), *schedule.orders[0]]), step(1), None)


def test_what_is_raised_says_where():
    made = programs(CHAIN)
    made[1].module.forward = lambda x: 1 / 0  # type: ignore[method-assign]
    run, _, _ = executor(both("0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1"), made)
    with pytest.raises(ZeroDivisionError) as caught:
        run.run(Order.of([Action("F", 0, 0), Action("F", 0, 1), Action("F", 1, 1)]), step(2), None)
    error: Any = caught.value
    assert (error.stage, error.action, error.microbatch) == (1, "1F1", 1)


def test_after_a_reset_nothing_of_an_interrupted_step_is_there():
    made = programs(CHAIN)
    schedule = both("0F0 1F0 1B0 0B0")
    run, _, _ = executor(schedule, made)
    run.run(Order.of([Action("F", 0, 0)]), step(1), None)
    run.reset()
    with pytest.raises(StageflowError, match="which has not run yet"):
        run.run(Order.of([Action("F", 1, 0)]), step(1), None)
    run.reset()
    assert run.run(Order.of(schedule.orders[0]), step(1), None).peak_in_flight == 2


def test_an_interrupt_ends_it_between_two_actions():
    looks = iter([None, None, Aborted("stop")])

    def check() -> None:
        if (problem := next(looks)) is not None:
            raise problem

    schedule = both("0F0 1F0 1B0 0B0")
    run, recorder, _ = executor(schedule, programs(CHAIN), interrupt=Interrupt(check))
    with pytest.raises(Aborted):
        run.run(Order.of(schedule.orders[0]), step(1), None)
    assert [str(event) for event in recorder.drain()] == ["0F0", "1F0"]


def test_outputs_of_a_forward_only_step_are_handed_over_in_their_order():
    made = programs(CHAIN)
    run, _, board = executor(both("0F0 0F1 1F1 1F0"), made)
    seen: list[int] = []
    outcome = run.run(
        Order.of(both("0F0 0F1 1F1 1F0").orders[0]), step(2, train=False), lambda m, output, target: seen.append(m)
    )
    assert seen == [1, 0]
    assert (outcome.losses, outcome.peak_in_flight) == ({}, 0)
    assert [action for action, _ in board.shown] == ["0F0", "0F1", "1F1", "1F0"]
