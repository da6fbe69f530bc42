"""Zero bubble: the backward is split, and gradients of weights wait until a worker would idle."""

from __future__ import annotations

from stageflow.errors import InputError
from stageflow.graph import StageGraph
from stageflow.schedule.actions import Action, Kind, Orders
from stageflow.schedule.builders.common import is_contiguous, memory_1f1b, through
from stageflow.schedule.builders.greedy import greedy
from stageflow.schedule.placement import fold, local_stages
from stageflow.schedule.simulate import Costs


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
        orders.append(_one_chunk(stages, microbatches, warm_up, kept - 1 - warm_up))
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


def _one_chunk(stages: tuple[int, ...], microbatches: int, warm_up: int, waiting: int) -> tuple[Action, ...]:
    """Warm up, then F and I in turn; a W after each I that leaves more than ``waiting`` put off or has no F before."""
    order = [action for m in range(min(warm_up, microbatches)) for action in through("F", stages, m)]
    weights = 0
    for m in range(microbatches):
        has_forward = warm_up + m < microbatches
        if has_forward:
            order += through("F", stages, warm_up + m)
        order += through("I", stages, m)
        if m + 1 - weights > waiting or not has_forward:
            order += through("W", stages, weights)
            weights += 1
    for m in range(weights, microbatches):
        order += through("W", stages, m)
    return tuple(order)


def zb_v(graph: StageGraph, placement: tuple[int, ...], microbatches: int, costs: Costs | None = None) -> Orders:
    """Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", section 3 (V-ZB, ZB-V): two stages per worker
    in a V, so that the first worker also has the last stage and backwards start next to where forwards do.

        4 stages on 2 workers, 4 micro-batches, F = I = W
        0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3 .
        1 | .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3

    For p workers, F = I = W, c = 0 and m >= 2p-1 micro-batches: span = 2m(F+I+W), no idle time in it; from the first
    start to the last end (p-1)F more. Peak 2p activations of a stage, each half of what a stage of zb_h1 keeps.
    Any other placement is built as in `zb_h1`, and found by `greedy` unless a worker's stages are neighbours.
    """
    workers = max(placement) + 1
    if placement != fold(2 * workers, workers):
        return zb_h1(graph, placement, microbatches, costs=costs)
    return tuple(_v_order(workers, worker, microbatches) for worker in range(workers))


def _v_order(workers: int, worker: int, microbatches: int) -> tuple[Action, ...]:
    """One worker's order in the V; down is its stage on the way from the first worker, up the one on the way back."""
    down, up = worker, 2 * workers - 1 - worker
    behind = workers - worker
    steady: tuple[tuple[Kind, int], ...] = (("F", down), ("I", down), ("W", down), ("F", up), ("I", up), ("W", up))
    phases: list[tuple[int, tuple[tuple[Kind, int], ...]]] = [
        (2 * behind - 1, (("F", down),)),
        (worker, (("F", up), ("F", down))),
        (behind, (("F", up), ("I", up), ("W", up))),
        (max(0, microbatches - worker - behind), steady),
        (worker, (("I", down), ("I", up))),
        (behind, (("I", down), ("W", down))),
        (microbatches, (("W", up), ("W", down))),
    ]
    order: list[Action] = []
    done: dict[tuple[Kind, int], int] = {}
    for times, block in phases:
        for _ in range(times):
            for kind, stage in block:
                count = done.get((kind, stage), 0)
                if count < microbatches:
                    order.append(Action(kind, stage, count))
                    done[kind, stage] = count + 1
    return tuple(order)
