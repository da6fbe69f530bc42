"""A save that is written while the run goes on.

    worker   copies what it holds, and a thread of it writes the copy:   shard, then a note that it is written
    driver   a thread waits until all notes are there, then puts the checkpoint in its place

Nobody who trains waits for the disk. Until all notes are there the save does not exist, whoever dies.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from stageflow.checkpoint.layout import FileRecord
from stageflow.checkpoint.save import Progress, Saving
from stageflow.checkpoint.shard import Shard, ShardEntry
from stageflow.errors import CheckpointError

log = logging.getLogger("stageflow")

_SUFFIX = ".note"
_LOOK_EVERY = 0.02  # seconds
_NICENESS = 10  # of a thread that writes: training comes first


class Pending(Protocol):
    """A save under way."""

    @property
    def done(self) -> bool:
        """Whether it is over, well or not."""
        ...

    def result(self) -> None:
        """Wait until it is over. Raises CheckpointError; what the place held before is untouched then."""
        ...

    def abandon(self) -> None:
        """The writers are gone: finish if they had finished, else leave all as it was. Never raises."""
        ...


# ----------------------------------------------------------------------------------------------------- a worker's side


def write_behind(directory: str | Path, shards: Sequence[Shard]) -> None:
    """Write shards (made with ``copy=True``) in a thread of this process, and a note for each.

    directory: `Saving.path`.
    """
    threading.Thread(
        target=_write_all, args=(Path(directory), list(shards)), name="stageflow-writer", daemon=True
    ).start()


def _write_all(directory: Path, shards: list[Shard]) -> None:
    with contextlib.suppress(OSError, AttributeError):  # Linux has a niceness per thread; elsewhere it goes without
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    while shards:
        shard = shards.pop(0)  # its memory goes as soon as it is written
        try:
            said: dict[str, Any] = {"entry": asdict(shard.write(directory))}
        except CheckpointError as error:
            said = {"error": str(error)}
        with contextlib.suppress(OSError):  # the save was given up, and its folder is gone
            _note(directory / f".{shard.file}{_SUFFIX}", said)


def _note(path: Path, said: dict[str, Any]) -> None:
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(said), encoding="utf-8")
    os.rename(unfinished, path)


# ------------------------------------------------------------------------------------------------------ the driver's


class BackgroundSave:
    """Finishes a `Saving` in a thread once its shards are written.

    count: how many there will be. timeout: seconds without a byte written after which it fails. then: called with no
    arguments after a save that went well, in that thread.
    """

    def __init__(
        self, saving: Saving, count: int, progress: Progress, timeout: float, then: Callable[[], None] | None = None
    ) -> None:
        self._saving = saving
        self._count = count
        self._progress = progress
        self._timeout = timeout
        self._then = then
        self._error: CheckpointError | None = None
        self._writers_gone = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stageflow-save", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        self._writers_gone.set()
        self._thread.join()
        if self._error is not None:
            log.warning("%s", self._error)

    def _run(self) -> None:
        try:
            self._saving.finish(self._collect(), self._progress)
            if self._then is not None:
                self._then()
        except OSError as error:
            self._error = CheckpointError(f"{self._saving.directory} could not be saved: {error}")
        except CheckpointError as error:
            self._error = error
        finally:
            self._saving.abandon()

    def _collect(self) -> list[ShardEntry]:
        """Wait for all notes, and take them away."""
        size, moved = -1, time.monotonic()
        while True:
            last_look = self._writers_gone.wait(_LOOK_EVERY)
            notes = sorted(self._saving.path.glob(f".*{_SUFFIX}"))
            entries = [_entry(note) for note in notes]
            if len(entries) == self._count:
                for note in notes:
                    note.unlink()
                return entries
            if last_look:
                raise CheckpointError(
                    f"the save of step {self._progress.step} to {self._saving.directory} was given up: its writers "
                    "ended before all was written"
                )
            now = time.monotonic()
            written = _bytes_in(self._saving.path)
            if written != size:
                size, moved = written, now
            elif now - moved > self._timeout:
                raise CheckpointError(
                    f"the save to {self._saving.directory} has not got on for {self._timeout:g} s: "
                    f"{len(entries)} of {self._count} files are written"
                )


def _entry(note: Path) -> ShardEntry:
    said = json.loads(note.read_text(encoding="utf-8"))
    if "error" in said:
        raise CheckpointError(said["error"])
    fields = said["entry"]
    return ShardEntry(**{**fields, "names": tuple(fields["names"]), "record": FileRecord(**fields["record"])})


def _bytes_in(directory: Path) -> int:
    total = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # a writer gave it its final name meanwhile
                total += entry.stat().st_size
    return total
