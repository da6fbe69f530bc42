"""Wakes a worker that sleeps in poll()."""

from __future__ import annotations

import contextlib
import os


class Doorbell:
    """Rung by anybody, answered by one. An eventfd where the system has them, else a pipe.

    fds: what another process needs to adopt it: one descriptor (eventfd) or two (read end, write end).
    """

    def __init__(self, fds: tuple[int, ...]) -> None:
        self.fds = fds
        self._read, self._write = fds[0], fds[-1]

    @classmethod
    def create(cls) -> Doorbell:
        if hasattr(os, "eventfd"):
            return cls((os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC),))
        read, write = os.pipe()
        os.set_blocking(read, False)
        os.set_blocking(write, False)
        return cls((read, write))

    def fileno(self) -> int:
        return self._read

    def ring(self) -> None:
        """Make it readable. A bell that is full already rings anyway, one whose owner is gone needs no ring."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._write, b"\1\0\0\0\0\0\0\0")

    def silence(self) -> None:
        """Make it not readable until it is rung again."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._read, 4096)) == 4096:
                pass

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = ()
