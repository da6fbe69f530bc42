"""The schedules that have a name, as far as they fit: what a search starts from and must never be worse than."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from stageflow.errors import StageflowError
from stageflow.plan.search.problem import Problem
from stageflow.schedule.build import SCHEDULES, build_schedule
from stageflow.schedule.costs import at_stage
from stageflow.schedule.memory import peak_memory
from stageflow.schedule.schedule import Schedule

STALE = "pipedream_2bw"  # not a step of the same mathematics


def named_schedules(problem: Problem) -> Iterator[Schedule]:
    """Every named schedule on this graph and placement that trains and keeps within the memory limits."""
    for name in SCHEDULES:
        if name == STALE:
            continue
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
            if same and schedule.has_backward and fits(problem, schedule):
                yield schedule


def fits(problem: Problem, schedule: Schedule) -> bool:
    """Whether every worker keeps within its memory."""
    if problem.memory is None:
        return True
    peaks = peak_memory(schedule, problem.footprint)
    return all(peak <= limit * (1 + 1e-9) for peak, limit in zip(peaks, problem.memory, strict=True))


def _options(problem: Problem, name: str) -> Iterator[dict[str, Any]]:
    """The defaults; where a builder takes a number of activations, also the most that fit; and the costs at hand."""
    yield {}
    if name in ("zb_h1", "greedy"):
        counts = _activations(problem)
        if counts is not None:
            yield {"memory": counts}
    if name == "greedy":
        yield {"costs": problem.costs}
        yield {"costs": problem.costs, "split": False}


def _activations(problem: Problem) -> int | None:
    """How many activations of its largest stage the poorest worker can keep; None when there is no limit."""
    counts = [
        room / activation
        for stage, worker in enumerate(problem.placement)
        if (room := problem.room[worker]) < math.inf and (activation := at_stage(problem.footprint.activation, stage))
    ]
    return int(min(counts) * (1 + 1e-9)) if counts else None
