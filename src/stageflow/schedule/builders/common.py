"""What several builders need."""

from __future__ import annotations

from stageflow.schedule.actions import Action, Kind


def is_contiguous(placement: tuple[int, ...]) -> bool:
    """Whether each worker's stages are neighbours, in the workers' order: then a worker acts as one bigger stage."""
    return list(placement) == sorted(placement)


def through(kind: Kind, stages: tuple[int, ...], microbatch: int) -> list[Action]:
    """One micro-batch through a worker's neighbouring stages: up for F, down for the others."""
    way = stages if kind == "F" else stages[::-1]
    return [Action(kind, stage, microbatch) for stage in way]


def memory_1f1b(placement: tuple[int, ...]) -> list[int]:
    """Per worker, the activations of a stage that 1F1B keeps at most: n-s for each local stage s of n."""
    kept = [0] * (max(placement) + 1)
    for stage, worker in enumerate(placement):
        kept[worker] += len(placement) - stage
    return kept
