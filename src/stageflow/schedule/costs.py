"""The times from which a schedule is simulated: of each action, of each link, of the reduction at the end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stageflow.errors import InputError
from stageflow.schedule.actions import Action

PerStage = float | Sequence[float]
"""One number for all stages, or one per stage."""

PerEdge = float | Mapping[tuple[int, int], float]
"""One number for all edges of the graph, or one per edge as {(producer, consumer): number}."""


@dataclass(frozen=True)
class Costs:
    """Seconds (or any one unit) that actions and links take.

    forward, backward_input, backward_weight: time of F, I and W.
    backward: time of a whole B; None: that of I and W together.
    hop: latency of a link: from the moment a value has left until it is at another worker. For values and gradients
        alike, as is ``transfer``.
    recompute: time of running the forward again before a backward; added to B, or to I where the backward is split.
    transfer: time that a value occupies the link between two workers: its bytes over the bandwidth. A link joins an
        ordered pair of workers and carries one value at a time, first made first served.
    reduction: time after a stage's last gradient of weights to sum it with the stage's copies in other pipelines
        (data parallelism). It keeps no worker busy, and a step ends after it.

    Times of actions and reductions are one number or one per stage, times of links one number or one per edge.
    """

    forward: PerStage = 1.0
    backward_input: PerStage = 1.0
    backward_weight: PerStage = 1.0
    backward: PerStage | None = None
    hop: PerEdge = 0.0
    recompute: PerStage = 0.0
    transfer: PerEdge = 0.0
    reduction: PerStage = 0.0

    def of(self, action: Action) -> float:
        """Seconds of one action."""
        kind, stage, _ = action
        if kind == "F":
            return at_stage(self.forward, stage)
        if kind == "W":
            return at_stage(self.backward_weight, stage)
        again = at_stage(self.recompute, stage)
        if kind == "I":
            return again + at_stage(self.backward_input, stage)
        if self.backward is None:
            return again + at_stage(self.backward_input, stage) + at_stage(self.backward_weight, stage)
        return again + at_stage(self.backward, stage)

    def hop_between(self, source: int, target: int) -> float:
        """Latency for a value of stage ``source`` on its way to stage ``target`` on another worker."""
        return _between(self.hop, source, target)

    def transfer_between(self, source: int, target: int) -> float:
        """Seconds that a value of stage ``source`` for stage ``target`` occupies the link between their workers."""
        return _between(self.transfer, source, target)

    def check(self, stages: int, edges: frozenset[tuple[int, int]]) -> None:
        """Raise InputError unless there is a time for every stage and edge, finite and not negative."""
        for name in ("forward", "backward_input", "backward_weight", "backward", "recompute", "reduction"):
            given: PerStage | None = getattr(self, name)
            if given is not None:
                check_per_stage(f"costs.{name}", "time", given, stages)
        for name in ("hop", "transfer"):
            link: PerEdge = getattr(self, name)
            if isinstance(link, Mapping):
                missing = sorted(edges - set(link))
                if missing:
                    raise InputError(f"costs.{name} has no time for the edges {missing}")
            if not all(map(_is_amount, link.values() if isinstance(link, Mapping) else (link,))):
                raise InputError(f"costs.{name} has a time that is negative or not finite: {link}")


def check_costs(given: object) -> None:
    """Raise InputError for what is no `Costs`."""
    if not isinstance(given, Costs):
        raise InputError(f"costs must be a Costs, such as Costs(forward=1.0, backward=2.0), got {given!r}")


def at_stage(given: PerStage, stage: int) -> float:
    """The number of one stage."""
    return given[stage] if isinstance(given, Sequence) else given


def check_per_stage(name: str, noun: str, given: PerStage, stages: int) -> None:
    """Raise InputError unless there is one number or one per stage, all finite and not negative.

    name, noun: what the error calls the argument, and what one number of it is.
    """
    if isinstance(given, Sequence) and len(given) != stages:
        raise InputError(f"{name} has {len(given)} {noun}s for {stages} stages: give one number, or one per stage")
    if not all(map(_is_amount, given if isinstance(given, Sequence) else (given,))):
        raise InputError(f"{name} has a {noun} that is negative or not finite: {given}")


def _between(given: PerEdge, source: int, target: int) -> float:
    return given[min(source, target), max(source, target)] if isinstance(given, Mapping) else given


def _is_amount(value: float) -> bool:
    return 0.0 <= value < math.inf
