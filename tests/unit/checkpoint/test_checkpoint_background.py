"""A save in the background: complete or not at all, whoever ends first."""

import contextlib
import errno
import os
import threading
import time

import pytest
import torch

from stageflow.checkpoint import BackgroundSave, Progress, Saving, Shard, load_weights, open_checkpoint, write_behind
from stageflow.checkpoint import background as module
from stageflow.errors import CheckpointError

OLD = {"w": torch.ones(2), "v": torch.zeros(3)}


def shards(tensors, count=2):
    names = list(tensors)
    return [
        Shard.of("model", index, count, {name: tensors[name] for name in names[index::count]}, copy=True)
        for index in range(count)
    ]


def start(target, count=2, step=5, timeout=5.0, then=None):
    saving = Saving(target)
    return saving, BackgroundSave(saving, count, Progress(step, 0, extra={"a": 1}), timeout, then)


@pytest.mark.usefixtures("no_leavings")
def test_it_is_there_when_all_writers_are_through(tmp_path, save):
    save(tmp_path / "run", OLD)
    tensors = {"w": torch.full((2,), 3.0), "v": torch.arange(3.0)}
    told = []
    saving, pending = start(tmp_path / "run", then=lambda: told.append(open_checkpoint(tmp_path / "run").step))
    first, second = shards(tensors)
    write_behind(saving.path, [first])
    time.sleep(0.1)
    assert not pending.done
    assert open_checkpoint(tmp_path / "run").step == 7
    write_behind(saving.path, [second])
    for tensor in tensors.values():
        tensor.zero_()  # the run goes on
    pending.result()
    assert pending.done
    assert told == [5]
    assert load_weights(tmp_path / "run")["v"].tolist() == [0.0, 1.0, 2.0]
    assert open_checkpoint(tmp_path / "run").extra == {"a": 1}


def test_a_file_that_gets_its_final_name_while_bytes_are_counted(tmp_path, monkeypatch):
    (tmp_path / "there").write_bytes(b"12345")
    (tmp_path / "renamed").write_bytes(b"123")
    scan = os.scandir

    @contextlib.contextmanager
    def slow(directory):
        with scan(directory) as entries:
            found = list(entries)
        (tmp_path / "renamed").unlink()
        yield iter(found)

    monkeypatch.setattr(module.os, "scandir", slow)
    assert module._bytes_in(tmp_path) == 5


@pytest.mark.usefixtures("no_leavings")
def test_a_full_disk_leaves_the_old_and_is_named(tmp_path, save, monkeypatch):
    save(tmp_path / "run", OLD)
    write = os.write

    def full(descriptor, data):
        if len(data) > 1000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    saving, pending = start(tmp_path / "run")
    write_behind(saving.path, shards({"w": torch.ones(2), "v": torch.ones(1000)}))
    with pytest.raises(CheckpointError, match="model-00002-of-00002.safetensors could not be written.*No space left"):
        pending.result()
    assert load_weights(tmp_path / "run").keys() == OLD.keys()
    assert open_checkpoint(tmp_path / "run").step == 7


@pytest.mark.usefixtures("no_leavings")
def test_writers_that_end_before_all_is_written(tmp_path, save):
    save(tmp_path / "run", OLD)
    saving, pending = start(tmp_path / "run")
    write_behind(saving.path, shards(OLD)[:1])
    pending.abandon()
    with pytest.raises(CheckpointError, match="step 5 .* was given up"):
        pending.result()
    assert open_checkpoint(tmp_path / "run").step == 7


def test_writers_that_end_after_all_was_written(tmp_path, save):
    save(tmp_path / "run", OLD)
    saving = Saving(tmp_path / "run")
    write_behind(saving.path, shards(OLD))
    while len(list(saving.path.glob("*.note"))) < 2:
        time.sleep(0.01)
    pending = BackgroundSave(saving, 2, Progress(5, 0), 5.0)
    pending.abandon()
    pending.result()
    assert open_checkpoint(tmp_path / "run").step == 5


def test_a_writer_that_stands_still(tmp_path):
    _, pending = start(tmp_path / "run", timeout=0.1)
    with pytest.raises(CheckpointError, match=r"has not got on for 0.1 s: 0 of 2 files"):
        pending.result()
    assert list(tmp_path.iterdir()) == []


def test_a_writer_whose_folder_vanished_just_ends(tmp_path):
    write_behind(tmp_path / "gone", shards(OLD))
    deadline = time.monotonic() + 5
    while any(thread.name == "stageflow-writer" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_copy_has_values_of_its_own():
    tensor = torch.ones(3)
    mine, theirs = (Shard.of("model", 0, 1, {"w": tensor}, copy=copy) for copy in (True, False))
    tensor.zero_()
    assert mine.tensors["w"].tolist() == [1, 1, 1]
    assert theirs.tensors["w"].tolist() == [0, 0, 0]


def test_writing_is_not_held_up_by_pythons_lock(tmp_path, monkeypatch):
    """Another thread runs Python while a file is written: the lock is let go at every system call."""
    inside = threading.Event()
    write = os.write

    def slow(descriptor, data):
        inside.set()
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", slow)
    write_behind(tmp_path, [Shard.of("model", 0, 1, {"w": torch.ones(1 << 24)}, copy=True)])
    assert inside.wait(5)
    rounds, deadline = 0, time.monotonic() + 10
    while not (tmp_path / f".model-00001-of-00001.safetensors{module._SUFFIX}").exists():
        assert time.monotonic() < deadline
        rounds += 1
        time.sleep(0)
    assert rounds > 100
