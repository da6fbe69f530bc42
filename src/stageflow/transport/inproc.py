"""Workers that are threads of one process: messages are copied once and handed over under one lock."""

from __future__ import annotations

import threading
import time

from stageflow.errors import TransportError
from stageflow.graph import Bundle
from stageflow.transport.base import Endpoint, Interrupt, Tag
from stageflow.transport.frame import portable_copy
from stageflow.transport.inbox import Inbox

_CHECK_EVERY = 0.05  # seconds between looks at the interrupt while waiting


class Hub:
    """Joins ``size`` endpoints of one process.

    hub = Hub(2)
    first, second = hub.endpoint(0), hub.endpoint(1)
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._inboxes = [Inbox(rank) for rank in range(size)]
        self._closed = [False] * size

    def endpoint(self, rank: int, interrupt: Interrupt | None = None) -> InprocEndpoint:
        """The door of worker ``rank``, to be used by one thread."""
        return InprocEndpoint(self, rank, interrupt or Interrupt())


class InprocEndpoint(Endpoint):
    """Made by `Hub.endpoint`. The tensors of a sent message are copied before `send` returns, on their own device."""

    def __init__(self, hub: Hub, rank: int, interrupt: Interrupt) -> None:
        if not 0 <= rank < hub.size:
            raise TransportError(f"there is no worker {rank} among {hub.size}")
        self.rank = rank
        self.size = hub.size
        self._hub = hub
        self._interrupt = interrupt

    def send(self, peer: int, tag: Tag, bundle: Bundle) -> None:
        if not 0 <= peer < self.size:
            raise TransportError(f"worker {self.rank} can't send {tag} to worker {peer}: there are {self.size} workers")
        copy = portable_copy(tag, bundle)
        hub = self._hub
        with hub._changed:
            self._require_open()
            if hub._closed[peer]:
                raise TransportError(f"worker {self.rank} can't send {tag}: worker {peer} has closed its endpoint")
            hub._inboxes[peer].put(tag, copy)
            hub._changed.notify_all()

    def recv(self, tag: Tag, timeout: float) -> Bundle:
        deadline = time.monotonic() + timeout
        inbox = self._hub._inboxes[self.rank]
        while True:
            with self._hub._changed:
                self._require_open()
                found = inbox.pop(tag)
                if found is not None:
                    return found
                left = deadline - time.monotonic()
                if left <= 0:
                    raise inbox.timed_out(tag, timeout)
                self._hub._changed.wait(min(left, _CHECK_EVERY))
            self._interrupt.check()  # outside the lock: it may do anything

    def flush(self, timeout: float) -> None:
        """Nothing to wait for: what was sent already lies in the receiver's inbox."""

    def forget(self, before_step: int) -> None:
        with self._hub._changed:
            self._hub._inboxes[self.rank].forget(before_step)

    def close(self) -> None:
        with self._hub._changed:
            self._hub._closed[self.rank] = True
            self._hub._inboxes[self.rank].clear()
            self._hub._changed.notify_all()

    def _require_open(self) -> None:
        if self._hub._closed[self.rank]:
            raise TransportError(f"the endpoint of worker {self.rank} is closed")
