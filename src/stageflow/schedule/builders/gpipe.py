"""All forwards, then all backwards: GPipe, and its breadth-first form for several stages per worker."""

from __future__ import annotations

from stageflow.graph import StageGraph
from stageflow.schedule.actions import Action, Orders
from stageflow.schedule.builders.common import is_contiguous, through
from stageflow.schedule.placement import local_stages


def gpipe(graph: StageGraph, placement: tuple[int, ...], microbatches: int) -> Orders:
    """Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks", section 2.3.

        3 stages, 2 micro-batches, B twice F
        0 | F0 F1 .  .  .  .  .  .  B0 -- B1 --
        1 | .  F0 F1 .  .  .  B0 -- B1 -- .  .
        2 | .  .  F0 F1 B0 -- B1 -- .  .  .  .

    For p workers, m micro-batches: idle time per worker (p-1)(F+B); peak m activations per stage. Neighbouring stages
    on one worker act as one bigger stage; any other placement is built as `looped_bfs`.
    """
    if not is_contiguous(placement):
        return looped_bfs(graph, placement, microbatches)
    orders: list[tuple[Action, ...]] = []
    for stages in local_stages(placement):
        order = [action for m in range(microbatches) for action in through("F", stages, m)]
        order += [action for m in range(microbatches) for action in through("B", stages, m)]
        orders.append(tuple(order))
    return tuple(orders)


def looped_bfs(graph: StageGraph, placement: tuple[int, ...], microbatches: int) -> Orders:
    """Lamy-Poirier 2022, "Breadth-First Pipeline Parallelism", section 4: all micro-batches of a worker's first
    stage, then of its next; backwards from its last stage to its first.

        4 stages on 2 workers, 2 micro-batches, B twice F
        0 | 0F0 0F1 2F0 2F1 .   .   .   2B0 --- 2B1 --- 0B0 --- 0B1 ---
        1 | .   1F0 1F1 3F0 3F1 3B0 --- 3B1 --- 1B0 --- 1B1 --- .   .

    For p workers with v stages each in a loop and m >= p micro-batches: idle time per worker (p-1)(F+B), with F and B
    the times of one stage; peak mv activations of a stage. Fewer micro-batches, and any other placement, work too.
    """
    return tuple(
        (
            *(Action("F", stage, m) for stage in stages for m in range(microbatches)),
            *(Action("B", stage, m) for stage in reversed(stages) for m in range(microbatches)),
        )
        for stages in local_stages(placement)
    )
