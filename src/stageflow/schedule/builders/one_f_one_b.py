"""1F1B: one forward, one backward."""

from __future__ import annotations

from collections.abc import Callable

from stageflow.graph import StageGraph
from stageflow.schedule.actions import Orders
from stageflow.schedule.builders.common import alternate, is_contiguous, memory_1f1b, through
from stageflow.schedule.builders.greedy import greedy
from stageflow.schedule.costs import Costs
from stageflow.schedule.placement import local_stages


def one_f_one_b(graph: StageGraph, placement: tuple[int, ...], microbatches: int, costs: Costs | None = None) -> Orders:
    """Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training", section 3 (PipeDream-Flush).

    Worker d of p warms up with p-1-d forwards, then does a forward and a backward in turn, then the last backwards.

        3 stages, 4 micro-batches, B twice F
        0 | F0 F1 F2 .  .  .  .  B0 -- F3 B1 -- .  B2 -- .  B3 --
        1 | .  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 -- .  .
        2 | .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .  .  .  .

    For p workers with one stage each and m micro-batches: idle time per worker (p-1)(F+B); peak min(m, p-d)
    activations. With hops of c and m a multiple of p the span is (m+p-1)(F+B) + c(2(p-1)m/p + 2(p-2)) while c is
    small (Qi et al. 2024). Neighbouring stages on one worker act as one bigger stage. For any other placement
    `greedy` finds an order, for the given costs, with at most n-s activations for each local stage s of n.
    """
    if not is_contiguous(placement):
        return greedy(graph, placement, microbatches, split=False, costs=costs)
    return _in_turn(placement, microbatches, lambda behind: behind)


def eager_1f1b(graph: StageGraph, placement: tuple[int, ...], microbatches: int, costs: Costs | None = None) -> Orders:
    """Zhuang et al. 2023, "On Optimizing the Communication of Model Parallelism", section 4 (in Alpa: overlap
    friendly 1F1B): 1F1B with twice the forwards ahead, so that values cross while workers work.

    Worker d of p warms up with 2(p-1-d) forwards.

        3 stages, 4 micro-batches, B twice F
        0 | F0 F1 F2 F3 .  .  .  B0 -- .  B1 -- .  B2 -- .  B3 --
        1 | .  F0 F1 F2 .  B0 -- F3 B1 -- .  B2 -- .  B3 -- .  .
        2 | .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .  .  .  .

    For p workers with one stage each and m micro-batches: idle time per worker (p-1)(F+B); peak
    min(m, 2(p-1-d)+1) activations. With hops of c no longer than F or B, and m >= 2p, the step takes
    m(F+B) + (p-1)(F+B+2c): each hop is paid once, however many micro-batches there are. Other placements as in
    `one_f_one_b`, with 2(n-1-s)+1 activations for each local stage s of n.
    """
    if not is_contiguous(placement):
        workers = max(placement) + 1
        counts = [placement.count(worker) for worker in range(workers)]
        memory = [2 * kept - count for kept, count in zip(memory_1f1b(placement), counts, strict=True)]
        return greedy(graph, placement, microbatches, split=False, memory=memory, costs=costs)
    return _in_turn(placement, microbatches, lambda behind: 2 * behind)


def _in_turn(placement: tuple[int, ...], microbatches: int, warm_up: Callable[[int], int]) -> Orders:
    """warm_up: how many forwards for so many workers behind this one."""
    workers = max(placement) + 1
    return tuple(
        alternate(
            [through("F", stages, m) for m in range(microbatches)],
            [through("B", stages, m) for m in range(microbatches)],
            warm_up(workers - 1 - worker),
        )
        for worker, stages in enumerate(local_stages(placement))
    )
