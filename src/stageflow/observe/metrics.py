"""Figures from events: how busy the workers were, and what the rest of the time went to.

Everything here speaks of one step: the span runs from the start of the first action to the end of the last one, over
all workers. What lies outside it (the optimizer's step, loading a batch) is no part of the schedule and not counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stageflow.errors import InputError
from stageflow.observe.events import COMPUTE_KINDS, Event

CAUSES = {
    "fill": "before the worker's first action",
    "activations": "waiting right before an F",
    "gradients": "waiting right before a B or an I",
    "send": "handing messages over",
    "overhead": "everything else between two actions",
    "drain": "after the worker's last action",
}
"""The causes of idle time that `idle_by_cause` tells apart."""


@dataclass(frozen=True)
class Summary:
    """The figures of one step.

    span: seconds from the first action's start to the last one's end.
    bubble: share of the workers' time in the span that was not work, 0 to 1.
    busy: seconds of work per worker.
    idle: seconds per worker and cause (keys of `CAUSES`).
    microbatches: how many different micro-batches were seen.
    """

    span: float
    bubble: float
    busy: list[float]
    idle: list[dict[str, float]]
    microbatches: int

    @property
    def busy_share(self) -> list[float]:
        """Work over span per worker, 0 to 1."""
        return [busy / self.span if self.span else 0.0 for busy in self.busy]


def step_span(events: Iterable[Event]) -> tuple[float, float]:
    """Start of the first action and end of the last one, in the events' own seconds.

    Raises InputError when no event is an action.
    """
    actions = [event for event in events if event.kind in COMPUTE_KINDS]
    if not actions:
        raise InputError("these events hold no action (F, B, I or W), so there is no step to measure")
    return min(event.start for event in actions), max(event.end for event in actions)


def bubble(events: Sequence[Event], workers: int | None = None) -> float:
    """Share of all workers' time that was not work: 1 - busy / (workers * span), 0 to 1.

    workers: how many took part; by default the highest number seen, plus one.
    """
    return summarize(events, workers).bubble


def busy_share(events: Sequence[Event], workers: int | None = None) -> list[float]:
    """Work over span for each worker, 0 to 1."""
    return summarize(events, workers).busy_share


def idle_by_cause(events: Sequence[Event], workers: int | None = None) -> list[dict[str, float]]:
    """Seconds of idle time within the span, per worker and cause (see `CAUSES`).

    Per worker, busy time and all causes add up to the span. Events of kind "wait" tell waiting from overhead; events
    without any (a simulated schedule) have no overhead: every gap is then a wait.
    """
    return summarize(events, workers).idle


def summarize(events: Sequence[Event], workers: int | None = None) -> Summary:
    """All figures of one step at once. Raises InputError when no event is an action."""
    start, end = step_span(events)
    count = max(event.worker for event in events) + 1 if workers is None else workers
    lanes: list[list[Event]] = [[] for _ in range(count)]
    for event in events:
        if not 0 <= event.worker < count:
            raise InputError(f"event {event} is of worker {event.worker}, but there are only {count} workers")
        lanes[event.worker].append(event)
    has_waits = any(event.kind == "wait" for event in events)
    idle = [_idle(lane, start, end, has_waits) for lane in lanes]
    busy = [end - start - sum(causes.values()) for causes in idle]
    span = end - start
    return Summary(
        span=span,
        bubble=1.0 - sum(busy) / (count * span) if span else 0.0,
        busy=busy,
        idle=idle,
        microbatches=len({event.microbatch for event in events if event.kind in COMPUTE_KINDS}),
    )


def _idle(lane: Sequence[Event], start: float, end: float, has_waits: bool) -> dict[str, float]:
    """One worker's idle time by cause: walk over its actions and look into each gap."""
    causes = dict.fromkeys(CAUSES, 0.0)
    actions = sorted((event for event in lane if event.kind in COMPUTE_KINDS), key=lambda event: event.start)
    if not actions:
        causes["fill"] = end - start
        return causes
    waits = _Cover(event for event in lane if event.kind == "wait")
    sends = _Cover(event for event in lane if event.kind == "send")
    causes["fill"] = actions[0].start - start
    reached = actions[0].end
    for action in actions[1:]:
        gap = action.start - reached
        if gap > 0:
            sending = min(gap, sends.within(reached, action.start))
            waiting = min(gap - sending, waits.within(reached, action.start)) if has_waits else gap - sending
            reason = "activations" if action.kind == "F" else "gradients" if action.kind in "BI" else "overhead"
            causes[reason] += waiting
            causes["send"] += sending
            causes["overhead"] += gap - waiting - sending
        reached = max(reached, action.end)
    causes["drain"] = end - reached
    return causes


class _Cover:
    """Tells how much of a gap some events cover; gaps must be asked for in order of time."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._events = sorted(events, key=lambda event: event.start)
        self._next = 0

    def within(self, start: float, end: float) -> float:
        """Seconds between start and end that the events cover."""
        events = self._events
        while self._next < len(events) and events[self._next].end <= start:
            self._next += 1
        covered = 0.0
        for event in itertools.islice(events, self._next, None):
            if event.start >= end:
                break
            covered += min(event.end, end) - max(event.start, start)
        return covered
