"""What can be seen of a pipeline: its stages in words, and its last step in figures and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from stageflow.observe.chrome import write_chrome_trace
from stageflow.observe.events import COMPUTE_KINDS, Event
from stageflow.observe.metrics import Summary, summarize
from stageflow.observe.timeline import render_html, render_text
from stageflow.runtime.command import StepReport
from stageflow.schedule import Costs, Schedule, Simulation
from stageflow.split import Split


@dataclass
class StepView:
    """One train_step, seen from outside.

    events: of all workers.
    """

    schedule: Schedule
    reports: Sequence[StepReport]
    events: Sequence[Event] = ()

    @property
    def measured(self) -> Summary:
        """Span, bubble, busy and idle seconds per worker, as they were."""
        return summarize(self._compute_and_waits(), self.schedule.n_workers)

    @property
    def predicted(self) -> Summary:
        """The same, as the schedule gives them for the mean time that each stage's actions took."""
        return summarize(self.simulation.events(), self.schedule.n_workers)

    @property
    def simulation(self) -> Simulation:
        """The schedule simulated with the mean time that each stage's actions took in this step."""
        times: dict[tuple[str, int], list[float]] = {}
        for event in self.events:
            if event.kind in COMPUTE_KINDS:
                times.setdefault((event.kind, event.stage), []).append(event.duration)

        def of(kind: str) -> list[float]:
            return [mean(times.get((kind, stage), [0.0])) for stage in range(self.schedule.n_stages)]

        return self.schedule.simulate(Costs(of("F"), of("I"), of("W"), of("B")))

    @property
    def peak_in_flight(self) -> list[int]:
        """Per worker, the most micro-batches whose activations it kept at once."""
        return [report.peak_in_flight for report in self.reports]

    @property
    def grad_norm(self) -> float | None:
        """Norm of the gradient over all stages before clipping; None without max_grad_norm."""
        return self.reports[0].grad_norm

    @property
    def learning_rates(self) -> list[float]:
        """Of every parameter group of every stage, as used in this step."""
        return [rate for report in self.reports for rate in report.learning_rates]

    def write_html(self, path: str | Path) -> None:
        """One page that needs no network: a lane per worker, measured over predicted."""
        page = render_html(
            self._compute_and_waits(),
            title=self._title(),
            workers=self.schedule.n_workers,
            predicted=self.simulation.events(),
        )
        Path(path).write_text(page, encoding="utf-8")

    def write_trace(self, path: str | Path) -> None:
        """A trace for ui.perfetto.dev or chrome://tracing."""
        write_chrome_trace(path, self.events, name=self._title(), edges=self.schedule.graph.edges)

    def __str__(self) -> str:
        return render_text(self._compute_and_waits(), workers=self.schedule.n_workers)

    def _compute_and_waits(self) -> list[Event]:
        return [event for event in self.events if event.kind != "update"]

    def _title(self) -> str:
        schedule = self.schedule
        return (
            f"{schedule.name}: {schedule.n_stages} stages, {schedule.n_workers} workers, "
            f"{schedule.microbatches} micro-batches"
        )


def expected_bubble(schedule: Schedule, forward: Sequence[float]) -> float:
    """The bubble for stages whose F takes so long, I and W each the same again, with nothing lost in transfers."""
    simulation = schedule.simulate(Costs(list(forward), list(forward), list(forward)))
    return summarize(simulation.events(), schedule.n_workers).bubble


def describe(name: str, schedule: Schedule, split: Split | None) -> str:
    """Stages, owners, parameters, memory, schedule and expected bubble of a pipeline, as a table."""
    lines = [name]
    if split is not None:
        costs = split.costs()
        lines.append(split.describe())
        for worker in range(schedule.n_workers):
            stages = schedule.stages_of(worker)
            held = {name for stage in stages for name in (*split.parameter_names(stage), *split.mirrored_names(stage))}
            size = sum(split.tensors[name].nbytes for name in held)
            lines.append(f"worker {worker}: stage {', '.join(map(str, stages))}; parameters {_size(size)}")
    else:
        costs = [1.0] * schedule.n_stages
        lines.append("not split yet: that happens with the first batch, or with example= inputs")
    peaks = schedule.validate().peak_activations
    bubble = expected_bubble(schedule, costs if sum(costs) else [1.0] * schedule.n_stages)
    lines.append(
        f"schedule {schedule.name}: {schedule.microbatches} micro-batches, expected bubble {bubble:.1%}, at most "
        f"{max(peaks)} activations kept on a worker"
    )
    return "\n".join(lines)


def _size(count: int) -> str:
    """Bytes as people read them."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"
