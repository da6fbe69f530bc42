"""The sending half of one ordered pair of workers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stageflow.transport.base import Tag
from stageflow.transport.frame import Frame, memmove
from stageflow.transport.shm.extents import Extents
from stageflow.transport.shm.layout import (
    BLOCK,
    ENTRIES,
    FIRST_ENTRY,
    FREE,
    IN_USE,
    LINE,
    PUBLISHED,
    SLEEPS,
    TAKEN,
    WORD,
    Layout,
    Memory,
)
from stageflow.transport.shm.ordering import full_barrier, in_order

_GLANCES = 8  # blocks in use looked at on every send; all of them when room is short
_LEAST_PIECE = 64 * 1024
_MOST_PIECE = 1024 * 1024  # so that the receiver copies one while the sender writes the next


@dataclass(slots=True)
class _Waiting:
    """A message, or the rest of one, in this worker's own memory."""

    tag: Tag
    memory: np.ndarray  # frame bytes from `first` on
    first: int
    sent: int
    size: int  # of the whole frame

    @classmethod
    def copy_of(cls, frame: Frame, sent: int) -> _Waiting:
        memory = np.empty(frame.size - sent, np.uint8)
        frame.copy_piece(memory.ctypes.data, sent, frame.size)
        return cls(frame.tag, memory, sent, sent, frame.size)

    def copy_piece(self, address: int, start: int, stop: int) -> None:
        memmove(address, self.memory.ctypes.data + start - self.first, stop - start)


class Outlet:
    """Puts frames into the arena of one receiver; what has no room waits here, in order.

    Used by the worker's thread and the pump.
    """

    def __init__(self, memory: Memory, layout: Layout, rank: int, peer: int, ring_bell: Callable[[], None]) -> None:
        ring = layout.ring(rank, peer) // WORD
        self.peer = peer
        self.waiting_bytes = 0
        self._lock = threading.Lock()
        self._words = memory.words
        self._map = memory.map
        self._arena = layout.arena(rank, peer)
        self._address = memory.address + self._arena
        self._published_word = ring + PUBLISHED
        self._taken_word = ring + TAKEN
        self._entries = ring + FIRST_ENTRY
        self._sleeps_word = layout.worker_word(peer) + SLEEPS
        self._ring_bell = ring_bell
        self._extents = Extents(layout.arena_bytes)
        self._in_use: dict[int, int] = {}  # offset -> bytes, in the order sent
        self._published = 0
        self._waiting: deque[_Waiting] = deque()
        self._whole_at_most = layout.arena_bytes // 3
        self._in_order = in_order()
        self._barrier = full_barrier()

    def send(self, frame: Frame) -> None:
        """Put a frame into the arena, or as much of it as has room, and keep a copy of the rest."""
        with self._lock:
            self._reclaim(_GLANCES)
            sent = 0 if self._waiting else self._place(frame, 0, frame.size)
            if sent < frame.size:
                rest = _Waiting.copy_of(frame, sent)
                self._waiting.append(rest)
                self.waiting_bytes += len(rest.memory)

    def push(self) -> bool:
        """Send what waits, as far as there is room; whether anything moved."""
        moved = False
        with self._lock:
            while self._waiting:
                message = self._waiting[0]
                before = message.sent
                message.sent = self._place(message, message.sent, message.size)
                moved = moved or message.sent > before
                if message.sent < message.size:
                    break
                self._drop(0)
        return moved

    def forget(self, before_step: int) -> None:
        """Drop waiting messages of earlier steps, except one of which a piece was already sent."""
        with self._lock:
            for i in reversed(range(len(self._waiting))):
                message = self._waiting[i]
                if message.tag.step < before_step and not message.sent:
                    self._drop(i)

    def _drop(self, i: int) -> None:
        self.waiting_bytes -= len(self._waiting[i].memory)
        del self._waiting[i]

    def _place(self, message: Frame | _Waiting, sent: int, size: int) -> int:
        """Put bytes of a frame from ``sent`` on into the arena; how far it got."""
        if sent == 0 and size <= self._whole_at_most and self._ring_has_room():
            length = _with_line(size)
            offset = self._extents.take(length)
            if offset is None:
                self._reclaim(len(self._in_use))
                offset = self._extents.take(length)
            if offset is not None:
                self._write(message, offset, length, 0, size, size)
                return size
        while sent < size and self._ring_has_room():
            found = self._take_piece(size - sent)
            if found is None:
                break
            offset, length = found
            stop = min(size, sent + length - LINE)
            self._write(message, offset, length, sent, stop, size)
            sent = stop
        return sent

    def _take_piece(self, left: int) -> tuple[int, int] | None:
        """(offset, bytes) of a block for the next piece of a message of which ``left`` bytes are to go.

        Crumbs are left alone as long as the receiver will free more without being asked for anything.
        """
        self._reclaim(len(self._in_use))
        length = min(_with_line(left), _MOST_PIECE)
        idle = self._words[self._taken_word] == self._published
        return self._extents.take_up_to(length, 2 * LINE if idle else min(length, _LEAST_PIECE))

    def _ring_has_room(self) -> bool:
        return self._published - self._words[self._taken_word] < ENTRIES

    def _reclaim(self, glances: int) -> None:
        """Take back blocks that the receiver has marked free, looking at the ``glances`` oldest."""
        words, first = self._words, self._arena // WORD
        freed = []
        for offset in self._in_use:
            if glances == 0:
                break
            glances -= 1
            if words[first + offset // WORD] == FREE:
                freed.append(offset)
        if freed and self._in_order:
            self._in_order()
        for offset in freed:
            self._extents.give_back(offset, self._in_use.pop(offset))

    def _write(self, message: Frame | _Waiting, offset: int, length: int, start: int, stop: int, size: int) -> None:
        BLOCK.pack_into(self._map, self._arena + offset, IN_USE, stop - start, size, start)
        if start == 0 and stop == size and isinstance(message, Frame):
            message.copy_to(self._address + offset + LINE)
        else:
            message.copy_piece(self._address + offset + LINE, start, stop)
        self._in_use[offset] = length
        self._publish(offset)

    def _publish(self, offset: int) -> None:
        words = self._words
        words[self._entries + self._published % ENTRIES] = offset
        if self._in_order:
            self._in_order()
        self._published += 1
        words[self._published_word] = self._published
        self._barrier()
        if words[self._sleeps_word]:
            self._ring_bell()


def _with_line(size: int) -> int:
    """Bytes of a block for ``size`` bytes of a frame."""
    return LINE + -(-size // LINE) * LINE
