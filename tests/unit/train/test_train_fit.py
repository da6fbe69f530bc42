"""A run by `fit`: where it ends, what it tells, how it resumes and what it refuses; workers are threads here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stageflow as sf
from stageflow.checkpoint import Series
from stageflow.errors import CheckpointError, InputError, LaunchError, PipelineClosed, StageFailed
from stageflow.train.callbacks import Callback, Evaluate, Restart, Run, as_step

X = torch.randn(48, 8, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)
DATA = TensorDataset(X, Y)
BATCHES = [(X[i : i + 16], Y[i : i + 16]) for i in range(0, 48, 16)]


class Fuse(nn.Module):
    """Fails once, in the forward numbered ``at``, for all that share its counter."""

    def __init__(self, counter: list[int], at: int) -> None:
        super().__init__()
        self._state = (counter, at)

    def __deepcopy__(self, memo: Any) -> Fuse:
        return self

    def __reduce__(self) -> Any:
        return _find, (id(self._state[0]), self._state[1])

    def forward(self, x: Tensor) -> Tensor:
        counter, at = self._state
        if torch.is_grad_enabled():
            counter[0] += 1
            if counter[0] == at:
                raise ValueError("a fuse blew")
        return x


_counters: dict[int, list[int]] = {}


def _find(key: int, at: int) -> Fuse:
    return Fuse(_counters[key], at)


def fuse(at: int) -> Fuse:
    counter = [0]
    _counters[id(counter)] = counter
    return Fuse(counter, at)


def build(*fuses: int) -> nn.Sequential:
    """fuses: in which forward of a micro-batch something fails; there are always two, of which 0 never blows."""
    torch.manual_seed(0)
    first, second = map(fuse, (*fuses, 0, 0)[:2])
    return nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), first, nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 8), second, nn.Linear(8, 1)
    )


def pipeline(*fuses: int, **options: Any) -> sf.Pipeline:
    options = {
        "stages": 2,
        "microbatches": 4,
        "loss": F.mse_loss,
        "optimizer": partial(torch.optim.Adam, lr=1e-2),
        "lr_scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.7),
        "launch": "threads",
        "balance": "parameters",
    } | options
    return sf.Pipeline(build(*fuses), **options)


def by_number(number: int) -> tuple[Tensor, Tensor]:
    return BATCHES[number % 3][0] + 0.1 * torch.rand(16, 8), BATCHES[number % 3][1]


class Endless:
    """An iterator, which can't be started again."""

    def __init__(self) -> None:
        self._number = -1

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        self._number += 1
        return by_number(self._number)


LOADERS: dict[str, Callable[[], Any]] = {
    "list": lambda: BATCHES,
    "shuffled": lambda: DataLoader(DATA, batch_size=16, shuffle=True),
    "function": lambda: by_number,
    "iterator": Endless,
}


@cache
def undisturbed(loader: str) -> tuple[list[float], dict[str, Tensor]]:
    losses: list[float] = []
    with pipeline() as pipe:
        report = pipe.fit(LOADERS[loader](), 20, callbacks=[lambda run: losses.append(run.loss)])
        assert report.ended == "steps"
        return losses, pipe.state_dict()


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


# --------------------------------------------------------------------------------------------------- the same numbers


def test_a_run_is_the_loop_that_one_would_write():
    losses, weights = undisturbed("list")
    with pipeline() as pipe:
        by_hand = [pipe.train_step(x, target=y).item() for _ in range(7) for x, y in BATCHES][:20]
        assert by_hand[:20] == losses
    assert len(losses) == 20
    assert all(torch.isfinite(weight).all() for weight in weights.values())


