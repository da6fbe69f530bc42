"""Tells a script that starts workers while it is only being imported by one: the missing ``__main__`` guard."""

from __future__ import annotations

import multiprocessing.process
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from stageflow.errors import LaunchError

_unpacking: ContextVar[bool] = ContextVar("stageflow_unpacking", default=False)


@contextmanager
def unpacking() -> Iterator[None]:
    """Marks that a worker is importing whatever the things it was sent need."""
    token = _unpacking.set(True)
    try:
        yield
    finally:
        _unpacking.reset(token)


def refuse_import_time_start() -> None:
    """Raise LaunchError where starting workers could only go on for ever.

    Worker processes of this package don't run the user's script again. A script can still be imported in one (a class
    in it was sent under the script's own module name), or by a child that `multiprocessing` spawned.
    """
    spawning = getattr(multiprocessing.process.current_process(), "_inheriting", False)
    if _unpacking.get() or spawning:
        raise LaunchError(
            "workers were to be started by a script that is only being imported, inside a child process of its own "
            "first run. Put the code that starts them under:  if __name__ == '__main__':"
        )
