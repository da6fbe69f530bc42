"""What a schedule would take, from the time of each action and of each hop between workers.

Every worker runs its own actions in order; an action starts as soon as its worker is free and everything it needs has
arrived. A value that crosses to another worker arrives ``hop`` after the action that made it ended; sending keeps
neither worker busy. With the orders given there is nothing to choose, so the times are exact longest paths.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from stageflow.errors import InputError
from stageflow.observe.events import Event
from stageflow.schedule.actions import KINDS, Action
from stageflow.schedule.walk import walk

if TYPE_CHECKING:
    from stageflow.schedule.schedule import Schedule

PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Seconds that each kind of action takes; one number for all stages, or one per stage.

    forward, backward_input, backward_weight: time of F, I and W.
    backward: time of a whole B; None: that of I and W together.
    hop: from the end of an action until its value is at another worker; one number, or one per edge of the graph
        as {(producer, consumer): seconds}, used for values and gradients alike.
    """

    forward: PerStage = 1.0
    backward_input: PerStage = 1.0
    backward_weight: PerStage = 1.0
    backward: PerStage | None = None
    hop: float | Mapping[tuple[int, int], float] = 0.0

    def of(self, action: Action) -> float:
        """Seconds of one action."""
        kind, stage, _ = action
        if kind == "F":
            return _at(self.forward, stage)
        if kind == "I":
            return _at(self.backward_input, stage)
        if kind == "W":
            return _at(self.backward_weight, stage)
        if self.backward is None:
            return _at(self.backward_input, stage) + _at(self.backward_weight, stage)
        return _at(self.backward, stage)

    def hop_between(self, source: int, target: int) -> float:
        """Seconds for a value of stage ``source`` to reach stage ``target`` on another worker."""
        if not isinstance(self.hop, Mapping):
            return self.hop
        return self.hop[min(source, target), max(source, target)]

    def check(self, stages: int, edges: frozenset[tuple[int, int]]) -> None:
        """Raise InputError unless there is a time for every stage and edge, finite and not negative."""
        for name in ("forward", "backward_input", "backward_weight", "backward"):
            given: PerStage | None = getattr(self, name)
            if isinstance(given, Sequence) and len(given) != stages:
                raise InputError(f"costs.{name} has {len(given)} times for {stages} stages")
            times = given if isinstance(given, Sequence) else (given or 0.0,)
            if not all(map(_is_time, times)):
                raise InputError(f"costs.{name} has a time that is negative or not finite: {given}")
        if isinstance(self.hop, Mapping):
            missing = sorted(edges - set(self.hop))
            if missing:
                raise InputError(f"costs.hop has no time for the edges {missing}")
        if not all(map(_is_time, self.hop.values() if isinstance(self.hop, Mapping) else (self.hop,))):
            raise InputError(f"costs.hop has a time that is negative or not finite: {self.hop}")


def _is_time(value: float) -> bool:
    return 0.0 <= value < math.inf


def _at(times: PerStage, stage: int) -> float:
    return times[stage] if isinstance(times, Sequence) else times


class Times(NamedTuple):
    """When an action starts and ends, in seconds from the start of the step."""

    start: float
    end: float


class Idle(NamedTuple):
    """Where one worker's idle time lies, in seconds: before its first action, between actions, after its last."""

    warm_up: float
    waiting: float
    drain: float


@dataclass(frozen=True)
class Simulation:
    """A simulated step.

    times: start and end of every action,
        in an order in which none comes before what it needs, and those of a worker as it runs them.
    placement: the worker of each stage.
    workers: how many.
    """

    times: dict[Action, Times] = field(repr=False)
    placement: tuple[int, ...]
    workers: int

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds of work per worker."""
        total = [0.0] * self.workers
        for action, (start, end) in self.times.items():
            total[self.placement[action.stage]] += end - start
        return tuple(total)

    @cached_property
    def _extent(self) -> tuple[Times, ...]:
        extent: dict[int, Times] = {}
        for action, (start, end) in self.times.items():
            worker = self.placement[action.stage]
            extent[worker] = Times(extent[worker].start if worker in extent else start, end)
        return tuple(extent.get(worker, Times(0.0, 0.0)) for worker in range(self.workers))

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end over all workers."""
        return max(end for _, end in self._extent)

    @property
    def spans(self) -> tuple[float, ...]:
        """Per worker, seconds from its first start to its last end."""
        return tuple(end - start for start, end in self._extent)

    @property
    def span(self) -> float:
        """The longest of `spans`: what one step costs when steps follow each other without a flush."""
        return max(self.spans)

    @property
    def bubble(self) -> float:
        """Share of `makespan` in which workers idle, over all workers: 0 is perfect."""
        return 1 - sum(self.busy) / (self.makespan * self.workers) if self.makespan else 0.0

    @property
    def bubbles(self) -> tuple[float, ...]:
        """Share of `makespan` in which each worker idles."""
        return tuple(1 - busy / self.makespan if self.makespan else 0.0 for busy in self.busy)

    @property
    def span_bubble(self) -> float:
        """(span - work of the busiest worker) / span, the measure of the zero-bubble papers."""
        return (self.span - max(self.busy)) / self.span if self.span else 0.0

    @property
    def idle(self) -> tuple[Idle, ...]:
        """Per worker, its idle seconds by cause; they add up to makespan - busy."""
        return tuple(
            Idle(start, end - start - busy, self.makespan - end)
            for (start, end), busy in zip(self._extent, self.busy, strict=True)
        )

    def events(self) -> list[Event]:
        """The step as `observe` draws and writes it."""
        return [
            Event(self.placement[action.stage], action.stage, action.kind, action.microbatch, start, end)
            for action, (start, end) in self.times.items()
        ]


def simulate(schedule: Schedule, costs: Costs) -> Simulation:
    """Run a schedule on paper.

    Raises InputError when the costs don't fit the stages, ScheduleError when the schedule deadlocks.
    """
    costs.check(schedule.n_stages, schedule.graph.edges)
    placement = schedule.placement
    seconds = {(kind, s): costs.of(Action(kind, s, 0)) for kind in KINDS for s in range(schedule.n_stages)}
    free = [0.0] * schedule.n_workers
    times: dict[Action, Times] = {}
    for worker, action, needs in walk(schedule):
        start = free[worker]
        for need in needs:
            arrival = times[need].end
            if placement[need.stage] != worker:
                arrival += costs.hop_between(need.stage, action.stage)
            if arrival > start:
                start = arrival
        free[worker] = end = start + seconds[action.kind, action.stage]
        times[action] = Times(start, end)
    return Simulation(times, placement, schedule.n_workers)
