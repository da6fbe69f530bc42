"""Two ways through the pipeline at once: DualPipe, its V form with one copy of the weights, and Chimera."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import cast

from stageflow.errors import InputError
from stageflow.graph import StageGraph
from stageflow.schedule.actions import Action, Kind, Orders
from stageflow.schedule.builders.common import require_v


def dualpipe(graph: StageGraph, placement: tuple[int, ...], microbatches: int) -> Orders:
    """DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.2.1; orders as in their public implementation.

    The model is there twice: worker d of p has stage d of the first copy and stage p-1-d of the second. Half of the
    micro-batches go down through the first copy while the other half go up through the second, so the worker in the
    middle is the one that starts last. Each worker goes through the eight steps of `dualpipe_v`; the two middle
    workers are its last.

        2 stages, 8 micro-batches, F = I = W; stages 2 and 3 are the second copy
        0 | 0F0 3F0 0F1 3B0 --- 3F1 0B0 --- 0F2 3B1 --- 3F2 0B1 --- 0F3 3B2 --- 3F3 0B2 --- 3B3 --- 0I3 0W3
        1 | 2F0 1F0 2F1 1B0 --- 1F1 2B0 --- 2F2 1B1 --- 1F2 2B1 --- 2F3 1B2 --- 1F3 2B2 --- 1B3 --- 2I3 2W3

    graph, placement: of both copies, stages 0..p-1 and p..2p-1.
    microbatches: per copy, at least p.

    For p workers, m micro-batches in all and W <= I <= F <= I+W: idle time (p/2-1)(F+I-W); peak p+1 activations of a
    stage next to twice the weights. The report gives (p/2-1)(F&B + B - 3W), with B = I+W and F&B the time of a forward
    and a backward that overlap and end together. Here a forward's values are sent before the backward next to it has
    ended, so less idle time is left than with F&B = F+B.

    Raises InputError for an odd number of stages or too few micro-batches.
    """
    stages = graph.n_stages // 2
    if stages % 2:
        raise InputError(f"dualpipe needs an even number of stages, got {stages}: {stages + 1} would work")
    _enough("dualpipe", 2 * microbatches, 2 * stages)
    orders: list[tuple[Action, ...]] = []
    for worker in range(stages):
        from_end = min(worker, stages - 1 - worker)
        first, second = worker, 2 * stages - 1 - worker  # its stage of either copy
        ways = (first, second) if worker == from_end else (second, first)
        orders.append(_eight_steps(stages // 2, from_end, microbatches, ways))
    return tuple(orders)


def dualpipe_v(graph: StageGraph, placement: tuple[int, ...], microbatches: int) -> Orders:
    """Sea AI Lab 2025, "DualPipe could be better without the Dual" (cut-in-half DualPipe), in DeepSeek's public
    DualPipe as DualPipeV: half of `dualpipe` folded into a V, so that one copy of the weights is enough.

    Worker d of p has b = p-1-d workers behind it. With 0 and 1 for its stage on the way down and up it does
    2b times F0; d+1 times F0 F1; b times I1 W1 F1; m-2p+d+1 times F0 B1 F1 B0; b times B1 F1 B0; d+1 times B1 B0, the
    second half of them as I only; b times W I0; and the Ws left.

        4 stages on 2 workers, 4 micro-batches, F = I = W
        0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 --- 3F2 0B0 --- 3B2 --- 3F3 .   0B1 --- 3B3 --- 0I2 0W2 0I3 0W3
        1 | .   1F0 2F0 1F1 2F1 1F2 2B0 --- 2F2 1B0 --- 1F3 2B1 --- 2F3 1B1 --- 2B2 --- 1B2 --- 2I3 1I3 2W3 1W3

    For p workers, m >= 2p micro-batches and W <= I <= F <= I+W: idle time (p-1)(F+I-W); peak 2p+1 activations of a
    stage, each half of what a stage of 1F1B keeps. (The authors' formula has the time of a forward and a backward that
    overlap and end together; these follow each other here.)

    Raises InputError unless the placement is a V, and for too few micro-batches.
    """
    workers = require_v("dualpipe_v", placement)
    _enough("dualpipe_v", microbatches, 2 * workers)
    return tuple(
        _eight_steps(workers, worker, microbatches, (worker, 2 * workers - 1 - worker)) for worker in range(workers)
    )


def chimera(graph: StageGraph, placement: tuple[int, ...], microbatches: int) -> Orders:
    """Li and Hoefler 2021, "Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional Pipelines",
    section 3: two 1F1B pipelines in opposite directions, each in the gaps of the other.

    The model is there twice, placed as for `dualpipe`. In units of p micro-batches, half of them each way, stage s of
    either copy starts the forward of the way's i-th micro-batch at s+2i and its backward at 2p-1-s+2i, in times of one
    action; units follow each other after 2p.

        4 stages, 4 micro-batches, F = B = 2 units; stages 4 to 7 are the second copy
        0 | 0F0 --- 0F1 --- .   .   7F0 --- 7B0 --- 7F1 --- 7B1 --- 0B0 --- .   .   0B1 ---
        1 | .   .   1F0 --- 6F0 --- 1F1 --- 6F1 --- 6B0 --- 1B0 --- 6B1 --- 1B1 --- .   .
        2 | .   .   5F0 --- 2F0 --- 5F1 --- 2F1 --- 2B0 --- 5B0 --- 2B1 --- 5B1 --- .   .
        3 | 4F0 --- 4F1 --- .   .   3F0 --- 3B0 --- 3F1 --- 3B1 --- 4B0 --- .   .   4B1 ---

    graph, placement: of both copies, stages 0..p-1 and p..2p-1.
    microbatches: per copy.

    For p workers, m micro-batches in all, a multiple of p, and B = F: idle time (p-2)F, a share of (p-2)/(2m+p-2);
    peak p/2+1 activations of a stage on the outer workers to p on the middle ones, next to twice the weights. With
    longer backwards units no longer fit into each other without gaps, and the idle time grows with their number.

    Raises InputError for an odd number of stages.
    """
    stages = graph.n_stages // 2
    if stages % 2:
        raise InputError(f"chimera needs an even number of stages, got {stages}: {stages + 1} would work")
    orders: list[tuple[Action, ...]] = []
    for worker in range(stages):
        at: dict[int, Action] = {}
        for first, stage in ((0, worker), (stages, stages - 1 - worker)):
            for microbatch in range(microbatches):
                unit, i = divmod(microbatch, stages // 2)
                start = 2 * stages * unit + 2 * i
                at[start + stage] = Action("F", first + stage, microbatch)
                at[start + 2 * stages - 1 - stage] = Action("B", first + stage, microbatch)
        orders.append(tuple(at[time] for time in sorted(at)))
    return tuple(orders)


def _enough(name: str, microbatches: int, least: int) -> None:
    if microbatches < least:
        raise InputError(
            f"{name} needs at least {least} micro-batches to fill both ways, got {microbatches}: {least} or more would "
            "work"
        )


def _eight_steps(workers: int, worker: int, microbatches: int, stages: Sequence[int]) -> tuple[Action, ...]:
    """One worker's order, see `dualpipe_v`. workers: on the way from the end to the middle."""
    behind = workers - 1 - worker
    recipe = "F0 " * (2 * behind)
    recipe += "F0 F1 " * (worker + 1)
    recipe += "I1 W F1 " * behind
    recipe += "F0 B1 F1 B0 " * (microbatches - 2 * workers + worker + 1)
    recipe += "B1 F1 B0 " * behind
    last = ["1", "0"] * (worker + 1)
    recipe += "".join(f"B{way} " for way in last[: worker + 1]) + "".join(f"I{way} " for way in last[worker + 1 :])
    recipe += "W I0 " * behind
    return _number(recipe.split(), stages)


def _number(recipe: Sequence[str], stages: Sequence[int]) -> tuple[Action, ...]:
    """Give each step its micro-batch, in turn per stage and kind; a W is the oldest one put off, and all come."""
    order: list[Action] = []
    forwards, backwards = [0, 0], [0, 0]
    weights: deque[Action] = deque()
    for step in recipe:
        if step == "W":
            order.append(weights.popleft())
            continue
        kind, way = cast(Kind, step[0]), int(step[1])
        count = forwards if kind == "F" else backwards
        action = Action(kind, stages[way], count[way])
        count[way] += 1
        order.append(action)
        if kind == "I":
            weights.append(Action("W", action.stage, action.microbatch))
    return (*order, *weights)
