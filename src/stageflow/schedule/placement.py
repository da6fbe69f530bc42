"""Which worker holds which stage: one worker number per stage.

8 stages on 4 workers    stage  0 1 2 3 4 5 6 7
loop                            0 1 2 3 0 1 2 3
fold (a V at 2 per worker)      0 1 2 3 3 2 1 0
contiguous                      0 0 1 1 2 2 3 3
"""

from __future__ import annotations

from collections.abc import Sequence

from stageflow.errors import InputError


def loop(stages: int, workers: int) -> tuple[int, ...]:
    """Round and round: stage s on worker s % workers."""
    return tuple(stage % workers for stage in range(stages))


def fold(stages: int, workers: int) -> tuple[int, ...]:
    """There and back again: a V when there are two stages per worker, a zigzag when there are more."""
    way = (*range(workers), *reversed(range(workers)))
    return tuple(way[stage % len(way)] for stage in range(stages))


def contiguous(stages: int, workers: int) -> tuple[int, ...]:
    """Neighbouring stages together; counts per worker differ by one at most, the first workers get more."""
    each, more = divmod(stages, workers)
    return tuple(worker for worker in range(workers) for _ in range(each + (worker < more)))


PLACEMENTS = {"loop": loop, "fold": fold, "contiguous": contiguous}


def place(placement: str | Sequence[int], stages: int, workers: int) -> tuple[int, ...]:
    """A placement by name, or a free one checked.

    placement: "loop", "fold", "contiguous", or one worker number per stage.
    Raises InputError unless every stage has a worker and every worker a stage.
    """
    if not 1 <= workers <= stages:
        raise InputError(
            f"{workers} workers for {stages} stages: every worker needs a stage; "
            f"choose from 1 to {stages} workers, or cut the model into at least {workers} stages"
        )
    if isinstance(placement, str):
        if placement not in PLACEMENTS:
            raise InputError(
                f"unknown placement {placement!r}; known: {', '.join(PLACEMENTS)}, or one worker per stage"
            )
        return PLACEMENTS[placement](stages, workers)
    chosen = tuple(placement)
    if len(chosen) != stages:
        raise InputError(f"placement {chosen} names a worker for {len(chosen)} stages, but there are {stages} stages")
    if set(chosen) != set(range(workers)):
        raise InputError(f"placement {chosen} must use every worker from 0 to {workers - 1} and no other")
    return chosen


def local_stages(placement: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Per worker, its stages ascending."""
    workers = max(placement) + 1
    return tuple(tuple(s for s, w in enumerate(placement) if w == worker) for worker in range(workers))
