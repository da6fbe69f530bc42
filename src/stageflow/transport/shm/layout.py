"""Where everything lies in the shared memory, and how it is mapped.

    ┌───────────┬──────────────────────┬───────┬──────────────────────┬───────┬───
    │ directory │ ring of pair (0 → 1) │ arena │ ring of pair (0 → 2) │ arena │ ...
    └───────────┴──────────────────────┴───────┴──────────────────────┴───────┴───

The directory has one cache line per worker. A ring has one line written by its sender, one by its receiver, and
``ENTRIES`` words, each the offset of a block in the arena. A block is a line of its own followed by bytes of a frame.
All words are unsigned 64 bit; "word" below counts in those, everything else in bytes.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import tempfile
from dataclasses import dataclass

import numpy as np

PAGE = mmap.PAGESIZE
LINE = 64
WORD = 8
ENTRIES = 4096

# Words of a worker's line in the directory.
SLEEPS, STATE, PROCESS = 0, 1, 2
ABSENT, ATTACHED, CLOSED = 0, 1, 2  # values of STATE

# Words of a ring.
PUBLISHED, TAKEN, FIRST_ENTRY = 0, LINE // WORD, 2 * LINE // WORD
RING_BYTES = -(-(FIRST_ENTRY + ENTRIES) * WORD // PAGE) * PAGE

# A block's own line: state, bytes of the frame in it, bytes of the whole frame, where in the frame they start.
BLOCK = struct.Struct("<QQQQ")
FREE, IN_USE = 0, 1  # values of a block's first word


@dataclass(frozen=True)
class Layout:
    """size: how many workers. arena_bytes: how much each ordered pair of them has; a multiple of the page size."""

    size: int
    arena_bytes: int

    @property
    def total(self) -> int:
        return self.ring(self.size - 1, self.size) if self.size > 1 else self._directory

    @property
    def _directory(self) -> int:
        return -(-self.size * LINE // PAGE) * PAGE

    def worker_word(self, rank: int) -> int:
        return rank * LINE // WORD

    def ring(self, sender: int, receiver: int) -> int:
        """Where the ring of a pair starts; its arena follows."""
        pair = sender * (self.size - 1) + receiver - (receiver > sender)
        return self._directory + pair * (RING_BYTES + self.arena_bytes)

    def arena(self, sender: int, receiver: int) -> int:
        return self.ring(sender, receiver) + RING_BYTES


class Memory:
    """The whole shared memory, mapped into this process.

    Stays mapped as long as an array of it is alive, also after this object is gone.
    words: by word number. bytes: all of it, 1-d uint8. address: of its first byte.
    """

    def __init__(self, fd: int, layout: Layout) -> None:
        self.map = mmap.mmap(fd, layout.total)
        self.words = memoryview(self.map).cast("B").cast("Q")
        self.bytes = np.frombuffer(self.map, np.uint8)
        self.address = self.bytes.ctypes.data


def create_memory(layout: Layout) -> int:
    """A file descriptor of zeroed memory that has no name, so that nothing of it can be left behind.

    Pages cost memory only once they are written to.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("stageflow", os.MFD_CLOEXEC)
    else:
        directory = "/dev/shm" if sys.platform == "linux" and os.path.isdir("/dev/shm") else None
        fd, path = tempfile.mkstemp(prefix="stageflow-", dir=directory)
        os.unlink(path)
    try:
        os.ftruncate(fd, layout.total)
    except OSError:
        os.close(fd)
        raise
    return fd
