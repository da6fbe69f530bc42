"""Schedules by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stageflow.errors import InputError
from stageflow.graph import StageGraph
from stageflow.schedule.actions import Orders
from stageflow.schedule.builders.forward_only import forward_only
from stageflow.schedule.builders.gpipe import gpipe
from stageflow.schedule.builders.greedy import greedy
from stageflow.schedule.builders.interleaved import interleaved_1f1b
from stageflow.schedule.builders.one_f_one_b import one_f_one_b
from stageflow.schedule.builders.zero_bubble import zb_h1, zb_h2, zb_v
from stageflow.schedule.placement import place
from stageflow.schedule.schedule import Schedule


@dataclass(frozen=True)
class _Family:
    """How a name is built: ``build(graph, placement, microbatches, **options)``.

    options: the names it takes.
    placement: where stages go by default.
    chunks: usual stages per worker.
    """

    build: Callable[..., Orders]
    options: tuple[str, ...] = ()
    placement: str = "contiguous"
    chunks: int = 1


_FAMILIES = {
    "gpipe": _Family(gpipe),
    "1f1b": _Family(one_f_one_b, ("costs",)),
    "interleaved_1f1b": _Family(interleaved_1f1b, ("group", "costs"), placement="loop", chunks=2),
    "zb_h1": _Family(zb_h1, ("memory", "costs")),
    "zb_h2": _Family(zb_h2, ("costs",)),
    "zb_v": _Family(zb_v, ("costs",), placement="fold", chunks=2),
    "greedy": _Family(greedy, ("split", "memory", "costs")),
    "forward_only": _Family(forward_only),
}

SCHEDULES = tuple(_FAMILIES)
"""The names that `build_schedule` knows."""


def build_schedule(
    name: str,
    *,
    stages: int,
    microbatches: int,
    workers: int | None = None,
    placement: str | Sequence[int] | None = None,
    graph: StageGraph | None = None,
    **options: Any,
) -> Schedule:
    """Build a schedule by its name.

    name: one of `SCHEDULES`.
    stages, microbatches: how many, at least one; every combination works.
    workers: default one per stage, or per two stages for interleaved_1f1b and zb_v.
    placement: "contiguous", "loop", "fold", or the worker of each stage; default what suits the schedule.
    graph: which stage feeds which; default a chain.
    options: what the schedule's own builder takes: ``costs`` (a `Costs`, for placements without a closed pattern),
        ``memory`` (zb_h1, greedy), ``group`` (interleaved_1f1b), ``split`` (greedy).

    Raises InputError, naming what would work, for an unknown name or impossible counts.
    """
    family = _FAMILIES.get(name)
    if family is None:
        raise InputError(f"unknown schedule {name!r}; known: {', '.join(SCHEDULES)}")
    for word, count in (("stages", stages), ("microbatches", microbatches)):
        if count < 1:
            raise InputError(f"schedule {name!r} needs {word} >= 1, got {count}")
    unknown = sorted(set(options) - set(family.options))
    if unknown:
        takes = ", ".join(family.options) or "none"
        raise InputError(f"schedule {name!r} has no option {unknown[0]!r}; its options: {takes}")
    graph = graph or StageGraph.chain(stages)
    if graph.n_stages != stages:
        raise InputError(f"schedule {name!r}: the graph has {graph.n_stages} stages, but stages={stages}")
    if workers is None:
        if placement is None or isinstance(placement, str):
            workers = -(-stages // family.chunks)
        else:
            workers = max(placement, default=0) + 1
    placed = place(family.placement if placement is None else placement, stages, workers)
    return Schedule(name, graph, placed, microbatches, family.build(graph, placed, microbatches, **options))
