"""Interleaved: several stages per worker in a loop, so that a bubble is as short as a smaller stage."""

from __future__ import annotations

from collections.abc import Sequence

from stageflow.errors import InputError
from stageflow.graph import StageGraph
from stageflow.schedule.actions import Action, Kind, Orders
from stageflow.schedule.builders.common import SPLIT, alternate
from stageflow.schedule.builders.one_f_one_b import one_f_one_b
from stageflow.schedule.builders.zero_bubble import zb_h1
from stageflow.schedule.costs import Costs
from stageflow.schedule.placement import local_stages, loop


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
    less. With groups of p, m a multiple of p and short hops of c there are c(2pv-2) more: the round trip of one
    micro-batch. The zero-bubble authors' scheduler counts p hops less for v > 1, as it has only the first micro-batch
    of a group wait on its way from the last worker to the first; no run can do that.
    A placement that is no loop, or that gives some workers more stages than others, is built as 1F1B.
    """
    sizes = _group_sizes("interleaved_1f1b", placement, microbatches, group)
    if not _is_loop(placement):
        return one_f_one_b(graph, placement, microbatches, costs)
    workers = max(placement) + 1
    return tuple(
        alternate(
            _grouped("F", stages, sizes),
            _grouped("B", stages[::-1], sizes),
            2 * (workers - 1 - worker) + (len(stages) - 1) * sizes[0],
        )
        for worker, stages in enumerate(local_stages(placement))
    )


def interleaved_zb(
    graph: StageGraph,
    placement: tuple[int, ...],
    microbatches: int,
    group: int | None = None,
    costs: Costs | None = None,
) -> Orders:
    """Interleaved 1F1B with split backwards, as ``ScheduleInterleavedZeroBubble`` of torch.distributed.pipelining has
    it: ZB-H1 of Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2.1, with several stages per worker.

    Worker d of p warms up with p-1-d + (v-1)N forwards and keeps d of its W waiting.

        4 stages on 2 workers, 2 micro-batches, F = I = W
        0 | 0F0 0F1 2F0 2F1 .   2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
        1 | .   1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1

    group: as in `interleaved_1f1b`.

    For p workers with v stages each (F, I, W the times of one stage), W <= F, m a multiple of p and groups of p:
    span = mv(F+I+W) + (p-1)(F+I-W); peak (v-1)N + p activations of a stage, N the largest group. A placement that is
    no loop, or that gives some workers more stages than others, is built as in `zb_h1`.
    """
    sizes = _group_sizes("interleaved_zb", placement, microbatches, group)
    if not _is_loop(placement):
        return zb_h1(graph, placement, microbatches, costs=costs)
    workers = max(placement) + 1
    orders: list[tuple[Action, ...]] = []
    for worker, stages in enumerate(local_stages(placement)):
        forwards, inputs, weights = (_grouped(kind, stages if kind == "F" else stages[::-1], sizes) for kind in SPLIT)
        warm_up = workers - 1 - worker + (len(stages) - 1) * sizes[0]
        orders.append(alternate(forwards, inputs, warm_up, weights, waiting=worker))
    return tuple(orders)


def _is_loop(placement: tuple[int, ...]) -> bool:
    """Whether stages go round and round, equally many on every worker."""
    workers = max(placement) + 1
    return len(placement) % workers == 0 and placement == loop(len(placement), workers)


def _group_sizes(name: str, placement: tuple[int, ...], microbatches: int, group: int | None) -> list[int]:
    """As many groups as fit, sizes differing by one at most, the bigger ones first: 10 in groups of 4 gives 5, 5."""
    workers = max(placement) + 1
    if group is not None and group < workers:
        raise InputError(
            f"{name} with group={group} on {workers} workers would deadlock: "
            f"use a group of at least {workers} micro-batches"
        )
    groups = max(1, microbatches // (group or workers))
    each, more = divmod(microbatches, groups)
    return [each + (i < more) for i in range(groups)]


def _grouped(kind: Kind, stages: tuple[int, ...], sizes: Sequence[int]) -> list[tuple[Action]]:
    """Group after group, each through all stages in the given order before the next group starts."""
    order: list[tuple[Action]] = []
    first = 0
    for size in sizes:
        order += [(Action(kind, stage, m),) for stage in stages for m in range(first, first + size)]
        first += size
    return order
