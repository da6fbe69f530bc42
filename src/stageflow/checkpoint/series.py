"""A folder with the last few checkpoints of one run.

run1/
  step-00000200/      each a checkpoint of its own (see layout.py)
  step-00000300/
  .step-00000100.removing-4f1c9a20    one that is being removed; a crash leaves no half of it to be taken for whole
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stageflow.checkpoint.disk import recover, sweep, try_lock
from stageflow.checkpoint.layout import MANIFEST
from stageflow.errors import CheckpointError

log = logging.getLogger("stageflow")

_PATIENCE = 10.0  # seconds
_STEP = re.compile(r"step-(\d+)")
_HIDDEN = re.compile(r"\.(step-\d+)\.(saving|replaced|removing)-[0-9a-f]+")


@dataclass(frozen=True)
class Member:
    """One checkpoint of a series. step: as its name says."""

    step: int
    path: Path


class Series:
    """The checkpoints ``step-00000100``, ``step-00000200``, ... of one folder, which need not exist yet.

    Raises CheckpointError where the folder is a checkpoint itself, or a file.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(os.path.realpath(root))
        if (self.root / MANIFEST).exists():
            raise CheckpointError(
                f"{self.root} is one checkpoint; a run's checkpoints go into a folder of their own, such as "
                f"{self.root.with_name(self.root.name + '-checkpoints')}"
            )
        if self.root.exists() and not self.root.is_dir():
            raise CheckpointError(f"{self.root} is a file; a run's checkpoints go into a folder")

    def place(self, step: int) -> Path:
        """Where the checkpoint of a step goes."""
        return self.root / f"step-{step:08}"

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Keep other runs out; makes the folder. A run that ends, however it does, gives the folder free.

        Raises CheckpointError where another has it and keeps it for `_PATIENCE` seconds (a killed process's own
        children may hold on to it a moment longer), or where the folder can't be made.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            deadline = time.monotonic() + _PATIENCE
            while (lock := try_lock(self.root)) is None:
                if time.monotonic() > deadline:
                    raise CheckpointError(f"another run writes its checkpoints into {self.root}; is it still going?")
                time.sleep(0.1)
        except OSError as error:
            raise CheckpointError(f"{self.root} can't be written to: {error}") from error
        try:
            yield
        finally:
            os.close(lock)

    def members(self) -> list[Member]:
        """All there are, good or not, newest first. Raises CheckpointError where the folder can't be read."""
        try:
            names = set(os.listdir(self.root))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"{self.root} can't be read: {error}") from error
        # one that was between two renames when its writer died is there under a hidden name only
        names |= {hidden[1] for name in names if (hidden := _HIDDEN.fullmatch(name)) and hidden[2] == "replaced"}
        steps = {int(match[1]) for name in names if (match := _STEP.fullmatch(name))}
        return [Member(step, self.place(step)) for step in sorted(steps, reverse=True)]

    def sweep(self) -> None:
        """Remove what saves and removals left behind whose process has died."""
        try:
            names = sorted(os.listdir(self.root))
        except OSError:
            return  # not there yet, or the save will say what is wrong
        for name in names:
            hidden = _HIDDEN.fullmatch(name)
            if hidden is None:
                continue
            if hidden[2] == "removing":
                shutil.rmtree(self.root / name, ignore_errors=True)
            else:
                recover(self.root / hidden[1])
                sweep(self.root / hidden[1])

    def prune(self, keep: int) -> None:
        """Remove all but the ``keep`` newest whole ones. What is visibly not whole and older than those goes too.

        A checkpoint that can't be removed stays, and the log says so.
        """
        whole = 0
        for member in self.members():
            if whole >= keep:
                self._remove(member.path)
            elif (member.path / MANIFEST).exists():
                whole += 1

    def _remove(self, path: Path) -> None:
        aside = path.with_name(f".{path.name}.removing-{secrets.token_hex(4)}")
        try:
            os.rename(path, aside)
            shutil.rmtree(aside)
        except OSError as error:
            log.warning("the old checkpoint %s could not be removed: %s", path, error)


def is_series(path: Path) -> bool:
    """Whether a folder is no checkpoint itself but holds some."""
    return path.is_dir() and not (path / MANIFEST).exists() and bool(Series(path).members())
