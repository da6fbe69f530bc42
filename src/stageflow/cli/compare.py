"""Every named schedule with the same model, workers and times, in one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from stageflow.cli.costs import Sizes, costs_words
from stageflow.errors import InputError

if TYPE_CHECKING:
    from stageflow.plan.bounds import Bound
    from stageflow.schedule import Costs, Schedule, Simulation
    from stageflow.schedule.costs import PerStage

ALL = "all"
"""What to ask for instead of one schedule's name."""


@dataclass(frozen=True)
class Row:
    """One schedule and what it takes. bound: None where the bounds don't apply."""

    schedule: Schedule
    simulation: Simulation
    peaks: tuple[float, ...]
    fits: bool
    bound: Bound | None

    @property
    def gap(self) -> float | None:
        """How much longer than the bound it takes, as a share."""
        return self.simulation.makespan / self.bound.seconds - 1 if self.bound and self.bound.seconds else None


@dataclass(frozen=True)
class Comparison:
    """All of them, the fastest first; and why the others can't be built for these counts."""

    workers: int
    microbatches: int
    costs: Costs
    sizes: Sizes
    rows: tuple[Row, ...]
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def best(self) -> Row | None:
        """The fastest that workers can run and that fits."""
        return next((row for row in self.rows if row.fits and row.schedule.refusal is None), None)

    def figures(self) -> dict[str, Any]:
        """As plain values."""
        rows = [
            {
                "schedule": row.schedule.name,
                "stages": row.schedule.n_stages,
                "runs": row.schedule.refusal is None,
                "makespan": row.simulation.makespan,
                "span": row.simulation.span,
                "bubble": row.simulation.bubble,
                "peak_memory": max(row.peaks),
                "fits": row.fits,
                "bound": row.bound and row.bound.seconds,
            }
            for row in self.rows
        ]
        best = self.best
        counts = {"workers": self.workers, "microbatches": self.microbatches}
        return {**counts, "schedules": rows, "best": best and best.schedule.name, "refused": self.refused}

    def __str__(self) -> str:
        from stageflow.plan.words import table

        lines: list[tuple[str, ...]] = [("schedule", "stages", "step", "span", "bubble", "most memory", "above bound")]
        for row in self.rows:
            refusal, gap = row.schedule.refusal, row.gap
            lines.append(
                (
                    row.schedule.name + (" *" if refusal else ""),
                    str(row.schedule.n_stages),
                    f"{row.simulation.makespan:g}",
                    f"{row.simulation.span:g}",
                    f"{row.simulation.bubble:.1%}",
                    self.sizes.words(max(row.peaks)) + ("" if row.fits else " over"),
                    "" if gap is None else f"{max(gap, 0.0):.1%}",
                )
            )
        text = [f"{self.workers} workers, {self.microbatches} micro-batches", costs_words(self.costs), ""]
        text += [*table(lines, 1), ""]
        if any(row.schedule.refusal for row in self.rows):
            text.append("* can be simulated, not run: several copies or versions of the weights")
        text += [f"{name}: {reason}" for name, reason in self.refused.items()]
        within = "" if self.sizes.memory is None else f" within {self.sizes.words(self.sizes.memory)}"
        text.append(f"fastest{within}: {self.best.schedule.name}" if self.best else f"none fits{within}")
        return "\n".join(text)


def compare(stages: int, microbatches: int, workers: int, costs: Costs, sizes: Sizes) -> Comparison:
    """Build and simulate every named schedule that trains.

    stages, costs, sizes: the model's, made for each other. A schedule with several stages on each worker gets it cut
        finer, each stage into equal parts, so that all of them do the same work.
    """
    from stageflow.schedule import SCHEDULES, SIMULATED

    rows: list[Row] = []
    refused: dict[str, str] = {}
    for name in (*SCHEDULES, *SIMULATED):
        if name == "forward_only":
            continue
        try:
            rows.append(_row(name, stages, microbatches, workers, costs, sizes))
        except InputError as error:
            refused[name] = str(error)
    rows.sort(key=lambda row: (row.simulation.makespan, max(row.peaks)))
    return Comparison(workers, microbatches, costs, sizes, tuple(rows), refused)


