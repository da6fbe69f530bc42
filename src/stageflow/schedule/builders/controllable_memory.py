"""V-Half and V-Min: two stages per worker in a V, and half or a third of the memory of 1F1B."""

from __future__ import annotations

from collections import deque

from stageflow.graph import StageGraph
from stageflow.schedule.actions import Action, Orders
from stageflow.schedule.builders.common import require_v


def v_half(graph: StageGraph, placement: tuple[int, ...], microbatches: int) -> Orders:
    """Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", section 3 (V-Half).

    Every micro-batch takes the same block, six time units after the one before: with e = 3 for an even number p of
    workers and 0 for an odd one, worker d starts F of its first stage at 2d and of its second at 3p-2-d, I of its
    second at 3p+e-1+2d and of its first at 6p+e-2-d. Ws take the units left over, the oldest first.

        4 stages on 2 workers, 3 micro-batches, F = I = W
        0 | 0F0 .   .   3F0 0F1 3I0 3W0 3F1 0F2 .   0I0 3I1 0W0 3F2 3W1 .   0I1 3I2 0W1 3W2 .   0I2 0W2
        1 | .   1F0 2F0 .   .   1F1 2F1 2I0 2W0 1I0 1W0 1F2 2F2 2I1 2W1 1I1 1W1 .   2I2 2W2 1I2 1W2 .

    For p workers and m >= p micro-batches with F = I = W: span = 6mF + (7(p-1)+e)F/2; peak 2 floor((p+2)/2)
    activations of a stage, each half of what a stage of 1F1B keeps. Other times keep the peak, and the idle time does
    not grow with m as long as W+2I >= 2F and W+2F >= 2I.

    Raises InputError unless the placement is a V.
    """
    p = require_v("v_half", placement)
    e = 0 if p % 2 else 3
    return _repeat(
        p, microbatches, [(2 * d, 3 * p - d - 2, 3 * p + e + 2 * d - 1, 6 * p + e - d - 2) for d in range(p)]
    )


def v_min(graph: StageGraph, placement: tuple[int, ...], microbatches: int) -> Orders:
    """Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", section 3 (V-Min).

    As `v_half` with another block: with e = 2 for a number p of workers that 3 divides and 0 else, worker d starts F
    of its first stage at d and of its second at 2p-1-d, I of its second at 2p+e+d and of its first at 4p+e-1-d.

        4 stages on 2 workers, 3 micro-batches, F = I = W
        0 | 0F0 .   .   3F0 3I0 3W0 0F1 0I0 0W0 3F1 3I1 3W1 0F2 0I1 0W1 3F2 3I2 3W2 .   0I2 0W2
        1 | .   1F0 2F0 .   .   2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 1F2 2F2 2W1 1W1 2I2 1I2 2W2 1W2

    For p >= 2 workers and m >= p micro-batches with F = I = W: span = 6mF + (4p-5+e)F; peak 2 floor((p+4)/3)
    activations of a stage, each half of what a stage of 1F1B keeps. Other times keep the peak; the idle time then
    grows with m.

    Raises InputError unless the placement is a V.
    """
    p = require_v("v_min", placement)
    e = 0 if p % 3 else 2
    return _repeat(p, microbatches, [(d, 2 * p - 1 - d, 2 * p + e + d, 4 * p + e - d - 1) for d in range(p)])


def _repeat(workers: int, microbatches: int, starts: list[tuple[int, int, int, int]]) -> Orders:
    """starts: per worker, the time of F of its first and second stage, I of its second and first, of micro-batch 0."""
    orders: list[tuple[Action, ...]] = []
    for worker, block in enumerate(starts):
        down, up = worker, 2 * workers - 1 - worker
        parts = tuple(zip(block, ("F", "F", "I", "I"), (down, up, up, down), strict=True))
        at = {start + 6 * m: Action(kind, stage, m) for m in range(microbatches) for start, kind, stage in parts}
        order: list[Action] = []
        weights: deque[Action] = deque()
        for time in range(max(at) + 1):
            action = at.get(time)
            if action is not None:
                order.append(action)
                if action.kind == "I":
                    weights.append(Action("W", action.stage, action.microbatch))
            elif weights:
                order.append(weights.popleft())
        orders.append((*order, *weights))
    return tuple(orders)
