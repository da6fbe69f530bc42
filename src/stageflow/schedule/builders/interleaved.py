"""Interleaved 1F1B: several stages per worker in a loop, so that a bubble is as short as a smaller stage."""

from __future__ import annotations

from stageflow.errors import InputError
from stageflow.graph import StageGraph
from stageflow.schedule.actions import Action, Kind, Orders
from stageflow.schedule.builders.one_f_one_b import one_f_one_b
from stageflow.schedule.placement import local_stages, loop
from stageflow.schedule.simulate import Costs


def interleaved_1f1b(
    graph: StageGraph,
    placement: tuple[int, ...],
    microbatches: int,
    group: int | None = None,
    costs: Costs | None = None,
) -> Orders:
    """Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2.

    Micro-batches go in groups: a group passes a worker's first stage, then its second, ...; worker d of p warms up
    with 2(p-1-d) + (v-1)N forwards for v stages per worker and groups of N, then one forward and one backward in turn.

        4 stages on 2 workers, 2 micro-batches, B twice F
        0 | 0F0 0F1 2F0 2F1 .   .   2B0 --- .   2B1 --- 0B0 --- 0B1 ---
        1 | .   1F0 1F1 3F0 3B0 --- 3F1 3B1 --- 1B0 --- 1B1 --- .   .

    group: micro-batches per group, at least p, which is the default (Llama 3, 2024, section 3.3.2, has it free);
        bigger groups hide hops at the price of memory. A rest that fills no group would deadlock as a small last
        group: its forwards of the next stage come due before the last worker, busy with backwards, has passed on the
        stage before. So the micro-batches are cut into m // group groups of almost equal size, none smaller than
        ``group``. Fewer than ``group`` are one small group, which is no danger: all its forwards but those of the
        last stage come before any backward.

    For p workers with v stages each (F, B the times of one stage) and m >= p micro-batches: idle time per worker
    (p-1)(F+B); peak on worker d (v-1)N + 2(p-1-d) + 1 activations of a stage, N the largest group, or mv if that is
    less. A placement that is no loop, or that gives some workers more stages than others, is built as 1F1B.
    """
    workers = max(placement) + 1
    if group is not None and group < workers:
        raise InputError(
            f"interleaved_1f1b with group={group} on {workers} workers would deadlock: "
            f"use a group of at least {workers} micro-batches"
        )
    if len(placement) % workers or placement != loop(len(placement), workers):
        return one_f_one_b(graph, placement, microbatches, costs)
    sizes = _group_sizes(microbatches, group or workers)
    orders: list[tuple[Action, ...]] = []
    for worker, stages in enumerate(local_stages(placement)):
        forwards = _grouped("F", stages, sizes)
        backwards = _grouped("B", stages[::-1], sizes)
        warm_up = min(len(forwards), 2 * (workers - 1 - worker) + (len(stages) - 1) * sizes[0])
        order = forwards[:warm_up]
        for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
            order += (forward, backward)
        orders.append((*order, *backwards[len(forwards) - warm_up :]))
    return tuple(orders)


def _group_sizes(microbatches: int, group: int) -> list[int]:
    """As many groups as fit, sizes differing by one at most, the bigger ones first: 10 in groups of 4 gives 5, 5."""
    groups = max(1, microbatches // group)
    each, more = divmod(microbatches, groups)
    return [each + (i < more) for i in range(groups)]


def _grouped(kind: Kind, stages: tuple[int, ...], sizes: list[int]) -> list[Action]:
    """Group after group, each through all stages in the given order before the next group starts."""
    order: list[Action] = []
    first = 0
    for size in sizes:
        order += [Action(kind, stage, m) for stage in stages for m in range(first, first + size)]
        first += size
    return order
