"""The driver's loop around the supervisor: shared by thread and process groups, which only add how to act."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Self

from stageflow.errors import InputError, LaunchError, PipelineClosed, StageFailed, TransportError
from stageflow.launch import supervisor as sv
from stageflow.launch.base import Arguments, Call, WorkerGroup, WorkerStatus
from stageflow.launch.board import StatusBoard
from stageflow.launch.failure import Failure, kind_of, stage_failed, worker_died, worker_hung
from stageflow.launch.servant import BUILD
from stageflow.transport.base import Endpoint, Interrupt

_TICK = 0.2
"""Seconds between two looks at whether the workers still get on."""


class SupervisedGroup(WorkerGroup):
    """Feeds what happens to a `Supervisor` and obeys it.

    A subclass fills ``_results`` and ``_failures`` in `_poll` and says how to post, interrupt, kill and look.
    """

    def __init__(self, size: int, board: StatusBoard, grace: float) -> None:
        self.size = size
        self._board = board
        self._supervisor = sv.Supervisor(size, grace=grace)
        self._results: dict[int, Any] = {}
        self._failures: dict[int, Failure] = {}
        self._exits: dict[int, int | None] = {}
        self._endpoint: Endpoint | None = None
        self._timeout = 0.0
        self._verdict: sv.Conclude | None = None
        self._error: BaseException | None = None
        self._snapshot: list[WorkerStatus] = []
        self._stacks: dict[int, str] = {}
        self._owner = os.getpid()
        self._closed = False
        self._reason = ""
        self._last: list[WorkerStatus] = []

    # What a subclass adds.

    @abstractmethod
    def _pack(self, method: str, per_worker: Sequence[Arguments], common: Sequence[Any]) -> list[Any]:
        """One message per worker, ready to post. Raises what refuses them, before any was posted."""

    @abstractmethod
    def _post(self, rank: int, message: Any) -> None:
        """Hand a worker its message."""

    @abstractmethod
    def _poll(self, wait: float) -> list[sv.Notice]:
        """What happened, waiting up to ``wait`` seconds for the first thing."""

    @abstractmethod
    def _interrupt(self) -> None:
        """Make every worker's ``interrupt`` raise Aborted."""

    @abstractmethod
    def _resume(self) -> None:
        """Undo `_interrupt`."""

    @abstractmethod
    def _dump(self, ranks: Sequence[int]) -> dict[int, str]:
        """The Python stacks of these workers, as far as they can be had."""

    @abstractmethod
    def _kill(self) -> None:
        """End all workers now; free everything but what status() reads."""

    @abstractmethod
    def _identity(self, rank: int) -> tuple[int, bool]:
        """A worker's process id, and whether it runs."""

    @abstractmethod
    def _free(self) -> None:
        """End all workers, gently where none is busy, and free everything."""

    # The public side.

    @property
    def usable(self) -> bool:
        return not self._closed and self._supervisor.phase == "idle"

    @property
    def endpoint(self) -> Endpoint:
        self._check_owner()  # a fork's messages would reach workers that wait for the parent's
        if self._closed:
            raise PipelineClosed("these workers were closed, and the driver's endpoint with them; start a new group")
        if self._endpoint is None:
            raise LaunchError("this group was started without wiring=, so it has no endpoints")
        return self._endpoint

    def _close_endpoint(self) -> None:
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.close()

    def cast(
        self, method: str, per_worker: Sequence[Arguments] | None = None, *, timeout: float, common: Sequence[Any] = ()
    ) -> Call:
        if per_worker is None:
            per_worker = [((), {})] * self.size
        if len(per_worker) != self.size:
            raise InputError(f"{method}: arguments for {len(per_worker)} workers given, the group has {self.size}")
        if timeout <= 0:
            raise InputError(f"{method}: timeout must be positive seconds, got {timeout}")
        self._check_open()
        messages = self._pack(method, per_worker, common)
        return self._launch(messages, timeout)

    def _launch(self, messages: Sequence[Any], timeout: float) -> Call:
        self._results.clear()
        self._failures.clear()
        self._stacks = {}
        self._verdict = None
        self._error = None
        self._timeout = timeout
        self._feed(sv.Started(time.monotonic(), timeout, self._board.progress()))
        running = _Running(self)
        try:
            for rank, message in enumerate(messages):
                self._post(rank, message)
        except BaseException as error:
            running.__exit__(type(error), error, None)
            raise
        return running

    def _begin(self, timeout: float) -> Self:
        """Make the services; on failure nothing is left."""
        try:
            with self._launch(self._pack(BUILD, [((), {})] * self.size, ()), timeout) as running:
                running.results()
        except StageFailed as error:
            self.close()
            raise LaunchError(f"a worker could not be started: {error}") from error.__cause__
        except BaseException:
            self.close()
            raise
        return self

    def _check_owner(self) -> None:
        if self._owner != os.getpid():
            raise PipelineClosed(f"these workers belong to process {self._owner}, of which this one was forked")

    def _check_open(self) -> None:
        self._check_owner()
        if self._closed:
            why = f" after: {self._reason}" if self._reason else ""
            raise PipelineClosed(f"these workers were closed{why}; start a new group")
        self._pump(0.0)
        if self._supervisor.phase == "closed" and self._error is not None:  # somebody died between two calls
            self.close()
            raise self._error
        if self._supervisor.phase != "idle":
            raise PipelineClosed("a call is still running on these workers: take its results() first")

    def status(self) -> list[WorkerStatus]:
        if self._closed:
            return self._last
        now = time.monotonic()
        return [self._look(rank, now) for rank in range(self.size)]

    def _look(self, rank: int, now: float) -> WorkerStatus:
        entry = self._board.read(rank)
        since = now - entry.since if entry.changes else 0.0
        pid, alive = self._identity(rank)
        return WorkerStatus(rank, entry.action, entry.waits_for, since, pid, alive, alive and _is_stopped(pid))

    def close(self) -> None:
        if self._closed:
            return
        self._last = [replace(status, alive=False) for status in self.status()]
        self._closed = True
        if self._owner == os.getpid():
            self._free()

    # The loop.

    def _pump(self, wait: float) -> None:
        """Take in what happened and do what the supervisor says."""
        for notice in self._poll(wait):
            self._feed(notice)
        self._feed(sv.Tick(time.monotonic(), self._board.progress()))

    def _feed(self, notice: sv.Notice) -> None:
        for command in self._supervisor.handle(notice):
            match command:
                case sv.Snapshot():
                    self._snapshot = self.status()
                case sv.Stop():
                    self._interrupt()
                case sv.Resume():
                    self._resume()
                case sv.Dump():
                    self._stacks = self._dump(command.ranks)
                case sv.Kill():
                    self._kill()
                case sv.Conclude():
                    self._conclude(command)

    def _conclude(self, verdict: sv.Conclude) -> None:
        self._verdict = verdict
        match verdict.kind:
            case "failed" if verdict.rank in self._failures:
                self._error = stage_failed(self._failures[verdict.rank], closed=verdict.closed, stuck=verdict.stuck)
            case "died":
                assert verdict.rank is not None
                code = self._exits[verdict.rank]
                faults = self._dump([verdict.rank]).get(verdict.rank, "")
                self._error = worker_died(self._snapshot[verdict.rank], code, faults)
            case "hung":
                said = [failure for failure in self._failures.values() if failure.kind == "timeout"]
                self._error = worker_hung(self._snapshot, self._timeout, self._stacks, said)
            case _:
                pass
        if verdict.closed:
            self._reason = str(self._error or "the driver's own part failed and a worker did not stop").partition("\n")[
                0
            ]

    @contextlib.contextmanager
    def _closed_on_interrupt(self) -> Iterator[None]:
        """Ctrl-C while waiting for the workers ends them."""
        try:
            yield
        except Exception:
            raise
        except BaseException:
            self.close()
            raise

    def _settle(self) -> None:
        """Wait until the call under way is over, one way or the other."""
        while self._verdict is None:
            self._pump(_TICK if self._supervisor.phase == "running" else 0.02)

    def _driver_interrupt(self, fd: int) -> Interrupt:
        """For the driver's own endpoint, which must not keep the group alive. fd: readable when there is news."""
        check = weakref.WeakMethod(self._check)

        def ask() -> None:
            if (method := check()) is not None:
                method()

        return Interrupt(ask, fd)

    def _check(self) -> None:
        """What the driver's own endpoint asks while it waits: raises the error of a worker that failed meanwhile."""
        if self._verdict is None:
            self._pump(0.0)
        if self._supervisor.phase == "stopping":
            self._settle()
        if self._error is not None:
            raise self._error


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):  # gone, or a system without /proc
        return False


class _Running(Call):
    """The one call under way on a `SupervisedGroup`."""

    def __init__(self, group: SupervisedGroup) -> None:
        self._group = group

    def results(self) -> list[Any]:
        group = self._group
        with group._closed_on_interrupt():
            group._settle()
        if group._supervisor.phase == "closed":
            group.close()
        if group._error is not None:
            raise group._error
        taken, group._results = group._results, {}  # the group keeps nothing of a call alive
        return [taken[rank] for rank in range(group.size)]

    def __enter__(self) -> Call:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        group = self._group
        if error is not None and not isinstance(error, Exception):
            group.close()
            return
        if group._verdict is None:
            failure = kind_of(error) if error is not None else "error"
            now = time.monotonic()
            with group._closed_on_interrupt():
                group._feed(sv.Failed(now, group.size, now, failure))
                group._settle()
        if group._supervisor.phase == "closed":
            group.close()
        cause, group._error = group._error, None  # an exception's frames hold tensors
        group._failures.clear()
        if isinstance(error, TransportError) and cause is not None:
            raise cause  # the driver's own transfer failed because of this
