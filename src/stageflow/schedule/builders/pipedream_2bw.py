"""PipeDream-2BW: 1F1B that is never flushed, with two versions of the weights."""

from __future__ import annotations

from stageflow.errors import InputError
from stageflow.graph import StageGraph
from stageflow.schedule.actions import Orders
from stageflow.schedule.builders.one_f_one_b import one_f_one_b


def pipedream_2bw(graph: StageGraph, placement: tuple[int, ...], microbatches: int, steps: int = 1) -> Orders:
    """Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training", section 3.1 (PipeDream-2BW).

    The order of `one_f_one_b` goes on through all steps: forwards of a step start before the backwards of the one
    before have ended. So that the two halves of a micro-batch see the same weights, each stage keeps two versions, and
    a step's gradients are taken one version late. With at least p micro-batches per step no third version is needed.

        3 stages, 3 micro-batches per step, 2 steps, B twice F
        0 | F0 F1 F2 .  .  .  .  B0 -- F3 B1 -- F4 B2 -- F5 B3 -- .  B4 -- .  B5 --
        1 | .  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- F4 B3 -- F5 B4 -- .  B5 -- .  .
        2 | .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- F4 B4 -- F5 B5 -- .  .  .  .

    microbatches: per step, at least p for p workers; micro-batch i belongs to step i // microbatches.
    steps: how many in a row.

    For p workers with one stage each: idle time (p-1)(F+B) once, so (p-1)(F+B)/steps per step; peak p-d activations
    next to twice the weights.

    Raises InputError for fewer micro-batches per step than workers.
    """
    workers = max(placement) + 1
    if microbatches < workers:
        raise InputError(
            f"pipedream_2bw with {microbatches} micro-batches per step on {workers} workers would need more than two "
            f"versions of the weights: {workers} or more micro-batches would work"
        )
    if steps < 1:
        raise InputError(f"pipedream_2bw needs steps >= 1, got {steps}")
    return one_f_one_b(graph, placement, microbatches * steps)
