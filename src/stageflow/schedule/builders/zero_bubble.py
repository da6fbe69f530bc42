"""Zero bubble: the backward is split, and gradients of weights wait until a worker would idle."""

from __future__ import annotations

from stageflow.graph import StageGraph
from stageflow.schedule.actions import Action
from stageflow.schedule.builders.common import Orders, is_contiguous, through
from stageflow.schedule.builders.greedy import greedy
from stageflow.schedule.placement import local_stages


def zb_h1(graph: StageGraph, placement: tuple[int, ...], microbatches: int) -> Orders:
    """Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2.1, ZB-H1.

    1F1B with I in the place of B; worker d of p lets d of its W wait, so that all workers keep p activations at most.

    For p workers with one stage each and m >= p micro-batches: idle time (p-1)(F+I-W); peak p activations.
    Neighbouring stages on one worker act as one bigger stage. For any other placement the order is found by `greedy`
    with at most n activations of each of the n stages.
    """
    if not is_contiguous(placement):
        return greedy(graph, placement, microbatches, split=True, in_flight=[len(placement)] * len(placement))
    workers = max(placement) + 1
    orders = []
    for worker, stages in enumerate(local_stages(placement)):
        orders.append(_filled(stages, microbatches, warm_up=workers - 1 - worker, waiting=worker))
    return tuple(orders)


def _filled(stages: tuple[int, ...], microbatches: int, warm_up: int, waiting: int) -> tuple[Action, ...]:
    """Warm up, then F and I in turn; from ``waiting`` put-off W on, and once forwards have ended, a W after each I."""
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
