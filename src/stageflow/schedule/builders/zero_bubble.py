"""Zero bubble with one stage per worker: gradients of weights wait until a worker would idle."""

from __future__ import annotations

from stageflow.errors import InputError
from stageflow.graph import StageGraph
from stageflow.schedule.actions import Action, Orders
from stageflow.schedule.builders.common import SPLIT, alternate, is_contiguous, memory_1f1b, through
from stageflow.schedule.builders.greedy import greedy
from stageflow.schedule.costs import Costs
from stageflow.schedule.placement import local_stages


def zb_h1(
    graph: StageGraph,
    placement: tuple[int, ...],
    microbatches: int,
    memory: int | None = None,
    costs: Costs | None = None,
) -> Orders:
    """Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2.1, ZB-H1: no more memory than 1F1B.

    1F1B with I in the place of B; worker d of p keeps d of its W waiting, so that every worker keeps p activations.

        3 stages, 4 micro-batches, F = I = W
        0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        1 | .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        2 | .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    memory: the most activations of a stage that a worker may keep; default p for each of its stages. More shortens
        the bubble until 2p-1, where it is that of `zb_h2`. Less than p works too, down to 1.

    For p workers with one stage each, m >= p micro-batches, W <= F and hops of c: span = m(F+I+W) +
    (p-1)(F+I-W+4c), so idle time (p-1)(F+I-W) without hops; peak p. Neighbouring stages on one worker act as one
    bigger stage.
    For any other placement `greedy` finds an order for the given costs with the memory of 1F1B's fullest worker.
    """
    workers = max(placement) + 1
    if not is_contiguous(placement):
        if memory is None:
            memory = max(memory_1f1b(placement))
        return greedy(graph, placement, microbatches, memory=memory, costs=costs)
    orders: list[tuple[Action, ...]] = []
    for worker, stages in enumerate(local_stages(placement)):
        kept = workers if memory is None else memory // len(stages)
        if kept < 1:
            raise InputError(
                f"memory={memory} is too small for worker {worker}, which has {len(stages)} stages: "
                f"it must be able to keep at least {len(stages)} activations, one of each"
            )
        behind = workers - 1 - worker
        warm_up = max(0, min(2 * behind, behind + kept - workers))
        forwards, inputs, weights = ([through(k, stages, m) for m in range(microbatches)] for k in SPLIT)
        orders.append(alternate(forwards, inputs, warm_up, weights, kept - 1 - warm_up))
    return tuple(orders)


def zb_h2(graph: StageGraph, placement: tuple[int, ...], microbatches: int, costs: Costs | None = None) -> Orders:
    """Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2.1, ZB-H2: twice the memory of 1F1B, no bubble.

    Worker d of p warms up with 2(p-1-d) forwards and keeps 2d of its W waiting.

        3 stages, 5 micro-batches, F = I = W
        0 | F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 .  .
        1 | .  F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 .
        2 | .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4

    For p workers with one stage each, m >= 2p micro-batches, W <= F and hops of c with F+I+2c >= 2W:
    span = m(F+I+W) + (p-1)(F+I-2W+2c), none of it idle when F = I = W and c = 0; peak 2p-1. From the first start to
    the last end a step takes m(F+I+W) + (p-1)(F+c) as long as W <= F and I+c <= 2W: no schedule with one stage per
    worker takes less, since the last worker can't start earlier. Other placements as in `zb_h1`.
    """
    workers = max(placement) + 1
    if is_contiguous(placement):
        stages = max(placement.count(worker) for worker in range(workers))
        return zb_h1(graph, placement, microbatches, (2 * workers - 1) * stages)
    return zb_h1(graph, placement, microbatches, 2 * max(memory_1f1b(placement)) - 1, costs)