@pytest.mark.parametrize("loader", LOADERS)
def test_ten_steps_and_ten_of_a_new_pipeline_are_twenty(tmp_path, loader):
    losses, weights = undisturbed(loader)
    seen: list[float] = []
    for steps, stages in ((10, 2), (20, 3)):
        with pipeline(stages=stages) as pipe:
            report = pipe.fit(
                LOADERS[loader](), steps, checkpoint=tmp_path / "run", callbacks=[lambda run: seen.append(run.loss)]
            )
            assert report.steps == steps
            assert report.resumed_from == (None if steps == 10 else 10)
            final = pipe.state_dict()
    assert seen == losses
    assert_same(final, weights)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("at", [3, 21, 47])
def test_a_run_with_a_failure_is_the_run_without(tmp_path, loader, at):
    losses, weights = undisturbed(loader)
    seen: dict[int, float] = {}
    with pipeline(at) as pipe:
        report = pipe.fit(
            LOADERS[loader](),
            20,
            checkpoint=tmp_path / "run",
            checkpoint_every=4,
            callbacks=[lambda run: seen.setdefault(run.step, run.loss)],
        )
        (restart,) = report.restarts
        assert_same(pipe.state_dict(), weights)
    assert restart.error == "StageFailed"
    assert "a fuse blew" in restart.text
    assert restart.worker is not None
    assert at / 4 - 2 < restart.step < at / 4  # the splitter runs the model too
    assert restart.resumed_from == restart.step // 4 * 4
    assert list(seen.values()) == losses


@pytest.mark.parametrize("loader", LOADERS)
def test_calls_one_after_another_are_one_run(loader):
    losses, weights = undisturbed(loader)
    seen: list[float] = []
    with pipeline() as pipe:
        same = LOADERS[loader]()
        for steps in (4, 6, 20):
            pipe.fit(same, steps, callbacks=[lambda run: seen.append(run.loss)])
        assert_same(pipe.state_dict(), weights)
    assert seen == losses


def test_epochs_one_after_another_shuffle_differently():
    losses, _ = undisturbed("shuffled")
    seen: list[float] = []
    with pipeline() as pipe:
        same = LOADERS["shuffled"]()
        for epoch in range(2):
            report = pipe.fit(same, callbacks=[lambda run: seen.append(run.loss)])
            assert (report.steps, report.ended) == (3 * epoch + 3, "data")
        pipe.fit(same, 8, callbacks=[lambda run: seen.append(run.loss)])
        assert pipe.fit(same).steps == 9  # the rest of that epoch
        assert pipe.fit(same, 12).steps == 12
        assert pipe.fit(same).steps == 15  # nothing was left of it
    assert seen == losses[:8]


def test_another_loader_begins_the_next_epoch():
    epochs: list[int] = []
    with pipeline() as pipe:
        for loader, steps in ((BATCHES, 2), (BATCHES[:1], 4), (list(BATCHES), 5)):
            pipe.fit(loader, steps, callbacks=[lambda run: epochs.append(run.epoch)])
    assert epochs == [0, 0, 1, 2, 3]


@pytest.mark.parametrize("loader", ["list", "shuffled", "function"])
def test_a_checkpoint_that_was_loaded_by_hand_brings_its_place(tmp_path, loader):
    losses, weights = undisturbed(loader)
    with pipeline() as pipe:
        pipe.fit(LOADERS[loader](), 10, checkpoint=tmp_path / "run")
    with pipeline(example=X[:16]) as pipe:
        pipe.load(tmp_path / "run")
        assert pipe.fit(LOADERS[loader](), 20).loss == losses[-1]
        assert_same(pipe.state_dict(), weights)


@pytest.mark.parametrize("loader", ["list", "function"])
def test_checkpoints_saved_by_hand_in_a_later_epoch(tmp_path, loader):
    _, weights = undisturbed(loader)
    with pipeline() as pipe:
        pipe.fit(LOADERS[loader](), 8)
        pipe.save(tmp_path / "run", keep=3)
    with pipeline() as pipe:
        assert pipe.fit(LOADERS[loader](), 20, checkpoint=tmp_path / "run").resumed_from == 8
        assert_same(pipe.state_dict(), weights)
    with pipeline() as pipe:
        pipe.train_step(X[:16], target=Y[:16])
        pipe.save(tmp_path / "other", keep=3)
    with pipeline() as pipe, pytest.raises(InputError, match="loader"):
        pipe.fit([], 20, checkpoint=tmp_path / "other")


