"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from stageflow.graph import StageGraph
from stageflow.schedule.actions import Action, Orders
from stageflow.schedule.builders.common import is_contiguous, through
from stageflow.schedule.placement import local_stages


def gpipe(graph: StageGraph, placement: tuple[int, ...], microbatches: int) -> Orders:
    """Huang et al. 2019, "GPipe", section 2.3; with several stages in a loop, the breadth-first order of
    Lamy-Poirier 2022, "Breadth-First Pipeline Parallelism": all micro-batches of a stage before the next stage.

        3 stages, 2 micro-batches, B twice F
        0 | F0 F1 .  .  .  .  .  .  B0 -- B1 --
        1 | .  F0 F1 .  .  .  B0 -- B1 -- .  .
        2 | .  .  F0 F1 B0 -- B1 -- .  .  .  .

    For p workers, m micro-batches: idle time per worker (p-1)(F+B); peak m activations per stage.
    """
    orders: list[tuple[Action, ...]] = []
    for stages in local_stages(placement):
        if is_contiguous(placement):
            order = [action for m in range(microbatches) for action in through("F", stages, m)]
            order += [action for m in range(microbatches) for action in through("B", stages, m)]
        else:
            order = [Action("F", stage, m) for stage in stages for m in range(microbatches)]
            order += [Action("B", stage, m) for stage in reversed(stages) for m in range(microbatches)]
        orders.append(tuple(order))
    return tuple(orders)
