"""A worker's door to the other workers of its host."""

from __future__ import annotations

import contextlib
import os
import select
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TypedDict

from stageflow.errors import TransferTimeout, TransportError
from stageflow.graph import Bundle
from stageflow.transport.base import Endpoint, Interrupt, Tag
from stageflow.transport.frame import Decoder, Encoder
from stageflow.transport.inbox import Inbox
from stageflow.transport.shm.doorbell import Doorbell
from stageflow.transport.shm.inlet import Inlet
from stageflow.transport.shm.layout import ATTACHED, CLOSED, PROCESS, SLEEPS, STATE, Layout, Memory
from stageflow.transport.shm.ordering import full_barrier
from stageflow.transport.shm.outlet import Outlet
from stageflow.transport.shm.peers import Peers
from stageflow.transport.shm.pump import Pump

# Seconds to look for news before sleeping: long if the last wait was so short that sleeping would have cost more than
# it saved, short otherwise. Other threads and processes get the core in between.
_SHORT_SPIN, _LONG_SPIN = 40e-6, 300e-6
_give_way: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))
_NAP = 0.001  # the same while waiting for the pump, which rings no bell
_SLICE = 0.05  # seconds of sleep between looks at the interrupt and at who is still alive


class Handles(TypedDict):
    """What a worker needs to attach, besides the file descriptors; plain, so that it can travel as JSON."""

    rank: int
    size: int
    arena_bytes: int
    backlog_bytes: int
    bells: list[int]  # how many descriptors each doorbell has


