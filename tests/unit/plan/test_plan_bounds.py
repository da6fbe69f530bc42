"""No schedule beats a lower bound: random ones, named ones, and the best of all for tiny instances."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import permutations, product
from random import Random

import pytest
from optima import MICROBATCHES, SPLIT, TWO_STAGES, UNSPLIT, V_BEST_KNOWN, Optimum
from schedule_cases import Case, random_case, random_schedule

from stageflow.errors import InputError, ScheduleError
from stageflow.graph import StageGraph
from stageflow.plan.bounds import Bound, lower_bound, preemptive_one_machine
from stageflow.schedule import SCHEDULES, Action, Costs, Footprint, Schedule, build_schedule

METRICS = ("makespan", "span")


def bound_of(case: Case, *, split: bool, metric: str = "makespan") -> Bound:
    return lower_bound(
        case.costs,
        case.placement,
        case.microbatches,
        graph=case.graph,
        footprint=case.footprint,
        memory=case.memory,
        split=split,
        metric=metric,
    )


def assert_not_beaten(case: Case, schedule: Schedule, *, split: bool) -> None:
    simulation = schedule.simulate(case.costs)
    for metric in METRICS:
        bound = bound_of(case, split=split, metric=metric)
        seconds = getattr(simulation, metric)
        assert bound.seconds <= seconds + 1e-6, f"{metric} of {schedule}: {seconds}, {bound.of}, {case}"


@pytest.mark.parametrize("split", [True, False, None], ids=["split", "whole", "mixed"])
def test_random_schedules_do_not_beat_it(split: bool | None) -> None:
    random = Random(f"bounds {split}")
    tried = 0
    for _ in range(150):
        case = random_case(random, workers=3, microbatches=4)
        schedule = random_schedule(random, case, split)
        if schedule is not None:
            tried += 1
            assert_not_beaten(case, schedule, split=split is not False)
    assert tried > 75


def test_named_schedules_do_not_beat_it() -> None:
    random = Random("named")
    tried = 0
    for _ in range(50):
        case = random_case(random, skips=False)
        for name in SCHEDULES:
            try:
                schedule = build_schedule(
                    name, stages=case.graph.n_stages, microbatches=case.microbatches, placement=case.placement
                )
            except InputError:
                continue
            if schedule.has_backward and case.fits(schedule) and schedule.placement == case.placement:
                tried += 1
                assert_not_beaten(case, schedule, split=True)
    assert tried > 50


# ------------------------------------------------------------------------------------------- the best of all, by trying


def all_orders(case: Case, worker: int, splits: dict[tuple[int, int], bool]) -> Iterator[tuple[Action, ...]]:
    """Every order of one worker's actions in which no action comes before its own F or I."""
    rows = [
        [Action(kind, s, m) for kind in ("FIW" if splits[s, m] else "FB")]
        for s, w in enumerate(case.placement)
        if w == worker
        for m in range(case.microbatches)
    ]

    def merge(rest: list[list[Action]], taken: list[Action]) -> Iterator[tuple[Action, ...]]:
        if not any(rest):
            yield tuple(taken)
        for number, row in enumerate(rest):
            if row:
                yield from merge([*rest[:number], row[1:], *rest[number + 1 :]], [*taken, row[0]])

    return merge(rows, [])


def best_of_all(case: Case, splits: tuple[bool, ...]) -> dict[str, float]:
    """The shortest makespan and span over every valid schedule, micro-batches in any order."""
    best = dict.fromkeys(METRICS, math.inf)
    keys = list(product(range(case.graph.n_stages), range(case.microbatches)))
    for chosen in product(splits, repeat=len(keys)):
        choice = dict(zip(keys, chosen, strict=True))
        lines = [list(all_orders(case, worker, choice)) for worker in range(max(case.placement) + 1)]
        for orders in product(*lines):
            schedule = Schedule("tried", case.graph, case.placement, case.microbatches, orders)
            if not case.fits(schedule):
                continue
            try:
                simulation = schedule.simulate(case.costs)
            except ScheduleError:
                continue  # deadlocks
            for metric in METRICS:
                best[metric] = min(best[metric], getattr(simulation, metric))
    return best


TINY = [  # placement, micro-batches, whether backwards may be split, whole, or either
    ((0, 1), 2, (True,)),
    ((0, 1), 2, (False,)),
    ((0, 1), 2, (True, False)),
    ((0, 1), 3, (False,)),
    ((0, 0, 1), 1, (True, False)),
    ((0, 1, 1, 0), 1, (True,)),
    ((0, 1, 0, 1), 1, (True, False)),
]


