"""What several builders need."""

from __future__ import annotations

from stageflow.schedule.actions import Action, Kind

Orders = tuple[tuple[Action, ...], ...]


def is_contiguous(placement: tuple[int, ...]) -> bool:
    """Whether each worker's stages are neighbours, in the workers' order: then a worker acts as one bigger stage."""
    return list(placement) == sorted(placement)


def through(kind: Kind, stages: tuple[int, ...], microbatch: int) -> list[Action]:
    """One micro-batch through a worker's neighbouring stages: up for F, down for the others."""
    way = stages if kind == "F" else tuple(reversed(stages))
    return [Action(kind, stage, microbatch) for stage in way]
