"""Which transport joins the workers of a group."""

from __future__ import annotations

from collections.abc import Sequence

from stageflow.launch.base import Opener
from stageflow.transport.base import Endpoint, Interrupt
from stageflow.transport.inproc import Hub


class ThreadWiring:
    """Endpoints of one process."""

    def __init__(self, size: int) -> None:
        self._hub = Hub(size)

    def ticket(self, rank: int) -> tuple[Opener, Sequence[int]]:
        def open_endpoint(fds: Sequence[int], interrupt: Interrupt) -> Endpoint:
            return self._hub.endpoint(rank, interrupt)

        return open_endpoint, ()

    def close(self) -> None:
        """Nothing to free: the hub goes with its endpoints."""
