"""What a simulated step was: when each action ran, where the idle time lies, how much memory was kept when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from stageflow.observe.events import Event
from stageflow.schedule.actions import Action
from stageflow.schedule.memory import Footprint, levels_of, static_memory


class Times(NamedTuple):
    """When something starts and ends, in seconds from the start of the step."""

    start: float
    end: float


class Idle(NamedTuple):
    """Where one worker's idle time lies, in seconds.

    warm_up: before its first action.
    waiting: between actions, while something that the next one needs is not made yet.
    transfer: between actions, while all that the next one needs is made, but some of it is still on a link.
    drain: after its last action, the reductions of gradients at the end of the step included.
    """

    warm_up: float
    waiting: float
    transfer: float
    drain: float


@dataclass(frozen=True)
class Simulation:
    """A simulated step.

    times: start and end of every action,
        in an order in which none comes before what it needs, and those of a worker as it runs them.
    placement: the worker of each stage.
    workers: how many.
    on_links: per worker, seconds between its actions in which it waited for a value on a link.
    reductions: start and end of the reduction of each stage that has one.
    """

    times: Mapping[Action, Times] = field(repr=False)
    placement: tuple[int, ...]
    workers: int
    on_links: tuple[float, ...]
    reductions: Mapping[int, Times]

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds of work per worker."""
        total = [0.0] * self.workers
        for action, (start, end) in self.times.items():
            total[self.placement[action.stage]] += end - start
        return tuple(total)

    @cached_property
    def _active(self) -> tuple[Times, ...]:
        """Per worker, the start of its first action and the end of its last one."""
        active: dict[int, Times] = {}
        for action, (start, end) in self.times.items():
            worker = self.placement[action.stage]
            active[worker] = Times(active[worker].start if worker in active else start, end)
        return tuple(active.get(worker, Times(0.0, 0.0)) for worker in range(self.workers))

    @cached_property
    def _ends(self) -> tuple[float, ...]:
        """Per worker, when its last action and the reductions of its stages are over."""
        ends = [end for _, end in self._active]
        for stage, (_, end) in self.reductions.items():
            worker = self.placement[stage]
            ends[worker] = max(ends[worker], end)
        return tuple(ends)

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end, of actions and reductions, over all workers."""
        return max(self._ends)

    @property
    def spans(self) -> tuple[float, ...]:
        """Per worker, seconds from the start of its first action to the end of its last one and of its reductions."""
        return tuple(end - start for (start, _), end in zip(self._active, self._ends, strict=True))

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
            Idle(start, end - start - busy - on_link, on_link, self.makespan - end)
            for (start, end), busy, on_link in zip(self._active, self.busy, self.on_links, strict=True)
        )

    def memory(self, footprint: Footprint) -> tuple[tuple[tuple[float, float], ...], ...]:
        """Per worker, (seconds, bytes) wherever what it keeps changes: that many bytes from then on.

        The most of each worker is what `peak_memory` says. Raises InputError when the footprint doesn't fit the
        stages.
        """
        footprint.check(len(self.placement))
        orders: list[list[Action]] = [[] for _ in range(self.workers)]
        for action in self.times:
            orders[self.placement[action.stage]].append(action)
        static = static_memory(footprint, self.placement, self.workers)
        if all(action.kind == "F" for action in self.times):
            return tuple(((0.0, kept),) for kept in static)
        history: list[tuple[tuple[float, float], ...]] = []
        for order, kept in zip(orders, static, strict=True):
            steps = [(0.0, kept)]
            for action, during, after in levels_of(order, footprint, kept):
                start, end = self.times[action]
                _add_step(steps, start, during)
                _add_step(steps, end, after)
            history.append(tuple(steps))
        return tuple(history)

    def events(self) -> list[Event]:
        """The step's actions and reductions as `observe` draws and writes them."""
        place = self.placement
        actions = [
            Event(place[action.stage], action.stage, action.kind, action.microbatch, start, end)
            for action, (start, end) in self.times.items()
        ]
        reductions = [
            Event(place[stage], stage, "reduce", -1, start, end) for stage, (start, end) in self.reductions.items()
        ]
        return actions + reductions


def _add_step(steps: list[tuple[float, float]], time: float, level: float) -> None:
    """Note a new level; what fell and rises again in the same moment has not fallen."""
    if level == steps[-1][1]:
        return
    if steps[-1][0] == time and level > steps[-1][1]:
        steps.pop()
        if steps and steps[-1][1] == level:
            return
    steps.append((time, level))
