"""Forwards only, for evaluation and prediction."""

from __future__ import annotations

from stageflow.graph import StageGraph
from stageflow.schedule.actions import Action, Orders
from stageflow.schedule.placement import local_stages


def forward_only(graph: StageGraph, placement: tuple[int, ...], microbatches: int) -> Orders:
    """Every worker takes the micro-batches in turn.

    With several stages on a worker the order is that of a time in which every forward takes one step: F of stage s
    and micro-batch m is keyed by when it could run at the earliest, (m // w) * n + s + m % w for w workers and
    n stages, which keeps micro-batches in groups of w that go through all local stages before the next group.

        3 stages, 3 micro-batches
        0 | F0 F1 F2 .  .
        1 | .  F0 F1 F2 .
        2 | .  .  F0 F1 F2

    Idle time per worker (p-1) F; keeps no activations.
    """
    workers = max(placement) + 1
    stages = len(placement)

    def key(action: Action) -> tuple[int, int]:
        group, place = divmod(action.microbatch, workers)
        return group * stages + action.stage + place, action.stage

    return tuple(
        tuple(sorted((Action("F", s, m) for s in local for m in range(microbatches)), key=key))
        for local in local_stages(placement)
    )
