"""A run that goes on by itself after a failure, as if there had been none.

       ┌────────────────────────────────────────────────────────┐
begin ─┴─► next batch ─► step ─► callbacks ─► checkpoint if due ─┴─► end
                │          │          │               │
                └──────────┴── a worker died, failed or hung
                                      ▼
                 new workers ─► the newest good checkpoint ─► its place in the data ─► next batch
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from stageflow.checkpoint import Checkpoint, Series, open_checkpoint, open_newest
from stageflow.errors import CheckpointError, InputError, LaunchError, PipelineError, StageFailed, TransportError
from stageflow.launch.server import keep_warm
from stageflow.train.callbacks import Callback, FitReport, Restart, Run, as_step, check_callbacks
from stageflow.train.feed import Feed, Place, Source
from stageflow.train.storage import PLACE
from stageflow.whole import as_whole

if TYPE_CHECKING:
    from stageflow.train.pipeline import Pipeline

log = logging.getLogger("stageflow")

_RECOVERABLE = (PipelineError, TransportError, LaunchError)
_TRIES = 2  # failed starts of workers in a row before fewer are tried


class Fit:
    """One call of `Pipeline.fit`; see there for the arguments."""

    def __init__(
        self,
        pipe: Pipeline,
        loader: Source,
        *,
        seed: int,
        steps: int | None,
        checkpoint: str | Path | None,
        checkpoint_every: int | None,
        keep: int,
        max_restarts: int,
        min_workers: int | None,
        callbacks: Sequence[Callback | Callable[[Run], Any]],
    ) -> None:
        """seed: of what the loader draws. Raises InputError, before any work."""
        counts = {"steps": steps, "checkpoint_every": checkpoint_every, "keep": keep, "max_restarts": max_restarts}
        _check_counts(**counts, min_workers=min_workers)
        self._pipe = pipe
        self._feed = _feed_for(pipe, loader, seed)
        if steps is None and self._feed.endless:
            raise InputError("a function gives batches for ever: say how many steps=")
        if checkpoint is None and checkpoint_every is not None:
            raise InputError("checkpoint_every= needs checkpoint=, the folder that checkpoints go into")
        if not pipe._fresh:
            raise InputError("gradients of train_step(update=False) wait for an update: make it, or call zero_grad()")
        pipe._feed = self._feed
        self._last_epoch = self._feed.place.epoch
        self._target = steps
        self._series = None if checkpoint is None else Series(checkpoint)
        self._every = checkpoint_every
        self._keep = keep
        self._allowed = max_restarts
        self._min_workers = min_workers
        self._refused = 0  # starts of workers that failed in a row
        self._callbacks = check_callbacks(callbacks)
        self._report = FitReport(steps=pipe.steps)
        self._run = Run(pipe, self._report, step=pipe.steps)
        self._told = pipe.steps
        self._saving: tuple[int, Place, Path] | None = None
        self._last_failure: tuple[int, str] | None = None
        self._foreign: Exception | None = None
        self._begun = False

    def run(self) -> FitReport:
        """Make the steps. Raises what ends a run that can't go on."""
        started = time.monotonic()
        with self._claimed(), _warm(self._pipe.launch), _traced(self._pipe):
            while not self._report.ended:
                try:
                    self._go_on()
                except _RECOVERABLE as error:
                    if error is self._foreign:
                        raise
                    self._recover(error)
            self._report.steps = self._pipe.steps
            self._report.seconds = time.monotonic() - started
            self._tell(lambda callback: callback.on_end(self._run))
        log.info("the run ended: %s", self._report)
        return self._report

    def _tell(self, what: Callable[[Callback], None]) -> None:
        with self._code_of_others():
            for callback in self._callbacks:
                what(callback)

    @contextlib.contextmanager
    def _code_of_others(self) -> Iterator[None]:
        """A callback or the loader runs: what it raises, of another pipeline for instance, is no failure of the workers
        here, unless they can't go on."""
        try:
            yield
        except _RECOVERABLE as error:
            if self._pipe.usable:
                self._foreign = error
            raise

    def _next(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The next batch, as arguments of `train_step`. Raises StopIteration at the end of an epoch."""
        with self._code_of_others():
            args, kwargs = as_step(self._feed.next())
        return args, kwargs

    # ---------------------------------------------------------------------------------------------------- going on

    def _go_on(self) -> None:
        """From wherever the run is to its end."""
        if not self._begun:
            self._begin()
            self._begun = True
            self._tell(lambda callback: callback.on_start(self._run))
        while (ended := self._has_ended()) is None:
            self._step()
        if self._series is not None:
            self._write_last()
        self._report.ended = ended

    def _begin(self) -> None:
        """Start the workers, and resume or write the first checkpoint."""
        pipe, feed = self._pipe, self._feed
        if not pipe.is_built:
            place = feed.place
            try:
                args, kwargs = self._next()
            except StopIteration:
                raise InputError("the loader is empty") from None
            pipe._build_for(args, kwargs)
            feed.seek(place)
        if self._series is None:
            return
        newest = self._newest()
        if newest is None:
            self._write(background=False)
            return
        if pipe.steps not in (0, newest.step):
            raise InputError(
                f"{self._series.root} holds a run at step {newest.step}, and this pipeline has made {pipe.steps} steps "
                "that are not part of it; name another folder, or resume with a new pipeline"
            )
        self._restore(newest)
        self._report.resumed_from = newest.step
        self._told = newest.step
        log.info("resuming from %s at step %d", newest.path, newest.step)

    def _has_ended(self) -> str | None:
        """Why the run is over, None while it is not."""
        if self._target is not None and self._pipe.steps >= self._target:
            return "stopped" if self._run.stopping else "steps"
        only_one = self._target is None or self._feed.once
        return "data" if only_one and self._feed.place.epoch > self._last_epoch else None

    def _step(self) -> None:
        """One batch, or the turn to the next epoch."""
        pipe, run = self._pipe, self._run
        if not pipe._storage.writing:
            self._settle()
        place = self._feed.place
        try:
            args, kwargs = self._next()
        except StopIteration:
            if place.batch == 0:
                raise InputError(f"the loader gave no batch in epoch {place.epoch}") from None
            if self._report.loss is None and self._report.resumed_from is None and not self._feed.once:
                self._last_epoch = self._feed.place.epoch  # an earlier call had made the last step of the one before
            return
        if self._series is None:
            self._feed.forget(place)  # nobody goes back
        started = time.monotonic()
        run.loss = pipe.train_step(*args, **kwargs).item()
        run.seconds = time.monotonic() - started
        run.step, run.epoch, self._report.loss = pipe.steps, place.epoch, run.loss
        if pipe.steps > self._told:
            self._tell(lambda callback: callback.on_step(run))
            self._told = pipe.steps
            if run.stopping:
                self._target = pipe.steps
        if self._every is not None and pipe.steps % self._every == 0 and pipe.steps != self._target:
            self._write(background=True)

    def _write_last(self) -> None:
        """The state at the end, unless it is saved already."""
        self._settle()
        saved = self._report.saved[-1:] or [self._report.resumed_from]
        if saved == [self._pipe.steps]:
            return
        self._write(background=False)
        if self._report.saved[-1:] != [self._pipe.steps]:
            raise CheckpointError(f"the state at the end could not be saved: {self._report.failed_saves[-1]}")

    # ------------------------------------------------------------------------------------------------- checkpoints

    def _write(self, *, background: bool) -> None:
        """Save the state here. The first has to go well; later ones may fail, and the run goes on without them."""
        assert self._series is not None
        self._settle()
        step, place = self._pipe.steps, self._feed.place
        try:
            where = self._pipe.save(
                self._series.root, extra={PLACE: [*place, self._last_epoch]}, keep=self._keep, background=background
            )
        except CheckpointError as error:
            self._failed_save(step, error)
            return
        self._saving = (step, place, where)
        if not background:
            self._settle()

    def _settle(self) -> None:
        """Hear how the save under way ends."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        try:
            self._pipe.finish_saving()
        except CheckpointError as error:
            self._failed_save(saving[0], error)
            return
        self._complete(*saving)

    def _complete(self, step: int, place: Place, where: Path) -> None:
        self._feed.forget(place)
        self._report.saved.append(step)
        log.info("checkpoint %s is complete", where)
        self._tell(lambda callback: callback.on_save(self._run, where))

    def _failed_save(self, step: int, error: CheckpointError) -> None:
        if not self._report.saved and self._report.resumed_from is None:
            raise error  # there is nothing to fall back on
        self._report.failed_saves.append(f"step {step}: {error}")
        log.error("the checkpoint of step %d failed, the run goes on: %s", step, error)

    def _newest(self) -> Checkpoint | None:
        """The newest good checkpoint; the same on all ranks."""
        series = self._series
        assert series is not None

        def look() -> str:
            newest = open_newest(series)
            return "" if newest is None else str(newest.path)

        path = self._pipe._agree(look)
        return open_checkpoint(path, verify=False) if path else None

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Take over a checkpoint that was found to be good, and go to its place in the data."""
        self._pipe._adopt(checkpoint)
        self._run.step = checkpoint.step
        saved = checkpoint.extra.get(PLACE)
        if saved is None:  # saved by hand: a batch for each step, from the start
            self._feed.seek(Place())
            self._feed.skip(checkpoint.step)
            return
        epoch, batch, self._last_epoch = saved
        self._feed.seek(Place(epoch, batch))

    # ---------------------------------------------------------------------------------------------------- failures

    def _recover(self, error: Exception) -> None:
        failure: Exception = error
        while True:
            self._check_may_restart(failure)
            self._refused = self._refused + 1 if isinstance(failure, LaunchError) else 0
            started = time.monotonic()
            step = self._pipe.steps
            text = str(failure).partition("\n")[0]
            log.warning(
                "after step %d: %s: %s; restart %d of %d",
                step,
                type(failure).__name__,
                text,
                len(self._report.restarts) + 1,
                self._allowed,
            )
            try:
                workers, resumed = self._replace()
            except _RECOVERABLE as another:
                self._note(failure, step, step, 0, started)
                failure = another
                continue
            restart = self._note(failure, step, resumed, workers, started)
            log.warning("went on from step %d after %.1f s, with %d workers", resumed, restart.seconds, workers)
            self._tell(lambda callback, restart=restart: callback.on_restart(self._run, restart))
            return

    def _replace(self) -> tuple[int, int]:
        """New workers with the state of the newest good checkpoint; returns how many, and its step."""
        saving, self._saving = self._saving, None
        workers = self._pipe._replace_workers(self._min_workers if self._refused >= _TRIES else None)
        checkpoint = self._newest()
        if checkpoint is None:
            raise CheckpointError("the run has no checkpoint any more: were its files removed?")
        if saving is not None and saving[0] == checkpoint.step:
            self._complete(*saving)  # the failure came after its last file was written
        self._restore(checkpoint)
        return workers, checkpoint.step

    def _note(self, failure: Exception, step: int, resumed: int, workers: int, started: float) -> Restart:
        where = {name: getattr(failure, name, None) for name in ("worker", "stage", "microbatch", "action")}
        restart = Restart(
            step=step,
            error=type(failure).__name__,
            text=str(failure).partition("\n")[0],
            resumed_from=resumed,
            workers=workers,
            seconds=time.monotonic() - started,
            **where,
        )
        self._report.restarts.append(restart)
        return restart

    def _check_may_restart(self, error: Exception) -> None:
        """Raise the error where the run can't go on, with a note that says why."""
        reason = None
        if self._series is None:
            reason = "fit() had no checkpoint= to go on from"
        elif self._pipe.launch == "torchrun":
            reason = "torchrun starts the ranks again (see --max-restarts), and fit() resumes from the checkpoint then"
        elif not self._pipe.is_built:
            reason = "the workers could not be started in the first place"
        elif self._pipe._life.dismissed:
            reason = "the pipeline was closed"
        elif not self._series.members():
            reason = "there is no checkpoint yet to go on from"
        elif len(self._report.restarts) >= self._allowed:
            reason = f"max_restarts={self._allowed} were made already"
        elif isinstance(error, StageFailed):
            # a death may be the system's fault each time; the same exception at the same step is the code's
            failure = (self._pipe.steps, str(error))
            if failure == self._last_failure:
                reason = "it failed in the same way at the same step before the restart, so another would not help"
            self._last_failure = failure
        if reason is not None:
            error.add_note(reason)
            raise error

    @contextlib.contextmanager
    def _claimed(self) -> Iterator[None]:
        """No two runs write into one folder."""
        if self._series is None or self._pipe.launch == "torchrun":
            yield
            return
        with self._series.claimed():
            yield


def _feed_for(pipe: Pipeline, loader: Source, seed: int) -> Feed:
    """Batches from where the last run of this pipeline stopped, or the checkpoint that it loaded."""
    last = pipe._feed
    if last is not None and last.source is loader:
        feed = last
    else:
        feed = Feed(loader, seed)
        if last is not None:
            feed.follow(last)
    if pipe._loaded_place is not None:
        epoch, batch, _ = pipe._loaded_place
        pipe._loaded_place = None
        feed.seek(Place(epoch, batch))
    return feed


def _warm(launch: str) -> contextlib.AbstractContextManager[None]:
    """Keep what starts worker processes, so that new ones are there in moments."""
    return keep_warm() if launch == "processes" else contextlib.nullcontext()


@contextlib.contextmanager
def _traced(pipe: Pipeline) -> Iterator[None]:
    """SIGUSR1 prints what every worker does, unless the user's program has a use for that signal."""

    def show(number: int, frame: FrameType | None) -> None:
        text = "".join(traceback.format_stack(frame))
        print(f"{pipe._life.trace()}\nthis process, {os.getpid()}:\n{text}", file=sys.stderr, flush=True)

    free = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    if free:
        signal.signal(signal.SIGUSR1, show)
    try:
        yield
    finally:
        if free:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def _check_counts(**counts: Any) -> None:
    least = {"steps": 0, "max_restarts": 0}
    for name, value in counts.items():
        smallest = least.get(name, 1)
        if value is None and name in ("steps", "checkpoint_every", "min_workers"):
            continue
        if as_whole(value, smallest) is None:
            raise InputError(f"{name} must be a whole number >= {smallest}, got {value!r}")
