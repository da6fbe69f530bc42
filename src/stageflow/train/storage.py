"""Where the state of a pipeline goes and comes from."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stageflow.checkpoint import Checkpoint, Pending, Progress, Series, open_checkpoint
from stageflow.errors import CheckpointError, InputError
from stageflow.train.life import Life
from stageflow.whole import as_whole

log = logging.getLogger("stageflow")

PLACE = "place in the data"
"""Under which the `extra` of a checkpoint of `fit` holds [epoch, batch, last epoch of a run without `steps`]."""


class Storage:
    """Saves and loads through the workers of a `Life`; at most one save is under way. Its user keeps others out.

    model, dtype: see `write_config`. seed: of all random draws. optimizes: whether there are optimizers.
    """

    def __init__(self, life: Life, model: object, dtype: torch.dtype | None, seed: int, optimizes: bool) -> None:
        self._life = life
        self._model = model
        self._dtype = dtype
        self._seed = seed
        self._optimizes = optimizes
        self._pending: Pending | None = None

    def save(
        self, directory: str | Path, step: int, extra: Mapping[str, Any], keep: int | None, background: bool
    ) -> Path:
        """See `Pipeline.save`; returns where the checkpoint is, or will be once it is written."""
        if keep is not None and as_whole(keep, 1) is None:
            raise InputError(f"keep must be how many checkpoints stay, a whole number >= 1, or None, got {keep!r}")
        self.settle()
        split = self._life.split("save()")
        crew = self._life.crew("save()")
        skip = frozenset(name for name, info in split.tensors.items() if not info.persistent)
        progress = Progress(step, self._seed, split.aliases, extra)
        series = None if keep is None else Series(directory)
        place = Path(directory) if series is None else series.place(step)
        prune = partial(_prune, series if crew.leads else None, keep)
        if series is not None and crew.leads:
            series.sweep()
        if background:
            self._pending = crew.save_behind(place, skip, progress, self._model, self._dtype, prune)
        else:
            crew.save(place, skip, progress, self._model, self._dtype)
            prune()
        return place

    def load(self, directory: str | Path) -> Checkpoint:
        """See `Pipeline.load`."""
        self.settle()
        self._life.split("load()")
        # absolute: the workers keep the folder that they were started in
        checkpoint = open_checkpoint(Path(directory).absolute())
        self.adopt(checkpoint)
        return checkpoint

    def adopt(self, checkpoint: Checkpoint) -> None:
        """Load a checkpoint whose files are known to be good. Raises CheckpointError where it does not fit."""
        split = self._life.split("load()")
        persistent = {name: info.shape for name, info in split.tensors.items() if info.persistent}
        checkpoint.check_fits(persistent, split.aliases)
        resumes = checkpoint.has_optimizer and self._optimizes
        number = self._life.next_number()
        self._life.crew("load()").ask(
            "read_checkpoint",
            number,
            str(checkpoint.path),
            checkpoint.identity,
            frozenset(persistent),
            split.aliases,
            resumes,
        )
        if checkpoint.manifest is not None and checkpoint.seed != self._seed:
            log.warning(
                "%s was saved with seed=%d, this pipeline has seed=%d: its random draws go on differently",
                checkpoint.path,
                checkpoint.seed,
                self._seed,
            )

    @property
    def writing(self) -> bool:
        """Whether a background save is under way, as far as is known without waiting."""
        return self._pending is not None and not self._pending.done

    def settle(self) -> None:
        """Wait for the background save under way, if any. Raises CheckpointError if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def give_up(self) -> None:
        """As `settle`, for workers that are gone: a save that they had not finished never was."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.abandon()


def _prune(series: Series | None, keep: int | None) -> None:
    if series is not None and keep is not None:
        try:
            series.prune(keep)
        except CheckpointError as error:  # the save itself went well
            log.warning("old checkpoints were not removed: %s", error)
