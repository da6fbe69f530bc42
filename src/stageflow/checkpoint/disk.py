"""Files that survive a power loss, and directories that are replaced as one.

A save writes into a hidden sibling of its target and swaps the two at the end:

    .run1.saving-4f1c9a20     being written; its writer holds a lock on it as long as it lives
    .run1.replaced-4f1c9a20   the old run1, between the two renames of a file system that can't exchange directories
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from stageflow.checkpoint.layout import FileRecord, read_manifest
from stageflow.errors import CheckpointError

_CHUNK = 1 << 20
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_CANNOT = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
_PATIENCE = 5.0  # seconds that a living writer may take between two renames


def record(path: Path) -> FileRecord:
    """Size and checksum of a file."""
    digest = hashlib.sha256()
    size = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileRecord(size, digest.hexdigest())


def sync(path: Path) -> None:
    """Have a file or directory on the medium before returning."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # some network file systems can't for directories, and then renames are already safe or never will be
        if error.errno not in _CANNOT or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a small file and have it on the medium."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    sync(path)


# ------------------------------------------------------------------------------------------------- the hidden sibling


def make_sibling(target: Path) -> tuple[Path, int]:
    """A new empty directory beside ``target`` and the descriptor that locks it until closed."""
    while True:
        path = _sibling(target, "saving", secrets.token_hex(4))
        os.mkdir(path)
        lock = try_lock(path)
        # another process may have taken it for a dead one's before it was locked
        if lock is not None and path.exists():
            return path, lock
        if lock is not None:
            os.close(lock)


def sweep(target: Path) -> None:
    """Remove what saves of ``target`` left behind whose process has died."""
    for path in _siblings(target, "saving"):
        lock = try_lock(path)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
    for aside in _siblings(target, "replaced"):
        if target.exists() and not _partner(target, aside).exists():
            shutil.rmtree(aside, ignore_errors=True)


def _sibling(target: Path, role: str, token: str) -> Path:
    return target.with_name(f".{target.name}.{role}-{token}")


def _siblings(target: Path, role: str) -> Iterator[Path]:
    prefix = f".{target.name}.{role}-"
    try:
        names = os.listdir(target.parent)
    except OSError:
        return
    yield from (target.parent / name for name in sorted(names) if name.startswith(prefix))


def _partner(target: Path, aside: Path) -> Path:
    return _sibling(target, "saving", aside.name.rpartition("-")[2])


def try_lock(path: Path) -> int | None:
    """Lock a directory until the descriptor is closed; None where a living process has it or it is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


# ------------------------------------------------------------------------------------------------------- the swap


def swap(new: Path, target: Path) -> Path | None:
    """Put ``new`` in the place of ``target``; returns where the old one is now, None where there was none."""
    if not target.exists():
        os.rename(new, target)
        return None
    if _exchange(new, target):
        return new
    aside = _sibling(target, "replaced", new.name.rpartition("-")[2])
    os.rename(target, aside)
    try:
        os.rename(new, target)
    except OSError:
        os.rename(aside, target)
        raise
    return aside


def recover(target: Path) -> None:
    """Finish a swap that a crash stopped between its two renames; nothing to do in every other case."""
    deadline = time.monotonic() + _PATIENCE
    while not target.exists():
        aside = next(_siblings(target, "replaced"), None)
        if aside is None:
            return
        new = _partner(target, aside)
        lock = try_lock(new)
        if lock is None and new.exists():
            # its writer lives and is about to rename it
            if time.monotonic() > deadline:
                raise CheckpointError(f"{target} is being replaced by a process that does not go on; it is in {aside}")
            time.sleep(0.02)
            continue
        try:
            os.rename(new if lock is not None and _complete(new) else aside, target)
        except FileNotFoundError:
            continue
        finally:
            if lock is not None:
                os.close(lock)


def _complete(directory: Path) -> bool:
    try:
        return read_manifest(directory) is not None
    except CheckpointError:
        return False


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two directories in one step; False where system or file system can't."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT:
        return False
    raise OSError(code, os.strerror(code), str(b))
