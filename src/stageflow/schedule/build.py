"""Schedules by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, cast

from stageflow.errors import InputError
from stageflow.graph import StageGraph
from stageflow.schedule.costs import Costs
from stageflow.schedule.families import FAMILIES, Family
from stageflow.schedule.placement import place
from stageflow.schedule.schedule import Schedule

SCHEDULES = tuple(name for name, family in FAMILIES.items() if family.runs)
"""The names of schedules that workers can run."""

SIMULATED = tuple(name for name, family in FAMILIES.items() if not family.runs)
"""The names that `build_schedule` knows besides: they can be drawn and simulated, but not run."""


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

    name: of `SCHEDULES`: gpipe, 1f1b, eager_1f1b, interleaved_1f1b, looped_bfs, zb_h1, zb_h2, interleaved_zb, zb_v,
        v_half, v_min, dualpipe_v; greedy, which finds orders for any placement; forward_only. Or of `SIMULATED`:
        dualpipe, chimera, pipedream_2bw, which can be drawn and simulated, but not run, see `Schedule.refusal`.
    stages, microbatches: how many, at least one. Every combination works but for v_half, v_min and dualpipe_v (two
        stages per worker; dualpipe_v: m >= stages), dualpipe and chimera (both even; dualpipe: m >= 2 stages), and
        pipedream_2bw (m >= workers).
    workers: default one per stage, or per two stages for schedules with two stages per worker.
    placement: "contiguous", "loop", "fold", or the worker of each stage; default what suits the schedule.
    graph: which stage feeds which; default a chain.
    options: what the schedule's own builder takes: ``costs`` (a `Costs`, where the order depends on times: placements
        without a closed pattern, and zb_v), ``memory`` (zb_h1, greedy), ``group`` (interleaved_1f1b, interleaved_zb),
        ``split`` (greedy), ``steps`` (pipedream_2bw: how many in a row).

    dualpipe and chimera hold the model twice: their schedules have 2 x stages stages, those of the second copy last,
    and half of the micro-batches go through each copy.

    Raises InputError, naming what would work, for an unknown name or impossible counts.
    """
    family = FAMILIES.get(name)
    if family is None:
        raise InputError(f"unknown schedule {name!r}; known: {', '.join(FAMILIES)}")
    for word, count in (("stages", stages), ("microbatches", microbatches)):
        if not _is_whole(count) or count < 1:
            raise InputError(f"schedule {name!r} needs a whole number of {word} >= 1, got {count!r}")
    if workers is not None and (not _is_whole(workers) or workers < 1):
        raise InputError(f"schedule {name!r} needs a whole number of workers >= 1, or None, got {workers!r}")
    if not (placement is None or isinstance(placement, str) or all(map(_is_whole, placement))):
        raise InputError(f"placement must be a name or one worker number per stage, got {placement!r}")
    _check_graph(graph, stages)
    unknown = sorted(set(options) - set(family.options))
    if unknown:
        takes = ", ".join(family.options) or "none"
        raise InputError(f"schedule {name!r} has no option {unknown[0]!r}; its options: {takes}")
    for option, value in options.items():
        fits, expected = _OPTIONS[option]
        if value is not None and not fits(value):
            raise InputError(f"option {option!r} of schedule {name!r} must be {expected}, got {value!r}")
    graph = graph or StageGraph.chain(stages)
    if graph.n_stages != stages:
        raise InputError(f"schedule {name!r}: the graph has {graph.n_stages} stages, but stages={stages}")
    if workers is None:
        if placement is None or isinstance(placement, str):
            workers = -(-stages // family.chunks)
        else:
            workers = max(placement, default=0) + 1
    placed = place(family.placement if placement is None else placement, stages, workers)
    if family.copies == 2:
        return _two_way(name, family, graph, placed, microbatches)
    orders = family.build(graph, placed, microbatches, **options)
    return Schedule(name, graph, placed, microbatches * options.get("steps", 1), orders, versions=family.versions)


def _check_graph(graph: object, stages: int) -> None:
    if graph is not None and not isinstance(graph, StageGraph):
        raise InputError(f"graph must be a StageGraph, such as StageGraph.chain({stages}), got {graph!r}")


def _is_whole(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral)


def _is_memory(value: object) -> bool:
    return _is_whole(value) or (isinstance(value, list | tuple) and all(map(_is_whole, cast(Sequence[object], value))))


# what each option takes, and how an error says so
_OPTIONS: dict[str, tuple[Callable[[object], bool], str]] = {
    "costs": (lambda value: isinstance(value, Costs), "a Costs"),
    "split": (lambda value: isinstance(value, bool), "True or False"),
    "memory": (_is_memory, "a whole number of activations, or one per worker"),
    "group": (_is_whole, "a whole number of micro-batches"),
    "steps": (_is_whole, "a whole number"),
}


def _two_way(name: str, family: Family, graph: StageGraph, placed: tuple[int, ...], microbatches: int) -> Schedule:
    """The second copy lies the other way round on the same workers, and takes every second micro-batch."""
    stages = graph.n_stages
    if placed != tuple(range(stages)):
        raise InputError(
            f"schedule {name!r} has one stage of each copy per worker: leave out workers and placement, or give "
            f"workers={stages} for {stages} stages"
        )
    if microbatches % 2:
        raise InputError(
            f"schedule {name!r} sends half of the micro-batches each way, got {microbatches}: "
            f"{microbatches + 1} would work"
        )
    edges = frozenset(
        (producer + first, consumer + first) for producer, consumer in graph.edges for first in (0, stages)
    )
    both, placed = StageGraph(2 * stages, edges), (*placed, *reversed(placed))
    half = microbatches // 2
    return Schedule(name, both, placed, half, family.build(both, placed, half), copies=2)
