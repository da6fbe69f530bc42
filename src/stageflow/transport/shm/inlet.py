"""The receiving half of one ordered pair of workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from stageflow.errors import TransportError
from stageflow.transport.descriptors import Buffer
from stageflow.transport.frame import Decoder
from stageflow.transport.inbox import Inbox
from stageflow.transport.shm.layout import (
    BLOCK,
    ENTRIES,
    FIRST_ENTRY,
    FREE,
    LINE,
    PUBLISHED,
    TAKEN,
    WORD,
    Layout,
    Memory,
)
from stageflow.transport.shm.ordering import in_order

_SMALL = 2048  # bytes of a frame below which a copy is cheaper than keeping its block


class _Block(np.ndarray):
    """The bytes of a frame where they lie in the arena. Tensors keep it alive; its end frees the block."""

    free: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.free is not None:
            self.free()


class Inlet:
    """Takes frames from the arena of one sender. Used by the worker's thread; blocks are freed from any."""

    def __init__(self, memory: Memory, layout: Layout, peer: int, rank: int, decoder: Decoder) -> None:
        ring = layout.ring(peer, rank) // WORD
        self.peer = peer
        self._words = memory.words
        self._map = memory.map
        self._bytes = memory.bytes
        self._flat = memoryview(memory.map)
        self._arena = layout.arena(peer, rank)
        self._arena_bytes = layout.arena_bytes
        self._published_word = ring + PUBLISHED
        self._taken_word = ring + TAKEN
        self._entries = ring + FIRST_ENTRY
        self._taken = 0
        self._held = 0  # bytes of blocks that tensors lie in
        self._freed: deque[int] = deque()  # bytes of blocks freed since, by whichever thread
        self._partial: np.ndarray | None = None
        self._decoder = decoder
        self._in_order = in_order()

    def has_news(self) -> bool:
        return self._words[self._published_word] != self._taken

    def collect(self, inbox: Inbox) -> None:
        """Move every published message to the inbox. Raises TransportError if the memory holds nonsense."""
        published = self._words[self._published_word]
        if published == self._taken:
            return
        if self._in_order:
            self._in_order()
        while self._freed:
            self._held -= self._freed.popleft()
        while self._taken != published:
            offset = self._words[self._entries + self._taken % ENTRIES]
            memory = self._frame_at(offset)
            self._taken += 1
            self._words[self._taken_word] = self._taken
            if memory is not None:
                inbox.put(*self._decoder.decode(memory))

    def _frame_at(self, offset: int) -> Buffer | None:
        """The memory of the frame whose last or only piece is the block at ``offset``; None after other pieces."""
        if offset % LINE or offset + LINE > self._arena_bytes:
            raise self._damaged(f"a block at {offset}")
        _, length, size, start = BLOCK.unpack_from(self._map, self._arena + offset)
        if offset + LINE + length > self._arena_bytes or start + length > size:
            raise self._damaged(f"a block of {length} bytes at {offset}, from {start} of {size}")
        if length < size:
            return self._add_piece(offset, length, size, start)
        if size <= _SMALL or self._held + size > self._arena_bytes // 2:
            return self._copied(offset, size)
        return self._lent(offset, size)

    def _add_piece(self, offset: int, length: int, size: int, start: int) -> np.ndarray | None:
        if start == 0:
            try:
                self._partial = np.empty(size, np.uint8)
            except (MemoryError, ValueError) as problem:
                raise self._damaged(f"there is no memory for a message of {size} bytes, if it is one") from problem
        memory = self._partial
        if memory is None or len(memory) != size:
            raise self._damaged(f"a piece from {start} of {size} bytes that continues nothing")
        memory[start : start + length] = self._view(offset, length)
        self._free(offset)
        if start + length < size:
            return None
        self._partial = None
        return memory

    def _copied(self, offset: int, size: int) -> Buffer:
        start = self._arena + offset + LINE
        memory = bytearray(self._flat[start : start + size])
        self._free(offset)
        return memory

    def _lent(self, offset: int, size: int) -> np.ndarray:
        block = _Block((size,), np.uint8, self._map, self._arena + offset + LINE)
        words, word, freed, in_order = self._words, (self._arena + offset) // WORD, self._freed, self._in_order

        def free() -> None:
            freed.append(size)
            if in_order:
                in_order()
            words[word] = FREE

        block.free = free
        self._held += size
        return block

    def _view(self, offset: int, length: int) -> np.ndarray:
        start = self._arena + offset + LINE
        return self._bytes[start : start + length]

    def _free(self, offset: int) -> None:
        if self._in_order:
            self._in_order()
        self._words[(self._arena + offset) // WORD] = FREE

    def _damaged(self, what: str) -> TransportError:
        return TransportError(f"the shared memory written by worker {self.peer} is damaged: {what}")
