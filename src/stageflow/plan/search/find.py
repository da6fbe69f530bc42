"""Finds a schedule for measured costs, and says how far from the best possible it can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from stageflow.errors import InputError
from stageflow.graph import StageGraph
from stageflow.plan.bounds import Bound, Metric, check_room, room_for_activations
from stageflow.plan.search.anneal import Heat
from stageflow.plan.search.candidates import SAME, Candidate, PlacementSearch, Pool, Split
from stageflow.plan.search.problem import Problem
from stageflow.schedule.costs import Costs
from stageflow.schedule.memory import Footprint
from stageflow.schedule.placement import PLACEMENTS, place
from stageflow.schedule.schedule import Schedule
from stageflow.schedule.simulation import Simulation

LETTERS_PER_SECOND = 250_000  # what a slow core decodes; a fixed rate, so that the result never depends on the clock
EXPLORING, ROUNDS = 0.25, (0.25, 0.3, 0.2)  # shares of the budget: list scheduling, then walks
WALKERS = (5, 2, 1)  # how many walks in each round, from the best found so far
# On hard cases of benchmarks/search these end 0.4 points nearer to the bound than twice the heat does.
HEATS = (Heat(0.007, 0.0005), Heat(0.004, 0.0003), Heat(0.002, 0.0001))


@dataclass(frozen=True)
class Found:
    """What a search found.

    schedule: the best; a named one keeps its name, any other is called "searched".
    simulation: of the schedule with the costs. seconds: its makespan or span, whichever was asked for.
    bound: that no schedule on any of the placements tried can beat.
    """

    schedule: Schedule
    simulation: Simulation
    seconds: float
    bound: Bound

    @property
    def gap(self) -> float:
        """By what share of the bound the schedule is above it: 0 is proven best, up to rounding."""
        return max(0.0, self.seconds / self.bound.seconds - 1) if self.bound.seconds else 0.0


def find_schedule(
    *,
    stages: int,
    microbatches: int,
    costs: Costs,
    workers: int | None = None,
    placement: str | Sequence[int] | None = None,
    graph: StageGraph | None = None,
    footprint: Footprint | None = None,
    memory: float | Sequence[float] | None = None,
    split: Split = "auto",
    metric: Metric = "makespan",
    seconds: float = 10.0,
    seed: int = 0,
) -> Found:
    """The fastest schedule found within a memory limit.

    It starts from the best named schedule that fits and is never slower. Rules of list scheduling give others
    (`explore`), local search improves the best of them (`anneal`), and each backward is split into I and W or left
    whole as it pays. It ends early when a schedule meets the lower bound.

    stages, microbatches: how many. costs: seconds.
    workers: default one per stage.
    placement: by name, or the worker of each stage; default the best of contiguous, loop and fold.
    graph: which stage feeds which; default a chain.
    footprint, memory: bytes that stages keep, and that workers have (one number, or one per worker; None: no limit).
        `Footprint()` counts activations, each from the start of its F to the end of its B or W; memory says how many.
    split: whether backwards are split: "auto" each as it pays, True all, False none.
    metric: what to make short: "makespan", or "span", what a step costs when steps follow each other without a flush.
    seconds: how long to search, on a slow core. It is counted in work, not by the clock: the same arguments always give
        the same schedule. Named schedules are tried however little it is.
    seed: of the random choices.

    Raises InputError when the arguments don't fit each other, or when a worker has no memory for one activation of each
    of its stages.
    """
    graph = graph or StageGraph.chain(stages)
    if graph.n_stages != stages:
        raise InputError(f"the graph has {graph.n_stages} stages, but stages={stages}")
    if microbatches < 1:
        raise InputError(f"needs microbatches >= 1, got {microbatches}")
    if metric not in ("makespan", "span"):
        raise InputError(f"unknown metric {metric!r}: use 'makespan' or 'span'")
    if split not in (True, False, "auto"):
        raise InputError(f"unknown split {split!r}: use 'auto', True or False")
    if not 0 <= seconds < float("inf"):
        raise InputError(f"seconds={seconds} is no time to search: give a number from 0 on")
    costs.check(stages, graph.edges)
    footprint = footprint or Footprint()
    footprint.check(stages)
    problems = [
        _problem(graph, placed, microbatches, costs, footprint, memory, metric)
        for placed in _placements(stages, workers, placement)
    ]
    searches = [
        PlacementSearch(problem, split, Random(seed * 1_000_003 + number)) for number, problem in enumerate(problems)
    ]
    bound = min((search.bound for search in searches), key=lambda bound: bound.seconds)
    budget = int(seconds * LETTERS_PER_SECOND)
    best = _best(searches, bound, budget)
    schedule = best.schedule()
    schedule.validate()
    simulation = schedule.simulate(costs)
    return Found(schedule, simulation, getattr(simulation, metric), bound)


def _best(searches: Sequence[PlacementSearch], bound: Bound, budget: int) -> Candidate:
    """Explore all placements, then walk from the best candidates of any, fewer and longer each round."""
    enough = bound.seconds * (1 + SAME)
    pool = Pool()
    pool.add(candidate for search in searches for candidate in search.start())
    for search in searches:
        if pool.seconds > enough and budget:
            pool.add(search.explore(1 + int(EXPLORING * budget / len(searches))))
    if not pool.candidates:
        raise InputError(
            "no schedule was found that keeps within the memory limits: what I leaves for W may need more than "
            "there is; use split=False, more memory or smaller micro-batches"
        )
    for walkers, share, heat in zip(WALKERS, ROUNDS, HEATS, strict=True):
        for candidate in pool.best(walkers):
            if pool.seconds > enough and budget:
                search = candidate.search
                pool.add([search.walk(candidate, 1 + int(share * budget / walkers), heat, polish=walkers == 1)])
    best = pool.winner()
    return best.search.merged(best)


def _placements(stages: int, workers: int | None, placement: str | Sequence[int] | None) -> list[tuple[int, ...]]:
    if placement is not None:
        if workers is None:
            workers = stages if isinstance(placement, str) else max(placement, default=0) + 1
        return [place(placement, stages, workers)]
    return list(dict.fromkeys(place(name, stages, workers or stages) for name in PLACEMENTS))


def _problem(
    graph: StageGraph,
    placement: tuple[int, ...],
    microbatches: int,
    costs: Costs,
    footprint: Footprint,
    memory: float | Sequence[float] | None,
    metric: Metric,
) -> Problem:
    room = room_for_activations(footprint, placement, memory)
    check_room(footprint, placement, room)
    limits = None
    if memory is not None:
        limits = tuple(memory) if isinstance(memory, Sequence) else (memory,) * len(room)
    return Problem(graph, placement, microbatches, costs, footprint, limits, metric)
