"""Finds what a piece of code left behind: processes, threads, open descriptors, shared memory with a name."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_SHM = Path("/dev/shm")


@dataclass(frozen=True)
class Holdings:
    """What this process holds at one moment, each as text that identifies it.

    processes: all descendants, zombies too. Without /proc, `processes` and `descriptors` stay empty.
    """

    processes: frozenset[str]
    threads: frozenset[str]
    descriptors: frozenset[str]
    shared_memory: frozenset[str]

    @classmethod
    def now(cls) -> Holdings:
        return cls(
            processes=frozenset(_descendants(os.getpid())),
            threads=frozenset(f"{thread.name} ({thread.ident})" for thread in threading.enumerate()),
            descriptors=frozenset(_descriptors()),
            shared_memory=frozenset(entry.name for entry in _SHM.iterdir()) if _SHM.is_dir() else frozenset(),
        )

    def beyond(self, earlier: Holdings) -> list[str]:
        """One line for each thing held now and not ``earlier``."""
        new = [f"process {one}" for one in sorted(self.processes - earlier.processes)]
        new += [f"thread {one}" for one in sorted(self.threads - earlier.threads)]
        new += [f"descriptor {one}" for one in sorted(self.descriptors - earlier.descriptors)]
        new += [f"shared memory {one}" for one in sorted(self.shared_memory - earlier.shared_memory)]
        return new


@contextlib.contextmanager
def no_leaks(within: float = 2.0) -> Iterator[None]:
    """Fail when the body leaves anything behind that was not there before.

        with no_leaks():
            with sf.Pipeline(...) as pipe:
                ...

    within: seconds after the body in which things may still vanish. Raises AssertionError that lists what stayed.
    An exception of the body passes through unchecked.
    """
    gc.collect()
    before = Holdings.now()
    yield
    deadline = time.monotonic() + within
    gc.collect()
    while left := Holdings.now().beyond(before):
        if time.monotonic() > deadline:
            raise AssertionError("left behind:\n  " + "\n  ".join(left))
        time.sleep(0.02)


def descendants(pid: int) -> list[int]:
    """Process ids of all children of ``pid``, their children, and so on, zombies too."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.parent.name))
    found, todo = [], [pid]
    while todo:
        offspring = children.get(todo.pop(), [])
        found += offspring
        todo += offspring
    return found


def _descendants(pid: int) -> Iterator[str]:
    for child in descendants(pid):
        with contextlib.suppress(OSError):
            name = (_PROC / str(child) / "comm").read_text().strip()
            command = (_PROC / str(child) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            yield f"{child} {name}: {command[:80].strip() or 'zombie'}"


def _descriptors() -> Iterator[str]:
    folder = _PROC / "self" / "fd"
    if not folder.is_dir():
        return
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):  # the listing's own descriptor
            yield f"{name} -> {os.readlink(folder / name)}"
