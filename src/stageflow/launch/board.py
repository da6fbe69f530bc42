"""What every worker is doing, in memory that outlives the worker.

One shared page range per group: a header with the group's stop flag, one slot of 256 bytes a worker, their processes.

    header:  stop flag (1 byte), padding
    slot:    changes (u64) | since (f64, time.monotonic) | text: action NUL waits_for NUL
    process: id (u64), 0 before the worker has started

A worker writes its own slot with one `struct.pack_into` (about a microsecond, no lock); the driver reads all slots
whenever it likes, also after the worker was killed. A torn read can show half a text for one look; the counter is
what decisions are taken on.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
from typing import NamedTuple

from stageflow.errors import Aborted
from stageflow.transport.base import Interrupt

SLOT = 256
_STAMP = struct.Struct("<Qd")
_SLOT = struct.Struct("<Qd240s")
_PID = struct.Struct("<Q")
_TEXT_BYTES = 240
LABEL = "stageflow-board"
"""What a board is called among a process's open files."""
assert _SLOT.size == SLOT


class Entry(NamedTuple):
    """One worker's slot: how often it changed, when last (time.monotonic), what it does, what it waits for."""

    changes: int
    since: float
    action: str
    waits_for: str


def anonymous_file(label: str, size: int = 0) -> int:
    """A file without a name: a descriptor that other processes can be handed, and nothing to clean up.

    label: shown in /proc/<pid>/fd where the system supports it. Raises OSError.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(label, os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        raise
    return fd


class BoardWriter:
    """One worker's own slot. action: what it said last."""

    def __init__(self, memory: mmap.mmap, rank: int) -> None:
        self.action = ""
        self._memory = memory
        self._offset = SLOT * (1 + rank)
        self._changes = _SLOT.unpack_from(memory, self._offset)[0]

    def set(self, action: str, waits_for: str = "") -> None:
        """Say what this worker does now; texts too long for the slot are cut."""
        self.action = action
        self._changes += 1
        _STAMP.pack_into(self._memory, self._offset, self._changes, time.monotonic())
        text = f"{action}\0{waits_for}\0".encode()[:_TEXT_BYTES]
        start = self._offset + _STAMP.size
        self._memory[start : start + len(text)] = text


class StatusBoard:
    """All slots of one group, and the flag that tells its workers to stop.

    size: number of workers.
    fd: an existing board's descriptor (not taken over: the caller still closes it); None makes a new board.
    """

    def __init__(self, size: int, fd: int | None = None) -> None:
        self.size = size
        length = SLOT * (1 + size) + _PID.size * size
        self.fd = -1
        own = anonymous_file(LABEL, length) if fd is None else os.dup(fd)
        try:
            self._memory = mmap.mmap(own, length)
        except BaseException:
            os.close(own)
            raise
        self.fd = own

    @classmethod
    def found(cls, fd: int) -> StatusBoard:
        """A board that another process made, of as many workers as its size tells."""
        return cls((os.fstat(fd).st_size - SLOT) // (SLOT + _PID.size), fd)

    def writer(self, rank: int) -> BoardWriter:
        """For the process that is worker ``rank``."""
        _PID.pack_into(self._memory, self._pid_at(rank), os.getpid())
        return BoardWriter(self._memory, rank)

    def process(self, rank: int) -> int:
        """The process of a worker, 0 before it has started."""
        return int(_PID.unpack_from(self._memory, self._pid_at(rank))[0])

    def _pid_at(self, rank: int) -> int:
        return SLOT * (1 + self.size) + _PID.size * rank

    def read(self, rank: int) -> Entry:
        changes, since, text = _SLOT.unpack_from(self._memory, SLOT * (1 + rank))
        action, _, rest = text.decode(errors="replace").partition("\0")
        return Entry(changes, since, action, rest.partition("\0")[0])

    def progress(self) -> int:
        """Grows whenever any worker changes its slot."""
        return sum(_SLOT.unpack_from(self._memory, SLOT * (1 + rank))[0] for rank in range(self.size))

    @property
    def stop(self) -> bool:
        """True while the workers are asked to end what they do."""
        return self._memory[0] != 0

    @stop.setter
    def stop(self, value: bool) -> None:
        self._memory[0] = int(value)

    def close(self) -> None:
        """Let go of the memory here; may be called twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._memory.close()

    __del__ = close


class StopSignal:
    """How the driver tells all workers to stop: the board's flag for those that compute, a pipe for those that wait.

    fd: the pipe's end that becomes readable; nobody reads it but `clear`, so it wakes every worker that watches it.
    """

    def __init__(self, board: StatusBoard) -> None:
        self._board = board
        self.fd, self._write = os.pipe()

    def send(self) -> None:
        if self.fd >= 0 and not self._board.stop:
            self._board.stop = True
            os.write(self._write, b"!")

    def clear(self) -> None:
        """Take the signal back; only while no worker runs."""
        if self._board.stop:
            self._board.stop = False
            os.read(self.fd, 1)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            os.close(self._write)
            self.fd = -1

    __del__ = close


def stop_interrupt(board: StatusBoard, fd: int) -> Interrupt:
    """The worker's side of a `StopSignal`; a check costs a tenth of a microsecond."""

    def check() -> None:
        if board.stop:
            raise Aborted("the driver told all workers to stop, because another part of the call failed")

    return Interrupt(check, fd)
