"""Sends what had no room in an arena, while its worker computes."""

from __future__ import annotations

import threading
from collections.abc import Callable

_QUICK, _SLOW = 0.0002, 0.002  # seconds between tries while the receiver frees nothing


class Pump:
    """A thread that calls ``push`` as long as there is something to push; started when first needed.

    push: moves what it can; returns (whether anything moved, whether anything is left).

    It looks again every 2 ms at most instead of being told of room: telling would cost the receiver a system call for
    each block, and messages wait only when it is behind anyway. Torch lets the thread run during its kernels.
    """

    def __init__(self, push: Callable[[], tuple[bool, bool]], name: str) -> None:
        self._push = push
        self._name = name
        self._thread: threading.Thread | None = None
        self._wanted = threading.Event()
        self._closing = threading.Event()

    def want(self) -> None:
        """There is something to push."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._wanted.set()

    def close(self) -> None:
        self._closing.set()
        self._wanted.set()
        if self._thread is not None:
            self._thread.join()
        self._push = _nothing  # the endpoint's: it and its shared memory go with its last user, not with a later gc

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wanted.wait()
            self._wanted.clear()
            pause, left = _QUICK, True
            while left and not self._closing.is_set():
                moved, left = self._push()
                pause = _QUICK if moved else min(pause * 1.5, _SLOW)
                if left:
                    self._closing.wait(pause)


def _nothing() -> tuple[bool, bool]:
    return False, False
