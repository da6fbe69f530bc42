"""A save that either happened or did not."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stageflow.checkpoint.disk import make_sibling, record, recover, swap, sweep, sync, write_text
from stageflow.checkpoint.layout import INDEX, MANIFEST, FileRecord, Manifest, is_own_file, package_versions
from stageflow.checkpoint.shard import ShardEntry
from stageflow.errors import CheckpointError


@dataclass(frozen=True)
class Progress:
    """What a checkpoint remembers besides tensors.

    step: number of the last step, seed: of all random draws; the next draws depend on both.
    aliases: further name of a tied weight -> the name it is stored under.
    extra: the caller's own, plain JSON values.
    """

    step: int
    seed: int
    aliases: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


class Saving:
    """One save into ``directory``, which keeps its old content until `finish` has put the new in its place.

        with Saving("run1", bytes_needed=n) as saving:
            entries = [write_shard(saving.path, ...) for each worker]
            saving.finish(entries, Progress(step, seed))

    path: the hidden directory beside it that shards go to; further files put there are saved too. Left without
    `finish`, or when the process dies, the target is as it was; a dead process's leavings go with the next save.

    Raises CheckpointError before any work if the target is something else than a checkpoint or an empty directory,
    can't be written, or has less than ``bytes_needed`` free beside it.
    """

    def __init__(self, directory: str | Path, bytes_needed: int = 0) -> None:
        self.directory = Path(os.path.realpath(directory))
        with self._explained("can't be saved to"):
            _check_target(self.directory)
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            recover(self.directory)
            sweep(self.directory)
            _check_space(self.directory.parent, bytes_needed)
            self.path, self._lock = make_sibling(self.directory)
        self._open = True

    def finish(self, entries: Sequence[ShardEntry], progress: Progress) -> None:
        """Write index and manifest, have all on the medium, and swap the new directory in.

        entries: of all shards. Raises CheckpointError; the old checkpoint is untouched then.
        """
        try:
            with self._explained("could not be saved; what it held before is untouched"):
                self._complete(entries, progress)
                old = swap(self.path, self.directory)
        except BaseException:
            self.abandon()
            raise
        self._release()
        with self._explained("was saved, but may not outlive a power failure"):
            sync(self.directory.parent)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def abandon(self) -> None:
        """Leave the target as it is; may be called twice."""
        if self._open:
            shutil.rmtree(self.path, ignore_errors=True)
            self._release()

    def __enter__(self) -> Saving:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyboardInterrupt):
            error.add_note(f"the save was interrupted; {self.directory} holds what it held before, or all of the new")
        self.abandon()

    def _complete(self, entries: Sequence[ShardEntry], progress: Progress) -> None:
        _check_entries(entries)
        model = [entry for entry in entries if entry.kind == "model"]
        index = {
            "metadata": {"total_size": sum(entry.tensor_bytes for entry in model)},
            "weight_map": {name: entry.file for entry in model for name in entry.names},
        }
        write_text(self.path / INDEX, json.dumps(index, indent=2))
        manifest = Manifest(
            step=progress.step,
            seed=progress.seed,
            files=self._records({entry.file: entry.record for entry in entries}),
            aliases=dict(progress.aliases),
            optimizer={entry.file: entry.rest for entry in entries if entry.kind == "optimizer"},
            extra=dict(progress.extra),
            versions=package_versions(),
        )
        write_text(self.path / MANIFEST, manifest.to_json())
        if self.directory.is_dir():
            _carry_over(self.directory, self.path)
            shutil.copymode(self.directory, self.path)
        sync(self.path)

    def _records(self, shards: Mapping[str, FileRecord]) -> dict[str, FileRecord]:
        found = {path.name for path in self.path.iterdir()}
        missing = sorted(shards.keys() - found)
        if missing:
            raise CheckpointError(
                f"{', '.join(missing)} was written elsewhere: all workers must see {self.path.parent} as one directory"
            )
        others = sorted(found - shards.keys())
        for name in others:
            sync(self.path / name)
        return {**shards, **{name: record(self.path / name) for name in others}}

    def _release(self) -> None:
        self._open = False
        os.close(self._lock)

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{self.directory} {what}: {error}") from error


def _check_target(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise CheckpointError(f"{directory} is a file; a checkpoint is a directory")
    if os.path.ismount(directory):
        raise CheckpointError(f"{directory} is a mount point and can't be replaced as one; save into a directory in it")
    here = Path.cwd()
    if directory == here or directory in here.parents:
        raise CheckpointError(f"{directory} is or holds the current directory, which a save replaces; name another")
    if directory.is_dir() and any(directory.iterdir()) and not (directory / MANIFEST).exists():
        raise CheckpointError(
            f"{directory} holds files but no {MANIFEST}, so it is no checkpoint that may be replaced; name another"
        )


def _check_space(parent: Path, needed: int) -> None:
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise CheckpointError(
            f"{parent} has {free / 2**30:.2f} GiB free, the checkpoint needs {needed / 2**30:.2f} GiB "
            "(beside the old one, which is kept until the new one is whole)"
        )


def _check_entries(entries: Sequence[ShardEntry]) -> None:
    seen: dict[str, str] = {}
    for kind in ("model", "optimizer"):
        of_kind = [entry for entry in entries if entry.kind == kind]
        expected = list(range(of_kind[0].count)) if of_kind else []
        if sorted(entry.index for entry in of_kind) != expected or any(e.count != len(of_kind) for e in of_kind):
            raise CheckpointError(f"the {kind} shards are not complete: {sorted(entry.file for entry in of_kind)}")
        for entry in of_kind:
            for name in entry.names:
                # "/..." are a writer's own numbers for the tensors in its plain part
                if not name.startswith("/") and seen.setdefault(f"{kind} {name}", entry.file) != entry.file:
                    raise CheckpointError(f"{name!r} is in two shards: {seen[f'{kind} {name}']} and {entry.file}")


def _carry_over(old: Path, new: Path) -> None:
    """Keep what the user has put into the old directory: a tokenizer, notes."""
    kept = [path for path in old.iterdir() if not is_own_file(path.name) and not (new / path.name).exists()]
    for path in kept:
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, new / path.name, symlinks=True, copy_function=_link)
        else:
            _link(path, new / path.name)
    if kept:
        os.sync()


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # not every file system can
        shutil.copy2(source, target, follow_symlinks=False)
