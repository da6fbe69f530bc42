"""How much memory a schedule needs on each worker, counted in the order of its actions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stageflow.schedule.actions import Action
from stageflow.schedule.costs import PerStage, at_stage, check_per_stage

if TYPE_CHECKING:
    from stageflow.schedule.schedule import Schedule


@dataclass(frozen=True)
class Footprint:
    """Bytes (or any one unit) that each stage keeps; every field is one number for all stages, or one per stage.

    static: all the time: parameters, gradients, state of the optimizer.
    activation: per micro-batch, from the start of its F to the end of its B or I.
    deferred: per micro-batch, what an I leaves for the W: from the end of the I to the end of the W. None: all of
        ``activation`` stays until then.

    `Footprint()` counts activations of a stage as the papers do: each 1, from the start of F to the end of B or W.
    """

    static: PerStage = 0
    activation: PerStage = 1
    deferred: PerStage | None = None

    def check(self, stages: int) -> None:
        """Raise InputError unless every field fits the number of stages, finite and not negative."""
        check_per_stage("footprint.static", "size", self.static, stages)
        check_per_stage("footprint.activation", "size", self.activation, stages)
        if self.deferred is not None:
            check_per_stage("footprint.deferred", "size", self.deferred, stages)

    def at_start(self, action: Action) -> float:
        """How much more is kept from the start of this action on."""
        return at_stage(self.activation, action.stage) if action.kind == "F" else 0

    def at_end(self, action: Action) -> float:
        """How much more is kept from the end of this action on; less where negative."""
        kind, stage, _ = action
        if kind == "F":
            return 0
        activation = at_stage(self.activation, stage)
        left = activation if self.deferred is None else at_stage(self.deferred, stage)
        return {"B": -activation, "I": left - activation, "W": -left}[kind]


def peak_memory(schedule: Schedule, footprint: Footprint) -> tuple[float, ...]:
    """The most that each worker ever keeps, in the footprint's unit, one number per worker.

    The orders alone decide it, whatever the actions' times. A schedule of forwards only keeps nothing but what is
    static. Raises InputError when the footprint doesn't fit the stages.
    """
    footprint.check(schedule.n_stages)
    static = static_memory(footprint, schedule.placement, schedule.n_workers)
    if not schedule.has_backward:
        return static
    peaks: list[float] = []
    for order, kept in zip(schedule.orders, static, strict=True):
        peaks.append(max((level for _, *levels in levels_of(order, footprint, kept) for level in levels), default=kept))
    return tuple(peaks)


def static_memory(footprint: Footprint, placement: Sequence[int], workers: int) -> tuple[float, ...]:
    """What each worker keeps all the time, for the stages placed on it."""
    kept: list[float] = [0] * workers
    for stage, worker in enumerate(placement):
        kept[worker] += at_stage(footprint.static, stage)
    return tuple(kept)


def levels_of(order: Sequence[Action], footprint: Footprint, kept: float) -> Iterator[tuple[Action, float, float]]:
    """For each action of one worker, what the worker keeps while it runs and after it ended.

    kept: what it keeps before the first one.
    """
    for action in order:
        during = kept + footprint.at_start(action)
        kept = during + footprint.at_end(action)
        yield action, during, kept
