"""What a group of workers is, whoever runs them: threads, processes of this machine.

    driver ──call("step", ...)──► service on worker 0, 1, ... (one object each, made there by the factory)
       └──── endpoint ◄─tensors─► ctx.endpoint() of each worker

The driver is endpoint number ``size``; the workers are 0 .. size - 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from stageflow.errors import LaunchError
from stageflow.transport.base import Endpoint, Interrupt

Arguments = tuple[Sequence[Any], dict[str, Any]]
"""Positional and keyword arguments of one worker's share of a call."""

Factory = Callable[["WorkerContext"], Any]
"""Makes a worker's service, in the worker."""

Opener = Callable[[Sequence[int], Interrupt], Endpoint]
"""Opens an endpoint from the file descriptors that came with it (which it then owns)."""


IDLE = "idle"
"""What a worker's status says between two calls."""


class Wiring(Protocol):
    """How the endpoints of one group come to be. Made in the driver, one for each group; holds no endpoint itself."""

    def ticket(self, rank: int) -> tuple[Opener, Sequence[int]]:
        """What endpoint ``rank`` needs: an opener, which may travel by pickle, and the descriptors to hand over.

        The descriptors stay the wiring's own; the group passes copies to the worker.
        """
        ...

    def close(self) -> None:
        """Free what the wiring holds; endpoints already opened live on. May be called twice."""
        ...


class Board(Protocol):
    """Where a worker says what it does. action: what it said last."""

    action: str

    def set(self, action: str, waits_for: str = "") -> None: ...


@dataclass
class WorkerContext:
    """What a worker is given.

    rank, size: its number among the workers, and how many there are.
    interrupt: ``check()`` raises errors.Aborted once the driver asks the workers to stop; ``fd`` is readable then.
    board: ``board.set("2F0", waits_for="1F0 from worker 0")`` shows the driver what this worker does.
    device: where this worker's tensors live, as torch writes it.
    """

    rank: int
    size: int
    interrupt: Interrupt
    board: Board
    device: str = "cpu"
    connect: Callable[[Interrupt], Endpoint] | None = field(default=None, repr=False)
    _endpoint: Endpoint | None = field(default=None, repr=False)

    def endpoint(self) -> Endpoint:
        """This worker's door to the others, opened at the first call. Raises LaunchError in a group without one."""
        if self._endpoint is None:
            if self.connect is None:
                raise LaunchError("this group was started without wiring=, so its workers have no endpoints")
            self._endpoint = self.connect(self.interrupt)
        return self._endpoint

    def close(self) -> None:
        """Close the endpoint if one was opened; may be called twice."""
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None


@dataclass(frozen=True)
class WorkerStatus:
    """One look at one worker.

    action: what it does ("2F0"), "idle" between calls. waits_for: what it waits for, "" when it computes.
    seconds: since that last changed. pid: its process. alive: whether that still runs. stopped: whether a signal keeps
    it from going on (SIGSTOP, a debugger).
    """

    rank: int
    action: str
    waits_for: str
    seconds: float
    pid: int
    alive: bool
    stopped: bool = False

    def __str__(self) -> str:
        doing = self.action or "nothing yet"
        waiting = f", waiting for {self.waits_for}," if self.waits_for else ""
        stopped = ", stopped by a signal" if self.stopped else ""
        return f"worker {self.rank}: {doing}{waiting} for {self.seconds:.1f} s{stopped}"


class Call(ABC):
    """A method running on all workers. A context manager: left early, the workers are stopped and idle again.

    Between `WorkerGroup.cast` and `results` the driver may use ``group.endpoint``; its waits end with the error of
    a worker that fails meanwhile.
    """

    @abstractmethod
    def results(self) -> list[Any]:
        """Wait for all workers; their results in rank order.

        Raises StageFailed, WorkerDied or WorkerHung (see `WorkerGroup.call`).
        """

    @abstractmethod
    def __enter__(self) -> Call: ...

    @abstractmethod
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None: ...


class WorkerGroup(ABC):
    """Workers that each hold one service object. Used by one thread of the driver."""

    size: int

    @property
    @abstractmethod
    def endpoint(self) -> Endpoint:
        """The driver's own door to the workers, number ``size``. Raises LaunchError in a group without wiring."""

    @abstractmethod
    def cast(
        self, method: str, per_worker: Sequence[Arguments] | None = None, *, timeout: float, common: Sequence[Any] = ()
    ) -> Call:
        """Start ``service.method(*common, *args, **kwargs)`` on all workers and return at once.

        per_worker: (args, kwargs) for each worker; None: none.
        timeout: seconds without any worker's status or result changing after which they count as hung.
        common: leading arguments, the same for all; packed once.
        """

    def call(
        self, method: str, per_worker: Sequence[Arguments] | None = None, *, timeout: float, common: Sequence[Any] = ()
    ) -> list[Any]:
        """Run ``service.method(*common, *args, **kwargs)`` on all workers at once; the results in rank order.

        Raises StageFailed when the service raised (that exception is ``__cause__``; ``usable`` says whether the group
        can go on), WorkerDied when a process ended, WorkerHung when nothing moved for ``timeout`` seconds (the group is
        closed after both), PipelineClosed when it was closed before. Within 2 s of the event, nothing is left running.
        """
        with self.cast(method, per_worker, timeout=timeout, common=common) as running:
            return running.results()

    @property
    @abstractmethod
    def usable(self) -> bool:
        """Whether the next call can run."""

    @abstractmethod
    def status(self) -> list[WorkerStatus]:
        """What each worker does now."""

    @abstractmethod
    def close(self) -> None:
        """End all workers and free everything; may be called twice, also from a finalizer."""

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