def test_batches_of_an_iterator_are_not_kept_for_nobody():
    with pipeline() as pipe:
        pipe.fit(Endless(), 8)
        assert pipe._feed is not None
        assert len(pipe._feed._kept) <= 1


def test_every_step_is_told_once(tmp_path):
    told: list[int] = []
    with pipeline(33) as pipe:
        pipe.fit(
            BATCHES,
            12,
            checkpoint=tmp_path / "run",
            checkpoint_every=5,
            callbacks=[lambda run: told.append(run.step)],
        )
    assert told == list(range(1, 13))


# ------------------------------------------------------------------------------------------------------- where it ends


def test_one_epoch_without_steps_and_not_again(tmp_path):
    with pipeline() as pipe:
        report = pipe.fit(BATCHES, checkpoint=tmp_path / "run")
        assert (report.steps, report.ended) == (3, "data")
        report = pipe.fit(BATCHES, checkpoint=tmp_path / "run")
        assert (report.steps, report.ended, report.resumed_from) == (3, "data", 3)


def test_steps_count_from_the_start_of_the_run():
    with pipeline() as pipe:
        assert pipe.fit(BATCHES, 4).steps == 4
        assert pipe.fit(BATCHES, 4).ended == "steps"
        assert pipe.fit(BATCHES, 6).steps == 6


def test_a_callback_can_stop_it(tmp_path):
    def enough(run: Run) -> None:
        if run.step == 5:
            run.stop()

    with pipeline() as pipe:
        report = pipe.fit(BATCHES, 100, checkpoint=tmp_path / "run", callbacks=[enough])
    assert (report.steps, report.ended) == (5, "stopped")
    assert Series(tmp_path / "run").members()[0].step == 5


def test_an_iterator_that_ends_early_is_told():
    with pipeline() as pipe:
        report = pipe.fit(iter(BATCHES), 100)
    assert (report.steps, report.ended) == (3, "data")


# ----------------------------------------------------------------------------------------------------------- the hooks


class Diary(Callback):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_start(self, run: Run) -> None:
        self.lines.append(f"start at {run.step}")

    def on_step(self, run: Run) -> None:
        self.lines.append(f"step {run.step} of epoch {run.epoch}")
        assert run.pipe.steps == run.step
        assert run.seconds > 0

    def on_save(self, run: Run, directory: Path) -> None:
        self.lines.append(f"saved {directory.name}")
        assert (directory / "stageflow.json").exists()

    def on_restart(self, run: Run, restart: Restart) -> None:
        self.lines.append(f"restart at {restart.step} from {restart.resumed_from}")

    def on_end(self, run: Run) -> None:
        self.lines.append(f"end: {run.report.ended}")


def test_what_callbacks_hear(tmp_path):
    diary = Diary()
    with pipeline(18) as pipe:
        report = pipe.fit(BATCHES, 5, checkpoint=tmp_path / "run", checkpoint_every=2, callbacks=[diary])
    saves = [line for line in diary.lines if line.startswith("saved")]
    assert saves == [f"saved step-{step:08}" for step in (0, 2, 4, 5)]
    assert [line for line in diary.lines if line not in saves] == [
        "start at 0",
        "step 1 of epoch 0",
        "step 2 of epoch 0",
        "step 3 of epoch 0",
        "step 4 of epoch 1",
        "restart at 4 from 4",
        "step 5 of epoch 1",
        "end: steps",
    ]
    assert diary.lines[0] == saves[0]
    assert diary.lines[-2] == saves[-1]
    assert report.saved == [0, 2, 4, 5]
    text = str(report)
    assert "5 steps, loss" in text
    assert "restart 1 after step 4: StageFailed: worker" in text


