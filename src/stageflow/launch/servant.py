"""The worker's side of a group: one service object, one call at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stageflow.launch.base import IDLE, Factory, WorkerContext
from stageflow.launch.failure import Failure

BUILD = ""
"""The method name that stands for making the service."""


class Servant:
    """Makes a worker's service and runs its methods; whatever they raise becomes a `Failure`."""

    def __init__(self, context: WorkerContext, factory: Factory) -> None:
        self.context = context
        self._factory: Factory | None = factory
        self._service: Any = None

    def run(self, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Failure | None]:
        """Result and None, or None and what went wrong; the worker's status is "idle" afterwards."""
        board = self.context.board
        board.set(method or "its start")
        try:
            if method == BUILD:
                assert self._factory is not None
                self._service = self._factory(self.context)
                self._factory = None
                return None, None
            return getattr(self._service, method)(*args, **kwargs), None
        except BaseException as error:  # SystemExit too: a worker ends only when the driver says so
            return None, Failure.of(self.context.rank, error, board.action)
        finally:
            board.set(IDLE)

    def close(self) -> None:
        """Give the service its own ``close()``, if it has one, then close the endpoint."""
        close = getattr(self._service, "close", None)
        self._service = None
        try:
            if callable(close):
                close()
        finally:
            self.context.close()