def build(
    name: str, stages: int, microbatches: int, workers: int | None, costs: Costs, sizes: Sizes
) -> tuple[Schedule, Costs, Sizes]:
    """A schedule by name, made for these costs and within this memory as far as its builder heeds them.

    costs, sizes: made for ``stages`` stages. With the schedule come costs and sizes of its own stages: some schedules
        have those of the model twice.
    """
    from stageflow.schedule import build_schedule
    from stageflow.schedule.families import FAMILIES
    from stageflow.schedule.placement import place

    family = FAMILIES.get(name)
    if family is None:
        return build_schedule(name, stages=stages, microbatches=microbatches), costs, sizes
    options: dict[str, Any] = {}
    if "costs" in family.options:
        options["costs"] = costs
    if "memory" in family.options and sizes.memory is not None:
        held = -(-stages // family.chunks) if workers is None else workers
        options["memory"] = _room(sizes, place(family.placement, stages, held))
    schedule = build_schedule(name, stages=stages, microbatches=microbatches, workers=workers, **options)
    return schedule, *_cut(costs, sizes, stages, 1, family.copies)


def bound_of(schedule: Schedule, costs: Costs, sizes: Sizes) -> Bound | None:
    """What any schedule on its placement takes at least, and within the memory if this one is.

    None where the bounds don't apply: for several copies or versions of the weights, and for forwards only.
    """
    from stageflow.plan.bounds import lower_bound
    from stageflow.schedule import peak_memory

    if schedule.refusal is not None or not schedule.has_backward:
        return None
    within: dict[str, Any] = {}
    if sizes.memory is not None and sizes.fits(peak_memory(schedule, sizes.footprint)):
        within = {"footprint": sizes.footprint, "memory": sizes.memory}
    return lower_bound(costs, schedule.placement, schedule.microbatches, graph=schedule.graph, **within)


def _row(name: str, stages: int, microbatches: int, workers: int, costs: Costs, sizes: Sizes) -> Row:
    from stageflow.schedule import peak_memory
    from stageflow.schedule.families import FAMILIES

    parts, rest = divmod(FAMILIES[name].chunks * workers, stages)
    parts = parts if not rest and parts > 1 else 1
    costs, sizes = _cut(costs, sizes, stages, parts, 1)
    schedule, costs, sizes = build(name, stages * parts, microbatches, workers, costs, sizes)
    peaks = peak_memory(schedule, sizes.footprint)
    return Row(schedule, schedule.simulate(costs), peaks, sizes.fits(peaks), bound_of(schedule, costs, sizes))


def _cut(costs: Costs, sizes: Sizes, stages: int, parts: int, copies: int) -> tuple[Costs, Sizes]:
    """Costs and sizes of stages as those of stages cut into equal parts, once for each copy of the model."""

    def cut(given: PerStage) -> PerStage:
        if not isinstance(given, Sequence):
            return given / parts
        return [given[stage] / parts for _ in range(copies) for stage in range(stages) for _ in range(parts)]

    names = ("forward", "backward_input", "backward_weight", "recompute", "reduction")
    if costs.backward is not None:
        names = (*names, "backward")
    footprint = sizes.footprint
    kept = ("static", "activation") if footprint.deferred is None else ("static", "activation", "deferred")
    return (
        replace(costs, **{name: cut(getattr(costs, name)) for name in names}),
        replace(
            sizes, footprint=replace(sizes.footprint, **{name: cut(getattr(sizes.footprint, name)) for name in kept})
        ),
    )


def _room(sizes: Sizes, placement: tuple[int, ...]) -> int:
    """How many activations of a stage every worker has room for, beside what is static."""
    from stageflow.schedule.costs import at_stage
    from stageflow.schedule.memory import static_memory

    assert sizes.memory is not None
    each = max(at_stage(sizes.footprint.activation, stage) for stage in range(len(placement)))
    static = max(static_memory(sizes.footprint, placement, max(placement) + 1))
    return max(0, int((sizes.memory - static) / each + 1e-9)) if each else 2**31