def test_evaluation_changes_nothing_and_is_kept():
    _, weights = undisturbed("list")
    held_out = Evaluate(BATCHES[:2], every=5)
    with pipeline() as pipe:
        pipe.fit(BATCHES, 20, callbacks=[held_out])
        assert_same(pipe.state_dict(), weights)
    assert list(held_out.losses) == [5, 10, 15, 20]
    assert held_out.losses[20] < held_out.losses[5]


def test_what_a_callback_raises_ends_the_run(tmp_path):
    def fails(run: Run) -> None:
        if run.step == 3:
            raise KeyError("mine")

    with pipeline() as pipe:
        with pytest.raises(KeyError, match="mine"):
            pipe.fit(BATCHES, 10, checkpoint=tmp_path / "run", callbacks=[fails])
        assert pipe.usable
        report = pipe.fit(BATCHES, 3)
        assert report.steps == 3


@pytest.mark.parametrize("where", ["callback", "loader"])
def test_the_failure_of_another_pipeline_is_not_this_ones(tmp_path, where):
    with pipeline() as other:
        other.predict(X)

    def late(run: Run) -> None:
        if run.step == 2 and where == "callback":
            other.predict(X)

    def batches(number: int) -> Any:
        if number == 2 and where == "loader":
            other.predict(X)
        return BATCHES[number % 3]

    with pipeline() as pipe:
        with pytest.raises(PipelineClosed) as caught:
            pipe.fit(batches, 5, checkpoint=tmp_path / "run", callbacks=[late])
        assert not hasattr(caught.value, "__notes__")
        assert pipe.usable
        assert pipe.steps == 2
        assert len(Series(tmp_path / "run").members()) == 1


def test_a_pipeline_closed_by_a_callback_stays_closed(tmp_path):
    with pipeline() as pipe, pytest.raises(PipelineClosed) as caught:
        pipe.fit(BATCHES, 10, checkpoint=tmp_path / "run", callbacks=[lambda run: pipe.close()])
    assert "the pipeline was closed" in caught.value.__notes__


# ------------------------------------------------------------------------------------------------------ when it is over


