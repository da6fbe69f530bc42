"""A save happens whole or not at all, whatever fails and whenever."""

import errno
import json
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stageflow.checkpoint import Progress, Saving, disk, load_weights, open_checkpoint, write_shard
from stageflow.errors import CheckpointError

OLD = {"w": torch.tensor([1.0, 2.0]), "v": torch.tensor([3])}
NEW = {"w": torch.tensor([5.0, 6.0]), "v": torch.tensor([7])}
CALLS = ("mkdir", "open", "write", "fsync", "rename", "listdir")


def holds(directory: Path, tensors: dict[str, torch.Tensor]) -> bool:
    found = load_weights(directory)
    return found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in found)


def without_exchange(monkeypatch):
    monkeypatch.setattr(disk, "_exchange", lambda a, b: False)


@pytest.fixture(params=["exchange", "two renames"])
def way(request, monkeypatch):
    if request.param == "two renames":
        without_exchange(monkeypatch)
    return request.param


# ------------------------------------------------------------------------------------------------------- it works


@pytest.mark.usefixtures("no_leavings", "way")
def test_a_save_replaces_the_one_before(tmp_path, save):
    target = tmp_path / "deep" / "run1"
    save(target, OLD, shards=2)
    assert holds(target, OLD)
    save(target, NEW, shards=1, step=8)
    assert holds(target, NEW)
    assert open_checkpoint(target).step == 8
    names = {path.name for path in target.iterdir()}
    assert names == {"model-00001-of-00001.safetensors", "model.safetensors.index.json", "stageflow.json"}


