"""The driver's side of shared memory: makes it and hands out the keys."""

from __future__ import annotations

import os

from stageflow.errors import InputError
from stageflow.transport.base import Interrupt
from stageflow.transport.shm.doorbell import Doorbell
from stageflow.transport.shm.endpoint import Handles, ShmEndpoint
from stageflow.transport.shm.layout import PAGE, Layout, create_memory
from stageflow.transport.shm.ordering import in_order

ARENA_BYTES = 64 << 20
BACKLOG_BYTES = 1 << 30


class ShmHub:
    """Memory and doorbells for ``size`` workers of one host.

        hub = ShmHub.create(2)
        handles, fds = hub.handles(0)      # send both to worker 0, the descriptors by socket or inheritance
        endpoint = ShmEndpoint.attach(handles, fds)                                     # in worker 0

    The memory has no name in any file system. It goes away with the last process that maps it, however that ends.
    """

    def __init__(self, layout: Layout, backlog_bytes: int) -> None:
        self.size = layout.size
        self._layout = layout
        self._backlog_bytes = backlog_bytes
        self._memory_fd = create_memory(layout)
        self._bells = [Doorbell.create() for _ in range(layout.size)]

    @classmethod
    def create(cls, size: int, arena_bytes: int = ARENA_BYTES, backlog_bytes: int = BACKLOG_BYTES) -> ShmHub:
        """Make the memory.

        arena_bytes: room for messages on their way, for each ordered pair of workers; uses memory only once filled.
        backlog_bytes: how much more one worker may keep in its own memory before its sends wait.
        Raises LaunchError on a machine where processes can't share memory safely.
        """
        if size < 1 or arena_bytes < 16 * PAGE:
            raise InputError(f"shared memory needs size >= 1 and arena_bytes >= {16 * PAGE}, got {size}, {arena_bytes}")
        in_order()
        return cls(Layout(size, -(-arena_bytes // PAGE) * PAGE), backlog_bytes)

    def handles(self, rank: int) -> tuple[Handles, list[int]]:
        """(what `ShmEndpoint.attach` needs in worker ``rank``, file descriptors that must travel along).

        The descriptors are the hub's own and stay open until `close`; duplicates are what attaches.
        """
        if not 0 <= rank < self.size:
            raise InputError(f"there is no worker {rank} among {self.size}")
        handles = Handles(
            rank=rank,
            size=self.size,
            arena_bytes=self._layout.arena_bytes,
            backlog_bytes=self._backlog_bytes,
            bells=[len(bell.fds) for bell in self._bells],
        )
        return handles, [self._memory_fd, *(fd for bell in self._bells for fd in bell.fds)]

    def attach(self, rank: int, interrupt: Interrupt | None = None, patience: float = 60.0) -> ShmEndpoint:
        """The endpoint of worker ``rank`` in this very process."""
        handles, fds = self.handles(rank)
        return ShmEndpoint.attach(handles, [os.dup(fd) for fd in fds], interrupt, patience)

    def close(self) -> None:
        """Give up the driver's own hold; attached workers are not affected. May be called twice."""
        if self._memory_fd >= 0:
            os.close(self._memory_fd)
            self._memory_fd = -1
            for bell in self._bells:
                bell.close()

    def __enter__(self) -> ShmHub:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
