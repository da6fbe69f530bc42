"""The schedules that have a name, as far as they fit: what a search starts from and must never be worse than."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

from stageflow.errors import StageflowError
from stageflow.plan.search.problem import Problem
from stageflow.schedule.actions import Orders
from stageflow.schedule.build import SCHEDULES, build_schedule
from stageflow.schedule.costs import at_stage
from stageflow.schedule.families import FAMILIES
from stageflow.schedule.memory import peak_memory
from stageflow.schedule.placement import loop
from stageflow.schedule.schedule import Schedule


def named_schedules(problem: Problem) -> Iterator[Schedule]:
    """Every named schedule on this graph and placement that trains and keeps within the memory limits, each once."""
    seen: set[Orders] = set()
    for name in SCHEDULES:
        for options in _options(problem, name):
            try:
                schedule = build_schedule(
                    name,
                    stages=problem.graph.n_stages,
                    microbatches=problem.microbatches,
                    placement=problem.placement,
                    graph=problem.graph,
                    **options,
                )
            except StageflowError:
                continue  # it refuses these counts, and says so to whoever asks for it by name
            same = schedule.placement == problem.placement and schedule.graph == problem.graph
            if same and schedule.has_backward and schedule.orders not in seen and fits(problem, schedule):
                seen.add(schedule.orders)
                yield schedule


def fits(problem: Problem, schedule: Schedule) -> bool:
    """Whether every worker keeps within its memory."""
    if problem.memory is None:
        return True
    peaks = peak_memory(schedule, problem.footprint)
    return all(peak <= limit * (1 + 1e-9) for peak, limit in zip(peaks, problem.memory, strict=True))


def _options(problem: Problem, name: str) -> Iterator[dict[str, Any]]:
    """The defaults, and what else the builder takes, together: times, as many activations as fit, larger groups."""
    takes = FAMILIES[name].options
    counts = _activations(problem)
    groups = {problem.n_workers + 1, -(-problem.microbatches // 2), problem.microbatches}
    in_a_loop = problem.placement == loop(len(problem.placement), problem.n_workers)  # elsewhere groups change nothing
    values: dict[str, list[Any]] = {
        "costs": [problem.costs],
        "memory": [] if counts is None else [counts],
        "split": [False],
        "group": [group for group in sorted(groups) if in_a_loop and group > problem.n_workers],
    }
    choices = [[{}, *({option: value} for value in values.get(option, []))] for option in takes]
    for chosen in product(*choices):
        yield {option: value for part in chosen for option, value in part.items()}


def _activations(problem: Problem) -> int | None:
    """How many activations of its largest stage the poorest worker can keep; None when there is no limit."""
    counts = [
        room / activation
        for stage, worker in enumerate(problem.placement)
        if (room := problem.room[worker]) < math.inf and (activation := at_stage(problem.footprint.activation, stage))
    ]
    return int(min(counts) * (1 + 1e-9)) if counts else None
