"""What a run tells while it goes on, and what may be hooked into it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stageflow.errors import InputError
from stageflow.whole import as_whole

if TYPE_CHECKING:
    from stageflow.train.pipeline import Pipeline


@dataclass(frozen=True)
class Restart:
    """A failure from which a run went on.

    step: steps that were made when it came. error: its class. text: its first line, which names the worker.
    worker, stage, microbatch, action: where it was, as far as known. resumed_from: the step of the checkpoint that was
    restored. workers: how many there were then, 0 where that start failed too. seconds: from the failure until the run
    could go on.
    """

    step: int
    error: str
    text: str
    worker: int | None
    stage: int | None
    microbatch: int | None
    action: str | None
    resumed_from: int
    workers: int
    seconds: float

    def __str__(self) -> str:
        text = f"after step {self.step}: {self.error}: {self.text}; "
        if not self.workers:
            return f"{text}new workers failed after {self.seconds:.1f} s"
        return f"{text}{self.workers} workers went on from step {self.resumed_from} after {self.seconds:.1f} s"


@dataclass
class FitReport:
    """How a run went.

    steps: made in all, also before this call. loss: of the last step, None where no step was made.
    ended: why: "steps" all made, "data" the loader ended, "stopped" by a callback.
    resumed_from: the step of the checkpoint that the run began with, None where it began anew.
    restarts: failures from which it went on. saved: steps of the checkpoints that were written.
    failed_saves: what went wrong with others; the run went on without them. seconds: in all.
    """

    steps: int = 0
    loss: float | None = None
    ended: str = ""
    resumed_from: int | None = None
    restarts: list[Restart] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    failed_saves: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        since = "" if self.resumed_from is None else f", resumed from step {self.resumed_from}"
        loss = "" if self.loss is None else f", loss {self.loss:.6g}"
        lines = [f"{self.steps} steps{since}{loss}, {self.seconds:.1f} s; ended by {self.ended}"]
        lines.append(f"{len(self.saved)} checkpoints" + (f", the last at step {self.saved[-1]}" if self.saved else ""))
        lines += [f"restart {number} {restart}" for number, restart in enumerate(self.restarts, 1)]
        lines += [f"failed save: {text}" for text in self.failed_saves]
        return "\n".join(lines)


@dataclass
class Run:
    """What callbacks see.

    pipe: to evaluate with, or for ``pipe.last_step`` (learning rates, gradient norm, times).
    step: how many were made. loss: of the last one. epoch: of its batch. seconds: that it took, loading its batch not
    included. report: so far.
    """

    pipe: Pipeline
    report: FitReport
    step: int = 0
    loss: float = 0.0
    epoch: int = 0
    seconds: float = 0.0
    stopping: bool = False

    def stop(self) -> None:
        """End the run after this step, with a last checkpoint."""
        self.stopping = True


class Callback:
    """Override what you need. Under torchrun every rank calls its own.

    A step is told once, also if it is made again after a failure; only a step whose callbacks were interrupted by a
    failure of the workers is told again. What a callback raises ends the run, unless the workers failed in it.
    """

    def on_start(self, run: Run) -> None:
        """Before the first step; `Run.step` tells how many there are already."""

    def on_step(self, run: Run) -> None:
        """After a step."""

    def on_save(self, run: Run, directory: Path) -> None:
        """A checkpoint is complete."""

    def on_restart(self, run: Run, restart: Restart) -> None:
        """The workers failed and were replaced, and their state was restored."""

    def on_end(self, run: Run) -> None:
        """After the last step and its checkpoint; not called for a run that ends with an exception."""


class EveryStep(Callback):
    """Calls a function with the `Run` after every step."""

    def __init__(self, function: Callable[[Run], Any]) -> None:
        self._function = function

    def on_step(self, run: Run) -> None:
        self._function(run)


class Evaluate(Callback):
    """Evaluates a few batches every so many steps.

        held_out = Evaluate(batches, every=100)
        pipe.fit(loader, steps=1000, callbacks=[held_out])
        held_out.losses                            # {100: 2.31, 200: 1.98, ...}: step -> mean loss of the batches

    batches: in a form that `Pipeline.fit` takes; iterated anew each time.
    """

    def __init__(self, batches: Iterable[Any], every: int) -> None:
        if as_whole(every, 1) is None:
            raise InputError(f"every must be a whole number of steps >= 1, got {every!r}")
        self._batches = batches
        self._every = every
        self.losses: dict[int, float] = {}

    def on_step(self, run: Run) -> None:
        if run.step % self._every == 0:
            losses = [run.pipe.evaluate(*args, **kwargs).item() for args, kwargs in map(as_step, self._batches)]
            if not losses:
                raise InputError("Evaluate() was given no batches, or an iterator that had ended: give a list")
            self.losses[run.step] = sum(losses) / len(losses)


def check_callbacks(callbacks: Sequence[Callback | Callable[[Run], Any]]) -> list[Callback]:
    """Callbacks, with plain functions as `EveryStep`. Raises InputError."""
    found: list[Callback] = []
    for callback in callbacks:
        if isinstance(callback, Callback):
            found.append(callback)
        elif callable(callback) and not isinstance(callback, type):
            found.append(EveryStep(callback))
        else:
            raise InputError(f"callbacks= must hold Callback objects or functions of a Run, got {callback!r}")
    return found


def as_step(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `Pipeline.train_step` for what a loader gives.

    A dict: keyword arguments. A pair: (input, target), the input a tensor, a tuple of arguments or a dict. Else: the
    one argument. Raises InputError.
    """
    if isinstance(batch, dict):
        return (), _as_keywords(batch)
    if not isinstance(batch, (tuple, list)):
        return (batch,), {}
    if len(batch) == 1:
        return (batch[0],), {}
    if len(batch) != 2:
        raise InputError(
            f"the loader gave a {type(batch).__name__} of {len(batch)}; expected (input, target), a dict of keyword "
            "arguments, or one tensor. For several inputs: ((first, second), target)"
        )
    inputs, target = batch
    if isinstance(inputs, dict):
        if "target" in inputs:
            raise InputError("the loader gave a batch with the key 'target' in its inputs and a target; one can be")
        return (), {**_as_keywords(inputs), "target": target}
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {"target": target}


def _as_keywords(batch: dict[Any, Any]) -> dict[str, Any]:
    """Raises InputError for keys that `Pipeline.train_step` can't hand to the model."""
    for key in batch:
        if not isinstance(key, str) or key in ("self", "update"):
            raise InputError(
                f"the loader gave a batch with the key {key!r}; expected names of the model's arguments, which can't "
                "be 'update' or 'self', since train_step() has these itself: give the model's by position"
            )
    return batch
