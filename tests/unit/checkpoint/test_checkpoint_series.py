"""A folder of checkpoints: the newest good one is found, the last few stay, and damage is told by name."""

import logging
import os
import re
import shutil

import pytest
import torch

from stageflow.checkpoint import Saving, Series, load_weights, open_checkpoint, open_newest
from stageflow.errors import CheckpointError

SHARD = "model-00001-of-00002.safetensors"


def fill(root, save, steps=(10, 20, 30)):
    series = Series(root)
    for step in steps:
        save(series.place(step), {"w": torch.full((4,), float(step)), "v": torch.tensor([step])}, step=step)
    return series


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut_short(path):
    os.truncate(path, path.stat().st_size - 1)


def test_members_are_listed_newest_first_and_other_things_ignored(tmp_path, save):
    series = fill(tmp_path / "run", save, (20, 100_000_000, 3))
    (tmp_path / "run" / "notes.txt").write_text("x")
    (tmp_path / "run" / "step-best").mkdir()
    assert [member.step for member in series.members()] == [100_000_000, 20, 3]
    assert Series(tmp_path / "nowhere").members() == []
    assert open_newest(Series(tmp_path / "nowhere")) is None


def test_the_newest_is_opened_and_said(tmp_path, save, caplog):
    series = fill(tmp_path / "run", save)
    with caplog.at_level(logging.INFO, "stageflow"):
        assert open_newest(series).step == 30
    assert "using step-00000030" in caplog.text
    assert open_checkpoint(tmp_path / "run").step == 30
    assert load_weights(tmp_path / "run")["v"].item() == 30


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda newest: flip_a_bit(newest / SHARD), f"{SHARD} is not what was saved"),
        (lambda newest: cut_short(newest / SHARD), f"{SHARD} has .* bytes instead of"),
        (lambda newest: (newest / SHARD).unlink(), f"{SHARD} is missing"),
        (lambda newest: flip_a_bit(newest / "stageflow.json"), "stageflow.json is damaged"),
        (lambda newest: (newest / "stageflow.json").unlink(), "stageflow.json is missing"),
        (
            lambda newest: shutil.copy(newest.with_name("step-00000020") / SHARD, newest / SHARD),
            f"{SHARD} is not what was saved",
        ),
        (
            lambda newest: (shutil.rmtree(newest), newest.with_name("step-00000020").rename(newest)),
            "holds step 20",
        ),
    ],
    ids=["bit", "cut", "lost", "manifest", "no manifest", "mixed", "renamed"],
)
def test_a_damaged_newest_is_named_and_the_one_before_used(tmp_path, save, caplog, damage, reason):
    series = fill(tmp_path / "run", save)
    damage(series.place(30))
    found = open_newest(series)
    assert found.step == (20 if series.place(20).exists() else 10)
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "step-00000030" in record.getMessage()
    assert re.search(reason, record.getMessage())


def test_when_all_are_damaged_every_one_is_named(tmp_path, save):
    series = fill(tmp_path / "run", save, (1, 2))
    for step in (1, 2):
        flip_a_bit(series.place(step) / SHARD)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*run is good; .*step-00000002.*step-00000001"):
        open_newest(series)


def test_the_last_whole_ones_stay(tmp_path, save):
    series = fill(tmp_path / "run", save, (1, 2, 3, 4))
    (series.place(4) / "stageflow.json").unlink()
    series.prune(2)
    assert [member.step for member in series.members()] == [4, 3, 2]
    series.prune(1)
    assert [member.step for member in series.members()] == [4, 3]
    assert open_newest(series).step == 3


def test_one_that_can_not_be_removed_is_logged(tmp_path, save, monkeypatch, caplog):
    series = fill(tmp_path / "run", save, (1, 2))

    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "rename", refuse)
    series.prune(1)
    assert "step-00000001 could not be removed: " in caplog.text
    assert open_checkpoint(series.place(1)).step == 1


def test_leavings_of_dead_writers_go(tmp_path, save):
    series = fill(tmp_path / "run", save, (1, 2))
    saving = Saving(series.place(3))
    os.close(saving._lock)  # as when its process dies
    living = Saving(series.place(4))
    (tmp_path / "run" / ".step-00000001.removing-0a").mkdir()
    series.sweep()
    assert {path.name for path in (tmp_path / "run").glob(".*")} == {living.path.name}
    living.abandon()
    assert [member.step for member in series.members()] == [2, 1]


def test_one_that_was_being_replaced_when_its_writer_died_is_still_a_member(tmp_path, save):
    series = fill(tmp_path / "run", save, (1, 2))
    series.place(2).rename(tmp_path / "run" / ".step-00000002.replaced-0a0a0a0a")
    assert [member.step for member in series.members()] == [2, 1]
    assert open_newest(series).step == 2
    assert series.place(2).exists()


def test_a_checkpoint_or_a_file_is_no_folder_of_checkpoints(tmp_path, save):
    save(tmp_path / "run", {"w": torch.ones(2)})
    with pytest.raises(CheckpointError, match="run is one checkpoint"):
        Series(tmp_path / "run")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file is a file"):
        Series(tmp_path / "file")
