"""The search's own timing of words is the simulator's."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import pytest
from schedule_cases import Case, random_case, random_schedule

from stageflow.errors import ScheduleError
from stageflow.graph import StageGraph
from stageflow.plan.search.anneal import short
from stageflow.plan.search.construct import Rule, construct
from stageflow.plan.search.critical import critical_blocks
from stageflow.plan.search.decode import Decoder, Step
from stageflow.plan.search.problem import Problem
from stageflow.schedule import Action, Costs, Footprint, Schedule, build_schedule

METRICS = ("makespan", "span")


def problem_of(case: Case, metric: Any = "makespan") -> Problem:
    return Problem(case.graph, case.placement, case.microbatches, case.costs, case.footprint, case.memory, metric)


def assert_simulated(problem: Problem, step: Step, case: Case) -> Schedule:
    schedule = problem.schedule(step.words, "decoded")
    assert case.fits(schedule)
    simulation = schedule.simulate(case.costs)  # raises where it deadlocks
    assert len(simulation.times) == sum(map(len, step.words))
    assert step.seconds == getattr(simulation, problem.metric)
    for order, starts in zip(schedule.orders, step.starts, strict=True):
        assert [simulation.times[action].start for action in order] == starts
    return schedule


def test_thousands_of_random_schedules_take_what_the_simulator_says() -> None:
    random = Random("decode")
    compared = 0
    for number in range(600):
        case = random_case(random, workers=3, microbatches=3)
        schedule = random_schedule(random, case, random.choice((True, False, None)))
        if schedule is None:
            continue
        problem = problem_of(case, METRICS[number % 2])
        decoder = Decoder(problem)
        words = problem.words(schedule.orders)
        step = decoder.run(words, None)
        assert step is not None
        assert step.words == words
        assert_simulated(problem, step, case)
        compared += 1
        for reach in (0.0, 0.3, 1.0):
            step = decoder.run(short(words), reach)
            if step is not None:  # without a W where it was, there may be no room
                assert_simulated(problem, step, case)
                assert short(step.words) == short(words)
                compared += 1
    assert compared > 1500


def test_what_can_not_run_is_refused_as_by_the_simulator() -> None:
    random = Random("refuse")
    refused = 0
    for _ in range(300):
        case = random_case(random, workers=3, microbatches=4)
        schedule = random_schedule(random, case, False)
        if schedule is None:
            continue
        problem = problem_of(case)
        words = problem.words(schedule.orders)
        for _ in range(3):
            word = random.choice(words)
            word.insert(random.randrange(len(word)), word.pop(random.randrange(len(word))))
        changed = problem.schedule(words, "changed")
        try:
            changed.validate()
            runs = case.fits(changed)
        except ScheduleError:
            runs = False
        assert (Decoder(problem).run(words, None) is not None) == runs
        refused += not runs
    assert refused > 50


def test_micro_batches_come_in_any_order_and_are_served_first_come_first_served() -> None:
    """Relabelled, a schedule takes no longer: what bounds and words rest on."""
    random = Random("relabel")
    for _ in range(150):
        case = random_case(random, workers=3, microbatches=4)
        schedule = random_schedule(random, case, random.choice((True, False, None)))
        if schedule is not None:
            problem = problem_of(case)
            relabelled = problem.schedule(problem.words(schedule.orders), "relabelled")
            before, after = schedule.simulate(case.costs), relabelled.simulate(case.costs)
            assert after.makespan <= before.makespan + 1e-9


def test_weights_fill_gaps_by_hand() -> None:
    """A W of 3 fits into no gap of 2 in which worker 0 waits for I1, and into one of 3, when worker 1 is late too.

    reach 0    0 | F0 .  .  I0 F1 .  .  I1 W0 W0 W0 W1 W1 W1
               1 | .  F0 I0 .  .  F1 I1 W0 W0 W0 W1 W1 W1
    reach 0.5  0 | F0 .  .  I0 F1 W0 W0 W0 I1 W1 W1 W1
               1 | .  F0 I0 W0 W0 W0 F1 I1 W1 W1 W1
    """
    problem = Problem(StageGraph.chain(2), (0, 1), 2, Costs(1, 1, 3), Footprint(), None)
    words = [[0, 2, 0, 2], [4, 6, 4, 6]]  # F I F I of stages 0 and 1
    step = Decoder(problem).run(words, 0.0)
    assert step is not None
    assert step.words == [[0, 2, 0, 2, 3, 3], [4, 6, 4, 6, 7, 7]]
    assert step.starts[0] == [0, 3, 4, 7, 8, 11]
    step = Decoder(problem).run(words, 0.5)  # worker 1's W sticks out of its gap by a third of itself
    assert step is not None
    assert step.words == [[0, 2, 0, 3, 2, 3], [4, 6, 7, 4, 6, 7]]
    assert step.starts[0] == [0, 3, 4, 5, 8, 9]
    assert Decoder(problem).run(words, 0.5, cutoff=11.5) is None


def test_weights_make_room_for_a_forward() -> None:
    tight = Problem(StageGraph.chain(2), (0, 1), 2, Costs(1, 1, 3), Footprint(), (1, 1))
    step = Decoder(tight).run([[0, 2, 0, 2], [4, 6, 4, 6]], 0.0)
    assert step is not None
    assert step.words == [[0, 2, 3, 0, 2, 3], [4, 6, 7, 4, 6, 7]]
    assert Decoder(tight).run([[0, 0, 2, 2], [4, 6, 4, 6]], 0.0) is None


def test_orders_and_words_say_the_same() -> None:
    for name in ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v"):
        schedule = build_schedule(name, stages=4, workers=2, microbatches=5)
        problem = Problem(schedule.graph, schedule.placement, 5, Costs(), Footprint(), None)
        assert problem.orders(problem.words(schedule.orders)) == schedule.orders


def test_a_w_belongs_to_an_i_where_some_backwards_are_whole() -> None:
    problem = Problem(StageGraph.chain(1), (0,), 2, Costs(), Footprint(), None)
    assert problem.orders([[0, 0, 1, 2, 3]]) == (
        (Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 0), Action("I", 0, 1), Action("W", 0, 1)),
    )


def test_the_longest_path_is_tight() -> None:
    """Blocks lie end to end: inside one no time is lost, and each starts when what the one before made is there."""
    random = Random("critical")
    for _ in range(100):
        case = random_case(random, workers=3, microbatches=5)
        words = construct(problem_of(case), Rule((3.0,) * (max(case.placement) + 1), 2, True, True, 0.0))
        if words is None:
            continue
        problem = problem_of(case)
        step = Decoder(problem).run(words, None)
        assert step is not None
        blocks = critical_blocks(problem, step)
        for worker, first, last in blocks:
            for at in range(first, last):
                end = step.starts[worker][at] + problem.seconds[step.words[worker][at]]
                assert end == step.starts[worker][at + 1]
        worker, first, _ = blocks[-1]
        assert step.starts[worker][first] == 0
        for (worker, first, _), (maker, _, last) in pairwise(blocks):
            made = step.starts[maker][last] + problem.seconds[step.words[maker][last]]
            assert made <= step.starts[worker][first]


@pytest.mark.parametrize("split", [True, False])
def test_list_schedules_fit_and_run(split: bool) -> None:
    random = Random(f"construct {split}")
    for _ in range(150):
        case = random_case(random)
        problem = problem_of(case)
        workers = problem.n_workers
        ahead = tuple(random.uniform(0, 12) for _ in range(workers))
        words = construct(problem, Rule(ahead, random.randint(1, 6), random.random() < 0.5, split, 0.3))
        assert words is not None  # here an I leaves no more than an activation
        step = Decoder(problem).run(words, None)
        assert step is not None
        assert_simulated(problem, step, case).validate()