class ShmEndpoint(Endpoint):
    """Made by `attach` in a worker, from what `ShmHub.handles` gave the driver.

    `send` copies the tensors before it returns: into the arena, or, if there is no room, into this worker's own memory,
    from where a thread sends them on. Beyond ``backlog_bytes`` of those, `send` waits for the receivers, at most
    ``patience`` seconds. Tensors handed out by `recv` lie in shared memory and may be written to.
    """

    def __init__(
        self, handles: Handles, memory_fd: int, bells: Sequence[Doorbell], interrupt: Interrupt, patience: float
    ) -> None:
        self.rank, self.size = handles["rank"], handles["size"]
        layout = Layout(self.size, handles["arena_bytes"])
        memory = Memory(memory_fd, layout)
        os.close(memory_fd)
        others = [peer for peer in range(self.size) if peer != self.rank]
        decoder = Decoder()
        self._encoder = Encoder()
        self._inbox = Inbox(self.rank)
        self._interrupt = interrupt
        self._patience = patience
        self._backlog_bytes = handles["backlog_bytes"]
        self._bells = list(bells)
        self._outlets = {peer: Outlet(memory, layout, self.rank, peer, bells[peer].ring) for peer in others}
        self._inlets = [Inlet(memory, layout, peer, self.rank, decoder) for peer in others]
        self._words = memory.words
        self._own_word = layout.worker_word(self.rank)
        self._barrier = full_barrier()
        self._pump = Pump(self._push, f"stageflow-shm-{self.rank}")
        self._peers = Peers(memory.words, layout, self.rank)
        self._poll = select.poll()
        self._poll.register(bells[self.rank].fileno(), select.POLLIN)
        if interrupt.fd is not None:
            self._poll.register(interrupt.fd, select.POLLIN)
        self._spin = _SHORT_SPIN
        self._open = True
        self._release = weakref.finalize(self, _release, self._bells, self._peers)  # also if nobody closes it
        self._release.atexit = False
        self._words[self._own_word + PROCESS] = os.getpid()
        self._words[self._own_word + STATE] = ATTACHED

    @classmethod
    def attach(
        cls, handles: Handles, fds: Sequence[int], interrupt: Interrupt | None = None, patience: float = 60.0
    ) -> ShmEndpoint:
        """Open the door of one worker, once.

        handles, fds: from `ShmHub.handles`, the descriptors being valid in this process. They belong to the endpoint
            from now on.
        patience: seconds that `send` may wait when the receivers are more than ``backlog_bytes`` behind.
        """
        memory_fd, *rest = fds
        bells = []
        for count in handles["bells"]:
            bells.append(Doorbell(tuple(rest[:count])))
            del rest[:count]
        return cls(handles, memory_fd, bells, interrupt or Interrupt(), patience)

    def send(self, peer: int, tag: Tag, bundle: Bundle) -> None:
        self._require_open()
        outlet = self._outlets.get(peer)
        if outlet is None:
            raise TransportError(f"worker {self.rank} can't send {tag} to worker {peer}: its peers: {[*self._outlets]}")
        if self._peers.unreachable(peer):
            raise self._peers.error(self.rank, peer, f"can't send {tag}")
        frame = self._encoder.encode(tag, bundle)
        if outlet.waiting_bytes and self._waiting_bytes() + frame.size > self._backlog_bytes:
            self._wait_for_room(peer, tag, frame.size)
        outlet.send(frame)
        if outlet.waiting_bytes:
            self._pump.want()

    def recv(self, tag: Tag, timeout: float) -> Bundle:
        self._require_open()
        inbox = self._inbox
        found = inbox.pop(tag)
        if found is None:
            self._collect()
            found = inbox.pop(tag)
        if found is None:
            self._wait(lambda: tag in inbox, timeout, lambda: inbox.timed_out(tag, timeout, self._peers.describe()))
            found = inbox.pop(tag)
            assert found is not None
        return found

    def flush(self, timeout: float) -> None:
        self._require_open()
        self._wait(lambda: not self._waiting_bytes(), timeout, lambda: self._not_taken("flush", timeout), _NAP)

    def forget(self, before_step: int) -> None:
        self._collect()
        self._inbox.forget(before_step)
        for outlet in self._outlets.values():
            outlet.forget(before_step)

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._pump.close()
        self._words[self._own_word + STATE] = CLOSED
        self._inbox.clear()
        self._inlets.clear()
        self._outlets.clear()
        self._release()

    def _require_open(self) -> None:
        if not self._open:
            raise TransportError(f"the endpoint of worker {self.rank} is closed")

    def _collect(self) -> None:
        for inlet in self._inlets:
            inlet.collect(self._inbox)

    def _push(self) -> tuple[bool, bool]:
        """One round of the pump."""
        outlets = [outlet for outlet in self._outlets.values() if outlet.waiting_bytes]
        moved = [outlet.push() for outlet in outlets]
        return any(moved), any(outlet.waiting_bytes for outlet in outlets)

    def _waiting_bytes(self) -> int:
        return sum(outlet.waiting_bytes for outlet in self._outlets.values())

    def _wait_for_room(self, peer: int, tag: Tag, size: int) -> None:
        patience = self._patience
        self._wait(
            lambda: self._waiting_bytes() + size <= self._backlog_bytes or not self._outlets[peer].waiting_bytes,
            patience,
            lambda: self._not_taken(f"sending {size} bytes to worker {peer} as {tag}", patience),
            _NAP,
        )

    def _not_taken(self, doing: str, timeout: float) -> TransferTimeout:
        behind = {peer: outlet.waiting_bytes for peer, outlet in self._outlets.items() if outlet.waiting_bytes}
        return TransferTimeout(
            f"worker {self.rank}, {doing}: the receivers took nothing for {timeout:g} s; bytes that wait for room, by "
            f"receiver: {behind} (limit {self._backlog_bytes}). They are stuck, or arena_bytes is too small. "
            f"{self._peers.describe()}"
        )

    def _wait(
        self, ready: Callable[[], bool], timeout: float, too_late: Callable[[], Exception], nap: float = _SLICE
    ) -> None:
        """Collect messages until ``ready``: look for a while, then sleep until the bell or the interrupt.

        nap: seconds to sleep at most before looking again.
        """
        started = time.monotonic()
        deadline, spin_until = started + timeout, started + min(self._spin, timeout)
        while not ready():
            now = time.monotonic()
            if now < spin_until:
                _give_way()
            elif now >= deadline:
                raise too_late()
            else:
                self._sleep(min(deadline - now, nap))
            self._collect()
        self._spin = _LONG_SPIN if time.monotonic() - started < _LONG_SPIN else _SHORT_SPIN

    def _sleep(self, seconds: float) -> None:
        """Sleep until a message comes, the interrupt stirs or the time is up, and look after the latter two."""
        sleeps = self._own_word + SLEEPS
        self._words[sleeps] = 1
        self._barrier()
        try:
            if any(inlet.has_news() for inlet in self._inlets):
                return
            stirred = self._poll.poll(seconds * 1000)
        finally:
            self._words[sleeps] = 0
        bell = self._bells[self.rank]
        rung = any(fd == bell.fileno() for fd, _ in stirred)
        if rung:
            bell.silence()
        if not rung or len(stirred) > 1 or self._interrupt.fd is None:
            self._interrupt.check()
            self._peers.look(self.rank)


def _release(bells: Sequence[Doorbell], peers: Peers) -> None:
    """Close the descriptors of an endpoint."""
    peers.close()
    for bell in bells:
        with contextlib.suppress(OSError):
            bell.close()
