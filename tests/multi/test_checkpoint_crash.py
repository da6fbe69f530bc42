"""A save is killed, again and again; what is left is always one whole checkpoint."""

import os
import random
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch

from stageflow.checkpoint import Progress, Saving, disk, load_weights, open_checkpoint, write_shard
from stageflow.errors import CheckpointError

OLD = {"w": torch.tensor([1.0, 2.0]), "v": torch.tensor([3])}
NEW = {"w": torch.tensor([5.0, 6.0]), "v": torch.tensor([7])}


def save(target: Path, tensors: dict[str, torch.Tensor], step: int = 1) -> None:
    with Saving(target) as saving:
        entries = [
            write_shard(saving.path, "model", index, len(tensors), {name: tensor})
            for index, (name, tensor) in enumerate(tensors.items())
        ]
        saving.finish(entries, Progress(step, 0))


def holds(directory: Path, tensors: dict[str, torch.Tensor]) -> bool:
    found = load_weights(directory)
    return found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in found)


def without_exchange(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(disk, "_exchange", lambda a, b: False)


@pytest.fixture(params=["exchange", "two renames"])
def way(request, monkeypatch):
    if request.param == "two renames":
        without_exchange(monkeypatch)
    return request.param


def vanish_at(calls: int) -> None:
    """End this process, without any clean-up, at its n-th call of what touches the disk."""
    left = calls

    def counted(original):
        def call(*args, **kwargs):
            nonlocal left
            left -= 1
            if left == 0:
                os._exit(9)
            return original(*args, **kwargs)

        return call

    for name in ("mkdir", "open", "write", "fsync", "rename", "listdir"):
        setattr(os, name, counted(getattr(os, name)))


def test_a_crash_at_any_point_leaves_the_old_or_the_new(tmp_path, way):
    target = tmp_path / "run"
    left = []
    for calls in range(1, 200):
        save(target, OLD)
        child = os.fork()
        if child == 0:
            try:
                vanish_at(calls)
                save(target, NEW)
            finally:
                os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        left.append("new" if holds(target, NEW) else "old")
        assert left[-1] == "new" or holds(target, OLD)
        Saving(target).abandon()
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
        if status == 0:
            break
    assert status == 0
    assert left.count("old") > 10
    assert left.count("new") > 1


def test_a_crash_between_the_two_renames_is_repaired_with_the_new(tmp_path, monkeypatch):
    without_exchange(monkeypatch)
    target = tmp_path / "run"
    save(target, OLD)
    renames = crash_between_renames(target)
    assert len(renames) == 2
    assert not target.exists()
    assert holds(target, NEW)
    Saving(target).abandon()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_crash_between_the_two_renames_with_a_spoilt_new_is_repaired_with_the_old(tmp_path, monkeypatch):
    without_exchange(monkeypatch)
    target = tmp_path / "run"
    save(target, OLD)
    crash_between_renames(target)
    (new,) = tmp_path.glob(".run.saving-*")
    (new / "stageflow.json").write_text("{")
    assert holds(target, OLD)


def crash_between_renames(target: Path) -> list[str]:
    """Returns the names of the two directories that are left."""
    child = os.fork()
    if child == 0:
        rename = os.rename

        def second_vanishes(source, destination):
            if Path(destination) == target:
                os._exit(9)
            rename(source, destination)

        os.rename = second_vanishes
        try:
            save(target, NEW)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    return sorted(path.name for path in target.parent.iterdir())


def test_kills_at_random_moments_while_saving_all_the_time(tmp_path, way):
    """Every save has one step in all its tensors and in its manifest, and steps never go back."""
    target = tmp_path / "run"
    save(target, uniform(0), step=0)
    chance = random.Random(7)
    last = 0
    for _ in range(12):
        child = os.fork()
        if child == 0:
            try:
                for step in range(last + 1, last + 1000):
                    save(target, uniform(step), step=step)
            finally:
                os._exit(1)
        time.sleep(chance.uniform(0.005, 0.15))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        checkpoint = open_checkpoint(target)
        assert checkpoint.step >= last
        last = checkpoint.step
        assert all(bool((tensor == last).all()) for tensor in checkpoint.weights().values())
    assert last > 0
    Saving(target).abandon()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def uniform(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1000,), float(step)), "v": torch.full((3, 70), step)}


def test_a_place_without_permission():
    """In a child that has given up root's rights, which would override the directory's."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o555)
        child = os.fork()
        if child == 0:
            if os.getuid() == 0:
                os.setuid(65534)
            try:
                Saving(Path(place) / "run")
            except CheckpointError as error:
                os._exit(0 if "Permission denied" in str(error) else 2)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        os.chmod(place, 0o755)
