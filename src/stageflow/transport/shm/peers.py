"""Which of the other workers are still alive."""

from __future__ import annotations

import contextlib
import os
import select
import time

from stageflow.errors import TransportError
from stageflow.transport.shm.layout import ABSENT, CLOSED, PROCESS, STATE, Layout

_GRACE = 1.0  # seconds in which somebody who knows more (a supervisor) may speak first


class Peers:
    """Notices processes that ended without closing their endpoint, where the system can tell (Linux).

    gone: rank -> process id.
    """

    def __init__(self, words: memoryview, layout: Layout, rank: int) -> None:
        self.gone: dict[int, int] = {}
        self._words = words
        self._lines = {peer: layout.worker_word(peer) for peer in range(layout.size) if peer != rank}
        self._watched: dict[int, int] = {}  # pidfd -> rank
        self._poll = select.poll()
        self._noticed = 0.0

    def look(self, rank: int) -> None:
        """Raises TransportError some time after a peer has died; ``rank`` is the caller's."""
        if hasattr(os, "pidfd_open"):
            self._watch_new()
            for fd, _ in self._poll.poll(0):
                self._note(self._watched[fd])
        if self.gone and time.monotonic() - self._noticed > _GRACE:
            raise self.error(rank, next(iter(self.gone)), "can't go on")

    def unreachable(self, peer: int) -> bool:
        """Whether nobody will ever take what is sent to ``peer``."""
        return self._words[self._lines[peer] + STATE] == CLOSED or peer in self.gone

    def error(self, rank: int, peer: int, doing: str) -> TransportError:
        """What is wrong with an unreachable peer."""
        if peer in self.gone:
            why = f"worker {peer} (process {self.gone[peer]}) ended without closing its endpoint"
        else:
            why = f"worker {peer} has closed its endpoint"
        return TransportError(f"worker {rank} {doing}: {why}")

    def describe(self) -> str:
        """Peers from which nothing can come, in words."""
        states = {peer: self._words[line + STATE] for peer, line in self._lines.items()}
        told = []
        for state, text in ((ABSENT, "not attached yet"), (CLOSED, "closed")):
            named = [str(peer) for peer in states if states[peer] == state]
            if named:
                told.append(f"Workers {text}: {', '.join(named)}.")
        return " ".join(told)

    def close(self) -> None:
        for fd in self._watched:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._watched.clear()

    def _watch_new(self) -> None:
        watched = set(self._watched.values())
        for peer, line in self._lines.items():
            process = self._words[line + PROCESS]
            if not process or process == os.getpid() or peer in watched or peer in self.gone:
                continue
            try:
                fd = os.pidfd_open(process)
            except ProcessLookupError:
                self._note(peer)
            except OSError:
                continue  # this system can't tell; the launcher will
            else:
                self._watched[fd] = peer
                self._poll.register(fd, select.POLLIN)

    def _note(self, peer: int) -> None:
        line = self._lines[peer]
        if peer not in self.gone and self._words[line + STATE] != CLOSED:
            self.gone[peer] = self._words[line + PROCESS]
            self._noticed = self._noticed or time.monotonic()