@pytest.mark.parametrize("memory", [None, 2, 1])
@pytest.mark.parametrize(("placement", "microbatches", "splits"), TINY)
def test_the_best_of_all_does_not_beat_it(
    placement: tuple[int, ...], microbatches: int, splits: tuple[bool, ...], memory: int | None
) -> None:
    random = Random(f"{placement} {microbatches} {splits} {memory}")
    stages = len(placement)

    def times(low: int, high: int) -> list[float]:
        return [float(random.randint(low, high)) for _ in range(stages)]

    costs = Costs(
        times(1, 5),
        times(1, 5),
        times(1, 5),
        backward=times(1, 10) if len(splits) > 1 else None,
        hop=random.randint(0, 2),
        transfer=random.choice((0, 3)),
        reduction=random.choice((0.0, times(0, 5))),
    )
    most = None
    if memory is not None:
        most = tuple(float(memory * placement.count(worker)) for worker in range(max(placement) + 1))
    case = Case(StageGraph.chain(stages), placement, microbatches, costs, Footprint(), most)
    best = best_of_all(case, splits)
    for metric in METRICS:
        bound = bound_of(case, split=True in splits, metric=metric)
        assert bound.seconds <= best[metric] + 1e-9, (metric, bound.of, best, case)


# --------------------------------------------------------------------------------------------------- how strong it is


@pytest.mark.parametrize("row", [*SPLIT, *UNSPLIT])
def test_it_meets_the_proven_optima(row: Optimum) -> None:
    forward, backward, weights, hop = row.times
    costs = Costs(forward, backward, weights, hop=hop)
    bound = lower_bound(costs, range(4), MICROBATCHES, memory=row.cap, split=bool(weights))
    assert bound.seconds == row.seconds


def test_it_meets_the_proven_optimum_of_two_stages_a_worker() -> None:
    forward, backward, _, hop = TWO_STAGES.times
    costs = Costs(forward, backward, 0, hop=hop)
    bound = lower_bound(costs, (0, 1, 2, 3) * 2, MICROBATCHES, memory=TWO_STAGES.cap, split=False)
    assert bound.seconds == TWO_STAGES.seconds


@pytest.mark.parametrize(("cap", "known"), V_BEST_KNOWN.items())
def test_it_stays_below_what_is_known_in_the_v(cap: int, known: int) -> None:
    placement = (0, 1, 2, 3, 3, 2, 1, 0)
    bound = lower_bound(Costs(5, 7, 4, hop=1), placement, MICROBATCHES, memory=cap, metric="span")
    assert 0.8 * known < bound.seconds <= known


def test_each_reason_comes_up_where_it_rules() -> None:
    def reason(*args: object, **options: object) -> tuple[str, Bound]:
        bound = lower_bound(*args, **options)  # pyright: ignore
        return max(bound.of, key=lambda name: bound.of[name]), bound

    assert reason(Costs(), range(4), 1, split=False)[0] == "chain"
    assert reason(Costs(), range(4), 32)[0] == "work"
    assert reason(Costs(transfer=9), range(2), 8)[0] == "link"
    assert reason(Costs(10, 12, 12, hop=1), range(4), 8, memory=4)[0] == "warm-up"
    assert reason(Costs(10, 14, 8, hop=1), range(4), 8, memory=4)[0] == "one machine"

    # One micro-batch at a time: 7 F, 7 B of 2, 6 hops of 5 there and back keep the only activation of the first worker.
    name, bound = reason(Costs(hop=5), range(7), 32, memory=1, split=False)
    assert name in ("rate", "one machine")
    assert bound.seconds == 32 * (7 * 3 + 12 * 5)
    assert "worker 0" in bound.reason


def test_one_machine_by_hand() -> None:
    """(head, seconds, tail): the second, with the longer tail, interrupts the first."""
    assert preemptive_one_machine([(0, 4, 1), (1, 2, 7)]) == 10
    assert preemptive_one_machine([(5, 1, 0)]) == 6
    assert preemptive_one_machine([]) == 0


def test_one_machine_is_below_every_order() -> None:
    random = Random("machine")
    for _ in range(200):
        jobs = [(random.randint(0, 9), random.randint(0, 5), random.randint(0, 9)) for _ in range(4)]

        def end(order: tuple[tuple[int, int, int], ...]) -> int:
            now = longest = 0
            for head, seconds, tail in order:
                now = max(now, head) + seconds
                longest = max(longest, now + tail)
            return longest

        assert preemptive_one_machine(jobs) <= min(map(end, permutations(jobs)))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"memory": 0.5}, "worker 0 has 0.5 of memory left for activations and needs at least 1"),
        ({"memory": [1, 2, 3]}, "memory has 3 limits for 2 workers"),
        ({"memory": -1}, "memory has a limit that is negative"),
        ({"footprint": Footprint(activation=[1, 2, 3])}, "footprint.activation has 3 sizes for 2 stages"),
        ({"graph": StageGraph.chain(3)}, "names a worker for 2 stages, but there are 3"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=says):
        lower_bound(Costs(), (0, 1), 4, **options)  # pyright: ignore


def test_the_bound_of_a_big_pipeline_takes_seconds() -> None:
    bound = lower_bound(Costs(hop=1), tuple(range(32)) * 2, 128, memory=128)
    assert bound.seconds >= 2 * 128 * 3 + 31 * 2