class Picky(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and x.max() > 100:
            raise ValueError("values too large")
        return x


def test_the_same_exception_twice_ends_the_run(tmp_path, caplog):
    model = nn.Sequential(Picky(), nn.Linear(8, 8), nn.Linear(8, 1))
    spiked = [BATCHES[0], (BATCHES[1][0] + 1e3, BATCHES[1][1])]
    with sf.Pipeline(model, 2, 4, loss=F.mse_loss, optimizer=torch.optim.Adam, launch="threads") as pipe:
        with pytest.raises(StageFailed, match="values too large") as caught:
            pipe.fit(spiked, 9, checkpoint=tmp_path / "run")
        assert "failed in the same way at the same step" in caught.value.__notes__[0]
    assert "restart 1 of 10" in caplog.text
    assert "restart 2" not in caplog.text


def test_without_checkpoints_a_failure_ends_the_run():
    with pipeline(9) as pipe, pytest.raises(StageFailed, match="a fuse blew") as caught:
        pipe.fit(BATCHES, 9)
    assert caught.value.__notes__ == ["fit() had no checkpoint= to go on from"]


def test_restarts_are_bounded(tmp_path):
    with pipeline(5, 11) as pipe, pytest.raises(StageFailed, match="a fuse blew") as caught:
        pipe.fit(BATCHES, 9, checkpoint=tmp_path / "run", max_restarts=1)
    assert caught.value.__notes__ == ["max_restarts=1 were made already"]


def test_a_save_that_fails_in_the_middle_is_told_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
    from stageflow.checkpoint import shard

    write, calls = shard.write_tensors, []

    def sometimes_full(path: Path, tensors: Any) -> Any:
        calls.append(path)
        if 4 < len(calls) <= 8:
            raise OSError(28, "No space left on device")
        return write(path, tensors)

    monkeypatch.setattr(shard, "write_tensors", sometimes_full)
    losses, weights = undisturbed("list")
    with pipeline() as pipe:
        report = pipe.fit(BATCHES, 20, checkpoint=tmp_path / "run", checkpoint_every=4, keep=10)
        assert_same(pipe.state_dict(), weights)
    assert report.saved == [0, 8, 12, 16, 20]
    assert len(report.failed_saves) == 1
    assert "step 4: " in report.failed_saves[0]
    assert "No space left" in report.failed_saves[0]
    assert "the run goes on" in caplog.text
    assert losses[-1] == report.loss


def test_a_first_save_that_fails_ends_the_run(tmp_path, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stageflow.checkpoint.shard.write_tensors", full)
    with pipeline() as pipe, pytest.raises((CheckpointError, StageFailed), match="No space left"):
        pipe.fit(BATCHES, 20, checkpoint=tmp_path / "run")


def test_a_damaged_newest_checkpoint_costs_the_steps_since_the_one_before(tmp_path, caplog):
    losses, weights = undisturbed("list")
    with pipeline() as pipe:
        pipe.fit(BATCHES, 10, checkpoint=tmp_path / "run", checkpoint_every=5)
    newest = Series(tmp_path / "run").place(10)
    shard = newest / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with caplog.at_level(logging.INFO, "stageflow"), pipeline() as pipe:
        report = pipe.fit(BATCHES, 20, checkpoint=tmp_path / "run")
        assert report.resumed_from == 5
        assert_same(pipe.state_dict(), weights)
    assert "model-00001-of-00002.safetensors has" in caplog.text
    assert "using step-00000005" in caplog.text
    assert report.loss == losses[-1]


# ------------------------------------------------------------------------------------------------- refused before work


@pytest.mark.parametrize(
    "options",
    [
        {"steps": -1},
        {"steps": 2.0},
        {"steps": True},
        {"checkpoint_every": 0, "checkpoint": "run"},
        {"checkpoint_every": 5},
        {"keep": 0},
        {"max_restarts": -1},
        {"callbacks": [5]},
        {"callbacks": [Callback]},
        {"loader": 5},
        {"loader": by_number, "steps": None},
    ],
    ids=" ".join,
)
def test_arguments_that_can_not_be(options):
    with pipeline() as pipe:
        with pytest.raises(InputError):
            pipe.fit(**({"loader": BATCHES, "steps": 3} | options))
        assert not pipe.is_built


def test_gradients_that_wait_for_an_update():
    with pipeline() as pipe:
        pipe.train_step(X, target=Y, update=False)
        with pytest.raises(InputError, match="wait for an update"):
            pipe.fit(BATCHES, 3)
        pipe.zero_grad()
        assert pipe.fit(BATCHES, 3).steps == 3


def test_a_loader_without_batches():
    with pipeline() as pipe, pytest.raises(InputError, match="loader is empty"):
        pipe.fit([], 3)


def test_a_folder_of_another_run(tmp_path):
    with pipeline() as pipe:
        pipe.fit(BATCHES, 5, checkpoint=tmp_path / "run")
        pipe.fit(BATCHES, 6, checkpoint=tmp_path / "run")
    with pipeline() as pipe:
        pipe.fit(BATCHES, 3)
        with pytest.raises(InputError, match="holds a run at step 6, and this pipeline has made 3 steps"):
            pipe.fit(BATCHES, 9, checkpoint=tmp_path / "run")


def test_two_runs_do_not_share_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("stageflow.checkpoint.series._PATIENCE", 0.2)

    def another(run: Run) -> None:
        with pipeline() as pipe:
            pipe.fit(BATCHES, 1, checkpoint=tmp_path / "run")

    with pipeline() as pipe, pytest.raises(CheckpointError, match="another run writes its checkpoints into"):
        pipe.fit(BATCHES, 5, checkpoint=tmp_path / "run", callbacks=[another])


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"x": 1}, ((), {"x": 1})),
        ((1, 2), ((1,), {"target": 2})),
        ([1, 2], ((1,), {"target": 2})),
        (((1, 3), 2), ((1, 3), {"target": 2})),
        (({"x": 1}, 2), ((), {"x": 1, "target": 2})),
        (5, ((5,), {})),
        ((5,), ((5,), {})),
    ],
)
def test_what_a_batch_means(batch, expected):
    assert as_step(batch) == expected


