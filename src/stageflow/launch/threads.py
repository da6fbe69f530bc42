"""Workers as threads of the driver's own process: for tests, for debugging, and where processes can't be had.

Nothing is packed: arguments and results are handed over as they are. A thread can't be killed: one that ignores its
interrupt is left behind (as a daemon) and named in the error.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from stageflow.errors import InputError
from stageflow.launch import supervisor as sv
from stageflow.launch.base import Arguments, Factory, Wiring, WorkerContext
from stageflow.launch.board import StatusBoard, StopSignal, stop_interrupt
from stageflow.launch.devices import choose_devices
from stageflow.launch.failure import Failure
from stageflow.launch.group import SupervisedGroup
from stageflow.launch.servant import Servant
from stageflow.transport.base import Endpoint, Interrupt

_Outcome = tuple[int, Any, Failure | None]


class _Bell:
    """What finished threads hand the driver, and a descriptor that is readable while there is any."""

    def __init__(self) -> None:
        self._outcomes: deque[_Outcome] = deque()
        self.fd, self._write = os.pipe()

    def put(self, outcome: _Outcome) -> None:
        self._outcomes.append(outcome)
        os.write(self._write, b"!")

    def take(self, wait: float) -> list[_Outcome]:
        taken: list[_Outcome] = []
        while select.select([self.fd], [], [], 0.0 if taken else wait)[0]:
            os.read(self.fd, 1)
            taken.append(self._outcomes.popleft())
        return taken

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            os.close(self._write)
            self.fd = -1

    __del__ = close


class ThreadGroup(SupervisedGroup):
    """See `start_threads`."""

    def __init__(self, factory: Factory, size: int, *, wiring: Wiring | None, devices: list[str], grace: float) -> None:
        super().__init__(size, StatusBoard(size), grace)
        self._stop = StopSignal(self._board)
        self._bell = _Bell()
        self._inboxes: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(size)]
        self._threads: list[threading.Thread] = []
        weakref.finalize(self, _dismiss, self._inboxes, self._stop)
        for rank in range(size):
            context = WorkerContext(
                rank=rank,
                size=size,
                interrupt=stop_interrupt(self._board, self._stop.fd),
                board=self._board.writer(rank),
                device=devices[rank],
                connect=None if wiring is None else _connector(wiring, rank),
            )
            thread = threading.Thread(
                target=_work,
                args=(Servant(context, factory), self._inboxes[rank], self._bell),
                name=f"stageflow-worker-{rank}",
                daemon=True,
            )
            self._threads.append(thread)
            thread.start()
        if wiring is not None:
            self._endpoint = _connector(wiring, size)(self._driver_interrupt(self._bell.fd))

    def _pack(self, method: str, per_worker: Sequence[Arguments], common: Sequence[Any]) -> list[Any]:
        return [(method, (*common, *args), kwargs) for args, kwargs in per_worker]

    def _post(self, rank: int, message: Any) -> None:
        self._inboxes[rank].put(message)

    def _poll(self, wait: float) -> list[sv.Notice]:
        notices: list[sv.Notice] = []
        for rank, result, failure in self._bell.take(wait):
            now = time.monotonic()
            if failure is None:
                self._results[rank] = result
                notices.append(sv.Finished(now, rank))
            else:
                self._failures[rank] = failure
                notices.append(sv.Failed(now, rank, failure.when, failure.kind))
        return notices

    def _interrupt(self) -> None:
        self._stop.send()

    def _resume(self) -> None:
        self._stop.clear()

    def _dump(self, ranks: Sequence[int]) -> dict[int, str]:
        frames = sys._current_frames()
        idents = {rank: self._threads[rank].ident for rank in ranks}
        found = {rank: frames[ident] for rank, ident in idents.items() if ident in frames}
        return {rank: "".join(traceback.format_stack(frame)) for rank, frame in found.items()}

    def _identity(self, rank: int) -> tuple[int, bool]:
        return os.getpid(), self._threads[rank].is_alive()

    def _kill(self) -> None:
        _dismiss(self._inboxes, self._stop)
        deadline = time.monotonic() + 0.3
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _free(self) -> None:
        _dismiss(self._inboxes, self._stop if self._supervisor.phase != "idle" else None)
        deadline = time.monotonic() + self._supervisor.grace
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._close_endpoint()
        if not any(thread.is_alive() for thread in self._threads):  # else freed with the last one that uses them
            self._bell.close()
            self._stop.close()
            self._board.close()


def _dismiss(inboxes: Sequence[queue.SimpleQueue[Any]], stop: StopSignal | None) -> None:
    """Let the threads end once they are idle; stop: and interrupt those that are not."""
    if stop is not None:
        stop.send()
    for inbox in inboxes:
        inbox.put(None)


def _connector(wiring: Wiring, rank: int) -> Any:
    def connect(interrupt: Interrupt) -> Endpoint:
        opener, fds = wiring.ticket(rank)
        return opener([os.dup(fd) for fd in fds], interrupt)

    return connect


def _work(servant: Servant, inbox: queue.SimpleQueue[Any], bell: _Bell) -> None:
    """A worker thread's whole life."""
    rank = servant.context.rank
    while (message := inbox.get()) is not None:
        method, args, kwargs = message
        result, failure = servant.run(method, args, kwargs)
        with contextlib.suppress(OSError):  # the group was closed without waiting for this thread
            bell.put((rank, result, failure))
        del message, args, kwargs, result, failure  # hold nothing of a finished call while waiting for the next
    servant.close()


def start_threads(
    factory: Factory,
    size: int,
    *,
    timeout: float = 300.0,
    wiring: Wiring | None = None,
    devices: str | Sequence[str] = "cpu",
    grace: float = 1.5,
) -> ThreadGroup:
    """Start ``size`` worker threads, each holding the service that ``factory(context)`` makes there.

    timeout: seconds without any progress after which starting counts as hung.
    wiring: makes the workers' and the driver's endpoints; None: no tensors cross.
    devices: see `choose_devices`. grace: seconds that interrupted workers get to stop.

    Raises LaunchError (the factory's exception is ``__cause__``).
    """
    if size < 1:
        raise InputError(f"a group needs at least one worker, got size={size}")
    group = ThreadGroup(factory, size, wiring=wiring, devices=choose_devices(size, devices), grace=grace)
    return group._begin(timeout)
