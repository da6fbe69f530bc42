"""What can be seen of a pipeline: its stages in words, and its last step in figures and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch

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


def expected_bubble(schedule: Schedule, forward: Sequence[float], recompute: Sequence[bool]) -> float:
    """The bubble for stages whose F takes so long, I and W each the same again, with nothing lost in transfers.

    recompute: which stages run their forward again.
    """
    again = [seconds if repeats else 0.0 for seconds, repeats in zip(forward, recompute, strict=True)]
    simulation = schedule.simulate(Costs(list(forward), list(forward), list(forward), recompute=again))
    return summarize(simulation.events(), schedule.n_workers).bubble


@dataclass(frozen=True)
class Description:
    """All that is known of a pipeline without asking its workers; ``str`` of it is a table.

    split: None before the model was split; that happens with: the example or the first batch.
    recompute: per stage. dtype: that parameters and buffers are given, None where they keep their own.
    memory: bytes that each worker held after a step (see `WorkerState.memory`); None before the first.
    """

    name: str
    schedule: Schedule
    split: Split | None
    happens_with: str
    recompute: Sequence[bool]
    dtype: torch.dtype | None
    memory: Sequence[Mapping[str, int]] | None

    def __str__(self) -> str:
        lines = [self.name]
        if self.split is None:
            lines.append(
                f"not split yet: {self.happens_with} decides which layers, and so how many parameters and how much "
                "work, each stage gets"
            )
        else:
            lines.append(self.split.describe())
        lines += [self._worker(worker) for worker in range(self.schedule.n_workers)]
        return "\n".join([*lines, self._order()])

    def _worker(self, worker: int) -> str:
        stages = self.schedule.stages_of(worker)
        text = f"worker {worker}: stage {', '.join(map(str, stages))}"
        if self.memory is not None:
            return f"{text}; " + ", ".join(f"{what} {_size(count)}" for what, count in self.memory[worker].items())
        if self.split is None:
            return text
        held = {n for stage in stages for n in (*self.split.parameter_names(stage), *self.split.mirrored_names(stage))}
        parameters = sum(self._bytes(name) for name in held)
        trained = sum(self._bytes(name) for name in held if self.split.tensors[name].requires_grad)
        return f"{text}; parameters {_size(parameters)}, gradients {_size(trained)}, optimizer: seen after a step"

    def _bytes(self, name: str) -> int:
        assert self.split is not None
        info = self.split.tensors[name]
        changes = self.dtype is not None and (info.dtype.is_floating_point or info.dtype.is_complex)
        return info.numel * (self.dtype if self.dtype is not None and changes else info.dtype).itemsize

    def _order(self) -> str:
        schedule = self.schedule
        costs = [] if self.split is None else self.split.costs()
        known = sum(costs) > 0
        bubble = expected_bubble(schedule, costs if known else [1.0] * schedule.n_stages, self.recompute)
        text = f"schedule {schedule.name}: {schedule.microbatches} micro-batches, expected bubble {bubble:.1%}"
        if not known:
            text += " if all stages take equally long"
        text += f", at most {max(schedule.validate().peak_activations)} activations kept on a worker"
        repeating = [str(stage) for stage, repeats in enumerate(self.recompute) if repeats]
        return text + (f", recomputed in stage {', '.join(repeating)}" if repeating else "")


def _size(count: int) -> str:
    """Bytes as people read them."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"
