"""What several builders need."""

from __future__ import annotations

from collections.abc import Sequence

from stageflow.errors import InputError
from stageflow.schedule.actions import Action, Kind
from stageflow.schedule.placement import fold

SPLIT: tuple[Kind, Kind, Kind] = ("F", "I", "W")
"""The kinds of a schedule that splits every backward."""


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


def alternate(
    forwards: Sequence[Sequence[Action]],
    backwards: Sequence[Sequence[Action]],
    warm_up: int,
    weights: Sequence[Sequence[Action]] = (),
    waiting: int = 0,
) -> tuple[Action, ...]:
    """One worker's order: warm up, then a forward and a backward in turn, then the other backwards.

    forwards, backwards, weights: blocks of actions that stay together, equally many of each; no weights for whole
        backwards.
    warm_up: forwards before the first pair.
    waiting: weights that stay put off; one comes after each backward that leaves more, or that had no forward before.
    """
    order = [action for block in forwards[:warm_up] for action in block]
    put = 0
    for done, backward in enumerate(backwards, 1):
        ahead = warm_up + done - 1
        has_forward = ahead < len(forwards)
        if has_forward:
            order += forwards[ahead]
        order += backward
        if weights and (done - put > waiting or not has_forward):
            order += weights[put]
            put += 1
    for block in weights[put:]:
        order += block
    return tuple(order)


def require_v(name: str, placement: tuple[int, ...]) -> int:
    """The number of workers; raises InputError unless each has two stages, placed like a V."""
    workers = max(placement) + 1
    if placement != fold(2 * workers, workers):
        raise InputError(
            f"schedule {name!r} needs two stages per worker in a V, got stages on workers {placement}: leave out "
            f"placement and workers and give an even number of stages, such as {2 * -(-len(placement) // 2)}"
        )
    return workers
