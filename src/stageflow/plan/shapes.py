"""What a plan is chosen from: numbers of micro-batches, stages per device, placements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from stageflow.errors import InputError
from stageflow.plan.partition import Block, Device, Tie
from stageflow.schedule import SCHEDULES, Schedule, build_schedule
from stageflow.schedule.build import SIMULATED
from stageflow.schedule.placement import contiguous, fold, loop

AUTO = "auto"
MOST_CHUNKS = 2
PER_DEVICE = 4  # micro-batches, where there is nothing to choose them by


@dataclass(frozen=True)
class Work:
    """A batch cut into so many micro-batches, and what the blocks take for one of them. ties: see `split_chain`."""

    microbatches: int
    blocks: tuple[Block, ...]
    ties: tuple[Tie, ...] = ()


@dataclass(frozen=True)
class Wish:
    """What the user decided.

    schedule: a name, or "auto". stages: how many; None leaves it open. seconds: of the search, which looks at as many
    schedules as that is worth on a usual machine, so that the result does not depend on the clock.
    """

    devices: tuple[Device, ...]
    schedule: str = AUTO
    recompute: bool | Literal["auto"] = AUTO
    stages: int | None = None
    seconds: float = 10.0
    seed: int = 0


@dataclass(frozen=True)
class Shape:
    """One way to lay out the work. pattern: a named schedule that tells what stages have in flight."""

    work: Work
    placement: tuple[int, ...]
    pattern: str

    def __str__(self) -> str:
        stages = f"{len(self.placement)} stages on devices {' '.join(map(str, self.placement))}"
        return f"{self.work.microbatches} micro-batches, {stages}"


def shapes_of(work: Work, wish: Wish) -> Iterator[Shape]:
    """All that are looked at. Raises InputError where the wish can't be met."""
    workers, blocks = len(wish.devices), len(work.blocks)
    if wish.stages is not None and not workers <= wish.stages <= blocks:
        raise InputError(
            f"stages={wish.stages} for {workers} devices and {blocks} blocks: give every device a stage and every "
            f"stage a block, {workers} to {blocks}"
        )
    if workers > blocks:
        raise InputError(f"{workers} devices for {blocks} blocks: every device needs a block, so {blocks} at most")
    if wish.schedule != AUTO:
        yield _named(work, wish)
        return
    counts = [wish.stages] if wish.stages else [v * workers for v in range(1, MOST_CHUNKS + 1) if v * workers <= blocks]
    for stages in counts:
        if stages == workers:
            yield Shape(work, loop(stages, workers), "1f1b")
        elif stages % workers:
            yield Shape(work, contiguous(stages, workers), "1f1b")
        else:
            yield Shape(work, fold(stages, workers), "zb_v")
            yield Shape(work, loop(stages, workers), "interleaved_1f1b")


def _named(work: Work, wish: Wish) -> Shape:
    """The shape of a named schedule: its own placement, and as many stages as it usually has on so many devices."""
    if wish.schedule not in (*SCHEDULES, *SIMULATED):
        raise InputError(f"unknown schedule {wish.schedule!r}; known: {', '.join(SCHEDULES)}, {AUTO}")
    workers = len(wish.devices)
    counts = [wish.stages] if wish.stages else range(workers, len(work.blocks) + 1, workers)
    for stages in counts:
        try:
            usual = build_schedule(wish.schedule, stages=stages, microbatches=work.microbatches)
        except InputError:  # not for this number of stages
            continue
        if usual.refusal or not usual.has_backward:
            raise InputError(usual.refusal or f"schedule {wish.schedule!r} has no backward, and a plan is for training")
        if usual.n_workers == workers:
            return Shape(work, usual.placement, wish.schedule)
        if usual.n_workers > workers:
            break
    stages = wish.stages or workers
    built = build_schedule(wish.schedule, stages=stages, microbatches=work.microbatches, workers=workers)
    return Shape(work, built.placement, wish.schedule)


def pattern_of(shape: Shape) -> Schedule:
    """The shape's pattern as a schedule."""
    return build_schedule(
        shape.pattern,
        stages=len(shape.placement),
        microbatches=shape.work.microbatches,
        placement=shape.placement,
    )


def in_flight(shape: Shape) -> list[int]:
    """Per stage, the most micro-batches whose activations the shape's pattern keeps at once."""
    schedule = pattern_of(shape)
    return [_most(schedule, stage) for stage in range(schedule.n_stages)]


def _most(schedule: Schedule, stage: int) -> int:
    kept = most = 0
    for action in schedule.orders[schedule.placement[stage]]:
        if action.stage == stage:
            kept += {"F": 1, "B": -1, "I": -1, "W": 0}[action.kind]
            most = max(most, kept)
    return most
