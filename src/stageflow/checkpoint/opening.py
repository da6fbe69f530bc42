"""Opening what was saved: nothing is loaded before every file was found to be what it must be."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from stageflow.checkpoint.disk import record, recover
from stageflow.checkpoint.layout import INDEX, MANIFEST, Manifest, is_optimizer_shard, read_manifest
from stageflow.checkpoint.load import Checkpoint, opened
from stageflow.checkpoint.series import Member, Series, is_series, log
from stageflow.errors import CheckpointError, SplitError
from stageflow.split.stored import find_values


def open_checkpoint(path: str | Path, *, verify: bool = True, identity: str | None = None) -> Checkpoint:
    """Open a saved pipeline, a directory of safetensors files (such as a transformers model) or one such file.

    path: or a folder of several checkpoints, of which the newest good one is opened; the log names what was passed by.
    verify: compare the checksum of every file; False only looks at their sizes.
    identity: of the save that is expected, so that all workers load the same.

    Raises CheckpointError naming every file that is missing, damaged, or of another save.
    """
    path = Path(os.path.realpath(path))
    if is_series(path):
        newest = open_newest(Series(path), verify=verify)
        assert newest is not None
        return newest
    try:
        recover(path)
    except OSError as error:
        raise CheckpointError(f"the writer of {path} died while replacing it, and a repair failed: {error}") from error
    if not path.exists():
        raise CheckpointError(f"there is no checkpoint at {path}")
    manifest = None if path.is_file() else read_manifest(path)
    if manifest is None:
        checkpoint = _open_plain(path)
    else:
        _check_files(path, manifest, verify)
        checkpoint = Checkpoint(path, manifest, _places(path))
    if identity is not None and checkpoint.identity != identity:
        raise CheckpointError(f"{path} is another save than the other workers load: it was replaced meanwhile")
    return checkpoint


def open_newest(series: Series, *, verify: bool = True) -> Checkpoint | None:
    """The newest good checkpoint of a series, None where there is none at all.

    The log says which it is, and what is wrong with every newer one. Raises CheckpointError where all are damaged.
    """
    problems: list[str] = []
    for member in series.members():
        try:
            checkpoint = _open_member(member, verify)
        except CheckpointError as error:
            log.warning("passed by: %s", error)
            problems.append(str(error))
            continue
        log.info("using %s, the newest good checkpoint of %s", member.path.name, series.root)
        return checkpoint
    if problems:
        raise CheckpointError(f"no checkpoint in {series.root} is good; " + "; ".join(problems))
    return None


def _open_member(member: Member, verify: bool) -> Checkpoint:
    checkpoint = open_checkpoint(member.path, verify=verify)
    if checkpoint.manifest is None:
        raise CheckpointError(f"{member.path / MANIFEST} is missing, without which the other files can't be trusted")
    if checkpoint.step != member.step:
        raise CheckpointError(f"{member.path} holds step {checkpoint.step}, so it is not what was saved there")
    return checkpoint


def load_weights(path: str | Path, *, verify: bool = True) -> dict[str, Tensor]:
    """All weights of a saved pipeline for the plain model: ``model.load_state_dict(load_weights("run1"))``.

    They are on the CPU under the model's own names, tied ones under each. Raises CheckpointError as `open_checkpoint`.
    """
    return open_checkpoint(path, verify=verify).weights()


def _open_plain(path: Path) -> Checkpoint:
    if path.is_dir() and any(is_optimizer_shard(file.name) for file in path.iterdir()):
        raise CheckpointError(f"{path / MANIFEST} is missing, without which the other files can't be trusted")
    try:
        places = find_values(path)
    except (SplitError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is no checkpoint: {error}") from error
    for file in sorted(set(places.values())):
        if not file.exists():
            raise CheckpointError(f"{file} is missing")
        with opened(file):
            pass
    return Checkpoint(path, None, places)


def _places(directory: Path) -> dict[str, Path]:
    try:
        index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
        return {name: directory / file for name, file in index["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{directory / INDEX} is damaged: {error}") from error


def _check_files(directory: Path, manifest: Manifest, verify: bool) -> None:
    def problem(name: str) -> str | None:
        expected = manifest.files[name]
        try:
            size = (directory / name).stat().st_size
            if size != expected.bytes:
                return f"{name} has {size} bytes instead of {expected.bytes}"
            if verify and record(directory / name) != expected:
                return f"{name} is not what was saved: its checksum differs"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} can't be read: {error}"
        return None

    with ThreadPoolExecutor(max_workers=4) as pool:
        problems = [text for text in pool.map(problem, sorted(manifest.files)) if text]
    if problems:
        raise CheckpointError(f"{directory} is damaged: {'; '.join(problems)}")
