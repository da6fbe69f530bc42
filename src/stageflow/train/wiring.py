"""Which transport joins the workers of a group."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from stageflow.errors import LaunchError
from stageflow.launch.base import Opener
from stageflow.transport.base import Endpoint, Interrupt
from stageflow.transport.inproc import Hub
from stageflow.transport.shm import ShmEndpoint, ShmHub


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


class ProcessWiring:
    """Endpoints of processes of one machine, over shared memory. Raises LaunchError where that can't be had."""

    def __init__(self, size: int) -> None:
        try:
            self._hub = ShmHub.create(size)
        except OSError as error:
            raise LaunchError(f"no shared memory for {size - 1} workers: {error}; see `stageflow doctor`") from error

    def ticket(self, rank: int) -> tuple[Opener, Sequence[int]]:
        description, fds = self._hub.handles(rank)
        return partial(_attach, description), fds

    def close(self) -> None:
        """Let go of this process's own descriptors; endpoints already opened live on."""
        self._hub.close()


def _attach(description: Any, fds: Sequence[int], interrupt: Interrupt) -> Endpoint:
    return ShmEndpoint.attach(description, fds, interrupt)
