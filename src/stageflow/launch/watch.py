"""How a rank without a driver learns, in the middle of a call, that another rank failed."""

from __future__ import annotations

import threading
import time

from torch._C._distributed_c10d import Store

from stageflow.errors import Aborted
from stageflow.launch.agreement import Record, failing

_WATCH_EVERY = 0.2  # seconds between two looks at the other ranks while a call runs


class LocalBoard:
    """Where this rank says what it does; the watcher shows it to the others."""

    def __init__(self) -> None:
        self.action = ""
        self.waits_for = ""
        self.since = time.monotonic()
        self.changes = 0

    def set(self, action: str, waits_for: str = "") -> None:
        self.action, self.waits_for = action, waits_for
        self.since = time.monotonic()
        self.changes += 1

    def __str__(self) -> str:
        waiting = f", waiting for {self.waits_for}," if self.waits_for else ""
        return f"{self.action or 'nothing yet'}{waiting} for {time.monotonic() - self.since:.1f} s"


class Notes:
    """One record and one line of status for each rank, in the job's store. One object for each thread that uses it."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._records = [f"record/{other}" for other in range(size)]
        self._lines = [f"line/{other}" for other in range(size)]

    def publish(self, record: Record) -> None:
        self._store.set(self._records[self._rank], record.dumps())

    def show(self, line: str) -> None:
        self._store.set(self._lines[self._rank], line)

    def records(self) -> list[Record]:
        return [Record.loads(data) for data in self._store.multi_get(self._records)]

    def lines(self) -> list[str]:
        return [line.decode(errors="replace") for line in self._store.multi_get(self._lines)]


class Watcher:
    """A thread that ends this rank's waits when another rank's call failed."""

    def __init__(self, notes: Notes, board: LocalBoard) -> None:
        self._notes = notes
        self._board = board
        self._call = 0
        self._running = threading.Event()
        self._over = False
        self.stop = False
        self._thread = threading.Thread(target=self._watch, name="stageflow-watcher", daemon=True)
        self._thread.start()

    def begin(self, call: int) -> None:
        self._call, self.stop = call, False
        self._running.set()

    def end(self) -> None:
        self._running.clear()
        self.stop = False

    def check(self) -> None:
        if self.stop:
            raise Aborted("this rank was told to stop, because another rank failed")

    def close(self) -> None:
        self._over = True
        self._running.set()
        self._thread.join(2.0)

    def _watch(self) -> None:
        while self._running.wait() and not self._over:
            call = self._call
            try:
                self._notes.show(str(self._board))
                found = failing(self._notes.records(), call) is not None
            except RuntimeError:  # the store is gone, and the rank or agent that held it
                found = True
            if found and self._running.is_set() and call == self._call:
                self.stop = True
            time.sleep(_WATCH_EVERY)