def test_this_machine_exchanges_in_one_step(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not disk._exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system can't exchange directories")
    assert (tmp_path / "a" / "b").exists()
    assert (tmp_path / "b" / "a").exists()


def test_index_and_manifest(tmp_path, save):
    save(tmp_path / "run", OLD, step=4, seed=9, aliases={"head": "w"}, extra={"epoch": 2, "rates": {1: 0.5}})
    index = json.loads((tmp_path / "run" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 16
    assert index["weight_map"] == {
        "w": "model-00001-of-00002.safetensors",
        "v": "model-00002-of-00002.safetensors",
    }
    checkpoint = open_checkpoint(tmp_path / "run")
    assert (checkpoint.step, checkpoint.seed) == (4, 9)
    assert checkpoint.extra == {"epoch": 2, "rates": {"1": 0.5}}
    assert checkpoint.manifest is not None
    assert checkpoint.manifest.aliases == {"head": "w"}
    assert checkpoint.manifest.versions["stageflow"]
    assert checkpoint.manifest.files.keys() == {*index["weight_map"].values(), "model.safetensors.index.json"}


def test_two_equal_saves_are_equal_bytes(tmp_path, save):
    save(tmp_path / "a", OLD)
    save(tmp_path / "b", OLD)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_through_a_symbolic_link_the_real_directory_is_replaced(tmp_path, save):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    save(tmp_path / "run", OLD)
    save(tmp_path / "run", NEW)
    assert (tmp_path / "run").is_symlink()
    assert holds(tmp_path / "disk", NEW)


def test_files_of_the_user_stay(tmp_path, save, way):
    target = tmp_path / "run"
    save(target, OLD, shards=3)
    (target / "tokenizer.json").write_text("mine")
    (target / "notes").mkdir()
    (target / "notes" / "a.txt").write_text("too")
    for _ in range(2):
        save(target, NEW, shards=1)
    assert (target / "tokenizer.json").read_text() == "mine"
    assert (target / "notes" / "a.txt").read_text() == "too"
    assert not (target / "model-00003-of-00003.safetensors").exists()
    assert holds(target, NEW)


def test_files_put_beside_the_shards_are_part_of_the_save(tmp_path):
    with Saving(tmp_path / "run") as saving:
        entry = write_shard(saving.path, "model", 0, 1, OLD)
        (saving.path / "config.json").write_text("{}")
        saving.finish([entry], Progress(1, 0))
    assert (tmp_path / "run" / "config.json").exists()
    (tmp_path / "run" / "config.json").write_text("{ }")
    with pytest.raises(CheckpointError, match=r"config\.json has 3 bytes instead of 2"):
        open_checkpoint(tmp_path / "run")


def test_the_directory_is_as_open_as_the_umask_or_the_old_one_says(tmp_path, save):
    target = tmp_path / "run"
    mask = os.umask(0o027)
    try:
        save(target, OLD)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(target.stat().st_mode) == 0o750
    target.chmod(0o701)
    save(target, NEW)
    assert stat.S_IMODE(target.stat().st_mode) == 0o701


# ------------------------------------------------------------------------------------------ refused before any work


def test_other_directories_are_not_replaced(tmp_path, save):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"thesis holds files but no stageflow\.json"):
        save(tmp_path / "thesis", NEW)
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="file is a file"):
        save(tmp_path / "file", NEW)
    with pytest.raises(CheckpointError, match="run can't be saved to: .*/file'"):
        save(tmp_path / "file" / "run", NEW)
    assert {path.name for path in tmp_path.iterdir()} == {"thesis", "file"}


def test_an_empty_directory_will_do(tmp_path, save):
    (tmp_path / "run").mkdir()
    save(tmp_path / "run", NEW)
    assert holds(tmp_path / "run", NEW)


def test_the_current_directory_is_refused(tmp_path, save, monkeypatch):
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    for directory in (".", ".."):
        with pytest.raises(CheckpointError, match="current directory"):
            save(directory, NEW)
    save("run", NEW)
    assert holds(tmp_path / "a" / "b" / "run", NEW)


def test_a_mount_point_is_refused():
    with pytest.raises(CheckpointError, match="/proc is a mount point"):
        Saving("/proc")


@pytest.mark.usefixtures("no_leavings")
def test_too_little_space_is_said_in_advance(tmp_path, save):
    save(tmp_path / "run", OLD)
    with pytest.raises(CheckpointError, match=r"GiB free, the checkpoint needs 1048576\.00 GiB"):
        Saving(tmp_path / "run", bytes_needed=2**50)
    assert holds(tmp_path / "run", OLD)


def test_a_read_only_place(tmp_path, save, monkeypatch):
    save(tmp_path / "run", OLD)

    def refuse(path, *_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(CheckpointError, match="run can't be saved to.*Read-only file system"):
        save(tmp_path / "run", NEW)
    assert holds(tmp_path / "run", OLD)


@pytest.mark.parametrize(
    ("shards", "reason"),
    [
        ([("model", 0, 2)], "not complete"),
        ([("model", 0, 1), ("model", 1, 2)], "not complete"),
        ([("model", 0, 2), ("model", 1, 2)], "'w' is in two shards"),
    ],
)
@pytest.mark.usefixtures("no_leavings")
def test_shards_that_make_no_whole_are_refused(tmp_path, save, shards, reason):
    save(tmp_path / "run", OLD)
    saving = Saving(tmp_path / "run")
    entries = [write_shard(saving.path, *shard, {"w": torch.ones(2)}) for shard in shards]
    with pytest.raises(CheckpointError, match=reason):
        saving.finish(entries, Progress(1, 0))
    assert holds(tmp_path / "run", OLD)


def test_a_shard_on_another_machines_disk(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    with Saving(tmp_path / "run") as saving:
        entry = write_shard(tmp_path / "elsewhere", "model", 0, 1, NEW)
        with pytest.raises(CheckpointError, match=r"model-00001-of-00001\.safetensors was written elsewhere"):
            saving.finish([entry], Progress(1, 0))


@pytest.mark.parametrize("extra", [{"loss": float("nan")}, {"model": torch.ones(1)}], ids=["nan", "tensor"])
def test_extra_that_is_not_plain(tmp_path, save, extra):
    with pytest.raises(CheckpointError, match="extra= must be plain"):
        save(tmp_path / "run", NEW, extra=extra)
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------------------------------------- failing half way


class Countdown:
    """Counts calls of what touches the disk; at the n-th, whichever function it is, ``end`` is called instead."""

    def __init__(self, patch: pytest.MonkeyPatch, calls: int, end: Callable[[str], None]):
        self.left = calls
        self._end = end
        for name in CALLS:
            patch.setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name, original):
        def call(*args, **kwargs):
            self.left -= 1
            if self.left == 0:
                self._end(name)
            return original(*args, **kwargs)

        return call


def fail(name: str) -> None:
    raise OSError(errno.EIO, f"failed in {name}")


def problem_of_saving(target: Path, save) -> str | None:
    try:
        save(target, NEW, shards=1)
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.usefixtures("no_leavings", "way")
def test_an_error_at_any_point_leaves_the_old_or_the_new(tmp_path, save):
    target = tmp_path / "run"
    failures = 0
    for calls in range(1, 200):
        save(target, OLD, shards=1)
        with pytest.MonkeyPatch.context() as patch:
            countdown = Countdown(patch, calls, fail)
            problem = problem_of_saving(target, save)
            failures += problem is not None
            assert problem is None or "failed in" in problem
        assert holds(target, OLD) or holds(target, NEW)
        # what could not even be removed goes with the next save
        Saving(target).abandon()
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
        if countdown.left > 0:
            break
    assert countdown.left > 0
    assert failures > 10


def test_a_reader_waits_for_a_living_writer_between_its_renames(tmp_path, save, monkeypatch):
    without_exchange(monkeypatch)
    target = tmp_path / "run"
    save(target, OLD)
    rename = os.rename
    readers: list[threading.Thread] = []
    found = []

    def slow(source, destination):
        if Path(destination) == target:
            readers.append(threading.Thread(target=lambda: found.append(holds(target, NEW))))
            readers[0].start()
            time.sleep(0.1)
        rename(source, destination)

    monkeypatch.setattr(os, "rename", slow)
    save(target, NEW)
    readers[0].join(10)
    assert found == [True]


def test_a_second_rename_that_fails_puts_the_old_back(tmp_path, save, monkeypatch):
    without_exchange(monkeypatch)
    target = tmp_path / "run"
    save(target, OLD)
    rename = os.rename

    def refuse(source, destination):
        if Path(destination) == target and "saving" in str(source):
            raise OSError(errno.EIO, "Input/output error")
        rename(source, destination)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(CheckpointError, match="could not be saved; what it held before is untouched"):
        save(target, NEW)
    assert holds(target, OLD)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.usefixtures("no_leavings")
def test_an_exception_between_the_shards_leaves_the_old(tmp_path, save):
    save(tmp_path / "run", OLD)

    def fail_half_way():
        with Saving(tmp_path / "run") as saving:
            write_shard(saving.path, "model", 0, 2, NEW)
            raise RuntimeError("a worker died")

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert holds(tmp_path / "run", OLD)


def test_a_save_in_progress_is_not_swept_away_by_another(tmp_path, save):
    with Saving(tmp_path / "run") as slow:
        entry = write_shard(slow.path, "model", 0, 1, NEW)
        save(tmp_path / "run", OLD)
        assert slow.path.exists()
        slow.finish([entry], Progress(1, 0))
    assert holds(tmp_path / "run", NEW)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