@pytest.mark.parametrize("name", ["update", "self", 3])
def test_a_batch_with_a_name_that_can_not_be(name):
    with pipeline() as pipe:
        for batch in ({"input": X, name: Y}, ({"input": X, name: Y}, Y)):
            with pytest.raises(InputError, match=f"the loader gave a batch with the key {name!r}"):
                pipe.fit([batch])
        assert not pipe.is_built


def test_two_targets():
    with pytest.raises(InputError, match="the key 'target' in its inputs and a target"):
        as_step(({"x": 1, "target": 2}, 3))


def test_a_batch_of_three():
    with pytest.raises(InputError, match=r"tuple of 3; expected \(input, target\)"):
        as_step((1, 2, 3))


# ------------------------------------------------------------------------------------------------------ fewer workers


@pytest.fixture
def scarce(monkeypatch):
    """After the first start, no more than so many workers can be had."""
    from stageflow.train import life

    undisturbed("list")  # starts workers too, unless a test before has
    start, starts = life.start_crew, []

    def few(in_process: bool, setups: Any, **options: Any) -> Any:
        starts.append(len(setups))
        if len(starts) > 1 and len(setups) > few.most:
            raise LaunchError(f"the system refused to start worker {few.most} of {len(setups)}")
        return start(in_process, setups, **options)

    few.most = 2
    monkeypatch.setattr(life, "start_crew", few)
    return few, starts


def test_a_run_goes_on_with_fewer_workers(tmp_path, scarce):
    _, starts = scarce
    _, weights = undisturbed("list")
    with pipeline(37, stages=3, device=["cpu"] * 3) as pipe:
        report = pipe.fit(BATCHES, 20, checkpoint=tmp_path / "run", checkpoint_every=4, min_workers=2)
        assert_same(pipe.state_dict(), weights)
        assert pipe.stages == 2
    assert starts == [3, 3, 3, 2]
    assert [restart.error for restart in report.restarts] == ["StageFailed", "LaunchError", "LaunchError"]
    assert [restart.workers for restart in report.restarts] == [0, 0, 2]
    assert "new workers failed" in str(report)
    assert "2 workers went on from step" in str(report)


def test_workers_that_are_not_allowed_to_be_missing(tmp_path, scarce):
    few, starts = scarce
    with pipeline(21, stages=3) as pipe, pytest.raises(LaunchError, match="refused to start worker 2 of 3") as caught:
        pipe.fit(BATCHES, 20, checkpoint=tmp_path / "run", max_restarts=3)
    assert starts == [3, 3, 3, 3]
    assert "max_restarts=3" in caught.value.__notes__[0]
    few.most = 0


def test_fewer_than_allowed(tmp_path, scarce):
    few, starts = scarce
    few.most = 1
    with pipeline(21, stages=3) as pipe, pytest.raises(LaunchError, match="fewer than 2 were not allowed"):
        pipe.fit(BATCHES, 20, checkpoint=tmp_path / "run", max_restarts=6, min_workers=2)
    assert starts == [3, 3, 3, 2, 2, 2][: len(starts)]


def test_a_schedule_of_ones_own_is_for_its_workers(tmp_path, scarce):
    few, _ = scarce
    few.most = 1
    schedule = sf.build_schedule("1f1b", stages=2, microbatches=4)
    with pipeline(21, stages=2, schedule=schedule) as pipe, pytest.raises(LaunchError, match="schedule of one's own"):
        pipe.fit(BATCHES, 20, checkpoint=tmp_path / "run", max_restarts=5, min_workers=1)
