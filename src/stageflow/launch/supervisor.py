"""Decides what happens to a group of workers. A pure machine: notices in, commands out; no clock, no process, no pipe.

              Started                    last Finished
    idle ───────────────► running ──────────────────────────► idle   Conclude(done)
                             │ Failed (a worker, or the driver as number ``size``)
                             ▼
                          stopping ── all idle ─────────────► idle   Resume, Conclude(failed)
                             │ grace over, a death, a hang
                             ▼
                           closed                                    Kill, Conclude(failed | died | hung)

Which of several failures is told as the cause: a worker's own exception before anything; a death before the broken
transfers that follow from it; a hang where all that anybody knows is that nothing came.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FailureKind = Literal["error", "transport", "timeout", "aborted"]
WEIGHT: dict[FailureKind, int] = {"error": 0, "timeout": 1, "transport": 2, "aborted": 3}


@dataclass(frozen=True)
class Started:
    """A call was sent to all workers. timeout: seconds without progress that count as a hang."""

    now: float
    timeout: float
    progress: int = 0


@dataclass(frozen=True)
class Finished:
    """A worker's result is here."""

    now: float
    rank: int


@dataclass(frozen=True)
class Failed:
    """A worker's call ended with an exception and the worker is idle; rank == size: the driver's own part failed.

    when: the moment it was raised, on the same clock as ``now``.
    kind: "error" its own code; "transport" a peer seemed gone; "timeout" nothing came; "aborted" it was told to stop.
    """

    now: float
    rank: int
    when: float
    kind: FailureKind


@dataclass(frozen=True)
class Exited:
    """A worker is gone."""

    now: float
    rank: int


@dataclass(frozen=True)
class Tick:
    """Time passed. progress: any number that changes whenever a worker gets on."""

    now: float
    progress: int = 0


Notice = Started | Finished | Failed | Exited | Tick


@dataclass(frozen=True)
class Snapshot:
    """Keep the status of all workers as it is now, for the error text."""


@dataclass(frozen=True)
class Stop:
    """Tell all workers to stop what they do."""


@dataclass(frozen=True)
class Resume:
    """Take `Stop` back: everybody has stopped."""


@dataclass(frozen=True)
class Dump:
    """Get the stacks of these workers, for the error text."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Kill:
    """End all workers at once."""


@dataclass(frozen=True)
class Conclude:
    """The call is over.

    rank: whose failure or death it was; None for "done", "hung".
    closed: the workers are gone. stuck: those that did not stop when told to.
    """

    kind: Literal["done", "failed", "died", "hung"]
    rank: int | None = None
    closed: bool = False
    stuck: tuple[int, ...] = ()


Command = Snapshot | Stop | Resume | Dump | Kill | Conclude


class Supervisor:
    """See the module's picture.

    size: number of workers.
    grace: seconds that interrupted workers get to become idle before they are killed.
    settle: seconds that a failed transfer waits for the death that may explain it.
    """

    def __init__(self, size: int, grace: float = 1.5, settle: float = 0.3) -> None:
        self.size = size
        self.grace = grace
        self.settle = settle
        self.phase: Literal["idle", "running", "stopping", "closed"] = "idle"
        self._busy: set[int] = set()
        self._failures: list[Failed] = []
        self._timeout = 0.0
        self._progress: int | None = None
        self._moved = 0.0
        self._stopped_at = 0.0

    def handle(self, notice: Notice) -> list[Command]:
        """Take one notice; what to do now, in order."""
        match notice:
            case _ if self.phase == "closed":
                return []
            case Started():
                return self._start(notice)
            case Finished():
                return self._finish(notice)
            case Failed():
                return self._fail(notice)
            case Exited():
                return self._exit(notice)
            case Tick():
                return self._tick(notice)

    def _start(self, notice: Started) -> list[Command]:
        if self.phase != "idle":
            raise RuntimeError(f"a call was started while the group was {self.phase}")
        self.phase = "running"
        self._busy = set(range(self.size))
        self._failures = []
        self._timeout = notice.timeout
        self._progress = notice.progress
        self._moved = notice.now
        return []

    def _finish(self, notice: Finished) -> list[Command]:
        self._busy.discard(notice.rank)
        self._moved = notice.now
        if self.phase == "running":
            if self._busy:
                return []
            self.phase = "idle"
            return [Conclude("done")]
        return self._stopped(notice.now)

    def _fail(self, notice: Failed) -> list[Command]:
        if self.phase == "idle":
            return []
        self._busy.discard(notice.rank)
        self._failures.append(notice)
        if self.phase == "stopping":
            return self._stopped(notice.now)
        self.phase = "stopping"
        self._stopped_at = notice.now
        return [Snapshot(), Stop(), *self._stopped(notice.now)]

    def _exit(self, notice: Exited) -> list[Command]:
        self._busy.discard(notice.rank)
        cause = self._cause()
        self.phase = "closed"
        if cause is not None and cause.kind == "error":
            return [Kill(), Conclude("failed", cause.rank, closed=True)]
        return [Snapshot(), Kill(), Conclude("died", notice.rank, closed=True)]

    def _tick(self, notice: Tick) -> list[Command]:
        if self.phase == "idle":
            return []
        if self.phase == "stopping":
            return self._stopped(notice.now)
        if notice.progress != self._progress:
            self._progress = notice.progress
            self._moved = notice.now
        if notice.now - self._moved < self._timeout:
            return []
        self.phase = "closed"
        stuck = tuple(sorted(self._busy))
        return [Snapshot(), Dump(stuck), Kill(), Conclude("hung", closed=True, stuck=stuck)]

    def _stopped(self, now: float) -> list[Command]:
        """What follows while stopping: nothing yet, or the end of the call."""
        cause = self._cause()
        assert cause is not None
        waited = now - self._stopped_at
        if self._busy and waited < self.grace:
            return []
        if not self._busy and cause.kind == "transport" and waited < self.settle:
            return []
        hung = cause.kind == "timeout"
        if not self._busy and not hung:
            self.phase = "idle"
            return [Resume(), Conclude("failed", cause.rank)]
        self.phase = "closed"
        stuck = tuple(sorted(self._busy))
        verdict = Conclude("hung" if hung else "failed", None if hung else cause.rank, closed=True, stuck=stuck)
        return [Dump(stuck), Kill(), verdict]

    def _cause(self) -> Failed | None:
        return min(self._failures, key=lambda f: (WEIGHT[f.kind], f.when), default=None)
