"""Where a worker writes down what it did."""

from __future__ import annotations

import time
from collections.abc import Callable

from stageflow.observe.events import Event


class Recorder:
    """Events of one worker, appended as they end and drained once per step.

    One list append per event (about a quarter of a microsecond), no lock: a recorder belongs to the one thread
    that runs the worker.

    worker: number written into every event.
    clock: seconds. The default is shared by all processes of one Linux machine, so their events compare as they
        are; workers on several machines pass one that is corrected by their offset.
    """

    __slots__ = ("_append", "_events", "clock", "worker")

    def __init__(self, worker: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.worker = worker
        self.clock = clock
        self._events: list[Event] = []
        self._append = self._events.append

    def record(self, stage: int, kind: str, microbatch: int, start: float, end: float) -> None:
        """Write one event down; start and end come from `clock`."""
        self._append(Event(self.worker, stage, kind, microbatch, start, end))

    def drain(self) -> list[Event]:
        """All events since the last call, in the order they ended; the recorder is empty afterwards."""
        drained = self._events.copy()
        self._events.clear()
        return drained

    def __len__(self) -> int:
        return len(self._events)
