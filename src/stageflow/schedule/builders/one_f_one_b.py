"""1F1B: one forward, one backward."""

from __future__ import annotations

from stageflow.graph import StageGraph
from stageflow.schedule.actions import Action, Orders
from stageflow.schedule.builders.common import is_contiguous, through
from stageflow.schedule.builders.greedy import greedy
from stageflow.schedule.placement import local_stages
from stageflow.schedule.simulate import Costs


def one_f_one_b(graph: StageGraph, placement: tuple[int, ...], microbatches: int, costs: Costs | None = None) -> Orders:
    """Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training", section 3 (PipeDream-Flush).

    Worker d of p warms up with p-1-d forwards, then does a forward and a backward in turn, then the last backwards.

        3 stages, 4 micro-batches, B twice F
        0 | F0 F1 F2 .  .  .  .  B0 -- F3 B1 -- .  B2 -- .  B3 --
        1 | .  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 -- .  .
        2 | .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .  .  .  .

    For p workers with one stage each and m micro-batches: idle time per worker (p-1)(F+B); peak min(m, p-d)
    activations. Neighbouring stages on one worker act as one bigger stage. For any other placement `greedy` finds an
    order, for the given costs, with at most n-s activations for each local stage s of n.
    """
    if not is_contiguous(placement):
        return greedy(graph, placement, microbatches, split=False, costs=costs)
    workers = max(placement) + 1
    orders: list[tuple[Action, ...]] = []
    for worker, stages in enumerate(local_stages(placement)):
        warm_up = min(workers - 1 - worker, microbatches)
        order = [action for m in range(warm_up) for action in through("F", stages, m)]
        for m in range(microbatches):
            if warm_up + m < microbatches:
                order += through("F", stages, warm_up + m)
            order += through("B", stages, m)
        orders.append(tuple(order))
    return tuple(orders)
