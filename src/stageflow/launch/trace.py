"""What the workers of a running process do, seen from any other process of the same user.

Nobody has to answer for it but Python itself: what a worker does and what it waits for is on its group's status board,
and a worker writes its stacks to its fault log when it gets SIGUSR1, also in the middle of a computation.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stageflow.errors import InputError
from stageflow.launch.base import WorkerStatus
from stageflow.launch.board import LABEL, StatusBoard
from stageflow.launch.processes import FAULTS
from stageflow.launch.zygote import STACKS_SIGNAL

_PROC = Path("/proc")
_WITHIN = 0.5  # seconds in which a worker's stacks must have come
_STATES = {"D": "waiting for the system, uninterruptibly"}


@dataclass(frozen=True)
class WorkerTrace:
    """One worker at one moment.

    status: action, what it waits for, since when, its process. stacks: of its Python threads, "" where they can't be
    had. remark: why not, or what is unusual about its process.
    """

    status: WorkerStatus
    stacks: str
    remark: str

    def __str__(self) -> str:
        remark = f" ({self.remark})" if self.remark else ""
        lines = [f"{self.status}, process {self.status.pid}{remark}"]
        return "\n".join(lines + [f"    {line}" for line in self.stacks.rstrip().splitlines()])


def trace_process(pid: int, *, stacks: bool = True) -> list[list[WorkerTrace]]:
    """The groups of workers of a process: the driver's or a worker's id will do; a list for each group, by rank.

    stacks: ask workers for them. Raises InputError where there is no such process, no workers, or no permission.
    """
    if not _PROC.is_dir():
        raise InputError("this system has no /proc, so another process can't be looked into")
    try:
        found = dict(_descriptors(pid, LABEL))
    except FileNotFoundError:
        raise InputError(f"there is no process {pid}") from None
    except PermissionError:
        raise InputError(f"process {pid} belongs to another user: try it as that one") from None
    if not found:
        raise InputError(
            f"process {pid} has no workers of a pipeline; give the process that made the Pipeline, or a worker. Ranks "
            "of torchrun have none either: send them SIGUSR1 while fit() runs"
        )
    return [_trace_group(path, stacks) for path in found.values()]


def tell(groups: list[list[WorkerTrace]]) -> str:
    """As text."""
    return "\n\n".join("\n".join(map(str, group)) for group in groups)


def _trace_group(path: Path, stacks: bool) -> list[WorkerTrace]:
    fd = os.open(path, os.O_RDWR)
    try:
        inode = os.fstat(fd).st_ino
        board = StatusBoard.found(fd)
    finally:
        os.close(fd)
    try:
        return [_trace_worker(board, rank, inode, stacks) for rank in range(board.size)]
    finally:
        board.close()


def _trace_worker(board: StatusBoard, rank: int, inode: int, stacks: bool) -> WorkerTrace:
    pid, entry = board.process(rank), board.read(rank)
    state = _state(pid, inode)
    seconds = time.monotonic() - entry.since if entry.changes else 0.0
    alive, stopped = state not in ("", "Z"), state in ("T", "t")
    status = WorkerStatus(rank, entry.action, entry.waits_for, seconds, pid, alive, stopped)
    if not status.alive:
        return WorkerTrace(status, "", "ended" if pid else "not started yet")
    remark = _STATES.get(state, "")
    if not stacks:
        return WorkerTrace(status, "", remark)
    if pid == os.getpid():
        return WorkerTrace(status, _stacks_of_thread(rank), remark)
    logs = list(_descriptors(pid, FAULTS))
    if not logs:
        return WorkerTrace(status, "", "a thread: send its process SIGUSR1 while fit() runs to see its stack")
    text = _ask(pid, logs[0][1])
    return WorkerTrace(status, text, remark if text or remark or stopped else "does not answer")


def _ask(pid: int, log: Path) -> str:
    """Have a worker write its stacks; "" where it does not within a moment."""
    try:
        fd = os.open(log, os.O_RDWR)
    except OSError:
        return ""  # it ended meanwhile
    try:
        start = size = os.fstat(fd).st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACKS_SIGNAL)
        deadline = time.monotonic() + _WITHIN
        while time.monotonic() < deadline:
            time.sleep(0.01)
            before, size = size, os.fstat(fd).st_size
            if size > start and size == before:
                break
        text = os.pread(fd, size - start, start).decode(errors="replace")
        os.ftruncate(fd, start)  # what a dying worker writes next must not be taken for what it did now
        return text
    finally:
        os.close(fd)


def _descriptors(pid: int, label: str) -> Iterator[tuple[int, Path]]:
    """(inode, path) of the open anonymous files of a process that bear a label, each file once."""
    seen: set[int] = set()
    folder = _PROC / str(pid) / "fd"
    for name in sorted(os.listdir(folder), key=int):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(folder / name).startswith(f"/memfd:{label} "):
                inode = os.stat(folder / name).st_ino
                if inode not in seen:
                    seen.add(inode)
                    yield inode, folder / name


def _state(pid: int, inode: int) -> str:
    """The state letter of a process that has the board; "" where there is none, or the id is another's by now."""
    try:
        state = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
        if state == "Z" or any(found == inode for found, _ in _descriptors(pid, LABEL)):
            return state
    except OSError:
        pass
    return ""


def _stacks_of_thread(rank: int) -> str:
    frames = sys._current_frames()
    mine = [thread.ident for thread in threading.enumerate() if thread.name == f"stageflow-worker-{rank}"]
    return "".join("".join(traceback.format_stack(frames[ident])) for ident in mine if ident in frames)
